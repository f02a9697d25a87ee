//! A claim belongs to exactly one VM, by its UID: `status.claims` and a note in the claim say so, and neither names nor labels.

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
};
use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::{
    api::VirtualMachine,
    object::{BELONGS_TO_ANNOTATION, VM_ANNOTATION, belongs_to},
};

/// A claim that a person has made for a VM.
fn own_claim(name: &str, vm: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": name, "annotations": { VM_ANNOTATION: vm } },
        "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "resources": { "requests": { "storage": "1Gi" } } },
    })
}

fn named(disk: &'static str) -> impl Fn(&mut Value) {
    move |vm| vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["name"] = json!(disk)
}

fn nameless(sizes: &[&str]) -> Value {
    let disk = |size: &&str| json!({ "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": size } } } } });
    json!(sizes.iter().map(disk).collect::<Vec<_>>())
}

/// The claims of disks that a Pod mounts.
fn mounted(pod: &Pod) -> Vec<String> {
    let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
    let claims = volumes.filter_map(|volume| Some(volume.persistent_volume_claim.as_ref()?.claim_name.clone()));
    claims.filter(|claim| claim.contains("disk")).collect()
}

async fn owner(ns: &ManagedNamespace, claim: &str) -> Option<(String, String)> {
    let claim = ns.api::<PersistentVolumeClaim>().get_opt(claim).await.unwrap()?;
    belongs_to(claim.annotations()).map(|(name, uid)| (name.to_owned(), uid.to_owned()))
}

/// The manager sees both at once, and no claim: both make it.
#[tokio::test]
async fn of_two_vms_that_may_take_a_claim_one_gets_it_and_the_other_says_who_has_it() {
    let ns = ManagedNamespace::new("one-of-two").await;
    for number in 0..5 {
        let claim = format!("a{number}-b-c-disk");
        let (one, other) = (format!("a{number}"), format!("a{number}-b"));
        tokio::join!(ns.create_vm(&one, named("b-c")), ns.create_vm(&other, named("c")));
        let owner = eventually("the claim to have a VM", LIMIT, async || owner(&ns, &claim).await).await.0;
        let refused = if owner == one { &other } else { &one };
        let vm = ns.vm_with_reason(refused, "ClaimTaken").await;
        let (_, _, message) = condition(&vm, "Ready").unwrap();
        assert!(message.contains(&format!("{claim} belongs to the VM {owner}: ")), "{message}");
        ns.pod_when(&owner, "made", |pod| mounted(pod) == [claim.clone()]).await;
        assert!(ns.api::<Pod>().get_opt(refused).await.unwrap().is_none());
    }
}

/// As `kubectl replace --force` or a tool for GitOps does it; and of another name than before.
#[tokio::test]
async fn a_vm_that_is_made_again_has_its_disks_and_one_of_another_name_only_if_a_person_says_so() {
    let ns = ManagedNamespace::new("made-again").await;
    ns.create_vm("a", named("b-c")).await;
    ns.pod_when("a", "made", |_| true).await;
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let first = claims.get("a-b-c-disk").await.unwrap();
    let vms: Api<VirtualMachine> = ns.api();
    vms.delete("a", &DeleteParams::default()).await.unwrap();
    ns.wait_for_no_pod("a").await;
    let again = ns.create_vm("a", named("b-c")).await;
    ns.pod_when("a", "made again", |pod| mounted(pod) == ["a-b-c-disk"]).await;
    assert_eq!(claims.get("a-b-c-disk").await.unwrap().uid(), first.uid());
    assert_eq!(owner(&ns, "a-b-c-disk").await, Some(("a".into(), again.uid().unwrap())));

    vms.delete("a", &DeleteParams::default()).await.unwrap();
    ns.wait_for_no_pod("a").await;
    let other = ns.create_vm("a-b", named("c")).await;
    let refused = ns.vm_with_reason("a-b", "ClaimTaken").await;
    let (_, _, message) = condition(&refused, "Ready").unwrap();
    assert!(message.contains("belongs to the VM a, which does not exist any more"), "{message}");
    let given = Patch::Merge(json!({ "metadata": { "annotations": { VM_ANNOTATION: "a-b" } } }));
    claims.patch("a-b-c-disk", &PatchParams::default(), &given).await.unwrap();
    ns.pod_when("a-b", "made", |pod| mounted(pod) == ["a-b-c-disk"]).await;
    assert_eq!(owner(&ns, "a-b-c-disk").await, Some(("a-b".into(), other.uid().unwrap())));
}

