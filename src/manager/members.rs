//! Makes, changes and deletes the VMs of pools with a template. What is to be done is [`crate::assignment::members`].

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api, Client, CustomResourceExt, Resource,
    api::{DeleteParams, ListParams, Patch, PatchParams, Preconditions},
    core::{DynamicObject, ObjectMeta},
};
use serde_json::json;
use tracing::info;

use crate::{
    api::{StoredVm, VirtualMachine, VmPool, pool::OldClaims},
    assignment::{
        Pool,
        members::{MemberPlan, MemberWrite},
    },
    claims,
    client::give_up::give_up,
    cluster::NO_VERSION,
    metrics::Metrics,
    object::POOL_LABEL,
    ownership::{MEMBER_MANAGER, is_made_by_pool},
};

/// The VMs of the pools of a namespace.
pub struct Members<'a> {
    /// The client, whose writes pass the fence.
    pub client: &'a Client,
    /// Counts writes.
    pub metrics: &'a Metrics,
    /// The namespace.
    pub namespace: String,
}

/// What the API server refused.
#[derive(Debug, thiserror::Error)]
pub enum MemberError {
    /// A request about a VM.
    #[error("{verb} VM {vm}")]
    Vm {
        /// The verb.
        verb: &'static str,
        /// The VM.
        vm: String,
        /// The answer.
        source: Box<kube::Error>,
    },
    /// A VM of this name exists, and the manager can't read it, or does not see it yet.
    #[error("create VM {vm}: a VM of this name exists that the manager has not seen")]
    Exists {
        /// The VM.
        vm: String,
    },
    /// The VMs of the pool could not be counted.
    #[error("list its VMs")]
    Count(#[source] Box<kube::Error>),
    /// The pool could not be asked for.
    #[error("is the pool as it was")]
    Pool(#[source] Box<kube::Error>),
}

impl Members<'_> {
    /// Does what the plan for the pool says. It ends at the first VM that the API server refuses to make or to change, because it will refuse the others
    /// too. A VM that has changed meanwhile is left out: the watch reports that.
    ///
    /// # Errors
    /// What the API server refused.
    pub async fn write(&self, pool: &Pool, plan: &MemberPlan) -> Result<(), MemberError> {
        if !self.is_current(pool).await? {
            return Ok(());
        }
        let (mut missing, mut refused) = (usize::MAX, None);
        if pool.reset.is_some() && plan.writes.iter().any(|write| matches!(write, MemberWrite::Create(_))) {
            missing = self.missing(pool).await?;
        }
        for write in &plan.writes {
            if matches!(write, MemberWrite::Create(_)) {
                if missing == 0 {
                    continue;
                }
                missing -= 1;
            }
            match (self.write_one(pool, write).await, write) {
                // A policy may protect this one.
                (Err(error), MemberWrite::Delete { .. }) => drop(refused.get_or_insert(error)),
                (result, _) => result?,
            }
        }
        refused.map_or(Ok(()), Err)
    }

    /// How many VMs the pool lacks. The watch may not have reported yet what was made a moment ago, and no second one is refused, because each has a name
    /// of its own.
    async fn missing(&self, pool: &Pool) -> Result<usize, MemberError> {
        let of_pool = ListParams::default().labels(&format!("{POOL_LABEL}={}", pool.name));
        let found = self.vms().list_metadata(&of_pool).await;
        let found = found.map_err(|error| MemberError::Count(Box::new(error)))?;
        let own = found.iter().filter(|vm| is_made(vm.meta(), pool)).count();
        Ok(usize::try_from(pool.replicas.unwrap_or_default()).unwrap_or(usize::MAX).saturating_sub(own))
    }

    /// Whether the pool is as the watch has it: the watch may be behind, and a VM must not be deleted because of a number that is not wanted any more.
    async fn is_current(&self, pool: &Pool) -> Result<bool, MemberError> {
        let pools =
            Api::<DynamicObject>::namespaced_with(self.client.clone(), &self.namespace, &VmPool::api_resource());
        let now = pools.get_opt(&pool.name).await.map_err(|error| MemberError::Pool(Box::new(error)))?;
        Ok(now.is_some_and(|now| {
            let metadata = &now.metadata;
            metadata.deletion_timestamp.is_none() && metadata.uid == pool.uid && metadata.generation == pool.generation
        }))
    }

    async fn write_one(&self, pool: &Pool, write: &MemberWrite) -> Result<(), MemberError> {
        let (verb, vm) = match write {
            MemberWrite::Create(vm) => ("create", vm),
            MemberWrite::Update { vm, .. } => ("apply", vm),
            MemberWrite::Delete { vm, .. } => ("delete", vm),
        };
        let result = match write {
            MemberWrite::Create(_) => self.apply(pool, vm, Some(NO_VERSION)).await,
            MemberWrite::Update { version, .. } => self.apply(pool, vm, version.as_deref()).await,
            MemberWrite::Delete { uid, version, .. } => self.delete(pool, vm, uid.as_deref(), version).await,
        };
        match result {
            Ok(()) => {
                let done = match write {
                    MemberWrite::Create(_) => "made",
                    MemberWrite::Update { .. } => "applied the template",
                    MemberWrite::Delete { .. } => "deleted",
                };
                self.metrics.wrote(if verb == "delete" { "delete" } else { "apply" }, "VirtualMachine");
                info!(vm = format!("{}/{vm}", self.namespace), pool = pool.name, done, "wrote a VM of a pool");
                Ok(())
            }
            Err(kube::Error::Api(answer)) if answer.code == 409 && matches!(write, MemberWrite::Create(_)) => {
                // The watch may not have reported yet what was made a moment ago.
                match self.is_own(pool, vm).await? {
                    true => Ok(()),
                    false => Err(MemberError::Exists { vm: vm.clone() }),
                }
            }
            Err(kube::Error::Api(answer)) if answer.code == 409 || answer.code == 404 && answer.details.is_some() => {
                Ok(())
            }
            Err(source) => Err(MemberError::Vm { verb, vm: vm.clone(), source: Box::new(source) }),
        }
    }

    async fn is_own(&self, pool: &Pool, vm: &str) -> Result<bool, MemberError> {
        let found = self.vms().get_metadata_opt(vm).await;
        let failed = |error| MemberError::Vm { verb: "get", vm: vm.to_owned(), source: Box::new(error) };
        // One that is gone again is made in the next round.
        Ok(found.map_err(failed)?.is_none_or(|vm| is_made(vm.meta(), pool)))
    }

    /// The VM with that name and UID.
    async fn stored(&self, name: &str, uid: Option<&str>) -> kube::Result<Option<VirtualMachine>> {
        let vms = Api::<StoredVm>::namespaced(self.client.clone(), &self.namespace);
        let found = vms.get_opt(name).await?.filter(|StoredVm(vm)| vm.metadata.uid.as_deref() == uid);
        Ok(found.map(|StoredVm(vm)| vm))
    }

    /// Deletes a VM. Its claims are given up only after that: if it comes to nothing they stay.
    async fn delete(&self, pool: &Pool, vm: &str, uid: Option<&str>, version: &Option<String>) -> kube::Result<()> {
        let deleted = match pool.reset {
            Some(OldClaims::Delete) => self.stored(vm, uid).await?,
            Some(OldClaims::Keep) | None => None,
        };
        let preconditions = Preconditions { uid: uid.map(str::to_owned), resource_version: version.clone() };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        self.vms().delete(vm, &parameters).await?;
        let Some(vm) = deleted else { return Ok(()) };
        for claim in vm.status.iter().flat_map(|status| &status.claims).filter(|claim| !claim.unused) {
            let goes = |found: &ObjectMeta| claims::goes_with(&vm, found) && found.uid == claim.uid;
            give_up(&self.claims(), MEMBER_MANAGER, &vm, &claim.name, goes).await?;
        }
        Ok(())
    }

    fn claims(&self) -> Api<PersistentVolumeClaim> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn apply(&self, pool: &Pool, vm: &str, version: Option<&str>) -> kube::Result<()> {
        let Some(template) = &pool.template else { return Ok(()) };
        let is_unused = pool.reset.is_some() && version == Some(NO_VERSION);
        let mut body = template.vm(&pool.name, pool.uid.as_deref(), vm, is_unused);
        body["metadata"]["resourceVersion"] = json!(version);
        let parameters = PatchParams::apply(MEMBER_MANAGER).force();
        self.vms().patch(vm, &parameters, &Patch::Apply(&body)).await.map(drop)
    }

    fn vms(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &VirtualMachine::api_resource())
    }
}

/// Whether the manager has made the VM for the pool.
fn is_made(vm: &ObjectMeta, pool: &Pool) -> bool {
    is_made_by_pool(vm) && vm.owner_references.iter().flatten().any(|owner| Some(&owner.uid) == pool.uid.as_ref())
}
