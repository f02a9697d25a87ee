//! The devices of a domain.

use super::{
    Content, DataFile, Draft, Grade, Item, Link, Place,
    draft::{card, is_mac},
    guest,
};

/// Parts of any device that only libvirt and QEMU know: the guest sees the address at most.
fn common(device: &Item) {
    for key in ["alias", "address"] {
        if let Some(item) = device.get(key) {
            let grade = if key == "alias" { Grade::Same } else { Grade::Changed };
            item.whole(grade, if key == "alias" { "a name of libvirt's" } else { "the runner chooses addresses" });
        }
    }
}

/// The guest finds the same device, at another address.
fn same(device: &Item, what: &str) {
    common(device);
    device.whole(Grade::Same, what);
}

pub(super) fn read(devices: &Item, draft: &mut Draft) {
    let (mut has_serial, mut redirections, mut has_graphics) = (false, 0_u64, false);
    // The XML of a running domain also names the bridges of libvirt's networks.
    let is_tap =
        |device: &Item| device.get("@type").is_some_and(|kind| kind.text() == "bridge") && bridge_of(device).is_some();
    draft.has_bridge = devices.all("interface").any(is_tap);
    for device in devices.items() {
        let kind = device.get("@type").map_or("", Item::text);
        let model = device.get("@model").map_or("", Item::text);
        match device.key.as_str() {
            "emulator" => _ = device.same("the runner's QEMU"),
            "disk" => disk(device, draft),
            "interface" => interface(device, kind, draft),
            "controller" => device.whole(Grade::Changed, "the VM has controllers of its own"),
            "hub" => device.whole(Grade::Changed, "the VM has a USB controller of its own"),
            "graphics" => graphics(device, kind, &mut has_graphics, draft),
            "video" => video(device, draft),
            "input" if kind == "tablet" => same(device, "the VM has a USB tablet"),
            "input" => device.whole(Grade::Changed, "the VM has a keyboard and a mouse (PS/2), and a USB tablet"),
            "serial" | "console" => {
                let target = device.get("target/@type").map_or("", Item::text);
                // libvirt writes the first serial port as a console too.
                let is_first = !has_serial || device.key == "console" && target == "serial";
                if is_first && !["virtio", "sclp", "xen"].contains(&target) {
                    has_serial = true;
                    let grade = if kind == "pty" { Grade::Same } else { Grade::Changed };
                    device.whole(grade, "the serial console: kubectl vm console");
                }
            }
            "channel" => channel(device),
            "rng"
                if device.get("backend").is_some_and(|it| it.get("@model").is_some_and(|it| it.text() == "random")) =>
            {
                same(device, "the VM has a random number generator");
                if let Some(rate) = device.get("rate") {
                    rate.left_out("its rate is not limited");
                }
            }
            "memballoon" if model == "none" => device.whole(Grade::Changed, "the VM has a balloon"),
            "memballoon" => same(device, "the VM has a balloon"),
            "sound" => device.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
            "audio" => device.whole(Grade::Changed, "sound goes to the SPICE client"),
            "redirdev" if device.get("@bus").is_some_and(|it| it.text() == "usb") => {
                redirections += 1;
                device.whole(Grade::Same, "spec.vm.display.spice.usbRedirects");
            }
            "tpm" => tpm(device, draft),
            "panic" => device.whole(
                if model.is_empty() || model == "isa" { Grade::Same } else { Grade::Changed },
                "a pvpanic device, with spec.vm.onPanic",
            ),
            "watchdog" => watchdog(device, model, draft),
            _ => {}
        }
    }
    if redirections > 0 {
        draft.vm.entry("display").or_insert_with(|| serde_json::json!({}))["spice"]["usbRedirects"] =
            redirections.min(8).into();
    }
}

