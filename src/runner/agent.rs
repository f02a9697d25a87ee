//! The agent role: applies the configuration to the running QEMU, continues the guest after that, and reports the VM's status.
//!
//! An agent may end and another one may start while the guest runs. Each one finds out from QEMU and the files of the runtime
//! directory what it needs to know.

mod clock;
mod events;

use std::{io, path::PathBuf, time::Duration};

use serde_json::Value;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};
use tracing::{debug, info, warn};

use super::{
    cd::Answer,
    changes::{CpuRule, Desired, attachments, pending},
    config::{self, Configuration},
    control::MediaQuestion,
    files::FileAccessError,
    go_on::Who,
    guest_agent,
    logging::Logging,
    login::{LoginPort, LoginState},
    operation::Operation,
    operations::{self, Action, Failure, Operations},
    qmp::{Command, Error as QmpError, Event, Port, Qmp, Viewers},
    relay::RelayState,
    report::{self, Observation, Report},
    runtime_dir::RuntimeDir,
    session::{Session, clock_answer, ended, guest_answer, login_line, media_answer, time_of},
    state::{BlockDevice, MachineState, Orders, PasswordEnd, Phase},
    status_writer::VmResource,
};
use crate::process::{ErrorChain, follow::Follower};

/// The names of the agents' ports in the QEMU template.
const GUEST_AGENT_PORT: &str = "guest-agent";
const LOGIN_AGENT_PORT: &str = "vmop-agent";

/// The time between two attempts to connect to QEMU's monitor.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// How long an agent that finds a running guest waits for the guest agent's answer before its first report. Without it, each agent that is
/// started again would report for a moment that the guest has not booted.
const FIRST_ANSWER: Duration = Duration::from_millis(800);

/// After SIGTERM, how often the agent tries to connect to a QEMU that does not answer.
const ATTEMPTS_AFTER_TERM: u32 = 3;

/// Why the agent ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directories cannot be watched.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// The kernel does not report changes of the directories any more.
    #[error("cannot watch the configuration any more")]
    Watch(#[source] io::Error),
}

/// What an agent needs.
pub struct AgentOptions {
    /// The directory of `config.yaml`.
    pub config_dir: PathBuf,
    /// The runtime directory.
    pub runtime: RuntimeDir,
    /// The log levels, which follow a file in the configuration directory.
    pub logging: Logging,
    /// The VM in the API server.
    pub resource: VmResource,
    /// Where the relay is, and who uses it.
    pub relay: watch::Receiver<RelayState>,
}

/// The agent.
pub struct Agent {
    options: AgentOptions,
    configuration: Configuration,
    follower: Follower,
    observation: Observation,
    reports: watch::Sender<Option<Report>>,
    /// The first report waits until then.
    quiet_until: Option<Instant>,
    /// For how long the guest stood still since its clock was set.
    behind: Duration,
}

/// What the agent reacts to.
enum Input {
    Retry,
    FilesChanged(io::Result<()>),
    QuietIsOver,
    RelayChanged,
    /// The connection to QEMU is broken.
    Lost(QmpError),
    OfSession(SessionInput),
}

/// What the agent reacts to while it is connected to QEMU.
enum SessionInput {
    Event(Event),
    Timer,
    GuestAnswer(Option<Value>),
    ClockAnswer(io::Result<()>),
    LoginLine(io::Result<String>),
    MediaAnswer(Vec<Answer>),
    StopForced,
}

impl Agent {
    /// Starts to watch the directories, and reads the configuration. The agent sends its reports to `reports`.
    ///
    /// # Errors
    /// If a directory cannot be watched, or the configuration can't be used.
    pub fn new(mut options: AgentOptions, reports: watch::Sender<Option<Report>>) -> Result<Self, Error> {
        let follower = options.runtime.follow_with(&options.config_dir)?;
        // A change of what was read before the watch would not be seen.
        options.logging.read(&options.config_dir);
        let configuration = config::read(&options.config_dir)?;
        Ok(Self {
            options,
            configuration,
            follower,
            observation: Observation::default(),
            reports,
            quiet_until: None,
            behind: Duration::ZERO,
        })
    }

