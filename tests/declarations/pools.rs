//! Each property of a pool does something: set in a pool whose VMs are there, the VMs and the status come to what it says, the pool comes to rest, and
//! when it is taken out, everything is as it was. The API server is played: a VM that the pool makes is stored, and an apply of the template leaves
//! what others have written.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use k8s_openapi::jiff::SignedDuration;
use kube::core::DynamicObject;
use serde_json::{Value, json};
use vm_operator::{
    api::{VirtualMachine, VmPoolSpec, login_pools::LoginPools, stored},
    assignment::{
        Assignee, Member, Pool, Pools, Start, assign,
        members::{MemberPlan, MemberWrite, plan},
        upkeep::{Upkeep, status, upkeep},
    },
    object::{POOL_LABEL, POOL_TEMPLATE_ANNOTATION},
    ownership::MEMBER_MANAGER,
    people::{Person, rights_in_pool},
};

use crate::{
    declared::{Property, properties, samples, set, spec_of, wrong_effect},
    vms::now,
};

/// Properties of the template that the definition refuses, because each VM has its own.
const REFUSED: &[&str] = &[
    "template.spec.vm.machineUuid",
    "template.spec.vm.networks[].pod.mac",
    "template.spec.vm.networks[].tap.mac",
    "template.spec.vm.state",
];

/// So many rounds a pool needs at most until nothing is to be done.
const ROUNDS: usize = 20;
const SEQUENCES: u64 = 100;

fn manifest() -> Value {
    let disk = json!({ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } });
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool",
        "metadata": { "name": "desk", "namespace": "orchard", "uid": "desk-uid", "generation": 3 },
        "spec": {
            "retention": "PT1h", "replicas": 3, "permissions": [{ "role": "staff" }],
            "template": { "metadata": { "labels": { "team": "a" } }, "spec": { "vm": { "maximumCpus": 2, "disks": [disk] } } },
        },
    })
}

/// A namespace with one pool, its VMs, and one that somebody else has made.
#[derive(Clone)]
struct Played {
    pool: Value,
    vms: BTreeMap<String, Value>,
    made: u64,
}

