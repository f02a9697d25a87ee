//! A pretended scheduler, and the pretended kubelets, runners and storage of all nodes.
//!
//! ```text
//!  watch of the Pods   ─▶ a new Pod: a node, Running, the runner's report; a Pod that is being deleted: gone
//!  watch of the claims ─▶ a new claim: Bound; a claim that is being deleted: gone
//! ```
//!
//! Each Pod is played as quickly as the API server allows, so what is measured is the manager. The first Pods are all on the first node, and the
//! others take turns on the rest.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use futures::StreamExt;
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{Event, PersistentVolumeClaim, Pod};
use k8s_openapi::api::storage::v1::StorageClass;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::core::PartialObjectMeta;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource, ResourceExt};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use vm_operator::api::VmReport;

use super::nodes;
use super::ours::Ours;

/// How many objects are played at once.
const CONCURRENCY: usize = 16;
/// How many Pods the first node takes.
const ON_FIRST: usize = 50;
/// For how long a runner tries to report: the manager creates the report after the Pod.
const PATIENCE: Duration = Duration::from_secs(120);

/// What becomes of new Pods and claims.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// They run, on storage that is there.
    Run,
    /// The scheduler finds no node with enough memory.
    NoNode,
    /// Nobody makes volumes for their claims, so the scheduler refuses them.
    NoVolume,
    /// There is no scheduler.
    NoScheduler,
}

/// Creates the class of storage that claims get which name none.
pub async fn create_class(client: &Client) -> Result<()> {
    let class = serde_json::from_value(json!({
        "metadata": { "name": "standard", "annotations": { "storageclass.kubernetes.io/is-default-class": "true" } },
        "provisioner": "example.org/pretended", "volumeBindingMode": "Immediate",
    }))
    .context("a storage class")?;
    let api: Api<StorageClass> = Api::all(client.clone());
    api.create(&PostParams::default(), &class).await.context("creating a storage class").map(drop)
}

/// The Pods of a namespace on pretended nodes. It ends when this is dropped.
pub struct Fleet {
    cluster: Arc<Played>,
    tasks: Vec<JoinHandle<()>>,
}

struct Played {
    client: Client,
    namespace: String,
    nodes: usize,
    fate: Fate,
    ours: Ours,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The Pods that were played, by UID, each with its name and its node.
    pods: HashMap<String, (String, usize)>,
    /// How many there ever were.
    placed: usize,
    /// The nodes that answer no more.
    lost: HashSet<usize>,
    /// The claims that were played, by UID.
    claims: HashSet<String>,
    /// Why the first request failed that did.
    failed: Option<String>,
}

impl Fleet {
    /// Begins to play.
    pub fn start(client: &Client, namespace: &str, nodes: usize, fate: Fate, ours: &Ours) -> Self {
        let cluster = Arc::new(Played {
            client: client.clone(),
            namespace: namespace.to_owned(),
            nodes,
            fate,
            ours: ours.clone(),
            state: Mutex::default(),
        });
        let pods = cluster.clone().follow::<Pod, _>(Played::play_pod);
        let claims = cluster.clone().follow::<PersistentVolumeClaim, _>(Played::play_claim);
        Self { tasks: vec![tokio::spawn(pods), tokio::spawn(claims)], cluster }
    }

    /// The first error, if something could not be played.
    pub fn check(&self) -> Result<()> {
        match self.cluster.state().failed.clone() {
            Some(why) => Err(anyhow::anyhow!(why).context("playing the nodes")),
            None => Ok(()),
        }
    }

    /// A node answers no more: its Pods are as its kubelet reported them last, but for the condition Ready. Returns the names of the Pods.
    pub async fn lose(&self, node: usize) -> Result<Vec<String>> {
        self.cluster.state().lost.insert(node);
        nodes::lose(&self.cluster.client, &nodes::name(node)).await?;
        let names = self.on(node);
        let status = json!({ "status": { "conditions": [condition("Ready", "False", "NodeNotReady")] } });
        for name in &names {
            self.cluster.patch_pod(name, &status).await?;
        }
        Ok(names)
    }

    /// A person says that a lost node is down: the cluster removes its Pods.
    pub async fn give_up(&self, node: usize) -> Result<()> {
        self.cluster.ours.add("PATCH nodes", 1);
        nodes::taint(&self.cluster.client, &nodes::name(node)).await?;
        for name in self.on(node) {
            self.cluster.remove_pod(&name, None).await?;
        }
        Ok(())
    }

