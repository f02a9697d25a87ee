//! Reads what could show why a VM does not start: [`crate::explain::surroundings`] says what that is.
//!
//! Nothing here is needed to run VMs. What may not be read is not known, and the message of Ready then says less. What could not be read in time, or
//! because the API server is busy, changes nothing: the message stays as it is.

use std::{collections::HashMap, fmt::Debug, sync::Arc, time::Duration};

use futures::{
    FutureExt,
    future::{BoxFuture, OptionFuture, try_join_all},
    try_join,
};
use k8s_openapi::api::{
    core::v1::{Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod},
    storage::v1::StorageClass,
};
use kube::{Api, Resource, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;
use tokio::{
    sync::Mutex,
    time::{sleep, timeout},
};
use tracing::debug;

use crate::{
    cluster::Cluster,
    explain::{Facts, neighbours::Neighbours, surroundings::Reads},
    process::ErrorChain,
};

/// How long a list is used for other VMs: many may be stuck at once.
const FRESH: Duration = Duration::from_secs(3);
/// How long the VM's reconcile waits for what is read.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many objects are read at once.
const CHUNK: u32 = 500;

/// Something could not be read, and it may be readable later.
#[derive(Clone, Copy, Debug)]
pub struct Unread;

/// What is read of the cluster.
pub struct Surroundings {
    cluster: Cluster,
    nodes: Shared<Node>,
    classes: Shared<StorageClass>,
    pods: Shared<Pod>,
}

impl Surroundings {
    /// Nothing is read yet.
    pub fn new(cluster: Cluster) -> Self {
        Self { cluster, nodes: Shared::default(), classes: Shared::default(), pods: Shared::default() }
    }

    /// Adds what could show a cause. `has_maker`: the templates put a controller between the VM and its Pod.
    ///
    /// # Errors
    /// If something can't be read now.
    pub async fn add(&self, facts: Facts, has_maker: bool) -> Result<Facts, Unread> {
        timeout(PATIENCE, self.read_all(facts, has_maker).boxed()).await.map_err(|_| {
            debug!("what may show why the VM does not start could not be read in time");
            Unread
        })?
    }

    async fn read_all(&self, mut facts: Facts, has_maker: bool) -> Result<Facts, Unread> {
        let client = &self.cluster.client;
        let place = facts.vm.namespace().unwrap_or_default();
        let Reads { nodes, node, neighbours, classes, volumes, claims, namespace } = facts.reads();
        let (all, one, neighbours, classes, volumes, absent, namespace) = try_join!(
            given(nodes.then(|| self.of_cluster(&self.nodes, trimmed))),
            given(node.map(|node| self.node(node))),
            given(neighbours.then(|| self.neighbours(&place))),
            given(classes.then(|| self.of_cluster(&self.classes, |class| class))),
            given((!volumes.is_empty()).then(|| self.volumes(&volumes))),
            self.absent(&place, &claims),
            given(namespace.then(|| self.namespace(&place))),
        )?;
        facts.nodes = all.or(one);
        facts.classes = classes.map(|classes| classes.to_vec());
        (facts.neighbours, facts.volumes, facts.absent_claims, facts.namespace) =
            (neighbours, volumes, absent, namespace);
        let events = Api::<Event>::namespaced(client.clone(), &place);
        let of = facts.events_to_read(has_maker);
        let of = of.iter().map(|name| ListParams::default().fields(&format!("involvedObject.name={name}")));
        let read = try_join_all(of.map(|parameters| self.read(all_of(&events, parameters, |event| event)))).await?;
        facts.events = read.into_iter().flatten().flatten().collect();
        Ok(facts)
    }

    /// All objects of a kind that belongs to no namespace.
    async fn of_cluster<R>(&self, shared: &Shared<R>, trim: fn(R) -> R) -> Result<List<R>, Unread>
    where
        R: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let api = Api::all(self.cluster.client.clone());
        shared.get("", self.read(all_of(&api, ListParams::default(), trim))).await
    }

    /// The Pods of the namespace that have a node. Who reads the VM need not know of those in other namespaces.
    async fn neighbours(&self, namespace: &str) -> Result<Option<Neighbours>, Unread> {
        let api = Api::namespaced(self.cluster.client.clone(), namespace);
        let with_node = ListParams::default().fields(Neighbours::field_selector());
        let pods = self.pods.get(namespace, self.read(all_of(&api, with_node, Neighbours::reduced))).await?;
        Ok(pods.map(|pods| Neighbours::shared(pods, false)))
    }

    /// The node of a Pod, or none if it does not exist.
    async fn node(&self, name: String) -> Result<List<Node>, Unread> {
        let api = Api::<Node>::all(self.cluster.client.clone());
        let node = self.read(api.get_opt(&name)).await?;
        Ok(node.map(|node| node.into_iter().collect()))
    }

    async fn namespace(&self, name: &str) -> Result<Option<Namespace>, Unread> {
        self.read(Api::<Namespace>::all(self.cluster.client.clone()).get(name)).await
    }

    async fn volumes(&self, names: &[String]) -> Result<Option<Vec<PersistentVolume>>, Unread> {
        let api = Api::<PersistentVolume>::all(self.cluster.client.clone());
        let found = self.read(try_join_all(names.iter().map(|name| api.get_opt(name)))).await?;
        Ok(found.map(|found| found.into_iter().flatten().collect()))
    }

    /// Those claims that do not exist.
    async fn absent(&self, namespace: &str, names: &[String]) -> Result<Vec<String>, Unread> {
        let api = Api::<PersistentVolumeClaim>::namespaced(self.cluster.client.clone(), namespace);
        let found = try_join_all(names.iter().map(|name| self.read(api.get_metadata_opt(name)))).await?;
        let absent = names.iter().zip(found).filter(|(_, found)| matches!(found, Some(None)));
        Ok(absent.map(|(name, _)| name.clone()).collect())
    }

    /// The answer; `None` if the manager may not know it. Boxed, because requests are large, and each reconcile would have room for all of them.
    fn read<'a, T: Send + 'a>(
        &'a self,
        request: impl Future<Output = kube::Result<T>> + Send + 'a,
    ) -> BoxFuture<'a, Result<Option<T>, Unread>> {
        let answer = async {
            let error = match self.cluster.ask(request).await {
                Ok(answer) => return Ok(Some(answer)),
                Err(error) => error,
            };
            debug!(error = %ErrorChain(&error), "what may show why a VM does not start can't be read");
            match error {
                kube::Error::Api(answer) if [403, 404].contains(&answer.code) => Ok(None),
                _ => Err(Unread),
            }
        };
        answer.boxed()
    }
}

