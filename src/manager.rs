//! The controller: watches machines and reconciles them.
//!
//! ```text
//!  lease ─▶ leading? ─▶ watch of machines ─┐
//!                       watches of objects ┼─▶ queue (one entry per machine) ─▶ reconcile: observe, render, plan, execute, status
//!  configuration, templates ─▶ changed ────┤
//!                       back-off ──────────┘
//! ```
//!
//! Told to end (SIGTERM, SIGINT) it lets no new write through, waits a moment for those on their way, gives the lease back
//! and ends. What was not done is done by the next leader, as after a crash.

pub mod leader;
pub mod log;
pub mod reconcile;
pub mod reload;
pub mod sandbox;
pub mod templates;
pub mod vms;
pub mod web;
pub mod written;

use std::{
    collections::HashSet,
    convert::Infallible,
    fs,
    future::Future,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, bail, ensure};
use axum::http::{Response, header::RETRY_AFTER};
use futures::{
    Stream, StreamExt, TryStreamExt,
    channel::oneshot,
    future::{join_all, maybe_done, pending, ready},
    stream,
};
use kube::{
    Client,
    client::{Body, ClientBuilder, retry::RetryPolicy},
    runtime::{
        Controller,
        controller::{self, Action},
        events::Reporter,
        reflector::{self, ObjectRef, Store},
    },
};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tower::{
    BoxError,
    buffer::BufferLayer,
    filter::FilterLayer,
    layer::util::Stack,
    retry::RetryLayer,
    timeout::TimeoutLayer,
    util::{MapResponseLayer, MapResultLayer},
};
use tracing::{Instrument, error, error_span, info, warn};

use self::{
    leader::{Election, Fence, LeaderState},
    reconcile::Reconciler,
    reload::Followed,
    templates::Loader,
    web::{Health, Readiness},
};
use crate::{
    api::full_name,
    cluster::{Cluster, Turns, events::EventRecorder, packed::PackedVm, watch::Children},
    config::{Config, ReconcilerConfig, Scope},
    files::{self, FileError},
    metrics::Metrics,
    process::signals::{self, terminated},
};

/// How many machines are worked on at once. Each has several requests to make, so with these there is always one whose turn it
/// is; more only take memory.
const CONCURRENCY: u16 = 16;
/// When a request is sent again for which the API server has no time (429, 503, 504), if it does not say when: the first and the
/// longest pause, and how often. After that it is the machine's turn to wait, and others' to be looked at.
const RETRY: (Duration, Duration, u32) = (Duration::from_millis(50), Duration::from_secs(1), 4);
/// The longest pause that it may ask for (`Retry-After`): an API server asks for a second, but what stands before it may ask for
/// many minutes, in which a machine would hold up others.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long an answer may take to begin. An API server answers within a minute, if it is not told otherwise
/// (`--request-timeout`); one that lost its power, or the network to it, never does.
const ANSWER: Duration = Duration::from_secs(70);
/// How long nothing may come of an answer that has begun, for example of a list. Longer than kube's bound for a watch in which
/// nothing happens (295 s).
const SILENCE: Duration = Duration::from_secs(300);
/// More requests than are ever under way.
const WAITING: usize = 1024;
/// How long events that wait, and then writes that are on their way, may take when the manager ends. With what the
/// [lease](leader) and [traces](log) take that is less than a second.
const LAST_EVENTS: Duration = Duration::from_millis(150);
const LAST_WRITES: Duration = Duration::from_millis(300);

/// What the manager is told on its command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration file; without one, the defaults.
    pub config: Option<PathBuf>,
    /// The namespaces to manage, over those in the file and the one of the cluster's service account.
    pub scope: Option<Scope>,
    /// A folder of templates that lies over the built-in ones.
    pub templates: Option<PathBuf>,
    /// Where probes and metrics are answered; `None`: nowhere.
    pub listen: Option<SocketAddr>,
    /// Whether to work only while holding the lease.
    pub leader_election: bool,
    /// Under which name; `None`: one that is new each time. Two processes that run at once must not have the same.
    pub identity: Option<String>,
}

