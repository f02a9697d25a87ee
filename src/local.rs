//! `vm-runner run FILE`: a VM from a file, on a computer without a cluster.
//!
//! ```text
//!  FILE, --set, --ssh-key ─▶ VirtualMachine ─▶ render ─▶ objects ─▶ plan ─▶ files, disks ─▶ runner ◀─▶ session (terminal, signals)
//!                                             (as the manager)     (pure)   (folder, image)
//! ```
//!
//! The objects are those that the manager would apply. [`volumes`] finds in them what the kubelet would give to the runner's container;
//! [`plan`] makes files of this computer of it. From there on the program is the runner of the Pods.

mod folder;
mod host;
mod image;
mod plan;
mod session;
mod ssh;
mod volumes;

use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Mutex,
};

use kube::ResourceExt;
use tracing_subscriber::{layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    api::{Accelerator, cd::Cd},
    cli::vm_file::{self, RenderOptions, VmFile},
    process::ErrorChain,
    runner::{
        LogFormat, Programs,
        accel::{self, Choice},
        cd,
        files::{FileAccessError, Purpose},
        from_file::FileArguments,
        logging::Logging,
        machine::MachineOptions,
        runtime_dir::RuntimeDir,
        state::EndReason,
    },
    runner_config::{Drive, NetworkSection, VmSection, paths},
};
use folder::Folder;
use image::ImageSource;
use plan::{LocalPlan, Options};
use volumes::Objects;

