//! Which template sets and which configuration are in force, as a state machine. The input is what is wanted, how a check ended, or the time; the
//! output is what to do. Pure.
//!
//! | stage | meaning | next stage |
//! |---|---|---|
//! | Resting | what was wanted last is in force, or is refused | Configuration when something has changed; [`AGAIN`] after a check that could not run; while something is refused, when a VM with which it failed has changed, and after pauses that grow up to [`REFUSED_AGAIN`] |
//! | Configuration | the configuration, if it is another one, is tried with the sets in force, and if these refuse it, with the changed ones | Sets |
//! | Sets | the sets that have changed are tried, each with its VMs | Resting |
//!
//! What does not pass is not used: the last good set or configuration stays in force. A refusal is reported when it is new. A look that follows no change
//! reports the same one no more.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use super::{Former, InForce};
use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    manager::in_force::Name,
    render::{Files, Library, Sources, TemplateError, TemplateSet, templates::Layers},
};

/// When a check that could not run is tried again. Also when a set that was refused is looked at again for the first time, although neither
/// it nor the VM with which it failed has changed: a right or a quota may have. The pause doubles each time.
pub(super) const AGAIN: Duration = Duration::from_secs(5);
/// The longest pause before a set that was refused is looked at again. With the time of a look it is less than a minute.
const REFUSED_AGAIN: Duration = Duration::from_secs(45);
/// How many keys of a refused configuration are named.
const MOST_KEYS: usize = 8;

/// The ConfigMaps with named sets: name of the ConfigMap, name of its set, files.
pub(super) type Maps = BTreeMap<String, (String, Files)>;

/// Where templates come from.
#[derive(Clone, Debug, Default)]
pub(super) struct Gathered {
    pub folder: Option<Sources>,
    pub unreadable: Option<TemplateError>,
    pub maps: Maps,
}

