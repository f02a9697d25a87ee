//! Envelopes with several VMs. Each VM gets an envelope of its own, with the disks and files that it names. What is for no VM goes to the
//! first one of the envelope or collection in which it is, so that it is told once.

use std::collections::{BTreeMap, BTreeSet};

use super::super::few_enough;
use super::{Item, SourceError, drives::target, of};

/// The most parts of all envelopes together: what several VMs name is in several.
const PARTS: usize = 400_000;

/// The envelopes of the VMs. Empty: there are not several.
pub(super) fn envelopes(root: &Item) -> Result<Vec<Item>, SourceError> {
    let mut systems = Vec::new();
    find(root, &mut systems);
    if systems.len() < 2 {
        return Ok(Vec::new());
    }
    few_enough(systems.len())?;
    let mut disks = BTreeMap::new();
    for disk in root.get("DiskSection").into_iter().flat_map(|section| section.all("Disk")) {
        disks.entry(of(disk, "@diskId")).or_insert(disk);
    }
    let wanted: Vec<Names<'_>> = systems.iter().map(|system| Names::of(system, &disks)).collect();
    let mut all = Names::default();
    for names in &wanted {
        all.systems.extend(&names.systems);
        all.disks.extend(&names.disks);
        all.files.extend(&names.files);
    }
    let (mut envelopes, mut parts) = (Vec::new(), 0);
    for (system, names) in systems.into_iter().zip(&wanted) {
        let mut envelope = Share { system, names, all: &all }.of(root);
        // What is told of the VM as a whole is told there.
        envelope.line = system.line;
        parts += envelope.count();
        if parts > PARTS {
            let what = format!("the VMs of this file have more than {PARTS} parts, with those that they share");
            return Err(SourceError::new(system.line, what));
        }
        envelopes.push(envelope);
    }
    Ok(envelopes)
}

/// The VMs in an envelope or a collection, in their order.
fn find<'a>(around: &'a Item, found: &mut Vec<&'a Item>) {
    for item in around.items() {
        match item.key.as_str() {
            "VirtualSystem" => found.push(item),
            "VirtualSystemCollection" => find(item, found),
            _ => {}
        }
    }
}

/// The first of them.
fn first(around: &Item) -> Option<&Item> {
    around.items().iter().find_map(|item| match item.key.as_str() {
        "VirtualSystem" => Some(item),
        "VirtualSystemCollection" => first(item),
        _ => None,
    })
}

fn holds(around: &Item, system: &Item) -> bool {
    around.items().iter().any(|item| match item.key.as_str() {
        "VirtualSystem" => std::ptr::eq(item, system),
        "VirtualSystemCollection" => holds(item, system),
        _ => false,
    })
}

/// Of a VM, or of all: its ID, and those of the disks and files that it names.
#[derive(Default)]
struct Names<'a> {
    systems: BTreeSet<&'a str>,
    disks: BTreeSet<&'a str>,
    files: BTreeSet<&'a str>,
}

impl<'a> Names<'a> {
    fn of(system: &'a Item, all_disks: &BTreeMap<&'a str, &'a Item>) -> Self {
        let mut names = Self { systems: BTreeSet::from([of(system, "@id")]), ..Self::default() };
        let (mut items, mut disks) = (vec![system], Vec::new());
        while let Some(item) = items.pop() {
            items.extend(item.items());
            let text = item.text();
            // VMware also names files in its settings, such as that of the firmware's variables.
            let is_name =
                item.key == "HostResource" || ["ovf:/file/", "ovf:/disk/"].iter().any(|start| text.starts_with(start));
            match target(text) {
                _ if !is_name => {}
                (true, id) => _ = names.files.insert(id),
                (false, id) => disks.push(id),
            }
        }
        while let Some(id) = disks.pop() {
            if names.disks.insert(id)
                && let Some(disk) = all_disks.get(id)
            {
                names.files.insert(of(disk, "@fileRef"));
                disks.push(of(disk, "@parentRef"));
            }
        }
        names.disks.remove("");
        names.files.remove("");
        names
    }
}

/// What one VM gets of an envelope.
struct Share<'a> {
    system: &'a Item,
    names: &'a Names<'a>,
    /// What all VMs name.
    all: &'a Names<'a>,
}

impl Share<'_> {
    /// Of an envelope or a collection.
    fn of(&self, around: &Item) -> Item {
        let is_first = first(around).is_some_and(|first| std::ptr::eq(first, self.system));
        let mut items = Vec::new();
        for item in around.items() {
            match item.key.as_str() {
                "VirtualSystem" => items.extend(std::ptr::eq(item, self.system).then(|| item.clone())),
                "VirtualSystemCollection" if first(item).is_some() => {
                    items.extend(holds(item, self.system).then(|| self.of(item)));
                }
                "References" | "DiskSection" | "StartupSection" => items.extend(self.section(item, is_first)),
                // Which configuration is read is the same for all.
                "DeploymentOptionSection" => items.push(item.clone()),
                _ => items.extend(is_first.then(|| item.clone())),
            }
        }
        around.with_items(items)
    }

    /// Of a section about several VMs.
    fn section(&self, section: &Item, is_first: bool) -> Option<Item> {
        let is_shared = |item: &&Item| {
            let is_in = |names: &Names<'_>| match item.key.as_str() {
                "File" => names.files.contains(of(item, "@id")),
                "Disk" => names.disks.contains(of(item, "@diskId")),
                "Item" => names.systems.contains(of(item, "@id")),
                _ => false,
            };
            is_in(self.names) || is_first && !is_in(self.all)
        };
        let items: Vec<Item> = section.items().iter().filter(is_shared).cloned().collect();
        (is_first || !items.is_empty()).then(|| section.with_items(items))
    }
}
