//! Waits for changes of files, without polling (inotify(7)).
//!
//! In a projected volume (a mounted ConfigMap or Secret) the kubelet replaces the symbolic link `..data` with a rename; an editor
//! and `cp` close the file that they have written.

use std::{io, path::Path};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask};

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
        self.0.into_event_stream([0; 4096]).map(Follower)
    }
}

/// Reports changes of watched directories.
pub struct Follower(EventStream<[u8; 4096]>);

impl Follower {
    /// Returns when something has changed since the last call. Several changes may cause several returns.
    ///
    /// # Errors
    /// If the kernel reports no changes any more.
    pub async fn changed(&mut self) -> io::Result<()> {
        match self.0.next().await {
            Some(event) => event.map(|_| ()),
            None => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink};

    use super::*;

    #[tokio::test]
    async fn the_swap_of_a_projected_volume_is_reported() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        for (version, text) in [("..1", "one"), ("..2", "two")] {
            fs::create_dir(path(version)).unwrap();
            fs::write(path(version).join("config.yaml"), text).unwrap();
        }
        symlink("..1", path("..data")).unwrap();
        symlink("..data/config.yaml", path("config.yaml")).unwrap();
        let watch = DirectoryWatch::new().unwrap();
        watch.add(directory.path(), Changes::Files).unwrap();
        let mut follower = watch.follow().unwrap();
        symlink("..2", path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
        follower.changed().await.unwrap();
        assert_eq!(fs::read_to_string(path("config.yaml")).unwrap(), "two");
    }
}
