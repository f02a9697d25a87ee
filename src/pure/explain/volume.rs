//! Volumes that can only be used on some nodes, such as those of a node's own disks.

use k8s_openapi::api::core::v1::{Node, NodeSelectorTerm, PersistentVolume};
use k8s_openapi::jiff::SignedDuration;
use kube::ResourceExt;

use super::{
    Cause, Facts, Finding, neighbours,
    taint::{is_cordoned, untolerated},
    terms::{one_holds, told},
};
use crate::observed::Object;

/// The annotation by which the scheduler asks a provisioner for a volume
/// (<https://kubernetes.io/docs/reference/labels-annotations-taints/#volume-kubernetes-io-selected-node>).
const SELECTED_NODE: &str = "volume.kubernetes.io/selected-node";

/// A volume of the Pod that keeps it from all the nodes that would take it otherwise (`free`).
pub(super) fn elsewhere(facts: &Facts, pod: &Object, nodes: &[Node], free: &[&Node]) -> Option<Finding> {
    let volumes = facts.volumes.iter().flatten();
    let bound = volumes.filter_map(|volume| Some((volume, claim_of(facts, pod, volume)?)));
    let (volume, claim) = bound.into_iter().find(|(volume, _)| free.iter().any(|node| !allows(volume, node)))?;
    let name = volume.name_any();
    let allowed: Vec<&Node> = nodes.iter().filter(|node| allows(volume, node)).collect();
    let reasons =
        neighbours::listed(allowed.iter().map(|node| format!("node {} {}", node.name_any(), why_not(pod, node))));
    let (text, todo) = match allowed.first() {
        Some(node) if is_cordoned(node) => (reasons, format!("kubectl uncordon {}", node.name_any())),
        Some(node) => (
            reasons,
            format!(
                "make room for the Pod there, or copy the data to a claim elsewhere: kubectl describe node {}",
                node.name_any()
            ),
        ),
        None => (
            "the cluster has none of these".to_owned(),
            format!("bring that node back, or restore the data into a new claim: kubectl describe pv {name}"),
        ),
    };
    let text = format!(
        "claim {claim} has the volume {name}, which can only be used on nodes with {}, and {text}",
        told(terms(volume).unwrap_or_default())
    );
    Some(Finding::new(Cause::VolumeElsewhere, text, todo).at(format!("PersistentVolume {name}: spec.nodeAffinity")))
}

/// How long a provisioner may take to make a volume, or to clone one.
const PATIENCE: SignedDuration = SignedDuration::from_mins(2);

/// A claim for which the scheduler waits until a provisioner has made the volume: the Pod says nothing of that.
pub(super) fn awaited<'a>(facts: &'a Facts, pod: &Object) -> Option<&'a Object> {
    let is_mounted = |claim: &&Object| pod.mounted_claims().any(|(mounted, _)| mounted == claim.key.name);
    let mut waits = facts.claims.iter().flatten().filter(|claim| !claim.is_bound()).filter(is_mounted);
    waits.find(|claim| claim.annotations.contains_key(SELECTED_NODE))
}

/// Such a claim, if its provisioner takes long.
pub(super) fn late(facts: &Facts, claim: &Object) -> Option<Finding> {
    let (name, place) = (&claim.key.name, facts.on_command_line());
    let text = format!("claim {name} waits for a volume from {}", provisioner_of(facts, claim));
    let todo = format!("see whether that provisioner runs: kubectl {place} describe pvc {name}");
    let is_late = claim.created.is_none_or(|created| facts.now.duration_since(created) > PATIENCE);
    is_late.then(|| Finding::new(Cause::ClaimUnbound, text, todo).since(claim.created))
}

/// Who makes the volume of a claim, in words.
pub(super) fn provisioner_of(facts: &Facts, claim: &Object) -> String {
    let wanted = claim.spec_str("/storageClassName").unwrap_or_default();
    let class = facts.classes.iter().flatten().find(|class| class.name_any() == wanted);
    match class {
        Some(class) => format!("the provisioner {} of the storage class {wanted}", class.provisioner),
        None if wanted.is_empty() => "an administrator, because it names no storage class".into(),
        None => format!("the storage class {wanted}"),
    }
}

/// The claim of the Pod that has this volume.
fn claim_of<'a>(facts: &'a Facts, pod: &Object, volume: &PersistentVolume) -> Option<&'a str> {
    let name = volume.name_any();
    let claims = facts.claims.iter().flatten().filter(|claim| claim.spec_str("/volumeName") == Some(&name));
    let is_mounted = |claim: &&Object| pod.mounted_claims().any(|(mounted, _)| mounted == claim.key.name);
    claims.filter(is_mounted).map(|claim| claim.key.name.as_str()).next()
}

/// Why a node that has the volume does not take the Pod. What other Pods take of a node is not known here.
fn why_not(pod: &Object, node: &Node) -> String {
    if is_cordoned(node) {
        return "is cordoned".into();
    }
    match untolerated(pod, node) {
        Some(taint) => format!("has the taint {}:{}", taint.key, taint.effect),
        None => "does not take the Pod: it has no room, or not the labels that the Pod wants".into(),
    }
}

fn terms(volume: &PersistentVolume) -> Option<&[NodeSelectorTerm]> {
    Some(&volume.spec.as_ref()?.node_affinity.as_ref()?.required.as_ref()?.node_selector_terms)
}

/// Whether a volume can be used on a node (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#node-affinity>).
fn allows(volume: &PersistentVolume, node: &Node) -> bool {
    terms(volume).is_none_or(|terms| one_holds(terms, node))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn a_volume_can_be_used_where_one_of_its_terms_holds() {
        let node: Node =
            serde_json::from_value(json!({ "metadata": { "name": "a", "labels": { "zone": "z", "disks": "4" } } }))
                .unwrap();
        let expression = |key: &str, operator: &str, values: &[&str]| json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] });
        let field =
            |name: &str| json!({ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": [name] }] });
        let mut both = expression("zone", "In", &["z"]);
        both["matchFields"] = field("b")["matchFields"].clone();
        let cases: Vec<(Value, bool)> = vec![
            (json!([expression("zone", "In", &["x", "z"])]), true),
            (json!([expression("zone", "In", &["x"])]), false),
            (json!([expression("zone", "In", &["x"]), field("a")]), true),
            (json!([field("b")]), false),
            (json!([both]), false),
            (json!([expression("zone", "NotIn", &["x"])]), true),
            (json!([expression("rack", "NotIn", &["x"])]), true),
            (json!([expression("rack", "Exists", &[])]), false),
            (json!([expression("rack", "DoesNotExist", &[])]), true),
            (json!([expression("disks", "Gt", &["3"])]), true),
            (json!([expression("disks", "Lt", &["3"])]), false),
            (json!([expression("rack", "Gt", &["3"])]), false),
            (json!([{}]), false),
        ];
        for (terms, expected) in cases {
            let volume = json!({ "metadata": { "name": "v" }, "spec": { "nodeAffinity": { "required": { "nodeSelectorTerms": terms } } } });
            assert_eq!(allows(&serde_json::from_value(volume).unwrap(), &node), expected, "{terms}");
        }
        assert!(allows(&serde_json::from_value(json!({ "metadata": { "name": "v" }, "spec": {} })).unwrap(), &node));
    }
}
