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
//!
//! An ignored value is kept in `status.forceStopIgnored`, so that it stays ignored when the VM is stopped later. The runner reads it there
//! too. Who wants a forced stop then removes the annotation and sets it again.

use kube::ResourceExt;

use super::{Wanted, is_restart_wanted};
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

/// Decides by the table above. `pod` is the VM's Pod, if it has one.
pub fn force_stop(vm: &VirtualMachine, observed: &Observed, pod: Option<&Object>, wanted: Wanted) -> ForceStop {
    let Some(value) = vm.annotations().get(FORCE_STOP_ANNOTATION) else { return ForceStop::default() };
    let ignored = |misuse| ForceStop { pod_uid: None, ignored: Some(value.clone()), misuse };
    let is_known = vm.status.as_ref().is_some_and(|status| status.force_stop_ignored.as_ref() == Some(value));
    let named =
        observed.objects.iter().chain(&observed.others).find(|object| object.key.is_pod() && object.uid == *value);
    let stays = |named: &Object| named.deleting.is_none() && wanted == Wanted::Up && !is_restart_wanted(vm, named);
    match named {
        _ if is_known => ignored(None),
        Some(named) if stays(named) => ignored(Some(Misuse::NotStopping)),
        Some(_) => ForceStop { pod_uid: Some(value.clone()), ..ForceStop::default() },
        None => ignored(pod.map(|_| Misuse::AnotherPod)),
    }
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
        let decide = |value: &str, status: Value, observed: &Observed, wanted: Wanted| {
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
        let is_forced = |value: &str, status: Value, observed: &Observed, wanted: Wanted| {
            let vm = vm(|vm| {
                vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: value });
                vm["status"] = status;
            });
            force_stop(&vm, observed, None, wanted).pod_uid.is_some()
        };
        let (this, other) = ("Pod-apple", "another");
        let ignored = json!({ "forceStopIgnored": this });
        for (value, status, observed, wanted, forced, misuse) in [
            (this, Value::Null, &going, Wanted::Up, true, None),
            (this, Value::Null, &going, Wanted::Down, true, None),
            (this, Value::Null, &alive, Wanted::Down, true, None),
            (this, Value::Null, &alive, Wanted::Halting, true, None),
            (this, Value::Null, &alive, Wanted::Up, false, Some(Misuse::NotStopping)),
            (this, ignored.clone(), &alive, Wanted::Up, false, None),
            (this, ignored.clone(), &alive, Wanted::Down, false, None),
            (this, ignored, &going, Wanted::Down, false, None),
            (this, json!({ "forceStopIgnored": "an earlier one" }), &going, Wanted::Down, true, None),
            (other, Value::Null, &alive, Wanted::Up, false, Some(Misuse::AnotherPod)),
            (other, Value::Null, &going, Wanted::Down, false, Some(Misuse::AnotherPod)),
            (other, json!({ "forceStopIgnored": other }), &going, Wanted::Down, false, None),
            (other, Value::Null, &nothing(), Wanted::Down, false, None),
        ] {
            let row = format!("{value} {status} {wanted:?}");
            assert_eq!(decide(value, status.clone(), observed, wanted), misuse, "{row}");
            assert_eq!(is_forced(value, status, observed, wanted), forced, "{row}");
        }
        assert_eq!(force_stop(&vm(|_| ()), &alive, None, Wanted::Down), ForceStop::default(), "no annotation");
    }
}
