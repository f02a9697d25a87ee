//! The VMs and pools as the API server has them, and which VMs have changed.
//!
//! Changes are collected for a moment ([`PAUSE`]), so that a VM whose status is written several times is shown once. Each collection has a
//! number; a page says up to which number it shows the VMs, and its stream begins there.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::StreamExt;
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject},
    runtime::{
        WatchStreamExt,
        watcher::{self, watcher},
    },
};
use tokio::sync::{Notify, broadcast};
use tracing::warn;

use super::language::Language;
use crate::{
    api::{StoredVm, VirtualMachine, VmPool, VmPoolSpec},
    ownership,
    people::Rights,
    process::{ErrorChain, RepeatFilter, lock},
};

/// For how long changes are collected.
const PAUSE: Duration = Duration::from_millis(100);
/// How many VMs are listed at a time. A VM may have 1 MB, and a page is in memory as a whole.
const PAGE: u32 = 100;
/// How many collections a slow stream may be behind. Then its page is loaded again.
const BEHIND: usize = 64;

/// A kind of page with VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum View {
    /// The administrator's list.
    List,
    /// A person's own VMs.
    Home,
}

/// Namespace and name.
pub(super) type Key = (String, String);

/// The VMs and pools.
pub(super) struct Store {
    inner: Mutex<Inner>,
    has_changed: Notify,
    collections: broadcast::Sender<Arc<Collection>>,
}

#[derive(Default)]
struct Inner {
    /// Their names are shared with the pages that show them: each of many pages keeps those of many VMs.
    vms: BTreeMap<Arc<Key>, Known>,
    pools: BTreeMap<Key, Arc<VmPoolSpec>>,
    /// The number of the last collection.
    number: u64,
    changed: BTreeSet<Arc<Key>>,
    have_rights_changed: bool,
    /// Watches that have not listed everything yet.
    unlisted: usize,
}

#[derive(Clone)]
struct Known {
    vm: Arc<VirtualMachine>,
    /// The number of the collection that has its last change.
    number: u64,
}

/// What has changed at once.
pub(super) struct Collection {
    /// Its number.
    pub number: u64,
    /// The VMs. `None`: it was deleted.
    pub vms: Vec<(Arc<Key>, Option<Arc<VirtualMachine>>)>,
    /// Whether rights may have changed of VMs that have not.
    pub have_rights_changed: bool,
    rendered: Mutex<HashMap<(Look, Key), Arc<str>>>,
}

/// How a VM is seen: whoever sees VMs alike sees the same.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Look {
    /// On which page.
    pub view: View,
    /// In which language.
    pub language: Language,
    /// With which rights.
    pub rights: Rights,
    /// Whether the console could be opened now.
    pub can_open_console: bool,
    /// Whether she has the VM from a pool.
    pub is_own: bool,
}

impl Collection {
    /// The VM's part of a page, which is rendered once for all who see the same.
    pub fn rendered(&self, look: Look, key: &Key, render: impl FnOnce() -> String) -> Arc<str> {
        lock(&self.rendered).entry((look, key.clone())).or_insert_with(|| render().into()).clone()
    }
}

/// A view of the store at one moment, and what changes from then on.
pub(super) struct Subscription {
    /// All VMs, each with the number of the collection in which it has changed last.
    pub vms: Vec<(Arc<Key>, Arc<VirtualMachine>, u64)>,
    /// The number of the last collection.
    pub number: u64,
    /// The next ones.
    pub next: broadcast::Receiver<Arc<Collection>>,
}

impl Store {
    /// An empty store, which so many watches fill.
    pub fn new(watches: usize) -> Arc<Self> {
        let inner = Inner { unlisted: watches, ..Inner::default() };
        Arc::new(Self {
            inner: Mutex::new(inner),
            has_changed: Notify::new(),
            collections: broadcast::Sender::new(BEHIND),
        })
    }

