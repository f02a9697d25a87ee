//! Who stands in the way of a Pod on the nodes: a Pod that has the port that it needs, a Pod of which one of the two does not want the other beside it;
//! or nobody, where it wants to be beside somebody.
//!
//! The scheduler only counts the nodes for each of these reasons
//! (<https://kubernetes.io/docs/concepts/scheduling-eviction/assign-pod-node/#inter-pod-affinity-and-anti-affinity>).

use std::{collections::BTreeMap, fmt, iter, sync::Arc};

use k8s_openapi::{
    api::core::v1::{Affinity, Container, ContainerPort, Node, Pod, PodAffinityTerm, PodSpec},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::ResourceExt;

use super::{
    Cause, Facts, Finding,
    taint::{is_cordoned, untolerated},
    terms::{NodeWish, labels_told, of_affinity, selects, selects_all},
};
use crate::{
    object::{APP_NAME, VM_ANNOTATION, named_vm},
    observed::Object,
};

/// The most Pods that a text names.
pub(super) const MOST: usize = 3;

/// The address of a port that stands for all addresses of the node.
const ANY: &str = "0.0.0.0";

/// Pods that have a node.
#[derive(Clone, Debug)]
pub struct Neighbours {
    pods: Arc<[Pod]>,
    is_all: bool,
}

impl Neighbours {
    /// The Pods of all namespaces, or only those of the VM's.
    pub fn new(pods: impl Into<Arc<[Pod]>>, is_all: bool) -> Self {
        Self { pods: pods.into(), is_all }
    }

    /// Which Pods are listed for that.
    #[must_use]
    pub fn field_selector() -> &'static str {
        "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
    }

    /// A Pod with what others can collide with: a cluster may have many.
    pub fn reduced(pod: Pod) -> Pod {
        let ObjectMeta { name, namespace, labels, annotations, deletion_timestamp, .. } = pod.metadata;
        let annotations = annotations.map(|mut all| {
            all.retain(|key, _| key == VM_ANNOTATION);
            all
        });
        let spec = pod.spec.map(|spec| {
            let ports_alone = |container: Container| Container {
                name: container.name,
                ports: container.ports,
                restart_policy: container.restart_policy,
                ..Container::default()
            };
            PodSpec {
                node_name: spec.node_name,
                host_network: spec.host_network,
                affinity: spec.affinity,
                containers: spec.containers.into_iter().map(ports_alone).collect(),
                init_containers: spec.init_containers.map(|all| all.into_iter().map(ports_alone).collect()),
                ..PodSpec::default()
            }
        });
        let metadata = ObjectMeta { name, namespace, labels, annotations, deletion_timestamp, ..ObjectMeta::default() };
        Pod { metadata, spec, status: None }
    }
}

type Check = fn(&View<'_>) -> Option<Finding>;

/// Words of the scheduler, and what is checked then.
const CHECKS: [(&str, Check); 4] = [
    ("didn't have free ports", port),
    ("didn't match pod anti-affinity rules", apart),
    ("didn't satisfy existing pods anti-affinity rules", refused),
    ("didn't match pod affinity rules", together),
];

/// Whether the scheduler's words about a Pod without a node are about the Pods that have one.
pub fn concern(pod: &Object) -> bool {
    let condition = pod.condition("PodScheduled", "False").filter(|_| pod.node_name().is_none());
    let message = condition.and_then(|condition| condition["message"].as_str()).map(said).unwrap_or_default();
    CHECKS.iter().any(|(words, _)| message.contains(words))
}

/// The scheduler's words about the nodes, without what it says of preemption and of resource claims.
pub(super) fn said(message: &str) -> &str {
    let ends = [". no new claims to deallocate", ". preemption: ", ". not found"];
    let end = ends.iter().filter_map(|end| message.find(end)).min().unwrap_or(message.len());
    message.get(..end).unwrap_or(message)
}

/// Who is in the way of a Pod of which the scheduler says that.
pub(super) fn in_the_way(facts: &Facts, pod: &Object, message: &str) -> Option<Finding> {
    let view = View::new(facts, pod, facts.neighbours.as_ref()?);
    let said = said(message);
    let found = CHECKS.iter().filter(|(words, _)| said.contains(words)).find_map(|(_, check)| check(&view))?;
    // Other nodes have other reasons.
    let is_all = !said.contains(", ");
    Some(if is_all { found } else { Finding { text: format!("{}; the scheduler says: {said}", found.text), ..found } })
}

/// What is looked at.
struct View<'a> {
    facts: &'a Facts,
    pod: &'a Object,
    namespace: String,
    affinity: Affinity,
    others: Vec<Other<'a>>,
    is_all: bool,
    /// The nodes that would take the Pod if nobody were there. `None`: they are not known.
    open: Option<Vec<&'a Node>>,
}

