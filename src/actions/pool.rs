//! Gives VMs of pools to users, and takes them back. What follows from what is [`crate::assignment`]; this reads and writes.
//!
//! ```text
//!  ┌▶ list pools and VMs ─▶ assign ─▶ a write of status.assignment ─┐
//!  │                           ├────▶ a write of spec.vm.state ─────┤
//!  │                           └────▶ the person has this VM        │
//!  └────────────────────────────────────────────────────────────────┘
//! ```
//!
//! Each write names the resourceVersion that was read. If the API server answers that the VM has changed, or is gone, everything is read
//! again. Whoever ends between two writes has done a part that the next call, or the manager, completes: an assignment that
//! [`starts`](crate::api::Assignment::starts) its VM is finished when the VM has [`STARTED_FOR_ANNOTATION`] with its ID.
//!
//! Rights that the client needs: `list` on `vms` and `vmpools`, `patch` on `vms/status` and on `vms`.

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, CustomResourceExt, ResourceExt,
    api::{ListParams, Patch, PatchParams},
    core::DynamicObject,
};
use serde_json::{Value, json};

use super::{
    Change, Decision, Trial,
    power::{self, Command},
};
use crate::{
    api::{PowerState, StoredVm, VirtualMachine, VmPool},
    assignment::{self, Assignee, Member, Pool, Pools, Start, Step, Write},
    object::{STARTED_FOR_ANNOTATION, UNUSED_ANNOTATION},
    power::until,
};

/// How often others may be faster before an action gives up.
const TRIES: usize = 200;
/// How many objects a list has in one answer of the API server.
const CHUNK: u32 = 500;

/// The pools of a namespace, and who acts on them.
#[derive(Clone)]
pub struct PoolHandle {
    /// The client, with the rights of whoever acts.
    pub client: Client,
    /// The namespace.
    pub namespace: String,
    /// The name under which the API server notes the writes.
    pub field_manager: String,
    /// What time it is.
    pub clock: fn() -> Timestamp,
}

/// The pools and VMs of a namespace as they were at one time.
#[derive(Clone, Debug)]
pub struct View {
    /// The pools.
    pub pools: Pools,
    /// All VMs, as the API server has them.
    pub vms: Vec<VirtualMachine>,
    /// What decides of each of them.
    pub members: Vec<Member>,
}

/// A VM that somebody has from a pool.
#[derive(Clone, Debug)]
pub struct Assigned {
    /// The VM as it is now. After a trial it is as it was.
    pub vm: VirtualMachine,
    /// Whether she did not have it before.
    pub is_new: bool,
    /// Whether it was started for her.
    pub is_started: bool,
}

/// Why an action failed.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    /// A request failed.
    #[error("{verb} {resource}")]
    Api {
        /// The verb, as rules of roles have it.
        verb: &'static str,
        /// The resource, as rules of roles have it.
        resource: &'static str,
        /// The error.
        source: Box<kube::Error>,
    },
    /// There is no pool of that name.
    #[error("there is no pool {pool} in the namespace {namespace}")]
    NoPool {
        /// The name.
        pool: String,
        /// The namespace.
        namespace: String,
    },
    /// There is no VM of that name.
    #[error("there is no VM {vm} in the namespace {namespace}")]
    NoVm {
        /// The name.
        vm: String,
        /// The namespace.
        namespace: String,
    },
    /// The person gets no VM.
    #[error(transparent)]
    Refused(#[from] assignment::NotAssigned),
    /// The person has a VM, and it can't be started.
    #[error("the VM {vm} is assigned, but is not started: {refusal}")]
    Start {
        /// The VM.
        vm: String,
        /// Why.
        refusal: power::PowerRefusal,
    },
    /// The VM is somebody else's by now.
    #[error("somebody else changed it: {user} has it now")]
    Changed {
        /// Who has it.
        user: String,
    },
    /// Others change the same VMs all the time.
    #[error("others were faster {TRIES} times: try again")]
    Busy,
}

impl PoolError {
    fn api(verb: &'static str, resource: &'static str) -> impl FnOnce(kube::Error) -> Self {
        move |source| Self::Api { verb, resource, source: Box::new(source) }
    }
}

impl View {
    /// The VM of that name.
    pub fn vm(&self, name: &str) -> Option<&VirtualMachine> {
        self.vms.iter().find(|vm| vm.name_any() == name)
    }
}

