//! The custom resource `VmPool`.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{VmAction, schema};

/// The retention of a pool that does not say one.
pub const DEFAULT_RETENTION: &str = "PT1h";

/// The condition of a pool with a template: whether its VMs are those that `spec.replicas` and `spec.template` want.
pub const SCALED: &str = "Scaled";

/// The reasons of a pool's conditions Ready and [`SCALED`].
pub mod reasons {
    /// Ready=True: VMs of the pool can be assigned.
    pub const USABLE: &str = "Usable";
    /// Ready=False: no VM names the pool in `spec.pools`.
    pub const NO_MEMBERS: &str = "NoMembers";
    /// Ready=False: `spec.retention` can't be read. Assignments end only when somebody releases them.
    pub const RETENTION_INVALID: &str = "RetentionInvalid";
    /// Scaled=True: all VMs that the pool wants exist, and are as its template.
    pub const AS_WANTED: &str = "AsWanted";
    /// Scaled=False: the API server refuses a VM.
    pub const REFUSED: &str = "Refused";
    /// Scaled=False: a VM that the pool does not own has the name of one that it wants.
    pub const NAME_TAKEN: &str = "NameTaken";
    /// Scaled=False: a VM is made, changed or deleted now.
    pub const PROGRESSING: &str = "Progressing";
    /// Scaled=False: a VM is to be changed or deleted, and somebody has it.
    pub const IN_USE: &str = "InUse";
    /// Scaled=False: nobody gets a VM, because a claim of it was not made for it or is gone, or because the pool has not made it, and the pool has `reset`.
    pub const NOT_NEW: &str = "NotNew";
    /// Scaled=False: somebody has taken the pool out of the `spec.pools` of one of its VMs.
    pub const OUT_OF_POOL: &str = "OutOfPool";
}

/// A pool of virtual machines that are given to users on request.
#[allow(clippy::duplicated_attributes, reason = "columns may have the same type")]
#[derive(CustomResource, KubeSchema, Clone, Debug, Serialize, Deserialize, PartialEq)]
#[kube(
    group = "vmoperator.jdrupes.org",
    version = "v1",
    kind = "VmPool",
    plural = "vmpools",
    singular = "vmpool",
    namespaced,
    derive = "PartialEq",
    status = "VmPoolStatus",
    doc = "A pool of virtual machines.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    validation = Rule::new("!has(self.spec.template) || self.metadata.name.size() <= 59").message("the VMs of the pool are called NAME-0, NAME-1 and so on, with at most 63 characters: the name of a pool with a template has at most 59"),
    validation = Rule::new("!has(self.spec.replicas) || has(self.spec.template)").message("replicas needs a template, from which the VMs are made"),
    validation = Rule::new("!has(self.spec.reset) || (has(self.spec.template) && has(self.spec.replicas))").message("reset needs a template and replicas: a VM that somebody had is replaced by a new one"),
    validation = Rule::new("!has(self.spec.reset) || self.metadata.name.size() <= 54").message("with reset the VMs of the pool are called NAME- and eight characters, with at most 63 in all: the name of the pool has at most 54"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Members", type_ = "integer", json_path = ".status.members"),
    printcolumn(name = "Free", type_ = "integer", json_path = ".status.free"),
    printcolumn(name = "Assigned", type_ = "integer", json_path = ".status.assigned"),
    printcolumn(name = "Expired", type_ = "integer", json_path = ".status.expired"),
    printcolumn(name = "Retention", type_ = "string", json_path = ".spec.retention"),
    printcolumn(name = "Wanted", type_ = "integer", json_path = ".spec.replicas", priority = 1),
    printcolumn(
        name = "Scaled",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Scaled')].status",
        priority = 1
    ),
    printcolumn(name = "Login", type_ = "boolean", json_path = ".spec.loginOnAssignment", priority = 1),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type=='Ready')].reason",
        priority = 1
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct VmPoolSpec {
    /// How long an assignment lasts after its last use: an ISO 8601 duration (`PT1h`) or a point in time.
    #[serde(default = "one_hour")]
    #[schemars(length(min = 1, max = 64))]
    pub retention: String,
    /// Whether the login agent logs the user in when a VM is assigned.
    #[serde(default)]
    pub login_on_assignment: bool,
    /// How many of the VMs that are assigned to nobody run, so that whoever gets one need not wait for its boot. The manager starts VMs for that, and
    /// stops none.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schemars(range(max = 1000))]
    pub warm: u32,
    /// How many VMs the manager makes from `template`: POOL-0, POOL-1 and so on, or with `reset` POOL- and eight random characters. If it is less than before, the manager deletes those with the highest
    /// numbers, each when it is assigned to nobody and nobody is at its console. Their disks stay. Without it the manager makes and deletes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1000))]
    pub replicas: Option<u32>,
    /// What the VMs are that the manager makes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<MemberTemplate>,
    /// Nobody gets a disk that somebody else had: a VM is deleted when its user has given it back, and the manager makes another one from `template`, with
    /// disks of its own. Free VMs that are not as the template is any more are replaced too, one after the other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reset: Option<PoolReset>,
    /// Who may use the pool.
    #[schemars(length(max = 256))]
    pub permissions: Vec<PoolPermission>,
}