/// A backup tool brings claims and VMs back, with other UIDs, beside the originals.
#[tokio::test]
async fn a_vm_that_is_restored_in_another_namespace_has_its_restored_disks() {
    let [original, restored] = [ManagedNamespace::new("original").await, ManagedNamespace::new("restored").await];
    original.create_vm("apple", |_| ()).await;
    original.pod_when("apple", "made", |_| true).await;
    let from: Api<PersistentVolumeClaim> = original.api();
    for claim in from.list(&Default::default()).await.unwrap() {
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": claim.spec,
            "metadata": { "name": claim.name_any(), "labels": claim.labels(), "annotations": claim.annotations() },
        });
        restored.namespace.apply(&claim.to_string());
    }
    let claims: Api<PersistentVolumeClaim> = restored.api();
    let uid = claims.get("apple-core-disk").await.unwrap().uid();
    let vm = restored.create_vm("apple", |_| ()).await;
    restored.pod_when("apple", "made", |pod| mounted(pod) == ["apple-core-disk"]).await;
    assert_eq!(claims.get("apple-core-disk").await.unwrap().uid(), uid);
    assert_eq!(owner(&restored, "apple-core-disk").await, Some(("apple".into(), vm.uid().unwrap())));
}

#[tokio::test]
async fn what_the_metadata_of_a_disk_says_puts_no_claim_into_another_vm() {
    let ns = ManagedNamespace::new("hostile-disk").await;
    ns.create_vm("pear", |_| ()).await;
    let pear = ns.vm_with_reason("pear", "Starting").await;
    ns.create_vm("apple", |vm| {
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["annotations"] =
            json!({ VM_ANNOTATION: "pear", BELONGS_TO_ANNOTATION: format!("pear/{}", pear.uid().unwrap()) });
    })
    .await;
    ns.pod_when("apple", "made", |pod| mounted(pod) == ["apple-core-disk"]).await;
    assert_eq!(owner(&ns, "apple-core-disk").await.unwrap().0, "apple");
    // The labels of a VM make no claim its former disk, either.
    let mut labelled = own_claim("somebodys", "pear");
    labelled["metadata"]["annotations"] = Value::Null;
    labelled["metadata"]["labels"] = json!({
        "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/managed-by": "vm-operator", "app.kubernetes.io/instance": "pear",
    });
    ns.namespace.apply(&labelled.to_string());
    ns.patch_vm("pear", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    let has_looked = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
    let pear = ns.vm_when("pear", "looked at", has_looked).await;
    let known: Vec<_> = pear.status.unwrap().claims.into_iter().map(|claim| claim.name).collect();
    assert_eq!(known, ["pear-core-disk", "pear-runner-data"]);
}

#[tokio::test]
async fn a_disk_without_a_name_keeps_its_claim_when_another_is_taken_out() {
    let ns = ManagedNamespace::new("nameless").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["disks"] = nameless(&["1Gi", "2Gi", "3Gi"])).await;
    ns.pod_when("apple", "made", |pod| mounted(pod) == ["apple-disk-0", "apple-disk-1", "apple-disk-2"]).await;
    ns.vm_with_reason("apple", "Starting").await;
    for (sizes, expected) in [
        (&["2Gi", "3Gi"] as &[&str], &["apple-disk-1", "apple-disk-2"] as &[&str]),
        (&["3Gi", "2Gi"], &["apple-disk-2", "apple-disk-1"]),
        (&["3Gi", "2Gi", "7Gi"], &["apple-disk-2", "apple-disk-1", "apple-disk-3"]),
        (&["1Gi", "3Gi", "2Gi", "7Gi"], &["apple-disk-0", "apple-disk-2", "apple-disk-1", "apple-disk-3"]),
    ] {
        let change = json!({ "spec": { "vm": { "state": "Stopped", "disks": nameless(sizes) } } });
        ns.patch_vm("apple", change).await;
        ns.wait_for_no_pod("apple").await;
        ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
        let pod = ns.pod_when("apple", "made", |_| true).await;
        assert_eq!(mounted(&pod), expected, "{sizes:?}");
    }
}

/// A person fills a claim before its VM exists, or a workload uses one whose name happens to fit.
#[tokio::test]
async fn a_claim_that_a_pod_of_others_writes_to_is_not_taken() {
    let ns = ManagedNamespace::new("in-use").await;
    ns.namespace.apply(&own_claim("apple-core-disk", "apple").to_string());
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "database" },
        "spec": {
            "containers": [{ "name": "c", "image": "x", "volumeDevices": [{ "name": "v", "devicePath": "/dev/v" }] }],
            "volumes": [{ "name": "v", "persistentVolumeClaim": { "claimName": "apple-core-disk" } }],
        },
    });
    ns.namespace.apply(&pod.to_string());
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "ClaimInUse").await;
    assert_eq!(condition(&vm, "StorageReady").unwrap().1, "ClaimInUse");
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let claim = claims.get("apple-core-disk").await.unwrap();
    assert!(claim.labels().is_empty() && !claim.annotations().contains_key(BELONGS_TO_ANNOTATION), "{claim:?}");
    ns.api::<Pod>().delete("database", &DeleteParams::default().grace_period(0)).await.unwrap();
    ns.pod_when("apple", "made", |pod| mounted(pod) == ["apple-core-disk"]).await;
    assert_eq!(owner(&ns, "apple-core-disk").await.unwrap().0, "apple");
}
