//! The runtime directory, where the runner's two roles meet: its sockets and the state of the machine.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{cloud_init::Files, config::Configuration};
use crate::{
    process::follow::{Changes, DirectoryWatch, Follower},
    runner_config::VmSection,
};

/// A file that could not be read or written.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct FileError {
    /// `read`, `write`, ...
    pub action: &'static str,
    /// The file.
    pub path: PathBuf,
    /// Why.
    pub source: io::Error,
}

impl FileError {
    /// For `map_err`.
    pub fn with(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { action, path: path.to_owned(), source }
    }
}

/// The directory with its files.
#[derive(Clone, Debug)]
pub struct RuntimeDir(PathBuf);

impl RuntimeDir {
    /// Makes the directory if it does not exist.
    ///
    /// # Errors
    /// If it cannot be made, or its path is too long for Unix sockets in it (`sun_path` has 108 bytes, see unix(7)).
    pub fn open(path: &Path) -> Result<Self, FileError> {
        let path = std::path::absolute(path).map_err(FileError::with("find", path))?;
        if path.as_os_str().len() > 80 {
            let source = io::Error::new(
                io::ErrorKind::InvalidFilename,
                "longer than 80 bytes: the names of the sockets in it would be too long",
            );
            return Err(FileError::with("use", &path)(source));
        }
        fs::create_dir_all(&path).map_err(FileError::with("make", &path))?;
        Ok(Self(path))
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Reports changes of the files in `written`, and files that appear complete in this directory.
    ///
    /// # Errors
    /// If one of the two does not exist, or the user's limit of inotify instances is reached.
    pub fn follow_with(&self, written: &Path) -> Result<Follower, FileError> {
        let error = || FileError::with("follow", written);
        let watch = DirectoryWatch::new().map_err(error())?;
        watch.add(&self.0, Changes::Renames).map_err(FileError::with("follow", &self.0))?;
        // Last, because both may be the same directory.
        watch.add(written, Changes::Files).map_err(error())?;
        watch.follow().map_err(error())
    }

    /// QEMU's monitor for the role machine.
    pub fn monitor(&self) -> PathBuf {
        self.0.join("monitor.sock")
    }

    /// QEMU's monitor for the role agent.
    pub fn agent_monitor(&self) -> PathBuf {
        self.0.join("agent.sock")
    }

    /// The guest agent's channel.
    pub fn guest_agent(&self) -> PathBuf {
        self.0.join("guest-agent.sock")
    }

    /// The login agent's channel.
    pub fn vmop_agent(&self) -> PathBuf {
        self.0.join("vmop-agent.sock")
    }

    /// QEMU's end of the serial console; the role machine is its only client.
    pub fn serial(&self) -> PathBuf {
        self.0.join("serial.sock")
    }

    /// Where people's programs reach the serial console, any number of them.
    pub fn console(&self) -> PathBuf {
        self.0.join("console.sock")
    }

    /// What the guest wrote on its serial console.
    pub fn console_log(&self) -> PathBuf {
        self.0.join("console.log")
    }

    /// The TPM emulator's socket.
    pub fn tpm(&self) -> PathBuf {
        self.0.join("swtpm.sock")
    }

    /// The socket of passt, which connects a network of type `pod`.
    pub fn passt(&self) -> PathBuf {
        self.0.join("passt.sock")
    }

    /// The cloud-init disk.
    pub fn cloud_init_disk(&self) -> PathBuf {
        self.0.join("cloud-init.img")
    }

    /// The outcome of the accelerator's trial.
    pub fn kvm_trial(&self) -> PathBuf {
        self.0.join("kvm.json")
    }

    /// The state of the machine.
    pub fn machine(&self) -> PathBuf {
        self.0.join("machine.json")
    }

    /// The resets that were carried out, for an agent that comes later: QEMU's process and the counter.
    fn resets(&self) -> PathBuf {
        self.0.join("resets.json")
    }

    /// The counter of the last reset of this QEMU process.
    pub fn last_reset(&self, pid: u32) -> Option<u64> {
        let (of, counter): (u32, u64) = serde_json::from_slice(&fs::read(self.resets()).ok()?).ok()?;
        (of == pid).then_some(counter)
    }

    /// Notes a reset.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn note_reset(&self, pid: u32, counter: u64) -> Result<(), FileError> {
        write_atomically(&self.resets(), &serde_json::to_vec(&(pid, counter)).unwrap_or_default())
    }