    /// Works until the future is dropped, or until `term` is true and there is no QEMU to connect to. The caller then calls
    /// [`Agent::report_end`].
    ///
    /// An agent in a container of its own receives SIGTERM at the same time as the machine role. It continues while the guest powers
    /// down.
    ///
    /// # Errors
    /// If the kernel does not report changes of the directories any more.
    pub async fn run(&mut self, mut term: watch::Receiver<bool>) -> Result<(), Error> {
        let mut session = None;
        let mut attempts = ATTEMPTS_AFTER_TERM;
        self.update_session(&mut session).await;
        loop {
            self.send_report(session.as_ref());
            // The machine role writes how QEMU ended after its end. If the machine role was killed, the state stays Running, so the number
            // of attempts is limited.
            if session.is_none() && *term.borrow() && (attempts == 0 || !self.qemu_is_running()) {
                return Ok(());
            }
            let Some(input) = self.next_input(&mut session, &mut term).await else { continue };
            if matches!(input, Input::Retry) && *term.borrow() {
                attempts -= 1;
            }
            self.process(input, &mut session).await?;
        }
    }

    /// Waits for the next input. `None`: the runner has received SIGTERM.
    async fn next_input(&mut self, session: &mut Option<Session>, term: &mut watch::Receiver<bool>) -> Option<Input> {
        match session {
            None => {
                let qemu_is_running = self.qemu_is_running();
                tokio::select! {
                    Ok(()) = term.changed() => None,
                    changed = self.follower.changed() => Some(Input::FilesChanged(changed)),
                    () = sleep(RETRY_INTERVAL), if qemu_is_running => Some(Input::Retry),
                }
            }
            Some(Session {
                monitor,
                operations,
                guest_question,
                clock_task,
                media_question,
                login,
                forced_stop,
                stopped_at: _,
            }) => {
                let of_session = Input::OfSession;
                Some(tokio::select! {
                    biased;
                    // Events come first: the event that the login agent has closed its port must not be processed after the greeting
                    // of the next login agent.
                    event = monitor.event() => event.map_or_else(Input::Lost, |event| of_session(SessionInput::Event(event))),
                    changed = self.follower.changed() => Input::FilesChanged(changed),
                    answer = guest_answer(guest_question) => of_session(SessionInput::GuestAnswer(answer)),
                    set = clock_answer(clock_task) => of_session(SessionInput::ClockAnswer(set)),
                    line = login_line(login) => of_session(SessionInput::LoginLine(line)),
                    media = media_answer(media_question) => of_session(SessionInput::MediaAnswer(media)),
                    () = time_of(operations.wake_at()) => of_session(SessionInput::Timer),
                    Ok(()) = self.options.relay.changed() => Input::RelayChanged,
                    () = ended(forced_stop) => of_session(SessionInput::StopForced),
                    () = time_of(self.quiet_until) => Input::QuietIsOver,
                })
            }
        }
    }

    async fn process(&mut self, input: Input, session: &mut Option<Session>) -> Result<(), Error> {
        let outcome = match input {
            Input::Retry => {
                self.update_session(session).await;
                Ok(())
            }
            Input::FilesChanged(changed) => {
                changed.map_err(Error::Watch)?;
                let sizes = self.device_sizes();
                let is_new = self.read_configuration();
                self.update_session(session).await;
                let is_new = is_new || self.device_sizes() != sizes;
                match session {
                    // Most events are about other files, such as the state that the machine role writes.
                    Some(session) if is_new => self.configure(session).await,
                    _ => Ok(()),
                }
            }
            Input::QuietIsOver => {
                self.quiet_until = None;
                Ok(())
            }
            Input::RelayChanged => {
                self.take_up_relay();
                Ok(())
            }
            Input::Lost(error) => Err(error),
            Input::OfSession(input) => match session {
                Some(session) => self.process_in_session(input, session).await,
                None => Ok(()),
            },
        };
        if let Err(error) = outcome {
            debug!(%error, "QEMU's monitor");
            *session = None;
            self.quiet_until = None;
            self.observation.is_executing = None;
            self.update_session(session).await;
        }
        Ok(())
    }

