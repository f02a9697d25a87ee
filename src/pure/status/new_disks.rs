//! Whether the disks of a VM are its own from the beginning: a pool with `spec.reset` gives nobody a disk that somebody else had.

use kube::ResourceExt;

use crate::{
    api::{VirtualMachine, status::NewDisks},
    claims,
    object::{MADE_FOR_ANNOTATION, Rendered, UNUSED_ANNOTATION},
    observed::Observed,
};

/// The claims of a VM that nobody has had, by the VM for which the manager has made them ([`claims::note_origin`]). A VM that comes back from a backup is
/// another one. `None`: somebody has had the VM, or not all of its claims exist yet.
pub(super) fn new_disks(vm: &VirtualMachine, observed: &Observed, rendered: &[Rendered]) -> Option<NewDisks> {
    vm.annotations().get(UNUSED_ANNOTATION)?;
    let vm_uid = vm.uid()?;
    let mut others = Vec::new();
    for key in rendered.iter().map(|object| &object.key).filter(|key| key.is_claim()) {
        let claim = observed.get(key).filter(|claim| claim.deleting.is_none());
        let is_own = match claim {
            Some(claim) => claim.annotations.get(MADE_FOR_ANNOTATION) == Some(&vm_uid),
            None if claims::missing(vm, &key.name).is_some() => false,
            None => return None,
        };
        if !is_own {
            others.push(key.name.clone());
        }
    }
    Some(NewDisks { vm_uid, others })
}
