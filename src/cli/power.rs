//! `kubectl vm start`, `stop`, `restart`, `reboot`, `reset`, `pause` and `resume`. What they write is [`actions::power`](crate::actions::power).

use std::time::Duration;

use clap::Args;
use futures::future::join_all;
use k8s_openapi::{
    api::core::v1::Pod,
    jiff::{SignedDuration, Timestamp},
};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DeleteParams, DynamicObject, Preconditions},
};
use tokio::time::Instant;

use super::{
    explain::time_of,
    output::{Exit, Failure, Output},
    vms::{Selection, refused_about, title},
    wait::{self, Goal, seconds},
    write::{self, CommandResult, DryRun, WriteOptions},
};
use crate::{
    actions::{
        self, FoundVm,
        power::{Command, PowerRefusal, decide},
        write::Done,
    },
    api::{VirtualMachine, status::whole_seconds},
};

/// What the commands that change VMs have in common.
#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    write: WriteOptions,
}

#[derive(Args)]
pub(super) struct StartOptions {
    #[command(flatten)]
    some_time: SomeTime,
    #[command(flatten)]
    common: Options,
}

/// For how long.
#[derive(Args)]
struct SomeTime {
    /// Only for this time, such as 2h (at most 720h), whatever spec.vm.state says: also where Git applies it. Then the spec decides again.
    #[arg(long = "for", value_name = "TIME", value_parser = some_time)]
    time: Option<Duration>,
}

impl SomeTime {
    /// When the time ends that begins now.
    fn end(&self) -> Option<Timestamp> {
        self.time.and_then(|time| Timestamp::now().checked_add(SignedDuration::try_from(time).ok()?).ok())
    }
}

fn some_time(text: &str) -> Result<Duration, String> {
    let time = wait::time(text)?;
    let longest = actions::power::LONGEST.as_secs() / 3600;
    match time {
        time if time < Duration::from_secs(1) => Err("it is at least a second".into()),
        time if time > actions::power::LONGEST => Err(format!("it is at most {longest}h")),
        time => Ok(time),
    }
}

#[derive(Args)]
pub(super) struct StopOptions {
    /// Do not wait for the guest: its disks are as after a power failure.
    #[arg(long, conflicts_with = "grace_period")]
    force: bool,
    /// How long the guest has to shut down, such as 30s, instead of the VM's powerdownTimeout.
    #[arg(long, value_name = "TIME", value_parser = wait::time)]
    grace_period: Option<Duration>,
    #[command(flatten)]
    some_time: SomeTime,
    #[command(flatten)]
    common: Options,
}

/// The namespace and the name of a VM, and what is waited for.
type Wait = (String, String, Goal);

pub(super) async fn start(options: &StartOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let command = Command::Start { until: options.some_time.end() };
    Job { options: &options.common, command, grace_period: None }.run(output).await
}

pub(super) async fn stop(options: &StopOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let command = Command::Stop { force: options.force, until: options.some_time.end() };
    Job { options: &options.common, command, grace_period: options.grace_period }.run(output).await
}

pub(super) async fn run(command: Command, options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    Job { options, command, grace_period: None }.run(output).await
}

/// A command for some VMs.
struct Job<'a> {
    options: &'a Options,
    command: Command,
    grace_period: Option<Duration>,
}

