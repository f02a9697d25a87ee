//! The VMs that the manager makes for pools: only these it may make, change and delete.

use serde_json::Value;
use vm_operator::{
    object::{POOL_LABEL, POOL_TEMPLATE_ANNOTATION},
    ownership::MEMBER_MANAGER,
};

use super::{BEHIND, Written};
use crate::{
    api::{kinds::kind, request::Target, store::Store},
    world::is_deleting,
};

/// The pool that controls a VM: its name and UID.
fn owner(vm: &Value) -> Option<(&str, &str)> {
    let mut owners = vm["metadata"]["ownerReferences"].as_array().into_iter().flatten();
    let pool = owners.find(|owner| owner["kind"] == "VmPool")?;
    Some((pool["name"].as_str()?, pool["uid"].as_str()?))
}

/// Whether the API server has noted that a pool has applied the VM.
fn is_made_by_pool(vm: &Value) -> bool {
    let mut entries = vm["metadata"]["managedFields"].as_array().into_iter().flatten();
    entries.any(|entry| entry["manager"] == MEMBER_MANAGER && entry["operation"] == "Apply")
}

/// The manager makes a VM only for a pool that exists, or did a moment ago, and that wants one of that name.
pub fn made(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let vm = &written.target.name;
    let Some((pool, uid)) = written.after.as_ref().and_then(|made| owner(made)) else {
        return Err(format!("the manager has made the VM {vm}"));
    };
    let target = Target::new(kind("VmPool"), &written.target.namespace, pool);
    let wants = |object: &Value| wants(object, pool, uid, vm);
    if store.get(&target).is_some_and(wants) || lately(&target, written, store).any(wants) {
        return Ok(());
    }
    Err(format!("the manager has made the VM {vm}, which the pool {pool} with the UID {uid} does not want"))
}

/// Whether the manager has applied the template of a pool.
pub fn is_template_applied(before: &Value, after: &Value) -> bool {
    let hash = |vm: &Value| vm["metadata"]["annotations"][POOL_TEMPLATE_ANNOTATION].clone();
    hash(before) != hash(after) || owner(before) != owner(after)
}

/// The manager changes a VM of a pool only if it has made it, and nobody has it.
pub fn changed(written: &Written<'_>) -> Result<(), String> {
    let (Some(before), Some(after)) = (&written.before, &written.after) else { return Ok(()) };
    is_pools(&written.target.name, before, "changed")?;
    match (owner(before), owner(after)) {
        (Some(was), Some(is)) if was.1 != is.1 => {
            Err(format!("the manager has given the VM {} of a pool to another one", written.target.name))
        }
        _ => Ok(()),
    }
}

/// The manager deletes a VM only if it has made it for a pool, nobody has it, and the pool did not want it, or not a moment ago.
pub fn deleted(written: &Written<'_>, store: &Store) -> Result<(), String> {
    let Some(before) = written.before.as_ref() else { return Ok(()) };
    is_pools(&written.target.name, before, "deleted")?;
    let Some((pool, uid)) = owner(before) else { return Ok(()) };
    let target = Target::new(kind("VmPool"), &written.target.namespace, pool);
    let wants = |object: &Value| wants(object, pool, uid, &written.target.name);
    let mut lately = lately(&target, written, store);
    if store.get(&target).is_some_and(wants) && lately.all(wants) {
        return Err(format!("the manager has deleted the VM {}, which the pool {pool} wants", written.target.name));
    }
    Ok(())
}

/// Whether a pool, as it was or is, has this UID and wants a VM of that name.
fn wants(object: &Value, pool: &str, uid: &str, vm: &str) -> bool {
    let replicas = object["spec"]["replicas"].as_u64().unwrap_or_default();
    let number = vm.strip_prefix(&format!("{pool}-")).and_then(|number| number.parse::<u64>().ok());
    object["metadata"]["uid"] == *uid && number.is_some_and(|number| number < replicas)
}

/// What a pool was in the moment before the manager sent a write, and since.
fn lately<'a>(pool: &'a Target, written: &'a Written<'_>, store: &'a Store) -> impl Iterator<Item = &'a Value> {
    let lately = store.changes.iter().rev().take_while(|change| change.version + BEHIND > written.since);
    lately.filter(|change| change.target == *pool).filter_map(|change| change.before.as_deref())
}

fn is_pools(name: &str, vm: &Value, what: &str) -> Result<(), String> {
    if !is_made_by_pool(vm) || vm["metadata"]["labels"][POOL_LABEL].is_null() {
        return Err(format!("the manager has {what} the VM {name}, which no pool has made"));
    }
    if !vm["status"]["assignment"].is_null() {
        return Err(format!("the manager has {what} the VM {name}, which somebody has"));
    }
    Ok(())
}

/// When nothing happens any more, each pool has the VMs that it wants, unless somebody has what is in the way.
pub fn at_rest(store: &Store) -> Result<(), String> {
    for (target, pool) in store.of("VmPool").filter(|(_, pool)| !is_deleting(pool)) {
        let replicas = pool["spec"]["replicas"].as_u64().unwrap_or_default();
        for number in 0..replicas {
            let name = format!("{}-{number}", target.name);
            if store.get(&Target::new(kind("VirtualMachine"), &target.namespace, &name)).is_none() {
                return Err(format!("the pool {} wants {replicas} VMs, and there is no {name}", target.name));
            }
        }
        let names_pool =
            |vm: &Value| vm["spec"]["pools"].as_array().is_some_and(|all| all.contains(&target.name.clone().into()));
        let own = store.of("VirtualMachine").filter(|(_, vm)| {
            owner(vm).is_some_and(|(_, uid)| pool["metadata"]["uid"] == *uid)
                && is_made_by_pool(vm)
                && names_pool(vm)
                && vm["status"]["assignment"].is_null()
        });
        for (vm, object) in own {
            let number =
                vm.name.strip_prefix(&format!("{}-", target.name)).and_then(|number| number.parse::<u64>().ok());
            if number.is_none_or(|number| number >= replicas) {
                return Err(format!("the pool {} wants {replicas} VMs, and there is {}", target.name, vm.name));
            }
            let cpus = |object: &Value| object["spec"]["vm"]["currentCpus"].clone();
            if cpus(object) != cpus(&pool["spec"]["template"]) {
                return Err(format!("{} is not as the template of {} is", vm.name, target.name));
            }
        }
        if pool["status"]["observedGeneration"] != pool["metadata"]["generation"] {
            return Err(format!("the status of the pool {} is about another generation", target.name));
        }
    }
    Ok(())
}
