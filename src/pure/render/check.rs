//! Checks a new template set against all VMs before it is used.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

use kube::core::{ObjectMeta, TypeMeta};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    RandomInput, TemplateError, TemplateSet, first_start,
    mounts::{self, Owners as Claims},
    pod::is_guest,
    references, render, valid,
};
use crate::{
    api::{VirtualMachine, VirtualMachineStatus},
    config::{Allowed, LoadBalancerService, ReconcilerConfig},
    object::{CONTAINER_NAME, Lifetime, ObjectKey, Rendered, Update},
    observed::Observed,
};

/// How many different shapes of objects are applied to the API server as a dry run.
const SAMPLES: usize = 50;
/// How many objects of a shape may be applied. The next one is needed only if a VM has an object that the API server refuses anyhow.
const OF_A_SHAPE: usize = 5;

/// What a new set would change.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct SetEffect {
    /// How many VMs were rendered.
    pub vms: usize,
    /// How many of them would change.
    pub changed: usize,
    /// Of the objects that would change, a few of each shape. If the API server accepts one of them, it accepts the shape.
    pub samples: Vec<Vec<Sample>>,
    /// The kinds of objects that the new set makes.
    pub uses: Vec<Use>,
    /// The versions of the templates of VMs whose values do not match the schema of the new set. These VMs keep them.
    pub kept_versions: BTreeSet<String>,
    /// How many VMs that are.
    pub misfits: usize,
}

/// An object that the new set changes.
#[derive(Debug, Serialize, Deserialize)]
pub struct Sample {
    /// Its VM, of which only the metadata is here.
    pub vm: VirtualMachine,
    /// The object.
    pub object: Rendered,
    /// The object as the set in use renders it. If the API server refuses this one too, the refusal is the VM's own matter.
    pub former: Option<Rendered>,
    /// Whether the manager would change an object that exists: some fields can't be changed any more.
    pub exists: bool,
}

/// What a new set does with a kind of objects.
#[derive(Debug, Serialize, Deserialize)]
pub struct Use {
    /// The kind.
    pub kind: TypeMeta,
    /// The file of a template that makes such an object.
    pub template: String,
    /// Whether the manager deletes such an object.
    pub is_deleted: bool,
    /// The VMs that have such an object.
    pub vms: usize,
    /// Their namespaces.
    pub namespaces: BTreeSet<String>,
}

impl Use {
    /// The verbs that the manager needs to list and watch the kind, and those that it needs in the namespace of each VM.
    pub fn verbs(&self) -> (&'static [&'static str], &'static [&'static str]) {
        let all: &[&str] = &["get", "create", "patch", "delete"];
        (&["list", "watch"], if self.is_deleted { all } else { &all[..3] })
    }

    /// Whether a problem with the kind is that of one VM: only its spec makes such an object, and the others do without.
    pub fn is_of_one_vm(&self, outcome: &SetEffect) -> bool {
        self.vms == 1 && outcome.vms > 1
    }
}

/// A VM that the current set renders and the new set does not.
#[derive(Debug, Serialize, Deserialize)]
pub struct SetRefusal {
    /// The VM, of which only the metadata is here.
    pub vm: Box<VirtualMachine>,
    /// The error of the new set.
    pub error: TemplateError,
}

/// A VM that a check does not render: it has another set, or something that is not allowed. What it has can be no other VM's.
#[derive(Debug, Serialize, Deserialize)]
pub struct Bystander {
    vm: String,
    namespace: Option<String>,
    /// The objects that the VM owns.
    objects: Vec<ObjectKey>,
    /// The names of its claims.
    claims: BTreeSet<String>,
}

impl Bystander {
    /// What the VM has in the cluster.
    pub fn of(vm: &VirtualMachine, observed: &Observed) -> Self {
        let uid = vm.metadata.uid.as_deref().unwrap_or_default();
        let owned = observed.objects.iter().filter(|object| object.is_owned_by(uid));
        Self {
            vm: vm.full_name(),
            namespace: vm.metadata.namespace.clone(),
            objects: owned.map(|object| object.key.clone()).collect(),
            claims: mounts::claims_of(vm, observed).map(str::to_owned).collect(),
        }
    }
}

/// The set in use and the one that is to be used, each with its configuration.
#[derive(Clone, Copy)]
pub struct Change<'a> {
    /// The set in use, if there is one.
    pub old: Option<&'a TemplateSet>,
    /// The configuration in force.
    pub old_config: &'a ReconcilerConfig,
    /// The new set.
    pub new: &'a TemplateSet,
    /// The configuration with which it is used.
    pub config: &'a ReconcilerConfig,
}

/// What a [`Change`] does to one VM.
pub struct Judged(Verdict);

enum Verdict {
    /// The new set renders the VM.
    Rendered(Box<Compared>),
    /// The VM's values do not match the schema of the new set.
    Misfit {
        vm: Bystander,
        /// The versions of its templates, which it keeps.
        versions: Vec<String>,
        /// It sets no values of its own, so it is the defaults of the set that do not match.
        of_defaults: Option<SetRefusal>,
    },
    /// The VM is not rendered with the set in use either.
    Unchecked(Bystander),
    /// The set can't be used.
    Refused(SetRefusal),
}

/// A VM with its objects before and after a change.
struct Compared {
    vm: VirtualMachine,
    observed: Observed,
    /// `None`: the set in use does not render the VM.
    before: Option<Vec<Rendered>>,
    after: Vec<Rendered>,
}

