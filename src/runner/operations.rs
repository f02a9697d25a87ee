//! The operations of one QEMU, as a state machine: what the agent asks of QEMU and when. Pure; the agent is its executor.
//!
//! ```text
//!  configuration, events, timer ─▶ Operations::next ─▶ Action ─▶ the agent carries it out ─▶ answer ─▶ Operations::next ─▶ ... ─▶ None
//!
//!  look (ask QEMU what is the case) ─▶ decide (changes) ─▶ carry out, step by step ─▶ look ... until there is nothing to do
//! ```
//!
//! Nothing of it is written down but [`Orders`]: what is to do follows from the configuration and from what QEMU answers. So an agent that is started
//! again, or one that has lost its connection before an answer came, looks and goes on from there. Where QEMU can't say whether something was
//! done, it can be done again without harm (memory, password, pause), or it was noted before it was sent and is not done again (reset, reboot).
//! What has no answer is known no more: not as it was before, and not as it should be.
//!
//! An operation that QEMU refuses is not tried again until the configuration changes, or what the operation depends on; only a disk is tried again
//! after a minute. One that waits for the guest, which must open a tray or release a device, leaves the others alone.

use std::{collections::VecDeque, fmt, mem, time::Duration};

use serde_json::Value;
use tokio::time::Instant;

use super::{
    cd::Answer,
    changes::{
        Actual, CpuRule, Desired, Media, WantedCd, carried_out, cd_drives, changes, disks, must_ask, present,
        refused_media, refused_reboot, taken_back,
    },
    devices::{Problem, failed_disks},
    go_on::{GuestState, Who},
    operation::{Operation, Step},
    qmp::{Balloon, Command, Event, Status, read},
    state::Orders,
};
use crate::{
    render::command_line::{DeviceId, Panic},
    runner_config::VmSection,
};

/// When it is asked again what a refused CD is.
pub const MEDIA_AGAIN: Duration = Duration::from_secs(30);
/// When a disk that QEMU has not made larger is tried again.
pub const GROW_AGAIN: Duration = Duration::from_secs(60);
/// How long a guest must run again until the disk that had stopped it counts as mended. A disk that is still full stops it at once.
pub const DISK_IS_MENDED: Duration = Duration::from_secs(2);
/// The time that the guest has to release a device. Linux takes less than a second; a boot loader does not hear the request.
pub const RELEASE: Duration = Duration::from_secs(60);

/// When QEMU is asked again what is the case, if it has not answered.
pub const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// Asks QEMU what is the case.
const LOOK: [Command; 4] =
    [Command::QueryStatus, Command::QueryHotpluggableCpus, Command::QueryBlock, Command::QueryBalloon];

/// What the state machine reacts to.
#[derive(Debug)]
pub enum Input {
    /// QEMU can be asked.
    Connected,
    /// The configuration has changed.
    Configuration(Desired),
    /// QEMU has reported something.
    Event(Event),
    /// The last action was carried out. The answer is QEMU's, or `null`.
    Answer(Result<Value, Failure>),
    /// What the CDs are about which the machine role was asked.
    Media(Vec<Answer>),
    /// QEMU's guest agent has answered.
    GuestAgent,
    /// The time of [`Operations::wake_at`] has come.
    Timer,
}

/// Why an action was not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was refused, so nothing was done.
    Refused {
        /// Who has refused what.
        what: String,
        /// Why.
        reason: String,
    },
    /// There is no answer, so it may be done or not.
    Unanswered(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { what, reason } => write!(f, "{what}: {reason}"),
            Self::Unanswered(why) => f.write_str(why),
        }
    }
}

/// What the agent does. It hands in the answer before anything else.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Sends a command to QEMU.
    Send(Command),
    /// Asks QEMU's guest agent to reboot the guest.
    AskGuest,
    /// Asks the machine role what these CDs are. [`Input::Media`] comes later.
    AskMedia(Vec<WantedCd>),
    /// Writes what is carried out, so that no agent repeats it.
    Note(Orders),
    /// Tells people how an operation has ended.
    Ended(Operation, Result<(), Failure>),
}

/// An operation that is carried out.
#[derive(Debug)]
struct Run {
    operation: Operation,
    /// What is left to do.
    acts: VecDeque<Act>,
    /// What to note again if it is refused.
    before: Option<Orders>,
    failure: Option<Failure>,
    /// Whether the guest has locked the tray.
    is_locked: bool,
}

/// A part of an operation.
#[derive(Clone, Debug)]
enum Act {
    Step(Step),
    Note(Orders),
}

