//! `kubectl vm plan`: what changed templates, a changed configuration or this program would do to VMs, found by the manager's own functions.
//!
//! ```text
//!  templates in force, configuration ──┐
//!  what changes of them ───────────────┼─▶ both rendered for each VM ─▶ check of the sets ─▶ plan::effect ─▶ table
//!  objects of the VMs, one list a kind ┘
//! ```

pub(super) mod refusal;
mod report;
pub(super) mod sources;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};

use clap::Args;
use kube::{Api, Client, ResourceExt, api::ListParams};

use self::{
    report::{Report, VmReport},
    sources::{Change, Side},
};
use super::{
    cluster::Cluster,
    diff::{
        listing::{Listing, Lists},
        login_pools,
    },
    format::DataFormat,
    output::{Exit, Failure, Output, note},
    vms::{CHUNK, Selection, refused},
};
use crate::{
    api::{StoredVm, VirtualMachine},
    client::discovery::Resources,
    observed::Observed,
    plan::{
        effect::{Effect, Input, effect},
        kinds,
    },
    render::TemplateError,
};

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// Changed templates: a folder as for `kubectl vm lint`, which stands for the templates for all VMs and for the named sets in its folder
    /// `sets`; or a file (-: standard input) with the ConfigMaps of sets, as they are in Git. Can be given several times.
    #[arg(long, value_name = "DIR|FILE")]
    templates: Vec<PathBuf>,
    /// The changed configuration of the manager.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// The manager's namespace, with its ConfigMaps. Default: the VM's namespace.
    #[arg(long, value_name = "NS")]
    manager_namespace: Option<String>,
    /// Say of each VM which objects and fields change.
    #[arg(long, short)]
    verbose: bool,
    /// Print the details as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

/// A VM, and whether a person asked about it.
struct Subject {
    vm: Arc<VirtualMachine>,
    is_asked: bool,
}

/// A VM with its objects.
#[derive(Clone)]
pub(super) struct Seen {
    pub vm: Arc<VirtualMachine>,
    pub observed: Observed,
    current: Vec<kube::api::DynamicObject>,
    notes: Vec<String>,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    // An error must not look like an effect.
    let report = report(options).await.map_err(Failure::undetermined)?;
    match &options.output {
        Some(format) => output.found(&report, Some(format))?,
        None => write!(output, "{}", report.text(options.verbose, options.selection.all_namespaces))?,
    }
    Ok(report.exit())
}

async fn report(options: &Options) -> Result<Report, Failure> {
    let change = Change::read(&options.templates, options.config.as_deref())?;
    let (cluster, subjects, missing) = subjects(options).await?;
    let mut homes: BTreeMap<String, Vec<Subject>> = BTreeMap::new();
    for subject in subjects {
        let home = options.manager_namespace.clone().or_else(|| subject.vm.namespace()).unwrap_or_default();
        homes.entry(home).or_default().push(subject);
    }
    let mut report = Report { is_incomplete: missing > 0, ..Report::default() };
    for (home, subjects) in homes {
        match of_home(&cluster.client, &home, &change, subjects).await {
            Ok(vms) => report.vms.extend(vms),
            Err(failure) => {
                // The managers of other namespaces have nothing to do with it.
                note(&failure.words());
                report.is_incomplete = true;
            }
        }
    }
    report.vms.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    Ok(report)
}

/// The VMs that are asked about, and all others of their namespaces, because a set is used for all its VMs or for none.
async fn subjects(options: &Options) -> Result<(Cluster, Vec<Subject>, usize), Failure> {
    let Options { selection, .. } = options;
    let found = selection.find_or_all().await?;
    let is_everything = selection.names.is_empty() && selection.selector.is_none();
    let mut subjects: Vec<Subject> =
        found.vms.into_iter().map(|found| Subject { vm: Arc::new(found.vm), is_asked: true }).collect();
    if !is_everything && !subjects.is_empty() {
        let namespaces: BTreeSet<String> = subjects.iter().filter_map(|it| it.vm.namespace()).collect();
        for namespace in namespaces {
            match all_vms(&found.cluster.client, &namespace).await {
                Ok(vms) => {
                    let is_known = |vm: &VirtualMachine| subjects.iter().any(|it| it.vm.uid() == vm.uid());
                    let others: Vec<_> = vms.into_iter().filter(|vm| !is_known(vm)).collect();
                    subjects.extend(others.into_iter().map(|vm| Subject { vm: Arc::new(vm), is_asked: false }));
                }
                Err(error) => {
                    let what = refused(&found.cluster.client, "VMs", &["list"], Some(&namespace), &error).await;
                    note(&format!("# whether another VM would hold up a set is not known: {what}"));
                }
            }
        }
    }
    Ok((found.cluster, subjects, found.missing))
}

