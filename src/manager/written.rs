//! VMs as our writes of their status left them, until the watch shows it: a decision must not go by a VM that is older than our own
//! last write.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, ResourceExt, runtime::reflector::ObjectRef};

use crate::{api::VirtualMachine, cluster::packed::PackedVm, process::lock};

/// What the API server answered to our last write of each VM.
#[derive(Default)]
pub struct Written(Mutex<HashMap<ObjectRef<PackedVm>, Arc<VirtualMachine>>>);

impl Written {
    /// Keeps the answer to a write.
    pub fn insert(&self, vm: Arc<VirtualMachine>) {
        lock(&self.0).insert(key(&*vm), vm);
    }

    /// The VM as we wrote it, if that is newer than the one at hand. Otherwise the answer is forgotten: so it must be asked for in
    /// the same step in which the one at hand is taken out of the store.
    pub fn newer(&self, vm: &PackedVm) -> Option<Arc<VirtualMachine>> {
        let version =
            |meta: &ObjectMeta| meta.resource_version.as_ref().and_then(|version| version.parse::<u64>().ok());
        let (mut written, key) = (lock(&self.0), key(vm));
        let ours = written.get(&key)?.clone();
        if ours.metadata.uid == vm.meta().uid && version(&ours.metadata) > version(vm.meta()) {
            return Some(ours);
        }
        written.remove(&key);
        None
    }

    /// Drops what was kept of a VM that is gone.
    pub fn forget(&self, vm: &ObjectRef<PackedVm>) {
        lock(&self.0).remove(vm);
    }
}

fn key(vm: &impl ResourceExt) -> ObjectRef<PackedVm> {
    ObjectRef::new(&vm.name_any()).within(&vm.namespace().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn vm(version: &str) -> VirtualMachine {
        crate::test_support::vm(|vm| vm["metadata"]["resourceVersion"] = json!(version))
    }

    fn packed(version: &str) -> PackedVm {
        PackedVm::from(vm(version))
    }

    #[test]
    fn our_write_is_known_until_the_watch_shows_it() {
        let written = Written::default();
        assert!(written.newer(&packed("7")).is_none());
        written.insert(Arc::new(vm("8")));
        assert_eq!(written.newer(&packed("7")).unwrap().resource_version().as_deref(), Some("8"));
        assert!(written.newer(&packed("8")).is_none());
        assert!(written.newer(&packed("7")).is_none(), "the watch has shown it");
        // A VM of the same name that was created since is another one.
        written.insert(Arc::new(vm("8")));
        let anew = crate::test_support::vm(|vm| vm["metadata"]["uid"] = json!("another"));
        assert!(written.newer(&PackedVm::from(anew)).is_none());
    }
}
