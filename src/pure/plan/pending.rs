//! The changes of an object that wait for the VM's next start (`status.pendingChanges`).
//!
//! The API server adds defaults and other controllers add fields, so only fields that the manager owns are compared. Quantities are
//! compared as numbers, because the API server may write them differently (`1024Mi` as `1Gi`).
//!
//! Some maps and lists are atomic: whoever applies one owns it as a whole, so the field set has nothing below it
//! (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>). Such a value was applied as it is, except for
//! the API server's own additions ([`is_default`], [`DEFAULT_TOLERATIONS`]). So whatever else it has more than the rendered one is a change.

use std::{collections::BTreeSet, fmt, sync::LazyLock};

use serde_json::{Map, Value};

use crate::{
    api::{PendingChange, Quantity, Subject},
    object::{AGENT_NAME, Rendered},
    observed::{Json, Object},
    plan::unstarted::ended_before_guest,
};

/// The keys of the tolerations that the API server adds to each Pod
/// (<https://kubernetes.io/docs/reference/access-authn-authz/admission-controllers/#defaulttolerationseconds>).
const DEFAULT_TOLERATIONS: [&str; 2] = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"];

/// Fields that are no atomic maps. If they are applied empty, the field set has nothing below them either, and admission plugins fill them.
const NOT_ATOMIC: [&str; 4] = ["resources", "requests", "limits", "securityContext"];

/// The lists of a Pod and its containers whose items have a volume's name.
const OF_VOLUMES: [&str; 3] = ["volumes", "volumeMounts", "volumeDevices"];

/// A step from a value to one in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// To the field of a map.
    Field(String),
    /// To the item of a list that has this key.
    Item(String),
}

impl Step {
    fn field(name: &str) -> Self {
        Self::Field(name.into())
    }
}

/// The steps as people read them: `spec.containers[a].image`.
pub struct Path<'a>(pub &'a [Step]);

impl fmt::Display for Path<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, step) in self.0.iter().enumerate() {
            match step {
                Step::Field(name) if number == 0 => f.write_str(name)?,
                Step::Field(name) => write!(f, ".{name}")?,
                Step::Item(key) => write!(f, "[{key}]")?,
            }
        }
        Ok(())
    }
}

/// A field that differs between what is rendered and what exists.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Where it is.
    pub place: Vec<Step>,
    /// The volume of the Pod that it belongs to.
    pub volume: Option<String>,
    /// Its value in the existing object.
    pub current: Option<Value>,
    /// Its rendered value.
    pub wanted: Option<Value>,
}

impl Difference {
    /// What follows the steps to these fields and items, if the difference is there: an item's key stands between the names of fields.
    fn below(&self, place: &[Step]) -> Option<&[Step]> {
        self.place.strip_prefix(place)
    }
}

/// The fields of an existing object that will be different after the next start. The manager does not know the content of other kinds than Pods:
/// `None` for those.
pub fn differences(rendered: &Rendered, found: &Object) -> Option<Vec<Difference>> {
    if !rendered.key.is_pod() {
        return None;
    }
    let owned = found.owned.as_ref().map(Json::value);
    let owned = owned.as_ref().map(|fields| &fields["f:spec"]).filter(|fields| fields.is_object());
    Some(compared(&["spec"], Field { wanted: rendered.value.get("spec"), current: Some(&found.spec), owned }))
}

/// The differences in a field of an object.
fn compared(place: &[&str], field: Field<'_>) -> Vec<Difference> {
    let place = place.iter().map(|name| Step::field(name)).collect();
    let mut changes = Changes { place, ..Changes::default() };
    changes.compare(field);
    changes.found
}

/// What of an existing object waits for the next start.
pub fn changes(rendered: &Rendered, differences: Option<Vec<Difference>>) -> Vec<PendingChange> {
    let key = &rendered.key;
    let change = |path: &dyn fmt::Display, subject, current, wanted| PendingChange {
        path: format!("objects/{}/{path}", key.kind),
        subject: Some(subject),
        current,
        wanted,
        reason: format!("the manager does not change a {} that exists", key.kind),
    };
    let of_object = || Subject::Object(key.to_string());
    let Some(differences) = differences else { return vec![change(&key.name, of_object(), None, None)] };
    let changes = differences.into_iter().map(|Difference { place, volume, current, wanted }| {
        change(&Path(&place), volume.map_or_else(of_object, Subject::Volume), current, wanted)
    });
    changes.collect()
}

