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
    cd_drive,
    changes::{
        Actual, Change, CpuRule, Desired, Guest, Media, WantedCd, cd_drives, changes, must_ask, pending, present,
        refused_media, refused_reboot, taken_back,
    },
    config::{self, Configuration},
    control::MediaQuestion,
    devices::failed_disks,
    files::FileAccessError,
    go_on::{GuestState, Who, permission},
    guest_agent, live,
    logging::Logging,
    login::{LoginPort, LoginState},
    panics::Panic,
    qmp::{Balloon, Command, Error as QmpError, Event, Port, Qmp, Status, Viewers},
    relay::RelayState,
    report::{self, Observation, Report},
    runtime_dir::RuntimeDir,
    session::{Session, clock_answer, ended, guest_answer, login_line, media_answer, time_of},
    state::{MachineState, Orders, PasswordEnd, Phase},
    status_writer::VmResource,
};
use crate::{
    process::{ErrorChain, follow::Follower},
    runner_config::at_start::attachments,
};

/// The names of the agents' ports in the QEMU template.
const GUEST_AGENT_PORT: &str = "guest-agent";
const LOGIN_AGENT_PORT: &str = "vmop-agent";

/// The time between two attempts to connect to QEMU's monitor.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// How long an agent that finds a running guest waits for the guest agent's answer before its first report. Without it, each agent that is
/// started again would report for a moment that the guest has not booted.
const FIRST_ANSWER: Duration = Duration::from_millis(800);

/// When the agent asks again what a refused CD is.
const MEDIA_AGAIN: Duration = Duration::from_secs(30);

/// How long a guest must run again until the disk that had stopped it counts as mended. A disk that is still full stops it at once.
const DISK_IS_MENDED: Duration = Duration::from_secs(2);

/// After SIGTERM, how often the agent tries to connect to a QEMU that does not answer.
const ATTEMPTS_AFTER_TERM: u32 = 3;

/// Why the agent ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The directories cannot be watched.
    #[error(transparent)]
    File(#[from] FileAccessError),
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
    /// The configuration as it was read at the start.
    pub configuration: Configuration,
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
    Qemu(Result<Event, QmpError>),
    GuestAnswer(Option<Value>),
    ClockAnswer(io::Result<()>),
    LoginLine(io::Result<String>),
    MediaAnswer(Vec<Answer>),
    AskAboutMedia,
    DiskIsMended,
    QuietIsOver,
    RelayChanged,
    StopForced,
}

