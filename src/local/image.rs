//! The image of the first disk: downloaded if it is a URL, examined, and put below a disk that stores only what differs from it.
//!
//! Beside the disk `NAME.qcow2` is `NAME.qcow2.image`, which says which image it is over. An image that has changed or gone makes the
//! disk worthless, so that is found before the guest starts.

use std::{
    fs,
    io::{self, IsTerminal},
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    time::SystemTime,
};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::process::Command;

use super::{
    host::{DOWNLOADER, IMAGE_TOOL},
    plan::Overlay,
};
use crate::{
    runner::files::{FileAccessError, create_directory, read_optional, write_atomically},
    runner_config::digest,
};

/// The formats that QEMU can start from without guessing.
const FORMATS: [&str; 2] = ["raw", "qcow2"];
/// Ends of names of packed images, which are none that a guest can start from.
const PACKED: [&str; 6] = ["xz", "gz", "bz2", "zst", "zip", "tar"];

/// Why a disk can't be made over an image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// A program can't be started.
    #[error("cannot start {0}")]
    Start(&'static str, #[source] io::Error),
    /// A program has failed.
    #[error("{program} failed ({status}){}", said(message))]
    Failed {
        /// The program.
        program: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// What it wrote on its standard error.
        message: String,
    },
    /// The image can't be used as it is.
    #[error("--image: {}: {what}", path.display())]
    Unusable {
        /// The image.
        path: PathBuf,
        /// Why not, and what to do.
        what: String,
    },
    /// The disk exists, over another image.
    #[error("--image: the disk {} is over another image, {}; --fresh makes it anew, and another --dir leaves it", disk.display(), image.display())]
    Other {
        /// The disk.
        disk: PathBuf,
        /// The image that it is over.
        image: PathBuf,
    },
    /// The image below the disk is not what it was.
    #[error("the disk {} needs its image {} as it was: {what}; put it back, or make the disk anew with --fresh", disk.display(), image.display())]
    Changed {
        /// The disk.
        disk: PathBuf,
        /// The image that it is over.
        image: PathBuf,
        /// What has happened to it.
        what: &'static str,
    },
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(": {}", message.trim_end()) }
}

/// Where the image of the first disk is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ImageSource {
    /// A file of this computer.
    File(PathBuf),
    /// A URL.
    Url(String),
}

impl ImageSource {
    /// Reads what is on the command line.
    pub fn new(text: &str) -> Self {
        match text.split_once("://") {
            Some(("http" | "https", _)) => Self::Url(text.to_owned()),
            _ => Self::File(PathBuf::from(text)),
        }
    }
}

/// The image that a disk is over.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Record {
    path: PathBuf,
    bytes: u64,
    modified: SystemTime,
}

impl Record {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(Self { path: path.to_owned(), bytes: metadata.len(), modified: metadata.modified()? })
    }

    fn file(disk: &Path) -> PathBuf {
        disk.with_added_extension("image")
    }
}

/// Makes the disk over the image if it does not exist, else checks that its image is what it was. Makes it larger if the VM wants that.
/// `downloads` is the folder of downloaded images; `say` tells the user what takes time.
///
/// # Errors
/// If the image can't be had or used, or is not the disk's.
pub async fn make(
    overlay: &Overlay,
    source: Option<&ImageSource>,
    downloads: &Path,
    say: impl Fn(&str),
) -> Result<(), Error> {
    let Overlay { file: disk, exists, size } = overlay;
    if *exists {
        check_image(disk, source, downloads)?;
        if Info::of(disk).await?.virtual_size < *size {
            run(IMAGE_TOOL, |tool| tool.args(["resize", "-q", "-f", "qcow2"]).arg(disk).arg(size.to_string())).await?;
        }
        return Ok(());
    }
    let image = match source {
        Some(ImageSource::File(path)) => fs::canonicalize(path).map_err(FileAccessError::with("find", path))?,
        Some(ImageSource::Url(url)) => download(url, downloads, say).await?,
        // The plan has an overlay that does not exist only if there is an image.
        None => return Ok(()),
    };
    let info = Info::of(&image).await?;
    info.check(&image)?;
    let record = Record::of(&image).map_err(FileAccessError::with("read", &image))?;
    write_atomically(&Record::file(disk), &serde_json::to_vec(&record).unwrap_or_default())?;
    let new = disk.with_added_extension("new");
    run(IMAGE_TOOL, |tool| {
        tool.args(["create", "-q", "-f", "qcow2", "-F", &info.format, "-b"]).arg(&image).arg(&new);
        tool.arg(info.virtual_size.max(*size).next_multiple_of(512).to_string())
    })
    .await?;
    fs::rename(&new, disk).map_err(FileAccessError::with("rename", &new))?;
    Ok(())
}

