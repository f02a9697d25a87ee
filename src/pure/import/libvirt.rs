//! Domains of libvirt: `virsh dumpxml` (<https://libvirt.org/formatdomain.html>).

use super::{
    draft::{self, Content, DataFile, Draft, Link, Place, SMALL_VARIABLES},
    guest,
    source::{self, Item, SourceError},
    unreadable,
};
use crate::exchange::Grade;

mod devices;

/// The domains of a text: one, those in `<domains>`, or one after the other, as several calls of `virsh dumpxml` print them.
pub(super) fn sources(text: &str) -> Result<Vec<Item>, SourceError> {
    const AROUND: &str = "domains";
    match source::xml_parts(text, AROUND) {
        // The lines stay the same.
        Err(_) if text.matches("</domain").count() > 1 => {
            source::xml_parts(&format!("<{AROUND}>{}</{AROUND}>", source::undeclared(text)), AROUND)
        }
        parts => parts,
    }
}

/// Reads a domain.
pub(super) fn read(domain: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    if domain.key != "domain" {
        let what = format!("<{}> is no domain: `virsh dumpxml NAME` prints one", domain.key);
        return Err(SourceError::new(domain.line, what));
    }
    domain.enter();
    if let Some(kind) = domain.get("@type") {
        match kind.text() {
            "kvm" => _ = kind.same("KVM, if it works on the node"),
            "qemu" => _ = kind.changed("KVM where it works on the node: spec.vm.accelerator: tcg emulates, as there"),
            other => {
                let what = format!("this is a domain of {other}: only those of kvm and qemu can be read");
                return Err(SourceError::new(kind.line, what));
            }
        }
    }
    if let Some(id) = domain.get("@id") {
        id.same("a number of the running domain");
    }
    if let Some(name) = domain.get("name") {
        draft.name = name.same("metadata.name").to_owned();
    }
    for (key, annotation) in [("title", "title"), ("description", "description")] {
        if let Some(text) = domain.get(key) {
            let annotation = format!("kubernetes.io/{annotation}");
            draft.annotations.insert(annotation.clone(), text.same(format!("the annotation {annotation}")).into());
        }
    }
    if let Some(item) = domain.get("uuid") {
        match draft::uuid(item.text()) {
            Some(uuid) => {
                item.same("spec.vm.machineUuid");
                draft.set("machineUuid", uuid);
            }
            None => {
                let text = super::shortened(item.text());
                item.left_out(format!("{text:?} is no UUID: the VM gets a new one, which its guest may notice"));
            }
        }
    }
    memory(domain, draft)?;
    cpus(domain, draft)?;
    if let Some(item) = domain.get("sysinfo").filter(|it| it.get("@type").is_some_and(|it| it.text() == "fwcfg")) {
        item.whole(Grade::LeftOut, FW_CFG);
    }
    system(domain, draft)?;
    features(domain);
    cpu_model(domain, draft);
    clock(domain, draft);
    power(domain, draft);
    if let Some(devices) = domain.get("devices") {
        devices::read(devices.enter(), draft);
    }
    boot_order(domain, draft);
    Ok(())
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.label.as_str() {
        label if label.starts_with("<disk/driver ") => "the runner decides how QEMU reads and writes",
        "<hostdev>" => "devices of a node come from a device plugin and a template (example/templates/gpu-and-usb)",
        "<filesystem>" => "share files by the network, or put them on a disk",
        "<cputune>" | "<numatune>" | "<iothreads>" | "<blkiotune>" => {
            "requests, limits and the node decide (spec.resources)"
        }
        "<memoryBacking>" => "huge pages and locked memory take a template",
        "<qemu:commandline>" | "<commandline>" => "options of QEMU take a template of the runner (docs/templates.md)",
        "<metadata>" => "it is for other programs",
        "<pm>" => "the firmware decides about sleep",
        "<lease>" | "<disk/iotune>" => "nothing limits or locks the disk",
        "<interface/vlan>" => "a bridge of the node has its VLAN: use another one for each",
        "<interface/bandwidth>" => "the rate is not limited",
        "<parallel>" => "the VM has no parallel port",
        "<smartcard>" => "smart cards are not passed on",
        "<nvram>" | "<memory>" | "<pstore>" | "<crypto>" => "the VM has no such device",
        "<seclabel>" => "the Pod has its own isolation",
        "<launchSecurity>" => "encrypted memory (SEV, TDX) is not offered",
        "<vsock>" | "<shmem>" => "a Pod offers no such channel",
        "<sysinfo>" | "<os/smbios>" => "SMBIOS has the machine's UUID only",
        "<iommu>" => "the machine has no IOMMU for its guest",
        "<maxMemory>" | "<maxMemory slots>" => "the memory can grow to spec.vm.maximumRam",
        _ => "",
    }
}

