//! What tools that sync with Git do to a VM that people use meanwhile: each test sends the writes of the tool that is named.

use super::{FLUX, everything, flux, set_state, settled, vms, writes_nothing};
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, vm_manifest},
};
use k8s_openapi::api::core::v1::{ConfigMap, Node, PersistentVolumeClaim, Pod, Secret};
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::api::{PowerState, VirtualMachine};

/// The name under which Argo CD applies.
const ARGO: &str = "argocd-controller";
pub(super) const CLAIM: &str = "apple-core-disk";

/// `spec.vm.state` as the API server has it.
async fn stored_state(ns: &ManagedNamespace) -> Value {
    let text = ns.namespace.kubectl(&["get", "vm", "apple", "--output=json"]);
    serde_json::from_str::<Value>(&text).unwrap()["spec"]["vm"]["state"].clone()
}

fn column(ns: &ManagedNamespace) -> String {
    let lines = ns.namespace.kubectl(&["get", "vm", "apple", "--no-headers"]);
    lines.split_whitespace().nth(1).unwrap_or_default().to_owned()
}

/// A client's patch, as `kubectl patch` sends it.
async fn patch_as(ns: &ManagedNamespace, manager: &str, patch: Value) {
    let parameters = PatchParams { field_manager: Some(manager.into()), ..PatchParams::default() };
    vms(ns).patch("apple", &parameters, &Patch::Merge(patch)).await.unwrap();
}

/// What Argo CD does at a sync with `Replace=true`.
async fn replace(ns: &ManagedNamespace, manifest: &Value) {
    let kind = kube::api::ApiResource::erase::<VirtualMachine>(&());
    let api: Api<DynamicObject> = Api::namespaced_with(ns.client.clone(), ns.namespace.name(), &kind);
    let parameters = PostParams { field_manager: Some(ARGO.into()), ..PostParams::default() };
    eventually("a replacement that meets no other write", LIMIT, async || {
        let mut object: DynamicObject = serde_json::from_value(manifest.clone()).unwrap();
        object.metadata.resource_version = api.get("apple").await.unwrap().resource_version();
        match api.replace("apple", &parameters, &object).await {
            Ok(_) => Some(()),
            Err(kube::Error::Api(answer)) if answer.code == 409 => None,
            Err(error) => panic!("{error}"),
        }
    })
    .await;
}

async fn is_up(ns: &ManagedNamespace, pod: Option<&String>) -> bool {
    let found = ns.api::<Pod>().get_opt("apple").await.unwrap();
    found.is_some_and(|found| found.uid().as_ref() == pod && found.metadata.deletion_timestamp.is_none())
}