/// An operation that waits for the guest.
#[derive(Debug)]
struct Wait {
    operation: Operation,
    /// What QEMU has said about it.
    failure: Option<Failure>,
    /// Until when. `None`: for ever.
    until: Option<Instant>,
}

/// What the answer is awaited of.
#[derive(Debug)]
enum Sent {
    Query(Command),
    Act(Act),
    /// Whatever the answer is, nothing depends on it.
    Other,
}

/// The operations of one QEMU.
#[derive(Debug)]
pub struct Operations {
    /// The section `vm` with which QEMU was started.
    vm: VmSection,
    desired: Desired,
    actual: Actual,
    /// The memory of the guest in bytes. `None`: there is no balloon.
    memory: Option<u64>,
    /// What the guest does. [`Actual::guest`] takes it for stopped as long as a disk is not mended.
    guest: Option<GuestState>,
    /// Whether the guest has panicked, and neither went on nor was reset since.
    has_panicked: bool,
    /// The disks that have stopped the guest, and when they count as mended.
    failed: Vec<Problem>,
    mended_at: Option<Instant>,
    /// The CDs about which the machine role is being asked, when it is asked again, and whether it is time.
    asked: Option<Vec<WantedCd>>,
    ask_again_at: Option<Instant>,
    ask_again: bool,
    /// When a disk that QEMU has not made larger is tried again.
    grow_again_at: Option<Instant>,
    /// QEMU must be asked what is the case, and when again if it has not answered.
    must_look: bool,
    look_again_at: Option<Instant>,
    queries: VecDeque<Command>,
    /// What is to do, what is being done, and what waits.
    queue: VecDeque<Operation>,
    run: Option<Run>,
    waits: Vec<Wait>,
    sent: Option<Sent>,
    /// What has ended and is not done again: it was carried out, or it has failed.
    settled: Vec<(Operation, Option<Failure>)>,
    /// What is still to tell.
    ended: VecDeque<(Operation, Result<(), Failure>)>,
    /// What counts as carried out by itself and is not written yet.
    notes: Option<Orders>,
}

impl Operations {
    /// Those of a QEMU of which nothing is known yet. It was started with `vm`, and `orders` were carried out since.
    pub fn new(vm: VmSection, cpu_rule: CpuRule, orders: Orders, desired: Desired) -> Self {
        Self {
            vm,
            desired,
            actual: Actual { cpu_rule, orders, may_start: true, ..Actual::default() },
            memory: None,
            guest: None,
            has_panicked: false,
            failed: Vec::new(),
            mended_at: None,
            asked: None,
            ask_again_at: None,
            ask_again: false,
            grow_again_at: None,
            must_look: false,
            look_again_at: None,
            queries: VecDeque::new(),
            queue: VecDeque::new(),
            run: None,
            waits: Vec::new(),
            sent: None,
            settled: Vec::new(),
            ended: VecDeque::new(),
            notes: None,
        }
    }

    /// Whether the guest executes. A guest that a disk has stopped counts as one that does: nobody wanted to stop it. So does one that has shut down:
    /// the machine role says how it has ended. `None`: it is not known.
    pub fn executes(&self) -> Option<bool> {
        self.guest.map(|guest| matches!(guest, GuestState::Executes | GuestState::StoppedByDisk | GuestState::ShutDown))
    }

    /// Whether the guest stands still, for whatever reason.
    pub fn stands_still(&self) -> bool {
        self.guest.is_some_and(|guest| guest != GuestState::Executes)
    }

    /// How the guest has failed, if it has.
    pub fn panic(&self) -> Option<Panic> {
        self.guest.and_then(Panic::of)
    }

    /// The disks that have stopped the guest.
    pub fn failed_disks(&self) -> &[Problem] {
        &self.failed
    }

    /// The number of CPUs.
    pub fn cpus(&self) -> u32 {
        u32::try_from(present(&self.actual.slots)).unwrap_or(u32::MAX)
    }

    /// The guest's memory in bytes. A custom QEMU template may have no balloon; the guest has all memory then.
    pub fn memory(&self) -> u64 {
        self.memory.unwrap_or_else(|| self.vm.maximum_ram.bytes())
    }

    /// What was carried out of what is asked for once.
    pub fn orders(&self) -> &Orders {
        &self.actual.orders
    }

    /// Whether the display has the password of the configuration.
    pub fn password_is_set(&self) -> bool {
        let wanted = self.desired.password.as_ref().map(|display| &display.password);
        wanted.is_some() && self.actual.password.as_ref() == wanted
    }

