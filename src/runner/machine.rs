//! The role machine: starts QEMU and its helpers (the TPM emulator, passt), supervises it, and is its power button. It needs no
//! network and no credential. What it knows is in `machine.json`; see [`super::files`].

use std::{
    collections::VecDeque,
    fs, io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::{Duration, Instant},
};

use qapi::qmp;
use rustix::process::Resource;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    net::UnixStream,
    process::{Child, Command},
    sync::watch,
    task::{JoinHandle, JoinSet},
    time::{sleep, sleep_until, timeout},
};
use tracing::{debug, error, info, warn};

use super::{
    accel, command,
    config::{self, Configuration},
    console,
    control::{Action, Control, Happened},
    files::{End, FileError, MachineState, Phase, RuntimeDir, Started},
    prepare::{self, Template},
    qmp::Qmp,
    wanted::{Change, cpu_changes},
};
use crate::{
    process::ErrorChain,
    runner_config::{NetworkSection, VmSection},
};

/// How long QEMU may take until its monitor answers; with much memory on huge pages it may take some seconds.
const START: Duration = Duration::from_secs(60);
/// Between two attempts to connect to a socket that QEMU is about to make.
const RETRY: Duration = Duration::from_millis(20);
/// What is kept of QEMU's standard error.
const LAST_LINES: usize = 20;

/// Why the machine did not run, or not to a good end.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// Something that QEMU needs is missing.
    #[error(transparent)]
    Prepare(#[from] prepare::Error),
    /// There is no accelerator.
    #[error(transparent)]
    Accelerator(#[from] accel::Error),
    /// There is no command line.
    #[error(transparent)]
    Command(#[from] command::Error),
    /// A file is not readable or writable.
    #[error(transparent)]
    File(#[from] FileError),
    /// The display would be open.
    #[error(
        "the display's password is missing: its Secret is gone, or lacks the key display-password. Mend the Secret; or, for a \
         display without a password, delete it, set spec.vm.display.spice.generateSecret to false, and restart the machine"
    )]
    PasswordMissing,
    /// A program is not there.
    #[error("cannot start {program}{}", what_to_do(source))]
    Start {
        /// The program.
        program: String,
        /// Why.
        source: io::Error,
    },
    /// A program that QEMU is connected with ended before it.
    #[error("{program} ended ({status}): {last}{}", hint(last))]
    Helper {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote last.
        last: String,
    },
    /// QEMU failed.
    #[error("QEMU failed ({status}){}{}", words(last_words), hint(last_words))]
    Qemu {
        /// How it ended.
        status: ExitStatus,
        /// What it wrote last.
        last_words: String,
    },
}

fn what_to_do(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::NotFound { " (install it in the runner's image)" } else { "" }
}

fn words(last_words: &str) -> String {
    if last_words.is_empty() { ", without a word".into() } else { format!(": {last_words}") }
}

/// For passt.
const UNCONFINED: &str = "\na pod network needs a container that is privileged or has the seccomp and AppArmor profiles Unconfined, and a node that lets users make user namespaces";

/// What to do about well-known last words.
fn hint(last_words: &str) -> &'static str {
    const HINTS: [(&str, &str); 9] = [
        ("block-curl not found", "\na CD image from a URL needs the package qemu-block-extra in the runner's image"),
        ("no option group 'spice'", "\nthis QEMU has no SPICE: install qemu-system-modules-spice, or use display.vnc"),
        ("-spice: invalid option", "\nthis QEMU has no SPICE: install qemu-system-modules-spice, or use display.vnc"),
        (
            "unsupported machine type",
            "\nthis runner's QEMU does not know the machine's type: use a runner image with a QEMU as new as the one that the machine was made with",
        ),
        ("Failed to get \"write\" lock", "\nanother process uses the disk; a machine must run only once"),
        (
            "bridge helper failed",
            "\nthe Pod needs hostNetwork, CAP_NET_ADMIN, /dev/net/tun, and the bridge in /etc/qemu/bridge.conf",
        ),
        ("user namespace", UNCONFINED),
        ("Failed to sandbox process", UNCONFINED),
        ("Cannot allocate memory", "\nthe node or the container has not enough memory for vm.maximumRam"),
    ];
    HINTS.iter().find(|(pattern, _)| last_words.contains(pattern)).map_or("", |(_, hint)| hint)
}

