//! Reads what could show why a VM does not start: [`crate::explain::surroundings`] says what that is.
//!
//! Nothing here is needed to run VMs. What can't be read is not known, and the message of Ready then says less.

use std::{
    fmt::Debug,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{
    future::{join_all, try_join_all},
    join,
};
use k8s_openapi::{
    api::{
        core::v1::{Container, Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, PodSpec},
        storage::v1::StorageClass,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, Resource, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;
use tokio::sync::Mutex;
use tracing::debug;

use crate::{
    cluster::Cluster,
    explain::{Facts, neighbours::Neighbours, surroundings::Wanted},
    process::ErrorChain,
};

/// How long a list of the whole cluster is used for other VMs: many may be stuck at once.
const FRESH: Duration = Duration::from_secs(3);
/// How many objects are read at once.
const CHUNK: u32 = 500;

/// What is read of the cluster.
pub struct Surroundings {
    cluster: Cluster,
    nodes: Shared<Node>,
    classes: Shared<StorageClass>,
    /// Held while Pods are read, because there may be many.
    of_pods: Mutex<()>,
}

impl Surroundings {
    /// Nothing is read yet.
    pub fn new(cluster: Cluster) -> Self {
        Self { cluster, nodes: Shared::default(), classes: Shared::default(), of_pods: Mutex::default() }
    }

    /// Adds what could show a cause. `has_maker`: the templates put a controller between the VM and its Pod.
    pub async fn add(&self, mut facts: Facts, has_maker: bool) -> Facts {
        let client = &self.cluster.client;
        let namespace = facts.vm.namespace().unwrap_or_default();
        let Wanted { nodes, node, neighbours, classes, volumes, claims, namespace: wants_namespace } = facts.wanted();
        let (all, one, neighbours, classes, volumes, absent, found) = join!(
            async { if nodes { self.nodes.get(&self.cluster, trimmed).await } else { None } },
            async { self.node(node?.as_str()).await },
            async { if neighbours { self.neighbours(&namespace).await } else { None } },
            async { if classes { self.classes.get(&self.cluster, |class| class).await } else { None } },
            self.volumes(&volumes),
            self.absent(&namespace, &claims),
            async {
                let api = Api::<Namespace>::all(client.clone());
                if wants_namespace { self.read(api.get(&namespace)).await } else { None }
            },
        );
        (facts.nodes, facts.neighbours) = (all.or(one), neighbours);
        facts.classes = classes.map(|classes| classes.to_vec());
        (facts.volumes, facts.absent_claims, facts.namespace) = (volumes, absent, found);
        let events = Api::<Event>::namespaced(client.clone(), &namespace);
        let of = facts.wanted_events(has_maker);
        let of = of.iter().map(|name| ListParams::default().fields(&format!("involvedObject.name={name}")));
        let read = join_all(of.map(|parameters| self.read(all_of(&events, parameters, |event| event)))).await;
        facts.events = read.into_iter().flatten().flatten().collect();
        facts
    }

    /// The node of a Pod, or none if it does not exist.
    async fn node(&self, name: &str) -> Option<Arc<[Node]>> {
        let node = self.read(Api::<Node>::all(self.cluster.client.clone()).get_opt(name)).await?;
        Some(node.into_iter().collect())
    }

    /// The Pods of the namespace that have a node. Who reads the VM need not know of those in other namespaces.
    async fn neighbours(&self, namespace: &str) -> Option<Neighbours> {
        let _one_at_a_time = self.of_pods.lock().await;
        let with_node = ListParams::default().fields("spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed");
        let api = Api::namespaced(self.cluster.client.clone(), namespace);
        Some(Neighbours::new(self.read(all_of(&api, with_node, reduced)).await?, false))
    }

    async fn volumes(&self, names: &[String]) -> Option<Vec<PersistentVolume>> {
        if names.is_empty() {
            return None;
        }
        let api = Api::<PersistentVolume>::all(self.cluster.client.clone());
        let found = self.read(try_join_all(names.iter().map(|name| api.get_opt(name)))).await?;
        Some(found.into_iter().flatten().collect())
    }

    /// Those claims that do not exist.
    async fn absent(&self, namespace: &str, names: &[String]) -> Vec<String> {
        let api = Api::<PersistentVolumeClaim>::namespaced(self.cluster.client.clone(), namespace);
        let found = join_all(names.iter().map(|name| self.read(api.get_metadata_opt(name)))).await;
        let absent = names.iter().zip(found).filter(|(_, found)| matches!(found, Some(None)));
        absent.map(|(name, _)| name.clone()).collect()
    }

    async fn read<T>(&self, request: impl Future<Output = kube::Result<T>>) -> Option<T> {
        known(self.cluster.ask(request).await)
    }
}

fn known<T>(result: kube::Result<T>) -> Option<T> {
    result
        .inspect_err(|error| debug!(error = %ErrorChain(error), "what may show why a VM does not start can't be read"))
        .ok()
}

/// A list of the whole cluster that VMs share.
struct Shared<R>(Mutex<Option<List<R>>>);

/// What was read, and when.
struct List<R> {
    read: Instant,
    /// `None`: that failed.
    items: Option<Arc<[R]>>,
}

impl<R> Default for Shared<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<R> Shared<R>
where
    R: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    async fn get(&self, cluster: &Cluster, trim: fn(R) -> R) -> Option<Arc<[R]>> {
        let mut list = self.0.lock().await;
        if let Some(List { read, items }) = &*list
            && read.elapsed() < FRESH
        {
            return items.clone();
        }
        let api = Api::all(cluster.client.clone());
        let items = known(cluster.ask(all_of(&api, ListParams::default(), trim)).await).map(Arc::from);
        *list = Some(List { read: Instant::now(), items: items.clone() });
        items
    }
}

/// All objects of a list, in chunks, each without what is of no use.
async fn all_of<R>(api: &Api<R>, parameters: ListParams, trim: fn(R) -> R) -> kube::Result<Vec<R>>
where
    R: Clone + DeserializeOwned + Debug,
{
    let (mut parameters, mut all) = (parameters.limit(CHUNK), Vec::new());
    loop {
        let list = api.list(&parameters).await?;
        all.extend(list.items.into_iter().map(trim));
        match list.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(all),
        }
    }
}

/// A node without what is large and of no use here.
fn trimmed(mut node: Node) -> Node {
    node.metadata.managed_fields = None;
    if let Some(status) = &mut node.status {
        status.images = None;
    }
    node
}

/// A Pod with what others of its node can collide with.
fn reduced(pod: Pod) -> Pod {
    let ObjectMeta { name, namespace, labels, annotations, deletion_timestamp, .. } = pod.metadata;
    let spec = pod.spec.map(|spec| {
        let ports_alone = |container: Container| Container {
            name: container.name,
            ports: container.ports,
            restart_policy: container.restart_policy,
            ..Container::default()
        };
        PodSpec {
            node_name: spec.node_name,
            host_network: spec.host_network,
            affinity: spec.affinity,
            containers: spec.containers.into_iter().map(ports_alone).collect(),
            init_containers: spec.init_containers.map(|all| all.into_iter().map(ports_alone).collect()),
            ..PodSpec::default()
        }
    });
    let metadata = ObjectMeta { name, namespace, labels, annotations, deletion_timestamp, ..ObjectMeta::default() };
    Pod { metadata, spec, status: None }
}
