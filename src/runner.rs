//! The program `vm-runner`, which runs inside each Pod: it runs QEMU and reports the VM's status.
//!
//! ```text
//!  config.yaml ─▶ config ─▶ prepare ─▶ command ─▶ QEMU ◀─ monitor ─ machine (lifecycle decides)
//!                   │                              ▲ ◀─── monitor ─ agent (operations decides) ─▶ report ─▶ the VM's status
//!                   └── changes ───────────────────┘
//! ```
//!
//! The runner has two roles. [`machine`] starts QEMU as its child and needs no credential. [`agent`] follows the configuration and
//! talks to the API server. In a Pod they run in two containers (`vm-runner machine`, `vm-runner agent`), elsewhere in one process
//! (`vm-runner run`). They meet only in the runtime directory ([`runtime_dir`], [`state`]). If the agent is missing, the guest starts
//! nevertheless, see [`lifecycle::AGENT_TIMEOUT`].
//!
//! The runner needs no cluster. With a directory that contains a `config.yaml`, this runs a VM whose disk is a file and logs its
//! status:
//!
//! ```text
//! $ cat /tmp/vm/config.yaml
//! /Runner:
//!   namespace: default
//!   dataDir: /tmp/vm/data
//!   runtimeDir: /tmp/vm/run
//!   vm:
//!     name: apple
//!     drives:
//!     - {type: raw, resource: /tmp/vm/disk.img, size: 10737418240}
//! $ vm-runner run --config-dir /tmp/vm --status log
//! ```
//!
//! Every field of the file is described in [`crate::runner_config`].
//!
//! # Modules
//!
//! The modules read downwards: each imports only modules above it in this table, namely those in its row.
//!
//! | module | imports | what it does |
//! |---|---|---|
//! | `files` | | reads and writes single files, with errors that name the file |
//! | `cloud_init` | | the cloud-init disk |
//! | `config` | `cloud_init` `files` | reads the projected configuration |
//! | `runtime_dir` | `files` | the paths of sockets and files in the runtime directory |
//! | `state` | `cloud_init` `config` `files` `runtime_dir` | the files that the roles write for each other |
//! | `lines` | | connections that carry lines |
//! | `device` | | what QEMU calls the guest's devices |
//! | `go_on` | | what the guest does, and who may let it go on |
//! | `qmp` | `device` `go_on` `lines` | QEMU's monitor |
//! | `cd` | | what a CD drive may hold |
//! | `operation` | `cd` `config` `device` `go_on` `qmp` | what is done with a running QEMU, in which steps |
//! | `monitor` | `go_on` `operation` `qmp` | a connection to QEMU's monitor that is made again |
//! | `halt` | `qmp` | whether the guest is stopped, and when it is tried again |
//! | `devices` | `state` | the devices that do not work |
//! | `guest_agent` | `lines` | QEMU's guest agent |
//! | `login` | `lines` | the login agent |
//! | `logging` | | the log levels |
//! | `terminal` | | the user's terminal |
//! | `console` | `terminal` | the serial console |
//! | `stats` | `monitor` `qmp` | the figures of a running guest |
//! | `ctl` | `go_on` `monitor` `operation` `qmp` `stats` | what a person asks of a running guest |
//! | `accel` | `files` `runtime_dir` | chooses KVM or TCG |
//! | `node_trial` | `accel` `files` | makes the trial of KVM for a node |
//! | `clock_zone` | | the time of a time zone |
//! | `command` | `cd` `runtime_dir` | the command lines of QEMU, swtpm and passt |
//! | `programs` | `state` | starts programs, and explains their failures |
//! | `supervisor` | | starts the agent role again when it ends |
//! | `pod_network` | `command` `files` `programs` `supervisor` | passt in a container of its own |
//! | `prepare` | `cd` `clock_zone` `cloud_init` `command` `config` `files` `runtime_dir` | finds and creates the files that QEMU needs |
//! | `lifecycle` | `go_on` `halt` `operation` `panics` `qmp` `state` | decides when to continue, power down, and end QEMU |
//! | `changes` | `cd` `command` `config` `device` `go_on` `operation` `qmp` `state` | compares the configuration with the running VM |
//! | `control` | `cd` `changes` `config` `ctl` `lines` `runtime_dir` | the socket on which the machine role answers |
//! | `figures` | `control` `ctl` `runtime_dir` | prints the figures of a running guest, again and again |
//! | `operations` | `cd` `changes` `device` `devices` `go_on` `operation` `panics` `qmp` `state` | what the agent asks of QEMU, and when |
//! | `report` | `devices` `login` `qmp` `state` | derives the VM's status |
//! | `status_writer` | `report` | writes the VM's status |
//! | `viewers` | | decides who is let in to the consoles, and who controls the screen |
//! | `rfb` | | makes what viewers send by VNC harmless |
//! | `relay` | `rfb` `runtime_dir` `viewers` | the TLS port through which people reach the consoles |
//! | `hand_over` | | copies the disk out of a container disk's image |
//! | `from_file` | | the command line for a VM from a file |
//! | `stall` | `monitor` `qmp` | finds a QEMU that stands still for ever |
//! | `qemu` | `changes` `console` `control` `ctl` `go_on` `lifecycle` `monitor` `operation` `panics` `programs` `qmp` `runtime_dir` `stall` `state` | starts and supervises the QEMU process |
//! | `machine` | `accel` `command` `config` `control` `files` `monitor` `pod_network` `prepare` `programs` `qemu` `runtime_dir` `state` | the machine role |
//! | `session` | `cd` `control` `login` `operations` `qmp` | the agent's connections to one QEMU process |
//! | `agent` | `cd` `changes` `config` `control` `files` `go_on` `guest_agent` `logging` `login` `operation` `operations` `qmp` `relay` `report` `runtime_dir` `session` `state` `status_writer` | the agent role |
//!
//! `cloud_init` (but for its disk), `command`, `go_on`, `operation`, `halt`, `devices`, `lifecycle`, `changes`, `operations`, `report`, `viewers` and `rfb` are pure, and so is `LoginState` in `login`.

