//! What the API server notes in `metadata.managedFields` when an object is applied, for objects of unit tests and golden cases.

use serde_json::{Map, Value, json};

/// The field set of an object; a list is a map if its items have one of the keys that the lists of Pods and metadata have.
pub(crate) fn field_set(value: &Value) -> Value {
    let field = |(name, value): (&String, &Value)| (format!("f:{name}"), field_set(value));
    match value {
        Value::Array(items) => {
            let keys = ["uid", "mountPath", "devicePath", "containerPort", "name"];
            let key = |item: &Value| {
                let name = keys.into_iter().find(|key| item.get(key).is_some())?;
                Some(format!("k:{}", json!({ name: item[name] })))
            };
            items.iter().filter_map(|item| Some((key(item)?, field_set(item)))).collect::<Map<_, _>>().into()
        }
        // Field sets do not contain the type, nor the name in the metadata.
        Value::Object(map) if map.contains_key("metadata") => {
            let mut map = map.clone();
            map.retain(|name, _| !["apiVersion", "kind"].contains(&name.as_str()));
            map["metadata"].as_object_mut().unwrap().retain(|name, _| !["name", "namespace"].contains(&name.as_str()));
            map.iter().map(field).collect::<Map<_, _>>().into()
        }
        Value::Object(map) => map.iter().map(field).collect::<Map<_, _>>().into(),
        _ => json!({}),
    }
}
