//! What every program of this crate needs from its own process: locks, errors on one line, messages that are not repeated,
//! and (in submodules) the log, the signals that end it, changes of files, an output whose reader stalls, the addresses it listens on, its connections
//! with everybody, words for a shell, the limit of what is done at once, and the same program once more with limited memory.
//!
//! This module imports nothing of this crate.

#[cfg(any(feature = "manager", feature = "web"))]
pub mod clock;
#[cfg(any(feature = "manager", feature = "web"))]
pub mod connections;
#[cfg(any(feature = "manager", feature = "node-devices", feature = "runner", feature = "web"))]
pub mod follow;
#[cfg(any(feature = "manager", feature = "web"))]
pub mod limited;
#[cfg(any(feature = "manager", feature = "node-devices", feature = "web"))]
pub mod listen;
#[cfg(any(feature = "manager", feature = "node-devices", feature = "vmctl", feature = "web"))]
pub mod log;
#[cfg(any(feature = "manager", feature = "web"))]
pub mod network;
#[cfg(feature = "runner")]
pub mod output;
#[cfg(any(feature = "cli", feature = "web"))]
pub mod shell;
#[cfg(any(feature = "manager", feature = "node-devices", feature = "runner", feature = "vmctl", feature = "web"))]
pub mod signals;
#[cfg(feature = "manager")]
pub mod slots;

use std::{
    error::Error,
    fmt,
    sync::{Mutex, MutexGuard, PoisonError},
};

use kube::core::Status;

/// Locks data that is complete after each statement of whoever holds the lock, so that a panic of another thread does not
/// make it wrong.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error with its causes, on one line. Each text is there once, and of an answer of the API server only its message.
pub struct ErrorChain<'a>(pub &'a (dyn Error + 'static));

impl fmt::Display for ErrorChain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut is_shown = false;
        let mut next = Some(self.0);
        while let Some(error) = next {
            let source = error.source();
            let text = own_text(error, source);
            if !is_shown && !text.is_empty() {
                write!(f, "{separator}{text}")?;
                separator = ": ";
            }
            // Some errors of libraries have the text of their cause in the middle of their own.
            is_shown = source.is_some_and(|source| text.contains(&source.to_string()));
            next = source;
        }
        Ok(())
    }
}

/// The text of an error without that of its cause, which many errors of libraries repeat at the end of their own.
fn own_text(error: &(dyn Error + 'static), source: Option<&(dyn Error + 'static)>) -> String {
    if let Some(answer) = answer(error) {
        let texts = [answer.message.trim(), answer.reason.as_str()];
        let text = texts.into_iter().find(|text| !text.is_empty());
        return text.map_or_else(|| format!("the API server answered with code {}", answer.code), str::to_owned);
    }
    let text = error.to_string();
    // Such an error only names a variant of an enum in Rust. The text of one has the answer as Rust prints it for debugging.
    let is_debug = source.and_then(answer).is_some_and(|answer| text.contains(&format!("{answer:?}")));
    if is_debug || is_wrapper(error) {
        return String::new();
    }
    let own = source.and_then(|source| text.strip_suffix(&source.to_string()));
    own.map_or(text.as_str(), |own| own.trim_end_matches([':', ' '])).to_owned()
}

/// The API server's answer, if the error is one.
fn answer<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Status> {
    error.downcast_ref::<Status>().or_else(|| error.downcast_ref::<Box<Status>>().map(AsRef::as_ref))
}

#[cfg(feature = "client")]
fn is_wrapper(error: &(dyn Error + 'static)) -> bool {
    use kube::Error::{HttpError, HyperError, Service};
    let error = error.downcast_ref().or_else(|| error.downcast_ref::<Box<kube::Error>>().map(AsRef::as_ref));
    error.is_some_and(|error| matches!(error, HttpError(_) | HyperError(_) | Service(_)))
}

#[cfg(not(feature = "client"))]
fn is_wrapper(_: &(dyn Error + 'static)) -> bool {
    false
}

/// Has a program name itself and its version to the API server (`User-Agent`), which writes it into its audit log and counts by it.
#[cfg(feature = "client")]
pub fn name_client(config: &mut kube::Config, program: &str) {
    let value = format!("{program}/{}", env!("CARGO_PKG_VERSION")).parse();
    // Neither can fail: the program names itself in ASCII.
    if let (Ok(name), Ok(value)) = ("user-agent".parse(), value) {
        config.headers.push((name, value));
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
        let error = Failure("connect (refused, as always)", Some(Box::new(Failure("refused", None))));
        assert_eq!(ErrorChain(&error).to_string(), "connect (refused, as always)");
    }

    #[cfg(feature = "manager")]
    #[test]
    fn an_answer_of_the_api_server_is_its_message() {
        #[derive(Debug, thiserror::Error)]
        #[error("apply Pod apple")]
        struct Apply(#[source] Box<kube::Error>);
        let answer = |message: &str| {
            let answer = Status { message: message.into(), reason: "Forbidden".into(), code: 403, ..Status::default() };
            kube::Error::Api(Box::new(answer))
        };
        let forbidden = "pods \"apple\" is forbidden: exceeded quota: few";
        assert_eq!(
            ErrorChain(&Apply(Box::new(answer(forbidden)))).to_string(),
            format!("apply Pod apple: {forbidden}")
        );
        #[derive(Debug, thiserror::Error)]
        #[error(transparent)]
        struct Transparent(kube::Error);
        assert_eq!(ErrorChain(&Transparent(answer(forbidden))).to_string(), forbidden);
        assert_eq!(ErrorChain(&answer("")).to_string(), "Forbidden");
        let list = kube::runtime::watcher::Error::InitialListFailed(answer(forbidden));
        assert_eq!(ErrorChain(&list).to_string(), format!("failed to perform initial object list: {forbidden}"));
        let none = kube::Error::Api(Box::new(Status { code: 502, ..Status::default() }));
        assert_eq!(ErrorChain(&none).to_string(), "the API server answered with code 502");
        let lost = kube::Error::Service(Box::new(Failure("connect", Some(Box::new(Failure("refused", None))))));
        assert_eq!(ErrorChain(&lost).to_string(), "connect: refused");
    }

    #[cfg(feature = "manager")]
    #[tokio::test]
    async fn a_client_names_its_program() {
        let name = |headers: axum::http::HeaderMap| async move { format!("{:?}", headers.get("user-agent")) };
        let mut config = crate::test_support::played(axum::Router::new().fallback(name)).await;
        name_client(&mut config, "vm-operator");
        let client = kube::Client::try_from(config).unwrap();
        let answer = client.request_text(axum::http::Request::get("/").body(vec![]).unwrap()).await.unwrap();
        assert_eq!(answer, concat!("Some(\"vm-operator/", env!("CARGO_PKG_VERSION"), "\")"));
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
