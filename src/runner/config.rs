//! Reads the files that the kubelet projects into the Pod: `config.yaml`, the cloud-init files, the display's password. The
//! directory can also be a plain one: the runner then runs a VM from files, without a cluster.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    cloud_init::CloudInitFiles,
    files::{FileAccessError, read_optional, read_optional_text},
};
use crate::{
    api::Clipboard,
    render::command_line::QemuFile,
    runner_config::{ConfigFile, RunnerConfig, VmSection, paths},
};

/// Why the runner cannot use the configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// `config.yaml` is not YAML, or a field is missing or has the wrong type. The message has the form of a compiler's message,
    /// which editors understand.
    #[error("{}:{line}:{column}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The parser's message.
        what: String,
    },
    /// Two fields contradict each other.
    #[error("{}: {what}", path.display())]
    Contradiction {
        /// The file.
        path: PathBuf,
        /// The contradiction and how to solve it.
        what: String,
    },
}

/// The display's password.
#[derive(Clone, PartialEq, Eq)]
pub struct Password {
    /// The password.
    pub secret: String,
    /// When the password expires: `now`, `never`, `+SECONDS` from the moment when it is set, or Unix time in seconds.
    pub expiry: String,
}

/// Leaves the secret out, because the output may get into a log.
impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Password").field("expiry", &self.expiry).finish_non_exhaustive()
    }
}

/// The content of all files.
#[derive(Clone, Debug, PartialEq)]
pub struct Configuration {
    /// `config.yaml`.
    pub config: RunnerConfig,
    /// See [`ConfigFile::digest`].
    pub digest: String,
    /// The display's password. `None`: the display has no password.
    pub password: Option<Password>,
    /// The cloud-init data. `None`: the guest gets no cloud-init disk.
    pub cloud_init: Option<CloudInitFiles>,
    /// The QEMU templates of the VM's set, if it has some.
    pub qemu: Option<QemuFile>,
}

/// Reads the configuration from a directory with the layout of [`paths::CONFIG_DIR`]. All files but `config.yaml` are optional.
///
/// # Errors
/// If `config.yaml` is missing or wrong, or one of the files cannot be read.
pub fn read(dir: &Path) -> Result<Configuration, Error> {
    let path = dir.join(paths::CONFIG_FILE);
    let text = fs::read_to_string(&path).map_err(FileAccessError::with("read", &path))?;
    let config = parse(&path, &text)?;
    let secret = read_optional_text(&dir.join(paths::PASSWORD_FILE))?
        .or_else(|| config.vm.display.spice.as_ref().and_then(|spice| spice.ticket.clone()));
    let password = match secret {
        // The old `ticket` in the configuration has no time and never expires.
        Some(secret) => Some(Password {
            secret,
            expiry: read_optional_text(&dir.join(paths::EXPIRY_FILE))?.unwrap_or_else(|| paths::NEVER.into()),
        }),
        None => None,
    };
    let projected = projected_cloud_init(dir)?;
    let cloud_init = CloudInitFiles::choose(projected, config.cloud_init.as_ref(), &config.vm.name);
    let path = dir.join(paths::QEMU_FILE);
    let qemu = read_optional(&path)?.map(|text| qemu_file(&path, &String::from_utf8_lossy(&text))).transpose()?;
    Ok(Configuration { config, digest: ConfigFile::digest(&text), password, cloud_init, qemu })
}

/// Parses and checks `config.yaml`.
///
/// # Errors
/// If the text is not YAML, a field is missing or has the wrong type, or two fields contradict each other. `path` is only for the
/// error.
pub fn parse(path: &Path, text: &str) -> Result<RunnerConfig, Error> {
    let config = RunnerConfig::parse(text).map_err(|error| content(path, &error))?;
    match contradiction(&config.vm) {
        Some(what) => Err(Error::Contradiction { path: path.to_owned(), what }),
        None => Ok(config),
    }
}

/// Parses the text of the file at `path` with QEMU templates.
///
/// # Errors
/// If it is not such a file.
pub fn qemu_file(path: &Path, text: &str) -> Result<QemuFile, Error> {
    crate::yaml::from_str(text).map_err(|error| content(path, &error))
}

