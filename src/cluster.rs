//! Where objects are read and written: the edge between the plan and the API server.
//!
//! Reading is watching: [`watch`] keeps every object that carries a machine's labels, so that no decision asks the API
//! server what a watch has told already. Writing is [`Cluster::execute`], which does what a plan says, and
//! [`Cluster::write_status`].

pub mod events;
pub mod list_watch;
pub mod packed;
pub mod watch;

use std::{borrow::Cow, error::Error as _, fmt::Debug, sync::Arc};

use futures::future::join_all;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DeleteParams, Patch, PatchParams, Preconditions},
    core::{DynamicResourceScope, Status},
};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tracing::{info, warn};

use self::{
    packed::{Arrived, Meta, Sent, Whole},
    watch::Children,
};
use crate::{
    api::{Reason, VirtualMachine, VirtualMachineStatus, status::Halted},
    claims::Refusal,
    object::{GUEST_SHUTDOWN_ANNOTATION, ObjectKey, Rendered, resource},
    ownership::{OBJECT_MANAGER, STATUS_MANAGER},
    plan::{
        Action, Plan,
        conflict::{Conflict, conflict},
    },
    power,
    process::ErrorChain,
    schedule::Persistence,
};

/// A resourceVersion that no object has, because the first write to an empty etcd has a higher one. With it, an apply makes
/// an object that is absent and is refused as a conflict where there is one of that name: the API server compares versions
/// only with what exists. So a first apply neither merges into somebody else's object nor has to look beforehand.
const NEVER: &str = "1";

/// A cluster in which machines are managed, or a part of it.
#[derive(Clone)]
pub struct Cluster {
    /// Talks to the API server.
    pub client: Client,
    /// The objects of its machines.
    pub children: Arc<Children>,
    turns: Turns,
}

/// Who may send a request.
#[derive(Clone)]
pub struct Turns(Arc<Semaphore>);

impl Default for Turns {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(REQUESTS)))
    }
}

/// How many requests are under way at once. Each has a connection of its own, which is dear to begin and takes memory on both
/// sides; a few dozens keep any API server busy.
const REQUESTS: usize = 32;

/// How the execution of a plan went.
#[derive(Debug)]
pub struct Executed<'a> {
    /// The actions that succeeded.
    pub done: Vec<&'a Action>,
    /// What the API server said against changes of claims: a machine runs with the disks that there are.
    pub refusals: Vec<Refusal>,
    /// The first other error of the first step in which there was one.
    pub result: Result<(), ActionError>,
}

/// An action that failed.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// The API server did not do it.
    #[error("{what} {key}")]
    Api {
        /// `apply`, `label` or `delete`.
        what: &'static str,
        /// The object.
        key: ObjectKey,
        /// Why.
        source: Box<kube::Error>,
    },
    /// An object of that name is there and does not belong to the machine.
    #[error("{0} exists and is not this machine's: delete or rename one of the two")]
    NameTaken(ObjectKey),
    /// A claim is another machine's disk.
    #[error(
        "{key} belongs to the machine {vm}: two machines can't use one claim; name the disk otherwise, or, when the machine {vm} does not run any more, give the claim's label app.kubernetes.io/instance another value"
    )]
    Shared {
        /// The claim.
        key: ObjectKey,
        /// The machine that its label names.
        vm: String,
    },
    /// The API server sent an object that can't be understood.
    #[error("the API server's answer about {key} can't be understood")]
    Answer {
        /// The object.
        key: ObjectKey,
        /// Why.
        source: serde_json::Error,
    },
}

impl ActionError {
    /// Whether trying again without a change is of use.
    pub fn persistence(&self) -> Persistence {
        match self {
            Self::Api { source, .. } if is_busy(source) => Persistence::Busy,
            Self::Api { source, .. } if is_transient(source) => Persistence::Transient,
            Self::Api { .. } | Self::NameTaken(_) | Self::Shared { .. } | Self::Answer { .. } => Persistence::Lasting,
        }
    }

    /// Whether trying again without a change is of use. Otherwise the API server refused what was sent, and a person must know.
    pub fn is_transient(&self) -> bool {
        self.persistence() != Persistence::Lasting
    }

