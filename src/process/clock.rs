//! The clocks by which the manager decides. A simulation lets those of its thread follow tokio's, which it can advance.

use std::{cell::Cell, time::Duration};

use k8s_openapi::jiff::Timestamp;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

thread_local! {
    static PLAYED: Cell<Option<Played>> = const { Cell::new(None) };
}

/// The clocks of a simulation.
#[derive(Clone, Copy)]
struct Played {
    /// The times at `at`.
    wall: Timestamp,
    since_boot: Duration,
    at: Instant,
}

/// The time on the wall.
pub fn now() -> Timestamp {
    match PLAYED.get() {
        Some(Played { wall, at, .. }) => wall.checked_add(at.elapsed()).unwrap_or(wall),
        None => Timestamp::now(),
    }
}

/// The time since the host's start, including the time that it was suspended (clock_gettime(2), `CLOCK_BOOTTIME`).
pub fn since_boot() -> Duration {
    if let Some(Played { since_boot, at, .. }) = PLAYED.get() {
        return since_boot + at.elapsed();
    }
    let now = clock_gettime(ClockId::Boottime);
    let (seconds, nanoseconds) = (u64::try_from(now.tv_sec), u32::try_from(now.tv_nsec));
    Duration::new(seconds.unwrap_or_default(), nanoseconds.unwrap_or_default())
}

/// From now on the clocks of this thread go on from these times with tokio's clock. To be called within its runtime.
pub fn follow_tokio(wall: Timestamp, since_boot: Duration) {
    PLAYED.set(Some(Played { wall, since_boot, at: Instant::now() }));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn played_clocks_go_with_tokios() {
        let (noon, minute) = (crate::test_support::noon(), Duration::from_secs(60));
        assert_ne!(now(), noon);
        follow_tokio(noon, minute);
        tokio::time::sleep(minute).await;
        assert_eq!((now(), since_boot()), (noon + minute, 2 * minute));
    }
}