fn disk(device: &Item, draft: &mut Draft) {
    device.enter();
    let kind = device.get("@device").map_or("disk", Item::text);
    if kind == "floppy" {
        return device.whole(Grade::LeftOut, "VMs have no floppy drives");
    }
    let target = device.get("target/@dev").map_or("disk", Item::text).to_owned();
    let source = device.get("source");
    let from = source.map(origin).filter(|from| !from.is_empty());
    let order = device.get("boot/@order").and_then(Item::number);
    let fits = if kind == "cdrom" {
        if let (Some(source), Some(from)) = (source, &from) {
            source.whole(
                Grade::Changed,
                format!(
                    "an empty drive: put {from} into the image repository, or set spec.vm.disks[].cdrom.image to a URL"
                ),
            );
        }
        draft.cd("")
    } else {
        let content =
            source.zip(from.clone()).map_or(Content::Empty, |(source, from)| Content::From(place(source, from)));
        let name = draft.disk(&target, None, content);
        if let (Some(source), Some(name)) = (source, &name) {
            if let Some(from) = from {
                draft.origin(from, name, source);
            }
            let what = format!("its content has to be copied into the claim VM-{name}-disk (see the comments)");
            source.whole(Grade::Changed, what);
        }
        name.is_some()
    };
    if !fits {
        return device.whole(Grade::LeftOut, "a VM has at most 64 disks");
    }
    if let (Some(order), Some(disk)) = (order.and_then(|it| u32::try_from(it).ok()), draft.disks.last_mut()) {
        disk["bootindex"] = order.min(i32::MAX as u32).into();
    }
    for key in ["@type", "@device", "@snapshot", "boot"] {
        if let Some(item) = device.get(key) {
            item.whole(Grade::Same, "a disk of the VM");
        }
    }
    if let Some(item) = device.get("@device").filter(|it| it.text() == "lun") {
        item.changed("a disk: SCSI commands of the guest do not reach the device");
    }
    if let Some(item) = device.get("serial") {
        match draft.serial(item.text()) {
            true => _ = item.same("spec.vm.disks[].serial"),
            false => item.left_out("the serial number of a disk has up to 20 letters, digits, '.', '_' and '-'"),
        }
    }
    if let Some(target) = device.get("target") {
        target.enter();
        if let Some(item) = target.get("@dev") {
            item.same("the disk's name");
        }
        if let Some(bus) = target.get("@bus") {
            match (kind, bus.text()) {
                ("cdrom", "sata" | "ide") | (_, "virtio") => _ = bus.same("the disk's bus"),
                ("cdrom", other) => _ = bus.changed(format!("sata (before: {other})")),
                (_, other) => {
                    _ = bus
                        .changed(format!("virtio (before: {other}): Windows needs the driver viostor before it moves"))
                }
            }
        }
    }
    if let Some(driver) = device.get("driver") {
        driver.enter();
        for (key, what) in [("@name", "QEMU"), ("@type", "the format of the file that is copied")] {
            if let Some(item) = driver.get(key) {
                item.same(what);
            }
        }
        if let Some(item) = driver.get("@iothread") {
            item.same("disks have an I/O thread");
        }
        if let Some(item) = driver.get("@discard").filter(|it| it.text() == "unmap") {
            item.same("discarded blocks are freed");
        }
    }
    if let Some(item) = device.get("readonly") {
        if kind == "cdrom" {
            item.same("a CD");
        } else {
            item.changed("the disk is writable");
        }
    }
    if let Some(chain) = device.get("backingStore") {
        chain.whole(Grade::Same, "qemu-img copies the whole chain");
    }
    common(device);
}

/// Where the content of a disk is, as a person finds it.
fn origin(source: &Item) -> String {
    let attribute = |key: &str| source.get(key).map(Item::text).unwrap_or_default();
    if let Some(path) = path(source) {
        return path.text().to_owned();
    }
    if !attribute("@volume").is_empty() {
        return format!("{}/{} (a volume of a pool: virsh vol-path)", attribute("@pool"), attribute("@volume"));
    }
    if !attribute("@protocol").is_empty() {
        let host = source.get("host/@name").map(Item::text).unwrap_or_default();
        return format!("{}://{host}/{}", attribute("@protocol"), attribute("@name"));
    }
    String::new()
}

