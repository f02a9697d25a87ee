//! Limits the connections of everybody who reaches the port: how many there are, how many from one address, and how long each is open. So
//! nobody keeps the kubelet from its probes, after which it would end the manager.

use std::{
    collections::HashMap,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::{Sleep, sleep},
};

use crate::process::lock;

/// How many connections may be open.
const ALL: usize = 128;
/// How many of them may be from one address.
const FROM_ONE_ADDRESS: usize = 16;
/// How long a connection may be open, also between two requests.
const DURATION: Duration = Duration::from_secs(10);

/// A listener that closes a connection at once if there are too many.
pub(super) struct LimitedListener {
    listener: TcpListener,
    open: Arc<Mutex<OpenConnections>>,
}

impl LimitedListener {
    pub(super) fn new(listener: TcpListener) -> Self {
        Self { listener, open: Arc::default() }
    }
}

impl Listener for LimitedListener {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        loop {
            let (stream, peer) = Listener::accept(&mut self.listener).await;
            if lock(&self.open).add(peer.ip()) {
                let place = Place { open: self.open.clone(), peer: peer.ip() };
                return (Connection { stream, end: Box::pin(sleep(DURATION)), _place: place }, peer);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// How many connections are open, by address.
#[derive(Debug, Default)]
struct OpenConnections(HashMap<IpAddr, usize>);

impl OpenConnections {
    /// Counts a new connection, if it may be opened.
    fn add(&mut self, peer: IpAddr) -> bool {
        let all: usize = self.0.values().sum();
        let from_peer = self.0.entry(peer).or_default();
        let may_open = all < ALL && *from_peer < FROM_ONE_ADDRESS;
        *from_peer += usize::from(may_open);
        self.0.retain(|_, count| *count > 0);
        may_open
    }

    fn remove(&mut self, peer: IpAddr) {
        if let Some(count) = self.0.get_mut(&peer) {
            *count = count.saturating_sub(1);
        }
        self.0.retain(|_, count| *count > 0);
    }
}

/// The place of a connection among those that may be open.
struct Place {
    open: Arc<Mutex<OpenConnections>>,
    peer: IpAddr,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.open).remove(self.peer);
    }
}

/// A connection that ends after [`DURATION`].
pub(super) struct Connection {
    stream: TcpStream,
    end: Pin<Box<Sleep>>,
    _place: Place,
}

impl Connection {
    /// Its stream, or an error if it was open for too long.
    fn stream(&mut self, context: &mut Context<'_>) -> io::Result<Pin<&mut TcpStream>> {
        match self.end.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::TimedOut.into()),
            Poll::Pending => Ok(Pin::new(&mut self.stream)),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream(context)?.poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
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

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use axum::{Router, routing::get};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn one_address_can_not_take_all_connections() {
        let peer = |last: u8| IpAddr::from([192, 0, 2, last]);
        let mut open = OpenConnections::default();
        let opened = (0..100).filter(|_| open.add(peer(1))).count();
        assert_eq!(opened, FROM_ONE_ADDRESS);
        assert!(open.add(peer(2)));
        open.remove(peer(1));
        assert!(open.add(peer(1)) && !open.add(peer(1)));
        let all = (3..=255).flat_map(|last| [last; 20]).filter(|last| open.add(peer(*last))).count();
        assert_eq!(all, ALL - FROM_ONE_ADDRESS - 1);
        assert!(!open.add(peer(2)), "there are too many in all");
        for last in 1..=255 {
            (0..FROM_ONE_ADDRESS).for_each(|_| open.remove(peer(last)));
        }
        assert!(open.0.is_empty());
    }

    #[tokio::test]
    async fn a_client_that_sends_nothing_is_disconnected_and_others_are_answered() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new().route("/livez", get(async || "ok"));
        tokio::spawn(axum::serve(LimitedListener::new(listener), routes).into_future());
        let mut silent = TcpStream::connect(address).await.unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        client.write_all(b"GET /livez HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.ends_with("ok"), "{answer}");
        // From here on each pause is skipped.
        tokio::time::pause();
        let mut nothing = Vec::new();
        let end = tokio::time::timeout(2 * DURATION, silent.read_to_end(&mut nothing)).await;
        assert_eq!(end.expect("an end").unwrap_or_default(), 0);
    }
}
