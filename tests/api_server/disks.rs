//! The claims of disks: they grow, they are kept, and each belongs to one VM.

use crate::support::managed_namespace::{ManagedNamespace, condition};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod};
use kube::{Resource, ResourceExt};
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;

/// Binds a claim to a new volume, as an administrator can.
async fn bind(ns: &ManagedNamespace, claim: &str, size: &str, class: Option<&str>) {
    let namespace = ns.namespace.name();
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": format!("{namespace}-{claim}") },
        "spec": {
            "capacity": { "storage": size }, "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "volumeMode": if claim.ends_with("-disk") { "Block" } else { "Filesystem" },
            "claimRef": { "namespace": namespace, "name": claim }, "hostPath": { "path": "/nowhere" },
        },
    });
    ns.namespace.apply(&volume.to_string());
}

fn disk(size: &str) -> Value {
    json!({ "spec": { "vm": { "disks": [{ "volumeClaimTemplate": {
        "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": size } } },
    } }] } } })
}

async fn size_of(ns: &ManagedNamespace, claim: &str) -> String {
    let claim = ns.api::<PersistentVolumeClaim>().get(claim).await.unwrap();
    claim.spec.unwrap().resources.unwrap().requests.unwrap()["storage"].0.clone()
}

#[tokio::test]
async fn a_disk_grows_where_its_class_allows_it_and_never_shrinks() {
    let ns = ManagedNamespace::new("growth").await;
    for (name, allowed) in [("grows", true), ("stays", false)] {
        let class = json!({
            "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": name },
            "provisioner": "example.org/none", "allowVolumeExpansion": allowed,
        });
        ns.namespace.apply(&class.to_string());
    }
    for (name, class, wanted, reason, size) in [
        ("apple", "grows", "2Gi", "Resizing", "2Gi"),
        ("plum", "stays", "2Gi", "GrowthRefused", "1Gi"),
        ("pear", "grows", "500Mi", "ShrinkRefused", "1Gi"),
    ] {
        ns.create_vm(name, |vm| {
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["storageClassName"] = json!(class);
        })
        .await;
        ns.vm_with_reason(name, "Starting").await;
        let claim = format!("{name}-core-disk");
        bind(&ns, &claim, "1Gi", Some(class)).await;
        bind(&ns, &format!("{name}-runner-data"), "8Mi", None).await;
        ns.vm_when(name, "bound", |vm| condition(vm, "StorageReady").is_some_and(|storage| storage.1 == "ClaimsBound"))
            .await;
        let mut change = disk(wanted);
        change["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["storageClassName"] = json!(class);
        change["spec"]["vm"]["currentCpus"] = json!(1);
        ns.patch_vm(name, change).await;
        let vm = ns
            .vm_when(name, reason, |vm| {
                vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation
                    && condition(vm, "StorageReady").is_some_and(|storage| storage.1 == reason)
            })
            .await;
        assert_eq!(size_of(&ns, &claim).await, size, "{vm:?}");
        assert_eq!(condition(&vm, "Ready").unwrap().1, "Starting", "a disk's size holds up nothing");
        let config = ns.api::<ConfigMap>().get(name).await.unwrap().data.unwrap();
        assert!(config["config.yaml"].contains("currentCpus: 1"));
    }
    ns.wait_for_event("plum", "GrowthRefused").await;
    ns.wait_for_event("pear", "ShrinkRefused").await;

    // A person may let it grow, too; what the machine asks for is less then, and nothing shrinks.
    let by_hand = r#"--patch={"spec":{"resources":{"requests":{"storage":"3Gi"}}}}"#;
    ns.namespace.kubectl(&["patch", "pvc", "apple-core-disk", by_hand]);
    let is_said = |vm: &VirtualMachine| condition(vm, "StorageReady").is_some_and(|it| it.2.contains("keeps its 3Gi"));
    ns.vm_when("apple", "said to have a larger disk", is_said).await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 2 } } })).await;
    let has_looked = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
    ns.vm_when("apple", "looked at", |vm| has_looked(vm) && is_said(vm)).await;
    assert_eq!(size_of(&ns, "apple-core-disk").await, "3Gi");
}

#[tokio::test]
async fn the_claim_of_a_removed_disk_is_kept_and_reported() {
    let ns = ManagedNamespace::new("kept").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "disks": [] } } })).await;
    let event = ns.wait_for_event("apple", "DiskKept").await;
    assert!(event.message.unwrap().contains("apple-core-disk"));
    assert!(!is_deleted(&ns.api::<PersistentVolumeClaim>().get("apple-core-disk").await.unwrap()));
    let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert!(condition(&vm, "StorageReady").unwrap().2.contains("apple-core-disk"), "{vm:?}");
}

/// A person has made the claim, without the labels by which the manager watches its objects.
#[tokio::test]
async fn a_persons_claim_with_a_file_system_is_used_at_the_first_start() {
    let ns = ManagedNamespace::new("own-claim").await;
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "apple-core-disk", "annotations": { "vmoperator.jdrupes.org/vm": "apple" } },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem",
            "resources": { "requests": { "storage": "2Gi" } },
        },
    });
    ns.namespace.apply(&claim.to_string());
    let claims = ns.api::<PersistentVolumeClaim>();
    let uid = claims.get("apple-core-disk").await.unwrap().uid();
    ns.create_vm("apple", |_| ()).await;
    let pod = ns.pod_when("apple", "made", |_| true).await;
    let container = pod.spec.unwrap().containers.remove(0);
    assert_eq!(container.volume_devices.unwrap_or_default(), []);
    let mounted = container.volume_mounts.unwrap_or_default();
    assert!(mounted.iter().any(|mount| mount.name == "core-disk"), "{mounted:?}");
    let config = ns.api::<ConfigMap>().get("apple").await.unwrap().data.unwrap().remove("config.yaml").unwrap();
    assert!(config.contains("core-disk/disk.img"), "{config}");
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(condition(&vm, "Ready").unwrap().1, "Starting");
    let claim = claims.get("apple-core-disk").await.unwrap();
    assert_eq!((claim.uid(), claim.labels()["app.kubernetes.io/instance"].as_str()), (uid, "apple"));
}

fn is_deleted(claim: &PersistentVolumeClaim) -> bool {
    claim.meta().deletion_timestamp.is_some()
}

#[tokio::test]
async fn two_vms_can_not_use_one_claim() {
    let ns = ManagedNamespace::new("shared").await;
    // Both names come to a-b-core-disk.
    let with_disk = |name: &'static str| {
        move |vm: &mut Value| {
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["name"] = json!(name);
        }
    };
    ns.create_vm("a", with_disk("b-core")).await;
    ns.vm_with_reason("a", "Starting").await;
    ns.create_vm("a-b", with_disk("core")).await;
    let vm = ns.vm_with_reason("a-b", "ClaimTaken").await;
    let (_, _, message) = condition(&vm, "Ready").unwrap();
    assert!(message.starts_with("PersistentVolumeClaim a-b-core-disk belongs to the VM a: "), "{message}");
    assert_eq!(
        ns.api::<PersistentVolumeClaim>().get("a-b-core-disk").await.unwrap().labels()["app.kubernetes.io/instance"],
        "a"
    );
    assert!(ns.api::<Pod>().get_opt("a-b").await.unwrap().is_none());
}
