//! What is asked of the API server before a write that can't be undone: the watches may be behind, each by itself, and Secrets are not
//! watched at all.

use std::time::Duration;

use k8s_openapi::{
    api::core::v1::{ConfigMap, PersistentVolumeClaim, Secret},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};
use kube::{Api, Resource, ResourceExt};

use super::{ActionError, Cluster, Lacking, NoSource, namespace_of};
use crate::{
    api::{CloudInit, StoredVm, VirtualMachine, VmReport},
    claims::is_given_up,
    config::CLOUD_INIT_LABEL,
    object::ObjectKey,
    observed::Observed,
    ownership::reserved,
    plan::Action,
    process::slots::PATIENCE,
};

impl Cluster {
    /// Checks that the Secrets and ConfigMaps from which a VM takes cloud-init data have the `label` and are not the operator's own, before its
    /// Pod is created. Who writes VMs need not be allowed to read them, but the guest can read what its Pod mounts. One that does not exist is
    /// refused, because the Pod would mount whatever somebody creates under that name. `is_restart`: a guest would be taken down, and not come back.
    ///
    /// # Errors
    /// The first object that is not meant for VMs, or that can't be read.
    pub async fn check_sources(&self, vm: &VirtualMachine, label: &str, is_restart: bool) -> Result<(), ActionError> {
        let namespace = namespace_of(vm);
        for (kind, name) in vm.spec.cloud_init.iter().flat_map(CloudInit::sources) {
            let key = || ObjectKey { api_version: "v1".into(), kind: kind.into(), name: name.to_owned() };
            let failed = |source| ActionError::Api { what: "read", key: key(), source: Box::new(source) };
            let metadata = if kind == "Secret" {
                let api = Api::<Secret>::namespaced(self.client.clone(), &namespace);
                self.requests.run(api.get_metadata_opt(name)).await.map_err(failed)?.map(|found| found.metadata)
            } else {
                let api = Api::<ConfigMap>::namespaced(self.client.clone(), &namespace);
                self.requests.run(api.get_metadata_opt(name)).await.map_err(failed)?.map(|found| found.metadata)
            };
            let has_label = |metadata: &ObjectMeta| {
                label.is_empty() || metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(label))
            };
            let why = match &metadata {
                // As for each other ConfigMap that a Pod would mount.
                None if kind == "ConfigMap" => {
                    return Err(ActionError::MountMissing { object: key(), lacking: Lacking::Object, is_restart });
                }
                None => NoSource::Missing,
                Some(metadata) => match reserved(metadata) {
                    Some(why) => NoSource::Reserved(why),
                    None if has_label(metadata) => continue,
                    None => NoSource::Unlabelled,
                },
            };
            let label = if label.is_empty() { CLOUD_INIT_LABEL } else { label };
            return Err(ActionError::SecretRefused { kind, name: name.to_owned(), label: label.to_owned(), why });
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
        match step.iter().find(|action| action.makes_running()) {
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

    /// Whether the API server has the VM's reports as they were observed.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn are_reports_current(&self, vm: &VirtualMachine, observed: &Observed) -> Result<bool, ActionError> {
        let api = Api::<VmReport>::namespaced(self.client.clone(), &namespace_of(vm));
        for report in &observed.reports {
            let failed = |source| ActionError::Api { what: "read", key: report.key.clone(), source: Box::new(source) };
            let found = self.requests.run(api.get_metadata_opt(&report.key.name)).await.map_err(failed)?;
            let version = found.and_then(|found| found.metadata.resource_version);
            if version.is_some_and(|version| version != report.version.to_string()) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// One of these claims that is being deleted, and that a person has not given up. It exists as long as a Pod mounts it.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn deleted_claim(&self, vm: &VirtualMachine, names: &[String]) -> Result<Option<ObjectKey>, ActionError> {
        let api = Api::<PersistentVolumeClaim>::namespaced(self.client.clone(), &namespace_of(vm));
        for name in names {
            let key = ObjectKey::claim(name);
            let failed = |source| ActionError::Api { what: "read", key: key.clone(), source: Box::new(source) };
            let found = self.requests.run(api.get_metadata_opt(name)).await.map_err(failed)?;
            let is_kept = |metadata: &ObjectMeta| {
                let uid = metadata.uid.as_deref().unwrap_or_default();
                metadata.deletion_timestamp.is_some() && !is_given_up(vm, uid)
            };
            if found.is_some_and(|found| is_kept(&found.metadata)) {
                return Ok(Some(key));
            }
        }
        Ok(None)
    }
}
