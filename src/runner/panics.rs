//! What is done when the guest panics, or its watchdog is not fed in time: when the VM is reset, or that it is ended. Pure.
//!
//! QEMU has paused the guest then (`-action panic=pause` in the QEMU template), so nothing is lost, and somebody can look at it. A guest that
//! panics at each start is reset less and less often, as the kubelet does it with containers.

use std::time::{Duration, Instant};

use super::{go_on::GuestState, qmp::Event};
use crate::render::command_line::{Panic, Reaction, Reactions};

/// The time until the first reset: the VM's status says meanwhile what has happened.
pub const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest time until a reset.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// A guest that has run for this time begins anew with [`FIRST_PAUSE`].
pub const IS_STABLE: Duration = Duration::from_secs(600);

impl Panic {
    /// Whether and how the guest has failed if this is what it does.
    pub fn of(guest: GuestState) -> Option<Self> {
        match guest {
            GuestState::Panicked => Some(Self::Kernel),
            GuestState::Hung => Some(Self::Watchdog),
            GuestState::NotStarted
            | GuestState::Executes
            | GuestState::StoppedByDisk
            | GuestState::ShutDown
            | GuestState::Stopped => None,
        }
    }
}

/// The panics of a guest.
#[derive(Debug)]
pub struct Panics {
    reactions: Reactions,
    has_panicked: bool,
    /// When the VM must be reset.
    reset_at: Option<Instant>,
    pause: Duration,
    /// When the last reset was.
    last_reset: Option<Instant>,
}

impl Panics {
    /// No panic yet.
    pub fn new(reactions: Reactions) -> Self {
        Self { reactions, has_panicked: false, reset_at: None, pause: FIRST_PAUSE, last_reset: None }
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
        if let Some(panic) = self.panic(event) {
            if self.has_panicked {
                return false;
            }
            self.has_panicked = true;
            match self.reactions.to(panic).map(|(reaction, _)| reaction) {
                Some(Reaction::Reset) => self.schedule(now),
                Some(Reaction::End) => return true,
                Some(Reaction::Keep | Reaction::GoOn) | None => {}
            }
            return false;
        }
        match event {
            // Somebody has reset the VM, or let the guest go on.
            Event::Reset { .. } | Event::Resume => (self.has_panicked, self.reset_at) = (false, None),
            _ => {}
        }
        false
    }

    /// The panic that an event reports, if the guest does not go on after it.
    pub fn panic(&self, event: &Event) -> Option<Panic> {
        let panic = match event {
            Event::GuestPanicked {} => Panic::Kernel,
            Event::Watchdog {} => Panic::Watchdog,
            _ => return None,
        };
        let goes_on = self.reactions.to(panic).is_some_and(|(reaction, _)| reaction == Reaction::GoOn);
        (!goes_on).then_some(panic)
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
    use crate::api::{OnPanic, WatchdogAction};

    const RESET: Event = Event::Reset { guest: false };

    #[test]
    fn a_guest_that_panics_again_and_again_is_reset_less_and_less_often() {
        let start = Instant::now();
        let mut panics = Panics::new(Reactions::on(OnPanic::Restart));
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
        let mut panics = Panics::new(Reactions::on(OnPanic::Restart));
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
            let mut panics = Panics::new(policy.map(Reactions::on).unwrap_or_default());
            assert_eq!(panics.event(&Event::GuestPanicked {}, now), ends, "{policy:?}");
            assert_eq!((panics.reset_at(), panics.has_panicked()), (None, true), "{policy:?}");
            assert!(!panics.event(&Event::GuestPanicked {}, now), "a panic is reported once");
        }
    }

    #[test]
    fn a_watchdog_has_an_action_of_its_own_or_that_of_a_panic() {
        let now = Instant::now();
        for (on_panic, action, expected) in [
            (None, None, None),
            (Some(OnPanic::Stop), None, Some(Reaction::End)),
            (Some(OnPanic::Stop), Some(WatchdogAction::Reset), Some(Reaction::Reset)),
            (None, Some(WatchdogAction::Poweroff), Some(Reaction::End)),
            (None, Some(WatchdogAction::Pause), Some(Reaction::Keep)),
            (Some(OnPanic::Keep), Some(WatchdogAction::None), Some(Reaction::GoOn)),
        ] {
            let reactions = Reactions { on_panic, watchdog: action };
            assert_eq!(reactions.watchdog(), expected, "{reactions:?}");
            let mut panics = Panics::new(reactions);
            assert_eq!(panics.event(&Event::Watchdog {}, now), expected == Some(Reaction::End), "{reactions:?}");
            assert_eq!(panics.has_panicked(), expected != Some(Reaction::GoOn), "{reactions:?}");
            assert_eq!(panics.reset_at().is_some(), expected == Some(Reaction::Reset), "{reactions:?}");
            // A panic is what it was.
            let mut panics = Panics::new(reactions);
            assert_eq!(panics.event(&Event::GuestPanicked {}, now), on_panic == Some(OnPanic::Stop), "{reactions:?}");
            assert_eq!(reactions.may_end(), on_panic == Some(OnPanic::Stop) || expected == Some(Reaction::End));
        }
    }
}