    /// Reads the state of the machine; `None` before its first start, or if it is not readable (a file of another version).
    pub fn read_machine(&self) -> Option<MachineState> {
        serde_json::from_slice(&fs::read(self.machine()).ok()?).ok()
    }

    /// Writes the state of the machine.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write_machine(&self, state: &MachineState) -> Result<(), FileError> {
        let text = serde_json::to_vec_pretty(state).unwrap_or_default();
        write_atomically(&self.machine(), &text)
    }
}

/// Writes a file so that readers see the old content or the new one, never a part.
///
/// # Errors
/// If it cannot be written.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), FileError> {
    let new = path.with_added_extension("new");
    fs::write(&new, content).map_err(FileError::with("write", &new))?;
    fs::rename(&new, path).map_err(FileError::with("write", path))
}

/// What the role machine tells about the machine: the file `machine.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineState {
    /// QEMU's process, which tells one start from the next.
    pub pid: u32,
    /// QEMU's machine type.
    pub machine_type: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Why that one.
    pub accelerator_reason: String,
    /// The machine's UUID.
    #[serde(default)]
    pub uuid: String,
    /// The MAC addresses, in the order of the networks.
    #[serde(default)]
    pub macs: Vec<String>,
    /// What it was started with; absent if it did not come so far.
    #[serde(default)]
    pub started_with: Option<Started>,
    /// Whether the agent should continue a guest that it finds paused at its start.
    #[serde(flatten)]
    pub phase: Phase,
}

/// What a machine was started with.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Started {
    /// The machine's section of the configuration.
    pub vm: VmSection,
    /// The counter of resets.
    pub reset_counter: u64,
    /// The QEMU template's name, if the configuration names one.
    #[serde(default)]
    pub template: Option<String>,
    /// The digest of cloud-init's data, if there is any.
    #[serde(default)]
    pub cloud_init: Option<String>,
    /// Whether the display had a password.
    #[serde(default)]
    pub display_password: bool,
}

impl From<&Configuration> for Started {
    fn from(Configuration { config, cloud_init, password }: &Configuration) -> Self {
        Self {
            vm: config.vm.clone(),
            reset_counter: config.reset_counter,
            template: config.template.clone(),
            cloud_init: cloud_init.as_ref().map(Files::digest),
            display_password: password.is_some(),
        }
    }
}

/// What the machine does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all_fields = "camelCase")]
pub enum Phase {
    /// QEMU is started.
    Starting,
    /// QEMU listens on its monitors.
    Running,
    /// QEMU has ended.
    Ended {
        /// Why.
        reason: End,
        /// QEMU's exit code; absent if a signal ended it.
        code: Option<i32>,
        /// What QEMU wrote last.
        last_words: String,
        /// Whether the runner stays without QEMU until it gets TERM, so that the guest is not started again.
        held: bool,
    },
}

/// Why QEMU has ended. The names are the reasons of the VM's condition `Running`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// The guest's operating system shut down by itself.
    GuestShutdown,
    /// The guest shut down because it was asked to.
    PoweredDown,
    /// The guest did not shut down in time, or was not running, and QEMU was ended.
    PoweredOff,
    /// QEMU failed, or somebody else ended it.
    QemuFailed,
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machines_state_round_trips_and_reads_well() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(dir.path()).unwrap();
        assert_eq!(runtime.read_machine(), None);
        let state = MachineState {
            pid: 7,
            machine_type: "pc-q35-7.2".into(),
            accelerator: "tcg".into(),
            accelerator_reason: "asked for".into(),
            uuid: "u-1".into(),
            macs: vec!["52:54:00:00:00:01".into()],
            started_with: None,
            phase: Phase::Ended { reason: End::QemuFailed, code: Some(1), last_words: "qemu: no".into(), held: false },
        };
        runtime.write_machine(&state).unwrap();
        insta::assert_snapshot!(fs::read_to_string(runtime.machine()).unwrap());
        assert_eq!(runtime.read_machine(), Some(state));
    }

    #[test]
    fn a_directory_with_no_room_for_socket_names_is_refused() {
        let error = RuntimeDir::open(Path::new(&format!("/tmp/{}", "long/".repeat(20)))).unwrap_err();
        assert!(error.to_string().starts_with("cannot use /tmp/long/"), "{error}");
    }
}
