//! One bad value takes nothing else away: VMs of the Java VM-Operator, each with any single value replaced by any JSON.
//!
//! A VM that should be down is stopped, whatever is wrong with the rest of it. While its spec can't be read, nothing else of it is deleted,
//! and at no time a claim. A VM in the same list is not affected.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is test code")]

#[path = "support/status_schema.rs"]
mod status_schema;

use std::{collections::BTreeSet, sync::Arc};

use k8s_openapi::jiff::Timestamp;
use kube::core::DynamicObject;
use serde::Deserialize;
use serde_json::{Value, json};
use vm_operator::{
    api::{PowerState, StoredVm, VirtualMachine, crd::crds, stored},
    config::{Allowed, ReconcilerConfig},
    object::Rendered,
    observed::{Object, Observed},
    plan::{Action, plan},
    power::WantedPower,
    render::{RandomInput, TemplateError, TemplateSet, render},
    status::{ExecutionResult, Reconciled, UsedTemplates, status},
};

use status_schema::StatusSchema;

/// What a client can't change, or what is not the VM's any more with another value.
const FIXED: [&str; 6] =
    ["/apiVersion", "/kind", "/metadata", "/metadata/name", "/metadata/uid", "/metadata/managedFields"];

/// A configuration that allows VMs what they have, also the images of the VM-Operator in Java.
fn allowing() -> ReconcilerConfig {
    let legacy_runner_images = vec!["registry.mnl.de/*".to_owned(), "ghcr.io/mnlipp/*".to_owned()].try_into().unwrap();
    let allowed = Allowed { legacy_runner_images, ..Allowed::everything() };
    ReconcilerConfig { allowed, ..ReconcilerConfig::default() }
}

fn base_vms() -> Vec<Value> {
    let documents = serde_yaml::Deserializer::from_str(include_str!("predecessor/release-4-vms.yaml"));
    let vms = documents.map(|document| Value::deserialize(document).unwrap());
    let mut vms: Vec<Value> = vms.filter(|vm| !vm.is_null()).collect();
    // One with all that this project's manager and runner write.
    let mut ours = vms[0].clone();
    ours["status"] = json!({
        "observedGeneration": 1, "phase": "Running", "created": true, "ready": true, "power": "Running", "podUid": "uid-of-Pod a01-running",
        "templates": { "set": "a", "version": "01234567" }, "objectKinds": [{ "apiVersion": "v1", "kind": "ConfigMap" }],
        "stateOverride": { "state": "Stopped", "until": "2027-01-15T10:00:00Z" }, "stateUntilIgnored": "Stopped 2027-01-15T07:00:00Z",
        "halted": { "by": "guest", "time": "2027-01-15T07:00:00Z", "generation": 1, "podUid": "x", "restartedAt": "y", "released": true },
        "retry": { "count": 3, "podUid": "x", "next": "2027-01-15T08:00:10Z" }, "nodeName": "node-1", "resetCount": 1,
        "addresses": [{ "type": "PodIP", "address": "10.0.0.1" }], "cpus": 2, "ram": "4Gi", "accelerator": "kvm", "runnerVersion": "1",
        "identity": { "uuid": "00000000-0000-4000-8000-000000000000", "macs": ["02:00:00:00:00:01"], "machineType": "pc-q35-7.2" },
        "pendingChanges": [{ "path": "config.yaml/vm.maximumCpus", "current": 1, "wanted": 2, "reason": "x" }],
        "claims": [{ "name": "a01-running-system-disk", "unused": false, "findings": [{ "reason": "GrowthRefused", "current": "1Gi",
            "wanted": "2Gi", "answer": "no", "generation": 1 }] }],
        "displayPasswordExpiry": "now", "displayPasswordSerial": 1, "consoleClient": "10.0.0.2", "loggedInUser": "a", "consoleUser": "a",
        "assignment": { "pool": "a", "user": "b", "lastUsed": "2027-01-15T07:00:00Z" }, "osinfo": { "id": "debian" },
        "conditions": [{ "type": "Running", "status": "False", "reason": "GuestShutdown", "message": "", "lastTransitionTime": "2027-01-15T07:00:00Z" }],
    });
    vms.push(ours);
    for vm in &mut vms {
        vm["spec"]["vm"]["state"] = json!("Stopped");
    }
    vms
}

fn nested(levels: usize) -> Value {
    (0..levels).fold(json!("x"), |value, _| json!([value]))
}

