//! `kubectl vm rollout`: the restarts that wait, in waves. Which VMs come next is [`actions::rollout`](crate::actions::rollout).

use std::collections::BTreeMap;

use clap::Args;
use futures::future::join_all;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::time::Instant;

use super::{
    output::{Exit, Failure, Output, counted, note},
    vms::{Selection, api, refused, title, understood},
    wait::{self, Ended, Goal, Limit, seconds},
    write::{self, DryRun},
};
use crate::{
    actions::{
        FoundVm, Trial,
        power::{Command, decide},
        rollout::{Next, Progress, Standing, Wave, next, standing},
        write::{By, Done},
    },
    api::{VirtualMachine, conditions},
    ownership::COMMAND_MANAGER,
};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// How many VMs are restarted at once: a number, or a percentage of those that wait.
    #[arg(long, value_name = "N|N%", default_value = "1")]
    wave: Wave,
    /// Say which VMs would be restarted, in which waves, without doing it; with =server also whether the change would be accepted.
    #[arg(long, value_name = "HOW", num_args = 0..=1, require_equals = true, default_missing_value = "client")]
    dry_run: Option<DryRun>,
    /// The name under which the API server notes the change.
    #[arg(long, value_name = "NAME", default_value = COMMAND_MANAGER)]
    field_manager: String,
    /// How long each VM has to become Ready.
    #[command(flatten)]
    limit: Limit,
}

/// A VM of the rollout.
struct Member {
    found: FoundVm,
    progress: Progress,
    /// The UID of its Pod before the restart.
    former: Option<String>,
    /// Whether its guest had booted before.
    was_booted: bool,
}

impl Member {
    fn new(found: FoundVm, progress: Progress) -> Self {
        let status = found.vm.status.as_ref();
        let was_booted = status.is_some_and(|status| conditions::is_true(&status.conditions, conditions::BOOTED));
        let former = status.and_then(|status| status.pod_uid.clone());
        // Of a VM that is just starting, every Pod is the right one.
        let former = former.filter(|_| progress == Progress::Untouched);
        Self { found, progress, former, was_booted: was_booted && progress == Progress::Untouched }
    }

    fn title(&self) -> String {
        title(&self.found.name())
    }

    fn goal(&self) -> Goal {
        Goal::RolledOut { former: self.former.clone(), booted: self.was_booted }
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let found = options.selection.find().await?;
    let missing = found.missing;
    let client = &found.cluster.client;
    let (mut members, mut blocked, mut current) = (Vec::new(), 0, 0);
    for found in found.vms {
        let title = title(&found.name());
        let progress = match standing(&found.vm, Timestamp::now()) {
            Standing::Waits => Progress::Untouched,
            Standing::Restarted => {
                note(&format!("{title}: it was restarted and is not Ready yet: the first wave waits for it"));
                Progress::Restarted
            }
            Standing::Down => {
                writeln!(output, "{title} left out (it does not run; its next start brings the changes)")?;
                Progress::LeftOut
            }
            Standing::Blocked(why) => {
                note(&format!("{title}: it can't be restarted, because its templates can't be rendered: {why}"));
                blocked += 1;
                Progress::LeftOut
            }
            Standing::Current => {
                current += 1;
                continue;
            }
        };
        members.push(Member::new(found, progress));
    }
    let waiting = members.iter().filter(|member| member.progress == Progress::Untouched).count();
    let size = options.wave.size(waiting);
    if waiting == 0 {
        let others = if current > 0 {
            format!(" ({} without changes that wait)", counted(current, "VM"))
        } else {
            String::new()
        };
        writeln!(output, "nothing to restart{others}")?;
    }
    let mut rollout = Rollout { options, client, members, size, waves: waiting.div_ceil(size) };
    let exit = match options.dry_run {
        Some(how) => rollout.announce(how, output).await?,
        None => rollout.run(output).await?,
    };
    Ok(match exit {
        Exit::Success if blocked + missing > 0 => {
            if waiting > 0 {
                Exit::Partly
            } else {
                Exit::Negative
            }
        }
        exit => exit,
    })
}

struct Rollout<'a> {
    options: &'a Options,
    client: &'a Client,
    members: Vec<Member>,
    size: usize,
    waves: usize,
}

