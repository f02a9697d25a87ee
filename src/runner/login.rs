//! The login agent: a program in the guest that logs a user in to the desktop, or out, when the runner asks for it.
//!
//! The agent opens the virtio port `org.jdrupes.vmop_agent.0`. Both sides send lines of text. The agent's lines begin with a code
//! of three digits:
//!
//! | sender | line | meaning |
//! |---|---|---|
//! | agent | `220 ...` | the agent is ready (sent once, when it opens its port) |
//! | runner | `login USER` | log the user in |
//! | agent | `201 ...` | the user is logged in |
//! | runner | `logout` | log out the user who is logged in |
//! | agent | `202 ...` | no user is logged in: after a `logout`, or because the user has logged out |
//! | agent | `4.. ...`, `5.. ...` | the agent refuses the request, with the reason |
//!
//! The runner sends one request at a time. It does not log a user in again who has logged out, until the configuration names another
//! user or the agent starts again.

use std::{io, path::Path, time::Duration};

use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use super::lines::Lines;

/// What the runner knows about the login agent and its user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoginState {
    /// Whether the agent is there.
    pub connected: bool,
    /// The user who is logged in.
    pub user: Option<String>,
    /// The agent's answer, if it has refused the last request.
    pub refusal: Option<String>,
    /// The request that the agent has not answered yet.
    pending: Option<Request>,
    /// The last request that the agent has answered.
    answered: Option<Request>,
}

/// The longest name of a user in bytes. The VM's schema allows 256 characters, of which each has up to four bytes. A longer line may be more
/// than an agent reads, and a status with it more than the API server accepts.
const LONGEST_NAME: usize = 1024;

/// A request to the agent: the user to log in, or `None` for a logout.
type Request = Option<String>;

impl LoginState {
    /// The state for an agent that has already sent its `220`, maybe to an earlier runner process.
    pub fn connected() -> Self {
        Self { connected: true, ..Self::default() }
    }

    /// Returns the line to send now, if the agent does not have the desired user yet. `desired_user` comes from the configuration.
    pub fn next_request(&mut self, desired_user: Option<&str>) -> Option<String> {
        let request = desired_user.filter(|user| !user.is_empty()).map(str::to_owned);
        if !self.connected || self.pending.is_some() || self.answered.as_ref().unwrap_or(&None) == &request {
            return None;
        }
        let Some(user) = &request else {
            self.pending = Some(request);
            return Some("logout".into());
        };
        if user.len() > LONGEST_NAME || user.chars().any(char::is_control) {
            let beginning: String = user.chars().take(LONGEST_NAME).collect();
            self.refusal = Some(format!("{beginning:?} cannot be the name of a user"));
            self.answered = Some(request);
            return None;
        }
        let line = format!("login {user}");
        self.pending = Some(request);
        Some(line)
    }

    /// Updates the state with a line that the agent has sent.
    pub fn receive(&mut self, line: &str) {
        let code = line.get(..3).filter(|code| code.bytes().all(|byte| byte.is_ascii_digit()));
        match code {
            Some("220") => *self = Self::connected(),
            Some("201") => {
                if let Some(request) = self.pending.take() {
                    self.refusal = None;
                    self.user.clone_from(&request);
                    self.answered = Some(request);
                } else {
                    debug!(line, "the login agent reports a login that nobody has requested");
                }
            }
            Some("202") => {
                self.user = None;
                // While a login is pending, this is only the logout of the previous user.
                if self.pending == Some(None) {
                    self.refusal = None;
                    self.answered = self.pending.take();
                }
            }
            Some(code) if code.starts_with(['4', '5']) => {
                if let Some(request) = self.pending.take() {
                    self.refusal = Some(line.to_owned());
                    self.answered = Some(request);
                } else {
                    debug!(line, "the login agent refuses a request that nobody has sent");
                }
            }
            _ => debug!(line, "unknown line from the login agent"),
        }
    }
}

/// The longest line of an agent in bytes. The agent is a program in the guest, so the runner does not trust it.
const LONGEST_LINE: usize = 4096;
/// The time for sending a line. If the guest does not read, the port can buffer some hundred lines.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

