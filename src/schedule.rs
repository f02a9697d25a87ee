//! When a VM is reconciled again, and which failures a person hears of.

use std::time::Duration;

/// The first and the longest pause after a failure.
const BACK_OFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// When a VM is reconciled again while a kind of its objects is being listed. Nothing else wakes a VM that has no such objects.
const WHILE_LISTING: Duration = Duration::from_secs(10);

/// How many failures in a row that may end by themselves are not reported.
const UNREPORTED: u32 = 2;

/// What can be expected of a request that failed, if it is sent again as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Persistence {
    /// The API server asked for a pause, or another client was faster: the next try decides anew.
    Busy,
    /// It may succeed: the API server did not answer, or had an error of its own.
    Transient,
    /// It fails again until somebody changes something.
    Lasting,
}

/// Whether the VM's status and an event report a failure. `failures_before` counts those in a row before this one. What could pass and
/// does not may need a person too, for example a webhook that does not answer; what asks for a pause gets no further write.
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

/// When a VM is reconciled again though no watch reports a change; `None`: not at all. `planned` is the plan's own wish.
pub fn next(planned: Option<Duration>, is_listing: bool) -> Option<Duration> {
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
    fn a_failure_that_may_pass_is_reported_when_it_does_not() {
        let reported = |persistence| [0, 1, 2, 3].map(|before| is_reported(persistence, before));
        assert_eq!(reported(Persistence::Lasting), [true; 4]);
        assert_eq!(reported(Persistence::Transient), [false, false, true, true]);
        assert_eq!(reported(Persistence::Busy), [false; 4]);
    }

    #[test]
    fn a_vm_is_reconciled_again_at_the_earliest_wish() {
        let seconds = Duration::from_secs;
        assert_eq!(next(None, false), None);
        assert_eq!(next(Some(seconds(3)), true), Some(seconds(3)));
        assert_eq!(next(Some(seconds(30)), true), Some(WHILE_LISTING));
        assert_eq!(next(None, true), Some(WHILE_LISTING));
    }
}
