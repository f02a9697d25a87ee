//! Configurations of Proxmox VE: `/etc/pve/qemu-server/NNN.conf` (<https://pve.proxmox.com/pve-docs/qm.conf.5.html>).

use std::collections::BTreeSet;

use serde_json::json;

use super::{
    draft::{self, Content, DataFile, Draft, Link, Place, SMALL_VARIABLES, card, is_mac},
    guest,
    source::{Item, PARTS, SourceError},
    unreadable,
};
use crate::exchange::Grade;

mod cloud_init;

/// What is said of a clock with local time whose zone the file does not have.
const ZONE: &str = "spec.vm.rtcBase: localtime, which is UTC here until spec.vm.rtcTimezone names the zone of the host, such as Europe/Berlin";
/// What Proxmox tells Windows guests of their hypervisor.
const WINDOWS: &str =
    "hv-relaxed,hv-vapic,hv-spinlocks=8191,hv-time,hv-vpindex,hv-runtime,hv-synic,hv-stimer,hv-reset,hv-ipi";

/// The lines of a configuration. Those after `[NAME]` belong to a snapshot, or are changes that wait for a restart.
pub(super) fn source(text: &str) -> Result<Item, SourceError> {
    let mut root = Item::new("", "", 1, None);
    let (mut section, mut parts, mut keys): (Option<Item>, usize, BTreeSet<&str>) = (None, 0, BTreeSet::new());
    for (index, line) in text.lines().enumerate() {
        let (number, line) = (index + 1, line.trim());
        if line.is_empty() {
            continue;
        }
        parts += 1 + line.bytes().filter(|byte| *byte == b',').count();
        if parts > PARTS {
            return Err(SourceError::too_much((number, 1)));
        }
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            root.items_of(section.take());
            section = Some(Item::new("[]", format!("[{name}]"), number, None));
            continue;
        }
        let item = if let Some(comment) = line.strip_prefix('#') {
            Item::new("#", "#", number, Some(comment.trim().to_owned()))
        } else {
            let Some((key, value)) = line.split_once(':').filter(|(key, _)| is_key(key)) else {
                return Err(SourceError::new(number, "this is no line of the form `key: value`"));
            };
            // Proxmox joins the lines of a description.
            if section.is_none() && !keys.insert(key) && key != "description" {
                return Err(SourceError::new(number, format!("the key {key:?} is there twice")));
            }
            entry(key, value.trim(), number)
        };
        match &mut section {
            Some(section) => section.push(item),
            None => root.push(item),
        }
    }
    if keys.is_empty() {
        return Err(SourceError::new(1, "there is no line of the form `key: value` in this file"));
    }
    root.items_of(section);
    Ok(root)
}

/// Whether a key can be one of Proxmox. Keys of other formats often can't.
fn is_key(key: &str) -> bool {
    let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-".contains(&byte);
    key.starts_with(|letter: char| letter.is_ascii_lowercase()) && key.bytes().all(is_letter)
}

impl Item {
    fn items_of(&mut self, section: Option<Self>) {
        if let Some(section) = section {
            self.push(section);
        }
    }
}

/// A line, with its properties `a=b` as parts. The one without a name is called `""`.
fn entry(key: &str, value: &str, line: usize) -> Item {
    let has_properties = value.contains('=') || value.contains(',') || is_numbered(key, &DRIVES);
    let is_text = ["name", "description", "args", "sshkeys", "hookscript", "tags", "cipassword"].contains(&key);
    if is_text || !has_properties {
        return Item::new(key, key, line, Some(value.to_owned()));
    }
    let mut item = Item::new(key, key, line, None);
    for part in value.split(',').filter(|part| !part.is_empty()) {
        let (name, value) = part.split_once('=').unwrap_or(("", part));
        let label = if name.is_empty() { key.to_owned() } else { format!("{key} {name}") };
        item.push(Item::new(name, label, line, Some(value.to_owned())));
    }
    item
}

/// Whether a key is one of these words with a number.
fn is_numbered(key: &str, words: &[&str]) -> bool {
    words.iter().any(|word| {
        key.strip_prefix(word).is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_digit()))
    })
}

const DRIVES: [&str; 4] = ["scsi", "virtio", "sata", "ide"];

/// The value of a key that may have properties: the one without a name.
fn main_value<'a>(item: &'a Item, name: &str) -> Option<&'a Item> {
    if item.items().is_empty() { Some(item) } else { item.get("").or_else(|| item.get(name)) }
}

