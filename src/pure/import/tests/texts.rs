//! Texts with several VMs, texts with none, and texts that are refused.

use super::*;

#[test]
fn each_vm_of_a_collection_has_a_list_of_its_own() {
    let vms = read(COLLECTION, Format::Ovf, "file", Wish::default()).unwrap();
    let names: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
    assert_eq!(names, ["web", "db"]);
    let [web, db] = vms.as_slice() else { panic!("{vms:#?}") };
    for (vm, cpus, ram, disk, size) in [(web, 2, "1Gi", "d1", "8Gi"), (db, 4, "2Gi", "d2", "9Gi")] {
        let machine = &vm.manifest["spec"]["vm"];
        assert_eq!(vm.manifest["metadata"]["name"], vm.name.as_str());
        assert_eq!((&machine["maximumCpus"], &machine["maximumRam"]), (&cpus.into(), &ram.into()));
        let claim = &machine["disks"][0]["volumeClaimTemplate"];
        assert_eq!(claim["metadata"]["name"], disk);
        assert_eq!(claim["spec"]["resources"]["requests"]["storage"], size);
        assert_eq!(machine["disks"][1], serde_json::json!({ "cdrom": { "image": "" } }), "both have the CD");
        assert!(vm.steps.contains(&format!("  kubectl delete pod {}-import", vm.name)), "{:#?}", vm.steps);
    }
    let not_same = |vm: &Imported| -> Vec<String> {
        let findings = vm.findings.iter().filter(|it| it.grade != Grade::Same);
        findings.map(ToString::to_string).collect()
    };
    assert_eq!(
        not_same(web),
        [
            "6: <References/File>: no equivalent: no disk and no drive uses it",
            "9: <DiskSection/Disk>: changed: its content has to be copied into the claim web-d1-disk (see the comments)",
            "12: <VirtualSystemCollection id>: no equivalent: nothing groups VMs: write labels",
            "15: <VirtualSystemCollection/StartupSection/Item>: no equivalent: \"Web\" has the order 2 there: VMs start \
             independently of each other",
            "17: <VirtualSystemCollection/StartupSection/Item>: no equivalent: \"mail\" has no order there: VMs start \
             independently of each other",
            "19: metadata.name: changed: \"web\" (before: \"Web\"): names are of lower case letters, digits and hyphens",
            "23: <VirtualSystemCollection/VirtualSystem/VirtualHardwareSection/Item>: changed: a disk on virtio: Windows needs \
             the driver viostor before it moves",
            "24: <VirtualSystemCollection/VirtualSystem/VirtualHardwareSection/Item>: changed: an empty drive: put tools.iso \
             into the image repository, or set spec.vm.disks[].cdrom.image to a URL",
        ]
    );
    assert_eq!(
        not_same(db),
        [
            "10: <DiskSection/Disk>: changed: its content has to be copied into the claim db-d2-disk (see the comments)",
            "16: <VirtualSystemCollection/StartupSection/Item>: no equivalent: \"db\" has the order 1 there: VMs start \
             independently of each other",
            "27: <VirtualSystemCollection/VirtualSystemCollection id>: no equivalent: nothing groups VMs: write labels",
            "33: <VirtualSystemCollection/VirtualSystemCollection/VirtualSystem/VirtualHardwareSection/Item>: changed: a disk on \
             virtio: Windows needs the driver viostor before it moves",
            "34: <VirtualSystemCollection/VirtualSystemCollection/VirtualSystem/VirtualHardwareSection/Item>: changed: an empty \
             drive: put tools.iso into the image repository, or set spec.vm.disks[].cdrom.image to a URL",
        ]
    );
    // Only the CD is in both.
    let lines = |vm: &Imported| -> Vec<usize> {
        let files = vm.findings.iter().filter(|it| it.what == "<References/File>");
        files.flat_map(|it| it.lines.iter().copied()).collect()
    };
    assert_eq!((lines(web), lines(db)), (vec![3, 5, 6], vec![4, 5]));
}

