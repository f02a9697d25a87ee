//! The driver: one reconcile of one VM, in five steps. It decides nothing.
//!
//! | step | what it does | asks the cluster |
//! |---|---|---|
//! | observe | the VM as it was last written or watched, its objects, and what the templates make of both | waits for watches that it starts |
//! | plan | what is to be done: [`crate::plan`] | no |
//! | execute | does it | writes |
//! | report | events and the VM's status: [`crate::status`] | writes |
//! | schedule | when the VM is reconciled again: [`crate::schedule`] | no |
//!
//! A step that fails does not take away the later ones: what can be done and said is.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Arc, Mutex},
};

use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use kube::{
    Resource,
    runtime::{
        controller::Action,
        events::{Event as ClusterEvent, EventType},
        reflector::ObjectRef,
    },
};
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::{
    api::{Reason, VirtualMachine, VirtualMachineStatus, reasons::Effect, status::Retry},
    cluster::{
        ActionError, Cluster, Executed, api_label,
        events::EventRecorder,
        packed::PackedVm,
        watch::{UnknownKind, WatchError},
    },
    config::ReconcilerConfig,
    manager::{debug::DebugRecords, templates::InForce, written::Written},
    object::{Rendered, pods},
    observed::Observed,
    ownership::{status_differs, trim},
    plan::{self, Plan, kinds, plan},
    process::{ErrorChain, lock},
    render::{Facts, TemplateError, render},
    schedule,
    status::{
        Failure, Outcome, Reconciled, Source,
        events::{self, Event, events},
        status,
    },
};

