//! `spec` in the context: the VM's `spec` in which every field of the schema is present.

use std::sync::OnceLock;

use serde_json::Value;

use crate::api::{VirtualMachineSpec, crd};

/// The spec with null for each field that is not set. Templates can ask for every field then: an undefined value is an error.
pub(super) fn complete_spec(spec: &VirtualMachineSpec) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::to_value(spec)?;
    complete(&mut value, schema());
    Ok(value)
}

fn schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let (_, mut crd) = crd::crds().swap_remove(0);
        crd.pointer_mut("/spec/versions/0/schema/openAPIV3Schema/properties/spec").map(Value::take).unwrap_or_default()
    })
}

fn complete(value: &mut Value, schema: &Value) {
    match value {
        Value::Object(map) => {
            let Some(Value::Object(properties)) = schema.get("properties") else { return };
            for (field, schema) in properties {
                match map.get_mut(field) {
                    Some(value) => complete(value, schema),
                    None => drop(map.insert(field.clone(), Value::Null)),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|item| complete(item, &schema["items"])),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_field_of_the_schema_is_there() {
        let mut spec = json!({ "vm": { "maximumCpus": 1, "disks": [{ "cdrom": { "image": "" } }] } });
        complete(&mut spec, schema());
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
