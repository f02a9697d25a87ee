//! What a change of templates, configuration or program does to a VM: what its plan has with the change and not without it.
//!
//! | the VM | only with the change, the plan | the effect is |
//! |---|---|---|
//! | any | finds an object of somebody else, or a claim that can't become so | [`Class::Refused`] |
//! | runs | has a pending change | [`Class::Restart`] |
//! | runs | writes or deletes an object | [`Class::Live`] |
//! | is down, or starts anyway | writes an object, or the Pod would be another one | [`Class::Start`] |
//! | any | has nothing | [`Class::Nothing`] |
//!
//! The running guest reads some of what is written (the runner's configuration, cloud-init data) only at its next start. The runner reports
//! that, so it is derived here by the runner's own rule ([`at_start::at_start`]).

use kube::{ResourceExt, core::DynamicObject};
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::{
    Plan, instances,
    metadata::{FOR_KUBELET, OF_WHOLE_OBJECT},
    pending::{self, Difference, Path, Step},
    plan,
};
use crate::{
    api::{PendingChange, Reason, VirtualMachine},
    claims,
    object::{Lifetime, ObjectKey, Rendered},
    observed::{Json, Observed},
    plan::{Action, DeleteReason, Wait},
    power::WantedPower,
    runner_config::{
        ConfigFile, RunnerConfig, VmSection,
        at_start::{self, AtOnce, differences},
        paths::{CONFIG_FILE, QEMU_FILE},
    },
};

/// The end of the names of the objects with cloud-init data.
const CLOUD_INIT: &str = "-cloud-init";

/// What a change means for a VM, the least first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// It does not notice.
    #[default]
    Nothing,
    /// No guest runs; its next start is with the change.
    Start,
    /// It gets the change while its guest runs.
    Live,
    /// A part of the change waits for its next start.
    Restart,
    /// A part of the change, or all of it, is not carried out.
    Refused,
}

impl Class {
    /// All of them, in this order.
    pub const ALL: [Self; 5] = [Self::Nothing, Self::Start, Self::Live, Self::Restart, Self::Refused];

    /// The word for it, which is also that of its JSON.
    pub fn word(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Start => "start",
            Self::Live => "live",
            Self::Restart => "restart",
            Self::Refused => "refused",
        }
    }
}

/// A field that changes at once.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FieldChange {
    /// Such as `data.config.yaml` or `metadata.labels.tier`.
    pub path: String,
    /// Its value now. None of a Secret.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub current: Option<Value>,
    /// Its value afterwards.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wanted: Option<Value>,
}

/// An object that is written or deleted at once.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Touched {
    /// Its kind and name.
    pub object: String,
    /// What happens to it: `created`, `changed`, `deleted`, `created again` or `image`.
    pub what: &'static str,
    /// The file that it is rendered from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// The fields that change, as far as its content is known.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fields: Vec<FieldChange>,
}

/// What a change does to a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Effect {
    /// All of it in a word.
    #[serde(rename = "effect")]
    pub class: Class,
    /// What happens at once.
    pub at_once: Vec<Touched>,
    /// What waits for the next start because of the change.
    pub at_next_start: Vec<PendingChange>,
    /// What waits for the next start without the change, too.
    pub waits_already: Vec<PendingChange>,
    /// What is not carried out, in words.
    pub refused: Vec<String>,
}

impl Effect {
    /// The change does not reach the VM, for this reason.
    pub fn refused(why: String) -> Self {
        Self { class: Class::Refused, refused: vec![why], ..Self::default() }
    }
}

/// What the effect on a VM depends on.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// The VM.
    pub vm: &'a VirtualMachine,
    /// Its objects, reduced.
    pub observed: &'a Observed,
    /// The same with their content. An object without content is compared by what is rendered.
    pub current: &'a [DynamicObject],
    /// The VM rendered without the change; `None` where that is not known.
    pub old: Option<&'a [Rendered]>,
    /// The VM rendered with the change.
    pub new: &'a [Rendered],
}

