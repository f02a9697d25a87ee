//! Reads and writes objects of the API server.
//!
//! Reads come from a cache: [`watch`] keeps every object that has the labels of a VM, so a reconcile at rest sends no request. Writes are
//! [`Cluster::execute`], which executes a plan, and [`Cluster::write_status`].

mod claim_list;
mod current;
pub mod list_watch;
pub mod mounts;
pub mod packed;
mod release;
mod reports;
pub mod rights;
pub mod watch;

use std::{borrow::Cow, error::Error as _, fmt::Debug, sync::Arc};

use futures::future::join_all;
use k8s_openapi::api::core::v1::Node;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DeleteParams, Patch, PatchParams, Preconditions, PropagationPolicy},
    core::{DynamicResourceScope, response::StatusDetails},
};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::time::Instant;
use tracing::{debug, info, warn};

use self::{
    claim_list::ClaimLists,
    packed::{Arrived, Meta, Sent, Whole},
    watch::Children,
};
use crate::{
    answers,
    api::{Reason, StoredVm, VirtualMachine, VirtualMachineStatus, status::Halted},
    claims::{Foreign, RefusedChange},
    client::access::MissingRule,
    object::{GUEST_SHUTDOWN_ANNOTATION, ObjectKey, REPLACE_CLAIM_ANNOTATION, Rendered, is_workload},
    observed::{MAXIMUM_DEPTH, Maker, NodeState, Object, Observed},
    ownership::{self, OBJECT_MANAGER, REPAIR_MANAGER, STATUS_MANAGER, status_to_apply},
    plan::{
        Action, Plan,
        beside::is_action_beside,
        conflict::{Conflict, adopts, conflict, is_another_volume},
        image_annotation,
    },
    power,
    process::{ErrorChain, slots::Slots},
    schedule::Persistence,
};

/// A resourceVersion that no object has: the first write to an empty etcd gets a higher one.
///
/// The API server compares the version only with an object that exists. So an apply with this version creates an object that is absent,
/// and is refused with a conflict if an object with that name exists. It never merges into someone else's object, and the manager need
/// not read the object first.
pub const NO_VERSION: &str = "1";

/// A cluster, or the namespaces of it, in which the manager manages VMs.
#[derive(Clone)]
pub struct Cluster {
    /// The client of the API server.
    pub client: Client,
    /// The cache of the VMs' objects.
    pub children: Arc<Children>,
    /// A slot for each request under way.
    requests: Slots,
    claim_lists: Arc<ClaimLists>,
}

/// The number of simultaneous requests, beside those that hang. Each has its own connection, which costs time to open and memory on both
/// sides. With 16 an API server is not always busy; more than 32 are not faster, and take memory (docs/performance.md).
pub const REQUESTS: usize = 32;

/// A VM whose status was written.
#[derive(Debug)]
pub struct StatusWritten {
    /// The VM as it is now.
    pub vm: VirtualMachine,
    /// Why the API server refused a part of the status, which was left out.
    pub refused: Option<String>,
}

/// The result of the execution of a plan.
#[derive(Debug)]
pub struct Executed<'a> {
    /// The actions that succeeded.
    pub done: Vec<&'a Action>,
    /// The changes of claims that the API server refused. They are no errors: the VM runs with its claims as they are.
    pub refusals: Vec<RefusedChange>,
    /// The errors of objects that no Pod mounts. They hold up nothing.
    pub beside: Vec<ActionError>,
    /// The first other error. Later steps were not executed.
    pub result: Result<(), ActionError>,
}