/// Where the machine role finds what it needs.
#[derive(Clone, Debug)]
pub struct Places {
    /// The projected configuration.
    pub config_dir: PathBuf,
    /// The templates of the image.
    pub templates: PathBuf,
    /// Where the runner's two roles meet.
    pub runtime: RuntimeDir,
    /// QEMU.
    pub qemu: String,
    /// The TPM emulator.
    pub swtpm: String,
    /// passt.
    pub passt: String,
    /// The ports from 1 to this one are those of a guest with a pod network.
    pub pod_ports: u16,
    /// Whether the display must have a password.
    pub require_password: bool,
}

/// Runs the machine until QEMU ends. `term` becomes true when the machine is to be stopped.
///
/// # Errors
/// If the machine cannot be started, or QEMU fails.
pub async fn run(places: &Places, term: watch::Receiver<bool>) -> Result<(), Error> {
    let before = places.runtime.read_machine();
    let outcome = run_until_end(places, before.as_ref(), term).await;
    if let Err(error) = &outcome
        && !matches!(error, Error::Qemu { .. })
    {
        // It did not come as far as QEMU. The agent reports that in the same way.
        let phase = Phase::Ended {
            reason: End::QemuFailed,
            code: None,
            last_words: ErrorChain(error).to_string(),
            held: false,
        };
        let nothing = String::new;
        places.runtime.write_machine(&MachineState {
            pid: 0,
            machine_type: nothing(),
            accelerator: nothing(),
            accelerator_reason: nothing(),
            uuid: nothing(),
            macs: Vec::new(),
            // That its display had a password must be known as long as the Pod lives.
            started_with: before.and_then(|before| before.started_with),
            phase,
        })?;
    }
    outcome
}

async fn run_until_end(
    places: &Places,
    before: Option<&MachineState>,
    term: watch::Receiver<bool>,
) -> Result<(), Error> {
    let runtime = &places.runtime;
    let configuration = config::read(&places.config_dir)?;
    // This container was started again, but the guest had shut itself down to stay down.
    if let Some(MachineState { phase: Phase::Ended { held: true, .. }, .. }) = before {
        return hold(places, &configuration, term).await;
    }
    let had_password = before.and_then(|before| before.started_with.as_ref()).is_some_and(|it| it.display_password);
    let vm = &configuration.config.vm;
    let needs_password = places.require_password || had_password;
    if needs_password && vm.display.protocol().is_some() && configuration.password.is_none() {
        return Err(Error::PasswordMissing);
    }
    let choice = accel::choose(vm.accelerator, &vm.cpu_model, &places.qemu, runtime).await?;
    info!(accelerator = choice.accelerator, reason = choice.reason, "accelerator");
    let template = prepare::template(&configuration.config, &places.templates)?;
    let facts = prepare::prepare(&configuration, runtime, choice.accelerator, &places.qemu).await?;
    if !facts.display_password && vm.display.protocol().is_some() {
        warn!("the display has no password: whoever reaches its port can use it");
    }
    let arguments = command::qemu(&configuration.config, &facts, runtime, &template.name, &template.text)?;
    let mut helpers = Helpers::default();
    if vm.use_tpm {
        let state = Path::new(&configuration.config.data_dir).join("tpm");
        fs::create_dir_all(&state).map_err(FileError::with("make", &state))?;
        helpers.start(&places.swtpm, command::swtpm(&state, runtime), &runtime.tpm()).await?;
    }
    if vm.network.iter().any(|network| matches!(network, NetworkSection::Pod { .. })) {
        helpers.start(&places.passt, passt_arguments(places, vm), &runtime.passt()).await?;
    }

    let mut state = MachineState {
        pid: 0,
        machine_type: facts.machine_type,
        accelerator: choice.accelerator.into(),
        accelerator_reason: choice.reason,
        macs: command::macs(&vm.network, &facts.uuid),
        uuid: facts.uuid,
        started_with: Some(Started::from(&configuration)),
        phase: Phase::Starting,
    };
    let mut qemu = Qemu::start(places, &arguments)?;
    state.pid = qemu.child.id().unwrap_or_default();
    runtime.write_machine(&state)?;
    info!(pid = state.pid, machine_type = state.machine_type, "QEMU started");
    let (end, status) = qemu.supervise(places, &mut state, &mut helpers, term.clone()).await?;
    let last_words = qemu.last_words().await;
    drop(helpers);

    let held = end == End::GuestShutdown && stays_down(places, &configuration);
    state.phase = Phase::Ended { reason: end, code: status.code(), last_words: last_words.clone(), held };
    runtime.write_machine(&state)?;
    match end {
        End::QemuFailed => Err(Error::Qemu { status, last_words }),
        End::PoweredOff => {
            warn!("the guest did not shut down in time, or did not run; QEMU was ended");
            Ok(())
        }
        End::PoweredDown | End::GuestShutdown => {
            info!(reason = %end, "the machine has ended");
            if held { hold(places, &configuration, term).await } else { Ok(()) }
        }
    }
}

