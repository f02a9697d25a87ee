//! What the API server checks of the objects of a kind that a CRD defines: the schema, keys of lists that are given twice, and the rules in CEL
//! (<https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/>).
//!
//! | a write | of unknown fields, and of values with a wrong type | of what the schema and the rules refuse |
//! |---|---|---|
//! | an apply | refused: it can't be read (500) | refused: 422, with the fields |
//! | any other | unknown fields are left out; a wrong type is refused as on the right | as above |
//!
//! What an update leaves as it was is not refused, although a new object with it would be ("ratcheting").

use std::{
    collections::BTreeMap,
    sync::{Mutex, OnceLock},
};

use kube_cel::{CompiledSchema, Validator, compile_schema};
use regex::Regex;
use serde_json::{Value, json};

use super::{
    kinds::{Kind, Shape, kinds},
    request::{Answer, Target},
};

/// What is wrong with an object, as a cause of an answer says it.
#[derive(Debug, PartialEq)]
struct Problem {
    field: String,
    reason: &'static str,
    message: String,
}

impl Problem {
    fn new(field: &str, reason: &'static str, message: impl Into<String>) -> Self {
        Self { field: field.to_owned(), reason, message: message.into() }
    }

    /// Whether the rules are not evaluated beside it.
    fn hides_rules(&self) -> bool {
        ["FieldValueRequired", "FieldValueTooLong", "FieldValueTooMany", "FieldValueTypeInvalid"].contains(&self.reason)
    }
}

/// Refuses an object that the definition of its kind does not allow. `live`: the object as it is stored.
pub fn check(target: &Target, live: Option<&Value>, new: &Value) -> Result<(), Answer> {
    let kind = &kinds()[target.kind];
    let Some(schema) = kind.schema() else { return Ok(()) };
    let mut problems = Vec::new();
    walk(schema, new, live, "", &mut problems);
    let mut repeated = Vec::new();
    repeated_items(kind, new, "", "", &mut repeated);
    let had_repeated = live.is_some_and(|live| {
        let mut had = Vec::new();
        repeated_items(kind, live, "", "", &mut had);
        !had.is_empty()
    });
    if !had_repeated {
        problems.extend(repeated.iter().map(|item| Problem::new(&item.field, "FieldValueDuplicate", &*item.key)));
    }
    if problems.iter().any(Problem::hides_rules) {
        let message = "some validation rules were not checked because the object was invalid; correct the existing errors to complete validation";
        problems.push(Problem::new("<nil>", "FieldValueInvalid", message));
    } else {
        problems.extend(broken_rules(kind, live, new));
    }
    if problems.is_empty() { Ok(()) } else { Err(invalid(target, &problems)) }
}

fn invalid(target: &Target, problems: &[Problem]) -> Answer {
    let kind = &kinds()[target.kind];
    let texts: Vec<String> = problems.iter().map(|it| format!("{}: {}", it.field, it.message)).collect();
    let text = if texts.len() == 1 { texts.concat() } else { format!("[{}]", texts.join(", ")) };
    let message = format!("{}.{} \"{}\" is invalid: {text}", kind.name, kind.group, target.name);
    let causes = problems.iter().map(|it| json!({ "reason": it.reason, "message": it.message, "field": it.field }));
    let causes: Vec<Value> = causes.collect();
    let details = json!({ "name": target.name, "group": kind.group, "kind": kind.name, "causes": causes });
    Answer::failure(422, "Invalid", &message, details)
}

/// Leaves out fields that the schema does not have, and nulls that it does not allow.
pub fn prune(kind: &Kind, object: &mut Value) {
    let Some(schema) = kind.schema() else { return };
    for part in ["spec", "status"] {
        if let Some(value) = object.get_mut(part) {
            prune_value(&schema["properties"][part], value);
        }
    }
    if let Some(object) = object.as_object_mut() {
        let is_known =
            |name: &str| ["apiVersion", "kind", "metadata"].contains(&name) || !schema["properties"][name].is_null();
        object.retain(|name, value| is_known(name) && !(value.is_null() && name != "metadata"));
    }
}

