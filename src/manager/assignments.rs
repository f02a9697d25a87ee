//! Keeps the pools: ends assignments, notes uses, finishes starts, and writes the status of each pool. What is to be done is
//! [`upkeep`]; this finds the VMs that matter, writes, and waits until something changes or is due.
//!
//! ```text
//!  a VM of a pool changes ─┐
//!  a pool changes ─────────┼─▶ upkeep of each namespace ─▶ writes; the VMs that pools make are written by `members`
//!  something is due ───────┘          └─▶ when something is due next
//! ```
//!
//! VMs that belong to no pool and are assigned to nobody cost nothing but a look at their text.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{FutureExt, future::BoxFuture};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{
    Api, Client, CustomResourceExt, Resource,
    api::{Patch, PatchParams},
    core::DynamicObject,
    runtime::reflector::{ObjectRef, Store},
};
use serde_json::json;
use tokio::{
    sync::{Notify, watch},
    time::sleep,
};
use tracing::{debug, info, warn};

use super::{
    members::{MemberError, Members},
    pools::{AllPools, KnownPool},
    random::random,
};
use crate::{
    actions::pool::{PoolError, PoolHandle, member},
    api::{VmPool, pool::VmPoolStatus},
    assignment::{
        Member, NAME_END, Pools, Write,
        members::{self, MemberPlan},
        upkeep::{Why, status, upkeep},
    },
    cluster::packed::PackedVm,
    metrics::Metrics,
    object::UNUSED_ANNOTATION,
    ownership::{POOL_MANAGER, STATUS_MANAGER},
    process::{ErrorChain, RepeatFilter, clock, lock},
    schedule,
};