/// What decides of a VM as it is now.
pub fn member(vm: &VirtualMachine, now: Timestamp) -> Member {
    let is_on = until::until(vm, now).in_force.is_some_and(|it| it.state == PowerState::Running);
    let start = match power::decide(vm, Command::Start { until: None }, None, false, now) {
        _ if is_on => Start::Runs,
        Ok(Decision::Unchanged(_)) => Start::Runs,
        Ok(Decision::Write { .. }) => Start::Needed,
        Err(_) => Start::Refused,
    };
    Member::new(vm, start)
}

impl PoolHandle {
    /// Gives the user a VM of the pool: the one that she has, or the first one that she can get. It is started if it does not run.
    ///
    /// # Errors
    /// Why she has none, or has one that is not started.
    pub async fn assign(&self, pool: &str, who: &Assignee) -> Result<Assigned, PoolError> {
        self.assign_noting(pool, who, |_| {}).await
    }

    /// The same, and calls `taken` with each VM that is hers from then on, whatever becomes of the rest.
    ///
    /// # Errors
    /// As those.
    pub async fn assign_noting(
        &self,
        pool: &str,
        who: &Assignee,
        taken: impl Fn(&VirtualMachine),
    ) -> Result<Assigned, PoolError> {
        let (mut is_new, mut is_started) = (false, false);
        for _ in 0..TRIES {
            let view = self.read(pool).await?;
            let step = assignment::assign(pool, &view.pools, &view.members, who, (self.clock)())?;
            match &step {
                Step::Done(vm) => {
                    let Some(vm) = view.vms.into_iter().find(|stored| stored.name_any() == *vm) else { continue };
                    return Ok(Assigned { vm, is_new, is_started });
                }
                Step::Take(write) => {
                    if let Some(vm) = self.write(write, None).await? {
                        is_new = true;
                        taken(&vm);
                    }
                }
                Step::Release(write) | Step::Renew(write) => drop(self.write(write, None).await?),
                Step::Start { vm, id } => {
                    if let Some(vm) = view.vm(vm) {
                        is_started |= self.start(vm, id).await?;
                    }
                }
            }
        }
        Err(PoolError::Busy)
    }

    /// What [`Self::assign`] would do first.
    ///
    /// # Errors
    /// As those.
    pub async fn try_assign(&self, pool: &str, who: &Assignee, trial: Trial) -> Result<Assigned, PoolError> {
        let view = self.read(pool).await?;
        let step = assignment::assign(pool, &view.pools, &view.members, who, (self.clock)())?;
        let (name, is_new) = match &step {
            Step::Take(write) | Step::Release(write) | Step::Renew(write) => {
                if trial == Trial::Server {
                    self.write(write, Some(trial)).await?;
                }
                (&write.vm, matches!(step, Step::Take(_)))
            }
            Step::Start { vm, .. } | Step::Done(vm) => (vm, false),
        };
        let vm = view.vm(name).cloned();
        let vm = vm.ok_or_else(|| PoolError::NoVm { vm: name.clone(), namespace: self.namespace.clone() })?;
        Ok(Assigned { vm, is_new, is_started: false })
    }

    /// Takes all VMs of the pool from the user, and returns them. A pool that does not exist any more may have given them.
    ///
    /// # Errors
    /// If there is neither such a pool nor such a VM, or of requests.
    pub async fn release(
        &self,
        pool: &str,
        user: &str,
        trial: Option<Trial>,
    ) -> Result<Vec<VirtualMachine>, PoolError> {
        self.release_noting(pool, user, trial, |_| {}).await
    }

    /// The same, and calls `gone` with each VM that is hers no more, whatever becomes of the others.
    ///
    /// # Errors
    /// As those.
    pub async fn release_noting(
        &self,
        pool: &str,
        user: &str,
        trial: Option<Trial>,
        gone: impl Fn(&VirtualMachine),
    ) -> Result<Vec<VirtualMachine>, PoolError> {
        let mut released = Vec::new();
        for _ in 0..TRIES {
            let view = self.list().await?;
            let writes = assignment::release(pool, &view.members, user);
            if writes.is_empty() {
                return if released.is_empty() { self.known(view, pool).map(|_| released) } else { Ok(released) };
            }
            for write in &writes {
                if trial == Some(Trial::Client) {
                    released.extend(view.vm(&write.vm).cloned());
                } else if let Some(vm) = self.write(write, trial).await? {
                    gone(&vm);
                    released.push(vm);
                }
            }
            if trial.is_some() {
                return Ok(released);
            }
        }
        Err(PoolError::Busy)
    }

