//! The VMs that vmctl derives: each is its Pod's, and has no disk of a VM of another prototype.

use serde_json::Value;
use vm_operator::{
    object::PROTOTYPE_ANNOTATION,
    vmctl::{
        FIELD_MANAGER,
        derive::{POD_ANNOTATION, POD_UID_ANNOTATION},
    },
};

use super::{Invariants, Written};
use crate::{
    api::{kinds::kind, request::Target, store::Store},
    world::{World, has_ended, is_deleting, uid},
};

fn annotation<'a>(vm: &'a Value, name: &str) -> Option<&'a str> {
    vm["metadata"]["annotations"][name].as_str()
}

/// The Pod of a derived VM, if it exists and is not to end.
fn living_pod<'a>(store: &'a Store, vm: &Value) -> Option<&'a Value> {
    let (of, pod_uid) = (annotation(vm, POD_ANNOTATION)?, annotation(vm, POD_UID_ANNOTATION)?);
    let (namespace, name) = of.split_once('/')?;
    let pod = store.get(&Target::new(kind("Pod"), namespace, name))?;
    (uid(pod) == pod_uid && !is_deleting(pod) && !has_ended(pod)).then_some(pod)
}

/// A write of a vmctl: it makes VMs, and deletes those whose Pods are gone or going, and changes nothing.
pub fn written(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let name = &written.target.name;
    if written.before == written.after {
        return Ok(());
    }
    if written.target.kind != kind("VirtualMachine") {
        return Err(format!("a vmctl has written {name}, which is no VM"));
    }
    let Some(before) = &written.before else { return Ok(()) };
    let mut entries = before["metadata"]["managedFields"].as_array().into_iter().flatten();
    if !entries.any(|entry| entry["manager"] == FIELD_MANAGER && entry["operation"] == "Apply") {
        return Err(format!("a vmctl has written the VM {name}, which no vmctl has made"));
    }
    if written.after.as_ref().is_some_and(|after| !is_deleting(after)) {
        return Err(format!("a vmctl has changed the VM {name}"));
    }
    match living_pod(store, before) {
        Some(_) => Err(format!("a vmctl has deleted the VM {name}, whose Pod lives")),
        None => Ok(()),
    }
}

impl Invariants {
    /// A claim with the data of a derived VM is used by no VM of another prototype.
    pub(super) fn claims_stay_with_a_prototype(&mut self, store: &Store, world: &World) -> Result<(), String> {
        for guest in world.guests.values().filter(|guest| guest.is_of_vm) {
            let vm = store.get(&Target::new(kind("VirtualMachine"), &guest.pod.namespace, &guest.vm.0));
            let Some(vm) = vm.filter(|vm| uid(vm) == guest.vm.1) else { continue };
            let Some(prototype) = annotation(vm, PROTOTYPE_ANNOTATION) else { continue };
            for (claim, uid, _) in &guest.claims {
                let known = self.prototypes.entry(uid.clone()).or_insert_with(|| prototype.to_owned());
                if known != prototype {
                    return Err(format!(
                        "the claim {claim} has the data of a VM of {known}, and {}, which is of {prototype}, uses it",
                        guest.vm.0
                    ));
                }
            }
        }
        Ok(())
    }
}

/// When nothing happens any more, each derived VM has its Pod.
pub fn at_rest(store: &Store) -> Result<(), String> {
    let derived = store.of("VirtualMachine").filter(|(_, vm)| annotation(vm, POD_UID_ANNOTATION).is_some());
    for (target, vm) in derived.filter(|(_, vm)| !is_deleting(vm)) {
        if living_pod(store, vm).is_none() {
            return Err(format!("{} is there, and its Pod is gone", target.name));
        }
    }
    Ok(())
}
