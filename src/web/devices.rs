//! Devices on which people have signed in before: their attempts are not held up by those of strangers.
//!
//! A browser keeps a cookie that only this program can read and write, with the users who have signed in there with a password. It lets nobody in: it says only
//! that an attempt for one of these users is compared beside those of strangers ([`super::attempts`]). It stays after a sign-out.

use axum::http::HeaderMap;
use axum_extra::extract::cookie::{Cookie, SameSite};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::{keys::Keys, session::random_name};

/// The cookie.
const COOKIE: &str = "__Host-devices";
/// For how long after her last sign-in a user is known on a device.
const LONGEST: SignedDuration = SignedDuration::from_hours(90 * 24);
/// How many users are known on one device, and how many bytes of the cookie are theirs.
const MOST: usize = 8;
const MOST_BYTES: usize = 1200;

/// A user on this device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    user: String,
    /// A random name of the device for this user.
    device: String,
    /// When she signed in last, in seconds since 1970.
    at: i64,
}

/// The users who have signed in on a device, the last one first.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Devices(Vec<Known>);

impl Devices {
    /// Of the browser that has sent these headers.
    pub fn read(keys: &Keys, headers: &HeaderMap) -> Self {
        let cookie = keys.read(headers, COOKIE);
        cookie.and_then(|cookie| serde_json::from_str(cookie.value()).ok()).unwrap_or_default()
    }

    /// The name of the device for that user, if she has signed in there.
    pub fn of(&self, user: &str, now: Timestamp) -> Option<&str> {
        let is_hers =
            |known: &&Known| known.user == user && known.at.saturating_add(LONGEST.as_secs()) > now.as_second();
        self.0.iter().find(is_hers).map(|known| known.device.as_str())
    }

    /// With the user who signs in now.
    ///
    /// # Errors
    /// If the operating system has no random numbers.
    pub fn with(mut self, user: &str, now: Timestamp) -> Result<Self, getrandom::Error> {
        let device = match self.of(user, now) {
            Some(device) => device.to_owned(),
            None => random_name()?,
        };
        self.0.retain(|known| known.user != user);
        self.0.insert(0, Known { user: user.to_owned(), device, at: now.as_second() });
        self.0.truncate(MOST);
        while self.0.len() > 1 && self.text().len() > MOST_BYTES {
            self.0.pop();
        }
        Ok(self)
    }

    fn text(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The cookie.
    pub fn cookie(&self) -> Cookie<'static> {
        let cookie =
            Cookie::build((COOKIE, self.text())).path("/").secure(true).http_only(true).same_site(SameSite::Lax);
        let mut cookie = cookie.build();
        // The type of an age is in a crate that this one does not name.
        let age = Cookie::parse(format!("{COOKIE}=; Max-Age={}", LONGEST.as_secs()));
        cookie.set_max_age(age.ok().and_then(|age| age.max_age()));
        cookie
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::noon;

    #[test]
    fn the_users_of_a_device_are_known_for_some_months() {
        let devices = Devices::default().with("ann", noon()).unwrap().with("bob", noon()).unwrap();
        let (ann, bob) = (devices.of("ann", noon()).unwrap(), devices.of("bob", noon()).unwrap());
        assert_ne!(ann, bob);
        assert_eq!(devices.of("carol", noon()), None);
        let later = noon() + LONGEST;
        assert_eq!(devices.of("ann", later), None);
        let again = devices.clone().with("ann", later - SignedDuration::from_secs(1)).unwrap();
        assert_eq!((again.of("ann", later), again.of("bob", later)), (Some(ann), None), "it has the same name");
    }

    #[test]
    fn the_cookie_has_a_limit() {
        let mut devices = Devices::default();
        for number in 0..20 {
            devices = devices.with(&format!("user {number}"), noon()).unwrap();
        }
        assert_eq!(devices.0.len(), MOST);
        assert_eq!(serde_json::from_str::<Devices>(devices.cookie().value()).unwrap(), devices);
        for number in 0..20 {
            devices = devices.with(&format!("{number}{}", "x".repeat(250)), noon()).unwrap();
        }
        assert!(devices.text().len() <= MOST_BYTES && devices.0.len() > 1, "{}", devices.text().len());
    }
}
