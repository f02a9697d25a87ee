//! Reads what could show why a VM does not start: [`crate::explain::surroundings`] says what that is.
//!
//! Nothing here is needed to run VMs. What may not be read is not known, and the message of Ready then says less. What could not be read in time, or
//! because the API server is busy, changes nothing: the message stays as it is.

use std::{
    collections::HashMap,
    fmt::Debug,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{
    FutureExt,
    future::{BoxFuture, OptionFuture, Shared, try_join_all},
    try_join,
};
use k8s_openapi::api::{
    core::v1::{Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod},
    storage::v1::StorageClass,
};
use kube::{Api, Resource, ResourceExt, api::ListParams};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep, timeout};
use tracing::debug;

use crate::{
    cluster::Cluster,
    explain::{Facts, neighbours::Neighbours, surroundings::Reads},
    process::{ErrorChain, lock},
};

/// How long it is remembered that a list can't be read.
const FAILED: Duration = Duration::from_secs(30);
/// How long the VM's reconcile waits for what is read. A list that takes longer is there at the next look.
const PATIENCE: Duration = Duration::from_secs(2);
/// For how long after its beginning a list is given to those who ask. A new manager looks at all VMs that are stuck: with a list for each, it and
/// the API server would be busy for minutes. What has changed meanwhile shows at the next look.
const FRESH: Duration = Duration::from_millis(500);
/// All events of a namespace but those that are about VMs, which are the manager's own.
const EVENTS: &str = "involvedObject.kind!=VirtualMachine";
/// How many objects are read at once.
const CHUNK: u32 = 500;

/// Something could not be read, and it may be readable later.
#[derive(Clone, Copy, Debug)]
pub struct Unread;

/// What is read of the cluster.
pub struct Surroundings {
    cluster: Cluster,
    nodes: Lists<Node>,
    classes: Lists<StorageClass>,
    pods: Lists<Pod>,
    /// By the name of the object that each is about.
    events: Lists<Event>,
}

impl Surroundings {
    /// Nothing is read yet.
    pub fn new(cluster: Cluster) -> Self {
        Self {
            cluster,
            nodes: Lists::default(),
            classes: Lists::default(),
            pods: Lists::default(),
            events: Lists::default(),
        }
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
        let of = facts.events_to_read(has_maker);
        if !of.is_empty() {
            let all = self.events(&place).await?;
            facts.events =
                of.iter().flat_map(|name| about(all.as_deref().unwrap_or_default(), name)).cloned().collect();
        }
        Ok(facts)
    }

    /// All objects of a kind that belongs to no namespace.
    async fn of_cluster<R>(&self, lists: &Lists<R>, trim: fn(R) -> R) -> Result<List<R>, Unread>
    where
        R: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let api = Api::all(self.cluster.client.clone());
        lists.get("", self.list(api, ListParams::default(), trim)).await
    }

    /// The Pods of the namespace that have a node. Who reads the VM need not know of those in other namespaces.
    async fn neighbours(&self, namespace: &str) -> Result<Option<Neighbours>, Unread> {
        let api = Api::namespaced(self.cluster.client.clone(), namespace);
        let with_node = ListParams::default().fields(Neighbours::field_selector());
        let pods = self.pods.get(namespace, self.list(api, with_node, Neighbours::reduced)).await?;
        Ok(pods.map(|pods| Neighbours::new(pods, false)))
    }

    /// The events of the namespace, by the name of the object that each is about. The API server reads all of them also for those of one object, so
    /// VMs share them.
    async fn events(&self, namespace: &str) -> Result<List<Event>, Unread> {
        let (cluster, api) = (self.cluster.clone(), Api::namespaced(self.cluster.client.clone(), namespace));
        let read = async move {
            let answer = cluster.ask(all_of(&api, ListParams::default().fields(EVENTS), without_fields)).await;
            Ok(known(answer)?.map(|mut events: Vec<Event>| {
                events.sort_by(|one, other| subject(one).cmp(subject(other)));
                Arc::from(events)
            }))
        };
        self.events.get(namespace, read).await
    }

    /// A list that goes on being read when nobody waits for it.
    fn list<R>(
        &self,
        api: Api<R>,
        parameters: ListParams,
        trim: fn(R) -> R,
    ) -> impl Future<Output = Result<List<R>, Unread>> + Send + use<R>
    where
        R: Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    {
        let cluster = self.cluster.clone();
        async move {
            let answer = cluster.ask(all_of(&api, parameters, trim)).await;
            Ok(known(answer)?.map(Arc::from))
        }
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
        async { known(self.cluster.ask(request).await) }.boxed()
    }
}

