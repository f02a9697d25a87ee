//! What a file is that becomes a disk, by its first bytes.

/// How many of them tell it.
pub const HEAD: u64 = 512;

/// A file that can become a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFile {
    /// Its format, with qemu-img's name.
    pub format: &'static str,
    /// The size in bytes of the disk in it. `None`: that of the file.
    pub disk_size: Option<u64>,
}

/// Why a file can't become a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum NoDisk {
    #[error("its format is {0}, and only qcow2 and raw fill a disk: convert it with qemu-img convert -O qcow2")]
    Format(&'static str),
    #[error("it is compressed: unpack it first")]
    Compressed,
    #[error(
        "it reads another file (a backing file, or one with its data), which is not uploaded: make one image of both with qemu-img convert -O qcow2"
    )]
    OtherFile,
    #[error("it begins as an image of the format qcow2, and ends too early")]
    Short,
}

const QCOW2: &[u8] = b"QFI\xfb";
/// Other formats, by what stands at a place.
const FORMATS: [(usize, &[u8], &str); 9] = [
    (0, b"KDMV", "vmdk"),
    (0, b"COWD", "vmdk"),
    (0, b"# Disk DescriptorFile", "vmdk"),
    (0, b"vhdxfile", "vhdx"),
    (0, b"conectix", "vpc"),
    (0, b"QED\0", "qed"),
    (0, b"WithoutFreeSpace", "parallels"),
    (0, b"WithouFreSpacExt", "parallels"),
    (64, b"\x7f\x10\xda\xbe", "vdi"),
];
/// What begins compressed files: gzip, xz, zstd, bzip2, zip.
const COMPRESSED: [&[u8]; 5] = [b"\x1f\x8b\x08", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd", b"BZh", b"PK\x03\x04"];
/// The feature of qcow2 that the data is in another file (QEMU's docs/interop/qcow2.rst).
const DATA_FILE: u64 = 1 << 2;

impl DiskFile {
    /// What a file is that begins so. A raw image has no sign of its own.
    ///
    /// # Errors
    /// If it can't become a disk.
    pub fn of(head: &[u8]) -> Result<Self, NoDisk> {
        let other =
            FORMATS.iter().find(|(place, sign, _)| head.get(*place..).is_some_and(|rest| rest.starts_with(sign)));
        if let Some((.., name)) = other {
            return Err(NoDisk::Format(name));
        }
        if COMPRESSED.iter().any(|sign| head.starts_with(sign)) {
            return Err(NoDisk::Compressed);
        }
        if !head.starts_with(QCOW2) {
            return Ok(Self { format: "raw", disk_size: None });
        }
        let number = |place: usize, bytes: usize| {
            let bytes = head.get(place..place + bytes)?;
            Some(bytes.iter().fold(0_u64, |number, byte| (number << 8) | u64::from(*byte)))
        };
        let (Some(version), Some(backing_file), Some(size)) = (number(4, 4), number(8, 8), number(24, 8)) else {
            return Err(NoDisk::Short);
        };
        let features = if version < 3 { Some(0) } else { number(72, 8) };
        match features {
            _ if version < 2 => Err(NoDisk::Format("qcow")),
            None => Err(NoDisk::Short),
            Some(features) if backing_file > 0 || features & DATA_FILE != 0 => Err(NoDisk::OtherFile),
            Some(_) => Ok(Self { format: "qcow2", disk_size: Some(size) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of an image of the format qcow2 with a disk of 20 GiB.
    fn qcow2(version: u8, edit: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
        let mut head = vec![0; 104];
        head[..4].copy_from_slice(QCOW2);
        head[7] = version;
        head[24..32].copy_from_slice(&(20_u64 << 30).to_be_bytes());
        edit(&mut head);
        head
    }

    #[test]
    fn a_file_is_known_by_its_first_bytes() {
        let raw = || Ok(DiskFile { format: "raw", disk_size: None });
        let whole = || Ok(DiskFile { format: "qcow2", disk_size: Some(20 << 30) });
        let mut vdi = b"<<< Oracle VM VirtualBox Disk Image >>>\n".to_vec();
        vdi.resize(64, 0);
        vdi.extend(b"\x7f\x10\xda\xbe");
        for (head, expected) in [
            (vec![0; 512], raw()),
            (b"x".to_vec(), raw()),
            (qcow2(2, |_| ()), whole()),
            (qcow2(3, |_| ()), whole()),
            // Compressed clusters of another kind.
            (qcow2(3, |head| head[79] = 8), whole()),
            // In version 2 something else is there.
            (qcow2(2, |head| head[79] = 4), whole()),
            (qcow2(3, |head| head[79] = 4), Err(NoDisk::OtherFile)),
            (qcow2(3, |head| head[15] = 112), Err(NoDisk::OtherFile)),
            (qcow2(2, |head| head[8] = 1), Err(NoDisk::OtherFile)),
            (qcow2(1, |_| ()), Err(NoDisk::Format("qcow"))),
            (qcow2(3, |head| head.truncate(72)), Err(NoDisk::Short)),
            (QCOW2.to_vec(), Err(NoDisk::Short)),
            (b"KDMV\x01".to_vec(), Err(NoDisk::Format("vmdk"))),
            (vdi, Err(NoDisk::Format("vdi"))),
            (b"vhdxfile".to_vec(), Err(NoDisk::Format("vhdx"))),
            (b"\x1f\x8b\x08\0".to_vec(), Err(NoDisk::Compressed)),
            (b"\xfd7zXZ\0".to_vec(), Err(NoDisk::Compressed)),
        ] {
            assert_eq!(DiskFile::of(&head), expected, "{head:?}");
        }
    }
}