/// A size with libvirt's units, in bytes (<https://libvirt.org/formatdomain.html#memory-allocation>).
fn bytes(item: &Item, default: &str) -> Option<u64> {
    let unit = item.get("@unit").map_or(default, |unit| unit.same("a unit"));
    let factor = match unit {
        "b" | "bytes" => 1,
        "KB" => 1_000,
        "k" | "K" | "KiB" => 1 << 10,
        "MB" => 1_000_000,
        "M" | "MiB" => 1 << 20,
        "GB" => 1_000_000_000,
        "G" | "GiB" => 1 << 30,
        "TB" => 1_000_000_000_000,
        "T" | "TiB" => 1 << 40,
        _ => return None,
    };
    item.number()?.checked_mul(factor)
}

/// What is said of entries of QEMU's fw_cfg, such as a configuration of Ignition.
const FW_CFG: &str = "entries of fw_cfg, such as a configuration of Ignition, take a template of the runner with -fw_cfg (docs/templates.md)";

fn memory(domain: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let Some(memory) = domain.get("memory") else { return Ok(()) };
    let current = domain.get("currentMemory");
    if let Some(item) = [Some(memory), current].into_iter().flatten().find(|item| bytes(item, "KiB").is_none()) {
        return Err(unreadable(item, "size of memory"));
    }
    let maximum = bytes(memory, "KiB");
    if maximum.is_some_and(|maximum| draft.ram(maximum, current.and_then(|current| bytes(current, "KiB")))) {
        for (item, field) in [(Some(memory), "spec.vm.maximumRam"), (current, "spec.vm.currentRam")] {
            let Some(item) = item else { continue };
            match bytes(item, "KiB") {
                Some(bytes) if !bytes.is_multiple_of(1 << 20) => _ = item.changed(format!("{field}, in whole MiB")),
                _ => _ = item.same(field),
            }
        }
    } else {
        memory.left_out("a VM has 1Mi or more of memory: it gets 1G");
        draft.set("maximumRam", "1G");
    }
    Ok(())
}

fn cpus(domain: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    if let Some(vcpu) = domain.get("vcpu") {
        let current = vcpu.get("@current");
        if let Some(placement) = vcpu.get("@placement") {
            placement.same("the kubelet places CPUs");
        }
        if let Some(current) = current {
            current.same("spec.vm.currentCpus");
        }
        if let Some(item) = current.filter(|item| item.number().is_none()) {
            return Err(unreadable(item, "number of CPUs"));
        }
        match vcpu.number() {
            Some(most) => draft.cpus(vcpu, most, current.and_then(Item::number)),
            None => return Err(unreadable(vcpu, "number of CPUs")),
        }
    }
    // The list of CPUs: those that are on count.
    if let Some(list) = domain.get("vcpus") {
        list.whole(Grade::Changed, "which CPUs are plugged is the runner's choice");
    }
    let Some(topology) = domain.get("cpu/topology") else { return Ok(()) };
    let level = |key: &str| topology.get(key).map_or(Some(1), Item::number);
    let levels = [level("@sockets"), level("@dies"), level("@cores"), level("@threads")];
    let clusters = level("@clusters").unwrap_or(1);
    let all = draft.vm.get("maximumCpus").and_then(serde_json::Value::as_u64).unwrap_or(1);
    if let [Some(sockets), Some(dies), Some(cores), Some(threads)] = levels
        && clusters == 1
        && [dies, cores, threads].iter().try_fold(sockets, |all, level| all.checked_mul(*level)) == Some(all)
        && draft.topology(sockets, dies, cores, threads)
    {
        topology.whole(Grade::Same, "spec.vm.cpuTopology");
    } else {
        topology.whole(Grade::Changed, "spec.vm.maximumCpus without a topology: a VM can't have this one");
    }
    Ok(())
}