fn prune_value(schema: &Value, value: &mut Value) {
    let is_open = schema["x-kubernetes-preserve-unknown-fields"] == true;
    match value {
        Value::Object(map) => {
            let others = &schema["additionalProperties"];
            map.retain(|name, value| {
                let schema = match &schema["properties"][name] {
                    Value::Null => others,
                    known => known,
                };
                if schema.is_null() {
                    return is_open;
                }
                // One with a default gets that.
                if value.is_null() && schema["nullable"] != true && schema["default"].is_null() {
                    return false;
                }
                prune_value(schema, value);
                true
            });
        }
        Value::Array(items) => items.iter_mut().for_each(|item| prune_value(&schema["items"], item)),
        _ => {}
    }
}

/// Refuses an applied object that can't be read as one of its kind.
pub fn read(target: &Target, config: &Value) -> Result<(), Answer> {
    let kind = &kinds()[target.kind];
    let mut problems = Vec::new();
    if let Some(schema) = kind.schema() {
        for part in ["spec", "status"] {
            if let Some(value) = config.get(part) {
                misread(&schema["properties"][part], value, &format!(".{part}"), &mut problems);
            }
        }
    }
    let mut repeated = Vec::new();
    repeated_items(kind, config, "", "", &mut repeated);
    problems.extend(repeated.iter().map(|item| format!("{}: duplicate entries for key {}", item.list, item.key)));
    if problems.is_empty() {
        return Ok(());
    }
    let (place, version) = (format!("{}/{}", target.namespace, target.name), kind.api_version());
    let message = format!(
        "failed to create typed patch object ({place}; {version}, Kind={}): {}",
        kind.name,
        problems.join("\n  ")
    );
    Err(Answer::failure(500, "", &message, json!({})))
}

fn misread(schema: &Value, value: &Value, path: &str, problems: &mut Vec<String>) {
    if schema["x-kubernetes-preserve-unknown-fields"] == true && schema["properties"].is_null() {
        return;
    }
    let wanted = match (schema["type"].as_str(), value) {
        (_, Value::Null) | (None, _) => return,
        (Some("object"), Value::Object(map)) => {
            let others = &schema["additionalProperties"];
            for (name, value) in map {
                match (&schema["properties"][name], others) {
                    (Value::Null, Value::Null) => problems.push(format!("{path}.{name}: field not declared in schema")),
                    (Value::Null, known) | (known, _) => misread(known, value, &format!("{path}.{name}"), problems),
                }
            }
            return;
        }
        (Some("array"), Value::Array(items)) => {
            let items = items.iter().enumerate();
            return items.for_each(|(at, item)| misread(&schema["items"], item, &format!("{path}[{at}]"), problems));
        }
        (Some("string"), Value::String(_))
        | (Some("boolean"), Value::Bool(_))
        | (Some("integer" | "number"), Value::Number(_)) => return,
        (Some("object"), _) => "map",
        (Some("array"), _) => "list",
        (Some("integer" | "number"), _) => "numeric (int or float)",
        (Some(scalar), _) => scalar,
    };
    problems.push(format!("{path}: expected {wanted}, got &{value}"));
}

/// An item of a list that has the key of an earlier one.
struct Repeated {
    /// The list, and the item, as the API server writes them.
    list: String,
    field: String,
    key: String,
}

