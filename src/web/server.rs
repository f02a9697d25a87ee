//! The server: its paths, what holds for all of them, and its connections.
//!
//! Everybody may reach it, so everything that a client can take has a limit: connections, the time for a request's head and body, its size, and
//! the time for an answer.

use std::{
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{FromRequest, State},
    http::{HeaderName, HeaderValue, Method, Request, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpListener,
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::{TlsAcceptor, rustls::ServerConfig};
use tower::ServiceExt;
use tower_http::{
    catch_panic::CatchPanicLayer,
    compression::CompressionLayer,
    csrf::{ConfigError, CsrfLayer},
    limit::RequestBodyLimitLayer,
    set_header::SetResponseHeaderLayer,
    timeout::{RequestBodyTimeoutLayer, TimeoutLayer},
};
use tracing::debug;

use super::{
    act,
    app::App,
    client::{Client, is_proxy},
    connection, console, create, detail, list, live, objects, pages, palette, pools, resize, sign_in, sign_in_oidc,
    signed_in::{self, Administrator, Pause, Reset, Restart, Resume, SignedIn, Start, Stop},
    site::CALLBACK,
    template_sets,
};
use crate::process::{
    connections::{Connection, Connections, Limits, Place, ProbeListener},
    signals::terminated,
};

/// What the kubelet asks.
const PROBES: [&str; 2] = ["/livez", "/readyz"];
/// The largest body of a request, in bytes: that of the form with a password.
const BODY: usize = 16 << 10;
/// The same for an action on many VMs, each of which is named.
const LARGE_BODY: usize = 512 << 10;
/// How long the head of a request may take, and then its body between two pieces.
const HEAD: Duration = Duration::from_secs(10);
/// How long an answer may take. A stream has begun by then.
const ANSWER: Duration = Duration::from_secs(30);
/// The largest head of a request, in bytes: a browser sends the cookies of other programs of the same host, too.
const LARGEST_HEAD: usize = 32 << 10;
/// For how long a browser that was here over HTTPS comes in no other way (RFC 6797).
const HSTS: &str = "max-age=31536000";
/// How long requests may take when the program ends.
const END: Duration = Duration::from_secs(3);

/// All paths. `origins` are those of the site beside the one in a request's `Host`, such as `https://vms.example.com`.
///
/// # Errors
/// If an origin is none.
pub(super) fn routes(app: App, origins: &[String]) -> Result<Router, ConfigError> {
    let csrf = origins.iter().try_fold(CsrfLayer::new(), |layer, origin| layer.add_trusted_origin(origin))?;
    let set = |name: &'static str, value: &'static str| {
        SetResponseHeaderLayer::if_not_present(HeaderName::from_static(name), HeaderValue::from_static(value))
    };
    let many = Router::new()
        .route("/vms/act", post(act::many))
        .layer(middleware::from_fn(to_its_end))
        .layer(RequestBodyLimitLayer::new(LARGE_BODY))
        .layer(middleware::from_fn_with_state(app.clone(), administrators));
    let pages = Router::new()
        .route("/", get(list::first))
        .route("/sign-in/oidc/{name}", get(sign_in_oidc::begin))
        .route(CALLBACK, get(sign_in_oidc::callback))
        .route("/sign-out", post(sign_in::sign_out))
        .route("/home", get(list::home))
        .route("/vms", get(list::list))
        .route("/vms/new", get(create::form).post(create::submit))
        .route("/vms/{namespace}/{name}", get(detail::page))
        .route("/vms/{namespace}/{name}/objects", get(objects::page))
        .route("/vms/{namespace}/{name}/start", post(act::act::<Start>))
        .route("/vms/{namespace}/{name}/stop", post(act::act::<Stop>))
        .route("/vms/{namespace}/{name}/restart", post(act::act::<Restart>))
        .route("/vms/{namespace}/{name}/reset", post(act::act::<Reset>))
        .route("/vms/{namespace}/{name}/connection", post(connection::file))
        .route("/vms/{namespace}/{name}/console", get(console::page))
        .route("/vms/{namespace}/{name}/console/socket", get(console::socket))
        .route("/vms/{namespace}/{name}/release", post(pools::unassign))
        .route("/templates", get(template_sets::page))
        .route("/palette", get(palette::found))
        .route("/pools", get(pools::page))
        .route("/pools/{namespace}/{name}/start", post(pools::start))
        .route("/pools/{namespace}/{name}/release", post(pools::release))
        .route("/vms/{namespace}/{name}/serial", get(console::serial_page))
        .route("/vms/{namespace}/{name}/serial/socket", get(console::serial_socket))
        .route("/vms/{namespace}/{name}/pause", post(act::act::<Pause>))
        .route("/vms/{namespace}/{name}/resume", post(act::act::<Resume>))
        .route("/vms/{namespace}/{name}/size", post(resize::resize))
        .route("/live/list", get(live::list))
        .route("/live/home", get(live::home))
        .route("/live/pools", get(live::pools))
        .route("/live/vm/{namespace}/{name}", get(live::one))
        .route("/live/vm/{namespace}/{name}/picture", get(detail::picture))
        .layer(middleware::from_fn(to_its_end))
        // It writes nothing. A password that nobody waits for any more is not compared, so that others need not wait for that.
        .route("/sign-in", get(sign_in::form).post(sign_in::sign_in))
        .fallback(missing)
        .layer(RequestBodyLimitLayer::new(BODY))
        .merge(many)
        .layer(middleware::from_fn_with_state(app.clone(), signed_in::identify))
        .layer(csrf)
        .layer(CompressionLayer::new())
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, ANSWER))
        .layer(RequestBodyTimeoutLayer::new(HEAD));
    let routes = Router::new()
        .route("/assets/{file}", get(pages::asset))
        .merge(probes())
        .merge(pages)
        .layer(CatchPanicLayer::new())
        .layer(set("content-security-policy", pages::POLICY))
        .layer(set("x-content-type-options", "nosniff"))
        .layer(set("x-frame-options", "DENY"))
        .layer(set("referrer-policy", "same-origin"))
        .layer(set("cross-origin-opener-policy", "same-origin"))
        .layer(set("cross-origin-resource-policy", "same-origin"))
        .layer(set("cache-control", "no-store"))
        .layer(middleware::from_fn_with_state(app.clone(), only_https));
    Ok(routes.with_state(app))
}

