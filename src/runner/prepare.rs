//! Prepares the files that QEMU needs at its start: the VM's identity, the firmware variables, the disks, the QEMU template.
//!
//! The VM's own data is in the data directory, which outlives the Pod: `uuid.txt`, `machine-type`, `fw-vars.fd` (the UEFI variables; `fw-vars.kind` says for which firmware),
//! `hardware`, `disk-serials` and `generation-id` (what the guest must find at each start), `tpm/`, and the copy of the QEMU template if the configuration has `updateTemplate: false`.
//!
//! A VM that the VM-Operator in Java created has `uuid.txt` and `fw-vars.fd` in the same places, its TPM's state in the directory itself,
//! and always a copy of its QEMU template, `VM.ftl.yaml`. The runner uses these files where they are, so that both runners can use the
//! volume in turn. It records in the file `hardware` that the guest must find the hardware of that runner ([`Hardware`]).

use std::{
    fs, io,
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::fs::OFlags;
use serde_json::json;
use tokio::process::Command;
use tracing::{info, warn};

use super::{
    cd, clock_zone,
    cloud_init::CloudInitFiles,
    config::{self, Configuration},
    files::{FileAccessError, Purpose, random_uuid, read_optional, read_optional_text},
    runtime_dir::RuntimeDir,
};
use crate::{
    api,
    render::command_line::{self, Environment, Firmware, Hardware, Medium, PodLink, Prepared, QemuFile, Template},
    render::qemu::template_of,
    runner_config::{Drive, LATEST_HARDWARE, RunnerConfig, VmSection, paths},
};

/// The directory of custom QEMU templates in the runner's image.
pub const TEMPLATES: &str = "/opt/vmrunner/templates";
/// The directories of the UEFI firmware: of Debian's and Alpine's package ovmf, and of Fedora's and Arch's package edk2-ovmf.
const OVMF: [&str; 3] = ["/usr/share/OVMF", "/usr/share/edk2/ovmf", "/usr/share/edk2/x64"];

/// The file in the data directory that names the arrangement of the devices ([`Hardware::name`]); absent in a VM that was started before:
/// [`Hardware::Standard`].
const HARDWARE: &str = "hardware";
/// The file in the data directory that says that disks have their names as serial numbers.
const SERIALS: &str = "disk-serials";
/// The file in the data directory with the ID of the VM's generation.
const GENERATION: &str = "generation-id";
/// The file in the data directory in which the VM-Operator in Java keeps the QEMU template of the last start.
const LEGACY_TEMPLATE: &str = "VM.ftl.yaml";
/// The file in the data directory with QEMU's machine type.
const MACHINE_TYPE: &str = "machine-type";
/// The file in the data directory with the templates of the VM's set at its first start, if it keeps them.
const QEMU_COPY: &str = "qemu-templates.yaml";
/// The file with a TPM's persistent state, as swtpm names it.
const TPM_STATE: &str = "tpm2-00.permall";

/// Why something that QEMU needs is missing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// The copy of the templates of the VM's set can't be read.
    #[error(transparent)]
    Copy(#[from] config::Error),
    /// The template does not exist.
    #[error(
        "there is no QEMU template {name}: it is neither in the VM's template set (as qemu/{name}) nor built in ({}) nor in {TEMPLATES}",
        command_line::STANDARD
    )]
    NoTemplate {
        /// The template's name.
        name: String,
    },
    /// The runner's image does not have the firmware.
    #[error("the firmware {kind} is not installed: looked for {tried}; use another one, or a runner image that has it")]
    NoFirmware {
        /// The firmware in the configuration.
        kind: String,
        /// The paths where it could be.
        tried: String,
    },
    /// The VM's variables are those of a firmware of another size.
    #[error(
        "{} has {size} bytes, but the variables of the firmware {kind} have another size; choose the firmware that the \
         VM was created with, or remove the file (UEFI boot entries and Secure Boot keys are lost then)",
        path.display()
    )]
    OtherFirmware {
        /// The firmware in the configuration.
        kind: String,
        /// The file with the VM's variables.
        path: PathBuf,
        /// Its size in bytes.
        size: u64,
    },
    /// The VM's variables are in a file that has a format.
    #[error(
        "{} is a file of the format qcow2, which QEMU does not read as variables of a firmware: `qemu-img convert -f qcow2 -O raw` makes one that it reads",
        path.display()
    )]
    VariablesInQcow2 {
        /// The file with the VM's variables.
        path: PathBuf,
    },
    /// The clock can't have the time of the zone.
    #[error(transparent)]
    Zone(#[from] clock_zone::UnknownZone),
    /// The VM's variables have no keys, and the firmware is one with Secure Boot.
    #[error(
        "{} belongs to a firmware without Secure Boot and has no keys, so the firmware {kind} would check nothing: choose the firmware that the \
         VM was created with; or remove the file, and a new one with keys is made (UEFI boot entries are lost then)",
        path.display()
    )]
    NoKeys {
        /// The firmware in the configuration.
        kind: String,
        /// The file with the VM's variables.
        path: PathBuf,
    },
    /// A disk does not exist.
    #[error("the disk {path} does not exist: check the Pod's volumeDevices and volumeMounts")]
    NoDisk {
        /// The path of the disk.
        path: String,
    },
    /// A later release has started the VM.
    #[error(
        "the VM's hardware generation is {name:?}, which this runner does not know: a later release has started the VM, and its guest must find \
         the same hardware again; start it with that release"
    )]
    UnknownHardware {
        /// The generation.
        name: String,
    },
    /// A text that QEMU would misunderstand.
    #[error("{value:?} can't be QEMU's {what}; correct the VM's status.identity, or the file in the VM's data")]
    Identity {
        /// `machine type` or `UUID`.
        what: &'static str,
        /// The text.
        value: String,
    },
    /// In place of a disk's file there is something else.
    #[error("the disk {path} is no ordinary file: remove what is there, or put the disk's image there")]
    NotAFile {
        /// The path of the disk.
        path: String,
    },
    /// QEMU cannot be started to list its machine types.
    #[error("cannot run {qemu}")]
    Qemu {
        /// The program.
        qemu: String,
        /// The system's error.
        source: io::Error,
    },
    /// QEMU's list of machine types has no `pc-q35`.
    #[error("{qemu} knows no pc-q35 machine type; set the machine type in the configuration")]
    NoMachineType {
        /// The program.
        qemu: String,
    },
}

