//! The program of the manager.

use std::{
    io::Write,
    net::{Ipv6Addr, SocketAddr},
    path::PathBuf,
    process::ExitCode,
    str::FromStr,
    thread,
};

use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use vm_operator::{
    config::Scope,
    manager::{self, Options, log, renderer, sandbox},
    node_devices,
    process::signals,
};

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Runs virtual machines on Kubernetes: turns VirtualMachine resources into Pods that run QEMU.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Manage the virtual machines of one or more namespaces until told to end (SIGTERM).
    ///
    /// The API server is the one that KUBECONFIG names or, in a cluster, the cluster's own.
    Run {
        /// The configuration file; none is no error.
        #[arg(long, short, env = "VM_OPERATOR_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// The namespaces to manage: one, several with commas, or `*` for all. Default: what the configuration says, then the
        /// one of the service account or kubeconfig.
        #[arg(long, short, env = "VM_OPERATOR_NAMESPACE", value_name = "NS", value_delimiter = ',')]
        namespace: Vec<String>,
        /// A folder of templates that lies over the built-in ones.
        #[arg(long, env = "VM_OPERATOR_TEMPLATES", value_name = "DIR")]
        templates: Option<PathBuf>,
        /// The address on which probes and metrics are answered, or `off`.
        #[arg(long, env = "VM_OPERATOR_LISTEN", value_name = "ADDRESS", default_value = "[::]:8081")]
        listen: Listen,
        /// Answer there also what the manager knows and did last: `/debug/vms` and `/debug/vms/NAMESPACE/NAME`. No spec, no
        /// values and no messages are shown.
        #[arg(
            long, env = "VM_OPERATOR_DEBUG_ENDPOINT", value_name = "BOOL", default_value_t = false, action = ArgAction::Set,
            num_args = 0..=1, default_missing_value = "true", require_equals = true
        )]
        debug_endpoint: bool,
        /// Work only while holding the lease `vm-operator`, so that a second manager can stand by.
        #[arg(long, env = "VM_OPERATOR_LEADER_ELECTION", value_name = "BOOL", default_value_t = true, action = ArgAction::Set)]
        leader_election: bool,
        /// The name under which it holds the lease; in a cluster, the Pod's. A process that is started again under its name
        /// need not wait for the lease of the one before. Default: a new one each time.
        #[arg(long, env = "VM_OPERATOR_IDENTITY", value_name = "NAME")]
        identity: Option<String>,
        /// The format of the log.
        #[arg(long, env = "VM_OPERATOR_LOG_FORMAT", default_value = "text")]
        log_format: LogFormat,
    },
    /// Give the Pods of VMs the devices of their node (a device plugin of the kubelet) until told to end (SIGTERM).
    ///
    /// It runs once on each node: deploy/node-devices.
    NodeDevices {
        /// The kubelet's folder for device plugins.
        #[arg(
            long,
            env = "NODE_DEVICES_PLUGINS",
            value_name = "DIR",
            default_value = "/var/lib/kubelet/device-plugins"
        )]
        plugins: PathBuf,
        /// The node's /dev.
        #[arg(long, env = "NODE_DEVICES_DEV", value_name = "DIR", default_value = "/dev")]
        dev: PathBuf,
        /// The folder in which `vm-runner try-kvm` leaves the result of its trial.
        #[arg(long, env = "NODE_DEVICES_REPORTS", value_name = "DIR", default_value = "/run/vm-operator")]
        reports: PathBuf,
        /// The kubelet's folder of seccomp profiles; the profile for passt is installed there.
        #[arg(long, env = "NODE_DEVICES_SECCOMP", value_name = "DIR")]
        seccomp: Option<PathBuf>,
        /// The address on which probes and metrics are answered, or `off`.
        #[arg(long, env = "NODE_DEVICES_LISTEN", value_name = "ADDRESS", default_value = "[::]:8082")]
        listen: Listen,
        /// The format of the log.
        #[arg(long, env = "VM_OPERATOR_LOG_FORMAT", default_value = "text")]
        log_format: LogFormat,
    },
    /// What `run` starts to check templates: reads a job from standard input.
    #[command(name = sandbox::COMMAND, hide = true)]
    CheckTemplates,
    /// What `run` starts to render templates that somebody wrote: reads orders from standard input.
    #[command(name = renderer::COMMAND, hide = true)]
    RenderTemplates,
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object for each line.
    Json,
}

impl From<LogFormat> for log::Format {
    fn from(format: LogFormat) -> Self {
        match format {
            LogFormat::Text => Self::Text,
            LogFormat::Json => Self::Json,
        }
    }
}

/// Where to listen.
#[derive(Clone)]
struct Listen(Option<SocketAddr>);

impl FromStr for Listen {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "off" {
            return Ok(Self(None));
        }
        // `:8081` stands for all addresses, as in other programs.
        let text = text
            .strip_prefix(':')
            .map_or_else(|| text.to_owned(), |port| format!("[{}]:{port}", Ipv6Addr::UNSPECIFIED));
        let address = text.parse().map_err(|_| "expected an address such as [::]:8081 or 127.0.0.1:8081, or off")?;
        Ok(Self(Some(address)))
    }
}

fn main() -> ExitCode {
    let served = match Arguments::parse().command {
        Command::Run {
            config,
            namespace,
            templates,
            listen,
            debug_endpoint,
            leader_election,
            identity,
            log_format,
        } => {
            let scope = (!namespace.is_empty()).then(|| Scope::of(namespace));
            let options =
                Options { config, scope, templates, listen: listen.0, debug_endpoint, leader_election, identity };
            return run(options, log_format);
        }
        Command::NodeDevices { plugins, dev, reports, seccomp, listen, log_format } => {
            let options = node_devices::Options { plugins, dev, reports, seccomp, listen: listen.0 };
            return give_devices(options, log_format);
        }
        Command::CheckTemplates => sandbox::serve(),
        Command::RenderTemplates => renderer::serve(),
    };
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "templates: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(options: Options, log_format: LogFormat) -> ExitCode {
    // With one thread a VM that takes long to render would hold up everything else, also the renewal of the lease.
    let threads = thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let log = runtime.block_on(async { log::start(log_format.into()) });
    // As a task, because it is woken by other tasks, and waking a task is cheaper than waking this thread.
    let result = runtime.block_on(async { tokio::spawn(manager::run(options)).await });
    let code = match result.map_err(anyhow::Error::from).flatten() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    };
    log.end();
    // What is still running, such as a DNS query, must not delay the end.
    runtime.shutdown_background();
    code
}

fn give_devices(options: node_devices::Options, log_format: LogFormat) -> ExitCode {
    // It waits most of the time.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    runtime.block_on(async {
        let log = log::start(log_format.into());
        let result = match signals::termination() {
            Ok(term) => node_devices::run(options, term).await.map_err(anyhow::Error::from),
            Err(error) => Err(error.into()),
        };
        let code = match result {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tracing::error!("{error:#}");
                ExitCode::FAILURE
            }
        };
        log.end();
        code
    })
}
