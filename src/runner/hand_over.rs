//! A disk in a container image, such as a "container disk" of KubeVirt: its file is handed over to the container that fills a VM's disk.
//!
//! ```text
//!  runner's image ─(this program)─▶ volume ─▶ container of the disk's image: vm-runner hand-over ─(file)─▶ volume ─▶ qemu-img
//! ```
//!
//! Such an image has no program, so this one, which is static, is started in its container. Every version of Kubernetes and of a container
//! runtime can do that; volumes of images need Kubernetes 1.35 and containerd 2.1.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::Args;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    sync::watch,
};

/// How much is copied between two looks for SIGTERM, in bytes.
const PART: u64 = 64 << 20;

/// What is copied where.
#[derive(Args, Clone, Debug)]
pub struct HandOverArguments {
    /// Do nothing unless this file exists.
    #[arg(long = "if", value_name = "FILE")]
    wanted: Option<PathBuf>,
    /// Where the copy goes.
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Copy no larger file: it would fill the node's disk.
    #[arg(long, value_name = "BYTES")]
    most: Option<u64>,
    /// Leave a file that this user can't read to the next container, which runs as another user, and succeed.
    #[arg(long)]
    or_next: bool,
    /// The disk's file, or folders: the first one counts that has a file.
    #[arg(value_name = "PATH", default_values = ["/disk", "/"])]
    from: Vec<PathBuf>,
}

