//! `kubectl vm wait`, and the waiting of other commands: what is awaited, and what is said meanwhile.

mod goal;

use std::time::Duration;

use clap::Args;
use futures::{StreamExt, future::join_all};
use kube::{
    Api, Client, ResourceExt,
    runtime::watcher::{self, watch_object},
};
use tokio::time::{Instant, sleep, timeout, timeout_at};

pub(super) use self::goal::Goal;
use self::goal::{Verdict, seen};
use super::{
    output::{Exit, Failure, Output, note},
    vms::{self, Selection, refused, title},
};
use crate::{
    api::{StoredVm, VirtualMachine},
    process::ErrorChain,
};

/// How long a watch that failed rests.
const REST: Duration = Duration::from_secs(1);
/// How long there may be little hope: the manager may not have seen a template set yet that was installed a moment ago.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// What is awaited: running, stopped, booted (the agent in the guest answers), ready, paused, deleted, or condition=TYPE[=STATUS].
    #[arg(long = "for", value_name = "WHAT")]
    goal: Goal,
    #[command(flatten)]
    limit: Limit,
}

/// How long a command waits.
#[derive(Args)]
pub(super) struct Limit {
    /// How long to wait, such as 90s or 1h.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = time)]
    pub timeout: Duration,
}

pub(super) fn time(text: &str) -> Result<Duration, String> {
    let time: kube::core::Duration = text.parse().map_err(|error| format!("{error}"))?;
    if time.is_negative() { Err("a time is not negative".into()) } else { Ok(time.into()) }
}

/// How waiting for a VM ended.
pub(super) enum Ended {
    /// What was awaited is so, after this time. The VM, if it exists.
    Reached {
        vm: Option<Box<VirtualMachine>>,
        after: Duration,
    },
    TimedOut,
    /// It can't be waited for.
    Failed,
}

impl Ended {
    /// With the exit code of a command that waits for one VM.
    pub fn reached(self) -> Result<(), Exit> {
        match self {
            Self::Reached { .. } => Ok(()),
            Self::TimedOut => Err(Exit::TimeOut),
            Self::Failed => Err(Exit::Negative),
        }
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let found = options.selection.find().await?;
    let begin = Instant::now();
    let client = &found.cluster.client;
    let waits = found.vms.iter().map(|it| (it.namespace(), it.vm.name_any())).map(|(namespace, name)| {
        let goal = options.goal.clone();
        async move { (name.clone(), wait(client, &namespace, &name, &goal, begin, options.limit.timeout).await) }
    });
    // One that does not exist is deleted. One that may not be read is not known to be.
    let missing = if options.goal == Goal::Deleted { found.missing - found.absent } else { found.missing };
    let ends = join_all(waits).await;
    report(ends, missing, Some(output), |name, phase, after| {
        format!("{}: {} (now {phase}, {})", title(name), options.goal, seconds(after))
    })
}

/// Prints how waiting ended, a line for each VM if there is an output, and returns the exit code. `missing` VMs have failed already.
pub(super) fn report(
    ends: Vec<(String, Ended)>,
    missing: usize,
    mut output: Option<&mut Output<'_>>,
    line: impl Fn(&str, &str, Duration) -> String,
) -> Result<Exit, Failure> {
    let (mut reached, mut failed, mut timed_out) = (0, missing, 0);
    for (name, end) in ends {
        match end {
            Ended::Reached { vm, after } => {
                if let Some(output) = &mut output {
                    let phase = vm.and_then(|vm| vm.status?.phase);
                    writeln!(output, "{}", line(&name, phase.as_deref().unwrap_or("gone"), after))?;
                }
                reached += 1;
            }
            Ended::TimedOut => timed_out += 1,
            Ended::Failed => failed += 1,
        }
    }
    Ok(if timed_out > 0 { Exit::TimeOut } else { vms::exit(reached, failed) })
}

/// Waits until a VM is as it should be, and says on standard error what it waits for, whenever that changes.
pub(super) async fn wait(
    client: &Client,
    namespace: &str,
    name: &str,
    goal: &Goal,
    begin: Instant,
    limit: Duration,
) -> Ended {
    let mut said = String::new();
    let reached = follow(client, namespace, name, goal, begin, &mut said);
    // A time that is too long for the clock never ends.
    let end = match begin.checked_add(limit) {
        Some(end) => timeout_at(end, reached).await.ok(),
        None => Some(reached.await),
    };
    end.unwrap_or_else(|| {
        let last = if said.is_empty() { "the API server said nothing" } else { &said };
        note(&format!("{}: not {goal} after {}: {last}", title(name), seconds(limit)));
        Ended::TimedOut
    })
}

/// Waits for a short time, and says nothing. `None`: it has not become so.
pub(super) async fn see(client: &Client, vm: VirtualMachine, goal: &Goal, limit: Duration) -> Option<VirtualMachine> {
    let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
    let mut said = goal::seen(Some(&vm));
    match timeout(limit, follow(client, &namespace, &name, goal, Instant::now(), &mut said)).await {
        Ok(Ended::Reached { vm, .. }) => vm.map(|vm| *vm),
        _ => None,
    }
}

async fn follow(client: &Client, namespace: &str, name: &str, goal: &Goal, begin: Instant, said: &mut String) -> Ended {
    let api: Api<StoredVm> = Api::namespaced(client.clone(), namespace);
    let mut changes = std::pin::pin!(watch_object(api, name));
    let never = |why: &str| {
        note(&format!("{}: never {goal}: {why}", title(name)));
        Ended::Failed
    };
    // Since when there is little hope, and why.
    let mut doubt: Option<(Instant, &'static str)> = None;
    loop {
        let change = match doubt {
            None => changes.next().await,
            Some((since, why)) => match timeout_at(since + PATIENCE, changes.next()).await {
                Ok(change) => change,
                Err(_) => return never(why),
            },
        };
        let Some(change) = change else { return Ended::Failed };
        let vm: Option<VirtualMachine> = match change {
            Ok(vm) => vm.map(|StoredVm(vm)| vm),
            Err(watcher::Error::InitialListFailed(error) | watcher::Error::WatchStartFailed(error)) if matches!(&error, kube::Error::Api(answer) if answer.is_forbidden() || answer.is_not_found()) =>
            {
                note(&refused(client, &title(name), &["list", "watch"], Some(namespace), &error).await);
                return Ended::Failed;
            }
            Err(error) => {
                note(&format!("{}: {}; trying again", title(name), ErrorChain(&error)));
                sleep(REST).await;
                continue;
            }
        };
        match goal.verdict(vm.as_ref()) {
            Verdict::Reached => {
                return Ended::Reached { vm: vm.map(Box::new), after: begin.elapsed() };
            }
            Verdict::Never(why) => return never(why),
            Verdict::Hardly(why) => doubt = Some((doubt.map_or_else(Instant::now, |(since, _)| since), why)),
            Verdict::NotYet => doubt = None,
        }
        let now = seen(vm.as_ref());
        if *said != now {
            note(&format!("{}: {now} ({})", title(name), seconds(begin.elapsed())));
            *said = now;
        }
    }
}

/// A time for people: `41 s`, `3 min 5 s`.
pub(super) fn seconds(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds => format!("{} min {} s", seconds / 60, seconds % 60),
    }
}
