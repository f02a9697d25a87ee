//! One machine, one page: observe, render, plan, execute, status. No decisions are made here.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use k8s_openapi::{api::core::v1::ObjectReference, jiff::Timestamp};
use kube::{
    Resource,
    api::TypeMeta,
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
    api::{VirtualMachine, status::Retry},
    cluster::{
        ActionError, Cluster, Executed, api_label,
        events::Teller,
        packed::PackedMachine,
        watch::{Children, Unseen, WatchError},
    },
    config::{Kinds, ReconcilerConfig},
    manager::{templates::InForce, written::Written},
    observed::Observed,
    plan::{self, Plan, plan},
    power,
    process::{ErrorChain, lock},
    render::{Facts, Rendered, TemplateError, render},
    status::{
        Failure, Outcome, Source, differs,
        events::{News, events, stopped as stopped_by_guest},
        noted, status,
    },
};

/// The first and the longest pause after a failure.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(60));

/// When to look again at a machine some of whose kinds of objects are being listed.
const UNSEEN: Duration = Duration::from_secs(10);

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

impl ReconcileError {
    /// What the metric `vm_operator_reconcile_errors` calls the error: the API server's reason where there is one.
    pub fn label(&self) -> Cow<'static, str> {
        match self {
            Self::Action(error) => error.label(),
            Self::Watch(_) => "Watch".into(),
            Self::Spec(source) | Self::Status(source) => api_label(source),
        }
    }
}

/// How a machine is rendered during one look.
struct Ways {
    config: Arc<ReconcilerConfig>,
    templates: Arc<InForce>,
}

/// What the reconciliation of every machine shares.
pub struct Reconciler {
    cluster: Cluster,
    config: watch::Receiver<Arc<ReconcilerConfig>>,
    templates: watch::Receiver<Arc<InForce>>,
    teller: Arc<Teller>,
    /// What the watch of the machines may not have told yet.
    pub written: Written,
    /// The machines that could not be brought to where they should be.
    troubles: Mutex<HashMap<ObjectRef<PackedMachine>, Trouble>>,
}

/// What is remembered of a machine until it is as it should be.
#[derive(Clone, Debug, Default)]
struct Trouble {
    /// Failures in a row.
    failures: u32,
    /// What its status should say of the next try, if that could not be written.
    retry: Option<Retry>,
}

impl Reconciler {
    /// Everything is done through `cluster`.
    pub fn new(
        cluster: Cluster,
        config: watch::Receiver<Arc<ReconcilerConfig>>,
        templates: watch::Receiver<Arc<InForce>>,
        teller: Arc<Teller>,
    ) -> Self {
        Self { cluster, config, templates, teller, written: Written::default(), troubles: Mutex::default() }
    }

    /// Brings a machine to where its spec wants it. What we know of it is taken when this is called, not when it is first polled.
    ///
    /// # Errors
    /// [`ReconcileError`]; everything that could be done and said was.
    pub fn reconcile(
        packed: Arc<PackedMachine>,
        this: Arc<Self>,
    ) -> impl Future<Output = Result<Action, ReconcileError>> + Send {
        let newer = this.written.newer(&packed);
        Self::bring(packed, newer, this)
    }