impl Rollout<'_> {
    /// The order of what would be done.
    async fn announce(&self, how: DryRun, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let mut failed = 0;
        let waiting = self.members.iter().filter(|member| member.progress == Progress::Untouched);
        for (number, member) in waiting.enumerate() {
            let title = member.title();
            if how == DryRun::Server
                && let Err(line) = self.restart(member.found.clone()).await
            {
                note(&line);
                failed += 1;
                continue;
            }
            let pending = member.found.vm.status.iter().flat_map(|status| &status.pending_changes);
            let paths: Vec<&str> = pending.map(|change| change.path.as_str()).collect();
            let (wave, mark) = (number / self.size + 1, DryRun::mark(Some(how)));
            writeln!(output, "{title} restarted in wave {wave} of {}: {}{mark}", self.waves, paths.join(", "))?;
        }
        Ok(Exit::negative_if(failed > 0))
    }

    async fn run(&mut self, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let mut wave = 0;
        loop {
            let progress: Vec<Progress> = self.members.iter().map(|member| member.progress).collect();
            match next(&progress, self.size) {
                Next::Restart(which) => {
                    wave += 1;
                    let names: Vec<String> = which.iter().map(|at| self.members[*at].title()).collect();
                    note(&format!("wave {wave} of {}: {}", self.waves, names.join(", ")));
                    for at in which {
                        self.begin(at, output).await?;
                    }
                }
                Next::Wait(which) => self.wait(&which, output).await?,
                Next::Stop { failed, untouched } => {
                    self.explain_end(&failed, &untouched);
                    return Ok(Exit::Negative);
                }
                Next::Finished => return Ok(Exit::Success),
            }
        }
    }

    /// Restarts a VM, if that is still what it needs: others may have done it meanwhile.
    async fn begin(&mut self, at: usize, output: &mut Output<'_>) -> Result<(), Failure> {
        let (namespace, name) = (self.members[at].found.namespace(), self.members[at].found.name());
        let title = title(&name);
        let now = match api(self.client, &namespace).get(&name).await {
            Ok(object) => understood(object)?,
            Err(error) => {
                note(&refused(self.client, &title, &["get"], Some(&namespace), &error).await);
                self.members[at].progress = Progress::Failed;
                return Ok(());
            }
        };
        let progress = match standing(&now.vm, Timestamp::now()) {
            Standing::Waits => match self.restart(now).await {
                Ok(before) => {
                    self.members[at] = Member::new(before, Progress::Untouched);
                    Progress::Restarted
                }
                Err(line) => {
                    note(&line);
                    Progress::Failed
                }
            },
            Standing::Restarted => Progress::Restarted,
            Standing::Down => {
                writeln!(output, "{title} left out (it was stopped meanwhile)")?;
                Progress::LeftOut
            }
            Standing::Current => {
                writeln!(output, "{title} unchanged (it was restarted meanwhile)")?;
                Progress::Done
            }
            Standing::Blocked(why) => {
                note(&format!("{title}: it can't be restarted, because its templates can't be rendered: {why}"));
                Progress::Failed
            }
        };
        self.members[at].progress = progress;
        Ok(())
    }

    /// Restarts a VM. Returns it as it was.
    async fn restart(&self, found: FoundVm) -> Result<FoundVm, String> {
        let by = By { field_manager: &self.options.field_manager, trial: self.options.dry_run.map(Trial::from) };
        let decide = |found: &FoundVm| {
            let decision = decide(&found.vm, Command::Restart, None, false, Timestamp::now());
            decision.map_err(|refusal| refusal.to_string())
        };
        match write::change(self.client, found, by, decide).await? {
            Done::Unchanged { found, .. } | Done::Written { before: found, .. } => Ok(found),
        }
    }

    /// Waits for the VMs of a wave, and says of each how it ended.
    async fn wait(&mut self, which: &[usize], output: &mut Output<'_>) -> Result<(), Failure> {
        let begin = Instant::now();
        let (client, timeout) = (self.client, self.options.limit.timeout);
        let waits = which.iter().map(|at| {
            let member = &self.members[*at];
            let (namespace, name, goal) = (member.found.namespace(), member.found.name(), member.goal());
            async move { wait::wait(client, &namespace, &name, &goal, begin, timeout).await }
        });
        for (at, end) in which.iter().zip(join_all(waits).await) {
            let member = &mut self.members[*at];
            member.progress = match end {
                Ended::Reached { vm, after } => {
                    writeln!(output, "{} restarted ({}, {})", member.title(), words(vm.as_deref()), seconds(after))?;
                    Progress::Done
                }
                Ended::TimedOut | Ended::Failed => Progress::Failed,
            };
        }
        output.flush()
    }

    /// Says which VM stopped it, which were not touched, and how it goes on.
    fn explain_end(&self, failed: &[usize], untouched: &[usize]) {
        for at in failed {
            let title = self.members[*at].title();
            note(&format!(
                "{title} is not Ready: the rollout stops; `kubectl vm explain {}` says why",
                self.members[*at].found.name()
            ));
        }
        if untouched.is_empty() {
            return;
        }
        let mut by_namespace: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for at in untouched {
            let found = &self.members[*at].found;
            by_namespace.entry(found.namespace()).or_default().push(found.name());
        }
        let names: Vec<String> = untouched.iter().map(|at| self.members[*at].title()).collect();
        note(&format!("not touched: {}", names.join(", ")));
        note("to go on without waiting for what failed:");
        let wave = match self.options.wave {
            Wave::Count(count) => count.to_string(),
            Wave::Percent(percent) => format!("{percent}%"),
        };
        for (namespace, names) in by_namespace {
            note(&format!("  kubectl vm rollout -n {namespace} --wave {wave} {}", names.join(" ")));
        }
    }
}

fn words(vm: Option<&VirtualMachine>) -> String {
    let status = vm.and_then(|vm| vm.status.as_ref());
    let phase = status.and_then(|status| status.phase.as_deref()).unwrap_or("gone");
    match status.map_or(0, |status| status.pending_changes.len()) {
        0 => format!("now {phase}"),
        left => format!("now {phase}, {} still waiting", counted(left, "change")),
    }
}
