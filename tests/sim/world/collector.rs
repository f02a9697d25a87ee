//! The garbage collector (<https://kubernetes.io/docs/concepts/architecture/garbage-collection/>).

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::{Step, is_deleting, uid};
use crate::api::{
    request::{Request, Target, Verb},
    store::Store,
};

fn owners(object: &Value) -> impl Iterator<Item = &Value> {
    object["metadata"]["ownerReferences"].as_array().into_iter().flatten()
}

pub fn steps(store: &Store) -> Vec<Step> {
    let exists = |owner: &Value| store.everything().any(|(_, object)| object["metadata"]["uid"] == owner["uid"]);
    let mut steps = Vec::new();
    for (target, object) in store.everything() {
        if !is_deleting(object) && owners(object).next().is_some() && !owners(object).any(exists) {
            steps.push(Step::Collect(target.clone()));
        }
        let is_orphaning =
            object["metadata"]["finalizers"].as_array().is_some_and(|all| all.iter().any(|it| it == "orphan"));
        if is_deleting(object) && is_orphaning {
            steps.push(Step::Orphan(target.clone()));
        }
    }
    steps
}

pub fn collect(target: &Target, store: &mut Store, now: Timestamp) {
    let Some(object) = store.get(target) else { return };
    let options = json!({ "preconditions": { "uid": uid(object) }, "propagationPolicy": "Background" });
    store.answer(now, &Request::of("kube-controller-manager", target.clone(), Verb::Delete(options)));
}

pub fn orphan(target: &Target, store: &mut Store, now: Timestamp) {
    let Some(owner) = store.get(target).map(uid) else { return };
    let owned = store.everything().filter(|(_, object)| owners(object).any(|it| it["uid"] == owner));
    let owned: Vec<Target> = owned.map(|(target, _)| target.clone()).collect();
    let without = |list: &Value, is_it: &dyn Fn(&Value) -> bool| -> Vec<Value> {
        list.as_array().into_iter().flatten().filter(|item| !is_it(item)).cloned().collect()
    };
    for dependent in owned {
        store.write(now, &dependent, "kube-controller-manager", false, |object| {
            let rest = without(&object["metadata"]["ownerReferences"], &|it| it["uid"] == owner);
            match object["metadata"].as_object_mut() {
                Some(metadata) if rest.is_empty() => drop(metadata.remove("ownerReferences")),
                _ => object["metadata"]["ownerReferences"] = json!(rest),
            }
        });
    }
    store.write(now, target, "kube-controller-manager", false, |object| {
        let rest = without(&object["metadata"]["finalizers"], &|it| it == "orphan");
        match object["metadata"].as_object_mut() {
            Some(metadata) if rest.is_empty() => drop(metadata.remove("finalizers")),
            _ => object["metadata"]["finalizers"] = json!(rest),
        }
    });
}
