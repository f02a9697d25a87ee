//! Chooses the accelerator, which executes the guest's instructions: KVM, or emulation (TCG).
//!
//! KVM may not work although `/dev/kvm` can be opened. In some nested or sandboxed environments KVM executes real mode but cannot
//! run a kernel, or it refuses the CPU model. So the runner tries KVM: it starts a QEMU with a tiny firmware, which switches to
//! long mode like a kernel, and then ends QEMU through the device `isa-debug-exit`
//! (<https://www.qemu.org/docs/master/specs/index.html>; the exit code is twice the written value plus one).

use std::{fs, io, path::Path, process::Stdio, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::{
    files::{FileAccessError, Purpose, write_atomically},
    runtime_dir::RuntimeDir,
};
use crate::{api::Accelerator, kvm::TrialResult};

/// The time for the trial. It takes less than 0.1 s if KVM works; a busy node may need more.
const TRIAL_TIMEOUT: Duration = Duration::from_secs(5);
/// The exit code for the value 0x2a, which the firmware writes to `isa-debug-exit`.
const TRIAL_SUCCESS: i32 = 0x2a << 1 | 1;

/// The firmware is mapped to the last 64 KiB below 1 MiB (and below 4 GiB, where the CPU starts).
const FIRMWARE_SIZE: usize = 64 << 10;
/// The offset in the firmware where a CPU starts.
const RESET_VECTOR: usize = 0xfff0;
/// `jmp 0xf000:0`
const RESET_CODE: [u8; 5] = [0xea, 0x00, 0x00, 0x00, 0xf0];
/// The firmware's program, with its GDT at 0x70 and the GDT's pseudo-descriptor at 0x88.
#[rustfmt::skip]
const PROGRAM: [u8; 142] = [
    0xfa, 0xfc,                                     // cli; cld
    0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xc0,             // ds = es = ax = 0
    0xbf, 0x00, 0x10, 0xb9, 0x00, 0x18, 0xf3, 0xab, // clear 12 KiB at 0x1000 for page tables
    0xc7, 0x06, 0x00, 0x10, 0x03, 0x20,             // PML4[0] -> 0x2000, present and writable
    0xc7, 0x06, 0x00, 0x20, 0x03, 0x30,             // PDPT[0] -> 0x3000
    0xc7, 0x06, 0x00, 0x30, 0x83, 0x00,             // PD[0]: 2 MiB page at 0
    0x0f, 0x20, 0xe0, 0x0c, 0x20, 0x0f, 0x22, 0xe0, // cr4 |= PAE
    0x66, 0xb8, 0x00, 0x10, 0x00, 0x00,
    0x0f, 0x22, 0xd8,                               // cr3 = 0x1000
    0x66, 0xb9, 0x80, 0x00, 0x00, 0xc0,
    0x0f, 0x32, 0x80, 0xcc, 0x01, 0x0f, 0x30,       // EFER |= LME
    0xb8, 0x00, 0xf0, 0x8e, 0xd8,                   // ds = 0xf000
    0x66, 0x0f, 0x01, 0x16, 0x88, 0x00,             // lgdt [0x88]
    0x0f, 0x20, 0xc0,
    0x66, 0x0d, 0x01, 0x00, 0x00, 0x80,
    0x0f, 0x22, 0xc0,                               // cr0 |= PG | PE
    0x66, 0xea, 0x5f, 0x00, 0x0f, 0x00, 0x08, 0x00, // jmp 8:0xf005f
    0x66, 0xb8, 0x10, 0x00, 0x8e, 0xd8,             // here in long mode: ds = 16
    0x31, 0xc0, 0x0f, 0xa2,                         // cpuid(0), which the hypervisor must emulate
    0xb0, 0x2a, 0xe6, 0xf4,                         // out 0xf4, 0x2a
    0xf4, 0xeb, 0xfd,                               // hlt, for ever
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, // GDT: null,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x9a, 0xaf, 0x00, // 64 bit code,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x92, 0xcf, 0x00, // data
    0x17, 0x00, 0x70, 0x00, 0x0f, 0x00,             // its size - 1 and address
];

/// Why no accelerator could be chosen.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The configuration demands KVM, and KVM does not work.
    #[error("the configuration demands the accelerator kvm, but {0}; use auto or tcg, or a node with working KVM")]
    NoKvm(String),
    /// The trial's firmware or its result cannot be written.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// QEMU cannot be started.
    #[error("cannot start {qemu}")]
    Qemu {
        /// The program.
        qemu: String,
        /// The system's error.
        source: io::Error,
    },
}

