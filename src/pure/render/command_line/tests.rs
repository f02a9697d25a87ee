mod options;

use super::*;

/// The sockets in the command lines.
fn sockets() -> Sockets {
    Sockets::in_folder("RUN")
}

fn prepared() -> Prepared {
    Prepared {
        hardware: Hardware::Standard,
        generation_id: None,
        machine_type: "pc-q35-7.2".into(),
        accelerator: "kvm",
        uuid: "b0e3a5a4-0000-4000-8000-3e1f6e1d0001".into(),
        firmware: None,
        cloud_init_disk: None,
        block_devices: vec![true; 8],
        media: vec![],
        pod_network: PodLink::Stream("RUN/passt.sock".into()),
        display_password: true,
        names_disks: false,
        rtc_base: None,
        environment: Environment::of([]),
    }
}

fn config(vm: &str) -> RunnerConfig {
    RunnerConfig::parse(&format!("/Runner:\n  namespace: ns1\n  vm:\n    name: vm1\n{vm}")).unwrap()
}

/// The arguments with one line for each option and its value.
fn lines(arguments: &[String]) -> String {
    let mut text = String::new();
    for argument in arguments {
        text.push_str(if argument.starts_with('-') { "\n" } else { " " });
        text.push_str(argument);
    }
    text.trim_start().to_owned()
}

fn template(name: &str, text: &str) -> Template {
    Template::alone(name, text.into())
}

fn standard_template() -> Template {
    template(STANDARD, built_in(STANDARD).unwrap())
}

fn standard(vm: &str, prepared: &Prepared) -> String {
    lines(&qemu(&config(vm), prepared, sockets(), &standard_template()).unwrap())
}

fn failure(vm: &str) -> String {
    qemu(&config(vm), &prepared(), sockets(), &standard_template()).unwrap_err().to_string()
}

#[test]
fn a_small_vm() {
    insta::assert_snapshot!(standard("", &Prepared { accelerator: "tcg", ..prepared() }));
}

#[test]
fn a_desktop_with_everything() {
    let vm = r#"
    useTpm: true
    bootMenu: true
    cpuModel: host,-vmx
    maximumCpus: 8
    currentCpus: 2
    sockets: 1
    diesPerSocket: 2
    coresPerDie: 2
    threadsPerCore: 2
    maximumRam: 8 GiB
    rtcBase: localtime
    network:
    - { type: user, device: virtio-net, net: 10.1.0.0/24 }
    - { type: tap, device: e1000e, bridge: br0, mac: "02:16:3e:33:58:10" }
    drives:
    - { type: raw, resource: /dev/system-disk, bootindex: 0 }
    - { type: ide-cd, file: "" }
    - { type: raw, resource: "/var/local/vm-disks/a,b/disk.img" }
    - { type: ide-cd, file: "https://example.org/a.iso", bootindex: 1 }
    - { type: ide-cd, file: /var/local/vmop-image-repository/b.iso }
    display: { outputs: 2, spice: { port: 5901, streaming-video: filter, usbRedirects: 2 } }
"#;
    let prepared = Prepared {
        media: vec![
            None,
            Some(Medium::Url("https://example.org/a.iso".into())),
            Some(Medium::File("/var/local/vmop-image-repository/b.iso".into())),
        ],
        firmware: Some(Firmware { code: "/ovmf/code.fd".into(), vars: "/data/vars.fd".into(), secure: true }),
        cloud_init_disk: Some("/run/cloud-init.img".into()),
        block_devices: vec![true, false],
        ..prepared()
    };
    insta::assert_snapshot!(standard(vm, &prepared));
}

/// The lines about the display.
fn display(vm: &str, prepared: &Prepared) -> String {
    let text = standard(vm, prepared);
    let is_of_display = |line: &&str| ["-vnc", "-spice", "vdagent", "viewer"].iter().any(|word| line.contains(word));
    text.lines().filter(is_of_display).collect::<Vec<_>>().join("\n")
}

