//! Envelopes of OVF (DSP0243), as VMware and VirtualBox export them: the file `.ovf` beside the disks, or in an `.ova`.

use super::{
    draft::{Draft, Link, card, is_mac},
    guest,
    source::{self, Item, SourceError},
};
use crate::exchange::Grade;

mod choice;
mod collection;
mod drives;
mod virtualbox;

/// The most CPUs that a VM can have.
const CPUS: u64 = 1024;
const NEW_VARIABLES: &str = "the firmware's variables (boot entries, keys of Secure Boot): the VM makes new ones";
const NEW_TPM: &str =
    "spec.vm.useTpm: a new TPM 2.0, without the state of the old one: have BitLocker's recovery key at hand";

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

/// The envelopes of a text: one for each VM.
pub(super) fn sources(text: &str) -> Result<Vec<Item>, SourceError> {
    let root = source::xml(text)?;
    let envelopes = collection::envelopes(&root)?;
    Ok(if envelopes.is_empty() { vec![root] } else { envelopes })
}

/// Reads the VM of an envelope that has one.
pub(super) fn read(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    if root.key != "Envelope" {
        return Err(SourceError::new(root.line, format!("<{}> is no envelope of OVF", root.key)));
    }
    root.enter();
    for attribute in root.items().iter().filter(|item| item.key.starts_with('@')) {
        attribute.same("how the file is written");
    }
    let mut all = Vec::new();
    systems(root, &mut all);
    let Some(system) = all.first().copied() else {
        return Err(SourceError::new(root.line, "there is no <VirtualSystem> in this file"));
    };
    system.enter();
    draft.spec.insert("guestShutdownStops".into(), true.into());
    if let Some(section) = root.get("NetworkSection") {
        section.whole(Grade::Same, "the networks");
    }
    if let Some(section) = root.get("DiskSection") {
        section.enter();
        if let Some(item) = section.get("Info") {
            item.same("words for people");
        }
    }
    draft.name = name(system).map_or("", Item::text).to_owned();
    for item in [system.get("@id"), system.get("Name")].into_iter().flatten() {
        item.same("metadata.name");
    }
    architecture(system)?;
    let is_windows = guest(system).iter().any(|item| is_windows(item.text()));
    if is_windows {
        draft.set("rtcBase", "localtime");
    }
    let mut first = None;
    for section in system.items() {
        match section.key.as_str() {
            "Info" => _ = section.same("words for people"),
            "OperatingSystemSection" if is_windows => {
                section.whole(Grade::Same, "what guest it is, and how its clock begins: spec.vm.rtcBase");
            }
            "OperatingSystemSection" => section.whole(Grade::Same, "what guest it is"),
            "AnnotationSection" => annotation(section, draft),
            "VirtualHardwareSection" if first.is_none() => first = Some(section),
            "VirtualHardwareSection" => {
                section.whole(Grade::LeftOut, "another choice of hardware: the first one counts")
            }
            _ => {}
        }
    }
    if let Some(section) = first {
        return hardware(root, system, section, draft);
    }
    draft.set("firmware", "bios");
    system.changed("there is no <VirtualHardwareSection>: the VM has 1 CPU, 1G of memory, no disks and no networks");
    Ok(())
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.key.as_str() {
        "ProductSection" | "@transport" => "vApp properties: put them into spec.cloudInit",
        "Machine" => "it is for VirtualBox",
        "Config" | "ExtraConfig" => match of(item, "@key") {
            key if key.starts_with("guestinfo.") => "VMware hands it to the guest: put it into spec.cloudInit",
            "nvram" => NEW_VARIABLES,
            _ => "it is for VMware",
        },
        "StartupSection" => "VMs start independently of each other",
        "EulaSection" => "a licence, which people accept elsewhere",
        "ResourceAllocationSection" => "requests and limits are each VM's (spec.resources)",
        "File" => "no disk and no drive uses it",
        "Disk" => "no drive uses it",
        _ => "",
    }
}

/// The text of a part of an item.
fn of<'a>(item: &'a Item, key: &str) -> &'a str {
    item.get(key).map_or("", Item::text)
}

/// Whether a value of VMware or VirtualBox, which write `true` and `TRUE`, is a yes.
fn is_yes(text: &str) -> bool {
    ["true", "yes", "1"].contains(&text.to_lowercase().as_str())
}

