//! The network between a manager and the API server: requests that wait for the scheduler, answers on their way, and watches.

use std::{
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Bytes,
    http::{Request as HttpRequest, Response},
};
use futures::{
    FutureExt as _,
    channel::{mpsc, oneshot},
    future::BoxFuture,
};
use http_body_util::{BodyExt as _, Full};
use kube::client::{Body, DynBody};
use serde_json::{Value, json};
use tower::{BoxError, Service};

use crate::api::{
    kinds::kinds,
    request::{self, Answer, Body as PatchBody, Request, Verb},
    store::{Change, Store, metadata_only},
};

type Reply = Result<Response<Box<DynBody>>, BoxError>;

/// A request that the API server has not seen yet.
pub struct Sent {
    pub request: Result<Request, Answer>,
    /// What it is, for the trace. It has nothing that differs between two runs of a seed.
    pub text: String,
    /// Two of the same text differ in this.
    uri: String,
    /// The version that the API server had when it was sent.
    pub since: Option<u64>,
    reply: oneshot::Sender<Reply>,
}

/// An answer that the manager has not got yet.
pub struct Answered {
    pub answer: Answer,
    pub text: String,
    /// Up to this step of the run it is on its way.
    pub held: usize,
    reply: oneshot::Sender<Reply>,
}

/// What a watch reports of an object.
pub struct Event {
    pub version: u64,
    pub type_: &'static str,
    pub object: Arc<Value>,
}

/// A watch that is open.
pub struct Watch {
    pub request: Request,
    pub text: String,
    uri: String,
    /// The version up to which it has reported.
    pub seen: u64,
    /// The version up to which there is nothing for it after `seen`.
    passed: u64,
    /// When it began.
    pub began: Duration,
    /// Up to this step of the run it reports nothing.
    pub held: usize,
    events: mpsc::UnboundedSender<Result<Bytes, BoxError>>,
}

/// What is between one manager and the API server.
#[derive(Default)]
pub struct Net {
    pub sent: Vec<Sent>,
    pub answered: Vec<Answered>,
    pub watches: Vec<Watch>,
}

/// The manager's end.
#[derive(Clone, Default)]
pub struct Transport(pub Arc<Mutex<Net>>);

impl Service<HttpRequest<Body>> for Transport {
    type Response = Response<Box<DynBody>>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Reply>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, sent: HttpRequest<Body>) -> Self::Future {
        let net = self.0.clone();
        async move {
            let (parts, body) = sent.into_parts();
            let body = body.collect_bytes().await?;
            let request = request::read(&parts, &body);
            let text = request.as_ref().map_or_else(|_| format!("{} {}", parts.method, parts.uri), describe);
            let (uri, (reply, replied)) = (parts.uri.to_string(), oneshot::channel());
            net.lock().unwrap().sent.push(Sent { request, text, uri, since: None, reply });
            replied.await.unwrap_or_else(|_| Err("connection closed".into()))
        }
        .boxed()
    }
}

/// A request in a few words.
fn describe(request: &Request) -> String {
    let verb = match &request.verb {
        Verb::Get => "get",
        Verb::List { .. } => "list",
        Verb::Watch { .. } => "watch",
        Verb::Create(_) => "create",
        Verb::Replace(_) => "replace",
        Verb::Patch(PatchBody::Apply { .. }) => "apply",
        Verb::Patch(_) => "patch",
        Verb::Delete(_) => "delete",
        Verb::Discover => "discover",
    };
    let name = match &request.verb {
        // Nothing depends on the order of events that were recorded at once.
        _ if kinds()[request.target.kind].name == "NewEvent" => "",
        Verb::Create(object) => object["metadata"]["name"].as_str().unwrap_or_default(),
        _ => &request.target.name,
    };
    let part = if request.subresource.is_empty() { "" } else { " status" };
    let dry = if request.dry_run { " (dry run)" } else { "" };
    format!("{verb} {} {name}{part}{dry}", kinds()[request.target.kind].name)
}

impl Net {
    /// Puts what is new into an order that does not depend on the order of hash maps in the manager. What nobody waits for is left out.
    pub fn sort(&mut self, version: u64) {
        for sent in &mut self.sent {
            sent.since = sent.since.or(Some(version));
        }
        self.sent.retain(|sent| !sent.reply.is_canceled());
        self.answered.retain(|answered| !answered.reply.is_canceled());
        self.watches.retain(|watch| !watch.events.is_closed());
        self.sent.sort_by(|one, other| (&one.text, &one.uri).cmp(&(&other.text, &other.uri)));
        self.watches.sort_by(|one, other| (&one.text, &one.uri).cmp(&(&other.text, &other.uri)));
    }

