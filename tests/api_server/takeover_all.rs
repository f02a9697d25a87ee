//! The takeover of the VMs that two releases of the VM-Operator in Java left on a real API server (`tests/predecessor`), with the real
//! StatefulSet controller and garbage collector. What became of each VM is a table in `docs/takeover-tested.md`; a test fails if the page
//! says anything else. Each VM is then stopped, started, restarted and evicted. At no time two Pods of one VM exist.
//!
//! The file is longer than others: the steps of a takeover share one namespace with all VMs, and are read from the first to the last.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
    sync::{Arc, Mutex},
};

use futures::{StreamExt, pin_mut, stream};
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    core::v1::{ConfigMap, Node, PersistentVolume, PersistentVolumeClaim, Pod, Secret, Service},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, EvictParams, ListParams, Patch, PatchParams, PostParams},
    core::{GroupVersionKind, ObjectMeta},
    runtime::watcher,
};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use vm_operator::{
    api::{VirtualMachine, VmPool},
    object::{INSTANCE_LABEL, RESTARTED_ANNOTATION},
};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
    manager::{Manager, allowing},
};

/// The name under which that manager applies its objects, and its runner patches a VM.
const ITS_MANAGER: &str = "kubernetes-java-kubectl-apply";
pub const CONFIGURATION: &str = include_str!("../predecessor/config.yaml");
/// The page with the tables.
const PAGE: &str = "docs/takeover-tested.md";
/// A VM that breaks rules which its definition did not have: more CPUs and memory than their maximum.
pub const BREAKS_A_RULE: &str = "c05-lenient";
/// How many VMs are looked after at once.
const AT_ONCE: usize = 6;

pub fn documents(text: &str) -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(text).map(|document| Value::deserialize(document).unwrap());
    documents.filter(|document| !document.is_null()).collect()
}

/// What is done to a VM after the takeover.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    Stop,
    Start,
    Restart,
    Evict,
    GuestShutdown,
}

impl Step {
    const ALL: [Self; 5] = [Self::Stop, Self::Start, Self::Restart, Self::Evict, Self::GuestShutdown];
}

/// Which objects a VM has, with their UIDs.
#[derive(Clone, Debug, Default, PartialEq)]
struct Found {
    pods: BTreeMap<String, String>,
    claims: BTreeMap<String, String>,
    services: BTreeMap<String, String>,
}

/// A VM as it was left.
struct Vm {
    name: String,
    runs: bool,
    guest_shutdown_stops: bool,
}

impl Vm {
    fn of(vm: &Value) -> Self {
        Self {
            name: vm["metadata"]["name"].as_str().unwrap().into(),
            runs: vm["spec"]["vm"]["state"] == "Running",
            guest_shutdown_stops: vm["spec"]["guestShutdownStops"] == true,
        }
    }
}

/// A namespace that the VM-Operator left, with our manager.
struct TakenOver {
    ns: ManagedNamespace,
    /// A client with the rights of the service account of our Pods with its runner.
    runner: Client,
    vms: Vec<Vm>,
    before: BTreeMap<String, Found>,
    names_before: BTreeSet<String>,
    /// What `kubectl vm diff --all` said before our manager was started.
    announced: String,
    /// What it said of the VM that is assigned from a pool.
    of_pool: String,
    /// The keys of all the configurations that it wrote for its runner.
    known_keys: BTreeSet<String>,
    /// The largest number of Pods of each VM at one time.
    most_pods: Arc<Mutex<BTreeMap<String, usize>>>,
    counting: JoinHandle<()>,
}

