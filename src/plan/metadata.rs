//! Labels, annotations and owners of an existing object whose other fields stay as they are.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Map, Value, json};

use crate::{
    object::{HASH_ANNOTATION, RESTARTED_ANNOTATION, Rendered, VERSION_ANNOTATION},
    observed::{Json, Object},
};

/// Annotations that describe how the whole object was created. They change only with it.
pub(super) const OF_WHOLE_OBJECT: [&str; 3] = [HASH_ANNOTATION, VERSION_ANNOTATION, RESTARTED_ANNOTATION];

/// Annotations that only make the kubelet refresh the volumes of a Pod
/// (<https://kubernetes.io/docs/concepts/configuration/configmap/#mounted-configmaps-are-updated-automatically>). A Pod without a node has
/// no volumes yet, so they wait until it has one.
pub(super) const FOR_KUBELET: [&str; 2] = ["vmrunner.jdrupes.org/cmVersion", "vmrunner.jdrupes.org/dpVersion"];

/// The object with the value of the restart annotation for which it was created.
pub(super) fn with_restart(object: &Rendered, restart: Option<&String>) -> Rendered {
    let mut object = object.clone();
    if let Some(restart) = restart {
        Arc::make_mut(&mut object.value)["metadata"]["annotations"][RESTARTED_ANNOTATION] = json!(restart);
    }
    object
}

/// The merge patch that gives an existing object the rendered labels, annotations and owners; `None` if it has them. Its hash
/// annotation stays: it describes from what the rest of the object was rendered.
pub(super) fn patch(object: &Rendered, found: &Object) -> Option<Value> {
    let has_kubelet = !found.key.is_pod() || found.node_name().is_some();
    let is_skipped = |name: &str| OF_WHOLE_OBJECT.contains(&name) || (FOR_KUBELET.contains(&name) && !has_kubelet);
    let owned: Vec<Value> = [&found.owned, &found.patched].into_iter().flatten().map(Json::value).collect();
    let mut metadata = Map::new();
    for (field, current) in [("labels", &found.labels), ("annotations", &found.annotations)] {
        let wanted = string_map(&object.value["metadata"][field]);
        let mut change: Map<String, Value> = wanted
            .iter()
            .filter(|(name, value)| !is_skipped(name) && current.get(*name) != Some(value))
            .map(|(name, value)| (name.clone(), json!(value)))
            .collect();
        let owned = owned.iter().filter_map(|fields| fields["f:metadata"][format!("f:{field}")].as_object());
        for name in owned.flatten().filter_map(|(name, _)| name.strip_prefix("f:")) {
            if current.contains_key(name) && !wanted.contains_key(name) && !is_skipped(name) {
                change.insert(name.to_owned(), Value::Null);
            }
        }
        if !change.is_empty() {
            metadata.insert(field.to_owned(), Value::Object(change));
        }
    }
    if let Some(owners) = missing_owners(object, found) {
        metadata.insert("ownerReferences".into(), owners.clone());
    }
    (!metadata.is_empty()).then(|| json!({ "metadata": metadata }))
}

/// The rendered owners, if the existing object has none.
pub(super) fn missing_owners<'a>(object: &'a Rendered, found: &Object) -> Option<&'a Value> {
    object.value["metadata"].get("ownerReferences").filter(|_| found.owners.is_empty())
}

fn string_map(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}
