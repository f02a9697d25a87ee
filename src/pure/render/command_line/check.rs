//! Renders a QEMU template where no node is, with samples of what the runner finds on one.

use serde_json::Value;

use super::{
    Environment, Error, Firmware, Hardware, Medium, PodLink, Prepared, QemuFile, Sockets, arguments_of, context,
    has_pod_network,
};
use crate::{
    api,
    render::{TemplateError, TemplateSet},
    runner_config::{Drive, RunnerConfig, paths},
};

/// What one node has, and another has not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sample {
    /// KVM, block devices, and passt that reaches the guest's memory.
    WithAll,
    /// None of these.
    WithLittle,
}

/// Checks a template of a set for a VM.
///
/// # Errors
/// What the runner would refuse at the VM's start, whatever its node has.
pub fn check(set: &TemplateSet, name: &str, config: &RunnerConfig, file: &QemuFile) -> Result<(), TemplateError> {
    for sample in [Sample::WithAll, Sample::WithLittle] {
        match sampled(set, name, config, file, sample) {
            Err(Error::Template(error)) => return Err(error),
            // No template helps what the runner does not support in the VM.
            Ok(_) | Err(Error::Unsupported(_)) => {}
        }
    }
    Ok(())
}

/// QEMU's arguments of a VM on a node that has what the sample says. The paths are those of the runner's image.
///
/// # Errors
/// As [`super::qemu`].
pub fn sampled(
    set: &TemplateSet,
    name: &str,
    config: &RunnerConfig,
    file: &QemuFile,
    sample: Sample,
) -> Result<Vec<String>, Error> {
    let prepared = prepared(config, sample);
    arguments_of(
        set,
        name,
        &context(config, &prepared, Sockets::in_folder(paths::RUNTIME_DIR), file)?,
        prepared.hardware,
    )
}

/// The context of a VM that has all kinds of devices, for who wants to know the names in it. What a VM may leave out is `null` or absent.
pub fn sample_context() -> Value {
    let config = RunnerConfig::parse(SAMPLE).ok();
    let context = config.as_ref().and_then(|config| {
        let prepared = prepared(config, Sample::WithAll);
        let file = QemuFile::default();
        let context = context(config, &prepared, Sockets::in_folder(paths::RUNTIME_DIR), &file).ok()?;
        serde_json::to_value(&context).ok()
    });
    context.unwrap_or_default()
}

/// A VM with a device of each kind.
const SAMPLE: &str = "
/Runner:
  namespace: orchard
  cloudInit: {}
  vm:
    name: apple
    useTpm: true
    firmware: secure
    maximumRam: 4Gi
    onPanic: restart
    drives:
    - { type: raw, resource: /dev/system-disk, bootindex: 0 }
    - { type: ide-cd, file: https://host/a.iso, bootindex: 1 }
    network:
    - { type: pod, device: virtio-net }
    - { type: user, device: virtio-net, net: 10.0.2.0/24 }
    - { type: tap, device: virtio-net, bridge: br0 }
    display: { spice: { port: 5900 } }
";

fn prepared(config: &RunnerConfig, sample: Sample) -> Prepared {
    let vm = &config.vm;
    let has_all = sample == Sample::WithAll;
    let runtime = |name: &str| format!("{}/{name}", paths::RUNTIME_DIR);
    let hardware = vm.hardware.as_deref().and_then(Hardware::from_name).unwrap_or(Hardware::NEWEST);
    let medium = |text: &str| match text {
        "" => None,
        text if text.starts_with('/') => Some(Medium::File(text.into())),
        text => Some(Medium::Url(text.into())),
    };
    let code = |secure: bool| Firmware {
        code: format!("/usr/share/OVMF/OVMF_CODE_4M{}.fd", if secure { ".secboot" } else { "" }),
        vars: format!("{}/fw-vars.fd", config.data_dir),
        secure,
    };
    let socket = if has_all { format!("{}/vhost-user.sock", paths::PASST_DIR) } else { runtime("passt.sock") };
    let link = if has_all { PodLink::VhostUser } else { PodLink::Stream };
    Prepared {
        hardware,
        machine_type: vm.machine_type.clone().unwrap_or_else(|| "pc-q35-10.0".into()),
        accelerator: if has_all { "kvm" } else { "tcg" },
        uuid: vm.uuid.clone().unwrap_or_else(|| "00000000-0000-4000-8000-000000000000".into()),
        firmware: match vm.firmware {
            api::Firmware::Bios => None,
            api::Firmware::Uefi | api::Firmware::Uefi4m => Some(code(false)),
            api::Firmware::Secure | api::Firmware::Secure4m => Some(code(true)),
        },
        cloud_init_disk: config.cloud_init.is_some().then(|| runtime("cloud-init.img")),
        block_devices: vm.disks().map(|_| has_all).collect(),
        media: vm.drives.iter().filter_map(Drive::cd).map(medium).collect(),
        pod_network: link(if has_pod_network(vm) { socket } else { String::new() }.into()),
        display_password: has_all,
        names_disks: hardware.is_multi_queue(),
        generation_id: hardware.is_multi_queue().then(|| "00000000-0000-4000-8000-000000000001".into()),
        rtc_base: None,
        // A template may refuse to start a guest without its device.
        environment: Environment::Each("0000:01:00.0"),
    }
}
