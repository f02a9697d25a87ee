//! What executes the guest's instructions: KVM, or emulation (TCG).
//!
//! That `/dev/kvm` opens does not mean that KVM works: in some nested or sandboxed environments it runs real mode but no
//! kernel, or refuses the CPU model. So KVM is tried: QEMU runs a tiny firmware that goes the way of every kernel into long
//! mode and there leaves through QEMU's `isa-debug-exit` device
//! (<https://www.qemu.org/docs/master/specs/index.html>; the exit code is twice the written value plus one).

use std::{fs, io, path::Path, process::Stdio, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::process::Command;

use super::files::{FileError, RuntimeDir, write_atomically};
use crate::api::Accelerator;

/// Long enough for a busy node; where KVM works it takes less than 0.1 s.
const TRIAL: Duration = Duration::from_secs(5);
/// The value 0x2a, as `isa-debug-exit` turns it into an exit code.
const SUCCESS: i32 = 0x2a << 1 | 1;

/// The firmware is mapped to the last 64 KiB below 1 MiB (and below 4 GiB, where the CPU starts).
const FIRMWARE_SIZE: usize = 64 << 10;
/// Where a CPU starts, within the firmware.
const RESET_VECTOR: usize = 0xfff0;
/// `jmp 0xf000:0`
const RESET_CODE: [u8; 5] = [0xea, 0x00, 0x00, 0x00, 0xf0];
/// The program, with its GDT at 0x70 and the GDT's pseudo-descriptor at 0x88.
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
    0x31, 0xc0, 0x0f, 0xa2,                         // cpuid(0), which a hypervisor has to answer
    0xb0, 0x2a, 0xe6, 0xf4,                         // out 0xf4, 0x2a
    0xf4, 0xeb, 0xfd,                               // hlt, for ever
    0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, 0x00, // GDT: null,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x9a, 0xaf, 0x00, // 64 bit code,
    0xff, 0xff, 0x00, 0x00, 0x00, 0x92, 0xcf, 0x00, // data
    0x17, 0x00, 0x70, 0x00, 0x0f, 0x00,             // its size - 1 and address
];

/// Why there is no accelerator.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// KVM was asked for by name, and does not work.
    #[error("the accelerator kvm was asked for, but {0}; use auto or tcg, or a node with working KVM")]
    NoKvm(String),
    /// The firmware or the outcome cannot be written.
    #[error(transparent)]
    File(#[from] FileError),
    /// QEMU is not there.
    #[error("cannot start {qemu}")]
    Qemu {
        /// The program.
        qemu: String,
        /// Why.
        source: io::Error,
    },
}

/// What was chosen, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// `kvm` or `tcg`, as QEMU and the VM's status name them.
    pub accelerator: &'static str,
    /// Why, for people.
    pub reason: String,
}

/// The outcome of a trial, as it is kept: it depends on the node and on the CPU model, and both can change only with the
/// Pod, as the runtime directory does.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Trial {
    cpu_model: String,
    /// `None`: KVM works.
    problem: Option<String>,
}

/// Chooses the accelerator.
///
/// # Errors
/// If KVM is asked for by name and does not work, or the trial cannot be made.
pub async fn choose(wanted: Accelerator, cpu_model: &str, qemu: &str, runtime: &RuntimeDir) -> Result<Choice, Error> {
    let problem = match wanted {
        Accelerator::Tcg => None,
        Accelerator::Kvm | Accelerator::Auto => try_kvm(cpu_model, qemu, runtime).await?,
    };
    decide(wanted, problem).map_err(Error::NoKvm)
}

fn decide(wanted: Accelerator, problem: Option<String>) -> Result<Choice, String> {
    let choice = |accelerator, reason: &str| Choice { accelerator, reason: reason.into() };
    match (wanted, problem) {
        (Accelerator::Tcg, _) => Ok(choice("tcg", "asked for")),
        (Accelerator::Kvm, None) => Ok(choice("kvm", "asked for")),
        (Accelerator::Kvm, Some(problem)) => Err(problem),
        (Accelerator::Auto, None) => Ok(choice("kvm", "KVM works here")),
        (Accelerator::Auto, Some(problem)) => Ok(choice("tcg", &problem)),
    }
}

