//! A manager in a runtime of its own: one thread, and a clock that only the scheduler advances. With the runtime everything of the manager
//! ends at once, as by SIGKILL.

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;
use kube::client::ClientBuilder;
use tokio::{runtime::Runtime, sync::watch, task::JoinHandle, time::sleep};
use tower::util::BoxService;
use vm_operator::{
    config::{Allowed, Config, ReconcilerConfig, Scope},
    manager::{self, Connection, Options, Reports, client, debug::DebugRecords, leader::Fence, web::Health},
    metrics::Metrics,
    process::{clock, limited},
};

use crate::net::Transport;

/// The namespace of the VMs.
pub const NAMESPACE: &str = "vms";

pub struct Manager {
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    task: JoinHandle<anyhow::Result<()>>,
    pub transport: Transport,
    // The manager ends without them.
    _config: watch::Sender<Arc<ReconcilerConfig>>,
    _termination: watch::Sender<bool>,
}

impl Manager {
    pub fn start(wall: Timestamp, since_boot: Duration) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        let transport = Transport::default();
        let reconciler = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
        let config = Config { reconciler: reconciler.clone(), ..Config::default() };
        let (config_sender, wanted) = watch::channel(Arc::new(reconciler));
        let (termination, terminated) = watch::channel(false);
        let options = Options {
            config: None,
            scope: Some(Scope::of(vec![NAMESPACE.to_owned()])),
            templates: None,
            listen: None,
            debug_endpoint: false,
            leader_election: false,
            identity: Some("manager".into()),
            web: None,
        };
        let carrier = transport.clone();
        let work = {
            let _context = runtime.enter();
            clock::follow_tokio(wall, since_boot);
            limited::do_without();
            let fence = Fence::default();
            let metrics = Arc::new(Metrics::new());
            let (health, _) = Health::new(metrics.clone());
            let builder = ClientBuilder::new(BoxService::new(carrier), NAMESPACE);
            let client = client::fenced_over(builder, fence.clone()).unwrap();
            let connection =
                Connection { client, fence, lease_client: None, home: NAMESPACE.into(), is_in_cluster: true };
            let reports = Reports { metrics, health, debug: DebugRecords::new(false) };
            manager::manage(options, (wanted, config), connection, reports, terminated)
        };
        let task = runtime.spawn(work);
        Self { runtime: Some(runtime), task, transport, _config: config_sender, _termination: termination }
    }

    /// Lets the manager do what it can, and then its clock goes on until `time` has passed or it sends a request.
    pub fn go_on(&self, wall: Timestamp, since_boot: Duration, time: Duration) {
        let Some(runtime) = &self.runtime else { return };
        runtime.block_on(async {
            clock::follow_tokio(wall, since_boot);
            sleep(time).await;
        });
        assert!(!self.task.is_finished(), "the manager has ended");
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
