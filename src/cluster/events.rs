//! Events, written one after the other beside everything else: no machine waits for its event, and a thousand machines that
//! are made at once do not wait for a thousand events.

use k8s_openapi::api::core::v1::ObjectReference;
use kube::{
    Client,
    runtime::events::{Event, Recorder, Reporter},
};
use tokio::sync::mpsc;
use tracing::warn;

use super::watch::Chain;

/// How many events may wait. More are dropped: whoever has so many reads none of them.
const WAITING: usize = 10_000;

/// Takes events and writes them when there is time. What still waits when the manager ends is lost.
pub struct Teller(mpsc::Sender<(Event, ObjectReference)>);

impl Teller {
    /// Writes events in the name of `reporter`.
    pub fn start(client: Client, reporter: Reporter) -> Self {
        let recorder = Recorder::new(client, reporter);
        let (sender, mut receiver) = mpsc::channel::<(Event, ObjectReference)>(WAITING);
        tokio::spawn(async move {
            while let Some((event, regarding)) = receiver.recv().await {
                if let Err(error) = recorder.publish(&event, &regarding).await {
                    warn!(vm = regarding.name, error = %Chain(&error), "an event could not be written");
                }
            }
        });
        Self(sender)
    }

    /// Tells of something that happened to an object.
    pub fn tell(&self, event: Event, regarding: ObjectReference) {
        if let Err(error) = self.0.try_send((event, regarding)) {
            warn!(%error, "an event was dropped");
        }
    }
}
