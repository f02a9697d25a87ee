//! What a bench does to the API server: the raw limit, and what people do to their VMs.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{PartialObjectMeta, Request};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;
use vm_operator::api::{VirtualMachine, VmReport};
use vm_operator::config::ReconcilerConfig;
use vm_operator::object::{HASH_ANNOTATION, Rendered, constant_resource, labels};
use vm_operator::observed::Observed;
use vm_operator::ownership::{OBJECT_MANAGER, STATUS_MANAGER};
use vm_operator::plan::plan;
use vm_operator::render::{RandomInput, TemplateSet, render};
use vm_operator::status::{ExecutionResult, Reconciled, UsedTemplates, status};

/// How many VMs are worked on at once: enough to keep the API server busy.
const CONCURRENCY: usize = 32;
/// Nothing takes that long on any machine.
pub const LIMIT: Duration = Duration::from_secs(3600);

/// The name of a VM.
pub fn name(number: usize) -> String {
    format!("vm-{number:05}")
}

/// A machine of the bench.
pub fn machine(number: usize) -> Result<VirtualMachine> {
    let text = include_str!("../../../benches/machine.yaml").replace("NAME", &name(number));
    serde_yaml::from_str(&text).context("reading benches/machine.yaml")
}

/// Does something for each number, [`CONCURRENCY`] at once.
pub async fn each<F>(count: usize, action: impl Fn(usize) -> F) -> Result<()>
where
    F: Future<Output = Result<()>> + Send + 'static,
{
    // Spawned when its turn comes, so that all cores work on them.
    let actions = futures::stream::iter((0..count).map(|number| tokio::spawn(action(number))));
    actions.buffer_unordered(CONCURRENCY).map(|done| done.context("waiting for a request")?).try_collect().await
}

/// Makes the VMs.
pub async fn create(client: &Client, namespace: &str, numbers: std::ops::Range<usize>) -> Result<()> {
    let first = numbers.start;
    each(numbers.len(), |number| {
        let api: Api<VirtualMachine> = Api::namespaced(client.clone(), namespace);
        async move {
            let vm = machine(first + number)?;
            api.create(&PostParams::default(), &vm).await.with_context(|| format!("creating {}", vm.name_any()))?;
            Ok(())
        }
    })
    .await
}

/// What the raw limit took.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Raw {
    /// From the first creation of a VM until the last Pod was seen.
    pub pods_s: f64,
    /// That part of it in which the VMs were made.
    pub create_s: f64,
    /// Writes per machine, with its creation.
    pub writes_per_vm: usize,
}

/// A bare client that makes the writes that no operator can avoid: it creates the VMs, then applies what is rendered
/// for each, the report of its Pod, and its status. It watches nothing but the number of Pods, and decides nothing.
pub async fn raw(client: &Client, namespace: &str, count: usize, pods: &mut Seen) -> Result<Raw> {
    let start = Instant::now();
    create(client, namespace, 0..count).await?;
    let create = start.elapsed();
    // To render is the operator's business, so it does not count.
    let vms: Api<VirtualMachine> = Api::namespaced(client.clone(), namespace);
    let vms = vms.list(&Default::default()).await.context("listing the VMs")?.items;
    let templates = TemplateSet::builtin()?;
    let writes: Vec<Writes> = vms.iter().map(|vm| Writes::of(vm, &templates)).collect::<Result<_>>()?;
    let writes_per_vm = writes.first().map_or(0, |writes| writes.steps.iter().map(Vec::len).sum::<usize>() + 3);
    let begin = Instant::now();
    each(count, |number| {
        let (client, writes) = (client.clone(), writes[number].clone());
        async move { writes.send(&client).await }
    })
    .await?;
    let last = pods.until("the Pods of the raw limit", |seen| seen.len() >= count).await?;
    let pods_s = (create + last.saturating_duration_since(begin)).as_secs_f64();
    Ok(Raw { pods_s, create_s: create.as_secs_f64(), writes_per_vm })
}

/// The requests that a VM's start needs.
#[derive(Clone)]
struct Writes {
    namespace: String,
    name: String,
    steps: Vec<Vec<Rendered>>,
    report: Value,
    status: Value,
}

