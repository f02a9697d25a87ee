//! Which sessions have ended before their time: single ones, and all that a user began before a moment. It only grows, until its entries are of no use
//! any more; so what several replicas know is united, in whatever order they learn of each other.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How many sessions are kept. Those that would have ended first go first: a Secret has 1 MiB at most.
const MOST: usize = 10_000;

/// Sessions that have ended before their time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Revoked {
    /// By a digest of the session's name: when it would have ended at the latest, in seconds since 1970.
    #[serde(default)]
    sessions: BTreeMap<String, i64>,
    /// By user: the moment until which a session of hers must not have begun, in milliseconds since 1970.
    #[serde(default)]
    users: BTreeMap<String, i64>,
}

impl Revoked {
    /// One session.
    pub fn session(digest: String, until: i64) -> Self {
        Self { sessions: [(digest, until)].into(), ..Self::default() }
    }

    /// All sessions that a user has begun until then, in milliseconds since 1970.
    pub fn user(user: String, until: i64) -> Self {
        Self { users: [(user, until)].into(), ..Self::default() }
    }

    /// Whether the session has ended. `since`: when it began, in milliseconds since 1970.
    pub fn has(&self, digest: &str, user: &str, since: i64) -> bool {
        self.sessions.contains_key(digest) || self.users.get(user).is_some_and(|until| since <= *until)
    }

    /// Adds what another one has. Whether there was anything new.
    pub fn add(&mut self, other: &Self) -> bool {
        let mut is_changed = false;
        for (digest, until) in &other.sessions {
            is_changed |= self.sessions.insert(digest.clone(), *until) != Some(*until);
        }
        for (user, until) in &other.users {
            let known = self.users.entry(user.clone()).or_insert(i64::MIN);
            is_changed |= *known < *until;
            *known = (*known).max(*until);
        }
        is_changed
    }

    /// Removes what ends no session any more, as every session ends after `longest` seconds; and what is too much.
    pub fn forget(&mut self, now: i64, longest: i64) {
        self.sessions.retain(|_, until| *until > now);
        self.users.retain(|_, until| until.div_euclid(1000).saturating_add(longest) >= now);
        if self.sessions.len() > MOST {
            let mut ends: Vec<i64> = self.sessions.values().copied().collect();
            ends.sort_unstable_by(|one, other| other.cmp(one));
            let last = ends[MOST];
            self.sessions.retain(|_, until| *until > last);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(digest: &str, until: i64) -> Revoked {
        Revoked::session(digest.into(), until)
    }

    #[test]
    fn a_session_ends_by_its_name_or_with_its_user() {
        let mut revoked = session("a", 100);
        revoked.add(&Revoked::user("ann".into(), 5_000));
        assert!(revoked.has("a", "bob", 9_000) && !revoked.has("b", "bob", 1_000));
        assert!(revoked.has("b", "ann", 5_000) && !revoked.has("b", "ann", 5_001), "she may sign in again");
    }

    #[test]
    fn it_does_not_matter_in_which_order_it_is_learned() {
        let parts = [session("a", 1), session("b", 2), Revoked::user("ann".into(), 7), Revoked::user("ann".into(), 3)];
        let mut one = Revoked::default();
        assert!(parts.iter().take(3).all(|part| one.add(part)));
        assert!(!one.add(&parts[3]) && !one.add(&parts[0]), "nothing new");
        let mut other = Revoked::default();
        for part in parts.iter().rev() {
            other.add(part);
        }
        assert_eq!(one, other);
        assert!(one.has("x", "ann", 7));
        let text = serde_json::to_string(&one).unwrap();
        assert_eq!(serde_json::from_str::<Revoked>(&text).unwrap(), one);
        assert_eq!(serde_json::from_str::<Revoked>("{}").unwrap(), Revoked::default());
    }

    #[test]
    fn what_is_of_no_use_goes() {
        let mut revoked = session("a", 100);
        revoked.add(&Revoked::user("ann".into(), 50_000));
        revoked.forget(99, 60);
        assert!(revoked.has("a", "", 0) && revoked.has("", "ann", 0));
        revoked.forget(100, 60);
        assert!(!revoked.has("a", "", 0) && revoked.has("", "ann", 0));
        revoked.forget(111, 60);
        assert_eq!(revoked, Revoked::default());
        for number in 0..2 * MOST {
            revoked.add(&session(&number.to_string(), number as i64));
        }
        revoked.forget(-1, 60);
        assert_eq!(revoked.sessions.len(), MOST);
        assert!(revoked.has(&(2 * MOST - 1).to_string(), "", 0) && !revoked.has("0", "", 0));
        assert!(serde_json::to_string(&revoked).unwrap().len() < 700_000);
    }
}
