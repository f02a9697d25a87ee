//! `values` in the context: settings of a template set, which the operator and the users of VMs choose.
//!
//! ```text
//!  values.yaml of the set ─▶ templateValues of the manager ─▶ spec.templateValues ─▶ values.schema.json? ─▶ `values`
//! ```
//!
//! Each layer is merged over the one before as a JSON merge patch (RFC 7386).
//!
//! Who writes a VM is not trusted. A schema says what such a person may set:
//! - with `"x-administrator": true` ([`ADMINISTRATOR`]) a value is the administrator's: a VM may not change it;
//! - with `"additionalProperties": false` at its top a VM may set nothing that no schema of the layers has. The manager's `templateValues` may
//!   have more, because they are for all sets.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::error::TemplateError;

/// The file with the default values of a set.
pub const FILE: &str = "values.yaml";
/// The file with the JSON schema of the values.
pub const SCHEMA: &str = "values.schema.json";
/// The keyword of a schema for a value that a VM may not change.
pub const ADMINISTRATOR: &str = "x-administrator";
/// The values of the built-in templates. Where the administrator has set one, a VM can't change it.
pub const OF_BUILTIN: [&str; 3] = ["runAsUser", "hostUsers", "deviceOwnership"];

/// Merges values over others that will be merged over a third layer. Unlike a merge patch this keeps null, which removes a key of that
/// layer.
pub fn lay_over(values: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        match (values.get_mut(&key), value) {
            (Some(Value::Object(values)), Value::Object(over)) => lay_over(values, over),
            (_, value) => drop(values.insert(key, value)),
        }
    }
}

/// The defaults and schemas of the values of a template set.
#[derive(Debug, Default)]
pub struct Values {
    defaults: Map<String, Value>,
    /// The keys of the defaults, with the folder of their layer.
    keys: Vec<(String, String)>,
    schemas: Vec<Schema>,
}

#[derive(Debug)]
struct Schema {
    file: String,
    /// The paths of the values that only the administrator sets, as names of keys.
    administrators: Vec<Vec<String>>,
    /// The keys at its top.
    keys: BTreeSet<String>,
    /// Whether a VM may set no others.
    is_closed: bool,
    #[cfg(feature = "schema")]
    validator: jsonschema::Validator,
}

impl Values {
    /// Merges a file of defaults over those of the layers below.
    ///
    /// # Errors
    /// If it is not a YAML map.
    pub fn add_defaults(&mut self, file: &str, text: &str) -> Result<(), TemplateError> {
        let map: Option<Map<String, Value>> =
            crate::yaml::unique_from_str(text).map_err(|error| TemplateError::yaml(file, "", &error))?;
        let map = map.unwrap_or_default();
        self.keys.extend(map.keys().map(|key| (folder_of(file).to_owned(), key.clone())));
        merge(&mut self.defaults, &map);
        Ok(())
    }

    /// Adds a schema that the values must match.
    ///
    /// # Errors
    /// If it is not a JSON schema.
    pub fn add_schema(&mut self, file: &str, text: &str) -> Result<(), TemplateError> {
        let mut schema: Value = serde_json::from_str(text).map_err(|error| TemplateError {
            line: Some(error.line()),
            column: Some(error.column()),
            ..TemplateError::refused(file, format!("not JSON: {error}"))
        })?;
        let mut administrators = Vec::new();
        collect(&schema, &mut Vec::new(), &mut administrators);
        if mentions(&schema) != administrators.len() {
            let message = format!(
                "{ADMINISTRATOR} is true, and belongs to a key in `properties`, at any depth: elsewhere it has no effect"
            );
            return Err(TemplateError::refused(file, message));
        }
        let keys =
            schema.get("properties").and_then(Value::as_object).into_iter().flatten().map(|(key, _)| key.clone());
        let keys = keys.collect();
        // What is below the top stays with the validator. At the top, what the other layers and other sets have is no mistake.
        let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
        if is_closed && let Some(schema) = schema.as_object_mut() {
            schema.remove("additionalProperties");
        }
        #[cfg(not(feature = "schema"))]
        drop(schema);
        self.schemas.push(Schema {
            file: file.to_owned(),
            administrators,
            keys,
            is_closed,
            #[cfg(feature = "schema")]
            validator: jsonschema::validator_for(&schema)
                .map_err(|error| TemplateError::refused(file, format!("not a JSON schema: {error}")))?,
        });
        Ok(())
    }