fn path(source: &Item) -> Option<&Item> {
    ["@file", "@dev", "@dir"].iter().find_map(|key| source.get(key))
}

/// What [`origin`] says of a disk, for commands.
fn place(source: &Item, origin: String) -> Place {
    let is_volume = path(source).is_none() && source.get("@volume").is_some_and(|it| !it.text().is_empty());
    if is_volume { Place::Words(origin) } else { Place::File(origin) }
}

/// The bridge that an interface names, if a VM can have it.
fn bridge_of(device: &Item) -> Option<&str> {
    device.get("source/@bridge").map(Item::text).filter(|name| is_bridge(name))
}

fn interface(device: &Item, kind: &str, draft: &mut Draft) {
    let link = match (kind, bridge_of(device)) {
        ("bridge", Some(bridge)) => Link::Bridge(bridge),
        ("user", _) => Link::User,
        ("network", _) => Link::Pod,
        ("direct", _) => {
            return device
                .whole(Grade::LeftOut, "macvtap: connect a bridge of the node, and write a network of type tap");
        }
        ("hostdev", _) => {
            return device.whole(Grade::LeftOut, "a network card of the node: see example/templates/second-network");
        }
        _ => return,
    };
    device.enter();
    let model = device.get("model/@type").map_or("", Item::text);
    let is_virtio = model.starts_with("virtio");
    let device_of_model = card(model);
    let address = device.get("mac/@address").map(Item::text);
    let mac = address.filter(|mac| is_mac(mac));
    let Some(words) = draft.network(link, device_of_model, mac) else {
        return device.whole(Grade::LeftOut, draft.no_network());
    };
    let own_mac = mac.filter(|_| words != "user networking");
    let before = card_name(device, draft.cards.len());
    guest::tell_name(draft, device.line, "<interface>", before, own_mac);
    if let Some(item) = device.get("@type") {
        match link {
            Link::Pod => _ = item.changed(format!("{words}; there it is a network of libvirt's")),
            _ => _ = item.same(words.clone()),
        }
    }
    if let Some(source) = device.get("source") {
        match link {
            Link::Bridge(_) => {
                source.enter();
                if let Some(item) = source.get("@bridge") {
                    item.same(words.clone());
                }
            }
            _ => source.whole(Grade::Changed, words.clone()),
        }
    }
    if let Some(item) = device.get("model") {
        if is_virtio || device_of_model.is_some() {
            item.whole(Grade::Same, "the card");
        } else {
            item.whole(Grade::Changed, format!("virtio (before: {model})"));
        }
    }
    if let Some(item) = device.get("mac") {
        if words == "user networking" {
            item.whole(Grade::Changed, "another MAC address: user networking has no setting for it");
        } else if mac.is_some() {
            item.whole(Grade::Same, "the MAC address");
        } else {
            item.whole(Grade::LeftOut, "no card has this MAC address");
        }
    }
    if let Some(item) = device.get("target") {
        item.whole(Grade::Same, "the name of a device of the host");
    }
    if let Some(boot) = device.get("boot") {
        boot.whole(Grade::LeftOut, "VMs do not boot from the network");
    }
    common(device);
}

/// What systemd calls a card at this address; without one, the card with this number has a port of a q35 of its own.
fn card_name(device: &Item, number: usize) -> Option<String> {
    let Some(address) = device.get("address") else { return Some(format!("enp{}s0", number + 1)) };
    let part = |key: &str| {
        let text = address.get(key).map_or("0x0", Item::text);
        u32::from_str_radix(text.trim_start_matches("0x"), 16).ok()
    };
    let (bus, slot, function) = (part("@bus")?, part("@slot")?, part("@function")?);
    let function = if function > 0 { format!("f{function}") } else { String::new() };
    // The slots of the root bus of an i440fx are numbered for hotplug.
    Some(if bus == 0 { format!("ens{slot}{function}") } else { format!("enp{bus}s{slot}{function}") })
}

/// Whether `spec.vm.networks[].tap.bridge` accepts it.
fn is_bridge(name: &str) -> bool {
    (1..=15).contains(&name.len()) && !name.contains(|letter: char| letter.is_whitespace() || "/:".contains(letter))
}

