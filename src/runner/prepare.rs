//! What has to be there before QEMU starts: the machine's identity, its firmware variables, its disks. All file work.
//!
//! The data directory outlives the Pod. What it holds is the machine's own: `uuid.txt`, `machine-type`, `fw-vars.fd` (the
//! UEFI variables), `tpm/`, and a copy of the QEMU template if that is to be kept.

use std::{
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
};

use tokio::process::Command;
use tracing::info;

use super::{
    cloud_init,
    command::{self, Facts, Firmware},
    config::{self, Configuration, optional_text},
    files::{FileError, RuntimeDir, write_atomically},
};
use crate::{
    api,
    runner_config::{Drive, RunnerConfig},
};

/// Where the image keeps its QEMU templates.
pub const TEMPLATES: &str = "/opt/vmrunner/templates";
/// Where Debian's package ovmf keeps its files.
const OVMF: &str = "/usr/share/OVMF";

/// What is missing.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is not readable or writable.
    #[error(transparent)]
    File(#[from] FileError),
    /// The configuration cannot be read.
    #[error(transparent)]
    Config(#[from] config::Error),
    /// The template does not exist.
    #[error("there is no QEMU template {name}: it is neither built in ({}) nor in {TEMPLATES}", command::STANDARD)]
    NoTemplate {
        /// Its name.
        name: String,
    },
    /// The firmware is not in the image.
    #[error("the firmware {kind} is not installed: looked for {tried}; use another one, or a runner image that has it")]
    NoFirmware {
        /// What was asked for.
        kind: String,
        /// Where.
        tried: String,
    },
    /// The variables belong to a firmware of another size.
    #[error(
        "{} has {size} bytes, but the variables of the firmware {kind} have another size; choose the firmware that the \
         machine was made with, or remove the file (UEFI boot entries and Secure Boot keys are lost then)",
        path.display()
    )]
    OtherFirmware {
        /// What was asked for.
        kind: String,
        /// The machine's variables.
        path: PathBuf,
        /// Their size.
        size: u64,
    },
    /// A disk does not exist.
    #[error("the disk {path} does not exist: check the Pod's volumeDevices and volumeMounts")]
    NoDisk {
        /// The disk.
        path: String,
    },
    /// QEMU cannot say what it knows.
    #[error("cannot run {qemu}")]
    Qemu {
        /// The program.
        qemu: String,
        /// Why.
        source: io::Error,
    },
    /// There is no machine type to choose from.
    #[error("{qemu} knows no pc-q35 machine type; set the machine type in the configuration")]
    NoMachineType {
        /// The program.
        qemu: String,
    },
}

/// A QEMU template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    /// Its name.
    pub name: String,
    /// Its text.
    pub text: String,
}

/// Makes everything that QEMU needs, and says what there is.
///
/// # Errors
/// If something is missing or cannot be made; the error names it.
pub async fn prepare(
    Configuration { config, password, cloud_init }: &Configuration,
    runtime: &RuntimeDir,
    accelerator: &'static str,
    qemu: &str,
) -> Result<Facts, Error> {
    let data = Path::new(&config.data_dir);
    fs::create_dir_all(data).map_err(FileError::with("make", data))?;
    let vm = &config.vm;
    Ok(Facts {
        machine_type: machine_type(vm.machine_type.as_deref(), data, qemu).await?,
        accelerator,
        uuid: uuid(vm.uuid.as_deref(), data)?,
        firmware: firmware(vm.firmware, data, Path::new(OVMF))?,
        cloud_init_disk: cloud_init_disk(cloud_init.as_ref(), runtime)?,
        block_devices: disks(&vm.drives)?,
        display_password: password.is_some(),
    })
}