/// The VMs of an envelope, also those of collections within collections.
fn systems<'a>(around: &'a Item, found: &mut Vec<&'a Item>) {
    for item in around.items() {
        match item.key.as_str() {
            "VirtualSystem" => found.push(item),
            "VirtualSystemCollection" => {
                of_collection(item);
                systems(item, found);
            }
            _ => {}
        }
    }
}

/// What a collection itself says.
fn of_collection(item: &Item) {
    item.enter();
    for part in item.items() {
        match part.key.as_str() {
            "Info" => _ = part.same("words for people"),
            "@id" | "Name" => part.left_out("nothing groups VMs: write labels"),
            "StartupSection" => startup(part),
            _ => {}
        }
    }
}

/// In which order the VMs of a collection start.
fn startup(section: &Item) {
    section.enter();
    if let Some(info) = section.get("Info") {
        info.same("words for people");
    }
    for item in section.all("Item") {
        let (id, order) = (of(item, "@id"), of(item, "@order"));
        let order = if ["", "0"].contains(&order) { "no order".to_owned() } else { format!("the order {order}") };
        let what = format!("{id:?} has {order} there: VMs start independently of each other");
        item.whole(Grade::LeftOut, what);
    }
}

fn name(system: &Item) -> Option<&Item> {
    system.get("Name").filter(|name| !name.text().is_empty()).or_else(|| system.get("@id"))
}

fn annotation(section: &Item, draft: &mut Draft) {
    section.enter();
    if let Some(text) = section.get("Annotation") {
        let text = text.same("the annotation kubernetes.io/description").to_owned();
        draft.annotations.insert("kubernetes.io/description".into(), text.into());
    }
    for key in ["Info", "@required"] {
        if let Some(item) = section.get(key) {
            item.same("words for people");
        }
    }
}

/// What is said of the guest's operating system: VMware's word, those of VirtualBox, and what people read.
fn guest(system: &Item) -> Vec<&Item> {
    let section = system.get("OperatingSystemSection");
    let words = ["@osType", "OSType", "Description"].into_iter().filter_map(|key| section?.get(key));
    words.chain(system.get("Machine/@OSType")).collect()
}

/// `windows2019srv_64Guest` and `winXPProGuest` of VMware, `Windows10_64` of VirtualBox, `Microsoft Windows Server 2022` for people.
fn is_windows(text: &str) -> bool {
    let text = text.to_lowercase();
    ["win", "microsoft windows"].iter().any(|start| text.starts_with(start))
}

/// Guests for ARM are refused: `arm-ubuntu-64` of VMware, `Ubuntu_arm64` of VirtualBox.
fn architecture(system: &Item) -> Result<(), SourceError> {
    let is_arm = |item: &Item| {
        let text = item.text().to_lowercase();
        let is_type = item.key != "Description";
        let mut words = text.split(|letter: char| !letter.is_ascii_alphanumeric());
        words.any(|word| ["arm64", "aarch64"].contains(&word) || is_type && word == "arm")
    };
    let platform = system.get("Machine/Hardware/Platform/@architecture");
    match guest(system).into_iter().chain(platform).find(|item| is_arm(item)) {
        Some(item) => {
            let what = format!("the guest needs the architecture aarch64 ({}): VMs are x86_64", item.text());
            Err(SourceError::new(item.line, what))
        }
        None => Ok(()),
    }
}

fn resource(item: &Item) -> Option<u64> {
    item.get("ResourceType").and_then(Item::number)
}

