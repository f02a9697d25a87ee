//! The life cycle of a QEMU process as a state machine. The input is an event and the time, the output are the operations to do now. Pure.
//!
//! | stage | meaning | next stage |
//! |---|---|---|
//! | Paused | QEMU listens on its monitors, the guest has not run yet | Running when the agent continues the guest, or after [`AGENT_TIMEOUT`] |
//! | Running | the guest runs | PoweringDown at SIGTERM |
//! | PoweringDown | the runner presses the power button, every [`PRESS_AGAIN`], and continues a guest that is stopped | Quitting after the powerdown timeout, or when a person asks for it |
//! | ShutDown | the guest has shut down; the runner has sent `quit` to QEMU, which writes what its disks have not taken yet | Quitting after the powerdown timeout, counted from SIGTERM, or when a person asks for it |
//! | Quitting | the runner has sent `quit` to QEMU | Killing after [`QUIT_TIMEOUT`] |
//! | Killing | the runner has killed QEMU | |
//!
//! In Running and PoweringDown the guest may be stopped, see [`super::halt`]. Who may let it go on stands in [`super::go_on`].
//!
//! QEMU's exit ends the life cycle in each stage; [`Lifecycle::end_reason`] says why.

use std::time::{Duration, Instant};

use super::{
    go_on::{GuestState, Who},
    halt::Halt,
    operation::Operation,
    panics::Panics,
    qmp,
    state::EndReason,
};
use crate::render::command_line::Reactions;

/// The time that the agent has to set the display's password and to continue the guest. After that the machine role continues the
/// guest, because the guest is more important than its display. The display is not open then: SPICE and VNC refuse every viewer as
/// long as no password is set.
pub const AGENT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two presses of the power button. A guest in its firmware or boot loader ignores a press; a guest that shuts down
/// ignores further ones.
pub const PRESS_AGAIN: Duration = Duration::from_secs(10);
/// The time that QEMU has to end after `quit`. It flushes its disks.
pub const QUIT_TIMEOUT: Duration = Duration::from_secs(3);

/// QEMU's word for a guest that has shut down (`ShutdownCause`).
const GUEST_SHUTDOWN: &str = "guest-shutdown";

/// An input of the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Input {
    /// QEMU's monitor has sent an event.
    Qemu(qmp::Event),
    /// Events may have been lost; this is what the guest does now.
    Found(GuestState),
    /// The runner has received SIGTERM.
    Terminate {
        /// The time that the guest has to power down.
        timeout: Duration,
    },
    /// A person has asked to end QEMU without waiting for the guest.
    End,
    /// The time of [`Lifecycle::wake_at`] has come.
    Timer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Paused {
        until: Instant,
    },
    Running,
    PoweringDown {
        stop: Stop,
        press_at: Instant,
    },
    /// `None`: the runner has not received SIGTERM.
    ShutDown {
        stop: Option<Stop>,
    },
    Quitting {
        until: Instant,
    },
    Killing,
}

/// The time that the VM has to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stop {
    /// When the runner has received SIGTERM.
    since: Instant,
    until: Instant,
}

/// The life cycle, from the moment when QEMU listens on its monitors.
#[derive(Debug)]
pub struct Lifecycle {
    stage: Stage,
    halt: Halt,
    panics: Panics,
    /// Whether the runner ends QEMU because the guest has panicked.
    ends_by_panic: bool,
    /// The reason in QEMU's first event SHUTDOWN, if it has sent one. The next one is due to our `quit`.
    shutdown: Option<String>,
    /// Whether the runner has received SIGTERM.
    is_stopping: bool,
}

impl Lifecycle {
    /// The life cycle of a QEMU whose guest has not run yet.
    pub fn new(reactions: Reactions, now: Instant) -> Self {
        let stage = Stage::Paused { until: now + AGENT_TIMEOUT };
        let panics = Panics::new(reactions);
        Self { stage, halt: Halt::default(), panics, ends_by_panic: false, shutdown: None, is_stopping: false }
    }

