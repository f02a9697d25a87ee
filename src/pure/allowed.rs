//! Which parts of a VM an administrator has not allowed.
//!
//! Who may create VMs gets VMs. What reaches further than a VM (the network of a node, an image of one's own, a certain node, a copy of
//! another's disk, ...) is in a list of the manager's configuration, which is empty by default ([`crate::config::Allowed`]), or is bound to the
//! VM by a rule. A VM with such a part is not rendered, so nothing is applied for it; what runs already goes on.
//!
//! [`refusals`] is the one place that decides. It takes every struct of the spec apart without `..`, so a new field does not compile before
//! somebody has decided what it may reach. The policy of `deploy/vm-policy.yaml` has the same rules for the API server.
//!
//! | fields | rule |
//! |---|---|
//! | `image` | the installation's own, `runnerImages`, `legacyRunnerImages` |
//! | `nodeName` | `nodeNames` |
//! | `affinity`: other namespaces | `affinityNamespaces` |
//! | `resources`: names of resources | CPUs, memory, storage, huge pages and the devices of VMs; `extendedResources` |
//! | `loadBalancerService`: keys | `services.labels`, `services.annotations`, if VMs have such Services |
//! | `vm.networks`: `tap` | `networks.bridges`; never beside `user` |
//! | with a tap: URLs of CDs | `networks.cdUrls` |
//! | with a tap or a Service: the display's port | 5800 to 5999 and `networks.displayPorts` |
//! | `volumeClaimTemplate` | `claims.labels`, `claims.annotations`, `claims.dataSources`, `claims.volumeNames`; no unknown field |
//! | texts for a legacy runner | no characters that mean something to its template, no file of the node |
//!
//! A Pod keeps what it was made with until it is replaced: one in the network of its node, or with a privileged runner, stays so when the spec
//! has no tap or another image any more. So what such a Pod may not have waits for the next start ([`Reach`]), and nothing of it reaches
//! that Pod.
//!
//! Labels of the VM are not refused: its Pod gets those of `podLabels` ([`crate::render`]).

use std::fmt;

use kube::ResourceExt;
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{
    api::{Cdrom, ClaimMetadata, Disk, Machine, NullableTexts, Resources, RunnerTemplate, VolumeClaimTemplate},
    api::{
        CloudInit, Display, Image, Network, PodNetwork, ServiceMetadata, Spice, TapNetwork, UserNetwork,
        VirtualMachine, VirtualMachineSpec, Vnc, cd::Cd,
    },
    config::{
        Allowed, ReconcilerConfig,
        allowed::{Patterns, is_named_like_legacy, repository},
    },
    runner_config::paths::IMAGE_REPOSITORY,
};

/// The bridge of a tap network that names none.
pub const DEFAULT_BRIDGE: &str = "br0";
/// The resources that every container may have.
const RESOURCES: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
/// The fields of a claim's spec that this module knows.
const CLAIM_FIELDS: [&str; 9] = [
    "accessModes",
    "dataSource",
    "dataSourceRef",
    "resources",
    "selector",
    "storageClassName",
    "volumeAttributesClassName",
    "volumeMode",
    "volumeName",
];
/// The most refusals in a message.
const MOST_IN_A_MESSAGE: usize = 4;
/// The most characters of a value in a message.
const LONGEST_VALUE: usize = 120;

/// A part of a VM that is not allowed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NotAllowed {
    /// The field, such as `spec.vm.networks[0].tap.bridge`.
    pub field: String,
    /// Its value, as a list would have it.
    pub value: String,
    /// What refuses it.
    pub rule: Rule,
}

/// What refuses a part of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Rule {
    /// It is not in a list of the configuration.
    List(List),
    /// It can't be allowed. The text says why, for people.
    Never(&'static str),
}

/// A list of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
#[allow(missing_docs)]
pub enum List {
    Bridges,
    CdUrls,
    DisplayPorts,
    RunnerImages,
    LegacyRunnerImages,
    NodeNames,
    AffinityNamespaces,
    ExtendedResources,
    DataSources,
    VolumeNames,
    ClaimAnnotations,
    ClaimLabels,
    ServiceAnnotations,
    ServiceLabels,
}