    /// Starts a VM for an assignment if nobody has meanwhile: whoever gave it did not come to that. Returns whether it was started.
    ///
    /// # Errors
    /// As those of [`Self::start`].
    pub async fn finish_start(&self, vm: &str, id: &str) -> Result<bool, PoolError> {
        let Some(vm) = self.get(vm).await? else { return Ok(false) };
        let pending = member(&vm, (self.clock)()).pending_start();
        if pending.as_deref() == Some(id) { self.start(&vm, id).await } else { Ok(false) }
    }

    /// Starts a VM that is assigned to nobody, so that it is warm. Returns whether it was started: somebody may have got it meanwhile.
    ///
    /// # Errors
    /// As those of [`Self::start`].
    pub async fn warm(&self, vm: &str) -> Result<bool, PoolError> {
        let Some(vm) = self.get(vm).await? else { return Ok(false) };
        let member = member(&vm, (self.clock)());
        if member.held.is_some() || member.is_deleted || member.start != Start::Needed {
            return Ok(false);
        }
        self.start_as(&vm, None).await
    }

    /// Makes a VM nobody's, and returns it, and the user who had it. `None`: it was nobody's.
    ///
    /// # Errors
    /// If there is no such VM, or of requests.
    pub async fn unassign(
        &self,
        name: &str,
        trial: Option<Trial>,
    ) -> Result<Option<(VirtualMachine, String)>, PoolError> {
        self.unassign_if(name, None, trial).await
    }

    /// Takes a VM from this user, and returns it. `None`: it was nobody's.
    ///
    /// # Errors
    /// If somebody else has it, there is no such VM, or of requests.
    pub async fn take_back(&self, name: &str, user: &str) -> Result<Option<VirtualMachine>, PoolError> {
        Ok(self.unassign_if(name, Some(user), None).await?.map(|(vm, _)| vm))
    }

    async fn unassign_if(
        &self,
        name: &str,
        expected: Option<&str>,
        trial: Option<Trial>,
    ) -> Result<Option<(VirtualMachine, String)>, PoolError> {
        for _ in 0..TRIES {
            let vm = match self.vms().get(name).await {
                Ok(StoredVm(vm)) => vm,
                Err(kube::Error::Api(answer)) if answer.code == 404 && answer.details.is_some() => {
                    return Err(PoolError::NoVm { vm: name.to_owned(), namespace: self.namespace.clone() });
                }
                Err(error) => return Err(PoolError::api("get", "vms")(error)),
            };
            let member = member(&vm, (self.clock)());
            let (Some(write), Some(held)) = (assignment::unassign(&member), &member.held) else { return Ok(None) };
            if expected.is_some_and(|user| user != held.user) {
                return Err(PoolError::Changed { user: held.user.clone() });
            }
            if trial == Some(Trial::Client) {
                return Ok(Some((vm, held.user.clone())));
            }
            if let Some(vm) = self.write(&write, trial).await? {
                return Ok(Some((vm, held.user.clone())));
            }
        }
        Err(PoolError::Busy)
    }

    /// The pools and VMs of the namespace, if this pool is among them.
    async fn read(&self, pool: &str) -> Result<View, PoolError> {
        self.known(self.list().await?, pool)
    }

    fn known(&self, view: View, pool: &str) -> Result<View, PoolError> {
        if !view.pools.contains_key(pool) {
            return Err(PoolError::NoPool { pool: pool.to_owned(), namespace: self.namespace.clone() });
        }
        Ok(view)
    }