/// Several VMs of one name are called differently, and one of them can be chosen.
#[test]
fn the_vms_of_a_text_have_names_of_their_own() {
    let system = |id: &str| format!("<VirtualSystem ovf:id='{id}'/>");
    let long = "x".repeat(70);
    let systems: String = ["a b", "A.B", "a-b-2", "", "a b", &long, &long].map(system).concat();
    let text =
        format!("<Envelope xmlns:ovf='o'><VirtualSystemCollection>{systems}</VirtualSystemCollection></Envelope>");
    let vms = read(&text, Format::Ovf, "a b", Wish::default()).unwrap();
    let names: Vec<&str> = vms.iter().map(|vm| vm.name.as_str()).collect();
    let (whole, cut) = ("x".repeat(63), format!("{}-2", "x".repeat(61)));
    assert_eq!(names, ["a-b", "a-b-2", "a-b-2-2", "a-b-3", "a-b-4", &whole, &cut]);
    let whys = |vm: &Imported| -> Vec<String> {
        let findings = vm.findings.iter().filter(|it| it.what == "metadata.name");
        findings.map(|it| it.why.clone()).collect()
    };
    assert_eq!(whys(&vms[0]), ["\"a-b\" (before: \"a b\"): names are of lower case letters, digits and hyphens"]);
    assert_eq!(whys(&vms[1]), ["\"a-b-2\" (before: \"A.B\"): another VM has that name"]);
    assert_eq!(whys(&vms[3]), Vec::<String>::new(), "it has no name");
    let wish = Wish { only: Some("a-b-3"), name: Some("new"), ..Wish::default() };
    let chosen = read(&text, Format::Ovf, "a b", wish).unwrap();
    assert_eq!(chosen.len(), 1);
    assert_eq!((chosen[0].name.as_str(), &chosen[0].manifest["metadata"]["name"]), ("a-b-3", &"new".into()));
    let wish = Wish { only: Some("c"), ..Wish::default() };
    let error = read(&text, Format::Ovf, "a b", wish).unwrap_err();
    assert!(error.message.starts_with("no VM of this file gets the name \"c\": there are a-b, a-b-2, "), "{error}");
    let names = ["a"; 12];
    assert_eq!(listed(names.iter().copied()), "a, a, a, a, a, a, a, a, a, a and 2 more");
}

#[test]
fn the_vms_of_several_texts_have_names_of_their_own() {
    let mut before = Before::default();
    let mut names = |text: &str, file: &str, wish: Wish<'_>| -> Vec<String> {
        let format = Format::of(text).unwrap();
        let vms = read_after(text, format, file, wish, &mut before).unwrap();
        vms.into_iter().map(|vm| vm.name).collect()
    };
    let everything = Wish::default();
    let domain = |name: &str| format!("<domain type='kvm'><name>{name}</name></domain>");
    let object = |place: &str| object("VirtualMachine", place, SPECS[0]);
    assert_eq!(names(&domain("web"), "a", everything), ["web"]);
    assert_eq!(names(&(domain("db") + &domain("web")), "a", everything), ["db", "web-2"]);
    assert_eq!(names(&object("name: web"), "b", everything), ["web-3"]);
    assert_eq!(names(&object("name: web, namespace: shop"), "b", everything), ["web"]);
    assert_eq!(names("images: []\n", "web", everything), ["web-4"]);
    let wish = Wish { only: Some("web-5"), ..Wish::default() };
    assert_eq!(names(&domain("mail"), "c", wish), Vec::<String>::new());
    assert_eq!(names(&domain("web"), "c", wish), ["web-5"]);
    let mut before = Before::default();
    for text in [domain("web"), domain("db")] {
        read_after(&text, Format::Libvirt, "a", Wish { only: Some("mail"), ..Wish::default() }, &mut before).unwrap();
    }
    let expected = "no VM of these files gets the name \"mail\": there are web, db";
    assert_eq!(before.no_vm("mail", "these files"), expected);
}

/// An object of KubeVirt on one line.
fn object(kind: &str, place: &str, spec: &str) -> String {
    format!("{{apiVersion: kubevirt.io/v1, kind: {kind}, metadata: {{{place}}}, spec: {spec}}}")
}