    /// When the caller must call [`Lifecycle::next`] with [`Input::Timer`], if there is no other input before.
    pub fn wake_at(&self) -> Option<Instant> {
        let again_at = self.halt.again_at();
        match self.stage {
            Stage::Paused { until } | Stage::Quitting { until } => Some(until),
            Stage::PoweringDown { stop, press_at } => {
                [Some(stop.until), Some(press_at), again_at].into_iter().flatten().min()
            }
            Stage::Running => [again_at, self.panics.reset_at()].into_iter().flatten().min(),
            Stage::ShutDown { stop } => stop.map(|stop| stop.until),
            Stage::Killing => None,
        }
    }

    /// Whether the runner has received SIGTERM.
    pub fn is_stopping(&self) -> bool {
        self.is_stopping
    }

    /// Whether QEMU is about to end: the runner has received SIGTERM, or QEMU has said that it shuts down.
    pub fn is_ending(&self) -> bool {
        self.is_stopping || self.shutdown.is_some()
    }

    /// Takes note of the time that the guest has to power down, counted from SIGTERM. It may have changed since then.
    pub fn set_timeout(&mut self, timeout: Duration) {
        if let Stage::PoweringDown { stop, .. } | Stage::ShutDown { stop: Some(stop) } = &mut self.stage {
            stop.until = stop.since + timeout;
        }
    }

    /// What the guest does.
    pub fn guest(&self) -> GuestState {
        if matches!(self.stage, Stage::ShutDown { .. }) {
            GuestState::ShutDown
        } else if self.panics.has_panicked() {
            GuestState::Panicked
        } else if !self.halt.has_run() {
            GuestState::NotStarted
        } else if self.halt.again_at().is_some() {
            GuestState::StoppedByDisk
        } else if self.halt.is_stopped() {
            GuestState::Stopped
        } else {
            GuestState::Executes
        }
    }

    /// Processes an input. Returns what the runner must do now.
    pub fn next(&mut self, input: Input, now: Instant) -> Vec<Operation> {
        match input {
            Input::Qemu(event) => self.qemu_event(event, now),
            Input::Found(guest) => self.found(guest, now),
            Input::Terminate { timeout } => self.terminate(timeout, now),
            Input::End => match self.stage {
                Stage::PoweringDown { .. } | Stage::ShutDown { stop: Some(_) } => self.quit(now),
                _ => Vec::new(),
            },
            Input::Timer => self.timer(now),
        }
    }

    fn qemu_event(&mut self, event: qmp::Event, now: Instant) -> Vec<Operation> {
        self.halt.event(&event, now);
        let ends = self.panics.event(&event, now);
        match self.stage {
            Stage::Running if ends => {
                self.ends_by_panic = true;
                return self.quit(now);
            }
            // It can't shut down any more.
            Stage::PoweringDown { .. } if self.panics.panic(&event).is_some() => {
                return self.quit(now);
            }
            _ => {}
        }
        match event {
            qmp::Event::Resume => {
                if matches!(self.stage, Stage::Paused { .. }) {
                    self.stage = Stage::Running;
                }
            }
            qmp::Event::Shutdown { guest: _, reason } => {
                let ends_itself = ["host-qmp-quit", "host-signal"].contains(&reason.as_str());
                self.shutdown.get_or_insert(reason);
                match self.stage {
                    // QEMU stays when the guest is down (`-no-shutdown`): the runner decides when it ends.
                    Stage::Paused { .. } | Stage::Running | Stage::PoweringDown { .. } if !ends_itself => {
                        return self.shut_down();
                    }
                    // The agent has sent `quit`, because a person has set the annotation for a forced stop.
                    Stage::PoweringDown { .. } => self.stage = Stage::Quitting { until: now + QUIT_TIMEOUT },
                    _ => {}
                }
            }
            // QEMU does not end at a reset. The other events are for the agent.
            qmp::Event::Reset { .. }
            | qmp::Event::GuestPanicked {}
            | qmp::Event::Watchdog {}
            | qmp::Event::Stop
            | qmp::Event::Powerdown
            | qmp::Event::BalloonChange { .. }
            | qmp::Event::VserportChange { .. }
            | qmp::Event::BlockIoError { .. }
            | qmp::Event::DeviceDeleted { .. }
            | qmp::Event::DeviceTrayMoved { .. }
            | qmp::Event::ViewerConnected { .. }
            | qmp::Event::ViewerDisconnected { .. }
            | qmp::Event::NetdevVhostUserConnected { .. }
            | qmp::Event::NetdevVhostUserDisconnected { .. }
            | qmp::Event::Other => {}
        }
        Vec::new()
    }

