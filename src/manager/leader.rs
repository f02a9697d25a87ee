//! Who of several managers works: the one that holds a Lease.
//!
//! ```text
//!  watch of the lease ─▶ facts (who holds it, for how long it has not changed by our own clock) ─▶ decide ─▶ take / renew / wait
//! ```
//!
//! As in client-go, no clock is compared with another machine's: a candidate counts from when it saw the lease change. A
//! write carries the resourceVersion that it is based on, so of several candidates one wins, and one that saw too little
//! takes nothing. A leader counts from before its last successful renewal and is out [`DEADLINE`] later, while others wait for
//! the whole [`LEASE`]; between the two whatever it still had on its way to the API server arrives. That it writes nothing
//! after its time is seen to by the [`Fence`] in its client, not by those who write.
//!
//! Of the libraries for this, kube-lease-manager is the one that fits kube 5; it compares wall clocks, takes over without
//! a resourceVersion and does not watch the lease.

use std::{
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{ObjectMeta, PostParams},
    runtime::{WatchStreamExt, watcher::watch_object},
};
use tokio::{
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use crate::{
    metrics::Metrics,
    ownership::OBJECT_MANAGER,
    process::{ErrorChain, RepeatFilter, lock},
};

/// The name of the lease.
pub const NAME: &str = "vm-operator";
/// How long others wait for a leader that says nothing.
const LEASE: Duration = Duration::from_secs(12);
/// How long a leader works without a successful renewal.
const DEADLINE: Duration = Duration::from_secs(8);
/// How often a leader renews.
const RENEW: Duration = Duration::from_secs(4);
/// The pause after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// How long a request about the lease may take: there is time for a second one before [`DEADLINE`].
const REQUEST: Duration = Duration::from_secs(2);
/// How long giving the lease back may take; others find out without it too, only later.
pub(super) const RELEASE: Duration = Duration::from_millis(400);

/// Until when writes are let through.
///
/// It stands in the client, so that nobody who writes has to think of it.
#[derive(Clone, Debug, Default)]
pub struct Fence(Arc<Mutex<Passage>>);

#[derive(Clone, Copy, Debug, Default)]
enum Passage {
    #[default]
    Closed,
    Until(Instant),
    Open,
}

/// What a request is told that came too late.
#[derive(Debug, thiserror::Error)]
#[error("this manager does not lead")]
pub struct Closed;

impl Fence {
    fn set(&self, passage: Passage) {
        *lock(&self.0) = passage;
    }

    /// Lets everything through.
    pub fn open(&self) {
        self.set(Passage::Open);
    }

    /// Lets nothing through any more; what is on its way arrives.
    pub fn close(&self) {
        self.set(Passage::Closed);
    }

    /// Whether a write is let through.
    ///
    /// # Errors
    /// [`Closed`]
    pub fn check(&self, now: Instant) -> Result<(), Closed> {
        match *lock(&self.0) {
            Passage::Open => Ok(()),
            Passage::Until(end) if now < end => Ok(()),
            Passage::Closed | Passage::Until(_) => Err(Closed),
        }
    }
}

/// Who holds a lease.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holder {
    Nobody,
    Us,
    Another,
}

