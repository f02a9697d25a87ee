//! `kubectl vm pool list|status|assign|release|unassign`. What assigning and releasing write is [`actions::pool`](crate::actions::pool).

mod page;

use std::ffi::OsStr;

use clap::{Args, Subcommand};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, ListParams},
};
use serde_json::{Value, json};

use self::page::Page;
use super::{
    cluster::{self, Cluster, ClusterOptions},
    format::{DataFormat, ObjectFormat, print_objects},
    list::{self, Chosen, How, Listed},
    output::{Exit, Failure, Output, note, plain},
    vms::{self, Selection, nothing, refused_about},
    write::DryRun,
};
use crate::{
    actions::{
        Trial,
        pool::{PoolError, PoolHandle},
    },
    api::{GROUP, VirtualMachine, VmPool},
    assignment::Assignee,
    ownership::COMMAND_MANAGER,
    people::Rights,
    process::ErrorChain,
};

#[derive(Subcommand)]
pub(super) enum Command {
    /// List pools, as `kubectl get vmpools` does.
    #[command(visible_alias = "ls")]
    List(ListOptions),
    /// Show pools and each of their VMs: who has it, since when, and until when it is kept.
    Status(StatusOptions),
    /// Give a user a VM of each pool: the one that the user has, or the first one that is free. It is started if it does not run.
    ///
    /// The pool's permissions are not asked: who may change VMs and their status may give them to anybody.
    Assign(AssignOptions),
    /// Take the VMs of pools from a user. The guest goes on; a user whom the pool has logged in is logged out.
    Release(ReleaseOptions),
    /// Make VMs nobody's, whoever has them.
    Unassign(UnassignOptions),
}

/// Which pools are meant.
#[derive(Args)]
pub(super) struct PoolSelection {
    /// The pools. Default: all of the namespace.
    #[arg(value_name = "POOL", add = ArgValueCompleter::new(pool_names), conflicts_with_all = ["selector", "all_namespaces"])]
    names: Vec<String>,
    /// Pools with these labels.
    #[arg(long, short = 'l', value_name = "LABELS")]
    selector: Option<String>,
    /// Of all namespaces.
    #[arg(long, short = 'A')]
    all_namespaces: bool,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Args)]
pub(super) struct ListOptions {
    #[command(flatten)]
    selection: PoolSelection,
    #[command(flatten)]
    how: How,
}

#[derive(Args)]
pub(super) struct StatusOptions {
    #[command(flatten)]
    selection: PoolSelection,
    /// Print it as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

/// A user, and pools.
#[derive(Args)]
struct UserAndPools {
    /// The pools.
    #[arg(value_name = "POOL", required = true, add = ArgValueCompleter::new(pool_names))]
    names: Vec<String>,
    /// The user, as she signs in.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    user: String,
    #[command(flatten)]
    cluster: ClusterOptions,
}

#[derive(Args)]
pub(super) struct AssignOptions {
    #[command(flatten)]
    what: UserAndPools,
    #[command(flatten)]
    write: WriteOptions,
}

#[derive(Args)]
pub(super) struct ReleaseOptions {
    #[command(flatten)]
    what: UserAndPools,
    #[command(flatten)]
    write: WriteOptions,
}

#[derive(Args)]
pub(super) struct UnassignOptions {
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    write: WriteOptions,
}

#[derive(Args)]
struct WriteOptions {
    /// Say what would be done, without doing it: client asks only how things are, server also whether the change would be accepted.
    #[arg(long, value_name = "HOW")]
    dry_run: Option<DryRun>,
    /// Print the VMs, instead of lines about them.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<ObjectFormat>,
    /// The name under which the API server notes the changes.
    #[arg(long, value_name = "NAME", default_value = COMMAND_MANAGER)]
    field_manager: String,
}

impl WriteOptions {
    fn handle(&self, Cluster { client, namespace }: &Cluster) -> PoolHandle {
        PoolHandle {
            client: client.clone(),
            namespace: namespace.clone(),
            field_manager: self.field_manager.clone(),
            clock: Timestamp::now,
        }
    }

    fn trial(&self) -> Option<Trial> {
        self.dry_run.map(Trial::from)
    }
}

/// What a command has done so far.
struct Report<'a, 'o> {
    options: &'a WriteOptions,
    output: &'a mut Output<'o>,
    objects: Vec<Value>,
    succeeded: usize,
    failed: usize,
}

impl<'a, 'o> Report<'a, 'o> {
    fn new(options: &'a WriteOptions, output: &'a mut Output<'o>) -> Self {
        Self { options, output, objects: Vec::new(), succeeded: 0, failed: 0 }
    }

