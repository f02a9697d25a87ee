//! The relay: people outside the Pod reach the guest's screen and its serial console through one TLS port of the agent. The protocol is
//! [`crate::relay`]; [`viewers`](super::viewers) decides who is let in.
//!
//! ```text
//!  port ─▶ TLS ─▶ token ─▶ path ─▶ hello ─▶ Room (who controls?) ─▶ QEMU's socket, or that of the serial console
//!                                            └─▶ port and viewers, for the agent's report and for those who look at the list
//! ```
//!
//! The certificate, its key and the token are read anew for each connection, so they can be replaced at any time. Without them nothing listens.

mod looks;

use std::{
    collections::{HashMap, VecDeque},
    fs, io,
    net::{IpAddr, Ipv6Addr},
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use futures::{SinkExt, StreamExt};
use rustix::net::sockopt;
use serde::Serialize;
use sha2::{Digest, Sha256};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, UnixStream},
    sync::{Semaphore, mpsc, oneshot, watch},
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval, sleep, sleep_until, timeout},
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
    server::TlsStream,
};
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async_with_config,
    tungstenite::{
        self, Message,
        handshake::server::{ErrorResponse, Request, Response},
        http::{StatusCode, header::AUTHORIZATION},
        protocol::{CloseFrame, WebSocketConfig},
    },
};
use tracing::{debug, info, warn};

use super::{
    rfb::Filter,
    runtime_dir::RuntimeDir,
    viewers::{Decision, Id, Viewers},
};
use crate::{
    process::lock,
    relay::{Answer, Closed, Console, FIGURES, FILES, Hello, Mode, News, PICTURE, VIEWERS, Viewer, Wish},
};

/// The most connections at the same time. A SPICE viewer has up to ten.
const MOST_CONNECTIONS: usize = 64;
/// The most connections at the same time that have not shown the token.
const MOST_STRANGERS: usize = 256;
/// The time for TLS, the request, and the first message.
const PATIENCE: Duration = Duration::from_secs(10);
/// When the relay looks again for the certificate or a free port.
const AGAIN: Duration = Duration::from_secs(2);
/// How often a viewer is asked whether it is there.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// A viewer that has sent nothing for this time, nor taken anything, is gone.
const SILENCE: Duration = Duration::from_secs(45);
/// The longest message of a viewer in bytes. A pasted text is the longest one.
const LONGEST_MESSAGE: usize = 256 << 10;
/// The bytes that are read at once from QEMU.
const PIECE: usize = 32 << 10;
/// The most bytes that wait for a viewer who does not read. More end the connection.
const MOST_UNREAD: usize = 8 * PIECE;
/// The bytes of a viewer that are looked at without a pause for the others.
const TURN: usize = 16 << 10;
/// The bytes of a viewer that QEMU may not have read yet. Whoever loses control has typed no more than that.
const IN_FLIGHT: usize = 4 << 10;
/// For how long, and how often, QEMU is tried again that has many viewers to accept.
const ACCEPTS: (u32, Duration) = (250, Duration::from_millis(20));

type Socket = WebSocketStream<TlsStream<TcpStream>>;

/// Where the relay is, and who uses it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RelayState {
    /// The port on which it listens.
    pub port: Option<u16>,
    /// The viewers.
    pub viewers: Vec<Viewer>,
}

/// What the relay needs.
#[derive(Clone, Debug)]
pub struct RelayOptions {
    /// The folder of the certificate, its key and the token. If it does not exist, there is no relay.
    pub folder: PathBuf,
    /// The port. If another program has it, the system chooses one.
    pub port: u16,
    /// The runtime directory.
    pub runtime: RuntimeDir,
}

