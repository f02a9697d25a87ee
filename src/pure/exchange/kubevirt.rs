//! A VM as a VirtualMachine of KubeVirt (`kubevirt.io/v1`). The names of its fields are those of
//! <https://github.com/kubevirt/kubevirt/blob/main/staging/src/kubevirt.io/api/core/v1/schema.go>.
//!
//! | here | there |
//! |---|---|
//! | `state`, `guestShutdownStops` | `runStrategy` |
//! | CPUs, `cpuTopology` | `domain.cpu`: cores, or sockets that can be plugged up to `maxSockets` |
//! | RAM | `domain.memory`: `guest` up to `maxGuest` |
//! | `firmware`, `machineUuid`, `useTpm` | `domain.firmware`, `devices.tpm` |
//! | a disk | `persistentVolumeClaim` with the claim that the VM has, on virtio |
//! | `pod`, `user` | the Pod network with `masquerade` |
//! | `tap` | `multus` with the bridge's name, and `bridge` |
//! | `cloudInit` | `cloudInitNoCloud`, from a Secret if it is long |

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde_json::{Map, Value, json};

use super::Exported;
use crate::{
    api::{
        CloudInit, DataSource, Firmware, Machine, Network, OnPanic, PowerState, VirtualMachine, VirtualMachineSpec,
        Watchdog, WatchdogAction, display::Display, status::Identity,
    },
    claims,
    observed::Observed,
    render::{cloud_init, networks},
    runner_config::NetworkSection,
};

/// The longest text that KubeVirt takes as `userData` or `networkData` without a Secret, in bytes.
const LONGEST_INLINE: usize = 2048;
/// The network cards that KubeVirt knows.
const MODELS: [&str; 6] = ["virtio", "e1000", "e1000e", "ne2k_pci", "pcnet", "rtl8139"];
/// What is so with every VM, for the head of the file.
pub const IN_GENERAL: [&str; 3] = [
    "The guest sees its devices at other PCI addresses, so it may name its network interfaces otherwise.",
    "The variables of the firmware and the state of the TPM (the claim of the runner's data) do not come along.",
    "Stop the VM here before it starts there: both would write to the same claims.",
];

/// The VM for KubeVirt. For a VM of the cluster the claims and the identity are those that it has.
pub fn export(vm: &VirtualMachine) -> Exported {
    let mut export = Export { vm, out: Exported::default(), volumes: Vec::new(), disks: Vec::new() };
    export.run();
    export.out
}

struct Export<'a> {
    vm: &'a VirtualMachine,
    out: Exported,
    volumes: Vec<Value>,
    disks: Vec<Value>,
}

