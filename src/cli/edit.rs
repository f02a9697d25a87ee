//! `kubectl vm set`, `add` and `grow`: CPUs, memory, CDs and disks. What they write is [`actions::edit`](crate::actions::edit).

use clap::{Args, Subcommand};
use clap_complete::engine::ArgValueCompleter;
use futures::future::join_all;
use kube::{Client, api::DynamicObject};
use std::time::Duration;
use tokio::time::Instant;

use super::{
    cluster::ClusterOptions,
    output::{Exit, Failure, Output, note},
    vms::{Selection, title, vm_names},
    wait::{self, Ended, Goal, seconds},
    write::{self, CommandResult, DryRun, WriteOptions},
};
use crate::{
    actions::{
        FoundVm,
        edit::{About, Edit, EditRefusal, Effect, Expected, decide, is_asked, outcome},
        write::Done,
    },
    api::Quantity,
};

/// How long a guest has to give back memory or a CPU, or to take it.
const GIVES: Duration = Duration::from_secs(15);

#[derive(Subcommand)]
pub(super) enum Set {
    /// Set how many CPUs guests have. Up to the maximum that a guest has, it gets them while it runs.
    #[command(override_usage = "kubectl vm set cpus [OPTIONS] [VM]... <N>")]
    Cpus {
        /// The VMs, and at the end how many CPUs each has.
        #[arg(value_name = "VM... N", required = true, add = ArgValueCompleter::new(vm_names))]
        words: Vec<String>,
        #[command(flatten)]
        raise: Raise,
        #[command(flatten)]
        common: Options,
    },
    /// Set how much memory guests have. Up to the maximum that a guest has, it gets it while it runs.
    #[command(override_usage = "kubectl vm set ram [OPTIONS] [VM]... <SIZE>")]
    Ram {
        /// The VMs, and at the end how much memory each has, such as 4Gi.
        #[arg(value_name = "VM... SIZE", required = true, add = ArgValueCompleter::new(vm_names))]
        words: Vec<String>,
        #[command(flatten)]
        raise: Raise,
        #[command(flatten)]
        common: Options,
    },
    /// Insert a CD into a drive of VMs, or take it out.
    ///
    /// A CD is a URL (https://...), or a file in the claim vmop-image-repository, by its name. A guest that runs gets it at once, except
    /// that the first CD out of the claim takes a restart.
    #[command(
        override_usage = "kubectl vm set cd [OPTIONS] [VM]... <IMAGE>\n       kubectl vm set cd [OPTIONS] [VM]... --eject"
    )]
    Cd {
        /// The VMs, and at the end the CD.
        #[arg(value_name = "VM... IMAGE", add = ArgValueCompleter::new(vm_names))]
        words: Vec<String>,
        /// Take the CD out.
        #[arg(long)]
        eject: bool,
        /// Which of several drives: its name, or its number, counted from 0.
        #[arg(long, value_name = "DRIVE")]
        drive: Option<String>,
        #[command(flatten)]
        common: Options,
    },
}

#[derive(Subcommand)]
pub(super) enum Add {
    /// Give VMs one more disk, an empty one. Their guests have it after the next start.
    ///
    /// The manager makes its claim, VM-NAME-disk, and never deletes it.
    #[command(override_usage = "kubectl vm add disk [OPTIONS] [VM]... <SIZE>")]
    Disk {
        /// The VMs, and at the end the size of the disk, such as 20Gi.
        #[arg(value_name = "VM... SIZE", required = true, add = ArgValueCompleter::new(vm_names))]
        words: Vec<String>,
        /// The disk's name. Default: data, or data-2 and so on, if the VM has or had a disk of that name.
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
        /// The storage class of its claim. Default: the manager's, or the cluster's.
        #[arg(long, value_name = "NAME")]
        storage_class: Option<String>,
        #[command(flatten)]
        common: Options,
    },
}

#[derive(Subcommand)]
pub(super) enum Grow {
    /// Make a disk of VMs larger, while they run. Its claim grows if its storage class allows that; a guest then sees the new size.
    #[command(override_usage = "kubectl vm grow disk [OPTIONS] [VM]... <DISK> <SIZE>")]
    Disk {
        /// The VMs, and at the end the disk's name and its new size.
        #[arg(value_name = "VM... DISK SIZE", required = true, add = ArgValueCompleter::new(vm_names))]
        words: Vec<String>,
        #[command(flatten)]
        common: Options,
    },
}