/// Why a VM could not be brought to where it should be; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// A write failed.
    #[error(transparent)]
    Action(#[from] ActionError),
    /// A kind of object can't be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// `spec.vm.state` could not be written.
    #[error("write spec.vm.state")]
    Spec(#[source] kube::Error),
    /// The status could not be written.
    #[error("write the status")]
    Status(#[source] kube::Error),
}

impl ReconcileError {
    /// What the metric `vm_operator_reconcile_errors` calls the error: the API server's reason where there is one.
    pub fn label(&self) -> Cow<'static, str> {
        match self {
            Self::Action(error) => error.label(),
            Self::Watch(_) => "Watch".into(),
            Self::Spec(source) | Self::Status(source) => api_label(source),
        }
    }
}

/// The configuration and the templates of one reconcile.
struct Inputs {
    config: Arc<ReconcilerConfig>,
    templates: Arc<InForce>,
}

/// What the reconciles of all VMs share.
pub struct Reconciler {
    cluster: Cluster,
    config: watch::Receiver<Arc<ReconcilerConfig>>,
    templates: watch::Receiver<Arc<InForce>>,
    recorder: Arc<EventRecorder>,
    debug: DebugRecords,
    /// VMs as the last writes of their status left them.
    pub written: Written,
    /// The VMs whose last reconcile failed.
    failing: Mutex<HashMap<ObjectRef<PackedVm>, Failing>>,
}

/// What is remembered of a VM while its reconciles fail.
#[derive(Clone, Debug, Default)]
struct Failing {
    /// Failures in a row.
    count: u32,
    /// The `status.retry` that could not be written.
    retry: Option<Retry>,
}

/// What the step *observe* finds.
struct View {
    observed: Observed,
    rendered: Result<Vec<Rendered>, TemplateError>,
    /// A kind that is rendered and can't be watched.
    unwatched: Option<WatchError>,
    /// Kinds that the VM's status names and of which the objects are not known.
    unknown: Vec<UnknownKind>,
}

impl View {
    /// What is planned for: nothing while a kind is unknown, except the VM's power.
    fn to_plan(&self) -> Option<&[Rendered]> {
        self.rendered.as_deref().ok().filter(|_| self.unwatched.is_none())
    }
}

impl Reconciler {
    /// Everything is done through `cluster`.
    pub fn new(
        cluster: Cluster,
        config: watch::Receiver<Arc<ReconcilerConfig>>,
        templates: watch::Receiver<Arc<InForce>>,
        recorder: Arc<EventRecorder>,
        debug: DebugRecords,
    ) -> Self {
        Self { cluster, config, templates, recorder, debug, written: Written::default(), failing: Mutex::default() }
    }

    /// Brings a VM to where its spec wants it. What is known of the VM is taken when this is called, not when the future is first
    /// polled.
    ///
    /// # Errors
    /// [`ReconcileError`]; everything that could be done and reported was.
    pub fn reconcile(
        packed: Arc<PackedVm>,
        this: Arc<Self>,
    ) -> impl Future<Output = Result<Action, ReconcileError>> + Send {
        let newest = this.written.newer(&packed).or_else(|| packed.read().ok().map(Arc::new));
        async move {
            // The watch has reported that it can't be read.
            let Some(vm) = newest else { return Ok(Action::await_change()) };
            this.run(vm, ObjectRef::from_obj(&*packed)).await
        }
    }

    async fn run(&self, mut vm: Arc<VirtualMachine>, name: ObjectRef<PackedVm>) -> Result<Action, ReconcileError> {
        let failing = lock(&self.failing).get(&name).cloned().unwrap_or_default();
        if failing.retry.is_some() {
            Arc::make_mut(&mut vm).status.get_or_insert_default().retry = failing.retry;
        }
        let inputs = Inputs { config: self.config.borrow().clone(), templates: self.templates.borrow().clone() };

        // 1. Observe. Waits until the kinds that are needed are known.
        let mut view = self.observe(&vm, &inputs).await?;

        // 2. Plan. Pure.
        let plan = plan(&vm, &view.observed, view.to_plan());
        self.count(view.rendered.as_deref().ok(), &plan);
        self.debug.planned(&vm, view.rendered.as_deref(), &plan);

        // 3. Execute. Writes objects.
        let Executed { done, refusals, result } = self.cluster.execute(&vm, &plan).await;
        let outcome = Outcome {
            failure: failure(result.as_ref().err(), view.unwatched.as_ref(), failing.count),
            refusals,
            unknown_kinds: view.unknown.iter().map(|unknown| unknown.kind.clone()).collect(),
        };

        // 4. Report. Derives events and the status, then writes them.
        if plan.steps.iter().any(|step| !step.is_empty()) {
            view.observed = self.cluster.children.observe(&vm, Timestamp::now());
        }
        let reconciled = Reconciled {
            vm: &vm,
            observed: &view.observed,
            plan: &plan,
            rendered: view.rendered.as_deref(),
            outcome: &outcome,
            source: inputs.source(&vm),
        };
        let written = self.report(&reconciled, &done).await;
        self.remember_retry(&name, failing.count, plan.retry.clone().filter(|_| written.is_err()));
        if !written? {
            self.stop(&vm, &plan).await?;
        }

        // 5. Schedule. Pure, but for what is remembered of failures.
        debug!("reconciled");
        result?;
        if let Some(error) = view.unwatched {
            return Err(error.into());
        }
        lock(&self.failing).remove(&name);
        let is_listing = view.unknown.iter().any(|unknown| unknown.is_listed);
        let next = schedule::next(plan.again_after, is_listing);
        self.debug.succeeded(&vm, next);
        Ok(next.map_or_else(Action::await_change, Action::requeue))
    }

    /// The VM's objects and what the templates make of it. A kind that is rendered for the first time is listed and watched from here
    /// on, and the view is taken again when it is complete.
    async fn observe(&self, vm: &VirtualMachine, inputs: &Inputs) -> Result<View, ReconcileError> {
        let children = &self.cluster.children;
        let complete = children.complete();
        let observed = children.observe(vm, Timestamp::now());
        let rendered = inputs.render(vm, &observed);
        let Ok(objects) = &rendered else {
            let unknown = kinds::from_status(vm, &[]).into_iter().map(UnknownKind::from).collect();
            return Ok(View { observed, rendered, unwatched: None, unknown });
        };
        let unwatched = children.watch(kinds::needed(objects)).await.err();
        if let Some(error) = unwatched.as_ref().filter(|_| !children.knows(&pods())) {
            return Err(error.clone().into());
        }
        let unknown = self.look_for_leftovers(vm, objects, inputs).await;
        // Also if a kind became complete by itself since: what its list brought last was not observed.
        if children.complete() == complete {
            return Ok(View { observed, rendered, unwatched, unknown });
        }
        let observed = children.observe(vm, Timestamp::now());
        Ok(View { rendered: inputs.render(vm, &observed), observed, unwatched, unknown })
    }

    /// Looks for objects that earlier templates made of a VM. Only a VM without a Pod waits for them, because what is left may make
    /// one. Returns the kinds of which nothing is known.
    async fn look_for_leftovers(&self, vm: &VirtualMachine, objects: &[Rendered], inputs: &Inputs) -> Vec<UnknownKind> {
        let kinds = kinds::from_status(vm, objects);
        if kinds.is_empty() {
            return Vec::new();
        }
        let children = &self.cluster.children;
        let allowed = &inputs.config.allowed_kinds;
        let (allowed, refused): (Vec<_>, Vec<_>) =
            kinds.into_iter().partition(|kind| allowed.allow(&kind.api_version, &kind.kind));
        let has_pod = plan::pod(vm, &children.observe(vm, Timestamp::now())).is_some();
        let unknown = children.look_for(allowed, !has_pod).await;
        unknown.into_iter().chain(refused.into_iter().map(UnknownKind::from)).collect()
    }

    /// Records the events and writes the status if it differs. Returns whether the status was written.
    async fn report(&self, reconciled: &Reconciled<'_>, done: &[&plan::Action]) -> Result<bool, ReconcileError> {
        let vm = reconciled.vm;
        let wanted = status(reconciled);
        // Before the status is written: what is in there already is not new any more.
        self.record(vm, events(reconciled, &wanted, done));
        if vm.metadata.deletion_timestamp.is_some() || !status_differs(vm, &wanted) {
            return Ok(false);
        }
        self.write_status(vm, &wanted).await
    }

    /// Sets `spec.vm.state` to Stopped if the plan says so. Only when the status was not written in the same reconcile: the write names
    /// the version of the VM that the plan was made for.
    async fn stop(&self, vm: &VirtualMachine, plan: &Plan) -> Result<(), ReconcileError> {
        if plan.power.write_stopped
            && let Some(halted) = &plan.power.halted
            && self.cluster.write_stopped(vm, halted).await.map_err(ReconcileError::Spec)?
        {
            self.record(vm, vec![events::stopped()]);
        }
        Ok(())
    }

    fn remember_retry(&self, name: &ObjectRef<PackedVm>, failures: u32, unwritten: Option<Retry>) {
        if unwritten.is_some() || failures > 0 {
            lock(&self.failing).entry(name.clone()).or_default().retry = unwritten;
        }
    }

    /// Counts what the plan does not write.
    fn count(&self, rendered: Option<&[Rendered]>, plan: &Plan) {
        let metrics = &self.cluster.children.metrics;
        let Some(rendered) = rendered else { return metrics.template_failed() };
        for object in rendered.iter().filter(|object| !plan.writes(&object.key)) {
            metrics.skipped(&object.key.kind);
        }
    }

    /// Schedules the next try after a failure.
    pub fn retry(vm: Arc<PackedVm>, error: &ReconcileError, this: Arc<Self>) -> Action {
        let mut failing = lock(&this.failing);
        let count = &mut failing.entry(ObjectRef::from_obj(&*vm)).or_default().count;
        let pause = schedule::back_off(*count);
        *count += 1;
        warn!(error = %ErrorChain(error), tries = *count, again_in = ?pause, "not done yet");
        this.debug.failed(vm.full_name(), &error.label(), *count, pause);
        Action::requeue(pause)
    }

    /// Drops what was remembered of a VM that is gone.
    pub fn forget(&self, name: &str, namespace: &str) {
        let vm = ObjectRef::new(name).within(namespace);
        self.debug.forget(name, namespace);
        self.written.forget(&vm);
        lock(&self.failing).remove(&vm);
    }

    /// Returns whether it was written. It is not if the VM was deleted or changed meanwhile, which the watch reports.
    async fn write_status(&self, vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> Result<bool, ReconcileError> {
        match self.cluster.write_status(vm, wanted).await {
            Ok(mut written) => {
                debug!("wrote the status");
                self.cluster.children.metrics.wrote("status", "VirtualMachine");
                trim(&mut written);
                self.written.insert(Arc::new(written));
                Ok(true)
            }
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(false),
            Err(error) => Err(ReconcileError::Status(error)),
        }
    }

    fn record(&self, vm: &VirtualMachine, events: Vec<Event>) {
        let regarding = ObjectReference { resource_version: None, ..vm.object_ref(&()) };
        for Event { reason, note, action } in events {
            let is_warning = reason.effect() == Effect::Warning;
            let event = ClusterEvent {
                type_: if is_warning { EventType::Warning } else { EventType::Normal },
                reason: reason.as_str().into(),
                note: Some(note),
                action: action.to_owned(),
                secondary: None,
            };
            self.recorder.record(event, regarding.clone());
        }
    }
}

/// The failure that the status reports, if it is one that a person must know of.
fn failure(action: Option<&ActionError>, unwatched: Option<&WatchError>, failures_before: u32) -> Option<Failure> {
    let of_action = |error: &ActionError| (error.persistence(), error.reason(), ErrorChain(error).to_string());
    let of_watch =
        |error: &WatchError| (schedule::Persistence::Transient, Reason::WatchFailed, ErrorChain(error).to_string());
    let failures = action.map(of_action).into_iter().chain(unwatched.map(of_watch));
    let mut reported = failures.filter(|(persistence, ..)| schedule::is_reported(*persistence, failures_before));
    reported.next().map(|(_, reason, message)| Failure { reason, message })
}

impl Inputs {
    fn render(&self, vm: &VirtualMachine, observed: &Observed) -> Result<Vec<Rendered>, TemplateError> {
        let facts = Facts { display_password: random() };
        render(vm, observed, &self.config, &facts, self.templates.of(vm)?)
    }

    fn source(&self, vm: &VirtualMachine) -> Source<'_> {
        Source { set: self.templates.of(vm).ok(), refused: self.templates.refusal(vm) }
    }
}

/// 128 random bits as text, or nothing where the operating system has none: then no password can be made of them.
pub(super) fn random() -> String {
    let mut bits = [0; 16];
    match getrandom::fill(&mut bits) {
        Ok(()) => bits.iter().map(|byte| format!("{byte:02x}")).collect(),
        Err(error) => {
            warn!(%error, "the operating system has no randomness");
            String::new()
        }
    }
}
