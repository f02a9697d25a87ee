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
    body::Body,
    extract::State,
    http::{HeaderName, HeaderValue, Request, StatusCode},
    middleware,
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
    sync::{Semaphore, watch},
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
    connection, console, create, detail, list, live, objects, pages, palette, pools, resize, sign_in, sign_in_oidc,
    signed_in::{self, Pause, Reset, Restart, Resume, SignedIn, Start, Stop},
    site::CALLBACK,
    template_sets,
};
use crate::process::signals::terminated;

/// The largest body of a request, in bytes: that of the form with a password.
const BODY: usize = 16 << 10;
/// The same for an action on many VMs, each of which is named.
const LARGE_BODY: usize = 512 << 10;
/// How long the head of a request may take, and then its body between two pieces.
const HEAD: Duration = Duration::from_secs(10);
/// How long an answer may take. A stream has begun by then.
const ANSWER: Duration = Duration::from_secs(30);
/// How long requests may take when the program ends.
const END: Duration = Duration::from_secs(3);

/// All paths. `origins` are those of the site beside the one in a request's `Host`, such as `https://vms.example.com`.
///
/// # Errors
/// If an origin is none.
pub(super) fn routes(app: App, origins: &[String]) -> Result<Router, ConfigError> {
    let csrf = origins.iter().try_fold(CsrfLayer::new(), |layer, origin| layer.add_trusted_origin(origin))?;
    let header = |name: &'static str, value: &'static str| {
        SetResponseHeaderLayer::if_not_present(HeaderName::from_static(name), HeaderValue::from_static(value))
    };
    let pages = Router::new()
        .route("/", get(list::first))
        .route("/sign-in", get(sign_in::form).post(sign_in::sign_in))
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
        .fallback(missing)
        .layer(RequestBodyLimitLayer::new(BODY))
        .merge(Router::new().route("/vms/act", post(act::many)).layer(RequestBodyLimitLayer::new(LARGE_BODY)))
        .layer(middleware::from_fn_with_state(app.clone(), signed_in::identify))
        .layer(csrf)
        .layer(CompressionLayer::new())
        .layer(TimeoutLayer::with_status_code(StatusCode::SERVICE_UNAVAILABLE, ANSWER))
        .layer(RequestBodyTimeoutLayer::new(HEAD));
    let routes = Router::new()
        .route("/assets/{file}", get(pages::asset))
        .route("/livez", get(async || "ok\n"))
        .route("/readyz", get(ready))
        .merge(pages)
        .layer(CatchPanicLayer::new())
        .layer(header("content-security-policy", pages::POLICY))
        .layer(header("x-content-type-options", "nosniff"))
        .layer(header("x-frame-options", "DENY"))
        .layer(header("referrer-policy", "same-origin"))
        .layer(header("cross-origin-opener-policy", "same-origin"))
        .layer(header("cross-origin-resource-policy", "same-origin"))
        .layer(header("cache-control", "no-store"));
    Ok(routes.with_state(app))
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

/// Serves at most so many connections at once until the program is told to end. With `tls` it speaks HTTPS.
pub(super) async fn serve(
    listener: TcpListener,
    tls: Option<watch::Receiver<Arc<ServerConfig>>>,
    routes: Router,
    most: usize,
    ending: watch::Receiver<bool>,
) {
    let (places, mut open) = (Arc::new(Semaphore::new(most)), JoinSet::new());
    loop {
        let accepted = tokio::select! {
            // Whoever comes when all places are taken waits.
            accepted = async { (places.clone().acquire_owned().await, listener.accept().await) } => accepted,
            () = terminated(ending.clone()) => break,
        };
        let (Ok(place), Ok((stream, peer))) = accepted else {
            // Such as too many open files.
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        let _ = stream.set_nodelay(true);
        let (routes, ending) = (routes.clone(), ending.clone());
        let tls = tls.as_ref().map(|tls| TlsAcceptor::from(tls.borrow().clone()));
        open.spawn(async move {
            match tls {
                None => answer(stream, peer, routes, ending).await,
                Some(tls) => match timeout(HEAD, tls.accept(stream)).await {
                    Ok(Ok(stream)) => answer(stream, peer, routes, ending).await,
                    Ok(Err(error)) => debug!(%peer, %error, "a connection ended"),
                    Err(_) => debug!(%peer, error = "no TLS in time", "a connection ended"),
                },
            }
            drop(place);
        });
        while open.try_join_next().is_some() {}
    }
    // Streams end by themselves.
    let _ = timeout(END, open.join_all()).await;
}

/// Answers the requests of a connection until it ends, or until the program does.
async fn answer(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    peer: SocketAddr,
    routes: Router,
    ending: watch::Receiver<bool>,
) {
    let service = tower::service_fn(move |request: Request<hyper::body::Incoming>| {
        let mut request = request.map(Body::new);
        request.extensions_mut().insert(peer);
        routes.clone().oneshot(request)
    });
    let mut http = hyper::server::conn::http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(64 << 10);
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