/// The QEMU template. The first is kept in the data directory if the configuration says so.
///
/// # Errors
/// If there is none of that name, or it cannot be read or kept.
pub fn template(config: &RunnerConfig, directory: &Path) -> Result<Template, Error> {
    let name = config.template.as_deref().unwrap_or(command::STANDARD);
    let kept = Path::new(&config.data_dir).join(format!("template-{}", name.replace('/', "-")));
    if !config.update_template
        && let Some(text) = read_text(&kept)?
    {
        return Ok(Template { name: name.into(), text });
    }
    // A name is not a path: what else is in the image is no template.
    let found = if name.contains('/') { None } else { read_text(&directory.join(name))? };
    let text = found
        .or_else(|| command::built_in(name).map(str::to_owned))
        .ok_or_else(|| Error::NoTemplate { name: name.into() })?;
    if !config.update_template {
        let data = Path::new(&config.data_dir);
        fs::create_dir_all(data).map_err(FileError::with("make", data))?;
        write_atomically(&kept, text.as_bytes())?;
    }
    Ok(Template { name: name.into(), text })
}

fn read_text(path: &Path) -> Result<Option<String>, FileError> {
    Ok(config::optional(path)?.map(|text| String::from_utf8_lossy(&text).into_owned()))
}

fn uuid(configured: Option<&str>, data: &Path) -> Result<String, Error> {
    if let Some(uuid) = configured {
        return Ok(uuid.to_owned());
    }
    let path = data.join("uuid.txt");
    if let Some(uuid) = optional_text(&path)? {
        return Ok(uuid);
    }
    let source = Path::new("/proc/sys/kernel/random/uuid");
    let uuid = fs::read_to_string(source).map_err(FileError::with("read", source))?.trim().to_owned();
    write_atomically(&path, uuid.as_bytes())?;
    Ok(uuid)
}

async fn machine_type(configured: Option<&str>, data: &Path, qemu: &str) -> Result<String, Error> {
    if let Some(machine_type) = configured {
        return Ok(machine_type.to_owned());
    }
    let path = data.join("machine-type");
    if let Some(machine_type) = optional_text(&path)? {
        return Ok(machine_type);
    }
    let output = Command::new(qemu)
        .args(["-machine", "help"])
        .output()
        .await
        .map_err(|source| Error::Qemu { qemu: qemu.into(), source })?;
    let machine_type = newest_q35(&String::from_utf8_lossy(&output.stdout))
        .ok_or_else(|| Error::NoMachineType { qemu: qemu.into() })?;
    write_atomically(&path, machine_type.as_bytes())?;
    Ok(machine_type)
}

/// The newest of the list that `-machine help` prints.
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

/// Code and template of the variables, for each firmware in the order of preference. The small files are gone in Debian 13;
/// guests do not notice which of both it is.
fn firmware_files(kind: api::Firmware) -> &'static [(&'static str, &'static str)] {
    const SMALL: (&str, &str) = ("OVMF_CODE.fd", "OVMF_VARS.fd");
    const LARGE: (&str, &str) = ("OVMF_CODE_4M.fd", "OVMF_VARS_4M.fd");
    // Variables with Microsoft's keys, that Linux distributions and Windows are signed for.
    const SMALL_SECURE: (&str, &str) = ("OVMF_CODE.secboot.fd", "OVMF_VARS.ms.fd");
    const LARGE_SECURE: (&str, &str) = ("OVMF_CODE_4M.secboot.fd", "OVMF_VARS_4M.ms.fd");
    match kind {
        api::Firmware::Bios => &[],
        api::Firmware::Uefi => &[SMALL, LARGE],
        api::Firmware::Uefi4m => &[LARGE],
        api::Firmware::Secure => &[SMALL_SECURE, LARGE_SECURE],
        api::Firmware::Secure4m => &[LARGE_SECURE],
    }
}

