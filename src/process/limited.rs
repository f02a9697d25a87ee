//! This program once more, as a process with limited memory, for what may take any amount of it.

use std::{cell::Cell, io, process::Stdio};

use rustix::process::{Resource, Rlimit, setrlimit};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// The memory that such a process may take, in bytes.
pub const MEMORY: u64 = 256 << 20;

thread_local! {
    static IS_UNLIMITED: Cell<bool> = const { Cell::new(false) };
}

/// From now on what this thread would do in such a process it does itself, without limits. For simulations, which have one thread.
pub fn do_without() {
    IS_UNLIMITED.set(true);
}

/// Whether this thread uses no such process.
pub fn is_unlimited() -> bool {
    IS_UNLIMITED.get()
}

/// Starts this program with a subcommand. It ends when the child is dropped.
///
/// # Errors
/// If the process can't be started.
pub fn start(subcommand: &str) -> io::Result<(Child, ChildStdin, ChildStdout)> {
    // This very program, even if its file was replaced meanwhile.
    let mut child = Command::new("/proc/self/exe")
        .arg(subcommand)
        .env_clear()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true)
        .spawn()?;
    let input = child.stdin.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    Ok((child, input, output))
}

/// Limits the memory of this process, and its CPU time in seconds.
///
/// # Errors
/// If the system refuses a limit.
pub fn limit(cpu: Option<u64>) -> io::Result<()> {
    let set = |resource, limit| setrlimit(resource, Rlimit { current: Some(limit), maximum: Some(limit) });
    set(Resource::Data, MEMORY)?;
    if let Some(cpu) = cpu {
        set(Resource::Cpu, cpu)?;
    }
    // A core dump could contain secrets.
    set(Resource::Core, 0)?;
    Ok(())
}
