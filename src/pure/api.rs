//! The custom resources `VirtualMachine` and `VmPool`, which users write and read, and `VmReport`, by which runners report.
//!
//! `kubectl explain` prints the doc comments of the fields. Rules that the API server can check are in the schema or in CEL expressions.
//! [`crd`] generates the files in `crds/` from this module. The fields of the spec are in this file, in the order in which users see them, and
//! those of the display and of networks in [`display`] and [`network`].
//!
//! Every number and text has bounds: a value that the manager can't use is refused where it is written. What is stored already, under
//! another definition for example, is read part by part ([`stored`]).
//!
//! No field inside a list has a default. The API server would write the default into the live object, and the object would differ from
//! Git for ever. The manager fills in such defaults when it renders ([`crate::render::context`]).
#![allow(
    dead_code,
    reason = "KubeSchema makes a copy of each struct, in which nobody reads a field that is not in the schema"
)]

pub mod cd;
pub mod conditions;
pub mod crd;
pub mod display;
pub mod login_pools;
pub mod network;
pub mod pending;
pub mod pool;
pub mod quantity;
pub mod reasons;
pub mod report;
pub mod schema;
pub mod stats;
pub mod status;
mod status_views;
pub mod stored;

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema, ResourceExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use display::{Clipboard, Display, Spice, Vnc};
pub use network::{Network, PodNetwork, TapNetwork, UserNetwork};
pub use pending::{PendingChange, Subject};
pub use pool::{PoolPermission, VmPool, VmPoolSpec};
pub use quantity::Quantity;
pub use reasons::Reason;
pub use report::{VmReport, VmReportSpec, VmReportStatus};
pub use status::{Assignment, Identity, ObjectKind, Problem, RenderedFrom, RunnerStatus, VirtualMachineStatus};
pub use stored::{InvalidSpec, StoredVm};

/// The API group of the resources.
pub const GROUP: &str = "vmoperator.jdrupes.org";