/// What a decision depends on. All times are measured with our own clock.
#[derive(Clone, Copy, Debug)]
struct Facts {
    holder: Holder,
    /// For how long the lease has been as it is.
    unchanged: Duration,
    /// For how long its holder asks to be waited for.
    lasts: Duration,
    /// How long ago our last successful write of it began; `None` if we do not lead.
    renewed: Option<Duration>,
    /// How long ago our last try failed, if it did.
    failed: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// Write the lease with our name.
    Write,
    /// Look again after this time, or when the lease changes.
    Wait(Duration),
    /// We do not lead any more.
    Lost(&'static str),
}

fn decide(facts: Facts) -> Step {
    let pause = facts.failed.map_or(Duration::ZERO, |failed| RETRY.saturating_sub(failed));
    let write_in = |due: Duration| if due.is_zero() { Step::Write } else { Step::Wait(due) };
    match (facts.renewed, facts.holder) {
        (Some(_), Holder::Another) => Step::Lost("another manager took the lease"),
        (Some(renewed), _) if renewed >= DEADLINE => Step::Lost("the lease could not be renewed"),
        // Never waits past the deadline.
        (Some(renewed), Holder::Us) if facts.failed.is_some() => write_in(pause.min(DEADLINE - renewed)),
        (Some(renewed), Holder::Us) => write_in(RENEW.saturating_sub(renewed)),
        // Somebody deleted the lease or emptied it: say that we are still here.
        (Some(renewed), Holder::Nobody) => write_in(pause.min(DEADLINE - renewed)),
        // The taking was answered too late, or the process before us had our name: it has ended, so there is nobody to wait for.
        (None, Holder::Nobody | Holder::Us) => write_in(pause),
        (None, Holder::Another) => write_in(pause.max(facts.lasts.saturating_sub(facts.unchanged))),
    }
}

/// What a candidate knows.
struct Candidate {
    identity: String,
    /// The lease, or that there is none, and since when.
    lease: Option<Lease>,
    since: Instant,
    renewed: Option<Instant>,
    failed: Option<Instant>,
}

/// What others read of a lease; labels and the like change nothing.
fn spec(lease: Option<&Lease>) -> Option<&LeaseSpec> {
    lease.and_then(|lease| lease.spec.as_ref())
}

fn version(lease: &Lease) -> u64 {
    lease.resource_version().and_then(|version| version.parse().ok()).unwrap_or_default()
}

impl Candidate {
    fn facts(&self, now: Instant) -> Facts {
        let spec = spec(self.lease.as_ref());
        let holder = match spec.and_then(|spec| spec.holder_identity.as_deref()).filter(|name| !name.is_empty()) {
            None => Holder::Nobody,
            Some(name) if name == self.identity => Holder::Us,
            Some(_) => Holder::Another,
        };
        let lasts = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
        Facts {
            holder,
            unchanged: now.saturating_duration_since(self.since),
            lasts: lasts.map_or(LEASE, Duration::from_secs),
            renewed: self.renewed.map(|time| now.saturating_duration_since(time)),
            failed: self.failed.map(|time| now.saturating_duration_since(time)),
        }
    }

    fn saw(&mut self, lease: Option<Lease>, now: Instant) {
        // The watch tells what we wrote after the API server has answered to it.
        if let (Some(known), Some(seen)) = (&self.lease, &lease)
            && version(seen) < version(known)
        {
            return;
        }
        if spec(self.lease.as_ref()) != spec(lease.as_ref()) {
            self.since = now;
        }
        self.lease = lease;
    }

    /// The lease as it is to be written: ours.
    fn ours(&self) -> Lease {
        let mut lease = self.lease.clone().unwrap_or_else(|| Lease {
            metadata: ObjectMeta {
                name: Some(NAME.into()),
                labels: Some([("app.kubernetes.io/name".into(), NAME.into())].into()),
                ..ObjectMeta::default()
            },
            spec: None,
        });
        let spec = lease.spec.get_or_insert_default();
        let now = MicroTime(Timestamp::now());
        if spec.holder_identity.as_deref() != Some(&self.identity) {
            spec.lease_transitions = Some(spec.lease_transitions.map_or(0, |count| count.saturating_add(1)));
            spec.acquire_time = Some(now.clone());
        }
        spec.holder_identity = Some(self.identity.clone());
        spec.lease_duration_seconds = i32::try_from(LEASE.as_secs()).ok();
        spec.renew_time = Some(now);
        lease
    }
}

/// How an election stands.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaderState {
    /// Not known yet, and perhaps why.
    Unknown(Option<String>),
    /// Another manager leads.
    Standby(String),
    /// We lead.
    Leading,
    /// We led, and do not any more.
    Lost(String),
}

