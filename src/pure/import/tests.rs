//! What is read, and that nothing is dropped.

mod kinds;
mod texts;

use super::*;

/// The manifest and what became of the parts, as `kubectl vm import -v` prints them.
fn shown(text: &str, format: Format) -> String {
    let vms = read(text, format, "file", Wish::default()).unwrap_or_else(|error| panic!("{error}"));
    let mut shown = String::new();
    for vm in vms {
        shown += &crate::yaml::unfolded(&vm.manifest).unwrap();
        for finding in &vm.findings {
            shown += &format!("{finding}\n");
        }
        for step in &vm.steps {
            shown += &format!("# {step}\n");
        }
    }
    shown
}

const LIBVIRT: &str = include_str!("tests/libvirt.xml");

#[test]
fn a_domain_of_libvirt() {
    insta::assert_snapshot!(shown(LIBVIRT, Format::Libvirt));
}

const PROXMOX: &str = "\
# made by hand%3A the shop
agent: 1
boot: order=scsi0;ide2;net0
bios: ovmf
ciuser: ann
cores: 2
cpu: x86-64-v2-AES,flags=+aes;-pcid
efidisk0: local-lvm:vm-101-disk-0,efitype=4m,pre-enrolled-keys=1,size=4M
hostpci0: 0000:01:00,pcie=1
ide2: local:iso/debian.iso,media=cdrom,size=600M
ide0: local-lvm:vm-101-cloudinit,media=cdrom
ipconfig0: ip=10.0.0.5/24,gw=10.0.0.1
machine: pc-i440fx-9.0
memory: 4096
name: shop
nameserver: 10.0.0.2
net0: virtio=BC:24:11:00:00:01,bridge=vmbr0,firewall=1,tag=10
onboot: 1
ostype: win11
scsi0: local-lvm:vm-101-disk-1,cache=writeback,iothread=1,size=32G,ssd=1
scsihw: virtio-scsi-single
smbios1: uuid=7b10d7af-b932-4c66-b2c3-3996152ec465
sockets: 2
sshkeys: ssh-ed25519%20AAAA%20ann%40desk%0A
tpmstate0: local-lvm:vm-101-disk-2,size=4M,version=v2.0
vga: qxl2
vmgenid: c773c261-d800-4348-9f5d-167fadd53cf8

[before]
memory: 2048
";

const KUBEVIRT: &str = "\
apiVersion: kubevirt.io/v1
kind: VirtualMachine
metadata:
  name: win
  labels: {app: win, kubevirt.io/os: windows}
spec:
  runStrategy: RerunOnFailure
  dataVolumeTemplates:
  - metadata: {name: root}
    spec:
      storage: {resources: {requests: {storage: 20Gi}}}
      source: {http: {url: 'https://example.org/a.qcow2'}}
  template:
    metadata: {labels: {app: win}}
    spec:
      nodeSelector: {disk: ssd}
      evictionStrategy: LiveMigrate
      terminationGracePeriodSeconds: 60
      domain:
        cpu: {cores: 2, maxSockets: 2, model: host-model}
        memory: {guest: 2Gi, maxGuest: 4Gi}
        firmware: {bootloader: {efi: {}}, uuid: 5d307ca9-b3ef-428c-8861-06e72d69f223}
        features: {acpi: {}, hyperv: {relaxed: {}, spinlocks: {spinlocks: 8191}}}
        devices:
          tpm: {persistent: true}
          disks:
          - {name: root, disk: {bus: sata}, bootOrder: 1}
          - {name: init, disk: {bus: virtio}}
          - {name: tools, cdrom: {bus: sata}}
          gpus: [{deviceName: nvidia.com/A, name: gpu1}]
          interfaces:
          - {name: default, masquerade: {}, model: e1000}
          - {name: second, bridge: {}}
      networks:
      - {name: default, pod: {}}
      - {name: second, multus: {networkName: net-a}}
      volumes:
      - {name: root, dataVolume: {name: root}}
      - {name: tools, containerDisk: {image: 'quay.io/kubevirt/virtio-container-disk'}}
      - name: init
        cloudInitNoCloud:
          userData: |
            #cloud-config
            password: x
