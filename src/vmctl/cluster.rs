//! What vmctl asks of the API server. Needs only the rights of `example/vmctl/rbac.yaml`.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DeleteParams, ListParams, Patch, PatchParams, Preconditions, PropagationPolicy},
    core::{DynamicObject, ObjectMeta},
};
use serde_json::{Value, json};

use super::{
    FIELD_MANAGER,
    derive::{PROTOTYPE_LABEL, PodFacts, PodObject},
};
use crate::{
    api::{StoredVm, VirtualMachine},
    claims,
    object::{APP_NAME, INSTANCE_LABEL},
};

/// No object has this version, so an apply with it creates an object or is refused, and never merges into somebody else's.
const NO_VERSION: &str = "1";
/// The Pods whose containers run or are to run.
const LIVING: &str = "status.phase!=Failed,status.phase!=Succeeded";

/// A request that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct RequestError {
    what: String,
    source: kube::Error,
}

impl RequestError {
    /// Whether the API server refuses the request, so that sending it again does not help.
    pub fn is_final(&self) -> bool {
        matches!(&self.source, kube::Error::Api(answer) if answer.code < 500 && answer.code != 429)
    }

    /// Whether a right is missing.
    pub fn is_forbidden(&self) -> bool {
        matches!(&self.source, kube::Error::Api(answer) if answer.code == 403)
    }
}

/// The API server, for one Pod and one namespace of VMs.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    pod: PodFacts,
    namespace: String,
}

impl Cluster {
    /// For VMs in a namespace.
    pub fn new(client: Client, pod: PodFacts, namespace: String) -> Self {
        Self { client, pod, namespace }
    }

