//! An object of a VM, as a template renders it or as the cluster has it: its key, its lifetime, how it changes, and the labels and
//! annotations that carry this.
//!
//! Templates set the annotations `lifetime` and `update`. A Pod, and what makes the guest's Pod, is always `running` and `at-start`, a claim
//! always `keep`.

use std::{collections::BTreeMap, fmt, sync::Arc};

use kube::core::{ApiResource, TypeMeta};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The value of the label `app.kubernetes.io/name` on every object of a VM.
pub const APP_NAME: &str = "vm-runner";
/// The name of the runner's container in a VM's Pod (that of a legacy runner has the VM's name), and the value of the Pod's label `app.kubernetes.io/component`.
pub const CONTAINER_NAME: &str = "vm-runner";
/// The name of the sidecar that reports the status of the VM.
pub const AGENT_NAME: &str = "agent";
/// The name of the sidecar with passt, of a VM with a network of type pod.
pub const PASST_NAME: &str = "passt";
/// The value of the label `app.kubernetes.io/managed-by` on every object that the manager applies.
pub const MANAGED_BY: &str = "vm-operator";

/// The most that a ConfigMap may hold, in bytes (<https://kubernetes.io/docs/concepts/configuration/configmap/#motivation>).
pub const LARGEST_CONFIG_MAP: usize = 1 << 20;
/// The ConfigMap with the manager's configuration.
pub const CONFIG_MAP: &str = "vm-operator";
/// The ConfigMap with the templates over the built-in ones.
pub const TEMPLATES_MAP: &str = "vm-operator-templates";
/// The ConfigMap with the templates in use. The names of those of sets begin so too.
pub const IN_FORCE_MAP: &str = "vm-operator-in-force";
/// The ConfigMap with the configuration in use.
pub const CONFIG_IN_FORCE_MAP: &str = "vm-operator-in-force.configuration";
/// The begin of the names of the ConfigMaps with the versions of template sets that came in force.
pub const HISTORY_MAP: &str = "vm-operator-history";

/// A ConfigMap with this label in the manager's namespace is a template set. The label's value is the set's name.
pub const SET_LABEL: &str = "vmoperator.jdrupes.org/template-set";
/// The label with the name of the VM to which an object belongs.
pub const INSTANCE_LABEL: &str = "app.kubernetes.io/instance";
/// The name of the VM to which an object without an owner belongs, if a tool has given [`INSTANCE_LABEL`] another value: Argo CD with label
/// tracking, or `labels` of kustomize. For claims and display secrets in Git.
pub const VM_ANNOTATION: &str = "vmoperator.jdrupes.org/vm";
/// The name of the VM to which an object belongs, by its annotation or, without that, by its label. Anybody may change both.
pub fn named_vm<'a>(
    annotations: &'a BTreeMap<String, String>,
    labels: &'a BTreeMap<String, String>,
) -> Option<&'a String> {
    annotations.get(VM_ANNOTATION).or_else(|| labels.get(INSTANCE_LABEL))
}

/// The label with the role of an object, such as `vm-runner` or `display-secret`.
pub const COMPONENT_LABEL: &str = "app.kubernetes.io/component";
/// The value of [`COMPONENT_LABEL`] on a display secret.
pub const DISPLAY_SECRET: &str = "display-secret";

/// The hash of the rendered object. An object with the same hash need not be applied again.
pub const HASH_ANNOTATION: &str = "vmoperator.jdrupes.org/rendered";
/// The version of the manager that applied the object last.
pub const VERSION_ANNOTATION: &str = "vmoperator.jdrupes.org/version";
/// How long an object exists: see [`Lifetime`].
pub const LIFETIME_ANNOTATION: &str = "vmoperator.jdrupes.org/lifetime";
/// How an object changes: see [`Update`].
pub const UPDATE_ANNOTATION: &str = "vmoperator.jdrupes.org/update";
/// What a Pod is for. The guest's own Pod does not have it.
pub const ROLE_ANNOTATION: &str = "vmoperator.jdrupes.org/role";
/// The value of [`ROLE_ANNOTATION`] of a Pod that helps the guest.
pub const HELPER: &str = "helper";
/// A new value of this annotation restarts the VM, or starts a VM whose guest shut itself down. `kubectl rollout restart` uses a time
/// in the same way.
pub const RESTARTED_ANNOTATION: &str = "vmoperator.jdrupes.org/restartedAt";
/// A power state that outranks `spec.vm.state`, and until when, such as `Stopped 2026-11-26T12:00:00Z`.
pub const STATE_UNTIL_ANNOTATION: &str = "vmoperator.jdrupes.org/stateUntil";
/// The UID of a Pod that ends without waiting for its guest.
pub const FORCE_STOP_ANNOTATION: &str = "vmoperator.jdrupes.org/forceStop";
/// The UIDs of claims that do not exist any more and that the manager may replace by empty ones, separated by commas.
pub const REPLACE_CLAIM_ANNOTATION: &str = "vmoperator.jdrupes.org/replaceClaim";
/// The time of the guest's shutdown for which the manager set `spec.vm.state` to Stopped.
pub const GUEST_SHUTDOWN_ANNOTATION: &str = "vmoperator.jdrupes.org/guestShutdownAt";
/// The assignment from a pool for which the VM was started last: when it was assigned, and the user.
pub const STARTED_FOR_ANNOTATION: &str = "vmoperator.jdrupes.org/startedFor";

