//! Legacy runners: those of the VM-Operator in Java, whose images many VMs still use. They run in our Pods, with a configuration that
//! they can read.
//!
//! A legacy runner takes the data for cloud-init from its configuration. User data may contain passwords, so such a configuration is in a
//! Secret. Only a Pod that the VM-Operator itself created mounts it from the ConfigMap, until the VM is started again.

use serde_json::{Value, json};

use crate::{
    api::VirtualMachine,
    config::allowed::{Images, is_named_like_legacy},
    observed::{Object, Observed},
    runner_config::{CloudInitSection, ConfigFile},
};

/// The keys of the section `/Runner` that a legacy runner knows.
const RUNNER: [&str; 7] =
    ["dataDir", "template", "updateTemplate", "guestShutdownStops", "resetCounter", "cloudInit", "vm"];
/// The keys of the section `cloudInit` that a legacy runner knows.
const CLOUD_INIT: [&str; 3] = ["metaData", "userData", "networkConfig"];
/// The keys of the section `vm` that a legacy runner knows.
const VM: [&str; 21] = [
    "name",
    "uuid",
    "useTpm",
    "firmware",
    "bootMenu",
    "powerdownTimeout",
    "cpuModel",
    "maximumCpus",
    "sockets",
    "diesPerSocket",
    "coresPerDie",
    "threadsPerCore",
    "currentCpus",
    "maximumRam",
    "currentRam",
    "accelerator",
    "rtcBase",
    "rtcClock",
    "network",
    "drives",
    "display",
];
/// The keys of a drive that a legacy runner knows.
const DRIVE: [&str; 4] = ["type", "resource", "file", "bootindex"];
/// The keys of the display that a legacy runner knows.
const DISPLAY: [&str; 3] = ["outputs", "loggedInUser", "spice"];

/// Who reads the VM's configuration now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reader {
    /// Our runner.
    Ours,
    /// A legacy runner in a Pod that the manager created.
    Legacy,
    /// A legacy runner in a Pod that the VM-Operator created.
    LegacyPod,
}

impl Reader {
    /// The runner in the VM's Pod, or else the one that will run in the next Pod.
    pub(super) fn of(observed: &Observed, images: &Images, is_next_legacy: bool) -> Self {
        let mut pods = observed.objects.iter().filter(|object| object.key.is_pod() && !object.has_ended());
        let running = pods.find_map(|pod| Some((pod, pod.runner_container()?["image"].as_str()?)));
        match running {
            // What runs already is no question of permission.
            Some((pod, image)) if images.contain(image) || is_named_like_legacy(image) => {
                if mounts_all_of_config_map(pod) { Self::LegacyPod } else { Self::Legacy }
            }
            Some(_) => Self::Ours,
            None if is_next_legacy => Self::Legacy,
            None => Self::Ours,
        }
    }
}

/// Whether a Pod takes the runner's configuration from the ConfigMap and not from a Secret.
fn mounts_all_of_config_map(pod: &Object) -> bool {
    let volumes = pod.spec["volumes"].as_array().into_iter().flatten();
    let mut sources = volumes.filter_map(|volume| volume["projected"]["sources"].as_array()).flatten();
    // The container has the VM's name, as the ConfigMap. The Pod's labels may be gone.
    let vm = pod.runner_container_name();
    sources.any(|source| source["configMap"]["name"] == vm && source["configMap"]["items"].is_null())
}

/// The data for cloud-init with the `instance-id` of the VM-Operator, unless the VM's spec sets one. With another ID cloud-init would run
/// again if the kubelet starts the container again.
pub(super) fn with_former_instance_id(vm: &VirtualMachine, mut section: CloudInitSection) -> CloudInitSection {
    let is_set = vm.spec.cloud_init.as_ref().is_some_and(|data| data.meta_data.contains_key("instance-id"));
    if !is_set {
        let generation = vm.metadata.generation.unwrap_or_default();
        section.meta_data.insert("instance-id".into(), json!(format!("v{generation}")));
    }
    section
}

/// The configuration with only the keys that a legacy runner knows. It refuses others, or passes them to QEMU.
pub(super) fn configuration(file: &ConfigFile) -> Result<Value, serde_json::Error> {
    let mut value = serde_json::to_value(file)?;
    keep(&mut value["/Runner"], &RUNNER);
    // An index would add the key.
    if let Some(data) = value["/Runner"].get_mut("cloudInit") {
        keep(data, &CLOUD_INIT);
    }
    let vm = &mut value["/Runner"]["vm"];
    keep(vm, &VM);
    if vm["accelerator"] == "auto" {
        // Its own default is KVM.
        let _ = vm.as_object_mut().and_then(|vm| vm.remove("accelerator"));
    }
    for network in items(&mut vm["network"]) {
        let keys: &[&str] =
            if network["type"] == "tap" { &["type", "device", "bridge", "mac"] } else { &["type", "device", "net"] };
        keep(network, keys);
    }
    items(&mut vm["drives"]).for_each(|drive| keep(drive, &DRIVE));
    keep(&mut vm["display"], &DISPLAY);
    Ok(value)
}

fn keep(value: &mut Value, keys: &[&str]) {
    if let Value::Object(map) = value {
        map.retain(|key, _| keys.contains(&key.as_str()));
    }
}

fn items(value: &mut Value) -> impl Iterator<Item = &mut Value> {
    value.as_array_mut().into_iter().flatten()
}