/// The smallest specs of a VM and of an instance.
const SPECS: [&str; 2] = ["{running: true, template: {spec: {domain: {devices: {}}}}}", "{domain: {devices: {}}}"];

#[test]
fn lists_of_kubevirt_are_read() {
    let [vm_spec, instance_spec] = SPECS;
    let items = [
        object("VirtualMachine", "name: web, namespace: a, labels: {app: shop}", vm_spec),
        object("VirtualMachineInstance", "name: web, namespace: a", instance_spec),
        object("VirtualMachineInstance", "name: alone, namespace: a", instance_spec),
        object("VirtualMachine", "name: web, namespace: b", vm_spec),
        object("VirtualMachinePool", "name: desktops", "{replicas: 3}"),
        object("DataVolume", "name: root", "{}"),
    ];
    let items: String = items.iter().map(|item| format!("- {item}\n")).collect();
    // As `kubectl get vm,vmi -A -o yaml` prints it, and another document.
    let text = format!(
        "apiVersion: v1\nitems:\n{items}kind: List\nmetadata:\n  resourceVersion: ''\n---\n{}\n",
        object("VirtualMachine", "name: mail", vm_spec)
    );
    assert_eq!(Format::of(&text), Ok(Format::Kubevirt));
    let vms = read(&text, Format::Kubevirt, "file", Wish::default()).unwrap();
    let places: Vec<_> = vms
        .iter()
        .map(|vm| (vm.manifest["metadata"]["namespace"].as_str(), vm.name.as_str(), vm.findings[0].lines[0]))
        .collect();
    assert_eq!(places, [(Some("a"), "web", 3), (Some("a"), "alone", 5), (Some("b"), "web", 6), (None, "mail", 13)]);
    let shown: Vec<Vec<String>> = vms.iter().map(|vm| vm.findings.iter().map(ToString::to_string).collect()).collect();
    let pool = "7: VirtualMachinePool desktops: no equivalent: it makes VMs of a template: import one of them (kubectl get vm NAME \
                -o yaml), and make a VmPool of it (docs/pools.md)";
    assert!(shown[0].contains(&pool.to_owned()), "{shown:#?}");
    assert!(shown.iter().skip(1).flatten().all(|line| !line.contains("Pool")), "{shown:#?}");
    let label = "3: items[0].metadata.labels.app: the same: metadata.labels.app".to_owned();
    assert!(shown[0].contains(&label), "{shown:#?}");
    // In one namespace they need other names.
    let wish = Wish { namespace: Some("c"), ..Wish::default() };
    let vms = read(&text, Format::Kubevirt, "file", wish).unwrap();
    assert_eq!(vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), ["web", "alone", "web-2", "mail"]);
}

#[test]
fn lists_of_the_api_server_and_json_are_read() {
    let item = |name: &str| format!("{{metadata: {{name: {name}}}, spec: {}}}", SPECS[0]);
    let list = format!(
        "apiVersion: kubevirt.io/v1\nkind: VirtualMachineList\nmetadata: {{}}\nitems:\n- {}\n- {}\n",
        item("a"),
        item("b")
    );
    let spec = serde_json::json!({ "template": { "spec": { "domain": { "devices": {} } } } });
    let vm = |name: &str| serde_json::json!({ "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": { "name": name }, "spec": spec });
    let json = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": [vm("a"), vm("b")] });
    let each = |form: fn(&serde_json::Value) -> String| ["a", "b"].map(|name| form(&vm(name)) + "\n").concat();
    let (long, short) = (each(|vm| format!("{vm:#}")), each(serde_json::Value::to_string));
    for text in [list, format!("{json:#}"), json.to_string(), long, short] {
        assert_eq!(Format::of(&text), Ok(Format::Kubevirt));
        let vms = read(&text, Format::Kubevirt, "file", Wish::default()).unwrap();
        assert_eq!(vms.iter().map(|vm| vm.name.as_str()).collect::<Vec<_>>(), ["a", "b"], "{text}");
    }
    let error = read(&each(|vm| vm.to_string().replacen('}', "", 1)), Format::Kubevirt, "file", Wish::default());
    assert_eq!(error.unwrap_err().at.0, 1);
}