/// `guestShutdownStops`, which may have changed since the start.
fn stays_down(places: &Places, started_with: &Configuration) -> bool {
    let now = config::read(&places.config_dir);
    now.as_ref().unwrap_or(started_with).config.guest_shutdown_stops
}

/// Stays without QEMU until TERM, or until the guest is not to stay down any more: if the runner ended now, the kubelet would
/// start it again, and with it the guest.
async fn hold(places: &Places, started_with: &Configuration, mut term: watch::Receiver<bool>) -> Result<(), Error> {
    let runtime = &places.runtime;
    info!("the guest has shut down and stays down; waiting for the Pod's end");
    let mut follower = runtime.follow_with(&places.config_dir)?;
    while stays_down(places, started_with) {
        tokio::select! {
            // An error means that the sender is gone, hence that the program ends.
            _ = term.wait_for(|term| *term) => break,
            changed = follower.changed() => changed.map_err(FileError::with("follow", &places.config_dir))?,
        }
    }
    if let Some(mut state) = runtime.read_machine()
        && let Phase::Ended { held, .. } = &mut state.phase
    {
        // Who starts the runner by hand in the same directory wants the guest to run.
        *held = false;
        runtime.write_machine(&state)?;
    }
    Ok(())
}

/// The command line, for people.
///
/// # Errors
/// As [`run`]; nothing is started but a trial of KVM.
pub async fn render_command(places: &Places) -> Result<Vec<String>, Error> {
    let configuration = config::read(&places.config_dir)?;
    let vm = &configuration.config.vm;
    let choice = accel::choose(vm.accelerator, &vm.cpu_model, &places.qemu, &places.runtime).await?;
    let Template { name, text } = prepare::template(&configuration.config, &places.templates)?;
    let facts = prepare::prepare(&configuration, &places.runtime, choice.accelerator, &places.qemu).await?;
    let mut all = vec![places.qemu.clone()];
    all.extend(command::qemu(&configuration.config, &facts, &places.runtime, &name, &text)?);
    Ok(all)
}

fn passt_arguments(places: &Places, vm: &VmSection) -> Vec<String> {
    let last_port = command::last_port(places.pod_ports, rustix::process::getrlimit(Resource::Nofile).maximum);
    if last_port < places.pod_ports {
        warn!(
            last_port,
            wanted = places.pod_ports,
            "the limit of open files allows fewer ports to be forwarded to the guest"
        );
    }
    let user = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    command::passt(vm, last_port, user, &places.runtime)
}

/// Programs that QEMU is connected with. They end when QEMU closes the connection, or when this is dropped.
///
/// One that ends while the guest runs is not started again, because QEMU would not connect again. The guest lives on without it:
/// what runs there may not need it, and only its owner can say when a restart is the lesser evil.
#[derive(Default)]
struct Helpers(JoinSet<Error>);

