//! Hashes of passwords: those of bcrypt, which the files of existing users have, and those of Argon2. Whose password is compared next.

use std::{
    net::IpAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use argon2::{
    Argon2,
    password_hash::{PasswordVerifier, phc::PasswordHash},
};
use tokio::{
    sync::{Semaphore, oneshot},
    time::{Instant, sleep_until, timeout},
};

use super::attempts::{Attempts, Standing, Waiting};
use crate::process::lock;

/// The longest password, in bytes. A longer one is wrong without being hashed.
const LONGEST: usize = 1024;

/// What a password is compared with if no user has a hash: bcrypt's with its usual cost.
const DECOY: &str = "$2b$12$NiBd74ZGdplLC63ePZf1f.UtjMKkbQ23cQoO2OKOFalDBHWAOy21.";

/// The hash of a password.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Hash {
    /// `$2a$`, `$2b$`, `$2x$` or `$2y$`.
    Bcrypt(String),
    /// A PHC string such as `$argon2id$v=19$...`.
    Argon2(String),
}

impl Hash {
    /// Reads a hash. `None`: it is none of a known kind.
    pub fn parse(text: &str) -> Option<Self> {
        let is_bcrypt = || text.parse::<bcrypt::HashParts>().is_ok();
        let is_argon2 = || text.starts_with("$argon2") && PasswordHash::new(text).is_ok();
        match text {
            _ if is_bcrypt() => Some(Self::Bcrypt(text.to_owned())),
            _ if is_argon2() => Some(Self::Argon2(text.to_owned())),
            _ => None,
        }
    }

    /// A hash for users who do not exist.
    pub fn decoy() -> Self {
        Self::Bcrypt(DECOY.to_owned())
    }

    /// Whether this is the hash of the password. It takes a part of a second of a CPU on purpose, so it is not called on a thread that serves
    /// others.
    pub fn is_of(&self, password: &str) -> bool {
        if password.len() > LONGEST {
            return false;
        }
        match self {
            Self::Bcrypt(hash) => bcrypt::verify(password, hash).unwrap_or(false),
            Self::Argon2(hash) => PasswordHash::new(hash)
                .is_ok_and(|hash| Argon2::default().verify_password(password.as_bytes(), &hash).is_ok()),
        }
    }
}

/// How many passwords of strangers are compared at once. Each takes a CPU, and Argon2 much memory.
const AT_ONCE: usize = 2;
/// The same for people at devices on which they have signed in before.
const KNOWN_AT_ONCE: usize = 1;
/// How long a password may wait for its turn.
const PATIENCE: Duration = Duration::from_secs(20);

/// What became of an attempt to sign in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The password is right.
    Right,
    /// The password is wrong, or there is no such user.
    Wrong,
    /// There were too many attempts, and the password is wrong; or so many that it was not compared.
    TooMany,
}

/// Somebody who wants to sign in.
pub(super) struct Asked<'a> {
    /// Her address.
    pub from: IpAddr,
    /// The name that she has typed.
    pub user: &'a str,
    /// The password.
    pub password: String,
    /// The hash of the user's password. `None`: there is no such user; then it is compared with the decoy, so that the answer takes as long.
    pub hash: Option<Hash>,
    /// The decoy.
    pub decoy: Hash,
    /// The name of her device, if this user has signed in there before.
    pub device: Option<&'a str>,
}

/// Compares passwords, not too many and not too often ([`super::attempts`]).
pub(super) struct Passwords {
    start: Instant,
    attempts: Mutex<Attempts>,
    strangers: Arc<Turns>,
    known: Arc<Semaphore>,
}

/// Whose turn it is to be compared.
#[derive(Default)]
struct Turns(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    waiting: Waiting<oneshot::Sender<Turn>>,
    /// How many are compared now.
    comparing: usize,
}

/// A password is being compared. The next one's turn is when this is dropped.
struct Turn {
    turns: Arc<Turns>,
    start: Instant,
}

impl Turns {
    /// Tells those whose turn it is. When somebody's is next who has to wait although there is a place.
    fn tell(self: &Arc<Self>, start: Instant) -> Option<Duration> {
        loop {
            let next = {
                let mut queue = lock(&self.0);
                if queue.comparing >= AT_ONCE {
                    return None;
                }
                let Some(next) = queue.waiting.next(start.elapsed()) else { return queue.waiting.next_time() };
                queue.comparing += 1;
                next
            };
            // If nobody waits for it any more, the turn is dropped, and it is the next one's.
            let _ = next.send(Turn { turns: self.clone(), start });
        }
    }

