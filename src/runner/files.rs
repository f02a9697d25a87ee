//! Reads and writes single files, with errors that name the file.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

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

/// Writes a file so that readers see the old content or the new content, never a part of it.
///
/// # Errors
/// If the file cannot be written.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<(), FileAccessError> {
    let new = path.with_added_extension("new");
    fs::write(&new, content).map_err(FileAccessError::with("write", &new))?;
    fs::rename(&new, path).map_err(FileAccessError::with("write", path))
}

/// Creates a directory and its parents, if they do not exist.
///
/// # Errors
/// If the directory cannot be created.
pub fn create_directory(path: &Path) -> Result<(), FileAccessError> {
    fs::create_dir_all(path).map_err(FileAccessError::with("create", path))
}
