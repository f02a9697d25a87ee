//! What is awaited of a VM. Pure.

use std::{fmt, str::FromStr};

use crate::{
    actions::edit::{About, Effect, is_there},
    api::{PowerState, Reason, VirtualMachine, VirtualMachineStatus, conditions, status::Phase},
};

/// What a VM should come to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::cli) enum Goal {
    /// Its guest runs, as the runner reports.
    Running,
    /// The same of a new VM, which never comes to it if its templates can't be rendered.
    FirstStart,
    /// It has no Pod.
    Stopped,
    /// The agent in its guest answers.
    Booted,
    /// It is as its spec wants it.
    Ready,
    /// It does not exist.
    Deleted,
    /// A guest runs in another Pod than that.
    Restarted { former: Option<String> },
    /// It is Ready again, in another Pod than that, and its guest has booted if that is awaited. If somebody stops it meanwhile, that is all.
    RolledOut { former: Option<String>, booted: bool },
    /// The guest is paused.
    Paused,
    /// The runner has reset the guest this often.
    Reset { count: u32 },
    /// The guest has been asked to reboot this often.
    Rebooted { count: u32 },
    /// Manager and runner have seen a change: the guest has it, or it waits for the next start, or is refused.
    Taken { about: About, effect: Effect },
    /// The guest has the CPUs or the memory that its spec wants.
    There { about: About },
    /// A condition has this status.
    Condition { type_: String, status: String },
}

impl FromStr for Goal {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text.to_lowercase().as_str() {
            "running" => Self::Running,
            "stopped" => Self::Stopped,
            "booted" => Self::Booted,
            "ready" => Self::Ready,
            "paused" => Self::Paused,
            "deleted" | "delete" => Self::Deleted,
            _ => {
                let condition = text.strip_prefix("condition=").filter(|condition| !condition.is_empty());
                let condition = condition
                    .ok_or("write running, stopped, booted, ready, paused, deleted, or condition=TYPE[=STATUS]")?;
                let (type_, status) = condition.split_once('=').unwrap_or((condition, "True"));
                Self::Condition { type_: type_.into(), status: status.into() }
            }
        })
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running | Self::FirstStart => "running",
            Self::Stopped => "stopped",
            Self::Booted => "booted",
            Self::Ready => "ready",
            Self::Deleted => "deleted",
            Self::Restarted { .. } => "restarted",
            Self::RolledOut { booted: false, .. } => "ready again",
            Self::RolledOut { booted: true, .. } => "ready and booted again",
            Self::Paused => "paused",
            Self::Reset { .. } => "reset",
            Self::Rebooted { .. } => "asked to reboot",
            Self::Taken { .. } => "taken",
            Self::There { .. } => "as wanted",
            Self::Condition { type_, status } => return write!(f, "{type_}={status}"),
        })
    }
}