#[test]
fn a_template_set_fills_all_disks_that_have_an_address() {
    let text = object(
        "VirtualMachine",
        "name: a",
        "{dataVolumeTemplates: [{metadata: {name: dv}, spec: {source: {http: {url: 'https://example.org/b.raw'}}, storage: {}}}], \
         template: {spec: {domain: {devices: {}}, volumes: [{name: root, containerDisk: {image: 'example.org/a:1'}}, \
         {name: data, dataVolume: {name: dv}}, {name: system, containerDisk: {image: 'example.org/c:1', path: /disk/c}}, \
         {name: old, persistentVolumeClaim: {claimName: old}}]}}}",
    );
    let vms = read(&text, Format::Kubevirt, "file", Wish::default()).unwrap();
    let spec = &vms[0].manifest["spec"];
    assert_eq!(spec["templates"], serde_json::json!({ "set": "import-disk" }));
    let others = serde_json::json!({
        "data": { "url": "https://example.org/b.raw", "format": "raw" },
        "system": { "oci": "example.org/c:1", "path": "/disk/c" },
    });
    let import = serde_json::json!({ "disk": "root", "oci": "example.org/a:1", "disks": others });
    assert_eq!(spec["templateValues"], serde_json::json!({ "import": import }));
    let steps = vms[0].steps.concat();
    assert!(steps.contains("a-old-disk") && !steps.contains("a-data-disk"), "{steps}");
}

#[test]
fn the_data_of_a_vm_of_a_cluster_is_copied() {
    let vm = |place: &str, status: &str| {
        let spec = "{running: true, dataVolumeTemplates: [{metadata: {name: dv}, spec: {source: {http: {url: \
                    'https://example.org/a.qcow2'}}, storage: {resources: {requests: {storage: 8Gi}}}}}], template: {spec: {domain: \
                    {devices: {}}, volumes: [{name: root, dataVolume: {name: dv}}, {name: tools, containerDisk: {image: \
                    'example.org/a:1'}}]}}}";
        let object = object("VirtualMachine", &format!("name: a{place}"), spec);
        let text = format!("{}{status}}}", object.strip_suffix('}').unwrap());
        read(&text, Format::Kubevirt, "file", Wish::default()).unwrap().remove(0)
    };
    for (place, status, is_copied) in [
        ("", "", false),
        ("", ", status: {}", false),
        (", uid: ''", "", false),
        (", creationTimestamp: null", ", status: null", false),
        (", uid: 3f0c", "", true),
        (", resourceVersion: '81'", "", true),
        ("", ", status: {printableStatus: Stopped}", true),
        (", uid: 3f0c", ", status: {ready: true}", true),
    ] {
        let vm = vm(place, status);
        let spec = &vm.manifest["spec"];
        let (import, steps) = (&spec["templateValues"]["import"], vm.steps.concat());
        let found = vm.findings.iter().find(|it| it.what.ends_with(".dataVolume")).unwrap();
        let storage = "/vm/disks/0/volumeClaimTemplate/spec/resources/requests/storage";
        assert_eq!(spec.pointer(storage), Some(&"8Gi".into()), "{place}{status}");
        assert_eq!(
            found.why.contains("the file is of a cluster, where the guest may have changed"),
            is_copied,
            "{found}"
        );
        // A container disk has its image again at each start, in KubeVirt too.
        assert!(import["disks"].get("tools").or_else(|| import.get("oci")).is_some(), "{import}");
        assert_eq!(import["disk"], if is_copied { "tools" } else { "root" }, "{import}");
        let command = "kubectl exec -i a-import -- dd of=/dev/root bs=1M < ...   # the claim dv, which the DataVolume of that name fills";
        assert_eq!(steps.contains(command), is_copied, "{steps}");
        assert_eq!(spec["vm"].get("state").is_none(), is_copied, "it must not start on an empty disk");
    }
}