/// What is read if it is wanted.
async fn given<T>(read: Option<impl Future<Output = Result<Option<T>, Unread>>>) -> Result<Option<T>, Unread> {
    OptionFuture::from(read).await.transpose().map(Option::flatten)
}

/// A list; `None` if the manager may not know it.
type List<R> = Option<Arc<[R]>>;

/// Lists that VMs share, by namespace. They are dropped when they are not fresh any more.
struct Shared<R>(Arc<Mutex<HashMap<String, List<R>>>>);

impl<R> Default for Shared<R> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<R: Send + Sync + 'static> Shared<R> {
    /// The list of a namespace (`""`: of the cluster), which `read` reads if nobody has.
    async fn get(
        &self,
        namespace: &str,
        read: impl Future<Output = Result<Option<Vec<R>>, Unread>>,
    ) -> Result<List<R>, Unread> {
        // Who comes meanwhile waits for the same list.
        let mut lists = self.0.lock().await;
        if let Some(list) = lists.get(namespace) {
            return Ok(list.clone());
        }
        let list = read.await?.map(Arc::from);
        lists.insert(namespace.to_owned(), list.clone());
        let (lists, namespace) = (Arc::downgrade(&self.0), namespace.to_owned());
        tokio::spawn(async move {
            sleep(FRESH).await;
            if let Some(lists) = lists.upgrade() {
                lists.lock().await.remove(&namespace);
            }
        });
        Ok(list)
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