    /// What the metric `vm_operator_reconcile_errors` calls the error.
    pub fn label(&self) -> Cow<'static, str> {
        match self {
            Self::NameTaken(_) => "NameTaken".into(),
            Self::Shared { .. } => "Shared".into(),
            Self::Answer { .. } => "Answer".into(),
            Self::Api { source, .. } => api_label(source),
        }
    }

    /// The reason of the condition Ready.
    pub fn reason(&self) -> Reason {
        match self {
            Self::NameTaken(_) | Self::Shared { .. } => Reason::NameTaken,
            Self::Api { .. } | Self::Answer { .. } => Reason::ApplyFailed,
        }
    }
}

/// What the metric `vm_operator_reconcile_errors` calls an error of a request: the API server's reason, or `Connection` without an answer.
pub fn api_label(error: &kube::Error) -> Cow<'static, str> {
    match error {
        kube::Error::Api(status) if status.reason.is_empty() => status.code.to_string().into(),
        kube::Error::Api(status) => status.reason.clone().into(),
        _ => "Connection".into(),
    }
}

/// Whether a request may succeed when it is sent again as it is.
pub fn is_transient(error: &kube::Error) -> bool {
    match error {
        // An apply with a field that the kind does not have, or of a wrong type, is answered with 500.
        kube::Error::Api(status) if status.message.starts_with("failed to create typed patch object") => false,
        kube::Error::Api(status) => is_busy(error) || status.code >= 500,
        _ => true,
    }
}

fn is_busy(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if matches!(status.code, 409 | 410 | 429) || is_another_object(status))
}

/// Whether a patch was refused because it names the UID of an object that has been made anew since: to the API server a field that
/// can't be changed.
fn is_another_object(status: &Status) -> bool {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    status.code == 422 && causes.into_iter().any(|cause| cause.field == "metadata.uid")
}

/// With force: what is applied is ours. Without warnings, which nobody would read: to find a key that is there twice, which
/// can't be in what we send, the API server reads a patch as YAML once more. A field that the kind does not have is an error
/// all the same.
fn applying(field_manager: &str) -> PatchParams {
    PatchParams::apply(field_manager).force().validation_ignore()
}

/// The namespace of a machine and of all that is made for it.
fn of(vm: &VirtualMachine) -> String {
    vm.namespace().unwrap_or_default()
}

impl Cluster {
    /// The cluster that `client` talks to. All parts of it share the `turns`.
    pub fn new(client: Client, children: Arc<Children>, turns: Turns) -> Self {
        Self { client, children, turns }
    }

