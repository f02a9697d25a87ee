//! The status of a VM, as the manager and the runner report it.
//!
//! Two field managers write the status: the manager writes as `vm-operator-status`, the runner as `vm-runner`. Lists that both write
//! (`conditions`) are maps by key, so each owns only its own entries.

use std::fmt;

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};
use kube::core::TypeMeta;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{PendingChange, PowerState, Reason, schema};

/// The state of a virtual machine.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VirtualMachineStatus {
    /// The generation of the spec from which this status was derived; -1 until a manager has reconciled the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// A summary in one word: Stopped, Starting, Running, Paused, Stopping, Failed if the VM can't be started, or Unknown while its node does
    /// not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Whether the VM's Pod exists.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<bool>,
    /// Whether the guest is up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready: Option<bool>,
    /// The power state that was last in effect; while there is a `stateOverride`, the one that would be without it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub power: Option<PowerState>,
    /// Set while the annotation `stateUntil` outranks `spec.vm.state`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_override: Option<StateOverride>,
    /// The value of the annotation `stateUntil` that has no effect any more, because its time has passed, or that never had one, because its
    /// time was too far off. To have it looked at again, remove the annotation and set it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_until_ignored: Option<String>,
    /// The template set and version from which the VM's objects were last rendered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub templates: Option<RenderedFrom>,
    /// The kinds of objects that the VM's templates create in addition to those of the built-in templates. The manager looks among these
    /// kinds for objects that no template creates any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "object_kinds")]
    pub object_kinds: Vec<ObjectKind>,
    /// Set while the VM stays down because its guest shut itself down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub halted: Option<Halted>,
    /// The value of the annotation `forceStop` that the manager and the runner ignore, because the VM was not being stopped when it was set,
    /// or because it is not about the VM's present Pod. To force a stop, remove the annotation and set it again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub force_stop_ignored: Option<String>,
    /// The UID of the Pod whose runner ends the guest at once: a forced stop was requested, or somebody has shortened the Pod's grace period,
    /// and it is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_guest: Option<String>,
    /// The UID of the VM's Pod, if it has another name than the VM. The policy in `deploy/` lets the runner of that Pod report, too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reporter_uid: Option<String>,
    /// Set when the VM's Pod ended by itself: when the manager creates the next one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry: Option<Retry>,
    /// The UID of the Pod whose runner reported last. The report applies only to this Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The generation of the spec that the guest in the VM's Pod has: it was started with it, or has taken each change since. Running and Booted
    /// have it as their observedGeneration. Absent if there is no Pod.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest_generation: Option<i64>,
    /// The generation of the spec that manager and runner have read, if the guest does not have all of it: it has what it can have while it runs, and the
    /// rest is in `pendingChanges`, or refused in the condition ChangesApplied. Absent if it is `guestGeneration`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taken_generation: Option<i64>,
    /// The node on which the VM runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The VM's addresses.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::addresses")]
    pub addresses: Option<Vec<Address>>,
    /// Changes that take effect at the next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "pending_changes")]
    pub pending_changes: Vec<PendingChange>,
    /// The claims that are not as the spec describes them, and those that the VM does not use any more.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "claims")]
    pub claims: Vec<ClaimStatus>,
    /// The claims of a VM that nobody has had since its pool has made it. Absent until all of them exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub new_disks: Option<NewDisks>,
    /// What the condition Ready says of a VM that can't be as its spec wants it, in parts. Absent while a person need not know of anything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<Problem>,
    /// The VM's conditions (`kubectl wait --for=condition=Ready vm/NAME`).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
    /// What runners report.
    #[serde(flatten)]
    pub runner: RunnerStatus,
    /// What whoever opens the display writes.
    #[serde(flatten)]
    pub display: DisplayStatus,
    /// What whoever assigns VMs of pools writes.
    #[serde(flatten)]
    pub pools: PoolStatus,
    /// The types of the conditions that come from a report, while one counts ([`super::VmReportStatus::fold_into`]). Nobody stores this.
    #[serde(skip)]
    pub reported: Option<Vec<String>>,
}

