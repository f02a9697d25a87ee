//! A power state for some time: what the annotation [`STATE_UNTIL_ANNOTATION`] means.
//!
//! Its value is a power state and the time until which it outranks `spec.vm.state`: `Stopped 2026-11-26T12:00:00Z`. What applies the spec
//! from Git does not know the annotation, so no sync takes it back.
//!
//! | the value | what follows |
//! |---|---|
//! | a time that is to come, at most [`LONGEST`] from now | its state is in force |
//! | a time that has passed | over: `spec.vm.state` is in force again |
//! | a time farther away | ignored, with an event |
//! | over or ignored before (`status.stateUntilIgnored`) | stays so, until the annotation has another value |
//! | cannot be read | ignored, with an event |
//!
//! The clock is the manager's. A value that is over stays over for a manager whose clock is behind, and one that is too far off does not
//! come in force weeks later, when nobody thinks of it: both are kept in the status. Nobody has to remove the annotation; it has no
//! effect any more.
//!
//! While a state is in force:
//!
//! - `status.power`, the power state that stays when nobody sets `spec.vm.state` any more, is that without the annotation. So the VM is
//!   afterwards as it would be without it.
//! - A guest that shuts itself down is treated as under `state: Running` that is applied from Git: with `guestShutdownStops` the VM stays
//!   down, also until the end of the time, and the manager does not write `spec.vm.state`.
//! - A VM that was down because of its guest's own shutdown is so afterwards, too, if the annotation only stopped it. A shutdown that is
//!   reported while the annotation stops the VM is that of the stop, and keeps nothing down afterwards.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::{SignedDuration, Timestamp},
};
use kube::ResourceExt;

use crate::{
    api::{PowerState, VirtualMachine, status::StateOverride},
    object::STATE_UNTIL_ANNOTATION,
};

/// The longest time for which the spec can be outranked.
pub const LONGEST: SignedDuration = SignedDuration::from_hours(30 * 24);

/// The most characters of a value that can be read. The longest form of a time has fewer.
const LONGEST_VALUE: usize = 64;

/// What the annotation means now.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Until {
    /// The state that outranks the spec, and until when.
    pub in_force: Option<StateOverride>,
    /// The new `status.stateUntilIgnored`.
    pub ignored: Option<String>,
    /// Why the value has no effect, if a person must know that.
    pub misuse: Option<Misuse>,
}

/// Why the annotation is ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misuse {
    /// It is no state and time. The value, shortened.
    Unreadable(String),
    /// Its time is, or was when the manager saw it first, farther away than [`LONGEST`].
    TooFar,
}

/// The value of the annotation for a state until that time.
pub fn value(state: PowerState, until: Timestamp) -> String {
    let StateOverride { state, until } = StateOverride { state, until: Time(until) };
    format!("{} {}", state.as_str(), crate::api::status::whole_seconds(until.0))
}

/// Decides by the table above.
pub fn until(vm: &VirtualMachine, now: Timestamp) -> Until {
    let Some(value) = vm.annotations().get(STATE_UNTIL_ANNOTATION) else { return Until::default() };
    let Some(read) = read(value) else {
        let misuse = Misuse::Unreadable(value.chars().filter(|char| !char.is_control()).take(LONGEST_VALUE).collect());
        return Until { misuse: Some(misuse), ..Until::default() };
    };
    let known = vm.status.as_ref().and_then(|status| status.state_until_ignored.as_ref());
    let is_to_come = read.until.0 > now;
    let is_too_far = now.checked_add(LONGEST).is_ok_and(|latest| read.until.0 > latest);
    if known == Some(value) || !is_to_come || is_too_far {
        return Until {
            ignored: Some(value.clone()),
            misuse: is_to_come.then_some(Misuse::TooFar),
            ..Until::default()
        };
    }
    Until { in_force: Some(read), ..Until::default() }
}

/// Reads `STATE TIME`. The time is in whole seconds.
fn read(value: &str) -> Option<StateOverride> {
    let (state, time) = Some(value).filter(|value| value.len() <= LONGEST_VALUE)?.trim().split_once(' ')?;
    let state = [PowerState::Running, PowerState::Stopped].into_iter().find(|known| known.as_str() == state)?;
    let time: Timestamp = time.trim().parse().ok()?;
    Some(StateOverride { state, until: Time(Timestamp::from_second(time.as_second()).ok()?) })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_support::{noon, vm};

    fn annotated(value: &str, status: Value) -> VirtualMachine {
        vm(|vm| {
            vm["metadata"]["annotations"] = json!({ STATE_UNTIL_ANNOTATION: value });
            vm["status"] = status;
        })
    }

    /// Noon is 2027-01-15T08:00:00Z.
    #[test]
    fn the_table() {
        let soon = "Stopped 2027-01-15T10:00:00Z";
        let far = "Running 2027-02-14T08:00:01Z";
        let ignored = |value: &str| json!({ "stateUntilIgnored": value });
        let (over, too_far) = (Ok(None), Ok(Some(Misuse::TooFar)));
        for (value, status, expected) in [
            (soon, Value::Null, Err((PowerState::Stopped, "2027-01-15T10:00:00Z"))),
            (soon, ignored("Stopped 2027-01-14T10:00:00Z"), Err((PowerState::Stopped, "2027-01-15T10:00:00Z"))),
            ("Running 2027-01-15T08:00:01Z", Value::Null, Err((PowerState::Running, "2027-01-15T08:00:01Z"))),
            ("Running 2027-02-14T08:00:00Z", Value::Null, Err((PowerState::Running, "2027-02-14T08:00:00Z"))),
            ("Running  2027-01-15T11:00:00.7+02:00 ", Value::Null, Err((PowerState::Running, "2027-01-15T09:00:00Z"))),
            ("Running 2027-01-15T08:00:00Z", Value::Null, over.clone()),
            ("Running 2020-01-15T08:00:00Z", Value::Null, over),
            (far, Value::Null, too_far.clone()),
            // It was too far off when it was set, or this manager's clock is behind.
            (soon, ignored(soon), too_far),
        ] {
            let Until { in_force, ignored, misuse } = until(&annotated(value, status), noon());
            let found = in_force.map(|found| (found.state, found.until.0.to_string()));
            match expected {
                Err((state, time)) => {
                    assert_eq!((found, ignored, misuse), (Some((state, time.to_owned())), None, None), "{value}");
                }
                Ok(expected) => {
                    assert_eq!((found, ignored.as_deref(), misuse), (None, Some(value), expected), "{value}");
                }
            }
        }
        assert_eq!(until(&vm(|_| ()), noon()), Until::default());
    }

    #[test]
    fn what_cannot_be_read_is_told_in_a_few_characters() {
        let long = format!("Stopped {}", "1".repeat(1000));
        for value in ["", "Stopped", "stopped 2027-01-15T10:00:00Z", "Paused 2027-01-15T10:00:00Z", "Running 2h", &long]
        {
            let Until { in_force, ignored, misuse } = until(&annotated(value, Value::Null), noon());
            let Some(Misuse::Unreadable(told)) = misuse else { panic!("{value}: {misuse:?}") };
            assert!(value.starts_with(&told) && told.len() <= LONGEST_VALUE, "{told}");
            assert_eq!((in_force, ignored), (None, None), "{value}");
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let end = noon() + SignedDuration::from_millis(90_500);
        let value = value(PowerState::Stopped, end);
        assert_eq!(value, "Stopped 2027-01-15T08:01:30Z");
        assert!(until(&annotated(&value, Value::Null), noon()).in_force.is_some());
    }
}
