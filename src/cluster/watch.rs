//! The cache of the VMs' objects.
//!
//! # Flow
//!
//! 1. A reconcile names the kinds of objects that it needs ([`Children::watch`]) and waits until they are listed. Which kinds there
//!    are is not known in advance: the first VM that needs a kind starts its list and watch, for the objects of all VMs.
//! 2. Each object that is listed, or changes, is packed and put in the cache under its VM, which is triggered: its owner, or else the one in its
//!    annotation `vmoperator.jdrupes.org/vm` or label `app.kubernetes.io/instance`. A Pod that names none but mounts a claim is kept, too, and
//!    so is each report, which is found by its name, the UID of its Pod, wherever it is kept.
//! 3. What the API server answers to a write of ours is put in the cache at once.
//! 4. When a list is complete, the objects of its kind that it does not show are removed from the cache.
//!
//! # Guarantees
//!
//! - When [`Children::watch`] returns without an error, the cache has all objects of these kinds, as recent as etcd was when they
//!   were listed, or newer.
//! - A decision never goes by something older than our own last write: what has a lower resourceVersion than the object in the
//!   cache is dropped, and so is an answer about an object whose deletion the watch has already reported.
//! - An object that is created while its kind is listed is not lost. The list may be older than the object, so the API server is
//!   asked for it.
//! - No secret comes here: `spec` and `status` are kept of Pods, claims and reports, of everything else only the metadata is asked for.
//!
//! # Assumptions
//!
//! - The resourceVersions of a kind are numbers that grow
//!   (<https://kubernetes.io/docs/reference/using-api/api-concepts/#resource-versions>).
//! - While a request is under way, no more than 256 objects are deleted.
//!
//! # Caveats
//!
//! - While a watch is interrupted the cache is behind. A write says which UID or resourceVersion it is based on, so the API server
//!   refuses it if that is not true any more.
//! - If somebody deletes an object that we have just made, and its kind is then listed as a whole before our request is answered,
//!   the object stays in the cache until its kind is listed again or a write finds that it is gone.

mod index;
mod users;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use futures::{FutureExt, StreamExt, TryStreamExt, channel::mpsc, future::BoxFuture};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, TypeMeta},
    core::DynamicResourceScope,
    runtime::{
        reflector::{ObjectRef, Store},
        watcher::{self, Event},
    },
};
use tokio::{sync::watch, time::sleep};
use tracing::{debug, warn};

use self::index::{Changes, Index, Known};
use super::{
    list_watch::{self, find_and_watch},
    packed::{Arrived, Meta, Packed, PackedVm, Shapes, VmName, Whole},
};
use crate::{
    api::VirtualMachine,
    claims,
    client::{access::Access, discovery::Resources},
    metrics::Metrics,
    object::{ObjectKey, reports, selector, stateful_sets},
    observed::{Object, Observed},
    process::{ErrorChain, RepeatFilter, lock},
};

/// The objects of the VMs of a namespace, or of all namespaces.
pub struct Children {
    client: Client,
    namespace: Option<String>,
    /// Counts what is watched and written.
    pub metrics: Arc<Metrics>,
    /// The objects. No other lock is taken while this one is held.
    index: Mutex<Index>,
    /// Where the API server serves the kinds.
    pub(super) resources: Resources,
    /// What the manager may do.
    pub(super) access: Access,
    /// The field sets of all objects.
    pub(super) shapes: Shapes,
    kinds: Mutex<HashMap<TypeMeta, watch::Receiver<WatchState>>>,
    /// The VMs: the status of each says which claims it uses, and which Pod is its own.
    vms: OnceLock<Store<PackedVm>>,
    /// Receives the VMs that must be reconciled.
    pub trigger: mpsc::UnboundedSender<ObjectRef<PackedVm>>,
    /// Changes when a kind can be watched that could not be watched before, or the other way round.
    pub recovered: watch::Sender<()>,
}

