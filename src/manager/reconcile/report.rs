//! The step *report*: why a VM is not as its spec wants it, events, and the VM's status.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use tokio::time::Instant;
use tracing::{debug, warn};

use super::{ReconcileError, Reconciler, Turn, observe::View};
use crate::{
    api::{
        Problem, Reason, VirtualMachine, VirtualMachineStatus,
        conditions::{self, READY},
        reasons::Event,
    },
    claims,
    cluster::{ActionError, Executed, StatusWritten, watch::WatchError},
    explain::{Facts, surroundings::Look},
    manager::surroundings::Unread,
    object::{is_workload, reports as report_kind},
    observed::{NodeState, Object, Observed},
    ownership::{has_fields_of_runner, status_differs, trim},
    plan::{Plan, instances},
    process::{ErrorChain, lock},
    schedule::{self, Persistence},
    status::{
        Draft, ExecutionResult, LookedUp, Reconciled, draft,
        events::{self, events},
        reports,
    },
};

/// After how long a VM is looked at again whose status was overtaken by another write. The watch usually reports that write sooner; a proxy may have
/// answered without one.
const OVERTAKEN: Duration = Duration::from_secs(30);

/// After how long a VM is looked at again when it has turned out that its status can't name its claims. What waits for that waits no longer.
const UNNAMED: Duration = Duration::from_secs(1);

/// What has become of the status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StatusWrite {
    /// It was as it should be.
    Unneeded,
    Written {
        /// Whether it has all claims: a part of it may have been refused.
        has_claims: bool,
    },
    /// The VM was deleted or changed meanwhile.
    Overtaken,
    /// The API server takes no part of it.
    Refused,
}

/// The status of a VM with the cause why it is not as its spec wants it.
struct Explained {
    wanted: VirtualMachineStatus,
    /// After how long to look again, if nothing changes.
    look: Option<Duration>,
}

impl Reconciler {
    /// Derives events and the status, and writes them. Returns after how long to look again, if nothing changes.
    ///
    /// # Errors
    /// If the status, or what follows from it, could not be written.
    pub(super) async fn report(
        &self,
        turn: &Turn,
        view: &View,
        plan: &Plan,
        executed: &Executed<'_>,
    ) -> Result<Option<Duration>, ReconcileError> {
        let (vm, stored, observed) = (&*view.vm, &*turn.stored, &view.observed);
        let at_rest = self.unrest.problem(&turn.name, Instant::now());
        let outcome = ExecutionResult {
            failure: failure(executed.result.as_ref().err(), view.unwatched.as_ref(), turn.failures),
            beside: executed.beside.iter().filter_map(|error| failure(Some(error), None, turn.failures)).collect(),
            refusals: executed.refusals.clone(),
            unknown_kinds: view.unknown.iter().map(|unknown| unknown.kind.clone()).collect(),
            node: match plan.overdue_on(observed) {
                Some(node) => self.cluster.node_state(node).await,
                None => NodeState::default(),
            },
            unrest: at_rest.as_ref().map(|(problem, _)| problem.clone()),
        };
        let reconciled = Reconciled {
            vm,
            observed,
            plan,
            rendered: view.rendered.as_deref(),
            outcome: &outcome,
            source: turn.inputs.source(vm, view.kept_back.as_ref()),
        };
        let Explained { wanted, look } = self.explain(&reconciled, draft(&reconciled)).await;
        // Events are recorded first: after the status is written, they would not be new any more.
        self.record(vm, events(&reconciled, &wanted, &executed.done));
        let written = if status_differs(stored, &wanted) {
            self.write_status(turn, &wanted).await
        } else {
            Ok(StatusWrite::Unneeded)
        };
        let is_news = self.note_claims(turn, &written);
        let is_written = matches!(written, Ok(StatusWrite::Written { .. }));
        self.remember_retry(turn, plan.retry.clone().filter(|_| written.is_err()));
        if (!executed.done.is_empty() || is_written) && self.unrest.wrote(&turn.name, vm, Instant::now()) {
            let last: Vec<String> = executed.done.iter().map(|action| action.key().to_string()).collect();
            warn!(objects = last.join(", "), status = is_written, "the VM is written again and again");
        }
        let written = written?;
        if !is_written {
            self.write_stopped(vm, plan).await?;
        }
        // A report is left only if its Pod is known not to exist.
        let children = &self.cluster.children;
        if children.knows(&report_kind()) && view.knows_pods && !status_differs(stored, &wanted) {
            self.take_over(stored, observed).await?;
        }
        let overtaken = (written == StatusWrite::Overtaken).then_some(OVERTAKEN);
        let unnamed = is_news.then_some(UNNAMED);
        Ok(look.into_iter().chain(at_rest.map(|(_, again)| again)).chain(overtaken).chain(unnamed).min())
    }