impl List {
    /// Its keys in the section `/Reconciler`: that of a map or nothing, and its own.
    pub const fn keys(self) -> (Option<&'static str>, &'static str) {
        match self {
            Self::Bridges => (Some("networks"), "bridges"),
            Self::CdUrls => (Some("networks"), "cdUrls"),
            Self::DisplayPorts => (Some("networks"), "displayPorts"),
            Self::RunnerImages => (None, "runnerImages"),
            Self::LegacyRunnerImages => (None, "legacyRunnerImages"),
            Self::NodeNames => (None, "nodeNames"),
            Self::AffinityNamespaces => (None, "affinityNamespaces"),
            Self::ExtendedResources => (None, "extendedResources"),
            Self::DataSources => (Some("claims"), "dataSources"),
            Self::VolumeNames => (Some("claims"), "volumeNames"),
            Self::ClaimAnnotations => (Some("claims"), "annotations"),
            Self::ClaimLabels => (Some("claims"), "labels"),
            Self::ServiceAnnotations => (Some("services"), "annotations"),
            Self::ServiceLabels => (Some("services"), "labels"),
        }
    }
}

impl fmt::Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.keys() {
            (Some(map), key) => write!(f, "{map}.{key}"),
            (None, key) => f.write_str(key),
        }
    }
}

impl fmt::Display for NotAllowed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { field, value, rule } = self;
        let short: String = value.chars().take(LONGEST_VALUE).collect();
        let dots = if short.len() < value.len() { "..." } else { "" };
        match rule {
            Rule::List(list) => write!(
                f,
                "{field}: {short:?}{dots} is not allowed here; an administrator can add it to {list} in the manager's configuration"
            ),
            Rule::Never(why) => write!(f, "{field}: {short:?}{dots} is not allowed: {why}"),
        }
    }
}

/// What the VM's Pod reaches that exists, whatever the spec has become since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// It is in the network of its node.
    pub is_in_network_of_node: bool,
    /// Its runner is a legacy one, which runs privileged.
    pub is_legacy: bool,
}

/// The parts of a VM that are not allowed, in the order of its fields: by the spec alone, or, with the `reach` of a Pod that exists, by what such
/// a Pod would make of the spec.
pub fn refusals(vm: &VirtualMachine, reach: Reach, config: &ReconcilerConfig) -> Vec<NotAllowed> {
    // Of the metadata only labels reach another object, and they are filtered and not refused. The status is the manager's and the runner's.
    let VirtualMachine { metadata: _, spec, status: _ } = vm;
    let VirtualMachineSpec {
        image,
        resources,
        node_name,
        // The scheduler decides, and a VM has no tolerations: nodes are kept free of VMs by taints.
        node_selector: _,
        affinity,
        runner_template,
        // An administrator makes the sets and the schemas of their values; `templates` checks the values.
        templates: _,
        template_values: _,
        guest_shutdown_stops: _,
        load_balancer_service,
        cloud_init,
        // What people may do with this VM, in programs that offer it to them.
        permissions: _,
        // Pools of the same namespace. Who may create VMs beside a pool can offer one to its users.
        pools: _,
        logging_properties,
        vm: machine,
        invalid: _,
    } = spec;
    let image_name = image.as_ref().and_then(Image::reference);
    let next_image = image_name.clone().unwrap_or_else(|| config.own_image());
    let is_legacy = reach.is_legacy || config.allowed.legacy_runner_images.contain(&next_image);
    let is_tapped = reach.is_in_network_of_node || machine.networks.iter().any(|network| network.tap.is_some());
    let namespace = vm.namespace();
    let mut check = Check { config, allowed: &config.allowed, is_legacy, is_tapped, found: Vec::new() };
    check.image(image_name.as_deref());
    check.resources(resources.as_ref());
    let node_name = node_name.as_deref().filter(|name| !name.is_empty());
    check.listed("spec.nodeName", node_name, &config.allowed.node_names, List::NodeNames);
    check.affinity(affinity.as_ref(), namespace.as_deref());
    check.runner_template(runner_template);
    check.service(load_balancer_service.as_ref());
    let has_service = config.load_balancer_service.defaults(load_balancer_service.as_ref()).is_some();
    check.cloud_init(cloud_init.as_ref());
    check.logging(logging_properties.as_deref());
    check.machine(machine, has_service);
    check.found
}

/// The refusals in one message; `None` if there are none.
pub fn message(refusals: &[NotAllowed]) -> Option<String> {
    let texts: Vec<String> = refusals.iter().take(MOST_IN_A_MESSAGE).map(ToString::to_string).collect();
    let more = match refusals.len().saturating_sub(MOST_IN_A_MESSAGE) {
        0 => String::new(),
        number => format!("; and {number} more"),
    };
    if texts.is_empty() { None } else { Some(texts.join("; ") + &more) }
}

