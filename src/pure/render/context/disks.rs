//! `disks` in the context: the VM's disks with the names and paths that the operator derives.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::{
    api::{Disk, VirtualMachine, VolumeClaimTemplate},
    claims,
    config::DiskPvc,
    observed::Observed,
    render::{
        drives,
        runner::{cd_drive, cd_file},
    },
    runner_config::{Drive, paths},
};

/// A disk. A CD drive has none of the fields of a claim, and a claim no `file`.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ResolvedDisk {
    /// `claim` or `cdrom`.
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
    #[serde(skip)]
    drive: Option<Drive>,
}

impl ResolvedDisk {
    /// The name of its claim, if it is no CD drive.
    pub(super) fn claim(&self) -> Option<&str> {
        (self.type_ == "claim").then_some(&self.claim_name)
    }

    /// It is a CD drive with a file of the image repository.
    pub(super) fn is_in_image_repository(&self) -> bool {
        let in_folder =
            |file: &str| file.strip_prefix(paths::IMAGE_REPOSITORY).is_some_and(|rest| rest.starts_with('/'));
        self.file.as_deref().is_some_and(in_folder)
    }
}

/// The disks of a VM in their order. A disk that is neither a claim nor a CD drive is left out.
pub(super) fn resolve(vm: &VirtualMachine, observed: &Observed, defaults: DiskPvc) -> Vec<ResolvedDisk> {
    let disks = &vm.spec.vm.disks;
    let resolved = disks.iter().zip(claims::volumes(vm)).filter_map(|(disk, volume)| {
        match (volume, &disk.volume_claim_template, &disk.cdrom) {
            (Some(volume), Some(template), _) => Some(resolve_claim(vm, volume, disk, template, observed, defaults)),
            (_, _, Some(cdrom)) => Some(ResolvedDisk {
                type_: "cdrom",
                file: Some(cd_file(&cdrom.image)),
                bootindex: disk.bootindex,
                drive: Some(cd_drive(cdrom, disk.bootindex)),
                ..ResolvedDisk::default()
            }),
            _ => None,
        }
    });
    resolved.collect()
}

/// The drives of the runner's configuration.
pub(super) fn drives(vm: &VirtualMachine, disks: &[ResolvedDisk]) -> Vec<Drive> {
    let mut drives: Vec<Drive> = disks.iter().filter_map(|disk| disk.drive.clone()).collect();
    drives::place(vm, &mut drives);
    drives
}

fn resolve_claim(
    vm: &VirtualMachine,
    volume: String,
    disk: &Disk,
    template: &VolumeClaimTemplate,
    observed: &Observed,
    defaults: DiskPvc,
) -> ResolvedDisk {
    let (bootindex, serial) = (disk.bootindex, disk.serial.clone());
    let claim_name = claims::disk_name(vm, &volume, observed);
    let claim = observed.claim(&claim_name);
    let spec = claim_spec(template, claim.map(|claim| &claim.spec), defaults);
    // The mode of a claim that exists can't be changed, so the claim decides and not the spec.
    let mode = claim.and_then(|claim| claim.spec["volumeMode"].as_str()).or(spec["volumeMode"].as_str());
    let mode = mode.unwrap_or("Block").to_owned();
    let device = format!("/dev/{volume}");
    let path = format!("{}/{volume}", paths::DISK_DIR);
    let drive = if mode == "Filesystem" {
        // A claim that can't grow, or has not grown yet, has no room for a larger file.
        // While a guest runs, its disk grows after the file system, and not before.
        let is_mounted = vm.status.as_ref().is_some_and(|status| status.created == Some(true));
        let room = if is_mounted { claims::size_now } else { claims::size_when_mounted };
        let room = claim.and_then(|claim| room(claim));
        let size = claims::requested_size(&spec).map(|wanted| room.map_or(wanted, |room| wanted.min(room)));
        Drive::Raw { resource: format!("{path}/disk.img"), bootindex, size, serial, slot: None }
    } else {
        Drive::Raw { resource: device.clone(), bootindex, size: None, serial, slot: None }
    };
    let metadata = template.metadata.clone().unwrap_or_default();
    ResolvedDisk {
        type_: "claim",
        volume,
        claim_name,
        device,
        path,
        mode,
        spec,
        labels: metadata.labels,
        annotations: metadata.annotations,
        file: None,
        bootindex,
        drive: Some(drive),
    }
}

/// The claim's spec with defaults. The defaults are those of the claim that exists, because a field that the VM's spec does not set is
/// no difference between the two.
fn claim_spec(template: &VolumeClaimTemplate, existing: Option<&Value>, defaults: DiskPvc) -> Value {
    let mut spec = template.spec.clone().unwrap_or_else(|| json!({}));
    if let Value::Object(spec) = &mut spec {
        for (field, default) in [("accessModes", json!(["ReadWriteOnce"])), ("volumeMode", json!(defaults.volume_mode))]
        {
            let default = || existing.and_then(|existing| existing.get(field)).cloned().unwrap_or(default);
            spec.entry(field).or_insert_with(default);
        }
    }
    spec
}
