//! The template context: the values that templates can use. It is a documented, versioned interface.
//!
//! | name | what it is |
//! |---|---|
//! | `vm` | the resource: `apiVersion`, `kind`, `metadata` (name, namespace, uid, labels, annotations, creationTimestamp), `spec`, `status` |
//! | `spec` | `vm.spec` with every field there: a default where there is one, otherwise `none` |
//! | `image` | of the runner: `reference`, `pullPolicy` (or `none`), `legacy` (whether it is one of the VM-Operator in Java), `container` (the name of its container) |
//! | `resources` | requests and limits of the runner's container |
//! | `initResources` | those without devices: for an init container, which works before the guest starts |
//! | `disks` | `spec.vm.disks` resolved, in their order: `type` (`claim` or `cdrom`) and `bootindex`; of claims `claimName`, `volume`, `device`, `path`, `mode`, `spec`, `labels`, `annotations`; of CD drives `file` |
//! | `runnerData` | of the runner's own claim: `claimName`, and `size`, which is that of the claim if there is one |
//! | `cloudInit` | `none`, or `metaData`, `userData`, `vendorData`, `networkConfig` as the texts of files (or `none`) and `userDataFrom`, `networkConfigFrom`, and `runnerConfig`: the `config.yaml` of a legacy runner, which contains all that, or `none` |
//! | `runner` | the content of the runner's `config.yaml` in the ConfigMap: without user data |
//! | `qemu` | `none`, or the content of the file `qemu.yaml` for the runner: the set's QEMU templates with their values |
//! | `service` | `none`, or `labels` and `annotations` of the Service |
//! | `relay` | `secret`: the name of the Secret of the relay, or `none` if there is no relay; for a new one `certificate`, `key` and `token` |
//! | `displaySecret` | `name` of the display secret, or `none`; `version`: changes when somebody changes its content; `generate`: whether the operator makes it; `password`: a random one for that |
//! | `labels` | the labels of all objects of the VM (the operator sets them in any case) |
//! | `podLabels` | those, the pool that has made the VM, and of the VM's own labels those whose keys the manager's configuration allows (`podLabels`), without those of other tools |
//! | `values` | the values of the template set, over them the manager's `templateValues`, over those `spec.templateValues` |
//! | `config` | the manager's configuration: `runnerDataPvc.storageClassName`; `nodeDevices.kvm` and `.machine` (or `none`): the resources of devices; `passt.seccompProfile` and `.appArmorProfile` (or `none`) |
//! | `imageRepositoryClaim` | the claim with CD images that the Pod mounts, or `none` |
//! | `serviceAccount`, `managerVersion` | name and version |
//!
//! The version of this interface is [`VERSION`].

mod container;
mod disks;
mod display_secret;
mod service;
mod spec;
mod vm;

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use minijinja::value::Serde;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    cloud_init::{self, CloudInitFiles},
    command_line::QemuFile,
    legacy::{self, Reader},
    qemu,
    runner::runner_config,
    templates::OfQemu,
};
use crate::{
    api::{VirtualMachine, VmPool},
    claims,
    config::ReconcilerConfig,
    object::{POOL_LABEL, labels},
    observed::Observed,
    ownership::is_made_by_pool,
    relay::secret_name,
    runner_config::{CloudInitSection, ConfigFile, RunnerConfig},
};

use container::{RunnerImage, init_resources, resources};
use disks::ResolvedDisk;
use display_secret::DisplaySecret;
use service::Service;
use vm::Vm;

/// The version of the context. It grows when a name is removed or changes its meaning.
pub const VERSION: u32 = 1;

/// The name of the runners' service account.
pub const SERVICE_ACCOUNT: &str = "vm-runner";
/// The name of the service account of legacy runners, which need more rights: they write `spec.vm.state` and events.
pub const LEGACY_SERVICE_ACCOUNT: &str = "vm-runner-legacy";
/// The name of the claim with the CD images, unless the configuration names another.
pub const IMAGE_REPOSITORY_CLAIM: &str = "vmop-image-repository";

/// The size of a new claim for the runner's own data: firmware variables, TPM state, and what is to be known of changed blocks of disks.
const RUNNER_DATA_SIZE: &str = "8Mi";

/// Random values. The caller makes them, so that rendering is a pure function.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RandomInput {
    /// The password for a new display secret.
    pub display_password: String,
    /// For a new Secret of the relay, which a VM with such a Secret does not need, see [`needs_relay_identity`].
    pub relay: RelayIdentity,
}