#[tokio::test]
async fn a_vm_that_a_sync_left_without_a_state_is_stopped_by_one_patch() {
    let ns = ManagedNamespace::new("silent-flux").await;
    let manifest = everything("apple");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    assert_eq!((stored_state(&ns).await, column(&ns).as_str()), (Value::Null, "Stopped"));
    for _ in 0..2 {
        set_state(&ns, "apple", "kubectl-patch", "Running").await;
        ns.vm_with_reason("apple", "Starting").await;
        let pod = ns.api::<Pod>().get("apple").await.unwrap().uid();
        flux(&ns, &manifest).await;
        let vm = ns.vm_when("apple", "unmanaged", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
        assert_eq!((stored_state(&ns).await, column(&ns).as_str()), (Value::Null, "Running"));
        assert!(is_up(&ns, pod.as_ref()).await && vm.status.unwrap().power == Some(PowerState::Running));
        set_state(&ns, "apple", "kubectl-patch", "Stopped").await;
        ns.vm_with_reason("apple", "StoppedAsRequested").await;
        // Whoever removes that too does not start it.
        flux(&ns, &manifest).await;
        settled(&ns, &format!("after-{}", pod.unwrap())).await;
        assert_eq!((stored_state(&ns).await, column(&ns).as_str()), (Value::Null, "Stopped"));
        assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_replacement_by_argo_cd_stops_no_vm_whose_state_is_not_in_git() {
    let ns = ManagedNamespace::new("silent-replace").await;
    let manifest = everything("apple");
    let created = PostParams { field_manager: Some(ARGO.into()), ..PostParams::default() };
    vms(&ns).create(&created, &serde_json::from_value(without_rust_defaults(&manifest)).unwrap()).await.unwrap();
    ns.vm_when("apple", "looked at", |vm| condition(vm, "Ready").is_some_and(|ready| ready.0 != "Unknown")).await;
    for who in ["vm-operator-cli", "kubectl-patch"] {
        set_state(&ns, "apple", who, "Stopped").await;
        ns.vm_with_reason("apple", "StoppedAsRequested").await;
        set_state(&ns, "apple", who, "Running").await;
        ns.vm_with_reason("apple", "Starting").await;
        let pod = ns.api::<Pod>().get("apple").await.unwrap().uid();
        for _ in 0..3 {
            replace(&ns, &manifest).await;
        }
        ns.vm_when("apple", "unmanaged", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
        assert!(is_up(&ns, pod.as_ref()).await, "{who}");
        assert_eq!(stored_state(&ns).await, Value::Null);
    }
    set_state(&ns, "apple", "kubectl-patch", "Stopped").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
}

/// The typed client writes the state of a VM that has none.
fn without_rust_defaults(manifest: &Value) -> Value {
    let mut manifest = manifest.clone();
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    manifest
}

#[tokio::test]
async fn a_count_that_a_sync_removed_counts_again() {
    let ns = ManagedNamespace::new("counts").await;
    let mut manifest = everything("apple");
    manifest["spec"]["vm"]["state"] = json!("Running");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "Starting").await;
    let runner_gets = async |counter: u32| {
        let line = format!("resetCounter: {counter}\n");
        eventually(&line, LIMIT, async || {
            ns.api::<ConfigMap>().get("apple").await.unwrap().data?["config.yaml"].contains(&line).then_some(())
        })
        .await;
    };
    // What the runner makes of these numbers: `runner::changes`, and a guest in `tests/guest/orders.rs`.
    for _ in 0..2 {
        patch_as(&ns, "kubectl-patch", json!({ "spec": { "vm": { "resetCount": 1 } } })).await;
        runner_gets(1).await;
        flux(&ns, &manifest).await;
        runner_gets(0).await;
    }
}

#[tokio::test]
async fn a_forced_stop_is_not_taken_back_by_a_sync_and_does_not_make_a_later_stop_hard() {
    let ns = ManagedNamespace::new("forced-flux").await;
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "played-by-tools" } });
    let nodes: Api<Node> = Api::all(ns.client.clone());
    nodes.patch("played-by-tools", &PatchParams::apply("test"), &Patch::Apply(&node)).await.unwrap();
    let mut manifest = everything("apple");
    manifest["spec"]["nodeName"] = json!("played-by-tools");
    manifest["spec"].as_object_mut().unwrap().remove("nodeSelector");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    let stop = async || {
        set_state(&ns, "apple", "vm-operator-cli", "Running").await;
        ns.vm_with_reason("apple", "Starting").await;
        ns.report("apple", true, "Started").await;
        ns.vm_with_reason("apple", "Running").await;
        set_state(&ns, "apple", "vm-operator-cli", "Stopped").await;
        let pod = ns.pod_when("apple", "going", |pod| pod.metadata.deletion_timestamp.is_some()).await;
        (pod.uid().unwrap(), pod.metadata.deletion_grace_period_seconds)
    };
    let (uid, grace) = stop().await;
    assert_eq!(grace, Some(915));
    let ends = |uid: Option<String>| move |vm: &VirtualMachine| vm.status.as_ref().unwrap().end_guest == uid;
    let annotation = "vmoperator.jdrupes.org/forceStop";
    patch_as(&ns, "kubectl-annotate", json!({ "metadata": { "annotations": { annotation: uid } } })).await;
    ns.vm_when("apple", "forced", ends(Some(uid.clone()))).await;
    flux(&ns, &manifest).await;
    assert!(!vms(&ns).get("apple").await.unwrap().annotations().contains_key(annotation), "Flux removes it");
    // It counts until the Pod is gone; the manager has seen the sync when it has handled another VM.
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    patch_as(&ns, "test", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    let seen = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
    let vm = ns.vm_when("apple", "observed", seen).await;
    assert_eq!(vm.status.unwrap().end_guest, Some(uid));
    ns.remove_pod("apple").await;
    ns.vm_when("apple", "down", ends(None)).await;
    let (_, grace) = stop().await;
    assert_eq!(grace, Some(915), "the next guest gets all its time");
    assert!(ends(None)(&vms(&ns).get("apple").await.unwrap()));
}

/// Makes a class whose volumes can grow, and binds a claim of it to a volume; without a class, a claim that has none.
pub(super) async fn bind(ns: &ManagedNamespace, claim: &str, class: Option<&str>, size: &str) {
    let namespace = ns.namespace.name();
    let class_object = json!({
        "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": class },
        "provisioner": "example.org/none", "allowVolumeExpansion": true,
    });
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": format!("{namespace}-{claim}") },
        "spec": {
            "capacity": { "storage": size }, "accessModes": ["ReadWriteOnce"], "storageClassName": class,
            "volumeMode": if class.is_some() { "Block" } else { "Filesystem" }, "claimRef": { "namespace": namespace, "name": claim }, "hostPath": { "path": "/nowhere" },
        },
    });
    if class.is_some() {
        ns.namespace.apply(&class_object.to_string());
    }
    ns.namespace.apply(&volume.to_string());
    eventually("a bound claim", LIMIT, async || {
        let claim = ns.api::<PersistentVolumeClaim>().get_opt(claim).await.unwrap()?;
        claim.spec?.volume_name.map(drop)
    })
    .await;
}

