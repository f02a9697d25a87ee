//! What the guest of one VM uses, while somebody looks at its page.
//!
//! ```text
//!  the relay in the VM's Pod ─▶ two samples are rates ─▶ an event on the page's stream
//! ```
//!
//! Nothing of it is kept.

use std::time::Duration;

use axum::response::sse::Event;
use futures::StreamExt;
use serde::Serialize;
use tokio::{sync::mpsc, time::sleep};
use tokio_tungstenite::tungstenite::Message;

use super::{app::App, relayed, rights::rights, signed_in::SignedIn, store::Key};
use crate::{
    api::stats::{GuestStats, Rates},
    relay::FIGURES,
};

/// When a VM without figures is asked again.
const AGAIN: Duration = Duration::from_secs(5);

/// What a guest uses now.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Figures {
    #[serde(flatten)]
    rates: Rates,
    /// How many CPUs it has.
    of_cpus: u32,
    /// Bytes of its memory that are in use.
    ram_used: Option<u64>,
    /// Bytes of its memory.
    ram: Option<u64>,
}

/// From two samples.
fn figures(before: &GuestStats, now: &GuestStats) -> Option<Figures> {
    let rates = now.since(before)?;
    Some(Figures { rates, of_cpus: now.cpus, ram_used: now.ram_used, ram: now.ram })
}

/// Sends the figures of a VM to a page as long as the person may see the VM.
pub(super) async fn send(app: &App, signed_in: &SignedIn, key: &Key, events: &mpsc::Sender<Event>) {
    while may_see(app, signed_in, key) {
        if let Some(vm) = app.store.vm(key).filter(|vm| vm.runs())
            && let Ok(mut relay) = relayed::open(app, &vm, FIGURES).await
        {
            let mut before = None;
            while let Some(Ok(message)) = relay.next().await {
                if !may_see(app, signed_in, key) {
                    return;
                }
                // What the Pod says is read as foreign.
                let Message::Text(text) = message else { continue };
                let Ok(now) = serde_json::from_str::<GuestStats>(&text) else { break };
                if let Some(figures) = before.as_ref().and_then(|before| figures(before, &now)) {
                    let data = serde_json::to_string(&figures).unwrap_or_default();
                    if events.send(Event::default().event("figures").data(data)).await.is_err() {
                        return;
                    }
                }
                before = Some(now);
            }
        }
        sleep(AGAIN).await;
    }
}

fn may_see(app: &App, signed_in: &SignedIn, key: &Key) -> bool {
    let (Some(now), Some(vm)) = (signed_in.now(app), app.store.vm(key)) else { return false };
    !rights(&now.person, now.views, &key.0, &vm, &app.store).is_empty()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_are_rates_between_two_samples_of_one_guest() {
        let before = GuestStats { at: 1000, cpu_time: 500, cpus: 2, ..GuestStats::default() };
        let now =
            GuestStats { at: 3000, cpu_time: 2500, cpus: 2, ram_used: Some(7), ram: Some(9), ..GuestStats::default() };
        let found = figures(&before, &now).unwrap();
        assert_eq!(
            serde_json::to_value(&found).unwrap(),
            json!({
                "cpus": 1.0, "ofCpus": 2, "ramUsed": 7, "ram": 9, "diskRead": 0.0, "diskWritten": 0.0, "networkReceived": 0.0, "networkSent": 0.0,
            })
        );
        assert_eq!(figures(&now, &before), None);
    }
}