/// A Pod that has a node.
struct Other<'a> {
    pod: &'a Pod,
    namespace: &'a str,
    node: &'a str,
}

impl<'a> Other<'a> {
    /// `None`: it takes nothing of a node any more.
    fn new(pod: &'a Pod) -> Option<Self> {
        let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
        let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
        let node = pod.spec.as_ref()?.node_name.as_deref().filter(|node| !node.is_empty() && !has_ended)?;
        Some(Self { pod, namespace: pod.metadata.namespace.as_deref().unwrap_or_default(), node })
    }

    /// How it leaves its node.
    fn stop(&self) -> String {
        let (name, namespace) = (self.pod.name_any(), self.namespace);
        if self.pod.metadata.deletion_timestamp.is_some() {
            return format!("wait until Pod {namespace}/{name} has ended");
        }
        let is_of_vm = self.pod.labels().get("app.kubernetes.io/name").is_some_and(|it| it == APP_NAME);
        match named_vm(self.pod.annotations(), self.pod.labels()).filter(|_| is_of_vm) {
            Some(vm) => format!("kubectl vm stop {vm} -n {namespace}"),
            None => format!("stop that Pod (kubectl -n {namespace} describe pod {name} says whose it is)"),
        }
    }

    /// The ports that it takes of its node.
    fn ports(&self) -> Vec<HostPort> {
        let Some(spec) = &self.pod.spec else { return Vec::new() };
        let sidecars =
            spec.init_containers.iter().flatten().filter(|it| it.restart_policy.as_deref() == Some("Always"));
        let ports = spec.containers.iter().chain(sidecars).flat_map(|container| container.ports.iter().flatten());
        ports.filter_map(|port| HostPort::of(port, spec.host_network == Some(true))).collect()
    }

    /// Its rule by which the Pod may not be beside it.
    fn rule_against(&self, view: &View<'_>) -> Option<&'a PodAffinityTerm> {
        let rules = self.pod.spec.as_ref()?.affinity.as_ref()?.pod_anti_affinity.as_ref()?;
        let mut required = rules.required_during_scheduling_ignored_during_execution.iter().flatten();
        required.find(|term| {
            is_about(term, self.namespace, &view.namespace, &view.pod.labels)
                && view.is_near(self.node, &term.topology_key)
        })
    }
}

impl fmt::Display for Other<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pod {}/{} on node {}", self.namespace, self.pod.name_any(), self.node)
    }
}

impl<'a> View<'a> {
    fn new(facts: &'a Facts, pod: &'a Object, neighbours: &'a Neighbours) -> Self {
        let wanted = NodeWish::by(pod);
        let is_open = |node: &&Node| wanted.fits(node) && !is_cordoned(node) && untolerated(pod, node).is_none();
        Self {
            facts,
            pod,
            namespace: facts.vm.namespace().unwrap_or_default(),
            affinity: serde_json::from_value(pod.spec["affinity"].clone()).unwrap_or_default(),
            others: neighbours.pods.iter().filter_map(Other::new).collect(),
            is_all: neighbours.is_all,
            open: facts.nodes.as_ref().map(|nodes| nodes.iter().filter(is_open).collect()),
        }
    }

