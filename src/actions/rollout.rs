//! Restarts that wait, in waves: which VMs are restarted next, and when it stops. The caller writes and waits.
//!
//! Which VMs should run is what [`power`] says of a restart.
//!
//! | a VM | is |
//! |---|---|
//! | should run, and something waits for its next start | [`Standing::Waits`]: it is restarted in its wave |
//! | was restarted within the last hour, and is not Ready | [`Standing::Restarted`]: the first wave waits for it, so that a call that was interrupted goes on |
//! | can't be restarted now: its templates can't be rendered | [`Standing::Blocked`]: it is left out, and that is a failure |
//! | is down or being deleted, and something waits | [`Standing::Down`]: its next start brings it |
//! | any other | [`Standing::Current`] |

use std::str::FromStr;

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use super::power;
use crate::{
    api::{VirtualMachine, conditions},
    object::RESTARTED_ANNOTATION,
};

/// How long a VM that is not Ready counts as just restarted.
const RECENTLY: SignedDuration = SignedDuration::from_hours(1);

/// What a rollout has to do with a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Something waits for its next start.
    Waits,
    /// It was restarted, and is not Ready yet.
    Restarted,
    /// Something waits, but it can't be restarted, for this reason.
    Blocked(String),
    /// Something waits, but it does not run.
    Down,
    /// Nothing waits.
    Current,
}

/// What a rollout has to do with the VM.
pub fn standing(vm: &VirtualMachine, now: Timestamp) -> Standing {
    let Some(status) = &vm.status else { return Standing::Current };
    let conditions = &status.conditions;
    let waits = !status.pending_changes.is_empty() || conditions::is_true(conditions, conditions::RESTART_REQUIRED);
    let is_halted = status.halted.as_ref().is_some_and(|halted| !halted.released);
    let should_run = !power::is_down(vm, now) && !is_halted && vm.metadata.deletion_timestamp.is_none();
    let templates = conditions::find(conditions, conditions::TEMPLATES_VALID);
    let is_ready = conditions::is_true(conditions, conditions::READY);
    let restarted = vm.annotations().get(RESTARTED_ANNOTATION).and_then(|time| time.parse::<Timestamp>().ok());
    let is_recent = restarted.is_some_and(|time| now.duration_since(time) < RECENTLY);
    match waits {
        true if !should_run => Standing::Down,
        _ if !should_run => Standing::Current,
        // The list is that of the former Pod.
        true if is_recent && !is_ready && is_replaced(vm) => Standing::Restarted,
        true => match templates.filter(|condition| condition.status == "False") {
            Some(condition) => Standing::Blocked(condition.message.clone()),
            None => Standing::Waits,
        },
        false if is_recent && !is_ready => Standing::Restarted,
        false => Standing::Current,
    }
}

/// Whether the manager is replacing the VM's Pod.
fn is_replaced(vm: &VirtualMachine) -> bool {
    let status = vm.status.as_ref();
    let ready = status.and_then(|status| conditions::find(&status.conditions, conditions::READY));
    ready.is_some_and(|ready| ready.reason == "Restarting")
}

/// How many VMs a wave has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wave {
    /// So many.
    Count(usize),
    /// So many of a hundred that wait at the begin.
    Percent(usize),
}

impl FromStr for Wave {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, percent) = text.strip_suffix('%').map_or((text, false), |digits| (digits, true));
        match digits.parse() {
            Ok(number @ 1..) if !percent => Ok(Self::Count(number)),
            Ok(number @ 1..=100) if percent => Ok(Self::Percent(number)),
            _ => Err("write a number of VMs, or a percentage from 1% to 100%".into()),
        }
    }
}

impl Wave {
    /// The size of a wave if so many VMs wait.
    pub fn size(self, waiting: usize) -> usize {
        match self {
            Self::Count(count) => count,
            Self::Percent(percent) => waiting.saturating_mul(percent).div_ceil(100).max(1),
        }
    }
}

/// How far a VM is in a rollout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It has not been touched.
    Untouched,
    /// It was restarted, and has to become Ready.
    Restarted,
    /// It is Ready again.
    Done,
    /// It did not become Ready, or could not be restarted.
    Failed,
    /// It is not restarted.
    LeftOut,
}

/// The next step of a rollout. The numbers are positions in its list of VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Next {
    /// Restart these.
    Restart(Vec<usize>),
    /// Wait until these are Ready.
    Wait(Vec<usize>),
    /// Stop, because of those that failed. The others are as they were.
    Stop {
        /// Those that failed.
        failed: Vec<usize>,
        /// Those that were to be restarted and were not.
        untouched: Vec<usize>,
    },
    /// All is done.
    Finished,
}