/// The part of the status that whoever opens the display writes: `kubectl vm display`, or the web interface.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct DisplayStatus {
    /// The user for whom the display's current password was set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_user: Option<String>,
}

/// The part of the status that whoever assigns VMs of pools writes.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    /// The user to whom the VM is assigned, if it belongs to a pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assignment: Option<Assignment>,
    /// The VM's UID, if the VM was ever assigned. It stays when the VM is nobody's again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub used_uid: Option<String>,
}

/// The part of the status that runners report: as they say it in their reports, and as the manager puts it into the status of the VM.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct RunnerStatus {
    /// The runner's version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub runner_version: Option<String>,
    /// What executes the guest's instructions: kvm or tcg.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub accelerator: Option<String>,
    /// The number of CPUs of the running guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<u32>,
    /// The memory of the running guest, such as `8Gi` or `512Mi`; rounded to MiB where no unit fits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<String>,
    /// The port of the VM's Pod on which people reach the guest's consoles, with what the Secret NAME-relay has. 0: none at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relay_port: Option<u16>,
    /// The address of the viewer that is connected to the display, or its user if it came through the relay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_client: Option<String>,
    /// The users who are at the serial console, through the relay.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub serial_users: Vec<String>,
    /// The user who is logged in in the guest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logged_in_user: Option<String>,
    /// The number of times that the runner has set the display's password.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_password_serial: Option<i64>,
    /// The expiry of the display's current password, as written in the display secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub display_password_expiry: Option<String>,
    /// Properties that stay the same at each start.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity: Option<Identity>,
    /// The `resetCount` of the last reset, or the one of the spec if that has become smaller since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset_count: Option<u32>,
    /// The `rebootCount` of the last reboot that the guest was asked for, or that a reset has made needless, or the one of the spec if that has
    /// become smaller since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reboot_count: Option<u32>,
    /// The digest of the `config.yaml` that the runner has read last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_digest: Option<String>,
    /// The disks, CD drives, network cards and the watchdog of the guest, and those that it gets at its next start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "devices")]
    pub devices: Vec<DeviceStatus>,
    /// The guest's operating system, as QEMU's guest agent reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "schema::any_object")]
    pub osinfo: Option<Value>,
}

/// A device of the guest: a disk, a CD drive, a network card or the watchdog.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DeviceStatus {
    /// The kind of device.
    pub kind: DeviceKind,
    /// The name: of a disk that of its volume in the Pod; of the watchdog `itco`; of others the name in the spec, or the number among those of the
    /// kind, counted from 0.
    pub name: String,
    /// Whether the guest has it.
    pub phase: DevicePhase,
    /// What the next start changes of it. Absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at_next_start: Option<DeviceChange>,
    /// Why it does not work.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<Reason>,
    /// The same for people, with what to do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

impl DeviceStatus {
    /// Whether there is more to say than that the guest has it.
    pub fn is_notable(&self) -> bool {
        self.phase != DevicePhase::Attached || self.at_next_start.is_some()
    }
}

impl fmt::Display for DeviceStatus {
    /// `disk data-disk: attached; at the next start the guest loses it`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = match self.phase {
            DevicePhase::Attached => "attached",
            DevicePhase::Failed => "does not work",
            DevicePhase::Waiting => "not attached",
        };
        write!(f, "{} {}: {phase}", self.kind.title(), self.name)?;
        if let Some(change) = self.at_next_start {
            write!(f, "; at the next start {}", change.words())?;
        }
        match &self.message {
            Some(message) => write!(f, ": {message}"),
            None => Ok(()),
        }
    }
}

/// The kinds of devices that have a name.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceKind {
    /// A disk.
    Disk,
    /// A CD drive.
    CdDrive,
    /// A network card.
    Network,
    /// A watchdog, which a guest feeds.
    Watchdog,
}

