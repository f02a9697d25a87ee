//! What the manager looks up to find a cause: what is beyond the VM's own objects, and only what could show a cause.
//!
//! ```text
//!  VM, its new status, Pod, claims ─▶ facts ─▶ look: is it time? ─▶ reads ─▶ (the manager reads) ─▶ facts ─▶ cause ─▶ message of Ready
//! ```
//!
//! A VM that is up, or down as its spec wants it, costs no request, and neither does a start that goes on as usual. While a VM does not start,
//! the manager looks again when one of its objects changes, and after pauses that grow: what it reads is not watched.

use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use serde_json::Value;

use super::{Cause, Facts, Finding, before_pod, first_cause, neighbours};
use crate::{
    api::{
        Reason, VirtualMachine, VirtualMachineStatus,
        conditions::{self, READY},
    },
    observed::{Object, end_of},
    ownership::is_said_by_runner,
};

/// How long a VM may be on its way before the manager looks for a cause.
const FIRST_LOOK: SignedDuration = SignedDuration::from_secs(10);
/// The same while no scheduler has judged the Pod: many may be waiting for it.
const UNSEEN: SignedDuration = SignedDuration::from_mins(1);
/// The longest pause between two looks.
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_mins(30);

/// When a VM is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Look {
    /// Whether it is time now.
    pub is_due: bool,
    /// After how long it is time again, if nothing changes. `None`: what could show another cause is watched.
    pub next: Option<Duration>,
}

/// What is to be read.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// All nodes.
    pub nodes: bool,
    /// The node of the Pod.
    pub node: Option<String>,
    /// The Pods of the namespace that have a node.
    pub neighbours: bool,
    /// All storage classes.
    pub classes: bool,
    /// These volumes.
    pub volumes: Vec<String>,
    /// Whether these claims exist.
    pub claims: Vec<String>,
    /// The namespace.
    pub namespace: bool,
}

impl Facts {
    /// The facts that the manager has without a request. `status` is its part of the VM's status after this reconcile; `claims` are those that the
    /// VM uses, not those that are kept from former disks.
    pub fn of_manager(
        vm: &VirtualMachine,
        status: &VirtualMachineStatus,
        pod: Option<&Object>,
        mut claims: Vec<Object>,
        now: Timestamp,
    ) -> Self {
        // Of several with a problem the first one is named. In the order in which the manager got to know them it would be another one after a restart.
        claims.sort_by(|one, other| one.key.name.cmp(&other.key.name));
        // What the manager has written before, and does not say any more, is no fact.
        let of_runner =
            |type_: &str| conditions::find(&status.conditions, type_).is_none() && is_said_by_runner(vm, type_);
        let mut facts = vm.clone();
        let known = facts.status.get_or_insert_default();
        known.conditions.retain(|condition| of_runner(&condition.type_));
        known.conditions.extend(status.conditions.iter().cloned());
        known.observed_generation = status.observed_generation;
        known.ready = status.ready;
        known.problem.clone_from(&status.problem);
        known.halted.clone_from(&status.halted);
        known.state_override.clone_from(&status.state_override);
        Self { claims: Some(claims), ..Self::new(facts, Some(pod.cloned()), now) }
    }