/// Runs the manager until it is told to end (SIGTERM, SIGINT).
///
/// # Errors
/// If the configuration can't be used, no API server is configured, the address can't be listened on, or the lease was lost:
/// then this process must not go on, and what restarts it makes it a candidate again.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let stop = signals::termination().context("wait for signals")?;
    let metrics = Arc::new(Metrics::new());
    let (health, mut pings) = Health::new(metrics.clone());
    if let Some(address) = options.listen {
        let listener = web::listen(address).await.with_context(|| format!("listen on {address}"))?;
        info!(address = %listener.local_addr()?, "listening for probes and metrics");
        let server = web::serve(listener, health.clone());
        tokio::spawn(async move {
            if let Err(error) = server.await {
                error!(%error, "probes and metrics are not answered any more");
            }
        });
    }
    let mut main = pin!(manage(options, metrics, health, stop));
    loop {
        tokio::select! {
            result = &mut main => return result,
            // In the same task as the work, so that an answer says that the work is not stuck.
            Some(ping) = pings.recv() => drop(ping.send(())),
        }
    }
}

async fn manage(
    options: Options,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    stop: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let (settings, config) = Settings::read(options.config, metrics.clone(), health.clone())?;
    let mut kubeconfig = kube::Config::infer().await.context("no API server: set KUBECONFIG, or run in a cluster")?;
    let home = kubeconfig.default_namespace.clone();
    let in_cluster = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
    let scope = options.scope.or(config.namespace).unwrap_or_else(|| Scope::of(vec![home.clone()]));
    // Managers of one namespace elect among themselves there; those of several, where they live.
    let lease = match scope.watched().as_slice() {
        [Some(namespace)] => namespace.clone(),
        _ => home.clone(),
    };
    // Template sets are the administrators' and so are never looked for among the machines of others.
    let own = if in_cluster { home } else { lease.clone() };
    let fence = Fence::default();
    let client = fenced(kubeconfig.clone(), fence.clone())?;
    let reporter = Reporter { controller: "vm-operator".into(), instance: std::env::var("HOSTNAME").ok() };

    let election = if options.leader_election {
        // Its own connection: what the work does must not hold up a renewal. And nothing is sent again behind its back, because
        // time is short.
        kubeconfig.default_retry = false;
        let client = Client::try_from(kubeconfig)?;
        Some(Election::start(client, &lease, options.identity.unwrap_or_else(identity), fence.clone(), metrics.clone()))
    } else {
        fence.open();
        metrics.leads(true);
        health.set(web::LEASE, Readiness::Ready("not used".into()));
        None
    };
    let state = election.as_ref().map(Election::state);
    tokio::select! {
        biased;
        () = terminated(stop.clone()) => {}
        loader = async {
            lead(state.clone(), &health).await?;
            info!(namespaces = %scope, version = env!("CARGO_PKG_VERSION"), "managing");
            anyhow::Ok(Loader::start(&client, &own, options.templates, metrics.clone()).await)
        } => {
            let loader = loader?;
            let recorder = Arc::new(EventRecorder::start(client.clone(), reporter));
            let templates = loader.in_force();
            let turns = Turns::default();
            let (mut works, mut stores, mut known) = (Vec::new(), Vec::new(), Vec::new());
            let mut trying = None;
            let usual = templates.borrow().usual_kinds();
            let several = scope.watched().len() > 1;
            if several {
                health.set(web::MACHINES, Readiness::Ready("by namespace".into()));
            }
            for namespace in scope.watched() {
                let part = namespace.as_ref().filter(|_| several);
                let part = part.map_or(web::MACHINES.to_owned(), |name| format!("{} of {name}", web::MACHINES));
                health.set(&part, Readiness::Waiting("not listed yet".into()));
                let (children, triggered) = Children::new(client.clone(), namespace.clone(), metrics.clone());
                let cluster = Cluster::new(client.clone(), children.clone(), turns.clone());
                trying.get_or_insert_with(|| cluster.clone());
                let reconciler =
                    Arc::new(Reconciler::new(cluster, settings.clone(), templates.clone(), recorder.clone()));
                // They are listed while the machines are, not after them.
                children.expect(usual.iter().cloned());
                let lists = {
                    let (children, usual) = (children.clone(), usual.clone());
                    // Of a kind that can't be listed the machines tell that need it.
                    async move { drop(children.watch(usual).await) }
                };
                let (store, writer) = reflector::store::<PackedVm>();
                stores.push(store.clone());
                let mended = again(children.mended.subscribe(), store.clone());
                known.push((store.clone(), children));
                let (listed, is_listed) = oneshot::channel();
                let machines = vms::watch(
                    client.clone(), namespace.as_deref(), writer, listed, metrics.clone(), (health.clone(), part), recorder.clone(),
                );
                let changed = stream::select(again(settings.clone(), store.clone()), again(templates.clone(), store.clone()));
                let changed = stream::select(changed, mended);
                let triggered =
                    vms::at_start(is_listed, lists, store.clone(), stream::select(triggered, changed));
                works.push(work((machines, store, triggered), reconciler, metrics.clone(), stop.clone()));
            }
            metrics.machines_from(move || stores.iter().flat_map(Store::state).filter_map(|vm| vm.read().ok()).collect());
            if let Some(cluster) = trying {
                tokio::spawn(loader.follow(known, cluster, settings.clone(), recorder.clone()));
            }
            let mut work = pin!(maybe_done(join_all(works)));
            tokio::select! {
                biased;
                () = terminated(stop.clone()) => {
                    // The next manager finds in the status what was told.
                    tokio::select! {
                        _ = timeout(LAST_EVENTS, recorder.flush()) => {}
                        () = async { (&mut work).await; pending().await } => {}
                    }
                    fence.close();
                    if timeout(LAST_WRITES, work).await.is_err() {
                        warn!("some machines are still in work; the next manager goes on with them");
                    }
                }
                why = lost(state) => {
                    fence.close();
                    bail!("{why}: this manager must not go on");
                }
                // It is told to stop too.
                _ = &mut work => ensure!(*stop.borrow(), "the watch of the machines ended"),
            }
        }
    }
    if let Some(election) = election {
        election.resign().await;
    }
    info!("ended");
    Ok(())
}

