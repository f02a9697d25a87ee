//! Schemas of fields whose Rust type does not express everything that the API server checks.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};

use super::VirtualMachineSpec;

/// `userData` and `networkConfig` are each given in the resource or by a reference, not both. This is not a CEL rule, because CEL can't
/// see fields without a type.
pub(super) fn either_data_or_source(schema: &mut Schema) {
    let not_both = |field: &str| json!({ "not": { "required": [field, format!("{field}From")] } });
    schema.insert("allOf".into(), json!([not_both("userData"), not_both("networkConfig")]));
}

/// The API server does not fill in the field. It would have an owner, or be a value that nobody has set, where it is only not in Git: after
/// the next sync `spec.vm.state` would say Stopped while the VM runs, and a patch to Stopped would change nothing.
pub(super) fn without_default(schema: &mut Schema) {
    schema.remove("default");
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

/// Labels, as a node has them.
pub(super) fn label_map(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": { "type": "string", "maxLength": 63 },
    })
}

/// A text that becomes a part of an option of QEMU.
pub(super) fn qemu_text(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "string", "maxLength": 253, "pattern": r"^[^\x00-\x1f\x7f-\x9f\s]*$" })
}

/// An amount of a resource, as a text (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/>).
pub const AMOUNT: &str = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$";

/// A map of resource names to amounts. As in Kubernetes, an amount is a text or any number, such as 1.5. A schema of a
/// CustomResourceDefinition has no type for that, so it excludes the other types.
pub(super) fn resource_list(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {
            "x-kubernetes-preserve-unknown-fields": true,
            "not": { "enum": [true, false, {}, []] },
            "maxProperties": 0,
            "maxItems": 0,
            "minimum": 0,
            "maxLength": 64,
            "pattern": AMOUNT,
        },
    })
}

/// A map of texts, each of which may be null. Without `nullable` the API server would remove such an entry.
pub(super) fn nullable_texts(_: &mut SchemaGenerator) -> Schema {
    json_schema!({ "type": "object", "additionalProperties": { "type": "string", "nullable": true } })
}

/// A claim's spec. The schema checks the fields that the manager reads; the API server checks the rest.
pub(super) fn claim_spec(generator: &mut SchemaGenerator) -> Schema {
    let resources = resource_list(generator);
    let text = json!({ "type": "string", "maxLength": 253 });
    let source = json!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": { "apiGroup": text, "kind": text, "name": text, "namespace": text },
    });
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
            "storageClassName": text,
            "volumeName": text,
            "dataSource": source,
            "dataSourceRef": source,
            "resources": {
                "type": "object",
                "x-kubernetes-preserve-unknown-fields": true,
                "properties": { "requests": resources, "limits": resources },
            },
        },
    })
}

/// The spec of a VM inside another resource: the same schema without the descriptions, which would make the definition three times as large.
pub(super) fn vm_spec(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = generator.subschema_for::<VirtualMachineSpec>().to_value();
    remove_descriptions(&mut schema);
    schema["description"] = "The spec of the VMs (`kubectl explain vm.spec`). The pool is added to `pools`.".into();
    Schema::try_from(schema).unwrap_or_default()
}

fn remove_descriptions(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            map.remove("description");
            for (key, value) in map {
                match (key.as_str(), value) {
                    // Below `properties` the keys are names of fields.
                    ("properties", Value::Object(fields)) => fields.values_mut().for_each(remove_descriptions),
                    ("default" | "enum" | "required", _) => {}
                    (_, value) => remove_descriptions(value),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(remove_descriptions),
        _ => {}
    }
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
    properties.insert("reason".into(), text("Why, as one word for programs."));
    properties.insert("message".into(), text("Why, in a sentence for people."));
    properties.insert(
        "lastTransitionTime".into(),
        json!({ "type": "string", "format": "date-time", "description": "When the status changed." }),
    );
    properties.insert(
        "observedGeneration".into(),
        json!({ "type": "integer", "format": "int64", "description": "The generation of the spec from which it was derived." }),
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
                "type": { "type": "string", "description": "The kind of the address: PodIP." },
            },
        },
    })
}

/// A list that server-side apply treats as a map
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
pub(super) fn map_of<T: JsonSchema>(generator: &mut SchemaGenerator, keys: &[&str]) -> Schema {
    let mut schema = generator.subschema_for::<Vec<T>>();
    schema.insert("x-kubernetes-list-type".into(), json!("map"));
    schema.insert("x-kubernetes-list-map-keys".into(), json!(keys));
    schema
}