impl Change<'_> {
    /// Judges VMs, one after the other. `bystanders` are the VMs of other sets.
    ///
    /// # Errors
    /// As [`outcome`].
    pub fn check(
        self,
        bystanders: Vec<Bystander>,
        vms: impl IntoIterator<Item = (VirtualMachine, Observed)>,
    ) -> Result<SetEffect, SetRefusal> {
        outcome(bystanders, vms.into_iter().map(|(vm, observed)| self.judge(vm, observed)))
    }

    /// Renders a VM before and after. A VM that runs is also rendered as it is when it is stopped, and as it was when it was new: a set that needs
    /// what only a running VM has would keep it from its next start. This takes nearly all the time of a check, and depends on no other VM.
    pub fn judge(self, vm: VirtualMachine, observed: Observed) -> Judged {
        Judged(self.verdict(vm, observed).unwrap_or_else(Verdict::Refused))
    }

    fn verdict(self, vm: VirtualMachine, observed: Observed) -> Result<Verdict, SetRefusal> {
        let Self { old, old_config, new, config } = self;
        let random = RandomInput { display_password: "a-password-for-the-check".into(), ..RandomInput::default() };
        let before = old.and_then(|old| render(&vm, &observed, old_config, &random, old).ok());
        let after = match render(&vm, &observed, config, &random, new) {
            Ok(after) => after,
            // With another configuration the values of all VMs are others.
            Err(error) if error.of_values && old_config == config => {
                let from = vm.status.as_ref().and_then(|status| status.templates.as_ref());
                let version = from.and_then(|from| from.version.clone());
                let in_use = old.filter(|_| before.is_some()).map(|old| old.version().to_owned());
                let values = vm.spec.template_values.as_ref().and_then(Value::as_object);
                let has_values = values.is_some_and(|it| !it.is_empty());
                let of_defaults = (!has_values && before.is_some())
                    .then(|| refusal(&vm, TemplateError { of_values: false, ..error }));
                let versions = version.into_iter().chain(in_use).collect();
                return Ok(Verdict::Misfit { vm: Bystander::of(&vm, &observed), versions, of_defaults });
            }
            // No set can help what is not allowed. An error that the VM had before is in its condition.
            Err(error) if error.not_allowed || before.is_none() => {
                return Ok(Verdict::Unchecked(Bystander::of(&vm, &observed)));
            }
            Err(error) => return Err(refusal(&vm, error)),
        };
        let in_use = || before.clone().or_else(|| former_objects(&vm, &observed, old, old_config, &random));
        if let Some(error) = loss(&vm, &observed, &after, in_use) {
            return Err(refusal(&vm, error));
        }
        for (vm, observed, what) in at_other_times(&vm, &observed) {
            let before = || former_objects(&vm, &observed, old, old_config, &random);
            let error = match render(&vm, &observed, config, &random, new) {
                Ok(after) => loss(&vm, &observed, &after, before),
                Err(error) => Some(error).filter(|_| old.is_some() && before().is_some()),
            };
            if let Some(error) = error {
                let message = format!("{what}: {}", error.message);
                return Err(refusal(&vm, TemplateError { message, ..error }));
            }
        }
        Ok(Verdict::Rendered(Box::new(Compared { vm, observed, before, after })))
    }
}

/// [`Change::check`] under one configuration.
///
/// # Errors
/// As [`outcome`].
pub fn check(
    old: Option<&TemplateSet>,
    new: &TemplateSet,
    vms: impl IntoIterator<Item = (VirtualMachine, Observed)>,
    config: &ReconcilerConfig,
) -> Result<SetEffect, SetRefusal> {
    Change { old, old_config: config, new, config }.check(Vec::new(), vms)
}

/// What a change does to all VMs together, each as it was judged. `bystanders` are the VMs of other sets.
///
/// A VM whose values do not match the schema of the new set is left out: it keeps its version. But if no other VM is there, and the VM sets
/// no values of its own, the defaults of the set do not match its schema.
///
/// # Errors
/// The first VM that the set in use renders and the new one does not. Without a set in use there is no such VM.
pub fn outcome(
    mut bystanders: Vec<Bystander>,
    judged: impl IntoIterator<Item = Judged>,
) -> Result<SetEffect, SetRefusal> {
    let mut together = Together::default();
    let mut first_of_defaults = None;
    for Judged(verdict) in judged {
        match verdict {
            Verdict::Rendered(compared) => together.add(*compared)?,
            Verdict::Misfit { vm, versions, of_defaults } => {
                together.outcome.kept_versions.extend(versions);
                together.outcome.misfits += 1;
                bystanders.push(vm);
                first_of_defaults = first_of_defaults.or(of_defaults);
            }
            Verdict::Unchecked(vm) => bystanders.push(vm),
            Verdict::Refused(refusal) => return Err(refusal),
        }
    }
    let outcome = together.finish(&bystanders)?;
    match first_of_defaults.filter(|_| outcome.vms == 0) {
        Some(refusal) => Err(refusal),
        None => Ok(outcome),
    }
}

/// What is known of the VMs that were looked at so far.
#[derive(Default)]
struct Together {
    outcome: SetEffect,
    samples: BTreeMap<(String, String), Vec<Sample>>,
    uses: BTreeMap<(String, String), Use>,
    owners: HashMap<Place, Owner>,
    claims: Claims,
}

impl Together {
    fn add(&mut self, Compared { vm, observed, before, after }: Compared) -> Result<(), SetRefusal> {
        let is_rendered = before.is_some();
        let before = before.unwrap_or_default();
        self.outcome.vms += 1;
        note_uses(&mut self.uses, &vm, &after);
        let bare = Arc::new(metadata(&vm));
        let rendered = before.iter().filter(|object| object.key.is_claim()).map(|object| object.key.name.as_str());
        self.claims.add_vm(
            &vm.full_name(),
            vm.metadata.namespace.as_deref(),
            mounts::claims_of(&vm, &observed).chain(rendered),
        );
        self.claims.add_mounts(&bare, &after);
        for object in &after {
            note_owner(&mut self.owners, &bare, object, &before).map_err(|error| refusal(&vm, error))?;
        }
        let is_same = |object: &Rendered| before.iter().any(|old| old.value == object.value);
        let changed: Vec<&Rendered> = after.iter().filter(|object| !is_same(object)).collect();
        self.outcome.changed += usize::from(!changed.is_empty() || after.len() != before.len());
        for object in changed {
            if let Some(problem) = valid::problem(object).filter(|_| is_rendered) {
                if former(&before, object).is_some_and(|former| valid::problem(former).is_some()) {
                    // The VM reports it already.
                    continue;
                }
                let error = TemplateError::refused(&object.template, format!("{}: {problem}", object.key));
                return Err(refusal(&vm, error));
            }
            let exists = changes_existing(&observed, object);
            let key = (object.template.clone(), format!("{exists} {}", shape(&object.value)));
            if self.samples.len() < SAMPLES || self.samples.contains_key(&key) {
                let former = former(&before, object).cloned();
                let sample = || Sample { vm: metadata(&vm), object: object.clone(), former: former.clone(), exists };
                add_sample(self.samples.entry(key).or_default(), &vm, sample);
            }
        }
        Ok(())
    }