/// Finds everything that QEMU needs. For a start it creates what does not exist yet. `accelerator` is `kvm` or `tcg`, `qemu` the program.
///
/// # Errors
/// If something is missing or cannot be created. The error names it.
pub async fn prepare(
    Configuration { config, digest: _, password, cloud_init, qemu: _ }: &Configuration,
    runtime: &RuntimeDir,
    accelerator: &'static str,
    qemu: &str,
    pod_network: PodLink,
    purpose: Purpose,
) -> Result<Prepared, Error> {
    let data = Path::new(&config.data_dir);
    purpose.create_directory(data)?;
    let vm = &config.vm;
    // Before the hardware and the machine type are written.
    let names_disks = names_disks(vm, data, purpose)?;
    let hardware = hardware(vm, data, purpose)?;
    // The arrangement that a VM asks for can be newer than its first start.
    let names_disks = names_disks || hardware.is_multi_queue();
    let generation_id = hardware.is_multi_queue().then(|| generation_id(data, purpose)).transpose()?;
    Ok(Prepared {
        hardware,
        machine_type: machine_type(vm.machine_type.as_deref(), data, qemu, purpose).await?,
        accelerator,
        uuid: uuid(vm.uuid.as_deref(), data, purpose)?,
        firmware: firmware(vm.firmware, data, firmware_directory(vm.firmware, &OVMF.map(Path::new)), purpose)?,
        cloud_init_disk: cloud_init_disk(cloud_init.as_ref(), runtime, purpose)?,
        block_devices: disks(&vm.drives, purpose)?,
        media: media(&vm.drives, &cd::folders(&config.cd_folders)).await,
        pod_network,
        display_password: password.is_some(),
        names_disks,
        generation_id,
        rtc_base: clock_zone::base(vm, SystemTime::now())?,
        environment: Environment::of(
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?))),
        ),
    })
}

