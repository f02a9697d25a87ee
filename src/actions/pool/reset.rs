//! What the manager does to bring the disks of a VM back between two users. Which step is next is [`crate::assignment::reset`], decided from the VM and the
//! pools as they are now; each write names the resourceVersion that was read, so whatever happens between two of them, the next look goes on.
//!
//! Rights that the client needs: those of [`PoolHandle`], `list` and `get` on `persistentvolumeclaims`, and `delete` for pools that delete old claims.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api, Resource, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions},
    core::PartialObjectMeta,
};
use serde_json::{Value, json};

use super::{CHUNK, PoolError, PoolHandle, member, unless_changed};
use crate::{
    actions::power::{self, Change, Command, Decision},
    api::{VirtualMachine, status::ResetState},
    assignment::{
        Member,
        reset::{Claim, Standing, Step, look, may_be_deleted, renewed},
    },
    object::{APP_NAME, MANAGED_BY, named_vm},
};

/// A claim, without its spec.
type ClaimMetadata = PartialObjectMeta<PersistentVolumeClaim>;

/// What was done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Done {
    /// The step.
    Step(Step),
    /// These claims were deleted.
    Deleted(Vec<String>),
}

impl PoolHandle {
    /// Does the next step of the reset of a VM. `None`: there is none, or the VM has changed meanwhile, which the watch reports.
    ///
    /// # Errors
    /// Of requests.
    pub async fn reset(&self, name: &str) -> Result<Option<Done>, PoolError> {
        let Some(vm) = self.get(name).await? else { return Ok(None) };
        let (pools, member) = (self.pools().await?, member(&vm, (self.clock)()));
        let Standing::Do(step) = look(&member, &pools) else { return Ok(None) };
        let done = Done::Step(step);
        let written = match step {
            Step::Mark => self.write_reset(&member, json!({ "state": null })).await?,
            Step::Finish => self.write_reset(&member, json!({ "state": ResetState::Fresh })).await?,
            Step::Stop => self.stop(&vm).await?,
            Step::Renew => {
                let done = renewed(&member, &pools, &self.claims().await?);
                let body = json!({
                    "state": done.state, "covers": done.covers, "disks": done.disks, "replaced": done.replaced,
                });
                self.write_reset(&member, body).await?
            }
            Step::Delete => {
                let deleted = self.delete_replaced(&member).await?;
                self.write_reset(&member, json!({ "replaced": null })).await?;
                return Ok(Some(Done::Deleted(deleted)));
            }
        };
        Ok(written.map(|_| done))
    }

    async fn write_reset(&self, member: &Member, body: Value) -> Result<Option<VirtualMachine>, PoolError> {
        let patch = json!({ "metadata": { "resourceVersion": member.version }, "status": { "diskReset": body } });
        let answer = self.vms().patch_status(&member.name, &self.parameters(), &Patch::Merge(&patch)).await;
        unless_changed(answer).map_err(PoolError::api("patch", "vms/status"))
    }

    async fn stop(&self, vm: &VirtualMachine) -> Result<Option<VirtualMachine>, PoolError> {
        let command = Command::Stop { force: false, until: None };
        let change = match power::decide(vm, command, None, false, (self.clock)()) {
            Ok(Decision::Write { change, .. }) => change,
            Ok(Decision::Unchanged(_)) | Err(_) => return Ok(None),
        };
        let (name, version) = (vm.name_any(), json!(vm.resource_version()));
        let answer = match change {
            Change::Merge(mut body) => {
                body["metadata"]["resourceVersion"] = version;
                self.vms().patch(&name, &self.parameters(), &Patch::Merge(&body)).await
            }
            Change::Apply(mut body) => {
                body["metadata"]["resourceVersion"] = version;
                body["apiVersion"] = json!(VirtualMachine::api_version(&()));
                body["kind"] = json!(VirtualMachine::kind(&()));
                let parameters = PatchParams { force: true, ..self.parameters() };
                self.vms().patch(&name, &parameters, &Patch::Apply(&body)).await
            }
        };
        unless_changed(answer).map_err(PoolError::api("patch", "vms"))
    }

    /// All claims of the namespace as they are now.
    async fn claims(&self) -> Result<Vec<Claim>, PoolError> {
        let (api, mut claims) = (self.claims_api(), Vec::new());
        let mut parameters = ListParams::default().limit(CHUNK);
        loop {
            let page = api.list_metadata(&parameters).await;
            let page = page.map_err(PoolError::api("list", "persistentvolumeclaims"))?;
            parameters.continue_token = page.metadata.continue_.clone().filter(|token| !token.is_empty());
            claims.extend(page.items.iter().map(claim));
            if parameters.continue_token.is_none() {
                return Ok(claims);
            }
        }
    }

    /// Deletes the claims that a reset has replaced, as far as they still are what they were. Returns their names.
    async fn delete_replaced(&self, member: &Member) -> Result<Vec<String>, PoolError> {
        let (api, mut deleted) = (self.claims_api(), Vec::new());
        for replaced in &member.reset.done.replaced {
            let found = api.get_metadata_opt(&replaced.name).await;
            let Some(found) = found.map_err(PoolError::api("get", "persistentvolumeclaims"))? else { continue };
            if found.metadata.deletion_timestamp.is_some() || !may_be_deleted(member, &claim(&found)) {
                continue;
            }
            let preconditions = Preconditions { uid: found.uid(), resource_version: found.resource_version() };
            let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
            match api.delete(&replaced.name, &parameters).await {
                Ok(_) => deleted.push(replaced.name.clone()),
                Err(kube::Error::Api(answer)) if answer.code == 404 => {}
                Err(error) => return Err(PoolError::api("delete", "persistentvolumeclaims")(error)),
            }
        }
        Ok(deleted)
    }

    fn claims_api(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }
}

fn claim(claim: &ClaimMetadata) -> Claim {
    let label = |name: &str| claim.labels().get(name).map(String::as_str);
    let is_ours =
        label("app.kubernetes.io/managed-by") == Some(MANAGED_BY) && label("app.kubernetes.io/name") == Some(APP_NAME);
    Claim {
        name: claim.name_any(),
        uid: claim.uid().unwrap_or_default(),
        created: claim.metadata.creation_timestamp.as_ref().map(|time| time.0),
        vm: named_vm(claim.annotations(), claim.labels()).filter(|_| is_ours).cloned(),
    }
}