fn repeated_items(kind: &Kind, value: &Value, shape_path: &str, path: &str, found: &mut Vec<Repeated>) {
    let join = |to: &str, name: &str| if to.is_empty() { name.to_owned() } else { format!("{to}.{name}") };
    match value {
        Value::Object(map) if kind.shapes.get(shape_path) != Some(&Shape::Atomic) => {
            for (name, value) in map.iter().filter(|(name, _)| path != "metadata" || *name != "managedFields") {
                repeated_items(kind, value, &join(shape_path, name), &join(path, name), found);
            }
        }
        Value::Array(items) => {
            let key = |item: &Value| match kind.shapes.get(shape_path) {
                Some(Shape::Map(keys)) => {
                    let keys = keys.iter().map(|key| {
                        let value =
                            if item[key].is_null() && key == "protocol" { json!("TCP") } else { item[key].clone() };
                        format!("{key}={value}")
                    });
                    Some(format!("[{}]", keys.collect::<Vec<_>>().join(",")))
                }
                Some(Shape::Set) => Some(item.to_string()),
                Some(Shape::Atomic) | None => None,
            };
            for (at, item) in items.iter().enumerate() {
                let own = key(item);
                if let Some(own) = own.filter(|own| items[..at].iter().any(|other| key(other).as_ref() == Some(own))) {
                    found.push(Repeated { list: format!(".{path}"), field: format!("{path}[{at}]"), key: own });
                }
                repeated_items(kind, item, &format!("{shape_path}[]"), &format!("{path}[{at}]"), found);
            }
        }
        _ => {}
    }
}

/// What a schema refuses of a value, but for what was so before.
fn walk(schema: &Value, value: &Value, old: Option<&Value>, path: &str, problems: &mut Vec<Problem>) {
    if old == Some(value) || value.is_null() && schema["nullable"] == true {
        return;
    }
    let mut add = |reason: &'static str, message: String| problems.push(Problem::new(path, reason, message));
    if !has_type(schema, value) {
        return add("FieldValueTypeInvalid", format!("must be of type {}", schema["type"]));
    }
    if let Some(all) = schema["enum"].as_array()
        && !all.contains(value)
    {
        add("FieldValueNotSupported", format!("supported values: {}", schema["enum"]));
    }
    if schema["not"].is_object() && matches_not(&schema["not"], value) {
        add("FieldValueInvalid", "must not validate the schema (not)".into());
    }
    let is_more = |field: &str, count: usize| schema[field].as_u64().is_some_and(|most| count as u64 > most);
    let is_less = |field: &str, count: usize| schema[field].as_u64().is_some_and(|least| (count as u64) < least);
    match value {
        Value::String(text) => {
            let length = text.chars().count();
            if is_more("maxLength", length) {
                add("FieldValueTooLong", format!("may not be more than {} bytes", schema["maxLength"]));
            }
            if is_less("minLength", length) {
                add("FieldValueInvalid", format!("should be at least {} chars long", schema["minLength"]));
            }
            if schema["pattern"].as_str().is_some_and(|pattern| !matches_pattern(pattern, text)) {
                add("FieldValueInvalid", format!("should match {}", schema["pattern"]));
            }
            if schema["format"] == "date-time" && text.parse::<k8s_openapi::jiff::Timestamp>().is_err() {
                add("FieldValueInvalid", "must be of type date-time".into());
            }
        }
        Value::Number(number) => {
            let number = number.as_f64().unwrap_or_default();
            if schema["minimum"].as_f64().is_some_and(|least| number < least) {
                add("FieldValueInvalid", format!("should be greater than or equal to {}", schema["minimum"]));
            }
            if schema["maximum"].as_f64().is_some_and(|most| number > most) {
                add("FieldValueInvalid", format!("should be less than or equal to {}", schema["maximum"]));
            }
        }
        Value::Array(items) => {
            if is_more("maxItems", items.len()) {
                add("FieldValueTooMany", format!("must have at most {} items", schema["maxItems"]));
            }
            if is_less("minItems", items.len()) {
                add("FieldValueInvalid", format!("should have at least {} items", schema["minItems"]));
            }
            let before = old.and_then(Value::as_array);
            for (at, item) in items.iter().enumerate() {
                // An item of a list that is a map stays the same where it has the same key.
                let same = before.and_then(|before| before.iter().find(|other| *other == item));
                walk(&schema["items"], item, same, &format!("{path}[{at}]"), problems);
            }
        }
        Value::Object(map) => {
            if is_more("maxProperties", map.len()) {
                add("FieldValueTooMany", format!("must have at most {} items", schema["maxProperties"]));
            }
            let join = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
            for name in schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !map.contains_key(name) {
                    problems.push(Problem::new(&join(name), "FieldValueRequired", "Required value"));
                }
            }
            for (name, value) in map.iter().filter(|(name, _)| !(path.is_empty() && *name == "metadata")) {
                let schema = match &schema["properties"][name] {
                    Value::Null => &schema["additionalProperties"],
                    known => known,
                };
                if schema.is_object() {
                    walk(schema, value, old.and_then(|old| old.get(name)), &join(name), problems);
                }
            }
        }
        Value::Null | Value::Bool(_) => {}
    }
    for schema in schema["allOf"].as_array().into_iter().flatten() {
        walk(schema, value, old, path, problems);
    }
}