async fn all_vms(client: &Client, namespace: &str) -> kube::Result<Vec<VirtualMachine>> {
    let api: Api<StoredVm> = Api::namespaced(client.clone(), namespace);
    let mut parameters = ListParams { limit: Some(CHUNK), ..ListParams::default() };
    let mut vms = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        vms.extend(page.items.into_iter().map(|StoredVm(vm)| vm));
        parameters.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if parameters.continue_token.is_none() {
            return Ok(vms);
        }
    }
}

/// What becomes of the VMs of one manager.
async fn of_home(
    client: &Client,
    home: &str,
    change: &Change,
    subjects: Vec<Subject>,
) -> Result<Vec<VmReport>, Failure> {
    let now = Side::installed(client, home).await?;
    let after = now.changed(change);
    after.note_sets_that_nobody_uses(change, subjects.iter().map(|it| it.vm.as_ref()));
    let (resources, lists) = (Resources::new(client.clone()), Lists::of_all());
    let (mut seen, mut pools) = (Vec::new(), BTreeMap::new());
    for Subject { mut vm, is_asked } in subjects {
        let namespace = vm.namespace().unwrap_or_default();
        if !pools.contains_key(&namespace) {
            pools.insert(namespace.clone(), login_pools(client, &namespace).await?);
        }
        if let Some(pools) = pools.get(&namespace) {
            pools.log_in(&mut vm);
        }
        seen.push((see(client, &resources, &lists, vm, &now, &after).await?, is_asked));
    }
    let refusals = refusal::of_sets(client, home, &resources, &now, &after, seen.iter().map(|(seen, _)| seen)).await?;
    let asked = seen.into_iter().filter(|(_, is_asked)| *is_asked);
    Ok(asked.map(|(seen, _)| of_vm(seen, change, &now, &after, &refusals)).collect())
}

/// Reads a VM's objects: those that it has, and those that it would have.
pub(super) async fn see(
    client: &Client,
    resources: &Resources,
    lists: &Lists,
    vm: Arc<VirtualMachine>,
    now: &Side,
    after: &Side,
) -> Result<Seen, Failure> {
    let mut listing = Listing::new(client, &vm, resources, lists);
    listing.add_usual().await?;
    // What there is decides what is rendered, and that in turn which kinds there are: after two rounds nothing changes any more.
    for _ in 0..2 {
        let sides = [now, after].into_iter().filter_map(|side| side.render(&vm, &listing.observed).ok());
        let rendered: Vec<_> = sides.flatten().collect();
        listing.add_if_possible(rendered.iter().map(|object| object.key.types())).await?;
    }
    listing.add_if_possible(kinds::from_status(&vm, &[])).await?;
    let Listing { observed, current, unlisted, .. } = listing;
    let notes = unlisted.iter().map(|kind| format!("not compared, because you may not list them: {kind} objects"));
    let notes = notes.collect();
    Ok(Seen { vm, observed, current, notes })
}

/// What becomes of a VM.
pub(super) fn of_vm(seen: Seen, change: &Change, now: &Side, after: &Side, refusals: &refusal::Refusals) -> VmReport {
    let Seen { vm, observed, current, mut notes } = seen;
    let (old, new) = (now.render(&vm, &observed), after.render(&vm, &observed));
    let words = |error: &TemplateError| change.words(error);
    let of_set = refusals.of(&vm);
    let effect = match (&old, &new) {
        (Ok(_), Err(error)) if error.of_values => {
            Effect::refused(format!("its values do not match the set, so it keeps its templates: {}", words(error)))
        }
        (Ok(_), Err(error)) => Effect::refused(words(error)),
        (Err(_), Err(error)) => {
            notes.push(format!("its objects can't be rendered, now as before: {}", words(error)));
            Effect::default()
        }
        (_, Ok(_)) if let Some((error, with)) = of_set => {
            let with = with.filter(|other| **other != vm.full_name());
            let with = with.map(|other| format!(" (seen with {other})")).unwrap_or_default();
            Effect::refused(format!("the set is not used: {}{with}", words(error)))
        }
        (old, Ok(new)) => {
            // Of this program it is not known what is so already: what there is was rendered by another one, perhaps.
            let old = old.as_ref().ok().filter(|_| !change.is_program());
            let unlisted = |object: &&crate::object::Rendered| {
                notes.iter().any(|note| note.contains(&format!(": {} objects", object.key.kind)))
            };
            let listed = |objects: &[crate::object::Rendered]| -> Vec<_> {
                objects.iter().filter(|object| !unlisted(object)).cloned().collect()
            };
            let (old, new) = (old.map(|old| listed(old)), listed(new));
            effect(Input { vm: &vm, observed: &observed, current: &current, old: old.as_deref(), new: &new })
        }
    };
    VmReport { namespace: vm.namespace().unwrap_or_default(), name: vm.name_any(), effect, notes }
}
