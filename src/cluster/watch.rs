//! The objects of the machines, as watches tell them.
//!
//! ```text
//!  watch of each kind that the templates make ─▶ trim ─▶ Children ─▶ which machine ─▶ reconcile
//! ```
//!
//! Which kinds there are is not known here: the first rendering that makes a kind starts its watch. Of Pods and claims spec
//! and status are kept, of everything else only the metadata is asked for, so no secret ever comes here.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{StreamExt, TryStreamExt, channel::mpsc};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, TypeMeta},
    core::DynamicResourceScope,
    runtime::{
        WatchStreamExt,
        reflector::ObjectRef,
        watcher::{self, Event},
    },
};
use tokio::sync::watch;
use tracing::{debug, warn};

use super::packed::{Arrived, Meta, Packed, PackedMachine, Place, Shapes, Whole};
use crate::{
    api::VirtualMachine,
    manager::metrics::Metrics,
    observed::Observed,
    render::{ObjectKey, context::selector},
};

/// The objects of all machines of a namespace, or of all namespaces.
pub struct Children {
    client: Client,
    namespace: Option<String>,
    /// Counts what is watched and written.
    pub metrics: Arc<Metrics>,
    /// By the machine's namespace and name; a machine has so few that they are looked through.
    objects: Mutex<HashMap<Place, Vec<Packed>>>,
    /// Field sets of all of them.
    pub(super) shapes: Shapes,
    /// UIDs of objects that went last: the answer to a write may come after the watch has told that the object is gone.
    gone: Mutex<VecDeque<Box<str>>>,
    kinds: Mutex<HashMap<TypeMeta, watch::Receiver<State>>>,
    trigger: mpsc::UnboundedSender<ObjectRef<PackedMachine>>,
}

/// More deletions than can happen between a request and its answer.
const REMEMBERED: usize = 256;

/// How many objects are listed at once: a page is in memory as a whole, and much larger than what is kept of it.
pub const PAGE: u32 = 100;
/// How many, where only the metadata is asked for.
const META_PAGE: u32 = 500;

/// How far the watch of a kind is.
#[derive(Clone, Debug, PartialEq)]
enum State {
    Listing,
    Complete,
    Failed(String),
}

