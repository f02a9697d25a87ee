//! The machine role: starts QEMU with its helpers, supervises it, and presses its power button when the runner receives SIGTERM. It
//! needs neither a network nor a credential. It writes what it knows to `machine.json` (see [`super::state`]).

use std::{
    convert::Infallible,
    path::{Path, PathBuf},
    process::ExitStatus,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use super::{
    accel::{self, Choice},
    block_devices::{BlockDevices, READ_AGAIN},
    command,
    config::{self, Configuration},
    control::Control,
    files::{FileAccessError, Purpose, create_directory, random_uuid},
    monitor::Monitor,
    pod_network::{self, Ports},
    prepare,
    programs::{self, Helpers, hint},
    qemu::{Connection, End, GuestSpec, Qemu, plug_cpus},
    runtime_dir::RuntimeDir,
    state::{BlockDevice, EndReason, Helper, MachineState, Phase, StartedWith},
};
use crate::{
    kvm::TrialResult,
    process::ErrorChain,
    render::command_line::{self, PodLink, Prepared, Reactions},
    runner_config::RunnerConfig,
};

/// Why the VM could not be started, or has not ended well.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// Something that QEMU needs is missing.
    #[error(transparent)]
    Prepare(#[from] prepare::Error),
    /// No accelerator could be chosen.
    #[error(transparent)]
    Accelerator(#[from] accel::Error),
    /// QEMU's command line could not be rendered.
    #[error(transparent)]
    Command(#[from] command_line::Error),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// A program cannot be started, or has failed.
    #[error(transparent)]
    Program(#[from] programs::Error),
    /// There is no passt in its container.
    #[error(transparent)]
    PodNetwork(#[from] pod_network::Error),
    /// The display must have a password, and there is none.
    #[error(
        "the display's password is missing: its Secret does not exist, or does not have the key display-password. Correct the \
         Secret; or, for a display without a password, delete the Secret, set spec.vm.display.spice.generateSecret to false, and \
         restart the VM"
    )]
    PasswordMissing,
    /// QEMU has failed.
    #[error("QEMU failed ({status}){}{}", output(last_words), hint(last_words))]
    Qemu {
        /// How it ended.
        status: ExitStatus,
        /// The last lines that it wrote on its standard error.
        last_words: String,
    },
}

fn output(last_words: &str) -> String {
    if last_words.is_empty() { " without output".into() } else { format!(": {last_words}") }
}

/// The directories, programs and options of the machine role.
#[derive(Clone, Debug)]
pub struct MachineOptions {
    /// The directory of `config.yaml`.
    pub config_dir: PathBuf,
    /// The directory of custom QEMU templates.
    pub templates: PathBuf,
    /// The runtime directory.
    pub runtime: RuntimeDir,
    /// The program QEMU.
    pub qemu: String,
    /// The TPM emulator.
    pub swtpm: String,
    /// The program passt.
    pub passt: String,
    /// The folder of the container that runs passt, if there is one.
    pub passt_folder: PathBuf,
    /// With a network of type pod, the ports from 1 to this one are forwarded to the guest.
    pub pod_ports: u16,
    /// Whether a display must have a password.
    pub require_password: bool,
    /// Whether a kubelet would start the runner again when it ends.
    pub is_in_pod: bool,
    /// The result of the node's trial of KVM, if there was one.
    pub kvm_trial: Option<TrialResult>,
}

/// Runs the VM until QEMU ends. `term` becomes true when the VM must be stopped.
///
/// # Errors
/// If QEMU cannot be started, or fails.
pub async fn run(options: &MachineOptions, term: watch::Receiver<bool>) -> Result<(), Error> {
    let before = MachineState::read(&options.runtime);
    let outcome = run_until_end(options, before.as_ref(), term).await;
    if let Err(error) = &outcome
        && !matches!(error, Error::Qemu { .. })
    {
        // The failure was before QEMU's start or at it. The agent reports it like a failure of QEMU. `started_with` stays: it says whether
        // the display had a password, which must be known as long as the Pod exists.
        let started_with = before.and_then(|before| before.started_with);
        let message = ErrorChain(error).to_string();
        MachineState::failed_before_start(message, started_with).write(&options.runtime)?;
    }
    outcome
}

async fn run_until_end(
    options: &MachineOptions,
    before: Option<&MachineState>,
    term: watch::Receiver<bool>,
) -> Result<(), Error> {
    let configuration = config::read(&options.config_dir)?;
    // The kubelet has started the container again, but the guest has shut down and stays down.
    if let Some(MachineState { phase: Phase::Ended { held: true, reason, .. }, .. }) = before {
        return hold(options, &configuration, *reason, term).await;
    }
    check_password(options, before, &configuration)?;
    let longest = before.and_then(|before| before.started_with.as_ref()?.longest_powerdown);
    let mut vm = StartedVm::start(options, &configuration, longest).await?;
    let end = vm.run(options, term.clone()).await?;
    let StartedVm { mut qemu, mut state, helpers } = vm;
    let last_words = qemu.last_words().await;
    drop(helpers);

    let held = stays_down(options, &configuration, end.reason);
    state.phase = Phase::Ended { reason: end.reason, code: end.status.code(), last_words: last_words.clone(), held };
    state.write(&options.runtime)?;
    match end.reason {
        EndReason::QemuFailed => return Err(Error::Qemu { status: end.status, last_words }),
        EndReason::StoppedAfterPanic => warn!("the guest has panicked; QEMU was ended, as the VM's spec wants it"),
        EndReason::PoweredOff => warn!("the guest did not shut down in time, or did not run; QEMU was ended"),
        EndReason::PoweredDown | EndReason::GuestShutdown => info!(reason = %end.reason.reason(), "the VM has ended"),
    }
    if held { hold(options, &configuration, end.reason, term).await } else { Ok(()) }
}

/// A display that had a password, or must have one, is never started without one.
fn check_password(
    options: &MachineOptions,
    before: Option<&MachineState>,
    configuration: &Configuration,
) -> Result<(), Error> {
    let had_password =
        before.and_then(|before| before.started_with.as_ref()).is_some_and(|started| started.display_password);
    let needs_password = options.require_password || had_password;
    let is_open = configuration.config.vm.display.open_protocol().is_some();
    if is_open && configuration.password.is_none() {
        if needs_password {
            return Err(Error::PasswordMissing);
        }
        warn!("the display has no password: everybody who can connect to its port can use it");
    }
    Ok(())
}

/// Everything that is known before QEMU starts.
struct Start {
    state: MachineState,
    arguments: Vec<String>,
    /// How to reach passt, if no other container runs it.
    own_passt: Option<PodLink>,
}

async fn prepare_start(
    options: &MachineOptions,
    configuration: &Configuration,
    purpose: Purpose,
) -> Result<Start, Error> {
    let config = &configuration.config;
    let Choice { accelerator, reason } = accel::choose(
        config.vm.accelerator,
        &config.vm.cpu_model,
        &options.qemu,
        &options.runtime,
        options.kvm_trial.as_ref(),
        purpose,
    )
    .await?;
    info!(accelerator, reason, "accelerator");
    let template = prepare::template(config, configuration.qemu.as_ref(), &options.templates, purpose)?;
    let link = match purpose {
        Purpose::Start if command_line::has_pod_network(&config.vm) => pod_network::find(&options.passt_folder).await?,
        Purpose::Look => pod_network::present(&options.passt_folder),
        Purpose::Start => None,
    };
    let is_own = link.is_none();
    let link = link.unwrap_or_else(|| PodLink::Stream(options.runtime.passt()));
    let prepared =
        prepare::prepare(configuration, &options.runtime, accelerator, &options.qemu, link.clone(), purpose).await?;
    let arguments = command_line::qemu(config, &prepared, options.runtime.sockets(), &template)?;
    let Prepared { machine_type, uuid, hardware, .. } = prepared;
    let state = MachineState {
        start: String::new(),
        pid: 0,
        machine_type,
        hardware: hardware.name().into(),
        accelerator: accelerator.into(),
        accelerator_reason: reason,
        macs: command_line::macs(&config.vm.network, &uuid, hardware),
        uuid,
        started_with: Some(StartedWith::from(configuration)),
        devices: Vec::new(),
        lost: Vec::new(),
        phase: Phase::Starting,
    };
    Ok(Start { state, arguments, own_passt: (is_own && command_line::has_pod_network(&config.vm)).then_some(link) })
}

/// Starts the programs that QEMU connects to.
async fn start_helpers(
    options: &MachineOptions,
    config: &RunnerConfig,
    own_passt: Option<&PodLink>,
) -> Result<Helpers, Error> {
    let runtime = &options.runtime;
    let mut helpers = Helpers::default();
    if config.vm.use_tpm {
        let state = prepare::tpm_directory(Path::new(&config.data_dir));
        create_directory(&state)?;
        helpers.start(Helper::Tpm, &options.swtpm, &command::swtpm(&state, runtime), &runtime.tpm()).await?;
    }
    if let Some(link) = own_passt {
        let ports = Ports { last: options.pod_ports, kept: &command::own_ports(&config.vm) };
        helpers.start(Helper::PodNetwork, &options.passt, &ports.arguments(link, true), link.socket()).await?;
    }
    Ok(helpers)
}

/// The processes of a VM, and what the machine role writes about them.
struct StartedVm {
    qemu: Qemu,
    helpers: Helpers,
    state: MachineState,
}

impl StartedVm {
    /// Prepares the files, starts the helpers, and starts QEMU, in this order: QEMU does not wait for the helpers' sockets.
    /// `longest` is the longest time of a power-down in seconds if QEMU was started in this Pod before.
    async fn start(
        options: &MachineOptions,
        configuration: &Configuration,
        longest: Option<u64>,
    ) -> Result<Self, Error> {
        let Start { mut state, arguments, own_passt } = prepare_start(options, configuration, Purpose::Start).await?;
        if let Some(started) = &mut state.started_with {
            started.longest_powerdown = longest.or(started.longest_powerdown);
        }
        let helpers = start_helpers(options, &configuration.config, own_passt.as_ref()).await?;
        let start = random_uuid()?;
        let qemu = Qemu::start(&options.qemu, &arguments, &options.runtime)?;
        state.pid = qemu.pid();
        state.start = start;
        state.write(&options.runtime)?;
        info!(pid = state.pid, machine_type = state.machine_type, "QEMU started");
        Ok(Self { qemu, helpers, state })
    }

    /// Runs the VM until QEMU ends.
    async fn run(&mut self, options: &MachineOptions, term: watch::Receiver<bool>) -> Result<End, Error> {
        let mut monitor = match self.qemu.connect(&options.runtime).await? {
            Connection::Monitor(monitor) => monitor,
            Connection::Ended(end) => return Ok(end),
        };
        // A helper may fail after it has created its socket. QEMU would start nevertheless, without a network.
        if let Some(error) = self.helpers.try_ended() {
            self.qemu.kill().await?;
            return Err(error.into());
        }
        // The machine role plugs the CPUs and not the agent, because the guest may have to start without an agent.
        if let Some(started) = &self.state.started_with {
            plug_cpus(&mut monitor, &started.vm).await;
        }
        let control = Control::listen(&options.runtime, &options.config_dir).inspect_err(|error| {
            warn!(%error, "the guest can't be ended by the command vm-runner end, and its CDs can't be changed");
        });
        let control = control.ok();
        let started = self.state.started_with.as_ref();
        let devices = started.map(|started| BlockDevices::open(&started.vm)).unwrap_or_default();
        let sizes = devices.sizes();
        self.state.devices.clone_from(&sizes);
        // The agent may continue the guest from here on. The console is copied already, so none of the guest's output is lost.
        self.state.phase = Phase::Running;
        self.state.write(&options.runtime)?;
        let longest = self.state.started_with.as_ref().and_then(|started| started.longest_powerdown);
        let reactions = self.state.started_with.as_ref().map(|started| Reactions::of(&started.vm)).unwrap_or_default();
        let is_emulated = self.state.accelerator == "tcg";
        let spec = GuestSpec { reactions, is_emulated, powerdown_timeout: || powerdown_timeout(options, longest) };
        let monitor = Monitor::new(monitor, options.runtime.monitor());
        let Self { qemu, helpers, state } = self;
        let state = Mutex::new(state);
        let change = |edit: &dyn Fn(&mut MachineState)| {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            edit(&mut state);
            let written = state.write(&options.runtime).inspect_err(|error| {
                warn!(error = %ErrorChain(error), "cannot write what the agent must know");
            });
            written.is_ok()
        };
        let changed = |helper, works: bool| {
            change(&|state| {
                state.lost.retain(|lost| *lost != helper);
                if !works {
                    state.lost.push(helper);
                }
            });
        };
        let sized = |sizes: &Vec<BlockDevice>| change(&|state| state.devices.clone_from(sizes));
        tokio::select! {
            end = qemu.supervise(monitor, control, helpers, term, spec, changed) => Ok(end?),
            never = follow_sizes(devices, sizes, sized) => match never {},
        }
    }
}

/// Calls `changed` with the sizes of the devices whenever they are not those that are `known`. It returns whether they are now.
async fn follow_sizes(
    devices: BlockDevices,
    mut known: Vec<BlockDevice>,
    changed: impl Fn(&Vec<BlockDevice>) -> bool,
) -> Infallible {
    if devices.is_empty() {
        return std::future::pending().await;
    }
    loop {
        sleep(READ_AGAIN).await;
        let sizes = devices.sizes();
        if sizes != known && changed(&sizes) {
            known = sizes;
        }
    }
}

/// The powerdown timeout in the present configuration, which may have changed since QEMU's start, and since SIGTERM. It is not longer than the
/// Pod's grace period allows: after that the kubelet kills the runner, and QEMU could not flush its disks.
fn powerdown_timeout(options: &MachineOptions, longest: Option<u64>) -> Option<Duration> {
    let configured = config::read(&options.config_dir).ok()?.config.vm.powerdown_timeout;
    Some(Duration::from_secs(longest.map_or(configured, |longest| configured.min(longest))))
}

/// Whether the guest stays down after this end, in the present configuration.
fn stays_down(options: &MachineOptions, started_with: &Configuration, reason: EndReason) -> bool {
    let present = config::read(&options.config_dir);
    let config = &present.as_ref().unwrap_or(started_with).config;
    match reason {
        EndReason::GuestShutdown => config.guest_shutdown_stops,
        EndReason::StoppedAfterPanic => options.is_in_pod && Reactions::of(&config.vm).may_end(),
        EndReason::PoweredDown | EndReason::PoweredOff | EndReason::QemuFailed => false,
    }
}

/// Waits without QEMU until SIGTERM, or until the configuration says that the guest does not stay down. If the runner ended at
/// once, the kubelet would start the container again, and with it the guest.
async fn hold(
    options: &MachineOptions,
    started_with: &Configuration,
    reason: EndReason,
    mut term: watch::Receiver<bool>,
) -> Result<(), Error> {
    let runtime = &options.runtime;
    info!("the guest is down and stays down; waiting for the Pod's end");
    let mut follower = runtime.follow_with(&options.config_dir)?;
    while stays_down(options, started_with, reason) {
        tokio::select! {
            // An error means that the sender is dropped because the program ends.
            _ = term.wait_for(|is_terminated| *is_terminated) => break,
            changed = follower.changed() => changed.map_err(FileAccessError::with("watch", &options.config_dir))?,
        }
    }
    if let Some(mut state) = MachineState::read(runtime)
        && let Phase::Ended { held, .. } = &mut state.phase
    {
        // If somebody starts the runner by hand in the same directory, the guest must start.
        *held = false;
        state.write(runtime)?;
    }
    Ok(())
}

/// Returns QEMU's command line, beginning with the program. Changes nothing, so it can be called while the VM runs. Before the VM's first start
/// the UUID is another one each time, and without a trial of KVM it counts as working.
///
/// # Errors
/// As [`run`].
pub async fn render_command(options: &MachineOptions) -> Result<Vec<String>, Error> {
    let configuration = config::read(&options.config_dir)?;
    let Start { arguments, .. } = prepare_start(options, &configuration, Purpose::Look).await?;
    Ok([vec![options.qemu.clone()], arguments].concat())
}
