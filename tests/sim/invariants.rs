//! What must hold after each step, whatever happens.

mod at_rest;
mod entries;
mod pools;
pub mod vmctl;

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;

pub use self::at_rest::at_rest;
use crate::{
    api::{
        kinds::{kind, kinds},
        request::{Answer, Request, Target},
        store::{Change, Store},
    },
    manager::NAMESPACE,
    people::{is_persons, is_restored},
    world::{Guest, World, has_ended, is_deleting, kubelet::needed, mounted, uid},
};

/// What the checks remember.
#[derive(Clone, Default)]
pub struct Invariants {
    /// The UID of the claim on which a VM (by its UID) has the disk with that name, since a guest has run with it.
    disks: BTreeMap<(String, String), String>,
    /// The name of the VM of which a guest has run with a claim (by its UID).
    users: BTreeMap<String, String>,
    /// The last Pod of a VM (by its UID) of which the guest has shut itself down, and stays down.
    shut_down: BTreeMap<String, String>,
    /// The name of the claim that a disk of a VM (by its UID) has, by the disk's serial number.
    entries: BTreeMap<(String, String), String>,
    /// The prototype of the VM of which a guest has run with a claim (by its UID).
    prototypes: BTreeMap<String, String>,
}

/// An object before and after a write of the manager.
pub struct Written<'a> {
    pub target: &'a Target,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
    /// The version that the API server had when the manager sent it.
    pub since: u64,
}

impl Invariants {
    /// A write of the manager has taken effect.
    pub fn written(&self, written: &Written<'_>, store: &Store, world: &World) -> Result<(), String> {
        if written.before == written.after {
            return Ok(());
        }
        is_of_known(written, store)?;
        claim_is_kept(written)?;
        foreign_is_untouched(written)?;
        spec_is_untouched(written, store)?;
        stopped_as_known(written, store)?;
        pod_can_start(written, store)?;
        status_goes_on(written)?;
        pod_writes_alone(written, store)?;
        makes_one_pod(written)?;
        self.claim_stays_with_pod(written, store, world)?;
        self.shut_down_stays_down(written, store)?;
        guest_is_ended_for_a_reason(written, store, world)
    }

    /// Something has happened.
    pub fn state(&mut self, store: &Store, world: &World) -> Result<(), String> {
        one_guest_for_each_vm(world)?;
        one_writer_for_each_claim(world)?;
        self.note_shutdowns(world);
        self.entries_keep_their_claims(world)?;
        self.claims_stay_with_a_prototype(store, world)?;
        self.disks_stay(store, world)
    }

    /// A VM's guest never gets another claim in the place of one that it had, unless a person has given the data up or brought it back.
    fn disks_stay(&mut self, store: &Store, world: &World) -> Result<(), String> {
        for guest in world.guests.values().filter(|guest| guest.is_of_vm) {
            let (name, vm_uid) = &guest.vm;
            for (claim, uid, _) in &guest.claims {
                let known = self.disks.entry((vm_uid.clone(), claim.clone())).or_insert_with(|| uid.clone());
                let vm = store.get(&Target::new(kind("VirtualMachine"), &guest.pod.namespace, name));
                let is_given_up = vm
                    .is_some_and(|vm| !vm["metadata"]["annotations"]["vmoperator.jdrupes.org/replaceClaim"].is_null());
                let found = store.get(&Target::new(kind("PersistentVolumeClaim"), &guest.pod.namespace, claim));
                let is_persons = found.is_some_and(is_restored);
                if known != uid && !is_given_up && !is_persons && !is_runner_data(claim) {
                    return Err(format!(
                        "the guest of {name} had the claim {claim} with the UID {known} and now has {uid}"
                    ));
                }
                known.clone_from(uid);
                let user = self.users.entry(uid.clone()).or_insert_with(|| name.clone());
                if user != name {
                    return Err(format!("the claim {claim} has the data of {user}, and the guest of {name} uses it"));
                }
            }
        }
        Ok(())
    }

    fn note_shutdowns(&mut self, world: &World) {
        for (pod, guest) in
            world.guests.iter().filter(|(_, guest)| guest.is_of_vm && guest.has_said_that_it_stays_down())
        {
            self.shut_down.insert(guest.vm.1.clone(), pod.clone());
        }
    }