/// The accelerator and the reason for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// `kvm` or `tcg`. QEMU and the VM's status use the same names.
    pub accelerator: &'static str,
    /// Why this accelerator, for people.
    pub reason: String,
}

/// The result of a trial that has ended, which is kept in the runtime directory. It depends on the node and the CPU model. The node changes
/// only with the Pod, and the runtime directory is deleted with the Pod. A trial that did not end in time says only that the node was busy, so
/// the next start makes another one.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Trial {
    /// The CPU model that was tried.
    cpu_model: String,
    /// What does not work. `None`: KVM works.
    problem: Option<String>,
}

impl Trial {
    fn read(runtime: &RuntimeDir, cpu_model: &str) -> Option<Self> {
        let trial: Self = serde_json::from_slice(&fs::read(runtime.kvm_trial()).ok()?).ok()?;
        (trial.cpu_model == cpu_model).then_some(trial)
    }

    fn write(&self, runtime: &RuntimeDir) -> Result<(), FileAccessError> {
        write_atomically(&runtime.kvm_trial(), &serde_json::to_vec(self).unwrap_or_default())
    }
}

/// Chooses the accelerator. `known` is the result of the node's trial of KVM. Without it, starts a trial if the choice depends on it and
/// this Pod has not made one yet. Who only looks makes no trial: KVM counts as working then.
///
/// # Errors
/// If the configuration demands KVM and KVM does not work, or QEMU cannot be started.
pub async fn choose(
    configured: Accelerator,
    cpu_model: &str,
    qemu: &str,
    runtime: &RuntimeDir,
    known: Option<&TrialResult>,
    purpose: Purpose,
) -> Result<Choice, Error> {
    let problem = match configured {
        Accelerator::Tcg => None,
        Accelerator::Kvm | Accelerator::Auto => match (known, device_problem()) {
            (Some(TrialResult { problem: Some(problem) }), _) => Some(problem.clone()),
            (Some(TrialResult { problem: None }) | None, Some(problem)) => Some(problem),
            (Some(TrialResult { problem: None }), None) => None,
            (None, None) => try_kvm(cpu_model, qemu, runtime, purpose, TRIAL_TIMEOUT).await?,
        },
    };
    decide(configured, problem).map_err(Error::NoKvm)
}

fn decide(configured: Accelerator, problem: Option<String>) -> Result<Choice, String> {
    let choice = |accelerator, reason: &str| Choice { accelerator, reason: reason.into() };
    match (configured, problem) {
        (Accelerator::Tcg, _) => Ok(choice("tcg", "as configured")),
        (Accelerator::Kvm, None) => Ok(choice("kvm", "as configured")),
        (Accelerator::Kvm, Some(problem)) => Err(problem),
        (Accelerator::Auto, None) => Ok(choice("kvm", "KVM works here")),
        (Accelerator::Auto, Some(problem)) => Ok(choice("tcg", &problem)),
    }
}

/// Why `/dev/kvm` can't be used, if it can't be opened.
pub(super) fn device_problem() -> Option<String> {
    let opened = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    opened.err().map(|error| problem_of_device(&error))
}

fn problem_of_device(error: &io::Error) -> String {
    if error.kind() == io::ErrorKind::NotFound {
        return "there is no /dev/kvm; a Pod gets it from a device plugin, such as deploy/node-devices, that the manager's configuration \
                names in nodeDevices"
            .to_owned();
    }
    format!("/dev/kvm cannot be opened ({error})")
}

/// Returns what does not work with KVM, or `None` if KVM works.
async fn try_kvm(
    cpu_model: &str,
    qemu: &str,
    runtime: &RuntimeDir,
    purpose: Purpose,
    limit: Duration,
) -> Result<Option<String>, Error> {
    if let Some(trial) = Trial::read(runtime, cpu_model) {
        return Ok(trial.problem);
    }
    if purpose == Purpose::Look {
        return Ok(None);
    }
    let firmware = runtime.kvm_trial_firmware();
    write_atomically(&firmware, &trial_firmware())?;
    let outcome = run_trial("kvm", cpu_model, qemu, &firmware, limit).await;
    // A file that stays does no harm.
    let _ = fs::remove_file(&firmware);
    let outcome = outcome?;
    if let Outcome::Works | Outcome::Fails(_) = &outcome {
        Trial { cpu_model: cpu_model.into(), problem: outcome.clone().problem() }.write(runtime)?;
    }
    Ok(outcome.problem())
}