impl DeviceKind {
    /// The word for people.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::CdDrive => "CD drive",
            Self::Network => "network",
            Self::Watchdog => "watchdog",
        }
    }
}

/// Whether a guest has a device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub enum DevicePhase {
    /// The guest has it.
    Attached,
    /// The guest has it, and it does not work.
    Failed,
    /// The guest does not have it yet.
    Waiting,
}

/// What the next start changes of a device.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub enum DeviceChange {
    /// The guest gets it.
    Attach,
    /// It becomes another one, or gets other settings.
    Change,
    /// The guest loses it.
    Detach,
}

impl DeviceChange {
    /// What the next start does, for people.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Attach => "the guest gets it",
            Self::Change => "it changes",
            Self::Detach => "the guest loses it",
        }
    }
}

/// Why a VM is not as its spec wants it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// The reason of the condition Ready.
    pub reason: Reason,
    /// What is wrong, with the names of the objects.
    pub message: String,
    /// What a person can do, where the manager knows it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub what_to_do: Option<String>,
}

impl Problem {
    /// A problem of which the message says all that is known.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, message: message.into(), what_to_do: None }
    }

    /// The problem for people: `MESSAGE`, or `MESSAGE -> WHAT TO DO`.
    pub fn words(&self) -> String {
        match &self.what_to_do {
            Some(todo) => format!("{} -> {todo}", self.message),
            None => self.message.clone(),
        }
    }
}

/// Whether the claims of a VM are its own from the beginning.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NewDisks {
    /// The UID of the VM of which this is said: a VM that is made again under the same name is another one.
    pub vm_uid: String,
    /// Those that the manager has not made for this VM, or that are gone, by name. Somebody may have used them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<String>,
}

/// Kinds as a map whose key is all fields.
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

/// Devices as a map by `kind` and `name`.
fn devices(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<DeviceStatus>(generator, &["kind", "name"])
}

/// The networks as a map by `slot`.
fn network_identities(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<NetworkIdentity>(generator, &["slot"])
}

/// The disks as a map by `name`.
fn disk_identities(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<DiskIdentity>(generator, &["name"])
}

/// The CD drives as a map by `slot`.
fn cd_identities(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<CdIdentity>(generator, &["slot"])
}

/// Findings about one claim as a map by `reason`.
fn claim_findings(generator: &mut SchemaGenerator) -> Schema {
    schema::map_of::<ClaimFinding>(generator, &["reason"])
}

/// A time in whole seconds, as the API server stores it: `2027-01-15T08:00:00Z`.
pub fn whole_seconds(time: Timestamp) -> String {
    time.strftime("%FT%TZ").to_string()
}

/// A summary of a VM's state in one word.
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
    /// The guest is paused.
    Paused,
    /// The VM can't be started, or fails again and again. The condition Ready has the cause.
    Failed,
    /// The VM's node does not answer.
    Unknown,
}

impl Phase {
    /// All phases, in alphabetical order.
    pub const ALL: [Self; 8] = [
        Self::Failed,
        Self::Paused,
        Self::Pending,
        Self::Running,
        Self::Starting,
        Self::Stopped,
        Self::Stopping,
        Self::Unknown,
    ];

