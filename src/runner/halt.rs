//! Whether the guest is stopped after it has run, and when it is tried to let it go on. Pure.
//!
//! QEMU stops the guest before a write to a disk whose storage is full would be lost (`werror=enospc` in the QEMU template). When the guest is
//! continued, QEMU makes the write again. Nobody tells the runner that there is space again, so it tries. A guest that a person has
//! stopped stays so until a person continues it.

use std::time::{Duration, Instant};

use super::qmp::Event;

/// The time until the first try. It doubles with each try that fails at once, up to [`LONGEST_PAUSE`].
pub const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// The longest time between two tries.
pub const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// What stops the guest.
#[derive(Debug)]
pub struct Halt {
    is_stopped: bool,
    /// When the guest is tried again, if a disk has stopped it.
    again_at: Option<Instant>,
    pause: Duration,
    /// When the guest went on the last time.
    resumed: Option<Instant>,
}

impl Default for Halt {
    fn default() -> Self {
        Self { is_stopped: false, again_at: None, pause: FIRST_PAUSE, resumed: None }
    }
}

impl Halt {
    /// Whether the guest is stopped.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Whether the guest has executed.
    pub fn has_run(&self) -> bool {
        self.resumed.is_some()
    }

    /// When [`Halt::is_due`] must be asked.
    pub fn again_at(&self) -> Option<Instant> {
        self.again_at
    }

    /// Takes note of an event.
    pub fn event(&mut self, event: &Event, now: Instant) {
        match event {
            Event::Resume => {
                (self.is_stopped, self.again_at, self.resumed) = (false, None, Some(now));
            }
            Event::Stop => self.is_stopped = true,
            // QEMU sends it before STOP. Several writes may fail at once, also after a person has stopped the guest.
            Event::BlockIoError { stops: true } if !self.is_stopped && self.again_at.is_none() => self.disk_error(now),
            _ => {}
        }
    }

    fn disk_error(&mut self, now: Instant) {
        let has_run = self.resumed.is_none_or(|resumed| now.saturating_duration_since(resumed) >= self.pause);
        self.pause = if has_run { FIRST_PAUSE } else { (self.pause * 2).min(LONGEST_PAUSE) };
        self.again_at = Some(now + self.pause);
    }

    /// Whether the guest must be tried now.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.again_at.is_some_and(|at| now >= at);
        if is_due {
            // If QEMU does not even try, no event follows.
            self.again_at = Some(now + self.pause);
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Scenario {
        start: Instant,
        now: Instant,
        halt: Halt,
    }

    impl Scenario {
        fn new() -> Self {
            let start = Instant::now();
            Self { start, now: start, halt: Halt::default() }
        }
        fn at(&mut self, seconds: u64, events: &[Event]) {
            self.now = self.start + Duration::from_secs(seconds);
            for event in events {
                self.halt.event(event, self.now);
            }
        }
        /// In how many seconds it is tried.
        fn again_in(&self) -> Option<u64> {
            self.halt.again_at().map(|at| (at - self.now).as_secs())
        }
    }

    const FULL: [Event; 2] = [Event::BlockIoError { stops: true }, Event::Stop];

    #[test]
    fn a_guest_that_a_full_disk_has_stopped_is_tried_again_and_less_often_as_long_as_it_is_full() {
        let mut scenario = Scenario::new();
        scenario.at(0, &FULL);
        // A second write that failed.
        scenario.at(1, &FULL);
        assert_eq!((scenario.halt.is_stopped(), scenario.again_in()), (true, Some(4)));
        assert!(!scenario.halt.is_due(scenario.now));
        let mut pauses = vec![];
        let mut now = 5;
        for _ in 0..5 {
            scenario.at(now, &[]);
            assert!(scenario.halt.is_due(scenario.now));
            scenario.at(now, &[Event::Resume]);
            assert!(!scenario.halt.is_stopped());
            scenario.at(now, &FULL);
            pauses.push(scenario.again_in().unwrap());
            now += pauses.last().unwrap();
        }
        assert_eq!(pauses, [10, 20, 40, 60, 60]);
        scenario.at(now, &[Event::Resume]);
        assert_eq!((scenario.halt.is_stopped(), scenario.again_in()), (false, None));
        scenario.at(now + 1000, &FULL);
        assert_eq!(scenario.again_in(), Some(5), "it has run");
    }

    #[test]
    fn a_try_that_qemu_refuses_is_repeated() {
        let mut scenario = Scenario::new();
        scenario.at(0, &FULL);
        scenario.at(5, &[]);
        assert!(scenario.halt.is_due(scenario.now));
        assert_eq!(scenario.again_in(), Some(5));
    }

    #[test]
    fn a_guest_that_a_person_has_stopped_stays_so() {
        let mut scenario = Scenario::new();
        scenario.at(0, &[Event::Stop]);
        scenario.at(1, &[Event::BlockIoError { stops: true }]);
        assert_eq!((scenario.halt.is_stopped(), scenario.again_in()), (true, None));
        // An error that QEMU tells only the guest of stops nothing.
        scenario.at(2, &[Event::Resume, Event::BlockIoError { stops: false }]);
        assert_eq!((scenario.halt.is_stopped(), scenario.again_in()), (false, None));
    }
}