/// The label with the name of the pool that made a VM.
pub const POOL_LABEL: &str = "vmoperator.jdrupes.org/pool";
/// The hash of the template from which a pool made a VM.
pub const POOL_TEMPLATE_ANNOTATION: &str = "vmoperator.jdrupes.org/poolTemplate";
/// Nobody has had the VM yet. A pool with `spec.reset` makes its VMs with it, and the manager takes it away when somebody has had the VM.
pub const UNUSED_ANNOTATION: &str = "vmoperator.jdrupes.org/unused";
/// The UID of the VM for which the manager has made a claim. Only claims of VMs with [`UNUSED_ANNOTATION`] or [`PROTOTYPE_ANNOTATION`] get it: only
/// such a claim may be deleted with its VM ([`crate::claims::goes_with`]).
pub const MADE_FOR_ANNOTATION: &str = "vmoperator.jdrupes.org/madeFor";

/// The VM to which a claim belongs, as `NAME/UID`. The manager applies it ([`crate::claims::whose`]).
pub const BELONGS_TO_ANNOTATION: &str = "vmoperator.jdrupes.org/belongsTo";
/// The prototype of which vmctl has derived a VM, as `NAMESPACE/NAME`; also on the VM's claims.
pub const PROTOTYPE_ANNOTATION: &str = "vmoperator.jdrupes.org/prototype";
/// The name and the UID in [`BELONGS_TO_ANNOTATION`].
pub fn belongs_to(annotations: &BTreeMap<String, String>) -> Option<(&str, &str)> {
    annotations.get(BELONGS_TO_ANNOTATION)?.split_once('/')
}

/// The claim that Kubernetes makes for an ephemeral volume of a Pod
/// (<https://kubernetes.io/docs/concepts/storage/ephemeral-volumes/#persistentvolumeclaim-naming>).
pub fn ephemeral_claim(pod: &str, volume: &str) -> String {
    format!("{pod}-{volume}")
}

/// How long an object exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Lifetime {
    /// From the VM's creation to its deletion.
    Vm,
    /// Only while the VM runs.
    Running,
    /// The manager never deletes it.
    Keep,
}

/// How the manager changes an object that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Update {
    /// It applies the object whenever the rendered object changes.
    Live,
    /// It changes labels and annotations at once. The rest waits for the VM's next start, or until the VM has no Pod.
    AtStart,
    /// It creates the object when it is missing, and never changes it.
    Once,
}

/// API version, kind and name of an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ObjectKey {
    /// Such as `v1` or `apps/v1`.
    pub api_version: String,
    /// Such as `Pod`.
    pub kind: String,
    /// The name in the VM's namespace.
    pub name: String,
}

impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind, self.name)
    }
}

impl ObjectKey {
    /// The key of the claim of that name.
    pub fn claim(name: impl Into<String>) -> Self {
        let TypeMeta { api_version, kind } = persistent_volume_claims();
        Self { api_version, kind, name: name.into() }
    }

    /// The API version and the kind.
    pub fn types(&self) -> TypeMeta {
        TypeMeta { api_version: self.api_version.clone(), kind: self.kind.clone() }
    }

    /// The API group, such as `apps`; `None` for the core group.
    pub fn group(&self) -> Option<&str> {
        self.api_version.split_once('/').map(|(group, _)| group)
    }

    /// Whether both keys are of the same object, perhaps in two versions of one group
    /// (<https://kubernetes.io/docs/reference/using-api/#api-groups>).
    pub fn is_same_object(&self, other: &Self) -> bool {
        let is_same_kind = || self.kind == other.kind || is_same_resource(&self.types(), &other.types());
        self.name == other.name && self.group() == other.group() && is_same_kind()
    }

    /// Whether it is a Pod.
    pub fn is_pod(&self) -> bool {
        self.api_version == "v1" && self.kind == "Pod"
    }

    /// Whether it is a claim, which stores a person's data.
    pub fn is_claim(&self) -> bool {
        self.api_version == "v1" && self.kind == "PersistentVolumeClaim"
    }

    /// Whether decisions need the spec and the status of the object. Of all other kinds the manager requests and keeps only the metadata.
    pub fn needs_content(&self) -> bool {
        self.is_pod() || self.is_claim() || self.is_report()
    }

