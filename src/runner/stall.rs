//! A QEMU that stands still for ever, because its threads wait for each other.
//!
//! QEMU 10.0 can do that with TCG: the guest's driver resets virtio-vga while QEMU draws the screen. The vCPU's thread waits for the main loop
//! (`virtio_gpu_reset`), and the main loop waits for the vCPU (`tcg_log_global_after_sync`). The guest is dead then, and nothing would ever say so:
//! the process lives, and its Pod is ready.
//!
//! ```text
//!  every PERIOD: query-status ─▶ an answer: all is well
//!                              └▶ none: no thread runs, now and at the next look, and the main loop has not run in between ─▶ QEMU is killed
//! ```
//!
//! A QEMU that waits for storage has a thread in the state D, and one on a busy node a thread that wants to run: both are left alone.

use std::{fs, time::Duration};

use qapi::qmp;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tracing::warn;

use super::{monitor::Monitor, qmp::Error as QmpError};

/// The pause between two looks.
const PERIOD: Duration = Duration::from_secs(30);

/// Looks after one QEMU process.
pub struct Stall {
    pid: u32,
    due: Interval,
    /// How often the main loop had run at the last look, if QEMU did not answer and none of its threads ran.
    still_at: Option<u64>,
}

impl Stall {
    /// For the process with this ID.
    pub fn new(pid: u32) -> Self {
        let mut due = interval_at(Instant::now() + PERIOD, PERIOD);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { pid, due, still_at: None }
    }

    /// Waits until the next look. Cancel safe.
    pub async fn due(&mut self) {
        self.due.tick().await;
    }

    /// Looks, and returns whether QEMU stands still for ever.
    pub async fn look(&mut self, monitor: &mut Monitor) -> bool {
        let is_silent = matches!(monitor.execute(qmp::query_status {}).await, Err(QmpError::Timeout { .. }));
        let runs = if is_silent { main_loop_runs(self.pid) } else { None };
        if is_silent {
            warn!(pid = self.pid, is_still = runs.is_some(), "QEMU does not answer");
        }
        self.judge(runs)
    }

    /// `runs`: how often the main loop has run until now; `None` if QEMU answers, or a thread of it runs or waits for the disk.
    fn judge(&mut self, runs: Option<u64>) -> bool {
        let before = std::mem::replace(&mut self.still_at, runs);
        runs.is_some() && runs == before
    }
}

/// How often the main thread of a process was given a CPU, if all threads of it sleep.
fn main_loop_runs(pid: u32) -> Option<u64> {
    let mut runs = None;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let thread = thread.ok()?;
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let switches = sleeping_thread(&status)?;
        if thread.file_name().to_str() == Some(pid.to_string().as_str()) {
            runs = Some(switches);
        }
    }
    runs
}

/// How often a thread was given a CPU, if it sleeps and can be woken (<https://man7.org/linux/man-pages/man5/proc_pid_status.5.html>).
fn sleeping_thread(status: &str) -> Option<u64> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    if !field("State")?.starts_with('S') {
        return None;
    }
    let number = |name: &str| field(name)?.parse::<u64>().ok();
    Some(number("voluntary_ctxt_switches")?.saturating_add(number("nonvoluntary_ctxt_switches")?))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[tokio::test]
    async fn only_a_main_loop_that_has_not_run_between_two_looks_stands_still() {
        for (looks, expected) in [
            (vec![Some(7), Some(7)], true),
            (vec![Some(7), Some(8)], false),
            (vec![Some(7), Some(8), Some(8)], true),
            // It has answered, or a thread of it has run.
            (vec![Some(7), None, Some(7)], false),
            (vec![None, None], false),
            (vec![Some(7)], false),
        ] {
            let mut stall = Stall::new(1);
            let last = looks.iter().map(|runs| stall.judge(*runs)).last();
            assert_eq!(last, Some(expected), "{looks:?}");
        }
    }

    #[test]
    fn a_thread_that_runs_or_waits_for_a_disk_does_not_sleep() {
        let status = |state: &str| {
            format!("Name:\tx\nState:\t{state}\nvoluntary_ctxt_switches:\t40\nnonvoluntary_ctxt_switches:\t2\n")
        };
        assert_eq!(sleeping_thread(&status("S (sleeping)")), Some(42));
        for state in ["R (running)", "D (disk sleep)", "T (stopped)", "Z (zombie)"] {
            assert_eq!(sleeping_thread(&status(state)), None, "{state}");
        }
        assert_eq!(sleeping_thread("State:\tS (sleeping)\n"), None);
    }

    #[test]
    fn a_process_that_waits_is_told_from_one_that_works() {
        let start = |script: &str| Command::new("sh").args(["-c", script]).stdin(Stdio::piped()).spawn().unwrap();
        let (mut waits, mut works) = (start("read line"), start("while :; do :; done"));
        let is_at_rest = |pid| {
            (0..10_000).find_map(|_| {
                std::thread::yield_now();
                main_loop_runs(pid)
            })
        };
        let first = is_at_rest(waits.id());
        assert!(first.is_some() && main_loop_runs(waits.id()) == first);
        assert_eq!(main_loop_runs(works.id()), None);
        for child in [&mut waits, &mut works] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
