//! Sessions: who is signed in, since when, and until when.
//!
//! A session is a cookie that only this program can read and write. So nothing is lost if another replica gets the next request, or the
//! program is started again with the same key. What a cookie can't say is kept here: which sessions were ended before their time, and the last use of
//! those that have a page open.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum_extra::extract::cookie::{Cookie, SameSite};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use super::provider::Profile;
use crate::process::lock;

/// The cookie. A browser takes a name with this prefix only over HTTPS (or from this computer), for this host and for all paths.
pub(super) const COOKIE: &str = "__Host-session";

/// After this time without a use a session ends.
pub(super) const IDLE: SignedDuration = SignedDuration::from_mins(30);
/// After this time a session ends.
pub(super) const LONGEST: SignedDuration = SignedDuration::from_hours(12);
/// How old the last use in a cookie may be before the cookie is written again.
const REFRESH: SignedDuration = SignedDuration::from_mins(1);

/// By what a person has signed in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SignIn {
    /// With the password of the user of that name.
    Password(String),
    /// With the provider of that name, and what it says of her. Who she is here follows from that with each request.
    Provider(String, Profile),
}

/// The content of the cookie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Session {
    /// A random name: it says nothing about the user.
    pub id: String,
    /// By what the person has signed in.
    pub by: SignIn,
    /// When she signed in, in seconds since 1970.
    since: i64,
    /// When the session was used last, in seconds since 1970.
    used: i64,
}

impl Session {
    /// A session that begins now.
    ///
    /// # Errors
    /// If the operating system has no random numbers.
    pub fn begin(by: SignIn, now: Timestamp) -> Result<Self, getrandom::Error> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)?;
        let now = now.as_second();
        Ok(Self { id: format!("{:032x}", u128::from_be_bytes(id)), by, since: now, used: now })
    }

    /// When it ends, if it was last used at the later of these times.
    fn end(&self, used: Option<i64>) -> i64 {
        let used = self.used.max(used.unwrap_or(i64::MIN));
        used.saturating_add(IDLE.as_secs()).min(self.since.saturating_add(LONGEST.as_secs()))
    }

    /// The session as it is after a use. `None`: the cookie is new enough.
    pub fn used_at(&self, now: Timestamp) -> Option<Self> {
        let now = now.as_second();
        (now - self.used >= REFRESH.as_secs()).then(|| Self { used: now, ..self.clone() })
    }

    /// The cookie of this session. It ends with the browser.
    pub fn cookie(&self) -> Cookie<'static> {
        let value = serde_json::to_string(self).unwrap_or_default();
        Cookie::build((COOKIE, value)).path("/").secure(true).http_only(true).same_site(SameSite::Lax).build()
    }

    /// The cookie that takes the place of a session's.
    pub fn no_cookie() -> Cookie<'static> {
        Cookie::build((COOKIE, "")).path("/").secure(true).http_only(true).same_site(SameSite::Lax).build()
    }

    /// Reads a cookie that this program has written.
    pub fn read(cookie: &Cookie<'_>) -> Option<Self> {
        serde_json::from_str(cookie.value()).ok()
    }
}

/// What is known of the sessions of which this program has had requests.
#[derive(Clone, Default)]
pub(super) struct Sessions(Arc<Mutex<HashMap<String, Known>>>);

struct Known {
    used: i64,
    /// Until when this must be remembered.
    until: i64,
    /// Whether the user has signed out.
    ended: watch::Sender<bool>,
}

/// How many sessions are remembered. Only people who can sign in make one.
const MOST: usize = 100_000;

impl Sessions {
    /// Notes a use. Whether the session goes on.
    pub fn used(&self, session: &Session, now: Timestamp) -> bool {
        self.goes_on(session, now, true)
    }

    /// Whether the session goes on. With `is_use` this is a use of it.
    pub fn goes_on(&self, session: &Session, now: Timestamp, is_use: bool) -> bool {
        let now = now.as_second();
        let mut known = lock(&self.0);
        if known.len() >= MOST {
            known.retain(|_, known| known.until > now);
        }
        let known = known.entry(session.id.clone()).or_insert_with(|| Known {
            used: session.used,
            until: session.since.saturating_add(LONGEST.as_secs()),
            ended: watch::Sender::new(false),
        });
        if *known.ended.borrow() || session.end(Some(known.used)) <= now {
            return false;
        }
        if is_use {
            known.used = known.used.max(now);
        }
        true
    }