/// An action that failed.
#[derive(Debug, thiserror::Error)]
pub enum ActionError {
    /// The request failed.
    #[error("{what} {key}")]
    Api {
        /// `apply`, `dry run of`, `label` or `delete`.
        what: &'static str,
        /// The object.
        key: ObjectKey,
        /// The error.
        source: Box<kube::Error>,
    },
    /// The manager lacks a right.
    #[error("{what} {key}: {rule}")]
    Forbidden {
        /// As in [`ActionError::Api`].
        what: &'static str,
        /// The object.
        key: ObjectKey,
        /// The rule that it lacks.
        rule: MissingRule,
    },
    /// An object with that name exists and does not belong to the VM.
    #[error("{0} exists and does not belong to this VM: delete or rename one of the two")]
    NameTaken(ObjectKey),
    /// A claim with the name of a disk is not the VM's.
    #[error("{key} {why}")]
    ForeignClaim {
        /// The claim.
        key: ObjectKey,
        /// Whose it is, and what to do.
        why: Foreign,
    },
    /// A claim that the cache did not have exists, and is used now. It is another volume than the Pod was rendered for.
    #[error("{0} exists already: the VM is planned again with it")]
    Adopted(ObjectKey),
    /// What the Pod mounts was made, and meanwhile the VM was changed or deleted.
    #[error("the VM has changed since its start was decided: it is planned again, and {0} is not created")]
    Outdated(ObjectKey),
    /// A Secret or ConfigMap with cloud-init data is not meant for VMs.
    #[error(
        "the {kind} {name} can't be used as cloud-init data: {}",
        match why {
            NoSource::Missing => format!("it does not exist; create it in the namespace of the VM, with the label {label}"),
            NoSource::Unlabelled => format!(
                "it does not have the label; whoever may change the {kind} allows it: kubectl label {} {name} {label}=",
                kind.to_lowercase()
            ),
            NoSource::Reserved(why) => format!("{why}; put the data into another {kind}, with the label {label}"),
        }
    )]
    SecretRefused {
        /// Secret or ConfigMap.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The label that it needs.
        label: String,
        /// What is wrong.
        why: NoSource,
    },
    /// The Pod would mount something that does not exist.
    #[error(
        "{object} {}, and the Pod would mount it: create it, or name another one{}",
        match lacking { Lacking::Object => "does not exist".to_owned(), Lacking::Key(key) => format!("has no key {key}") },
        if *is_restart { "; until then the guest runs on and is not restarted" } else { "" }
    )]
    MountMissing {
        /// The Secret, the ConfigMap or the claim.
        object: ObjectKey,
        /// What is missing.
        lacking: Lacking,
        /// Whether a guest would be taken down, and not come back.
        is_restart: bool,
    },
    /// A claim that would be removed together with the Pod of a guest that is to be restarted.
    #[error(
        "{0} is being deleted, and is removed with its data when the Pod ends: the guest runs on and is not restarted until you have saved the data and given them up: annotate the VM with {REPLACE_CLAIM_ANNOTATION}=UID of the claim"
    )]
    ClaimDeleting(ObjectKey),
    /// The API server would refuse what runs the guest, so a guest that is to be restarted would not come back.
    #[error("the API server would refuse {key}, so the guest runs on and is not restarted")]
    RestartRefused {
        /// What runs the guest.
        key: ObjectKey,
        /// The API server's answer.
        source: Box<kube::Error>,
    },
    /// The API server's answer can't be parsed.
    #[error("the API server's answer about {key} can't be parsed")]
    Answer {
        /// The object.
        key: ObjectKey,
        /// The error.
        source: serde_json::Error,
    },
}

/// Why an object is no source of cloud-init data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoSource {
    /// It does not exist.
    Missing,
    /// It lacks the label.
    Unlabelled,
    /// It is the operator's own, with the reason.
    Reserved(&'static str),
}

/// What is missing of an object that a Pod would mount.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// All of it.
    Object,
    /// A key of a ConfigMap.
    Key(String),
}

impl ActionError {
    /// Whether the action may succeed when it is tried again unchanged.
    pub fn persistence(&self) -> Persistence {
        match self {
            Self::Api { source, .. } if is_busy(source) => Persistence::Busy,
            Self::Adopted(_) | Self::Outdated(_) => Persistence::Busy,
            Self::Api { source, .. } if is_transient(source) => Persistence::Transient,
            Self::Api { .. }
            | Self::Forbidden { .. }
            | Self::NameTaken(_)
            | Self::ForeignClaim { .. }
            | Self::SecretRefused { .. }
            | Self::MountMissing { .. }
            | Self::ClaimDeleting(_)
            | Self::RestartRefused { .. }
            | Self::Answer { .. } => Persistence::Lasting,
        }
    }

    /// Whether the action may succeed when it is tried again unchanged. Otherwise the API server refused it, and a person must know.
    pub fn is_transient(&self) -> bool {
        self.persistence() != Persistence::Lasting
    }

    /// Whether nothing can be created in the namespace, because it is being deleted or is gone.
    pub fn is_of_namespace(&self) -> bool {
        let Self::Api { source, .. } = self else { return false };
        let kube::Error::Api(status) = &**source else { return false };
        let details = status.details.as_ref();
        let is_ending = |details: &StatusDetails| {
            details.causes.iter().any(|cause| cause.reason == "NamespaceTerminating")
                || (status.code == 404 && details.kind == "namespaces")
        };
        details.is_some_and(is_ending)
    }

