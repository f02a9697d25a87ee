//! Forced stops: what the annotation [`FORCE_STOP_ANNOTATION`] means.
//!
//! Its value is the UID of the Pod that must not wait for its guest. It is about a stop, so it counts only if the Pod is being stopped.
//!
//! | the value | the Pod | what follows |
//! |---|---|---|
//! | the UID of a Pod | is being deleted, or is to be deleted now | forced |
//! | the UID of the VM's Pod | the VM should run | ignored, with an event: a later stop would be a forced one |
//! | another | exists | ignored, with an event |
//! | any | there is none | ignored: the value has been used, or is of no Pod |
//! | ignored before | any | ignored |
//! | any or none | is being deleted, or is to be deleted now, and `status.endGuest` has its UID | forced |
//! | any or none | is being deleted, somebody shortened its grace period, and it has been over for a while | forced |
//!
//! Once seen, a forced stop is kept in `status.endGuest` until its Pod is gone: a tool that syncs with Git removes an annotation that
//! `kubectl annotate` has set, and the runner may not have asked yet.
//!
//! The last row: a kubelet that already waits for the end of a Pod keeps the first grace period
//! (<https://github.com/kubernetes/kubernetes/issues/83916>), and soon the API server refuses the Pod's token, so this is the last moment
//! at which the runner can hear it. A grace period that nobody has shortened is the runner's own matter, whatever the clocks say.
//!
//! An ignored value is kept in `status.forceStopIgnored`, so that it stays ignored when the VM is stopped later. The runner reads it there
//! too. Who wants a forced stop then removes the annotation and sets it again.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;

use super::{WantedPower, is_restart_wanted};
use crate::{
    api::VirtualMachine,
    object::FORCE_STOP_ANNOTATION,
    observed::{Object, Observed},
};

/// What the annotation means now.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ForceStop {
    /// The UID of the Pod that ends without waiting for its guest.
    pub pod_uid: Option<String>,
    /// The new `status.forceStopIgnored`.
    pub ignored: Option<String>,
    /// Why a new value is ignored, if a person must know that.
    pub misuse: Option<Misuse>,
}

/// Why the annotation is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// The VM should run.
    NotStopping,
    /// No Pod of the VM has that UID.
    AnotherPod,
}

/// The time after the end of a shortened grace period that a kubelet has. The API server refuses the Pod's token after a minute.
const OVER: SignedDuration = SignedDuration::from_secs(30);

/// Decides by the table above. `pod` is the VM's Pod, if it has one.
pub fn force_stop(vm: &VirtualMachine, observed: &Observed, pod: Option<&Object>, wanted: WantedPower) -> ForceStop {
    let requested = by_annotation(vm, observed, pod, wanted);
    let seen = vm.status.as_ref().and_then(|status| status.end_guest.clone());
    let seen = seen.filter(|uid| pod_with(observed, uid).is_some_and(|pod| !stays(vm, pod, wanted)));
    let shortened = pod.filter(|pod| is_shortened_and_over(pod, observed.now)).map(|pod| pod.uid.clone());
    ForceStop { pod_uid: requested.pod_uid.or(seen).or(shortened), ..requested }
}

/// Whether somebody shortened the grace period of a Pod that is being deleted, and the Pod should be gone.
fn is_shortened_and_over(pod: &Object, now: Timestamp) -> bool {
    let own = pod.spec["terminationGracePeriodSeconds"].as_i64();
    let is_shortened = own.zip(pod.grace).is_some_and(|(own, grace)| grace < own);
    is_shortened && pod.deleting.is_some_and(|end| now.duration_since(end) >= OVER)
}

fn by_annotation(vm: &VirtualMachine, observed: &Observed, pod: Option<&Object>, wanted: WantedPower) -> ForceStop {
    let Some(value) = vm.annotations().get(FORCE_STOP_ANNOTATION) else { return ForceStop::default() };
    let ignored = |misuse| ForceStop { pod_uid: None, ignored: Some(value.clone()), misuse };
    let is_known = vm.status.as_ref().is_some_and(|status| status.force_stop_ignored.as_ref() == Some(value));
    match pod_with(observed, value) {
        _ if is_known => ignored(None),
        Some(named) if stays(vm, named, wanted) => ignored(Some(Misuse::NotStopping)),
        Some(_) => ForceStop { pod_uid: Some(value.clone()), ..ForceStop::default() },
        None => ignored(pod.map(|_| Misuse::AnotherPod)),
    }
}

fn pod_with<'a>(observed: &'a Observed, uid: &str) -> Option<&'a Object> {
    let mut objects = observed.objects.iter().chain(&observed.others);
    objects.find(|object| object.key.is_pod() && object.uid == uid).map(AsRef::as_ref)
}