/// A candidacy that goes on beside what the manager does.
pub struct Election {
    state: watch::Receiver<LeaderState>,
    resign: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Election {
    /// Stands for election under a name that no other process has now. While it leads, the fence is open.
    pub fn start(client: Client, namespace: &str, identity: String, fence: Fence, metrics: Arc<Metrics>) -> Self {
        let (sender, state) = watch::channel(LeaderState::Unknown(None));
        let (resign, resigned) = oneshot::channel();
        let candidate = Candidate { identity, lease: None, since: Instant::now(), renewed: None, failed: None };
        let api = Api::namespaced(client, namespace);
        let task = tokio::spawn(
            Campaign { api, candidate, fence, state: sender, metrics, said: RepeatFilter::default() }.run(resigned),
        );
        Self { state, resign, task }
    }

    /// How it stands, now and later.
    pub fn state(&self) -> watch::Receiver<LeaderState> {
        self.state.clone()
    }

    /// Gives the lease back, if it is ours, so that another manager need not wait for its end.
    pub async fn resign(self) {
        let _ = self.resign.send(());
        // It may be in the middle of a request.
        let mut task = self.task;
        match timeout(RELEASE, &mut task).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "the election ended in disorder"),
            Err(_) => {
                task.abort();
                warn!("the lease could not be given back in time");
            }
        }
    }
}

struct Campaign {
    api: Api<Lease>,
    candidate: Candidate,
    fence: Fence,
    state: watch::Sender<LeaderState>,
    metrics: Arc<Metrics>,
    said: RepeatFilter,
}

impl Campaign {
    async fn run(mut self, mut resigned: oneshot::Receiver<()>) {
        let mut lease = pin!(watch_object(self.api.clone(), NAME).default_backoff());
        // Until the lease was read nothing is decided.
        let mut known = false;
        loop {
            let step = if known { decide(self.candidate.facts(Instant::now())) } else { Step::Wait(LEASE) };
            match step {
                Step::Write => self.write().await,
                Step::Lost(why) => {
                    self.fence.close();
                    self.metrics.leads(false);
                    self.state.send_replace(LeaderState::Lost(why.to_owned()));
                    return;
                }
                Step::Wait(time) => tokio::select! {
                    // In this order: who is told to end does not take a lease that has just become free.
                    biased;
                    _ = &mut resigned => return self.release().await,
                    Some(event) = lease.next() => match event {
                        Ok(lease) => {
                            known = true;
                            self.saw(lease);
                        }
                        Err(error) => {
                            self.metrics.watch_cut("Lease");
                            self.problem("the lease can't be watched", &error);
                        }
                    },
                    () = sleep(time) => {}
                },
            }
        }
    }

    fn saw(&mut self, lease: Option<Lease>) {
        self.candidate.saw(lease, Instant::now());
        let holder = spec(self.candidate.lease.as_ref()).and_then(|spec| spec.holder_identity.as_deref());
        if let Some(holder) = holder.filter(|holder| !holder.is_empty() && *holder != self.candidate.identity)
            && self.candidate.renewed.is_none()
        {
            let standby = LeaderState::Standby(holder.to_owned());
            if *self.state.borrow() != standby {
                info!(leader = holder, "standing by");
                self.state.send_replace(standby);
            }
        }
    }

