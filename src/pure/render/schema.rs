//! The JSON schema of the template context, for editors and for `kubectl vm lint`.

use serde_json::{Value, json};

use super::context::VERSION;
use crate::{api::crd, render::command_line::sample_context};

/// The schema (JSON Schema 2020-12). `values` is the schema of a template set's values, if it has one.
pub fn context(values: Option<Value>) -> Value {
    let (_, mut definition) = crd::crds().swap_remove(0);
    let mut part = |name: &str| {
        let pointer = format!("/spec/versions/0/schema/openAPIV3Schema/properties/{name}");
        let mut schema = definition.pointer_mut(&pointer).map(Value::take).unwrap_or_default();
        close(&mut schema);
        schema
    };
    let (spec, status) = (part("spec"), part("status"));
    let mut nullable = spec.clone();
    optional(&mut nullable);
    let text = json!({ "type": "string" });
    let maybe = json!({ "type": ["string", "null"] });
    let texts = json!({ "type": "object", "additionalProperties": { "type": "string" } });
    let object =
        |properties: Value| json!({ "type": "object", "properties": properties, "additionalProperties": false });
    let or_none = |mut schema: Value| {
        schema["type"] = json!([schema["type"], "null"]);
        schema
    };
    let mut properties = json!({
        "vm": object(json!({
            "apiVersion": text, "kind": text,
            "metadata": object(json!({
                "name": text, "namespace": maybe, "uid": maybe, "labels": texts, "annotations": texts, "creationTimestamp": maybe,
            })),
            "spec": spec, "status": or_none(status),
        })),
        "spec": nullable,
        "image": object(json!({
            "reference": text, "pullPolicy": maybe, "legacy": { "type": "boolean" }, "container": text,
        })),
        "resources": { "type": "object" },
        "initResources": { "type": "object" },
        "disks": { "type": "array", "items": object(json!({
            "type": { "enum": ["claim", "cdrom"] }, "volume": text, "claimName": text, "device": text, "path": text,
            "mode": text, "spec": { "type": ["object", "null"] }, "labels": texts, "annotations": texts, "file": maybe,
            "bootindex": { "type": ["integer", "null"] },
        })) },
        "runnerData": object(json!({ "claimName": text, "size": text })),
        "cloudInit": or_none(object(json!({
            "metaData": text, "userData": maybe, "vendorData": maybe, "networkConfig": maybe, "userDataFrom": { "type": ["object", "null"] },
            "networkConfigFrom": { "type": ["object", "null"] }, "runnerConfig": { "type": ["object", "null"] },
        }))),
        "runner": { "type": "object" },
        "qemu": { "type": ["object", "null"] },
        "service": or_none(object(json!({ "labels": texts, "annotations": texts }))),
        "displaySecret": object(json!({
            "name": maybe, "version": maybe, "generate": { "type": "boolean" }, "password": text,
        })),
        "relay": object(json!({ "secret": maybe, "certificate": text, "key": text, "token": text })),
        "labels": texts, "podLabels": texts,
        "config": object(json!({
            "runnerDataPvc": object(json!({ "storageClassName": maybe })),
            "nodeDevices": object(json!({ "kvm": text, "machine": maybe })),
            "passt": object(json!({ "seccompProfile": text, "appArmorProfile": maybe })),
        })),
        "serviceAccount": text, "imageRepositoryClaim": maybe, "managerVersion": text,
    });
    properties["values"] = values.unwrap_or_else(|| json!({ "type": "object" }));
    let mut schema = object(properties);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!(format!("The context of vm-operator's templates, version {VERSION}"));
    schema
}

/// The schema of the context of QEMU templates.
pub fn qemu() -> Value {
    let mut schema = closed_like(&sample_context());
    for open in ["values", "config", "env", "vm", "display"] {
        schema["properties"][open] = json!({});
    }
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!(format!("The context of vm-operator's QEMU templates, version {VERSION}"));
    schema
}

/// A schema with the names of a value: its maps have no others.
fn closed_like(value: &Value) -> Value {
    match value {
        Value::Object(fields) => {
            let fields: serde_json::Map<_, _> =
                fields.iter().map(|(name, value)| (name.clone(), closed_like(value))).collect();
            json!({ "type": "object", "properties": fields, "additionalProperties": false })
        }
        Value::Array(items) => json!({ "type": "array", "items": items.first().map(closed_like).unwrap_or_default() }),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => json!({}),
    }
}

/// The schema of a file with a `VirtualMachine`, for editors.
pub fn virtual_machine() -> Value {
    let (_, mut definition) = crd::crds().swap_remove(0);
    let mut schema =
        definition.pointer_mut("/spec/versions/0/schema/openAPIV3Schema").map(Value::take).unwrap_or_default();
    close(&mut schema);
    let properties = &mut schema["properties"];
    // Kubernetes defines it.
    properties["metadata"] = json!({ "type": "object" });
    properties["apiVersion"] = json!({ "const": "vmoperator.jdrupes.org/v1" });
    properties["kind"] = json!({ "const": "VirtualMachine" });
    schema["required"] = json!(["apiVersion", "kind", "metadata", "spec"]);
    schema["$schema"] = json!("https://json-schema.org/draft/2020-12/schema");
    schema["title"] = json!("A VirtualMachine");
    schema
}

