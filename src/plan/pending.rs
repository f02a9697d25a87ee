//! The changes of an object that wait for the VM's next start (`status.pendingChanges`).
//!
//! The API server adds defaults and other controllers add fields, so only fields that the manager owns are compared. Quantities are
//! compared as numbers, because the API server may write them differently (`1024Mi` as `1Gi`).

use serde_json::{Map, Value};

use crate::{
    api::{PendingChange, Quantity},
    object::{CONTAINER_NAME, Rendered},
    observed::{Json, Object},
};

/// The prefix of the paths of the manager's changes. The runner lists its own changes, of settings that are not in the Pod.
pub const PREFIX: &str = "objects/";

/// The fields of an existing object that will be different after the next start.
pub fn changes(rendered: &Rendered, found: &Object) -> Vec<PendingChange> {
    let mut changes = Changes { kind: &rendered.key.kind, found: Vec::new() };
    if rendered.key.is_pod() {
        let owned = found.owned.as_ref().map(Json::value);
        let owned = owned.as_ref().map(|fields| &fields["f:spec"]).filter(|fields| fields.is_object());
        let wanted = rendered.value.get("spec");
        changes.compare("spec", Field { wanted, current: Some(&found.spec), owned });
    } else {
        // The manager does not know the content of other kinds.
        changes.add(&rendered.key.name, None, None);
    }
    changes.found
}

/// The object that is created when `pod`, which other templates created, is gone.
pub fn created_after_pod(rendered: &Rendered, pod: &Object) -> PendingChange {
    PendingChange {
        path: format!("{PREFIX}{}/{}", rendered.key.kind, rendered.key.name),
        current: None,
        wanted: None,
        reason: format!("the VM runs in the {}, which other templates created", pod.key),
    }
}

/// Whether a change is another amount of CPUs or memory that the runner's container requests.
pub fn is_runner_request(change: &PendingChange) -> bool {
    let requests = format!("{PREFIX}Pod/spec.containers[{CONTAINER_NAME}].resources.requests.");
    let resource = change.path.strip_prefix(&requests);
    matches!(resource, Some("cpu" | "memory")) && change.current.is_some() && change.wanted.is_some()
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

struct Changes<'a> {
    kind: &'a str,
    found: Vec<PendingChange>,
}

