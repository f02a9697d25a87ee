use k8s_openapi::jiff::SignedDuration;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{
    api::{PowerState, VirtualMachine, status::whole_seconds},
    object::STATE_UNTIL_ANNOTATION,
    observed::Observed,
    plan::instances::Instances,
    test_support::{applied, noon, nothing, rendered, set_by, stored, vm},
};

const HALTED: &str = r#"{ "by": "guest", "time": "2027-01-15T07:00:00Z", "generation": 3 }"#;

fn vm_with(state: &str, setter: Option<&str>, status: Value) -> VirtualMachine {
    vm(|vm| {
        vm["spec"]["vm"]["state"] = json!(state);
        vm["spec"]["guestShutdownStops"] = json!(true);
        vm["status"] = status;
        if let Some(operation) = setter {
            set_by(operation, vm);
        }
    })
}

fn with_pod() -> Observed {
    applied(&rendered(&vm(|_| ()), &nothing()), |_, _| ())
}

fn decide(vm: &VirtualMachine, observed: &Observed) -> Power {
    let instances = Instances::new(vm, observed);
    power(vm, instances.active().map(AsRef::as_ref), instances.previous().map(AsRef::as_ref), noon())
}

fn shut_down(pod_uid: &str) -> Value {
    json!({ "power": "Running", "podUid": pod_uid, "conditions": [{
        "type": "Running", "status": "False", "reason": "GuestShutdown", "message": "",
        "lastTransitionTime": "2027-01-15T07:30:00Z",
    }] })
}

#[test]
fn the_table() {
    let halted: Value = serde_json::from_str(HALTED).unwrap();
    let was = |power: &str| json!({ "power": power });
    let up = with_pod();
    for (vm, observed, wanted, halted, unmanaged, write_stopped) in [
        (vm_with("Running", None, Value::Null), &nothing(), WantedPower::Up, false, false, false),
        (vm_with("Running", Some("Apply"), Value::Null), &up, WantedPower::Up, false, false, false),
        (vm_with("Running", None, shut_down("Pod-apple")), &up, WantedPower::Halting, true, false, false),
        (vm_with("Running", None, shut_down("Pod-apple")), &nothing(), WantedPower::Halting, true, false, false),
        (vm_with("Running", None, shut_down("the one before")), &up, WantedPower::Up, false, false, false),
        (vm_with("Running", Some("Apply"), json!({ "halted": halted })), &up, WantedPower::Down, true, false, false),
        (vm_with("Running", Some("Update"), json!({ "halted": halted })), &up, WantedPower::Down, true, false, true),
        (
            vm_with("Stopped", Some("Update"), json!({ "halted": halted })),
            &nothing(),
            WantedPower::Down,
            false,
            false,
            false,
        ),
        (vm_with("Stopped", Some("Apply"), was("Running")), &up, WantedPower::Down, false, false, false),
        (vm_with("Stopped", None, was("Running")), &nothing(), WantedPower::Up, false, true, false),
        (vm_with("Stopped", None, shut_down("Pod-apple")), &up, WantedPower::Halting, true, false, false),
        (vm_with("Stopped", None, was("Stopped")), &up, WantedPower::Down, false, false, false),
        (vm_with("Stopped", None, Value::Null), &nothing(), WantedPower::Down, false, false, false),
        (vm_with("Stopped", None, Value::Null), &up, WantedPower::Up, false, true, false),
    ] {
        let power = decide(&vm, observed);
        let found = (power.wanted, power.halted.is_some(), power.unmanaged, power.write_stopped);
        let row = (vm.spec.vm.state, setter(&vm), json!(vm.status));
        assert_eq!(found, (wanted, halted, unmanaged, write_stopped), "{row:?}");
    }
}

#[test]
fn whether_a_vm_that_is_made_again_was_up_is_decided_when_its_pod_has_lost_the_former_owner() {
    let vm = vm_with("Stopped", None, Value::Null);
    let owned_by = |uid: Option<&str>, is_deleted: bool| {
        applied(&rendered(&vm, &nothing()), |kind, object| {
            if kind == "Pod" {
                object["metadata"]["ownerReferences"] = match uid {
                    Some(uid) => json!([{
                        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "apple", "uid": uid,
                    }]),
                    None => json!([]),
                };
                if is_deleted {
                    object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:40:00Z");
                }
            }
        })
    };
    let decide = |pods: &Observed| {
        let power = decide(&vm, pods);
        (power.wanted, power.undecided)
    };
    assert_eq!(decide(&owned_by(Some("the former VM"), false)), (WantedPower::Down, true));
    assert_eq!(decide(&owned_by(None, false)), (WantedPower::Up, false));
    assert_eq!(
        decide(&owned_by(Some("the former VM"), true)),
        (WantedPower::Down, false),
        "it goes with the former VM"
    );
}

