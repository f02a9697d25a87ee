//! `VirtualMachine` and `VirtualMachineInstance` of KubeVirt (<https://kubevirt.io/api-reference/>).

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read as _,
};

use flate2::read::GzDecoder;
use k8s_openapi::ByteString;
use serde_json::{Value, json};

use super::{
    Finding,
    draft::{self, Content, Draft, Link, Place, card, is_mac},
    guest, listed,
    source::{self, Item, SourceError},
    unreadable,
};
use crate::{
    advice,
    api::Quantity,
    exchange::Grade,
    render::valid::is_dns_label,
    user_data::{Kind, problems},
};

mod disks;

const HOOK: &str = "a program that changes the VM: options of QEMU take a template of the runner (docs/templates.md)";
const IGNITION: &str = "a guest does not read a configuration of Ignition from a disk of cloud-init (NoCloud): give it by QEMU's -fw_cfg, in a template of \
                        the runner (name=opt/com.coreos/config; docs/templates.md)";
const FULL: &str = "a VM has at most 64 disks";

const INSTANCETYPE: &str = "write CPUs and memory out: kubectl get vmi -o yaml shows those of a running VM";

/// The VMs of a text, also those of lists, and what became of what else KubeVirt calls a VirtualMachine.
pub(super) fn sources(text: &str) -> Result<(Vec<Item>, Vec<Finding>), SourceError> {
    let documents = match source::yaml(text) {
        // Several calls of `kubectl get -o json`. The lines stay the same.
        Err(_) if text.trim_start().starts_with('{') && text.contains("\n{") => {
            source::yaml(&text.replace("\n{", "\n--- {"))
        }
        documents => documents,
    };
    let mut objects = Vec::new();
    for document in documents? {
        unpack(document, &mut objects);
    }
    if objects.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let kinds: BTreeSet<String> = objects.iter().map(|item| of(item, "kind").to_owned()).collect();
    let is_vm = |item: &Item| {
        ["VirtualMachine", "VirtualMachineInstance"].contains(&of(item, "kind")) && item.get("spec").is_some()
    };
    let (mut vms, others): (Vec<Item>, Vec<Item>) = objects.into_iter().partition(is_vm);
    let others: Vec<Finding> = others.iter().filter_map(no_vm).collect();
    if vms.is_empty() {
        return Err(match others.first() {
            Some(Finding { lines, what, why, .. }) => {
                SourceError::new(lines.first().copied().unwrap_or(1), format!("{what}: {why}"))
            }
            None => {
                let kinds =
                    listed(kinds.iter().map(|kind| if kind.is_empty() { "without kind" } else { kind.as_str() }));
                SourceError::new(1, format!("there is no VirtualMachine in this file, only objects that are: {kinds}"))
            }
        });
    }
    let name = |item: &Item| (of(item, "metadata/namespace").to_owned(), of(item, "metadata/name").to_owned());
    let is_instance = |item: &Item| of(item, "kind") == "VirtualMachineInstance";
    let names: BTreeSet<_> = vms.iter().filter(|item| !is_instance(item)).map(name).collect();
    // `kubectl get vm,vmi` prints both.
    vms.retain(|item| !is_instance(item) || !names.contains(&name(item)));
    Ok((vms, others))
}

/// The objects of a document: those of a list, as `kubectl get` prints several, or itself.
fn unpack(document: Item, found: &mut Vec<Item>) {
    let kind = of(&document, "kind").strip_suffix("List").filter(|_| document.get("items").is_some());
    let Some(kind) = kind.map(str::to_owned) else { return found.push(document) };
    let list = document.into_items().into_iter().find(|item| item.key == "items");
    for mut item in list.into_iter().flat_map(Item::into_items) {
        // The API server leaves the kind out in a list of one kind.
        if item.get("kind").is_none() && !kind.is_empty() {
            let label = format!("{}.kind", item.label);
            item.push(Item::new("kind", label, item.line, Some(kind.clone())));
        }
        unpack(item, found);
    }
}

