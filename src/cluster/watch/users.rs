//! Whose a claim, a Pod or a report is, if its labels and owners say nothing or something wrong: the status of each VM says which it uses.

use std::collections::BTreeSet;

use kube::{Resource as _, ResourceExt};

use super::{Children, place_of};
use crate::{
    api::VirtualMachine,
    claims,
    cluster::packed::{Packed, PackedVm, Used, VmName},
    object::{VM_ANNOTATION, belongs_to},
    observed::{Claimant, Object, whose::is_named_by},
    process::lock,
};

impl Children {
    /// Another VM that uses the claim, or whose Pod it is, as its status says. Anybody may change labels and owners.
    pub(in crate::cluster) fn other_user(&self, vm: &VirtualMachine, uid: &str) -> Option<String> {
        let uses = |other: &VirtualMachine| {
            other.status.as_ref().is_some_and(|status| {
                is_named_by(other, uid)
                    || status.claims.iter().any(|claim| !claim.unused && claim.uid.as_deref() == Some(uid))
            })
        };
        self.other_vm(vm, uid, uses)
    }

    /// Another VM that has the claim of that name, as its status says, if this VM does not have it.
    pub(in crate::cluster) fn other_holder(&self, vm: &VirtualMachine, claim: &str) -> Option<String> {
        let has = |vm: &VirtualMachine| {
            let mut claims = vm.status.iter().flat_map(|status| &status.claims);
            claims.any(|known| known.name == claim && !known.unused && known.uid.is_some())
        };
        if has(vm) { None } else { self.other_vm(vm, claim, has) }
    }

    /// Another VM of the namespace that uses the Pod or claim with this UID, or the claim of this name.
    fn other_vm(
        &self,
        vm: &VirtualMachine,
        uid_or_name: &str,
        uses: impl Fn(&VirtualMachine) -> bool,
    ) -> Option<String> {
        let used = Used::of(uid_or_name);
        let is_it = |other: &PackedVm| {
            let meta = other.meta();
            other.may_use(&used)
                && meta.namespace == vm.metadata.namespace
                && meta.name != vm.metadata.name
                && other.read().is_ok_and(|other| uses(&other))
        };
        self.vms.get()?.find(is_it)?.meta().name.clone()
    }

    /// The other VM that exists and to which a claim belongs. `None` for one that has the note of this VM, or that this VM has, and nobody has noted
    /// whose it is: nothing need be searched then.
    pub(in crate::cluster) fn claimant(&self, vm: &VirtualMachine, claim: &Object) -> Option<Claimant> {
        let note = belongs_to(&claim.annotations).map(|(_, uid)| uid);
        let is_own = match note {
            Some(uid) => Some(uid) == vm.uid().as_deref(),
            None => claims::uses(vm, &claim.uid) && claim.vm() == Some(vm.name_any().as_str()),
        };
        if is_own {
            return None;
        }
        if let Some(vm) = self.other_user(vm, &claim.uid) {
            return Some(Claimant { vm, uses: true });
        }
        let is_noted = |other: &PackedVm| {
            let meta = other.meta();
            meta.namespace == vm.metadata.namespace && meta.uid.is_some() && meta.uid.as_deref() == note
        };
        let noted = self.vms.get()?.find(is_noted)?.read().ok()?;
        let mut known = noted.status.iter().flat_map(|status| &status.claims);
        // Its status may not have it yet.
        let uses = !known.any(|known| known.unused && known.uid.as_ref() == Some(&claim.uid));
        Some(Claimant { vm: noted.name_any(), uses })
    }

    /// The Pods that the VM's status names ([`is_named_by`]), if they are kept under another name: somebody has changed owner and labels.
    pub(super) fn lost_pods(&self, vm: &VirtualMachine, found: &[Object]) -> Vec<Object> {
        let named = vm.status.iter().flat_map(|status| [&status.pod_uid, &status.reporter_uid]).flatten();
        let is_lost = |uid: &&String| self.has_object(uid) && found.iter().all(|object| object.uid != **uid);
        if !named.into_iter().any(|uid| is_lost(&uid)) {
            return Vec::new();
        }
        let index = lock(&self.index);
        let place = place_of(vm);
        let pods = index.elsewhere(&place).map(|(_, object)| object).filter(|object| object.key.is_pod());
        let named = pods.filter(|pod| is_named_by(vm, &pod.uid)).map(Packed::unpack);
        named.filter(|pod| pod.is_of(vm)).collect()
    }

    /// The claims that the VM uses, as its status says, and whose label names a VM that does not exist: a tool has overwritten it.
    pub(super) fn lost_claims(&self, vm: &VirtualMachine, found: &[Object]) -> Vec<Object> {
        let used = vm.status.iter().flat_map(|status| &status.claims).filter(|claim| !claim.unused);
        let used = used.filter_map(|claim| claim.uid.as_deref());
        let lost: Vec<&str> =
            used.filter(|uid| self.has_object(uid) && found.iter().all(|object| object.uid != *uid)).collect();
        let (false, Some(vms)) = (lost.is_empty(), self.vms.get()) else { return Vec::new() };
        let exists = |name: &str| {
            let is_it = |other: &PackedVm| {
                other.meta().namespace == vm.metadata.namespace && other.meta().name.as_deref() == Some(name)
            };
            vms.find(is_it).is_some()
        };
        let place = place_of(vm);
        let lost: Vec<(VmName, Object)> = {
            let index = lock(&self.index);
            let named = index.elsewhere(&place).filter(|(other, _)| !other.1.is_empty());
            let lost = named.filter(|(_, object)| object.key.is_claim() && lost.contains(&object.uid.as_ref()));
            lost.map(|(other, object)| (other.clone(), object.unpack())).collect()
        };
        let lost = lost.into_iter().filter(|(other, _)| !exists(&other.1)).map(|(_, mut claim)| {
            // From here on it is as if the annotation said whose it is.
            claim.annotations.insert(VM_ANNOTATION.into(), vm.name_any());
            claim
        });
        lost.collect()
    }

    /// The reports of the VM's Pods, and of those that its status names, if they are kept under another name: somebody has changed owner and
    /// labels. A report is about the Pod whose UID is its name.
    pub(super) fn lost_reports(&self, vm: &VirtualMachine, found: &[Object]) -> Vec<Object> {
        let named = vm.status.iter().flat_map(|status| [&status.pod_uid, &status.reporter_uid]).flatten();
        let pods = found.iter().filter(|object| object.key.is_pod()).map(|pod| &pod.uid);
        let about: BTreeSet<&String> = pods.chain(named).collect();
        let is_found = |name: &str| found.iter().any(|object| object.key.is_report() && object.key.name == name);
        let (namespace, _) = place_of(vm);
        let index = lock(&self.index);
        let lost = about.into_iter().filter(|name| !is_found(name));
        lost.filter_map(|name| index.report(&namespace, name)).map(Packed::unpack).collect()
    }
}
