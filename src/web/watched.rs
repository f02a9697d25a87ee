//! Files that are read again when they change.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tracing::warn;

use crate::process::follow::{Changes, DirectoryWatch, Follower, is_exhausted};

/// Some files, from a moment before their first reading on.
pub struct Watched {
    files: Vec<PathBuf>,
    follower: io::Result<Follower>,
    known: Vec<Option<Vec<u8>>>,
}

impl Watched {
    /// Watches files, and loads them after that: a change of what was loaded before the watch would not be seen.
    pub fn load<T>(files: &[&Path], load: impl FnOnce() -> T) -> (T, Self) {
        let follower = follower(files);
        let files: Vec<PathBuf> = files.iter().map(|file| (*file).to_owned()).collect();
        let known = contents(&files);
        (load(), Self { files, follower, known })
    }

    /// Calls `read` whenever the content of one of the files has changed.
    pub async fn on_change(self, read: impl Fn()) {
        let Self { files, follower, mut known } = self;
        let mut follower = match follower {
            Ok(follower) => follower,
            Err(error) => {
                warn!(%error, ?files, "changes of these files take effect only after a restart");
                return;
            }
        };
        while follower.changed().await.is_ok() {
            let now = contents(&files);
            if now != known {
                known = now;
                read();
            }
        }
    }
}

fn contents(files: &[PathBuf]) -> Vec<Option<Vec<u8>>> {
    files.iter().map(|file| fs::read(file).ok()).collect()
}

fn follower(files: &[&Path]) -> io::Result<Follower> {
    let folder =
        |file: &&Path| file.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
    let folders: Vec<PathBuf> = files.iter().map(folder).collect();
    let watch = || {
        let watch = DirectoryWatch::new()?;
        folders.iter().try_for_each(|folder| watch.add(folder, Changes::Files))?;
        watch.follow()
    };
    match watch() {
        Err(error) if is_exhausted(&error) => {
            Ok(Follower::polling(&folders.iter().map(PathBuf::as_path).collect::<Vec<_>>()))
        }
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, time::Duration};

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_change_right_after_the_load_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys");
        fs::write(&file, "one").unwrap();
        let (loaded, watched) = Watched::load(&[&file], || {
            let loaded = fs::read_to_string(&file).unwrap();
            fs::write(folder.path().join("new"), "two").unwrap();
            fs::rename(folder.path().join("new"), &file).unwrap();
            loaded
        });
        assert_eq!(loaded, "one");
        let reads = Cell::new(0);
        let following = watched.on_change(|| reads.set(reads.get() + 1));
        let read = async {
            while reads.get() == 0 {
                tokio::task::yield_now().await;
            }
        };
        let outcome = timeout(Duration::from_secs(30), async {
            tokio::select! { () = following => {}, () = read => {} }
        });
        outcome.await.unwrap();
        assert_eq!(reads.get(), 1);
    }
}
