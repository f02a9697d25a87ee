//! From the Rust types to the CustomResourceDefinitions in `crds/`.

use kube::CustomResourceExt;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::{VirtualMachine, VmPool};

/// The CRDs as `crds/NAME.yaml` holds them: file name and content.
///
/// # Errors
/// If a CRD can't be written as YAML.
pub fn files() -> Result<Vec<(String, String)>, serde_saphyr::ser::Error> {
    const HEAD: &str = "# Made from the types in src/api.rs by `make crds`; change those.\n";
    crds().into_iter().map(|(file, crd)| Ok((file, format!("{HEAD}{}", serde_saphyr::to_string(&crd)?)))).collect()
}

/// The CRDs as JSON, with the name of their file.
pub fn crds() -> Vec<(String, Value)> {
    [(json!(VirtualMachine::crd()), Some(initial_status())), (json!(VmPool::crd()), None)]
        .into_iter()
        .map(|(mut crd, status)| {
            let name = crd["spec"]["names"]["plural"].as_str().unwrap_or_default().to_owned();
            if let Some(schema) = crd.pointer_mut("/spec/versions/0/schema/openAPIV3Schema") {
                tidy(schema, false);
                if let (Some(default), Some(Value::Object(property))) =
                    (status, schema.pointer_mut("/properties/status"))
                {
                    property.insert("default".into(), default);
                }
            }
            (format!("{name}-crd.yaml"), crd)
        })
        .collect()
}

/// The status of a machine that no manager has seen yet: tools that look in between must not call it healthy
/// (a missing condition counts as healthy for Flux and Argo CD).
fn initial_status() -> Value {
    json!({
        "observedGeneration": -1,
        "cpus": 0,
        "ram": "0",
        "displayPasswordSerial": 0,
        "conditions": [{
            "type": super::conditions::READY, "status": "Unknown", "reason": "Pending",
            "message": "Waiting for the manager", "lastTransitionTime": "1970-01-01T00:00:00Z",
        }],
    })
}

/// Takes out of a schema what Rust's types say and Kubernetes should not hear: `nullable` (an absent field is left out, not
/// null), formats that the API server does not know, and defaults inside lists.
fn tidy(schema: &mut Value, in_list: bool) {
    match schema {
        Value::Object(map) => {
            map.remove("nullable");
            if in_list {
                map.remove("default");
            }
            if let Some(Value::String(format)) = map.get("format")
                && format.starts_with("uint")
            {
                map.remove("format");
            }
            for (key, value) in map {
                match (key.as_str(), value) {
                    // A field may be called like a keyword: below `properties` the keys are names.
                    ("properties", Value::Object(fields)) => fields.values_mut().for_each(|field| tidy(field, in_list)),
                    ("items" | "additionalProperties", value) => tidy(value, true),
                    (_, Value::Object(_)) | (_, Value::Array(_))
                        if matches!(key.as_str(), "default" | "enum" | "required") => {}
                    (_, value) => tidy(value, in_list),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| tidy(value, in_list)),
        _ => {}
    }
}

/// `userData` and `networkConfig` come either from the resource itself or from elsewhere. Not as CEL, which can't see fields
/// without a type.
pub(super) fn either_data_or_source(schema: &mut Schema) {
    let not_both = |field: &str| json!({ "not": { "required": [field, format!("{field}From")] } });
    schema.insert("allOf".into(), json!([not_both("userData"), not_both("networkConfig")]));
}

/// Any JSON value.
pub(super) fn any(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "x-kubernetes-preserve-unknown-fields": true })
}

/// Any JSON object.
pub(super) fn any_object(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true })
}

/// A list of JSON objects.
pub(super) fn any_object_list(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "array", "maxItems": 64, "items": any_object(generator) })
}

/// An object whose values are anything.
pub(super) fn any_map(generator: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": any(generator) })
}

/// A map of resource names to amounts, as Kubernetes checks them.
pub(super) fn resource_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "additionalProperties": {
            "x-kubernetes-int-or-string": true,
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
        },
    })
}

/// A claim's spec: what the manager itself looks at is checked, the rest is for the API server.
pub(super) fn claim_spec(generator: &mut SchemaGenerator) -> Schema {
    let resources = resource_list(generator);
    json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {
            "accessModes": {
                "type": "array",
                "maxItems": 4,
                "items": { "type": "string", "enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"] },
            },
            "volumeMode": { "type": "string", "enum": ["Block", "Filesystem"] },
            "storageClassName": { "type": "string" },
            "resources": {
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": true,
                "properties": { "requests": resources, "limits": resources },
            },
        },
    })
}

