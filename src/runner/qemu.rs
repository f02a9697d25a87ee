//! The QEMU process: starts it, supervises it until its end, and carries out what [`Lifecycle`] decides.

use std::{
    fs,
    process::ExitStatus,
    time::{Duration, Instant},
};

use tokio::{
    net::UnixStream,
    process::Child,
    sync::watch,
    task::JoinHandle,
    time::{sleep, sleep_until, timeout},
};
use tracing::{debug, error, info, warn};

use super::{
    changes::cpu_changes,
    console,
    control::{Asked, Control},
    ctl::{self, Task},
    go_on::{GuestState, Who},
    lifecycle::{Input, Lifecycle},
    monitor::{Monitor, News},
    operation::Operation,
    programs::{self, Error, Helpers, RETRY_INTERVAL, START_TIMEOUT},
    qmp::{Command, Error as QmpError, Event, Qmp},
    runtime_dir::RuntimeDir,
    stall::Stall,
    state::{EndReason, Helper},
};
use crate::{
    process::ErrorChain,
    render::command_line::{Reaction, Reactions},
    runner_config::{VmSection, default_powerdown_timeout},
};

/// The time for reading the rest of the console, and the standard error after QEMU's end.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// A QEMU process.
pub struct Qemu {
    program: String,
    child: Child,
    stderr: JoinHandle<String>,
    console: Option<JoinHandle<()>>,
}

/// How QEMU has ended.
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// Why.
    pub reason: EndReason,
    /// Its exit status.
    pub status: ExitStatus,
}

/// The outcome of [`Qemu::connect`].
pub enum Connection {
    /// QEMU listens on its monitor.
    Monitor(Qmp),
    /// QEMU has ended before that, or was killed because it did not answer in time.
    Ended(End),
}

/// What the VM's spec wants of a guest that ends.
pub struct GuestSpec<F> {
    /// What to do if the guest panics.
    pub reactions: Reactions,
    /// Whether QEMU runs the guest without KVM.
    pub is_emulated: bool,
    /// Returns the time that the guest has to power down; `None` if it cannot be read now. It is asked for at SIGTERM, and again as long as the
    /// guest powers down.
    pub powerdown_timeout: F,
}

impl Qemu {
    /// Starts QEMU.
    ///
    /// # Errors
    /// If the program cannot be started.
    pub fn start(program: &str, arguments: &[String], runtime: &RuntimeDir) -> Result<Self, Error> {
        // The sockets of an earlier QEMU must not be taken for those of this one.
        for socket in [runtime.monitor(), runtime.agent_monitor(), runtime.serial()] {
            let _ = fs::remove_file(socket);
        }
        let mut child = programs::start(program, arguments)?;
        let stderr = child.stderr.take();
        let stderr = tokio::spawn(programs::last_lines(stderr, |line| warn!(target: "qemu", "{line}")));
        Ok(Self { program: program.to_owned(), child, stderr, console: None })
    }

    /// The process ID.
    pub fn pid(&self) -> u32 {
        self.child.id().unwrap_or_default()
    }

    /// Waits until QEMU listens, connects to its monitor, and starts to copy the serial console.
    ///
    /// # Errors
    /// If the system cannot wait for the process or kill it.
    pub async fn connect(&mut self, runtime: &RuntimeDir) -> Result<Connection, Error> {
        let connected = tokio::select! {
            status = self.child.wait() => {
                let status = status.map_err(|source| self.error(source))?;
                return Ok(Connection::Ended(End { reason: EndReason::QemuFailed, status }));
            }
            connected = timeout(START_TIMEOUT, connect_sockets(runtime)) => connected,
        };
        let Ok(Sockets { monitor, serial }) = connected else {
            error!("QEMU does not answer on its monitor");
            let status = self.kill().await?;
            return Ok(Connection::Ended(End { reason: EndReason::QemuFailed, status }));
        };
        let (socket, log) = (runtime.console(), runtime.console_log());
        self.console = Some(tokio::spawn(async move {
            if let Err(error) = console::serve(serial, &socket, &log).await {
                warn!(%error, "cannot copy the serial console any more");
            }
        }));
        Ok(Connection::Monitor(monitor))
    }