/// The fields that an apply of `wanted`, a whole object, changes in the existing object `current`. `owned` is the field set of what the manager
/// applied. Of the metadata only labels and annotations are compared.
pub fn applied(wanted: &Value, current: &Value, owned: Option<&Value>) -> Vec<Difference> {
    let mut found = Vec::new();
    let field = |parent: Option<&Value>, name: &str| parent.and_then(|it| it.get(name)).cloned();
    let names = |object: &Value| object.as_object().into_iter().flatten().map(|(name, _)| name.clone()).collect();
    let is_content = |name: &String| !matches!(name.as_str(), "apiVersion" | "kind" | "metadata" | "status");
    let (wanted_names, current_names): (BTreeSet<String>, BTreeSet<String>) = (names(wanted), names(current));
    for name in wanted_names.union(&current_names).filter(|name| is_content(name)) {
        let owned = owned.and_then(|owned| owned.get(format!("f:{name}")));
        let (wanted, current) = (wanted.get(name), current.get(name));
        if wanted.is_some() || owned.is_some() {
            found.extend(compared(&[name], Field { wanted, current, owned }));
        }
    }
    let owned = field(owned, "f:metadata");
    for name in ["labels", "annotations"] {
        let (wanted, current) = (wanted["metadata"].get(name), current["metadata"].get(name));
        let owned = field(owned.as_ref(), &format!("f:{name}"));
        if wanted.is_some() || owned.is_some() {
            found.extend(compared(&["metadata", name], Field { wanted, current, owned: owned.as_ref() }));
        }
    }
    found
}

/// The object that is created when `pod`, which other templates created, is gone.
pub fn created_after_pod(rendered: &Rendered, pod: &Object) -> PendingChange {
    PendingChange {
        path: format!("objects/{}/{}", rendered.key.kind, rendered.key.name),
        subject: Some(Subject::Object(rendered.key.to_string())),
        current: None,
        wanted: None,
        reason: format!("the VM runs in the {}, which other templates created", pod.key),
    }
}

/// Takes out the change of the agent's image, if nothing else of the agent changes. A Pod can get it while its guest runs.
pub fn take_agent_image(changes: &mut Vec<Difference>) -> Option<String> {
    let agent = [Step::field("spec"), Step::field("initContainers"), Step::Item(AGENT_NAME.into())];
    let mut of_agent = changes.iter().enumerate().filter_map(|(at, change)| Some((at, change, change.below(&agent)?)));
    let (index, change, below) = of_agent.next().filter(|_| of_agent.next().is_none())?;
    let is_image = below == [Step::field("image")] && change.current.is_some();
    let image = change.wanted.as_ref().filter(|_| is_image)?.as_str()?.to_owned();
    changes.remove(index);
    Some(image)
}

/// Whether a change is another amount of CPUs or memory that the runner's container requests.
pub fn is_runner_request(change: &Difference, pod: &Object) -> bool {
    let requests = [
        Step::field("spec"),
        Step::field("containers"),
        Step::Item(pod.runner_container_name().into()),
        Step::field("resources"),
        Step::field("requests"),
    ];
    let is_size = |below: &[Step]| matches!(below, [Step::Field(name)] if ["cpu", "memory"].contains(&name.as_str()));
    change.below(&requests).is_some_and(is_size) && change.current.is_some() && change.wanted.is_some()
}

/// Whether a change is one of what an init container requests that ends before the guest starts. No guest waits for that. Without this, a change
/// of a VM's CPUs would ask for a restart, because such a container requests what the runner's does.
pub fn is_request_before_guest(change: &Difference, pod: &Object) -> bool {
    let below = change.below(&[Step::field("spec"), Step::field("initContainers")]);
    let Some([Step::Item(name), Step::Field(field), ..]) = below else { return false };
    field == "resources" && ended_before_guest(pod).any(|container| container["name"] == name.as_str())
}

