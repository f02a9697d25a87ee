//! Rendered objects as the API server has them, for tests without one.

use std::sync::Arc;

use kube::core::DynamicObject;
use serde_json::{Value, json};
use vm_operator::{object::Rendered, observed::Object, ownership::OBJECT_MANAGER};

#[path = "field_set.rs"]
mod field_set;

use field_set::field_set;

/// An object as the API server has it when the manager has applied it at that time.
pub fn applied(object: &Rendered, at: &str) -> Value {
    let mut stored = Value::clone(&object.value);
    stored["metadata"]["uid"] = json!(format!("uid-of-{}-{}", object.key.kind, object.key.name));
    stored["metadata"]["creationTimestamp"] = json!(at);
    let fields = field_set(&object.value);
    stored["metadata"]["managedFields"] =
        json!([{ "manager": OBJECT_MANAGER, "operation": "Apply", "fieldsV1": fields }]);
    stored
}

/// The same as the manager knows it.
pub fn trimmed(stored: Value) -> Arc<Object> {
    let object: DynamicObject = serde_json::from_value(stored).unwrap();
    let types = object.types.clone().unwrap();
    Arc::new(Object::trim(&types, object))
}