    fn found(&mut self, guest: GuestState, now: Instant) -> Vec<Operation> {
        // A guest that stood still when QEMU was to shut down keeps the state that it had.
        if guest == GuestState::ShutDown || self.shutdown.is_some() {
            // If the event is lost, nobody can say whose shutdown it was. It counts as the guest's.
            self.shutdown.get_or_insert_with(|| GUEST_SHUTDOWN.to_owned());
            return match self.stage {
                // The `quit` may have been lost.
                Stage::ShutDown { .. } | Stage::Quitting { .. } | Stage::Killing => vec![Operation::Quit],
                Stage::Paused { .. } | Stage::Running | Stage::PoweringDown { .. } => self.shut_down(),
            };
        }
        let missed: &[qmp::Event] = match guest {
            GuestState::NotStarted => &[],
            GuestState::Executes => &[qmp::Event::Resume],
            GuestState::StoppedByDisk => {
                &[qmp::Event::Resume, qmp::Event::BlockIoError { stops: true }, qmp::Event::Stop]
            }
            // A panic that is known is not a new one.
            GuestState::Panicked | GuestState::Hung if self.panics.has_panicked() => &[],
            GuestState::Panicked => &[qmp::Event::Resume, qmp::Event::GuestPanicked {}, qmp::Event::Stop],
            GuestState::Hung => &[qmp::Event::Resume, qmp::Event::Watchdog {}, qmp::Event::Stop],
            GuestState::ShutDown | GuestState::Stopped => &[qmp::Event::Resume, qmp::Event::Stop],
        };
        for event in missed {
            let operations = self.qemu_event(event.clone(), now);
            if !operations.is_empty() {
                return operations;
            }
        }
        let Stage::PoweringDown { press_at, .. } = &mut self.stage else { return Vec::new() };
        // The last press may not have reached QEMU.
        *press_at = now + PRESS_AGAIN;
        self.press()
    }

    fn terminate(&mut self, timeout: Duration, now: Instant) -> Vec<Operation> {
        self.is_stopping = true;
        match self.stage {
            // No operating system runs that could react to the power button.
            Stage::Paused { .. } => self.quit(now),
            Stage::Running if self.panics.has_panicked() => self.quit(now),
            Stage::Running => {
                let stop = Stop { since: now, until: now + timeout };
                self.stage = Stage::PoweringDown { stop, press_at: now + PRESS_AGAIN };
                self.press()
            }
            Stage::ShutDown { .. } => {
                self.stage = Stage::ShutDown { stop: Some(Stop { since: now, until: now + timeout }) };
                Vec::new()
            }
            Stage::PoweringDown { .. } | Stage::Quitting { .. } | Stage::Killing => Vec::new(),
        }
    }

    fn timer(&mut self, now: Instant) -> Vec<Operation> {
        match self.stage {
            Stage::Paused { until } if now >= until => {
                // The stage changes now and not at the event RESUME; otherwise the next input could continue the guest again.
                self.stage = Stage::Running;
                vec![Operation::GoOn(Who::NoAgent)]
            }
            Stage::PoweringDown { stop, .. } | Stage::ShutDown { stop: Some(stop) } if now >= stop.until => {
                self.quit(now)
            }
            Stage::PoweringDown { stop, press_at } if now >= press_at => {
                self.stage = Stage::PoweringDown { stop, press_at: now + PRESS_AGAIN };
                self.press()
            }
            Stage::Running if self.panics.is_due(now) => vec![Operation::Reset, Operation::GoOn(Who::Panic)],
            Stage::Running | Stage::PoweringDown { .. } if self.halt.is_due(now) => vec![Operation::GoOn(Who::Disk)],
            Stage::Quitting { until } if now >= until => {
                self.stage = Stage::Killing;
                vec![Operation::Kill]
            }
            Stage::Paused { .. }
            | Stage::Running
            | Stage::PoweringDown { .. }
            | Stage::ShutDown { .. }
            | Stage::Quitting { .. }
            | Stage::Killing => Vec::new(),
        }
    }