/// A virtual machine.
///
/// `spec` describes the VM's hardware and whether it should run. The operator renders all objects of the VM (a Pod, claims for its disks,
/// a ConfigMap, ...) from templates. Claims are never deleted, so the disks outlive the VM.
#[derive(CustomResource, KubeSchema, Clone, Debug, Serialize, Deserialize, PartialEq)]
#[kube(
    group = "vmoperator.jdrupes.org",
    version = "v1",
    kind = "VirtualMachine",
    plural = "vms",
    singular = "vm",
    namespaced,
    status = "VirtualMachineStatus",
    derive = "PartialEq",
    doc = "A virtual machine that runs in a Pod.",
    category = "all",
    printcolumn(name = "State", type_ = "string", json_path = ".status.power", description = "The power state in effect"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", description = "The VM's current state in one word"),
    printcolumn(name = "Ready", type_ = "boolean", json_path = ".status.ready", description = "Whether the guest is up"),
    printcolumn(name = "CPUs", type_ = "integer", json_path = ".status.cpus", description = "CPUs of the running guest"),
    printcolumn(name = "RAM", type_ = "string", json_path = ".status.ram", description = "Memory of the running guest"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.nodeName", description = "The node it runs on"),
    printcolumn(name = "Address", type_ = "string", json_path = ".status.addresses[0].address", description = "Its first address"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp"),
    printcolumn(name = "Override", type_ = "string", json_path = ".status.stateOverride.state", priority = 1, description = "The power state that outranks the wanted one"),
    printcolumn(name = "Until", type_ = "string", json_path = ".status.stateOverride.until", priority = 1, description = "Until when it does"),
    printcolumn(name = "Set", type_ = "string", json_path = ".status.templates.set", priority = 1, description = "The template set that it selects"),
    printcolumn(name = "Templates", type_ = "string", json_path = ".status.templates.version", priority = 1, description = "The version of the template set from which its objects were rendered"),
    printcolumn(name = "Restart", type_ = "string", json_path = ".status.conditions[?(@.type==\"RestartRequired\")].status", priority = 1, description = "Whether changes wait for the next start"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason", priority = 1, description = "Why it is ready or not"),
    validation = Rule::new("self.metadata.name.size() <= 63").message("the name of a VM is used as a label and as a host name: at most 63 characters"),
)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineSpec {
    /// The runner's image. Default: the one in the manager's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<Image>,
    /// Requests and limits of the runner's container, as in a Pod. Default: the current CPUs and RAM, divided by the manager's
    /// `cpuOvercommit` and `ramOvercommit`, as requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resources: Option<Resources>,
    /// The node to run on, without asking the scheduler; as in a Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub node_name: Option<String>,
    /// Labels that a node must have; as in a Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::label_map")]
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Scheduling constraints; as in a Pod (`kubectl explain pod.spec.affinity`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub affinity: Option<Value>,
    /// The template for QEMU's command line.
    #[serde(default)]
    pub runner_template: RunnerTemplate,
    /// The templates from which the VM's objects are rendered. Default: the operator's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub templates: Option<Templates>,
    /// Values for the templates (`values`). They override the defaults of the template set and of the manager's configuration. The template
    /// set defines which values exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub template_values: Option<Value>,
    /// What happens after the guest shuts itself down. false: the VM starts again. true: the VM stays down until someone starts it.
    #[serde(default)]
    pub guest_shutdown_stops: bool,
    /// Labels and annotations for the display's Service of type LoadBalancer. The manager's configuration decides whether VMs have such a
    /// Service; a VM with `{}` has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_balancer_service: Option<ServiceMetadata>,
    /// Data for cloud-init's NoCloud data source, given to the guest as a disk with the label CIDATA.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cloud_init: Option<CloudInit>,
    /// What users and roles may do with this VM, for programs that offer VMs to users.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 256))]
    pub permissions: Vec<VmPermission>,
    /// The pools to which this VM belongs.
    #[serde(default)]
    #[schemars(length(max = 64), inner(length(max = 253)))]
    pub pools: Vec<String>,
    /// The runner's log levels, in the format of java.util.logging (see docs/logging.md).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 65536))]
    pub logging_properties: Option<String>,
    /// The VM's hardware and power state.
    pub vm: Machine,
    /// The fields of a stored spec that can't be read ([`stored`]). They are missing here, so nothing may be rendered from such a spec.
    /// This is no field of the resource.
    #[serde(skip)]
    #[schemars(skip)]
    pub invalid: Option<InvalidSpec>,
}

/// The runner's image: either `source`, or `repository` and `path`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("has(self.source) != (has(self.repository) && has(self.path))").message("give either source, or repository and path"),
)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    /// The whole reference, such as `registry.example.org/vm-runner:1.0`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub source: Option<String>,
    /// The registry and its leading path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub repository: Option<String>,
    /// The image's path in the repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub path: Option<String>,
    /// The tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 512))]
    pub version: Option<String>,
    /// When to pull; as in a Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull_policy: Option<PullPolicy>,
}

impl Image {
    /// The whole reference; `None` if the parts make none.
    pub fn reference(&self) -> Option<String> {
        self.source.clone().or_else(|| {
            let path = format!("{}/{}", self.repository.as_ref()?, self.path.as_ref()?);
            Some(self.version.as_ref().map_or(path.clone(), |version| format!("{path}:{version}")))
        })
    }
}

/// When the kubelet pulls an image.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PullPolicy {
    Always,
    Never,
    IfNotPresent,
}

/// Requests and limits, as in a container (`kubectl explain pod.spec.containers.resources`).
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Resources {
    /// The most that the container may use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::resource_list")]
    pub limits: Option<BTreeMap<String, Value>>,
    /// The resources that are reserved for the container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::resource_list")]
    pub requests: Option<BTreeMap<String, Value>>,
    /// Names of entries of the Pod's `resourceClaims`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::any_object_list")]
    pub claims: Vec<Value>,
}

impl VirtualMachine {
    /// The name of the template set that the VM selects.
    pub fn template_set(&self) -> Option<&str> {
        self.spec.templates.as_ref()?.set.as_deref()
    }

    /// Whether its guest runs: the condition Running.
    pub fn runs(&self) -> bool {
        self.status.as_ref().is_some_and(|status| conditions::is_true(&status.conditions, conditions::RUNNING))
    }

    /// Whether `spec.vm.state` can't be read.
    pub fn is_state_unknown(&self) -> bool {
        self.spec.invalid.as_ref().is_some_and(|invalid| invalid.is_state_unknown)
    }

    /// `NAMESPACE/NAME`, for messages and log lines.
    pub fn full_name(&self) -> String {
        full_name(self.namespace().as_deref(), &self.name_any())
    }
}

/// `NAMESPACE/NAME`, for messages and log lines.
pub fn full_name(namespace: Option<&str>, name: &str) -> String {
    format!("{}/{name}", namespace.unwrap_or_default())
}

/// The templates of a VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct Templates {
    /// The name of one of the operator's template sets. Default: the templates of VMs without a set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 63), regex(pattern = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub set: Option<String>,
}

