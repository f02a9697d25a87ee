//! The template context: the documented, versioned interface between this program and the templates.
//!
//! | name | what it is |
//! |---|---|
//! | `vm` | the resource: `apiVersion`, `kind`, `metadata` (name, namespace, uid, labels, annotations, creationTimestamp), `spec`, `status` |
//! | `spec` | `vm.spec` with every field there: a default where there is one, otherwise `none` |
//! | `image` | `reference` and `pullPolicy` (or `none`) of the runner |
//! | `resources` | requests and limits of the runner's container |
//! | `disks` | `spec.vm.disks` resolved, in order: `type` (`claim` or `cdrom`), for claims `name`, `claimName`, `volume`, `device`, `mode`, `spec`, `labels`, `annotations`, `file` |
//! | `runnerData` | `claimName` of the runner's own claim |
//! | `cloudInit` | `none`, or `metaData`, `userData`, `networkConfig` as the texts of files (or `none`) and `userDataFrom`, `networkConfigFrom` |
//! | `runner` | the content of the runner's `config.yaml` |
//! | `service` | `none`, or `labels` and `annotations` of the Service |
//! | `displaySecret` | `name` of the display secret, `none` without one; `version`: changes when somebody changes its content; `generate`: whether to make it; `password`: a random one for that |
//! | `labels` | the labels of all objects of the machine (set by the operator in any case) |
//! | `podLabels` | those, and the machine's own labels that are not another tool's |
//! | `values` | what the template set, the manager's `templateValues` and `spec.templateValues` say, one over the other |
//! | `config` | the manager's configuration: `runnerDataPvc.storageClassName` |
//! | `serviceAccount`, `imageRepositoryClaim`, `managerVersion` | names and version |
//!
//! The version of this interface is [`VERSION`].

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use kube::{Resource, ResourceExt};
use minijinja::value::{Enumerator, Object, Serde};
use serde::{Serialize, Serializer, ser::Error as _};
use serde_json::{Value, json};

use super::output::digest;
use crate::{
    api::{
        CloudInit, Disk, Image, ServiceMetadata, VirtualMachine, VirtualMachineSpec, VirtualMachineStatus,
        VolumeClaimTemplate, crd,
    },
    claims,
    config::{LoadBalancerService, ReconcilerConfig},
    object::labels,
    observed::{self, Observed},
    runner_config::{
        CloudInitSection, ConfigFile, DisplaySection, Drive, NetworkSection, RunnerConfig, SpiceSection, VmSection,
        VncSection, paths,
    },
};

/// The version of the context; it grows when a name goes or changes its meaning.
pub const VERSION: u32 = 1;

/// The service account of the runners.
pub const SERVICE_ACCOUNT: &str = "vm-runner";
/// The claim with the CD images.
pub const IMAGE_REPOSITORY_CLAIM: &str = "vmop-image-repository";

/// What is random, made outside of the rendering.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// A password for a display secret that must be made.
    pub display_password: String,
}

/// Labels of these tools on a machine are not for its Pod: they would count the Pod as theirs and prune it.
pub const TOOL_LABELS: [&str; 5] = [
    "app.kubernetes.io/",
    "argocd.argoproj.io/",
    "kustomize.toolkit.fluxcd.io/",
    "helm.toolkit.fluxcd.io/",
    "helm.sh/",
];

/// All that a rendering hangs on, but for the templates and which kinds they may make.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Context {
    #[serde(serialize_with = "as_object")]
    vm: Arc<Vm>,
    spec: Value,
    image: Reference,
    resources: Value,
    disks: Vec<ResolvedDisk>,
    runner_data: Value,
    cloud_init: Option<CloudInitFiles>,
    runner: ConfigFile,
    service: Option<Service>,
    display_secret: DisplaySecret,
    labels: BTreeMap<String, String>,
    pod_labels: BTreeMap<String, String>,
    values: Value,
    config: Value,
    service_account: &'static str,
    image_repository_claim: &'static str,
    manager_version: &'static str,
}

impl Context {
    /// What the templates see.
    pub(super) fn value(&self) -> minijinja::Value {
        Serde(self).into()
    }
}