fn hardware(root: &Item, system: &Item, section: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    section.enter();
    for key in ["Info", "System"] {
        if let Some(item) = section.get(key) {
            item.whole(Grade::Same, "words for people");
        }
    }
    let configuration = choice::configuration(root);
    let items = choice::taken(section, &["Item", "StorageItem", "EthernetPortItem"], configuration);
    let settings = choice::taken(section, &["Config", "ExtraConfig"], configuration);
    let machine = system.get("Machine");
    if let Some(machine) = machine {
        virtualbox::read(machine, draft);
    }
    // Which card has which address is only sure if there are as many.
    let cards = items.iter().filter(|item| resource(item) == Some(kind::ETHERNET)).count();
    let mut macs = machine.map(virtualbox::macs).filter(|macs| macs.len() == cards).unwrap_or_default().into_iter();
    let (mut drives, mut has_cpus, mut has_memory) = (Vec::new(), false, false);
    for item in items.iter().copied() {
        item.enter();
        let Some(resource) = resource(item) else { continue };
        match resource {
            kind::CPU => {
                processors(item, draft)?;
                has_cpus = true;
            }
            kind::MEMORY => {
                memory(item, draft)?;
                has_memory = true;
            }
            kind::DISK | kind::CD | kind::DVD => drives.push(item),
            kind::ETHERNET => ethernet(item, macs.next().flatten(), draft),
            kind::IDE | kind::SCSI | kind::SATA | kind::USB => {
                item.whole(Grade::Changed, "the VM has controllers of its own")
            }
            kind::GRAPHICS => item.whole(Grade::Changed, "virtio-vga"),
            kind::SOUND => item.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
            kind::SERIAL => item.whole(Grade::Changed, "the serial console: kubectl vm console"),
            kind::FLOPPY => item.whole(Grade::LeftOut, "VMs have no floppy drives"),
            _ if is_tpm(item) => {
                draft.set("useTpm", true);
                item.whole(Grade::Changed, NEW_TPM);
            }
            _ => item.whole(Grade::LeftOut, of(item, "ElementName")),
        }
    }
    let missing = match (has_cpus, has_memory) {
        (true, true) => None,
        (false, true) => Some("it has no number of CPUs: the VM has 1"),
        (true, false) => Some("it has no memory: the VM has 1G"),
        (false, false) => Some("it has no number of CPUs and no memory: the VM has 1 CPU and 1G"),
    };
    if let Some(missing) = missing {
        section.changed(missing);
    }
    drives::read(root, system, &items, drives, draft);
    firmware(&settings, machine, draft);
    clock(&settings, draft);
    Ok(())
}

fn processors(item: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let quantity = item.get("VirtualQuantity").unwrap_or(item);
    let Some(cpus) = quantity.number().filter(|cpus| (1..=CPUS).contains(cpus)) else {
        let what =
            format!("VirtualQuantity {:?} is no number of CPUs: a VM has 1 to {CPUS}", of(item, "VirtualQuantity"));
        return Err(SourceError::new(quantity.line, what));
    };
    draft.cpus(quantity, cpus, None);
    let per_socket = item.get("CoresPerSocket");
    let fits = match per_socket.map(Item::number) {
        // 0: VMware chooses.
        None | Some(Some(0)) => true,
        Some(Some(cores)) => cpus.is_multiple_of(cores) && (cpus == cores || draft.topology(cpus / cores, 1, cores, 1)),
        Some(None) => false,
    };
    item.whole(Grade::Same, format!("{cpus} CPUs"));
    if let Some(item) = per_socket.filter(|_| !fits) {
        item.changed("spec.vm.maximumCpus without a topology: a VM can't have this one");
    }
    Ok(())
}

fn memory(item: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let quantity = item.get("VirtualQuantity").unwrap_or(item);
    let units = of(item, "AllocationUnits");
    let bytes = quantity.number().and_then(|number| number.checked_mul(unit(units, 1 << 20)?));
    if !bytes.is_some_and(|bytes| draft.ram(bytes, None)) {
        let number = of(item, "VirtualQuantity");
        let what = format!("VirtualQuantity {number:?} in AllocationUnits {units:?} is no memory that a VM can have");
        return Err(SourceError::new(quantity.line, what));
    }
    item.whole(Grade::Same, "spec.vm.maximumRam");
    Ok(())
}

/// `byte * 2^20`, or an older word such as `MegaBytes`, as a factor. None: this is no unit.
fn unit(text: &str, default: u64) -> Option<u64> {
    let text: String = text.to_lowercase().split_whitespace().collect();
    if text.is_empty() {
        return Some(default);
    }
    let mut factors = text.split('*');
    let first: u64 = match factors.next()? {
        "byte" | "bytes" => 1,
        "kilobyte" | "kilobytes" | "kb" | "kib" => 1 << 10,
        "megabyte" | "megabytes" | "mb" | "mib" => 1 << 20,
        "gigabyte" | "gigabytes" | "gb" | "gib" => 1 << 30,
        "terabyte" | "terabytes" | "tb" | "tib" => 1 << 40,
        _ => return None,
    };
    factors.try_fold(first, |product, factor| {
        let factor = match factor.split_once('^') {
            Some((base, power)) => base.parse::<u64>().ok()?.checked_pow(power.parse().ok()?)?,
            None => factor.parse().ok()?,
        };
        product.checked_mul(factor)
    })
}

fn is_tpm(item: &Item) -> bool {
    of(item, "ResourceSubType").eq_ignore_ascii_case("vmware.vtpm")
        || of(item, "ElementName").eq_ignore_ascii_case("Virtual TPM")
}