/// The template for QEMU's command line.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct RunnerTemplate {
    /// The template's name in the runner's image. Default: the runner's standard template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 512))]
    pub source: Option<String>,
    /// true: each start uses the template of the runner's image. false: the VM keeps the copy that was made at its first start.
    #[serde(default = "yes")]
    pub update: bool,
}

impl Default for RunnerTemplate {
    fn default() -> Self {
        Self { source: None, update: true }
    }
}

/// Labels and annotations for a Service. Those of the VM override those of the manager's configuration; null or an empty value removes an
/// entry.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ServiceMetadata {
    /// Labels to add, or to remove with null or an empty value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::nullable_texts")]
    pub labels: Option<NullableTexts>,
    /// Annotations to add, or to remove with null or an empty value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::nullable_texts")]
    pub annotations: Option<NullableTexts>,
}

/// Labels or annotations whose values may be null.
pub type NullableTexts = BTreeMap<String, Option<String>>;

impl ServiceMetadata {
    /// Whether it is `{}`: the VM has no Service.
    pub fn is_empty(&self) -> bool {
        let Self { labels, annotations } = self;
        labels.is_none() && annotations.is_none()
    }
}

/// Data for cloud-init (<https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html>).
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[schemars(transform = schema::either_data_or_source)]
#[serde(rename_all = "camelCase")]
pub struct CloudInit {
    /// The `meta-data`. `instance-id` defaults to a hash of the VM's namespace and name and of all of this data,
    /// `local-hostname` to the VM's name.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "schema::any_map")]
    pub meta_data: BTreeMap<String, Value>,
    /// The `user-data`: keys of a cloud-config, or a text. It gets a first line `#cloud-config`, unless it is a text of a kind that cloud-init
    /// knows by its beginning, such as `#!` or a MIME message. What cloud-init can't use is told in the condition SpecQuestionable.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub user_data: Option<Value>,
    /// The `vendor-data`: defaults of a platform, in the forms of `user-data`, over which cloud-init puts the `user-data`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub vendor_data: Option<Value>,
    /// The `network-config`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub network_config: Option<Value>,
    /// Takes the `user-data` from a Secret or ConfigMap of this namespace. The kubelet mounts it into the Pod; the manager never reads it.
    /// A Secret needs the label `vmoperator.jdrupes.org/cloud-init` (with any value), or another one in the manager's configuration.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user_data_from: Option<DataSource>,
    /// Takes the `network-config` from a Secret or ConfigMap of this namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network_config_from: Option<DataSource>,
}

impl CloudInit {
    /// The objects from which it takes data: kinds and names.
    pub fn sources(&self) -> impl Iterator<Item = (&'static str, &str)> {
        self.user_data_from.iter().chain(&self.network_config_from).flat_map(|source| {
            let secret = source.secret_key_ref.iter().map(|key| ("Secret", key.name.as_str()));
            secret.chain(source.config_map_key_ref.iter().map(|key| ("ConfigMap", key.name.as_str())))
        })
    }
}

