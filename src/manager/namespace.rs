//! One watched namespace, or all namespaces: its VMs, their objects, and the queue from which they are reconciled.
//!
//! ```text
//!  watch of the VMs ───────────────────────────────────┐
//!  watch of their objects ─────────────────────────────┼─▶ queue, one entry for each VM ─▶ reconcile
//!  configuration, templates, pools,                    │
//!  a kind that works again ────────────────────────────┘
//! ```

use std::{convert::Infallible, future::ready, sync::Arc, time::Duration};

use futures::{
    FutureExt, Stream, StreamExt, TryStreamExt,
    channel::{mpsc, oneshot},
    future::{BoxFuture, join},
    stream,
};
use kube::{
    Client,
    runtime::{
        Controller,
        controller::{self, Action},
        reflector::{self, Lookup, ObjectRef, Store},
    },
};
use tokio::sync::watch;
use tracing::{Instrument as _, error_span};

use super::{
    agents::Agents,
    assignments::{Assignments, Changes},
    caches::Caches,
    debug::DebugRecords,
    pools,
    reconcile::{Followed, Reconciler},
    renderer::Renderer,
    slow::{Beside, Slow},
    templates::InForce,
    vms::{self, VmWatch},
    web::{self, Health, HealthPart, Readiness},
};
use crate::{
    api::{full_name, login_pools::LoginPools},
    client::events::EventRecorder,
    cluster::{Cluster, packed::PackedVm, watch::Children},
    config::ReconcilerConfig,
    metrics::Metrics,
    object::reports,
    process::{signals::terminated, slots::Slots},
};

/// How many VMs of a namespace are reconciled at once, beside those whose reconcile takes long. Each has several requests under way, so 6
/// keep an API server busy; more would only take memory (docs/performance.md).
const AT_ONCE: u16 = 6;

/// What all namespaces share.
#[derive(Clone)]
pub struct Shared {
    /// The client, whose writes pass the fence.
    pub client: Client,
    /// The configuration, as it changes.
    pub config: watch::Receiver<Arc<ReconcilerConfig>>,
    /// The template sets, as they change.
    pub templates: watch::Receiver<Arc<InForce>>,
    /// Writes events.
    pub recorder: Arc<EventRecorder>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Reports how far each namespace is.
    pub health: Arc<Health>,
    /// Keeps what was done last, for people.
    pub debug: DebugRecords,
    /// Renders VMs.
    pub renderer: Arc<Renderer>,
    /// Bounds the requests of all namespaces together.
    pub requests: Slots,
    /// Becomes true when the manager is told to end.
    pub termination: watch::Receiver<bool>,
}

/// A namespace whose VMs are watched and reconciled.
pub struct Namespace {
    /// Its VMs and their objects.
    pub caches: Caches,
    /// Writes to it.
    pub cluster: Cluster,
    /// Reconciles its VMs until the manager is told to end, and then finishes those that are being reconciled.
    pub work: BoxFuture<'static, ()>,
}

impl Namespace {
    /// Begins to list and watch the objects of a namespace (`None`: of all). The VMs are listed and reconciled by
    /// [`Namespace::work`]. `is_only` says whether the manager watches no other namespace.
    pub fn start(shared: &Shared, namespace: Option<String>, is_only: bool) -> Self {
        let name = match &namespace {
            Some(name) if !is_only => format!("{} of {name}", web::VMS),
            _ => web::VMS.to_owned(),
        };
        let health = HealthPart { health: shared.health.clone(), name };
        health.set(Readiness::Waiting("not listed yet".into()));
        let (children, triggered) = Children::new(shared.client.clone(), namespace.clone(), shared.metrics.clone());
        let cluster = Cluster::new(shared.client.clone(), children.clone(), shared.requests.clone());
        let (vms, writer) = reflector::store::<PackedVm>();
        children.follow(vms.clone());
        let started = watch::Sender::new(false);
        let caches = Caches { vms, children, started: started.subscribe() };
        let usual = shared.templates.borrow().usual_kinds();
        // They are listed while the VMs are.
        caches.children.begin(usual.iter().cloned().chain([reports()]));
        let pools::Followed { login: pools, all: all_pools, listed: pools_listed } =
            pools::follow(shared.client.clone(), namespace.as_deref(), shared.metrics.clone());
        let objects_listed = {
            let children = caches.children.clone();
            async move {
                // If a kind can't be listed, the VMs that need it report that.
                let _ = join(children.watch(usual), pools_listed).await;
            }
        };
        let (listed, is_listed) = oneshot::channel();
        let watch = VmWatch {
            client: shared.client.clone(),
            namespace,
            metrics: shared.metrics.clone(),
            health,
            recorder: shared.recorder.clone(),
        };
        let changes = Changes::default();
        let vms = {
            let changes = changes.clone();
            watch.start(writer, listed).inspect_ok(move |vm| changes.observe(vm))
        };
        let assignments = Assignments {
            client: shared.client.clone(),
            vms: caches.vms.clone(),
            started: started.subscribe(),
            pools: all_pools,
            changes,
            metrics: shared.metrics.clone(),
        };
        let triggered = vms::at_start(
            is_listed,
            objects_listed,
            caches.vms.clone(),
            triggers(shared, &caches, pools.clone(), triggered),
            started,
        );
        let (agents, turns) = Agents::new();
        let triggered = stream::select(triggered, turns);
        let reconciler = Arc::new(Reconciler::new(
            cluster.clone(),
            Followed { config: shared.config.clone(), templates: shared.templates.clone(), pools },
            shared.recorder.clone(),
            shared.debug.clone(),
            shared.renderer.clone(),
            agents,
        ));
        let queue = Queue { store: caches.vms.clone(), reconciler, shared: shared.clone() };
        let work = async move {
            tokio::select! {
                () = queue.work(vms, triggered) => {}
                // It ends only if nobody watches the pools any more.
                () = assignments.work().then(|()| std::future::pending::<()>()) => {}
            }
        };
        Self { caches, cluster, work: work.boxed() }
    }
}