    /// The values of a VM, from the defaults, the manager's values and the VM's.
    ///
    /// # Errors
    /// The first five values that do not match a schema, each with its path.
    pub fn resolve(&self, manager: &Map<String, Value>, vm: Option<&Value>) -> Result<Value, TemplateError> {
        let mut values = self.defaults.clone();
        merge(&mut values, manager);
        let vm = vm.filter(|vm| vm.is_object());
        if let Some(Value::Object(own)) = vm {
            let before = Value::Object(values.clone());
            merge(&mut values, own);
            self.check_author(own, &before, &Value::Object(values.clone()))?;
        }
        let values = Value::Object(values);
        for schema in &self.schemas {
            schema.check(&values, vm)?;
        }
        Ok(values)
    }

    /// Refuses what a VM sets and may not. `before`: the values without the VM's, `after`: with them.
    fn check_author(&self, own: &Map<String, Value>, before: &Value, after: &Value) -> Result<(), TemplateError> {
        if let Some(Schema { file, .. }) = self.schemas.iter().find(|schema| schema.is_closed) {
            let has_schema = |folder: &str| self.schemas.iter().any(|schema| folder_of(&schema.file) == folder);
            let is_known = |key: &str| {
                OF_BUILTIN.contains(&key)
                    || self.schemas.iter().any(|schema| schema.keys.contains(key))
                    // What a layer without a schema has in its defaults is for it to bind.
                    || self.keys.iter().any(|(folder, default)| default == key && !has_schema(folder))
            };
            if let Some(key) = own.keys().find(|key| !is_known(key)) {
                let message = format!("values.{key}: a VM can't set it: the templates have no such value");
                return Err(of_author(file, &[key], message));
            }
        }
        for schema in &self.schemas {
            for path in &schema.administrators {
                let path: Vec<&str> = path.iter().map(String::as_str).collect();
                if at(before, &path) != at(after, &path) {
                    let message = format!(
                        "values.{}: only an administrator sets it, in the set's {FILE} or the manager's templateValues",
                        path.join(".")
                    );
                    return Err(of_author(&schema.file, &path, message));
                }
            }
        }
        for key in OF_BUILTIN {
            if before.get(key).is_some() && before.get(key) != after.get(key) {
                let message = format!("values.{key}: an administrator has set it, and a VM can't change it");
                return Err(of_author("builtin/pod.yaml.j2", &[key], message));
            }
        }
        Ok(())
    }

    /// Whether a schema refuses what a VM sets beyond the keys that it has.
    pub fn is_closed(&self) -> bool {
        self.schemas.iter().any(|schema| schema.is_closed)
    }
}

fn folder_of(file: &str) -> &str {
    file.rsplit_once('/').map_or("", |(folder, _)| folder)
}

fn at<'a>(values: &'a Value, path: &[&str]) -> Option<&'a Value> {
    path.iter().try_fold(values, |value, key| value.get(key))
}

/// An error that is the fault of a VM's values.
fn of_author(file: &str, path: &[&str], message: String) -> TemplateError {
    TemplateError {
        of_values: true,
        vm_field: Some(format!("/spec/templateValues/{}", path.join("/"))),
        ..TemplateError::refused(file, message)
    }
}

/// The paths of the administrator's values: those below `properties` alone, because only those are keys that can be compared.
fn collect(schema: &Value, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    if schema.get(ADMINISTRATOR) == Some(&Value::Bool(true)) {
        found.push(path.clone());
    }
    for (key, below) in schema.get("properties").and_then(Value::as_object).into_iter().flatten() {
        path.push(key.clone());
        collect(below, path, found);
        path.pop();
    }
}

/// How often a text of JSON has the keyword, wherever.
fn mentions(schema: &Value) -> usize {
    match schema {
        Value::Object(map) => usize::from(map.contains_key(ADMINISTRATOR)) + map.values().map(mentions).sum::<usize>(),
        Value::Array(items) => items.iter().map(mentions).sum(),
        _ => 0,
    }
}

