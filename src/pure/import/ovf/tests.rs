//! What an envelope may say in several ways, or in a way that is not understood.

use serde_json::{Value, json};

use super::{mac, unit};
use crate::{
    exchange::Grade,
    import::{self, Format, Imported, Wish, source::SourceError},
};

const ITEM: &str = "<VirtualSystem/VirtualHardwareSection/Item>";

/// An envelope: line 2 has what is before the VM, line 5 the hardware, line 7 what is after it.
fn envelope(before: &str, hardware: &str, after: &str) -> String {
    format!(
        "<Envelope xmlns:ovf='o' xmlns:rasd='r' xmlns:vmw='v' xmlns:vbox='b'>\n{before}\n<VirtualSystem ovf:id='shop'>\n\
         <VirtualHardwareSection>\n{hardware}\n</VirtualHardwareSection>\n{after}\n</VirtualSystem>\n</Envelope>"
    )
}

/// An item of hardware: `name=value` are its parts, and `@name=value` its attributes.
fn item(kind: u64, parts: &[&str]) -> String {
    let (mut attributes, mut elements) = (String::new(), format!("<rasd:ResourceType>{kind}</rasd:ResourceType>"));
    for (name, value) in parts.iter().map(|part| part.split_once('=').unwrap()) {
        match name.strip_prefix('@') {
            Some(name) => attributes += &format!(" ovf:{name}='{value}'"),
            None => elements += &format!("<rasd:{name}>{value}</rasd:{name}>"),
        }
    }
    format!("<Item{attributes}>{elements}</Item>")
}

/// A CPU and 2 GiB.
fn computer() -> String {
    item(3, &["VirtualQuantity=1"]) + &item(4, &["VirtualQuantity=2048"])
}

fn read(text: &str) -> Result<Imported, SourceError> {
    import::read(text, Format::Ovf, "file", Wish::default()).map(|mut vms| vms.remove(0))
}

