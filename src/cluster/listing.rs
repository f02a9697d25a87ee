//! What there is of a kind, and then what changes.
//!
//! ```text
//!  kube's watcher asks for a watch that begins with what there is
//!       └─ answered from a list, as its text comes: ADDED ..., BOOKMARK ─▶ Init, InitApply ..., InitDone
//!  and then for one that goes on from there ─────────────────────────────▶ Apply, Delete ...
//! ```
//!
//! Both tell the same (<https://kubernetes.io/docs/reference/using-api/api-concepts/#streaming-lists>), and since Kubernetes 1.31
//! both come out of the API server's memory, as recent as etcd. But each event of such a watch is written for itself, which costs
//! the API server twice what a list does, and not every one has such watches. A list in pages is taken from etcd when nothing has
//! changed for some minutes. And from a whole list kube would first make a text and then all objects, which is many times what is
//! kept of them.

use std::{
    convert::Infallible,
    fmt::Debug,
    time::{Duration, Instant},
};

use axum::{
    body::{Body as Answer, Bytes, HttpBody, to_bytes},
    http::{HeaderValue, Request, Response, header::ACCEPT},
};
use futures::{Stream, StreamExt, stream};
use kube::{
    Api, Resource,
    client::Body,
    core::{
        Status, TypeMeta, WatchEvent,
        watch::{Bookmark, BookmarkMeta},
    },
    runtime::{
        WatchStreamExt,
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use serde::{
    Deserialize,
    de::{DeserializeOwned, IgnoredAny},
};
use serde_json::{json, value::RawValue};
use tokio::time::timeout;
use tower::{BoxError, Service, ServiceExt, service_fn};

/// For how long at most nothing may come of a list, or of a watch before it begins: longer than it may take to connect. A list as
/// a whole an API server gives no longer than that, if it is not told otherwise (`--request-timeout`).
pub const SILENCE: Duration = Duration::from_secs(60);
/// More than an API server says about what is wrong.
const REFUSAL: usize = 1 << 20;

/// The objects of a kind: those that there are, then how they change and go. What fails is tried again, a little later.
/// The client must be one that [begins with lists](beginning_with_lists).
pub fn listed_and_watched<K>(
    api: Api<K>,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Result<Event<K>>> + Send
where
    K: Clone + Debug + DeserializeOwned + Resource + Send + 'static,
{
    watcher(api, config.streaming_lists()).backoff(Patience::default())
}

/// Answers requests for watches that begin with what there is from lists; then they end, and are asked for from there on.
/// Everything else is for the inner service.
pub fn beginning_with_lists<S, B>(
    inner: S,
) -> impl Service<Request<Body>, Response = Response<Answer>, Error = BoxError, Future: Send> + Clone
where
    S: Service<Request<Body>, Response = Response<B>, Error: Into<BoxError>, Future: Send> + Clone + Send + 'static,
    B: HttpBody<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    service_fn(move |mut request| {
        let inner = inner.clone();
        async move {
            let is_list = make_list(&mut request);
            let is_watch = asks(&request, "watch=true");
            let answer = inner.oneshot(request);
            if !is_list && !is_watch {
                return Ok(answer.await.map_err(Into::into)?.map(Answer::new));
            }
            let answer = soon(answer).await?.map_err(Into::into)?.map(Answer::new);
            let status = answer.status();
            if status.is_client_error() || status.is_server_error() {
                let (head, why) = answer.into_parts();
                return Ok(Response::from_parts(head, soon(to_bytes(why, REFUSAL)).await??.into()));
            }
            if !status.is_success() {
                // To kube a page for logging in would be a watch that has ended.
                return Err(format!("it is answered with {status}").into());
            }
            Ok(if is_list { answer.map(as_watch_of) } else { answer })
        }
    })
}

/// Makes one for a list of a request for a watch that begins with what there is; false if it is none. No version is asked for,
/// so that the list is as recent as etcd: of several API servers, one that lags behind would tell a manager that has just started
/// of a past in which a machine was not yet stopped
/// (<https://kubernetes.io/docs/reference/using-api/api-concepts/#semantics-for-get-and-list>).
fn make_list<B>(request: &mut Request<B>) -> bool {
    if !asks(request, "sendInitialEvents=true") {
        return false;
    }
    let selects = |part: &&str| part.starts_with("labelSelector=") || part.starts_with("fieldSelector=");
    let selectors: Vec<&str> =
        request.uri().query().into_iter().flat_map(|query| query.split('&')).filter(selects).collect();
    // Parts of a URI make one.
    let Ok(uri) = format!("{}?{}", request.uri().path(), selectors.join("&")).parse() else { return false };
    *request.uri_mut() = uri;
    if let Some(accept) = request.headers_mut().get_mut(ACCEPT)
        && let Some(of_lists) =
            accept.to_str().ok().map(|one| one.replace("PartialObjectMetadata;", "PartialObjectMetadataList;"))
        && let Ok(of_lists) = HeaderValue::try_from(of_lists)
    {
        *accept = of_lists;
    }
    true
}

fn asks<B>(request: &Request<B>, what: &str) -> bool {
    request.uri().query().is_some_and(|query| query.contains(what))
}

/// Waits for something that does not take longer than [`SILENCE`].
async fn soon<T>(what: impl Future<Output = T>) -> Result<T, String> {
    timeout(SILENCE, what).await.map_err(|_| format!("nothing came for {} s", SILENCE.as_secs()))
}

/// The text of a list as that of a watch that tells the same.
fn as_watch_of(list: Answer) -> Answer {
    let begin = Some((list.into_data_stream(), List::default()));
    let events = stream::unfold(begin, |state| async {
        let (mut text, mut list) = state?;
        Some(match soon(text.next()).await {
            Ok(Some(Ok(more))) => (list.take(&more), Some((text, list))),
            Ok(None) => (list.end(), None),
            Ok(Some(Err(error))) => (line(&cut(&error.to_string())), None),
            Err(silence) => (line(&cut(&silence)), None),
        })
    });
    Answer::from_stream(events.map(Ok::<_, Infallible>))
}

/// An event that says that there is more, and that it did not come.
fn cut(why: &str) -> WatchEvent<()> {
    let status = Status::failure(&format!("the list can't be read to its end: {why}"), "");
    WatchEvent::Error(status.with_code(500).boxed())
}

fn line(event: &WatchEvent<()>) -> Vec<u8> {
    format!("{}\n", json!(event)).into()
}

/// A list whose text comes in pieces: its items become events as soon as they are complete.
#[derive(Default)]
struct List {
    /// What has come and is no event yet.
    text: Vec<u8>,
    /// How much there has to be until it is looked at again.
    enough: usize,
    /// What was before the items, from when they begin.
    before: Option<Vec<u8>>,
}

/// What is around the items, and those of them that are no events yet.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Around<'a> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    metadata: ListMeta,
    #[serde(borrow)]
    items: Option<Vec<&'a RawValue>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    #[serde(default, rename = "continue")]
    next_page: String,
}

impl List {
    /// How the items begin. A list that is written otherwise is read when all is there.
    const ITEMS: &[u8] = br#""items":["#;
    /// So much is looked at at a time, and always half of it new: what is not complete is read again.
    const PIECE: usize = 32 << 10;

    /// Takes in a piece. Returns the events of the items that are complete.
    fn take(&mut self, piece: &[u8]) -> Vec<u8> {
        self.text.extend_from_slice(piece);
        if self.text.len() < self.enough { Vec::new() } else { self.complete() }
    }

    fn complete(&mut self) -> Vec<u8> {
        let mut events = Vec::with_capacity(self.text.len());
        let mut at = 0;
        if self.before.is_none()
            && let Some(begin) = self.text.windows(Self::ITEMS.len()).position(|part| part == Self::ITEMS)
        {
            let before = &self.text[..begin + Self::ITEMS.len()];
            // Not those of something that is in an item.
            if serde_json::from_slice::<IgnoredAny>(&[before, b"]}"].concat()).is_ok() {
                at = before.len();
                self.before = Some(before.to_vec());
            }
        }
        if self.before.is_some() {
            loop {
                let is_between = |byte: &&u8| **byte == b',' || byte.is_ascii_whitespace();
                at += self.text[at..].iter().take_while(is_between).count();
                // What is no value is the end of the items, or what has not come yet.
                let mut values = serde_json::Deserializer::from_slice(&self.text[at..]).into_iter::<&RawValue>();
                let Some(Ok(item)) = values.next() else { break };
                added(item, &mut events);
                at += values.byte_offset();
            }
        }
        self.text.drain(..at);
        self.enough = (2 * self.text.len()).max(Self::PIECE);
        events
    }

    /// All has come. Returns the events of the rest; the last one says that this is all, or why it is not.
    fn end(mut self) -> Vec<u8> {
        let mut events = self.complete();
        let text = [self.before.unwrap_or_default(), self.text].concat();
        let last = match serde_json::from_slice::<Around<'_>>(&text) {
            Ok(around) => {
                around.items.iter().flatten().for_each(|item| added(item, &mut events));
                around.end()
            }
            Err(error) => cut(&error.to_string()),
        };
        events.extend(line(&last));
        events
    }
}

