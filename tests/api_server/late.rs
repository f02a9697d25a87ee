//! Promises at moments when a decision goes by what is not true any more: a watch lags behind, or somebody changes something at that moment.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{Node, PersistentVolumeClaim, Pod},
    jiff::SignedDuration,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::{api::VirtualMachine, object::VM_ANNOTATION};

use crate::support::{
    cluster::{Cluster, TestNamespace, XTASK, eventually},
    managed_namespace::{LIMIT, ManagedNamespace, condition, report, vm_manifest},
    manager::{Manager, install_crds},
    proxy::{Faults, Proxy},
};

const NODE: &str = "played";

/// A namespace whose manager reaches the API server by a proxy, which can hold what watches report.
struct Lagging {
    namespace: TestNamespace,
    client: Client,
    proxy: Proxy,
    manager: Manager,
}

impl Lagging {
    async fn new(test: &str) -> Self {
        let cluster = Cluster::control_plane();
        install_crds(cluster).await;
        let namespace = cluster.namespace(test).await;
        namespace.create_runners_account().await;
        let client = cluster.client().await;
        node(&client).await;
        let proxy = Proxy::start(client.clone(), 1, Faults::default()).await;
        let manager = Manager::start_with(&proxy.kubeconfig(), namespace.name(), &[], "");
        manager.wait_until_ready("listed").await;
        // The objects of VMs are listed beside them.
        eventually("watches", LIMIT, async || {
            ["/vms?", "/persistentvolumeclaims?", "/pods?"].iter().all(|kind| proxy.has_watch(kind)).then_some(())
        })
        .await;
        Self { namespace, client, proxy, manager }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), self.namespace.name())
    }

    /// Makes a VM on a node without a kubelet, whose Pod does not go at once when it is deleted, and reports that its guest runs.
    async fn up(&self, manifest: &Value) -> Pod {
        let name = manifest["metadata"]["name"].as_str().unwrap();
        self.namespace.apply(&manifest.to_string());
        let pod = self.pod_when(name, |_| true).await;
        report(&self.client, self.namespace.name(), name, true, "Started").await;
        self.vm_with_reason(name, "Running").await;
        pod
    }

    async fn vm_with_reason(&self, name: &str, reason: &str) {
        let vms = self.api::<VirtualMachine>();
        eventually(&format!("{name} to be {reason}"), LIMIT, async || {
            let vm = vms.get(name).await.unwrap();
            condition(&vm, "Ready").is_some_and(|ready| ready.1 == reason).then_some(())
        })
        .await;
    }

    async fn pod_when(&self, name: &str, mut check: impl FnMut(&Pod) -> bool) -> Pod {
        let pods = self.api::<Pod>();
        eventually(&format!("Pod {name}"), LIMIT, async || pods.get_opt(name).await.unwrap().filter(&mut check)).await
    }

    /// Plays the kubelet: removes a Pod that is being deleted.
    async fn remove_pod(&self, name: &str) {
        let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        self.api::<Pod>().delete(name, &now).await.unwrap();
    }

    /// Waits until the manager has said one of these since `from` bytes of its log.
    async fn manager_says(&self, from: usize, words: &[&str]) -> String {
        eventually(&format!("the manager to say one of {words:?}"), LIMIT, async || {
            let log = self.manager.log();
            words.iter().find(|word| log[from..].contains(**word)).map(|word| (*word).to_owned())
        })
        .await
    }
}

/// A node without a kubelet.
async fn node(client: &Client) {
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE } });
    Api::<Node>::all(client.clone()).patch(NODE, &PatchParams::apply("test"), &Patch::Apply(&node)).await.unwrap();
}

fn on_node(name: &str) -> Value {
    let mut manifest = vm_manifest(name);
    manifest["spec"]["nodeName"] = json!(NODE);
    manifest
}

