//! `kubectl vm display`: the connection file for a viewer. What it does to the VM is [`actions::display`].

use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use tempfile::NamedTempFile;

use super::{
    cluster::ClusterOptions,
    output::{Exit, Failure, Output, chain, note},
    vms::{self, checked_name, vm_names},
    wait::time,
};
use crate::{
    actions::{
        VmHandle,
        display::{self, Connection, DisplayError, Host, Request, Validity},
    },
    files::FileError,
    ownership::COMMAND_MANAGER,
    process::ErrorChain,
};

#[derive(Args)]
pub(super) struct Options {
    /// The VM.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names))]
    vm: String,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// Write into this file, which only you can read and which the viewer deletes. Default: standard output.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The host that the viewer connects to, without a proxy. Default: display.spice.server, the load balancer, or the Pod.
    #[arg(long, value_name = "HOST")]
    server: Option<String>,
    /// The port that the viewer connects to. Default: the display's.
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    port: Option<u16>,
    /// How long a new password lets viewers in; at least 10s.
    #[arg(long, value_name = "TIME", default_value = "2m", value_parser = validity)]
    valid_for: Validity,
    /// Whom the file is for: noted in the VM's status.consoleUser. Another user than before gets a new password.
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Take the display over from whoever is connected now.
    #[arg(long)]
    take: bool,
}

pub(super) fn validity(text: &str) -> Result<Validity, String> {
    Validity::try_from(time(text)?).map_err(|error| error.to_string())
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let name = checked_name(&options.vm)?;
    // Before anything is asked, so that no password is set for a file that can't be written.
    let file = options.output.as_deref().map(PrivateFile::new).transpose()?;
    let cluster = options.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
    let vm = VmHandle::new(cluster.client, cluster.namespace, name);
    let request = Request {
        server: options.server.clone(),
        port: options.port,
        validity: options.valid_for,
        user: options.user.clone(),
        take_over: options.take,
        ip_version: None,
        field_manager: COMMAND_MANAGER,
    };
    let waiting = || note(&format!("{vm}: waiting for its runner to set the password ..."));
    let connection = display::open(&vm, &request, waiting).await.map_err(|error| failure(&vm, &error))?;
    explain_pod_address(&vm, &connection);
    let text = connection.file(file.is_some());
    match file {
        None => write!(output, "{text}")?,
        Some(file) => file.replace(text.as_bytes())?,
    }
    Ok(Exit::Success)
}

/// The error, with the option that helps.
pub(super) fn failure(vm: &VmHandle, error: &DisplayError) -> Failure {
    let help = match error {
        DisplayError::InUse { .. } => "; --take takes it over".to_owned(),
        DisplayError::NoAddress => "; --server gives one".to_owned(),
        DisplayError::PasswordExpired => "; give a longer --valid-for".to_owned(),
        DisplayError::PasswordNotSet { .. } => {
            format!("; kubectl logs -n {} {} may say why", vm.namespace(), vm.name())
        }
        DisplayError::NotStarted
        | DisplayError::NotRunning { .. }
        | DisplayError::Deleted
        | DisplayError::NoPort
        | DisplayError::Vm(_)
        | DisplayError::Watch(_)
        | DisplayError::Object { .. }
        | DisplayError::Random(_) => String::new(),
    };
    match error {
        DisplayError::Vm(source) => vms::failure(chain(vm, source) + &help, source),
        DisplayError::Object { source, .. } => vms::failure(chain(vm, error) + &help, source),
        _ => Failure::new(chain(vm, error) + &help),
    }
}

/// Says how a viewer outside of the cluster gets to the Pod.
fn explain_pod_address(vm: &VmHandle, connection: &Connection) {
    if let (Host::Pod(address), None) = (&connection.host, &connection.proxy) {
        let (namespace, name, port) = (vm.namespace(), vm.name(), connection.pod_port);
        note(&format!(
            "{address} is the Pod's address. Where you can't reach it: kubectl port-forward -n {namespace} pod/{name} {port}, and \
             --server localhost"
        ));
    }
}

/// A file that only its owner can read. It takes its place when it is complete.
pub(super) struct PrivateFile<'a> {
    path: &'a Path,
    temporary: NamedTempFile,
}

impl<'a> PrivateFile<'a> {
    pub fn new(path: &'a Path) -> Result<Self, FileError> {
        if path.exists() && !path.is_file() {
            return Err(FileError::io(path)(io::Error::other("this is no file")));
        }
        let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
        let temporary = NamedTempFile::new_in(folder).map_err(FileError::io(path))?;
        Ok(Self { path, temporary })
    }

    pub fn replace(mut self, content: &[u8]) -> Result<(), FileError> {
        self.temporary.write_all(content).map_err(FileError::io(self.path))?;
        self.temporary.persist(self.path).map_err(|error| FileError::io(self.path)(error.error))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_password_lasts_long_enough_to_connect() {
        assert_eq!(validity("10s").unwrap(), Validity::try_from(Duration::from_secs(10)).unwrap());
        for (text, error) in
            [("9s", "a viewer can't connect"), ("-2m", "a time is not negative"), ("10", "missing a unit")]
        {
            let message = validity(text).unwrap_err();
            assert!(message.contains(error), "{text}: {message}");
        }
    }
}