/// Reads the QEMU template: the copy in the data directory, if the configuration has `updateTemplate: false` and there is one; else that of
/// the VM's set, else the file in `directory`, else the built-in template. With `updateTemplate: false` a start also makes the copy.
///
/// # Errors
/// If there is no template of that name, or it cannot be read or copied.
pub fn template(
    config: &RunnerConfig,
    of_set: Option<&QemuFile>,
    directory: &Path,
    purpose: Purpose,
) -> Result<Template, Error> {
    let name = command_line::template_name(config);
    let copy = Path::new(&config.data_dir).join(format!("template-{}", name.replace('/', "-")));
    if !config.update_template
        && let Some(text) = read_text(&copy)?
    {
        return Ok(Template::alone(name, text));
    }
    if let Some(template) = template_of_set(config, of_set, purpose)? {
        return Ok(template);
    }
    // A name with a slash would be a path to any file in the image.
    let found = if name.contains('/') { None } else { read_text(&directory.join(name))? };
    let text = found
        .or_else(|| command_line::built_in(name).map(str::to_owned))
        .ok_or_else(|| Error::NoTemplate { name: name.into() })?;
    if !config.update_template {
        let data = Path::new(&config.data_dir);
        purpose.create_directory(data)?;
        purpose.write(&copy, text.as_bytes())?;
    }
    Ok(Template::alone(name, text))
}

/// The QEMU template of the VM's set, or the copy of the set's templates, if the configuration has `updateTemplate: false` and there is one.
fn template_of_set(
    config: &RunnerConfig,
    of_set: Option<&QemuFile>,
    purpose: Purpose,
) -> Result<Option<Template>, Error> {
    let data = Path::new(&config.data_dir);
    let copy = data.join(QEMU_COPY);
    let kept = if config.update_template { None } else { read_text(&copy)? };
    let kept = kept.map(|text| config::qemu_file(&copy, &text)).transpose()?;
    let named = |file: &QemuFile| Some((template_of(config, &file.templates)?, file.clone()));
    if let Some((name, file)) = kept.as_ref().and_then(named) {
        return Ok(Some(Template { name, file }));
    }
    let Some((name, file)) = of_set.and_then(named) else { return Ok(None) };
    if !config.update_template {
        // With the built-in template that they extend: another runner has another one.
        let kept =
            QemuFile { standard: command_line::built_in(command_line::STANDARD).map(str::to_owned), ..file.clone() };
        purpose.create_directory(data)?;
        purpose.write(&copy, json!(kept).to_string().as_bytes())?;
    }
    Ok(Some(Template { name, file }))
}

fn read_text(path: &Path) -> Result<Option<String>, FileAccessError> {
    Ok(read_optional(path)?.map(|text| String::from_utf8_lossy(&text).into_owned()))
}

/// The UUID in the configuration, or the one in the data directory, which is generated at the first start.
fn uuid(configured: Option<&str>, data: &Path, purpose: Purpose) -> Result<String, Error> {
    let uuid = kept_uuid(configured, data, purpose)?;
    if !is_uuid(&uuid) {
        return Err(Error::Identity { what: "UUID", value: uuid });
    }
    Ok(uuid)
}

fn kept_uuid(configured: Option<&str>, data: &Path, purpose: Purpose) -> Result<String, Error> {
    if let Some(uuid) = configured {
        return Ok(uuid.to_owned());
    }
    let path = data.join("uuid.txt");
    if let Some(uuid) = read_optional_text(&path)? {
        return Ok(uuid);
    }
    let uuid = random_uuid()?;
    purpose.write(&path, uuid.as_bytes())?;
    Ok(uuid)
}

/// The ID of the VM's generation, which is made at the first start and kept in the data directory.
fn generation_id(data: &Path, purpose: Purpose) -> Result<String, Error> {
    let path = data.join(GENERATION);
    if let Some(id) = read_optional_text(&path)?.filter(|id| is_uuid(id)) {
        return Ok(id);
    }
    let id = random_uuid()?;
    purpose.write(&path, id.as_bytes())?;
    Ok(id)
}