/// The lists with which nothing of that is refused, except what no list allows.
pub fn extended(allowed: &Allowed, refusals: &[NotAllowed]) -> Allowed {
    let mut lists = serde_json::to_value(allowed).unwrap_or_default();
    for NotAllowed { value, rule, .. } in refusals {
        let Rule::List(list) = rule else { continue };
        let (map, key) = list.keys();
        let place = match map {
            Some(map) => &mut lists[map][key],
            None => &mut lists[key],
        };
        if let Value::Array(entries) = place
            && !entries.iter().any(|entry| entry == value)
        {
            entries.push(value.clone().into());
        }
    }
    serde_json::from_value(lists).unwrap_or_else(|_| allowed.clone())
}

/// What of the configuration changes from one to the other, as lines of `config.yaml`. They can stand at its end: a path is a key, too.
pub fn lines(from: &Allowed, to: &Allowed) -> String {
    let (from, to) = (serde_json::to_value(from).unwrap_or_default(), serde_json::to_value(to).unwrap_or_default());
    let mut lines = String::from("\"/Manager/Controller/Reconciler\":\n");
    let entries = |list: &Value| -> String {
        let texts: Vec<String> = list.as_array().into_iter().flatten().map(ToString::to_string).collect();
        format!("[{}]", texts.join(", "))
    };
    for (key, value) in to.as_object().into_iter().flatten().filter(|(key, value)| from.get(key) != Some(value)) {
        match value {
            Value::Object(map) => {
                lines += &format!("  {key}:\n");
                let used = map.iter().filter(|(_, list)| list.as_array().is_some_and(|list| !list.is_empty()));
                used.for_each(|(key, list)| lines += &format!("    {key}: {}\n", entries(list)));
            }
            list => lines += &format!("  {key}: {}\n", entries(list)),
        }
    }
    lines
}

struct Check<'a> {
    config: &'a ReconcilerConfig,
    allowed: &'a Allowed,
    is_legacy: bool,
    /// The Pod is in the network of its node.
    is_tapped: bool,
    found: Vec<NotAllowed>,
}