/// How a pool replaces VMs that somebody had.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct PoolReset {
    /// What becomes of the claims of a VM that the manager deletes.
    #[serde(default)]
    pub old_claims: OldClaims,
}

/// What becomes of the claims of a VM that a pool replaces.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub enum OldClaims {
    /// They stay, with their data.
    #[default]
    Keep,
    /// They are deleted with the VM, and with them their data.
    Delete,
}

/// A VM of a pool, without what differs between the VMs.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq)]
#[x_kube(
    validation = Rule::new("!has(self.spec.vm.state)").message("leave out spec.vm.state: an assignment starts a VM, and warm keeps free ones running"),
    validation = Rule::new("!has(self.spec.vm.machineUuid)").message("leave out spec.vm.machineUuid: each VM gets its own"),
    validation = Rule::new("!has(self.spec.vm.networks) || self.spec.vm.networks.all(n, !(has(n.tap) && has(n.tap.mac)) && !(has(n.pod) && has(n.pod.mac)))").message("leave out the MAC addresses: each VM gets its own"),
)]
pub struct MemberTemplate {
    /// Labels and annotations of the VMs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<MemberMetadata>,
    /// The spec of the VMs (`kubectl explain vm.spec`). The pool is added to `pools`.
    #[schemars(schema_with = "schema::vm_spec")]
    pub spec: Value,
}

/// Labels and annotations of the VMs of a pool.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq, Eq)]
pub struct MemberMetadata {
    /// Labels to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Annotations to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
}

/// What a user or a role may do with the VMs of a pool.
#[derive(Clone, Debug, Serialize, Deserialize, KubeSchema, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.user) != has(self.role)").message("give either user or role"))]
pub struct PoolPermission {
    /// A user's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub user: Option<String>,
    /// A role's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub role: Option<String>,
    /// What is allowed. Default: `accessConsole`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16))]
    pub may: Option<Vec<VmAction>>,
}

/// How the VMs of a pool are. The manager writes it.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct VmPoolStatus {
    /// The generation of the spec from which this status was derived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// How many VMs belong to the pool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub members: Option<u32>,
    /// How many of them are assigned to nobody. With `spec.reset` those that nobody has had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u32>,
    /// With `spec.reset`: how many of them nobody gets, because they are to be replaced, or their disks are not made yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub renewing: Option<u32>,
    /// How many VMs are assigned from the pool and kept for their users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<u32>,
    /// How many VMs are assigned from the pool and past their retention, so that others can get them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expired: Option<u32>,
    /// How many VMs the manager has made from the template.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u32>,
    /// How many of these are as the template is now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated_replicas: Option<u32>,
    /// A label selector of the Pods of these VMs. A HorizontalPodAutoscaler finds them by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// The pool's conditions: Ready and, with a template, Scaled.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "schema::conditions")]
    pub conditions: Vec<Condition>,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

fn one_hour() -> String {
    DEFAULT_RETENTION.into()
}