#[test]
fn a_blank_data_volume_is_an_empty_disk() {
    let vm = |place: &str| {
        let spec = "{running: true, dataVolumeTemplates: [{metadata: {name: dv}, spec: {source: {blank: {}}, storage: {resources: \
                    {requests: {storage: 8Gi}}}}}], template: {spec: {domain: {devices: {}}, volumes: [{name: data, dataVolume: \
                    {name: dv}}]}}}";
        read(&object("VirtualMachine", place, spec), Format::Kubevirt, "file", Wish::default()).unwrap().remove(0)
    };
    let new = vm("name: a");
    assert_eq!((new.steps.as_slice(), &new.manifest["spec"]["vm"]["state"]), ([].as_slice(), &"Running".into()));
    assert_eq!(new.manifest["spec"].get("templates"), None);
    let of_a_cluster = vm("name: a, uid: 3f0c");
    assert!(of_a_cluster.steps.concat().contains("# the claim dv, which the DataVolume of that name fills"));
    let found = |vm: &Imported| {
        let finding = vm.findings.iter().find(|it| it.what.ends_with("].dataVolume")).unwrap();
        (finding.grade, finding.why.clone())
    };
    assert_eq!(found(&new), (Grade::Same, "an empty disk".to_owned()));
    assert_eq!(
        found(&of_a_cluster),
        (Grade::Changed, "its content has to be copied into the claim a-data-disk (see the comments)".to_owned())
    );
}

#[test]
fn a_claim_or_a_file_that_two_vms_share_is_told() {
    let vm = |place: &str, claim: &str| {
        let volumes = format!("[{{name: root, persistentVolumeClaim: {{claimName: {claim}}}}}]");
        object(
            "VirtualMachine",
            place,
            &format!("{{template: {{spec: {{domain: {{devices: {{}}}}, volumes: {volumes}}}}}}}"),
        )
    };
    let vms = [
        vm("name: a, namespace: x", "data"),
        vm("name: b, namespace: x", "data"),
        vm("name: c, namespace: y", "data"),
        vm("name: d, namespace: x", "own"),
    ];
    let domain = |name: &str, file: &str| {
        format!(
            "<domain type='kvm'><name>{name}</name><devices><disk><source file='{file}'/><target dev='vda'/></disk></devices></domain>\n"
        )
    };
    let domains = domain("a", "/x.img") + &domain("b", "/x.img") + &domain("c", "/y.img") + &domain("d", "/z.img");
    for (text, format, part) in [
        (vms.join("\n---\n"), Format::Kubevirt, "spec.template.spec.volumes[0].persistentVolumeClaim"),
        (domains, Format::Libvirt, "<disk/source>"),
    ] {
        let vms = read(&text, format, "file", Wish::default()).unwrap();
        let told: Vec<Vec<&str>> = vms
            .iter()
            .map(|vm| {
                let findings = vm.findings.iter().filter(|it| it.why.starts_with("the VM a has the same disk"));
                findings.map(|it| it.what.as_str()).collect()
            })
            .collect();
        assert_eq!(told, [vec![], vec![part], vec![], vec![]]);
    }
}

