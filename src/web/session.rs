//! Sessions: who is signed in, since when, and until when.
//!
//! A session is a cookie that only this program can read and write. So nothing is lost if another replica gets the next request, or the
//! program is started again with the same key. What a cookie can't say is kept here: which sessions were ended before their time ([`super::revoked`]),
//! and the last use of those that have a page open.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum_extra::extract::cookie::{Cookie, SameSite};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use super::{provider::Profile, revoked::Revoked};
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
    /// When she signed in, in milliseconds since 1970.
    since: i64,
    /// When the session was used last, in seconds since 1970.
    used: i64,
}

/// A name that nobody can guess: 128 random bits as 32 digits.
///
/// # Errors
/// If the operating system has no random numbers.
pub(super) fn random_name() -> Result<String, getrandom::Error> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    Ok(format!("{:032x}", u128::from_be_bytes(bits)))
}

impl Session {
    /// A session that begins now.
    ///
    /// # Errors
    /// If the operating system has no random numbers.
    pub fn begin(by: SignIn, now: Timestamp) -> Result<Self, getrandom::Error> {
        Ok(Self { id: random_name()?, by, since: now.as_millisecond(), used: now.as_second() })
    }

    /// What stands for the session where others can read it: whoever knows it can't make the session of it.
    pub fn digest(&self) -> String {
        Sha256::digest(&self.id).iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }

    /// When it ends at the latest, in seconds since 1970.
    const fn latest_end(&self) -> i64 {
        self.since.div_euclid(1000).saturating_add(LONGEST.as_secs())
    }