pub(super) fn read(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    root.enter();
    if let Some(arch) = root.get("arch").filter(|arch| arch.text() != "x86_64") {
        let what = format!("the guest needs the architecture {}: VMs are x86_64", arch.text());
        return Err(SourceError::new(arch.line, what));
    }
    draft.spec.insert("guestShutdownStops".into(), true.into());
    // Proxmox reads both, and writes comments.
    let notes = root.items().iter().filter(|item| ["#", "description"].contains(&item.key.as_str()));
    let notes: Vec<&str> = notes.map(|note| note.same("the annotation kubernetes.io/description")).collect();
    if !notes.is_empty() {
        draft.annotations.insert("kubernetes.io/description".into(), decoded(&notes.join("\n")).into());
    }
    processor(root, draft)?;
    firmware(root, draft);
    let mut drives = Vec::new();
    draft.has_bridge =
        root.items().iter().any(|item| is_numbered(&item.key, &["net"]) && item.get("bridge").is_some_and(is_bridge));
    for item in root.items() {
        match item.key.as_str() {
            "name" => draft.name = item.same("metadata.name").to_owned(),
            key if is_numbered(key, &DRIVES) => {
                if let Some(at) = drive(item, draft) {
                    drives.push((item.key.clone(), at));
                }
            }
            key if is_numbered(key, &["net"]) => interface(item, root, draft),
            key if is_numbered(key, &["usb"]) => usb(item, draft),
            _ => simple(item, draft),
        }
    }
    boot(root, &drives, draft);
    cloud_init::cloud_init(root, draft);
    let line = root
        .items()
        .iter()
        .find(|item| item.key.starts_with("ci") || item.key.starts_with("ipconfig") || item.key == "sshkeys");
    let (line, what) = line.map_or((root.line, "the file"), |item| (item.line, item.key.as_str()));
    guest::tell_instance(draft, line, what, None);
    Ok(())
}

