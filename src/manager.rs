//! The controller: watches VMs and reconciles them.
//!
//! ```text
//!  configuration ─▶ lease ─▶ leading ─▶ templates ─▶ namespaces: watches ─▶ queue ─▶ reconcile
//!                                                        (observe, render, plan, execute, status)
//! ```
//!
//! When it is told to end (SIGTERM, SIGINT) the manager begins no new write, waits a moment for those under way, gives the lease
//! back and ends. The next leader does what is left, as after a crash.

pub mod agents;
mod assignments;
mod caches;
pub mod check;
pub mod client;
pub mod debug;
mod in_force;
pub mod leader;
mod leadership;
mod members;
pub mod namespace;
pub mod pools;
mod random;
pub mod reconcile;
pub mod reload;
pub mod renderer;
pub mod sandbox;
mod settings;
mod slow;
mod surroundings;
pub mod templates;
pub mod unrest;
pub mod vms;
pub mod web;
pub mod web_program;
pub mod written;

use std::{net::SocketAddr, path::PathBuf, pin::pin, sync::Arc, time::Duration};

use anyhow::{Context as _, bail, ensure};
use futures::future::{join_all, maybe_done, pending};
use kube::{Client, runtime::events::Reporter};
use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

use self::{
    caches::Caches,
    debug::DebugRecords,
    leader::Fence,
    leadership::{Candidacy, Leadership},
    namespace::{Namespace, Shared},
    settings::Settings,
    templates::{Checks, Loader},
    web::{Endpoints, Health, Readiness},
    web_program::WebProgram,
};
use crate::{
    client::events::EventRecorder,
    cluster::REQUESTS,
    config::{Config, ReconcilerConfig, Scope},
    metrics::Metrics,
    process::{
        name_client,
        signals::{self, terminated},
        slots::Slots,
    },
};

/// How long events that wait, and then writes that are under way, may take when the manager ends. With what giving back the
/// [lease](leader) and sending the [traces](crate::process::log) may take that is less than a second.
const LAST_EVENTS: Duration = Duration::from_millis(150);
const LAST_WRITES: Duration = Duration::from_millis(300);

/// What the manager is told on its command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// The configuration file; without one, the defaults.
    pub config: Option<PathBuf>,
    /// The namespaces to manage. They take precedence over those in the file, and these over the one of the service account.
    pub scope: Option<Scope>,
    /// A folder of templates that lies over the built-in ones.
    pub templates: Option<PathBuf>,
    /// Where probes and metrics are answered; `None`: nowhere.
    pub listen: Option<SocketAddr>,
    /// Whether what the manager knows of each VM can be read there, too.
    pub debug_endpoint: bool,
    /// Whether to work only while holding the lease.
    pub leader_election: bool,
    /// The manager's name in the lease; `None`: a new one each time. Two processes that run at once must not have the same.
    pub identity: Option<String>,
    /// The web interface that runs beside it; `None`: it does not.
    pub web: Option<WebProgram>,
}

/// Runs the manager until it is told to end (SIGTERM, SIGINT).
///
/// # Errors
/// If the configuration cannot be used, no API server is configured, or the address cannot be listened on. Also if the lease is
/// lost: then this process must not go on. Whatever restarts it makes it a candidate again.
pub async fn run(mut options: Options) -> anyhow::Result<()> {
    let termination = signals::termination().context("wait for signals")?;
    let metrics = Arc::new(Metrics::new());
    let (health, mut pings) = Health::new(metrics.clone());
    let debug = DebugRecords::new(options.debug_endpoint);
    if let Some(address) = options.listen {
        let endpoints = Endpoints { health: health.clone(), debug: debug.clone() };
        let address = endpoints.start(address).await.with_context(|| format!("listen on {address}"))?;
        info!(%address, "listening for probes and metrics");
    }
    let web = options.web.take().map(|program| tokio::spawn(program.run(termination.clone())));
    let mut manager = pin!(connect_and_manage(options, Reports { metrics, health, debug }, termination.clone()));
    let result = loop {
        tokio::select! {
            result = &mut manager => break result,
            // In the task that also runs the queues, so that an answer says that this task is not stuck.
            Some(ping) = pings.recv() => drop(ping.send(())),
        }
    };
    if let Some(web) = web {
        if !*termination.borrow() {
            // The manager has failed. Whatever restarts it starts this one, too.
            web.abort();
        }
        let _ = web.await;
    }
    result
}

