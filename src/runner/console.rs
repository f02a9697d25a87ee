//! The guest's serial console: copied to the standard output (so that `kubectl logs` shows the guest boot), kept in a log of
//! limited size, and shared by any number of clients of a socket.
//!
//! QEMU's chardevs have one reader each, so the runner is that reader.

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

/// The log is moved aside when it has this size; so there are the last 128 to 256 KiB of what the guest wrote.
const LOG_SIZE: u64 = 128 << 10;
/// Chunks that a slow client may be behind before it loses some.
const BEHIND: usize = 64;

/// A log of limited size: `NAME`, and what was before it in `NAME.1`.
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

/// Copies the console until QEMU ends.
///
/// # Errors
/// If the sockets cannot be used; what is only a convenience (the log, the clients) fails alone.
pub async fn serve(serial: UnixStream, socket: &Path, log: &Path) -> io::Result<()> {
    // One that a container before this one has left.
    let _ = std::fs::remove_file(socket);
    let listener = UnixListener::bind(socket)?;
    let (mut read, write) = serial.into_split();
    let (output, _) = broadcast::channel(BEHIND);
    let (input, typed) = mpsc::channel(1);
    let mut stdout = tokio::io::stdout();
    let mut log = Log::new(log).inspect_err(|error| tracing::warn!(%error, "no console log")).ok();
    let typing = tokio::spawn(type_in(write, typed));
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
                    tracing::warn!(%error, "the console log ends");
                    log = None;
                }
                if output.receiver_count() > 0 {
                    // Fails only if the last one has just left.
                    let _ = output.send(bytes.to_vec());
                }
            }
            client = listener.accept() => {
                let (client, _) = client?;
                tokio::spawn(attend(client, output.subscribe(), input.clone()));
            }
        }
    }
    typing.abort();
    Ok(())
}

async fn type_in(mut write: OwnedWriteHalf, mut typed: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = typed.recv().await {
        if write.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

async fn attend(client: UnixStream, mut output: broadcast::Receiver<Vec<u8>>, input: mpsc::Sender<Vec<u8>>) {
    let (mut read, mut write) = client.into_split();
    let mut buffer = [0; 256];
    loop {
        tokio::select! {
            chunk = output.recv() => match chunk {
                Ok(bytes) => if write.write_all(&bytes).await.is_err() { return },
                // A slow terminal sees a gap, not a guest that waits for it.
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
    fn the_log_has_a_limit_and_keeps_the_end() {
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
    async fn clients_share_the_console() {
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
        // What a client types arrives in the guest; after that the client is known to be attended.
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