impl Played {
    fn new() -> Self {
        let other = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
            "metadata": { "name": "other", "namespace": "orchard", "uid": "other-uid" }, "spec": { "vm": { "maximumCpus": 1 } },
        });
        Self { pool: manifest(), vms: [("other".to_owned(), other)].into(), made: 0 }
    }

    fn decided(&self) -> Pool {
        let pool: DynamicObject = serde_json::from_value(self.pool.clone()).unwrap();
        Pool::read(&pool)
    }

    fn pools(&self) -> Pools {
        [("desk".to_owned(), self.decided())].into()
    }

    fn read(vm: &Value) -> VirtualMachine {
        stored::read(&vm.to_string()).unwrap()
    }

    fn members(&self) -> Vec<Member> {
        let of_pool =
            |vm: &&VirtualMachine| vm.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(POOL_LABEL));
        let start = |vm: &VirtualMachine| {
            if json!(vm)["spec"]["vm"]["state"] == "Running" { Start::Runs } else { Start::Needed }
        };
        let vms: Vec<_> = self.vms.values().map(Self::read).collect();
        vms.iter().filter(of_pool).map(|vm| Member::new(vm, start(vm))).collect()
    }

    fn plan(&self, members: &[Member]) -> Option<MemberPlan> {
        let others: BTreeSet<String> =
            self.vms.keys().filter(|name| members.iter().all(|member| member.name != **name)).cloned().collect();
        let mut number = self.made;
        plan(&self.decided(), members, &others, || {
            number += 1;
            format!("{number:08x}")
        })
    }

    /// Stores the VM as the pool's template has it. What others have written stays.
    fn apply(&mut self, name: &str, is_new: bool) {
        let pool = self.decided();
        let mut vm = pool.template.unwrap().vm("desk", pool.uid.as_deref(), name, is_new && pool.reset.is_some());
        let former = self.vms.get(name);
        assert!(
            is_new || former.is_some_and(|vm| vm["metadata"]["ownerReferences"][0]["uid"] == "desk-uid"),
            "{name} is not the pool's"
        );
        self.made += 1;
        let uid = former.map_or(json!(format!("{name}-{}", self.made)), |vm| vm["metadata"]["uid"].clone());
        vm["metadata"]["namespace"] = json!("orchard");
        vm["metadata"]["managedFields"] =
            json!([{ "manager": MEMBER_MANAGER, "operation": "Apply", "fieldsV1": { "f:spec": {} } }]);
        vm["status"] = former.map_or(json!({ "newDisks": { "vmUid": uid, "others": [] } }), |vm| vm["status"].clone());
        if let Some(state) = former.and_then(|vm| vm["spec"]["vm"].get("state")) {
            vm["spec"]["vm"]["state"] = state.clone();
        }
        vm["metadata"]["uid"] = uid;
        self.vms.insert(name.to_owned(), vm);
    }

    /// Does what is decided, until nothing is. Returns how many writes that took.
    fn settle(&mut self) -> Result<usize, String> {
        let mut writes = 0;
        for _ in 0..ROUNDS {
            let members = self.members();
            let to_do = self.plan(&members).unwrap_or_default().writes;
            let Upkeep { warmed, .. } = upkeep(&self.pools(), &members, now());
            if to_do.is_empty() && warmed.is_empty() {
                return Ok(writes);
            }
            writes += to_do.len() + warmed.len();
            for write in to_do {
                match write {
                    MemberWrite::Create(name) => self.apply(&name, true),
                    MemberWrite::Update { vm, .. } => self.apply(&vm, false),
                    MemberWrite::Delete { vm, .. } => drop(self.vms.remove(&vm)),
                }
            }
            for name in warmed {
                if let Some(vm) = self.vms.get_mut(&name) {
                    vm["spec"]["vm"]["state"] = json!("Running");
                }
            }
        }
        Err("it never comes to rest".to_owned())
    }

    /// Everything that people get to see of the pool, and what it decides of a VM that Ann has. `null` for what is new with each VM.
    fn seen(&self) -> Value {
        let vms: Vec<Value> = self
            .vms
            .values()
            .map(|vm| {
                let mut vm = vm.clone();
                vm["metadata"]["uid"] = Value::Null;
                vm["status"] = Value::Null;
                if self.decided().reset.is_some() {
                    vm["metadata"]["name"] = Value::Null;
                }
                vm
            })
            .collect();
        let members = self.members();
        let pools = self.pools();
        let members_plan = self.plan(&members);
        let counts = upkeep(&pools, &members, now()).counts["desk"];
        let status = status(&pools["desk"], counts, members_plan.as_ref().map(|plan| (plan, None)), &[], now());
        json!([vms, status, self.of_ann(), format!("{:?}", pools["desk"].reset)])
    }

    /// What becomes of Ann, of the role staff, who asks for a VM, and of the one that she has used half an hour ago.
    fn of_ann(&self) -> Value {
        let pools = self.pools();
        let spec: Option<VmPoolSpec> = serde_json::from_value(self.pool["spec"].clone()).ok();
        let person = Person { user: "ann".into(), roles: ["staff".to_owned()].into() };
        let rights = spec.map(|spec| rights_in_pool(&person, &spec)).unwrap_or_default();
        let asks = Assignee { user: "ann".into(), rights: rights.clone() };
        let answer = assign("desk", &pools, &self.members(), &asks, now());
        let mut held = self.clone();
        let before = now() - SignedDuration::from_mins(30);
        let assignment =
            json!({ "pool": "desk", "poolUid": "desk-uid", "user": "ann", "lastUsed": before, "assignedAt": before });
        let Some(vm) = held.vms.values_mut().find(|vm| !vm["metadata"]["labels"][POOL_LABEL].is_null()) else {
            return json!(format!("{answer:?} {rights:?}"));
        };
        vm["status"]["assignment"] = assignment;
        let mut login = LoginPools::default();
        login.observe(&serde_json::from_value(self.pool.clone()).unwrap());
        let mut has = Arc::new(Self::read(vm));
        login.log_in(&mut has);
        let kept: Upkeep = upkeep(&pools, &held.members(), now());
        let answer = answer.map(|_| ()).map_err(|error| error.to_string());
        json!([format!("{answer:?} {rights:?}"), kept.next, kept.writes.len(), has.spec.vm.display.logged_in_user])
    }

    /// What is not as the template is, of VMs that it has made.
    fn is_as_declared(&self) -> Vec<String> {
        let mut wrong = Vec::new();
        let template = &self.pool["spec"]["template"];
        for (name, vm) in self.vms.iter().filter(|(_, vm)| !vm["metadata"]["ownerReferences"].is_null()) {
            let mut spec = vm["spec"].clone();
            let mut wanted = template["spec"].clone();
            spec["vm"].as_object_mut().unwrap().remove("state");
            wanted["vm"].as_object_mut().unwrap().remove("state");
            let mut pools: BTreeSet<String> = serde_json::from_value(wanted["pools"].clone()).unwrap_or_default();
            pools.insert("desk".into());
            wanted["pools"] = json!(pools);
            if spec != wanted {
                wrong.push(format!("{name}: its spec is {spec} and not {wanted}"));
            }
            for part in ["labels", "annotations"] {
                let ours = [POOL_LABEL, POOL_TEMPLATE_ANNOTATION, "vmoperator.jdrupes.org/unused"];
                let without = |map: &Value| {
                    let entries =
                        map.as_object().into_iter().flatten().filter(|(key, _)| !ours.contains(&key.as_str()));
                    entries.map(|(key, value)| (key.clone(), value.clone())).collect::<BTreeMap<_, _>>()
                };
                if without(&vm["metadata"][part]) != without(&template["metadata"][part]) {
                    wrong.push(format!("{name}: its {part} are {}", vm["metadata"][part]));
                }
            }
            if vm["metadata"]["labels"][POOL_LABEL] != "desk" || vm["metadata"]["namespace"] != "orchard" {
                wrong.push(format!("{name} is not the pool's: {}", vm["metadata"]));
            }
        }
        if self.vms["other"] != Self::new().vms["other"] {
            wrong.push(format!("another's VM was changed: {}", self.vms["other"]));
        }
        wrong
    }
}