/// A key of a Secret or of a ConfigMap.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.secretKeyRef) != has(self.configMapKeyRef)").message("give either secretKeyRef or configMapKeyRef"))]
#[serde(rename_all = "camelCase")]
pub struct DataSource {
    /// A key of a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeyRef>,
    /// A key of a ConfigMap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeyRef>,
}

/// An object of the same namespace and a key in its data.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct KeyRef {
    /// The object's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// The key in its data.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

/// What a user or a role may do with a VM.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.user) != has(self.role)").message("give either user or role"))]
pub struct VmPermission {
    /// A user's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub user: Option<String>,
    /// A role's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub role: Option<String>,
    /// What is allowed; `*` is everything.
    #[serde(default)]
    #[schemars(length(max = 16))]
    pub may: Vec<VmAction>,
}

/// Something that a permission allows.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub enum VmAction {
    Start,
    Stop,
    Reset,
    AccessConsole,
    TakeConsole,
    #[serde(rename = "*")]
    Everything,
}

/// The VM's power state and hardware: CPUs, memory, disks, networks, display.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq)]
#[x_kube(
    validation = Rule::new("has(self.maximumCpus) != has(self.cpuTopology)").message("give exactly one of maximumCpus and cpuTopology"),
    validation = Rule::new("!has(self.maximumCpus) || !has(self.currentCpus) || self.currentCpus <= self.maximumCpus").message("currentCpus must not be more than maximumCpus"),
    validation = Rule::new("!has(self.cpuTopology) || !has(self.currentCpus) || self.currentCpus <= self.cpuTopology.sockets * (self.cpuTopology.diesPerSocket < 1 ? 1 : self.cpuTopology.diesPerSocket) * (self.cpuTopology.coresPerDie < 1 ? 1 : self.cpuTopology.coresPerDie) * (self.cpuTopology.threadsPerCore < 1 ? 1 : self.cpuTopology.threadsPerCore)").message("currentCpus must not be more than the CPUs of cpuTopology"),
    validation = Rule::new("!has(self.currentRam) || !has(self.maximumRam) || quantity(string(self.currentRam).replace(' ', '').replace('B', '')).compareTo(quantity(string(self.maximumRam).replace(' ', '').replace('B', ''))) <= 0").message("currentRam must not be more than maximumRam"),
    validation = Rule::new("!has(self.maximumRam) || quantity(string(self.maximumRam).replace(' ', '').replace('B', '').replace('ki', 'Ki')).compareTo(quantity('1Mi')) >= 0").message("maximumRam must be at least 1Mi: a number without a unit is in bytes"),
    validation = Rule::new("!has(self.rtcTimezone) || self.rtcBase == 'localtime'").message("rtcTimezone needs rtcBase: localtime"),
    validation = Rule::new("!has(self.currentRam) || quantity(string(self.currentRam).replace(' ', '').replace('B', '').replace('ki', 'Ki')).compareTo(quantity('1Mi')) >= 0").message("currentRam must be at least 1Mi: a number without a unit is in bytes"),
)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    /// Whether the VM should run. Leave this field out of Git if people or programs start and stop the VM. A VM that never had it is stopped.
    #[serde(default)]
    #[schemars(transform = schema::without_default)]
    pub state: PowerState,
    /// The VM's UUID (SMBIOS). Default: generated once and kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}$"))]
    pub machine_uuid: Option<String>,
    /// Whether the VM has a TPM 2.0.
    #[serde(default)]
    pub use_tpm: bool,
    /// The firmware: `bios`; `uefi` (with 2 MB of variables, or 4 MB if the runner's image has only those); `uefi-4m` (4 MB); `secure` and
    /// `secure-4m` are the same with Secure Boot.
    #[serde(default)]
    pub firmware: Firmware,
    /// Whether the firmware shows a boot menu.
    #[serde(default)]
    pub boot_menu: bool,
    /// The time in seconds that the guest has to power down. After that the runner ends QEMU.
    #[serde(default = "powerdown_timeout")]
    #[schemars(range(min = 0, max = 86400))]
    pub powerdown_timeout: u32,
    /// QEMU's CPU model. `host` means the node's CPU with KVM, and the best model that QEMU can emulate with TCG.
    #[serde(default = "host")]
    #[schemars(length(min = 1, max = 4096), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))]
    pub cpu_model: String,
    /// `kvm`, `tcg` (emulation), or `auto`: KVM if it works on the node, else TCG.
    #[serde(default)]
    pub accelerator: Accelerator,
    /// The number of CPUs that the running VM can get at most.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub maximum_cpus: Option<u32>,
    /// The CPUs as sockets, dies, cores, threads, instead of `maximumCpus`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_topology: Option<CpuTopology>,
    /// The current number of CPUs. A change takes effect in the running VM. Default: the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024))]
    pub current_cpus: Option<u32>,
    /// The memory that the running VM can get at most, such as `8Gi` or `8 GiB`.
    #[serde(default = "one_gigabyte")]
    pub maximum_ram: Quantity,
    /// The current memory. A change takes effect in the running VM. Default: the maximum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_ram: Option<Quantity>,
    /// The base of the real time clock: `utc`, `localtime` (the time of `rtcTimezone`) or a point in time.
    #[serde(default = "utc")]
    #[schemars(regex(pattern = "^(utc|localtime|[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}:[0-9]{2})?)$"))]
    pub rtc_base: String,
    /// The time zone whose time the real time clock has with `rtcBase: localtime`, such as `Europe/Berlin`. Default: UTC. Windows expects local
    /// time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 64), regex(pattern = "^[A-Za-z][A-Za-z0-9_+/-]*$"))]
    pub rtc_timezone: Option<String>,
    /// The clock that drives the real time clock: `host`, `rt` or `vm`.
    #[serde(default = "rt")]
    #[schemars(regex(pattern = "^(host|rt|vm)$"))]
    pub rtc_clock: String,
    /// The network interfaces.
    #[serde(default)]
    #[schemars(length(max = 32))]
    #[x_kube(validation = Rule::new("self.filter(n, has(n.pod)).size() <= 1").message("only one network can be of type pod: a Pod has one address"), validation = Rule::new("!self.exists(n, has(n.user)) || !self.exists(n, has(n.tap))").message("user can't be beside tap: the VM is in the network of its node then, and user would lead the guest to the node's own addresses"), validation = Rule::new("self.all(a, !has(a.name) || self.exists_one(b, has(b.name) && b.name == a.name))").message("the names of the networks must be different"))]
    pub networks: Vec<Network>,
    /// The disks and CD drives.
    #[serde(default)]
    #[schemars(length(max = 64))]
    #[x_kube(validation = Rule::new("self.all(a, !has(a.volumeClaimTemplate) || !has(a.volumeClaimTemplate.metadata) || !has(a.volumeClaimTemplate.metadata.name) || self.exists_one(b, has(b.volumeClaimTemplate) && has(b.volumeClaimTemplate.metadata) && has(b.volumeClaimTemplate.metadata.name) && b.volumeClaimTemplate.metadata.name == a.volumeClaimTemplate.metadata.name))").message("the names of the disks must be different"), validation = Rule::new("self.all(a, !has(a.cdrom) || !has(a.cdrom.name) || self.exists_one(b, has(b.cdrom) && has(b.cdrom.name) && b.cdrom.name == a.cdrom.name))").message("the names of the CD drives must be different"), validation = Rule::new("self.filter(d, has(d.cdrom)).size() <= 6").message("a VM can have at most 6 CD drives"))]
    pub disks: Vec<Disk>,
    /// The display.
    #[serde(default)]
    pub display: Display,
    /// When you increase this number, the runner resets the running VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4_294_967_295_u32))]
    pub reset_count: Option<u32>,
    /// When you increase this number, the runner asks the running guest to reboot. That needs QEMU's guest agent in the guest; until it
    /// answers, the condition ChangesApplied says what the reboot waits for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 4_294_967_295_u32))]
    pub reboot_count: Option<u32>,
    /// Whether the guest is paused: its CPUs stand still, and its memory stays. It can be changed while the VM runs. A VM that is being stopped
    /// goes on, so that its guest can shut down.
    #[serde(default, skip_serializing_if = "is_false")]
    pub paused: bool,
    /// What happens when the guest's kernel panics, or, without `watchdog`, its watchdog is not fed in time. The VM has a panic device (pvpanic)
    /// and a watchdog (iTCO) then. Default: the VM has neither, and the guest decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_panic: Option<OnPanic>,
    /// The watchdog of the VM's chipset (iTCO), which the guest feeds once a program in it has begun to. Default: the VM has none, unless it has
    /// `onPanic`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub watchdog: Option<Watchdog>,
    /// `latest`: from its next start on, the guest finds its devices arranged in the newest way (`status.identity.hardware`). Without it the guest
    /// keeps what it found at its first start. An arrangement stays when this is taken out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hardware: Option<HardwareWish>,
}

