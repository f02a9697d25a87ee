//! Files that are read again when they change.
//!
//! ```text
//!  inotify of the folder ─▶ quiet for a moment ─▶ load ─▶ result differs from the last one? ─▶ report
//! ```

use std::{
    fs,
    future::Future,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::time::{sleep, timeout};
use tracing::warn;

use crate::{
    files::FileError,
    process::follow::{Changes, DirectoryWatch},
};

/// How long nothing must change before files are read, so that several that are written together are read once.
const QUIET: Duration = Duration::from_millis(100);
/// When files are read anyway, for a folder in which other programs write all the time.
const NO_QUIET: Duration = Duration::from_secs(2);
/// How often files are read where inotify does not work.
const POLL: Duration = Duration::from_secs(60);

/// What to follow.
#[derive(Clone, Copy, Debug)]
pub enum Followed<'a> {
    /// A file, whatever else is beside it.
    File(&'a Path),
    /// A folder with all its subfolders.
    Folder(&'a Path),
}

impl Followed<'_> {
    fn folder(&self) -> &Path {
        match self {
            Self::File(file) => file.parent().unwrap_or(Path::new("")),
            Self::Folder(folder) => folder,
        }
    }
}

/// Loads again whenever something in the folder has changed, and reports each result that differs from the last one.
///
/// A projected volume of a ConfigMap is replaced by renaming the symbolic link `..data` in its folder; an editor writes or
/// renames the file. A folder that is not there yet, or that is replaced, is found by its parent.
pub async fn follow<T: PartialEq>(
    followed: Followed<'_>,
    mut last: Result<T, FileError>,
    mut load: impl FnMut() -> Result<T, FileError>,
    mut report: impl FnMut(&Result<T, FileError>),
) -> std::convert::Infallible {
    let mut is_logged = false;
    loop {
        // In this order, so that the new watch sees a change that happens during the load.
        let changed = watch(followed);
        let result = load();
        let same = match (&last, &result) {
            (Ok(last), Ok(new)) => last == new,
            (Err(last), Err(new)) => last.to_string() == new.to_string(),
            _ => false,
        };
        if !same {
            report(&result);
            last = result;
        }
        match changed {
            Ok(changed) => changed.await,
            Err(error) => {
                if !std::mem::replace(&mut is_logged, true) {
                    let folder = followed.folder().display();
                    warn!(%folder, %error, "changes of files are only seen once a minute: inotify does not work here");
                }
                sleep(POLL).await;
            }
        }
    }
}

/// Watches a folder. The returned future waits for a change and for the quiet after it.
fn watch(followed: Followed<'_>) -> io::Result<impl Future<Output = ()> + use<>> {
    let watch = DirectoryWatch::new()?;
    let folder = followed.folder();
    let mut nearest = existing(folder);
    loop {
        match watch.add(&nearest, Changes::All) {
            Ok(()) => break,
            // It was removed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound && nearest.pop() => {}
            Err(error) => return Err(error),
        }
    }
    let below = if matches!(followed, Followed::Folder(_)) { below(folder) } else { Vec::new() };
    for below in below {
        match watch.add(&below, Changes::All) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let mut follower = watch.follow()?;
    Ok(async move {
        let _ = follower.changed().await;
        let quiet = async { while timeout(QUIET, follower.changed()).await.is_ok_and(|change| change.is_ok()) {} };
        let _ = timeout(NO_QUIET, quiet).await;
    })
}

/// The folders in a folder, also in its depth; those of a mounted ConfigMap are swapped as one and need no watch.
fn below(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut next = vec![folder.to_owned()];
    while let Some(folder) = next.pop() {
        let entries = fs::read_dir(&folder).into_iter().flatten().flatten();
        let folders =
            entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path());
        for folder in
            folders.filter(|path| !path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('.')))
        {
            found.push(folder.clone());
            next.push(folder);
        }
    }
    found
}

/// The folder, or the nearest one above it that there is.
fn existing(folder: &Path) -> PathBuf {
    let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
    folder.ancestors().find(|path| path.is_dir()).map_or_else(|| PathBuf::from("."), Path::to_owned)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tokio::sync::mpsc;

    use super::*;

    /// Follows a file that must not contain `bad`; sends each report.
    fn spawn(folder: &Path) -> mpsc::UnboundedReceiver<Result<String, String>> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let file = folder.join("file");
        tokio::spawn(async move {
            let load = || match fs::read_to_string(&file) {
                Ok(text) if text.contains("bad") => {
                    Err(FileError { file: file.clone(), at: Some((1, 1)), message: text })
                }
                Ok(text) => Ok(text),
                Err(_) => Ok("default".into()),
            };
            let report = |result: &Result<String, FileError>| {
                let result = result.as_deref().map(str::to_owned).map_err(|error| error.message.clone());
                sender.send(result).unwrap();
            };
            follow(Followed::File(&file), Ok("default".into()), load, report).await
        });
        receiver
    }

    #[tokio::test]
    async fn a_file_comes_changes_breaks_and_goes() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        let mut reports = spawn(folder.path());
        for (text, expected) in [("one", Ok("one")), ("bad", Err("bad")), ("two", Ok("two"))] {
            fs::write(&file, text).unwrap();
            assert_eq!(reports.recv().await.unwrap(), expected.map(str::to_owned).map_err(str::to_owned));
        }
        // The same again, and another file: nothing to report.
        fs::write(&file, "two").unwrap();
        fs::write(folder.path().join("other"), "three").unwrap();
        fs::remove_file(&file).unwrap();
        assert_eq!(reports.recv().await.unwrap(), Ok("default".to_owned()));
    }

    #[tokio::test]
    async fn a_file_is_read_though_others_beside_it_are_written_all_the_time() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let busy = tokio::spawn(async move {
            loop {
                fs::write(&log, "more").unwrap();
                sleep(QUIET / 5).await;
            }
        });
        let mut reports = spawn(folder.path());
        fs::write(folder.path().join("file"), "one").unwrap();
        let first = timeout(Duration::from_secs(60), reports.recv()).await.expect("to be reports at all");
        assert_eq!(first.unwrap(), Ok("one".to_owned()));
        fs::write(folder.path().join("file"), "two").unwrap();
        let second = timeout(Duration::from_secs(60), reports.recv()).await.expect("to be reports again");
        assert_eq!(second.unwrap(), Ok("two".to_owned()));
        busy.abort();
    }

    #[tokio::test]
    async fn a_projected_volume_is_swapped() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        for (version, text) in [("..1", "one"), ("..2", "two")] {
            fs::create_dir(path(version)).unwrap();
            fs::write(path(version).join("file"), text).unwrap();
        }
        symlink("..1", path("..data")).unwrap();
        symlink("..data/file", path("file")).unwrap();
        let mut reports = spawn(folder.path());
        assert_eq!(reports.recv().await.unwrap(), Ok("one".to_owned()));
        symlink("..2", path("..data_tmp")).unwrap();
        fs::rename(path("..data_tmp"), path("..data")).unwrap();
        assert_eq!(reports.recv().await.unwrap(), Ok("two".to_owned()));
    }

    #[tokio::test]
    async fn a_folder_comes_later_and_is_replaced() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("a/b");
        let mut reports = spawn(&folder);
        for text in ["one", "two"] {
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("file"), text).unwrap();
            assert_eq!(reports.recv().await.unwrap(), Ok(text.to_owned()));
            fs::remove_dir_all(parent.path().join("a")).unwrap();
            assert_eq!(reports.recv().await.unwrap(), Ok("default".to_owned()));
        }
    }
}
