//! Reads and writes single files, with errors that name the file.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;

use crate::runner_config;

/// A file or directory that the runner cannot read or write.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}", path.display())]
pub struct FileAccessError {
    /// A verb: `read`, `write`, `create`, ...
    pub action: &'static str,
    /// The file or directory.
    pub path: PathBuf,
    /// The system's error.
    pub source: io::Error,
}

impl FileAccessError {
    /// Returns a function for `map_err`.
    pub fn with(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self { action, path: path.to_owned(), source }
    }
}

/// What files are looked at for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A VM is about to start, so what is missing is created.
    Start,
    /// Somebody wants to know how the VM would start, perhaps while it runs. Nothing is changed.
    Look,
}

impl Purpose {
    /// Writes a file, if the purpose is a start; see [`write_atomically`].
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write(self, path: &Path, content: &[u8]) -> Result<(), FileAccessError> {
        match self {
            Self::Start => write_atomically(path, content),
            Self::Look => Ok(()),
        }
    }

    /// Creates a directory, if the purpose is a start; see [`create_directory`].
    ///
    /// # Errors
    /// If the directory cannot be created.
    pub fn create_directory(self, path: &Path) -> Result<(), FileAccessError> {
        match self {
            Self::Start => create_directory(path),
            Self::Look => Ok(()),
        }
    }
}

/// The content of a file; `None` if the file does not exist.
///
/// # Errors
/// If the file exists, but cannot be read.
pub fn read_optional(path: &Path) -> Result<Option<Vec<u8>>, FileAccessError> {
    match fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(FileAccessError::with("read", path)(error)),
    }
}

/// The text of a file without the newline at its end; `None` if the file does not exist or is empty.
///
/// # Errors
/// If the file exists, but cannot be read.
pub fn read_optional_text(path: &Path) -> Result<Option<String>, FileAccessError> {
    Ok(read_optional(path)?.and_then(|content| runner_config::text(&content)))
}

/// The content of a file in a directory into which others can write: no link is followed, a pipe or a device is not waited for, and a file
/// with more than `most` bytes is an error.
///
/// # Errors
/// If the file does not exist, cannot be read, is too long, or is no ordinary file.
pub fn read_untrusted(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no ordinary file"));
    }
    let mut content = Vec::new();
    file.take(most + 1).read_to_end(&mut content)?;
    if content.len() as u64 > most {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(content)
}

/// Writes a file so that readers see the old content or the new content, never a part of it, also after a crash of the node. A link with
/// the file's name is replaced, not followed.
///
/// # Errors
/// If the file cannot be written.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), FileAccessError> {
    let new = path.with_added_extension("new");
    write_new(&new, content).map_err(FileAccessError::with("write", &new))?;
    fs::rename(&new, path).map_err(FileAccessError::with("write", path))?;
    let directory = path.parent().unwrap_or(Path::new("."));
    File::open(directory).and_then(|directory| directory.sync_all()).map_err(FileAccessError::with("write", path))
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    // What a crash has left.
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

/// A random UUID.
///
/// # Errors
/// If the kernel gives none.
pub fn random_uuid() -> Result<String, FileAccessError> {
    let source = Path::new("/proc/sys/kernel/random/uuid");
    let uuid = fs::read_to_string(source).map_err(FileAccessError::with("read", source))?;
    Ok(uuid.trim().to_owned())
}

/// Creates a directory and its parents, if they do not exist.
///
/// # Errors
/// If the directory cannot be created.
pub fn create_directory(path: &Path) -> Result<(), FileAccessError> {
    fs::create_dir_all(path).map_err(FileAccessError::with("create", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_link_a_pipe_a_directory_and_a_long_file_are_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("file"), "12345").unwrap();
        assert_eq!(read_untrusted(&path("file"), 5).unwrap(), b"12345");
        assert_eq!(read_untrusted(&path("file"), 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        symlink(path("file"), path("link")).unwrap();
        assert!(read_untrusted(&path("link"), 5).is_err());
        // Without O_NONBLOCK this would wait for a writer.
        let status = std::process::Command::new("mkfifo").arg(path("pipe")).status().unwrap();
        assert!(status.success());
        assert_eq!(read_untrusted(&path("pipe"), 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(read_untrusted(directory.path(), 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_link_in_place_of_a_file_is_replaced_and_what_it_points_to_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        fs::write(path("precious"), "as it was").unwrap();
        for link in ["state.json", "state.json.new"] {
            symlink(path("precious"), path(link)).unwrap();
        }
        write_atomically(&path("state.json"), b"new").unwrap();
        assert_eq!(fs::read_to_string(path("precious")).unwrap(), "as it was");
        assert_eq!(read_untrusted(&path("state.json"), 10).unwrap(), b"new");
        assert!(!path("state.json.new").exists());
    }
}
