//! Whether the disks of a VM are its own from the beginning: a pool with `spec.reset` gives nobody a disk that somebody else had.

use kube::ResourceExt;

use crate::{
    api::{VirtualMachine, status::NewDisks},
    object::{Rendered, UNUSED_ANNOTATION},
    observed::Observed,
};

/// The claims of a VM that nobody has had, by the times at which they and the VM were made. A VM that comes back from a backup, or under the name of
/// a former one, has older claims. `None`: somebody has had the VM, or not all of its claims exist.
pub(super) fn new_disks(vm: &VirtualMachine, observed: &Observed, rendered: &[Rendered]) -> Option<NewDisks> {
    vm.annotations().get(UNUSED_ANNOTATION)?;
    let made = vm.metadata.creation_timestamp.as_ref()?.0;
    let mut older = Vec::new();
    for key in rendered.iter().map(|object| &object.key).filter(|key| key.is_claim()) {
        let claim = observed.get(key).filter(|claim| claim.deleting.is_none())?;
        if claim.created? < made {
            older.push(key.name.clone());
        }
    }
    Some(NewDisks { vm_uid: vm.uid()?, older })
}