/// Whether QEMU reads it as a UUID: 32 digits in groups.
fn is_uuid(text: &str) -> bool {
    let lengths: Vec<usize> = text.split('-').map(str::len).collect();
    lengths == [8, 4, 4, 4, 12] && text.chars().all(|c| c.is_ascii_hexdigit() || c == '-')
}

/// The arrangement of the guest's devices. It is decided at the first start of this runner, and stays, unless the VM asks for the newest one.
fn hardware(vm: &VmSection, data: &Path, purpose: Purpose) -> Result<Hardware, Error> {
    let path = data.join(HARDWARE);
    let kept = read_optional_text(&path)?;
    if vm.hardware.as_deref() == Some(LATEST_HARDWARE) {
        let newest = Hardware::NEWEST;
        if kept.as_deref() != Some(newest.name()) {
            purpose.write(&path, newest.name().as_bytes())?;
        }
        return Ok(newest);
    }
    if let Some(name) = kept.as_deref().or(vm.hardware.as_deref()) {
        return Hardware::from_name(name).ok_or_else(|| Error::UnknownHardware { name: name.into() });
    }
    let has_machine_type = vm.machine_type.is_some() || data.join(MACHINE_TYPE).exists();
    let hardware = match () {
        // It was started before there were other arrangements.
        () if has_machine_type => return Ok(Hardware::Standard),
        () if data.join(LEGACY_TEMPLATE).exists() => Hardware::Legacy,
        () => Hardware::NEWEST,
    };
    purpose.write(&path, hardware.name().as_bytes())?;
    Ok(hardware)
}

/// Whether disks have their names as serial numbers. It is decided at the first start of the VM, and stays: a serial number is something that
/// a guest finds in its hardware.
fn names_disks(vm: &VmSection, data: &Path, purpose: Purpose) -> Result<bool, FileAccessError> {
    let path = data.join(SERIALS);
    if read_optional(&path)?.is_some() {
        return Ok(true);
    }
    let was_started = vm.hardware.is_some()
        || vm.machine_type.is_some()
        || [HARDWARE, MACHINE_TYPE, LEGACY_TEMPLATE].iter().any(|file| data.join(file).exists());
    if !was_started {
        purpose.write(&path, b"name")?;
    }
    Ok(!was_started)
}

/// The machine type in the QEMU template of the VM-Operator in Java, if that runner has started the VM.
fn legacy_machine_type(data: &Path) -> Result<Option<String>, FileAccessError> {
    let text = read_text(&data.join(LEGACY_TEMPLATE))?.unwrap_or_default();
    let Some((_, options)) = text.split_once("\"-machine\"") else { return Ok(None) };
    let mut words = options.split(|letter: char| !letter.is_ascii_alphanumeric() && !"-._".contains(letter));
    let name = words.find(|word| word.starts_with("pc-q35-") || word.starts_with("pc-i440fx-"));
    // A name without a version would be another type in each QEMU.
    Ok(name.filter(|name| name.ends_with(|letter: char| letter.is_ascii_digit())).map(str::to_owned))
}

/// The directory with the state of the VM's TPM. The VM-Operator in Java has it in the data directory itself. A new state would lock
/// the guest out of what it has encrypted with the TPM.
pub fn tpm_directory(data: &Path) -> PathBuf {
    let own = data.join("tpm");
    let is_legacy = data.join(TPM_STATE).exists() && !own.join(TPM_STATE).exists();
    if is_legacy { data.to_owned() } else { own }
}

/// The machine type in the configuration, or the one in the data directory: QEMU's newest at the first start.
async fn machine_type(configured: Option<&str>, data: &Path, qemu: &str, purpose: Purpose) -> Result<String, Error> {
    let machine_type = kept_machine_type(configured, data, qemu, purpose).await?;
    // In QEMU's option a comma would begin another property.
    let is_name = |c: char| c.is_ascii_alphanumeric() || ['.', '-', '_'].contains(&c);
    if machine_type.is_empty() || !machine_type.chars().all(is_name) {
        return Err(Error::Identity { what: "machine type", value: machine_type });
    }
    Ok(machine_type)
}