/// Listens until `ends` becomes true, and says where, and who is there. At the end it says so to everybody who is connected.
pub async fn serve(options: RelayOptions, state: watch::Sender<RelayState>, mut ends: watch::Receiver<bool>) {
    if !options.folder.is_dir() {
        debug!(folder = %options.folder.display(), "there is no relay");
        return;
    }
    let listener = loop {
        match listen(&options).await {
            Ok(listener) => break listener,
            Err(error) if error.kind() == io::ErrorKind::NotFound => debug!(%error, "no relay yet"),
            Err(error) => warn!(%error, "the relay cannot listen; trying again"),
        }
        tokio::select! {
            () = sleep(AGAIN) => {}
            () = is_over(&mut ends) => return,
        }
    };
    let port = listener.local_addr().map(|address| address.port()).ok();
    info!(port = port.unwrap_or_default(), "the relay listens");
    state.send_modify(|state| state.port = port);
    let room = Arc::new(Room { people: Mutex::default(), start: Instant::now(), state });
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    let mut strangers = Strangers::default();
    let mut connections = JoinSet::new();
    let told = ends.clone();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, peer)) => {
                    let (options, room, places) = (options.clone(), room.clone(), places.clone());
                    let known = strangers.add(peer.ip());
                    let ends = told.clone();
                    connections.spawn(async move {
                        if let Err(error) = connection(stream, known, &places, &options, &room, ends).await {
                            debug!(%error, %peer, "a connection to the relay has ended");
                        }
                    });
                }
                Err(error) => {
                    warn!(%error, "the relay cannot accept a connection");
                    sleep(AGAIN).await;
                }
            },
            Some(_) = connections.join_next() => {}
            () = is_over(&mut ends) => break,
        }
    }
    while connections.join_next().await.is_some() {}
}

/// Waits until the relay must end.
async fn is_over(ends: &mut watch::Receiver<bool>) {
    // A sender that has gone says the same.
    let _ = ends.wait_for(|ends| *ends).await;
}

/// Listens as soon as there is something to prove with who this is.
async fn listen(options: &RelayOptions) -> io::Result<TcpListener> {
    Identity::read(&options.folder)?;
    match bind(options.port).await {
        // Another VM in the network of the node.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => bind(0).await,
        outcome => outcome,
    }
}

async fn bind(port: u16) -> io::Result<TcpListener> {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, port)).await {
        // The node has no IPv6.
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Err(error),
        Err(_) => TcpListener::bind(("0.0.0.0", port)).await,
        listener => listener,
    }
}

/// What the relay proves with who it is, and by what it knows its clients.
struct Identity {
    tls: TlsAcceptor,
    token: String,
}

impl Identity {
    fn read(folder: &Path) -> io::Result<Self> {
        let [certificate, key, token] = FILES.map(|name| fs::read(folder.join(name)));
        let (certificate, key) = (CertificateDer::from_pem_slice(&certificate?), PrivateKeyDer::from_pem_slice(&key?));
        let token = String::from_utf8(token?).map_err(io::Error::other)?.trim().to_owned();
        if token.len() < 16 {
            return Err(io::Error::other("the token of the relay has less than 16 characters"));
        }
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .and_then(|builder| {
                let (Ok(certificate), Ok(key)) = (certificate, key) else {
                    return Err(rustls::Error::General("tls.crt or tls.key is not PEM".into()));
                };
                builder.with_no_client_auth().with_single_cert(vec![certificate], key)
            })
            .map_err(io::Error::other)?;
        Ok(Self { tls: Arc::new(config).into(), token })
    }

    /// Whether the client has the token. Digests are compared, so the time says nothing about the token.
    fn is_known(&self, request: &Request) -> bool {
        let given = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
        let given = given.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default();
        Sha256::digest(given) == Sha256::digest(&self.token)
    }
}

/// The connections that have not shown the token yet. If there are too many, the oldest one of the address with the most of them gives way, so
/// that nobody without the token keeps out those who have it.
#[derive(Default)]
struct Strangers(VecDeque<(IpAddr, oneshot::Sender<()>)>);

impl Strangers {
    /// One more, from this address. What is returned ends when the stranger must go.
    fn add(&mut self, address: IpAddr) -> oneshot::Receiver<()> {
        // Those that are known now, or gone.
        self.0.retain(|(_, stranger)| !stranger.is_closed());
        if self.0.len() >= MOST_STRANGERS {
            let mut numbers = HashMap::<IpAddr, usize>::new();
            self.0.iter().for_each(|(address, _)| *numbers.entry(*address).or_default() += 1);
            let rudest = numbers.into_iter().max_by_key(|(_, number)| *number).map(|(address, _)| address);
            let at = self.0.iter().position(|(address, _)| Some(*address) == rudest);
            at.and_then(|at| self.0.remove(at));
        }
        let (must_go, receiver) = oneshot::channel();
        self.0.push_back((address, must_go));
        receiver
    }
}

