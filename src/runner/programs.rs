//! The programs that the runner starts: how they are started, what they wrote last, and what a person can do about well-known
//! failures.
//!
//! A program must not outlive the runner, also if the runner is killed: nobody could end the guest then, and a second runner would find
//! its disks in use. Linux kills a child with its parent if the child asks for that before it becomes the program
//! (`PR_SET_PDEATHSIG`). So the runner starts itself with the command [`EXEC`], which does that and then becomes the program
//! ([`become_program`]).

use std::{
    collections::VecDeque,
    env,
    ffi::OsString,
    fs, io,
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};
use tokio::{
    io::{AsyncBufRead, AsyncBufReadExt, AsyncRead, BufReader},
    process::{Child, ChildStderr, Command},
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::debug;

use super::state::Helper;
use crate::runner_config::faults::fault;

/// The time that a program has until it listens on its socket. QEMU may need some seconds for much memory on huge pages.
pub const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The time between two attempts to find a socket that a program is about to create.
pub const RETRY_INTERVAL: Duration = Duration::from_millis(20);
/// The number of lines that are kept of a program's standard error.
const KEPT_LINES: usize = 20;
/// The most bytes of a line that are kept.
const LONGEST_LINE: usize = 4096;

/// Why a program does not work.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The program cannot be started.
    #[error("cannot start {program}{}", start_hint(source))]
    Start {
        /// The program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// A program that QEMU is connected to has ended before QEMU.
    #[error("{program} ended ({status}): {last}{}", hint(last))]
    Ended {
        /// The program.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// The last line that it wrote on its standard error.
        last: String,
    },
}

fn start_hint(source: &io::Error) -> &'static str {
    if source.kind() == io::ErrorKind::NotFound { " (install it in the runner's image)" } else { "" }
}

/// What to do about a well-known message of a program, on a line of its own. Empty for other messages.
pub fn hint(message: &str) -> &'static str {
    fault(message).map_or("", |fault| fault.hint)
}

/// The command of vm-runner that becomes another program: `vm-runner exec PID PROGRAM ARGUMENTS`.
pub const EXEC: &str = "exec";

/// The path of a program: the first file of that name in the directories of `PATH` that can be executed. A name with a slash is a path.
pub fn find(program: &str) -> Option<PathBuf> {
    let is_program = |path: &PathBuf| {
        fs::metadata(path).is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
    };
    if program.contains('/') {
        return Some(PathBuf::from(program)).filter(is_program);
    }
    env::split_paths(&env::var_os("PATH")?).map(|directory| directory.join(program)).find(is_program)
}

/// Becomes another program, which Linux kills when the process `parent` ends. Returns only an error.
pub fn become_program(parent: u32, program: &Path, arguments: &[OsString]) -> io::Error {
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return error.into();
    }
    // It may have ended before that.
    if getppid() != i32::try_from(parent).ok().and_then(Pid::from_raw) {
        return io::Error::other("the runner has ended");
    }
    std::process::Command::new(program).args(arguments).exec()
}

