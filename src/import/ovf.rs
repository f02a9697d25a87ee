//! Envelopes of OVF (DSP0243), as VMware and VirtualBox export them: the file `.ovf` beside the disks, or in an `.ova`.

use super::{
    draft::{Content, Draft, Link, card},
    source::{Item, SourceError},
};
use crate::exchange::Grade;

/// The kinds of hardware (CIM_ResourceAllocationSettingData.ResourceType).
mod kind {
    pub const CPU: u64 = 3;
    pub const MEMORY: u64 = 4;
    pub const IDE: u64 = 5;
    pub const SCSI: u64 = 6;
    pub const ETHERNET: u64 = 10;
    pub const FLOPPY: u64 = 14;
    pub const CD: u64 = 15;
    pub const DVD: u64 = 16;
    pub const DISK: u64 = 17;
    pub const SATA: u64 = 20;
    pub const SERIAL: u64 = 21;
    pub const USB: u64 = 23;
    pub const GRAPHICS: u64 = 24;
    pub const SOUND: u64 = 35;
}

pub(super) fn read(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    if root.key != "Envelope" {
        return Err(SourceError::new(root.line, format!("<{}> is no envelope of OVF", root.key)));
    }
    root.enter();
    for attribute in root.items().iter().filter(|item| item.key.starts_with('@')) {
        attribute.same("how the file is written");
    }
    let mut systems = root.all("VirtualSystem");
    let Some(system) = systems.next().or_else(|| root.get("VirtualSystemCollection/VirtualSystem")) else {
        return Err(SourceError::new(root.line, "there is no <VirtualSystem> in this file"));
    };
    system.enter();
    root.get("VirtualSystemCollection").map(Item::enter);
    draft.spec.insert("guestShutdownStops".into(), true.into());
    for (key, what) in [("References", "the files"), ("NetworkSection", "the networks")] {
        if let Some(section) = root.get(key) {
            section.whole(Grade::Same, what);
        }
    }
    if let Some(section) = root.get("DiskSection") {
        section.enter();
        if let Some(item) = section.get("Info") {
            item.same("words for people");
        }
    }
    let id = system.get("@id");
    let name = system.get("Name").or(id);
    draft.name = name.map_or("", Item::text).to_owned();
    for item in [id, name].into_iter().flatten() {
        item.same("metadata.name");
    }
    for section in system.items() {
        match section.key.as_str() {
            "Info" => _ = section.same("words for people"),
            "OperatingSystemSection" => section.whole(Grade::Same, "what guest it is"),
            "AnnotationSection" => {
                section.enter();
                if let Some(text) = section.get("Annotation") {
                    let text = text.same("the annotation kubernetes.io/description").to_owned();
                    draft.annotations.insert("kubernetes.io/description".into(), text.into());
                }
                if let Some(item) = section.get("Info") {
                    item.same("words for people");
                }
            }
            "VirtualHardwareSection" => hardware(root, section, draft),
            _ => {}
        }
    }
    firmware(system, draft);
    Ok(())
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.key.as_str() {
        "VirtualSystem" => "one VM is read from a file: the first one",
        "ProductSection" => "vApp properties: put them into spec.cloudInit",
        "Machine" => "it is for VirtualBox, and repeats the hardware",
        "Config" | "ExtraConfig" => "it is for VMware",
        "StartupSection" => "VMs start independently of each other",
        _ => "",
    }
}

/// The text of a part of an item of hardware.
fn of<'a>(item: &'a Item, key: &str) -> &'a str {
    item.get(key).map_or("", Item::text)
}

fn hardware(root: &Item, section: &Item, draft: &mut Draft) {
    section.enter();
    for key in ["Info", "System"] {
        if let Some(item) = section.get(key) {
            item.whole(Grade::Same, "words for people");
        }
    }
    for item in section.items() {
        if !["Item", "StorageItem", "EthernetPortItem"].contains(&item.key.as_str()) {
            continue;
        }
        item.enter();
        let name = of(item, "ElementName").to_owned();
        let number = item.get("VirtualQuantity").and_then(Item::number);
        let Some(resource) = item.get("ResourceType").and_then(Item::number) else { continue };
        match resource {
            kind::CPU => {
                let cpus = number.unwrap_or(1);
                let per_socket = item.get("CoresPerSocket").and_then(Item::number).filter(|cores| *cores > 0);
                draft.cpus(item.get("VirtualQuantity").unwrap_or(item), cpus, None);
                if let Some(cores) = per_socket.filter(|cores| cpus.is_multiple_of(*cores) && cpus / cores > 1) {
                    draft.topology(cpus / cores, 1, cores, 1);
                }
                item.whole(Grade::Same, format!("{cpus} CPUs"));
            }
            kind::MEMORY => {
                let bytes = number.and_then(|number| number.checked_mul(unit(of(item, "AllocationUnits"), 20)?));
                if bytes.is_some_and(|bytes| draft.ram(bytes, None)) {
                    item.whole(Grade::Same, "spec.vm.maximumRam");
                } else {
                    item.whole(Grade::LeftOut, "this is no size that a VM can have: it gets 1G");
                }
            }
            kind::DISK => disk(root, item, draft),
            kind::CD | kind::DVD => {
                draft.cd("");
                let what = if of(item, "HostResource").is_empty() { Grade::Same } else { Grade::Changed };
                item.whole(what, "an empty CD drive");
            }
            kind::ETHERNET => ethernet(item, draft),
            kind::IDE | kind::SCSI | kind::SATA | kind::USB => {
                item.whole(Grade::Changed, "the VM has controllers of its own")
            }
            kind::GRAPHICS => item.whole(Grade::Changed, "virtio-vga"),
            kind::SOUND => item.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
            kind::SERIAL => item.whole(Grade::Changed, "the serial console: kubectl vm console"),
            kind::FLOPPY => item.whole(Grade::LeftOut, "VMs have no floppy drives"),
            _ => item.whole(Grade::LeftOut, name),
        }
    }
}

