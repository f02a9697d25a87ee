//! The client through which the manager works.
//!
//! ```text
//!  request ─▶ an apply is made YAML ─▶ redirect is an error ─▶ retry (429, 503, 504) ─▶ fence: may we write? may we still? ─▶ timeout ─▶ API server
//! ```
//!
//! A write that is not answered when the fence closes is cancelled: the connection is closed (HTTP/1) or the stream is reset (HTTP/2), and
//! the API server then cancels what it does for the request. So a write that hangs, for example in a webhook, is not carried out after
//! another manager leads.

use std::{
    fmt::Write as _,
    task::{Context, Poll},
    time::Duration,
};

use anyhow::Context as _;
use axum::http::{
    Request, Response,
    header::{CONTENT_TYPE, RETRY_AFTER},
};
use futures::{FutureExt, TryFutureExt, future::BoxFuture};
use kube::{
    Client,
    client::{Body, ClientBuilder, DynBody, retry::RetryPolicy},
};
use tower::{
    BoxError, Service,
    buffer::BufferLayer,
    layer::{layer_fn, util::Stack},
    retry::RetryLayer,
    timeout::TimeoutLayer,
    util::{BoxService, MapRequestLayer, MapResponseLayer, MapResultLayer},
};

use super::leader::{BootTime, Fence};

/// How a request is sent again if the API server is busy (429, 503, 504) and does not say when: the first and the longest pause,
/// and how often. After that the request fails, so that one VM does not hold up others.
const RETRY: (Duration, Duration, u32) = (Duration::from_millis(50), Duration::from_secs(1), 4);
/// The longest pause that `Retry-After` may ask for. An API server asks for a second, but a proxy before it may ask for many
/// minutes.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(10);
/// How long an answer may take to begin. By default an API server ends a request after a minute (`--request-timeout`); one that
/// has lost its power or its network never answers.
const ANSWER: Duration = Duration::from_secs(70);
/// How long nothing may come of an answer that has begun, for example a list. Longer than kube's bound for a silent watch (295 s).
const SILENCE: Duration = Duration::from_secs(300);
/// How many requests may wait in the client: more than there ever are.
const WAITING: usize = 1024;

/// What carries requests to the API server.
pub type Transport = BoxService<Request<Body>, Response<Box<DynBody>>, BoxError>;

/// A client that sends a write only while the fence is open. The fence is asked each time that the write is sent, also when it is
/// sent again.
///
/// # Errors
/// If the configuration cannot be used, for example because a certificate is invalid.
pub fn fenced(mut config: kube::Config, fence: Fence) -> anyhow::Result<Client> {
    // Kube would send again without asking the fence, for minutes.
    config.default_retry = false;
    config.read_timeout = Some(SILENCE);
    config.reset_reader_on_write = true;
    fenced_over(ClientBuilder::try_from(config)?, fence)
}

/// The same over any transport.
///
/// # Errors
/// If the pauses between retries can't be used.
pub fn fenced_over(transport: ClientBuilder<Transport>, fence: Fence) -> anyhow::Result<Client> {
    let limited = transport.with_layer(&TimeoutLayer::new(ANSWER));
    let checked = limited.with_layer(&layer_fn(move |inner| Fenced { inner, fence: fence.clone() }));
    // A retry needs a clone of the service, which the buffer makes possible.
    let cloneable = checked.with_layer(&BufferLayer::new(WAITING));
    let retried = cloneable.with_layer(&retrying()?).with_layer(&MapResultLayer::new(no_redirect));
    Ok(retried.with_layer(&MapRequestLayer::new(as_yaml)).build())
}

/// Makes the body of an apply valid YAML. The API server reads it as such, and refuses an object that has one of these characters anywhere.
fn as_yaml(mut request: Request<Body>) -> Request<Body> {
    let is_apply = |kind: &axum::http::HeaderValue| kind.as_bytes().starts_with(b"application/apply-patch".as_slice());
    if request.headers().get(CONTENT_TYPE).is_some_and(is_apply)
        && let Some(copy) = request.body().try_clone()
        && let Some(Ok(bytes)) = copy.collect_bytes().now_or_never()
        && let Some(escaped) = std::str::from_utf8(&bytes).ok().and_then(escaped)
    {
        *request.body_mut() = Body::from(escaped.into_bytes());
    }
    request
}