/// Reconciles machines until told to stop; then finishes those in work.
async fn work(
    (machines, store, triggered): (
        impl Stream<Item = kube::runtime::watcher::Result<PackedVm>> + Send + 'static,
        Store<PackedVm>,
        impl Stream<Item = ObjectRef<PackedVm>> + Send + 'static,
    ),
    reconciler: Arc<Reconciler>,
    metrics: Arc<Metrics>,
    stop: watch::Receiver<bool>,
) {
    let woke = |metrics: &Arc<Metrics>| {
        let metrics = metrics.clone();
        move |name: &str| metrics.woke(name)
    };
    let (changed, told) = (woke(&metrics), woke(&metrics));
    let machines = machines.inspect_ok(move |vm| changed(&vm.full_name()));
    let triggered = triggered.inspect(move |vm| told(&full_name(vm.namespace.as_deref(), &vm.name)));
    let counted = metrics.clone();
    let (ending, known) = (stop.clone(), reconciler.clone());
    Controller::for_stream(machines, store)
        .with_config(controller::Config::default().concurrency(CONCURRENCY))
        .reconcile_on(triggered)
        .graceful_shutdown_on(terminated(stop))
        .run(
            move |vm, reconciler| look(vm, reconciler, &counted, ending.clone()),
            |_, error: &Infallible, _| match *error {},
            reconciler,
        )
        .for_each(|result| {
            // What happened to a machine is said where it happened; this one was deleted while it was in the queue.
            if let Err(controller::Error::ObjectNotFound(vm)) = result {
                metrics.forgot(&full_name(vm.namespace.as_deref(), &vm.name));
                known.forget(&vm.name, vm.namespace.as_deref().unwrap_or_default());
            }
            ready(())
        })
        .await;
}

