//! The Pod that an object is, or the Pods that it makes.

use std::{borrow::Cow, sync::Arc};

use kube::ResourceExt;
use serde_json::{Value, json};

use crate::{
    api::VirtualMachine,
    object::{CONTAINER_NAME, ObjectKey, Rendered},
};

/// The specs of Pods in an object, wherever a kind has them: a StatefulSet in `spec.template.spec`, a CronJob deeper, others elsewhere.
fn specs<'a>(key: &ObjectKey, value: &'a Value) -> Vec<&'a Value> {
    let mut found = Vec::new();
    if key.is_pod() {
        found.extend(value.get("spec").filter(|spec| spec["containers"].is_array()));
    } else {
        find(value, &mut found);
    }
    found
}

fn find<'a>(value: &'a Value, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(map) => {
            if map.get("containers").is_some_and(Value::is_array) {
                found.push(value);
            }
            map.values().for_each(|value| find(value, found));
        }
        Value::Array(list) => list.iter().for_each(|value| find(value, found)),
        _ => {}
    }
}

/// The specs of the Pod that an object is, or of the Pods that it makes.
pub(crate) fn pod_specs(object: &Rendered) -> Vec<&Value> {
    specs(&object.key, &object.value)
}

/// The most Pods of a StatefulSet whose claims are looked at.
const MOST_REPLICAS: u64 = 64;

/// The object with the volumes that its Pods really have: the controller of a StatefulSet puts a claim of its own, `TEMPLATE-NAME-NUMBER`, in the
/// place of each volume that is called as one of its `volumeClaimTemplates`
/// (<https://kubernetes.io/docs/concepts/workloads/controllers/statefulset/#volume-claim-templates>).
pub(crate) fn with_claims(object: &Rendered) -> Cow<'_, Rendered> {
    let spec = &object.value["spec"];
    let templates = spec["volumeClaimTemplates"].as_array().into_iter().flatten();
    let templates: Vec<&str> = templates.filter_map(|template| template["metadata"]["name"].as_str()).collect();
    if templates.is_empty() {
        return Cow::Borrowed(object);
    }
    let first = spec["ordinals"]["start"].as_u64().unwrap_or_default();
    let end = first.saturating_add(spec["replicas"].as_u64().unwrap_or(1).clamp(1, MOST_REPLICAS));
    let claim = |template: &str, number| json!({ "name": template, "persistentVolumeClaim": { "claimName": format!("{template}-{}-{number}", object.key.name) } });
    let claims = templates.iter().flat_map(|template| (first..end).map(|number| claim(template, number)));
    let mut with_claims = object.clone();
    if let Some(Value::Object(pod)) = Arc::make_mut(&mut with_claims.value).pointer_mut("/spec/template/spec") {
        let is_replaced = |volume: &&Value| volume["name"].as_str().is_some_and(|name| templates.contains(&name));
        let others = pod.get("volumes").and_then(Value::as_array).into_iter().flatten();
        let volumes = others.filter(|volume| !is_replaced(volume)).cloned().chain(claims).collect();
        pod.insert("volumes".into(), volumes);
    }
    Cow::Owned(with_claims)
}

/// All containers of a Pod's spec.
pub(super) fn containers(spec: &Value) -> impl Iterator<Item = &Value> {
    ["containers", "initContainers"].into_iter().filter_map(|list| spec[list].as_array()).flatten()
}

/// The containers that run at the same time: without init containers that end before.
pub(super) fn lasting_containers(spec: &Value) -> impl Iterator<Item = &Value> {
    let list = |name: &str| spec[name].as_array().into_iter().flatten();
    list("containers").chain(list("initContainers").filter(|container| container["restartPolicy"] == "Always"))
}

/// The name of the container in which QEMU runs. Only in a set in which no container is called `vm-runner` it is the VM's, as that of a legacy
/// runner: else a recipe with a container of any name would be the guest of the VM that is called so.
pub(super) fn runner_name<'a>(mut documents: impl Iterator<Item = &'a Value>, vm: &VirtualMachine) -> String {
    let has_runner = documents.any(|document| {
        let mut found = Vec::new();
        find(document, &mut found);
        found.into_iter().any(|spec| containers(spec).any(|container| container["name"] == CONTAINER_NAME))
    });
    if has_runner { CONTAINER_NAME.to_owned() } else { vm.name_any() }
}

/// The container in which QEMU runs.
pub(super) fn runner_of<'a>(spec: &'a Value, runner: &str) -> Option<&'a Value> {
    let named = |name: &str| containers(spec).find(|container| container["name"] == name);
    named(CONTAINER_NAME).or_else(|| named(runner))
}

/// Whether an object is or makes a Pod with the container in which QEMU runs.
pub(super) fn runs_guest(key: &ObjectKey, value: &Value, runner: &str) -> bool {
    specs(key, value).into_iter().any(|spec| runner_of(spec, runner).is_some())
}

/// Whether the object is or makes a guest: a Pod with the container in which QEMU runs.
pub(crate) fn is_guest(object: &Rendered) -> bool {
    runs_guest(&object.key, &object.value, &object.runner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{nothing, rendered, vm};

    #[test]
    fn the_claims_of_a_stateful_set_take_the_places_of_volumes() {
        let with = |spec: Value| {
            let pod = rendered(&vm(|_| ()), &nothing()).into_iter().find(|object| object.key.is_pod()).unwrap();
            let object = Rendered { value: Arc::new(json!({ "spec": spec })), ..pod };
            with_claims(&object).value["spec"]["template"]["spec"]["volumes"].clone()
        };
        let templates = json!([{ "metadata": { "name": "core-disk" } }]);
        let pod = json!({ "spec": { "containers": [], "volumes": [
            { "name": "core-disk", "persistentVolumeClaim": { "claimName": "apple-core-disk" } }, { "name": "b", "emptyDir": {} },
        ] } });
        let claim = |number| json!({ "name": "core-disk", "persistentVolumeClaim": { "claimName": format!("core-disk-apple-{number}") } });
        assert_eq!(with(json!({ "template": pod })), pod["spec"]["volumes"]);
        let other = json!({ "name": "b", "emptyDir": {} });
        assert_eq!(with(json!({ "template": pod, "volumeClaimTemplates": templates })), json!([other, claim(0)]));
        assert_eq!(
            with(
                json!({ "template": pod, "volumeClaimTemplates": templates, "replicas": 2, "ordinals": { "start": 3 } })
            ),
            json!([other, claim(3), claim(4)])
        );
        assert_eq!(with(json!({ "template": "x", "volumeClaimTemplates": templates })), Value::Null);
    }
}
