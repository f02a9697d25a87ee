//! What the manager knows of each VM and did last, as JSON, for a person who looks for an error.
//!
//! ```text
//!  caches (VMs, objects) ─────────┐
//!  last reconcile of each VM ─────┴─▶ GET /debug/vms, /debug/vms/NAMESPACE/NAME
//! ```
//!
//! Whoever reaches the probes' address can read this, so it has names, UIDs, versions, hashes, times and reasons, and nothing else: no
//! spec, no status, no labels, no annotations, and no messages, because templates and the API server quote values in theirs.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use kube::{Resource, ResourceExt, runtime::reflector::ObjectRef};
use serde_json::{Value, json};

use super::caches::Caches;
use crate::{
    api::{VirtualMachine, full_name},
    object::{HASH_ANNOTATION, ObjectKey, Rendered},
    observed::Observed,
    plan::{Action, Plan, Wait},
    process::{clock, lock},
    render::TemplateError,
};

/// Keeps what the last reconcile of each VM did, if that is wanted: about 1 kB for each VM.
#[derive(Clone, Default)]
pub struct DebugRecords(Option<Arc<Records>>);

#[derive(Default)]
struct Records {
    caches: OnceLock<Arc<[Caches]>>,
    /// By namespace and name.
    reconciles: Mutex<HashMap<String, LastReconcile>>,
}

/// The last reconcile of a VM.
#[derive(Clone, Default)]
struct LastReconcile {
    /// When it made its plan.
    planned: Option<Planned>,
    /// The label of the error with which it failed, as in the metric `vm_operator_reconcile_errors`.
    error: Option<String>,
    /// How many in a row have failed.
    tries: u32,
    /// When the VM is reconciled next though nothing has changed.
    next: Option<Timestamp>,
}

/// A plan without what is written.
#[derive(Clone)]
struct Planned {
    at: Timestamp,
    /// The resourceVersion of the VM that it was made for.
    version: Option<String>,
    /// The rendered objects and their hashes, or where the error is.
    rendered: Result<Vec<(ObjectKey, String)>, Value>,
    power: String,
    steps: Value,
    waits: Value,
    /// The paths of the changes that wait for the next start.
    pending: Vec<String>,
}

impl DebugRecords {
    /// Keeps records, or nothing.
    pub fn new(is_wanted: bool) -> Self {
        Self(is_wanted.then(Arc::default))
    }

    /// Whether records are kept.
    pub fn is_on(&self) -> bool {
        self.0.is_some()
    }

    /// The caches are read from here. There is one set of caches in a process.
    pub fn read_from(&self, caches: Arc<[Caches]>) {
        if let Some(records) = &self.0 {
            let _ = records.caches.set(caches);
        }
    }

    /// Records the plan of a reconcile.
    pub fn planned(&self, vm: &VirtualMachine, rendered: Result<&[Rendered], &TemplateError>, plan: &Plan) {
        if let Some(records) = &self.0 {
            let planned = Planned::of(vm, rendered, plan, clock::now());
            lock(&records.reconciles).entry(vm.full_name()).or_default().planned = Some(planned);
        }
    }

    /// Records that a reconcile succeeded, and when the next one follows by itself.
    pub fn succeeded(&self, vm: &VirtualMachine, next: Option<Duration>) {
        self.update(vm.full_name(), |last| {
            (last.error, last.tries, last.next) =
                (None, 0, next.and_then(|pause| clock::now().checked_add(pause).ok()));
        });
    }

    /// Records that a reconcile failed, with the label of its error, and when it is tried again.
    pub fn failed(&self, vm: String, error: &str, tries: u32, pause: Duration) {
        self.update(vm, |last| {
            (last.error, last.tries, last.next) = (Some(error.to_owned()), tries, clock::now().checked_add(pause).ok());
        });
    }

    /// Drops the record of a VM that is gone.
    pub fn forget(&self, name: &str, namespace: &str) {
        if let Some(records) = &self.0 {
            lock(&records.reconciles).remove(&full_name(Some(namespace), name));
        }
    }

    fn update(&self, vm: String, update: impl FnOnce(&mut LastReconcile)) {
        if let Some(records) = &self.0 {
            update(lock(&records.reconciles).entry(vm).or_default());
        }
    }

