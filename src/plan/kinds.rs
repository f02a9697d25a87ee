//! The kinds of objects that the manager must list and watch before it plans a VM.
//!
//! Templates can render objects of any kind, so the kinds are not known in advance. A plan needs all objects of the kinds that are
//! rendered now, and all Pods and Secrets. Objects that earlier templates rendered are found by the kinds in `status.objectKinds`.

use kube::core::TypeMeta;

use crate::{
    api::VirtualMachine,
    object::{Rendered, is_builtin_kind, is_same_resource, pods},
    render::MAXIMUM_OBJECTS,
};

/// The kinds that must be listed and watched before the VM is planned: those of the rendered objects, Pods (a controller may create the
/// Pod), and Secrets (a person may have created the display secret).
pub fn needed(rendered: &[Rendered]) -> impl Iterator<Item = TypeMeta> {
    let secrets = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
    rendered.iter().map(|object| object.key.types()).chain([pods(), secrets])
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
    is_builtin_kind(kind) || rendered.iter().any(|object| is_same_resource(&object.key.types(), kind))
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
