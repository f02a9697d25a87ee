//! What the manager and the runner report about a machine.
//!
//! Two field managers write here: the manager `vm-operator-status`, the runner `vm-runner`. The lists that both may write
//! (`conditions`) are maps by key, so each owns its own entries.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::core::TypeMeta;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{PowerState, Reason, schema};

/// The state of a virtual machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStatus {
    /// The generation of the spec that this status was derived from; -1 before the first time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// What the machine does, in a word: Stopped, Starting, Running, Stopping, Failed, or Unknown
    /// while its node does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Whether the machine's Pod exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<bool>,
    /// Whether the guest is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// The last power state that was in effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerState>,
    /// What the machine's objects were rendered from last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub templates: Option<RenderedFrom>,
    /// The kinds of objects that the machine's templates make besides those of the built-in ones: where the manager looks for what
    /// no template makes any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "object_kinds")]
    pub object_kinds: Vec<ObjectKind>,
    /// Set while the machine stays down because its guest shut itself down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halted: Option<Halted>,
    /// Set when a Pod of the machine ended by itself: when the next one is made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// The UID of the Pod whose runner reported last. What it reported is not true of any other Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The node that the machine runs on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The machine's addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::addresses")]
    pub addresses: Option<Vec<Address>>,
    /// What stays the same over starts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// The `resetCount` that was carried out last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_count: Option<u32>,
    /// Changes of the spec that arrive with the next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "pending_changes")]
    pub pending_changes: Vec<PendingChange>,
    /// The claims that are not as the spec describes them, and those that the VM does not use any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "claims")]
    pub claims: Vec<ClaimStatus>,
    /// What is the case, for people and for programs (`kubectl wait --for=condition=Ready vm/NAME`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// The runner's version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner_version: Option<String>,
    /// What executes the guest's instructions: kvm or tcg.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
    /// The running guest's CPUs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// The running guest's memory, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<String>,
    /// The address of the viewer that is connected to the display.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_client: Option<String>,
    /// The user who got the display's current password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_user: Option<String>,
    /// The user who is logged in in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logged_in_user: Option<String>,
    /// Counts the changes of the display's password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_password_serial: Option<i64>,
    /// When the display's password that is in force ends, as the display secret says it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_password_expiry: Option<String>,
    /// The guest's operating system, as QEMU's guest agent tells it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub osinfo: Option<Value>,
    /// Who the machine is given to, if it belongs to a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assignment: Option<Assignment>,
}

/// Kinds as a map by all that they have.
fn object_kinds(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<ObjectKind>(generator, &["apiVersion", "kind"])
}

/// Changes that wait for the next start, from the manager and from the runner: a map by `path`.
fn pending_changes(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<PendingChange>(generator, &["path"])
}

/// Claims as a map by `name`.
fn claims(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<ClaimStatus>(generator, &["name"])
}

/// Findings about one claim as a map by `reason`.
fn claim_findings(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<ClaimFinding>(generator, &["reason"])
}

/// A time in whole seconds, as the API server keeps it.
pub fn whole_seconds(time: Timestamp) -> String {
    time.strftime("%FT%TZ").to_string()
}

/// What a VM does, as one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// No manager has reconciled the VM yet.
    Pending,
    /// There is no Pod.
    Stopped,
    /// The guest does not run yet.
    Starting,
    /// The guest runs.
    Running,
    /// The guest is being shut down.
    Stopping,
    /// The Pod failed.
    Failed,
    /// The VM's node does not answer.
    Unknown,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 7] =
        [Self::Failed, Self::Pending, Self::Running, Self::Starting, Self::Stopped, Self::Stopping, Self::Unknown];

    /// The same word as a reason, for conditions of which only the phase is known.
    pub const fn reason(self) -> Reason {
        match self {
            Self::Pending => Reason::Pending,
            Self::Stopped => Reason::Stopped,
            Self::Starting => Reason::Starting,
            Self::Running => Reason::Running,
            Self::Stopping => Reason::Stopping,
            Self::Failed => Reason::Failed,
            Self::Unknown => Reason::Unknown,
        }
    }

    /// The word in `status.phase`.
    pub const fn as_str(self) -> &'static str {
        self.reason().as_str()
    }
}

/// A version of a template set.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct RenderedFrom {
    /// The set that the machine chose.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// Eight hexadecimal digits that are others when a template changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A kind of objects.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct ObjectKind {
    /// Such as `networking.k8s.io/v1`.
    pub api_version: String,
    /// Such as `NetworkPolicy`.
    pub kind: String,
}

impl From<TypeMeta> for ObjectKind {
    fn from(TypeMeta { api_version, kind }: TypeMeta) -> Self {
        Self { api_version, kind }
    }
}

impl From<ObjectKind> for TypeMeta {
    fn from(ObjectKind { api_version, kind }: ObjectKind) -> Self {
        Self { api_version, kind }
    }
}

/// Why and since when a machine is down though its spec says Running.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Halted {
    /// Who halted it: `guest`.
    pub by: String,
    /// When.
    pub time: Time,
    /// The generation of the spec that it was halted under.
    pub generation: i64,
    /// The UID of the Pod whose guest that was, where the runner says it. A shutdown in another Pod is another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The machine's restart annotation at that time. Another one starts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarted_at: Option<String>,
    /// It was stopped or started since, but the report that halted it still stands; it does not halt it again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub released: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// When a Pod that ended by itself is made again.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Retry {
    /// How many Pods ended one after the other, none of which lasted.
    pub count: u32,
    /// The UID of the last of them.
    pub pod_uid: String,
    /// When the next one is made.
    pub next: Time,
}

/// An address of a machine.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct Address {
    /// What kind of address it is: `PodIP`.
    #[serde(rename = "type")]
    pub type_: String,
    /// The address.
    pub address: String,
}

/// What a guest must find the same at every start.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    /// The machine's UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
    /// The MAC addresses, in the order of `networks`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub macs: Vec<String>,
    /// QEMU's machine type with its version, such as `pc-q35-7.2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine_type: Option<String>,
}

/// A change that the running machine does not have yet.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
pub struct PendingChange {
    /// Where, such as `objects/Pod/spec.containers[vm-runner].image`, or `config.yaml/vm.maximumCpus`.
    pub path: String,
    /// What the running machine has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub current: Option<Value>,
    /// What it will have after the next start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any")]
    pub wanted: Option<Value>,
    /// Why it is not changed while the machine runs.
    pub reason: String,
}

/// A claim of which the manager has something to report.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ClaimStatus {
    /// The claim's name.
    pub name: String,
    /// The VM does not use the claim any more. The claim and its data are kept.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unused: bool,
    /// What is different from the spec, or not ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "claim_findings")]
    pub findings: Vec<ClaimFinding>,
}

/// Something about a claim.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ClaimFinding {
    /// What it is: a reason of the condition StorageReady.
    pub reason: Reason,
    /// What the claim has: its size, or the names of fields.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The size that the claim is to have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<String>,
    /// What the API server answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// The generation of the spec for which the API server refused the growth. It is asked again for another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
}

impl ClaimFinding {
    /// Without sizes and without an answer.
    pub fn of(reason: Reason) -> Self {
        Self { reason, current: None, wanted: None, answer: None, generation: None }
    }
}

/// An assignment of a machine of a pool.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    /// The pool.
    pub pool: String,
    /// The user.
    pub user: String,
    /// When the user used it last.
    pub last_used: Time,
}
