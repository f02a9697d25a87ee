//! The annotations that steer the manager are for templates: a VM's spec must not set them, or whoever writes VMs decides how the
//! manager treats objects (`lifetime: keep` on a Service, for example, would leave it behind).

use std::{borrow::Cow, collections::BTreeMap};

use kube::ResourceExt;
use serde_json::Value;

use crate::{
    api::{ClaimMetadata, VirtualMachine},
    object::{HASH_ANNOTATION, LIFETIME_ANNOTATION, ROLE_ANNOTATION, SET_LABEL, UPDATE_ANNOTATION, VERSION_ANNOTATION},
};

/// With [`SET_LABEL`] a ConfigMap would be a template set.
const STEERING: [&str; 6] =
    [HASH_ANNOTATION, LIFETIME_ANNOTATION, ROLE_ANNOTATION, SET_LABEL, UPDATE_ANNOTATION, VERSION_ANNOTATION];

/// The VM without steering annotations: in its own metadata, and in the labels, annotations and values of its spec.
pub(super) fn without(vm: &VirtualMachine) -> Cow<'_, VirtualMachine> {
    if !steers(vm) {
        return Cow::Borrowed(vm);
    }
    let mut vm = vm.clone();
    remove(vm.annotations_mut());
    remove(vm.labels_mut());
    if let Some(service) = &mut vm.spec.load_balancer_service {
        [&mut service.labels, &mut service.annotations].into_iter().flatten().for_each(remove);
    }
    for claim in vm.spec.vm.disks.iter_mut().filter_map(|disk| disk.volume_claim_template.as_mut()?.metadata.as_mut()) {
        remove(&mut claim.labels);
        remove(&mut claim.annotations);
    }
    if let Some(values) = &mut vm.spec.template_values {
        remove_from_value(values);
    }
    Cow::Owned(vm)
}

fn steers(vm: &VirtualMachine) -> bool {
    let service = vm.spec.load_balancer_service.iter();
    let claims = vm.spec.vm.disks.iter().filter_map(|disk| disk.volume_claim_template.as_ref()?.metadata.as_ref());
    has(vm.annotations())
        || has(vm.labels())
        || service.into_iter().flat_map(|service| service.labels.iter().chain(&service.annotations)).any(has)
        || claims.into_iter().any(|ClaimMetadata { labels, annotations, .. }| has(labels) || has(annotations))
        || vm.spec.template_values.as_ref().is_some_and(has_value)
}

fn has<T>(map: &BTreeMap<String, T>) -> bool {
    STEERING.iter().any(|name| map.contains_key(*name))
}

fn remove<T>(map: &mut BTreeMap<String, T>) {
    map.retain(|name, _| !STEERING.contains(&name.as_str()));
}

fn has_value(value: &Value) -> bool {
    match value {
        Value::Object(map) => STEERING.iter().any(|name| map.contains_key(*name)) || map.values().any(has_value),
        Value::Array(list) => list.iter().any(has_value),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn remove_from_value(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.retain(|name, _| !STEERING.contains(&name.as_str()));
            map.values_mut().for_each(remove_from_value);
        }
        Value::Array(list) => list.iter_mut().for_each(remove_from_value),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        api::ServiceMetadata,
        config::{LoadBalancerService, ReconcilerConfig},
        object::Lifetime,
        render::{RandomInput, TemplateSet, render},
        test_support::{allowing, nothing, vm},
    };

    /// A template whose objects get their annotations from the VM.
    const COPIES: &str = "{% for a in [vm.metadata.annotations, values.annotations] %}\n---\napiVersion: v1\nkind: ConfigMap\n\
                          metadata: {name: x{{ loop.index }}, annotations: {{ a }}}\n{% endfor %}\n";

    #[test]
    fn what_a_vm_says_does_not_steer_the_manager() {
        let set = TemplateSet::layered(&[("x.yaml.j2".into(), COPIES.into())].into(), None).unwrap();
        let steering = json!({ LIFETIME_ANNOTATION: "keep", UPDATE_ANNOTATION: "once", ROLE_ANNOTATION: "helper", HASH_ANNOTATION: "x", "mine": "y" });
        let vm = vm(|vm| {
            vm["metadata"]["annotations"] = steering.clone();
            vm["spec"]["loadBalancerService"] = json!({ "annotations": steering });
            vm["spec"]["templateValues"] = json!({ "annotations": steering });
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["annotations"] = steering.clone();
        });
        let load_balancer_service = LoadBalancerService::Metadata(ServiceMetadata::default());
        let config = ReconcilerConfig { load_balancer_service, ..allowing() };
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        let mut with_annotation = 0;
        for object in render(&vm, &nothing(), &config, &random, &set).unwrap() {
            with_annotation += usize::from(object.value["metadata"]["annotations"]["mine"] == "y");
            assert_eq!(object.lifetime == Lifetime::Keep, object.key.is_claim(), "{}", object.key);
            assert_ne!(object.value["metadata"]["annotations"][HASH_ANNOTATION], "x");
        }
        // The two of the template, the Service and the claim.
        assert_eq!(with_annotation, 4);
    }
}
