//! What guests of each arrangement of the hardware find. It must stay as it is: a guest would notice a difference at its next start.

use serde_json::json;

use crate::runner::Vm;

fn vm(hardware: &str) -> Vm {
    let vm = json!({
        "hardware": hardware, "maximumCpus": 4, "currentCpus": 2, "machineType": "pc-q35-7.2",
        "uuid": "c0ffee00-0000-4000-8000-000000000001",
        "network": [{ "type": "user", "device": "virtio-net" }, { "type": "user", "device": "virtio-net" }],
        "display": { "vnc": { "port": 5900, "socket": "/dev/null" } },
    });
    let mut vm = Vm::new(vm, json!({ "describe-hardware": true }));
    vm.config["vm"]["display"]["vnc"]["socket"] = vm.path("vnc.sock").display().to_string().into();
    vm.write_config();
    vm
}

/// Starts the VM, and returns what its guest has found.
fn found(vm: &Vm) -> String {
    let mut runner = vm.start("all");
    runner.console("guest: up");
    let console = vm.text("run/console.log");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
    let said = console.lines().filter_map(|line| line.trim().strip_prefix("guest: "));
    let found = said.filter(|line| line.starts_with("found ") || line.starts_with("card="));
    let found: String = found.map(|line| format!("{line}\n")).collect();
    // The first disk is a file in it, and has its name as serial number.
    found.replace(&vm.path("").file_name().unwrap().display().to_string(), "FOLDER")
}

#[test]
fn a_guest_of_the_vm_operator_finds_what_it_knows() {
    insta::assert_snapshot!(found(&vm("legacy")));
}

#[test]
fn a_guest_of_the_first_releases_finds_what_it_knows() {
    insta::assert_snapshot!(found(&vm("standard")));
}

#[test]
fn a_guest_with_root_ports_finds_what_it_knows_until_it_asks_for_the_newest() {
    let mut vm = vm("root-ports");
    let before = found(&vm);
    insta::assert_snapshot!("root-ports", before);
    vm.set("hardware", "latest");
    insta::assert_snapshot!("multi-queue", found(&vm));
    // It stays when the VM does not ask any more, and its status says what it has.
    vm.set("hardware", "multi-queue");
    insta::assert_snapshot!("multi-queue", found(&vm));
}

#[test]
fn a_new_guest_finds_what_one_that_asks_for_the_newest_finds() {
    let mut vm = vm("");
    // Nothing says which machine it was, so it is new.
    for key in ["hardware", "machineType"] {
        vm.config["vm"].as_object_mut().unwrap().remove(key);
    }
    vm.write_config();
    insta::assert_snapshot!("multi-queue", found(&vm));
}
