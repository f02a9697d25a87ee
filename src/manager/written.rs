//! Machines as our writes of their status left them, until the watch has told it: a decision must not hang on what is older than
//! our own last word, and what the watch tells of that word alone brings nothing new.
//!
//! ```text
//!  answer to a write ─▶ Written ─▶ newer than what the store has? ─▶ look
//!                          └─ nothing left to do: settled ─▶ told by the watch, and in the store: no look
//! ```

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{
    Resource, ResourceExt,
    runtime::reflector::{ObjectRef, Store},
};

use crate::{api::VirtualMachine, cluster::packed::PackedMachine, process::lock};

/// What was written of each machine.
#[derive(Default)]
pub struct Written(Mutex<HashMap<ObjectRef<PackedMachine>, Last>>);

struct Last {
    vm: Arc<VirtualMachine>,
    settled: bool,
}

impl Written {
    /// Takes in the answer to a write.
    pub fn insert(&self, vm: Arc<VirtualMachine>) {
        lock(&self.0).insert(key(&*vm), Last { vm, settled: false });
    }

    /// Notes that our write, as which the machine is given, leaves nothing to do.
    pub fn settle(&self, vm: &VirtualMachine) {
        if let Some(last) = lock(&self.0).get_mut(&key(vm)).filter(|last| is_same(&last.vm.metadata, &vm.metadata)) {
            last.settled = true;
        }
    }

    /// The machine as we wrote it, if that is newer than the one at hand. It must be asked for in the same step as that is
    /// taken out of the store, because then it may be forgotten.
    pub fn newer(&self, vm: &PackedMachine) -> Option<Arc<VirtualMachine>> {
        let version =
            |meta: &ObjectMeta| meta.resource_version.as_ref().and_then(|version| version.parse::<u64>().ok());
        let (mut written, key) = (lock(&self.0), key(vm));
        let ours = written.get(&key)?.vm.clone();
        if ours.metadata.uid == vm.meta().uid && version(&ours.metadata) > version(vm.meta()) {
            return Some(ours);
        }
        written.remove(&key);
        None
    }

    /// Whether the watch tells of nothing but our write, which left nothing to do. Then the store has what we know, so that it
    /// is forgotten here; in the midst of a list it has not yet, and the machine is looked at.
    pub fn has_settled(&self, told: &PackedMachine, store: &Store<PackedMachine>) -> bool {
        let (mut written, key) = (lock(&self.0), key(told));
        let settled = written.get(&key).is_some_and(|last| last.settled && is_same(&last.vm.metadata, told.meta()))
            && store.get(&key).is_some_and(|kept| is_same(kept.meta(), told.meta()));
        if settled {
            written.remove(&key);
        }
        settled
    }

    /// Drops what was remembered of a machine that is gone.
    pub fn forget(&self, vm: &ObjectRef<PackedMachine>) {
        lock(&self.0).remove(vm);
    }
}

fn key(vm: &impl ResourceExt) -> ObjectRef<PackedMachine> {
    ObjectRef::new(&vm.name_any()).within(&vm.namespace().unwrap_or_default())
}

fn is_same(one: &ObjectMeta, other: &ObjectMeta) -> bool {
    one.uid == other.uid && one.resource_version == other.resource_version
}

#[cfg(test)]
mod tests {
    use kube::runtime::{reflector, watcher::Event};
    use serde_json::json;

    use super::*;

    fn machine(version: &str) -> VirtualMachine {
        crate::test_support::vm(|vm| vm["metadata"]["resourceVersion"] = json!(version))
    }

    fn packed(version: &str) -> PackedMachine {
        PackedMachine::from(&machine(version))
    }

    #[test]
    fn what_was_written_is_known_until_the_watch_tells_it() {
        let written = Written::default();
        assert!(written.newer(&packed("7")).is_none());
        written.insert(Arc::new(machine("8")));
        assert_eq!(written.newer(&packed("7")).unwrap().resource_version().as_deref(), Some("8"));
        assert!(written.newer(&packed("8")).is_none());
        assert!(written.newer(&packed("7")).is_none(), "it was told");
        // One of the same name that was made since is another one.
        written.insert(Arc::new(machine("8")));
        let anew = crate::test_support::vm(|vm| vm["metadata"]["uid"] = json!("another"));
        assert!(written.newer(&PackedMachine::from(&anew)).is_none());
    }

    #[test]
    fn only_our_settled_write_itself_brings_no_look() {
        let (store, mut writer) = reflector::store();
        let written = Written::default();
        written.insert(Arc::new(machine("8")));
        writer.apply_watcher_event(&Event::Apply(packed("8")));
        assert!(!written.has_settled(&packed("8"), &store), "something may be left to do");
        written.settle(&machine("7"));
        assert!(!written.has_settled(&packed("8"), &store), "an older write settled");
        written.settle(&machine("8"));
        assert!(!written.has_settled(&packed("7"), &store), "that is older");
        assert!(written.has_settled(&packed("8"), &store));
        assert!(!written.has_settled(&packed("8"), &store), "it was told");
    }

    #[test]
    fn while_machines_are_listed_again_nothing_is_forgotten() {
        let (store, mut writer) = reflector::store();
        let written = Written::default();
        writer.apply_watcher_event(&Event::Apply(packed("7")));
        written.insert(Arc::new(machine("8")));
        written.settle(&machine("8"));
        writer.apply_watcher_event(&Event::Init);
        writer.apply_watcher_event(&Event::InitApply(packed("8")));
        assert!(!written.has_settled(&packed("8"), &store));
        let kept = store.state().remove(0);
        assert_eq!(written.newer(&kept).unwrap().resource_version().as_deref(), Some("8"));
    }
}
