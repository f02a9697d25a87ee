//! Events, written one after the other when there is nothing else to tell: no machine waits for its event, and a thousand
//! machines that are made at once have their Pods before the API server is kept busy with a thousand events.

use std::{
    collections::HashMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::Duration,
};

use k8s_openapi::{
    api::{core::v1::ObjectReference, events::v1::Event as K8sEvent},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, Patch, PatchParams, PostParams},
    runtime::events::{Event, EventType, Reporter},
};
use serde_json::json;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout_at},
};
use tracing::warn;

use crate::process::ErrorChain;

/// How many events may wait. More are dropped: whoever has so many reads none of them.
const WAITING: usize = 10_000;

/// For how long nothing new must be told before events are written, and how long the first waits at most.
const QUIET: Duration = Duration::from_millis(250);
const PATIENCE: Duration = Duration::from_secs(30);

/// The API server takes no longer note, in bytes
/// (<https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/>).
const LONGEST_NOTE: usize = 1024;

/// For how long what was told is counted when it is told again, as client-go does it.
const REMEMBERED: Duration = Duration::from_mins(6);

/// Takes events and writes them when there is time.
pub struct Teller(mpsc::Sender<Word>);

enum Word {
    Tell(Box<Event>, ObjectReference),
    /// Write what was told so far, now, and say so.
    Flush(oneshot::Sender<()>),
}

impl Teller {
    /// Writes events in the name of `reporter`.
    pub fn start(client: Client, reporter: Reporter) -> Self {
        let mut recorder = Recorder { client, reporter, told: HashMap::new() };
        let (sender, mut receiver) = mpsc::channel::<Word>(WAITING);
        tokio::spawn(async move {
            while let Some(first) = receiver.recv().await {
                for word in burst(first, &mut receiver, |word| matches!(word, Word::Flush(_))).await {
                    match word {
                        Word::Tell(event, regarding) => {
                            if let Err(error) = recorder.publish(*event, &regarding).await {
                                warn!(vm = regarding.name, error = %ErrorChain(&error), "an event could not be written");
                            }
                        }
                        // Who asked may have no more time.
                        Word::Flush(done) => drop(done.send(())),
                    }
                }
            }
        });
        Self(sender)
    }

    /// Tells of something that happened to an object.
    pub fn tell(&self, mut event: Event, regarding: ObjectReference) {
        if let Some(note) = &mut event.note {
            note.truncate(note.floor_char_boundary(LONGEST_NOTE));
        }
        if let Err(error) = self.0.try_send(Word::Tell(Box::new(event), regarding)) {
            warn!(%error, "an event was dropped");
        }
    }

    /// Returns when all that was told is written.
    pub async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.0.send(Word::Flush(done)).await.is_ok() {
            let _ = is_done.await;
        }
    }
}

/// Writes events, and counts what it is told again. Unlike the recorder of kube and that of client-go it takes two events for the
/// same only if their notes are, and it remembers no more than it needs of each.
struct Recorder {
    client: Client,
    reporter: Reporter,
    told: HashMap<u64, Told>,
}

struct Told {
    name: String,
    count: i32,
    last: Instant,
}

impl Recorder {
    async fn publish(&mut self, event: Event, regarding: &ObjectReference) -> Result<(), kube::Error> {
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
        let time = MicroTime(Timestamp::now());
        let now = Instant::now();
        self.told.retain(|_, told| now.duration_since(told.last) < REMEMBERED);
        if let Some(told) = self.told.get_mut(&key) {
            told.count += 1;
            told.last = now;
            let patch = Patch::Merge(json!({ "series": { "count": told.count, "lastObservedTime": time } }));
            match events.patch_metadata(&told.name, &PatchParams::default(), &patch).await {
                Ok(_) => return Ok(()),
                // Somebody has deleted it.
                Err(kube::Error::Api(answer)) if answer.code == 404 => {}
                Err(error) => return Err(error),
            }
        }
        let subject = regarding.name.as_deref().unwrap_or(&self.reporter.controller);
        // As kube and client-go call them.
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
        self.told.insert(key, Told { name, count: 1, last: now });
        Ok(())
    }
}

/// What is told without a pause, as long as the first can wait and nobody is in a hurry.
async fn burst<T>(first: T, receiver: &mut mpsc::Receiver<T>, hurries: impl Fn(&T) -> bool) -> Vec<T> {
    let end = Instant::now() + PATIENCE;
    let mut burst = vec![first];
    while !burst.last().is_some_and(&hurries)
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
    use crate::test_support::played;

    #[test]
    fn a_note_is_as_long_as_the_api_server_takes_it() {
        let (sender, mut receiver) = mpsc::channel(1);
        let event = Event {
            type_: EventType::Warning,
            reason: "Long".into(),
            note: Some("€".repeat(1000)),
            action: "Test".into(),
            secondary: None,
        };
        Teller(sender).tell(event, ObjectReference::default());
        let Ok(Word::Tell(event, _)) = receiver.try_recv() else { panic!("nothing told") };
        assert_eq!(event.note, Some("€".repeat(341)));
    }

    #[tokio::test]
    async fn what_is_told_again_is_counted_and_another_note_is_another_event() {
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let answer = {
            let asked = asked.clone();
            move |method: Method, body: String| async move {
                let body: Value = serde_json::from_str(&body).unwrap();
                let what = if body["note"].is_null() { &body["series"]["count"] } else { &body["note"] };
                asked.lock().unwrap().push(format!("{method} {what}"));
                // The third is not there any more.
                if body["series"]["count"] == 3 {
                    (StatusCode::NOT_FOUND, "")
                } else {
                    (StatusCode::OK, r#"{"metadata":{}}"#)
                }
            }
        };
        let client = Client::try_from(played(Router::new().fallback(answer)).await).unwrap();
        let mut recorder = Recorder { client, reporter: "test".into(), told: HashMap::new() };
        for note in ["a", "a", "b", "a", "b"] {
            let event = Event {
                type_: EventType::Normal,
                reason: "Same".into(),
                note: Some(note.into()),
                action: "Test".into(),
                secondary: None,
            };
            recorder.publish(event, &ObjectReference::default()).await.unwrap();
        }
        let expected = ["POST \"a\"", "PATCH 2", "POST \"b\"", "PATCH 3", "POST \"a\"", "PATCH 2"];
        assert_eq!(*asked.lock().unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn events_wait_for_a_pause_but_not_for_ever() {
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
        assert_eq!((long.first(), began.elapsed()), (Some(&4), PATIENCE));
        assert!(long.len() > 100, "{}", long.len());
        let first = receiver.recv().await.unwrap();
        assert_eq!(burst(first, &mut receiver, |number| *number == first + 2).await, [first, first + 1, first + 2]);
    }
}