    /// Looks for the cause if the VM is not as its spec wants it, and adds it to the status.
    async fn explain(&self, reconciled: &Reconciled<'_>, draft: Draft) -> Explained {
        let Reconciled { vm, observed, .. } = *reconciled;
        if conditions::is_true(&draft.status.conditions, READY) && vm.metadata.deletion_timestamp.is_none() {
            return Explained { wanted: draft.status, look: None };
        }
        let pod = instances::active(vm, observed).map(AsRef::as_ref);
        let names: BTreeSet<String> = claims::possible_names(vm).collect();
        let own = observed.objects.iter().filter(|object| object.key.is_claim() && names.contains(&object.key.name));
        let own = own.map(|claim| Object::clone(claim)).collect();
        let facts = Facts::of_manager(vm, &draft.status, pod, own, observed.now);
        let Some(Look { is_due, next: look }) = facts.look() else {
            return Explained { wanted: draft.status, look: None };
        };
        if !is_due {
            return Explained { wanted: draft.status, look };
        }
        let has_maker = observed.objects.iter().any(|object| is_workload(&object.key));
        let wanted = match self.surroundings.add(facts, has_maker).await.map(|facts| facts.cause()) {
            Ok(Some(found)) => {
                let cause = LookedUp { message: found.line(), what_to_do: found.what_to_do };
                draft.explained(vm, cause, observed.now)
            }
            Ok(None) => draft.status,
            Err(Unread) => draft.as_it_was(vm),
        };
        Explained { wanted, look }
    }

    /// When the status has everything that runners have reported: takes away what a runner has left in the status that reported there before,
    /// and deletes the reports of Pods that are gone.
    async fn take_over(&self, stored: &VirtualMachine, observed: &Observed) -> Result<(), ReconcileError> {
        if has_fields_of_runner(stored) && reports::is_of_pod(stored, observed) {
            let written = self.cluster.release_runners_fields(stored).await.map_err(ReconcileError::Status)?;
            if let Some(mut written) = written {
                trim(&mut written);
                self.written.insert(Arc::new(written));
            }
        }
        Ok(self.cluster.keep_reports(stored, reports::left(stored, observed)).await?)
    }

    /// Sets `spec.vm.state` to Stopped if the plan says so. This is called only if the status was not written in the same reconcile, because
    /// the write requires the version of the VM for which the plan was made.
    async fn write_stopped(&self, vm: &VirtualMachine, plan: &Plan) -> Result<(), ReconcileError> {
        if plan.power.write_stopped
            && vm.metadata.deletion_timestamp.is_none()
            && let Some(halted) = &plan.power.halted
            && self.cluster.write_stopped(vm, halted).await.map_err(ReconcileError::Spec)?
        {
            self.record(vm, vec![events::stopped()]);
        }
        Ok(())
    }

    /// Remembers whether the status names the VM's claims. Returns whether it has turned out now that it can't.
    fn note_claims(&self, turn: &Turn, written: &Result<StatusWrite, ReconcileError>) -> bool {
        let mut unnamed = lock(&self.unnamed);
        match written {
            Ok(StatusWrite::Unneeded | StatusWrite::Written { has_claims: true }) => {
                unnamed.remove(&turn.name);
                false
            }
            Ok(StatusWrite::Written { has_claims: false } | StatusWrite::Refused) | Err(_) => {
                unnamed.insert(turn.name.clone())
            }
            Ok(StatusWrite::Overtaken) => false,
        }
    }

    async fn write_status(&self, turn: &Turn, wanted: &VirtualMachineStatus) -> Result<StatusWrite, ReconcileError> {
        let vm = &*turn.stored;
        match self.cluster.write_status(vm, wanted).await {
            Ok(StatusWritten { vm: mut written, refused }) => {
                if let Some(message) = refused {
                    self.record(vm, vec![events::status_refused(&message)]);
                    if written.metadata.resource_version == vm.metadata.resource_version {
                        return Ok(StatusWrite::Refused);
                    }
                }
                debug!("wrote the status");
                self.cluster.children.metrics.wrote("status", "VirtualMachine");
                let has_claims = wanted.claims.iter().all(|claim| claims::is_named(&written, claim));
                trim(&mut written);
                self.written.insert(Arc::new(written));
                Ok(StatusWrite::Written { has_claims })
            }
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(StatusWrite::Overtaken),
            Err(error) => {
                // What is said by a server that is busy or ends is no refusal.
                if let kube::Error::Api(answer) = &error
                    && !matches!(answer.code, 429 | 502..=504)
                {
                    self.record(vm, vec![events::status_refused(&answer.message)]);
                }
                Err(ReconcileError::Status(error))
            }
        }
    }

    fn record(&self, vm: &VirtualMachine, events: Vec<Event>) {
        let regarding = ObjectReference { resource_version: None, ..vm.object_ref(&()) };
        for event in events {
            self.recorder.record(event, regarding.clone());
        }
    }
}

/// The failure that the status reports, if a person must know of it.
fn failure(action: Option<&ActionError>, unwatched: Option<&WatchError>, failures_before: u32) -> Option<Problem> {
    let of_action = |error: &ActionError| (error.persistence(), error.reason(), ErrorChain(error).to_string());
    let of_watch = |error: &WatchError| {
        let persistence = if error.has_worked { Persistence::Lasting } else { Persistence::Transient };
        (persistence, Reason::WatchFailed, ErrorChain(error).to_string())
    };
    let failures = action.map(of_action).into_iter().chain(unwatched.map(of_watch));
    let mut reported = failures.filter(|(persistence, ..)| schedule::is_reported(*persistence, failures_before));
    reported.next().map(|(_, reason, message)| Problem::new(reason, message))
}