    fn finish(mut self, bystanders: &[Bystander]) -> Result<SetEffect, SetRefusal> {
        for Bystander { vm, namespace, objects, claims: its } in bystanders {
            self.claims.add_vm(vm, namespace.as_deref(), its.iter().map(String::as_str));
            let taken = objects.iter().find_map(|key| self.owners.get(&place(namespace.as_deref(), key)));
            if let Some(owner) = taken.filter(|owner| !owner.is_own) {
                return Err(refusal(&owner.vm, owner.rendered_twice(vm)));
            }
        }
        if let Some((vm, error)) = self.claims.foreign() {
            return Err(refusal(&vm, error));
        }
        let (samples, uses) = (self.samples.into_values().collect(), self.uses.into_values().collect());
        Ok(SetEffect { samples, uses, ..self.outcome })
    }
}

/// What the set in use renders for a VM, if it can; without a set in use, the built-in templates.
fn former_objects(
    vm: &VirtualMachine,
    observed: &Observed,
    old: Option<&TemplateSet>,
    config: &ReconcilerConfig,
    random: &RandomInput,
) -> Option<Vec<Rendered>> {
    match old {
        Some(old) => render(vm, observed, config, random, old).ok(),
        None => render(vm, observed, config, random, &TemplateSet::builtin().ok()?).ok(),
    }
}

/// What a VM has with the former set and would lose with the new one: its guest, or an object to which its guest refers. `before` gives what
/// the former set renders, and is asked only if something is not there. What is missing already holds up nothing.
fn loss(
    vm: &VirtualMachine,
    observed: &Observed,
    after: &[Rendered],
    before: impl FnOnce() -> Option<Vec<Rendered>>,
) -> Option<TemplateError> {
    let has_guest = after.iter().any(is_guest);
    let missing = references::missing(vm, observed, after);
    if has_guest && missing.is_empty() {
        return None;
    }
    let before = before()?;
    if let Some(lost) = before.iter().find(|object| is_guest(object)).filter(|_| !has_guest) {
        let message = format!(
            "{} is not rendered any more, and nothing else with a container {CONTAINER_NAME}: the VM would have no guest",
            lost.key
        );
        return Some(TemplateError::refused(&lost.name, message));
    }
    let known = references::missing(vm, observed, &before);
    let of_before = |key: &ObjectKey| before.iter().find(|object| object.key == *key);
    // Other names are those of what an administrator makes, perhaps later.
    let name = vm.metadata.name.as_deref().unwrap_or_default();
    let is_of_vm = |key: &ObjectKey| key.name == name || key.name.starts_with(&format!("{name}-"));
    let lost = missing.into_iter().find(|it| {
        let is_templates = it.is_deleted || it.lacks.is_some() || is_of_vm(&it.key) || of_before(&it.key).is_some();
        is_templates && !known.iter().any(|known| known.key == it.key)
    })?;
    let what = match &lost.lacks {
        Some(key) => format!("which is rendered without the key {key}"),
        None if lost.is_deleted => "which would be deleted, because no template renders it any more".to_owned(),
        None => "which no template renders".to_owned(),
    };
    let template = match of_before(&lost.key) {
        Some(object) if lost.lacks.is_none() => object.name.clone(),
        _ => lost.template,
    };
    Some(TemplateError::refused(&template, format!("{} refers to {}, {what}", lost.guest, lost.key)))
}

fn refusal(vm: &VirtualMachine, error: TemplateError) -> SetRefusal {
    SetRefusal { vm: Box::new(metadata(vm)), error }
}

/// The VM that has an object.
struct Owner {
    vm: Arc<VirtualMachine>,
    /// It has the object with the set in use too, or with the built-in templates. Then two VMs with the object are not the set's fault: their
    /// specs name it.
    is_own: bool,
    object: ObjectKey,
    template: String,
}

impl Owner {
    fn rendered_twice(&self, other: &str) -> TemplateError {
        let Self { vm, object, template, .. } = self;
        let vm = vm.full_name();
        let message = format!("{object} is rendered for the VMs {vm} and {other}: its name must contain the VM's name");
        TemplateError::refused(template, message)
    }
}

/// A namespace, and the API group, kind and name of an object.
type Place = [Option<String>; 4];

fn place(namespace: Option<&str>, key: &ObjectKey) -> Place {
    let texts = [namespace, key.group(), Some(&key.kind), Some(&key.name)];
    texts.map(|text| text.map(str::to_owned))
}

/// Refuses an object that two VMs of a namespace would have: only one of them can be its owner.
fn note_owner(
    owners: &mut HashMap<Place, Owner>,
    vm: &Arc<VirtualMachine>,
    object: &Rendered,
    before: &[Rendered],
) -> Result<(), TemplateError> {
    let Rendered { key, template, .. } = object;
    let is_own = template.starts_with("builtin/") || before.iter().any(|it| it.key.is_same_object(key));
    let owner = Owner { vm: vm.clone(), is_own, object: key.clone(), template: template.clone() };
    match owners.entry(place(vm.metadata.namespace.as_deref(), key)) {
        Entry::Vacant(entry) => drop(entry.insert(owner)),
        Entry::Occupied(other) if !(is_own && other.get().is_own) => {
            let (at_fault, other) = if is_own { (other.get(), &owner) } else { (&owner, other.get()) };
            return Err(at_fault.rendered_twice(&other.vm.full_name()));
        }
        Entry::Occupied(_) => {}
    }
    Ok(())
}

/// The VM without what makes it large.
fn metadata(vm: &VirtualMachine) -> VirtualMachine {
    let metadata = ObjectMeta { managed_fields: None, annotations: None, ..vm.metadata.clone() };
    let spec = serde_json::from_value(json!({ "vm": {} })).unwrap_or_else(|_| vm.spec.clone());
    VirtualMachine { metadata, spec, status: None }
}

/// The object as the set in use renders it, perhaps under another name.
fn former<'a>(before: &'a [Rendered], object: &Rendered) -> Option<&'a Rendered> {
    let is_of_template = |it: &&Rendered| it.name == object.name && it.key.types() == object.key.types();
    before.iter().find(|it| it.key == object.key).or_else(|| before.iter().find(is_of_template))
}