/// What a trial has shown.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// KVM works.
    Works,
    /// KVM does not work, and why.
    Fails(String),
    /// The trial did not end in time. KVM may work nevertheless: the node may have been busy.
    TimedOut,
}

impl Outcome {
    /// What does not work, as far as it is known; `None`: KVM works.
    fn problem(self) -> Option<String> {
        match self {
            Self::Works => None,
            Self::Fails(problem) => Some(problem),
            Self::TimedOut => Some("/dev/kvm can be opened, but a trial program did not end in time".into()),
        }
    }
}

/// Makes a trial of KVM with the host's CPU, which takes as long as `limit` at most. `firmware` is a file that is written for it.
///
/// # Errors
/// If the file can't be written, or QEMU can't be started.
pub async fn trial(qemu: &str, firmware: &Path, limit: Duration) -> Result<TrialResult, Error> {
    if let Some(problem) = device_problem() {
        return Ok(TrialResult::failed(&problem));
    }
    write_atomically(firmware, &trial_firmware())?;
    let problem = run_trial("kvm", "host", qemu, firmware, limit).await?.problem();
    Ok(problem.map_or_else(TrialResult::default, |problem| TrialResult::failed(&problem)))
}

/// Runs the trial.
async fn run_trial(
    accelerator: &str,
    cpu_model: &str,
    qemu: &str,
    firmware: &Path,
    limit: Duration,
) -> Result<Outcome, Error> {
    let child = Command::new(qemu)
        .args(["-nodefaults", "-no-user-config", "-display", "none", "-machine", "q35", "-m", "16"])
        .args(["-accel", accelerator, "-cpu", cpu_model, "-bios"])
        .arg(firmware)
        .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=4"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| Error::Qemu { qemu: qemu.into(), source })?;
    let output = match tokio::time::timeout(limit, child.wait_with_output()).await {
        Err(_) => return Ok(Outcome::TimedOut),
        Ok(Err(source)) => return Err(Error::Qemu { qemu: qemu.into(), source }),
        Ok(Ok(output)) => output,
    };
    if output.status.code() == Some(TRIAL_SUCCESS) {
        return Ok(Outcome::Works);
    }
    let message = first_message(qemu, &String::from_utf8_lossy(&output.stderr));
    Ok(Outcome::Fails(format!("/dev/kvm can be opened, but KVM does not run a trial program ({message})")))
}

/// The first line on QEMU's standard error that is not a warning, without QEMU's own name.
fn first_message(qemu: &str, stderr: &str) -> String {
    let line = stderr.lines().find(|line| !line.contains("warning:")).unwrap_or_default();
    let line = line.strip_prefix(qemu).and_then(|line| line.strip_prefix(": ")).unwrap_or(line);
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}