impl TakenOver {
    /// Leaves all objects of a release in a new namespace, and starts our manager.
    async fn of(test: &str, release: &[Value]) -> Self {
        let mut ns = ManagedNamespace::with_configuration(test, CONFIGURATION).await;
        // Our manager starts when the namespace is as the other one left it.
        ns.manager.signal(Signal::KILL);
        ns.manager.wait_for_end().await;
        ns.namespace.apply(include_str!("../../deploy/legacy-runner.yaml"));
        let configuration = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator" },
            "data": { "config.yaml": allowing(CONFIGURATION) },
        });
        ns.namespace.create(&configuration.to_string()).await;
        leave(&ns, release).await;
        let is_vm = |object: &&Value| object["kind"] == "VirtualMachine";
        let vms: Vec<Vm> = release.iter().filter(is_vm).map(Vm::of).collect();
        let mut config = ns.cluster.config().await;
        config.auth_info.impersonate = Some(format!("system:serviceaccount:{}:vm-runner-legacy", ns.namespace));
        let runner = Client::try_from(config).unwrap();
        let most_pods = Arc::new(Mutex::default());
        let counting = tokio::spawn(count_pods(ns.api(), most_pods.clone()));
        let mut before = BTreeMap::new();
        for vm in &vms {
            before.insert(vm.name.clone(), found(&ns, &vm.name).await);
        }
        let names_before = names(&ns).await;
        let mut known_keys = BTreeSet::new();
        // Both releases know the same keys, and those of release 4 have them all.
        let configured = documents(include_str!("../predecessor/release-4-objects.yaml"));
        for object in configured.iter().filter(|object| object["kind"] == "ConfigMap") {
            let Some(text) = object["data"]["config.yaml"].as_str() else { continue };
            keys(&serde_yaml::from_str(text).unwrap(), "", &mut known_keys);
        }
        let (_, announced) = ns.namespace.kubectl_vm(&["diff", "--all"]);
        let (_, of_pool) = ns.namespace.kubectl_vm(&["diff", "a09-pool"]);
        ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], CONFIGURATION);
        Self { ns, runner, vms, before, names_before, announced, of_pool, known_keys, most_pods, counting }
    }

    /// Waits until the manager has seen all VMs and has nothing to do; then what became of them.
    async fn taken_over(&self) -> BTreeMap<String, (Found, VirtualMachine)> {
        let mut after = BTreeMap::new();
        for vm in &self.vms {
            let name = vm.name.clone();
            self.ns
                .vm_when(&name, "seen by the manager", |vm| {
                    vm.status.as_ref().is_some_and(|status| status.observed_generation == vm.metadata.generation)
                })
                .await;
        }
        self.ns.manager.wait_until_idle().await;
        for vm in &self.vms {
            let name = vm.name.clone();
            let vm = self.ns.api::<VirtualMachine>().get(&name).await.unwrap();
            after.insert(name.clone(), (found(&self.ns, &name).await, vm));
        }
        after
    }

    async fn pod(&self, vm: &str) -> Option<Pod> {
        let parameters = ListParams::default().labels(&format!("{INSTANCE_LABEL}={vm}"));
        let pods = self.ns.api::<Pod>().list(&parameters).await.unwrap().items;
        assert!(pods.len() < 2, "{vm} has two Pods");
        pods.into_iter().next()
    }

    /// Plays the kubelet: ends the Pod when somebody has deleted it, and not before nobody makes it again.
    async fn pod_ends(&self, vm: &str, pod: &Pod) {
        let pods: Api<Pod> = self.ns.api();
        let name = pod.name_any();
        eventually(&format!("Pod {name} to be deleted"), LIMIT, async || {
            let found = pods.get_opt(&name).await.unwrap().filter(|found| found.uid() == pod.uid());
            found.is_none_or(|pod| pod.metadata.deletion_timestamp.is_some()).then_some(())
        })
        .await;
        let sets: Api<StatefulSet> = self.ns.api();
        eventually(&format!("the StatefulSet of {vm} to be gone"), LIMIT, async || {
            sets.get_opt(vm).await.unwrap().is_none().then_some(())
        })
        .await;
        // A Pod without a node is gone at once.
        if pods.get_opt(&name).await.unwrap().is_some_and(|found| found.uid() == pod.uid()) {
            self.ns.remove_pod(&name).await;
        }
    }

    /// Plays the kubelet and the runner of a new Pod.
    async fn new_pod_runs(&self, vm: &str, old: Option<&Pod>) {
        let pod = self
            .ns
            .pod_when(vm, "made", |pod| {
                old.is_none_or(|old| old.uid() != pod.uid()) && pod.metadata.deletion_timestamp.is_none()
            })
            .await;
        self.check_configuration(vm, &pod).await;
        let spec = pod.spec.as_ref().unwrap();
        if spec.node_selector.as_ref().is_some_and(|selector| selector.contains_key("no")) {
            self.ns.vm_with_reason(vm, "Starting").await;
            return;
        }
        self.ns.bind_pod(vm, self.ns.namespace.name()).await;
        let at = "2026-11-24T10:50:22Z";
        let condition = |type_: &str| json!({ "type": type_, "status": "True", "lastTransitionTime": at });
        let conditions = ["PodScheduled", "Initialized", "ContainersReady", "Ready"].map(condition);
        let container = &spec.containers[0];
        let status = json!({
            "phase": "Running", "startTime": at, "podIP": "10.1.0.5", "podIPs": [{ "ip": "10.1.0.5" }],
            "conditions": conditions,
            "containerStatuses": [{
                "name": container.name, "image": container.image, "imageID": "x", "ready": true, "started": true, "restartCount": 0,
                "state": { "running": { "startedAt": at } },
            }],
        });
        self.ns.patch_pod_status(vm, status).await;
        self.report(vm, true).await;
        self.ns.vm_with_reason(vm, "Running").await;
    }

    /// Reports as its runner does: the whole status, whatever is there.
    async fn report(&self, name: &str, is_running: bool) {
        let vms = vms_of(&self.runner, &self.ns);
        let mut status = vms.get(name).await.unwrap().data["status"].take();
        let (value, reason) = if is_running { ("True", "VmBooted") } else { ("False", "VmStopped") };
        let condition = |type_: &str| {
            json!({
                "type": type_, "status": value, "reason": reason, "message": reason, "observedGeneration": 1,
                "lastTransitionTime": "2026-11-24T10:50:21.266448Z",
            })
        };
        status["conditions"] = json!([condition("Running"), condition("Booted")]);
        (status["cpus"], status["ram"]) = if is_running { (json!(2), json!("4Gi")) } else { (json!(0), json!("0")) };
        replace_status(&vms, name, &status).await;
    }

    /// A Pod with its image has a configuration with keys that it knows, and what its container needs.
    async fn check_configuration(&self, vm: &str, pod: &Pod) {
        let pod = json!(pod);
        let container = &pod["spec"]["containers"][0];
        assert!(
            container["image"].as_str().unwrap().contains("org.jdrupes.vmoperator.runner.qemu-"),
            "{vm}: {container}"
        );
        assert_eq!(container["name"], vm);
        assert_eq!(container["securityContext"]["privileged"], true, "{vm}");
        let networks = self.ns.api::<VirtualMachine>().get(vm).await.unwrap().spec.vm.networks;
        let has_tap = json!(networks).as_array().into_iter().flatten().any(|network| network.get("tap").is_some());
        let in_network_of_node = if has_tap { json!(true) } else { Value::Null };
        assert_eq!(
            (&pod["spec"]["hostNetwork"], &pod["spec"]["serviceAccountName"]),
            (&in_network_of_node, &json!("vm-runner-legacy"))
        );
        let volumes = pod["spec"]["volumes"].as_array().unwrap();
        let sources = volumes.iter().find(|volume| volume["name"] == "config").unwrap()["projected"]["sources"]
            .as_array()
            .unwrap();
        let mut texts = Vec::new();
        for source in sources {
            if let Some(name) = source["configMap"]["name"].as_str() {
                texts.extend(self.ns.api::<ConfigMap>().get(name).await.unwrap().data.unwrap().remove("config.yaml"));
            }
            if let Some(name) = source["secret"]["name"].as_str()
                && let Some(secret) = self.ns.api::<Secret>().get_opt(name).await.unwrap()
            {
                let data = secret.data.unwrap_or_default().remove("config.yaml");
                texts.extend(data.map(|text| String::from_utf8(text.0).unwrap()));
            }
        }
        let config: Value = serde_yaml::from_str(texts.last().unwrap()).unwrap();
        let mut found = BTreeSet::new();
        keys(&config, "", &mut found);
        let unknown: Vec<&String> = found.difference(&self.known_keys).collect();
        assert!(unknown.is_empty(), "{vm}: {unknown:?} in {config}");
    }

    /// Does it, and says what became of the Pod.
    async fn step(&self, vm: &str, step: Step) -> String {
        let old = self.pod(vm).await;
        let state = |state: &str| json!({ "spec": { "vm": { "state": state } } });
        match step {
            Step::Stop => self.ns.patch_vm(vm, state("Stopped")).await,
            Step::Start => self.ns.patch_vm(vm, state("Running")).await,
            Step::Restart => {
                self.ns
                    .patch_vm(vm, json!({ "metadata": { "annotations": { RESTARTED_ANNOTATION: "monday" } } }))
                    .await;
            }
            Step::Evict => {
                let pod = old.as_ref().unwrap().name_any();
                self.ns.api::<Pod>().evict(&pod, &EvictParams::default()).await.unwrap();
            }
            Step::GuestShutdown => {
                self.report(vm, false).await;
                let patch = json!([{ "op": "replace", "path": "/spec/vm/state", "value": "Stopped" }]);
                let patch: json_patch::Patch = serde_json::from_value(patch).unwrap();
                let parameters = PatchParams { field_manager: Some(ITS_MANAGER.into()), ..PatchParams::default() };
                vms_of(&self.runner, &self.ns).patch(vm, &parameters, &Patch::Json::<()>(patch)).await.unwrap();
            }
        }
        if let Some(pod) = &old {
            self.pod_ends(vm, pod).await;
        }
        match step {
            Step::Stop | Step::GuestShutdown => drop(self.ns.vm_with_reason(vm, "StoppedAsRequested").await),
            Step::Start | Step::Restart | Step::Evict => self.new_pod_runs(vm, old.as_ref()).await,
        }
        let what = match (&old, self.pod(vm).await) {
            (None, None) => "no Pod",
            (Some(_), None) => "Pod gone",
            (old, Some(new)) if old.as_ref().is_none_or(|old| old.uid() != new.uid()) => "new Pod",
            (..) => "Pod kept",
        };
        let now = self.ns.api::<VirtualMachine>().get(vm).await.unwrap();
        format!("{what}, {}", condition(&now, "Ready").unwrap().1)
    }

    /// All steps with one VM, in an order that depends on its place, and what became of it.
    async fn steps(&self, index: usize, vm: &Vm) -> BTreeMap<Step, String> {
        use Step::{Evict, GuestShutdown, Restart, Start, Stop};
        let mut order = match index % 3 {
            1 if vm.runs => vec![Restart, Evict, Stop, Start],
            2 if vm.runs => vec![Evict, Stop, Start, Restart],
            _ => vec![Stop, Start, Restart, Evict],
        };
        if vm.guest_shutdown_stops {
            order.push(GuestShutdown);
        }
        let mut results = BTreeMap::new();
        for step in order {
            results.insert(step, self.step(&vm.name, step).await);
        }
        results
    }

    /// Takes over, does all steps with each VM, and returns the table.
    async fn table(&self) -> String {
        let after = self.taken_over().await;
        let names_after = names(&self.ns).await;
        let vms = self.vms.iter().enumerate();
        let results: BTreeMap<String, BTreeMap<Step, String>> = stream::iter(vms)
            .map(|(index, vm)| async move { (vm.name.clone(), self.steps(index, vm).await) })
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut table = String::from(
            "| VM | Pod | Ready | claims | Service | stop | start | restart | eviction | the guest shuts itself down |\n\
             |---|---|---|---|---|---|---|---|---|---|\n",
        );
        for (name, (taken, vm)) in &after {
            let before = &self.before[name];
            let at_the_end = found(&self.ns, name).await;
            let (mut claims, mut services) =
                (change(&before.claims, &taken.claims), change(&before.services, &taken.services));
            for (cell, then, now) in [
                (&mut claims, &taken.claims, &at_the_end.claims),
                (&mut services, &taken.services, &at_the_end.services),
            ] {
                if then != now {
                    *cell += &format!(", later {}", change(then, now));
                }
            }
            let pods = change(&before.pods, &taken.pods);
            write!(table, "| {name} | {pods} | {} | {claims} | {services} |", conditions(vm)).unwrap();
            for step in Step::ALL {
                write!(table, " {} |", results[name].get(&step).map_or("", String::as_str)).unwrap();
            }
            table.push('\n');
        }
        let list = |names: Vec<&String>| {
            let text = names.iter().map(|name| name.as_str()).collect::<Vec<_>>().join(", ");
            if text.is_empty() { "nothing".into() } else { text }
        };
        writeln!(table, "\nCreated by the takeover: {}.", list(names_after.difference(&self.names_before).collect()))
            .unwrap();
        writeln!(table, "Deleted by the takeover: {}.", list(self.names_before.difference(&names_after).collect()))
            .unwrap();
        self.counting.abort();
        let most = self.most_pods.lock().unwrap();
        for (vm, most) in &*most {
            assert_eq!(*most, 1, "{vm} had that many Pods at one time");
        }
        table
    }
}