/// What a client has asked for.
#[derive(Clone, Copy)]
enum ClientRequest {
    List,
    Figures,
    Picture,
    Console(Console),
}

async fn connection(
    stream: TcpStream,
    stranger: oneshot::Receiver<()>,
    places: &Semaphore,
    options: &RelayOptions,
    room: &Room,
    mut ends: watch::Receiver<bool>,
) -> Result<(), tungstenite::Error> {
    let identity = Identity::read(&options.folder)?;
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    stream.set_nodelay(true)?;
    let begin = async {
        let stream = identity.tls.accept(stream).await?;
        greet(stream, &identity).await
    };
    let (mut socket, wanted) = tokio::select! {
        begun = timeout(PATIENCE, begin) => begun.map_err(late)??,
        _ = stranger => return Ok(()),
        () = is_over(&mut ends) => return Ok(()),
    };
    let Ok(_place) = places.try_acquire() else {
        return close(&mut socket, Closed::NoConsole, "the relay has too many viewers").await;
    };
    tokio::select! {
        outcome = serve_client(&mut socket, wanted, options, room) => return outcome,
        () = is_over(&mut ends) => {}
    }
    close(&mut socket, Closed::RelayEnds, "the relay ends").await
}

/// Gives a client that has shown the token what it has asked for.
async fn serve_client(
    socket: &mut Socket,
    wanted: ClientRequest,
    options: &RelayOptions,
    room: &Room,
) -> Result<(), tungstenite::Error> {
    let console = match wanted {
        ClientRequest::List => return looks::list(socket, room).await,
        ClientRequest::Figures => return looks::figures(socket, &options.runtime).await,
        ClientRequest::Picture => return looks::picture(socket, &options.runtime).await,
        ClientRequest::Console(console) => console,
    };
    let late = |_| io::Error::from(io::ErrorKind::TimedOut);
    let first = timeout(PATIENCE, first_message(socket)).await.map_err(late)??;
    match serde_json::from_str::<Hello>(&first).map_err(|error| error.to_string()) {
        Ok(hello) if hello.problem().is_none() => view(socket, hello, console, &options.runtime, room).await,
        Ok(hello) => close(socket, Closed::BadRequest, hello.problem().unwrap_or_default()).await,
        Err(error) => close(socket, Closed::BadRequest, &error).await,
    }
}

async fn greet(
    stream: TlsStream<TcpStream>,
    identity: &Identity,
) -> Result<(Socket, ClientRequest), tungstenite::Error> {
    let mut wanted = None;
    let refuse = |code, text: &str| {
        let mut response = ErrorResponse::new(Some(text.to_owned()));
        *response.status_mut() = code;
        response
    };
    #[allow(clippy::result_large_err, reason = "the type is tungstenite's")]
    let look = |request: &Request, response: Response| {
        if !identity.is_known(request) {
            return Err(refuse(StatusCode::UNAUTHORIZED, "the token is missing or wrong"));
        }
        wanted = match request.uri().path() {
            VIEWERS => Some(ClientRequest::List),
            FIGURES => Some(ClientRequest::Figures),
            PICTURE => Some(ClientRequest::Picture),
            path => Console::ALL.into_iter().find(|console| console.path() == path).map(ClientRequest::Console),
        };
        if wanted.is_some() { Ok(response) } else { Err(refuse(StatusCode::NOT_FOUND, "there is no such console")) }
    };
    let config = WebSocketConfig::default()
        .read_buffer_size(16 << 10)
        .write_buffer_size(0)
        .max_write_buffer_size(MOST_UNREAD)
        .max_message_size(Some(LONGEST_MESSAGE))
        .max_frame_size(Some(LONGEST_MESSAGE));
    let socket = accept_hdr_async_with_config(stream, look, Some(config)).await?;
    let wanted = wanted.ok_or(tungstenite::Error::ConnectionClosed)?;
    Ok((socket, wanted))
}

async fn first_message(socket: &mut Socket) -> Result<String, tungstenite::Error> {
    loop {
        match socket.next().await.ok_or(tungstenite::Error::ConnectionClosed)?? {
            Message::Text(text) => return Ok(text.to_string()),
            Message::Ping(_) | Message::Pong(_) => {}
            _ => return Ok(String::new()),
        }
    }
}