";

const OVF: &str = r#"<?xml version="1.0"?>
<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData" xmlns:vmw="http://www.vmware.com/schema/ovf">
  <References><File ovf:href="shop-disk1.vmdk" ovf:id="file1" ovf:size="70144"/></References>
  <DiskSection><Info>Disks</Info>
    <Disk ovf:capacity="8" ovf:capacityAllocationUnits="byte * 2^30" ovf:diskId="vmdisk1" ovf:fileRef="file1"/>
  </DiskSection>
  <NetworkSection><Info>Networks</Info><Network ovf:name="VM Network"/></NetworkSection>
  <VirtualSystem ovf:id="shop">
    <Info>A VM</Info>
    <Name>Shop</Name>
    <OperatingSystemSection ovf:id="96"><Info>Debian</Info></OperatingSystemSection>
    <VirtualHardwareSection><Info>Hardware</Info>
      <Item><rasd:ElementName>4 CPUs</rasd:ElementName><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>4</rasd:VirtualQuantity><vmw:CoresPerSocket ovf:required="false">2</vmw:CoresPerSocket></Item>
      <Item><rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits><rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>2048</rasd:VirtualQuantity></Item>
      <Item><rasd:ElementName>SCSI</rasd:ElementName><rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceSubType>VirtualSCSI</rasd:ResourceSubType><rasd:ResourceType>6</rasd:ResourceType></Item>
      <Item><rasd:HostResource>ovf:/disk/vmdisk1</rasd:HostResource><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType></Item>
      <Item><rasd:Connection>VM Network</rasd:Connection><rasd:ResourceSubType>VmxNet3</rasd:ResourceSubType><rasd:ResourceType>10</rasd:ResourceType></Item>
      <Item><rasd:ElementName>Floppy</rasd:ElementName><rasd:ResourceType>14</rasd:ResourceType></Item>
      <vmw:Config ovf:required="false" vmw:key="firmware" vmw:value="efi"/>
      <vmw:Config ovf:required="false" vmw:key="tools.syncTimeWithHost" vmw:value="true"/>
    </VirtualHardwareSection>
    <ProductSection><Info>vApp</Info></ProductSection>
  </VirtualSystem>
</Envelope>
"#;

/// Two VMs, one of them in a collection within a collection.
const COLLECTION: &str = r#"<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData">
  <References>
    <File ovf:href="web.vmdk" ovf:id="f1"/>
    <File ovf:href="db.vmdk" ovf:id="f2"/>
    <File ovf:href="tools.iso" ovf:id="f3"/>
    <File ovf:href="old.vmdk" ovf:id="f4"/>
  </References>
  <DiskSection><Info>Disks</Info>
    <Disk ovf:capacity="8" ovf:capacityAllocationUnits="byte * 2^30" ovf:diskId="d1" ovf:fileRef="f1"/>
    <Disk ovf:capacity="9" ovf:capacityAllocationUnits="byte * 2^30" ovf:diskId="d2" ovf:fileRef="f2"/>
  </DiskSection>
  <VirtualSystemCollection ovf:id="shop">
    <Info>A shop</Info>
    <StartupSection><Info>The order</Info>
      <Item ovf:id="Web" ovf:order="2"/>
      <Item ovf:id="db" ovf:order="1" ovf:startDelay="5"/>
      <Item ovf:id="mail" ovf:order="0"/>
    </StartupSection>
    <VirtualSystem ovf:id="Web">
      <VirtualHardwareSection>
        <Item><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
        <Item><rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>1024</rasd:VirtualQuantity></Item>
        <Item><rasd:HostResource>ovf:/disk/d1</rasd:HostResource><rasd:ResourceType>17</rasd:ResourceType></Item>
        <Item><rasd:HostResource>ovf:/file/f3</rasd:HostResource><rasd:ResourceType>15</rasd:ResourceType></Item>
      </VirtualHardwareSection>
    </VirtualSystem>
    <VirtualSystemCollection ovf:id="inner">
      <Info>Data</Info>
      <VirtualSystem ovf:id="db">
        <VirtualHardwareSection>
          <Item><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>4</rasd:VirtualQuantity></Item>
          <Item><rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>2048</rasd:VirtualQuantity></Item>
          <Item><rasd:HostResource>ovf:/disk/d2</rasd:HostResource><rasd:ResourceType>17</rasd:ResourceType></Item>
          <Item><rasd:HostResource>ovf:/file/f3</rasd:HostResource><rasd:ResourceType>15</rasd:ResourceType></Item>
        </VirtualHardwareSection>
      </VirtualSystem>
    </VirtualSystemCollection>
  </VirtualSystemCollection>