/// What becomes of an object that is no VM, if it is one of those that may be taken for VMs.
fn no_vm(item: &Item) -> Option<Finding> {
    let kind = of(item, "kind");
    let why = match kind {
        "VirtualMachine" | "VirtualMachineInstance" => "it has no spec",
        "VirtualMachinePool" => {
            "it makes VMs of a template: import one of them (kubectl get vm NAME -o yaml), and make a VmPool of it (docs/pools.md)"
        }
        "VirtualMachineInstanceReplicaSet" => {
            "it makes VMs of a template: import one of them (kubectl get vmi NAME -o yaml), and make a VmPool of it (docs/pools.md)"
        }
        "VirtualMachineInstancetype"
        | "VirtualMachineClusterInstancetype"
        | "VirtualMachinePreference"
        | "VirtualMachineClusterPreference" => INSTANCETYPE,
        "Template" => {
            "a template of OpenShift: `oc process --local -f FILE -p NAME=... -o yaml` prints the VM that it makes"
        }
        kind if kind.starts_with("VirtualMachine") => "it is no VM",
        _ => return None,
    };
    let what = format!("{kind} {}", of(item, "metadata/name"));
    Some(Finding { lines: vec![item.line], what: what.trim_end().to_owned(), grade: Grade::LeftOut, why: why.into() })
}

/// The text of a part of an item.
fn of<'a>(item: &'a Item, path: &str) -> &'a str {
    item.get(path).map_or("", Item::text)
}

pub(super) fn read(root: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    root.enter();
    let kind = root.get("kind");
    let template = match kind.map_or("", Item::text) {
        "VirtualMachine" => root.get("spec/template"),
        "VirtualMachineInstance" => Some(root),
        other => {
            let what = format!("{other:?} can't be read: only VirtualMachine and VirtualMachineInstance");
            return Err(SourceError::new(kind.unwrap_or(root).line, what));
        }
    };
    for key in ["apiVersion", "kind"] {
        if let Some(item) = root.get(key) {
            item.same("a VirtualMachine of vm-operator");
        }
    }
    metadata(root, draft);
    if let Some(status) = root.get("status") {
        status.whole(Grade::Same, "what KubeVirt reports");
    }
    let Some(spec) = template.and_then(|template| template.get("spec")) else {
        return Err(SourceError::new(root.line, "there is no spec.template.spec"));
    };
    root.get("spec").map(Item::enter);
    if let Some(architecture) = spec.get("architecture").filter(|it| it.text() != "amd64") {
        let what = format!("the guest needs the architecture {}: VMs are amd64", architecture.text());
        return Err(SourceError::new(architecture.line, what));
    }
    if kind.is_some_and(|kind| kind.text() == "VirtualMachine")
        && let Some(labels) = root.get("spec/template/metadata")
    {
        labels.whole(Grade::Changed, "Pods of VMs have the labels of vm-operator: templates add others (block labels)");
        for item in labels.get("annotations").into_iter().flat_map(Item::items).filter(|item| is_hook(item)) {
            item.left_out(HOOK);
        }
    }
    run_strategy(root, draft);
    placement(spec, draft);
    let domain = spec.get("domain").unwrap_or(spec).enter();
    processor(domain, draft)?;
    memory(domain, draft)?;
    resources(domain, draft);
    firmware(domain, draft);
    clock(domain, draft);
    networks(spec, domain, draft);
    disks::disks(root, spec, domain, draft);
    devices(domain, draft);
    if let Some(kind) = spec.get("volumes").into_iter().flat_map(Item::items).find_map(cloud_init_of) {
        // KubeVirt makes the instance-id of these.
        let host = spec.get("hostname").map_or_else(|| draft.name.clone(), |it| it.text().to_owned());
        let former =
            draft.namespace.as_ref().filter(|_| !host.is_empty()).map(|namespace| format!("{host}.{namespace}"));
        guest::tell_instance(draft, kind.line, &kind.label, former);
    }
    // A guest that starts on an empty disk helps nobody.
    if !draft.fills.is_empty() && draft.vm.get("state").is_some_and(|state| state == "Running") {
        draft.vm.remove("state");
        let wanted = root.get("spec/runStrategy").or_else(|| root.get("spec/running")).or(kind);
        if let Some(item) = wanted {
            item.changed("spec.vm.state is left out: start it when its disks are filled (kubectl vm start)");
        }
    }
    Ok(())
}