/// What the change does to the VM.
pub fn effect(input: Input<'_>) -> Effect {
    let Input { vm, observed, current: _, old, new } = input;
    let after = plan(vm, observed, Some(new));
    let known = old.map(|old| plan(vm, observed, Some(old)));
    let is_down = |plan: &Plan| plan.power.wanted == WantedPower::Down;
    let is_down = known.as_ref().is_some_and(is_down) || is_down(&after);
    let before = known.unwrap_or_default();
    let is_new = |action: &&Action| !before.steps.iter().flatten().any(|other| other == *action);
    // A VM that starts, or would if something did not hold it up, gets these objects from any manager.
    let starts_anyway = old.is_none() && after.starts();
    let mut found = Finder { input, starts_anyway, effect: Effect::default() };
    for action in after.steps.iter().flatten().filter(is_new) {
        found.action(action);
    }
    let pod = instances::active(vm, observed).filter(|pod| pod.deleting.is_none() && !pod.has_ended());
    let runs = pod.is_some() && !is_down;
    let already = vm.status.as_ref().map(|status| status.pending_changes.as_slice()).unwrap_or_default();
    let waits = |change: &PendingChange| {
        before.pending.contains(change)
            || already.iter().any(|it| (&it.path, &it.wanted) == (&change.path, &change.wanted))
    };
    let mut effect = found.effect;
    let pending = std::mem::take(&mut effect.at_next_start).into_iter().chain(after.pending.iter().cloned());
    (effect.waits_already, effect.at_next_start) = pending.filter(|_| runs).partition(waits);
    let refused_before = old.map(|old| refusals(vm, observed, old, &before)).unwrap_or_default();
    let refused = refusals(vm, observed, new, &after);
    effect.refused = refused.into_iter().filter(|refusal| !refused_before.contains(refusal)).collect();
    // Without the old rendering there is nothing to compare with what does not exist while the VM is down.
    let starts_otherwise = !runs && old.is_some_and(|old| running(old).ne(running(new)));
    effect.class = if !effect.refused.is_empty() {
        Class::Refused
    } else if !effect.at_next_start.is_empty() {
        Class::Restart
    } else if runs && !effect.at_once.is_empty() {
        Class::Live
    } else if !effect.at_once.is_empty() || starts_otherwise {
        Class::Start
    } else {
        Class::Nothing
    };
    effect
}

/// What exists while the VM runs, by its content.
fn running(rendered: &[Rendered]) -> impl Iterator<Item = (&ObjectKey, &str)> {
    let running = rendered.iter().filter(|object| object.lifetime == Lifetime::Running);
    running.map(|object| (&object.key, object.hash.as_str()))
}

/// Changes of claims that are refused, and objects of others that are not taken over, in words.
pub fn refusals(vm: &VirtualMachine, observed: &Observed, rendered: &[Rendered], plan: &Plan) -> Vec<String> {
    let claims = claims::claims(vm, observed, rendered, &[]);
    let findings = claims.iter().flat_map(|claim| claim.findings.iter().map(move |finding| (claim, finding)));
    let refused =
        findings.filter(|(_, finding)| matches!(finding.reason, Reason::ShrinkRefused | Reason::ChangeRefused));
    let claims = refused.map(|(claim, finding)| claims::sentence(claim, finding));
    let not_ours = plan.waits.iter().filter_map(|wait| match wait {
        Wait::NotOurs(key) => Some(format!("{key} exists and is not the manager's: it is not taken over")),
        _ => None,
    });
    claims.chain(not_ours).collect()
}

struct Finder<'a> {
    input: Input<'a>,
    /// Nothing is known of what is so without the change, and the VM has yet to start.
    starts_anyway: bool,
    effect: Effect,
}