</Envelope>
"#;

#[test]
fn a_configuration_of_proxmox() {
    insta::assert_snapshot!(shown(PROXMOX, Format::Proxmox));
}

#[test]
fn a_vm_of_kubevirt() {
    insta::assert_snapshot!(shown(KUBEVIRT, Format::Kubevirt));
}

#[test]
fn an_envelope_of_ovf() {
    insta::assert_snapshot!(shown(OVF, Format::Ovf));
}

#[test]
fn the_format_is_told_by_the_text() {
    for (text, format) in
        [(LIBVIRT, Format::Libvirt), (PROXMOX, Format::Proxmox), (KUBEVIRT, Format::Kubevirt), (OVF, Format::Ovf)]
    {
        assert_eq!(Format::of(text), Ok(format));
    }
}

/// The parts from the root to the first one whose key has this word.
fn path_to<'a>(item: &'a Item, word: &str) -> Option<Vec<&'a Item>> {
    if item.key.contains(word) {
        return Some(vec![item]);
    }
    let mut path = item.items().iter().find_map(|item| path_to(item, word))?;
    path.insert(0, item);
    Some(path)
}

/// Texts that have one more part, which nobody knows, in each place where there may be one.
fn with_an_unknown_part(text: &str, format: Format) -> Vec<String> {
    let inserted = |at: usize, what: &str| format!("{}{what}{}", &text[..at], &text[at..]);
    let mut texts = Vec::new();
    match format {
        Format::Libvirt | Format::Ovf => {
            for (at, _) in text.match_indices('<') {
                let name = text[at + 1..].find(|it: char| !it.is_ascii_alphanumeric() && !":_".contains(it)).unwrap();
                if name > 0 {
                    texts.push(inserted(at + 1 + name, " zzqq='1'"));
                    // A sibling before it, but not of the root.
                    if at > 0 && !text[at..].starts_with("<domain") && !text[at..].starts_with("<Envelope") {
                        texts.push(inserted(at, "<zzqq>1</zzqq>"));
                    }
                }
            }
        }
        Format::Proxmox => {
            for (at, _) in text.match_indices('\n') {
                texts.push(inserted(at + 1, "zzqq: 1\n"));
                let line = text[..at].rsplit('\n').next().unwrap();
                if line.contains('=') && line.contains(": ") {
                    texts.push(inserted(at, ",zzqq=1"));
                }
            }
        }
        Format::Kubevirt => {
            for (at, _) in text.match_indices('{').filter(|(at, _)| !text[*at..].starts_with("{}")) {
                texts.push(inserted(at + 1, "zzqq: 1, "));
            }
            let mut at = 0;
            for line in text.split_inclusive('\n') {
                let indent = line.len() - line.trim_start().len();
                let is_key = line.trim_start().split_once(':').is_some_and(|(key, _)| !key.contains([' ', '#', '\'']));
                if is_key && !line.contains("password") {
                    texts.push(inserted(at, &format!("{}zzqq: 1\n", " ".repeat(indent))));
                }
                at += line.len();
            }
        }
    }
    texts
}