/// Adds an object to those of its shape. Objects of different namespaces are preferred: a namespace may have a quota that is used up.
fn add_sample(of_shape: &mut Vec<Sample>, vm: &VirtualMachine, sample: impl Fn() -> Sample) {
    let place = |sample: &Sample| sample.vm.metadata.namespace.clone();
    if of_shape.len() < OF_A_SHAPE {
        of_shape.push(sample());
    } else if of_shape.iter().all(|other| place(other) != vm.metadata.namespace) {
        let is_repeated = |at: &usize| of_shape[..*at].iter().any(|other| place(other) == place(&of_shape[*at]));
        if let Some(at) = (0..of_shape.len()).find(is_repeated) {
            of_shape[at] = sample();
        }
    }
}

fn note_uses(uses: &mut BTreeMap<(String, String), Use>, vm: &VirtualMachine, objects: &[Rendered]) {
    let mut kinds = BTreeSet::new();
    for object in objects {
        let kind = (object.key.api_version.clone(), object.key.kind.clone());
        let used = uses.entry(kind.clone()).or_insert_with(|| Use {
            kind: object.key.types(),
            template: object.template.clone(),
            is_deleted: false,
            vms: 0,
            namespaces: BTreeSet::new(),
        });
        used.is_deleted |= object.lifetime != Lifetime::Keep;
        used.namespaces.extend(vm.metadata.namespace.clone());
        used.vms += usize::from(kinds.insert(kind));
    }
}

/// Example VMs that together use every feature, for a check without a cluster's VMs.
pub fn examples() -> Vec<VirtualMachine> {
    let documents = serde_yaml::Deserializer::from_str(include_str!("examples.yaml"));
    documents.filter_map(|document| Deserialize::deserialize(document).ok()).collect()
}

/// The configuration for the examples: the default one, but VMs have a Service, and everything is allowed.
pub fn example_config() -> ReconcilerConfig {
    ReconcilerConfig {
        load_balancer_service: LoadBalancerService::Enabled(true),
        allowed: Allowed::everything(),
        ..ReconcilerConfig::default()
    }
}

/// The kinds of objects that a set makes of the examples.
pub fn kinds(set: &TemplateSet) -> HashSet<TypeMeta> {
    let objects = |vm| first_start(&vm, &example_config(), set).unwrap_or_default();
    examples().into_iter().flat_map(objects).map(|object| object.key.types()).collect()
}

/// Whether the manager would change an existing object of the VM: a Pod changes at the next start only, and a claim stays as it is.
fn changes_existing(observed: &Observed, object: &Rendered) -> bool {
    let changes = match object.update {
        Update::Live => true,
        // It changes while the VM has no Pod.
        Update::AtStart => object.lifetime != Lifetime::Running,
        Update::Once => false,
    };
    let is_kept = object.key.is_pod() || object.key.is_claim() || !changes;
    !is_kept && observed.get(&object.key).is_some_and(|found| found.deleting.is_none() && found.is_ours())
}

/// The VM at other times of its life than now, each with what is observed then and a word for messages.
fn at_other_times(vm: &VirtualMachine, observed: &Observed) -> Vec<(VirtualMachine, Observed, &'static str)> {
    let with = |status| VirtualMachine { status, ..vm.clone() };
    let new = (with(Some(VirtualMachineStatus::of_new())), Observed::nothing(observed.now), "of a VM that is new");
    let Some(status) = vm.status.clone().filter(|status| status.created == Some(true)) else { return vec![new] };
    let objects = observed.objects.iter().filter(|object| !object.key.is_pod()).cloned().collect();
    let stopped = (with(Some(status.as_stopped())), Observed::of(objects, observed.now), "of a VM that is stopped");
    vec![stopped, new]
}

/// The object with an unused name, so that the API server checks it as a new one. A change that an existing Pod or claim does not allow is
/// no reason to refuse a template.
pub fn trial(object: &Rendered) -> Rendered {
    let mut trial = object.clone();
    trial.key.name = format!("dry-run-{}", &object.hash[..8]);
    Arc::make_mut(&mut trial.value)["metadata"]["name"] = trial.key.name.clone().into();
    trial
}