    /// All VMs in a line each.
    pub fn vms(&self) -> Value {
        let Some(records) = &self.0 else { return Value::Null };
        let mut vms: Vec<_> = records
            .caches
            .get()
            .iter()
            .flat_map(|caches| caches.iter())
            .flat_map(|caches| caches.observed(|_| true))
            .collect();
        vms.sort_by_key(|(vm, _)| vm.full_name());
        let reconciles = lock(&records.reconciles);
        vms.iter()
            .map(|(vm, observed)| {
                let last = reconciles.get(&vm.full_name()).cloned().unwrap_or_default();
                json!({
                    "vm": vm.full_name(), "uid": vm.uid(), "resourceVersion": vm.resource_version(),
                    "objects": observed.objects.len(), "planned": last.planned.map(|planned| planned.at),
                    "error": last.error, "tries": last.tries, "next": last.next,
                })
            })
            .collect()
    }

    /// One VM; `None` if the manager does not know it.
    pub fn vm(&self, namespace: &str, name: &str) -> Option<Value> {
        let records = self.0.as_ref()?;
        let key = ObjectRef::new(name).within(namespace);
        let mut all = records.caches.get()?.iter();
        let (vm, children) = all.find_map(|caches| Some((caches.vms.get(&key)?, &caches.children)))?;
        let vm = vm.read().ok()?;
        let observed = children.observe(&vm, clock::now());
        let last = lock(&records.reconciles).get(&vm.full_name()).cloned().unwrap_or_default();
        Some(last.describe(&vm, &observed))
    }
}

impl Planned {
    fn of(vm: &VirtualMachine, rendered: Result<&[Rendered], &TemplateError>, plan: &Plan, at: Timestamp) -> Self {
        let rendered = match rendered {
            Ok(objects) => Ok(objects.iter().map(|object| (object.key.clone(), object.hash.clone())).collect()),
            Err(TemplateError { template, line, column, .. }) => {
                Err(json!({ "template": template, "line": line, "column": column }))
            }
        };
        let step = |actions: &Vec<Action>| actions.iter().map(action).collect::<Value>();
        Self {
            at,
            version: vm.resource_version(),
            rendered,
            power: format!("{:?}", plan.power.wanted),
            steps: plan.steps.iter().map(step).collect(),
            waits: plan.waits.iter().map(wait).collect(),
            pending: plan.pending.iter().map(|change| change.path.clone()).collect(),
        }
    }
}

fn action(action: &Action) -> Value {
    match action {
        Action::Apply { object, uid } => json!({ "apply": object.key.to_string(), "uid": uid }),
        Action::Label { key, uid, patch: _ } => json!({ "label": key.to_string(), "uid": uid }),
        Action::Image { key, uid, container, image } => {
            json!({ "image": image, "container": container, "of": key.to_string(), "uid": uid })
        }
        Action::Delete { key, uid, reason, grace, version: _, keeps_owned: _ } => {
            json!({ "delete": key.to_string(), "uid": uid, "reason": format!("{reason:?}"), "graceSeconds": grace })
        }
    }
}

fn wait(wait: &Wait) -> Value {
    let (why, key) = match wait {
        Wait::Gone(key) => ("Gone", key),
        Wait::NotOurs(key) => ("NotOurs", key),
        Wait::Overdue(key) => ("Overdue", key),
        Wait::NotRemoved(key) => ("NotRemoved", key),
        Wait::Retry(key) => ("Retry", key),
        Wait::ClaimInUse(key) => ("ClaimInUse", key),
        Wait::ClaimForeign(key, why) => (why.reason().as_str(), key),
        Wait::ClaimMissing(key) => ("ClaimMissing", key),
        Wait::HelperNotReady(key) => ("HelperNotReady", key),
    };
    json!({ "for": why, "object": key.to_string() })
}

