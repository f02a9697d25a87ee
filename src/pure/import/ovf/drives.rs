//! Disks and CD drives of an envelope, and the files that are on them.

use std::collections::{BTreeMap, BTreeSet};

use super::super::{
    draft::{Content, Fill, Place},
    for_shell,
};
use super::{Draft, Grade, Item, NEW_VARIABLES, kind, of, resource, unit};

/// The most CD drives for which the machine has ports.
const CDS: usize = 6;
/// The largest disk that a claim is made for.
const LARGEST: u64 = 1 << 60;
const DRIVER: &str = "a disk on virtio: Windows needs the driver viostor before it moves";

/// Reads the drives in the order in which the guest finds them, disks first.
pub(super) fn read<'a>(
    root: &'a Item,
    system: &'a Item,
    items: &[&'a Item],
    mut drives: Vec<&'a Item>,
    draft: &mut Draft,
) {
    let package = Package::new(root);
    // Of a controller: the place of the first of its kind, its address, and its own place.
    let (mut kinds, mut controllers) = (BTreeMap::new(), BTreeMap::new());
    for (index, item) in items.iter().copied().enumerate().filter(|(_, item)| !of(item, "InstanceID").is_empty()) {
        let first: usize = *kinds.entry(resource(item)).or_insert(index);
        let address = item.get("Address").and_then(Item::number).unwrap_or(0);
        controllers.entry(of(item, "InstanceID")).or_insert((first, address, index));
    }
    drives.sort_by_key(|item| {
        let is_cd = resource(item) != Some(kind::DISK);
        let controller = controllers.get(of(item, "Parent")).copied().unwrap_or((usize::MAX, 0, 0));
        let address = item.get("AddressOnParent").and_then(Item::number).unwrap_or(u64::MAX);
        (is_cd, controller, address)
    });
    let (mut places, mut seen) = (BTreeMap::new(), BTreeSet::new());
    for item in drives {
        let at = draft.disks.len();
        if resource(item) == Some(kind::DISK) {
            disk(&package, item, &mut seen, draft);
        } else {
            cd(&package, item, draft);
        }
        if draft.disks.len() > at {
            places.entry(of(item, "InstanceID")).or_insert(at);
        }
    }
    boot_order(system, &places, draft);
}

/// The disks and files of the envelope by their names.
struct Package<'a> {
    disks: BTreeMap<&'a str, &'a Item>,
    files: BTreeMap<&'a str, &'a Item>,
}

impl<'a> Package<'a> {
    fn new(root: &'a Item) -> Self {
        let (mut disks, mut files) = (BTreeMap::new(), BTreeMap::new());
        for disk in root.get("DiskSection").into_iter().flat_map(|section| section.all("Disk")) {
            let id = of(disk, "@diskId");
            if !id.is_empty() {
                disks.entry(id).or_insert(disk);
            }
        }
        for file in root.get("References").into_iter().flat_map(|section| section.enter().all("File")) {
            let (id, name) = (of(file, "@id"), of(file, "@href"));
            if name.to_lowercase().ends_with(".nvram") {
                file.whole(Grade::LeftOut, NEW_VARIABLES);
            }
            if !id.is_empty() && !name.is_empty() {
                files.entry(id).or_insert(file);
            }
        }
        Self { disks, files }
    }

    /// What `ovf:/disk/ID`, `/disk/ID` or `ovf:/file/ID` names: a disk, and its file.
    fn find(&self, name: &str) -> (Option<&'a Item>, Option<&'a Item>) {
        match target(name) {
            (true, id) => (None, self.files.get(id).copied()),
            (false, id) => {
                let disk = self.disks.get(id).copied();
                (disk, disk.and_then(|disk| self.files.get(of(disk, "@fileRef")).copied()))
            }
        }
    }
}

/// Whether a name of hardware is that of a file, not of a disk, and its ID.
pub(super) fn target(name: &str) -> (bool, &str) {
    let (folder, id) = name.rsplit_once('/').unwrap_or(("", name));
    (folder.ends_with("file"), id)
}

fn disk<'a>(package: &Package<'a>, item: &'a Item, seen: &mut BTreeSet<&'a str>, draft: &mut Draft) {
    let wanted = of(item, "HostResource");
    let id = wanted.rsplit('/').next().unwrap_or_default();
    let (disk, file) = package.find(wanted);
    if disk.is_none() && file.is_none() {
        let what = if wanted.is_empty() {
            "it names no disk of the file: add one to spec.vm.disks".to_owned()
        } else {
            format!("the file has no disk {wanted:?}: add one to spec.vm.disks")
        };
        return item.whole(Grade::LeftOut, what);
    }
    let bytes = disk.and_then(capacity);
    let Some(name) = draft.disk(id, bytes, Content::Empty) else {
        return item.whole(Grade::LeftOut, "a VM has at most 64 disks");
    };
    item.whole(Grade::Changed, DRIVER);
    draft.origin(wanted, &name, disk.or(file).unwrap_or(item));
    if let Some(file) = file {
        let from = content(file, &name);
        draft.fills.push(Fill { disk: name.clone(), from, is_size_known: bytes.is_some() });
    }
    if !seen.insert(id) {
        item.changed(format!(
            "{DRIVER}; another one has the same content, and this is a copy in the claim VM-{name}-disk"
        ));
        return;
    }
    match disk {
        Some(disk) => describe(disk, file, bytes, &name),
        None => {
            item.changed(format!(
                "{DRIVER}; its content has to be copied into the claim VM-{name}-disk (see the comments), which has 10Gi, \
                 because the file does not say the size"
            ));
        }
    }
}

