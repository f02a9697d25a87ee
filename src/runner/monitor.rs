//! The machine role's connection to QEMU's monitor, which is made again when it breaks: the guest may run for months, and only over this
//! connection can it be asked to power down.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, warn};

use super::{
    go_on::GuestState,
    operation::{Operation, Step},
    qmp::{Command, Error, Event, Qmp, Status, read},
};
use crate::process::ErrorChain;

/// The time until the first attempt to connect again. It doubles up to [`LONGEST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// The time for reading the rest of the events after QEMU's end.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// A connection that is made again.
pub struct Monitor {
    socket: PathBuf,
    link: Link,
    /// The pause before the next attempt.
    pause: Duration,
}

enum Link {
    Up { monitor: Qmp, since: Instant },
    Down(JoinHandle<Renewed>),
}

/// A new connection, and what was found out over it.
struct Renewed {
    monitor: Qmp,
    guest: GuestState,
    pause: Duration,
}

/// What the monitor says.
#[derive(Debug, PartialEq, Eq)]
pub enum News {
    /// An event.
    Event(Event),
    /// The connection was broken and is there again. Events may have been lost, so this is what the guest does now.
    Back(GuestState),
}

impl Monitor {
    /// Continues a connection to the socket.
    pub fn new(monitor: Qmp, socket: PathBuf) -> Self {
        Self { socket, link: Link::Up { monitor, since: Instant::now() }, pause: FIRST_PAUSE }
    }

    /// Returns what comes next. Cancel safe. While there is no connection, this waits for one; the caller knows whether QEMU still runs.
    pub async fn news(&mut self) -> News {
        loop {
            match &mut self.link {
                Link::Up { monitor, since } => match monitor.event().await {
                    Ok(event) => return News::Event(event),
                    Err(error) => {
                        // Usually QEMU is about to end.
                        debug!(%error, "QEMU's monitor");
                        if since.elapsed() > LONGEST_PAUSE {
                            self.pause = FIRST_PAUSE;
                        }
                        self.link = self.connect_again();
                    }
                },
                Link::Down(task) => match task.await {
                    Ok(Renewed { monitor, guest, pause }) => {
                        warn!(?guest, "the connection to QEMU's monitor was broken; it is there again");
                        self.pause = pause;
                        self.link = Link::Up { monitor, since: Instant::now() };
                        return News::Back(guest);
                    }
                    // It has panicked.
                    Err(_) => self.link = self.connect_again(),
                },
            }
        }
    }

    fn connect_again(&self) -> Link {
        let (socket, pause) = (self.socket.clone(), self.pause);
        Link::Down(tokio::spawn(async move { renew(&socket, pause).await }))
    }

    /// Executes a command.
    ///
    /// # Errors
    /// As [`Qmp::execute`]; also while there is no connection.
    pub async fn execute(&mut self, command: &Command) -> Result<Value, Error> {
        match &mut self.link {
            Link::Up { monitor, .. } => monitor.execute(command).await,
            Link::Down(_) => Err(Error::Closed),
        }
    }

    /// As [`Monitor::execute`], with the answer as the command's documentation names it.
    ///
    /// # Errors
    /// As [`Qmp::query`]; also while there is no connection.
    pub async fn query<T: DeserializeOwned>(&mut self, command: &Command) -> Result<T, Error> {
        read(command, self.execute(command).await?)
    }

    /// Carries out an operation whose steps are commands. `guest` is what the guest does.
    ///
    /// # Errors
    /// If QEMU refuses a step that it must not refuse, or as [`Monitor::execute`].
    pub async fn carry_out(&mut self, operation: &Operation, guest: GuestState) -> Result<(), Error> {
        for step in operation.steps(guest) {
            let Some(command) = step.command() else { continue };
            match (self.execute(command).await, &step) {
                (Ok(_), _) => {}
                (Err(error), Step::May(_)) => debug!(%error, "QEMU's monitor"),
                (Err(error), _) => return Err(error),
            }
        }
        Ok(())
    }

    /// The events that QEMU has sent before its end.
    pub async fn last_events(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        if let Link::Up { monitor, .. } = &mut self.link {
            while let Ok(Ok(event)) = timeout(REST_TIMEOUT, monitor.event()).await {
                events.push(event);
            }
        }
        events
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if let Link::Down(task) = &self.link {
            task.abort();
        }
    }
}

async fn renew(socket: &Path, mut pause: Duration) -> Renewed {
    let mut is_told = false;
    loop {
        sleep(pause).await;
        let is_last = pause == LONGEST_PAUSE;
        pause = (pause * 2).min(LONGEST_PAUSE);
        match connect(socket).await {
            Ok((monitor, guest)) => return Renewed { monitor, guest, pause },
            Err(error) if is_last && !is_told => {
                warn!(error = %ErrorChain(&error), "cannot connect to QEMU's monitor");
                is_told = true;
            }
            Err(error) => debug!(%error, "QEMU's monitor"),
        }
    }
}

async fn connect(socket: &Path) -> Result<(Qmp, GuestState), Error> {
    let mut monitor = Qmp::connect(socket).await?;
    let status: Status = monitor.query(&Command::QueryStatus).await?;
    Ok((monitor, status.into()))
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::net::UnixListener;

    use super::*;
    use crate::runner::lines::JsonLines;

    /// Answers a client as QEMU does, up to a command; then closes the connection or goes on.
    async fn serve(listener: &UnixListener, status: &str, commands: usize) -> JsonLines {
        let mut lines = JsonLines::over(listener.accept().await.unwrap().0);
        lines.send(&[], &json!({ "QMP": {} })).await.unwrap();
        for _ in 0..commands {
            let request = lines.receive().await.unwrap().unwrap();
            let answer = match request["execute"].as_str().unwrap() {
                "query-status" => json!({ "running": status == "running", "singlestep": false, "status": status }),
                _ => json!({}),
            };
            lines.send(&[], &json!({ "return": answer, "id": request["id"] })).await.unwrap();
        }
        lines
    }

    #[tokio::test]
    async fn a_connection_that_breaks_is_made_again_and_says_what_the_guest_does_now() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("monitor.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let qemu = tokio::spawn(async move {
            drop(serve(&listener, "running", 1).await);
            // It breaks again before it can be used.
            drop(serve(&listener, "running", 1).await);
            let mut lines = serve(&listener, "io-error", 2).await;
            lines.send(&[], &json!({ "event": "POWERDOWN" })).await.unwrap();
            let request: Value = lines.receive().await.unwrap().unwrap();
            lines.send(&[], &json!({ "return": {}, "id": request["id"] })).await.unwrap();
            request["execute"].clone()
        });
        let mut monitor = Monitor::new(Qmp::connect(&socket).await.unwrap(), socket);
        assert_eq!(monitor.news().await, News::Back(GuestState::StoppedByDisk));
        assert_eq!(monitor.news().await, News::Event(Event::Powerdown));
        monitor.execute(&Command::SystemPowerdown).await.unwrap();
        assert_eq!(qemu.await.unwrap(), "system_powerdown");
    }
}