    /// Ends a session.
    pub fn end(&self, session: &Session, now: Timestamp) {
        if self.used(session, now)
            && let Some(known) = lock(&self.0).get(&session.id)
        {
            known.ended.send_replace(true);
        }
    }

    /// Returns when the session ends: its user has signed out, or its time is over.
    pub async fn ended(&self, session: &Session) {
        loop {
            let (mut ended, end) = match lock(&self.0).get(&session.id) {
                Some(known) => (known.ended.subscribe(), session.end(Some(known.used))),
                None => return,
            };
            let left = end.saturating_sub(Timestamp::now().as_second());
            let Ok(left @ 1..) = u64::try_from(left) else { return };
            tokio::select! {
                _ = ended.wait_for(|ended| *ended) => return,
                // It may have been used meanwhile.
                () = tokio::time::sleep(Duration::from_secs(left)) => {}
            }
        }
    }

    /// Forgets sessions whose cookies are too old for any use.
    pub fn forget(&self, now: Timestamp) {
        lock(&self.0).retain(|_, known| known.until > now.as_second());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::noon;

    fn begin(now: Timestamp) -> Result<Session, getrandom::Error> {
        Session::begin(SignIn::Password("ann".into()), now)
    }

    fn after(minutes: i64) -> Timestamp {
        noon() + SignedDuration::from_mins(minutes)
    }

    #[test]
    fn a_session_ends_when_it_is_not_used_and_after_its_longest_time() {
        let session = begin(noon()).unwrap();
        let (idle, longest) = (IDLE.as_mins(), LONGEST.as_mins());
        let sessions = Sessions::default();
        assert!(sessions.used(&session, after(idle - 1)));
        // The cookie is as it was; this program knows of the use.
        assert!(sessions.used(&session, after(2 * idle - 2)));
        assert!(!sessions.used(&session, after(3 * idle - 2)), "not used for {idle} min");
        // Another replica knows only the cookie.
        assert!(!Sessions::default().used(&session, after(idle)));
        let sessions = Sessions::default();
        let mut session = session;
        for minute in (1..longest).step_by(10) {
            assert!(sessions.used(&session, after(minute)));
            session = session.used_at(after(minute)).unwrap_or(session);
        }
        assert!(!sessions.used(&session, after(longest)), "used all the time");
    }

    #[test]
    fn a_look_at_a_session_is_no_use() {
        let (session, sessions) = (begin(noon()).unwrap(), Sessions::default());
        assert!(sessions.goes_on(&session, after(IDLE.as_mins() - 1), false));
        assert!(!sessions.goes_on(&session, after(IDLE.as_mins()), false));
    }

    #[test]
    fn a_session_that_was_ended_does_not_come_back_with_its_cookie() {
        let (session, other) = (begin(noon()).unwrap(), begin(noon()).unwrap());
        assert_ne!(session.id, other.id);
        let sessions = Sessions::default();
        sessions.end(&session, noon());
        assert!(!sessions.used(&session, after(1)) && sessions.used(&other, after(1)));
        sessions.forget(after(LONGEST.as_mins() - 1));
        assert!(!sessions.used(&session, after(1)), "it is remembered for as long as its cookie is good");
    }

    #[test]
    fn a_cookie_is_written_again_after_a_minute() {
        let session = begin(noon()).unwrap();
        assert_eq!(session.used_at(noon()), None);
        let later = session.used_at(after(1)).unwrap();
        assert_eq!((later.since, later.used - session.used), (session.since, 60));
        assert_eq!(Session::read(&later.cookie()), Some(later));
    }

    #[tokio::test]
    async fn whoever_waits_for_the_end_is_told() {
        let now = Timestamp::now();
        let (session, sessions) = (begin(now).unwrap(), Sessions::default());
        assert!(sessions.used(&session, now));
        let waits = tokio::spawn({
            let (session, sessions) = (session.clone(), sessions.clone());
            async move { sessions.ended(&session).await }
        });
        sessions.end(&session, now);
        waits.await.unwrap();
        let old = begin(now - LONGEST).unwrap();
        assert!(!sessions.used(&old, now));
        sessions.ended(&old).await;
    }
}