/// The objects of a kind can't be watched.
#[derive(Debug, thiserror::Error)]
#[error("{kind} objects can't be watched: {message}")]
pub struct WatchError {
    /// The kind.
    pub kind: String,
    /// What the API server says.
    pub message: String,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is kept here is complete after each statement; a panic elsewhere does not make it wrong.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Children {
    /// Nothing is watched yet. The stream tells which machines must be looked at.
    pub fn new(
        client: Client,
        namespace: Option<String>,
        metrics: Arc<Metrics>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<ObjectRef<PackedMachine>>) {
        let (trigger, triggered) = mpsc::unbounded();
        let children = Self {
            client,
            namespace,
            metrics,
            objects: Mutex::default(),
            shapes: Shapes::default(),
            gone: Mutex::default(),
            kinds: Mutex::default(),
            trigger,
        };
        (Arc::new(children), triggered)
    }

    /// What there is of a machine.
    pub fn observe(&self, vm: &VirtualMachine, now: Timestamp) -> Observed {
        let place = (vm.namespace().unwrap_or_default().into(), vm.name_any().into());
        let objects = lock(&self.objects)
            .get(&place)
            .map(|objects| objects.iter().map(|object| Arc::new(object.unpack())).collect());
        Observed { objects: objects.unwrap_or_default(), now }
    }

    /// How many kinds are known completely. What was observed when there were fewer may lack objects that exist.
    pub fn complete(&self) -> usize {
        lock(&self.kinds).values().filter(|state| *state.borrow() == State::Complete).count()
    }

    /// Begins to watch these kinds, because they will be needed.
    pub fn expect(self: &Arc<Self>, kinds: impl IntoIterator<Item = TypeMeta>) {
        let mut watched = lock(&self.kinds);
        for kind in kinds {
            self.state_of(&mut watched, kind);
        }
    }

    /// How far the watch of a kind is, which begins here if there is none.
    fn state_of<'a>(
        self: &Arc<Self>,
        watched: &'a mut HashMap<TypeMeta, watch::Receiver<State>>,
        kind: TypeMeta,
    ) -> &'a watch::Receiver<State> {
        watched.entry(kind.clone()).or_insert_with(|| self.start(kind))
    }

    /// Makes sure that these kinds are watched and known completely.
    ///
    /// # Errors
    /// If the API server refuses the watch of a kind, for want of a right or because it has no such kind. The watch goes on
    /// trying.
    pub async fn watch(self: &Arc<Self>, kinds: impl IntoIterator<Item = TypeMeta>) -> Result<(), WatchError> {
        let mut pending = Vec::new();
        {
            let mut watched = lock(&self.kinds);
            for kind in kinds {
                let state = self.state_of(&mut watched, kind.clone());
                if *state.borrow() != State::Complete {
                    pending.push((kind, state.clone()));
                }
            }
        }
        for (kind, mut state) in pending {
            let state = state.wait_for(|state| *state != State::Listing).await.map(|state| state.clone());
            if let Ok(State::Failed(message)) = state {
                return Err(WatchError { kind: kind.kind, message });
            }
        }
        Ok(())
    }

    /// Takes in what the API server answered to a write, so that the next decision does not wait for the watch to tell it.
    pub(super) fn insert(&self, Arrived { vm, object }: Arrived) {
        let Some(vm) = vm else { return };
        let mut objects = lock(&self.objects);
        if lock(&self.gone).contains(&object.uid) {
            return;
        }
        let objects = objects.entry(vm).or_default();
        if find(objects, &object.key).is_none_or(|known| known.uid != object.uid || known.version <= object.version) {
            put(objects, object);
        }
    }

    /// Starts the watch of a kind.
    fn start(self: &Arc<Self>, kind: TypeMeta) -> watch::Receiver<State> {
        let (sender, receiver) = watch::channel(State::Listing);
        let resource = super::resource(&kind);
        let config = watcher::Config::default().labels(&selector());
        let children = self.clone();
        let key = |name: &str| ObjectKey {
            api_version: kind.api_version.clone(),
            kind: kind.kind.clone(),
            name: name.into(),
        };
        // Only these are looked into.
        let whole = key("").is_pod() || key("").is_claim();
        let (of, packer) = (kind.clone(), self.clone());
        let stream = if whole {
            let api: Api<Whole> = api(&self.client, self.namespace.as_deref(), &resource);
            let pack = move |object: Whole| object.pack(&of, &packer.shapes);
            watcher(api, config.page_size(PAGE)).map_ok(move |event| event_map(event, &pack)).boxed()
        } else {
            let api: Api<Meta> = api(&self.client, self.namespace.as_deref(), &resource);
            let pack = move |object: Meta| object.pack(&of, &packer.shapes);
            watcher(api, config.page_size(META_PAGE)).map_ok(move |event| event_map(event, &pack)).boxed()
        };
        tokio::spawn(async move {
            let mut stream = std::pin::pin!(stream.default_backoff());
            let mut listed = HashSet::new();
            while let Some(event) = stream.next().await {
                match event {
                    Ok(event) => {
                        if children.take(&kind, event, &mut listed) {
                            sender.send_replace(State::Complete);
                        }
                    }
                    Err(error) => {
                        warn!(kind = kind.kind, error = %Chain(&error), "the watch was cut");
                        children.metrics.watch_cut(&kind.kind);
                        // A watch that once was complete goes on from where it was.
                        sender.send_if_modified(|state| {
                            let failed = *state != State::Complete;
                            if failed {
                                *state = State::Failed(Chain(&error).to_string());
                            }
                            failed
                        });
                    }
                }
            }
        });
        receiver
    }

    /// Takes in what a watch tells. Returns whether the list of the kind is complete now.
    fn take(&self, kind: &TypeMeta, event: Event<Arrived>, listed: &mut HashSet<Box<str>>) -> bool {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(arrived) => {
                listed.insert(arrived.object.uid.clone());
                self.update(arrived);
            }
            Event::InitDone => {
                let listed = std::mem::take(listed);
                let gone: Vec<(Place, Box<str>)> = lock(&self.objects)
                    .iter()
                    .flat_map(|(vm, objects)| objects.iter().map(move |known| (vm, known)))
                    .filter(|(_, known)| is_of(&known.key, kind) && !listed.contains(&known.uid))
                    .map(|(vm, known)| (vm.clone(), known.uid.clone()))
                    .collect();
                gone.into_iter().for_each(|(vm, uid)| self.remove(&vm, uid));
                return true;
            }
            Event::Apply(arrived) => self.update(arrived),
            Event::Delete(arrived) => {
                if let Some(vm) = &arrived.vm {
                    self.remove(vm, arrived.object.uid);
                }
            }
        }
        false
    }

    fn update(&self, Arrived { vm, object }: Arrived) {
        let Some(vm) = vm else { return };
        {
            let mut objects = lock(&self.objects);
            let objects = objects.entry(vm.clone()).or_default();
            let known = find(objects, &object.key);
            // What we wrote ourselves is known already, perhaps even newer.
            if known.is_some_and(|known| known.uid == object.uid && known.version >= object.version) {
                return;
            }
            let same = known.is_some_and(|known| known.is_same(&object));
            put(objects, object);
            if same {
                return;
            }
        }
        self.wake(&vm);
    }

    fn remove(&self, vm: &Place, uid: Box<str>) {
        {
            let mut objects = lock(&self.objects);
            let mut gone = lock(&self.gone);
            gone.truncate(REMEMBERED - 1);
            gone.push_front(uid.clone());
            let Some(of_vm) = objects.get_mut(vm) else { return };
            // One of the same name that was made since stays.
            let Some(index) = of_vm.iter().position(|known| known.uid == uid) else { return };
            of_vm.swap_remove(index);
            if of_vm.is_empty() {
                objects.remove(vm);
            }
        }
        self.wake(vm);
    }

    fn wake(&self, (namespace, vm): &Place) {
        debug!(vm, namespace, "an object changed");
        // Nobody listens any more when the manager ends.
        let _ = self.trigger.unbounded_send(ObjectRef::new(vm).within(namespace));
    }
}

