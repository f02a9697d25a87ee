//! What must hold after each step, whatever happens.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::Value;

use crate::{
    api::{
        kinds::{kind, kinds},
        request::Target,
        store::{Change, Store},
    },
    people::{is_persons, is_restored},
    world::{Guest, Power, World, has_ended, is_deleting, mounted, uid},
};

/// What the checks remember.
#[derive(Clone, Default)]
pub struct Invariants {
    /// The UID of the claim on which a VM (by its UID) has the disk with that name, since a guest has run with it.
    disks: BTreeMap<(String, String), String>,
}

/// An object before and after a write of the manager.
pub struct Written<'a> {
    pub target: &'a Target,
    pub before: Option<Arc<Value>>,
    pub after: Option<Arc<Value>>,
}

impl Invariants {
    /// A write of the manager has taken effect.
    pub fn written(&self, written: &Written<'_>, store: &Store, world: &World) -> Result<(), String> {
        if written.before == written.after {
            return Ok(());
        }
        claim_is_kept(written)?;
        foreign_is_untouched(written)?;
        spec_is_untouched(written)?;
        pod_writes_alone(written, store)?;
        guest_is_ended_for_a_reason(written, store, world)
    }

    /// Something has happened.
    pub fn state(&mut self, store: &Store, world: &World) -> Result<(), String> {
        one_guest_for_each_vm(world)?;
        one_writer_for_each_claim(world)?;
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
            }
        }
        Ok(())
    }

    /// What must hold when nothing has happened for long.
    pub fn at_rest(store: &Store, world: &World) -> Result<(), String> {
        for (target, vm) in store.of("VirtualMachine") {
            let is_owner_of = |object: Option<&Value>| {
                let owners = object.map(|object| &object["metadata"]["ownerReferences"]).and_then(Value::as_array);
                owners.into_iter().flatten().any(|owner| owner["uid"] == vm["metadata"]["uid"])
            };
            let booted = || world.guests.values().filter(|guest| guest.power == Power::Booted);
            let in_own_pod = booted().any(|guest| is_owner_of(store.get(&guest.pod)));
            // One in a Pod whose owner was taken away counts, too.
            let claims = format!("{}-", target.name);
            let on_own_claim = booted().flat_map(|guest| &guest.claims).any(|(name, ..)| name.starts_with(&claims));
            let conditions = vm["status"]["conditions"].as_array().into_iter().flatten();
            let is_true = |name: &str| {
                conditions.clone().any(|condition| condition["type"] == name && condition["status"] == "True")
            };
            if is_true("Running") && !(in_own_pod || on_own_claim) || !is_true("Running") && in_own_pod {
                return Err(format!(
                    "the status of {} says Running={}, and its guest runs: {in_own_pod}",
                    target.name,
                    is_true("Running")
                ));
            }
            let wants = vm["spec"]["vm"]["state"] == "Running";
            if is_true("Ready") && wants != (in_own_pod || on_own_claim) {
                return Err(format!(
                    "{} is Ready, its state should be Running: {wants}, and its guest runs: {in_own_pod}",
                    target.name
                ));
            }
        }
        Ok(())
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

/// A person's Pod may be made at any time; a guest that starts beside it is [`pod_writes_alone`].
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
    let may_change = is_claim(written.target) || written.target.kind == kind("VirtualMachine");
    match &written.before {
        Some(before) if !may_change && is_persons(before) => Err(format!(
            "the manager has changed {} {}, which a person made",
            kinds()[written.target.kind].name,
            written.target.name
        )),
        _ => Ok(()),
    }
}

/// Of a VM the manager writes nothing but the status, `spec.vm.state` when a guest has shut down, and what identifies that.
fn spec_is_untouched(written: &Written<'_>) -> Result<(), String> {
    if written.target.kind != kind("VirtualMachine") {
        return Ok(());
    }
    let Some(after) = &written.after else {
        return Err(format!("the manager has deleted the VM {}", written.target.name));
    };
    let Some(before) = &written.before else {
        return Err(format!("the manager has made the VM {}", written.target.name));
    };
    let ours = |object: &Value| {
        let mut object = object.clone();
        for pointer in ["/metadata/managedFields", "/metadata/resourceVersion", "/metadata/generation", "/status"] {
            object.pointer_mut(pointer).map(Value::take);
        }
        if after["spec"]["vm"]["state"] == "Stopped" {
            object.pointer_mut("/spec/vm/state").map(Value::take);
            object.pointer_mut("/metadata/annotations").map(Value::take);
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
    let is_it = |object: &Option<Arc<Value>>| object.as_ref().is_some_and(|object| uid(object) == uid(pod));
    let made = store.changes.iter().find(|change| is_it(&change.after)).map_or(0, |change| change.version);
    let vm = Target::new(kind("VirtualMachine"), &guest.pod.namespace, &guest.vm.0);
    let later = store.changes.iter().filter(|change| change.target == vm && change.version + BEHIND > made);
    let restarted = |object: &Value| object["metadata"]["annotations"]["vmoperator.jdrupes.org/restartedAt"].clone();
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
    }

    /// What the manager must not write: an object before and after it.
    #[test]
    fn writes_of_what_is_not_the_managers_are_found() {
        let check = |target: &Target, before: Value, after: Value| {
            let some = |object: Value| (!object.is_null()).then(|| object.into());
            let written = Written { target, before: some(before), after: some(after) };
            Invariants::default().written(&written, &Store::default(), &World::default())
        };
        let claim = json!({ "metadata": { "uid": "1" } });
        breaks(check(&target("PersistentVolumeClaim", "c"), claim, Value::Null), "has deleted the claim c");
        let persons =
            json!({ "metadata": { "managedFields": [{ "manager": "kubectl-edit", "fieldsV1": { "f:data": {} } }] } });
        breaks(check(&target("ConfigMap", "m"), persons, json!({ "data": {} })), "which a person made");
        let vm = |cpus: u32, state: &str, phase: &str| json!({ "spec": { "vm": { "maximumCpus": cpus, "state": state } }, "status": { "phase": phase } });
        let of_vm = |after| check(&target("VirtualMachine", "a"), vm(1, "Running", "x"), after);
        assert_eq!((of_vm(vm(1, "Running", "y")), of_vm(vm(1, "Stopped", "y"))), (Ok(()), Ok(())));
        breaks(of_vm(vm(2, "Running", "x")), "has changed the VM a");
        breaks(of_vm(Value::Null), "has deleted the VM a");
    }

    #[test]
    fn a_guest_that_is_ended_for_no_reason_is_found() {
        let pod = json!({ "metadata": { "uid": "a" } });
        let world = world(&[guest("a", "apple", ("core", "1"))]);
        let target = target("Pod", "a");
        let written = Written { target: &target, before: Some(pod.into()), after: None };
        breaks(Invariants::default().written(&written, &Store::default(), &world), "nobody wanted that");
    }
}
