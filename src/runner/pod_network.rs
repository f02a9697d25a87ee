//! The program passt, which connects a network of type `pod`, in a container of its own: `vm-runner passt`.
//!
//! ```text
//!  container passt:      `passt --help` ─▶ protocol ─▶ passt, started again when it ends ─▶ a socket in the folder
//!  container vm-runner:  the folder exists ─▶ wait for the socket; its name says the protocol ─▶ QEMU
//! ```
//!
//! The two containers share this folder and nothing else. So passt, which needs system calls that other containers are denied, has neither
//! disks nor devices nor a token. A runner without that folder starts passt itself.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Instant,
};

use rustix::process::Resource;
use tokio::{
    process::Command,
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, error, info, warn};

use super::{
    command::{self, UserAndGroup},
    files::read_untrusted,
    programs::{self, RETRY_INTERVAL, START_TIMEOUT, hint},
    supervisor::Pauses,
};
use crate::{
    process::{ErrorChain, signals::terminated},
    render::command_line::PodLink,
};

/// The names of the sockets in the folder.
const VHOST_USER: &str = "vhost-user.sock";
const STREAM: &str = "stream.sock";
/// The file with the last failure of passt, for whoever waits for the socket.
const FAILURE: &str = "failure";
/// The most bytes of it that are read.
const LONGEST_FAILURE: u64 = 4096;

/// Why there is no passt in its container.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It has not made its socket.
    #[error("the container passt has made no socket in {}: {failure}{}", folder.display(), hint(failure))]
    NoSocket {
        /// The folder.
        folder: PathBuf,
        /// What it says.
        failure: String,
    },
    /// passt can't be asked what it can do.
    #[error("cannot run {program}")]
    Help {
        /// The program.
        program: String,
        /// The system's error.
        source: io::Error,
    },
}

/// What passt forwards.
#[derive(Clone, Copy, Debug)]
pub struct Ports<'a> {
    /// The ports from 1 to this one are forwarded to the guest, as far as the limit of open files allows it.
    pub last: u16,
    /// But not these.
    pub kept: &'a [u16],
}

impl Ports<'_> {
    /// The arguments of passt in this process's rights.
    pub fn arguments(self, link: &PodLink, one_off: bool) -> Vec<String> {
        let last = command::last_port(self.last, rustix::process::getrlimit(Resource::Nofile).maximum);
        if last < self.last {
            let wanted = self.last;
            warn!(last_port = last, wanted, "the limit of open files allows fewer ports to be forwarded to the guest");
        }
        let run_as =
            UserAndGroup { uid: rustix::process::geteuid().as_raw(), gid: rustix::process::getegid().as_raw() };
        command::passt(self.kept, last, run_as, link, one_off)
    }
}

/// How QEMU reaches the passt of the container that shares `folder`; waits until passt listens. `None`: there is no such container.
///
/// # Errors
/// If it does not listen in time.
pub async fn find(folder: &Path) -> Result<Option<PodLink>, Error> {
    if !folder.is_dir() {
        return Ok(None);
    }
    let listens = async {
        loop {
            if let Some(link) = present(folder) {
                return link;
            }
            sleep(RETRY_INTERVAL).await;
        }
    };
    match timeout(START_TIMEOUT, listens).await {
        Ok(link) => Ok(Some(link)),
        Err(_) => {
            let failure = read_untrusted(&folder.join(FAILURE), LONGEST_FAILURE);
            let failure = failure.map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            let failure = failure.unwrap_or_else(|_| "it has not started, see its log".into());
            Err(Error::NoSocket { folder: folder.into(), failure })
        }
    }
}

/// As [`find`], without waiting.
pub fn present(folder: &Path) -> Option<PodLink> {
    let [vhost_user, stream] = [VHOST_USER, STREAM].map(|name| folder.join(name));
    let links = [PodLink::VhostUser(vhost_user), PodLink::Stream(stream)];
    links.into_iter().find(|link| link.socket().exists())
}

/// Runs passt with its socket in `folder`, again and again until `term` is true.
///
/// # Errors
/// If it can't be run at all.
pub async fn serve(program: &str, folder: &Path, ports: Ports<'_>, term: watch::Receiver<bool>) -> Result<(), Error> {
    let link = if has_vhost_user(program).await? {
        PodLink::VhostUser(folder.join(VHOST_USER))
    } else {
        PodLink::Stream(folder.join(STREAM))
    };
    // An earlier container of the Pod, perhaps of another image, may have left them.
    for name in [VHOST_USER, STREAM, FAILURE] {
        let _ = fs::remove_file(folder.join(name));
    }
    let arguments = ports.arguments(&link, false);
    info!(?link, "passt connects the guest to the Pod's network");
    let mut pauses = Pauses::default();
    loop {
        let begin = Instant::now();
        let ended = async {
            match programs::start(program, &arguments) {
                Ok(child) => programs::wait_for_end(program.to_owned(), child).await,
                Err(error) => error,
            }
        };
        let failure = tokio::select! {
            failure = ended => failure,
            () = terminated(term.clone()) => return Ok(()),
        };
        let _ = fs::remove_file(link.socket());
        let pause = pauses.after(begin.elapsed());
        error!(error = %ErrorChain(&failure), pause_ms = pause.as_millis(), "passt has ended; it is started again");
        if let Err(error) = fs::write(folder.join(FAILURE), ErrorChain(&failure).to_string()) {
            debug!(%error, "cannot write why passt has ended");
        }
        tokio::select! {
            () = sleep(pause) => {}
            () = terminated(term.clone()) => return Ok(()),
        }
    }
}

/// Whether this passt can exchange data with the guest through its memory (since 2025).
async fn has_vhost_user(program: &str) -> Result<bool, Error> {
    let output = Command::new(program).arg("--help").output().await;
    let output = output.map_err(|source| Error::Help { program: program.into(), source })?;
    let says = |bytes: &[u8]| String::from_utf8_lossy(bytes).contains("--vhost-user");
    Ok(says(&output.stdout) || says(&output.stderr))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn who_waits_in_vain_says_why_passt_has_ended() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(find(&folder.path().join("none")).await.unwrap(), None);
        fs::write(folder.path().join(FAILURE), "passt ended: Couldn't create user namespace: Operation not permitted")
            .unwrap();
        let error = find(folder.path()).await.unwrap_err().to_string();
        assert!(
            error.contains("user namespace") && error.contains("see passt in the manager's configuration"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn the_name_of_the_socket_says_the_protocol() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(present(folder.path()), None);
        let [vhost_user, stream] = [VHOST_USER, STREAM].map(|name| folder.path().join(name));
        fs::write(&stream, "").unwrap();
        assert_eq!(find(folder.path()).await.unwrap(), Some(PodLink::Stream(stream)));
        fs::write(&vhost_user, "").unwrap();
        assert_eq!(find(folder.path()).await.unwrap(), Some(PodLink::VhostUser(vhost_user)));
    }
}