    /// Does what the plan says, step by step; the actions of a step go together. After a failure later steps are not begun,
    /// because a Pod must not be made before what it mounts. What was done is in [`Cluster::children`] when this returns.
    pub async fn execute<'a>(&self, vm: &VirtualMachine, plan: &'a Plan) -> Executed<'a> {
        let mut executed = Executed { done: Vec::new(), refusals: Vec::new(), result: Ok(()) };
        for step in &plan.steps {
            let results = join_all(step.iter().map(|action| self.act(vm, action))).await;
            for (action, result) in step.iter().zip(results) {
                match (action, result) {
                    (_, Ok(())) => executed.done.push(action),
                    (Action::Apply { object, uid: Some(_) }, Err(error))
                        if object.key.is_claim() && !error.is_transient() =>
                    {
                        warn!(object = %object.key, error = %ErrorChain(&error), "the claim stays as it is");
                        let answer = error.source().map_or_else(|| error.to_string(), ToString::to_string);
                        executed.refusals.push(Refusal { claim: object.key.clone(), answer });
                    }
                    (_, Err(error)) => executed.result = executed.result.and(Err(error)),
                }
            }
            if executed.result.is_err() {
                break;
            }
        }
        executed
    }

    /// Sends a request when it is its turn.
    async fn in_turn<T>(&self, request: impl Future<Output = T>) -> T {
        let _turn = self.turns.0.acquire().await;
        request.await
    }

    async fn act(&self, vm: &VirtualMachine, action: &Action) -> Result<(), ActionError> {
        match action {
            Action::Apply { object, uid } => self.apply(vm, object, uid.as_deref()).await,
            Action::Label { key, uid, patch } => self.label(&of(vm), key, uid, patch).await,
            Action::Delete { key, uid, grace, .. } => self.delete(&of(vm), key, uid, *grace).await,
        }
    }

    fn objects<K>(&self, namespace: &str, key: &ObjectKey) -> Api<K>
    where
        K: Resource<Scope = DynamicResourceScope, DynamicType = ApiResource>,
    {
        Api::namespaced_with(self.client.clone(), namespace, &resource(&key.types()))
    }

    /// Applies an object, with force: what a template renders is ours. What it does not render stays whoever's it is.
    async fn apply(&self, vm: &VirtualMachine, object: &Rendered, uid: Option<&str>) -> Result<(), ActionError> {
        let key = &object.key;
        let failed = |source| ActionError::Api { what: "apply", key: key.clone(), source: Box::new(source) };
        // With a UID the API server refuses to apply to an object that was made anew meanwhile. Without one, because an apply
        // merges into whatever has the name, the object must not be there.
        let only = uid.map_or(("resourceVersion", NEVER), |uid| ("uid", uid));
        let applied = match self.send(&of(vm), key, &object.value, only).await {
            Err(kube::Error::Api(status)) if uid.is_none() && status.code == 409 => {
                let answer = kube::Error::Api(status);
                match self.look(&of(vm), key).await.map_err(failed)? {
                    Some(found) => return self.apply_to_existing(vm, object, found, answer).await,
                    None => Err(answer),
                }
            }
            applied => applied,
        };
        self.applied(key, applied.map_err(failed)?);
        Ok(())
    }

    /// The object was to be created, but the API server has one of that name.
    async fn apply_to_existing(
        &self,
        vm: &VirtualMachine,
        object: &Rendered,
        existing: Arrived,
        answer: kube::Error,
    ) -> Result<(), ActionError> {
        let key = &object.key;
        let failed = |source| ActionError::Api { what: "apply", key: key.clone(), source: Box::new(source) };
        let found = existing.object.unpack();
        match conflict(vm, object, &found) {
            Conflict::Apply(object) => {
                let applied = self.send(&of(vm), key, &object.value, ("uid", &found.uid)).await;
                self.applied(key, applied.map_err(failed)?);
                Ok(())
            }
            Conflict::Label(patch) => {
                self.label(&of(vm), key, &found.uid, &patch).await?;
                Err(failed(answer))
            }
            Conflict::Keep => {
                self.children.insert(existing);
                Ok(())
            }
            Conflict::NotOurs => Err(ActionError::NameTaken(key.clone())),
            Conflict::OtherVm(vm) => Err(ActionError::Shared { key: key.clone(), vm }),
        }
    }

    /// Takes in what the API server answered to an apply.
    fn applied(&self, key: &ObjectKey, applied: Arrived) {
        info!(object = %key, "applied");
        self.children.metrics.wrote("apply", &key.kind);
        self.children.insert(applied);
    }

    /// Asks the API server whether it would take an object, without making it. Fields that it does not know are an error.
    ///
    /// # Errors
    /// Why not.
    pub async fn try_out(&self, vm: &VirtualMachine, object: &Rendered) -> Result<(), ActionError> {
        let how = PatchParams { dry_run: true, ..PatchParams::apply(OBJECT_MANAGER).force().validation_strict() };
        self.patch(&of(vm), &object.key, &how, || Patch::Apply(&*object.value))
            .await
            .map(drop)
            .map_err(|source| ActionError::Api { what: "try out", key: object.key.clone(), source: Box::new(source) })
    }

    /// Applies an object if the one that is there has that in its metadata.
    async fn send(
        &self,
        namespace: &str,
        key: &ObjectKey,
        value: &Value,
        (field, has): (&str, &str),
    ) -> Result<Arrived, kube::Error> {
        let body = || {
            let mut value = value.clone();
            value["metadata"][field] = json!(has);
            Patch::Apply(value)
        };
        self.patch(namespace, key, &applying(OBJECT_MANAGER), body).await
    }

    /// Of the answer only what is kept is asked for: that about a secret does not tell it. The body is made when it is sent:
    /// hundreds may wait for their turn.
    async fn patch<T: Serialize + Debug>(
        &self,
        namespace: &str,
        key: &ObjectKey,
        how: &PatchParams,
        body: impl FnOnce() -> Patch<T>,
    ) -> Result<Arrived, kube::Error> {
        let name = &key.name;
        Ok(if key.is_looked_into() {
            let request = async { self.objects::<Whole>(namespace, key).patch(name, how, &body()).await };
            self.pack(key, self.in_turn(request).await?)
        } else {
            let request = async { self.objects::<Meta>(namespace, key).patch(name, how, &body()).await };
            self.pack(key, self.in_turn(request).await?)
        })
    }

    fn pack<const META: bool>(&self, key: &ObjectKey, object: Sent<META>) -> Arrived {
        object.pack(&key.types(), &self.children.shapes)
    }

    /// An object that the watches do not show: its metadata and, of a claim, all of it.
    async fn look(&self, namespace: &str, key: &ObjectKey) -> Result<Option<Arrived>, kube::Error> {
        Ok(if key.is_claim() {
            self.in_turn(self.objects::<Whole>(namespace, key).get_opt(&key.name))
                .await?
                .map(|object| self.pack(key, object))
        } else {
            self.in_turn(self.objects::<Meta>(namespace, key).get_opt(&key.name))
                .await?
                .map(|object| self.pack(key, object))
        })
    }

    async fn label(&self, namespace: &str, key: &ObjectKey, uid: &str, patch: &Value) -> Result<(), ActionError> {
        let body = || {
            let mut patch = patch.clone();
            patch["metadata"]["uid"] = json!(uid);
            Patch::Merge(patch)
        };
        let parameters = PatchParams { field_manager: Some(OBJECT_MANAGER.into()), ..PatchParams::default() };
        let patched = self.patch(namespace, key, &parameters, body).await;
        let patched =
            patched.map_err(|source| ActionError::Api { what: "label", key: key.clone(), source: Box::new(source) })?;
        info!(object = %key, "labelled");
        self.children.metrics.wrote("label", &key.kind);
        self.children.insert(patched);
        Ok(())
    }

    async fn delete(&self, namespace: &str, key: &ObjectKey, uid: &str, grace: Option<i64>) -> Result<(), ActionError> {
        let preconditions = Preconditions { uid: Some(uid.to_owned()), resource_version: None };
        let parameters = DeleteParams {
            preconditions: Some(preconditions),
            grace_period_seconds: grace.and_then(|seconds| seconds.try_into().ok()),
            ..DeleteParams::default()
        };
        match self.in_turn(self.objects::<Whole>(namespace, key).delete(&key.name, &parameters)).await {
            Ok(answer) => {
                info!(object = %key, "deleted");
                self.children.metrics.wrote("delete", &key.kind);
                // An object that waits for its grace period comes back with its time of deletion.
                if let Some(object) = answer.left() {
                    self.children.insert(self.pack(key, object));
                }
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                // Its watch may be one that can't tell any more.
                self.children.remove_missing(uid);
                Ok(())
            }
            Err(source) => Err(ActionError::Api { what: "delete", key: key.clone(), source: Box::new(source) }),
        }
    }

    /// Sets `spec.vm.state` to Stopped and notes for which shutdown of the guest, if nobody applies that field. Not if the machine was
    /// changed meanwhile; then it is decided anew. Returns whether it did.
    ///
    /// # Errors
    /// What the API server says.
    pub async fn write_stopped(&self, vm: &VirtualMachine, halted: &Halted) -> Result<bool, kube::Error> {
        let api: Api<VirtualMachine> = Api::namespaced(self.client.clone(), &of(vm));
        let parameters = PatchParams { field_manager: Some(OBJECT_MANAGER.into()), ..PatchParams::default() };
        let patch = json!({
            "metadata": {
                "uid": vm.metadata.uid, "resourceVersion": vm.metadata.resource_version,
                "annotations": { GUEST_SHUTDOWN_ANNOTATION: power::stamp(halted) },
            },
            "spec": { "vm": { "state": "Stopped" } },
        });
        match api.patch(&vm.name_any(), &parameters, &Patch::Merge(&patch)).await {
            Ok(_) => {
                info!(state = "Stopped", "wrote the spec");
                self.children.metrics.wrote("spec", "VirtualMachine");
                Ok(true)
            }
            // The watch tells what is new.
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes the manager's part of a machine's status, if the machine is still as it was when that was derived: where no
    /// runner has reported the manager speaks for it, and a report that came meanwhile must not be overwritten.
    ///
    /// # Errors
    /// What the API server says; 409 if the machine has changed, of which the watch tells.
    pub async fn write_status(
        &self,
        vm: &VirtualMachine,
        wanted: &VirtualMachineStatus,
    ) -> Result<VirtualMachine, kube::Error> {
        let api: Api<VirtualMachine> = Api::namespaced(self.client.clone(), &of(vm));
        let patch = json!({
            "apiVersion": VirtualMachine::api_version(&()),
            "kind": VirtualMachine::kind(&()),
            "metadata": {
                "name": vm.name_any(), "uid": vm.metadata.uid, "resourceVersion": vm.metadata.resource_version,
            },
            "status": wanted,
        });
        let (name, how) = (vm.name_any(), applying(STATUS_MANAGER));
        self.in_turn(api.patch_status(&name, &how, &Patch::Apply(&patch))).await
    }
}
