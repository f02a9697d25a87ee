//! The cached objects, and by what they are found. It is one value behind one lock, so whoever reads it sees a change as a whole.
//!
//! | found by | in |
//! |---|---|
//! | the VM under which it is kept, and its key | `objects` |
//! | a claim that a Pod can write to | `mounts` |
//! | the name of a report, which is the UID of its Pod | `reports` |
//! | its UID: whether there is such an object | `uids` |
//!
//! Each change returns the VMs that must be reconciled.

use std::{
    collections::{BTreeSet, HashMap, HashSet, VecDeque},
    hash::{BuildHasher as _, RandomState},
};

use kube::{api::TypeMeta, runtime::watcher::Event};

use crate::{
    cluster::packed::{Arrived, Packed, VmName},
    object::{ObjectKey, persistent_volume_claims},
};

/// How many objects a VM may have at most so that their list has no room to spare.
const FEW: usize = 32;
/// How many deleted objects are remembered: more than can be deleted between a request and its answer.
const REMEMBERED: usize = 256;

/// A claim's or a report's namespace and name.
type Name = (Box<str>, Box<str>);

/// An object: the VM under which it is kept, and its UID.
type Place = (VmName, Box<str>);

/// The objects of a namespace, or of all namespaces.
#[derive(Default)]
pub(super) struct Index {
    /// By the VM's namespace and name. A VM has so few objects that a list is searched quickly.
    objects: HashMap<VmName, Vec<Packed>>,
    /// The Pods that mount a claim and can write to it.
    mounts: HashMap<Name, Vec<Place>>,
    /// The reports of runners.
    reports: HashMap<Name, Place>,
    /// Hashes of the UIDs of all objects. A new object need not be searched under other VMs.
    uids: HashSet<u64>,
    hasher: RandomState,
    /// UIDs of the objects that were deleted last: an answer to a write may arrive after the watch has reported the deletion.
    gone: VecDeque<Box<str>>,
    /// The kinds that are being listed now.
    lists: HashMap<TypeMeta, List>,
    /// Whether all claims have been listed.
    knows_claims: bool,
}

/// A list of a kind that is being received: UIDs of its objects.
#[derive(Default)]
struct List {
    /// Those that the list has shown so far.
    listed: HashSet<Box<str>>,
    /// Those that the API server has named in an answer to a write since the list began.
    answered: HashSet<Box<str>>,
}

/// What an event of a watch has changed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// The VMs that must be reconciled.
    pub vms: Vec<VmName>,
    /// Whether the list of the kind is complete now.
    pub is_complete: bool,
    /// The objects that such a list does not show, and that may be newer than the list.
    pub unsure: Vec<Known>,
}

/// A known object.
#[derive(Clone, Debug)]
pub(super) struct Known {
    /// The VM under which it is kept.
    pub vm: VmName,
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: Box<str>,
    version: u64,
}

impl Index {
    /// Takes an event of the watch of a kind.
    pub fn apply(&mut self, kind: &TypeMeta, event: Event<Arrived>) -> Changes {
        match event {
            Event::Init => {
                self.lists.insert(kind.clone(), List::default());
                Changes::default()
            }
            Event::InitApply(arrived) => {
                if let Some(list) = self.lists.get_mut(kind) {
                    list.listed.insert(arrived.object.uid.clone());
                }
                Changes { vms: self.arrive(arrived), ..Changes::default() }
            }
            Event::InitDone => {
                let List { listed, answered } = self.lists.remove(kind).unwrap_or_default();
                let unlisted = self.select(|known| is_of(&known.key, kind) && !listed.contains(&known.uid));
                let (unsure, gone): (Vec<_>, Vec<_>) =
                    unlisted.into_iter().partition(|known| answered.contains(&known.uid));
                self.knows_claims |= *kind == persistent_volume_claims();
                let vms = gone.into_iter().flat_map(|Known { vm, uid, .. }| self.remove(&vm, uid)).collect();
                Changes { vms, is_complete: true, unsure }
            }
            Event::Apply(arrived) => Changes { vms: self.arrive(arrived), ..Changes::default() },
            Event::Delete(arrived) => {
                let uid = arrived.object.uid;
                let places = self.elsewhere_as(arrived.vm.as_ref(), &uid).into_iter().map(|known| known.vm);
                let places: Vec<VmName> = places.chain(arrived.vm).collect();
                if !places.is_empty() {
                    self.remember(uid.clone());
                }
                let vms = places.iter().flat_map(|vm| self.drop_object(vm, &uid)).collect();
                Changes { vms, ..Changes::default() }
            }
        }
    }

