//! `kubectl vm ssh`, `scp` and `ssh-config`: OpenSSH with a `ProxyCommand` that leads to the guest.
//!
//! ```text
//!  kubectl vm ssh web ─▶ the VM can be reached? ─▶ ssh -o ProxyCommand="kubectl-vm port-forward web ... --stdio %p" vm.web.NS
//! ```
//!
//! OpenSSH does the rest, so agent, keys, `~/.ssh/config` and `known_hosts` work as for every host. It takes the place of this process, with its
//! exit code.

mod openssh;

use std::{
    ffi::{OsStr, OsString},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use clap::Args;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use kube::ResourceExt;

use self::openssh::{HostBlock, RemotePath, Route};
use super::{
    cluster::ClusterOptions,
    in_pod::{forwardable, read_vm, unreachable},
    output::{Exit, Failure, Output, note},
    vms::{Selection, exit, vm_names},
};
use crate::api::VirtualMachine;

#[derive(Args)]
pub(super) struct LoginOptions {
    /// The VM, and the user in its guest. Default: the first user that the VM's cloud-init user-data names, else the one that ssh takes.
    #[arg(value_name = "[USER@]VM", add = ArgValueCompleter::new(destinations))]
    destination: String,
    /// A private key. Can be given several times. Default: those of ssh and of its agent.
    #[arg(long, short, value_name = "KEY")]
    identity: Vec<PathBuf>,
    /// The port of the guest's ssh server. Default: that of ssh, 22.
    #[arg(long, short, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// What ssh takes behind a host: a command, or options of ssh and then a command.
    #[arg(last = true, value_name = "SSH-OPTIONS, COMMAND")]
    arguments: Vec<OsString>,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Args)]
pub(super) struct CopyOptions {
    /// What is copied, and then where to: paths of this computer, and [USER@]VM:PATH in the guest of one VM.
    #[arg(value_name = "PATH", required = true, num_args = 2.., add = ArgValueCompleter::new(places))]
    paths: Vec<String>,
    /// Copy folders with all that is in them.
    #[arg(long, short)]
    recursive: bool,
    /// A private key. Can be given several times. Default: those of ssh and of its agent.
    #[arg(long, short, value_name = "KEY")]
    identity: Vec<PathBuf>,
    /// The port of the guest's ssh server. Default: that of ssh, 22.
    #[arg(long, short = 'P', value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// Options of scp.
    #[arg(last = true, value_name = "SCP-OPTIONS")]
    arguments: Vec<OsString>,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Args)]
pub(super) struct ConfigOptions {
    #[command(flatten)]
    selection: Selection,
    /// A private key for these VMs. Can be given several times.
    #[arg(long, short, value_name = "KEY")]
    identity: Vec<PathBuf>,
    /// The port of the guests' ssh servers. Default: that of ssh, 22.
    #[arg(long, short, value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
}

pub(super) async fn login(options: &LoginOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let (user, vm) = openssh::destination(&options.destination);
    let user = user.map(checked_user).transpose()?;
    let route = reachable(vm, &options.cluster).await?;
    output.flush()?;
    let mut ssh = openssh(&route, "ssh", &options.identity);
    ssh.args(options.port.map(|port| format!("-p{port}")));
    ssh.arg(at(user.or(route.user.as_deref()), &route.alias)).args(&options.arguments);
    Err(become_it(ssh))
}

pub(super) async fn copy(options: &CopyOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let vm = only_vm(&options.paths)?;
    let route = reachable(vm, &options.cluster).await?;
    output.flush()?;
    let mut scp = openssh(&route, "scp", &options.identity);
    scp.args(options.port.map(|port| format!("-P{port}")));
    scp.args(options.recursive.then_some("-r")).args(&options.arguments).arg("--");
    for argument in &options.paths {
        scp.arg(match RemotePath::parse(argument) {
            Some(RemotePath { user, path, .. }) => {
                let user = user.map(checked_user).transpose()?;
                format!("{}:{path}", at(user.or(route.user.as_deref()), &route.alias))
            }
            None => argument.clone(),
        });
    }
    Err(become_it(scp))
}

pub(super) async fn config(options: &ConfigOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let found = options.selection.find().await?;
    // A configuration is read in any folder, and later, when another context may be the current one.
    let (pinned, kubeconfigs) = options.selection.cluster.pinned(std::env::var_os("KUBECONFIG").as_deref());
    let program = installed_program(std::env::args_os().next().as_deref(), std::env::var_os("PATH").as_deref())?;
    let mut caller = Vec::new();
    if let Some(files) = kubeconfigs {
        let mut variable = OsString::from("KUBECONFIG=");
        variable.push(files);
        caller.extend(["env".into(), variable]);
    }
    caller.push(program.into_os_string());
    let folder = std::env::current_dir().map_err(|error| Failure::new(format!("this folder: {error}")))?;
    let identities: Vec<_> = options.identity.iter().map(|file| identity(file, &folder)).collect::<Result<_, _>>()?;
    let (mut printed, mut failed) = (0, found.missing);
    for vm in &found.vms {
        if let Some(why) = unreachable(&vm.vm.spec.vm.networks) {
            note(&format!("vm {}/{}: {why}", vm.namespace(), vm.vm.name_any()));
            // Of all VMs those are meant that can be reached.
            failed += usize::from(!options.selection.names.is_empty());
            continue;
        }
        let route = route(&caller, &vm.vm, &pinned)?;
        let block = HostBlock { route: &route, identities: &identities, port: options.port };
        write!(output, "{}{block}", if printed == 0 { "" } else { "\n" })?;
        printed += 1;
    }
    Ok(exit(printed, failed))
}

