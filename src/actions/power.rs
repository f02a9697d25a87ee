//! Starts, stops, restarts, reboots, resets, pauses and resumes a VM: what is to be written, decided from the VM as it is.
//!
//! | the person says | the VM | what is written |
//! |---|---|---|
//! | start | should not run | `state: Running` |
//! | start | should run, but its guest shut itself down, and it stays down | a new value of the restart annotation |
//! | start | should run | nothing |
//! | stop | should run | `state: Stopped` |
//! | stop | runs because nobody sets `state` (PowerUnmanaged) | the same, as an apply: a patch that changes no value makes nobody its owner |
//! | stop | should not run | nothing |
//! | forced stop | has a Pod | the force-stop annotation with the UID of the Pod too |
//! | restart | should run | a new value of the restart annotation |
//! | restart | should not run | nothing: an error |
//! | reset | its guest runs | `resetCount` of the spec, or of the status if that is more, plus one |
//! | reset | its guest does not run | nothing: an error |
//! | reboot | as for a reset | `rebootCount` plus one |
//! | pause, resume | its guest runs, or is paused | `paused`; nothing if it is so already |
//!
//! Start and stop may be for some time only: then the annotation `stateUntil` is written in place of `state`, and outranks it until then
//! ([`crate::power::until`]).
//!
//! | the person says | the annotation in force | what is written |
//! |---|---|---|
//! | start or stop for some time | any | the annotation, whatever `state` is |
//! | start or stop | of the other state | the annotation is removed; `state` too, if it is the other one |
//! | start or stop | of the same state, and `state` is the other one | as without the annotation, which is removed |
//! | start or stop | of the same state, as is `state` | nothing |
//!
//! If a GitOps controller applies `spec.vm.state`, its next sync would take a start or stop back, so these are errors unless the person
//! insists; the same holds for `paused`. Annotations are safe from it: such tools only take back what is in Git.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Value, json};

use super::{Change, Decision, from_git};
use crate::{
    api::{PowerState, Reason, VirtualMachine, conditions},
    object::{FORCE_STOP_ANNOTATION, RESTARTED_ANNOTATION, STATE_UNTIL_ANNOTATION},
    ownership::{self, Applier, Setter},
    power::until::{self, value},
};

/// The longest time for which a VM can be started or stopped whatever its spec says.
pub const LONGEST: Duration = Duration::from_secs(until::LONGEST.as_secs().unsigned_abs());

/// What a person wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Let the VM run.
    Start {
        /// Only until then, whatever `spec.vm.state` says.
        until: Option<Timestamp>,
    },
    /// Shut its guest down.
    Stop {
        /// Without waiting for the guest.
        force: bool,
        /// Only until then, whatever `spec.vm.state` says.
        until: Option<Timestamp>,
    },
    /// Shut its guest down and start the VM again, with all changes that wait for that.
    Restart,
    /// Press the reset button.
    Reset,
    /// Ask its guest to reboot.
    Reboot,
    /// Let its guest stand still.
    Pause,
    /// Let its guest go on.
    Resume,
}

/// Why a command is refused. The texts name no object; the caller does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum PowerRefusal {
    #[error("it is being deleted")]
    Deleted,
    #[error("it is stopped; a start is what it needs")]
    Stopped,
    #[error("its guest does not run{}", reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default())]
    NoGuest { reason: Option<String> },
    #[error("a part of its spec fails while it runs, and would fail at its next start: {why}")]
    WouldFail { why: String },
    #[error("{}", from_git(applier, field))]
    Git { applier: Applier, field: &'static str },
}

/// Fields of `spec.vm` that Git may have.
const STATE: &str = "state";
const PAUSED: &str = "paused";

fn has(vm: &VirtualMachine, type_: &str) -> bool {
    let condition = vm.status.as_ref().and_then(|status| conditions::find(&status.conditions, type_));
    condition.is_some_and(|condition| condition.status == "True")
}

fn is_state(vm: &VirtualMachine, state: PowerState) -> bool {
    vm.spec.vm.state == state && !vm.is_state_unknown()
}