async fn send(socket: &mut Socket, message: Message) -> Result<(), tungstenite::Error> {
    // Whoever takes nothing for so long is gone.
    timeout(SILENCE, socket.send(message)).await.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))?
}

async fn tell(socket: &mut Socket, news: &impl Serialize) -> Result<(), tungstenite::Error> {
    let text = serde_json::to_string(news).map_err(io::Error::other)?;
    send(socket, Message::text(text)).await
}

async fn close(socket: &mut Socket, code: Closed, reason: &str) -> Result<(), tungstenite::Error> {
    // A close frame has 125 bytes at most, two of which are the code (RFC 6455, 5.5).
    let reason = reason.get(..reason.floor_char_boundary(120)).unwrap_or_default().to_owned();
    finish(socket, Some(CloseFrame { code: (code as u16).into(), reason: reason.into() })).await
}

async fn finish(socket: &mut Socket, frame: Option<CloseFrame>) -> Result<(), tungstenite::Error> {
    send(socket, Message::Close(frame)).await?;
    // The client has a moment to answer, so that the frame is not lost with the connection.
    let _ = timeout(Duration::from_secs(1), async { while let Some(Ok(_)) = socket.next().await {} }).await;
    Ok(())
}

/// Asks a client from time to time whether it is there.
struct Alive {
    heartbeat: tokio::time::Interval,
    last: Instant,
}

impl Alive {
    fn new() -> Self {
        let mut heartbeat = interval(HEARTBEAT);
        heartbeat.set_missed_tick_behavior(MissedTickBehavior::Delay);
        Self { heartbeat, last: Instant::now() }
    }

    /// The client's next message. `None`: it has gone.
    async fn next(&mut self, socket: &mut Socket) -> Result<Option<Message>, tungstenite::Error> {
        loop {
            tokio::select! {
                message = socket.next() => {
                    self.last = Instant::now();
                    match message {
                        Some(Ok(Message::Ping(_) | Message::Pong(_) | Message::Frame(_))) => {}
                        Some(Ok(Message::Close(_))) => {
                            // The answer to it, which is part of the protocol, and which the client may not want any more.
                            let _ = timeout(Duration::from_secs(1), socket.flush()).await;
                            return Ok(None);
                        }
                        None => return Ok(None),
                        Some(message) => return message.map(Some),
                    }
                }
                _ = self.heartbeat.tick() => {
                    if self.last.elapsed() > SILENCE {
                        return Ok(None);
                    }
                    send(socket, Message::Ping(Vec::new().into())).await?;
                }
            }
        }
    }
}

/// Everybody who is connected.
struct Room {
    people: Mutex<People>,
    start: Instant,
    state: watch::Sender<RelayState>,
}

#[derive(Default)]
struct People {
    viewers: Viewers,
    /// How each connection is told what to do.
    orders: HashMap<Id, mpsc::UnboundedSender<Decision>>,
    last: Id,
}

impl Room {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }

    fn list(&self) -> Vec<Viewer> {
        lock(&self.people).viewers.list(self.now())
    }

    fn join(&self, hello: Hello, console: Console) -> (Id, mpsc::UnboundedReceiver<Decision>) {
        let (sender, orders) = mpsc::unbounded_channel();
        let mut people = lock(&self.people);
        people.last += 1;
        let id = people.last;
        people.orders.insert(id, sender);
        let decisions = people.viewers.join(id, hello, console, self.now());
        self.hand_out(&mut people, decisions);
        (id, orders)
    }

    fn change(&self, change: impl FnOnce(&mut Viewers, Duration) -> Vec<Decision>) {
        let mut people = lock(&self.people);
        let decisions = change(&mut people.viewers, self.now());
        self.hand_out(&mut people, decisions);
    }

    fn leave(&self, id: Id) {
        self.change(|viewers, now| viewers.leave(id, now));
        lock(&self.people).orders.remove(&id);
    }

    /// Until when the one that asks waits.
    fn granted_at(&self) -> Option<Instant> {
        lock(&self.people).viewers.next_time().map(|at| self.start + at)
    }

    /// The seconds that are left for an answer.
    fn seconds_left(&self) -> u64 {
        let left = self.granted_at().map(|at| at.saturating_duration_since(Instant::now()));
        left.unwrap_or_default().as_secs_f32().round() as u64
    }

    fn hand_out(&self, people: &mut People, decisions: Vec<Decision>) {
        for decision in decisions {
            let id = match &decision {
                Decision::LetIn(id) | Decision::Refuse(id) => id,
                Decision::Wait { asks, .. } => asks,
                Decision::Question { controller, .. } | Decision::Withdraw { controller, .. } => controller,
                Decision::Replace { id, .. } | Decision::InUse { id, .. } => id,
            };
            if let Some(orders) = people.orders.get(id) {
                // A connection that has just ended needs no orders.
                let _ = orders.send(decision);
            }
        }
        let viewers = people.viewers.list(self.now());
        self.state.send_if_modified(|state| {
            let is_same = state.viewers.len() == viewers.len()
                && state.viewers.iter().zip(&viewers).all(|(before, now)| before.is_same(now));
            if !is_same {
                state.viewers = viewers;
            }
            !is_same
        });
    }
}

