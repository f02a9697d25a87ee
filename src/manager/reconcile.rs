//! One machine, one page: observe, render, plan, execute, status. No decisions are made here.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use kube::{
    Resource, ResourceExt,
    runtime::{
        controller::Action,
        events::{Event, EventType},
        reflector::ObjectRef,
    },
};
use serde_json::Value;
use tokio::sync::watch;
use tracing::{debug, warn};

use crate::{
    api::VirtualMachine,
    cluster::{
        ActionError, Cluster,
        events::Teller,
        packed::PackedMachine,
        watch::{Chain, WatchError},
    },
    config::ReconcilerConfig,
    manager::templates::InForce,
    observed::Observed,
    plan::plan,
    power,
    render::{Facts, Rendered, TemplateError, render},
    status::{
        Outcome, Source, differs,
        events::{News, events},
        status,
    },
};

/// The first and the longest pause after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// How many failures in a row that may go by themselves are nobody's business.
const SILENT: u32 = 2;

/// Why a machine could not be brought to where it should be; it is tried again.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// A write failed.
    #[error(transparent)]
    Action(#[from] ActionError),
    /// A kind of object can't be watched.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// `spec.vm.state` could not be written.
    #[error("write spec.vm.state")]
    Spec(#[source] kube::Error),
    /// The status could not be written.
    #[error("write the status")]
    Status(#[source] kube::Error),
}

/// What the reconciliation of every machine shares.
pub struct Reconciler {
    cluster: Cluster,
    config: watch::Receiver<Arc<ReconcilerConfig>>,
    templates: watch::Receiver<Arc<InForce>>,
    teller: Arc<Teller>,
    /// Machines as the API server answered to our last write of their status, until the watch has told it too.
    written: Mutex<HashMap<ObjectRef<VirtualMachine>, Arc<VirtualMachine>>>,
    /// Failures in a row.
    failures: Mutex<HashMap<ObjectRef<PackedMachine>, u32>>,
}

impl Reconciler {
    /// Everything is done through `cluster`.
    pub fn new(
        cluster: Cluster,
        config: watch::Receiver<Arc<ReconcilerConfig>>,
        templates: watch::Receiver<Arc<InForce>>,
        teller: Arc<Teller>,
    ) -> Self {
        Self { cluster, config, templates, teller, written: Mutex::default(), failures: Mutex::default() }
    }

    /// Brings a machine to where its spec wants it.
    ///
    /// # Errors
    /// [`ReconcileError`]; everything that could be done and said was.
    pub async fn reconcile(packed: Arc<PackedMachine>, this: Arc<Self>) -> Result<Action, ReconcileError> {
        let Ok(vm) = packed.read() else { return Ok(Action::await_change()) };
        let vm = this.newest(Arc::new(vm));
        // Reads: only what the watches keep.
        let children = &this.cluster.children;
        let complete = children.complete();
        let mut observed = children.observe(&vm, Timestamp::now());
        let templates = this.templates.borrow().clone();
        let mut rendered = this.render(&vm, &observed, &templates);
        if let Ok(objects) = &rendered {
            children.watch(objects.iter().map(|object| object.key.types())).await?;
            // Also one that became complete by itself since: what it told last was not observed.
            if children.complete() != complete {
                observed = children.observe(&vm, Timestamp::now());
                rendered = this.render(&vm, &observed, &templates);
            }
        }
        // Pure.
        let plan = plan(&vm, &observed, rendered.as_deref().ok());
        this.cluster.children.metrics.planned(&rendered, &plan);
        // Writes.
        let result = this.cluster.execute(&vm, &plan).await;
        let failures = this.failures(&packed);
        // What lasts may need a person, too: a webhook that does not answer, for one.
        let tells = |error: &&ActionError| !error.is_transient() || (failures >= SILENT && !error.is_busy());
        let outcome = Outcome {
            failure: result.as_ref().err().filter(tells).map(|error| Chain(error).to_string()),
            refusals: result.as_ref().map(Clone::clone).unwrap_or_default(),
        };
        // Pure again, from what there is now, then at most one write.
        if plan.steps.iter().any(|step| !step.is_empty()) {
            observed = this.cluster.children.observe(&vm, Timestamp::now());
        }
        let source = Source { set: templates.of(&vm).ok(), refused: templates.refusal(&vm) };
        let wanted = status(&vm, &observed, &plan, rendered.as_deref(), &outcome, source);
        let news = events(&vm, &observed, &plan, rendered.as_deref().ok(), &wanted, result.is_ok());
        if vm.metadata.deletion_timestamp.is_none() && differs(&vm, &wanted) {
            this.write_status(&vm, &wanted).await?;
        }
        if plan.power.write_stopped {
            this.cluster.write_stopped(&vm).await.map_err(ReconcileError::Spec)?;
        }
        this.tell(&vm, news);
        debug!("reconciled");
        result?;
        this.lock_failures().remove(&ObjectRef::from_obj(&*packed));
        Ok(plan.again_after.map_or_else(Action::await_change, Action::requeue))
    }

    /// When to try again after a failure: later and later, each machine for itself.
    pub fn retry(vm: Arc<PackedMachine>, error: &ReconcileError, this: Arc<Self>) -> Action {
        let mut failures = this.lock_failures();
        let count = failures.entry(ObjectRef::from_obj(&*vm)).or_default();
        let (first, longest) = BACKOFF;
        let pause = first.saturating_mul(1 << (*count).min(10)).min(longest);
        *count += 1;
        warn!(error = %Chain(error), tries = *count, again_in = ?pause, "not done yet");
        Action::requeue(pause)
    }

    /// Drops what was remembered of a machine that is gone.
    pub fn forget(&self, name: &str, namespace: &str) {
        self.written.lock().unwrap_or_else(PoisonError::into_inner).remove(&ObjectRef::new(name).within(namespace));
        self.lock_failures().remove(&ObjectRef::new(name).within(namespace));
    }

    fn lock_failures(&self) -> MutexGuard<'_, HashMap<ObjectRef<PackedMachine>, u32>> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How often in a row a machine has failed.
    fn failures(&self, vm: &PackedMachine) -> u32 {
        self.lock_failures().get(&ObjectRef::from_obj(vm)).copied().unwrap_or_default()
    }

    fn render(
        &self,
        vm: &VirtualMachine,
        observed: &Observed,
        templates: &InForce,
    ) -> Result<Vec<Rendered>, TemplateError> {
        let facts = Facts { display_password: random() };
        let config = self.config.borrow().clone();
        render(vm, observed, &config, &facts, templates.of(vm)?)
    }

    async fn write_status(&self, vm: &VirtualMachine, wanted: &Value) -> Result<(), ReconcileError> {
        match self.cluster.write_status(vm, wanted).await {
            Ok(mut written) => {
                debug!("wrote the status");
                self.cluster.children.metrics.wrote("status", "VirtualMachine");
                power::trim(&mut written);
                let mut cache = self.written.lock().unwrap_or_else(PoisonError::into_inner);
                cache.insert(ObjectRef::from_obj(&written), Arc::new(written));
                Ok(())
            }
            // Deleted meanwhile, or made anew: the watch will tell.
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(()),
            Err(error) => Err(ReconcileError::Status(error)),
        }
    }

    /// The machine as we know it: the watch may lag behind our own last write.
    fn newest(&self, vm: Arc<VirtualMachine>) -> Arc<VirtualMachine> {
        let version = |vm: &VirtualMachine| vm.resource_version().and_then(|version| version.parse::<u64>().ok());
        let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
        let key = ObjectRef::from_obj(&*vm);
        match written.get(&key) {
            Some(ours) if ours.metadata.uid == vm.metadata.uid && version(ours) > version(&vm) => ours.clone(),
            Some(_) => {
                written.remove(&key);
                vm
            }
            None => vm,
        }
    }

    /// Events for what a person would ask about.
    fn tell(&self, vm: &VirtualMachine, news: Vec<News>) {
        let regarding = ObjectReference { resource_version: None, ..vm.object_ref(&()) };
        for News { warning, reason, note, action } in news {
            let event = Event {
                type_: if warning { EventType::Warning } else { EventType::Normal },
                reason,
                // The API server takes at most 1 kB (https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/).
                note: Some(note.chars().take(1000).collect()),
                action: action.to_owned(),
                secondary: None,
            };
            self.teller.tell(event, regarding.clone());
        }
    }
}

/// 128 random bits as text, or nothing where the operating system has none: then no password can be made of them.
pub(super) fn random() -> String {
    let mut bits = [0; 16];
    match getrandom::fill(&mut bits) {
        Ok(()) => bits.iter().map(|byte| format!("{byte:02x}")).collect(),
        Err(error) => {
            warn!(%error, "the operating system has no randomness");
            String::new()
        }
    }
}