fn api<K>(client: &Client, namespace: Option<&str>, resource: &ApiResource) -> Api<K>
where
    K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
{
    match namespace {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, resource),
        None => Api::all_with(client.clone(), resource),
    }
}

fn is_of(key: &ObjectKey, kind: &TypeMeta) -> bool {
    key.kind == kind.kind && key.api_version == kind.api_version
}

fn find<'a>(objects: &'a [Packed], key: &ObjectKey) -> Option<&'a Packed> {
    objects.iter().find(|object| object.key == *key)
}

fn put(objects: &mut Vec<Packed>, object: Packed) {
    match objects.iter_mut().find(|known| known.key == object.key) {
        Some(known) => *known = object,
        None => objects.push(object),
    }
}

fn watcher<K>(api: Api<K>, config: watcher::Config) -> impl futures::Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    kube::runtime::watcher(api, config)
}

/// The same event of something else.
fn event_map<A, B>(event: Event<A>, map: impl Fn(A) -> B) -> Event<B> {
    match event {
        Event::Apply(object) => Event::Apply(map(object)),
        Event::Delete(object) => Event::Delete(map(object)),
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(map(object)),
        Event::InitDone => Event::InitDone,
    }
}

/// An error with its causes, on one line.
pub struct Chain<'a>(pub &'a (dyn std::error::Error + 'static));

impl std::fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)?;
        let mut shown = self.0.to_string();
        let mut source = self.0.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Some errors of libraries repeat their cause.
            if !shown.contains(&text) {
                write!(f, ": {text}")?;
            }
            shown = text;
            source = cause.source();
        }
        Ok(())
    }
}
