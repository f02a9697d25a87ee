//! When a Pod that has ended is created again (`status.retry`).
//!
//! The pause doubles with each Pod that ends soon after its creation, and counts from that creation: 10 s, 20 s, up to 5 min, as the
//! kubelet does it for containers
//! (<https://kubernetes.io/docs/concepts/workloads/pods/pod-lifecycle/#restart-policy>).

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};

use crate::{
    api::status::Retry,
    observed::{Object, Observed},
};

const FIRST_PAUSE: SignedDuration = SignedDuration::from_secs(10);
const LONGEST_PAUSE: SignedDuration = SignedDuration::from_mins(5);
/// A Pod that lived longer than this starts a new series of pauses.
const SUCCESS: SignedDuration = SignedDuration::from_mins(10);

/// The retry for a Pod that has ended. `previous` is the retry in the VM's status.
pub(super) fn next(previous: Option<Retry>, ended: &Object, observed: &Observed) -> Retry {
    let now = observed.now;
    // All Pods that have ended wait for the same time.
    let has_ended = |uid: &str| observed.objects.iter().any(|pod| pod.uid == uid && pod.has_ended());
    let is_known = |retry: &Retry| retry.pod_uid == ended.uid || has_ended(&retry.pod_uid);
    let lived = lived(ended);
    match previous {
        Some(known) if is_known(&known) => {
            // A clock may have jumped since `next` was written, and other clients can write the status.
            let latest = now + pause(known.count);
            Retry { next: Time(known.next.0.min(latest)), ..known }
        }
        previous => {
            let failed_before = previous.filter(|_| lived <= SUCCESS);
            let count = failed_before.map_or(1, |retry| retry.count.saturating_add(1));
            // The API server, the node and the manager may have different clocks. `lived` comes from the cluster alone.
            let left = (pause(count) - lived).max(SignedDuration::ZERO);
            Retry { count, pod_uid: ended.uid.clone(), next: Time(now + left) }
        }
    }
}

/// When the retries before a Pod that runs are forgotten: the Pod was created at about `retry.next`, by this clock. A later time can't
/// be the time of its creation.
pub(super) fn forgotten_at(retry: &Retry, now: Timestamp) -> Timestamp {
    retry.next.0.min(now) + SUCCESS
}

fn pause(count: u32) -> SignedDuration {
    FIRST_PAUSE.saturating_mul(1 << count.saturating_sub(1).min(10)).min(LONGEST_PAUSE)
}

/// How long a Pod lived that has ended, by the times in its object: until its last container ended or its last condition changed.
/// Without such a time it never started.
fn lived(pod: &Object) -> SignedDuration {
    let ends = pod.container_statuses().map(|status| &status["state"]["terminated"]["finishedAt"]);
    let conditions = pod.status["conditions"].as_array().into_iter().flatten();
    let changes = conditions.map(|condition| &condition["lastTransitionTime"]);
    let times = ends.chain(changes).filter_map(|time| time.as_str()?.parse::<Timestamp>().ok());
    let end = times.max().zip(pod.created).map(|(end, created)| end.duration_since(created));
    end.unwrap_or_default().max(SignedDuration::ZERO)
}
