//! VMs of release 3.3, whose Pods a StatefulSet makes, with the real StatefulSet controller and garbage collector. Whatever happens to the
//! Pod, at most one exists at any time, whoever makes it.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use futures::{StreamExt, pin_mut};
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{Node, PersistentVolumeClaim, Pod},
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, EvictParams, Patch, PatchParams, PostParams},
    runtime::watcher,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use vm_operator::{api::VirtualMachine, object::RESTARTED_ANNOTATION};

use crate::support::{
    cluster::{Cluster, eventually},
    managed_namespace::{LIMIT, ManagedNamespace},
};

const NAME: &str = "c01-run";
const OLD_POD: &str = "c01-run-0";

/// A namespace with a VM of release 3.3 that runs, in which the manager starts then.
struct TakenOver {
    ns: ManagedNamespace,
    /// The node of the Pod. Each test has its own, because one drains it.
    node: String,
    /// The StatefulSet's Pod.
    pod: Pod,
    /// The largest number of Pods at one time.
    most_pods: Arc<AtomicUsize>,
    counting: JoinHandle<()>,
}

impl TakenOver {
    async fn new(test: &str) -> Self {
        let (sender, receiver) = tokio::sync::oneshot::channel();
        let node_name = format!("node-of-{test}");
        let ns = ManagedNamespace::after(Cluster::control_plane(), test, async |client, namespace| {
            let vms: Api<VirtualMachine> = Api::namespaced(client.clone(), namespace);
            let objects: Vec<Value> =
                serde_yaml::Deserializer::from_str(include_str!("../predecessor/release-3.3.yaml"))
                    .map(|document| Value::deserialize(document).unwrap())
                    .collect();
            let mut objects = objects.into_iter().filter(|object| object["metadata"]["name"] == NAME);
            let mut of_kind = |kind: &str| objects.find(|object| object["kind"] == kind).unwrap();
            let mut vm = of_kind("VirtualMachine");
            vm["metadata"] = json!({ "name": NAME });
            let mut set = of_kind("StatefulSet");
            let created =
                vms.create(&PostParams::default(), &serde_json::from_value(vm.clone()).unwrap()).await.unwrap();
            let mut status: Value = json!({ "status": vm["status"] });
            status["metadata"]["name"] = json!(NAME);
            vms.patch_status(NAME, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
            set["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": NAME, "uid": created.uid(),
                "controller": false, "blockOwnerDeletion": true,
            }]);
            let sets: Api<StatefulSet> = Api::namespaced(client.clone(), namespace);
            // As that release applies it.
            let apply = PatchParams::apply("kubernetes-java-kubectl-apply").force();
            set["metadata"].as_object_mut().unwrap().remove("managedFields");
            sets.patch(NAME, &apply, &Patch::Apply(&set)).await.unwrap();
            let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": node_name } });
            let nodes: Api<Node> = Api::all(client.clone());
            nodes.patch(&node_name, &PatchParams::apply("test"), &Patch::Apply(&node)).await.unwrap();
            let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
            let pod = eventually("the StatefulSet's Pod", LIMIT, async || pods.get_opt(OLD_POD).await.unwrap()).await;
            let _ = sender.send(pod);
        })
        .await;
        let pod: Pod = receiver.await.unwrap();
        ns.bind_pod(OLD_POD, &node_name).await;
        let most_pods = Arc::new(AtomicUsize::new(0));
        let counting = tokio::spawn(count_pods(ns.api(), most_pods.clone()));
        let taken_over = Self { ns, node: node_name, pod, most_pods, counting };
        taken_over.ns.vm_with_reason(NAME, "Running").await;
        assert_eq!(taken_over.pods().await, [OLD_POD]);
        taken_over
    }

    async fn pods(&self) -> Vec<String> {
        self.ns.pods().await
    }

    async fn set(&self) -> Option<StatefulSet> {
        self.ns.api::<StatefulSet>().get_opt(NAME).await.unwrap()
    }

    /// Plays the kubelet: the Pod that is being deleted is gone.
    async fn pod_ends(&self) {
        let uid = self.pod.uid();
        self.ns
            .pod_when(OLD_POD, "being deleted", |pod| pod.uid() == uid && pod.metadata.deletion_timestamp.is_some())
            .await;
        // A guest needs some seconds to power down. Meanwhile the manager deletes the StatefulSet, which would make the Pod again.
        eventually("the StatefulSet to be gone", LIMIT, async || self.set().await.is_none().then_some(())).await;
        self.ns.remove_pod(OLD_POD).await;
    }

    /// The VM runs in a Pod of the manager, with the disks of the StatefulSet, and nothing is left of that.
    async fn runs_in_our_pod(self) {
        let pod = self.ns.pod_when(NAME, "made", |_| true).await;
        let volumes = json!(pod.spec.unwrap().volumes).to_string();
        assert!(volumes.contains("system-disk-c01-run-0") && volumes.contains("runner-data-c01-run-0"), "{volumes}");
        assert!(self.set().await.is_none());
        assert_eq!(self.pods().await, [NAME]);
        let claims: Api<PersistentVolumeClaim> = self.ns.api();
        let claims = claims.list(&Default::default()).await.unwrap();
        assert_eq!(claims.iter().filter(|claim| claim.name_any().contains(NAME)).count(), 2);
        self.counting.abort();
        assert_eq!(self.most_pods.load(Ordering::SeqCst), 1, "two Pods at once");
    }
}