    /// Follows the VMs and pools of each namespace (`None`: of all), and sends what has changed. Returns at once.
    pub fn follow(client: &Client, namespaces: &[Option<String>]) -> Arc<Self> {
        let store = Self::new(2 * namespaces.len());
        for namespace in namespaces {
            let place = namespace.clone();
            let vms: Api<StoredVm> = match &place {
                Some(namespace) => Api::namespaced(client.clone(), namespace),
                None => Api::all(client.clone()),
            };
            let pools = ApiResource::erase::<VmPool>(&());
            let pools: Api<DynamicObject> = match &place {
                Some(namespace) => Api::namespaced_with(client.clone(), namespace, &pools),
                None => Api::all_with(client.clone(), &pools),
            };
            tokio::spawn(store.clone().follow_vms(vms, place.clone()));
            tokio::spawn(store.clone().follow_pools(pools, place));
        }
        tokio::spawn({
            let store = store.clone();
            async move {
                loop {
                    store.has_changed.notified().await;
                    tokio::time::sleep(PAUSE).await;
                    store.collect();
                }
            }
        });
        store
    }

    async fn follow_vms(self: Arc<Self>, api: Api<StoredVm>, namespace: Option<String>) {
        let mut events = watcher(api, watcher::Config::default().page_size(PAGE)).default_backoff().boxed();
        let (mut failures, mut listed, mut is_listed) = (RepeatFilter::default(), BTreeSet::new(), false);
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(StoredVm(vm))) => {
                    listed.insert(key(&vm));
                    self.put(vm);
                }
                Ok(watcher::Event::InitDone) => {
                    failures.clear();
                    self.keep(namespace.as_deref(), &listed);
                    self.is_listed(&mut is_listed);
                }
                Ok(watcher::Event::Apply(StoredVm(vm))) => self.put(vm),
                Ok(watcher::Event::Delete(StoredVm(vm))) => self.remove(&key(&vm)),
                Err(error) => report(&mut failures, "vms", namespace.as_deref(), &error),
            }
        }
    }

    async fn follow_pools(self: Arc<Self>, api: Api<DynamicObject>, namespace: Option<String>) {
        let mut events = watcher(api, watcher::Config::default()).default_backoff().boxed();
        let (mut failures, mut listed, mut is_listed) = (RepeatFilter::default(), BTreeMap::new(), false);
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::Init) => listed.clear(),
                Ok(watcher::Event::InitApply(pool)) => drop(listed.insert(key(&pool), spec(&pool))),
                Ok(watcher::Event::InitDone) => {
                    failures.clear();
                    let is_here = |key: &Key| namespace.as_ref().is_none_or(|namespace| *namespace == key.0);
                    let known: Vec<Key> = lock(&self.inner).pools.keys().filter(|key| is_here(key)).cloned().collect();
                    known.into_iter().filter(|key| !listed.contains_key(key)).for_each(|key| self.set_pool(key, None));
                    std::mem::take(&mut listed).into_iter().for_each(|(key, spec)| self.set_pool(key, spec));
                    self.is_listed(&mut is_listed);
                }
                Ok(watcher::Event::Apply(pool)) => self.set_pool(key(&pool), spec(&pool)),
                Ok(watcher::Event::Delete(pool)) => self.set_pool(key(&pool), None),
                Err(error) => report(&mut failures, "vmpools", namespace.as_deref(), &error),
            }
        }
    }

    fn is_listed(&self, is_listed: &mut bool) {
        if !std::mem::replace(is_listed, true) {
            let mut inner = lock(&self.inner);
            inner.unlisted = inner.unlisted.saturating_sub(1);
        }
    }

    /// Whether all VMs and pools were listed once.
    pub fn is_complete(&self) -> bool {
        lock(&self.inner).unlisted == 0
    }

    /// A VM as it is now.
    pub fn put(&self, mut vm: VirtualMachine) {
        ownership::trim(&mut vm);
        // No page shows these, and they may be large. User data is a secret besides.
        (vm.spec.cloud_init, vm.spec.template_values, vm.spec.logging_properties) = (None, None, None);
        let mut inner = lock(&self.inner);
        let (key, number) = (key(&vm), inner.number + 1);
        let known = inner.vms.get_key_value(&key);
        if known.is_some_and(|(_, known)| known.vm.resource_version() == vm.resource_version()) {
            return;
        }
        let key = known.map_or_else(|| Arc::new(key), |(key, _)| key.clone());
        inner.vms.insert(key.clone(), Known { vm: Arc::new(vm), number });
        inner.changed.insert(key);
        drop(inner);
        self.has_changed.notify_one();
    }

    fn remove(&self, key: &Key) {
        let mut inner = lock(&self.inner);
        if let Some((key, _)) = inner.vms.remove_entry(key) {
            inner.changed.insert(key);
        }
        drop(inner);
        self.has_changed.notify_one();
    }

    /// Removes the VMs of a namespace that are not in the list.
    fn keep(&self, namespace: Option<&str>, listed: &BTreeSet<Key>) {
        let gone: Vec<Arc<Key>> = {
            let inner = lock(&self.inner);
            let is_here = |key: &&Arc<Key>| namespace.is_none_or(|namespace| namespace == key.0);
            inner.vms.keys().filter(is_here).filter(|key| !listed.contains(&***key)).cloned().collect()
        };
        gone.iter().for_each(|key| self.remove(key));
    }

    /// A pool as it is now.
    pub fn set_pool(&self, key: Key, spec: Option<Arc<VmPoolSpec>>) {
        let mut inner = lock(&self.inner);
        let former = match spec.clone() {
            Some(spec) => inner.pools.insert(key, spec),
            None => inner.pools.remove(&key),
        };
        inner.have_rights_changed |= former != spec;
        drop(inner);
        self.has_changed.notify_one();
    }

    /// Rights may have changed of all VMs: the configuration has.
    pub fn rights_have_changed(&self) {
        lock(&self.inner).have_rights_changed = true;
        self.has_changed.notify_one();
    }

    /// Sends what has changed.
    fn collect(&self) {
        let mut inner = lock(&self.inner);
        let (changed, have_rights_changed) =
            (std::mem::take(&mut inner.changed), std::mem::take(&mut inner.have_rights_changed));
        if changed.is_empty() && !have_rights_changed {
            return;
        }
        inner.number += 1;
        let vm = |key: Arc<Key>| {
            let vm = inner.vms.get(&key).map(|known| known.vm.clone());
            (key, vm)
        };
        let vms = changed.into_iter().map(vm).collect();
        let collection = Collection { number: inner.number, vms, have_rights_changed, rendered: Mutex::default() };
        // Still under the lock, so that nobody subscribes between the number and the collection. It fails if nobody listens.
        let _ = self.collections.send(Arc::new(collection));
    }

    /// All VMs as they are now, and the changes from now on.
    pub fn subscribe(&self) -> Subscription {
        let inner = lock(&self.inner);
        let vms = inner.vms.iter().map(|(key, known)| (key.clone(), known.vm.clone(), known.number)).collect();
        Subscription { vms, number: inner.number, next: self.collections.subscribe() }
    }

    /// The number of the last collection.
    pub fn number(&self) -> u64 {
        lock(&self.inner).number
    }

    /// The VM of that name.
    pub fn vm(&self, key: &Key) -> Option<Arc<VirtualMachine>> {
        lock(&self.inner).vms.get(key).map(|known| known.vm.clone())
    }

    /// All VMs.
    pub fn vms(&self) -> Vec<Arc<VirtualMachine>> {
        lock(&self.inner).vms.values().map(|known| known.vm.clone()).collect()
    }

    /// All pools that can be read.
    pub fn pools(&self) -> Vec<(Key, Arc<VmPoolSpec>)> {
        lock(&self.inner).pools.iter().map(|(key, spec)| (key.clone(), spec.clone())).collect()
    }

    /// Returns when the VM is so.
    pub async fn until(&self, key: &Key, is_so: impl Fn(&VirtualMachine) -> bool) {
        let mut next = self.subscribe().next;
        while !self.vm(key).is_some_and(|vm| is_so(&vm)) {
            if matches!(next.recv().await, Err(broadcast::error::RecvError::Closed)) {
                return;
            }
        }
    }

    /// The pool of that name.
    pub fn pool(&self, namespace: &str, name: &str) -> Option<Arc<VmPoolSpec>> {
        lock(&self.inner).pools.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }
}