/// What is to be done next. `size` is that of a wave.
pub fn next(vms: &[Progress], size: usize) -> Next {
    let which = |wanted: Progress| -> Vec<usize> {
        vms.iter().enumerate().filter(|(_, progress)| **progress == wanted).map(|(at, _)| at).collect()
    };
    let (restarted, failed, mut untouched) =
        (which(Progress::Restarted), which(Progress::Failed), which(Progress::Untouched));
    if !restarted.is_empty() {
        Next::Wait(restarted)
    } else if !failed.is_empty() {
        Next::Stop { failed, untouched }
    } else if untouched.is_empty() {
        Next::Finished
    } else {
        untouched.truncate(size.max(1));
        Next::Restart(untouched)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        object::STATE_UNTIL_ANNOTATION,
        test_support::{noon, vm},
    };

    fn with(state: &str, restarted: Option<&str>, status: Value) -> VirtualMachine {
        vm(|vm| {
            vm["spec"]["vm"]["state"] = json!(state);
            vm["metadata"]["annotations"] = json!({});
            if let Some(restarted) = restarted {
                vm["metadata"]["annotations"][RESTARTED_ANNOTATION] = json!(restarted);
            }
            vm["status"] = status;
        })
    }

    fn status(is_waiting: bool, conditions: &[(&str, &str, &str)]) -> Value {
        let pending = json!({ "path": "objects/Pod/spec.a", "reason": "r" });
        let condition = |(type_, status, reason): &(&str, &str, &str)| json!({ "type": type_, "status": status, "reason": reason, "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z" });
        json!({
            "pendingChanges": if is_waiting { vec![pending] } else { vec![] },
            "conditions": conditions.iter().map(condition).collect::<Vec<_>>(),
        })
    }

    #[test]
    fn a_vm_is_restarted_if_it_should_run_and_something_waits() {
        let ready = [("Ready", "True", "Running")];
        let starting = [("Ready", "False", "Starting")];
        let restarting = [("Ready", "False", "Restarting")];
        let broken = [("Ready", "False", "Running"), ("TemplatesValid", "False", "TemplateError")];
        // Ten minutes and two hours before noon.
        let (lately, before) = (Some("2027-01-15T07:50:00Z"), Some("2027-01-15T06:00:00Z"));
        for (number, (state, restarted, status, expected)) in [
            ("Running", None, status(true, &ready), Standing::Waits),
            ("Running", lately, status(true, &ready), Standing::Waits),
            ("Running", None, status(false, &[("RestartRequired", "True", "R"), ready[0]]), Standing::Waits),
            ("Running", None, status(true, &starting), Standing::Waits),
            ("Running", None, status(true, &broken), Standing::Blocked("m".into())),
            ("Running", None, status(false, &broken), Standing::Current),
            ("Stopped", None, status(true, &ready), Standing::Down),
            ("Stopped", lately, status(false, &starting), Standing::Current),
            ("Running", None, status(false, &ready), Standing::Current),
            ("Running", lately, status(false, &ready), Standing::Current),
            ("Running", lately, status(false, &starting), Standing::Restarted),
            ("Running", lately, status(true, &restarting), Standing::Restarted),
            ("Running", before, status(false, &starting), Standing::Current),
            ("Running", before, status(true, &restarting), Standing::Waits),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(standing(&with(state, restarted, status), noon()), expected, "case {number}");
        }
        // For some time, and because nobody sets the state.
        let override_of = |state: &str, value: &str| {
            let mut vm = with(state, None, status(true, &ready));
            vm.annotations_mut().insert(STATE_UNTIL_ANNOTATION.into(), value.into());
            standing(&vm, noon())
        };
        assert_eq!(override_of("Stopped", "Running 2027-01-15T09:00:00Z"), Standing::Waits);
        assert_eq!(override_of("Stopped", "Running 2027-01-15T07:00:00Z"), Standing::Down, "it is over");
        assert_eq!(override_of("Running", "Stopped 2027-01-15T09:00:00Z"), Standing::Down);
        let unmanaged = status(true, &[ready[0], ("PowerUnmanaged", "True", "StateNotSet")]);
        assert_eq!(standing(&with("Stopped", None, unmanaged), noon()), Standing::Waits);
        let mut halted = status(true, &ready);
        halted["halted"] = json!({ "by": "guest", "time": "2026-01-01T00:00:00Z", "generation": 3 });
        assert_eq!(standing(&with("Running", None, halted), noon()), Standing::Down);
    }

    #[test]
    fn a_wave_is_a_number_or_a_part_of_those_that_wait() {
        for (text, waiting, size) in
            [("1", 9, 1), ("5", 3, 5), ("10%", 3, 1), ("50%", 5, 3), ("100%", 4, 4), ("1%", 0, 1)]
        {
            assert_eq!(text.parse::<Wave>().unwrap().size(waiting), size, "{text} of {waiting}");
        }
        for text in ["0", "0%", "101%", "-1", "", "%", "a"] {
            assert!(text.parse::<Wave>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_wave_waits_for_its_vms_and_the_first_failure_ends_it() {
        use Progress::{Done, Failed, LeftOut, Restarted, Untouched};
        for (vms, size, expected) in [
            (vec![], 1, Next::Finished),
            (vec![LeftOut, Done], 1, Next::Finished),
            (vec![Untouched, Untouched, Untouched], 2, Next::Restart(vec![0, 1])),
            (vec![LeftOut, Untouched], 0, Next::Restart(vec![1])),
            (vec![Done, Restarted, Untouched], 1, Next::Wait(vec![1])),
            (vec![Done, Done, Untouched], 1, Next::Restart(vec![2])),
            // The others of its wave are waited for.
            (vec![Failed, Restarted, Untouched], 2, Next::Wait(vec![1])),
            (vec![Failed, Done, Untouched, LeftOut], 2, Next::Stop { failed: vec![0], untouched: vec![2] }),
            (vec![Done, Failed], 1, Next::Stop { failed: vec![1], untouched: vec![] }),
        ] {
            assert_eq!(next(&vms, size), expected, "{vms:?} {size}");
        }
    }
}
