//! `kubectl vm start` and the other commands that act on a VM's power. What they do to a VM is [`actions::power`].
//!
//! Each VM is one task, and all run at once; a line of output says what became of each.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use futures::future::join_all;
use k8s_openapi::jiff::Timestamp;

use super::{
    output::{Exit, Failure, Output, note},
    vms::VmOptions,
};
use crate::{
    actions::{
        VmHandle,
        power::{self, Change, Given, Order, PowerError},
    },
    process::ErrorChain,
};

/// What all these commands have.
#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    vms: VmOptions,
    /// Wait until it is done.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1, default_missing_value = "true", require_equals = true)]
    wait: bool,
    /// How long to wait.
    #[arg(long, value_name = "TIME", default_value = "15m", value_parser = duration)]
    timeout: Duration,
    /// Only say what would be done: `client` asks the cluster for the VMs alone, `server` has the API server check the change.
    #[arg(long, value_name = "WHERE", num_args = 0..=1, default_missing_value = "client", require_equals = true)]
    dry_run: Option<DryRun>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum DryRun {
    Client,
    Server,
}

/// `kubectl vm stop`.
#[derive(Args)]
pub(super) struct StopOptions {
    #[command(flatten)]
    options: Options,
    /// End the guest at once, without its shutdown. It may lose data.
    #[arg(long, conflicts_with = "grace_period")]
    force: bool,
    /// End the guest without its shutdown if it has not shut down within this time.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    grace_period: Option<Duration>,
}

pub(super) fn duration(text: &str) -> Result<Duration, String> {
    // kubectl's flag takes seconds.
    if let Ok(seconds) = text.parse() {
        return Ok(Duration::from_secs(seconds));
    }
    let time: kube::core::Duration = text.parse().map_err(|error| format!("{error}"))?;
    if time.is_negative() {
        return Err("a time is not negative".into());
    }
    Ok(time.into())
}

pub(super) async fn stop(options: &StopOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let StopOptions { options, force, grace_period } = options;
    let grace = if *force { Some(Duration::ZERO) } else { *grace_period };
    run_all(options, Orders { order: Order::Stop, grace }, output).await
}

pub(super) async fn run(order: Order, options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    run_all(options, Orders { order, grace: None }, output).await
}

/// An order, and for a stop after which time it is forced.
#[derive(Clone, Copy)]
struct Orders {
    order: Order,
    grace: Option<Duration>,
}

async fn run_all(options: &Options, orders: Orders, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let cluster = options.vms.cluster.connect().await.map_err(|error| Failure::new(ErrorChain(&error).to_string()))?;
    let vms = options.vms.find(&cluster).await?;
    if vms.is_empty() {
        note("no VMs are selected");
        return Ok(Exit::Success);
    }
    let shows_namespace = vms.iter().any(|vm| vm.namespace() != vms[0].namespace());
    let tasks = vms.iter().map(async |vm| {
        let name =
            if shows_namespace { format!("vm/{}/{}", vm.namespace(), vm.name()) } else { format!("vm/{}", vm.name()) };
        let outcome = one(vm, &name, orders, options).await;
        (name, outcome)
    });
    let outcomes = join_all(tasks).await;
    let number = outcomes.len();
    let mut worst = Vec::new();
    for (name, outcome) in outcomes {
        match outcome {
            Ok(line) => writeln!(output, "{name} {line}")?,
            Err(error) => {
                note(&format!("{name}: {}", explained(&error)));
                worst.push(if matches!(error, PowerError::TimedOut { .. }) { Exit::TimedOut } else { Exit::Negative });
            }
        }
    }
    Ok(match worst.iter().max() {
        None => Exit::Success,
        Some(_) if worst.len() < number => Exit::Partly,
        Some(exit) => *exit,
    })
}

/// The error, with the right that is missing.
fn explained(error: &PowerError) -> String {
    match error {
        PowerError::Request(kube::Error::Api(answer)) if answer.code == 404 => {
            format!("{} (is it in another namespace? -n NAMESPACE)", ErrorChain(error))
        }
        _ => ErrorChain(error).to_string(),
    }
}

/// Gives the order to a VM, and returns the rest of the line about it.
async fn one(
    vm: &VmHandle,
    name: &str,
    Orders { order, grace }: Orders,
    options: &Options,
) -> Result<String, PowerError> {
    let begun = Instant::now();
    let order = if grace == Some(Duration::ZERO) { Order::Force } else { order };
    if options.dry_run == Some(DryRun::Client) {
        let change = vm.plan(order).await?;
        let done = if change == Change::Unchanged { "unchanged" } else { order.past() };
        return Ok(format!("{done} (dry run)"));
    }
    let given = vm.order(order, options.dry_run.is_some()).await?;
    warn_of_applier(name, &given);
    if options.dry_run.is_some() {
        let done = if given.change == Change::Unchanged { "unchanged" } else { order.past() };
        return Ok(format!("{done} (server dry run)"));
    }
    let is_done = |vm| power::progress(order, &given.before, vm) == power::Progress::Done;
    if given.change == Change::Unchanged && is_done(&given.before) {
        return Ok(format!("unchanged (already {})", power::phase(&given.before)));
    }
    if !options.wait {
        return Ok(format!("will be {}", order.past()));
    }
    let told = |what: &str| {
        if std::io::stderr().is_terminal() {
            note(&format!("{name}: {what} ({}s)", begun.elapsed().as_secs()));
        }
    };
    let wait = async |order: Order, limit: Duration| {
        vm.wait(limit, |vm| power::progress(order, &given.before, vm), told).await
    };
    let waited = match (order, grace) {
        (Order::Stop, Some(grace)) => match wait(Order::Stop, grace.min(options.timeout)).await {
            Err(PowerError::TimedOut { .. }) if grace < options.timeout => {
                note(&format!("{name}: the guest has not shut down within {}s and is ended", grace.as_secs()));
                vm.order(Order::Force, false).await?;
                wait(Order::Force, options.timeout - grace).await
            }
            other => other,
        },
        _ => wait(order, options.timeout).await,
    };
    let now = waited?;
    Ok(format!("{} (now {}, {}s)", order.past(), power::phase(&now), begun.elapsed().as_secs()))
}

/// Git would set back what a person has changed.
fn warn_of_applier(name: &str, given: &Given) {
    let (Change::Patch(_), Some(applier)) = (&given.change, &given.applier) else { return };
    let since =
        applier.since.map(|since| format!(", last {} ago", power::ago(since, Timestamp::now()))).unwrap_or_default();
    note(&format!(
        "{name}: {} applies {}{since}: its next sync sets it back. Change it in Git, or remove the line there: then the VM keeps what \
         people set",
        applier.manager, applier.field
    ));
}
