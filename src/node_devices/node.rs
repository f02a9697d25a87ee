//! The files of the node: which devices there are, the result of the trial of KVM, and the seccomp profile for passt.

use std::{
    fs::{self, File},
    io::{self, Read},
    os::unix::fs::FileTypeExt,
    path::Path,
};

use tracing::warn;

use super::resources::Inventory;
use crate::{
    kvm::{self, TrialResult},
    process::RepeatFilter,
};

/// The profile's path below the kubelet's folder of seccomp profiles, which is how a Pod names it (`localhostProfile`).
pub const PROFILE: &str = "vm-operator/passt.json";

/// The system calls that containerd's default profile allows to a container without capabilities
/// (<https://github.com/containerd/containerd/blob/v2.1.4/contrib/seccomp/seccomp_default.go>), and those with which passt isolates itself
/// in namespaces of its own: mount, pivot_root, umount2, unshare. clone stays forbidden to make namespaces.
const PROFILE_TEXT: &str = include_str!("passt-seccomp.json");

/// Looks at the devices in `dev` and at the result of the trial in `reports`.
pub fn inventory(dev: &Path, reports: &Path, problems: &mut RepeatFilter) -> Inventory {
    let is_there = |name: &str| fs::metadata(dev.join(name)).is_ok_and(|found| found.file_type().is_char_device());
    Inventory {
        kvm: is_there("kvm"),
        tun: is_there("net/tun"),
        vhost_net: is_there("vhost-net"),
        trial: trial(&reports.join(kvm::FILE), problems),
    }
}

/// The result of the trial. A file that can't be used is as none.
fn trial(file: &Path, problems: &mut RepeatFilter) -> Option<TrialResult> {
    match read(file).and_then(|text| TrialResult::parse(&text).map_err(io::Error::other)) {
        Ok(result) => {
            problems.clear();
            Some(result)
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            if problems.is_new(&error.to_string()) {
                warn!(file = %file.display(), %error, "the result of the trial of KVM can't be read");
            }
            None
        }
    }
}

fn read(file: &Path) -> io::Result<String> {
    let mut text = String::new();
    let limit = u64::try_from(kvm::LONGEST + 1).unwrap_or(u64::MAX);
    File::open(file)?.take(limit).read_to_string(&mut text)?;
    Ok(text)
}

/// Writes the seccomp profile below the kubelet's folder of profiles, unless it is there. Containers that start meanwhile read either the
/// former profile or the new one. Returns whether it was written.
///
/// # Errors
/// If the profile can't be written.
pub fn install_profile(folder: &Path) -> io::Result<bool> {
    let file = folder.join(PROFILE);
    if fs::read_to_string(&file).is_ok_and(|text| text == PROFILE_TEXT) {
        return Ok(false);
    }
    if let Some(parent) = file.parent() {
        fs::create_dir_all(parent)?;
    }
    let new = file.with_added_extension("new");
    fs::write(&new, PROFILE_TEXT)?;
    fs::rename(&new, &file)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::Value;

    use super::*;

    #[test]
    fn only_device_files_and_a_readable_result_count() {
        let (dev, reports) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut problems = RepeatFilter::default();
        let mut look = || inventory(dev.path(), reports.path(), &mut problems);
        assert_eq!(look(), Inventory::default());
        // A regular file is no device; a link to one is, as udev may make it.
        fs::write(dev.path().join("kvm"), "").unwrap();
        std::os::unix::fs::symlink("/dev/null", dev.path().join("vhost-net")).unwrap();
        assert_eq!(look(), Inventory { vhost_net: true, ..Inventory::default() });
        for (text, trial) in [
            ("{", None),
            (r#"{"problem":null}"#, Some(TrialResult::default())),
            (r#"{"problem":"no VMX"}"#, Some(TrialResult::failed("no VMX"))),
        ] {
            fs::write(reports.path().join("kvm.json"), text).unwrap();
            assert_eq!(look().trial, trial, "{text}");
        }
    }

    #[test]
    fn a_profile_is_written_once_and_again_when_it_is_another() {
        let folder = tempfile::tempdir().unwrap();
        assert!(install_profile(folder.path()).unwrap());
        assert!(!install_profile(folder.path()).unwrap());
        let file = folder.path().join("vm-operator/passt.json");
        fs::write(&file, "{}").unwrap();
        assert!(install_profile(folder.path()).unwrap());
        assert_eq!(fs::read_to_string(file).unwrap(), PROFILE_TEXT);
    }

    /// What is allowed without a condition.
    #[test]
    fn the_profile_allows_passts_calls_and_no_others_of_an_administrator() {
        let profile: Value = serde_json::from_str(PROFILE_TEXT).unwrap();
        assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
        let rules = profile["syscalls"].as_array().unwrap();
        let free = rules.iter().filter(|rule| rule["action"] == "SCMP_ACT_ALLOW" && rule["args"].is_null());
        let names = free.flat_map(|rule| rule["names"].as_array().unwrap()).map(|name| name.as_str().unwrap());
        let allowed: BTreeSet<&str> = names.collect();
        for call in ["mount", "pivot_root", "umount2", "unshare", "read", "execve", "prctl", "seccomp"] {
            assert!(allowed.contains(call), "{call}");
        }
        for call in
            ["clone", "setns", "bpf", "init_module", "io_uring_setup", "keyctl", "mknod_at", "open_tree", "reboot"]
        {
            assert!(!allowed.contains(call), "{call}");
        }
    }
}
