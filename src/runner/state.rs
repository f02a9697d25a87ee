//! The files in the runtime directory that one role writes for the other: the state of QEMU, and what was carried out.
//!
//! In a Pod the roles are in two containers. Whoever breaks out of QEMU can write into the directory, but does not have the agent's token, so
//! the agent does not trust the files: it follows no link, reads a limited number of bytes, and takes only a state that a machine role could
//! have written.

use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use tracing::warn;

use super::{
    cloud_init::CloudInitFiles,
    config::{Configuration, Password},
    files::{FileAccessError, read_untrusted, write_atomically},
    runtime_dir::RuntimeDir,
};
use crate::{
    api::Reason,
    process::ErrorChain,
    runner_config::{NetworkSection, RunnerConfig, VmSection, digest},
};

/// The most bytes of a file. The state contains a part of the configuration, which a ConfigMap of 1 MiB contains too.
const MOST: u64 = 2 << 20;
/// The most bytes of a name in the state, of a sentence, and the most network interfaces.
const LONGEST_NAME: usize = 64;
const LONGEST_SENTENCE: usize = 32 << 10;
const MOST_INTERFACES: usize = 64;
/// The most disks.
const MOST_DISKS: usize = 64;
/// The most programs that can end: there is one of each.
const MOST_LOST: usize = 3;

/// The file `machine.json`. The machine role writes it, the agent role reads it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MachineState {
    /// A random ID of this start of QEMU. Process IDs repeat, above all in containers. Empty if QEMU was not started.
    #[serde(default)]
    pub start: String,
    /// The process ID of QEMU in its container. 0: QEMU was not started.
    pub pid: u32,
    /// QEMU's machine type, such as `pc-q35-7.2`. Empty if QEMU was not started, as the next three fields.
    pub machine_type: String,
    /// How the devices are arranged: a name of [`Hardware`](crate::render::command_line::Hardware).
    #[serde(default)]
    pub hardware: String,
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
    /// The disks that are block devices.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub devices: Vec<BlockDevice>,
    /// The programs that QEMU needs and that have ended while the guest runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lost: Vec<Helper>,
    /// What QEMU does now.
    #[serde(flatten)]
    pub phase: Phase,
}

impl MachineState {
    /// The state after a failure before QEMU's start.
    pub fn failed_before_start(message: String, started_with: Option<StartedWith>) -> Self {
        let phase = Phase::Ended { reason: EndReason::QemuFailed, code: None, last_words: message, held: false };
        Self {
            start: String::new(),
            pid: 0,
            machine_type: String::new(),
            hardware: String::new(),
            accelerator: String::new(),
            accelerator_reason: String::new(),
            uuid: String::new(),
            macs: Vec::new(),
            started_with,
            devices: Vec::new(),
            lost: Vec::new(),
            phase,
        }
    }

    /// The network interfaces of QEMU: slot, section of the configuration, MAC address.
    pub fn interfaces(&self) -> impl Iterator<Item = (u32, &NetworkSection, &String)> {
        let sections = self.started_with.iter().flat_map(|started| &started.vm.network);
        let paired = sections.zip(&self.macs).enumerate();
        paired.map(|(index, (section, mac))| (section.slot(index), section, mac))
    }

    /// Reads the file. `None` before the first start, or if another version of the runner or somebody else wrote a file that no machine role
    /// of this version writes.
    pub fn read(runtime: &RuntimeDir) -> Option<Self> {
        let state: Self = serde_json::from_slice(&read_untrusted(&runtime.machine(), MOST).ok()?).ok()?;
        Some(state).filter(Self::is_plausible)
    }

    fn is_plausible(&self) -> bool {
        let is_name = |text: &str| {
            let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:".contains(&byte);
            text.len() <= LONGEST_NAME && text.bytes().all(is_plain)
        };
        [&self.start, &self.machine_type, &self.hardware, &self.uuid].into_iter().all(|text| is_name(text))
            && ["", "kvm", "tcg"].contains(&self.accelerator.as_str())
            && self.accelerator_reason.len() <= LONGEST_SENTENCE
            && self.lost.len() <= MOST_LOST
            && self.devices.len() <= MOST_DISKS
            && self.macs.len() <= MOST_INTERFACES
            && self.macs.iter().all(|mac| is_name(mac))
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

/// A disk that is a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BlockDevice {
    /// The disk's slot.
    pub slot: u32,
    /// The size that the device had when QEMU was started.
    pub at_start: u64,
    /// The size that it has now. QEMU does not see by itself that it has grown.
    pub bytes: u64,
}

/// A program that QEMU is connected to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Helper {
    /// swtpm, which is the guest's TPM.
    Tpm,
    /// passt, which connects the guest to the Pod's network.
    PodNetwork,
    /// passt in a container of its own, where it is started again.
    PodContainer,
}