/// The exit code for a guest that was ended without its shutdown.
const ENDED: u8 = 3;
/// The folders of VMs and of downloaded images, in the user's folder for data.
const VMS: &str = "vm-runner";
const DOWNLOADS: &str = "vm-runner-images";

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    File(#[from] FileAccessError),
    #[error(transparent)]
    VmFile(#[from] vm_file::Errors),
    #[error(transparent)]
    Ssh(#[from] ssh::Error),
    #[error(transparent)]
    Folder(#[from] folder::Error),
    #[error(transparent)]
    Volumes(#[from] volumes::Error),
    #[error(transparent)]
    Plan(#[from] plan::Error),
    #[error(transparent)]
    Host(#[from] host::Error),
    #[error(transparent)]
    Image(#[from] image::Error),
    #[error(transparent)]
    Accelerator(#[from] accel::Error),
    #[error(transparent)]
    Session(#[from] session::Error),
    #[error("{}", no_cd(file, *exists))]
    Cd { file: PathBuf, exists: bool },
}

/// Runs the VM of a file, and says how it has ended.
pub async fn main(arguments: &FileArguments, programs: &Programs, log_format: LogFormat) -> ExitCode {
    match run(arguments, programs, log_format).await {
        Ok(Some(EndReason::PoweredOff)) => {
            note("the guest was ended without its shutdown");
            ENDED.into()
        }
        Ok(_) => {
            note("the guest has shut down");
            ExitCode::SUCCESS
        }
        Err(error) => {
            note(&ErrorChain(&error).to_string());
            ExitCode::FAILURE
        }
    }
}

/// Tells the user something, beside the guest's console.
fn note(text: &str) {
    // Nobody is there to be told that standard error is closed.
    let _ = writeln!(io::stderr(), "vm-runner: {text}");
}

async fn run(
    arguments: &FileArguments,
    programs: &Programs,
    log_format: LogFormat,
) -> Result<Option<EndReason>, Error> {
    let file = read(arguments)?;
    let name = file.vm.name_any();
    let render = RenderOptions {
        templates: arguments.templates.clone(),
        values: arguments.values.clone(),
        config: arguments.config.clone(),
    };
    let rendered = vm_file::rendered(&file, render)?;
    let objects = Objects::new(rendered.iter().map(|object| &*object.value), file.others.iter())?;

    let dir = arguments.dir.clone().map_or_else(|| folder::data_home(&format!("{VMS}/{name}")), Ok)?;
    let folder = Folder::open(&dir, arguments.fresh)?;
    let source = arguments.image.as_deref().map(ImageSource::new);
    let options = Options {
        dir: folder.path().to_owned(),
        runtime_dir: folder.runtime_dir()?,
        cd_folders: arguments
            .cd_folders
            .iter()
            .map(|folder| fs::canonicalize(folder).unwrap_or(folder.clone()))
            .collect(),
        existing: folder.disks()?,
        has_image: source.is_some(),
        publish: arguments.publish.iter().map(|publish| publish.0).collect(),
        display: arguments.display,
    };
    let plan = plan::plan(&objects, &options)?;
    plan.notes.iter().for_each(|text| note(text));
    check_cds(&plan, &options.cd_folders)?;
    host::check(&plan, programs, matches!(source, Some(ImageSource::Url(_))))?;
    if let Some(overlay) = &plan.overlay {
        image::make(overlay, source.as_ref(), &folder::data_home(DOWNLOADS)?, note).await?;
    }
    start(&folder, &plan, programs, log_format).await
}

/// The VM of the file, with the keys for ssh.
fn read(arguments: &FileArguments) -> Result<VmFile, Error> {
    let mut file = vm_file::read(arguments.file.as_deref().unwrap_or(Path::new("-")), &arguments.set)?;
    let read = |path: &PathBuf| {
        let text = fs::read_to_string(path).map_err(FileAccessError::with("read", path))?;
        Ok(ssh::key(&path.display().to_string(), &text)?)
    };
    let keys = arguments.ssh_key.iter().map(read).collect::<Result<Vec<_>, Error>>()?;
    ssh::add_keys(&mut file.vm, &keys)?;
    Ok(file)
}

/// A file can come from somebody else. So its guest sees no files of this computer but those of the folders that the user names.
fn check_cds(plan: &LocalPlan, folders: &[PathBuf]) -> Result<(), Error> {
    let is_file = |cd: &&str| matches!(Cd::parse(cd), Cd::Path(_) | Cd::Repository(_));
    let mut files = plan.config.vm.drives.iter().filter_map(Drive::cd).filter(is_file);
    match files.find(|file| cd::check(file, folders).is_err()) {
        // Whether a file exists elsewhere is said, because it is the user's own computer, and no guest runs yet.
        Some(file) => Err(Error::Cd { file: file.into(), exists: Path::new(file).is_file() }),
        None => Ok(()),
    }
}

/// Why a CD is refused, with the option that allows it.
fn no_cd(file: &Path, exists: bool) -> String {
    let name = file.strip_prefix(paths::IMAGE_REPOSITORY).unwrap_or(file).display();
    let folder = file.parent().filter(|_| exists).map_or("DIR".to_owned(), |folder| folder.display().to_string());
    format!(
        "the VM wants the CD image {name}, which is in no folder that you have named: if its guest may read the files there, add \
         --cd-folder {folder}"
    )
}

/// Writes the configuration, and runs the VM in it.
async fn start(
    folder: &Folder,
    plan: &LocalPlan,
    programs: &Programs,
    log_format: LogFormat,
) -> Result<Option<EndReason>, Error> {
    let vm = &plan.config.vm;
    let config_dir = folder.prepare(Path::new(&plan.config.runtime_dir), &plan.files)?;
    let logging = log_to(folder.log()?, log_format);
    let runtime = RuntimeDir::open(Path::new(&plan.config.runtime_dir))?;
    let accelerator =
        accel::choose(vm.accelerator, &vm.cpu_model, &programs.qemu, &runtime, None, Purpose::Start).await?;
    say_what_runs(folder, vm, &accelerator);
    let options = MachineOptions {
        config_dir,
        templates: programs.templates.clone(),
        runtime,
        qemu: programs.qemu.clone(),
        swtpm: programs.swtpm.clone(),
        // A network of type pod is a user network here.
        passt: String::new(),
        passt_folder: PathBuf::new(),
        pod_ports: 1,
        require_password: false,
        is_in_pod: false,
        kvm_trial: None,
    };
    Ok(session::run(options, logging, &vm.display).await?)
}

/// The log goes to a file, because the terminal is the guest's.
fn log_to(file: fs::File, format: LogFormat) -> Logging {
    let (logging, filter) = Logging::new(std::env::var("VM_RUNNER_LOG").ok().as_deref());
    let registry = tracing_subscriber::registry().with(filter);
    let log = tracing_subscriber::fmt::layer().with_writer(Mutex::new(file)).with_ansi(false);
    match format {
        LogFormat::Text => registry.with(log).init(),
        LogFormat::Json => registry.with(log.json().flatten_event(true)).init(),
    }
    logging
}

fn say_what_runs(folder: &Folder, vm: &VmSection, accelerator: &Choice) {
    if accelerator.accelerator == "tcg" && vm.accelerator == Accelerator::Auto {
        note(&format!("the guest is emulated, which is slow: {}", why_no_kvm(&accelerator.reason)));
    }
    let forwards = vm.network.iter().flat_map(|network| match network {
        NetworkSection::User { forwards, .. } => forwards.as_slice(),
        NetworkSection::Tap { .. } | NetworkSection::Pod { .. } => &[],
    });
    for forward in forwards {
        let (address, port) = (forward.address, forward.port);
        note(&format!("{address}:{port} is the guest's port {}", forward.guest_port));
    }
    let how = if io::stdin().is_terminal() && io::stdout().is_terminal() { "; Ctrl-] leaves it" } else { "" };
    note(&format!("{} starts; its files are in {}{how}", vm.name, folder.path().display()));
}

/// Why there is no KVM, and what the user can do to have it. The runner's own words about a missing device are about Pods.
fn why_no_kvm(reason: &str) -> String {
    match fs::File::options().read(true).write(true).open("/dev/kvm") {
        Ok(_) => reason.to_owned(),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            format!("{reason}; add your user to the group kvm")
        }
        Err(error) => {
            let problem = match error.kind() {
                io::ErrorKind::NotFound => "there is no /dev/kvm",
                _ => reason,
            };
            format!(
                "{problem}; load the module kvm_intel or kvm_amd, and look whether virtualization is switched on in the computer's setup"
            )
        }
    }
}
