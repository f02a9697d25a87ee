//! Whether a Pod could mount what it needs: no claim of another VM, and only Secrets, ConfigMaps and claims that exist. The kubelet waits for one that does
//! not, and says so only in an event.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Secret};
use kube::{Api, Resource, core::NamespaceResourceScope};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{ActionError, Cluster, Lacking, is_refusal, namespace_of};
use crate::{
    api::VirtualMachine,
    claims::Foreign,
    object::{Lifetime, ObjectKey, Rendered},
    plan::Action,
    process::clock,
    render::{
        check::trial,
        pod::{pod_specs, with_claims},
        references::{self, Reference},
    },
};

impl Cluster {
    /// Checks what the Pods that a step of a plan creates would mount. What the VM has itself needs no request.
    ///
    /// # Errors
    /// The first claim that is another VM's, the first object that does not exist, the first ConfigMap that lacks a key, or the error of a request. Without the right to read such
    /// an object it is not checked.
    pub(super) async fn check_mounts(&self, vm: &VirtualMachine, step: &[Action]) -> Result<(), ActionError> {
        let applied = step.iter().filter_map(|action| match action {
            Action::Apply { object, .. } => Some(object),
            Action::Label { .. } | Action::Image { .. } | Action::Delete { .. } => None,
        });
        // A helper beside the guest would write to another VM's disk as well as a guest.
        for object in applied.map(with_claims) {
            if let Some(foreign) = self.foreign_claim(vm, pod_specs(&object).into_iter()) {
                return Err(foreign);
            }
        }
        let created = step.iter().filter_map(|action| match action {
            Action::Apply { object, uid: None } => Some(object),
            Action::Apply { .. } | Action::Label { .. } | Action::Image { .. } | Action::Delete { .. } => None,
        });
        self.check_mounted(vm, created, None).await
    }

    /// Checks what a guest will need that is taken down for a restart, so that it does not stay down. What the plan makes itself need not exist yet.
    ///
    /// # Errors
    /// As of [`Cluster::check_mounts`], a claim that would be removed together with the Pod, or that the API server would refuse the new Pod.
    pub async fn check_restart(&self, vm: &VirtualMachine, rendered: &[Rendered]) -> Result<(), ActionError> {
        let observed = self.children.observe(vm, clock::now());
        let needed: BTreeSet<&str> = rendered.iter().filter_map(pod_spec).flat_map(claims).collect();
        let pods = observed.objects.iter().filter(|object| object.key.is_pod());
        let mounted = pods.flat_map(|pod| pod.mounted_claims()).map(|(claim, _)| claim.into_owned());
        // A disk that was taken out of the spec may go.
        let mounted: Vec<String> = mounted.filter(|claim| needed.contains(claim.as_str())).collect();
        if let Some(claim) = self.deleted_claim(vm, &mounted).await? {
            return Err(ActionError::ClaimDeleting(claim));
        }
        if let Some(foreign) = self.foreign_claim(vm, rendered.iter().filter_map(pod_spec)) {
            return Err(foreign);
        }
        let lacking = |it: references::Missing| Some((it.key, Lacking::Key(it.lacks?)));
        if let Some((object, lacking)) = references::missing(vm, &observed, rendered).into_iter().find_map(lacking) {
            return Err(ActionError::MountMissing { object, lacking, is_restart: true });
        }
        self.check_mounted(vm, rendered.iter(), Some(rendered)).await?;
        for object in rendered.iter().filter(|object| pod_spec(object).is_some()) {
            // What can't be asked now, or not by a dry run, is not held up.
            if let Err(ActionError::Api { source, .. }) = self.dry_run(vm, &trial(object)).await
                && is_refusal(&source)
            {
                return Err(ActionError::RestartRefused { key: object.key.clone(), source });
            }
        }
        Ok(())
    }

