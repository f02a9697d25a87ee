//! The relay's protocol: how a program outside a Pod reaches the screen and the serial console of the guest in it.
//!
//! ```text
//!  kubectl vm, a web server ──TLS, WebSocket──▶ the relay (in the agent) ──Unix socket──▶ QEMU
//! ```
//!
//! The relay listens on one port of the Pod ([`PORT`]; the VM's `status.relayPort` has the real one). Its certificate, the key and a token
//! are in the Secret `NAME-relay`, which the manager makes once. A client checks that the relay has exactly this certificate, and
//! sends the token as `Authorization: Bearer TOKEN` with the request for one of the paths of [`Console`], or [`VIEWERS`], [`FIGURES`] or
//! [`PICTURE`].
//!
//! On the path of a console, the client's first message is a [`Hello`] as JSON in a text message. From then on binary messages are the bytes of
//! the console, and text messages are [`News`] and [`Answer`]. The relay ends a connection with one of the codes of [`Closed`], and a reason for people.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The port on which the relay listens, unless another VM in the node's network has it already. A guest of a Pod network has the ports from 1 to
/// 9999.
pub const PORT: u16 = 10443;

/// The path on which the relay sends the list of viewers, and again whenever it changes: text messages, each a list of [`Viewer`].
pub const VIEWERS: &str = "/viewers";

/// The path on which the relay sends the guest's figures every [`FIGURES_EVERY`]: text messages, each a
/// [`GuestStats`](crate::api::stats::GuestStats).
pub const FIGURES: &str = "/figures";

/// The pause between figures.
pub const FIGURES_EVERY: Duration = Duration::from_secs(2);

/// The path on which the relay sends a picture of the screen, binary messages that together are a PNG, and ends the connection without
/// a code. No viewer is told of it.
pub const PICTURE: &str = "/picture";

/// The most bytes of a picture.
pub const LONGEST_PICTURE: u64 = 4 << 20;

/// The files of the relay in the agent's container: the certificate, its key, and the token.
pub const FILES: [&str; 3] = ["tls.crt", "tls.key", "token"];

/// The name of the Secret of a VM's relay.
pub fn secret_name(vm: &str) -> String {
    format!("{vm}-relay")
}

/// The longest name of a user or a session, in bytes.
const LONGEST_NAME: usize = 256;

/// What a client can see of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Console {
    /// The screen, by VNC. It wants no password: the relay has checked who it is.
    Vnc,
    /// The screen, by SPICE, if the VM's display is SPICE without a port (`display.spice.port: 0`). Each channel is a connection.
    Spice,
    /// The serial console: its last output, then what the guest writes.
    Serial,
}

impl Console {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Vnc, Self::Spice, Self::Serial];

    /// The path of its WebSocket.
    pub fn path(self) -> &'static str {
        match self {
            Self::Vnc => "/vnc",
            Self::Spice => "/spice",
            Self::Serial => "/serial",
        }
    }

    /// Whether one viewer at most may use it. What is typed into a serial console by several people arrives as a whole.
    pub fn is_exclusive(self) -> bool {
        self != Self::Serial
    }
}

/// Who the client is, and what it wants.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hello {
    /// The user, as the other viewers see it.
    pub user: String,
    /// The user's session. The connections of one session, such as the channels of SPICE, are one viewer.
    pub session: String,
    /// What it wants.
    pub wish: Wish,
}

impl Hello {
    /// What is wrong with the names, if something is.
    pub fn problem(&self) -> Option<&'static str> {
        let is_name = |name: &str| {
            (1..=LONGEST_NAME).contains(&name.len()) && !name.trim().is_empty() && !name.chars().any(is_obeyed)
        };
        (!is_name(&self.user) || !is_name(&self.session))
            .then_some("user and session have 1 to 256 bytes, not only blanks, without control and format characters")
    }
}

/// Whether a terminal or a browser obeys the character in place of showing it: controls, separators of lines, and what changes the direction of
/// text or is not seen (Unicode's categories Cc, Zl, Zp, and most of Cf).
fn is_obeyed(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// What a viewer wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Wish {
    /// To see only. What it types does not reach the guest.
    Watch,
    /// To use the console, unless another user does.
    Control,
    /// To use the console. If another user does, that one is asked, and has [`ANSWER_SECONDS`] to answer; without an answer the one that asks gets
    /// the console.
    Ask,
    /// To use the console, at once.
    TakeOver,
}

/// How long a viewer has to answer another one that asks for the console.
pub const ANSWER_SECONDS: u64 = 10;

/// What the relay tells a viewer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum News {
    /// The viewer is connected; the console's bytes follow.
    Connected {
        /// Whether what it types reaches the guest.
        controls: bool,
    },
    /// Another user has the console, and is asked.
    Asking {
        /// The user who has it.
        user: String,
        /// The time for the answer, in seconds.
        seconds: u64,
    },
    /// Another user asks for the console. The viewer may send an [`Answer`].
    Question {
        /// The question's number.
        id: u64,
        /// The user who asks.
        user: String,
        /// The time for the answer, in seconds.
        seconds: u64,
    },
    /// A question needs no answer any more.
    Withdrawn {
        /// The question's number.
        id: u64,
    },
}

/// The answer to [`News::Question`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Answer {
    /// The question's number.
    pub id: u64,
    /// Whether the other user gets the console.
    pub agrees: bool,
}

/// A viewer, for the list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Viewer {
    /// The user.
    pub user: String,
    /// The session.
    pub session: String,
    /// What it sees.
    pub console: Console,
    /// What it does.
    pub mode: Mode,
    /// For how many seconds it does that.
    pub seconds: u64,
}

impl Viewer {
    /// Whether both are the same viewer that does the same, at whatever time.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.user, &self.session, self.console, self.mode) == (&other.user, &other.session, other.console, other.mode)
    }
}

/// What a viewer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Mode {
    /// It sees only.
    Watches,
    /// It waits for an answer.
    Asks,
    /// What it types reaches the guest.
    Controls,
}

/// Why the relay has ended a connection: the code of the WebSocket's close frame (4000 to 4999 are an application's own, RFC 6455, 7.4.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Closed {
    /// The guest has ended, or starts again. The client may connect again.
    GuestEnded = 4000,
    /// The VM has no such console at present.
    NoConsole = 4001,
    /// Another user uses the console. The reason is the user's name.
    InUse = 4002,
    /// The user who was asked has said no.
    Refused = 4003,
    /// Another viewer has the console now. The reason is the user's name.
    TakenOver = 4004,
    /// The client has sent something that it may not send.
    BadRequest = 4005,
    /// The relay ends, with its Pod or because it is replaced. The client may connect again.
    RelayEnds = 4006,
}

impl Closed {
    /// The reason with this code.
    pub fn of(code: u16) -> Option<Self> {
        let all = [
            Self::GuestEnded,
            Self::NoConsole,
            Self::InUse,
            Self::Refused,
            Self::TakenOver,
            Self::BadRequest,
            Self::RelayEnds,
        ];
        all.into_iter().find(|closed| *closed as u16 == code)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_texts_that_are_shown_as_they_are() {
        let hello = |user: &str| Hello { user: user.into(), session: "s".into(), wish: Wish::Watch };
        for name in ["ann", "Jürgen Müller", "ann@example.com", "李"] {
            assert_eq!(hello(name).problem(), None, "{name}");
        }
        for name in ["", "  ", "a\nb", "\u{202e}gnp", "a\u{2028}b", "\u{200b}", &"x".repeat(257)] {
            assert!(hello(name).problem().is_some(), "{name:?}");
        }
    }
}