    /// Takes the answer to a write. The next decision then need not wait for the watch.
    pub fn answer(&mut self, Arrived { vm, object }: Arrived) {
        if let Some(list) = self.lists.get_mut(&object.key.types()) {
            list.answered.insert(object.uid.clone());
        }
        let Some(vm) = vm.filter(|_| !self.gone.contains(&object.uid)) else { return };
        let of_vm = self.of(&vm);
        if find(of_vm, &object.key).is_some_and(|known| known.version > object.version) {
            return;
        }
        // A claim of nobody that was just labelled, or a Pod that named another VM.
        let former = self.elsewhere_as(Some(&vm), &object.uid);
        if former.iter().any(|known| known.version > object.version) {
            return;
        }
        former.iter().for_each(|Known { vm, uid, .. }| drop(self.drop_object(vm, uid)));
        self.put(&vm, object);
    }

    /// Removes an object that does not exist any more. An answer that comes later brings it back no more.
    pub fn remove(&mut self, vm: &VmName, uid: Box<str>) -> Vec<VmName> {
        self.remember(uid.clone());
        self.drop_object(vm, &uid)
    }

    /// The same, under whichever VM it is kept.
    pub fn remove_missing(&mut self, uid: &str) -> Vec<VmName> {
        let known = self.select(|known| *known.uid == *uid);
        known.into_iter().flat_map(|Known { vm, uid, .. }| self.remove(&vm, uid)).collect()
    }

    /// The objects that are kept under a VM.
    pub fn of(&self, vm: &VmName) -> &[Packed] {
        self.objects.get(vm).map(Vec::as_slice).unwrap_or_default()
    }

    /// The objects that are kept under other VMs of the namespace, or under none of its VMs.
    pub fn elsewhere(&self, vm: &VmName) -> impl Iterator<Item = (&VmName, &Packed)> {
        let others = self.objects.iter().filter(move |(other, _)| other.0 == vm.0 && *other != vm);
        others.flat_map(|(other, objects)| objects.iter().map(move |object| (other, object)))
    }

    /// The Pods of others that mount one of these claims of the VM and can write to it, each once.
    pub fn mounting(&self, vm: &VmName, claims: impl Iterator<Item = String>) -> impl Iterator<Item = &Packed> {
        let of = |claim: String| self.mounts.get(&(vm.0.clone(), claim.into())).into_iter().flatten();
        let pods: BTreeSet<&Place> = claims.flat_map(of).filter(|(place, _)| place != vm).collect();
        pods.into_iter().filter_map(|place| self.at(place))
    }

    /// The report of that name, wherever it is kept.
    pub fn report(&self, namespace: &str, name: &str) -> Option<&Packed> {
        self.at(self.reports.get(&(namespace.into(), name.into()))?)
    }

    /// Whether there is an object with that UID.
    pub fn has(&self, uid: &str) -> bool {
        self.uids.contains(&self.hasher.hash_one(uid))
    }

    fn remember(&mut self, uid: Box<str>) {
        self.gone.truncate(REMEMBERED - 1);
        self.gone.push_front(uid);
    }

    fn at(&self, (vm, uid): &Place) -> Option<&Packed> {
        self.of(vm).iter().find(|known| known.uid == *uid)
    }

    /// In an order that is always the same: the VMs are triggered in it.
    fn select(&self, which: impl Fn(&Packed) -> bool) -> Vec<Known> {
        let known = self.objects.iter().flat_map(|(vm, objects)| objects.iter().map(move |known| (vm, known)));
        let known = known.filter(|(_, known)| which(known));
        let mut known: Vec<_> = known
            .map(|(vm, known)| Known {
                vm: vm.clone(),
                name: known.key.name.clone(),
                uid: known.uid.clone(),
                version: known.version,
            })
            .collect();
        known.sort_by(|one, other| (&one.vm, &one.uid).cmp(&(&other.vm, &other.uid)));
        known
    }

