//! Hashes of passwords: those of bcrypt, which the files of existing users have, and those of Argon2. How many attempts there may be.

use std::{
    net::{IpAddr, Ipv6Addr},
    num::NonZeroU32,
    sync::Arc,
};

use argon2::{
    Argon2,
    password_hash::{PasswordVerifier, phc::PasswordHash},
};
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};
use tokio::sync::Semaphore;

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

/// How many passwords are compared at once. Each takes a CPU, and Argon2 much memory.
const AT_ONCE: usize = 2;
/// How many attempts from one address for one user there may be at once, and then in a minute.
const FOR_USER: NonZeroU32 = NonZeroU32::new(10).unwrap();
/// How many attempts from one address there may be at once, and then in a minute. Behind a proxy all have one address.
const FROM_ADDRESS: NonZeroU32 = NonZeroU32::new(120).unwrap();
/// How many attempts for one user there may be at once, and then in a minute, from wherever they come. One address alone holds up nobody elsewhere.
const FROM_EVERYWHERE: NonZeroU32 = NonZeroU32::new(30).unwrap();

/// What counts as one address. Of IPv6 that is a /64: whoever has one of its addresses can have all of them.
fn counted(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => IpAddr::V6(Ipv6Addr::from_bits(address.to_bits() >> 64 << 64)),
        address => address,
    }
}

/// What became of an attempt to sign in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Attempt {
    /// The password is right.
    Right,
    /// The password is wrong, or there is no such user.
    Wrong,
    /// There were too many attempts.
    TooMany,
}

/// Compares passwords, not too many and not too often.
pub(super) struct Passwords {
    places: Arc<Semaphore>,
    by_user: DefaultKeyedRateLimiter<(IpAddr, String)>,
    by_address: DefaultKeyedRateLimiter<IpAddr>,
    by_name: DefaultKeyedRateLimiter<String>,
}

impl Passwords {
    /// Nobody has tried anything yet.
    pub fn new() -> Self {
        Self {
            places: Arc::new(Semaphore::new(AT_ONCE)),
            by_user: RateLimiter::keyed(Quota::per_minute(FOR_USER)),
            by_address: RateLimiter::keyed(Quota::per_minute(FROM_ADDRESS)),
            by_name: RateLimiter::keyed(Quota::per_minute(FROM_EVERYWHERE)),
        }
    }

    /// Compares a password with a hash. `None`: there is no such user; then it is compared with the decoy, so that the answer takes as long.
    pub async fn attempt(
        &self,
        from: IpAddr,
        user: &str,
        password: String,
        hash: Option<Hash>,
        decoy: Hash,
    ) -> Attempt {
        let (from, user) = (counted(from), user.to_owned());
        // In this order, so that what is refused here does not count for those who come from elsewhere.
        if self.by_address.check_key(&from).is_err()
            || self.by_user.check_key(&(from, user.clone())).is_err()
            || self.by_name.check_key(&user).is_err()
        {
            return Attempt::TooMany;
        }
        let Ok(place) = self.places.clone().acquire_owned().await else { return Attempt::TooMany };
        let compared = tokio::task::spawn_blocking(move || {
            let _place = place;
            let is_user = hash.is_some();
            hash.unwrap_or(decoy).is_of(&password) && is_user
        });
        if compared.await.unwrap_or(false) { Attempt::Right } else { Attempt::Wrong }
    }

    /// Whether there may be another attempt from that address, by whatever means.
    pub fn is_attempt_allowed(&self, from: IpAddr) -> bool {
        self.by_address.check_key(&counted(from)).is_ok()
    }

    /// Forgets the attempts that do not count any more.
    pub fn forget(&self) {
        self.by_user.retain_recent();
        self.by_address.retain_recent();
        self.by_name.retain_recent();
    }
}

#[cfg(test)]
mod tests {
    use argon2::password_hash::PasswordHasher as _;

    use super::*;

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

    #[test]
    fn an_address_of_ipv6_counts_with_its_neighbours() {
        let counted = |text: &str| counted(text.parse().unwrap()).to_string();
        assert_eq!(counted("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(counted("2001:db8:1:2::1"), counted("2001:db8:1:2:ffff::1"));
        assert_ne!(counted("2001:db8:1:2::1"), counted("2001:db8:1:3::1"));
        assert_eq!([counted("192.0.2.1"), counted("::ffff:192.0.2.1")], ["192.0.2.1", "192.0.2.1"]);
    }

    #[tokio::test]
    async fn one_user_is_not_tried_from_many_addresses() {
        let (passwords, wrong) = (Passwords::new(), "x".repeat(LONGEST + 1));
        let attempt = async |number: u32, user: &str| {
            let from = IpAddr::from([198, 51, 100, u8::try_from(number).unwrap()]);
            passwords.attempt(from, user, wrong.clone(), None, Hash::decoy()).await
        };
        for number in 0..FROM_EVERYWHERE.get() {
            assert_eq!(attempt(number, "ann").await, Attempt::Wrong);
        }
        assert_eq!(attempt(FROM_EVERYWHERE.get(), "ann").await, Attempt::TooMany);
        assert_eq!(attempt(FROM_EVERYWHERE.get(), "bob").await, Attempt::Wrong);
    }

    #[tokio::test]
    async fn attempts_are_counted_for_each_user_and_address() {
        let (passwords, one, other) = (Passwords::new(), IpAddr::from([192, 0, 2, 1]), IpAddr::from([192, 0, 2, 2]));
        let hash = Hash::parse(&bcrypt::hash("correct horse", 4).unwrap()).unwrap();
        let attempt = async |from, user: &str, password: &str, is_user: bool| {
            passwords.attempt(from, user, password.into(), is_user.then(|| hash.clone()), hash.clone()).await
        };
        assert_eq!(attempt(one, "ann", "correct horse", true).await, Attempt::Right);
        assert_eq!(
            attempt(one, "nobody", "correct horse", false).await,
            Attempt::Wrong,
            "the decoy's password lets nobody in"
        );
        for _ in 1..FOR_USER.get() {
            assert_eq!(attempt(one, "ann", "wrong", true).await, Attempt::Wrong);
        }
        assert_eq!(attempt(one, "ann", "correct horse", true).await, Attempt::TooMany);
        assert_eq!(attempt(one, "bob", "correct horse", true).await, Attempt::Right);
        assert_eq!(attempt(other, "ann", "correct horse", true).await, Attempt::Right);
        for number in 0..FROM_ADDRESS.get() {
            attempt(one, &format!("user {number}"), &"x".repeat(LONGEST + 1), true).await;
        }
        assert_eq!(attempt(one, "carol", "correct horse", true).await, Attempt::TooMany);
        assert_eq!(attempt(other, "carol", "correct horse", true).await, Attempt::Right);
    }
}