impl Finder<'_> {
    fn action(&mut self, action: &Action) {
        let key = action.key();
        let touched = |what, template: Option<&String>, fields| Touched {
            object: key.to_string(),
            what,
            template: template.cloned(),
            fields,
        };
        let touched = match action {
            // It starts anyway, with the change or without.
            Action::Apply { uid: None, .. } if action.starts() || self.starts_anyway => return,
            Action::Apply { object, uid: None } => touched("created", Some(&object.template), Vec::new()),
            Action::Apply { object, uid: Some(_) } => {
                let Some(fields) = self.changed(object) else { return };
                touched("changed", Some(&object.template), fields)
            }
            Action::Label { patch, .. } => {
                let fields = self.labelled(key, patch);
                if fields.is_empty() {
                    return;
                }
                touched("changed", None, fields)
            }
            Action::Image { container, image, .. } => {
                let path = format!("spec.initContainers[{container}].image");
                touched("image", None, vec![FieldChange { path, current: None, wanted: Some(json!(image)) }])
            }
            Action::Delete { reason: DeleteReason::NotRendered, .. } => touched("deleted", None, Vec::new()),
            // No guest has started in it, or none uses it now.
            Action::Delete { reason: DeleteReason::Changed | DeleteReason::Renewed, .. } => {
                touched("created again", None, Vec::new())
            }
            // The VM's power wants it, whatever is rendered.
            Action::Delete {
                reason: DeleteReason::Stop | DeleteReason::Restart | DeleteReason::Ended | DeleteReason::Force,
                ..
            } => return,
        };
        self.effect.at_once.push(touched);
    }

    /// The fields that an apply changes. `None`: it changes nothing.
    fn changed(&mut self, object: &Rendered) -> Option<Vec<FieldChange>> {
        let key = &object.key;
        let owned = self.input.observed.get(key).and_then(|found| found.owned.as_ref()).map(Json::value);
        let content = self.content(key);
        let is_content_known = content.is_some();
        let former =
            self.input.old.into_iter().flatten().find(|old| old.key == *key).map(|old| Value::clone(&old.value));
        // Without either, all that is known is that it is written.
        let Some(current) = content.or(former) else {
            self.note_cloud_init(key);
            return Some(Vec::new());
        };
        let owned = owned.filter(|_| is_content_known);
        let mut differences = pending::applied(&object.value, &current, owned.as_ref());
        differences.retain(|change| !is_of_manager(change));
        let is_data = |change: &Difference| matches!(change.place.first(), Some(Step::Field(name)) if name == "data");
        if differences.iter().any(is_data) {
            self.note_cloud_init(key);
        }
        // What waits for the next start is written nevertheless.
        let is_written = !differences.is_empty();
        let of_runner = self.note_runner_config(key, &mut differences);
        let of_objects = differences.into_iter().map(|Difference { place, volume: _, current, wanted }| FieldChange {
            path: Path(&place).to_string(),
            current,
            wanted,
        });
        let mut fields: Vec<FieldChange> = of_objects.chain(of_runner).collect();
        if key.kind == "Secret" {
            fields.iter_mut().for_each(|field| (field.current, field.wanted) = (None, None));
        }
        is_written.then_some(fields)
    }

    /// The object of the cluster, if its content was read.
    fn content(&self, key: &ObjectKey) -> Option<Value> {
        let is_it = |object: &&DynamicObject| {
            let types = object.types.as_ref();
            types.is_some_and(|types| types.kind == key.kind && types.api_version == key.api_version)
                && object.name_any() == key.name
        };
        let object = self.input.current.iter().find(is_it)?;
        object.data.as_object().filter(|data| !data.is_empty()).map(|_| json!(object))
    }

    fn labelled(&self, key: &ObjectKey, patch: &Value) -> Vec<FieldChange> {
        let found = self.input.observed.get(key);
        let mut fields = Vec::new();
        for name in ["labels", "annotations"] {
            let values = found.map(|found| if name == "labels" { &found.labels } else { &found.annotations });
            for (label, wanted) in patch["metadata"][name].as_object().into_iter().flatten() {
                let current = values.and_then(|values| values.get(label)).map(|value| json!(value));
                let wanted = Some(wanted).filter(|wanted| !wanted.is_null()).cloned();
                let path = format!("metadata.{name}.{label}");
                let is_of_manager = name == "annotations" && is_managers_annotation(label);
                fields.extend((!is_of_manager).then_some(FieldChange { path, current, wanted }));
            }
        }
        fields
    }

    /// A Pod that does not mount the object yet, or no longer, differs itself; here the object has another content.
    fn note_cloud_init(&mut self, key: &ObjectKey) {
        let has_it = matches!(key.kind.as_str(), "ConfigMap" | "Secret");
        if has_it && key.name == self.input.vm.name_any() + CLOUD_INIT {
            self.waits(at_start::cloud_init());
        }
    }

    /// Takes the runner's configuration out of what changes. Returns the fields of it that change at once, and notes the others.
    fn note_runner_config(&mut self, key: &ObjectKey, differences: &mut Vec<Difference>) -> Vec<FieldChange> {
        if key.kind != "ConfigMap" || key.name != self.input.vm.name_any() {
            return Vec::new();
        }
        let find = |differences: &[Difference], file: &str| {
            let place = [Step::Field("data".into()), Step::Field(file.into())];
            differences.iter().position(|difference| difference.place == place)
        };
        // What it means is said by its digest in the configuration.
        if let Some(at) = find(differences, QEMU_FILE) {
            differences.remove(at);
        }
        let Some(at) = find(differences, CONFIG_FILE) else { return Vec::new() };
        let text =
            |value: &Option<Value>| Some(crate::yaml::from_str::<ConfigFile>(value.as_ref()?.as_str()?).ok()?.runner);
        let texts = text(&differences[at].current).zip(text(&differences[at].wanted));
        let Some((old, new)) = texts else { return Vec::new() };
        differences.remove(at);
        let changes = of_runner(&old, &new);
        changes.at_start.into_iter().for_each(|change| self.waits(change));
        changes.live
    }

    fn waits(&mut self, change: PendingChange) {
        // Other cloud-init data may be in two objects.
        if !self.effect.at_next_start.contains(&change) {
            self.effect.at_next_start.push(change);
        }
    }
}