    /// Whether a node would take the Pod.
    fn is_open(&self, name: &str) -> bool {
        self.open.as_ref().is_none_or(|open| open.iter().any(|node| node.name_any() == name))
    }

    /// Whether a node that would take the Pod has the same value of a label as that node.
    fn is_near(&self, name: &str, label: &str) -> bool {
        let (Some(nodes), Some(open)) = (&self.facts.nodes, &self.open) else { return true };
        let value = nodes.iter().find(|node| node.name_any() == name).and_then(|node| node.labels().get(label));
        value.is_some_and(|value| open.iter().any(|node| node.labels().get(label) == Some(value)))
    }

    /// The ports that the Pod needs of its node, each with its field.
    fn ports(&self) -> Vec<(String, HostPort)> {
        let is_host_network = self.pod.spec["hostNetwork"] == true;
        let mut found = Vec::new();
        for list in ["containers", "initContainers"] {
            let all = self.pod.spec[list].as_array().into_iter().flatten();
            for container in all.filter(|it| list == "containers" || it["restartPolicy"] == "Always") {
                let field = format!("Pod: spec.{list}[{}].ports", container["name"].as_str().unwrap_or_default());
                let ports: Vec<ContainerPort> = serde_json::from_value(container["ports"].clone()).unwrap_or_default();
                let ports = ports.iter().filter_map(|port| HostPort::of(port, is_host_network));
                found.extend(ports.map(|port| (field.clone(), port)));
            }
        }
        found
    }

    /// Where a term looks for Pods, in words, if all of these are known.
    fn place_of(&self, term: &PodAffinityTerm) -> Option<String> {
        match (&term.namespace_selector, term.namespaces.as_deref().unwrap_or_default()) {
            (Some(selector), _) => (self.is_all && selects_all(selector)).then(|| "in the cluster".to_owned()),
            (None, []) => Some(format!("in the namespace {}", self.namespace)),
            (None, [one]) if self.is_all || *one == self.namespace => Some(format!("in the namespace {one}")),
            (None, several) => self.is_all.then(|| format!("in the namespaces {}", several.join(", "))),
        }
    }
}

/// A port of a node.
struct HostPort {
    port: i32,
    protocol: String,
    address: String,
}

impl HostPort {
    /// The port that a container takes of its node, if it does.
    fn of(port: &ContainerPort, is_host_network: bool) -> Option<Self> {
        let own = is_host_network.then_some(port.container_port);
        Some(Self {
            port: port.host_port.filter(|port| *port > 0).or(own)?,
            protocol: port.protocol.clone().unwrap_or_else(|| "TCP".into()),
            address: port.host_ip.clone().filter(|address| !address.is_empty()).unwrap_or_else(|| ANY.into()),
        })
    }

    /// Whether no node has both, as the scheduler sees it.
    fn excludes(&self, other: &Self) -> bool {
        let is_same_address = self.address == other.address || self.address == ANY || other.address == ANY;
        self.port == other.port && self.protocol == other.protocol && is_same_address
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.port, self.protocol)
    }
}

/// Whether a term of a Pod of the namespace `home` is about a Pod with these labels in that namespace. Which namespaces a selector means that is not
/// empty is not known here.
fn is_about(term: &PodAffinityTerm, home: &str, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
    let named = term.namespaces.as_deref().unwrap_or_default();
    let is_there = named.iter().any(|it| it == namespace)
        || match &term.namespace_selector {
            Some(selector) => selects_all(selector),
            None => named.is_empty() && namespace == home,
        };
    is_there && term.label_selector.as_ref().is_some_and(|selector| selects(selector, labels))
}

/// The first ones of many.
pub(super) fn listed(all: impl Iterator<Item = String>) -> String {
    let all: Vec<String> = all.collect();
    let more = all.len().saturating_sub(MOST);
    let first = all.into_iter().take(MOST).collect::<Vec<_>>().join(", ");
    if more == 0 { first } else { format!("{first} and {more} more") }
}