/// What its manager finds and does when it comes back, and ours again after it.
impl TakenOver {
    async fn way_back(&mut self, release: &[Value]) {
        self.ns.manager.signal(Signal::TERM);
        self.ns.manager.wait_for_end().await;
        let mut before = BTreeMap::new();
        let mut vms = BTreeMap::new();
        for Vm { name, .. } in &self.vms {
            before.insert(name.clone(), found(&self.ns, name).await);
            vms.insert(name.clone(), vms_of(&self.ns.client, &self.ns).get(name).await.unwrap());
        }
        // It applies all objects of each VM but the Pod, which it creates only if none of the VM's name exists.
        let kinds = ["ConfigMap", "Service", "PersistentVolumeClaim"];
        let applied = release.iter().filter(|object| kinds.iter().any(|kind| object["kind"] == *kind));
        for object in applied.filter(|object| object["metadata"]["labels"]["app.kubernetes.io/name"] == "vm-runner") {
            create_object(&self.ns, object, &vms).await;
        }
        for (vm, before) in &before {
            assert!(before.pods.keys().all(|pod| pod == vm), "{before:?}");
            assert_eq!(found(&self.ns, vm).await, *before, "{vm}");
        }
        // It deletes the ConfigMaps of this name, which its own runner's Pods do not need.
        for pod in self.ns.api::<Pod>().list(&ListParams::default()).await.unwrap() {
            for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
                let sources = volume.projected.iter().flat_map(|projected| projected.sources.iter().flatten());
                for map in sources.filter_map(|source| source.config_map.as_ref()) {
                    assert!(!map.name.ends_with("-cloud-init"), "{} mounts {}", pod.name_any(), map.name);
                }
            }
        }

