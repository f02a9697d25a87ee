//! Waits for changes of files, without polling.

use std::{io, path::Path};

use futures::StreamExt;
use inotify::{EventStream, Inotify, WatchMask};

use super::files::FileError;

/// Follows directories (inotify(7)).
pub struct Follower(EventStream<[u8; 1024]>);

impl Follower {
    /// Follows two directories: one that others write to, and one where files only appear complete, by a rename.
    ///
    /// In a projected volume the kubelet replaces the symbolic link `..data` with a rename; editors and `cp` close what they
    /// have written.
    ///
    /// # Errors
    /// If one does not exist, or the user's limit of inotify instances is reached.
    pub fn new(written: &Path, renamed: &Path) -> Result<Self, FileError> {
        fn error(path: &Path) -> impl FnOnce(io::Error) -> FileError {
            FileError::with("follow", path)
        }
        let inotify = Inotify::init().map_err(error(written))?;
        let by_rename = WatchMask::MOVED_TO | WatchMask::ONLYDIR;
        let any = by_rename | WatchMask::CLOSE_WRITE | WatchMask::DELETE;
        inotify.watches().add(renamed, by_rename).map_err(error(renamed))?;
        // Last, because the same directory may be both.
        inotify.watches().add(written, any).map_err(error(written))?;
        Ok(Self(inotify.into_event_stream([0; 1024]).map_err(error(written))?))
    }

    /// Returns when something has changed since the last call.
    ///
    /// # Errors
    /// If the kernel refuses to tell.
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
    async fn a_projected_volumes_swap_is_seen() {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = |name: &str| dir.path().join(name);
        for (version, text) in [("..1", "one"), ("..2", "two")] {
            fs::create_dir(path(version)).unwrap();
            fs::write(path(version).join("config.yaml"), text).unwrap();
        }
        symlink("..1", path("..data")).unwrap();
        symlink("..data/config.yaml", path("config.yaml")).unwrap();
        let mut follower = Follower::new(dir.path(), other.path()).unwrap();
        symlink("..2", path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
        follower.changed().await.unwrap();
        assert_eq!(fs::read_to_string(path("config.yaml")).unwrap(), "two");
    }
}