    /// The VMs, as the watch of one needs them.
    pub fn vms(&self) -> Api<StoredVm> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn stored_as_is(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &ApiResource::erase::<VirtualMachine>(&()))
    }

    /// The prototype, with all its fields; `None` if there is none.
    pub async fn prototype(&self, namespace: &str, name: &str) -> Result<Option<DynamicObject>, RequestError> {
        let found = self.stored_as_is(namespace).get_opt(name).await;
        found.map_err(failed(|| format!("read the prototype vm {namespace}/{name}")))
    }

    /// The metadata of a VM.
    pub async fn vm(&self, name: &str) -> Result<Option<ObjectMeta>, RequestError> {
        let found = self.stored_as_is(&self.namespace).get_metadata_opt(name).await;
        Ok(found.map_err(failed(|| self.about("read", name)))?.map(|vm| vm.metadata))
    }

    /// The metadata of all VMs of a prototype of that name.
    pub async fn vms_of(&self, prototype: &str) -> Result<Vec<ObjectMeta>, RequestError> {
        let labels = ListParams::default().labels(&format!("{PROTOTYPE_LABEL}={prototype}"));
        let list = self.stored_as_is(&self.namespace).list_metadata(&labels).await;
        let list =
            list.map_err(failed(|| format!("list the VMs of {prototype} in the namespace {}", self.namespace)))?;
        Ok(list.items.into_iter().map(|vm| vm.metadata).collect())
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.pod.namespace)
    }

    /// What the object of vmctl's Pod says.
    pub async fn pod(&self) -> Result<PodObject, RequestError> {
        let own = ListParams::default().fields(&format!("metadata.name={}", self.pod.name));
        let found = self.pods().list(&own).await.map_err(failed(|| format!("list Pod {}", self.pod.full_name())))?;
        let own = found.items.into_iter().find(|pod| pod.uid().as_ref() == Some(&self.pod.uid));
        let is_missing = own.is_none();
        let controller = own.as_ref().and_then(|pod| {
            let controller = pod.owner_references().iter().find(|owner| owner.controller == Some(true))?;
            Some(controller.kind.clone())
        });
        let grace = own.and_then(|pod| pod.spec?.termination_grace_period_seconds?.try_into().ok());
        Ok(PodObject { controller, grace, is_missing })
    }

    /// The UIDs of the Pods in the namespace of vmctl's Pod that have not ended.
    pub async fn living_pods(&self) -> Result<BTreeSet<String>, RequestError> {
        let list = self.pods().list_metadata(&ListParams::default().fields(LIVING)).await;
        let list = list.map_err(failed(|| format!("list the Pods in the namespace {}", self.pod.namespace)))?;
        Ok(list.items.into_iter().filter_map(|pod| pod.metadata.uid).collect())
    }

    /// Creates a VM by server-side apply. Returns its UID; `None` if a VM of that name exists.
    pub async fn create(&self, name: &str, mut manifest: Value) -> Result<Option<String>, RequestError> {
        manifest["metadata"]["resourceVersion"] = json!(NO_VERSION);
        let vms = self.stored_as_is(&self.namespace);
        match vms.patch(name, &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&manifest)).await {
            Ok(vm) => Ok(vm.uid()),
            Err(kube::Error::Api(answer)) if answer.code == 409 => Ok(None),
            Err(source) => Err(failed(|| self.about("apply", name))(source)),
        }
    }

    /// Deletes a VM if it has that UID. It stays until its Pod is gone.
    pub async fn delete(&self, name: &str, uid: &str) -> Result<(), RequestError> {
        let parameters = DeleteParams {
            propagation_policy: Some(PropagationPolicy::Foreground),
            preconditions: Some(Preconditions { uid: Some(uid.to_owned()), resource_version: None }),
            ..DeleteParams::default()
        };
        match self.stored_as_is(&self.namespace).delete(name, &parameters).await {
            Ok(_) => Ok(()),
            // Another one has deleted it, or there is a new one of the name.
            Err(kube::Error::Api(answer)) if [404, 409].contains(&answer.code) => Ok(()),
            Err(source) => Err(failed(|| self.about("delete", name))(source)),
        }
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes a VM the owner of a claim, so that the garbage collector deletes the claim with it.
    pub async fn own_claim(&self, vm: &str, vm_uid: &str, claim: &str, uid: &str) -> Result<(), RequestError> {
        let owned = claims::owned_by(vm, vm_uid, claim, uid);
        match self.claims().patch_metadata(claim, &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&owned)).await {
            Ok(_) => Ok(()),
            // It is gone already.
            Err(kube::Error::Api(answer)) if [404, 409].contains(&answer.code) => Ok(()),
            Err(source) => {
                let what = format!("make vm {}/{vm} the owner of the claim {claim}", self.namespace);
                Err(RequestError { what, source })
            }
        }
    }

    /// The claims that the Pods of a VM may write to.
    pub async fn written_claims(&self, vm: &str) -> Result<BTreeSet<String>, RequestError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let of_vm = format!("app.kubernetes.io/name={APP_NAME},{INSTANCE_LABEL}={vm}");
        let list = pods.list(&ListParams::default().labels(&of_vm)).await;
        let list = list.map_err(failed(|| format!("list the Pods of vm {}/{vm}", self.namespace)))?;
        let volumes = list.items.into_iter().filter_map(|pod| pod.spec?.volumes).flatten();
        let claims = volumes.filter_map(|volume| volume.persistent_volume_claim);
        Ok(claims.filter(|claim| claim.read_only != Some(true)).map(|claim| claim.claim_name).collect())
    }

    /// The first of these claims that goes with a VM of that name.
    pub async fn claim_of_vm(&self, vm: &str, claims: Vec<String>) -> Result<Option<String>, RequestError> {
        for claim in claims {
            let found = self.claims().get_metadata_opt(&claim).await;
            let found = found.map_err(failed(|| format!("read the claim {}/{claim}", self.namespace)))?;
            let is_vms = found.is_some_and(|found| {
                let mut owners = found.owner_references().iter();
                owners.any(|owner| owner.kind == VirtualMachine::kind(&()) && owner.name == vm)
            });
            if is_vms {
                return Ok(Some(claim));
            }
        }
        Ok(None)
    }

    fn about(&self, verb: &str, name: &str) -> String {
        format!("{verb} vm {}/{name}", self.namespace)
    }
}

fn failed(what: impl FnOnce() -> String) -> impl FnOnce(kube::Error) -> RequestError {
    |source| RequestError { what: what(), source }
}