impl Helpers {
    /// Starts a program and waits until its socket is there: QEMU would not.
    async fn start(&mut self, program: &str, arguments: Vec<String>, socket: &Path) -> Result<(), Error> {
        debug!(program, ?arguments, "a helper's command line");
        let program = program.to_owned();
        let _ = fs::remove_file(socket);
        let mut child = match Command::new(&program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .process_group(0)
            .spawn()
        {
            Ok(child) => child,
            Err(source) => return Err(Error::Start { program, source }),
        };
        let name = program.clone();
        self.0.spawn(async move {
            let words = match child.stderr.take() {
                Some(stderr) => follow(stderr, |line| debug!(program, "{line}")).await,
                None => String::new(),
            };
            let last = words.lines().last().unwrap_or("without a word").to_owned();
            match child.wait().await {
                Ok(status) => Error::Helper { program, status, last },
                Err(source) => Error::Start { program, source },
            }
        });
        let its_socket = timeout(START, async {
            while !socket.exists() {
                sleep(RETRY).await;
            }
        });
        tokio::select! {
            made = its_socket => {
                made.map_err(|_| Error::Start { program: name, source: io::Error::other("it did not make its socket") })
            }
            Some(error) = self.ended() => Err(error),
        }
    }

    /// Waits for the next one's end; `None` if there is none.
    async fn ended(&mut self) -> Option<Error> {
        self.0.join_next().await?.ok()
    }

    /// One that has ended.
    fn has_ended(&mut self) -> Option<Error> {
        self.0.try_join_next()?.ok()
    }
}

/// Plugs the CPUs that the guest starts with. Those that QEMU starts with can't be taken away, so the standard template has one.
async fn plug_cpus(monitor: &mut Qmp, vm: &VmSection) {
    let plugged = async {
        let slots = monitor.cpu_slots().await?;
        for change in cpu_changes(usize::try_from(vm.current_cpus).unwrap_or(usize::MAX), &slots) {
            if let Change::Plug { id, slot } = change {
                monitor.plug(id, slot).await?;
            }
        }
        Ok::<_, super::qmp::Error>(())
    };
    if let Err(error) = plugged.await {
        warn!(error = %ErrorChain(&error), "not all CPUs are there");
    }
}

/// The process.
struct Qemu {
    child: Child,
    stderr: JoinHandle<String>,
    console: Option<JoinHandle<()>>,
}

impl Qemu {
    fn start(places: &Places, arguments: &[String]) -> Result<Self, Error> {
        debug!(?arguments, "QEMU's command line");
        // Monitors of a QEMU before this one must not be mistaken for this one's.
        for socket in [places.runtime.monitor(), places.runtime.agent_monitor(), places.runtime.serial()] {
            let _ = fs::remove_file(socket);
        }
        let mut child = Command::new(&places.qemu)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            // The terminal's Ctrl-C is for the runner, which then asks the guest.
            .process_group(0)
            .kill_on_drop(true)
            .spawn()
            .map_err(|source| Error::Start { program: places.qemu.clone(), source })?;
        let stderr = child.stderr.take();
        let stderr = tokio::spawn(async move {
            match stderr {
                Some(stderr) => follow(stderr, |line| warn!(target: "qemu", "{line}")).await,
                None => String::new(),
            }
        });
        Ok(Self { child, stderr, console: None })
    }

