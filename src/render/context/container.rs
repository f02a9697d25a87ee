//! `image` and `resources` in the context: what the runner's container is made of and what it requests.

use kube::ResourceExt;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    api::{Image, VirtualMachine, VirtualMachineSpec},
    config::ReconcilerConfig,
    object::CONTAINER_NAME,
    render::runner::{current_cpus, current_ram},
};

/// The registry of the runner's image if neither the VM nor the manager names one. The programs of a release have its registry built in.
const REGISTRY: &str = match option_env!("VM_OPERATOR_REGISTRY") {
    Some(registry) => registry,
    None => "localhost",
};

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RunnerImage {
    reference: String,
    pull_policy: Option<String>,
    /// It contains a legacy runner.
    pub(super) legacy: bool,
    /// The name of the runner's container. A legacy runner's has the VM's name, which is how its users find it (`kubectl exec`).
    container: String,
}

impl RunnerImage {
    /// The VM's image, else the manager's. The manager's pull policy is for the manager's image only.
    pub(super) fn of(vm: &VirtualMachine, config: &ReconcilerConfig) -> Self {
        let image = vm.spec.image.as_ref();
        let reference = image.and_then(reference);
        let policy = image.and_then(|image| image.pull_policy).map(|policy| format!("{policy:?}"));
        let default_policy = config.runner_image_pull_policy.clone().filter(|_| reference.is_none());
        let default_reference = || config.runner_image.clone().unwrap_or_else(default_image);
        let reference = reference.unwrap_or_else(default_reference);
        let legacy = config.legacy_runner_images.contain(&reference);
        // The name of a container can't have a dot.
        let named_like_vm = Some(vm.name_any()).filter(|name| legacy && !name.contains('.'));
        let container = named_like_vm.unwrap_or_else(|| CONTAINER_NAME.to_owned());
        Self { pull_policy: policy.or(default_policy), reference, legacy, container }
    }
}

fn default_image() -> String {
    format!("{REGISTRY}/vm-runner:{}", env!("CARGO_PKG_VERSION"))
}

fn reference(image: &Image) -> Option<String> {
    image.source.clone().or_else(|| {
        let path = format!("{}/{}", image.repository.as_ref()?, image.path.as_ref()?);
        Some(image.version.as_ref().map_or(path.clone(), |version| format!("{path}:{version}")))
    })
}

/// Requests and limits: those of the VM's spec, else its current CPUs and RAM divided by the overcommit factors.
pub(super) fn resources(spec: &VirtualMachineSpec, config: &ReconcilerConfig) -> Result<Value, serde_json::Error> {
    if let Some(resources) = &spec.resources {
        return serde_json::to_value(resources);
    }
    // Whole thousandths of a CPU and whole bytes. Both are far below 2^53, up to which a float is exact.
    let cpu = (f64::from(current_cpus(spec)) / config.cpu_overcommit * 1000.0).floor();
    let ram = (current_ram(spec) as f64 / config.ram_overcommit).floor();
    Ok(json!({ "requests": { "cpu": format!("{cpu:.0}m"), "memory": format!("{ram:.0}") } }))
}