fn values() -> Vec<Value> {
    let mut values: Vec<Value> = serde_json::from_str(
        r#"[null, true, 0, 7, -1, 4294967296, 18446744073709551615, 1e300, 0.5, "", "x", "7", "16Ei", "-1", "Running", "%s{{ x }}\n---\n",
            4294967295, -9223372036854775808, "9999-12-31T23:59:59Z", "-009999-01-01T00:00:00Z", [], [null], ["x"], [{}], {}, {"a": null}, {"a": "b"}, {"a": {"b": []}}]"#,
    )
    .unwrap();
    values.extend([
        json!("\u{0}\u{2028}\u{7f}\u{80}\u{9b}\u{feff}"),
        json!("x".repeat(10_000)),
        nested(90),
        nested(126),
        nested(1000),
    ]);
    values
}

/// The places of all values.
fn pointers(value: &Value, prefix: &str, found: &mut Vec<String>) {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => {
            map.iter().map(|(key, value)| (key.replace('~', "~0").replace('/', "~1"), value)).collect()
        }
        Value::Array(list) => list.iter().enumerate().map(|(index, value)| (index.to_string(), value)).collect(),
        _ => Vec::new(),
    };
    for (key, child) in children {
        let pointer = format!("{prefix}/{key}");
        if !FIXED.contains(&pointer.as_str()) {
            found.push(pointer.clone());
        }
        if pointer != "/metadata/managedFields" {
            pointers(child, &pointer, found);
        }
    }
}

fn rendered(vm: &VirtualMachine, observed: &Observed, set: &TemplateSet) -> Result<Vec<Rendered>, TemplateError> {
    let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
    render(vm, observed, &allowing(), &random, set)
}

/// The objects of a VM, as if the manager had made them.
fn objects(vm: &Value, set: &TemplateSet, pod_phase: &str) -> Observed {
    let mut running = vm.clone();
    running["spec"]["vm"]["state"] = json!("Running");
    let running = stored::read(&running.to_string()).unwrap();
    let now = Timestamp::from_second(1_800_000_000).unwrap();
    let objects = rendered(&running, &Observed::nothing(now), set).unwrap().into_iter().map(|object| {
        let mut value = Value::clone(&object.value);
        value["metadata"]["uid"] = json!(format!("uid-of-{}", object.key));
        value["metadata"]["creationTimestamp"] = json!("2027-01-15T07:50:00Z");
        if object.key.is_pod() {
            value["status"] = json!({ "phase": pod_phase });
        }
        let object: DynamicObject = serde_json::from_value(value).unwrap();
        Arc::new(Object::trim(&object.types.clone().unwrap(), object))
    });
    Observed { objects: objects.collect(), ..Observed::nothing(now) }
}

/// Checks what the manager does with the VM.
fn check(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: Result<&[Rendered], &TemplateError>,
    schema: &StatusSchema,
    case: &str,
) {
    let plan = plan(vm, observed, rendered.ok());
    let mut is_stopped = false;
    for action in plan.steps.iter().flatten() {
        let Action::Delete { key, .. } = action else { continue };
        is_stopped |= key.is_pod();
        assert!(!key.is_claim(), "{case}: {key} is deleted");
        assert!(key.is_pod() || vm.spec.invalid.is_none(), "{case}: {key} is deleted");
    }
    if vm.is_state_unknown() {
        assert_eq!((is_stopped, plan.power.wanted), (false, WantedPower::Up), "{case}: the power stays");
    } else if !case.starts_with("/spec/vm=") && !case.starts_with("/spec/vm/state=") && !case.starts_with("/spec=") {
        assert!(is_stopped, "{case}: the VM is not stopped");
    }
    let outcome = ExecutionResult::default();
    let reconciled =
        Reconciled { vm, observed, plan: &plan, rendered, outcome: &outcome, source: UsedTemplates::default() };
    let status = json!(status(&reconciled));
    assert_eq!(schema.problems(&status), [""; 0], "{case}");
    let conditions = status["conditions"].as_array().unwrap();
    let templates = conditions.iter().find(|condition| condition["type"] == "TemplatesValid").unwrap();
    assert_eq!(templates["reason"] == "InvalidSpec", vm.spec.invalid.is_some(), "{case}: {templates}");
}