    /// `restarted`: what is rendered for a guest that would be taken down. It need not exist yet.
    async fn check_mounted(
        &self,
        vm: &VirtualMachine,
        objects: impl Iterator<Item = &Rendered>,
        restarted: Option<&[Rendered]>,
    ) -> Result<(), ActionError> {
        let pods: Vec<&Value> = objects.filter_map(pod_spec).collect();
        // A Pod without its claim waits until there is one. A guest that runs does not.
        let matters = |it: &Reference| !it.is_optional && (restarted.is_some() || !it.key.is_claim());
        let mounted: Vec<Reference> = pods.iter().flat_map(|pod| references::of_volumes(pod)).filter(matters).collect();
        if mounted.is_empty() {
            return Ok(());
        }
        let own = self.children.observe(vm, clock::now());
        let is_made = |key: &ObjectKey| restarted.unwrap_or_default().iter().any(|object| object.key == *key);
        let others = mounted.into_iter().filter(|it| own.get(&it.key).is_none() && !is_made(&it.key));
        for Reference { key: object, keys, is_optional: _ } in others {
            match self.lacks(&namespace_of(vm), &object, &keys).await {
                Ok(None) => {}
                Ok(Some(lacking)) => {
                    return Err(ActionError::MountMissing { object, lacking, is_restart: restarted.is_some() });
                }
                Err(kube::Error::Api(answer)) if answer.is_forbidden() => {}
                Err(source) => return Err(ActionError::Api { what: "read", key: object, source: Box::new(source) }),
            }
        }
        Ok(())
    }

    /// The first claim that one of the Pods would mount and that another VM has, as an error.
    fn foreign_claim<'a>(&self, vm: &VirtualMachine, pods: impl Iterator<Item = &'a Value>) -> Option<ActionError> {
        pods.flat_map(claims).find_map(|name| {
            let other = self.children.other_holder(vm, name)?;
            Some(ActionError::ForeignClaim { key: ObjectKey::claim(name), why: Foreign::Vm(other) })
        })
    }

    /// Whether an object is missing, of which nothing but its metadata is read.
    async fn lacks_object<K>(&self, namespace: &str, name: &str) -> kube::Result<Option<Lacking>>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + std::fmt::Debug + DeserializeOwned,
    {
        let api = Api::<K>::namespaced(self.client.clone(), namespace);
        let found = self.requests.run(api.get_metadata_opt(name)).await?;
        Ok(found.is_none().then_some(Lacking::Object))
    }

    /// What is missing. The content of a Secret is not read.
    async fn lacks(&self, namespace: &str, object: &ObjectKey, keys: &[String]) -> kube::Result<Option<Lacking>> {
        if object.kind == "Secret" {
            return self.lacks_object::<Secret>(namespace, &object.name).await;
        }
        if object.is_claim() {
            return self.lacks_object::<PersistentVolumeClaim>(namespace, &object.name).await;
        }
        let api = Api::<ConfigMap>::namespaced(self.client.clone(), namespace);
        let Some(map) = self.requests.run(api.get_opt(&object.name)).await? else { return Ok(Some(Lacking::Object)) };
        let has = |key: &&String| {
            map.data.as_ref().is_some_and(|data| data.contains_key(*key))
                || map.binary_data.as_ref().is_some_and(|data| data.contains_key(*key))
        };
        Ok(keys.iter().find(|key| !has(key)).cloned().map(Lacking::Key))
    }
}

/// The spec of a Pod that runs the guest, of itself or of the object that makes it.
fn pod_spec(object: &Rendered) -> Option<&Value> {
    if object.lifetime != Lifetime::Running {
        return None;
    }
    object.value.pointer(if object.key.is_pod() { "/spec" } else { "/spec/template/spec" })
}

/// The claims that a Pod mounts.
fn claims(pod_spec: &Value) -> impl Iterator<Item = &str> {
    let volumes = pod_spec["volumes"].as_array().into_iter().flatten();
    volumes.filter_map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str())
}
