//! The role agent: applies the configuration to the running machine, continues the guest when that is done, and reports the
//! VM's status. It may come and go while the guest runs: nothing that it knows is needed by the next one.

use std::{io, path::PathBuf, time::Duration};

use qapi::qmp;
use serde_json::Value;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, Interval, interval_at, sleep, timeout},
};
use tracing::{debug, info, warn};

use crate::process::{ErrorChain, follow::Follower};

use super::{
    config::{self, Configuration},
    files::{FileError, MachineState, Phase, RuntimeDir},
    guest_agent,
    logging::Logging,
    login::{self, Login},
    qmp::{
        self as monitor, ChangeMedium, Event, ExpirePassword, Qmp, QueryBlock, QuerySpice, QueryVnc, SetPassword,
        Viewer,
    },
    report::{Report, Resource, Seen, report},
    wanted::{Change, Known, Wanted, cd_drives, changes, pending},
};

/// The names of the agents' ports in the QEMU template.
const GUEST_AGENT: &str = "guest-agent";
const LOGIN_AGENT: &str = "vmop-agent";

/// Why the agent ends.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// The directories cannot be followed.
    #[error(transparent)]
    File(#[from] FileError),
    /// Changes of the directories are not told any more.
    #[error("the configuration cannot be followed any more")]
    Follow(#[source] io::Error),
}

/// The agent.
pub struct Agent {
    config_dir: PathBuf,
    runtime: RuntimeDir,
    configuration: Configuration,
    follower: Follower,
    logging: Logging,
    resource: Resource,
    seen: Seen,
    reports: watch::Sender<Option<Report>>,
}

/// A conversation with one QEMU.
struct Session {
    monitor: Qmp,
    known: Known,
    question: Option<JoinHandle<io::Result<Value>>>,
    login: Option<login::Port>,
    /// Since the guest was asked to go: when to ask whether a person will not wait for it.
    powering_down: Option<Interval>,
}

/// Before the next attempt to speak with a QEMU that could not be spoken with.
const RETRY: Duration = Duration::from_secs(1);

/// While a guest powers down, how often the agent asks whether a person will not wait for it.
const ASK: Duration = Duration::from_secs(5);

/// Once the Pod is to end, how often the agent looks for a QEMU that does not answer, with [`RETRY`] in between.
const LAST_WORDS: u32 = 3;

/// What the agent waits for.
enum Next {
    Retry,
    Files(io::Result<()>),
    Event(Result<Event, monitor::Error>),
    Guest(Option<Value>),
    Login(io::Result<String>),
    Ask,
}

impl Agent {
    /// # Errors
    /// If the configuration cannot be read, or its directory cannot be followed.
    pub fn new(
        config_dir: PathBuf,
        runtime: RuntimeDir,
        configuration: Configuration,
        logging: Logging,
        resource: Resource,
        reports: watch::Sender<Option<Report>>,
    ) -> Result<Self, Error> {
        let follower = runtime.follow_with(&config_dir)?;
        Ok(Self { config_dir, runtime, configuration, follower, logging, resource, seen: Seen::default(), reports })
    }

    /// Works until the future is dropped, or `term` is true and there is no QEMU to speak with; then [`Agent::last_look`] is
    /// due. In a container of its own the agent hears of the Pod's end at once, while the guest may still power down.
    ///
    /// # Errors
    /// If the files cannot be followed any more.
    pub async fn run(&mut self, mut term: watch::Receiver<bool>) -> Result<(), Error> {
        let mut session = None;
        let mut patience = LAST_WORDS;
        self.look_at_machine(&mut session).await;
        loop {
            self.tell();
            // The role machine writes how QEMU ended after the end, unless it was killed.
            if session.is_none() && *term.borrow() && (patience == 0 || !self.machine_is_up()) {
                return Ok(());
            }
            let next = match &mut session {
                None => tokio::select! {
                    Ok(()) = term.changed() => continue,
                    changed = self.follower.changed() => Next::Files(changed),
                    () = sleep(RETRY), if self.machine_is_up() => Next::Retry,
                },
                Some(Session { monitor, question, login, powering_down, .. }) => tokio::select! {
                    biased;
                    // First: that a port was closed counts for what was said before, not for a greeting that came since.
                    event = monitor.event() => Next::Event(event),
                    changed = self.follower.changed() => Next::Files(changed),
                    answer = answer(question) => Next::Guest(answer),
                    line = hear(login) => Next::Login(line),
                    () = due(powering_down) => Next::Ask,
                },
            };
            match next {
                Next::Retry => {
                    if *term.borrow() {
                        patience -= 1;
                    }
                    self.look_at_machine(&mut session).await;
                }
                Next::Files(changed) => {
                    changed.map_err(Error::Follow)?;
                    self.read_configuration();
                    self.look_at_machine(&mut session).await;
                    if let Some(session) = &mut session {
                        self.apply(session).await;
                        self.log_in(session).await;
                    }
                }
                Next::Event(Ok(event)) => {
                    if let Some(session) = &mut session {
                        self.event(event, session).await;
                    }
                }
                Next::Event(Err(error)) => {
                    debug!(%error, "QEMU's monitor");
                    session = None;
                    self.seen.running = None;
                    self.look_at_machine(&mut session).await;
                }
                Next::Guest(os_info) => {
                    if let Some(session) = &mut session {
                        session.question = None;
                    }
                    if os_info.is_some() {
                        info!("the guest agent answers");
                        self.seen.os_info = os_info;
                    }
                }
                Next::Ask => {
                    if let Some(session) = &mut session {
                        self.end_if_forced(session).await;
                    }
                }
                Next::Login(line) => {
                    if let Some(session) = &mut session {
                        match line {
                            Ok(line) => self.seen.login.hear(&line),
                            Err(error) => {
                                warn!(%error, "cannot hear the login agent any more");
                                self.give_up_login(session);
                            }
                        }
                        self.log_in(session).await;
                    }
                }
            }
        }
    }

    /// Takes in how the machine ended, for the last report.
    pub fn last_look(mut self) {
        self.seen.machine = self.runtime.read_machine();
        self.tell();
    }

    fn tell(&mut self) {
        let machine = self.seen.machine.as_ref();
        self.seen.pending = machine.map(|machine| pending(machine, &self.configuration)).unwrap_or_default();
        self.seen.resource_uid.clone_from(&self.configuration.config.resource_uid);
        let new = report(&self.seen);
        self.reports.send_if_modified(|last| {
            // Between two looks at the machine nothing may be known; what was told stays.
            let modified = new.is_some() && *last != new;
            if modified {
                *last = new;
            }
            modified
        });
    }

    fn read_configuration(&mut self) {
        self.logging.read(&self.config_dir);
        match config::read(&self.config_dir) {
            Ok(configuration) => self.configuration = configuration,
            Err(error) => warn!(error = %ErrorChain(&error), "the new configuration is not used"),
        }
    }

    /// Reads what the machine role tells, and begins a conversation when a QEMU can be spoken with.
    async fn look_at_machine(&mut self, session: &mut Option<Session>) {
        let machine = self.runtime.read_machine();
        let pid = |machine: &Option<MachineState>| machine.as_ref().map(|machine| machine.pid);
        if pid(&machine) != pid(&self.seen.machine) {
            // Another QEMU.
            *session = None;
            self.seen = Seen { password_changes: self.seen.password_changes, ..Seen::default() };
        }
        self.seen.machine = machine;
        if !self.machine_is_up() {
            *session = None;
        } else if session.is_none() {
            match self.begin().await {
                Ok(new) => *session = Some(new),
                // It ends just now, which machine.json will tell.
                Err(error @ (monitor::Error::Io(_) | monitor::Error::Closed)) => debug!(%error, "QEMU's monitor"),
                Err(error) => warn!(error = %ErrorChain(&error), "cannot speak with QEMU"),
            }
        }
    }

    fn machine_is_up(&self) -> bool {
        self.seen.machine.as_ref().is_some_and(|machine| machine.phase == Phase::Running)
    }

    async fn begin(&mut self) -> Result<Session, monitor::Error> {
        let monitor = Qmp::connect(&self.runtime.agent_monitor()).await?;
        // A reset that was asked for while no agent was there is carried out now, one that was done is not done again.
        let machine = self.seen.machine.as_ref();
        let done = machine.and_then(|machine| self.runtime.last_reset(machine.pid));
        let started = machine.and_then(|machine| Some(machine.started_with.as_ref()?.reset_counter));
        let reset_counter = done.or(started).or(Some(self.configuration.config.reset_counter));
        self.seen.reset_counter = reset_counter;
        let known = Known { reset_counter, ..Known::default() };
        let login = self.connect_login().await;
        let mut session = Session { monitor, known, question: None, login, powering_down: None };
        self.apply(&mut session).await;
        let state = session.monitor.execute(qmp::query_status {}).await?;
        if state.status == qmp::RunState::prelaunch {
            session.monitor.execute(qmp::cont {}).await?;
            info!("the guest runs");
            self.seen.running = Some(true);
        } else {
            self.seen.running = Some(state.running);
        }
        let ports = session.monitor.execute(qmp::query_chardev {}).await?;
        let is_open = |name: &str| ports.iter().any(|port| port.label == name && port.frontend_open);
        if is_open(GUEST_AGENT) {
            self.ask_guest(&mut session);
        }
        self.seen.login = if is_open(LOGIN_AGENT) { Login::found_open() } else { Login::default() };
        self.log_in(&mut session).await;
        let viewers = match self.configuration.config.vm.display.protocol() {
            Some("vnc") => session.monitor.execute(QueryVnc {}).await,
            Some(_) => session.monitor.execute(QuerySpice {}).await,
            None => Ok(monitor::Viewers::default()),
        };
        match viewers {
            Ok(viewers) => self.seen.viewers = viewers.clients.into_iter().filter(Viewer::is_main).collect(),
            // A template of the user's may have no display.
            Err(error) => debug!(%error, "the display"),
        }
        Ok(session)
    }

    async fn end_if_forced(&self, session: &mut Session) {
        match timeout(ASK, self.resource.is_forced()).await {
            Ok(Ok(true)) => {
                warn!("a person does not want to wait for the guest; QEMU is ended");
                if let Err(error) = session.monitor.execute(qmp::quit {}).await {
                    debug!(%error, "QEMU's monitor");
                }
            }
            Ok(Ok(false)) => {}
            Ok(Err(error)) => debug!(%error, "cannot ask whether the guest is to be waited for"),
            Err(_) => debug!("no answer whether the guest is to be waited for"),
        }
    }

    /// Until the port is opened anew.
    fn give_up_login(&mut self, session: &mut Session) {
        session.login = None;
        self.seen.login = Login::default();
    }

    async fn connect_login(&self) -> Option<login::Port> {
        match login::Port::connect(&self.runtime.vmop_agent()).await {
            Ok(port) => Some(port),
            Err(error) => {
                debug!(%error, "no port for a login agent");
                None
            }
        }
    }

    /// Tells the login agent what it does not know yet.
    async fn log_in(&mut self, session: &mut Session) {
        let Some(port) = &mut session.login else { return };
        if let Some(line) = self.seen.login.next(self.configuration.config.vm.display.logged_in_user.as_deref()) {
            info!(line, "to the login agent");
            if let Err(error) = port.tell(&line).await {
                warn!(%error, "cannot tell the login agent");
                self.give_up_login(session);
            }
        }
    }

    fn ask_guest(&self, session: &mut Session) {
        let socket = self.runtime.guest_agent();
        session.question = Some(tokio::spawn(async move { guest_agent::os_info(&socket).await }));
    }

    /// Brings the machine to what the configuration wants. A change that QEMU refuses is logged and tried again with the
    /// next change of the configuration; it keeps nothing else from being changed.
    async fn apply(&mut self, session: &mut Session) {
        if let Err(error) = self.look_at_hardware(session).await {
            // The connection broke, which the next wait for an event tells too.
            debug!(%error, "QEMU's monitor");
            return;
        }
        let wanted = Wanted::from(&self.configuration);
        for change in changes(&wanted, &session.known) {
            let name = format!("{change:?}");
            // Before it is done: a guest must not be reset twice.
            if let (Change::Reset(counter), Some(machine)) = (&change, &self.seen.machine) {
                match self.runtime.note_reset(machine.pid, *counter) {
                    Ok(()) => self.seen.reset_counter = Some(*counter),
                    Err(error) => {
                        warn!(error = %ErrorChain(&error), "not reset");
                        continue;
                    }
                }
            }
            let is_password = matches!(change, Change::Password(..));
            match carry_out(change, session).await {
                Ok(()) => {
                    info!(change = name, "changed");
                    self.seen.password_changes += u64::from(is_password);
                }
                Err(error) => warn!(change = name, error = %ErrorChain(&error), "not changed"),
            }
        }
        if let Some(password) = &session.known.password {
            self.seen.password_expiry = Some(password.expiry.clone());
        }
        if let Err(error) = self.look_at_hardware(session).await {
            debug!(%error, "QEMU");
        }
    }

    async fn look_at_hardware(&mut self, session: &mut Session) -> Result<(), monitor::Error> {
        session.known.slots = session.monitor.cpu_slots().await?;
        let present = session.known.slots.iter().filter(|slot| slot.occupant.is_some()).count();
        self.seen.cpus = u32::try_from(present).unwrap_or(u32::MAX);
        session.known.cds = cd_drives(&session.monitor.execute(QueryBlock {}).await?);
        self.seen.ram = match session.monitor.execute(qmp::query_balloon {}).await {
            Ok(balloon) => u64::try_from(balloon.actual).unwrap_or_default(),
            // A template of the user's has no balloon: the guest has all its memory.
            Err(monitor::Error::Refused { .. }) => {
                let started = self.seen.machine.as_ref().and_then(|machine| machine.started_with.as_ref());
                started.map(|started| started.vm.maximum_ram.bytes()).unwrap_or_default()
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }

    async fn event(&mut self, event: Event, session: &mut Session) {
        match event {
            Event::Resume => self.seen.running = Some(true),
            Event::Stop => self.seen.running = Some(false),
            Event::Powerdown => {
                // It comes again each time that the button is pressed.
                session.powering_down.get_or_insert_with(|| interval_at(Instant::now() + ASK, ASK));
            }
            Event::Reset { .. } => {
                session.question = None;
                self.seen.os_info = None;
            }
            Event::BalloonChange { actual } => self.seen.ram = actual,
            Event::VserportChange { id, open } if id == GUEST_AGENT => {
                // An agent that leaves says nothing about the guest: it may be upgraded.
                if open {
                    self.ask_guest(session);
                }
            }
            Event::VserportChange { id, open } if id == LOGIN_AGENT => {
                // One that comes says so itself.
                if !open {
                    self.seen.login = Login::default();
                } else if session.login.is_none() {
                    session.login = self.connect_login().await;
                }
            }
            Event::ViewerCame { client } => {
                if client.is_main() {
                    self.seen.viewers.push(client);
                }
            }
            Event::ViewerWent { client } => {
                self.seen.viewers.retain(|viewer| !viewer.is(&client));
            }
            // The guest has opened the tray that it had locked: now the CD can be changed.
            Event::DeviceTrayMoved { open: true } => self.apply(session).await,
            Event::DeviceDeleted { .. } => {
                if let Err(error) = self.look_at_hardware(session).await {
                    debug!(%error, "QEMU");
                }
            }
            // The end is told by the machine role, which knows whether it was asked for.
            Event::VserportChange { .. } | Event::DeviceTrayMoved { .. } | Event::Shutdown { .. } | Event::Other => {}
        }
    }
}

/// The answer to an open question; never, if there is none.
async fn answer(question: &mut Option<JoinHandle<io::Result<Value>>>) -> Option<Value> {
    match question {
        Some(handle) => match handle.await {
            Ok(Ok(answer)) => Some(answer),
            Ok(Err(error)) => {
                warn!(%error, "the guest agent has opened its port but does not answer");
                None
            }
            Err(_) => None,
        },
        None => futures::future::pending().await,
    }
}

/// When it is time to ask; never, while the guest is not asked to go.
async fn due(powering_down: &mut Option<Interval>) {
    match powering_down {
        Some(interval) => drop(interval.tick().await),
        None => futures::future::pending().await,
    }
}

/// What the login agent says; never, if there is no port for one.
async fn hear(login: &mut Option<login::Port>) -> io::Result<String> {
    match login {
        Some(port) => port.hear().await,
        None => futures::future::pending().await,
    }
}

#[allow(deprecated, reason = "the crate's types have fields that QEMU has given up")]
async fn carry_out(change: Change, session: &mut Session) -> Result<(), monitor::Error> {
    let Session { monitor, known, .. } = session;
    match change {
        Change::Plug { id, slot } => monitor.plug(id, slot).await?,
        Change::Unplug { id } => {
            monitor.execute(qmp::device_del { id }).await?;
        }
        Change::Balloon(bytes) => {
            monitor.execute(qmp::balloon { value: i64::try_from(bytes).unwrap_or(i64::MAX) }).await?;
            known.ram = Some(bytes);
        }
        Change::Password(protocol, password) => {
            monitor.execute(SetPassword { protocol, password: &password.secret }).await?;
            // Only now: setting a password makes it valid for ever.
            monitor.execute(ExpirePassword { protocol, time: &password.expiry }).await?;
            known.password = Some(password);
        }
        Change::Insert { id, file } => {
            let medium = ChangeMedium { id: &id, filename: &file, format: "raw", read_only_mode: "read-only" };
            monitor.execute(medium).await?;
            forget_first_medium(monitor, &id).await;
        }
        Change::Eject { id } => {
            let tray = qmp::blockdev_open_tray { id: Some(id.clone()), device: None, force: Some(false) };
            monitor.execute(tray).await?;
            monitor.execute(qmp::blockdev_remove_medium { id: id.clone() }).await?;
            monitor.execute(qmp::blockdev_close_tray { id: Some(id.clone()), device: None }).await?;
            forget_first_medium(monitor, &id).await;
        }
        Change::Reset(counter) => {
            known.reset_counter = Some(counter);
            monitor.execute(qmp::system_reset {}).await?;
        }
    }
    Ok(())
}

/// The image that QEMU was started with has a name of its own and stays open, though it is in no drive any more.
async fn forget_first_medium(monitor: &mut Qmp, id: &str) {
    let node = qmp::blockdev_del { node_name: format!("{id}-image") };
    if let Err(error) = monitor.execute(node).await {
        // It is gone already, or a template of the user's names it otherwise.
        debug!(id, %error, "the first medium");
    }
}
