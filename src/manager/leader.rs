//! Leader election: of several managers, the one that holds a Lease works.
//!
//! ```text
//!  watch of the lease ─▶ inputs (who holds it, and since when it has not changed, by our own clock) ─▶ decide ─▶ write / wait
//! ```
//!
//! As in client-go, clocks of different machines are never compared: a candidate measures the time since it saw the lease change. A
//! write carries the resourceVersion that it is based on, so of several candidates one succeeds, and a candidate whose view is old
//! takes nothing. A leader stops [`DEADLINE`] after the start of its last successful renewal, while others wait for the whole
//! [`LEASE`]. The fence counts this time by a clock that goes on while the host is suspended. The [`Fence`] in the leader's client ensures
//! that it writes nothing later: it refuses new writes and cancels those that are not answered yet; the code that writes need not care. The
//! time between the two is for requests that the API server carries out although they are cancelled.
//!
//! Of the libraries for this, kube-lease-manager works with kube 5. It compares wall clocks, takes a lease over without a
//! resourceVersion and does not watch the lease.

use std::{ops::Add, pin::pin, sync::Arc, time::Duration};

use futures::StreamExt;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
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
    process::{ErrorChain, RepeatFilter, clock},
};

/// The name of the lease.
pub const NAME: &str = "vm-operator";
/// How long other managers wait for a leader that does not renew.
const LEASE: Duration = Duration::from_secs(12);
/// How long a leader works after its last successful renewal began.
const DEADLINE: Duration = Duration::from_secs(8);
/// How often a leader renews.
const RENEW: Duration = Duration::from_secs(4);
/// The pause after a failure.
const RETRY: Duration = Duration::from_millis(500);
/// How long a request about the lease may take. There is time for a second one before [`DEADLINE`].
const REQUEST: Duration = Duration::from_secs(2);
/// How often the fence looks at the clock while a write is under way: a timer stops while the host is suspended.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How long giving the lease back may take. Without it another manager leads too, only later.
pub(super) const RELEASE: Duration = Duration::from_millis(400);

/// The time since the host's start, including the time that it was suspended. `Instant` stops meanwhile, while other managers wait for
/// the lease to expire (clock_gettime(2), `CLOCK_BOOTTIME`).
#[derive(Clone, Copy, Debug, PartialEq, PartialOrd)]
pub struct BootTime(Duration);

impl BootTime {
    /// Now.
    pub fn now() -> Self {
        Self(clock::since_boot())
    }
}