impl Around<'_> {
    /// The event that says that this is all, or why it is not.
    fn end(self) -> WatchEvent<()> {
        let Self { api_version, kind, metadata: ListMeta { resource_version, next_page }, .. } = self;
        if !next_page.is_empty() {
            return cut("it is but a page");
        }
        if resource_version.is_empty() {
            return cut("it has no resourceVersion");
        }
        let annotations = [("k8s.io/initial-events-end".into(), "true".into())].into();
        let metadata = BookmarkMeta { resource_version, annotations };
        WatchEvent::Bookmark(Bookmark { types: TypeMeta { api_version, kind }, metadata })
    }
}

/// Writes the event of an item: one line.
fn added(item: &RawValue, events: &mut Vec<u8>) {
    events.extend_from_slice(br#"{"type":"ADDED","object":"#);
    // In texts there are none: there they are escaped.
    events.extend(item.get().bytes().map(|byte| if byte == b'\n' { b' ' } else { byte }));
    events.extend_from_slice(b"}\n");
}

/// What the API server has answered to a list or a watch: an HTTP status code.
pub fn code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::WatchStartFailed(kube::Error::Api(answer)) => Some(answer.code),
        watcher::Error::WatchError(answer) => Some(answer.code),
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
    /// When there was no trouble for so long it begins with the first pause again. Before a list there is a sign of life that
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
    use std::sync::{Arc, Mutex};

    use kube::{
        Client,
        api::{ApiResource, DynamicObject},
        core::GroupVersionKind,
    };
    use proptest::{collection::vec, prelude::*};
    use serde_json::Value;

    use super::*;

    /// What the events tell, told in that order: each object, and then the version of the list or what is wrong.
    fn told(events: &[u8]) -> (Vec<Value>, Option<Result<String, String>>) {
        let (mut objects, mut last) = (Vec::new(), None);
        for line in std::str::from_utf8(events).unwrap().lines() {
            assert!(last.is_none(), "{line} after the end");
            match serde_json::from_str::<WatchEvent<Value>>(line).unwrap() {
                WatchEvent::Added(object) => objects.push(object),
                WatchEvent::Bookmark(all) => {
                    assert!(all.metadata.annotations.contains_key("k8s.io/initial-events-end"));
                    last = Some(Ok(all.metadata.resource_version));
                }
                WatchEvent::Error(status) => last = Some(Err(status.message)),
                _ => panic!("{line}"),
            }
        }
        (objects, last)
    }

    /// A list that comes in pieces of that size.
    fn events(text: &str, piece: usize) -> Vec<u8> {
        let mut list = List::default();
        let mut events: Vec<u8> = text.as_bytes().chunks(piece).flat_map(|piece| list.take(piece)).collect();
        events.extend(list.end());
        events
    }

    proptest! {
        #[test]
        fn a_list_tells_its_items_however_it_comes(
            texts in vec(r#"[a-z"\\\[\]{},:äß\n ]{0,40}|"items":\["#, 0..12), piece in 1usize..200, large in 0usize..3, shape in 0usize..5,
            shorter in any::<prop::sample::Index>(),
        ) {
            let items: Vec<Value> =
                texts.iter().map(|text| json!({ "metadata": { text.as_str(): text.repeat(1 + 1000 * large) }, "items": [text] })).collect();
            let written = serde_json::to_string(&items).unwrap();
            let text = match shape {
                // Kinds that the API server knows, ...
                0 => format!(r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{"resourceVersion":"17"}},"items":{written}}}"#) + "\n",
                // ... custom resources, ...
                1 => format!(r#"{{"apiVersion":"g/v1","items":{written},"kind":"L","metadata":{{"continue":"","resourceVersion":"17"}}}}"#),
                // ... and as a proxy may write it.
                2 => serde_json::to_string_pretty(&json!({ "metadata": { "resourceVersion": "17" }, "items": items })).unwrap(),
                3 => format!(r#"{{ "metadata": {{ "resourceVersion": "17" }}, "items": {written} }}"#),
                _ => serde_json::to_string_pretty(&items).map(|items| {
                    format!("{{\"items\":[\n\t{}\n, \"metadata\": {{ \"resourceVersion\": \"17\" }}}}", items.trim_start_matches('['))
                }).unwrap(),
            };
            prop_assert_eq!(told(&events(&text, piece * (1 + 100 * large))), (items, Some(Ok("17".to_owned()))));
            // Cut anywhere it tells less, and that it does.
            let length = text.floor_char_boundary(shorter.index(text.trim_end().len()));
            let (_, last) = told(&events(&text[..length], piece * (1 + 100 * large)));
            prop_assert!(matches!(last, Some(Err(_))), "{:?}", last);
        }
    }

    #[test]
    fn items_are_told_before_the_list_ends() {
        let mut list = List::default();
        let item = json!({ "metadata": { "name": "x".repeat(1000) } }).to_string();
        let head = list.take(br#"{"metadata":{"resourceVersion":"17"},"items":["#);
        let objects = told(&[head, list.take(format!("{item},").repeat(1000).as_bytes())].concat()).0;
        assert_eq!(objects.len(), 1000);
        assert!(list.text.len() < 1000, "what is told is not kept");
    }

    #[test]
    fn a_list_without_items_is_complete_and_a_page_is_not() {
        for items in ["[]", "null"] {
            let list = format!(
                r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{"resourceVersion":"17"}},"items":{items}}}"#
            );
            assert_eq!(told(&events(&list, 1000)), (vec![], Some(Ok("17".to_owned()))));
        }
        for (metadata, why) in [
            (r#"{"resourceVersion":"17","continue":"x"}"#, "a page"),
            (r#"{"resourceVersion":""}"#, "no resourceVersion"),
            (r#"{"resourceVersion":null}"#, "expected a string"),
            ("{}", "missing field `resourceVersion`"),
        ] {
            let (objects, last) = told(&events(&format!(r#"{{"metadata":{metadata},"items":[{{}}]}}"#), 1000));
            assert_eq!(objects.len(), 1);
            let said = last.unwrap().unwrap_err();
            assert!(said.contains(why), "{said}");
        }
    }

    type Asked = Arc<Mutex<Vec<(String, String)>>>;

    /// A client of an API server that answers so, one after the other and then no more, and what it was asked for.
    fn client(answers: Vec<(u16, Answer)>) -> (Client, Asked) {
        let asked = Asked::default();
        let (noted, answers) = (asked.clone(), Arc::new(Mutex::new(answers.into_iter())));
        let server = service_fn(move |request: Request<Body>| {
            let accept = request.headers().get(ACCEPT).map_or("", |accept| accept.to_str().unwrap());
            noted.lock().unwrap().push((request.uri().to_string(), accept.to_owned()));
            let answer = answers.lock().unwrap().next();
            async move {
                let Some((code, answer)) = answer else { return std::future::pending().await };
                Ok::<_, Infallible>(Response::builder().status(code).body(answer).unwrap())
            }
        });
        (Client::new(beginning_with_lists(server), "ns"), asked)
    }

    fn machines(client: Client) -> impl Stream<Item = watcher::Result<Event<DynamicObject>>> + Unpin {
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("", "v1", "Pod"));
        let api = Api::namespaced_with(client, "ns", &kind);
        listed_and_watched(api, watcher::Config::default().labels("a=b,c=d")).boxed()
    }

    fn list() -> Answer {
        let item = r#"{"apiVersion":"v1","kind":"Pod","metadata":{"name":"apple"}}"#;
        Answer::from(format!(
            r#"{{"kind":"PodList","apiVersion":"v1","metadata":{{"resourceVersion":"17"}},"items":[{item}]}}"#
        ))
    }

    /// Endless as a watch is.
    fn watch(events: &'static str) -> Answer {
        Answer::from_stream(stream::iter([Ok::<_, Infallible>(events)]).chain(stream::pending()))
    }

    const CHANGE: &str = "{\"type\":\"MODIFIED\",\"object\":{\"apiVersion\":\"v1\",\"kind\":\"Pod\",\"metadata\":{\"name\":\"pear\",\"resourceVersion\":\"18\"}}}\n";

    fn said(event: &watcher::Result<Event<DynamicObject>>) -> String {
        let name = |object: &DynamicObject| object.metadata.name.clone().unwrap();
        match event {
            Ok(Event::Init) => "init".into(),
            Ok(Event::InitApply(object)) => format!("there is {}", name(object)),
            Ok(Event::InitDone) => "that is all".into(),
            Ok(Event::Apply(object)) => format!("{} changed", name(object)),
            Ok(Event::Delete(object)) => format!("{} is gone", name(object)),
            Err(error) => format!("{error}"),
        }
    }

    #[tokio::test]
    async fn what_there_is_is_listed_and_then_watched() {
        let (client, asked) = client(vec![(200, list()), (200, watch(CHANGE))]);
        let events: Vec<_> = machines(client).take(4).map(|event| said(&event)).collect().await;
        assert_eq!(events, ["init", "there is apple", "that is all", "pear changed"]);
        let asked = asked.lock().unwrap();
        assert_eq!(asked[0].0, "/api/v1/namespaces/ns/pods?labelSelector=a%3Db%2Cc%3Dd");
        assert!(asked[1].0.contains("watch=true") && asked[1].0.contains("resourceVersion=17"), "{asked:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_list_that_does_not_come_to_its_end_is_begun_again() {
        let half = r#"{"metadata":{"resourceVersion":"17"},"items":[{"apiVersion":"v1","kind":"Pod","metadata":{"name":"apple"}},"#;
        let broken = stream::iter([Ok(half), Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof))]);
        let refused = r#"{"kind":"Status","apiVersion":"v1","status":"Failure","message":"too much","code":500}"#;
        for (code, first, seen, why) in [
            (200, Answer::from(half), true, "EOF while parsing a list"),
            (200, Answer::from_stream(broken), true, "unexpected end of file"),
            (200, watch(half), true, "nothing came for 60 s"),
            (200, Answer::empty(), true, "EOF while parsing a value"),
            (302, Answer::empty(), false, "answered with 302"),
            (500, Answer::from(refused), false, "too much"),
            (500, watch(refused), false, "nothing came for 60 s"),
        ] {
            let (client, _) = client(vec![(code, first), (200, list()), (200, watch(CHANGE))]);
            let mut events = machines(client).map(|event| said(&event));
            let mut trouble = events.next().await.unwrap();
            assert_eq!(trouble == "init", seen);
            while ["init", "there is apple"].contains(&&*trouble) {
                trouble = events.next().await.unwrap();
            }
            assert!(trouble.contains(why), "{trouble}");
            let rest: Vec<_> = events.take(4).collect().await;
            assert_eq!(rest, ["init", "there is apple", "that is all", "pear changed"], "{why}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_api_server_that_does_not_answer_is_asked_again() {
        let (client, asked) = client(vec![]);
        let troubles: Vec<_> = machines(client).take(2).map(|event| said(&event)).collect().await;
        assert!(troubles.iter().all(|trouble| trouble.contains("nothing came")), "{troubles:?}");
        assert_eq!(asked.lock().unwrap().len(), 2);

        let (client, asked) = self::client(vec![(200, list())]);
        let events: Vec<_> = machines(client).take(5).map(|event| said(&event)).collect().await;
        assert_eq!(events[..3], ["init", "there is apple", "that is all"]);
        assert!(events[3].contains("nothing came"), "{events:?}");
        assert_eq!(asked.lock().unwrap().len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_watch_that_is_not_begun_is_asked_for_again_after_a_pause() {
        for (code, answer, why) in [(500, watch("{"), "nothing came"), (302, Answer::empty(), "answered with 302")] {
            let (client, _) = client(vec![(200, list()), (code, answer), (200, watch(CHANGE))]);
            let begin = tokio::time::Instant::now();
            let events: Vec<_> = machines(client).skip(3).take(2).map(|event| said(&event)).collect().await;
            assert!(events[0].contains(why), "{events:?}");
            assert_eq!(events[1], "pear changed");
            assert!(begin.elapsed() >= Patience::FIRST);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn when_the_api_server_does_not_know_any_more_what_has_changed_it_is_listed_again() {
        let expired = "{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\",\
            \"message\":\"too old\",\"reason\":\"Expired\",\"code\":410}}\n";
        let (client, asked) = client(vec![(200, list()), (200, watch(expired)), (200, list()), (200, watch(CHANGE))]);
        let events: Vec<_> = machines(client).take(8).map(|event| said(&event)).collect().await;
        assert!(events[3].contains("too old"), "{events:?}");
        assert_eq!(events[4..], ["init", "there is apple", "that is all", "pear changed"]);
        let lists = asked.lock().unwrap().iter().filter(|(uri, _)| !uri.contains("watch=true")).count();
        assert_eq!(lists, 2);
    }

    #[test]
    fn of_what_is_listed_only_metadata_is_asked_for_where_the_watch_does() {
        let of = |uri: &str| {
            let mut request = Request::get(uri)
                .header(ACCEPT, "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1")
                .body(())
                .unwrap();
            make_list(&mut request)
                .then(|| (request.uri().to_string(), request.headers()[ACCEPT].to_str().unwrap().to_owned()))
        };
        assert_eq!(
            of("/api/v1/secrets?&watch=true&fieldSelector=x&sendInitialEvents=true&resourceVersion=0"),
            Some((
                "/api/v1/secrets?fieldSelector=x".into(),
                "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1".into()
            ))
        );
        assert_eq!(of("/api/v1/secrets?&watch=true&resourceVersion=17"), None);
        assert_eq!(of("/api/v1/secrets"), None);
    }

    #[test]
    fn the_pauses_grow() {
        let pauses: Vec<u128> = Patience::default().take(6).map(|pause| pause.as_millis()).collect();
        assert_eq!(pauses, [500, 1000, 2000, 4000, 8000, 8000]);
    }
}
