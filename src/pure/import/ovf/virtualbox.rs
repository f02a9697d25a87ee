//! What only VirtualBox says of a VM: the element `vbox:Machine`, which is its own description of the machine.

use super::{Draft, Grade, Item, NEW_TPM, NEW_VARIABLES, is_yes, of};

pub(super) fn read(machine: &Item, draft: &mut Draft) {
    machine.whole(
        Grade::LeftOut,
        "it is for VirtualBox: only the firmware, the TPM, the clock and the MAC addresses are read from it",
    );
    if let Some(id) = machine.get("@uuid") {
        id.left_out("the VM gets a UUID of its own: spec.vm.machineUuid sets one");
    }
    let Some(hardware) = machine.get("Hardware") else { return };
    if let Some(module) = within(hardware, "TrustedPlatformModule")
        && !["", "none"].contains(&of(module, "@type").to_lowercase().as_str())
    {
        draft.set("useTpm", true);
        module.whole(Grade::Changed, NEW_TPM);
    }
    if let Some(variables) = within(hardware, "NVRAM") {
        variables.left_out(NEW_VARIABLES);
    }
    for folder in within(hardware, "SharedFolders").into_iter().flat_map(|folders| folders.all("SharedFolder")) {
        folder.left_out("share files by the network, or put them on a disk");
    }
    if let Some(clock) = within(hardware, "RTC").and_then(|clock| clock.get("@localOrUTC")) {
        let base = if clock.text().eq_ignore_ascii_case("local") { "localtime" } else { "utc" };
        draft.set("rtcBase", base);
        clock.same(format!("spec.vm.rtcBase: {base}"));
    }
    // Those of cards that are found are graded again.
    for mac in macs(machine).into_iter().flatten() {
        mac.left_out("nobody knows which card has it: spec.vm.networks[].pod.mac sets one");
    }
}

/// The kind of the firmware.
pub(super) fn firmware(machine: &Item) -> Option<&Item> {
    within(machine.get("Hardware")?, "Firmware")?.get("@type")
}

/// The MAC addresses of the network cards that are on, in their order.
pub(super) fn macs(machine: &Item) -> Vec<Option<&Item>> {
    let Some(network) = machine.get("Hardware/Network") else { return Vec::new() };
    network.all("Adapter").filter(|card| is_yes(of(card, "@enabled"))).map(|card| card.get("@MACAddress")).collect()
}

/// The first part of that name. Its place is not the same in all versions.
fn within<'a>(item: &'a Item, key: &str) -> Option<&'a Item> {
    item.items().iter().find_map(|item| if item.key == key { Some(item) } else { within(item, key) })
}