fn is_going(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

/// What starts a VM that is deleted already ends soon, because the garbage collector ends what no VM owns.
#[tokio::test]
async fn a_vm_whose_deletion_is_seen_late_is_not_started_again() {
    let lagging = Lagging::new("deleted-late").await;
    let manifest = on_node("apple");
    let first = lagging.up(&manifest).await;
    lagging.proxy.hold_watches(Some("/vms?"));
    let vms = lagging.api::<VirtualMachine>();
    vms.delete("apple", &DeleteParams::default()).await.unwrap();
    // Its successor, which the manager does not see yet either.
    lagging.namespace.apply(&manifest.to_string());
    let again = vms.get("apple").await.unwrap();
    eventually("the Pod to go", 3 * LIMIT, async || {
        is_going(&lagging.api::<Pod>().get("apple").await.unwrap()).then_some(())
    })
    .await;
    let from = lagging.manager.log().len();
    lagging.remove_pod("apple").await;
    let said = lagging.manager_says(from, &["is not started", "applied object=Pod apple"]).await;
    assert_eq!(said, "is not started");
    assert!(lagging.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    lagging.proxy.hold_watches(None);
    let pod = lagging.pod_when("apple", |pod| pod.uid() != first.uid()).await;
    assert_eq!(pod.owner_references()[0].uid, again.uid().unwrap());
}

#[tokio::test]
async fn a_vm_whose_stop_is_seen_late_is_not_started_again() {
    let lagging = Lagging::new("stopped-late").await;
    let mut manifest = on_node("apple");
    let first = lagging.up(&manifest).await;
    lagging.proxy.hold_watches(Some("/vms?"));
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    lagging.namespace.apply(&manifest.to_string());
    lagging.api::<Pod>().delete("apple", &DeleteParams::default()).await.unwrap();
    lagging.pod_when("apple", is_going).await;
    let from = lagging.manager.log().len();
    lagging.remove_pod("apple").await;
    let said = lagging.manager_says(from, &["is not started", "applied object=Pod apple"]).await;
    assert_eq!(said, "is not started");
    assert!(lagging.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    lagging.proxy.hold_watches(None);
    lagging.vm_with_reason("apple", "StoppedAsRequested").await;
    manifest["spec"]["vm"]["state"] = json!("Running");
    lagging.namespace.apply(&manifest.to_string());
    lagging.pod_when("apple", |pod| pod.uid() != first.uid()).await;
}

/// Before a VM starts, the objects that its Pod mounts are made. That can take long, and the VM may be stopped or deleted meanwhile.
#[tokio::test]
async fn a_vm_that_is_stopped_while_its_start_is_held_up_is_not_started() {
    let lagging = Lagging::new("held-up").await;
    lagging.proxy.hold_writes(true);
    let mut manifest = on_node("apple");
    lagging.namespace.apply(&manifest.to_string());
    eventually("the manager to write", LIMIT, async || {
        // The first of all writes that are held may be the renewal of the lease.
        (lagging.proxy.injected().get("held write").copied().unwrap_or_default() >= 4).then_some(())
    })
    .await;
    // Longer than a write usually takes.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    lagging.namespace.apply(&manifest.to_string());
    lagging.proxy.hold_writes(false);
    lagging.vm_with_reason("apple", "StoppedAsRequested").await;
    assert!(!lagging.manager.log().contains("applied object=Pod apple"), "it was started");
}

/// A claim that is being deleted exists as long as its Pod does.
#[tokio::test]
async fn a_pod_in_which_nothing_started_is_kept_while_its_disk_is_being_deleted() {
    let ns = ManagedNamespace::new("unstarted-claim").await;
    node(&ns.client).await;
    let image = |name: &str| json!({ "source": format!("example.org/{name}:1") });
    let mut manifest = on_node("apple");
    manifest["spec"]["image"] = image("vm-runer");
    ns.namespace.apply(&manifest.to_string());
    let pod = ns.pod_when("apple", "made", |_| true).await;
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let disk = claims.get("apple-core-disk").await.unwrap();
    ns.patch_pod_status(
        "apple",
        json!({ "phase": "Pending", "containerStatuses": [{
            "name": "vm-runner", "image": "x", "imageID": "", "ready": false, "started": false, "restartCount": 0,
            "state": { "waiting": { "reason": "ErrImagePull", "message": "no such image" } },
        }] }),
    )
    .await;
    ns.vm_with_reason("apple", "ImagePullFailed").await;
    claims.delete("apple-core-disk", &DeleteParams::default()).await.unwrap();
    ns.vm_when("apple", "ClaimDeleting", |vm| {
        condition(vm, "StorageReady").is_some_and(|storage| storage.1 == "ClaimDeleting")
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "image": image("vm-runner") } })).await;
    ns.vm_when("apple", "seen", |vm| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation).await;
    let kept = ns.api::<Pod>().get("apple").await.unwrap();
    assert_eq!((kept.uid(), is_going(&kept)), (pod.uid(), false));
    assert_eq!(claims.get("apple-core-disk").await.unwrap().uid(), disk.uid());
}

/// The same of a Pod that has ended, when the deletion of the claim is seen late.
#[tokio::test]
async fn an_ended_pod_is_kept_while_its_disk_is_being_deleted_though_that_is_seen_late() {
    let lagging = Lagging::new("claim-late").await;
    let pod = lagging.up(&on_node("apple")).await;
    let claims = lagging.api::<PersistentVolumeClaim>();
    let disk = claims.get("apple-core-disk").await.unwrap();
    lagging.proxy.hold_watches(Some("/persistentvolumeclaims?"));
    claims.delete("apple-core-disk", &DeleteParams::default()).await.unwrap();
    let from = lagging.manager.log().len();
    let failed = Patch::Merge(json!({ "status": { "phase": "Failed" } }));
    lagging.api::<Pod>().patch_status("apple", &PatchParams::default(), &failed).await.unwrap();
    let said = lagging.manager_says(from, &["the Pod is kept", "deleted object=Pod apple"]).await;
    assert_eq!(said, "the Pod is kept");
    assert_eq!(lagging.api::<Pod>().get("apple").await.unwrap().uid(), pod.uid());
    assert_eq!(claims.get("apple-core-disk").await.unwrap().uid(), disk.uid());
}

/// A runner reports the shutdown, and then its Pod ends: the manager may see that in another order.
#[tokio::test]
async fn a_shutdown_of_the_guest_that_is_seen_late_holds_though_its_pod_has_ended() {
    let lagging = Lagging::new("shutdown-late").await;
    let mut manifest = on_node("apple");
    manifest["spec"]["guestShutdownStops"] = json!(true);
    let first = lagging.up(&manifest).await;
    lagging.proxy.hold_watches(Some("/vmreports?"));
    report(&lagging.client, lagging.namespace.name(), "apple", false, "GuestShutdown").await;
    let from = lagging.manager.log().len();
    // A Pod that has lived long is made again at once.
    let end = first.creation_timestamp().unwrap().0 + SignedDuration::from_hours(1);
    let ended = json!({ "terminated": { "exitCode": 0, "finishedAt": end.to_string() } });
    let ended =
        json!({ "name": "vm-runner", "image": "x", "imageID": "", "ready": false, "restartCount": 0, "state": ended });
    let ended = Patch::Merge(json!({ "status": { "phase": "Succeeded", "containerStatuses": [ended] } }));
    lagging.api::<Pod>().patch_status("apple", &PatchParams::default(), &ended).await.unwrap();
    let said = lagging.manager_says(from, &["the Pod is kept", "deleted object=Pod apple"]).await;
    assert_eq!(said, "the Pod is kept");
    assert_eq!(lagging.api::<Pod>().get("apple").await.unwrap().uid(), first.uid());
    lagging.proxy.hold_watches(None);
    lagging.vm_with_reason("apple", "GuestShutdown").await;
    assert!(lagging.api::<Pod>().get_opt("apple").await.unwrap().is_none_or(|pod| pod.uid() == first.uid()));
}

/// `kubectl apply --prune` takes what has the label of its set, and is not in the files, for its own.
#[tokio::test]
async fn kubectl_apply_prune_does_not_end_a_guest() {
    let ns = ManagedNamespace::new("prune").await;
    node(&ns.client).await;
    let pod = |name: &str| {
        json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
            "spec": { "nodeName": NODE, "containers": [{ "name": "c", "image": "i" }] },
        })
    };
    let apply = |objects: &[Value]| {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text: Vec<String> = objects.iter().map(Value::to_string).collect();
        std::fs::write(file.path(), text.join("\n")).unwrap();
        let mut kubectl = std::process::Command::new(XTASK);
        kubectl.args([
            "kubectl",
            "--",
            "--namespace",
            ns.namespace.name(),
            "apply",
            "--prune",
            "--applyset=configmaps/set",
        ]);
        kubectl
            .arg("--filename")
            .arg(file.path())
            .env("KUBECONFIG", ns.cluster.kubeconfig())
            .env("KUBECTL_APPLYSET", "true");
        let output = kubectl.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    apply(&[on_node("apple"), pod("beside")]);
    let first = ns.pod_when("apple", "made", |_| true).await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let said = apply(&[on_node("apple")]);
    assert!(said.contains("pod/beside pruned"), "{said}");
    let now = ns.api::<Pod>().get("apple").await.unwrap();
    assert_eq!((now.uid(), is_going(&now)), (first.uid(), false), "{said}");
}