fn key(object: &impl ResourceExt) -> Key {
    (object.namespace().unwrap_or_default(), object.name_any())
}

/// The spec of a pool. `None`: it can't be read, and so gives nobody a right.
fn spec(pool: &DynamicObject) -> Option<Arc<VmPoolSpec>> {
    serde_json::from_value(pool.data.get("spec")?.clone()).map(Arc::new).ok()
}

fn report(failures: &mut RepeatFilter, resource: &str, namespace: Option<&str>, error: &watcher::Error) {
    let error = ErrorChain(error).to_string();
    if failures.is_new(&error) {
        let namespace = namespace.unwrap_or("*");
        warn!(resource, namespace, %error, "the web interface can't watch; it shows what it knew before");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    fn numbered(name: &str, version: &str) -> VirtualMachine {
        vm(|vm| {
            vm["metadata"]["name"] = json!(name);
            vm["metadata"]["resourceVersion"] = json!(version);
        })
    }

    fn names(collection: &Collection) -> Vec<(&str, bool)> {
        collection.vms.iter().map(|(key, vm)| (key.1.as_str(), vm.is_some())).collect()
    }

    #[test]
    fn changes_are_collected_and_counted() {
        let store = Store::new(0);
        store.put(numbered("apple", "1"));
        store.put(numbered("pear", "2"));
        store.collect();
        let mut subscription = store.subscribe();
        assert_eq!((subscription.number, subscription.vms.len()), (1, 2));
        store.collect();
        assert!(subscription.next.try_recv().is_err(), "nothing has changed");
        for version in ["3", "4", "4"] {
            store.put(numbered("apple", version));
        }
        store.remove(&("orchard".into(), "pear".into()));
        // Whoever comes now gets the change of apple once more, and not too little.
        let between = store.subscribe();
        assert_eq!((between.number, between.vms[0].2), (1, 2));
        store.collect();
        let collection = subscription.next.try_recv().unwrap();
        assert_eq!((collection.number, names(&collection)), (2, vec![("apple", true), ("pear", false)]));
        assert!(!collection.have_rights_changed);
        let pool: Arc<VmPoolSpec> = Arc::new(serde_json::from_value(json!({ "permissions": [] })).unwrap());
        for _ in 0..2 {
            store.set_pool(("orchard".into(), "desks".into()), Some(pool.clone()));
            store.collect();
        }
        assert!(subscription.next.try_recv().unwrap().have_rights_changed);
        assert!(subscription.next.try_recv().is_err(), "the second time it is the same");
    }

    #[test]
    fn a_new_list_removes_what_it_does_not_have_in_its_namespace() {
        let store = Store::new(0);
        store.put(numbered("apple", "1"));
        store.put(numbered("pear", "2"));
        store.keep(Some("meadow"), &BTreeSet::new());
        assert_eq!(store.subscribe().vms.len(), 2);
        store.keep(Some("orchard"), &[("orchard".to_owned(), "pear".to_owned())].into());
        assert!(store.vm(&("orchard".into(), "apple".into())).is_none());
        assert!(store.vm(&("orchard".into(), "pear".into())).is_some());
    }

    #[test]
    fn what_all_see_alike_is_rendered_once() {
        let store = Store::new(0);
        let mut next = store.subscribe().next;
        store.put(numbered("apple", "1"));
        store.collect();
        let collection = next.try_recv().unwrap();
        let key = &collection.vms[0].0;
        let mut count = 0;
        let mut render = |language, rights: Rights, can_open_console| {
            collection.rendered(
                Look { view: View::Home, language, rights, can_open_console, is_own: false },
                key,
                || {
                    count += 1;
                    String::new()
                },
            );
        };
        render(Language::English, Rights::all(), true);
        render(Language::English, Rights::all(), true);
        render(Language::German, Rights::all(), true);
        render(Language::German, Rights::all(), false);
        render(Language::German, Rights::default(), false);
        assert_eq!(count, 4);
    }
}