/// Whether a field only says how the manager made the object, or lets the kubelet look at its volumes.
fn is_of_manager(change: &Difference) -> bool {
    let [Step::Field(metadata), Step::Field(annotations), Step::Field(name), ..] = change.place.as_slice() else {
        return false;
    };
    metadata == "metadata" && annotations == "annotations" && is_managers_annotation(name)
}

fn is_managers_annotation(name: &str) -> bool {
    OF_WHOLE_OBJECT.contains(&name) || FOR_KUBELET.contains(&name)
}

#[derive(Default)]
struct RunnerChanges {
    live: Vec<FieldChange>,
    at_start: Vec<PendingChange>,
}

/// How two configurations of the runner differ.
fn of_runner(old: &RunnerConfig, new: &RunnerConfig) -> RunnerChanges {
    let mut changes = RunnerChanges::default();
    let fields = |config: &RunnerConfig| match json!(config) {
        Value::Object(fields) => fields,
        _ => Map::new(),
    };
    let (old_fields, new_fields) = (fields(old), fields(new));
    for (name, current, wanted) in differences(&old_fields, &new_fields) {
        match name.as_str() {
            "vm" => {}
            "template" => changes.at_start.push(at_start::template(current, wanted)),
            // A VM that keeps its template does not notice another one.
            "qemuTemplates" => changes.at_start.extend(new.update_template.then(at_start::qemu_file)),
            "cloudInit" => changes.at_start.push(at_start::cloud_init()),
            _ => changes.live.push(FieldChange { path: format!("config.yaml/{name}"), current, wanted }),
        }
    }
    let (old, new) = with_one_identity(&old.vm, &new.vm);
    changes.at_start.extend(at_start::at_start(&old, &new));
    changes.live.extend(
        at_start::at_once(&old, &new).into_iter().map(|AtOnce { path, current, wanted }| FieldChange {
            path: format!("config.yaml/{path}"),
            current,
            wanted,
        }),
    );
    changes
}

/// A VM without an identity in its configuration has chosen its own, and keeps it.
fn with_one_identity(old: &VmSection, new: &VmSection) -> (VmSection, VmSection) {
    let (mut old, mut new) = (old.clone(), new.clone());
    for (one, other) in [
        (&mut old.uuid, &mut new.uuid),
        (&mut old.machine_type, &mut new.machine_type),
        (&mut old.hardware, &mut new.hardware),
    ] {
        if one.is_none() || other.is_none() {
            (*one, *other) = (None, None);
        }
    }
    (old, new)
}

#[cfg(test)]
mod tests;
