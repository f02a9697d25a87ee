//! A namespace with a running manager. The test plays the parts that an API server alone lacks: the runner, the scheduler and
//! the kubelet.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::{collections::BTreeSet, time::Duration};

use futures::StreamExt;
use k8s_openapi::{
    api::core::v1::{Event, Node, Pod},
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams, PropagationPolicy},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::task::JoinHandle;
use vm_operator::api::{VirtualMachine, VmReport, conditions};

use super::{
    cluster::{Cluster, TestNamespace, eventually},
    manager::{Manager, allowing, install_crds},
};

/// How long a test waits for anything. Only a machine that is busy with other things comes near to it; no test asserts a time.
pub const LIMIT: Duration = Duration::from_secs(180);

/// A configuration with which each VM has a Service. [`vm_manifest`] declines it.
pub const SERVICES: &str = r#""/Manager": {"/Controller": {"/Reconciler": {loadBalancerService: true}}}"#;

/// A namespace with a running manager.
pub struct ManagedNamespace {
    /// The cluster.
    pub cluster: &'static Cluster,
    /// The namespace.
    pub namespace: TestNamespace,
    /// A client.
    pub client: Client,
    /// A kubeconfig with the manager's permissions.
    pub kubeconfig: NamedTempFile,
    /// The manager.
    pub manager: Manager,
}

impl ManagedNamespace {
    /// With the built-in templates.
    pub async fn new(test: &str) -> Self {
        Self::with_configuration(test, SERVICES).await
    }

    /// With templates over the built-in ones. The manager may make objects of all kinds.
    pub async fn with_templates(test: &str, templates: &[(&str, &str)]) -> Self {
        Self::start(Cluster::control_plane(), test, templates, SERVICES, true, async |_, _| ()).await
    }

    /// With a configuration.
    pub async fn with_configuration(test: &str, configuration: &str) -> Self {
        Self::start(Cluster::control_plane(), test, &[], configuration, false, async |_, _| ()).await
    }

    /// On another cluster than the shared one.
    pub async fn on(cluster: &'static Cluster, test: &str) -> Self {
        Self::start(cluster, test, &[], SERVICES, false, async |_, _| ()).await
    }

    /// With what `before` makes in the namespace before the manager starts.
    pub async fn after(cluster: &'static Cluster, test: &str, before: impl AsyncFnOnce(&Client, &str)) -> Self {
        Self::start(cluster, test, &[], SERVICES, false, before).await
    }

    async fn start(
        cluster: &'static Cluster,
        test: &str,
        templates: &[(&str, &str)],
        configuration: &str,
        every_kind: bool,
        before: impl AsyncFnOnce(&Client, &str),
    ) -> Self {
        install_crds(cluster).await;
        let namespace = cluster.namespace(test).await;
        namespace.create_runners_account().await;
        let kubeconfig = namespace.managers_kubeconfig().await;
        if every_kind {
            namespace.create(&every_kind_for_the_manager(namespace.name())).await;
        }
        let client = cluster.client().await;
        before(&client, namespace.name()).await;
        let manager = Manager::start_with(kubeconfig.path(), namespace.name(), templates, configuration);
        Self { cluster, client, namespace, kubeconfig, manager }
    }