/// The error of a file that is not YAML, or not what it should be.
fn content(path: &Path, error: &crate::yaml::Error) -> Error {
    let (line, column) = error.place().unwrap_or((1, 1));
    // The parser repeats the position at the end of its message.
    let what = error.to_string();
    let what = what.split_once(" at line ").map_or(what.as_str(), |(what, _)| what).to_owned();
    Error::Content { path: path.to_owned(), line, column, what }
}

/// The first contradiction between fields.
fn contradiction(vm: &VmSection) -> Option<String> {
    if vm.current_cpus == 0 || vm.current_cpus > vm.maximum_cpus {
        return Some(format!(
            "vm.currentCpus is {}, but must be between 1 and vm.maximumCpus, which is {}",
            vm.current_cpus, vm.maximum_cpus
        ));
    }
    if let Some(current) = &vm.current_ram
        && current.bytes() > vm.maximum_ram.bytes()
    {
        return Some(format!(
            "vm.currentRam is {current}, but must not be more than vm.maximumRam, which is {}",
            vm.maximum_ram
        ));
    }
    if vm.display.spice.is_some() && vm.display.vnc.is_some() {
        return Some("vm.display has both spice and vnc: remove one of them".into());
    }
    if vm.display.vnc.is_some() && vm.display.clipboard == Some(Clipboard::Spice) {
        return Some("vm.display.clipboard is spice, but the display is VNC: remove one of the two".into());
    }
    None
}

fn projected_cloud_init(dir: &Path) -> Result<CloudInitFiles, FileAccessError> {
    let dir = dir.join(paths::CLOUD_INIT_DIR);
    Ok(CloudInitFiles {
        meta_data: read_optional(&dir.join("meta-data"))?,
        user_data: read_optional(&dir.join("user-data"))?,
        vendor_data: read_optional(&dir.join("vendor-data"))?,
        network_config: read_optional(&dir.join("network-config"))?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "/Runner:\n  namespace: ns1\n  vm:\n    name: vm1\n    maximumCpus: 4\n";

    fn error(text: &str) -> String {
        parse(Path::new("config.yaml"), text).unwrap_err().to_string()
    }

    #[test]
    fn an_error_names_the_place_and_the_problem() {
        assert!(parse(Path::new("config.yaml"), MINIMAL).is_ok());
        let wrong = [
            "/Runner: [1",
            "/Runner:\n  namespace: ns1\n",
            &format!("{MINIMAL}    currentCpus: many\n"),
            &format!("{MINIMAL}    maximumRam: 4Gx\n"),
            &format!("{MINIMAL}    currentCpus: 5\n"),
            &format!("{MINIMAL}    maximumRam: 1G\n    currentRam: 2G\n"),
            &format!("{MINIMAL}    display: {{ spice: {{ port: 1 }}, vnc: {{ port: 2 }} }}\n"),
        ];
        insta::assert_snapshot!(wrong.map(error).join("\n"));
    }

    #[test]
    fn the_example_in_the_documentation_of_the_runner_is_a_valid_configuration() {
        let lines = include_str!("../runner.rs").lines().map(|line| line.strip_prefix("//! ").unwrap_or_default());
        let example: Vec<&str> =
            lines.skip_while(|line| *line != "/Runner:").take_while(|line| !line.starts_with('$')).collect();
        let config = parse(Path::new("config.yaml"), &example.join("\n")).unwrap();
        assert_eq!((config.vm.name.as_str(), config.vm.drives.len()), ("apple", 1));
    }

    #[test]
    fn the_file_with_the_password_has_precedence_over_the_ticket() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        write("config.yaml", MINIMAL);
        assert_eq!(read(dir.path()).unwrap().password, None);
        let password = |secret: &str, expiry: &str| Some(Password { secret: secret.into(), expiry: expiry.into() });
        write("config.yaml", &format!("{MINIMAL}    display: {{ spice: {{ port: 5900, ticket: t1 }} }}\n"));
        assert_eq!(read(dir.path()).unwrap().password, password("t1", "never"));
        write("display-password", "s1\n");
        write("password-expiry", "+10");
        assert_eq!(read(dir.path()).unwrap().password, password("s1", "+10"));
        assert_eq!(format!("{:?}", password("s1", "+10").unwrap()), r#"Password { expiry: "+10", .. }"#);
    }

    #[test]
    fn the_error_for_a_missing_file_names_it() {
        let error = read(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nowhere/config.yaml");
    }
}
