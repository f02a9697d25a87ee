//! What is asked of the API server before a write that can't be undone: the watches may be behind, each by itself, and Secrets are not
//! watched at all.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{PersistentVolumeClaim, Secret},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, Resource, ResourceExt};

use super::{ActionError, Cluster, namespace_of};
use crate::{
    api::{CloudInit, StoredVm, VirtualMachine},
    object::ObjectKey,
    observed::Object,
    plan::Action,
    process::slots::PATIENCE,
};

impl Cluster {
    /// Checks that the Secrets from which a VM takes cloud-init data have the `label`, before its Pod is created. Who writes VMs need not be
    /// allowed to read Secrets, but the guest can read what its Pod mounts. A Secret that does not exist is refused, because the Pod would
    /// mount whatever somebody creates under that name.
    ///
    /// # Errors
    /// The first Secret that does not have the label, or that can't be read.
    pub async fn check_secrets(&self, vm: &VirtualMachine, label: &str) -> Result<(), ActionError> {
        let api = Api::<Secret>::namespaced(self.client.clone(), &namespace_of(vm));
        for name in vm.spec.cloud_init.iter().flat_map(CloudInit::secrets).filter(|_| !label.is_empty()) {
            let key = || ObjectKey { api_version: "v1".into(), kind: "Secret".into(), name: name.to_owned() };
            let failed = |source| ActionError::Api { what: "read", key: key(), source: Box::new(source) };
            let secret = self.requests.run(api.get_metadata_opt(name)).await.map_err(failed)?;
            if !secret.as_ref().is_some_and(|secret| secret.labels().contains_key(label)) {
                let (name, label, exists) = (name.to_owned(), label.to_owned(), secret.is_some());
                return Err(ActionError::SecretRefused { name, label, exists });
            }
        }
        Ok(())
    }

    /// Checks that a VM that a step starts is still as it was when that was decided, if the steps before took `long`.
    pub(super) async fn check_vm(
        &self,
        vm: &VirtualMachine,
        step: &[Action],
        long: Duration,
    ) -> Result<(), ActionError> {
        match step.iter().find(|action| action.starts()) {
            Some(action) if long > PATIENCE && !self.is_current(vm).await? => {
                Err(ActionError::Outdated(action.key().clone()))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Whether the API server has the VM as it is here, and it is not being deleted.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn is_current(&self, vm: &VirtualMachine) -> Result<bool, ActionError> {
        let api: Api<StoredVm> = Api::namespaced(self.client.clone(), &namespace_of(vm));
        let found = self.requests.run(api.get_metadata_opt(&vm.name_any())).await;
        let found = found.map_err(|source| ActionError::Api {
            what: "read",
            key: ObjectKey {
                api_version: VirtualMachine::api_version(&()).into(),
                kind: VirtualMachine::kind(&()).into(),
                name: vm.name_any(),
            },
            source: Box::new(source),
        })?;
        let is_same = |found: &ObjectMeta| {
            found.uid == vm.metadata.uid
                && found.resource_version == vm.metadata.resource_version
                && found.deletion_timestamp.is_none()
        };
        Ok(found.is_some_and(|found| is_same(&found.metadata)))
    }

    /// Whether a claim that a Pod mounts is being deleted. The claim exists as long as the Pod does.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn keeps_a_claim(&self, vm: &VirtualMachine, pod: &Object) -> Result<bool, ActionError> {
        let api = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), &namespace_of(vm));
        for (name, _) in pod.mounted_claims() {
            let key =
                ObjectKey { api_version: "v1".into(), kind: "PersistentVolumeClaim".into(), name: name.to_owned() };
            let failed = |source| ActionError::Api { what: "read", key, source: Box::new(source) };
            let found = self.requests.run(api.get_metadata_opt(name)).await.map_err(failed)?;
            if found.is_some_and(|found| found.metadata.deletion_timestamp.is_some()) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
