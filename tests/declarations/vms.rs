//! Each property of a VM does something: values that the schema allows are generated for every one of them, set in a VM that runs, and taken out
//! again. What is set has an effect (or [`WITHOUT_EFFECT`] says why not), the plan notices it and comes to rest, and what is taken out leaves nothing.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use vm_operator::{
    api::VirtualMachine,
    config::{Allowed, LoadBalancerService, ReconcilerConfig},
    object::Rendered,
    observed::Observed,
    plan::{Plan, plan},
    render::{RandomInput, TemplateSet, render},
    status::{ExecutionResult, Reconciled, UsedTemplates, status},
};

use crate::{
    declared::{Property, VM_SPEC, properties, samples, set, wrong_effect},
    stored::{self, trimmed},
};

/// Properties that change nothing in the objects, the plan and the status of a VM, and why.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("permissions[].may", "the web interface and `kubectl vm` ask what people may do"),
    ("permissions[].role", "the web interface and `kubectl vm` ask what people may do"),
    ("permissions[].user", "the web interface and `kubectl vm` ask what people may do"),
    ("pools", "the manager of pools assigns VMs by it"),
    ("templateValues", "templates know their values: those that are built in know no `key`"),
    ("vm.display.spice.proxyUrl", "it is in the connection file that `kubectl vm display` and the web interface make"),
    ("vm.display.spice.server", "it is in the connection file that `kubectl vm display` and the web interface make"),
];

/// What a VM has that is to show the effect of properties whose names begin so, as a merge patch of its spec. Such a property is set in the last item
/// of a list, if there is one.
fn beside(name: &str) -> Option<Value> {
    let beside: &[(&str, Value)] = &[
        (
            "image.",
            json!({ "image": { "repository": "registry.example.org", "path": "team/vm-runner", "version": "1" } }),
        ),
        ("vm.disks[].bootindex", json!({})),
        ("vm.disks[].serial", json!({})),
        ("vm.networks[].name", json!({})),
        ("vm.networks[].tap.", json!({ "vm": { "networks": [] } })),
    ];
    beside.iter().find(|(begin, _)| name.starts_with(begin)).map(|(_, patch)| patch.clone())
}

/// How many sequences of changes are tried.
const SEQUENCES: u64 = 100;

fn manifest() -> Value {
    let requests = json!({ "resources": { "requests": { "storage": "1Gi" } } });
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "namespace": "orchard", "uid": "apple-uid", "generation": 3 },
        "spec": { "vm": {
            "state": "Running", "maximumCpus": 2, "maximumRam": "4Gi",
            "networks": [{ "user": {} }],
            "disks": [{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": requests } }],
        } },
    })
}

pub fn now() -> Timestamp {
    "2027-01-15T08:00:00Z".parse().unwrap()
}

/// The objects as the API server has them when the manager has applied them.
fn applied(objects: &[Rendered]) -> Observed {
    let stored = objects.iter().map(|object| trimmed(stored::applied(object, "2027-01-15T07:00:00Z")));
    Observed::of(stored.collect(), now())
}

/// What a VM becomes beside certain objects.
struct Outcome {
    objects: BTreeMap<String, Arc<Value>>,
    rendered: Vec<Rendered>,
    plan: Plan,
    status: Value,
}

struct World {
    config: ReconcilerConfig,
    set: TemplateSet,
}

impl World {
    fn new() -> Self {
        let allowed = Allowed::everything();
        let load_balancer_service = LoadBalancerService::Enabled(true);
        let config = ReconcilerConfig { allowed, load_balancer_service, ..ReconcilerConfig::default() };
        Self { config, set: TemplateSet::builtin().unwrap() }
    }

    /// The objects of a VM; the error is for people.
    fn rendered(&self, vm: &Value, observed: &Observed) -> Result<Vec<Rendered>, String> {
        let vm: VirtualMachine = serde_json::from_value(vm.clone()).map_err(|error| error.to_string())?;
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        render(&vm, observed, &self.config, &random, &self.set).map_err(|error| error.to_string())
    }

    fn outcome(&self, vm: &Value, observed: &Observed) -> Result<Outcome, String> {
        let rendered = self.rendered(vm, observed)?;
        let vm: VirtualMachine = serde_json::from_value(vm.clone()).map_err(|error| error.to_string())?;
        let plan = plan(&vm, observed, Some(&rendered));
        let (outcome, source) = (ExecutionResult::default(), UsedTemplates { set: Some(&self.set), refused: None });
        let status =
            status(&Reconciled { vm: &vm, observed, plan: &plan, rendered: Ok(&rendered), outcome: &outcome, source });
        let objects = rendered.iter().map(|object| (object.key.to_string(), object.value.clone())).collect();
        Ok(Outcome { objects, rendered, plan, status: json!(status) })
    }
}

/// What is done, and what waits for the next start.
fn is_noticed(plan: &Plan) -> bool {
    plan.steps.iter().any(|step| !step.is_empty()) || !plan.pending.is_empty()
}

