//! Labels, annotations and owners of an existing object whose other fields stay as they are.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use serde_json::{Map, Value, json};

use crate::{
    object::{HASH_ANNOTATION, RESTARTED_ANNOTATION, ROLE_ANNOTATION, Rendered, VERSION_ANNOTATION},
    observed::{Json, Object},
};

/// Annotations that describe how the whole object was created. They change only with it.
pub(super) const OF_WHOLE_OBJECT: [&str; 4] =
    [HASH_ANNOTATION, VERSION_ANNOTATION, RESTARTED_ANNOTATION, ROLE_ANNOTATION];

/// Annotations that only make the kubelet refresh the volumes of a Pod
/// (<https://kubernetes.io/docs/concepts/configuration/configmap/#mounted-configmaps-are-updated-automatically>). A Pod without a node has
/// no volumes yet, so they wait until it has one.
pub(super) const FOR_KUBELET: [&str; 2] = ["vmrunner.jdrupes.org/cmVersion", "vmrunner.jdrupes.org/dpVersion"];

/// The images of a Pod's containers as they were rendered, an annotation for each container. An admission webhook may write another image into
/// the Pod (that of a mirror), and that is no change of the templates.
pub const IMAGE_ANNOTATION: &str = "image.vmoperator.jdrupes.org/";

/// The annotation with the rendered image of a container.
pub fn image_annotation(container: &str) -> String {
    format!("{IMAGE_ANNOTATION}{container}")
}

/// A Pod to be created, with the images that are rendered for it.
pub(super) fn with_images(mut pod: Rendered) -> Rendered {
    let images: Vec<(String, Value)> = containers(&pod.value["spec"])
        .filter_map(|container| Some((image_annotation(container["name"].as_str()?), container.get("image")?.clone())))
        .collect();
    let annotations = Arc::make_mut(&mut pod.value)["metadata"]["annotations"].as_object_mut();
    annotations.into_iter().for_each(|annotations| annotations.extend(images.iter().cloned()));
    pod
}

/// An existing Pod with the images that were rendered for it, in place of those that it has.
pub(super) fn with_rendered_images(pod: &Object) -> Cow<'_, Object> {
    let image = |container: &Value| pod.annotations.get(&image_annotation(container["name"].as_str()?));
    let differs = |container: &Value| image(container).is_some_and(|image| container["image"] != image.as_str());
    if !containers(&pod.spec).any(differs) {
        return Cow::Borrowed(pod);
    }
    let mut spec = pod.spec.clone();
    for list in CONTAINERS {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            if let Some(image) = image(container) {
                container["image"] = json!(image);
            }
        }
    }
    Cow::Owned(Object { spec, ..pod.clone() })
}

const CONTAINERS: [&str; 2] = ["initContainers", "containers"];

fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    CONTAINERS.into_iter().filter_map(|list| spec.get(list)?.as_array()).flatten()
}

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
    let is_of_whole = |name: &str| OF_WHOLE_OBJECT.contains(&name) || name.starts_with(IMAGE_ANNOTATION);
    let is_skipped = |name: &str| is_of_whole(name) || (FOR_KUBELET.contains(&name) && !has_kubelet);
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

/// The rendered owners, if the existing object has none, or if somebody has given it to another VM.
pub(super) fn missing_owners<'a>(object: &'a Rendered, found: &Object) -> Option<&'a Value> {
    let owners = object.value["metadata"].get("ownerReferences")?;
    let is_rendered = |uid: &String| owners.as_array().is_some_and(|all| all.iter().any(|owner| owner["uid"] == **uid));
    let is_given_away = found.owner_vm.is_some() && found.maker.is_none() && !found.owners.iter().any(is_rendered);
    (found.owners.is_empty() || is_given_away).then_some(owners)
}

fn string_map(value: &Value) -> BTreeMap<String, String> {
    let entries = value.as_object().into_iter().flatten();
    entries.filter_map(|(name, value)| Some((name.clone(), value.as_str()?.to_owned()))).collect()
}