/// The firmware, the machine, and what boots.
fn system(domain: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let Some(system) = domain.get("os") else { return Ok(()) };
    system.enter();
    if let Some(kind) = system.get("type") {
        if kind.text() != "hvm" {
            let what = format!("a guest of type {:?} can't be read: only hvm", kind.text());
            return Err(SourceError::new(kind.line, what));
        }
        kind.same("a virtual machine");
        match kind.get("@arch") {
            Some(arch) if arch.text() == "x86_64" => _ = arch.same("x86_64"),
            Some(arch) if arch.text() == "i686" => _ = arch.changed("x86_64, on which guests for i686 run too"),
            Some(arch) => {
                let what = format!("the guest needs the architecture {}: VMs are x86_64", arch.text());
                return Err(SourceError::new(arch.line, what));
            }
            None => {}
        }
        if let Some(machine) = kind.get("@machine") {
            if machine.text().contains("q35") {
                machine.same("a machine of the type q35, of the runner's version");
            } else {
                machine
                    .changed("q35, with other controllers and PCI addresses: Windows may want to be activated again");
            }
        }
    }
    firmware(system, draft);
    if let Some(menu) = system.get("bootmenu") {
        menu.whole(Grade::Same, "spec.vm.bootMenu");
        draft.set("bootMenu", menu.get("@enable").is_some_and(Item::is_yes));
    }
    for (key, what) in
        [("kernel", "the kernel"), ("initrd", "the initrd"), ("cmdline", "the command line"), ("dtb", "it")]
    {
        if let Some(item) = system.get(key) {
            item.left_out(format!(
                "the guest boots from its disks: put {what} there, or write a template of the runner"
            ));
        }
    }
    Ok(())
}

fn firmware(system: &Item, draft: &mut Draft) {
    let loader = system.get("loader");
    let automatic = system.get("@firmware");
    let is_flash = loader.and_then(|it| it.get("@type")).is_some_and(|it| it.text() == "pflash");
    let is_uefi = automatic.map_or(is_flash, |it| it.text() == "efi");
    let feature = |name: &str| {
        let mut features = system.get("firmware").into_iter().flat_map(|firmware| firmware.all("feature"));
        let feature = features.find(|it| it.get("@name").is_some_and(|it| it.text() == name))?;
        feature.get("@enabled").map(Item::is_yes)
    };
    // Without keys in its variables the firmware starts everything.
    let is_secure = feature("enrolled-keys").unwrap_or(feature("secure-boot") == Some(true))
        || loader.and_then(|it| it.get("@secure")).is_some_and(Item::is_yes)
        || loader.is_some_and(|it| it.text().contains("secboot"));
    let nvram = system.get("nvram");
    let files = [loader, nvram, nvram.and_then(|it| it.get("@template"))];
    let is_large = files.into_iter().flatten().any(|it| it.text().to_lowercase().contains("4m"));
    let firmware = match (is_uefi, is_secure, is_large) {
        (false, ..) => "bios",
        (true, false, false) => "uefi",
        (true, false, true) => "uefi-4m",
        (true, true, false) => "secure",
        (true, true, true) => "secure-4m",
    };
    draft.set("firmware", firmware);
    let became = format!("spec.vm.firmware: {firmware}");
    for item in [automatic, system.get("firmware")].into_iter().flatten() {
        item.whole(Grade::Same, became.clone());
    }
    if let Some(loader) = loader {
        loader.whole(Grade::Same, became.clone());
        if !is_uefi && !loader.text().is_empty() && !loader.text().ends_with("bios.bin") {
            loader.changed("SeaBIOS of the runner's image");
        }
    }
    let Some(nvram) = nvram else { return };
    let file = nvram.get("source/@file").or_else(|| nvram.get("source/@dev")).unwrap_or(nvram).text();
    if file.is_empty() {
        nvram.whole(Grade::Same, "the runner makes the firmware's variables");
    } else {
        // Distributions call the smaller firmware so, and the larger one by its size.
        let is_small = !is_large && loader.is_some_and(|it| it.text().contains("OVMF_CODE"));
        if is_uefi && is_small {
            return nvram.whole(Grade::LeftOut, SMALL_VARIABLES);
        }
        let size =
            if is_large { "" } else { "; variables of 131072 bytes can't be kept: they are of a firmware of 2 MiB" };
        nvram.whole(Grade::Changed, format!("the firmware's variables have to be copied (see the comments){size}"));
        let is_qcow2 = file.ends_with(".qcow2") || nvram.get("@format").is_some_and(|it| it.text() == "qcow2");
        let from = Place::File(file.to_owned());
        draft.data.push(DataFile { from, file: "fw-vars.fd", variables: Some(is_qcow2) });
    }
}