    /// The pools and VMs of the namespace as they are now, and not as a cache has them.
    ///
    /// # Errors
    /// Of requests.
    pub async fn list(&self) -> Result<View, PoolError> {
        let pools =
            Api::<DynamicObject>::namespaced_with(self.client.clone(), &self.namespace, &VmPool::api_resource());
        let pools = pools.list(&ListParams::default()).await.map_err(PoolError::api("list", "vmpools"))?;
        let pools = pools.iter().map(|pool| (pool.name_any(), Pool::read(pool))).collect();
        let (api, mut vms) = (self.vms(), Vec::new());
        let mut parameters = ListParams::default().limit(CHUNK);
        loop {
            let page = api.list(&parameters).await.map_err(PoolError::api("list", "vms"))?;
            parameters.continue_token = page.metadata.continue_.clone().filter(|token| !token.is_empty());
            vms.extend(page.items.into_iter().map(|StoredVm(vm)| vm));
            if parameters.continue_token.is_none() {
                break;
            }
        }
        let now = (self.clock)();
        let members = vms.iter().map(|vm| member(vm, now)).collect();
        Ok(View { pools, vms, members })
    }

    /// Writes an assignment. `None`: the VM has changed since it was read, or is gone.
    ///
    /// # Errors
    /// Any other answer.
    pub async fn write(&self, write: &Write, trial: Option<Trial>) -> Result<Option<VirtualMachine>, PoolError> {
        let patch = write.patch();
        let parameters = PatchParams { dry_run: trial.is_some(), ..self.parameters() };
        let answer = self.vms().patch_status(&write.vm, &parameters, &Patch::Merge(&patch)).await;
        unless_changed(answer).map_err(PoolError::api("patch", "vms/status"))
    }

    /// Takes the annotation away that says that nobody has had the VM, whatever else has changed. `None`: the VM is gone, or another one.
    ///
    /// # Errors
    /// Any other answer.
    pub async fn mark_used(&self, vm: &str, uid: Option<&str>) -> Result<Option<VirtualMachine>, PoolError> {
        let patch = json!({ "metadata": { "uid": uid, "annotations": { UNUSED_ANNOTATION: null } } });
        let answer = self.vms().patch(vm, &self.parameters(), &Patch::Merge(&patch)).await;
        unless_changed(answer).map_err(PoolError::api("patch", "vms"))
    }

    /// Starts a VM for an assignment, and notes that. If it runs already, that is noted. Returns whether the VM was started.
    ///
    /// # Errors
    /// If it may not be started, or the API server refuses.
    pub async fn start(&self, vm: &VirtualMachine, id: &str) -> Result<bool, PoolError> {
        self.start_as(vm, Some(id)).await
    }

    async fn start_as(&self, vm: &VirtualMachine, id: Option<&str>) -> Result<bool, PoolError> {
        let name = vm.name_any();
        let refused = |refusal| PoolError::Start { vm: name.clone(), refusal };
        let decision =
            power::decide(vm, Command::Start { until: None }, None, false, (self.clock)()).map_err(refused)?;
        let (mut patch, is_needed) = match decision {
            Decision::Unchanged(_) => (json!({}), false),
            Decision::Write { change: Change::Merge(body) | Change::Apply(body), .. } => (body, true),
        };
        patch["metadata"]["resourceVersion"] = json!(vm.resource_version());
        if let Some(id) = id {
            match &mut patch["metadata"]["annotations"] {
                Value::Object(annotations) => drop(annotations.insert(STARTED_FOR_ANNOTATION.into(), json!(id))),
                annotations => *annotations = json!({ STARTED_FOR_ANNOTATION: id }),
            }
        }
        let answer = self.vms().patch(&name, &self.parameters(), &Patch::Merge(&patch)).await;
        let written = unless_changed(answer).map_err(PoolError::api("patch", "vms"))?;
        Ok(is_needed && written.is_some())
    }

    /// A VM as it is now. `None`: it is gone.
    async fn get(&self, name: &str) -> Result<Option<VirtualMachine>, PoolError> {
        match self.vms().get(name).await {
            Ok(StoredVm(vm)) => Ok(Some(vm)),
            Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(None),
            Err(error) => Err(PoolError::api("get", "vms")(error)),
        }
    }

    fn vms(&self) -> Api<StoredVm> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    fn parameters(&self) -> PatchParams {
        PatchParams { field_manager: Some(self.field_manager.clone()), ..PatchParams::default() }
    }
}

/// The written VM, or `None` if somebody else has changed or deleted it since it was read.
fn unless_changed(answer: kube::Result<StoredVm>) -> kube::Result<Option<VirtualMachine>> {
    match answer {
        Ok(StoredVm(vm)) => Ok(Some(vm)),
        Err(kube::Error::Api(answer)) if answer.code == 409 || answer.code == 404 && answer.details.is_some() => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
