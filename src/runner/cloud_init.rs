//! The cloud-init disk: NoCloud data in a FAT file system with the label CIDATA
//! (<https://cloudinit.readthedocs.io/en/latest/reference/datasources/nocloud.html>).

use std::io::{self, Read, Seek, Write};

use fatfs::{FileSystem, FormatVolumeOptions, FsOptions, format_volume};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::{runner_config::CloudInitSection, user_data};

/// The content of the files on the disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CloudInitFiles {
    /// `meta-data`.
    pub meta_data: Option<Vec<u8>>,
    /// `user-data`.
    pub user_data: Option<Vec<u8>>,
    /// `vendor-data`.
    pub vendor_data: Option<Vec<u8>>,
    /// `network-config`.
    pub network_config: Option<Vec<u8>>,
}

impl CloudInitFiles {
    /// Chooses the files: the projected ones, and for each missing file the section of the configuration. Returns `None` if there
    /// is no cloud-init data at all; the VM then has no cloud-init disk. Otherwise the first two files exist, because cloud-init
    /// needs them. `vm` is the VM's name, which is the default of `instance-id` and `local-hostname`.
    pub fn choose(projected: Self, section: Option<&CloudInitSection>, vm: &str) -> Option<Self> {
        if section.is_none() && projected == Self::default() {
            return None;
        }
        let section = section.cloned().unwrap_or_default();
        Some(Self {
            meta_data: projected.meta_data.or_else(|| {
                let mut data = section.meta_data;
                for key in ["instance-id", "local-hostname"] {
                    data.entry(key.to_owned()).or_insert_with(|| vm.into());
                }
                Some(yaml(&data).into_bytes())
            }),
            user_data: projected.user_data.or_else(|| Some(user_data(&section.user_data).into_bytes())),
            vendor_data: projected
                .vendor_data
                .or_else(|| (!section.vendor_data.is_null()).then(|| user_data(&section.vendor_data).into_bytes())),
            network_config: projected.network_config.or_else(|| section.network_config.map(|c| yaml(&c).into_bytes())),
        })
    }

    /// A short hash of the content: eight hexadecimal digits.
    pub fn digest(&self) -> String {
        let mut hash = Sha256::new();
        for (name, content) in self.entries() {
            hash.update(name);
            hash.update(content.len().to_le_bytes());
            hash.update(content);
        }
        hash.finalize().iter().take(4).map(|byte| format!("{byte:02x}")).collect()
    }

    fn entries(&self) -> impl Iterator<Item = (&'static str, &[u8])> {
        let Self { meta_data, user_data, vendor_data, network_config } = self;
        let files = [
            ("meta-data", meta_data),
            ("user-data", user_data),
            ("vendor-data", vendor_data),
            ("network-config", network_config),
        ];
        files.into_iter().filter_map(|(name, content)| Some((name, content.as_deref()?)))
    }

    /// The size of the disk in bytes: the content rounded up to clusters, and space for the allocation tables. The smallest size
    /// is that of mkfs tools for FAT12 with the usual geometry.
    pub fn disk_size(&self) -> u64 {
        let clusters: u64 = self.entries().map(|(_, content)| (content.len() as u64).next_multiple_of(4096)).sum();
        (clusters + clusters / 64 + (256 << 10)).next_multiple_of(64 << 10)
    }

    /// Writes the file system to `disk`, which must have [`CloudInitFiles::disk_size`] zero bytes.
    ///
    /// # Errors
    /// If `disk` cannot be written.
    pub fn write_disk<T: Read + Write + Seek>(&self, mut disk: T) -> io::Result<()> {
        format_volume(&mut disk, FormatVolumeOptions::new().volume_label(*b"CIDATA     "))?;
        disk.rewind()?;
        let disk = FileSystem::new(disk, FsOptions::new())?;
        for (name, content) in self.entries() {
            disk.root_dir().create_file(name)?.write_all(content)?;
        }
        disk.unmount()
    }
}

/// The text of user data, as the manager writes it.
fn user_data(value: &Value) -> String {
    match value {
        Value::Null => "#cloud-config\n{}\n".into(),
        value => user_data::text(value, |value| Ok(yaml(value))).unwrap_or_default(),
    }
}

fn yaml(value: &impl serde::Serialize) -> String {
    // Every JSON value can be written as YAML.
    serde_yaml::to_string(value).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use serde_json::json;

    use super::*;

    fn section() -> CloudInitSection {
        serde_json::from_value(json!({
            "metaData": { "local-hostname": "hugo" },
            "userData": { "message": "hi: \"there\"", "packages": ["vim"] },
            "vendorData": "packages: [emacs]\n",
        }))
        .unwrap()
    }

    fn read_back(files: &CloudInitFiles) -> Vec<(String, String)> {
        let mut disk = Cursor::new(vec![0; usize::try_from(files.disk_size()).unwrap()]);
        files.write_disk(&mut disk).unwrap();
        disk.rewind().unwrap();
        let disk = FileSystem::new(disk, FsOptions::new()).unwrap();
        assert_eq!(disk.volume_label(), "CIDATA");
        assert_eq!(disk.read_volume_label_from_root_dir().unwrap().as_deref(), Some("CIDATA"));
        disk.root_dir()
            .iter()
            .map(Result::unwrap)
            .filter(fatfs::DirEntry::is_file)
            .map(|entry| {
                let mut text = String::new();
                entry.to_file().read_to_string(&mut text).unwrap();
                (entry.file_name(), text)
            })
            .collect()
    }

    #[test]
    fn the_disk_contains_the_data_of_the_configuration() {
        let files = CloudInitFiles::choose(CloudInitFiles::default(), Some(&section()), "vm1").unwrap();
        assert_eq!(
            read_back(&files),
            [
                ("meta-data".into(), "instance-id: vm1\nlocal-hostname: hugo\n".into()),
                ("user-data".into(), "#cloud-config\nmessage: 'hi: \"there\"'\npackages:\n- vim\n".into()),
                ("vendor-data".into(), "#cloud-config\npackages: [emacs]\n".into()),
            ]
        );
    }

    #[test]
    fn projected_files_have_precedence_over_the_configuration() {
        let projected = CloudInitFiles { user_data: Some(b"#!/bin/sh\n".to_vec()), ..CloudInitFiles::default() };
        let files = CloudInitFiles::choose(projected, Some(&section()), "vm1").unwrap();
        assert_eq!(files.user_data.as_deref(), Some(&b"#!/bin/sh\n"[..]));
        assert_eq!(files.meta_data.as_deref(), Some(&b"instance-id: vm1\nlocal-hostname: hugo\n"[..]));
    }

    #[test]
    fn without_data_there_is_no_disk() {
        assert_eq!(CloudInitFiles::choose(CloudInitFiles::default(), None, "vm1"), None);
    }

    #[test]
    fn the_disk_is_large_enough_for_files_of_any_size() {
        for size in [0, 1, 4096, 1 << 20, 20 << 20] {
            let content = "x".repeat(size);
            let files = CloudInitFiles {
                meta_data: Some(b"{}".to_vec()),
                user_data: Some(content.clone().into_bytes()),
                vendor_data: None,
                network_config: Some(b"version: 2\n".to_vec()),
            };
            assert!(read_back(&files).contains(&("user-data".into(), content)), "{size}");
        }
    }
}