    /// A claim that somebody has deleted is gone when its last Pod is. So the manager deletes such a Pod only if the VM is to be down, not to restart the
    /// guest.
    fn claim_stays_with_pod(&self, written: &Written<'_>, store: &Store, world: &World) -> Result<(), String> {
        let Some(pod) = written.before.as_ref().filter(|pod| written.target.kind == kind("Pod") && !is_deleting(pod))
        else {
            return Ok(());
        };
        let is_deleted = written.after.as_ref().is_none_or(|after| is_deleting(after));
        let owner = pod["metadata"]["ownerReferences"][0]["uid"].as_str().unwrap_or_default();
        let is_shut_down =
            self.shut_down.get(owner) == Some(&uid(pod)) || world.guests.get(&uid(pod)).is_some_and(Guest::stays_down);
        if !is_deleted || is_shut_down || may_end(written.since, store, owner) {
            return Ok(());
        }
        let is_going = |claim: &Target| {
            let changes = store.changes.iter().rev().filter(|change| change.target == *claim);
            let mut going = changes.take_while(|change| change.after.as_ref().is_some_and(|it| is_deleting(it)));
            is_claim(claim)
                && !is_runner_data(&claim.name)
                && going.any(|change| change.version + BEHIND < written.since)
        };
        match needed(written.target, pod).iter().find(|claim| is_going(claim)) {
            Some(claim) => Err(format!(
                "the manager has deleted the Pod {}, and with it goes the claim {}",
                written.target.name, claim.name
            )),
            None => Ok(()),
        }
    }

    /// A VM that is to stay down when its guest shuts itself down is started again only if somebody wants that.
    fn shut_down_stays_down(&self, written: &Written<'_>, store: &Store) -> Result<(), String> {
        let (None, Some(made)) = (&written.before, &written.after) else { return Ok(()) };
        if written.target.kind != kind("Pod") {
            return Ok(());
        }
        let owner = made["metadata"]["ownerReferences"][0]["uid"].as_str().unwrap_or_default();
        let Some(pod) = self.shut_down.get(owner) else { return Ok(()) };
        let made = made_at(pod, store);
        // A restart may have been wanted shortly before the Pod was made from an older view.
        let is_start = |change: &Change, before: &Value, after: &Value| {
            restarted(before) != restarted(after) || change.version > made && is_started(before, after)
        };
        if changes_since(made, store, owner).any(|(change, before, after)| is_start(change, before, after)) {
            return Ok(());
        }
        Err(format!("the manager has made the Pod {}, although the guest before shut itself down", written.target.name))
    }
}

/// Firmware variables are made anew if they are lost.
fn is_runner_data(claim: &str) -> bool {
    claim.ends_with("-runner-data")
}

fn one_guest_for_each_vm(world: &World) -> Result<(), String> {
    let mut guests: BTreeMap<&String, Vec<&str>> = BTreeMap::new();
    for guest in world.guests.values().filter(|guest| guest.is_of_vm && !guest.power.is_down()) {
        guests.entry(&guest.vm.0).or_default().push(&guest.pod.name);
    }
    match guests.iter().find(|(_, pods)| pods.len() > 1) {
        Some((vm, pods)) => Err(format!("{vm} has two guests, in the Pods {}", pods.join(", "))),
        None => Ok(()),
    }
}

/// No two guests of VMs write to one claim. The Pod of a person is no guest: the manager may not know it yet, so [`at_rest`] checks that the VM is not
/// Ready beside it.
fn one_writer_for_each_claim(world: &World) -> Result<(), String> {
    let mut writers: BTreeMap<&String, Vec<&str>> = BTreeMap::new();
    for guest in world.guests.values().filter(|guest| guest.is_of_vm) {
        for (_, uid, _) in guest.claims.iter().filter(|(.., writes)| *writes) {
            writers.entry(uid).or_default().push(&guest.pod.name);
        }
    }
    match writers.iter().find(|(_, pods)| pods.len() > 1) {
        Some((claim, pods)) => Err(format!("two guests write to the claim {claim}: {}", pods.join(", "))),
        None => Ok(()),
    }
}

/// A write that arrives late does not take effect on an object that was made after it was sent: it was meant for another one of that name. What belongs to
/// no VM, such as a version of a template set, has the same content under the same name.
fn is_of_known(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let Some(before) = &written.before else { return Ok(()) };
    let is_owned = before["metadata"]["ownerReferences"].as_array().is_some_and(|owners| !owners.is_empty());
    let is_of_vm = is_owned || is_claim(written.target) || written.target.kind == kind("VirtualMachine");
    if !is_of_vm || made_at(&uid(before), store) <= written.since {
        return Ok(());
    }
    Err(format!(
        "a write that was sent before {} {} was made has changed it",
        kinds()[written.target.kind].name,
        written.target.name
    ))
}