/// What a goal says about a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Reached,
    NotYet,
    /// It can't become so any more.
    Never(&'static str),
    /// It does not become so as it is. The manager may not have seen yet what somebody did a moment ago.
    Hardly(&'static str),
}

impl Goal {
    /// Whether the VM, `None` if it does not exist, is as awaited. What a manager wrote about an earlier spec does not count.
    pub(super) fn verdict(&self, vm: Option<&VirtualMachine>) -> Verdict {
        let Some(vm) = vm else {
            return if *self == Self::Deleted { Verdict::Reached } else { Verdict::Never("it does not exist") };
        };
        let status = vm.status.as_ref().filter(|status| status.observed_generation == vm.metadata.generation);
        let Some(status) = status else { return Verdict::NotYet };
        let is_reached = match self {
            Self::FirstStart if has(status, conditions::TEMPLATES_VALID, "False") => {
                return Verdict::Hardly("its objects can't be rendered from the templates");
            }
            Self::Running | Self::FirstStart => runs(status),
            Self::Stopped => status.created == Some(false),
            Self::Booted => runs(status) && has(status, conditions::BOOTED, "True"),
            Self::Ready => has(status, conditions::READY, "True"),
            Self::Deleted => false,
            Self::Restarted { former } => status.pod_uid.is_some() && status.pod_uid != *former && runs(status),
            Self::RolledOut { .. } if status.created == Some(false) && is_to_be_down(vm, status) => true,
            Self::RolledOut { former, booted } => {
                let is_another = status.pod_uid.is_some() && status.pod_uid != *former;
                is_another
                    && has(status, conditions::READY, "True")
                    && (!booted || has(status, conditions::BOOTED, "True"))
            }
            Self::Paused | Self::Reset { .. } | Self::Rebooted { .. }
                if status.created == Some(false) && is_to_be_down(vm, status) =>
            {
                return Verdict::Hardly("it is stopped");
            }
            Self::Paused => {
                let running = conditions::find(&status.conditions, conditions::RUNNING);
                let is_paused = running.and_then(conditions::reason) == Some(Reason::Paused);
                is_paused && status.phase.as_deref() == Some(Phase::Paused.as_str())
            }
            Self::Reset { count } => status.runner.reset_count.is_some_and(|done| done >= *count),
            Self::Rebooted { count } => status.runner.reboot_count.is_some_and(|done| done >= *count),
            Self::Taken { about, effect } => {
                let is_pending = status.pending_changes.iter().any(|change| about.is(change, *effect));
                status.created != Some(true)
                    || status.guest_generation.max(status.taken_generation) >= vm.metadata.generation
                    || (*effect == Effect::NextStart && is_pending)
            }
            Self::There { about } => is_there(vm, about),
            Self::Condition { type_, status: wanted } => has(status, type_, wanted),
        };
        if is_reached { Verdict::Reached } else { Verdict::NotYet }
    }
}

/// Whether the VM does not come back by itself, as the manager has seen it.
fn is_to_be_down(vm: &VirtualMachine, status: &VirtualMachineStatus) -> bool {
    match &status.state_override {
        Some(in_force) => in_force.state == PowerState::Stopped,
        None => vm.spec.vm.state == PowerState::Stopped && !has(status, conditions::POWER_UNMANAGED, "True"),
    }
}

/// Whether the runner has reported that the guest runs, and the manager has seen that.
fn runs(status: &VirtualMachineStatus) -> bool {
    has(status, conditions::RUNNING, "True") && status.phase.as_deref() == Some("Running")
}

fn has(status: &VirtualMachineStatus, type_: &str, wanted: &str) -> bool {
    conditions::find(&status.conditions, type_).is_some_and(|condition| condition.status.eq_ignore_ascii_case(wanted))
}

/// What a person is told about a VM that is not there yet: its phase, and what Ready says.
pub(super) fn seen(vm: Option<&VirtualMachine>) -> String {
    let Some(status) = vm.and_then(|vm| vm.status.as_ref()) else { return "it has no status yet".into() };
    let phase = status.phase.as_deref().unwrap_or("Pending");
    match conditions::find(&status.conditions, conditions::READY) {
        Some(ready) if ready.reason == phase => format!("{phase}: {}", ready.message),
        Some(ready) => format!("{phase}, {}: {}", ready.reason, ready.message),
        None => phase.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::vm;

    fn with(status: Value) -> VirtualMachine {
        vm(|vm| {
            vm["status"] = status;
            vm["status"]["observedGeneration"] = 3.into();
        })
    }

    fn condition(type_: &str, status: &str) -> Value {
        json!({ "type": type_, "status": status, "reason": "Starting", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z" })
    }

    #[test]
    fn a_goal_is_reached_when_the_status_of_this_spec_says_so() {
        let up = with(json!({
            "created": true, "ready": true, "podUid": "pod-2", "phase": "Running",
            "conditions": [condition("Running", "True"), condition("Booted", "True"), condition("Ready", "True"), condition("Odd", "Unknown")],
        }));
        let down = with(json!({ "created": false, "ready": false, "conditions": [condition("Running", "False")] }));
        let restarted = |former: &str| Goal::Restarted { former: Some(former.into()) };
        for (goal, of_up, of_down) in [
            (Goal::Running, true, false),
            (Goal::Stopped, false, true),
            (Goal::Booted, true, false),
            (Goal::Ready, true, false),
            (Goal::Deleted, false, false),
            (restarted("pod-1"), true, false),
            (Goal::Paused, false, false),
            (Goal::Taken { about: About::Ram, effect: Effect::AtOnce }, false, true),
            (restarted("pod-2"), false, false),
            ("condition=odd=unknown".parse().unwrap(), false, false),
            ("condition=Odd=unknown".parse().unwrap(), true, false),
            ("condition=Running".parse().unwrap(), true, false),
        ] {
            for (vm, is_reached) in [(&up, of_up), (&down, of_down)] {
                let expected = if is_reached { Verdict::Reached } else { Verdict::NotYet };
                assert_eq!(goal.verdict(Some(vm)), expected, "{goal}");
                let mut changed = vm.clone();
                changed.metadata.generation = Some(4);
                assert_eq!(goal.verdict(Some(&changed)), Verdict::NotYet, "{goal}: the manager has not seen the spec");
            }
        }
        assert_eq!(Goal::Deleted.verdict(None), Verdict::Reached);
        assert_eq!(Goal::Running.verdict(None), Verdict::Never("it does not exist"));
    }

    #[test]
    fn a_rollout_goes_on_when_the_vm_is_ready_in_another_pod_and_as_far_as_it_was() {
        let up = |pod: &str, ready: &str, booted: &str| {
            with(json!({
                "created": true, "podUid": pod, "phase": "Running",
                "conditions": [condition("Ready", ready), condition("Booted", booted)],
            }))
        };
        for (pod, ready, booted, awaits_booted, is_reached) in [
            ("new", "True", "False", false, true),
            ("new", "True", "False", true, false),
            ("new", "True", "True", true, true),
            ("new", "False", "True", true, false),
            ("old", "True", "True", false, false),
        ] {
            let goal = Goal::RolledOut { former: Some("old".into()), booted: awaits_booted };
            let expected = if is_reached { Verdict::Reached } else { Verdict::NotYet };
            assert_eq!(goal.verdict(Some(&up(pod, ready, booted))), expected, "{pod} {ready} {booted} {goal}");
        }
        let mut stopped = with(json!({ "created": false }));
        stopped.spec.vm.state = PowerState::Stopped;
        let goal = Goal::RolledOut { former: Some("old".into()), booted: true };
        assert_eq!(goal.verdict(Some(&stopped)), Verdict::Reached, "it has the changes at its next start");
        // Its Pod is gone, and it comes back whatever its spec says.
        for status in [
            json!({ "created": false, "stateOverride": { "state": "Running", "until": "2027-01-15T09:00:00Z" } }),
            json!({ "created": false, "conditions": [condition("PowerUnmanaged", "True")] }),
        ] {
            let mut between = with(status.clone());
            between.spec.vm.state = PowerState::Stopped;
            assert_eq!(goal.verdict(Some(&between)), Verdict::NotYet, "{status}");
        }
    }

    #[test]
    fn a_guest_that_runs_has_not_booted_yet() {
        let runs = |booted: &str| {
            with(
                json!({ "ready": true, "phase": "Running", "conditions": [condition("Running", "True"), condition("Booted", booted)] }),
            )
        };
        assert_eq!(Goal::Booted.verdict(Some(&runs("False"))), Verdict::NotYet);
        assert_eq!(Goal::Booted.verdict(Some(&runs("True"))), Verdict::Reached);
    }

    #[test]
    fn pauses_and_resets_are_reached_when_the_runner_says_so() {
        let mut running = condition("Running", "False");
        running["reason"] = "Paused".into();
        let paused = with(
            json!({ "created": true, "phase": "Paused", "conditions": [running], "resetCount": 2, "rebootCount": 1 }),
        );
        for (goal, is_reached) in [
            (Goal::Paused, true),
            ("paused".parse().unwrap(), true),
            (Goal::Reset { count: 2 }, true),
            (Goal::Reset { count: 3 }, false),
            (Goal::Rebooted { count: 1 }, true),
            (Goal::Rebooted { count: 2 }, false),
        ] {
            let expected = if is_reached { Verdict::Reached } else { Verdict::NotYet };
            assert_eq!(goal.verdict(Some(&paused)), expected, "{goal:?}");
        }
        let mut stopped = with(json!({ "created": false }));
        stopped.spec.vm.state = PowerState::Stopped;
        assert_eq!(Goal::Paused.verdict(Some(&stopped)), Verdict::Hardly("it is stopped"));
        let panicked = with(json!({ "created": true, "phase": "Paused" }));
        assert_eq!(Goal::Paused.verdict(Some(&panicked)), Verdict::NotYet);
    }

    #[test]
    fn a_change_is_taken_when_the_guest_has_it_or_it_waits() {
        let condition = condition("ChangesApplied", "False");
        for (status, is_taken) in [
            (json!({}), true),
            (json!({ "created": true }), false),
            (json!({ "created": true, "guestGeneration": 2 }), false),
            (json!({ "created": true, "guestGeneration": 3 }), true),
            (json!({ "created": true, "guestGeneration": 2, "takenGeneration": 3 }), true),
            (
                json!({ "created": true, "pendingChanges": [{ "path": "config.yaml/vm.maximumRam", "subject": { "kind": "MaximumRam" }, "reason": "r" }] }),
                true,
            ),
            (
                json!({ "created": true, "pendingChanges": [{ "path": "config.yaml/vm.maximumCpus", "subject": { "kind": "MaximumCpus" }, "reason": "r" }] }),
                false,
            ),
            // That is about a CD.
            (json!({ "created": true, "conditions": [condition] }), false),
        ] {
            let expected = if is_taken { Verdict::Reached } else { Verdict::NotYet };
            let goal = Goal::Taken { about: About::Ram, effect: Effect::NextStart };
            assert_eq!(goal.verdict(Some(&with(status.clone()))), expected, "{status}");
        }
    }

    #[test]
    fn a_new_vm_is_not_waited_for_if_its_templates_are_wrong() {
        let status = |is_valid: &str| json!({ "conditions": [condition("TemplatesValid", is_valid)] });
        assert_eq!(Goal::FirstStart.verdict(Some(&with(status("True")))), Verdict::NotYet);
        let wrong = with(status("False"));
        assert!(matches!(Goal::FirstStart.verdict(Some(&wrong)), Verdict::Hardly(_)));
        assert_eq!(Goal::Running.verdict(Some(&wrong)), Verdict::NotYet, "somebody may be mending them");
    }

    #[test]
    fn what_is_seen_is_the_phase_and_the_message() {
        let starting = with(json!({ "phase": "Starting", "conditions": [condition("Ready", "False")] }));
        assert_eq!(seen(Some(&starting)), "Starting: m");
        let failed = with(json!({ "phase": "Failed", "conditions": [condition("Ready", "False")] }));
        assert_eq!(seen(Some(&failed)), "Failed, Starting: m");
        assert!("nonsense".parse::<Goal>().unwrap_err().contains("condition=TYPE"));
        assert!("condition=".parse::<Goal>().is_err());
    }
}