        self.ns.manager = Manager::start_with(self.ns.kubeconfig.path(), self.ns.namespace.name(), &[], CONFIGURATION);
        for (vm, (found, _)) in self.taken_over().await {
            assert_eq!(found, before[&vm], "{vm}");
        }
    }
}

/// Ready's reason, and the other conditions that ask for attention.
fn conditions(vm: &VirtualMachine) -> String {
    let mut text = condition(vm, "Ready").map_or_else(|| "(none)".into(), |(_, reason, _)| reason);
    for (type_, unremarkable) in [
        ("TemplatesValid", "True"),
        ("StorageReady", "True"),
        ("RestartRequired", "False"),
        ("PowerUnmanaged", "False"),
    ] {
        if let Some((status, reason, _)) = condition(vm, type_)
            && status != unremarkable
        {
            write!(text, ", {type_}={status} ({reason})").unwrap();
        }
    }
    text
}

/// How two sets of objects differ.
fn change(before: &BTreeMap<String, String>, now: &BTreeMap<String, String>) -> String {
    let kept = now.iter().filter(|(name, uid)| before.get(*name) == Some(uid)).count();
    let gone = before.keys().filter(|name| !now.contains_key(*name)).count();
    let new = now.len() - kept;
    let counts = [(kept, "kept"), (new, "new"), (gone, "gone")].into_iter().filter(|(count, _)| *count > 0);
    let texts: Vec<String> = counts.map(|(count, what)| format!("{count} {what}")).collect();
    if texts.is_empty() { "none".into() } else { texts.join(", ") }
}