pub mod accel;
pub mod agent;
pub mod block_devices;
pub mod cd;
#[deny(clippy::disallowed_methods)]
pub mod changes;
pub mod clock_zone;
pub mod cloud_init;
pub mod command;
pub mod config;
pub mod console;
pub mod control;
pub mod ctl;
pub mod devices;
pub mod figures;
pub mod files;
pub mod from_file;
#[deny(clippy::disallowed_methods)]
pub mod go_on;
pub mod guest_agent;
pub mod halt;
pub mod hand_over;
pub mod lifecycle;
pub mod lines;
pub mod logging;
pub mod login;
pub mod machine;
pub mod monitor;
pub mod node_trial;
#[deny(clippy::disallowed_methods)]
pub mod operation;
#[deny(clippy::disallowed_methods)]
pub mod operations;
pub mod panics;
pub mod pod_network;
pub mod prepare;
pub mod programs;
pub mod qemu;
pub mod qmp;
pub mod relay;
pub mod report;
pub mod rfb;
pub mod runtime_dir;
pub mod session;
pub mod stall;
pub mod state;
pub mod stats;
pub mod status_writer;
pub mod supervisor;
pub mod terminal;
pub mod viewers;

use std::{
    ffi::OsString,
    fs, io,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use futures::future::OptionFuture;
use kube::Client;
use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

use crate::{
    kvm::{self, TrialResult},
    process::{ErrorChain, name_client, signals},
    relay::PORT,
    runner_config::{RunnerConfig, paths},
};
use agent::{Agent, AgentOptions};
use ctl::{Reply, Task};
use figures::Trouble;
use from_file::FileArguments;
use hand_over::HandOverArguments;
use logging::Logging;
use machine::MachineOptions;
use pod_network::Ports;
use relay::{RelayOptions, RelayState};
use report::Target;
use runtime_dir::RuntimeDir;
use status_writer::{StatusWriter, VmResource};

/// The time for writing the last report. The Pod's grace period is the powerdown timeout and 5 s.
const LAST_REPORT_TIMEOUT: Duration = Duration::from_secs(4);

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "vm-runner",
    version,
    about = "Runs one virtual machine with QEMU",
    args_conflicts_with_subcommands = true
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<RunnerCommand>,
    #[command(flatten)]
    run: RunArguments,
    /// The format of the log.
    #[arg(long, global = true, value_enum, default_value = "text", env = "VM_RUNNER_LOG_FORMAT")]
    pub log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
#[allow(clippy::large_enum_variant, reason = "a program has one value of it")]
enum RunnerCommand {
    /// Run the virtual machine (the default): in a Pod, or with FILE on this computer without a cluster.
    #[command(after_help = from_file::HELP)]
    Run(RunCommand),
    /// Run only QEMU and its helpers. It needs no access to the cluster.
    Machine(RunArguments),
    /// Apply changes to a VM that `vm-runner machine` runs, and report its status. The agent is started again whenever it ends.
    Agent(RunArguments),
    /// Check the configuration, and print `NAME: ok`.
    Validate(RunArguments),
    /// Print QEMU's command line for the present configuration, one argument per line. It changes nothing, also while the VM runs.
    RenderCommand(RunArguments),
    /// End the guest at once, if it is being powered down. Run it in the VM's container: kubectl exec POD -c vm-runner -- vm-runner end
    End(RunArguments),
    /// Do something with the guest that runs here. Run it in the VM's container: kubectl exec POD -c vm-runner -- vm-runner ctl ...
    Ctl {
        #[command(flatten)]
        run: RunArguments,
        #[command(subcommand)]
        task: Task,
    },
    /// Join the guest's serial console: its last output, then what it writes; what you type goes to the guest. Ctrl-] leaves. Run it in the VM's
    /// container: kubectl exec -it POD -c vm-runner -- vm-runner console
    Console(RunArguments),
    /// Print what QEMU's guest agent says about the guest, as JSON. Run it in the VM's container: kubectl exec POD -c vm-runner -- vm-runner guest
    Guest(RunArguments),
    /// Become another program, which ends with the runner. The runner starts QEMU so.
    #[command(name = programs::EXEC, hide = true)]
    Exec {
        /// The process ID of the runner.
        parent: u32,
        /// The program.
        program: PathBuf,
        /// Its arguments.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
    /// Connect a network of type pod to the Pod's network, for the runner in another container of the Pod.
    Passt(PasstArguments),
    /// Try whether KVM works on this node, leave the result in a folder, and wait for the end (SIGTERM); after a failure, try again.
    TryKvm(TrialArguments),
    /// Copy the disk out of a container disk's image. The template set import-disk runs it in a container of that image.
    #[command(hide = true)]
    HandOver(HandOverArguments),
    /// Print the version.
    Version,
}

#[derive(Args, Clone, Debug)]
struct RunCommand {
    #[command(flatten)]
    from_file: FileArguments,
    #[command(flatten)]
    run: RunArguments,
}

#[derive(Args, Clone, Debug)]
struct PasstArguments {
    /// The folder for the socket, which both containers mount.
    #[arg(long, value_name = "DIR", default_value = paths::PASST_DIR, env = "VM_RUNNER_PASST_DIR")]
    folder: PathBuf,
    /// A port of the Pod that is not forwarded to the guest, such as that of the display. May be repeated.
    #[arg(long = "keep-port", value_name = "PORT")]
    kept: Vec<u16>,
    /// The program.
    #[arg(long, default_value = "passt", env = "VM_RUNNER_PASST")]
    passt: String,
    /// Forward the Pod's ports from 1 to this one to the guest.
    #[arg(long, default_value_t = 9999, env = "VM_RUNNER_POD_PORTS", value_parser = clap::value_parser!(u16).range(1..))]
    pod_ports: u16,
}

#[derive(Args, Clone, Debug)]
struct TrialArguments {
    /// The folder for the result, which `vm-operator node-devices` reads.
    #[arg(long, value_name = "DIR", default_value = "/run/vm-operator")]
    reports: PathBuf,
    /// The program QEMU.
    #[arg(long, default_value = "qemu-system-x86_64", env = "VM_RUNNER_QEMU")]
    qemu: String,
}

#[derive(Args, Clone, Debug)]
struct RunArguments {
    /// The directory of config.yaml.
    #[arg(long, default_value = paths::CONFIG_DIR, env = "VM_RUNNER_CONFIG_DIR")]
    config_dir: PathBuf,
    /// The directory of sockets and state files, which both roles use [default: runtimeDir in the configuration].
    #[arg(long, env = "VM_RUNNER_RUNTIME_DIR")]
    runtime_dir: Option<PathBuf>,
    /// Run QEMU (machine), apply changes and report the status (agent), or both (all).
    #[arg(long, value_enum, default_value = "all", env = "VM_RUNNER_ROLE")]
    role: Role,
    /// Where to write the VM's status.
    #[arg(long, value_enum, default_value = "auto", env = "VM_RUNNER_STATUS")]
    status: StatusTarget,
    /// The UID of the Pod that the runner runs in, for the status.
    #[arg(long, env = "POD_UID")]
    pod_uid: Option<String>,
    /// The directory of custom QEMU templates.
    #[arg(long, value_name = "DIR", default_value = prepare::TEMPLATES, env = "VM_RUNNER_TEMPLATES")]
    qemu_templates: PathBuf,
    /// The program QEMU.
    #[arg(long, default_value = "qemu-system-x86_64", env = "VM_RUNNER_QEMU")]
    qemu: String,
    /// The TPM emulator.
    #[arg(long, default_value = "swtpm", env = "VM_RUNNER_SWTPM")]
    swtpm: String,
    /// The program that connects a network of type pod.
    #[arg(long, default_value = "passt", env = "VM_RUNNER_PASST")]
    passt: String,
    /// The folder of the container that runs passt. If it does not exist, the runner starts passt itself.
    #[arg(long, value_name = "DIR", default_value = paths::PASST_DIR, env = "VM_RUNNER_PASST_DIR")]
    passt_folder: PathBuf,
    /// With a network of type pod: forward the Pod's ports from 1 to this one to the guest.
    #[arg(long, default_value_t = 9999, env = "VM_RUNNER_POD_PORTS", value_parser = clap::value_parser!(u16).range(1..))]
    pod_ports: u16,
    /// The folder with the certificate and the token of the relay, through which people reach the guest's consoles. If it does not exist, there is no
    /// relay.
    #[arg(long, value_name = "DIR", default_value = paths::RELAY_DIR, env = "VM_RUNNER_RELAY_DIR")]
    relay_dir: PathBuf,
    /// The relay's port. If it is taken, the system chooses another one, which the VM's status.relayPort has.
    #[arg(long, value_name = "PORT", default_value_t = PORT, env = "VM_RUNNER_RELAY_PORT")]
    relay_port: u16,
    /// Do not start a VM with a display that has no password.
    #[arg(long, env = "VM_RUNNER_REQUIRE_PASSWORD")]
    require_password: bool,
    /// The result of the node's trial of KVM, as the device plugin hands it to the container.
    #[arg(long, env = kvm::VARIABLE, value_parser = TrialResult::parse)]
    kvm_trial: Option<TrialResult>,
    /// The file for the error message if the VM fails. It is written only if it exists.
    #[arg(long, default_value = "/dev/termination-log", env = "VM_RUNNER_TERMINATION_LOG")]
    termination_log: PathBuf,
}

/// The role of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    All,
    Machine,
    Agent,
}

/// Where to write the VM's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StatusTarget {
    /// To the API server of the cluster that the runner runs in. Outside a cluster: to the log.
    Auto,
    /// To the API server of the kubeconfig.
    Kubeconfig,
    /// To the log only.
    Log,
}