impl LastReconcile {
    fn describe(&self, vm: &VirtualMachine, observed: &Observed) -> Value {
        let rendered = self.planned.as_ref().map(|planned| planned.rendered.as_deref());
        let hashes = rendered.and_then(Result::ok).unwrap_or_default();
        let hash = |key: &ObjectKey| hashes.iter().find(|(rendered, _)| rendered == key).map(|(_, hash)| hash);
        let cached = observed.objects.iter().map(|object| {
            json!({
                "apiVersion": object.key.api_version, "kind": object.key.kind, "name": object.key.name, "isCached": true,
                "uid": object.uid, "resourceVersion": object.version.to_string(), "deleting": object.deleting,
                "appliedHash": object.annotations.get(HASH_ANNOTATION), "renderedHash": hash(&object.key),
            })
        });
        let missing = hashes.iter().filter(|(key, _)| observed.get(key).is_none()).map(|(key, hash)| {
            json!({
                "apiVersion": key.api_version, "kind": key.kind, "name": key.name, "isCached": false, "renderedHash": hash,
            })
        });
        let plan = self.planned.as_ref().map(|planned| {
            json!({
                "at": planned.at, "resourceVersion": planned.version, "power": planned.power, "steps": planned.steps,
                "waits": planned.waits, "pending": planned.pending, "templateError": planned.rendered.as_ref().err(),
            })
        });
        let meta = vm.meta();
        json!({
            "vm": vm.full_name(), "uid": meta.uid, "resourceVersion": meta.resource_version,
            "generation": meta.generation, "deleting": meta.deletion_timestamp,
            "observedGeneration": vm.status.as_ref().and_then(|status| status.observed_generation),
            "objects": cached.chain(missing).collect::<Vec<_>>(),
            "plan": plan, "error": self.error, "tries": self.tries, "next": self.next,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Allowed, ReconcilerConfig},
        plan::plan,
        render::{RandomInput, TemplateSet, render},
        test_support::{applied, nothing, vm},
    };

    #[test]
    fn nothing_that_is_secret_is_shown() {
        let vm = vm(|vm| {
            vm["spec"]["cloudInit"] =
                json!({ "userData": "password: correct-horse", "metaData": { "battery": "staple" } });
            vm["spec"]["vm"]["display"] = json!({ "loggedInUser": "Tr0ub4dor" });
            vm["metadata"]["annotations"] = json!({ "note": "between-us" });
            vm["metadata"]["labels"] = json!({ "team": "moles" });
        });
        let config = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
        let set = TemplateSet::builtin().unwrap();
        let random = RandomInput { display_password: "hunter2".into(), ..RandomInput::default() };
        let rendered = render(&vm, &nothing(), &config, &random, &set).unwrap();
        let text = rendered.iter().map(|object| object.value.to_string()).collect::<String>();
        let secrets = ["correct-horse", "staple", "hunter2", "Tr0ub4dor", "moles"];
        // Secrets are there in base64 or as text; what is not rendered cannot be shown.
        let user_data = "Y29ycmVjdC1ob3JzZQ==";
        assert!(text.contains(user_data) && text.contains("Tr0ub4dor") && text.contains("moles"), "{text}");
        let observed = applied(&rendered, |_, object| object["metadata"]["annotations"]["note"] = json!("between-us"));
        for observed in [&nothing(), &observed] {
            let plan = plan(&vm, observed, Some(&rendered));
            let planned = Planned::of(&vm, Ok(&rendered), &plan, observed.now);
            let last = LastReconcile { planned: Some(planned), error: Some("Forbidden".into()), tries: 2, next: None };
            let shown = last.describe(&vm, observed).to_string();
            for secret in secrets.iter().chain(&["between-us"]) {
                assert!(!shown.contains(secret), "{secret} in {shown}");
            }
            assert!(shown.contains(&rendered[0].hash) && shown.contains("Forbidden"), "{shown}");
        }
        let error =
            TemplateError { line: Some(3), column: Some(1), ..TemplateError::refused("pod.yaml.j2", "not hunter2") };
        let planned = Planned::of(&vm, Err(&error), &plan(&vm, &observed, None), observed.now);
        let shown =
            LastReconcile { planned: Some(planned), ..LastReconcile::default() }.describe(&vm, &observed).to_string();
        assert!(shown.contains("pod.yaml.j2") && !shown.contains("hunter2"), "{shown}");
    }

    #[test]
    fn rendered_and_cached_objects_are_one_list() {
        let vm = vm(|_| ());
        let set = &TemplateSet::builtin().unwrap();
        let rendered = render(&vm, &nothing(), &ReconcilerConfig::default(), &RandomInput::default(), set).unwrap();
        let (cached, missing) = rendered.split_at(1);
        let observed = applied(cached, |_, _| ());
        let plan = plan(&vm, &observed, Some(&rendered));
        let planned = Planned::of(&vm, Ok(&rendered), &plan, observed.now);
        let shown = LastReconcile { planned: Some(planned), ..LastReconcile::default() }.describe(&vm, &observed);
        let objects = shown["objects"].as_array().unwrap();
        assert_eq!(objects.len(), rendered.len());
        assert_eq!(objects.iter().filter(|object| object["isCached"] == false).count(), missing.len());
        let first = objects.iter().find(|object| object["isCached"] == true).unwrap();
        assert_eq!(first["renderedHash"], first["appliedHash"]);
        assert_eq!(shown["plan"]["power"], "Up");
    }

    #[test]
    fn nothing_is_kept_unless_it_is_wanted() {
        let records = DebugRecords::default();
        records.succeeded(&vm(|_| ()), None);
        assert!(!records.is_on() && records.vms().is_null());
        let records = DebugRecords::new(true);
        records.succeeded(&vm(|_| ()), Some(Duration::from_secs(5)));
        assert_eq!(lock(&records.0.unwrap().reconciles).len(), 1);
    }
}