/// ACPI and the like, which every VM has.
fn features(domain: &Item) {
    let Some(features) = domain.get("features") else { return };
    features.enter();
    for feature in features.items() {
        let is_off = feature.get("@state").is_some_and(|state| state.text() == "off");
        match feature.key.as_str() {
            "acpi" | "apic" | "pae" | "pmu" | "vmport" | "smm" | "ioapic" if !is_off => {
                feature.whole(Grade::Same, "the machine has it");
            }
            "acpi" | "apic" | "pae" | "pmu" | "smm" => feature.whole(Grade::Changed, "the machine has it always"),
            "vmport" => feature.whole(Grade::Changed, "the machine has a VMware port"),
            // The CPU model tells the guest.
            "hyperv" | "kvm" => _ = feature.enter(),
            _ => {}
        }
    }
}

/// The words of QEMU's option `-cpu` for what libvirt calls features.
fn cpu_model(domain: &Item, draft: &mut Draft) {
    let mut words = Vec::new();
    let cpu = domain.get("cpu");
    if let Some(cpu) = cpu {
        let mode = cpu.get("@mode").map_or("custom", |mode| mode.same("spec.vm.cpuModel"));
        for key in ["@match", "@check", "@migratable"] {
            if let Some(item) = cpu.get(key) {
                item.same("QEMU's default");
            }
        }
        cpu.enter();
        let model = cpu.get("model");
        words.push(match (mode, model) {
            ("host-passthrough" | "host-model", model) => {
                if let Some(model) = model {
                    model.whole(Grade::Same, "the node's CPU");
                }
                if let Some(mode) = cpu.get("@mode").filter(|_| mode == "host-model") {
                    mode.changed("spec.vm.cpuModel: host, which is the node's CPU itself");
                }
                "host".to_owned()
            }
            ("maximum", _) => "max".to_owned(),
            (_, Some(model)) if !model.text().is_empty() => {
                model.whole(Grade::Same, "spec.vm.cpuModel");
                model.text().to_owned()
            }
            _ => "qemu64".to_owned(),
        });
        for feature in cpu.all("feature") {
            let name = feature.get("@name").map(Item::text).unwrap_or_default();
            let policy = feature.get("@policy").map_or("require", Item::text);
            let is_word =
                !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
            let sign = match policy {
                "force" | "require" | "optional" => '+',
                "disable" | "forbid" => '-',
                _ => continue,
            };
            if is_word {
                feature.whole(Grade::Same, "spec.vm.cpuModel");
                words.push(format!("{sign}{name}"));
            }
        }
    }
    let hints = domain.get("features/hyperv").into_iter().chain(domain.get("features/kvm"));
    for hint in hints {
        enlightenments(hint, &mut words);
    }
    if words.is_empty() {
        draft.set("cpuModel", "qemu64");
        return;
    }
    // Without <cpu> it is QEMU's default, and only the words of the enlightenments follow.
    if cpu.is_none() {
        words.insert(0, "qemu64".into());
    }
    draft.cpu_model(&words.join(","));
}

