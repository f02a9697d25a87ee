//! What the objects of a VM become on a computer without a cluster. Pure.
//!
//! | in a Pod | here |
//! |---|---|
//! | the volume with the runner's configuration | the same files in a folder, `config.yaml` with the changes below |
//! | the claim of a disk | a file: raw, or qcow2 over an image |
//! | the claim with the VM's own data, the runtime directory | folders |
//! | networks of type tap and pod | QEMU's user network; the first network forwards the published ports |
//! | the display's TCP port, its password | none, or a Unix socket that only the user can open |
//! | the image repository | a folder |
//! | the kubelet starts the guest again after its own shutdown | the runner ends |

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use super::volumes::{self, Objects};
use crate::{
    claims,
    runner_config::{ConfigFile, DisplaySection, Drive, Forward, NetworkSection, RunnerConfig, paths},
};

/// The size of a disk whose claim requests none.
const DEFAULT_SIZE: u64 = 1 << 30;

/// Where things are, and what the user asked for.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The VM's folder.
    pub dir: PathBuf,
    /// The runtime directory.
    pub runtime_dir: PathBuf,
    /// The folders from which the guest may have CDs. They stand for the image repository.
    pub cd_folders: Vec<PathBuf>,
    /// The names of the files that are in [`disks_dir`] already.
    pub existing: BTreeSet<String>,
    /// Whether the first disk has an image.
    pub has_image: bool,
    /// The ports to forward to the guest.
    pub publish: Vec<Forward>,
    /// Whether the VM has its display.
    pub display: bool,
}

/// What has to be made before the runner starts.
#[derive(Debug, PartialEq)]
pub struct LocalPlan {
    /// The runner's configuration.
    pub config: RunnerConfig,
    /// The files of the configuration directory.
    pub files: BTreeMap<String, Vec<u8>>,
    /// The disk over an image, if there is one. The runner makes the others itself.
    pub overlay: Option<Overlay>,
    /// What is different from a cluster, for the user.
    pub notes: Vec<String>,
}

/// A disk in the format qcow2 over an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Overlay {
    /// The file.
    pub file: PathBuf,
    /// Whether it exists.
    pub exists: bool,
    /// The size that it must have at least.
    pub size: u64,
}

/// Why the VM can't run without a cluster.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What the runner's container would get is missing.
    #[error(transparent)]
    Volumes(#[from] volumes::Error),
    /// The rendered configuration can't be used.
    #[error("config.yaml, as the templates render it: {0}")]
    Config(String),
    /// There is nothing that could forward ports.
    #[error(
        "--publish: the VM has no network: add spec.vm.networks: [{{user: {{}}}}], or --set spec.vm.networks='[{{user: {{}}}}]'"
    )]
    NoNetwork,
    /// There is no disk for the image.
    #[error("--image: the VM has no disk with a volumeClaimTemplate, so nothing could start from the image")]
    NoDisk,
    /// The first disk exists, and is not over an image.
    #[error("--image: the disk {} exists already, without an image; --fresh removes it with all that the guest has written, and another \
             --dir leaves it", .0.display())]
    DiskWithoutImage(PathBuf),
}

/// The folder of the disks in the VM's folder.
pub fn disks_dir(dir: &Path) -> PathBuf {
    dir.join("disks")
}

/// What has to be made, from the rendered objects and the other objects of the file.
///
/// # Errors
/// If something is missing that only a cluster has, or the options do not fit the VM.
pub fn plan(objects: &Objects, options: &Options) -> Result<LocalPlan, Error> {
    let mut files = objects.files(paths::CONFIG_DIR)?;
    let text = files.get("config.yaml").cloned().unwrap_or_default();
    let mut config =
        RunnerConfig::parse(&String::from_utf8_lossy(&text)).map_err(|error| Error::Config(error.to_string()))?;
    let mut notes: Vec<String> = objects
        .other_containers()
        .filter(|name| !OF_THE_RUNNER.contains(name))
        .map(|name| format!("the Pod's container {name} does not run here"))
        .collect();
    // Only this user can open the socket.
    for name in [paths::PASSWORD_FILE, paths::EXPIRY_FILE] {
        files.remove(name);
    }
    config.data_dir = options.dir.join("data").display().to_string();
    config.runtime_dir = options.runtime_dir.display().to_string();
    config.cd_folders = options.cd_folders.iter().map(|folder| folder.display().to_string()).collect();
    config.guest_shutdown_stops = false;
    config.vm.display = display(config.vm.display, options);
    networks(&mut config.vm.network, &options.publish, &mut notes)?;
    let Drives { drives, overlay } = drives(&config.vm.drives, objects, options, &mut notes)?;
    config.vm.drives = drives;
    let file = ConfigFile { runner: config };
    let text = serde_yaml::to_string(&file).map_err(|error| Error::Config(error.to_string()))?;
    files.insert("config.yaml".into(), text.into_bytes());
    Ok(LocalPlan { config: file.runner, files, overlay, notes })
}

/// The containers of the built-in Pod whose work this program does.
const OF_THE_RUNNER: [&str; 2] = ["agent", "passt"];

fn display(display: DisplaySection, options: &Options) -> DisplaySection {
    let DisplaySection { outputs, logged_in_user, mut spice, mut vnc, clipboard } = display;
    let socket = options.runtime_dir.join("display.sock").display().to_string();
    spice.iter_mut().for_each(|spice| spice.socket = Some(socket.clone()));
    vnc.iter_mut().for_each(|vnc| vnc.socket = Some(socket.clone()));
    let shown = options.display;
    DisplaySection { outputs, logged_in_user, spice: spice.filter(|_| shown), vnc: vnc.filter(|_| shown), clipboard }
}

