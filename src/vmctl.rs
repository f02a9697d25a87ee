//! vmctl: runs a VM beside a Pod, so that Deployments, StatefulSets, DaemonSets and autoscalers, which make Pods, make VMs.
//!
//! ```text
//!  prototype ──────┐
//!  facts about Pod ┼─▶ derive (pure) ─▶ apply ─▶ wait: is the guest up? is the VM there? ─▶ SIGTERM: delete, wait for the guest
//!  options ────────┘
//!  VM of that name ──▶ standing (pure): create, go on, wait, delete or refuse
//!  VMs of Pods that are gone ──▶ delete, at the start and every minute
//! ```
//!
//! The program makes one VM and never changes it: a change of the prototype reaches VMs of new Pods only.

mod cluster;
#[deny(clippy::disallowed_methods)]
pub mod derive;
pub mod pod;
pub mod ready;
#[deny(clippy::disallowed_methods)]
pub mod standing;

use std::{
    collections::BTreeSet,
    io,
    pin::pin,
    time::{Duration, Instant},
};

use futures::StreamExt;
use kube::{
    Client, ResourceExt,
    runtime::{
        WatchStreamExt,
        watcher::{self, watch_object},
    },
};
use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, sleep},
};
use tracing::{info, warn};

use self::{
    cluster::{Cluster, RequestError},
    derive::{Disks, NotDerived, Order, PodFacts, PodObject},
    standing::{LivingPods, Readiness, ReadyWhen, Standing, Taken, Workplace},
};
use crate::{
    api::{StoredVm, VirtualMachine, full_name},
    claims,
    process::{ErrorChain, RepeatFilter, name_client, signals::terminated},
};

/// The field manager of derived VMs.
pub const FIELD_MANAGER: &str = "vmctl";
/// How long to wait before something is looked at or tried again.
const REST: Duration = Duration::from_secs(1);
/// How often VMs of Pods that are gone are looked for, without what is added so that not all vmctls do it at once.
const SWEEP: Duration = Duration::from_secs(55);
/// How long nothing may come over a connection to the API server. Longer than kube's bound for a silent watch (295 s).
const SILENCE: Duration = Duration::from_secs(300);

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// The name of the prototype.
    pub prototype: String,
    /// The namespace of the derived VM. Default: that of the Pod.
    pub namespace: Option<String>,
    /// The namespace of the prototype. Default: that of the derived VM.
    pub prototype_namespace: Option<String>,
    /// What becomes of the VM's disks.
    pub disks: Disks,
    /// Keep disks also where no later Pod has the same name, and accept claims that templates fix.
    pub force: bool,
    /// When the Pod is ready.
    pub ready: ReadyWhen,
    /// What is known of the Pod.
    pub pod: pod::PodSource,
}

