//! What a moved guest needs: its cards' names, its firmware's variables, room for QEMU, its data for cloud-init, its clock, its disks' numbers.

use serde_json::{Value, json};

use super::*;

/// The only VM of a text.
fn vm(text: &str) -> Imported {
    let format = Format::of(text).unwrap_or_else(|error| panic!("{error}"));
    read(text, format, "file", Wish::default()).unwrap_or_else(|error| panic!("{error}")).remove(0)
}

/// What is said of a text, as lines.
fn said(vm: &Imported) -> String {
    vm.findings.iter().map(|finding| format!("{finding}\n")).collect()
}

fn refused(text: &str) -> (usize, String) {
    let format = Format::of(text).unwrap_or_else(|error| panic!("{error}"));
    let error = read(text, format, "file", Wish::default()).unwrap_err();
    (error.at.0, error.message)
}

#[track_caller]
fn has(vm: &Imported, line: usize, what: &str, words: &[&str]) {
    let of_line =
        |finding: &&Finding| finding.lines.contains(&line) && finding.what == what && finding.grade != Grade::Same;
    let found = vm.findings.iter().filter(of_line).find(|finding| words.iter().all(|word| finding.why.contains(word)));
    assert!(found.is_some(), "{line} {what} {words:?}\n{}", said(vm));
}

/// A VM of KubeVirt with this below `spec.template.spec.domain`, and these volumes.
fn kubevirt(domain: &str, disks: &str, volumes: &str) -> String {
    format!(
        "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {{name: web, namespace: shop}}\nspec:\n  runStrategy: Always\n  template:\n    spec:\n      \
         domain: {{devices: {{disks: [{disks}]}}, {domain}}}\n      volumes:\n{volumes}"
    )
}

#[test]
fn each_card_has_a_line_with_both_names() {
    let proxmox =
        vm("memory: 512\nnet0: virtio=02:00:00:00:00:01,bridge=vmbr0\nnet1: virtio=02:00:00:00:00:02,bridge=vmbr1\n");
    has(&proxmox, 2, "net0", &["enp0s16f0", "(before: ens18)"]);
    has(&proxmox, 3, "net1", &["enp0s16f1", "(before: ens19)"]);
    let q35 = vm("machine: pc-q35-9.0\nmemory: 512\nnet2: virtio=02:00:00:00:00:01,bridge=vmbr0\n");
    has(&q35, 3, "net2", &["(before: enp6s20)"]);
    let address = |bus: &str, slot: &str, function: &str| {
        format!(
            "<domain type='kvm'><devices><interface type='bridge'><source bridge='br1'/><address type='pci' bus='{bus}' slot='{slot}' \
             function='{function}'/></interface></devices></domain>"
        )
    };
    for (bus, slot, function, name) in [
        ("0x01", "0x00", "0x0", "enp1s0"),
        ("0x00", "0x03", "0x0", "ens3"),
        ("0x0a", "0x01", "0x2", "enp10s1f2"),
        ("no number", "0x00", "0x0", "another name"),
    ] {
        has(&vm(&address(bus, slot, function)), 1, "<interface>", &["enp0s16f0", &format!("(before: {name})")]);
    }
    has(
        &vm(&kubevirt("memory: {guest: 1Gi}", "", "        []\n")),
        8,
        "spec.template.spec.domain",
        &["(before: enp1s0)"],
    );
}

#[test]
fn beside_a_bridge_other_networks_are_left_out() {
    let found = vm("memory: 512\nnet0: virtio=02:00:00:00:00:01\nnet1: virtio=02:00:00:00:00:02,bridge=vmbr1\n");
    assert_eq!(found.manifest["spec"]["vm"]["networks"].as_array().unwrap().len(), 1);
    let left_out = found.findings.iter().find(|it| it.what == "net0").unwrap();
    assert!(left_out.grade == Grade::LeftOut && left_out.why.contains("bridge of its node"), "{}", said(&found));
    // A running domain also says the bridge of libvirt's network.
    let found = vm(
        "<domain type='kvm'><devices><interface type='network'><source network='default' bridge='virbr0'/></interface></devices></domain>",
    );
    assert_eq!(found.manifest["spec"]["vm"]["networks"], json!([{ "pod": {} }]));
}

