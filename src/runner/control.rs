//! The socket on which a person in the container has the guest ended: `vm-runner end`, for example by `kubectl exec`.
//!
//! It needs neither a token of the Pod nor the VirtualMachine, so it works at each moment of a power-down, also when the VM was deleted.
//! It ends only a guest that is being powered down already: otherwise the kubelet would start the guest again.

use std::{fs, io};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

use super::runtime_dir::RuntimeDir;

/// The answer if the guest is ended.
const ENDING: &str = "ending\n";
/// The answer if the runner was not asked to stop the guest.
const NOT_STOPPING: &str = "not stopping\n";

/// The machine role's side.
pub struct Control(UnixListener);

/// A request to end the guest.
pub struct EndRequest(UnixStream);

impl Control {
    /// Listens on the socket.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub fn listen(runtime: &RuntimeDir) -> io::Result<Self> {
        // The socket of an earlier runner.
        let _ = fs::remove_file(runtime.control());
        UnixListener::bind(runtime.control()).map(Self)
    }

    /// The next request.
    ///
    /// # Errors
    /// If no connection can be accepted.
    pub async fn request(&self) -> io::Result<EndRequest> {
        self.0.accept().await.map(|(stream, _)| EndRequest(stream))
    }
}

impl EndRequest {
    /// Answers whether the guest is being ended.
    ///
    /// # Errors
    /// If nobody waits for the answer any more.
    pub async fn answer(mut self, is_ending: bool) -> io::Result<()> {
        self.0.write_all(if is_ending { ENDING } else { NOT_STOPPING }.as_bytes()).await
    }
}

/// Asks the machine role to end the guest. Returns false if it refuses, because the guest is not being powered down.
///
/// # Errors
/// If no VM runs, or its runner does not answer.
pub async fn end(runtime: &RuntimeDir) -> io::Result<bool> {
    let mut stream = UnixStream::connect(runtime.control()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    match answer.as_str() {
        ENDING => Ok(true),
        NOT_STOPPING => Ok(false),
        // The runner has ended meanwhile.
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_request_gets_its_answer() {
        let directory = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(directory.path()).unwrap();
        assert!(end(&runtime).await.is_err(), "no VM runs");
        for is_ending in [true, false] {
            let control = Control::listen(&runtime).unwrap();
            let answered = async { control.request().await.unwrap().answer(is_ending).await };
            let (asked, answered) = tokio::join!(end(&runtime), answered);
            answered.unwrap();
            assert_eq!(asked.unwrap(), is_ending);
        }
    }
}
