//! Which kinds of objects must be known before a VM is planned.
//!
//! No list of kinds is known in advance: templates make objects of any kind. What is rendered now must be known completely, and so must
//! Pods and Secrets. What earlier templates made is found by the kinds that the VM's status names.

use kube::core::TypeMeta;

use crate::{
    api::VirtualMachine,
    object::{Rendered, is_builtin_kind, is_same_resource, pods},
    render::MAXIMUM_OBJECTS,
};

/// The kinds of which all objects must be known. Pods also where something else makes them: without its Pod nothing can be said of a
/// VM. Secrets also where none is rendered: the display's may be a person's.
pub fn needed(rendered: &[Rendered]) -> impl Iterator<Item = TypeMeta> {
    let secrets = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
    rendered.iter().map(|object| object.key.types()).chain([pods(), secrets])
}

/// The kinds that the VM's status names, where objects of earlier templates may be, without those that are known because of what is
/// rendered.
///
/// Anybody who may write a status may write these. A kind becomes a part of a URL, so what no API server can have is left out.
pub fn from_status(vm: &VirtualMachine, rendered: &[Rendered]) -> Vec<TypeMeta> {
    let kinds = vm.status.iter().flat_map(|status| &status.object_kinds).take(MAXIMUM_OBJECTS).cloned();
    kinds.map(TypeMeta::from).filter(|kind| is_valid(kind) && !is_needed(kind, rendered)).collect()
}

/// Whether objects of that kind are known because the built-in templates make them, or because they are rendered.
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