#[test]
fn data_for_cloud_init_that_name_a_card_find_it_by_its_address() {
    let volumes = "        - name: ci\n          cloudInitNoCloud:\n            networkData: |\n              version: 2\n              ethernets:\n                \
                   enp1s0: {dhcp4: true}\n";
    let found = vm(&kubevirt("memory: {guest: 1Gi}", "{name: ci, disk: {bus: virtio}}", volumes));
    let card = &found.manifest["spec"]["cloudInit"]["networkConfig"]["ethernets"]["enp1s0"];
    assert_eq!((&card["set-name"], &card["dhcp4"]), (&json!("enp1s0"), &json!(true)));
    // The card has that address.
    assert_eq!(card["match"]["macaddress"], found.manifest["spec"]["vm"]["networks"][0]["pod"]["mac"]);
    has(&found, 12, "spec.template.spec.volumes[0].cloudInitNoCloud.networkData", &["match, set-name"]);
    let found = vm("memory: 512\nnet0: virtio=02:00:00:00:00:0A,bridge=vmbr0\nipconfig0: ip=dhcp\n");
    let card = &found.manifest["spec"]["cloudInit"]["networkConfig"]["ethernets"]["net0"];
    assert_eq!(*card, json!({ "match": { "macaddress": "02:00:00:00:00:0a" }, "set-name": "ens18", "dhcp4": true }));
}

#[test]
fn variables_of_a_firmware_are_converted_cut_or_given_up() {
    let steps = |disk: &str| {
        let found = vm(&format!("bios: ovmf\nmemory: 512\nname: a\n{disk}"));
        (found.steps.join("\n"), said(&found))
    };
    let (commands, _) = steps("efidisk0: fast:105/vm-105-disk-0.qcow2,efitype=4m,size=528K\n");
    assert!(
        commands
            .contains("qemu-img convert -f qcow2 -O raw \"$(pvesm path 'fast:105/vm-105-disk-0.qcow2')\" fw-vars.raw"),
        "{commands}"
    );
    assert!(
        commands.contains("  head -c 540672 fw-vars.raw | kubectl exec -i a-import -- sh -c 'cat > /data/fw-vars.fd'"),
        "{commands}"
    );
    let (commands, _) = steps("efidisk0: local-lvm:vm-130-disk-0,efitype=4m,size=4M\n");
    assert!(
        commands.contains("  head -c 540672 \"$(pvesm path 'local-lvm:vm-130-disk-0')\" | kubectl exec"),
        "{commands}"
    );
    // Without a type it is the small one, also on a volume of 4 MiB.
    for small in [
        "efidisk0: zfs:vm-131-disk-0,size=128K\n",
        "efidisk0: lvm:vm-110-disk-0,size=4M\n",
        "efidisk0: lvm:a,efitype=2m\n",
    ] {
        let (commands, said) = steps(small);
        assert!(
            !commands.contains("fw-vars") && said.contains("can't be kept: they are of a firmware of 2 MiB"),
            "{commands}{said}"
        );
    }
    let domain = |os: &str| vm(&format!("<domain type='kvm'><name>a</name><os>{os}</os></domain>"));
    let found = domain(
        "<loader type='pflash' format='qcow2'>/usr/share/OVMF_CODE_4M.qcow2</loader><nvram format='qcow2'>/nvram/a_VARS.qcow2</nvram>",
    );
    assert!(
        found
            .steps
            .iter()
            .any(|step| step.contains("qemu-img convert -f qcow2 -O raw /nvram/a_VARS.qcow2 fw-vars.raw"))
    );
    let found = domain("<loader type='pflash'>/usr/share/OVMF/OVMF_CODE.fd</loader><nvram>/nvram/a_VARS.fd</nvram>");
    assert!(found.steps.is_empty() && said(&found).contains("can't be kept"), "{}", said(&found));
}

#[test]
fn a_limit_of_memory_gets_room_for_qemu() {
    let of = |domain: &str| {
        let found = vm(&kubevirt(domain, "", "        []\n"));
        (found.manifest["spec"]["resources"]["limits"]["memory"].clone(), said(&found))
    };
    let (limit, said) = of("memory: {guest: 4Gi}, resources: {limits: {memory: 4Gi}}");
    assert!(limit == "4272Mi" && said.contains("because QEMU needs about 176Mi"), "{limit} {said}");
    let (limit, _) = of("memory: {guest: 3996Mi}, cpu: {cores: 2}, resources: {limits: {memory: 4Gi}}");
    assert_eq!(limit, "4180Mi");
    let (limit, said) = of("memory: {guest: 4Gi}, resources: {limits: {memory: 5Gi}}");
    assert!(limit == "5Gi" && !said.contains("QEMU needs"), "{limit} {said}");
    // What the manager would say of the VM.
    let text = kubevirt("memory: {guest: 4Gi}, resources: {limits: {memory: 4Gi}}", "", "        []\n");
    let made = serde_json::from_value(vm(&text).manifest).unwrap();
    assert_eq!(crate::advice::advice(&made), []);
}