/// Where the manager reports what it does.
pub struct Reports {
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// What the probes answer.
    pub health: Arc<Health>,
    /// What was done last, for people.
    pub debug: DebugRecords,
}

/// How the manager reaches the API server, and as whom.
pub struct Connection {
    /// The client of the leader, whose writes pass the fence.
    pub client: Client,
    /// The fence of `client`.
    pub fence: Fence,
    /// The client of the election; `None`: without an election, the manager leads.
    pub lease_client: Option<Client>,
    /// The namespace of the service account or kubeconfig.
    pub home: String,
    /// Whether the manager runs in a Pod of the cluster.
    pub is_in_cluster: bool,
}

impl Connection {
    /// Connects as KUBECONFIG or the service account says.
    async fn infer(leader_election: bool) -> anyhow::Result<Self> {
        let mut kubeconfig =
            kube::Config::infer().await.context("no API server: set KUBECONFIG, or run in a cluster")?;
        name_client(&mut kubeconfig, "vm-operator");
        let is_in_cluster = std::env::var_os("KUBERNETES_SERVICE_HOST").is_some();
        let (home, fence) = (kubeconfig.default_namespace.clone(), Fence::default());
        let client = client::fenced(kubeconfig.clone(), fence.clone())?;
        // A renewal has its own connection, so that nothing holds it up, and its own retries, because time is short.
        kubeconfig.default_retry = false;
        let lease_client = if leader_election { Some(Client::try_from(kubeconfig)?) } else { None };
        Ok(Self { client, fence, lease_client, home, is_in_cluster })
    }
}

async fn connect_and_manage(
    mut options: Options,
    reports: Reports,
    termination: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let settings = Settings::follow(options.config.take(), reports.metrics.clone(), reports.health.clone())?;
    let connection = Connection::infer(options.leader_election).await?;
    manage(options, settings, connection, reports, termination).await
}

/// Manages VMs with the configuration that `config` has, as it changes, and that of the start, until the manager is told to end.
///
/// # Errors
/// As [`run`].
pub async fn manage(
    options: Options,
    (config, at_start): (watch::Receiver<Arc<ReconcilerConfig>>, Config),
    connection: Connection,
    reports: Reports,
    termination: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let Reports { metrics, health, debug } = reports;
    let Connection { client, fence, lease_client, home, is_in_cluster } = connection;
    let places = Places::of(&home, options.scope.or(at_start.namespace), is_in_cluster);
    let candidacy =
        lease_client.map(|client| Candidacy { client, namespace: places.lease.clone(), identity: options.identity });
    let leadership = Leadership::start(candidacy, fence.clone(), metrics.clone(), health.clone());
    let loader = tokio::select! {
        biased;
        () = terminated(termination.clone()) => None,
        loader = async {
            leadership.gained().await?;
            info!(namespaces = %places.scope, version = env!("CARGO_PKG_VERSION"), "managing");
            anyhow::Ok(Loader::start(&client, &places.templates, options.templates, &config, metrics.clone()).await)
        } => Some(loader?),
    };
    if let Some(loader) = loader {
        let reporter = Reporter { controller: "vm-operator".into(), instance: std::env::var("HOSTNAME").ok() };
        let shared = Shared {
            client: client.clone(),
            config: loader.config(),
            templates: loader.in_force(),
            recorder: Arc::new(EventRecorder::start(client, reporter)),
            metrics,
            health,
            debug,
            renderer: Arc::default(),
            requests: Slots::new(REQUESTS),
            termination,
        };
        work(shared, config, &places.scope, loader, &leadership, &fence).await?;
    }
    leadership.resign().await;
    info!("ended");
    Ok(())
}

