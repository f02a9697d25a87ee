//! Whatever is rendered for a running VM and whatever others say, the API server accepts the status that follows.

use std::sync::Arc;

use fastrand::Rng;

use super::*;
use crate::api::crd::crds;

#[path = "../../../../tests/support/status_schema.rs"]
mod status_schema;

use status_schema::StatusSchema;

/// Values that somebody may write somewhere.
fn value(random: &mut Rng) -> Value {
    let long = "x".repeat(40_000);
    let texts = ["", "A", "/a", "vm-runner", "TCP", "UDP", "\u{9b}31m\u{80}", "\u{2028}\u{feff}", long.as_str()];
    match random.u8(..8) {
        0 => json!(random.i32(0..70_000)),
        1 => json!([1, 1]),
        2 => (0..random.usize(1..120)).fold(json!("deep"), |value, _| json!([value])),
        3 => json!({ "name": texts[random.usize(..texts.len())] }),
        4 => json!(true),
        _ => json!(texts[random.usize(..texts.len())]),
    }
}

/// Changes one thing somewhere in a value: a field, an item that is there twice, or one that is gone.
fn change(value: &mut Value, random: &mut Rng) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            let at = random.usize(..map.len());
            let name = map.keys().nth(at).unwrap().clone();
            match random.u8(..8) {
                0 => drop(map.insert("added".into(), self::value(random))),
                1 => drop(map.remove(&name)),
                _ => change(map.get_mut(&name).unwrap(), random),
            }
        }
        Value::Array(list) if !list.is_empty() => {
            let at = random.usize(..list.len());
            match random.u8(..4) {
                0 => list.push(list[at].clone()),
                1 => drop(list.remove(at)),
                _ => change(&mut list[at], random),
            }
        }
        other => *other = self::value(random),
    }
}

#[test]
fn no_status_is_refused_whatever_is_rendered_and_whatever_others_say() {
    let schema = StatusSchema::new(crds());
    let vm = vm(|vm| vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }]));
    let objects = rendered(&vm, &nothing());
    let (mut random, mut pending, mut twice) = (Rng::with_seed(7), 0, 0);
    for round in 0..500 {
        let observed = applied(&objects, |kind, object| {
            if kind == "Pod" {
                object["metadata"]["annotations"][crate::object::HASH_ANNOTATION] = json!("another");
                object["status"] = json!({ "phase": "Running", "podIPs": [{ "ip": "10.0.0.1" }, { "ip": "10.0.0.1" }],
                    "containerStatuses": [{ "name": "vm-runner", "image": "x", "restartCount": 1,
                        "state": { "waiting": { "reason": "CreateContainerError", "message": value(&mut random) } } }] });
                if round % 3 == 0 {
                    change(&mut object["status"], &mut random);
                }
            }
        });
        let mut wanted = objects.clone();
        for object in wanted.iter_mut().filter(|object| object.key.is_pod()) {
            for _ in 0..random.usize(1..6) {
                change(&mut Arc::make_mut(&mut object.value)["spec"], &mut random);
            }
        }
        let plan = plan(&vm, &observed, Some(&wanted));
        let problem = |random: &mut Rng| Problem::new(Reason::ApplyFailed, value(random).to_string());
        let outcome = ExecutionResult {
            failure: (round % 5 == 0).then(|| problem(&mut random)),
            beside: (0..round % 3).map(|_| problem(&mut random)).collect(),
            ..ExecutionResult::default()
        };
        let status = json!(status(&Reconciled {
            vm: &vm,
            observed: &observed,
            plan: &plan,
            rendered: Ok(&wanted),
            outcome: &outcome,
            source: UsedTemplates::default(),
        }));
        assert_eq!(schema.problems(&status), [""; 0], "round {round}");
        pending += usize::from(!plan.pending.is_empty());
        twice += usize::from(plan.pending.iter().any(|change| change.path.contains('#')));
        assert!(status.to_string().len() < 600_000, "round {round}");
    }
    assert!(pending > 250 && twice > 0, "{pending} {twice}");
}
