//! The slots of the drives of the runner's configuration: what a disk or a CD drive keeps from its VM's former starts.
//!
//! A disk keeps its PCI address and a CD drive its port, whatever is added, taken out or sorted around it. `status.identity` has both for each drive of
//! the last start. **A drive of the spec is the first of these that fits**
//!
//! | | the recorded one |
//! |---|---|
//! | 1 | of its name. Each disk has one: that of its volume in the Pod |
//! | 2 | of CD drives without names: in its place, if there are as many as before. A CD is what a drive holds, and not what it is |
//! | 3 | that [`entries`] finds by the CDs and the neighbours, if there are more or fewer than before |
//! | 4 | with its CD, if only one of both has a name: the drive has got one or lost it. Or if the drive was taken out and comes back |
//! | 5 | none: it gets the slot of its position, or the first that is free |

use std::collections::BTreeSet;

use crate::{
    api::{
        VirtualMachine,
        status::{CdIdentity, DiskIdentity, Identity, ListEntry},
    },
    entries::{self, Recorded},
    runner_config::{Drive, LEGACY_PLACES},
};

/// Gives each drive its slot.
pub(crate) fn place(vm: &VirtualMachine, drives: &mut [Drive]) {
    let Some(identity) = vm.status.as_ref().and_then(|status| status.runner.identity.as_ref()) else { return };
    let (mut disks, mut cds): (Vec<&mut Drive>, Vec<&mut Drive>) =
        drives.iter_mut().partition(|drive| drive.cd().is_none());
    let of_disks = disk_slots(vm, identity, &disks);
    let of_cds = cd_slots(identity, &cds);
    for (drives, slots) in [(&mut disks, of_disks), (&mut cds, of_cds)] {
        for (index, (drive, slot)) in drives.iter_mut().zip(slots).enumerate() {
            drive.place(index, slot);
        }
    }
}

fn disk_slots(vm: &VirtualMachine, identity: &Identity, disks: &[&mut Drive]) -> Vec<u32> {
    let is_legacy = identity.hardware.as_deref() == Some("legacy");
    let networks = u32::try_from(vm.spec.vm.networks.len()).unwrap_or(u32::MAX);
    let most = if is_legacy { LEGACY_PLACES.saturating_sub(networks.max(1)) } else { DiskIdentity::MOST };
    // A status that is not ours may have a slot twice, or one that the machine does not have.
    let mut slots = BTreeSet::new();
    let recorded = identity.disks.iter().flatten().filter(|it| it.slot < most && slots.insert(it.slot));
    let mut left: Vec<&DiskIdentity> = recorded.collect();
    let mut find = |disk: &&mut Drive| {
        let at = left.iter().position(|it| disk.volume() == Some(it.name.as_str()))?;
        Some(left.remove(at).slot)
    };
    let found = disks.iter().map(&mut find).collect();
    // There the cloud-init disk stands behind the last slot of the disks, so no slot is left out.
    let former = left.iter().map(|it| it.slot).filter(|_| !is_legacy).collect();
    entries::fill(found, &former, most)
}

fn cd_slots(identity: &Identity, cds: &[&mut Drive]) -> Vec<u32> {
    let mut slots = BTreeSet::new();
    let recorded = identity.cds.iter().flatten().filter(|it| it.slot < CdIdentity::MOST && slots.insert(it.slot));
    let mut left: Vec<&CdIdentity> = recorded.collect();
    left.sort_by_key(|it| (it.unused, it.entry.position, it.slot));
    let mut found: Vec<Option<u32>> = vec![None; cds.len()];
    let mut take = |at: usize, left: &mut Vec<&CdIdentity>, fits: &dyn Fn(&CdIdentity) -> bool| {
        if found[at].is_none()
            && let Some(of) = left.iter().position(|it| fits(it))
        {
            found[at] = Some(left.remove(of).slot);
        }
    };
    for (at, cd) in cds.iter().enumerate().filter(|(_, cd)| cd.cd_name().is_some()) {
        take(at, &mut left, &|it| it.name.as_deref() == cd.cd_name());
    }
    let nameless: Vec<usize> = (0..cds.len()).filter(|at| cds[*at].cd_name().is_none()).collect();
    for (at, slot) in nameless.iter().zip(nameless_slots(&left, &nameless, cds)) {
        take(*at, &mut left, &|it| Some(it.slot) == slot);
    }
    for (at, cd) in cds.iter().enumerate() {
        let has_changed = |it: &CdIdentity| it.unused || it.name.is_some() != cd.cd_name().is_some();
        let may_be = |it: &CdIdentity| it.name.is_none() || cd.cd_name().is_none();
        take(at, &mut left, &|it| has_changed(it) && may_be(it) && it.entry.parameters == cd.parameters());
    }
    let former = left.iter().map(|it| it.slot).collect();
    entries::fill(found, &former, CdIdentity::MOST)
}

