//! `kubectl vm console`: the guest's serial console in this terminal.
//!
//! ```text
//!  wait until the guest runs ─▶ its Pod ─▶ kubectl exec ... vm-runner console ─▶ left with Ctrl-]: done
//!           ▲                                                                 └▶ the guest has ended: a line, and again
//!           └────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! kubectl carries the terminal: it is there, because it has started this plugin, and knows the user's way to the cluster.

use std::{io::IsTerminal, time::Duration};

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use tokio::time::{Instant, sleep};

use super::{
    cluster::ClusterOptions,
    in_pod::{InPod, start_failed},
    output::{Exit, Failure, Output, chain, note},
    vms::{self, checked_name, failure},
    wait::{self, Goal, Limit},
};
use crate::{
    actions::VmHandle,
    api::{
        VirtualMachine,
        conditions::{self, RUNNING},
    },
    process::ErrorChain,
};

/// How long the end of a guest may take to be reported, and how often it is looked for.
const NEWS: Duration = Duration::from_secs(10);
const LOOK: Duration = Duration::from_millis(500);

#[derive(Args)]
pub(super) struct Options {
    /// The VM.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vms::vm_names))]
    vm: String,
    /// For the guest, at first and after a restart.
    #[command(flatten)]
    limit: Limit,
    #[command(flatten)]
    cluster: ClusterOptions,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let name = checked_name(&options.vm)?;
    let cluster = options.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
    let vm = VmHandle::new(cluster.client.clone(), &cluster.namespace, name);
    let is_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    if is_terminal {
        note("Ctrl-] leaves the console.");
    }
    output.flush()?;
    loop {
        let (begin, limit) = (Instant::now(), options.limit.timeout);
        let running = wait::wait(&cluster.client, vm.namespace(), vm.name(), &Goal::Running, begin, limit).await;
        if let Err(exit) = running.reached() {
            return Ok(exit);
        }
        let unread = |error: kube::Error| failure(chain(&vm, &error), &error);
        let running = vm.get().await.map_err(unread)?;
        let pod = InPod::of(&vm, &running, &options.cluster).await?;
        let flags = if is_terminal { &["--stdin", "--quiet", "--tty"][..] } else { &["--stdin", "--quiet"] };
        let status = pod.runner(flags, &["console"]).status().map_err(start_failed)?;
        if status.success() || !is_terminal {
            return Ok(Exit::negative_if(!status.success()));
        }
        // kubectl fails, too, if the user may not do this; then it has said so.
        let deadline = Instant::now() + NEWS;
        while guest(&vm.get().await.map_err(unread)?) == guest(&running) {
            if Instant::now() > deadline {
                return Ok(Exit::Negative);
            }
            sleep(LOOK).await;
        }
        note(&format!("{vm}: the guest has ended; waiting for the next one"));
    }
}

/// What is another one for each guest: the Pod, and since when it runs.
fn guest(vm: &VirtualMachine) -> Option<(Option<String>, Option<Condition>)> {
    let status = vm.status.as_ref()?;
    Some((status.pod_uid.clone(), conditions::find(&status.conditions, RUNNING).cloned()))
}
