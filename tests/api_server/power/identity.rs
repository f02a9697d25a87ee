//! Which Pods and claims are the VM's, whatever somebody does to their names, labels and owners.

use super::*;
use vm_operator::object::{REPLACE_CLAIM_ANNOTATION, VM_ANNOTATION};

#[tokio::test]
async fn a_claim_that_is_deleted_is_never_replaced_by_an_empty_one_unless_a_person_wants_that() {
    let ns = ns("claim-deleted").await;
    up(&ns, "apple", on_node).await;
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let old = claims.get("apple-core-disk").await.unwrap().uid();
    claims.delete("apple-core-disk", &DeleteParams::default()).await.unwrap();
    let vm = ns
        .vm_when("apple", "ClaimDeleting", |vm| {
            condition(vm, "StorageReady").is_some_and(|storage| storage.1 == "ClaimDeleting")
        })
        .await;
    assert_eq!(condition(&vm, "Ready").unwrap().1, "Running");
    let gone = "claim apple-core-disk is being deleted: it is removed, with its data, when no Pod uses it any more";
    ns.wait_for_description("apple", &["SuccessfulCreate", "ClaimDeleting", gone]).await;
    // A restart would lose it.
    annotate(&ns, "apple", RESTARTED_ANNOTATION, "now").await;
    let vm = ns.vm_with_reason("apple", "ClaimDeleting").await;
    assert!(condition(&vm, "Ready").unwrap().2.contains("the guest runs on and is not restarted"));
    ns.pod_when("apple", "left alone", |pod| !is_going(pod)).await;
    ns.namespace.kubectl(&["delete", "pod", "apple", "--wait=false"]);
    ns.pod_when("apple", "going", is_going).await;
    ns.remove_pod("apple").await;
    let vm = ns.vm_with_reason("apple", "ClaimMissing").await;
    let storage = condition(&vm, "StorageReady").unwrap();
    assert_eq!(storage.1, "ClaimMissing");
    let old = old.unwrap();
    assert!(storage.2.contains(&format!("{REPLACE_CLAIM_ANNOTATION}: {old}")), "{storage:?}");
    assert!(claims.get_opt("apple-core-disk").await.unwrap().is_none() && ns.pods().await.is_empty());

    // What has its name is not it: a person must say that.
    let restored = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "apple-core-disk", "annotations": { VM_ANNOTATION: "apple" } },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    });
    ns.namespace.apply(&restored.to_string());
    let vm = ns.vm_with_reason("apple", "ClaimReplaced").await;
    let storage = condition(&vm, "StorageReady").unwrap();
    assert_eq!(storage.1, "ClaimReplaced");
    assert!(storage.2.contains(&format!("{REPLACE_CLAIM_ANNOTATION}: {old}")), "{storage:?}");
    assert!(ns.pods().await.is_empty());
    annotate(&ns, "apple", REPLACE_CLAIM_ANNOTATION, &old).await;
    ns.pod_when("apple", "a new one", |pod| pod.annotations().contains_key(RESTARTED_ANNOTATION)).await;
    let restored = claims.get("apple-core-disk").await.unwrap().uid().unwrap();

    // Given up.
    set_state(&ns, "apple", "Stopped").await;
    ns.pod_when("apple", "going", is_going).await;
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    claims.delete("apple-core-disk", &DeleteParams::default()).await.unwrap();
    set_state(&ns, "apple", "Running").await;
    ns.vm_with_reason("apple", "ClaimMissing").await;
    annotate(&ns, "apple", REPLACE_CLAIM_ANNOTATION, &restored).await;
    ns.pod_when("apple", "a new one", |_| true).await;
    assert_ne!(claims.get("apple-core-disk").await.unwrap().uid().unwrap(), restored);
}

