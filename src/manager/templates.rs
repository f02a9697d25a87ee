//! The template sets in force, and how a changed one replaces the old one while the manager runs.
//!
//! ```text
//!  folder (a mounted ConfigMap) ──┐
//!  ConfigMaps with the label ─────┼─▶ Sources ─▶ compiled ─▶ every VM rendered ─▶ dry run ─▶ in force ─▶ every VM reconciled
//!                                 │                └── refused: the last good set stays, and the reason is reported
//! ```
//!
//! A changed configuration is checked in the same way with the sets in force, or with the changed ones if neither can be used alone.
//! Only what it does not allow any more is refused at once.
//!
//! A set is used as a whole or not at all. A set that is refused does not hold up another one. `state` decides; what is here does what it says.

mod state;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use futures::{StreamExt, future::join_all};
use k8s_openapi::api::core::v1::{ConfigMap, ObjectReference};
use kube::{Api, Client, Resource, ResourceExt, core::TypeMeta, runtime::watcher};
use tokio::{
    sync::watch,
    time::{Instant, timeout},
};
use tracing::{debug, error, info, warn};

use self::state::{AGAIN, Action, Checked, Gathered, Input, Maps, Refused, State, Trial};
use super::{
    caches::Caches,
    in_force::{self, Store},
    reload::{self, Followed},
    sandbox,
};
use crate::{
    api::{Reason, VirtualMachine, reasons::Event},
    client::events::EventRecorder,
    cluster::{ActionError, Cluster, list_watch::list_watch, rights::Rights},
    config::ReconcilerConfig,
    files::{self, FileError},
    metrics::Metrics,
    object::{Rendered, SET_LABEL, builtin_kinds, stateful_sets},
    observed::Observed,
    process::{ErrorChain, clock},
    render::{
        Files, Library, Sources, TemplateError, TemplateSet,
        check::{self, Bystander, Sample, SetEffect, Use},
        templates::Layers,
    },
};

/// How long the manager waits at its start for the list of the ConfigMaps. VMs whose set is not known yet wait longer.
const FIRST_LIST: Duration = Duration::from_secs(10);
/// How long a changed set waits at the start for the VMs of all namespaces. One of which the manager may list nothing must not hold up the others.
const FIRST_VMS: Duration = Duration::from_secs(30);

/// The template sets with which VMs are rendered.
#[derive(Debug)]
pub struct InForce {
    /// The sets.
    pub library: Library,
    /// Newer versions of sets that cannot be used, and why. By the set's name; `None` is the set of VMs that name none.
    pub refused: BTreeMap<Option<String>, TemplateError>,
    /// Former versions of sets that VMs keep, because their values do not match the schema of the newest one.
    pub former: Vec<Former>,
    /// Why the newest configuration is not used.
    pub config_refused: Option<TemplateError>,
}

/// A former version of a set.
#[derive(Clone, Debug)]
pub struct Former {
    /// The set's name.
    pub set: Option<String>,
    /// The version under which VMs know it.
    pub version: String,
    /// The templates. With other built-in templates, after an upgrade of the manager, their version is another one.
    pub templates: TemplateSet,
}

impl InForce {
    /// The set of a VM.
    ///
    /// # Errors
    /// Why there is none.
    pub fn of(&self, vm: &VirtualMachine) -> Result<&TemplateSet, TemplateError> {
        self.library.get(vm.template_set())
    }

    /// The kinds of objects that VMs usually have or had, each once, in an order that is always the same.
    pub fn usual_kinds(&self) -> Vec<TypeMeta> {
        let of_all = self.library.get(None).map(check::kinds).unwrap_or_default();
        let all = of_all.into_iter().chain(builtin_kinds()).chain([stateful_sets()]);
        let in_order: BTreeMap<_, _> = all.map(|kind| ((kind.api_version.clone(), kind.kind.clone()), kind)).collect();
        in_order.into_values().collect()
    }