/// A MAC address of a single station: the lowest bit of the first octet is 0 (IEEE 802).
pub(super) fn mac_address(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "pattern": "^[0-9a-fA-F][02468aceACE](:[0-9a-fA-F]{2}){5}$" })
}

/// Conditions as a map by type
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
pub(super) fn conditions(_: &mut SchemaGenerator) -> Schema {
    let text = |description: &str| json!({ "type": "string", "description": description });
    let mut properties = Map::new();
    properties.insert("type".into(), text("What the condition is about."));
    properties.insert(
        "status".into(),
        json!({ "type": "string", "enum": ["True", "False", "Unknown"], "description": "Whether it holds." }),
    );
    properties.insert("reason".into(), text("Why, in a word for programs."));
    properties.insert("message".into(), text("Why, in a sentence for people."));
    properties.insert(
        "lastTransitionTime".into(),
        json!({ "type": "string", "format": "date-time", "description": "When the status changed." }),
    );
    properties.insert(
        "observedGeneration".into(),
        json!({ "type": "integer", "format": "int64", "description": "The generation of the spec that it was derived from." }),
    );
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["type"],
        "items": { "type": "object", "required": ["type", "status", "reason", "lastTransitionTime"], "properties": properties },
    })
}

/// Addresses as a map by address.
pub(super) fn addresses(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "x-kubernetes-list-type": "map",
        "x-kubernetes-list-map-keys": ["address"],
        "items": {
            "type": "object",
            "required": ["address", "type"],
            "properties": {
                "address": { "type": "string", "description": "The address." },
                "type": { "type": "string", "description": "What kind of address it is: PodIP." },
            },
        },
    })
}

/// Kinds as a map by all that they have.
pub(super) fn object_kinds(generator: &mut SchemaGenerator) -> Schema {
    map_of::<super::ObjectKind>(generator, &["apiVersion", "kind"])
}

/// Changes that wait for the next start, from the manager and from the runner: a map by `path`.
pub(super) fn pending_changes(generator: &mut SchemaGenerator) -> Schema {
    map_of::<super::PendingChange>(generator, &["path"])
}

/// Claims as a map by `name`.
pub(super) fn claims(generator: &mut SchemaGenerator) -> Schema {
    map_of::<super::status::ClaimStatus>(generator, &["name"])
}

/// Findings about one claim as a map by `reason`.
pub(super) fn claim_findings(generator: &mut SchemaGenerator) -> Schema {
    map_of::<super::status::ClaimFinding>(generator, &["reason"])
}

/// A list that server-side apply takes for a map
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
fn map_of<T: JsonSchema>(generator: &mut SchemaGenerator, keys: &[&str]) -> Schema {
    let mut schema = generator.subschema_for::<Vec<T>>();
    schema.insert("x-kubernetes-list-type".into(), json!("map"));
    schema.insert("x-kubernetes-list-map-keys".into(), json!(keys));
    schema
}

#[cfg(test)]
mod tests {
    use super::*;

    fn each(schema: &Value, in_list: bool, check: &mut dyn FnMut(&Map<String, Value>, bool)) {
        if let Value::Object(map) = schema {
            check(map, in_list);
            for (key, value) in map {
                match (key.as_str(), value) {
                    ("properties", Value::Object(fields)) => {
                        fields.values().for_each(|field| each(field, in_list, check))
                    }
                    ("items", value) => each(value, true, check),
                    (_, value) => each(value, in_list, check),
                }
            }
        }
    }

    #[test]
    fn no_default_inside_a_list_and_nothing_is_nullable() {
        for (name, crd) in crds() {
            each(&crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], false, &mut |schema, in_list| {
                assert!(!(in_list && schema.contains_key("default")), "{name}: {schema:?}");
                assert!(!schema.contains_key("nullable"), "{name}: {schema:?}");
            });
        }
    }

    #[test]
    fn every_field_is_explained() {
        let (_, crd) = &crds()[0];
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        each(&schema["properties"]["spec"], false, &mut |schema, _| {
            if let Some(Value::Object(fields)) = schema.get("properties") {
                for (name, field) in fields.iter().filter(|(name, _)| {
                    !["accessModes", "volumeMode", "storageClassName", "resources", "requests", "limits"]
                        .contains(&name.as_str())
                }) {
                    assert!(field.get("description").is_some(), "{name}");
                }
            }
        });
    }

    #[test]
    fn the_files_are_small() {
        for (name, text) in files().unwrap() {
            assert!(text.len() < 100_000, "{name}: {} bytes", text.len());
        }
    }
}