/// The second and the third line of the table.
fn nameless_slots(left: &[&CdIdentity], nameless: &[usize], cds: &[&mut Drive]) -> Vec<Option<u32>> {
    let used: Vec<&&CdIdentity> = left.iter().filter(|it| it.name.is_none() && !it.unused).collect();
    if used.len() == nameless.len() {
        return used.iter().map(|it| Some(it.slot)).collect();
    }
    let records: Vec<Recorded> =
        used.iter().map(|it| Recorded { number: it.slot, entry: it.entry.clone(), unused: false }).collect();
    entries::matched(&records, &nameless.iter().map(|at| entry(*at, cds[*at])).collect::<Vec<_>>())
}

/// The entry of the CD drive that is the `index`th one.
fn entry(index: usize, cd: &Drive) -> ListEntry {
    ListEntry { position: u32::try_from(index).unwrap_or(u32::MAX), parameters: cd.parameters() }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::*;
    use crate::{runner_config::VmSection, test_support::vm};

    /// `a b cd cd=x.iso cd:name=y.iso`: two disks, an empty CD drive, one with a CD, and one that has a name, too.
    fn drives(text: &str) -> Vec<Drive> {
        let drive = |word: &str| match word.strip_prefix("cd") {
            None => json!({ "type": "raw", "resource": format!("/dev/{word}-disk") }),
            Some(rest) => {
                let (name, file) = rest.split_once('=').unwrap_or((rest, ""));
                let name = name.strip_prefix(':');
                json!({ "type": "ide-cd", "file": file, "name": name })
            }
        };
        text.split_whitespace().map(|word| serde_json::from_value(drive(word)).unwrap()).collect()
    }

    fn placed(text: &str, identity: &Value) -> VmSection {
        let vm = vm(|vm| vm["status"] = json!({ "identity": identity }));
        let mut drives = drives(text);
        place(&vm, &mut drives);
        serde_json::from_value(json!({ "name": "apple", "drives": drives })).unwrap()
    }

    /// What a runner reports after a start.
    fn started(section: &VmSection) -> Value {
        let disks = section.disks().map(|(slot, disk)| json!({ "name": disk.volume(), "slot": slot }));
        let cds = section
            .cds()
            .enumerate()
            .map(|(index, (slot, cd))| json!({ "name": cd.cd_name(), "slot": slot, "entry": entry(index, cd) }));
        json!({ "uuid": "u", "disks": disks.collect::<Vec<_>>(), "cds": cds.collect::<Vec<_>>() })
    }

    fn slots(section: &VmSection) -> String {
        let text = |slots: Vec<u32>| slots.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
        let disks = text(section.disks().map(|(slot, _)| slot).collect());
        let cds = text(section.cds().map(|(slot, _)| slot).collect());
        format!("{disks} | {cds}")
    }

    #[test]
    fn the_table() {
        for (before, after, expected, what) in [
            ("a b c", "b c", "1 2 | ", "the first disk is taken out"),
            ("a b", "x a b", "2 0 1 | ", "a new disk comes first"),
            ("a b c", "c a b", "2 0 1 | ", "disks are sorted"),
            ("a b", "x y", "2 3 | ", "all disks are others"),
            ("cd=a cd=b", "cd=b", " | 1", "the first CD drive is taken out"),
            ("cd=a cd=b", "cd=a", " | 0", "the last CD drive is taken out"),
            ("cd=a cd=b", "cd=b cd=a", " | 0 1", "the CDs are exchanged"),
            ("cd=a cd=b", "cd=b cd", " | 0 1", "one CD goes into the other drive"),
            ("cd=a", "cd=x cd=a", " | 1 0", "a new CD drive comes first"),
            ("cd:x=a cd:y=a", "cd:y=a", " | 1", "the first with a name is taken out"),
            ("cd:x=a cd:y=b", "cd:y=a cd:x=b", " | 1 0", "with names, sorted"),
            ("cd=a cd=b", "cd:x=a cd=b", " | 0 1", "one gets a name"),
            ("cd:x=a", "cd:y=a", " | 1", "another name is another drive"),
            ("cd=a", "cd:x=b", " | 1", "a name and another CD at once"),
            ("cd:x=a", "cd=a", " | 0", "one loses its name"),
            ("cd:x=a cd=b", "cd=b cd:y=c", " | 1 2", "one with a name goes, and another one comes"),
            ("a cd=a b cd=b", "b cd=b a", "1 0 | 1", "disks and CD drives"),
        ] {
            let first = placed(before, &Value::Null);
            let found = placed(after, &started(&first));
            assert_eq!(slots(&found), expected, "{what}: {before} -> {after}");
        }
    }

    /// A runner reports the drives of the configuration also if QEMU does not have them yet.
    #[test]
    fn what_waits_for_the_next_start_is_known_too() {
        for (steps, expected) in [
            (["cd=a", "cd=n cd=a", "cd=n cd"], " | 1 0"),
            (["cd=a cd=b", "cd=n cd=a cd=b", "cd=n cd=a"], " | 2 0"),
            (["a b", "n a b", "n b"], "2 1 | "),
        ] {
            let report = |identity: Value, drives: &&str| started(&placed(drives, &identity));
            let before = steps[..2].iter().fold(Value::Null, report);
            assert_eq!(slots(&placed(steps[2], &before)), expected, "{steps:?}");
        }
        // QEMU has a drive that the spec does not have any more.
        let mut identity = started(&placed("cd:x=a", &Value::Null));
        identity["cds"][0]["unused"] = json!(true);
        assert_eq!(slots(&placed("cd:y=b", &identity)), " | 1");
        assert_eq!(slots(&placed("cd:y=b cd:x=c", &identity)), " | 1 0", "it comes back");
        let mut identity = started(&placed("cd=a", &Value::Null));
        identity["cds"][0]["unused"] = json!(true);
        assert_eq!(slots(&placed("cd=b cd=a", &identity)), " | 1 0", "its CD comes back");
    }

    #[test]
    fn a_vm_without_records_and_one_that_nobody_edited_have_the_same_file() {
        let plain = placed("a cd=x b cd", &Value::Null);
        assert_eq!(plain.drives, drives("a cd=x b cd"));
        assert_eq!(placed("a cd=x b cd", &started(&plain)).drives, plain.drives);
    }

    #[test]
    fn a_status_that_is_not_ours_gives_no_slot_twice() {
        let identity = json!({
            "uuid": "u", "disks": [{ "name": "a-disk", "slot": 5 }, { "name": "b-disk", "slot": 5 }],
            "cds": [{ "slot": 1, "entry": { "position": 0, "parameters": "aa" } }, { "slot": 1, "entry": { "position": 1, "parameters": "bb" } }],
        });
        assert_eq!(slots(&placed("b a cd cd", &identity)), "0 5 | 1 0");
    }

    #[derive(Clone, Debug)]
    enum Edit {
        TakeOut(usize),
        Insert(usize),
        Swap(usize, usize),
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        /// Whatever is edited between two starts, a disk and a CD drive with a name that are still there have their slots.
        #[test]
        fn a_drive_that_is_still_there_has_its_slot(
            edits in prop::collection::vec(prop_oneof![
                (0..8_usize).prop_map(Edit::TakeOut),
                (0..8_usize).prop_map(Edit::Insert),
                (0..8_usize, 0..8_usize).prop_map(|(one, other)| Edit::Swap(one, other)),
            ], 0..20),
            starts in prop::collection::vec(any::<bool>(), 20),
        ) {
            let mut list: Vec<String> = vec!["d0".into(), "cd:c1=x".into(), "d2".into()];
            let mut number = 3;
            let mut identity = Value::Null;
            let mut known: BTreeMap<String, u32> = BTreeMap::new();
            for (edit, starts) in std::iter::once(None).chain(edits.into_iter().map(Some)).zip(std::iter::once(true).chain(starts)) {
                let length = list.len();
                match edit {
                    Some(Edit::TakeOut(at)) if at < length => drop(list.remove(at)),
                    Some(Edit::Insert(at)) if length < 6 => {
                        let word = if number % 2 == 0 { format!("d{number}") } else { format!("cd:c{number}=x") };
                        list.insert(at.min(length), word);
                        number += 1;
                    }
                    Some(Edit::Swap(one, other)) if one < length && other < length => list.swap(one, other),
                    _ => {}
                }
                if !starts {
                    continue;
                }
                let section = placed(&list.join(" "), &identity);
                identity = started(&section);
                let disks = section.disks().map(|(slot, disk)| (disk.volume().unwrap().to_owned(), slot));
                let cds = section.cds().map(|(slot, cd)| (format!("cd:{}", cd.cd_name().unwrap()), slot));
                let now: BTreeMap<String, u32> = disks.chain(cds).collect();
                for (name, slot) in &now {
                    prop_assert!(known.get(name).is_none_or(|before| before == slot), "{name}: {known:?} {now:?}");
                }
                for kind in [true, false] {
                    let of_kind: Vec<u32> = now.iter().filter(|(name, _)| name.starts_with("cd:") == kind).map(|(_, slot)| *slot).collect();
                    prop_assert_eq!(of_kind.iter().collect::<BTreeSet<_>>().len(), of_kind.len());
                }
                known = now;
            }
        }
    }
}
