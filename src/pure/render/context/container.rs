//! `image` and `resources` in the context: what the runner's container is made of and what it requests.

use std::collections::BTreeMap;

use kube::ResourceExt;
use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    api::{Accelerator, Image, VirtualMachine, VirtualMachineSpec},
    config::{NodeDevices, ReconcilerConfig},
    object::CONTAINER_NAME,
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
        let reference = image.and_then(Image::reference);
        let policy = image.and_then(|image| image.pull_policy).map(|policy| format!("{policy:?}"));
        let default_policy = config.runner_image_pull_policy.clone().filter(|_| reference.is_none());
        let reference = reference.unwrap_or_else(|| config.own_image());
        let legacy = config.allowed.legacy_runner_images.contain(&reference);
        // The name of a container can't have a dot.
        let named_like_vm = Some(vm.name_any()).filter(|name| legacy && !name.contains('.'));
        let container = named_like_vm.unwrap_or_else(|| CONTAINER_NAME.to_owned());
        Self { pull_policy: policy.or(default_policy), reference, legacy, container }
    }
}

/// Requests and limits: those of the VM's spec, else its current CPUs and RAM divided by the overcommit factors. In both cases with the
/// devices that the runner needs, unless the spec has a limit of that name. A legacy runner has all devices of its node.
pub(super) fn resources(
    spec: &VirtualMachineSpec,
    config: &ReconcilerConfig,
    image: &RunnerImage,
) -> Result<Value, serde_json::Error> {
    let mut resources = match &spec.resources {
        Some(resources) => serde_json::to_value(resources)?,
        None => shares(spec, config),
    };
    for device in devices(spec, config).filter(|_| !image.legacy) {
        let limits = &mut resources["limits"];
        if limits.get(device).is_none() {
            limits[device] = json!("1");
        }
    }
    Ok(resources)
}

/// What of the runner's resources is no device. The scheduler and quotas count the largest of a Pod's init containers and of what runs after
/// them, so an init container that has the same costs nothing.
pub(super) fn init_resources(resources: &Value) -> Value {
    const PLAIN: [&str; 3] = ["cpu", "memory", "ephemeral-storage"];
    let plain = |part: &Value| -> serde_json::Map<String, Value> {
        let all = part.as_object().into_iter().flatten();
        all.filter(|(name, _)| PLAIN.contains(&name.as_str()))
            .map(|(name, much)| (name.clone(), much.clone()))
            .collect()
    };
    let parts = ["limits", "requests"].map(|part| (part, plain(&resources[part])));
    json!(parts.into_iter().filter(|(_, plain)| !plain.is_empty()).collect::<BTreeMap<_, _>>())
}

fn shares(spec: &VirtualMachineSpec, config: &ReconcilerConfig) -> Value {
    // Whole thousandths of a CPU and whole bytes. Both are far below 2^53, up to which a float is exact.
    let cpu = (f64::from(spec.vm.cpus()) / config.cpu_overcommit * 1000.0).floor();
    let ram = (spec.vm.ram().bytes() as f64 / config.ram_overcommit).floor();
    json!({ "requests": { "cpu": format!("{cpu:.0}m"), "memory": format!("{ram:.0}") } })
}

/// The resources of the devices. Without a plugin for what there is, a VM with `auto` gets none: it must start on every node.
fn devices<'a>(spec: &VirtualMachineSpec, config: &'a ReconcilerConfig) -> impl Iterator<Item = &'a str> {
    let NodeDevices { kvm, machine } = &config.node_devices;
    let is_tapped = spec.vm.networks.iter().any(|network| network.tap.is_some());
    let kvm = (spec.vm.accelerator == Accelerator::Kvm).then_some(kvm.as_str());
    let machine = machine.as_deref().filter(|_| spec.vm.accelerator == Accelerator::Auto || is_tapped);
    kvm.into_iter().chain(machine)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::vm;

    /// The limits of a VM with that accelerator and network, without a plugin for what there is and with one.
    #[test]
    fn devices_follow_from_the_accelerator_the_networks_and_the_plugin() {
        let (kvm, machine) = ("vmoperator.jdrupes.org/kvm", "example.org/machine");
        let with_plugin = ReconcilerConfig {
            node_devices: NodeDevices { machine: Some(machine.into()), ..NodeDevices::default() },
            ..ReconcilerConfig::default()
        };
        for (accelerator, network, without, with) in [
            ("auto", "user", vec![], vec![machine]),
            ("auto", "tap", vec![], vec![machine]),
            ("kvm", "user", vec![kvm], vec![kvm]),
            ("kvm", "tap", vec![kvm], vec![kvm, machine]),
            ("tcg", "pod", vec![], vec![]),
            ("tcg", "tap", vec![], vec![machine]),
        ] {
            let vm = vm(|vm| {
                vm["spec"]["vm"]["accelerator"] = json!(accelerator);
                vm["spec"]["vm"]["networks"] = json!([{ network: {} }]);
            });
            for (config, expected) in [(&ReconcilerConfig::default(), without), (&with_plugin, with)] {
                let image = RunnerImage::of(&vm, config);
                let resources = resources(&vm.spec, config, &image).unwrap();
                let limits: Vec<&str> =
                    resources["limits"].as_object().into_iter().flatten().map(|(name, _)| name.as_str()).collect();
                let found = expected.iter().all(|name| limits.contains(name)) && limits.len() == expected.len();
                assert!(found, "{accelerator}, {network}: {limits:?}");
                let legacy = RunnerImage { legacy: true, ..image };
                assert!(super::resources(&vm.spec, config, &legacy).unwrap()["limits"].is_null());
            }
        }
    }

    #[test]
    fn a_limit_of_the_spec_stays() {
        let vm = vm(|vm| {
            vm["spec"]["vm"]["accelerator"] = json!("kvm");
            vm["spec"]["resources"] = json!({ "limits": { "vmoperator.jdrupes.org/kvm": "2", "cpu": "1" } });
        });
        let config = ReconcilerConfig::default();
        let resources = resources(&vm.spec, &config, &RunnerImage::of(&vm, &config)).unwrap();
        assert_eq!(resources, json!({ "limits": { "vmoperator.jdrupes.org/kvm": "2", "cpu": "1" } }));
    }
}