/// The answer; `None` if the manager may not know it, or can't understand it. The API server may give another one later if it is busy, or does not
/// answer.
fn known<T>(answer: kube::Result<T>) -> Result<Option<T>, Unread> {
    let error = match answer {
        Ok(answer) => return Ok(Some(answer)),
        Err(error) => error,
    };
    debug!(error = %ErrorChain(&error), "what may show why a VM does not start can't be read");
    match error {
        kube::Error::Api(answer) if answer.code != 429 && answer.code < 500 => Ok(None),
        kube::Error::SerdeError(_) => Ok(None),
        _ => Err(Unread),
    }
}

/// What is read if it is wanted.
async fn given<T>(read: Option<impl Future<Output = Result<Option<T>, Unread>>>) -> Result<Option<T>, Unread> {
    OptionFuture::from(read).await.transpose().map(Option::flatten)
}

/// A list; `None` if the manager may not know it.
type List<R> = Option<Arc<[R]>>;

/// A list that is read, or waits until the one before it is read.
type Reading<R> = Shared<BoxFuture<'static, Result<List<R>, Unread>>>;

/// Lists that VMs share, by namespace: many may be stuck at once. Who asks gets one that began at most [`FRESH`] before, because what has changed for one
/// VM is not in an older one. So there is one that is read, and one for all who came meanwhile.
struct Lists<R>(Arc<Mutex<HashMap<String, Queue<R>>>>);

struct Queue<R> {
    /// The newest one.
    newest: Reading<R>,
    /// When it began; `None` while it waits for the one before.
    began: Option<Instant>,
    /// Until when nothing is asked, because that failed.
    paused: Option<Instant>,
}

