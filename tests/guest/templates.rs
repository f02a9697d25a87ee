//! Guests whose QEMU has a template of their set.

use std::fs;

use serde_json::{Value, json};

use crate::runner::Vm;

/// The recipe of SMBIOS strings.
const SMBIOS: &str = include_str!("../../example/templates/smbios/qemu/standard.yaml.j2");
/// The recipe of SATA disks.
const SATA: &str = include_str!("../../example/templates/sata-disks/qemu/standard.yaml.j2");

/// A VM with these templates of its set, and these values.
fn vm(templates: &Value, values: &Value) -> Vm {
    let vm = Vm::new(json!({}), json!({ "describe-hardware": true }));
    fs::write(vm.path("config/qemu.yaml"), json!({ "templates": templates, "values": values }).to_string()).unwrap();
    vm
}

#[test]
fn a_guest_finds_what_the_template_of_its_set_gives_it() {
    let templates = json!({ "base": { "qemu/standard.yaml.j2": SMBIOS }, "named": null });
    let values = json!({ "system": { "manufacturer": "Orchard, Inc.", "serial": "A-1" }, "oemStrings": [] });
    let vm = vm(&templates, &values);
    let mut runner = vm.start("all");
    runner.console("guest: found system Orchard, Inc., serial=A-1");
    runner.console("guest: up");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[test]
fn a_set_over_another_one_extends_its_template() {
    let file = |text: &str| json!({ "qemu/standard.yaml.j2": text });
    let templates = json!({ "base": file(SMBIOS), "named": ["installers", file(SATA)] });
    let values = json!({ "system": { "manufacturer": "Orchard" }, "oemStrings": [] });
    let vm = vm(&templates, &values);
    let mut runner = vm.start("all");
    // From the base.
    runner.console("guest: found system Orchard, serial=");
    runner.console("guest: up");
    // From the named set: the one virtio disk is that of cloud-init.
    let disks: Vec<String> =
        vm.text("run/console.log").lines().filter(|line| line.contains("found disk")).map(str::to_owned).collect();
    assert!(matches!(disks.as_slice(), [disk] if disk.contains("vda at 0000:00:14.0")), "{disks:?}");
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}