#[test]
fn objects_of_kubevirt_that_are_no_vms_are_named() {
    let [vm_spec, _] = SPECS;
    let pool = object("VirtualMachinePool", "name: desktops", "{replicas: 3}");
    let set = object("VirtualMachineInstanceReplicaSet", "name: web", "{replicas: 3}");
    let kind = object("VirtualMachineInstancetype", "name: u1", "{cpu: {guest: 1}}");
    let snapshot = object("VirtualMachineSnapshot", "name: s", "{}");
    for (text, at, complaint) in [
        (
            pool.clone(),
            1,
            "VirtualMachinePool desktops: it makes VMs of a template: import one of them (kubectl get vm NAME",
        ),
        (
            format!("---\n{set}\n"),
            2,
            "VirtualMachineInstanceReplicaSet web: it makes VMs of a template: import one of them (kubectl get vmi",
        ),
        (kind.clone(), 1, "VirtualMachineInstancetype u1: write CPUs and memory out"),
        (snapshot, 1, "VirtualMachineSnapshot s: it is no VM"),
        ("kind: VirtualMachine\nmetadata: {name: a}\n".into(), 1, "VirtualMachine a: it has no spec"),
        (
            "kind: Template\nmetadata: {name: t}\nobjects: []\n".into(),
            1,
            "Template t: a template of OpenShift: `oc process",
        ),
        ("kind: List\nitems: []\n".into(), 1, "there is nothing in this file"),
        ("---\n---\n".into(), 1, "there is nothing in this file"),
        (
            "kind: List\nitems:\n- {kind: Pod, spec: {}}\n- {kind: Job}\n- {}\n- {kind: Pod}\n".into(),
            1,
            "there is no VirtualMachine in this file, only objects that are: without kind, Job, Pod",
        ),
    ] {
        let error = read(&text, Format::Kubevirt, "file", Wish::default()).unwrap_err();
        assert_eq!(error.at.0, at, "{text}");
        assert!(error.message.starts_with(complaint), "{complaint}: {error}");
    }
    // Beside a VM they are only a line.
    let text = format!("{kind}\n---\n{}\n---\n{pool}\n", object("VirtualMachine", "name: a", vm_spec));
    let vms = read(&text, Format::Kubevirt, "file", Wish::default()).unwrap();
    let [vm] = vms.as_slice() else { panic!("{vms:#?}") };
    let lines: Vec<String> = vm
        .findings
        .iter()
        .filter(|it| it.grade == Grade::LeftOut)
        .map(|it| format!("{}: {}", it.lines[0], it.what))
        .collect();
    assert_eq!(lines, ["1: VirtualMachineInstancetype u1", "5: VirtualMachinePool desktops"]);
}

#[test]
fn several_domains_of_libvirt_are_read() {
    let domain = |name: &str| format!("<!-- of virsh -->\n<domain type='kvm'>\n<name>{name}</name>\n</domain>\n");
    let two = domain("web") + &domain("db");
    for (text, first) in [
        (two.clone(), 2),
        (format!("<?xml version='1.0'?>\n{two}"), 3),
        (format!("<domains>\n{two}</domains>"), 3),
        (format!("<?xml version='1.0'?>\n<domains>{two}</domains>"), 3),
        (format!("\n<?xml version='1.0'\nencoding='x'?><!-- <?xml-a?> -->{two}"), 4),
        (two.replace("<!-- of virsh -->", "<?xml version='1.0'?>"), 2),
        (two.replace("</domain>", "</domain >"), 2),
    ] {
        assert_eq!(Format::of(&text), Ok(Format::Libvirt));
        let vms =
            read(&text, Format::Libvirt, "file", Wish::default()).unwrap_or_else(|error| panic!("{error}: {text}"));
        let found: Vec<_> =
            vms.iter().map(|vm| (vm.name.as_str(), vm.findings[0].what.as_str(), vm.findings[0].lines[0])).collect();
        assert_eq!(found, [("web", "<domain type>", first), ("db", "<domain type>", first + 4)], "{text}");
    }
    for (text, line, complaint) in [
        (domain("web") + "<domain type='kvm'></domains>", 5, ""),
        (domain("web") + &domain("db").replace("kvm", "xen"), 6, "this is a domain of xen"),
        ("<domains>\n<network/></domains>".into(), 2, "<network> is no domain"),
        ("<domains/>".into(), 1, "there is nothing in this file"),
        (
            domain("web") + "\nerror: failed to get domain 'x'\n" + &domain("db"),
            6,
            "this is no part of XML: \"error: failed to get domain 'x'\"",
        ),
        ("no XML".into(), 1, "this is no XML: an element is expected here"),
        (" \n".into(), 1, "there is nothing in this file"),
        ("<?xml ".repeat(100_000), 1, ""),
    ] {
        let error = read(&text, Format::Libvirt, "file", Wish::default()).unwrap_err();
        assert_eq!(error.at.0, line, "{text}: {error}");
        assert!(error.message.starts_with(complaint), "{complaint}: {error}");
    }
}

#[test]
fn attributes_without_end_are_refused() {
    let attributes = |count: usize| (0..count).map(|number| format!(" a{number}='>\"'")).collect::<String>();
    let domain = |attributes: &str| format!("<domain type='kvm'>\n<!-- {attributes} -->\n<a{attributes}/>\n</domain>");
    assert!(read(&domain(&attributes(2000)), Format::Libvirt, "file", Wish::default()).is_ok());
    let error = read(&domain(&attributes(50_000)), Format::Libvirt, "file", Wish::default()).unwrap_err();
    assert_eq!((error.at.0, error.message.as_str()), (3, "the elements up to here have too many attributes"));
}