impl BootTime {
    /// The time from an earlier time to this one.
    fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for BootTime {
    type Output = Self;

    fn add(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}

/// Decides whether a write may be sent, and how long its answer may be waited for. It is part of the client, so the code that writes need
/// not check.
#[derive(Clone, Debug, Default)]
pub struct Fence(watch::Sender<FenceState>);

#[derive(Clone, Copy, Debug, Default)]
struct FenceState {
    /// How long we lead.
    lead: Lead,
    /// The manager ends: it begins no write any more, and those under way may be answered.
    is_ending: bool,
}

#[derive(Clone, Copy, Debug, Default)]
enum Lead {
    #[default]
    No,
    Until(BootTime),
    Always,
}

/// The error of a write that the fence refused.
#[derive(Debug, thiserror::Error)]
#[error("this manager does not lead")]
pub struct NotLeading;

impl Fence {
    fn set(&self, lead: Lead) {
        self.0.send_modify(|state| state.lead = lead);
    }

    /// Lets all writes through.
    pub fn open(&self) {
        self.set(Lead::Always);
    }

    /// Lets all writes through until a time.
    pub fn open_until(&self, end: BootTime) {
        self.set(Lead::Until(end));
    }

    /// Refuses all new writes from now on. Those under way may be answered as long as this manager leads.
    pub fn end(&self) {
        self.0.send_modify(|state| state.is_ending = true);
    }

    /// Refuses all writes from now on, and cancels those under way.
    pub fn close(&self) {
        self.set(Lead::No);
    }

    /// Lets a write through.
    ///
    /// # Errors
    /// [`NotLeading`] if the fence is closed or the manager ends.
    pub fn check(&self, now: BootTime) -> Result<(), NotLeading> {
        let FenceState { lead, is_ending } = *self.0.borrow();
        match lead {
            _ if is_ending => Err(NotLeading),
            Lead::Always => Ok(()),
            Lead::Until(end) if now < end => Ok(()),
            Lead::No | Lead::Until(_) => Err(NotLeading),
        }
    }

    /// Returns when this manager does not lead any more, so that no answer to a write may be waited for.
    pub async fn closed(&self) -> NotLeading {
        let mut state = self.0.subscribe();
        loop {
            let (lead, now) = (state.borrow_and_update().lead, BootTime::now());
            let left = match lead {
                Lead::Always => None,
                Lead::Until(end) if now < end => Some(end.since(now).min(LOOK_AGAIN)),
                Lead::No | Lead::Until(_) => return NotLeading,
            };
            tokio::select! {
                // The sender is the fence itself.
                _ = state.changed() => {}
                () = sleep(left.unwrap_or_default()), if left.is_some() => {}
            }
        }
    }
}

/// Who holds a lease.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Holder {
    Nobody,
    Us,
    Another,
    /// Somebody deleted the lease while another manager held it. That manager may work until its deadline without knowing it.
    Deleted,
}

/// What the decision depends on. All times are measured with our own clock.
#[derive(Clone, Copy, Debug)]
struct Inputs {
    holder: Holder,
    /// How long the lease has not changed.
    unchanged: Duration,
    /// How long others must wait for its holder.
    lasts: Duration,
    /// How long ago our last successful write began; `None` if we do not lead.
    renewed: Option<Duration>,
    /// How long ago our last write failed, if it did.
    failed: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// Write the lease, with our name as its holder.
    Write,
    /// Decide again after this time, or when the lease changes.
    Wait(Duration),
    /// We do not lead any more.
    Lost(&'static str),
}

fn decide(inputs: Inputs) -> Step {
    let pause = inputs.failed.map_or(Duration::ZERO, |failed| RETRY.saturating_sub(failed));
    let write_in = |due: Duration| if due.is_zero() { Step::Write } else { Step::Wait(due) };
    match (inputs.renewed, inputs.holder) {
        (Some(_), Holder::Another) => Step::Lost("another manager took the lease"),
        (Some(renewed), _) if renewed >= DEADLINE => Step::Lost("the lease could not be renewed"),
        // Not longer than to the deadline.
        (Some(renewed), Holder::Us) if inputs.failed.is_some() => write_in(pause.min(DEADLINE - renewed)),
        (Some(renewed), Holder::Us) => write_in(RENEW.saturating_sub(renewed)),
        // Somebody deleted the lease or its holder: take it again.
        (Some(renewed), Holder::Nobody | Holder::Deleted) => write_in(pause.min(DEADLINE - renewed)),
        // Our write was answered too late, or an earlier process had our name. That process has ended, so there is no need to wait.
        (None, Holder::Nobody | Holder::Us) => write_in(pause),
        (None, Holder::Another | Holder::Deleted) => write_in(pause.max(inputs.lasts.saturating_sub(inputs.unchanged))),
    }
}

/// What this manager knows of the lease.
struct Candidate {
    identity: String,
    /// The lease, if it exists, and since when it has not changed.
    lease: Option<Lease>,
    /// The lease was deleted while another manager held it.
    is_deleted: bool,
    since: Instant,
    renewed: Option<Instant>,
    failed: Option<Instant>,
}

/// The part of a lease that counts. A change of its labels is no renewal.
fn spec(lease: Option<&Lease>) -> Option<&LeaseSpec> {
    lease.and_then(|lease| lease.spec.as_ref())
}

fn version(lease: &Lease) -> u64 {
    lease.resource_version().and_then(|version| version.parse().ok()).unwrap_or_default()
}

impl Candidate {
    fn inputs(&self, now: Instant) -> Inputs {
        let spec = spec(self.lease.as_ref());
        let holder = if self.is_deleted { Holder::Deleted } else { self.holder() };
        let lasts = spec.and_then(|spec| spec.lease_duration_seconds).and_then(|seconds| u64::try_from(seconds).ok());
        Inputs {
            holder,
            unchanged: now.saturating_duration_since(self.since),
            lasts: lasts.map_or(LEASE, Duration::from_secs),
            renewed: self.renewed.map(|time| now.saturating_duration_since(time)),
            failed: self.failed.map(|time| now.saturating_duration_since(time)),
        }
    }