/// Whether an annotation changes the VM.
fn is_hook(item: &Item) -> bool {
    item.key.starts_with("hooks.kubevirt.io/")
}

/// What parts that nobody used are told.
pub(super) fn why(item: &Item) -> &'static str {
    match item.key.as_str() {
        "gpus" | "hostDevices" | "resourceClaims" => {
            "devices of a node come from a device plugin and a template (example/templates/gpu-and-usb)"
        }
        "instancetype" | "preference" => INSTANCETYPE,
        "evictionStrategy" | "migrationPolicy" => "VMs do not migrate: they are shut down",
        "tolerations"
        | "topologySpreadConstraints"
        | "priorityClassName"
        | "schedulerName"
        | "dnsPolicy"
        | "dnsConfig"
        | "livenessProbe"
        | "readinessProbe" => "a template sets it in the Pod (docs/templates.md)",
        "accessCredentials" => "keys and passwords: put them into spec.cloudInit",
        "cache" | "io" | "errorPolicy" | "blockSize" | "dedicatedIOThread" => {
            "the runner decides how QEMU reads and writes"
        }
        "shareable" => "each VM has claims of its own",
        "filesystems" => "share files by the network, or put them on a disk",
        "kernelBoot" => "the guest boots from its disks",
        "ioThreadsPolicy" | "ioThreads" => "disks have an I/O thread",
        _ => "",
    }
}

fn metadata(root: &Item, draft: &mut Draft) {
    let Some(metadata) = root.get("metadata") else { return };
    metadata.enter();
    for item in metadata.items() {
        match item.key.as_str() {
            "name" => draft.name = item.same("metadata.name").to_owned(),
            "generateName" => _ = item.changed("metadata.name"),
            "namespace" if is_dns_label(item.text()) => {
                draft.namespace = Some(item.same("metadata.namespace").to_owned());
            }
            "namespace" => item.left_out("no namespace can have this name: give another one by --namespace"),
            "labels" | "annotations" => {
                let (own, tools): (Vec<&Item>, Vec<&Item>) = item
                    .enter()
                    .items()
                    .iter()
                    .partition(|it| !it.key.contains("kubevirt.io/") && !it.key.contains("kubectl.kubernetes.io/"));
                let map = if item.key == "labels" { &mut draft.labels } else { &mut draft.annotations };
                let field = format!("metadata.{}", item.key);
                for item in own {
                    if item.key == disks::TEMPLATES {
                        item.changed("its sizes and storage classes are those of the VM's claims");
                        continue;
                    }
                    map.insert(item.key.clone(), item.same(format!("{field}.{}", item.key)).into());
                }
                for item in tools {
                    item.left_out(if is_hook(item) { HOOK } else { "it is for KubeVirt or kubectl" });
                }
            }
            "creationTimestamp" | "resourceVersion" | "uid" | "generation" | "managedFields" | "selfLink"
            | "finalizers" | "ownerReferences" => {
                item.whole(Grade::Same, "the API server sets it");
            }
            _ => {}
        }
    }
}

fn run_strategy(root: &Item, draft: &mut Draft) {
    if root.get("kind").is_some_and(|kind| kind.text() == "VirtualMachineInstance") {
        draft.set("state", "Running");
        draft.spec.insert("guestShutdownStops".into(), true.into());
        return;
    }
    if let Some(item) = root.get("spec/running") {
        draft.set("state", if item.is_yes() { "Running" } else { "Stopped" });
        item.same("spec.vm.state");
    }
    let Some(item) = root.get("spec/runStrategy") else { return };
    match item.text() {
        "Always" => draft.set("state", "Running"),
        "Halted" => draft.set("state", "Stopped"),
        "RerunOnFailure" => {
            draft.set("state", "Running");
            draft.spec.insert("guestShutdownStops".into(), true.into());
        }
        "Manual" => {}
        other => {
            item.changed(format!("spec.vm.state is left out; there is no {other}"));
            return;
        }
    }
    item.same("spec.vm.state, spec.guestShutdownStops");
}

