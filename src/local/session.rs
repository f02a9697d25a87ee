//! From the start of the runner to its end: the console, the viewer, and how the user leaves.

use std::{io, pin::pin, time::Duration};

use tokio::{
    net::{UnixStream, unix::OwnedWriteHalf},
    process::Child,
    signal::unix::{Signal, SignalKind, signal},
    sync::watch,
    time::{sleep, timeout},
};

use super::note;
use crate::{
    runner::{
        self, control,
        files::FileAccessError,
        logging::Logging,
        machine::MachineOptions,
        programs::{self, RETRY_INTERVAL},
        runtime_dir::RuntimeDir,
        state::{EndReason, MachineState, Phase},
        terminal::{LEAVE, Terminal},
    },
    runner_config::DisplaySection,
};

/// The time until the runner listens on the console's socket.
const CONSOLE_TIMEOUT: Duration = Duration::from_secs(5);

/// Why the session failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The runner has failed.
    #[error(transparent)]
    Runner(#[from] runner::Error),
    /// A file cannot be read or watched.
    #[error(transparent)]
    File(#[from] FileAccessError),
    /// The terminal or signals can't be used.
    #[error("cannot {0}")]
    System(&'static str, #[source] io::Error),
}

/// Runs the VM until it ends. Returns why QEMU has ended; `None` if it was asked to end before it started.
///
/// # Errors
/// If the VM can't be started or has not ended well.
pub async fn run(
    options: MachineOptions,
    logging: Logging,
    display: &DisplaySection,
) -> Result<Option<EndReason>, Error> {
    let runtime = options.runtime.clone();
    let mut follower = runtime.follow_with(&options.config_dir)?;
    let (mut leaving, term) = Leaving::new(&runtime).map_err(|source| Error::System("wait for signals", source))?;
    let mut terminal = Terminal::take().map_err(|source| Error::System("use the terminal", source))?;
    let mut machine = pin!(runner::run_without_cluster(options, logging, term));
    let mut guest = Connected::default();
    loop {
        tokio::select! {
            outcome = &mut machine => {
                outcome?;
                break;
            }
            () = leaving.signalled() => leaving.leave(),
            typed = typed(terminal.as_mut()) => match typed {
                Ok(bytes) if !bytes.is_empty() => {
                    let mut parts = bytes.split(|byte| *byte == LEAVE);
                    guest.send(parts.next().unwrap_or_default());
                    for part in parts {
                        leaving.leave();
                        guest.send(part);
                    }
                }
                // The terminal has gone. That sends a signal, too.
                _ => terminal = None,
            },
            changed = follower.changed(), if !guest.is_up => {
                changed.map_err(|source| Error::System("watch the runtime directory", source))?;
                if MachineState::read(&runtime).is_some_and(|state| state.phase == Phase::Running) {
                    guest = Connected::connect(&runtime, display).await;
                }
            }
        }
    }
    // The terminal is as before when the caller says how the VM has ended.
    drop(terminal);
    Ok(MachineState::read(&runtime).and_then(|state| match state.phase {
        Phase::Ended { reason, .. } => Some(reason),
        Phase::Starting | Phase::Running => None,
    }))
}

async fn typed(terminal: Option<&mut Terminal>) -> io::Result<Vec<u8>> {
    match terminal {
        Some(terminal) => terminal.typed().await,
        None => std::future::pending().await,
    }
}

/// What is connected to the running guest.
#[derive(Default)]
struct Connected {
    is_up: bool,
    console: Option<OwnedWriteHalf>,
    /// It ends with this.
    _viewer: Option<Child>,
}

impl Connected {
    /// Connects to the console, and opens a viewer if the VM has a display.
    async fn connect(runtime: &RuntimeDir, display: &DisplaySection) -> Self {
        // The runner is about to listen.
        let connect = async {
            loop {
                match UnixStream::connect(runtime.console()).await {
                    Ok(console) => break console,
                    Err(_) => sleep(RETRY_INTERVAL).await,
                }
            }
        };
        let viewer = open_viewer(display);
        let Ok(console) = timeout(CONSOLE_TIMEOUT, connect).await else {
            note("the guest's console can't be reached: it shows its output only");
            return Self { is_up: true, console: None, _viewer: viewer };
        };
        let (mut output, input) = console.into_split();
        // The runner itself writes the output to the terminal. A client that does not read would not be heard.
        tokio::spawn(async move { tokio::io::copy(&mut output, &mut tokio::io::sink()).await });
        Self { is_up: true, console: Some(input), _viewer: viewer }
    }

    /// Sends what the user has typed. What a guest does not read is lost, because the user must always be able to leave.
    fn send(&mut self, bytes: &[u8]) {
        if let Some(console) = &self.console {
            let _ = console.try_write(bytes);
        }
    }
}

/// Opens a viewer for the display, or says where the display is.
fn open_viewer(display: &DisplaySection) -> Option<Child> {
    let spice = display.spice.as_ref().and_then(|spice| spice.socket.as_deref());
    let vnc = display.vnc.as_ref().and_then(|vnc| vnc.socket.as_deref());
    let (viewer, address, package) = match (spice, vnc) {
        (Some(socket), _) => ("remote-viewer", format!("spice+unix://{socket}"), "virt-viewer"),
        (None, Some(socket)) => ("vncviewer", socket.to_owned(), "tigervnc-viewer"),
        (None, None) => return None,
    };
    match programs::start(viewer, std::slice::from_ref(&address)) {
        Ok(mut viewer) => {
            // Its words are in the log.
            tokio::spawn(programs::last_lines(
                viewer.stderr.take(),
                |line| tracing::debug!(target: "viewer", "{line}"),
            ));
            Some(viewer)
        }
        Err(_) => {
            note(&format!("the display is at {address}; there is no {viewer} to show it: its package is {package}"));
            None
        }
    }
}

/// How the user leaves: the first time asks the guest to power down, the second time ends it.
struct Leaving {
    runtime: RuntimeDir,
    term: watch::Sender<bool>,
    signals: [Signal; 3],
}

impl Leaving {
    fn new(runtime: &RuntimeDir) -> io::Result<(Self, watch::Receiver<bool>)> {
        let (term, receiver) = watch::channel(false);
        let signals =
            [signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?, signal(SignalKind::hangup())?];
        Ok((Self { runtime: runtime.clone(), term, signals }, receiver))
    }

    /// Returns when a signal asks to leave.
    async fn signalled(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.signals;
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
            _ = hangup.recv() => {}
        }
    }

    fn leave(&self) {
        if !self.term.send_replace(true) {
            note("the guest is asked to power down; Ctrl-] or the signal once more ends it at once");
            return;
        }
        // A task of its own, because the runner answers in this one.
        let runtime = self.runtime.clone();
        tokio::spawn(async move {
            // Otherwise the guest is not up yet, or has ended already.
            if let Ok(true) = control::end(&runtime).await {
                note("the guest is ended at once");
            }
        });
    }
}