    /// Whether it is time to look for a cause; `None` if there is nothing to look for.
    pub fn look(&self) -> Option<Look> {
        let (begun, is_usual) = match &self.vm.metadata.deletion_timestamp {
            Some(begun) => (begun.0, true),
            None => {
                let (reason, ready) = self.not_ready().filter(|_| self.is_wanted_up() && !self.is_up())?;
                let made = match self.pod() {
                    Some(pod) if pod.deleting.is_some() => return None,
                    Some(pod) => pod.created,
                    None => None,
                };
                // A claim that gets its volume at once still keeps its Pod from the nodes for a moment.
                let is_usual = match reason {
                    Reason::Starting => true,
                    Reason::Unschedulable => self.claims.iter().flatten().any(is_unbound),
                    _ => false,
                };
                (made.into_iter().chain([ready.last_transition_time.0]).max()?, is_usual)
            }
        };
        let age = self.now.duration_since(begun).max(SignedDuration::ZERO);
        let is_unseen = self.pod().is_some_and(|pod| {
            let is_judged = ["True", "False"].iter().any(|status| pod.condition("PodScheduled", status).is_some());
            pod.node_name().is_none() && !is_judged
        });
        let first = if is_unseen { UNSEEN } else { FIRST_LOOK };
        let next = if age < first { first - age } else { age.min(LONGEST_PAUSE) };
        let next = Duration::try_from(next).unwrap_or_default().max(Duration::from_secs(1));
        let is_starting = self.not_ready().is_some_and(|(reason, _)| reason == Reason::Starting);
        let is_ending = self.vm.metadata.deletion_timestamp.is_some();
        // Without a Pod only what a controller says that makes it is not watched.
        let next = Some(next).filter(|_| self.pod().is_some() || is_starting || is_ending);
        Some(Look { is_due: !is_usual || age >= first, next })
    }

    /// What could show a cause.
    pub fn reads(&self) -> Reads {
        let refused = self.not_ready().is_some_and(|(reason, _)| reason == Reason::ApplyFailed);
        let Some(pod) = self.pod().filter(|_| self.is_wanted_up()) else {
            return Reads { namespace: refused && self.is_wanted_up(), ..Reads::default() };
        };
        if let Some(node) = pod.node_name() {
            let is_pending = pod.phase().is_none_or(|phase| phase == "Pending");
            return Reads { node: is_pending.then(|| node.to_owned()), ..Reads::default() };
        }
        let is_refused = pod.condition("PodScheduled", "False").is_some();
        let volumes = if is_refused { volumes(self.claims.iter().flatten()) } else { Vec::new() };
        Reads {
            nodes: is_refused,
            node: None,
            neighbours: neighbours::concern(pod),
            classes: self.claims.iter().flatten().any(is_unbound),
            volumes,
            claims: other_claims(pod, self.claims.as_deref().unwrap_or_default()),
            namespace: false,
        }
    }

    /// The names of the objects whose events could show a cause, when [`Facts::reads`] is known. `has_maker`: the templates put a controller
    /// between the VM and its Pod.
    pub fn events_to_read(&self, has_maker: bool) -> Vec<String> {
        if !self.is_wanted_up() {
            return Vec::new();
        }
        let Some(pod) = self.pod() else {
            return if has_maker { vec![self.vm.name_any()] } else { Vec::new() };
        };
        let name = || pod.key.name.clone();
        if pod.node_name().is_some() {
            let is_created = pod.container_statuses().next().is_some();
            let is_restless = |status: &Value| status["state"]["waiting"].is_object() || end_of(status).is_some();
            let wants = !is_created || pod.container_statuses().any(is_restless);
            return wants.then(name).into_iter().collect();
        }
        // What the classes say needs no event.
        let has_provisioner = |claim: &&Object| {
            let class = claim.spec_str("/storageClassName").filter(|class| !class.is_empty());
            let is_known =
                |class: &str| self.classes.as_ref().is_none_or(|all| all.iter().any(|known| known.name_any() == class));
            is_unbound(claim) && (claim.is_bound() || class.is_some_and(is_known))
        };
        let of_claims = self.claims.iter().flatten().filter(has_provisioner).map(|claim| claim.key.name.clone());
        let is_unseen = pod.condition("PodScheduled", "False").is_none() && first_cause(self).is_some();
        of_claims.chain(is_unseen.then(name)).collect()
    }

    /// Why the VM is not as its spec wants it, in the words of `kubectl vm explain`, if the manager does not say it by itself.
    pub fn cause(&self) -> Option<Finding> {
        if self.vm.metadata.deletion_timestamp.is_some() {
            return before_pod::ending(self);
        }
        let finding = first_cause(self)?;
        let ready = self.condition(READY)?;
        let said = self.problem().map_or(&ready.message, |problem| &problem.message);
        // The scheduler's words alone are in the message already, with what the manager knows of devices.
        let knows_more = self.nodes.is_some() || self.neighbours.is_some() || !self.events.is_empty();
        let is_of_scheduler = finding.cause == Cause::Unschedulable && !knows_more;
        (finding.text != *said && !is_of_scheduler).then_some(finding)
    }
}

