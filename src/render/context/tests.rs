use kube::core::{DynamicObject, TypeMeta};

use super::*;
use crate::{
    observed::Object,
    test_support::{applied, noon, nothing, rendered, vm},
};

fn context(vm: &VirtualMachine, observed: &Observed) -> Context {
    build(vm, observed, &ReconcilerConfig::default(), &Facts::default(), json!({})).unwrap()
}

#[test]
fn a_kept_address_is_not_given_to_a_second_network() {
    let (x, y) = ("52:54:00:00:00:0a", "52:54:00:00:00:02");
    let vm: VirtualMachine = serde_json::from_value(json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "spec": { "vm": {
            "maximumCpus": 1, "maximumRam": "1Gi", "disks": [],
            "networks": [{ "user": {} }, { "tap": { "mac": x.to_uppercase() } }, { "user": {} }],
        } },
        "status": { "identity": { "uuid": "u", "macs": [x, y, y], "machineType": "q35" } },
    }))
    .unwrap();
    let macs = json!(networks(&vm)).as_array().unwrap().iter().map(|it| it["mac"].clone()).collect::<Vec<_>>();
    assert_eq!(macs, [Value::Null, json!(x.to_uppercase()), json!(y)]);
}

#[test]
fn every_field_of_the_schema_is_there() {
    let mut spec = json!({ "vm": { "maximumCpus": 1, "disks": [{ "cdrom": { "image": "" } }] } });
    complete(&mut spec, spec_schema());
    for pointer in [
        "/nodeName",
        "/affinity",
        "/cloudInit",
        "/vm/machineUuid",
        "/vm/disks/0/bootindex",
        "/vm/disks/0/volumeClaimTemplate",
    ] {
        assert_eq!(spec.pointer(pointer), Some(&Value::Null), "{pointer}");
    }
    assert_eq!(spec.pointer("/vm/maximumCpus"), Some(&json!(1)));
}

#[test]
fn cd_images() {
    for (image, file) in [
        ("", ""),
        ("Fedora.iso", "/var/local/vmop-image-repository/Fedora.iso"),
        ("/tmp/a.iso", "/tmp/a.iso"),
        ("https://example.org/a.iso", "https://example.org/a.iso"),
    ] {
        assert_eq!(cd_file(image), file);
    }
}

#[test]
fn of_several_display_secrets_it_is_a_persons_and_the_first_by_name() {
    let secret = |name: &str, managed_by: &str| {
        let labels = json!({
            "app.kubernetes.io/name": crate::object::APP_NAME, "app.kubernetes.io/instance": "apple",
            "app.kubernetes.io/component": "display-secret", "app.kubernetes.io/managed-by": managed_by,
        });
        let object: DynamicObject =
            serde_json::from_value(json!({ "metadata": { "name": name, "labels": labels } })).unwrap();
        let types = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
        Arc::new(Object::trim(&types, object))
    };
    let generated = secret("apple-display-secret", crate::object::MANAGED_BY);
    let mut objects = vec![generated, secret("mine", "me"), secret("hers", "her")];
    for _ in 0..objects.len() {
        objects.rotate_left(1);
        let observed = Observed { objects: objects.clone(), now: noon() };
        let chosen = context(&vm(|_| ()), &observed).display_secret;
        // Whoever has set a password in the generated one does not lose it.
        assert_eq!((chosen.name.as_deref(), chosen.generate), (Some("hers"), true));
    }
}

#[test]
fn the_file_on_a_volume_is_as_large_as_the_disk_is_to_be_and_has_room() {
    let disk = |size: &str| {
        let spec = json!({ "volumeMode": "Filesystem", "resources": { "requests": { "storage": size } } });
        vm(move |vm| vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"] = spec)
    };
    let has = |capacity: &'static str| {
        applied(&rendered(&disk("1Gi"), &nothing()), move |kind, object| {
            if kind == "PersistentVolumeClaim" {
                object["status"] = json!({ "capacity": { "storage": capacity } });
            }
        })
    };
    let mounted_larger = applied(&rendered(&disk("3Gi"), &nothing()), |kind, object| {
        if kind == "PersistentVolumeClaim" {
            let condition = json!({ "type": "FileSystemResizePending", "status": "True" });
            object["status"] = json!({ "capacity": { "storage": "1Gi" }, "conditions": [condition] });
        }
    });
    let gigabytes = |vm: &VirtualMachine, observed: &Observed| match &context(vm, observed).runner.runner.vm.drives[0] {
        Drive::Raw { size, .. } => size.map(|size| size >> 30),
        Drive::IdeCd { .. } => None,
    };
    for (wanted, observed, expected) in [
        ("1Gi", nothing(), 1),
        ("1Gi", has("5Gi"), 1),
        ("3Gi", has("1Gi"), 1),
        ("3Gi", has("3Gi"), 3),
        ("3Gi", mounted_larger, 3),
    ] {
        assert_eq!(gigabytes(&disk(wanted), &observed), Some(expected), "{wanted}");
    }
}

#[test]
fn a_machine_keeps_its_type_and_its_macs_for_its_life() {
    let machine = |status: Value| {
        vm(|vm| {
            vm["spec"]["vm"]["networks"] =
                json!([{ "user": {} }, { "tap": {} }, { "tap": { "mac": "02:00:00:00:00:07" } }, { "pod": {} }]);
            vm["status"] = status;
        })
    };
    let macs = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03", "02:00:00:00:00:04"];
    let told = |vm: &VirtualMachine| {
        let vm = json!(context(vm, &nothing()).runner.runner.vm);
        let networks = vm["network"].as_array().unwrap();
        let macs: Vec<Value> = networks.iter().map(|network| network["mac"].clone()).collect();
        json!([vm["uuid"], vm["machineType"], macs])
    };
    let identity = json!({ "uuid": "u", "machineType": "pc-q35-7.2", "macs": macs });
    assert_eq!(
        told(&machine(json!({ "identity": identity }))),
        json!(["u", "pc-q35-7.2", [macs[0], macs[1], "02:00:00:00:00:07", macs[3]]])
    );
    // Before the first start it is the runner that chooses.
    let chosen = json!([null, null, [null, null, "02:00:00:00:00:07", null]]);
    assert_eq!(told(&machine(json!({}))), chosen);
}