/// A property with a value, in a VM and without it.
struct Change {
    name: String,
    value: Value,
    without: Value,
    with: Value,
}

/// A change to each value of each property, the properties in the order of the schema.
fn changes() -> Vec<Vec<Change>> {
    let of_property = |property: &Property| {
        let (name, mut without) = (property.name(), manifest());
        let beside = beside(&name);
        if let Some(patch) = &beside {
            json_patch::merge(&mut without["spec"], patch);
        }
        let values = samples(&property.schema).into_iter().map(|value| {
            let mut with = without.clone();
            set(&mut with["spec"], &VM_SPEC, &property.way, &value, beside.is_none());
            Change { name: name.clone(), value, without: without.clone(), with }
        });
        values.collect()
    };
    properties(&VM_SPEC).iter().map(of_property).collect()
}

impl Change {
    /// Makes the change in a VM that runs, and takes it back. Returns whether it has an effect; the error is what is wrong.
    fn try_out(&self, world: &World) -> Result<bool, String> {
        let nothing = Observed::nothing(now());
        let new = world.outcome(&self.without, &nothing)?;
        let running = applied(&new.rendered);
        let before = world.outcome(&self.without, &running)?;
        let after = world.outcome(&self.with, &running)?;
        let is_rendered = after.objects != before.objects;
        if is_rendered && !is_noticed(&after.plan) {
            return Err("the plan does not notice it".to_owned());
        }
        let reached = applied(&after.rendered);
        let rest = world.outcome(&self.with, &reached)?;
        // A VM that is to be stopped is at rest when its Pod is gone.
        if is_noticed(&rest.plan) && rest.plan.power == before.plan.power {
            return Err(format!("it never comes to rest: {:?} {:?}", rest.plan.steps, rest.plan.pending));
        }
        let back = world.outcome(&self.without, &reached)?;
        if back.objects != before.objects {
            return Err("something of it stays when it is taken back".to_owned());
        }
        if is_rendered && !is_noticed(&back.plan) {
            return Err("the plan does not notice that it is taken back".to_owned());
        }
        let is_seen = || after.plan.power != before.plan.power || after.status != before.status;
        Ok(is_rendered || is_seen() || world.outcome(&self.with, &nothing)?.objects != new.objects)
    }
}

#[test]
fn each_property_has_an_effect_and_can_be_taken_back() {
    let world = World::new();
    let (mut values, mut wrong) = (0, Vec::new());
    let all = changes();
    for property in &all {
        let name = &property[0].name;
        let mut has_effect = false;
        for change in property {
            values += 1;
            match change.try_out(&world) {
                Ok(is_seen) => has_effect |= is_seen,
                Err(error) => wrong.push(format!("{name}: {}: {error}", change.value)),
            }
        }
        wrong.extend(wrong_effect(name, has_effect, WITHOUT_EFFECT));
    }
    let is_property = |name: &str| all.iter().any(|property| property[0].name == name);
    for (name, _) in WITHOUT_EFFECT.iter().filter(|(name, _)| !is_property(name)) {
        wrong.push(format!("{name}: WITHOUT_EFFECT names it, and there is no such property"));
    }
    println!("{} properties, {values} values", all.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// One property after the other gets a value, while the VM runs. Each time it comes to rest, and when all is taken back, it is as it was.
#[test]
fn combinations_come_to_rest_and_can_be_taken_back() {
    let world = World::new();
    let mut all = properties(&VM_SPEC);
    all.retain(|property| beside(&property.name()).is_none());
    let base = world.outcome(&manifest(), &Observed::nothing(now())).unwrap();
    let mut steps = 0;
    for seed in 0..SEQUENCES {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut vm, mut observed, mut said) = (manifest(), applied(&base.rendered), Vec::new());
        for _ in 0..6 {
            let property = &all[random.usize(0..all.len())];
            let values = samples(&property.schema);
            let value = &values[random.usize(0..values.len())];
            let mut changed = vm.clone();
            set(&mut changed["spec"], &VM_SPEC, &property.way, value, true);
            // What does not fit what is there already is refused, and changes nothing.
            let Ok(after) = world.outcome(&changed, &observed) else { continue };
            said.push(format!("{} = {value}", property.name()));
            (vm, observed) = (changed, applied(&after.rendered));
            let rest = world.outcome(&vm, &observed).unwrap();
            let is_up = rest.plan.power == base.plan.power;
            assert!(!is_up || !is_noticed(&rest.plan), "{said:#?}\nnever comes to rest: {:?}", rest.plan.steps);
            steps += 1;
        }
        let back = world.outcome(&manifest(), &observed).unwrap();
        let rest = world.outcome(&manifest(), &applied(&back.rendered)).unwrap();
        assert_eq!(rest.objects, base.objects, "{said:#?}\nleaves something");
        assert!(!is_noticed(&rest.plan), "{said:#?}\n{:?}", rest.plan.steps);
    }
    println!("{SEQUENCES} sequences, {steps} steps");
    assert!(steps > 5 * SEQUENCES, "nearly all steps are possible");
}