    /// Kills QEMU and waits for its end.
    ///
    /// # Errors
    /// If the system cannot do that.
    pub async fn kill(&mut self) -> Result<ExitStatus, Error> {
        self.child.kill().await.map_err(|source| self.error(source))?;
        self.child.wait().await.map_err(|source| self.error(source))
    }

    /// Supervises QEMU until it ends, also while its monitor cannot be reached. [`Lifecycle`] decides what to do; this function collects its
    /// inputs and carries out its actions. `control` has the requests of others in the Pod. `changed` is told of each helper that ends before
    /// QEMU (false), and of one that works again (true).
    ///
    /// # Errors
    /// If the system cannot wait for the process.
    pub async fn supervise(
        &mut self,
        mut monitor: Monitor,
        mut control: Option<Control>,
        helpers: &mut Helpers,
        mut term: watch::Receiver<bool>,
        spec: GuestSpec<impl Fn() -> Option<Duration>>,
        mut changed: impl FnMut(Helper, bool),
    ) -> Result<End, Error> {
        let mut lifecycle = Lifecycle::new(spec.reactions, Instant::now());
        let mut stall = Stall::new(self.pid());
        let status = loop {
            let wake_at = lifecycle.wake_at();
            let input = tokio::select! {
                status = self.child.wait() => break status.map_err(|source| self.error(source))?,
                news = monitor.news() => match news {
                    News::Event(Event::NetdevVhostUserConnected { network }) => {
                        info!(network, "passt runs again");
                        changed(Helper::PodContainer, true);
                        continue;
                    }
                    News::Event(Event::NetdevVhostUserDisconnected { network }) => {
                        warn!(network, "passt has ended; the guest has no network until it runs again");
                        changed(Helper::PodContainer, false);
                        continue;
                    }
                    News::Event(event) => {
                        if event == (Event::Watchdog {}) && spec.reactions.watchdog() == Some(Reaction::GoOn) {
                            warn!("the guest has not fed its watchdog, and goes on");
                        }
                        Input::Qemu(event)
                    }
                    News::Back(guest) => Input::Found(guest),
                },
                () = stall.due(), if spec.is_emulated && !lifecycle.is_ending() => {
                    if stall.look(&mut monitor).await {
                        error!("QEMU stands still: its threads wait for each other. It is killed, and the guest starts again");
                        self.child.start_kill().map_err(|source| self.error(source))?;
                    }
                    continue;
                }
                Some((helper, error)) = helpers.ended() => {
                    if is_missed(&error, &mut monitor).await {
                        changed(helper, false);
                    }
                    continue;
                }
                _ = term.wait_for(|is_terminated| *is_terminated), if !lifecycle.is_stopping() => {
                    let timeout = (spec.powerdown_timeout)().unwrap_or_else(|| Duration::from_secs(default_powerdown_timeout()));
                    info!(timeout_s = timeout.as_secs(), "stopping the VM");
                    Input::Terminate { timeout }
                }
                request = asked(&mut control) => match request {
                    Asked::End(request) => {
                        let is_stopping = lifecycle.is_stopping();
                        info!(is_stopping, "somebody ran vm-runner end");
                        request.answer(is_stopping);
                        Input::End
                    }
                    Asked::Task(request) => {
                        // Who looks at the figures asks every second or two.
                        if matches!(request.task, Task::Stats { .. } | Task::EndOfStats) {
                            debug!(task = ?request.task, "somebody runs vm-runner ctl stats");
                        } else {
                            info!(task = ?request.task, "somebody ran vm-runner ctl");
                        }
                        let reply = ctl::carry_out(&request.task, request.picture.clone(), &mut monitor).await;
                        request.answer(reply);
                        continue;
                    }
                },
                () = sleep_until(wake_at.unwrap_or_else(Instant::now).into()), if wake_at.is_some() => Input::Timer,
            };
            if input == Input::Timer
                && let Some(timeout) = (spec.powerdown_timeout)()
            {
                lifecycle.set_timeout(timeout);
            }
            for operation in lifecycle.next(input, Instant::now()) {
                if let Err(error) = self.carry_out(&operation, lifecycle.guest(), &mut monitor).await {
                    warn!(%error, action = ?operation, "QEMU has not carried out the action");
                    // What comes after it would do harm without it.
                    break;
                }
            }
        };
        for event in monitor.last_events().await {
            lifecycle.next(Input::Qemu(event), Instant::now());
        }
        Ok(End { reason: lifecycle.end_reason(status.success()), status })
    }