/// Whether the VM is to be down, so that there is nothing to restart.
pub fn is_down(vm: &VirtualMachine, now: Timestamp) -> bool {
    match until::until(vm, now).in_force {
        Some(in_force) => in_force.state == PowerState::Stopped,
        None => is_state(vm, PowerState::Stopped) && !has(vm, conditions::POWER_UNMANAGED),
    }
}

/// Decides what a command writes. `pod_uid` is the UID of the VM's Pod, if it has one; only a forced stop needs it. With `insist` a
/// field is also written if a GitOps controller applies it, and a VM is restarted although a part of its spec is known to fail.
///
/// # Errors
/// Why the command is refused.
pub fn decide(
    vm: &VirtualMachine,
    command: Command,
    pod_uid: Option<&str>,
    insist: bool,
    now: Timestamp,
) -> Result<Decision, PowerRefusal> {
    if vm.metadata.deletion_timestamp.is_some() {
        return Err(PowerRefusal::Deleted);
    }
    let status = vm.status.as_ref();
    let is = |type_: &str| has(vm, type_);
    let in_force = until::until(vm, now).in_force.map(|it| it.state);
    let is_state = |state: PowerState| is_state(vm, state);
    // The condition is not there while an annotation decides.
    let stays_up = || {
        in_force.is_some()
            && ownership::setter(vm) == Setter::Nobody
            && status.and_then(|status| status.power) == Some(PowerState::Running)
    };
    let is_unmanaged = is(conditions::POWER_UNMANAGED) || stays_up();
    let stays_down = status.and_then(|status| status.halted.as_ref()).is_some_and(|halted| !halted.released);
    let restart = || json!({ RESTARTED_ANNOTATION: now.to_string() });
    let annotate = |annotations: Value| write(vm, json!({ "metadata": { "annotations": annotations } }));
    match command {
        Command::Start { until: Some(end) } => {
            let mut annotations = if stays_down { restart() } else { json!({}) };
            annotations[STATE_UNTIL_ANNOTATION] = value(PowerState::Running, end).into();
            Ok(annotate(annotations))
        }
        Command::Start { until: None } => {
            let mut annotations = if stays_down { restart() } else { json!({}) };
            if in_force == Some(PowerState::Stopped) {
                annotations[STATE_UNTIL_ANNOTATION] = Value::Null;
            }
            match is_state(PowerState::Running) {
                true if annotations != json!({}) => Ok(annotate(annotations)),
                true => Ok(unchanged(if is(conditions::RUNNING) { "runs already" } else { "is starting already" })),
                false => set_state(vm, PowerState::Running, json!({}), insist, now),
            }
        }
        Command::Stop { force, until: end } => {
            let mut annotations = match pod_uid.filter(|_| force) {
                Some(uid) => json!({ FORCE_STOP_ANNOTATION: uid }),
                None => json!({}),
            };
            if let Some(end) = end {
                annotations[STATE_UNTIL_ANNOTATION] = value(PowerState::Stopped, end).into();
                return Ok(annotate(annotations));
            }
            if !is_state(PowerState::Stopped) || is_unmanaged {
                return set_state(vm, PowerState::Stopped, annotations, insist, now);
            }
            if in_force == Some(PowerState::Running) {
                annotations[STATE_UNTIL_ANNOTATION] = Value::Null;
            }
            match annotations != json!({}) {
                true => Ok(annotate(annotations)),
                false if status.is_some_and(|status| status.created == Some(true)) => {
                    Ok(unchanged("is stopping already"))
                }
                false => Ok(unchanged("is stopped already")),
            }
        }
        Command::Restart if is_down(vm, now) => Err(PowerRefusal::Stopped),
        Command::Restart => match known_failure(vm).filter(|_| !insist) {
            Some(why) => Err(PowerRefusal::WouldFail { why }),
            None => Ok(annotate(restart())),
        },
        Command::Resume if !vm.spec.vm.paused => Ok(unchanged("is not paused")),
        Command::Resume => set_paused(vm, false, insist),
        Command::Pause if vm.spec.vm.paused => Ok(unchanged("is paused already")),
        Command::Reset | Command::Reboot | Command::Pause if !is(conditions::RUNNING) => {
            let ready = status.and_then(|status| conditions::find(&status.conditions, conditions::READY));
            Err(PowerRefusal::NoGuest { reason: ready.map(|ready| ready.reason.clone()) })
        }
        Command::Reset => {
            let count = next_count(vm.spec.vm.reset_count, status.and_then(|status| status.runner.reset_count));
            Ok(write(vm, json!({ "spec": { "vm": { "resetCount": count } } })))
        }
        Command::Reboot => {
            let count = next_count(vm.spec.vm.reboot_count, status.and_then(|status| status.runner.reboot_count));
            Ok(write(vm, json!({ "spec": { "vm": { "rebootCount": count } } })))
        }
        Command::Pause => set_paused(vm, true, insist),
    }
}

