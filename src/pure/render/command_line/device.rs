//! What QEMU calls the guest's devices. Pure.

use std::{fmt, str::FromStr};

use serde::{Serialize, Serializer};

/// A disk, CD drive or network card of the guest, with its slot, which it keeps as long as it is in the VM's spec ([`Identity`]). Its text is
/// the name that it has in QEMU: `disk0`, `cd1`, `net0`.
///
/// [`Identity`]: crate::api::status::Identity
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceId {
    /// A disk.
    Disk(u32),
    /// A CD drive.
    Cd(u32),
    /// A network card.
    Network(u32),
}

impl DeviceId {
    /// The device that QEMU means with a name or with a path of its object tree, such as `/machine/peripheral/disk0/virtio-backend`. `None`: a
    /// device of another kind, or one of a custom QEMU template.
    pub fn at(path: &str) -> Option<Self> {
        path.split('/').find_map(|part| part.parse().ok())
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disk(slot) => write!(f, "disk{slot}"),
            Self::Cd(slot) => write!(f, "cd{slot}"),
            Self::Network(slot) => write!(f, "net{slot}"),
        }
    }
}

impl FromStr for DeviceId {
    type Err = ();

    fn from_str(name: &str) -> Result<Self, ()> {
        let slot = name.trim_start_matches(|c: char| c.is_ascii_lowercase()).parse().map_err(drop)?;
        // What a kind is called stands in one place, and a number has one text only: `disk01` and `disk+1` are other devices.
        [Self::Disk(slot), Self::Cd(slot), Self::Network(slot)]
            .into_iter()
            .find(|device| device.to_string() == name)
            .ok_or(())
    }
}

impl Serialize for DeviceId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_known_by_its_name_wherever_qemu_says_it() {
        for device in [DeviceId::Disk(0), DeviceId::Cd(5), DeviceId::Network(31)] {
            assert_eq!(device.to_string().parse(), Ok(device));
            assert_eq!(DeviceId::at(&format!("/machine/peripheral/{device}/virtio-backend")), Some(device));
        }
        for other in [
            "disk",
            "disk-filler1",
            "disk01",
            "disk+1",
            "disk-1",
            "cd4294967296",
            "net0x",
            "",
            "/machine/unattached/device[3]",
        ] {
            assert_eq!(DeviceId::at(other), None, "{other}");
        }
    }
}