/// `vm`. Its `spec` and `status` are large and hardly any template asks for them, so they wait until one does.
#[derive(Debug)]
struct Vm {
    metadata: Lazy<Value>,
    spec: Lazy<VirtualMachineSpec>,
    status: Lazy<Option<VirtualMachineStatus>>,
}

/// A value for templates that is made when the first one asks.
#[derive(Debug)]
struct Lazy<T>(T, OnceLock<minijinja::Value>);

impl<T: Serialize> Lazy<T> {
    fn of(data: T) -> Self {
        Self(data, OnceLock::new())
    }

    fn get(&self) -> minijinja::Value {
        self.1.get_or_init(|| Serde(&self.0).into()).clone()
    }
}

fn as_object<S: Serializer>(vm: &Arc<Vm>, serializer: S) -> Result<S::Ok, S::Error> {
    minijinja::Value::from_dyn_object(vm.clone()).serialize(serializer)
}

impl Vm {
    fn of(vm: &VirtualMachine, name: &str) -> Arc<Self> {
        let metadata = json!({
            "name": name, "namespace": vm.namespace(), "uid": vm.uid(),
            "labels": vm.labels(), "annotations": vm.annotations(),
            "creationTimestamp": vm.metadata.creation_timestamp,
        });
        Arc::new(Self {
            metadata: Lazy::of(metadata),
            spec: Lazy::of(vm.spec.clone()),
            status: Lazy::of(vm.status.clone()),
        })
    }
}

