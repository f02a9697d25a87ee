//! `values`: what an operator and the users of a template set may choose, beside what a machine is.
//!
//! ```text
//!  values.yaml of the set ─▶ templateValues of the manager ─▶ spec.templateValues ─▶ values.schema.json? ─▶ `values`
//! ```
//!
//! Each goes over the one before, key by key, as a JSON merge patch (RFC 7386).

use serde_json::{Map, Value};

use super::TemplateError;

/// The file with a set's values, and the one with the JSON schema that all values must fit.
pub const FILE: &str = "values.yaml";
/// See [`FILE`].
pub const SCHEMA: &str = "values.schema.json";

/// Lays values over others that are themselves laid over something later: what takes a key out there stays.
pub fn lay_over(values: &mut Map<String, Value>, over: Map<String, Value>) {
    for (key, value) in over {
        match (values.get_mut(&key), value) {
            (Some(Value::Object(values)), Value::Object(over)) => lay_over(values, over),
            (_, value) => drop(values.insert(key, value)),
        }
    }
}

/// What a template set says of its values.
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
    /// Puts a file of defaults over what there is.
    ///
    /// # Errors
    /// If it is not a YAML map.
    pub fn add_defaults(&mut self, file: &str, text: &str) -> Result<(), TemplateError> {
        let map: Option<Map<String, Value>> =
            serde_yaml::from_str(text).map_err(|error| TemplateError::yaml(file, "", &error))?;
        merge(&mut self.defaults, &map.unwrap_or_default());
        Ok(())
    }

    /// Adds a schema that the values must fit.
    ///
    /// # Errors
    /// If it is not a JSON schema.
    pub fn add_schema(&mut self, file: &str, text: &str) -> Result<(), TemplateError> {
        let schema: Value = serde_json::from_str(text).map_err(|error| TemplateError {
            template: file.to_owned(),
            line: Some(error.line()),
            column: Some(error.column()),
            message: format!("not JSON: {error}"),
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

    /// The values of a machine.
    ///
    /// # Errors
    /// The first value that does not fit a schema, with its path.
    pub fn resolve(&self, manager: &Map<String, Value>, machine: Option<&Value>) -> Result<Value, TemplateError> {
        let mut values = self.defaults.clone();
        merge(&mut values, manager);
        if let Some(Value::Object(machine)) = machine {
            merge(&mut values, machine);
        }
        let values = Value::Object(values);
        for schema in &self.schemas {
            schema.check(&values)?;
        }
        Ok(values)
    }
}

impl Schema {
    #[cfg(feature = "schema")]
    fn check(&self, values: &Value) -> Result<(), TemplateError> {
        let wrong: Vec<String> = self
            .validator
            .iter_errors(values)
            .take(5)
            .map(|error| {
                let path = error.instance_path().to_string().replace('/', ".");
                format!("values{path}: {error}")
            })
            .collect();
        if wrong.is_empty() { Ok(()) } else { Err(TemplateError::refused(&self.file, wrong.join("; "))) }
    }

    /// Programs that are built without this check render nothing of a user's.
    #[cfg(not(feature = "schema"))]
    fn check(&self, _: &Value) -> Result<(), TemplateError> {
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
    fn each_layer_goes_over_the_one_before() {
        let Value::Object(manager) = json!({ "pool": "green", "size": "large" }) else { unreachable!() };
        let machine = json!({ "sidecar": { "image": null }, "size": "huge" });
        let resolved = values().resolve(&manager, Some(&machine)).unwrap();
        assert_eq!(resolved, json!({ "size": "huge", "sidecar": { "port": 81 }, "pool": "green" }));
    }

    #[cfg(feature = "schema")]
    #[test]
    fn a_schema_names_the_path() {
        let mut values = values();
        let schema = r#"{"properties": {"size": {"enum": ["small", "large"]}, "sidecar": {"properties": {"port": {"maximum": 100}}}},
            "required": ["pool"]}"#;
        values.add_schema("values.schema.json", schema).unwrap();
        let wrong = |machine: Value| values.resolve(&Map::new(), Some(&machine)).unwrap_err().to_string();
        insta::assert_snapshot!(wrong(json!({ "size": "huge", "sidecar": { "port": 200 } })), @r#"values.schema.json: values: "pool" is a required property; values.sidecar.port: 200 is greater than the maximum of 100; values.size: "huge" is not one of "small" or "large""#);
        assert!(values.resolve(&Map::new(), Some(&json!({ "pool": 1 }))).is_ok());
        insta::assert_snapshot!(Values::default().add_schema("s", r#"{"type": 1}"#).unwrap_err(), @"s: not a JSON schema: 1 is not valid under any of the schemas listed in the 'anyOf' keyword");
    }
}
