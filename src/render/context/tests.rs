use kube::core::{DynamicObject, TypeMeta};

use super::*;
use crate::{
    observed::Object,
    test_support::{applied, noon, nothing, rendered, vm},
};

fn context(vm: &VirtualMachine, observed: &Observed) -> Context {
    build(vm, observed, &ReconcilerConfig::default(), &RandomInput::default(), json!({})).unwrap()
}

#[test]
fn of_several_display_secrets_the_first_of_a_person_by_name_is_used() {
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
        let observed = Observed::of(objects.clone(), noon());
        let chosen = context(&vm(|_| ()), &observed).display_secret;
        // A password that somebody set in the generated one is not lost.
        assert_eq!((chosen.name.as_deref(), chosen.generate), (Some("hers"), true));
    }
}

#[test]
fn the_file_on_a_volume_has_the_size_of_the_disk_as_far_as_the_volume_has_room() {
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
    let gigabytes = |vm: &VirtualMachine, observed: &Observed| {
        json!(context(vm, observed).runner)["/Runner"]["vm"]["drives"][0]["size"].as_u64().map(|size| size >> 30)
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