/// The paths of all keys of a value; entries of lists count as one.
fn keys(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        // Their content is the VM's own.
        Value::Object(_) if ["userData", "metaData", "networkConfig"].iter().any(|key| path.ends_with(key)) => {}
        Value::Object(map) => {
            for (key, value) in map {
                let path = format!("{path}/{key}");
                keys(value, &path, found);
                found.insert(path);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| keys(item, path, found)),
        _ => {}
    }
}

async fn uids<K>(ns: &ManagedNamespace, vm: &str) -> BTreeMap<String, String>
where
    K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + std::fmt::Debug + serde::de::DeserializeOwned,
    K::DynamicType: Default,
{
    let parameters = ListParams::default().labels(&format!("{INSTANCE_LABEL}={vm}"));
    let objects = ns.api::<K>().list(&parameters).await.unwrap();
    objects.into_iter().map(|object| (object.name_any(), object.uid().unwrap())).collect()
}

async fn found(ns: &ManagedNamespace, vm: &str) -> Found {
    Found {
        pods: uids::<Pod>(ns, vm).await,
        claims: uids::<PersistentVolumeClaim>(ns, vm).await,
        services: uids::<Service>(ns, vm).await,
    }
}

/// Kind and name of all objects of the namespace that a takeover could create or delete, without the manager's own.
async fn names(ns: &ManagedNamespace) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for (group, kind) in [
        ("", "ConfigMap"),
        ("", "Secret"),
        ("", "PersistentVolumeClaim"),
        ("", "Pod"),
        ("", "Service"),
        ("apps", "StatefulSet"),
    ] {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, "v1", kind));
        let api = Api::<DynamicObject>::namespaced_with(ns.client.clone(), ns.namespace.name(), &resource);
        let objects = api.list(&ListParams::default()).await.unwrap();
        let objects = objects.iter().map(ResourceExt::name_any).filter(|name| !name.starts_with("vm-operator"));
        names.extend(objects.map(|name| format!("{kind} {name}")));
    }
    names
}