fn placement(spec: &Item, draft: &mut Draft) {
    for key in ["nodeSelector", "affinity"] {
        if let Some(item) = spec.get(key) {
            draft.spec.insert(key.into(), item.json());
            item.whole(Grade::Same, format!("spec.{key}"));
        }
    }
    if let Some(item) = spec.get("terminationGracePeriodSeconds") {
        match item.number().filter(|seconds| *seconds <= 86_400) {
            Some(seconds) => {
                draft.set("powerdownTimeout", seconds);
                item.same("spec.vm.powerdownTimeout");
            }
            None => item.left_out("the guest has 0 to 86400 seconds to shut down: it has 900"),
        }
    }
    if let Some(item) = spec.get("architecture") {
        item.same("amd64");
    }
    if let Some(item) = spec.get("hostname") {
        let init = draft.spec.entry("cloudInit").or_insert_with(|| json!({}));
        init["metaData"]["local-hostname"] = item.same("spec.cloudInit.metaData.local-hostname").into();
    }
}

/// The data for cloud-init of a volume.
fn cloud_init_of(volume: &Item) -> Option<&Item> {
    volume.items().iter().find(|item| ["cloudInitNoCloud", "cloudInitConfigDrive"].contains(&item.key.as_str()))
}

/// CPUs as Kubernetes writes them, rounded up.
fn whole_cpus(item: &Item) -> Option<u64> {
    let text = item.text();
    if let Some(milli) = text.strip_suffix('m') {
        return milli.parse::<u64>().ok().map(|milli| milli.div_ceil(1000));
    }
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    let more = u64::from(part.bytes().any(|digit| digit != b'0'));
    let is_number = part.bytes().all(|digit| digit.is_ascii_digit());
    whole.parse::<u64>().ok().filter(|_| is_number)?.checked_add(more)
}