/// By what the relay of a VM and its clients know each other.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RelayIdentity {
    /// The certificate as PEM.
    pub certificate: String,
    /// Its private key as PEM.
    pub key: String,
    /// What a client must know.
    pub token: String,
}

/// Whether the VM is to have a relay and has no Secret for it yet, so that [`RandomInput::relay`] matters.
pub fn needs_relay_identity(vm: &VirtualMachine, observed: &Observed, config: &ReconcilerConfig) -> bool {
    let name = secret_name(&vm.name_any());
    let exists = observed.objects.iter().any(|object| object.key.kind == "Secret" && object.key.name == name);
    !exists && has_relay(config, &RunnerImage::of(vm, config))
}

/// Whether VMs with this image have a relay. A legacy runner has none.
fn has_relay(config: &ReconcilerConfig, image: &RunnerImage) -> bool {
    config.relay && !image.legacy
}

/// Prefixes of labels that a VM's Pod does not get. These tools would take the Pod for one of their objects and delete it.
pub const TOOL_LABELS: [&str; 6] = [
    "app.kubernetes.io/",
    "applyset.kubernetes.io/",
    "argocd.argoproj.io/",
    "kustomize.toolkit.fluxcd.io/",
    "helm.toolkit.fluxcd.io/",
    "helm.sh/",
];

/// Everything that a rendering depends on, except the templates and the kinds that they may make.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Context {
    #[serde(serialize_with = "vm::as_object")]
    vm: Arc<Vm>,
    spec: Value,
    image: RunnerImage,
    resources: Value,
    init_resources: Value,
    disks: Vec<ResolvedDisk>,
    runner_data: Value,
    cloud_init: Option<CloudInitFiles>,
    runner: RunnerFile,
    qemu: Option<QemuFile>,
    service: Option<Service>,
    display_secret: DisplaySecret,
    relay: Value,
    labels: BTreeMap<String, String>,
    pod_labels: BTreeMap<String, String>,
    values: Value,
    config: Value,
    service_account: &'static str,
    image_repository_claim: Option<String>,
    manager_version: &'static str,
}

/// The runner's configuration.
#[derive(Serialize)]
#[serde(untagged)]
enum RunnerFile {
    Ours(Box<ConfigFile>),
    Legacy(Value),
}

impl Context {
    /// The names of the claims of the VM's disks and of its runner.
    pub(super) fn claims(&self) -> impl Iterator<Item = &str> {
        self.disks.iter().filter_map(ResolvedDisk::claim).chain(self.runner_data["claimName"].as_str())
    }

    /// The QEMU templates of the set, if the VM's runner can read them, with the runner's configuration.
    pub(super) fn qemu_file(&self) -> Option<(&RunnerConfig, &QemuFile)> {
        let RunnerFile::Ours(file) = &self.runner else { return None };
        Some((&file.runner, self.qemu.as_ref()?))
    }

    /// The context as a value for minijinja.
    pub(super) fn value(&self) -> minijinja::Value {
        Serde(self).into()
    }
}