/// The parts of the configuration at QEMU's start that QEMU or the guest does not read again.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StartedWith {
    /// The section `vm`.
    pub vm: VmSection,
    /// The counter of resets.
    pub reset_counter: u64,
    /// The counter of reboots.
    #[serde(default)]
    pub reboot_counter: u64,
    /// The name of the QEMU template, if the configuration has one.
    #[serde(default)]
    pub template: Option<String>,
    /// The digest of the QEMU templates of the VM's set, if it has some and the VM follows them.
    #[serde(default)]
    pub qemu: Option<String>,
    /// The digest of the cloud-init data, if there is any.
    #[serde(default)]
    pub cloud_init: Option<String>,
    /// Whether the display had a password.
    #[serde(default)]
    pub display_password: bool,
    /// The longest time in seconds that the guest has to power down: that of QEMU's first start in this Pod, because the Pod's grace period
    /// stays. `None`: it is not known.
    #[serde(default)]
    pub longest_powerdown: Option<u64>,
}

impl From<&Configuration> for StartedWith {
    fn from(Configuration { config, digest: _, cloud_init, password, qemu: _ }: &Configuration) -> Self {
        Self {
            vm: config.vm.clone(),
            reset_counter: config.reset_counter,
            reboot_counter: config.reboot_counter,
            template: config.template.clone(),
            // That of a VM that keeps its template is in its data directory.
            qemu: config.qemu_templates.clone().filter(|_| config.update_template),
            cloud_init: cloud_init.as_ref().map(CloudInitFiles::digest),
            display_password: password.is_some(),
            longest_powerdown: Some(config.vm.powerdown_timeout),
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
    /// The guest has panicked, and the runner ended QEMU, because that is what the VM's spec wants.
    StoppedAfterPanic,
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
            Self::StoppedAfterPanic => Reason::StoppedAfterPanic,
            Self::QemuFailed => Reason::QemuFailed,
        }
    }
}

/// The file `resets.json`: what agents have carried out of what is asked for once, for an agent that starts later.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Orders {
    /// The start of QEMU after which that was, see [`MachineState::start`].
    pub start: String,
    /// The counter of resets in the configuration that asked for the last reset.
    pub counter: u64,
    /// The counter of reboots in the configuration that asked for the last reboot.
    #[serde(default)]
    pub reboots: u64,
    /// Whether an agent has paused the guest and has not let it go on since.
    #[serde(default)]
    pub paused: bool,
    /// Whether an agent was about to change that, so that the guest may be as `paused` says or not.
    #[serde(default)]
    pub is_in_doubt: bool,
}

impl Orders {
    /// What was carried out since the start of this QEMU. The configuration with which it was started counts as carried out; if that is not
    /// known, the present one does.
    pub fn of(runtime: &RuntimeDir, machine: &MachineState, config: &RunnerConfig) -> Self {
        let started = machine.started_with.as_ref();
        Self::read(runtime, &machine.start).unwrap_or_else(|| Self {
            start: machine.start.clone(),
            counter: started.map_or(config.reset_counter, |started| started.reset_counter),
            reboots: started.map_or(config.reboot_counter, |started| started.reboot_counter),
            paused: false,
            is_in_doubt: false,
        })
    }

    /// Reads the file. `None` if nothing was carried out since this start.
    pub fn read(runtime: &RuntimeDir, start: &str) -> Option<Self> {
        let last: Self = serde_json::from_slice(&read_untrusted(&runtime.resets(), MOST).ok()?).ok()?;
        (last.start == start).then_some(last)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, runtime: &RuntimeDir) -> Result<(), FileAccessError> {
        write_atomically(&runtime.resets(), &serde_json::to_vec(self).unwrap_or_default())
    }
}

/// The file `password-end.json`: until when a password is valid whose time counts from the moment when it was set. Without it, each agent that
/// is started again would begin to count anew, and a password that has expired would be valid again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PasswordEnd {
    /// A digest of the password, its time, and the start of QEMU.
    pub password: String,
    /// The Unix time in seconds.
    pub until: u64,
}

