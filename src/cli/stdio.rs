//! One connection to a port of a Pod over standard input and output, for ssh's `ProxyCommand` and the like.
//!
//! ```text
//!  standard input ─▶ WebSocket (pods/portforward) ─▶ API server ─▶ kubelet ─▶ the port in the Pod
//!  standard output ◀─────────────────────────────────────────────────────────────┘
//! ```
//!
//! No port of this computer is opened, so nobody else gets in, and the connection ends with this process.

use std::os::fd::AsFd;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api,
    api::{ApiResource, Portforwarder},
};
use rustix::event::{PollFd, PollFlags, poll};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    output::Failure,
    vms::{failure, refused_about},
};
use crate::actions::VmHandle;

/// How much is read at once.
const CHUNK: usize = 64 * 1024;
/// The rights that a WebSocket needs: the request is a GET, and since Kubernetes 1.35 the API server asks for `create` as well.
const VERBS: [&str; 2] = ["get", "create"];

/// Connects standard input and output with a port of a VM's Pod until the guest closes the connection.
///
/// # Errors
/// If the API server refuses, if nothing in the guest answers, or if the connection breaks.
pub(super) async fn join(vm: &VmHandle, pod: &str, port: u16) -> Result<(), Failure> {
    let failed = |why: &str| Failure::new(format!("{vm}: port {port}: {why}"));
    let (mut forwarder, guest) = connect(vm, pod, port).await?;
    let Some(error) = forwarder.take_error(port) else { return Err(failed("it was not forwarded")) };
    let carried = carry(guest, tokio::io::stdin(), tokio::io::stdout(), nobody_reads()).await;
    let carried = carried.map_err(|error| failed(&error.to_string()))?;
    // The API server says it before it closes the connection.
    let message = futures::FutureExt::now_or_never(error).flatten();
    verdict(carried, message.as_deref()).map_err(|why| failed(&why))
}

/// A connection to a port of a VM's Pod. It ends when the first part is dropped.
///
/// # Errors
/// If the API server refuses.
pub(super) async fn connect(
    vm: &VmHandle,
    pod: &str,
    port: u16,
) -> Result<(Portforwarder, impl AsyncRead + AsyncWrite + Unpin + use<>), Failure> {
    let api: Api<Pod> = Api::namespaced(vm.client().clone(), vm.namespace());
    let mut forwarder = match api.portforward(pod, &[port]).await {
        Ok(forwarder) => forwarder,
        Err(error) => return Err(failure(refused_to_forward(vm, &error).await, &error)),
    };
    match forwarder.take_stream(port) {
        Some(stream) => Ok((forwarder, stream)),
        None => Err(Failure::new(format!("{vm}: port {port}: it was not forwarded"))),
    }
}

/// How a connection ended: what came from the guest, and the error that the node reported.
fn verdict(carried: Carried, error: Option<&str>) -> Result<(), String> {
    let error = error.map(str::trim_end);
    match (carried, error) {
        (Carried::Something, None) => Ok(()),
        (Carried::Something, Some(error)) => Err(format!("the connection broke: {error}")),
        (Carried::Nothing, error) => {
            let error = error.map(|error| format!(" ({error})")).unwrap_or_default();
            Err(format!("the guest does not answer: nothing listens there, or it has not booted yet{error}"))
        }
    }
}

/// What the API server said about a request to forward a port.
async fn refused_to_forward(vm: &VmHandle, error: &kube::Error) -> String {
    let (pods, what) = (ApiResource::erase::<Pod>(&()), vm.to_string());
    let resource = ApiResource { plural: format!("{}/portforward", pods.plural), ..pods };
    refused_about(vm.client(), &resource, &what, &VERBS, Some(vm.namespace()), error).await
}

/// What came from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Carried {
    Nothing,
    Something,
}

/// Carries bytes between a guest and a person until the guest closes the connection, or nobody reads any more.
///
/// The end of `input` does not end it, because the answer may still come, and the protocol can't close one direction alone.
async fn carry(
    guest: impl AsyncRead + AsyncWrite,
    mut input: impl AsyncRead + Unpin,
    mut output: impl AsyncWrite + Unpin,
    nobody_reads: impl Future<Output = ()>,
) -> std::io::Result<Carried> {
    let (mut from_guest, mut to_guest) = tokio::io::split(guest);
    let send = async {
        // If it fails, the guest has closed the connection, and the other direction ends too.
        let _ = tokio::io::copy(&mut input, &mut to_guest).await;
        std::future::pending().await
    };
    let receive = async {
        let (mut buffer, mut carried) = (vec![0; CHUNK], Carried::Nothing);
        loop {
            let count = from_guest.read(&mut buffer).await?;
            if count == 0 {
                return Ok(carried);
            }
            carried = Carried::Something;
            output.write_all(&buffer[..count]).await?;
            output.flush().await?;
        }
    };
    tokio::select! {
        never = send => never,
        result = receive => result,
        () = nobody_reads => Ok(Carried::Something),
    }
}

/// Ends when standard output is a pipe that nobody reads any more, so that this process does not outlive the ssh that has started it.
async fn nobody_reads() {
    // Without a flag it waits for errors and for the other side's end alone.
    let wait = || poll(&mut [PollFd::from_borrowed_fd(std::io::stdout().as_fd(), PollFlags::empty())], None);
    if !matches!(tokio::task::spawn_blocking(wait).await, Ok(Ok(_))) {
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    /// What was carried, and what the person reads, if the guest does this with its end of the connection.
    async fn with_guest<F: Future<Output = ()>>(
        input: &'static [u8],
        guest: impl FnOnce(tokio::io::DuplexStream) -> F,
    ) -> (Carried, Vec<u8>) {
        let (near, far) = duplex(64);
        let mut output = Vec::new();
        let carried = carry(near, input, &mut output, std::future::pending());
        let (carried, ()) = tokio::join!(carried, guest(far));
        (carried.unwrap(), output)
    }

    #[tokio::test]
    async fn the_answer_comes_also_after_the_end_of_the_input() {
        let (carried, output) = with_guest(b"hello", async |mut far| {
            let mut question = [0; 5];
            far.read_exact(&mut question).await.unwrap();
            assert_eq!(&question, b"hello");
            // Longer than the pipe.
            far.write_all(&[b'a'; 1000]).await.unwrap();
        })
        .await;
        assert_eq!((carried, output.as_slice()), (Carried::Something, &[b'a'; 1000][..]));
    }

    #[tokio::test]
    async fn a_guest_that_says_nothing_is_told_apart() {
        assert_eq!(with_guest(b"hello", async |far| drop(far)).await, (Carried::Nothing, Vec::new()));
    }

    #[test]
    fn a_connection_without_an_answer_is_an_error() {
        assert_eq!(verdict(Carried::Something, None), Ok(()));
        let broken = verdict(Carried::Something, Some("reset\n"));
        assert_eq!(broken, Err("the connection broke: reset".into()));
        let silent = "the guest does not answer: nothing listens there, or it has not booted yet";
        assert_eq!(verdict(Carried::Nothing, None), Err(silent.into()));
        assert_eq!(verdict(Carried::Nothing, Some("refused")), Err(format!("{silent} (refused)")));
    }

    #[tokio::test]
    async fn it_ends_when_nobody_reads() {
        let (near, _far) = duplex(64);
        carry(near, tokio::io::empty(), Vec::new(), std::future::ready(())).await.unwrap();
    }
}