    /// The former version of its set from which a VM was rendered last. If its status does not name that yet, the newest former version.
    pub fn former(&self, vm: &VirtualMachine) -> Option<&TemplateSet> {
        let from = vm.status.as_ref()?.templates.as_ref()?;
        let version = from.version.as_deref().filter(|_| from.set.as_deref() == vm.template_set())?;
        let mut of_set = self.former.iter().filter(|former| former.set.as_deref() == vm.template_set());
        let newest = of_set.clone().last();
        let last = of_set.find(|former| former.version == version || former.templates.version() == version);
        last.or(newest).map(|former| &former.templates)
    }

    /// Why the newest version of a VM's set, or the newest configuration, is not used.
    pub fn refusal(&self, vm: &VirtualMachine) -> Option<&TemplateError> {
        self.refused.get(&vm.template_set().map(str::to_owned)).or(self.config_refused.as_ref())
    }
}

/// What a new set is checked with before it is put in force.
pub struct Checks {
    /// The VMs that are rendered with it.
    pub caches: Arc<[Caches]>,
    /// Where their objects are tried out.
    pub cluster: Cluster,
    /// The configuration of the file, as it changes.
    pub wanted: watch::Receiver<Arc<ReconcilerConfig>>,
    /// Writes events about a refused set.
    pub recorder: Arc<EventRecorder>,
}

impl Checks {
    fn vms(&self) -> impl Iterator<Item = VirtualMachine> {
        self.caches.iter().flat_map(Caches::vms)
    }

    /// The VMs that a set renders, with their objects.
    fn observed(&self, set: Option<&str>) -> impl Iterator<Item = (VirtualMachine, Observed)> + Send {
        self.caches.iter().flat_map(move |caches| caches.observed(move |vm| is_rendered(vm, set)))
    }

    /// All other VMs.
    fn bystanders(&self, set: Option<&str>) -> Vec<Bystander> {
        let others = self.caches.iter().flat_map(|caches| caches.observed(|vm| !is_rendered(vm, set)));
        others.map(|(vm, observed)| Bystander::of(&vm, &observed)).collect()
    }
}

/// Whether a set renders the VM.
fn is_rendered(vm: &VirtualMachine, set: Option<&str>) -> bool {
    vm.spec.invalid.is_none() && vm.template_set() == set
}

/// Waits until the VMs of all namespaces are listed, for [`FIRST_VMS`] at most. Returns whether they are.
async fn are_started(namespaces: impl Iterator<Item = watch::Receiver<bool>>) -> bool {
    let all = async {
        for mut started in namespaces {
            let _ = started.wait_for(|started| *started).await;
        }
    };
    timeout(FIRST_VMS, all).await.is_ok()
}

/// Follows the folder and the ConfigMaps, and puts sets in force.
pub struct Loader {
    gathered: watch::Receiver<Gathered>,
    /// Which sets and which configuration are in force.
    state: State,
    sender: watch::Sender<Arc<InForce>>,
    config: watch::Sender<Arc<ReconcilerConfig>>,
    /// The sets in force, for the next manager.
    store: Store,
    metrics: Arc<Metrics>,
    namespace: String,
}