    async fn bring(
        packed: Arc<PackedMachine>,
        newer: Option<Arc<VirtualMachine>>,
        this: Arc<Self>,
    ) -> Result<Action, ReconcileError> {
        let Some(mut vm) = newer.or_else(|| packed.read().ok().map(Arc::new)) else {
            return Ok(Action::await_change());
        };
        let name = ObjectRef::from_obj(&*packed);
        let Trouble { failures, retry } = lock(&this.troubles).get(&name).cloned().unwrap_or_default();
        if retry.is_some() {
            Arc::make_mut(&mut vm).status.get_or_insert_default().retry = retry;
        }
        // Reads: what the watches keep.
        let children = &this.cluster.children;
        let complete = children.complete();
        let mut observed = children.observe(&vm, Timestamp::now());
        let ways = Ways { config: this.config.borrow().clone(), templates: this.templates.borrow().clone() };
        let mut rendering = ways.render(&vm, &observed);
        let mut unwatched = None;
        let unseen: Vec<Unseen>;
        if let Ok(rendered) = &rendering {
            if let Err(error) = children.watch(needed(rendered)).await {
                if !children.knows(&pods()) {
                    return Err(error.into());
                }
                unwatched = Some(error);
            }
            unseen = leftovers(children, &vm, rendered, &ways.config.allowed_kinds).await;
            // Also if one became complete by itself since: what it told last was not observed.
            if children.complete() != complete {
                observed = children.observe(&vm, Timestamp::now());
                rendering = ways.render(&vm, &observed);
            }
        } else {
            unseen = noted(&vm, &[]).into_iter().map(Unseen::from).collect();
        }
        let rendered = rendering.as_deref();
        // Pure. What can't be watched can't be planned; the machine's power can.
        let plan = plan(&vm, &observed, rendered.ok().filter(|_| unwatched.is_none()));
        this.count(rendered.ok(), &plan);
        // Writes.
        let Executed { done, refusals, result } = this.cluster.execute(&vm, &plan).await;
        // What lasts may need a person, too: a webhook that does not answer, for one.
        let tells = |error: &&ActionError| !error.is_transient() || (failures >= SILENT && !error.is_busy());
        let failure = match (result.as_ref().err().filter(tells), &unwatched) {
            (Some(error), _) => Some(Failure { reason: error.reason(), message: ErrorChain(error).to_string() }),
            (None, Some(error)) if failures >= SILENT => {
                Some(Failure { reason: "WatchFailed", message: ErrorChain(error).to_string() })
            }
            _ => None,
        };
        let is_listed = unseen.iter().any(|unseen| unseen.is_listed);
        let unseen = unseen.into_iter().map(|unseen| unseen.kind).collect();
        let outcome = Outcome { failure, refusals, unseen };
        // Pure again, from what there is now, then at most one write.
        if plan.steps.iter().any(|step| !step.is_empty()) {
            observed = this.cluster.children.observe(&vm, Timestamp::now());
        }
        let wanted = status(&vm, &observed, &plan, rendered, &outcome, ways.source(&vm));
        let news = events(&vm, &observed, rendered.ok(), &outcome, &wanted, &done);
        // Before the status is written: what that says is not news any more.
        this.tell(&vm, news);
        let written = if vm.metadata.deletion_timestamp.is_none() && differs(&vm, &wanted) {
            this.write_status(&vm, &wanted).await
        } else {
            Ok(None)
        };
        let unwritten = plan.retry.clone().filter(|_| written.is_err());
        if unwritten.is_some() || failures > 0 {
            lock(&this.troubles).entry(name.clone()).or_default().retry = unwritten;
        }
        let written = written?;
        // It names the version that the status was of.
        if plan.power.write_stopped
            && written.is_none()
            && let Some(halted) = &plan.power.halted
            && this.cluster.write_stopped(&vm, halted).await.map_err(ReconcileError::Spec)?
        {
            this.tell(&vm, vec![stopped_by_guest()]);
        }
        debug!("reconciled");
        result?;
        if let Some(error) = unwatched {
            return Err(error.into());
        }
        lock(&this.troubles).remove(&name);
        let mut again_after = plan.again_after;
        if is_listed {
            // Nothing wakes a machine that has none of them.
            again_after = Some(again_after.map_or(UNSEEN, |pause| pause.min(UNSEEN)));
        }
        Ok(again_after.map_or_else(Action::await_change, Action::requeue))
    }

    /// Counts what the plan does not write.
    fn count(&self, rendered: Option<&[Rendered]>, plan: &Plan) {
        let metrics = &self.cluster.children.metrics;
        let Some(rendered) = rendered else { return metrics.template_failed() };
        for object in rendered.iter().filter(|object| !plan.writes(&object.key)) {
            metrics.skipped(&object.key.kind);
        }
    }

