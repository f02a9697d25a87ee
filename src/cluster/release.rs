//! Takes from a claim that a VM takes the owners that are other VMs: with one of these the garbage collector would delete it.
//!
//! An apply can't remove what another client has set, so the claim is released by a patch of its own, before it is noted whose it is: if the
//! manager ends between the two, the claim is taken again.

use std::borrow::Cow;

use kube::{
    ResourceExt,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use tracing::{info, warn};

use super::{Cluster, namespace_of};
use crate::{api::VirtualMachine, claims, object::ObjectKey, ownership::OBJECT_MANAGER};

impl Cluster {
    /// What is to be applied to a claim that the VM takes: to the version of the claim without other VMs as its owners. Another version than that which was
    /// seen is left alone, and the API server refuses the apply.
    pub(super) async fn released<'a>(
        &self,
        vm: &VirtualMachine,
        key: &ObjectKey,
        value: &'a Value,
    ) -> kube::Result<Cow<'a, Value>> {
        let mut value = Cow::Borrowed(value);
        let Some(version) = value["metadata"]["resourceVersion"].as_str().filter(|_| key.is_claim()) else {
            return Ok(value);
        };
        let claims = self.objects::<DynamicObject>(&namespace_of(vm), key).await?;
        let found = self.requests.run(claims.get_metadata_opt(&key.name)).await?;
        let Some(found) = found.filter(|found| found.resource_version().as_deref() == Some(version)) else {
            return Ok(value);
        };
        let Some(owners) = claims::without_other_vms(vm, found.owner_references()) else { return Ok(value) };
        let metadata = json!({ "uid": found.uid(), "resourceVersion": version, "ownerReferences": owners });
        let parameters = PatchParams { field_manager: Some(OBJECT_MANAGER.into()), ..PatchParams::default() };
        let patch = Patch::Merge(json!({ "metadata": metadata }));
        match self.requests.run(claims.patch_metadata(&key.name, &parameters, &patch)).await {
            Ok(released) => {
                info!(object = %key, "no other VM owns the claim any more");
                value.to_mut()["metadata"]["resourceVersion"] = json!(released.resource_version());
            }
            // The admission plugin OwnerReferencesPermissionEnforcement lets only those do it who may delete claims. StorageReady says it.
            Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
                warn!(object = %key, answer = answer.message, "another VM stays an owner of the claim");
            }
            Err(error) => return Err(error),
        }
        Ok(value)
    }
}