impl Writes {
    fn of(vm: &VirtualMachine, templates: &TemplateSet) -> Result<Self> {
        let observed = Observed::nothing(Timestamp::now());
        let random =
            RandomInput { display_password: "0123456789abcdef0123456789abcdef".into(), ..RandomInput::default() };
        let rendered = render(vm, &observed, &ReconcilerConfig::default(), &random, templates)?;
        let plan = plan(vm, &observed, Some(&rendered));
        let reconciled = Reconciled {
            vm,
            observed: &observed,
            plan: &plan,
            rendered: Ok(&rendered),
            outcome: &ExecutionResult::default(),
            source: UsedTemplates::default(),
        };
        let status = json!({
            "apiVersion": VirtualMachine::api_version(&()),
            "kind": VirtualMachine::kind(&()),
            "metadata": { "name": vm.name_any(), "uid": vm.metadata.uid },
            "status": status(&reconciled),
        });
        // Its name is the Pod's UID, which nobody knows yet. Another UID does as well.
        let report = json!({
            "apiVersion": VmReport::api_version(&()),
            "kind": VmReport::kind(&()),
            "metadata": {
                "name": vm.metadata.uid, "labels": labels(&vm.name_any()), "ownerReferences": [vm.controller_owner_ref(&())],
            },
            "spec": { "vm": vm.name_any() },
        });
        // What a Pod mounts is made before it.
        let (pods, others) = rendered.into_iter().partition(|object| object.key.is_pod());
        let namespace = vm.namespace().unwrap_or_default();
        Ok(Self { namespace, name: vm.name_any(), steps: vec![others, pods], report, status })
    }

    async fn send(self, client: &Client) -> Result<()> {
        for step in &self.steps {
            let writes = step.iter().map(async |object| {
                let resource = constant_resource(&object.key.types()).context("a kind that is not built in")?;
                self.apply(client, resource, &object.key.name, &object.value, OBJECT_MANAGER).await
            });
            try_join_all(writes).await?;
        }
        let (reports, name) = (ApiResource::erase::<VmReport>(&()), self.report["metadata"]["name"].as_str());
        self.apply(client, reports, name.unwrap_or_default(), &self.report, OBJECT_MANAGER).await?;
        let vms = ApiResource::erase::<VirtualMachine>(&());
        self.apply(client, vms, &self.name, &self.status, STATUS_MANAGER).await
    }

    /// The answer is not looked into.
    async fn apply(&self, client: &Client, of: ApiResource, name: &str, value: &Value, manager: &str) -> Result<()> {
        let request = Request::new(DynamicObject::url_path(&of, Some(&self.namespace)));
        let (parameters, patch) = (PatchParams::apply(manager).force(), Patch::Apply(value));
        let request = if manager == OBJECT_MANAGER {
            request.patch(name, &parameters, &patch)
        } else {
            request.patch_subresource("status", name, &parameters, &patch)
        };
        let failed = || format!("applying {} {name}", of.kind);
        client.request_text(request.with_context(failed)?).await.with_context(failed).map(drop)
    }
}

/// Changes every machine, as a person does with `kubectl patch`.
pub async fn patch(client: &Client, namespace: &str, count: usize, patch: &Value) -> Result<()> {
    each(count, |number| {
        let (api, patch): (Api<VirtualMachine>, _) = (Api::namespaced(client.clone(), namespace), patch.clone());
        async move {
            let vm = name(number);
            let parameters = PatchParams { field_manager: Some("bench".into()), ..PatchParams::default() };
            api.patch(&vm, &parameters, &Patch::Merge(patch)).await.with_context(|| format!("patching {vm}"))?;
            Ok(())
        }
    })
    .await
}

