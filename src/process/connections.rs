//! The connections of a port that everybody reaches: how many there are, how many of them strangers have, and who gives way if there are too many.
//!
//! | situation | what happens |
//! |---|---|
//! | a stranger's address has its share, and opens another one | its oldest one is closed |
//! | all places are taken | the oldest connection is closed of the strangers' address that has most of them |
//! | all places are taken, and none by a stranger | the new one waits |
//! | a person has her share, and asks on another one | she is told so |
//!
//! So who sends nothing, or little and slowly, from few addresses keeps out nobody, and least of all those who are known: they give way to nobody.

use std::{
    collections::BTreeMap,
    future::Future,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{Notify, oneshot},
    time::{Sleep, sleep},
};

use super::{lock, network::counted};

/// How many connections there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// In all.
    pub all: usize,
    /// From one address, of strangers.
    pub of_address: usize,
    /// Of one person.
    pub of_person: usize,
}

impl Limits {
    /// The least share of an address or a person.
    const LEAST_SHARE: usize = 16;

    /// So many in all: of these a quarter for the strangers of one address, and an eighth for one person.
    pub fn of(all: usize) -> Self {
        Self { all, of_address: (all / 4).max(Self::LEAST_SHARE), of_person: (all / 8).max(Self::LEAST_SHARE) }
    }
}

/// Who uses a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
enum User {
    /// Nobody knows who that is.
    Stranger,
    /// A program between the strangers and this one. Its connections have no limit of their own.
    Proxy,
    /// The person of that name.
    Person(String),
}

/// An open connection.
#[derive(Debug)]
struct Open {
    /// From where, as it counts.
    address: IpAddr,
    user: User,
    /// It must end when this is dropped.
    _goes_on: oneshot::Sender<()>,
}

/// The open connections, the oldest first.
#[derive(Debug, Default)]
struct Table {
    open: BTreeMap<u64, Open>,
    last: u64,
}

impl Table {
    fn strangers(&self, address: IpAddr) -> impl Iterator<Item = u64> {
        let is_one = move |open: &Open| open.user == User::Stranger && open.address == address;
        self.open.iter().filter(move |(_, open)| is_one(open)).map(|(id, _)| *id)
    }

    fn of_person(&self, name: &str) -> usize {
        self.open.values().filter(|open| matches!(&open.user, User::Person(known) if known == name)).count()
    }

    /// The connection that gives way if all places are taken.
    fn least(&self) -> Option<u64> {
        let mut numbers = BTreeMap::<IpAddr, (usize, u64)>::new();
        for (id, open) in &self.open {
            if open.user == User::Stranger {
                numbers.entry(open.address).or_insert((0, *id)).0 += 1;
            }
        }
        let rudest = numbers.into_values().max_by_key(|(number, oldest)| (*number, std::cmp::Reverse(*oldest)));
        // Of a proxy the oldest one: it is most likely at rest, and opened anew.
        let of_proxy = || self.open.iter().find(|(_, open)| open.user == User::Proxy).map(|(id, _)| *id);
        rudest.map(|(_, oldest)| oldest).or_else(of_proxy)
    }

    /// A place for a new connection, and what ends when it must end. `None`: it has to wait.
    fn enter(&mut self, limits: Limits, address: IpAddr, user: User) -> Option<(u64, oneshot::Receiver<()>)> {
        let address = counted(address);
        let own = if user == User::Stranger { self.strangers(address).collect::<Vec<_>>() } else { Vec::new() };
        if own.len() >= limits.of_address {
            own.first().and_then(|oldest| self.open.remove(oldest));
        } else if self.open.len() >= limits.all {
            let least = self.least()?;
            self.open.remove(&least);
        }
        let (goes_on, must_go) = oneshot::channel();
        self.last += 1;
        self.open.insert(self.last, Open { address, user, _goes_on: goes_on });
        Some((self.last, must_go))
    }
}

/// The connections of a port.
#[derive(Debug)]
pub struct Connections {
    limits: Limits,
    table: Mutex<Table>,
    has_room: Notify,
}

/// A person, or the address of strangers, has too many connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there are too many connections")]
pub struct TooMany;

impl Connections {
    /// No connection yet.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self { limits, table: Mutex::default(), has_room: Notify::new() })
    }

    /// Waits until there is a place for a connection from that address. With `is_proxy` a program is there that strangers and persons use.
    pub async fn enter(self: &Arc<Self>, address: IpAddr, is_proxy: bool) -> (Arc<Place>, MustGo) {
        let user = || if is_proxy { User::Proxy } else { User::Stranger };
        loop {
            // Before the look, so that no room is missed.
            let has_room = self.has_room.notified();
            let entered = lock(&self.table).enter(self.limits, address, user());
            if let Some((id, must_go)) = entered {
                let own = (counted(address), user());
                return (Arc::new(Place { id, own, connections: self.clone() }), MustGo(must_go, false));
            }
            has_room.await;
        }
    }
}