/// What tells a guest that it runs on a hypervisor (<https://www.qemu.org/docs/master/system/i386/hyperv.html>).
fn enlightenments(list: &Item, words: &mut Vec<String>) {
    let is_hyperv = list.key == "hyperv";
    if let Some(mode) = list.get("@mode") {
        if mode.text() == "passthrough" {
            mode.same("spec.vm.cpuModel: hv-passthrough");
            words.push("hv-passthrough".into());
        } else {
            mode.same("spec.vm.cpuModel");
        }
    }
    for item in list.items() {
        let is_on = item.get("@state").is_some_and(Item::is_yes);
        let word = match (is_hyperv, item.key.as_str()) {
            (_, key) if key.starts_with('@') => continue,
            (_, _) if !is_on => {
                item.whole(Grade::Same, "it is off");
                continue;
            }
            (false, "hidden") => "kvm=off".to_owned(),
            (false, "hint-dedicated") => "kvm-hint-dedicated".to_owned(),
            (false, "poll-control") => "kvm-poll-control".to_owned(),
            (true, "spinlocks") => match item.get("@retries") {
                Some(retries) => match retries.number() {
                    Some(number) => format!("hv-spinlocks={number}"),
                    None => continue,
                },
                None => "hv-spinlocks=8191".to_owned(),
            },
            (true, "vendor_id") => match item.get("@value").map(Item::text) {
                Some(id) if !id.is_empty() && id.bytes().all(|byte| (b' '..=b'~').contains(&byte) && byte != b',') => {
                    format!("hv-vendor-id={id}")
                }
                _ => continue,
            },
            (true, "stimer") if item.get("direct/@state").is_some_and(Item::is_yes) => {
                "hv-stimer,hv-stimer-direct".into()
            }
            (true, "tlbflush") => {
                let parts = [("direct", ",hv-tlbflush-direct"), ("extended", ",hv-tlbflush-ext")];
                let has = |part: &str| item.get(part).and_then(|it| it.get("@state")).is_some_and(Item::is_yes);
                let words = parts.into_iter().filter(|(part, _)| has(part)).map(|(_, word)| word);
                format!("hv-tlbflush{}", words.collect::<String>())
            }
            (
                true,
                "relaxed" | "vapic" | "vpindex" | "runtime" | "synic" | "stimer" | "reset" | "frequencies"
                | "reenlightenment" | "ipi" | "evmcs" | "emsr_bitmap" | "avic" | "xmm_input",
            ) => {
                format!("hv-{}", item.key.replace('_', "-"))
            }
            _ => continue,
        };
        item.whole(Grade::Same, format!("spec.vm.cpuModel: {word}"));
        words.push(word);
    }
}

