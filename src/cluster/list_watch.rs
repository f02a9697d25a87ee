//! Lists a kind of object and then watches it, by kube's [`watcher`], with a pause after each failure.

use std::{fmt::Debug, future::ready, time::Duration};

use backon::ExponentialBuilder;
use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use kube::{
    Api, Resource,
    runtime::{
        WatchStreamExt,
        utils::{Backoff, ResetTimerBackoff},
        watcher::{self, Event, ExponentialBackoff, watcher},
    },
};
use serde::de::DeserializeOwned;
use tokio::time::sleep;

/// How many objects the API server sends at once. This bounds what a list takes in memory: kube reads a page as a whole.
const PAGE: u32 = 250;

/// The first and the longest pause before the next try. It is short enough that a CustomResourceDefinition that appears is soon
/// seen.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
const LONGEST_PAUSE: Duration = Duration::from_secs(8);
/// After so long without a failure the first pause is used again.
const RESET: Duration = Duration::from_secs(60);

/// The objects of a kind: first those that exist, then each change. After a failure it goes on from where it was or, where the
/// API server does not know any more what has changed since (410), lists again.
///
/// The list asks for no resourceVersion, so it is as recent as etcd: of several API servers one may lag behind, and would show a
/// manager that has just started a past in which, for example, a VM was not stopped yet
/// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#semantics-for-get-and-list>). All pages of a list are of one
/// moment.
///
/// A watch that is refused ([`is_refused`]) is begun again with a list. Without it nobody would see that the watch works again, because a
/// watch says nothing until something changes.
pub fn list_watch<K>(api: Api<K>, config: watcher::Config) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Clone + Debug + DeserializeOwned + Resource + Send + 'static,
{
    find_and_watch(move || ready(Ok(api.clone())), config)
}

/// The same of a resource that must be found first. It is looked for again when the API server does not have it any more.
pub fn find_and_watch<K, F>(
    find: impl Fn() -> F + Send,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Clone + Debug + DeserializeOwned + Resource + Send + 'static,
    F: Future<Output = kube::Result<Api<K>>> + Send,
{
    let config = config.page_size(PAGE);
    let begin = (None, Pauses::default(), None);
    stream::unfold((begin, find), move |((events, mut pauses, pause), find)| {
        let config = config.clone();
        async move {
            if let Some(pause) = pause {
                sleep(pause).await;
            }
            let mut events: BoxStream<'static, watcher::Result<Event<K>>> = match events {
                Some(events) => events,
                None => match find().await {
                    Ok(api) => watcher(api, config).backoff(Pauses::default()).boxed(),
                    Err(error) => {
                        let pause = pauses.next();
                        return Some((Err(watcher::Error::InitialListFailed(error)), ((None, pauses, pause), find)));
                    }
                },
            };
            let event = events.next().await?;
            let (events, pause) = match &event {
                Err(error @ (watcher::Error::WatchStartFailed(_) | watcher::Error::WatchError(_)))
                    if is_refused(error) =>
                {
                    (None, None)
                }
                Err(error) if code(error) == Some(404) => (None, pauses.next()),
                _ => (Some(events), None),
            };
            Some((event, ((events, pauses, pause), find)))
        }
    })
}

/// Whether the API server refuses a list or a watch until a person changes something: the manager lacks the right, or the API server does not
/// have the kind in this version.
pub fn is_refused(error: &watcher::Error) -> bool {
    matches!(code(error), Some(403..=405))
}

/// The HTTP status code with which the API server answered to a list or a watch.
pub fn code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(answer))
        | watcher::Error::WatchStartFailed(kube::Error::Api(answer)) => Some(answer.code),
        watcher::Error::WatchError(answer) => Some(answer.code),
        _ => None,
    }
}

/// Kube's back-off, which grows while lists fail. Kube resets it with each event, and before each list there is one
/// ([`Event::Init`]), so that the pauses would never grow. Here only time resets it.
struct Pauses(ResetTimerBackoff<ExponentialBackoff>);

