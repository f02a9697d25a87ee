//! Figures of the running guest, for `vm-runner ctl stats`: QEMU says which threads are its CPUs, what its disks have done and how large its
//! balloon is; Linux says how long those threads have run, how much memory QEMU has, and what went over the network interfaces.
//!
//! How much memory the guest uses, only its own kernel knows, and it says so to QEMU's balloon only while QEMU asks for it, every
//! [`POLL`] seconds. A sample lets QEMU ask; who has taken the last one ends that ([`stop`]), so that nothing wakes a guest at which nobody looks.

use std::{collections::BTreeSet, fs};

use serde_json::{Value, json};

use super::{
    monitor::Monitor,
    qmp::{Balloon, BlockStats, Command, CpuThread, Error as QmpError},
};
use crate::api::stats::GuestStats;

/// How often QEMU asks the guest for its memory, in seconds.
const POLL: i64 = 1;
/// The balloon of the QEMU template.
const BALLOON: &str = "/machine/peripheral/balloon";

/// Takes a sample.
///
/// # Errors
/// If QEMU does not answer.
pub async fn sample(monitor: &mut Monitor) -> Result<GuestStats, QmpError> {
    let cpus: Vec<CpuThread> = monitor.query(&Command::QueryCpusFast).await?;
    let threads: BTreeSet<i64> = cpus.iter().map(|cpu| cpu.thread_id).collect();
    let disks: Vec<BlockStats> = monitor.query(&Command::QueryBlockstats).await?;
    // A custom QEMU template may have no balloon, or another one.
    let ram = monitor.query(&Command::QueryBalloon).await.ok().map(|Balloon { actual }| actual);
    let _ = poll(monitor, POLL).await;
    let of_guest = Command::QomGet { path: BALLOON, property: "guest-stats" };
    let of_guest = monitor.execute(&of_guest).await.unwrap_or_default();
    let first = threads.first().copied();
    let [network_received, network_sent] =
        fs::read_to_string("/proc/net/dev").map(|text| network(&text)).unwrap_or_default();
    Ok(GuestStats {
        at: now(),
        cpus: cpus.len().try_into().unwrap_or(u32::MAX),
        cpu_time: threads.into_iter().filter_map(cpu_time).sum(),
        ram,
        ram_used: ram.and_then(|ram| used(ram, &of_guest)),
        resident: first.and_then(|thread| resident(&fs::read_to_string(format!("/proc/{thread}/status")).ok()?)),
        disk_read: disks.iter().map(|disk| disk.stats.rd_bytes).sum(),
        disk_written: disks.iter().map(|disk| disk.stats.wr_bytes).sum(),
        network_received,
        network_sent,
    })
}

/// Lets QEMU ask the guest no more.
///
/// # Errors
/// If QEMU refuses that.
pub async fn stop(monitor: &mut Monitor) -> Result<(), QmpError> {
    poll(monitor, 0).await
}

async fn poll(monitor: &mut Monitor, seconds: i64) -> Result<(), QmpError> {
    let property = "guest-stats-polling-interval";
    monitor.execute(&Command::QomSet { path: BALLOON, property, value: json!(seconds) }).await.map(drop)
}

fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let part = |count: i64| u64::try_from(count).unwrap_or_default();
    part(now.tv_sec) * 1000 + part(now.tv_nsec) / 1_000_000
}

/// How long a thread, or a process with all its threads, has run, in milliseconds. `None`: it is not there.
pub fn cpu_time(thread: i64) -> Option<u64> {
    ticks(&fs::read_to_string(format!("/proc/{thread}/stat")).ok()?)
        .map(|ticks| ticks * 1000 / rustix::param::clock_ticks_per_second().max(1))
}

/// The time of a thread in user and in system mode (<https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html>: fields 14 and 15). Its
/// name, field 2, stands in parentheses and may have any letter.
fn ticks(stat: &str) -> Option<u64> {
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

/// The memory of a process in bytes.
fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? * 1024)
}

/// The bytes that all interfaces except lo have received and sent.
fn network(table: &str) -> [u64; 2] {
    let interfaces = table.lines().filter_map(|line| line.split_once(':')).filter(|(name, _)| name.trim() != "lo");
    interfaces.fold([0, 0], |[received, sent], (_, counts)| {
        let counts: Vec<u64> = counts.split_whitespace().filter_map(|count| count.parse().ok()).collect();
        let at = |index: usize| counts.get(index).copied().unwrap_or_default();
        [received + at(0), sent + at(8)]
    })
}

/// What the guest uses of its memory, as it has told the balloon. It has told nothing: the time is 0, or a value is the largest there is.
fn used(ram: u64, guest: &Value) -> Option<u64> {
    guest["last-update"].as_u64().filter(|time| *time > 0)?;
    let stat = |name: &str| guest["stats"][name].as_u64().filter(|bytes| *bytes < u64::MAX);
    // Older kernels say only what is free.
    let unused = stat("stat-available-memory").or_else(|| stat("stat-free-memory"))?;
    Some(stat("stat-total-memory").unwrap_or(ram).saturating_sub(unused))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_linux_says_is_read() {
        let stat = "4711 (CPU 0/TCG) (x) S 1 2 3 4 5 6 7 8 9 10 250 50 0 0 20 0 3 0 1234";
        assert_eq!(ticks(stat), Some(300));
        assert_eq!(ticks("4711 (CPU"), None);
        assert_eq!(resident("Name:\tqemu\nVmRSS:\t  2048 kB\nThreads: 4\n"), Some(2 << 20));
        let table = "Inter-|   Receive                    |  Transmit\n face |bytes packets\n    lo: 5 1 0 0 0 0 0 0 5 1 0 0 0 0 0 0\n  \
                     eth0: 100 2 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n  eth1:1 2 0 0 0 0 0 0 2 1 0 0 0 0 0 0\n";
        assert_eq!(network(table), [101, 32]);
        assert_eq!(network(""), [0, 0]);
    }

    #[test]
    fn a_guest_that_has_said_nothing_of_its_memory_uses_nobody_knows_what() {
        let said = |time: u64, available: u64| {
            json!({ "last-update": time, "stats": {
                "stat-total-memory": 1000, "stat-available-memory": available, "stat-free-memory": 300,
            } })
        };
        assert_eq!(used(1024, &said(7, 400)), Some(600));
        assert_eq!(used(1024, &said(7, u64::MAX)), Some(700), "an older kernel");
        assert_eq!(used(1024, &said(0, 400)), None);
        assert_eq!(used(1024, &Value::Null), None);
    }
}