/// Checks that the image below a disk is the one that it was made over, and the one on the command line.
fn check_image(disk: &Path, source: Option<&ImageSource>, downloads: &Path) -> Result<(), Error> {
    let Some(text) = read_optional(&Record::file(disk))? else { return Ok(()) };
    let Ok(record) = serde_json::from_slice::<Record>(&text) else { return Ok(()) };
    let wanted = match source {
        Some(ImageSource::File(path)) => Some(fs::canonicalize(path).map_err(FileAccessError::with("find", path))?),
        Some(ImageSource::Url(url)) => Some(downloads.join(name_of_download(url))),
        None => None,
    };
    if wanted.is_some_and(|wanted| wanted != record.path) {
        return Err(Error::Other { disk: disk.to_owned(), image: record.path });
    }
    let what = match Record::of(&record.path) {
        Ok(now) if now == record => return Ok(()),
        Ok(_) => "it has changed since",
        Err(error) if error.kind() == io::ErrorKind::NotFound => "it does not exist any more",
        Err(_) => "it can't be read",
    };
    Err(Error::Changed { disk: disk.to_owned(), image: record.path, what })
}

/// What `qemu-img info` says about an image.
struct Info {
    format: String,
    virtual_size: u64,
    /// Another file that the image would read.
    other_file: Option<String>,
}

impl Info {
    async fn of(path: &Path) -> Result<Self, Error> {
        let output = run(IMAGE_TOOL, |tool| tool.args(["info", "--force-share", "--output=json"]).arg(path)).await?;
        let info: Value = serde_json::from_slice(&output).unwrap_or_default();
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Ok(Self {
            format: text(&info["format"]).unwrap_or_default(),
            virtual_size: info["virtual-size"].as_u64().unwrap_or_default(),
            other_file: text(&info["backing-filename"]).or_else(|| text(&info["format-specific"]["data"]["data-file"])),
        })
    }

    /// Refuses an image from which nothing would start, or that would show the guest other files of this computer.
    fn check(&self, path: &Path) -> Result<(), Error> {
        let unusable = |what: String| Err(Error::Unusable { path: path.to_owned(), what });
        let end = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
        if self.format == "raw" && PACKED.contains(&end) {
            return unusable("it is packed: unpack it first".into());
        }
        if let Some(other) = &self.other_file {
            return unusable(format!(
                "it reads another file, {other:?}, which the guest would see: make one image of both with qemu-img convert -O qcow2"
            ));
        }
        if !FORMATS.contains(&self.format.as_str()) {
            return unusable(format!("its format is {}: convert it with qemu-img convert -O qcow2", self.format));
        }
        Ok(())
    }
}

/// The file name of a downloaded image.
fn name_of_download(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default();
    let is_plain = |letter: &char| letter.is_ascii_alphanumeric() || "-_.".contains(*letter);
    let name: String = name.chars().filter(is_plain).collect();
    format!("{}-{name}", digest(url, 4))
}

/// Downloads an image, unless that was done before. Shows the progress on a terminal.
async fn download(url: &str, downloads: &Path, say: impl Fn(&str)) -> Result<PathBuf, Error> {
    let path = downloads.join(name_of_download(url));
    if path.exists() {
        return Ok(path);
    }
    create_directory(downloads)?;
    say(&format!("downloading {url} to {}", path.display()));
    // Its name has the process, so that two runners do not write one file.
    let part = path.with_added_extension(format!("part-{}", std::process::id()));
    let progress =
        if io::stderr().is_terminal() { ["--progress-bar", "--show-error"] } else { ["--silent", "--show-error"] };
    let mut tool = Command::new(DOWNLOADER);
    tool.args(["--fail", "--location", "--proto", "=http,https", "--retry", "3"]).args(progress);
    tool.arg("--output").arg(&part).args(["--", url]).stdin(Stdio::null()).kill_on_drop(true);
    let status = tool.status().await.map_err(|error| Error::Start(DOWNLOADER, error))?;
    if !status.success() {
        let _ = fs::remove_file(&part);
        // curl has said why.
        return Err(Error::Failed { program: DOWNLOADER, status, message: format!("{url} was not downloaded") });
    }
    fs::rename(&part, &path).map_err(FileAccessError::with("rename", &part))?;
    Ok(path)
}