impl Agent {
    /// Starts to watch the directories. The agent sends its reports to `reports`.
    ///
    /// # Errors
    /// If a directory cannot be watched.
    pub fn new(options: AgentOptions, reports: watch::Sender<Option<Report>>) -> Result<Self, Error> {
        let follower = options.runtime.follow_with(&options.config_dir)?;
        Ok(Self {
            options,
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
                guest_question,
                clock_task,
                media_question,
                media_again,
                login,
                disk_mended_at,
                forced_stop,
                ..
            }) => {
                Some(tokio::select! {
                    biased;
                    // Events come first: the event that the login agent has closed its port must not be processed after the greeting
                    // of the next login agent.
                    event = monitor.event() => Input::Qemu(event),
                    changed = self.follower.changed() => Input::FilesChanged(changed),
                    answer = guest_answer(guest_question) => Input::GuestAnswer(answer),
                    set = clock_answer(clock_task) => Input::ClockAnswer(set),
                    line = login_line(login) => Input::LoginLine(line),
                    media = media_answer(media_question) => Input::MediaAnswer(media),
                    () = time_of(*media_again) => Input::AskAboutMedia,
                    () = time_of(*disk_mended_at) => Input::DiskIsMended,
                    Ok(()) = self.options.relay.changed() => Input::RelayChanged,
                    () = ended(forced_stop) => Input::StopForced,
                    () = time_of(self.quiet_until) => Input::QuietIsOver,
                })
            }
        }
    }

    async fn process(&mut self, input: Input, session: &mut Option<Session>) -> Result<(), Error> {
        match input {
            Input::Retry => self.update_session(session).await,
            Input::FilesChanged(changed) => {
                changed.map_err(Error::Watch)?;
                let is_new = self.read_configuration();
                self.update_session(session).await;
                // Most events are about other files, such as the state that the machine role writes.
                if is_new && let Some(session) = session {
                    self.apply(session).await;
                    self.request_login(session).await;
                }
            }
            Input::Qemu(Ok(event)) => {
                if let Some(session) = session {
                    self.process_event(event, session).await;
                }
            }
            Input::Qemu(Err(error)) => {
                debug!(%error, "QEMU's monitor");
                *session = None;
                self.quiet_until = None;
                self.observation.is_executing = None;
                self.update_session(session).await;
            }
            Input::GuestAnswer(os_info) => {
                if let Some(session) = session {
                    session.guest_question = None;
                }
                self.quiet_until = None;
                if os_info.is_some() {
                    info!("the guest agent answers");
                    self.observation.os_info = os_info;
                    if let Some(session) = session {
                        // A reboot may have waited for the agent.
                        self.apply_where(session, Change::waits_for_media).await;
                        // So may the guest's clock.
                        self.set_clock(session);
                    }
                }
            }
            Input::ClockAnswer(set) => {
                if let Some(session) = session {
                    session.clock_task = None;
                }
                self.note_clock(set);
            }
            Input::MediaAnswer(answers) => {
                if let Some(session) = session
                    && let Some(question) = session.media_question.take()
                {
                    let media = Media { cds: question.cds.clone(), answers };
                    self.take_up_media(media, session).await;
                }
            }
            Input::AskAboutMedia => {
                if let Some(session) = session {
                    session.media_again = None;
                    let cds = session.actual.media.cds.clone();
                    self.ask_about_cds(cds, session);
                }
            }
            Input::DiskIsMended => {
                if let Some(session) = session {
                    session.disk_mended_at = None;
                }
                self.observation.devices.clear();
                if let Some(session) = session {
                    self.apply_where(session, Change::is_pause).await;
                }
            }
            Input::QuietIsOver => self.quiet_until = None,
            Input::RelayChanged => self.take_up_relay(),
            Input::StopForced => {
                if let Some(session) = session {
                    session.forced_stop = None;
                    quit(session).await;
                }
            }
            Input::LoginLine(line) => {
                if let Some(session) = session {
                    self.process_login_line(line, session).await;
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
        let Configuration { config, digest, .. } = &self.options.configuration;
        let machine = self.observation.machine.as_ref();
        let cpus = self.observation.cpus;
        self.observation.cds = machine.map(|machine| report::cds(machine, &config.vm)).unwrap_or_default();
        let started = machine.and_then(|machine| machine.started_with.as_ref());
        self.observation.attachments = started.map(|started| attachments(&started.vm, &config.vm)).unwrap_or_default();
        self.observation.pending =
            machine.map(|machine| pending(machine, cpus, &self.options.configuration)).unwrap_or_default();
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
                let is_new = configuration != self.options.configuration;
                self.options.configuration = configuration;
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
        let orders = machine
            .map(|machine| Orders::of(&self.options.runtime, machine, &self.options.configuration.config))
            .unwrap_or_default();
        let cpu_rule = machine.map(CpuRule::of).unwrap_or_default();
        self.observe_orders(&orders);
        let mut session = Session {
            monitor,
            actual: Actual { orders, cpu_rule, ..Actual::default() },
            guest_question: None,
            clock_task: None,
            stopped_at: None,
            media_question: None,
            waits_for_tray: Vec::new(),
            media_again: None,
            login: self.connect_login().await,
            disk_mended_at: None,
            forced_stop: None,
        };
        self.apply(&mut session).await;
        self.continue_guest(&mut session).await?;
        self.apply_where(&mut session, Change::is_pause).await;
        self.find_guest_agents(&mut session).await?;
        if session.guest_question.is_some() && self.reports.borrow().is_none() {
            self.quiet_until = Some(Instant::now() + FIRST_ANSWER);
        }
        self.find_viewers(&mut session).await;
        self.take_up_relay();
        Ok(session)
    }

    fn take_up_relay(&mut self) {
        self.observation.relay = self.options.relay.borrow_and_update().clone();
    }

    /// Takes note of what was carried out. Nobody wants to know of reboots in a VM that was never asked for one.
    fn observe_orders(&mut self, orders: &Orders) {
        self.observation.reset_counter = Some(orders.counter);
        let reboots = orders.reboots;
        let is_known = reboots > 0 || self.options.configuration.config.reboot_counter > 0;
        self.observation.reboot_counter = is_known.then_some(reboots);
    }

    /// Continues a guest that has not run yet.
    async fn continue_guest(&mut self, session: &mut Session) -> Result<(), QmpError> {
        let status: Status = session.monitor.query(&Command::QueryStatus).await?;
        let mut guest = GuestState::from(status);
        if let Some(permission) = permission(Who::Agent, guest) {
            session.monitor.execute(&Command::Cont(permission)).await?;
            info!("the guest runs");
            guest = GuestState::Executes;
        }
        self.find_stop(session, guest).await
    }

    /// Finds out why the guest is stopped. A guest that a disk has stopped counts as one that runs: nobody wanted to pause it.
    async fn find_stop(&mut self, session: &mut Session, guest: GuestState) -> Result<(), QmpError> {
        if guest == GuestState::StoppedByDisk {
            let blocks = session.monitor.execute(&Command::QueryBlock).await?;
            let machine = self.observation.machine.as_ref();
            let started = machine.and_then(|machine| machine.started_with.as_ref()).map(|started| &started.vm);
            let vm = started.unwrap_or(&self.options.configuration.config.vm);
            self.observation.devices = failed_disks(&blocks, vm);
            session.disk_mended_at = None;
        }
        if guest != GuestState::Executes {
            session.stopped_at.get_or_insert_with(Instant::now);
        }
        self.observation.is_executing = Some(matches!(guest, GuestState::Executes | GuestState::StoppedByDisk));
        self.observation.panic = Panic::of(guest);
        Ok(())
    }

    async fn process_stop(&mut self, session: &mut Session) -> Result<(), QmpError> {
        let status: Status = session.monitor.query(&Command::QueryStatus).await?;
        self.find_stop(session, status.into()).await
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
        let viewers = match self.options.configuration.config.vm.display.protocol() {
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
        let user = self.options.configuration.config.vm.display.logged_in_user.as_deref();
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

    /// Changes QEMU to what the configuration says. If QEMU refuses a change, the agent logs that and continues with the others; it
    /// tries again when the configuration changes.
    async fn apply(&mut self, session: &mut Session) {
        self.apply_where(session, |_| true).await;
    }

    /// Carries out those of the changes that are meant. QEMU was asked for the others already, and it may have refused them.
    async fn apply_where(&mut self, session: &mut Session, is_meant: fn(&Change) -> bool) {
        if let Err(error) = self.query_hardware(session).await {
            // The connection is broken, which the next wait for an event returns too.
            debug!(%error, "QEMU's monitor");
            return;
        }
        let mut desired = Desired::from(&self.options.configuration);
        if let Some(display) = &mut desired.password {
            let start = self.observation.machine.as_ref().map(|machine| machine.start.as_str()).unwrap_or_default();
            display.password.expiry = PasswordEnd::fixed(&self.options.runtime, start, &display.password);
        }
        if must_ask(&desired, &session.actual) {
            self.ask_about_cds(desired.cds.clone(), session);
        }
        session.actual.guest = self.guest(session);
        self.observation.refused = refused_media(&session.actual);
        self.observation.refused.extend(refused_reboot(&desired, &session.actual));
        session.waits_for_tray.clear();
        if let Some(orders) = taken_back(&desired, &session.actual.orders)
            && let Err(error) = self.note(orders, session)
        {
            warn!(error = %ErrorChain(&error), "cannot note that a count has become smaller");
        }
        for change in changes(&desired, &session.actual).into_iter().filter(is_meant) {
            self.apply_change(change, session).await;
        }
        let wanted = desired.password.map(|display| display.password);
        if wanted.is_some() && session.actual.password == wanted {
            // As the configuration has it.
            let password = self.options.configuration.password.as_ref();
            self.observation.password_expiry = password.map(|password| password.expiry.clone());
        }
        if let Err(error) = self.query_hardware(session).await {
            debug!(%error, "QEMU's monitor");
        }
    }

    /// What the guest can be asked for now.
    fn guest(&self, session: &Session) -> Guest {
        let Observation { is_executing, devices, os_info, .. } = &self.observation;
        let is_powering_down = session.forced_stop.is_some();
        Guest {
            can_pause: is_executing.is_some() && devices.is_empty() && !is_powering_down,
            executes: *is_executing == Some(true),
            answers: os_info.is_some(),
        }
    }

    /// Asks the machine role what the CDs are, if it is not being asked about the same.
    fn ask_about_cds(&self, cds: Vec<WantedCd>, session: &mut Session) {
        if session.media_question.as_ref().is_some_and(|question| question.cds == cds) {
            return;
        }
        session.media_question = Some(MediaQuestion::ask(&self.options.runtime, cds));
    }

    /// Takes up the answer about the CDs. What is refused now may be there later.
    async fn take_up_media(&mut self, media: Media, session: &mut Session) {
        let is_known = session.actual.media == media;
        session.actual.media = media;
        let refused = refused_media(&session.actual);
        session.media_again = (!refused.is_empty()).then(|| Instant::now() + MEDIA_AGAIN);
        if !is_known {
            for reason in refused {
                warn!(reason, "a CD is not inserted");
            }
        }
        self.apply_where(session, Change::waits_for_media).await;
    }

    async fn apply_change(&mut self, change: Change, session: &mut Session) {
        let name = format!("{change:?}");
        let before = session.actual.orders.clone();
        if let Some(orders) = change.order(&before)
            && let Err(error) = self.note(orders, session)
        {
            warn!(error = %ErrorChain(&error), change = name, "cannot note the change, so it is not carried out");
            return;
        }
        let (is_password, is_pause) = (matches!(change, Change::Password(_)), change.is_pause());
        let drive = change.drive();
        let problem = change.problem();
        match live::carry_out(change, &mut session.monitor, &self.options.runtime.guest_agent(), &mut session.actual)
            .await
        {
            Ok(()) => {
                info!(change = name, "changed");
                self.observation.password_changes += u64::from(is_password);
                // QEMU's event comes later, and the report about this change goes before it.
                if is_pause && let Err(error) = self.process_stop(session).await {
                    debug!(%error, "QEMU's monitor");
                }
            }
            Err(error) => {
                warn!(change = name, error = %ErrorChain(&error), "not changed");
                if session.actual.orders != before {
                    let _ = self.note(before, session);
                }
                session.waits_for_tray.extend(drive.filter(|_| cd_drive::is_locked(&error)));
                if let (Some(problem), QmpError::Refused { reason, .. }) = (problem, &error) {
                    self.observation.refused.push(format!("{problem}: {reason}"));
                }
            }
        }
    }

    /// Writes what is carried out, so that no agent repeats it.
    fn note(&mut self, orders: Orders, session: &mut Session) -> Result<(), FileAccessError> {
        orders.write(&self.options.runtime)?;
        self.observe_orders(&orders);
        session.actual.orders = orders;
        Ok(())
    }

    /// The guest boots anew, so a reboot that it could not be asked for is needless.
    async fn note_boot(&mut self, session: &mut Session) {
        let reboots = self.options.configuration.config.reboot_counter;
        if reboots > session.actual.orders.reboots {
            let orders = Orders { reboots, ..session.actual.orders.clone() };
            if let Err(error) = self.note(orders, session) {
                warn!(error = %ErrorChain(&error), "cannot note that the guest has booted anew");
            }
            self.apply(session).await;
        }
    }

    async fn query_hardware(&mut self, session: &mut Session) -> Result<(), QmpError> {
        session.actual.slots = session.monitor.cpu_slots().await?;
        self.observation.cpus = u32::try_from(present(&session.actual.slots)).unwrap_or(u32::MAX);
        session.actual.cds = cd_drives(&session.monitor.execute(&Command::QueryBlock).await?);
        self.observation.ram = match session.monitor.query(&Command::QueryBalloon).await {
            Ok(Balloon { actual }) => actual,
            // A custom QEMU template may have no balloon. The guest has all memory then.
            Err(QmpError::Refused { .. }) => {
                let started = self.observation.machine.as_ref().and_then(|machine| machine.started_with.as_ref());
                started.map(|started| started.vm.maximum_ram.bytes()).unwrap_or_default()
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }
}

/// Ends QEMU, because a person has asked for a forced stop.
async fn quit(session: &mut Session) {
    warn!("a forced stop was requested; ending QEMU without waiting for the guest");
    if let Err(error) = session.monitor.execute(&Command::Quit).await {
        debug!(%error, "QEMU's monitor");
    }
}