fn trial_firmware() -> Vec<u8> {
    let mut firmware = vec![0xf4; FIRMWARE_SIZE];
    firmware[..PROGRAM.len()].copy_from_slice(&PROGRAM);
    firmware[RESET_VECTOR..][..RESET_CODE.len()].copy_from_slice(&RESET_CODE);
    firmware
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_accelerator_follows_from_the_configuration_and_the_trial() {
        let broken = || Some("KVM is broken".to_owned());
        for (configured, problem, expected) in [
            (Accelerator::Auto, None, Ok(("kvm", "KVM works here"))),
            (Accelerator::Auto, broken(), Ok(("tcg", "KVM is broken"))),
            (Accelerator::Kvm, None, Ok(("kvm", "as configured"))),
            (Accelerator::Kvm, broken(), Err("KVM is broken".to_owned())),
            (Accelerator::Tcg, None, Ok(("tcg", "as configured"))),
        ] {
            let expected = expected.map(|(accelerator, reason)| Choice { accelerator, reason: reason.into() });
            assert_eq!(decide(configured, problem), expected, "{configured:?}");
        }
    }

    /// Emulation works everywhere, so this shows that the firmware is correct.
    #[tokio::test]
    async fn the_trial_firmware_reaches_its_end() {
        const LIMIT: Duration = Duration::from_secs(60);
        let dir = tempfile::tempdir().unwrap();
        let firmware = dir.path().join("trial.bin");
        fs::write(&firmware, trial_firmware()).unwrap();
        assert_eq!(run_trial("tcg", "max", "qemu-system-x86_64", &firmware, LIMIT).await.unwrap(), Outcome::Works);
        let outcome = run_trial("tcg", "no-such-cpu", "qemu-system-x86_64", &firmware, LIMIT).await.unwrap();
        assert!(matches!(&outcome, Outcome::Fails(problem) if problem.contains("no-such-cpu")), "{outcome:?}");
    }

    /// As on a node where a hundred VMs start at once. The guest would be emulated for the life of its Pod.
    #[tokio::test]
    async fn a_trial_that_did_not_end_in_time_is_made_again_and_one_that_failed_is_not() {
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(dir.path()).unwrap();
        let qemu = dir.path().join("qemu");
        let script = |text: &str| {
            let new = dir.path().join("new");
            fs::write(&new, format!("#!/bin/sh\n{text}\n")).unwrap();
            fs::set_permissions(&new, PermissionsExt::from_mode(0o755)).unwrap();
            fs::rename(new, &qemu).unwrap();
        };
        let attempt = async |limit| {
            let qemu = qemu.display().to_string();
            try_kvm("host", &qemu, &runtime, Purpose::Start, limit).await.unwrap()
        };
        script("exec sleep 600");
        let problem = attempt(Duration::from_millis(1)).await.unwrap();
        assert!(problem.contains("did not end in time"), "{problem}");
        let works = format!("exit {TRIAL_SUCCESS}");
        for (text, expected) in [("echo no VMX >&2; exit 1", "(no VMX)"), (works.as_str(), "(no VMX)")] {
            script(text);
            let problem = attempt(Duration::from_secs(60)).await.unwrap();
            assert!(problem.contains(expected), "{problem}");
        }
        fs::remove_file(runtime.kvm_trial()).unwrap();
        assert_eq!(attempt(Duration::from_secs(60)).await, None);
        script("exit 1");
        assert_eq!(attempt(Duration::from_secs(60)).await, None, "what works is kept too");
    }

    /// No QEMU is started: there is none of that name.
    #[tokio::test]
    async fn the_result_of_the_nodes_trial_counts_without_one_of_its_own() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(dir.path()).unwrap();
        let known = TrialResult::failed("no VMX");
        let choice =
            choose(Accelerator::Auto, "host", "no-such-qemu", &runtime, Some(&known), Purpose::Start).await.unwrap();
        assert_eq!(choice, Choice { accelerator: "tcg", reason: "no VMX".into() });
        let error =
            choose(Accelerator::Kvm, "host", "no-such-qemu", &runtime, Some(&known), Purpose::Start).await.unwrap_err();
        assert!(error.to_string().contains("but no VMX; use auto or tcg"), "{error}");
        let works = TrialResult::default();
        let choice =
            choose(Accelerator::Auto, "host", "no-such-qemu", &runtime, Some(&works), Purpose::Start).await.unwrap();
        let expected = if device_problem().is_none() { "kvm" } else { "tcg" };
        assert_eq!(choice.accelerator, expected);
    }

    #[test]
    fn a_missing_device_says_who_gives_it() {
        let problem = problem_of_device(&io::ErrorKind::NotFound.into());
        assert!(problem.contains("deploy/node-devices") && problem.contains("nodeDevices"), "{problem}");
        assert_eq!(
            problem_of_device(&io::ErrorKind::PermissionDenied.into()),
            "/dev/kvm cannot be opened (permission denied)"
        );
    }

    #[test]
    fn the_result_of_a_trial_is_used_again_for_the_same_cpu_model() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(dir.path()).unwrap();
        assert_eq!(Trial::read(&runtime, "host"), None);
        let trial = Trial { cpu_model: "host".into(), problem: Some("as last time".into()) };
        trial.write(&runtime).unwrap();
        assert_eq!(Trial::read(&runtime, "host"), Some(trial));
        assert_eq!(Trial::read(&runtime, "max"), None);
    }

    #[test]
    fn the_message_of_qemu_is_its_first_error() {
        let stderr = "qemu: warning: slow\nqemu: error: no such CPU\nmore\n";
        assert_eq!(first_message("qemu", stderr), "no such CPU");
        assert_eq!(first_message("qemu", "qemu: killed"), "killed");
        assert_eq!(first_message("qemu", ""), "");
    }
}
