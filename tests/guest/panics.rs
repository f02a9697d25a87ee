//! What the runner does when the guest's kernel panics, or nobody feeds its watchdog.

use serde_json::json;

use crate::runner::Vm;

fn vm(on_panic: &str, user_data: serde_json::Value) -> Vm {
    Vm::new(json!({ "onPanic": on_panic, "powerdownTimeout": 900 }), user_data)
}

/// A guest that is told to do this at its first start, and says so, is reset, and its status says why.
fn is_reset(order: &str, says: &str) {
    let vm = vm("restart", json!({ order: "start 1" }));
    let mut runner = vm.start("all");
    runner.console(says);
    runner.logs("condition=\"Running\" status=false reason=\"GuestPanicked\"");
    runner.says_last("Running", "QEMU runs a");
    runner.console("guest: starts=2");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_that_panics_is_reset_and_its_status_says_so() {
    is_reset("panic", "guest: panicking");
}

#[test]
fn a_guest_that_panics_stays_as_it_is_for_who_wants_to_look_at_it() {
    let vm = vm("keep", json!({ "panic": "start 1" }));
    let mut runner = vm.start("all");
    runner.says_last("Running", "The guest's kernel has panicked; it stays paused");
    vm.change(|config| config["resetCounter"] = json!(1));
    runner.logs("changed change=\"Reset\"");
    runner.console("guest: starts=2");
    runner.says_last("Running", "QEMU runs a");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_that_has_panicked_is_not_asked_to_power_down() {
    let vm = vm("keep", json!({ "panic": "start 1" }));
    let mut runner = vm.start("all");
    runner.says_last("Running", "The guest's kernel has panicked; it stays paused");
    runner.signal("TERM");
    runner.ends_well("PoweredOff");
}

#[test]
fn a_guest_that_panics_stays_down_also_when_its_container_is_started_again() {
    let vm = vm("stop", json!({ "panic": "start 1" }));
    {
        let runner = vm.start("all");
        runner.logs("condition=\"Running\" status=false reason=\"StoppedAfterPanic\"");
        runner.logs("waiting for the Pod's end");
    }
    let mut runner = vm.start("all");
    runner.logs("waiting for the Pod's end");
    assert!(!runner.log().contains("QEMU started"), "{}", runner.log());
    runner.signal("TERM");
    runner.ends_well("StoppedAfterPanic");
}

#[test]
fn a_guest_that_does_not_feed_its_watchdog_is_reset_and_its_status_says_so() {
    is_reset("start-watchdog", "guest: watchdog started");
}

#[test]
fn a_watchdog_has_an_action_of_its_own() {
    let watched = |action: &str, more: serde_json::Value| {
        let mut config = json!({ "watchdog": { "action": action }, "powerdownTimeout": 900 });
        config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Vm::new(config, json!({ "start-watchdog": "start 1" }))
    };
    // Without a panic device.
    let vm = watched("reset", json!({}));
    let mut runner = vm.start("all");
    runner.console("guest: watchdog started");
    runner.logs("condition=\"Running\" status=false reason=\"GuestPanicked\"");
    runner.console("guest: starts=2");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
    // Beside one, which does something else.
    let vm = watched("poweroff", json!({ "onPanic": "keep" }));
    let runner = vm.start("all");
    runner.console("guest: watchdog started");
    runner.logs("condition=\"Running\" status=false reason=\"StoppedAfterPanic\"");
    runner.logs("waiting for the Pod's end");
    drop(runner);
    // The guest goes on.
    let vm = watched("none", json!({ "onPanic": "restart" }));
    let mut runner = vm.start("all");
    runner.console("guest: watchdog started");
    runner.logs("the guest has not fed its watchdog, and goes on");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}
