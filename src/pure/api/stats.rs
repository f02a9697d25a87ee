//! Figures of a running guest, as `vm-runner ctl stats` prints them: a line of JSON for each sample. They are not in the VM's status, because
//! they change all the time.

use serde::{Deserialize, Serialize};

/// A sample. Counters begin with the guest's start.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct GuestStats {
    /// When, in milliseconds of a clock that only goes forward.
    pub at: u64,
    /// How many CPUs the guest has.
    pub cpus: u32,
    /// How long the guest's CPUs have run, all together, in milliseconds.
    pub cpu_time: u64,
    /// The guest's memory in bytes. `None`: QEMU has no balloon that says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<u64>,
    /// What of it is in use, without what the guest could free at once. `None`: the guest's kernel has no driver for the balloon, or has not
    /// reported yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram_used: Option<u64>,
    /// The memory that QEMU has on the node, in bytes: what the guest has ever touched, and QEMU's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident: Option<u64>,
    /// Bytes read from disks.
    pub disk_read: u64,
    /// Bytes written to disks.
    pub disk_written: u64,
    /// Bytes that the network interfaces have received where QEMU runs: those of the Pod, or of the node for a Pod with its network.
    pub network_received: u64,
    /// Bytes that they have sent.
    pub network_sent: u64,
}

/// What happens in a second, from two samples.
#[derive(Clone, Copy, Debug, Default, Serialize, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct Rates {
    /// How many CPUs the guest has kept busy: 1.5 is one and a half.
    pub cpus: f64,
    /// Bytes in a second.
    pub disk_read: f64,
    /// Bytes in a second.
    pub disk_written: f64,
    /// Bytes in a second.
    pub network_received: f64,
    /// Bytes in a second.
    pub network_sent: f64,
}

impl GuestStats {
    /// What has happened between an earlier sample and this one. `None`: they are not of one guest, or were taken at once.
    pub fn since(&self, before: &Self) -> Option<Rates> {
        let milliseconds = self.at.checked_sub(before.at).filter(|time| *time > 0)?;
        #[allow(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = |now: u64, before: u64| Some(now.checked_sub(before)? as f64 / milliseconds as f64);
        Some(Rates {
            cpus: rate(self.cpu_time, before.cpu_time)?,
            disk_read: 1000.0 * rate(self.disk_read, before.disk_read)?,
            disk_written: 1000.0 * rate(self.disk_written, before.disk_written)?,
            network_received: 1000.0 * rate(self.network_received, before.network_received)?,
            network_sent: 1000.0 * rate(self.network_sent, before.network_sent)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_samples_of_one_guest_are_rates() {
        let before = GuestStats { at: 1000, cpu_time: 500, disk_read: 1024, network_sent: 7, ..GuestStats::default() };
        let after = GuestStats { at: 3000, cpu_time: 3500, disk_read: 5120, network_sent: 7, ..GuestStats::default() };
        let expected = Rates { cpus: 1.5, disk_read: 2048.0, ..Rates::default() };
        assert_eq!(after.since(&before), Some(expected));
        assert_eq!(after.since(&after), None, "at once");
        assert_eq!(before.since(&after), None, "the clock of another node");
        let restarted = GuestStats { at: 5000, cpu_time: 10, disk_read: 9999, ..GuestStats::default() };
        assert_eq!(restarted.since(&after), None, "another guest");
    }
}