    /// When it ends, if it was last used at the later of these times.
    fn end(&self, used: Option<i64>) -> i64 {
        let used = self.used.max(used.unwrap_or(i64::MIN));
        used.saturating_add(IDLE.as_secs()).min(self.latest_end())
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

/// What is known of sessions.
#[derive(Clone, Default)]
pub(super) struct Sessions {
    /// Those of which this program has had requests.
    known: Arc<Mutex<HashMap<String, Known>>>,
    /// Those that have ended before their time, here or elsewhere.
    revoked: watch::Sender<Arc<Revoked>>,
}

struct Known {
    used: i64,
    /// Until when this must be remembered.
    until: i64,
}

/// How many sessions are remembered, some 20 MB. Only people who can sign in make one, but each may make many.
const MOST: usize = 100_000;

/// Forgets the sessions that have ended, and if these are few those that were not used for longest: of these the cookies say enough.
fn make_room(known: &mut HashMap<String, Known>, now: i64) {
    known.retain(|_, known| known.until > now);
    let surplus = known.len().saturating_sub(MOST - MOST / 100);
    if surplus > 0 {
        let mut uses: Vec<i64> = known.values().map(|known| known.used).collect();
        let (_, last, _) = uses.select_nth_unstable(surplus - 1);
        let last = *last;
        let mut left = surplus;
        known.retain(|_, known| {
            let goes = left > 0 && known.used <= last;
            left -= usize::from(goes);
            !goes
        });
    }
}

impl Sessions {
    /// Notes a use. Whether the session of that user goes on.
    pub fn used(&self, session: &Session, user: &str, now: Timestamp) -> bool {
        self.goes_on(session, user, now, true)
    }

    /// Whether the session of that user goes on. With `is_use` this is a use of it.
    pub fn goes_on(&self, session: &Session, user: &str, now: Timestamp, is_use: bool) -> bool {
        let now = now.as_second();
        if self.is_revoked(session, user) {
            return false;
        }
        let mut known = lock(&self.known);
        if known.len() >= MOST && !known.contains_key(&session.id) {
            make_room(&mut known, now);
        }
        let known = known
            .entry(session.id.clone())
            .or_insert_with(|| Known { used: session.used, until: session.latest_end() });
        if session.end(Some(known.used)) <= now {
            return false;
        }
        if is_use {
            known.used = known.used.max(now);
        }
        true
    }

    fn is_revoked(&self, session: &Session, user: &str) -> bool {
        self.revoked.borrow().has(&session.digest(), user, session.since)
    }

    /// Ends a session.
    pub fn end(&self, session: &Session) {
        self.learn(&Revoked::session(session.digest(), session.latest_end()));
    }

    /// Learns of sessions that have ended.
    pub fn learn(&self, more: &Revoked) {
        self.revoked.send_if_modified(|revoked| Arc::make_mut(revoked).add(more));
    }

    /// The sessions that have ended before their time, and each change.
    pub fn changes(&self) -> watch::Receiver<Arc<Revoked>> {
        self.revoked.subscribe()
    }

    /// Returns when the session of that user ends: before its time, or because its time is over.
    pub async fn ended(&self, session: &Session, user: &str) {
        let mut changes = self.revoked.subscribe();
        loop {
            // Marked as seen before the look, so that no change is missed.
            changes.borrow_and_update();
            let end = lock(&self.known).get(&session.id).map(|known| session.end(Some(known.used)));
            let left = end.map(|end| end.saturating_sub(Timestamp::now().as_second()));
            let Some(Ok(left @ 1..)) = left.map(u64::try_from) else { return };
            if self.is_revoked(session, user) {
                return;
            }
            tokio::select! {
                _ = changes.changed() => {}
                // It may have been used meanwhile.
                () = tokio::time::sleep(Duration::from_secs(left)) => {}
            }
        }
    }

    /// Forgets sessions whose cookies are too old for any use.
    pub fn forget(&self, now: Timestamp) {
        let now = now.as_second();
        lock(&self.known).retain(|_, known| known.until > now);
        // Nobody has to learn of it.
        self.revoked.send_if_modified(|revoked| {
            Arc::make_mut(revoked).forget(now, LONGEST.as_secs());
            false
        });
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
        assert!(sessions.used(&session, "ann", after(idle - 1)));
        // The cookie is as it was; this program knows of the use.
        assert!(sessions.used(&session, "ann", after(2 * idle - 2)));
        assert!(!sessions.used(&session, "ann", after(3 * idle - 2)), "not used for {idle} min");
        // Another replica knows only the cookie.
        assert!(!Sessions::default().used(&session, "ann", after(idle)));
        let sessions = Sessions::default();
        let mut session = session;
        for minute in (1..longest).step_by(10) {
            assert!(sessions.used(&session, "ann", after(minute)));
            session = session.used_at(after(minute)).unwrap_or(session);
        }
        assert!(!sessions.used(&session, "ann", after(longest)), "used all the time");
    }

    #[test]
    fn a_look_at_a_session_is_no_use() {
        let (session, sessions) = (begin(noon()).unwrap(), Sessions::default());
        assert!(sessions.goes_on(&session, "ann", after(IDLE.as_mins() - 1), false));
        assert!(!sessions.goes_on(&session, "ann", after(IDLE.as_mins()), false));
    }

    #[test]
    fn a_session_that_was_ended_does_not_come_back_with_its_cookie() {
        let (session, other) = (begin(noon()).unwrap(), begin(noon()).unwrap());
        assert_ne!(session.id, other.id);
        let sessions = Sessions::default();
        sessions.end(&session);
        assert!(!sessions.used(&session, "ann", after(1)) && sessions.used(&other, "ann", after(1)));
        sessions.forget(after(LONGEST.as_mins() - 1));
        assert!(!sessions.used(&session, "ann", after(1)), "it is remembered for as long as its cookie is good");
    }

    #[test]
    fn sessions_that_end_elsewhere_end_here() {
        let (session, other) = (begin(noon()).unwrap(), begin(after(2)).unwrap());
        let (here, elsewhere) = (Sessions::default(), Sessions::default());
        let mut changes = here.changes();
        here.end(&session);
        assert!(changes.has_changed().unwrap());
        elsewhere.learn(&changes.borrow_and_update());
        assert!(!elsewhere.used(&session, "ann", after(3)) && elsewhere.used(&other, "ann", after(3)));
        let all = Revoked::user("ann".into(), after(1).as_millisecond());
        elsewhere.learn(&all);
        assert!(!elsewhere.used(&begin(after(1)).unwrap(), "ann", after(3)));
        assert!(elsewhere.used(&other, "ann", after(3)) && elsewhere.used(&begin(after(1)).unwrap(), "bob", after(3)));
        elsewhere.learn(&all);
        let mut changes = elsewhere.changes();
        elsewhere.forget(after(1));
        assert!(!changes.has_changed().unwrap(), "nothing new");
        assert_ne!(session.digest(), session.id);
        drop(changes.borrow_and_update());
    }

    #[test]
    fn the_sessions_that_are_remembered_have_a_limit() {
        let sessions = Sessions::default();
        let first = begin(noon()).unwrap();
        assert!(sessions.used(&first, "ann", after(1)));
        for number in 0..MOST + 10 {
            let session = Session { id: number.to_string(), ..begin(noon()).unwrap() };
            assert!(sessions.goes_on(&session, "bob", noon(), false));
        }
        let count = lock(&sessions.known).len();
        assert!(count <= MOST && count > MOST - MOST / 50, "{count}");
        assert!(lock(&sessions.known).contains_key(&first.id), "it was used last");
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
        assert!(sessions.used(&session, "ann", now));
        let waits = tokio::spawn({
            let (session, sessions) = (session.clone(), sessions.clone());
            async move { sessions.ended(&session, "ann").await }
        });
        sessions.end(&session);
        waits.await.unwrap();
        let old = begin(now - LONGEST).unwrap();
        assert!(!sessions.used(&old, "ann", now));
        sessions.ended(&old, "ann").await;
    }
}
