//! What the manager answers over HTTP: probes and metrics.

use std::{
    fmt::Write,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    extract::State,
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

use crate::{metrics::Metrics, process::lock};

/// How long the manager's main loop may take to answer. It never waits for anything but events, so this is long.
const ANSWER: Duration = Duration::from_secs(3);
/// How long one look at one machine may take. Each of its requests ends after a minute or so; this is so long because there is
/// nothing that a restart would do better.
const LONGEST_WORK: Duration = Duration::from_secs(600);

/// How far the manager is with one of the things that it needs to be of use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It waits for this.
    Waiting(String),
    /// It is done; this is how it stands.
    Ready(String),
}

/// What the probes are told.
pub struct Health {
    metrics: Arc<Metrics>,
    pings: mpsc::Sender<oneshot::Sender<()>>,
    parts: Mutex<Vec<(String, Readiness)>>,
}

/// The part of the readiness that is the configuration.
pub const CONFIG: &str = "config";
/// The part that is the election.
pub const LEASE: &str = "lease";
/// The part that is the list of the machines.
pub const MACHINES: &str = "machines";

impl Health {
    /// Nothing is ready yet. The main loop answers to what it receives.
    pub fn new(metrics: Arc<Metrics>) -> (Arc<Self>, mpsc::Receiver<oneshot::Sender<()>>) {
        let (pings, receiver) = mpsc::channel(1);
        let parts = [CONFIG, LEASE, MACHINES].map(|part| (part.to_owned(), Readiness::Waiting("not begun".into())));
        (Arc::new(Self { metrics, pings, parts: Mutex::new(parts.into()) }), receiver)
    }

    /// Says how it stands with a part.
    pub fn set(&self, part: &str, progress: Readiness) {
        let mut parts = lock(&self.parts);
        match parts.iter_mut().find(|(name, _)| name == part) {
            Some((_, known)) => *known = progress,
            None => parts.push((part.to_owned(), progress)),
        }
    }

    /// Whether the manager is of use, and the reasons.
    fn ready(&self) -> (bool, String) {
        let parts = lock(&self.parts);
        let mut text = String::new();
        for (name, progress) in &*parts {
            // As the API server's own probes look.
            let _ = match progress {
                Readiness::Ready(how) => writeln!(text, "[+] {name}: {how}"),
                Readiness::Waiting(why) => writeln!(text, "[-] {name}: {why}"),
            };
        }
        (parts.iter().all(|(_, progress)| matches!(progress, Readiness::Ready(_))), text)
    }

    /// Whether the manager still gets on with its work: the loop answers, and no machine is looked at for ever.
    async fn alive(&self, patience: Duration) -> Result<(), String> {
        let ping = async {
            let (answer, answered) = oneshot::channel();
            self.pings.send(answer).await.ok()?;
            answered.await.ok()
        };
        if timeout(patience, ping).await.ok().flatten().is_none() {
            return Err("the main loop does not answer".into());
        }
        let longest = self.metrics.longest_work();
        if longest > LONGEST_WORK {
            return Err(format!("one machine has been in work for {} s", longest.as_secs()));
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

/// Listens on an address and answers in the background until the process ends. Returns the address with the port that was taken.
/// `[::]` stands for all addresses, also on a host without IPv6.
///
/// # Errors
/// If the address cannot be listened on.
pub async fn start(address: SocketAddr, health: Arc<Health>) -> io::Result<SocketAddr> {
    let listener = listen(address).await?;
    let address = listener.local_addr()?;
    let server = axum::serve(listener, routes(health));
    tokio::spawn(async move {
        if let Err(error) = server.await {
            error!(%error, "probes and metrics are not answered any more");
        }
    });
    Ok(address)
}

async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error) if address.ip() == IpAddr::from([0; 16]) && error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        result => result,
    }
}

fn routes(health: Arc<Health>) -> Router {
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
    use super::*;

    #[test]
    fn ready_is_when_all_parts_are() {
        let (health, _pings) = Health::new(Arc::new(Metrics::new()));
        health.set(CONFIG, Readiness::Ready("defaults".into()));
        health.set(MACHINES, Readiness::Ready("listed".into()));
        assert_eq!(
            health.ready(),
            (false, "[+] config: defaults\n[-] lease: not begun\n[+] machines: listed\n".to_owned())
        );
        health.set(LEASE, Readiness::Ready("held".into()));
        assert!(health.ready().0);
        health.set("machines of another namespace", Readiness::Waiting("not listed yet".into()));
        assert!(!health.ready().0);
    }

    #[tokio::test]
    async fn alive_is_who_answers() {
        let (health, mut pings) = Health::new(Arc::new(Metrics::new()));
        let answers = tokio::spawn(async move {
            let ping = pings.recv().await.unwrap();
            ping.send(()).unwrap();
            pings
        });
        assert_eq!(health.alive(ANSWER).await, Ok(()));
        // From now on nobody takes the pings.
        let _pings = answers.await.unwrap();
        assert_eq!(health.alive(Duration::from_millis(1)).await, Err("the main loop does not answer".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_is_stuck_is_no_life() {
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
        assert_eq!(health.alive(ANSWER).await, Err("one machine has been in work for 601 s".into()));
        drop(work);
        assert_eq!(health.alive(ANSWER).await, Ok(()));
    }
}