/// Follows a path such as `vm.metadata.name`. `Some` is the description of a deprecated field on the path (JSON Schema's annotation
/// `deprecated`), which says what to use instead.
///
/// # Errors
/// The index of the first part of the path that does not exist, and the names that exist there.
pub fn resolve<'a>(schema: &'a Value, path: &str) -> Result<Option<&'a str>, (usize, Vec<String>)> {
    let (mut schema, mut deprecated) = (schema, None);
    for (index, name) in path.split('.').enumerate() {
        let (Some(properties), open) = (schema["properties"].as_object(), is_open(schema)) else { break };
        match properties.get(name) {
            Some(next) => schema = next,
            None if open => break,
            None => return Err((index, properties.keys().cloned().collect())),
        }
        if schema["deprecated"] == true {
            deprecated = schema["description"].as_str().or(Some("it goes with a later release"));
        }
    }
    Ok(deprecated)
}

/// The schema of the items of a list such as `spec.vm.disks`, if the schema has one there.
pub fn items<'a>(schema: &'a Value, path: &str) -> Option<&'a Value> {
    path.split('.').try_fold(schema, |schema, name| schema["properties"].get(name))?.get("items")
}

fn is_open(schema: &Value) -> bool {
    schema["additionalProperties"] != false
}

/// Refuses fields that the schema does not name, if it names some.
fn close(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            let is_open = map.get("x-kubernetes-preserve-unknown-fields") == Some(&json!(true));
            if map.get("x-kubernetes-int-or-string") == Some(&json!(true)) {
                map.insert("type".into(), json!(["integer", "string"]));
            }
            // Rules and defaults that only the API server applies.
            map.retain(|name, _| !name.starts_with("x-kubernetes-") && name != "default");
            // JSON Schema has no `nullable`.
            if map.remove("nullable") == Some(json!(true))
                && let Some(type_) = map.get("type").cloned()
            {
                map.insert("type".into(), json!([type_, "null"]));
            }
            if map.get("properties").is_some_and(Value::is_object)
                && !map.contains_key("additionalProperties")
                && !is_open
            {
                map.insert("additionalProperties".into(), json!(false));
            }
            map.values_mut().for_each(close);
        }
        Value::Array(list) => list.iter_mut().for_each(close),
        _ => {}
    }
}

/// Allows null for every field, as in the context.
fn optional(schema: &mut Value) {
    let Value::Object(map) = schema else { return };
    for rule in ["required", "not", "anyOf", "oneOf", "allOf"] {
        map.remove(rule);
    }
    match map.get_mut("type") {
        Some(Value::Array(types)) if types.contains(&json!("null")) => {}
        Some(Value::Array(types)) => types.push("null".into()),
        Some(type_) => *type_ = json!([type_.take(), "null"]),
        None => {}
    }
    if let Some(list) = map.get_mut("enum").and_then(Value::as_array_mut) {
        list.push(Value::Null);
    }
    for part in ["properties", "items", "additionalProperties"] {
        match map.get_mut(part) {
            Some(Value::Object(fields)) if part == "properties" => fields.values_mut().for_each(optional),
            Some(schema) => optional(schema),
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_does_not_exist_is_an_error_with_the_names_that_do() {
        let schema = context(None);
        for path in ["vm.metadata.labels.x", "spec.vm.disks", "values.anything", "runner.Runner.vm", "spec.nodeName"] {
            assert_eq!(resolve(&schema, path), Ok(None), "{path}");
        }
        assert_eq!(resolve(&schema, "vm.metadata.nam").unwrap_err().0, 2);
        let (index, known) = resolve(&schema, "displaySecret.nam").unwrap_err();
        assert_eq!(
            (index, known),
            (1, vec!["generate", "name", "password", "version"].into_iter().map(str::to_owned).collect())
        );
        assert_eq!(resolve(&schema, "spec.vm.maximumCpu").unwrap_err().0, 2);
        let mut schema = schema;
        schema["properties"]["image"]["deprecated"] = json!(true);
        schema["properties"]["image"]["description"] = json!("use runnerImage");
        assert_eq!(resolve(&schema, "image.reference"), Ok(Some("use runnerImage")));
    }

    #[cfg(feature = "schema")]
    #[test]
    fn an_example_matches_the_schema_of_the_resource() {
        let validator = jsonschema::validator_for(&virtual_machine()).unwrap();
        let example = crate::render::check::examples().pop().unwrap();
        let mut example = json!(example);
        let wrong: Vec<String> = validator.iter_errors(&example).map(|error| error.to_string()).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
        example["spec"]["vm"]["maximumCpu"] = json!(1);
        assert!(!validator.is_valid(&example));
    }

    #[cfg(feature = "schema")]
    #[test]
    fn a_context_matches_its_schema() {
        let vm = crate::test_support::vm(|vm| {
            vm["spec"]["cloudInit"] = json!({ "userData": { "a": 1 } });
        });
        let context = crate::render::context::build(
            &vm,
            &crate::test_support::nothing(),
            &crate::render::check::example_config(),
            &crate::render::RandomInput::default(),
            json!({}),
            None,
        );
        let context = serde_json::to_value(context.unwrap().value()).unwrap();
        let validator = jsonschema::validator_for(&self::context(None)).unwrap();
        let wrong: Vec<String> =
            validator.iter_errors(&context).map(|error| format!("{}: {error}", error.instance_path())).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
