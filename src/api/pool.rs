//! The custom resource `VmPool`.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::VmAction;

/// A pool of virtual machines that are given to users on request.
#[derive(CustomResource, KubeSchema, Clone, Debug, Serialize, Deserialize, PartialEq)]
#[kube(
    group = "vmoperator.jdrupes.org",
    version = "v1",
    kind = "VmPool",
    plural = "vmpools",
    singular = "vmpool",
    namespaced,
    derive = "PartialEq",
    doc = "A pool of virtual machines.",
    printcolumn(name = "Retention", type_ = "string", json_path = ".spec.retention"),
    printcolumn(name = "Login", type_ = "boolean", json_path = ".spec.loginOnAssignment"),
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

fn one_hour() -> String {
    "PT1h".into()
}