#[test]
fn what_no_api_server_takes_is_told() {
    let domain =
        |title: usize| format!("<domain type='kvm'><name>a</name>\n<title>{}</title></domain>", "x".repeat(title));
    let small = read(&domain(250 << 10), Format::Libvirt, "file", Wish::default()).unwrap();
    assert!(small[0].manifest["metadata"].get("annotations").is_some());
    let large = read(&domain(300 << 10), Format::Libvirt, "file", Wish::default()).unwrap();
    assert_eq!(large[0].manifest["metadata"].get("annotations"), None);
    let found = large[0].findings.iter().find(|it| it.what == "metadata.annotations").unwrap();
    assert_eq!((found.grade, found.lines.as_slice()), (Grade::LeftOut, [1].as_slice()));
    let text = KUBEVIRT.replace("password: x", &format!("password: {}", "x".repeat(2 << 20)));
    let error = read(&text, Format::Kubevirt, "file", Wish::default()).unwrap_err();
    assert_eq!(error.message, "the VM would be larger than 1 MiB, and no API server takes that");
    // A name without end makes no line without end.
    let named = domain(1).replace("<name>a", &format!("<name>{}", "a".repeat(9000)));
    let named = read(&named, Format::Libvirt, "file", Wish::default()).unwrap();
    assert!(named[0].findings.iter().all(|finding| finding.to_string().len() < 1000));
}

#[test]
fn a_file_of_another_format_is_refused() {
    let [vm_spec, _] = SPECS;
    let kubevirt = object("VirtualMachine", "name: a", vm_spec).replace(", kind:", "\n, kind:");
    let block = "apiVersion: kubevirt.io/v1\nkind: VirtualMachine\nmetadata:\n  name: a\n";
    for (text, format, complaint) in [
        (kubevirt.as_str(), Format::Proxmox, "this is no line of the form"),
        (block, Format::Proxmox, "this is no line of the form"),
        ("images:\n- location: a\n", Format::Proxmox, "this is no line of the form"),
        (LIBVIRT, Format::Proxmox, "this is no line of the form"),
        ("", Format::Proxmox, "there is no line of the form"),
        ("# a\n[b]\n", Format::Proxmox, "there is no line of the form"),
        (PROXMOX, Format::Libvirt, "this is no XML"),
        (LIBVIRT, Format::Ovf, "<domain> is no envelope of OVF"),
        (
            "images: []\n",
            Format::Kubevirt,
            "there is no VirtualMachine in this file, only objects that are: without kind",
        ),
    ] {
        let error = read(text, format, "file", Wish::default()).unwrap_err();
        assert!(error.message.starts_with(complaint), "{format:?}: {complaint}: {error}");
    }
    // An empty document beside another one is no VM.
    assert_eq!(read(&format!("---\n{kubevirt}\n---\n"), Format::Kubevirt, "file", Wish::default()).unwrap().len(), 1);
    let many = format!("[a]\n{}", "cores: 1,2\n".repeat(150_000));
    assert!(
        read(&many, Format::Proxmox, "file", Wish::default()).unwrap_err().message.starts_with("this is more than")
    );
    let described = read("description: a%0Ab\nmemory: 512\n", Format::Proxmox, "file", Wish::default()).unwrap();
    let annotations = &described[0].manifest["metadata"]["annotations"];
    assert_eq!(annotations["kubernetes.io/description"], "a\nb");
}