/// How many lines of an agent are read at once, and then one in which time. Each takes a CPU, and a guest sends as many as it can. What is not read waits
/// in the port, and then the guest's program waits.
const LINES_AT_ONCE: u32 = 20;
const LINE_EVERY: Duration = Duration::from_millis(100);

/// A connection to the agent's port. The runner keeps it open as long as QEMU runs; otherwise it would miss the agent's `220`.
#[derive(Debug)]
pub struct LoginPort {
    lines: Lines,
    /// When the lines that were read would be due, one after another.
    due: Instant,
}

impl LoginPort {
    /// Connects to the port's socket.
    ///
    /// # Errors
    /// If QEMU does not listen on the socket: a custom QEMU template may not have the port.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        Ok(Self { lines: Lines::connect(socket, LONGEST_LINE).await?, due: Instant::now() })
    }

    /// Sends a line to the agent.
    ///
    /// # Errors
    /// If the connection is broken, or the guest does not read for a second while the port's buffer is full.
    pub async fn send(&mut self, line: &str) -> io::Result<()> {
        timeout(SEND_TIMEOUT, self.lines.send(format!("{line}\n").as_bytes())).await?
    }

    /// Returns the agent's next line, not too many in a second. Cancel safe: no line is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken or has ended, or the line is too long.
    pub async fn receive(&mut self) -> io::Result<String> {
        if let Some(turn) = self.due.checked_sub(LINE_EVERY * (LINES_AT_ONCE - 1)) {
            sleep_until(turn).await;
        }
        let line = self.lines.receive().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        self.due = self.due.max(Instant::now()) + LINE_EVERY;
        Ok(String::from_utf8_lossy(&line).trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_guest_that_does_not_read_or_sends_without_end_cannot_block_the_runner() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("port");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let mut port = LoginPort::connect(&socket).await.unwrap();
        let (mut guest, _) = listener.accept().await.unwrap();
        let mut sent = 0;
        while port.send("login alice").await.is_ok() {
            sent += 1;
            assert!(sent < 1_000_000, "nobody reads, but sending never fails");
        }
        let long = [b'x'; LONGEST_LINE + 1];
        tokio::io::AsyncWriteExt::write_all(&mut guest, &long).await.unwrap();
        assert_eq!(port.receive().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test(start_paused = true)]
    async fn lines_without_end_are_read_slowly_and_those_of_an_agent_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("port");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let mut port = LoginPort::connect(&socket).await.unwrap();
        let (mut guest, _) = listener.accept().await.unwrap();
        let flood = tokio::spawn(async move {
            let mut count = 0;
            while tokio::io::AsyncWriteExt::write_all(&mut guest, b"202\n").await.is_ok() {
                count += 1;
            }
            count
        });
        let start = Instant::now();
        for _ in 0..LINES_AT_ONCE {
            assert_eq!(port.receive().await.unwrap(), "202");
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        for _ in 0..50 {
            // An event of QEMU comes between.
            assert!(timeout(LINE_EVERY / 4, port.receive()).await.is_err());
            port.receive().await.unwrap();
        }
        assert!(start.elapsed() >= 50 * LINE_EVERY && start.elapsed() < 60 * LINE_EVERY, "{:?}", start.elapsed());
        // Then it may send a few at once again.
        tokio::time::sleep(LINE_EVERY * LINES_AT_ONCE).await;
        let start = Instant::now();
        for _ in 0..LINES_AT_ONCE {
            port.receive().await.unwrap();
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        drop(port);
        assert!(flood.await.unwrap() < 1_000_000, "the guest waits");
    }

    /// For how long this thread has had a CPU.
    fn cpu_time() -> Duration {
        let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    }

    #[tokio::test]
    async fn lines_without_end_take_no_cpu() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("port");
        let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        let mut port = LoginPort::connect(&socket).await.unwrap();
        let (mut guest, _) = listener.accept().unwrap();
        let flood = std::thread::spawn(move || while io::Write::write_all(&mut guest, b"202 bye\n").is_ok() {});
        let (mut login, start, before) = (LoginState::connected(), Instant::now(), cpu_time());
        while start.elapsed() < Duration::from_secs(1) {
            if let Ok(line) = timeout(LINE_EVERY, port.receive()).await {
                login.receive(&line.unwrap());
            }
        }
        let spent = cpu_time() - before;
        assert!(spent < Duration::from_millis(100), "{spent:?}");
        drop(port);
        flood.join().unwrap();
    }

    /// Replays a dialogue. A step `> x` sets the desired user, `< x` is a line of the agent. Returns the last state and all lines
    /// that the runner has sent.
    fn replay(dialogue: &[&str]) -> (LoginState, Vec<String>) {
        let (mut login, mut desired_user, mut sent) = (LoginState::default(), None, Vec::new());
        for step in dialogue {
            match step.split_at(2) {
                ("> ", "") => desired_user = None,
                ("> ", user) => desired_user = Some(user),
                (_, line) => login.receive(line),
            }
            sent.extend(login.next_request(desired_user));
        }
        (login, sent)
    }

    #[test]
    fn the_runner_sends_one_request_at_a_time_and_only_when_the_desired_user_changes() {
        let requests = |dialogue: &[&str]| replay(dialogue).1.join(", ");
        assert_eq!(requests(&["> alice"]), "", "the agent is not connected");
        assert_eq!(requests(&["< 220 hello"]), "", "no user is desired");
        assert_eq!(requests(&["> alice", "< 220 hello"]), "login alice");
        assert_eq!(requests(&["< 220", "> alice", "> bob"]), "login alice", "the agent has not answered yet");
        assert_eq!(requests(&["< 220", "> alice", "> bob", "< 110 soon", "< 201"]), "login alice, login bob");
        assert_eq!(requests(&["< 220", "> alice", "< 201", "> "]), "login alice, logout");
        assert_eq!(requests(&["< 220", "> alice", "< 201", "< 202"]), "login alice", "the user has logged out");
        assert_eq!(
            requests(&["< 220", "> alice", "< 201", "< 202", "< 500"]),
            "login alice",
            "a refusal without a request"
        );
        assert_eq!(requests(&["< 220", "> alice", "< 500", "< 500"]), "login alice", "two refusals of one request");
        assert_eq!(
            requests(&["< 220", "> alice", "< 201", "< 220"]),
            "login alice, login alice",
            "the guest has booted again"
        );
        assert_eq!(requests(&["< 220", "> al\nlogout"]), "", "a name cannot contain a second request");
        assert_eq!(
            requests(&["< 220", &format!("> {}", "x".repeat(LONGEST_NAME + 1))]),
            "",
            "nobody has a name so long"
        );
    }

    #[test]
    fn the_state_follows_the_answers_of_the_agent() {
        let known = |dialogue: &[&str]| {
            let LoginState { connected, user, refusal, .. } = replay(dialogue).0;
            (connected, user.unwrap_or_default(), refusal.unwrap_or_default())
        };
        let is = |connected, user: &str, refusal: &str| (connected, user.to_owned(), refusal.to_owned());
        assert_eq!(known(&[]), is(false, "", ""));
        assert_eq!(known(&["< 220", "> alice"]), is(true, "", ""));
        assert_eq!(known(&["< 220", "> alice", "< 201"]), is(true, "alice", ""));
        assert_eq!(
            known(&["< 220", "> alice", "< 202", "< 201"]),
            is(true, "alice", ""),
            "the previous user was logged out for her"
        );
        assert_eq!(known(&["< 220", "> alice", "< 201", "< 202"]), is(true, "", ""));
        assert_eq!(known(&["< 220", "> alice", "< 501 who?"]), is(true, "", "501 who?"));
        assert_eq!(known(&["< 220", "> alice", "< 501 who?", "> bob", "< 201"]), is(true, "bob", ""));
        assert_eq!(known(&["< 220", "> alice", "< 201", "> ", "< 202"]), is(true, "", ""));
        assert_eq!(known(&["< 220", "< 201", "< ü", "< 2"]), is(true, "", ""), "unknown lines change nothing");
        assert_eq!(known(&["< 220", "> "]).2, "");
        assert_eq!(known(&["< 220", "> a\u{7}"]), is(true, "", r#""a\u{7}" cannot be the name of a user"#));
    }
}