/// Watches the Pods of all VMs.
async fn count_pods(api: Api<Pod>, most: Arc<Mutex<BTreeMap<String, usize>>>) {
    let mut pods: BTreeMap<String, BTreeSet<Option<String>>> = BTreeMap::new();
    let events = watcher(api, watcher::Config::default());
    pin_mut!(events);
    while let Some(event) = events.next().await {
        let (pod, exists) = match event {
            Ok(watcher::Event::Apply(pod) | watcher::Event::InitApply(pod)) => (pod, true),
            Ok(watcher::Event::Delete(pod)) => (pod, false),
            Ok(watcher::Event::Init | watcher::Event::InitDone) | Err(_) => continue,
        };
        let vm = pod.labels()[INSTANCE_LABEL].clone();
        let uids = pods.entry(vm.clone()).or_default();
        if exists {
            uids.insert(pod.uid())
        } else {
            uids.remove(&pod.uid())
        };
        let mut most = most.lock().unwrap();
        let most = most.entry(vm).or_default();
        *most = uids.len().max(*most);
    }
}

/// Creates all objects of a release, as its manager, its runner, a kubelet and a provisioner made them.
pub async fn leave(ns: &ManagedNamespace, release: &[Value]) {
    // A node for each test: without a kubelet it counts as lost after some time.
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": ns.namespace.name() } });
    Api::<Node>::all(ns.client.clone())
        .patch(ns.namespace.name(), &PatchParams::apply("test"), &Patch::Apply(&node))
        .await
        .unwrap();
    let of_kind = |kind: &str| release.iter().filter(|object| object["kind"] == kind).collect::<Vec<_>>();
    for claim in of_kind("PersistentVolumeClaim") {
        create_volume(ns, claim).await;
    }
    let mut vms = BTreeMap::new();
    for vm in of_kind("VirtualMachine") {
        let vm = create_vm(ns, vm).await;
        vms.insert(vm.name_any(), vm);
    }
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "test-vms" },
        "spec": { "retention": "2126-01-01T00:00:00Z", "loginOnAssignment": true, "permissions": [] },
    });
    ns.api::<VmPool>().create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
    // The StatefulSet controller makes the Pods of release 3.3, from claims that exist.
    let order = ["PersistentVolumeClaim", "ConfigMap", "Secret", "Service", "StatefulSet", "Pod"];
    for object in order.iter().flat_map(|kind| of_kind(kind)) {
        create_object(ns, object, &vms).await;
    }
    let claims: Api<PersistentVolumeClaim> = ns.api();
    eventually("all claims to be bound", LIMIT, async || {
        let is_bound = |claim: &PersistentVolumeClaim| json!(claim.status)["phase"] == "Bound";
        claims.list(&ListParams::default()).await.unwrap().iter().all(is_bound).then_some(())
    })
    .await;
    for vm in of_kind("VirtualMachine") {
        replace_status(&vms_of(&ns.client, ns), vm["metadata"]["name"].as_str().unwrap(), &vm["status"]).await;
    }
}

