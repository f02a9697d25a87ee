//! Gives a claim up with its VM: the VM becomes its owner, so that the garbage collector deletes the claim with the VM, or after it.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api, Resource, ResourceExt,
    api::{Patch, PatchParams},
    core::ObjectMeta,
};
use serde_json::{Value, json};
use tracing::warn;

use crate::api::VirtualMachine;

/// How often it is decided anew whether a claim goes with its VM, while others change the claim.
const ATTEMPTS: usize = 5;

/// What is applied to a claim. `claim`: the metadata by which it was decided. If the claim has changed since, the API server refuses it.
fn owned_by(vm: &VirtualMachine, claim: &ObjectMeta) -> Value {
    let owner = json!({
        "apiVersion": VirtualMachine::api_version(&()), "kind": VirtualMachine::kind(&()),
        "name": vm.name_any(), "uid": vm.uid().unwrap_or_default(),
    });
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": {
            "name": claim.name, "uid": claim.uid, "resourceVersion": claim.resource_version, "ownerReferences": [owner],
        },
    })
}

/// Gives up the claim of that name, if it goes with the VM, as `goes` says. Whoever changes the claim meanwhile may have given it to another VM,
/// so it is decided anew then.
///
/// # Errors
/// What the API server says. That the claim is gone is no error.
pub async fn give_up(
    claims: &Api<PersistentVolumeClaim>,
    manager: &str,
    vm: &VirtualMachine,
    claim: &str,
    goes: impl Fn(&ObjectMeta) -> bool,
) -> kube::Result<()> {
    for _ in 0..ATTEMPTS {
        let found = claims.get_metadata_opt(claim).await?.map(|found| found.metadata);
        let Some(found) = found.filter(&goes) else { return Ok(()) };
        let (parameters, owned) = (PatchParams::apply(manager), owned_by(vm, &found));
        match claims.patch_metadata(claim, &parameters, &Patch::Apply(&owned)).await {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(answer)) if answer.code == 404 => return Ok(()),
            Err(kube::Error::Api(answer)) if answer.code == 409 => {}
            Err(error) => return Err(error),
        }
    }
    warn!(claim, "the claim changes all the time, so it stays");
    Ok(())
}