    /// The object with that UID, if it is not kept under this VM: its label named another one before, or none.
    fn elsewhere_as(&self, vm: Option<&VmName>, uid: &str) -> Vec<Known> {
        let is_it = |known: &Packed| *known.uid == *uid;
        let is_here = || vm.is_some_and(|vm| self.of(vm).iter().any(is_it));
        if !self.has(uid) || is_here() { Vec::new() } else { self.select(is_it) }
    }

    /// Takes an object as a watch or a list shows it. An answer to our own write may have moved a newer one to another VM.
    fn arrive(&mut self, arrived: Arrived) -> Vec<VmName> {
        let former = self.elsewhere_as(arrived.vm.as_ref(), &arrived.object.uid);
        if former.iter().any(|known| known.version > arrived.object.version) {
            return Vec::new();
        }
        let mut vms: Vec<VmName> = former.iter().flat_map(|Known { vm, uid, .. }| self.drop_object(vm, uid)).collect();
        vms.extend(self.update(arrived));
        vms
    }

    fn update(&mut self, Arrived { vm, object }: Arrived) -> Vec<VmName> {
        let Some(vm) = vm else { return Vec::new() };
        let known = find(self.of(&vm), &object.key);
        // The answer to our own write is in the cache already, perhaps a newer one.
        if known.is_some_and(|known| known.uid == object.uid && known.version >= object.version) {
            return Vec::new();
        }
        let is_same = known.is_some_and(|known| known.is_same(&object));
        if known.is_none() {
            // It may have been taken for gone.
            self.gone.retain(|gone| *gone != object.uid);
        }
        let (key, claims) = (object.key.clone(), object.claims.clone());
        self.put(&vm, object);
        if is_same {
            return Vec::new();
        }
        let others = self.others_concerned(&vm, &key, &claims);
        [vec![vm], others].concat()
    }

    fn drop_object(&mut self, vm: &VmName, uid: &str) -> Vec<VmName> {
        let Some(of_vm) = self.objects.get_mut(vm) else { return Vec::new() };
        // An object of the same name that was created since stays. A kind that is watched in two versions of its API has two entries.
        let dropped: Vec<Packed> = of_vm.extract_if(.., |known| *known.uid == *uid).collect();
        if of_vm.is_empty() {
            self.objects.remove(vm);
        }
        if dropped.is_empty() {
            return Vec::new();
        }
        for object in &dropped {
            self.forget_mounts(vm, object);
            self.forget_report(vm, object);
        }
        self.uids.remove(&self.hasher.hash_one(uid));
        let others = dropped.iter().flat_map(|object| self.others_concerned(vm, &object.key, &object.claims));
        std::iter::once(vm.clone()).chain(others).collect()
    }

    fn put(&mut self, vm: &VmName, object: Packed) {
        self.note_mounts(vm, &object);
        if object.key.is_report() {
            self.reports.insert(name_of(vm, &object.key.name), (vm.clone(), object.uid.clone()));
        }
        self.uids.insert(self.hasher.hash_one(&object.uid));
        let objects = self.objects.entry(vm.clone()).or_default();
        match objects.iter_mut().find(|known| known.key == object.key) {
            Some(known) => {
                let uid = object.uid.clone();
                let former = std::mem::replace(known, object);
                if former.uid != uid {
                    self.uids.remove(&self.hasher.hash_one(&former.uid));
                    self.forget_mounts(vm, &former);
                }
            }
            None => push(objects, object),
        }
    }

    /// A Pod's volumes never change, so this is done once for each Pod.
    fn note_mounts(&mut self, vm: &VmName, pod: &Packed) {
        for claim in &pod.claims {
            let pods = self.mounts.entry((vm.0.clone(), claim.clone())).or_default();
            match pods.iter_mut().find(|(_, uid)| *uid == pod.uid) {
                Some((known, _)) => known.clone_from(vm),
                None => push(pods, (vm.clone(), pod.uid.clone())),
            }
        }
    }