impl Machine {
    /// The CPUs that the running VM can get at most.
    pub fn most_cpus(&self) -> u32 {
        self.cpu_topology.map(|topology| topology.cpus()).or(self.maximum_cpus).unwrap_or(1)
    }

    /// The CPUs that the guest has when it starts. The Java VM-Operator allowed more than the maximum, and the guest then had the maximum.
    pub fn cpus(&self) -> u32 {
        self.current_cpus.map_or(self.most_cpus(), |current| current.min(self.most_cpus()))
    }

    /// As [`Machine::cpus`], for the memory.
    pub fn ram(&self) -> &Quantity {
        let current = self.current_ram.as_ref().filter(|current| current.bytes() <= self.maximum_ram.bytes());
        current.unwrap_or(&self.maximum_ram)
    }
}

/// What happens when the guest panics.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum OnPanic {
    /// The VM is reset, after 5 s, and later the more often that happens: at most every 5 min.
    Restart,
    /// The VM is stopped, and stays down until somebody starts it.
    Stop,
    /// The guest stays paused as it is, so that somebody can look at it.
    Keep,
}

impl From<OnPanic> for WatchdogAction {
    /// What happens when the watchdog of a VM that reacts to panics is not fed.
    fn from(on_panic: OnPanic) -> Self {
        match on_panic {
            OnPanic::Restart => Self::Reset,
            OnPanic::Stop => Self::Poweroff,
            OnPanic::Keep => Self::Pause,
        }
    }
}

