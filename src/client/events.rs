//! Kubernetes events, written in the background.
//!
//! Nothing waits for an event to be written, and events are written one at a time, after a pause in which none was recorded.
//! So 1,000 VMs that are created at once have their Pods before the API server gets 1,000 events.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event as K8sEvent},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
    runtime::events::{Event as KubeEvent, EventType, Reporter},
};
use serde_json::json;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout_at},
};
use tracing::warn;

use crate::{
    api::{
        full_name,
        reasons::{Effect, Event},
    },
    process::{ErrorChain, clock},
};

/// How many events may wait to be written. More are dropped: nobody reads so many.
const WAITING: usize = 10_000;

/// For how long no event must be recorded before events are written.
const QUIET: Duration = Duration::from_millis(250);
/// How long an event waits at most for that pause.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// The longest note that the API server accepts, in bytes
/// (<https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/>).
const LONGEST_NOTE: usize = 1024;

/// For how long the same event is counted instead of written anew, as in client-go.
const REMEMBERED: Duration = Duration::from_mins(6);

/// Takes events and writes them in the background.
pub struct EventRecorder(mpsc::Sender<Request>);

enum Request {
    Record(Box<KubeEvent>, ObjectReference),
    /// Write all events so far at once, and answer when that is done.
    Flush(oneshot::Sender<()>),
}

impl EventRecorder {
    /// Writes events in the name of `reporter`.
    pub fn start(client: Client, reporter: Reporter) -> Self {
        let mut writer = Writer { client, reporter, written: HashMap::new() };
        let (sender, mut receiver) = mpsc::channel::<Request>(WAITING);
        tokio::spawn(async move {
            while let Some(first) = receiver.recv().await {
                for request in burst(first, &mut receiver, |request| matches!(request, Request::Flush(_))).await {
                    match request {
                        Request::Record(event, regarding) => {
                            if let Err(error) = writer.write(*event, &regarding).await {
                                let ObjectReference { kind, namespace, name, .. } = &regarding;
                                let name = full_name(namespace.as_deref(), name.as_deref().unwrap_or_default());
                                let object = format!("{} {name}", kind.as_deref().unwrap_or_default());
                                warn!(object, error = %ErrorChain(&error), "an event could not be written");
                            }
                        }
                        // The receiver may have been dropped after a timeout.
                        Request::Flush(done) => drop(done.send(())),
                    }
                }
            }
        });
        Self(sender)
    }

    /// Records an event about an object with a reason of a condition.
    pub fn record(&self, event: Event, regarding: ObjectReference) {
        let Event { reason, note, action } = event;
        let type_ = if reason.effect() == Effect::Warning { EventType::Warning } else { EventType::Normal };
        let event = KubeEvent {
            type_,
            reason: reason.as_str().into(),
            note: Some(note),
            action: action.into(),
            secondary: None,
        };
        self.publish(event, regarding);
    }

    /// Records an event about an object. A note that is too long is cut.
    pub fn publish(&self, mut event: KubeEvent, regarding: ObjectReference) {
        if let Some(note) = &mut event.note {
            note.truncate(note.floor_char_boundary(LONGEST_NOTE));
        }
        if let Err(error) = self.0.try_send(Request::Record(Box::new(event), regarding)) {
            warn!(%error, "an event was dropped");
        }
    }

    /// Returns when all events that were recorded so far are written.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.0.send(Request::Flush(done)).await.is_ok() {
            let _ = is_done.await;
        }
    }
}

/// Writes events. The same event within [`REMEMBERED`] is counted in its series instead of written anew. Unlike the recorders of
/// kube and client-go, two events are the same only if their notes are too, and no more is kept of each than a hash, its name and
/// its count.
struct Writer {
    client: Client,
    reporter: Reporter,
    /// By the hash of what makes two events the same.
    written: HashMap<u64, Written>,
}

struct Written {
    name: String,
    count: i32,
    last: Instant,
}