    fn forget_mounts(&mut self, (namespace, _): &VmName, pod: &Packed) {
        for claim in &pod.claims {
            let claim = (namespace.clone(), claim.clone());
            let Some(pods) = self.mounts.get_mut(&claim) else { continue };
            pods.retain(|(_, uid)| *uid != pod.uid);
            if pods.is_empty() {
                self.mounts.remove(&claim);
            }
        }
    }

    fn forget_report(&mut self, vm: &VmName, report: &Packed) {
        let name = name_of(vm, &report.key.name);
        if self.reports.get(&name).is_some_and(|(place, uid)| place == vm && *uid == report.uid) {
            self.reports.remove(&name);
        }
    }

    /// The other VMs to reconcile when an object has changed that can write to these claims: those that have the claims, or the Pod that a report is
    /// about.
    fn others_concerned(&self, vm: &VmName, key: &ObjectKey, claims: &[Box<str>]) -> Vec<VmName> {
        let mut others = self.users_of(vm, claims);
        others.extend(self.reporter_of(vm, key));
        others
    }

    /// The other VMs that have the claims which a Pod can write to. While claims are still listed, all VMs are reconciled afterwards anyway.
    fn users_of(&self, vm: &VmName, claims: &[Box<str>]) -> Vec<VmName> {
        let has = |of_vm: &[Packed], claim: &str| of_vm.iter().any(|it| it.key.is_claim() && it.key.name == claim);
        let own = self.of(vm);
        let foreign: Vec<_> = claims.iter().filter(|claim| vm.1.is_empty() || !has(own, claim)).collect();
        if foreign.is_empty() || !self.knows_claims {
            return Vec::new();
        }
        let others = self.objects.iter().filter(|(place, _)| place.0 == vm.0 && *place != vm);
        let others = others.filter(|(_, of_vm)| foreign.iter().any(|claim| has(of_vm, claim)));
        others.map(|(place, _)| place.clone()).collect()
    }

    /// The other VM that has the Pod which a report is about, if the report is kept under a VM that does not: somebody has changed its owner.
    fn reporter_of(&self, vm: &VmName, report: &ObjectKey) -> Option<VmName> {
        let has_pod = |of_vm: &[Packed]| of_vm.iter().any(|it| it.key.is_pod() && *it.uid == *report.name);
        if !report.is_report() || has_pod(self.of(vm)) || !self.has(&report.name) {
            return None;
        }
        let mut others = self.objects.iter().filter(|(place, _)| place.0 == vm.0);
        others.find(|(_, of_vm)| has_pod(of_vm)).map(|(place, _)| place.clone())
    }
}

fn name_of((namespace, _): &VmName, name: &str) -> Name {
    (namespace.clone(), name.into())
}

fn is_of(key: &ObjectKey, kind: &TypeMeta) -> bool {
    key.kind == kind.kind && key.api_version == kind.api_version
}

fn find<'a>(objects: &'a [Packed], key: &ObjectKey) -> Option<&'a Packed> {
    objects.iter().find(|object| object.key == *key)
}

