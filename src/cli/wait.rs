//! `kubectl vm wait`: until VMs are in a state.

use std::time::{Duration, Instant};

use clap::Args;
use futures::future::join_all;

use super::{
    output::{Exit, Failure, Output, note},
    power::duration,
    vms::VmOptions,
};
use crate::{
    actions::power::{self, PowerError, Progress},
    api::{VirtualMachine, conditions},
    process::ErrorChain,
};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    vms: VmOptions,
    /// What to wait for: a phase (`running`, `stopped`, `paused`), a condition (`condition=Booted`, `condition=Ready=False`), or `deleted`.
    #[arg(long = "for", value_name = "WHAT", default_value = "running", value_parser = Goal::parse)]
    goal: Goal,
    /// How long to wait.
    #[arg(long, value_name = "TIME", default_value = "5m", value_parser = duration)]
    timeout: Duration,
}

/// What is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Goal {
    Phase(String),
    Condition { type_: String, status: String },
    Deleted,
}

impl Goal {
    fn parse(text: &str) -> Result<Self, String> {
        if let Some(condition) = text.strip_prefix("condition=") {
            let (type_, status) = condition.split_once('=').unwrap_or((condition, "True"));
            // Written as kubectl takes it, in any case.
            let status = match status.to_ascii_lowercase().as_str() {
                "true" => "True",
                "false" => "False",
                "unknown" => "Unknown",
                _ => return Err(format!("{status}: a condition is True, False or Unknown")),
            };
            return Ok(Self::Condition { type_: type_.into(), status: status.into() });
        }
        match text.to_ascii_lowercase().as_str() {
            "deleted" | "delete" => Ok(Self::Deleted),
            "running" => Ok(Self::Phase("Running".into())),
            "stopped" => Ok(Self::Phase("Stopped".into())),
            "paused" => Ok(Self::Phase("Paused".into())),
            _ => Err("write running, stopped, paused, condition=TYPE, condition=TYPE=False, or deleted".into()),
        }
    }

    fn progress(&self, vm: &VirtualMachine) -> Progress {
        let status = vm.status.as_ref();
        let phase = power::phase(vm);
        let is_current = status.is_some_and(|status| status.observed_generation >= vm.metadata.generation);
        let conditions = status.map(|status| &status.conditions[..]).unwrap_or_default();
        let (is_so, now) = match self {
            Self::Phase(wanted) => (phase == *wanted, format!("phase {phase}")),
            Self::Condition { type_, status } => {
                let condition = conditions::find(conditions, type_);
                let now = condition.map_or_else(
                    || format!("there is no condition {type_} yet; phase {phase}"),
                    |condition| format!("{type_} is {}: {}", condition.status, condition.message),
                );
                (condition.is_some_and(|condition| condition.status == *status), now)
            }
            Self::Deleted => (false, format!("it exists; phase {phase}")),
        };
        if is_so && is_current { Progress::Done } else { Progress::Waits(now) }
    }

    fn text(&self) -> String {
        match self {
            Self::Phase(phase) => phase.to_lowercase(),
            Self::Condition { type_, status } => format!("{type_}={status}"),
            Self::Deleted => "deleted".into(),
        }
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let cluster = options.vms.cluster.connect().await.map_err(|error| Failure::new(ErrorChain(&error).to_string()))?;
    let vms = options.vms.find(&cluster).await?;
    let begun = Instant::now();
    let tasks = vms.iter().map(async |vm| {
        let waited = vm.wait(options.timeout, |vm| options.goal.progress(vm), |_| ()).await;
        match waited {
            Err(PowerError::Deleted) if options.goal == Goal::Deleted => Ok(begun.elapsed()),
            other => other.map(|_| begun.elapsed()),
        }
    });
    let outcomes = join_all(tasks).await;
    let mut worst = Vec::new();
    for (vm, outcome) in vms.iter().zip(outcomes) {
        match outcome {
            Ok(after) => writeln!(output, "vm/{} {} ({}s)", vm.name(), options.goal.text(), after.as_secs())?,
            Err(error) => {
                note(&format!("vm/{}: {}", vm.name(), ErrorChain(&error)));
                worst.push(if matches!(error, PowerError::TimedOut { .. }) { Exit::TimedOut } else { Exit::Negative });
            }
        }
    }
    Ok(match worst.iter().max() {
        None => Exit::Success,
        Some(_) if worst.len() < vms.len() => Exit::Partly,
        Some(exit) => *exit,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_goal_is_a_phase_a_condition_or_the_end() {
        assert_eq!(Goal::parse("Stopped"), Ok(Goal::Phase("Stopped".into())));
        assert_eq!(Goal::parse("delete"), Ok(Goal::Deleted));
        let condition = |status: &str| Ok(Goal::Condition { type_: "Booted".into(), status: status.into() });
        assert_eq!(Goal::parse("condition=Booted"), condition("True"));
        assert_eq!(Goal::parse("condition=Booted=false"), condition("False"));
        assert!(Goal::parse("condition=Booted=maybe").is_err() && Goal::parse("up").is_err());
    }
}
