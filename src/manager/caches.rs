//! What the manager knows of a namespace without asking the API server.

use std::sync::Arc;

use kube::runtime::reflector::Store;
use tokio::sync::watch;

use crate::{
    api::VirtualMachine,
    cluster::{packed::PackedVm, watch::Children},
    metrics::VmSummary,
    observed::Observed,
    process::clock,
};

/// The VMs and objects of a namespace, as the watches know them.
#[derive(Clone)]
pub struct Caches {
    /// The VMs.
    pub vms: Store<PackedVm>,
    /// Their objects.
    pub children: Arc<Children>,
    /// Becomes true when all VMs, and the kinds of objects that they usually have, are listed.
    pub started: watch::Receiver<bool>,
}

impl Caches {
    /// All VMs.
    pub fn vms(&self) -> impl Iterator<Item = VirtualMachine> + use<> {
        self.vms.state().into_iter().filter_map(|vm| vm.read().ok())
    }

    /// What the metrics show of all VMs.
    pub fn summaries(&self) -> impl Iterator<Item = VmSummary> + use<> {
        self.vms.state().into_iter().map(|vm| vm.summary.clone())
    }

    /// The VMs for which `is_wanted` is true, with their objects.
    pub fn observed<F: Fn(&VirtualMachine) -> bool>(
        &self,
        is_wanted: F,
    ) -> impl Iterator<Item = (VirtualMachine, Observed)> + use<'_, F> {
        self.vms().filter(is_wanted).map(|vm| {
            let observed = self.children.observe(&vm, clock::now());
            (vm, observed)
        })
    }
}
