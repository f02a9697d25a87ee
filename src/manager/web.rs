//! What the manager answers over HTTP: probes, metrics and, if that is wanted, what it knows of each VM.
//!
//! Everybody who reaches the port may ask. So the answers come from a thread of their own, which does not hold up the work or the renewal
//! of the lease; the metrics need no VM to be read ([`crate::metrics::VmSummary`]); and the number and the duration of connections are
//! limited ([`ProbeListener`]).

use std::{
    fmt::Write,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use axum::{
    Router,
    extract::{Path, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::IntoResponse,
    routing::get,
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    time::timeout,
};

use tracing::error;

use super::debug::DebugRecords;
use crate::{
    metrics::Metrics,
    process::{connections::ProbeListener, lock},
};

/// How long the manager's main loop may take to answer. It never blocks, so this is long.
const ANSWER: Duration = Duration::from_secs(3);
/// How long one reconcile may take. Each of its requests ends after about a minute. This is long because a restart would not help.
const LONGEST_WORK: Duration = Duration::from_secs(600);

/// The state of a part that the manager needs to be ready.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Not ready, and why.
    Waiting(String),
    /// Ready, and how.
    Ready(String),
}

/// What the probes report.
pub struct Health {
    metrics: Arc<Metrics>,
    pings: mpsc::Sender<oneshot::Sender<()>>,
    parts: Mutex<Vec<(String, Readiness)>>,
}

/// Part of the readiness: the configuration.
pub const CONFIG: &str = "config";
/// Part of the readiness: the election.
pub const LEASE: &str = "lease";
/// Part of the readiness: the list of the VMs.
pub const VMS: &str = "vms";

impl Health {
    /// Nothing is ready yet. The main loop must answer the pings that it receives.
    pub fn new(metrics: Arc<Metrics>) -> (Arc<Self>, mpsc::Receiver<oneshot::Sender<()>>) {
        let (pings, receiver) = mpsc::channel(1);
        let parts = [CONFIG, LEASE, VMS].map(|part| (part.to_owned(), Readiness::Waiting("not begun".into())));
        (Arc::new(Self { metrics, pings, parts: Mutex::new(parts.into()) }), receiver)
    }

    /// Reports the state of a part.
    pub fn set(&self, part: &str, progress: Readiness) {
        let mut parts = lock(&self.parts);
        match parts.iter_mut().find(|(name, _)| name == part) {
            Some((_, known)) => *known = progress,
            None => parts.push((part.to_owned(), progress)),
        }
    }

    /// Whether all parts are ready and no watch is refused, and the state of each.
    fn ready(&self) -> (bool, String) {
        let parts = lock(&self.parts);
        let mut text = String::new();
        for (name, progress) in &*parts {
            // In the format of the API server's own probes.
            let _ = match progress {
                Readiness::Ready(how) => writeln!(text, "[+] {name}: {how}"),
                Readiness::Waiting(why) => writeln!(text, "[-] {name}: {why}"),
            };
        }
        let refused = self.metrics.refused_watches();
        for (watch, why) in &refused {
            let _ = writeln!(text, "[-] {watch}: {why}");
        }
        let is_ready = |progress: &Readiness| matches!(progress, Readiness::Ready(_));
        (refused.is_empty() && parts.iter().all(|(_, progress)| is_ready(progress)), text)
    }

    /// Whether the manager makes progress: the main loop answers, and no reconcile takes too long.
    async fn alive(&self, limit: Duration) -> Result<(), String> {
        let ping = async {
            let (answer, answered) = oneshot::channel();
            self.pings.send(answer).await.ok()?;
            answered.await.ok()
        };
        if timeout(limit, ping).await.ok().flatten().is_none() {
            return Err("the main loop does not answer".into());
        }
        let longest = self.metrics.longest_work();
        if longest > LONGEST_WORK {
            return Err(format!("one VM has been reconciled for {} s", longest.as_secs()));
        }
        Ok(())
    }
}

/// Part of the readiness that belongs to one of several watches.
#[derive(Clone)]
pub struct HealthPart {
    /// The whole.
    pub health: Arc<Health>,
    /// Which part.
    pub name: String,
}

impl HealthPart {
    /// Reports the state of this part.
    pub fn set(&self, readiness: Readiness) {
        self.health.set(&self.name, readiness);
    }
}

/// What is answered over HTTP.
pub struct Endpoints {
    /// Probes and metrics.
    pub health: Arc<Health>,
    /// What the manager knows of each VM, if it keeps that.
    pub debug: DebugRecords,
}

impl Endpoints {
    /// Listens on an address and answers in a thread of its own until the process ends. Returns the address with the port that was
    /// taken. `[::]` stands for all addresses, also on a host without IPv6.
    ///
    /// # Errors
    /// If the address cannot be listened on.
    pub async fn start(self, address: SocketAddr) -> io::Result<SocketAddr> {
        let listener = listen(address).await?.into_std()?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let routes = self.routes();
        thread::Builder::new().name("web".into()).spawn(move || {
            let server = async {
                let listener = ProbeListener::new(TcpListener::from_std(listener)?);
                axum::serve(listener, routes).await
            };
            if let Err(error) = runtime.block_on(server) {
                error!(%error, "probes and metrics are not answered any more");
            }
        })?;
        Ok(address)
    }

    fn routes(self) -> Router {
        let probes = probes(self.health);
        if self.debug.is_on() { probes.merge(debug(self.debug)) } else { probes }
    }
}

fn debug(records: DebugRecords) -> Router {
    let json =
        |value: &serde_json::Value| ([(CONTENT_TYPE, "application/json")], format!("{value:#}\n")).into_response();
    let all = move |State(records): State<DebugRecords>| async move { json(&records.vms()) };
    let one = move |State(records): State<DebugRecords>, Path((namespace, name)): Path<(String, String)>| async move {
        let vm = records.vm(&namespace, &name);
        vm.map_or_else(|| StatusCode::NOT_FOUND.into_response(), |vm| json(&vm))
    };
    Router::new().route("/debug/vms", get(all)).route("/debug/vms/{namespace}/{name}", get(one)).with_state(records)
}

async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error) if address.ip() == IpAddr::from([0; 16]) && error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        result => result,
    }
}

