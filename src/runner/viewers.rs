//! Who views the guest's consoles, and who controls the screen. Pure: events and times in, decisions out.
//!
//! ```text
//!  join, answer, leave, time ─▶ Viewers ─▶ decisions (let in, ask, replace, refuse)
//!                                  └─────▶ the list of viewers
//! ```
//!
//! Any number of viewers may watch, and any number may use the serial console. At most one session controls the screen. A session may have
//! several connections, such as the channels of SPICE.
//!
//! | wish | nobody controls, or another session of the same user | another user controls |
//! |---|---|---|
//! | watch | let in | let in |
//! | control | let in; the user's other session is replaced | refused |
//! | ask | let in; the user's other session is replaced | the one in control is asked; after [`ANSWER_TIME`] without an answer, control is handed over |
//! | take over | let in; the user's other session is replaced | control is handed over at once |
//!
//! Only one viewer asks at a time; another one that asks meanwhile is refused. If the one in control leaves, the one that asks gets control.
//! If a third one takes over, the one that asks is refused. Times are those since a start that the caller chooses.

use std::{collections::BTreeMap, time::Duration};

use crate::relay::{ANSWER_SECONDS, Console, Hello, Mode, Viewer, Wish};

/// How long a viewer in control has to answer one that asks. Then control is handed over.
pub const ANSWER_TIME: Duration = Duration::from_secs(ANSWER_SECONDS);

/// A viewer's connection. The caller never uses a number twice.
pub type Id = u64;

/// What the caller must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// Connect the viewer.
    LetIn(Id),
    /// Tell the viewer that the user in control is asked.
    Wait {
        /// The one that asks.
        asks: Id,
        /// The user in control.
        user: String,
    },
    /// Tell the viewer in control that another one asks.
    Question {
        /// A connection of the viewer in control.
        controller: Id,
        /// The one that asks.
        asks: Id,
        /// Its user.
        user: String,
    },
    /// Tell the viewer in control that nobody asks any more.
    Withdraw {
        /// A connection of the viewer in control.
        controller: Id,
        /// The one that has asked.
        asks: Id,
    },
    /// End the connection of a viewer that has lost control.
    Replace {
        /// The connection.
        id: Id,
        /// The user who has control now.
        user: String,
    },
    /// End the connection of a viewer that doesn't get control, because another user has it.
    InUse {
        /// The connection.
        id: Id,
        /// The user in control.
        user: String,
    },
    /// End the connection of a viewer whose question was answered with no.
    Refuse(Id),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Connection {
    hello: Hello,
    console: Console,
    mode: Mode,
    since: Duration,
}

impl Connection {
    fn controls_screen(&self) -> bool {
        self.console.is_exclusive() && self.mode == Mode::Controls
    }
}

/// All viewers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Viewers {
    all: BTreeMap<Id, Connection>,
    /// When the viewer that asks gets control.
    granted_at: Option<Duration>,
}

impl Viewers {
    /// The viewers: one for each session and console.
    pub fn list(&self, now: Duration) -> Vec<Viewer> {
        let mut list: Vec<Viewer> = Vec::new();
        for Connection { hello, console, mode, since } in self.all.values() {
            let seconds = now.saturating_sub(*since).as_secs();
            let viewer = Viewer {
                user: hello.user.clone(),
                session: hello.session.clone(),
                console: *console,
                mode: *mode,
                seconds,
            };
            if !list.iter().any(|other| viewer.is_same(other)) {
                list.push(viewer);
            }
        }
        list
    }

    /// When [`Viewers::pass_time`] must be called. `None`: nobody asks.
    pub fn next_time(&self) -> Option<Duration> {
        self.granted_at
    }