    /// What of the configuration is not carried out, each as a sentence for people.
    pub fn refused(&self) -> Vec<String> {
        let waiting = self.waits.iter().map(|wait| (&wait.operation, wait.failure.as_ref()));
        let settled = self.settled.iter().map(|(operation, failure)| (operation, failure.as_ref()));
        let by_qemu = waiting.chain(settled).filter_map(|(operation, failure)| match failure? {
            Failure::Refused { reason, .. } => Some(format!("{}: {reason}", operation.problem()?)),
            Failure::Unanswered(why) if matches!(operation, Operation::Grow { .. }) => {
                Some(format!("{}: {why}", operation.problem()?))
            }
            Failure::Unanswered(_) => None,
        });
        let reboot = refused_reboot(&self.desired, &self.actual);
        self.refused_media().into_iter().chain(reboot).chain(by_qemu).collect()
    }

    /// The CDs that the machine role has refused, each as a sentence for people.
    pub fn refused_media(&self) -> Vec<String> {
        refused_media(&self.actual)
    }

    /// When the caller must call [`Operations::next`] with [`Input::Timer`], if there is no other input before.
    pub fn wake_at(&self) -> Option<Instant> {
        let waits = self.waits.iter().filter_map(|wait| wait.until);
        waits.chain(self.mended_at).chain(self.ask_again_at).chain(self.look_again_at).chain(self.grow_again_at).min()
    }

    /// Processes an input. Returns the next action, whose answer is the next input. `None`: there is nothing to do until something happens.
    pub fn next(&mut self, input: Input, now: Instant) -> Option<Action> {
        match input {
            Input::Answer(answer) => {
                if !self.answer(answer, now) {
                    return None;
                }
            }
            Input::Connected => self.must_look = true,
            Input::Configuration(desired) => {
                self.desired = desired;
                self.settled.clear();
                // What the guest has been asked to release, it may still release.
                self.waits.retain(|wait| wait.until.is_some());
                self.must_look = true;
            }
            Input::Event(event) => self.event(event, now),
            Input::Media(answers) => self.media(answers, now),
            Input::GuestAgent => {
                self.actual.answers = true;
                self.settled.retain(|(operation, _)| *operation != Operation::Reboot);
            }
            Input::Timer => self.timer(now),
        }
        if self.sent.is_some() { None } else { self.advance(now) }
    }

    fn event(&mut self, event: Event, now: Instant) {
        match event {
            Event::Resume => {
                self.mended_at = (!self.failed.is_empty()).then(|| now + DISK_IS_MENDED);
                self.set_guest(GuestState::Executes);
            }
            Event::Stop => self.must_look = true,
            Event::Reset { .. } => {
                self.actual.answers = false;
                if mem::take(&mut self.has_panicked) {
                    // It does not stand still because somebody wants that.
                    self.actual.may_start = true;
                    self.settled.retain(|(operation, _)| *operation != Operation::GoOn(Who::Agent));
                }
                // The guest boots anew, so a reboot that it could not be asked for is needless.
                if self.desired.reboot_counter > self.actual.orders.reboots {
                    self.notes = carried_out(&Operation::Reboot, &self.desired, &self.actual.orders);
                }
                self.must_look = true;
            }
            Event::Powerdown => self.actual.powers_down = true,
            Event::BalloonChange { actual } => self.memory = Some(actual),
            // The guest has opened a tray that it had locked. Otherwise it may open trays as it likes.
            Event::DeviceTrayMoved { id, open: true } => {
                let drive = DeviceId::at(&id);
                self.waits.retain(|wait| drive.is_none() || wait.operation.drive() != drive);
            }
            Event::DeviceDeleted { device } => {
                let is_released = |wait: &mut Wait| match &wait.operation {
                    Operation::Unplug { id } => Some(id) == device.as_ref(),
                    _ => false,
                };
                let released = self.waits.extract_if(.., is_released);
                self.ended.extend(released.map(|wait| (wait.operation, Ok(()))));
                self.must_look = true;
            }
            Event::DeviceTrayMoved { open: false, .. }
            | Event::Shutdown { .. }
            | Event::GuestPanicked {}
            | Event::Watchdog {}
            | Event::VserportChange { .. }
            | Event::BlockIoError { .. }
            | Event::ViewerConnected { .. }
            | Event::ViewerDisconnected { .. }
            | Event::NetdevVhostUserConnected { .. }
            | Event::NetdevVhostUserDisconnected { .. }
            | Event::Other => {}
        }
    }

    fn media(&mut self, answers: Vec<Answer>, now: Instant) {
        let Some(cds) = self.asked.take() else { return };
        let media = Media { cds, answers };
        if self.actual.media != media {
            self.actual.media = media;
            self.settled.retain(|(operation, _)| operation.drive().is_none());
        }
        // What is refused now may be there later.
        self.ask_again_at = (!self.refused_media().is_empty()).then(|| now + MEDIA_AGAIN);
    }

