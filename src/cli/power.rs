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
use serde_json::json;
use tokio::time::Instant;

use super::{
    format::print_objects,
    output::{Exit, Failure, Output, note},
    vms::{FoundVm, Selection, refused, refused_about, title},
    wait::{self, Goal, seconds},
    write::{DryRun, WriteOptions, combined},
};
use crate::{
    actions::{
        self,
        power::{Change, Command, Decision, Refusal, decide},
    },
    api::status::whole_seconds,
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

/// What was done with a VM.
enum Done {
    Unchanged(&'static str),
    /// The VM as it is now, and the UID of the Pod that it had.
    Written {
        object: Box<DynamicObject>,
        former: Option<String>,
    },
}

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
        let client = &found.cluster.client;
        let (mut failed, mut succeeded) = (found.missing, 0);
        let (mut objects, mut waits) = (Vec::new(), Vec::new());
        for vm in &found.vms {
            match self.change(client, vm).await {
                Err(line) => {
                    note(&line);
                    failed += 1;
                }
                Ok(Done::Unchanged(why)) => {
                    if self.options.write.output.is_none() {
                        writeln!(output, "{} unchanged ({why})", vm.title())?;
                    }
                    objects.push(json!(vm.object));
                    succeeded += 1;
                }
                Ok(Done::Written { object, former }) => {
                    objects.push(json!(object));
                    let goal = self.goal(former).filter(|_| self.options.write.waits());
                    match goal {
                        Some(goal) => waits.push((vm.namespace(), vm.vm.name_any(), goal)),
                        None => {
                            succeeded += 1;
                            if self.options.write.output.is_none() {
                                writeln!(
                                    output,
                                    "{} {}{}",
                                    vm.title(),
                                    self.past(),
                                    DryRun::mark(self.options.write.dry_run)
                                )?;
                            }
                        }
                    }
                }
            }
        }
        output.flush()?;
        let waits = waits.iter().map(|(namespace, name, goal)| async move {
            let end = wait::wait(client, namespace, name, goal, begin, self.options.write.limit.timeout).await;
            (name.clone(), end)
        });
        let ends = join_all(waits).await;
        let waited = if ends.is_empty() {
            None
        } else {
            let lines = if self.options.write.output.is_none() { Some(&mut *output) } else { None };
            Some(wait::report(ends, 0, lines, |name, phase, after| {
                format!("{} {} (now {phase}, {})", title(name), self.past(), seconds(after))
            })?)
        };
        if let Some(format) = &self.options.write.output {
            print_objects(&objects, objects.len() <= 1, format, output)?;
        }
        Ok(combined(waited, succeeded, failed))
    }

    /// Decides and writes.
    async fn change(&self, client: &Client, found: &FoundVm) -> Result<Done, String> {
        let FoundVm { object, vm } = found;
        let namespace = &found.namespace();
        let is_forced = matches!(self.command, Command::Stop { force: true, .. });
        let needs_pod = is_forced || self.grace_period.is_some();
        let pod = if needs_pod { self.pod(client, found).await? } else { None };
        let pod_uid = pod.as_ref().and_then(|pod| pod.metadata.uid.clone());
        let decision = decide(vm, self.command, pod_uid.as_deref(), self.options.write.yes, Timestamp::now());
        let (change, applier) = match decision.map_err(|refusal| self.words(found, &refusal))? {
            Decision::Unchanged(why) => return Ok(Done::Unchanged(why)),
            Decision::Write { change, applier } => (change, applier),
        };
        if let Some(applier) = applier {
            let what = if applier.is_gitops { "which takes this back" } else { "whose next apply takes this back" };
            note(&format!("{}: {} applies spec.vm.state too, {what}", found.title(), applier.manager));
        }
        let former = vm.status.as_ref().and_then(|status| status.pod_uid.clone());
        if self.options.write.dry_run == Some(DryRun::Client) {
            return Ok(Done::Written { object: Box::new(object.clone()), former });
        }
        let written = self.write(client, namespace, &vm.name_any(), &change).await;
        let object = match written {
            Ok(object) => object,
            Err(error) => return Err(refused(client, &found.title(), &["patch"], Some(namespace), &error).await),
        };
        if let (Some(time), Some(pod), None) = (self.grace_period, &pod, self.options.write.dry_run) {
            let what = format!("{} stopped, but its Pod keeps its time", found.title());
            if let Err(error) = shorten(client, namespace, pod, time).await {
                return Err(of_pod(client, &what, "delete", namespace, &error).await);
            }
        }
        Ok(Done::Written { object: Box::new(object), former })
    }

    async fn write(
        &self,
        client: &Client,
        namespace: &str,
        name: &str,
        change: &Change,
    ) -> kube::Result<DynamicObject> {
        match change {
            Change::Merge(body) => self.options.write.merge(client, namespace, name, body).await,
            Change::Apply(body) => self.options.write.apply(client, namespace, name, body).await,
        }
    }

    /// The Pod of a VM, which has its name and belongs to it.
    async fn pod(&self, client: &Client, found: &FoundVm) -> Result<Option<Pod>, String> {
        let api: Api<Pod> = Api::namespaced(client.clone(), &found.namespace());
        let name = found.vm.name_any();
        let pod = match api.get_opt(&name).await {
            Ok(pod) => pod,
            Err(error) => return Err(of_pod(client, &found.title(), "get", &found.namespace(), &error).await),
        };
        let uid = found.vm.uid();
        Ok(pod.filter(|pod| pod.owner_references().iter().any(|owner| Some(&owner.uid) == uid.as_ref())))
    }

    /// A refusal, with what helps.
    fn words(&self, found: &FoundVm, refusal: &Refusal) -> String {
        let (title, name) = (found.title(), found.vm.name_any());
        match refusal {
            Refusal::Git { .. } => format!(
                "{title}: {refusal}, or give --for 2h to do it for that time, or --yes to do it until the next sync"
            ),
            Refusal::Stopped => format!("{title}: {refusal}: kubectl vm start {name}"),
            Refusal::Deleted | Refusal::NoGuest { .. } => format!("{title}: {refusal}"),
        }
    }

    /// What `--wait` waits for. The others are done when they are written.
    fn goal(&self, former: Option<String>) -> Option<Goal> {
        match self.command {
            Command::Start { .. } => Some(Goal::Running),
            Command::Stop { .. } => Some(Goal::Stopped),
            Command::Restart => Some(Goal::Restarted { former }),
            Command::Resume => Some(Goal::Running),
            Command::Reset | Command::Reboot | Command::Pause => None,
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

/// What the API server said about the Pod of a VM.
async fn of_pod(client: &Client, what: &str, verb: &str, namespace: &str, error: &kube::Error) -> String {
    let resource = ApiResource::erase::<Pod>(&());
    refused_about(client, &resource, what, &[verb], Some(namespace), error).await
}

/// Deletes a Pod that is to go, with less time for its guest than it would have.
async fn shorten(client: &Client, namespace: &str, pod: &Pod, time: Duration) -> kube::Result<()> {
    let parameters = DeleteParams {
        grace_period_seconds: Some(u32::try_from(time.as_secs()).unwrap_or(u32::MAX)),
        preconditions: Some(Preconditions { uid: pod.uid(), resource_version: None }),
        ..DeleteParams::default()
    };
    match Api::<Pod>::namespaced(client.clone(), namespace).delete(&pod.name_any(), &parameters).await {
        // It went in the meantime.
        Err(kube::Error::Api(answer)) if answer.is_not_found() || answer.is_conflict() => Ok(()),
        result => result.map(drop),
    }
}
