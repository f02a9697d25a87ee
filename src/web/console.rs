//! The guest's screen and its serial console in the browser: the pages, and the sockets that connect them with the relay in the VM's Pod.
//!
//! ```text
//!  noVNC, xterm.js ──WebSocket──▶ this program ──TLS, WebSocket──▶ the relay (in the Pod) ─▶ QEMU
//! ```
//!
//! The relay decides between viewers ([`crate::relay`]). Whether the person may be one of them is decided here: before the socket is opened, and again
//! whenever the VM, its pool or the configuration changes. The socket ends with the session.

use std::{fmt, pin::pin, time::Duration};

use axum::{
    body::Bytes,
    extract::{
        Query, State, WebSocketUpgrade,
        ws::{self, WebSocket},
    },
    http::{HeaderMap, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{SinkExt, StreamExt};
use k8s_openapi::jiff::Timestamp;
use minijinja::context;
use serde::Deserialize;
use tokio::{
    net::TcpStream,
    sync::broadcast::{Receiver, error::RecvError},
    time::{Instant, MissedTickBehavior, interval_at, timeout},
};
use tokio_tungstenite::tungstenite::Message;
use tracing::{debug, warn};

use super::{
    app::App,
    pages::{POLICY, value},
    relayed,
    rows::{Onlooker, Row},
    session::{Session, random_name},
    signed_in::{Allowed, OpenConsole, SignedIn, not_found},
    store::{Collection, Key},
};
use crate::{
    api::{Clipboard, VirtualMachine},
    client::relay::Socket,
    people::{Right, Rights},
    process::signals::terminated,
    relay::{Answer, Closed, Console, Hello, News, Wish},
};

/// The longest message of a browser, in bytes: what the relay takes.
const LONGEST_MESSAGE: usize = 256 << 10;
/// The memory in which a socket is read, in bytes.
const BUFFER: usize = 16 << 10;
/// How often a browser is asked whether it is there. Proxies end a connection at rest, nginx after a minute.
const PING: Duration = Duration::from_secs(20);
/// A browser that has sent nothing for this time, not even an answer to that, is gone.
const SILENCE: Duration = Duration::from_secs(70);
/// How long a socket may take to be closed.
const CLOSE: Duration = Duration::from_secs(2);
/// The messages of VNC that a person causes: keys, the pointer, the clipboard (RFC 6143, 7.5).
const OF_PERSON: [u8; 3] = [4, 5, 6];

/// Why this program ends a socket, beside the reasons of the relay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
enum End {
    /// The session has ended.
    SignedOut = 4100,
    /// The person may not use the console any more.
    Forbidden = 4101,
}

/// `GET /vms/NAMESPACE/NAME/console`
pub(super) async fn page(State(app): State<App>, allowed: Allowed<OpenConsole>) -> Response {
    whole(&app, &allowed, Console::Vnc, None)
}

/// `GET /vms/NAMESPACE/NAME/serial`. xterm.js makes styles of its own. The page's policy lets them in by a number that is new for each page.
pub(super) async fn serial_page(State(app): State<App>, allowed: Allowed<OpenConsole>) -> Response {
    let nonce = match random_name() {
        Ok(nonce) => nonce,
        Err(error) => {
            tracing::error!(%error, "there are no random numbers for a page");
            return StatusCode::INTERNAL_SERVER_ERROR.into_response();
        }
    };
    let policy = POLICY.replace("style-src 'self'", &format!("style-src 'self' 'nonce-{nonce}'"));
    let page = whole(&app, &allowed, Console::Serial, Some(&nonce));
    match HeaderValue::from_str(&policy) {
        Ok(policy) => ([(header::CONTENT_SECURITY_POLICY, policy)], page).into_response(),
        Err(_) => page,
    }
}

/// The files of a console's page, by the last part of its path.
const fn files(console: Console) -> (&'static str, &'static str) {
    match console {
        Console::Serial => ("serial", "serial.js"),
        Console::Vnc | Console::Spice => ("console", "console.js"),
    }
}

fn whole(app: &App, allowed: &Allowed<OpenConsole>, console: Console, nonce: Option<&str>) -> Response {
    let Allowed { signed_in, key, rights, .. } = allowed;
    // Before the VM is read, so that the stream of the page begins not too late.
    let number = app.store.number();
    let Some(vm) = app.store.vm(key) else { return not_found(app, signed_in) };
    let onlooker = Onlooker { person: &signed_in.person, rights, is_administrator: false };
    let row = Row::of(&vm, onlooker, &app.store, Timestamp::now());
    let (kind, script) = files(console);
    let context = context! {
        frame => value(signed_in.frame()), view => "console", kind => kind, script => script, nonce => nonce, vm => value(&row), shares_clipboard => vm.spec.vm.display.clipboard() == Clipboard::Vnc,
        can_take => rights.contains(Right::TakeConsole), since => format!("{}-{number}", app.epoch),
    };
    app.pages.page(signed_in.language, StatusCode::OK, "console.html", context)
}

/// What the page of a console shows as long as nobody is connected, and whether the person can connect.
pub(super) fn waiting(signed_in: &SignedIn, rights: &Rights, vm: &VirtualMachine, app: &App) -> (String, bool) {
    let onlooker = Onlooker { person: &signed_in.person, rights, is_administrator: false };
    let row = Row::of(vm, onlooker, &app.store, Timestamp::now());
    let html = app.pages.part_or_nothing(signed_in.language, "waiting.html", context! { vm => value(&row) });
    (html, row.can_open_console)
}

/// What the browser wants.
#[derive(Deserialize)]
pub(super) struct ConsoleRequest {
    wish: Wish,
}

/// `GET /vms/NAMESPACE/NAME/console/socket`. A browser lets any site open a socket here, with the person's cookie: so it must come from a page of this one.
pub(super) async fn socket(
    State(app): State<App>,
    allowed: Allowed<OpenConsole>,
    headers: HeaderMap,
    Query(wanted): Query<ConsoleRequest>,
    upgrade: WebSocketUpgrade,
) -> Response {
    open(app, allowed, &headers, Console::Vnc, &wanted, upgrade)
}

/// `GET /vms/NAMESPACE/NAME/serial/socket`. As the other one.
pub(super) async fn serial_socket(
    State(app): State<App>,
    allowed: Allowed<OpenConsole>,
    headers: HeaderMap,
    Query(wanted): Query<ConsoleRequest>,
    upgrade: WebSocketUpgrade,
) -> Response {
    open(app, allowed, &headers, Console::Serial, &wanted, upgrade)
}

fn open(
    app: App,
    allowed: Allowed<OpenConsole>,
    headers: &HeaderMap,
    console: Console,
    &ConsoleRequest { wish }: &ConsoleRequest,
    upgrade: WebSocketUpgrade,
) -> Response {
    if !is_own(headers, &app.origins) {
        return StatusCode::FORBIDDEN.into_response();
    }
    let Allowed { signed_in, key, rights, .. } = allowed;
    // Who may not take the screen neither sees what another person does there nor asks for it: it may have become another's since her page was made.
    let is_taken = wish == Wish::TakeOver || console == Console::Vnc && wish != Wish::Control;
    if is_taken && !rights.contains(Right::TakeConsole) {
        return StatusCode::FORBIDDEN.into_response();
    }
    let Some(vm) = app.store.vm(&key) else { return not_found(&app, &signed_in) };
    let upgrade = upgrade.max_message_size(LONGEST_MESSAGE).max_frame_size(LONGEST_MESSAGE);
    let upgrade = upgrade.read_buffer_size(BUFFER).write_buffer_size(0).max_write_buffer_size(2 * LONGEST_MESSAGE);
    upgrade.on_upgrade(move |mut browser| async move {
        let viewer = Viewer { changes: app.store.subscribe().next, app, signed_in, key, console };
        let (code, reason) = viewer.serve(&mut browser, wish, &vm).await;
        let close = ws::CloseFrame { code, reason: reason.into() };
        let _ = timeout(CLOSE, browser.send(ws::Message::Close(Some(close)))).await;
    })
}

/// Whether the person has caused the message. What noVNC sends by itself is no use of the session.
fn is_of_person(console: Console, bytes: &[u8]) -> bool {
    console == Console::Serial || bytes.first().is_some_and(|kind| OF_PERSON.contains(kind))
}

/// Whether a page of this site has sent the request.
fn is_own(headers: &HeaderMap, origins: &[String]) -> bool {
    let text = |name: header::HeaderName| headers.get(name).and_then(|value| value.to_str().ok());
    let (Some(origin), Some(host)) = (text(header::ORIGIN), text(header::HOST)) else { return false };
    let authority = origin.strip_prefix("https://").or_else(|| origin.strip_prefix("http://"));
    let is_same_site = headers.get("sec-fetch-site").is_none_or(|site| site == "same-origin");
    origins.iter().any(|known| known == origin) || authority == Some(host) && is_same_site
}

/// The viewer's name for the relay: the connections of one session are one viewer, and nobody learns the session's own name.
fn viewer_name(session: &Session) -> String {
    format!("web-{:.16}", session.digest())
}

/// A person at a console.
struct Viewer {
    app: App,
    signed_in: SignedIn,
    key: Key,
    console: Console,
    changes: Receiver<std::sync::Arc<Collection>>,
}

/// The code and the reason of a close frame.
type Ended = (u16, String);

fn ended(code: Closed, reason: impl fmt::Display) -> Ended {
    // A close frame has 125 bytes at most, two of them for the code (RFC 6455, 5.5).
    let mut reason = reason.to_string();
    reason.truncate(reason.floor_char_boundary(120));
    (code as u16, reason)
}

impl Viewer {
    /// Connects the browser with the relay until one of them ends, or the person may not be there any more.
    async fn serve(self, browser: &mut WebSocket, wish: Wish, vm: &VirtualMachine) -> Ended {
        let (ending, sessions, session) =
            (self.app.ending.clone(), self.app.sessions.clone(), self.signed_in.session.clone());
        let user = self.signed_in.person.user.clone();
        if !self.signed_in.may_open(&self.app, &self.key) {
            return ended(Closed::InUse, super::rights::console_user(vm).unwrap_or_default());
        }
        let carry = pin!(async {
            match self.connect(wish, vm).await {
                Ok(relay) => {
                    self.app.audit.opened(&self.signed_in.person.user, vm, self.console, wish);
                    self.carry(browser, relay).await
                }
                Err(why) => {
                    warn!(
                        namespace = self.key.0,
                        vm = self.key.1,
                        error = why,
                        "the web interface could not reach a console"
                    );
                    ended(Closed::NoConsole, "")
                }
            }
        });
        tokio::select! {
            biased;
            () = sessions.ended(&session, &user) => (End::SignedOut as u16, String::new()),
            () = terminated(ending) => ended(Closed::RelayEnds, ""),
            end = carry => end,
        }
    }

    async fn connect(&self, wish: Wish, vm: &VirtualMachine) -> Result<Socket<TcpStream>, String> {
        let mut relay = relayed::open(&self.app, vm, self.console.path()).await?;
        let hello =
            Hello { user: self.signed_in.person.user.clone(), session: viewer_name(&self.signed_in.session), wish };
        let hello = serde_json::to_string(&hello).map_err(|error| error.to_string())?;
        relay.send(Message::text(hello)).await.map_err(|error| error.to_string())?;
        Ok(relay)
    }

    async fn carry(mut self, browser: &mut WebSocket, mut relay: Socket<TcpStream>) -> Ended {
        let broken = || ended(Closed::RelayEnds, "");
        let mut pings = interval_at(Instant::now() + PING, PING);
        pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                biased;
                _ = pings.tick() => {
                    let ping = browser.send(ws::Message::Ping(Bytes::new()));
                    if heard.elapsed() > SILENCE || !matches!(timeout(CLOSE, ping).await, Ok(Ok(()))) {
                        debug!("a browser does not answer any more");
                        return broken();
                    }
                }
                changed = self.changes.recv() => {
                    let is_concerned = match changed {
                        Ok(changes) => changes.have_rights_changed || changes.vms.iter().any(|(key, _)| **key == self.key),
                        Err(RecvError::Lagged(_)) => true,
                        Err(RecvError::Closed) => return broken(),
                    };
                    if is_concerned && !self.signed_in.may_open(&self.app, &self.key) {
                        return (End::Forbidden as u16, String::new());
                    }
                }
                message = browser.recv() => { heard = Instant::now(); match message {
                    Some(Ok(ws::Message::Binary(bytes))) => {
                        if is_of_person(self.console, &bytes) {
                            let SignedIn { session, person, .. } = &self.signed_in;
                            self.app.sessions.used(session, &person.user, Timestamp::now());
                        }
                        if relay.send(Message::Binary(bytes)).await.is_err() {
                            return broken();
                        }
                    }
                    Some(Ok(ws::Message::Text(text))) => {
                        let Ok(answer) = serde_json::from_str::<Answer>(&text) else { return ended(Closed::BadRequest, "") };
                        let answer = serde_json::to_string(&answer).unwrap_or_default();
                        if relay.send(Message::text(answer)).await.is_err() {
                            return broken();
                        }
                    }
                    Some(Ok(ws::Message::Ping(_) | ws::Message::Pong(_))) => {}
                    Some(Ok(ws::Message::Close(_)) | Err(_)) | None => {
                        let _ = timeout(CLOSE, relay.close(None)).await;
                        return broken();
                    }
                } },
                message = relay.next() => {
                    let sent = match message {
                        Some(Ok(Message::Binary(bytes))) => browser.send(ws::Message::Binary(bytes)).await,
                        Some(Ok(Message::Text(text))) => {
                            let Ok(news) = serde_json::from_str::<News>(&text) else { return broken() };
                            let news = serde_json::to_string(&news).unwrap_or_default();
                            browser.send(ws::Message::text(news)).await
                        }
                        Some(Ok(Message::Close(Some(frame)))) => {
                            let code = Closed::of(frame.code.into()).unwrap_or(Closed::RelayEnds);
                            return ended(code, &*frame.reason);
                        }
                        Some(Ok(Message::Close(None)) | Err(_)) | None => return broken(),
                        Some(Ok(_)) => Ok(()),
                    };
                    if let Err(error) = sent {
                        debug!(%error, "a browser has left a console");
                        return broken();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_socket_is_opened_by_pages_of_this_site_alone() {
        let origins = ["https://vms.example.com".to_owned()];
        let own = |lines: &[(&str, &str)]| {
            let headers =
                lines.iter().map(|(name, value)| (name.parse::<header::HeaderName>().unwrap(), value.parse().unwrap()));
            is_own(&headers.collect(), &origins)
        };
        assert!(own(&[("host", "a:8080"), ("origin", "http://a:8080")]));
        assert!(own(&[("host", "a"), ("origin", "https://a"), ("sec-fetch-site", "same-origin")]));
        assert!(own(&[("host", "inside"), ("origin", "https://vms.example.com")]));
        for lines in [
            &[("host", "a")][..],
            &[("host", "a"), ("origin", "null")],
            &[("host", "a"), ("origin", "https://b")],
            &[("host", "a"), ("origin", "https://a.b")],
            &[("host", "a"), ("origin", "https://ba")],
            &[("host", "a"), ("origin", "a")],
            &[("host", "a"), ("origin", "https://a"), ("sec-fetch-site", "cross-site")],
        ] {
            assert!(!own(lines), "{lines:?}");
        }
    }

    #[test]
    fn a_reason_fits_into_its_frame() {
        let (code, reason) = ended(Closed::InUse, "ü".repeat(100));
        assert_eq!((code, reason.len()), (4002, 120));
    }
}