    /// What the metric `vm_operator_reconcile_errors` calls the error.
    pub fn label(&self) -> Cow<'static, str> {
        match self {
            Self::Forbidden { .. } => "Forbidden".into(),
            Self::NameTaken(_) => Reason::NameTaken.as_str().into(),
            Self::ForeignClaim { why, .. } => why.reason().as_str().into(),
            Self::Adopted(_) => "Adopted".into(),
            Self::Outdated(_) => "Outdated".into(),
            Self::SecretRefused { .. } => Reason::SecretRefused.as_str().into(),
            Self::MountMissing { .. } => Reason::MountMissing.as_str().into(),
            Self::ClaimDeleting(_) => Reason::ClaimDeleting.as_str().into(),
            Self::RestartRefused { source, .. } => api_label(source),
            Self::Answer { .. } => "Answer".into(),
            Self::Api { source, .. } => api_label(source),
        }
    }

    /// The reason of the condition Ready.
    pub fn reason(&self) -> Reason {
        match self {
            Self::NameTaken(_) => Reason::NameTaken,
            Self::ForeignClaim { why, .. } => why.reason(),
            Self::SecretRefused { .. } => Reason::SecretRefused,
            Self::MountMissing { .. } => Reason::MountMissing,
            Self::ClaimDeleting(_) => Reason::ClaimDeleting,
            Self::Api { .. }
            | Self::Forbidden { .. }
            | Self::Adopted(_)
            | Self::Outdated(_)
            | Self::RestartRefused { .. }
            | Self::Answer { .. } => Reason::ApplyFailed,
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
        kube::Error::Api(answer) => answers::is_transient(answer),
        _ => true,
    }
}

/// [`answers::is_refusal`].
pub fn is_refusal(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if answers::is_refusal(answer))
}

fn is_busy(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if answers::is_busy(answer))
}

/// The parameters of a server-side apply.
///
/// With force, because the manager owns everything that it applies. Without validation: the API server would parse the patch a second
/// time to warn of duplicate keys, which the manager never sends. A field that the kind does not have is an error nevertheless.
fn applying(field_manager: &str) -> PatchParams {
    PatchParams::apply(field_manager).force().validation_ignore()
}

/// The namespace of a VM and of all its objects.
fn namespace_of(vm: &VirtualMachine) -> String {
    vm.namespace().unwrap_or_default()
}

impl Cluster {
    /// The cluster of `client`. All parts of it share the slots for requests.
    pub fn new(client: Client, children: Arc<Children>, requests: Slots) -> Self {
        Self { client, children, requests, claim_lists: Arc::default() }
    }