    /// The reason with the same name, for conditions of which only the phase is known.
    pub const fn reason(self) -> Reason {
        match self {
            Self::Pending => Reason::Pending,
            Self::Stopped => Reason::Stopped,
            Self::Starting => Reason::Starting,
            Self::Running => Reason::Running,
            Self::Stopping => Reason::Stopping,
            Self::Paused => Reason::Paused,
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
    /// The set that the VM selects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub set: Option<String>,
    /// Eight hexadecimal digits. They change when a template of the set changes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

/// A kind of object.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "camelCase")]
pub struct ObjectKind {
    /// The API version, such as `networking.k8s.io/v1`.
    pub api_version: String,
    /// The kind, such as `NetworkPolicy`.
    pub kind: String,
}

impl From<TypeMeta> for ObjectKind {
    fn from(TypeMeta { api_version, kind }: TypeMeta) -> Self {
        Self { api_version, kind }
    }
}

impl Halted {
    /// [`Halted::by`] after the guest's own shutdown.
    pub const GUEST: &str = "guest";
    /// [`Halted::by`] after a panic.
    pub const PANIC: &str = "panic";
}

impl PowerState {
    /// The word in `spec.vm.state`.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Running => "Running",
            Self::Stopped => "Stopped",
        }
    }
}

/// A power state that outranks `spec.vm.state` for some time.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct StateOverride {
    /// The power state.
    pub state: PowerState,
    /// When `spec.vm.state` is in force again, by the manager's clock.
    pub until: Time,
}

impl From<ObjectKind> for TypeMeta {
    fn from(ObjectKind { api_version, kind }: ObjectKind) -> Self {
        Self { api_version, kind }
    }
}

/// Why and since when the VM is down although its spec says Running.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Halted {
    /// Who stopped it: `guest` by its shutdown, or `panic` with `onPanic: stop`.
    pub by: String,
    /// The time of the shutdown.
    pub time: Time,
    /// The generation of the spec when the guest shut down.
    pub generation: i64,
    /// The UID of the Pod in which the guest shut down, if the runner reported it. A shutdown in another Pod is a new shutdown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_uid: Option<String>,
    /// The value of the restart annotation at that time. Another value starts the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restarted_at: Option<String>,
    /// True if the VM was stopped or started since then while the runner's report of that shutdown is still in the status. The same report
    /// does not halt the VM again.
    #[serde(default, skip_serializing_if = "is_false")]
    pub released: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde requires a reference")]
fn is_false(value: &bool) -> bool {
    !value
}

/// When the manager creates a Pod again that ended by itself.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Retry {
    /// The number of Pods in a row that ended soon after they started.
    pub count: u32,
    /// The UID of the last of these Pods.
    pub pod_uid: String,
    /// When the manager creates the next Pod.
    pub next: Time,
}

/// An address of a VM.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct Address {
    /// The kind of the address: `PodIP`.
    #[serde(rename = "type")]
    pub type_: String,
    /// The address.
    pub address: String,
}

/// Properties of the virtual hardware that must be the same at each start.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Identity {
    /// The VM's UUID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9A-Za-z-]{1,64}$"))]
    pub uuid: Option<String>,
    /// The MAC addresses, in the order of `networks`, as runners of earlier releases report them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub macs: Vec<String>,
    /// What each network keeps.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "network_identities")]
    pub networks: Vec<NetworkIdentity>,
    /// What each disk keeps. `None`: a runner of an earlier release does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "disk_identities")]
    pub disks: Option<Vec<DiskIdentity>>,
    /// What each CD drive keeps. `None`: a runner of an earlier release does not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "cd_identities")]
    pub cds: Option<Vec<CdIdentity>>,
    /// QEMU's machine type with its version, such as `pc-q35-7.2`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9A-Za-z._-]{1,64}$"))]
    pub machine_type: Option<String>,
    /// How the devices are arranged: `multi-queue`, `root-ports` (as before disks had several queues), `standard` (as before there were root ports) or `legacy` (as the VM-Operator in Java does).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9A-Za-z._-]{1,64}$"))]
    pub hardware: Option<String>,
}

impl Identity {
    /// With what was known before, as far as a runner of an earlier release has not said it.
    #[must_use]
    pub fn after(mut self, before: Option<Self>) -> Self {
        let Some(before) = before else { return self };
        self.disks = self.disks.or(before.disks);
        self.cds = self.cds.or(before.cds);
        // A runner that knows slots reports each network with its address.
        if self.networks.is_empty() && !self.macs.is_empty() {
            self.networks = before.networks;
        }
        self
    }
}