fn processor(domain: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let cpu = domain.get("cpu");
    for key in ["sockets", "cores", "threads", "maxSockets"] {
        if let Some(item) = cpu.and_then(|cpu| cpu.get(key)).filter(|item| item.number().is_none()) {
            return Err(unreadable(item, "number of CPUs"));
        }
    }
    let level = |key: &str| cpu.and_then(|cpu| cpu.get(key)).and_then(Item::number).unwrap_or(1);
    let (sockets, cores, threads) = (level("sockets"), level("cores"), level("threads"));
    let most = cpu.and_then(|cpu| cpu.get("maxSockets")).and_then(Item::number).unwrap_or(sockets).max(sockets);
    let requested = domain.get("resources/requests/cpu").or_else(|| domain.get("resources/limits/cpu"));
    let has_levels = cpu.is_some_and(|cpu| ["sockets", "cores", "threads"].iter().any(|key| cpu.get(key).is_some()));
    let nothing = Item::new("", "", 0, None);
    let mut words: Vec<String> = vec!["host".into()];
    if !has_levels && let Some(item) = requested {
        // KubeVirt then gives the guest as many CPUs as are requested.
        let cpus = whole_cpus(item).ok_or_else(|| unreadable(item, "number of CPUs"))?;
        draft.cpus(item, cpus, None);
    } else {
        let product = |sockets: u64| sockets.saturating_mul(cores).saturating_mul(threads);
        draft.cpus(&nothing, product(most), Some(product(sockets)));
        let is_topology =
            [sockets, threads, most].iter().any(|level| *level > 1) && draft.topology(most, 1, cores, threads);
        for key in ["sockets", "cores", "threads", "maxSockets"] {
            if let Some(item) = cpu.and_then(|cpu| cpu.get(key)) {
                item.same(if is_topology { "spec.vm.cpuTopology" } else { "spec.vm.maximumCpus" });
            }
        }
    }
    if let Some(cpu) = cpu {
        cpu.enter();
        if let Some(item) = cpu.get("model") {
            match item.text() {
                "host-passthrough" => _ = item.same("spec.vm.cpuModel: host"),
                "host-model" => _ = item.changed("spec.vm.cpuModel: host, which is the node's CPU itself"),
                name => words = vec![name.to_owned()],
            }
            if words[0] != "host" {
                item.same("spec.vm.cpuModel");
            }
        }
        for item in cpu.get("features").into_iter().flat_map(Item::items) {
            let name = item.get("name").map_or("", Item::text);
            let sign = match item.get("policy").map_or("require", Item::text) {
                "disable" | "forbid" => '-',
                _ => '+',
            };
            if !name.is_empty() && !name.contains([',', ' ']) {
                words.push(format!("{sign}{name}"));
                item.whole(Grade::Same, "spec.vm.cpuModel");
            }
        }
        for (key, what) in [
            (
                "dedicatedCpuPlacement",
                "requests of whole CPUs as limits too, and the node's CPU manager (spec.resources)",
            ),
            ("isolateEmulatorThread", "QEMU's threads share the Pod's CPUs"),
            ("numa", "the guest has one node of memory"),
        ] {
            if let Some(item) = cpu.get(key) {
                item.whole(Grade::LeftOut, what);
            }
        }
    }
    for item in domain.get("features/hyperv").into_iter().flat_map(|it| it.enter().items()) {
        let is_on = item.get("enabled").is_none_or(Item::is_yes);
        let word = match item.key.as_str() {
            "spinlocks" => format!("hv-spinlocks={}", item.get("spinlocks").and_then(Item::number).unwrap_or(4096)),
            "vendorid" => match item.get("vendorid").map(Item::text) {
                Some(id) if !id.is_empty() && id.bytes().all(|it| it.is_ascii_alphanumeric()) => {
                    format!("hv-vendor-id={id}")
                }
                _ => continue,
            },
            "synictimer" => "hv-stimer".into(),
            "relaxed" | "vapic" | "vpindex" | "runtime" | "synic" | "reset" | "frequencies" | "reenlightenment"
            | "tlbflush" | "ipi" | "evmcs" => {
                format!("hv-{}", item.key)
            }
            _ => continue,
        };
        if is_on {
            words.push(word);
        }
        item.whole(Grade::Same, "spec.vm.cpuModel");
    }
    if domain.get("clock/timer/hyperv").is_some() {
        words.push("hv-time".into());
    }
    if let Some(item) = domain.get("features/kvm/hidden") {
        if item.is_yes() {
            words.push("kvm=off".into());
        }
        item.same("spec.vm.cpuModel: kvm=off");
    }
    for key in ["acpi", "apic", "smm", "pvspinlock"] {
        if let Some(item) = domain.get("features").and_then(|it| it.get(key)) {
            let is_on = item.get("enabled").is_none_or(Item::is_yes);
            item.whole(if is_on { Grade::Same } else { Grade::Changed }, "the machine has it");
        }
    }
    domain.get("features").map(Item::enter);
    draft.cpu_model(&words.join(","));
    Ok(())
}

/// Requests and limits, after CPUs and memory are known.
fn resources(domain: &Item, draft: &mut Draft) {
    // A list that is there and empty means nothing.
    for key in ["resources", "resources/requests", "resources/limits"] {
        domain.get(key).map(Item::enter);
    }
    let mut resources = json!({});
    for kind in ["requests", "limits"] {
        for item in domain.get("resources").and_then(|it| it.get(kind)).into_iter().flat_map(Item::items) {
            if ["cpu", "memory"].contains(&item.key.as_str()) {
                resources[kind][&item.key] = item.json();
                item.same(format!("spec.resources.{kind}"));
            }
        }
    }
    // Requests alone are what the manager derives from CPUs and memory; limits are a wish.
    if let Some(item) = domain.get("resources/limits/memory") {
        // KubeVirt adds what QEMU needs by itself.
        let memory = draft.vm.get("maximumRam").and_then(Value::as_str).and_then(|text| Quantity::parse(text).ok());
        let memory = memory.map_or(1_000_000_000, |memory| memory.bytes());
        let beside = advice::overhead(memory, draft.most_cpus());
        let needed = memory.saturating_add(beside).next_multiple_of(1 << 20);
        if quantity(item).is_none_or(|limit| limit < needed) {
            resources["limits"]["memory"] = json!(format!("{}Mi", needed >> 20));
            item.changed(format!(
                "spec.resources.limits.memory: {}Mi, because QEMU needs about {}Mi beside the guest's memory, which KubeVirt adds by itself",
                needed >> 20,
                beside >> 20
            ));
        }
    }
    if resources.get("limits").is_some() {
        draft.spec.insert("resources".into(), resources);
    }
}