    /// A guest that is stopped does not hear the power button.
    fn press(&self) -> Vec<Operation> {
        let wake = self.halt.is_stopped().then_some(Operation::GoOn(Who::Powerdown));
        wake.into_iter().chain([Operation::Powerdown]).collect()
    }

    /// The guest is down. QEMU may take its time to write, as long as nobody waits for the Pod's end.
    fn shut_down(&mut self) -> Vec<Operation> {
        let stop = match self.stage {
            Stage::PoweringDown { stop, .. } => Some(stop),
            _ => None,
        };
        self.stage = Stage::ShutDown { stop };
        vec![Operation::Quit]
    }

    fn quit(&mut self, now: Instant) -> Vec<Operation> {
        self.stage = Stage::Quitting { until: now + QUIT_TIMEOUT };
        vec![Operation::Quit]
    }

    /// Why QEMU has ended. `success` says whether its exit code is 0. QEMU's reasons are those of `ShutdownCause` in
    /// <https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html>.
    pub fn end_reason(&self, success: bool) -> EndReason {
        match (self.stage, self.shutdown.as_deref()) {
            _ if self.ends_by_panic => EndReason::StoppedAfterPanic,
            (Stage::Quitting { .. } | Stage::Killing, _) => EndReason::PoweredOff,
            (_, Some(GUEST_SHUTDOWN)) if self.is_stopping => EndReason::PoweredDown,
            (_, Some(GUEST_SHUTDOWN)) if success => EndReason::GuestShutdown,
            // QEMU has crashed, or somebody has ended QEMU by its monitor or its display.
            (Stage::Paused { .. } | Stage::Running | Stage::PoweringDown { .. } | Stage::ShutDown { .. }, _) => {
                EndReason::QemuFailed
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::OnPanic;

    /// A life cycle with a clock that the test sets.
    struct Scenario {
        start: Instant,
        now: Instant,
        lifecycle: Lifecycle,
    }

    impl Scenario {
        fn new() -> Self {
            let start = Instant::now();
            Self { start, now: start, lifecycle: Lifecycle::new(Reactions::default(), start) }
        }
        fn at(&mut self, seconds: u64) -> &mut Self {
            self.now = self.start + Duration::from_secs(seconds);
            self
        }
        fn input(&mut self, input: Input) -> Vec<Operation> {
            let operations = self.lifecycle.next(input, self.now);
            for operation in &operations {
                let is_carried_out = !operation.steps(self.lifecycle.guest()).is_empty();
                assert!(is_carried_out || *operation == Operation::Kill, "{operation:?}");
            }
            operations
        }
        fn event(&mut self, event: qmp::Event) -> Vec<Operation> {
            self.input(Input::Qemu(event))
        }
        fn terminate(&mut self) -> Vec<Operation> {
            self.input(Input::Terminate { timeout: Duration::from_secs(25) })
        }
        fn timer(&mut self) -> Vec<Operation> {
            self.input(Input::Timer)
        }
        fn running() -> Self {
            let mut scenario = Self::new();
            assert_eq!(scenario.event(qmp::Event::Resume), []);
            assert_eq!(scenario.lifecycle.wake_at(), None);
            scenario
        }
        /// QEMU ends by itself.
        fn ends(&mut self, reason: &str) {
            assert_eq!(self.event(qmp::Event::Shutdown { guest: false, reason: reason.into() }), []);
        }
        /// The guest shuts down; QEMU stays until the runner ends it.
        fn shuts_down(&mut self) {
            let shutdown = qmp::Event::Shutdown { guest: true, reason: GUEST_SHUTDOWN.into() };
            assert_eq!(self.event(shutdown), [Operation::Quit]);
            assert_eq!(self.event(qmp::Event::Stop), []);
            self.ends("host-qmp-quit");
        }
    }

    #[test]
    fn at_sigterm_the_runner_presses_the_power_button() {
        let mut scenario = Scenario::running();
        assert_eq!(scenario.at(100).terminate(), [Operation::Powerdown]);
        assert_eq!(scenario.at(101).terminate(), [], "a second SIGTERM changes nothing");
        scenario.at(103).shuts_down();
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::PoweredDown);
        assert_eq!(scenario.at(124).timer(), [], "QEMU has the rest of the time to write");
        assert_eq!(scenario.at(125).timer(), [Operation::Quit]);
        assert_eq!(scenario.at(128).timer(), [Operation::Kill]);
        assert_eq!(scenario.lifecycle.end_reason(false), EndReason::PoweredOff, "it was still writing");
    }

    #[test]
    fn a_guest_that_ignores_the_power_button_is_powered_off() {
        let mut scenario = Scenario::running();
        assert_eq!(scenario.at(0).terminate(), [Operation::Powerdown]);
        assert_eq!(scenario.at(9).timer(), []);
        assert_eq!(scenario.at(10).timer(), [Operation::Powerdown], "the guest may have been in its boot loader");
        assert_eq!(scenario.at(20).timer(), [Operation::Powerdown]);
        assert_eq!(scenario.at(25).timer(), [Operation::Quit]);
        assert_eq!(scenario.at(26).timer(), []);
        assert_eq!(scenario.at(28).timer(), [Operation::Kill]);
        assert_eq!(scenario.lifecycle.wake_at(), None);
        assert_eq!(scenario.lifecycle.end_reason(false), EndReason::PoweredOff);
    }

    #[test]
    fn the_time_of_a_guest_that_powers_down_can_change() {
        let mut scenario = Scenario::running();
        scenario.lifecycle.set_timeout(Duration::from_secs(1));
        assert_eq!(scenario.at(0).terminate(), [Operation::Powerdown]);
        scenario.lifecycle.set_timeout(Duration::from_secs(100));
        assert_eq!(scenario.at(25).timer(), [Operation::Powerdown]);
        assert_eq!(scenario.at(99).timer(), [Operation::Powerdown]);
        assert_eq!(scenario.at(100).timer(), [Operation::Quit]);
        scenario.lifecycle.set_timeout(Duration::from_secs(200));
        assert_eq!(scenario.at(103).timer(), [Operation::Kill], "it is over");
    }

    #[test]
    fn a_quit_by_the_runner_is_not_a_shutdown_of_the_guest() {
        let mut scenario = Scenario::running();
        scenario.at(0).terminate();
        scenario.at(25).timer();
        scenario.ends("host-qmp-quit");
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::PoweredOff);
    }

    #[test]
    fn while_the_guest_powers_down_the_agent_may_end_qemu() {
        let mut scenario = Scenario::running();
        scenario.at(0).terminate();
        scenario.at(6).ends("host-qmp-quit");
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::PoweredOff);
        assert_eq!(scenario.at(9).timer(), [Operation::Kill], "QEMU may hang on its storage");
        let mut scenario = Scenario::running();
        scenario.at(6).ends("host-qmp-quit");
        assert_eq!(
            scenario.lifecycle.end_reason(true),
            EndReason::QemuFailed,
            "nobody has asked the guest to power down"
        );
    }