    /// Executes a plan, step by step. The actions of one step are sent at the same time. After a failure the later steps are not executed,
    /// because a Pod must not be created before the objects that it mounts; what it does not mount holds up nothing. When this returns,
    /// [`Cluster::children`] contains the results.
    pub async fn execute<'a>(&self, vm: &VirtualMachine, plan: &'a Plan) -> Executed<'a> {
        let mut executed = Executed { done: Vec::new(), refusals: Vec::new(), beside: Vec::new(), result: Ok(()) };
        let began = Instant::now();
        for (number, step) in plan.steps.iter().enumerate() {
            // An object of the step before may be what creates them.
            let checked = match self.check_mounts(vm, step).await {
                Ok(()) => self.check_vm(vm, step, began.elapsed()).await,
                refused => refused,
            };
            if let Err(error) = checked {
                executed.result = Err(error);
                break;
            }
            let results = join_all(step.iter().map(|action| self.execute_action(vm, action))).await;
            for (action, result) in step.iter().zip(results) {
                match (action, result) {
                    (_, Ok(())) => executed.done.push(action),
                    (Action::Apply { object, uid: Some(_) }, Err(error))
                        if object.key.is_claim() && !error.is_transient() =>
                    {
                        warn!(object = %object.key, error = %ErrorChain(&error), "the claim stays as it is");
                        let answer =
                            error.source().map_or_else(|| error.to_string(), |answer| ErrorChain(answer).to_string());
                        executed.refusals.push(RefusedChange { claim: object.key.clone(), answer });
                    }
                    (action, Err(error)) => {
                        let error = self.with_missing_rule(&namespace_of(vm), error).await;
                        if is_action_beside(number, action) {
                            executed.beside.push(error);
                        } else {
                            executed.result = executed.result.and(Err(error));
                        }
                    }
                }
            }
            if executed.result.is_err() {
                break;
            }
        }
        executed
    }

    async fn execute_action(&self, vm: &VirtualMachine, action: &Action) -> Result<(), ActionError> {
        match action {
            Action::Apply { object, uid } => self.apply(vm, object, uid.as_deref()).await,
            Action::Label { key, uid, patch } => self.label(&namespace_of(vm), key, uid, patch).await,
            Action::Image { key, uid, container, image } => {
                let patch = json!({
                    "metadata": { "annotations": { image_annotation(container): image } },
                    "spec": { "initContainers": [{ "name": container, "image": image }] },
                });
                self.change(&namespace_of(vm), key, uid, "change the image of", Patch::Strategic(patch)).await?;
                info!(object = %key, container, image, "changed the image");
                self.children.metrics.wrote("image", &key.kind);
                Ok(())
            }
            Action::Delete { key, uid, grace, version, keeps_owned, reason: _ } => {
                let resource_version = version.map(|version| version.to_string());
                let preconditions = Preconditions { uid: Some(uid.clone()), resource_version };
                // Of a Job that is deleted without a policy, the Pods stay.
                let of_maker = is_workload(key).then_some(PropagationPolicy::Background);
                let parameters = DeleteParams {
                    preconditions: Some(preconditions),
                    grace_period_seconds: grace.and_then(|seconds| seconds.try_into().ok()),
                    propagation_policy: keeps_owned.then_some(PropagationPolicy::Orphan).or(of_maker),
                    ..DeleteParams::default()
                };
                self.delete(&namespace_of(vm), key, uid, &parameters).await
            }
        }
    }

    async fn objects<K>(&self, namespace: &str, key: &ObjectKey) -> kube::Result<Api<K>>
    where
        K: Resource<Scope = DynamicResourceScope, DynamicType = ApiResource>,
    {
        let resource = self.children.resources.of(&key.types()).await?;
        Ok(Api::namespaced_with(self.client.clone(), namespace, &resource))
    }

    /// Applies a rendered object. Fields that are not rendered stay with their owners.
    async fn apply(&self, vm: &VirtualMachine, object: &Rendered, uid: Option<&str>) -> Result<(), ActionError> {
        let key = &object.key;
        let failed = |source| ActionError::Api { what: "apply", key: key.clone(), source: Box::new(source) };
        // With a UID, the API server refuses to apply to an object that was deleted and created again meanwhile. Without one, the object
        // must not exist, because an apply would merge into it.
        let condition = uid.map_or(("resourceVersion", NO_VERSION), |uid| ("uid", uid));
        let value = self.released(vm, key, &object.value).await.map_err(failed)?;
        let applied = match self.apply_if(&namespace_of(vm), key, &value, condition).await {
            Err(kube::Error::Api(status)) if uid.is_none() && status.code == 409 => {
                let answer = kube::Error::Api(status);
                match self.get(&namespace_of(vm), key).await.map_err(failed)? {
                    Some(found) => return self.apply_to_existing(vm, object, found, answer).await,
                    None => Err(answer),
                }
            }
            applied => applied,
        };
        self.store_applied(key, applied.map_err(failed)?);
        Ok(())
    }

    /// An object with the name of the one to create exists, and the cache does not have it.
    async fn apply_to_existing(
        &self,
        vm: &VirtualMachine,
        rendered: &Rendered,
        existing: Arrived,
        answer: kube::Error,
    ) -> Result<(), ActionError> {
        let key = &rendered.key;
        let failed = |source| ActionError::Api { what: "apply", key: key.clone(), source: Box::new(source) };
        let found = existing.object.unpack();
        let claimant = Some(&found).filter(|_| key.is_claim()).and_then(|claim| self.children.claimant(vm, claim));
        match conflict(vm, rendered, &found, claimant.as_ref()) {
            // It is taken only when the Pods of others that write to it are gone.
            Conflict::Apply(_) if key.is_claim() && self.children.is_in_use(vm, &key.name) => Err(failed(answer)),
            // Somebody else may have taken the owner away, as at the deletion of the VM.
            Conflict::Apply(_) if adopts(rendered, &found) && !self.is_current(vm).await? => Err(failed(answer)),
            Conflict::Apply(object) => {
                let value = self.released(vm, key, &object.value).await.map_err(failed)?;
                let applied = self.apply_if(&namespace_of(vm), key, &value, ("uid", &found.uid)).await;
                self.store_applied(key, applied.map_err(failed)?);
                if is_another_volume(rendered, &found) { Err(ActionError::Adopted(key.clone())) } else { Ok(()) }
            }
            Conflict::Label(patch) => {
                self.label(&namespace_of(vm), key, &found.uid, &patch).await?;
                Err(failed(answer))
            }
            Conflict::Keep => {
                self.children.insert(existing);
                Ok(())
            }
            Conflict::NotOurs => Err(ActionError::NameTaken(key.clone())),
            Conflict::Foreign(why) => Err(ActionError::ForeignClaim { key: key.clone(), why }),
        }
    }

    /// Stores the API server's answer to an apply in the cache.
    fn store_applied(&self, key: &ObjectKey, applied: Arrived) {
        info!(object = %key, "applied");
        self.children.metrics.wrote("apply", &key.kind);
        self.children.insert(applied);
    }

    /// Sends a dry run: would the API server accept the object? Fields that it does not know are an error.
    ///
    /// # Errors
    /// Why the API server refuses the object, or that it did not answer.
    pub async fn dry_run(&self, vm: &VirtualMachine, object: &Rendered) -> Result<(), ActionError> {
        let how = PatchParams { dry_run: true, ..PatchParams::apply(OBJECT_MANAGER).force().validation_strict() };
        self.patch(&namespace_of(vm), &object.key, &how, || Patch::Apply(&*object.value)).await.map(drop).map_err(
            |source| ActionError::Api { what: "dry run of", key: object.key.clone(), source: Box::new(source) },
        )
    }

    /// Applies an object on the condition that `field` of the existing object's metadata has the value `has`.
    async fn apply_if(
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

    /// Sends a patch. Of most kinds the answer contains only the metadata, so the content of a Secret never reaches the manager. The body is
    /// made only when the limit allows the request, because hundreds of requests may wait.
    async fn patch<T: Serialize + Debug>(
        &self,
        namespace: &str,
        key: &ObjectKey,
        how: &PatchParams,
        body: impl FnOnce() -> Patch<T>,
    ) -> Result<Arrived, kube::Error> {
        let name = &key.name;
        Ok(if key.needs_content() {
            let request = async { self.objects::<Whole>(namespace, key).await?.patch(name, how, &body()).await };
            self.pack(key, self.requests.run(request).await?)
        } else {
            let request = async { self.objects::<Meta>(namespace, key).await?.patch(name, how, &body()).await };
            self.pack(key, self.requests.run(request).await?)
        })
    }

    fn pack<const META: bool>(&self, key: &ObjectKey, object: Sent<META>) -> Arrived {
        object.pack(&key.types(), &self.children.shapes)
    }

    /// Reads an object that the cache does not have: the metadata and, of a claim, the content too.
    async fn get(&self, namespace: &str, key: &ObjectKey) -> Result<Option<Arrived>, kube::Error> {
        Ok(if key.is_claim() {
            let request = async { self.objects::<Whole>(namespace, key).await?.get_opt(&key.name).await };
            self.requests.run(request).await?.map(|object| self.pack(key, object))
        } else {
            let request = async { self.objects::<Meta>(namespace, key).await?.get_opt(&key.name).await };
            self.requests.run(request).await?.map(|object| self.pack(key, object))
        })
    }

    /// Reads whether a node answers. The manager works without the right to read Nodes.
    pub async fn node_state(&self, name: &str) -> NodeState {
        match self.requests.run(Api::<Node>::all(self.client.clone()).get_opt(name)).await {
            Ok(Some(node)) => {
                let conditions = node.status.and_then(|status| status.conditions).unwrap_or_default();
                let ready = conditions.iter().find(|condition| condition.type_ == "Ready");
                NodeState::by_ready(ready.map(|ready| ready.status.as_str()))
            }
            Ok(None) => NodeState::Removed,
            Err(error) => {
                debug!(node = name, error = %ErrorChain(&error), "the Node can't be read");
                NodeState::NotKnown
            }
        }
    }

    /// Sends a request when there is a free slot.
    pub async fn ask<T>(&self, request: impl Future<Output = T>) -> T {
        self.requests.run(request).await
    }

    /// What makes the VM's Pods, and the makers of these, as far as they are not among the observed objects. A maker that can't be read
    /// is known by its owner reference alone.
    pub async fn makers(&self, vm: &VirtualMachine, observed: &Observed) -> Vec<Arc<Object>> {
        let mut makers: Vec<Arc<Object>> = Vec::new();
        for pod in observed.objects.iter().filter(|object| object.key.is_pod()) {
            let mut next = pod.maker.clone();
            // Owner references could form a circle.
            for _ in 0..MAXIMUM_DEPTH {
                let Some(maker) = next else { break };
                let known = observed.objects.iter().chain(&makers).find(|object| object.uid == maker.uid);
                if let Some(known) = known {
                    next = known.maker.clone();
                } else if let Some(found) = self.maker(&namespace_of(vm), &maker).await {
                    next = found.maker.clone();
                    makers.push(Arc::new(found));
                } else {
                    break;
                }
            }
        }
        makers
    }

    /// Reads a maker; `None` if it does not exist any more.
    async fn maker(&self, namespace: &str, maker: &Maker) -> Option<Object> {
        let read = async { self.objects::<Meta>(namespace, &maker.key).await?.get_opt(&maker.key.name).await };
        match self.requests.run(read).await {
            Ok(found) => {
                found.map(|found| self.pack(&maker.key, found).object.unpack()).filter(|found| found.uid == maker.uid)
            }
            Err(error) => {
                warn!(object = %maker.key, error = %ErrorChain(&error), "what makes the Pod can't be read");
                let object =
                    json!({ "metadata": { "name": maker.key.name, "namespace": namespace, "uid": maker.uid } });
                let object: Meta = serde_json::from_value(object).ok()?;
                Some(self.pack(&maker.key, object).object.unpack())
            }
        }
    }

    async fn label(&self, namespace: &str, key: &ObjectKey, uid: &str, patch: &Value) -> Result<(), ActionError> {
        self.change(namespace, key, uid, "label", Patch::Merge(patch.clone())).await?;
        info!(object = %key, "labelled");
        self.children.metrics.wrote("label", &key.kind);
        Ok(())
    }

    /// Sends a patch to the object with that UID, and keeps the answer in the cache. `what` is what the patch does, for errors.
    async fn change(
        &self,
        namespace: &str,
        key: &ObjectKey,
        uid: &str,
        what: &'static str,
        mut patch: Patch<Value>,
    ) -> Result<(), ActionError> {
        if let Patch::Merge(patch) | Patch::Strategic(patch) = &mut patch {
            patch["metadata"]["uid"] = json!(uid);
        }
        let parameters = PatchParams { field_manager: Some(OBJECT_MANAGER.into()), ..PatchParams::default() };
        let patched = self.patch(namespace, key, &parameters, || patch).await;
        let failed = |source| ActionError::Api { what, key: key.clone(), source: Box::new(source) };
        self.children.insert(patched.map_err(failed)?);
        Ok(())
    }

    async fn delete(
        &self,
        namespace: &str,
        key: &ObjectKey,
        uid: &str,
        parameters: &DeleteParams,
    ) -> Result<(), ActionError> {
        let request = async { self.objects::<Whole>(namespace, key).await?.delete(&key.name, parameters).await };
        match self.requests.run(request).await {
            Ok(answer) => {
                info!(object = %key, "deleted");
                self.children.metrics.wrote("delete", &key.kind);
                // The API server returns an object that is deleted after its grace period.
                if let Some(object) = answer.left() {
                    self.children.insert(self.pack(key, object));
                }
                Ok(())
            }
            Err(kube::Error::Api(status)) if status.code == 404 => {
                // The watch of its kind may have ended and not report that.
                self.children.remove_missing(uid);
                Ok(())
            }
            Err(source) => Err(ActionError::Api { what: "delete", key: key.clone(), source: Box::new(source) }),
        }
    }

    /// Sets `spec.vm.state` to Stopped, and the annotation that identifies the guest's shutdown. Returns false if the VM was changed or
    /// deleted meanwhile; then the next reconcile decides again.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn write_stopped(&self, vm: &VirtualMachine, halted: &Halted) -> Result<bool, kube::Error> {
        let api: Api<StoredVm> = Api::namespaced(self.client.clone(), &namespace_of(vm));
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
            // The watch reports the change.
            Err(kube::Error::Api(answer)) if matches!(answer.code, 404 | 409) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Writes the manager's part of a VM's status. If the API server refuses a part of it, the rest is written; if it names no part, what the
    /// VM is and why. On the condition that the VM has not changed since the status was derived: if no runner has reported, the manager
    /// writes the runner's conditions, and it must not overwrite a report that arrived meanwhile.
    ///
    /// # Errors
    /// The error of the request; 409 if the VM has changed, which the watch reports.
    pub async fn write_status(
        &self,
        vm: &VirtualMachine,
        wanted: &VirtualMachineStatus,
    ) -> Result<StatusWritten, kube::Error> {
        let mut left = wanted.clone();
        let mut refused: Option<String> = None;
        let mut is_short = false;
        loop {
            match self.write_readable_status(vm, &left).await {
                Ok(vm) => return Ok(StatusWritten { vm, refused }),
                Err(kube::Error::Api(answer)) if matches!(answer.code, 400 | 406 | 413 | 415 | 422 | 500) => {
                    match ownership::without_refused(vm, &left, &answer) {
                        Some((part, rest)) => {
                            warn!(
                                part,
                                error = answer.message,
                                "the API server refuses a part of the status; the rest is written"
                            );
                            left = rest;
                            refused.get_or_insert(answer.message);
                        }
                        None if !is_short && answers::is_refusal_of_status(&answer) => {
                            warn!(
                                error = answer.message,
                                "the API server refuses the status; what is most important of it is written"
                            );
                            is_short = true;
                            left = left.shortened();
                            refused.get_or_insert(answer.message);
                        }
                        None => return Err(kube::Error::Api(answer)),
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Writes the status, over a stored one that has values of a wrong type if need be.
    async fn write_readable_status(
        &self,
        vm: &VirtualMachine,
        wanted: &VirtualMachineStatus,
    ) -> Result<VirtualMachine, kube::Error> {
        let applied = self.apply_status(vm, wanted).await;
        let Err(kube::Error::Api(answer)) = &applied else { return applied };
        if !answers::is_stored_untyped(answer) {
            return applied;
        }
        // The stored VM has a value of a wrong type, so the API server refuses every apply. It accepts a replacement of the whole status.
        warn!(error = answer.message, "the status has values that the definition does not allow; they are removed");
        let readable = vm.status.clone().unwrap_or_default().valid();
        let cleaned = self.replace_status(vm, &json!(readable)).await?;
        match self.apply_status(&cleaned, wanted).await {
            // Then it is the spec that has such a value.
            Err(kube::Error::Api(answer)) if answers::is_stored_untyped(&answer) => {
                self.replace_status(&cleaned, &ownership::merged_status(&readable, wanted)).await
            }
            applied => applied,
        }
    }

    /// Replaces the whole status of a VM, on the condition that the VM has not changed.
    async fn replace_status(&self, vm: &VirtualMachine, status: &Value) -> Result<VirtualMachine, kube::Error> {
        let api: Api<StoredVm> = Api::namespaced(self.client.clone(), &namespace_of(vm));
        let patch = json!([
            { "op": "replace", "path": "/metadata/resourceVersion", "value": vm.metadata.resource_version },
            { "op": "add", "path": "/status", "value": status },
        ]);
        let patch = Patch::Json::<()>(serde_json::from_value(patch).map_err(kube::Error::SerdeError)?);
        let how = PatchParams { field_manager: Some(REPAIR_MANAGER.into()), ..PatchParams::default() };
        let StoredVm(written) = self.requests.run(api.patch_status(&vm.name_any(), &how, &patch)).await?;
        Ok(written)
    }

    async fn apply_status(
        &self,
        vm: &VirtualMachine,
        wanted: &VirtualMachineStatus,
    ) -> Result<VirtualMachine, kube::Error> {
        let api: Api<StoredVm> = Api::namespaced(self.client.clone(), &namespace_of(vm));
        let patch = json!({
            "apiVersion": VirtualMachine::api_version(&()),
            "kind": VirtualMachine::kind(&()),
            "metadata": {
                "name": vm.name_any(), "uid": vm.metadata.uid, "resourceVersion": vm.metadata.resource_version,
            },
            "status": status_to_apply(vm, wanted),
        });
        let (name, how) = (vm.name_any(), applying(STATUS_MANAGER));
        let StoredVm(written) = self.requests.run(api.patch_status(&name, &how, &Patch::Apply(&patch))).await?;
        Ok(written)
    }
}
