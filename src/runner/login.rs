//! The login agent: a program in the guest that logs a user in and out of the desktop when it is told to.
//!
//! It listens on the virtio port `org.jdrupes.vmop_agent.0`. Both sides write lines of text; the agent's begin with a code of
//! three digits:
//!
//! | who | line | meaning |
//! |---|---|---|
//! | agent | `220 ...` | it is there (said once, when it opens its port) |
//! | runner | `login USER` | log the user in |
//! | agent | `201 ...` | done |
//! | runner | `logout` | log out whoever is logged in |
//! | agent | `202 ...` | done, or a user has logged out |
//! | agent | `4.. ...`, `5.. ...` | no, with the reason |
//!
//! A user who logs out is not logged in again until somebody asks for that, or the agent starts anew.

use std::{io, path::Path, time::Duration};

use tokio::time::timeout;
use tracing::debug;

use super::lines::Lines;

/// What is known of the agent and its user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Login {
    /// Whether there is an agent.
    pub connected: bool,
    /// Who is logged in.
    pub user: Option<String>,
    /// Why the agent did not do what it was told last.
    pub refusal: Option<String>,
    asked: Option<Order>,
    done: Option<Order>,
}

/// What the agent was told: the user to log in, or nobody.
type Order = Option<String>;

impl Login {
    /// A port that is open when the conversation begins: its agent was greeted by somebody before us.
    pub fn found_open() -> Self {
        Self { connected: true, ..Self::default() }
    }

    /// What to tell the agent, who does one thing after the other.
    pub fn next(&mut self, wanted: Option<&str>) -> Option<String> {
        let order = wanted.filter(|user| !user.is_empty()).map(str::to_owned);
        if !self.connected || self.asked.is_some() || self.done.as_ref().unwrap_or(&None) == &order {
            return None;
        }
        let Some(user) = &order else {
            self.asked = Some(order);
            return Some("logout".into());
        };
        if user.chars().any(char::is_control) {
            self.refusal = Some(format!("{user:?} cannot be the name of a user"));
            self.done = Some(order);
            return None;
        }
        let line = format!("login {user}");
        self.asked = Some(order);
        Some(line)
    }

    /// Takes in a line of the agent's.
    pub fn hear(&mut self, line: &str) {
        let code = line.get(..3).filter(|code| code.bytes().all(|byte| byte.is_ascii_digit()));
        match code {
            Some("220") => *self = Self::found_open(),
            Some("201") => {
                if let Some(order) = self.asked.take() {
                    self.refusal = None;
                    self.user.clone_from(&order);
                    self.done = Some(order);
                } else {
                    debug!(line, "the login agent speaks of a user that it was not asked for");
                }
            }
            Some("202") => {
                self.user = None;
                // A login that is under way ends what was there before.
                if self.asked == Some(None) {
                    self.refusal = None;
                    self.done = self.asked.take();
                }
            }
            Some(code) if code.starts_with(['4', '5']) => {
                if let Some(order) = self.asked.take() {
                    self.refusal = Some(line.to_owned());
                    self.done = Some(order);
                } else {
                    debug!(line, "the login agent refuses what nobody asked for");
                }
            }
            _ => debug!(line, "the login agent"),
        }
    }
}

/// The longest line of an agent. It is a program in the guest, which nobody has to trust.
const LONGEST_LINE: usize = 4096;
/// How long a line may take to be taken. The port holds some hundreds of them for a guest that does not read.
const PATIENCE: Duration = Duration::from_secs(1);

/// The agent's port. It is open for as long as QEMU runs, or the agent's greeting would be lost.
#[derive(Debug)]
pub struct Port(Lines);

