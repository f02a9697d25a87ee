//! How the kubelet's probe `vmctl ready` learns from the running vmctl whether the guest is up: over a Unix socket with an abstract name, so
//! that the container needs neither a port nor a place to write to.

use std::{
    io::{self, Read},
    os::{
        linux::net::SocketAddrExt,
        unix::net::{SocketAddr, UnixListener as StdListener, UnixStream as StdStream},
    },
    time::Duration,
};

use tokio::{io::AsyncWriteExt, net::UnixListener, sync::watch, time::sleep};

use super::standing::Readiness;

/// What a ready vmctl answers.
const READY: &str = "ready";
/// How long a probe waits for an answer.
const LIMIT: Duration = Duration::from_secs(5);
/// How long to wait after a connection could not be accepted.
const REST: Duration = Duration::from_millis(100);

fn address(pod_uid: &str) -> io::Result<SocketAddr> {
    SocketAddr::from_abstract_name(format!("vmctl.vmoperator.jdrupes.org/{pod_uid}"))
}

/// Answers probes until the program ends.
///
/// # Errors
/// If the socket can't be made: another vmctl runs in this Pod.
pub fn serve(pod_uid: &str, readiness: watch::Receiver<Readiness>) -> io::Result<()> {
    let listener = StdListener::bind_addr(&address(pod_uid)?)?;
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    tokio::spawn(async move {
        loop {
            let Ok((mut stream, _)) = listener.accept().await else {
                sleep(REST).await;
                continue;
            };
            let answer = match &*readiness.borrow() {
                Readiness::Ready => READY.to_owned(),
                Readiness::NotReady(why) => format!("not ready: {why}"),
            };
            // A short text always fits into the socket; a probe that is gone needs none.
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    Ok(())
}

/// Asks the vmctl of a Pod: whether it is ready, and its answer.
///
/// # Errors
/// If it does not answer.
pub fn ask(pod_uid: &str) -> io::Result<(bool, String)> {
    let mut stream = StdStream::connect_addr(&address(pod_uid)?)?;
    stream.set_read_timeout(Some(LIMIT))?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok((answer == READY, answer))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_probe_gets_the_state_of_its_own_pod() {
        let uid = format!("{}-unit", std::process::id());
        let (sender, receiver) = watch::channel(Readiness::NotReady("Starting: it starts".into()));
        let asked = |uid: String| async move { tokio::task::spawn_blocking(move || ask(&uid)).await.unwrap() };
        assert!(asked(uid.clone()).await.is_err(), "nobody listens");
        serve(&uid, receiver.clone()).unwrap();
        assert!(serve(&uid, receiver).is_err(), "one for each Pod");
        assert_eq!(asked(uid.clone()).await.unwrap(), (false, "not ready: Starting: it starts".into()));
        sender.send_replace(Readiness::Ready);
        assert_eq!(asked(uid.clone()).await.unwrap(), (true, "ready".into()));
        assert!(asked(format!("{uid}-other")).await.is_err());
    }
}
