//! What vmctl asks of the API server. Needs only the rights of `example/vmctl/rbac.yaml`.

use std::{collections::BTreeSet, fmt::Debug, time::Duration};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DeleteParams, ListParams, Patch, PatchParams, Preconditions, PropagationPolicy},
    core::{DynamicObject, ObjectMeta},
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::time::timeout;

use super::{
    FIELD_MANAGER,
    derive::{PROTOTYPE_LABEL, PodFacts, PodObject},
    standing,
};
use crate::{
    api::{StoredVm, VirtualMachine},
    client::give_up::give_up,
    object::{INSTANCE_LABEL, ephemeral_claim},
    observed::vms_pod::vms_pod,
};

/// No object has this version, so an apply with it creates an object or is refused, and never merges into somebody else's.
const NO_VERSION: &str = "1";
/// The Pods whose containers run or are to run.
const LIVING: &str = "status.phase!=Failed,status.phase!=Succeeded";
/// How long an answer may take. An API server that has lost its power or its network never answers, and SIGTERM has to wait for a request.
const ANSWER: Duration = Duration::from_secs(30);
/// How many objects a list brings at once. vmctl's container has little memory.
const PAGE: u32 = 500;

/// A request that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct RequestError {
    what: String,
    source: kube::Error,
}

impl RequestError {
    /// Whether the API server refuses the request, or no request can be made of it, so that trying again does not help.
    pub fn is_final(&self) -> bool {
        match &self.source {
            kube::Error::Api(answer) => answer.code < 500 && answer.code != 429,
            kube::Error::BuildRequest(_) => true,
            _ => false,
        }
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
        let found = answered(self.stored_as_is(namespace).get_opt(name)).await;
        found.map_err(failed(|| format!("read the prototype vm {namespace}/{name}")))
    }

    /// The metadata of a VM.
    pub async fn vm(&self, name: &str) -> Result<Option<ObjectMeta>, RequestError> {
        let found = answered(self.stored_as_is(&self.namespace).get_metadata_opt(name)).await;
        Ok(found.map_err(failed(|| self.about("read", name)))?.map(|vm| vm.metadata))
    }

    /// A VM with all its fields.
    pub async fn whole_vm(&self, name: &str) -> Result<Option<VirtualMachine>, RequestError> {
        let found = answered(self.vms().get_opt(name)).await;
        Ok(found.map_err(failed(|| self.about("read", name)))?.map(|StoredVm(vm)| vm))
    }

