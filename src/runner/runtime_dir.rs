//! The runtime directory: the only place where the two roles of the runner meet. It holds QEMU's sockets and the files that
//! one role writes for the other. It is deleted with the Pod.

use std::{
    io,
    path::{Path, PathBuf},
};

use tracing::warn;

use super::files::{FileAccessError, create_directory};
use crate::{
    process::follow::{Changes, DirectoryWatch, Follower, is_exhausted},
    render::command_line::{Sockets, sockets},
};

/// The longest path of the directory in bytes. The address of a Unix socket has 108 bytes (`sun_path`, see unix(7)), and the
/// names of the sockets in the directory need the rest.
const LONGEST_PATH: usize = 80;

/// The directory.
#[derive(Clone, Debug)]
pub struct RuntimeDir(PathBuf);

impl RuntimeDir {
    /// Creates the directory if it does not exist.
    ///
    /// # Errors
    /// If the directory cannot be created, or its path has more than 80 bytes.
    pub fn open(path: &Path) -> Result<Self, FileAccessError> {
        let directory = Self::at(path)?;
        create_directory(&directory.0)?;
        Ok(directory)
    }

    /// The directory, which may not exist.
    ///
    /// # Errors
    /// If its path has more than 80 bytes.
    pub fn at(path: &Path) -> Result<Self, FileAccessError> {
        let path = std::path::absolute(path).map_err(FileAccessError::with("find", path))?;
        if path.as_os_str().len() > LONGEST_PATH {
            let source = io::Error::new(
                io::ErrorKind::InvalidFilename,
                "longer than 80 bytes: the names of the sockets in it would be too long",
            );
            return Err(FileAccessError::with("use", &path)(source));
        }
        Ok(Self(path))
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Reports changes of the files in `config_dir`, and files that are renamed into the runtime directory. If the kernel can't do that,
    /// because the node has no watches left, the directories are looked at each second.
    ///
    /// # Errors
    /// If one of the directories does not exist.
    pub fn follow_with(&self, config_dir: &Path) -> Result<Follower, FileAccessError> {
        match self.watch_with(config_dir) {
            Err(FileAccessError { source, .. }) if is_exhausted(&source) => {
                warn!(error = %source, "the node has no inotify watches left; looking at the files each second");
                Ok(Follower::polling(&[&self.0, config_dir]))
            }
            outcome => outcome,
        }
    }

    fn watch_with(&self, config_dir: &Path) -> Result<Follower, FileAccessError> {
        let error = || FileAccessError::with("watch", config_dir);
        let watch = DirectoryWatch::new().map_err(error())?;
        watch.add(&self.0, Changes::Renames).map_err(FileAccessError::with("watch", &self.0))?;
        // This call comes last, because both may be the same directory, and the last call for a directory counts.
        watch.add(config_dir, Changes::Files).map_err(error())?;
        watch.follow().map_err(error())
    }

    /// The sockets of QEMU's command line.
    pub fn sockets(&self) -> Sockets {
        Sockets::in_folder(&self.0.display().to_string())
    }

    /// The socket of QEMU's monitor for the machine role.
    pub fn monitor(&self) -> PathBuf {
        self.0.join(sockets::MONITOR)
    }

    /// The socket of QEMU's monitor for the agent role.
    pub fn agent_monitor(&self) -> PathBuf {
        self.0.join(sockets::AGENT)
    }

    /// The socket of the port of QEMU's guest agent.
    pub fn guest_agent(&self) -> PathBuf {
        self.0.join(sockets::GUEST_AGENT)
    }

    /// The socket of the port of the login agent.
    pub fn vmop_agent(&self) -> PathBuf {
        self.0.join(sockets::VMOP_AGENT)
    }

    /// QEMU's socket of the serial console. The machine role is its only client.
    pub fn serial(&self) -> PathBuf {
        self.0.join(sockets::SERIAL)
    }

    /// The machine role's socket of the serial console, for any number of clients.
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }

    /// QEMU's socket of the display as SPICE, if it has no port.
    pub fn spice(&self) -> PathBuf {
        self.0.join(sockets::SPICE)
    }

    /// QEMU's socket of the display as VNC, beside the display's own protocol. It has no password: only programs in the Pod reach it.
    pub fn vnc(&self) -> PathBuf {
        self.0.join(sockets::VNC)
    }

    /// The machine role's socket for the command `vm-runner end`.
    pub fn control(&self) -> PathBuf {
        self.0.join("control.sock")
    }

    /// The log of the guest's output on its serial console.
    pub fn console_log(&self) -> PathBuf {
        self.0.join("console.log")
    }

    /// The socket of the TPM emulator.
    pub fn tpm(&self) -> PathBuf {
        self.0.join(sockets::TPM)
    }

    /// The socket of passt, which connects a network of type `pod`.
    pub fn passt(&self) -> PathBuf {
        self.0.join("passt.sock")
    }

    /// A picture of the guest's screen, for who asked for it.
    pub fn picture(&self, number: u64) -> PathBuf {
        self.0.join(format!("picture-{number}.png"))
    }

    /// Until when the display's password is valid.
    pub fn password_end(&self) -> PathBuf {
        self.0.join("password-end.json")
    }

    /// The image of the cloud-init disk.
    pub fn cloud_init_disk(&self) -> PathBuf {
        self.0.join("cloud-init.img")
    }

    /// The result of the trial of KVM.
    pub fn kvm_trial(&self) -> PathBuf {
        self.0.join("kvm.json")
    }

    /// The firmware of the trial of KVM. It exists only during the trial.
    pub fn kvm_trial_firmware(&self) -> PathBuf {
        self.0.join("kvm-trial.bin")
    }

    /// The state of QEMU, which the machine role writes.
    pub fn machine(&self) -> PathBuf {
        self.0.join("machine.json")
    }

    /// The last reset, which the agent role writes.
    pub fn resets(&self) -> PathBuf {
        self.0.join("resets.json")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_a_path_too_long_for_sockets_is_refused() {
        let error = RuntimeDir::open(Path::new(&format!("/tmp/{}", "long/".repeat(20)))).unwrap_err();
        assert!(error.to_string().starts_with("cannot use /tmp/long/"), "{error}");
    }
}