impl Job<'_> {
    async fn run(&self, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let begin = Instant::now();
        let found = self.options.selection.find().await?;
        let (client, write) = (&found.cluster.client.clone(), &self.options.write);
        let (tally, waits) = write.each(found, async |vm| self.change(client, vm).await, output).await?;
        let waits = waits.iter().map(|(namespace, name, goal)| async move {
            let end = wait::wait(client, namespace, name, goal, begin, write.limit.timeout).await;
            (name.clone(), end)
        });
        let ends = join_all(waits).await;
        let waited = if ends.is_empty() {
            None
        } else {
            let lines = if write.output.is_none() { Some(&mut *output) } else { None };
            Some(wait::report(ends, 0, lines, |name, phase, after| {
                format!("{} {} (now {phase}, {})", title(name), self.past(), seconds(after))
            })?)
        };
        write.finish(&tally, waited, output)
    }

    async fn change(&self, client: &Client, found: FoundVm) -> Result<CommandResult<Wait>, String> {
        let (namespace, name, write) = (found.namespace(), found.name(), &self.options.write);
        let is_forced = matches!(self.command, Command::Stop { force: true, .. });
        let needs_pod = is_forced || self.grace_period.is_some();
        let pod = if needs_pod { self.pod(client, &found).await? } else { None };
        let pod_uid = pod.as_ref().and_then(|pod| pod.metadata.uid.as_deref());
        let decide = |found: &FoundVm| {
            let decision = decide(&found.vm, self.command, pod_uid, write.yes, Timestamp::now());
            decision.map_err(|refusal| help(self.command, &name, &refusal))
        };
        let (before, object) = match write::change(client, found, write.by(), decide).await? {
            Done::Unchanged { found, why } => return self.unchanged(client, found, pod.as_ref(), &why).await,
            Done::Written { before, object, .. } => (before, *object),
        };
        if let (Some(time), Some(pod), None) = (self.grace_period, &pod, write.dry_run) {
            let what = format!("{} stopped, but its Pod keeps its time", title(&name));
            if let Err(error) = shorten(client, &namespace, pod, time).await {
                return Err(of_pod(client, &what, "delete", &namespace, &error).await);
            }
        }
        let line = format!("{} {}{}", title(&name), self.past(), DryRun::mark(write.dry_run));
        let goal = self.goal(&before.vm, &object).filter(|_| write.waits());
        Ok(CommandResult { object, line, wait: goal.map(|goal| (namespace, name, goal)) })
    }

    /// A VM of which nothing is written. The guest of one that is stopping already may get less time.
    async fn unchanged(
        &self,
        client: &Client,
        found: FoundVm,
        pod: Option<&Pod>,
        why: &str,
    ) -> Result<CommandResult<Wait>, String> {
        let (Some(time), Some(pod), None) = (self.grace_period, pod, self.options.write.dry_run) else {
            return Ok(CommandResult::unchanged(found, why));
        };
        let now = time_of(client).await.unwrap_or_else(Timestamp::now);
        let Some(grace) = grace(pod, time, now) else {
            return Ok(CommandResult::unchanged(
                found,
                "is stopping already, and its guest has no more time than that",
            ));
        };
        let title = title(&found.name());
        match shorten(client, &found.namespace(), pod, grace).await {
            Ok(()) => {
                let line = format!("{title}: its guest has {} from now", seconds(time));
                Ok(CommandResult { object: found.object, line, wait: None })
            }
            Err(error) => {
                let what = format!("{title}: its Pod keeps its time");
                Err(of_pod(client, &what, "delete", &found.namespace(), &error).await)
            }
        }
    }

    /// The Pod of a VM, which has its name and belongs to it.
    async fn pod(&self, client: &Client, found: &FoundVm) -> Result<Option<Pod>, String> {
        let api: Api<Pod> = Api::namespaced(client.clone(), &found.namespace());
        let name = found.name();
        let pod = match api.get_opt(&name).await {
            Ok(pod) => pod,
            Err(error) => return Err(of_pod(client, &title(&name), "get", &found.namespace(), &error).await),
        };
        let uid = found.vm.uid();
        Ok(pod.filter(|pod| pod.owner_references().iter().any(|owner| Some(&owner.uid) == uid.as_ref())))
    }

    /// What `--wait` waits for after the VM was written. The runner of the VM-Operator reports neither pauses nor resets nor reboots.
    fn goal(&self, before: &VirtualMachine, written: &DynamicObject) -> Option<Goal> {
        let count = |field: &str| u32::try_from(written.data["spec"]["vm"][field].as_u64()?).ok();
        let has_our_runner = before.status.as_ref().is_some_and(|status| status.runner.config_digest.is_some());
        match self.command {
            Command::Start { .. } => Some(Goal::Running),
            Command::Stop { .. } => Some(Goal::Stopped),
            Command::Restart => {
                Some(Goal::Restarted { former: before.status.as_ref().and_then(|status| status.pod_uid.clone()) })
            }
            Command::Resume => Some(Goal::Running),
            Command::Pause | Command::Reset | Command::Reboot if !has_our_runner => None,
            Command::Pause => Some(Goal::Paused),
            Command::Reset => count("resetCount").map(|count| Goal::Reset { count }),
            Command::Reboot => count("rebootCount").map(|count| Goal::Rebooted { count }),
        }
    }

    fn past(&self) -> String {
        let (past, end) = match self.command {
            Command::Start { until } => ("started", until),
            Command::Stop { force: _, until } => ("stopped", until),
            Command::Restart => ("restarted", None),
            Command::Reset => ("reset", None),
            Command::Reboot => ("asked to reboot", None),
            Command::Pause => ("paused", None),
            Command::Resume => ("resumed", None),
        };
        end.map_or_else(|| past.to_owned(), |end| format!("{past} until {}", whole_seconds(end)))
    }
}

/// Why a command for the VM of this name is refused, with what helps.
fn help(command: Command, name: &str, refusal: &PowerRefusal) -> String {
    let why = refusal.to_string();
    match (refusal, command) {
        (PowerRefusal::Git { .. }, Command::Start { .. } | Command::Stop { .. }) => {
            format!("{why}, or give --for 2h to do it for that time, or --yes to do it until the next sync")
        }
        (PowerRefusal::Git { .. }, _) => format!("{why}, or give --yes to do it until the next sync"),
        (PowerRefusal::Stopped, _) => format!("{why}: kubectl vm start {name}"),
        (PowerRefusal::WouldFail { .. }, _) => format!("{why}; correct it, or give --yes to restart it nevertheless"),
        (PowerRefusal::Deleted | PowerRefusal::NoGuest { .. }, _) => why,
    }
}

