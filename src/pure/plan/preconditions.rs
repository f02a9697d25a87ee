//! What must be true before a plan is executed, beyond what was observed: the watches may be behind, each by itself, and what is not watched is
//! not known at all. Only a plan for which a fact matters presumes it, because most facts cost a request.
//!
//! | a plan that | presumes | otherwise |
//! |---|---|---|
//! | gives the VM's agent another image | that its turn has come | the agent keeps its image until then |
//! | takes a guest down for a restart | that its cloud-init data may be used, and that its next Pod could start | the guest stays up, the rest is done, and the reason is reported |
//! | ends a guest that has a claim which the status does not name | that the status can't be written: nobody waits for that | nothing is deleted before the status, which is written with the plan |
//! | adopts an object, starts a VM again, or deletes a Pod although no person wants that | that VM and reports are as they were observed | nothing is done |
//! | deletes a Pod although no person wants that | that no claim goes with it | nothing is done |
//! | creates a claim | that no such claim exists | nothing is done, and the VM is reconciled again soon |
//! | starts the VM | that its cloud-init data may be used | nothing is done, and the reason is reported |
//!
//! What is presumed is asked in this order, before the first write. What a step depends on when the steps before are done (what its Pod mounts may
//! be made by them) is checked by whoever executes it.

use std::time::Duration;

use super::{Action, DeleteReason, Plan};
use crate::{
    api::VirtualMachine,
    claims,
    observed::{Object, Observed},
};

/// The pause before a VM is reconciled again whose claims the watch has not reported yet.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A fact that a plan presumes, and what becomes of the plan without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Precondition {
    /// What must be true.
    pub fact: Fact,
    /// What happens if it is not.
    pub otherwise: Otherwise,
}

/// Something that was not observed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// The VM's agent may be replaced now. Few are at once.
    AgentsTurn,
    /// The Secrets and ConfigMaps with cloud-init data are meant for VMs.
    SourcesAllowed {
        /// Whether a guest would be taken down, and not come back.
        is_restart: bool,
    },
    /// What runs the guest after a restart exists, or could be created.
    RestartPossible,
    /// The last status of the VM could not be written, or not with its claims: it is not waited for.
    StatusFails,
    /// The API server has the VM as it is here, and it is not being deleted.
    VmCurrent,
    /// The API server has the VM's reports as they were observed: the last one may say that the guest has shut itself down.
    ReportsCurrent,
    /// None of these claims is being deleted, or a person has given it up. A claim that is being deleted exists as long as its last Pod.
    ClaimsStay(Vec<String>),
    /// None of these claims exists, which were not observed.
    ClaimsAbsent(Vec<String>),
}

/// What becomes of a plan if a fact that it presumes is not true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Otherwise {
    /// Nothing is done: a watch reports what has changed. If it may have nothing to report, the VM is reconciled again after this time.
    Wait(Option<Duration>),
    /// A part of it is left out. If there is a reason, it is reported.
    LeaveOut(Part),
}

/// A part of a plan that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The new image of the VM's agent.
    AgentsImage,
    /// What takes a guest down for a restart.
    Restart,
    /// All deletions.
    Deletions,
    /// All actions.
    Everything,
}

impl Fact {
    /// What is logged if it is not true.
    pub fn refutation(&self) -> &'static str {
        match self {
            Self::AgentsTurn => "other agents are replaced now: the agent keeps its image until its turn comes",
            Self::SourcesAllowed { .. } => "the cloud-init data can't be used",
            Self::StatusFails => {
                "the status does not name all claims of the guest yet: nothing is deleted before it does"
            }
            Self::RestartPossible => "the guest would not start again: it stays up",
            Self::VmCurrent => {
                "the API server has another version of the VM, or none: it adopts nothing, is not started, and the Pod is kept"
            }
            Self::ReportsCurrent => {
                "a runner has reported what the manager has not seen yet: the VM is not started, and the Pod is kept"
            }
            Self::ClaimsStay(_) => "a claim is being deleted that would go with its Pod: the Pod is kept",
            Self::ClaimsAbsent(_) => "a claim exists, but the watch has not reported it yet: no other is made",
        }
    }
}

/// The preconditions of a plan. `forgets` says whether it may end a guest with a claim that the status does not name: after that only the status could
/// say that a guest has had it. `adopts` says whether an object without an owner becomes the VM's. The garbage collector takes owners away from
/// what a VM leaves (`kubectl delete --cascade=orphan`), and the watch of VMs may report that deletion later than the watch of the objects.
pub(super) fn preconditions(
    vm: &VirtualMachine,
    observed: &Observed,
    plan: &Plan,
    adopts: bool,
    forgets: bool,
) -> Vec<Precondition> {
    let actions = || plan.steps.iter().flatten();
    let leave_out = |part, fact| Precondition { fact, otherwise: Otherwise::LeaveOut(part) };
    let wait = |pause, fact| Precondition { fact, otherwise: Otherwise::Wait(pause) };
    let unwanted: Vec<&Object> = unwanted_pods(observed, plan).collect();
    let mut all = Vec::new();
    if actions().any(Action::is_image) {
        all.push(leave_out(Part::AgentsImage, Fact::AgentsTurn));
    }
    if actions().any(Action::restarts) {
        let facts = [Fact::SourcesAllowed { is_restart: true }, Fact::RestartPossible];
        all.extend(facts.map(|fact| leave_out(Part::Restart, fact)));
    }
    if forgets {
        all.push(leave_out(Part::Deletions, Fact::StatusFails));
    }
    let makes_running = actions().any(Action::makes_running);
    if adopts || makes_running && is_known(vm) || !unwanted.is_empty() {
        all.extend([Fact::VmCurrent, Fact::ReportsCurrent].map(|fact| wait(None, fact)));
    }
    if !unwanted.is_empty() {
        let mounted = unwanted.iter().flat_map(|pod| pod.mounted_claims()).map(|(claim, _)| claim.into_owned());
        all.push(wait(None, Fact::ClaimsStay(mounted.collect())));
    }
    if actions().any(|action| matches!(action, Action::Apply { object, uid: None } if object.key.is_claim())) {
        let unseen = claims::possible_names(vm).filter(|name| observed.claim(name).is_none());
        all.push(wait(Some(LOOK_AGAIN), Fact::ClaimsAbsent(unseen.collect())));
    }
    if plan.starts() {
        all.push(leave_out(Part::Everything, Fact::SourcesAllowed { is_restart: false }));
    }
    all
}

/// Whether the manager has written something about the VM. The definition gives a new VM a status with -1.
fn is_known(vm: &VirtualMachine) -> bool {
    vm.status.as_ref().is_some_and(|status| status.observed_generation.is_none_or(|generation| generation >= 0))
}

/// The Pods that the plan deletes although no person wants that: they have ended, or nothing has started in them.
fn unwanted_pods<'a>(observed: &'a Observed, plan: &'a Plan) -> impl Iterator<Item = &'a Object> {
    let unwanted = plan.steps.iter().flatten().filter_map(|action| match action {
        Action::Delete { key, uid, reason: DeleteReason::Ended | DeleteReason::Changed, .. } if key.is_pod() => {
            Some(uid)
        }
        Action::Delete { .. } | Action::Apply { .. } | Action::Label { .. } | Action::Image { .. } => None,
    });
    let known = || observed.objects.iter().chain(&observed.others).map(AsRef::as_ref);
    unwanted.filter_map(move |uid| known().find(|object: &&Object| object.uid == *uid))
}
