//! By which keys strategic merge patches merge the lists of Kubernetes' own kinds.
//!
//! The API server takes this from its types and publishes it in its OpenAPI, as `x-kubernetes-patch-merge-key` and
//! `x-kubernetes-patch-strategy`. A test compares this table with an API server. It has the namespaced kinds of stable versions, without
//! `status` and without `metadata`, of which templates may set no list. (The strategy `retainKeys` matters only to clients that compute
//! patches: who applies one looks at the directive `$retainKeys`.)

/// A row of the table: type, field, type of the field's value or of the items of its list, merge.
pub type Row = (&'static str, &'static str, &'static str, Merge);

/// How the value of a field is merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merge {
    /// A map field by field, a list not at all: the new list replaces the old one.
    Usual,
    /// A list of maps: items that have the same value of this field are merged.
    ByKey(&'static str),
    /// A map that is replaced as a whole.
    Replace,
}

use Merge::{ByKey, Replace, Usual};

/// All rows, sorted.
pub const TABLE: &[Row] = &[
    ("Container", "env", "", ByKey("name")),
    ("Container", "ports", "", ByKey("containerPort")),
    ("Container", "volumeDevices", "", ByKey("devicePath")),
    ("Container", "volumeMounts", "", ByKey("mountPath")),
    ("CronJobSpec", "jobTemplate", "JobTemplateSpec", Usual),
    ("DaemonSetSpec", "template", "PodTemplateSpec", Usual),
    ("DeploymentSpec", "template", "PodTemplateSpec", Usual),
    ("EphemeralContainer", "env", "", ByKey("name")),
    ("EphemeralContainer", "ports", "", ByKey("containerPort")),
    ("EphemeralContainer", "volumeDevices", "", ByKey("devicePath")),
    ("EphemeralContainer", "volumeMounts", "", ByKey("mountPath")),
    ("JobSpec", "template", "PodTemplateSpec", Usual),
    ("JobTemplateSpec", "spec", "JobSpec", Usual),
    ("PodDisruptionBudgetSpec", "selector", "", Replace),
    ("PodSpec", "containers", "Container", ByKey("name")),
    ("PodSpec", "ephemeralContainers", "EphemeralContainer", ByKey("name")),
    ("PodSpec", "hostAliases", "", ByKey("ip")),
    ("PodSpec", "imagePullSecrets", "", ByKey("name")),
    ("PodSpec", "initContainers", "Container", ByKey("name")),
    ("PodSpec", "resourceClaims", "", ByKey("name")),
    ("PodSpec", "schedulingGates", "", ByKey("name")),
    ("PodSpec", "topologySpreadConstraints", "", ByKey("topologyKey")),
    ("PodSpec", "volumes", "", ByKey("name")),
    ("PodTemplateSpec", "spec", "PodSpec", Usual),
    ("ReplicaSetSpec", "template", "PodTemplateSpec", Usual),
    ("ReplicationControllerSpec", "template", "PodTemplateSpec", Usual),
    ("ServiceSpec", "ports", "", ByKey("port")),
    ("StatefulSetSpec", "template", "PodTemplateSpec", Usual),
    ("apps/v1/DaemonSet", "spec", "DaemonSetSpec", Usual),
    ("apps/v1/Deployment", "spec", "DeploymentSpec", Usual),
    ("apps/v1/ReplicaSet", "spec", "ReplicaSetSpec", Usual),
    ("apps/v1/StatefulSet", "spec", "StatefulSetSpec", Usual),
    ("batch/v1/CronJob", "spec", "CronJobSpec", Usual),
    ("batch/v1/Job", "spec", "JobSpec", Usual),
    ("policy/v1/PodDisruptionBudget", "spec", "PodDisruptionBudgetSpec", Usual),
    ("v1/Pod", "spec", "PodSpec", Usual),
    ("v1/PodTemplate", "template", "PodTemplateSpec", Usual),
    ("v1/ReplicationController", "spec", "ReplicationControllerSpec", Usual),
    ("v1/Service", "spec", "ServiceSpec", Usual),
    ("v1/ServiceAccount", "secrets", "", ByKey("name")),
];

/// A type of the API. A type that is not in the table has no list with a key.
#[derive(Clone, Copy, Debug)]
pub struct Type(&'static str);

impl Type {
    /// The type of the objects of a kind.
    pub fn of_kind(api_version: &str, kind: &str) -> Self {
        let is_kind = |name: &&str| name.rsplit_once('/') == Some((api_version, kind));
        Self(TABLE.iter().map(|row| row.0).find(is_kind).unwrap_or_default())
    }

    /// How a field of it is merged, and the type of the field's value or of the items of its list.
    pub fn field(self, name: &str) -> (Merge, Self) {
        let row = TABLE.iter().find(|row| row.0 == self.0 && row.1 == name);
        row.map_or((Usual, Self("")), |row| (row.3, Self(row.2)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_names_types_that_are_in_it() {
        assert!(TABLE.is_sorted_by_key(|row| (row.0, row.1)));
        for row in TABLE.iter().filter(|row| !row.2.is_empty()) {
            assert!(TABLE.iter().any(|other| other.0 == row.2), "{row:?}");
        }
    }

    #[test]
    fn fields_are_found_from_the_kind_down() {
        let key = |api_version: &str, kind: &str, path: &[&str]| {
            let from = (Usual, Type::of_kind(api_version, kind));
            path.iter().fold(from, |(_, of), field| of.field(field)).0
        };
        assert_eq!(key("v1", "Pod", &["spec", "containers", "ports"]), ByKey("containerPort"));
        assert_eq!(key("v1", "Service", &["spec", "ports"]), ByKey("port"));
        assert_eq!(key("apps/v1", "StatefulSet", &["spec", "template", "spec", "volumes"]), ByKey("name"));
        assert_eq!(key("v1", "Pod", &["spec", "tolerations"]), Usual);
        assert_eq!(key("example.org/v1", "Pod", &["spec", "containers"]), Usual);
        assert_eq!(key("v1", "Secret", &["data", "spec"]), Usual);
    }
}
