//! The disks that are block devices, as the machine role sees them. A volume can grow while its guest runs: the kernel knows at once, and QEMU only
//! when it is told.

use std::{
    fs::File,
    io::{self, Seek, SeekFrom},
    os::unix::fs::{FileTypeExt, OpenOptionsExt},
    path::Path,
    time::Duration,
};

use rustix::fs::OFlags;
use tracing::warn;

use super::state::BlockDevice;
use crate::runner_config::{Drive, VmSection, paths};

/// How often their sizes are read. Nothing in a container says that one has changed.
pub const READ_AGAIN: Duration = Duration::from_secs(5);

/// An open device.
struct Device {
    slot: u32,
    file: File,
    at_start: u64,
}

/// The open devices.
#[derive(Default)]
pub struct BlockDevices(Vec<Device>);

impl BlockDevices {
    /// Those of a VM. A disk that is a file is none of them.
    pub fn open(vm: &VmSection) -> Self {
        let devices = vm.disks().filter_map(|(slot, disk)| {
            let Drive::Raw { resource, size: None, .. } = disk else { return None };
            let opened = open(Path::new(resource)).inspect_err(|error| {
                warn!(disk = resource, %error, "cannot open the device: should it grow, the guest sees that at its next start");
            });
            let file = opened.ok()??;
            let at_start = size(&file)?;
            Some(Device { slot, file, at_start })
        });
        Self(devices.collect())
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Their sizes.
    pub fn sizes(&self) -> Vec<BlockDevice> {
        let measure = |Device { slot, file, at_start }: &Device| {
            Some(BlockDevice { slot: *slot, at_start: *at_start, bytes: size(file)? })
        };
        self.0.iter().filter_map(measure).collect()
    }
}

/// Opens a device. `None`: it is none. In the file system of a claim there is none, whatever somebody else has put there.
fn open(path: &Path) -> io::Result<Option<File>> {
    if path.starts_with(paths::DISK_DIR) {
        return Ok(None);
    }
    // A pipe would wait for its other end.
    let file = File::options().read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed()).open(path)?;
    let is_device = file.metadata()?.file_type().is_block_device();
    Ok(Some(file).filter(|_| is_device))
}

fn size(mut file: &File) -> Option<u64> {
    file.seek(SeekFrom::End(0)).ok()
}
