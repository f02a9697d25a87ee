use kube::core::{DynamicObject, TypeMeta};

use super::*;
use crate::{
    api::VirtualMachineStatus,
    config::{DiskPvc, VolumeMode},
    observed::Object,
    ownership::OBJECT_MANAGER,
    test_support::{allowing, applied, noon, nothing, rendered, vm},
};

fn context(vm: &VirtualMachine, observed: &Observed) -> Context {
    build(vm, observed, &allowing(), &RandomInput::default(), json!({}), None).unwrap()
}

#[test]
fn of_several_display_secrets_the_first_of_a_person_by_name_is_used() {
    let secret = |name: &str, managed_by: &str, manager: &str| {
        let labels = json!({
            "app.kubernetes.io/name": crate::object::APP_NAME, "app.kubernetes.io/instance": "apple",
            "app.kubernetes.io/component": "display-secret", "app.kubernetes.io/managed-by": managed_by,
        });
        let fields = json!({ "f:metadata": { "f:labels": { "f:app.kubernetes.io/instance": {} } }, "f:type": {} });
        let entries = json!([{ "manager": manager, "operation": "Apply", "fieldsV1": fields }]);
        let metadata = json!({ "name": name, "labels": labels, "managedFields": entries });
        let object: DynamicObject = serde_json::from_value(json!({ "metadata": metadata })).unwrap();
        let types = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
        Arc::new(Object::trim(&types, object))
    };
    let generated = secret("apple-display-secret", crate::object::MANAGED_BY, OBJECT_MANAGER);
    // She has copied the labels of a generated one.
    let hers = secret("hers", crate::object::MANAGED_BY, "kubectl");
    let mut objects = vec![generated, secret("mine", "me", "kubectl"), hers.clone()];
    for _ in 0..objects.len() {
        objects.rotate_left(1);
        let observed = Observed::of(objects.clone(), noon());
        let chosen = context(&vm(|_| ()), &observed).display_secret;
        // A password that somebody set in the generated one is not lost.
        assert_eq!((chosen.name.as_deref(), chosen.generate), (Some("hers"), true));
    }
    let chosen = context(&vm(|_| ()), &Observed::of(vec![hers], noon())).display_secret;
    assert_eq!((chosen.name.as_deref(), chosen.generate), (Some("hers"), false), "a second one is not generated");
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
        ("3Gi", mounted_larger.clone(), 3),
    ] {
        assert_eq!(gigabytes(&disk(wanted), &observed), Some(expected), "{wanted}");
    }
    let mut running = disk("3Gi");
    running.status = Some(VirtualMachineStatus { created: Some(true), ..VirtualMachineStatus::default() });
    assert_eq!(
        gigabytes(&running, &mounted_larger),
        Some(1),
        "a guest that runs gets no more than its file system has"
    );
}

#[test]
fn the_image_repository_is_mounted_where_it_is_configured_or_used() {
    let legacy = "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest";
    for (configured, image, cd, expected) in [
        (None, None, None, None),
        (None, None, Some(""), None),
        (None, None, Some("a.iso"), Some(IMAGE_REPOSITORY_CLAIM)),
        (None, None, Some("/var/local/vmop-image-repository/a.iso"), Some(IMAGE_REPOSITORY_CLAIM)),
        (None, None, Some("/var/local/vmop-image-repository-2/a.iso"), None),
        (None, None, Some("https://example.org/a.iso"), None),
        (None, Some(legacy), None, Some(IMAGE_REPOSITORY_CLAIM)),
        (Some("cds"), None, None, Some("cds")),
        (Some("cds"), Some(legacy), Some("a.iso"), Some("cds")),
    ] {
        let vm = vm(|vm| {
            if let Some(image) = image {
                vm["spec"]["image"] = json!({ "source": image });
            }
            if let Some(cd) = cd {
                vm["spec"]["vm"]["disks"].as_array_mut().unwrap().push(json!({ "cdrom": { "image": cd } }));
            }
        });
        let config = ReconcilerConfig { image_repository_claim: configured.map(str::to_owned), ..allowing() };
        let context = build(&vm, &nothing(), &config, &RandomInput::default(), json!({}), None).unwrap();
        assert_eq!(context.image_repository_claim.as_deref(), expected, "{configured:?} {image:?} {cd:?}");
    }
}

#[test]
fn the_mode_of_a_new_claim_is_the_disks_else_the_configurations_and_one_that_exists_keeps_its_own() {
    let (block, files) = (VolumeMode::Block, VolumeMode::Filesystem);
    let with_block = applied(&rendered(&vm(|_| ()), &nothing()), |_, _| ());
    for (configured, disk, observed, expected) in [
        (block, None, nothing(), "Block"),
        (files, None, nothing(), "Filesystem"),
        (files, Some("Block"), nothing(), "Block"),
        (block, Some("Filesystem"), nothing(), "Filesystem"),
        (files, None, with_block, "Block"),
    ] {
        let vm = vm(|vm| {
            if let Some(mode) = disk {
                vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["volumeMode"] = json!(mode);
            }
        });
        let config = ReconcilerConfig { disk_pvc: DiskPvc { volume_mode: configured }, ..Default::default() };
        let context = build(&vm, &observed, &config, &RandomInput::default(), json!({}), None).unwrap();
        let disk = json!(context.disks[0]);
        assert_eq!((&disk["mode"], &disk["spec"]["volumeMode"]), (&json!(expected), &json!(expected)), "{disk}");
    }
}

#[test]
fn an_identity_is_made_only_for_a_relay_that_has_none() {
    let (config, without) = (allowing(), ReconcilerConfig { relay: false, ..allowing() });
    let plain = vm(|_| ());
    let legacy = vm(|vm| {
        vm["spec"]["image"] = json!({ "source": "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest" })
    });
    let object = json!({ "metadata": { "name": secret_name("apple") } });
    let types = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
    let made = Observed::of(vec![Arc::new(Object::trim(&types, serde_json::from_value(object).unwrap()))], noon());
    for (vm, observed, config, is_needed) in [
        (&plain, nothing(), &config, true),
        (&plain, made, &config, false),
        (&plain, nothing(), &without, false),
        (&legacy, nothing(), &config, false),
    ] {
        assert_eq!(needs_relay_identity(vm, &observed, config), is_needed);
    }
}