/// What the runner says of a change of the spec that the running guest could not get, such as a CD that does not exist.
fn known_failure(vm: &VirtualMachine) -> Option<String> {
    let status = vm.status.as_ref().filter(|_| has(vm, conditions::RUNNING))?;
    let applied = conditions::find(&status.conditions, conditions::CHANGES_APPLIED)?;
    let has_failed = applied.status == "False" && conditions::reason(applied) == Some(Reason::ChangeFailed);
    has_failed.then(|| applied.message.clone())
}

/// Who applies a field that is to be written, and the field.
fn applier(
    vm: &VirtualMachine,
    field: &'static str,
    insist: bool,
) -> Result<Option<(Applier, &'static str)>, PowerRefusal> {
    match ownership::applier(vm, field) {
        Some(applier) if applier.is_gitops && !insist => Err(PowerRefusal::Git { applier, field }),
        applier => Ok(applier.map(|applier| (applier, field))),
    }
}

fn set_paused(vm: &VirtualMachine, paused: bool, insist: bool) -> Result<Decision, PowerRefusal> {
    let applier = applier(vm, PAUSED, insist)?;
    let body = body(vm, json!({ "spec": { "vm": { PAUSED: paused } } }));
    Ok(Decision::Write { change: Change::Merge(body), applier, expected: () })
}

/// A count that is new to the runner: a sync with Git may have removed the last one from the spec, and the runner may not know that yet.
fn next_count(of_spec: Option<u32>, carried_out: Option<u32>) -> u32 {
    of_spec.max(carried_out).unwrap_or_default().saturating_add(1)
}

/// Writes the state, and removes an annotation that outranks it, or did.
fn set_state(
    vm: &VirtualMachine,
    state: PowerState,
    mut annotations: Value,
    insist: bool,
    now: Timestamp,
) -> Result<Decision, PowerRefusal> {
    let applier = applier(vm, STATE, insist)?;
    let is_same = is_state(vm, state);
    if vm.annotations().contains_key(STATE_UNTIL_ANNOTATION) {
        // An apply can't remove what others have set, but it can let it end.
        annotations[STATE_UNTIL_ANNOTATION] = if is_same { value(state, now).into() } else { Value::Null };
    }
    let metadata = if annotations == json!({}) { annotations } else { json!({ "annotations": annotations }) };
    let body = body(vm, json!({ "metadata": metadata, "spec": { "vm": { "state": state } } }));
    let change = if is_same { Change::Apply(body) } else { Change::Merge(body) };
    Ok(Decision::Write { change, applier, expected: () })
}

fn unchanged(why: &str) -> Decision {
    Decision::Unchanged(why.to_owned())
}

/// A merge patch that nobody's sync takes back.
fn write(vm: &VirtualMachine, patch: Value) -> Decision {
    Decision::Write { change: Change::Merge(body(vm, patch)), applier: None, expected: () }
}