    /// A line about something that was done, or would be.
    fn done(&mut self, line: &str) -> Result<(), Failure> {
        self.said(&format!("{line}{}", DryRun::mark(self.options.dry_run)))
    }

    /// A line about something that is already so.
    fn said(&mut self, line: &str) -> Result<(), Failure> {
        if self.options.output.is_none() {
            writeln!(self.output, "{}", plain(line))?;
        }
        Ok(())
    }

    fn object(&mut self, vm: &VirtualMachine) {
        self.objects.push(json!(vm));
    }

    async fn failed(&mut self, handle: &PoolHandle, what: &str, error: &PoolError) {
        note(&plain(&words(handle, what, error).await));
        self.failed += 1;
    }

    fn end(self) -> Result<Exit, Failure> {
        if let Some(format) = &self.options.output {
            print_objects(&self.objects, self.objects.len() <= 1, format, self.output)?;
        }
        Ok(vms::exit(self.succeeded, self.failed))
    }
}

pub(super) async fn run(command: &Command, output: &mut Output<'_>) -> Result<Exit, Failure> {
    match command {
        Command::List(options) => list(options, output).await,
        Command::Status(options) => status(options, output).await,
        Command::Assign(options) => assign(options, output).await,
        Command::Release(options) => release(options, output).await,
        Command::Unassign(options) => unassign(options, output).await,
    }
}

async fn list(options: &ListOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let PoolSelection { names, selector, all_namespaces, cluster } = &options.selection;
    let listed = Listed { resource: resource(), what: "pools", title, name_of };
    let wanted = Chosen { names, selector: selector.as_deref(), all_namespaces: *all_namespaces };
    list::print(&listed, &wanted, &connect(cluster).await?, &options.how, output).await
}

async fn status(options: &StatusOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let PoolSelection { names, selector, all_namespaces, cluster } = &options.selection;
    let Cluster { client, namespace } = connect(cluster).await?;
    let place = (!all_namespaces).then_some(namespace.as_str());
    let api: Api<DynamicObject> = match place {
        Some(namespace) => Api::namespaced_with(client.clone(), namespace, &resource()),
        None => Api::all_with(client.clone(), &resource()),
    };
    let (mut pools, mut missing) = (Vec::new(), 0);
    if names.is_empty() {
        let parameters = ListParams { label_selector: selector.clone(), ..ListParams::default() };
        match api.list(&parameters).await {
            Ok(found) => pools = found.items,
            Err(error) => {
                let line = refused_about(&client, &resource(), "pools", &["list"], place, &error).await;
                return Err(Failure::unknown(line));
            }
        }
        if pools.is_empty() {
            note(&nothing("pools", place, selector.as_deref()));
        }
    }
    for name in names.iter().map(|argument| name_of(argument)) {
        match api.get(name).await {
            Ok(pool) => pools.push(pool),
            Err(error) => {
                note(&refused_about(&client, &resource(), &title(name), &["get"], place, &error).await);
                missing += 1;
            }
        }
    }
    let mut pages: Vec<Page> = Vec::new();
    // The VMs of each namespace are read once.
    let mut view = None;
    for pool in &pools {
        let namespace = pool.metadata.namespace.clone().unwrap_or_default();
        if view.as_ref().is_none_or(|(known, _)| *known != namespace) {
            let handle = PoolHandle {
                client: client.clone(),
                namespace: namespace.clone(),
                field_manager: COMMAND_MANAGER.into(),
                clock: Timestamp::now,
            };
            match handle.list().await {
                Ok(read) => view = Some((namespace, read)),
                Err(error) => return Err(Failure::unknown(words(&handle, "VMs", &error).await)),
            }
        }
        if let Some((_, view)) = &view {
            pages.push(Page::new(pool, view, Timestamp::now()));
        }
    }
    match (&options.output, &pages[..]) {
        (Some(format), [page]) if names.len() == 1 => format.print(&json!(page), output)?,
        (Some(format), pages) => format.print(&json!({ "items": pages }), output)?,
        (None, pages) => {
            let texts: Vec<_> = pages.iter().map(ToString::to_string).collect();
            write!(output, "{}", plain(&texts.join("\n")))?;
        }
    }
    Ok(vms::exit(pages.len(), missing))
}

async fn assign(options: &AssignOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let UserAndPools { names, user, cluster } = &options.what;
    let handle = options.write.handle(&connect(cluster).await?);
    let who = Assignee { user: user.clone(), rights: Rights::all() };
    let mut report = Report::new(&options.write, output);
    for pool in names.iter().map(|argument| name_of(argument)) {
        let assigned = match options.write.trial() {
            None => handle.assign(pool, &who).await,
            Some(trial) => handle.try_assign(pool, &who, trial).await,
        };
        match assigned {
            Ok(assigned) => {
                let vm = vms::title(assigned.vm.metadata.name.as_deref().unwrap_or_default());
                let started = if assigned.is_started { ", started" } else { "" };
                match assigned.is_new {
                    true => report.done(&format!("{vm} assigned to {user} from {}{started}", title(pool)))?,
                    false => report.said(&format!("{vm} unchanged ({user} has it from {}{started})", title(pool)))?,
                }
                report.object(&assigned.vm);
                report.succeeded += 1;
            }
            Err(error) => report.failed(&handle, &title(pool), &error).await,
        }
    }
    report.end()
}

async fn release(options: &ReleaseOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let UserAndPools { names, user, cluster } = &options.what;
    let handle = options.write.handle(&connect(cluster).await?);
    let mut report = Report::new(&options.write, output);
    for pool in names.iter().map(|argument| name_of(argument)) {
        match handle.release(pool, user, options.write.trial()).await {
            Ok(released) => {
                if released.is_empty() {
                    report.said(&format!("{} unchanged ({user} has no VM of it)", title(pool)))?;
                }
                for vm in &released {
                    let name = vms::title(vm.metadata.name.as_deref().unwrap_or_default());
                    report.done(&format!("{name} released ({user} had it from {})", title(pool)))?;
                    report.object(vm);
                }
                report.succeeded += 1;
            }
            Err(error) => report.failed(&handle, &title(pool), &error).await,
        }
    }
    report.end()
}

async fn unassign(options: &UnassignOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let found = options.selection.find().await?;
    let mut report = Report::new(&options.write, output);
    report.failed = found.missing;
    for vm in &found.vms {
        let handle = PoolHandle { namespace: vm.namespace(), ..options.write.handle(&found.cluster) };
        let name = vm.vm.metadata.name.as_deref().unwrap_or_default();
        match handle.unassign(name, options.write.trial()).await {
            Ok(None) => {
                report.said(&format!("{} unchanged (it is nobody's)", vms::title(&vm.name())))?;
                report.object(&vm.vm);
                report.succeeded += 1;
            }
            Ok(Some((changed, user))) => {
                report.done(&format!("{} unassigned ({user} had it)", vms::title(&vm.name())))?;
                report.object(&changed);
                report.succeeded += 1;
            }
            Err(error) => report.failed(&handle, &vms::title(&vm.name()), &error).await,
        }
    }
    report.end()
}

/// What went wrong, in a line. If a right is missing, the line has the rule that a role needs.
async fn words(handle: &PoolHandle, what: &str, error: &PoolError) -> String {
    let PoolError::Api { verb, resource: plural, source } = error else {
        return format!("{what}: {}", ErrorChain(error));
    };
    let resource = ApiResource { plural: (*plural).to_owned(), ..resource() };
    refused_about(&handle.client, &resource, what, &[*verb], Some(&handle.namespace), source).await
}

async fn connect(options: &ClusterOptions) -> Result<Cluster, Failure> {
    options.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))
}

/// How a pool is called in messages.
fn title(name: &str) -> String {
    format!("pool/{name}")
}

/// The name in an argument: `desktops`, `pool/desktops` or what `--output=name` prints.
fn name_of(argument: &str) -> &str {
    match argument.split_once('/') {
        Some((kind, name))
            if ["pool", "vmpool", "vmpools"].contains(&kind) || kind.strip_prefix("vmpool.") == Some(GROUP) =>
        {
            name
        }
        _ => argument,
    }
}

fn resource() -> ApiResource {
    ApiResource::erase::<VmPool>(&())
}

/// The names of pools that begin with what is typed.
fn pool_names(current: &OsStr) -> Vec<CompletionCandidate> {
    let options = cluster::typed();
    cluster::ask(current, || async move {
        let cluster = options.connect().await.ok()?;
        cluster::names(Api::<VmPool>::namespaced(cluster.client, &cluster.namespace)).await
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_be_what_the_commands_print() {
        for argument in ["desktops", "pool/desktops", "vmpools/desktops", "vmpool.vmoperator.jdrupes.org/desktops"] {
            assert_eq!(name_of(argument), "desktops");
        }
        assert_eq!(name_of("vm/desktops"), "vm/desktops", "it is refused by the API server");
    }
}