async fn count_pods(api: Api<Pod>, most: Arc<AtomicUsize>) {
    let mut pods = std::collections::HashSet::new();
    let events = watcher(api, watcher::Config::default());
    pin_mut!(events);
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => drop(pods.insert(pod.uid())),
            Ok(watcher::Event::Delete(pod)) => drop(pods.remove(&pod.uid())),
            Ok(watcher::Event::Init | watcher::Event::InitDone) | Err(_) => {}
        }
        most.fetch_max(pods.len(), Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_vm_of_a_statefulset_is_stopped_and_started() {
    let vm = TakenOver::new("former-stop").await;
    let (_, said) = vm.ns.namespace.kubectl_vm(&["explain", NAME]);
    assert!(said.starts_with("c01-run runs"), "{said}");
    let made = "Pod c01-run-0, made by StatefulSet c01-run";
    assert!(said.contains("Pod c01-run-0 exists, made by StatefulSet c01-run"), "{said}");
    assert!(
        said.contains(&format!("\nalso: {made}, still runs the VM: its next start is in a Pod of the manager")),
        "{said}"
    );
    let (_, page) = vm.ns.namespace.kubectl_vm(&["status", NAME]);
    assert!(page.contains(&format!("\n{}\n", made.replacen("Pod ", "Pod         ", 1))), "{page}");
    assert!(page.contains("\nDisks       system-disk-c01-run-0"), "{page}");
    vm.ns.patch_vm(NAME, json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    vm.pod_ends().await;
    vm.ns.vm_with_reason(NAME, "StoppedAsRequested").await;
    assert!(vm.set().await.is_none() && vm.pods().await.is_empty());
    vm.ns.patch_vm(NAME, json!({ "spec": { "vm": { "state": "Running" } } })).await;
    vm.runs_in_our_pod().await;
}

#[tokio::test]
async fn the_disks_that_a_statefulset_owns_are_kept_when_it_is_taken_down() {
    let vm = TakenOver::new("former-owned-claims").await;
    let policy = json!({ "spec": { "persistentVolumeClaimRetentionPolicy": { "whenDeleted": "Delete", "whenScaled": "Retain" } } });
    let sets: Api<StatefulSet> = vm.ns.api();
    sets.patch(NAME, &PatchParams::default(), &Patch::Merge(policy)).await.unwrap();
    let claims: Api<PersistentVolumeClaim> = vm.ns.api();
    let uids = async || -> Vec<_> {
        let list = claims.list(&Default::default()).await.unwrap().items;
        list.iter().filter(|claim| claim.metadata.deletion_timestamp.is_none()).map(ResourceExt::uid).collect()
    };
    eventually("the claims to be owned by the StatefulSet", LIMIT, async || {
        let list = claims.list(&Default::default()).await.unwrap().items;
        let is_owned =
            |claim: &PersistentVolumeClaim| claim.owner_references().iter().any(|it| it.kind == "StatefulSet");
        (list.len() == 2 && list.iter().all(is_owned)).then_some(())
    })
    .await;
    let before = uids().await;
    vm.ns.patch_vm(NAME, json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    vm.pod_ends().await;
    vm.ns.vm_with_reason(NAME, "StoppedAsRequested").await;
    vm.ns.patch_vm(NAME, json!({ "spec": { "vm": { "state": "Running" } } })).await;
    vm.ns.pod_when(NAME, "made", |_| true).await;
    assert_eq!(uids().await, before);
    vm.runs_in_our_pod().await;
}

#[tokio::test]
async fn a_vm_of_a_statefulset_is_restarted() {
    let vm = TakenOver::new("former-restart").await;
    // The StatefulSet's Pod mounts it, so it is there.
    let repository = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "vmop-image-repository" },
        "spec": { "accessModes": ["ReadWriteMany"], "resources": { "requests": { "storage": "1Gi" } } },
    });
    vm.ns.namespace.apply(&repository.to_string());
    vm.ns.patch_vm(NAME, json!({ "metadata": { "annotations": { RESTARTED_ANNOTATION: "monday" } } })).await;
    vm.pod_ends().await;
    vm.runs_in_our_pod().await;
}

