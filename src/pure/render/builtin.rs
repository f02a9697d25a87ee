//! The built-in templates and their blocks.

/// The built-in template of QEMU's command line.
pub const QEMU_STANDARD: &str = include_str!("../../../templates/qemu/standard.yaml.j2");

/// What QEMU templates can extend: the built-in one, by its name in a set, and by the name that templates in the runner's image use.
pub(super) const BUILTIN_OF_QEMU: [(&str, &str); 2] =
    [("qemu/standard.yaml.j2", QEMU_STANDARD), ("standard.yaml.j2", QEMU_STANDARD)];

/// The built-in templates, from `templates/`.
pub const BUILTIN: [(&str, &str); 10] = [
    ("cloud-init-config-map.yaml.j2", include_str!("../../../templates/cloud-init-config-map.yaml.j2")),
    ("cloud-init-secret.yaml.j2", include_str!("../../../templates/cloud-init-secret.yaml.j2")),
    ("config-map.yaml.j2", include_str!("../../../templates/config-map.yaml.j2")),
    ("disk-pvcs.yaml.j2", include_str!("../../../templates/disk-pvcs.yaml.j2")),
    ("display-secret.yaml.j2", include_str!("../../../templates/display-secret.yaml.j2")),
    ("pod.yaml.j2", include_str!("../../../templates/pod.yaml.j2")),
    ("qemu/standard.yaml.j2", QEMU_STANDARD),
    ("relay-secret.yaml.j2", include_str!("../../../templates/relay-secret.yaml.j2")),
    ("runner-data-pvc.yaml.j2", include_str!("../../../templates/runner-data-pvc.yaml.j2")),
    ("service.yaml.j2", include_str!("../../../templates/service.yaml.j2")),
];