/// A viewer in the room. It leaves the room when this is dropped.
struct PlaceInRoom<'a> {
    room: &'a Room,
    id: Id,
    orders: mpsc::UnboundedReceiver<Decision>,
}

impl Drop for PlaceInRoom<'_> {
    fn drop(&mut self) {
        self.room.leave(self.id);
    }
}

async fn view(
    socket: &mut Socket,
    hello: Hello,
    console: Console,
    runtime: &RuntimeDir,
    room: &Room,
) -> Result<(), tungstenite::Error> {
    let controls = hello.wish != Wish::Watch;
    if !controls && console == Console::Spice {
        return close(socket, Closed::NoConsole, "SPICE has no viewers that only watch; VNC has").await;
    }
    let path = match console {
        Console::Vnc => runtime.vnc(),
        Console::Spice => runtime.spice(),
        Console::Serial => runtime.console(),
    };
    // Nobody is asked for a console that is not there.
    let Ok(qemu) = connect(&path).await else {
        return close(socket, Closed::NoConsole, "the guest does not run, or has no such console").await;
    };
    info!(user = hello.user, session = hello.session, ?console, wish = ?hello.wish, "a viewer connects");
    let (id, orders) = room.join(hello, console);
    let mut guest = PlaceInRoom { room, id, orders };
    let mut alive = Alive::new();
    if let Some((code, reason)) = wait(socket, &mut guest, &mut alive).await? {
        return close(socket, code, &reason).await;
    }
    tell(socket, &News::Connected { controls }).await?;
    let filter = (console == Console::Vnc).then(|| Filter::new(!controls));
    let (code, reason) = exchange(socket, qemu, Gate { filter, controls }, &mut guest, &mut alive).await?;
    // Somebody else may need the place at once.
    drop(guest);
    close(socket, code, &reason).await
}

/// Connects with one of QEMU's sockets, whose queue is short.
async fn connect(path: &Path) -> io::Result<UnixStream> {
    let (times, pause) = ACCEPTS;
    for _ in 0..times {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(pause).await,
            outcome => {
                let stream = outcome?;
                sockopt::set_socket_send_buffer_size(&stream, IN_FLIGHT)?;
                return Ok(stream);
            }
        }
    }
    Err(io::ErrorKind::TimedOut.into())
}

/// Waits until the viewer is let in. Otherwise why not.
async fn wait(
    socket: &mut Socket,
    guest: &mut PlaceInRoom<'_>,
    alive: &mut Alive,
) -> Result<Option<(Closed, String)>, tungstenite::Error> {
    loop {
        let until = guest.room.granted_at();
        tokio::select! {
            // What a viewer sends who is let in already must not be lost.
            biased;
            Some(order) = guest.orders.recv() => match order {
                Decision::LetIn(_) => return Ok(None),
                Decision::Wait { user, .. } => {
                    tell(socket, &News::Asking { user, seconds: guest.room.seconds_left() }).await?;
                }
                Decision::InUse { user, .. } => return Ok(Some((Closed::InUse, user))),
                Decision::Refuse(_) => return Ok(Some((Closed::Refused, "the user said no".into()))),
                Decision::Replace { user, .. } => return Ok(Some((Closed::TakenOver, user))),
                Decision::Question { .. } | Decision::Withdraw { .. } => {}
            },
            () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {
                guest.room.change(Viewers::pass_time);
            }
            received = alive.next(socket) => if received?.is_none() {
                return Err(tungstenite::Error::ConnectionClosed);
            },
        }
    }
}

