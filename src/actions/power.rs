//! Starts, stops, restarts, resets, reboots, pauses and resumes a VM.
//!
//! ```text
//!  VM, order ─▶ change (pure) ─▶ one merge patch, or nothing to do ─▶ watch of the VM ─▶ progress (pure) ─▶ done, or why not
//! ```
//!
//! A change is written with the field manager [`COMMAND_MANAGER`], which does not apply a field again: where Git applies it, the next sync
//! sets it back. [`applier`] says who that is.
//!
//! # Rights
//! `get` and `patch` on VMs; to wait, also `list` and `watch`; for a forced stop of a VM whose runner has not reported yet, `get` on Pods.

use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::{
    api::core::v1::Pod,
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
    runtime::{WatchStreamExt, watcher},
};
use serde_json::{Value, json};

use super::VmHandle;
use crate::{
    api::{
        PowerState, Reason, StoredVm, VirtualMachine, VirtualMachineStatus,
        conditions::{self, READY, RUNNING},
    },
    object::{FORCE_STOP_ANNOTATION, RESTARTED_ANNOTATION},
    ownership::COMMAND_MANAGER,
};

/// Reasons of Ready that time does not mend: somebody must change something before the VM starts.
const STUCK: [Reason; 9] = [
    Reason::ApplyFailed,
    Reason::ClaimMissing,
    Reason::ImagePullFailed,
    Reason::InvalidSpec,
    Reason::NameTaken,
    Reason::RunnerFailed,
    Reason::SecretRefused,
    Reason::TemplateError,
    Reason::WatchFailed,
];

/// What a person wants of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The VM runs.
    Start,
    /// The guest shuts down, and the VM stays down.
    Stop,
    /// The guest is ended without its shutdown, and the VM stays down.
    Force,
    /// The guest shuts down, and starts in a new Pod.
    Restart,
    /// The guest starts anew at once, as with a computer's reset button.
    Reset,
    /// The guest is asked to reboot.
    Reboot,
    /// The guest stands still.
    Pause,
    /// The guest goes on.
    Resume,
}

impl Order {
    /// What was done, for people: `vm/a started`.
    pub fn past(self) -> &'static str {
        match self {
            Self::Start => "started",
            Self::Stop => "stopped",
            Self::Force => "stopped by force",
            Self::Restart => "restarted",
            Self::Reset => "reset",
            Self::Reboot => "rebooted",
            Self::Pause => "paused",
            Self::Resume => "resumed",
        }
    }

    /// The field of the spec that the order sets.
    fn field(self) -> Option<&'static str> {
        match self {
            Self::Start | Self::Stop | Self::Force => Some("state"),
            Self::Pause | Self::Resume => Some("paused"),
            Self::Reset => Some("resetCount"),
            Self::Reboot => Some("rebootCount"),
            Self::Restart => None,
        }
    }
}

/// What an order changes.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Nothing: it is so already.
    Unchanged,
    /// This merge patch of the VM.
    Patch(Value),
}