    /// Whom the lease names.
    fn holder(&self) -> Holder {
        let name = spec(self.lease.as_ref()).and_then(|spec| spec.holder_identity.as_deref());
        match name.filter(|name| !name.is_empty()) {
            None => Holder::Nobody,
            Some(name) if name == self.identity => Holder::Us,
            Some(_) => Holder::Another,
        }
    }

    fn observe(&mut self, lease: Option<Lease>, now: Instant) {
        // The watch shows our own write after the API server has answered to it.
        if let (Some(known), Some(seen)) = (&self.lease, &lease)
            && version(seen) < version(known)
        {
            return;
        }
        if spec(self.lease.as_ref()) != spec(lease.as_ref()) {
            self.since = now;
        }
        self.is_deleted = lease.is_none() && (self.is_deleted || self.holder() == Holder::Another);
        self.lease = lease;
    }

    /// The lease with us as its holder.
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
        let now = MicroTime(clock::now());
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

/// The state of an election.
#[derive(Clone, Debug, PartialEq)]
pub enum LeaderState {
    /// Not known yet, and the reason if there is one.
    Unknown(Option<String>),
    /// Another manager leads.
    Standby(String),
    /// We lead.
    Leading,
    /// We led, and do not any more.
    Lost(String),
}

/// An election that goes on in the background.
pub struct Election {
    state: watch::Receiver<LeaderState>,
    resign: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl Election {
    /// Stands for election under a name that no other process has now. The fence is open while this manager leads.
    pub fn start(client: Client, namespace: &str, identity: String, fence: Fence, metrics: Arc<Metrics>) -> Self {
        let (sender, state) = watch::channel(LeaderState::Unknown(None));
        let (resign, resigned) = oneshot::channel();
        let candidate =
            Candidate { identity, lease: None, is_deleted: false, since: Instant::now(), renewed: None, failed: None };
        let api = Api::namespaced(client, namespace);
        let task = tokio::spawn(
            Campaign { api, candidate, fence, state: sender, metrics, repeats: RepeatFilter::default() }.run(resigned),
        );
        Self { state, resign, task }
    }

    /// The state, as it changes.
    pub fn state(&self) -> watch::Receiver<LeaderState> {
        self.state.clone()
    }

    /// Gives the lease back, if we hold it, so that another manager need not wait until it expires.
    pub async fn resign(self) {
        let _ = self.resign.send(());
        // A request may be under way.
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
    repeats: RepeatFilter,
}

impl Campaign {
    async fn run(mut self, mut resigned: oneshot::Receiver<()>) {
        let mut lease = pin!(watch_object(self.api.clone(), NAME).default_backoff());
        // Nothing is decided before the lease was read once.
        let mut known = false;
        loop {
            let step = if known { decide(self.candidate.inputs(Instant::now())) } else { Step::Wait(LEASE) };
            match step {
                Step::Write => self.write().await,
                Step::Lost(why) => {
                    self.fence.close();
                    self.metrics.leads(false);
                    self.state.send_replace(LeaderState::Lost(why.to_owned()));
                    return;
                }
                Step::Wait(time) => tokio::select! {
                    // In this order, so that a manager that ends does not take a lease that has just become free.
                    biased;
                    _ = &mut resigned => return self.release().await,
                    Some(event) = lease.next() => match event {
                        Ok(lease) => {
                            known = true;
                            self.observe(lease);
                        }
                        Err(error) => {
                            self.metrics.watch_restarted("Lease");
                            self.report("the lease can't be watched", &error);
                        }
                    },
                    () = sleep(time) => {}
                },
            }
        }
    }

    fn observe(&mut self, lease: Option<Lease>) {
        self.candidate.observe(lease, Instant::now());
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
        let (began, began_on_host) = (Instant::now(), BootTime::now());
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
                self.candidate.observe(Some(written), Instant::now());
                self.candidate.failed = None;
                self.candidate.renewed = Some(began);
                self.repeats.clear();
                self.fence.open_until(began_on_host + DEADLINE);
                if *self.state.borrow() != LeaderState::Leading {
                    info!(identity = self.candidate.identity, "leading");
                    self.metrics.leads(true);
                    self.state.send_replace(LeaderState::Leading);
                }
            }
            // Another candidate was faster, or our view is old.
            Ok(Err(kube::Error::Api(answer))) if matches!(answer.code, 404 | 409) => {
                match timeout(left.min(REQUEST), self.api.get_opt(NAME)).await {
                    Ok(Ok(lease)) => self.observe(lease),
                    Ok(Err(error)) => self.report("the lease can't be read", &error),
                    Err(_) => self.report("the lease can't be read", &NoAnswer),
                }
                self.candidate.failed = Some(Instant::now());
            }
            outcome => {
                let doing = if self.candidate.renewed.is_some() { "renewed" } else { "taken" };
                self.metrics.lease_failed();
                match outcome {
                    Ok(Err(error)) => self.report(&format!("the lease can't be {doing}"), &error),
                    _ => self.report(&format!("the lease can't be {doing}"), &NoAnswer),
                }
                self.candidate.failed = Some(Instant::now());
            }
        }
    }