fn probes(health: Arc<Health>) -> Router {
    let live = |State(health): State<Arc<Health>>| async move {
        match health.alive(ANSWER).await {
            Ok(()) => (StatusCode::OK, "ok\n".to_owned()),
            Err(why) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{why}\n")),
        }
    };
    let ready = |State(health): State<Arc<Health>>| async move {
        let (ready, text) = health.ready();
        (if ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text)
    };
    let metrics = |State(health): State<Arc<Health>>| async move {
        let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        ([(CONTENT_TYPE, kind)], health.metrics.text()).into_response()
    };
    Router::new()
        .route("/livez", get(live))
        .route("/healthz", get(live))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(health)
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    #[test]
    fn the_manager_is_ready_when_all_parts_are() {
        let (health, _pings) = Health::new(Arc::new(Metrics::new()));
        health.set(CONFIG, Readiness::Ready("defaults".into()));
        health.set(VMS, Readiness::Ready("listed".into()));
        assert_eq!(health.ready(), (false, "[+] config: defaults\n[-] lease: not begun\n[+] vms: listed\n".to_owned()));
        health.set(LEASE, Readiness::Ready("held".into()));
        assert!(health.ready().0);
        health.set("vms of another namespace", Readiness::Waiting("not listed yet".into()));
        assert!(!health.ready().0);
    }

    #[tokio::test]
    async fn there_is_no_debug_endpoint_unless_it_is_wanted() {
        let status = async |is_wanted, path: &str| {
            let (health, _pings) = Health::new(Arc::new(Metrics::new()));
            let routes = Endpoints { health, debug: DebugRecords::new(is_wanted) }.routes();
            let request = axum::http::Request::get(path).body(axum::body::Body::empty()).unwrap();
            tower::ServiceExt::oneshot(routes, request).await.unwrap().status()
        };
        for path in ["/debug/vms", "/debug/vms/orchard/apple"] {
            assert_eq!(status(false, path).await, StatusCode::NOT_FOUND);
        }
        assert_eq!(status(true, "/debug/vms").await, StatusCode::OK);
        assert_eq!(status(true, "/debug/vms/orchard/apple").await, StatusCode::NOT_FOUND, "no such VM");
        assert_eq!(status(true, "/metrics").await, StatusCode::OK);
    }

    /// The test's runtime has one thread, which waits for the answer without letting others work.
    #[tokio::test]
    async fn metrics_are_answered_while_the_managers_own_threads_are_busy() {
        let (health, _pings) = Health::new(Arc::new(Metrics::new()));
        let endpoints = Endpoints { health, debug: DebugRecords::new(false) };
        let address = endpoints.start((Ipv4Addr::LOCALHOST, 0).into()).await.unwrap();
        let mut client = std::net::TcpStream::connect(address).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        client.write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).unwrap();
        assert!(answer.contains("vm_operator_leader 0"), "{answer}");
    }

    #[tokio::test]
    async fn a_main_loop_that_answers_is_alive() {
        let (health, mut pings) = Health::new(Arc::new(Metrics::new()));
        let answers = tokio::spawn(async move {
            let ping = pings.recv().await.unwrap();
            ping.send(()).unwrap();
            pings
        });
        assert_eq!(health.alive(ANSWER).await, Ok(()));
        // From now on nobody answers the pings.
        let _pings = answers.await.unwrap();
        assert_eq!(health.alive(Duration::from_millis(1)).await, Err("the main loop does not answer".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_reconcile_that_is_stuck_is_not_alive() {
        let metrics = Arc::new(Metrics::new());
        let (health, mut pings) = Health::new(metrics.clone());
        tokio::spawn(async move {
            while let Some(ping) = pings.recv().await {
                ping.send(()).unwrap();
            }
        });
        let work = metrics.begin("apple");
        tokio::time::advance(LONGEST_WORK).await;
        assert_eq!(health.alive(ANSWER).await, Ok(()));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(health.alive(ANSWER).await, Err("one VM has been reconciled for 601 s".into()));
        drop(work);
        assert_eq!(health.alive(ANSWER).await, Ok(()));
    }
}