fn probes() -> Router<App> {
    Router::new().route(PROBES[0], get(async || "ok\n")).route(PROBES[1], get(ready))
}

/// Answers probes alone, whoever else is connected, until the process ends: if the kubelet got no answer, it would end all consoles. Returns the address
/// with the port that was taken.
///
/// # Errors
/// If the address can't be listened on.
pub(super) async fn probe(app: App, address: SocketAddr) -> io::Result<SocketAddr> {
    let listener = listen(address).await?;
    let address = listener.local_addr()?;
    tokio::spawn(axum::serve(ProbeListener::new(listener), probes().with_state(app)).into_future());
    Ok(address)
}

/// Tells a browser that is here over HTTPS to come in no other way. Over HTTP it would not believe that, and no session would be kept anyway.
async fn only_https(State(app): State<App>, request: Request<Body>, next: Next) -> Response {
    let is_https = app.is_https || request.extensions().get::<Client>().is_some_and(|client| client.is_https);
    let mut response = next.run(request).await;
    if is_https {
        response.headers_mut().insert(header::STRICT_TRANSPORT_SECURITY, HeaderValue::from_static(HSTS));
    }
    response
}

/// What writes goes on to its end, also when its browser has left or the answer takes too long: otherwise a part of it would be done, and nobody would
/// have noted that. Its body is read before, so that whoever sends it too slowly keeps nothing.
async fn to_its_end(request: Request<Body>, next: Next) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let (head, body) = request.into_parts();
    let body = match Bytes::from_request(Request::new(body), &()).await {
        Ok(body) => body,
        Err(refusal) => return refusal.into_response(),
    };
    match tokio::spawn(next.run(Request::from_parts(head, Body::from(body)))).await {
        Ok(answer) => answer,
        Err(error) => match error.try_into_panic() {
            // The outermost layer logs it and answers, as without a task.
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        },
    }
}

/// Asks who it is before a large body is read.
async fn administrators(_: Administrator, request: Request<Body>, next: Next) -> Response {
    next.run(request).await
}

async fn ready(State(app): State<App>) -> Response {
    let parts = [
        (app.store.is_complete(), "[+] vms: listed\n", "[-] vms: not listed yet\n"),
        (
            *app.are_sessions_known.borrow(),
            "[+] sessions: known\n",
            "[-] sessions: those that have ended are not known yet\n",
        ),
    ];
    let text: String = parts.iter().map(|(is_ready, yes, no)| if *is_ready { *yes } else { *no }).collect();
    let is_ready = parts.iter().all(|(is_ready, ..)| *is_ready);
    (if is_ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, text).into_response()
}

/// A path that does not exist. Who is not signed in learns nothing about paths.
async fn missing(State(app): State<App>, signed_in: Result<SignedIn, Response>) -> Response {
    match signed_in {
        Ok(signed_in) => signed_in::not_found(&app, &signed_in),
        Err(nobody) => nobody,
    }
}