impl<R> Default for Lists<R> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<R: Send + Sync + 'static> Lists<R> {
    /// The list of a namespace (`""`: of the cluster). It is read to its end whether somebody waits or not.
    fn get(&self, namespace: &str, read: impl Future<Output = Result<List<R>, Unread>> + Send + 'static) -> Reading<R> {
        let mut lists = lock(&self.0);
        let before = lists.get(namespace);
        if let Some(Queue { newest, began, paused }) = before
            && (began.is_none_or(|began| began.elapsed() < FRESH)
                || paused.is_some_and(|paused| Instant::now() < paused))
        {
            return newest.clone();
        }
        let before = before.map(|queue| queue.newest.clone());
        let (weak, key) = (Arc::downgrade(&self.0), namespace.to_owned());
        let newest = async move {
            if let Some(before) = before {
                let _ = before.await;
            }
            if let Some(lists) = weak.upgrade()
                && let Some(queue) = lock(&lists).get_mut(&key)
            {
                queue.began = Some(Instant::now());
            }
            read.await
        };
        let newest = newest.boxed().shared();
        lists.insert(namespace.to_owned(), Queue { newest: newest.clone(), began: None, paused: None });
        let (weak, key, reading) = (Arc::downgrade(&self.0), namespace.to_owned(), newest.clone());
        tokio::spawn(async move {
            let is_read = reading.clone().await.is_ok();
            if is_read {
                sleep(FRESH).await;
            }
            let Some(lists) = weak.upgrade() else { return };
            let mut lists = lock(&lists);
            let Some(queue) = lists.get_mut(&key).filter(|queue| queue.newest.ptr_eq(&reading)) else { return };
            if is_read {
                lists.remove(&key);
            } else {
                queue.paused = Some(Instant::now() + FAILED);
            }
        });
        newest
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

/// An event without what is of no use here.
fn without_fields(mut event: Event) -> Event {
    event.metadata.managed_fields = None;
    event
}

/// The name of the object that an event is about.
fn subject(event: &Event) -> &str {
    event.involved_object.name.as_deref().unwrap_or_default()
}

/// The events about objects of this name, of all that are ordered by it.
fn about<'a>(events: &'a [Event], name: &str) -> &'a [Event] {
    let first = events.partition_point(|event| subject(event) < name);
    let rest = events.get(first..).unwrap_or_default();
    let count = rest.partition_point(|event| subject(event) == name);
    rest.get(..count).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use k8s_openapi::api::core::v1::ObjectReference;

    use super::*;

    /// Lists, and how often one was read. Each takes that long.
    struct Plan {
        lists: Lists<u8>,
        read: Arc<AtomicUsize>,
    }

    impl Plan {
        async fn get(
            &self,
            namespace: &str,
            takes: Duration,
            result: Result<List<u8>, Unread>,
        ) -> Result<List<u8>, Unread> {
            let read = self.read.clone();
            let reading = self.lists.get(namespace, async move {
                read.fetch_add(1, Ordering::Relaxed);
                sleep(takes).await;
                result
            });
            timeout(PATIENCE, reading).await.map_err(|_| Unread)?
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_asks_gets_a_list_that_begins_then_and_all_who_wait_the_same() {
        let plan = Plan { lists: Lists::default(), read: Arc::default() };
        let (start, list, second) = (Instant::now(), || Ok(Some(Arc::from([7_u8]))), Duration::from_secs(1));
        let count = || plan.read.load(Ordering::Relaxed);
        let first = async {
            assert!(plan.get("a", second, list()).await.is_ok());
            assert_eq!((count(), start.elapsed()), (1, second));
        };
        let later = async {
            sleep(second / 2).await;
            let get = || plan.get("a", second / 2, list());
            let (one, other) = futures::join!(get(), get());
            assert_eq!((one.unwrap().as_deref(), other.unwrap().as_deref()), (Some(&[7][..]), Some(&[7][..])));
            assert_eq!((count(), start.elapsed()), (2, 3 * second / 2), "not the one that had begun");
        };
        futures::join!(first, later);
        // One that has just begun is new enough, also when it is read.
        let (before, at_once) = (count(), || plan.get("new", Duration::ZERO, list()));
        for _ in 0..3 {
            assert!(at_once().await.is_ok());
            sleep(FRESH / 4).await;
        }
        assert_eq!(count(), before + 1);
        sleep(FRESH / 4).await;
        assert!(at_once().await.is_ok());
        assert_eq!(count(), before + 2);
        // Another namespace waits for nobody, and a list is read to its end though nobody waits any more.
        assert!(plan.get("slow", 3 * PATIENCE / 2, list()).await.is_err());
        sleep(PATIENCE).await;
        assert_eq!(count(), before + 3);
        assert!(lock(&plan.lists.0).is_empty(), "they are dropped");
    }

    #[test]
    fn the_events_about_a_name_are_found_among_those_of_all() {
        let named = |name: &str, message: &str| Event {
            involved_object: ObjectReference { name: Some(name.into()), ..ObjectReference::default() },
            message: Some(message.into()),
            ..Event::default()
        };
        let events = [named("apple", "1"), named("apple-disk", "2"), named("pear", "3"), named("pear", "4")];
        let found = |name| about(&events, name).iter().filter_map(|event| event.message.as_deref()).collect::<Vec<_>>();
        assert_eq!(found("apple"), ["1"]);
        assert_eq!(found("pear"), ["3", "4"]);
        for absent in ["", "appl", "banana", "zucchini"] {
            assert!(found(absent).is_empty(), "{absent}");
        }
        assert!(about(&[], "apple").is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn what_can_not_be_read_is_not_asked_again_at_once() {
        let plan = Plan { lists: Lists::default(), read: Arc::default() };
        for _ in 0..5 {
            assert!(plan.get("a", Duration::ZERO, Err(Unread)).await.is_err());
            sleep(FAILED / 8).await;
        }
        assert_eq!(plan.read.load(Ordering::Relaxed), 1);
        sleep(FAILED).await;
        assert!(plan.get("a", Duration::ZERO, Ok(None)).await.is_ok_and(|list| list.is_none()), "it may not be known");
    }

    #[test]
    fn what_a_busy_server_says_is_not_what_the_manager_may_not_know() {
        let of =
            |code: u16| known::<()>(Err(kube::Error::Api(kube::core::Status::failure("", "").with_code(code).boxed())));
        for code in [403, 404] {
            assert!(of(code).is_ok_and(|answer| answer.is_none()), "{code}");
        }
        for code in [429, 500, 503] {
            assert!(of(code).is_err(), "{code}");
        }
    }
}