fn clock(domain: &Item, draft: &mut Draft) {
    let Some(clock) = domain.get("clock") else { return };
    let offset = clock.enter().get("@offset");
    match offset.map_or("utc", Item::text) {
        "utc" => {}
        "localtime" => draft.set("rtcBase", "localtime"),
        _ => {}
    }
    if let Some(offset) = offset {
        match offset.text() {
            "utc" => _ = offset.same("spec.vm.rtcBase"),
            "localtime" => {
                _ = offset.changed(
                    "spec.vm.rtcBase: localtime, which is UTC here until spec.vm.rtcTimezone names the zone of the host, such as Europe/Berlin",
                )
            }
            "timezone" if clock.get("@timezone").is_some_and(|it| draft::is_zone(it.text())) => {
                let zone = clock.get("@timezone").map_or("", |it| it.same("spec.vm.rtcTimezone"));
                draft.set("rtcBase", "localtime");
                draft.set("rtcTimezone", zone);
                offset.same("spec.vm.rtcBase: localtime");
            }
            other => _ = offset.changed(format!("spec.vm.rtcBase: utc; there is no {other}")),
        }
    }
    if let Some(adjustment) = clock.get("@adjustment").filter(|it| it.text() == "reset") {
        adjustment.same("each start begins with the base");
    }
    for timer in clock.all("timer") {
        let name = timer.get("@name").map_or("", Item::text);
        let policy = timer.get("@tickpolicy").map_or("", Item::text);
        let present = timer.get("@present").map_or("", Item::text);
        match (name, policy, present) {
            ("rtc", "catchup" | "", _) => timer.whole(Grade::Same, "the runner's clock catches up"),
            ("pit", "delay" | "", _) => timer.whole(Grade::Same, "QEMU's default"),
            ("kvmclock", _, "" | "yes") => timer.whole(Grade::Same, "KVM's guests have it"),
            ("hpet", _, "no") => timer.whole(Grade::Changed, "the machine has an HPET if QEMU's version has one"),
            ("hypervclock", _, "" | "yes") => {
                timer.whole(Grade::Same, "spec.vm.cpuModel: hv-time");
                let model = draft.vm.get("cpuModel").and_then(serde_json::Value::as_str).unwrap_or("host").to_owned();
                draft.cpu_model(&format!("{model},hv-time"));
            }
            _ => {}
        }
    }
}

/// What happens when the guest ends.
fn power(domain: &Item, draft: &mut Draft) {
    if let Some(item) = domain.get("on_poweroff") {
        match item.text() {
            "restart" => _ = item.same("the guest starts again"),
            "destroy" => _ = item.same("spec.guestShutdownStops: true"),
            other => _ = item.changed(format!("spec.guestShutdownStops: true; there is no {other}")),
        }
        draft.spec.insert("guestShutdownStops".into(), (item.text() != "restart").into());
    } else {
        draft.spec.insert("guestShutdownStops".into(), true.into());
    }
    if let Some(item) = domain.get("on_reboot") {
        match item.text() {
            "restart" => _ = item.same("the guest starts again"),
            other => _ = item.changed(format!("the guest starts again; there is no {other}")),
        }
    }
    let panic = domain.get("devices/panic");
    let Some(item) = domain.get("on_crash") else { return };
    if panic.is_none() {
        item.same("without a panic device nobody hears of it, as there");
        return;
    }
    let (action, is_same) = match item.text() {
        "restart" => ("restart", true),
        "preserve" => ("keep", true),
        "destroy" => ("stop", true),
        "coredump-restart" => ("restart", false),
        _ => ("stop", false),
    };
    draft.set("onPanic", action);
    if is_same {
        item.same(format!("spec.vm.onPanic: {action}"));
    } else {
        item.changed(format!("spec.vm.onPanic: {action}, without a copy of the memory"));
    }
}

/// `<os><boot dev=...>`: the first device of each kind, in this order. Devices with an order of their own have it already.
fn boot_order(domain: &Item, draft: &mut Draft) {
    let Some(system) = domain.get("os") else { return };
    for (index, boot) in system.all("boot").enumerate() {
        boot.enter();
        let Some(device) = boot.get("@dev") else { continue };
        let key = match device.text() {
            "hd" => "volumeClaimTemplate",
            "cdrom" => "cdrom",
            "network" => {
                device.left_out("VMs do not boot from the network");
                continue;
            }
            other => {
                device.left_out(format!("VMs do not boot from {other}"));
                continue;
            }
        };
        match draft.disks.iter_mut().find(|disk| disk.get(key).is_some()) {
            Some(disk) if disk.get("bootindex").is_none() => disk["bootindex"] = index.into(),
            _ => {}
        }
        device.same("bootindex");
    }
}