impl Loader {
    /// Reads all sets and begins to follow them. The sets that were in force last are in force again, and what is newer is checked when
    /// all VMs are known. Sets that were never in force and compile are in force at once: no VM uses them yet.
    ///
    /// The configuration that was in force last is in force again, too, until another one is checked.
    pub async fn start(
        client: &Client,
        namespace: &str,
        folder: Option<PathBuf>,
        wanted: &watch::Receiver<Arc<ReconcilerConfig>>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (sender, mut gathered) = watch::channel(Gathered::default());
        if let Some(folder) = folder {
            let first = files::sources(&folder);
            let note = |sender: &watch::Sender<Gathered>, result: &Result<Sources, FileError>| {
                sender.send_modify(|gathered| match result {
                    Ok(sources) => (gathered.folder, gathered.unreadable) = (Some(sources.clone()), None),
                    Err(error) => gathered.unreadable = Some(TemplateError::from(error)),
                });
            };
            note(&sender, &first);
            let sender = sender.clone();
            tokio::spawn(async move {
                reload::follow(
                    Followed::Folder(&folder),
                    first,
                    || files::sources(&folder),
                    |result| note(&sender, result),
                )
                .await
            });
        }
        let (listed, mut ready) = watch::channel(false);
        let maps = Api::namespaced(client.clone(), namespace);
        tokio::spawn(follow_maps(maps, sender.clone(), listed));
        if timeout(FIRST_LIST, ready.wait_for(|ready| *ready)).await.is_err() {
            warn!(label = SET_LABEL, "the ConfigMaps with template sets can't be listed yet; VMs that use one wait");
        }
        let now = gathered.borrow_and_update().clone();
        let sources = now.sources();
        let mut store = Store::read(client, namespace).await;
        let wanted = wanted.borrow().clone();
        let config = store.config().map_or_else(|| wanted.clone(), |kept| Arc::new(kept.with_limits_of(&wanted)));
        let mut in_force = InForce {
            library: Library::new(&sources),
            refused: BTreeMap::new(),
            former: state::former(store.kept()),
            config_refused: None,
        };
        if let (Some(error), None) = (&now.unreadable, &now.folder) {
            in_force.library.put(None, Err(error.clone()));
        }
        let unchecked = state::restore(store.kept(), &mut in_force.library);
        // No VM is known yet, but the examples show a set that never ends or takes all memory.
        let mut harmful = Vec::new();
        for (name, set) in in_force.library.usable().filter(|(_, set)| *set.layers() != Layers::default()) {
            if let Some(error) = in_force::too_large(set) {
                harmful.push((name.map(str::to_owned), error));
                continue;
            }
            let examples = || check::examples().into_iter().map(|vm| (vm, Observed::nothing(clock::now())));
            if let Err(sandbox::Failure::Refused(error, None)) =
                sandbox::check(None, set, examples, Vec::new, None, &check::example_config()).await
            {
                harmful.push((name.map(str::to_owned), error));
            }
        }
        for (name, error) in harmful {
            in_force.library.put(name.as_deref(), Err(error));
        }
        let mut good = true;
        for (name, set) in in_force.library.all() {
            let name = name.unwrap_or("(all)");
            match set {
                Ok(set) => info!(set = name, version = set.version(), templates = set.names().count(), "compiled"),
                Err(error) => {
                    good = false;
                    error!(set = name, %error, "the templates can't be used; VMs are left as they are until this is corrected");
                }
            }
        }
        metrics.templates_loaded(good);
        if config == wanted {
            store.keep_config(&config).await;
        }
        if !unchecked {
            for (name, set) in in_force.library.usable() {
                store.keep(name, None, set).await;
            }
        }
        let state = State::new(in_force, config, now, unchecked, Instant::now());
        let (sender, _) = watch::channel(state.in_force().clone());
        let (config, _) = watch::channel(state.config().clone());
        Self { gathered, state, sender, config, store, metrics, namespace: namespace.to_owned() }
    }

    /// The configuration in force, as it changes.
    pub fn config(&self) -> watch::Receiver<Arc<ReconcilerConfig>> {
        self.config.subscribe()
    }

    /// The sets in force, as they change.
    pub fn in_force(&self) -> watch::Receiver<Arc<InForce>> {
        self.sender.subscribe()
    }