fn imported(text: &str) -> Imported {
    read(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn machine(vm: &Imported) -> &Value {
    &vm.manifest["spec"]["vm"]
}

/// The names of the disks, and `cd` for a CD drive.
fn drives(vm: &Imported) -> Vec<String> {
    let disks = machine(vm)["disks"].as_array().unwrap();
    disks.iter().map(|disk| import::draft::disk_name(disk).unwrap_or("cd").to_owned()).collect()
}

/// A part has this grade, and these words in its reason.
#[track_caller]
fn says(vm: &Imported, what: &str, grade: Grade, words: &str) {
    let found = vm.findings.iter().any(|it| it.what == what && it.grade == grade && it.why.contains(words));
    assert!(found, "{what}: {grade}: {words}: {:#?}", vm.findings);
}

/// No line says that this part is the same.
#[track_caller]
fn is_seen(vm: &Imported, what: &str) {
    assert!(vm.findings.iter().all(|it| it.what != what || it.grade != Grade::Same), "{what}: {:#?}", vm.findings);
}

#[test]
fn units_are_factors() {
    for (text, factor) in [
        ("", Some(7)),
        ("byte", Some(1)),
        ("byte * 2^20", Some(1 << 20)),
        ("Bytes*2^30", Some(1 << 30)),
        ("byte * 10^6", Some(1_000_000)),
        ("byte * 2^20 * 4", Some(4 << 20)),
        ("byte * 1048576", Some(1 << 20)),
        ("MegaBytes", Some(1 << 20)),
        ("gigabyte", Some(1 << 30)),
        ("GB", Some(1 << 30)),
        ("byte * 2^64", None),
        ("byte * 2^-1", None),
        ("byte * ", None),
        ("blocks", None),
        ("hertz * 10^6", None),
    ] {
        assert_eq!(unit(text, 7), factor, "{text}");
    }
}

#[test]
fn a_mac_address_gets_its_colons() {
    for (text, expected) in [
        ("00:50:56:9a:12:34", Some("00:50:56:9a:12:34")),
        ("0800271A2B3C", Some("08:00:27:1A:2B:3C")),
        ("00-50-56-9a-12-34", Some("00:50:56:9a:12:34")),
        ("0100271A2B3C", None),
        ("0800271A2B3", None),
        ("7", None),
        ("", None),
        ("0800271A2B3é", None),
    ] {
        assert_eq!(mac(text).as_deref(), expected, "{text}");
    }
}

#[test]
fn what_is_no_number_of_cpus_and_no_memory_is_refused_with_its_line() {
    for (cpus, memory, units, complaint) in [
        ("2", "2048", "byte * 2^20", None),
        ("2", "2", "GigaBytes", None),
        ("-2", "2048", "", Some("\"-2\" is no number of CPUs")),
        ("2.0", "2048", "", Some("\"2.0\" is no number of CPUs")),
        ("two", "2048", "", Some("\"two\" is no number of CPUs")),
        ("0", "2048", "", Some("\"0\" is no number of CPUs")),
        ("2000", "2048", "", Some("a VM has 1 to 1024")),
        ("99999999999999999999999", "2048", "", Some("is no number of CPUs")),
        ("", "2048", "", Some("\"\" is no number of CPUs")),
        ("2", "-1", "", Some("\"-1\" in AllocationUnits \"\" is no memory")),
        ("2", "512.5", "MegaBytes", Some("\"512.5\" in AllocationUnits \"MegaBytes\" is no memory")),
        ("2", "0", "", Some("is no memory")),
        ("2", "99999999999999", "", Some("is no memory")),
        ("2", "2", "loaves", Some("AllocationUnits \"loaves\" is no memory")),
        ("2", "", "", Some("is no memory")),
    ] {
        let [cpus, memory] = [cpus, memory].map(|number| format!("VirtualQuantity={number}"));
        let hardware = item(3, &[&cpus]) + &item(4, &[&memory, &format!("AllocationUnits={units}")]);
        match (read(&envelope("", &hardware, "")), complaint) {
            (Ok(vm), None) => {
                assert_eq!((&machine(&vm)["maximumCpus"], &machine(&vm)["maximumRam"]), (&json!(2), &json!("2Gi")));
            }
            (Err(error), Some(complaint)) => {
                assert_eq!(error.at.0, 5, "{error}");
                assert!(error.message.contains(complaint), "{complaint}: {error}");
            }
            (found, _) => panic!("{cpus} {memory} {units}: {found:?}"),
        }
    }
    let vm = imported(&envelope("", "", ""));
    says(&vm, "<VirtualSystem/VirtualHardwareSection>", Grade::Changed, "the VM has 1 CPU and 1G");
    let vm = imported("<Envelope><VirtualSystem/></Envelope>");
    says(&vm, "<VirtualSystem>", Grade::Changed, "there is no <VirtualHardwareSection>");
}

#[test]
fn a_topology_that_a_vm_can_not_have_is_told() {
    for (cpus, cores, topology) in [
        ("8", "4", Some(json!({ "sockets": 2, "coresPerDie": 4 }))),
        ("8", "8", None),
        ("8", "0", None),
        ("8", "3", None),
        ("128", "1", None),
    ] {
        let cpus = format!("VirtualQuantity={cpus}");
        let vm = imported(&envelope("", &item(3, &[&cpus, &format!("CoresPerSocket={cores}")]), ""));
        assert_eq!(machine(&vm).get("cpuTopology"), topology.as_ref(), "{cpus} {cores}");
        let part = "<VirtualSystem/VirtualHardwareSection/Item/CoresPerSocket>";
        let is_told = vm.findings.iter().any(|it| it.what == part && it.grade == Grade::Changed);
        assert_eq!(is_told, ["3", "1"].contains(&cores), "{cpus} {cores}");
    }
}

#[test]
fn the_default_configuration_and_the_normal_value_count() {
    let options = |default: &str| {
        format!(
            "<DeploymentOptionSection><Info/><Configuration ovf:id='small'/><Configuration ovf:id='big' ovf:default='{default}'/>\
             </DeploymentOptionSection>"
        )
    };
    let hardware = [
        item(3, &["InstanceID=1", "VirtualQuantity=2"]),
        item(3, &["InstanceID=1", "VirtualQuantity=16", "@configuration=big huge"]),
        item(4, &["InstanceID=2", "VirtualQuantity=1024", "@bound=min"]),
        item(4, &["InstanceID=2", "VirtualQuantity=2048", "@bound=normal"]),
        item(4, &["InstanceID=2", "VirtualQuantity=9000", "@bound=max"]),
        item(10, &["InstanceID=3", "@configuration=small"]),
    ]
    .concat();
    for (default, cpus, networks) in [("true", 16, 0), ("TRUE", 16, 0), ("false", 2, 1)] {
        let vm = imported(&envelope(&options(default), &hardware, ""));
        let networks_found = machine(&vm)["networks"].as_array().unwrap().len();
        assert_eq!(machine(&vm)["maximumCpus"], json!(cpus), "{default}");
        assert_eq!((&machine(&vm)["maximumRam"], networks_found), (&json!("2Gi"), networks), "{default}");
        says(&vm, "<DeploymentOptionSection/Configuration>", Grade::LeftOut, "another configuration");
        says(&vm, ITEM, Grade::LeftOut, "configuration");
        says(&vm, ITEM, Grade::LeftOut, "the bound \"min\" of a range");
        says(&vm, ITEM, Grade::LeftOut, "the bound \"max\" of a range");
    }
}

#[test]
fn the_first_hardware_counts() {
    let second = format!("<VirtualHardwareSection>{}</VirtualHardwareSection>", item(3, &["VirtualQuantity=64"]));
    let vm = imported(&envelope("", &computer(), &second));
    assert_eq!(machine(&vm)["maximumCpus"], json!(1));
    says(&vm, "<VirtualSystem/VirtualHardwareSection>", Grade::LeftOut, "the first one counts");
}

#[test]
fn a_disk_that_is_not_understood_is_no_empty_disk() {
    let file = "<References><File ovf:id='f' ovf:href='a.vmdk'/></References>";
    let unknown = "it has 10Gi, because its size is not understood";
    for (files, disk, resource, size, part, grade, words) in [
        (file, "capacity='8' FILE", "ovf:/disk/d", "8Gi", "<DiskSection/Disk>", Grade::Changed, "has to be copied"),
        (file, "capacity='8'", "/disk/d", "8Gi", "<DiskSection/Disk>", Grade::Same, "an empty disk"),
        (
            "",
            "capacity='8' FILE",
            "ovf:/disk/d",
            "8Gi",
            "<DiskSection/Disk fileRef>",
            Grade::LeftOut,
            "there is no file \"f\"",
        ),
        ("", "capacity='${size}'", "ovf:/disk/d", "10Gi", "<DiskSection/Disk capacity>", Grade::LeftOut, "no size"),
        ("", "capacity='-8'", "ovf:/disk/d", "10Gi", "<DiskSection/Disk>", Grade::Changed, unknown),
        ("", "capacity='0'", "ovf:/disk/d", "10Gi", "<DiskSection/Disk>", Grade::Changed, unknown),
        ("", "capacity='8.5'", "ovf:/disk/d", "10Gi", "<DiskSection/Disk>", Grade::Changed, unknown),
        ("", "capacity='99999999999'", "ovf:/disk/d", "10Gi", "<DiskSection/Disk>", Grade::Changed, unknown),
        ("", "", "ovf:/disk/d", "10Gi", "<DiskSection/Disk>", Grade::Changed, unknown),
        (file, "capacity='x' FILE", "ovf:/disk/d", "10Gi", "<DiskSection/Disk>", Grade::Changed, "has to be copied"),
        (file, "capacity='8'", "ovf:/file/f", "10Gi", ITEM, Grade::Changed, "the file does not say the size"),
        (file, "capacity='8'", "ovf:/file/g", "", ITEM, Grade::LeftOut, "the file has no disk \"ovf:/file/g\""),
        (file, "capacity='8'", "ovf:/disk/e", "", ITEM, Grade::LeftOut, "the file has no disk \"ovf:/disk/e\""),
        (file, "capacity='8'", "", "", ITEM, Grade::LeftOut, "it names no disk"),
        (
            file,
            "capacity='8' FILE parentRef='c'",
            "/disk/d",
            "8Gi",
            "<DiskSection/Disk parentRef>",
            Grade::LeftOut,
            "both",
        ),
    ] {
        let disk = disk.replace("FILE", "fileRef='f'");
        let section = format!(
            "<DiskSection><Info/><Disk diskId='d' {disk} capacityAllocationUnits='byte * 2^30'/></DiskSection>"
        );
        let hardware = computer() + &item(17, &[&format!("HostResource={resource}")]);
        let vm = imported(&envelope(&format!("{files}{section}"), &hardware, ""));
        let storage = machine(&vm).pointer("/disks/0/volumeClaimTemplate/spec/resources/requests/storage");
        assert_eq!(storage.and_then(Value::as_str).unwrap_or_default(), size, "{disk} {resource}");
        says(&vm, part, grade, words);
        if size == "10Gi" {
            is_seen(&vm, "<DiskSection/Disk>");
        }
        let has_content = disk.contains("fileRef") && !files.is_empty() || resource == "ovf:/file/f";
        assert_eq!(!vm.steps.is_empty(), has_content, "{disk} {resource}: {:#?}", vm.steps);
    }
}

#[test]
fn a_unit_of_a_disk_that_is_not_known_is_told() {
    let section = "<DiskSection><Disk diskId='d' capacity='8' capacityAllocationUnits='blocks'/></DiskSection>";
    let vm = imported(&envelope(section, &(computer() + &item(17, &["HostResource=ovf:/disk/d"])), ""));
    says(&vm, "<DiskSection/Disk capacity>", Grade::LeftOut, "this is no size");
}

#[test]
fn packed_files_are_unpacked_first() {
    for (attributes, made_by) in [
        ("ovf:href='a.vmdk'", None),
        ("ovf:href='a.vmdk' ovf:compression='identity' ovf:chunkSize='0'", None),
        ("ovf:href='a b.gz' ovf:compression='gzip'", Some("gunzip < 'a b.gz' > d.image")),
        ("ovf:href='a.vmdk' ovf:chunkSize='2147483648'", Some("cat a.vmdk.0* > d.image")),
        ("ovf:href='-a' ovf:chunkSize='1' ovf:compression='GZIP'", Some("cat ./-a.0* | gunzip > d.image")),
    ] {
        let before = format!(
            "<References><File ovf:id='f' {attributes}/></References>\
             <DiskSection><Disk diskId='d' capacity='8000000' fileRef='f'/></DiskSection>"
        );
        let vm = imported(&envelope(&before, &(computer() + &item(17, &["HostResource=ovf:/disk/d"])), ""));
        let expected = match made_by {
            None => "  qemu-img convert -O raw a.vmdk d.raw".to_owned(),
            Some(command) => format!(
                "  kubectl exec -i shop-import -- dd of=/dev/d bs=1M < ...   # the file d.raw, made by: {command} && \
                 qemu-img convert -O raw d.image d.raw"
            ),
        };
        assert!(vm.steps.contains(&expected), "{expected}: {:#?}", vm.steps);
        let is_told = |part: &str| {
            let part = format!("<References/File {part}>");
            vm.findings.iter().any(|it| it.what == part && it.grade == Grade::Changed)
        };
        assert_eq!(is_told("compression") || is_told("chunkSize"), made_by.is_some(), "{attributes}");
    }
    let before = "<References><File ovf:id='f' ovf:href='a' ovf:compression='rar'/></References>\
                  <DiskSection><Disk diskId='d' capacity='8000000' fileRef='f'/></DiskSection>";
    let vm = imported(&envelope(before, &(computer() + &item(17, &["HostResource=ovf:/disk/d"])), ""));
    says(&vm, "<References/File compression>", Grade::LeftOut, "only gzip is known");
}

#[test]
fn drives_are_in_the_order_of_their_controllers() {
    let disks: String =
        ["a", "b", "c", "d"].iter().map(|id| format!("<Disk diskId='{id}' capacity='8000000'/>")).collect();
    let files = "<References><File ovf:id='cd' ovf:href='x.iso'/><File ovf:id='n' ovf:href='X.NVRAM'/><File ovf:id='o' ovf:href='o'/></References>";
    let drive = |kind: u64, resource: &str, number: u64, parent: u64, address: u64| {
        item(
            kind,
            &[
                &format!("HostResource=ovf:/{resource}"),
                &format!("InstanceID={number}"),
                &format!("Parent={parent}"),
                &format!("AddressOnParent={address}"),
            ],
        )
    };
    let hardware = [
        computer(),
        item(5, &["InstanceID=10", "Address=1"]),
        item(5, &["InstanceID=11", "Address=0"]),
        item(6, &["InstanceID=12", "Address=0"]),
        drive(15, "file/cd", 20, 11, 1),
        drive(17, "disk/a", 21, 12, 1),
        drive(17, "disk/b", 22, 12, 0),
        drive(17, "disk/c", 23, 10, 0),
        drive(17, "disk/d", 24, 11, 0),
        item(10, &["InstanceID=30"]),
    ]
    .concat();
    let before = format!("{files}<DiskSection>{disks}</DiskSection>");
    let indices = |vm: &Imported| -> Vec<Option<u64>> {
        machine(vm)["disks"].as_array().unwrap().iter().map(|disk| disk["bootindex"].as_u64()).collect()
    };
    for (after, expected, grade) in [
        ("", [None; 5], None),
        ("<vmw:BootOrderSection vmw:instanceId='22 20'/>", [None, None, Some(0), None, Some(1)], Some(Grade::Same)),
        ("<vmw:BootOrderSection vmw:instanceId='30 24'/>", [Some(0), None, None, None, None], Some(Grade::Changed)),
        ("<vmw:BootOrderSection vmw:instanceId='30'/>", [None; 5], Some(Grade::LeftOut)),
    ] {
        let vm = imported(&envelope(&before, &hardware, after));
        assert_eq!(drives(&vm), ["d", "c", "b", "a", "cd"]);
        assert_eq!(indices(&vm), expected, "{after}");
        if let Some(grade) = grade {
            says(&vm, "<VirtualSystem/BootOrderSection>", grade, "");
        }
        says(&vm, ITEM, Grade::Changed, "put x.iso into the image repository");
        says(&vm, "<References/File>", Grade::LeftOut, "the firmware's variables");
        says(&vm, "<References/File>", Grade::LeftOut, "no disk and no drive uses it");
    }
}

#[test]
fn drives_that_are_too_many_are_left_out() {
    let vm = imported(&envelope("", &(computer() + &item(15, &[]).repeat(9)), ""));
    assert_eq!(drives(&vm).len(), 6);
    says(&vm, ITEM, Grade::LeftOut, "a VM has at most 6 CD drives");
    let vm = imported(&envelope("", &(computer() + &item(10, &[]).repeat(40)), ""));
    says(&vm, ITEM, Grade::LeftOut, "a VM has at most 32 networks");
    assert_eq!(machine(&vm)["networks"].as_array().unwrap().len(), 32);
}

#[test]
fn two_drives_of_one_disk_are_two_claims() {
    let before = "<References><File ovf:id='f' ovf:href='a.vmdk'/></References>\
                  <DiskSection><Disk diskId='d' capacity='8000000' fileRef='f'/></DiskSection>";
    let vm = imported(&envelope(before, &(computer() + &item(17, &["HostResource=ovf:/disk/d"]).repeat(2)), ""));
    assert_eq!(drives(&vm), ["d", "d-2"]);
    says(&vm, "<DiskSection/Disk>", Grade::Changed, "the claim shop-d-disk");
    says(&vm, ITEM, Grade::Changed, "this is a copy in the claim shop-d-2-disk");
}

#[test]
fn addresses_of_cards_are_kept_where_the_network_allows_it() {
    let card = |address: &str| item(10, &[&format!("Address={address}"), "ResourceSubType=VmxNet3 E1000"]);
    let hardware = [computer(), card("0050569A1234"), card("00:50:56:9a:12:35"), card("7")].concat();
    let vm = imported(&envelope("", &hardware, ""));
    let pod = json!({ "pod": { "device": "vmxnet3", "mac": "00:50:56:9A:12:34" } });
    let user = json!({ "user": { "device": "vmxnet3" } });
    assert_eq!(machine(&vm)["networks"], json!([pod, user, user]));
    let address = "<VirtualSystem/VirtualHardwareSection/Item/Address>";
    says(&vm, address, Grade::Same, "the MAC address");
    says(&vm, address, Grade::Changed, "another MAC address");
    says(&vm, address, Grade::LeftOut, "no card has this MAC address");
}

#[test]
fn firmware_is_read_in_any_case() {
    let config = |kind: &str, key: &str, value: &str| format!("<vmw:{kind} vmw:key='{key}' vmw:value='{value}'/>");
    let secure = |value: &str| config("Config", "bootOptions.efiSecureBootEnabled", value);
    let machine_with =
        |kind: &str| format!("<vbox:Machine><Hardware><Firmware type='{kind}'/></Hardware></vbox:Machine>");
    for (settings, after, expected) in [
        (String::new(), String::new(), "bios"),
        (config("Config", "firmware", "efi"), String::new(), "uefi"),
        (config("Config", "firmware", "EFI") + &secure("true"), String::new(), "secure"),
        (config("ExtraConfig", "firmware", "efi") + &secure("True"), String::new(), "secure"),
        (
            config("ExtraConfig", "uefi.secureBoot.enabled", "TRUE") + &config("Config", "firmware", "efi"),
            String::new(),
            "secure",
        ),
        (config("Config", "firmware", "bios") + &secure("true"), String::new(), "bios"),
        (String::new(), machine_with("EFI"), "uefi"),
        (String::new(), machine_with("efi64"), "uefi"),
        (String::new(), machine_with("BIOS"), "bios"),
    ] {
        let vm = imported(&envelope("", &(computer() + &settings), &after));
        assert_eq!(machine(&vm)["firmware"], json!(expected), "{settings} {after}");
    }
    let without = config("Config", "firmware", "bios") + &secure("true");
    let vm = imported(&envelope("", &(computer() + &without), ""));
    says(&vm, "<VirtualSystem/VirtualHardwareSection/Config>", Grade::Changed, "spec.vm.firmware: bios");
}

#[test]
fn a_tpm_of_vmware_is_a_new_tpm() {
    for parts in [["ResourceSubType=vmware.VTPM", "ElementName=x"], ["ResourceSubType=y", "ElementName=Virtual TPM"]] {
        let vm = imported(&envelope("", &(computer() + &item(1, &parts)), ""));
        assert_eq!(machine(&vm)["useTpm"], json!(true));
        says(&vm, ITEM, Grade::Changed, "a new TPM 2.0");
    }
}

#[test]
fn what_only_virtualbox_says_is_read_or_left_out() {
    let after = "<vbox:Machine uuid='{aaf6485a-eba1-4105-b903-68f9d4ed35fc}'><Hardware><Firmware type='EFI'/><RTC localOrUTC='local'/>\
        <BIOS><NVRAM path='x.nvram'/><TrustedPlatformModule type='v2_0'/></BIOS>\
        <Network><Adapter slot='0' enabled='true' MACAddress='08002718A8F8'/><Adapter slot='1' enabled='false' MACAddress='080027000000'/>\
        <Adapter slot='2' enabled='true' MACAddress='08002718A8F9'/></Network>\
        <SharedFolders><SharedFolder name='src' hostPath='/home/ann/src'/></SharedFolders></Hardware></vbox:Machine>";
    let cards = |count: usize| computer() + &item(10, &["ResourceSubType=E1000"]).repeat(count);
    let vm = imported(&envelope("", &cards(2), after));
    let found = ["firmware", "useTpm", "rtcBase"].map(|field| machine(&vm)[field].clone());
    assert_eq!(found, [json!("uefi"), json!(true), json!("localtime")]);
    let pod = json!({ "device": "e1000", "mac": "08:00:27:18:A8:F8" });
    assert_eq!(machine(&vm)["networks"], json!([{ "pod": pod }, { "user": { "device": "e1000" } }]));
    let part = |name: &str| format!("<VirtualSystem/Machine{name}>");
    for (name, grade, words) in [
        ("", Grade::LeftOut, "only the firmware, the TPM, the clock and the MAC addresses are read"),
        (" uuid", Grade::LeftOut, "spec.vm.machineUuid"),
        ("/Hardware/BIOS/NVRAM", Grade::LeftOut, "the firmware's variables"),
        ("/Hardware/SharedFolders/SharedFolder", Grade::LeftOut, "share files by the network"),
        ("/Hardware/BIOS/TrustedPlatformModule", Grade::Changed, "a new TPM 2.0"),
        ("/Hardware/Network/Adapter MACAddress", Grade::Same, "the MAC address"),
        ("/Hardware/Network/Adapter MACAddress", Grade::Changed, "another MAC address"),
    ] {
        says(&vm, &part(name), grade, words);
    }
    // Whose address it is can't be told.
    let vm = imported(&envelope("", &cards(1), after));
    assert_eq!(machine(&vm)["networks"], json!([{ "pod": { "device": "e1000" } }]));
    says(&vm, &part("/Hardware/Network/Adapter MACAddress"), Grade::LeftOut, "nobody knows which card has it");
    let none = after.replace("v2_0", "None");
    assert_eq!(machine(&imported(&envelope("", &cards(1), &none))).get("useTpm"), None);
}

#[test]
fn the_guest_tells_clock_and_architecture() {
    let system =
        |attribute: &str, parts: &str| format!("<OperatingSystemSection {attribute}>{parts}</OperatingSystemSection>");
    for (section, base) in [
        (system("vmw:osType='ubuntu64Guest'", ""), None),
        (system("vmw:osType='windows2019srv_64Guest'", ""), Some("localtime")),
        (system("vmw:osType='winXPProGuest'", ""), Some("localtime")),
        (system("", "<vbox:OSType>Windows10_64</vbox:OSType>"), Some("localtime")),
        (system("", "<Description>Microsoft Windows Server 2022 (64-bit)</Description>"), Some("localtime")),
        (system("", "<Description>Darwin</Description>"), None),
    ] {
        let vm = imported(&envelope("", &computer(), &section));
        assert_eq!(machine(&vm).get("rtcBase").and_then(Value::as_str), base, "{section}");
    }
    let utc = "<vmw:ExtraConfig vmw:key='rtc.diffFromUTC' vmw:value='0'/>";
    let windows = system("vmw:osType='windows9_64Guest'", "");
    assert_eq!(machine(&imported(&envelope("", &(computer() + utc), &windows)))["rtcBase"], json!("utc"));
    for section in [
        system("vmw:osType='arm_ubuntu64Guest'", ""),
        system("vmw:osType='arm-debian12-64'", ""),
        system("", "<vbox:OSType>Ubuntu24_LTS_arm64</vbox:OSType>"),
        system("", "<Description>Debian (arm64)</Description>"),
        "<vbox:Machine OSType='Fedora_arm64'/>".to_owned(),
        "<vbox:Machine><Hardware><Platform architecture='ARM'/></Hardware></vbox:Machine>".to_owned(),
    ] {
        let error = read(&envelope("", &computer(), &section)).unwrap_err();
        assert_eq!(error.at.0, 7, "{section}");
        assert!(error.message.starts_with("the guest needs the architecture aarch64 ("), "{error}");
    }
    // Words for people are no type.
    imported(&envelope("", &computer(), &system("", "<Description>tools of ARM</Description>")));
}

#[test]
fn a_disk_that_two_vms_share_is_told() {
    let vm = |id: &str, disks: &[&str]| {
        let drives = disks.iter().map(|disk| item(17, &[&format!("HostResource=ovf:/disk/{disk}")]));
        let hardware = computer() + &drives.collect::<String>();
        format!(
            "<VirtualSystem ovf:id='{id}'><VirtualHardwareSection>{hardware}</VirtualHardwareSection></VirtualSystem>"
        )
    };
    let text = format!(
        "<Envelope xmlns:ovf='o' xmlns:rasd='r'>\n<References><File ovf:id='f' ovf:href='f.vmdk'/></References>\n<DiskSection>\n\
         <Disk diskId='own' capacity='8000000' fileRef='f'/>\n<Disk diskId='quorum' capacity='8000000'/>\n<Disk diskId='b' \
         capacity='8000000' fileRef='f'/></DiskSection><VirtualSystemCollection>{}{}{}</VirtualSystemCollection></Envelope>",
        vm("Node 1", &["own", "quorum"]),
        vm("Node 2", &["b", "quorum"]),
        vm("node-3", &["quorum", "quorum"])
    );
    let told = |vms: &[Imported]| -> Vec<Vec<String>> {
        let of = |vm: &Imported| -> Vec<String> {
            let findings = vm.findings.iter().filter(|it| it.why.contains("has the same disk"));
            findings.map(ToString::to_string).collect()
        };
        vms.iter().map(of).collect()
    };
    let line = |name: &str, disk: &str| {
        format!(
            "5: <DiskSection/Disk>: changed: the VM node-1 has the same disk: the claim {name}-{disk}-disk is another one, and \
             neither VM sees what the other writes"
        )
    };
    let vms = import::read(&text, Format::Ovf, "file", Wish::default()).unwrap();
    let expected = [vec![], vec![line("node-2", "quorum")], vec![line("node-3", "quorum"), line("node-3", "quorum-2")]];
    // Two disks of one file are no shared disk.
    assert_eq!(told(&vms), expected);
    let wish = Wish { only: Some("node-2"), name: Some("new"), ..Wish::default() };
    let vms = import::read(&text, Format::Ovf, "file", wish).unwrap();
    assert_eq!(told(&vms), [[line("new", "quorum")]]);
}

#[test]
fn what_no_vm_names_is_told_once() {
    let vm = |id: &str| {
        let hardware = computer() + &item(17, &[&format!("HostResource=/disk/{id}")]);
        let setting = format!("<vmw:ExtraConfig vmw:key='nvram' vmw:value='ovf:/file/{id}-n'/>");
        format!(
            "<VirtualSystem ovf:id='{id}'><VirtualHardwareSection>{hardware}{setting}</VirtualHardwareSection></VirtualSystem>"
        )
    };
    let file = |id: &str, name: &str| format!("<File ovf:id='{id}' ovf:href='{name}'/>");
    let files = [
        file("a", "a.vmdk"),
        file("b", "b.vmdk"),
        file("base", "base.vmdk"),
        file("b-n", "b.nvram"),
        file("x", "x.vmdk"),
    ]
    .concat();
    let disks = "<Disk diskId='a' capacity='8000000' fileRef='a'/>\
                 <Disk diskId='b' capacity='8000000' fileRef='b' parentRef='base'/>\
                 <Disk diskId='base' capacity='8000000' fileRef='base' parentRef='b'/>";
    let options = "<DeploymentOptionSection><Configuration ovf:id='small'/><Configuration ovf:id='big'/></DeploymentOptionSection>";
    let text = format!(
        "<Envelope xmlns:ovf='o' xmlns:rasd='r' xmlns:vmw='v'><References>{files}</References><DiskSection><Info/>{disks}</DiskSection>\
         <NetworkSection><Network ovf:name='n'/></NetworkSection>{options}<VirtualSystemCollection><ProductSection/>{}{}\
         <VirtualSystemCollection><Name>empty</Name></VirtualSystemCollection></VirtualSystemCollection></Envelope>",
        vm("a"),
        vm("b")
    );
    let vms = import::read(&text, Format::Ovf, "file", Wish::default()).unwrap();
    let [a, b] = vms.as_slice() else { panic!("{vms:#?}") };
    assert_eq!([drives(a), drives(b)], [["a"], ["b"]]);
    // Which configuration is read counts for both.
    for vm in [a, b] {
        says(vm, "<DeploymentOptionSection/Configuration>", Grade::LeftOut, "\"small\" is read");
    }
    let has = |vm: &Imported, what: &str| vm.findings.iter().any(|it| it.what == what);
    for what in [
        "<NetworkSection>",
        "<DiskSection/Info>",
        "<VirtualSystemCollection/ProductSection>",
        "<VirtualSystemCollection/VirtualSystemCollection/Name>",
    ] {
        assert!(has(a, what) && !has(b, what), "{what}: {vms:#?}");
    }
    says(a, "<References/File>", Grade::LeftOut, "no disk and no drive uses it");
    says(b, "<References/File>", Grade::LeftOut, "the firmware's variables");
    says(b, "<DiskSection/Disk parentRef>", Grade::LeftOut, "make one disk of both");
    says(b, "<DiskSection/Disk>", Grade::LeftOut, "no drive uses it");
    let is_unused =
        |vm: &Imported| vm.findings.iter().any(|it| it.what == "<DiskSection/Disk>" && it.grade == Grade::LeftOut);
    assert!(!is_unused(a), "{:#?}", a.findings);
}