/// Keys that stand for themselves.
fn simple(item: &Item, draft: &mut Draft) {
    let is_off = ["0", "off", "no"].contains(&item.text());
    match item.key.as_str() {
        "arch" => _ = item.same("x86_64"),
        "ostype" => _ = item.same("what guest it is: settings follow from it"),
        "machine" => {
            let kind = main_value(item, "type").unwrap_or(item);
            if kind.text().contains("q35") {
                kind.same("a machine of the type q35, of the runner's version");
            } else {
                kind.changed("q35, with other controllers and PCI addresses: Windows may want to be activated again");
            }
        }
        "scsihw" => _ = item.changed("disks are virtio-blk, without a SCSI controller"),
        "agent" => item.whole(Grade::Same, "the VM has the channel of QEMU's guest agent"),
        "smbios1" => {
            if let Some(id) = item.get("uuid") {
                match draft::uuid(id.text()) {
                    Some(uuid) => {
                        id.same("spec.vm.machineUuid");
                        draft.set("machineUuid", uuid);
                    }
                    None => id.left_out("this is no UUID"),
                }
            }
            if let Some(item) = item.get("base64") {
                item.same("how the other values are written");
            }
        }
        "acpi" if !is_off => _ = item.same("the machine has it"),
        "acpi" => _ = item.changed("the machine has ACPI"),
        "tablet" if !is_off => _ = item.same("the VM has a USB tablet"),
        "tablet" => _ = item.changed("the VM has a USB tablet"),
        "kvm" if is_off => {
            draft.set("accelerator", "tcg");
            item.same("spec.vm.accelerator: tcg");
        }
        "kvm" => _ = item.same("spec.vm.accelerator: auto"),
        "numa" if is_off => _ = item.same("the guest has one node of memory"),
        "localtime" => {
            draft.set("rtcBase", if is_off { "utc" } else { "localtime" });
            if is_off {
                item.same("spec.vm.rtcBase");
            } else {
                item.changed(ZONE);
            }
        }
        "startdate" if item.text() == "now" => _ = item.same("spec.vm.rtcBase"),
        "startdate" => {
            let digits = item.text().bytes().all(|byte| byte.is_ascii_digit() || b"-:T".contains(&byte));
            if digits && [10, 19].contains(&item.text().len()) {
                draft.set("rtcBase", item.same("spec.vm.rtcBase"));
            } else {
                item.left_out("the clock begins with the time");
            }
        }
        "onboot" => {
            _ = item.changed("spec.vm.state is left out: start it when its disks are filled (kubectl vm start)")
        }
        "template" => _ = item.changed("a VM; there are no templates of this kind"),
        "vga" => vga(item, draft),
        "serial0" => _ = item.same("the serial console: kubectl vm console"),
        "rng0" => {
            item.enter();
            if let Some(item) = main_value(item, "source") {
                item.same("the VM has a random number generator");
            }
            for key in ["max_bytes", "period"] {
                if let Some(item) = item.get(key) {
                    item.left_out("its rate is not limited");
                }
            }
        }
        "audio0" => item.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
        "balloon" if is_off => _ = item.changed("the VM has a balloon, and all its memory at the start"),
        "balloon" => {
            _ = item.changed(
                "the VM has all its memory at the start; spec.vm.currentRam changes it, and nothing does so by itself",
            )
        }
        "hotplug" => item
            .whole(Grade::Changed, "CPUs, memory and CDs can be changed while it runs; disks and networks at a start"),
        "reboot" if !is_off => _ = item.same("the guest starts again"),
        "reboot" => _ = item.changed("a guest that reboots starts again"),
        "watchdog" => {
            if let Some(what) = draft.watchdog(item.get("action").map_or("none", Item::text)) {
                item.whole(Grade::Changed, what);
            }
        }
        "spice_enhancements" => {}
        _ => {}
    }
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.key.as_str() {
        key if is_numbered(key, &["hostpci"]) || is_numbered(key, &["usb"]) => {
            "devices of a node come from a device plugin and a template (example/templates/gpu-and-usb)"
        }
        key if is_numbered(key, &["unused"]) => "the disk is not used",
        key if is_numbered(key, &["virtiofs"]) => "share files by the network, or put them on a disk",
        key if is_numbered(key, &["numa"]) => "the guest has one node of memory",
        "[]" => "snapshots and pending changes are not read",
        "args" => "options of QEMU take a template of the runner (docs/templates.md)",
        "vmgenid" => "the VM has no generation ID",
        "hugepages" | "keephugepages" => "huge pages take a template",
        "cpulimit" | "cpuunits" | "affinity" => "requests, limits and the node decide (spec.resources)",
        "startup" => "VMs start independently of each other",
        "tags" => "they are for Proxmox: write labels",
        "meta" | "digest" | "lock" | "protection" | "parent" | "snaptime" | "vmstatestorage" | "hookscript" => {
            "it is for Proxmox"
        }
        "tag" | "trunks" => "a bridge of the node has its VLAN: use another one for each",
        "firewall" => "Proxmox's firewall: NetworkPolicies are for networks of type pod",
        "rate" => "the rate is not limited",
        "cicustom" => "snippets are on the host: put the data into spec.cloudInit",
        "amd-sev" | "intel-tdx" => "encrypted memory is not offered",
        _ => "",
    }
}

fn processor(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let number = |key: &str| match root.get(key) {
        Some(item) => match item.number().filter(|number| *number > 0) {
            Some(number) => Ok(Some(number)),
            None => {
                let what = format!("{key}: {:?} is no number of CPUs", item.text());
                Err(SourceError::new(item.line, what))
            }
        },
        None => Ok(None),
    };
    let (sockets, cores) = (number("sockets")?.unwrap_or(1), number("cores")?.unwrap_or(1));
    let all = sockets.saturating_mul(cores);
    let nothing = Item::new("", "", 0, None);
    let counted = root.get("cores").or_else(|| root.get("sockets")).unwrap_or(&nothing);
    draft.cpus(counted, all, number("vcpus")?);
    if let Some(item) = root.get("vcpus") {
        item.same("spec.vm.currentCpus");
    }
    if let Some(item) = root.get("sockets") {
        if sockets == 1 || draft.topology(sockets, 1, cores, 1) {
            item.same("spec.vm.cpuTopology");
        } else {
            item.changed("spec.vm.maximumCpus without a topology: a VM can't have this one");
        }
    }
    let memory = root.get("memory").and_then(|item| main_value(item, "current"));
    if let Some(item) = memory.filter(|item| item.number().is_none()) {
        return Err(unreadable(item, "size in MiB"));
    }
    let mebibytes = memory.map_or(Some(512), Item::number).and_then(|number| number.checked_mul(1 << 20));
    let fits = mebibytes.is_some_and(|bytes| draft.ram(bytes, None));
    match memory {
        Some(item) if fits => _ = item.same("spec.vm.maximumRam"),
        Some(item) => item.left_out("a VM can't have this much: it gets 1G"),
        None => {}
    }
    let is_windows = root.get("ostype").is_some_and(|kind| kind.text().starts_with("win") || kind.text() == "wvista");
    let mut words = vec![model(root.get("cpu"))];
    if is_windows {
        draft.set("rtcBase", "localtime");
        if let Some(item) = root.get("ostype").filter(|_| root.get("localtime").is_none()) {
            draft.note(item.line, "ostype", Grade::Changed, ZONE);
        }
        words.push(WINDOWS.into());
    }
    draft.cpu_model(&words.join(","));
    Ok(())
}