/// What a pool has beside a property that shows nothing alone, as a merge patch of its spec.
fn beside(name: &str) -> Option<Value> {
    let beside = [
        ("permissions[].may", json!({})),
        (
            "template.spec.image.",
            json!({ "template": { "spec": { "image": { "repository": "registry.example.org", "path": "team/vm-runner", "version": "1" } } } }),
        ),
    ];
    beside.into_iter().find(|(begin, _)| name.starts_with(begin)).map(|(_, patch)| patch)
}

/// The pool without and with a value of a property.
fn change(schema: &Value, property: &Property, value: &Value) -> (Value, Value) {
    let name = property.name();
    let (mut without, beside) = (manifest(), beside(&name));
    if let Some(patch) = &beside {
        json_patch::merge(&mut without["spec"], patch);
    }
    let mut with = without.clone();
    set(&mut with["spec"], schema, &property.way, value, beside.is_none());
    if name == "permissions[].user" || name == "permissions[].role" {
        // A permission is for a user or for a role.
        let last = with["spec"]["permissions"].as_array_mut().unwrap().last_mut().unwrap();
        last["may"] = json!(["stop"]);
    }
    (without, with)
}

/// What is [`seen`](Played::seen), but for the power of its VMs: the manager stops no VM that was started to be warm.
fn without_state(mut seen: Value) -> Value {
    for vm in seen[0].as_array_mut().unwrap() {
        if let Some(vm) = vm["spec"]["vm"].as_object_mut() {
            vm.remove("state");
        }
    }
    seen
}

