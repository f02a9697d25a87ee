//! What is done when the guest panics, or its watchdog is not fed in time: when the VM is reset, or that it is ended. Pure.
//!
//! QEMU has paused the guest then (`-action panic=pause` in the QEMU template), so nothing is lost, and somebody can look at it. A guest that
//! panics at each start is reset less and less often, as the kubelet does it with containers.

use std::time::{Duration, Instant};

use super::qmp::Event;
use crate::api::OnPanic;

/// The time until the first reset: the VM's status says meanwhile what has happened.
pub const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest time until a reset.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// A guest that has run for this time begins anew with [`FIRST_PAUSE`].
pub const IS_STABLE: Duration = Duration::from_secs(600);

/// The panics of a guest.
#[derive(Debug)]
pub struct Panics {
    policy: Option<OnPanic>,
    has_panicked: bool,
    /// When the VM must be reset.
    reset_at: Option<Instant>,
    pause: Duration,
    /// When the last reset was.
    last_reset: Option<Instant>,
}

impl Panics {
    /// No panic yet. Without a policy there is no device that reports one.
    pub fn new(policy: Option<OnPanic>) -> Self {
        Self { policy, has_panicked: false, reset_at: None, pause: FIRST_PAUSE, last_reset: None }
    }

    /// Whether the guest has panicked, and was not reset since: no operating system hears the power button.
    pub fn has_panicked(&self) -> bool {
        self.has_panicked
    }

    /// When [`Panics::is_due`] must be asked.
    pub fn reset_at(&self) -> Option<Instant> {
        self.reset_at
    }

    /// Takes note of an event. Returns whether QEMU must be ended.
    pub fn event(&mut self, event: &Event, now: Instant) -> bool {
        match event {
            Event::GuestPanicked {} | Event::Watchdog {} if !self.has_panicked => {
                self.has_panicked = true;
                match self.policy {
                    Some(OnPanic::Restart) => self.schedule(now),
                    Some(OnPanic::Stop) => return true,
                    Some(OnPanic::Keep) | None => {}
                }
            }
            // Somebody has reset the VM, or let the guest go on.
            Event::Reset { .. } | Event::Resume => (self.has_panicked, self.reset_at) = (false, None),
            _ => {}
        }
        false
    }

    fn schedule(&mut self, now: Instant) {
        let was_stable = self.last_reset.is_none_or(|last| now.saturating_duration_since(last) >= IS_STABLE);
        self.pause = if was_stable { FIRST_PAUSE } else { (self.pause * 2).min(LONGEST_PAUSE) };
        self.reset_at = Some(now + self.pause);
    }

    /// Whether the VM must be reset now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.reset_at.is_some_and(|at| now >= at);
        if is_due {
            self.last_reset = Some(now);
            // If the reset fails, it is tried again.
            self.reset_at = Some(now + self.pause);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESET: Event = Event::Reset { guest: false };

    #[test]
    fn a_guest_that_panics_again_and_again_is_reset_less_and_less_often() {
        let start = Instant::now();
        let mut panics = Panics::new(Some(OnPanic::Restart));
        let mut now = start;
        let mut pauses = vec![];
        for _ in 0..9 {
            assert!(!panics.event(&Event::GuestPanicked {}, now));
            let at = panics.reset_at().unwrap();
            pauses.push((at - now).as_secs());
            assert!(!panics.is_due(at - Duration::from_secs(1)) && panics.is_due(at));
            panics.event(&RESET, at);
            panics.event(&Event::Resume, at);
            assert_eq!((panics.reset_at(), panics.has_panicked()), (None, false));
            now = at + Duration::from_secs(20);
        }
        assert_eq!(pauses, [5, 10, 20, 40, 80, 160, 300, 300, 300]);
        let later = now + IS_STABLE;
        panics.event(&Event::Watchdog {}, later);
        assert_eq!(panics.reset_at(), Some(later + FIRST_PAUSE));
    }

    #[test]
    fn a_reset_that_fails_is_tried_again_and_one_by_a_person_counts() {
        let start = Instant::now();
        let mut panics = Panics::new(Some(OnPanic::Restart));
        panics.event(&Event::GuestPanicked {}, start);
        let at = start + FIRST_PAUSE;
        assert!(panics.is_due(at) && !panics.is_due(at) && panics.is_due(at + FIRST_PAUSE));
        panics.event(&RESET, at);
        assert!(!panics.is_due(at + LONGEST_PAUSE));
    }

    #[test]
    fn the_policy_decides_what_a_panic_means() {
        let now = Instant::now();
        for (policy, ends) in [(None, false), (Some(OnPanic::Keep), false), (Some(OnPanic::Stop), true)] {
            let mut panics = Panics::new(policy);
            assert_eq!(panics.event(&Event::GuestPanicked {}, now), ends, "{policy:?}");
            assert_eq!((panics.reset_at(), panics.has_panicked()), (None, true), "{policy:?}");
            assert!(!panics.event(&Event::GuestPanicked {}, now), "a panic is reported once");
        }
    }
}
