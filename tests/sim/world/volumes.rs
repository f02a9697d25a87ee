//! The controllers of claims: one that binds and grows them, and one that keeps a deleted claim while a Pod uses it.

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::{Step, has_ended, is_deleting, mounted};
use crate::api::{
    kinds::kind,
    request::Target,
    store::{Store, bytes},
};

/// What keeps a claim that is in use
/// (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#storage-object-in-use-protection>).
const PROTECTION: &str = "kubernetes.io/pvc-protection";

pub fn steps(store: &Store) -> Vec<Step> {
    let mut steps = Vec::new();
    for (target, claim) in store.of("PersistentVolumeClaim") {
        let requested = &claim["spec"]["resources"]["requests"]["storage"];
        if claim["status"]["phase"] == "Pending" && !is_deleting(claim) {
            steps.push(Step::Bind(target.clone()));
        } else if bytes(requested) > bytes(&claim["status"]["capacity"]["storage"])
            && claim["status"]["phase"] == "Bound"
        {
            steps.push(Step::Grow(target.clone()));
        }
        let is_protected =
            claim["metadata"]["finalizers"].as_array().is_some_and(|all| all.iter().any(|it| it == PROTECTION));
        if is_deleting(claim) && is_protected && !is_in_use(target, store) {
            steps.push(Step::Release(target.clone()));
        }
    }
    steps
}

/// Whether a Pod that has not ended mounts the claim.
fn is_in_use(claim: &Target, store: &Store) -> bool {
    store.of("Pod").any(|(pod, object)| {
        pod.namespace == claim.namespace
            && !has_ended(object)
            && mounted(object).iter().any(|(name, _)| *name == claim.name)
    })
}

pub fn bind(target: &Target, store: &mut Store, now: Timestamp) {
    let Some(claim) = store.get(target) else { return };
    let volume = format!("pv-{}", super::uid(claim));
    store.write(now, target, "kube-controller-manager", false, |claim| claim["spec"]["volumeName"] = json!(volume));
    store.write(now, target, "kube-controller-manager", true, |claim| {
        let capacity = claim["spec"]["resources"]["requests"].clone();
        let modes = claim["spec"]["accessModes"].clone();
        claim["status"] = json!({ "phase": "Bound", "capacity": capacity, "accessModes": modes });
    });
}

pub fn grow(target: &Target, store: &mut Store, now: Timestamp) {
    store.write(now, target, "kube-controller-manager", true, |claim| {
        claim["status"]["capacity"] = claim["spec"]["resources"]["requests"].clone();
    });
}

pub fn release(target: &Target, store: &mut Store, now: Timestamp) {
    store.write(now, target, "kube-controller-manager", false, |claim| {
        let finalizers = claim["metadata"]["finalizers"].as_array().cloned().unwrap_or_default();
        let rest: Vec<Value> = finalizers.into_iter().filter(|name| name != PROTECTION).collect();
        match claim["metadata"].as_object_mut() {
            Some(metadata) if rest.is_empty() => drop(metadata.remove("finalizers")),
            _ => claim["metadata"]["finalizers"] = json!(rest),
        }
    });
    debug_assert_eq!(target.kind, kind("PersistentVolumeClaim"));
}