/// A field, or an item of a list, as it is compared.
#[derive(Clone, Copy)]
struct Field<'a> {
    /// Its rendered value.
    wanted: Option<&'a Value>,
    /// Its value in the existing object.
    current: Option<&'a Value>,
    /// The field set of what the manager owns below it
    /// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#field-management>).
    owned: Option<&'a Value>,
}

/// Collects differences on a walk through two values.
#[derive(Default)]
struct Changes {
    /// Where the walk is.
    place: Vec<Step>,
    /// The volume of the Pod that the place belongs to.
    volume: Option<String>,
    found: Vec<Difference>,
}

impl Changes {
    fn add(&mut self, current: Option<&Value>, wanted: Option<&Value>) {
        self.found.push(Difference {
            place: self.place.clone(),
            volume: self.volume.clone(),
            current: current.cloned(),
            wanted: wanted.cloned(),
        });
    }

    fn step(&mut self, step: Step, look: impl FnOnce(&mut Self)) {
        self.place.push(step);
        look(self);
        self.place.pop();
    }

    /// To an item of a list, which may be one of a volume.
    fn step_to_item(&mut self, label: String, item: &Value, look: impl FnOnce(&mut Self)) {
        let is_of_volume = matches!(self.place.last(), Some(Step::Field(list)) if OF_VOLUMES.contains(&list.as_str()));
        let volume = item["name"].as_str().filter(|_| is_of_volume).map(str::to_owned);
        let outer = std::mem::replace(&mut self.volume, volume);
        self.step(Step::Item(label), look);
        self.volume = outer;
    }

    fn compare(&mut self, field: Field<'_>) {
        let Field { wanted, current, owned } = field;
        match (wanted, current) {
            (None, None) => {}
            (Some(Value::Object(wanted)), Some(Value::Object(current))) => {
                self.compare_fields(wanted, current, owned);
            }
            (Some(Value::Array(wanted)), Some(Value::Array(current)))
                if fields(owned).any(|(field, _)| field.starts_with("k:")) =>
            {
                self.compare_items(wanted, current, owned);
            }
            (Some(Value::Array(wanted)), Some(Value::Array(current))) if is_same_list(wanted, current, owned) => {}
            (Some(wanted), Some(current)) if is_same(wanted, current) => {}
            // An empty map or list means the same as an absent one.
            (Some(wanted), None) if is_empty(wanted) => {}
            (wanted, current) => self.add(current, wanted),
        }
    }

    fn compare_fields(&mut self, wanted: &Map<String, Value>, current: &Map<String, Value>, owned: Option<&Value>) {
        let is_whole = is_atomic(owned);
        for (name, value) in wanted {
            let below = if is_whole { owned } else { owned.and_then(|owned| owned.get(format!("f:{name}"))) };
            let owned = below.filter(|&below| !is_atomic(Some(below)) || !NOT_ATOMIC.contains(&name.as_str()));
            let field = Field { wanted: Some(value), current: current.get(name), owned };
            self.step(Step::field(name), |changes| changes.compare(field));
        }
        let is_ours = |name: &str, value: &Value| {
            let has_field = |owned: &Value| owned.get(format!("f:{name}")).is_some();
            if is_whole { !is_default(name, value) } else { owned.is_some_and(has_field) }
        };
        for (name, value) in current {
            if !wanted.contains_key(name) && is_ours(name, value) {
                self.step(Step::field(name), |changes| changes.add(Some(value), None));
            }
        }
    }

    /// Compares a list whose items have keys (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
    fn compare_items(&mut self, wanted: &[Value], current: &[Value], owned: Option<&Value>) {
        let keys: Vec<ItemKey<'_>> = fields(owned).filter_map(ItemKey::parse).collect();
        let label = |item| keys.first().map_or_else(|| Value::to_string(item), |key| key.label(item));
        let mut is_wanted = vec![false; current.len()];
        for item in wanted {
            match current.iter().position(|other| has_same_key(&keys, item, other)) {
                Some(index) => {
                    is_wanted.get_mut(index).into_iter().for_each(|is_wanted| *is_wanted = true);
                    let other = current.get(index);
                    let key = keys.iter().find(|key| other.is_some_and(|other| key.is_of(other)));
                    let owned = key.map(|key| key.owned);
                    let field = Field { wanted: Some(item), current: other, owned };
                    self.step_to_item(label(item), item, |changes| changes.compare(field));
                }
                None => self.step_to_item(label(item), item, |changes| changes.add(None, Some(item))),
            }
        }
        for (item, is_wanted) in current.iter().zip(is_wanted) {
            if !is_wanted && keys.iter().any(|key| key.is_of(item)) {
                self.step_to_item(label(item), item, |changes| changes.add(Some(item), None));
            }
        }
    }
}