#[test]
fn a_state_that_can_not_be_read_keeps_the_power() {
    for (status, observed, wanted) in [
        (json!({ "power": "Running" }), nothing(), WantedPower::Up),
        (json!({ "power": "Running" }), with_pod(), WantedPower::Up),
        (json!({ "power": "Stopped" }), nothing(), WantedPower::Down),
        (json!({ "power": "Stopped" }), with_pod(), WantedPower::Down),
        (Value::Null, with_pod(), WantedPower::Up),
        (Value::Null, nothing(), WantedPower::Down),
    ] {
        let vm = stored(|vm| {
            vm["spec"]["vm"]["state"] = json!(7);
            vm["status"] = status.clone();
            set_by("Update", vm);
        });
        let power = decide(&vm, &observed);
        assert_eq!((power.wanted, power.unmanaged, power.write_stopped), (wanted, false, false), "{status}");
    }
}

#[test]
fn a_vm_that_was_started_again_is_not_halted_by_the_old_report() {
    let halted: Value = serde_json::from_str(HALTED).unwrap();
    let report = |halted: &Value| {
        let mut status = shut_down("Pod-apple");
        status["halted"] = halted.clone();
        status
    };
    for observed in [with_pod(), nothing()] {
        let stopped = decide(&vm_with("Stopped", Some("Update"), report(&halted)), &observed);
        assert_eq!(stopped.wanted, WantedPower::Down);
        let halted = json!(stopped.halted);
        let started = decide(&vm_with("Running", Some("Update"), report(&halted)), &observed);
        assert_eq!(started.wanted, WantedPower::Up);
        assert_eq!(json!(started.halted), halted, "the report is still in the status");
    }
    let mut status =
        report(&json!({ "by": "guest", "time": "2027-01-15T07:00:00Z", "generation": 3, "released": true }));
    status["podUid"] = json!("the one before");
    let running = decide(&vm_with("Running", Some("Update"), status), &with_pod());
    assert_eq!((running.wanted, running.halted), (WantedPower::Up, None));
}

#[test]
fn a_new_shutdown_is_recognised_while_an_earlier_one_is_in_the_status() {
    // The VM was started, but the manager ended before it could write that, and the new Pod's guest has shut down since.
    for released in [false, true] {
        let mut status = shut_down("Pod-apple");
        status["halted"] = json!({
            "by": "guest", "time": "2027-01-15T07:00:00Z", "generation": 3, "podUid": "the one before", "released": released,
        });
        let mut vm = vm_with("Running", Some("Update"), status);
        vm.annotations_mut().insert(GUEST_SHUTDOWN_ANNOTATION.into(), "2027-01-15T07:00:00Z".into());
        let power = decide(&vm, &with_pod());
        let halted = power.halted.unwrap();
        assert_eq!((power.wanted, power.replace_pod, halted.released), (WantedPower::Halting, false, false));
        assert_eq!(halted.pod_uid.as_deref(), Some("Pod-apple"));
    }
}

#[test]
fn a_start_after_the_state_was_written_is_not_undone() {
    let status = |halted: &Value| {
        let mut status = shut_down("Pod-apple");
        status["halted"] = halted.clone();
        status
    };
    let halted: Value = serde_json::from_str(HALTED).unwrap();
    let mut started = vm_with("Running", Some("Update"), status(&halted));
    let mut noted = |time: &str| {
        started.annotations_mut().insert(GUEST_SHUTDOWN_ANNOTATION.into(), time.into());
        let power = decide(&started, &with_pod());
        (power.wanted, power.write_stopped, power.halted.is_some_and(|halted| halted.released), power.replace_pod)
    };
    assert_eq!(noted("2027-01-14T07:00:00Z"), (WantedPower::Down, true, false, false), "that was another shutdown");
    assert_eq!(noted("2027-01-15T07:00:00Z"), (WantedPower::Up, false, true, true));
    assert!(!decide(&started, &nothing()).replace_pod, "it has no Pod any more");
    let deleting = applied(&rendered(&vm(|_| ()), &nothing()), |kind, object| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
        }
    });
    assert!(!decide(&started, &deleting).replace_pod, "its Pod is already being deleted");

    // Another shutdown in the same second is a new shutdown.
    let mut again = vm_with("Running", Some("Update"), shut_down("Pod-apple"));
    again.annotations_mut().insert(GUEST_SHUTDOWN_ANNOTATION.into(), whole_seconds(noon()));
    again.status.as_mut().unwrap().halted = decide(&again, &with_pod()).halted;
    assert_eq!(decide(&again, &with_pod()).wanted, WantedPower::Down);

    // A person who stops the VM while the report is in the status may start it again before its Pod is gone.
    for setter in [None, Some("Update"), Some("Apply")] {
        let mut status = shut_down("Pod-apple");
        status["power"] = json!("Stopped");
        let stopped = decide(&vm_with("Stopped", setter, status.clone()), &with_pod());
        assert_eq!(
            (stopped.wanted, stopped.halted.as_ref().map(|halted| halted.released)),
            (WantedPower::Down, Some(true))
        );
        status["halted"] = json!(stopped.halted);
        assert_eq!(decide(&vm_with("Running", setter, status), &with_pod()).wanted, WantedPower::Up);
    }
}