fn quantity(item: &Item) -> Option<u64> {
    Quantity::parse(item.text()).ok().map(|it| it.bytes())
}

fn memory(domain: &Item, draft: &mut Draft) -> Result<(), SourceError> {
    let guest = domain.get("memory/guest");
    let item =
        guest.or_else(|| domain.get("resources/requests/memory")).or_else(|| domain.get("resources/limits/memory"));
    domain.get("memory").map(Item::enter);
    let most = domain.get("memory/maxGuest");
    if let Some(item) = domain.get("memory/hugepages") {
        item.whole(Grade::LeftOut, "huge pages take a template");
    }
    let Some(item) = item else { return Ok(()) };
    if let Some(item) = [Some(item), most].into_iter().flatten().find(|item| quantity(item).is_none()) {
        return Err(unreadable(item, "size of memory"));
    }
    let bytes = quantity(item);
    let maximum = most.and_then(quantity).or(bytes);
    if maximum.is_some_and(|maximum| draft.ram(maximum, bytes)) {
        item.same("spec.vm.maximumRam");
        if let Some(most) = most {
            most.same("spec.vm.maximumRam");
            item.same("spec.vm.currentRam");
        }
    } else {
        item.left_out("this is no size that a VM can have: it gets 1G");
    }
    Ok(())
}

fn firmware(domain: &Item, draft: &mut Draft) {
    let firmware = domain.get("firmware");
    firmware.map(Item::enter);
    let efi = domain.get("firmware/bootloader/efi");
    let name = match efi {
        None => "bios",
        Some(efi) if efi.get("secureBoot").is_none_or(Item::is_yes) => "secure",
        Some(_) => "uefi",
    };
    draft.set("firmware", name);
    if let Some(loader) = domain.get("firmware/bootloader") {
        loader.whole(Grade::Same, format!("spec.vm.firmware: {name}"));
        if let Some(item) = loader.get("efi/persistent") {
            item.changed("the firmware's variables are kept, but not those of KubeVirt");
        }
    }
    if let Some(item) = domain.get("firmware/uuid") {
        match draft::uuid(item.text()) {
            Some(uuid) => {
                item.same("spec.vm.machineUuid");
                draft.set("machineUuid", uuid);
            }
            None => item.left_out("this is no UUID"),
        }
    }
    if let Some(item) = domain.get("machine") {
        item.enter();
        if let Some(kind) = item.get("type") {
            match kind.text() {
                text if text.is_empty() || text.contains("q35") => _ = kind.same("a machine of the type q35"),
                _ => _ = kind.changed("q35"),
            }
        }
    }
}

fn clock(domain: &Item, draft: &mut Draft) {
    let Some(clock) = domain.get("clock") else { return };
    clock.enter();
    if let Some(item) = clock.get("utc") {
        item.whole(Grade::Same, "spec.vm.rtcBase: utc");
        draft.set("rtcBase", "utc");
    }
    if let Some(item) = clock.get("timezone") {
        draft.set("rtcBase", "localtime");
        if draft::is_zone(item.text()) {
            draft.set("rtcTimezone", item.same("spec.vm.rtcTimezone"));
        } else {
            item.changed(
                "spec.vm.rtcBase: localtime, which is UTC here: this is no name of a time zone for spec.vm.rtcTimezone",
            );
        }
    }
    for timer in clock.get("timer").into_iter().flat_map(|timer| timer.enter().items()) {
        let policy = timer.get("tickPolicy").map_or("", Item::text);
        match (timer.key.as_str(), policy) {
            ("hyperv", _) => timer.whole(Grade::Same, "spec.vm.cpuModel: hv-time"),
            ("kvm", _) => timer.whole(Grade::Same, "KVM's guests have it"),
            ("rtc", "catchup" | "") => timer.whole(Grade::Same, "the runner's clock catches up"),
            ("pit", "delay" | "") => timer.whole(Grade::Same, "QEMU's default"),
            ("hpet", _) if timer.get("present").is_some_and(|it| !it.is_yes()) => {
                timer.whole(Grade::Changed, "the machine has an HPET if QEMU's version has one");
            }
            _ => {}
        }
    }
}

