//! When a VM is reconciled again, and which failures are reported.

use std::time::Duration;

/// The first and the longest pause after a failure.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// The pause until a VM is reconciled again while a kind of its objects is being listed. A VM without objects of that kind gets no event
/// when the list is complete.
const WHILE_LISTING: Duration = Duration::from_secs(10);

/// The number of transient failures in a row that are not reported.
const UNREPORTED: u32 = 2;

/// Whether a failed request may succeed when the manager sends it again unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// The API server asked for a pause, or another client has changed the object. The next reconcile decides again.
    Busy,
    /// It may succeed: the API server did not answer, or had an internal error.
    Transient,
    /// It fails again until a person changes something.
    Lasting,
}

/// Whether the VM's status and an event report a failure. `failures_before` is the number of failures in a row before this one. A
/// transient failure that lasts may need a person too, for example if a webhook does not answer. An API server that is busy gets no
/// further write.
pub fn is_reported(persistence: Persistence, failures_before: u32) -> bool {
    match persistence {
        Persistence::Lasting => true,
        Persistence::Transient => failures_before >= UNREPORTED,
        Persistence::Busy => false,
    }
}

/// The pause after a failure. It doubles with each failure in a row before this one.
pub fn back_off(failures_before: u32) -> Duration {
    let (first, longest) = BACK_OFF;
    first.saturating_mul(1 << failures_before.min(10)).min(longest)
}

/// The pause until a VM is reconciled again if no watch reports a change; `None`: it is not. `planned` is the plan's pause.
pub fn requeue_after(planned: Option<Duration>, is_listing: bool) -> Option<Duration> {
    planned.into_iter().chain(is_listing.then_some(WHILE_LISTING)).min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute() {
        let pauses: Vec<u128> = [0, 1, 2, 6, 7, 1000].map(|failures| back_off(failures).as_millis()).into();
        assert_eq!(pauses, [500, 1000, 2000, 32_000, 60_000, 60_000]);
    }

    #[test]
    fn a_transient_failure_is_reported_after_two_others() {
        let reported = |persistence| [0, 1, 2, 3].map(|before| is_reported(persistence, before));
        assert_eq!(reported(Persistence::Lasting), [true; 4]);
        assert_eq!(reported(Persistence::Transient), [false, false, true, true]);
        assert_eq!(reported(Persistence::Busy), [false; 4]);
    }

    #[test]
    fn the_shorter_pause_counts() {
        let seconds = Duration::from_secs;
        assert_eq!(requeue_after(None, false), None);
        assert_eq!(requeue_after(Some(seconds(3)), true), Some(seconds(3)));
        assert_eq!(requeue_after(Some(seconds(30)), true), Some(WHILE_LISTING));
        assert_eq!(requeue_after(None, true), Some(WHILE_LISTING));
    }
}