/// Not even if somebody takes its owner away at the same time.
#[tokio::test]
async fn a_pod_that_names_another_vm_is_not_ended_by_that_vm() {
    let ns = ManagedNamespace::new("misnamed").await;
    node(&ns.client).await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    ns.namespace.apply(&on_node("apple").to_string());
    let pod = ns.pod_when("apple", "made", |_| true).await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let patch = json!({ "metadata": { "ownerReferences": null, "labels": { "app.kubernetes.io/instance": "pear" } } });
    ns.api::<Pod>().patch("apple", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    let now = ns
        .pod_when("apple", "going, or the VM's again", |pod| is_going(pod) || !pod.owner_references().is_empty())
        .await;
    assert_eq!((now.uid(), is_going(&now)), (pod.uid(), false));
    assert_eq!(now.labels()["app.kubernetes.io/instance"], "apple");
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.pod_when("apple", "going", is_going).await;
}

/// Two VMs can have disks whose claims have the same name. The second one does not start, whatever happens to the labels of the claim.
#[tokio::test]
async fn a_claim_that_lost_its_labels_is_not_taken_by_another_vm() {
    let ns = ManagedNamespace::new("same-name").await;
    node(&ns.client).await;
    let with_disk = |name: &str, disk: &str| {
        let mut vm = on_node(name);
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["name"] = json!(disk);
        vm
    };
    ns.namespace.apply(&with_disk("a", "b-c").to_string());
    ns.pod_when("a", "made", |_| true).await;
    ns.vm_with_reason("a", "Starting").await;
    ns.namespace.apply(&with_disk("a-b", "c").to_string());
    ns.vm_with_reason("a-b", "ClaimTaken").await;
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let lose_labels = async |time: &str| {
        // The second VM is looked at, too.
        ns.patch_vm("a-b", json!({ "metadata": { "labels": { "time": time } } })).await;
        let patch = Patch::Merge(json!({ "metadata": { "labels": null } }));
        claims.patch("a-b-c-disk", &PatchParams::default(), &patch).await.unwrap();
        ns.patch_vm("a-b", json!({ "metadata": { "labels": { "time": format!("{time}-later") } } })).await;
        eventually("the claim to have labels", LIMIT, async || {
            let claim = claims.get("a-b-c-disk").await.unwrap();
            claim.labels().get("app.kubernetes.io/instance").cloned()
        })
        .await
    };
    for time in ["first", "second", "third"] {
        assert_eq!(lose_labels(time).await, "a");
    }
    // It has no guest any more.
    ns.patch_vm("a", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.pod_when("a", "going", is_going).await;
    ns.remove_pod("a").await;
    ns.vm_with_reason("a", "StoppedAsRequested").await;
    for time in ["fourth", "fifth"] {
        assert_eq!(lose_labels(time).await, "a");
    }
    assert!(ns.pods().await.is_empty());
    // It does not use it any more, and a person gives it to the other one.
    ns.patch_vm("a", json!({ "spec": { "vm": { "disks": [] } } })).await;
    ns.vm_when("a", "without the disk", |vm| {
        vm.status.iter().flat_map(|status| &status.claims).any(|claim| claim.name == "a-b-c-disk" && claim.unused)
    })
    .await;
    let given = Patch::Merge(json!({ "metadata": { "annotations": { VM_ANNOTATION: "a-b" } } }));
    claims.patch("a-b-c-disk", &PatchParams::default(), &given).await.unwrap();
    assert_eq!(lose_labels("sixth").await, "a-b");
}

#[tokio::test]
async fn a_claim_of_a_vm_that_has_run_with_an_earlier_runner_is_never_made_again() {
    let ns = ManagedNamespace::new("x4").await;
    let restored = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "apple-core-disk", "annotations": { VM_ANNOTATION: "apple" } },
        "spec": { "accessModes": ["ReadWriteOnce"], "storageClassName": "restored", "resources": { "requests": { "storage": "1Gi" } } },
    });
    ns.namespace.apply(&restored.to_string());
    ns.create_vm("apple", |vm| {
        vm["spec"]["image"] = json!({ "source": "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest" });
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["storageClassName"] = json!("fast");
    })
    .await;
    let set = async |state: &str| ns.patch_vm("apple", json!({ "spec": { "vm": { "state": state } } })).await;
    // The runner of the VM-Operator reports that the guest runs, and then that it does not.
    let report = async |runs: &str| {
        let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
        let mut status = json!(vm.status.unwrap());
        status["runnerVersion"] = json!("4.0.3");
        for condition in status["conditions"].as_array_mut().unwrap() {
            if condition["type"] == "Running" {
                (condition["status"], condition["reason"]) = (json!(runs), json!("VmStarted"));
            }
        }
        let patch = json!({ "status": status });
        let how = PatchParams { field_manager: Some("java".into()), ..PatchParams::default() };
        ns.api::<VirtualMachine>().patch_status("apple", &how, &Patch::Merge(&patch)).await.unwrap();
    };
    ns.pod_when("apple", "made", |_| true).await;
    ns.vm_with_reason("apple", "Starting").await;
    report("True").await;
    ns.vm_with_reason("apple", "Running").await;
    report("False").await;
    for state in ["Stopped", "Running", "Stopped"] {
        set(state).await;
        if state == "Stopped" {
            ns.vm_with_reason("apple", "StoppedAsRequested").await;
        } else {
            ns.vm_with_reason("apple", "Starting").await;
        }
    }
    let claims: Api<PersistentVolumeClaim> = ns.api();
    claims.delete("apple-core-disk", &DeleteParams::default()).await.unwrap();
    set("Running").await;
    eventually("the lost claim to be noticed", LIMIT, async || {
        let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
        let ready = condition(&vm, "Ready")?.1;
        ["ClaimMissing", "Starting"].contains(&ready.as_str()).then_some(())
    })
    .await;
    assert!(claims.get_opt("apple-core-disk").await.unwrap().is_none());
}

