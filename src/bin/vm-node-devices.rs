//! The program that gives VMs the devices of their node: see `vm_operator::node_devices`.

use std::{path::PathBuf, process::ExitCode};

use clap::Parser;
use vm_operator::{
    node_devices::{self, Options},
    process::{ErrorChain, listen::Listen, log, signals},
};

/// Gives the Pods of VMs the devices of their node (a device plugin of the kubelet) until told to end (SIGTERM).
///
/// It runs once on each node: deploy/node-devices.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    /// The kubelet's folder for device plugins.
    #[arg(long, env = "NODE_DEVICES_PLUGINS", value_name = "DIR", default_value = "/var/lib/kubelet/device-plugins")]
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
    log_format: log::Format,
}

fn main() -> ExitCode {
    let Arguments { plugins, dev, reports, seccomp, listen, log_format } = Arguments::parse();
    let options = Options { plugins, dev, reports, seccomp, listen: listen.0 };
    log::run_on_one_thread(log_format, async {
        match give_devices(options).await {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                tracing::error!("{}", ErrorChain(&*error));
                ExitCode::FAILURE
            }
        }
    })
}

async fn give_devices(options: Options) -> Result<(), Box<dyn std::error::Error>> {
    Ok(node_devices::run(options, signals::termination()?).await?)
}