async fn kept_machine_type(
    configured: Option<&str>,
    data: &Path,
    qemu: &str,
    purpose: Purpose,
) -> Result<String, Error> {
    if let Some(machine_type) = configured {
        return Ok(machine_type.to_owned());
    }
    let path = data.join(MACHINE_TYPE);
    if let Some(machine_type) = read_optional_text(&path)? {
        return Ok(machine_type);
    }
    if let Some(machine_type) = legacy_machine_type(data)? {
        purpose.write(&path, machine_type.as_bytes())?;
        return Ok(machine_type);
    }
    let output = Command::new(qemu)
        .args(["-machine", "help"])
        .output()
        .await
        .map_err(|source| Error::Qemu { qemu: qemu.into(), source })?;
    let machine_type = newest_q35(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| Error::NoMachineType { qemu: qemu.into() })?;
    purpose.write(&path, machine_type.as_bytes())?;
    Ok(machine_type)
}

/// The newest `pc-q35` in QEMU's answer to `-machine help`.
fn newest_q35(help: &str) -> Option<String> {
    help.lines()
        .filter_map(|line| line.split_whitespace().next())
        .filter_map(|name| {
            let version = name.strip_prefix("pc-q35-")?;
            let version = version.split('.').map(str::parse).collect::<Result<Vec<u32>, _>>().ok()?;
            Some((version, name))
        })
        .max()
        .map(|(_, name)| name.to_owned())
}

/// Whether the firmware is installed, so that a VM can start with it.
pub fn has_firmware(kind: api::Firmware) -> bool {
    let directories = OVMF.map(Path::new);
    let directory = firmware_directory(kind, &directories);
    kind == api::Firmware::Bios || firmware_files(kind).iter().any(|files| is_installed(directory, files))
}

/// The first of the directories that has the firmware, else the first one.
fn firmware_directory<'a>(kind: api::Firmware, directories: &[&'a Path]) -> &'a Path {
    let has_it = |directory: &&&Path| firmware_files(kind).iter().any(|files| is_installed(directory, files));
    directories.iter().find(has_it).or(directories.first()).copied().unwrap_or(Path::new("/"))
}

fn is_installed(directory: &Path, (code, vars): &(&str, &str)) -> bool {
    directory.join(code).exists() && directory.join(vars).exists()
}

/// The files of the code and of the initial variables, in the order of preference. Debian 13 has only the large files; guests do
/// not notice the difference.
fn firmware_files(kind: api::Firmware) -> &'static [(&'static str, &'static str)] {
    const SMALL: (&str, &str) = ("OVMF_CODE.fd", "OVMF_VARS.fd");
    const LARGE: (&str, &str) = ("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd");
    const LARGE_OF_ARCH: (&str, &str) = ("OVMF_CODE.4m.fd", "OVMF_VARS.4m.fd");
    // The variables contain Microsoft's keys, with which Linux distributions and Windows are signed.
    const SMALL_SECURE: (&str, &str) = ("OVMF_CODE.secboot.fd", "OVMF_VARS.ms.fd");
    const SMALL_SECURE_OF_FEDORA: (&str, &str) = ("OVMF_CODE.secboot.fd", "OVMF_VARS.secboot.fd");
    const LARGE_SECURE: (&str, &str) = ("OVMF_CODE_4M.secboot.fd", "OVMF_VARS_4M.ms.fd");
    match kind {
        api::Firmware::Bios => &[],
        api::Firmware::Uefi => &[SMALL, LARGE, LARGE_OF_ARCH],
        api::Firmware::Uefi4m => &[LARGE, LARGE_OF_ARCH],
        api::Firmware::Secure => &[SMALL_SECURE, SMALL_SECURE_OF_FEDORA, LARGE_SECURE],
        api::Firmware::Secure4m => &[LARGE_SECURE],
    }
}

