//! The manager.

use std::{io::IsTerminal, path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand, ValueEnum};
use vm_operator::manager::{self, Options};

/// Runs virtual machines on Kubernetes: turns VirtualMachine resources into Pods that run QEMU.
#[derive(Parser)]
#[command(version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Manage the virtual machines of a namespace until told to end (SIGTERM).
    ///
    /// The API server is the one that KUBECONFIG names or, in a cluster, the cluster's own.
    Run {
        /// The configuration file; none is no error.
        #[arg(long, short, env = "VM_OPERATOR_CONFIG", value_name = "FILE")]
        config: Option<PathBuf>,
        /// The namespace to manage. Default: the one in the configuration, then the one of the service account or kubeconfig.
        #[arg(long, short, env = "VM_OPERATOR_NAMESPACE", value_name = "NS")]
        namespace: Option<String>,
        /// A folder of templates that lies over the built-in ones.
        #[arg(long, env = "VM_OPERATOR_TEMPLATES", value_name = "DIR")]
        templates: Option<PathBuf>,
        /// How the log looks.
        #[arg(long, env = "VM_OPERATOR_LOG_FORMAT", default_value = "text")]
        log_format: LogFormat,
    },
}

#[derive(Clone, Copy, ValueEnum)]
enum LogFormat {
    /// Lines for people.
    Text,
    /// A JSON object for each line.
    Json,
}

#[tokio::main]
async fn main() -> ExitCode {
    let Command::Run { config, namespace, templates, log_format } = Arguments::parse().command;
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("info,kube_runtime=warn"));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.json().init(),
    }
    match manager::run(Options { config, namespace, templates }).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
