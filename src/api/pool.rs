//! The custom resource `VmPool`.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{VmAction, schema};

/// The retention of a pool that does not say one.
pub const DEFAULT_RETENTION: &str = "PT1h";

/// The reasons of a pool's condition Ready.
pub mod reasons {
    /// Ready=True: VMs of the pool can be assigned.
    pub const USABLE: &str = "Usable";
    /// Ready=False: no VM names the pool in `spec.pools`.
    pub const NO_MEMBERS: &str = "NoMembers";
    /// Ready=False: `spec.retention` can't be read. Assignments end only when somebody releases them.
    pub const RETENTION_INVALID: &str = "RetentionInvalid";
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
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type=='Ready')].status"),
    printcolumn(name = "Members", type_ = "integer", json_path = ".status.members"),
    printcolumn(name = "Free", type_ = "integer", json_path = ".status.free"),
    printcolumn(name = "Assigned", type_ = "integer", json_path = ".status.assigned"),
    printcolumn(name = "Expired", type_ = "integer", json_path = ".status.expired"),
    printcolumn(name = "Retention", type_ = "string", json_path = ".spec.retention"),
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
    /// Who may use the pool.
    #[schemars(length(max = 256))]
    pub permissions: Vec<PoolPermission>,
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
    /// How many of them are assigned to nobody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u32>,
    /// How many VMs are assigned from the pool and kept for their users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub assigned: Option<u32>,
    /// How many VMs are assigned from the pool and past their retention, so that others can get them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expired: Option<u32>,
    /// The pool's conditions: Ready.
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
