//! The driver: one reconcile of one VM, in five steps. It makes no decisions.
//!
//! | step | what it does | asks the cluster |
//! |---|---|---|
//! | observe | reads the newest known VM and its objects, and renders the templates | waits for watches that it starts |
//! | plan | decides what to do: [`crate::plan`] | no |
//! | execute | creates, changes and deletes objects | writes |
//! | report | looks why a VM does not start ([`crate::explain`]), records events and writes the VM's status: [`crate::status`] | reads, writes |
//! | schedule | decides when the VM is reconciled again: [`crate::schedule`] | no |
//!
//! If a step fails, the later steps still do what they can.

use std::{
    borrow::Cow,
    collections::{BTreeSet, HashMap},
    io,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use kube::{Resource, runtime::reflector::ObjectRef};
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::{
    api::{
        Reason, VirtualMachine, VirtualMachineStatus,
        conditions::{self, READY, STALLED},
        login_pools::LoginPools,
        reasons::Event,
        status::Retry,
    },
    claims,
    cluster::{
        ActionError, Cluster, Executed, StatusWritten, api_label,
        packed::PackedVm,
        watch::{UnknownKind, WatchError},
    },
    config::ReconcilerConfig,
    events::EventRecorder,
    explain::{Facts, surroundings::Look},
    manager::{
        agents::Agents,
        debug::DebugRecords,
        random::random_input,
        renderer::{Input, Renderer},
        surroundings::{Surroundings, Unread},
        templates::InForce,
        unrest::Unrest,
        written::Written,
    },
    object::{Rendered, is_workload, pods, reports as report_kind},
    observed::{NodeState, Object, Observed},
    ownership::{has_fields_of_runner, status_differs, trim},
    plan::{self, Plan, guests, kinds, plan},
    process::{ErrorChain, lock},
    render::{TemplateError, TemplateSet},
    schedule::{self, Persistence},
    status::{
        Outcome, Problem, Reconciled, Source,
        events::{self, events},
        reports, status,
    },
};

/// The pause before a VM is reconciled again whose claims the watch has not reported yet.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Why a reconcile failed. It is tried again.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// A write failed.
    #[error(transparent)]
    Action(#[from] ActionError),
    /// A kind of objects can't be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The process that renders templates can't be started.
    #[error("start the process that renders templates")]
    Render(#[source] io::Error),
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
            Self::Render(_) => "Render".into(),
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
    pools: watch::Receiver<Arc<LoginPools>>,
    recorder: Arc<EventRecorder>,
    debug: DebugRecords,
    renderer: Arc<Renderer>,
    agents: Agents,
    unrest: Unrest,
    surroundings: Surroundings,
    /// The VMs as the last writes of their status returned them.
    pub written: Written,
    /// The VMs whose last reconcile failed.
    failing: Mutex<HashMap<ObjectRef<PackedVm>, Failing>>,
}

/// What the reconciler remembers of a VM while its reconciles fail.
#[derive(Clone, Debug, Default)]
struct Failing {
    /// The number of failures in a row.
    count: u32,
    /// The `status.retry` that could not be written.
    retry: Option<Retry>,
}

/// The result of the step *observe*.
struct View {
    /// The VM with what its runner has reported in its status. Everything is decided by it; what is written is compared with the VM itself.
    vm: Arc<VirtualMachine>,
    observed: Observed,
    rendered: Result<Vec<Rendered>, TemplateError>,
    /// Why the VM keeps a former version of its templates.
    kept_back: Option<TemplateError>,
    /// A rendered kind that can't be watched.
    unwatched: Option<WatchError>,
    /// The kinds in `status.objectKinds` that are not watched.
    unknown: Vec<UnknownKind>,
}

/// The status of a VM with the cause why it is not as its spec wants it.
struct Explained {
    wanted: VirtualMachineStatus,
    /// After how long to look again, if nothing changes.
    look: Option<Duration>,
}

/// A rendered VM.
struct Rendering {
    rendered: Result<Vec<Rendered>, TemplateError>,
    kept_back: Option<TemplateError>,
}

impl View {
    /// The objects to plan with; `None` while a rendered kind is not watched. The plan then follows only the VM's power.
    fn plannable(&self) -> Option<&[Rendered]> {
        self.rendered.as_deref().ok().filter(|_| self.unwatched.is_none())
    }
}

/// What is read anew for each reconcile.
pub struct Followed {
    /// The configuration.
    pub config: watch::Receiver<Arc<ReconcilerConfig>>,
    /// The template sets in force.
    pub templates: watch::Receiver<Arc<InForce>>,
    /// The pools that log users in.
    pub pools: watch::Receiver<Arc<LoginPools>>,
}

impl Reconciler {
    /// A reconciler that reads and writes through `cluster`.
    pub fn new(
        cluster: Cluster,
        followed: Followed,
        recorder: Arc<EventRecorder>,
        debug: DebugRecords,
        renderer: Arc<Renderer>,
        agents: Agents,
    ) -> Self {
        let Followed { config, templates, pools } = followed;
        Self {
            surroundings: Surroundings::new(cluster.clone()),
            cluster,
            config,
            templates,
            pools,
            recorder,
            debug,
            renderer,
            agents,
            unrest: Unrest::default(),
            written: Written::default(),
            failing: Mutex::default(),
        }
    }

    /// Makes a VM as its spec wants it, and returns after how long it is to be reconciled again. The newest known VM is read when this function is called, not when its future is first polled.
    ///
    /// # Errors
    /// [`ReconcileError`]. Nevertheless everything that could be done and reported was.
    pub fn reconcile(
        packed: Arc<PackedVm>,
        this: Arc<Self>,
    ) -> impl Future<Output = Result<Option<Duration>, ReconcileError>> + Send {
        let newest = this.written.newer(&packed).or_else(|| packed.read().ok().map(Arc::new));
        async move {
            // The watch has already reported a VM that can't be read.
            let Some(vm) = newest else { return Ok(None) };
            this.run(vm, &packed).await
        }
    }

    async fn run(&self, mut vm: Arc<VirtualMachine>, packed: &PackedVm) -> Result<Option<Duration>, ReconcileError> {
        let name = ObjectRef::from_obj(packed);
        let failing = lock(&self.failing).get(&name).cloned().unwrap_or_default();
        if failing.retry.is_some() {
            Arc::make_mut(&mut vm).status.get_or_insert_default().retry = failing.retry;
        }
        self.pools.borrow().log_in(&mut vm);
        if let Some(pause) = self.unrest.pause(&name, &vm, Instant::now()) {
            debug!(?pause, "the VM is written again and again: it waits");
            return Ok(Some(pause));
        }
        let inputs = Inputs { config: self.config.borrow().clone(), templates: self.templates.borrow().clone() };

        // 1. Observe. Waits until the kinds that are needed are listed.
        let mut view = self.observe(&vm, &inputs).await?;
        let stored = std::mem::replace(&mut vm, view.vm.clone());

        // 2. Plan. Pure.
        let plan = plan(&vm, &view.observed, view.plannable());
        let plan = self.paced(&vm, &name, &view.observed, plan);
        let (plan, refused) = self.kept_up(&vm, plan, view.plannable().unwrap_or_default(), &inputs.config).await;
        self.count_skipped(view.rendered.as_deref().ok(), &plan);
        self.debug.planned(&vm, view.rendered.as_deref(), &plan);
        if !self.still_holds(&vm, &view.observed, &plan).await? {
            // The watch that is behind reports soon what has changed.
            return Ok(None);
        }
        if plan.makes_claims()
            && let Some(claim) = self.cluster.unseen_claim(&vm, &view.observed, packed.arrived).await?
        {
            debug!(claim, "the claim exists, but the watch has not reported it yet: no other is made");
            return Ok(Some(LOOK_AGAIN));
        }

        // 3. Execute. Writes objects.
        let Executed { done, refusals, mut beside, result } = match self.check_start(&vm, &plan, &inputs.config).await {
            Ok(()) => self.cluster.execute(&vm, &plan).await,
            Err(error) => Executed { done: Vec::new(), refusals: Vec::new(), beside: Vec::new(), result: Err(error) },
        };
        let result = result.and(refused.map_or(Ok(()), Err));
        if plan.steps.iter().any(|step| !step.is_empty()) {
            let observed = self.cluster.children.observe(&vm, Timestamp::now());
            view.observed = self.with_others(&vm, observed, view.rendered.as_deref().ok()).await;
        }
        let has_reports = self.cluster.children.knows(&report_kind());
        if has_reports {
            let upkeep = reports::upkeep(&vm, &view.observed, &plan);
            beside.extend(self.cluster.keep_reports(&vm, upkeep).await.err());
        }
        let outcome = Outcome {
            failure: failure(result.as_ref().err(), view.unwatched.as_ref(), failing.count),
            beside: beside.iter().filter_map(|error| failure(Some(error), None, failing.count)).collect(),
            refusals,
            unknown_kinds: view.unknown.iter().map(|unknown| unknown.kind.clone()).collect(),
            node: match plan.overdue_on(&view.observed) {
                Some(node) => self.cluster.node_state(node).await,
                None => NodeState::default(),
            },
            cause: None,
            unrest: None,
        };
        let unrest = self.unrest.problem(&name, Instant::now());
        let outcome = Outcome { unrest: unrest.as_ref().map(|(problem, _)| problem.clone()), ..outcome };

        // 4. Report. Derives events and the status, then writes them.
        let reconciled = Reconciled {
            vm: &vm,
            observed: &view.observed,
            plan: &plan,
            rendered: view.rendered.as_deref(),
            outcome: &outcome,
            source: inputs.source(&vm, view.kept_back.as_ref()),
        };
        let Explained { wanted, look } = self.explain(&reconciled, status(&reconciled)).await;
        let written = self.report(&reconciled, &stored, &wanted, &done).await;
        self.remember_retry(&name, failing.count, plan.retry.clone().filter(|_| written.is_err()));
        if (!done.is_empty() || matches!(written, Ok(true))) && self.unrest.wrote(&name, &vm, Instant::now()) {
            let last: Vec<String> = done.iter().map(|action| action.key().to_string()).collect();
            warn!(objects = last.join(", "), status = matches!(written, Ok(true)), "the VM is written again and again");
        }
        if !written? {
            self.write_stopped(&vm, &plan).await?;
        }
        // A report is left only if its Pod is known not to exist.
        if has_reports && self.cluster.children.knows(&pods()) && !status_differs(&stored, &wanted) {
            self.take_over(&stored, &view.observed).await?;
        }

        // 5. Schedule. Pure, except that it forgets earlier failures.
        debug!("reconciled");
        result?;
        if let Some(error) = view.unwatched {
            return Err(error.into());
        }
        if let Some(error) = beside.into_iter().next() {
            return Err(error.into());
        }
        lock(&self.failing).remove(&name);
        let is_listing = view.unknown.iter().any(|unknown| unknown.is_listed);
        let next = {
            let at_rest = unrest.map(|(_, again)| again);
            schedule::requeue_after(plan.requeue_after.into_iter().chain(look).chain(at_rest).min(), is_listing)
        };
        self.debug.succeeded(&vm, next);
        Ok(next)
    }

    /// Reads the VM's objects and renders its templates. A kind that is rendered for the first time is listed and watched from now on; when
    /// it is listed, the objects are read again.
    async fn observe(&self, stored: &Arc<VirtualMachine>, inputs: &Inputs) -> Result<View, ReconcileError> {
        let children = &self.cluster.children;
        // Without them the manager would take the status for all that a runner has reported.
        children.look_for(vec![report_kind()], true).await;
        let complete = children.complete();
        let observed = children.observe(stored, Timestamp::now());
        let vm = folded(stored, &observed);
        let Rendering { rendered, kept_back } = inputs.render(&self.renderer, &vm, &observed).await?;
        let Ok(objects) = &rendered else {
            let unknown = kinds::from_status(&vm, &[]).into_iter().map(UnknownKind::from).collect();
            let observed = self.with_others(&vm, observed, None).await;
            return Ok(View { vm, observed, rendered, kept_back, unwatched: None, unknown });
        };
        let unwatched = children.watch(kinds::needed(objects)).await.err();
        if let Some(error) = unwatched.as_ref().filter(|_| !children.knows(&pods())) {
            return Err(error.clone().into());
        }
        let unknown = self.watch_former_kinds(&vm, objects, inputs).await;
        // This is also the case if another reconcile's list has completed meanwhile: its last objects were not read.
        if children.complete() == complete {
            let observed = self.with_others(&vm, observed, Some(objects)).await;
            return Ok(View { vm, observed, rendered, kept_back, unwatched, unknown });
        }
        let observed = children.observe(stored, Timestamp::now());
        let vm = folded(stored, &observed);
        let Rendering { rendered, kept_back } = inputs.render(&self.renderer, &vm, &observed).await?;
        let observed = self.with_others(&vm, observed, rendered.as_deref().ok()).await;
        Ok(View { vm, rendered, kept_back, observed, unwatched, unknown })
    }

    /// Adds the Pods of others that mount the VM's claims, and what makes the VM's Pods. Only a Pod that was made by something that is not
    /// watched costs requests.
    async fn with_others(&self, vm: &VirtualMachine, observed: Observed, rendered: Option<&[Rendered]>) -> Observed {
        let pod_names = rendered.map(|rendered| {
            let pods = rendered.iter().filter(|object| object.key.is_pod());
            pods.map(|pod| pod.key.name.clone()).collect()
        });
        let rendered = rendered.unwrap_or_default();
        let of_vm = observed.objects.iter().map(|object| &object.key).chain(rendered.iter().map(|object| &object.key));
        let claims = of_vm.filter(|key| key.is_claim()).map(|key| key.name.clone()).collect::<BTreeSet<_>>();
        let mut others = self.cluster.children.mounting(vm, claims.into_iter());
        others.retain(|other| observed.objects.iter().all(|known| known.uid != other.uid));
        let makers = self.cluster.makers(vm, &observed).await;
        Observed { others, makers, pod_names, ..observed }
    }

    /// Watches the kinds of which earlier templates may have left objects. Only a VM without a Pod waits for their lists, because such an
    /// object may be a controller that creates a Pod. Returns the kinds that are not watched.
    async fn watch_former_kinds(&self, vm: &VirtualMachine, objects: &[Rendered], inputs: &Inputs) -> Vec<UnknownKind> {
        let kinds = kinds::from_status(vm, objects);
        if kinds.is_empty() {
            return Vec::new();
        }
        let children = &self.cluster.children;
        let allowed = &inputs.config.allowed_kinds;
        let (allowed, refused): (Vec<_>, Vec<_>) =
            kinds.into_iter().partition(|kind| allowed.allow(&kind.api_version, &kind.kind));
        let has_pod = guests::pod(vm, &children.observe(vm, Timestamp::now())).is_some();
        let unknown = children.look_for(allowed, !has_pod).await;
        unknown.into_iter().chain(refused.into_iter().map(UnknownKind::from)).collect()
    }

    /// Asks the API server whether what starts a VM, or takes away what keeps its disks, is decided by what is true: the watches may be
    /// behind, each by itself. The VM may be deleted or stopped, or its guest may have shut down. While the manager has written nothing about
    /// a VM yet, there is nothing to ask.
    async fn still_holds(&self, vm: &VirtualMachine, observed: &Observed, plan: &Plan) -> Result<bool, ActionError> {
        // The definition gives a new VM a status with -1.
        let generation = vm.status.as_ref().and_then(|status| status.observed_generation);
        let is_known = vm.status.is_some() && generation.is_none_or(|generation| generation >= 0);
        let starts_again = plan.starts() && is_known;
        let asks = plan.adopts || starts_again || plan.unwanted_pods().next().is_some();
        if asks && !self.cluster.is_current(vm).await? {
            debug!(
                "the API server has another version of the VM, or none: it adopts nothing, is not started, and the Pod is kept"
            );
            return Ok(false);
        }
        if asks && !self.cluster.are_reports_current(vm, observed).await? {
            debug!(
                "a runner has reported what the manager has not seen yet: the VM is not started, and the Pod is kept"
            );
            return Ok(false);
        }
        for uid in plan.unwanted_pods() {
            let pod = observed.objects.iter().chain(&observed.others).find(|object| object.uid == uid);
            if let Some(pod) = pod
                && self.cluster.kept_claim(vm, pod, |_| true).await?.is_some()
            {
                debug!("a claim is being deleted that would go with its Pod: the Pod is kept");
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Checks what a plan that starts the VM needs and that is not in the cache.
    async fn check_start(
        &self,
        vm: &VirtualMachine,
        plan: &Plan,
        config: &ReconcilerConfig,
    ) -> Result<(), ActionError> {
        if plan.starts() { self.cluster.check_sources(vm, &config.cloud_init_label).await } else { Ok(()) }
    }

    /// The plan without the restart of a guest that would not come back, and why it would not, where the plan does not say it.
    async fn kept_up(
        &self,
        vm: &VirtualMachine,
        mut plan: Plan,
        rendered: &[Rendered],
        config: &ReconcilerConfig,
    ) -> (Plan, Option<ActionError>) {
        if plan.restarted().next().is_none() {
            return (plan, None);
        }
        if plan.would_stay_down(rendered) {
            plan.keep_up();
            return (plan, None);
        }
        let checked = match self.cluster.check_sources(vm, &config.cloud_init_label).await {
            Ok(()) => self.cluster.check_restart(vm, rendered).await,
            Err(ActionError::MountMissing { object, lacking, is_restart: _ }) => {
                Err(ActionError::MountMissing { object, lacking, is_restart: true })
            }
            refused => refused,
        };
        if checked.is_err() {
            plan.keep_up();
        }
        (plan, checked.err())
    }

    /// The plan without a new image for the VM's agent, if its turn has not come.
    fn paced(&self, vm: &VirtualMachine, name: &ObjectRef<PackedVm>, observed: &Observed, mut plan: Plan) -> Plan {
        let pod = || guests::pod(vm, observed).map(AsRef::as_ref);
        self.agents.observe(name, pod);
        let may_begin = || pod().is_some_and(|pod| self.agents.may_begin(name, pod));
        let is_image = |action: &plan::Action| matches!(action, plan::Action::Image { .. });
        if plan.steps.iter().flatten().any(is_image) && !may_begin() {
            plan.steps.iter_mut().for_each(|step| step.retain(|action| !is_image(action)));
        }
        plan
    }

    /// Looks for the cause if the VM is not as its spec wants it, and adds it to the status.
    async fn explain(&self, reconciled: &Reconciled<'_>, wanted: VirtualMachineStatus) -> Explained {
        let Reconciled { vm, observed, outcome, .. } = *reconciled;
        if conditions::is_true(&wanted.conditions, READY) && vm.metadata.deletion_timestamp.is_none() {
            return Explained { wanted, look: None };
        }
        let pod = guests::pod(vm, observed).map(AsRef::as_ref);
        let names: BTreeSet<String> = claims::possible_names(vm).collect();
        let own = observed.objects.iter().filter(|object| object.key.is_claim() && names.contains(&object.key.name));
        let own = own.map(|claim| Object::clone(claim)).collect();
        let facts = Facts::of_manager(vm, &wanted, pod, own, observed.now);
        let Some(Look { is_due, next: look }) = facts.look() else { return Explained { wanted, look: None } };
        if !is_due {
            return Explained { wanted, look };
        }
        let has_maker = observed.objects.iter().any(|object| is_workload(&object.key));
        let cause = match self.surroundings.add(facts, has_maker).await {
            Ok(facts) => facts.words(),
            Err(Unread) => return Explained { wanted: as_it_was(vm, wanted), look },
        };
        if cause.is_none() {
            return Explained { wanted, look };
        }
        let outcome = Outcome { cause, ..outcome.clone() };
        Explained { wanted: status(&Reconciled { outcome: &outcome, ..*reconciled }), look }
    }

    /// Records the events and writes the status if it differs. Returns whether the status was written.
    async fn report(
        &self,
        reconciled: &Reconciled<'_>,
        stored: &VirtualMachine,
        wanted: &VirtualMachineStatus,
        done: &[&plan::Action],
    ) -> Result<bool, ReconcileError> {
        // Events are recorded first: after the status is written, they would not be new any more.
        self.record(reconciled.vm, events(reconciled, wanted, done));
        if !status_differs(stored, wanted) {
            return Ok(false);
        }
        self.write_status(stored, wanted).await
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

    fn remember_retry(&self, name: &ObjectRef<PackedVm>, failures: u32, unwritten: Option<Retry>) {
        if unwritten.is_some() || failures > 0 {
            lock(&self.failing).entry(name.clone()).or_default().retry = unwritten;
        }
    }

    /// Counts the rendered objects that the plan does not write.
    fn count_skipped(&self, rendered: Option<&[Rendered]>, plan: &Plan) {
        let metrics = &self.cluster.children.metrics;
        let Some(rendered) = rendered else { return metrics.template_failed() };
        for object in rendered.iter().filter(|object| !plan.writes(&object.key)) {
            metrics.skipped(&object.key.kind);
        }
    }

    /// After how long a VM is reconciled again after a failure.
    pub fn retry(vm: Arc<PackedVm>, error: &ReconcileError, this: Arc<Self>) -> Duration {
        let mut failing = lock(&this.failing);
        let count = &mut failing.entry(ObjectRef::from_obj(&*vm)).or_default().count;
        let pause = schedule::back_off(*count);
        *count += 1;
        warn!(error = %ErrorChain(error), tries = *count, again_in = ?pause, "not done yet");
        this.debug.failed(vm.full_name(), &error.label(), *count, pause);
        pause
    }

    /// Forgets a VM that is gone.
    pub fn forget(&self, name: &str, namespace: &str) {
        let vm = ObjectRef::new(name).within(namespace);
        self.debug.forget(name, namespace);
        self.written.forget(&vm);
        self.agents.forget(&vm);
        self.unrest.forget(&vm);
        lock(&self.failing).remove(&vm);
    }

    /// Writes the status. Returns false if the VM was deleted or changed meanwhile, which the watch reports.
    async fn write_status(&self, vm: &VirtualMachine, wanted: &VirtualMachineStatus) -> Result<bool, ReconcileError> {
        match self.cluster.write_status(vm, wanted).await {
            Ok(StatusWritten { vm: mut written, refused }) => {
                if let Some(message) = refused {
                    self.record(vm, vec![events::status_refused(&message)]);
                    if written.metadata.resource_version == vm.metadata.resource_version {
                        return Ok(false);
                    }
                }
                debug!("wrote the status");
                self.cluster.children.metrics.wrote("status", "VirtualMachine");
                trim(&mut written);
                self.written.insert(Arc::new(written));
                Ok(true)
            }
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(false),
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

/// The VM with what its runner has reported in its status.
fn folded(stored: &Arc<VirtualMachine>, observed: &Observed) -> Arc<VirtualMachine> {
    reports::fold(stored, observed).map_or_else(|| stored.clone(), Arc::new)
}

/// The status with the present messages, where the reasons are the same.
fn as_it_was(vm: &VirtualMachine, mut wanted: VirtualMachineStatus) -> VirtualMachineStatus {
    let present = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    for condition in wanted.conditions.iter_mut().filter(|it| [READY, STALLED].contains(&it.type_.as_str())) {
        let same = conditions::find(present, &condition.type_)
            .filter(|it| (&it.status, &it.reason) == (&condition.status, &condition.reason));
        if let Some(same) = same {
            condition.message.clone_from(&same.message);
        }
    }
    wanted
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
    reported.next().map(|(_, reason, message)| Problem { reason, message })
}

impl Inputs {
    /// Renders a VM. If its values do not match the schema of its templates, it keeps the version from which it was rendered last.
    async fn render(
        &self,
        renderer: &Renderer,
        vm: &VirtualMachine,
        observed: &Observed,
    ) -> Result<Rendering, ReconcileError> {
        let random = random_input(vm, observed, &self.config);
        let input = Input { vm, observed, config: &self.config };
        let with = async |set: &TemplateSet| renderer.render(input, &random, set).await.map_err(ReconcileError::Render);
        let rendered = match self.templates.of(vm) {
            Ok(set) => with(set).await?,
            Err(error) => Err(error),
        };
        if let (Err(error), Some(former)) = (&rendered, self.templates.former(vm))
            && error.of_values
            && let Ok(objects) = with(former).await?
        {
            return Ok(Rendering { rendered: Ok(objects), kept_back: Some(error.clone()) });
        }
        Ok(Rendering { rendered, kept_back: None })
    }

    fn source<'a>(&'a self, vm: &VirtualMachine, kept_back: Option<&'a TemplateError>) -> Source<'a> {
        match kept_back {
            Some(error) => Source { set: self.templates.former(vm), refused: Some(error) },
            None => Source { set: self.templates.of(vm).ok(), refused: self.templates.refusal(vm) },
        }
    }
}
