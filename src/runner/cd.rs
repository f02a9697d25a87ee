//! What a CD drive may hold: an http(s) URL, or a file in the image repository or below a folder that the manager's configuration allows.
//! Nothing else: QEMU knows many more forms (`fat:`, `nbd:`, `json:`, ...), and the runner's container has files that are not the guest's.
//!
//! ```text
//!  text in the configuration ─▶ parse ─▶ CdText ─▶ look at the file, or ask for the URL ─▶ Medium ─▶ QEMU's -blockdev or blockdev-add
//!                                 └───────────────────────┴─▶ CdRefusal ─▶ condition ChangesApplied, and the drive is empty
//! ```
//!
//! [`Medium`] says with which driver QEMU opens it, so QEMU never interprets the text. The machine role finds out the medium at the start
//! and while the VM runs, because only its container has the volumes. The agent asks it ([`super::control`]).
//!
//! A path is opened with all its links resolved. Whoever can write to the image repository could exchange a file by a link after that;
//! the Pod itself mounts the repository read-only.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use tokio::process::Command;

use crate::{api::cd::Cd, render::command_line::Medium, runner_config::paths::IMAGE_REPOSITORY};

/// The program that asks for a URL.
pub const CURL: &str = "curl";
/// The time that a server has to answer. QEMU's main loop, and with it the guest, would wait for a server that does not.
const ANSWER: Duration = Duration::from_secs(5);
/// The code with which curl ends if it was built without the protocol. QEMU's curl may have it.
const UNSUPPORTED: i32 = 1;

/// What a CD is, or why it is refused, for people.
pub type Answer = Result<Medium, String>;

/// Why a CD is not inserted.
#[derive(Debug, thiserror::Error)]
pub enum CdRefusal {
    /// A protocol that is not allowed.
    #[error("it has the protocol {0}; use http or https, or a file")]
    Protocol(String),
    /// A path that leads upwards or is relative.
    #[error("a path must be absolute and can't contain `..`")]
    Upwards,
    /// A file elsewhere.
    #[error(
        "the file is neither in the image repository ({IMAGE_REPOSITORY}) nor below a folder of `cdFolders` in the manager's configuration"
    )]
    Elsewhere,
    /// A link that leads elsewhere.
    #[error("a symbolic link leads out of {}", .0.display())]
    Link(PathBuf),
    /// The folder is not there at all.
    #[error("there is no folder {}; a Pod that was created before it had that volume gets it when the VM is restarted", .0.display())]
    NoFolder(PathBuf),
    /// A file that can't be read.
    #[error("{0}")]
    Unreadable(#[from] io::Error),
    /// A directory, a device, a socket.
    #[error("it is no ordinary file")]
    NoFile,
    /// A server that does not answer, or not with the file.
    #[error("the server does not offer it: {0}")]
    Unreachable(String),
}

/// What a text means, before anything is opened.
#[derive(Debug, PartialEq, Eq)]
enum CdText<'a> {
    Url(&'a str),
    /// A file, and the folder in which it must be.
    File(&'a Path, &'a Path),
}

/// The folders of which a CD may be.
pub fn folders(configured: &[String]) -> Vec<PathBuf> {
    std::iter::once(IMAGE_REPOSITORY).chain(configured.iter().map(String::as_str)).map(PathBuf::from).collect()
}

fn parse<'a>(text: &'a str, folders: &'a [PathBuf]) -> Result<CdText<'a>, CdRefusal> {
    let path = match Cd::parse(text) {
        Cd::Url { url, protocol: "http" | "https" } => return Ok(CdText::Url(url)),
        Cd::Url { protocol, .. } => return Err(CdRefusal::Protocol(protocol.to_owned())),
        // The manager writes names of the image repository as paths.
        Cd::None | Cd::Repository(_) => return Err(CdRefusal::Upwards),
        Cd::Path(path) => Path::new(path),
    };
    let is_plain = |part: Component| matches!(part, Component::RootDir | Component::Normal(_));
    if !path.components().all(is_plain) {
        return Err(CdRefusal::Upwards);
    }
    let folder = folders.iter().find(|folder| path.starts_with(folder) && path != folder.as_path());
    folder.map(|folder| CdText::File(path, folder)).ok_or(CdRefusal::Elsewhere)
}

/// The medium of a text in the configuration.
///
/// # Errors
/// If it is not allowed, does not exist, or its server does not answer in time.
pub async fn medium(text: &str, folders: &[PathBuf]) -> Result<Medium, CdRefusal> {
    match parse(text, folders)? {
        CdText::Url(url) => {
            ask_for(url).await?;
            Ok(Medium::Url(url.to_owned()))
        }
        CdText::File(path, folder) => file(path, folder, folders),
    }
}

/// Checks a text as [`medium`] does, but asks no server.
///
/// # Errors
/// If it is not allowed, or the file does not exist.
pub fn check(text: &str, folders: &[PathBuf]) -> Result<(), CdRefusal> {
    match parse(text, folders)? {
        CdText::Url(_) => Ok(()),
        CdText::File(path, folder) => file(path, folder, folders).map(drop),
    }
}

fn file(path: &Path, folder: &Path, folders: &[PathBuf]) -> Result<Medium, CdRefusal> {
    let real = fs::canonicalize(path).map_err(|error| match folder.is_dir() {
        true => error.into(),
        false => CdRefusal::NoFolder(folder.to_owned()),
    })?;
    let is_inside = |folder: &PathBuf| fs::canonicalize(folder).is_ok_and(|folder| real.starts_with(folder));
    if !folders.iter().any(is_inside) {
        return Err(CdRefusal::Link(folder.to_owned()));
    }
    if !fs::metadata(&real)?.is_file() {
        return Err(CdRefusal::NoFile);
    }
    real.into_os_string().into_string().map(Medium::File).map_err(|_| CdRefusal::Upwards)
}