impl Default for Pauses {
    fn default() -> Self {
        let pauses = ExponentialBuilder::default()
            .with_min_delay(FIRST_PAUSE)
            .with_max_delay(LONGEST_PAUSE)
            .with_factor(2.0)
            .without_max_times();
        Self(ResetTimerBackoff::new(pauses.into(), RESET))
    }
}

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next()
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {}
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use axum::{
        body::Body,
        http::{Request, Response},
    };
    use kube::{
        Client,
        api::{ApiResource, DynamicObject},
        core::GroupVersionKind,
    };
    use serde_json::{Value, json};
    use tokio::time::{Instant, timeout};
    use tower::service_fn;

    use super::*;

    type Requests = Arc<Mutex<Vec<String>>>;

    /// A client of an API server that gives these answers, one after the other and then none, and what it was asked for.
    fn client(answers: Vec<(u16, Body)>) -> (Client, Requests) {
        let requests = Requests::default();
        let (noted, answers) = (requests.clone(), Arc::new(Mutex::new(answers.into_iter())));
        let server = service_fn(move |request: Request<kube::client::Body>| {
            noted.lock().unwrap().push(request.uri().to_string());
            let answer = answers.lock().unwrap().next();
            async move {
                let Some((code, body)) = answer else { return std::future::pending().await };
                Ok::<_, Infallible>(Response::builder().status(code).body(body).unwrap())
            }
        });
        (Client::new(server, "ns"), requests)
    }

    fn pods(client: Client) -> impl Stream<Item = watcher::Result<Event<DynamicObject>>> + Unpin {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        list_watch(Api::namespaced_with(client, "ns", &kind), watcher::Config::default().labels("a=b")).boxed()
    }

    fn pod(name: &str, version: u32) -> Value {
        json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name, "resourceVersion": version.to_string() } })
    }

    fn page(name: &str, next_page: &str) -> Body {
        let metadata = json!({ "resourceVersion": "17", "continue": next_page });
        Body::from(
            json!({ "kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": [pod(name, 1)] }).to_string(),
        )
    }

    fn event(type_: &str, object: Value) -> Body {
        let line = format!("{}\n", json!({ "type": type_, "object": object }));
        Body::from_stream(stream::iter([Ok::<_, Infallible>(line)]).chain(stream::pending()))
    }

    fn status(code: u16) -> Value {
        json!({ "kind": "Status", "apiVersion": "v1", "status": "Failure", "message": "refused", "reason": "", "code": code })
    }

    fn text(event: watcher::Result<Event<DynamicObject>>) -> String {
        event.map_or_else(|error| format!("error {}", code(&error).unwrap_or_default()), |event| event.to_string())
    }

    #[tokio::test]
    async fn objects_are_listed_in_pages_of_one_moment_and_then_watched() {
        let answers =
            vec![(200, page("apple", "next")), (200, page("pear", "")), (200, event("MODIFIED", pod("pear", 18)))];
        let (client, requests) = client(answers);
        let events: Vec<_> = pods(client).take(5).map(text).collect().await;
        assert_eq!(events, ["Init", "InitApply(apple)", "InitApply(pear)", "InitDone", "Apply(pear)"]);
        let requests = requests.lock().unwrap();
        assert!(requests[0].contains("limit=250") && !requests[0].contains("resourceVersion"), "{requests:?}");
        assert!(requests[1].contains("continue=next"), "{requests:?}");
        assert!(requests[2].contains("watch=true") && requests[2].contains("resourceVersion=17"), "{requests:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_while_lists_fail() {
        let refused = || (404, Body::from(status(404).to_string()));
        let answers = (0..7).map(|_| refused()).chain([(200, page("apple", ""))]).collect();
        let (client, _) = client(answers);
        let start = Instant::now();
        let events: Vec<_> = pods(client).take(16).map(text).collect().await;
        let failed = ["Init", "error 404"].repeat(7);
        assert_eq!(events, [&failed[..], &["Init", "InitApply(apple)"]].concat());
        assert_eq!(start.elapsed().as_millis(), 500 + 1000 + 2000 + 4000 + 8000 + 8000 + 8000);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_refused_begins_with_a_list_again() {
        for refused in [403, 404] {
            let refusal = || Body::from(status(refused).to_string());
            let answers =
                vec![(200, page("apple", "")), (refused, refusal()), (refused, refusal()), (200, page("pear", ""))];
            let (client, _) = client(answers);
            let events = pods(client).take(9).map(text).collect::<Vec<_>>();
            let events = timeout(RESET, events).await.expect("a list after the refusal");
            let error = format!("error {refused}");
            let expected =
                ["Init", "InitApply(apple)", "InitDone", &error, "Init", &error, "Init", "InitApply(pear)", "InitDone"];
            assert_eq!(events, expected);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_breaks_off_and_a_watch_that_expired_are_begun_again() {
        let half = Body::from(r#"{"metadata":{"resourceVersion":"17"},"items":[{"metadata":{"name":"apple"}},"#);
        let expired = event("ERROR", status(410));
        let answers = vec![(200, half), (200, page("apple", "")), (200, expired), (200, page("pear", ""))];
        let (client, _) = client(answers);
        let events: Vec<_> = pods(client).take(9).map(text).collect().await;
        let expected = [
            "Init",
            "error 0",
            "Init",
            "InitApply(apple)",
            "InitDone",
            "error 410",
            "Init",
            "InitApply(pear)",
            "InitDone",
        ];
        assert_eq!(events, expected);
    }
}