/// Each node that would take the Pod has a port that it needs for another Pod.
fn port(view: &View<'_>) -> Option<Finding> {
    let wanted = view.ports();
    let taken = view.others.iter().filter_map(|other| {
        let ports = other.ports();
        let (field, port) = wanted.iter().find(|(_, port)| ports.iter().any(|it| it.excludes(port)))?;
        view.is_open(other.node).then_some((other, field, port))
    });
    let taken: Vec<_> = taken.collect();
    let (first, field, _) = taken.first()?;
    let told = listed(taken.iter().map(|(other, _, port)| format!("{other} has the port {port}")));
    let text = format!("{told}, which Pod {} needs too", view.pod.key.name);
    let todo = format!("{}, or take another port in the VM or its template", first.stop());
    Some(Finding::new(Cause::Unschedulable, text, todo).at(field.as_str()))
}

/// The Pod requires not to be beside others.
fn apart(view: &View<'_>) -> Option<Finding> {
    let rules = view.affinity.pod_anti_affinity.as_ref()?;
    rules.required_during_scheduling_ignored_during_execution.iter().flatten().find_map(|term| {
        let (selector, key) = (term.label_selector.as_ref()?, &term.topology_key);
        let is_meant = |other: &&Other<'_>| {
            is_about(term, &view.namespace, other.namespace, other.pod.labels()) && view.is_near(other.node, key)
        };
        let found: Vec<_> = view.others.iter().filter(is_meant).collect();
        let first = found.first()?;
        let text = format!(
            "{} {} the labels {}, with which Pod {} wants to share no {key}",
            listed(found.iter().map(ToString::to_string)),
            if found.len() == 1 { "has" } else { "have" },
            labels_told(selector),
            view.pod.key.name
        );
        let todo = format!("{}, or correct spec.affinity or the template, or add a node", first.stop());
        Some(of_affinity(view.facts, Finding::new(Cause::Unschedulable, text, todo), "podAntiAffinity"))
    })
}

/// Others require that the Pod is not beside them.
fn refused(view: &View<'_>) -> Option<Finding> {
    let mut all = view.others.iter().filter_map(|other| Some((other, other.rule_against(view)?)));
    let (first, term) = all.next()?;
    let is_same =
        |it: &PodAffinityTerm| it.label_selector == term.label_selector && it.topology_key == term.topology_key;
    let same = all.filter(|(_, rule)| is_same(rule)).map(|(other, _)| other);
    let found: Vec<_> = iter::once(first).chain(same).collect();
    let (want, them) = if found.len() == 1 { ("wants", "it") } else { ("want", "them") };
    let text = format!(
        "{} {want} no Pod with the labels {} beside {them} (in the same {}), and Pod {} has these",
        listed(found.iter().map(ToString::to_string)),
        labels_told(term.label_selector.as_ref()?),
        term.topology_key,
        view.pod.key.name
    );
    let todo = format!("{}, or correct its affinity or the labels of the Pod, or add a node", first.stop());
    let field = format!("Pod {}/{}: spec.affinity", first.namespace, first.pod.name_any());
    Some(Finding::new(Cause::Unschedulable, text, todo).at(field))
}

