//! Whether the guest of a VM runs: what the runner has reported, and whether that still holds.

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Condition, jiff::Timestamp};
use serde_json::Value;

use super::current_conditions;
use crate::{
    api::{
        Reason, VirtualMachine,
        conditions::{self, RUNNING},
    },
    observed::Object,
    ownership::is_said_by_runner,
    power::is_report_of,
};

/// What the runner has reported of the guest.
pub(super) struct ReportedGuest<'a> {
    vm: &'a VirtualMachine,
    /// The VM's Pod.
    pub pod: Option<&'a Object>,
    /// The conditions that the API server has.
    pub conditions: &'a [Condition],
    /// The runner was killed after its last report, so its conditions that are True no longer hold.
    was_killed: bool,
    /// The Pod's node does not answer.
    is_lost: bool,
    /// The runner's container does not run.
    is_down: bool,
    /// The guest runs.
    pub is_up: bool,
}

impl<'a> ReportedGuest<'a> {
    /// `pod` is the VM's Pod, if it has one. `has_report`: what its runner says is in a report of its own, and folded into the status.
    pub fn new(vm: &'a VirtualMachine, pod: Option<&'a Object>, has_report: bool) -> Self {
        let conditions = current_conditions(vm);
        let was_killed = pod.is_some_and(|pod| was_killed(pod, conditions, has_report));
        let is_down = pod.is_none_or(|pod| pod.has_ended() || is_runner_down(pod));
        let is_lost = pod.is_some_and(is_lost);
        let mut guest = Self { vm, pod, conditions, was_killed, is_lost, is_down, is_up: false };
        let is_reported = guest.reports(RUNNING) && conditions::is_true(conditions, RUNNING);
        guest.is_up = (is_reported || guest.last_report(RUNNING) == Some(LastReport::Holds)) && !is_down && !is_lost;
        guest
    }

    /// Whether the runner of the VM's Pod wrote the condition, and it still holds. Without a Pod, or before the runner's first report,
    /// the manager writes the condition.
    pub fn reports(&self, type_: &str) -> bool {
        let is_over = |condition: &Condition| self.was_killed && condition.status == "True";
        conditions::find(self.conditions, type_)
            .is_some_and(|condition| is_said_by_runner(self.vm, type_) && !is_over(condition))
            && self.pod.is_some_and(|pod| is_report_of(self.vm, pod))
    }

    /// Whether the guest has ended for good, while its Pod may still exist because of other containers.
    pub fn has_ended(&self) -> bool {
        let running = conditions::find(self.conditions, RUNNING).filter(|_| self.reports(RUNNING));
        let is_end = |reason| {
            matches!(
                reason,
                Reason::GuestShutdown
                    | Reason::StoppedAfterPanic
                    | Reason::PoweredDown
                    | Reason::PoweredOff
                    | Reason::QemuFailed
            )
        };
        self.is_down || running.is_some_and(|running| conditions::reason(running).is_some_and(is_end))
    }

    /// Whether a runner reports at all: what it wrote into the status is kept.
    pub fn is_silent(&self) -> bool {
        !self.reports(RUNNING) && self.last_report(RUNNING).is_none()
    }

    /// What the manager makes of the runner's report that a condition is True, if the Pod's node does not answer or did not answer.
    ///
    /// While the node does not answer, nothing is known, so the manager makes the condition Unknown. The runner may not notice that, and it
    /// writes only what is new. So when the node answers again, the manager makes the condition True again; if anything has changed, the
    /// runner writes it over that.
    pub fn last_report(&self, type_: &str) -> Option<LastReport> {
        let condition = conditions::find(self.conditions, type_)?;
        let is_of_pod = self.pod.is_some_and(|pod| is_report_of(self.vm, pod) && !self.is_down);
        let was_true = condition.status == "True" && !self.was_killed;
        // Otherwise the manager writes no condition of the runner that is not False.
        let is_taken_over = !is_said_by_runner(self.vm, type_) && condition.status != "False";
        if self.is_lost {
            (is_of_pod && (was_true || is_taken_over)).then_some(LastReport::NotKnown)
        } else {
            (is_of_pod && is_taken_over).then_some(LastReport::Holds)
        }
    }
}

/// Whether a report that a condition is True still holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastReport {
    /// Nobody knows it: the Pod's node does not answer.
    NotKnown,
    /// It holds: the node answers again.
    Holds,
}

/// Whether the Pod's node does not answer, so that nobody knows whether the guest runs.
///
/// The node controller then sets Ready to False and does not change the container statuses that the kubelet reported last
/// (<https://kubernetes.io/docs/concepts/architecture/nodes/#node-controller>). The kubelet itself sets Ready and ContainersReady alike,
/// except for a readiness gate.
pub(super) fn is_lost(pod: &Object) -> bool {
    pod.condition("ContainersReady", "True").is_some()
        && pod.condition("Ready", "False").is_some_and(|ready| ready["reason"] != "ReadinessGatesNotReady")
}

/// Whether the runner's container does not run. A runner that was killed could not report that.
fn is_runner_down(pod: &Object) -> bool {
    let is_in = |status: &Value, state: &str| !status["state"][state].is_null();
    runner_statuses(pod).any(|status| is_in(status, "waiting") || is_in(status, "terminated"))
}

/// Whether the runner ended after it had reported that its guest runs. Then only the manager can correct the report. Both times are the
/// node's. A report of its own says what it said until the runner that was started later reports anew; in the status the manager has
/// corrected it.
fn was_killed(pod: &Object, conditions: &[Condition], has_report: bool) -> bool {
    let running = conditions::find(conditions, RUNNING).filter(|running| running.status == "True");
    let Some(reported) = running.map(|running| running.last_transition_time.0) else { return false };
    let ended = |status: &Value| {
        let state = &status["state"];
        let is_last = has_report || !state["waiting"].is_null();
        let ends = [Some(state), Some(&status["lastState"]).filter(|_| is_last)].into_iter().flatten();
        let time = |end: &Value| end.pointer("/terminated/finishedAt")?.as_str()?.parse::<Timestamp>().ok();
        ends.filter_map(time).max()
    };
    pod.has_ended() || runner_statuses(pod).filter_map(ended).any(|end| reported < end)
}

pub(super) fn runner_statuses(pod: &Object) -> impl Iterator<Item = &Value> {
    let statuses = pod.status["containerStatuses"].as_array().into_iter().flatten();
    let name = pod.runner_container_name();
    statuses.filter(move |status| status["name"] == name)
}