impl Port {
    /// Connects to the port's socket.
    ///
    /// # Errors
    /// If QEMU does not listen there: a template of the user's may have left the port out.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        Lines::connect(socket, LONGEST_LINE).await.map(Self)
    }

    /// Tells the agent something.
    ///
    /// # Errors
    /// If the connection is broken, or the guest does not read.
    pub async fn tell(&mut self, line: &str) -> io::Result<()> {
        timeout(PATIENCE, self.0.send(format!("{line}\n").as_bytes())).await?
    }

    /// What the agent says next. Nothing is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken or ends, or the agent sends more than a line can be.
    pub async fn hear(&mut self) -> io::Result<String> {
        let line = self.0.receive().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(String::from_utf8_lossy(&line).trim().to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_guest_that_does_not_listen_or_does_not_stop_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("port");
        let listener = tokio::net::UnixListener::bind(&socket).unwrap();
        let mut port = Port::connect(&socket).await.unwrap();
        let (mut guest, _) = listener.accept().await.unwrap();
        let mut told = 0;
        while port.tell("login alice").await.is_ok() {
            told += 1;
            assert!(told < 1_000_000, "somebody reads");
        }
        let long = [b'x'; LONGEST_LINE + 1];
        tokio::io::AsyncWriteExt::write_all(&mut guest, &long).await.unwrap();
        assert_eq!(port.hear().await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    /// Plays a conversation: `> x` is what we want, `< x` what the agent says; what we tell it is noted.
    fn told(conversation: &[&str]) -> (Login, Vec<String>) {
        let (mut login, mut wanted, mut told) = (Login::default(), None, Vec::new());
        for step in conversation {
            match step.split_at(2) {
                ("> ", "") => wanted = None,
                ("> ", user) => wanted = Some(user),
                (_, line) => login.hear(line),
            }
            told.extend(login.next(wanted));
        }
        (login, told)
    }

    #[test]
    fn users_are_logged_in_and_out_one_after_the_other() {
        let orders = |conversation: &[&str]| told(conversation).1.join(", ");
        assert_eq!(orders(&["> alice"]), "", "nobody is there");
        assert_eq!(orders(&["< 220 hello"]), "", "nobody is wanted");
        assert_eq!(orders(&["> alice", "< 220 hello"]), "login alice");
        assert_eq!(orders(&["< 220", "> alice", "> bob"]), "login alice", "it is busy");
        assert_eq!(orders(&["< 220", "> alice", "> bob", "< 110 soon", "< 201"]), "login alice, login bob");
        assert_eq!(orders(&["< 220", "> alice", "< 201", "> "]), "login alice, logout");
        assert_eq!(orders(&["< 220", "> alice", "< 201", "< 202"]), "login alice", "she went by herself");
        assert_eq!(orders(&["< 220", "> alice", "< 201", "< 202", "< 500"]), "login alice", "nor is she asked for now");
        assert_eq!(orders(&["< 220", "> alice", "< 500", "< 500"]), "login alice", "it says no twice");
        assert_eq!(orders(&["< 220", "> alice", "< 201", "< 220"]), "login alice, login alice", "another boot");
        assert_eq!(orders(&["< 220", "> al\nlogout"]), "", "one line is one order");
    }

    #[test]
    fn what_is_known_of_the_user() {
        let known = |conversation: &[&str]| {
            let Login { connected, user, refusal, .. } = told(conversation).0;
            (connected, user.unwrap_or_default(), refusal.unwrap_or_default())
        };
        let is = |connected, user: &str, refusal: &str| (connected, user.to_owned(), refusal.to_owned());
        assert_eq!(known(&[]), is(false, "", ""));
        assert_eq!(known(&["< 220", "> alice"]), is(true, "", ""));
        assert_eq!(known(&["< 220", "> alice", "< 201"]), is(true, "alice", ""));
        assert_eq!(known(&["< 220", "> alice", "< 202", "< 201"]), is(true, "alice", ""), "bob went for her");
        assert_eq!(known(&["< 220", "> alice", "< 201", "< 202"]), is(true, "", ""));
        assert_eq!(known(&["< 220", "> alice", "< 501 who?"]), is(true, "", "501 who?"));
        assert_eq!(known(&["< 220", "> alice", "< 501 who?", "> bob", "< 201"]), is(true, "bob", ""));
        assert_eq!(known(&["< 220", "> alice", "< 201", "> ", "< 202"]), is(true, "", ""));
        assert_eq!(known(&["< 220", "< 201", "< ü", "< 2"]), is(true, "", ""), "noise");
        assert_eq!(known(&["< 220", "> "]).2, "");
        assert_eq!(known(&["< 220", "> a\u{7}"]), is(true, "", r#""a\u{7}" cannot be the name of a user"#));
    }
}
