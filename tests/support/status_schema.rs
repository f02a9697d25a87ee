//! Whether the API server accepts a status: by the definition's schema, the keys of its lists, and the characters that an apply may have.

use serde_json::Value;

/// The definition of the status.
pub struct StatusSchema {
    schema: Value,
    validator: jsonschema::Validator,
}

impl StatusSchema {
    /// From the definitions of all resources.
    pub fn new(definitions: Vec<(String, Value)>) -> Self {
        let of_vm = definitions.into_iter().find(|(_, definition)| definition["spec"]["names"]["plural"] == "vms");
        let schema =
            of_vm.unwrap().1["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"].clone();
        let mut plain = schema.clone();
        nullable(&mut plain);
        Self { validator: jsonschema::validator_for(&plain).unwrap(), schema }
    }

    /// What the API server would refuse.
    pub fn problems(&self, status: &Value) -> Vec<String> {
        let mut problems: Vec<String> =
            self.validator.iter_errors(status).map(|error| format!("{}: {error}", error.instance_path())).collect();
        keys(&self.schema, status, "status", &mut problems);
        characters(status, "status", &mut problems);
        problems
    }
}

/// A field that may be null in a definition.
fn nullable(schema: &mut Value) {
    if let Value::Object(map) = schema {
        if map.get("nullable") == Some(&Value::Bool(true))
            && let Some(type_) = map.get("type").cloned()
        {
            map.insert("type".into(), serde_json::json!([type_, "null"]));
        }
        map.values_mut().for_each(nullable);
    } else if let Value::Array(list) = schema {
        list.iter_mut().for_each(nullable);
    }
}

/// Two items of a list with the same key.
fn keys(schema: &Value, value: &Value, path: &str, problems: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                keys(&schema["properties"][name], value, &format!("{path}.{name}"), problems);
            }
        }
        Value::Array(list) => {
            let names = schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
            let names: Vec<&str> = names.filter_map(Value::as_str).collect();
            for (at, item) in list.iter().enumerate() {
                let is_same = |other: &&Value| names.iter().all(|name| other[*name] == item[*name]);
                if !names.is_empty() && list[..at].iter().find(is_same).is_some() {
                    problems.push(format!("{path}[{at}]: duplicate entries for key"));
                }
                keys(&schema["items"], item, &format!("{path}[{at}]"), problems);
            }
        }
        _ => {}
    }
}

/// What YAML does not take as it is.
fn characters(value: &Value, path: &str, problems: &mut Vec<String>) {
    let is_refused = |text: &str| text.contains(|c: char| c.is_control() && c != '\n' && c != '\t');
    match value {
        Value::String(text) if is_refused(text) => problems.push(format!("{path}: {text:?}")),
        Value::Object(map) => {
            for (name, value) in map {
                if is_refused(name) {
                    problems.push(format!("{path}: {name:?}"));
                }
                characters(value, &format!("{path}.{name}"), problems);
            }
        }
        Value::Array(list) => list.iter().for_each(|item| characters(item, path, problems)),
        _ => {}
    }
}