/// A watchdog.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct Watchdog {
    /// What happens when the guest has begun to feed it, and does not feed it in time any more. Default: `reset`.
    #[serde(default)]
    pub action: WatchdogAction,
}

/// What happens when a watchdog is not fed in time.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum WatchdogAction {
    /// The VM is reset, after 5 s, and later the more often that happens: at most every 5 min.
    #[default]
    Reset,
    /// The VM is stopped, and stays down until somebody starts it.
    Poweroff,
    /// The guest stays paused as it is, so that somebody can look at it.
    Pause,
    /// The guest goes on, and the log of the runner says it.
    None,
}

/// Which arrangement of its devices a VM asks for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum HardwareWish {
    /// The newest one that its runner knows.
    Latest,
}

/// Whether a VM should run.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PowerState {
    #[default]
    Stopped,
    Running,
}

/// The VM's firmware.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum Firmware {
    Bios,
    #[default]
    Uefi,
    #[serde(rename = "uefi-4m")]
    Uefi4m,
    Secure,
    #[serde(rename = "secure-4m")]
    Secure4m,
}

/// What executes the guest's instructions.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)]
pub enum Accelerator {
    #[default]
    Auto,
    Kvm,
    Tcg,
}

/// The CPUs as in QEMU's option `-smp`. 0 means that the level does not exist.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(
    validation = Rule::new("self.sockets * (self.diesPerSocket < 1 ? 1 : self.diesPerSocket) * (self.coresPerDie < 1 ? 1 : self.coresPerDie) * (self.threadsPerCore < 1 ? 1 : self.threadsPerCore) <= 4096").message("QEMU has at most 4096 CPUs"),
)]
#[serde(rename_all = "camelCase")]
pub struct CpuTopology {
    /// Sockets.
    #[serde(default = "one")]
    #[schemars(range(min = 1, max = 64))]
    pub sockets: u32,
    /// Dies in a socket.
    #[serde(default)]
    #[schemars(range(min = 0, max = 64))]
    pub dies_per_socket: u32,
    /// Cores on a die.
    #[serde(default)]
    #[schemars(range(min = 0, max = 1024))]
    pub cores_per_die: u32,
    /// Threads of a core.
    #[serde(default)]
    #[schemars(range(min = 0, max = 8))]
    pub threads_per_core: u32,
}