/// The words of QEMU's option `-cpu`.
fn model(cpu: Option<&Item>) -> String {
    let Some(cpu) = cpu else { return "kvm64".into() };
    cpu.enter();
    let mut words = Vec::new();
    if let Some(kind) = main_value(cpu, "cputype") {
        // Proxmox composes these of others.
        let stands_for = match kind.text() {
            "x86-64-v2" => Some("Nehalem"),
            "x86-64-v2-AES" => Some("Westmere"),
            "x86-64-v3" => Some("Haswell-noTSX"),
            "x86-64-v4" => Some("Skylake-Server-noTSX-IBRS"),
            custom if custom.starts_with("custom-") => Some("host"),
            _ => None,
        };
        match stands_for {
            Some(name) => {
                kind.changed(format!("spec.vm.cpuModel: {name}; QEMU has no model {}", kind.text()));
                words.push(name.to_owned());
            }
            None => words.push(kind.same("spec.vm.cpuModel").to_owned()),
        }
    } else {
        words.push("kvm64".into());
    }
    if let Some(flags) = cpu.get("flags") {
        flags.same("spec.vm.cpuModel");
        let flags = flags.text().split(';').filter(|flag| flag.starts_with(['+', '-']));
        words.extend(flags.map(|flag| match flag.strip_prefix("+hv-") {
            Some(name) => format!("hv-{name}"),
            None => flag.to_owned(),
        }));
    }
    if let Some(item) = cpu.get("hidden") {
        if item.is_yes() {
            words.push("kvm=off".into());
        }
        item.same("spec.vm.cpuModel: kvm=off");
    }
    if let Some(id) = cpu.get("hv-vendor-id").filter(|id| id.text().bytes().all(|byte| byte.is_ascii_alphanumeric())) {
        words.push(format!("hv-vendor-id={}", id.same("spec.vm.cpuModel")));
    }
    words.join(",")
}

fn firmware(root: &Item, draft: &mut Draft) {
    let is_uefi = root.get("bios").is_some_and(|bios| bios.text() == "ovmf");
    let variables = root.get("efidisk0");
    let property = |key: &str| variables.and_then(|item| item.get(key));
    let is_large = property("efitype").is_some_and(|it| it.text() == "4m");
    let is_secure = property("pre-enrolled-keys").is_some_and(Item::is_yes);
    let firmware = match (is_uefi, is_secure, is_large) {
        (false, ..) => "bios",
        (true, true, true) => "secure-4m",
        (true, true, false) => "secure",
        (true, false, true) => "uefi-4m",
        (true, false, false) => "uefi",
    };
    draft.set("firmware", firmware);
    if let Some(bios) = root.get("bios") {
        bios.same(format!("spec.vm.firmware: {firmware}"));
    }
    if let Some(item) = variables {
        if is_uefi {
            // Proxmox writes no type for the smaller one.
            if is_large {
                item.whole(Grade::Changed, "the firmware's variables have to be copied (see the comments)");
                if let Some(file) = main_value(item, "file").map(Item::text) {
                    let is_qcow2 =
                        file.ends_with(".qcow2") || property("format").is_some_and(|it| it.text() == "qcow2");
                    draft.data.push(DataFile { from: volume(file), file: "fw-vars.fd", variables: Some(is_qcow2) });
                }
            } else {
                item.whole(Grade::LeftOut, SMALL_VARIABLES);
            }
        } else {
            item.whole(Grade::LeftOut, "a BIOS has no variables");
        }
    }
    if let Some(state) = root.get("tpmstate0") {
        draft.set("useTpm", true);
        state.whole(
            Grade::Changed,
            "spec.vm.useTpm: a new TPM 2.0, because Proxmox keeps the state in another form: have BitLocker's recovery key at hand",
        );
    }
}