/// Adds to a list. While it is short it grows by one: a list that grows by half is half empty for most VMs, which is 1 kB for each.
fn push<T>(list: &mut Vec<T>, item: T) {
    if list.len() < FEW {
        list.reserve_exact(1);
    }
    list.push(item);
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};
    use serde_json::json;

    use super::*;
    use crate::{
        cluster::packed::{Shapes, Whole},
        object::{pods, reports},
    };

    /// An object: which kind, which name, whether it was made anew since, and which VM it names.
    type Seen = (usize, usize, usize, usize);

    /// What happens to the cache: the number of the event or the answer, and the object that it is about.
    type Step = (usize, Seen);

    fn kind(number: usize) -> TypeMeta {
        [pods(), persistent_volume_claims(), reports()][number].clone()
    }

    fn arrived((number, name, age, vm): Seen, version: usize) -> Arrived {
        let names = ["disk", "other", "more"];
        let vm = ["", "apple", "pear"][vm];
        let labels = if vm.is_empty() {
            json!({})
        } else {
            json!({ "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": vm })
        };
        let volume = |claim: &str| json!({ "name": claim, "persistentVolumeClaim": { "claimName": claim } });
        let uid = format!("{number} {name} {age}");
        let metadata = json!({ "name": names[name], "namespace": "ns", "uid": uid, "resourceVersion": version.to_string(), "labels": labels });
        let spec = json!({ "volumes": [volume("disk"), volume(names[name])] });
        let object: Whole = serde_json::from_value(json!({ "metadata": metadata, "spec": spec })).unwrap();
        object.pack(&kind(number), &Shapes::default())
    }

    fn take(index: &mut Index, (what, seen): Step, version: usize) {
        let (kind, object) = (kind(seen.0), || arrived(seen, version));
        match what {
            0 | 1 => drop(index.apply(&kind, Event::Apply(object()))),
            2 => drop(index.apply(&kind, Event::Delete(object()))),
            3 => drop(index.apply(&kind, Event::Init)),
            4 => drop(index.apply(&kind, Event::InitApply(object()))),
            5 => drop(index.apply(&kind, Event::InitDone)),
            6 => drop(index.remove_missing(&object().object.uid)),
            _ => index.answer(object()),
        }
    }

    fn check(index: &Index) {
        let all: Vec<(&VmName, &Packed)> =
            index.objects.iter().flat_map(|(vm, objects)| objects.iter().map(move |object| (vm, object))).collect();
        assert!(index.objects.values().all(|objects| !objects.is_empty()), "no VM has an empty list");
        let uids: HashSet<&str> = all.iter().map(|(_, object)| &*object.uid).collect();
        assert_eq!(uids.len(), all.len(), "each object is kept under one VM");
        let hashes: HashSet<u64> = uids.iter().map(|uid| index.hasher.hash_one(*uid)).collect();
        assert_eq!(hashes, index.uids);
        let mounts = all.iter().flat_map(|(vm, pod)| {
            let claims: BTreeSet<_> = pod.claims.iter().collect();
            claims.into_iter().map(|claim| (claim.clone(), ((*vm).clone(), pod.uid.clone())))
        });
        let mut mounts: Vec<_> = mounts.collect();
        let known =
            index.mounts.iter().flat_map(|((_, claim), pods)| pods.iter().map(|pod| (claim.clone(), pod.clone())));
        let mut known: Vec<_> = known.collect();
        mounts.sort();
        known.sort();
        assert_eq!(mounts, known);
        for ((_, name), place) in &index.reports {
            assert!(index.at(place).is_some_and(|it| it.key.is_report() && *it.key.name == **name), "{name}");
        }
    }

    #[test]
    fn what_is_older_than_what_is_known_is_dropped_also_under_another_vm() {
        let (nobody, apple) = (("ns".into(), "".into()), ("ns".into(), "apple".into()));
        let (free, taken): (Seen, Seen) = ((1, 0, 0, 0), (1, 0, 0, 1));
        let places = |index: &Index| (index.of(&nobody).len(), index.of(&apple).len());
        let kind = persistent_volume_claims();
        let mut index = Index::default();
        index.apply(&kind, Event::Apply(arrived(free, 1)));
        index.answer(arrived(taken, 3));
        assert_eq!(places(&index), (0, 1), "our own write has labelled it");
        // The watch is behind.
        assert!(index.apply(&kind, Event::Apply(arrived(free, 2))).vms.is_empty());
        assert_eq!(places(&index), (0, 1));
        assert_eq!(index.apply(&kind, Event::Apply(arrived(free, 4))).vms, [apple.clone(), nobody.clone()]);
        assert_eq!(places(&index), (1, 0), "somebody has taken the label away");
        index.answer(arrived(taken, 3));
        assert_eq!(places(&index), (1, 0), "an answer is late");
        // It is deleted under another name than it was kept.
        index.apply(&kind, Event::Delete(arrived(taken, 5)));
        index.answer(arrived(free, 4));
        assert_eq!(places(&index), (0, 0));
    }

    proptest! {
        #[test]
        fn all_ways_to_an_object_agree_whatever_happens(steps in vec((0..8_usize, (0..3_usize, 0..3_usize, 0..2_usize, 0..3_usize)), 1..60)) {
            let mut index = Index::default();
            for (version, step) in steps.into_iter().enumerate() {
                take(&mut index, step, version + 1);
                check(&index);
            }
        }
    }
}