/// Runs a program, and returns its output.
async fn run(
    program: &'static str,
    with_arguments: impl FnOnce(&mut Command) -> &mut Command,
) -> Result<Vec<u8>, Error> {
    let mut command = Command::new(program);
    with_arguments(&mut command).stdin(Stdio::null()).kill_on_drop(true);
    let output = command.output().await.map_err(|error| Error::Start(program, error))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(Error::Failed { program, status: output.status, message });
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEGABYTE: u64 = 1 << 20;

    struct Files(tempfile::TempDir);

    impl Files {
        fn path(&self, name: &str) -> PathBuf {
            self.0.path().canonicalize().unwrap().join(name)
        }

        fn put(&self, name: &str, bytes: u64) -> PathBuf {
            fs::File::create(self.path(name)).unwrap().set_len(bytes).unwrap();
            self.path(name)
        }

        async fn make(&self, size: u64, image: Option<&Path>) -> Result<u64, String> {
            let file = self.path("disk.qcow2");
            let overlay = Overlay { exists: file.exists(), file, size };
            let source = image.map(|image| ImageSource::File(image.to_owned()));
            make(&overlay, source.as_ref(), &self.path("downloads"), |_| {})
                .await
                .map_err(|error| error.to_string())?;
            Ok(Info::of(&overlay.file).await.unwrap().virtual_size)
        }
    }

    fn files() -> Files {
        Files(tempfile::tempdir().unwrap())
    }

    #[tokio::test]
    async fn a_disk_over_an_image_is_as_large_as_wanted_and_leaves_the_image() {
        let files = files();
        let image = files.put("a.img", 3 * MEGABYTE);
        assert_eq!(
            files.make(MEGABYTE, Some(&image)).await.unwrap(),
            3 * MEGABYTE,
            "the image is larger than the claim"
        );
        assert_eq!(files.make(8 * MEGABYTE, Some(&image)).await.unwrap(), 8 * MEGABYTE, "the claim has grown");
        assert_eq!(files.make(MEGABYTE, None).await.unwrap(), 8 * MEGABYTE, "a disk is not made smaller");
        assert_eq!(fs::metadata(&image).unwrap().len(), 3 * MEGABYTE);
    }

    #[tokio::test]
    async fn an_image_that_is_not_what_it_was_is_found_before_the_start() {
        let files = files();
        let (image, other) = (files.put("a.img", MEGABYTE), files.put("b.img", MEGABYTE));
        files.make(MEGABYTE, Some(&image)).await.unwrap();
        let error = files.make(MEGABYTE, Some(&other)).await.unwrap_err();
        assert!(error.contains("is over another image") && error.contains("a.img"), "{error}");
        files.put("a.img", 2 * MEGABYTE);
        let error = files.make(MEGABYTE, None).await.unwrap_err();
        assert!(error.contains("it has changed since"), "{error}");
        fs::remove_file(&image).unwrap();
        let error = files.make(MEGABYTE, None).await.unwrap_err();
        assert!(error.contains("it does not exist any more"), "{error}");
    }

    #[tokio::test]
    async fn an_image_that_would_read_other_files_is_refused() {
        let files = files();
        let secret = files.put("secret", MEGABYTE);
        let hostile = files.path("hostile.qcow2");
        let output = std::process::Command::new(IMAGE_TOOL)
            .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"])
            .args([&secret, &hostile])
            .output();
        assert!(output.unwrap().status.success());
        let error = files.make(MEGABYTE, Some(&hostile)).await.unwrap_err();
        assert!(error.contains("it reads another file") && error.contains("secret"), "{error}");
        assert!(!files.path("disk.qcow2").exists());
        let packed = files.put("a.img.xz", MEGABYTE);
        let error = files.make(MEGABYTE, Some(&packed)).await.unwrap_err();
        assert!(error.contains("unpack it first"), "{error}");
    }

    #[test]
    fn a_download_has_a_name_of_its_url() {
        assert_eq!(ImageSource::new("https://x.org/a.img"), ImageSource::Url("https://x.org/a.img".into()));
        assert_eq!(ImageSource::new("a.img"), ImageSource::File("a.img".into()));
        let name = name_of_download("https://x.org/debian 13.qcow2?x=/../../y");
        assert!(name.ends_with("-debian13.qcow2"), "{name}");
        assert_ne!(name, name_of_download("https://y.org/debian 13.qcow2"));
    }
}