#[test]
fn nothing_is_dropped_silently() {
    for (text, format) in [
        (LIBVIRT, Format::Libvirt),
        (PROXMOX, Format::Proxmox),
        (KUBEVIRT, Format::Kubevirt),
        (OVF, Format::Ovf),
        (COLLECTION, Format::Ovf),
    ] {
        let texts = with_an_unknown_part(text, format);
        assert!(texts.len() > 10, "{format:?}: {}", texts.len());
        for text in texts {
            let (sources, _) = sources(&text, format).unwrap_or_else(|error| panic!("{error}: {text}"));
            let mut count = 0;
            for source in &sources {
                let mut draft = Draft::default();
                read_one(source, format, &mut draft).unwrap();
                let vm = vm(source, &draft, format, "file".into(), Wish::default());
                let Some(path) = path_to(source, "zzqq") else { continue };
                count += 1;
                let is_listed = |item: &Item, grades: &[Grade]| {
                    vm.findings
                        .iter()
                        .any(|it| it.what == item.label && it.lines.contains(&item.line) && grades.contains(&it.grade))
                };
                let all = [Grade::Same, Grade::Changed, Grade::LeftOut];
                let (last, around) = path.split_last().unwrap();
                let listed = is_listed(last, &all) || around.iter().any(|item| is_listed(item, &all[1..]));
                assert!(listed, "{format:?}: {}: it is dropped silently: {:#?}", last.label, vm.findings);
            }
            assert!(count > 0, "it is not read: {text}");
        }
    }
}

#[test]
fn a_topology_of_any_numbers_is_kept_or_refused() {
    for (levels, is_kept) in [
        ([2, 1, 2, 1], true),
        ([64, 1, 2, 8], true),
        ([64, 1, 4, 8], false),
        ([64, 64, 1024, 8], false),
        ([0, 1, 1, 1], false),
        ([u64::MAX, 1, 2, 1], false),
        ([2, 1, u64::MAX, u64::MAX], false),
    ] {
        let [sockets, dies, cores, threads] = levels;
        assert_eq!(Draft::default().topology(sockets, dies, cores, threads), is_kept, "{levels:?}");
    }
    let many = KUBEVIRT.replace("cores: 2, maxSockets: 2", "cores: 9223372036854775807, sockets: 3, threads: 9");
    assert_ne!(many, KUBEVIRT);
    read(&many, Format::Kubevirt, "file", Wish::default()).unwrap();
}