/// The pause before the API server is asked again whether an object exists.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// How many kinds are watched because a status names them. Rendered kinds are watched in any number, but whoever can write a status
/// must not be able to start any number of watches.
const MAXIMUM_KINDS: usize = 100;

/// A kind of which the objects are not known.
pub struct UnknownKind {
    /// The kind.
    pub kind: TypeMeta,
    /// Whether it is being listed, so that they soon will be.
    pub is_listed: bool,
}

impl From<TypeMeta> for UnknownKind {
    /// A kind that is not listed.
    fn from(kind: TypeMeta) -> Self {
        Self { kind, is_listed: false }
    }
}

/// The state of the watch of a kind.
#[derive(Clone, Debug, PartialEq)]
enum WatchState {
    Listing,
    Complete,
    /// The list was complete, and now the API server refuses the watch. The cache keeps what it has.
    Refused {
        message: String,
    },
    Failed {
        message: String,
        /// Whether the API server does not have the kind, so that there are no such objects.
        is_missing: bool,
    },
}

impl WatchState {
    /// Whether the cache has had all objects of the kind.
    fn is_listed(&self) -> bool {
        matches!(self, Self::Complete | Self::Refused { .. })
    }
}

/// The objects of a kind can't be watched.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{kind} objects can't be watched: {message}")]
pub struct WatchError {
    /// The kind.
    pub kind: String,
    /// What the API server says, or the rule that the manager lacks.
    pub message: String,
    /// Whether the watch worked before: a person has taken something away. Otherwise the API server may not have it yet.
    pub has_worked: bool,
}

impl Children {
    /// Watches nothing yet. The stream has the VMs that must be reconciled.
    pub fn new(
        client: Client,
        namespace: Option<String>,
        metrics: Arc<Metrics>,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<ObjectRef<PackedVm>>) {
        let (trigger, triggered) = mpsc::unbounded();
        let children = Self {
            resources: Resources::new(client.clone()),
            access: Access::new(client.clone()),
            client,
            namespace,
            metrics,
            index: Mutex::default(),
            shapes: Shapes::default(),
            kinds: Mutex::default(),
            vms: OnceLock::new(),
            trigger,
            recovered: watch::Sender::new(()),
        };
        (Arc::new(children), triggered)
    }

    /// The namespace; `None`: all namespaces.
    pub fn namespace(&self) -> Option<&str> {
        self.namespace.as_deref()
    }

    /// Knows the VMs from now on.
    pub fn follow(&self, vms: Store<PackedVm>) {
        let _ = self.vms.set(vms);
    }

    /// The objects of a VM.
    pub fn observe(&self, vm: &VirtualMachine, now: Timestamp) -> Observed {
        let place = place_of(vm);
        let mut found: Vec<Object> = {
            let names: Vec<String> = claims::possible_names(vm).collect();
            let (index, nobody) = (lock(&self.index), nobody(&place.0));
            let of_nobody = index.of(&nobody).iter();
            let of_nobody = of_nobody.filter(|object| object.key.is_claim() && names.contains(&object.key.name));
            index.of(&place).iter().chain(of_nobody).map(Packed::unpack).collect()
        };
        let is_unsure = |object: &Object| object.key.is_pod() && !object.is_given_to(vm);
        found.retain(|object| !is_unsure(object) || self.other_user(vm, &object.uid).is_none());
        found.extend(self.lost_pods(vm, &found));
        found.extend(self.lost_claims(vm, &found));
        found.extend(self.lost_reports(vm, &found));
        let pods: HashSet<String> =
            found.iter().filter(|object| object.key.is_pod()).map(|pod| pod.uid.clone()).collect();
        // What is about a Pod that exists is no matter of a VM that does not have this Pod.
        found.retain(|it| !it.key.is_report() || pods.contains(&it.key.name) || !self.has_object(&it.key.name));
        let claims = found.iter().filter(|object| object.key.is_claim());
        let claimants = claims.filter_map(|claim| Some((claim.uid.clone(), self.claimant(vm, claim)?))).collect();
        Observed { claimants, ..Observed::of(found.into_iter().map(Arc::new).collect(), now) }
    }