fn has_type(schema: &Value, value: &Value) -> bool {
    if schema["x-kubernetes-int-or-string"] == true {
        return value.is_string() || value.is_i64() || value.is_u64();
    }
    match schema["type"].as_str() {
        None => true,
        Some("object") => value.is_object(),
        Some("array") => value.is_array(),
        Some("string") => value.is_string(),
        Some("boolean") => value.is_boolean(),
        Some("integer") => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        Some("number") => value.is_number(),
        Some(other) => panic!("the simulation does not know the type {other}"),
    }
}

/// Whether a value is as the schema of a `not` says.
fn matches_not(schema: &Value, value: &Value) -> bool {
    let required = schema["required"].as_array();
    let has_all =
        required.is_none_or(|names| names.iter().all(|name| value.get(name.as_str().unwrap_or_default()).is_some()));
    let is_one = schema["enum"].as_array().is_none_or(|all| all.contains(value));
    has_all && is_one
}

fn matches_pattern(pattern: &str, text: &str) -> bool {
    static KNOWN: OnceLock<Mutex<BTreeMap<String, Regex>>> = OnceLock::new();
    let known = KNOWN.get_or_init(Mutex::default);
    let regex = known.lock().unwrap().entry(pattern.to_owned()).or_insert_with(|| Regex::new(pattern).unwrap()).clone();
    regex.is_match(text)
}

/// The rules that an object breaks, but for those about what was so before.
fn broken_rules(kind: &Kind, live: Option<&Value>, new: &Value) -> Vec<Problem> {
    thread_local! {
        static VALIDATOR: Validator = Validator::new();
    }
    static RULES: OnceLock<BTreeMap<&'static str, CompiledSchema>> = OnceLock::new();
    let rules = RULES.get_or_init(|| {
        let defined = kinds().iter().filter_map(|kind| Some((kind.name, compile_schema(kind.schema()?))));
        defined.inspect(|(name, rules)| assert!(!rules.has_errors(), "the rules of {name}")).collect()
    });
    // No rule reads anything else.
    let read = |object: &Value| {
        let mut read = json!({ "metadata": { "name": object["metadata"]["name"] } });
        for part in ["spec", "status"] {
            if let Some(value) = object.get(part) {
                read[part] = value.clone();
            }
        }
        read
    };
    let (new, live) = (read(new), live.map(read));
    if live.as_ref() == Some(&new) {
        return Vec::new();
    }
    let broken = VALIDATOR.with(|validator| validator.validate_compiled(&rules[kind.name], &new, live.as_ref()));
    let broken = broken.err().into_iter().flat_map(|errors| errors.into_vec());
    let is_new = |field: &str| {
        let pointer = format!("/{}", field.replace(['.', '['], "/").replace(']', ""));
        let at = |object: &Value| object.pointer(&pointer).cloned();
        field.is_empty() || live.as_ref().is_none_or(|live| at(live) != at(&new))
    };
    let problems = broken.filter_map(|error| {
        let field = error.field_path.trim_start_matches('.');
        is_new(field).then(|| Problem::new(field, "FieldValueInvalid", error.message))
    });
    problems.collect()
}