impl Schema {
    /// Checks the merged values. `vm`: those that the VM sets.
    #[cfg(feature = "schema")]
    fn check(&self, values: &Value, vm: Option<&Value>) -> Result<(), TemplateError> {
        let wrong: Vec<(String, String)> = self
            .validator
            .iter_errors(values)
            .take(5)
            .map(|error| {
                let path = error.instance_path().to_string();
                let message = format!("values{}: {error}", path.replace('/', "."));
                (path, message)
            })
            .collect();
        if wrong.is_empty() {
            return Ok(());
        }
        // A value that is missing can't be blamed on the VM: its path is that of the whole map.
        let is_of_vm = |path: &&str| !path.is_empty() && vm.is_some_and(|vm| vm.pointer(path).is_some());
        let vm_field = wrong.iter().map(|(path, _)| path.as_str()).find(is_of_vm);
        let messages: Vec<&str> = wrong.iter().map(|(_, message)| message.as_str()).collect();
        Err(TemplateError {
            of_values: true,
            vm_field: vm_field.map(|path| format!("/spec/templateValues{path}")),
            ..TemplateError::refused(&self.file, messages.join("; "))
        })
    }

    /// A program without the feature `schema` renders no templates of users.
    #[cfg(not(feature = "schema"))]
    fn check(&self, _: &Value, _: Option<&Value>) -> Result<(), TemplateError> {
        Err(TemplateError::refused(&self.file, "this program can't check values"))
    }
}