#[test]
fn what_others_wrote_is_one_word_of_a_printed_command() {
    let convert = |text: &str, format: Format| -> String {
        let steps = read(text, format, "file", Wish::default()).unwrap().remove(0).steps;
        let found = steps.iter().find(|step| step.contains("qemu-img convert") || step.contains("< ...")).unwrap();
        found.trim_start().to_owned()
    };
    let proxmox = |volume: &str| format!("name: shop\nmemory: 2048\nscsi0: {volume},size=1G\n");
    let libvirt = |file: &str| {
        let disk = format!("<disk device='disk'><source file=\"{file}\"/><target dev='vda' bus='virtio'/></disk>");
        format!("<domain type='kvm'><name>shop</name><devices>{disk}</devices></domain>")
    };
    let kubevirt = |volume: &str| {
        format!(
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {{name: shop}}\nspec:\n  template:\n    spec:\n      \
             domain:\n        devices: {{disks: [{{name: root, disk: {{bus: virtio}}}}]}}\n      \
             volumes: [{{name: root, {volume}}}]\n"
        )
    };
    for (text, format, expected) in [
        (
            proxmox("x) $(rm -rf ~/prod)"),
            Format::Proxmox,
            r#"qemu-img convert -O raw "$(pvesm path 'x) $(rm -rf ~/prod)')" scsi0.raw"#,
        ),
        (proxmox("it's"), Format::Proxmox, r#"qemu-img convert -O raw "$(pvesm path 'it'\''s')" scsi0.raw"#),
        (proxmox("/dev/zvol/x"), Format::Proxmox, "qemu-img convert -O raw /dev/zvol/x scsi0.raw"),
        (
            libvirt("$(pvesm path x) $(rm -rf ~/prod)"),
            Format::Libvirt,
            "qemu-img convert -O raw '$(pvesm path x) $(rm -rf ~/prod)' vda.raw",
        ),
        (libvirt("the disk"), Format::Libvirt, "qemu-img convert -O raw 'the disk' vda.raw"),
        (libvirt("-o.img"), Format::Libvirt, "qemu-img convert -O raw ./-o.img vda.raw"),
        (
            kubevirt("hostDisk: {path: /data/a b.img, type: Disk, capacity: 1Gi}"),
            Format::Kubevirt,
            "qemu-img convert -O raw '/data/a b.img' root.raw   # on the node",
        ),
        (
            kubevirt("persistentVolumeClaim: {claimName: a}"),
            Format::Kubevirt,
            "kubectl exec -i shop-import -- dd of=/dev/root bs=1M < ...   # the claim a",
        ),
    ] {
        assert_eq!(convert(&text, format), expected, "{text}");
    }
}

#[test]
fn the_pod_that_fills_disks_has_a_name_that_is_a_label_too() {
    for (name, pod) in [
        ("a".to_owned(), "a-import".to_owned()),
        ("x".repeat(56), format!("{}-import", "x".repeat(56))),
        ("x".repeat(57), format!("{}-import", "x".repeat(56))),
        (format!("{}-b", "x".repeat(55)), format!("{}-import", "x".repeat(55))),
        ("x".repeat(250), format!("{}-import", "x".repeat(56))),
    ] {
        let wish = Wish { name: Some(&name), ..Wish::default() };
        let vm = read("name: a\nscsi0: local:a,size=1G\n", Format::Proxmox, "file", wish).unwrap().remove(0);
        let commands = [
            format!("  kubectl run {pod} --image=busybox --restart=Never --overrides='"),
            format!("  kubectl exec -i {pod} -- dd of=/dev/scsi0 bs=1M < scsi0.raw"),
            format!("  kubectl delete pod {pod}"),
            format!("  kubectl vm start {name}"),
        ];
        for command in commands {
            assert!(vm.steps.contains(&command), "{command}: {:#?}", vm.steps);
        }
        assert!(vm.steps.concat().contains(&format!("\"{name}-scsi0-disk\"")), "{:#?}", vm.steps);
    }
}

#[test]
fn a_namespace_that_can_not_be_is_not_taken() {
    let (longest, longer) = ("x".repeat(63), "x".repeat(64));
    for (name, is_name) in [
        ("vms", true),
        ("a-1", true),
        (longest.as_str(), true),
        ("", false),
        ("-a", false),
        ("a-", false),
        ("A", false),
        ("a.b", false),
        ("x; rm -rf ~", false),
        (longer.as_str(), false),
    ] {
        assert_eq!(crate::render::valid::is_dns_label(name), is_name, "{name}");
    }
    let imported = |namespace: &str, wish: Option<&str>| {
        let text = KUBEVIRT.replace("  name: win\n", &format!("  name: win\n  namespace: '{namespace}'\n"));
        let text = text.replace("dataVolume: {name: root}", "persistentVolumeClaim: {claimName: root}");
        let wish = Wish { namespace: wish, ..Wish::default() };
        read(&text, Format::Kubevirt, "file", wish).unwrap().remove(0)
    };
    let well = imported("vms", None);
    assert_eq!(well.manifest["metadata"]["namespace"], "vms");
    assert!(well.steps.contains(&"  kubectl delete pod win-import -n vms".to_owned()), "{:#?}", well.steps);
    let badly = imported("x; rm -rf ~", None);
    assert_eq!(badly.manifest["metadata"].get("namespace"), None);
    assert!(badly.steps.contains(&"  kubectl delete pod win-import".to_owned()), "{:#?}", badly.steps);
    let found = badly.findings.iter().find(|finding| finding.what == "metadata.namespace").unwrap();
    assert_eq!(found.grade, Grade::LeftOut);
    // What the person says is checked elsewhere.
    let quoted = imported("vms", Some("a b"));
    assert!(quoted.steps.contains(&"  kubectl vm start win -n 'a b'".to_owned()), "{:#?}", quoted.steps);
}
