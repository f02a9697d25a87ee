//! The web interface beside the manager: `vm-operator run --web`, for small clusters.
//!
//! It is the program vm-web, in a process of its own. So a manager without it has none of its code in memory, and they share nothing but the Pod and its
//! account: if the web interface fails, VMs are reconciled as before, and it is started again. It runs whether or not the manager leads.

use std::{ffi::OsString, io, path::PathBuf, process::Stdio, time::Duration};

use rustix::process::{Pid, Signal, kill_process};
use tokio::{
    process::{Child, Command},
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::{error, info, warn};

use crate::process::signals::terminated;

/// The pause before the program is started again: the first one, and the longest. A process that has run for longer than that begins anew.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_mins(1);
/// How long the program may take to end. It gives its requests three seconds.
const END: Duration = Duration::from_secs(5);

/// The program, and what it is told.
#[derive(Clone, Debug)]
pub struct WebProgram {
    /// The program's file.
    pub file: PathBuf,
    /// Its options. It has the environment of the manager.
    pub arguments: Vec<OsString>,
}

impl WebProgram {
    /// Runs the program until the manager is told to end, and starts it again if it ends before. If this future is dropped, the program is killed.
    pub async fn run(self, termination: watch::Receiver<bool>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let begin = Instant::now();
            match self.start() {
                Ok(mut child) => {
                    info!(file = %self.file.display(), pid = child.id(), "the web interface was started");
                    let ended = tokio::select! {
                        ended = child.wait() => ended,
                        () = terminated(termination.clone()) => return end(child).await,
                    };
                    let status = ended.map_or_else(|error| error.to_string(), |status| status.to_string());
                    if begin.elapsed() > LONGEST_PAUSE {
                        pause = FIRST_PAUSE;
                    }
                    error!(status, again_in = ?pause, "the web interface has ended");
                }
                Err(error) => {
                    error!(file = %self.file.display(), %error, again_in = ?pause, "the web interface can't be started");
                }
            }
            tokio::select! {
                () = sleep(pause) => pause = (pause * 2).min(LONGEST_PAUSE),
                () = terminated(termination.clone()) => return,
            }
        }
    }

    fn start(&self) -> io::Result<Child> {
        Command::new(&self.file).args(&self.arguments).stdin(Stdio::null()).kill_on_drop(true).spawn()
    }
}

/// Ends the program as it ends by itself, or else kills it.
async fn end(mut child: Child) {
    let pid = child.id().and_then(|pid| Pid::from_raw(pid.cast_signed()));
    if let Some(pid) = pid
        && let Err(error) = kill_process(pid, Signal::TERM)
    {
        warn!(%error, "the web interface can't be told to end");
    }
    if timeout(END, child.wait()).await.is_err() {
        warn!("the web interface does not end, and is killed");
    }
}
