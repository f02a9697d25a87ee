//! Probes and metrics of the device plugin.

use std::{
    fmt::Write,
    io,
    net::SocketAddr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{Router, extract::State, http::StatusCode, routing::get};
use tokio::{net::TcpListener, sync::watch};
use tracing::error;

use super::resources::{Inventory, Resource};
use crate::process::lock;

/// The main loop looks at the node every few seconds. After this time without it the process is started again.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What probes and metrics report.
pub struct Health {
    last_look: Mutex<Instant>,
    registrations: AtomicU64,
    /// Why the resources are not registered. `None`: they are.
    unregistered: Mutex<Option<String>>,
    allocations: [AtomicUsize; Resource::ALL.len()],
    inventory: watch::Receiver<Inventory>,
}

impl Health {
    /// Nothing is registered yet.
    pub fn new(inventory: watch::Receiver<Inventory>) -> Self {
        Self {
            last_look: Mutex::new(Instant::now()),
            registrations: AtomicU64::new(0),
            unregistered: Mutex::new(Some("not registered yet".into())),
            allocations: Default::default(),
            inventory,
        }
    }

    /// The main loop has looked at the node.
    pub fn looked(&self) {
        *lock(&self.last_look) = Instant::now();
    }

    /// The kubelet knows the resources.
    pub fn registered(&self) {
        self.registrations.fetch_add(1, Ordering::Relaxed);
        *lock(&self.unregistered) = None;
    }

    /// The kubelet does not know the resources.
    pub fn not_registered(&self, why: String) {
        *lock(&self.unregistered) = Some(why);
    }

    /// Containers got a resource.
    pub fn count_allocations(&self, resource: Resource, containers: usize) {
        let at = Resource::ALL.iter().position(|it| *it == resource).unwrap_or_default();
        self.allocations[at].fetch_add(containers, Ordering::Relaxed);
    }

    fn metrics(&self) -> String {
        let inventory = self.inventory.borrow();
        let mut text = String::new();
        let mut metric = |name: &str, kind: &str, help: &str, samples: &[(String, u64)]| {
            let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {kind}");
            for (labels, value) in samples {
                let _ = writeln!(text, "{name}{labels} {value}");
            }
        };
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        let by_resource = |count: &dyn Fn(usize, Resource) -> usize| {
            let resources = Resource::ALL.into_iter().enumerate();
            let sample = |(at, resource): (usize, Resource)| {
                (format!("{{resource=\"{}\"}}", resource.name()), number(count(at, resource)))
            };
            resources.map(sample).collect::<Vec<_>>()
        };
        let devices = by_resource(&|_, resource| resource.count(&inventory));
        metric("vm_node_devices", "gauge", "How many containers of the node can have a resource.", &devices);
        let allocations = by_resource(&|at, _| self.allocations[at].load(Ordering::Relaxed));
        metric("vm_node_devices_allocations_total", "counter", "Containers that got a resource.", &allocations);
        let registrations = [(String::new(), self.registrations.load(Ordering::Relaxed))];
        metric("vm_node_devices_registrations_total", "counter", "Registrations at the kubelet.", &registrations);
        text
    }
}

/// Listens on an address and answers until the process ends.
///
/// # Errors
/// If the address cannot be listened on.
pub async fn start(health: Arc<Health>, address: SocketAddr) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    let live = |State(health): State<Arc<Health>>| async move {
        let pause = lock(&health.last_look).elapsed();
        if pause < LONGEST_PAUSE {
            (StatusCode::OK, "ok\n".to_owned())
        } else {
            (StatusCode::INTERNAL_SERVER_ERROR, format!("the node was last looked at {} s ago\n", pause.as_secs()))
        }
    };
    let ready = |State(health): State<Arc<Health>>| async move {
        match lock(&health.unregistered).as_ref() {
            None => (StatusCode::OK, "ok\n".to_owned()),
            Some(why) => (StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        }
    };
    let metrics = |State(health): State<Arc<Health>>| async move { health.metrics() };
    let routes = Router::new().route("/livez", get(live)).route("/readyz", get(ready)).route("/metrics", get(metrics));
    let routes = routes.with_state(health);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, routes).await {
            error!(%error, "probes and metrics are not answered any more");
        }
    });
    Ok(address)
}
