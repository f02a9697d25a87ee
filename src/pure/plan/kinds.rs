//! The kinds of objects that the manager must list and watch before it plans a VM.
//!
//! Templates can render objects of any kind, so the kinds are not known in advance. A plan needs all objects of the kinds that are
//! rendered now, and all Pods and Secrets. Objects that earlier templates rendered are found by the kinds in `status.objectKinds`.

use kube::core::TypeMeta;

use crate::{
    api::VirtualMachine,
    object::{Rendered, is_builtin_kind, is_same_resource, pods, stateful_sets},
    render::MAXIMUM_OBJECTS,
};

/// The kinds that must be listed and watched before the VM is planned: those of the rendered objects, Pods (a controller may create the
/// Pod), StatefulSets (releases before 3.4 made one for each VM, which makes its Pod again), and Secrets (a person may have created the
/// display secret).
pub fn needed(rendered: &[Rendered]) -> impl Iterator<Item = TypeMeta> {
    let secrets = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
    rendered.iter().map(|object| object.key.types()).chain([pods(), stateful_sets(), secrets])
}

/// The kinds in `status.objectKinds`, of which earlier templates may have left objects, without the kinds that [`needed`] or the built-in
/// templates cover.
///
/// Everyone who may write the status can write these kinds. A kind becomes a part of a URL, so kinds that no API server can have are
/// left out.
pub fn from_status(vm: &VirtualMachine, rendered: &[Rendered]) -> Vec<TypeMeta> {
    let kinds = vm.status.iter().flat_map(|status| &status.object_kinds).take(MAXIMUM_OBJECTS).cloned();
    kinds.map(TypeMeta::from).filter(|kind| is_valid(kind) && !is_needed(kind, rendered)).collect()
}

/// Whether objects of that kind are watched anyway, because the built-in templates or the VM's templates render them.
pub fn is_needed(kind: &TypeMeta, rendered: &[Rendered]) -> bool {
    is_builtin_kind(kind)
        || *kind == stateful_sets()
        || rendered.iter().any(|object| is_same_resource(&object.key.types(), kind))
}

fn is_valid(kind: &TypeMeta) -> bool {
    let is_label =
        |label: &str| !label.is_empty() && label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    let is_name = |name: &str| name.split('.').all(is_label);
    let version = match kind.api_version.split_once('/') {
        Some((group, version)) if is_name(group) => version,
        Some(_) => return false,
        None => &kind.api_version,
    };
    is_label(version) && is_label(&kind.kind)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::{nothing, rendered, vm};

    fn kind(api_version: &str, kind: &str) -> TypeMeta {
        TypeMeta { api_version: api_version.into(), kind: kind.into() }
    }

    /// The built-in objects of a VM, and one of the kind NetworkPolicy.
    fn with_policy() -> Vec<Rendered> {
        let mut objects = rendered(&vm(|_| ()), &nothing());
        let mut policy = objects[0].clone();
        (policy.key.api_version, policy.key.kind) = ("networking.k8s.io/v1".into(), "NetworkPolicy".into());
        objects.push(policy);
        objects
    }

    /// The kinds that are watched because `status.objectKinds` names these.
    fn from(kinds: &[(&str, &str)], rendered: &[Rendered]) -> Vec<TypeMeta> {
        let kinds: Vec<_> =
            kinds.iter().map(|(version, kind)| json!({ "apiVersion": version, "kind": kind })).collect();
        from_status(&vm(|vm| vm["status"] = json!({ "objectKinds": kinds })), rendered)
    }

    #[test]
    fn rendered_kinds_pods_stateful_sets_and_secrets_are_needed() {
        let always = [kind("v1", "Pod"), kind("apps/v1", "StatefulSet"), kind("v1", "Secret")];
        assert_eq!(needed(&[]).collect::<Vec<_>>(), always);
        let all: Vec<TypeMeta> = needed(&with_policy()).collect();
        for wanted in [kind("v1", "ConfigMap"), kind("networking.k8s.io/v1", "NetworkPolicy")].iter().chain(&always) {
            assert!(all.contains(wanted), "{wanted:?}");
        }
        assert!(!all.contains(&kind("v1", "Service")), "this VM has none");
    }

    #[test]
    fn kinds_of_the_status_are_watched_unless_they_are_watched_anyway() {
        let kinds = [("networking.k8s.io/v1beta1", "NetworkPolicy"), ("v1", "Service"), ("example.org/v1", "Lamp")];
        let lamp = kind("example.org/v1", "Lamp");
        assert_eq!(from(&kinds, &[]), [kind("networking.k8s.io/v1beta1", "NetworkPolicy"), lamp.clone()]);
        assert_eq!(from(&kinds, &with_policy()), [lamp], "another version of a rendered kind");
        let many = vec![("example.org/v1", "Lamp"); MAXIMUM_OBJECTS + 1];
        assert_eq!(from(&many, &[]).len(), MAXIMUM_OBJECTS);
        assert_eq!(from_status(&vm(|_| ()), &[]), []);
    }

    #[test]
    fn only_kinds_that_an_api_server_can_have_are_watched() {
        for (api_version, kind, expected) in [
            ("networking.k8s.io/v1", "NetworkPolicy", true),
            ("example.org/v1alpha1", "HTTPRoute", true),
            ("v1", "ReplicationController", true),
            // These kinds are watched for all VMs, however the kind is spelled.
            ("v1", "Pod", false),
            ("v1", "pod", false),
            ("v1", "configmap", false),
            // These are paths, not kinds.
            ("example.org/v1/namespaces/x/pods?x=", "Y", false),
            ("..", "Y", false),
            ("../v1", "Y", false),
            ("example..org/v1", "Y", false),
            ("/v1", "Y", false),
            ("v1", "a/b", false),
            ("v1", "", false),
        ] {
            assert_eq!(!from(&[(api_version, kind)], &[]).is_empty(), expected, "{api_version} {kind}");
        }
    }
}