/// What a VM's text has if the VM belongs to a pool, is assigned, or was made by a pool.
const SIGNS: [&str; 4] =
    [r#""pools":[""#, r#""assignment":{""#, r#""kind":"VmPool""#, r#""vmoperator.jdrupes.org/pool":"#];

/// Learns which VMs change.
#[derive(Clone, Default)]
pub struct Changes(Arc<Inner>);

#[derive(Default)]
struct Inner {
    /// The members as they were last, each with its resourceVersion.
    known: Mutex<HashMap<ObjectRef<PackedVm>, Option<Member>>>,
    /// The VMs that pools want, by their names: one that is another's may be in the way. Known before the VMs are read, so that no change of
    /// one is missed.
    wanted: Mutex<HashSet<ObjectRef<PackedVm>>>,
    /// The VMs that are marked as new and were seen in use, with their UIDs: what is true of a VM for a moment only counts too.
    used: Mutex<HashMap<ObjectRef<PackedVm>, Option<String>>>,
    notify: Notify,
}

impl Changes {
    /// A VM has changed, or is gone.
    pub fn observe(&self, vm: &PackedVm) {
        let was_member = || matches!(lock(&self.0.known).get(&ObjectRef::from_obj(vm)), Some(Some(_)));
        let is_wanted = || lock(&self.0.wanted).contains(&ObjectRef::from_obj(vm));
        if vm.mentions(UNUSED_ANNOTATION)
            && let Ok(read) = vm.read()
            && member(&read, clock::now()).is_to_be_marked()
        {
            lock(&self.0.used).insert(ObjectRef::from_obj(vm), read.metadata.uid);
        }
        if is_member(vm) || was_member() || is_wanted() {
            self.0.notify.notify_one();
        }
    }
}

fn is_member(vm: &PackedVm) -> bool {
    SIGNS.iter().any(|sign| vm.mentions(sign))
}

/// Keeps the pools of a namespace, or of all namespaces.
pub struct Assignments {
    /// The client, whose writes pass the fence.
    pub client: Client,
    /// The VMs.
    pub vms: Store<PackedVm>,
    /// Becomes true when all VMs are listed.
    pub started: watch::Receiver<bool>,
    /// The pools.
    pub pools: watch::Receiver<AllPools>,
    /// Which VMs change.
    pub changes: Changes,
    /// Counts writes.
    pub metrics: Arc<Metrics>,
}

/// What could not be done, and is tried again.
#[derive(Debug, thiserror::Error)]
enum KeepError {
    #[error("VM {vm}")]
    Vm { vm: String, source: PoolError },
    #[error("pool {pool}: {what}")]
    Pool { pool: String, what: &'static str, source: Box<kube::Error> },
    #[error("pool {pool}")]
    Members { pool: String, source: MemberError },
}

impl Assignments {
    /// Works until it is dropped.
    pub fn work(self) -> BoxFuture<'static, ()> {
        self.run().boxed()
    }

    async fn run(mut self) {
        if self.started.wait_for(|started| *started).await.is_err() {
            return;
        }
        let (mut failures, mut repeats) = (0, RepeatFilter::default());
        loop {
            let pools = self.pools.borrow_and_update().clone();
            let next = match pools {
                // Nobody knows which pools exist.
                None => None,
                Some(pools) => match self.keep(&pools).await {
                    Ok(next) => {
                        (failures, _) = (0, repeats.clear());
                        next.map(|next| next.duration_since(clock::now()).max(SignedDuration::ZERO).unsigned_abs())
                    }
                    Err(error) => {
                        let message = ErrorChain(&error).to_string();
                        if repeats.is_new(&message) {
                            warn!("the pools can't be kept as they should be: {message}");
                        }
                        failures += 1;
                        Some(schedule::back_off(failures - 1))
                    }
                },
            };
            // A sleep may end a little early by the other clock.
            let due = async {
                match next {
                    Some(pause) => sleep(pause + Duration::from_millis(100)).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = due => {}
                () = self.changes.0.notify.notified() => {}
                changed = self.pools.changed() => if changed.is_err() { return },
            }
        }
    }

    /// Does what is due in all namespaces. Returns when the next time is.
    async fn keep(&self, all: &BTreeMap<(String, String), KnownPool>) -> Result<Option<Timestamp>, KeepError> {
        *lock(&self.changes.0.wanted) = all
            .iter()
            .flat_map(|((namespace, _), known)| {
                members::wanted_names(&known.pool).map(move |name| ObjectRef::new(&name).within(namespace))
            })
            .collect();
        let mut namespaces: BTreeMap<String, (BTreeMap<&String, &KnownPool>, Vec<Member>)> = BTreeMap::new();
        for ((namespace, name), pool) in all {
            namespaces.entry(namespace.clone()).or_default().0.insert(name, pool);
        }
        for (namespace, member) in self.members() {
            namespaces.entry(namespace).or_default().1.push(member);
        }
        let (mut next, mut result) = (None, Ok(()));
        for (namespace, (pools, members)) in namespaces {
            match self.keep_namespace(namespace, &pools, &members).await {
                Ok(time) => next = [next, time].into_iter().flatten().min(),
                // The other namespaces do not wait for it.
                Err(error) => result = result.and(Err(error)),
            }
        }
        result.map(|()| next)
    }

    /// The VMs that matter, each with its namespace. Only those that have changed are read.
    fn members(&self) -> Vec<(String, Member)> {
        let now = clock::now();
        let mut known = lock(&self.changes.0.known);
        let mut all = HashMap::new();
        for vm in self.vms.state() {
            let key = ObjectRef::from_obj(&*vm);
            let is_known = |known: &Option<Member>| {
                known
                    .as_ref()
                    .is_some_and(|known| known.version.is_some() && known.version == vm.meta().resource_version)
            };
            let member = match known.remove(&key).filter(is_known) {
                Some(known) => known,
                None if is_member(&vm) => vm.read().ok().map(|vm| member(&vm, now)),
                None => None,
            };
            if member.is_some() {
                all.insert(key, member);
            }
        }
        *known = all;
        let members = known.iter().filter_map(|(key, member)| Some((key.namespace.clone()?, member.clone()?)));
        members.collect()
    }

    async fn keep_namespace(
        &self,
        namespace: String,
        known: &BTreeMap<&String, &KnownPool>,
        members: &[Member],
    ) -> Result<Option<Timestamp>, KeepError> {
        let now = clock::now();
        let pools: Pools = known.iter().map(|(name, known)| ((*name).clone(), known.pool.clone())).collect();
        let upkeep = upkeep(&pools, members, now);
        let handle = PoolHandle {
            client: self.client.clone(),
            namespace: namespace.clone(),
            field_manager: POOL_MANAGER.into(),
            clock: clock::now,
        };
        let mut result = Ok(());
        for member in members.iter().filter(|member| upkeep.used.contains(&member.name)) {
            let key = ObjectRef::new(&member.name).within(&namespace);
            lock(&self.changes.0.used).insert(key, member.uid.clone());
        }
        let used: Vec<_> = lock(&self.changes.0.used).clone().into_iter().collect();
        for (vm, uid) in used.into_iter().filter(|(vm, _)| vm.namespace.as_ref() == Some(&namespace)) {
            let marked = self.mark_used(&handle, &vm, uid.as_deref()).await;
            result = result.and(marked);
        }
        for (why, write) in &upkeep.writes {
            let written = self.write(&handle, why, write, members).await;
            result = result.and(written);
        }
        for (vm, id) in &upkeep.starts {
            let of_vm = |source| KeepError::Vm { vm: format!("{namespace}/{vm}"), source };
            match handle.finish_start(vm, id).await {
                Ok(true) => info!(vm = format!("{namespace}/{vm}"), "started the VM for its assignment"),
                Ok(false) => {}
                // Whoever has the VM is told when she asks for it again.
                Err(error @ PoolError::Start { .. }) => {
                    debug!(error = %ErrorChain(&error), "not started for its assignment")
                }
                Err(error) => result = result.and(Err(of_vm(error))),
            }
        }
        for vm in &upkeep.warmed {
            let name = format!("{namespace}/{vm}");
            match handle.warm(vm).await {
                Ok(true) => info!(vm = name, "started the VM, so that its pool has a warm one"),
                Ok(false) => {}
                Err(error @ PoolError::Start { .. }) => {
                    debug!(vm = name, error = %ErrorChain(&error), "not started to be warm")
                }
                Err(source) => result = result.and(Err(KeepError::Vm { vm: name, source })),
            }
        }
        for (name, known) in known {
            let counts = upkeep.counts.get(*name).copied().unwrap_or_default();
            let plan = self.plan_members(&namespace, known, members);
            let mut refusal = None;
            if let Some(plan) = plan.as_ref().filter(|plan| !plan.writes.is_empty()) {
                let written = self.made(&namespace).write(&known.pool, plan).await;
                refusal = written.as_ref().err().map(|error| ErrorChain(error).to_string());
                let pool = format!("{namespace}/{name}");
                result = result.and(written.map_err(|source| KeepError::Members { pool, source }));
            }
            let plan = plan.as_ref().map(|plan| (plan, refusal.as_deref()));
            let wanted = status(&known.pool, counts, plan, &known.status.conditions, now);
            if wanted != known.status {
                let written = self.write_status(&namespace, name, known, &wanted).await;
                result = result.and(written);
            }
        }
        result.map(|()| upkeep.next)
    }

    /// What is to be done for the VMs that a pool makes.
    fn plan_members(&self, namespace: &str, known: &KnownPool, members: &[Member]) -> Option<MemberPlan> {
        let key = |name: &str| ObjectRef::<PackedVm>::new(name).within(namespace);
        let others: BTreeSet<_> =
            members::wanted_names(&known.pool).filter(|name| self.vms.get(&key(name)).is_some()).collect();
        members::plan(&known.pool, members, &others, || random().chars().take(NAME_END).collect())
    }

    /// Takes the annotation away that says that nobody has had the VM.
    async fn mark_used(
        &self,
        handle: &PoolHandle,
        vm: &ObjectRef<PackedVm>,
        uid: Option<&str>,
    ) -> Result<(), KeepError> {
        let name = format!("{}/{}", handle.namespace, vm.name);
        let marked = handle.mark_used(&vm.name, uid).await;
        let marked = marked.map_err(|source| KeepError::Vm { vm: name.clone(), source })?;
        lock(&self.changes.0.used).remove(vm);
        if marked.is_some() {
            info!(vm = name, "somebody has had the VM, so its pool replaces it when it is free");
        }
        Ok(())
    }

    fn made(&self, namespace: &str) -> Members<'_> {
        Members { client: &self.client, metrics: &self.metrics, namespace: namespace.to_owned() }
    }

    async fn write(&self, handle: &PoolHandle, why: &Why, write: &Write, members: &[Member]) -> Result<(), KeepError> {
        let vm = format!("{}/{}", handle.namespace, write.vm);
        if let Why::PoolDeleted(pool) = why
            && !self.is_deleted(&handle.namespace, pool, pool_uid(members, write)).await?
        {
            return Ok(());
        }
        let written = handle.write(write, None).await.map_err(|source| KeepError::Vm { vm: vm.clone(), source })?;
        // If it has changed, the watch reports that.
        if written.is_none() {
            return Ok(());
        }
        self.metrics.wrote("status", "VirtualMachine");
        let before = members.iter().find(|member| member.name == write.vm).and_then(|member| member.held.as_ref());
        let user = before.map(|held| held.user.as_str()).unwrap_or_default();
        let why = match why {
            Why::Used => {
                debug!(vm, user, "noted that the VM is used");
                return Ok(());
            }
            Why::Noted => {
                debug!(vm, user, "noted the UID of the pool");
                return Ok(());
            }
            Why::PoolDeleted(_) => "its pool does not exist",
            Why::Duplicate => "the user has another VM of the pool",
            Why::Expired => "it was not used for longer than the pool's retention",
        };
        info!(vm, user, why, "the assignment ended");
        Ok(())
    }

    /// Asks the API server whether a pool with this UID does not exist. The watch may be behind.
    async fn is_deleted(&self, namespace: &str, name: &str, uid: Option<&String>) -> Result<bool, KeepError> {
        match self.pools_of(namespace).get(name).await {
            Ok(found) => Ok(uid.is_some_and(|uid| found.metadata.uid.as_ref() != Some(uid))),
            // Without details it is the definition that does not exist.
            Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(answer.details.is_some()),
            Err(source) => {
                let pool = format!("{namespace}/{name}");
                Err(KeepError::Pool { pool, what: "is it deleted", source: Box::new(source) })
            }
        }
    }

    async fn write_status(
        &self,
        namespace: &str,
        name: &str,
        known: &KnownPool,
        wanted: &VmPoolStatus,
    ) -> Result<(), KeepError> {
        let resource = VmPool::api_resource();
        let body = json!({
            "apiVersion": resource.api_version, "kind": resource.kind,
            "metadata": { "name": name, "resourceVersion": known.version }, "status": wanted,
        });
        let parameters = PatchParams::apply(STATUS_MANAGER).force();
        match self.pools_of(namespace).patch_status(name, &parameters, &Patch::Apply(&body)).await {
            Ok(_) => {
                self.metrics.wrote("status", "VmPool");
                Ok(())
            }
            // It was changed or deleted, or the definition is an old one, in which pools have no status.
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(()),
            Err(source) => {
                let pool = format!("{namespace}/{name}");
                Err(KeepError::Pool { pool, what: "write the status", source: Box::new(source) })
            }
        }
    }

    fn pools_of(&self, namespace: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), namespace, &VmPool::api_resource())
    }
}

/// The UID of the pool from which a VM is assigned before a write.
fn pool_uid<'a>(members: &'a [Member], write: &Write) -> Option<&'a String> {
    members.iter().find(|member| member.name == write.vm)?.held.as_ref()?.pool_uid.as_ref()
}