    /// Takes or renews the lease.
    async fn write(&mut self) {
        let began = Instant::now();
        let left = self.candidate.renewed.map_or(REQUEST, |renewed| (renewed + DEADLINE).duration_since(began));
        let lease = self.candidate.ours();
        let parameters = PostParams { field_manager: Some(OBJECT_MANAGER.into()), ..PostParams::default() };
        let request = async {
            match self.candidate.lease {
                Some(_) => self.api.replace(NAME, &parameters, &lease).await,
                None => self.api.create(&parameters, &lease).await,
            }
        };
        match timeout(left.min(REQUEST), request).await {
            Ok(Ok(written)) => {
                self.candidate.saw(Some(written), Instant::now());
                self.candidate.failed = None;
                self.candidate.renewed = Some(began);
                self.said.clear();
                self.fence.set(Passage::Until(began + DEADLINE));
                if *self.state.borrow() != LeaderState::Leading {
                    info!(identity = self.candidate.identity, "leading");
                    self.metrics.leads(true);
                    self.state.send_replace(LeaderState::Leading);
                }
            }
            // Somebody was faster, or what we know is old.
            Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => {
                match timeout(left.min(REQUEST), self.api.get_opt(NAME)).await {
                    Ok(Ok(lease)) => self.saw(lease),
                    Ok(Err(error)) => self.problem("the lease can't be read", &error),
                    Err(_) => self.problem("the lease can't be read", &Late),
                }
                self.candidate.failed = Some(Instant::now());
            }
            outcome => {
                let doing = if self.candidate.renewed.is_some() { "renewed" } else { "taken" };
                self.metrics.lease_failed();
                match outcome {
                    Ok(Err(error)) => self.problem(&format!("the lease can't be {doing}"), &error),
                    _ => self.problem(&format!("the lease can't be {doing}"), &Late),
                }
                self.candidate.failed = Some(Instant::now());
            }
        }
    }

    /// Says what does not work, once.
    fn problem(&mut self, what: &str, error: &(dyn std::error::Error + 'static)) {
        let message = format!("{what}: {}", ErrorChain(error));
        if self.said.is_new(&message) {
            warn!(lease = NAME, "{message}");
            self.state.send_if_modified(|state| match state {
                LeaderState::Unknown(problem) => {
                    *problem = Some(message);
                    true
                }
                _ => false,
            });
        }
    }

    async fn release(mut self) {
        self.fence.close();
        if self.candidate.renewed.is_none() {
            return;
        }
        let Some(mut lease) = self.candidate.lease.take() else { return };
        let spec = lease.spec.get_or_insert_default();
        // As client-go leaves it.
        spec.holder_identity = Some(String::new());
        spec.lease_duration_seconds = Some(1);
        spec.renew_time = Some(MicroTime(Timestamp::now()));
        let parameters = PostParams { field_manager: Some(OBJECT_MANAGER.into()), ..PostParams::default() };
        self.metrics.leads(false);
        match self.api.replace(NAME, &parameters, &lease).await {
            Ok(_) => info!("gave the lease back"),
            Err(error) => warn!(error = %ErrorChain(&error), "the lease could not be given back"),
        }
    }
}

#[derive(Debug, thiserror::Error)]
#[error("the API server did not answer in time")]
struct Late;

#[cfg(test)]
mod tests {
    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn what_follows_from_which_facts() {
        use Holder::{Another, Nobody, Us};
        use Step::{Wait, Write};
        const TAKEN: Step = Step::Lost("another manager took the lease");
        const LATE: Step = Step::Lost("the lease could not be renewed");
        // holder, unchanged for, lasts, renewed ago, failed ago
        let table = [
            // A candidate.
            ((Nobody, s(0), s(12), None, None), Write),
            ((Nobody, s(0), s(12), None, Some(s(0))), Wait(RETRY)),
            ((Nobody, s(0), s(12), None, Some(s(1))), Write),
            ((Another, s(0), s(12), None, None), Wait(s(12))),
            ((Another, s(5), s(12), None, None), Wait(s(7))),
            ((Another, s(12), s(12), None, None), Write),
            ((Another, s(12), s(12), None, Some(s(0))), Wait(RETRY)),
            // The time that the holder asked for counts, not ours.
            ((Another, s(12), s(15), None, None), Wait(s(3))),
            ((Us, s(3), s(12), None, None), Write),
            // The leader.
            ((Us, s(1), s(12), Some(s(1)), None), Wait(s(3))),
            ((Us, s(4), s(12), Some(s(4)), None), Write),
            ((Us, s(4), s(12), Some(s(4)), Some(s(0))), Wait(RETRY)),
            ((Us, s(5), s(12), Some(s(5)), Some(s(1))), Write),
            ((Us, s(7), s(12), Some(Duration::from_millis(7600)), Some(s(0))), Wait(Duration::from_millis(400))),
            ((Us, s(8), s(12), Some(s(8)), Some(s(0))), LATE),
            ((Nobody, s(0), s(12), Some(s(1)), None), Write),
            ((Nobody, s(0), s(12), Some(s(1)), Some(s(0))), Wait(RETRY)),
            ((Another, s(0), s(12), Some(s(1)), None), TAKEN),
        ];
        for ((holder, unchanged, lasts, renewed, failed), expected) in table {
            let facts = Facts { holder, unchanged, lasts, renewed, failed };
            assert_eq!(decide(facts), expected, "{facts:?}");
        }
    }

