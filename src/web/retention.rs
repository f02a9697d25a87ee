//! Until when VMs of pools are kept for the people who have them.

use k8s_openapi::jiff::Timestamp;

use super::store::Store;
use crate::{
    actions::pool::member,
    api::VirtualMachine,
    assignment::{Pool, Pools},
};

/// Until when a VM is kept for whoever has it. `None`: for ever, or that is not known.
pub(super) fn kept_until(vm: &VirtualMachine, store: &Store, now: Timestamp) -> Option<Timestamp> {
    let name = vm.status.as_ref()?.pools.assignment.as_ref()?.pool.as_deref()?;
    let spec = store.pool(vm.metadata.namespace.as_deref()?, name)?;
    member(vm, now).taken_from(&Pools::from([(name.to_owned(), Pool::of(name, None, &spec))]))
}