impl Object for Vm {
    fn get_value(self: &Arc<Self>, key: &minijinja::Value) -> Option<minijinja::Value> {
        self.get_value_by_str(key.as_str()?)
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<minijinja::Value> {
        Some(match key {
            "apiVersion" => VirtualMachine::api_version(&()).into(),
            "kind" => VirtualMachine::kind(&()).into(),
            "metadata" => self.metadata.get(),
            "spec" => self.spec.get(),
            "status" => self.status.get(),
            _ => return None,
        })
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Str(&["apiVersion", "kind", "metadata", "spec", "status"])
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Reference {
    reference: String,
    pull_policy: Option<String>,
}

/// A disk with its names made.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct ResolvedDisk {
    #[serde(rename = "type")]
    type_: &'static str,
    /// `NAME-disk` or `disk-N`; the name of the Pod's volume.
    volume: String,
    claim_name: String,
    /// Where the runner finds a block volume.
    device: String,
    /// Where the runner finds a volume with a file system.
    path: String,
    /// `Block` or `Filesystem`.
    mode: String,
    /// The claim's spec with its defaults.
    spec: Value,
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
    /// The CD of a drive.
    file: Option<String>,
    bootindex: Option<u32>,
    /// The bytes that a file on a volume with a file system is to have.
    #[serde(skip)]
    size: Option<u64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct CloudInitFiles {
    meta_data: String,
    user_data: Option<String>,
    network_config: Option<String>,
    user_data_from: Value,
    network_config_from: Value,
}

/// Of the Service; both are there, also when they are empty.
#[derive(Serialize)]
struct Service {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

#[derive(Serialize)]
struct DisplaySecret {
    name: Option<String>,
    version: Option<String>,
    generate: bool,
    password: String,
}

/// Makes the context for a machine.
///
/// # Errors
/// If a part of the machine can't be written as JSON.
pub(super) fn build(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    facts: &Facts,
    values: Value,
) -> Result<Context, serde_json::Error> {
    let name = vm.name_any();
    let standard = labels(&name);
    let mut pod_labels: BTreeMap<String, String> = vm
        .labels()
        .iter()
        .filter(|(label, _)| !TOOL_LABELS.iter().any(|prefix| label.starts_with(prefix)))
        .map(|(label, value)| (label.clone(), value.clone()))
        .collect();
    pod_labels.extend(standard.clone());
    let disks = disks(&name, &vm.spec.vm.disks, observed);
    let cloud_init = vm.spec.cloud_init.as_ref().map(|data| CloudInitData::of(vm, data)).transpose()?;
    let mut spec = serde_json::to_value(&vm.spec)?;
    complete(&mut spec, spec_schema());
    Ok(Context {
        vm: Vm::of(vm, &name),
        spec,
        image: image(vm.spec.image.as_ref(), config),
        resources: resources(&vm.spec, config)?,
        runner: ConfigFile { runner: runner_config(vm, &disks, cloud_init.as_ref().map(|data| data.section.clone())) },
        cloud_init: cloud_init.map(|data| data.files),
        disks,
        runner_data: json!({ "claimName": claims::runner_data_name(&name, observed) }),
        service: service(vm.spec.load_balancer_service.as_ref(), &config.load_balancer_service),
        display_secret: display_secret(vm, observed, facts),
        labels: standard,
        pod_labels,
        values,
        config: json!({ "runnerDataPvc": { "storageClassName": config.runner_data_pvc.storage_class_name } }),
        service_account: SERVICE_ACCOUNT,
        image_repository_claim: IMAGE_REPOSITORY_CLAIM,
        manager_version: env!("CARGO_PKG_VERSION"),
    })
}

/// The schema of `spec`, where the names of all fields are.
fn spec_schema() -> &'static Value {
    static SCHEMA: OnceLock<Value> = OnceLock::new();
    SCHEMA.get_or_init(|| {
        let (_, mut crd) = crd::crds().swap_remove(0);
        crd.pointer_mut("/spec/versions/0/schema/openAPIV3Schema/properties/spec").map(Value::take).unwrap_or_default()
    })
}

/// Puts null where the schema has a field and the value has none, so that a template can ask for it: an undefined value is
/// an error.
fn complete(value: &mut Value, schema: &Value) {
    match value {
        Value::Object(map) => {
            let Some(Value::Object(properties)) = schema.get("properties") else { return };
            for (field, schema) in properties {
                match map.get_mut(field) {
                    Some(value) => complete(value, schema),
                    None => drop(map.insert(field.clone(), Value::Null)),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|item| complete(item, &schema["items"])),
        _ => {}
    }
}

fn image(image: Option<&Image>, config: &ReconcilerConfig) -> Reference {
    let written = |image: &Image| {
        image.source.clone().or_else(|| {
            let path = format!("{}/{}", image.repository.as_ref()?, image.path.as_ref()?);
            Some(image.version.as_ref().map_or(path.clone(), |version| format!("{path}:{version}")))
        })
    };
    let default = || {
        config
            .runner_image
            .clone()
            .unwrap_or_else(|| concat!("localhost/vm-runner:", env!("CARGO_PKG_VERSION")).to_owned())
    };
    let reference = image.and_then(written);
    let policy = image.and_then(|image| image.pull_policy).map(|policy| format!("{policy:?}"));
    Reference {
        pull_policy: policy.or_else(|| config.runner_image_pull_policy.clone().filter(|_| reference.is_none())),
        reference: reference.unwrap_or_else(default),
    }
}

/// What is requested for the container: what the machine says, or its current CPUs and RAM over the overcommit factors.
fn resources(spec: &VirtualMachineSpec, config: &ReconcilerConfig) -> Result<Value, serde_json::Error> {
    if let Some(resources) = &spec.resources {
        return serde_json::to_value(resources);
    }
    // Whole thousandths of a CPU and whole bytes; both are far below 2^53, where a float is exact.
    let cpu = (f64::from(current_cpus(spec)) / config.cpu_overcommit * 1000.0).floor();
    let ram = (current_ram(spec) as f64 / config.ram_overcommit).floor();
    Ok(json!({ "requests": { "cpu": format!("{cpu:.0}m"), "memory": format!("{ram:.0}") } }))
}

fn maximum_cpus(spec: &VirtualMachineSpec) -> u32 {
    spec.vm.cpu_topology.map(|topology| topology.cpus()).or(spec.vm.maximum_cpus).unwrap_or(1)
}

fn current_cpus(spec: &VirtualMachineSpec) -> u32 {
    spec.vm.current_cpus.unwrap_or_else(|| maximum_cpus(spec))
}

fn current_ram(spec: &VirtualMachineSpec) -> u64 {
    spec.vm.current_ram.as_ref().unwrap_or(&spec.vm.maximum_ram).bytes()
}

fn disks(vm: &str, disks: &[Disk], observed: &Observed) -> Vec<ResolvedDisk> {
    let mut templates = 0;
    let mut resolved = Vec::new();
    for disk in disks {
        if let Some(template) = &disk.volume_claim_template {
            resolved.push(resolve_claim(vm, disk, template, templates, observed));
            templates += 1;
        } else if let Some(cdrom) = &disk.cdrom {
            resolved.push(ResolvedDisk {
                type_: "cdrom",
                volume: String::new(),
                claim_name: String::new(),
                device: String::new(),
                path: String::new(),
                mode: String::new(),
                spec: Value::Null,
                labels: BTreeMap::new(),
                annotations: BTreeMap::new(),
                file: Some(cd_file(&cdrom.image)),
                bootindex: disk.bootindex,
                size: None,
            });
        }
    }
    resolved
}

fn resolve_claim(
    vm: &str,
    disk: &Disk,
    template: &VolumeClaimTemplate,
    index: usize,
    observed: &Observed,
) -> ResolvedDisk {
    let metadata = template.metadata.clone().unwrap_or_default();
    // The oldest releases counted the claims, too, whatever their page says of the list of disks.
    let volume = metadata.name.as_ref().map_or_else(|| format!("disk-{index}"), |name| format!("{name}-disk"));
    let claim_name = claims::disk_name(vm, &volume, observed);
    let claim = observed.claim(&claim_name);
    let existing = claim.map(|claim| &claim.spec);
    let mut spec = template.spec.clone().unwrap_or_else(|| json!({}));
    if let Value::Object(spec) = &mut spec {
        // Where nothing is said, that a claim is otherwise than it would be made is no difference.
        for (field, default) in [("accessModes", json!(["ReadWriteOnce"])), ("volumeMode", json!("Block"))] {
            let default = || existing.and_then(|existing| existing.get(field)).cloned().unwrap_or(default);
            spec.entry(field).or_insert_with(default);
        }
    }
    // What exists counts: the mode of a claim can't be changed.
    let mode = existing.and_then(|existing| existing["volumeMode"].as_str()).or(spec["volumeMode"].as_str());
    let mode = mode.unwrap_or("Block").to_owned();
    // A claim that does not grow, or has not yet, has no room for more.
    let room = claim.and_then(|claim| claims::size_when_mounted(claim));
    let size = claims::requested_size(&spec).map(|wanted| room.map_or(wanted, |room| wanted.min(room)));
    ResolvedDisk {
        type_: "claim",
        claim_name,
        device: format!("/dev/{volume}"),
        path: format!("{}/{volume}", paths::DISK_DIR),
        volume,
        mode,
        spec,
        labels: metadata.labels,
        annotations: metadata.annotations,
        file: None,
        bootindex: disk.bootindex,
        size,
    }
}

/// A URL and a path stay, a name is one in the image repository.
fn cd_file(image: &str) -> String {
    if image.is_empty() || image.starts_with('/') || image.contains("://") {
        image.to_owned()
    } else {
        format!("{}/{image}", paths::IMAGE_REPOSITORY)
    }
}

/// cloud-init's data, for the files of our runner and for the section that runners of the old kind read.
struct CloudInitData {
    files: CloudInitFiles,
    section: CloudInitSection,
}

impl CloudInitData {
    fn of(vm: &VirtualMachine, data: &CloudInit) -> Result<Self, serde_json::Error> {
        let mut meta_data = data.meta_data.clone();
        if !meta_data.contains_key("instance-id") {
            // From who the guest is and what it is told: cloud-init runs again when it is told something new, and only then. A
            // machine that is made again with its disks is who it was, and has another UID.
            let content = serde_json::to_string(&json!([vm.namespace(), vm.name_any(), data]))?;
            meta_data.insert("instance-id".into(), json!(format!("i-{}", digest(&content))));
        }
        meta_data.entry("local-hostname".into()).or_insert_with(|| json!(vm.name_any()));
        let yaml = |value: &Value| serde_saphyr::to_string(value).map_err(serde_json::Error::custom);
        let user_data = |value: &Value| match value {
            // A script, a MIME message, or a cloud-config that is complete.
            Value::String(text) if text.starts_with('#') || text.starts_with("Content-Type:") => Ok(text.clone()),
            Value::String(text) => Ok(format!("#cloud-config\n{text}")),
            value => Ok(format!("#cloud-config\n{}", yaml(value)?)),
        };
        let network_config = |value: &Value| match value {
            Value::String(text) => Ok(text.clone()),
            value => yaml(value),
        };
        let files = CloudInitFiles {
            meta_data: yaml(&json!(meta_data))?,
            user_data: match (&data.user_data, &data.user_data_from) {
                (Some(value), _) => Some(user_data(value)?),
                (None, Some(_)) => None,
                // cloud-init takes a disk for its own only if this file is there.
                (None, None) => Some("#cloud-config\n{}\n".into()),
            },
            network_config: data.network_config.as_ref().map(network_config).transpose()?,
            user_data_from: serde_json::to_value(&data.user_data_from)?,
            network_config_from: serde_json::to_value(&data.network_config_from)?,
        };
        let section = CloudInitSection {
            meta_data,
            user_data: data.user_data.clone().unwrap_or_else(|| json!({})),
            network_config: data.network_config.clone(),
        };
        Ok(Self { files, section })
    }
}

fn service(wanted: Option<&ServiceMetadata>, config: &LoadBalancerService) -> Option<Service> {
    let wanted = wanted?;
    let mut merged = match config {
        LoadBalancerService::Enabled(false) => return None,
        LoadBalancerService::Enabled(true) => ServiceMetadata::default(),
        LoadBalancerService::Metadata(defaults) => defaults.clone(),
    };
    for (map, over) in [(&mut merged.labels, &wanted.labels), (&mut merged.annotations, &wanted.annotations)] {
        map.extend(over.clone());
        map.retain(|_, value| !value.is_empty());
    }
    Some(Service { labels: merged.labels, annotations: merged.annotations })
}

fn display_secret(vm: &VirtualMachine, observed: &Observed, facts: &Facts) -> DisplaySecret {
    // A person's secret comes before the generated one; of several the first by name, or each watch event could choose anew.
    let (ours, theirs): (Vec<_>, Vec<_>) = observed.display_secrets().partition(|secret| secret.is_ours());
    let generated = format!("{}-display-secret", vm.name_any());
    let made = json!({ "data": { "display-password": "", "password-expiry": "" } });
    let (as_made, set): (Vec<_>, Vec<_>) = ours.into_iter().partition(|secret| secret.owns_all_of(&made));
    // One in which somebody has set a password stays, also where none is to be generated any more.
    let is_set = set.iter().any(|secret| secret.key.name == generated);
    // So does one that the Pod mounts: without it the runner, started again in that Pod, would find no password.
    let mut pods = observed.objects.iter().filter(|object| object.key.is_pod() && object.deleting.is_none());
    // Unless it is a person's that has its name.
    let is_mounted = !theirs.iter().any(|it| it.key.name == generated) && pods.any(|pod| mounts(pod, &generated));
    let generate = is_set || is_mounted || (theirs.is_empty() && vm.spec.vm.display.spice.generate_secret);
    // One that is as it was made has no version, or each first start would end with a change of the Pod.
    let as_made = as_made.into_iter().filter(|_| generate).map(|secret| (secret, None));
    let by_people = theirs.into_iter().chain(set).map(|secret| (secret, Some(secret.version.to_string())));
    let existing = as_made
        .chain(by_people)
        .min_by_key(|(secret, _)| (secret.key.name == generated, secret.is_ours(), secret.key.name.as_str()));
    let (secret, version) = existing.unzip();
    DisplaySecret {
        version: version.flatten(),
        name: secret.map(|secret| secret.key.name.clone()).or(generate.then_some(generated)),
        generate,
        password: facts.display_password.clone(),
    }
}

fn mounts(pod: &observed::Object, secret: &str) -> bool {
    let volumes = pod.spec["volumes"].as_array().into_iter().flatten();
    let mut sources = volumes.flat_map(|volume| volume["projected"]["sources"].as_array()).flatten();
    sources.any(|source| source["secret"]["name"] == secret)
}

fn runner_config(vm: &VirtualMachine, disks: &[ResolvedDisk], cloud_init: Option<CloudInitSection>) -> RunnerConfig {
    let machine = &vm.spec.vm;
    let topology = machine.cpu_topology;
    let level = |level: fn(crate::api::CpuTopology) -> u32| topology.map(level).unwrap_or_default();
    let identity = vm.status.as_ref().and_then(|status| status.identity.as_ref());
    RunnerConfig {
        data_dir: paths::DATA_DIR.into(),
        runtime_dir: paths::RUNTIME_DIR.into(),
        template: vm.spec.runner_template.source.clone(),
        update_template: vm.spec.runner_template.update,
        namespace: vm.namespace().unwrap_or_default(),
        resource_uid: vm.uid(),
        guest_shutdown_stops: vm.spec.guest_shutdown_stops,
        reset_counter: machine.reset_count.map(u64::from).unwrap_or_default(),
        cloud_init,
        vm: VmSection {
            name: vm.name_any(),
            uuid: machine.machine_uuid.clone().or_else(|| identity.and_then(|identity| identity.uuid.clone())),
            machine_type: identity.and_then(|identity| identity.machine_type.clone()),
            use_tpm: machine.use_tpm,
            firmware: machine.firmware,
            boot_menu: machine.boot_menu,
            powerdown_timeout: u64::from(machine.powerdown_timeout),
            cpu_model: machine.cpu_model.clone(),
            maximum_cpus: maximum_cpus(&vm.spec),
            sockets: level(|topology| topology.sockets),
            dies_per_socket: level(|topology| topology.dies_per_socket),
            cores_per_die: level(|topology| topology.cores_per_die),
            threads_per_core: level(|topology| topology.threads_per_core),
            current_cpus: current_cpus(&vm.spec),
            maximum_ram: machine.maximum_ram.spaced(),
            current_ram: Some(machine.current_ram.as_ref().unwrap_or(&machine.maximum_ram).spaced()),
            accelerator: machine.accelerator,
            rtc_base: machine.rtc_base.clone(),
            rtc_clock: machine.rtc_clock.clone(),
            network: networks(vm),
            drives: disks.iter().map(drive).collect(),
            display: display(vm),
        },
    }
}

fn networks(vm: &VirtualMachine) -> Vec<NetworkSection> {
    let device = |device: &Option<String>| device.clone().unwrap_or_else(|| "virtio-net".into());
    let identity = vm.status.as_ref().and_then(|status| status.identity.as_ref());
    // Those of the spec win: a network that was put before one with its own address must not get that one's.
    let given = |mac: &String| {
        let mut networks = vm.spec.vm.networks.iter();
        networks.any(|network| network.mac().is_some_and(|it| it.eq_ignore_ascii_case(mac)))
    };
    let kept = |index: usize| identity.and_then(|it| it.macs.get(index)).filter(|mac| !given(mac)).cloned();
    let section = |(index, network): (usize, &crate::api::Network)| {
        let mac = network.mac().map(str::to_owned).or_else(|| kept(index));
        if let Some(tap) = &network.tap {
            let bridge = tap.bridge.clone().unwrap_or_else(|| "br0".into());
            Some(NetworkSection::Tap { device: device(&tap.device), bridge, mac })
        } else if let Some(user) = &network.user {
            Some(NetworkSection::User { device: device(&user.device), net: user.net.clone(), mac })
        } else {
            let pod = network.pod.as_ref()?;
            Some(NetworkSection::Pod { device: device(&pod.device), mac })
        }
    };
    vm.spec.vm.networks.iter().enumerate().filter_map(section).collect()
}

fn drive(disk: &ResolvedDisk) -> Drive {
    match &disk.file {
        Some(file) => Drive::IdeCd { file: file.clone(), bootindex: disk.bootindex },
        None if disk.mode == "Filesystem" => {
            Drive::Raw { resource: format!("{}/disk.img", disk.path), bootindex: disk.bootindex, size: disk.size }
        }
        None => Drive::Raw { resource: disk.device.clone(), bootindex: disk.bootindex, size: None },
    }
}

fn display(vm: &VirtualMachine) -> DisplaySection {
    let display = &vm.spec.vm.display;
    let spice = display.vnc.is_none().then(|| SpiceSection {
        port: display.spice.port,
        ticket: None,
        streaming_video: display.spice.streaming_video.clone(),
        usb_redirects: display.spice.usb_redirects,
    });
    DisplaySection {
        outputs: display.outputs,
        logged_in_user: display.logged_in_user.clone(),
        spice,
        vnc: display.vnc.as_ref().map(|vnc| VncSection { port: vnc.port }),
    }
}

#[cfg(test)]
mod tests;