/// A backup tool restores a claim, with the name of an earlier release and without labels, and then its VM.
#[tokio::test]
async fn a_vm_whose_restored_disk_is_seen_late_gets_no_empty_one() {
    let lagging = Lagging::new("restored-late").await;
    lagging.proxy.hold_watches(Some("/persistentvolumeclaims?"));
    let claim = |name: &str| {
        json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim",
            "metadata": { "name": name, "annotations": { VM_ANNOTATION: "apple" } },
            "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "resources": { "requests": { "storage": "1Gi" } } },
        })
    };
    let restored = ["core-disk-apple-0", "vmop-runner-data-apple-0"];
    for name in restored {
        lagging.namespace.apply(&claim(name).to_string());
    }
    let from = lagging.manager.log().len();
    lagging.namespace.apply(&on_node("apple").to_string());
    let said = lagging.manager_says(from, &["no other is made", "applied object=PersistentVolumeClaim"]).await;
    assert_eq!(said, "no other is made");
    lagging.proxy.hold_watches(None);
    let pod = lagging.pod_when("apple", |_| true).await;
    let claims = lagging.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap();
    let mut names: Vec<_> = claims.iter().map(ResourceExt::name_any).collect();
    names.sort();
    assert_eq!(names, restored);
    let volumes = pod.spec.unwrap().volumes.unwrap_or_default();
    let mounted = volumes.into_iter().filter_map(|volume| Some(volume.persistent_volume_claim?.claim_name));
    assert!(mounted.into_iter().all(|name| restored.contains(&name.as_str())));
}

/// One list serves all VMs that came before it, so that a thousand VMs do not list a thousand times.
#[tokio::test]
async fn vms_that_come_at_once_ask_for_their_claims_together() {
    let lagging = Lagging::new("lists").await;
    lagging.proxy.hold_watches(Some("/vms?"));
    // At once: while kubectl works, the proxy does not, and the manager would lose its lease.
    let vms: Vec<Value> = (0..20).map(|number| on_node(&format!("vm-{number}"))).collect();
    lagging.namespace.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": vms }).to_string());
    let path = format!("/api/v1/namespaces/{}/persistentvolumeclaims", lagging.namespace.name());
    let lists = || lagging.proxy.lists().get(&format!("GET {path}")).copied().unwrap_or_default();
    let before = lists();
    lagging.proxy.hold_watches(None);
    for number in 0..20 {
        lagging.pod_when(&format!("vm-{number}"), |_| true).await;
    }
    let lists = lists() - before;
    println!("20 VMs: {lists} lists of claims");
    assert!((1..=5).contains(&lists), "{lists}");
}