fn is_claim(target: &Target) -> bool {
    target.kind == kind("PersistentVolumeClaim")
}

/// The manager deletes no claim.
fn claim_is_kept(written: &Written<'_>) -> Result<(), String> {
    let is_deleted = written.after.as_ref().is_none_or(|after| is_deleting(after));
    let was_there = written.before.as_ref().is_some_and(|before| !is_deleting(before));
    if is_claim(written.target) && was_there && is_deleted {
        return Err(format!("the manager has deleted the claim {}", written.target.name));
    }
    Ok(())
}

/// The manager changes nothing that others have made, but for the VMs' status and a claim that it takes.
fn foreign_is_untouched(written: &Written<'_>) -> Result<(), String> {
    // Nobody has said of a claim without the annotation whose it is.
    let is_offered = |claim: &Value| !claim["metadata"]["annotations"]["vmoperator.jdrupes.org/vm"].is_null();
    let may_change = is_claim(written.target) && written.before.as_ref().is_none_or(|claim| is_offered(claim))
        || written.target.kind == kind("VirtualMachine")
        || written.target.kind == kind("VmPool") && is_only_status(written);
    match &written.before {
        Some(before) if !may_change && is_persons(before) => Err(format!(
            "the manager has changed {} {}, which a person made",
            kinds()[written.target.kind].name,
            written.target.name
        )),
        _ => Ok(()),
    }
}

/// Whether a write has changed nothing of an object but its status.
fn is_only_status(written: &Written<'_>) -> bool {
    let spec = |object: &Option<Arc<Value>>| object.as_ref().map(|object| object["spec"].clone());
    written.after.is_some() && spec(&written.before) == spec(&written.after)
}

/// Of a VM the manager writes nothing but the status, `spec.vm.state` when a guest has shut down, and what identifies that; and the VMs that it has made
/// for pools ([`pools`]).
fn spec_is_untouched(written: &Written<'_>, store: &Store) -> Result<(), String> {
    if written.target.kind != kind("VirtualMachine") {
        return Ok(());
    }
    let Some(after) = &written.after else { return pools::deleted(written, store) };
    let Some(before) = &written.before else { return pools::made(written, store) };
    if !is_deleting(before) && is_deleting(after) {
        return pools::deleted(written, store);
    }
    if pools::is_template_applied(before, after) {
        return pools::changed(written);
    }
    let ours = |object: &Value| {
        let mut object = object.clone();
        if let Some(metadata) = object["metadata"].as_object_mut() {
            ["managedFields", "resourceVersion", "generation"].iter().for_each(|field| drop(metadata.remove(*field)));
        }
        if before["spec"]["vm"]["state"] != "Stopped" && after["spec"]["vm"]["state"] == "Stopped" {
            object.pointer_mut("/spec/vm/state").map(Value::take);
            object["metadata"]["annotations"]["vmoperator.jdrupes.org/guestShutdownAt"].take();
        }
        object.as_object_mut().map(|object| object.remove("status"));
        object
    };
    let (was, is) = (ours(before), ours(after));
    if was != is {
        return Err(format!("the manager has changed the VM {}: {was} became {is}", written.target.name));
    }
    Ok(())
}

/// A Pod that the manager makes mounts no claim that another Pod can write to.
fn pod_writes_alone(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let (None, Some(made)) = (&written.before, &written.after) else { return Ok(()) };
    if written.target.kind != kind("Pod") {
        return Ok(());
    }
    let ours: Vec<String> = mounted(made).into_iter().filter(|(_, writes)| *writes).map(|(claim, _)| claim).collect();
    // A person's Pod may have been made just now, and then the manager can't know it.
    let others = store.of("Pod").filter(|(other, pod)| *other != written.target && !has_ended(pod) && !is_persons(pod));
    for (other, pod) in others {
        if let Some((claim, _)) = mounted(pod).into_iter().find(|(claim, writes)| *writes && ours.contains(claim)) {
            return Err(format!(
                "the manager has made the Pod {} beside {}, which writes to {claim}",
                written.target.name, other.name
            ));
        }
    }
    Ok(())
}