impl Gathered {
    /// The files of all sets.
    pub fn sources(&self) -> Sources {
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

/// UID and generation of a VM with which a set failed.
type Refuser = (Option<String>, Option<i64>);

fn refuser(vm: &VirtualMachine) -> Refuser {
    (vm.metadata.uid.clone(), vm.metadata.generation)
}

/// Why a set or a configuration does not pass.
#[derive(Debug)]
pub(super) struct Refused {
    pub error: TemplateError,
    /// The VM with which the error was seen.
    pub vm: Option<Box<VirtualMachine>>,
}

impl Refused {
    /// The VM's name in brackets, for messages.
    pub fn with(&self) -> String {
        self.vm.as_ref().map(|vm| format!(" (seen with {})", vm.full_name())).unwrap_or_default()
    }
}

/// How a check ended. `Err(None)`: it could not run.
pub(super) type Checked<T> = Result<T, Option<Refused>>;

/// An input of the state machine.
#[derive(Debug)]
pub(super) enum Input {
    /// This is wanted now.
    Wanted(Gathered, Arc<ReconcilerConfig>),
    /// [`AGAIN`] has passed. `may_pass`: a VM with which a set failed is not as it was then ([`State::may_pass`]).
    Timer { may_pass: bool },
    /// How [`Action::TryConfig`] ended.
    ConfigTried(Checked<()>),
    /// How [`Action::TrySets`] ended for each set, with the versions that VMs keep, because their values do not match the new schema; and how many VMs use each set.
    SetsTried { tried: BTreeMap<Option<String>, Checked<BTreeSet<String>>>, users: BTreeMap<String, usize> },
}

/// What is to be done, in this order.
#[derive(Debug)]
pub(super) enum Action {
    /// Render with this configuration from now on. Only its limits have changed.
    Limit(Arc<ReconcilerConfig>),
    /// A configuration that was refused is not wanted any more.
    ConfigTakenBack,
    /// Keep the configuration, which is in force, for the next manager.
    KeepConfig(Arc<ReconcilerConfig>),
    /// Try the wanted configuration with these sets and all VMs.
    TryConfig { in_force: Arc<ReconcilerConfig>, wanted: Arc<ReconcilerConfig>, trials: Vec<Trial> },
    /// Render with this configuration from now on. These of its keys have changed.
    UseConfig { config: Arc<ReconcilerConfig>, keys: String },
    /// Report that the wanted configuration is not used.
    RefuseConfig { keys: String, refused: Refused, why: TemplateError },
    /// Try these sets with this configuration and the VMs that they render.
    TrySets { config: Arc<ReconcilerConfig>, trials: Vec<Trial> },
    /// Report that the newest version of a set is not used. `map` is its ConfigMap.
    RefuseSet { set: Option<String>, map: Option<String>, refused: Refused },
    /// A set is gone, and no VM uses it.
    SetGone(String),
    /// Render with these sets from now on.
    UseSets(Arc<InForce>),
}

/// A set to be tried.
#[derive(Debug)]
pub(super) struct Trial {
    /// Its name.
    pub set: Option<String>,
    /// The version in force.
    pub before: Option<TemplateSet>,
    /// The set.
    pub templates: TemplateSet,
}

/// What is tried now.
#[derive(Debug)]
enum Stage {
    Resting,
    /// `refused`: why the sets in force refuse the configuration, while the changed ones are tried.
    Configuration {
        compiled: Library,
        refused: Option<Refused>,
    },
    Sets {
        compiled: Library,
    },
}

/// Which sets and which configuration are in force, and what was tried last.
#[derive(Debug)]
pub(super) struct State {
    in_force: Arc<InForce>,
    config: Arc<ReconcilerConfig>,
    /// Why the newest configuration is not in force.
    config_refused: Option<TemplateError>,
    stage: Stage,
    /// What was wanted at the last look, whether it is in force or not.
    gathered: Gathered,
    sources: Sources,
    wanted: Arc<ReconcilerConfig>,
    /// When that was.
    looked: Instant,
    /// Whether something was not checked, or could not be, although it has not changed since.
    again: bool,
    /// The VMs with which the refused sets failed, as they were then.
    refusers: Vec<Refuser>,
    /// How often refused sets were looked at again since something has changed.
    tries: u32,
}

impl State {
    /// These are in force at the start. `gathered` is what was read then; with `unchecked` it has something that is not in force.
    pub fn new(
        in_force: InForce,
        config: Arc<ReconcilerConfig>,
        gathered: Gathered,
        unchecked: bool,
        now: Instant,
    ) -> Self {
        Self {
            in_force: Arc::new(in_force),
            wanted: config.clone(),
            config,
            config_refused: None,
            stage: Stage::Resting,
            sources: gathered.sources(),
            // What can't be read is reported at the first look.
            gathered: Gathered { unreadable: None, ..gathered },
            looked: now,
            again: unchecked,
            refusers: Vec::new(),
            tries: 0,
        }
    }

    /// The sets in force.
    pub fn in_force(&self) -> &Arc<InForce> {
        &self.in_force
    }

    /// The configuration in force.
    pub fn config(&self) -> &Arc<ReconcilerConfig> {
        &self.config
    }

    /// Whether something is to be checked although nothing has changed since the start.
    pub fn is_unchecked(&self) -> bool {
        self.again
    }

    /// Whether the caller must call [`State::next`] with [`Input::Timer`], if there is no other input within [`AGAIN`].
    pub fn waits(&self) -> bool {
        self.again || self.is_refused()
    }

    /// Whether a VM with which a set failed is not as it was then.
    pub fn may_pass<I: Iterator<Item = VirtualMachine>>(&self, vms: impl Fn() -> I) -> bool {
        self.refusers.iter().any(|refuser| !vms().any(|vm| self::refuser(&vm) == *refuser))
    }

    /// Processes an input. Returns what is to be done now.
    pub fn next(&mut self, input: Input, now: Instant) -> Vec<Action> {
        match (std::mem::replace(&mut self.stage, Stage::Resting), input) {
            (Stage::Resting, Input::Wanted(gathered, wanted)) => self.wanted(gathered, wanted),
            (Stage::Resting, Input::Timer { may_pass }) => {
                let is_over = now.saturating_duration_since(self.looked) >= pause(self.tries);
                if self.again || self.is_refused() && (is_over || may_pass) { self.look(true) } else { Vec::new() }
            }
            (Stage::Configuration { compiled, refused }, Input::ConfigTried(result)) => {
                self.config_tried(compiled, refused, result)
            }
            (Stage::Sets { compiled }, Input::SetsTried { tried, users }) => {
                self.sets_tried(&compiled, tried, &users, now)
            }
            // While something is tried nothing else comes.
            (stage, Input::Wanted(..) | Input::Timer { .. } | Input::ConfigTried(_) | Input::SetsTried { .. }) => {
                self.stage = stage;
                Vec::new()
            }
        }
    }

    fn is_refused(&self) -> bool {
        !self.in_force.refused.is_empty() || self.config_refused.is_some()
    }

    fn wanted(&mut self, gathered: Gathered, wanted: Arc<ReconcilerConfig>) -> Vec<Action> {
        let sources = gathered.sources();
        let is_same = sources == self.sources && wanted == self.wanted;
        let was_unreadable = self.gathered.unreadable.is_some();
        let is_unreadable = gathered.unreadable.is_some();
        (self.gathered, self.sources, self.wanted) = (gathered, sources, wanted);
        if is_same && !self.again && !is_unreadable && !was_unreadable { Vec::new() } else { self.look(is_same) }
    }

    /// Begins to try what is wanted. `is_same`: it was looked at before.
    fn look(&mut self, is_same: bool) -> Vec<Action> {
        self.tries = if is_same { self.tries + 1 } else { 0 };
        self.again = false;
        // All sets are compiled anew: the sets of a folder belong together, and compiling is fast.
        let compiled = Library::new(&self.sources);
        let mut actions = Vec::new();
        let limited = Arc::new(self.config.with_limits_of(&self.wanted));
        if limited != self.config {
            self.config = limited.clone();
            actions.push(Action::Limit(limited));
        }
        if self.config == self.wanted {
            actions.extend(self.config_refused.take().map(|_| Action::ConfigTakenBack));
            actions.push(Action::KeepConfig(self.config.clone()));
            actions.push(self.try_sets(compiled));
        } else {
            actions.push(self.try_config(compiled, None));
        }
        actions
    }

    /// Tries the configuration with the sets in force; if these have refused it, with the changed ones: a change of both may need each other.
    fn try_config(&mut self, compiled: Library, refused: Option<Refused>) -> Action {
        let library = if refused.is_some() { &compiled } else { &self.in_force.library };
        let trials = library.usable().map(|(name, templates)| self.trial(name, templates)).collect();
        self.stage = Stage::Configuration { compiled, refused };
        Action::TryConfig { in_force: self.config.clone(), wanted: self.wanted.clone(), trials }
    }

    fn trial(&self, set: Option<&str>, templates: &TemplateSet) -> Trial {
        Trial { set: set.map(str::to_owned), before: self.before(set).cloned(), templates: templates.clone() }
    }

    /// The version of a set that is in force.
    fn before(&self, set: Option<&str>) -> Option<&TemplateSet> {
        self.in_force.library.get(set).ok()
    }

    fn config_tried(&mut self, compiled: Library, earlier: Option<Refused>, result: Checked<()>) -> Vec<Action> {
        let refused = match (result, earlier) {
            (Err(Some(refused)), None) => return vec![self.try_config(compiled, Some(refused))],
            (Ok(()), _) => None,
            (Err(None), None) => {
                self.again = true;
                return vec![self.try_sets(compiled)];
            }
            (Err(_), Some(earlier)) => Some(earlier),
        };
        let keys = self.config.differences(&self.wanted);
        let keys: Vec<&str> = keys.iter().take(MOST_KEYS).map(String::as_str).collect();
        let keys = keys.join(", ");
        let mut actions = Vec::new();
        match refused {
            None => {
                self.config_refused = None;
                self.config = self.wanted.clone();
                actions.push(Action::UseConfig { config: self.config.clone(), keys });
            }
            Some(refused) => {
                let why = TemplateError::of_configuration(&keys, format!("{}{}", refused.error, refused.with()));
                if self.config_refused.replace(why.clone()).as_ref() != Some(&why) {
                    actions.push(Action::RefuseConfig { keys, refused, why });
                }
            }
        }
        actions.push(self.try_sets(compiled));
        actions
    }

    fn try_sets(&mut self, compiled: Library) -> Action {
        let changed = compiled.usable().filter(|(name, set)| !self.is_in_force(*name, set));
        let trials = changed.map(|(name, templates)| self.trial(name, templates)).collect();
        self.stage = Stage::Sets { compiled };
        Action::TrySets { config: self.config.clone(), trials }
    }

    fn is_in_force(&self, name: Option<&str>, set: &TemplateSet) -> bool {
        self.before(name).is_some_and(|before| before.version() == set.version())
    }

    fn sets_tried(
        &mut self,
        compiled: &Library,
        mut tried: BTreeMap<Option<String>, Checked<BTreeSet<String>>>,
        users: &BTreeMap<String, usize>,
        now: Instant,
    ) -> Vec<Action> {
        let mut new = InForce {
            library: Library::builtin(),
            refused: BTreeMap::new(),
            former: Vec::new(),
            config_refused: self.config_refused.clone(),
        };
        let mut actions = Vec::new();
        self.refusers.clear();
        if let Some(error) = self.gathered.unreadable.clone() {
            actions.extend(self.refuse(&mut new, None, Refused { error, vm: None }));
        }
        for (set, templates) in compiled.all() {
            let name = set.map(str::to_owned);
            let before = self.before(set).cloned();
            let formers = self.in_force.former.iter().filter(|former| former.set == name).cloned();
            let checked = match templates {
                Ok(templates) if self.is_in_force(set, templates) => Ok((templates, None)),
                Ok(templates) => match tried.remove(&name).unwrap_or(Err(None)) {
                    Ok(kept) => Ok((templates, Some(kept))),
                    Err(why) => Err(why),
                },
                Err(error) => Err(Some(Refused { error: error.clone(), vm: None })),
            };
            let used = match checked {
                Ok((templates, kept)) => {
                    let last = before.map(|before| Former {
                        set: name.clone(),
                        version: before.version().to_owned(),
                        templates: before,
                    });
                    let is_kept = |former: &Former| {
                        let versions = [former.version.as_str(), former.templates.version()];
                        kept.as_ref().is_none_or(|kept| versions.iter().any(|version| kept.contains(*version)))
                    };
                    let last = last.filter(|_| kept.is_some());
                    new.former.extend(formers.chain(last).filter(is_kept));
                    Ok(templates.clone())
                }
                Err(why) => {
                    new.former.extend(formers);
                    let error = if let Some(refused) = why {
                        let error = refused.error.clone();
                        self.refusers.extend(refused.vm.as_deref().map(refuser));
                        actions.extend(self.refuse(&mut new, name.clone(), refused));
                        error
                    } else {
                        self.again = true;
                        let error = TemplateError::refused("(check)", "they can't be checked now; it is tried again");
                        new.refused.insert(name.clone(), error.clone());
                        error
                    };
                    before.ok_or(error)
                }
            };
            new.library.put(set, used);
        }
        actions.extend(self.sets_gone(&mut new, compiled, users));
        self.looked = now;
        self.in_force = Arc::new(new);
        actions.push(Action::UseSets(self.in_force.clone()));
        actions
    }

    /// A set that is deleted while VMs use it stays in force as long as the manager runs.
    fn sets_gone(&self, new: &mut InForce, compiled: &Library, users: &BTreeMap<String, usize>) -> Vec<Action> {
        let mut actions = Vec::new();
        let gone = self.in_force.library.all().filter_map(|(name, set)| Some((name?, set)));
        for (name, set) in gone.filter(|(name, _)| compiled.all().all(|(compiled, _)| compiled != Some(*name))) {
            let Some(users) = users.get(name).filter(|users| **users > 0) else {
                actions.push(Action::SetGone(name.to_owned()));
                continue;
            };
            let error = TemplateError::refused(
                &format!("sets/{name}"),
                format!("the set is gone, but {users} VMs use it; the manager keeps it until it ends"),
            );
            actions.extend(self.refuse(new, Some(name.to_owned()), Refused { error, vm: None }));
            new.library.put(Some(name), set.clone());
        }
        actions
    }

    /// Notes that the newest version of a set is not used, which is reported if it is new.
    fn refuse(&self, new: &mut InForce, set: Option<String>, refused: Refused) -> Option<Action> {
        let is_known = self.tries > 0 && self.in_force.refused.get(&set) == Some(&refused.error);
        new.refused.insert(set.clone(), refused.error.clone());
        let map = set.as_ref().and_then(|set| self.gathered.map_of(set)).map(str::to_owned);
        (!is_known).then_some(Action::RefuseSet { set, map, refused })
    }
}

/// The pause before refused sets are looked at again although nothing that the manager watches has changed.
fn pause(tries: u32) -> Duration {
    AGAIN.saturating_mul(1 << tries.min(10)).min(REFUSED_AGAIN)
}

/// The former versions that are kept and still compile.
pub(super) fn former(kept: &BTreeMap<Name, Layers>) -> Vec<Former> {
    let former = kept.iter().filter_map(|((set, version), layers)| {
        let (version, templates) = (version.clone()?, TemplateSet::compile(layers.clone()).ok()?);
        Some(Former { set: set.clone(), version, templates })
    });
    former.collect()
}

/// Puts the sets in force that were in force last, where something else would be now. Returns whether that is the case.
pub(super) fn restore(kept: &BTreeMap<Name, Layers>, library: &mut Library) -> bool {
    let mut is_newer = false;
    for ((name, _), layers) in kept.iter().filter(|((_, former), _)| former.is_none()) {
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

#[cfg(test)]
mod tests;