/// Says when a connection must end.
#[derive(Debug)]
pub struct MustGo(oneshot::Receiver<()>, bool);

impl MustGo {
    fn is_so(&mut self, context: &mut Context<'_>) -> bool {
        // It may not be asked again after that.
        self.1 = self.1 || Pin::new(&mut self.0).poll(context).is_ready();
        self.1
    }
}

/// The place of a connection. It is free again when the last reference has gone.
#[derive(Debug)]
pub struct Place {
    id: u64,
    own: (IpAddr, User),
    connections: Arc<Connections>,
}

impl Place {
    /// A request begins: from that address, of that person or a stranger. Until what is returned is dropped, the connection is hers.
    ///
    /// # Errors
    /// If she has too many, or the strangers at that address behind a proxy.
    pub fn serve(self: &Arc<Self>, from: IpAddr, person: Option<&str>) -> Result<Serving, TooMany> {
        let (from, limits) = (counted(from), self.connections.limits);
        let mut table = lock(&self.connections.table);
        let is_too_much = match person {
            Some(name) => table.of_person(name) >= limits.of_person,
            None => self.own.1 == User::Proxy && table.strangers(from).count() >= limits.of_address,
        };
        if is_too_much {
            return Err(TooMany);
        }
        if let Some(open) = table.open.get_mut(&self.id) {
            open.address = from;
            open.user = person.map_or(User::Stranger, |name| User::Person(name.to_owned()));
        }
        Ok(Serving(Some(self.clone())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.connections.table).open.remove(&self.id);
        self.connections.has_room.notify_one();
    }
}

/// A request that is being answered.
#[derive(Debug)]
pub struct Serving(Option<Arc<Place>>);

impl Serving {
    /// The connection is used for this alone, until it ends.
    pub fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let Some(place) = self.0.take() else { return };
        if let Some(open) = lock(&place.connections.table).open.get_mut(&place.id) {
            (open.address, open.user) = place.own.clone();
        }
        place.connections.has_room.notify_one();
    }
}

/// A connection that ends when it must give way, or after its time.
#[derive(Debug)]
pub struct Connection<S> {
    stream: S,
    must_go: MustGo,
    end: Option<Pin<Box<Sleep>>>,
    _place: Arc<Place>,
}

impl<S> Connection<S> {
    /// The connection at that place. With a time it ends after it.
    pub fn new(stream: S, place: Arc<Place>, must_go: MustGo, time: Option<Duration>) -> Self {
        Self { stream, must_go, end: time.map(|time| Box::pin(sleep(time))), _place: place }
    }
}