fn disk(root: &Item, item: &Item, draft: &mut Draft) {
    let reference = of(item, "HostResource").rsplit('/').next().unwrap_or_default().to_owned();
    let disks = root.get("DiskSection").into_iter().flat_map(|section| section.all("Disk"));
    let disk = disks.into_iter().find(|disk| of(disk, "@diskId") == reference);
    let file = disk.and_then(|disk| {
        let files = root.get("References").into_iter().flat_map(|section| section.all("File"));
        files.into_iter().find(|file| of(file, "@id") == of(disk, "@fileRef")).map(|file| of(file, "@href").to_owned())
    });
    let capacity = disk.and_then(|disk| {
        let capacity = disk.get("@capacity")?.number()?;
        capacity.checked_mul(unit(of(disk, "@capacityAllocationUnits"), 0)?)
    });
    let content = file.clone().map_or(Content::Empty, Content::Host);
    let Some(name) = draft.disk(&reference, capacity, content) else {
        return item.whole(Grade::LeftOut, "a VM has at most 64 disks");
    };
    item.whole(Grade::Changed, "a disk on virtio: Windows needs the driver viostor before it moves");
    if let Some(disk) = disk {
        match file {
            Some(_) => disk.whole(
                Grade::Changed,
                format!("its content has to be copied into the claim VM-{name}-disk (see the comments)"),
            ),
            None => disk.whole(Grade::Same, "an empty disk"),
        }
    }
}

fn ethernet(item: &Item, draft: &mut Draft) {
    let model = of(item, "ResourceSubType").to_lowercase();
    let Some(words) = draft.network(Link::Pod, card(&model), None) else {
        return item.whole(Grade::LeftOut, "a VM has at most 32 networks");
    };
    let network = of(item, "Connection");
    let before = if card(&model).is_some() || model.is_empty() || model == "virtio" {
        String::new()
    } else {
        format!(", with a virtio card (before: {model})")
    };
    item.whole(Grade::Changed, format!("{words}{before}; there it is the network {network:?}"));
}

/// `byte * 2^20`, or an older word such as `MegaBytes`, as a factor. `shift`: the default.
fn unit(text: &str, shift: u32) -> Option<u64> {
    let words: String = text.to_lowercase().split_whitespace().collect();
    let shift = match words.as_str() {
        "" => shift,
        "byte" | "bytes" => 0,
        "kilobytes" => 10,
        "megabytes" => 20,
        "gigabytes" => 30,
        words => words.strip_prefix("byte*2^").or_else(|| words.strip_prefix("bytes*2^"))?.parse().ok()?,
    };
    (shift < 50).then(|| 1 << shift)
}

/// VMware writes it as a setting, and the setting counts.
fn firmware(system: &Item, draft: &mut Draft) {
    let section = system.get("VirtualHardwareSection");
    let mut settings = section.into_iter().flat_map(|section| section.all("Config"));
    let mut setting = |name: &str| settings.find(|it| it.get("@key").is_some_and(|it| it.text() == name));
    let firmware = setting("firmware");
    let is_uefi = firmware.is_some_and(|it| of(it, "@value") == "efi");
    let mut settings = section.into_iter().flat_map(|section| section.all("Config"));
    let secure = settings.find(|it| {
        it.get("@key")
            .is_some_and(|it| it.text().ends_with("secureBoot.enabled") || it.text().ends_with("SecureBootEnabled"))
    });
    let is_secure = is_uefi && secure.and_then(|it| it.get("@value")).is_some_and(Item::is_yes);
    let name = match (is_uefi, is_secure) {
        (false, _) => "bios",
        (true, false) => "uefi",
        (true, true) => "secure",
    };
    draft.set("firmware", name);
    for item in [firmware, secure].into_iter().flatten() {
        item.whole(Grade::Same, format!("spec.vm.firmware: {name}"));
    }
}