fn merge(map: &mut Map<String, Value>, over: &Map<String, Value>) {
    let mut merged = Value::Object(std::mem::take(map));
    json_patch::merge(&mut merged, &Value::Object(over.clone()));
    if let Value::Object(merged) = merged {
        *map = merged;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn values() -> Values {
        let mut values = Values::default();
        values.add_defaults("values.yaml", "size: small\nsidecar: {image: a, port: 80}\n").unwrap();
        values.add_defaults("sets/x/values.yaml", "sidecar: {port: 81}\n").unwrap();
        values
    }

    #[test]
    fn each_layer_is_merged_over_the_one_before() {
        let Value::Object(manager) = json!({ "pool": "green", "size": "large" }) else { unreachable!() };
        let vm = json!({ "sidecar": { "image": null }, "size": "huge" });
        let resolved = values().resolve(&manager, Some(&vm)).unwrap();
        assert_eq!(resolved, json!({ "size": "huge", "sidecar": { "port": 81 }, "pool": "green" }));
    }

    #[cfg(feature = "schema")]
    #[test]
    fn an_error_of_a_schema_names_the_path_of_the_value() {
        let mut values = values();
        let schema = r#"{"properties": {"size": {"enum": ["small", "large"]}, "sidecar": {"properties": {"port": {"maximum": 100}}}},
            "required": ["pool"]}"#;
        values.add_schema("values.schema.json", schema).unwrap();
        let error = |vm: Value| values.resolve(&Map::new(), Some(&vm)).unwrap_err().to_string();
        insta::assert_snapshot!(error(json!({ "size": "huge", "sidecar": { "port": 200 } })), @r#"values.schema.json: values: "pool" is a required property; values.sidecar.port: 200 is greater than the maximum of 100; values.size: "huge" is not one of "small" or "large""#);
        assert!(values.resolve(&Map::new(), Some(&json!({ "pool": 1 }))).is_ok());
        // The field is the VM's only if the VM sets it.
        let manager = Map::from_iter([("size".to_owned(), json!("huge"))]);
        let field = |vm: Value| values.resolve(&manager, Some(&vm)).unwrap_err().vm_field;
        assert_eq!(field(json!({ "size": "tiny", "pool": 1 })).as_deref(), Some("/spec/templateValues/size"));
        assert_eq!(field(json!({ "pool": 1 })), None);
        insta::assert_snapshot!(Values::default().add_schema("s", r#"{"type": 1}"#).unwrap_err(), @"s: not a JSON schema: 1 is not valid under any of the schemas listed in the 'anyOf' keyword");
    }

    fn closed() -> Values {
        let mut values = values();
        let schema = r#"{"additionalProperties": false, "properties": {
            "size": {"enum": ["small", "large"]},
            "sidecar": {"additionalProperties": false, "properties": {"image": {"x-administrator": true}, "port": {"type": "integer"}}}}}"#;
        values.add_schema("values.schema.json", schema).unwrap();
        values
    }

    #[cfg(feature = "schema")]
    #[test]
    fn the_schema_of_one_layer_does_not_refuse_the_values_of_another() {
        let mut values = Values::default();
        values.add_schema("values.schema.json", r#"{"additionalProperties": false, "properties": {"a": {}}}"#).unwrap();
        values.add_defaults("sets/x/values.yaml", "b: 1\n").unwrap();
        let resolve = |values: &Values, vm: Value| values.resolve(&Map::new(), Some(&vm)).is_ok();
        assert!(resolve(&values, json!({ "a": 1, "b": 2 })) && !resolve(&values, json!({ "c": 1 })));
        values.add_schema("sets/x/values.schema.json", r#"{"properties": {"c": {}}}"#).unwrap();
        assert!(!resolve(&values, json!({ "b": 2 })) && resolve(&values, json!({ "a": 1, "c": 2 })));
    }

    /// What a VM may set is what the schemas let it set, whichever way it tries: by a key, by null, by another type above it.
    #[cfg(feature = "schema")]
    #[test]
    fn a_vm_can_not_change_what_is_the_administrators() {
        let values = closed();
        let manager = Map::from_iter([("ofAnotherSet".to_owned(), json!(1))]);
        let refused = |vm: Value| {
            let error = values.resolve(&manager, Some(&vm)).unwrap_err();
            assert!(error.of_values, "{error}");
            error.vm_field.unwrap_or_default()
        };
        for (vm, field) in [
            (json!({ "sidecar": { "image": "evil" } }), "/sidecar/image"),
            (json!({ "sidecar": { "image": null } }), "/sidecar/image"),
            (json!({ "sidecar": null }), "/sidecar/image"),
            (json!({ "sidecar": "text" }), "/sidecar/image"),
            (json!({ "sidecar": ["list"] }), "/sidecar/image"),
            (json!({ "sidecar": { "other": 1 } }), "/sidecar"),
            (json!({ "serviceAccount": "admin" }), "/serviceAccount"),
            (json!({ "ofAnotherSet": 2 }), "/ofAnotherSet"),
            (json!({ "size": "huge" }), "/size"),
        ] {
            assert_eq!(refused(vm.clone()), format!("/spec/templateValues{field}"), "{vm}");
        }
        for vm in [
            json!({}),
            json!({ "size": "large", "runAsUser": 1000 }),
            json!({ "sidecar": { "port": 1, "image": "a" } }),
        ] {
            values.resolve(&manager, Some(&vm)).unwrap();
        }
    }

    #[test]
    fn a_vm_does_not_change_what_an_administrator_has_set_of_the_builtin_values() {
        let manager = Map::from_iter([("runAsUser".to_owned(), json!(1000)), ("hostUsers".to_owned(), json!(false))]);
        let tried = |vm: Value| Values::default().resolve(&manager, Some(&vm)).map_err(|error| error.vm_field);
        for vm in [json!({ "runAsUser": null }), json!({ "runAsUser": 0 })] {
            assert_eq!(tried(vm), Err(Some("/spec/templateValues/runAsUser".into())));
        }
        assert_eq!(tried(json!({ "hostUsers": true })), Err(Some("/spec/templateValues/hostUsers".into())));
        assert_eq!(tried(json!({ "deviceOwnership": true })).unwrap()["deviceOwnership"], true);
        assert!(Values::default().resolve(&Map::new(), Some(&json!({ "runAsUser": 1000 }))).is_ok());
    }

    #[test]
    fn the_keyword_is_refused_where_it_would_have_no_effect() {
        for schema in [
            json!({ "additionalProperties": { "x-administrator": true } }),
            json!({ "properties": { "a": { "items": { "x-administrator": true } } } }),
            json!({ "$defs": { "a": { "x-administrator": true } }, "properties": { "a": { "$ref": "#/$defs/a" } } }),
            json!({ "allOf": [{ "properties": { "a": { "x-administrator": true } } }] }),
            json!({ "properties": { "a": { "x-administrator": "true" } } }),
        ] {
            let error = Values::default().add_schema("s", &schema.to_string()).unwrap_err();
            assert!(error.to_string().contains("x-administrator is true, and belongs to a key"), "{error}");
        }
        let whole = json!({ "x-administrator": true });
        let mut values = values();
        values.add_schema("s", &whole.to_string()).unwrap();
        assert!(values.resolve(&Map::new(), Some(&json!({ "size": "x" }))).is_err());
    }
}