/// A volume of that claim, which the volume controller binds to it.
async fn create_volume(ns: &ManagedNamespace, claim: &Value) {
    let namespace = ns.namespace.name();
    let name = format!("{namespace}-{}", claim["metadata"]["name"].as_str().unwrap());
    let spec = &claim["spec"];
    let volume = json!({
        "apiVersion": "v1", "kind": "PersistentVolume", "metadata": { "name": name },
        "spec": {
            "capacity": spec["resources"]["requests"], "accessModes": spec["accessModes"], "volumeMode": spec["volumeMode"],
            "storageClassName": spec["storageClassName"], "persistentVolumeReclaimPolicy": "Retain",
            "claimRef": { "namespace": namespace, "name": claim["metadata"]["name"] },
            "csi": { "driver": "test.example.org", "volumeHandle": name },
        },
    });
    let volumes: Api<PersistentVolume> = Api::all(ns.client.clone());
    volumes.create(&PostParams::default(), &serde_json::from_value(volume).unwrap()).await.unwrap();
}

/// Creates a VM under the names of the field managers that it had.
async fn create_vm(ns: &ManagedNamespace, vm: &Value) -> DynamicObject {
    let name = vm["metadata"]["name"].as_str().unwrap();
    let managers: Vec<&Value> = vm["metadata"]["managedFields"].as_array().unwrap().iter().collect();
    let of_spec: Vec<&Value> = managers.into_iter().filter(|entry| entry.get("subresource").is_none()).collect();
    let name_of = |entry: &Value| entry["manager"].as_str().unwrap().to_owned();
    let mut object: DynamicObject = serde_json::from_value(vm.clone()).unwrap();
    object.data.as_object_mut().unwrap().remove("status");
    object.metadata = ObjectMeta { name: Some(name.into()), ..ObjectMeta::default() };
    let state = vm["spec"]["vm"]["state"].clone();
    let vms = vms_of(&ns.client, ns);
    // Who has set the state since.
    let setter = of_spec.iter().skip(1).find(|entry| entry["fieldsV1"]["f:spec"]["f:vm"].get("f:state").is_some());
    if setter.is_some() {
        object.data["spec"]["vm"]["state"] = json!(if state == "Running" { "Stopped" } else { "Running" });
    }
    let created = if of_spec[0]["operation"] == "Apply" {
        vms.patch(name, &PatchParams::apply(&name_of(of_spec[0])), &Patch::Apply(&object)).await
    } else {
        let parameters = PostParams { field_manager: Some(name_of(of_spec[0])), ..PostParams::default() };
        vms.create(&parameters, &object).await
    };
    let created = created.unwrap_or_else(|error| panic!("{name}: {error}"));
    if let Some(setter) = setter {
        let parameters = PatchParams { field_manager: Some(name_of(setter)), ..PatchParams::default() };
        let patch = json!({ "spec": { "vm": { "state": state } } });
        vms.patch(name, &parameters, &Patch::Merge(patch)).await.unwrap();
    }
    created
}

/// The VMs as the API server has them.
fn vms_of(client: &Client, ns: &ManagedNamespace) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("vmoperator.jdrupes.org", "v1", "VirtualMachine");
    let resource = ApiResource::from_gvk_with_plural(&kind, "vms");
    Api::namespaced_with(client.clone(), ns.namespace.name(), &resource)
}

