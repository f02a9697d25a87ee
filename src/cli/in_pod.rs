//! Commands about the guest that a VM's Pod answers: its log, its screen, its keyboard.
//!
//! kubectl does the work, so what it can do with a Pod (proxies, credentials that a program brings) works here too. What is added is which Pod
//! and which container.

use std::{
    io::{IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use kube::Client;

use super::{
    cluster::ClusterOptions,
    output::{Exit, Failure, Output, chain, note},
    vms::{name_of, vm_names},
};
use crate::{actions::VmHandle, files::FileError, process::ErrorChain};

/// The container with QEMU.
const MACHINE: &str = "vm-runner";

/// The VM of a command, and where it is.
#[derive(Args)]
struct Target {
    /// The VM.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names))]
    vm: String,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Args)]
pub(super) struct LogOptions {
    #[command(flatten)]
    target: Target,
    /// Go on with each new line.
    #[arg(long, short)]
    follow: bool,
    /// The container: vm-runner (the machine, and what the guest writes on its console), agent, passt.
    #[arg(long, short, default_value = MACHINE, value_name = "NAME")]
    container: String,
    /// The log of the container before its last restart.
    #[arg(long, short)]
    previous: bool,
    /// Only the last lines.
    #[arg(long, value_name = "LINES")]
    tail: Option<u32>,
    /// With the time of each line.
    #[arg(long)]
    timestamps: bool,
}

#[derive(Args)]
pub(super) struct ScreenshotOptions {
    #[command(flatten)]
    target: Target,
    /// The file, a PNG; - is standard output. Default: the VM's name with .png.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
}

#[derive(Args)]
pub(super) struct KeyOptions {
    #[command(flatten)]
    target: Target,
    /// The keys, pressed at once, with QEMU's names: ctrl-alt-delete, meta_l, f2.
    #[arg(value_name = "KEYS", required = true)]
    keys: Vec<String>,
}

/// A VM's Pod.
struct InPod<'a> {
    cluster: &'a ClusterOptions,
    namespace: String,
    pod: String,
}

impl<'a> InPod<'a> {
    async fn find(Target { vm, cluster }: &'a Target) -> Result<Self, Failure> {
        let connected = cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
        let pod = pod(connected.client, &connected.namespace, name_of(vm)).await?;
        Ok(Self { cluster, namespace: connected.namespace, pod })
    }

    /// `kubectl VERB POD` with the container, for the rest of the arguments.
    fn kubectl(&self, verb: &str, container: &str) -> Command {
        let mut kubectl = Command::new("kubectl");
        kubectl.args([verb, &self.pod, "--namespace", &self.namespace, "--container", container]);
        self.cluster.pass_on(&mut kubectl);
        kubectl
    }

    /// `vm-runner ctl` in the container of the machine.
    fn control(&self, arguments: &[&str]) -> Command {
        let mut kubectl = self.kubectl("exec", MACHINE);
        kubectl.args(["--", "vm-runner", "ctl"]).args(arguments);
        kubectl
    }
}

async fn pod(client: Client, namespace: &str, name: &str) -> Result<String, Failure> {
    let vm = VmHandle::new(client, namespace, name);
    let unknown = |error: kube::Error| Failure::unknown(chain(&vm, &error));
    let found = vm.get().await.map_err(unknown)?;
    vm.pod(&found).await.map_err(unknown)?.ok_or_else(|| {
        Failure::new(format!(
            "{vm}: it has no Pod, so no guest runs: kubectl vm explain {name} -n {namespace} says why"
        ))
    })
}

fn start_failed(error: std::io::Error) -> Failure {
    Failure::new(format!("start kubectl: {error}"))
}

pub(super) async fn logs(options: &LogOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let pod = InPod::find(&options.target).await?;
    output.flush()?;
    let mut kubectl = pod.kubectl("logs", &options.container);
    let flags = [("--follow", options.follow), ("--previous", options.previous), ("--timestamps", options.timestamps)];
    kubectl.args(flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag));
    kubectl.args(options.tail.map(|lines| format!("--tail={lines}")));
    Ok(Exit::negative_if(!kubectl.status().map_err(start_failed)?.success()))
}

pub(super) async fn screenshot(options: &ScreenshotOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let to_stdout = options.output.as_deref() == Some(Path::new("-"));
    if to_stdout && std::io::stdout().is_terminal() {
        return Err(Failure::usage("a picture is not for a terminal: give a file by --output"));
    }
    let pod = InPod::find(&options.target).await?;
    let answer = pod.control(&["screenshot"]).stderr(Stdio::inherit()).output().map_err(start_failed)?;
    if !answer.status.success() {
        return Ok(Exit::Negative);
    }
    if to_stdout {
        output.flush()?;
        std::io::stdout().write_all(&answer.stdout).map_err(FileError::io(Path::new("-")))?;
        return Ok(Exit::Success);
    }
    let file = options.output.clone().unwrap_or_else(|| format!("{}.png", name_of(&options.target.vm)).into());
    std::fs::write(&file, &answer.stdout).map_err(FileError::io(&file))?;
    note(&format!("the guest's screen is in {}", file.display()));
    Ok(Exit::Success)
}

pub(super) async fn send_key(options: &KeyOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let pod = InPod::find(&options.target).await?;
    output.flush()?;
    for keys in &options.keys {
        if !pod.control(&["send-key", keys]).status().map_err(start_failed)?.success() {
            return Ok(Exit::Negative);
        }
    }
    Ok(Exit::Success)
}