#[tokio::test]
async fn a_vm_of_a_statefulset_whose_pod_is_deleted() {
    let vm = TakenOver::new("former-deleted").await;
    vm.ns.api::<Pod>().delete(OLD_POD, &DeleteParams::default()).await.unwrap();
    vm.pod_ends().await;
    vm.runs_in_our_pod().await;
}

#[tokio::test]
async fn a_vm_of_a_statefulset_whose_pod_is_evicted() {
    let vm = TakenOver::new("former-evicted").await;
    vm.ns.api::<Pod>().evict(OLD_POD, &EvictParams::default()).await.unwrap();
    vm.pod_ends().await;
    vm.runs_in_our_pod().await;
}

#[tokio::test]
async fn a_vm_of_a_statefulset_whose_node_is_drained() {
    let vm = TakenOver::new("former-drained").await;
    let (cluster, node) = (vm.ns.cluster, vm.node.clone());
    let selector = format!("--pod-selector=app.kubernetes.io/instance={NAME}");
    let drain = tokio::task::spawn_blocking(move || {
        cluster.try_kubectl(&[
            "drain",
            &node,
            "--delete-emptydir-data",
            "--ignore-daemonsets",
            &selector,
            "--timeout=60s",
        ])
    });
    vm.pod_ends().await;
    drain.await.unwrap().expect("kubectl drain");
    vm.runs_in_our_pod().await;
}

#[tokio::test]
async fn a_pod_that_lost_its_labels_is_stopped_with_its_statefulset() {
    let vm = TakenOver::new("former-labels").await;
    // The StatefulSet controller gives up a Pod that its selector does not match. The manager knows it by its claims and its container.
    let labels =
        ["component", "instance", "managed-by", "name"].map(|name| (format!("app.kubernetes.io/{name}"), Value::Null));
    let patch = json!({ "metadata": { "labels": serde_json::Map::from_iter(labels) } });
    vm.ns.api::<Pod>().patch(OLD_POD, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    vm.ns.patch_vm(NAME, json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    vm.pod_ends().await;
    vm.ns.vm_with_reason(NAME, "StoppedAsRequested").await;
    assert!(vm.set().await.is_none() && vm.pods().await.is_empty());
}

#[tokio::test]
async fn a_vm_of_a_statefulset_that_is_deleted_and_made_again() {
    let vm = TakenOver::new("former-again").await;
    let vms: Api<VirtualMachine> = vm.ns.api();
    let manifest = vms.get(NAME).await.unwrap();
    vms.delete(NAME, &DeleteParams::default()).await.unwrap();
    let mut again = json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine" });
    (again["metadata"], again["spec"]) = (json!({ "name": NAME }), json!(manifest.spec));
    eventually("the VM to be gone", LIMIT, async || vms.get_opt(NAME).await.unwrap().is_none().then_some(())).await;
    vms.create(&PostParams::default(), &serde_json::from_value(again).unwrap()).await.unwrap();
    // The garbage collector of a new cluster discovers new kinds only every 30 s.
    eventually("the StatefulSet to be gone", 3 * LIMIT, async || vm.set().await.is_none().then_some(())).await;
    assert_eq!(vm.pods().await, [OLD_POD]);
    vm.pod_ends().await;
    vm.runs_in_our_pod().await;
}