/// Chooses the firmware among the installed ones, and creates the VM's variables at its first start. `ovmf` is the directory of the
/// firmware files.
fn firmware(kind: api::Firmware, data: &Path, ovmf: &Path, purpose: Purpose) -> Result<Option<Firmware>, Error> {
    let files = firmware_files(kind);
    if files.is_empty() {
        return Ok(None);
    }
    let name = serde_json::to_value(kind).ok().and_then(|name| Some(name.as_str()?.to_owned())).unwrap_or_default();
    let size = |path: &Path| fs::metadata(path).map(|metadata| metadata.len()).ok();
    let installed: Vec<(PathBuf, PathBuf)> = files
        .iter()
        .map(|(code, vars)| (ovmf.join(code), ovmf.join(vars)))
        .filter(|(code, vars)| code.exists() && vars.exists())
        .collect();
    let Some(first) = installed.first() else {
        let tried: Vec<String> = files.iter().map(|(code, _)| ovmf.join(code).display().to_string()).collect();
        return Err(Error::NoFirmware { kind: name, tried: tried.join(", ") });
    };
    let own = data.join("fw-vars.fd");
    fit_variables(&own, &installed.iter().filter_map(|(_, vars)| size(vars)).collect::<Vec<_>>(), purpose)?;
    let secure = matches!(kind, api::Firmware::Secure | api::Firmware::Secure4m);
    let (code, _) = match size(&own) {
        Some(_) if secure && !has_keys(&own, &data.join(VARIABLES_KIND))? => {
            return Err(Error::NoKeys { kind: name, path: own });
        }
        // The VM's variables exist: the firmware must be the one with variables of that size.
        Some(own_size) => installed
            .iter()
            .find(|(_, vars)| size(vars) == Some(own_size))
            .ok_or_else(|| Error::OtherFirmware { kind: name, path: own.clone(), size: own_size })?,
        None => {
            let vars = fs::read(&first.1).map_err(FileAccessError::with("read", &first.1))?;
            // The note comes first: variables without it are looked at.
            purpose.write(&data.join(VARIABLES_KIND), name.as_bytes())?;
            purpose.write(&own, &vars)?;
            first
        }
    };
    Ok(Some(Firmware { code: code.display().to_string(), vars: own.display().to_string(), secure }))
}

/// How a file of the format qcow2 begins.
const QCOW2: &[u8] = b"QFI\xfb";
/// Where the header of a firmware volume has its length and its signature (UEFI Platform Initialization specification, volume 3, 3.2.1.1).
const VOLUME_LENGTH: std::ops::Range<usize> = 32..40;
const VOLUME_SIGNATURE: (std::ops::Range<usize>, &[u8]) = (40..44, b"_FVH");
/// The largest file that is looked at: variables of other programs are on volumes of a few MiB.
const LARGEST_VARIABLES: u64 = 64 << 20;

/// Cuts variables to their own size: other programs keep them on volumes that are larger, and whose rest is empty. `sizes` are those of the
/// variables of the installed firmware.
fn fit_variables(own: &Path, sizes: &[u64], purpose: Purpose) -> Result<(), Error> {
    let Ok(metadata) = fs::metadata(own) else { return Ok(()) };
    if sizes.contains(&metadata.len()) || metadata.len() > LARGEST_VARIABLES {
        return Ok(());
    }
    let content = fs::read(own).map_err(FileAccessError::with("read", own))?;
    if content.starts_with(QCOW2) {
        return Err(Error::VariablesInQcow2 { path: own.to_owned() });
    }
    let (signature, expected) = VOLUME_SIGNATURE;
    let length = content.get(VOLUME_LENGTH).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes);
    let length = length.filter(|length| content.get(signature) == Some(expected) && sizes.contains(length));
    let Some(length) = length.and_then(|length| usize::try_from(length).ok()) else { return Ok(()) };
    let Some((variables, rest)) = content.split_at_checked(length) else { return Ok(()) };
    // Flash that nobody has written has ones.
    if !rest.iter().all(|byte| *byte == 0) && !rest.iter().all(|byte| *byte == 0xff) {
        return Ok(());
    }
    if purpose == Purpose::Start {
        purpose.write(own, variables)?;
        info!(file = %own.display(), before = content.len(), bytes = length, "cut the firmware's variables to their size");
    }
    Ok(())
}

/// The file in the data directory that says for which firmware the variables were made.
const VARIABLES_KIND: &str = "fw-vars.kind";
/// The name of a variable that each store with keys has, as UTF-16 with its end (UEFI specification, 32.3).
const KEK: &[u8] = b"K\0E\0K\0\0\0";