    async fn carry_out(
        &mut self,
        operation: &Operation,
        guest: GuestState,
        monitor: &mut Monitor,
    ) -> Result<(), QmpError> {
        // A disk may be full for days.
        if *operation == Operation::GoOn(Who::Disk) {
            debug!(action = ?operation, "next step of the VM's life cycle");
        } else {
            info!(action = ?operation, "next step of the VM's life cycle");
        }
        match operation {
            Operation::GoOn(Who::NoAgent) => warn!("no agent has continued the guest; continuing it without one"),
            Operation::GoOn(Who::Powerdown) => {
                warn!("the guest is stopped; continuing it, so that it hears the power button");
            }
            Operation::Reset => warn!("the guest has panicked; resetting it"),
            _ => {}
        }
        if *operation == Operation::Kill {
            self.child.start_kill()?;
        }
        monitor.carry_out(operation, guest).await
    }

    /// The last lines of QEMU's standard error, after QEMU's end. Waits until they are read and the console is copied to its end.
    pub async fn last_words(&mut self) -> String {
        if let Some(console) = &mut self.console {
            let _ = timeout(REST_TIMEOUT, console).await;
        }
        // A child of QEMU may keep the pipe open.
        timeout(REST_TIMEOUT, &mut self.stderr).await.ok().and_then(Result::ok).unwrap_or_default()
    }

    fn error(&self, source: std::io::Error) -> Error {
        Error::Start { program: self.program.clone(), source }
    }
}

/// The next request that is about the guest. Never returns if there is no socket.
async fn asked(control: &mut Option<Control>) -> Asked {
    match control {
        Some(control) => control.asked().await,
        None => std::future::pending().await,
    }
}

/// Whether a helper has ended before QEMU. If it has ended because QEMU ends, QEMU does not answer any more.
async fn is_missed(error: &Error, monitor: &mut Monitor) -> bool {
    let is_missed = monitor.execute(&Command::QueryStatus).await.is_ok();
    if is_missed {
        error!(%error, "a program that QEMU needs has ended; the guest continues without it until its next start");
    }
    is_missed
}

/// Plugs the CPUs that the guest starts with. QEMU itself starts with one CPU, because CPUs of its start cannot be unplugged.
pub async fn plug_cpus(monitor: &mut Qmp, vm: &VmSection) {
    if let Err(error) = try_plug_cpus(monitor, vm).await {
        warn!(error = %ErrorChain(&error), "cannot plug all CPUs");
    }
}

async fn try_plug_cpus(monitor: &mut Qmp, vm: &VmSection) -> Result<(), QmpError> {
    let slots = monitor.cpu_slots().await?;
    for operation in cpu_changes(usize::try_from(vm.current_cpus).unwrap_or(usize::MAX), &slots) {
        for step in operation.steps(GuestState::NotStarted) {
            if let Some(command) = step.command() {
                monitor.execute(command).await?;
            }
        }
    }
    Ok(())
}

struct Sockets {
    monitor: Qmp,
    serial: UnixStream,
}

async fn connect_sockets(runtime: &RuntimeDir) -> Sockets {
    let serial = loop {
        match UnixStream::connect(runtime.serial()).await {
            Ok(serial) => break serial,
            Err(_) => sleep(RETRY_INTERVAL).await,
        }
    };
    loop {
        match Qmp::connect(&runtime.monitor()).await {
            Ok(monitor) => return Sockets { monitor, serial },
            Err(_) => sleep(RETRY_INTERVAL).await,
        }
    }
}