    /// The metadata of all VMs of a prototype of that name.
    pub async fn vms_of(&self, prototype: &str) -> Result<Vec<ObjectMeta>, RequestError> {
        let labels = ListParams::default().labels(&format!("{PROTOTYPE_LABEL}={prototype}"));
        let vms = all_metadata(&self.stored_as_is(&self.namespace), labels).await;
        vms.map_err(failed(|| format!("list the VMs of {prototype} in the namespace {}", self.namespace)))
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &self.pod.namespace)
    }

    /// What the object of vmctl's Pod says.
    pub async fn pod(&self) -> Result<PodObject, RequestError> {
        let own = ListParams::default().fields(&format!("metadata.name={}", self.pod.name));
        let found = answered(self.pods().list(&own)).await;
        let found = found.map_err(failed(|| format!("list Pod {}", self.pod.full_name())))?;
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
        let pods = all_metadata(&self.pods(), ListParams::default().fields(LIVING)).await;
        let pods = pods.map_err(failed(|| format!("list the Pods in the namespace {}", self.pod.namespace)))?;
        Ok(pods.into_iter().filter_map(|pod| pod.uid).collect())
    }

    /// Creates a VM by server-side apply. Returns its UID; `None` if a VM of that name exists.
    pub async fn create(&self, name: &str, mut manifest: Value) -> Result<Option<String>, RequestError> {
        manifest["metadata"]["resourceVersion"] = json!(NO_VERSION);
        let vms = self.stored_as_is(&self.namespace);
        match answered(vms.patch(name, &PatchParams::apply(FIELD_MANAGER), &Patch::Apply(&manifest))).await {
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
        match answered(self.stored_as_is(&self.namespace).delete(name, &parameters)).await {
            Ok(_) => Ok(()),
            // Another one has deleted it, or there is a new one of the name.
            Err(kube::Error::Api(answer)) if [404, 409].contains(&answer.code) => Ok(()),
            Err(source) => Err(failed(|| self.about("delete", name))(source)),
        }
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    /// Makes a VM the owner of a claim, so that the garbage collector deletes the claim with it, if it is one that goes with the VM
    /// ([`standing::is_to_own`]). `uid`: only if the claim has that one.
    pub async fn own_claim(&self, vm: &VirtualMachine, claim: &str, uid: Option<&str>) -> Result<(), RequestError> {
        let goes = |found: &ObjectMeta| {
            standing::is_to_own(vm, found) && uid.is_none_or(|uid| found.uid.as_deref() == Some(uid))
        };
        let what = || format!("make vm {}/{} the owner of the claim {claim}", self.namespace, vm.name_any());
        answered(give_up(&self.claims(), FIELD_MANAGER, vm, claim, goes)).await.map_err(failed(what))
    }

    async fn claim(&self, name: &str) -> Result<Option<ObjectMeta>, RequestError> {
        let found = answered(self.claims().get_metadata_opt(name)).await;
        let found = found.map_err(failed(|| format!("read the claim {}/{name}", self.namespace)))?;
        Ok(found.map(|claim| claim.metadata))
    }

    /// The claims that the Pod of a VM may write to. Whose a Pod is [`vms_pod`] decides: anybody may give a Pod the VM's labels.
    pub async fn written_claims(&self, vm: &str) -> Result<BTreeSet<String>, RequestError> {
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.namespace);
        let of_vm = format!("{INSTANCE_LABEL}={vm}");
        let list = answered(pods.list(&ListParams::default().labels(&of_vm))).await;
        let list = list.map_err(failed(|| format!("list the Pods of vm {}/{vm}", self.namespace)))?;
        let Some(found) = self.whole_vm(vm).await? else { return Ok(BTreeSet::new()) };
        let pod = vms_pod(&found, &list.items).cloned();
        let Some(pod) = pod else { return Ok(BTreeSet::new()) };
        let name = pod.name_any();
        let volumes = pod.spec.and_then(|spec| spec.volumes).into_iter().flatten();
        let claims = volumes.filter_map(|volume| match volume.persistent_volume_claim {
            Some(claim) => Some(claim.claim_name).filter(|_| claim.read_only != Some(true)),
            None => volume.ephemeral.map(|_| ephemeral_claim(&name, &volume.name)),
        });
        Ok(claims.collect())
    }

    /// The first of these claims that goes with a VM of that name.
    pub async fn claim_of_vm(&self, vm: &str, claims: Vec<String>) -> Result<Option<String>, RequestError> {
        for claim in claims {
            let is_vms = self.claim(&claim).await?.is_some_and(|found| {
                let mut owners = found.owner_references.iter().flatten();
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

/// Waits for an answer only so long. The request is then given up; if it was carried out all the same, the next look at the cluster shows it.
async fn answered<T>(request: impl Future<Output = Result<T, kube::Error>>) -> Result<T, kube::Error> {
    timeout(ANSWER, request).await.unwrap_or_else(|_| {
        let none = format!("no answer within {} s, or only that the API server is busy", ANSWER.as_secs());
        Err(kube::Error::Service(none.into()))
    })
}

/// The metadata of all objects that a list has. Of its biggest part only who has applied it with vmctl is kept.
async fn all_metadata<K>(api: &Api<K>, mut page: ListParams) -> Result<Vec<ObjectMeta>, kube::Error>
where
    K: Clone + DeserializeOwned + Debug,
{
    page.limit = Some(PAGE);
    let mut all = vec![];
    loop {
        let list = answered(api.list_metadata(&page)).await?;
        all.extend(list.items.into_iter().map(|object| {
            let mut metadata = object.metadata;
            let entries = metadata.managed_fields.get_or_insert_default();
            entries.retain(|entry| entry.manager.as_deref() == Some(FIELD_MANAGER));
            entries.iter_mut().for_each(|entry| entry.fields_v1 = None);
            metadata
        }));
        page.continue_token = list.metadata.continue_.filter(|token| !token.is_empty());
        if page.continue_token.is_none() {
            return Ok(all);
        }
    }
}

#[cfg(test)]
mod tests {
    use kube::core::Status;

    use super::*;

    #[test]
    fn only_what_a_later_try_may_bring_is_tried_again() {
        let answer = |code: u16| kube::Error::Api(Box::new(Status { code, ..Status::default() }));
        let unnamed = kube::core::request::Error::Validation("a name is required".into());
        for (source, is_final) in [
            (answer(403), true),
            (answer(422), true),
            (answer(429), false),
            (answer(500), false),
            (answer(503), false),
            (kube::Error::BuildRequest(unnamed), true),
            (kube::Error::Service("no answer".into()), false),
        ] {
            let error = RequestError { what: "read vm orchard/apple".into(), source };
            assert_eq!(error.is_final(), is_final, "{error:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_never_answers_holds_up_nothing_for_ever() {
        let error = answered(std::future::pending::<Result<(), kube::Error>>()).await.unwrap_err();
        assert!(matches!(error, kube::Error::Service(_)), "{error}");
        assert!(answered(std::future::ready(Ok(()))).await.is_ok());
    }
}