    /// Reports a problem, once.
    fn report(&mut self, what: &str, error: &(dyn std::error::Error + 'static)) {
        let message = format!("{what}: {}", ErrorChain(error));
        if self.repeats.is_new(&message) {
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
        spec.renew_time = Some(MicroTime(clock::now()));
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
struct NoAnswer;

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use rustix::time::{ClockId, clock_gettime};

    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn each_situation_has_its_decision() {
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
            let inputs = Inputs { holder, unchanged, lasts, renewed, failed };
            assert_eq!(decide(inputs), expected, "{inputs:?}");
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
        Candidate { identity: "us".into(), lease: None, is_deleted: false, since, renewed: None, failed: None }
    }

    #[test]
    fn a_lease_that_is_deleted_is_waited_for_as_long_as_its_holder_may_work() {
        let start = Instant::now();
        let mut candidate = candidate(start);
        candidate.observe(Some(lease(1, "other", 0)), start);
        for _ in 0..2 {
            candidate.observe(None, start + s(3));
            assert_eq!(decide(candidate.inputs(start + s(3))), Step::Wait(LEASE));
        }
        assert_eq!(decide(candidate.inputs(start + s(3) + LEASE)), Step::Write);
        // Its holder gives it back: nobody works.
        candidate.observe(Some(lease(2, "", 0)), start + s(4));
        assert_eq!(decide(candidate.inputs(start + s(4))), Step::Write);
        candidate.observe(None, start + s(5));
        assert_eq!(decide(candidate.inputs(start + s(5))), Step::Write);
    }

    #[test]
    fn only_our_own_clock_counts() {
        let start = Instant::now();
        let mut candidate = candidate(start);
        // Renewed in the far past or the far future, by the other machine's clock.
        for (version, renewed) in [(1, 0), (2, 99_999_999_999)] {
            let now = start + s(version);
            candidate.observe(Some(lease(version, "other", renewed)), now);
            assert_eq!(decide(candidate.inputs(now)), Step::Wait(LEASE));
        }
        // A change of the metadata is no renewal.
        candidate.observe(Some(lease(3, "other", 99_999_999_999)), start + s(9));
        assert_eq!(decide(candidate.inputs(start + s(2) + LEASE)), Step::Write);
    }

    #[test]
    fn an_old_event_does_not_end_the_leadership() {
        let now = Instant::now();
        let mut candidate = candidate(now);
        candidate.observe(Some(lease(5, "us", 1)), now);
        candidate.renewed = Some(now);
        candidate.observe(Some(lease(4, "other", 1)), now);
        assert_eq!(decide(candidate.inputs(now)), Step::Wait(RENEW));
        candidate.observe(Some(lease(6, "other", 1)), now);
        assert!(matches!(decide(candidate.inputs(now)), Step::Lost(_)));
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
        let (fence, now) = (Fence::default(), BootTime::now());
        assert!(fence.check(now).is_err());
        fence.open_until(now + DEADLINE);
        assert!(fence.check(now).is_ok());
        assert!(fence.check(now + DEADLINE).is_err());
        fence.open();
        assert!(fence.check(now + DEADLINE).is_ok());
        fence.close();
        assert!(fence.check(now).is_err());
        fence.open();
        fence.end();
        assert!(fence.check(now).is_err());
    }

    #[test]
    fn the_fences_clock_counts_the_time_that_the_host_was_suspended() {
        let clock = || clock_gettime(ClockId::Boottime).tv_sec;
        let (before, BootTime(now), after) = (clock(), BootTime::now(), clock());
        assert!((before..=after).contains(&i64::try_from(now.as_secs()).unwrap()));
        // `/proc/uptime` counts that time, too (proc_uptime(5)).
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        assert!((uptime - now.as_secs_f64()).abs() < 60.0, "{uptime} {now:?}");
    }
}
