//! Objects beside the Pod: what no Pod can mount. A Service that the API server refuses, or a NetworkPolicy whose name is taken, does not
//! hold up the start of the VM. The condition ObjectsReady reports it.

use super::Action;
use crate::object::{Lifetime, ObjectKey, Rendered};

/// The kinds that a Pod can mount, or needs otherwise to start.
const MOUNTED: [&str; 4] = ["ConfigMap", "PersistentVolumeClaim", "Secret", "ServiceAccount"];

/// Whether nothing that runs the guest needs the object with this key. `rendered` are the VM's objects.
pub fn is_beside(key: &ObjectKey, rendered: &[Rendered]) -> bool {
    let is_permanent = |object: &Rendered| object.key == *key && object.lifetime != Lifetime::Running;
    !may_be_mounted(key) && rendered.iter().any(is_permanent)
}

/// Whether the failure of an action holds up nothing. `step` is the index of its step: in the first one permanent objects are written, and
/// what stops the VM is deleted; in the second one there is what runs; in the last one are objects that are not needed any more.
pub fn is_action_beside(step: usize, action: &Action) -> bool {
    match (step, action) {
        (0, Action::Apply { .. } | Action::Label { .. }) => !may_be_mounted(action.key()),
        (0 | 1, _) => false,
        _ => true,
    }
}

fn may_be_mounted(key: &ObjectKey) -> bool {
    key.api_version == "v1" && MOUNTED.contains(&key.kind.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{nothing, rendered, vm};

    #[test]
    fn only_what_a_pod_can_mount_or_what_runs_with_it_holds_it_up() {
        let template = rendered(&vm(|_| ()), &nothing()).remove(0);
        let object = |(api_version, kind, lifetime): (&str, &str, Lifetime)| {
            let key = ObjectKey { api_version: api_version.into(), kind: kind.into(), name: "apple".into() };
            Rendered { key, lifetime, ..template.clone() }
        };
        let policy = "networking.k8s.io/v1";
        for (kind, expected) in [
            (("v1", "Service", Lifetime::Vm), true),
            ((policy, "NetworkPolicy", Lifetime::Vm), true),
            ((policy, "NetworkPolicy", Lifetime::Keep), true),
            (("example.org/v1", "Secret", Lifetime::Vm), true),
            // It may be what makes the Pod.
            (("example.org/v1", "Lamp", Lifetime::Running), false),
            (("v1", "Pod", Lifetime::Running), false),
            (("v1", "ConfigMap", Lifetime::Vm), false),
            (("v1", "Secret", Lifetime::Keep), false),
            (("v1", "ServiceAccount", Lifetime::Vm), false),
            (("v1", "PersistentVolumeClaim", Lifetime::Keep), false),
        ] {
            let object = object(kind);
            assert_eq!(is_beside(&object.key, std::slice::from_ref(&object)), expected, "{kind:?}");
            assert!(!is_beside(&object.key, &[]), "what is not rendered");
        }
    }
}