impl Writer {
    async fn write(&mut self, event: KubeEvent, regarding: &ObjectReference) -> Result<(), kube::Error> {
        let namespace = regarding.namespace.as_deref().unwrap_or("default");
        let events: Api<K8sEvent> = Api::namespaced(self.client.clone(), namespace);
        let type_ = match event.type_ {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        };
        let mut hasher = DefaultHasher::new();
        (&regarding.uid, &regarding.name, namespace, type_, &event.reason, &event.action, &event.note)
            .hash(&mut hasher);
        let key = hasher.finish();
        let time = MicroTime(clock::now());
        let now = Instant::now();
        self.written.retain(|_, written| now.duration_since(written.last) < REMEMBERED);
        if let Some(written) = self.written.get_mut(&key) {
            written.count += 1;
            written.last = now;
            let patch = Patch::Merge(json!({ "series": { "count": written.count, "lastObservedTime": time } }));
            match events.patch_metadata(&written.name, &PatchParams::default(), &patch).await {
                Ok(_) => return Ok(()),
                // The event was deleted; write it anew.
                Err(kube::Error::Api(answer)) if answer.code == 404 => {}
                Err(error) => return Err(error),
            }
        }
        let subject = regarding.name.as_deref().unwrap_or(&self.reporter.controller);
        // The form of name that kube and client-go use.
        let name = format!("{subject}.{:x}", time.0.as_nanosecond());
        let instance = self.reporter.instance.as_ref().unwrap_or(&self.reporter.controller);
        let new = K8sEvent {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                namespace: Some(namespace.to_owned()),
                ..ObjectMeta::default()
            },
            action: Some(event.action),
            event_time: Some(time),
            note: event.note,
            reason: Some(event.reason),
            regarding: Some(regarding.clone()),
            related: event.secondary,
            reporting_controller: Some(self.reporter.controller.clone()),
            reporting_instance: Some(instance.clone()),
            type_: Some(type_.to_owned()),
            ..K8sEvent::default()
        };
        events.create(&PostParams::default(), &new).await?;
        self.written.insert(key, Written { name, count: 1, last: now });
        Ok(())
    }
}

/// Collects items until none comes for [`QUIET`], for [`LONGEST_WAIT`] at most, or until one is urgent.
async fn burst<T>(first: T, receiver: &mut mpsc::Receiver<T>, is_urgent: impl Fn(&T) -> bool) -> Vec<T> {
    let end = Instant::now() + LONGEST_WAIT;
    let mut burst = vec![first];
    while !burst.last().is_some_and(&is_urgent)
        && let Ok(Some(next)) = timeout_at(end.min(Instant::now() + QUIET), receiver.recv()).await
    {
        burst.push(next);
    }
    burst
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{
        Router,
        http::{Method, StatusCode},
    };
    use serde_json::Value;

    use super::*;
    use crate::{api::Reason, test_support::played};

    #[test]
    fn a_note_is_cut_to_what_the_api_server_accepts() {
        let (sender, mut receiver) = mpsc::channel(1);
        let event = Event { reason: Reason::Unreadable, note: "€".repeat(1000), action: "Test" };
        EventRecorder(sender).record(event, ObjectReference::default());
        let Ok(Request::Record(event, _)) = receiver.try_recv() else { panic!("no event") };
        assert_eq!(event.note, Some("€".repeat(341)));
    }

    #[tokio::test]
    async fn the_same_event_is_counted_and_another_note_is_another_event() {
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let answer = {
            let asked = asked.clone();
            move |method: Method, body: String| async move {
                let body: Value = serde_json::from_str(&body).unwrap();
                let what = if body["note"].is_null() { &body["series"]["count"] } else { &body["note"] };
                asked.lock().unwrap().push(format!("{method} {what}"));
                // The event was deleted before its third time.
                if body["series"]["count"] == 3 {
                    (StatusCode::NOT_FOUND, "")
                } else {
                    (StatusCode::OK, r#"{"metadata":{}}"#)
                }
            }
        };
        let client = Client::try_from(played(Router::new().fallback(answer)).await).unwrap();
        let mut writer = Writer { client, reporter: "test".into(), written: HashMap::new() };
        for note in ["a", "a", "b", "a", "b"] {
            let event = KubeEvent {
                type_: EventType::Normal,
                reason: "Same".into(),
                note: Some(note.into()),
                action: "Test".into(),
                secondary: None,
            };
            writer.write(event, &ObjectReference::default()).await.unwrap();
        }
        let expected = ["POST \"a\"", "PATCH 2", "POST \"b\"", "PATCH 3", "POST \"a\"", "PATCH 2"];
        assert_eq!(*asked.lock().unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn events_wait_for_a_pause_but_not_forever() {
        let (sender, mut receiver) = mpsc::channel(WAITING);
        tokio::spawn(async move {
            for number in 1.. {
                // Three at once and a pause, then one after the other without end.
                let pause = if number == 3 {
                    2 * QUIET
                } else if number < 3 {
                    Duration::ZERO
                } else {
                    QUIET / 2
                };
                if sender.send(number).await.is_err() {
                    return;
                }
                tokio::time::sleep(pause).await;
            }
        });
        let first = receiver.recv().await.unwrap();
        assert_eq!(burst(first, &mut receiver, |_| false).await, [1, 2, 3]);
        let first = receiver.recv().await.unwrap();
        let began = Instant::now();
        let long = burst(first, &mut receiver, |_| false).await;
        assert_eq!((long.first(), began.elapsed()), (Some(&4), LONGEST_WAIT));
        assert!(long.len() > 100, "{}", long.len());
        let first = receiver.recv().await.unwrap();
        assert_eq!(burst(first, &mut receiver, |number| *number == first + 2).await, [first, first + 1, first + 2]);
    }
}