/// Listens on an address. `[::]` stands for all addresses, also on a computer without IPv6.
///
/// # Errors
/// If the address can't be listened on.
pub(super) async fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    match TcpListener::bind(address).await {
        Err(error) if address.ip() == IpAddr::from([0; 16]) && error.kind() != io::ErrorKind::AddrInUse => {
            TcpListener::bind((Ipv4Addr::UNSPECIFIED, address.port())).await
        }
        result => result,
    }
}

/// Serves connections until the program is told to end. With `tls` it speaks HTTPS.
pub(super) async fn serve(
    listener: TcpListener,
    tls: Option<watch::Receiver<Arc<ServerConfig>>>,
    routes: Router,
    limits: Limits,
    app: &App,
    ending: watch::Receiver<bool>,
) {
    let connections = Connections::new(limits);
    let mut open = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = terminated(ending.clone()) => break,
        };
        let Ok((stream, peer)) = accepted else {
            // Such as too many open files.
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let peer = peer.ip().to_canonical();
        // All places may be taken by people. Then the others wait in the kernel, behind this one.
        let (place, must_go) = tokio::select! {
            entered = connections.enter(peer, is_proxy(&app.proxies_now(), peer)) => entered,
            () = terminated(ending.clone()) => break,
        };
        let _ = stream.set_nodelay(true);
        let stream = Connection::new(stream, place.clone(), must_go, None);
        let (routes, app, ending) = (routes.clone(), app.clone(), ending.clone());
        let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.borrow().clone()));
        open.spawn(async move {
            let from = Peer { address: peer, place, app };
            match tls {
                None => answer(stream, from, routes, ending).await,
                Some(tls) => match timeout(HEAD, tls.accept(stream)).await {
                    Ok(Ok(stream)) => answer(stream, from, routes, ending).await,
                    Ok(Err(error)) => debug!(%peer, %error, "a connection ended"),
                    Err(_) => debug!(%peer, error = "no TLS in time", "a connection ended"),
                },
            }
        });
        while open.try_join_next().is_some() {}
    }
    // Streams end by themselves.
    let _ = timeout(END, open.join_all()).await;
}

/// From where a connection is.
struct Peer {
    address: IpAddr,
    place: Arc<Place>,
    app: App,
}

/// Answers the requests of a connection until it ends, or until the program does.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    from: Peer,
    routes: Router,
    ending: watch::Receiver<bool>,
) {
    let Peer { address: peer, place, app } = from;
    let service = tower::service_fn(move |request: Request<hyper::body::Incoming>| {
        let mut request = request.map(Body::new);
        let client = Client::of(peer, request.headers(), &app.proxies_now());
        request.extensions_mut().insert(client);
        request.extensions_mut().insert(place.clone());
        routes.clone().oneshot(request)
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(LARGEST_HEAD);
    let connection = http.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).with_upgrades();
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => ended,
        () = terminated(ending) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        debug!(%peer, %error, "a connection ended");
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    fn form() -> Request<Body> {
        Request::post("/").body(Body::from("a=b")).unwrap()
    }

    #[tokio::test]
    async fn what_writes_goes_on_when_nobody_waits_for_it() {
        let ((go, goes), (ended, mut is_ended)) = (watch::channel(false), watch::channel(String::new()));
        let write = move |body: String| {
            let (mut goes, ended) = (goes.clone(), ended.clone());
            async move {
                let _ = goes.wait_for(|goes| *goes).await;
                ended.send_replace(body);
            }
        };
        let routes: Router = Router::new().route("/", post(write)).layer(middleware::from_fn(to_its_end));
        assert!(timeout(Duration::from_millis(50), routes.oneshot(form())).await.is_err());
        go.send_replace(true);
        let body = timeout(END, is_ended.wait_for(|body| !body.is_empty())).await.unwrap().unwrap().clone();
        assert_eq!(body, "a=b");
    }

    #[tokio::test]
    async fn a_panic_is_an_answer_and_a_body_that_is_too_large_too() {
        async fn fails(body: String) -> StatusCode {
            assert!(body.is_empty(), "on purpose");
            StatusCode::OK
        }
        let status = async |request: Request<Body>| {
            let routes = Router::new().route("/", post(fails)).layer(middleware::from_fn(to_its_end));
            let routes: Router = routes.layer(RequestBodyLimitLayer::new(8)).layer(CatchPanicLayer::new());
            routes.oneshot(request).await.unwrap().status()
        };
        assert_eq!(status(Request::post("/").body(Body::empty()).unwrap()).await, StatusCode::OK);
        assert_eq!(status(form()).await, StatusCode::INTERNAL_SERVER_ERROR);
        // Its length is not said before.
        let large = Body::from_stream(futures::stream::iter([Ok::<_, Infallible>("0123456789")]));
        assert_eq!(status(Request::post("/").body(large).unwrap()).await, StatusCode::PAYLOAD_TOO_LARGE);
    }
}