pub(super) fn claim_manifest(class: &str, size: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": CLAIM, "annotations": { "vmoperator.jdrupes.org/vm": "apple" } },
        "spec": {
            "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": class,
            "resources": { "requests": { "storage": size } },
        },
    })
}

pub(super) fn with_disk(class: &str, size: &str) -> Value {
    let mut manifest = vm_manifest("apple");
    let spec = json!({ "storageClassName": class, "resources": { "requests": { "storage": size } } });
    manifest["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"] = spec;
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    manifest
}

pub(super) async fn size(ns: &ManagedNamespace, claim: &str) -> String {
    let claim = ns.api::<PersistentVolumeClaim>().get(claim).await.unwrap();
    claim.spec.unwrap().resources.unwrap().requests.unwrap()["storage"].0.clone()
}

#[tokio::test]
async fn the_size_of_a_claim_in_git_is_not_changed_by_the_manager() {
    let ns = ManagedNamespace::new("claim-in-git").await;
    let class = "grows-in-git";
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let force = PatchParams::apply(FLUX).force();
    let sync = async |size: &str| claims.patch(CLAIM, &force, &Patch::Apply(claim_manifest(class, size))).await;
    sync("1Gi").await.unwrap();
    bind(&ns, CLAIM, Some(class), "1Gi").await;
    vms(&ns).patch("apple", &force, &Patch::Apply(with_disk(class, "2Gi"))).await.unwrap();
    let refused = |vm: &VirtualMachine| {
        condition(vm, "StorageReady").is_some_and(|it| it.1 == "GrowthRefused" && it.2.contains("kustomize-controller"))
    };
    ns.vm_when("apple", "told who has the size", refused).await;
    let dry = PatchParams { dry_run: true, ..force.clone() };
    for _ in 0..3 {
        claims.patch(CLAIM, &dry, &Patch::Apply(claim_manifest(class, "1Gi"))).await.expect("what Flux does first");
        sync("1Gi").await.unwrap();
    }
    writes_nothing(&ns, "apple", async || drop(sync("1Gi").await.unwrap())).await;
    assert_eq!(size(&ns, CLAIM).await, "1Gi");
    // Git decides.
    sync("2Gi").await.unwrap();
    let grows =
        |vm: &VirtualMachine| condition(vm, "StorageReady").is_some_and(|it| it.2.contains("is growing to 2Gi"));
    ns.vm_when("apple", "growing", grows).await;
    assert_eq!(size(&ns, CLAIM).await, "2Gi");
}

#[tokio::test]
async fn a_disk_that_was_grown_by_a_patch_stays_and_is_ready_when_the_sync_has_taken_the_patch_back() {
    let ns = ManagedNamespace::new("grown-by-patch").await;
    let class = "grows-by-patch";
    let manifest = with_disk(class, "1Gi");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    bind(&ns, CLAIM, Some(class), "4Gi").await;
    bind(&ns, "apple-runner-data", None, "8Mi").await;
    patch_as(
        &ns,
        "kubectl-patch",
        json!({ "spec": { "vm": { "disks": with_disk(class, "2Gi")["spec"]["vm"]["disks"] } } }),
    )
    .await;
    eventually("the larger disk", LIMIT, async || (size(&ns, CLAIM).await == "2Gi").then_some(())).await;
    flux(&ns, &manifest).await;
    let ready = |vm: &VirtualMachine| {
        condition(vm, "StorageReady").is_some_and(|it| {
            it.0 == "True" && it.1 == "ShrinkRefused" && it.2.contains("keeps its 2Gi: a volume can't shrink to 1Gi")
        })
    };
    ns.vm_when("apple", "ready with the larger disk", ready).await;
    assert_eq!(size(&ns, CLAIM).await, "2Gi");
}

