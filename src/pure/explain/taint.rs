//! Nodes that take no Pods, or not each one: taints, and which of them a Pod does not tolerate.

use k8s_openapi::api::core::v1::{Node, Taint};

use crate::observed::Object;

/// The taint of a node on which `kubectl cordon` was used.
const CORDONED: &str = "node.kubernetes.io/unschedulable";
/// The taints that the cluster sets for nodes that are not ready.
pub(super) const NOT_READY: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// The taints that Kubernetes gives a node with a condition, and takes away with it
/// (<https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/#taint-nodes-by-condition>): the condition, what it says of the node,
/// and what helps.
pub(super) const OF_CONDITIONS: [(&str, &str, &str, &str); 4] = [
    (
        "node.kubernetes.io/memory-pressure",
        "MemoryPressure",
        "is short of memory",
        "free memory there (stop a VM), or add a node",
    ),
    (
        "node.kubernetes.io/disk-pressure",
        "DiskPressure",
        "is short of disk space",
        "free space on its disk, or add a node",
    ),
    (
        "node.kubernetes.io/pid-pressure",
        "PIDPressure",
        "is short of process IDs",
        "end processes there (stop a VM), or add a node",
    ),
    (
        "node.kubernetes.io/network-unavailable",
        "NetworkUnavailable",
        "has no network for Pods",
        "see what the cluster's network plugin says there",
    ),
];

/// Whether `kubectl cordon` was used on a node.
pub(super) fn is_cordoned(node: &Node) -> bool {
    node.spec.as_ref().is_some_and(|spec| spec.unschedulable == Some(true))
}

/// The taint that keeps a Pod away, rather one that a person has set than one that the cluster takes away by itself (<https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/>).
pub(super) fn untolerated<'a>(pod: &Object, node: &'a Node) -> Option<&'a Taint> {
    let tolerations = || pod.spec["tolerations"].as_array().into_iter().flatten();
    let is_tolerated = |taint: &Taint| {
        tolerations().any(|toleration| {
            let has = |field: &str, wanted: &str| toleration[field].is_null() || toleration[field] == wanted;
            let exists = toleration["operator"] == "Exists";
            let value = taint.value.as_deref().unwrap_or_default();
            let is_value = exists || toleration["value"].as_str().unwrap_or_default() == value;
            let is_key = toleration["key"] == taint.key.as_str() || (toleration["key"].is_null() && exists);
            is_key && is_value && has("effect", &taint.effect)
        })
    };
    let taints = node.spec.as_ref()?.taints.iter().flatten();
    let keeps = |taint: &&Taint| taint.effect != "PreferNoSchedule" && taint.key != CORDONED && !is_tolerated(taint);
    taints.filter(keeps).min_by_key(|taint| NOT_READY.contains(&taint.key.as_str()))
}
