//! What is asked of a running guest through the VM: to stand still, and to reboot.

use std::{
    fs::File,
    io::Write,
    process::{Command, Stdio},
};

use serde_json::json;

use crate::runner::{RUNNER, Vm, wait_for};

fn status(vm: &Vm) -> String {
    let output =
        Command::new(RUNNER).args(["ctl", "--config-dir"]).arg(vm.path("config")).arg("status").output().unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn a_guest_is_paused_goes_on_and_powers_down_as_the_configuration_says() {
    let vm = Vm::new(json!({ "powerdownTimeout": 900 }), json!({}));
    let machine = vm.start("machine");
    let mut agent = vm.start("agent");
    machine.console("guest: up");
    let is = |wanted: &str| wait_for(wanted, || (status(&vm) == format!("{wanted}\n")).then_some(()), || agent.state());
    is("running");
    vm.change(|config| config["paused"] = json!(true));
    is("paused");
    agent.says_last("Running", "The guest is paused.");
    // Another agent leaves what it finds, also a guest that somebody has let go on meanwhile.
    agent.child.kill().unwrap();
    agent.end();
    let resumed = Command::new(RUNNER).args(["ctl", "--config-dir"]).arg(vm.path("config")).arg("resume").status();
    assert!(resumed.unwrap().success());
    drop(agent);
    let agent = vm.start("agent");
    agent.says_last("Running", "QEMU runs a");
    assert_eq!(status(&vm), "running\n");
    vm.change(|config| config["paused"] = json!(false));
    agent.logs("changed change=\"GoOn(Spec)\"");
    vm.change(|config| config["paused"] = json!(true));
    agent.logs("changed change=\"Pause\"");
    agent.says_last("Running", "The guest is paused.");
    // A guest that is paused hears the power button.
    let mut machine = machine;
    machine.signal("TERM");
    agent.signal("TERM");
    machine.console("guest: power button");
    machine.ends_well("PoweredDown");
}

#[test]
fn a_vm_that_is_started_paused_boots_when_it_may_go_on() {
    let mut vm = Vm::new(json!({}), json!({}));
    vm.config["paused"] = json!(true);
    vm.write_config();
    let mut runner = vm.start("all");
    runner.logs("changed change=\"Pause\"");
    runner.says_last("Running", "The guest is paused.");
    assert_eq!(status(&vm), "paused\n");
    assert!(!runner.output().contains("guest:"), "{}", runner.output());
    vm.change(|config| config["paused"] = json!(false));
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_guest_reboots_when_its_agent_can_be_asked_and_only_once() {
    let vm = Vm::new(json!({}), json!({}));
    let mut runner = vm.start("all");
    // The guest's agent does not run yet.
    runner.logs("the guest runs");
    vm.change(|config| config["rebootCounter"] = json!(1));
    runner.logs("the guest can't be asked to reboot (rebootCount 1): QEMU's guest agent does not answer in it");
    runner.logs("condition=\"ChangesApplied\" status=false reason=\"ChangeFailed\"");
    runner.console("guest: asked to reboot");
    runner.console("guest: starts=2");
    runner.logs("condition=\"Booted\" status=true");
    vm.change(|config| {
        config["rebootCounter"] = json!(1);
        config["vm"]["currentRam"] = json!("200 MiB");
    });
    runner.logs("changed change=\"Balloon(209715200)\"");
    assert_eq!(runner.log().matches("changed change=\"Reboot\"").count(), 1, "{}", runner.log());
    // A sync with Git takes the count back. The same count is a new order then.
    vm.change(|config| {
        config["rebootCounter"] = json!(0);
        config["vm"]["currentRam"] = json!("220 MiB");
    });
    runner.logs("changed change=\"Balloon(230686720)\"");
    vm.change(|config| config["rebootCounter"] = json!(1));
    runner.console("guest: starts=3");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_disk_grows_while_its_guest_runs_and_is_never_made_smaller() {
    let vm = Vm::new(json!({}), json!({}));
    let mut runner = vm.start("all");
    runner.console("guest: up");
    let size = |vm: &Vm, bytes: u64| vm.change(|config| config["vm"]["drives"][1]["size"] = json!(bytes));
    size(&vm, 4 << 20);
    runner.console("guest: vdb=8192");
    assert_eq!(vm.path("data.img").metadata().unwrap().len(), 4 << 20);
    // A part of a sector is left out.
    size(&vm, 1 << 10);
    size(&vm, (8 << 20) + 100);
    runner.console("guest: vdb=16384");
    assert_eq!(runner.log().matches("changed change=\"Grow").count(), 2, "{}", runner.log());
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
    drop(runner);
    // Its next start makes no less of it.
    let mut runner = vm.start("all");
    runner.console("guest: up");
    assert!(vm.path("data.img").metadata().unwrap().len() >= 8 << 20);
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn several_people_join_the_console_and_see_what_was_before() {
    let vm = Vm::new(json!({}), json!({}));
    let join = |name: &str| {
        Command::new(RUNNER)
            .args(["console", "--config-dir"])
            .arg(vm.path("config"))
            .stdin(Stdio::piped())
            .stdout(File::create(vm.path(name)).unwrap())
            .spawn()
            .unwrap()
    };
    assert!(!join("nobody").wait().unwrap().success(), "no VM runs");
    let mut runner = vm.start("all");
    runner.console("guest: up");
    let (mut one, mut two) = (join("one"), join("two"));
    let shows =
        |name: &str, text: &str| wait_for(text, || vm.text(name).contains(text).then_some(()), || vm.text(name));
    for name in ["one", "two"] {
        shows(name, "guest: hostname=hugo");
    }
    // Ctrl-] leaves, and the guest goes on.
    one.stdin.as_mut().unwrap().write_all(b"\x1d").unwrap();
    assert!(one.wait().unwrap().success());
    runner.signal("TERM");
    shows("two", "guest: power button");
    assert!(two.wait().unwrap().success(), "the guest has ended");
    assert!(!vm.text("one").contains("guest: power button"));
    runner.ends_well("PoweredDown");
}