    /// Whether a Pod of others, that has not ended, mounts the claim and can write to it.
    pub(super) fn is_in_use(&self, vm: &VirtualMachine, claim: &str) -> bool {
        self.mounting(vm, std::iter::once(claim.to_owned())).iter().any(|pod| !pod.has_ended())
    }

    /// The Pods of others that mount one of these claims of the VM and can write to it.
    pub fn mounting(&self, vm: &VirtualMachine, claims: impl Iterator<Item = String>) -> Vec<Arc<Object>> {
        lock(&self.index).mounting(&place_of(vm), claims).map(|pod| Arc::new(pod.unpack())).collect()
    }

    /// How many kinds are known completely. An observation made when there were fewer may lack objects that exist.
    pub fn complete(&self) -> usize {
        lock(&self.kinds).values().filter(|state| state.borrow().is_listed()).count()
    }

    /// Begins to list and watch these kinds, because they will be needed.
    pub fn begin(self: &Arc<Self>, kinds: impl IntoIterator<Item = TypeMeta>) {
        let mut watched = lock(&self.kinds);
        for kind in kinds {
            self.state_of(&mut watched, kind);
        }
    }

    /// The state of the watch of a kind, which is started if there is none.
    fn state_of<'a>(
        self: &Arc<Self>,
        watched: &'a mut HashMap<TypeMeta, watch::Receiver<WatchState>>,
        kind: TypeMeta,
    ) -> &'a watch::Receiver<WatchState> {
        watched.entry(kind.clone()).or_insert_with(|| self.start(kind))
    }

    /// Whether all objects of this kind are known, as they were when the watch worked last.
    pub fn knows(&self, kind: &TypeMeta) -> bool {
        lock(&self.kinds).get(kind).is_some_and(|state| state.borrow().is_listed())
    }

    /// Begins to list and watch kinds of which there may be objects, up to 100 kinds. With `wait` it waits until they are
    /// listed. Returns the kinds of which the objects are not known.
    pub async fn look_for(self: &Arc<Self>, kinds: Vec<TypeMeta>, wait: bool) -> Vec<UnknownKind> {
        let states: Vec<_> = {
            let mut watched = lock(&self.kinds);
            let mut state = |kind: &TypeMeta| {
                let may_begin = watched.len() < MAXIMUM_KINDS || watched.contains_key(kind);
                may_begin.then(|| self.state_of(&mut watched, kind.clone()).clone())
            };
            kinds.into_iter().map(|kind| (state(&kind), kind)).collect()
        };
        let mut unknown = Vec::new();
        for (state, kind) in states {
            let Some(mut state) = state else {
                unknown.push(kind.into());
                continue;
            };
            if wait {
                let _ = state.wait_for(|state| *state != WatchState::Listing).await;
            }
            match *state.borrow() {
                WatchState::Complete | WatchState::Failed { is_missing: true, .. } => {}
                WatchState::Listing => unknown.push(UnknownKind { kind, is_listed: true }),
                WatchState::Failed { .. } | WatchState::Refused { .. } => unknown.push(kind.into()),
            }
        }
        unknown
    }

    /// Returns when these kinds are watched and known completely.
    ///
    /// # Errors
    /// If the API server refuses the watch of a kind, because the manager lacks the right or the API server lacks the kind. The watch
    /// goes on trying.
    pub async fn watch(self: &Arc<Self>, kinds: impl IntoIterator<Item = TypeMeta>) -> Result<(), WatchError> {
        let mut pending = Vec::new();
        {
            let mut watched = lock(&self.kinds);
            for kind in kinds {
                let state = self.state_of(&mut watched, kind.clone());
                if *state.borrow() != WatchState::Complete {
                    pending.push((kind, state.clone()));
                }
            }
        }
        for (kind, mut state) in pending {
            let state = state.wait_for(|state| *state != WatchState::Listing).await.map(|state| state.clone());
            let (message, has_worked) = match state {
                Ok(WatchState::Failed { message, .. }) => (message, false),
                Ok(WatchState::Refused { message }) => (message, true),
                Ok(WatchState::Listing | WatchState::Complete) | Err(_) => continue,
            };
            return Err(WatchError { kind: kind.kind, message, has_worked });
        }
        Ok(())
    }

    /// Puts the answer to a write in the cache, so that the next decision does not have to wait for the watch.
    pub(super) fn insert(&self, arrived: Arrived) {
        lock(&self.index).answer(arrived);
    }

    /// Whether the cache has an object with that UID.
    pub fn has_object(&self, uid: &str) -> bool {
        lock(&self.index).has(uid)
    }

    /// Starts the watch of a kind.
    fn start(self: &Arc<Self>, kind: TypeMeta) -> watch::Receiver<WatchState> {
        let (sender, receiver) = watch::channel(WatchState::Listing);
        let config = watcher::Config::default();
        let config = if needs_labels(&kind) { config.labels(&selector()) } else { config };
        let children = self.clone();
        let (of, packer) = (kind.clone(), self.clone());
        let stream = if is_whole(&kind) {
            let pack = move |object: Whole| object.pack(&of, &packer.shapes);
            find_and_watch::<Whole, _>(self.find(&kind), config).map_ok(move |event| event_map(event, &pack)).boxed()
        } else {
            let pack = move |object: Meta| object.pack(&of, &packer.shapes);
            find_and_watch::<Meta, _>(self.find(&kind), config).map_ok(move |event| event_map(event, &pack)).boxed()
        };
        tokio::spawn(async move {
            let mut stream = std::pin::pin!(stream);
            let mut repeats = RepeatFilter::default();
            while let Some(event) = stream.next().await {
                match event {
                    Ok(event) => {
                        // A list that breaks off begins with events too, so these do not show that the watch works.
                        if !matches!(event, Event::Init | Event::InitApply(_)) {
                            repeats.clear();
                        }
                        if children.apply_event(&kind, event) {
                            children.metrics.watch_refused(children.namespace.as_deref(), &kind.kind, None);
                            let before = sender.send_replace(WatchState::Complete);
                            if matches!(before, WatchState::Failed { .. } | WatchState::Refused { .. }) {
                                children.recovered.send_replace(());
                            }
                        }
                    }
                    Err(error) => {
                        let is_missing = list_watch::code(&error) == Some(404);
                        let is_refused = list_watch::is_refused(&error);
                        let error = children.explained(&kind, &error).await;
                        if repeats.is_new(&error) {
                            warn!(kind = kind.kind, error, "the watch was cut");
                        }
                        children.metrics.watch_restarted(&kind.kind);
                        let was_complete = *sender.borrow() == WatchState::Complete;
                        sender.send_if_modified(|state| {
                            *state = match state {
                                WatchState::Complete if is_refused => WatchState::Refused { message: error.clone() },
                                // A watch that was complete once goes on from where it was.
                                WatchState::Complete | WatchState::Refused { .. } => return false,
                                WatchState::Listing | WatchState::Failed { .. } => {
                                    WatchState::Failed { message: error.clone(), is_missing }
                                }
                            };
                            true
                        });
                        if was_complete && is_refused {
                            children.metrics.watch_refused(children.namespace.as_deref(), &kind.kind, Some(error));
                            children.recovered.send_replace(());
                        }
                    }
                }
            }
        });
        receiver
    }

    /// Why a kind can't be watched: the rule that the manager lacks, or the error.
    async fn explained(&self, kind: &TypeMeta, error: &watcher::Error) -> String {
        if list_watch::code(error) == Some(403)
            && let Ok(resource) = self.resources.of(kind).await
            && let Some(rule) = self.access.missing_rule(&resource, &["list", "watch"], self.namespace()).await
        {
            return rule.to_string();
        }
        if list_watch::code(error) == Some(404) && *kind == reports() {
            return "the cluster does not have their definition: apply crds/vmreports-crd.yaml of this release. Until then runners report into \
                    the status of VMs, as those of earlier releases do, if they may"
                .into();
        }
        ErrorChain(error).to_string()
    }

    /// Finds the resource of a kind.
    fn find<K>(self: &Arc<Self>, kind: &TypeMeta) -> impl Fn() -> BoxFuture<'static, kube::Result<Api<K>>> + use<K>
    where
        K: kube::Resource<DynamicType = ApiResource, Scope = DynamicResourceScope> + 'static,
    {
        let (children, kind) = (self.clone(), kind.clone());
        move || {
            let (children, kind) = (children.clone(), kind.clone());
            async move {
                let resource = children.resources.ask(&kind).await?;
                Ok(api(&children.client, children.namespace.as_deref(), &resource))
            }
            .boxed()
        }
    }

    /// Puts an event of a watch in the cache. Returns whether the list of the kind is complete now.
    fn apply_event(self: &Arc<Self>, kind: &TypeMeta, event: Event<Arrived>) -> bool {
        let Changes { vms, is_complete, unsure } = lock(&self.index).apply(kind, event);
        self.trigger(&vms);
        if !unsure.is_empty() {
            tokio::spawn(self.clone().ask(kind.clone(), unsure));
        }
        is_complete
    }

    /// Asks the API server for objects that it has named in an answer while their kind was listed, and that the list does not
    /// show: the list may be older than they are. Those that do not exist are removed. The watch goes on
    /// from the list, so it reports a later deletion of those that exist.
    async fn ask(self: Arc<Self>, kind: TypeMeta, unsure: Vec<Known>) {
        for Known { vm, name, uid, .. } in unsure {
            let ask = async || {
                let resource = self.resources.of(&kind).await?;
                api::<Meta>(&self.client, Some(&vm.0), &resource).get_opt(&name).await
            };
            let exists = loop {
                match ask().await {
                    Ok(found) => break found.is_some_and(|found| *found.uid() == *uid),
                    Err(error) => debug!(name, error = %ErrorChain(&error), "an object can't be asked for"),
                }
                sleep(ASK_AGAIN).await;
            };
            if !exists {
                let vms = lock(&self.index).remove(&vm, uid);
                self.trigger(&vms);
            }
        }
    }

    /// Removes an object that does not exist any more, as the API server answered.
    pub(super) fn remove_missing(&self, uid: &str) {
        let vms = lock(&self.index).remove_missing(uid);
        self.trigger(&vms);
    }

    fn trigger(&self, vms: &[VmName]) {
        // Without a name it is a Pod, a claim or a report of no VM.
        for (namespace, vm) in vms.iter().filter(|(_, vm)| !vm.is_empty()) {
            debug!(vm, namespace, "an object changed");
            // When the manager ends nobody receives this.
            let _ = self.trigger.unbounded_send(ObjectRef::new(vm).within(namespace));
        }
    }
}

fn place_of(vm: &VirtualMachine) -> VmName {
    (vm.namespace().unwrap_or_default().into(), vm.name_any().into())
}

/// The place of Pods, claims and reports that name no VM.
fn nobody(namespace: &str) -> VmName {
    (namespace.into(), "".into())
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

fn is_whole(kind: &TypeMeta) -> bool {
    ObjectKey { api_version: kind.api_version.clone(), kind: kind.kind.clone(), name: String::new() }.needs_content()
}

/// Whether only the objects with the labels of a VM are watched. Of Pods, StatefulSets and claims all are: a Pod that has lost its labels
/// may still run a guest, any Pod may mount a claim of a VM, a backup may bring a claim back without labels, and a report is found by its name.
fn needs_labels(kind: &TypeMeta) -> bool {
    !is_whole(kind) && *kind != stateful_sets()
}

/// The same event about another type.
fn event_map<A, B>(event: Event<A>, map: impl Fn(A) -> B) -> Event<B> {
    match event {
        Event::Apply(object) => Event::Apply(map(object)),
        Event::Delete(object) => Event::Delete(map(object)),
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(map(object)),
        Event::InitDone => Event::InitDone,
    }
}

#[cfg(test)]
mod tests;