/// Why an order can't be carried out.
#[derive(Debug, thiserror::Error)]
pub enum PowerError {
    /// A VM that does not run can't be restarted, reset, rebooted, paused or resumed.
    #[error("it does not run ({phase})")]
    NotRunning {
        /// Its phase.
        phase: String,
    },
    /// The VM is being deleted.
    #[error("it is being deleted; to end its guest now: kubectl exec {0} -c vm-runner -- vm-runner end")]
    Deleting(String),
    /// There is no such VM, or no such VM any more.
    #[error("it does not exist")]
    Deleted,
    /// What was wanted will not come about by itself.
    #[error("{reason}: {message}")]
    Failed {
        /// The reason of its condition Ready.
        reason: String,
        /// The message of that condition.
        message: String,
    },
    /// It took too long.
    #[error("not done after {}s; now: {now}", after.as_secs())]
    TimedOut {
        /// What was waited for so long.
        after: Duration,
        /// What the VM is doing.
        now: String,
    },
    /// A request failed.
    #[error(transparent)]
    Request(#[from] kube::Error),
    /// The watch failed.
    #[error("watch it")]
    Watch(#[source] watcher::Error),
}

/// Decides what an order changes. `pod_uid` is the UID of the VM's Pod.
///
/// # Errors
/// If the VM is in no state for the order.
pub fn change(order: Order, vm: &VirtualMachine, pod_uid: Option<&str>, now: Timestamp) -> Result<Change, PowerError> {
    let spec = &vm.spec.vm;
    let is_down = phase(vm) == "Stopped";
    if vm.metadata.deletion_timestamp.is_some() {
        return Err(PowerError::Deleting(vm.name_any()));
    }
    let needs_guest = matches!(order, Order::Restart | Order::Reset | Order::Reboot | Order::Pause | Order::Resume);
    if needs_guest && (is_down || spec.state == PowerState::Stopped) {
        return Err(PowerError::NotRunning { phase: phase(vm) });
    }
    let set = |field: &str, value: Value| Change::Patch(json!({ "spec": { "vm": { field: value } } }));
    let next = |asked: Option<u32>, done: Option<u32>| asked.max(done).unwrap_or_default().saturating_add(1);
    let status = vm.status.as_ref();
    Ok(match order {
        Order::Start if spec.state == PowerState::Running && status.is_none_or(|status| status.halted.is_none()) => {
            Change::Unchanged
        }
        // The guest has shut itself down and stays down, although the state says Running: a restart starts it.
        Order::Start if spec.state == PowerState::Running => restart(now),
        Order::Start => set("state", json!("Running")),
        Order::Stop if spec.state == PowerState::Stopped => Change::Unchanged,
        Order::Stop => set("state", json!("Stopped")),
        Order::Force if is_down => Change::Unchanged,
        Order::Force => {
            let annotations = pod_uid.map(|uid| json!({ "annotations": { FORCE_STOP_ANNOTATION: uid } }));
            Change::Patch(json!({
                "metadata": annotations.unwrap_or_else(|| json!({})), "spec": { "vm": { "state": "Stopped" } },
            }))
        }
        Order::Restart => restart(now),
        Order::Reset => set("resetCount", json!(next(spec.reset_count, status.and_then(|status| status.reset_count)))),
        Order::Reboot => {
            set("rebootCount", json!(next(spec.reboot_count, status.and_then(|status| status.reboot_count))))
        }
        Order::Pause if spec.paused => Change::Unchanged,
        Order::Pause => set("paused", json!(true)),
        Order::Resume if !spec.paused => Change::Unchanged,
        Order::Resume => set("paused", json!(false)),
    })
}

/// The restart annotation: each new value restarts a VM once.
fn restart(now: Timestamp) -> Change {
    Change::Patch(json!({ "metadata": { "annotations": { RESTARTED_ANNOTATION: now.to_string() } } }))
}

/// The VM's phase; `Unknown` before its first reconcile.
pub fn phase(vm: &VirtualMachine) -> String {
    vm.status.as_ref().and_then(|status| status.phase.clone()).unwrap_or_else(|| "Unknown".into())
}

/// How far an order is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is done.
    Done,
    /// It is not done yet. What the VM does now, for people.
    Waits(String),
    /// It will not be done before somebody changes something.
    Failed {
        /// The reason of the condition Ready.
        reason: String,
        /// Its message.
        message: String,
    },
}

/// How far an order is that was given when the VM was as `before`.
pub fn progress(order: Order, before: &VirtualMachine, vm: &VirtualMachine) -> Progress {
    let status = vm.status.as_ref();
    let current = |status: &&VirtualMachineStatus| status.observed_generation >= vm.metadata.generation;
    let Some(seen) = status.filter(current) else { return Progress::Waits("waiting for the manager".into()) };
    let condition = |type_| conditions::find(&seen.conditions, type_);
    let ready = condition(READY);
    let running = condition(RUNNING);
    // The runner reports first, and then the manager.
    let runs = running.is_some_and(|condition| condition.status == "True") && seen.phase.as_deref() == Some("Running");
    let is_paused = running.is_some_and(|condition| condition.reason == Reason::Paused.as_str());
    let had_pod = before.status.as_ref().and_then(|status| status.pod_uid.as_ref());
    let is_new_pod = seen.pod_uid.is_some() && seen.pod_uid.as_ref() != had_pod;
    let done = match order {
        Order::Start => runs || is_paused,
        Order::Stop | Order::Force => seen.phase.as_deref() == Some("Stopped"),
        Order::Restart => (runs || is_paused) && is_new_pod,
        Order::Reset => seen.reset_count >= vm.spec.vm.reset_count,
        Order::Reboot => seen.reboot_count >= vm.spec.vm.reboot_count,
        Order::Pause => is_paused,
        Order::Resume => runs,
    };
    if done {
        return Progress::Done;
    }
    let Some(ready) = ready else { return Progress::Waits(phase(vm)) };
    // An annotation does not change the generation, so the status may be that of before the restart.
    let by_annotation =
        order == Order::Restart || (order == Order::Start && before.spec.vm.state == PowerState::Running);
    let is_stuck = conditions::reason(ready).is_some_and(|reason| STUCK.contains(&reason));
    if is_stuck && (!by_annotation || is_new_pod) && !matches!(order, Order::Stop | Order::Force) {
        return Progress::Failed { reason: ready.reason.clone(), message: ready.message.clone() };
    }
    Progress::Waits(format!("{}: {}", phase(vm), ready.message))
}

/// Who applies a field of the spec, so that the next sync sets it back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applier {
    /// The field manager.
    pub manager: String,
    /// The field, such as `spec.vm.state`.
    pub field: String,
    /// Since when.
    pub since: Option<Timestamp>,
}

