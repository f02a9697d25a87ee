//! What there is of a kind, and then what changes.
//!
//! ```text
//!  a watch that begins with what there is ──────▶ Init, InitApply ..., InitDone ─▶ Apply, Delete ...
//!       └─ refused, cut or silent meanwhile: pages of a list, then a watch ─▶ the same
//! ```
//!
//! The API server has what there is in memory, while it takes all but the first page of a list from etcd when nothing has changed
//! for some minutes, at twice the cost (<https://kubernetes.io/docs/reference/using-api/api-concepts/#streaming-lists>).

use std::{
    fmt::Debug,
    time::{Duration, Instant},
};

use axum::http::Request;
use futures::{Stream, StreamExt, stream};
use kube::{
    Api, Resource,
    runtime::{
        WatchStreamExt,
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::timeout;
use tracing::debug;

/// For how long at most nothing may come while a watch tells what there is: longer than it may take to connect.
const SILENCE: Duration = Duration::from_secs(60);

/// The objects of a kind: those that there are, then how they change and go. What fails is tried again, a little later.
///
/// An API server, or what is in between, that can't begin a watch with what there is, is asked for pages of so many.
/// Requests must be made [`as_recent_as_etcd`].
pub fn listed_and_watched<K>(
    api: Api<K>,
    config: watcher::Config,
    page: u32,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Clone + Debug + DeserializeOwned + Resource + Send + 'static,
{
    let pages = watcher(api.clone(), config.clone().page_size(page));
    let streamed = while_useful(watcher(api, config.streaming_lists()));
    streamed.chain(pages).backoff(Patience::default())
}

/// What asks for the beginning of a watch, so that it is as recent as etcd, like a list. kube's watcher asks for version 0, that
/// is, for whatever the API server has: of several, one that lags behind would tell a manager that has just started of a
/// past in which a machine was not yet stopped (<https://kubernetes.io/docs/reference/using-api/api-concepts/#semantics-for-watch>).
pub fn as_recent_as_etcd<B>(mut request: Request<B>) -> Request<B> {
    let text = request.uri().to_string();
    let recent = text.strip_suffix("&resourceVersion=0").filter(|rest| rest.contains("sendInitialEvents=true"));
    if let Some(uri) = recent.and_then(|recent| recent.parse().ok()) {
        *request.uri_mut() = uri;
    }
    request
}

/// How far a watch is that begins with what there is.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beginning {
    Asked,
    Begun,
    Complete,
}

/// The events, until it shows that they can't begin with what there is.
fn while_useful<K: Send>(
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send {
    stream::unfold((Box::pin(events), Beginning::Asked), |(mut events, mut beginning)| async move {
        let event = match beginning {
            Beginning::Complete => events.next().await,
            // One that never tells that it is complete would be waited for in vain.
            Beginning::Asked | Beginning::Begun => timeout(SILENCE, events.next()).await.ok().flatten(),
        };
        let event = event.filter(|event| beginning.goes_on(event));
        if event.is_none() {
            debug!("a watch can't begin with what there is: asks for lists");
        }
        Some((event?, (events, beginning)))
    })
}

impl Beginning {
    /// Takes in an event; false if the next one had better come from a list.
    fn goes_on<K>(&mut self, event: &watcher::Result<Event<K>>) -> bool {
        match event {
            // It was cut before it was complete; kube's watcher would begin again at once, and for ever.
            Ok(Event::Init) if *self == Self::Begun => return false,
            Ok(Event::Init) => *self = Self::Begun,
            Ok(Event::InitApply(_)) => {}
            Ok(Event::InitDone | Event::Apply(_) | Event::Delete(_)) => *self = Self::Complete,
            Err(error) if self.is_refused(error) => return false,
            // Now kube's watcher asks anew.
            Err(watcher::Error::WatchError(answer)) if answer.code == 410 && *self == Self::Complete => {
                *self = Self::Asked
            }
            Err(_) => {}
        }
        true
    }

    /// Whether an error may be about such watches. There are several, such as 422 where `WatchList` is switched off, and 500 in
    /// the midst where etcd is too old. Not those that a list would meet as well.
    fn is_refused(self, error: &watcher::Error) -> bool {
        let Some(code) = code(error) else { return false };
        match self {
            Self::Asked | Self::Begun => !matches!(code, 401 | 403 | 404 | 410 | 429 | 503),
            // Most are of the watch that goes on.
            Self::Complete => matches!(code, 400 | 422),
        }
    }
}

/// What the API server has answered to a list or a watch: an HTTP status code.
pub fn code(error: &watcher::Error) -> Option<u16> {
    use watcher::Error::{InitialListFailed, WatchError, WatchStartFailed};
    match error {
        InitialListFailed(kube::Error::Api(answer)) | WatchStartFailed(kube::Error::Api(answer)) => Some(answer.code),
        WatchError(answer) => Some(answer.code),
        _ => None,
    }
}

/// The pauses between tries to watch: short enough that a CustomResourceDefinition that appears is soon seen.
struct Patience {
    next: Duration,
    last: Option<Instant>,
}

impl Patience {
    const FIRST: Duration = Duration::from_millis(500);
    const LONGEST: Duration = Duration::from_secs(8);
    /// When there was no trouble for so long it begins with the first pause again. Before a page there is a sign of life that
    /// means nothing.
    const GOOD: Duration = Duration::from_secs(60);
}

impl Default for Patience {
    fn default() -> Self {
        Self { next: Self::FIRST, last: None }
    }
}

impl Iterator for Patience {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        if self.last.is_some_and(|last| last.elapsed() > Self::GOOD) {
            self.next = Self::FIRST;
        }
        self.last = Some(Instant::now());
        let pause = self.next;
        self.next = (pause * 2).min(Self::LONGEST);
        Some(pause)
    }
}

impl Backoff for Patience {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use kube::{api::WatchParams, core::Status};

    use super::*;

    #[test]
    fn a_watch_begins_with_what_is_as_recent_as_etcd() {
        let begin = WatchParams::default().initial_events();
        let request = |params: &WatchParams, version| {
            let request = kube::core::Request::new("/api/v1/pods").watch(params, version).unwrap();
            as_recent_as_etcd(request).uri().to_string()
        };
        assert!(!request(&begin, "0").contains("resourceVersion="));
        assert!(request(&begin, "0").starts_with("/api/v1/pods?"));
        assert!(request(&begin, "0").contains("&resourceVersionMatch=NotOlderThan"));
        // What goes on from somewhere goes on from there.
        assert!(request(&begin, "10").contains("&resourceVersion=10"));
        assert!(request(&WatchParams::default(), "10").contains("&resourceVersion=10"));
    }

    fn answer(code: u16) -> Box<Status> {
        Box::new(Status::failure("sendInitialEvents: Forbidden", "Invalid").with_code(code))
    }

    /// How many of the events come through.
    async fn useful(events: Vec<watcher::Result<Event<()>>>) -> usize {
        while_useful(stream::iter(events)).count().await
    }

    #[tokio::test]
    async fn what_can_not_begin_with_what_there_is_ends() {
        let begun = || Ok(Event::Init);
        let refused = |code| Err(watcher::Error::WatchStartFailed(kube::Error::Api(answer(code))));
        let told = |code| Err(watcher::Error::WatchError(answer(code)));
        let there = || Ok(Event::InitApply(()));
        for (events, through) in [
            (vec![refused(422), begun()], 0),
            (vec![begun(), told(500), there()], 1),
            (vec![begun(), there(), begun(), there()], 2),
            // What has nothing to do with it.
            (vec![refused(404), refused(429), told(410), begun(), there(), Ok(Event::InitDone)], 6),
            (vec![begun(), Ok(Event::InitDone), refused(500), begun(), Ok(Event::InitDone)], 5),
            // Later, by another API server.
            (vec![begun(), Ok(Event::InitDone), refused(422), begun()], 2),
            (vec![begun(), Ok(Event::InitDone), told(410), refused(500), begun()], 3),
        ] {
            let what = format!("{events:?}");
            assert_eq!(useful(events).await, through, "{what}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_never_tells_that_it_is_complete_ends() {
        let silent = |events: Vec<watcher::Result<Event<()>>>| {
            while_useful(stream::iter(events).chain(stream::pending())).take(3).count()
        };
        assert_eq!(silent(vec![]).await, 0);
        assert_eq!(silent(vec![Ok(Event::Init), Ok(Event::InitApply(()))]).await, 2);
        let complete = silent(vec![Ok(Event::Init), Ok(Event::InitDone)]);
        assert!(timeout(SILENCE * 100, complete).await.is_err(), "nothing need happen at rest");
    }

    #[test]
    fn the_pauses_grow() {
        let pauses: Vec<u128> = Patience::default().take(6).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 8000]);
    }
}