#[test]
fn a_configuration_of_proxmox_that_can_not_be_is_refused_with_its_line() {
    for (text, complaint) in [
        ("cores: -1", "cores: \"-1\" is no number of CPUs"),
        ("sockets: many", "sockets: \"many\" is no number of CPUs"),
        ("vcpus: 0", "vcpus: \"0\" is no number of CPUs"),
        ("memory: 1", "the key \"memory\" is there twice"),
        ("cpu: host\ncpu: max", "the key \"cpu\" is there twice"),
        ("Cores: 2", "this is no line of the form `key: value`"),
    ] {
        let error = read(&format!("memory: 512\n{text}\n"), Format::Proxmox, "file", Wish::default()).unwrap_err();
        assert_eq!((error.at.0, error.message.as_str()), (1 + text.lines().count(), complaint));
    }
    // A snapshot has the same keys.
    let text = "description: a\ndescription: b\nmemory: 512\ncores: 2\n[old]\ncores: 1\n[older]\ncores: 1\n";
    read(text, Format::Proxmox, "file", Wish::default()).unwrap();
}

#[test]
fn hooks_of_kubevirt_are_left_out() {
    let place = "name: a, annotations: {hooks.kubevirt.io/hookSidecars: x, kubevirt.io/b: y}";
    let spec = "{template: {metadata: {annotations: {hooks.kubevirt.io/hookSidecars: x, c: d}}, spec: {domain: {devices: {}}}}}";
    let vms = read(&object("VirtualMachine", place, spec), Format::Kubevirt, "file", Wish::default()).unwrap();
    let mut found: Vec<_> =
        vms[0].findings.iter().filter(|it| it.grade != Grade::Same).map(ToString::to_string).collect();
    found.sort();
    let hook = "no equivalent: a program that changes the VM: options of QEMU take a template of the runner (docs/templates.md)";
    assert_eq!(
        found,
        [
            format!("1: metadata.annotations.hooks.kubevirt.io/hookSidecars: {hook}"),
            "1: metadata.annotations.kubevirt.io/b: no equivalent: it is for KubeVirt or kubectl".to_owned(),
            format!("1: spec.template.metadata.annotations.hooks.kubevirt.io/hookSidecars: {hook}"),
            "1: spec.template.metadata: changed: Pods of VMs have the labels of vm-operator: templates add others (block labels)"
                .to_owned(),
            "1: spec.template.spec.domain: changed: a Linux guest calls this card enp0s16f0 here (before: enp1s0): a configuration of the guest \
             that names the card must name the new one or match its MAC address, else the guest has no network"
                .to_owned(),
        ]
    );
}

#[test]
fn a_vm_that_can_not_be_is_no_obstacle_if_another_one_is_wanted() {
    let system = |id: &str, guest: &str| {
        format!("<VirtualSystem ovf:id='{id}'><OperatingSystemSection osType='{guest}'/></VirtualSystem>")
    };
    let text = format!("<Envelope xmlns:ovf='o'>{}{}</Envelope>", system("a", "arm-debian"), system("b", "debian"));
    let error = read(&text, Format::Ovf, "file", Wish::default()).unwrap_err();
    assert!(error.message.contains("aarch64"), "{error}");
    let only = |name| read(&text, Format::Ovf, "file", Wish { only: Some(name), ..Wish::default() });
    assert_eq!(only("b").unwrap().len(), 1);
    assert!(only("a").is_err());
}

#[test]
fn a_file_with_too_many_vms_is_refused() {
    let envelope = |files: &str, system: &str, count: usize| {
        format!("<Envelope xmlns:ovf='o'><References>{files}</References>{}</Envelope>", system.repeat(count))
    };
    let refused = |text: &str| read(text, Format::Ovf, "file", Wish::default()).unwrap_err().message;
    let many = refused(&envelope("", "<VirtualSystem/>", VMS + 1));
    assert_eq!(many, "there are 1001 VMs in this file, and at most 1000 are read: divide it");
    // Each VM has the whole file.
    let attributes: String = (0..2000).map(|number| format!(" a{number}=''")).collect();
    let files = format!("<File ovf:id='f'{attributes}/>");
    let system = "<VirtualSystem><VirtualHardwareSection><Item><HostResource>ovf:/file/f</HostResource></Item>\
                  </VirtualHardwareSection></VirtualSystem>";
    let shared = refused(&envelope(&files, system, 300));
    assert!(shared.contains("have more than 400000 parts"), "{shared}");
    assert_eq!(read(&envelope(&files, system, 30), Format::Ovf, "file", Wish::default()).unwrap().len(), 30);
}
