//! How many attempts to sign in there were lately: in the last minute or so, by address, by name, by device. The pure part of [`super::passwords`].
//!
//! An attempt is never refused for its number alone. The number decides in which order passwords are compared, how soon, and what a wrong one is told.
//!
//! | there were | the attempt |
//! |---|---|
//! | few | is compared when its turn comes |
//! | [`FOR_USER`] from this address for this name, or [`FROM_EVERYWHERE`] for this name | the same, but one in [`PACE`] for that name; a wrong password is told "too many" |
//! | [`FROM_ADDRESS`] from this address | is compared when its turn comes; a wrong password is told "too many" |
//!
//! The turn is that of whoever had the fewest attempts for this name from her address in the last hours ([`TRIED`]), and then from the network around it:
//! strangers who try slowly, because they wait for their turns, or from ever new addresses of theirs, are not taken for somebody who comes for the first
//! time. So strangers elsewhere come after a person with her right password, unless they come from very many networks, and those at her own address come
//! before her only as often as they were there before.

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash, RandomState},
    net::IpAddr,
    time::Duration,
};

use crate::process::network::{around, counted};

/// How many attempts from one address for one name there may be at once, and then in a minute.
pub(super) const FOR_USER: u32 = 10;
/// How many attempts from one address there may be at once, and then in a minute.
pub(super) const FROM_ADDRESS: u32 = 120;
/// How many attempts for one name there may be at once, and then in a minute, from wherever they come.
pub(super) const FROM_EVERYWHERE: u32 = 30;
/// How many attempts from one known device there may be at once, and then in a minute, until it counts as a stranger.
pub(super) const FROM_DEVICE: u32 = 10;
/// The time between two comparisons for a name for which there were too many attempts.
pub(super) const PACE: Duration = Duration::from_secs(1);
/// For how long an attempt counts for whose turn it is, and up to how many do.
const TRIED: (Duration, u32) = (Duration::from_mins(10), 6);
/// Up to how many attempts of a network count for that.
const NEARBY: u32 = 512;
/// The most attempts that wait for a comparison, of all strangers together.
pub(super) const MOST_WAITING: usize = 128;

/// The most addresses, names or devices that are remembered. Those that are forgotten first give way.
const MOST_KNOWN: usize = 20_000;

/// How many there were lately, of each key: one is forgotten every `period`.
struct Recent<K> {
    period: Duration,
    limit: u32,
    /// When none counts any more.
    ends: HashMap<K, Duration>,
}

impl<K: Eq + Hash + Clone> Recent<K> {
    /// So many in a minute are not too many.
    fn per_minute(limit: u32) -> Self {
        Self { period: Duration::from_secs(60) / limit, limit, ends: HashMap::new() }
    }

    /// One more. Returns how many there were before. What is too much is remembered up to the double, so that whoever stops is forgotten within
    /// two minutes.
    fn note(&mut self, key: K, now: Duration) -> u32 {
        let end = self.ends.get(&key).copied().unwrap_or_default().max(now);
        let left = (end - now).as_nanos().div_ceil(self.period.as_nanos().max(1));
        let before = u32::try_from(left).unwrap_or(u32::MAX);
        if self.ends.len() >= MOST_KNOWN && !self.ends.contains_key(&key) {
            self.make_room(now);
        }
        self.ends.insert(key, (end + self.period).min(now + self.period * (2 * self.limit)));
        before
    }

    fn make_room(&mut self, now: Duration) {
        self.forget(now);
        if self.ends.len() >= MOST_KNOWN {
            let first = self.ends.iter().min_by_key(|(_, end)| **end).map(|(key, _)| key.clone());
            first.and_then(|key| self.ends.remove(&key));
        }
    }

    fn forget(&mut self, now: Duration) {
        self.ends.retain(|_, end| *end > now);
    }
}

