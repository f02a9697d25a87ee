//! Commands about the guest that a VM's Pod answers: its log, its screen, its keyboard.
//!
//! kubectl does the work, so what it can do with a Pod (proxies, credentials that a program brings) works here too. What is added is which Pod
//! and which container.

use std::{
    io::{IsTerminal, Write},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use super::{
    cluster::ClusterOptions,
    output::{Exit, Failure, Output, note},
    stdio,
    vms::{checked_name, failure, name_of, refused, refused_about, title, vm_names},
};
use crate::{
    actions::VmHandle,
    api::{Network, VirtualMachine},
    files::FileError,
    process::ErrorChain,
};
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use k8s_openapi::api::core::v1::Pod;
use kube::core::ApiResource;

/// The container with QEMU.
const MACHINE: &str = "vm-runner";

/// The VM of a command, and where it is.
#[derive(Args)]
pub(super) struct Target {
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

#[derive(Args)]
pub(super) struct ForwardOptions {
    #[command(flatten)]
    target: Target,
    /// Ports of the guest: 8080; 80:8080 for another one here; :8080 for any free one here.
    #[arg(value_name = "[LOCAL:]REMOTE", required = true)]
    ports: Vec<String>,
    /// Where to listen on this computer.
    #[arg(long, default_value = "localhost", value_name = "ADDRESS")]
    address: String,
    /// Connect standard input and output to one port, in place of a port of this computer.
    #[arg(long, conflicts_with = "address")]
    stdio: bool,
}

/// A VM's Pod.
pub(super) struct InPod<'a> {
    cluster: &'a ClusterOptions,
    namespace: String,
    pod: String,
}

/// Reads the VM of this name, or of what `--output=name` prints.
pub(super) async fn read_vm(vm: &str, cluster: &ClusterOptions) -> Result<(VmHandle, VirtualMachine), Failure> {
    let name = checked_name(vm)?;
    let cluster = cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
    let vm = VmHandle::new(cluster.client.clone(), &cluster.namespace, name);
    match vm.get().await {
        Ok(found) => Ok((vm, found)),
        Err(error) => {
            let place = Some(vm.namespace());
            Err(failure(refused(&cluster.client, &title(vm.name()), &["get"], place, &error).await, &error))
        }
    }
}

impl Target {
    /// Where it is.
    pub fn cluster(&self) -> &ClusterOptions {
        &self.cluster
    }

    /// The VM. Nothing is asked of the API server yet.
    ///
    /// # Errors
    /// If there is no cluster to ask.
    pub async fn handle(&self) -> Result<VmHandle, Failure> {
        let name = checked_name(&self.vm)?;
        let cluster = self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
        Ok(VmHandle::new(cluster.client, &cluster.namespace, name))
    }

    /// Reads the VM.
    ///
    /// # Errors
    /// If there is none, or the API server does not say.
    pub async fn read(&self) -> Result<(VmHandle, VirtualMachine), Failure> {
        read_vm(&self.vm, &self.cluster).await
    }

    async fn pod(&self) -> Result<InPod<'_>, Failure> {
        let (vm, found) = self.read().await?;
        InPod::of(&vm, &found, &self.cluster).await
    }
}

/// The name of the Pod of this VM, as it was read, if it has one.
///
/// # Errors
/// If the API server does not say.
pub(super) async fn pod_of(vm: &VmHandle, found: &VirtualMachine) -> Result<Option<String>, Failure> {
    match vm.pod(found).await {
        Ok(pod) => Ok(pod),
        Err(error) => {
            let (pods, what) = (ApiResource::erase::<Pod>(&()), format!("the Pods of {}", title(vm.name())));
            let line = refused_about(vm.client(), &pods, &what, &["list"], Some(vm.namespace()), &error).await;
            Err(failure(line, &error))
        }
    }
}

impl<'a> InPod<'a> {
    /// The Pod of this VM, as it was read.
    ///
    /// # Errors
    /// If there is none, or the API server does not say.
    pub async fn of(vm: &VmHandle, found: &VirtualMachine, cluster: &'a ClusterOptions) -> Result<Self, Failure> {
        let (name, namespace) = (vm.name(), vm.namespace());
        let pod = pod_of(vm, found).await?.ok_or_else(|| {
            Failure::new(format!(
                "{vm}: it has no Pod, so no guest runs: kubectl vm explain {name} -n {namespace} says why"
            ))
        })?;
        Ok(Self { cluster, namespace: namespace.to_owned(), pod })
    }

    /// The Pod of that name.
    pub fn named(cluster: &'a ClusterOptions, namespace: &str, pod: String) -> Self {
        Self { cluster, namespace: namespace.to_owned(), pod }
    }

    /// `kubectl VERB POD`, for the rest of the arguments.
    fn kubectl(&self, verb: &str) -> Command {
        let mut kubectl = Command::new("kubectl");
        kubectl.args([verb, &self.pod, "--namespace", &self.namespace]);
        self.cluster.pass_on(&mut kubectl);
        kubectl
    }

    /// A program in a container. `flags` are those of `kubectl exec`.
    pub fn exec(&self, container: &str, flags: &[&str], arguments: &[&str]) -> Command {
        let mut kubectl = self.kubectl("exec");
        kubectl.args(["--container", container]).args(flags).arg("--").args(arguments);
        kubectl
    }