    /// A viewer connects.
    pub fn join(&mut self, id: Id, hello: Hello, console: Console, now: Duration) -> Vec<Decision> {
        let add = |viewers: &mut Self, mode| {
            viewers.all.insert(id, Connection { hello: hello.clone(), console, mode, since: now });
        };
        if hello.wish == Wish::Watch || !console.is_exclusive() {
            add(self, if hello.wish == Wish::Watch { Mode::Watches } else { Mode::Controls });
            return vec![Decision::LetIn(id)];
        }
        let Some((controller, present)) = self.controller() else {
            add(self, Mode::Controls);
            return vec![Decision::LetIn(id)];
        };
        let is_same_user = present.user == hello.user;
        if is_same_user && present.session == hello.session {
            add(self, Mode::Controls);
            return vec![Decision::LetIn(id)];
        }
        let user = present.user.clone();
        match hello.wish {
            Wish::Ask if !is_same_user => {
                if self.asks().is_some() {
                    return vec![Decision::InUse { id, user }];
                }
                self.granted_at = Some(now + ANSWER_TIME);
                add(self, Mode::Asks);
                let question = Decision::Question { controller, asks: id, user: hello.user };
                vec![Decision::Wait { asks: id, user }, question]
            }
            Wish::Control if !is_same_user => vec![Decision::InUse { id, user }],
            _ => {
                let mut decisions = self.replace(&hello.user);
                let asks = self.asks();
                if !is_same_user && let Some(asks) = asks {
                    self.remove(asks);
                    decisions.push(Decision::InUse { id: asks, user: hello.user.clone() });
                }
                add(self, Mode::Controls);
                decisions.push(Decision::LetIn(id));
                if is_same_user && let Some(asks) = asks {
                    // The same user is asked, in the new window.
                    let user = self.all.get(&asks).map(|it| it.hello.user.clone()).unwrap_or_default();
                    decisions.push(Decision::Question { controller: id, asks, user });
                }
                decisions
            }
        }
    }

    /// The viewer in control agrees that the one that asks gets control, or does not. An answer of anybody else, or to another question,
    /// changes nothing.
    pub fn answer(&mut self, id: Id, asks: Id, agrees: bool, now: Duration) -> Vec<Decision> {
        if !self.all.get(&id).is_some_and(Connection::controls_screen) || self.asks() != Some(asks) {
            return Vec::new();
        }
        if agrees {
            return self.hand_over(now);
        }
        self.remove(asks);
        vec![Decision::Refuse(asks)]
    }

    /// A viewer has disconnected.
    pub fn leave(&mut self, id: Id, now: Duration) -> Vec<Decision> {
        let Some(gone) = self.remove(id) else { return Vec::new() };
        match (gone.mode, self.controller()) {
            (Mode::Controls, None) if gone.console.is_exclusive() => self.hand_over(now),
            (Mode::Asks, Some((controller, _))) => vec![Decision::Withdraw { controller, asks: id }],
            _ => Vec::new(),
        }
    }

    /// Hands control over if the time for an answer is over.
    pub fn pass_time(&mut self, now: Duration) -> Vec<Decision> {
        if self.granted_at.is_some_and(|at| at <= now) { self.hand_over(now) } else { Vec::new() }
    }

    fn hand_over(&mut self, now: Duration) -> Vec<Decision> {
        let Some(next) = self.asks() else { return Vec::new() };
        let user = self.all.get(&next).map(|it| it.hello.user.clone()).unwrap_or_default();
        let mut decisions = self.replace(&user);
        if let Some(viewer) = self.all.get_mut(&next) {
            (viewer.mode, viewer.since) = (Mode::Controls, now);
        }
        self.granted_at = None;
        decisions.push(Decision::LetIn(next));
        decisions
    }

    /// Takes control from the session that has it.
    fn replace(&mut self, user: &str) -> Vec<Decision> {
        let lost = self.all.extract_if(.., |_, connection| connection.controls_screen());
        lost.map(|(id, _)| Decision::Replace { id, user: user.to_owned() }).collect()
    }

    /// The first connection of the session in control.
    fn controller(&self) -> Option<(Id, &Hello)> {
        self.all.iter().find(|(_, it)| it.controls_screen()).map(|(id, it)| (*id, &it.hello))
    }

    fn asks(&self) -> Option<Id> {
        self.all.iter().find(|(_, it)| it.mode == Mode::Asks).map(|(id, _)| *id)
    }

    fn remove(&mut self, id: Id) -> Option<Connection> {
        let gone = self.all.remove(&id)?;
        if gone.mode == Mode::Asks {
            self.granted_at = None;
        }
        Some(gone)
    }
}

#[cfg(test)]
mod tests;