impl Changes<'_> {
    fn add(&mut self, path: &str, current: Option<&Value>, wanted: Option<&Value>) {
        self.found.push(PendingChange {
            path: format!("{PREFIX}{}/{path}", self.kind),
            current: current.cloned(),
            wanted: wanted.cloned(),
            reason: format!("the manager does not change a {} that exists", self.kind),
        });
    }

    fn compare(&mut self, path: &str, field: Field<'_>) {
        let Field { wanted, current, owned } = field;
        match (wanted, current) {
            (None, None) => {}
            (Some(Value::Object(wanted)), Some(Value::Object(current))) => {
                self.compare_fields(path, wanted, current, owned);
            }
            (Some(Value::Array(wanted)), Some(Value::Array(current)))
                if fields(owned).any(|(field, _)| field.starts_with("k:")) =>
            {
                self.compare_items(path, wanted, current, owned);
            }
            (Some(Value::Array(wanted)), Some(Value::Array(current)))
                if wanted.len() == current.len() && wanted.iter().zip(current).all(|(a, b)| contains(b, a)) => {}
            (Some(wanted), Some(current)) if is_same(wanted, current) => {}
            // An empty map or list means the same as an absent one.
            (Some(wanted), None) if is_empty(wanted) => {}
            (wanted, current) => self.add(path, current, wanted),
        }
    }

    fn compare_fields(
        &mut self,
        path: &str,
        wanted: &Map<String, Value>,
        current: &Map<String, Value>,
        owned: Option<&Value>,
    ) {
        for (name, value) in wanted {
            let owned = owned.and_then(|owned| owned.get(format!("f:{name}")));
            self.compare(&format!("{path}.{name}"), Field { wanted: Some(value), current: current.get(name), owned });
        }
        for name in fields(owned).filter_map(|(field, _)| field.strip_prefix("f:")) {
            if !wanted.contains_key(name)
                && let Some(value) = current.get(name)
            {
                self.add(&format!("{path}.{name}"), Some(value), None);
            }
        }
    }

    /// Compares a list whose items have keys (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
    fn compare_items(&mut self, path: &str, wanted: &[Value], current: &[Value], owned: Option<&Value>) {
        let keys: Vec<ItemKey<'_>> = fields(owned).filter_map(ItemKey::parse).collect();
        let mut is_wanted = vec![false; current.len()];
        for item in wanted {
            let place = format!("{path}[{}]", label(item));
            match current.iter().position(|other| has_same_key(&keys, item, other)) {
                Some(index) => {
                    is_wanted.get_mut(index).into_iter().for_each(|is_wanted| *is_wanted = true);
                    let other = current.get(index);
                    let key = keys.iter().find(|key| other.is_some_and(|other| key.is_of(other)));
                    let owned = key.map(|key| key.owned);
                    self.compare(&place, Field { wanted: Some(item), current: other, owned });
                }
                None => self.add(&place, None, Some(item)),
            }
        }
        for (item, is_wanted) in current.iter().zip(is_wanted) {
            if !is_wanted && keys.iter().any(|key| key.is_of(item)) {
                self.add(&format!("{path}[{}]", label(item)), Some(item), None);
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
}

/// Whether two items have the same key. The first of the list's `keys` says which fields are the key. The API server may have added a
/// default to `current`, so a key field that is missing in `wanted` is not compared.
fn has_same_key(keys: &[ItemKey<'_>], wanted: &Value, current: &Value) -> bool {
    let mut names = keys.first().into_iter().flat_map(|key| key.fields.keys());
    names.all(|name| wanted.get(name).is_none() || wanted.get(name) == current.get(name))
}

fn fields(owned: Option<&Value>) -> impl Iterator<Item = (&String, &Value)> {
    owned.and_then(Value::as_object).into_iter().flatten()
}

/// The name of a list item in a path.
fn label(item: &Value) -> String {
    let name = ["name", "mountPath", "devicePath", "containerPort", "key"].into_iter().find_map(|name| item.get(name));
    match name {
        Some(Value::String(name)) => name.clone(),
        Some(other) => other.to_string(),
        None => item.to_string(),
    }
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

/// Whether everything in `part` is in `whole`. `whole` may have more, such as defaults of the API server.
fn contains(whole: &Value, part: &Value) -> bool {
    match (whole, part) {
        (Value::Object(whole), Value::Object(part)) => part
            .iter()
            .all(|(name, part)| whole.get(name).map_or_else(|| is_empty(part), |whole| contains(whole, part))),
        (Value::Array(whole), Value::Array(part)) => {
            whole.len() == part.len() && whole.iter().zip(part).all(|(whole, part)| contains(whole, part))
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
        let mut changes = Changes { kind: "Pod", found: Vec::new() };
        changes.compare("spec", Field { wanted: Some(wanted), current: Some(current), owned: Some(owned) });
        let found = changes.found.into_iter();
        found.map(|change| (change.path, change.current.into(), change.wanted.into())).collect()
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
                ("objects/Pod/spec.containers[a].image".into(), json!("old"), json!("new")),
                ("objects/Pod/spec.containers[a].args".into(), json!(["x"]), Value::Null),
                ("objects/Pod/spec.containers[b]".into(), Value::Null, json!({ "name": "b" })),
                ("objects/Pod/spec.containers[c]".into(), json!({ "name": "c" }), Value::Null),
                ("objects/Pod/spec.nodeSelector".into(), Value::Null, json!({ "disk": "fast" })),
                (
                    "objects/Pod/spec.tolerations".into(),
                    json!([{ "key": "k" }, { "key": "l" }]),
                    json!([{ "key": "k" }])
                ),
                ("objects/Pod/spec.nodeName".into(), json!("node-1"), Value::Null),
            ]
        );
    }
}