impl Check<'_> {
    fn refuse(&mut self, field: impl Into<String>, value: impl Into<String>, rule: Rule) {
        self.found.push(NotAllowed { field: field.into(), value: value.into(), rule });
    }

    fn listed(&mut self, field: impl Into<String>, value: Option<&str>, list: &Patterns, name: List) {
        if let Some(value) = value.filter(|value| !list.contain(value)) {
            self.refuse(field, value, Rule::List(name));
        }
    }

    /// A runner's image runs with the token of the VM's Pod and with its disks, so it is one of the administrator's.
    fn image(&mut self, reference: Option<&str>) {
        let Some(reference) = reference else { return };
        let own = self.config.own_image();
        let is_allowed = repository(reference) == repository(&own)
            || self.allowed.runner_images.contain(reference)
            || self.allowed.legacy_runner_images.contain(reference);
        if !is_allowed {
            let list = if is_named_like_legacy(reference) { List::LegacyRunnerImages } else { List::RunnerImages };
            self.refuse("spec.image", repository(reference), Rule::List(list));
        }
    }

    /// Other resources are devices of the node. Entries of `claims` only name what the Pod's templates claim.
    fn resources(&mut self, resources: Option<&Resources>) {
        let Some(Resources { limits, requests, claims: _ }) = resources else { return };
        let devices = &self.config.node_devices;
        let names = |map: &Option<std::collections::BTreeMap<String, Value>>| -> Vec<String> {
            map.iter().flatten().map(|(name, _)| name.clone()).collect()
        };
        for (field, names) in [("limits", names(limits)), ("requests", names(requests))] {
            for name in names {
                let is_usual = RESOURCES.contains(&name.as_str())
                    || name.starts_with("hugepages-")
                    || name == devices.kvm
                    || devices.machine.as_ref() == Some(&name);
                if !is_usual {
                    let field = format!("spec.resources.{field}");
                    self.listed(field, Some(&name), &self.allowed.extended_resources, List::ExtendedResources);
                }
            }
        }
    }

    /// A rule about Pods of other namespaces keeps those Pods from nodes, too, or shows where they are.
    fn affinity(&mut self, affinity: Option<&Value>, own: Option<&str>) {
        for kind in ["podAffinity", "podAntiAffinity"] {
            let Some(rules) = affinity.and_then(|affinity| affinity.get(kind)) else { continue };
            for (when, inner) in [
                ("requiredDuringSchedulingIgnoredDuringExecution", ""),
                ("preferredDuringSchedulingIgnoredDuringExecution", "/podAffinityTerm"),
            ] {
                for (index, term) in rules[when].as_array().into_iter().flatten().enumerate() {
                    let term = term.pointer(inner).unwrap_or(&Value::Null);
                    let field = format!("spec.affinity.{kind}.{when}[{index}]{}", inner.replace('/', "."));
                    self.affinity_term(&field, term, own);
                }
            }
        }
    }

    fn affinity_term(&mut self, field: &str, term: &Value, own: Option<&str>) {
        let list = &self.allowed.affinity_namespaces;
        for name in term["namespaces"].as_array().into_iter().flatten() {
            let name = text(name);
            if own != Some(name.as_str()) {
                self.listed(format!("{field}.namespaces"), Some(&name), list, List::AffinityNamespaces);
            }
        }
        if !term["namespaceSelector"].is_null() && !list.contain_everything() {
            self.refuse(format!("{field}.namespaceSelector"), "*", Rule::List(List::AffinityNamespaces));
        }
    }

    /// Our runner opens only a name in its image's folder of templates.
    fn runner_template(&mut self, template: &RunnerTemplate) {
        let RunnerTemplate { source, update: _ } = template;
        let is_name = |name: &str| {
            !name.starts_with('.') && name.chars().all(|c| c.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&c))
        };
        if let Some(source) = source.as_ref().filter(|source| self.is_legacy && !is_name(source)) {
            self.refuse(
                "spec.runnerTemplate.source",
                source,
                Rule::Never("a legacy runner opens any file of that name"),
            );
        }
    }

    /// Cloud controllers and DNS obey what stands on a Service. What a VM removes was set by an administrator.
    fn service(&mut self, service: Option<&ServiceMetadata>) {
        let Some(ServiceMetadata { labels, annotations }) = service else { return };
        let Some(defaults) = self.config.load_balancer_service.defaults(service) else { return };
        let changed = |own: &Option<NullableTexts>, default: &Option<NullableTexts>| -> Vec<String> {
            let is_same = |key: &String, value: &Option<String>| {
                let default = default.as_ref().and_then(|default| default.get(key)).cloned().flatten();
                default.unwrap_or_default() == value.clone().unwrap_or_default()
            };
            own.iter().flatten().filter(|(key, value)| !is_same(key, value)).map(|(key, _)| key.clone()).collect()
        };
        for key in changed(labels, &defaults.labels) {
            let list = &self.allowed.services.labels;
            self.listed("spec.loadBalancerService.labels", Some(&key), list, List::ServiceLabels);
        }
        for key in changed(annotations, &defaults.annotations) {
            let list = &self.allowed.services.annotations;
            self.listed("spec.loadBalancerService.annotations", Some(&key), list, List::ServiceAnnotations);
        }
    }

    /// The guest's own data. A Secret or ConfigMap that it takes data from has a label for that.
    fn cloud_init(&mut self, cloud_init: Option<&CloudInit>) {
        let Some(CloudInit {
            meta_data: _,
            user_data: _,
            vendor_data: _,
            network_config: _,
            user_data_from: _,
            network_config_from: _,
        }) = cloud_init
        else {
            return;
        };
    }

    /// Our runner takes levels from it. Java's logging writes to files and makes objects of any class.
    fn logging(&mut self, properties: Option<&str>) {
        let Some(properties) = properties.filter(|_| self.is_legacy) else { return };
        // Java has no handler outside of its packages, so such a name makes no object.
        let is_of_no_package = |name: &str| name.chars().all(|letter| letter.is_ascii_alphanumeric());
        let is_harmless = |line: &str| {
            let line = line.trim();
            let (key, value) = line.split_once('=').map_or((line, ""), |(key, value)| (key.trim(), value.trim()));
            line.is_empty()
                || line.starts_with(['#', '!'])
                || !line.contains('\\')
                    && !key.contains([':', ' ', '\t'])
                    && (key.ends_with(".level")
                        || ["handlers", ".handlers"].contains(&key)
                            && (value == "java.util.logging.ConsoleHandler" || is_of_no_package(value))
                        || key == "java.util.logging.ConsoleHandler.formatter"
                            && value == "java.util.logging.SimpleFormatter"
                        || key == "java.util.logging.SimpleFormatter.format")
        };
        if let Some(line) = properties.lines().find(|line| !is_harmless(line)) {
            self.refuse(
                "spec.loggingProperties",
                line,
                Rule::Never("a legacy runner may have levels, the ConsoleHandler and the SimpleFormatter"),
            );
        }
    }

    fn machine(&mut self, machine: &Machine, has_service: bool) {
        let Machine {
            state: _,
            machine_uuid: _,
            rtc_timezone: _,
            use_tpm: _,
            firmware: _,
            boot_menu: _,
            powerdown_timeout: _,
            // One argument of QEMU, whose properties are those of a CPU.
            cpu_model,
            accelerator: _,
            // What the Pod requests is counted by quotas.
            maximum_cpus: _,
            cpu_topology: _,
            current_cpus: _,
            maximum_ram: _,
            current_ram: _,
            // The schema has the values.
            rtc_base: _,
            rtc_clock: _,
            networks,
            disks,
            display,
            reset_count: _,
            reboot_count: _,
            paused: _,
            on_panic: _,
            watchdog: _,
            hardware: _,
        } = machine;
        self.legacy_text("spec.vm.cpuModel", Some(cpu_model), true);
        self.networks(networks);
        for (index, disk) in disks.iter().enumerate() {
            let Disk { volume_claim_template, cdrom, bootindex: _, serial: _ } = disk;
            let field = format!("spec.vm.disks[{index}]");
            if let Some(template) = volume_claim_template {
                self.claim(&format!("{field}.volumeClaimTemplate"), template);
            }
            if let Some(Cdrom { image, name: _ }) = cdrom {
                self.cd(&format!("{field}.cdrom.image"), image);
            }
        }
        self.display(display, has_service);
    }

    /// A card is a device of QEMU with fixed properties, so its name can't be another device.
    fn networks(&mut self, networks: &[Network]) {
        for (index, network) in networks.iter().enumerate() {
            let Network { name: _, tap, user, pod } = network;
            let field = |name: &str| format!("spec.vm.networks[{index}].{name}");
            if let Some(TapNetwork { device, bridge, mac: _ }) = tap {
                let bridge = bridge.as_deref().unwrap_or(DEFAULT_BRIDGE);
                let list = &self.allowed.networks.bridges;
                self.listed(field("tap.bridge"), Some(bridge), list, List::Bridges);
                self.legacy_text(&field("tap.device"), device.as_deref(), false);
                self.legacy_text(&field("tap.bridge"), Some(bridge), false);
            }
            if let Some(UserNetwork { device, net }) = user {
                if self.is_tapped {
                    let why = "with a tap the VM is in the network of its node, and user would lead the guest to the node's own addresses";
                    self.refuse(field("user"), "user", Rule::Never(why));
                }
                self.legacy_text(&field("user.device"), device.as_deref(), false);
                self.legacy_text(&field("user.net"), net.as_deref(), false);
            }
            if let Some(PodNetwork { device: _, mac: _ }) = pod {}
        }
    }

    fn claim(&mut self, field: &str, template: &VolumeClaimTemplate) {
        let VolumeClaimTemplate { metadata, spec } = template;
        if let Some(ClaimMetadata { name: _, labels, annotations }) = metadata {
            for key in labels.keys() {
                let list = &self.allowed.claims.labels;
                self.listed(format!("{field}.metadata.labels"), Some(key), list, List::ClaimLabels);
            }
            for key in annotations.keys() {
                let list = &self.allowed.claims.annotations;
                self.listed(format!("{field}.metadata.annotations"), Some(key), list, List::ClaimAnnotations);
            }
        }
        if let Some(Value::Object(spec)) = spec {
            self.claim_spec(&format!("{field}.spec"), spec);
        }
    }

    /// Sizes, modes and classes are counted by quotas, and classes are the administrator's. A volume that exists, and a copy of something, are
    /// somebody's data.
    fn claim_spec(&mut self, field: &str, spec: &Map<String, Value>) {
        let claims = &self.allowed.claims;
        let get = |name: &str| spec.get(name).filter(|value| !value.is_null());
        for name in ["dataSource", "dataSourceRef"] {
            if let Some(source) = get(name) {
                self.listed(
                    format!("{field}.{name}"),
                    Some(&data_source(source)),
                    &claims.data_sources,
                    List::DataSources,
                );
            }
        }
        let volume = get("volumeName").map(text).filter(|name| !name.is_empty());
        self.listed(format!("{field}.volumeName"), volume.as_deref(), &claims.volume_names, List::VolumeNames);
        if volume.is_none() && !claims.volume_names.contain_everything() {
            for (name, takes_any) in [
                ("selector", get("selector").is_some()),
                ("storageClassName", get("storageClassName").is_some_and(|it| it == "")),
            ] {
                if takes_any {
                    self.refuse(format!("{field}.{name}"), "*", Rule::List(List::VolumeNames));
                }
            }
        }
        for name in spec.keys().filter(|name| !CLAIM_FIELDS.contains(&name.as_str())) {
            self.refuse(field, name, Rule::Never("this version does not know what that field of a claim reaches"));
        }
    }

    /// Our runner checks paths and protocols itself. In the network of a node, a URL is opened with the node's addresses.
    fn cd(&mut self, field: &str, image: &str) {
        let cd = Cd::parse(image);
        if self.is_tapped && matches!(cd, Cd::Url { .. }) && !self.allowed.networks.cd_urls.contain(image) {
            self.refuse(field, image, Rule::List(List::CdUrls));
        }
        if !self.is_legacy || cd == Cd::None {
            return;
        }
        self.legacy_text(field, Some(image), false);
        let folders = self.config.cd_folders.iter().map(String::as_str).chain([IMAGE_REPOSITORY]);
        let is_below =
            |folder: &str| image.strip_prefix(folder.trim_end_matches('/')).is_some_and(|rest| rest.starts_with('/'));
        let is_file = |image: &str| !image.split('/').any(|part| part == "..");
        let is_allowed = match cd {
            Cd::None => true,
            Cd::Url { protocol, .. } => ["http", "https"].contains(&protocol),
            Cd::Path(path) => is_file(path) && folders.into_iter().any(is_below),
            Cd::Repository(name) => is_file(name),
        };
        if !is_allowed {
            self.refuse(
                field,
                image,
                Rule::Never("a CD is an http(s) URL, or a file of the image repository or of cdFolders"),
            );
        }
    }

    /// With a tap the port is one of the node, and with a Service one of the load balancer, which may be one of all nodes.
    fn display(&mut self, display: &Display, has_service: bool) {
        let Display { outputs: _, logged_in_user, spice, vnc, clipboard: _ } = display;
        // `server` and `proxyUrl` are for the viewer's file.
        let Spice { port, server: _, generate_secret: _, proxy_url: _, streaming_video, usb_redirects: _ } = spice;
        let (field, port) = match vnc {
            Some(Vnc { port }) => ("spec.vm.display.vnc.port", *port),
            None => ("spec.vm.display.spice.port", *port),
        };
        if (self.is_tapped || has_service) && port != 0 && !self.allowed.networks.display_ports.contain(port) {
            self.refuse(field, port.to_string(), Rule::List(List::DisplayPorts));
        }
        self.legacy_text("spec.vm.display.spice.streamingVideo", streaming_video.as_deref(), false);
        self.legacy_text("spec.vm.display.loggedInUser", logged_in_user.as_deref(), true);
    }

    /// A legacy runner, which is privileged, writes such a text as it is into QEMU's options.
    fn legacy_text(&mut self, field: &str, text: Option<&str>, with_commas: bool) {
        let is_harmless = |c: char| {
            !c.is_control()
                && !['"', '\'', '\\', '$', '{', '}', '<', '>', '[', ']', '#', '`'].contains(&c)
                && (with_commas || c != ',')
        };
        if let Some(text) = text.filter(|text| self.is_legacy && !text.chars().all(is_harmless)) {
            self.refuse(
                field,
                text,
                Rule::Never("for a legacy runner it may have no characters of options and templates"),
            );
        }
    }
}

/// A text, or what stands in its place.
fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// What a claim is a copy of, as the list has it.
fn data_source(source: &Value) -> String {
    let part = |name: &str| source.get(name).filter(|part| !part.is_null()).map(text).filter(|text| !text.is_empty());
    let (Some(kind), Some(name)) = (part("kind"), part("name")) else { return source.to_string() };
    let namespace = part("namespace").map(|namespace| format!("{namespace}:")).unwrap_or_default();
    let group = part("apiGroup").map(|group| format!(".{group}")).unwrap_or_default();
    format!("{namespace}{kind}{group}/{name}")
}

#[cfg(test)]
mod tests;
