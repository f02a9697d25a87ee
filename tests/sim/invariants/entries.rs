//! Which claim a disk without a name has: entries of a VM's list move up when one before them is taken out, and their claims must not.

use super::Invariants;
use crate::{
    people::UNNAMED,
    world::{Guest, World},
};

impl Invariants {
    /// A disk has the claim that it had, for as long as its VM exists.
    pub(super) fn entries_keep_their_claims(&mut self, world: &World) -> Result<(), String> {
        for guest in world.guests.values().filter(|guest| guest.is_of_vm && guest.vm.0 == UNNAMED) {
            for (serial, claim) in disks(guest) {
                let known = self.entries.entry((guest.vm.1.clone(), serial.clone())).or_insert_with(|| claim.clone());
                if *known != claim {
                    return Err(format!(
                        "the disk {serial} of {} had the claim {known} and now has {claim}",
                        guest.vm.0
                    ));
                }
            }
        }
        Ok(())
    }
}

/// The serial number of each disk of a guest, and the claim on which it is, from the runner's configuration.
fn disks(guest: &Guest) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for drive in guest.config.split("- type: ").skip(1) {
        let field = |names: &[&str]| {
            let lines = drive.lines().map(str::trim);
            let mut values = lines.filter_map(|line| line.split_once(": ").filter(|(name, _)| names.contains(name)));
            values.next().map(|(_, value)| value.to_owned())
        };
        let (Some(place), Some(serial)) = (field(&["resource", "file"]), field(&["serial"])) else { continue };
        let is_on = |claim: &str| {
            let volume = claim.strip_prefix(&format!("{}-", guest.vm.0));
            volume.is_some_and(|volume| place.split('/').any(|part| part == volume))
        };
        let claim = guest.claims.iter().map(|(claim, ..)| claim).find(|claim| is_on(claim));
        found.extend(claim.map(|claim| (serial, claim.clone())));
    }
    found
}
