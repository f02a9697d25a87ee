//! What a Pod or a volume wants of the labels of nodes, and what a Pod wants of those of other Pods: whether it is so, and in words.

use std::collections::BTreeMap;

use k8s_openapi::{
    api::core::v1::{Node, NodeAffinity, NodeSelectorRequirement, NodeSelectorTerm},
    apimachinery::pkg::apis::meta::v1::LabelSelector,
};
use kube::ResourceExt;

use super::{Cause, Facts, Finding, owner_of};
use crate::observed::Object;

/// The field of a node that a term can name.
const NAME: &str = "metadata.name";

/// What a Pod wants of the labels of its node.
pub(super) struct NodeWish {
    selector: BTreeMap<String, String>,
    /// One of them must hold. `None`: nothing is wanted.
    terms: Option<Vec<NodeSelectorTerm>>,
}

impl NodeWish {
    pub fn by(pod: &Object) -> Self {
        let affinity = serde_json::from_value::<NodeAffinity>(pod.spec["affinity"]["nodeAffinity"].clone()).ok();
        let required = affinity.and_then(|affinity| affinity.required_during_scheduling_ignored_during_execution);
        Self {
            selector: serde_json::from_value(pod.spec["nodeSelector"].clone()).unwrap_or_default(),
            terms: required.map(|required| required.node_selector_terms),
        }
    }

    /// Whether a node has all of it.
    pub fn fits(&self, node: &Node) -> bool {
        self.is_selected(node) && self.terms.as_ref().is_none_or(|terms| one_holds(terms, node))
    }

    fn is_selected(&self, node: &Node) -> bool {
        self.selector.iter().all(|(label, value)| node.labels().get(label) == Some(value))
    }

    /// What of it none of these nodes has.
    pub fn lacking(&self, facts: &Facts, nodes: &[Node]) -> Finding {
        let selector: Vec<String> = self.selector.iter().map(|(label, value)| format!("{label}={value}")).collect();
        let selected: Vec<&Node> = nodes.iter().filter(|node| self.is_selected(node)).collect();
        if selected.is_empty() {
            let who = owner_of(facts.vm.managed_fields(), "/f:spec/f:nodeSelector");
            let text = format!("no node has the labels {}", selector.join(","));
            let labels: Option<Vec<String>> =
                self.selector.iter().map(|(label, value)| label_of(label, value)).collect();
            let todo = match labels {
                Some(labels) => {
                    format!("correct nodeSelector, or label a node: kubectl label node NODE {}", labels.join(" "))
                }
                None => "correct nodeSelector, or add such a node: kubectl get nodes --show-labels".into(),
            };
            let found = Finding::new(Cause::SelectorUnmatched, text, todo);
            let of_vm = facts.vm.spec.node_selector.as_ref().is_some_and(|of_vm| !of_vm.is_empty());
            return if of_vm {
                found.by(who).at("spec.nodeSelector")
            } else {
                found.at("Pod: spec.nodeSelector, of a template or a policy")
            };
        }
        let unmet: Vec<Vec<&NodeSelectorRequirement>> =
            self.terms.iter().flatten().map(|term| unmet(term, &selected)).collect();
        let told: Vec<String> = unmet.iter().map(|all| all_told(all.iter().copied())).collect();
        let which =
            if selector.is_empty() { String::new() } else { format!(" with the labels {}", selector.join(",")) };
        let text = format!("no node{which} has {}", told.join(", or "));
        let labels: Option<Vec<String>> = unmet.first().and_then(|all| all.iter().map(|it| label_for(it)).collect());
        let todo = match labels.filter(|labels| !labels.is_empty()) {
            Some(labels) => {
                format!("correct the affinity, or label a node: kubectl label node NODE {}", labels.join(" "))
            }
            None => "correct the affinity, or make a node as it wants one: kubectl get nodes --show-labels".into(),
        };
        of_affinity(facts, Finding::new(Cause::SelectorUnmatched, text, todo), "nodeAffinity")
    }
}

/// A finding about an affinity of a Pod (`part` of it): the VM may have it, or a template.
pub(super) fn of_affinity(facts: &Facts, found: Finding, part: &str) -> Finding {
    let of_vm = facts.vm.spec.affinity.as_ref().is_some_and(|affinity| !affinity[part].is_null());
    if of_vm {
        found.by(owner_of(facts.vm.managed_fields(), "/f:spec/f:affinity")).at("spec.affinity")
    } else {
        found.at("Pod: spec.affinity, of a template or a policy")
    }
}

/// Whether one of the terms holds for a node, with all its requirements
/// (<https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#node-affinity>).
pub(super) fn one_holds(terms: &[NodeSelectorTerm], node: &Node) -> bool {
    terms.iter().any(|term| {
        let mut all = requirements(term).peekable();
        all.peek().is_some() && all.all(|requirement| is_met_by(requirement, node))
    })
}

/// The terms in words: `kubernetes.io/hostname in (a, b)`.
pub(super) fn told(terms: &[NodeSelectorTerm]) -> String {
    terms.iter().map(|term| all_told(requirements(term))).collect::<Vec<_>>().join(", or ")
}

