//! The program of the manager.

use std::{
    ffi::{OsStr, OsString},
    io::Write,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, ExitCode},
    thread,
};

use clap::{ArgAction, Parser, Subcommand, ValueEnum};
use vm_operator::{
    config::Scope,
    manager::{self, Options, check, renderer, sandbox, web_program::WebProgram},
    process::{listen::Listen, log},
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
        /// Also run the web interface, for a small cluster: the program vm-web, which must be in the same folder as this one. It has the manager's
        /// account; its options come from its environment (`vm-web --help`).
        #[arg(
            long, env = "VM_OPERATOR_WEB", value_name = "BOOL", default_value_t = false, action = ArgAction::Set,
            num_args = 0..=1, default_missing_value = "true", require_equals = true
        )]
        web: bool,
        /// The configuration file of the web interface, if it has another one than the manager: that has the hashes of passwords.
        #[arg(long, env = "VM_OPERATOR_WEB_CONFIG", value_name = "FILE")]
        web_config: Option<PathBuf>,
        /// The format of the log.
        #[arg(long, env = "VM_OPERATOR_LOG_FORMAT", default_value = "text")]
        log_format: log::Format,
    },
    /// Say whether an installation works: the manager is ready, and the API server takes a VM (a dry run).
    Check(check::Options),
    /// Give the Pods of VMs the devices of their node (a device plugin of the kubelet) until told to end (SIGTERM).
    ///
    /// This is the program vm-node-devices, which must be in the same folder as this one. Its options: `vm-node-devices --help`.
    #[command(disable_help_flag = true)]
    NodeDevices {
        /// The options of vm-node-devices.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        options: Vec<OsString>,
    },
    /// Show people their virtual machines in a browser until told to end (SIGTERM).
    ///
    /// This is the program vm-web, which must be in the same folder as this one. Its options: `vm-web --help`.
    #[command(disable_help_flag = true)]
    Web {
        /// The options of vm-web.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "OPTIONS")]
        options: Vec<OsString>,
    },
    /// What `run` starts to check templates: reads a job from standard input.
    #[command(name = sandbox::COMMAND, hide = true)]
    CheckTemplates,
    /// What `run` starts to render templates that somebody wrote: reads orders from standard input.
    #[command(name = renderer::COMMAND, hide = true)]
    RenderTemplates,
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
            web,
            web_config,
            log_format,
        } => {
            let web = web.then(|| WebProgram {
                file: beside("vm-web"),
                arguments: web_arguments(web_config.as_deref().or(config.as_deref()), &namespace, log_format),
            });
            let scope = (!namespace.is_empty()).then(|| Scope::of(namespace));
            let options =
                Options { config, scope, templates, listen: listen.0, debug_endpoint, leader_election, identity, web };
            return run(options, log_format);
        }
        Command::Check(options) => return check(&options),
        Command::NodeDevices { options } => return run_beside("vm-node-devices", &options),
        Command::Web { options } => return run_beside("vm-web", &options),
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

fn run(options: Options, log_format: log::Format) -> ExitCode {
    // With one thread a VM that takes long to render would hold up everything else, also the renewal of the lease.
    let threads = thread::available_parallelism().map_or(2, |cores| cores.get().max(2));
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "start the runtime: {error}");
            return ExitCode::FAILURE;
        }
    };
    let log = runtime.block_on(async { log::start(log_format) });
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

fn check(options: &check::Options) -> ExitCode {
    let checked = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(anyhow::Error::from);
    let checked = checked
        .and_then(|runtime| runtime.block_on(async { check::check(options, kube::Config::infer().await?).await }));
    match checked {
        Ok(checked) => {
            let _ = write!(std::io::stdout(), "{checked}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The file of a program in the folder of this one.
fn beside(program: &str) -> PathBuf {
    match std::env::current_exe() {
        Ok(own) => own.with_file_name(program),
        Err(_) => program.into(),
    }
}

/// What the web interface is told: what the manager was told.
fn web_arguments(config: Option<&Path>, namespaces: &[String], log_format: log::Format) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = Vec::new();
    let mut option = |name: &str, value: &OsStr| arguments.extend([name.into(), value.to_owned()]);
    if let Some(file) = config {
        option("--config", file.as_os_str());
    }
    if !namespaces.is_empty() {
        option("--namespace", namespaces.join(",").as_ref());
    }
    if let Some(format) = log_format.to_possible_value() {
        option("--log-format", format.get_name().as_ref());
    }
    arguments
}

/// The device plugin is a program of its own, because its gRPC would make the manager larger by a megabyte of memory, and so would the web
/// interface.
fn run_beside(program: &str, options: &[OsString]) -> ExitCode {
    let file = beside(program);
    // It returns only if the program can't be started.
    let error = process::Command::new(&file).args(options).exec();
    let _ = writeln!(std::io::stderr(), "start {}: {error}", file.display());
    ExitCode::FAILURE
}