/// Starts a program in a process group of its own. It is killed when the child is dropped, and when the runner's process ends. Must be
/// called in the runner's main thread, because Linux takes the end of the thread for that of the process.
///
/// # Errors
/// If the program cannot be started.
pub fn start(program: &str, arguments: &[String]) -> Result<Child, Error> {
    debug!(program, ?arguments, "command line");
    let path = find(program).ok_or_else(|| Error::Start {
        program: program.to_owned(),
        source: io::Error::from(io::ErrorKind::NotFound),
    })?;
    Command::new("/proc/self/exe")
        .arg(EXEC)
        .arg(std::process::id().to_string())
        .arg(path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        // A terminal sends Ctrl-C only to the runner, which then asks the guest to power down.
        .process_group(0)
        .kill_on_drop(true)
        .spawn()
        .map_err(|source| Error::Start { program: program.to_owned(), source })
}

/// Passes each line of a program's standard error to `log`, and returns the last lines when the program has closed it.
pub async fn last_lines(stderr: Option<ChildStderr>, log: impl Fn(&str)) -> String {
    match stderr {
        Some(stderr) => keep_last_lines(stderr, log).await,
        None => String::new(),
    }
}

async fn keep_last_lines(stderr: impl AsyncRead + Unpin, log: impl Fn(&str)) -> String {
    let mut last = VecDeque::with_capacity(KEPT_LINES);
    let mut stderr = BufReader::with_capacity(1024, stderr);
    while let Ok(Some(line)) = next_line(&mut stderr).await {
        log(&line);
        if last.len() == KEPT_LINES {
            last.pop_front();
        }
        last.push_back(line);
    }
    Vec::from(last).join("\n")
}

/// The next line, or `None` at the end. A program may write any bytes, such as a name that the guest has chosen, and must never wait for a
/// reader: what is no UTF-8 is replaced, and what is longer than [`LONGEST_LINE`] is left out.
async fn next_line(stderr: &mut (impl AsyncBufRead + Unpin)) -> io::Result<Option<String>> {
    let (mut line, mut has_begun) = (Vec::new(), false);
    loop {
        let bytes = stderr.fill_buf().await?;
        if bytes.is_empty() {
            return Ok(has_begun.then(|| String::from_utf8_lossy(&line).into_owned()));
        }
        has_begun = true;
        let end = bytes.iter().position(|byte| *byte == b'\n');
        let part = &bytes[..end.unwrap_or(bytes.len())];
        line.extend_from_slice(&part[..part.len().min(LONGEST_LINE - line.len())]);
        let used = end.map_or(bytes.len(), |end| end + 1);
        stderr.consume(used);
        if end.is_some() {
            return Ok(Some(String::from_utf8_lossy(line.trim_ascii_end()).into_owned()));
        }
    }
}

/// The programs that QEMU is connected to: the TPM emulator and passt. They end when QEMU closes the connection, or when this is
/// dropped.
///
/// A program that ends while the guest runs is not started again, because QEMU would not connect to it again. The guest continues
/// without it: what runs there may not need it, and only the VM's owner can decide about a restart.
#[derive(Default)]
pub struct Helpers(JoinSet<(Helper, Error)>);

impl Helpers {
    /// Starts a program and waits until its socket exists, because QEMU does not wait for it.
    ///
    /// # Errors
    /// If the program cannot be started, does not create its socket in time, or a helper ends before that.
    pub async fn start(
        &mut self,
        helper: Helper,
        program: &str,
        arguments: &[String],
        socket: &Path,
    ) -> Result<(), Error> {
        // An earlier container of the Pod may have left its socket.
        let _ = fs::remove_file(socket);
        let child = start(program, arguments)?;
        let ended = wait_for_end(program.to_owned(), child);
        self.0.spawn(async move { (helper, ended.await) });
        let socket_exists = timeout(START_TIMEOUT, async {
            while !socket.exists() {
                sleep(RETRY_INTERVAL).await;
            }
        });
        tokio::select! {
            result = socket_exists => result.map_err(|_| Error::Start {
                program: program.to_owned(),
                source: io::Error::other("it has not created its socket"),
            }),
            Some((_, error)) = self.ended() => Err(error),
        }
    }

    /// Waits until a helper ends. `None`: no helper runs.
    pub async fn ended(&mut self) -> Option<(Helper, Error)> {
        self.0.join_next().await?.ok()
    }

    /// Returns a helper that has ended already, without waiting.
    pub fn try_ended(&mut self) -> Option<Error> {
        self.0.try_join_next()?.ok().map(|(_, error)| error)
    }
}

/// Waits until a program ends, and returns how.
pub async fn wait_for_end(program: String, mut child: Child) -> Error {
    let lines = last_lines(child.stderr.take(), |line| debug!(program, "{line}")).await;
    let last = lines.lines().last().unwrap_or("no output").to_owned();
    match child.wait().await {
        Ok(status) => Error::Ended { program, status, last },
        Err(source) => Error::Start { program, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_the_last_lines_of_a_program_are_kept() {
        let text: String = (1..=50).map(|number| format!("line {number}\n")).collect();
        let logged = std::cell::Cell::new(0);
        let last = keep_last_lines(text.as_bytes(), |_| logged.set(logged.get() + 1)).await;
        assert_eq!(logged.get(), 50);
        assert_eq!(last.lines().count(), KEPT_LINES);
        assert!(last.starts_with("line 31\n") && last.ends_with("line 50"), "{last}");
    }

    #[tokio::test]
    async fn a_program_may_write_any_bytes_and_lines_of_any_length() {
        let mut text = b"one\xff\xfe\r\n\n".to_vec();
        text.extend([b'x'; 3 * LONGEST_LINE]);
        text.extend(b"\nthe end\n\xc3");
        let logged = std::cell::RefCell::new(vec![]);
        let last = keep_last_lines(text.as_slice(), |line| logged.borrow_mut().push(line.to_owned())).await;
        let long = "x".repeat(LONGEST_LINE);
        assert_eq!(*logged.borrow(), ["one\u{fffd}\u{fffd}", "", &long, "the end", "\u{fffd}"]);
        assert_eq!(last, logged.borrow().join("\n"));
    }

    #[test]
    fn a_well_known_message_has_a_hint() {
        assert!(hint("qemu: unsupported machine type\nUse -machine help").contains("use a runner image"));
        assert_eq!(hint("something else"), "");
    }
}