/// The requirements of a term. Those about fields are about another thing by their keys: [`NAME`] is no label.
fn requirements(term: &NodeSelectorTerm) -> impl Iterator<Item = &NodeSelectorRequirement> {
    term.match_expressions.iter().chain(&term.match_fields).flatten()
}

/// The requirements of a term that none of the nodes meets; all of them, if only together they are too many.
fn unmet<'a>(term: &'a NodeSelectorTerm, nodes: &[&Node]) -> Vec<&'a NodeSelectorRequirement> {
    let is_unmet = |it: &&NodeSelectorRequirement| !nodes.iter().any(|node| is_met_by(it, node));
    let alone: Vec<_> = requirements(term).filter(is_unmet).collect();
    if alone.is_empty() { requirements(term).collect() } else { alone }
}

fn is_met_by(requirement: &NodeSelectorRequirement, node: &Node) -> bool {
    let NodeSelectorRequirement { key, operator, values } = requirement;
    let name = node.name_any();
    let value = if key == NAME { Some(&name) } else { node.labels().get(key) };
    is_met(operator, values.as_deref().unwrap_or_default(), value)
}

fn is_met(operator: &str, values: &[String], value: Option<&String>) -> bool {
    let number = |text: Option<&String>| text.and_then(|text| text.parse::<i64>().ok());
    let compared = |is: fn(&i64, &i64) -> bool| match (number(value), number(values.first())) {
        (Some(value), Some(bound)) => is(&value, &bound),
        _ => false,
    };
    match operator {
        "In" => value.is_some_and(|value| values.contains(value)),
        "NotIn" => value.is_none_or(|value| !values.contains(value)),
        "Exists" => value.is_some(),
        "DoesNotExist" => value.is_none(),
        "Gt" => compared(i64::gt),
        "Lt" => compared(i64::lt),
        // What this program does not know keeps no node away.
        _ => true,
    }
}

/// The label with which a node would meet a requirement.
fn label_for(requirement: &NodeSelectorRequirement) -> Option<String> {
    let NodeSelectorRequirement { key, operator, values } = requirement;
    let value = values.iter().flatten().next().filter(|_| operator == "In" && key != NAME)?;
    label_of(key, value)
}

/// A label that a person may give a node. The cluster itself gives those that say what a node is
/// (<https://kubernetes.io/docs/reference/labels-annotations-taints/>).
fn label_of(key: &str, value: &str) -> Option<String> {
    let domain = key.split_once('/').map(|(domain, _)| domain).unwrap_or_default();
    let is_of_cluster = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    (!is_of_cluster).then(|| format!("{key}={value}"))
}

fn all_told<'a>(requirements: impl Iterator<Item = &'a NodeSelectorRequirement>) -> String {
    let told = requirements.map(|it| one_told(&it.key, &it.operator, it.values.as_deref().unwrap_or_default()));
    let told = told.collect::<Vec<_>>().join(" and ");
    // Such a term holds for no node.
    if told.is_empty() { "what an empty term wants".into() } else { told }
}

/// A requirement as kubectl's selectors have it.
fn one_told(key: &str, operator: &str, values: &[String]) -> String {
    let all = values.join(", ");
    match operator {
        "In" => format!("{key} in ({all})"),
        "NotIn" => format!("{key} notin ({all})"),
        "Exists" => key.to_owned(),
        "DoesNotExist" => format!("!{key}"),
        "Gt" => format!("{key} > {all}"),
        "Lt" => format!("{key} < {all}"),
        _ => format!("{key} {operator} {all}").trim_end().to_owned(),
    }
}

/// Whether a selector is about whoever has these labels.
pub(super) fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> bool {
    let mut wanted = selector.match_labels.iter().flatten();
    let mut expressions = selector.match_expressions.iter().flatten();
    wanted.all(|(label, value)| labels.get(label) == Some(value))
        && expressions.all(|it| is_met(&it.operator, it.values.as_deref().unwrap_or_default(), labels.get(&it.key)))
}

/// Whether a selector is about everybody.
pub(super) fn selects_all(selector: &LabelSelector) -> bool {
    let mut wanted = selector.match_labels.iter().flatten();
    wanted.next().is_none() && selector.match_expressions.iter().flatten().next().is_none()
}