    fn timer(&mut self, now: Instant) {
        if self.mended_at.is_some_and(|at| at <= now) {
            self.mended_at = None;
            self.failed.clear();
            self.actual.guest = self.guest;
        }
        if self.ask_again_at.is_some_and(|at| at <= now) {
            self.ask_again_at = None;
            self.ask_again = true;
        }
        if self.grow_again_at.is_some_and(|at| at <= now) {
            self.grow_again_at = None;
            self.settled.retain(|(operation, _)| !matches!(operation, Operation::Grow { .. }));
            self.must_look = true;
        }
        let late = self.waits.extract_if(.., |wait| wait.until.is_some_and(|until| until <= now));
        for Wait { operation, .. } in late {
            let failure = Failure::Unanswered(format!("the guest has not released it in {} s", RELEASE.as_secs()));
            self.settled.push((operation.clone(), Some(failure.clone())));
            self.ended.push_back((operation, Err(failure)));
        }
    }

    fn set_guest(&mut self, guest: GuestState) {
        self.guest = Some(guest);
        self.has_panicked = match guest {
            GuestState::Panicked | GuestState::Hung => true,
            GuestState::Executes => false,
            // It may be reset, and the event comes later.
            GuestState::NotStarted | GuestState::StoppedByDisk | GuestState::ShutDown | GuestState::Stopped => {
                self.has_panicked
            }
        };
        self.actual.guest = Some(if self.failed.is_empty() { guest } else { GuestState::StoppedByDisk });
    }

    /// Takes up an answer. Returns whether to go on.
    fn answer(&mut self, answer: Result<Value, Failure>, now: Instant) -> bool {
        match self.sent.take() {
            Some(Sent::Query(query)) => {
                let is_known = self.found(&query, answer).is_some();
                if !is_known {
                    // Nothing is decided by what is not known.
                    self.queries.clear();
                    self.must_look = true;
                    self.look_again_at = Some(now + LOOK_AGAIN);
                }
                return is_known;
            }
            Some(Sent::Act(act)) => self.acted(act, answer),
            Some(Sent::Other) | None => {}
        }
        true
    }

    /// Takes up what QEMU says is the case. `None`: it says nothing that can be read.
    fn found(&mut self, query: &Command, answer: Result<Value, Failure>) -> Option<()> {
        let is_refused = matches!(answer, Err(Failure::Refused { .. }));
        let answer = answer.unwrap_or_default();
        match query {
            Command::QueryStatus => {
                let guest = GuestState::from(read::<Status>(query, answer).ok()?);
                if guest == GuestState::StoppedByDisk {
                    self.mended_at = None;
                }
                self.actual.may_start &= guest == GuestState::NotStarted;
                self.set_guest(guest);
            }
            // The machine type has a fixed number of CPUs.
            Command::QueryHotpluggableCpus if is_refused => self.actual.slots = Vec::new(),
            Command::QueryHotpluggableCpus => self.actual.slots = read(query, answer).ok()?,
            Command::QueryBlock => {
                answer.as_array()?;
                self.actual.cds = cd_drives(&answer);
                self.actual.disks = disks(&answer);
                if self.guest == Some(GuestState::StoppedByDisk) {
                    self.failed = failed_disks(&answer, &self.vm);
                }
            }
            Command::QueryBalloon if is_refused => self.memory = None,
            Command::QueryBalloon => self.memory = Some(read::<Balloon>(query, answer).ok()?.actual),
            _ => {}
        }
        Some(())
    }

    /// Takes up how a part of an operation was carried out.
    fn acted(&mut self, act: Act, answer: Result<Value, Failure>) {
        let Some(run) = &mut self.run else { return };
        match (answer, act) {
            (Ok(_), Act::Note(orders)) => self.actual.orders = orders,
            (Ok(_), Act::Step(_)) | (Err(_), Act::Step(Step::May(_))) => {}
            // It is being undone.
            (Err(_), _) if run.failure.is_some() => {}
            (Err(failure), act) => {
                run.acts.clear();
                // What may be done is not undone.
                if let Failure::Refused { .. } = failure {
                    run.is_locked = matches!(act, Act::Step(Step::Tray(_)));
                    run.acts.extend(run.operation.undo().into_iter().map(Act::Step));
                    run.acts.extend(run.before.take().filter(|before| *before != self.actual.orders).map(Act::Note));
                }
                run.failure = Some(failure);
            }
        }
    }