    /// Follows changes. A changed set is checked with the VMs that are known then.
    pub async fn follow(mut self, checks: Checks) {
        let mut wanted = checks.wanted.clone();
        let mut input = if self.state.is_unchecked() || *wanted.borrow() != *self.state.config() {
            // A set is checked with all VMs.
            if !are_started(checks.caches.iter().map(|caches| caches.started.clone())).await {
                warn!("changed templates are checked without the VMs of namespaces that can't be listed yet");
            }
            self.wanted(&mut wanted)
        } else {
            let Some(first) = self.next_input(&checks, &mut wanted).await else { return };
            first
        };
        loop {
            let began = Instant::now();
            let mut actions = self.state.next(input, began);
            let is_look = !actions.is_empty();
            while let Some(result) = self.execute(actions, &checks).await {
                actions = self.state.next(result, Instant::now());
            }
            if is_look {
                info!(took = ?began.elapsed(), "the templates were looked at");
            }
            let Some(next) = self.next_input(&checks, &mut wanted).await else { return };
            input = next;
        }
    }

    fn wanted(&mut self, wanted: &mut watch::Receiver<Arc<ReconcilerConfig>>) -> Input {
        Input::Wanted(self.gathered.borrow_and_update().clone(), wanted.borrow_and_update().clone())
    }

    /// Waits for the next input. Tries again meanwhile to keep what could not be kept. `None`: nothing can change any more.
    async fn next_input(
        &mut self,
        checks: &Checks,
        wanted: &mut watch::Receiver<Arc<ReconcilerConfig>>,
    ) -> Option<Input> {
        loop {
            if self.store.has_failed() {
                self.store.keep_failed().await;
            }
            let changed = has_changed(&mut self.gathered, wanted);
            let changed = if self.state.waits() || self.store.has_failed() {
                timeout(AGAIN, changed).await.ok()
            } else {
                Some(changed.await)
            };
            match changed {
                Some(changed) => return changed.then(|| self.wanted(wanted)),
                None if self.state.waits() => {
                    return Some(Input::Timer { may_pass: self.state.may_pass(|| checks.vms()) });
                }
                None => {}
            }
        }
    }

    /// Does what the state machine says. The last action may be one that has a result.
    async fn execute(&mut self, actions: Vec<Action>, checks: &Checks) -> Option<Input> {
        let mut result = None;
        for action in actions {
            match action {
                Action::Limit(config) => drop(self.config.send_replace(config)),
                Action::ConfigTakenBack => self.metrics.config_loaded(true),
                Action::KeepConfig(config) => self.store.keep_config(&config).await,
                Action::TryConfig { in_force, wanted, trials } => {
                    let configs = Configs { in_force: Some(&in_force), wanted: &wanted };
                    result = Some(Input::ConfigTried(try_config(&trials, configs, checks).await));
                }
                Action::UseConfig { config, keys } => {
                    info!(keys, "the new configuration is in force");
                    self.metrics.config_loaded(true);
                    self.config.send_replace(config.clone());
                    self.store.keep_config(&config).await;
                }
                Action::RefuseConfig { keys, refused, why } => self.refuse_config(&keys, &refused, &why, checks),
                Action::TrySets { config, trials } => {
                    let mut tried = BTreeMap::new();
                    for trial in trials {
                        let checked = try_set(&trial, &config, checks).await;
                        tried.insert(trial.set, checked);
                    }
                    let mut users = BTreeMap::new();
                    for set in checks.vms().filter_map(|vm| vm.template_set().map(str::to_owned)) {
                        *users.entry(set).or_default() += 1;
                    }
                    result = Some(Input::SetsTried { tried, users });
                }
                Action::RefuseSet { set, map, refused } => self.refuse_set(set.as_deref(), map, &refused, checks),
                Action::SetGone(set) => info!(set, "the template set is gone"),
                Action::UseSets(in_force) => self.use_sets(in_force).await,
            }
        }
        result
    }

    /// Puts sets in force, and keeps them for the next manager.
    async fn use_sets(&mut self, in_force: Arc<InForce>) {
        for (name, set) in in_force.library.usable() {
            self.store.keep(name, None, set).await;
        }
        for former in &in_force.former {
            self.store.keep(former.set.as_deref(), Some(&former.version), &former.templates).await;
        }
        let is_needed = |(set, version): &in_force::Name| match version {
            None => in_force.library.all().any(|(name, _)| name == set.as_deref()),
            Some(version) => in_force.former.iter().any(|former| former.set == *set && former.version == *version),
        };
        self.store.retain(is_needed).await;
        self.metrics.templates_loaded(in_force.refused.is_empty());
        self.sender.send_replace(in_force);
    }