/// What is wrong with KVM; `None`: nothing.
async fn try_kvm(cpu_model: &str, qemu: &str, runtime: &RuntimeDir) -> Result<Option<String>, Error> {
    if let Err(error) = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        return Ok(Some(format!("/dev/kvm cannot be opened ({error})")));
    }
    let kept = fs::read(runtime.kvm_trial()).ok().and_then(|text| serde_json::from_slice::<Trial>(&text).ok());
    if let Some(kept) = kept
        && kept.cpu_model == cpu_model
    {
        return Ok(kept.problem);
    }
    let firmware = runtime.path().join("kvm-trial.bin");
    write_atomically(&firmware, &trial_firmware())?;
    let problem = run_trial("kvm", cpu_model, qemu, &firmware).await?;
    // Not needed any more; that it stays would be no harm.
    let _ = fs::remove_file(&firmware);
    let trial = Trial { cpu_model: cpu_model.into(), problem };
    write_atomically(&runtime.kvm_trial(), &serde_json::to_vec(&trial).unwrap_or_default())?;
    Ok(trial.problem)
}

async fn run_trial(accelerator: &str, cpu_model: &str, qemu: &str, firmware: &Path) -> Result<Option<String>, Error> {
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
    let output = match tokio::time::timeout(TRIAL, child.wait_with_output()).await {
        Err(_) => return Ok(Some("KVM opens, but a trial program did not come to its end in it".into())),
        Ok(Err(source)) => return Err(Error::Qemu { qemu: qemu.into(), source }),
        Ok(Ok(output)) => output,
    };
    if output.status.code() == Some(SUCCESS) {
        return Ok(None);
    }
    let words = String::from_utf8_lossy(&output.stderr);
    let words = words.lines().find(|line| !line.contains("warning:")).unwrap_or_default();
    let words = words.strip_prefix(qemu).and_then(|words| words.strip_prefix(": ")).unwrap_or(words);
    let words = words.strip_prefix("error: ").unwrap_or(words);
    Ok(Some(format!("KVM opens, but does not run a trial program ({words})")))
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
    fn who_gets_what() {
        let broken = || Some("KVM is broken".to_owned());
        for (wanted, problem, expected) in [
            (Accelerator::Auto, None, Ok(("kvm", "KVM works here"))),
            (Accelerator::Auto, broken(), Ok(("tcg", "KVM is broken"))),
            (Accelerator::Kvm, None, Ok(("kvm", "asked for"))),
            (Accelerator::Kvm, broken(), Err("KVM is broken".to_owned())),
            (Accelerator::Tcg, None, Ok(("tcg", "asked for"))),
        ] {
            let expected = expected.map(|(accelerator, reason)| Choice { accelerator, reason: reason.into() });
            assert_eq!(decide(wanted, problem), expected, "{wanted:?}");
        }
    }

    /// The program is right: emulation, which works everywhere, runs it to its end.
    #[tokio::test]
    async fn the_trial_program_ends_where_it_should() {
        let dir = tempfile::tempdir().unwrap();
        let firmware = dir.path().join("trial.bin");
        fs::write(&firmware, trial_firmware()).unwrap();
        assert_eq!(run_trial("tcg", "max", "qemu-system-x86_64", &firmware).await.unwrap(), None);
        let problem = run_trial("tcg", "no-such-cpu", "qemu-system-x86_64", &firmware).await.unwrap().unwrap();
        assert!(problem.contains("no-such-cpu"), "{problem}");
    }

    #[tokio::test]
    async fn a_trial_is_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(dir.path()).unwrap();
        let trial = Trial { cpu_model: "host".into(), problem: Some("as last time".into()) };
        fs::write(runtime.kvm_trial(), serde_json::to_vec(&trial).unwrap()).unwrap();
        if Path::new("/dev/kvm").exists() {
            let choice = choose(Accelerator::Auto, "host", "no-such-qemu", &runtime).await.unwrap();
            assert_eq!(choice.reason, "as last time");
        }
    }
}