/// One look at one machine, counted and with its name on each line that is logged.
fn look(
    vm: Arc<PackedVm>,
    reconciler: Arc<Reconciler>,
    metrics: &Arc<Metrics>,
    stop: watch::Receiver<bool>,
) -> impl Future<Output = Result<Action, Infallible>> + Send + use<> {
    let machine = vm.full_name();
    let work = metrics.begin(&machine);
    // A span of the highest level is there whatever is filtered.
    let span = error_span!("reconcile", vm = machine, id = work.number);
    let reconciled = Reconciler::reconcile(vm.clone(), reconciler.clone());
    let look = async move {
        Ok(match reconciled.await {
            Ok(action) => {
                work.done(action != Action::await_change());
                action
            }
            // What it still wanted to write is for the next leader.
            Err(_) if *stop.borrow() => Action::await_change(),
            Err(error) => {
                let action = Reconciler::retry(vm, &error, reconciler);
                work.failed(error.label());
                action
            }
        })
    };
    look.instrument(span)
}

/// All machines, each time that something has changed that may matter to each.
fn again<T: Send + Sync + 'static>(
    mut something: watch::Receiver<T>,
    store: Store<PackedVm>,
) -> impl Stream<Item = ObjectRef<PackedVm>> + Send {
    something.mark_unchanged();
    let changes = stream::unfold(something, async |mut something| Some((something.changed().await.ok()?, something)));
    changes.flat_map(move |()| stream::iter(store.state()).map(|vm| ObjectRef::from_obj(&*vm)))
}

/// A client whose requests for a change are let through by the fence only, each time that they are sent: what the API server
/// has no time for is sent again, a little later.
fn fenced(mut config: kube::Config, fence: Fence) -> anyhow::Result<Client> {
    // Its own would go on within the fence, and for minutes.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    let check = move |request: axum::http::Request<Body>| {
        if request.method().is_safe() {
            return Ok(request);
        }
        fence.check(Instant::now()).map(|()| request)
    };
    let limited = ClientBuilder::try_from(config)?.with_layer(&TimeoutLayer::new(ANSWER));
    let checked = limited.with_layer(&FilterLayer::new(check));
    // To send one again takes a clone of the service, which the buffer is.
    let cloned = checked.with_layer(&BufferLayer::new(WAITING));
    Ok(cloned.with_layer(&persistent()?).with_layer(&MapResultLayer::new(no_redirect)).build())
}

/// Sends again what the API server has no time for.
type Persistent<B> = Stack<MapResponseLayer<fn(Response<B>) -> Response<B>>, RetryLayer<RetryPolicy>>;

fn persistent<B>() -> anyhow::Result<Persistent<B>> {
    let (first, longest, times) = RETRY;
    let retry = RetryPolicy::new(first, longest, times, true).context("RETRY is no policy")?;
    Ok(Stack::new(MapResponseLayer::new(impatient), RetryLayer::new(retry)))
}

/// An answer that does not ask for more than [`PATIENCE`].
fn impatient<B>(mut response: Response<B>) -> Response<B> {
    let asked = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if asked.is_some_and(|seconds| seconds > PATIENCE.as_secs()) {
        response.headers_mut().insert(RETRY_AFTER, PATIENCE.as_secs().into());
    }
    response
}

/// To kube, a redirect to a page for logging in would be a watch that has just ended, and it would begin the next one at once.
fn no_redirect<B>(answer: Result<Response<B>, BoxError>) -> Result<Response<B>, BoxError> {
    match answer {
        Ok(answer) if answer.status().is_redirection() => {
            Err(format!("the API server answers with {}", answer.status()).into())
        }
        answer => answer,
    }
}

/// A name that no other process has, nor this one had before: as client-go makes it.
fn identity() -> String {
    let host = std::env::var("HOSTNAME").or_else(|_| fs::read_to_string("/proc/sys/kernel/hostname"));
    format!("{}_{}", host.unwrap_or_default().trim(), reconcile::random())
}

/// Returns when this manager leads; without an election, at once.
async fn lead(state: Option<watch::Receiver<LeaderState>>, health: &Health) -> anyhow::Result<()> {
    let listing = || health.set(web::MACHINES, Readiness::Waiting("not listed yet".into()));
    let Some(mut state) = state else {
        listing();
        return Ok(());
    };
    loop {
        let now = state.borrow_and_update().clone();
        match now {
            LeaderState::Unknown(problem) => {
                let why = problem.unwrap_or_else(|| "not read yet".into());
                health.set(web::LEASE, Readiness::Waiting(why));
            }
            LeaderState::Standby(leader) => {
                health.set(web::LEASE, Readiness::Ready(format!("standing by for {leader}")));
                health.set(web::MACHINES, Readiness::Ready("not needed while standing by".into()));
            }
            LeaderState::Leading => {
                health.set(web::LEASE, Readiness::Ready("held".into()));
                listing();
                return Ok(());
            }
            LeaderState::Lost(why) => bail!(why),
        }
        state.changed().await.context("the election ended")?;
    }
}