#[test]
fn beside_its_own_port_each_display_has_vnc_for_programs_in_the_pod() {
    let open = Prepared { display_password: false, ..prepared() };
    insta::assert_snapshot!(display("    display: { vnc: { port: 5901 } }\n", &open), @r#"
    -vnc :1
    -vnc vnc=unix:RUN/vnc.sock,id=inner,share=force-shared
    -chardev qemu-vdagent,id=viewer,name=vdagent,clipboard=on,mouse=off
    -device {"bus":"ports.0","chardev":"viewer","driver":"virtserialport","id":"viewer","name":"com.redhat.spice.0","nr":3}
    "#);
    insta::assert_snapshot!(display("    display: { spice: { port: 5900 }, clipboard: vnc }\n", &prepared()), @r#"
    -spice port=5900,disable-ticketing=off
    -vnc vnc=unix:RUN/vnc.sock,id=inner,share=force-shared
    -chardev qemu-vdagent,id=viewer,name=vdagent,clipboard=on,mouse=off
    -device {"bus":"ports.0","chardev":"viewer","driver":"virtserialport","id":"viewer","name":"com.redhat.spice.0","nr":3}
    "#);
    // Only programs in the Pod reach it, so it has no password.
    insta::assert_snapshot!(display("    display: { spice: { port: 0 } }\n", &prepared()), @r#"
    -spice unix=on,addr=RUN/spice.sock,disable-ticketing=on
    -vnc vnc=unix:RUN/vnc.sock,id=inner,share=force-shared
    -chardev spicevmc,id=viewer,debug=0,name=vdagent
    -device {"bus":"ports.0","chardev":"viewer","driver":"virtserialport","id":"viewer","name":"com.redhat.spice.0","nr":3}
    "#);
    assert_eq!(display("", &prepared()), "");
}

#[test]
fn a_new_vm_can_get_devices_and_memory_while_it_runs() {
    let new = Prepared { hardware: Hardware::RootPorts, ..prepared() };
    let has = |memory: &str| {
        let text = standard(&format!("    maximumRam: {memory}\n"), &new);
        text.lines().find(|line| line.starts_with("-m ")).unwrap().to_owned()
    };
    assert_eq!(has("2 GiB"), "-m size=2147483648B", "Linux would reserve 64 MB of it");
    assert_eq!(has("4 GiB"), "-m size=4294967296B,slots=8,maxmem=8589934592B");
    assert_eq!(has("256 GiB"), "-m size=274877906944B", "the smallest CPUs can't address twice that");
    let text = standard("    maximumRam: 4 GiB\n", &new);
    let ports: Vec<&str> = text.lines().filter(|line| line.contains("pcie-root-port")).collect();
    assert_eq!(ports.len(), 8, "{text}");
    insta::assert_snapshot!(ports[7], @r#"-device {"addr":"15.7","bus":"pcie.0","chassis":8,"driver":"pcie-root-port","id":"root-port7","multifunction":true,"slot":8}"#);
    for before in [Hardware::Standard, Hardware::Legacy] {
        let text = standard("    maximumRam: 4 GiB\n", &Prepared { hardware: before, ..prepared() });
        assert!(!text.contains("root-port") && !text.contains("maxmem"), "{text}");
    }
}

#[test]
fn a_disk_of_a_new_vm_has_a_queue_for_each_cpu() {
    let with = |hardware: Hardware, cpus: u32, disks: usize| {
        let new =
            Prepared { hardware, generation_id: Some("c0ffee00-0000-4000-8000-000000000002".into()), ..prepared() };
        let drives: String = (0..disks).map(|n| format!("    - {{ type: raw, resource: /dev/d{n} }}\n")).collect();
        let text = standard(&format!("    maximumCpus: {cpus}\n    drives:\n{drives}"), &new);
        let devices =
            text.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("-device ")?).ok());
        let disks: Vec<Value> =
            devices.filter(|it| it["id"].as_str().is_some_and(|id| id.starts_with("disk"))).collect();
        let of = |field: &str| disks.iter().map(|disk| disk[field].clone()).collect::<Vec<_>>();
        (serde_json::json!(of("num-queues")), serde_json::json!(of("iothread")), text)
    };
    let (queues, threads, text) = with(Hardware::MultiQueue, 4, 6);
    assert_eq!(
        (queues, threads),
        (serde_json::json!([4, 4, 4, 4, 4, 4]), serde_json::json!(["io0", "io1", "io2", "io3", "io0", "io1"]))
    );
    assert_eq!(text.matches(r#""qom-type":"iothread""#).count(), 4, "{text}");
    assert_eq!(with(Hardware::MultiQueue, 64, 1).0, serde_json::json!([16]));
    assert_eq!(with(Hardware::MultiQueue, 1, 1).0, serde_json::json!([1]));
    // What it has beside that.
    let ports: Vec<&str> = text.lines().filter(|line| line.contains("pcie-root-port")).collect();
    assert_eq!(ports.len(), 16, "{text}");
    insta::assert_snapshot!(ports[15], @r#"-device {"addr":"16.7","bus":"pcie.0","chassis":16,"driver":"pcie-root-port","id":"root-port15","io-reserve":0,"multifunction":true,"slot":16}"#);
    assert!(text.contains(r#""driver":"vmgenid","guid":"c0ffee00-0000-4000-8000-000000000002""#), "{text}");
    for before in [Hardware::RootPorts, Hardware::Standard, Hardware::Legacy] {
        let (queues, threads, text) = with(before, 4, 2);
        assert_eq!((queues, threads), (serde_json::json!([null, null]), serde_json::json!(["io", "io"])));
        assert!(!text.contains("pc.ram") && !text.contains("io-reserve"), "{text}");
    }
}

#[test]
fn a_vm_that_reacts_to_panics_has_a_panic_device_and_a_watchdog() {
    for on_panic in ["restart", "stop", "keep"] {
        let text = standard(&format!("    onPanic: {on_panic}\n"), &prepared());
        for line in
            ["-device {\"driver\":\"pvpanic\"}", "-global ICH9-LPC.noreboot=off", "-action panic=pause,watchdog=pause"]
        {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
    }
    assert!(!standard("", &prepared()).contains("pvpanic"));
    for (action, by_qemu) in [("reset", "pause"), ("poweroff", "pause"), ("pause", "pause"), ("none", "none")] {
        let text = standard(&format!("    watchdog: {{action: {action}}}\n"), &prepared());
        for line in ["-global ICH9-LPC.noreboot=off", &format!("-action watchdog={by_qemu}")] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(!text.contains("pvpanic"), "{text}");
    }
}

#[test]
fn a_pod_network_is_a_connection_to_passt() {
    let vm = r#"
    network:
    - { type: user, device: virtio-net }
    - { type: pod, device: e1000e, mac: "02:16:3e:33:58:10" }
"#;
    let text = standard(vm, &prepared());
    let network = text.lines().filter(|line| line.contains("net1")).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(network, @r#"
    -netdev {"addr":{"path":"RUN/passt.sock","type":"unix"},"id":"net1","server":false,"type":"stream"}
    -device {"addr":"10.1","bus":"pcie.0","driver":"e1000e","id":"net1-card","mac":"02:16:3e:33:58:10","multifunction":true,"netdev":"net1","romfile":""}
    "#);
    // passt in a container of its own, with the guest's memory.
    let shared = Prepared { pod_network: PodLink::VhostUser("/run/vm-passt/vhost-user.sock".into()), ..prepared() };
    let text = standard(vm, &shared);
    let is_of_network = |line: &&str| ["net1", "memory"].iter().any(|word| line.contains(word));
    let network = text.lines().filter(is_of_network).collect::<Vec<_>>().join("\n");
    insta::assert_snapshot!(network, @r#"
    -machine memory-backend=memory
    -object {"id":"memory","qom-type":"memory-backend-memfd","share":true,"size":1000000000}
    -chardev socket,id=net1-link,reconnect-ms=500,path=/run/vm-passt/vhost-user.sock
    -netdev {"chardev":"net1-link","id":"net1","type":"vhost-user"}
    -device {"addr":"10.1","bus":"pcie.0","driver":"e1000e","id":"net1-card","mac":"02:16:3e:33:58:10","multifunction":true,"netdev":"net1","romfile":""}
    "#);
    // A handed-over guest finds its memory under the same name, shared or not.
    let newest = Prepared { hardware: Hardware::NEWEST, ..shared.clone() };
    let text = standard(vm, &newest);
    assert!(text.contains("memory-backend=pc.ram\n") && text.contains(r#"-object {"id":"pc.ram""#), "{text}");
    let private = standard(vm, &Prepared { pod_network: prepared().pod_network, ..newest });
    assert!(!private.contains("memory-backend"), "it has huge pages: {private}");
    let without = standard("", &shared);
    assert!(!without.contains("memory-backend"), "{without}");
}

#[test]
fn up_to_64_disks_have_addresses_of_their_own() {
    let drives: String = (0..64).map(|n| format!("    - {{ type: raw, resource: /dev/d{n} }}\n")).collect();
    let text = standard(&format!("    drives:\n{drives}"), &prepared());
    for address in ["8.0", "8.7", "9.0", "f.7"] {
        assert_eq!(text.matches(&format!(r#""addr":"{address}""#)).count(), 1, "{address}");
    }
    insta::assert_snapshot!(
        failure(&format!("    drives:\n{drives}    - {{ type: raw, resource: /dev/one-more }}\n")),
        @"there are 65 disks, but only 64 are possible"
    );
}

#[test]
fn the_boot_order_is_that_of_the_drives_unless_the_configuration_has_one() {
    let order = |drives: &str| {
        let text = standard(&format!("    drives: [{drives}]\n"), &prepared());
        let device = |line: &str| serde_json::from_str::<Value>(line.strip_prefix("-device ")?).ok();
        let drives = text.lines().filter_map(device).filter(|device| device["id"] != Value::Null);
        let of = |device: Value| Some(format!("{}:{}", device["id"].as_str()?, device["bootindex"].as_u64()?));
        drives.filter_map(of).collect::<Vec<_>>().join(" ")
    };
    assert_eq!(order("{ type: ide-cd, file: '' }, { type: raw, resource: /dev/a }"), "disk0:1 cd0:0");
    assert_eq!(order("{ type: raw, resource: /dev/a }, { type: raw, resource: /dev/b, bootindex: 0 }"), "disk1:0");
}

#[test]
fn no_value_can_become_another_argument() {
    for text in ["x,readonly=on", "a: b", "- -x", "\"", "'", "\n- -x", "{{ 1 }}", "---", "\u{2028}", "🦀", "#", "\\"]
    {
        let drive = serde_json::to_string(text).unwrap();
        let config = config(&format!("    drives: [{{ type: raw, resource: {drive} }}]\n"));
        let arguments = qemu(&config, &prepared(), sockets(), &standard_template()).unwrap();
        let image = arguments.iter().find(|argument| argument.contains("disk0-image")).unwrap();
        let image: Value = serde_json::from_str(image).unwrap();
        assert_eq!(image["file"]["filename"], text);
        let plain = self::config("    drives: [{ type: raw, resource: x }]\n");
        let plain = qemu(&plain, &prepared(), sockets(), &standard_template()).unwrap();
        assert_eq!(arguments.len(), plain.len());
    }
}

#[test]
fn an_unsupported_configuration_is_an_error_with_the_reason() {
    insta::assert_snapshot!(
        failure("    network: [{ type: pod, device: virtio-net }, { type: pod, device: virtio-net }]\n"),
        @"there is more than one network of type pod, but a Pod has one address"
    );
}

#[test]
fn the_error_for_a_wrong_template_names_the_problem() {
    let error_of =
        |text: &str| qemu(&config(""), &prepared(), sockets(), &template("own.yaml.j2", text)).unwrap_err().to_string();
    let wrong = [
        "- a\n- {{ machine.typ }}",
        "- a\n{% if %}",
        "a: 1",
        "- a\n- [b]",
        "- 'a",
        "{% for i in range(10000) %}{% for j in range(10000) %}x{% endfor %}{% endfor %}",
    ];
    insta::assert_snapshot!(wrong.map(error_of).join("\n"));
}

#[test]
fn a_template_can_replace_one_block_of_the_standard_template() {
    let text = "{% extends 'builtin/standard.yaml.j2' %}{% block networks %}- -nic\n- none\n{% endblock %}";
    let arguments = qemu(&config(""), &prepared(), sockets(), &template("own.yaml.j2", text)).unwrap();
    assert!(lines(&arguments).contains("\n-nic none\n"));
}

#[test]
fn a_derived_mac_address_depends_on_the_vm_and_the_network() {
    assert_eq!(derived_mac("a", 0, 0), derived_mac("a", 0, 0));
    assert_ne!(derived_mac("a", 0, 0), derived_mac("a", 1, 0));
    assert_ne!(derived_mac("a", 0, 0), derived_mac("b", 0, 0));
    assert!(derived_mac("a", 0, 0).starts_with("52:54:00:"));
}

#[test]
fn a_derived_mac_address_avoids_those_in_the_configuration() {
    let user = |mac: Option<String>| NetworkSection::User {
        name: None,
        slot: None,
        device: "virtio-net".into(),
        net: None,
        mac,
        forwards: Vec::new(),
    };
    let kept = derived_mac("u", 0, 0);
    assert_eq!(macs(&[user(None)], "u", Hardware::Standard), [kept.as_str()]);
    // A network was added before the one that had this derived address, and the address is now in the configuration.
    let both = macs(&[user(None), user(Some(kept.to_uppercase()))], "u", Hardware::Standard);
    assert_eq!(both, [derived_mac("u", 0, 1), kept.to_uppercase()]);
}

#[test]
fn a_network_has_the_address_of_its_slot_whatever_stands_before_it() {
    let network = |text: &str| {
        let text = text.split(' ').map(|slot| {
            let slot = slot.parse::<u32>().map(|slot| format!(", slot: {slot}")).unwrap_or_default();
            format!("    - {{ type: user, device: virtio-net{slot} }}\n")
        });
        let config = config(&format!("    network:\n{}", text.collect::<String>()));
        qemu(&config, &prepared(), sockets(), &standard_template())
    };
    let cards = |text: &str| -> Vec<String> {
        let arguments = network(text).unwrap();
        let devices = arguments.iter().filter_map(|argument| serde_json::from_str::<Value>(argument).ok());
        let card = |device: Value| {
            let field = |name: &str| device[name].as_str().unwrap_or_default().to_owned();
            let is_network = ["10.", "11."].iter().any(|slot| field("addr").starts_with(slot));
            is_network.then(|| [field("addr"), field("driver"), field("mac")].join(" ").trim_end().to_owned())
        };
        let mut cards: Vec<String> = devices.filter_map(card).collect();
        cards.sort();
        cards
    };
    let both = cards("- -");
    assert_eq!(both.len(), 2, "{both:?}");
    // The first is taken out.
    let filler = "10.0 pcie-root-port";
    assert_eq!(
        cards("1"),
        [filler.to_owned(), both[1].clone()],
        "a guest looks for function 1 only where there is a 0"
    );
    assert_eq!(cards("1 0"), both, "sorted");
    assert!(!cards("0 8").iter().any(|card| card.contains("root-port")));
    assert!(cards("0 9").iter().any(|card| card == "11.0 pcie-root-port"));
    for (wrong, slots) in [("1 1", "[1, 1]"), ("0 32", "[0, 32]"), ("- 0", "[0, 0]")] {
        let error = network(wrong).unwrap_err().to_string();
        assert_eq!(error, format!("each network needs a slot of its own, from 0 to 31, and these are {slots}"));
    }
}

#[test]
fn a_disk_and_a_cd_drive_are_where_their_slots_say() {
    let with = |hardware: Hardware, drives: &[(&str, &str)]| {
        let drive = |(type_, slot): &(&str, &str)| {
            let slot = slot.parse::<u32>().map(|slot| format!(", slot: {slot}")).unwrap_or_default();
            let of_kind = if *type_ == "cd" { "type: ide-cd, file: ''" } else { "type: raw, resource: /dev/a-disk" };
            format!("    - {{ {of_kind}{slot} }}\n")
        };
        let drives: String = drives.iter().map(drive).collect();
        let prepared = Prepared { hardware, cloud_init_disk: Some("/run/cloud-init.img".into()), ..prepared() };
        qemu(&config(&format!("    drives:\n{drives}")), &prepared, sockets(), &standard_template())
    };
    let places = |hardware: Hardware, drives: &[(&str, &str)]| {
        let arguments = with(hardware, drives).unwrap();
        let devices = arguments.iter().filter_map(|argument| serde_json::from_str::<Value>(argument).ok());
        let place = |device: Value| {
            let id =
                device["id"].as_str().filter(|id| ["disk", "cd", "cloud"].iter().any(|kind| id.starts_with(kind)))?;
            let is_port = device["driver"] == "ide-cd";
            let place = if is_port { &device["bus"] } else { &device["addr"] };
            Some(format!("{id}@{}", place.as_str()?))
        };
        devices.filter_map(place).collect::<Vec<_>>().join(" ")
    };
    let new = Hardware::RootPorts;
    let all = places(new, &[("disk", ""), ("cd", ""), ("disk", ""), ("cd", "")]);
    assert!(all.contains("disk0@8.0 disk1@8.1 cd0@ide.0 cd1@ide.1"), "{all}");
    // The first of each is taken out. A guest looks for function 1 only where there is a 0.
    let rest = places(new, &[("disk", "1"), ("cd", "1")]);
    assert!(rest.contains("disk1@8.1 cd1@ide.1") && rest.contains("disk-filler0@8.0"), "{rest}");
    let far = places(new, &[("disk", ""), ("disk", "9")]);
    assert!(far.contains("disk9@9.1") && far.contains("disk-filler8@9.0") && !far.contains("disk-filler0"), "{far}");
    // As the VM-Operator in Java arranges them, each disk has a slot, and the cloud-init disk is behind the last one.
    let legacy = places(Hardware::Legacy, &[("disk", "1")]);
    assert!(legacy.contains("disk1@9.0") && !legacy.contains("filler"), "{legacy}");
    for (drives, error) in [
        (&[("disk", "1"), ("disk", "1")], "each disk needs a slot of its own, from 0 to 63, and these are [1, 1]"),
        (&[("disk", "0"), ("disk", "64")], "each disk needs a slot of its own, from 0 to 63, and these are [0, 64]"),
        (&[("cd", "0"), ("cd", "6")], "each CD drive needs a slot of its own, from 0 to 5, and these are [0, 6]"),
    ] {
        assert_eq!(with(new, drives).unwrap_err().to_string(), error);
    }
}

#[test]
fn a_template_without_support_for_pod_networks_is_refused_for_one() {
    let old = built_in(STANDARD).unwrap().replace(r#"network.type == "pod""#, "false");
    let vm = config("    network: [{ type: pod, device: virtio-net }]\n");
    let error = qemu(&vm, &prepared(), sockets(), &template("old.yaml.j2", &old)).unwrap_err().to_string();
    assert_eq!(
        error,
        "old.yaml.j2: it leaves out the connection to RUN/passt.sock of a network of type pod, which the runner needs: see the block `network` of \
         builtin/qemu/standard.yaml.j2"
    );
}

#[test]
fn the_devices_of_a_vm_that_the_vm_operator_created_stay_where_they_were() {
    let vm = r#"
    useTpm: true
    network:
    - { type: user, device: virtio-net }
    - { type: tap, device: virtio-net, bridge: br0, mac: "02:16:3e:33:58:10" }
    - { type: user, device: e1000 }
    drives:
    - { type: raw, resource: /dev/system-disk, bootindex: 0 }
    - { type: ide-cd, file: "" }
    - { type: raw, resource: /dev/data-disk }
    display: { outputs: 1, spice: { port: 5900, usbRedirects: 0 } }
"#;
    let prepared = Prepared {
        hardware: Hardware::Legacy,
        cloud_init_disk: Some("/run/cloud-init.img".into()),
        block_devices: vec![true, true],
        ..prepared()
    };
    let text = standard(vm, &prepared);
    insta::assert_snapshot!(addresses(&text), @"
    1.0 virtio-balloon-pci
    2.0 virtio-serial-pci
    3.0 qemu-xhci
    4.0 virtio-rng-pci
    5.0 virtio-vga
    6.0 ich9-intel-hda
    7.0 virtio-net-pci 52:54:00:12:34:56
    8.0 virtio-net-pci 02:16:3e:33:58:10
    9.0 e1000 52:54:00:12:34:57
    a.0 virtio-blk-pci
    b.0 virtio-blk-pci
    c.0 virtio-blk-pci
    ");
    assert!(text.contains("tpm-tis") && !text.contains("tpm-crb"), "{text}");
    // QEMU gave a VM without networks a card in slot 1, so that everything else was a slot further.
    let without = standard("    drives: [{ type: raw, resource: /dev/system-disk }]\n", &prepared);
    insta::assert_snapshot!(addresses(&without), @"
    2.0 virtio-balloon-pci
    3.0 virtio-serial-pci
    4.0 qemu-xhci
    5.0 virtio-rng-pci
    8.0 virtio-blk-pci
    9.0 virtio-blk-pci
    ");
}

/// The devices with a PCI address, in the order of the addresses: address, driver, MAC address.
fn addresses(text: &str) -> String {
    let devices = text.lines().filter(|line| line.starts_with("-device") && line.contains("addr"));
    let devices = devices.map(|line| {
        let device: Value = serde_json::from_str(line.trim_start_matches("-device ")).unwrap();
        let field = |name: &str| device[name].as_str().unwrap_or_default().to_owned();
        let line = [field("addr"), field("driver"), field("mac")].join(" ");
        assert_ne!(device["multifunction"], true, "{line}: its name in the guest would get f0 at the end");
        line.trim_end().to_owned()
    });
    let mut devices: Vec<String> = devices.collect();
    devices.sort_by_key(|line| u32::from_str_radix(line.split('.').next().unwrap(), 16).unwrap());
    devices.join("\n")
}

#[test]
fn a_mac_address_is_that_of_one_card() {
    let network = |mac: &str| format!("    network:\n    - {{ type: pod, device: e1000e, mac: {mac:?} }}\n");
    for mac in ["02:16:3e:33:58:10", "52:54:00:AB:cd:EF"] {
        assert!(standard(&network(mac), &prepared()).contains(mac), "{mac}");
    }
    for mac in [
        "",
        "02:16:3e:33:58",
        "02:16:3e:33:58:10:11",
        "02-16-3e-33-58-10",
        "2:16:3e:33:58:10",
        "+2:16:3e:33:58:10",
        "02:16:3e:33:58:1g",
        "02:16:3e:33:58:10,romfile=/etc/passwd",
        "01:00:5e:00:00:01",
        "ff:ff:ff:ff:ff:ff",
    ] {
        let error = failure(&network(mac));
        assert!(error.starts_with(&format!("{mac:?} can't be the MAC address of a network")), "{mac}: {error}");
    }
}

#[test]
fn a_disk_has_its_name_as_serial_number_where_that_was_decided_at_the_first_start() {
    for (resource, expected) in [
        ("/dev/system-disk", "system"),
        ("/dev/disk-0", "disk-0"),
        ("/var/local/vm-disks/data-disk/disk.img", "data"),
        ("/home/ann/vm/disks/data-disk.qcow2", "data"),
        ("/dev/a-name-of-twenty-lett-disk", "a-name-of-twenty-lett-"),
    ] {
        let serial = default_serial(resource).unwrap();
        assert!(serial.len() <= 20, "{serial}");
        if expected.len() <= 20 {
            assert_eq!(serial, expected);
        }
    }
    assert_ne!(
        default_serial("/dev/a-very-long-name-of-a-disk-disk"),
        default_serial("/dev/a-very-long-name-of-b-disk-disk")
    );
    let vm = "    drives: [{type: raw, resource: /dev/system-disk}, {type: raw, resource: /dev/x-disk, serial: WD-1}]";
    let serials = |names_disks| {
        let prepared = Prepared { names_disks, block_devices: vec![true, true], ..prepared() };
        let lines = qemu(&config(vm), &prepared, sockets(), &standard_template()).unwrap();
        let of = |line: &String| Some(line.split_once("\"serial\":\"")?.1.split('"').next()?.to_owned());
        lines.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(serials(true), ["system", "WD-1"]);
    // A guest that has started without finds its hardware as it was.
    assert_eq!(serials(false), ["WD-1"]);
}

#[test]
fn the_clock_has_the_time_of_its_zone() {
    let prepared = Prepared { rtc_base: Some("2027-01-15T11:00:00".into()), ..prepared() };
    let lines = qemu(&config("    rtcBase: localtime"), &prepared, sockets(), &standard_template()).unwrap();
    assert!(lines.iter().any(|line| line.starts_with("base=2027-01-15T11:00:00,clock=rt")), "{lines:?}");
}

#[test]
fn what_the_runner_relies_on_is_missed_by_its_block() {
    let vm = config(
        "    drives: [{ type: raw, resource: /dev/a-disk }, { type: ide-cd, file: '' }]\n    network: [{ type: user, device: virtio-net, \
         forwards: [{ protocol: tcp, address: 127.0.0.1, port: 2222, guestPort: 22 }] }]\n",
    );
    let error = |text: &str| {
        let text = format!("{{% extends 'builtin/standard.yaml.j2' %}}{text}");
        qemu(&vm, &prepared(), sockets(), &template("own.yaml.j2", &text)).map(drop).unwrap_err().to_string()
    };
    for (block, what) in [
        ("monitors", "the socket of the monitor `monitor`"),
        ("ports", "the socket of the serial console"),
        ("devices", "the balloon"),
        ("disks", "the disk disk0"),
        ("disk", "the disk disk0"),
        ("cd", "the CD drive cd0"),
        ("networks", "the network net0"),
        ("network", "the network net0"),
    ] {
        let named = match block {
            "disks" => "disk",
            "networks" => "network",
            _ => block,
        };
        assert_eq!(
            error(&format!("{{% block {block} %}}{{% endblock %}}")),
            format!(
                "own.yaml.j2: it leaves out {what}, which the runner needs: see the block `{named}` of builtin/qemu/standard.yaml.j2"
            )
        );
    }
    let forwards = "{% block network %}- -netdev\n- { type: user, id: net0 }\n{% endblock %}";
    assert!(error(forwards).contains("the forwarded port tcp:127.0.0.1:2222-:22"), "{}", error(forwards));
    let whole = qemu(&vm, &prepared(), sockets(), &template("own.yaml.j2", "- -nodefaults"));
    assert!(whole.unwrap_err().to_string().contains("-S"));
    // The blocks that anybody may leave out.
    for block in ["usb", "extra_devices", "root_ports", "clock", "boot", "video", "cloud_init", "display"] {
        let text = format!("{{% extends 'builtin/standard.yaml.j2' %}}{{% block {block} %}}{{% endblock %}}");
        qemu(&vm, &prepared(), sockets(), &template("own.yaml.j2", &text)).unwrap();
    }
}

#[test]
fn a_template_reads_the_devices_of_plugins_and_no_other_variable() {
    let variables = [("PCI_RESOURCE_NVIDIA_COM_GPU", "0000:01:00.0"), ("RUST_LOG", "debug")];
    let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned()));
    let prepared = Prepared { environment: Environment::of(variables), ..prepared() };
    let with = |expression: &str| {
        let text = format!(
            "{{% extends 'builtin/qemu/standard.yaml.j2' %}}{{% block extra_devices %}}- {expression}\n{{% endblock %}}"
        );
        qemu(&config(""), &prepared, sockets(), &template("own.yaml.j2", &text))
    };
    let gpu = with("{{ \"vfio-pci,host=\" ~ env.PCI_RESOURCE_NVIDIA_COM_GPU }}").unwrap();
    assert!(gpu.contains(&"vfio-pci,host=0000:01:00.0".to_owned()));
    assert!(with("{{ \"yes\" if env.USB_RESOURCE_X is none else \"no\" }}").unwrap().contains(&"yes".to_owned()));
    let error = with("{{ env.RUST_LOG }}").unwrap_err().to_string();
    assert!(
        error.contains("env.RUST_LOG: of the environment, templates can read variables that begin with"),
        "{error}"
    );
}

#[test]
fn the_cpu_becomes_one_that_tcg_can_emulate() {
    for (wanted, accelerator, expected) in [
        ("host", "kvm", "host"),
        ("host,hv-relaxed", "kvm", "host,hv-relaxed"),
        ("host", "tcg", "max"),
        ("host,hv-relaxed,-vmx,hv_vpindex,+hv-synic", "tcg", "max,-vmx"),
        ("Skylake-Server,hv-stimer=on", "tcg", "Skylake-Server"),
        ("hostile", "tcg", "hostile"),
        ("Skylake-Server", "tcg", "Skylake-Server"),
    ] {
        assert_eq!(cpu_model(wanted, accelerator), expected, "{wanted}");
    }
}

#[test]
fn a_template_of_the_image_may_have_any_name_and_a_kept_one_has_its_own_built_in_one() {
    for name in ["mine", "mine.yaml", "My-VM.ftl.yaml", "standard.yaml.j2"] {
        let text = "{% extends 'builtin/standard.yaml.j2' %}{% block boot %}{% endblock %}";
        qemu(&config(""), &prepared(), sockets(), &template(name, text)).unwrap();
    }
    let mut kept = template("own.yaml.j2", "{% extends 'builtin/qemu/standard.yaml.j2' %}");
    kept.file.standard = Some(QEMU_STANDARD_OF_A_KEPT_VM.replace("TEXT", built_in(STANDARD).unwrap()));
    assert!(qemu(&config(""), &prepared(), sockets(), &kept).unwrap().contains(&"of-former-release".to_owned()));
}

/// A built-in template of another release.
const QEMU_STANDARD_OF_A_KEPT_VM: &str = "TEXT\n- -name\n- of-former-release\n";
