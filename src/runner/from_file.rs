//! The command line of `vm-runner run FILE`, which runs a VirtualMachine from a file without a cluster. The module `local` of the crate
//! carries it out; the runner in a Pod is built without that module.

use std::{net::Ipv4Addr, path::PathBuf, str::FromStr};

use clap::Args;

use crate::runner_config::{Forward, Protocol};

/// What the help of `run` ends with.
pub const HELP: &str = "\
With FILE the guest's serial console is in the terminal. Ctrl-] leaves it: the guest is asked to power down, and ended at once at the \
second time. SIGTERM, SIGINT and SIGHUP do the same.

Exit codes with FILE:
  0  the guest has shut down
  1  an error, described on standard error
  2  the command line is wrong
  3  the guest was ended without its shutdown";

/// What is run, and where its files are.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "A VM from a file, without a cluster")]
pub struct FileArguments {
    /// Run the VirtualMachine in this YAML file on this computer (-: standard input). Secrets and ConfigMaps that the VM refers to can be in
    /// the same file.
    #[arg(value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// The folder of the VM's disks and other files. It is made at the first start [default: vm-runner/NAME below XDG_DATA_HOME, which is
    /// ~/.local/share].
    #[arg(long, value_name = "DIR", requires = "file")]
    pub dir: Option<PathBuf>,
    /// The image of the first disk: a file (raw or qcow2) or a URL. The disk stores only what differs from it; the image is never changed.
    #[arg(long, value_name = "FILE|URL", requires = "file")]
    pub image: Option<String>,
    /// Forward a port of this computer to the guest: [IP:]PORT:GUESTPORT[/udp]. Without an address, only this computer can connect. Can be
    /// repeated.
    #[arg(long, short, value_name = "PORTS", requires = "file")]
    pub publish: Vec<Publish>,
    /// Open the VM's display in a viewer. Without this the VM has no display.
    #[arg(long, requires = "file")]
    pub display: bool,
    /// Set a value of the VM, such as spec.vm.currentCpus=2. The value is YAML, and is checked like the file. Can be repeated.
    #[arg(long, value_name = "PATH=VALUE", requires = "file")]
    pub set: Vec<String>,
    /// Let the owner of this public key log in by ssh: the key is added to the user data of cloud-init. Can be repeated.
    #[arg(long, value_name = "FILE", requires = "file")]
    pub ssh_key: Vec<PathBuf>,
    /// Remove the VM's disks and other files before the start.
    #[arg(long, requires = "file")]
    pub fresh: bool,
    /// A folder with images of CDs, which the guest may read. Can be repeated.
    #[arg(long = "cd-folder", alias = "image-repository", value_name = "DIR", requires = "file")]
    pub cd_folders: Vec<PathBuf>,
    /// A folder of templates over the built-in ones.
    #[arg(long, value_name = "DIR", requires = "file")]
    pub templates: Option<PathBuf>,
    /// A YAML file with values for the templates.
    #[arg(long, value_name = "FILE", requires = "file")]
    pub values: Option<PathBuf>,
    /// The manager's configuration.
    #[arg(long, value_name = "FILE", requires = "file")]
    pub config: Option<PathBuf>,
}

/// A forwarded port on the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Publish(pub Forward);

impl FromStr for Publish {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const FORM: &str = "write [IP:]PORT:GUESTPORT[/udp], such as 2222:22 or 0.0.0.0:8080:80";
        let (ports, protocol) = match text.rsplit_once('/') {
            None => (text, Protocol::Tcp),
            Some((ports, "tcp")) => (ports, Protocol::Tcp),
            Some((ports, "udp")) => (ports, Protocol::Udp),
            Some((_, other)) => return Err(format!("{other:?} is neither tcp nor udp: {FORM}")),
        };
        let port = |text: &str| match text.parse() {
            Ok(0) | Err(_) => Err(format!("{text:?} is no port from 1 to 65535: {FORM}")),
            Ok(port) => Ok(port),
        };
        let (rest, guest) = ports.rsplit_once(':').ok_or_else(|| FORM.to_owned())?;
        let (address, own) = match rest.rsplit_once(':') {
            None => (Ipv4Addr::LOCALHOST, rest),
            Some((address, own)) => {
                (address.parse().map_err(|_| format!("{address:?} is no IPv4 address: {FORM}"))?, own)
            }
        };
        Ok(Self(Forward { protocol, address, port: port(own)?, guest_port: port(guest)? }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_written_as_with_other_programs() {
        let parse = |text: &str| text.parse::<Publish>().map(|publish| publish.0.to_string());
        for (text, expected) in [
            ("2222:22", "tcp:127.0.0.1:2222-:22"),
            ("0.0.0.0:8080:80/tcp", "tcp:0.0.0.0:8080-:80"),
            ("53:5353/udp", "udp:127.0.0.1:53-:5353"),
        ] {
            assert_eq!(parse(text).unwrap(), expected, "{text}");
        }
        let wrong = ["", "22", "a:22", "2222:", "0:22", "70000:22", "::1:22:22", "host:1:2", "1:2/sctp"];
        insta::assert_snapshot!(wrong.map(|text| format!("{text:?}: {}", parse(text).unwrap_err())).join("\n"));
    }
}