/// The fields of an object and their types. The API server accepts or refuses objects of one shape alike, except for the values of their
/// fields. Values that select a variant are part of the shape.
fn shape(value: &Value) -> String {
    match value {
        Value::Object(map) => {
            let field = |(name, value): (&String, &Value)| match name.as_str() {
                "apiVersion" | "kind" | "type" | "protocol" => format!("{name}={value}"),
                _ => format!("{name}:{}", shape(value)),
            };
            let mut fields: Vec<String> = map.iter().map(field).collect();
            fields.sort();
            format!("{{{}}}", fields.join(","))
        }
        Value::Array(list) => {
            let mut items: Vec<String> = list.iter().map(shape).collect();
            items.sort();
            items.dedup();
            format!("[{}]", items.join(","))
        }
        Value::String(_) => "s".into(),
        Value::Number(_) => "n".into(),
        Value::Bool(value) => value.to_string(),
        Value::Null => "0".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        object::BUILTIN_KINDS,
        render::Files,
        test_support::{nothing, vm},
    };

    fn set(files: &[(&str, &str)]) -> TemplateSet {
        let files: Files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        TemplateSet::layered(&files, None).unwrap()
    }

    fn vms() -> Vec<(VirtualMachine, Observed)> {
        let named = |name: &str| {
            vm(|vm| {
                vm["metadata"]["name"] = json!(name);
                vm["spec"]["templateValues"] = json!({ "size": name });
            })
        };
        ["apple", "pear"].map(|name| (named(name), nothing())).into()
    }

    const POLICY: &str =
        "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: {{ vm.metadata.name }}}\n";

    #[test]
    fn of_the_objects_that_would_change_there_is_one_sample_for_each_shape() {
        let (old, new) = (set(&[]), set(&[("network-policy.yaml.j2", POLICY)]));
        let outcome = check(Some(&old), &new, vms(), &ReconcilerConfig::default()).unwrap();
        assert_eq!((outcome.vms, outcome.changed, outcome.samples.len()), (2, 2, 1));
        assert_eq!(outcome.samples[0].len(), 2, "the second is there in case that the first is refused anyhow");
        let trial = trial(&outcome.samples[0][0].object);
        assert!(trial.value["metadata"]["name"].as_str().unwrap().starts_with("dry-run-"));
        let outcome = check(Some(&new), &new, vms(), &ReconcilerConfig::default()).unwrap();
        assert_eq!((outcome.changed, outcome.samples.len()), (0, 0));
    }

    #[test]
    fn a_sample_has_the_object_of_the_set_in_use_and_samples_are_of_different_namespaces() {
        let vms = (0..9).map(|number| {
            let vm = vm(|vm| {
                vm["metadata"]["name"] = json!(format!("vm-{number}"));
                vm["metadata"]["namespace"] = json!(if number < 7 { "crowded" } else { "other" });
                vm["spec"]["templateValues"] = json!({ "deep": [[["x"]]] });
            });
            (vm, nothing())
        });
        let renamed = POLICY.replace("vm.metadata.name", "vm.metadata.name ~ '-x'");
        let (old, new) = (set(&[("x.yaml.j2", POLICY)]), set(&[("x.yaml.j2", &renamed)]));
        let outcome = check(Some(&old), &new, vms.clone(), &ReconcilerConfig::default()).unwrap();
        let samples = &outcome.samples[0];
        let names: Vec<(&str, &str)> = samples
            .iter()
            .map(|it| (it.object.key.name.as_str(), it.former.as_ref().unwrap().key.name.as_str()))
            .collect();
        let name = [("vm-0-x", "vm-0"), ("vm-7-x", "vm-7"), ("vm-2-x", "vm-2"), ("vm-3-x", "vm-3"), ("vm-4-x", "vm-4")];
        assert_eq!(names, name);
        assert!(samples.iter().all(|sample| sample.vm.spec.template_values.is_none()), "the report must stay small");
        // A template that the set in use does not have.
        let outcome = check(Some(&set(&[])), &new, vms, &ReconcilerConfig::default()).unwrap();
        assert!(outcome.samples[0][0].former.is_none());
    }

    #[test]
    fn a_set_that_gives_two_vms_of_a_namespace_the_same_object_is_refused() {
        let config = ReconcilerConfig::default();
        let map = |name: &str| format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {name}}}\n");
        let (old, new) = (set(&[]), set(&[("x.yaml.j2", &map("settings"))]));
        for old in [None, Some(&old)] {
            let refusal = check(old, &new, vms(), &config).unwrap_err();
            assert_eq!(
                refusal.error.to_string(),
                "x.yaml.j2: ConfigMap settings is rendered for the VMs orchard/pear and orchard/apple: its name must contain the VM's name"
            );
        }
        // One version of a group or another: it is the same object.
        let versions =
            "apiVersion: cilium.io/{{ 'v1' if values.size == 'pear' else 'v2' }}\nkind: X\nmetadata: {name: x}\n";
        assert!(check(Some(&old), &set(&[("x.yaml.j2", versions)]), vms(), &config).is_err());
        // The set in use does the same: another change of the set is not held up.
        let other = set(&[("x.yaml.j2", &(map("settings") + "data: {a: b}\n"))]);
        assert_eq!(check(Some(&new), &other, vms(), &config).unwrap().changed, 2);
        // In another namespace it is another object.
        let mut vms = vms();
        vms[1].0.metadata.namespace = Some("garden".into());
        assert_eq!(check(Some(&old), &new, vms, &config).unwrap().changed, 2);
        // Two specs that name the same claim.
        let claims = |name: &str, disk: &str| {
            let vm = vm(|vm| {
                vm["metadata"]["name"] = json!(name);
                vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["name"] = json!(disk);
            });
            (vm, nothing())
        };
        let vms = [claims("a", "b-c"), claims("a-b", "c")];
        for old in [None, Some(&old)] {
            assert_eq!(check(old, &set(&[("x.yaml.j2", POLICY)]), vms.clone(), &config).unwrap().changed, 2);
        }
    }

    #[test]
    fn a_set_with_which_a_value_of_one_vm_is_no_label_is_refused_with_vm_object_and_field() {
        let labelled = POLICY.replace("name }}}", "name }}, labels: {owner: {{ values.size }}}}");
        let (old, new) = (set(&[("x.yaml.j2", POLICY)]), set(&[("x.yaml.j2", &labelled)]));
        let mut vms = vms();
        vms[1].0.spec.template_values = Some(json!({ "size": "Jane Doe" }));
        let refusal = check(Some(&old), &new, vms.clone(), &ReconcilerConfig::default()).unwrap_err();
        assert_eq!(refusal.vm.full_name(), "orchard/pear");
        let message = refusal.error.to_string();
        assert!(
            message.starts_with("x.yaml.j2: NetworkPolicy pear: metadata.labels.owner: \"Jane Doe\": a valid label"),
            "{message}"
        );
        // With the set in use it is no label either: the VM is left out, the others are tried.
        let newer = set(&[("x.yaml.j2", &(labelled + "spec: {policyTypes: [Ingress]}\n"))]);
        let outcome = check(Some(&new), &newer, vms.clone(), &ReconcilerConfig::default()).unwrap();
        let tried: Vec<&str> = outcome.samples.iter().flatten().map(|it| it.object.key.name.as_str()).collect();
        assert_eq!(tried, ["apple"]);
        // Without a set in use, the API server is asked.
        let outcome = check(None, &new, vms, &ReconcilerConfig::default()).unwrap();
        assert!(outcome.samples.iter().flatten().any(|it| it.object.key.name == "pear"));
    }

    #[test]
    fn a_set_that_takes_the_runner_away_is_refused() {
        let config = ReconcilerConfig { allowed_kinds: vec!["*".to_owned()].into(), ..ReconcilerConfig::default() };
        let pod = |containers: &str| {
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: {{{{ vm.metadata.name }}}}}}\nspec: {{containers: [{{name: {containers}, image: x}}]}}\n"
            )
        };
        let maker = |kind: &str, container: &str| {
            pod(container)
                .replace("v1\nkind: Pod", &format!("x/v1\nkind: {kind}"))
                .replace("spec: ", "spec: {template: {spec: ")
                .replace("}]}\n", "}]}}}\n")
        };
        let vm_named = "{{ vm.metadata.name }}";
        for (file, is_good) in [
            (String::new(), false),
            (pod("sidecar"), false),
            (maker("Job", "x").replace("x/v1", "batch/v1"), false),
            // What makes a Pod without the runner is a helper.
            (maker("Deployment", "x").replace("x/v1", "apps/v1"), false),
            (maker("StatefulSet", "x").replace("x/v1", "apps/v1"), false),
            (maker("Thing", "x"), false),
            (pod("vm-runner"), true),
            (pod(vm_named), true),
            (maker("StatefulSet", "vm-runner").replace("x/v1", "apps/v1"), true),
            (maker("Thing", "vm-runner"), true),
        ] {
            let new = set(&[("pod.yaml.j2", &file)]);
            let checked = check(Some(&set(&[])), &new, vms(), &config);
            assert_eq!(checked.is_ok(), is_good, "{file}");
            if let Err(refusal) = checked {
                let message = refusal.error.to_string();
                let is_pod = file.contains("kind: Pod");
                let says = if is_pod { "has no container vm-runner" } else { "is not rendered any more" };
                assert!(message.starts_with(&format!("pod.yaml.j2: Pod apple {says}")), "{message}");
                assert_eq!(refusal.error.loses_runner, is_pod);
                // Also where no set was in use before.
                let rendered = first_start(&vms()[0].0, &config, &new);
                assert_eq!(rendered.is_err_and(|error| error.loses_runner), is_pod);
            }
            // What is so already holds up nobody.
            assert!(check(Some(&new), &new, vms(), &config).is_ok());
        }
    }

    #[test]
    fn a_guest_is_needed_at_every_time_of_a_vm_and_without_a_set_in_use() {
        let config = ReconcilerConfig::default();
        let deployment = "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: {{ vm.metadata.name ~ '-h' }}}\n\
                          spec: {template: {spec: {containers: [{name: helper, image: x}]}}}\n";
        let helped = set(&[("pod.yaml.j2", ""), ("y.yaml.j2", deployment)]);
        let sidecar = "apiVersion: v1\nkind: Pod\nmetadata: {name: {{ vm.metadata.name }}}\nspec: {containers: [{name: a, image: x}]}\n";
        let replaced = set(&[("pod.yaml.j2", sidecar), ("y.yaml.j2", deployment)]);
        let of_created = set(&[(
            "pod.yaml.j2",
            "{% if vm.status.created is defined and vm.status.created %}{% set pod %}{% include 'base/pod.yaml.j2' %}{% endset %}{{ pod | safe }}{% endif %}\n",
        )]);
        let created = || vm(|vm| vm["status"] = json!({ "created": true }));
        let builtin = set(&[]);
        for (new, says) in [
            (&helped, "Pod apple is not rendered any more"),
            (&replaced, "no container vm-runner"),
            (&of_created, "of a VM that is stopped: Pod apple is not rendered any more"),
        ] {
            let error = check(Some(&builtin), new, [(created(), nothing())], &config).unwrap_err().error;
            assert!(error.message.contains(says), "{says}: {error}");
        }
        let error = check(None, &helped, [(created(), nothing())], &config).unwrap_err().error;
        assert!(error.message.contains("the VM would have no guest"), "{error}");
    }

    #[test]
    fn a_set_that_takes_away_what_a_guest_refers_to_is_refused_with_the_object() {
        let config = ReconcilerConfig::default();
        let random = RandomInput { display_password: "x".into(), ..RandomInput::default() };
        let builtin = set(&[]);
        let apple = || vm(|vm| vm["status"] = json!({ "created": true }));
        let objects = render(&apple(), &nothing(), &config, &random, &builtin).unwrap();
        let there = || crate::test_support::applied(&objects, |_, _| ());
        let environment = |more: &str| {
            format!(
                "{{% extends 'base/pod.yaml.j2' %}}\n{{% block environment %}}\n{{{{ super() }}}}\n        - {{name: A, valueFrom: {{secretKeyRef: {{{more}, key: a}}}}}}\n{{% endblock %}}\n"
            )
        };
        let renamed = "{% set map %}{% include 'base/config-map.yaml.j2' %}{% endset %}{% set map = map | from_yaml %}\n\
                       {{ map | merge({'metadata': {'name': 'apple-renamed'}}) | to_yaml | safe }}\n";
        for (file, text, observed, says) in [
            (
                "config-map.yaml.j2",
                String::new(),
                there(),
                "Pod apple refers to ConfigMap apple, which would be deleted",
            ),
            (
                "config-map.yaml.j2",
                String::new(),
                nothing(),
                "Pod apple refers to ConfigMap apple, which no template renders",
            ),
            (
                "config-map.yaml.j2",
                renamed.to_owned(),
                there(),
                "Pod apple refers to ConfigMap apple, which would be deleted",
            ),
            // The VM has its claims; a new one would not get any.
            (
                "disk-pvcs.yaml.j2",
                String::new(),
                there(),
                "of a VM that is new: Pod apple refers to PersistentVolumeClaim apple-core-disk",
            ),
            (
                "pod.yaml.j2",
                environment("name: apple-password"),
                there(),
                "Secret apple-password, which no template renders",
            ),
            ("pod.yaml.j2", environment("name: apple-password, optional: true"), there(), ""),
            (
                "pod.yaml.j2",
                environment("name: apple").replace("secretKeyRef", "configMapKeyRef"),
                there(),
                "Pod apple refers to ConfigMap apple, which is rendered without the key a",
            ),
            (
                "pod.yaml.j2",
                environment("name: apple, optional: true").replace("secretKeyRef", "configMapKeyRef"),
                there(),
                "",
            ),
            // What an administrator makes.
            ("pod.yaml.j2", environment("name: password"), there(), ""),
            ("pod.yaml.j2", environment("name: apples"), there(), ""),
        ] {
            let new = set(&[(file, &text)]);
            let checked = check(Some(&builtin), &new, [(apple(), observed)], &config);
            let error = checked.err().map(|refusal| refusal.error.to_string()).unwrap_or_default();
            assert!(error.contains(says) && error.is_empty() == says.is_empty(), "{file}: {says}: {error}");
            // What is so already holds up nobody.
            assert!(check(Some(&new), &new, [(apple(), there())], &config).is_ok(), "{file}");
        }
        // A Secret without which the Pod starts is not deleted under it either.
        if objects.iter().any(|object| object.name == "display-secret.yaml.j2") {
            let error = check(Some(&builtin), &set(&[("display-secret.yaml.j2", "")]), [(apple(), there())], &config);
            let error = error.unwrap_err().error;
            assert!(error.message.contains("which would be deleted"), "{error}");
        }
    }

    #[test]
    fn every_example_can_be_read_and_rendered() {
        assert_eq!(examples().len(), include_str!("examples.yaml").matches("\nkind: VirtualMachine").count());
        let vms = examples().into_iter().map(|vm| (vm, nothing()));
        assert_eq!(check(Some(&set(&[])), &set(&[]), vms, &example_config()).unwrap().vms, 2);
    }

    #[test]
    fn the_built_in_kinds_are_those_of_the_built_in_templates() {
        let rendered: BTreeSet<(String, String)> =
            kinds(&set(&[])).into_iter().map(|kind| (kind.api_version, kind.kind)).collect();
        let named = BUILTIN_KINDS.map(|(api_version, kind)| (api_version.to_owned(), kind.to_owned()));
        assert_eq!(rendered, BTreeSet::from(named));
    }

    #[test]
    fn each_kind_is_used_with_the_rights_that_its_objects_need() {
        let kept = "apiVersion: v1\nkind: Secret\nmetadata:\n  name: {{ vm.metadata.name }}\n  annotations: {vmoperator.jdrupes.org/lifetime: keep}\n";
        let of_pear = format!("{{% if values.size == 'pear' %}}\n{POLICY}{{% endif %}}\n");
        let new = set(&[("x.yaml.j2", &of_pear), ("display-secret.yaml.j2", kept), ("relay-secret.yaml.j2", "")]);
        let outcome = check(None, &new, vms(), &ReconcilerConfig::default()).unwrap();
        let used = |kind: &str| outcome.uses.iter().find(|used| used.kind.kind == kind).unwrap();
        assert_eq!(used("Pod").verbs().1, ["get", "create", "patch", "delete"]);
        for kind in ["PersistentVolumeClaim", "Secret"] {
            assert_eq!(used(kind).verbs().1, ["get", "create", "patch"], "{kind}");
        }
        let policy = used("NetworkPolicy");
        assert_eq!((policy.vms, policy.template.as_str()), (1, "x.yaml.j2"));
        assert!(policy.is_of_one_vm(&outcome) && !used("Pod").is_of_one_vm(&outcome));
        // With one VM alone it is a matter of the set.
        let outcome = check(None, &new, vms().into_iter().skip(1), &ReconcilerConfig::default()).unwrap();
        assert!(!outcome.uses.iter().any(|used| used.is_of_one_vm(&outcome)));
    }

    #[cfg(feature = "schema")]
    #[test]
    fn a_vm_whose_values_do_not_match_the_schema_keeps_its_version() {
        let old = set(&[]);
        let new = set(&[("values.schema.json", r#"{"properties": {"size": {"enum": ["apple"]}}}"#)]);
        let mut vms = vms();
        vms[1].0.status = serde_json::from_value(json!({ "templates": { "version": "before" } })).unwrap();
        let outcome = check(Some(&old), &new, vms.clone(), &ReconcilerConfig::default()).unwrap();
        assert_eq!((outcome.vms, outcome.misfits), (1, 1));
        assert_eq!(outcome.kept_versions, BTreeSet::from(["before".to_owned(), old.version().to_owned()]));
        let outcome = check(Some(&new), &new, vms, &ReconcilerConfig::default()).unwrap();
        assert_eq!(
            outcome.kept_versions,
            BTreeSet::from(["before".to_owned()]),
            "the old set does not render it either"
        );

        // If the defaults do not match, it is the set that is wrong, unless a VM shows that there are values that match.
        let new = set(&[("values.schema.json", r#"{"required": ["size"]}"#)]);
        let without_values = || (vm(|_| ()), nothing());
        let refusal = check(Some(&old), &new, [without_values()], &ReconcilerConfig::default()).unwrap_err();
        assert!(!refusal.error.of_values, "{}", refusal.error);
        let vms = self::vms().into_iter().chain([without_values()]);
        assert_eq!(check(Some(&old), &new, vms, &ReconcilerConfig::default()).unwrap().misfits, 1);
    }

    #[test]
    fn a_set_that_needs_what_only_a_running_vm_has_is_refused() {
        let running = vm(|vm| {
            vm["status"] = json!({ "created": true, "addresses": [{ "type": "PodIP", "address": "10.0.0.1" }],
                "ram": "1Gi", "identity": { "uuid": "u" }, "assignment": { "user": "jane" } });
        });
        let map = |value: &str| {
            let text = format!(
                "apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {{{{ vm.metadata.name ~ '-x' }}}}}}\ndata: {{a: {{{{ {value} }}}}}}\n"
            );
            set(&[("x.yaml.j2", &text)])
        };
        let (old, config) = (set(&[]), ReconcilerConfig::default());
        let check = |old: &TemplateSet, new: &TemplateSet| {
            check(Some(old), new, [(running.clone(), nothing())], &config).map_err(|refusal| refusal.error.to_string())
        };
        for (value, when) in [
            ("vm.status.addresses[0].address", "of a VM that is stopped"),
            ("vm.status.addresses[0].address if vm.status.identity is defined else ''", "of a VM that is stopped"),
            ("vm.status.identity.uuid", "of a VM that is new"),
            ("vm.status.assignment.user", "of a VM that is new"),
        ] {
            let error = check(&old, &map(value)).unwrap_err();
            assert!(error.contains(when), "{value}: {error}");
            // What is so already does not hold up another change.
            assert!(check(&map(value), &map(value)).is_ok());
        }
        for value in ["vm.status.addresses[0].address if vm.status.addresses is defined else ''", "vm.status.ram"] {
            assert!(check(&old, &map(value)).is_ok(), "{value}");
        }
    }

    #[test]
    fn a_set_that_mounts_the_claim_of_another_vm_is_refused_with_both() {
        let mounts = |claim: &str| {
            let text = format!(
                "{{% extends 'base/pod.yaml.j2' %}}\n{{% block volumes %}}\n    - {{name: x, persistentVolumeClaim: {{claimName: {claim}}}}}\n{{% endblock %}}\n"
            );
            set(&[("pod.yaml.j2", &text)])
        };
        let old = set(&[]);
        let check = |new| check(Some(&old), &new, vms(), &ReconcilerConfig::default());
        let refusal = check(mounts("pear-core-disk")).unwrap_err();
        assert_eq!(
            (refusal.vm.full_name().as_str(), refusal.error.message.as_str()),
            ("orchard/apple", "Pod apple mounts the claim pear-core-disk, which is the VM orchard/pear's")
        );
        assert_eq!(check(mounts("shared")).unwrap().changed, 2);
    }

    #[test]
    fn what_a_vm_of_another_set_has_is_no_other_vms() {
        let [apple, (pear, _)]: [_; 2] = vms().try_into().unwrap();
        let objects = crate::test_support::rendered(&pear, &nothing());
        let observed = crate::test_support::applied(&objects, |_, _| ());
        let check = |new: &str, namespace: &str| {
            let map = format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {{name: {new}}}\n");
            let mounts = format!(
                "{{% extends 'base/pod.yaml.j2' %}}\n{{% block volumes %}}\n    - {{name: x, persistentVolumeClaim: {{claimName: {new}}}}}\n{{% endblock %}}\n"
            );
            let text = if new == "pear" { ("x.yaml.j2", map.as_str()) } else { ("pod.yaml.j2", mounts.as_str()) };
            let bystander = Bystander { namespace: Some(namespace.into()), ..Bystander::of(&pear, &observed) };
            let (old, config) = (set(&[]), ReconcilerConfig::default());
            let change = Change { old: Some(&old), old_config: &config, new: &set(&[text]), config: &config };
            let outcome = change.check(vec![bystander], [apple.clone()]);
            outcome.map(|outcome| outcome.changed).map_err(|refusal| refusal.error.to_string())
        };
        assert_eq!(
            check("pear", "orchard"),
            Err("x.yaml.j2: ConfigMap pear is rendered for the VMs orchard/apple and orchard/pear: its name must contain the VM's name".into())
        );
        assert_eq!(
            check("pear-core-disk", "orchard"),
            Err("pod.yaml.j2: Pod apple mounts the claim pear-core-disk, which is the VM orchard/pear's".into())
        );
        assert_eq!([check("pear", "garden"), check("pear-core-disk", "garden")], [Ok(1), Ok(1)]);
        // So it is if this set renders the other VM, but it has something that is not allowed.
        let hostile = vm(|vm| {
            vm["metadata"]["name"] = json!("pear");
            vm["spec"]["nodeName"] = json!("n1");
        });
        let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: pear}\n";
        let (old, new, config) = (set(&[]), set(&[("x.yaml.j2", map)]), ReconcilerConfig::default());
        let error = super::check(Some(&old), &new, [(hostile, observed), apple], &config).unwrap_err().error;
        assert!(error.message.contains("orchard/apple and orchard/pear"), "{error}");
    }

    #[test]
    fn of_an_object_that_exists_the_change_is_tried() {
        let map = |more: &str| {
            format!(
                "{}{more}",
                POLICY
                    .replace("NetworkPolicy", "ConfigMap")
                    .replace("networking.k8s.io/v1", "v1")
                    .replace("name }}", "name ~ '-x' }}")
            )
        };
        let (old, new) = (set(&[("x.yaml.j2", &map(""))]), set(&[("x.yaml.j2", &map("data: {a: b}\n"))]));
        let of = |observed: Observed| {
            let vm = vms().remove(0).0;
            let outcome = check(Some(&old), &new, [(vm, observed)], &ReconcilerConfig::default()).unwrap();
            outcome.samples[0][0].exists
        };
        let random = RandomInput { display_password: "x".into(), ..RandomInput::default() };
        let vm = vms().remove(0).0;
        let objects = render(&vm, &nothing(), &ReconcilerConfig::default(), &random, &old).unwrap();
        assert!(!of(nothing()));
        assert!(of(crate::test_support::applied(&objects, |_, _| ())));
        let map = objects.iter().find(|object| object.name == "x.yaml.j2").unwrap();
        let observed = crate::test_support::applied(&objects, |_, _| ());
        for (update, lifetime, is_tried) in [
            (Update::Live, Lifetime::Running, true),
            (Update::AtStart, Lifetime::Vm, true),
            (Update::AtStart, Lifetime::Running, false),
            (Update::Once, Lifetime::Vm, false),
        ] {
            let object = Rendered { update, lifetime, ..map.clone() };
            assert_eq!(changes_existing(&observed, &object), is_tried, "{update:?} {lifetime:?}");
        }
    }

    #[test]
    fn a_configuration_with_which_a_vm_is_not_rendered_is_refused() {
        let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-x' }}}\ndata: {a: {{ values.tier.name }}}\n";
        let set = set(&[("x.yaml.j2", text), ("values.yaml", "tier: {name: a}\n")]);
        let config = |tier: Value| {
            let template_values = json!({ "tier": tier }).as_object().cloned().unwrap();
            ReconcilerConfig { template_values, ..ReconcilerConfig::default() }
        };
        let change = |new: &ReconcilerConfig| {
            let old_config = &ReconcilerConfig::default();
            let change = Change { old: Some(&set), old_config, new: &set, config: new };
            change.check(Vec::new(), vms()).map(|outcome| outcome.changed)
        };
        assert_eq!(change(&config(json!({ "name": "b" }))).unwrap(), 2);
        let error = change(&config(json!("b"))).unwrap_err().error;
        assert_eq!(error.template, "x.yaml.j2");
    }

    #[test]
    fn a_set_is_refused_if_a_vm_renders_only_with_the_old_one() {
        let new = set(&[("x.yaml.j2", "{% if values.size == 'pear' %}{{ nothing }}{% endif %}")]);
        let refusal = check(Some(&set(&[])), &new, vms(), &ReconcilerConfig::default()).unwrap_err();
        assert_eq!((refusal.vm.full_name().as_str(), refusal.error.template.as_str()), ("orchard/pear", "x.yaml.j2"));
        // Without an old set, or if the old set fails too, the error is the VM's own.
        assert_eq!(check(None, &new, vms(), &ReconcilerConfig::default()).unwrap().vms, 1);
        assert_eq!(check(Some(&new), &new, vms(), &ReconcilerConfig::default()).unwrap().vms, 1);
    }
}