    /// The objects of a kind.
    pub fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), self.namespace.name())
    }

    /// Creates a VM.
    pub async fn create_vm(&self, name: &str, edit: impl FnOnce(&mut Value)) -> VirtualMachine {
        let mut vm = vm_manifest(name);
        edit(&mut vm);
        self.api().create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap()
    }

    /// Patches a VM as `kubectl patch` does, but as another field manager, which Flux ignores.
    pub async fn patch_vm(&self, name: &str, patch: Value) {
        let parameters = PatchParams { field_manager: Some("test".into()), ..PatchParams::default() };
        self.api::<VirtualMachine>().patch(name, &parameters, &Patch::Merge(patch)).await.unwrap();
    }

    /// Deletes a VM without its objects (`--cascade=orphan`).
    pub async fn delete_and_orphan(&self, name: &str) {
        let parameters =
            DeleteParams { propagation_policy: Some(PropagationPolicy::Orphan), ..DeleteParams::default() };
        let api: Api<VirtualMachine> = self.api();
        let uid = api.get(name).await.unwrap().metadata.uid;
        api.delete(name, &parameters).await.unwrap();
        // The garbage collector of a new cluster discovers new kinds only every 30 s.
        eventually(&format!("{name} to be gone"), 3 * LIMIT, async || {
            // Whoever wants one may have made another one at once.
            api.get_opt(name).await.unwrap().is_none_or(|vm| vm.metadata.uid != uid).then_some(())
        })
        .await;
    }

    /// Waits until the condition Ready has the reason, and returns the VM.
    pub async fn vm_with_reason(&self, name: &str, reason: &str) -> VirtualMachine {
        let api: Api<VirtualMachine> = self.api();
        eventually(&format!("{name} to be {reason}"), LIMIT, async || {
            let vm = api.get(name).await.unwrap();
            let found = conditions::find(&vm.status.as_ref()?.conditions, conditions::READY)?.reason == reason;
            (found && vm.status.as_ref()?.observed_generation == vm.metadata.generation).then_some(vm)
        })
        .await
    }

    /// Waits until `check` is true for the VM.
    pub async fn vm_when(
        &self,
        name: &str,
        what: &str,
        mut check: impl FnMut(&VirtualMachine) -> bool,
    ) -> VirtualMachine {
        let api: Api<VirtualMachine> = self.api();
        eventually(&format!("{name}: {what}"), LIMIT, async || {
            let vm = api.get(name).await.unwrap();
            check(&vm).then_some(vm)
        })
        .await
    }

    /// Waits until `check` is true for the Pod.
    pub async fn pod_when(&self, name: &str, what: &str, mut check: impl FnMut(&Pod) -> bool) -> Pod {
        let api: Api<Pod> = self.api();
        eventually(&format!("Pod {name}: {what}"), LIMIT, async || api.get_opt(name).await.unwrap().filter(&mut check))
            .await
    }

    /// The names of all Pods.
    pub async fn pods(&self) -> Vec<String> {
        let pods = self.api::<Pod>().list(&Default::default()).await.unwrap();
        pods.into_iter().map(|pod| pod.name_any()).collect()
    }

    /// Waits until no Pod of that name exists.
    pub async fn wait_for_no_pod(&self, name: &str) {
        let api: Api<Pod> = self.api();
        eventually(&format!("Pod {name} to be gone"), LIMIT, async || {
            api.get_opt(name).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    /// Plays the runner of the VM's Pod: reports whether the guest runs.
    pub async fn report(&self, name: &str, running: bool, reason: &str) {
        report(&self.client, self.namespace.name(), name, running, reason).await;
    }

    /// Plays the scheduler: binds a Pod to a node.
    pub async fn bind_pod(&self, pod: &str, node: &str) {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": pod, "namespace": self.namespace.name() },
            "target": { "apiVersion": "v1", "kind": "Node", "name": node },
        });
        let path = format!("/api/v1/namespaces/{}/pods/{pod}/binding", self.namespace.name());
        let request = http::Request::post(path).body(serde_json::to_vec(&binding).unwrap()).unwrap();
        self.client.request::<Value>(request).await.unwrap();
    }

    /// Plays the kubelet: patches the status of a Pod.
    pub async fn patch_pod_status(&self, name: &str, status: Value) {
        let patch = json!({ "status": status });
        self.api::<Pod>().patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }

    /// Plays the kubelet: removes a Pod that is being deleted.
    pub async fn remove_pod(&self, name: &str) {
        let parameters = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        // A Pod without a node may have gone with its deletion.
        let removed = self.api::<Pod>().delete(name, &parameters).await;
        let is_gone = matches!(&removed, Err(kube::Error::Api(answer)) if answer.is_not_found());
        assert!(removed.is_ok() || is_gone, "{removed:?}");
    }

    /// Waits until `kubectl describe vm` prints all of that.
    pub async fn wait_for_description(&self, name: &str, words: &[&str]) {
        eventually(&format!("kubectl describe vm {name} to say {words:?}"), LIMIT, async || {
            let said = self.namespace.kubectl(&["describe", "vm", name]);
            words.iter().all(|word| said.contains(word)).then_some(())
        })
        .await;
    }

    /// The manager of the tests has its configuration in a file; the commands read the ConfigMap that this makes.
    pub async fn configure_commands(&self, configuration: &str) {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator" },
            "data": { "config.yaml": allowing(configuration) },
        });
        self.namespace.create(&map.to_string()).await;
    }

    /// Waits for an event about the VM.
    pub async fn wait_for_event(&self, name: &str, reason: &str) -> Event {
        let api: Api<Event> = self.api();
        eventually(&format!("event {reason} of {name}"), LIMIT, async || {
            let events = api.list(&Default::default()).await.unwrap();
            events.into_iter().find(|event| {
                event.reason.as_deref() == Some(reason) && event.involved_object.name.as_deref() == Some(name)
            })
        })
        .await
    }
}

/// A role for objects of all kinds, and its binding to the manager.
fn every_kind_for_the_manager(namespace: &str) -> String {
    let metadata = json!({ "name": "every-kind" });
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": metadata,
        "rules": [{ "apiGroups": ["*"], "resources": ["*"], "verbs": ["*"] }],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": metadata,
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "every-kind" },
        "subjects": [{ "kind": "ServiceAccount", "name": "vm-operator", "namespace": namespace }],
    });
    format!("{role}\n---\n{binding}\n")
}