impl Export<'_> {
    fn run(&mut self) {
        let VirtualMachineSpec {
            image,
            resources,
            node_name,
            node_selector,
            affinity,
            runner_template,
            templates,
            template_values,
            guest_shutdown_stops,
            load_balancer_service,
            cloud_init,
            permissions,
            pools,
            logging_properties,
            vm: machine,
            invalid,
        } = &self.vm.spec;
        let mut instance = Map::new();
        let domain = self.domain(machine);
        instance.insert("domain".into(), domain);
        instance.insert("terminationGracePeriodSeconds".into(), json!(machine.powerdown_timeout));
        self.out.same("spec.vm.powerdownTimeout");
        self.networks(machine, &mut instance);
        self.disks(machine);
        if let Some(data) = cloud_init {
            self.cloud_init(data, &mut instance);
        }
        if let Some(resources) = resources {
            self.resources(resources, &mut instance);
        }
        if let Some(node) = node_name {
            let selector = node_selector.clone().unwrap_or_default();
            let selector: BTreeMap<String, String> =
                selector.into_iter().chain([("kubernetes.io/hostname".to_owned(), node.clone())]).collect();
            instance.insert("nodeSelector".into(), json!(selector));
            self.out.changed("spec.nodeName", "a nodeSelector for the label kubernetes.io/hostname");
        } else if let Some(selector) = node_selector {
            instance.insert("nodeSelector".into(), json!(selector));
            self.out.same("spec.nodeSelector");
        }
        if let Some(affinity) = affinity {
            instance.insert("affinity".into(), affinity.clone());
            self.out.same("spec.affinity");
        }
        if machine.paused {
            instance.insert("startStrategy".into(), json!("Paused"));
            self.out
                .changed("spec.vm.paused", "startStrategy Paused: it begins paused, and virtctl unpause lets it go on");
        }
        for (field, is_set, why) in [
            ("spec.image", image.is_some(), "KubeVirt has its own program that runs QEMU"),
            (
                "spec.runnerTemplate",
                runner_template.source.is_some() || !runner_template.update,
                "QEMU's command line is KubeVirt's own",
            ),
            ("spec.templates", templates.is_some(), "KubeVirt has no templates for its objects"),
            ("spec.templateValues", template_values.is_some(), "KubeVirt has no templates for its objects"),
            ("spec.loadBalancerService", load_balancer_service.is_some(), "virtctl expose makes a Service"),
            (
                "spec.permissions",
                !permissions.is_empty(),
                "write a Role for virtualmachines and subresources.kubevirt.io",
            ),
            ("spec.pools", !pools.is_empty(), "KubeVirt's pools are of another sort: they make VMs, and assign none"),
            ("spec.loggingProperties", logging_properties.is_some(), "they are for the runner"),
            ("spec", invalid.is_some(), "it has fields that can't be read; correct them first"),
        ] {
            if is_set {
                self.out.left_out(field, why);
            }
        }
        instance.insert("volumes".into(), json!(self.volumes));
        instance["domain"]["devices"]["disks"] = json!(self.disks);
        let name = self.vm.name_any();
        let mut labels = self.vm.labels().clone();
        labels.retain(|label, _| !label.starts_with("app.kubernetes.io/managed-by"));
        let mut metadata = json!({ "name": name });
        if let Some(namespace) = self.vm.namespace() {
            metadata["namespace"] = json!(namespace);
        }
        if !labels.is_empty() {
            metadata["labels"] = json!(labels);
        }
        let spec = json!({
            "runStrategy": self.run_strategy(machine.state, *guest_shutdown_stops),
            "template": { "metadata": { "labels": with_name(&labels, &name) }, "spec": instance },
        });
        self.out.objects.push(json!({
            "apiVersion": "kubevirt.io/v1", "kind": "VirtualMachine", "metadata": metadata, "spec": spec,
        }));
    }

    fn run_strategy(&mut self, state: PowerState, guest_shutdown_stops: bool) -> &'static str {
        match (state, guest_shutdown_stops) {
            (PowerState::Running, false) => {
                self.out.same("spec.vm.state");
                "Always"
            }
            (PowerState::Running, true) => {
                self.out.same("spec.vm.state");
                self.out.same("spec.guestShutdownStops");
                "RerunOnFailure"
            }
            (PowerState::Stopped, true) => {
                self.out.changed(
                    "spec.guestShutdownStops",
                    "set runStrategy RerunOnFailure to start it: virtctl start sets Always",
                );
                "Halted"
            }
            (PowerState::Stopped, false) => {
                self.out.same("spec.vm.state");
                "Halted"
            }
        }
    }

    fn domain(&mut self, machine: &Machine) -> Value {
        let Machine {
            state: _,
            machine_uuid,
            use_tpm,
            firmware,
            boot_menu,
            powerdown_timeout: _,
            cpu_model,
            accelerator,
            maximum_cpus: _,
            cpu_topology: _,
            current_cpus: _,
            maximum_ram,
            current_ram,
            rtc_base,
            rtc_timezone,
            rtc_clock,
            networks: _,
            disks: _,
            display,
            // They are what was asked for once.
            reset_count: _,
            reboot_count: _,
            paused: _,
            on_panic,
            watchdog,
            hardware: _,
        } = machine;
        let mut domain = json!({
            "cpu": self.cpu(machine, cpu_model),
            "memory": { "guest": size(machine.ram().bytes()) },
            "machine": { "type": "q35" },
            "devices": { "inputs": [{ "name": "tablet", "type": "tablet", "bus": "usb" }], "rng": {} },
        });
        if machine.ram().bytes() < maximum_ram.bytes() {
            domain["memory"]["maxGuest"] = json!(size(maximum_ram.bytes()));
            self.out.changed(
                "spec.vm.currentRam",
                "memory is plugged where here a balloon gives it, and needs live migration there",
            );
        } else if current_ram.is_some() || maximum_ram.bytes() > 0 {
            self.out.same("spec.vm.maximumRam");
        }
        let (loader, is_secure) = match firmware {
            Firmware::Bios => (json!({ "bios": {} }), false),
            Firmware::Uefi | Firmware::Uefi4m => (json!({ "efi": { "secureBoot": false, "persistent": true } }), false),
            Firmware::Secure | Firmware::Secure4m => {
                (json!({ "efi": { "secureBoot": true, "persistent": true } }), true)
            }
        };
        domain["firmware"] = json!({ "bootloader": loader });
        domain["features"] = json!({ "acpi": { "enabled": true } });
        if is_secure {
            domain["features"]["smm"] = json!({ "enabled": true });
        }
        if *firmware == Firmware::Bios {
            self.out.same("spec.vm.firmware");
        } else {
            self.out.changed(
                "spec.vm.firmware",
                "its variables begin anew: entries of the boot menu that the guest wrote are lost",
            );
        }
        let uuid = machine_uuid.as_ref().or_else(|| self.identity()?.uuid.as_ref());
        if let Some(uuid) = uuid {
            domain["firmware"]["uuid"] = json!(uuid.to_lowercase());
            self.out.same("spec.vm.machineUuid");
        }
        if *use_tpm {
            domain["devices"]["tpm"] = json!({ "persistent": true });
            self.out.changed(
                "spec.vm.useTpm",
                "its state begins anew: what the guest sealed with it (disk encryption) needs the recovery key",
            );
        }
        if *boot_menu {
            self.out.left_out("spec.vm.bootMenu", "KubeVirt has none; startStrategy Paused gives time to press a key");
        }
        if *accelerator == crate::api::Accelerator::Tcg {
            self.out.left_out("spec.vm.accelerator", "emulation is a setting of all of KubeVirt (useEmulation)");
        }
        match rtc_base.as_str() {
            "utc" => domain["clock"] = json!({ "utc": {} }),
            "localtime" if rtc_timezone.is_some() => {
                domain["clock"] = json!({ "timezone": rtc_timezone });
                self.out.same("spec.vm.rtcTimezone");
            }
            "localtime" => self.out.left_out("spec.vm.rtcBase", "set domain.clock.timezone, such as Europe/Berlin"),
            _ => self.out.left_out("spec.vm.rtcBase", "the clock of a guest there is UTC or that of a time zone"),
        }
        if rtc_clock != "rt" {
            self.out.left_out("spec.vm.rtcClock", "KubeVirt chooses it");
        }
        if let Some(on_panic) = on_panic {
            domain["devices"]["panicDevices"] = json!([{ "model": "pvpanic" }]);
            if watchdog.is_none() {
                domain["devices"]["watchdog"] = json!({ "name": "watchdog", "i6300esb": { "action": "reset" } });
            }
            self.out.changed("spec.vm.onPanic", match on_panic {
                OnPanic::Restart => "another watchdog (i6300esb), which resets the guest; a guest that panics ends, and runStrategy starts it",
                OnPanic::Stop | OnPanic::Keep => {
                    "another watchdog (i6300esb), which resets the guest; a guest that panics ends, and runStrategy decides whether it starts"
                }
            });
        }
        if let Some(Watchdog { action }) = watchdog {
            let (action, what) = match action {
                WatchdogAction::Reset => ("reset", "another watchdog (i6300esb)"),
                WatchdogAction::Poweroff => {
                    ("poweroff", "another watchdog (i6300esb), and runStrategy decides whether the VM starts again")
                }
                WatchdogAction::Pause | WatchdogAction::None => {
                    ("reset", "another watchdog (i6300esb), which resets the guest")
                }
            };
            domain["devices"]["watchdog"] = json!({ "name": "watchdog", "i6300esb": { "action": action } });
            self.out.changed("spec.vm.watchdog", what);
        }
        self.display(display);
        domain
    }

    fn cpu(&mut self, machine: &Machine, model: &str) -> Value {
        let (most, now) = (machine.most_cpus(), machine.cpus());
        let (name, flags) = model.split_once(',').unwrap_or((model, ""));
        let mut cpu = match machine.cpu_topology {
            Some(topology) => {
                let (cores, threads) =
                    (topology.cores_per_die.max(1) * topology.dies_per_socket.max(1), topology.threads_per_core.max(1));
                let of_socket = cores.saturating_mul(threads);
                let sockets = now.div_ceil(of_socket);
                if topology.dies_per_socket > 1 {
                    self.out
                        .changed("spec.vm.cpuTopology.diesPerSocket", "the cores of all dies are cores of the socket");
                }
                if !now.is_multiple_of(of_socket) {
                    let all = sockets * of_socket;
                    self.out.changed("spec.vm.currentCpus", format!("{all} CPUs: only whole sockets can be plugged"));
                }
                json!({ "sockets": sockets, "cores": cores, "threads": threads, "maxSockets": topology.sockets.max(1) })
            }
            None if now < most => json!({ "sockets": now, "cores": 1, "threads": 1, "maxSockets": most }),
            None => json!({ "sockets": 1, "cores": most, "threads": 1 }),
        };
        if now < most {
            self.out.changed("spec.vm.maximumCpus", "the guest sees sockets; to plug one needs live migration there");
        } else {
            self.out.same("spec.vm.maximumCpus");
        }
        cpu["model"] = json!(if matches!(name, "host" | "max") { "host-passthrough" } else { name });
        if !flags.is_empty() {
            self.out.left_out("spec.vm.cpuModel", format!("the flags {flags}: write them as domain.cpu.features"));
        }
        cpu
    }

    fn display(&mut self, display: &Display) {
        let Display { outputs, logged_in_user, spice: _, vnc, clipboard } = display;
        if vnc.is_none() {
            self.out.changed(
                "spec.vm.display",
                "a display there is VNC: without SPICE's clipboard, sound and USB devices, and without a password",
            );
        } else {
            self.out.same("spec.vm.display.vnc");
        }
        if *outputs > 1 {
            self.out.left_out("spec.vm.display.outputs", "there is one screen");
        }
        if logged_in_user.is_some() {
            self.out.left_out("spec.vm.display.loggedInUser", "nobody logs users in there");
        }
        if clipboard.is_some() {
            self.out.left_out("spec.vm.display.clipboard", "there is none");
        }
    }

    fn identity(&self) -> Option<&Identity> {
        self.vm.status.as_ref()?.runner.identity.as_ref()
    }

    fn networks(&mut self, machine: &Machine, instance: &mut Map<String, Value>) {
        let (mut interfaces, mut networks, mut has_pod) = (Vec::new(), Vec::new(), false);
        let kept = networks::sections(self.vm);
        for (number, network) in machine.networks.iter().enumerate() {
            let name = network.name.clone().unwrap_or_else(|| format!("net{number}"));
            let field = format!("spec.vm.networks[{number}]");
            let Network { name: _, tap, user, pod } = network;
            let device = tap.as_ref().and_then(|tap| tap.device.as_deref());
            let device =
                device.or_else(|| user.as_ref()?.device.as_deref()).or_else(|| pod.as_ref()?.device.as_deref());
            if tap.is_none() && has_pod {
                self.out.left_out(field, "a VM there has one network of the Pod");
                continue;
            }
            let mut interface = json!({ "name": name, "model": self.model(&field, device) });
            let mac = kept.get(number).and_then(NetworkSection::mac);
            if let Some(mac) = mac {
                interface["macAddress"] = json!(mac.to_lowercase());
            }
            let mut there = json!({ "name": name });
            if let Some(tap) = tap {
                let bridge = tap.bridge.as_deref().unwrap_or("br0");
                interface["bridge"] = json!({});
                there["multus"] = json!({ "networkName": bridge });
                let what = format!(
                    "Multus, with a NetworkAttachmentDefinition {bridge} that you create for the bridge {bridge}"
                );
                self.out.changed(field, what);
            } else {
                has_pod = true;
                interface["masquerade"] = json!({});
                there["pod"] = json!({});
                if let Some(net) = user.as_ref().and_then(|user| user.net.as_deref()) {
                    there["pod"]["vmNetworkCIDR"] = json!(net);
                }
                let what = if user.is_some() {
                    "the Pod's network with masquerade: the guest can be reached"
                } else {
                    "the Pod's network with masquerade: the guest sees another address than that of the Pod"
                };
                self.out.changed(field, what);
            }
            interfaces.push(interface);
            networks.push(there);
        }
        if !has_pod && networks.is_empty() {
            instance["domain"]["devices"]["autoattachPodInterface"] = json!(false);
        }
        instance["domain"]["devices"]["interfaces"] = json!(interfaces);
        instance.insert("networks".into(), json!(networks));
    }

    fn model(&mut self, field: &str, device: Option<&str>) -> String {
        let name = device.unwrap_or("virtio-net");
        let name = name.strip_suffix("-pci").unwrap_or(name);
        match name {
            "virtio-net" => "virtio".into(),
            known if MODELS.contains(&known) => known.into(),
            other => {
                self.out.changed(format!("{field}.device"), format!("virtio: KubeVirt has no {other}"));
                "virtio".into()
            }
        }
    }

    fn disks(&mut self, machine: &Machine) {
        let nothing = Observed::nothing(Timestamp::UNIX_EPOCH);
        let mut order: Vec<u32> = machine.disks.iter().filter_map(|disk| disk.bootindex).collect();
        order.sort_unstable();
        order.dedup();
        let mut used = Vec::new();
        let volumes: Vec<Option<String>> = claims::volumes(self.vm).collect();
        for (number, (disk, volume)) in machine.disks.iter().zip(volumes).enumerate() {
            let field = format!("spec.vm.disks[{number}]");
            let Some(volume) = volume else {
                let image = disk.cdrom.as_ref().map_or("", |cdrom| cdrom.image.as_str());
                self.out.left_out(
                    format!("{field}.cdrom"),
                    if image.is_empty() {
                        "an empty drive".to_owned()
                    } else {
                        format!("{image}: a CD there is a volume; copy it into a claim or a containerDisk")
                    },
                );
                continue;
            };
            let claim = claims::disk_name(self.vm, &volume, &nothing);
            let mut there = json!({ "name": volume, "disk": { "bus": "virtio" } });
            if let Some(at) = disk.bootindex.and_then(|index| order.iter().position(|other| *other == index)) {
                if used.contains(&at) {
                    self.out.left_out(
                        format!("{field}.bootindex"),
                        "another disk has it; each place in the order is given once there",
                    );
                } else {
                    there["bootOrder"] = json!(at + 1);
                    used.push(at);
                }
            }
            self.disks.push(there);
            self.volumes.push(json!({ "name": volume, "persistentVolumeClaim": { "claimName": claim } }));
            self.out.same(field);
        }
        let is_ordered = !used.is_empty() && used.len() < self.disks.len();
        if is_ordered {
            self.out.changed("spec.vm.disks", "disks without a bootindex are not tried for booting there");
        }
    }

    fn cloud_init(&mut self, data: &CloudInit, instance: &mut Map<String, Value>) {
        let CloudInit { meta_data, user_data, vendor_data, network_config, user_data_from, network_config_from } = data;
        if vendor_data.is_some() {
            self.out.left_out("spec.cloudInit.vendorData", "there is none: put it into userData");
        }
        let name = self.vm.name_any();
        let mut source = json!({});
        let mut secret = Map::new();
        let texts =
            (user_data.as_ref().map(cloud_init::user_data), network_config.as_ref().map(cloud_init::network_config));
        if let (Some(Ok(text)), _) = &texts {
            if text.len() > LONGEST_INLINE {
                secret.insert("userdata".into(), json!(text));
            } else {
                source["userData"] = json!(text);
            }
            self.out.same("spec.cloudInit.userData");
        }
        if let (_, Some(Ok(text))) = &texts {
            if text.len() > LONGEST_INLINE {
                secret.insert("networkdata".into(), json!(text));
            } else {
                source["networkData"] = json!(text);
            }
            self.out.same("spec.cloudInit.networkConfig");
        }
        if !secret.is_empty() {
            let name = format!("{name}-kubevirt-cloud-init");
            for (key, field) in [("userdata", "secretRef"), ("networkdata", "networkDataSecretRef")] {
                if secret.contains_key(key) {
                    source[field] = json!({ "name": name });
                }
            }
            let mut object =
                json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": name }, "stringData": secret });
            if let Some(namespace) = self.vm.namespace() {
                object["metadata"]["namespace"] = json!(namespace);
            }
            self.out.objects.push(object);
            self.out.changed("spec.cloudInit", format!("long data is in the Secret {name}, which is created too"));
        }
        for (from, field, target, keys) in [
            (user_data_from, "spec.cloudInit.userDataFrom", "secretRef", ["userdata", "userData"]),
            (
                network_config_from,
                "spec.cloudInit.networkConfigFrom",
                "networkDataSecretRef",
                ["networkdata", "networkData"],
            ),
        ] {
            match from {
                None => {}
                Some(DataSource { secret_key_ref: Some(secret), .. }) => {
                    source[target] = json!({ "name": secret.name });
                    if keys.contains(&secret.key.as_str()) {
                        self.out.same(field);
                    } else {
                        self.out.changed(
                            field,
                            format!("the Secret {} must have the data under the key {}", secret.name, keys[0]),
                        );
                    }
                }
                Some(DataSource { secret_key_ref: None, .. }) => {
                    self.out.left_out(field, "data from a ConfigMap: copy it into a Secret");
                }
            }
        }
        if let Some(host) = meta_data.get("local-hostname").and_then(Value::as_str) {
            instance.insert("hostname".into(), json!(host));
        }
        if meta_data.keys().any(|key| key != "local-hostname") {
            self.out.left_out(
                "spec.cloudInit.metaData",
                "KubeVirt makes it: cloud-init takes the guest for a new one and runs again",
            );
        } else {
            self.out.changed(
                "spec.cloudInit.metaData",
                "the instance-id is another one: cloud-init takes the guest for a new one and runs again",
            );
        }
        if source == json!({}) {
            // There must be some data.
            source["userData"] = json!("#cloud-config\n{}\n");
        }
        self.disks.push(json!({ "name": "cloudinit", "disk": { "bus": "virtio" } }));
        self.volumes.push(json!({ "name": "cloudinit", "cloudInitNoCloud": source }));
    }

    fn resources(&mut self, resources: &crate::api::Resources, instance: &mut Map<String, Value>) {
        let mut there = json!({});
        for (name, list) in [("requests", &resources.requests), ("limits", &resources.limits)] {
            let list = list.iter().flatten();
            let (known, others): (Vec<_>, Vec<_>) =
                list.partition(|(resource, _)| matches!(resource.as_str(), "cpu" | "memory"));
            for (resource, amount) in known {
                there[name][resource.as_str()] = amount.clone();
            }
            for (resource, _) in others {
                self.out.left_out(format!("spec.resources.{name}.{resource}"), "only cpu and memory are taken there");
            }
        }
        if !resources.claims.is_empty() {
            self.out.left_out("spec.resources.claims", "write them as resourceClaims");
        }
        self.out.changed("spec.resources", "KubeVirt adds the memory that QEMU itself needs");
        instance["domain"]["resources"] = there;
    }
}

/// The labels of the VM's Pod, with one by which a Service finds it.
fn with_name(labels: &BTreeMap<String, String>, name: &str) -> BTreeMap<String, String> {
    labels
        .iter()
        .map(|(key, value)| (key.clone(), value.clone()))
        .chain([("kubevirt.io/vm".into(), name.into())])
        .collect()
}

/// An amount of memory as Kubernetes writes it.
fn size(bytes: u64) -> String {
    for (unit, factor) in [("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)] {
        if bytes > 0 && bytes.is_multiple_of(factor) {
            return format!("{}{unit}", bytes / factor);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests;