    /// Whether it is what a runner reports of a VM. The manager makes it, and no template does.
    pub fn is_report(&self) -> bool {
        self.kind == "VmReport" && self.api_version == "vmoperator.jdrupes.org/v1"
    }
}

/// An object as a template rendered it, complete with labels, owner and annotations.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Rendered {
    /// API version, kind and name.
    pub key: ObjectKey,
    /// The file of the template that rendered it.
    pub template: String,
    /// The template's name in its set.
    pub name: String,
    /// The files of the patches that changed it.
    pub patches: Vec<String>,
    /// The name that the container in which QEMU runs has in the VM's Pod.
    pub runner: String,
    /// How long it exists.
    pub lifetime: Lifetime,
    /// How the manager changes it when it exists.
    pub update: Update,
    /// Whether it is a Pod that helps the guest: it has [`ROLE_ANNOTATION`].
    pub is_helper: bool,
    /// The hash of everything that decides whether the object must be applied; also in its [`HASH_ANNOTATION`].
    pub hash: String,
    /// The whole object. It is shared with the plan.
    pub value: Arc<Value>,
}

/// The labels of every object of a VM.
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

/// The label selector that finds all objects of all VMs.
pub fn selector() -> String {
    format!("app.kubernetes.io/name={APP_NAME}")
}

/// The resource of a kind that the built-in templates render, of a [workload](is_workload), or of what runners report. Of other kinds only the API server knows the
/// plural.
pub fn constant_resource(kind: &TypeMeta) -> Option<ApiResource> {
    let (group, version) = kind.api_version.split_once('/').unwrap_or(("", &kind.api_version));
    let is_builtin = BUILTIN_KINDS.contains(&(kind.api_version.as_str(), kind.kind.as_str())) || *kind == reports();
    let is_workload = version == "v1" && WORKLOADS.contains(&(group, kind.kind.as_str()));
    (is_builtin || is_workload).then(|| ApiResource {
        group: group.to_owned(),
        version: version.to_owned(),
        api_version: kind.api_version.clone(),
        kind: kind.kind.clone(),
        plural: format!("{}s", kind.kind.to_ascii_lowercase()),
    })
}

/// Whether both are the same resource, perhaps in two versions of its group or with two spellings of the kind.
pub fn is_same_resource(one: &TypeMeta, other: &TypeMeta) -> bool {
    fn group(types: &TypeMeta) -> Option<&str> {
        types.api_version.split_once('/').map(|(group, _)| group)
    }
    one.kind.eq_ignore_ascii_case(&other.kind) && group(one) == group(other)
}

/// The kinds of objects that the built-in templates render, as `apiVersion` and `kind`. A VM may have such objects whatever its current
/// templates are.
pub const BUILTIN_KINDS: [(&str, &str); 5] =
    [("v1", "ConfigMap"), ("v1", "PersistentVolumeClaim"), ("v1", "Pod"), ("v1", "Secret"), ("v1", "Service")];

/// [`BUILTIN_KINDS`] as [`TypeMeta`].
pub fn builtin_kinds() -> impl Iterator<Item = TypeMeta> {
    BUILTIN_KINDS.into_iter().map(|(api_version, kind)| TypeMeta { api_version: api_version.into(), kind: kind.into() })
}

/// Whether the built-in templates render objects of this kind, or of another version of it.
pub fn is_builtin_kind(kind: &TypeMeta) -> bool {
    // Each reconcile asks this of each object.
    BUILTIN_KINDS.contains(&(kind.api_version.as_str(), kind.kind.as_str()))
        || builtin_kinds().any(|builtin| is_same_resource(&builtin, kind))
}

/// The kind Pod.
pub fn pods() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "Pod".into() }
}

/// The kind PersistentVolumeClaim.
pub fn persistent_volume_claims() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "PersistentVolumeClaim".into() }
}

/// The kind StatefulSet. Releases before 3.4 made one for each VM.
pub fn stateful_sets() -> TypeMeta {
    TypeMeta { api_version: "apps/v1".into(), kind: "StatefulSet".into() }
}

/// The kind VmReport.
pub fn reports() -> TypeMeta {
    TypeMeta { api_version: "vmoperator.jdrupes.org/v1".into(), kind: "VmReport".into() }
}

/// The kinds of Kubernetes that make Pods from a template (<https://kubernetes.io/docs/concepts/workloads/controllers/>).
const WORKLOADS: [(&str, &str); 7] = [
    ("apps", "StatefulSet"),
    ("apps", "Deployment"),
    ("apps", "ReplicaSet"),
    ("apps", "DaemonSet"),
    ("batch", "Job"),
    ("batch", "CronJob"),
    ("", "ReplicationController"),
];

/// Whether objects of this kind make Pods.
pub fn is_workload(key: &ObjectKey) -> bool {
    WORKLOADS.contains(&(key.group().unwrap_or_default(), &key.kind))
}