    /// Waits for a turn. `None`: too many others wait.
    async fn take(self: &Arc<Self>, standing: Standing, start: Instant) -> Option<Turn> {
        struct Leaves<'a>(&'a Turns, u64);
        impl Drop for Leaves<'_> {
            fn drop(&mut self) {
                lock(&self.0.0).waiting.leave(self.1);
            }
        }
        let (sender, mut turn) = oneshot::channel();
        let number = lock(&self.0).waiting.join(standing, sender)?;
        // A password that nobody waits for any more is not compared.
        let _leaves = Leaves(self, number);
        loop {
            let due = self.tell(start);
            let is_due = async {
                match due {
                    Some(due) => sleep_until(start + due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                turn = &mut turn => return turn.ok(),
                () = is_due => {}
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.turns.0).comparing -= 1;
        self.turns.tell(self.start);
    }
}

impl Passwords {
    /// Nobody has tried anything yet.
    pub fn new() -> Self {
        Self {
            start: Instant::now(),
            attempts: Mutex::new(Attempts::new()),
            strangers: Arc::default(),
            known: Arc::new(Semaphore::new(KNOWN_AT_ONCE)),
        }
    }

    /// Compares a password with a hash.
    pub async fn attempt(&self, asked: Asked<'_>) -> Attempt {
        let Asked { from, user, password, hash, decoy, device } = asked;
        let standing = lock(&self.attempts).note(from, user, device, self.start.elapsed());
        let wrong = if standing.is_too_many { Attempt::TooMany } else { Attempt::Wrong };
        if password.len() > LONGEST {
            return wrong;
        }
        let compare = async move {
            let (known, turn) = if standing.is_known {
                (self.known.clone().acquire_owned().await.ok(), None)
            } else {
                (None, self.strangers.take(standing, self.start).await)
            };
            if known.is_none() && turn.is_none() {
                return Attempt::TooMany;
            }
            let compared = tokio::task::spawn_blocking(move || {
                let _place = (known, turn);
                let is_user = hash.is_some();
                hash.unwrap_or(decoy).is_of(&password) && is_user
            });
            if compared.await.unwrap_or(false) { Attempt::Right } else { wrong }
        };
        let attempt = timeout(PATIENCE, compare).await.unwrap_or(Attempt::TooMany);
        if attempt == Attempt::Right {
            lock(&self.attempts).signed_in(from, user);
        }
        attempt
    }

    /// Forgets the attempts that do not count any more.
    pub fn forget(&self) {
        let now = self.start.elapsed();
        lock(&self.attempts).forget(now);
        lock(&self.strangers.0).waiting.forget(now);
    }
}

#[cfg(test)]
mod tests {
    use argon2::password_hash::PasswordHasher as _;

    use super::*;
    use crate::web::attempts;

    #[test]
    fn hashes_of_both_kinds() {
        let bcrypt = bcrypt::hash("correct horse", 4).unwrap();
        let hasher = Argon2::new(
            argon2::Algorithm::Argon2id,
            argon2::Version::V0x13,
            argon2::Params::new(8, 1, 1, None).unwrap(),
        );
        let argon2 = hasher.hash_password_with_salt(b"correct horse", b"a salt of 16 byt").unwrap().to_string();
        for hash in [bcrypt.as_str(), &bcrypt.replacen("$2b$", "$2y$", 1)] {
            let hash = Hash::parse(hash).unwrap();
            assert!(hash.is_of("correct horse") && !hash.is_of("correct horsf") && !hash.is_of(""));
        }
        let hash = Hash::parse(&argon2).unwrap();
        assert!(hash.is_of("correct horse") && !hash.is_of("correct horsf"));
        assert!(!hash.is_of(&"x".repeat(LONGEST + 1)));
    }

    #[test]
    fn what_is_no_hash_lets_nobody_in() {
        for text in ["", "secret", "$2b$", "$argon2id$", "$1$abc$def"] {
            assert_eq!(Hash::parse(text), None, "{text}");
        }
        assert!(matches!(Hash::parse(DECOY), Some(Hash::Bcrypt(_))));
        assert!(!Hash::decoy().is_of("anything"));
    }

    async fn attempt(passwords: &Passwords, from: [u8; 4], user: &str, password: &str, hash: Option<&Hash>) -> Attempt {
        let asked = Asked {
            from: from.into(),
            user,
            password: password.into(),
            hash: hash.cloned(),
            decoy: Hash::parse(&bcrypt::hash("correct horse", 4).unwrap()).unwrap(),
            device: None,
        };
        passwords.attempt(asked).await
    }

    #[tokio::test]
    async fn a_right_password_is_never_refused_for_what_others_have_tried() {
        let (passwords, one, other) = (Passwords::new(), [192, 0, 2, 1], [192, 0, 2, 2]);
        let hash = Hash::parse(&bcrypt::hash("correct horse", 4).unwrap()).unwrap();
        assert_eq!(attempt(&passwords, one, "ann", "correct horse", Some(&hash)).await, Attempt::Right);
        assert_eq!(
            attempt(&passwords, one, "nobody", "correct horse", None).await,
            Attempt::Wrong,
            "the decoy's password lets nobody in"
        );
        for _ in 1..attempts::FOR_USER {
            assert_eq!(attempt(&passwords, one, "ann", "wrong", Some(&hash)).await, Attempt::Wrong);
        }
        assert_eq!(attempt(&passwords, one, "ann", "wrong", Some(&hash)).await, Attempt::TooMany);
        assert_eq!(attempt(&passwords, one, "ann", "correct horse", Some(&hash)).await, Attempt::Right);
        // Nor if her name is tried from everywhere, or all names from her address.
        let long = "x".repeat(LONGEST + 1);
        for number in 0..2 * attempts::FROM_EVERYWHERE {
            attempt(&passwords, [198, 51, 100, u8::try_from(number).unwrap()], "ann", &long, Some(&hash)).await;
        }
        assert_eq!(attempt(&passwords, other, "ann", "wrong", Some(&hash)).await, Attempt::TooMany);
        assert_eq!(attempt(&passwords, other, "ann", "correct horse", Some(&hash)).await, Attempt::Right);
        for number in 0..2 * attempts::FROM_ADDRESS {
            attempt(&passwords, one, &format!("user {number}"), &long, None).await;
        }
        assert_eq!(attempt(&passwords, one, "carol", "wrong", Some(&hash)).await, Attempt::TooMany);
        assert_eq!(attempt(&passwords, one, "carol", "correct horse", Some(&hash)).await, Attempt::Right);
    }

    #[tokio::test]
    async fn a_person_gets_in_while_strangers_try_her_name() {
        let passwords = Arc::new(Passwords::new());
        // What it costs to compare one is that of a real hash, so that they have to wait.
        let hash = Hash::parse(&bcrypt::hash("correct horse", 9).unwrap()).unwrap();
        let compared = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let flood: Vec<_> = (0..200_u8)
            .map(|number| {
                let (passwords, hash, compared) = (passwords.clone(), hash.clone(), compared.clone());
                tokio::spawn(async move {
                    loop {
                        let from = [198, 51, 100, number % 20];
                        if attempt(&passwords, from, "ann", "wrong", Some(&hash)).await != Attempt::TooMany {
                            compared.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                        }
                        tokio::task::yield_now().await;
                    }
                })
            })
            .collect();
        while compared.load(std::sync::atomic::Ordering::Relaxed) < 20 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        // On a device that is known, even at the strangers' own address.
        let at_device = Asked {
            from: [198, 51, 100, 1].into(),
            user: "ann",
            password: "correct horse".into(),
            hash: Some(hash.clone()),
            decoy: Hash::decoy(),
            device: Some("hers"),
        };
        assert_eq!(passwords.attempt(at_device).await, Attempt::Right);
        // And on a new one, from elsewhere.
        assert_eq!(attempt(&passwords, [192, 0, 2, 1], "ann", "correct horse", Some(&hash)).await, Attempt::Right);
        assert_eq!(attempt(&passwords, [192, 0, 2, 1], "bob", "correct horse", Some(&hash)).await, Attempt::Right);
        for task in flood {
            task.abort();
        }
    }
}