    /// Finds the next action.
    fn advance(&mut self, now: Instant) -> Option<Action> {
        loop {
            if let Some((operation, outcome)) = self.ended.pop_front() {
                return self.send(Sent::Other, Action::Ended(operation, outcome));
            }
            if let Some(run) = self.run.take() {
                if let Some(action) = self.proceed(run, now) {
                    return Some(action);
                }
                continue;
            }
            if let Some(operation) = self.queue.pop_front() {
                self.begin(operation);
                continue;
            }
            if mem::take(&mut self.must_look) {
                self.look_again_at = None;
                self.queries.extend(LOOK);
            }
            if let Some(query) = self.queries.pop_front() {
                return self.send(Sent::Query(query.clone()), Action::Send(query));
            }
            if let Some(action) = self.ask_or_note() {
                return self.send(Sent::Other, action);
            }
            self.queue.extend(changes(&self.desired, &self.actual).into_iter().filter(|operation| {
                let is_settled = self.settled.iter().any(|(settled, _)| settled == operation);
                !is_settled && !self.waits.iter().any(|wait| wait.operation == *operation)
            }));
            if self.queue.is_empty() {
                return None;
            }
        }
    }

    fn send(&mut self, sent: Sent, action: Action) -> Option<Action> {
        self.sent = Some(sent);
        Some(action)
    }

    fn begin(&mut self, operation: Operation) {
        let guest = self.actual.guest.unwrap_or(GuestState::NotStarted);
        let mut acts: VecDeque<Act> = operation.steps(guest).into_iter().map(Act::Step).collect();
        let orders = carried_out(&operation, &self.desired, &self.actual.orders);
        let before = orders.as_ref().map(|_| self.actual.orders.clone());
        if let Some(orders) = orders {
            if matches!(operation, Operation::Reset | Operation::Reboot) {
                // Twice would be wrong, so it is noted before it is sent.
                acts.push_front(Act::Note(orders));
            } else {
                // Never would be wrong, and twice does no harm.
                acts.push_front(Act::Note(Orders { is_in_doubt: true, ..self.actual.orders.clone() }));
                acts.push_back(Act::Note(orders));
            }
        }
        self.run = Some(Run { operation, acts, before, failure: None, is_locked: false });
    }

    /// Goes on with an operation. `None`: it has ended, or waits for the guest.
    fn proceed(&mut self, mut run: Run, now: Instant) -> Option<Action> {
        let Some(act) = run.acts.pop_front() else {
            self.end(run, now);
            return None;
        };
        let action = match &act {
            Act::Note(orders) => Action::Note(orders.clone()),
            Act::Step(Step::Must(command) | Step::May(command) | Step::Tray(command)) => Action::Send(command.clone()),
            Act::Step(Step::AskGuest) => Action::AskGuest,
            Act::Step(Step::Release) => {
                let until = Some(now + RELEASE);
                self.waits.push(Wait { operation: run.operation, failure: None, until });
                return None;
            }
        };
        self.run = Some(run);
        self.send(Sent::Act(act), action)
    }

    fn end(&mut self, Run { operation, failure, is_locked, .. }: Run, now: Instant) {
        match &operation {
            // It may have been carried out in part.
            Operation::Balloon(bytes) => self.actual.ram = failure.is_none().then_some(*bytes),
            Operation::Password(display) => {
                self.actual.password = failure.is_none().then(|| display.password.clone());
            }
            // A lock or a job in QEMU goes away again.
            Operation::Grow { .. } if failure.is_some() => self.grow_again_at = Some(now + GROW_AGAIN),
            _ => {}
        }
        self.ended.push_back((operation.clone(), failure.clone().map_or(Ok(()), Err)));
        if is_locked {
            self.waits.push(Wait { operation, failure, until: None });
        } else {
            self.settled.push((operation, failure));
        }
        self.must_look = true;
    }

    /// What is asked of the machine role, or was carried out by itself.
    fn ask_or_note(&mut self) -> Option<Action> {
        let taken_back = || taken_back(&self.desired, &self.actual.orders);
        if let Some(orders) = self.notes.take().or_else(taken_back) {
            self.actual.orders = orders.clone();
            return Some(Action::Note(orders));
        }
        let must_ask = must_ask(&self.desired, &self.actual) || mem::take(&mut self.ask_again);
        let cds = Some(&self.desired.cds).filter(|cds| must_ask && self.asked.as_ref() != Some(cds))?.clone();
        self.asked = Some(cds.clone());
        self.ask_again_at = None;
        Some(Action::AskMedia(cds))
    }
}

#[cfg(test)]
pub mod played;
#[cfg(test)]
mod tests;
