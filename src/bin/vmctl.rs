//! The program that runs a VM beside a Pod: see `vm_operator::vmctl`.

use std::{io::Write, path::PathBuf, process::ExitCode};

use clap::{Args, Parser, Subcommand};
use vm_operator::{
    process::{ErrorChain, log, signals},
    vmctl::{self, Options, derive::Disks, pod, ready, standing::ReadyWhen},
};

/// The exit code if the program was not told what it needs; the one of clap.
const USAGE: u8 = 2;

/// Runs a VM beside this Pod: derives it from a prototype, and deletes it on SIGTERM.
///
/// The VM is named PROTOTYPE-POD, runs on the node of this Pod, and has disks, MAC addresses and a UUID of its own. So a Deployment,
/// StatefulSet or DaemonSet of Pods with this program is one of VMs: docs/vmctl.md has examples.
///
/// Exit codes: 0 told to end, and the VM is deleted; 1 the VM can't be derived, or was deleted by somebody else; 2 wrong use.
#[derive(Parser)]
#[command(
    version,
    args_conflicts_with_subcommands = true,
    subcommand_negates_reqs = true,
    subcommand_value_name = "ready"
)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    /// The name of the VM that is the prototype (of one with the name `ready`: `-- ready`).
    #[arg(required = true)]
    prototype: Option<String>,
    /// The namespace of the derived VM. Default: that of this Pod.
    #[arg(long, env = "VMCTL_NAMESPACE", value_name = "NS")]
    namespace: Option<String>,
    /// The namespace of the prototype. Default: that of the derived VM.
    #[arg(long, env = "VMCTL_PROTO_NAMESPACE", value_name = "NS")]
    proto_namespace: Option<String>,
    /// What becomes of the VM's disks when this Pod ends.
    #[arg(long, env = "VMCTL_DISKS", default_value = "keep")]
    disks: Disks,
    /// Keep the disks also in a Deployment or DaemonSet, where no later Pod has the same name; and accept claims that templates fix for all VMs.
    #[arg(long)]
    force: bool,
    /// When this Pod is ready, as `vmctl ready` tells the kubelet.
    #[arg(long = "ready-when", env = "VMCTL_READY_WHEN", default_value = "booted")]
    ready: ReadyWhen,
    /// The namespace of this Pod. Default: that of the file in --podinfo, or of the service account.
    #[arg(long, env = "POD_NAMESPACE", value_name = "NS")]
    pod_namespace: Option<String>,
    /// The name of this Pod, instead of the file in --podinfo.
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    pod_name: Option<String>,
    /// The node on which the VM runs: that of this Pod.
    #[arg(long, env = "NODE_NAME", value_name = "NAME", visible_alias = "hostname-override")]
    node: Option<String>,
    #[command(flatten)]
    uid: Uid,
    /// The format of the log.
    #[arg(long, env = "VM_OPERATOR_LOG_FORMAT", default_value = "text")]
    log_format: log::Format,
}

/// Which Pod this is.
#[derive(Args)]
struct Uid {
    /// The folder of a volume of type downwardAPI with the files `name`, `uid` and `namespace`.
    #[arg(long, env = "VMCTL_PODINFO", value_name = "DIR", default_value = "/etc/podinfo")]
    podinfo: PathBuf,
    /// The UID of this Pod, instead of the file in --podinfo.
    #[arg(long, env = "POD_UID", value_name = "UID")]
    pod_uid: Option<String>,
}

#[derive(Subcommand)]
enum Command {
    /// Asks the vmctl of this Pod whether its guest is up: for the kubelet's probes. Prints the answer; 0 means yes.
    Ready {
        #[command(flatten)]
        uid: Uid,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(Command::Ready { uid }) = arguments.command {
        return probe(uid);
    }
    log::run_on_one_thread(arguments.log_format, hold(arguments))
}

async fn hold(arguments: Arguments) -> ExitCode {
    let Arguments { prototype, namespace, proto_namespace, disks, force, ready, uid, .. } = arguments;
    let Uid { podinfo, pod_uid } = uid;
    let options = Options {
        // clap has seen to it that there is one.
        prototype: prototype.unwrap_or_default(),
        namespace,
        prototype_namespace: proto_namespace,
        disks,
        force,
        ready,
        pod: pod::PodSource {
            podinfo,
            name: arguments.pod_name,
            uid: pod_uid,
            namespace: arguments.pod_namespace,
            node: arguments.node,
        },
    };
    let term = match signals::termination() {
        Ok(term) => term,
        Err(error) => {
            tracing::error!("listen for signals: {error}");
            return ExitCode::FAILURE;
        }
    };
    match vmctl::run(options, term).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{}", ErrorChain(&error));
            if error.is_usage() { USAGE.into() } else { ExitCode::FAILURE }
        }
    }
}

fn probe(Uid { podinfo, pod_uid }: Uid) -> ExitCode {
    let uid = match (pod::PodSource { podinfo, uid: pod_uid, ..pod::PodSource::default() }).uid() {
        Ok(uid) => uid,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "{error}");
            return USAGE.into();
        }
    };
    match ready::ask(&uid) {
        Ok((is_ready, answer)) => {
            let _ = writeln!(std::io::stdout(), "{answer}");
            if is_ready { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "vmctl does not answer: {error}");
            ExitCode::FAILURE
        }
    }
}
