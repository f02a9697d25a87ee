//! Fields that can't change once an object exists, of kinds that only templates make.

use serde_json::Value;

use super::{
    kinds::kinds,
    request::{Answer, Target},
};

/// Refuses a change of such a field.
pub fn check(target: &Target, live: &Value, new: &Value) -> Result<(), Answer> {
    let changes = |field: &str| {
        let pointer = format!("/{}", field.replace('.', "/"));
        live.pointer(&pointer) != new.pointer(&pointer)
    };
    let refuse = |field: &str| {
        let message = "Invalid value: field is immutable";
        Err(Answer::invalid(target, field, message))
    };
    let fields: &[&str] = match kinds()[target.kind].name {
        "ConfigMap" if live["immutable"] == true => &["data", "binaryData", "immutable"],
        "Secret" if live["immutable"] == true => &["type", "data", "immutable"],
        "Secret" => &["type"],
        "Service" => &["spec.clusterIP"],
        "Job" => &["spec.template", "spec.selector", "spec.completionMode"],
        "StatefulSet" => {
            &["spec.selector", "spec.serviceName", "spec.podManagementPolicy", "spec.volumeClaimTemplates"]
        }
        _ => &[],
    };
    fields.iter().find(|field| changes(field)).map_or(Ok(()), |field| refuse(field))
}