/// What makes Pods for the manager makes one.
fn makes_one_pod(written: &Written<'_>) -> Result<(), String> {
    let many = |object: &Value| object["spec"]["replicas"].as_i64().is_some_and(|replicas| replicas > 1);
    if written.target.kind == kind("StatefulSet") && written.after.as_ref().is_some_and(|after| many(after)) {
        return Err(format!("{} makes more than one Pod of a VM", written.target.name));
    }
    Ok(())
}

/// The API server accepts each status that the manager writes: the definition is of the same version. `answer` is what it says to a write.
pub fn status_is_accepted(request: &Request, answer: &Answer) -> Result<(), String> {
    let is_status = request.target.kind == kind("VirtualMachine") && request.subresource == "status";
    if is_status && matches!(answer.code, 422 | 500) {
        return Err(format!(
            "the API server refuses the status of {}: {}",
            request.target.name, answer.body["message"]
        ));
    }
    Ok(())
}

/// The manager stops a VM, because its guest has shut itself down, only if the VM is to stay down then, and as it knows it.
fn stopped_as_known(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let (Some(before), Some(after)) = (&written.before, &written.after) else { return Ok(()) };
    let state = |vm: &Value| vm["spec"]["vm"]["state"].clone();
    if written.target.kind != kind("VirtualMachine") || state(before) == state(after) {
        return Ok(());
    }
    let mut later = store.changes.iter().rev().take_while(|change| change.version > written.since);
    // The last change is this one.
    let is_known = later.by_ref().filter(|change| change.target == *written.target).nth(1).is_none();
    if is_known && before["spec"]["guestShutdownStops"] == true {
        return Ok(());
    }
    Err(format!("the manager has stopped {}, which has changed or is to run on", written.target.name))
}

/// Whether the VM with that UID is gone or going, or was to be down, in a version or shortly before it.
fn may_end(version: u64, store: &Store, vm: &str) -> bool {
    let of_vm = |object: &Arc<Value>| object["metadata"]["uid"] == vm;
    let states = store.changes.iter().filter(|change| of_vm(&change.last));
    let last = |until: u64| {
        let known = states.clone().rfind(|change| change.version <= until);
        known.and_then(|change| change.after.as_ref())
    };
    let runs = |vm: &Value| vm["spec"]["vm"]["state"] == "Running" && !is_deleting(vm);
    let lately = states.clone().filter(|change| change.version + BEHIND > version);
    let mut lately = lately.map(|change| change.after.as_ref()).chain([last(version.saturating_sub(BEHIND))]);
    lately.any(|vm| vm.is_none_or(|vm| !runs(vm)))
}

/// In which version an object was made.
fn made_at(uid_of: &str, store: &Store) -> u64 {
    let is_it = |change: &&Change| change.after.as_ref().is_some_and(|object| object["metadata"]["uid"] == uid_of);
    store.changes.iter().find(is_it).map_or(0, |change| change.version)
}

/// For which request a VM is restarted.
fn restarted(vm: &Value) -> &Value {
    &vm["metadata"]["annotations"]["vmoperator.jdrupes.org/restartedAt"]
}

/// Whether somebody has started a VM, or does not want any more that it stays down when its guest shuts itself down.
fn is_started(before: &Value, after: &Value) -> bool {
    let is_wanted = |vm: &Value| vm["spec"]["vm"]["state"] == "Running";
    let stops = |vm: &Value| vm["spec"]["guestShutdownStops"] == true;
    !is_wanted(before) && is_wanted(after) || stops(before) && !stops(after)
}

/// The changes of the VM with that UID since a version, or shortly before, as it was before and after each.
fn changes_since<'a>(
    version: u64,
    store: &'a Store,
    vm: &'a str,
) -> impl Iterator<Item = (&'a Change, &'a Value, &'a Value)> {
    let later = store.changes.iter().filter(move |change| change.version + BEHIND > version);
    let changes = later.filter_map(|change| Some((change, &**change.before.as_ref()?, &**change.after.as_ref()?)));
    changes.filter(move |(_, _, after)| after["metadata"]["uid"] == vm)
}