/// A disk or a CD drive. Returns its place among the disks.
fn drive(item: &Item, draft: &mut Draft) -> Option<usize> {
    item.enter();
    let file = main_value(item, "file").map(Item::text)?;
    let option = |key: &str| item.get(key);
    let at = draft.disks.len();
    if let Some(media) = option("media") {
        media.same("what it is");
    }
    if file.contains("cloudinit") {
        item.whole(Grade::Same, "spec.cloudInit");
        return None;
    }
    let value = main_value(item, "file").unwrap_or(item);
    if option("media").is_some_and(|media| media.text() == "cdrom") {
        match file {
            "none" => _ = value.same("an empty drive"),
            other => {
                _ = value.changed(format!(
                    "an empty drive: put {other} into the image repository, or set spec.vm.disks[].cdrom.image to a URL"
                ))
            }
        }
        if let Some(size) = option("size") {
            size.same("the size of the CD");
        }
        if !draft.cd("") {
            item.whole(Grade::LeftOut, "a VM has at most 64 disks");
            return None;
        }
        return Some(at);
    }
    let size = option("size").and_then(|size| bytes(size.text()));
    let Some(name) = draft.disk(&item.key, size, Content::From(volume(file))) else {
        item.whole(Grade::LeftOut, "a VM has at most 64 disks");
        return None;
    };
    value.changed(format!("its content has to be copied into the claim VM-{name}-disk (see the comments)"));
    if !item.key.starts_with("virtio") {
        let bus = item.key.trim_end_matches(|letter: char| letter.is_ascii_digit());
        item.changed(format!("virtio (before: {bus}): Windows needs the driver viostor before it moves"));
    }
    if let Some(item) = option("size") {
        match size {
            Some(_) => _ = item.same("the size of the disk"),
            None => item.left_out("this is no size: the disk has 10Gi"),
        }
    }
    for (key, what) in [("iothread", "disks have an I/O thread"), ("discard", "discarded blocks are freed")] {
        if let Some(item) = option(key).filter(|it| it.is_yes()) {
            item.same(what);
        }
    }
    if let Some(item) = option("serial") {
        match draft.serial(&decoded(item.text())) {
            true => _ = item.same("spec.vm.disks[].serial"),
            false => item.left_out("the serial number of a disk has up to 20 letters, digits, '.', '_' and '-'"),
        }
    }
    for key in ["backup", "replicate"] {
        if let Some(item) = option(key) {
            item.left_out("it is for Proxmox: see example/templates/backup");
        }
    }
    Some(at)
}

/// Where a volume is: it has a path, or is one of a storage.
fn volume(text: &str) -> Place {
    if text.starts_with('/') { Place::File(text.to_owned()) } else { Place::Volume(text.to_owned()) }
}

