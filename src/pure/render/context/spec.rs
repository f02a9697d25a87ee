//! `spec` in the context: the VM's `spec` in which every field of the schema is present.

use std::sync::OnceLock;

use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::api::VirtualMachineSpec;

/// The spec with null for each field that is not set. Templates can ask for every field then: an undefined value is an error.
pub(super) fn complete_spec(spec: &VirtualMachineSpec) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::to_value(spec)?;
    complete(&mut value, fields());
    Ok(value)
}

/// The fields of an object, or of the items of a list, each with its own. The schema itself, with its descriptions, would take a megabyte.
#[derive(Debug, Default, PartialEq)]
struct Fields(Vec<(Box<str>, Fields)>);

impl Fields {
    fn of(schema: &Value) -> Self {
        let mut fields = Self::default();
        let properties = schema["properties"].as_object().into_iter().flatten();
        fields.0.extend(properties.map(|(name, schema)| (name.as_str().into(), Self::of(schema))));
        // Alternatives, such as null, and the items of a list.
        let lists = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|list| schema[list].as_array()).flatten();
        for schema in lists.chain(schema.get("items")) {
            for (name, inner) in Self::of(schema).0 {
                if fields.0.iter().all(|(known, _)| *known != name) {
                    fields.0.push((name, inner));
                }
            }
        }
        fields.0.sort_by(|(a, _), (b, _)| a.cmp(b));
        fields
    }
}

fn fields() -> &'static Fields {
    static FIELDS: OnceLock<Fields> = OnceLock::new();
    FIELDS.get_or_init(|| {
        let settings = SchemaSettings::openapi3().with(|settings| settings.inline_subschemas = true);
        Fields::of(settings.into_generator().into_root_schema_for::<VirtualMachineSpec>().as_value())
    })
}

fn complete(value: &mut Value, fields: &Fields) {
    match value {
        Value::Object(map) => {
            for (field, inner) in &fields.0 {
                match map.get_mut(&**field) {
                    Some(value) => complete(value, inner),
                    None => drop(map.insert(field.to_string(), Value::Null)),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|item| complete(item, fields)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_fields_are_those_of_the_definition() {
        let (_, definition) = crate::api::crd::crds().swap_remove(0);
        let spec = &definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];
        assert_eq!(*fields(), Fields::of(spec));
    }

    #[test]
    fn every_field_of_the_schema_is_there() {
        let mut spec = json!({ "vm": { "maximumCpus": 1, "disks": [{ "cdrom": { "image": "" } }] } });
        complete(&mut spec, fields());
        for pointer in [
            "/nodeName",
            "/affinity",
            "/cloudInit",
            "/vm/machineUuid",
            "/vm/disks/0/bootindex",
            "/vm/disks/0/volumeClaimTemplate",
        ] {
            assert_eq!(spec.pointer(pointer), Some(&Value::Null), "{pointer}");
        }
        assert_eq!(spec.pointer("/vm/maximumCpus"), Some(&json!(1)));
    }
}