    #[test]
    fn the_times_leave_room() {
        assert!(
            RENEW + REQUEST + RETRY + s(1) <= DEADLINE,
            "a renewal that hangs is tried again, with time for an answer"
        );
        assert!(DEADLINE < LEASE && LEASE + REQUEST < s(15), "another one leads soon");
    }

    fn lease(version: u64, holder: &str, renewed: i64) -> Lease {
        Lease {
            metadata: ObjectMeta { resource_version: Some(version.to_string()), ..ObjectMeta::default() },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.into()),
                renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
                ..LeaseSpec::default()
            }),
        }
    }

    fn candidate(since: Instant) -> Candidate {
        Candidate { identity: "us".into(), lease: None, since, renewed: None, failed: None }
    }

    #[test]
    fn only_our_own_clock_counts() {
        let start = Instant::now();
        let mut candidate = candidate(start);
        // Renewed in the far past or the far future, by the other machine's clock.
        for (version, renewed) in [(1, 0), (2, 99_999_999_999)] {
            let now = start + s(version);
            candidate.saw(Some(lease(version, "other", renewed)), now);
            assert_eq!(decide(candidate.facts(now)), Step::Wait(LEASE));
        }
        // What does not concern the lease itself does not count as a sign of life.
        candidate.saw(Some(lease(3, "other", 99_999_999_999)), start + s(9));
        assert_eq!(decide(candidate.facts(start + s(2) + LEASE)), Step::Write);
    }

    #[test]
    fn an_old_event_does_not_make_a_leader_doubt() {
        let now = Instant::now();
        let mut candidate = candidate(now);
        candidate.saw(Some(lease(5, "us", 1)), now);
        candidate.renewed = Some(now);
        candidate.saw(Some(lease(4, "other", 1)), now);
        assert_eq!(decide(candidate.facts(now)), Step::Wait(RENEW));
        candidate.saw(Some(lease(6, "other", 1)), now);
        assert!(matches!(decide(candidate.facts(now)), Step::Lost(_)));
    }

    #[test]
    fn a_change_of_holder_is_counted() {
        let mut candidate = candidate(Instant::now());
        assert_eq!(candidate.ours().spec.unwrap().lease_transitions, Some(0));
        let mut theirs = lease(1, "", 1);
        theirs.spec.as_mut().unwrap().lease_transitions = Some(3);
        candidate.lease = Some(theirs);
        let ours = candidate.ours();
        assert_eq!(ours.metadata.resource_version.as_deref(), Some("1"), "a write is based on what was seen");
        assert_eq!(ours.spec.as_ref().unwrap().lease_transitions, Some(4));
        candidate.lease = Some(ours);
        assert_eq!(candidate.ours().spec.unwrap().lease_transitions, Some(4));
    }

    #[test]
    fn the_fence_closes_by_itself() {
        let (fence, now) = (Fence::default(), Instant::now());
        assert!(fence.check(now).is_err());
        fence.set(Passage::Until(now + DEADLINE));
        assert!(fence.check(now).is_ok());
        assert!(fence.check(now + DEADLINE).is_err());
        fence.open();
        assert!(fence.check(now + DEADLINE).is_ok());
        fence.close();
        assert!(fence.check(now).is_err());
    }
}
