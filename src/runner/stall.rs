//! A QEMU that stands still for ever, because its threads wait for each other.
//!
//! QEMU 10.0 can do that with TCG: the guest's driver resets virtio-vga while QEMU draws the screen. The vCPU's thread waits for the main loop
//! (`virtio_gpu_reset`), and the main loop waits for the vCPU (`tcg_log_global_after_sync`). The guest is dead then, and nothing would ever say so:
//! the process lives, and its Pod is ready.
//!
//! ```text
//!  every PERIOD: query-status ─▶ an answer: all is well
//!                              └▶ none: the main loop and all vCPUs wait for a lock, now and at each of LOOKS looks, and the main loop has
//!                                 not run in between ─▶ QEMU is killed
//! ```
//!
//! A QEMU that waits for storage is left alone: a thread of it is in the state D, or polls for the end of its requests. So is one on a busy node:
//! a thread of it wants to run. With KVM nobody looks, because nothing is known that would be found.

use std::{fs, time::Duration};

use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};
use tracing::warn;

use super::{
    monitor::Monitor,
    qmp::{Command, Error as QmpError},
};

/// The pause between two looks.
const PERIOD: Duration = Duration::from_secs(30);
/// After how many equal looks QEMU is killed.
const LOOKS: u32 = 4;
/// The system call in which a thread waits for a lock, on x86_64.
const FUTEX: &str = "202";

/// Looks after one QEMU process.
pub struct Stall {
    pid: u32,
    due: Interval,
    /// How often the main loop had run at the last look, if QEMU did not answer and stood still.
    still_at: Option<u64>,
    /// How many looks in a row have seen the same.
    equal: u32,
}

impl Stall {
    /// For the process with this ID.
    pub fn new(pid: u32) -> Self {
        let mut due = interval_at(Instant::now() + PERIOD, PERIOD);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { pid, due, still_at: None, equal: 0 }
    }

    /// Waits until the next look. Cancel safe.
    pub async fn due(&mut self) {
        self.due.tick().await;
    }

    /// Looks, and returns whether QEMU stands still for ever.
    pub async fn look(&mut self, monitor: &mut Monitor) -> bool {
        let is_silent = matches!(monitor.execute(&Command::QueryStatus).await, Err(QmpError::Timeout { .. }));
        let runs = if is_silent { main_loop_runs(self.pid) } else { None };
        if is_silent {
            warn!(pid = self.pid, is_still = runs.is_some(), "QEMU does not answer");
        }
        self.judge(runs)
    }

    /// `runs`: how often the main loop has run until now; `None` if QEMU answers, or a thread of it runs or waits for the disk.
    fn judge(&mut self, runs: Option<u64>) -> bool {
        let before = std::mem::replace(&mut self.still_at, runs);
        self.equal = match runs {
            None => 0,
            Some(_) if runs == before => self.equal.saturating_add(1),
            Some(_) => 1,
        };
        self.equal >= LOOKS
    }
}

/// How often the main thread of a process was given a CPU, if all threads of it sleep, and that one and all vCPUs wait for a lock.
fn main_loop_runs(pid: u32) -> Option<u64> {
    let mut runs = None;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let thread = thread.ok()?;
        let read = |file: &str| fs::read_to_string(thread.path().join(file)).ok();
        let switches = sleeping_thread(&read("status")?)?;
        let is_main = thread.file_name().to_str() == Some(pid.to_string().as_str());
        // QEMU calls them so with debug-threads=on.
        if (is_main || read("comm")?.starts_with("CPU ")) && read("syscall")?.split(' ').next() != Some(FUTEX) {
            return None;
        }
        if is_main {
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
    use std::{
        io::Read as _,
        process::{Child, Command, Stdio},
    };

    use super::*;

    #[tokio::test]
    async fn only_a_main_loop_that_has_not_run_between_two_looks_stands_still() {
        let still = |looks: usize| vec![Some(7); looks];
        for (looks, expected) in [
            (still(4), true),
            (still(3), false),
            ([still(3), vec![Some(8); 4]].concat(), true),
            ([still(3), vec![Some(8); 3]].concat(), false),
            // It has answered, or a thread of it has run.
            ([still(3), vec![None], still(3)].concat(), false),
            (vec![None; 5], false),
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

    /// A process that ends with the test, also if that fails.
    struct Killed(Child);

    impl Drop for Killed {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_process_that_waits_for_a_lock_is_told_from_others() {
        // The second one waits for a lock that the first one has: flock is no futex, so a thread of Python does it.
        let start = |script: &str| {
            let child =
                Command::new("python3").args(["-c", script]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
            child.map(Killed)
        };
        let waits = "import _thread; lock = _thread.allocate_lock(); lock.acquire(); print(flush=True); lock.acquire()";
        let Ok(mut locked) = start(waits) else { return };
        // Python itself waits for locks while it starts.
        locked.0.stdout.take().unwrap().read_exact(&mut [0]).unwrap();
        let polls = start("import select; select.poll().poll()").unwrap();
        let works = start("while True: pass").unwrap();
        let is_at_rest = |pid| {
            (0..100_000).find_map(|_| {
                std::thread::yield_now();
                main_loop_runs(pid)
            })
        };
        let first = is_at_rest(locked.0.id());
        assert!(first.is_some() && main_loop_runs(locked.0.id()) == first);
        assert_eq!((main_loop_runs(polls.0.id()), main_loop_runs(works.0.id())), (None, None));
    }
}