#[cfg(test)]
mod tests {
    use super::super::kinds::kind;
    use super::*;

    fn vm(spec: &Value, status: Value) -> Value {
        json!({ "metadata": { "name": "a" }, "spec": { "vm": spec }, "status": status })
    }

    fn target() -> Target {
        Target::new(kind("VirtualMachine"), "vms", "a")
    }

    /// The fields of an object that are refused.
    #[track_caller]
    fn refused(live: Option<&Value>, new: &Value) -> Vec<String> {
        let Err(answer) = check(&target(), live, new) else { return Vec::new() };
        assert_eq!((answer.code, &answer.body["reason"]), (422, &json!("Invalid")));
        let causes = answer.body["details"]["causes"].as_array().unwrap();
        causes.iter().map(|cause| cause["field"].as_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn values_that_the_definition_does_not_allow_are_refused_with_their_fields() {
        let spec = |spec: Value| refused(None, &vm(&spec, json!({})));
        let none: [&str; 0] = [];
        assert_eq!(spec(json!({ "maximumCpus": 2 })), none);
        assert_eq!(spec(json!({ "maximumCpus": 5000 })), ["spec.vm.maximumCpus"]);
        assert_eq!(spec(json!({ "maximumCpus": "2" })), ["spec.vm.maximumCpus", "<nil>"]);
        assert_eq!(spec(json!({ "maximumCpus": 2, "state": "On" })), ["spec.vm.state"]);
        assert_eq!(spec(json!({ "maximumCpus": 2, "networks": [{}] })), ["spec.vm.networks[0]"]);
        let condition = |name: &str| json!({ "type": name, "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2027-01-15T08:00:00Z" });
        let twice = json!({ "conditions": [condition("A"), condition("A")] });
        let of_status = |status: Value| refused(None, &vm(&json!({ "maximumCpus": 2 }), status));
        assert_eq!(of_status(twice), ["status.conditions[1]"]);
        assert_eq!(of_status(json!({ "conditions": [condition("A"), condition("B")] })), none);
    }

    #[test]
    fn what_an_update_leaves_as_it_was_is_not_refused() {
        let old = vm(&json!({ "maximumCpus": 5000 }), json!({ "observedGeneration": 1 }));
        let new = vm(&json!({ "maximumCpus": 5000 }), json!({ "observedGeneration": 2 }));
        assert_eq!(refused(Some(&old), &new), Vec::<String>::new());
        let new = vm(&json!({ "maximumCpus": 5001 }), json!({ "observedGeneration": 1 }));
        assert_eq!(refused(Some(&old), &new), ["spec.vm.maximumCpus"]);
    }

    #[test]
    fn an_applied_object_that_can_not_be_read_is_refused_and_another_write_loses_what_is_unknown() {
        let read = |object: Value| read(&target(), &object).map_err(|answer| answer.body["message"].to_string());
        assert_eq!(read(vm(&json!({ "maximumCpus": 2 }), json!({}))), Ok(()));
        assert!(
            read(vm(&json!({ "colour": 1 }), json!({}))).unwrap_err().contains(".spec.vm.colour: field not declared")
        );
        assert!(read(vm(&json!({ "state": 1 }), json!({}))).unwrap_err().contains(".spec.vm.state: expected string"));
        let change = json!({ "path": "p", "reason": "r" });
        let twice = json!({ "pendingChanges": [change, change] });
        assert!(read(vm(&json!({}), twice)).unwrap_err().contains(".status.pendingChanges: duplicate entries for key"));
        let mut pruned =
            vm(&json!({ "colour": 1, "maximumCpus": 2, "state": null, "rtcBase": null }), json!({ "x": 1 }));
        prune(&kinds()[target().kind], &mut pruned);
        assert_eq!(pruned, vm(&json!({ "maximumCpus": 2, "rtcBase": null }), json!({})), "rtcBase has a default");
    }
}