/// Whether the Pod is neither being deleted nor to be deleted now.
fn stays(vm: &VirtualMachine, pod: &Object, wanted: WantedPower) -> bool {
    pod.deleting.is_none() && wanted == WantedPower::Up && !is_restart_wanted(vm, pod)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::{applied, nothing, rendered, vm};

    #[test]
    fn the_table() {
        let pods = |deleting: bool| {
            applied(&rendered(&vm(|_| ()), &nothing()), move |kind, object| {
                if kind == "Pod" && deleting {
                    object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
                }
            })
        };
        let (alive, going) = (pods(false), pods(true));
        let decide = |value: &str, status: Value, observed: &Observed, wanted: WantedPower| {
            let vm = vm(|vm| {
                vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: value });
                vm["status"] = status;
            });
            let pod = observed.objects.iter().find(|object| object.key.is_pod());
            let ForceStop { pod_uid, ignored, misuse } = force_stop(&vm, observed, pod.map(AsRef::as_ref), wanted);
            assert_ne!(pod_uid.is_some(), ignored.is_some(), "{value}");
            assert!(pod_uid.or(ignored).is_some_and(|kept| kept == value));
            misuse
        };
        let is_forced = |value: &str, status: Value, observed: &Observed, wanted: WantedPower| {
            let vm = vm(|vm| {
                vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: value });
                vm["status"] = status;
            });
            force_stop(&vm, observed, None, wanted).pod_uid.is_some()
        };
        let (this, other) = ("Pod-apple", "another");
        let ignored = json!({ "forceStopIgnored": this });
        for (value, status, observed, wanted, forced, misuse) in [
            (this, Value::Null, &going, WantedPower::Up, true, None),
            (this, Value::Null, &going, WantedPower::Down, true, None),
            (this, Value::Null, &alive, WantedPower::Down, true, None),
            (this, Value::Null, &alive, WantedPower::Halting, true, None),
            (this, Value::Null, &alive, WantedPower::Up, false, Some(Misuse::NotStopping)),
            (this, ignored.clone(), &alive, WantedPower::Up, false, None),
            (this, ignored.clone(), &alive, WantedPower::Down, false, None),
            (this, ignored, &going, WantedPower::Down, false, None),
            (this, json!({ "forceStopIgnored": "an earlier one" }), &going, WantedPower::Down, true, None),
            (other, Value::Null, &alive, WantedPower::Up, false, Some(Misuse::AnotherPod)),
            (other, Value::Null, &going, WantedPower::Down, false, Some(Misuse::AnotherPod)),
            (other, json!({ "forceStopIgnored": other }), &going, WantedPower::Down, false, None),
            (other, Value::Null, &nothing(), WantedPower::Down, false, None),
        ] {
            let row = format!("{value} {status} {wanted:?}");
            assert_eq!(decide(value, status.clone(), observed, wanted), misuse, "{row}");
            assert_eq!(is_forced(value, status, observed, wanted), forced, "{row}");
        }
        assert_eq!(force_stop(&vm(|_| ()), &alive, None, WantedPower::Down), ForceStop::default(), "no annotation");
    }

    #[test]
    fn a_forced_stop_that_was_seen_lasts_until_its_pod_is_gone_also_without_the_annotation() {
        let pods = |deleting: bool| {
            applied(&rendered(&vm(|_| ()), &nothing()), move |kind, object| {
                if kind == "Pod" && deleting {
                    object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
                }
            })
        };
        let decide = |seen: &str, annotation: Option<&str>, observed: &Observed, wanted: WantedPower| {
            let vm = vm(|vm| {
                vm["status"] = json!({ "endGuest": seen });
                if let Some(value) = annotation {
                    vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: value });
                }
            });
            force_stop(&vm, observed, None, wanted).pod_uid.is_some()
        };
        let (alive, going) = (pods(false), pods(true));
        assert!(
            decide("Pod-apple", None, &going, WantedPower::Down)
                && decide("Pod-apple", None, &alive, WantedPower::Down)
        );
        assert!(decide("Pod-apple", None, &going, WantedPower::Up), "it is started again, and its Pod goes");
        assert!(decide("Pod-apple", Some("another"), &going, WantedPower::Down));
        assert!(!decide("Pod-apple", None, &alive, WantedPower::Up), "it was started again, and its Pod stays");
        assert!(!decide("Pod-apple", None, &nothing(), WantedPower::Down), "its Pod is gone");
        assert!(!decide("another", None, &going, WantedPower::Down), "a later Pod");
    }

    #[test]
    fn a_shortened_grace_period_that_is_over_is_a_forced_stop() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        for (grace, seconds_ago, forced) in
            [(1, 31, true), (1, 29, false), (914, 31, true), (915, 31, false), (915, 1000, false), (1, -10, false)]
        {
            let end = now - SignedDuration::from_secs(seconds_ago);
            let mut observed = applied(&rendered(&vm(|_| ()), &nothing()), move |kind, object| {
                if kind == "Pod" {
                    object["metadata"]["deletionTimestamp"] = json!(end.to_string());
                    object["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
                }
            });
            observed.now = now;
            let pod = observed.objects.iter().find(|object| object.key.is_pod()).map(AsRef::as_ref);
            for wanted in [WantedPower::Up, WantedPower::Down, WantedPower::Halting] {
                let decided = force_stop(&vm(|_| ()), &observed, pod, wanted);
                let expected = forced.then(|| "Pod-apple".to_owned());
                assert_eq!(decided, ForceStop { pod_uid: expected, ..ForceStop::default() }, "{grace} {seconds_ago}");
            }
        }
    }
}
