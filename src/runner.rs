//! The program inside each Pod: drives QEMU and reports the guest's state.
//!
//! ```text
//!  config.yaml ─▶ config ─▶ prepare ─▶ command ─▶ QEMU ◀─ monitor ─ machine (control decides)
//!                   │                              ▲ ◀─── monitor ─ agent (wanted decides) ─▶ report ─▶ the VM's status
//!                   └── changes ───────────────────┘
//! ```
//!
//! Two roles, which meet only in the runtime directory ([`files`]): [`machine`] has QEMU as its child and needs no
//! credential; [`agent`] follows the configuration and speaks with the API server. They run in one process, or in two
//! containers of one Pod. A guest whose agent is missing starts nevertheless, see [`control::AGENT_PATIENCE`].
//!
//! Pure: [`cloud_init`], [`command`], [`control`], [`wanted`], and the derivations in [`login`] and [`report`].

pub mod accel;
pub mod agent;
pub mod cloud_init;
pub mod command;
pub mod config;
pub mod console;
pub mod control;
pub mod files;
pub mod guest_agent;
pub mod lines;
pub mod logging;
pub mod login;
pub mod machine;
pub mod prepare;
pub mod qmp;
pub mod report;
pub mod wanted;

use std::{
    fs, io,
    path::{Path, PathBuf},
    pin::pin,
    time::Duration,
};

use clap::{Args, Parser, Subcommand, ValueEnum};
use kube::Client;
use tokio::{sync::watch, time::timeout};
use tracing::{info, warn};

use crate::{
    process::{ErrorChain, signals},
    runner_config::paths,
};
use agent::Agent;
use files::RuntimeDir;
use logging::Logging;
use machine::Places;
use report::{Reporter, Resource};

/// How long the last report may take. The Pod's grace period is the powerdown timeout and 5 s.
const LAST_REPORT: Duration = Duration::from_secs(4);

/// What was typed.
#[derive(Debug, Parser)]
#[command(
    name = "vm-runner",
    version,
    about = "Runs one virtual machine with QEMU",
    args_conflicts_with_subcommands = true
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Option<Action>,
    #[command(flatten)]
    run: RunArguments,
    /// How the log looks.
    #[arg(long, global = true, value_enum, default_value = "text", env = "VM_RUNNER_LOG_FORMAT")]
    pub log_format: LogFormat,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Run the virtual machine (the default).
    Run(RunArguments),
    /// Check the configuration.
    Validate(RunArguments),
    /// Print QEMU's command line, one argument per line. Prepares all that QEMU needs, but does not start it.
    RenderCommand(RunArguments),
    /// Print the version.
    Version,
}

#[derive(Args, Clone, Debug)]
struct RunArguments {
    /// The directory of config.yaml.
    #[arg(long, default_value = paths::CONFIG_DIR, env = "VM_RUNNER_CONFIG_DIR")]
    config_dir: PathBuf,
    /// The directory where the roles meet [default: runtimeDir of the configuration].
    #[arg(long, env = "VM_RUNNER_RUNTIME_DIR")]
    runtime_dir: Option<PathBuf>,
    /// What to do: keep the machine, be its agent, or both.
    #[arg(long, value_enum, default_value = "all", env = "VM_RUNNER_ROLE")]
    role: Role,
    /// Where the VM's status goes.
    #[arg(long, value_enum, default_value = "auto", env = "VM_RUNNER_STATUS")]
    status: StatusTarget,
    /// The UID of the Pod that this runs in, to say so in the status.
    #[arg(long, env = "POD_UID")]
    pod_uid: Option<String>,
    /// The directory of further QEMU templates.
    #[arg(long, default_value = prepare::TEMPLATES, env = "VM_RUNNER_TEMPLATES")]
    templates: PathBuf,
    /// The program QEMU.
    #[arg(long, default_value = "qemu-system-x86_64", env = "VM_RUNNER_QEMU")]
    qemu: String,
    /// The TPM emulator.
    #[arg(long, default_value = "swtpm", env = "VM_RUNNER_SWTPM")]
    swtpm: String,
    /// The program that connects a network of type pod.
    #[arg(long, default_value = "passt", env = "VM_RUNNER_PASST")]
    passt: String,
    /// With a network of type pod: the Pod's ports from 1 to this one are the guest's.
    #[arg(long, default_value_t = 9999, env = "VM_RUNNER_POD_PORTS", value_parser = clap::value_parser!(u16).range(1..))]
    pod_ports: u16,
    /// Do not start while the display has no password: it would be open.
    #[arg(long, env = "VM_RUNNER_REQUIRE_PASSWORD")]
    require_password: bool,
    /// Where to write why the machine failed, if the file exists.
    #[arg(long, default_value = "/dev/termination-log", env = "VM_RUNNER_TERMINATION_LOG")]
    termination_log: PathBuf,
}

/// Which of the roles to play.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Role {
    All,
    Machine,
    Agent,
}

