//! A proxy in front of the API server that cuts watches, refuses requests and loses answers.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::unwrap_used, reason = "this is test code")]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    body::Body,
    extract::{Request, State},
    response::Response,
};
use futures::{Stream, StreamExt, stream};
use http_body_util::BodyExt;
use kube::Client;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::sync::watch;

/// Which faults the proxy injects: of 100 requests, how many meet each of them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// 429 with Retry-After, the request does not arrive.
    pub too_many: u8,
    /// 503 with Retry-After, the request does not arrive.
    pub unavailable: u8,
    /// 500, although the API server has carried out the request.
    pub lost_answer: u8,
    /// A watch begins with the error 410: the client must list again.
    pub gone: u8,
    /// The longest time before a watch is cut; `None`: never.
    pub watch: Option<Duration>,
    /// How many lists of each kind are truncated in the middle.
    pub half_lists: u8,
}

/// The proxy.
pub struct Proxy {
    shared: Arc<Shared>,
    folder: TempDir,
    task: tokio::task::JoinHandle<()>,
}

struct Shared {
    client: Client,
    faults: Mutex<Option<Faults>>,
    /// Requests whose address contains this text are answered with 503, and do not arrive.
    refused: Mutex<Option<&'static str>>,
    /// Writes wait here. One whose client closes its connection meanwhile does not arrive.
    holds_writes: watch::Sender<bool>,
    /// What watches of addresses with this text report waits here.
    holds_watches: watch::Sender<Option<&'static str>>,
    random: Mutex<fastrand::Rng>,
    /// Writes that the API server carried out and answered, by method and path.
    writes: Mutex<BTreeMap<String, u32>>,
    /// Lists, by method and path.
    lists: Mutex<BTreeMap<String, u8>>,
    /// The addresses of watches that have begun.
    watches: Mutex<Vec<String>>,
    injected: Mutex<BTreeMap<&'static str, u32>>,
}

impl Proxy {
    /// A proxy for the API server of the client.
    pub async fn start(client: Client, seed: u64, faults: Faults) -> Self {
        let shared = Arc::new(Shared {
            client,
            faults: Mutex::new(Some(faults)),
            refused: Mutex::default(),
            holds_writes: watch::Sender::new(false),
            holds_watches: watch::Sender::new(None),
            random: Mutex::new(fastrand::Rng::with_seed(seed)),
            writes: Mutex::default(),
            lists: Mutex::default(),
            watches: Mutex::default(),
            injected: Mutex::default(),
        });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let folder = TempDir::new().unwrap();
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "proxy",
            "clusters": [{ "name": "proxy", "cluster": { "server": format!("http://{address}") } }],
            "users": [{ "name": "proxy", "user": {} }],
            "contexts": [{ "name": "proxy", "context": { "cluster": "proxy", "user": "proxy" } }],
        });
        std::fs::write(folder.path().join("kubeconfig"), kubeconfig.to_string()).unwrap();
        let app = axum::Router::new().fallback(pass).with_state(shared.clone());
        let task = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { shared, folder, task }
    }

    /// A kubeconfig for the proxy.
    pub fn kubeconfig(&self) -> PathBuf {
        Path::join(self.folder.path(), "kubeconfig")
    }

    /// Injects no faults from now on.
    pub fn calm(&self) {
        *self.shared.faults.lock().unwrap() = None;
    }

    /// Refuses requests whose address contains a text, or none any more.
    pub fn refuse(&self, text: Option<&'static str>) {
        *self.shared.refused.lock().unwrap() = text;
    }

    /// Holds all writes that arrive from now on, or lets the held ones go on.
    pub fn hold_writes(&self, holds: bool) {
        self.shared.holds_writes.send_replace(holds);
    }

    /// Holds what watches of addresses with a text report from now on, or lets all of it go on.
    pub fn hold_watches(&self, text: Option<&'static str>) {
        self.shared.holds_watches.send_replace(text);
    }

    /// Writes that were carried out and answered, by method and path. A write whose answer was lost is not counted.
    pub fn writes(&self) -> BTreeMap<String, u32> {
        self.shared.writes.lock().unwrap().clone()
    }

    /// How often each kind was listed, by method and path.
    pub fn lists(&self) -> BTreeMap<String, u8> {
        self.shared.lists.lock().unwrap().clone()
    }

    /// Whether a watch of an address with this text has begun: what was there before has been listed.
    pub fn has_watch(&self, text: &str) -> bool {
        self.shared.watches.lock().unwrap().iter().any(|address| address.contains(text))
    }

    /// How often each fault was injected.
    pub fn injected(&self) -> BTreeMap<&'static str, u32> {
        self.shared.injected.lock().unwrap().clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Shared {
    fn inject(&self, fault: &'static str) {
        *self.injected.lock().unwrap().entry(fault).or_default() += 1;
    }
}

