//! What every program of this crate needs from its own process: locks, errors on one line, messages that are not repeated,
//! and (in submodules) the signals that end it and changes of files.
//!
//! This module imports nothing of this crate.

#[cfg(any(feature = "manager", feature = "runner"))]
pub mod follow;
#[cfg(any(feature = "manager", feature = "runner"))]
pub mod signals;

use std::{
    error::Error,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

/// Locks data that is complete after each statement of whoever holds the lock, so that a panic of another thread does not
/// make it wrong.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error with its causes, on one line.
pub struct ErrorChain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut shown = self.0.to_string();
        let mut source = self.0.source();
        while let Some(cause) = source {
            let text = cause.to_string();
            // Some errors of libraries repeat their cause.
            if !shown.contains(&text) {
                write!(f, ": {text}")?;
            }
            shown = text;
            source = cause.source();
        }
        Ok(())
    }
}

/// Keeps a message that stays the same from being logged again with each try.
#[derive(Default)]
pub struct RepeatFilter(Option<String>);

impl RepeatFilter {
    /// Whether the message differs from the last one. If so, the caller logs it, and it becomes the last one.
    pub fn is_new(&mut self, message: &str) -> bool {
        let is_new = self.0.as_deref() != Some(message);
        if is_new {
            self.0 = Some(message.to_owned());
        }
        is_new
    }

    /// The cause of the message has gone. Returns whether there was a message.
    pub fn clear(&mut self) -> bool {
        self.0.take().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Failure(&'static str, #[source] Option<Box<Failure>>);

    #[test]
    fn an_error_shows_each_cause_once() {
        let error =
            Failure("apply", Some(Box::new(Failure("connect: refused", Some(Box::new(Failure("refused", None)))))));
        assert_eq!(ErrorChain(&error).to_string(), "apply: connect: refused");
    }

    #[test]
    fn a_message_is_new_until_it_is_repeated() {
        let mut filter = RepeatFilter::default();
        assert!(!filter.clear());
        assert!(filter.is_new("refused"));
        assert!(!filter.is_new("refused"));
        assert!(filter.is_new("no route"));
        assert!(filter.clear());
        assert!(filter.is_new("no route"));
    }
}