/// What is written, with the UID of the VM.
fn body(vm: &VirtualMachine, mut body: Value) -> Value {
    body["metadata"]["uid"] = json!(vm.uid());
    body
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::SignedDuration;

    use super::*;
    use crate::test_support::{noon, vm};

    /// A VM as the API server has it. `who` applied its state with this operation, if anybody did.
    fn machine(state: &str, who: Option<(&str, &str)>, status: &Value) -> VirtualMachine {
        vm(|vm| {
            vm["spec"]["vm"]["state"] = json!(state);
            vm["status"] = status.clone();
            if let Some((manager, operation)) = who {
                let fields = json!({ "f:spec": { "f:vm": { "f:state": {} } } });
                vm["metadata"]["managedFields"] = json!([{
                    "manager": manager, "operation": operation, "time": "2026-11-20T10:00:00Z",
                    "apiVersion": "vmoperator.jdrupes.org/v1", "fieldsType": "FieldsV1", "fieldsV1": fields,
                }]);
            }
        })
    }

    fn conditions(types: &[&str]) -> Value {
        let condition = |type_: &&str| json!({ "type": type_, "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
        json!({ "created": true, "conditions": types.iter().map(condition).collect::<Vec<_>>() })
    }

    fn decided(vm: &VirtualMachine, command: Command) -> Result<String, String> {
        match decide(vm, command, Some("pod-1"), false, noon()) {
            Ok(Decision::Unchanged(why)) => Ok(why),
            Ok(Decision::Write { change: Change::Merge(body), .. }) => Ok(format!("merge {body}")),
            Ok(Decision::Write { change: Change::Apply(body), .. }) => Ok(format!("apply {body}")),
            Err(refusal) => Err(refusal.to_string()),
        }
    }

    const START: Command = Command::Start { until: None };
    const STOP: Command = Command::Stop { force: false, until: None };
    const FORCE: Command = Command::Stop { force: true, until: None };

    #[test]
    fn a_restart_that_is_known_to_fail_is_told_before() {
        let failing = |running: &str, reason: &str| {
            vm(|vm| {
                vm["status"] = conditions(&[]);
                vm["status"]["conditions"] = json!([
                    { "type": "Running", "status": running, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" },
                    { "type": "ChangesApplied", "status": "False", "reason": reason, "message": "no CD", "lastTransitionTime": "2026-01-01T00:00:00Z" },
                ]);
            })
        };
        let restart = |vm: &VirtualMachine, insist| decide(vm, Command::Restart, None, insist, noon()).err();
        let known = failing("True", "ChangeFailed");
        assert_eq!(restart(&known, false), Some(PowerRefusal::WouldFail { why: "no CD".into() }));
        assert_eq!(restart(&known, true), None);
        // Nothing runs that could be lost, or there is no guest of which it is said.
        assert_eq!(restart(&failing("False", "ChangeFailed"), false), None);
        assert_eq!(restart(&failing("True", "Stopped"), false), None);
    }

    #[test]
    fn each_command_writes_what_the_vm_lacks() {
        let cli = Some(("vm-operator-cli", "Update"));
        let up = machine("Running", cli, &conditions(&["Running"]));
        let starting = machine("Running", cli, &conditions(&[]));
        let going = machine("Stopped", cli, &conditions(&["Running"]));
        let down = machine("Stopped", cli, &json!({ "created": false }));
        let unmanaged = machine("Stopped", None, &conditions(&["Running", "PowerUnmanaged"]));
        let halted = json!({ "halted": { "by": "guest", "time": "2026-01-01T00:00:00Z", "generation": 3 } });
        let halted = machine("Running", Some(("kustomize-controller", "Apply")), &halted);
        let state =
            |state: &str| format!(r#"{{"metadata":{{"uid":"apple-uid"}},"spec":{{"vm":{{"state":"{state}"}}}}}}"#);
        let restart = r#"merge {"metadata":{"annotations":{"vmoperator.jdrupes.org/restartedAt":"2027-01-15T08:00:00Z"},"uid":"apple-uid"}}"#;
        let force = r#"{"annotations":{"vmoperator.jdrupes.org/forceStop":"pod-1"},"uid":"apple-uid"}"#;
        let reset = r#"merge {"metadata":{"uid":"apple-uid"},"spec":{"vm":{"resetCount":1}}}"#;
        for (vm, command, expected) in [
            (&up, START, Ok("runs already".to_owned())),
            (&starting, START, Ok("is starting already".into())),
            (&going, START, Ok(format!("merge {}", state("Running")))),
            (&down, START, Ok(format!("merge {}", state("Running")))),
            (&unmanaged, START, Ok(format!("merge {}", state("Running")))),
            (&halted, START, Ok(restart.into())),
            (&up, STOP, Ok(format!("merge {}", state("Stopped")))),
            (&going, STOP, Ok("is stopping already".into())),
            (&down, STOP, Ok("is stopped already".into())),
            // A patch that changes no value makes nobody its owner.
            (&unmanaged, STOP, Ok(format!("apply {}", state("Stopped")))),
            (&up, FORCE, Ok(format!(r#"merge {{"metadata":{force},"spec":{{"vm":{{"state":"Stopped"}}}}}}"#))),
            (&going, FORCE, Ok(format!(r#"merge {{"metadata":{force}}}"#))),
            (&up, Command::Restart, Ok(restart.into())),
            (&halted, Command::Restart, Ok(restart.into())),
            (&unmanaged, Command::Restart, Ok(restart.into())),
            (&down, Command::Restart, Err("it is stopped; a start is what it needs".into())),
            (&up, Command::Reset, Ok(reset.into())),
            (&starting, Command::Reset, Err("its guest does not run".into())),
            (&up, Command::Reboot, Ok(reset.replace("resetCount", "rebootCount"))),
            (&down, Command::Reboot, Err("its guest does not run".into())),
            (&up, Command::Pause, Ok(reset.replace(r#""resetCount":1"#, r#""paused":true"#))),
            (&down, Command::Pause, Err("its guest does not run".into())),
            (&up, Command::Resume, Ok("is not paused".into())),
        ] {
            assert_eq!(decided(vm, command), expected, "{command:?} {:?}", vm.spec.vm.state);
        }
        let mut deleted = up.clone();
        deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        assert_eq!(decided(&deleted, Command::Restart), Err("it is being deleted".into()));
        let without_pod = decide(&down, FORCE, None, false, noon());
        assert_eq!(without_pod, Ok(unchanged("is stopped already")));
    }

    /// Noon is 2027-01-15T08:00:00Z.
    #[test]
    fn a_state_for_some_time_is_an_annotation_that_no_sync_takes_back() {
        let until = |state: PowerState, hours: i64| value(state, noon() + SignedDuration::from_hours(hours));
        let machine = |state: &str, who: &str, operation: &str, in_force: Option<String>, status: &Value| {
            let mut vm = machine(state, Some((who, operation)), status);
            if let Some(value) = in_force {
                vm.annotations_mut().insert(STATE_UNTIL_ANNOTATION.into(), value);
            }
            vm
        };
        let (running, stopped) = (until(PowerState::Running, 2), until(PowerState::Stopped, 2));
        let (git, person) = (("kustomize-controller", "Apply"), ("vm-operator-cli", "Update"));
        let up = conditions(&["Running"]);
        let halted = json!({ "halted": { "by": "guest", "time": "2026-01-01T00:00:00Z", "generation": 3 } });
        let was_up = json!({ "power": "Running", "created": true });
        let start = Command::Start { until: Some(noon() + SignedDuration::from_hours(2)) };
        let stop = |force| Command::Stop { force, until: Some(noon() + SignedDuration::from_hours(2)) };
        let annotated = |annotations: Value| {
            Ok(format!("merge {}", json!({ "metadata": { "annotations": annotations, "uid": "apple-uid" } })))
        };
        let written = |how: &str, state: &str, annotations: Value| {
            let metadata = json!({ "annotations": annotations, "uid": "apple-uid" });
            Ok(format!("{how} {}", json!({ "metadata": metadata, "spec": { "vm": { "state": state } } })))
        };
        let only = |value: &str| json!({ STATE_UNTIL_ANNOTATION: value });
        let none = || json!({ STATE_UNTIL_ANNOTATION: null });
        let from_git = |manager: &str| {
            let applier = Applier { manager: manager.into(), since: None, is_gitops: true };
            Err(PowerRefusal::Git { applier, field: STATE }.to_string())
        };
        let since = |result: Result<String, String>| {
            result.map_err(|text| text.replace(" (its last change: 2026-11-20T10:00:00Z)", ""))
        };
        for (state, who, in_force, status, command, expected) in [
            ("Running", git, None, &up, stop(false), annotated(only(&stopped))),
            ("Stopped", git, None, &Value::Null, start, annotated(only(&running))),
            // The time is what is new.
            ("Running", git, None, &up, start, annotated(only(&running))),
            (
                "Running",
                git,
                None,
                &up,
                stop(true),
                annotated(json!({ FORCE_STOP_ANNOTATION: "pod-1", STATE_UNTIL_ANNOTATION: stopped })),
            ),
            (
                "Running",
                git,
                None,
                &halted,
                start,
                annotated(json!({ RESTARTED_ANNOTATION: noon().to_string(), STATE_UNTIL_ANNOTATION: running })),
            ),
            // What stands in the way is removed, and that is enough where the spec says the same.
            ("Running", git, Some(&stopped), &Value::Null, START, annotated(none())),
            ("Stopped", git, Some(&running), &up, STOP, annotated(none())),
            (
                "Stopped",
                git,
                Some(&running),
                &up,
                FORCE,
                annotated(json!({ FORCE_STOP_ANNOTATION: "pod-1", STATE_UNTIL_ANNOTATION: null })),
            ),
            ("Stopped", person, Some(&stopped), &Value::Null, START, written("merge", "Running", none())),
            ("Running", person, Some(&running), &up, STOP, written("merge", "Stopped", none())),
            ("Running", git, Some(&running), &up, STOP, from_git("kustomize-controller")),
            ("Stopped", git, Some(&stopped), &Value::Null, START, from_git("kustomize-controller")),
            // For longer than some time.
            ("Running", person, Some(&stopped), &Value::Null, STOP, written("merge", "Stopped", none())),
            ("Stopped", git, Some(&running), &up, START, from_git("kustomize-controller")),
            // It does not stand in the way.
            ("Running", git, Some(&running), &up, START, Ok("runs already".into())),
            ("Stopped", git, Some(&stopped), &Value::Null, STOP, Ok("is stopped already".into())),
            (
                "Running",
                git,
                Some(&running),
                &up,
                Command::Restart,
                annotated(json!({ RESTARTED_ANNOTATION: noon().to_string() })),
            ),
            (
                "Stopped",
                git,
                Some(&running),
                &up,
                Command::Restart,
                annotated(json!({ RESTARTED_ANNOTATION: noon().to_string() })),
            ),
            (
                "Running",
                git,
                Some(&stopped),
                &Value::Null,
                Command::Restart,
                Err("it is stopped; a start is what it needs".into()),
            ),
            // Nobody sets the state, and without the annotation the VM would stay up.
            (
                "Stopped",
                ("nobody", "Nothing"),
                Some(&running),
                &was_up,
                STOP,
                written("apply", "Stopped", only("Stopped 2027-01-15T08:00:00Z")),
            ),
        ] {
            let row = format!("{state} {who:?} {in_force:?} {command:?}");
            let mut vm = machine(state, who.0, who.1, in_force.cloned(), status);
            if who.0 == "nobody" {
                vm.metadata.managed_fields = None;
            }
            assert_eq!(since(decided(&vm, command)), expected, "{row}");
        }
        // One that is over is removed when something is written.
        let over = Some(until(PowerState::Stopped, -2));
        let vm = machine("Running", person.0, person.1, over, &up);
        assert_eq!(decided(&vm, STOP), written("merge", "Stopped", none()));
        assert_eq!(decided(&vm, START), Ok("runs already".into()));
    }

    #[test]
    fn what_a_gitops_controller_applies_is_written_only_if_the_person_insists() {
        for (manager, operation, is_refused) in [
            ("kustomize-controller", "Apply", true),
            ("argocd-controller", "Apply", true),
            ("argocd-controller", "Update", true),
            ("argocd-application-controller", "Update", true),
            ("helm-controller", "Update", true),
            ("helm", "Update", false),
            ("kubectl-patch", "Update", false),
            ("kubectl", "Apply", false),
            ("vm-operator-cli", "Apply", false),
        ] {
            let vm = machine("Running", Some((manager, operation)), &conditions(&["Running"]));
            let expected = format!(
                "{manager} applies spec.vm.state from Git (its last change: 2026-11-20T10:00:00Z), and takes back what others write; \
                 change it in Git"
            );
            assert_eq!(decided(&vm, STOP).err(), is_refused.then_some(expected), "{manager} {operation}");
            let insisted = decide(&vm, STOP, None, true, noon()).unwrap();
            let Decision::Write { applier, .. } = insisted else { panic!("{insisted:?}") };
            let is_told = !["kubectl-patch", "vm-operator-cli"].contains(&manager);
            assert_eq!(
                applier.map(|(applier, _)| applier.manager),
                is_told.then(|| manager.to_owned()),
                "{manager} {operation}"
            );
            assert!(decided(&vm, Command::Restart).is_ok(), "an annotation is safe");
        }
    }

    #[test]
    fn a_pause_that_git_takes_back_is_written_only_if_the_person_insists() {
        let machine = |paused: bool, who: &str, field: &str| {
            let mut vm = machine("Running", Some((who, "Apply")), &conditions(&["Running"]));
            vm.spec.vm.paused = paused;
            let fields = json!({ "f:spec": { "f:vm": { format!("f:{field}"): {} } } });
            vm.metadata.managed_fields.as_mut().unwrap()[0].fields_v1 = serde_json::from_value(fields).unwrap();
            vm
        };
        let git = "kustomize-controller";
        for (who, field, is_refused) in
            [(git, "paused", true), (git, "state", false), ("kubectl", "paused", false), ("kubectl", "state", false)]
        {
            for (command, paused) in [(Command::Pause, true), (Command::Resume, false)] {
                let row = format!("{command:?} beside {who}, which applies {field}");
                let vm = machine(!paused, who, field);
                let written = json!({ "metadata": { "uid": "apple-uid" }, "spec": { "vm": { "paused": paused } } });
                let refused = "kustomize-controller applies spec.vm.paused from Git (its last change: 2026-11-20T10:00:00Z), and takes back \
                               what others write; change it in Git";
                let expected = if is_refused { Err(refused.to_owned()) } else { Ok(format!("merge {written}")) };
                assert_eq!(decided(&vm, command), expected, "{row}");
                let insisted = decide(&vm, command, None, true, noon()).unwrap();
                let Decision::Write { change: Change::Merge(body), applier, .. } = insisted else { panic!("{row}") };
                let is_told = (field == "paused").then(|| who.to_owned());
                assert_eq!((body, applier.map(|(applier, _)| applier.manager)), (written, is_told), "{row}");
            }
            // Nothing is to be written.
            assert_eq!(decided(&machine(true, who, field), Command::Pause), Ok("is paused already".into()));
        }
    }

    #[test]
    fn argo_cd_applies_without_the_server_too() {
        let applied = |last: Value| {
            let mut vm = machine("Running", None, &conditions(&["Running"]));
            let last_applied = "kubectl.kubernetes.io/last-applied-configuration";
            vm.annotations_mut().insert(last_applied.into(), last.to_string());
            vm.metadata.managed_fields = serde_json::from_value(json!([{
                "manager": "argocd-controller", "operation": "Update", "time": "2026-11-20T10:00:00Z",
                "fieldsV1": { "f:metadata": { "f:annotations": { format!("f:{last_applied}"): {} } } },
            }]))
            .unwrap();
            decided(&vm, STOP)
        };
        assert!(applied(json!({ "spec": { "vm": { "state": "Running" } } })).is_err());
        assert!(applied(json!({ "spec": { "vm": {} } })).is_ok(), "Git says nothing about the state");
    }
}
