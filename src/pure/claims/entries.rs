//! Which claim a disk without a name has: that of its number ([`crate::entries`]). A VM without a record counts its claims, as the oldest releases do.

use kube::ResourceExt;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{
    api::{VirtualMachine, VolumeClaimTemplate, status::ListEntry},
    entries::Recorded,
};

/// The entry of a disk that is the `position`th with a claim. Its serial number is what its guest knows it by, so it does not go to another claim.
pub(super) fn entry(position: usize, template: &VolumeClaimTemplate, serial: Option<&str>) -> ListEntry {
    let spec = template.spec.as_ref().map(Value::to_string).unwrap_or_default();
    // Without a serial number this is what earlier releases have recorded.
    let text = serial.map_or_else(|| spec.clone(), |serial| format!("{spec} {serial}"));
    let digits = Sha256::digest(text).into_iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    ListEntry { position: u32::try_from(position).unwrap_or(u32::MAX), parameters: digits }
}

/// What the VM's status has recorded, and the other numbers that its claims have.
pub(super) fn recorded(vm: &VirtualMachine) -> (Vec<Recorded>, Vec<u32>) {
    let name = vm.name_any();
    let (mut recorded, mut others) = (Vec::new(), Vec::new());
    for claim in vm.status.iter().flat_map(|status| &status.claims) {
        let Some(number) = number_in(&name, &claim.name) else { continue };
        match &claim.entry {
            Some(entry) => recorded.push(Recorded { number, entry: entry.clone(), unused: claim.unused }),
            None => others.push(number),
        }
    }
    (recorded, others)
}

/// The number in the name of a claim of a disk without a name.
fn number_in(vm: &str, claim: &str) -> Option<u32> {
    let new = claim.strip_prefix(vm).and_then(|rest| rest.strip_prefix("-disk-"));
    let former = || claim.strip_prefix("disk-")?.strip_suffix("-0")?.strip_suffix(vm)?.strip_suffix('-');
    let number = |text: &str| text.parse().ok().filter(|number: &u32| number.to_string() == text);
    new.and_then(number).or_else(|| former().and_then(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_is_in_the_new_and_in_the_former_name() {
        for (claim, expected) in [
            ("apple-disk-1", Some(1)),
            ("disk-12-apple-0", Some(12)),
            ("apple-disk-01", None),
            ("apple-data-disk", None),
            ("pear-disk-1", None),
        ] {
            assert_eq!(number_in("apple", claim), expected, "{claim}");
        }
    }
}