/// JSON in which the characters are escaped that YAML refuses, or reads as a line break. They occur only in texts.
fn escaped(json: &str) -> Option<String> {
    let is_refused = |character: char| {
        matches!(character, '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
    };
    json.contains(is_refused).then(|| {
        let mut escaped = String::with_capacity(json.len() + 64);
        for character in json.chars() {
            if is_refused(character) {
                let _ = write!(escaped, "\\u{:04x}", u32::from(character));
            } else {
                escaped.push(character);
            }
        }
        escaped
    })
}

/// A service that sends a write only while the fence is open, and waits for the answer only so long.
struct Fenced<S> {
    inner: S,
    fence: Fence,
}

impl<S> Service<Request<Body>> for Fenced<S>
where
    S: Service<Request<Body>, Error: Into<BoxError> + 'static, Future: Send + 'static>,
    S::Response: Send + 'static,
{
    type Response = S::Response;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<S::Response, BoxError>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(context).map_err(Into::into)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        if request.method().is_safe() {
            return self.inner.call(request).map_err(Into::into).boxed();
        }
        if let Err(error) = self.fence.check(BootTime::now()) {
            return std::future::ready(Err(error.into())).boxed();
        }
        let (fence, answer) = (self.fence.clone(), self.inner.call(request).map_err(Into::into));
        async move {
            tokio::select! {
                answer = answer => answer,
                error = fence.closed() => Err(error.into()),
            }
        }
        .boxed()
    }
}

type Retrying<B> = Stack<MapResponseLayer<fn(Response<B>) -> Response<B>>, RetryLayer<RetryPolicy>>;

fn retrying<B>() -> anyhow::Result<Retrying<B>> {
    let (first, longest, times) = RETRY;
    let policy = RetryPolicy::new(first, longest, times, true).context("RETRY is no policy")?;
    Ok(Stack::new(MapResponseLayer::new(limit_retry_after), RetryLayer::new(policy)))
}

fn limit_retry_after<B>(mut response: Response<B>) -> Response<B> {
    let asked = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse::<u64>().ok());
    if asked.is_some_and(|seconds| seconds > LONGEST_RETRY_AFTER.as_secs()) {
        response.headers_mut().insert(RETRY_AFTER, LONGEST_RETRY_AFTER.as_secs().into());
    }
    response
}

