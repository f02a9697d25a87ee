//! `kubectl vm console`: the guest's serial console in this terminal.
//!
//! ```text
//!  wait until the guest runs ─▶ its Pod ─▶ kubectl exec ... vm-runner console ─▶ left with Ctrl-]: done
//!           ▲                                                                 └▶ the guest has ended: a line, and again
//!           └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! kubectl carries the terminal: it is there, because it has started this plugin, and knows the user's way to the cluster.

use std::{io::IsTerminal, process::Command, time::Duration};

use clap::Args;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;

use super::{
    cluster::ClusterOptions,
    output::{Exit, Failure, Output, chain, note},
    power::duration,
    vms::name,
};
use crate::{
    actions::{
        VmHandle,
        power::{self, Order, PowerError, Progress},
    },
    api::{
        VirtualMachine,
        conditions::{self, RUNNING},
    },
    process::ErrorChain,
};

/// How long the end of a guest may take to be reported.
const NEWS: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct Options {
    /// The VM.
    #[arg(value_name = "VM")]
    vm: String,
    /// How long to wait until the guest runs, at first and after a restart.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    timeout: Duration,
    #[command(flatten)]
    cluster: ClusterOptions,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let cluster = options.cluster.connect().await.map_err(|error| Failure::new(ErrorChain(&error).to_string()))?;
    let vm = VmHandle::new(cluster.client, &cluster.namespace, name(&options.vm)?);
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if is_terminal {
        note("Ctrl-] leaves the console.");
    }
    output.flush()?;
    loop {
        let told = |what: &str| note(&format!("{vm}: {what}"));
        let runs = vm.wait(options.timeout, |now| power::progress(Order::Start, now, now), told).await;
        let running = match runs {
            Ok(running) => running,
            Err(error) => {
                let exit = if matches!(error, PowerError::TimedOut { .. }) { Exit::TimedOut } else { Exit::Negative };
                note(&format!("{vm}: {}", ErrorChain(&error)));
                return Ok(exit);
            }
        };
        let pod = vm.pod().await.map_err(|error| Failure::unknown(chain(&vm, &error)))?;
        let Some(pod) = pod else { return Err(Failure::new(format!("{vm}: it has no Pod"))) };
        let mut kubectl = Command::new("kubectl");
        kubectl.args(["exec", "--stdin", "--quiet", "--namespace", vm.namespace(), "--container=vm-runner"]);
        if is_terminal {
            kubectl.arg("--tty");
        }
        options.cluster.pass_on(&mut kubectl);
        let status = kubectl.arg(pod).args(["--", "vm-runner", "console"]).status();
        let status = status.map_err(|error| Failure::new(format!("start kubectl: {error}")))?;
        if status.success() || !is_terminal {
            return Ok(Exit::negative_if(!status.success()));
        }
        // kubectl fails, too, if the user may not do this; then it has said so.
        let is_other = |now: &VirtualMachine| match guest(now) == guest(&running) {
            true => Progress::Waits(String::new()),
            false => Progress::Done,
        };
        if vm.wait(NEWS, is_other, |_| ()).await.is_err() {
            return Ok(Exit::Negative);
        }
        note(&format!("{vm}: the guest has ended; waiting for the next one"));
    }
}

/// What is another one for each guest: the Pod, and since when it runs.
fn guest(vm: &VirtualMachine) -> Option<(Option<String>, Option<Condition>)> {
    let status = vm.status.as_ref()?;
    Some((status.pod_uid.clone(), conditions::find(&status.conditions, RUNNING).cloned()))
}
