//! The life of the machine as a state machine: what has happened and what time it is go in, what to do comes out. Pure.
//!
//! | state | what | next |
//! |---|---|---|
//! | Paused | QEMU is up, the guest has not run yet | Running when the agent continues it, or after [`AGENT_PATIENCE`] |
//! | Running | | PoweringDown at TERM |
//! | PoweringDown | the power button is pressed, again every [`PRESS_AGAIN`] | Quitting after the powerdown timeout |
//! | Quitting | QEMU was told to end | Killing after [`QUIT_PATIENCE`] |
//! | Killing | QEMU was killed | |
//!
//! In each state the exit of QEMU ends it; [`Control::end`] tells why.

use std::time::{Duration, Instant};

use super::{files::End, qmp};

/// How long the guest waits for the agent to set up the display and to continue it. After that the machine role continues
/// it: a guest without a password on its display beats no guest, as nobody can connect to a display whose password is not
/// set (SPICE and VNC refuse every viewer then).
pub const AGENT_PATIENCE: Duration = Duration::from_secs(10);
/// How often the power button is pressed. A guest that is still in its firmware or boot loader misses the first press;
/// systems that are going down ignore the others.
pub const PRESS_AGAIN: Duration = Duration::from_secs(10);
/// How long QEMU may take to end: it flushes its disks.
pub const QUIT_PATIENCE: Duration = Duration::from_secs(3);

/// What has happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Happened {
    /// An event from QEMU's monitor.
    Qemu(qmp::Event),
    /// The runner was asked to stop the machine; the guest may take so long.
    Term {
        /// The powerdown timeout.
        timeout: Duration,
    },
    /// Nothing but that time has passed.
    Time,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// QMP `cont`.
    Continue,
    /// QMP `system_powerdown`.
    Powerdown,
    /// QMP `quit`.
    Quit,
    /// SIGKILL.
    Kill,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Paused { until: Instant },
    Running,
    PoweringDown { until: Instant, press_at: Instant },
    Quitting { until: Instant },
    Killing,
}

/// The machine's life, from the moment that QEMU listens on its monitors.
#[derive(Debug)]
pub struct Control {
    state: State,
    /// QEMU's reason for ending, if it has announced it.
    shutdown: Option<String>,
    asked: bool,
}

impl Control {
    /// A machine whose guest has not run yet.
    pub fn new(now: Instant) -> Self {
        Self { state: State::Paused { until: now + AGENT_PATIENCE }, shutdown: None, asked: false }
    }

    /// When [`Happened::Time`] is due, if nothing happens before.
    pub fn wake_at(&self) -> Option<Instant> {
        match self.state {
            State::Paused { until } | State::Quitting { until } => Some(until),
            State::PoweringDown { until, press_at } => Some(until.min(press_at)),
            State::Running | State::Killing => None,
        }
    }

    /// Whether the runner was asked to stop the machine.
    pub fn is_stopping(&self) -> bool {
        self.asked
    }

    /// Takes in what has happened.
    pub fn next(&mut self, happened: Happened, now: Instant) -> Option<Action> {
        match happened {
            Happened::Qemu(event) => self.qemu(event, now),
            Happened::Term { timeout } => self.term(timeout, now),
            Happened::Time => self.time(now),
        }
    }

    fn qemu(&mut self, event: qmp::Event, now: Instant) -> Option<Action> {
        match event {
            qmp::Event::Resume => {
                if matches!(self.state, State::Paused { .. }) {
                    self.state = State::Running;
                }
            }
            qmp::Event::Shutdown { guest: _, reason } => {
                // The agent did that, because a person does not want to wait for the guest any longer.
                if reason == "host-qmp-quit" && matches!(self.state, State::PoweringDown { .. }) {
                    self.state = State::Quitting { until: now + QUIT_PATIENCE };
                }
                self.shutdown = Some(reason);
            }
            // A reset that QEMU carries out is no end; others do not matter here.
            qmp::Event::Reset { .. }
            | qmp::Event::Stop
            | qmp::Event::Powerdown
            | qmp::Event::BalloonChange { .. }
            | qmp::Event::VserportChange { .. }
            | qmp::Event::DeviceDeleted { .. }
            | qmp::Event::DeviceTrayMoved { .. }
            | qmp::Event::ViewerCame { .. }
            | qmp::Event::ViewerWent { .. }
            | qmp::Event::Other => {}
        }
        None
    }

    fn term(&mut self, timeout: Duration, now: Instant) -> Option<Action> {
        self.asked = true;
        match self.state {
            // Nothing runs that could hear a button.
            State::Paused { .. } => Some(self.quit(now)),
            State::Running => {
                self.state = State::PoweringDown { until: now + timeout, press_at: now + PRESS_AGAIN };
                Some(Action::Powerdown)
            }
            State::PoweringDown { .. } | State::Quitting { .. } | State::Killing => None,
        }
    }

    fn time(&mut self, now: Instant) -> Option<Action> {
        match self.state {
            State::Paused { until } if now >= until => {
                // The RESUME event follows, but the decision is made: do not decide it again if the event is late.
                self.state = State::Running;
                Some(Action::Continue)
            }
            State::PoweringDown { until, .. } if now >= until => Some(self.quit(now)),
            State::PoweringDown { until, press_at } if now >= press_at => {
                self.state = State::PoweringDown { until, press_at: now + PRESS_AGAIN };
                Some(Action::Powerdown)
            }
            State::Quitting { until } if now >= until => {
                self.state = State::Killing;
                Some(Action::Kill)
            }
            State::Paused { .. }
            | State::Running
            | State::PoweringDown { .. }
            | State::Quitting { .. }
            | State::Killing => None,
        }
    }

