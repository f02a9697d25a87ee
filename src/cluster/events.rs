//! Events, written one after the other when there is nothing else to tell: no machine waits for its event, and a thousand
//! machines that are made at once have their Pods before the API server is kept busy with a thousand events.

use std::{collections::HashMap, time::Duration};

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, Recorder, Reporter},
};
use tokio::{
    sync::mpsc,
    time::{Instant, timeout_at},
};
use tracing::warn;

use super::watch::Chain;

/// How many events may wait. More are dropped: whoever has so many reads none of them.
const WAITING: usize = 10_000;

/// For how long nothing new must be told before events are written, and how long the first waits at most.
const QUIET: Duration = Duration::from_millis(250);
const PATIENCE: Duration = Duration::from_secs(30);

/// For how long a recorder remembers what it was told.
const REMEMBERED: Duration = Duration::from_mins(6);

/// The API server takes no longer note, in bytes
/// (<https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/>).
const LONGEST_NOTE: usize = 1024;

/// Takes events and writes them when there is time. What still waits when the manager ends is lost.
pub struct Teller(mpsc::Sender<(Event, ObjectReference)>);

impl Teller {
    /// Writes events in the name of `reporter`.
    pub fn start(client: Client, reporter: Reporter) -> Self {
        let mut recorders = Recorders { client, reporter, by_note: HashMap::new() };
        let (sender, mut receiver) = mpsc::channel::<(Event, ObjectReference)>(WAITING);
        tokio::spawn(async move {
            while let Some(first) = receiver.recv().await {
                for (event, regarding) in burst(first, &mut receiver).await {
                    let recorder = recorders.of(event.note.as_deref().unwrap_or_default());
                    if let Err(error) = recorder.publish(&event, &regarding).await {
                        warn!(vm = regarding.name, error = %Chain(&error), "an event could not be written");
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
        if let Err(error) = self.0.try_send((event, regarding)) {
            warn!(%error, "an event was dropped");
        }
    }
}

/// A recorder counts what it is told again within six minutes, and takes for the same what has the same reason, whatever it notes. So
/// there is one for each note.
struct Recorders {
    client: Client,
    reporter: Reporter,
    by_note: HashMap<String, (Recorder, Instant)>,
}

impl Recorders {
    fn of(&mut self, note: &str) -> &Recorder {
        self.by_note.retain(|_, (_, used)| used.elapsed() < REMEMBERED);
        let new = || Recorder::new(self.client.clone(), self.reporter.clone());
        let (recorder, used) = self.by_note.entry(note.to_owned()).or_insert_with(|| (new(), Instant::now()));
        *used = Instant::now();
        recorder
    }
}

/// What is told without a pause, as long as the first can wait.
async fn burst<T>(first: T, receiver: &mut mpsc::Receiver<T>) -> Vec<T> {
    let end = Instant::now() + PATIENCE;
    let mut burst = vec![first];
    while let Ok(Some(next)) = timeout_at(end.min(Instant::now() + QUIET), receiver.recv()).await {
        burst.push(next);
    }
    burst
}

#[cfg(test)]
mod tests {
    use kube::runtime::events::EventType;

    use super::*;

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
        assert_eq!(receiver.try_recv().unwrap().0.note, Some("€".repeat(341)));
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
        assert_eq!(burst(first, &mut receiver).await, [1, 2, 3]);
        let first = receiver.recv().await.unwrap();
        let began = Instant::now();
        let long = burst(first, &mut receiver).await;
        assert_eq!((long.first(), began.elapsed()), (Some(&4), PATIENCE));
        assert!(long.len() > 100, "{}", long.len());
    }
}
