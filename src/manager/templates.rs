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
//! A set is used as a whole or not at all. A set that is refused does not hold up another one.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::StreamExt;
use k8s_openapi::{
    api::core::v1::{ConfigMap, ObjectReference},
    jiff::Timestamp,
};
use kube::{Api, Client, Resource, ResourceExt, core::TypeMeta, runtime::watcher};
use tokio::{sync::watch, time::timeout};
use tracing::{debug, error, info, warn};

use super::{
    caches::Caches,
    in_force::{self, Store},
    reload::{self, Followed},
    sandbox,
};
use crate::{
    api::{Reason, VirtualMachine, reasons::Event},
    cluster::{ActionError, Cluster, list_watch::list_watch, rights::Rights},
    config::ReconcilerConfig,
    events::EventRecorder,
    files::{self, FileError},
    metrics::Metrics,
    object::{Rendered, SET_LABEL, builtin_kinds, stateful_sets},
    observed::Observed,
    process::ErrorChain,
    render::{
        Files, Library, Sources, TemplateError, TemplateSet,
        check::{self, Bystander, Outcome, Sample},
        templates::Layers,
    },
};

/// How long the manager waits at its start for the list of the ConfigMaps. VMs whose set is not known yet wait longer.
const FIRST_LIST: Duration = Duration::from_secs(10);
/// How long a changed set waits at the start for the VMs of all namespaces. One of which the manager may list nothing must not hold up the others.
const FIRST_VMS: Duration = Duration::from_secs(30);
/// When a check that could not run is tried again. Also when a set that was refused is looked at again for the first time, although neither
/// it nor the VM with which it failed has changed: a right or a quota may have. The pause doubles each time.
const AGAIN: Duration = Duration::from_secs(5);
/// How many keys of a refused configuration are named.
const MOST_KEYS: usize = 8;
/// The longest pause before a set that was refused is looked at again. With the time of a look it is less than a minute.
const REFUSED_AGAIN: Duration = Duration::from_secs(45);

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

    /// The kinds of objects that VMs usually have or had.
    pub fn usual_kinds(&self) -> HashSet<TypeMeta> {
        let of_all = self.library.get(None).map(check::kinds).unwrap_or_default();
        of_all.into_iter().chain(builtin_kinds()).chain([stateful_sets()]).collect()
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

/// The ConfigMaps with named sets: name of the ConfigMap, name of its set, files.
type Maps = BTreeMap<String, (String, Files)>;

/// Where templates come from.
#[derive(Clone, Debug, Default)]
struct Gathered {
    folder: Option<Sources>,
    unreadable: Option<TemplateError>,
    maps: Maps,
}

impl Gathered {
    fn sources(&self) -> Sources {
        let mut sources = self.folder.clone().unwrap_or_default();
        for (set, files) in self.maps.values() {
            sources.sets.entry(set.clone()).or_default().extend(files.clone());
        }
        sources
    }

    /// The ConfigMap of a set, for events.
    fn map_of(&self, set: &str) -> Option<&str> {
        self.maps.iter().find(|(_, (name, _))| name == set).map(|(map, _)| map.as_str())
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
    sender: watch::Sender<Arc<InForce>>,
    /// The configuration in force.
    config: watch::Sender<Arc<ReconcilerConfig>>,
    /// Why the newest one is not.
    config_refused: Option<TemplateError>,
    /// What was compiled last, whether it is in force or not.
    last: Sources,
    /// The sets in force, for the next manager.
    store: Store,
    /// Whether a set must be checked although its files have not changed since the start.
    unchecked: bool,
    /// The VMs with which the refused sets failed, as they were then.
    refusers: Vec<Refuser>,
    /// How often refused sets were looked at again since something has changed.
    tries: u32,
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
            former: former(&store),
            config_refused: None,
        };
        if let (Some(error), None) = (&now.unreadable, &now.folder) {
            in_force.library.put(None, Err(error.clone()));
        }
        let unchecked = restore(&store, &mut in_force.library);
        // No VM is known yet, but the examples show a set that never ends or takes all memory.
        let library = in_force.library.all().filter_map(|(name, set)| Some((name, set.as_ref().ok()?)));
        let mut harmful = Vec::new();
        for (name, set) in library.filter(|(_, set)| *set.layers() != Layers::default()) {
            if let Some(error) = in_force::too_large(set) {
                harmful.push((name.map(str::to_owned), error));
                continue;
            }
            let examples = || check::examples().into_iter().map(|vm| (vm, Observed::nothing(Timestamp::now())));
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
            for (name, set) in in_force.library.all().filter_map(|(name, set)| Some((name, set.as_ref().ok()?))) {
                store.keep(name, None, set).await;
            }
        }
        let (sender, _) = watch::channel(Arc::new(in_force));
        let (namespace, refusers, tries) = (namespace.to_owned(), Vec::new(), 0);
        let ((config, _), config_refused) = (watch::channel(config), None);
        Self {
            gathered,
            sender,
            config,
            config_refused,
            last: sources,
            store,
            unchecked,
            refusers,
            tries,
            metrics,
            namespace,
        }
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
        let mut last_wanted = self.config.borrow().clone();
        let (mut again, mut was_unreadable) = (self.unchecked, false);
        let mut looked = Instant::now();
        if self.unchecked || *wanted.borrow() != last_wanted {
            // A set is checked with all VMs.
            if !are_started(checks.caches.iter().map(|caches| caches.started.clone())).await {
                warn!("changed templates are checked without the VMs of namespaces that can't be listed yet");
            }
        } else if !has_changed(&mut self.gathered, &mut wanted).await {
            return;
        }
        loop {
            let config = wanted.borrow_and_update().clone();
            let now = self.gathered.borrow_and_update().clone();
            let sources = now.sources();
            let is_unreadable = now.unreadable.is_some();
            if sources != self.last || config != last_wanted || again || is_unreadable || was_unreadable {
                was_unreadable = is_unreadable;
                self.tries = if sources == self.last && config == last_wanted { self.tries + 1 } else { 0 };
                last_wanted = config.clone();
                let started = Instant::now();
                let config_again = self.check_config(&config, &sources, &checks).await;
                again = self.check_all(&now, &sources, &checks).await || config_again;
                self.last = sources;
                looked = Instant::now();
                info!(took = ?started.elapsed(), "the templates were looked at");
            }
            again = match self.next_look(again, looked, &checks, &mut wanted).await {
                Some(again) => again,
                None => return,
            };
        }
    }

    /// Waits until the sets must be looked at again: at once after a change, and soon if a check could not run (`again`) or a set is refused
    /// and may pass now. Returns whether they must be checked although they have not changed; `None` if nothing can change any more.
    async fn next_look(
        &mut self,
        again: bool,
        looked: Instant,
        checks: &Checks,
        wanted: &mut watch::Receiver<Arc<ReconcilerConfig>>,
    ) -> Option<bool> {
        loop {
            if self.store.has_failed() {
                self.store.keep_failed().await;
            }
            let is_refused = !self.sender.borrow().refused.is_empty() || self.config_refused.is_some();
            if !again && !is_refused && !self.store.has_failed() {
                return has_changed(&mut self.gathered, wanted).await.then_some(false);
            }
            if let Ok(changed) = timeout(AGAIN, has_changed(&mut self.gathered, wanted)).await {
                return changed.then_some(again);
            }
            let has_changed = |refuser: &Refuser| !checks.vms().any(|vm| self::refuser(&vm) == *refuser);
            let may_pass = || self.refusers.iter().any(has_changed);
            if again || is_refused && (looked.elapsed() >= pause(self.tries) || may_pass()) {
                return Some(true);
            }
        }
    }

    /// Checks each set that has changed and puts it in force, or refuses it. Returns whether a check could not run and must be
    /// repeated.
    async fn check_all(&mut self, now: &Gathered, sources: &Sources, checks: &Checks) -> bool {
        let old = self.sender.borrow().clone();
        // All sets are compiled anew: the sets of a folder belong together, and compiling is fast.
        let compiled = Library::new(sources);
        let mut new = InForce {
            library: Library::new(&Sources::default()),
            refused: BTreeMap::new(),
            former: Vec::new(),
            config_refused: self.config_refused.clone(),
        };
        let mut again = false;
        let is_known = |set: Option<&str>, error: &TemplateError| {
            self.tries > 0 && old.refused.get(&set.map(str::to_owned)) == Some(error)
        };
        let (mut refusers, mut in_use) = (Vec::new(), Vec::new());
        if let Some(error) = &now.unreadable {
            new.refused.insert(None, error.clone());
            if !is_known(None, error) {
                self.refuse(&Refusal { set: None, error, vm: None }, now, &checks.recorder);
            }
        }
        for (name, set) in compiled.all() {
            let before = old.library.all().find(|(old, _)| *old == name).and_then(|(_, set)| set.as_ref().ok());
            let (name, set) = (name.map(str::to_owned), set.clone());
            let formers = old.former.iter().filter(|former| former.set == name).cloned();
            let checked = match set {
                Ok(set) if before.is_some_and(|before| before.version() == set.version()) => {
                    new.former.extend(formers);
                    Ok(set)
                }
                Ok(set) => {
                    self.check(name.as_deref(), before.cloned(), set, checks).await.map(|(set, kept_versions)| {
                        let last = before.map(|before| Former {
                            set: name.clone(),
                            version: before.version().to_owned(),
                            templates: before.clone(),
                        });
                        let is_kept = |former: &Former| {
                            [former.version.as_str(), former.templates.version()]
                                .iter()
                                .any(|it| kept_versions.contains(*it))
                        };
                        new.former.extend(formers.chain(last).filter(is_kept));
                        set
                    })
                }
                Err(error) => Err(Some(Refused { error, vm: None })),
            };
            let kept = match checked {
                Ok(set) => Ok(set),
                Err(why) => {
                    new.former.extend(old.former.iter().filter(|former| former.set == name).cloned());
                    let error = match why {
                        Some(Refused { error, vm }) => {
                            let refusal = Refusal { set: name.as_deref(), error: &error, vm: vm.as_deref() };
                            if !is_known(name.as_deref(), &error) {
                                self.refuse(&refusal, now, &checks.recorder);
                            }
                            refusers.extend(vm.as_deref().map(refuser));
                            error
                        }
                        None => {
                            again = true;
                            TemplateError::refused("(check)", "they can't be checked now; it is tried again")
                        }
                    };
                    new.refused.insert(name.clone(), error.clone());
                    before.cloned().ok_or(error)
                }
            };
            if let Ok(set) = &kept {
                in_use.push((name.clone(), set.clone()));
            }
            new.library.put(name.as_deref(), kept);
        }
        // A set that is deleted while VMs use it stays in force as long as the manager runs.
        for (name, set) in old.library.all().filter_map(|(name, set)| Some((name?, set))) {
            if compiled.all().any(|(compiled, _)| compiled == Some(name)) {
                continue;
            }
            let users = checks.vms().filter(|vm| vm.template_set() == Some(name)).count();
            if users > 0 {
                let error = TemplateError::refused(
                    &format!("sets/{name}"),
                    format!("the set is gone, but {users} VMs use it; the manager keeps it until it ends"),
                );
                if !is_known(Some(name), &error) {
                    self.refuse(&Refusal { set: Some(name), error: &error, vm: None }, now, &checks.recorder);
                }
                new.refused.insert(Some(name.to_owned()), error);
                new.library.put(Some(name), set.clone());
            } else {
                info!(set = name, "the template set is gone");
            }
        }
        self.refusers = refusers;
        for (name, set) in &in_use {
            self.store.keep(name.as_deref(), None, set).await;
        }
        for former in &new.former {
            self.store.keep(former.set.as_deref(), Some(&former.version), &former.templates).await;
        }
        let is_needed = |(set, version): &in_force::Name| match version {
            None => new.library.all().any(|(name, _)| name == set.as_deref()),
            Some(version) => new.former.iter().any(|former| former.set == *set && former.version == *version),
        };
        self.store.retain(is_needed).await;
        self.metrics.templates_loaded(new.refused.is_empty());
        self.sender.send_replace(Arc::new(new));
        again
    }

    /// Checks a changed configuration and puts it in force, or keeps the last good one. Returns whether the check could not run and must be
    /// repeated.
    async fn check_config(&mut self, wanted: &Arc<ReconcilerConfig>, sources: &Sources, checks: &Checks) -> bool {
        let in_force = self.config.borrow().clone();
        let limited = Arc::new(in_force.with_limits_of(wanted));
        if limited != in_force {
            self.config.send_replace(limited.clone());
        }
        if limited == *wanted {
            if self.config_refused.take().is_some() {
                self.metrics.config_loaded(true);
            }
            self.store.keep_config(wanted).await;
            return false;
        }
        let old = self.sender.borrow().clone();
        let usable = |library: &Library| -> Vec<(Option<String>, TemplateSet)> {
            let sets =
                library.all().filter_map(|(name, set)| Some((name.map(str::to_owned), set.as_ref().ok()?.clone())));
            sets.collect()
        };
        let mut result = self.try_config(&old, usable(&old.library), &limited, wanted, checks).await;
        if matches!(result, Err(Some(_))) {
            // A change of both may need each other.
            let both = self.try_config(&old, usable(&Library::new(sources)), &limited, wanted, checks).await;
            result = if both.is_ok() { both } else { result };
        }
        let keys = limited.differences(wanted);
        let keys: Vec<&str> = keys.iter().take(MOST_KEYS).map(String::as_str).collect();
        let keys = keys.join(", ");
        match result {
            Ok(()) => {
                info!(keys, "the new configuration is in force");
                self.config_refused = None;
                self.metrics.config_loaded(true);
                self.config.send_replace(wanted.clone());
                self.store.keep_config(wanted).await;
                false
            }
            Err(None) => true,
            Err(Some(Refused { error, vm })) => {
                let machine = vm.as_deref().map(VirtualMachine::full_name);
                let with = machine.as_ref().map(|machine| format!(" (seen with {machine})")).unwrap_or_default();
                let why = TemplateError::of_configuration(&keys, format!("{error}{with}"));
                if self.config_refused.as_ref() != Some(&why) {
                    error!(keys, vm = machine, %error, "the new configuration is not used; the last good one stays in force");
                    self.metrics.config_loaded(false);
                    if let Some(vm) = &vm {
                        let note =
                            format!("the new configuration is not used, the last good one stays in force: {why}");
                        let event = Event { reason: Reason::ConfigurationRefused, note, action: "Check" };
                        checks.recorder.record(event, ObjectReference { resource_version: None, ..vm.object_ref(&()) });
                    }
                }
                self.config_refused = Some(why);
                false
            }
        }
    }

    /// Checks a configuration with these sets and all VMs. `Err(None)`: the check could not run.
    async fn try_config(
        &self,
        old: &InForce,
        sets: Vec<(Option<String>, TemplateSet)>,
        in_force: &ReconcilerConfig,
        wanted: &ReconcilerConfig,
        checks: &Checks,
    ) -> Result<(), Option<Refused>> {
        for (name, set) in sets {
            let before =
                old.library.all().find(|(old, _)| *old == name.as_deref()).and_then(|(_, set)| set.as_ref().ok());
            let configs = Configs { in_force: Some(in_force), wanted };
            self.examine(name.as_deref(), before, &set, configs, checks).await?;
        }
        Ok(())
    }

    /// Renders the VMs of the set, asks for the rights that it needs, and tries the objects that would change with a dry run. Returns also
    /// the versions that VMs keep. `Err(None)`: the check could not run.
    async fn check(
        &self,
        name: Option<&str>,
        before: Option<TemplateSet>,
        set: TemplateSet,
        checks: &Checks,
    ) -> Result<(TemplateSet, BTreeSet<String>), Option<Refused>> {
        if let Some(error) = in_force::too_large(&set) {
            return Err(Some(Refused { error, vm: None }));
        }
        let config = self.config.borrow().clone();
        let configs = Configs { in_force: None, wanted: &config };
        let (outcome, tried) = self.examine(name, before.as_ref(), &set, configs, checks).await?;
        info!(
            set = name.unwrap_or("(all)"),
            version = set.version(),
            vms = outcome.vms,
            changed = outcome.changed,
            tried,
            kept_back = outcome.misfits,
            "new templates are in force"
        );
        Ok((set, outcome.kept_versions))
    }

    /// What a set or a configuration changes, and how many objects were tried with a dry run. `Err(None)`: the check could not run.
    async fn examine(
        &self,
        name: Option<&str>,
        before: Option<&TemplateSet>,
        set: &TemplateSet,
        configs: Configs<'_>,
        checks: &Checks,
    ) -> Result<(Outcome, usize), Option<Refused>> {
        let (users, bystanders) = (|| checks.observed(name), || checks.bystanders(name));
        let checked = sandbox::check(before, set, users, bystanders, configs.in_force, configs.wanted).await;
        let mut outcome = match checked {
            Ok(outcome) => outcome,
            Err(sandbox::Failure::Refused(error, vm)) => return Err(Some(Refused { error, vm })),
            Err(sandbox::Failure::Io(error)) => {
                error!(%error, "the process that checks templates can't be started");
                return Err(None);
            }
        };
        let unusable = unusable_kinds(&outcome, checks).await?;
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

    /// Reports that the newest version of a set is not used: in the log and with events.
    fn refuse(&self, refusal: &Refusal<'_>, now: &Gathered, recorder: &EventRecorder) {
        let Refusal { set, error, vm } = *refusal;
        let machine = vm.map(VirtualMachine::full_name);
        error!(set = set.unwrap_or("(all)"), vm = machine, %error, "new templates are not used; the last good ones stay in force");
        let with = machine.map(|machine| format!(" (seen with {machine})")).unwrap_or_default();
        let note = format!("new templates are not used, the last good ones stay in force: {error}{with}");
        let event = || Event { reason: Reason::TemplatesRefused, note: note.clone(), action: "Check" };
        if let Some(vm) = vm {
            recorder.record(event(), ObjectReference { resource_version: None, ..vm.object_ref(&()) });
        }
        if let Some(map) = set.and_then(|set| now.map_of(set)) {
            recorder.record(
                event(),
                ObjectReference {
                    api_version: Some("v1".into()),
                    kind: Some("ConfigMap".into()),
                    name: Some(map.to_owned()),
                    namespace: Some(self.namespace.clone()),
                    ..ObjectReference::default()
                },
            );
        }
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
async fn try_out(sample: &Sample, cluster: &Cluster) -> Result<bool, Option<Refused>> {
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
) -> Result<Result<(), ActionError>, Option<Refused>> {
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
async fn unusable_kinds(outcome: &Outcome, checks: &Checks) -> Result<HashSet<TypeMeta>, Option<Refused>> {
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

/// The pause before refused sets are looked at again although nothing that the manager watches has changed.
fn pause(tries: u32) -> Duration {
    AGAIN.saturating_mul(1 << tries.min(10)).min(REFUSED_AGAIN)
}

/// The former versions that are kept and still compile.
fn former(store: &Store) -> Vec<Former> {
    let former = store.kept().iter().filter_map(|((set, version), layers)| {
        let (version, templates) = (version.clone()?, TemplateSet::compile(layers.clone()).ok()?);
        Some(Former { set: set.clone(), version, templates })
    });
    former.collect()
}

/// Puts the sets in force that were in force last, where something else would be now. Returns whether that is the case.
fn restore(store: &Store, library: &mut Library) -> bool {
    let mut is_newer = false;
    for ((name, _), layers) in store.kept().iter().filter(|((_, former), _)| former.is_none()) {
        let name = name.as_deref();
        let now = library.all().find(|(now, _)| *now == name).and_then(|(_, set)| set.as_ref().ok());
        if now.is_some_and(|set| set.layers() == layers) {
            continue;
        }
        // With other built-in templates, after an upgrade, it may not compile any more.
        if let Ok(set) = TemplateSet::compile(layers.clone()) {
            library.put(name, Ok(set));
            is_newer = true;
        }
    }
    is_newer
}

/// UID and generation of a VM with which a set failed.
type Refuser = (Option<String>, Option<i64>);

fn refuser(vm: &VirtualMachine) -> Refuser {
    (vm.uid(), vm.metadata.generation)
}

struct Refused {
    error: TemplateError,
    vm: Option<Box<VirtualMachine>>,
}

/// A set that is not put in force.
struct Refusal<'a> {
    /// Its name; `None`: the set of all VMs that name none.
    set: Option<&'a str>,
    error: &'a TemplateError,
    /// The VM with which the error was seen.
    vm: Option<&'a VirtualMachine>,
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

    #[test]
    fn a_refused_set_is_looked_at_again_within_a_minute() {
        let pauses: Vec<u64> = [0, 1, 2, 3, 4, 100].map(|tries| pause(tries).as_secs()).into();
        assert_eq!(pauses, [5, 10, 20, 40, 45, 45]);
        assert!(REFUSED_AGAIN + 2 * AGAIN < Duration::from_secs(60));
    }

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