/// The client that applies the field of an order, if one does. `kubectl apply` by hand is none: it applies only when a person does.
pub fn applier(order: Order, vm: &VirtualMachine) -> Option<Applier> {
    let field = order.field()?;
    let entry = vm.managed_fields().iter().find(|entry| {
        let manager = entry.manager.as_deref().unwrap_or_default();
        let owns = entry
            .fields_v1
            .as_ref()
            .is_some_and(|fields| fields.0.pointer(&format!("/f:spec/f:vm/f:{field}")).is_some());
        let is_tool = ["argocd", "kustomize-controller", "helm-controller", "flux", "fleet", "kapp"];
        owns && is_tool.iter().any(|tool| manager.contains(tool))
    })?;
    let time = entry.time.as_ref().map(|time| time.0);
    Some(Applier { manager: entry.manager.clone().unwrap_or_default(), field: format!("spec.vm.{field}"), since: time })
}

/// What [`carry_out`] did.
#[derive(Clone, Debug)]
pub struct Given {
    /// What changed.
    pub change: Change,
    /// The VM before the change.
    pub before: VirtualMachine,
    /// Who applies the field that was changed.
    pub applier: Option<Applier>,
}

impl VmHandle {
    /// Gives an order. Does not wait for what follows. With `dry_run` the API server checks the change and keeps nothing.
    ///
    /// # Errors
    /// [`PowerError`].
    pub async fn order(&self, order: Order, dry_run: bool) -> Result<Given, PowerError> {
        let before = self.get().await?;
        let known = before.status.as_ref().and_then(|status| status.pod_uid.clone());
        let uid = match (order, known) {
            (Order::Force, None) => self.api::<Pod>().get_opt(&self.name).await?.and_then(|pod| pod.metadata.uid),
            (_, known) => known,
        };
        let change = change(order, &before, uid.as_deref(), Timestamp::now())?;
        let applier = applier(order, &before);
        if let Change::Patch(patch) = &change {
            let parameters =
                PatchParams { dry_run, field_manager: Some(COMMAND_MANAGER.into()), ..PatchParams::default() };
            let vms: Api<StoredVm> = self.api();
            vms.patch(&self.name, &parameters, &Patch::Merge(patch)).await?;
        }
        Ok(Given { change, before, applier })
    }

    /// What an order would change.
    ///
    /// # Errors
    /// As [`VmHandle::order`].
    pub async fn plan(&self, order: Order) -> Result<Change, PowerError> {
        let vm = self.get().await?;
        let uid = vm.status.as_ref().and_then(|status| status.pod_uid.clone());
        change(order, &vm, uid.as_deref(), Timestamp::now())
    }

    /// Waits until `progress` says that the VM is as wanted, and tells each step to `told`. Returns the VM.
    ///
    /// # Errors
    /// [`PowerError::Failed`], [`PowerError::Deleted`], [`PowerError::TimedOut`] after `limit`, or the error of the watch.
    pub async fn wait(
        &self,
        limit: Duration,
        mut progress: impl FnMut(&VirtualMachine) -> Progress,
        mut told: impl FnMut(&str),
    ) -> Result<VirtualMachine, PowerError> {
        let config = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let mut events = watcher(self.api::<StoredVm>(), config).default_backoff().boxed();
        let mut now = String::from("nothing is known yet");
        let mut exists = false;
        let watched = async {
            while let Some(event) = events.try_next().await.map_err(PowerError::Watch)? {
                let StoredVm(vm) = match event {
                    watcher::Event::Apply(vm) | watcher::Event::InitApply(vm) => vm,
                    watcher::Event::Delete(_) => return Err(PowerError::Deleted),
                    watcher::Event::InitDone if !exists => return Err(PowerError::Deleted),
                    watcher::Event::Init | watcher::Event::InitDone => continue,
                };
                exists = true;
                match progress(&vm) {
                    Progress::Done => return Ok(vm),
                    Progress::Failed { reason, message } => return Err(PowerError::Failed { reason, message }),
                    Progress::Waits(what) => {
                        if what != now {
                            told(&what);
                        }
                        now = what;
                    }
                }
            }
            Err(PowerError::Deleted)
        };
        match tokio::time::timeout(limit, watched).await {
            Ok(result) => result,
            Err(_) => Err(PowerError::TimedOut { after: limit, now }),
        }
    }
}

