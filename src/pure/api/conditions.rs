//! The types of conditions, and how a condition gets its time.

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::Reason;

/// The VM is as its spec wants it (written by the manager).
pub const READY: &str = "Ready";
/// The template set in force renders this VM (written by the manager).
pub const TEMPLATES_VALID: &str = "TemplatesValid";
/// A change waits for the next start (written by the manager).
pub const RESTART_REQUIRED: &str = "RestartRequired";
/// All claims are bound and as the spec describes them (written by the manager).
pub const STORAGE_READY: &str = "StorageReady";
/// Something is wrong with an object of the VM that no Pod mounts. It is never `True` (written by the manager).
pub const OBJECTS_READY: &str = "ObjectsReady";
/// What is wrong with Ready or ObjectsReady is nothing that time mends. It is never `False` (written by the manager).
pub const STALLED: &str = "Stalled";
/// Nobody sets `spec.vm.state`, so the last one stays in effect (written by the manager).
pub const POWER_UNMANAGED: &str = "PowerUnmanaged";
/// Something of the spec will probably not be as it is meant. It is never `False` (written by the manager).
pub const SPEC_QUESTIONABLE: &str = "SpecQuestionable";
/// The annotation `stateUntil` outranks `spec.vm.state`; `False` if it is ignored (written by the manager).
pub const STATE_OVERRIDDEN: &str = "StateOverridden";
/// QEMU runs the guest (written by the runner).
pub const RUNNING: &str = "Running";
/// QEMU refused a change of the running VM. It is never `True` (written by the runner).
pub const CHANGES_APPLIED: &str = "ChangesApplied";
/// A device of the guest does not work, such as a disk whose storage is full. It is never `True` (written by the runner).
pub const DEVICES_READY: &str = "DevicesReady";
/// The guest agent has answered (written by the runner).
pub const BOOTED: &str = "Booted";
/// The login agent in the guest answers (written by the runner).
pub const VMOP_AGENT_CONNECTED: &str = "VmopAgentConnected";
/// A user is logged in in the guest (written by the runner).
pub const USER_LOGGED_IN: &str = "UserLoggedIn";
/// A viewer is connected to the display (written by the runner).
pub const CONSOLE_CONNECTED: &str = "ConsoleConnected";

/// A condition without its time, as the manager or the runner derives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewCondition {
    /// One of the constants of this module.
    pub type_: &'static str,
    /// `True` or `False`. With the reason [`Reason::Unknown`] the condition is `Unknown`, whatever this is.
    pub status: bool,
    /// The reason.
    pub reason: Reason,
    /// A sentence for people.
    pub message: String,
}

/// Gives new conditions their times: a condition keeps `lastTransitionTime` until its status changes
/// (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/condition/>).
pub fn with_times(
    new: Vec<NewCondition>,
    current: &[Condition],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    new.into_iter()
        .map(|NewCondition { type_, status, reason, message }| {
            let status = match (reason, status) {
                (Reason::Unknown, _) => "Unknown",
                (_, true) => "True",
                (_, false) => "False",
            };
            let since =
                find(current, type_).filter(|old| old.status == status).map(|old| old.last_transition_time.clone());
            Condition {
                type_: type_.to_owned(),
                status: status.to_owned(),
                reason: reason.as_str().to_owned(),
                message,
                last_transition_time: since.unwrap_or(Time(now)),
                observed_generation: generation,
            }
        })
        .collect()
}

/// The condition of that type.
pub fn find<'a>(conditions: &'a [Condition], type_: &str) -> Option<&'a Condition> {
    conditions.iter().find(|condition| condition.type_ == type_)
}

/// The reason of a condition; `None` for a reason of another program.
pub fn reason(condition: &Condition) -> Option<Reason> {
    Reason::parse(&condition.reason)
}

/// Whether the condition of that type exists and is `True`.
pub fn is_true(conditions: &[Condition], type_: &str) -> bool {
    find(conditions, type_).is_some_and(|condition| condition.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ready(status: bool, reason: Reason) -> NewCondition {
        NewCondition { type_: READY, status, reason, message: String::new() }
    }

    #[test]
    fn the_time_changes_only_with_the_status() {
        let (monday, tuesday) = (Timestamp::UNIX_EPOCH, Timestamp::from_second(86_400).unwrap());
        let first = with_times(vec![ready(false, Reason::Starting)], &[], Some(1), monday);
        let same = with_times(vec![ready(false, Reason::ImagePullFailed)], &first, Some(2), tuesday);
        assert_eq!(same[0].last_transition_time, Time(monday));
        assert_eq!((same[0].reason.as_str(), same[0].observed_generation), ("ImagePullFailed", Some(2)));
        let other = with_times(vec![ready(true, Reason::Running)], &same, Some(2), tuesday);
        assert_eq!(other[0].last_transition_time, Time(tuesday));
        assert!(is_true(&other, READY) && !is_true(&same, READY));
    }
}