/// Makes user networks of all networks. The first one forwards the ports.
fn networks(networks: &mut [NetworkSection], publish: &[Forward], notes: &mut Vec<String>) -> Result<(), Error> {
    for (index, network) in networks.iter_mut().enumerate() {
        let instead = |kind: &str| {
            format!(
                "spec.vm.networks[{index}] is a user network here and not {kind}: the guest reaches the network, and --publish forwards \
                 ports to it"
            )
        };
        let (device, mac, name, slot) = match network {
            NetworkSection::User { .. } => continue,
            NetworkSection::Tap { device, bridge, mac, name, slot } => {
                notes.push(instead(&format!("on the bridge {bridge}")));
                (device, mac, name, slot)
            }
            NetworkSection::Pod { device, mac, name, slot } => {
                notes.push(instead("that of a Pod"));
                (device, mac, name, slot)
            }
        };
        *network = NetworkSection::User {
            device: std::mem::take(device),
            net: None,
            mac: mac.take(),
            name: name.take(),
            slot: slot.take(),
            forwards: Vec::new(),
        };
    }
    match networks.first_mut() {
        Some(NetworkSection::User { forwards, .. }) => forwards.extend(publish),
        _ if publish.is_empty() => {}
        _ => return Err(Error::NoNetwork),
    }
    Ok(())
}

struct Drives {
    drives: Vec<Drive>,
    overlay: Option<Overlay>,
}

fn drives(of_pod: &[Drive], objects: &Objects, options: &Options, notes: &mut Vec<String>) -> Result<Drives, Error> {
    let mut found = Drives { drives: Vec::new(), overlay: None };
    let mut is_first = true;
    for drive in of_pod {
        let drive = match drive {
            Drive::IdeCd { file, bootindex, name, slot } => Drive::IdeCd {
                file: cd(file, &options.cd_folders),
                bootindex: *bootindex,
                name: name.clone(),
                slot: *slot,
            },
            Drive::Raw { resource, bootindex, size, serial, slot } => {
                let claim = objects.claim(resource)?;
                let size = size.or(claims::requested_size(&claim.spec)).unwrap_or(DEFAULT_SIZE);
                let disk =
                    Disk { volume: &claim.volume, bootindex: *bootindex, size, serial: serial.as_deref(), slot: *slot };
                let drive = disk.drive(options, std::mem::take(&mut is_first), &mut found.overlay)?;
                notes.extend(disk.note_if_empty(&drive, of_pod, options));
                drive
            }
            Drive::Qcow2 { .. } => drive.clone(),
        };
        found.drives.push(drive);
    }
    if options.has_image && found.overlay.is_none() {
        return Err(Error::NoDisk);
    }
    Ok(found)
}

/// The file of a CD: what the Pod finds in the image repository is in one of the folders here, the first that has it.
fn cd(file: &str, folders: &[PathBuf]) -> String {
    match file.strip_prefix(paths::IMAGE_REPOSITORY).and_then(|rest| rest.strip_prefix('/')) {
        Some(name) => {
            let mut places = folders.iter().map(|folder| folder.join(name));
            let first = places.clone().next();
            let found = places.find(|place| place.exists()).or(first);
            found.map_or_else(|| file.to_owned(), |place| place.display().to_string())
        }
        None => file.to_owned(),
    }
}

/// A disk of the VM.
struct Disk<'a> {
    volume: &'a str,
    bootindex: Option<u32>,
    size: u64,
    serial: Option<&'a str>,
    slot: Option<u32>,
}

impl Disk<'_> {
    /// The disk's file. The first disk is over an image if the user gives one, or has given one before.
    fn drive(&self, options: &Options, is_first: bool, overlay: &mut Option<Overlay>) -> Result<Drive, Error> {
        let Self { volume, bootindex, size, serial, slot } = *self;
        let serial = serial.map(str::to_owned);
        let (raw, qcow2) = (format!("{volume}.img"), format!("{volume}.qcow2"));
        let path = |name: &str| disks_dir(&options.dir).join(name);
        let exists = options.existing.contains(&qcow2);
        if !(exists || is_first && options.has_image) {
            let resource = path(&raw).display().to_string();
            return Ok(Drive::Raw { resource, bootindex, size: Some(size), serial, slot });
        }
        if options.existing.contains(&raw) {
            return Err(Error::DiskWithoutImage(path(&raw)));
        }
        let file = path(&qcow2);
        let resource = file.display().to_string();
        *overlay = Some(Overlay { file, exists, size });
        Ok(Drive::Qcow2 { resource, bootindex, serial, slot })
    }

    /// A note if this is a new disk, and nothing could put a system on it.
    fn note_if_empty(&self, drive: &Drive, all: &[Drive], options: &Options) -> Option<String> {
        let Drive::Raw { resource, .. } = drive else { return None };
        let is_new = !options.existing.contains(&format!("{}.img", self.volume));
        let has_other =
            all.iter().filter(|drive| !matches!(drive, Drive::IdeCd { file, .. } if file.is_empty())).count() > 1;
        let note = || format!("the disk {resource} is new and empty: --image FILE starts the VM from an image");
        (is_new && !has_other).then(note)
    }
}

#[cfg(test)]
mod tests;