/// All that a Pod mounts, and that is not optional, is there and not being deleted when the manager makes the Pod, or was a moment ago.
fn pod_can_start(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let (None, Some(made)) = (&written.before, &written.after) else { return Ok(()) };
    if written.target.kind != kind("Pod") {
        return Ok(());
    }
    let lately = written.since.saturating_sub(BEHIND);
    let was_there = |target: &Target| {
        let mut gone = store.changes.iter().rev().take_while(|change| change.version > lately);
        store.get(target).is_some_and(|object| !is_deleting(object))
            || gone.any(|change| change.target == *target && !change.before.as_ref().is_none_or(|it| is_deleting(it)))
    };
    match needed(written.target, made).into_iter().find(|target| !was_there(target)) {
        Some(missing) => Err(format!(
            "the manager has made the Pod {} without {} {}, which it mounts",
            written.target.name,
            kinds()[missing.kind].name,
            missing.name
        )),
        None => Ok(()),
    }
}

/// Who writes a status knows the one before: the generation that it is about never goes back.
fn status_goes_on(written: &Written<'_>) -> Result<(), String> {
    let (Some(before), Some(after)) = (&written.before, &written.after) else { return Ok(()) };
    let generation = |vm: &Value| vm["status"]["observedGeneration"].as_i64().unwrap_or(-1);
    if written.target.kind != kind("VirtualMachine") || generation(after) >= generation(before) {
        return Ok(());
    }
    Err(format!(
        "the status of {} was about the generation {} and now is about {}",
        written.target.name,
        generation(before),
        generation(after)
    ))
}

/// What the garbage collector is about to delete: not the guest of a VM that was deleted without what it owns.
pub fn collected(target: &Target, store: &Store, world: &World) -> Result<(), String> {
    let guest = store.get(target).and_then(|pod| world.guests.get(&uid(pod)));
    let Some(guest) = guest.filter(|guest| guest.is_of_vm && !guest.power.is_down()) else { return Ok(()) };
    let is_orphaning = |vm: &Value| {
        vm["metadata"]["finalizers"].as_array().is_some_and(|all| all.iter().any(|finalizer| finalizer == "orphan"))
    };
    let of_vm = |object: &&Arc<Value>| object["metadata"]["uid"] == guest.vm.1;
    let mut states = store.changes.iter().filter_map(|change| change.after.as_ref()).filter(of_vm);
    if states.any(|vm| is_orphaning(vm)) {
        return Err(format!(
            "{} was deleted without what it owns, and its Pod {} is deleted nevertheless",
            guest.vm.0, target.name
        ));
    }
    Ok(())
}

/// How many changes the manager's view may be behind when it makes a Pod.
const BEHIND: u64 = 40;

/// The manager ends a guest only if somebody has wanted that since its Pod was made, or shortly before: the Pod may be made from an older view.
fn guest_is_ended_for_a_reason(written: &Written<'_>, store: &Store, world: &World) -> Result<(), String> {
    let Some(pod) = written.before.as_ref().filter(|pod| !is_deleting(pod)) else { return Ok(()) };
    let is_ended = written.after.as_ref().is_none_or(|after| is_deleting(after) || uid(after) != uid(pod));
    let Some(guest) = world.guests.get(&uid(pod)).filter(|guest| guest.is_of_vm && is_ended) else { return Ok(()) };
    if guest.power.is_down() {
        return Ok(());
    }
    let made = made_at(&uid(pod), store);
    let vm = Target::new(kind("VirtualMachine"), &guest.pod.namespace, &guest.vm.0);
    let later = store.changes.iter().filter(|change| change.target == vm && change.version + BEHIND > made);
    let is_reason = |change: &Change| match (&change.before, &change.after) {
        (Some(before), Some(after)) => {
            is_deleting(after) || after["spec"]["vm"]["state"] != "Running" || restarted(before) != restarted(after)
        }
        _ => change.after.is_none(),
    };
    if later.into_iter().any(is_reason) {
        return Ok(());
    }
    Err(format!(
        "the manager has ended the guest of {} in the Pod {}, and nobody wanted that",
        guest.vm.0, guest.pod.name
    ))
}

#[cfg(test)]
mod tests {
    use std::slice;

    use serde_json::json;

    use super::*;
    use crate::world::Power;

    fn target(kind_name: &str, name: &str) -> Target {
        Target::new(kind(kind_name), "vms", name)
    }

    fn guest(pod: &str, vm: &str, claim: (&str, &str)) -> Guest {
        Guest {
            pod: target("Pod", pod),
            node: "node-1".into(),
            vm: (vm.into(), format!("{vm}-uid")),
            claims: vec![(claim.0.into(), claim.1.into(), true)],
            power: Power::Booted,
            config: String::new(),
            reported: None,
            since: "2027-01-15T08:00:00Z".parse().unwrap(),
            is_of_vm: true,
        }
    }