impl<S: Unpin> Connection<S> {
    /// Its stream, or an error if it must end.
    fn stream(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut S>> {
        if self.must_go.is_so(context) {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if self.end.as_mut().is_some_and(|end| end.as_mut().poll(context).is_ready()) {
            return Err(io::ErrorKind::TimedOut.into());
        }
        Ok(Pin::new(&mut self.stream))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Connection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &[u8]) -> Poll<io::Result<usize>> {
        self.stream(context)?.poll_write(context, buffer)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// How many connections a port for probes may have, how many of them from one address, and how long each is open, also between two requests.
const PROBES: Limits = Limits { all: 128, of_address: 16, of_person: 0 };
const PROBE: Duration = Duration::from_secs(10);

/// A listener for probes, of which each connection is short: nobody keeps the kubelet from them, after which it would end the program.
pub struct ProbeListener {
    listener: TcpListener,
    open: Arc<Connections>,
}

impl ProbeListener {
    /// Over that listener.
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, open: Connections::new(PROBES) }
    }
}

impl axum::serve::Listener for ProbeListener {
    type Io = Connection<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (stream, peer) = axum::serve::Listener::accept(&mut self.listener).await;
        // All of them are strangers, so one gives way.
        let (place, must_go) = self.open.enter(peer.ip(), false).await;
        (Connection::new(stream, place, must_go, Some(PROBE)), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::{Router, routing::get};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    const LIMITS: Limits = Limits { all: 10, of_address: 4, of_person: 3 };

    fn peer(last: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, last])
    }

    fn is_open(must_go: &mut MustGo) -> bool {
        must_go.0.try_recv() == Err(oneshot::error::TryRecvError::Empty)
    }

    #[test]
    fn shares_of_all_places() {
        assert_eq!(Limits::of(1024), Limits { all: 1024, of_address: 256, of_person: 128 });
        assert_eq!(Limits::of(2), Limits { all: 2, of_address: 16, of_person: 16 });
    }

    #[tokio::test]
    async fn an_address_with_its_share_gives_way_to_itself() {
        let connections = Connections::new(LIMITS);
        let mut own = Vec::new();
        for _ in 0..LIMITS.of_address {
            own.push(connections.enter(peer(1), false).await);
        }
        let (_other, mut other) = connections.enter(peer(2), false).await;
        let (_sixth, mut sixth) = connections.enter(peer(1), false).await;
        let open: Vec<bool> = own.iter_mut().map(|(_, must_go)| is_open(must_go)).collect();
        assert_eq!(open, [false, true, true, true], "the oldest one");
        assert!(is_open(&mut other) && is_open(&mut sixth));
        // Neighbours in IPv6 are one address.
        let neighbour = |last: u16| IpAddr::from([0x2001, 0xdb8, 1, 2, 3, 4, 5, last]);
        let (_place, mut first) = connections.enter(neighbour(0), false).await;
        let mut more = Vec::new();
        for last in 1..=4 {
            more.push(connections.enter(neighbour(last), false).await);
        }
        assert!(!is_open(&mut first));
        assert!(is_open(&mut other));
    }

    #[tokio::test]
    async fn the_address_with_most_connections_gives_way_and_nobody_who_is_known() {
        let connections = Connections::new(LIMITS);
        let (known, mut is_known) = connections.enter(peer(9), false).await;
        let serving = known.serve(peer(9), Some("ann")).unwrap();
        let mut all = Vec::new();
        for last in [1, 2, 2, 3, 3, 3, 4, 4, 5] {
            all.push(connections.enter(peer(last), false).await);
        }
        let (_new, mut new) = connections.enter(peer(6), false).await;
        let open: Vec<bool> = all.iter_mut().map(|(_, must_go)| is_open(must_go)).collect();
        assert_eq!(open, [true, true, true, false, true, true, true, true, true]);
        assert!(is_open(&mut is_known) && is_open(&mut new));
        // Without a request it is a stranger's again: of those with one it is the oldest.
        drop(serving);
        drop(all);
        let mut rest = Vec::new();
        for last in 10..19 {
            rest.push(connections.enter(peer(last), false).await);
        }
        assert!(!is_open(&mut is_known));
    }

    #[tokio::test]
    async fn a_new_connection_waits_if_all_are_of_persons() {
        let connections = Connections::new(Limits { all: 2, ..LIMITS });
        let mut places = Vec::new();
        for name in ["ann", "bob"] {
            let (place, must_go) = connections.enter(peer(1), false).await;
            let serving = place.serve(peer(1), Some(name)).unwrap();
            places.push((place, must_go, serving));
        }
        let waits = connections.enter(peer(2), false);
        let mut waits = std::pin::pin!(waits);
        assert!(futures::poll!(&mut waits).is_pending());
        drop(places.pop());
        waits.await;
    }

    #[tokio::test]
    async fn a_person_has_a_share_wherever_she_is() {
        let connections = Connections::new(LIMITS);
        let mut own = Vec::new();
        for last in 0..3 {
            let (place, must_go) = connections.enter(peer(last), false).await;
            let serving = place.serve(peer(last), Some("ann")).unwrap();
            own.push((place, must_go, serving));
        }
        let (place, _must_go) = connections.enter(peer(9), false).await;
        assert_eq!(place.serve(peer(9), Some("ann")).unwrap_err(), TooMany);
        let bob = place.serve(peer(9), Some("bob")).unwrap();
        drop(bob);
        // What was kept lasts as long as the connection.
        own.pop().unwrap().2.keep();
        let again = place.serve(peer(9), Some("ann"));
        assert!(again.is_ok(), "that connection has ended");
    }

    #[tokio::test]
    async fn the_strangers_behind_a_proxy_are_told_apart() {
        let connections = Connections::new(LIMITS);
        let proxy = peer(1);
        let mut serving = Vec::new();
        for _ in 0..LIMITS.of_address {
            let (place, must_go) = connections.enter(proxy, true).await;
            serving.push((place.serve(peer(50), None).unwrap(), must_go));
        }
        let (place, mut must_go) = connections.enter(proxy, true).await;
        assert_eq!(place.serve(peer(50), None).unwrap_err(), TooMany);
        drop(place.serve(peer(51), None).unwrap());
        let person = place.serve(peer(50), Some("ann")).unwrap();
        // Who gives way is who has most, not the proxy.
        let mut more = Vec::new();
        for last in 60..66 {
            more.push(connections.enter(peer(last), false).await);
        }
        assert!(is_open(&mut must_go) && !is_open(&mut serving[0].1));
        drop(person);
    }

    #[tokio::test]
    async fn a_client_that_sends_nothing_is_disconnected_and_others_are_answered() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/livez", get(async || "ok"));
        tokio::spawn(axum::serve(ProbeListener::new(listener), routes).into_future());
        let mut silent = Vec::new();
        // More than an address may have.
        for _ in 0..40 {
            silent.push(TcpStream::connect(address).await.unwrap());
        }
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("ok"), "{answer}");
        // From here on each pause is skipped.
        tokio::time::pause();
        let mut nothing = Vec::new();
        let end = tokio::time::timeout(2 * PROBE, silent.pop().unwrap().read_to_end(&mut nothing)).await;
        assert_eq!(end.expect("an end").unwrap_or_default(), 0);
    }
}
