//! The keys of cookies. A file has one in each line: the first writes, and all read. So a key can be replaced without anybody having to sign in
//! again: put the new one before the old one, and remove the old one when all sessions have been used once.

use axum::http::HeaderMap;
use axum_extra::extract::{
    PrivateCookieJar,
    cookie::{Cookie, Key},
};
use sha2::{Digest, Sha512};

/// The shortest key in a file, in bytes.
const SHORTEST: usize = 32;

/// The keys of cookies: at least one.
pub(super) struct Keys {
    first: Key,
    others: Vec<Key>,
}

/// A file whose keys can't be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("each line is a session key, and has at least {SHORTEST} bytes")]
pub(super) struct TooShort;

impl Keys {
    /// A new key.
    pub fn generate() -> Self {
        Self { first: Key::generate(), others: Vec::new() }
    }

    /// The keys of a file. If it is no text, it is one key.
    ///
    /// # Errors
    /// If one is too short, or there is none.
    pub fn parse(content: &[u8]) -> Result<Self, TooShort> {
        let lines: Vec<&[u8]> = match std::str::from_utf8(content) {
            Ok(text) => text.lines().map(|line| line.trim().as_bytes()).filter(|line| !line.is_empty()).collect(),
            Err(_) => vec![content.trim_ascii()],
        };
        let key = |line: &&[u8]| match line.len() >= SHORTEST {
            true => Ok(Key::from(&Sha512::digest(line)[..])),
            false => Err(TooShort),
        };
        let mut keys = lines.iter().map(key).collect::<Result<Vec<_>, _>>()?.into_iter();
        Ok(Self { first: keys.next().ok_or(TooShort)?, others: keys.collect() })
    }

    /// The cookie of that name, if one of the keys has written it.
    pub fn read(&self, headers: &HeaderMap, name: &str) -> Option<Cookie<'static>> {
        let keys = std::iter::once(&self.first).chain(&self.others);
        keys.into_iter().find_map(|key| PrivateCookieJar::from_headers(headers, key.clone()).get(name))
    }

    /// A jar for the cookies of an answer.
    pub fn jar(&self) -> PrivateCookieJar {
        PrivateCookieJar::new(self.first.clone())
    }
}

#[cfg(test)]
mod tests {
    use axum::{http::header, response::IntoResponse};

    use super::*;

    const OLD: &str = "an old key that is as long as it has to be";
    const NEW: &str = "a new key that is as long as it has to be, too";

    /// The headers of a browser that has a cookie which these keys have written.
    fn written(keys: &Keys) -> HeaderMap {
        let answer = (keys.jar().add(Cookie::new("name", "value")), "").into_response();
        let cookie = answer.headers()[header::SET_COOKIE].clone();
        [(header::COOKIE, cookie)].into_iter().collect()
    }

    fn keys(text: &str) -> Keys {
        Keys::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn the_first_key_writes_and_all_read() {
        let reads = |keys: &Keys, headers: &HeaderMap| {
            keys.read(headers, "name").is_some_and(|cookie| cookie.value() == "value")
        };
        let (old, both, new) = (keys(OLD), keys(&format!("{NEW}\n\n  {OLD}\n")), keys(NEW));
        assert!(reads(&both, &written(&old)) && reads(&both, &written(&both)));
        assert!(reads(&new, &written(&both)) && !reads(&old, &written(&both)));
        assert!(!reads(&new, &written(&old)));
        assert!(both.read(&written(&both), "other").is_none());
        assert!(!reads(&Keys::generate(), &written(&old)));
    }

    #[test]
    fn a_key_is_long_enough() {
        for wrong in ["", "\n", "short", &format!("{OLD}\nshort\n")] {
            assert!(Keys::parse(wrong.as_bytes()).is_err(), "{wrong:?}");
        }
        // Bytes that are no text are one key, whatever lines they seem to have.
        let bytes = [[0xff; 20], [b'\n'; 20], [0xfe; 20]].concat();
        assert!(Keys::parse(&bytes).unwrap().others.is_empty());
        assert!(Keys::parse(&[0xff; 31]).is_err());
    }
}