#[derive(Args)]
pub(super) struct Raise {
    /// Raise the maximum too, if it is lower. That takes effect at the next start.
    #[arg(long)]
    raise_maximum: bool,
}

/// Which VMs, and how they are changed.
#[derive(Args)]
pub(super) struct Options {
    /// VMs with these labels, such as tier=web or 'tier in (web, db)', instead of names.
    #[arg(long, short = 'l', value_name = "LABELS", conflicts_with = "all")]
    selector: Option<String>,
    /// All VMs of the namespace.
    #[arg(long)]
    all: bool,
    /// Of all namespaces.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: ClusterOptions,
    #[command(flatten)]
    write: WriteOptions,
}

pub(super) async fn set(command: &Set, output: &mut Output<'_>) -> Result<Exit, Failure> {
    match command {
        Set::Cpus { words, raise, common } => {
            let (vms, [number]) = split(words, ["how many CPUs"])?;
            let number = number.parse().ok().filter(|number| *number > 0);
            let number = number.ok_or_else(|| Failure::usage("write how many CPUs as a number, such as 4"))?;
            common.run(vms, &Edit::Cpus { number, raise: raise.raise_maximum }, output).await
        }
        Set::Ram { words, raise, common } => {
            let (vms, [size]) = split(words, ["how much memory"])?;
            common.run(vms, &Edit::Ram { size: quantity(size)?, raise: raise.raise_maximum }, output).await
        }
        Set::Cd { words, eject: true, drive, common } => {
            common.run(words, &Edit::Cd { image: String::new(), drive: drive.clone() }, output).await
        }
        Set::Cd { words, eject: false, drive, common } => {
            let (vms, [image]) = split(words, ["the CD, or give --eject"])?;
            common.run(vms, &Edit::Cd { image: image.clone(), drive: drive.clone() }, output).await
        }
    }
}

pub(super) async fn add(command: &Add, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Add::Disk { words, name, storage_class, common } = command;
    let (vms, [size]) = split(words, ["the size of the disk"])?;
    let edit = Edit::AddDisk { size: quantity(size)?, name: name.clone(), class: storage_class.clone() };
    common.run(vms, &edit, output).await
}

pub(super) async fn grow(command: &Grow, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Grow::Disk { words, common } = command;
    let (vms, [disk, size]) = split(words, ["the name of the disk", "its new size"])?;
    common.run(vms, &Edit::GrowDisk { disk: disk.clone(), size: quantity(size)? }, output).await
}

/// The names of VMs, and the last words, which say this.
fn split<'a, const N: usize>(words: &'a [String], what: [&str; N]) -> Result<(&'a [String], &'a [String; N]), Failure> {
    words.split_last_chunk().ok_or_else(|| Failure::usage(format!("write {} at the end", what.join(" and "))))
}

fn quantity(text: &str) -> Result<Quantity, Failure> {
    super::create::quantity(text).map_err(Failure::usage)
}

/// The namespace and the name of a VM, and what is waited for.
type Wait = (String, String, Expected);

/// What became of a change that was waited for.
enum Became {
    Known { words: String, is_well: bool, after: Duration },
    Late,
    Unknown,
}

/// What became of a change, when waiting for it has ended.
async fn became(client: &Client, end: Ended, about: &About, effect: Effect, begin: Instant) -> Became {
    match end {
        Ended::Reached { vm: Some(vm), .. } => {
            let mut vm = *vm;
            if is_asked(&vm, about, effect) {
                let goal = Goal::There { about: about.clone() };
                vm = wait::see(client, vm.clone(), &goal, GIVES).await.unwrap_or(vm);
            }
            let (words, is_well) = outcome(&vm, about, effect);
            Became::Known { words, is_well, after: begin.elapsed() }
        }
        Ended::Reached { vm: None, after } => Became::Known { words: "it is gone".into(), is_well: false, after },
        Ended::TimedOut => Became::Late,
        Ended::Failed => Became::Unknown,
    }
}