/// The Pod requires to be beside others, and there is none.
fn together(view: &View<'_>) -> Option<Finding> {
    let rules = view.affinity.pod_affinity.as_ref()?;
    rules.required_during_scheduling_ignored_during_execution.iter().flatten().find_map(|term| {
        let (selector, place) = (term.label_selector.as_ref()?, view.place_of(term)?);
        let is_meant =
            |namespace: &str, labels: &BTreeMap<String, String>| is_about(term, &view.namespace, namespace, labels);
        let is_there = view.others.iter().any(|other| is_meant(other.namespace, other.pod.labels()));
        // The first Pod of those that want to be together is let through.
        if is_there || is_meant(&view.namespace, &view.pod.labels) {
            return None;
        }
        let name = &view.pod.key.name;
        let text = format!(
            "no Pod with the labels {} runs {place}, and Pod {name} wants to be beside one",
            labels_told(selector)
        );
        let todo = "start such a Pod, or correct spec.affinity or the template";
        Some(of_affinity(view.facts, Finding::new(Cause::Unschedulable, text, todo), "podAffinity"))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::explain::tests::{explained, pending};

    const HOST: &str = "kubernetes.io/hostname";
    const PORTS: &str =
        "0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports. preemption: 0/1 nodes";
    const APART: &str = "0/1 nodes are available: 1 node(s) didn't match pod anti-affinity rules";
    const THEIRS: &str = "0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules";
    const TOGETHER: &str = "0/1 nodes are available: 1 node(s) didn't match pod affinity rules";

    type Plant = fn(&mut Value);

    /// The Pod `orchard/apple` has no node, and `vms/db` is on `node-1`. A selector of the Pod excludes `node-2`.
    fn facts(facts: &mut Value, message: &str) {
        pending(facts, message);
        let mut second = facts["nodes"][0].clone();
        facts["nodes"][0]["metadata"]["labels"] = json!({ HOST: "node-1", "zone": "z", "of": "apple" });
        second["metadata"] = json!({ "name": "node-2", "labels": { HOST: "node-2", "zone": "z" } });
        facts["nodes"].as_array_mut().unwrap().push(second);
        facts["pod"]["spec"]["nodeSelector"] = json!({ "of": "apple" });
        facts["pod"]["metadata"]["labels"]["app"] = json!("web");
        facts["neighbours"] = json!([{
            "metadata": { "name": "db", "namespace": "vms", "labels": { "app": "db" } },
            "spec": { "nodeName": "node-1", "containers": [{ "name": "c" }] }, "status": { "phase": "Running" },
        }]);
    }

    fn other(facts: &mut Value) -> &mut Value {
        &mut facts["neighbours"][0]
    }

    /// The other Pod once more, with another name and on another node.
    fn more(facts: &mut Value, name: &str, node: &str) {
        let mut more = facts["neighbours"][0].clone();
        more["metadata"]["name"] = json!(name);
        more["spec"]["nodeName"] = json!(node);
        facts["neighbours"].as_array_mut().unwrap().push(more);
    }

    /// A required term, as the affinity of that kind.
    fn affinity(kind: &str, term: Value) -> Value {
        json!({ kind: { "requiredDuringSchedulingIgnoredDuringExecution": [term] } })
    }

    /// A term about Pods with that label, of all namespaces.
    fn term(app: &str, key: &str) -> Value {
        json!({ "labelSelector": { "matchLabels": { "app": app } }, "topologyKey": key, "namespaceSelector": {} })
    }

    /// Both Pods have ports of their nodes.
    fn both(facts: &mut Value, own: Value, others: Value) {
        facts["pod"]["spec"]["containers"][0]["ports"] = json!([own]);
        other(facts)["spec"]["containers"][0]["ports"] = json!([others]);
    }

    /// The Pod wants that of the Pods of the database.
    fn wants(facts: &mut Value, kind: &str, edit: impl FnOnce(&mut Value)) {
        let mut term = term("db", HOST);
        edit(&mut term);
        facts["pod"]["spec"]["affinity"] = affinity(kind, term);
    }

    fn apart(facts: &mut Value) {
        wants(facts, "podAntiAffinity", |_| ());
    }

    /// The database does not want the Pod.
    fn refuses(facts: &mut Value, edit: impl FnOnce(&mut Value)) {
        let mut term = term("web", HOST);
        edit(&mut term);
        other(facts)["spec"]["affinity"] = affinity("podAntiAffinity", term);
    }

    /// The scheduler's words, how it is planted, and what is said.
    #[rustfmt::skip]
    const FOUND: &[(&str, Plant, &str)] = &[
        (PORTS, |f| both(f, json!({ "containerPort": 1, "hostPort": 5900 }), json!({ "containerPort": 2, "hostPort": 5900 })),
            "Pod vms/db on node node-1 has the port 5900/TCP, which Pod apple needs too"),
        // Pods in the node's network.
        (PORTS, |f| { both(f, json!({ "containerPort": 5900 }), json!({ "containerPort": 5900 })); f["pod"]["spec"]["hostNetwork"] = json!(true); other(f)["spec"]["hostNetwork"] = json!(true); },
            "Pod vms/db on node node-1 has the port 5900/TCP, which Pod apple needs too"),
        (PORTS, |f| both(f, json!({ "containerPort": 1, "hostPort": 53, "protocol": "UDP", "hostIP": "10.0.0.1" }), json!({ "containerPort": 1, "hostPort": 53, "protocol": "UDP" })),
            "Pod vms/db on node node-1 has the port 53/UDP, which Pod apple needs too"),
        (PORTS, |f| { both(f, json!({ "containerPort": 1, "hostPort": 80 }), json!({ "containerPort": 1, "hostPort": 80 })); for name in ["a", "b", "c"] { more(f, name, "node-1"); } },
            "Pod vms/db on node node-1 has the port 80/TCP, Pod vms/a on node node-1 has the port 80/TCP, Pod vms/b on node node-1 has the port 80/TCP and 1 more, which Pod apple needs too"),
        ("0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't have free ports for the requested pod ports", |f| both(f, json!({ "containerPort": 1, "hostPort": 80 }), json!({ "containerPort": 1, "hostPort": 80 })),
            "Pod vms/db on node node-1 has the port 80/TCP, which Pod apple needs too; the scheduler says: 0/2 nodes are available: 1 Insufficient cpu, 1 node(s) didn't have free ports for the requested pod ports"),
        (APART, apart, "Pod vms/db on node node-1 has the labels app=db, with which Pod apple wants to share no kubernetes.io/hostname"),
        (APART, |f| { apart(f); more(f, "db-2", "node-1"); }, "Pod vms/db on node node-1, Pod vms/db-2 on node node-1 have the labels app=db, with which Pod apple wants to share no kubernetes.io/hostname"),
        // Another node of the same zone.
        (APART, |f| { wants(f, "podAntiAffinity", |term| term["topologyKey"] = json!("zone")); other(f)["spec"]["nodeName"] = json!("node-2"); },
            "Pod vms/db on node node-2 has the labels app=db, with which Pod apple wants to share no zone"),
        (APART, |f| wants(f, "podAntiAffinity", |term| { term["namespaceSelector"] = Value::Null; term["namespaces"] = json!(["vms"]); }), "Pod vms/db on node node-1 has the labels app=db"),
        (APART, |f| { wants(f, "podAntiAffinity", |term| term["namespaceSelector"] = Value::Null); other(f)["metadata"]["namespace"] = json!("orchard"); }, "Pod orchard/db on node node-1 has the labels app=db"),
        (APART, |f| wants(f, "podAntiAffinity", |term| term["labelSelector"] = json!({ "matchExpressions": [{ "key": "app", "operator": "In", "values": ["db", "cache"] }] })), "Pod vms/db on node node-1 has the labels app in (db, cache)"),
        (APART, |f| { apart(f); f["nodes"] = Value::Null; }, "Pod vms/db on node node-1 has the labels app=db"),
        (THEIRS, |f| refuses(f, |_| ()), "Pod vms/db on node node-1 wants no Pod with the labels app=web beside it (in the same kubernetes.io/hostname), and Pod apple has these"),
        (THEIRS, |f| { refuses(f, |_| ()); more(f, "db-2", "node-1"); }, "Pod vms/db on node node-1, Pod vms/db-2 on node node-1 want no Pod with the labels app=web beside them (in the same kubernetes.io/hostname), and Pod apple has these"),
        (TOGETHER, |f| wants(f, "podAffinity", |term| term["labelSelector"]["matchLabels"]["app"] = json!("cache")), "no Pod with the labels app=cache runs in the cluster, and Pod apple wants to be beside one"),
        (TOGETHER, |f| wants(f, "podAffinity", |term| term["namespaceSelector"] = Value::Null), "no Pod with the labels app=db runs in the namespace orchard, and Pod apple wants to be beside one"),
        (TOGETHER, |f| { wants(f, "podAffinity", |term| term["namespaceSelector"] = Value::Null); f["sees_all"] = json!(false); }, "no Pod with the labels app=db runs in the namespace orchard"),
        (TOGETHER, |f| wants(f, "podAffinity", |term| { term["namespaceSelector"] = Value::Null; term["namespaces"] = json!(["a", "b"]); }), "no Pod with the labels app=db runs in the namespaces a, b"),
        (TOGETHER, |f| { wants(f, "podAffinity", |_| ()); other(f)["status"]["phase"] = json!("Succeeded"); }, "no Pod with the labels app=db runs in the cluster"),
    ];

    #[test]
    fn who_is_in_the_way_is_named() {
        for (message, plant, words) in FOUND {
            let explanation = explained(|f| {
                facts(f, message);
                plant(f);
            });
            let found = explanation.cause.unwrap();
            assert!(found.cause == Cause::Unschedulable && found.text.starts_with(words), "{}\n{words}", found.text);
        }
    }

    /// What is not in the way, or not known: the scheduler's words remain.
    #[test]
    #[rustfmt::skip]
    fn who_is_not_in_the_way_is_not_named() {
        let cases: &[(&str, Plant)] = &[
            (PORTS, |f| both(f, json!({ "containerPort": 5900 }), json!({ "containerPort": 5900, "hostPort": 5900 }))),
            (PORTS, |f| both(f, json!({ "containerPort": 1, "hostPort": 53 }), json!({ "containerPort": 1, "hostPort": 53, "protocol": "UDP" }))),
            (PORTS, |f| both(f, json!({ "containerPort": 1, "hostPort": 53, "hostIP": "10.0.0.1" }), json!({ "containerPort": 1, "hostPort": 53, "hostIP": "10.0.0.2" }))),
            (PORTS, |f| { both(f, json!({ "containerPort": 1, "hostPort": 80 }), json!({ "containerPort": 1, "hostPort": 80 })); other(f)["spec"]["nodeName"] = json!("node-2"); }),
            (PORTS, |f| { both(f, json!({ "containerPort": 1, "hostPort": 80 }), json!({ "containerPort": 1, "hostPort": 80 })); other(f)["status"]["phase"] = json!("Failed"); }),
            (PORTS, |f| { both(f, json!({ "containerPort": 1, "hostPort": 80 }), json!({ "containerPort": 1, "hostPort": 80 })); f["neighbours"] = Value::Null; }),
            // The scheduler does not speak of that.
            ("0/1 nodes are available: 1 Insufficient cpu", apart),
            (PORTS, apart),
            (APART, |f| { apart(f); other(f)["metadata"]["labels"] = json!({}); }),
            (APART, |f| { apart(f); other(f)["spec"]["nodeName"] = json!("node-2"); }),
            (APART, |f| wants(f, "podAntiAffinity", |term| term["topologyKey"] = json!("rack"))),
            (APART, |f| wants(f, "podAntiAffinity", |term| term["namespaceSelector"] = Value::Null)),
            (APART, |f| wants(f, "podAntiAffinity", |term| term["namespaceSelector"] = json!({ "matchLabels": { "team": "a" } }))),
            (THEIRS, |f| { refuses(f, |_| ()); other(f)["spec"]["nodeName"] = json!("node-2"); }),
            (THEIRS, |f| refuses(f, |term| term["namespaceSelector"] = Value::Null)),
            (TOGETHER, |f| wants(f, "podAffinity", |_| ())),
            // Other namespaces are not seen.
            (TOGETHER, |f| { wants(f, "podAffinity", |term| term["labelSelector"]["matchLabels"]["app"] = json!("cache")); f["sees_all"] = json!(false); }),
            (TOGETHER, |f| wants(f, "podAffinity", |term| term["namespaceSelector"] = json!({ "matchLabels": { "team": "a" } }))),
            // It is the first one.
            (TOGETHER, |f| wants(f, "podAffinity", |term| term["labelSelector"]["matchLabels"]["app"] = json!("web"))),
        ];
        for (number, (message, plant)) in cases.iter().enumerate() {
            let explanation = explained(|f| {
                facts(f, message);
                plant(f);
            });
            let text = explanation.cause.unwrap().text;
            assert!(text.starts_with("no node takes Pod apple: 0/1 nodes are available: 1 "), "{number}: {text}");
        }
    }

    #[test]
    fn what_can_be_done_names_the_vm_of_a_pod() {
        let found = |plant: Plant| {
            let explanation = explained(|f| {
                facts(f, APART);
                apart(f);
                plant(f);
            });
            explanation.cause.unwrap()
        };
        let rest = ", or correct spec.affinity or the template, or add a node";
        let pod = found(|_| ());
        assert_eq!(pod.field.as_deref(), Some("Pod: spec.affinity, of a template or a policy"));
        assert_eq!(pod.what_to_do, format!("stop that Pod (kubectl -n vms describe pod db says whose it is){rest}"));
        let of_vm = found(|f| {
            let labels = &mut other(f)["metadata"]["labels"];
            labels["app.kubernetes.io/name"] = json!("vm-runner");
            labels["app.kubernetes.io/instance"] = json!("base");
            f["vm"]["spec"]["affinity"] = f["pod"]["spec"]["affinity"].clone();
            f["vm"]["metadata"]["managedFields"][0]["fieldsV1"]["f:spec"]["f:affinity"] = json!({});
        });
        assert_eq!(of_vm.what_to_do, format!("kubectl vm stop base -n vms{rest}"));
        assert_eq!((of_vm.field.as_deref(), of_vm.who.as_deref()), (Some("spec.affinity"), Some("kubectl-edit")));
        let ends = found(|f| other(f)["metadata"]["deletionTimestamp"] = json!("2027-01-15T06:00:00Z"));
        assert_eq!(ends.what_to_do, format!("wait until Pod vms/db has ended{rest}"));
        let port = explained(|f| {
            facts(f, PORTS);
            let ports = || json!({ "containerPort": 1, "hostPort": 80 });
            both(f, ports(), ports());
        });
        let end = "(Pod: spec.containers[vm-runner].ports, since 2027-01-15T06:00:00Z) -> stop that Pod (kubectl -n vms describe pod db says whose it \
                   is), or take another port in the VM or its template";
        assert!(port.line.ends_with(end), "{}", port.line);
    }

    #[test]
    fn pods_are_read_only_if_the_scheduler_speaks_of_them() {
        let is_asked = |message: &str, node: Value| {
            let status = json!({ "conditions": [{ "type": "PodScheduled", "status": "False", "message": message }] });
            let pod = json!({ "metadata": { "name": "apple" }, "spec": { "nodeName": node }, "status": status });
            concern(&Object::trim(&crate::object::pods(), serde_json::from_value(pod).unwrap()))
        };
        for (message, expected) in [
            (PORTS, true),
            (APART, true),
            (THEIRS, true),
            (TOGETHER, true),
            ("1 node(s) didn't match Pod's node affinity/selector", false),
            ("1 Insufficient cpu. preemption: 1 node(s) didn't have free ports for the requested pod ports", false),
            ("", false),
        ] {
            assert_eq!(is_asked(message, Value::Null), expected, "{message}");
            assert!(!is_asked(message, json!("node-1")), "{message}");
        }
    }
}