    fn quit(&mut self, now: Instant) -> Action {
        self.state = State::Quitting { until: now + QUIT_PATIENCE };
        Action::Quit
    }

    /// Why QEMU has ended, now that it has, with success or not. Reasons: `ShutdownCause` in
    /// <https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html>.
    pub fn end(&self, success: bool) -> End {
        match (self.state, self.shutdown.as_deref()) {
            (State::Quitting { .. } | State::Killing, _) => End::PoweredOff,
            (_, Some("guest-shutdown")) if self.asked => End::PoweredDown,
            (_, Some("guest-shutdown")) if success => End::GuestShutdown,
            // Somebody at a monitor or a viewer ended it, it crashed, or the guest panicked.
            (State::Paused { .. } | State::Running | State::PoweringDown { .. }, _) => End::QemuFailed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with a clock that a test sets.
    struct Story {
        start: Instant,
        now: Instant,
        control: Control,
    }

    impl Story {
        fn new() -> Self {
            let start = Instant::now();
            Self { start, now: start, control: Control::new(start) }
        }
        fn at(&mut self, seconds: u64) -> &mut Self {
            self.now = self.start + Duration::from_secs(seconds);
            self
        }
        fn happens(&mut self, happened: Happened) -> Option<Action> {
            self.control.next(happened, self.now)
        }
        fn event(&mut self, event: qmp::Event) -> Option<Action> {
            self.happens(Happened::Qemu(event))
        }
        fn term(&mut self) -> Option<Action> {
            self.happens(Happened::Term { timeout: Duration::from_secs(25) })
        }
        fn time(&mut self) -> Option<Action> {
            self.happens(Happened::Time)
        }
        fn running() -> Self {
            let mut story = Self::new();
            assert_eq!(story.event(qmp::Event::Resume), None);
            assert_eq!(story.control.wake_at(), None);
            story
        }
        fn shutdown(&mut self, guest: bool, reason: &str) {
            assert_eq!(self.event(qmp::Event::Shutdown { guest, reason: reason.into() }), None);
        }
    }

    #[test]
    fn the_power_button_is_pressed_and_the_guest_goes_down() {
        let mut story = Story::running();
        assert_eq!(story.at(100).term(), Some(Action::Powerdown));
        assert_eq!(story.at(101).term(), None, "a second TERM changes nothing");
        story.at(103).shutdown(true, "guest-shutdown");
        assert_eq!(story.control.end(true), End::PoweredDown);
    }

    #[test]
    fn a_guest_that_does_not_listen_is_ended() {
        let mut story = Story::running();
        assert_eq!(story.at(0).term(), Some(Action::Powerdown));
        assert_eq!(story.at(9).time(), None);
        assert_eq!(story.at(10).time(), Some(Action::Powerdown), "it may have been in its boot loader");
        assert_eq!(story.at(20).time(), Some(Action::Powerdown));
        assert_eq!(story.at(25).time(), Some(Action::Quit));
        assert_eq!(story.at(26).time(), None);
        assert_eq!(story.at(28).time(), Some(Action::Kill));
        assert_eq!(story.control.wake_at(), None);
        assert_eq!(story.control.end(false), End::PoweredOff);
    }

    #[test]
    fn a_quit_is_no_guests_shutdown() {
        let mut story = Story::running();
        story.at(0).term();
        story.at(25).time();
        story.shutdown(false, "host-qmp-quit");
        assert_eq!(story.control.end(true), End::PoweredOff);
    }

    #[test]
    fn who_is_asked_to_end_may_be_ended_by_the_agent() {
        let mut story = Story::running();
        story.at(0).term();
        story.at(6).shutdown(false, "host-qmp-quit");
        assert_eq!(story.control.end(true), End::PoweredOff);
        assert_eq!(story.at(9).time(), Some(Action::Kill), "its storage may hang");
        let mut story = Story::running();
        story.at(6).shutdown(false, "host-qmp-quit");
        assert_eq!(story.control.end(true), End::QemuFailed, "nobody had asked");
    }

    #[test]
    fn the_guest_shuts_down_by_itself() {
        let mut story = Story::running();
        story.at(100).shutdown(true, "guest-shutdown");
        assert_eq!(story.control.end(true), End::GuestShutdown);
    }

    #[test]
    fn other_ends_are_failures() {
        let mut story = Story::running();
        assert_eq!(story.control.end(false), End::QemuFailed);
        story.event(qmp::Event::Reset { guest: true });
        assert_eq!(story.control.end(true), End::QemuFailed, "a reset announces no end");
        for reason in ["guest-panic", "host-signal", "host-error", "from-the-future"] {
            let mut story = Story::running();
            story.shutdown(false, reason);
            assert_eq!(story.control.end(true), End::QemuFailed, "{reason}");
        }
    }

    #[test]
    fn a_missing_agent_does_not_keep_the_guest_down() {
        let mut story = Story::new();
        assert_eq!(story.at(9).time(), None);
        assert_eq!(story.at(10).time(), Some(Action::Continue));
        assert_eq!(story.at(20).time(), None, "once");
        assert_eq!(story.term(), Some(Action::Powerdown));
    }

    #[test]
    fn a_guest_that_never_ran_needs_no_button() {
        let mut story = Story::new();
        assert_eq!(story.at(1).term(), Some(Action::Quit));
        assert_eq!(story.at(4).time(), Some(Action::Kill));
    }

    #[test]
    fn no_timeout_means_at_once() {
        let mut story = Story::running();
        assert_eq!(story.happens(Happened::Term { timeout: Duration::ZERO }), Some(Action::Powerdown));
        assert_eq!(story.time(), Some(Action::Quit));
    }
}