/// A size such as `32G`.
fn bytes(text: &str) -> Option<u64> {
    let end = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let shift = match &text[end..] {
        "" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return None,
    };
    text[..end].parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// Whether this is a name of a bridge.
fn is_bridge(item: &Item) -> bool {
    (1..=15).contains(&item.text().len()) && !item.text().contains(['/', ':', ' '])
}

/// What systemd calls the card `netN`: the first six are in slots from 18 on.
fn card_name(root: &Item, key: &str) -> Option<String> {
    let number = key.strip_prefix("net")?.parse::<u32>().ok().filter(|number| *number < 6)?;
    let is_q35 = root.get("machine").is_some_and(|it| {
        it.text().contains("q35") || it.get("type").or_else(|| it.get("")).is_some_and(|it| it.text().contains("q35"))
    });
    let begin = if is_q35 { "enp6s" } else { "ens" };
    Some(format!("{begin}{}", 18 + number))
}

fn interface(item: &Item, root: &Item, draft: &mut Draft) {
    item.enter();
    let own = |part: &Item| {
        ![
            "bridge",
            "tag",
            "firewall",
            "mtu",
            "queues",
            "rate",
            "link_down",
            "trunks",
            "host-managed",
            "macaddr",
            "model",
        ]
        .contains(&part.key.as_str())
    };
    let kind = if item.items().is_empty() { Some(item) } else { item.items().iter().find(|part| own(part)) };
    let Some(kind) = kind else { return };
    // `virtio=MAC`, or `virtio` alone.
    let (model, mac) = if kind.key.is_empty() || std::ptr::eq(kind, item) {
        (kind.text().to_owned(), item.get("macaddr").map(Item::text))
    } else {
        (kind.key.clone(), Some(kind.text()))
    };
    let bridge = item.get("bridge");
    let is_bridge = bridge.is_some_and(is_bridge);
    let link = match bridge {
        Some(bridge) if is_bridge => Link::Bridge(bridge.text()),
        Some(bridge) => {
            bridge.left_out("this is no name of a bridge: user networking");
            Link::User
        }
        None => Link::User,
    };
    let valid = mac.filter(|mac| is_mac(mac));
    let is_virtio = model == "virtio";
    let Some(words) = draft.network(link, card(&model), valid) else {
        return item.whole(Grade::LeftOut, draft.no_network());
    };
    let own_mac = valid.filter(|_| link != Link::User);
    guest::tell_name(draft, item.line, &item.key, card_name(root, &item.key), own_mac);
    if is_virtio || card(&model).is_some() {
        kind.same("the card and its MAC address");
    } else {
        kind.changed(format!("virtio (before: {model})"));
    }
    if mac.is_some() && (valid.is_none() || link == Link::User) {
        kind.changed("the card, with another MAC address");
    }
    if let Some(item) = item.get("macaddr") {
        item.same("the MAC address");
    }
    if let Some(bridge) = bridge.filter(|_| is_bridge) {
        bridge.same(words);
    }
}

fn usb(item: &Item, draft: &mut Draft) {
    item.enter();
    let Some(kind) = main_value(item, "host").filter(|kind| kind.text() == "spice") else { return };
    kind.same("spec.vm.display.spice.usbRedirects");
    let display = draft.vm.entry("display").or_insert_with(|| json!({}));
    let number = display["spice"]["usbRedirects"].as_u64().unwrap_or_default();
    display["spice"]["usbRedirects"] = (number + 1).min(8).into();
    if let Some(item) = item.get("usb3") {
        item.same("the controller has ports of both speeds");
    }
}

fn vga(item: &Item, draft: &mut Draft) {
    item.enter();
    let Some(kind) = main_value(item, "type") else { return };
    match kind.text() {
        "virtio" => _ = kind.same("virtio-vga"),
        text if text.starts_with("serial") || text == "none" => {
            _ = kind.changed("virtio-vga, beside the serial console")
        }
        text => {
            if let Some(heads) = text.strip_prefix("qxl").and_then(|heads| heads.parse::<u64>().ok()) {
                draft.vm.entry("display").or_insert_with(|| json!({}))["outputs"] = heads.clamp(1, 16).into();
            }
            kind.changed(format!("virtio-vga (before: {text})"));
        }
    }
    if let Some(item) = item.get("memory") {
        item.changed("the memory of virtio-vga");
    }
}

/// `boot: order=a;b`, or the letters of older configurations: c is the disk `bootdisk`, d a CD, n the network.
fn boot(root: &Item, drives: &[(String, usize)], draft: &mut Draft) {
    let first = root.get("bootdisk");
    let mut index = 0;
    let mut boots = |key: &str, draft: &mut Draft| {
        let at = drives.iter().find(|(name, _)| name == key).map(|(_, at)| *at);
        if let Some(disk) = at.and_then(|at| draft.disks.get_mut(at)).filter(|disk| disk.get("bootindex").is_none()) {
            disk["bootindex"] = index.into();
            index += 1;
        }
        at.is_some()
    };
    let Some(boot) = root.get("boot") else {
        if let Some(first) = first {
            if boots(first.text(), draft) {
                first.same("bootindex");
            } else {
                first.left_out("there is no such disk");
            }
        }
        return;
    };
    boot.enter();
    let order = boot.get("order");
    let letters = main_value(boot, "legacy").filter(|_| order.is_none());
    if let Some(order) = order {
        order.same("bootindex");
        for key in order.text().split(';').filter(|key| !key.is_empty()) {
            if !boots(key, draft) {
                order.changed(format!("bootindex, without {key}: VMs boot from disks and CDs"));
            }
        }
        if let Some(first) = first {
            first.same("the order of boot counts");
        }
    } else if let Some(letters) = letters {
        letters.same("bootindex");
        for letter in letters.text().chars() {
            match (letter, first) {
                ('c', Some(first)) => _ = boots(first.text(), draft),
                ('c', None) => {}
                ('d', _) => {
                    let cds = drives
                        .iter()
                        .filter(|(_, at)| draft.disks.get(*at).is_some_and(|disk| disk.get("cdrom").is_some()));
                    for name in cds.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
                        boots(&name, draft);
                    }
                }
                _ => _ = letters.changed("bootindex of disks and CDs: VMs do not boot from the network"),
            }
        }
        if let Some(first) = first {
            first.same("bootindex");
        }
    }
}

/// A text in which `%0A` and the like stand for other characters.
fn decoded(text: &str) -> String {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|two| std::str::from_utf8(two).ok()).filter(|_| *first == b'%');
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[2..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
