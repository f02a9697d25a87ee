//! The requests that the harness itself sends, so that they are not taken for those of the manager.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use kube::Client;

use crate::requests::{Request, Requests, is_about_vms};

/// How many requests of each kind the harness has sent: `POST pods/binding` and the like.
#[derive(Clone, Debug, Default)]
pub struct Ours(Arc<Mutex<BTreeMap<String, u64>>>);

impl Ours {
    /// Counts requests that are about to be sent.
    pub fn add(&self, request: &str, number: usize) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(request.to_owned()).or_default() += number as u64;
    }

    fn counts(&self) -> BTreeMap<String, u64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The requests until some time: all of them, and ours.
pub struct Mark {
    all: Requests,
    ours: BTreeMap<String, u64>,
}

impl Mark {
    /// The requests until now.
    pub async fn now(client: &Client, ours: &Ours) -> kube::Result<Self> {
        // A request of ours that begins between these two lines is counted as one of the manager. One that was on its way before hides one of the
        // manager's, so a step ends when nothing is on its way.
        let ours = ours.counts();
        Ok(Self { all: Requests::ask(client).await?, ours })
    }

    /// The requests of others from `before` until then.
    pub fn since(&self, before: &Self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::<String, u64>::new();
        // Events have two groups.
        for (request, count) in self.all.since(&before.all).only(is_of_manager).iter() {
            *counts.entry(format!("{} {}", request.verb, request.resource)).or_default() += count;
        }
        for (name, count) in &mut counts {
            let ours = |mark: &Self| mark.ours.get(name).copied().unwrap_or_default();
            *count = count.saturating_sub(ours(self).saturating_sub(ours(before)));
        }
        counts.retain(|_, count| *count > 0);
        counts
    }
}

/// Whether a manager may have sent a request: one about VMs, or about what could show why a VM does not start. The renewals of its lease are not
/// counted.
fn is_of_manager(request: &Request) -> bool {
    let surroundings =
        ["nodes", "persistentvolumes", "storageclasses", "events", "vmpools", "selfsubjectaccessreviews"];
    is_about_vms(request) || surroundings.contains(&request.resource.as_str())
}