    #[test]
    fn a_person_can_end_a_guest_that_powers_down_and_no_other() {
        let mut scenario = Scenario::running();
        assert_eq!(scenario.at(1).input(Input::End), [], "nobody has asked the guest to power down");
        assert_eq!(scenario.at(2).terminate(), [Operation::Powerdown], "the request before does not count");
        assert_eq!(scenario.at(10).input(Input::End), [Operation::Quit]);
        assert_eq!(scenario.at(11).input(Input::End), []);
        assert_eq!(scenario.at(13).timer(), [Operation::Kill]);
        assert_eq!(scenario.lifecycle.end_reason(false), EndReason::PoweredOff);
    }

    #[test]
    fn a_shutdown_without_sigterm_is_the_guests_own() {
        let mut scenario = Scenario::running();
        scenario.at(100).shuts_down();
        assert_eq!((scenario.lifecycle.guest(), scenario.lifecycle.wake_at()), (GuestState::ShutDown, None));
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::GuestShutdown);
    }

    #[test]
    fn a_qemu_that_writes_long_after_the_guests_shutdown_has_the_time_that_the_pod_has() {
        let mut scenario = Scenario::running();
        scenario.at(100).shuts_down();
        assert_eq!(scenario.at(999).input(Input::End), [], "nobody waits for its end");
        assert_eq!(scenario.at(1000).terminate(), []);
        scenario.lifecycle.set_timeout(Duration::from_secs(100));
        assert_eq!(scenario.at(1099).timer(), []);
        assert_eq!(scenario.at(1100).timer(), [Operation::Quit]);
        assert_eq!(scenario.at(1103).timer(), [Operation::Kill]);
        let mut scenario = Scenario::running();
        scenario.at(0).terminate();
        scenario.at(1).shuts_down();
        assert_eq!(scenario.at(2).input(Input::End), [Operation::Quit], "a person does not want to wait");
        assert_eq!(scenario.at(5).timer(), [Operation::Kill]);
    }

    #[test]
    fn a_shutdown_that_is_found_over_a_new_connection_ends_qemu_too() {
        let mut scenario = Scenario::running();
        assert_eq!(scenario.at(100).input(Input::Found(GuestState::ShutDown)), [Operation::Quit]);
        assert_eq!(scenario.at(101).input(Input::Found(GuestState::ShutDown)), [Operation::Quit], "it may be lost");
        assert_eq!(scenario.at(102).input(Input::Found(GuestState::Stopped)), [Operation::Quit], "it was paused then");
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::GuestShutdown);
        let mut scenario = Scenario::running();
        scenario.at(0).terminate();
        assert_eq!(scenario.at(5).input(Input::Found(GuestState::ShutDown)), [Operation::Quit]);
        assert_eq!(scenario.at(6).input(Input::Found(GuestState::ShutDown)), [Operation::Quit]);
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::PoweredDown);
    }

    #[test]
    fn every_other_end_is_a_failure() {
        let mut scenario = Scenario::running();
        assert_eq!(scenario.lifecycle.end_reason(false), EndReason::QemuFailed);
        scenario.event(qmp::Event::Reset { guest: true });
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::QemuFailed, "a reset does not announce an end");
        let mut scenario = Scenario::running();
        scenario.ends("host-signal");
        assert_eq!(scenario.lifecycle.end_reason(true), EndReason::QemuFailed);
        for reason in ["guest-panic", "host-error", "from-the-future"] {
            let mut scenario = Scenario::running();
            let shutdown = qmp::Event::Shutdown { guest: false, reason: reason.into() };
            assert_eq!(scenario.event(shutdown), [Operation::Quit], "QEMU waits");
            assert_eq!(scenario.lifecycle.end_reason(true), EndReason::QemuFailed, "{reason}");
        }
    }

    #[test]
    fn without_an_agent_the_machine_role_continues_the_guest() {
        let mut scenario = Scenario::new();
        assert_eq!(scenario.at(9).timer(), []);
        assert_eq!(scenario.at(10).timer(), [Operation::GoOn(Who::NoAgent)]);
        assert_eq!(scenario.at(20).timer(), [], "only once");
        assert_eq!(scenario.terminate(), [Operation::Powerdown]);
    }

    #[test]
    fn a_guest_that_a_full_disk_has_stopped_is_tried_again() {
        let mut scenario = Scenario::running();
        scenario.at(20).event(qmp::Event::BlockIoError { stops: true });
        scenario.at(20).event(qmp::Event::Stop);
        assert_eq!(scenario.at(24).timer(), []);
        assert_eq!(scenario.lifecycle.wake_at(), Some(scenario.start + Duration::from_secs(25)));
        assert_eq!(scenario.at(25).timer(), [Operation::GoOn(Who::Disk)]);
        scenario.event(qmp::Event::Resume);
        assert_eq!(scenario.lifecycle.wake_at(), None);
    }

    #[test]
    fn a_guest_that_is_stopped_is_continued_so_that_it_hears_the_power_button() {
        let mut scenario = Scenario::running();
        scenario.event(qmp::Event::Stop);
        assert_eq!(scenario.at(0).terminate(), [Operation::GoOn(Who::Powerdown), Operation::Powerdown]);
        scenario.event(qmp::Event::Resume);
        assert_eq!(scenario.at(10).timer(), [Operation::Powerdown]);
        // A disk is full, and stays so.
        scenario.event(qmp::Event::BlockIoError { stops: true });
        scenario.event(qmp::Event::Stop);
        assert_eq!(scenario.at(15).timer(), [Operation::GoOn(Who::Disk)]);
        assert_eq!(scenario.at(20).timer(), [Operation::GoOn(Who::Powerdown), Operation::Powerdown]);
        assert_eq!(scenario.at(25).timer(), [Operation::Quit]);
        assert_eq!(scenario.lifecycle.wake_at(), Some(scenario.start + Duration::from_secs(28)));
    }

    #[test]
    fn what_is_found_over_a_new_connection_counts_as_the_events_that_were_missed() {
        use GuestState::{Executes, NotStarted, Stopped, StoppedByDisk};
        let mut scenario = Scenario::new();
        assert_eq!(scenario.at(1).input(Input::Found(NotStarted)), []);
        assert_eq!(scenario.lifecycle.wake_at(), Some(scenario.start + AGENT_TIMEOUT));
        assert_eq!(scenario.at(2).input(Input::Found(Executes)), []);
        assert_eq!(scenario.lifecycle.wake_at(), None);
        assert_eq!(scenario.at(50).input(Input::Found(StoppedByDisk)), []);
        assert_eq!(scenario.at(60).timer(), [Operation::GoOn(Who::Disk)]);
        assert_eq!(scenario.at(61).input(Input::Found(Stopped)), []);
        assert_eq!(scenario.at(62).terminate(), [Operation::GoOn(Who::Powerdown), Operation::Powerdown]);
        assert_eq!(scenario.at(63).input(Input::Found(Executes)), [Operation::Powerdown], "the press may be lost");
    }

    #[test]
    fn a_guest_that_has_not_run_is_ended_without_the_power_button() {
        let mut scenario = Scenario::new();
        assert_eq!(scenario.at(1).terminate(), [Operation::Quit]);
        assert_eq!(scenario.at(4).timer(), [Operation::Kill]);
    }

    #[test]
    fn a_guest_that_panics_is_reset_or_ended_as_the_spec_says() {
        let panicked = |on_panic, at: u64| {
            let mut scenario = Scenario::running();
            scenario.lifecycle.panics = Panics::new(Reactions::on(on_panic));
            let action = scenario.at(at).event(qmp::Event::GuestPanicked {});
            scenario.event(qmp::Event::Stop);
            (scenario, action)
        };
        let (mut restarts, action) = panicked(OnPanic::Restart, 10);
        assert_eq!(action, []);
        assert_eq!(restarts.lifecycle.wake_at(), Some(restarts.start + Duration::from_secs(15)));
        assert_eq!(restarts.at(15).timer(), [Operation::Reset, Operation::GoOn(Who::Panic)]);
        restarts.event(qmp::Event::Reset { guest: false });
        restarts.event(qmp::Event::Resume);
        assert_eq!(restarts.at(16).terminate(), [Operation::Powerdown], "it runs again");

        let (mut stops, action) = panicked(OnPanic::Stop, 10);
        assert_eq!(action, [Operation::Quit]);
        stops.ends("host-qmp-quit");
        assert_eq!(stops.lifecycle.end_reason(true), EndReason::StoppedAfterPanic);

        let (mut kept, action) = panicked(OnPanic::Keep, 10);
        assert_eq!((action, kept.lifecycle.wake_at()), (vec![], None));
        assert_eq!(kept.terminate(), [Operation::Quit], "nobody hears the power button");
        assert_eq!(kept.lifecycle.end_reason(true), EndReason::PoweredOff);

        let mut late = Scenario::running();
        late.lifecycle.panics = Panics::new(Reactions::on(OnPanic::Restart));
        late.terminate();
        assert_eq!(late.event(qmp::Event::GuestPanicked {}), [Operation::Quit], "it can't shut down any more");

        let mut missed = Scenario::running();
        missed.lifecycle.panics = Panics::new(Reactions::on(OnPanic::Stop));
        assert_eq!(missed.input(Input::Found(GuestState::Hung)), [Operation::Quit]);
    }

    #[test]
    fn with_a_timeout_of_zero_qemu_is_ended_at_once() {
        let mut scenario = Scenario::running();
        assert_eq!(scenario.input(Input::Terminate { timeout: Duration::ZERO }), [Operation::Powerdown]);
        assert_eq!(scenario.timer(), [Operation::Quit]);
    }
}