/// Returns when this manager does not lead any more, with the reason.
async fn lost(state: Option<watch::Receiver<LeaderState>>) -> String {
    let Some(mut state) = state else { return std::future::pending().await };
    match state.wait_for(|state| matches!(state, LeaderState::Lost(_))).await.as_deref() {
        Ok(LeaderState::Lost(why)) => why.clone(),
        _ => "the election ended".to_owned(),
    }
}

/// The configuration file, read again when it changes.
struct Settings {
    file: Option<PathBuf>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    /// Warnings that were given.
    warned: HashSet<String>,
}

impl Settings {
    /// Reads the file, and goes on following it. What is wrong with it later is said and changes nothing.
    fn read(
        file: Option<PathBuf>,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
    ) -> Result<(watch::Receiver<Arc<ReconcilerConfig>>, Config), FileError> {
        let config = load(file.as_deref())?;
        let mut settings = Self { file, metrics, health, warned: HashSet::new() };
        settings.good(&config);
        let (sender, receiver) = watch::channel(Arc::new(config.reconciler.clone()));
        if let Some(file) = settings.file.clone() {
            let first = config.clone();
            tokio::spawn(async move {
                let namespace = first.namespace.clone();
                let tell = |result: &Result<Config, FileError>| match result {
                    Ok(config) => {
                        info!(file = %file.display(), "the configuration has changed");
                        if config.namespace != namespace {
                            warn!("another namespace is only managed after a restart");
                        }
                        settings.good(config);
                        sender.send_replace(Arc::new(config.reconciler.clone()));
                    }
                    Err(error) => settings.bad(error),
                };
                reload::follow(Followed::File(&file), Ok(first), || load(Some(&file)), tell).await
            });
        }
        Ok((receiver, config))
    }

    fn good(&mut self, config: &Config) {
        let file = self.file.clone().filter(|file| file.exists());
        let name = file.as_ref().map_or_else(|| "defaults".to_owned(), |file| file.display().to_string());
        for key in &config.unknown {
            self.warn(format!("{name}: {key} is not known and has no effect"));
        }
        let logging = file.map(|file| file.with_file_name("logging.properties")).filter(|file| file.exists());
        if let Some(logging) = logging {
            let logging = logging.display();
            self.warn(format!("{logging} is not read: RUST_LOG says what is logged, --log-format how it looks"));
        }
        self.metrics.config_loaded(true);
        self.health.set(web::CONFIG, Readiness::Ready(name));
    }

    fn bad(&self, error: &FileError) {
        error!(%error, "the configuration can't be used; the last good one stays in force");
        self.metrics.config_loaded(false);
        self.health.set(web::CONFIG, Readiness::Ready(format!("the last good one stays in force: {error}")));
    }

    fn warn(&mut self, message: String) {
        if !self.warned.contains(&message) {
            warn!("{message}");
            self.warned.insert(message);
        }
    }
}