/// The key of an item that the manager owns, from a field set.
struct ItemKey<'a> {
    fields: Map<String, Value>,
    /// The field set below the item.
    owned: &'a Value,
}

impl<'a> ItemKey<'a> {
    fn parse((field, owned): (&String, &'a Value)) -> Option<Self> {
        Some(Self { fields: serde_json::from_str(field.strip_prefix("k:")?).ok()?, owned })
    }

    fn is_of(&self, item: &Value) -> bool {
        self.fields.iter().all(|(name, value)| item.get(name) == Some(value))
    }

    /// What names an item of this key's list in a path: the values of all key fields, as in `ports[53/UDP]`.
    fn label(&self, item: &Value) -> String {
        let text = |name: &String| match key_field(item, name) {
            Some(Value::String(text)) => text.clone(),
            Some(other) => other.to_string(),
            None => String::new(),
        };
        self.fields.keys().map(text).collect::<Vec<_>>().join("/")
    }
}

/// A field of an item's key. The API server fills in the protocol of a port, the only key field that it does
/// (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/#ports>).
fn key_field<'a>(item: &'a Value, name: &str) -> Option<&'a Value> {
    static TCP: LazyLock<Value> = LazyLock::new(|| "TCP".into());
    item.get(name).or_else(|| (name == "protocol").then(|| &*TCP))
}

/// Whether two items have the same key. The first of the list's `keys` says which fields are the key. The API server may have added a
/// default to `current`, so a key field that is missing in `wanted` is not compared.
fn has_same_key(keys: &[ItemKey<'_>], wanted: &Value, current: &Value) -> bool {
    let mut names = keys.first().into_iter().flat_map(|key| key.fields.keys());
    names.all(|name| key_field(wanted, name).is_none_or(|wanted| Some(wanted) == key_field(current, name)))
}

fn fields(owned: Option<&Value>) -> impl Iterator<Item = (&String, &Value)> {
    owned.and_then(Value::as_object).into_iter().flatten()
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// Whether the field set says that the manager owns a map or a list as a whole.
fn is_atomic(owned: Option<&Value>) -> bool {
    owned.and_then(Value::as_object).is_some_and(Map::is_empty)
}

/// Whether the API server adds such a field by itself inside an atomic map or list of a Pod's spec, such as the `fieldRef` of a variable
/// (<https://kubernetes.io/docs/reference/kubernetes-api/workload-resources/pod-v1/>).
fn is_default(name: &str, value: &Value) -> bool {
    let is_known = match name {
        "apiVersion" => value == "v1",
        "divisor" => value == "0",
        "expirationSeconds" => value == 3600,
        "name" => value == "",
        _ => false,
    };
    is_known || is_empty(value) || value.is_null()
}

/// Whether a list without keys is the rendered one. `current` may have defaults of the API server and, if the manager does not own it as a
/// whole, more fields.
fn is_same_list(wanted: &[Value], current: &[Value], owned: Option<&Value>) -> bool {
    let is_added = |item: &&Value| {
        let is_default = DEFAULT_TOLERATIONS.iter().any(|key| item["key"] == *key && item["effect"] == "NoExecute");
        is_default && !wanted.iter().any(|wanted| wanted["key"] == item["key"])
    };
    let current: Vec<&Value> = current.iter().filter(|item| !is_added(item)).collect();
    let may_have_more = !is_atomic(owned);
    wanted.len() == current.len()
        && wanted.iter().zip(current).all(|(part, whole)| contains(whole, part, may_have_more))
}

/// Whether everything in `part` is in `whole`. `whole` may have defaults of the API server and, with `may_have_more`, other fields too.
fn contains(whole: &Value, part: &Value, may_have_more: bool) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => {
            let has = |(name, part): (&String, &Value)| {
                whole.get(name).map_or_else(|| is_empty(part), |whole| contains(whole, part, may_have_more))
            };
            let is_known = |(name, whole): (&String, &Value)| part.contains_key(name) || is_default(name, whole);
            part.iter().all(has) && (may_have_more || whole.iter().all(is_known))
        }
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len()
                && whole.iter().zip(part).all(|(whole, part)| contains(whole, part, may_have_more))
        }
        (whole, part) => is_same(whole, part),
    }
}