fn graphics(device: &Item, kind: &str, has_graphics: &mut bool, draft: &mut Draft) {
    if !["spice", "vnc"].contains(&kind) || *has_graphics {
        return;
    }
    *has_graphics = true;
    device.enter();
    if kind == "vnc" {
        draft.vm.entry("display").or_insert_with(|| serde_json::json!({}))["vnc"] = serde_json::json!({ "port": 5900 });
    }
    if let Some(item) = device.get("@type") {
        item.same(format!("spec.vm.display: {kind}"));
    }
    for key in ["@port", "@tlsPort", "@autoport", "@listen", "listen", "@socket", "@websocket"] {
        if let Some(item) = device.get(key) {
            item.whole(Grade::Changed, "port 5900 of the Pod: kubectl vm view, kubectl vm display");
        }
    }
    for key in ["@passwd", "@passwdValidTo"] {
        if let Some(item) = device.get(key) {
            item.changed("another password, in the Secret VM-display-secret: kubectl vm password");
        }
    }
    if let Some(item) = device.get("clipboard") {
        item.whole(Grade::Changed, "spec.vm.display.clipboard has the manager's default");
    }
}

fn video(device: &Item, draft: &mut Draft) {
    let model = device.enter().get("model");
    let kind = model.and_then(|it| it.get("@type")).map_or("", Item::text);
    let heads = model.and_then(|it| it.get("@heads")).and_then(Item::number).filter(|heads| (2..=16).contains(heads));
    if let Some(heads) = heads {
        draft.vm.entry("display").or_insert_with(|| serde_json::json!({}))["outputs"] = heads.into();
    }
    match kind {
        "virtio" => same(device, "virtio-vga"),
        other => device
            .whole(Grade::Changed, format!("virtio-vga (before: {})", if other.is_empty() { "none" } else { other })),
    }
    if let Some(item) = device.get("model/acceleration").or_else(|| device.get("driver")) {
        item.left_out("there is no 3D acceleration");
    }
}

fn channel(device: &Item) {
    match device.get("target/@name").map_or("", Item::text) {
        "org.qemu.guest_agent.0" => same(device, "QEMU's guest agent"),
        "com.redhat.spice.0" => same(device, "the agent for clipboard and display"),
        "" => {}
        _ => device.left_out("the VM has the channels of QEMU's guest agent, of SPICE and of vmop_agent"),
    }
}

fn tpm(device: &Item, draft: &mut Draft) {
    let backend = device.get("backend");
    let kind = backend.and_then(|it| it.get("@type")).map_or("", Item::text);
    if kind != "emulator" {
        return device.whole(Grade::LeftOut, "a TPM of the host: spec.vm.useTpm emulates one, which has other keys");
    }
    draft.set("useTpm", true);
    let version = backend.and_then(|it| it.get("@version")).map_or("2.0", Item::text);
    let is_old = version == "1.2";
    let grade = if is_old { Grade::Changed } else { Grade::Same };
    common(device);
    device.whole(grade, "spec.vm.useTpm: a TPM 2.0");
    if let Some(model) = device.get("@model").filter(|model| model.text() != "tpm-crb") {
        model.changed("tpm-crb");
    }
    if let Some(secret) = device.get("backend/encryption") {
        secret.left_out("its state is not encrypted: decrypt it before it is copied");
    }
    if !is_old {
        let uuid = draft.vm.get("machineUuid").and_then(serde_json::Value::as_str).unwrap_or("UUID");
        let file = format!("/var/lib/libvirt/swtpm/{uuid}/tpm2/tpm2-00.permall");
        draft.data.push(DataFile { from: Place::File(file), file: "tpm/tpm2-00.permall", variables: None });
    }
}

fn watchdog(device: &Item, model: &str, draft: &mut Draft) {
    if let Some(what) = draft.watchdog(device.get("@action").map_or("reset", Item::text)) {
        device.whole(if model == "itco" { Grade::Same } else { Grade::Changed }, what);
    }
}