/// What became of a disk of the disk section.
fn describe(disk: &Item, file: Option<&Item>, bytes: Option<u64>, name: &str) {
    let reference = disk.get("@fileRef").filter(|reference| !reference.text().is_empty());
    let mut what = match (file, reference) {
        (Some(_), _) => format!("its content has to be copied into the claim VM-{name}-disk (see the comments)"),
        (None, Some(_)) => format!("the claim VM-{name}-disk is empty"),
        (None, None) => "an empty disk".to_owned(),
    };
    if bytes.is_none() {
        what += "; it has 10Gi, because its size is not understood";
    }
    let is_same = file.is_none() && reference.is_none() && bytes.is_some();
    disk.whole(if is_same { Grade::Same } else { Grade::Changed }, what);
    if let Some(reference) = reference.filter(|_| file.is_none()) {
        reference.left_out(format!("there is no file {:?}, so there is no content", reference.text()));
    }
    if let Some(parent) = disk.get("@parentRef") {
        parent.left_out("the file has only what differs from that disk: make one disk of both before you copy it");
    }
    if let Some(size) = disk.get("@capacity").filter(|_| bytes.is_none()) {
        size.left_out("this is no size: write the size of the claim before you apply the file");
    }
}

/// The size of a disk in bytes.
fn capacity(disk: &Item) -> Option<u64> {
    let units = unit(of(disk, "@capacityAllocationUnits"), 1)?;
    let bytes = disk.get("@capacity")?.number()?.checked_mul(units)?;
    (1..=LARGEST).contains(&bytes).then_some(bytes)
}

/// Where the content of a disk is: a file, or what has to be made of its parts or of the packed file.
fn content(file: &Item, disk: &str) -> Place {
    file.whole(Grade::Same, "the content of a disk");
    let name = of(file, "@href");
    let parts = file.get("@chunkSize").filter(|size| !["", "0"].contains(&size.text()));
    let packed = file.get("@compression").filter(|it| !["", "identity"].contains(&it.text().to_lowercase().as_str()));
    let is_gzip = packed.is_some_and(|it| it.text().eq_ignore_ascii_case("gzip"));
    if let Some(parts) = parts {
        parts.changed(format!(
            "it is in parts, {name}.000000000 and so on, which have to be joined first (see the comments)"
        ));
    }
    if let Some(packed) = packed {
        if is_gzip {
            packed.changed("it has to be unpacked first (see the comments)");
        } else {
            packed.left_out("only gzip is known: unpack it before you copy it");
        }
    }
    // A name that begins with a hyphen is no option.
    let from = for_shell(&if name.starts_with('-') { format!("./{name}") } else { name.to_owned() });
    let command = match (parts.is_some(), is_gzip) {
        (false, false) => return Place::File(name.to_owned()),
        (true, false) => format!("cat {from}.0* > {disk}.image"),
        (false, true) => format!("gunzip < {from} > {disk}.image"),
        (true, true) => format!("cat {from}.0* | gunzip > {disk}.image"),
    };
    Place::Words(format!("the file {disk}.raw, made by: {command} && qemu-img convert -O raw {disk}.image {disk}.raw"))
}

fn cd(package: &Package<'_>, item: &Item, draft: &mut Draft) {
    let count = draft.disks.iter().filter(|disk| disk.get("cdrom").is_some()).count();
    if count >= CDS {
        return item.whole(Grade::LeftOut, format!("a VM has at most {CDS} CD drives"));
    }
    if !draft.cd("") {
        return item.whole(Grade::LeftOut, "a VM has at most 64 disks");
    }
    let wanted = of(item, "HostResource");
    if wanted.is_empty() {
        return item.whole(Grade::Same, "an empty CD drive");
    }
    let (disk, file) = package.find(wanted);
    let from = file.map_or(wanted, |file| of(file, "@href"));
    item.whole(
        Grade::Changed,
        format!("an empty drive: put {from} into the image repository, or set spec.vm.disks[].cdrom.image to a URL"),
    );
    for part in [disk, file].into_iter().flatten() {
        part.whole(Grade::Same, "a CD, which its drive names");
    }
}

/// VMware names what boots by the numbers of the hardware. Drives that are not named do not boot then, as with bootindex.
fn boot_order(system: &Item, places: &BTreeMap<&str, usize>, draft: &mut Draft) {
    let mut index = 0_u32;
    for section in system.all("BootOrderSection") {
        let (begin, mut are_all) = (index, true);
        for id in of(section, "@instanceId").split_whitespace() {
            let Some(at) = places.get(id) else {
                are_all = false;
                continue;
            };
            if let Some(disk) = draft.disks.get_mut(*at) {
                disk["bootindex"] = index.into();
                index += 1;
            }
        }
        if index == begin {
            section.whole(
                Grade::LeftOut,
                "none of these is a drive of the VM: VMs boot from disks and CDs, in their order",
            );
        } else if are_all {
            section.whole(Grade::Same, "bootindex");
        } else {
            section.whole(Grade::Changed, "bootindex, without what is no drive of the VM: VMs boot from disks and CDs");
        }
    }
}