impl PasswordEnd {
    /// When a password expires, for QEMU. Of a time that counts from the moment when the password is set it makes Unix time, which an earlier
    /// agent may have noted. `start` is that of QEMU.
    pub fn fixed(runtime: &RuntimeDir, start: &str, Password { secret, expiry }: &Password) -> String {
        let Some(seconds) = expiry.strip_prefix('+').and_then(|seconds| seconds.parse::<u64>().ok()) else {
            return expiry.clone();
        };
        let digest = digest(format!("{start}\n{expiry}\n{secret}"), 16);
        let end = Self::read(runtime, &digest).unwrap_or_else(|| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            let end = Self { password: digest, until: now.saturating_add(seconds) };
            if let Err(error) = end.write(runtime) {
                warn!(error = %ErrorChain(&error), "cannot note until when the display's password is valid");
            }
            end
        });
        // QEMU reads a signed number.
        end.until.min(i64::MAX.unsigned_abs()).to_string()
    }

    /// Reads the file. `None` if it is about another password.
    pub fn read(runtime: &RuntimeDir, password: &str) -> Option<Self> {
        let end: Self = serde_json::from_slice(&read_untrusted(&runtime.password_end(), MOST).ok()?).ok()?;
        (end.password == password).then_some(end)
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(&self, runtime: &RuntimeDir) -> Result<(), FileAccessError> {
        write_atomically(&runtime.password_end(), &serde_json::to_vec(self).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

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
            start: "s-1".into(),
            pid: 7,
            machine_type: "pc-q35-7.2".into(),
            hardware: "root-ports".into(),
            accelerator: "tcg".into(),
            accelerator_reason: "as configured".into(),
            uuid: "u-1".into(),
            macs: vec!["52:54:00:00:00:01".into()],
            started_with: None,
            devices: vec![BlockDevice { slot: 0, at_start: 1 << 30, bytes: 2 << 30 }],
            lost: vec![Helper::PodNetwork],
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
    fn what_was_carried_out_counts_only_for_the_start_of_qemu_before_it() {
        let (_directory, runtime) = runtime();
        assert_eq!(Orders::read(&runtime, "a"), None);
        let orders = Orders { start: "a".into(), counter: 3, reboots: 2, paused: true, is_in_doubt: true };
        orders.write(&runtime).unwrap();
        assert_eq!(Orders::read(&runtime, "a"), Some(orders.clone()));
        assert_eq!(Orders::read(&runtime, "b"), None);
        let config: RunnerConfig = serde_json::from_value(
            serde_json::json!({ "namespace": "ns", "resetCounter": 7, "vm": { "name": "apple" } }),
        )
        .unwrap();
        let machine = |start: &str| MachineState {
            start: start.into(),
            ..MachineState::failed_before_start(String::new(), None)
        };
        assert_eq!(Orders::of(&runtime, &machine("a"), &config), orders);
        assert_eq!(
            Orders::of(&runtime, &machine("b"), &config),
            Orders { start: "b".into(), counter: 7, ..Orders::default() }
        );
        // As agents of earlier versions wrote it.
        fs::write(runtime.resets(), r#"{"start":"a","counter":3}"#).unwrap();
        assert_eq!(
            Orders::of(&runtime, &machine("a"), &config),
            Orders { start: "a".into(), counter: 3, ..Orders::default() }
        );
    }

    #[test]
    fn the_end_of_a_password_does_not_count_for_another_one() {
        let (_directory, runtime) = runtime();
        assert_eq!(PasswordEnd::read(&runtime, "a"), None);
        let end = PasswordEnd { password: "a".into(), until: 3 };
        end.write(&runtime).unwrap();
        assert_eq!(PasswordEnd::read(&runtime, "a"), Some(end));
        assert_eq!(PasswordEnd::read(&runtime, "b"), None);
    }

    /// The directory belongs to whoever breaks out of QEMU.
    #[test]
    fn a_state_that_no_machine_role_writes_is_not_taken() {
        let (_directory, runtime) = runtime();
        let good = MachineState { start: "s-1".into(), ..MachineState::failed_before_start("no".into(), None) };
        good.write(&runtime).unwrap();
        assert_eq!(MachineState::read(&runtime), Some(good.clone()));
        let with = |edit: fn(&mut MachineState)| {
            let mut state = good.clone();
            edit(&mut state);
            state
        };
        for state in [
            with(|state| state.uuid = "u".repeat(65)),
            with(|state| state.machine_type = "\u{1b}[2J".into()),
            with(|state| state.start = "a b".into()),
            with(|state| state.accelerator = "magic".into()),
            with(|state| state.accelerator_reason = "x".repeat((32 << 10) + 1)),
            with(|state| state.macs = vec!["52:54:00:00:00:01".into(); 65]),
            with(|state| state.macs = vec!["x".repeat(65)]),
            with(|state| state.lost = vec![Helper::Tpm; 4]),
        ] {
            state.write(&runtime).unwrap();
            assert_eq!(MachineState::read(&runtime), None, "{state:?}");
        }
        for text in ["", "null", "[]", r#"{"pid": -1}"#, &"[".repeat(1 << 20), &" ".repeat(3 << 20)] {
            fs::write(runtime.machine(), text).unwrap();
            assert_eq!(MachineState::read(&runtime), None, "{} bytes", text.len());
        }
    }
}