    /// Waits for the end. Everything that happens goes through [`Control`].
    async fn supervise(
        &mut self,
        places: &Places,
        state: &mut MachineState,
        helpers: &mut Helpers,
        mut term: watch::Receiver<bool>,
    ) -> Result<(End, ExitStatus), Error> {
        let exit = |source| Error::Start { program: places.qemu.clone(), source };
        let connected = tokio::select! {
            status = self.child.wait() => return Ok((End::QemuFailed, status.map_err(exit)?)),
            connected = timeout(START, connect(&places.runtime)) => connected,
        };
        let Ok((mut monitor, serial)) = connected else {
            error!("QEMU does not answer on its monitor");
            self.child.kill().await.map_err(exit)?;
            return Ok((End::QemuFailed, self.child.wait().await.map_err(exit)?));
        };
        let (socket, log) = (places.runtime.console(), places.runtime.console_log());
        self.console = Some(tokio::spawn(async move {
            if let Err(error) = console::serve(serial, &socket, &log).await {
                warn!(%error, "the serial console is lost");
            }
        }));
        // A socket that is there is not yet a program that went on to its work, and QEMU starts without a network, too.
        if let Some(error) = helpers.has_ended() {
            self.child.kill().await.map_err(exit)?;
            return Err(error);
        }
        // Here and not by the agent, without which the guest may have to run.
        if let Some(started) = &state.started_with {
            plug_cpus(&mut monitor, &started.vm).await;
        }
        let mut control = Control::new(Instant::now());
        // From here on the agent may continue the guest: nothing that it writes on its console gets lost any more.
        state.phase = Phase::Running;
        places.runtime.write_machine(state)?;

        let mut monitor_lost = false;
        let status = loop {
            let wake_at = control.wake_at();
            let happened = tokio::select! {
                status = self.child.wait() => break status.map_err(exit)?,
                event = monitor.event(), if !monitor_lost => match event {
                    Ok(event) => Happened::Qemu(event),
                    // QEMU is ending; how, its exit tells.
                    Err(error) => {
                        debug!(%error, "monitor");
                        monitor_lost = true;
                        continue;
                    }
                },
                Some(error) = helpers.ended() => {
                    // QEMU's end is the helpers' end, too; but then it does not answer any more.
                    if monitor.execute(qmp::query_status {}).await.is_ok() {
                        error!(%error, "the guest is without what this program did until its next start");
                    }
                    continue;
                }
                _ = term.wait_for(|term| *term), if !control.is_stopping() => {
                    let timeout = powerdown_timeout(places);
                    info!(timeout_s = timeout.as_secs(), "stopping the machine");
                    Happened::Term { timeout }
                }
                () = sleep_until(wake_at.unwrap_or_else(Instant::now).into()), if wake_at.is_some() => Happened::Time,
            };
            if let Some(action) = control.next(happened, Instant::now())
                && let Err(error) = self.act(action, &mut monitor).await
            {
                warn!(%error, ?action, "QEMU does not obey");
            }
        };
        // The last events may still wait to be read.
        while let Ok(Ok(event)) = timeout(Duration::from_secs(1), monitor.event()).await {
            control.next(Happened::Qemu(event), Instant::now());
        }
        Ok((control.end(status.success()), status))
    }

    async fn act(&mut self, action: Action, monitor: &mut Qmp) -> Result<(), super::qmp::Error> {
        info!(?action, "machine");
        match action {
            Action::Continue => {
                warn!("no agent has continued the guest; continuing it without one");
                monitor.execute(qmp::cont {}).await?;
            }
            Action::Powerdown => {
                monitor.execute(qmp::system_powerdown {}).await?;
            }
            Action::Quit => {
                monitor.execute(qmp::quit {}).await?;
            }
            Action::Kill => self.child.start_kill()?,
        }
        Ok(())
    }

    /// What QEMU wrote last; waits until all is read and the console is copied to its end.
    async fn last_words(&mut self) -> String {
        if let Some(console) = &mut self.console {
            let _ = timeout(Duration::from_secs(1), console).await;
        }
        // A child of QEMU may hold the pipe open.
        timeout(Duration::from_secs(1), &mut self.stderr).await.ok().and_then(Result::ok).unwrap_or_default()
    }
}

/// The powerdown timeout as it is now.
fn powerdown_timeout(places: &Places) -> Duration {
    let seconds = config::read(&places.config_dir).map_or(900, |now| now.config.vm.powerdown_timeout);
    Duration::from_secs(seconds)
}

async fn connect(runtime: &RuntimeDir) -> (Qmp, UnixStream) {
    let serial = loop {
        match UnixStream::connect(runtime.serial()).await {
            Ok(serial) => break serial,
            Err(_) => sleep(RETRY).await,
        }
    };
    loop {
        match Qmp::connect(&runtime.monitor()).await {
            Ok(monitor) => return (monitor, serial),
            Err(_) => sleep(RETRY).await,
        }
    }
}

/// Logs what a program writes, and keeps the end of it.
async fn follow(stderr: impl AsyncRead + Unpin, log: impl Fn(&str)) -> String {
    let mut last = VecDeque::with_capacity(LAST_LINES);
    let mut lines = BufReader::with_capacity(1024, stderr).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        log(&line);
        if last.len() == LAST_LINES {
            last.pop_front();
        }
        last.push_back(line);
    }
    Vec::from(last).join("\n")
}
