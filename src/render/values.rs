//! `values` in the context: settings of a template set, which the operator and the users of VMs choose.
//!
//! ```text
//!  values.yaml of the set ─▶ templateValues of the manager ─▶ spec.templateValues ─▶ values.schema.json? ─▶ `values`
//! ```
//!
//! Each layer is merged over the one before as a JSON merge patch (RFC 7386).

use serde_json::{Map, Value};

use super::error::TemplateError;

/// The file with the default values of a set.
pub const FILE: &str = "values.yaml";
/// The file with the JSON schema of the values.
pub const SCHEMA: &str = "values.schema.json";

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
    schemas: Vec<Schema>,
}

#[derive(Debug)]
struct Schema {
    file: String,
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
            serde_yaml::from_str(text).map_err(|error| TemplateError::yaml(file, "", &error))?;
        merge(&mut self.defaults, &map.unwrap_or_default());
        Ok(())
    }

    /// Adds a schema that the values must match.
    ///
    /// # Errors
    /// If it is not a JSON schema.
    pub fn add_schema(&mut self, file: &str, text: &str) -> Result<(), TemplateError> {
        let schema: Value = serde_json::from_str(text).map_err(|error| TemplateError {
            line: Some(error.line()),
            column: Some(error.column()),
            ..TemplateError::refused(file, format!("not JSON: {error}"))
        })?;
        #[cfg(not(feature = "schema"))]
        drop(schema);
        self.schemas.push(Schema {
            file: file.to_owned(),
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
        if let Some(Value::Object(vm)) = vm {
            merge(&mut values, vm);
        }
        let values = Value::Object(values);
        for schema in &self.schemas {
            schema.check(&values, vm)?;
        }
        Ok(values)
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
}