/// To kube, a redirect to a login page would be a watch that has just ended, and it would begin the next one at once.
fn no_redirect<B>(answer: Result<Response<B>, BoxError>) -> Result<Response<B>, BoxError> {
    match answer {
        Ok(answer) if answer.status().is_redirection() => {
            Err(format!("the API server answers with {}", answer.status()).into())
        }
        answer => answer,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        future::{pending, ready},
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use axum::{Router, http::StatusCode};
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::{Api, api::PostParams};
    use tokio::time::Instant;
    use tower::{Layer, ServiceExt};

    use super::*;
    use crate::{process::ErrorChain, test_support::played};

    #[test]
    fn an_apply_has_no_character_that_yaml_refuses() {
        let text = "a\u{7f}\u{80}\u{85}\u{9f}\u{2028}\u{feff}\u{ffff}\u{e9}\u{1f34e}";
        let json = serde_json::to_string(text).unwrap();
        let escaped = escaped(&json).unwrap();
        assert_eq!(escaped, "\"a\\u007f\\u0080\\u0085\\u009f\\u2028\\ufeff\\uffff\u{e9}\u{1f34e}\"");
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), text);
        assert_eq!(serde_yaml::from_str::<String>(&escaped).unwrap(), text);
        assert_eq!(super::escaped("{\"a\": \"\u{e9}\"}"), None);
    }

    #[tokio::test]
    async fn a_manager_that_does_not_lead_reads_and_does_not_write() {
        // No server listens there.
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let fence = Fence::default();
        let maps: Api<ConfigMap> = Api::default_namespaced(fenced(config, fence.clone()).unwrap());
        let write = async || maps.create(&PostParams::default(), &ConfigMap::default()).await.unwrap_err();
        assert!(ErrorChain(&write().await).to_string().contains("does not lead"));
        assert!(!ErrorChain(&maps.get("apple").await.unwrap_err()).to_string().contains("does not lead"));
        fence.open();
        assert!(!ErrorChain(&write().await).to_string().contains("does not lead"));
    }

    /// An API server that is busy twice. Returns how often it was asked, and whether that ended well.
    async fn ask(at_first: impl Fn(&Fence) + Clone + Send + Sync + 'static) -> (usize, bool) {
        let (fence, asked) = (Fence::default(), Arc::new(AtomicUsize::new(0)));
        fence.open();
        let answer = {
            let (fence, asked) = (fence.clone(), asked.clone());
            move || async move {
                let times = asked.fetch_add(1, Ordering::SeqCst) + 1;
                if times == 1 {
                    at_first(&fence);
                }
                if times <= 2 { (StatusCode::SERVICE_UNAVAILABLE, "") } else { (StatusCode::OK, "{}") }
            }
        };
        let client = fenced(played(Router::new().fallback(answer)).await, fence).unwrap();
        let request = Request::post("/x").body(Vec::new()).unwrap();
        let done = client.request::<serde_json::Value>(request).await.is_ok();
        (asked.load(Ordering::SeqCst), done)
    }

    #[tokio::test]
    async fn an_api_server_that_never_answers_is_given_up() {
        let arrived = Arc::new(tokio::sync::Notify::new());
        let answer = {
            let arrived = arrived.clone();
            move || async move {
                arrived.notify_one();
                pending::<StatusCode>().await
            }
        };
        let fence = Fence::default();
        fence.open();
        let client = fenced(played(Router::new().fallback(answer)).await, fence).unwrap();
        let request = Request::post("/x").body(Vec::new()).unwrap();
        let asked = tokio::spawn(async move { client.request::<serde_json::Value>(request).await });
        arrived.notified().await;
        // From here on each pause is skipped.
        tokio::time::pause();
        let answer = tokio::time::timeout(2 * ANSWER, asked).await.expect("an end to it");
        let error = answer.unwrap().unwrap_err();
        assert!(ErrorChain(&error).to_string().contains("timed out"), "{}", ErrorChain(&error));
    }

    #[tokio::test(start_paused = true)]
    async fn a_busy_api_server_says_when_to_retry_up_to_a_limit() {
        // Busy twice. Returns how long that took.
        let ask = async |busy_status: StatusCode, after: &'static str| {
            let asked = Arc::new(AtomicUsize::new(0));
            let api = tower::service_fn(move |_: Request<Body>| {
                let busy = asked.fetch_add(1, Ordering::SeqCst) < 2;
                let status = if busy { busy_status } else { StatusCode::OK };
                ready(
                    Response::builder()
                        .status(status)
                        .header(RETRY_AFTER, after)
                        .body(())
                        .map_err(tower::BoxError::from),
                )
            });
            let start = Instant::now();
            let answer = retrying().unwrap().layer(api).oneshot(Request::new(Body::empty())).await;
            assert_eq!(answer.unwrap().status(), StatusCode::OK);
            start.elapsed().as_secs()
        };
        for status in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT] {
            assert_eq!(ask(status, "3").await, 6);
            assert_eq!(ask(status, "600").await, 2 * LONGEST_RETRY_AFTER.as_secs());
            assert_eq!(ask(status, "tomorrow").await, 0, "by itself it waits far less than a second");
        }
    }

    #[tokio::test]
    async fn a_redirect_is_an_error() {
        let answer = async || (StatusCode::FOUND, [("location", "/login")]);
        let client = fenced(played(Router::new().fallback(answer)).await, Fence::default()).unwrap();
        let error = client.request_text(Request::get("/x").body(Vec::new()).unwrap()).await.unwrap_err();
        assert!(ErrorChain(&error).to_string().contains("302 Found"), "{}", ErrorChain(&error));
    }

    /// An API server that holds a write until it is cancelled.
    #[tokio::test]
    async fn a_write_under_way_is_cancelled_when_the_fence_closes() {
        struct Cancelled(Arc<tokio::sync::Notify>);

        impl Drop for Cancelled {
            fn drop(&mut self) {
                self.0.notify_one();
            }
        }

        let (arrived, cancelled) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
        let answer = {
            let (arrived, cancelled) = (arrived.clone(), cancelled.clone());
            move || async move {
                let _cancelled = Cancelled(cancelled);
                arrived.notify_one();
                pending::<StatusCode>().await
            }
        };
        let config = played(Router::new().fallback(answer)).await;
        for ends_by_itself in [false, true] {
            let fence = Fence::default();
            fence.open();
            let client = fenced(config.clone(), fence.clone()).unwrap();
            let ask = |request: axum::http::request::Builder| {
                let request = request.body(Vec::new()).unwrap();
                let client = client.clone();
                tokio::spawn(async move { client.request::<serde_json::Value>(request).await })
            };
            let write = ask(Request::post("/x"));
            arrived.notified().await;
            let read = ask(Request::get("/x"));
            arrived.notified().await;
            if ends_by_itself {
                fence.open_until(BootTime::now() + Duration::from_millis(10));
            } else {
                fence.close();
            }
            let error = write.await.unwrap().unwrap_err();
            assert!(ErrorChain(&error).to_string().contains("does not lead"), "{}", ErrorChain(&error));
            cancelled.notified().await;
            assert!(!read.is_finished(), "only writes are cancelled");
            read.abort();
            cancelled.notified().await;
        }
    }

    #[tokio::test]
    async fn a_retry_passes_the_fence_again() {
        assert_eq!(ask(|_| ()).await, (3, true));
        assert_eq!(ask(Fence::close).await, (1, false));
    }
}