fn load(file: Option<&Path>) -> Result<Config, FileError> {
    // The ConfigMap is optional, and so is its file.
    file.filter(|file| file.exists()).map_or_else(|| Ok(Config::default()), files::configuration)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::{Router, http::StatusCode};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{Api, api::PostParams};
    use tower::{Layer, ServiceExt};

    use super::*;
    use crate::{process::ErrorChain, test_support::played};

    #[tokio::test]
    async fn who_does_not_lead_can_read_and_not_write() {
        // Nobody answers there.
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let fence = Fence::default();
        let maps: Api<ConfigMap> = Api::default_namespaced(fenced(config, fence.clone()).unwrap());
        let write = async || maps.create(&PostParams::default(), &ConfigMap::default()).await.unwrap_err();
        assert!(ErrorChain(&write().await).to_string().contains("does not lead"));
        assert!(!ErrorChain(&maps.get("apple").await.unwrap_err()).to_string().contains("does not lead"));
        fence.open();
        assert!(!ErrorChain(&write().await).to_string().contains("does not lead"));
    }

    /// An API server that is busy twice. Returns how often it was asked, and whether that ended well.
    async fn ask(at_first: impl Fn(&Fence) + Clone + Send + Sync + 'static) -> (usize, bool) {
        let (fence, asked) = (Fence::default(), Arc::new(AtomicUsize::new(0)));
        fence.open();
        let answer = {
            let (fence, asked) = (fence.clone(), asked.clone());
            move || async move {
                let times = asked.fetch_add(1, Ordering::SeqCst) + 1;
                if times == 1 {
                    at_first(&fence);
                }
                if times <= 2 { (StatusCode::SERVICE_UNAVAILABLE, "") } else { (StatusCode::OK, "{}") }
            }
        };
        let client = fenced(played(Router::new().fallback(answer)).await, fence).unwrap();
        let request = axum::http::Request::post("/x").body(Vec::new()).unwrap();
        let done = client.request::<serde_json::Value>(request).await.is_ok();
        (asked.load(Ordering::SeqCst), done)
    }

    #[tokio::test]
    async fn who_never_answers_is_not_waited_for_for_ever() {
        let arrived = Arc::new(tokio::sync::Notify::new());
        let answer = {
            let arrived = arrived.clone();
            move || async move {
                arrived.notify_one();
                pending::<StatusCode>().await
            }
        };
        let fence = Fence::default();
        fence.open();
        let client = fenced(played(Router::new().fallback(answer)).await, fence).unwrap();
        let request = axum::http::Request::post("/x").body(Vec::new()).unwrap();
        let asked = tokio::spawn(async move { client.request::<serde_json::Value>(request).await });
        arrived.notified().await;
        // From here on each pause is skipped.
        tokio::time::pause();
        let answer = tokio::time::timeout(2 * ANSWER, asked).await.expect("an end to it");
        let error = answer.unwrap().unwrap_err();
        assert!(ErrorChain(&error).to_string().contains("timed out"), "{}", ErrorChain(&error));
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_is_busy_says_when_to_come_again_but_not_much_later() {
        // Busy twice. Returns how long that took.
        let ask = async |busy_status: StatusCode, after: &'static str| {
            let asked = Arc::new(AtomicUsize::new(0));
            let api = tower::service_fn(move |_: axum::http::Request<Body>| {
                let busy = asked.fetch_add(1, Ordering::SeqCst) < 2;
                let status = if busy { busy_status } else { StatusCode::OK };
                ready(
                    Response::builder()
                        .status(status)
                        .header(RETRY_AFTER, after)
                        .body(())
                        .map_err(tower::BoxError::from),
                )
            });
            let start = Instant::now();
            let answer = persistent().unwrap().layer(api).oneshot(axum::http::Request::new(Body::empty())).await;
            assert_eq!(answer.unwrap().status(), StatusCode::OK);
            start.elapsed().as_secs()
        };
        for status in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT] {
            assert_eq!(ask(status, "3").await, 6);
            assert_eq!(ask(status, "600").await, 2 * PATIENCE.as_secs());
            assert_eq!(ask(status, "tomorrow").await, 0, "by itself it waits far less than a second");
        }
    }

    #[tokio::test]
    async fn a_redirect_is_an_error() {
        let answer = async || (StatusCode::FOUND, [("location", "/login")]);
        let client = fenced(played(Router::new().fallback(answer)).await, Fence::default()).unwrap();
        let error = client.request_text(axum::http::Request::get("/x").body(Vec::new()).unwrap()).await.unwrap_err();
        assert!(ErrorChain(&error).to_string().contains("302 Found"), "{}", ErrorChain(&error));
    }

    #[tokio::test]
    async fn what_is_sent_again_passes_the_fence_again() {
        assert_eq!(ask(|_| ()).await, (3, true));
        assert_eq!(ask(Fence::close).await, (1, false));
    }
}
