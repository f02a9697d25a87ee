//! Each property of a VM does something: values that the schema allows are generated for every one of them, set in a VM that runs, and taken out
//! again. What is set has an effect (or [`WITHOUT_EFFECT`] says why not), the plan notices it and comes to rest, and what is taken out leaves nothing.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "this is test code")]

#[path = "support/stored.rs"]
mod stored;

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::jiff::Timestamp;
use proptest::{
    strategy::{Strategy, ValueTree},
    string::string_regex,
    test_runner::TestRunner,
};
use serde_json::{Map, Value, json};
use vm_operator::{
    api::{VirtualMachine, crd::crds},
    config::{Allowed, LoadBalancerService, ReconcilerConfig},
    object::Rendered,
    observed::Observed,
    plan::{Plan, plan},
    render::{RandomInput, TemplateSet, render},
    status::{ExecutionResult, Reconciled, UsedTemplates, status},
};

use stored::trimmed;

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

/// A step on the way to a property: a field, or a new last item of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Field(String),
    Item,
}

/// A property of the spec with its schema.
struct Property {
    way: Vec<Step>,
    schema: Value,
}

impl Property {
    /// As the documentation writes it: `vm.disks[].cdrom.image`.
    fn name(&self) -> String {
        let mut name = String::new();
        for step in &self.way {
            match step {
                Step::Field(field) if name.is_empty() => name.push_str(field),
                Step::Field(field) => name.push_str(&format!(".{field}")),
                Step::Item => name.push_str("[]"),
            }
        }
        name
    }
}

/// All properties below a schema that have none below them.
fn properties(way: &[Step], schema: &Value, found: &mut Vec<Property>) {
    if let Some(fields) = schema["properties"].as_object() {
        for (name, field) in fields {
            properties(&[way, &[Step::Field(name.clone())]].concat(), field, found);
        }
    } else if schema["items"]["properties"].is_object() {
        properties(&[way, &[Step::Item]].concat(), &schema["items"], found);
    } else {
        found.push(Property { way: way.to_vec(), schema: schema.clone() });
    }
}

fn spec_schema() -> Value {
    let (_, crd) = crds().into_iter().find(|(name, _)| name.contains("vms")).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

/// Values that a schema allows: extremes, each of an enumeration, and of texts some that fit the pattern.
fn samples(schema: &Value) -> Vec<Value> {
    if let Some(values) = schema["enum"].as_array() {
        return values.iter().filter(|value| !value.is_null()).cloned().collect();
    }
    if schema["x-kubernetes-int-or-string"] == true {
        return vec![json!("3Gi"), json!(4_294_967_296_i64)];
    }
    match schema["type"].as_str() {
        Some("boolean") => vec![json!(true), json!(false)],
        Some("integer") => {
            let least = schema["minimum"].as_f64().unwrap_or(0.0) as i64;
            let most = schema["maximum"].as_f64().map_or(i64::from(i32::MAX), |most| most as i64);
            let mut values = vec![least, (least + 1).min(most), most];
            values.dedup();
            values.into_iter().map(Value::from).collect()
        }
        Some("number") => vec![json!(1), json!(2.5)],
        Some("string") => texts(schema).into_iter().map(Value::from).collect(),
        Some("array") => samples(&schema["items"]).into_iter().map(|item| json!([item])).collect(),
        Some("object") if schema["additionalProperties"].is_object() => {
            samples(&schema["additionalProperties"]).into_iter().map(|value| json!({ "key": value })).collect()
        }
        _ => vec![json!({ "key": "value" })],
    }
}

fn texts(schema: &Value) -> Vec<String> {
    let Some(pattern) = schema["pattern"].as_str() else { return vec!["one".to_owned(), "another".to_owned()] };
    let inner = pattern.trim_start_matches('^').trim_end_matches('$');
    let mut runner = TestRunner::deterministic();
    match string_regex(inner) {
        Ok(strategy) => (0..2).map(|_| strategy.new_tree(&mut runner).unwrap().current()).collect(),
        Err(_) => vec!["one".to_owned()],
    }
}

/// Sets a value, and on the way to it what the schema requires beside it. `adds`: in a new item of a list, not in the last one.
fn set(into: &mut Value, schema: &Value, way: &[Step], value: &Value, adds: bool) {
    let Some((step, rest)) = way.split_first() else {
        *into = value.clone();
        return;
    };
    match step {
        Step::Field(name) => {
            if !into.is_object() {
                *into = Value::Object(required(schema));
            }
            set(&mut into[name.as_str()], &schema["properties"][name.as_str()], rest, value, adds);
        }
        Step::Item => {
            if !into.is_array() {
                *into = json!([]);
            }
            let items = into.as_array_mut().unwrap();
            if adds || items.is_empty() {
                items.push(Value::Object(required(&schema["items"])));
            }
            set(items.last_mut().unwrap(), &schema["items"], rest, value, adds);
        }
    }
}

fn required(schema: &Value) -> Map<String, Value> {
    let names = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    names.map(|name| (name.to_owned(), first(&schema["properties"][name]))).collect()
}

fn first(schema: &Value) -> Value {
    match schema["properties"].is_object() {
        true => Value::Object(required(schema)),
        false => samples(schema).into_iter().next().unwrap_or(Value::Null),
    }
}

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

fn now() -> Timestamp {
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

    fn outcome(&self, vm: &Value, observed: &Observed) -> Result<Outcome, String> {
        let vm: VirtualMachine = serde_json::from_value(vm.clone()).map_err(|error| error.to_string())?;
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        let rendered = render(&vm, observed, &self.config, &random, &self.set).map_err(|error| error.to_string())?;
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
    let schema = spec_schema();
    let mut all = Vec::new();
    properties(&[], &schema, &mut all);
    let of_property = |property: &Property| {
        let (name, mut without) = (property.name(), manifest());
        let beside = beside(&name);
        if let Some(patch) = &beside {
            json_patch::merge(&mut without["spec"], patch);
        }
        let values = samples(&property.schema).into_iter().map(|value| {
            let mut with = without.clone();
            set(&mut with["spec"], &schema, &property.way, &value, beside.is_none());
            Change { name: name.clone(), value, without: without.clone(), with }
        });
        values.collect()
    };
    all.iter().map(of_property).collect()
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
        match (has_effect, WITHOUT_EFFECT.iter().any(|(without, _)| without == name)) {
            (false, false) => wrong.push(format!("{name}: no value of it has an effect")),
            (true, true) => wrong.push(format!("{name}: it has an effect, and WITHOUT_EFFECT says that it has none")),
            _ => {}
        }
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
    let schema = spec_schema();
    let mut all = Vec::new();
    properties(&[], &schema, &mut all);
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
            set(&mut changed["spec"], &schema, &property.way, value, true);
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