/// Makes the context of a VM.
///
/// # Errors
/// If a part of the VM can't be written as JSON.
pub(super) fn build(
    vm: &VirtualMachine,
    observed: &Observed,
    config: &ReconcilerConfig,
    random: &RandomInput,
    values: Value,
    qemu: Option<&OfQemu>,
) -> Result<Context, serde_json::Error> {
    let name = vm.name_any();
    let disks = disks::resolve(vm, observed, config.disk_pvc);
    let section = cloud_init::section(vm)?;
    let files =
        vm.spec.cloud_init.as_ref().zip(section.as_ref()).map(|(data, section)| CloudInitFiles::of(data, section));
    let mut cloud_init = files.transpose()?;
    let image = RunnerImage::of(vm, config);
    let reader = Reader::of(observed, &config.allowed.legacy_runner_images, image.legacy);
    let managers = json!({
        "runnerDataPvc": { "storageClassName": config.runner_data_pvc.storage_class_name },
        "nodeDevices": config.node_devices,
        "passt": config.passt,
    });
    let qemu = qemu.filter(|_| !image.legacy).map(|templates| qemu::file(templates, &values, &managers));
    let with = |section| ConfigFile {
        runner: RunnerConfig {
            qemu_templates: qemu.as_ref().map(QemuFile::digest),
            ..runner_config(vm, disks::drives(vm, &disks), section, config.cd_folders.clone())
        },
    };
    if let Some(files) = cloud_init.as_mut().filter(|_| image.legacy) {
        files.runner_config = Some(legacy::configuration(&with(section.clone()))?);
    }
    let without_user_data = |section| CloudInitSection { user_data: Value::Null, vendor_data: Value::Null, ..section };
    let runner = match reader {
        Reader::Ours => RunnerFile::Ours(Box::new(with(section.map(without_user_data)))),
        Reader::Legacy => RunnerFile::Legacy(legacy::configuration(&with(section.map(without_user_data)))?),
        Reader::LegacyPod => {
            let section = section.map(|section| legacy::with_former_instance_id(vm, section));
            RunnerFile::Legacy(legacy::configuration(&with(section))?)
        }
    };
    let mut spec = spec::complete_spec(&vm.spec)?;
    if spec["loggingProperties"].is_null() {
        spec["loggingProperties"] = json!(config.logging_properties);
    }
    let image_repository_claim = image_repository_claim(config, &image, &disks);
    let resources = resources(&vm.spec, config, &image)?;
    Ok(Context {
        vm: Vm::of(vm),
        spec,
        init_resources: init_resources(&resources),
        resources,
        cloud_init,
        runner,
        disks,
        runner_data: runner_data(vm, observed),
        service: Service::of(vm.spec.load_balancer_service.as_ref(), &config.load_balancer_service),
        display_secret: DisplaySecret::of(vm, observed, &random.display_password),
        relay: json!({
            "secret": has_relay(config, &image).then(|| secret_name(&name)),
            "certificate": random.relay.certificate,
            "key": random.relay.key,
            "token": random.relay.token,
        }),
        labels: labels(&name),
        pod_labels: pod_labels(vm, config),
        qemu,
        values,
        config: managers,
        service_account: if image.legacy { LEGACY_SERVICE_ACCOUNT } else { SERVICE_ACCOUNT },
        image,
        image_repository_claim,
        manager_version: env!("CARGO_PKG_VERSION"),
    })
}

/// The runner's own claim. One that exists is not grown: not every storage can.
fn runner_data(vm: &VirtualMachine, observed: &Observed) -> Value {
    let name = claims::runner_data_name(vm, observed);
    let asked = observed.claim(&name).and_then(|claim| claim.spec["resources"]["requests"]["storage"].as_str());
    json!({ "claimName": name, "size": asked.unwrap_or(RUNNER_DATA_SIZE) })
}

/// Of the VM's own labels those that an administrator allows: a label can make the Pod an endpoint of another's Service, or take it out of a
/// NetworkPolicy. The name of a pool is a label of the Pods of its VMs, and of no copies of these.
fn pod_labels(vm: &VirtualMachine, config: &ReconcilerConfig) -> BTreeMap<String, String> {
    let is_for_tool = |label: &str| TOOL_LABELS.iter().any(|prefix| label.starts_with(prefix));
    let is_copied =
        |label: &str| config.allowed.pod_labels.contain(label) && !is_for_tool(label) && label != POOL_LABEL;
    let own = vm.labels().iter().filter(|(label, _)| is_copied(label));
    let own = own.map(|(label, value)| (label.clone(), value.clone()));
    let pool = pool_of(vm).map(|pool| (POOL_LABEL.to_owned(), pool.to_owned()));
    own.chain(pool).chain(labels(&vm.name_any())).collect()
}

/// The pool that has made the VM.
fn pool_of(vm: &VirtualMachine) -> Option<&str> {
    let is_pool = |owner: &&OwnerReference| {
        let is_controller = owner.controller == Some(true);
        is_controller && owner.kind == VmPool::kind(&()) && owner.api_version == VmPool::api_version(&())
    };
    let pool = vm.owner_references().iter().find(is_pool)?;
    is_made_by_pool(&vm.metadata).then_some(&pool.name)
}

/// The claim with CD images that the Pod mounts. A Pod whose claim does not exist can't start, so a cluster without that claim must get
/// along without it. The Pods of a legacy runner always had it.
fn image_repository_claim(config: &ReconcilerConfig, image: &RunnerImage, disks: &[ResolvedDisk]) -> Option<String> {
    let is_needed = image.legacy || disks.iter().any(ResolvedDisk::is_in_image_repository);
    config.image_repository_claim.clone().or_else(|| is_needed.then(|| IMAGE_REPOSITORY_CLAIM.to_owned()))
}

#[cfg(test)]
mod tests;