/// Plays the runner of a VM's Pod: reports whether the guest runs.
pub async fn report(client: &Client, namespace: &str, name: &str, running: bool, reason: &str) {
    let pod = Api::<Pod>::namespaced(client.clone(), namespace).get(name).await.unwrap();
    report_of_pod(client, namespace, name, pod.uid().as_deref(), running, reason).await;
}

/// The same of the Pod with this UID, which may have gone meanwhile.
pub async fn report_of_pod(
    client: &Client,
    namespace: &str,
    name: &str,
    pod: Option<&str>,
    running: bool,
    reason: &str,
) {
    let condition = |type_: &str| {
        json!({
            "type": type_, "status": if running { "True" } else { "False" }, "reason": reason, "message": "told by a test",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    let mut status = json!({
        "cpus": i32::from(running), "ram": if running { "1000000000" } else { "0" },
        "conditions": [condition("Running"), condition("Booted")],
    });
    if let Some(uid) = pod
        && report_of_runner(client, namespace, uid, &status).await
    {
        return;
    }
    status["podUid"] = json!(pod);
    let report = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name }, "status": status,
    });
    let vms = Api::<VirtualMachine>::namespaced(client.clone(), namespace);
    vms.patch_status(name, &PatchParams::apply("vm-runner").force(), &Patch::Apply(&report)).await.unwrap();
}

/// Reports as a runner does, in the report that the manager has made for the Pod. Returns false if there is none, also after a while: then a
/// runner of an earlier release would report into the VM's status.
async fn report_of_runner(client: &Client, namespace: &str, uid: &str, status: &Value) -> bool {
    let reports = Api::<VmReport>::namespaced(client.clone(), namespace);
    let patch = json!([{ "op": "add", "path": "/status", "value": status }]);
    let patch = Patch::Json::<()>(serde_json::from_value(patch).unwrap());
    for _ in 0..60 {
        match reports.patch_status(uid, &PatchParams::default(), &patch).await {
            Ok(_) => return true,
            Err(kube::Error::Api(answer)) if answer.code == 404 => tokio::time::sleep(Duration::from_millis(50)).await,
            Err(error) => panic!("{error}"),
        }
    }
    false
}

/// Plays the kubelet: Pods that are deleted go, and `report` is called once for each other Pod whose name is not one of `failing`.
pub fn play_kubelet<F: Future<Output = ()> + Send>(
    pods: Api<Pod>,
    failing: &'static [&'static str],
    mut report: impl FnMut(Pod) -> F + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut changes = std::pin::pin!(watcher(pods.clone(), watcher::Config::default()).applied_objects());
        let mut reported = BTreeSet::new();
        while let Some(Ok(pod)) = changes.next().await {
            let name = pod.name_any();
            if pod.metadata.deletion_timestamp.is_some() {
                let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
                // It may be gone already.
                let _ = pods.delete(&name, &now).await;
            } else if !failing.contains(&name.as_str()) && reported.insert(pod.uid()) {
                report(pod).await;
            }
        }
    })
}

/// Makes a node, and plays its kubelet's heartbeat until the test ends. Without it the controllers say after a minute that the node does not answer.
pub async fn play_node(client: &Client, name: &'static str) {
    let nodes = Api::<Node>::all(client.clone());
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name } });
    nodes.patch(name, &PatchParams::apply("test"), &Patch::Apply(&node)).await.unwrap();
    let beat = async move || {
        let now = Timestamp::now();
        let ready = json!({ "type": "Ready", "status": "True", "reason": "Played", "message": "", "lastHeartbeatTime": now, "lastTransitionTime": now });
        let status = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name }, "status": { "conditions": [ready] } });
        nodes.patch_status(name, &PatchParams::apply("kubelet").force(), &Patch::Apply(&status)).await.map(drop)
    };
    beat().await.unwrap();
    tokio::spawn(async move {
        while beat().await.is_ok() {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    });
}

/// Status, reason and message of a condition of a VM.
pub fn condition(vm: &VirtualMachine, type_: &str) -> Option<(String, String, String)> {
    let condition = conditions::find(&vm.status.as_ref()?.conditions, type_)?;
    Some((condition.status.clone(), condition.reason.clone(), condition.message.clone()))
}

/// A VM with a disk, whose state is Running.
pub fn vm_manifest(name: &str) -> Value {
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": name },
        "spec": { "loadBalancerService": {}, "vm": {
            "state": "Running", "maximumCpus": 2,
            "disks": [{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }],
        } },
    })
}

/// Creates a VM, waits for its Pod, and returns the Pod.
pub async fn create_vm_and_pod(ns: &ManagedNamespace, name: &str, edit: impl FnOnce(&mut Value)) -> Value {
    ns.create_vm(name, edit).await;
    ns.vm_with_reason(name, "Starting").await;
    json!(ns.api::<Pod>().get(name).await.unwrap())
}