fn is_same(one: &Value, other: &Value) -> bool {
    // CPUs are counted in thousandths.
    let number = |value: &Value| match value.as_str().and_then(|text| text.strip_suffix('m')) {
        Some(thousandths) => thousandths.parse::<u128>().ok(),
        None => serde_json::from_value::<Quantity>(value.clone()).ok().map(|number| u128::from(number.bytes()) * 1000),
    };
    one == other
        || matches!((one, other), (Value::String(_) | Value::Number(_), Value::String(_) | Value::Number(_)))
            && number(one).is_some()
            && number(one) == number(other)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn compare(wanted: &Value, current: &Value, owned: &Value) -> Vec<(String, Value, Value)> {
        let found =
            compared(&["spec"], Field { wanted: Some(wanted), current: Some(current), owned: Some(owned) }).into_iter();
        found.map(|change| (Path(&change.place).to_string(), change.current.into(), change.wanted.into())).collect()
    }

    #[test]
    fn defaults_and_fields_of_others_are_no_changes() {
        let wanted = json!({
            "containers": [{ "name": "a", "image": "i", "resources": { "requests": { "memory": "1024Mi", "cpu": "2000m" } }, "ports": [{ "containerPort": 5900 }] }],
            "volumes": [{ "name": "v", "projected": { "sources": [{ "configMap": { "name": "x" } }] } }],
            "nodeSelector": {},
        });
        let current = json!({
            "containers": [
                { "name": "a", "image": "i", "resources": { "requests": { "memory": "1Gi", "cpu": "2" } }, "imagePullPolicy": "Always",
                  "ports": [{ "containerPort": 5900, "protocol": "TCP" }] },
                { "name": "injected" },
            ],
            "volumes": [{ "name": "token" }, { "name": "v", "projected": { "defaultMode": 420, "sources": [{ "configMap": { "name": "x" } }] } }],
            "schedulerName": "default-scheduler",
        });
        let owned = json!({
            "f:containers": { "k:{\"name\":\"a\"}": {
                ".": {}, "f:name": {}, "f:image": {}, "f:resources": { "f:requests": { "f:memory": {}, "f:cpu": {} } },
                "f:ports": { "k:{\"containerPort\":5900,\"protocol\":\"TCP\"}": { ".": {}, "f:containerPort": {} } },
            } },
            "f:volumes": { "k:{\"name\":\"v\"}": { ".": {}, "f:name": {}, "f:projected": { ".": {}, "f:sources": {} } } },
            "f:nodeSelector": {},
        });
        assert_eq!(compare(&wanted, &current, &owned), []);
    }

    /// Atomic values of a Pod's spec: `wanted` is what the templates render now, `current` what they rendered before with the API server's
    /// additions.
    #[test]
    fn what_is_removed_inside_an_atomic_value_is_a_change() {
        let term =
            |values: Value| json!({ "matchExpressions": [{ "key": "zone", "operator": "In", "values": values }] });
        let affinity = |terms: Value| json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": terms } } });
        let of_affinity = json!({ "f:nodeAffinity": { "f:requiredDuringSchedulingIgnoredDuringExecution": {} } });
        let added: Vec<Value> = DEFAULT_TOLERATIONS
            .iter()
            .map(|key| json!({ "key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300 }))
            .collect();
        let tolerations = |own: Value| [own.as_array().unwrap().clone(), added.clone()].concat();
        let field_ref = |version: &str| json!([{ "name": "A", "valueFrom": { "fieldRef": { "apiVersion": version, "fieldPath": "metadata.uid" } } }]);
        let of_env =
            json!({ "k:{\"name\":\"A\"}": { ".": {}, "f:name": {}, "f:valueFrom": { ".": {}, "f:fieldRef": {} } } });
        let leaf = json!({});
        for (field, wanted, current, owned, changed) in [
            ("nodeSelector", json!({ "a": "1" }), json!({ "a": "1", "b": "2" }), &leaf, ".b"),
            ("nodeSelector", json!({}), json!({ "b": "2" }), &leaf, ".b"),
            ("nodeSelector", json!({ "a": "1" }), json!({ "a": "1" }), &leaf, ""),
            (
                "affinity",
                affinity(json!([term(json!(["a"]))])),
                affinity(json!([term(json!(["a"])), term(json!(["b"]))])),
                &of_affinity,
                ".nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
            ),
            (
                "affinity",
                affinity(json!([{ "matchFields": [] }])),
                affinity(json!([term(json!(["a"]))])),
                &of_affinity,
                ".nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms",
            ),
            (
                "affinity",
                affinity(json!([term(json!(["a"]))])),
                affinity(json!([term(json!(["a"]))])),
                &of_affinity,
                "",
            ),
            ("tolerations", json!([{ "key": "k" }]), json!(tolerations(json!([{ "key": "k" }]))), &leaf, ""),
            (
                "tolerations",
                json!([{ "key": "k" }]),
                json!(tolerations(json!([{ "key": "k" }, { "key": "l" }]))),
                &leaf,
                "*",
            ),
            // A toleration without an effect tolerates every one.
            (
                "tolerations",
                json!([{ "key": "k" }]),
                json!(tolerations(json!([{ "key": "k", "effect": "NoSchedule" }]))),
                &leaf,
                "*",
            ),
            // The templates set one of the API server's.
            ("tolerations", json!([added[0]]), json!(added), &leaf, ""),
            (
                "env",
                json!([{ "name": "A", "valueFrom": { "fieldRef": { "fieldPath": "metadata.uid" } } }]),
                field_ref("v1"),
                &of_env,
                "",
            ),
            (
                "env",
                json!([{ "name": "A", "valueFrom": { "fieldRef": { "fieldPath": "metadata.uid" } } }]),
                field_ref("v2"),
                &of_env,
                "[A].valueFrom.fieldRef.apiVersion",
            ),
            // A LimitRange has filled what was applied empty.
            ("resources", json!({}), json!({ "requests": { "cpu": "1" } }), &leaf, ""),
            ("securityContext", json!({}), json!({ "fsGroup": 1 }), &leaf, ""),
        ] {
            let found =
                compare(&json!({ field: wanted }), &json!({ field: current }), &json!({ format!("f:{field}"): owned }));
            let paths: Vec<String> = found.into_iter().map(|(path, ..)| path).collect();
            let expected = match changed {
                "" => vec![],
                "*" => vec![format!("spec.{field}")],
                below => vec![format!("spec.{field}{below}")],
            };
            assert_eq!(paths, expected, "{wanted} {current}");
        }
    }

    #[test]
    fn no_path_is_twice_whatever_the_templates_render() {
        let wanted = json!({
            "ports": [{ "containerPort": 53 }, { "containerPort": 53, "protocol": "UDP" }],
            "volumeMounts": [{ "name": "v", "mountPath": "/b" }, { "name": "v", "mountPath": "/c" }],
            "env": [{ "name": "A", "value": "1" }, { "name": "A", "value": "2" }],
        });
        let current = json!({
            "ports": [{ "containerPort": 53, "protocol": "UDP" }],
            "volumeMounts": [{ "name": "v", "mountPath": "/a" }],
            "env": [{ "name": "B" }],
        });
        let item = |key: &str| json!({ key: { ".": {}, "f:x": {} } });
        let owned = json!({
            "f:ports": item("k:{\"containerPort\":53,\"protocol\":\"UDP\"}"),
            "f:volumeMounts": item("k:{\"mountPath\":\"/a\"}"),
            "f:env": item("k:{\"name\":\"B\"}"),
        });
        let found = compare(&wanted, &current, &owned);
        let changes = found.into_iter().map(|(path, ..)| PendingChange {
            path,
            subject: None,
            current: None,
            wanted: None,
            reason: String::new(),
        });
        let mut list = Vec::new();
        crate::api::pending::add(&mut list, changes);
        let mut paths: Vec<&str> = list.iter().map(|change| change.path.trim_start_matches("spec.")).collect();
        paths.sort_unstable();
        let expected = [
            "env[A]",
            "env[A]#2",
            "env[B]",
            "ports[53/TCP]",
            "volumeMounts[/a]",
            "volumeMounts[/b]",
            "volumeMounts[/c]",
        ];
        assert_eq!(paths, expected);
    }

    #[test]
    fn added_changed_and_removed_fields_are_changes() {
        let wanted = json!({
            "containers": [{ "name": "a", "image": "new" }, { "name": "b" }],
            "nodeSelector": { "disk": "fast" },
            "tolerations": [{ "key": "k" }],
        });
        let current = json!({
            "containers": [{ "name": "a", "image": "old", "args": ["x"] }, { "name": "c" }],
            "nodeName": "node-1",
            "tolerations": [{ "key": "k" }, { "key": "l" }],
        });
        let owned = json!({
            "f:containers": {
                "k:{\"name\":\"a\"}": { ".": {}, "f:name": {}, "f:image": {}, "f:args": {} },
                "k:{\"name\":\"c\"}": { ".": {}, "f:name": {} },
            },
            "f:nodeName": {},
            "f:tolerations": {},
        });
        assert_eq!(
            compare(&wanted, &current, &owned),
            [
                ("spec.containers[a].image".into(), json!("old"), json!("new")),
                ("spec.containers[a].args".into(), json!(["x"]), Value::Null),
                ("spec.containers[b]".into(), Value::Null, json!({ "name": "b" })),
                ("spec.containers[c]".into(), json!({ "name": "c" }), Value::Null),
                ("spec.nodeSelector".into(), Value::Null, json!({ "disk": "fast" })),
                ("spec.tolerations".into(), json!([{ "key": "k" }, { "key": "l" }]), json!([{ "key": "k" }])),
                ("spec.nodeName".into(), json!("node-1"), Value::Null),
            ]
        );
    }

    #[test]
    fn a_difference_knows_the_volume_that_it_belongs_to() {
        let container =
            |devices: Value| json!({ "containers": [{ "name": "a", "image": "i", "volumeDevices": devices }] });
        let mut current = container(json!([{ "name": "x-disk", "devicePath": "/dev/x" }]));
        current["volumes"] = json!([{ "name": "x-disk", "emptyDir": { "medium": "Memory" } }]);
        let device =
            json!([{ "name": "y-disk", "devicePath": "/dev/y" }, { "name": "z-disk", "devicePath": "/dev/x" }]);
        let mut wanted = container(device);
        wanted["containers"][0]["image"] = json!("j");
        wanted["volumes"] = json!([{ "name": "x-disk", "emptyDir": {} }, { "name": "y-disk" }]);
        let leaf = json!({ ".": {}, "f:name": {} });
        let owned = json!({
            "f:containers": { "k:{\"name\":\"a\"}": { "f:image": {}, "f:volumeDevices": { "k:{\"devicePath\":\"/dev/x\"}": leaf } } },
            "f:volumes": { "k:{\"name\":\"x-disk\"}": { "f:emptyDir": { "f:medium": {} } } },
        });
        let found = compared(&["spec"], Field { wanted: Some(&wanted), current: Some(&current), owned: Some(&owned) });
        let found: Vec<_> =
            found.iter().map(|it| (Path(&it.place).to_string(), it.volume.as_deref().unwrap_or(""))).collect();
        let expected = [
            ("spec.containers[a].image", ""),
            ("spec.containers[a].volumeDevices[/dev/x].name", "z-disk"),
            ("spec.containers[a].volumeDevices[/dev/y]", "y-disk"),
            ("spec.volumes[x-disk].emptyDir.medium", "x-disk"),
            ("spec.volumes[y-disk]", "y-disk"),
        ];
        let mut found: Vec<(&str, &str)> = found.iter().map(|(path, volume)| (path.as_str(), *volume)).collect();
        found.sort_unstable();
        assert_eq!(found, expected);
    }
}