#[test]
fn data_in_base64_are_kept_and_ignition_is_not() {
    let init = |line: &str| {
        let volumes = format!("        - name: ci\n          cloudInitNoCloud: {{{line}}}\n");
        vm(&kubevirt("memory: {guest: 1Gi}", "{name: ci, disk: {}}", &volumes))
    };
    let user_data = |found: &Imported| found.manifest["spec"]["cloudInit"]["userData"].clone();
    let found = init("userDataBase64: I2Nsb3VkLWNvbmZpZwpwYWNrYWdlczogW3ZpbV0K");
    assert_eq!(user_data(&found), "#cloud-config\npackages: [vim]\n");
    // The same, compressed.
    let found = init("userDataBase64: H4sIAAAAAAACA1NOzskvTdFNzs9Ly0znKkhMzk5MTy22Uoguy8yN5QIAMfMCuB4AAAA=");
    assert_eq!(user_data(&found), "#cloud-config\npackages: [vim]\n");
    let found = init("userDataBase64: '?'");
    has(&found, 11, "spec.template.spec.volumes[0].cloudInitNoCloud.userDataBase64", &["no base64"]);
    let found = init("userData: '{\"ignition\": {\"version\": \"3.2.0\"}}'");
    assert_eq!(user_data(&found), Value::Null);
    has(&found, 11, "spec.template.spec.volumes[0].cloudInitNoCloud.userData", &["-fw_cfg"]);
    assert_eq!(found.count(Grade::LeftOut), 1);
    let found = init("userData: \"#cloud-config\\npackage: [vim]\\n\"");
    has(&found, 11, "spec.template.spec.volumes[0].cloudInitNoCloud.userData", &["line 2 of it", "no key \"package\""]);
    let domain = vm("<domain type='kvm'><sysinfo type='fwcfg'><entry name='opt/x' file='/x'/></sysinfo></domain>");
    has(&domain, 1, "<sysinfo>", &["-fw_cfg"]);
}

#[test]
fn the_former_instance_id_of_a_copied_guest_is_offered() {
    let volumes = "        - {name: root, persistentVolumeClaim: {claimName: web-root}}\n        - name: ci\n          cloudInitNoCloud: {userData: \"#cloud-config\\n\"}\n";
    let found = vm(&kubevirt("memory: {guest: 1Gi}", "{name: root, disk: {}}, {name: ci, disk: {}}", volumes));
    assert_eq!(found.manifest["spec"]["cloudInit"]["metaData"]["instance-id"], "web.shop");
    // The image of a new guest has no former one.
    let new = volumes.replace("persistentVolumeClaim: {claimName: web-root}", "containerDisk: {image: 'quay.io/x:1'}");
    let found = vm(&kubevirt("memory: {guest: 1Gi}", "{name: root, disk: {}}, {name: ci, disk: {}}", &new));
    assert_eq!(found.manifest["spec"]["cloudInit"]["metaData"], Value::Null);
    let found = vm("memory: 512\nciuser: ann\nscsi0: local:vm-1-disk-0,size=1G\n");
    has(&found, 2, "ciuser", &["runs anew", "cloud-init query instance_id"]);
}

#[test]
fn a_clock_of_local_time_has_a_zone_or_asks_for_it() {
    let found = vm("memory: 512\nostype: win11\n");
    assert_eq!(found.manifest["spec"]["vm"]["rtcBase"], "localtime");
    has(&found, 2, "ostype", &["rtcTimezone"]);
    has(&vm("memory: 512\nlocaltime: 1\n"), 2, "localtime", &["rtcTimezone"]);
    let clock = |attributes: &str| vm(&format!("<domain type='kvm'><clock {attributes}/></domain>"));
    let found = clock("offset='timezone' timezone='Europe/Paris'");
    assert_eq!(found.manifest["spec"]["vm"]["rtcTimezone"], "Europe/Paris");
    has(&clock("offset='localtime'"), 1, "<clock offset>", &["rtcTimezone"]);
    let found = vm(&kubevirt("memory: {guest: 1Gi}, clock: {timezone: Asia/Tokyo}", "", "        []\n"));
    assert_eq!(found.manifest["spec"]["vm"]["rtcTimezone"], "Asia/Tokyo");
}