/// How long ago that was, for people: `41s`, `3m`, `2h`, `5d`.
pub fn ago(since: Timestamp, now: Timestamp) -> String {
    let seconds = now.duration_since(since).max(SignedDuration::ZERO).as_secs();
    match seconds {
        0..=119 => format!("{seconds}s"),
        120..=7199 => format!("{}m", seconds / 60),
        7200..=172_799 => format!("{}h", seconds / 3600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::vm;

    fn with_status(state: &str, status: Value) -> VirtualMachine {
        vm(|vm| {
            vm["spec"]["vm"]["state"] = json!(state);
            vm["metadata"]["generation"] = json!(2);
            vm["status"] = status;
        })
    }

    fn up() -> Value {
        json!({ "observedGeneration": 2, "phase": "Running", "podUid": "p1", "resetCount": 3, "conditions": [
            { "type": "Running", "status": "True", "reason": "Started", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" },
            { "type": "Ready", "status": "True", "reason": "Running", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" },
        ] })
    }

    fn down() -> Value {
        json!({ "observedGeneration": 2, "phase": "Stopped", "podUid": "p1", "conditions": [] })
    }

    fn stuck(pod: &str) -> Value {
        json!({ "observedGeneration": 2, "phase": "Failed", "podUid": pod, "conditions": [
            { "type": "Ready", "status": "False", "reason": "RunnerFailed", "message": "no", "lastTransitionTime": "2026-01-01T00:00:00Z" },
        ] })
    }

    #[test]
    fn an_order_changes_what_it_must_and_nothing_if_all_is_so() {
        let now = Timestamp::UNIX_EPOCH;
        let (up, down) = (with_status("Running", up()), with_status("Stopped", down()));
        let state = |state: &str| Change::Patch(json!({ "spec": { "vm": { "state": state } } }));
        let table = [
            (Order::Start, &up, Change::Unchanged),
            (Order::Start, &down, state("Running")),
            (Order::Stop, &up, state("Stopped")),
            (Order::Stop, &down, Change::Unchanged),
            (Order::Force, &down, Change::Unchanged),
            (Order::Reset, &up, Change::Patch(json!({ "spec": { "vm": { "resetCount": 4 } } }))),
            (Order::Pause, &up, Change::Patch(json!({ "spec": { "vm": { "paused": true } } }))),
            (Order::Resume, &up, Change::Unchanged),
        ];
        for (order, vm, expected) in table {
            assert_eq!(change(order, vm, Some("p1"), now).unwrap(), expected, "{order:?}");
        }
        let Change::Patch(forced) = change(Order::Force, &up, Some("p1"), now).unwrap() else { panic!("unchanged") };
        assert_eq!(forced["metadata"]["annotations"][FORCE_STOP_ANNOTATION], "p1");
        assert_eq!(forced["spec"]["vm"]["state"], "Stopped");
        for order in [Order::Restart, Order::Reset, Order::Reboot, Order::Pause, Order::Resume] {
            assert!(matches!(change(order, &down, None, now), Err(PowerError::NotRunning { .. })), "{order:?}");
        }
        // The guest has shut itself down, though the state says Running: only a restart starts it.
        let halted = json!({ "observedGeneration": 2, "phase": "Halted",
            "halted": { "by": "x", "time": "2026-01-01T00:00:00Z", "generation": 1 } });
        let Change::Patch(patch) = change(Order::Start, &with_status("Running", halted), None, now).unwrap() else {
            panic!("unchanged")
        };
        assert!(patch["metadata"]["annotations"][RESTARTED_ANNOTATION].is_string(), "{patch}");
    }

    #[test]
    fn an_order_is_done_when_the_status_says_so_and_fails_when_it_never_will() {
        let before = with_status("Running", up());
        let done = |order, status| progress(order, &before, &with_status("Running", status)) == Progress::Done;
        assert!(done(Order::Start, up()) && !done(Order::Restart, up()));
        let mut again = up();
        again["podUid"] = json!("p2");
        assert!(done(Order::Restart, again));
        assert!(done(Order::Stop, down()) && !done(Order::Stop, up()));
        let mut old = up();
        old["observedGeneration"] = json!(1);
        assert!(!done(Order::Start, old), "the manager has not seen the change");
        let failed = |order, status| {
            matches!(progress(order, &with_status("Stopped", down()), &status), Progress::Failed { .. })
        };
        assert!(failed(Order::Start, with_status("Running", stuck("p1"))));
        assert!(!failed(Order::Stop, with_status("Running", stuck("p1"))), "a stop needs nothing to be right");
        // The failure may be that of before the restart.
        let restart =
            |pod| progress(Order::Restart, &with_status("Running", stuck("p1")), &with_status("Running", stuck(pod)));
        assert!(matches!(restart("p1"), Progress::Waits(_)) && matches!(restart("p2"), Progress::Failed { .. }));
    }
}
