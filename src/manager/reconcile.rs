//! The driver: one reconcile of one VM, in six steps. It makes no decisions.
//!
//! | step | what it does | asks the cluster |
//! |---|---|---|
//! | observe | reads the newest known VM and its objects, and renders the templates | waits for watches that it starts |
//! | plan | decides what to do, and what that presumes: [`crate::plan`] | no |
//! | check | leaves out what presumes something that is not true | reads |
//! | execute | creates, changes and deletes objects | writes |
//! | report | looks why a VM does not start ([`crate::explain`]), records events and writes the VM's status: [`crate::status`] | reads, writes |
//! | schedule | decides when the VM is reconciled again: [`crate::schedule`] | no |
//!
//! If a step fails, the later steps still do what they can.

mod check;
mod execute;
mod observe;
mod report;

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use kube::runtime::reflector::ObjectRef;
use tokio::{sync::watch, time::Instant};
use tracing::{debug, warn};

use self::{check::Verdict, observe::View};
use crate::{
    api::{VirtualMachine, login_pools::LoginPools, status::Retry},
    client::events::EventRecorder,
    cluster::{ActionError, Cluster, Executed, api_label, packed::PackedVm, watch::WatchError},
    config::ReconcilerConfig,
    manager::{
        agents::Agents, debug::DebugRecords, renderer::Renderer, surroundings::Surroundings, templates::InForce,
        unrest::Unrest, written::Written,
    },
    plan::{Plan, plan},
    process::{ErrorChain, lock},
    schedule,
};

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
    /// The VMs whose last status could not be written, or not with their claims.
    unnamed: Mutex<HashSet<ObjectRef<PackedVm>>>,
}

/// What the reconciler remembers of a VM while its reconciles fail.
#[derive(Clone, Debug, Default)]
struct Failing {
    /// The number of failures in a row.
    count: u32,
    /// The `status.retry` that could not be written.
    retry: Option<Retry>,
}

/// A reconcile of a VM that has begun.
struct Turn {
    name: ObjectRef<PackedVm>,
    /// When the VM was received.
    arrived: Instant,
    /// The VM, with the users of its pool, and with the retry that could not be written.
    stored: Arc<VirtualMachine>,
    /// How many reconciles in a row have failed.
    failures: u32,
    inputs: Inputs,
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
            unnamed: Mutex::default(),
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

    async fn run(&self, vm: Arc<VirtualMachine>, packed: &PackedVm) -> Result<Option<Duration>, ReconcileError> {
        let turn = self.begin(vm, packed);
        if let Some(pause) = self.unrest.pause(&turn.name, &turn.stored, Instant::now()) {
            debug!(?pause, "the VM is written again and again: it waits");
            return Ok(Some(pause));
        }
        // Waits until the kinds that are needed are listed.
        let mut view = self.observe(&turn).await?;
        let mut plan = plan(&view.vm, &view.observed, view.plannable());
        self.count_skipped(&view, &plan);
        let verdict = self.check(&turn, &view, &mut plan).await;
        self.debug.planned(&view.vm, view.rendered.as_deref(), &plan);
        let left_out = match verdict? {
            Verdict::Execute(left_out) => left_out,
            Verdict::Wait(pause) => return Ok(pause),
        };
        let executed = self.execute(&mut view, &plan, left_out).await;
        let again = self.report(&turn, &view, &plan, &executed).await?;
        debug!("reconciled");
        match first_error(executed, &view) {
            Some(error) => Err(error),
            None => Ok(self.schedule(&turn, &view, &plan, again)),
        }
    }

    /// What the reconcile begins with.
    fn begin(&self, mut vm: Arc<VirtualMachine>, packed: &PackedVm) -> Turn {
        let name = ObjectRef::from_obj(packed);
        let Failing { count: failures, retry } = lock(&self.failing).get(&name).cloned().unwrap_or_default();
        if retry.is_some() {
            Arc::make_mut(&mut vm).status.get_or_insert_default().retry = retry;
        }
        self.pools.borrow().log_in(&mut vm);
        let inputs = Inputs { config: self.config.borrow().clone(), templates: self.templates.borrow().clone() };
        Turn { name, arrived: packed.arrived, stored: vm, failures, inputs }
    }

    /// Decides when the VM is reconciled again, and forgets earlier failures. `again`: when something is to be reported anew.
    fn schedule(&self, turn: &Turn, view: &View, plan: &Plan, again: Option<Duration>) -> Option<Duration> {
        lock(&self.failing).remove(&turn.name);
        let is_listing = view.unknown.iter().any(|unknown| unknown.is_listed);
        let next = schedule::requeue_after(plan.requeue_after.into_iter().chain(again).min(), is_listing);
        self.debug.succeeded(&view.vm, next);
        next
    }

    /// Remembers the `status.retry` that could not be written.
    fn remember_retry(&self, turn: &Turn, unwritten: Option<Retry>) {
        if unwritten.is_some() || turn.failures > 0 {
            lock(&self.failing).entry(turn.name.clone()).or_default().retry = unwritten;
        }
    }

    /// Counts the rendered objects that the plan does not write.
    fn count_skipped(&self, view: &View, plan: &Plan) {
        let metrics = &self.cluster.children.metrics;
        let Ok(rendered) = &view.rendered else { return metrics.template_failed() };
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
        lock(&self.unnamed).remove(&vm);
    }
}

/// What has failed, if something has: what holds up the VM comes first.
fn first_error(executed: Executed<'_>, view: &View) -> Option<ReconcileError> {
    let Executed { done: _, refusals: _, beside, result } = executed;
    let unwatched = || view.unwatched.clone().map(ReconcileError::from);
    let beside = || beside.into_iter().next().map(ReconcileError::from);
    result.err().map(ReconcileError::from).or_else(unwatched).or_else(beside)
}