/// The VMs to reconcile because something else than the VM changed.
fn triggers(
    shared: &Shared,
    caches: &Caches,
    pools: watch::Receiver<Arc<LoginPools>>,
    objects: mpsc::UnboundedReceiver<ObjectRef<PackedVm>>,
) -> impl Stream<Item = ObjectRef<PackedVm>> + Send + 'static {
    let all = |changes| all_after(changes, caches.vms.clone());
    stream::select_all([
        objects.boxed(),
        all(changes(shared.config.clone())),
        all(changes(shared.templates.clone())),
        all(changes(pools)),
        all(changes(caches.children.recovered.subscribe())),
    ])
}

/// An item for each change from now on.
fn changes<T: Send + Sync + 'static>(mut value: watch::Receiver<T>) -> stream::BoxStream<'static, ()> {
    value.mark_unchanged();
    stream::unfold(value, async |mut value| Some((value.changed().await.ok()?, value))).boxed()
}

/// All VMs, after each change.
fn all_after(
    changes: stream::BoxStream<'static, ()>,
    store: Store<PackedVm>,
) -> stream::BoxStream<'static, ObjectRef<PackedVm>> {
    changes.flat_map(move |()| stream::iter(vms::in_order(&store)).map(|vm| ObjectRef::from_obj(&*vm))).boxed()
}

/// The VMs of a namespace that wait to be reconciled, each once.
struct Queue {
    store: Store<PackedVm>,
    reconciler: Arc<Reconciler>,
    shared: Shared,
}

impl Queue {
    async fn work(
        self,
        vms: impl Stream<Item = kube::runtime::watcher::Result<PackedVm>> + Send + 'static,
        triggered: impl Stream<Item = ObjectRef<PackedVm>> + Send + 'static,
    ) {
        let Self { store, reconciler, shared } = self;
        let (changed, other) = (shared.metrics.clone(), shared.metrics.clone());
        let vms = vms.inspect_ok(move |vm| changed.queued(&vm.full_name()));
        let triggered = triggered.inspect(move |vm| other.queued(&full_name(vm.namespace.as_deref(), &vm.name)));
        let (metrics, termination) = (shared.metrics.clone(), shared.termination.clone());
        let (remembered, latest) = (reconciler.clone(), store.clone());
        let Beside { slow, work: beside, again } = Slow::start();
        let reconciles = Controller::for_stream(vms, store)
            .with_config(controller::Config::default().concurrency(AT_ONCE))
            .reconcile_on(triggered)
            .reconcile_on(again)
            .graceful_shutdown_on(terminated(shared.termination))
            .run(
                move |vm: Arc<PackedVm>, reconciler| {
                    let (latest, metrics) = (latest.clone(), metrics.clone());
                    let work = reconcile(vm.clone(), latest, reconciler, metrics, termination.clone());
                    let pause = slow.clone().run(ObjectRef::from_obj(&*vm), work);
                    pause.map(|pause| Ok(pause.map_or_else(Action::await_change, Action::requeue)))
                },
                |_, error: &Infallible, _| match *error {},
                reconciler,
            )
            .for_each(|result| {
                // Failures are logged by the reconcile.
                if let Err(controller::Error::ObjectNotFound(vm)) = result {
                    forget(&remembered, &shared.metrics, &vm);
                }
                ready(())
            });
        join(reconciles, beside).await;
    }
}

/// One reconcile of one VM, as the store has it now. It is counted, and each line that it logs has the VM's name. Returns after how long
/// the VM is to be reconciled again.
async fn reconcile(
    vm: Arc<PackedVm>,
    latest: Store<PackedVm>,
    reconciler: Arc<Reconciler>,
    metrics: Arc<Metrics>,
    termination: watch::Receiver<bool>,
) -> Option<Duration> {
    let name = ObjectRef::from_obj(&*vm);
    let Some(vm) = latest.get(&name) else {
        forget(&reconciler, &metrics, &name);
        return None;
    };
    let name = vm.full_name();
    let work = metrics.begin(&name);
    // A span of the highest level exists whatever is filtered.
    let span = error_span!("reconcile", vm = name, id = work.number);
    let reconcile = async move {
        match Reconciler::reconcile(vm.clone(), reconciler.clone()).await {
            Ok(pause) => {
                work.done(pause.is_some());
                pause
            }
            // The fence is closed. The next leader does what is left.
            Err(_) if *termination.borrow() => None,
            Err(error) => {
                let pause = Reconciler::retry(vm, &error, reconciler);
                work.failed(error.label());
                Some(pause)
            }
        }
    };
    reconcile.instrument(span).await
}

/// A VM was deleted while it waited for its reconcile.
fn forget<K: Lookup>(reconciler: &Reconciler, metrics: &Metrics, vm: &ObjectRef<K>) {
    metrics.unqueued(&full_name(vm.namespace.as_deref(), &vm.name));
    reconciler.forget(&vm.name, vm.namespace.as_deref().unwrap_or_default());
}