    /// Reports that the newest configuration is not used: in the log and with an event.
    fn refuse_config(&self, keys: &str, refused: &Refused, why: &TemplateError, checks: &Checks) {
        let Refused { error, vm } = refused;
        let machine = vm.as_deref().map(VirtualMachine::full_name);
        error!(keys, vm = machine, %error, "the new configuration is not used; the last good one stays in force");
        self.metrics.config_loaded(false);
        if let Some(vm) = vm {
            let note = format!("the new configuration is not used, the last good one stays in force: {why}");
            let event = Event { reason: Reason::ConfigurationRefused, note, action: "Check" };
            checks.recorder.record(event, ObjectReference { resource_version: None, ..vm.object_ref(&()) });
        }
    }

    /// Reports that the newest version of a set is not used: in the log and with events, also about its ConfigMap.
    fn refuse_set(&self, set: Option<&str>, map: Option<String>, refused: &Refused, checks: &Checks) {
        let Refused { error, vm } = refused;
        let machine = vm.as_deref().map(VirtualMachine::full_name);
        error!(set = set.unwrap_or("(all)"), vm = machine, %error, "new templates are not used; the last good ones stay in force");
        let note = format!("new templates are not used, the last good ones stay in force: {error}{}", refused.with());
        let event = || Event { reason: Reason::TemplatesRefused, note: note.clone(), action: "Check" };
        if let Some(vm) = vm {
            checks.recorder.record(event(), ObjectReference { resource_version: None, ..vm.object_ref(&()) });
        }
        if let Some(map) = map {
            checks.recorder.record(
                event(),
                ObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("ConfigMap".into()),
                    name: Some(map),
                    namespace: Some(self.namespace.clone()),
                    ..ObjectReference::default()
                },
            );
        }
    }
}

/// Tries a configuration with these sets and all VMs.
async fn try_config(trials: &[Trial], configs: Configs<'_>, checks: &Checks) -> Checked<()> {
    for trial in trials {
        examine(trial, configs, checks).await?;
    }
    Ok(())
}

/// Renders the VMs of the set, asks for the rights that it needs, and tries the objects that would change with a dry run. Returns the versions
/// that VMs keep.
async fn try_set(trial: &Trial, config: &ReconcilerConfig, checks: &Checks) -> Checked<BTreeSet<String>> {
    let Trial { set, before: _, templates } = trial;
    if let Some(error) = in_force::too_large(templates) {
        return Err(Some(Refused { error, vm: None }));
    }
    let (outcome, tried) = examine(trial, Configs { in_force: None, wanted: config }, checks).await?;
    info!(
        set = set.as_deref().unwrap_or("(all)"),
        version = templates.version(),
        vms = outcome.vms,
        changed = outcome.changed,
        tried,
        kept_back = outcome.misfits,
        "new templates are in force"
    );
    Ok(outcome.kept_versions)
}

/// What a set or a configuration changes, and how many objects were tried with a dry run.
async fn examine(trial: &Trial, configs: Configs<'_>, checks: &Checks) -> Checked<(SetEffect, usize)> {
    let Trial { set, before, templates } = trial;
    let check = async || {
        let (users, bystanders) = (|| checks.observed(set.as_deref()), || checks.bystanders(set.as_deref()));
        let checked =
            sandbox::check(before.as_ref(), templates, users, bystanders, configs.in_force, configs.wanted).await;
        checked.map_err(|failure| match failure {
            sandbox::Failure::Refused(error, vm) => Some(Refused { error, vm }),
            sandbox::Failure::Io(error) => {
                error!(%error, "the process that checks templates can't be started");
                None
            }
        })
    };
    let complete = || checks.caches.iter().map(|caches| caches.children.complete()).sum::<usize>();
    let (mut outcome, unusable) = loop {
        let before = complete();
        let outcome = check().await?;
        let unusable = unusable_kinds(&outcome, checks).await?;
        learn_kinds(&outcome, &unusable, checks).await?;
        // Otherwise it was not known whether an object exists, and must be changed instead of made.
        if complete() <= before {
            break (outcome, unusable);
        }
    };
    let mut tried = 0;
    for of_shape in std::mem::take(&mut outcome.samples) {
        for sample in of_shape.iter().filter(|sample| !unusable.contains(&sample.object.key.types())) {
            tried += 1;
            if try_out(sample, &checks.cluster).await? {
                break;
            }
        }
    }
    Ok((outcome, tried))
}

