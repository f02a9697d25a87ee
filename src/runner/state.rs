//! The files in the runtime directory that one role writes for the other: the state of QEMU, and the last reset.

use std::fs;

use serde::{Deserialize, Serialize};

use super::{
    cloud_init::CloudInitFiles,
    config::Configuration,
    files::{FileAccessError, write_atomically},
    runtime_dir::RuntimeDir,
};
use crate::{api::Reason, runner_config::VmSection};

/// The file `machine.json`. The machine role writes it, the agent role reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineState {
    /// The process ID of QEMU, which identifies one start. 0: QEMU was not started.
    pub pid: u32,
    /// QEMU's machine type, such as `pc-q35-7.2`. Empty if QEMU was not started, as the next three fields.
    pub machine_type: String,
    /// `kvm` or `tcg`.
    pub accelerator: String,
    /// Why this accelerator was chosen, for people.
    pub accelerator_reason: String,
    /// The VM's UUID.
    #[serde(default)]
    pub uuid: String,
    /// The MAC addresses, in the order of the networks.
    #[serde(default)]
    pub macs: Vec<String>,
    /// The configuration at QEMU's start. Absent if QEMU was never started.
    #[serde(default)]
    pub started_with: Option<StartedWith>,
    /// What QEMU does now.
    #[serde(flatten)]
    pub phase: Phase,
}

impl MachineState {
    /// The state after a failure before QEMU's start.
    pub fn failed_before_start(message: String, started_with: Option<StartedWith>) -> Self {
        let phase = Phase::Ended { reason: EndReason::QemuFailed, code: None, last_words: message, held: false };
        Self {
            pid: 0,
            machine_type: String::new(),
            accelerator: String::new(),
            accelerator_reason: String::new(),
            uuid: String::new(),
            macs: Vec::new(),
            started_with,
            phase,
        }
    }

    /// Reads the file. `None` before the first start, or if another version of the runner wrote a file that this one cannot
    /// read.
    pub fn read(runtime: &RuntimeDir) -> Option<Self> {
        serde_json::from_slice(&fs::read(runtime.machine()).ok()?).ok()
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, runtime: &RuntimeDir) -> Result<(), FileAccessError> {
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        write_atomically(&runtime.machine(), &text)
    }
}

/// The parts of the configuration at QEMU's start that QEMU or the guest does not read again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartedWith {
    /// The section `vm`.
    pub vm: VmSection,
    /// The counter of resets.
    pub reset_counter: u64,
    /// The name of the QEMU template, if the configuration has one.
    #[serde(default)]
    pub template: Option<String>,
    /// The digest of the cloud-init data, if there is any.
    #[serde(default)]
    pub cloud_init: Option<String>,
    /// Whether the display had a password.
    #[serde(default)]
    pub display_password: bool,
}

impl From<&Configuration> for StartedWith {
    fn from(Configuration { config, digest: _, cloud_init, password }: &Configuration) -> Self {
        Self {
            vm: config.vm.clone(),
            reset_counter: config.reset_counter,
            template: config.template.clone(),
            cloud_init: cloud_init.as_ref().map(CloudInitFiles::digest),
            display_password: password.is_some(),
        }
    }
}

/// What QEMU does.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all_fields = "camelCase")]
pub enum Phase {
    /// QEMU was started and does not listen on its monitors yet.
    Starting,
    /// QEMU listens on its monitors. From here on the agent may continue a guest that has not run yet.
    Running,
    /// QEMU has ended, or could not be started.
    Ended {
        /// Why.
        reason: EndReason,
        /// QEMU's exit code; absent if a signal ended QEMU.
        code: Option<i32>,
        /// The last lines that QEMU wrote on its standard error, or the error before its start.
        last_words: String,
        /// Whether the runner stays without QEMU until it receives SIGTERM, so that the kubelet does not start the guest again.
        held: bool,
    },
}

/// Why QEMU has ended. The names are the reasons of the VM's condition `Running`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EndReason {
    /// The guest's operating system shut down by itself.
    GuestShutdown,
    /// The guest shut down because the runner asked it to.
    PoweredDown,
    /// The guest did not shut down in time, or was not executing, and the runner ended QEMU.
    PoweredOff,
    /// QEMU could not be started, failed, or was ended by somebody other than the runner.
    QemuFailed,
}

impl EndReason {
    /// The reason of the condition.
    pub fn reason(self) -> Reason {
        match self {
            Self::GuestShutdown => Reason::GuestShutdown,
            Self::PoweredDown => Reason::PoweredDown,
            Self::PoweredOff => Reason::PoweredOff,
            Self::QemuFailed => Reason::QemuFailed,
        }
    }
}

/// The file `resets.json`: the last reset that an agent has carried out, for an agent that starts later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LastReset {
    /// The process ID of the QEMU that was reset.
    pub pid: u32,
    /// The counter of resets in the configuration that asked for it.
    pub counter: u64,
}

impl LastReset {
    /// Reads the file. `None` if this QEMU process was never reset.
    pub fn read(runtime: &RuntimeDir, pid: u32) -> Option<Self> {
        let last: Self = serde_json::from_slice(&fs::read(runtime.resets()).ok()?).ok()?;
        (last.pid == pid).then_some(last)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(self, runtime: &RuntimeDir) -> Result<(), FileAccessError> {
        write_atomically(&runtime.resets(), &serde_json::to_vec(&self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> (tempfile::TempDir, RuntimeDir) {
        let directory = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(directory.path()).unwrap();
        (directory, runtime)
    }

    #[test]
    fn the_state_file_round_trips_and_is_readable() {
        let (_directory, runtime) = runtime();
        assert_eq!(MachineState::read(&runtime), None);
        let state = MachineState {
            pid: 7,
            machine_type: "pc-q35-7.2".into(),
            accelerator: "tcg".into(),
            accelerator_reason: "as configured".into(),
            uuid: "u-1".into(),
            macs: vec!["52:54:00:00:00:01".into()],
            started_with: None,
            phase: Phase::Ended {
                reason: EndReason::QemuFailed,
                code: Some(1),
                last_words: "qemu: no".into(),
                held: false,
            },
        };
        state.write(&runtime).unwrap();
        insta::assert_snapshot!(fs::read_to_string(runtime.machine()).unwrap());
        assert_eq!(MachineState::read(&runtime), Some(state));
    }

    #[test]
    fn the_end_reason_in_the_file_is_the_reason_of_the_condition() {
        for reason in [EndReason::GuestShutdown, EndReason::PoweredDown, EndReason::PoweredOff, EndReason::QemuFailed] {
            assert_eq!(serde_json::to_value(reason).unwrap(), reason.reason().as_str());
        }
    }

    #[test]
    fn a_reset_counts_only_for_the_qemu_process_that_was_reset() {
        let (_directory, runtime) = runtime();
        assert_eq!(LastReset::read(&runtime, 7), None);
        let reset = LastReset { pid: 7, counter: 3 };
        reset.write(&runtime).unwrap();
        assert_eq!(LastReset::read(&runtime, 7), Some(reset));
        assert_eq!(LastReset::read(&runtime, 8), None);
        fs::write(runtime.resets(), "[7,2]").unwrap();
        assert_eq!(LastReset::read(&runtime, 7).map(|last| last.counter), Some(2), "the file of an earlier version");
    }
}