    /// The connection breaks before the answer.
    pub fn cut(reply: Sent) {
        let _ = reply.reply.send(Err("connection reset".into()));
    }

    pub fn lose(answered: Answered) {
        let _ = answered.reply.send(Err("connection reset".into()));
    }

    pub fn deliver(answered: Answered) {
        let _ = answered.reply.send(Ok(response(&answered.answer)));
    }

    /// The API server has done what was asked.
    pub fn done(&mut self, sent: Sent, answer: Answer) {
        self.answered.push(Answered { answer, text: sent.text, held: 0, reply: sent.reply });
    }

    /// Begins a watch, or refuses it because the version is too old.
    pub fn begin_watch(&mut self, sent: Sent, request: Request, store: &Store, now: Duration) {
        let Verb::Watch { from, .. } = request.verb else { return };
        let seen = from.unwrap_or_else(|| store.version());
        let (events, stream) = mpsc::unbounded();
        let answer = Response::builder().header("content-type", "application/json");
        let body: Box<DynBody> = Box::new(axum::body::Body::from_stream(stream).map_err(Into::into));
        let Ok(answer) = answer.body(body) else { return };
        let _ = sent.reply.send(Ok(answer));
        let watch = Watch { request, text: sent.text, uri: sent.uri, seen, passed: seen, began: now, held: 0, events };
        if seen < store.compacted {
            watch.expire();
        } else {
            self.watches.push(watch);
        }
    }
}

impl Watch {
    /// The next event.
    pub fn next(&mut self, store: &Store) -> Option<Event> {
        let place = &self.request.target;
        let later = store.changes.partition_point(|change| change.version <= self.seen.max(self.passed));
        for change in &store.changes[later..] {
            let is_here = change.target.kind == place.kind
                && (place.namespace.is_empty() || change.target.namespace == place.namespace);
            if let Some(event) = is_here.then(|| self.event(change)).flatten() {
                return Some(event);
            }
            self.passed = change.version;
        }
        None
    }

    fn event(&self, change: &Change) -> Option<Event> {
        let is_selected =
            |object: &Option<Arc<Value>>| object.as_ref().is_some_and(|object| self.request.selector.selects(object));
        let (type_, object) = match (is_selected(&change.before), is_selected(&change.after)) {
            (false, false) => return None,
            (false, true) => ("ADDED", change.last.clone()),
            (true, true) => ("MODIFIED", change.last.clone()),
            (true, false) if change.after.is_none() => ("DELETED", change.last.clone()),
            // It is as it was selected last.
            (true, false) => {
                let mut gone = (**change.before.as_ref()?).clone();
                gone["metadata"]["resourceVersion"] = change.version.to_string().into();
                ("DELETED", gone.into())
            }
        };
        Some(Event { version: change.version, type_, object })
    }

    /// Reports the next event.
    pub fn deliver(&mut self, event: &Event) {
        self.seen = event.version;
        if self.request.metadata_only {
            self.send(event.type_, &metadata_only((*event.object).clone()));
        } else {
            self.send(event.type_, &event.object);
        }
    }

    /// Says up to where the watch has reported. Nothing else has happened before.
    pub fn bookmark(&mut self, version: u64) {
        self.seen = version;
        let kind = &kinds()[self.request.target.kind];
        let metadata = json!({ "resourceVersion": version.to_string() });
        self.send("BOOKMARK", &json!({ "kind": kind.name, "apiVersion": kind.api_version(), "metadata": metadata }));
    }

    pub fn wants_bookmarks(&self) -> bool {
        matches!(self.request.verb, Verb::Watch { bookmarks: true, .. })
    }

    /// The version from which it would go on is too old.
    pub fn expire(self) {
        let message = "too old resource version";
        let answer = Answer::failure(410, "Expired", message, json!({}));
        self.send("ERROR", &answer.body);
    }

    /// The connection breaks.
    pub fn cut(self) {
        let _ = self.events.unbounded_send(Err("connection reset".into()));
    }

    fn send(&self, type_: &str, object: &Value) {
        // The type comes first, as from the API server: kube reads some objects only then.
        let line = Bytes::from(format!("{{\"type\":\"{type_}\",\"object\":{object}}}\n"));
        let _ = self.events.unbounded_send(Ok(line));
    }
}

fn response(answer: &Answer) -> Response<Box<DynBody>> {
    let body = Full::new(Bytes::from(answer.body.to_string())).map_err(|never| match never {});
    let mut response: Response<Box<DynBody>> = Response::new(Box::new(body));
    *response.status_mut() = answer.code.try_into().unwrap_or_default();
    if answer.code == 429
        && let Ok(second) = "1".try_into()
    {
        response.headers_mut().insert("retry-after", second);
    }
    response
}