/// A selector in words: `app=db, tier in (a, b)`.
pub(super) fn labels_told(selector: &LabelSelector) -> String {
    if selects_all(selector) {
        return "(any)".into();
    }
    let labels = selector.match_labels.iter().flatten().map(|(label, value)| format!("{label}={value}"));
    let expressions = selector.match_expressions.iter().flatten();
    let expressions = expressions.map(|it| one_told(&it.key, &it.operator, it.values.as_deref().unwrap_or_default()));
    labels.chain(expressions).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::explain::tests::{explained, pending};

    #[test]
    fn labels_are_selected_as_kubernetes_does_it() {
        let labels = [("app", "db"), ("tier", "a")].map(|(label, value)| (label.to_owned(), value.to_owned()));
        let labels = BTreeMap::from(labels);
        let expression = |key: &str, operator: &str, values: &[&str]| json!({ "matchExpressions": [{ "key": key, "operator": operator, "values": values }] });
        for (selector, expected, words) in [
            (json!({}), true, "(any)"),
            (json!({ "matchLabels": { "app": "db" } }), true, "app=db"),
            (json!({ "matchLabels": { "app": "db", "tier": "b" } }), false, "app=db, tier=b"),
            (expression("tier", "In", &["a", "b"]), true, "tier in (a, b)"),
            (expression("rack", "In", &["a"]), false, "rack in (a)"),
            (expression("tier", "NotIn", &["a"]), false, "tier notin (a)"),
            (expression("rack", "NotIn", &["a"]), true, "rack notin (a)"),
            (expression("app", "Exists", &[]), true, "app"),
            (expression("app", "DoesNotExist", &[]), false, "!app"),
        ] {
            let selector: LabelSelector = serde_json::from_value(selector).unwrap();
            assert_eq!((selects(&selector, &labels), labels_told(&selector).as_str()), (expected, words));
        }
    }

    /// The Pod wants one of these terms of its node, which is `node-1` with the labels `zone=z, disk=hdd`.
    fn wants(facts: &mut Value, terms: Value) {
        pending(facts, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector");
        facts["nodes"][0]["metadata"]["labels"] = json!({ "zone": "z", "disk": "hdd" });
        let required = json!({ "nodeSelectorTerms": terms });
        facts["pod"]["spec"]["affinity"] =
            json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": required } });
    }

    #[test]
    fn what_no_node_has_of_an_affinity_is_named() {
        let expressions = |all: &[(&str, &str, &[&str])]| {
            let all =
                all.iter().map(|(key, operator, values)| json!({ "key": key, "operator": operator, "values": values }));
            json!({ "matchExpressions": all.collect::<Vec<_>>() })
        };
        let ssd = || expressions(&[("disk", "In", &["ssd", "nvme"])]);
        let name = json!({ "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["node-7"] }] });
        let label = |labels: &str| format!("correct the affinity, or label a node: kubectl label node NODE {labels}");
        let make =
            || "correct the affinity, or make a node as it wants one: kubectl get nodes --show-labels".to_owned();
        for (terms, words, todo) in [
            (json!([ssd()]), "no node has disk in (ssd, nvme)", label("disk=ssd")),
            // Only what is missing.
            (
                json!([expressions(&[("zone", "In", &["z"]), ("disk", "In", &["ssd"])])]),
                "no node has disk in (ssd)",
                label("disk=ssd"),
            ),
            (json!([ssd(), name]), "no node has disk in (ssd, nvme), or metadata.name in (node-7)", label("disk=ssd")),
            (json!([name]), "no node has metadata.name in (node-7)", make()),
            (json!([expressions(&[("zone", "NotIn", &["z"])])]), "no node has zone notin (z)", make()),
            (json!([expressions(&[("cpus", "Gt", &["3"])])]), "no node has cpus > 3", make()),
        ] {
            let found = explained(|f| wants(f, terms)).cause.unwrap();
            assert_eq!((found.cause, found.text.as_str(), found.what_to_do), (Cause::SelectorUnmatched, words, todo));
            let field = found.field.as_deref();
            assert_eq!((field, found.who), (Some("Pod: spec.affinity, of a template or a policy"), None), "{words}");
        }
        let together = explained(|f| {
            wants(f, json!([expressions(&[("zone", "In", &["z"]), ("disk", "In", &["ssd"])])]));
            let mut other = f["nodes"][0].clone();
            other["metadata"] = json!({ "name": "node-2", "labels": { "disk": "ssd" } });
            f["nodes"].as_array_mut().unwrap().push(other);
        });
        assert_eq!(together.cause.unwrap().text, "no node has zone in (z) and disk in (ssd)");
        let selected = explained(|f| {
            wants(f, json!([ssd()]));
            f["pod"]["spec"]["nodeSelector"] = json!({ "zone": "z" });
        });
        assert_eq!(selected.cause.unwrap().text, "no node with the labels zone=z has disk in (ssd, nvme)");
        // The VM has it.
        let of_vm = explained(|f| {
            wants(f, json!([ssd()]));
            f["vm"]["spec"]["affinity"] = f["pod"]["spec"]["affinity"].clone();
            f["vm"]["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:affinity"] = json!({});
        });
        let found = of_vm.cause.unwrap();
        assert_eq!((found.field.as_deref(), found.who.as_deref()), (Some("spec.affinity"), Some("kubectl-edit")));
        // Only nodes that have it are looked at further.
        let cordoned = explained(|f| {
            wants(f, json!([ssd()]));
            let mut other = f["nodes"][0].clone();
            other["metadata"] = json!({ "name": "node-2", "labels": { "disk": "ssd" } });
            other["spec"] = json!({ "unschedulable": true });
            f["nodes"].as_array_mut().unwrap().push(other);
        });
        assert_eq!(cordoned.cause.unwrap().text, "node node-2 is cordoned");
    }
}