/// Whether variables are for a firmware with Secure Boot: they were made so, also if the guest has changed the keys since; or they have keys.
/// Variables that earlier runners made have no note.
fn has_keys(variables: &Path, note: &Path) -> Result<bool, FileAccessError> {
    if fs::read_to_string(note).is_ok_and(|note| note.starts_with("secure")) {
        return Ok(true);
    }
    let content = fs::read(variables).map_err(FileAccessError::with("read", variables))?;
    Ok(content.windows(KEK.len()).any(|window| window == KEK))
}

/// Writes the cloud-init disk, if there is cloud-init data. Returns its path.
fn cloud_init_disk(
    files: Option<&CloudInitFiles>,
    runtime: &RuntimeDir,
    purpose: Purpose,
) -> Result<Option<String>, Error> {
    let Some(files) = files else {
        return Ok(None);
    };
    let path = runtime.cloud_init_disk();
    let write = || {
        let disk = fs::File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        disk.set_len(files.disk_size())?;
        files.write_disk(disk)
    };
    if purpose == Purpose::Start {
        write().map_err(FileAccessError::with("write", &path))?;
    }
    Ok(Some(path.display().to_string()))
}

/// What the CD drives hold. A drive whose CD is missing or not allowed is empty: a guest does without a CD, and not without its start. The
/// agent reports it, and inserts the CD when it is there.
async fn media(drives: &[Drive], folders: &[PathBuf]) -> Vec<Option<Medium>> {
    let mut media = Vec::new();
    for text in drives.iter().filter_map(Drive::cd) {
        media.push(match text {
            "" => None,
            text => match cd::medium(text, folders).await {
                Ok(medium) => Some(medium),
                Err(refusal) => {
                    warn!(cd = text, error = %refusal, "the VM starts without a CD");
                    None
                }
            },
        });
    }
    media
}

/// Finds out which disks are block devices. A start creates disk files that do not exist and have a size in the configuration, and
/// enlarges disk files that are smaller than that. A file is never made smaller, because the guest's data would be lost.
fn disks(drives: &[Drive], purpose: Purpose) -> Result<Vec<bool>, Error> {
    let disks = drives.iter().filter_map(|drive| match drive {
        Drive::Raw { resource, size, .. } => Some((Path::new(resource), *size)),
        Drive::Qcow2 { resource, .. } => Some((Path::new(resource), None)),
        Drive::IdeCd { .. } => None,
    });
    disks.map(|(path, size)| is_block_device(path, size, purpose)).collect()
}

/// A disk with a size, or in a claim's file system, is a file: whoever can write to that file system can't make it a link or a device.
fn is_block_device(path: &Path, size: Option<u64>, purpose: Purpose) -> Result<bool, Error> {
    let must_be_file = size.is_some() || path.starts_with(paths::DISK_DIR);
    let metadata = if must_be_file { fs::symlink_metadata(path) } else { fs::metadata(path) };
    match (metadata, size) {
        (Ok(metadata), _) if must_be_file && !metadata.is_file() => {
            Err(Error::NotAFile { path: path.display().to_string() })
        }
        (Ok(metadata), Some(size)) if metadata.len() < size => {
            if purpose == Purpose::Look {
                return Ok(false);
            }
            let mut options = fs::File::options();
            options.write(true).custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
            let file = options.open(path).map_err(FileAccessError::with("open", path))?;
            file.set_len(size).map_err(FileAccessError::with("enlarge", path))?;
            info!(disk = %path.display(), before = metadata.len(), bytes = size, "enlarged the disk's file");
            Ok(false)
        }
        (Ok(metadata), _) => Ok(metadata.file_type().is_block_device()),
        (Err(error), Some(size)) if error.kind() == io::ErrorKind::NotFound => {
            if purpose == Purpose::Look {
                return Ok(false);
            }
            // The file is sparse: it needs space on the claim only when the guest writes.
            let file = fs::File::create_new(path).map_err(FileAccessError::with("create", path))?;
            file.set_len(size).map_err(FileAccessError::with("create", path))?;
            Ok(false)
        }
        (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::NoDisk { path: path.display().to_string() })
        }
        (Err(error), _) => Err(FileAccessError::with("read", path)(error).into()),
    }
}

#[cfg(test)]
mod tests;