    async fn process_in_session(&mut self, input: SessionInput, session: &mut Session) -> Result<(), QmpError> {
        match input {
            SessionInput::Event(event) => return self.process_event(event, session).await,
            SessionInput::Timer => return self.operate(operations::Input::Timer, session).await,
            SessionInput::GuestAnswer(os_info) => {
                session.guest_question = None;
                self.quiet_until = None;
                if os_info.is_some() {
                    info!("the guest agent answers");
                    self.observation.os_info = os_info;
                    // The guest's clock may have waited for the agent, and so may a reboot.
                    self.set_clock(session);
                    return self.operate(operations::Input::GuestAgent, session).await;
                }
            }
            SessionInput::ClockAnswer(set) => {
                session.clock_task = None;
                self.note_clock(set);
            }
            SessionInput::LoginLine(line) => self.process_login_line(line, session).await,
            SessionInput::MediaAnswer(answers) => {
                session.media_question = None;
                return self.take_up_media(answers, session).await;
            }
            SessionInput::StopForced => {
                session.forced_stop = None;
                warn!("a forced stop was requested; ending QEMU without waiting for the guest");
                if let Err(error) = session.monitor.execute(&Command::Quit).await {
                    debug!(%error, "QEMU's monitor");
                }
            }
        }
        Ok(())
    }

    /// Reports how QEMU has ended. This is the agent's last report.
    pub fn report_end(mut self) {
        self.quiet_until = None;
        self.observation.machine = MachineState::read(&self.options.runtime);
        self.send_report(None);
    }

    fn send_report(&mut self, session: Option<&Session>) {
        if self.quiet_until.is_some() {
            return;
        }
        let Configuration { config, digest, .. } = &self.configuration;
        let machine = self.observation.machine.as_ref();
        let cpus = self.observation.cpus;
        self.observation.cds = machine.map(|machine| report::cds(machine, &config.vm)).unwrap_or_default();
        self.observation.attachments =
            machine.map(|machine| attachments(machine, &self.configuration)).unwrap_or_default();
        self.observation.pending =
            machine.map(|machine| pending(machine, cpus, &self.configuration)).unwrap_or_default();
        // What the machine role says of the CDs is a part of what the configuration has become.
        let is_asked = session.is_some_and(|session| session.media_question.is_some());
        if !is_asked || self.observation.config_digest.is_none() {
            self.observation.config_digest = Some(digest.clone());
        }
        self.observation.resource_uid.clone_from(&config.resource_uid);
        let new = Report::derive(&self.observation);
        self.reports.send_if_modified(|last| {
            // If nothing is known at the moment, the last report stays.
            let modified = new.is_some() && *last != new;
            if modified {
                *last = new;
            }
            modified
        });
    }

    /// Reads the configuration. Returns whether it has changed.
    fn read_configuration(&mut self) -> bool {
        self.options.logging.read(&self.options.config_dir);
        match config::read(&self.options.config_dir) {
            Ok(configuration) => {
                let is_new = configuration != self.configuration;
                self.configuration = configuration;
                is_new
            }
            Err(error) => {
                warn!(error = %ErrorChain(&error), "cannot use the new configuration; the last good one stays in use");
                false
            }
        }
    }

    /// Reads the state that the machine role has written. Ends the session if it was one with an earlier QEMU, and begins one if QEMU
    /// listens.
    async fn update_session(&mut self, session: &mut Option<Session>) {
        let machine = MachineState::read(&self.options.runtime);
        let start = |machine: &Option<MachineState>| machine.as_ref().map(|machine| machine.start.clone());
        if start(&machine) != start(&self.observation.machine) {
            *session = None;
            self.quiet_until = None;
            let password_changes = self.observation.password_changes;
            self.observation = Observation { password_changes, ..Observation::default() };
            self.behind = Duration::ZERO;
        }
        self.observation.machine = machine;
        if !self.qemu_is_running() {
            *session = None;
            self.quiet_until = None;
        } else if session.is_none() {
            match self.begin_session().await {
                Ok(new) => *session = Some(new),
                // QEMU is about to end, and the machine role will write that.
                Err(error @ (QmpError::Io(_) | QmpError::Closed)) => debug!(%error, "QEMU's monitor"),
                Err(error) => warn!(error = %ErrorChain(&error), "cannot connect to QEMU's monitor"),
            }
        }
    }

    fn qemu_is_running(&self) -> bool {
        self.observation.machine.as_ref().is_some_and(|machine| machine.phase == Phase::Running)
    }

