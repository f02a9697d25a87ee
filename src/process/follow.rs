//! Waits for changes of files, without polling (inotify(7)), unless the node has none of the kernel's watches left.
//!
//! In a projected volume (a mounted ConfigMap or Secret) the kubelet replaces the symbolic link `..data` with a rename; an editor
//! and `cp` close the file that they have written.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs, io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask};
use tokio::time::sleep;

/// How often directories are compared if the kernel does not report their changes.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Which changes in a directory are reported.
#[derive(Clone, Copy, Debug)]
pub enum Changes {
    /// A file appears complete, by a rename.
    Renames,
    /// A file is renamed, written, or deleted.
    Files,
    /// Everything, including new files and the directory's own move or deletion.
    All,
}

impl Changes {
    fn mask(self) -> WatchMask {
        let renames = WatchMask::MOVED_TO | WatchMask::ONLYDIR;
        let files = WatchMask::CLOSE_WRITE | WatchMask::DELETE;
        let all = WatchMask::CREATE | WatchMask::DELETE_SELF | WatchMask::MOVED_FROM | WatchMask::MOVE_SELF;
        match self {
            Self::Renames => renames,
            Self::Files => renames | files,
            Self::All => renames | files | all,
        }
    }
}

/// Directories whose changes are collected. Subdirectories must be added one by one.
pub struct DirectoryWatch(Inotify);

impl DirectoryWatch {
    /// Watches nothing yet.
    ///
    /// # Errors
    /// If the user's limit of inotify instances is reached.
    pub fn new() -> io::Result<Self> {
        Inotify::init().map(Self)
    }

    /// Watches a directory as well. If it is watched already, the later call decides which changes are reported.
    ///
    /// # Errors
    /// If it does not exist or is no directory, or the user's limit of inotify watches is reached.
    pub fn add(&self, directory: &Path, changes: Changes) -> io::Result<()> {
        self.0.watches().add(directory, changes.mask()).map(drop)
    }

    /// The changes from the first [`DirectoryWatch::add`] on.
    ///
    /// # Errors
    /// If the descriptor can't be registered with the runtime.
    pub fn follow(self) -> io::Result<Follower> {
        Ok(Follower(Source::Kernel(Box::new(self.0.into_event_stream([0; 4096])?))))
    }
}

/// Reports changes of watched directories.
pub struct Follower(Source);

enum Source {
    Kernel(Box<EventStream<[u8; 4096]>>),
    Poll(Poll),
}

/// Directories that are compared with what they were.
struct Poll {
    directories: Vec<PathBuf>,
    known: Vec<Listing>,
}

/// What identifies the content of a file: inode, size, and time of modification in seconds and nanoseconds.
type Listing = BTreeMap<OsString, (u64, u64, i64, i64)>;

impl Poll {
    fn look(&self) -> Vec<Listing> {
        let identity = |entry: fs::DirEntry| {
            let metadata = entry.metadata().ok()?;
            Some((entry.file_name(), (metadata.ino(), metadata.size(), metadata.mtime(), metadata.mtime_nsec())))
        };
        let listing = |directory: &PathBuf| {
            fs::read_dir(directory).into_iter().flatten().filter_map(|entry| identity(entry.ok()?)).collect()
        };
        self.directories.iter().map(listing).collect()
    }

    async fn changed(&mut self) {
        loop {
            sleep(POLL_INTERVAL).await;
            let now = self.look();
            if now != self.known {
                self.known = now;
                return;
            }
        }
    }
}

/// Whether the kernel has no watches or instances of inotify left for this user (inotify(7): `EMFILE`, `ENFILE`, `ENOSPC`, `ENOMEM`).
pub fn is_exhausted(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let codes = [Errno::MFILE, Errno::NFILE, Errno::NOSPC, Errno::NOMEM];
    error.raw_os_error().is_some_and(|code| codes.iter().any(|errno| errno.raw_os_error() == code))
}

impl Follower {
    /// Compares the directories with what they were each second. For when the kernel can't report their changes.
    pub fn polling(directories: &[&Path]) -> Self {
        let directories = directories.iter().map(|directory| (*directory).to_owned()).collect();
        let mut poll = Poll { directories, known: Vec::new() };
        poll.known = poll.look();
        Self(Source::Poll(poll))
    }

    /// Returns when something has changed since the last call. Several changes may cause several returns.
    ///
    /// # Errors
    /// If the kernel reports no changes any more.
    pub async fn changed(&mut self) -> io::Result<()> {
        match &mut self.0 {
            Source::Kernel(events) => match events.next().await {
                Some(event) => event.map(|_| ()),
                None => Err(io::ErrorKind::UnexpectedEof.into()),
            },
            Source::Poll(poll) => {
                poll.changed().await;
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[tokio::test]
    async fn the_swap_of_a_projected_volume_is_reported() {
        swap(|directory| {
            let watch = DirectoryWatch::new().unwrap();
            watch.add(directory, Changes::Files).unwrap();
            watch.follow().unwrap()
        })
        .await;
        swap(|directory| Follower::polling(&[directory])).await;
    }

    async fn swap(follow: impl Fn(&Path) -> Follower) {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for (version, text) in [("..1", "one"), ("..2", "two")] {
            fs::create_dir(path(version)).unwrap();
            fs::write(path(version).join("config.yaml"), text).unwrap();
        }
        symlink("..1", path("..data")).unwrap();
        symlink("..data/config.yaml", path("config.yaml")).unwrap();
        let mut follower = follow(directory.path());
        symlink("..2", path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
        follower.changed().await.unwrap();
        assert_eq!(fs::read_to_string(path("config.yaml")).unwrap(), "two");
    }
}