/// Plays the kubelet and the runner of every machine: their guests run. A VM that does not start is looked at again and again.
pub async fn run(client: &Client, namespace: &str, count: usize) -> Result<()> {
    each(count, |number| {
        let reports: Api<VmReport> = Api::namespaced(client.clone(), namespace);
        let pods: Api<Pod> = Api::namespaced(client.clone(), namespace);
        async move {
            let (vm, told) = (name(number), "2027-01-15T10:00:00Z");
            let container = json!({ "name": "vm-runner", "image": "", "imageID": "", "ready": true, "restartCount": 0,
                "state": { "running": { "startedAt": told } } });
            let of_pod = json!({ "status": { "phase": "Running", "containerStatuses": [container] } });
            let pod = pods.patch_status(&vm, &PatchParams::default(), &Patch::Merge(of_pod)).await;
            let pod = pod.with_context(|| format!("reporting Pod {vm}"))?;
            let condition = |type_: &str| json!({ "type": type_, "status": "True", "reason": "Started", "message": "", "lastTransitionTime": told });
            let report = json!([{
                "op": "add", "path": "/status",
                "value": { "cpus": 2, "ram": "4294967296", "conditions": [condition("Running"), condition("Booted")] },
            }]);
            let report = Patch::Json::<()>(serde_json::from_value(report)?);
            let uid = pod.metadata.uid.unwrap_or_default();
            let begin = Instant::now();
            loop {
                match reports.patch_status(&uid, &PatchParams::default(), &report).await {
                    // The manager creates it after the Pod.
                    Err(kube::Error::Api(answer)) if answer.code == 404 && begin.elapsed() < LIMIT => {
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    report => return report.with_context(|| format!("reporting {vm}")).map(drop),
                }
            }
        }
    })
    .await
}

/// Deletes every machine.
pub async fn delete(client: &Client, namespace: &str, count: usize) -> Result<()> {
    each(count, |number| {
        let api: Api<VirtualMachine> = Api::namespaced(client.clone(), namespace);
        async move {
            let vm = name(number);
            api.delete(&vm, &DeleteParams::background()).await.with_context(|| format!("deleting {vm}"))?;
            Ok(())
        }
    })
    .await
}

/// The objects of a kind by name, as a watch of their metadata tells them: each with the hash of what it was rendered from.
pub struct Seen {
    receiver: watch::Receiver<HashMap<String, String>>,
    task: tokio::task::JoinHandle<()>,
}

impl Seen {
    /// Begins to watch; returns when what there is is known.
    pub async fn of<K>(client: &Client, namespace: &str) -> Self
    where
        K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Send + Sync + 'static,
        K::DynamicType: Default + Clone + Eq + std::hash::Hash + std::fmt::Debug,
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        let api: Api<PartialObjectMeta<K>> = Api::namespaced(client.clone(), namespace);
        let (sender, receiver) = watch::channel(HashMap::new());
        let (ready, is_ready) = tokio::sync::oneshot::channel();
        let task = tokio::spawn(async move {
            let mut stream = std::pin::pin!(watcher(api, watcher::Config::default()).default_backoff());
            let (mut listed, mut ready) = (HashSet::new(), Some(ready));
            while let Some(event) = stream.next().await {
                let Ok(event) = event else { continue };
                sender.send_modify(|seen| match event {
                    watcher::Event::Init => listed.clear(),
                    watcher::Event::InitApply(object) | watcher::Event::Apply(object) => {
                        listed.insert(object.name_any());
                        let hash = object.annotations().get(HASH_ANNOTATION).cloned().unwrap_or_default();
                        seen.insert(object.name_any(), hash);
                    }
                    watcher::Event::InitDone => {
                        seen.retain(|name, _| listed.contains(name));
                        if let Some(ready) = ready.take() {
                            let _ = ready.send(());
                        }
                    }
                    watcher::Event::Delete(object) => {
                        seen.remove(&object.name_any());
                    }
                });
            }
        });
        let _ = is_ready.await;
        Self { receiver, task }
    }

    /// What there is now.
    pub fn now(&self) -> HashMap<String, String> {
        self.receiver.borrow().clone()
    }

    /// When something came true of them.
    pub async fn until(&mut self, what: &str, is: impl Fn(&HashMap<String, String>) -> bool) -> Result<Instant> {
        match tokio::time::timeout(LIMIT, self.receiver.wait_for(|seen| is(seen))).await {
            Ok(seen) => drop(seen.context("the watch has ended")?),
            Err(_) => bail!("waited {} s in vain for {what}", LIMIT.as_secs()),
        }
        Ok(Instant::now())
    }
}

impl Drop for Seen {
    fn drop(&mut self) {
        self.task.abort();
    }
}