fn networks(spec: &Item, domain: &Item, draft: &mut Draft) {
    let by_name = by_name(spec.get("networks").map(Item::items).unwrap_or_default());
    let named = |name: &str| by_name.get(name).copied();
    spec.get("networks").map(Item::enter);
    if let Some(item) = domain.get("devices/autoattachPodInterface") {
        item.same("spec.vm.networks");
    }
    let Some(interfaces) = domain.get("devices/interfaces") else {
        // KubeVirt then adds one in the Pod's network.
        if domain.get("devices/autoattachPodInterface").is_none_or(Item::is_yes) {
            draft.network(Link::Pod, None, None);
            guest::tell_name(draft, domain.line, &domain.label, Some("enp1s0".into()), None);
        }
        for network in spec.get("networks").into_iter().flat_map(Item::items).filter(|it| it.get("pod").is_some()) {
            network.whole(Grade::Same, "the Pod's network");
        }
        return;
    };
    interfaces.enter();
    for item in interfaces.items() {
        item.enter();
        let name = item.get("name").map_or("", Item::text);
        let network = named(name);
        if let Some(network) = network.filter(|network| network.get("multus").is_some()) {
            network.whole(Grade::LeftOut, "a network of Multus: spec.vm.networks[].tap with a bridge of the node, or example/templates/second-network");
            item.whole(Grade::LeftOut, "its network has no equivalent");
            continue;
        }
        if item.get("sriov").is_some() || item.get("macvtap").is_some() {
            item.whole(Grade::LeftOut, "a network card of the node: see example/templates/second-network");
            continue;
        }
        let model = item.get("model").map_or("virtio", Item::text);
        let address = item.get("macAddress").map(|it| it.text().replace('-', ":"));
        let mac = address.as_deref().filter(|mac| is_mac(mac));
        let Some(words) = draft.network(Link::Pod, card(model), mac) else {
            item.whole(Grade::LeftOut, "a VM has at most 32 networks");
            continue;
        };
        let before = format!("enp{}s0", draft.cards.len() + 1);
        let own_mac = mac.filter(|_| words != "user networking");
        guest::tell_name(draft, item.line, &item.label, Some(before), own_mac);
        for key in ["name", "masquerade", "passt", "passtBinding", "slirp"] {
            if let Some(item) = item.get(key) {
                item.whole(Grade::Same, words.clone());
            }
        }
        if let Some(item) = item.get("bridge") {
            item.whole(Grade::Changed, "the guest shares the Pod's address");
        }
        if let Some(item) = item.get("model") {
            if model == "virtio" || card(model).is_some() {
                item.same("the card");
            } else {
                item.changed(format!("virtio (before: {model})"));
            }
        }
        if let Some(item) = item.get("macAddress") {
            if mac.is_some() { _ = item.same("the MAC address") } else { item.left_out("no card has this MAC address") }
        }
        if let Some(item) = item.get("ports") {
            item.whole(Grade::Changed, "all ports up to 9999 lead to the guest: kubectl vm expose makes a Service");
        }
        if let Some(item) = item.get("bootOrder") {
            item.left_out("VMs do not boot from the network");
        }
        if let Some(network) = network {
            network.whole(Grade::Same, "the Pod's network");
        }
    }
}

/// Parts of a list by their names. Of several that are called the same it is the first one.
fn by_name(list: &[Item]) -> BTreeMap<&str, &Item> {
    let mut map = BTreeMap::new();
    for item in list {
        if let Some(name) = item.get("name") {
            map.entry(name.text()).or_insert(item);
        }
    }
    map
}