/// Where the VM's status goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StatusTarget {
    /// To the API server of the cluster that the runner runs in; outside one, to the log.
    Auto,
    /// To the API server of the kubeconfig.
    Kubeconfig,
    /// To the log only.
    Log,
}

/// How the log looks.
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
    /// A file is not readable or writable.
    #[error(transparent)]
    File(#[from] files::FileError),
    /// The machine failed.
    #[error(transparent)]
    Machine(#[from] machine::Error),
    /// The agent failed.
    #[error(transparent)]
    Agent(#[from] agent::Error),
    /// Signals or the standard output are not usable.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
    /// The kubeconfig is not usable.
    #[error("cannot use the kubeconfig")]
    Kubeconfig(#[source] kube::Error),
}

/// Does what was asked for.
///
/// # Errors
/// If the machine fails; the message is in the termination log too.
pub async fn run(arguments: Arguments, logging: Logging) -> Result<(), Error> {
    let print = |text: &str| {
        io::Write::write_all(&mut io::stdout(), text.as_bytes())
            .map_err(|source| Error::System("write to the standard output", source))
    };
    match arguments.command.unwrap_or(Action::Run(arguments.run)) {
        Action::Version => print(concat!("vm-runner ", env!("CARGO_PKG_VERSION"), "\n")),
        Action::Validate(arguments) => {
            let configuration = config::read(&arguments.config_dir)?;
            print(&format!("{}: ok\n", configuration.config.vm.name))
        }
        Action::RenderCommand(arguments) => {
            let (places, _) = open(&arguments)?;
            let command = machine::render_command(&places).await?;
            print(&format!("{}\n", command.join("\n")))
        }
        Action::Run(arguments) => {
            let outcome = run_roles(&arguments, logging).await;
            if let Err(error) = &outcome {
                leave_message(&arguments.termination_log, &ErrorChain(error).to_string());
            }
            outcome
        }
    }
}

/// For `kubectl describe pod`: the kubelet shows at most 4096 bytes of the file, which it makes.
fn leave_message(path: &Path, message: &str) {
    if path.exists()
        && let Err(error) = fs::write(path, message)
    {
        warn!(%error, path = %path.display(), "cannot write the termination message");
    }
}

fn open(arguments: &RunArguments) -> Result<(Places, config::Configuration), Error> {
    let configuration = config::read(&arguments.config_dir)?;
    let runtime = arguments.runtime_dir.as_deref().unwrap_or(Path::new(&configuration.config.runtime_dir));
    let places = Places {
        config_dir: arguments.config_dir.clone(),
        templates: arguments.templates.clone(),
        runtime: RuntimeDir::open(runtime)?,
        qemu: arguments.qemu.clone(),
        swtpm: arguments.swtpm.clone(),
        passt: arguments.passt.clone(),
        pod_ports: arguments.pod_ports,
        require_password: arguments.require_password,
    };
    Ok((places, configuration))
}

async fn run_roles(arguments: &RunArguments, mut logging: Logging) -> Result<(), Error> {
    logging.read(&arguments.config_dir);
    let (places, configuration) = open(arguments)?;
    let config = &configuration.config;
    info!(vm = config.vm.name, namespace = config.namespace, role = ?arguments.role, "vm-runner {}", env!("CARGO_PKG_VERSION"));
    let term = signals::termination().map_err(|source| Error::System("wait for signals", source))?;
    if arguments.role == Role::Machine {
        return Ok(machine::run(&places, term).await?);
    }

    let client = client(arguments.status).await?;
    let resource = Resource::new(client, &config.namespace, &config.vm.name, arguments.pod_uid.clone());
    let (reports, receiver) = watch::channel(None);
    let reporting = tokio::spawn(Reporter::new(resource.clone()).follow(receiver));
    let mut agent =
        Agent::new(places.config_dir.clone(), places.runtime.clone(), configuration, logging, resource, reports)?;
    let outcome = if arguments.role == Role::All {
        let mut machine = pin!(machine::run(&places, term.clone()));
        tokio::select! {
            outcome = &mut machine => outcome.map_err(Error::from),
            outcome = agent.run(term) => {
                if let Err(error) = outcome {
                    // The guest does not need it.
                    warn!(error = %ErrorChain(&error), "the agent has ended");
                }
                machine.await.map_err(Error::from)
            }
        }
    } else {
        agent.run(term).await.map_err(Error::from)
    };
    agent.last_look();
    if timeout(LAST_REPORT, reporting).await.is_err() {
        warn!("the last status could not be written in time");
    }
    outcome
}

async fn client(target: StatusTarget) -> Result<Option<Client>, Error> {
    match target {
        StatusTarget::Log => Ok(None),
        StatusTarget::Kubeconfig => Client::try_default().await.map(Some).map_err(Error::Kubeconfig),
        StatusTarget::Auto => match kube::Config::incluster() {
            Ok(config) => Client::try_from(config).map(Some).map_err(Error::Kubeconfig),
            Err(error) => {
                info!(reason = %error, "no API server: the status is only logged");
                Ok(None)
            }
        },
    }
}