    fn on(&self, node: usize) -> Vec<String> {
        let state = self.cluster.state();
        state.pods.values().filter(|(_, on)| *on == node).map(|(name, _)| name.clone()).collect()
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl Played {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Plays every object of a kind that is new or being deleted.
    async fn follow<K, F>(self: Arc<Self>, play: fn(Arc<Self>, PartialObjectMeta<K>) -> F)
    where
        K: Resource<Scope = NamespaceResourceScope, DynamicType = ()> + Clone + std::fmt::Debug,
        K: serde::de::DeserializeOwned + Send + Sync + 'static,
        F: Future<Output = Result<()>> + Send,
    {
        let api: Api<PartialObjectMeta<K>> = Api::namespaced(self.client.clone(), &self.namespace);
        let objects = watcher(api, watcher::Config::default()).default_backoff().touched_objects();
        let played = objects.for_each_concurrent(CONCURRENCY, |object| {
            let this = self.clone();
            async move {
                let Ok(object) = object else { return };
                if let Err(error) = play(this.clone(), object).await {
                    this.state().failed.get_or_insert(format!("{error:#}"));
                }
            }
        });
        played.await;
    }

    async fn play_claim(self: Arc<Self>, claim: PartialObjectMeta<PersistentVolumeClaim>) -> Result<()> {
        let claims: Api<PersistentVolumeClaim> = Api::namespaced(self.client.clone(), &self.namespace);
        let uid = claim.uid().unwrap_or_default();
        if claim.metadata.deletion_timestamp.is_some() {
            self.state().claims.remove(&uid);
            // Nobody uses it any more, says the controller that protects claims.
            let unused = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
            self.ours.add("PATCH persistentvolumeclaims", 1);
            return is_there(claims.patch_metadata(&claim.name_any(), &PatchParams::default(), &unused).await)
                .with_context(|| format!("releasing {}", claim.name_any()))
                .map(drop);
        }
        if !self.state().claims.insert(uid.clone()) {
            return Ok(());
        }
        if self.fate == Fate::NoVolume {
            let about = json!({ "kind": "PersistentVolumeClaim", "namespace": self.namespace, "name": claim.name_any(), "uid": uid });
            return self.warn(&about, "ProvisioningFailed", "the storage is full").await;
        }
        self.ours.add("PATCH persistentvolumeclaims/status", 1);
        let bound = Patch::Merge(json!({ "status": { "phase": "Bound" } }));
        is_there(claims.patch_status(&claim.name_any(), &PatchParams::default(), &bound).await)
            .with_context(|| format!("binding {}", claim.name_any()))
            .map(drop)
    }

    async fn play_pod(self: Arc<Self>, pod: PartialObjectMeta<Pod>) -> Result<()> {
        let (name, uid) = (pod.name_any(), pod.uid().unwrap_or_default());
        if pod.metadata.deletion_timestamp.is_some() {
            let node = self.state().pods.get(&uid).map(|(_, node)| *node);
            // A lost node removes nothing.
            if node.is_some_and(|node| self.state().lost.contains(&node)) {
                return Ok(());
            }
            return self.remove_pod(&name, Some(uid)).await;
        }
        let Some(node) = self.place(&name, &uid) else { return Ok(()) };
        match self.fate {
            Fate::Run => self.run(&name, &uid, node).await,
            Fate::NoNode => self.refuse(&name, &uid, &format!("{} Insufficient memory", self.nodes)).await,
            Fate::NoVolume => self.refuse(&name, &uid, "pod has unbound immediate PersistentVolumeClaims").await,
            Fate::NoScheduler => Ok(()),
        }
    }

    /// The node of a new Pod; `None` if it was played already.
    fn place(&self, name: &str, uid: &str) -> Option<usize> {
        let mut state = self.state();
        if state.pods.contains_key(uid) {
            return None;
        }
        let (number, rest) = (state.placed, self.nodes.saturating_sub(1).max(1));
        let on_first = number < ON_FIRST && !state.lost.contains(&0);
        let node = if on_first { 0 } else { 1 + number % rest };
        state.placed += 1;
        state.pods.insert(uid.to_owned(), (name.to_owned(), node));
        Some(node)
    }

    async fn run(&self, name: &str, uid: &str, node: usize) -> Result<()> {
        let binding = json!({
            "apiVersion": "v1", "kind": "Binding", "metadata": { "name": name, "uid": uid },
            "target": { "apiVersion": "v1", "kind": "Node", "name": nodes::name(node) },
        });
        self.ours.add("POST pods/binding", 1);
        let bound = self.pods().create_subresource::<_, Value>("binding", name, &PostParams::default(), &binding).await;
        if is_there(bound).with_context(|| format!("binding {name}"))?.is_none() {
            return Ok(());
        }
        let now = Timestamp::now().to_string();
        let container = json!({ "name": "vm-runner", "image": "", "imageID": "", "ready": true, "restartCount": 0,
            "state": { "running": { "startedAt": now } } });
        let conditions =
            ["PodScheduled", "Initialized", "ContainersReady", "Ready"].map(|type_| condition(type_, "True", ""));
        let status = json!({ "phase": "Running", "startTime": now, "podIP": "10.0.0.1", "conditions": conditions,
            "containerStatuses": [container] });
        self.patch_pod(name, &json!({ "status": status })).await?;
        self.report(name, uid).await
    }

    /// The runner's report: the guest is up.
    async fn report(&self, name: &str, uid: &str) -> Result<()> {
        let reports: Api<VmReport> = Api::namespaced(self.client.clone(), &self.namespace);
        let conditions = ["Running", "Booted"].map(|type_| condition(type_, "True", "Started"));
        let status = json!({ "cpus": 2, "ram": "4294967296", "conditions": conditions });
        let patch = Patch::Merge(json!({ "status": status }));
        let report = async || {
            self.ours.add("PATCH vmreports/status", 1);
            is_there(reports.patch_status(uid, &PatchParams::default(), &patch).await)
                .with_context(|| format!("reporting {name}"))
        };
        let begin = tokio::time::Instant::now();
        while report().await?.is_none() && begin.elapsed() < PATIENCE && self.state().pods.contains_key(uid) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Ok(())
    }

    /// The scheduler finds no node.
    async fn refuse(&self, name: &str, uid: &str, why: &str) -> Result<()> {
        let message = format!("0/{} nodes are available: {why}.", self.nodes);
        let mut scheduled = condition("PodScheduled", "False", "Unschedulable");
        scheduled["message"] = json!(message);
        self.patch_pod(name, &json!({ "status": { "conditions": [scheduled] } })).await?;
        let pod = json!({ "kind": "Pod", "namespace": self.namespace, "name": name, "uid": uid });
        self.warn(&pod, "FailedScheduling", &message).await
    }

    /// Writes an event about an object, as a component of Kubernetes does.
    async fn warn(&self, about: &Value, reason: &str, message: &str) -> Result<()> {
        let now = Timestamp::now().to_string();
        let event = serde_json::from_value(json!({
            "metadata": { "generateName": "event-", "namespace": self.namespace }, "involvedObject": about, "type": "Warning",
            "reason": reason, "message": message, "firstTimestamp": now, "lastTimestamp": now, "count": 1,
            "source": { "component": "pretended" },
        }))
        .context("an event")?;
        let events: Api<Event> = Api::namespaced(self.client.clone(), &self.namespace);
        self.ours.add("POST events", 1);
        events
            .create(&PostParams::default(), &event)
            .await
            .with_context(|| format!("writing an event {reason}"))
            .map(drop)
    }

    async fn patch_pod(&self, name: &str, status: &Value) -> Result<()> {
        self.ours.add("PATCH pods/status", 1);
        let patched = self.pods().patch_status(name, &PatchParams::default(), &Patch::Strategic(status)).await;
        is_there(patched).with_context(|| format!("reporting Pod {name}")).map(drop)
    }

    /// The Pod's containers have ended. Without a UID it is removed whichever it is.
    async fn remove_pod(&self, name: &str, uid: Option<String>) -> Result<()> {
        if let Some(uid) = &uid {
            self.state().pods.remove(uid);
        } else {
            self.state().pods.retain(|_, (pod, _)| pod != name);
        }
        let preconditions = Some(Preconditions { uid, resource_version: None });
        let at_once = DeleteParams { grace_period_seconds: Some(0), preconditions, ..DeleteParams::default() };
        self.ours.add("DELETE pods", 1);
        is_there(self.pods().delete(name, &at_once).await).with_context(|| format!("removing Pod {name}")).map(drop)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

fn condition(type_: &str, status: &str, reason: &str) -> Value {
    let now = Timestamp::now().to_string();
    json!({ "type": type_, "status": status, "reason": reason, "message": "", "lastTransitionTime": now })
}

/// The answer; `None` if the object is gone, or has been replaced by another one.
fn is_there<T>(answer: kube::Result<T>) -> kube::Result<Option<T>> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(kube::Error::Api(refused)) if matches!(refused.code, 404 | 409) => Ok(None),
        Err(error) => Err(error),
    }
}