/// A VM whose spec can't be read keeps what it has: nothing is created, changed or deleted.
fn check_running(vm: &VirtualMachine, observed: &Observed, rendered: Result<&[Rendered], &TemplateError>, case: &str) {
    let plan = plan(vm, observed, rendered.ok());
    let mut actions = plan.steps.iter().flatten();
    if vm.spec.invalid.is_some() && plan.power.wanted != WantedPower::Down {
        assert_eq!(actions.next(), None, "{case}");
    }
    assert!(!actions.any(|action| matches!(action, Action::Delete { key, .. } if key.is_claim())), "{case}");
}

/// How many cases there were, and what they came to.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    cases: usize,
    invalid: usize,
    renderings: usize,
    failures: usize,
}

/// What all cases share.
struct Stage {
    set: TemplateSet,
    schema: StatusSchema,
    vms: Vec<Value>,
    values: Vec<Value>,
    /// The first VM, as it is read beside each case.
    alone: Value,
}

/// A VM with its objects.
struct Base<'a> {
    vm: &'a Value,
    observed: Observed,
    ended: Observed,
}

impl Stage {
    /// The VM with each value at this place. A field is read and rendered alike for each VM, so where it is not new it gets a few values, and is
    /// rendered only with a bad spec.
    fn place(&self, Base { vm, observed, ended }: &Base<'_>, place: &str, is_new: bool) -> Count {
        let mut count = Count::default();
        for value in self.values.iter().step_by(if is_new { 1 } else { 6 }) {
            let case = format!("{place}={:.60}", value.to_string());
            let mut changed = (*vm).clone();
            *changed.pointer_mut(place).unwrap() = value.clone();
            let text = format!("[{changed},{}]", self.vms[0]);
            let [StoredVm(bad), StoredVm(good)] =
                serde_json::from_str(&text).unwrap_or_else(|error| panic!("{case}: {error}"));
            assert_eq!(bad.metadata.name.as_deref(), vm["metadata"]["name"].as_str(), "{case}");
            assert_eq!(json!(good), self.alone, "{case}");
            count.cases += 1;
            count.invalid += usize::from(bad.spec.invalid.is_some());
            let rendered = if is_new || bad.spec.invalid.is_some() {
                count.renderings += 1;
                rendered(&bad, observed, &self.set)
            } else {
                Err(TemplateError::refused("x.yaml.j2", "not rendered in this test"))
            };
            count.failures += usize::from(rendered.is_err() && is_new);
            check(&bad, observed, rendered.as_deref(), &self.schema, &case);
            if is_new && !place.starts_with("/spec/vm/state") {
                let mut running = bad.clone();
                running.spec.vm.state = PowerState::Running;
                for observed in [observed, ended] {
                    check_running(&running, observed, rendered.as_deref(), &case);
                }
            }
        }
        count
    }
}

#[test]
fn a_vm_with_any_single_bad_value_can_be_stopped_and_nothing_else_is_deleted() {
    let vms = base_vms();
    let alone = json!(stored::read(&vms[0].to_string()).unwrap());
    let stage =
        Stage { set: TemplateSet::builtin().unwrap(), schema: StatusSchema::new(crds()), vms, values: values(), alone };
    let bases = stage.vms.iter().map(|vm| Base {
        vm,
        observed: objects(vm, &stage.set, "Running"),
        ended: objects(vm, &stage.set, "Failed"),
    });
    let bases: Vec<Base<'_>> = bases.collect();
    let (mut places, mut known) = (Vec::new(), BTreeSet::new());
    for base in &bases {
        let mut of_vm = Vec::new();
        pointers(base.vm, "", &mut of_vm);
        for place in of_vm {
            let is_new = known.insert(place.clone());
            places.push((base, place, is_new));
        }
    }
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let share = |thread: usize| {
        let own = places.iter().skip(thread).step_by(threads);
        own.map(|(base, place, is_new)| stage.place(base, place, *is_new)).collect::<Vec<Count>>()
    };
    let counts: Vec<Count> = std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|thread| scope.spawn(move || share(thread))).collect();
        running.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let sum = |part: fn(&Count) -> usize| counts.iter().map(part).sum::<usize>();
    let (cases, invalid) = (sum(|count| count.cases), sum(|count| count.invalid));
    eprintln!(
        "{} VMs, {} values at {} places: {cases} cases, {invalid} with a spec that can't be read, {} rendered, {} refused",
        stage.vms.len(),
        stage.values.len(),
        known.len(),
        sum(|count| count.renderings),
        sum(|count| count.failures),
    );
    assert!(stage.vms.len() > 20 && cases > 10_000 && invalid > 1000);
}