    fn world(guests: &[Guest]) -> World {
        let guests = guests.iter().map(|guest| (guest.pod.name.clone(), guest.clone()));
        World { guests: guests.collect(), ..World::default() }
    }

    #[track_caller]
    fn breaks(result: Result<(), String>, why: &str) {
        assert!(result.as_ref().is_err_and(|found| found.contains(why)), "{result:?}");
    }

    #[test]
    fn two_guests_and_two_writers_are_found() {
        let (apple, pear) = (guest("a", "apple", ("core", "1")), guest("p", "pear", ("other", "2")));
        let check = |guests: &[Guest]| Invariants::default().state(&Store::default(), &world(guests));
        assert_eq!(check(&[apple.clone(), pear]), Ok(()));
        breaks(check(&[apple.clone(), guest("b", "apple", ("other", "2"))]), "two guests, in the Pods a, b");
        breaks(check(&[apple, guest("p", "pear", ("core", "1"))]), "two guests write to the claim 1");
    }

    #[test]
    fn another_claim_under_the_name_of_a_disk_is_found() {
        let mut invariants = Invariants::default();
        let mut check = |uid| {
            let it = guest("a", "apple", ("core", uid));
            invariants.state(&Store::default(), &world(slice::from_ref(&it)))
        };
        assert_eq!((check("1"), check("1")), (Ok(()), Ok(())));
        breaks(check("2"), "had the claim core");
        let other = guest("b", "pear", ("core", "1"));
        let users = invariants.state(&Store::default(), &world(slice::from_ref(&other)));
        breaks(users, "has the data of apple, and the guest of pear uses it");
    }

    /// What the manager must not write: an object before and after it.
    #[test]
    fn writes_of_what_is_not_the_managers_are_found() {
        let check = |target: &Target, before: Value, after: Value| {
            let some = |object: Value| (!object.is_null()).then(|| object.into());
            let written = Written { target, before: some(before), after: some(after), since: 0 };
            Invariants::default().written(&written, &Store::default(), &World::default())
        };
        let claim = json!({ "metadata": { "uid": "1" } });
        breaks(check(&target("PersistentVolumeClaim", "c"), claim, Value::Null), "has deleted the claim c");
        let persons =
            json!({ "metadata": { "managedFields": [{ "manager": "kubectl-edit", "fieldsV1": { "f:data": {} } }] } });
        breaks(check(&target("ConfigMap", "m"), persons, json!({ "data": {} })), "which a person made");
        let vm = |cpus: u32, state: &str, phase: &str| json!({ "spec": { "guestShutdownStops": true, "vm": { "maximumCpus": cpus, "state": state } }, "status": { "phase": phase } });
        let of_vm = |after| check(&target("VirtualMachine", "a"), vm(1, "Running", "x"), after);
        assert_eq!((of_vm(vm(1, "Running", "y")), of_vm(vm(1, "Stopped", "y"))), (Ok(()), Ok(())));
        breaks(of_vm(vm(2, "Running", "x")), "has changed the VM a");
        breaks(of_vm(Value::Null), "has deleted the VM a");
    }

    /// A store in which these versions of objects were made one after the other.
    fn history(states: &[(&str, &str, Value)]) -> Store {
        let mut store = Store::default();
        let mut last: BTreeMap<&str, Arc<Value>> = BTreeMap::new();
        for (version, (kind_name, name, after)) in (1..).zip(states) {
            let after = Arc::new(after.clone());
            let before = last.insert(name, after.clone());
            let target = target(kind_name, name);
            store.changes.push(Change { version, target, before, after: Some(after.clone()), last: after });
        }
        store
    }

    #[test]
    fn a_write_that_was_meant_for_an_earlier_object_is_found() {
        let map = || json!({ "metadata": { "uid": "new", "ownerReferences": [{ "uid": "of-a" }] } });
        let store = history(&[("ConfigMap", "a", json!({ "metadata": { "uid": "old" } })), ("ConfigMap", "a", map())]);
        let target = target("ConfigMap", "a");
        let sent = |since| {
            let written = Written { target: &target, before: Some(map().into()), after: None, since };
            Invariants::default().written(&written, &store, &World::default())
        };
        breaks(sent(1), "sent before ConfigMap a was made");
        assert_eq!(sent(2), Ok(()));
    }