    async fn begin_session(&mut self) -> Result<Session, QmpError> {
        let monitor = Qmp::connect(&self.options.runtime.agent_monitor()).await?;
        let machine = self.observation.machine.as_ref();
        let config = &self.configuration.config;
        let orders = machine.map(|machine| Orders::of(&self.options.runtime, machine, config)).unwrap_or_default();
        let cpu_rule = machine.map(CpuRule::of).unwrap_or_default();
        let started = machine.and_then(|machine| machine.started_with.as_ref());
        let vm = started.map_or_else(|| config.vm.clone(), |started| started.vm.clone());
        let mut session = Session {
            monitor,
            operations: Operations::new(vm, cpu_rule, orders, self.desired()),
            guest_question: None,
            clock_task: None,
            stopped_at: None,
            media_question: None,
            login: self.connect_login().await,
            forced_stop: None,
        };
        self.operate(operations::Input::Connected, &mut session).await?;
        self.find_guest_agents(&mut session).await?;
        if session.guest_question.is_some() && self.reports.borrow().is_none() {
            self.quiet_until = Some(Instant::now() + FIRST_ANSWER);
        }
        self.find_viewers(&mut session).await;
        self.take_up_relay();
        Ok(session)
    }

    /// The sizes of the disks that are devices, as the machine role says.
    fn device_sizes(&self) -> Vec<BlockDevice> {
        self.observation.machine.as_ref().map(|machine| machine.devices.clone()).unwrap_or_default()
    }

    /// What the configuration says. A time that counts from the moment when the password is set becomes one of the clock.
    fn desired(&self) -> Desired {
        let mut desired = Desired::of(&self.configuration, self.observation.machine.as_ref());
        if let Some(display) = &mut desired.password {
            let start = self.observation.machine.as_ref().map(|machine| machine.start.as_str()).unwrap_or_default();
            display.password.expiry = PasswordEnd::fixed(&self.options.runtime, start, &display.password);
        }
        desired
    }

    /// Applies the configuration, which has changed.
    async fn configure(&mut self, session: &mut Session) -> Result<(), QmpError> {
        self.operate(operations::Input::Configuration(self.desired()), session).await?;
        self.request_login(session).await;
        Ok(())
    }

    fn take_up_relay(&mut self) {
        self.observation.relay = self.options.relay.borrow_and_update().clone();
    }

    /// Finds out which agents in the guest have opened their ports.
    async fn find_guest_agents(&mut self, session: &mut Session) -> Result<(), QmpError> {
        let ports: Vec<Port> = session.monitor.query(&Command::QueryChardev).await?;
        let is_open = |name: &str| ports.iter().any(|port| port.label == name && port.frontend_open);
        if is_open(GUEST_AGENT_PORT) {
            self.ask_guest_agent(session);
        }
        self.observation.login =
            if is_open(LOGIN_AGENT_PORT) { LoginState::connected() } else { LoginState::default() };
        self.request_login(session).await;
        Ok(())
    }

    async fn find_viewers(&mut self, session: &mut Session) {
        let viewers = match self.configuration.config.vm.display.protocol() {
            Some("vnc") => session.monitor.query(&Command::QueryVnc).await,
            Some(_) => session.monitor.query(&Command::QuerySpice).await,
            None => Ok(Viewers::default()),
        };
        match viewers {
            Ok(viewers) => {
                self.observation.viewers.clear();
                viewers.clients.into_iter().for_each(|viewer| self.observation.add_viewer(viewer));
            }
            // A custom QEMU template may have no display.
            Err(error) => debug!(%error, "cannot find out who is connected to the display"),
        }
    }

    async fn process_login_line(&mut self, line: io::Result<String>, session: &mut Session) {
        match line {
            Ok(line) => self.observation.login.receive(&line),
            Err(error) => {
                warn!(%error, "cannot read from the login agent any more");
                self.disconnect_login(session);
            }
        }
        self.request_login(session).await;
    }

    /// Closes the connection to the login agent. The agent connects again when the guest opens the port again.
    fn disconnect_login(&mut self, session: &mut Session) {
        session.login = None;
        self.observation.login = LoginState::default();
    }

    async fn connect_login(&self) -> Option<LoginPort> {
        match LoginPort::connect(&self.options.runtime.vmop_agent()).await {
            Ok(port) => Some(port),
            Err(error) => {
                debug!(%error, "QEMU has no port for a login agent");
                None
            }
        }
    }

    /// Sends the next request to the login agent, if there is one.
    async fn request_login(&mut self, session: &mut Session) {
        let Some(port) = &mut session.login else { return };
        let user = self.configuration.config.vm.display.logged_in_user.as_deref();
        if let Some(line) = self.observation.login.next_request(user) {
            info!(line, "sending a request to the login agent");
            if let Err(error) = port.send(&line).await {
                warn!(%error, "cannot send to the login agent");
                self.disconnect_login(session);
            }
        }
    }