fn firmware(kind: api::Firmware, data: &Path, ovmf: &Path) -> Result<Option<Firmware>, Error> {
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
    let (code, _) = match size(&own) {
        // The machine stays with the size of its variables, whatever is preferred by now.
        Some(own_size) => installed
            .iter()
            .find(|(_, vars)| size(vars) == Some(own_size))
            .ok_or_else(|| Error::OtherFirmware { kind: name, path: own.clone(), size: own_size })?,
        None => {
            let vars = fs::read(&first.1).map_err(FileError::with("read", &first.1))?;
            write_atomically(&own, &vars)?;
            first
        }
    };
    Ok(Some(Firmware {
        code: code.display().to_string(),
        vars: own.display().to_string(),
        secure: matches!(kind, api::Firmware::Secure | api::Firmware::Secure4m),
    }))
}

fn cloud_init_disk(files: Option<&cloud_init::Files>, runtime: &RuntimeDir) -> Result<Option<String>, Error> {
    let Some(files) = files else {
        return Ok(None);
    };
    let path = runtime.cloud_init_disk();
    let write = || {
        let disk = fs::File::options().read(true).write(true).create(true).truncate(true).open(&path)?;
        disk.set_len(files.disk_size())?;
        files.write_disk(disk)
    };
    write().map_err(FileError::with("write", &path))?;
    Ok(Some(path.display().to_string()))
}