/// The text of data in base64, which gzip may have compressed.
fn decoded(text: &str) -> Option<String> {
    const LARGEST: u64 = 1 << 20;
    let bytes: ByteString = serde_json::from_value(json!(text.split_whitespace().collect::<String>())).ok()?;
    let mut text = String::new();
    if bytes.0.starts_with(b"\x1f\x8b") {
        GzDecoder::new(bytes.0.as_slice()).take(LARGEST).read_to_string(&mut text).ok()?;
        return Some(text);
    }
    String::from_utf8(bytes.0).ok()
}

fn cloud_init(kind: &Item, draft: &mut Draft) {
    kind.enter();
    let is_drive = kind.key == "cloudInitConfigDrive";
    for item in kind.items() {
        let name = item.get("name").map_or("", Item::text).to_owned();
        let key = |key: &str| json!({ "secretKeyRef": { "name": name, "key": key } });
        let text = match item.key.as_str() {
            "userDataBase64" | "networkDataBase64" => decoded(item.text()),
            _ => Some(item.text().to_owned()),
        };
        let Some(text) = text else {
            item.left_out("this is no base64 of a text");
            continue;
        };
        let (field, value) = match item.key.as_str() {
            "userData" | "userDataBase64" if Kind::of(&text) == Kind::Ignition => {
                item.left_out(IGNITION);
                continue;
            }
            "userData" | "userDataBase64" => ("userData", Value::from(text.as_str())),
            "networkData" | "networkDataBase64" => ("networkConfig", Value::from(text.as_str())),
            "secretRef" => ("userDataFrom", key("userdata")),
            "networkDataSecretRef" => ("networkConfigFrom", key("networkdata")),
            _ => continue,
        };
        let named = if field == "networkConfig" { guest::network_config(&text, draft) } else { None };
        let has_names = named.is_some();
        let init = draft.spec.entry("cloudInit").or_insert_with(|| json!({}));
        init[field] = named.unwrap_or(value);
        if field.ends_with("From") {
            item.whole(
                Grade::Changed,
                format!("spec.cloudInit.{field}: the Secret needs the label vmoperator.jdrupes.org/cloud-init"),
            );
        } else if has_names {
            item.changed(
                "spec.cloudInit.networkConfig: each card is found by its MAC address (match, set-name), because its name is another one here",
            );
        } else if is_drive {
            item.changed(format!("spec.cloudInit.{field}, by the data source NoCloud"));
        } else {
            item.same(format!("spec.cloudInit.{field}"));
        }
        if field == "userData" {
            for problem in problems(&text.into()) {
                let place = problem.at.map(|(line, _)| format!("line {line} of it: ")).unwrap_or_default();
                draft.note(item.line, &item.label, Grade::Changed, format!("{place}{}", problem.message));
            }
        }
    }
}

fn devices(domain: &Item, draft: &mut Draft) {
    let Some(devices) = domain.get("devices") else { return };
    devices.enter();
    for item in devices.items() {
        match item.key.as_str() {
            "rng" => item.whole(Grade::Same, "the VM has a random number generator"),
            "tpm" => {
                draft.set("useTpm", true);
                item.whole(Grade::Same, "spec.vm.useTpm: a TPM 2.0");
                if let Some(item) = item.get("persistent") {
                    item.changed("a new TPM, whose state is kept: have BitLocker's recovery key at hand");
                }
            }
            "watchdog" => {
                let action = item.get("i6300esb/action").map_or("reset", Item::text);
                if let Some(what) = draft.watchdog(action).or_else(|| draft.watchdog("reset")) {
                    item.whole(Grade::Changed, what);
                }
            }
            "inputs" => item.whole(Grade::Same, "the VM has a USB tablet, a keyboard and a mouse"),
            "sound" => item.whole(Grade::Changed, "an Intel HDA sound card, with spec.vm.display.spice"),
            "clientPassthrough" => item.whole(Grade::Same, "spec.vm.display.spice.usbRedirects"),
            "autoattachGraphicsDevice"
            | "autoattachSerialConsole"
            | "autoattachMemBalloon"
            | "autoattachInputDevice" => {
                if item.is_yes() {
                    item.same("the VM has it")
                } else {
                    item.changed("the VM has it")
                };
            }
            "networkInterfaceMultiqueue" | "blockMultiQueue" => item.left_out("the cards have one queue"),
            _ => {}
        }
    }
}