/// Asks a server for the head of a file, as QEMU does when it opens it.
async fn ask_for(url: &str) -> Result<(), CdRefusal> {
    let seconds = ANSWER.as_secs().to_string();
    let mut curl = Command::new(CURL);
    curl.args(["--silent", "--show-error", "--fail", "--location", "--head", "--globoff", "--disable"])
        .args(["--proto", "=http,https", "--max-time", &seconds, "--output", "/dev/null", "--url", url])
        .stdin(Stdio::null())
        .kill_on_drop(true);
    match curl.output().await {
        Ok(output) if output.status.success() || output.status.code() == Some(UNSUPPORTED) => Ok(()),
        Ok(output) => {
            let words = String::from_utf8_lossy(&output.stderr);
            let words = words.trim().trim_start_matches("curl: ");
            Err(CdRefusal::Unreachable(if words.is_empty() { output.status.to_string() } else { words.to_owned() }))
        }
        // An image without curl: QEMU itself finds out.
        Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_urls_and_files_below_the_folders_are_allowed() {
        let folders = folders(&["/srv/isos".to_owned(), "/srv/more/".to_owned()]);
        let of = |text: &str| match parse(text, &folders) {
            Ok(CdText::Url(url)) => format!("url {url}"),
            Ok(CdText::File(path, folder)) => format!("file {} in {}", path.display(), folder.display()),
            Err(refusal) => format!("{refusal:?}"),
        };
        for (text, expected) in [
            ("http://host/a.iso", "url http://host/a.iso"),
            ("https://host/a.iso?b=c,d", "url https://host/a.iso?b=c,d"),
            ("ftp://host/a.iso", "Protocol(\"ftp\")"),
            ("HTTP://host/a.iso", "Protocol(\"HTTP\")"),
            ("file:///etc/passwd", "Protocol(\"file\")"),
            ("fat:///run/secrets/kubernetes.io/serviceaccount", "Protocol(\"fat\")"),
            ("nbd://host/x", "Protocol(\"nbd\")"),
            ("fat:/run/secrets", "Upwards"),
            ("json:{\"driver\":\"file\"}", "Upwards"),
            ("a.iso", "Upwards"),
            ("", "Upwards"),
            ("/srv/isos/../../etc/passwd", "Upwards"),
            ("/srv/isos/./a.iso", "file /srv/isos/./a.iso in /srv/isos"),
            ("/srv/isos/a,b:c.iso", "file /srv/isos/a,b:c.iso in /srv/isos"),
            ("/srv/more/deep/a.iso", "file /srv/more/deep/a.iso in /srv/more/"),
            ("/srv/isos", "Elsewhere"),
            ("/srv/isos2/a.iso", "Elsewhere"),
            ("/dev/vda", "Elsewhere"),
            ("/var/run/secrets/kubernetes.io/serviceaccount/token", "Elsewhere"),
            (
                "/var/local/vmop-image-repository/a.iso",
                "file /var/local/vmop-image-repository/a.iso in /var/local/vmop-image-repository",
            ),
        ] {
            assert_eq!(of(text), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn a_link_is_followed_only_within_the_folders() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().canonicalize().unwrap();
        let path = |name: &str| root.join(name).to_str().unwrap().to_owned();
        for folder in ["isos/deep", "other", "secret"] {
            fs::create_dir_all(root.join(folder)).unwrap();
        }
        for file in ["isos/deep/a.iso", "other/b.iso", "secret/token"] {
            fs::write(root.join(file), file).unwrap();
        }
        symlink("deep/a.iso", root.join("isos/near")).unwrap();
        symlink(path("other/b.iso"), root.join("isos/far")).unwrap();
        symlink(path("secret/token"), root.join("isos/out")).unwrap();
        symlink(path("secret"), root.join("isos/folder")).unwrap();
        symlink("loop", root.join("isos/loop")).unwrap();
        // A folder may be reached by a link itself.
        symlink(path("other"), root.join("linked")).unwrap();
        let folders = folders(&[path("isos"), path("linked"), path("not-there")]);
        let of = async |name: &str| match medium(&path(name), &folders).await {
            Ok(medium) => medium.text().replace(&path(""), ""),
            Err(refusal) => refusal.to_string().replace(&path(""), ""),
        };
        for (name, expected) in [
            ("isos/deep/a.iso", "isos/deep/a.iso"),
            ("isos/near", "isos/deep/a.iso"),
            ("isos/far", "other/b.iso"),
            ("linked/b.iso", "other/b.iso"),
            ("isos/out", "a symbolic link leads out of isos"),
            ("isos/folder/token", "a symbolic link leads out of isos"),
            ("isos/deep", "it is no ordinary file"),
            (
                "not-there/a.iso",
                "there is no folder not-there; a Pod that was created before it had that volume gets it when the VM is restarted",
            ),
            ("isos/none", "No such file or directory (os error 2)"),
            ("isos/loop", "Too many levels of symbolic links (os error 40)"),
        ] {
            assert_eq!(of(name).await, expected, "{name}");
        }
    }

    #[tokio::test]
    async fn a_server_that_does_not_answer_or_does_not_have_the_file_is_named() {
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let refused = async |url: &str| medium(url, &[]).await.unwrap_err();
        let unreachable = refused("http://127.0.0.1:1/a.iso").await;
        assert!(unreachable.to_string().contains("127.0.0.1"), "{unreachable}");
        let slow = refused(&format!("http://{}/a.iso", silent.local_addr().unwrap())).await;
        assert!(slow.to_string().contains("timed out"), "{slow}");
    }
}