impl CpuTopology {
    /// All CPUs of the topology.
    pub fn cpus(&self) -> u32 {
        [self.dies_per_socket, self.cores_per_die, self.threads_per_core]
            .iter()
            .fold(self.sockets.max(1), |cpus, level| cpus.saturating_mul((*level).max(1)))
    }
}

/// A disk: either `volumeClaimTemplate` or `cdrom`.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq)]
#[x_kube(
    validation = Rule::new("has(self.volumeClaimTemplate) != has(self.cdrom)").message("a disk is either a volumeClaimTemplate or a cdrom"),
    validation = Rule::new("!has(self.serial) || has(self.volumeClaimTemplate)").message("a CD drive has no serial number"),
)]
pub struct Disk {
    /// The claim that stores the disk. The manager creates it if it does not exist, and never deletes it.
    #[serde(default, rename = "volumeClaimTemplate", skip_serializing_if = "Option::is_none")]
    pub volume_claim_template: Option<VolumeClaimTemplate>,
    /// A CD drive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cdrom: Option<Cdrom>,
    /// The disk's serial number, by which Linux guests find it as `/dev/disk/by-id/virtio-SERIAL`. Default: the disk's name, cut to 20 letters, in a
    /// VM whose first start was with a runner that does so; else none. A change takes effect at the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 20), regex(pattern = "^[A-Za-z0-9._-]+$"))]
    pub serial: Option<String>,
    /// The place in the boot order; 0 is first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 2_147_483_647))]
    pub bootindex: Option<u32>,
}

/// A claim for a disk. Its name is VM-NAME-disk, or VM-disk-N if the disk has no name (N counts the claims).
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
pub struct VolumeClaimTemplate {
    /// The disk's name, and labels and annotations for the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<ClaimMetadata>,
    /// The claim's spec (`kubectl explain pvc.spec`). `accessModes` defaults to ReadWriteOnce, `volumeMode` to Block or what
    /// the manager's configuration says (`diskPvc`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::claim_spec")]
    pub spec: Option<Value>,
}

/// Name, labels and annotations of a claim.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct ClaimMetadata {
    /// The disk's name; the runner sees the disk as /dev/NAME-disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 58), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: Option<String>,
    /// Labels to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// A CD drive.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct Cdrom {
    /// The CD: a URL, a path in the runner, or a name in the image repository; `""` is an empty drive. It can be
    /// changed while the VM runs.
    #[schemars(length(max = 4096), regex(pattern = r"^[^\x00-\x1f\x7f-\x9f]*$"))]
    pub image: String,
    /// A name that no other CD drive of the VM has. By it the drive keeps its place in the machine, whatever is added or taken out before it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: Option<String>,
}

fn yes() -> bool {
    true
}
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_false(value: &bool) -> bool {
    !value
}
fn one() -> u32 {
    1
}
fn powerdown_timeout() -> u32 {
    900
}
fn host() -> String {
    "host".into()
}
fn utc() -> String {
    "utc".into()
}
fn rt() -> String {
    "rt".into()
}
fn one_gigabyte() -> Quantity {
    Quantity::parse("1G").unwrap_or_else(|_| Quantity::from_bytes(1_000_000_000))
}