impl Options {
    async fn run(&self, names: &[String], edit: &Edit, output: &mut Output<'_>) -> Result<Exit, Failure> {
        let begin = Instant::now();
        if !names.is_empty() && (self.selector.is_some() || self.all || self.all_namespaces) {
            return Err(Failure::usage("name the VMs, or say which by --selector or --all, not both"));
        }
        let selection = Selection {
            names: names.to_vec(),
            selector: self.selector.clone(),
            all: self.all,
            all_namespaces: self.all_namespaces,
            cluster: self.cluster.clone(),
        };
        let found = selection.find().await?;
        let client = &found.cluster.client.clone();
        let (tally, waits) = self.write.each(found, async |vm| self.change(client, vm, edit).await, output).await?;
        let waits = waits.into_iter().map(|(namespace, name, Expected { what, effect, about, .. })| async move {
            let goal = Goal::Taken { about: about.clone(), effect };
            let end = wait::wait(client, &namespace, &name, &goal, begin, self.write.limit.timeout).await;
            (name, what, became(client, end, &about, effect, begin).await)
        });
        let waited = self.report(join_all(waits).await, output)?;
        self.write.finish(&tally, waited, output)
    }

    /// Prints what became of the changes.
    fn report(&self, ends: Vec<(String, String, Became)>, output: &mut Output<'_>) -> Result<Option<Exit>, Failure> {
        let (mut well, mut badly, mut late) = (0, 0, false);
        for (name, what, became) in ends {
            match became {
                Became::Known { words, is_well, after } => {
                    let line = format!("{}: {what}; {words} ({})", title(&name), seconds(after));
                    match (is_well, &self.write.output) {
                        (true, None) => writeln!(output, "{line}")?,
                        (true, Some(_)) => {}
                        (false, _) => note(&line),
                    }
                    if is_well { well += 1 } else { badly += 1 }
                }
                Became::Late => late = true,
                Became::Unknown => badly += 1,
            }
        }
        Ok(match (late, well, badly) {
            (true, _, _) => Some(Exit::TimeOut),
            (false, 0, 0) => None,
            (false, well, badly) => Some(super::vms::exit(well, badly)),
        })
    }

    async fn change(&self, client: &Client, found: FoundVm, edit: &Edit) -> Result<CommandResult<Wait>, String> {
        let (namespace, name) = (found.namespace(), found.name());
        let decide = |found: &FoundVm| decide(found, edit, self.write.yes).map_err(|refusal| help(&refusal));
        match write::change(client, found, self.write.by(), decide).await? {
            Done::Unchanged { found, why } => Ok(CommandResult::unchanged(found, &why)),
            Done::Written { object, expected, .. } => {
                if let Some(hint) = &expected.note {
                    note(&format!("{}: {hint}", title(&name)));
                }
                let mark = DryRun::mark(self.write.dry_run);
                let line = format!("{}: {}{}{mark}", title(&name), expected.what, when(&object, expected.effect));
                let wait = self.write.waits().then_some((namespace, name, expected));
                Ok(CommandResult { object: *object, line, wait })
            }
        }
    }
}

/// A refusal, with what helps.
fn help(refusal: &EditRefusal) -> String {
    match refusal {
        EditRefusal::Git { .. } => format!("{refusal}, or give --yes to do it until the next sync"),
        EditRefusal::OverMaximum { .. } => format!("{refusal}; --raise-maximum raises that too, which takes a restart"),
        EditRefusal::WhichDrive(_) => {
            format!("{refusal}; say which by --drive: its name, or its number, counted from 0")
        }
        EditRefusal::DiskExists(_) => {
            format!("{refusal}; give another --name, or make it larger: kubectl vm grow disk")
        }
        EditRefusal::Deleted
        | EditRefusal::Unreadable(_)
        | EditRefusal::Topology { .. }
        | EditRefusal::TooLittle(_)
        | EditRefusal::NoDrive
        | EditRefusal::NoSuchDrive { .. }
        | EditRefusal::NoDisk { .. }
        | EditRefusal::Smaller { .. } => refusal.to_string(),
    }
}

/// When a change reaches the guest, before manager and runner have said it.
fn when(object: &DynamicObject, effect: Effect) -> &'static str {
    match (object.data["status"]["created"].as_bool(), effect) {
        (Some(true), Effect::AtOnce) => ", while it runs",
        (Some(true), Effect::NextStart) => ", after a restart",
        _ => ", when it starts",
    }
}
