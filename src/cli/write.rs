//! What the commands that change VMs have in common: their options, how a change is sent, and how they end.

use clap::{Args, ValueEnum};
use kube::{Client, api::DynamicObject};
use serde_json::{Value, json};

use super::{
    format::{ObjectFormat, print_objects},
    output::{Exit, Failure, Output, note},
    vms::{FoundVms, exit, refused, title},
    wait::Limit,
};
use crate::{
    actions::{
        Decision, FoundVm, Trial, VmHandle,
        write::{By, ChangeError, Done},
    },
    ownership::COMMAND_MANAGER,
};

/// What the commands that change VMs have in common.
#[derive(Args)]
pub(super) struct WriteOptions {
    /// Say what would be done, without doing it: client asks only what the VM is, server also whether the change would be accepted.
    #[arg(long, value_name = "HOW")]
    pub dry_run: Option<DryRun>,
    /// Print the changed VM, instead of a line about it.
    #[arg(long, short, value_name = "FORMAT")]
    pub output: Option<ObjectFormat>,
    /// The name under which the API server notes the change.
    #[arg(long, value_name = "NAME", default_value = COMMAND_MANAGER)]
    pub field_manager: String,
    /// Change a field of the spec also where a GitOps controller applies it, which then takes it back.
    #[arg(long, short)]
    pub yes: bool,
    /// Wait until it is done, and say how far it is.
    #[arg(long)]
    pub wait: bool,
    #[command(flatten)]
    pub limit: Limit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DryRun {
    Client,
    Server,
}

impl DryRun {
    /// That nothing was done, behind what would have been.
    pub fn mark(dry_run: Option<Self>) -> &'static str {
        match dry_run {
            None => "",
            Some(Self::Client) => " (dry run)",
            Some(Self::Server) => " (server dry run)",
        }
    }
}

impl From<DryRun> for Trial {
    fn from(dry_run: DryRun) -> Self {
        match dry_run {
            DryRun::Client => Self::Client,
            DryRun::Server => Self::Server,
        }
    }
}

/// What was done with a VM.
pub(super) struct CommandResult<W> {
    /// The VM as it is now.
    pub object: DynamicObject,
    /// That, for people.
    pub line: String,
    /// What has to be waited for before the line is true.
    pub wait: Option<W>,
}

impl<W> CommandResult<W> {
    pub fn unchanged(found: FoundVm, why: &str) -> Self {
        Self { line: format!("{} unchanged ({why})", title(&found.name())), object: found.object, wait: None }
    }
}

/// How far a command is with its VMs.
pub(super) struct Tally {
    objects: Vec<Value>,
    succeeded: usize,
    failed: usize,
}

impl WriteOptions {
    /// As whom the command writes.
    pub fn by(&self) -> By<'_> {
        By { field_manager: &self.field_manager, trial: self.dry_run.map(Trial::from) }
    }

    /// Whether the command waits for what it has written.
    pub fn waits(&self) -> bool {
        self.wait && self.dry_run.is_none()
    }

    /// Changes one VM after the other, and prints what was done with each, or why not. Also returns what has to be waited for.
    pub async fn each<W>(
        &self,
        found: FoundVms,
        change: impl AsyncFn(FoundVm) -> Result<CommandResult<W>, String>,
        output: &mut Output<'_>,
    ) -> Result<(Tally, Vec<W>), Failure> {
        let mut tally = Tally { objects: Vec::new(), succeeded: 0, failed: found.missing };
        let mut waits = Vec::new();
        for vm in found.vms {
            match change(vm).await {
                Err(line) => {
                    note(&line);
                    tally.failed += 1;
                }
                Ok(CommandResult { object, line, wait }) => {
                    tally.objects.push(json!(object));
                    match wait {
                        Some(wait) => waits.push(wait),
                        None => {
                            tally.succeeded += 1;
                            if self.output.is_none() {
                                writeln!(output, "{line}")?;
                            }
                        }
                    }
                }
            }
        }
        output.flush()?;
        Ok((tally, waits))
    }

    /// Prints the VMs, if they were asked for. `waited`: how waiting for some of them ended.
    pub fn finish(&self, tally: &Tally, waited: Option<Exit>, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let Tally { objects, succeeded, failed } = tally;
        if let Some(format) = &self.output {
            print_objects(objects, objects.len() <= 1, format, output)?;
        }
        Ok(combined(waited, *succeeded, *failed))
    }
}

/// Decides about a VM and writes that, and says who may take it back. The error is a line for the person.
pub(super) async fn change<T>(
    client: &Client,
    found: FoundVm,
    by: By<'_>,
    decide: impl Fn(&FoundVm) -> Result<Decision<T>, String>,
) -> Result<Done<T>, String> {
    let (namespace, name) = (found.namespace(), found.name());
    let title = title(&name);
    let done = match VmHandle::new(client.clone(), &namespace, &name).change(found, by, decide).await {
        Ok(done) => done,
        Err(ChangeError::Refused(why)) => return Err(format!("{title}: {why}")),
        Err(ChangeError::Request { verb, error }) => {
            return Err(refused(client, &title, &[verb], Some(&namespace), &error).await);
        }
        Err(ChangeError::Busy) => return Err(format!("{title}: others change it all the time; try again")),
    };
    if let Done::Written { applier: Some((applier, field)), .. } = &done {
        let what = if applier.is_gitops { "which takes this back" } else { "whose next apply takes this back" };
        note(&format!("{title}: {} applies spec.vm.{field} too, {what}", applier.manager));
    }
    Ok(done)
}

/// The exit code if waiting for some VMs ended so, and for others nothing had to be waited for, or it failed.
fn combined(waited: Option<Exit>, succeeded: usize, failed: usize) -> Exit {
    match waited {
        None => exit(succeeded, failed),
        Some(Exit::TimeOut) => Exit::TimeOut,
        Some(Exit::Success) if failed > 0 => Exit::Partly,
        Some(Exit::Negative) if succeeded > 0 => Exit::Partly,
        Some(waited) => waited,
    }
}