#[tokio::test]
async fn a_claim_of_a_class_that_does_not_exist_is_made_again_when_it_is_deleted_after_the_class_was_mended() {
    let ns = ManagedNamespace::new("no-class").await;
    let disks = |class: &str| {
        let spec = json!({ "storageClassName": class, "resources": { "requests": { "storage": "1Gi" } } });
        json!([{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": spec } }])
    };
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["disks"] = disks("nope")).await;
    let says = async |words: &str| {
        ns.vm_when("apple", words, |vm| condition(vm, "StorageReady").is_some_and(|storage| storage.2.contains(words)))
            .await
    };
    let why = "of the storage class nope has no volume yet; kubectl describe pvc apple-core-disk says why";
    says(&format!("claim apple-core-disk {why}")).await;
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let first = claims.get("apple-core-disk").await.unwrap().uid();
    ns.patch_vm("apple", json!({ "spec": { "vm": { "disks": disks("fast") } } })).await;
    says(
        "can't be changed in a claim that exists; it has no volume, so delete it to have it made as the spec wants it",
    )
    .await;
    claims.delete("apple-core-disk", &DeleteParams::default()).await.unwrap();
    let again = eventually("the claim to be made again", LIMIT, async || {
        let claim = claims.get_opt("apple-core-disk").await.unwrap()?;
        (claim.uid() != first).then_some(claim)
    })
    .await;
    assert_eq!(again.spec.unwrap().storage_class_name.as_deref(), Some("fast"));
}

/// A claim that lost its labels, or came back from a backup without, is the disk as soon as somebody says so; also one with the name of an
/// earlier release. No empty claim takes its place.
#[tokio::test]
async fn a_claim_without_labels_is_the_disk_at_the_first_start() {
    let ns = ManagedNamespace::new("unlabelled").await;
    for name in ["core-disk-apple-0", "runner-data-apple-0"] {
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name },
            "spec": {
                "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "resources": { "requests": { "storage": "1Gi" } },
            },
        });
        ns.namespace.apply(&claim.to_string());
    }
    ns.create_vm("apple", |_| ()).await;
    let claims: Api<PersistentVolumeClaim> = ns.api();
    for name in ["core-disk-apple-0", "runner-data-apple-0"] {
        let says = format!("{name} was made by somebody, who has not said for which VM: give the claim the annotation");
        let is_said = |vm: &VirtualMachine| {
            condition(vm, "Ready").is_some_and(|ready| ready.1 == "ClaimTaken" && ready.2.contains(&says))
        };
        ns.vm_when("apple", "told of the claim", is_said).await;
        let given = Patch::Merge(json!({ "metadata": { "annotations": { VM_ANNOTATION: "apple" } } }));
        claims.patch(name, &PatchParams::default(), &given).await.unwrap();
    }
    let pod = ns.pod_when("apple", "made", |_| true).await;
    let spec = json!(pod.spec.unwrap());
    let volumes = spec["volumes"].to_string();
    assert!(volumes.contains("core-disk-apple-0") && volumes.contains("runner-data-apple-0"), "{volumes}");
    assert!(spec["containers"][0]["volumeDevices"].is_null(), "made for a block device");
    let claims = claims.list(&Default::default()).await.unwrap().items;
    assert_eq!(claims.len(), 2);
    assert!(claims.iter().all(|claim| claim.labels().contains_key("app.kubernetes.io/instance")), "{claims:?}");
}

/// Whatever a person does to its labels and owners, a Pod of the VM counts.
#[tokio::test]
async fn a_pod_that_lost_its_labels_or_its_owner_is_still_the_vms() {
    let ns = ns("lost").await;
    for (name, metadata) in [
        ("labels", json!({ "labels": null })),
        ("instance", json!({ "labels": { "app.kubernetes.io/instance": "another" } })),
        ("owner", json!({ "ownerReferences": null })),
        ("both", json!({ "labels": null, "ownerReferences": null })),
    ] {
        let pod = up(&ns, name, on_node).await;
        let patch = json!({ "metadata": metadata });
        let pods: Api<Pod> = ns.api();
        // The manager, too, may be down meanwhile, so that it never knew the Pod with its labels.
        pods.patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        set_state(&ns, name, "Stopped").await;
        ns.pod_when(name, "going", |going| is_going(going) && going.uid() == pod.uid()).await;
        ns.vm_with_reason(name, "Stopping").await;
        ns.remove_pod(name).await;
        ns.vm_with_reason(name, "StoppedAsRequested").await;
    }
}

/// Templates that name the Pod otherwise, and later do not: there is never more than one.
#[tokio::test]
async fn templates_that_name_the_pod_otherwise_make_no_second_one() {
    const OTHERWISE: &str = r#"{% set pod %}{% include "builtin/pod.yaml.j2" %}{% endset %}{% set pod = pod | from_yaml %}
apiVersion: v1
kind: Pod
metadata:
  name: {{ vm.metadata.name ~ "-vm" }}
  labels: {{ pod.metadata.labels }}
  annotations: {{ pod.metadata.annotations }}
spec: {{ pod.spec }}
"#;
    let ns = ManagedNamespace::with_templates("otherwise", &[("pod.yaml.j2", OTHERWISE)]).await;
    ns.create_vm("apple", |_| ()).await;
    ns.pod_when("apple-vm", "made", |_| true).await;
    ns.manager.change_templates(&[]);
    let vm = ns.vm_when("apple", "a pending change", |vm| {
        vm.status.iter().flat_map(|status| &status.pending_changes).any(|change| change.path.contains("Pod"))
    });
    vm.await;
    assert_eq!(ns.pods().await, ["apple-vm"]);
    annotate(&ns, "apple", RESTARTED_ANNOTATION, "now").await;
    ns.pod_when("apple", "made", |_| true).await;
    assert_eq!(ns.pods().await, ["apple"]);
}

/// A Pod of somebody else that can write to the VM's disk.
#[tokio::test]
async fn a_vm_waits_for_a_pod_that_can_write_to_its_disk() {
    let ns = ManagedNamespace::new("in-use").await;
    let backup = |read_only: bool| {
        let name = if read_only { "reader" } else { "backup" };
        let volume =
            json!({ "name": "v", "persistentVolumeClaim": { "claimName": "apple-core-disk", "readOnly": read_only } });
        let spec = json!({ "containers": [{ "name": "backup", "image": "x" }], "volumes": [volume] });
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": spec }).to_string()
    };
    ns.namespace.apply(&backup(true));
    ns.namespace.apply(&backup(false));
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "ClaimInUse").await;
    assert!(condition(&vm, "Ready").unwrap().2.contains("Pod backup"), "{:?}", condition(&vm, "Ready"));
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    ns.remove_pod("backup").await;
    ns.pod_when("apple", "made", |_| true).await;
    assert!(ns.api::<Pod>().get_opt("reader").await.unwrap().is_some());
}