/// Finds out which disks are block devices, and gives files the size that they should have at least: one that does not exist is
/// made, one whose claim has grown grows. What a guest has written is never cut off.
fn disks(drives: &[Drive]) -> Result<Vec<bool>, Error> {
    let raw = drives.iter().filter_map(|drive| match drive {
        Drive::Raw { resource, size, bootindex: _ } => Some((Path::new(resource), *size)),
        Drive::IdeCd { .. } => None,
    });
    raw.map(|(path, size)| match (fs::metadata(path), size) {
        (Ok(metadata), Some(size)) if metadata.is_file() && metadata.len() < size => {
            let file = fs::File::options().write(true).open(path).map_err(FileError::with("open", path))?;
            file.set_len(size).map_err(FileError::with("enlarge", path))?;
            info!(disk = %path.display(), before = metadata.len(), bytes = size, "the disk has grown");
            Ok(false)
        }
        (Ok(metadata), _) => Ok(metadata.file_type().is_block_device()),
        (Err(error), Some(size)) if error.kind() == io::ErrorKind::NotFound => {
            // Sparse: takes room as the guest writes. The claim's size is the limit.
            let file = fs::File::create_new(path).map_err(FileError::with("make", path))?;
            file.set_len(size).map_err(FileError::with("make", path))?;
            Ok(false)
        }
        (Err(error), None) if error.kind() == io::ErrorKind::NotFound => {
            Err(Error::NoDisk { path: path.display().to_string() })
        }
        (Err(error), _) => Err(FileError::with("read", path)(error).into()),
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_machine_type_is_a_number_not_a_text() {
        let help = "Supported machines are:\nq35   PC (alias of pc-q35-10.0)\npc-q35-9.2  PC\npc-q35-10.0  PC\npc-q35-4.0.1 PC\nmicrovm\n";
        assert_eq!(newest_q35(help).as_deref(), Some("pc-q35-10.0"));
        assert_eq!(newest_q35("microvm"), None);
    }

    #[tokio::test]
    async fn a_machine_keeps_its_type_when_qemu_has_a_newer_one() {
        let data = tempfile::tempdir().unwrap();
        let get = async |configured, qemu| machine_type(configured, data.path(), qemu).await.unwrap();
        let newest = get(None, "qemu-system-x86_64").await;
        assert!(newest.starts_with("pc-q35-"), "{newest}");
        assert_eq!(get(None, "no-such-qemu").await, newest, "kept from the first start on");
        fs::write(data.path().join("machine-type"), "pc-q35-2.4\n").unwrap();
        assert_eq!(get(None, "qemu-system-x86_64").await, "pc-q35-2.4");
        assert_eq!(get(Some("pc-q35-7.2"), "qemu-system-x86_64").await, "pc-q35-7.2", "what the status says counts");
    }

    #[test]
    fn a_uuid_is_made_once() {
        let data = tempfile::tempdir().unwrap();
        let first = uuid(None, data.path()).unwrap();
        assert_eq!(first.len(), 36);
        assert_eq!(uuid(None, data.path()).unwrap(), first);
        assert_eq!(uuid(Some("given"), data.path()).unwrap(), "given");
    }

    #[test]
    fn firmware_variables_are_the_machines_own() {
        let (data, ovmf) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let put = |name: &str, content: &str| fs::write(ovmf.path().join(name), content).unwrap();
        let get = |kind| firmware(kind, data.path(), ovmf.path());
        assert_eq!(get(api::Firmware::Bios).unwrap(), None);
        let error = get(api::Firmware::Secure4m).unwrap_err().to_string();
        assert!(error.starts_with("the firmware secure-4m is not installed: looked for"), "{error}");

        put("OVMF_CODE_4M.fd", "code");
        put("OVMF_VARS_4M.fd", "large");
        let large = get(api::Firmware::Uefi).unwrap().unwrap();
        assert!(large.code.ends_with("OVMF_CODE_4M.fd"), "falls back to what is installed");
        fs::write(&large.vars, "LARGE").unwrap();

        put("OVMF_CODE.fd", "code");
        put("OVMF_VARS.fd", "small!");
        assert_eq!(get(api::Firmware::Uefi).unwrap(), Some(large.clone()), "stays with what it began with");
        assert_eq!(fs::read_to_string(&large.vars).unwrap(), "LARGE");

        fs::write(&large.vars, "neither of both").unwrap();
        assert!(get(api::Firmware::Uefi).unwrap_err().to_string().contains("has 15 bytes"));
    }

    #[test]
    fn disks_are_found_or_made() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk.img").display().to_string();
        let drive = |size| [Drive::Raw { resource: path.clone(), bootindex: None, size }];
        assert!(disks(&drive(None)).unwrap_err().to_string().contains("does not exist: check the Pod's"));
        assert_eq!(disks(&drive(Some(1 << 20))).unwrap(), [false]);
        assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
        fs::write(&path, "what the guest wrote").unwrap();
        assert_eq!(disks(&drive(Some(2 << 20))).unwrap(), [false]);
        assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 20, "its claim has grown");
        for size in [Some(1 << 20), None] {
            assert_eq!(disks(&drive(size)).unwrap(), [false]);
            assert_eq!(fs::metadata(&path).unwrap().len(), 2 << 20, "nothing is cut off");
        }
        assert!(fs::read(&path).unwrap().starts_with(b"what the guest wrote\0"));
    }

    #[test]
    fn a_template_is_kept_where_that_is_wanted() {
        let (data, image) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let config = |update: bool, name: &str| {
            RunnerConfig::parse(&format!(
                "/Runner: {{ namespace: n, dataDir: {:?}, template: {name}, updateTemplate: {update}, vm: {{ name: v }} }}",
                data.path()
            ))
            .unwrap()
        };
        let text = |update, name| template(&config(update, name), image.path()).map(|template| template.text);
        assert!(text(true, "standard.yaml.j2").unwrap().contains("-nodefaults"));
        assert!(matches!(text(true, "own.yaml.j2"), Err(Error::NoTemplate { .. })));
        fs::write(image.path().join("own.yaml.j2"), "one").unwrap();
        assert_eq!(text(false, "own.yaml.j2").unwrap(), "one");
        fs::write(image.path().join("own.yaml.j2"), "two").unwrap();
        assert_eq!(text(false, "own.yaml.j2").unwrap(), "one");
        assert_eq!(text(true, "own.yaml.j2").unwrap(), "two");
        assert!(matches!(text(true, "../own.yaml.j2"), Err(Error::NoTemplate { .. })));
    }
}
