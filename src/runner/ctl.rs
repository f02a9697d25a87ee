//! What a person asks of a running guest with `vm-runner ctl`, in the VM's container: to look at its screen and its figures, to press keys, to
//! pause it.
//!
//! ```text
//!  vm-runner ctl ─▶ control.sock ─▶ machine role ─▶ QEMU's monitor
//!       ▲                               │
//!       └── the picture's file ◀── Reply ┘
//! ```
//!
//! QEMU's monitor has one client, the machine role, so that one carries it out. That needs no token and no VirtualMachine.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::Subcommand;
use serde::{Deserialize, Serialize};

use super::{
    go_on::{GuestState, Who},
    monitor::Monitor,
    operation::Operation,
    qmp::{Command, Error as QmpError, Key, Status},
    stats,
};
use crate::api::stats::GuestStats;

/// What is asked: the command line of `vm-runner ctl`, and its form on the socket, where the two programs may be of different releases. What is
/// done with the guest is an [`Operation`]; the rest only looks at it or uses its keyboard.
#[derive(Clone, Debug, PartialEq, Eq, Subcommand, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Task {
    /// Print whether the guest runs: running, paused, or another state of QEMU
    Status,
    /// Stop the guest's CPUs. Its memory stays. The VM's condition Running says that it is paused
    Pause,
    /// Let a paused guest go on
    Resume,
    /// Reset the guest, as its reset button does
    Reset,
    /// Press keys at once, such as ctrl-alt-delete or a
    SendKey {
        /// The names of the keys with - between them, as QEMU has them: ctrl, alt, shift, meta_l, a, 1, f1, ret, esc, tab, spc, delete, ...
        #[arg(value_name = "KEYS")]
        keys: String,
    },
    /// Print the guest's use of CPUs, memory, disks and network as a line of JSON. Counters count from its start
    Stats {
        /// Go on, with a line every SECONDS, for ten minutes at most.
        #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
        #[serde(skip)]
        follow: Option<u64>,
    },
    /// Nobody looks at the figures any more.
    #[command(skip)]
    EndOfStats,
    /// Write a picture of the guest's screen as PNG
    Screenshot {
        /// The file; - for the standard output.
        #[arg(value_name = "FILE", default_value = "-")]
        #[serde(skip)]
        file: PathBuf,
    },
}

/// The machine role's answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Reply {
    /// It is done.
    Done,
    /// The state of the guest in QEMU's words.
    Status(String),
    /// The guest's figures.
    Stats(GuestStats),
    /// A file in the runtime directory with the picture. Who asked deletes it.
    Picture(PathBuf),
    /// It can't be done, for people.
    Refused(String),
}

/// Carries out a task. `picture` is the file for a picture, which does not exist yet.
pub async fn carry_out(task: &Task, picture: PathBuf, monitor: &mut Monitor) -> Reply {
    let done = match task {
        Task::Status => monitor.query(&Command::QueryStatus).await.map(|Status { status, .. }| Reply::Status(status)),
        Task::Pause => operate(&Operation::Pause, monitor).await,
        Task::Resume => operate(&Operation::GoOn(Who::Person), monitor).await,
        Task::Reset => operate(&Operation::Reset, monitor).await,
        Task::SendKey { keys } => match key_codes(keys) {
            Ok(keys) => monitor.execute(&Command::SendKey { keys }).await.map(|_| Reply::Done),
            Err(refusal) => return Reply::Refused(refusal),
        },
        Task::Stats { .. } => stats::sample(monitor).await.map(Reply::Stats),
        Task::EndOfStats => stats::stop(monitor).await.map(|()| Reply::Done),
        Task::Screenshot { .. } => screenshot(monitor, picture).await,
    };
    done.unwrap_or_else(|error| Reply::Refused(error.to_string()))
}

async fn operate(operation: &Operation, monitor: &mut Monitor) -> Result<Reply, QmpError> {
    let status: Status = monitor.query(&Command::QueryStatus).await?;
    let guest = GuestState::from(status);
    if guest == GuestState::ShutDown {
        return Ok(Reply::Refused("the guest has shut down".into()));
    }
    monitor.carry_out(operation, guest).await?;
    Ok(Reply::Done)
}

async fn screenshot(monitor: &mut Monitor, file: PathBuf) -> Result<Reply, QmpError> {
    let filename = file.to_string_lossy().into_owned();
    monitor.execute(&Command::Screendump { filename, format: "png" }).await?;
    Ok(Reply::Picture(file))
}

/// The keys of a text such as `ctrl-alt-delete`.
fn key_codes(text: &str) -> Result<Vec<Key>, String> {
    let key = |name: &str| {
        let is_known = KEYS.split_whitespace().any(|key| key == name);
        is_known.then(|| Key::QCode(name.to_owned())).ok_or_else(|| {
            format!(
                "QEMU has no key {name:?}; write for example ctrl-alt-delete, ctrl-alt-f2, shift-a, ret, spc or minus"
            )
        })
    };
    text.split('-').map(key).collect()
}

/// The names of QEMU's keys (<https://www.qemu.org/docs/master/interop/qemu-qmp-ref.html#enum-QMP-ui.QKeyCode>).
const KEYS: &str = "
    unmapped shift shift_r alt alt_r ctrl ctrl_r menu esc 1 2 3 4 5 6 7 8 9 0 minus equal backspace tab q w e r t y u i o p bracket_left
    bracket_right ret a s d f g h j k l semicolon apostrophe grave_accent backslash z x c v b n m comma dot slash asterisk spc caps_lock f1 f2
    f3 f4 f5 f6 f7 f8 f9 f10 num_lock scroll_lock kp_divide kp_multiply kp_subtract kp_add kp_enter kp_decimal sysrq kp_0 kp_1 kp_2 kp_3 kp_4
    kp_5 kp_6 kp_7 kp_8 kp_9 less f11 f12 print home pgup pgdn end left up down right insert delete stop again props undo front copy open paste
    find cut lf help meta_l meta_r compose pause ro hiragana henkan yen muhenkan katakanahiragana kp_comma kp_equals power sleep wake audionext
    audioprev audiostop audioplay audiomute volumeup volumedown mediaselect mail calculator computer ac_home ac_back ac_forward ac_refresh
    ac_bookmarks lang1 lang2 f13 f14 f15 f16 f17 f18 f19 f20 f21 f22 f23 f24";

/// Takes the picture of an answer to where it is wanted.
///
/// # Errors
/// If a file can't be read or written.
pub fn deliver(picture: &Path, file: &Path) -> io::Result<()> {
    let content = fs::read(picture);
    let _ = fs::remove_file(picture);
    let content = content?;
    if file == Path::new("-") { io::Write::write_all(&mut io::stdout(), &content) } else { fs::write(file, content) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_qemus_names() {
        let names = |text: &str| Ok(key_codes(text)?.into_iter().map(|Key::QCode(name)| name).collect::<Vec<_>>());
        assert_eq!(names("ctrl-alt-delete"), Ok(vec!["ctrl".into(), "alt".into(), "delete".into()]));
        assert_eq!(names("a"), Ok(vec!["a".into()]));
        for wrong in ["", "ctrl-", "ctrl+alt", "-", "no such key"] {
            let refused: Result<Vec<String>, String> = names(wrong);
            assert!(refused.unwrap_err().contains("QEMU has no key"), "{wrong}");
        }
    }
}