/// What the numbers say of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Standing {
    /// It is from a device on which this user has signed in before.
    pub is_known: bool,
    /// How many attempts for this name there were from this address.
    pub before: u32,
    /// The same from the network around it.
    pub nearby: u32,
    /// What stands for the name, if the comparisons for it are paced.
    pub paced: Option<u64>,
    /// Whether a wrong password is told that there were too many.
    pub is_too_many: bool,
}

impl Standing {
    /// Whoever has the smallest comes first.
    fn turn(&self) -> (u32, u32) {
        (self.before, self.nearby)
    }
}

/// The numbers of attempts.
pub(super) struct Attempts {
    /// What stands for a name is a number: the names are an attacker's, and may be passwords in the wrong field.
    names: RandomState,
    by_user: Recent<(IpAddr, u64)>,
    /// The same for a longer time.
    tried: Recent<(IpAddr, u64)>,
    /// The same from the network around an address.
    nearby: Recent<(IpAddr, u64)>,
    by_address: Recent<IpAddr>,
    by_name: Recent<u64>,
    by_device: Recent<u64>,
}

impl Attempts {
    /// There was none yet.
    pub fn new() -> Self {
        Self {
            names: RandomState::new(),
            by_user: Recent::per_minute(FOR_USER),
            tried: Recent { period: TRIED.0, limit: TRIED.1, ends: HashMap::new() },
            nearby: Recent { period: TRIED.0, limit: NEARBY, ends: HashMap::new() },
            by_address: Recent::per_minute(FROM_ADDRESS),
            by_name: Recent::per_minute(FROM_EVERYWHERE),
            by_device: Recent::per_minute(FROM_DEVICE),
        }
    }

    /// One more, at that time since the start. `device`: the name of a device on which the user has signed in before.
    pub fn note(&mut self, from: IpAddr, user: &str, device: Option<&str>, now: Duration) -> Standing {
        // What others do does not count for a known device.
        if let Some(device) = device
            && self.by_device.note(self.names.hash_one((device, user)), now) < FROM_DEVICE
        {
            return Standing { is_known: true, before: 0, nearby: 0, paced: None, is_too_many: false };
        }
        let (from, name) = (counted(from), self.names.hash_one(user));
        let of_address = self.by_address.note(from, now);
        let before = self.tried.note((from, name), now);
        let nearby = self.nearby.note((around(from), name), now);
        let of_user = self.by_user.note((from, name), now);
        let is_guessed = self.by_name.note(name, now) >= FROM_EVERYWHERE || of_user >= FOR_USER;
        let is_too_many = is_guessed || of_address >= FROM_ADDRESS;
        Standing { is_known: false, before, nearby, paced: is_guessed.then_some(name), is_too_many }
    }

    /// Somebody has signed in: what she has mistyped before does not count.
    pub fn signed_in(&mut self, from: IpAddr, user: &str) {
        self.tried.ends.remove(&(counted(from), self.names.hash_one(user)));
    }

    /// Forgets what does not count any more.
    pub fn forget(&mut self, now: Duration) {
        self.by_user.forget(now);
        self.tried.forget(now);
        self.nearby.forget(now);
        self.by_address.forget(now);
        self.by_name.forget(now);
        self.by_device.forget(now);
    }
}

/// Attempts that wait for a comparison. `T` is how one is told that it is its turn.
pub(super) struct Waiting<T> {
    all: Vec<(Standing, u64, T)>,
    last: u64,
    /// From when on the next comparison for a name is due.
    next: HashMap<u64, Duration>,
}

impl<T> Default for Waiting<T> {
    fn default() -> Self {
        Self { all: Vec::new(), last: 0, next: HashMap::new() }
    }
}

impl<T> Waiting<T> {
    /// One more, which leaves with the number that is returned. If too many wait, the one leaves whose turn is last. `None`: that is the new one.
    pub fn join(&mut self, standing: Standing, tell: T) -> Option<u64> {
        if self.all.len() >= MOST_WAITING {
            let last = self.all.iter().enumerate().max_by_key(|(_, (standing, number, _))| (standing.turn(), *number));
            let (at, (worst, ..)) = last?;
            if worst.turn() <= standing.turn() {
                return None;
            }
            self.all.swap_remove(at);
        }
        self.last += 1;
        self.all.push((standing, self.last, tell));
        Some(self.last)
    }