/// Waits until the objects of a set's kinds are known, but for those that can't be used. After a start those of kinds that only VMs with a set of their own
/// have are not known yet. `Err(None)`: the API server does not list them now.
async fn learn_kinds(outcome: &SetEffect, unusable: &HashSet<TypeMeta>, checks: &Checks) -> Checked<()> {
    let usable: Vec<&Use> = outcome.uses.iter().filter(|used| !unusable.contains(&used.kind)).collect();
    let unknown = checks.caches.iter().flat_map(|Caches { children, .. }| {
        let is_here = |used: &&&Use| children.namespace().is_none_or(|here| used.namespaces.contains(here));
        let kinds = usable.iter().filter(is_here).map(|used| &used.kind);
        kinds.filter(|kind| !children.knows(kind)).map(move |kind| (children, kind))
    });
    let unknown: Vec<_> = unknown.collect();
    let listed = unknown.iter().map(|(children, kind)| timeout(FIRST_LIST, children.watch([(*kind).clone()])));
    let _ = join_all(listed).await;
    match unknown.iter().find(|(children, kind)| !children.knows(kind)) {
        Some((_, kind)) => {
            warn!(
                error = format!("the objects of the kind {} can't be listed", kind.kind),
                "the templates can't be tried out now"
            );
            Err(None)
        }
        None => Ok(()),
    }
}

/// The configurations of a check.
#[derive(Clone, Copy)]
struct Configs<'a> {
    /// The one in force, if it is another one.
    in_force: Option<&'a ReconcilerConfig>,
    /// The one with which VMs are to be rendered.
    wanted: &'a ReconcilerConfig,
}

/// Waits until templates or the configuration change. Returns false if the templates can't change any more.
async fn has_changed(
    gathered: &mut watch::Receiver<Gathered>,
    wanted: &mut watch::Receiver<Arc<ReconcilerConfig>>,
) -> bool {
    tokio::select! {
        changed = gathered.changed() => changed.is_ok(),
        // A configuration without a file never changes.
        Ok(()) = wanted.changed() => true,
    }
}

/// Tries an object with a dry run. Returns whether the API server accepts it. If it refuses the object, and refuses the one of the set in use
/// too, that is the VM's own matter: its spec, a quota of its namespace, a port that is taken. `Err(None)`: the API server did not answer.
async fn try_out(sample: &Sample, cluster: &Cluster) -> Checked<bool> {
    let Sample { vm, object, former, exists } = sample;
    let Err(error) = dry_run(vm, object, *exists, cluster).await? else { return Ok(true) };
    let is_own = match former {
        _ if error.is_of_namespace() => true,
        Some(former) => dry_run(vm, former, *exists && former.key == object.key, cluster).await?.is_err(),
        None => false,
    };
    if is_own {
        let (vm, object) = (vm.full_name(), &object.key);
        debug!(vm, %object, error = %ErrorChain(&error), "the API server refuses the object with the templates in force too");
        return Ok(false);
    }
    let message = match &error {
        ActionError::Api { source, .. } => format!("the API server refuses {}: {}", object.key, ErrorChain(&**source)),
        error => ErrorChain(error).to_string(),
    };
    // The API server was asked about an object with another name.
    let message = message.replace(&check::trial(object).key.name, &object.key.name);
    let error = TemplateError::refused(&object.template, message);
    Err(Some(Refused { error, vm: Some(Box::new(vm.clone())) }))
}