    /// When to try again after a failure: later and later, each machine for itself.
    pub fn retry(vm: Arc<PackedMachine>, error: &ReconcileError, this: Arc<Self>) -> Action {
        let mut troubles = lock(&this.troubles);
        let count = &mut troubles.entry(ObjectRef::from_obj(&*vm)).or_default().failures;
        let (first, longest) = BACKOFF;
        let pause = first.saturating_mul(1 << (*count).min(10)).min(longest);
        *count += 1;
        warn!(error = %ErrorChain(error), tries = *count, again_in = ?pause, "not done yet");
        Action::requeue(pause)
    }

    /// Drops what was remembered of a machine that is gone.
    pub fn forget(&self, name: &str, namespace: &str) {
        let vm = ObjectRef::new(name).within(namespace);
        self.written.forget(&vm);
        lock(&self.troubles).remove(&vm);
    }

    /// Returns the machine as it is then, unless it was deleted or changed meanwhile: then the watch will tell.
    async fn write_status(
        &self,
        vm: &VirtualMachine,
        wanted: &Value,
    ) -> Result<Option<Arc<VirtualMachine>>, ReconcileError> {
        match self.cluster.write_status(vm, wanted).await {
            Ok(mut written) => {
                debug!("wrote the status");
                self.cluster.children.metrics.wrote("status", "VirtualMachine");
                power::trim(&mut written);
                let written = Arc::new(written);
                self.written.insert(written.clone());
                Ok(Some(written))
            }
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(None),
            Err(error) => Err(ReconcileError::Status(error)),
        }
    }

    /// Events for what a person would ask about.
    fn tell(&self, vm: &VirtualMachine, news: Vec<News>) {
        let regarding = ObjectReference { resource_version: None, ..vm.object_ref(&()) };
        for News { warning, reason, note, action } in news {
            let event = Event {
                type_: if warning { EventType::Warning } else { EventType::Normal },
                reason,
                note: Some(note),
                action: action.to_owned(),
                secondary: None,
            };
            self.teller.tell(event, regarding.clone());
        }
    }
}

impl Ways {
    fn render(&self, vm: &VirtualMachine, observed: &Observed) -> Result<Vec<Rendered>, TemplateError> {
        let facts = Facts { display_password: random() };
        render(vm, observed, &self.config, &facts, self.templates.of(vm)?)
    }

    fn source(&self, vm: &VirtualMachine) -> Source<'_> {
        Source { set: self.templates.of(vm).ok(), refused: self.templates.refusal(vm) }
    }
}

/// The kinds of which all objects must be known. Pods also where something else makes them: without knowing its Pod nothing can be
/// said of a machine. Secrets also where none is rendered: the display's may be a person's.
fn needed(rendered: &[Rendered]) -> impl Iterator<Item = TypeMeta> {
    let secrets = TypeMeta { api_version: "v1".into(), kind: "Secret".into() };
    rendered.iter().map(|object| object.key.types()).chain([pods(), secrets])
}

/// Looks for what earlier templates made of a machine. Nobody waits for it but a machine without a Pod: what is left may make one.
/// Returns the kinds of which nothing is known.
async fn leftovers(
    children: &Arc<Children>,
    vm: &VirtualMachine,
    rendered: &[Rendered],
    allowed: &Kinds,
) -> Vec<Unseen> {
    let noted = noted(vm, rendered);
    if noted.is_empty() {
        return Vec::new();
    }
    let (noted, refused): (Vec<_>, Vec<_>) =
        noted.into_iter().partition(|kind| allowed.allow(&kind.api_version, &kind.kind));
    let has_pod = plan::pod(vm, &children.observe(vm, Timestamp::now())).is_some();
    let unseen = children.look_for(noted, !has_pod).await;
    unseen.into_iter().chain(refused.into_iter().map(Unseen::from)).collect()
}

fn pods() -> TypeMeta {
    TypeMeta { api_version: "v1".into(), kind: "Pod".into() }
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
