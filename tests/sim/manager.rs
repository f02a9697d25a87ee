//! A program of the project in a runtime of its own: one thread, and a clock that only the scheduler advances. With the runtime everything of the
//! program ends at once, as by SIGKILL.

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;
use kube::{Client, client::ClientBuilder};
use tokio::{runtime::Runtime, sync::watch, task::JoinHandle, time::sleep};
use tower::util::BoxService;
use vm_operator::{
    config::{Allowed, Config, ReconcilerConfig, Scope},
    manager::{self, Connection, Options, Reports, client, debug::DebugRecords, leader::Fence, web::Health},
    metrics::Metrics,
    process::{clock, limited},
    vmctl::{
        self,
        derive::{Disks, PodFacts},
        pod::PodSource,
        standing::{Readiness, ReadyWhen},
    },
};

use crate::net::Transport;

/// The namespace of the VMs.
pub const NAMESPACE: &str = "vms";

/// What a program is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Manager,
    Vmctl,
}

pub struct Manager {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    task: JoinHandle<Result<(), String>>,
    pub role: Role,
    pub transport: Transport,
    /// The name that it has in the lease, or the UID of its Pod.
    pub identity: String,
    /// Until then its host is suspended.
    pub suspended: Duration,
    // The manager ends without it.
    _config: Option<watch::Sender<Arc<ReconcilerConfig>>>,
    termination: watch::Sender<bool>,
}

impl Manager {
    fn of(
        role: Role,
        identity: String,
        (wall, since_boot): (Timestamp, Duration),
        begin: impl FnOnce(&Runtime, Transport, watch::Receiver<bool>) -> Begun,
    ) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let transport = Transport::default();
        let (termination, terminated) = watch::channel(false);
        let Begun { task, config } = {
            let _context = runtime.enter();
            clock::follow_tokio(wall, since_boot);
            limited::do_without();
            begin(&runtime, transport.clone(), terminated)
        };
        let suspended = Duration::ZERO;
        Self { runtime: Some(runtime), task, role, transport, identity, suspended, _config: config, termination }
    }

    /// Starts a manager. With an election it works only while it holds the lease.
    pub fn start(wall: Timestamp, since_boot: Duration, identity: String, is_elected: bool) -> Self {
        let name = identity.clone();
        Self::of(Role::Manager, identity, (wall, since_boot), |runtime, transport, terminated| {
            let reconciler = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
            let config = Config { reconciler: reconciler.clone(), ..Config::default() };
            let (config_sender, wanted) = watch::channel(Arc::new(reconciler));
            let options = Options {
                config: None,
                scope: Some(Scope::of(vec![NAMESPACE.to_owned()])),
                templates: None,
                listen: None,
                debug_endpoint: false,
                leader_election: is_elected,
                identity: Some(name),
                web: None,
            };
            let fence = Fence::default();
            let metrics = Arc::new(Metrics::new());
            let (health, _) = Health::new(metrics.clone());
            let builder = ClientBuilder::new(BoxService::new(transport.clone()), NAMESPACE);
            let client = client::fenced_over(builder, fence.clone()).unwrap();
            let lease_client = is_elected.then(|| Client::new(transport, NAMESPACE));
            let connection = Connection { client, fence, lease_client, home: NAMESPACE.into(), is_in_cluster: true };
            let reports = Reports { metrics, health, debug: DebugRecords::new(false) };
            let work = manager::manage(options, (wanted, config), connection, reports, terminated);
            let task = runtime.spawn(async { work.await.map_err(|error| format!("{error:#}")) });
            Begun { task, config: Some(config_sender) }
        })
    }

    /// Starts the vmctl of a Pod.
    pub fn vmctl(wall: Timestamp, since_boot: Duration, prototype: &str, pod: PodFacts) -> Self {
        Self::of(Role::Vmctl, pod.uid.clone(), (wall, since_boot), |runtime, transport, terminated| {
            let options = vmctl::Options {
                prototype: prototype.to_owned(),
                namespace: None,
                prototype_namespace: None,
                disks: Disks::Keep,
                force: true,
                ready: ReadyWhen::Booted,
                pod: PodSource::default(),
            };
            let client = Client::new(transport, NAMESPACE);
            let (readiness, _) = watch::channel(Readiness::NotReady(String::new()));
            let work = vmctl::hold(options, pod, client, readiness, terminated);
            let task = runtime
                .spawn(async { work.await.map_err(|error| vm_operator::process::ErrorChain(&error).to_string()) });
            Begun { task, config: None }
        })
    }

    /// Lets the program do what it can, and then its clock goes on until `time` has passed.
    pub fn go_on(&self, wall: Timestamp, since_boot: Duration, time: Duration) {
        let Some(runtime) = &self.runtime else { return };
        if since_boot < self.suspended {
            return;
        }
        runtime.block_on(async {
            clock::follow_tokio(wall, since_boot);
            sleep(time).await;
        });
    }

    /// Tells it to end, as SIGTERM does.
    pub fn terminate(&self) {
        self.termination.send_replace(true);
    }

    /// Why it has ended, if it has.
    pub fn ended(&mut self) -> Option<String> {
        let is_finished = self.task.is_finished();
        let ended = self.runtime.as_ref().filter(|_| is_finished)?.block_on(&mut self.task);
        Some(match ended {
            Ok(Ok(())) => "it was told to".to_owned(),
            Ok(Err(why)) => why,
            Err(error) => error.to_string(),
        })
    }
}

/// A program that has begun.
struct Begun {
    task: JoinHandle<Result<(), String>>,
    config: Option<watch::Sender<Arc<ReconcilerConfig>>>,
}

impl Drop for Manager {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