    /// A Pod with a claim, of a VM with the UID `vm`.
    fn pod(claim: &str) -> Value {
        json!({
            "metadata": { "uid": "pod", "ownerReferences": [{ "uid": "vm" }] },
            "spec": { "volumes": [{ "persistentVolumeClaim": { "claimName": claim } }] },
        })
    }

    fn vm(state: &str, stops: bool) -> Value {
        json!({ "metadata": { "uid": "vm" }, "spec": { "guestShutdownStops": stops, "vm": { "state": state } } })
    }

    #[test]
    fn a_pod_without_what_it_mounts_is_found() {
        let target = target("Pod", "a");
        let written = Written { target: &target, before: None, after: Some(pod("core").into()), since: 0 };
        let check = |store| Invariants::default().written(&written, &store, &World::default());
        breaks(check(Store::default()), "without PersistentVolumeClaim core");
    }

    #[test]
    fn a_claim_that_goes_with_a_pod_is_found() {
        let target = target("Pod", "a");
        let deleted = json!({ "metadata": { "deletionTimestamp": "2027-01-15T08:00:00Z" } });
        let check = |state| {
            let store =
                history(&[("VirtualMachine", "a", vm(state, false)), ("PersistentVolumeClaim", "c", deleted.clone())]);
            let written = Written { target: &target, before: Some(pod("c").into()), after: None, since: 100 };
            Invariants::default().written(&written, &store, &World::default())
        };
        breaks(check("Running"), "with it goes the claim c");
        assert_eq!(check("Stopped"), Ok(()));
    }

    #[test]
    fn a_vm_that_is_started_although_its_guest_shut_itself_down_is_found() {
        let invariants = Invariants { shut_down: [("vm".into(), "pod".into())].into(), ..Invariants::default() };
        let target = target("Pod", "b");
        let check = |later: &[(&str, bool)]| {
            let first = [("VirtualMachine", "a", vm("Running", true)), ("Pod", "p", pod("c"))];
            let later = later.iter().map(|(state, stops)| ("VirtualMachine", "a", vm(state, *stops)));
            let store = history(&first.into_iter().chain(later).collect::<Vec<_>>());
            let made = json!({ "metadata": { "uid": "next", "ownerReferences": [{ "uid": "vm" }] } });
            let written = Written { target: &target, before: None, after: Some(made.into()), since: 100 };
            invariants.written(&written, &store, &World::default())
        };
        breaks(check(&[]), "although the guest before shut itself down");
        assert_eq!(check(&[("Stopped", true), ("Running", true)]), Ok(()));
        assert_eq!(check(&[("Running", false)]), Ok(()));
    }

    #[test]
    fn a_vm_that_is_stopped_as_it_was_is_found() {
        let target = target("VirtualMachine", "a");
        let states = [vm("Running", true), vm("Running", true), vm("Stopped", true)];
        let store = history(&states.clone().map(|vm| ("VirtualMachine", "a", vm)));
        let check = |since, stops| {
            let (before, after) = (vm("Running", stops).into(), vm("Stopped", stops).into());
            let written = Written { target: &target, before: Some(before), after: Some(after), since };
            stopped_as_known(&written, &store)
        };
        assert_eq!(check(2, true), Ok(()));
        breaks(check(1, true), "has stopped a");
        breaks(check(2, false), "has stopped a");
    }

    #[test]
    fn a_status_that_goes_back_is_found() {
        let target = target("VirtualMachine", "a");
        let about = |generation: i64| json!({ "status": { "observedGeneration": generation } });
        let check = |before, after| {
            let (before, after) = (about(before).into(), about(after).into());
            status_goes_on(&Written { target: &target, before: Some(before), after: Some(after), since: 0 })
        };
        assert_eq!(check(1, 2), Ok(()));
        breaks(check(2, 1), "was about the generation 2 and now is about 1");
    }

    #[test]
    fn a_guest_that_is_ended_for_no_reason_is_found() {
        let pod = json!({ "metadata": { "uid": "a" } });
        let world = world(&[guest("a", "apple", ("core", "1"))]);
        let target = target("Pod", "a");
        let written = Written { target: &target, before: Some(pod.into()), after: None, since: 0 };
        breaks(Invariants::default().written(&written, &Store::default(), &world), "nobody wanted that");
    }
}