fn status(code: u16, reason: &str) -> Value {
    let message = "a test says so";
    json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message })
}

fn refusal(code: u16, reason: &str) -> Response {
    let response = Response::builder().status(code).header("content-type", "application/json");
    let response = if [429, 503].contains(&code) { response.header("retry-after", "1") } else { response };
    response.body(Body::from(status(code, reason).to_string())).unwrap()
}

/// Events of a watch, which wait while those of its address are held.
fn held_back<S: Stream>(
    events: S,
    held: watch::Receiver<Option<&'static str>>,
    address: String,
) -> impl Stream<Item = S::Item> {
    events.then(move |event| {
        let (mut held, address) = (held.clone(), address.clone());
        async move {
            held.wait_for(|text| !text.is_some_and(|text| address.contains(text))).await.unwrap();
            event
        }
    })
}

async fn pass(State(shared): State<Arc<Shared>>, request: Request) -> Response {
    let faults = *shared.faults.lock().unwrap();
    let (parts, body) = request.into_parts();
    let asks = |what: &str| parts.uri.query().is_some_and(|query| query.contains(what));
    let is_watch = asks("watch=true");
    let is_write = parts.method != http::Method::GET;
    let of_all = ["vms", "pods", "persistentvolumeclaims", "configmaps", "secrets", "services"];
    // Only lists of all objects of a kind, not those with a selector.
    let is_list = !asks("fieldSelector=")
        && !asks("instance%3D")
        && !is_write
        && !is_watch
        && of_all.iter().any(|kind| parts.uri.path().ends_with(&format!("/{kind}")));
    let what = format!("{} {}", parts.method, parts.uri.path());
    let refused = *shared.refused.lock().unwrap();
    if refused.is_some_and(|text| parts.uri.to_string().contains(text)) {
        return refusal(503, "ServiceUnavailable");
    }
    let address = parts.uri.to_string();
    let body = body.collect().await.unwrap().to_bytes();
    let request = http::Request::from_parts(parts, kube::client::Body::from(body));
    let dice = shared.random.lock().unwrap().u8(0..100);
    let (mut lose, mut half) = (false, false);
    if let Some(faults) = faults {
        let mut upto = 0;
        let mut hit = |share: u8| {
            let is_hit = (upto..upto + share).contains(&dice);
            upto += share;
            is_hit
        };
        if hit(faults.too_many) {
            shared.inject("429");
            return refusal(429, "TooManyRequests");
        }
        if hit(faults.unavailable) {
            shared.inject("503");
            return refusal(503, "ServiceUnavailable");
        }
        if hit(faults.lost_answer) && is_write {
            lose = true;
        }
        if hit(faults.gone) && is_watch {
            shared.inject("410");
            let event = json!({ "type": "ERROR", "object": status(410, "Expired") });
            return Response::new(Body::from(format!("{event}\n")));
        }
        if is_list {
            let mut lists = shared.lists.lock().unwrap();
            let lists = lists.entry(what.clone()).or_default();
            half = *lists < faults.half_lists;
            *lists += 1;
        }
    }
    if is_write && *shared.holds_writes.borrow() {
        shared.inject("held write");
        shared.holds_writes.subscribe().wait_for(|holds| !holds).await.unwrap();
    }
    let Ok(answer) = shared.client.send(request).await else {
        return refusal(502, "BadGateway");
    };
    if is_write && !lose && answer.status().is_success() {
        *shared.writes.lock().unwrap().entry(what).or_default() += 1;
    }
    if lose {
        shared.inject("lost answer");
        return refusal(500, "InternalError");
    }
    let answer = answer.map(Body::new);
    if half {
        shared.inject("half a list");
        let (head, body) = answer.into_parts();
        let text = body.collect().await.unwrap().to_bytes();
        let half = stream::iter([Ok(text.slice(..text.len() / 2))]);
        // After a pause, so that the first half is sent.
        let broken = stream::once(async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Err(std::io::Error::from(std::io::ErrorKind::BrokenPipe))
        });
        return Response::from_parts(head, Body::from_stream(half.chain(broken)));
    }
    let answer = if is_watch {
        shared.watches.lock().unwrap().push(address.clone());
        let held = shared.holds_watches.subscribe();
        answer.map(|body| Body::from_stream(held_back(body.into_data_stream(), held, address)))
    } else {
        answer
    };
    match faults.and_then(|faults| faults.watch) {
        Some(longest) if is_watch => {
            shared.inject("cut watch");
            let most = u64::try_from(longest.as_millis()).unwrap();
            let life = Duration::from_millis(shared.random.lock().unwrap().u64(most / 10..most));
            let end = Box::pin(tokio::time::sleep(life));
            answer.map(|body| Body::from_stream(body.into_data_stream().take_until(end)))
        }
        _ => answer,
    }
}