    /// `vm-runner` in the container of the machine. `flags` are those of `kubectl exec`.
    pub fn runner(&self, flags: &[&str], arguments: &[&str]) -> Command {
        let mut kubectl = self.kubectl("exec");
        kubectl.args(["--container", MACHINE]).args(flags).args(["--", "vm-runner"]).args(arguments);
        kubectl
    }
}

/// Lets kubectl take the place of this process, so that whoever ends this command ends it. Returns only if that fails.
fn become_it(mut kubectl: Command) -> Failure {
    start_failed(kubectl.exec())
}

pub(super) fn start_failed(error: std::io::Error) -> Failure {
    Failure::new(format!("start kubectl: {error}"))
}

/// Why nothing in the cluster reaches the guest of a VM with these networks; `None`: a network of type pod leads to it.
pub(super) fn unreachable(networks: &[Network]) -> Option<&'static str> {
    let has = |is: fn(&Network) -> bool| networks.iter().any(is);
    if has(|network| network.pod.is_some()) {
        None
    } else if has(|network| network.tap.is_some()) {
        Some(
            "its guest is on a bridge of the node and has an address there, which the API server does not know: connect to that",
        )
    } else if has(|network| network.user.is_some()) {
        Some(
            "its networks are of type user, through which nothing reaches the guest: give it one of type pod (spec.vm.networks)",
        )
    } else {
        Some("it has no network")
    }
}

pub(super) async fn port_forward(options: &ForwardOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let port = if options.stdio { Some(only_port(&options.ports)?) } else { None };
    let (vm, found) = options.target.read().await?;
    let pod = forwardable(&vm, &found, &options.target.cluster).await?;
    output.flush()?;
    if let Some(port) = port {
        stdio::join(&vm, &pod.pod, port).await?;
        return Ok(Exit::Success);
    }
    let mut kubectl = pod.kubectl("port-forward");
    kubectl.args(["--address", &options.address]).args(&options.ports);
    Err(become_it(kubectl))
}

/// The Pod through which the ports of a VM's guest are reached.
///
/// # Errors
/// If nothing in the cluster reaches the guest, or it does not run.
pub(super) async fn forwardable<'a>(
    vm: &VmHandle,
    found: &VirtualMachine,
    cluster: &'a ClusterOptions,
) -> Result<InPod<'a>, Failure> {
    if let Some(why) = unreachable(&found.spec.vm.networks) {
        return Err(Failure::new(format!("{vm}: {why}")));
    }
    InPod::of(vm, found, cluster).await
}

/// The port of a connection on standard input and output.
fn only_port(ports: &[String]) -> Result<u16, Failure> {
    match ports {
        [port] => port.parse().ok().filter(|port| *port > 0),
        _ => None,
    }
    .ok_or_else(|| Failure::usage("--stdio takes one port of the guest, from 1 to 65535, such as 22"))
}

pub(super) async fn logs(options: &LogOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let pod = options.target.pod().await?;
    output.flush()?;
    let mut kubectl = pod.kubectl("logs");
    kubectl.args(["--container", &options.container]);
    let flags = [("--follow", options.follow), ("--previous", options.previous), ("--timestamps", options.timestamps)];
    kubectl.args(flags.iter().filter(|(_, is_set)| *is_set).map(|(flag, _)| flag));
    kubectl.args(options.tail.map(|lines| format!("--tail={lines}")));
    Err(become_it(kubectl))
}

pub(super) async fn screenshot(options: &ScreenshotOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let to_stdout = options.output.as_deref() == Some(Path::new("-"));
    if to_stdout && std::io::stdout().is_terminal() {
        return Err(Failure::usage("a picture is not for a terminal: give a file by --output"));
    }
    let pod = options.target.pod().await?;
    let answer = pod.runner(&[], &["ctl", "screenshot"]).stderr(Stdio::inherit()).output().map_err(start_failed)?;
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
    let pod = options.target.pod().await?;
    output.flush()?;
    for keys in &options.keys {
        if !pod.runner(&[], &["ctl", "send-key", keys]).status().map_err(start_failed)?.success() {
            return Ok(Exit::Negative);
        }
    }
    Ok(Exit::Success)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_a_network_of_type_pod_leads_to_the_guest() {
        let why = |networks| unreachable(&serde_json::from_value::<Vec<Network>>(networks).unwrap());
        assert_eq!(why(json!([{ "user": {} }, { "pod": {} }])), None);
        assert!(why(json!([{ "user": {} }])).unwrap().contains("type pod"));
        assert!(why(json!([{ "user": {} }, { "tap": {} }])).unwrap().contains("bridge of the node"));
        assert_eq!(why(json!([])), Some("it has no network"));
    }

    #[test]
    fn standard_input_and_output_are_one_connection() {
        let port = |ports: &[&str]| only_port(&ports.iter().map(|&port| port.to_owned()).collect::<Vec<_>>()).ok();
        assert_eq!(port(&["22"]), Some(22));
        for ports in [&["22", "80"] as &[&str], &["2222:22"], &[":22"], &["ssh"], &["0"], &["65536"]] {
            assert_eq!(port(ports), None, "{ports:?}");
        }
    }
}
