//! The folder with the files of a VM.
//!
//! | name | what it is |
//! |---|---|
//! | `disks/` | the disks |
//! | `data/` | the VM's own data: firmware variables, TPM state, UUID, machine type |
//! | `config/` | the runner's configuration; written at each start |
//! | `run/` | sockets, the log of the console; emptied at each start |
//! | `vm-runner.log` | the runner's log; `vm-runner.log.1` is that of the start before |
//! | `lock` | locked while the VM runs |

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    fs::{self, DirBuilder, File, TryLockError},
    io,
    os::unix::fs::DirBuilderExt,
    path::{Path, PathBuf},
};

use super::plan::disks_dir;
use crate::{
    runner::files::{FileAccessError, create_directory},
    runner_config::digest,
};

/// The longest path of the runtime directory in bytes, so that the names of its sockets are not too long.
const LONGEST_RUNTIME_DIR: usize = 80;

/// Why the folder can't be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// Another runner uses the folder.
    #[error("the VM in {} runs already: end it first, or give this one another folder with --dir", .0.display())]
    Locked(PathBuf),
    /// There is no place for the folder.
    #[error("there is no place for the VM's files: set HOME or XDG_DATA_HOME, or give a folder with --dir")]
    NoHome,
    /// The paths of sockets would be too long.
    #[error("the path {} is too long for sockets, and XDG_RUNTIME_DIR is not set: give a folder with a shorter path with --dir", .0.display())]
    TooLong(PathBuf),
}

/// The folder, locked as long as this exists.
#[derive(Debug)]
pub struct Folder {
    dir: PathBuf,
    /// The system unlocks it with the end of the process at the latest.
    _lock: File,
}

/// A folder in the user's folder for data.
///
/// # Errors
/// If the environment does not say where that is.
pub fn data_home(name: &str) -> Result<PathBuf, Error> {
    let home = absolute_path_in("XDG_DATA_HOME").or_else(|| Some(absolute_path_in("HOME")?.join(".local/share")));
    Ok(home.ok_or(Error::NoHome)?.join(name))
}

/// The path in a variable of the environment. A relative one does not count
/// (<https://specifications.freedesktop.org/basedir-spec/latest/>).
fn absolute_path_in(variable: &str) -> Option<PathBuf> {
    env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute())
}

impl Folder {
    /// Makes the folder if it does not exist, and locks it. With `fresh` its content is removed.
    ///
    /// # Errors
    /// If another runner uses it, or it can't be made.
    pub fn open(dir: &Path, fresh: bool) -> Result<Self, Error> {
        let dir = std::path::absolute(dir).map_err(FileAccessError::with("find", dir))?;
        // Nobody else may read the disks or connect to the sockets.
        DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(FileAccessError::with("create", &dir))?;
        let path = dir.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(FileAccessError::with("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Locked(dir)),
            Err(TryLockError::Error(error)) => return Err(FileAccessError::with("lock", &path)(error).into()),
        }
        let folder = Self { dir, _lock: lock };
        if fresh {
            folder.empty("disks")?;
            folder.empty("data")?;
        }
        Ok(folder)
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.dir
    }

    /// The names of the disks' files.
    ///
    /// # Errors
    /// If they can't be read.
    pub fn disks(&self) -> Result<BTreeSet<String>, Error> {
        let dir = disks_dir(&self.dir);
        create_directory(&dir)?;
        let entries = fs::read_dir(&dir).map_err(FileAccessError::with("read", &dir))?;
        Ok(entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect())
    }

    /// The path of the runtime directory: in the folder, or in the user's runtime directory if the path would be too long for sockets.
    ///
    /// # Errors
    /// If there is none.
    pub fn runtime_dir(&self) -> Result<PathBuf, Error> {
        let own = self.dir.join("run");
        if own.as_os_str().len() <= LONGEST_RUNTIME_DIR {
            return Ok(own);
        }
        let name = digest(self.dir.as_os_str().as_encoded_bytes(), 8);
        Ok(absolute_path_in("XDG_RUNTIME_DIR").ok_or(Error::TooLong(own))?.join(format!("vm-runner-{name}")))
    }

    /// Empties the runtime directory, and writes the files of the configuration. Returns its directory.
    ///
    /// # Errors
    /// If a file can't be removed or written.
    pub fn prepare(&self, runtime_dir: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<PathBuf, Error> {
        remove(runtime_dir)?;
        self.empty("config")?;
        let config = self.dir.join("config");
        for (name, content) in files {
            let path = config.join(name);
            create_directory(path.parent().unwrap_or(&config))?;
            fs::write(&path, content).map_err(FileAccessError::with("write", &path))?;
        }
        Ok(config)
    }

    /// A new file for the log. The former one is kept.
    ///
    /// # Errors
    /// If it can't be made.
    pub fn log(&self) -> Result<File, Error> {
        let path = self.dir.join("vm-runner.log");
        if path.exists() {
            let former = path.with_added_extension("1");
            fs::rename(&path, &former).map_err(FileAccessError::with("rename", &path))?;
        }
        Ok(File::create(&path).map_err(FileAccessError::with("create", &path))?)
    }

    fn empty(&self, name: &str) -> Result<(), FileAccessError> {
        let dir = self.dir.join(name);
        remove(&dir)?;
        create_directory(&dir)
    }
}

fn remove(dir: &Path) -> Result<(), FileAccessError> {
    match fs::remove_dir_all(dir) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(FileAccessError::with("remove", dir)(error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_used_by_one_runner_at_a_time() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("apple");
        let folder = Folder::open(&dir, false).unwrap();
        let error = Folder::open(&dir, false).unwrap_err().to_string();
        assert!(error.contains("runs already"), "{error}");
        drop(folder);
        Folder::open(&dir, false).unwrap();
    }

    #[test]
    fn fresh_removes_what_the_guest_has_written() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder::open(dir.path(), false).unwrap();
        folder.disks().unwrap();
        for name in ["disks/system-disk.img", "notes.txt"] {
            fs::write(dir.path().join(name), "x").unwrap();
        }
        drop(folder);
        assert_eq!(Folder::open(dir.path(), false).unwrap().disks().unwrap().len(), 1);
        assert_eq!(Folder::open(dir.path(), true).unwrap().disks().unwrap().len(), 0);
        assert!(dir.path().join("notes.txt").exists(), "what the runner did not make stays");
    }
}