/// What of a viewer's input reaches the guest.
struct Gate {
    filter: Option<Filter>,
    controls: bool,
}

impl Gate {
    fn pass(&mut self, bytes: &[u8]) -> Option<Vec<u8>> {
        match &mut self.filter {
            Some(filter) => filter.pass(bytes).ok(),
            None => Some(if self.controls { bytes.to_vec() } else { Vec::new() }),
        }
    }
}

/// Copies both ways, until one of them ends. Returns why.
async fn exchange(
    socket: &mut Socket,
    qemu: UnixStream,
    mut gate: Gate,
    guest: &mut PlaceInRoom<'_>,
    alive: &mut Alive,
) -> Result<(Closed, String), tungstenite::Error> {
    let (mut output, mut input) = qemu.into_split();
    let mut buffer = vec![0; PIECE];
    // What QEMU has not taken yet. The viewer is not read as long as there is some.
    let mut rest = VecDeque::new();
    let mut taken = Instant::now();
    let ended = || (Closed::GuestEnded, "the guest has ended".to_owned());
    loop {
        // Whoever has lost control types nothing more.
        while let Ok(order) = guest.orders.try_recv() {
            if let Some(end) = obey(order, socket, guest.room).await? {
                return Ok(end);
            }
        }
        let (pending, _) = rest.as_slices();
        let is_pending = !pending.is_empty();
        tokio::select! {
            Some(order) = guest.orders.recv() => if let Some(end) = obey(order, socket, guest.room).await? {
                return Ok(end);
            },
            count = input.write(pending), if is_pending => match count {
                Ok(0) | Err(_) => return Ok(ended()),
                Ok(count) => {
                    rest.drain(..count);
                    taken = Instant::now();
                }
            },
            () = sleep_until(taken + SILENCE), if is_pending => {
                return Ok((Closed::GuestEnded, "the guest takes nothing".to_owned()));
            }
            count = output.read(&mut buffer) => match count {
                Ok(0) | Err(_) => return Ok(ended()),
                Ok(count) => send(socket, Message::binary(buffer.get(..count).unwrap_or_default().to_vec())).await?,
            },
            received = alive.next(socket), if !is_pending => match received {
                Ok(None) => return Err(tungstenite::Error::ConnectionClosed),
                Ok(Some(Message::Text(text))) => match serde_json::from_str::<Answer>(&text) {
                    Ok(Answer { id, agrees }) => {
                        guest.room.change(|viewers, now| viewers.answer(guest.id, id, agrees, now));
                    }
                    Err(error) => return Ok((Closed::BadRequest, error.to_string())),
                },
                Ok(Some(Message::Binary(bytes))) => {
                    for part in bytes.chunks(TURN) {
                        let Some(bytes) = gate.pass(part) else {
                            return Ok((Closed::BadRequest, super::rfb::NotRfb.to_string()));
                        };
                        rest.extend(bytes);
                        tokio::task::yield_now().await;
                    }
                    taken = Instant::now();
                }
                Ok(Some(_)) => {}
                Err(tungstenite::Error::Capacity(error)) => return Ok((Closed::BadRequest, error.to_string())),
                Err(error) => return Err(error),
            },
        }
    }
}

/// Does what a viewer who is let in is told. Returns why the connection ends, if it does.
async fn obey(
    order: Decision,
    socket: &mut Socket,
    room: &Room,
) -> Result<Option<(Closed, String)>, tungstenite::Error> {
    match order {
        Decision::Replace { user, .. } => return Ok(Some((Closed::TakenOver, user))),
        Decision::Question { asks, user, .. } => {
            tell(socket, &News::Question { id: asks, user, seconds: room.seconds_left() }).await?;
        }
        Decision::Withdraw { asks, .. } => tell(socket, &News::Withdrawn { id: asks }).await?,
        Decision::LetIn(_) | Decision::Wait { .. } | Decision::InUse { .. } | Decision::Refuse(_) => {}
    }
    Ok(None)
}

/// Whether a viewer looks at the screen, for the condition ConsoleConnected.
pub fn at_screen(viewers: &[Viewer]) -> impl Iterator<Item = &Viewer> {
    viewers.iter().filter(|viewer| viewer.console.is_exclusive() && viewer.mode != Mode::Asks)
}