#[tokio::test]
async fn a_display_secret_and_a_claim_whose_label_argo_cd_overwrites_are_known_by_their_annotation() {
    let ns = ManagedNamespace::new("label-tracking").await;
    let tracked = json!({
        "labels": {
            "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "the-application",
            "app.kubernetes.io/managed-by": "vm-operator", "app.kubernetes.io/component": "display-secret",
        },
        "annotations": { "vmoperator.jdrupes.org/vm": "apple" },
    });
    let with_name = |name: &str| {
        let mut metadata = tracked.clone();
        metadata["name"] = json!(name);
        metadata
    };
    let mut secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": with_name("in-git"),
        "data": { "display-password": "c2VjcmV0", "password-expiry": "bmV2ZXI=" },
    });
    secret["metadata"]["labels"].as_object_mut().unwrap().remove("app.kubernetes.io/managed-by");
    let mut claim = claim_manifest("in-git", "1Gi");
    claim["metadata"] = with_name(CLAIM);
    claim["metadata"]["labels"].as_object_mut().unwrap().remove("app.kubernetes.io/component");
    let (secrets, claims): (Api<Secret>, Api<PersistentVolumeClaim>) = (ns.api(), ns.api());
    let force = PatchParams::apply(ARGO).force();
    let mut manifest = with_disk("in-git", "1Gi");
    manifest["spec"]["vm"]["state"] = json!("Running");
    let sync = async || {
        secrets.patch("in-git", &force, &Patch::Apply(&secret)).await.unwrap();
        claims.patch(CLAIM, &force, &Patch::Apply(&claim)).await.unwrap();
        vms(&ns).patch("apple", &force, &Patch::Apply(&manifest)).await.unwrap();
    };
    sync().await;
    ns.vm_with_reason("apple", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("apple").await.unwrap());
    assert!(pod.to_string().contains(r#""name":"in-git""#), "{pod}");
    assert!(secrets.get_opt("apple-display-secret").await.unwrap().is_none(), "no second one");
    let (code, said) = ns.namespace.kubectl_vm(&["diff", "apple"]);
    assert_eq!((code, said.as_str()), (0, ""), "the command knows them, too");
    let uid = claims.get(CLAIM).await.unwrap().uid();
    // Both go on writing the claim, and neither takes anything from the other.
    let label = |claim: &PersistentVolumeClaim| claim.labels()["app.kubernetes.io/instance"].clone();
    writes_nothing(&ns, "apple", async || {
        for _ in 0..3 {
            sync().await;
            let after = claims.get(CLAIM).await.unwrap();
            assert_eq!((after.uid(), label(&after).as_str()), (uid.clone(), "the-application"));
        }
    })
    .await;
}

#[tokio::test]
async fn a_claim_stays_a_vms_when_a_tool_overwrites_its_label_later() {
    let ns = ManagedNamespace::new("relabelled").await;
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(with_disk("later", "1Gi"))).await.unwrap();
    let uid = |vm: &VirtualMachine| {
        let claims = &vm.status.as_ref().unwrap().claims;
        claims.iter().find(|claim| claim.name == CLAIM).and_then(|claim| claim.uid.clone())
    };
    let before = ns.vm_when("apple", "with its claim", |vm| uid(vm).is_some()).await;
    let mut tracked = claim_manifest("later", "1Gi");
    tracked["metadata"]["labels"] = json!({ "app.kubernetes.io/instance": "the-application" });
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let sync = async || claims.patch(CLAIM, &PatchParams::apply(ARGO).force(), &Patch::Apply(&tracked)).await.unwrap();
    sync().await;
    set_state(&ns, "apple", "vm-operator-cli", "Running").await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(uid(&vm), uid(&before));
    assert_ne!(condition(&vm, "StorageReady").unwrap().1, "ClaimMissing");
    writes_nothing(&ns, "apple", async || drop(sync().await)).await;
}