    fn ask_guest_agent(&self, session: &mut Session) {
        let socket = self.options.runtime.guest_agent();
        // A guest can open its port again and again.
        if let Some(question) = session.guest_question.take() {
            question.abort();
        }
        session.guest_question = Some(tokio::spawn(async move { guest_agent::os_info(&socket).await }));
    }

    /// Takes up the answer about the CDs.
    async fn take_up_media(&mut self, answers: Vec<Answer>, session: &mut Session) -> Result<(), QmpError> {
        let before = session.operations.refused_media();
        self.operate(operations::Input::Media(answers), session).await?;
        let refused = session.operations.refused_media();
        for reason in refused.iter().filter(|reason| !before.contains(reason)) {
            warn!(reason, "a CD is not inserted");
        }
        Ok(())
    }

    /// Hands an input to the operations, and does what they say until they wait for the next one.
    ///
    /// # Errors
    /// If the connection to QEMU is broken.
    async fn operate(&mut self, input: operations::Input, session: &mut Session) -> Result<(), QmpError> {
        let mut next = session.operations.next(input, Instant::now());
        while let Some(action) = next {
            let answer = self.carry_out(action, session).await?;
            next = session.operations.next(operations::Input::Answer(answer), Instant::now());
        }
        self.observe(session);
        Ok(())
    }

    async fn carry_out(&mut self, action: Action, session: &mut Session) -> Result<Result<Value, Failure>, QmpError> {
        Ok(match action {
            Action::Send(command) => match session.monitor.execute(&command).await {
                Ok(answer) => Ok(answer),
                Err(QmpError::Refused { command, reason }) => {
                    Err(Failure::Refused { what: format!("QEMU refused {command}"), reason })
                }
                Err(error @ (QmpError::Timeout { .. } | QmpError::Answer { .. })) => {
                    Err(Failure::Unanswered(error.to_string()))
                }
                Err(error @ (QmpError::Io(_) | QmpError::Closed | QmpError::Flood)) => return Err(error),
            },
            Action::AskGuest => {
                let what = "the guest agent refused guest-shutdown".to_owned();
                let asked = guest_agent::reboot(&self.options.runtime.guest_agent()).await;
                asked.map(|()| Value::Null).map_err(|error| Failure::Refused { what, reason: error.to_string() })
            }
            Action::AskMedia(cds) => {
                session.media_question = Some(MediaQuestion::ask(&self.options.runtime, cds));
                Ok(Value::Null)
            }
            Action::Note(orders) => orders.write(&self.options.runtime).map(|()| Value::Null).map_err(|error| {
                let reason = ErrorChain(&error).to_string();
                warn!(error = reason, "cannot note what is carried out");
                Failure::Refused { what: "cannot note it".into(), reason }
            }),
            Action::Ended(operation, outcome) => {
                self.log(&operation, outcome);
                Ok(Value::Null)
            }
        })
    }

    fn log(&mut self, operation: &Operation, outcome: Result<(), Failure>) {
        let change = format!("{operation:?}");
        match outcome {
            Ok(()) if *operation == Operation::GoOn(Who::Agent) => info!("the guest runs"),
            Ok(()) => {
                info!(change, "changed");
                self.observation.password_changes += u64::from(matches!(operation, Operation::Password(_)));
            }
            Err(error) => warn!(change, %error, "not changed"),
        }
    }

    /// Takes note of what is known of QEMU, for the report.
    fn observe(&mut self, session: &mut Session) {
        let operations = &session.operations;
        self.observation.is_executing = operations.executes();
        self.observation.panic = operations.panic();
        self.observation.cpus = operations.cpus();
        self.observation.ram = operations.memory();
        self.observation.devices = operations.failed_disks().to_vec();
        self.observation.refused = operations.refused();
        let Orders { counter, reboots, .. } = *operations.orders();
        self.observation.reset_counter = Some(counter);
        // Nobody wants to know of reboots in a VM that was never asked for one.
        let is_known = reboots > 0 || self.configuration.config.reboot_counter > 0;
        self.observation.reboot_counter = is_known.then_some(reboots);
        if operations.password_is_set() {
            // As the configuration has it.
            let password = self.configuration.password.as_ref();
            self.observation.password_expiry = password.map(|password| password.expiry.clone());
        }
        if operations.stands_still() {
            session.stopped_at.get_or_insert_with(Instant::now);
        }
    }
}

#[cfg(test)]
mod tests;
