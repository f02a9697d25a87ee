//! What an object that changes at start has, and what it will have: compared where the two can differ by our doing.
//!
//! The API server adds defaults and other controllers add fields, so not everything in the object that is not rendered is a
//! change; only what we own is. Quantities are compared as numbers, because it writes them anew (`1024Mi` as `1Gi`).

use serde_json::{Map, Value};

use crate::{
    api::{PendingChange, Quantity},
    object::Rendered,
    observed::{Json, Object},
};

/// What the paths of our changes begin with. The runner has changes of its own, of what is not in the Pod.
pub const PREFIX: &str = "objects/";

/// What will be different after the next start.
pub fn changes(rendered: &Rendered, found: &Object) -> Vec<PendingChange> {
    let mut changes = Changes { kind: &rendered.key.kind, found: Vec::new() };
    if rendered.key.is_pod() {
        let owned = found.owned.as_ref().map(Json::value);
        let owned = owned.as_ref().map(|fields| &fields["f:spec"]).filter(|fields| fields.is_object());
        changes.compare("spec", rendered.value.get("spec"), Some(&found.spec), owned);
    } else {
        // Of other kinds the content is not known here.
        changes.differs(&rendered.key.name, None, None);
    }
    changes.found
}

/// What will be made instead of the Pod that the machine runs in.
pub fn instead_of(rendered: &Rendered, pod: &Object) -> PendingChange {
    PendingChange {
        path: format!("{PREFIX}{}/{}", rendered.key.kind, rendered.key.name),
        current: None,
        wanted: None,
        reason: format!("the machine runs in the {}, which other templates made", pod.key),
    }
}

struct Changes<'a> {
    kind: &'a str,
    found: Vec<PendingChange>,
}

impl Changes<'_> {
    fn differs(&mut self, path: &str, current: Option<&Value>, wanted: Option<&Value>) {
        self.found.push(PendingChange {
            path: format!("{PREFIX}{}/{path}", self.kind),
            current: current.cloned(),
            wanted: wanted.cloned(),
            reason: format!("a {} that exists is not changed here", self.kind),
        });
    }

    fn compare(&mut self, path: &str, wanted: Option<&Value>, current: Option<&Value>, owned: Option<&Value>) {
        match (wanted, current) {
            (None, None) => {}
            (Some(Value::Object(wanted)), Some(Value::Object(current))) => {
                for (name, value) in wanted {
                    let below = owned.and_then(|owned| owned.get(format!("f:{name}")));
                    self.compare(&format!("{path}.{name}"), Some(value), current.get(name), below);
                }
                for name in fields(owned).filter_map(|(field, _)| field.strip_prefix("f:")) {
                    if !wanted.contains_key(name)
                        && let Some(value) = current.get(name)
                    {
                        self.differs(&format!("{path}.{name}"), Some(value), None);
                    }
                }
            }
            (Some(Value::Array(wanted)), Some(Value::Array(current)))
                if fields(owned).any(|(field, _)| field.starts_with("k:")) =>
            {
                self.compare_items(path, wanted, current, owned);
            }
            (Some(Value::Array(wanted)), Some(Value::Array(current)))
                if wanted.len() == current.len() && wanted.iter().zip(current).all(|(a, b)| contains(b, a)) => {}
            (Some(wanted), Some(current)) if is_same(wanted, current) => {}
            // An empty map or list is the same as none.
            (Some(wanted), None) if is_empty(wanted) => {}
            (wanted, current) => self.differs(path, current, wanted),
        }
    }

    /// A list whose items have keys (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
    fn compare_items(&mut self, path: &str, wanted: &[Value], current: &[Value], owned: Option<&Value>) {
        let keys: Vec<(Map<String, Value>, &Value)> = fields(owned)
            .filter_map(|(field, below)| Some((serde_json::from_str(field.strip_prefix("k:")?).ok()?, below)))
            .collect();
        let mut found = vec![false; current.len()];
        for item in wanted {
            // The first key of the list tells which fields make an item's key.
            let names: Vec<&String> = keys.first().map(|(key, _)| key.keys().collect()).unwrap_or_default();
            let is_it = |other: &Value| {
                names.iter().all(|name| item.get(*name).is_none() || item.get(*name) == other.get(*name))
            };
            let place = format!("{path}[{}]", label(item));
            match current.iter().position(is_it) {
                Some(index) => {
                    found.get_mut(index).into_iter().for_each(|seen| *seen = true);
                    let other = current.get(index);
                    let below = keys.iter().find(|(key, _)| {
                        key.iter().all(|(name, value)| other.and_then(|other| other.get(name)) == Some(value))
                    });
                    self.compare(&place, Some(item), other, below.map(|(_, below)| *below));
                }
                None => self.differs(&place, None, Some(item)),
            }
        }
        for (item, seen) in current.iter().zip(found) {
            let is_ours = keys.iter().any(|(key, _)| key.iter().all(|(name, value)| item.get(name) == Some(value)));
            if !seen && is_ours {
                self.differs(&format!("{path}[{}]", label(item)), Some(item), None);
            }
        }
    }
}

fn fields(owned: Option<&Value>) -> impl Iterator<Item = (&String, &Value)> {
    owned.and_then(Value::as_object).into_iter().flatten()
}

/// What a person calls an item of a list.
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

/// Everything of `part` is in `whole`, which may have more: defaults of the API server.
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
    // CPUs come in thousandths.
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

    fn compare(wanted: Value, current: Value, owned: Value) -> Vec<(String, Value, Value)> {
        let mut changes = Changes { kind: "Pod", found: Vec::new() };
        changes.compare("spec", Some(&wanted), Some(&current), Some(&owned));
        let found = changes.found.into_iter();
        found.map(|change| (change.path, change.current.into(), change.wanted.into())).collect()
    }

    #[test]
    fn defaults_and_other_peoples_fields_are_no_changes() {
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
        assert_eq!(compare(wanted, current, owned), []);
    }

    #[test]
    fn what_is_new_what_is_other_and_what_goes() {
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
            compare(wanted, current, owned),
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