/// Manages all namespaces until the manager is told to end. `wanted` is the configuration of the file, which is checked before it is used.
async fn work(
    shared: Shared,
    wanted: watch::Receiver<Arc<ReconcilerConfig>>,
    scope: &Scope,
    loader: Loader,
    leadership: &Leadership,
    fence: &Fence,
) -> anyhow::Result<()> {
    let watched = scope.watched();
    let is_only = watched.len() == 1;
    if !is_only {
        shared.health.set(web::VMS, Readiness::Ready("by namespace".into()));
    }
    let namespaces: Vec<_> = watched.into_iter().map(|name| Namespace::start(&shared, name, is_only)).collect();
    let caches: Arc<[_]> = namespaces.iter().map(|namespace| namespace.caches.clone()).collect();
    shared.debug.read_from(caches.clone());
    let listed = caches.clone();
    shared.metrics.vms_from(move || listed.iter().flat_map(Caches::summaries).collect());
    if let Some(Namespace { cluster, .. }) = namespaces.first() {
        let checks = Checks { caches, cluster: cluster.clone(), wanted, recorder: shared.recorder.clone() };
        tokio::spawn(loader.follow(checks));
    }
    let mut work = pin!(maybe_done(join_all(namespaces.into_iter().map(|namespace| namespace.work))));
    tokio::select! {
        biased;
        () = terminated(shared.termination.clone()) => {
            // The next manager does not record these events again: it sees from the status that they were.
            tokio::select! {
                _ = timeout(LAST_EVENTS, shared.recorder.flush()) => {}
                () = async { (&mut work).await; pending().await } => {}
            }
            fence.end();
            if timeout(LAST_WRITES, work).await.is_err() {
                warn!("some VMs are still being reconciled; the next manager goes on with them");
            }
        }
        why = leadership.lost() => {
            fence.close();
            bail!("{why}: this manager must not go on");
        }
        // The queues end by themselves when the manager is told to end.
        _ = &mut work => ensure!(*shared.termination.borrow(), "the watch of the VMs ended"),
    }
    Ok(())
}

/// Which namespaces the manager has to do with.
struct Places {
    /// Those whose VMs it manages.
    scope: Scope,
    /// That of the lease. Who can write a lease can keep every manager from working, or make two work at once, so it is in the manager's
    /// own namespace and not beside the VMs of other people. A manager outside a cluster has no namespace of its own.
    lease: String,
    /// That of the ConfigMaps with template sets. They belong to administrators, too.
    templates: String,
}

impl Places {
    /// `home` is the namespace of the service account or kubeconfig.
    fn of(home: &str, scope: Option<Scope>, is_in_cluster: bool) -> Self {
        let scope = scope.unwrap_or_else(|| Scope::of(vec![home.to_owned()]));
        let own = match scope.watched().as_slice() {
            [Some(namespace)] if !is_in_cluster => namespace.clone(),
            _ => home.to_owned(),
        };
        Self { scope, lease: own.clone(), templates: own }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_and_templates_are_in_the_managers_own_namespace() {
        for (scope, is_in_cluster, expected) in [
            (None, true, "home"),
            (Some(&["vms"][..]), true, "home"),
            (Some(&["vms", "more"]), true, "home"),
            (Some(&["*"]), true, "home"),
            (None, false, "home"),
            (Some(&["vms"]), false, "vms"),
            (Some(&["vms", "more"]), false, "home"),
        ] {
            let scope = scope.map(|names| Scope::of(names.iter().map(|name| (*name).to_owned()).collect()));
            let places = Places::of("home", scope, is_in_cluster);
            assert_eq!((places.lease.as_str(), places.templates.as_str()), (expected, expected));
        }
    }
}