/// The format of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// For programs.
    Json,
}

/// Why the runner failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] files::FileAccessError),
    /// The trial of KVM can't be made.
    #[error(transparent)]
    Trial(#[from] accel::Error),
    /// The machine role has failed.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// The agent role has failed.
    #[error(transparent)]
    Agent(#[from] agent::Error),
    /// The standard output or signals cannot be used.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
    /// passt cannot be run.
    #[error(transparent)]
    Passt(#[from] pod_network::Error),
    /// There is no disk to hand over.
    #[error(transparent)]
    HandOver(#[from] hand_over::Error),
    /// No runner could be asked to end the guest.
    #[error("cannot ask the runner to end the guest: no VM runs here")]
    End(#[source] io::Error),
    /// No runner could be asked to do something with the guest.
    #[error("cannot ask the runner: no VM runs here")]
    Ctl(#[source] io::Error),
    /// The console could not be joined.
    #[error("cannot join the guest's console")]
    Console(#[source] io::Error),
    /// QEMU's guest agent does not answer.
    #[error("QEMU's guest agent in the guest does not answer")]
    GuestAgent(#[source] io::Error),
    /// QEMU does not do what was asked.
    #[error("{0}")]
    Refused(String),
    /// The guest is not being powered down.
    #[error(
        "the guest is not being powered down: first stop the VM or delete its Pod; otherwise its node would start the guest again"
    )]
    NotStopping,
    /// This program was built without what runs a VM from a file.
    #[error("this vm-runner can't run {}: it was built for Pods, without the feature `local`", .0.display())]
    OnlyInPods(PathBuf),
    /// The process could not become another program.
    #[error("cannot start {}", program.display())]
    Exec {
        /// The program.
        program: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The kubeconfig or the Pod's service account cannot be used.
    #[error("cannot use the kubeconfig")]
    Kubeconfig(#[source] kube::Error),
}

/// Carries out the command.
///
/// # Errors
/// If the command fails. The command `run` also writes the message to the termination log.
pub async fn run(arguments: Arguments, logging: Logging) -> Result<(), Error> {
    let print = |text: &str| {
        io::Write::write_all(&mut io::stdout(), text.as_bytes())
            .map_err(|source| Error::System("write to the standard output", source))
    };
    let command = arguments
        .command
        .unwrap_or(RunnerCommand::Run(RunCommand { from_file: FileArguments::default(), run: arguments.run }));
    match command {
        RunnerCommand::Exec { parent, program, arguments } => {
            let source = programs::become_program(parent, &program, &arguments);
            Err(Error::Exec { program, source })
        }
        RunnerCommand::HandOver(arguments) => {
            print(&format!("{}\n", hand_over::hand_over(&arguments, termination()?).await?))
        }
        RunnerCommand::Version => print(concat!("vm-runner ", env!("CARGO_PKG_VERSION"), "\n")),
        RunnerCommand::Validate(arguments) => {
            let configuration = config::read(&arguments.config_dir)?;
            print(&format!("{}: ok\n", configuration.config.vm.name))
        }
        RunnerCommand::RenderCommand(arguments) => {
            let configuration = config::read(&arguments.config_dir)?;
            let command =
                machine::render_command(&machine_options(&arguments, &configuration, RuntimeDir::at)?).await?;
            print(&format!("{}\n", command.join("\n")))
        }
        RunnerCommand::End(arguments) => {
            let runtime = running(&arguments)?;
            if !control::end(&runtime).await.map_err(Error::End)? {
                return Err(Error::NotStopping);
            }
            print("the guest is ended without waiting for it\n")
        }
        RunnerCommand::Ctl { run, task: Task::Stats { follow } } => {
            let write = |line: &str| io::Write::write_all(&mut io::stdout(), line.as_bytes());
            figures::print(&running(&run)?, follow, termination()?, write).await.map_err(|trouble| match trouble {
                Trouble::NoRunner(source) => Error::Ctl(source),
                Trouble::Refused(refusal) => Error::Refused(refusal),
                Trouble::Output(source) => Error::System("write to the standard output", source),
            })
        }
        RunnerCommand::Ctl { run, task } => {
            let runtime = running(&run)?;
            match control::carry_out(&runtime, task.clone()).await.map_err(Error::Ctl)? {
                Reply::Done => Ok(()),
                Reply::Stats(_) => Ok(()),
                Reply::Status(status) => print(&format!("{status}\n")),
                Reply::Refused(refusal) => Err(Error::Refused(refusal)),
                Reply::Picture(picture) => {
                    let Task::Screenshot { file } = &task else { return Ok(()) };
                    ctl::deliver(&picture, file).map_err(|source| Error::System("write the picture", source))
                }
            }
        }
        RunnerCommand::Passt(PasstArguments { folder, kept, passt, pod_ports }) => {
            let term = termination()?;
            let ports = Ports { last: pod_ports, kept: &kept };
            Ok(pod_network::serve(&passt, &folder, ports, term).await?)
        }
        RunnerCommand::Console(arguments) => {
            let runtime = running(&arguments)?;
            console::join(&runtime.console()).await.map_err(Error::Console)
        }
        RunnerCommand::Guest(arguments) => {
            let socket = running(&arguments)?.guest_agent();
            let details = guest_agent::details(&socket).await.map_err(Error::GuestAgent)?;
            print(&format!("{details}\n"))
        }
        RunnerCommand::TryKvm(TrialArguments { reports, qemu }) => {
            let term = termination()?;
            Ok(node_trial::run(&reports, &qemu, term).await?)
        }
        RunnerCommand::Machine(arguments) => {
            run_command(RunArguments { role: Role::Machine, ..arguments }, logging).await
        }
        RunnerCommand::Agent(_) => supervise_agent().await,
        RunnerCommand::Run(RunCommand { from_file: FileArguments { file: Some(file), .. }, .. }) => {
            Err(Error::OnlyInPods(file))
        }
        RunnerCommand::Run(RunCommand { run, .. }) => run_command(run, logging).await,
    }
}

async fn run_command(arguments: RunArguments, logging: Logging) -> Result<(), Error> {
    let outcome = run_roles(&arguments, logging).await;
    if let Err(error) = &outcome {
        write_termination_message(&arguments.termination_log, &ErrorChain(error).to_string());
    }
    outcome
}

/// Becomes true at SIGTERM and the like.
fn termination() -> Result<watch::Receiver<bool>, Error> {
    signals::termination().map_err(|source| Error::System("wait for signals", source))
}

/// The runtime directory of the VM that runs here.
fn running(arguments: &RunArguments) -> Result<RuntimeDir, Error> {
    let configuration = config::read(&arguments.config_dir)?;
    Ok(machine_options(arguments, &configuration, RuntimeDir::at)?.runtime)
}

/// Starts this program as the agent role, with the same options, whenever it ends.
async fn supervise_agent() -> Result<(), Error> {
    let term = termination()?;
    let program = std::env::current_exe().map_err(|source| Error::System("find the program itself", source))?;
    let mut arguments: Vec<OsString> =
        std::env::args_os().skip(1).map(|word| if word == "agent" { "run".into() } else { word }).collect();
    arguments.push("--role=agent".into());
    supervisor::supervise(&program.into(), &arguments, term)
        .await
        .map_err(|source| Error::System("start the agent", source))
}

/// The programs that run a VM, and the folder of QEMU templates.
#[derive(Clone, Debug)]
pub struct Programs {
    /// The program QEMU.
    pub qemu: String,
    /// The TPM emulator.
    pub swtpm: String,
    /// The directory of custom QEMU templates.
    pub templates: PathBuf,
}

impl Arguments {
    /// What `vm-runner run FILE` says, and the programs for it. `None`: the command is another one.
    pub fn from_file(&self) -> Option<(FileArguments, Programs)> {
        let Some(RunnerCommand::Run(RunCommand { from_file, run })) = &self.command else { return None };
        let RunArguments { qemu, swtpm, qemu_templates, .. } = run;
        let programs = Programs { qemu: qemu.clone(), swtpm: swtpm.clone(), templates: qemu_templates.clone() };
        from_file.file.is_some().then(|| (from_file.clone(), programs))
    }
}

/// Writes a message for `kubectl describe pod`. The kubelet creates the file, and shows at most 4096 bytes of it.
fn write_termination_message(path: &Path, message: &str) {
    if path.exists()
        && let Err(error) = fs::write(path, message)
    {
        warn!(%error, path = %path.display(), "cannot write the termination message");
    }
}

fn machine_options(
    arguments: &RunArguments,
    configuration: &config::Configuration,
    runtime_dir: fn(&Path) -> Result<RuntimeDir, files::FileAccessError>,
) -> Result<MachineOptions, Error> {
    let runtime = arguments.runtime_dir.as_deref().unwrap_or(Path::new(&configuration.config.runtime_dir));
    Ok(MachineOptions {
        config_dir: arguments.config_dir.clone(),
        templates: arguments.qemu_templates.clone(),
        runtime: runtime_dir(runtime)?,
        qemu: arguments.qemu.clone(),
        swtpm: arguments.swtpm.clone(),
        passt: arguments.passt.clone(),
        passt_folder: arguments.passt_folder.clone(),
        pod_ports: arguments.pod_ports,
        require_password: arguments.require_password,
        is_in_pod: true,
        kvm_trial: arguments.kvm_trial.clone(),
    })
}

async fn run_roles(arguments: &RunArguments, mut logging: Logging) -> Result<(), Error> {
    logging.read(&arguments.config_dir);
    let configuration = config::read(&arguments.config_dir)?;
    let options = machine_options(arguments, &configuration, RuntimeDir::open)?;
    let vm = format!("{}/{}", configuration.config.namespace, configuration.config.vm.name);
    info!(vm, role = ?arguments.role, "vm-runner {}", env!("CARGO_PKG_VERSION"));
    let term = termination()?;
    if arguments.role == Role::Machine {
        return Ok(machine::run(&options, term).await?);
    }

    let client = client(arguments.status).await?;
    let relay = RelayOptions {
        folder: arguments.relay_dir.clone(),
        port: arguments.relay_port,
        runtime: options.runtime.clone(),
    };
    let resource = resource(client, &configuration.config, arguments.pod_uid.clone());
    run_with_agent(Parts { options, logging, resource, relay: Some(relay) }, arguments.role, term).await
}

/// Runs a VM with both roles and without an API server: the status is only logged. `term` becomes true when the VM must be stopped.
///
/// # Errors
/// If the configuration can't be used, or the VM can't be started or has not ended well.
pub async fn run_without_cluster(
    options: MachineOptions,
    mut logging: Logging,
    term: watch::Receiver<bool>,
) -> Result<(), Error> {
    logging.read(&options.config_dir);
    let configuration = config::read(&options.config_dir)?;
    let resource = resource(None, &configuration.config, None);
    run_with_agent(Parts { options, logging, resource, relay: None }, Role::All, term).await
}

fn resource(client: Option<Client>, config: &RunnerConfig, pod_uid: Option<String>) -> VmResource {
    VmResource::new(client, &config.namespace, Target { name: config.vm.name.clone(), pod_uid })
}

/// What the roles are made of.
struct Parts {
    options: MachineOptions,
    logging: Logging,
    resource: VmResource,
    relay: Option<RelayOptions>,
}

async fn run_with_agent(parts: Parts, role: Role, term: watch::Receiver<bool>) -> Result<(), Error> {
    let Parts { options, logging, resource, relay } = parts;
    let (reports, receiver) = watch::channel(None);
    let writing = tokio::spawn(StatusWriter::new(resource.clone()).follow(receiver));
    let (state, relayed) = watch::channel(RelayState::default());
    let (relay_ends, ends) = watch::channel(false);
    // Without it, people at least have the VM.
    let relay = relay.map(|relay| tokio::spawn(relay::serve(relay, state, ends)));
    let agent_options = AgentOptions {
        config_dir: options.config_dir.clone(),
        runtime: options.runtime.clone(),
        logging,
        resource,
        relay: relayed,
    };
    let mut agent = Agent::new(agent_options, reports)?;
    let outcome = match role {
        Role::Agent => agent.run(term).await.map_err(Error::from),
        Role::Machine | Role::All => run_both_roles(&options, &mut agent, term).await,
    };
    agent.report_end();
    relay_ends.send_replace(true);
    let (written, _) =
        tokio::join!(timeout(LAST_REPORT_TIMEOUT, writing), timeout(LAST_REPORT_TIMEOUT, OptionFuture::from(relay)),);
    if written.is_err() {
        warn!("the last status could not be written in time");
    }
    outcome
}

/// Runs both roles until the machine role ends. The guest continues without the agent if the agent fails.
async fn run_both_roles(options: &MachineOptions, agent: &mut Agent, term: watch::Receiver<bool>) -> Result<(), Error> {
    let mut machine = pin!(machine::run(options, term.clone()));
    tokio::select! {
        outcome = &mut machine => outcome.map_err(Error::from),
        outcome = agent.run(term) => {
            if let Err(error) = outcome {
                warn!(error = %ErrorChain(&error), "the agent has failed");
            }
            machine.await.map_err(Error::from)
        }
    }
}

fn named_client(mut config: kube::Config) -> Result<Option<Client>, Error> {
    name_client(&mut config, "vm-runner");
    Client::try_from(config).map(Some).map_err(Error::Kubeconfig)
}

/// The client of the API server that gets the status. `None`: the status is only logged.
async fn client(target: StatusTarget) -> Result<Option<Client>, Error> {
    match target {
        StatusTarget::Log => Ok(None),
        StatusTarget::Kubeconfig => {
            let config = kube::Config::infer().await.map_err(kube::Error::InferConfig).map_err(Error::Kubeconfig)?;
            named_client(config)
        }
        StatusTarget::Auto => match kube::Config::incluster() {
            Ok(config) => named_client(config),
            Err(error) => {
                info!(reason = %error, "the runner is not in a cluster: the status is only logged");
                Ok(None)
            }
        },
    }
}