#[test]
fn without_guest_shutdown_stops_a_shutdown_does_not_halt_the_vm() {
    let mut vm = vm_with("Running", None, shut_down("Pod-apple"));
    vm.spec.guest_shutdown_stops = false;
    assert_eq!(decide(&vm, &with_pod()).wanted, WantedPower::Up);
}

#[test]
fn a_condition_of_the_manager_is_not_a_report_of_the_runner() {
    let mut vm = vm_with("Running", None, shut_down("Pod-apple"));
    let mut with = |ours: Value| {
        let fields = json!({ "f:status": { "f:conditions": { "k:{\"type\":\"Running\"}": ours } } });
        let entry = json!([{ "manager": ownership::STATUS_MANAGER, "operation": "Apply", "fieldsV1": fields }]);
        vm.metadata.managed_fields = serde_json::from_value(entry).unwrap();
        decide(&vm, &nothing()).wanted
    };
    assert_eq!(with(json!({ ".": {}, "f:status": {}, "f:message": {} })), WantedPower::Up);
    // The runner has written the same status, so both own it; only the message is the runner's.
    assert_eq!(with(json!({ ".": {}, "f:status": {} })), WantedPower::Halting);
}

#[test]
fn only_a_new_restart_annotation_starts_a_halted_vm() {
    let restarted = |restart: Option<&str>| {
        let mut halted: Value = serde_json::from_str(HALTED).unwrap();
        halted["restartedAt"] = json!("monday");
        let mut vm = vm_with("Running", Some("Apply"), json!({ "halted": halted }));
        vm.metadata.annotations =
            restart.map(|restart| [(RESTARTED_ANNOTATION.to_owned(), restart.to_owned())].into_iter().collect());
        decide(&vm, &nothing()).wanted
    };
    assert_eq!(
        [None, Some("monday"), Some("tuesday")].map(restarted),
        [WantedPower::Down, WantedPower::Down, WantedPower::Up]
    );
}

#[test]
fn the_restart_annotation_is_not_compared_with_the_pod_of_a_statefulset() {
    let mut vm = vm_with("Running", Some("Apply"), shut_down("Pod-apple-0"));
    vm.metadata.annotations = Some([(RESTARTED_ANNOTATION.to_owned(), "monday".to_owned())].into_iter().collect());
    let observed = applied(&rendered(&vm, &nothing()), |kind, object| {
        if kind == "Pod" {
            object["metadata"]["name"] = json!("apple-0");
            object["metadata"]["uid"] = json!("Pod-apple-0");
            object["metadata"]["ownerReferences"] = json!([{
                "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "apple", "uid": "a-statefulset", "controller": true,
            }]);
        }
    });
    assert_eq!(decide(&vm, &observed).wanted, WantedPower::Halting);
}

/// A VM with the annotation until two hours after now, or before it.
fn for_some_time(mut vm: VirtualMachine, state: &str, hours: i64) -> VirtualMachine {
    let end = whole_seconds(noon() + SignedDuration::from_hours(hours));
    vm.annotations_mut().insert(STATE_UNTIL_ANNOTATION.into(), format!("{state} {end}"));
    vm
}

