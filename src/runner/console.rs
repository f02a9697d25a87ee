//! The guest's serial console. The runner copies it to the standard output, so that `kubectl logs` shows how the guest boots. It
//! also keeps a log of limited size, and serves any number of clients on a socket.
//!
//! A QEMU chardev has only one client, so the runner is that client.

use std::{
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream, unix::OwnedWriteHalf},
    sync::{broadcast, mpsc},
};

/// At this size in bytes the log is renamed and a new one starts. So the last 128 to 256 KiB of the guest's output are kept.
const LOG_SIZE: u64 = 128 << 10;
/// The number of chunks that are buffered for a slow client. If there are more, the client loses the oldest.
const CLIENT_BUFFER: usize = 64;

/// A log of limited size: the file `NAME`, and the part before it in `NAME.1`.
struct Log {
    path: PathBuf,
    file: File,
    size: u64,
}

impl Log {
    fn new(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), file: File::create(path)?, size: 0 })
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.size > LOG_SIZE {
            std::fs::rename(&self.path, self.path.with_added_extension("1"))?;
            *self = Self::new(&self.path)?;
        }
        self.size += bytes.len() as u64;
        self.file.write_all(bytes)
    }
}

/// Copies the console until QEMU closes it. `serial` is the connection to QEMU, `socket` the path of the socket for clients, and
/// `log` the path of the log.
///
/// # Errors
/// If `serial` or `socket` cannot be used. If the log or a client fails, the function continues without it.
pub async fn serve(serial: UnixStream, socket: &Path, log: &Path) -> io::Result<()> {
    // An earlier container of the Pod may have left its socket.
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let (mut read, write) = serial.into_split();
    let (output, _) = broadcast::channel(CLIENT_BUFFER);
    let (input, typed) = mpsc::channel(1);
    let mut stdout = tokio::io::stdout();
    let mut log = Log::new(log).inspect_err(|error| tracing::warn!(%error, "cannot write the console log")).ok();
    let forwarding = tokio::spawn(forward_input(write, typed));
    let mut buffer = vec![0; 4096];
    loop {
        tokio::select! {
            count = read.read(&mut buffer) => {
                let bytes = &buffer[..count?];
                if bytes.is_empty() {
                    break;
                }
                // A closed standard output must not stop the guest's console.
                let _ = stdout.write_all(bytes).await;
                let _ = stdout.flush().await;
                if let Some(file) = &mut log
                    && let Err(error) = file.write(bytes)
                {
                    tracing::warn!(%error, "cannot write the console log any more");
                    log = None;
                }
                if output.receiver_count() > 0 {
                    // This fails only if the last client has just disconnected.
                    let _ = output.send(bytes.to_vec());
                }
            }
            client = listener.accept() => {
                let (client, _) = client?;
                tokio::spawn(serve_client(client, output.subscribe(), input.clone()));
            }
        }
    }
    forwarding.abort();
    Ok(())
}

/// Writes what clients send to the guest.
async fn forward_input(mut write: OwnedWriteHalf, mut typed: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = typed.recv().await {
        if write.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Sends the guest's output to a client, and the client's input to the guest.
async fn serve_client(client: UnixStream, mut output: broadcast::Receiver<Vec<u8>>, input: mpsc::Sender<Vec<u8>>) {
    let (mut read, mut write) = client.into_split();
    let mut buffer = [0; 256];
    loop {
        tokio::select! {
            chunk = output.recv() => match chunk {
                Ok(bytes) => if write.write_all(&bytes).await.is_err() { return },
                // A slow client misses output. The guest must not wait for it.
                Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return,
            },
            count = read.read(&mut buffer) => match count {
                Ok(0) | Err(_) => return,
                Ok(count) => if input.send(buffer[..count].to_vec()).await.is_err() { return },
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_a_size_limit_and_keeps_the_latest_output() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        let mut log = Log::new(&path).unwrap();
        for line in 0..40_000 {
            log.write(format!("line {line:05}\n").as_bytes()).unwrap();
        }
        let (new, old) = (
            std::fs::read_to_string(&path).unwrap(),
            std::fs::read_to_string(dir.path().join("console.log.1")).unwrap(),
        );
        assert!((old.len() as u64) < LOG_SIZE + 100 && new.len() <= old.len() + 100);
        assert!((old + &new).ends_with("line 39998\nline 39999\n"));
    }

    #[tokio::test]
    async fn all_clients_see_the_output_and_can_send_input() {
        let dir = tempfile::tempdir().unwrap();
        let (mut qemu, serial) = UnixStream::pair().unwrap();
        let (socket, log) = (dir.path().join("console.sock"), dir.path().join("console.log"));
        let server = {
            let (socket, log) = (socket.clone(), log.clone());
            tokio::spawn(async move { serve(serial, &socket, &log).await })
        };
        let connect = || async {
            loop {
                match UnixStream::connect(&socket).await {
                    Ok(client) => return client,
                    Err(_) => tokio::task::yield_now().await,
                }
            }
        };
        let (mut one, mut two) = (connect().await, connect().await);
        // Input of a client arrives in the guest. After that it is certain that the client is served.
        let mut typed = [0; 3];
        for client in [&mut one, &mut two] {
            client.write_all(b"ls\n").await.unwrap();
            qemu.read_exact(&mut typed).await.unwrap();
            assert_eq!(&typed, b"ls\n");
        }
        qemu.write_all(b"out").await.unwrap();
        for client in [&mut one, &mut two] {
            client.read_exact(&mut typed).await.unwrap();
            assert_eq!(&typed, b"out");
        }
        drop(qemu);
        server.await.unwrap().unwrap();
        assert_eq!(std::fs::read(log).unwrap(), b"out");
    }
}