/// Why the program ends before it is told to.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum Error {
    #[error(transparent)]
    Pod(#[from] pod::Missing),
    #[error("no cluster is configured")]
    NotConfigured(#[source] kube::config::InferConfigError),
    #[error("the settings for the API server can't be used")]
    Client(#[source] kube::Error),
    #[error("listen for probes: does another vmctl run in this Pod?")]
    Listen(#[source] io::Error),
    #[error("there is no prototype: vm {name} does not exist")]
    NoPrototype { name: String },
    #[error(transparent)]
    Refused(#[from] NotDerived),
    #[error("vm {vm} exists already")]
    Taken { vm: String, source: Taken },
    #[error("vm {vm} was deleted by somebody else: it is derived anew when this program starts again")]
    Deleted { vm: String },
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error("watch vm {vm}")]
    Watch { vm: String, source: watcher::Error },
}

impl Error {
    /// Whether the program was not told what it needs.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Pod(_))
    }
}

/// Derives a VM and stays with it until `term` becomes true; then deletes it and waits until its guest is down.
///
/// # Errors
/// If the VM can't or must not be derived, or was deleted by somebody else. An API server that does not answer is no error: the program tries
/// again.
pub async fn run(options: Options, term: watch::Receiver<bool>) -> Result<(), Error> {
    let pod = options.pod.facts()?;
    let (readiness, answers) = watch::channel(Readiness::NotReady("the VM is not derived yet".into()));
    ready::serve(&pod.uid, answers).map_err(Error::Listen)?;

    let mut config = kube::Config::infer().await.map_err(Error::NotConfigured)?;
    name_client(&mut config, "vmctl");
    // Else a watch of an API server that has lost its network would wait for its first answer for ever.
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    let client = Client::try_from(config).map_err(Error::Client)?;
    hold(options, pod, client, readiness, term).await
}

/// The same for a Pod that is known, with any client. `readiness` is told whether the guest is up.
///
/// # Errors
/// As those of [`run`].
pub async fn hold(
    options: Options,
    pod: PodFacts,
    client: Client,
    readiness: watch::Sender<Readiness>,
    term: watch::Receiver<bool>,
) -> Result<(), Error> {
    let given = |namespace: Option<String>| namespace.filter(|namespace| !namespace.is_empty());
    let namespace = given(options.namespace).unwrap_or_else(|| pod.namespace.clone());
    let prototype_namespace = given(options.prototype_namespace).unwrap_or_else(|| namespace.clone());
    let name = derive::name(&prototype_namespace, &options.prototype, &pod);
    let vm = full_name(Some(&namespace), &name);
    readiness.send_replace(Readiness::NotReady(format!("vm {vm} is not derived yet")));
    let mut holder = Holder {
        cluster: Cluster::new(client, pod.clone(), namespace.clone()),
        order: Order { namespace, disks: options.disks, force: options.force },
        place: Workplace { pod, prototype: options.prototype, prototype_namespace },
        name,
        vm,
        when: options.ready,
        readiness,
        owned: BTreeSet::new(),
        is_pod_checked: false,
        may_list_pods: true,
    };
    let Some(uid) = holder.derive(&term).await? else { return holder.withdraw().await };
    holder.stay(&uid, &term).await?;
    holder.end(&uid).await
}

/// A VM, and what is needed to make and keep it.
struct Holder {
    cluster: Cluster,
    order: Order,
    place: Workplace,
    /// The VM's name.
    name: String,
    /// The VM's namespace and name.
    vm: String,
    when: ReadyWhen,
    readiness: watch::Sender<Readiness>,
    /// The claims whose owner the VM is.
    owned: BTreeSet<String>,
    /// Whether it is known what the VM's Pod writes to.
    is_pod_checked: bool,
    /// Whether the Pods could be listed when that was last tried.
    may_list_pods: bool,
}

impl Holder {
    /// Waits until there is a VM of this Pod, and returns its UID; `None` if the program is told to end before.
    async fn derive(&mut self, term: &watch::Receiver<bool>) -> Result<Option<String>, Error> {
        let mut said = RepeatFilter::default();
        while !*term.borrow() {
            let why = match self.step().await {
                Ok(Step::Have(uid)) => return Ok(Some(uid)),
                Ok(Step::Wait(why)) => why,
                Err(Error::Request(error)) if !error.is_final() => ErrorChain(&error).to_string(),
                Err(error) => return Err(error),
            };
            if said.is_new(&why) {
                info!(vm = self.vm, "waiting: {why}");
            }
            self.readiness.send_replace(Readiness::NotReady(why));
            rest(term).await;
        }
        Ok(None)
    }

    /// The program is told to end and knows of no VM. A request to which there was no answer may have made one all the same.
    async fn withdraw(self) -> Result<(), Error> {
        let found = self.cluster.vm(&self.name).await;
        match found {
            Ok(found) if standing::standing(found.as_ref(), &self.place, &None) == Standing::Ours => {
                let uid = found.and_then(|vm| vm.uid).unwrap_or_default();
                self.end(&uid).await
            }
            Ok(_) => Ok(()),
            Err(error) => {
                warn!(vm = self.vm, error = %ErrorChain(&error), "it can't be seen whether there is a VM to delete");
                Ok(())
            }
        }
    }

    /// One look at the VM of the name, and what follows from it.
    async fn step(&mut self) -> Result<Step, Error> {
        let found = self.cluster.vm(&self.name).await?;
        let mut whose = standing::standing(found.as_ref(), &self.place, &None);
        // All Pods are listed only if it matters, and after the VM was read: a Pod is older than its VM.
        if matches!(whose, Standing::Leftover { .. } | Standing::Taken(Taken::UnknownPod { .. })) {
            let living = self.living_pods().await?;
            whose = standing::standing(found.as_ref(), &self.place, &living);
        }
        match whose {
            Standing::Ours => {
                info!(vm = self.vm, "this Pod's VM exists already");
                Ok(Step::Have(found.and_then(|vm| vm.uid).unwrap_or_default()))
            }
            Standing::Going => Ok(Step::Wait(format!("vm {} of an earlier Pod is being deleted", self.vm))),
            Standing::Leftover { uid } => {
                self.cluster.delete(&self.name, &uid).await?;
                Ok(Step::Wait(format!("vm {} of an earlier Pod is deleted", self.vm)))
            }
            Standing::Taken(source) => Err(Error::Taken { vm: self.vm.clone(), source }),
            Standing::Absent => self.create().await,
        }
    }

    async fn create(&mut self) -> Result<Step, Error> {
        let prototype = self.cluster.prototype(&self.place.prototype_namespace, &self.place.prototype).await?;
        let prototype = prototype.ok_or_else(|| Error::NoPrototype { name: self.place.full_prototype() })?;
        let object = match self.cluster.pod().await {
            Ok(object) => object,
            Err(error) if error.is_forbidden() => PodObject::default(),
            Err(error) => return Err(error.into()),
        };
        let derived = derive::derive(&prototype, &self.place.pod, &object, &self.order)?;
        // Claims that are deleted with the VM before must be gone, or the manager would take them for those of the new VM.
        if self.order.disks == Disks::Ephemeral
            && let Ok(StoredVm(vm)) = serde_json::from_str(&derived.manifest.to_string())
            && let Some(claim) = self.cluster.claim_of_vm(&self.name, claims::possible_names(&vm).collect()).await?
        {
            return Ok(Step::Wait(format!("the claim {claim} of an earlier vm {} is being deleted", self.vm)));
        }
        match self.cluster.create(&self.name, derived.manifest).await? {
            Some(uid) => {
                let prototype = self.place.full_prototype();
                info!(vm = self.vm, prototype, node = self.place.pod.node, "derived the VM");
                derived.warnings.iter().for_each(|warning| warn!(vm = self.vm, "{warning}"));
                Ok(Step::Have(uid))
            }
            None => Ok(Step::Wait(format!("vm {} has been created meanwhile", self.vm))),
        }
    }

    /// The Pods that live, if they can be listed.
    async fn living_pods(&mut self) -> Result<LivingPods, RequestError> {
        let living = self.cluster.living_pods().await;
        let could = std::mem::replace(&mut self.may_list_pods, living.is_ok());
        match living {
            Ok(living) => Ok(Some(living)),
            Err(error) if error.is_forbidden() => {
                if could {
                    warn!(error = %ErrorChain(&error), "VMs of Pods that are gone can't be found, and are not deleted");
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Follows the VM until the program is told to end, and says to probes whether its guest is up.
    async fn stay(&mut self, uid: &str, term: &watch::Receiver<bool>) -> Result<(), Error> {
        let name = self.name.clone();
        let mut changes = pin!(watch_object(self.cluster.vms(), &name).default_backoff());
        let mut sweeps = interval(self.sweep_period());
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failures = RepeatFilter::default();
        loop {
            let change = tokio::select! {
                change = changes.next() => change,
                _ = sweeps.tick() => {
                    if let Err(error) = self.sweep().await {
                        warn!(error = %ErrorChain(&error), "VMs of Pods that are gone can't be deleted now");
                    }
                    continue;
                }
                () = terminated(term.clone()) => return Ok(()),
            };
            match change {
                Some(Ok(Some(StoredVm(vm)))) if vm.uid().as_deref() == Some(uid) => {
                    failures.clear();
                    if vm.metadata.deletion_timestamp.is_some() {
                        self.say(Readiness::NotReady("the VM is being deleted".into()));
                        continue;
                    }
                    self.say(standing::readiness(&vm, self.when));
                    self.own_claims(&vm).await?;
                    self.check_pod(&vm, uid).await?;
                }
                Some(Ok(_)) => return Err(Error::Deleted { vm: self.vm.clone() }),
                Some(Err(source)) if is_final(&source) => return Err(Error::Watch { vm: self.vm.clone(), source }),
                Some(Err(error)) => {
                    let message = ErrorChain(&error).to_string();
                    if failures.is_new(&message) {
                        warn!(vm = self.vm, error = message, "the VM can't be watched now");
                    }
                }
                // The stream has no end.
                None => rest(term).await,
            }
        }
    }

    /// Tells probes, and the log when it changes.
    fn say(&self, now: Readiness) {
        self.readiness.send_if_modified(|before| {
            let is_new = *before != now;
            if is_new {
                match &now {
                    Readiness::Ready => info!(vm = self.vm, "the guest is up"),
                    Readiness::NotReady(why) => info!(vm = self.vm, "the guest is not up: {why}"),
                }
                *before = now;
            }
            is_new
        });
    }

    /// With `--disks ephemeral`: the claims that were made for the VM go with it.
    async fn own_claims(&mut self, vm: &VirtualMachine) -> Result<(), Error> {
        if self.order.disks == Disks::Keep {
            return Ok(());
        }
        for claim in vm.status.iter().flat_map(|status| &status.claims) {
            let is_wanted = |uid: &&String| !self.owned.contains(*uid) && standing::is_own_claim(vm, &claim.name);
            let Some(uid) = claim.uid.as_ref().filter(is_wanted) else { continue };
            match self.cluster.own_claim(vm, &claim.name, Some(uid)).await {
                Ok(()) => drop(self.owned.insert(uid.clone())),
                Err(error) if error.is_final() => return Err(error.into()),
                // The next change of the VM brings the next try.
                Err(error) => warn!(vm = self.vm, error = %ErrorChain(&error), "a claim can't be owned now"),
            }
        }
        Ok(())
    }

    /// With `--disks ephemeral`: claims that were made just now, and that no change of the VM has told of, go with the VM too.
    async fn own_last_claims(&self, uid: &str) -> Result<(), RequestError> {
        if self.order.disks == Disks::Keep {
            return Ok(());
        }
        let vm = self.cluster.whole_vm(&self.name).await?;
        let Some(vm) = vm.filter(|vm| vm.uid().as_deref() == Some(uid)) else { return Ok(()) };
        for claim in claims::possible_names(&vm) {
            self.cluster.own_claim(&vm, &claim, None).await?;
        }
        Ok(())
    }

    /// Refuses a VM whose Pod writes to a claim that a template fixes for all VMs, before its guest has started.
    async fn check_pod(&mut self, vm: &VirtualMachine, uid: &str) -> Result<(), Error> {
        let has_pod = vm.status.as_ref().is_some_and(|status| status.created == Some(true));
        if !has_pod || self.is_pod_checked || self.order.force {
            self.is_pod_checked &= has_pod;
            return Ok(());
        }
        match self.cluster.written_claims(&self.name).await {
            Ok(written) => {
                self.is_pod_checked = true;
                let Some(claim) = standing::fixed_claim(vm, &written) else { return Ok(()) };
                self.cluster.delete(&self.name, uid).await?;
                Err(NotDerived::FixedClaim { vm: self.vm.clone(), claim: claim.to_owned() }.into())
            }
            Err(error) => {
                // Without the right it is not tried again; else the next change of the VM brings the next try.
                self.is_pod_checked = error.is_final();
                warn!(vm = self.vm, error = %ErrorChain(&error), "it can't be seen whether the VM's Pod writes to a claim of other VMs");
                Ok(())
            }
        }
    }

    /// Deletes the VMs of this prototype whose Pods are gone.
    async fn sweep(&mut self) -> Result<(), RequestError> {
        let vms = self.cluster.vms_of(&self.place.prototype).await?;
        if vms.iter().all(|vm| vm.name.as_ref() == Some(&self.name)) {
            return Ok(());
        }
        // After the VMs: a Pod is older than its VM.
        let Some(living) = self.living_pods().await? else { return Ok(()) };
        for orphan in standing::orphans(&vms, &self.place, &living) {
            self.cluster.delete(&orphan.name, &orphan.uid).await?;
            info!(
                vm = full_name(Some(&self.order.namespace), &orphan.name),
                pod = orphan.pod,
                "deleted the VM of a Pod that is gone"
            );
        }
        Ok(())
    }

    /// The same for one Pod at all times, and another for each.
    fn sweep_period(&self) -> Duration {
        let number =
            self.place.pod.uid.bytes().fold(0_u32, |number, byte| number.wrapping_mul(31).wrapping_add(byte.into()));
        SWEEP + Duration::from_millis((number % 10_000).into())
    }

    /// Deletes the VM and waits until it is gone, which it is when its guest is down.
    async fn end(mut self, uid: &str) -> Result<(), Error> {
        let begin = Instant::now();
        info!(vm = self.vm, "told to end: the guest shuts down");
        self.readiness.send_replace(Readiness::NotReady("the VM is being deleted".into()));
        let mut failures = RepeatFilter::default();
        let mut is_deleted = false;
        loop {
            match self.end_step(uid, &mut is_deleted).await {
                Ok(true) => {
                    info!(
                        vm = self.vm,
                        seconds = begin.elapsed().as_secs(),
                        "the guest is down, and the VM is deleted"
                    );
                    return Ok(());
                }
                Ok(false) => {}
                Err(error) if error.is_final() => return Err(error.into()),
                Err(error) => {
                    let message = ErrorChain(&error).to_string();
                    if failures.is_new(&message) {
                        warn!(vm = self.vm, error = message, "the VM can't be deleted now");
                    }
                }
            }
            sleep(REST).await;
        }
    }

    /// Whether the VM is gone. If it is not, it is deleted once.
    async fn end_step(&mut self, uid: &str, is_deleted: &mut bool) -> Result<bool, RequestError> {
        let found = self.cluster.vm(&self.name).await?.filter(|vm| vm.uid.as_deref() == Some(uid));
        if found.is_none() {
            return Ok(true);
        }
        if !*is_deleted {
            let owned = self.own_last_claims(uid).await;
            self.cluster.delete(&self.name, uid).await?;
            *is_deleted = true;
            if let Err(error) = owned {
                warn!(vm = self.vm, error = %ErrorChain(&error), "it can't be seen whether a claim stays without an owner");
            }
        }
        Ok(false)
    }
}

/// What a look at the VM brought.
enum Step {
    /// The VM is this Pod's, with this UID.
    Have(String),
    /// It is to be looked at again, because of this.
    Wait(String),
}

/// Waits a while, or until the program is told to end.
async fn rest(term: &watch::Receiver<bool>) {
    tokio::select! {
        () = sleep(REST) => {}
        () = terminated(term.clone()) => {}
    }
}

/// Whether a watch is refused, so that trying again does not help.
fn is_final(error: &watcher::Error) -> bool {
    use watcher::Error::{InitialListFailed, WatchStartFailed};
    matches!(error, InitialListFailed(kube::Error::Api(answer)) | WatchStartFailed(kube::Error::Api(answer)) if [401, 403, 404].contains(&answer.code))
}