#[test]
fn an_annotation_outranks_the_spec_until_its_time_has_passed() {
    let halted: Value = serde_json::from_str(HALTED).unwrap();
    let was = |power: &str| json!({ "power": power });
    let (up, down) = (with_pod(), nothing());
    use PowerState::{Running, Stopped};
    for (vm, state, observed, wanted, remembered) in [
        (vm_with("Running", Some("Apply"), was("Running")), "Stopped", &up, WantedPower::Down, Running),
        (vm_with("Running", Some("Update"), was("Running")), "Running", &up, WantedPower::Up, Running),
        (vm_with("Stopped", Some("Apply"), was("Stopped")), "Running", &down, WantedPower::Up, Stopped),
        (vm_with("Stopped", Some("Apply"), was("Stopped")), "Stopped", &down, WantedPower::Down, Stopped),
        // Nobody sets the state: afterwards the VM is as it was before.
        (vm_with("Stopped", None, was("Running")), "Stopped", &down, WantedPower::Down, Running),
        (vm_with("Stopped", None, was("Stopped")), "Running", &up, WantedPower::Up, Stopped),
    ] {
        let row = (vm.spec.vm.state, setter(&vm), state);
        let power = decide(&for_some_time(vm.clone(), state, 2), observed);
        assert_eq!((power.wanted, power.remembered()), (wanted, Some(remembered)), "{row:?}");
        assert!(!power.unmanaged && !power.write_stopped, "{row:?}");
        let over = decide(&for_some_time(vm.clone(), state, -2), observed);
        let without = Power { until: over.until.clone(), ..decide(&vm, observed) };
        assert_eq!(over, without, "{row:?}");
    }

    // A shutdown is the guest's own while the annotation lets it run, and the stop's while the annotation stops it.
    let shutdown = vm_with("Stopped", Some("Apply"), shut_down("Pod-apple"));
    let power = decide(&for_some_time(shutdown, "Running", 2), &up);
    assert_eq!((power.wanted, power.halted.map(|halted| halted.released)), (WantedPower::Halting, Some(false)));
    let shutdown = vm_with("Running", Some("Apply"), shut_down("Pod-apple"));
    let power = decide(&for_some_time(shutdown, "Stopped", 2), &up);
    assert_eq!((power.wanted, power.halted.map(|halted| halted.released)), (WantedPower::Down, Some(true)));

    // A VM that is down because of its guest stays so.
    for (setter, state) in [("Apply", "Stopped"), ("Update", "Stopped"), ("Apply", "Running")] {
        let vm = vm_with("Running", Some(setter), json!({ "halted": halted }));
        let power = decide(&for_some_time(vm, state, 2), &down);
        let found = (power.wanted, power.halted.as_ref().map(|halted| halted.released), power.write_stopped);
        assert_eq!(found, (WantedPower::Down, Some(false), false), "{setter} {state}");
    }
    // A start by the spec that comes meanwhile is not forgotten.
    let vm = vm_with("Stopped", Some("Update"), json!({ "halted": halted }));
    assert_eq!(decide(&for_some_time(vm, "Stopped", 2), &down).halted, None);
}

proptest! {
    /// Whatever the spec, its setter, the status and the observed objects: the state of the annotation is what is wanted, but for a guest
    /// that has shut itself down; afterwards everything is as without it.
    #[test]
    fn the_annotation_decides_alone_and_leaves_nothing_behind(
        (stops, runs, has_pod, is_running) in any::<(bool, bool, bool, bool)>(),
        setter in prop::sample::select(vec![None, Some("Apply"), Some("Update")]),
        status in prop::sample::select(vec![
            Value::Null, json!({ "power": "Running" }), json!({ "power": "Stopped" }), shut_down("Pod-apple"), shut_down("other"),
        ]),
        hours in -3_i64..3,
    ) {
        let mut vm = vm_with(if runs { "Running" } else { "Stopped" }, setter, status);
        vm.spec.guest_shutdown_stops = stops;
        let state = if is_running { "Running" } else { "Stopped" };
        let observed = if has_pod { with_pod() } else { nothing() };
        let (without, power) = (decide(&vm, &observed), decide(&for_some_time(vm.clone(), state, hours), &observed));
        if hours <= 0 {
            prop_assert_eq!(power.clone(), Power { until: power.until, ..without });
        } else {
            let wanted = if is_running { WantedPower::Up } else { WantedPower::Down };
            let is_shut_down = is_running && stops && power.wanted == WantedPower::Halting;
            prop_assert!(power.wanted == wanted || is_shut_down);
            prop_assert!(!power.write_stopped && !power.unmanaged);
            prop_assert_eq!(power.remembered(), without.remembered());
        }
    }
}