/// Why there is no copy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image is no container disk.
    #[error("the image has no file in {0}: a container disk has one in /disk")]
    None(String),
    /// It can't be known which file is the disk.
    #[error("the image has several files in {}: {names}; name one of them with templateValues.import.path", folder.display())]
    Several {
        /// The folder.
        folder: PathBuf,
        /// The files' names.
        names: String,
    },
    /// It is larger than it may be.
    #[error("{} is larger than {most} bytes: the largest disk of the VM, and templateValues.import.space, are its limits", from.display())]
    TooLarge {
        /// The disk's file.
        from: PathBuf,
        /// The most bytes.
        most: u64,
    },
    /// The Pod is to end.
    #[error("terminated before the disk was copied")]
    Terminated,
    /// A file can't be read or written.
    #[error("cannot copy {} to {}", from.display(), to.display())]
    Copy {
        /// The disk's file.
        from: PathBuf,
        /// The copy.
        to: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Copies the disk's file, and returns what was done, as a line.
///
/// # Errors
/// If the image has no such file, or it can't be copied.
pub async fn hand_over(arguments: &HandOverArguments, term: watch::Receiver<bool>) -> Result<String, Error> {
    let HandOverArguments { wanted, to, most, or_next, from } = arguments;
    if wanted.as_ref().is_some_and(|file| !file.exists()) {
        return Ok("nothing to do: the disk is filled".into());
    }
    let from = match find(from) {
        // In a folder that is closed to this user there may be one.
        Err(error @ Error::None(_)) if *or_next => return Ok(format!("left to the next container: {error}")),
        found => found?,
    };
    let size = fs::metadata(&from).map_or(0, |about| about.len());
    if let Some(most) = most.filter(|most| size > *most) {
        return Err(Error::TooLarge { from, most });
    }
    match copy(&from, to, &term).await {
        Ok(Some(bytes)) => {
            // The next container has nothing to do.
            if let Some(wanted) = wanted {
                fs::remove_file(wanted).map_err(|source| Error::Copy {
                    from: from.clone(),
                    to: wanted.clone(),
                    source,
                })?;
            }
            Ok(format!("{}: {bytes} bytes", from.display()))
        }
        Ok(None) => Err(Error::Terminated),
        Err(error) if *or_next && error.kind() == io::ErrorKind::PermissionDenied => {
            Ok(format!("left to the next container: {} is for another user", from.display()))
        }
        Err(source) => Err(Error::Copy { from, to: to.clone(), source }),
    }
}

/// Copies a file, and returns its size; `None`: SIGTERM has come before.
async fn copy(from: &Path, to: &Path, term: &watch::Receiver<bool>) -> io::Result<Option<u64>> {
    let mut disk = tokio::fs::File::open(from).await?;
    // That of another user can't be written.
    drop(tokio::fs::remove_file(to).await);
    let mut copy = tokio::fs::File::create(to).await?;
    let mut bytes = 0;
    while !*term.borrow() {
        let part = tokio::io::copy(&mut (&mut disk).take(PART), &mut copy).await?;
        bytes += part;
        if part == 0 {
            copy.flush().await?;
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// The disk's file: the first of the paths that is a file, or that is a folder with one. Hidden files are those of tools.
fn find(paths: &[PathBuf]) -> Result<PathBuf, Error> {
    for path in paths {
        if path.is_file() {
            return Ok(path.clone());
        }
        let mut files: Vec<String> = fs::read_dir(path)
            .into_iter()
            .flatten()
            .flatten()
            .filter(|entry| entry.path().is_file())
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .filter(|name| !name.starts_with('.'))
            .collect();
        files.sort();
        match files.as_slice() {
            [] => {}
            [file] => return Ok(path.join(file)),
            _ => return Err(Error::Several { folder: path.clone(), names: files.join(", ") }),
        }
    }
    let names: Vec<_> = paths.iter().map(|path| Path::display(path).to_string()).collect();
    Err(Error::None(names.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_one_file_of_an_image_is_handed_over() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::create_dir(path("disk")).unwrap();
        let (end, term) = watch::channel(false);
        let run = async |from: &[&str], wanted: Option<&str>| {
            let arguments = HandOverArguments {
                wanted: wanted.map(path),
                to: path("copy"),
                most: Some(100),
                or_next: false,
                from: from.iter().map(|name| path(name)).collect(),
            };
            let result = hand_over(&arguments, term.clone()).await.map_err(|error| error.to_string());
            let words = result.unwrap_or_else(|error| error).replace(&format!("{}/", root.path().display()), "");
            (words, fs::read_to_string(path("copy")).ok())
        };
        let none = "the image has no file in disk or other: a container disk has one in /disk";
        assert_eq!(run(&["disk", "other"], None).await, (none.into(), None));
        fs::write(path("disk/.hidden"), "of a tool").unwrap();
        fs::write(path("disk/b.img"), "content").unwrap();
        assert_eq!(run(&["disk"], Some("wanted")).await, ("nothing to do: the disk is filled".into(), None));
        fs::write(path("wanted"), "").unwrap();
        let copied = ("disk/b.img: 7 bytes".into(), Some("content".into()));
        assert_eq!(run(&["other", "disk"], Some("wanted")).await, copied);
        fs::write(path("disk/a.img"), "longer content").unwrap();
        let several =
            "the image has several files in disk: a.img, b.img; name one of them with templateValues.import.path";
        assert_eq!(run(&["disk"], None).await.0, several);
        assert_eq!(run(&["disk/a.img"], None).await, ("disk/a.img: 14 bytes".into(), Some("longer content".into())));
        // What a former attempt has left is no part of it.
        assert_eq!(run(&["disk/b.img"], None).await, copied);
        fs::remove_file(path("copy")).unwrap();
        fs::create_dir(path("copy")).unwrap();
        assert_eq!(run(&["disk/b.img"], None).await.0, "cannot copy disk/b.img to copy");
        fs::remove_dir(path("copy")).unwrap();
        fs::write(path("disk/b.img"), [b'x'; 101]).unwrap();
        assert_eq!(
            run(&["disk/b.img"], None).await.0,
            "disk/b.img is larger than 100 bytes: the largest disk of the VM, and templateValues.import.space, are its limits"
        );
        fs::write(path("disk/b.img"), "content").unwrap();
        // What is copied is wanted no more, and what is not there for one user is left to the next.
        fs::write(path("wanted"), "").unwrap();
        assert_eq!(run(&["disk/b.img"], Some("wanted")).await, copied);
        assert!(!path("wanted").exists());
        let arguments = HandOverArguments {
            wanted: None,
            to: path("copy"),
            most: None,
            or_next: true,
            from: vec![path("nothing")],
        };
        let left = hand_over(&arguments, term.clone()).await.unwrap();
        assert!(left.starts_with("left to the next container: the image has no file in"), "{left}");
        end.send(true).unwrap();
        assert_eq!(run(&["disk/b.img"], None).await.0, "terminated before the disk was copied");
    }
}