/// Creates an object, with its owner's new UID and its status.
async fn create_object(ns: &ManagedNamespace, object: &Value, vms: &BTreeMap<String, DynamicObject>) {
    let mut object: DynamicObject = serde_json::from_value(object.clone()).unwrap();
    let (types, name) = (object.types.clone().unwrap(), object.name_any());
    for owner in object.metadata.owner_references.iter_mut().flatten() {
        owner.uid = vms[&owner.name].uid().unwrap();
    }
    let is_being_deleted = object.metadata.deletion_timestamp.take().is_some();
    let status = object.data.as_object_mut().unwrap().remove("status");
    if types.kind == "Pod" && object.data["spec"].get("nodeName").is_some() {
        object.data["spec"]["nodeName"] = json!(ns.namespace.name());
    }
    let api = Api::<DynamicObject>::namespaced_with(
        ns.client.clone(),
        ns.namespace.name(),
        &ApiResource::from_gvk(&GroupVersionKind::try_from(&types).unwrap()),
    );
    let is_of_set = object.metadata.owner_references.iter().flatten().any(|owner| owner.kind == "StatefulSet");
    if is_of_set {
        let pods: Api<Pod> = ns.api();
        eventually(&format!("the StatefulSet's Pod {name}"), LIMIT, async || pods.get_opt(&name).await.unwrap()).await;
        ns.bind_pod(&name, ns.namespace.name()).await;
    } else if types.kind == "Secret" {
        let parameters = PostParams { field_manager: Some("Kubernetes Java Client".into()), ..PostParams::default() };
        api.create(&parameters, &object).await.unwrap();
    } else {
        api.patch(&name, &PatchParams::apply(ITS_MANAGER).force(), &Patch::Apply(&object))
            .await
            .unwrap_or_else(|error| panic!("{types:?} {name}: {error}"));
    }
    if let Some(status) = status {
        ns.patch_pod_status(&name, status).await;
    }
    if is_being_deleted {
        ns.api::<Pod>().delete(&name, &DeleteParams::default()).await.unwrap();
    }
}

/// Reports as its runner does: the whole status, whatever is there.
async fn replace_status(vms: &Api<DynamicObject>, name: &str, status: &Value) {
    let patch: json_patch::Patch =
        serde_json::from_value(json!([{ "op": "add", "path": "/status", "value": status }])).unwrap();
    let parameters = PatchParams { field_manager: Some(ITS_MANAGER.into()), ..PatchParams::default() };
    vms.patch_status(name, &parameters, &Patch::Json::<()>(patch)).await.unwrap();
}

/// A file of the project.
fn read(path: &str) -> String {
    std::fs::read_to_string(std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
}

/// Compares a table with that of the page, under a heading.
fn compare(heading: &str, table: &str) {
    let page = read(PAGE);
    let section = page.split_once(&format!("\n## {heading}\n")).map(|(_, rest)| rest).unwrap_or_default();
    let section = section.split("\n## ").next().unwrap_or_default();
    assert!(section.contains(table.trim_end()), "{PAGE} has another table under {heading:?}. What happened:\n{table}");
}

#[tokio::test]
async fn all_vms_of_release_4_are_taken_over() {
    let mut release = documents(include_str!("../predecessor/release-4-vms.yaml"));
    release.extend(documents(include_str!("../predecessor/release-4-objects.yaml")));
    let mut namespace = TakenOver::of("release-4", &release).await;
    let page = read("docs/takeover.md");
    let announced: String = namespace.announced.lines().map(|line| format!("   {line}\n")).collect();
    // The user that a pool logs in stays logged in.
    let pooled = &namespace.of_pool;
    assert!(pooled.contains("+          loggedInUser: alice\n"), "{pooled}");
    assert!(page.contains(&announced), "docs/takeover.md does not have this output:\n{announced}");
    let table = namespace.table().await;
    namespace.way_back(&release).await;
    compare("Release 4", &table);
}

#[tokio::test]
async fn all_vms_of_release_3_3_are_taken_over() {
    // Our definition would not store this VM again; `values` has such VMs.
    let is_stored =
        |object: &Value| object["metadata"]["name"].as_str().is_some_and(|name| !name.contains(BREAKS_A_RULE));
    let release = documents(include_str!("../predecessor/release-3.3.yaml"));
    let release: Vec<Value> = release.into_iter().filter(is_stored).collect();
    let namespace = TakenOver::of("release-3", &release).await;
    compare("Release 3.3", &namespace.table().await);
}