/// Makes the change in a pool at rest, and takes it back. Returns whether it has an effect.
fn try_out(without: &Value, with: &Value) -> Result<bool, String> {
    let mut played = Played { pool: without.clone(), ..Played::new() };
    played.settle()?;
    let before = played.seen();
    played.pool = with.clone();
    let writes = played.settle()?;
    let wrong = played.is_as_declared();
    if !wrong.is_empty() {
        return Err(wrong.join("; "));
    }
    let with_it = played.seen();
    if writes == 0 && with_it[0] != before[0] {
        return Err("its VMs differ although nothing was written".into());
    }
    played.pool = without.clone();
    played.settle()?;
    let after = played.seen();
    if without_state(after.clone()) != without_state(before.clone()) {
        return Err(format!("something of it stays when it is taken back: {after} instead of {before}"));
    }
    Ok(with_it != before)
}

/// What the samples of the schema do not have: values that a person would see at once.
fn more(name: &str) -> Vec<Value> {
    match name {
        "permissions[].user" => vec![json!("ann")],
        "permissions[].role" => vec![json!("staff")],
        "retention" => {
            vec![json!("PT2H"), json!("2027-01-15T18:00:00Z"), json!("P99999Y"), json!("P1D"), json!("PT0S")]
        }
        _ => Vec::new(),
    }
}

#[test]
fn each_property_of_a_pool_has_an_effect_and_can_be_taken_back() {
    let schema = spec_of("vmpools");
    let (mut values, mut wrong) = (0, Vec::new());
    let all = properties(&schema);
    for property in &all {
        let name = property.name();
        if REFUSED.contains(&name.as_str()) {
            continue;
        }
        let mut has_effect = false;
        for value in samples(&property.schema).into_iter().chain(more(&name)) {
            values += 1;
            let (without, with) = change(&schema, property, &value);
            match try_out(&without, &with) {
                Ok(is_seen) => has_effect |= is_seen,
                Err(error) => wrong.push(format!("{name}: {value}: {error}")),
            }
        }
        wrong.extend(wrong_effect(&name, has_effect, &[]));
    }
    println!("{} properties of pools, {values} values", all.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// One property after the other gets a value. Each time the pool comes to rest, and when all is taken back, it is as it was.
#[test]
fn combinations_of_a_pool_come_to_rest_and_can_be_taken_back() {
    let schema = spec_of("vmpools");
    let mut all = properties(&schema);
    all.retain(|property| beside(&property.name()).is_none());
    let mut base = Played::new();
    base.settle().unwrap();
    let mut steps = 0;
    for seed in 0..SEQUENCES {
        let mut random = fastrand::Rng::with_seed(seed);
        let (mut played, mut said) = (base.clone(), Vec::new());
        for _ in 0..6 {
            let property = &all[random.usize(0..all.len())];
            let values = samples(&property.schema);
            let value = &values[random.usize(0..values.len())];
            if value.as_u64().is_some_and(|number| number >= 1000) {
                continue;
            }
            said.push(format!("{} = {value}", property.name()));
            set(&mut played.pool["spec"], &schema, &property.way, value, true);
            played.settle().unwrap_or_else(|error| panic!("{said:#?}\n{error}"));
            assert_eq!(played.is_as_declared(), [""; 0], "{said:#?}");
            steps += 1;
        }
        played.pool = manifest();
        played.settle().unwrap_or_else(|error| panic!("{said:#?}\n{error}"));
        assert_eq!(without_state(played.seen()), without_state(base.seen()), "{said:#?}\nleaves something");
    }
    println!("{SEQUENCES} sequences of a pool, {steps} steps");
    assert!(steps > 5 * SEQUENCES);
}
