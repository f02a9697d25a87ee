//! The numbers in the names of claims. A pool may bring a disk back to what it is made from (`spec.reset`): then the disk gets a new claim, under a
//! new name, and the one that its user had stays or is deleted.
//!
//! | number | the claim's name |
//! |---|---|
//! | 0: no pool has reset the disk | VM-VOLUME, or a name of a former release |
//! | N | VM-VOLUME-N |
//!
//! A number only grows. It is in `status.diskReset` of the VM, and in the annotation [`DISK_NUMBER_ANNOTATION`] of the claim: a VM that is made again
//! has no status, and goes on with the claim of the highest number. A claim of such a name without that annotation, such as a copy that a person
//! made, is not the VM's.

use kube::ResourceExt;

use crate::{
    api::VirtualMachine,
    object::DISK_NUMBER_ANNOTATION,
    observed::{Object, Observed},
};

/// The name of a disk's claim with a number. The claim with the number 0 may have a name of a former release too ([`super::disk_names`]).
pub fn name(vm: &str, volume: &str, number: u32) -> String {
    match number {
        0 => format!("{vm}-{volume}"),
        number => format!("{vm}-{volume}-{number}"),
    }
}

/// The number that a claim of this name has as a claim of the disk; `None`: its name is not one of those.
pub fn of_name(vm: &str, volume: &str, claim: &str) -> Option<u32> {
    if super::disk_names(vm, volume).iter().any(|name| name == claim) {
        return Some(0);
    }
    let text = claim.strip_prefix(vm)?.strip_prefix('-')?.strip_prefix(volume)?.strip_prefix('-')?;
    text.parse().ok().filter(|number: &u32| *number > 0 && number.to_string() == text)
}

/// The number of a disk as the VM's status has it.
pub fn recorded(vm: &VirtualMachine, volume: &str) -> u32 {
    let reset = vm.status.as_ref().and_then(|status| status.disk_reset.as_ref());
    reset.map_or(0, |reset| reset.number(volume))
}

/// The number of the claim that is a disk now.
pub fn in_force(vm: &VirtualMachine, volume: &str, observed: &Observed) -> u32 {
    let name = vm.name_any();
    let of_claim = |claim: &Object| {
        let number = of_name(&name, volume, &claim.key.name)?;
        let is_own = claim.is_ours() && claim.vm() == Some(&name);
        let is_marked = claim.annotations.get(DISK_NUMBER_ANNOTATION).is_some_and(|text| *text == number.to_string());
        (is_own && is_marked).then_some(number)
    };
    let claims = observed.objects.iter().filter(|object| object.key.is_claim());
    claims.filter_map(|claim| of_claim(claim)).max().unwrap_or(0).max(recorded(vm, volume))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        claims,
        test_support::{applied, nothing, rendered, vm},
    };

    fn numbered(number: u32) -> VirtualMachine {
        vm(|vm| vm["status"] = json!({ "diskReset": { "disks": [{ "volume": "core-disk", "number": number }] } }))
    }

    /// The claims of the VM after a reset.
    fn claims_of(number: u32, edit: impl Fn(&mut Value)) -> Observed {
        applied(&rendered(&numbered(number), &nothing()), |kind, object| {
            if kind == "PersistentVolumeClaim" {
                edit(object);
            }
        })
    }

    #[test]
    fn a_disk_that_was_reset_has_a_new_claim_under_a_new_name_and_all_others_keep_theirs() {
        let names = |vm: &VirtualMachine, observed: &Observed| -> Vec<String> {
            let claims = rendered(vm, observed).into_iter().filter(|object| object.key.is_claim());
            claims.map(|object| object.key.name).collect()
        };
        assert_eq!(names(&vm(|_| ()), &nothing()), ["apple-core-disk", "apple-runner-data"]);
        assert_eq!(names(&numbered(2), &nothing()), ["apple-core-disk-2", "apple-runner-data"]);
        let claim =
            rendered(&numbered(2), &nothing()).into_iter().find(|it| it.key.name == "apple-core-disk-2").unwrap();
        assert_eq!(claim.value["metadata"]["annotations"][DISK_NUMBER_ANNOTATION], "2");
        assert!(claims::possible_names(&numbered(2)).any(|name| name == "apple-core-disk-2"));
        // The former claim is still there.
        assert_eq!(names(&numbered(1), &claims_of(0, |_| ())), ["apple-core-disk-1", "apple-runner-data"]);
    }

    #[test]
    fn a_vm_that_is_made_again_goes_on_with_the_claim_of_the_highest_number() {
        let made_again = |observed: &Observed| claims::disk_name(&vm(|_| ()), "core-disk", observed);
        assert_eq!(made_again(&claims_of(3, |_| ())), "apple-core-disk-3");
        let edited = |pointer: &str, value: &str| {
            made_again(&claims_of(3, |claim| {
                if let Some(found) = claim.pointer_mut(pointer) {
                    *found = json!(value);
                }
            }))
        };
        assert_eq!(edited("/metadata/annotations/vmoperator.jdrupes.org~1diskNumber", "2"), "apple-core-disk");
        assert_eq!(edited("/metadata/labels/app.kubernetes.io~1instance", "pear"), "apple-core-disk");
        assert_eq!(edited("/metadata/labels/app.kubernetes.io~1managed-by", "me"), "apple-core-disk");
        // A backup may have brought back an older status.
        assert_eq!(claims::disk_name(&numbered(2), "core-disk", &claims_of(3, |_| ())), "apple-core-disk-3");
        assert_eq!(claims::disk_name(&numbered(4), "core-disk", &claims_of(3, |_| ())), "apple-core-disk-4");
    }

    #[test]
    fn the_number_is_read_from_the_name() {
        for (claim, number) in [
            ("apple-core-disk", Some(0)),
            ("core-disk-apple-0", Some(0)),
            ("apple-core-disk-7", Some(7)),
            ("apple-core-disk-0", None),
            ("apple-core-disk-07", None),
            ("apple-core-disk-x", None),
            ("apple-core-disk2", None),
            ("pear-core-disk-7", None),
            ("apple-core-disk-4294967296", None),
        ] {
            assert_eq!(of_name("apple", "core-disk", claim), number, "{claim}");
        }
        assert_eq!(of_name("apple", "core-disk", &name("apple", "core-disk", 12)), Some(12));
    }
}