/// The way to the guest of a VM that runs.
async fn reachable(vm: &str, cluster: &ClusterOptions) -> Result<Route, Failure> {
    let (vm, found) = read_vm(vm, cluster).await?;
    // ssh would say less about it.
    forwardable(&vm, &found, cluster).await?;
    route(&[this_program()?.into_os_string()], &found, cluster)
}

/// The way to the guest of a VM, through this program. `caller` are the words that start it.
fn route(caller: &[OsString], vm: &VirtualMachine, cluster: &ClusterOptions) -> Result<Route, Failure> {
    let (name, namespace) = (vm.name_any(), vm.namespace().unwrap_or_default());
    let mut command = Command::new("kubectl-vm");
    command.args(["port-forward", &name, "--namespace", &namespace]);
    cluster.pass_on(&mut command);
    let words = caller.iter().map(OsString::as_os_str).chain(command.get_args()).map(text);
    let words: Vec<&str> = words.collect::<Result<_, _>>()?;
    let proxy_command = openssh::proxy_command(words);
    Ok(Route {
        alias: openssh::alias(&name, &namespace),
        proxy_command: proxy_command.map_err(|error| Failure::usage(error.to_string()))?,
        user: vm.spec.cloud_init.as_ref().and_then(openssh::first_user),
    })
}

/// ssh or scp, with the way to the guest and the keys.
fn openssh(route: &Route, program: &str, identities: &[PathBuf]) -> Command {
    let mut command = Command::new(program);
    command.arg(format!("-oProxyCommand={}", route.proxy_command));
    command.arg(format!("-oHostKeyAlias={}", route.alias));
    for file in identities {
        command.arg("-i").arg(file);
    }
    command
}

/// Lets OpenSSH take the place of this process. Returns only if that fails.
fn become_it(mut command: Command) -> Failure {
    let error = command.exec();
    Failure::new(format!("start {}: {error}; it is a program of OpenSSH's client", command.get_program().display()))
}

fn at(user: Option<&str>, alias: &str) -> String {
    user.map_or_else(|| alias.to_owned(), |user| format!("{user}@{alias}"))
}

/// A user that somebody has typed. It must not become an option of ssh.
fn checked_user(user: &str) -> Result<&str, Failure> {
    if user.is_empty() || user.starts_with('-') {
        return Err(Failure::usage(format!("{user:?} is no user: write USER@VM, or VM alone")));
    }
    Ok(user)
}

/// The VM that the paths are about.
fn only_vm(paths: &[String]) -> Result<&str, Failure> {
    let mut vms = paths.iter().filter_map(|path| Some(RemotePath::parse(path)?.vm));
    let vm = vms.next().ok_or_else(|| Failure::usage("no path is in a guest: write VM:PATH, such as web:/tmp"))?;
    match vms.find(|other| *other != vm) {
        None => Ok(vm),
        Some(other) => Err(Failure::usage(format!(
            "the paths are in the guests of {vm} and {other}: with what `kubectl vm ssh-config {vm} {other}` prints, scp copies from one to the other"
        ))),
    }
}

fn identity(file: &Path, folder: &Path) -> Result<String, Failure> {
    openssh::identity(text(file.as_os_str())?, folder).map_err(|error| Failure::usage(error.to_string()))
}

fn text(word: &OsStr) -> Result<&str, Failure> {
    word.to_str()
        .ok_or_else(|| Failure::usage(format!("{} is not UTF-8, so it can't be handed to ssh", word.display())))
}

/// This program, as it runs.
fn this_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(|error| Failure::new(format!("where this program is: {error}")))
}

/// Where this program is installed: not where a link leads, because a tool such as krew changes that with each version.
fn installed_program(called: Option<&OsStr>, path: Option<&OsStr>) -> Result<PathBuf, Failure> {
    let this = this_program()?;
    let called = Path::new(called.unwrap_or(OsStr::new("kubectl-vm")));
    let candidates: Vec<PathBuf> = if called.components().count() > 1 {
        vec![std::path::absolute(called).unwrap_or_default()]
    } else {
        std::env::split_paths(path.unwrap_or_default()).map(|folder| folder.join(called)).collect()
    };
    let is_this = |file: &PathBuf| file.is_absolute() && file.canonicalize().is_ok_and(|file| file == this);
    Ok(candidates.into_iter().find(is_this).unwrap_or(this))
}

/// Completes `[USER@]VM`.
fn destinations(current: &OsStr) -> Vec<CompletionCandidate> {
    match current.to_string_lossy().rsplit_once('@') {
        Some((user, vm)) => {
            vm_names(OsStr::new(vm)).into_iter().map(|name| name.add_prefix(format!("{user}@"))).collect()
        }
        None => vm_names(current),
    }
}

/// Completes `[USER@]VM:`. What no VM's name begins with is left to the shell, which knows the files.
fn places(current: &OsStr) -> Vec<CompletionCandidate> {
    if current.to_string_lossy().contains([':', '/', '.']) {
        return Vec::new();
    }
    let with_colon = |name: CompletionCandidate| {
        let mut value = name.get_value().to_owned();
        value.push(":");
        CompletionCandidate::new(value)
    };
    destinations(current).into_iter().map(with_colon).collect()
}