/// The API server's answer to a change of the object that `exists`, or to a new object. `Err(None)`: there is none.
async fn dry_run(
    vm: &VirtualMachine,
    object: &Rendered,
    exists: bool,
    cluster: &Cluster,
) -> Checked<Result<(), ActionError>> {
    let object = if exists { Cow::Borrowed(object) } else { Cow::Owned(check::trial(object)) };
    match cluster.dry_run(vm, &object).await {
        Err(error) if error.is_transient() => {
            warn!(error = %ErrorChain(&error), "the templates can't be tried out now");
            Err(None)
        }
        answer => Ok(answer),
    }
}

/// Asks whether the manager can use the kinds of a new set. Returns the kinds that it can't use and that only one VM has: that VM reports
/// it. `Err(None)`: the API server did not answer.
async fn unusable_kinds(outcome: &SetEffect, checks: &Checks) -> Checked<HashSet<TypeMeta>> {
    let mut unusable = HashSet::new();
    for used in &outcome.uses {
        let (watching, in_namespaces) = used.verbs();
        match checks
            .cluster
            .unusable(&used.kind, &Rights { watching, in_namespaces, namespaces: &used.namespaces })
            .await
        {
            Ok(None) => {}
            Ok(Some(why)) if used.is_of_one_vm(outcome) => {
                warn!(kind = used.kind.kind, error = why, "only one VM has objects of a kind that can't be used");
                unusable.insert(used.kind.clone());
            }
            Ok(Some(why)) => {
                let error = TemplateError::refused(&used.template, why);
                return Err(Some(Refused { error, vm: None }));
            }
            Err(error) => {
                warn!(error = %ErrorChain(&error), "the templates can't be tried out now");
                return Err(None);
            }
        }
    }
    Ok(unusable)
}

/// Follows the ConfigMaps with the label.
async fn follow_maps(api: Api<ConfigMap>, sender: watch::Sender<Gathered>, listed: watch::Sender<bool>) {
    let config = watcher::Config::default().labels(SET_LABEL);
    let mut events = std::pin::pin!(list_watch(api, config));
    let mut listing = Maps::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(watcher::Event::Init) => listing.clear(),
            Ok(watcher::Event::InitApply(map)) => drop(listing.insert(map.name_any(), content(map))),
            Ok(watcher::Event::InitDone) => {
                let maps = std::mem::take(&mut listing);
                sender.send_modify(|gathered| gathered.maps = maps);
                listed.send_replace(true);
            }
            Ok(watcher::Event::Apply(map)) => {
                sender.send_modify(|gathered| drop(gathered.maps.insert(map.name_any(), content(map))));
            }
            Ok(watcher::Event::Delete(map)) => {
                sender.send_modify(|gathered| drop(gathered.maps.remove(&map.name_any())));
            }
            Err(error) => {
                warn!(label = SET_LABEL, error = %ErrorChain(&error), "ConfigMaps with template sets can't be watched");
            }
        }
    }
}

fn content(map: ConfigMap) -> (String, Files) {
    let set = map.labels().get(SET_LABEL).cloned().unwrap_or_default();
    (set, files::unpacked(map.data.unwrap_or_default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_namespace_that_is_never_listed_does_not_hold_up_the_others() {
        let (listed, never) = (watch::channel(true), watch::channel(false));
        let (late, lists) = watch::channel(false);
        assert!(are_started([listed.1.clone()].into_iter()).await);
        assert!(!are_started([never.1.clone(), listed.1.clone()].into_iter()).await);
        tokio::spawn(async move {
            tokio::time::sleep(FIRST_VMS / 2).await;
            late.send_replace(true);
            never.0.closed().await;
        });
        assert!(are_started([listed.1, lists].into_iter()).await);
    }
}