#[test]
fn serial_numbers_classes_and_empty_drives_are_kept() {
    let found = vm(
        "memory: 512\nscsi0: local:a,size=1G,serial=WD-1234\nscsi1: local:b,size=1G,serial=much%20too%20long%20for%20a%20disk\n",
    );
    assert_eq!(found.manifest["spec"]["vm"]["disks"][0]["serial"], "WD-1234");
    has(&found, 3, "scsi1 serial", &["up to 20"]);
    let found = vm(
        "<domain type='kvm'><devices><disk device='disk'><target dev='vda'/><serial>data01</serial></disk></devices></domain>",
    );
    assert_eq!(found.manifest["spec"]["vm"]["disks"][0]["serial"], "data01");
    let text = "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {name: web}\nspec:\n  dataVolumeTemplates:\n    - metadata: {name: web}\n      spec:\n        \
                sourceRef: {kind: DataSource, name: fedora}\n        storage: {storageClassName: fast, resources: {requests: {storage: 30Gi}}}\n  template:\n    spec:\n      \
                domain: {devices: {disks: [{name: root, disk: {}, serial: S1}, {name: cd, cdrom: {bus: sata}}]}, memory: {guest: 1Gi}}\n      volumes:\n        - {name: root, \
                dataVolume: {name: web}}\n";
    let disks = vm(text).manifest["spec"]["vm"]["disks"].clone();
    assert_eq!(disks[0]["volumeClaimTemplate"]["spec"]["storageClassName"], "fast");
    assert_eq!((&disks[0]["serial"], &disks[1]["cdrom"]["image"]), (&json!("S1"), &json!("")));
    let claims = r#"[{"metadata":{"name":"web-0"},"spec":{"resources":{"requests":{"storage":"40Gi"}},"storageClassName":"longhorn-x"}}]"#;
    let text = kubevirt(
        "memory: {guest: 1Gi}",
        "{name: disk-0, disk: {}}",
        "        - {name: disk-0, persistentVolumeClaim: {claimName: web-0}}\n",
    )
    .replace("namespace: shop", &format!("annotations: {{harvesterhci.io/volumeClaimTemplates: '{claims}'}}"));
    let found = vm(&text);
    let spec = &found.manifest["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"];
    assert_eq!(
        (&spec["storageClassName"], &spec["resources"]["requests"]["storage"]),
        (&json!("longhorn-x"), &json!("40Gi"))
    );
    assert_eq!(found.manifest["metadata"]["annotations"], Value::Null);
}

#[test]
fn what_nobody_can_read_is_refused_with_its_line() {
    for (text, line, words) in [
        ("<domain type='kvm'>\n<vcpu>{{vcpu}}</vcpu></domain>", 2, "is no number of CPUs: this is a template"),
        ("<domain type='kvm'>\n<vcpu>two</vcpu></domain>", 2, "is no number of CPUs"),
        ("<domain type='kvm'>\n<vcpu current='x'>2</vcpu></domain>", 2, "is no number of CPUs"),
        ("<domain type='kvm'>\n<memory>much</memory></domain>", 2, "is no size of memory"),
        ("<domain type='kvm'>\n<memory unit='bushels'>1</memory></domain>", 2, "is no size of memory"),
        ("memory: lots\n", 1, "is no size in MiB"),
        ("cores: 1.5\nmemory: 512\n", 1, "is no number of CPUs"),
        (
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata:\n  name: {{ .Values.name }}\nspec: {}\n",
            4,
            "a template that nobody has filled in",
        ),
        (
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata:\n  name: {{ name }}\nspec: {}\n",
            4,
            "a template that nobody has filled in",
        ),
        (
            "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata: {name: \"{{ .Release.Name }}\"}\nspec: {}\n",
            3,
            "a template that nobody",
        ),
        ("memory: {{ .Values.memory }}\n", 1, "a template that nobody"),
    ] {
        let (at, message) = refused(text);
        assert!(at == line && message.contains(words), "{text}: {at}: {message}");
    }
    for domain in [
        "cpu: {cores: many}, memory: {guest: 1Gi}",
        "cpu: {sockets: -1}, memory: {guest: 1Gi}",
        "memory: {guest: much}",
        "resources: {requests: {cpu: x}}, memory: {guest: 1Gi}",
    ] {
        let (at, message) = refused(&kubevirt(domain, "", "        []\n"));
        assert!(at == 8 && message.contains("is no "), "{domain}: {at}: {message}");
    }
    // A number with a fraction is a number.
    let found = vm(&kubevirt("resources: {requests: {cpu: 1.5, memory: 1Gi}}", "", "        []\n"));
    assert_eq!(found.manifest["spec"]["vm"]["maximumCpus"], 2);
    let found = vm("<domain type='kvm'>\n<uuid>a973434f-2f6e-4esa-8949-76a7a98569e1</uuid></domain>");
    has(&found, 2, "<uuid>", &["is no UUID"]);
    // A key without a text.
    let found = vm("description:\nmemory: 512\nname: a\n");
    assert_eq!(found.name, "a");
}