fn is_unbound(claim: &Object) -> bool {
    claim.phase() != Some("Bound")
}

/// The volumes of claims.
pub fn volumes<'a>(claims: impl IntoIterator<Item = &'a Object>) -> Vec<String> {
    claims.into_iter().filter_map(|claim| claim.spec_str("/volumeName")).map(str::to_owned).collect()
}

/// The claims that a Pod mounts beside the VM's own.
pub fn other_claims(pod: &Object, own: &[Object]) -> Vec<String> {
    let is_own = |name: &str| own.iter().any(|claim| claim.key.name == name);
    pod.mounted_claims().map(|(name, _)| name.into_owned()).filter(|name| !is_own(name)).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::explain::tests::{EARLIER, JUST_NOW, facts, healthy};

    /// A VM whose Pod has no node, since long ago.
    fn pending(edit: impl FnOnce(&mut Value)) -> Facts {
        let mut value = healthy();
        value["pod"]["spec"]["nodeName"] = Value::Null;
        value["pod"]["spec"]["volumes"] = json!([]);
        value["pod"]["status"] = json!({ "phase": "Pending", "conditions": [{ "type": "PodScheduled", "status": "False",
            "reason": "Unschedulable", "lastTransitionTime": EARLIER, "message": "0/1 nodes are available" }] });
        value["vm"]["status"]["ready"] = json!(false);
        value["vm"]["status"]["conditions"][0] = json!({ "type": "Ready", "status": "False", "reason": "Unschedulable", "message": "m", "lastTransitionTime": EARLIER });
        edit(&mut value);
        facts(&value)
    }

    fn unbound(name: &str, class: &str) -> Value {
        json!({ "metadata": { "name": name, "uid": name, "creationTimestamp": EARLIER }, "spec": { "storageClassName": class }, "status": { "phase": "Pending" } })
    }

    fn no_events() -> Vec<String> {
        Vec::new()
    }

    #[test]
    fn only_what_could_show_a_cause_is_read() {
        let of_scheduler = Reads { nodes: true, volumes: vec!["pv-1".into()], ..Reads::default() };
        let of_node = Reads { node: Some("node-1".into()), ..Reads::default() };
        let with_node = |status: Value| {
            pending(move |value| {
                value["pod"]["spec"]["nodeName"] = json!("node-1");
                value["pod"]["status"] = status;
            })
        };
        let container = |state: Value| json!({ "phase": "Running", "containerStatuses": [{ "name": "vm-runner", "state": state }] });
        let cases: Vec<(&str, Facts, Reads, Vec<String>)> = vec![
            ("no node", pending(|_| ()), of_scheduler.clone(), no_events()),
            (
                "another claim",
                pending(|value| {
                    value["pod"]["spec"]["volumes"] =
                        json!([{ "name": "x", "persistentVolumeClaim": { "claimName": "images" } }]);
                }),
                Reads { claims: vec!["images".into()], ..of_scheduler.clone() },
                no_events(),
            ),
            (
                "another Pod is in the way",
                pending(|value| {
                    value["pod"]["status"]["conditions"][0]["message"] = json!("1 node(s) didn't have free ports");
                }),
                Reads { neighbours: true, ..of_scheduler.clone() },
                no_events(),
            ),
            (
                "its class says it",
                pending(|value| value["claims"] = json!([unbound("c", "nowhere")])),
                Reads { nodes: true, classes: true, ..Reads::default() },
                no_events(),
            ),
            (
                "only its provisioner says it",
                pending(|value| value["claims"] = json!([unbound("c", "fast")])),
                Reads { nodes: true, classes: true, ..Reads::default() },
                vec!["c".into()],
            ),
            (
                "no scheduler",
                pending(|value| value["pod"]["status"]["conditions"] = json!([])),
                Reads::default(),
                vec!["apple".into()],
            ),
            ("not created", with_node(json!({ "phase": "Pending" })), of_node, vec!["apple".into()]),
            ("it runs", with_node(container(json!({ "running": {} }))), Reads::default(), no_events()),
            (
                "it ended",
                with_node(container(json!({ "waiting": { "reason": "CrashLoopBackOff" } }))),
                Reads::default(),
                vec!["apple".into()],
            ),
            (
                "refused",
                pending(|value| {
                    value["pod"] = Value::Null;
                    value["vm"]["status"]["conditions"][0]["reason"] = json!("ApplyFailed");
                }),
                Reads { namespace: true, ..Reads::default() },
                no_events(),
            ),
            (
                "stopped",
                pending(|value| value["vm"]["spec"]["vm"]["state"] = json!("Stopped")),
                Reads::default(),
                no_events(),
            ),
        ];
        for (name, facts, wanted, events) in cases {
            assert_eq!(facts.reads(), wanted, "{name}");
            assert_eq!(facts.events_to_read(false), events, "{name}");
        }
        let made = pending(|value| value["pod"] = Value::Null);
        assert_eq!(made.events_to_read(true), ["apple"], "a controller makes the Pod");
    }

    #[test]
    fn a_vm_on_its_way_is_left_alone_and_one_that_is_stuck_looked_at_ever_more_rarely() {
        let seen = |facts: &Facts| facts.look().map(|look| (look.is_due, look.next.map_or(0, |next| next.as_secs())));
        let look = |edit: fn(&mut Value)| seen(&pending(edit));
        let starting = |value: &mut Value| value["vm"]["status"]["conditions"][0]["reason"] = json!("Starting");
        assert_eq!(look(|_| ()), Some((true, 1800)));
        let since = |value: &mut Value, time: &str| value["pod"]["metadata"]["creationTimestamp"] = json!(time);
        type Case = (&'static str, fn(&mut Value), Option<(bool, u64)>);
        let cases: [Case; 10] = [
            (
                "a problem is looked at at once",
                |value| value["pod"]["metadata"]["creationTimestamp"] = json!(JUST_NOW),
                Some((true, 8)),
            ),
            ("it goes on", |value| value["vm"]["status"]["conditions"][0]["status"] = json!("True"), None),
            ("its guest is up", |value| value["vm"]["status"]["ready"] = json!(true), None),
            ("stopped", |value| value["vm"]["spec"]["vm"]["state"] = json!("Stopped"), None),
            (
                "its claim may get a volume yet",
                |value| {
                    value["pod"]["metadata"]["creationTimestamp"] = json!(JUST_NOW);
                    value["claims"] = json!([unbound("c", "fast")]);
                },
                Some((false, 8)),
            ),
            (
                "a controller makes the Pod",
                |value| {
                    value["pod"] = Value::Null;
                    value["vm"]["status"]["conditions"][0]["reason"] = json!("Starting");
                },
                Some((true, 1800)),
            ),
            ("another Pod follows", |value| value["pod"]["metadata"]["deletionTimestamp"] = json!(EARLIER), None),
            (
                "being deleted",
                |value| value["vm"]["metadata"]["deletionTimestamp"] = json!(EARLIER),
                Some((true, 1800)),
            ),
            ("an older spec", |value| value["vm"]["metadata"]["generation"] = json!(9), None),
            ("no Pod", |value| value["pod"] = Value::Null, Some((true, 0))),
        ];
        for (name, edit, expected) in cases {
            assert_eq!(look(edit), expected, "{name}");
        }
        let unseen = pending(|value| {
            starting(value);
            value["pod"]["metadata"]["creationTimestamp"] = json!(JUST_NOW);
            value["pod"]["status"] = json!({ "phase": "Pending" });
        });
        assert_eq!(seen(&unseen), Some((false, 58)), "the scheduler has much to do");
        for (time, expected) in [
            (JUST_NOW, (false, 8)),
            ("2027-01-15T07:59:50Z", (true, 10)),
            ("2027-01-15T07:58:00Z", (true, 120)),
            ("2027-01-15T07:00:00Z", (true, 1800)),
        ] {
            let facts = pending(|value| {
                starting(value);
                since(value, time);
            });
            assert_eq!(seen(&facts), Some(expected), "{time}");
        }
    }

    #[test]
    fn the_words_are_those_of_the_command() {
        let cordoned = pending(|value| value["nodes"][0]["spec"]["unschedulable"] = json!(true));
        let cause = cordoned.cause().unwrap();
        assert_eq!([cause.line(), cause.what_to_do], ["node node-1 is cordoned", "kubectl uncordon node-1"]);
        let line = crate::explain::explain(&cordoned).line;
        assert!(
            line.starts_with("apple does not run: node node-1 is cordoned (")
                && line.ends_with(" -> kubectl uncordon node-1"),
            "{line}"
        );
        // What the manager has found by itself stays as it is.
        let failed = |message: &str| {
            pending(|value| {
                value["pod"] = Value::Null;
                let ready = &mut value["vm"]["status"]["conditions"][0];
                (ready["reason"], ready["message"]) = (json!("NameTaken"), json!(message));
            })
        };
        assert_eq!(failed("Pod apple exists").cause(), None);
        // Without the nodes it knows no more than the scheduler says.
        assert_eq!(pending(|value| value["nodes"] = Value::Null).cause(), None);
        // While a VM is being deleted, only what keeps it matters.
        let kept = |value: &mut Value| {
            value["nodes"][0]["spec"]["unschedulable"] = json!(true);
            value["vm"]["metadata"]["deletionTimestamp"] = json!(EARLIER);
        };
        assert_eq!(pending(kept).cause(), None);
        let kept_by = pending(|value| {
            kept(value);
            value["vm"]["metadata"]["finalizers"] = json!(["example.org/keep"]);
        });
        assert_eq!(kept_by.cause().unwrap().text, "the finalizers example.org/keep keep it");
        // Who may not read the Pod gets the manager's words.
        let told = pending(|value| {
            value["pod"] = json!("unread");
            value["vm"]["status"]["problem"] = json!({
                "reason": value["vm"]["status"]["conditions"][0]["reason"],
                "message": "node node-1 is cordoned", "whatToDo": "kubectl uncordon node-1",
            });
        });
        let line = crate::explain::explain(&told).line;
        assert!(
            line.starts_with("apple does not run: node node-1 is cordoned (")
                && line.ends_with(" -> kubectl uncordon node-1"),
            "{line}"
        );
    }

    #[test]
    fn the_managers_facts_have_its_new_status_and_the_runners_report() {
        let vm = facts(&healthy()).vm;
        let mut status = vm.status.clone().unwrap();
        status.conditions[0].status = "False".into();
        status.conditions[0].reason = "Starting".into();
        status.ready = Some(false);
        let facts = Facts::of_manager(&vm, &status, None, Vec::new(), crate::test_support::noon());
        assert_eq!(facts.not_ready().map(|(reason, _)| reason), Some(Reason::Starting));
        assert_eq!(
            (facts.pod().is_none(), facts.is_up(), facts.claims.map(|claims| claims.len())),
            (true, false, Some(0))
        );
    }

    #[test]
    fn of_several_claims_the_same_one_is_named_in_whatever_order_they_are_known() {
        let vm = pending(|_| ()).vm;
        let claims = |names: [&str; 2]| names.map(facts_of_claim).to_vec();
        let named =
            |claims| Facts::of_manager(&vm, &vm.status.clone().unwrap(), None, claims, crate::test_support::noon());
        let names = |facts: Facts| facts.claims.unwrap().into_iter().map(|claim| claim.key.name).collect::<Vec<_>>();
        for order in [["c", "d"], ["d", "c"]] {
            assert_eq!(names(named(claims(order))), ["c", "d"]);
        }
    }

    fn facts_of_claim(name: &str) -> Object {
        pending(|value| value["claims"] = json!([unbound(name, "fast")])).claims.unwrap().remove(0)
    }
}