/// The grace period with which the guest of a Pod has this time from now; `None`: it has no more than that already. The period of a Pod that is
/// being deleted counts from when that began.
fn grace(pod: &Pod, time: Duration, now: Timestamp) -> Option<Duration> {
    let (Some(end), Some(whole)) = (&pod.metadata.deletion_timestamp, pod.metadata.deletion_grace_period_seconds)
    else {
        return Some(time);
    };
    let whole = u64::try_from(whole).unwrap_or_default();
    let left = u64::try_from(now.duration_until(end.0).as_secs()).unwrap_or_default();
    (time.as_secs() < left).then(|| Duration::from_secs(whole.saturating_sub(left - time.as_secs())))
}

/// What the API server said about the Pod of a VM.
async fn of_pod(client: &Client, what: &str, verb: &str, namespace: &str, error: &kube::Error) -> String {
    let resource = ApiResource::erase::<Pod>(&());
    refused_about(client, &resource, what, &[verb], Some(namespace), error).await
}

/// Deletes a Pod that is to go, with less time for its guest than it would have.
async fn shorten(client: &Client, namespace: &str, pod: &Pod, time: Duration) -> kube::Result<()> {
    let parameters = DeleteParams {
        // With 0 the API server would forget the Pod at once, while QEMU may still write to its disks.
        grace_period_seconds: Some(u32::try_from(time.as_secs()).unwrap_or(u32::MAX).max(1)),
        preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
        ..DeleteParams::default()
    };
    match Api::<Pod>::namespaced(client.clone(), namespace).delete(&pod.name_any(), &parameters).await {
        // It went in the meantime.
        Err(kube::Error::Api(answer)) if answer.is_not_found() || answer.is_conflict() => Ok(()),
        result => result.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{ownership::Applier, test_support::noon};

    #[test]
    fn the_time_of_a_guest_counts_from_now() {
        let pod = |deletion: Option<(&str, i64)>| {
            let mut pod = Pod::default();
            if let Some((end, whole)) = deletion {
                pod.metadata.deletion_timestamp = serde_json::from_value(json!(end)).unwrap();
                pod.metadata.deletion_grace_period_seconds = Some(whole);
            }
            pod
        };
        // Noon is 2027-01-15T08:00:00Z.
        for (deletion, time, expected) in [
            (None, 30, Some(30)),
            // It began 100 s ago.
            (Some(("2027-01-15T08:13:20Z", 900)), 30, Some(130)),
            (Some(("2027-01-15T08:13:20Z", 900)), 799, Some(899)),
            (Some(("2027-01-15T08:13:20Z", 900)), 800, None),
            (Some(("2027-01-15T08:13:20Z", 900)), 900, None),
            // It is over, or its clock is another one.
            (Some(("2027-01-15T07:59:00Z", 900)), 30, None),
            (Some(("2027-01-15T09:00:00Z", 900)), 30, Some(0)),
        ] {
            let found = grace(&pod(deletion), Duration::from_secs(time), noon());
            assert_eq!(found.map(|grace| grace.as_secs()), expected, "{deletion:?} {time}");
        }
    }

    #[test]
    fn what_helps_is_an_option_that_the_command_has() {
        let applier = Applier { manager: "flux".into(), since: None, is_gitops: true };
        let git = |field| PowerRefusal::Git { applier: applier.clone(), field };
        let start = Command::Start { until: None };
        let git_says = |field: &str| {
            format!("flux applies spec.vm.{field} from Git, and takes back what others write; change it in Git")
        };
        let until_sync = "or give --yes to do it until the next sync";
        for (command, refusal, expected) in [
            (
                start,
                git("state"),
                format!(
                    "{}, or give --for 2h to do it for that time, or --yes to do it until the next sync",
                    git_says("state")
                ),
            ),
            (Command::Pause, git("paused"), format!("{}, {until_sync}", git_says("paused"))),
            (Command::Resume, git("paused"), format!("{}, {until_sync}", git_says("paused"))),
            (
                Command::Restart,
                PowerRefusal::Stopped,
                "it is stopped; a start is what it needs: kubectl vm start apple".into(),
            ),
            (start, PowerRefusal::Deleted, "it is being deleted".into()),
            (Command::Pause, PowerRefusal::NoGuest { reason: None }, "its guest does not run".into()),
        ] {
            assert_eq!(help(command, "apple", &refusal), expected, "{command:?}");
        }
    }
}