    /// One does not wait any more.
    pub fn leave(&mut self, number: u64) {
        self.all.retain(|(_, known, _)| *known != number);
    }

    /// The one whose turn it is now, if it is anybody's.
    pub fn next(&mut self, now: Duration) -> Option<T> {
        let is_due = |standing: &Standing| standing.paced.is_none_or(|name| self.due(name) <= now);
        let ready = self.all.iter().enumerate().filter(|(_, (standing, ..))| is_due(standing));
        let (at, _) = ready.min_by_key(|(_, (standing, number, _))| (standing.turn(), *number))?;
        let (standing, _, tell) = self.all.swap_remove(at);
        if let Some(name) = standing.paced {
            self.next.insert(name, now + PACE);
        }
        Some(tell)
    }

    /// When it is somebody's turn who has to wait for the pace.
    pub fn next_time(&self) -> Option<Duration> {
        self.all.iter().filter_map(|(standing, ..)| standing.paced).map(|name| self.due(name)).min()
    }

    fn due(&self, name: u64) -> Duration {
        self.next.get(&name).copied().unwrap_or_default()
    }

    /// Forgets what does not count any more.
    pub fn forget(&mut self, now: Duration) {
        self.next.retain(|_, due| *due > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1000);

    fn address(number: u32) -> IpAddr {
        IpAddr::from((0xc633_0000_u32 + number).to_be_bytes())
    }

    #[test]
    fn attempts_are_counted_by_address_and_name_and_forgotten() {
        let mut attempts = Attempts::new();
        let note = |attempts: &mut Attempts, from, user, now| attempts.note(address(from), user, None, now);
        for number in 0..FOR_USER {
            let standing = note(&mut attempts, 1, "ann", START);
            assert_eq!((standing.before, standing.is_too_many, standing.paced), (number, false, None));
        }
        let standing = note(&mut attempts, 1, "ann", START);
        assert!(standing.is_too_many && standing.paced.is_some());
        for (from, user) in [(1, "bob"), (2, "ann")] {
            assert!(!note(&mut attempts, from, user, START).is_too_many, "{from} {user}");
        }
        // Whoever goes on for an hour is forgotten as soon as who stops after a minute.
        for second in 0..3600 {
            note(&mut attempts, 1, "ann", START + Duration::from_secs(second));
        }
        let after = |seconds: u64| START + Duration::from_secs(3600 + seconds);
        assert!(note(&mut attempts, 1, "ann", after(30)).is_too_many);
        assert!(!note(&mut attempts, 1, "ann", after(200)).is_too_many);
    }

    #[test]
    fn strangers_with_ever_new_addresses_of_their_network_come_after_a_person() {
        let (mut attempts, mut waiting) = (Attempts::new(), Waiting::default());
        for number in 0..1000_u32 {
            let from = format!("2001:db8:7:{number:x}::1").parse().unwrap();
            waiting.join(attempts.note(from, "ann", None, START), "stranger");
        }
        let standing = attempts.note("2001:db8:8::1".parse().unwrap(), "ann", None, START);
        assert!(waiting.join(standing, "ann").is_some(), "she is not turned away");
        assert_eq!([waiting.next(START), waiting.next(START + PACE)], [Some("stranger"), Some("ann")]);
    }

    #[test]
    fn a_name_that_many_guess_is_paced_and_its_person_is_first() {
        let (mut attempts, mut waiting) = (Attempts::new(), Waiting::default());
        let mut told = Vec::new();
        for number in 0..200 {
            let standing = attempts.note(address(number % 40), "ann", None, START);
            waiting.join(standing, format!("stranger {number}"));
        }
        let standing = attempts.note(address(77), "ann", None, START);
        assert!(standing.is_too_many && standing.paced.is_some() && standing.before == 0);
        // She waits for nobody but those who were as new as she is.
        waiting.join(standing, "ann".to_owned());
        let mut now = START;
        while told.last().is_none_or(|last| last != "ann") {
            match waiting.next(now) {
                Some(next) => told.push(next),
                None => now = waiting.next_time().unwrap(),
            }
        }
        assert!(told.len() <= 41, "{told:?}");
        assert!(now - START <= 12 * PACE, "{:?}", now - START);
    }

    #[test]
    fn strangers_who_try_slowly_come_after_a_person_who_is_new() {
        let mut attempts = Attempts::new();
        // Each address tries once in twenty seconds, which is less than what is too much for it.
        let at = |second| START + Duration::from_secs(second);
        for second in 0..600 {
            let standing = attempts.note(address(u32::try_from(second % 20).unwrap()), "ann", None, at(second));
            assert_eq!(standing.before == 0, second < 20, "{second}");
        }
        assert_eq!(attempts.note(address(77), "ann", None, at(600)).before, 0);
        assert_eq!(attempts.note(address(77), "ann", None, at(601)).before, 1);
        attempts.signed_in(address(77), "ann");
        assert_eq!(attempts.note(address(77), "ann", None, at(602)).before, 0);
    }

    #[test]
    fn who_was_there_before_leaves_when_too_many_wait() {
        let mut waiting = Waiting::default();
        let standing = |before| Standing { is_known: false, before, nearby: 0, paced: None, is_too_many: true };
        for number in 0..MOST_WAITING {
            assert!(waiting.join(standing(5), number).is_some());
        }
        assert_eq!(waiting.join(standing(5), 1000), None);
        assert!(waiting.join(standing(0), 2000).is_some());
        assert_eq!((waiting.next(START), waiting.all.len()), (Some(2000), MOST_WAITING - 1));
        // Who has left is not told.
        let number = waiting.join(standing(0), 3000).unwrap();
        waiting.leave(number);
        assert_eq!(waiting.next(START), Some(0));
    }

    #[test]
    fn a_name_is_compared_at_its_pace_and_others_meanwhile() {
        let mut waiting = Waiting::default();
        let paced = |name| Standing { is_known: false, before: 20, nearby: 0, paced: Some(name), is_too_many: true };
        for number in 0..3 {
            waiting.join(paced(1), number);
        }
        waiting.join(paced(2), 10);
        waiting.join(Standing { paced: None, ..paced(0) }, 20);
        let all: Vec<_> = std::iter::from_fn(|| waiting.next(START)).collect();
        assert_eq!(all, [0, 10, 20]);
        assert_eq!(waiting.next_time(), Some(START + PACE));
        assert_eq!((waiting.next(START + PACE), waiting.next(START + PACE)), (Some(1), None));
    }

    #[test]
    fn a_known_device_is_not_held_up_by_others_but_by_itself() {
        let mut attempts = Attempts::new();
        for number in 0..1000 {
            attempts.note(address(number % 50), "ann", None, START);
        }
        for _ in 0..FROM_DEVICE {
            assert!(attempts.note(address(1), "ann", Some("hers"), START).is_known);
        }
        let standing = attempts.note(address(1), "ann", Some("hers"), START);
        assert!(!standing.is_known && standing.is_too_many);
    }

    #[test]
    fn what_is_remembered_has_a_limit() {
        let mut attempts = Attempts::new();
        for _ in 0..FOR_USER {
            attempts.note(address(1), "ann", None, START);
        }
        for number in 0..u32::try_from(MOST_KNOWN).unwrap() + 50 {
            attempts.note(address(number), &format!("user {number}"), None, START);
        }
        assert!(attempts.by_user.ends.len() <= MOST_KNOWN && attempts.by_name.ends.len() <= MOST_KNOWN);
        assert!(attempts.note(address(1), "ann", None, START).is_too_many, "who is remembered longest stays");
        attempts.forget(START + Duration::from_secs(3600));
        assert!(attempts.by_user.ends.is_empty());
    }
}
