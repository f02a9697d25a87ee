//! Reads what is projected into the Pod: `config.yaml`, cloud-init's files, the display's password.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::{cloud_init, files::FileError};
use crate::runner_config::{self, RunnerConfig, paths};

/// Why the configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file is not readable.
    #[error(transparent)]
    File(#[from] FileError),
    /// `config.yaml` is not what it should be. Shaped like a compiler's message, for editors and people.
    #[error("{}:{line}:{column}: {what}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// The column, from 1.
        column: usize,
        /// The parser's words.
        what: String,
    },
    /// The parts do not fit together.
    #[error("{}: {what}", path.display())]
    Contradiction {
        /// The file.
        path: PathBuf,
        /// What, and what to do.
        what: String,
    },
}

/// The display's password with the time that it expires, as users write it: `now`, `never`, `+SECONDS` or Unix time.
#[derive(Clone, PartialEq, Eq)]
pub struct Password {
    /// The password.
    pub secret: String,
    /// The time.
    pub expiry: String,
}

/// Without the secret: this may reach a log.
impl std::fmt::Debug for Password {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Password").field("expiry", &self.expiry).finish_non_exhaustive()
    }
}

/// All that is projected.
#[derive(Clone, Debug, PartialEq)]
pub struct Configuration {
    /// `config.yaml`.
    pub config: RunnerConfig,
    /// The display's password. `None`: it has none.
    pub password: Option<Password>,
    /// What the guest is told. `None`: it gets no disk with cloud-init's data.
    pub cloud_init: Option<cloud_init::Files>,
}

/// Reads the configuration.
///
/// # Errors
/// If `config.yaml` is missing or wrong, or one of the files is not readable.
pub fn read(dir: &Path) -> Result<Configuration, Error> {
    let path = dir.join("config.yaml");
    let text = fs::read_to_string(&path).map_err(FileError::with("read", &path))?;
    let config = parse(&path, &text)?;
    let secret = optional_text(&dir.join(paths::PASSWORD_FILE))?
        .or_else(|| config.vm.display.spice.as_ref().and_then(|spice| spice.ticket.clone()));
    let password = match secret {
        // Without a time the password is good: that is what a ticket in the configuration was for.
        Some(secret) => Some(Password {
            secret,
            expiry: optional_text(&dir.join(paths::EXPIRY_FILE))?.unwrap_or_else(|| paths::NEVER.into()),
        }),
        None => None,
    };
    let projected = cloud_init_files(dir)?;
    let cloud_init = cloud_init::Files::choose(projected, config.cloud_init.as_ref(), &config.vm.name);
    Ok(Configuration { config, password, cloud_init })
}

/// Parses and checks `config.yaml`.
///
/// # Errors
/// If it is not YAML, has a field missing or of the wrong type, or fields that contradict each other.
pub fn parse(path: &Path, text: &str) -> Result<RunnerConfig, Error> {
    let config = RunnerConfig::parse(text).map_err(|error| {
        let (line, column) = error.location().map_or((1, 1), |at| (at.line(), at.column()));
        // The parser repeats the place at the end of its message.
        let what = error.to_string();
        let what = what.split_once(" at line ").map_or(what.as_str(), |(what, _)| what).to_owned();
        Error::Content { path: path.to_owned(), line, column, what }
    })?;
    let vm = &config.vm;
    let contradiction = |what: String| Err(Error::Contradiction { path: path.to_owned(), what });
    if vm.current_cpus == 0 || vm.current_cpus > vm.maximum_cpus {
        return contradiction(format!(
            "vm.currentCpus is {}, but must be between 1 and vm.maximumCpus, which is {}",
            vm.current_cpus, vm.maximum_cpus
        ));
    }
    if let Some(current) = &vm.current_ram
        && current.bytes() > vm.maximum_ram.bytes()
    {
        return contradiction(format!(
            "vm.currentRam is {current}, but must not be more than vm.maximumRam, which is {}",
            vm.maximum_ram
        ));
    }
    if vm.display.spice.is_some() && vm.display.vnc.is_some() {
        return contradiction("vm.display has both spice and vnc: remove one of them".into());
    }
    Ok(config)
}

/// Reads cloud-init's files, as far as there are any.
///
/// # Errors
/// If one is there but not readable.
fn cloud_init_files(dir: &Path) -> Result<cloud_init::Files, FileError> {
    let dir = dir.join(paths::CLOUD_INIT_DIR);
    Ok(cloud_init::Files {
        meta_data: optional(&dir.join("meta-data"))?,
        user_data: optional(&dir.join("user-data"))?,
        network_config: optional(&dir.join("network-config"))?,
    })
}

/// A file's content; `None` if there is no such file.
pub(super) fn optional(path: &Path) -> Result<Option<Vec<u8>>, FileError> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileError::with("read", path)(error)),
    }
}

/// A file's text.
pub(super) fn optional_text(path: &Path) -> Result<Option<String>, FileError> {
    Ok(optional(path)?.and_then(|content| runner_config::text(&content)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINIMAL: &str = "/Runner:\n  namespace: ns1\n  vm:\n    name: vm1\n    maximumCpus: 4\n";

    fn error(text: &str) -> String {
        parse(Path::new("config.yaml"), text).unwrap_err().to_string()
    }

    #[test]
    fn what_is_wrong_and_where() {
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
    fn the_password_comes_from_the_secret_then_from_the_ticket() {
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
    fn a_missing_file_is_named() {
        let error = read(Path::new("/nowhere")).unwrap_err();
        assert_eq!(error.to_string(), "cannot read /nowhere/config.yaml");
    }
}