/// A claim of the VM. It is remembered, so that no empty one takes its place when it is lost.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ClaimStatus {
    /// The claim's name.
    pub name: String,
    /// The claim's UID.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// The VM does not use the claim any more. The claim and its data are kept.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unused: bool,
    /// For a disk without a name: its entry in `spec.vm.disks` as it was last. It keeps this claim when the list is edited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entry: Option<ListEntry>,
    /// The differences from the spec, and what is not ready.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "claim_findings")]
    pub findings: Vec<ClaimFinding>,
}

/// What a network keeps from one start to the next.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NetworkIdentity {
    /// Its name, if the spec gives it one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-z-]{1,63}$"))]
    pub name: Option<String>,
    /// The MAC address.
    #[schemars(regex(pattern = "^[0-9A-Fa-f:]{1,32}$"))]
    pub mac: String,
    /// The slot, which gives the PCI address.
    #[schemars(range(max = 31))]
    pub slot: u32,
    /// The entry in `spec.vm.networks` as it was.
    pub entry: ListEntry,
}

/// What a disk keeps from one start to the next.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct DiskIdentity {
    /// The name of its volume in the Pod: `NAME-disk`, or `disk-N`.
    #[schemars(regex(pattern = "^[0-9a-z-]{1,63}$"))]
    pub name: String,
    /// The slot, which gives the PCI address.
    #[schemars(range(max = 63))]
    pub slot: u32,
}

impl DiskIdentity {
    /// The most disks of a VM: eight PCI slots with eight functions each.
    pub const MOST: u32 = 64;
}

/// What a CD drive keeps from one start to the next.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct CdIdentity {
    /// Its name, if the spec gives it one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^[0-9a-z-]{1,63}$"))]
    pub name: Option<String>,
    /// The slot, which gives the SATA port.
    #[schemars(range(max = 5))]
    pub slot: u32,
    /// The drive in the list of CD drives, and the CD in it, as they were.
    pub entry: ListEntry,
    /// The spec does not have the drive any more. The machine has it until its next start.
    #[serde(default, skip_serializing_if = "is_false")]
    pub unused: bool,
}

impl CdIdentity {
    /// The most CD drives of a VM: the SATA controller of q35 has six ports.
    pub const MOST: u32 = 6;
}

/// An entry of a list of the spec, by which it is found again after the list was edited.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ListEntry {
    /// How many entries are before it; of a disk, entries with a claim; of a CD drive, other CD drives.
    pub position: u32,
    /// A hash of what it is; of a disk, the spec of its `volumeClaimTemplate`; of a CD drive, its CD.
    #[schemars(regex(pattern = "^[0-9a-f]{1,64}$"))]
    pub parameters: String,
}

/// A difference between a claim and the spec, or a problem of a claim.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ClaimFinding {
    /// The finding, as a reason of the condition StorageReady.
    pub reason: Reason,
    /// The claim's size, or the names of the fields that differ.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current: Option<String>,
    /// The size that the claim will have, or should have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<String>,
    /// The API server's answer, if it refused a change; or why the VM does not get the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<String>,
    /// The generation of the spec for which the API server refused the growth. The manager tries again for another generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
}

impl ClaimFinding {
    /// A finding without sizes and without an answer.
    pub fn new(reason: Reason) -> Self {
        Self { reason, current: None, wanted: None, answer: None, generation: None }
    }
}

/// The assignment of a VM of a pool to a user. The runner of the Java VM-Operator writes an empty one for a VM that is not assigned.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Assignment {
    /// The pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// The UID of the pool: the assignment is not from another pool that has got its name. If whoever assigns the VM leaves it out, the manager adds
    /// it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool_uid: Option<String>,
    /// The user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// When the user used the VM last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_used: Option<Time>,
    /// When it was assigned. Of several VMs of a pool, a user keeps the one that was assigned first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned_at: Option<Time>,
    /// Whether the VM was to be started for the assignment. When that was done, the annotation `startedFor` names the assignment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starts: Option<bool>,
}