/// The blocks of the built-in templates: template, block, purpose, first version. They are an interface: a block keeps its name and its
/// place.
pub const BLOCKS: &[(&str, &str, &str, &str)] = &[
    ("cloud-init-config-map.yaml.j2", "labels", "labels to add", "0.1"),
    ("cloud-init-config-map.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("cloud-init-secret.yaml.j2", "labels", "labels to add", "0.1"),
    ("cloud-init-secret.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("config-map.yaml.j2", "labels", "labels to add", "0.1"),
    ("config-map.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("config-map.yaml.j2", "data", "further files beside the runner's `config.yaml`", "0.1"),
    ("disk-pvcs.yaml.j2", "labels", "labels to add to the claim of `disk`", "0.1"),
    ("disk-pvcs.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("disk-pvcs.yaml.j2", "spec", "the fields of the claim's `spec`, from `disk.spec`", "0.1"),
    ("display-secret.yaml.j2", "labels", "labels to add", "0.1"),
    ("display-secret.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("pod.yaml.j2", "labels", "labels to add; on a running VM they change at once", "0.1"),
    (
        "pod.yaml.j2",
        "annotations",
        "annotations to add, such as those of a network or a mesh; they change at once",
        "0.1",
    ),
    ("pod.yaml.j2", "spec", "the whole `spec`; with `super()`, a place for further fields of it", "0.1"),
    ("pod.yaml.j2", "network", "with tap devices, `hostNetwork` and `dnsPolicy`: the bridges are the node's", "0.1"),
    (
        "pod.yaml.j2",
        "pod_security_context",
        "`securityContext` of the Pod; with a pod network, the sysctl for its low ports",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "scheduling",
        "`nodeName`, `nodeSelector`, `affinity`; the place for tolerations and a priority (keys with 2 spaces). Another node selector takes the place of `super()`, as in the recipe node-pool",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "init_containers",
        "empty: the place for `initContainers` (the key with 2 spaces, items with 4), which run before the agent",
        "0.1",
    ),
    ("pod.yaml.j2", "agent", "the sidecar agent, one item of `initContainers`", "0.1"),
    ("pod.yaml.j2", "agent_security_context", "`securityContext` of the agent's container", "0.1"),
    (
        "pod.yaml.j2",
        "agent_resources",
        "`resources` of the agent's container: small requests, and a limit of CPU or memory where the runner's container has one",
        "0.1",
    ),
    ("pod.yaml.j2", "agent_environment", "`env` of the agent's container", "0.1"),
    (
        "pod.yaml.j2",
        "passt",
        "the sidecar passt, one item of `initContainers`, of a VM with a network of type pod",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "passt_security_context",
        "`securityContext` of passt's container: no rights, with a seccomp profile of its own",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "passt_resources",
        "`resources` of passt's container: small requests, and a limit of CPU or memory where the runner's container has one; half a CPU is reserved for it only in a Pod of the quality of service Guaranteed",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "passt_environment",
        "`env` of passt's container: `VM_RUNNER_POD_PORTS` of the block `environment`",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "containers",
        "the list of containers; with `super()`, a place for sidecars (items with 4 spaces)",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "security_context",
        "`securityContext` of the runner's container: no rights, with `NET_ADMIN` for a tap",
        "0.1",
    ),
    ("pod.yaml.j2", "resources", "`resources` of the runner's container, with its devices", "0.1"),
    ("pod.yaml.j2", "ports", "its `ports`: the display's", "0.1"),
    (
        "pod.yaml.j2",
        "environment",
        "its `env`; with `super()`, a place for further variables (items with 8 spaces)",
        "0.1",
    ),
    (
        "pod.yaml.j2",
        "volume_mounts",
        "empty: the place for further mounts in the runner's container (items with 8 spaces)",
        "0.1",
    ),
    ("pod.yaml.j2", "volumes", "empty: the place for further volumes (items with 4 spaces)", "0.1"),
    (
        "pod.yaml.j2",
        "config_sources",
        "what is projected into the runner's folder of configuration (items with 10 spaces)",
        "0.1",
    ),
    ("qemu/standard.yaml.j2", "machine", "machine type and accelerator, with the blocks up to `boot`", "0.1"),
    ("qemu/standard.yaml.j2", "firmware", "UEFI and its variables", "0.1"),
    ("qemu/standard.yaml.j2", "cpu", "model, number and topology of the CPUs", "0.1"),
    ("qemu/standard.yaml.j2", "memory", "size and kind of the memory", "0.1"),
    ("qemu/standard.yaml.j2", "clock", "the real-time clock", "0.1"),
    ("qemu/standard.yaml.j2", "boot", "the boot menu; the order is in each device's `bootindex`", "0.1"),
    ("qemu/standard.yaml.j2", "monitors", "the sockets by which the runner controls QEMU: it needs all of it", "0.1"),
    ("qemu/standard.yaml.j2", "ports", "the serial console, and the ports of the guest's agents", "0.1"),
    ("qemu/standard.yaml.j2", "root_ports", "ports for devices that are plugged while the guest runs", "0.1"),
    (
        "qemu/standard.yaml.j2",
        "devices",
        "balloon, random numbers, USB, generation ID, panic device, watchdog, TPM",
        "0.1",
    ),
    ("qemu/standard.yaml.j2", "usb", "the USB controller and the tablet", "0.1"),
    (
        "qemu/standard.yaml.j2",
        "extra_devices",
        "empty: the place for further devices; the PCI slots 7 and 17 to 1e are free",
        "0.1",
    ),
    ("qemu/standard.yaml.j2", "disks", "all disks, CD drives and the cloud-init disk, with their threads", "0.1"),
    ("qemu/standard.yaml.j2", "disk", "one disk, `disk`", "0.1"),
    ("qemu/standard.yaml.j2", "cd", "one CD drive, `cd`", "0.1"),
    ("qemu/standard.yaml.j2", "cloud_init", "the cloud-init disk", "0.1"),
    ("qemu/standard.yaml.j2", "networks", "all network cards", "0.1"),
    ("qemu/standard.yaml.j2", "network", "one network card, `network`", "0.1"),
    (
        "qemu/standard.yaml.j2",
        "network_card",
        "the last properties of the card of `network` (keys with 2 spaces)",
        "0.1",
    ),
    ("qemu/standard.yaml.j2", "display", "graphics card, SPICE or VNC, clipboard", "0.1"),
    ("qemu/standard.yaml.j2", "video", "the graphics card", "0.1"),
    ("qemu/standard.yaml.j2", "sound", "the sound card, which only SPICE has", "0.1"),
    ("relay-secret.yaml.j2", "labels", "labels to add", "0.1"),
    ("relay-secret.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("runner-data-pvc.yaml.j2", "labels", "labels to add", "0.1"),
    ("runner-data-pvc.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("runner-data-pvc.yaml.j2", "spec", "the claim's `spec`", "0.1"),
    ("service.yaml.j2", "labels", "labels to add", "0.1"),
    ("service.yaml.j2", "annotations", "annotations to add", "0.1"),
    ("service.yaml.j2", "spec", "type, selector and ports", "0.1"),
    ("service.yaml.j2", "ports", "the list of ports: the display's", "0.1"),
];

/// Renamed blocks of the built-in templates: template, old name, new name, first version with the new name.
pub(super) const RENAMED_BLOCKS: &[Renamed] = &[];
/// An entry of [`RENAMED_BLOCKS`].
pub(super) type Renamed = (&'static str, &'static str, &'static str, &'static str);
