//! What an object is, whether a template rendered it or the cluster has it: what it is called, how long it lives, how it
//! changes, and the labels and annotations that say so.
//!
//! The annotations `lifetime` and `update` say how an object lives. Templates set them; a Pod is always `running` and
//! `at-start`, a claim always `keep`.

use std::{collections::BTreeMap, fmt, sync::Arc};

use kube::core::{ApiResource, GroupVersionKind, TypeMeta};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The value of the label `app.kubernetes.io/name` on every object of a VM.
pub const APP_NAME: &str = "vm-runner";
/// The name of the runner's container in a VM's Pod, and the value of the Pod's label `app.kubernetes.io/component`.
pub const CONTAINER_NAME: &str = "vm-runner";
/// The value of the label `app.kubernetes.io/managed-by` on every object that the manager applies.
pub const MANAGED_BY: &str = "vm-operator";

/// A ConfigMap with this label in the manager's namespace is a template set; the label's value is the set's name.
pub const SET_LABEL: &str = "vmoperator.jdrupes.org/template-set";
/// The label with the name of the VM that an object belongs to.
pub const INSTANCE_LABEL: &str = "app.kubernetes.io/instance";
/// The label that says what part of a VM an object is.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// The value of [`COMPONENT_LABEL`] on a display secret.
pub const DISPLAY_SECRET: &str = "display-secret";

/// The hash of what was rendered, on each object: an object whose hash is the same need not be applied again.
pub const HASH_ANNOTATION: &str = "vmoperator.jdrupes.org/rendered";
/// The manager's version that applied the object last.
pub const VERSION_ANNOTATION: &str = "vmoperator.jdrupes.org/version";
/// How long an object lives: see [`Lifetime`].
pub const LIFETIME_ANNOTATION: &str = "vmoperator.jdrupes.org/lifetime";
/// How an object changes: see [`Update`].
pub const UPDATE_ANNOTATION: &str = "vmoperator.jdrupes.org/update";
/// A new text here restarts the machine (or starts one whose guest shut itself down), as `kubectl rollout restart` does it
/// with a time.
pub const RESTARTED_ANNOTATION: &str = "vmoperator.jdrupes.org/restartedAt";
/// The UID of a Pod that is not to wait for its guest any longer when it ends.
pub const FORCE_STOP_ANNOTATION: &str = "vmoperator.jdrupes.org/forceStop";
/// The time of the guest's shutdown for which the manager set the state to Stopped.
pub const GUEST_SHUTDOWN_ANNOTATION: &str = "vmoperator.jdrupes.org/guestShutdownAt";

/// How long an object lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Lifetime {
    /// From the machine's creation to its deletion.
    Vm,
    /// Only while the machine runs.
    Running,
    /// Never deleted by us.
    Keep,
}

/// How an object that exists changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Update {
    /// Applied whenever the rendering changes.
    Live,
    /// Only labels and annotations are applied, the rest waits for the machine's next start.
    AtStart,
    /// Made when missing, then left alone.
    Once,
}

/// What an object is called.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectKey {
    /// Such as `v1` or `apps/v1`.
    pub api_version: String,
    /// Such as `Pod`.
    pub kind: String,
    /// The name in the machine's namespace.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

impl ObjectKey {
    /// What kind it is.
    pub fn types(&self) -> TypeMeta {
        TypeMeta { api_version: self.api_version.clone(), kind: self.kind.clone() }
    }

    /// Its API group, such as `apps`; of the core group none.
    pub fn group(&self) -> Option<&str> {
        self.api_version.split_once('/').map(|(group, _)| group)
    }

    /// Whether both are the same object, perhaps in two versions of one group
    /// (<https://kubernetes.io/docs/reference/using-api/#api-groups>).
    pub fn is_same_object(&self, other: &Self) -> bool {
        let is_same_kind = || self.kind == other.kind || is_same_resource(&self.types(), &other.types());
        self.name == other.name && self.group() == other.group() && is_same_kind()
    }

    /// Whether it is a Pod.
    pub fn is_pod(&self) -> bool {
        self.api_version == "v1" && self.kind == "Pod"
    }

    /// Whether it is a claim, that is, holds a person's data.
    pub fn is_claim(&self) -> bool {
        self.api_version == "v1" && self.kind == "PersistentVolumeClaim"
    }

    /// Whether decisions need what is in it. Of all others only the metadata is asked for and kept.
    pub fn is_looked_into(&self) -> bool {
        self.is_pod() || self.is_claim()
    }
}

/// An object as a template made it, complete: labels, owner, annotations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rendered {
    /// What it is called.
    pub key: ObjectKey,
    /// The file of the template that made it.
    pub template: String,
    /// The template's name in its set.
    pub name: String,
    /// The files of the patches that changed it.
    pub patches: Vec<String>,
    /// How long it lives.
    pub lifetime: Lifetime,
    /// How it changes.
    pub update: Update,
    /// The hash of all that decides whether it must be applied; also on the object itself.
    pub hash: String,
    /// The whole object. Shared, because it is in the plan, too.
    pub value: Arc<Value>,
}

/// The labels that every object of a machine has.
pub fn labels(vm: &str) -> BTreeMap<String, String> {
    [
        ("app.kubernetes.io/name", APP_NAME),
        ("app.kubernetes.io/instance", vm),
        ("app.kubernetes.io/managed-by", MANAGED_BY),
    ]
    .into_iter()
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .collect()
}

/// The selector that finds all objects of all machines.
pub fn selector() -> String {
    format!("app.kubernetes.io/name={APP_NAME}")
}

/// The resource of a kind. Its plural is derived from the kind, as all built-in kinds and most others form it.
pub fn resource(key: &TypeMeta) -> ApiResource {
    let (group, version) = key.api_version.split_once('/').unwrap_or(("", &key.api_version));
    ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &key.kind))
}

/// Whether both are one resource, perhaps in two versions of its group, or with the kind spelled in two ways that have one plural.
pub fn is_same_resource(one: &TypeMeta, other: &TypeMeta) -> bool {
    // A plural begins as its kind does, and takes long to make.
    let initial = |types: &TypeMeta| types.kind.chars().next().map(|initial| initial.to_ascii_lowercase());
    if initial(one) != initial(other) {
        return false;
    }
    let (one, other) = (resource(one), resource(other));
    one.group == other.group && one.plural == other.plural
}

/// The kinds of objects that the built-in templates make, as `apiVersion` and `kind`: a VM may have such objects whatever its templates
/// are now.
pub const BUILTIN_KINDS: [(&str, &str); 5] =
    [("v1", "ConfigMap"), ("v1", "PersistentVolumeClaim"), ("v1", "Pod"), ("v1", "Secret"), ("v1", "Service")];

/// [`BUILTIN_KINDS`] as Kubernetes' type.
pub fn builtin_kinds() -> impl Iterator<Item = TypeMeta> {
    BUILTIN_KINDS.into_iter().map(|(api_version, kind)| TypeMeta { api_version: api_version.into(), kind: kind.into() })
}

/// Whether the built-in templates make objects of this kind, or of another version of it.
pub fn is_builtin_kind(kind: &TypeMeta) -> bool {
    builtin_kinds().any(|builtin| is_same_resource(&builtin, kind))
}

/// The kind Pod.
pub fn pods() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "Pod".into() }
}