/// A network card. `machine_mac`: VirtualBox writes its address elsewhere.
fn ethernet(item: &Item, machine_mac: Option<&Item>, draft: &mut Draft) {
    let model = of(item, "ResourceSubType").to_lowercase();
    // It may be a list, of which one is enough.
    let device = model.split_whitespace().find_map(card);
    let address = item.get("Address").filter(|address| !address.text().is_empty()).or(machine_mac);
    let mac = address.and_then(|address| mac(address.text()));
    let Some(words) = draft.network(Link::Pod, device, mac.as_deref()) else {
        return item.whole(Grade::LeftOut, "a VM has at most 32 networks");
    };
    let number = draft.cards.len();
    // VirtualBox names its cards by slots, VMware by the places of its bridges.
    let names: &[&str] = match (machine_mac.is_some(), model.contains("vmxnet3")) {
        (true, _) => &["enp0s3", "enp0s8", "enp0s9", "enp0s10"],
        (false, true) => &["ens192", "ens224", "ens256"],
        (false, false) => &["ens33", "ens34", "ens35"],
    };
    let own_mac = mac.as_deref().filter(|_| words != "user networking");
    guest::tell_name(draft, item.line, &item.label, names.get(number).map(|name| (*name).to_owned()), own_mac);
    let network = of(item, "Connection");
    let before = if device.is_some() || model.is_empty() || model == "virtio" {
        String::new()
    } else {
        format!(", with a virtio card (before: {model})")
    };
    item.whole(Grade::Changed, format!("{words}{before}; there it is the network {network:?}"));
    let Some(address) = address else { return };
    if mac.is_none() {
        address.left_out("no card has this MAC address");
    } else if words == "user networking" {
        address.changed("another MAC address: user networking has no setting for it");
    } else {
        address.same("the MAC address");
    }
}

/// A MAC address with its colons: VirtualBox writes `080027A1B2C3`.
fn mac(text: &str) -> Option<String> {
    let digits: Vec<char> = text.chars().filter(|letter| !":-.".contains(*letter)).collect();
    let pairs: Vec<String> = digits.chunks(2).map(|pair| pair.iter().collect()).collect();
    Some(pairs.join(":")).filter(|mac| is_mac(mac))
}

/// VMware writes it as a setting, and VirtualBox beside the hardware.
fn firmware(settings: &[&Item], machine: Option<&Item>, draft: &mut Draft) {
    let key = |item: &Item| of(item, "@key").to_lowercase();
    let value = |item: &Item| of(item, "@value").to_lowercase();
    let firmwares: Vec<&Item> = settings.iter().copied().filter(|item| key(item) == "firmware").collect();
    let is_switch =
        |item: &Item| ["secureboot.enabled", "securebootenabled"].iter().any(|end| key(item).ends_with(end));
    let switches: Vec<&Item> = settings.iter().copied().filter(|item| is_switch(item)).collect();
    let of_machine = machine.and_then(virtualbox::firmware);
    // VirtualBox also writes EFI32, EFI64 and EFIDUAL.
    let is_uefi = firmwares.iter().any(|item| value(item) == "efi")
        || of_machine.is_some_and(|item| item.text().to_lowercase().starts_with("efi"));
    let is_secure = is_uefi && switches.iter().any(|item| is_yes(&value(item)));
    let name = match (is_uefi, is_secure) {
        (false, _) => "bios",
        (true, false) => "uefi",
        (true, true) => "secure",
    };
    draft.set("firmware", name);
    let became = format!("spec.vm.firmware: {name}");
    for item in firmwares {
        let is_same = value(item) == if is_uefi { "efi" } else { "bios" };
        item.whole(if is_same { Grade::Same } else { Grade::Changed }, became.clone());
    }
    for item in switches {
        let is_same = is_yes(&value(item)) == is_secure;
        item.whole(if is_same { Grade::Same } else { Grade::Changed }, became.clone());
    }
    if let Some(item) = of_machine {
        item.same(became);
    }
}

/// VMware's clock is that of the guest's time zone for Windows, unless it says how far it is from UTC.
fn clock(settings: &[&Item], draft: &mut Draft) {
    for item in settings {
        if of(item, "@key").eq_ignore_ascii_case("rtc.diffFromUTC") && of(item, "@value") == "0" {
            draft.set("rtcBase", "utc");
            item.whole(Grade::Same, "spec.vm.rtcBase: utc");
        }
    }
}

#[cfg(test)]
mod tests;
