//! The guest's serial console. The runner copies it to the standard output, so that `kubectl logs` shows how the guest boots. It
//! also keeps a log of limited size, and serves any number of clients on a socket. A new client first gets the last output.
//!
//! A QEMU chardev has only one client, so the runner is that client.

use std::{
    collections::VecDeque,
    fs::File,
    io::{self, Write},
    path::{Path, PathBuf},
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream, unix::OwnedWriteHalf},
    sync::{broadcast, mpsc},
    time::{Instant, sleep},
};

use super::terminal::{LEAVE, Terminal};
use crate::process::output::Output;

/// At this size in bytes the log is renamed and a new one starts. So the last 128 to 256 KiB of the guest's output are kept.
const LOG_SIZE: u64 = 128 << 10;
/// The number of chunks that are buffered for a slow client. If there are more, the client loses the oldest.
const CLIENT_BUFFER: usize = 64;
/// How long the guest's console waits for the reader of the standard output.
const SLOW_READER: Duration = Duration::from_secs(1);
/// How long the end of the console waits until everything is written.
const LAST_WORDS: Duration = Duration::from_millis(800);
/// The bytes of the last output that a new client gets.
const REPLAY: usize = 32 << 10;

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

/// The last output.
#[derive(Default)]
struct Replay {
    bytes: VecDeque<u8>,
    is_cut: bool,
}

impl Replay {
    fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        let surplus = self.bytes.len().saturating_sub(REPLAY);
        self.is_cut |= surplus > 0;
        self.bytes.drain(..surplus);
    }

    /// The output from the beginning of a line, without questions to the terminal: it would answer them again, and the guest would take
    /// that for keys.
    fn text(&self) -> Vec<u8> {
        let bytes: Vec<u8> = self.bytes.iter().copied().collect();
        let line = bytes.iter().position(|byte| *byte == b'\n').filter(|_| self.is_cut);
        without_questions(line.and_then(|at| bytes.get(at + 1..)).unwrap_or(&bytes))
    }
}

/// Leaves out the control sequences that a terminal answers: ESC [ ... n and ESC [ ... c (ECMA-48, 8.3.35 and 8.3.24), and ESC Z.
fn without_questions(bytes: &[u8]) -> Vec<u8> {
    let mut text = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| *byte == 0x1b) {
        let (before, sequence) = rest.split_at(at);
        text.extend_from_slice(before);
        let length = match sequence {
            [_, b'[', parameters @ ..] => {
                2 + parameters.iter().take_while(|byte| (0x20..0x40).contains(*byte)).count() + 1
            }
            _ => 2,
        };
        let (sequence, after) = sequence.split_at(length.min(sequence.len()));
        if !matches!(sequence, [_, b'[', .., b'n' | b'c'] | [_, b'Z']) {
            text.extend_from_slice(sequence);
        }
        rest = after;
    }
    text.extend_from_slice(rest);
    text
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
    let stdout = Output::to(io::stdout())?;
    let mut is_stalled = false;
    let mut log = Log::new(log).inspect_err(|error| tracing::warn!(%error, "cannot write the console log")).ok();
    let forwarding = tokio::spawn(forward_input(write, typed));
    let mut buffer = vec![0; 4096];
    let mut replay = Replay::default();
    loop {
        tokio::select! {
            count = read.read(&mut buffer) => {
                let bytes = &buffer[..count?];
                if bytes.is_empty() {
                    break;
                }
                // A standard output that nobody reads must not stop the guest, whose kernel waits for its console.
                is_stalled = !show(&stdout, bytes, is_stalled).await;
                if let Some(file) = &mut log
                    && let Err(error) = file.write(bytes)
                {
                    tracing::warn!(%error, "cannot write the console log any more");
                    log = None;
                }
                replay.add(bytes);
                if output.receiver_count() > 0 {
                    // This fails only if the last client has just disconnected.
                    let _ = output.send(bytes.to_vec());
                }
            }
            client = listener.accept() => {
                let (client, _) = client?;
                tokio::spawn(serve_client(client, replay.text(), output.subscribe(), input.clone()));
            }
        }
    }
    forwarding.abort();
    // The program ends soon, and the guest's last words are the most important ones.
    let _ = tokio::task::spawn_blocking(move || stdout.finish(LAST_WORDS)).await;
    Ok(())
}

/// Writes to the standard output. Waits a moment for a slow reader, unless the last piece was lost already. Returns whether it will be
/// written.
async fn show(stdout: &Output, bytes: &[u8], is_stalled: bool) -> bool {
    let until = Instant::now() + if is_stalled { Duration::ZERO } else { SLOW_READER };
    loop {
        if stdout.send(bytes) {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        sleep(Duration::from_millis(10)).await;
    }
}

/// Writes what clients send to the guest.
async fn forward_input(mut write: OwnedWriteHalf, mut typed: mpsc::Receiver<Vec<u8>>) {
    while let Some(bytes) = typed.recv().await {
        if write.write_all(&bytes).await.is_err() {
            return;
        }
    }
}

/// Sends the last and then the present output of the guest to a client, and the client's input to the guest.
async fn serve_client(
    client: UnixStream,
    replay: Vec<u8>,
    mut output: broadcast::Receiver<Vec<u8>>,
    input: mpsc::Sender<Vec<u8>>,
) {
    let (mut read, mut write) = client.into_split();
    if write.write_all(&replay).await.is_err() {
        return;
    }
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

/// Shows the console on the terminal, from the last output on, and sends what is typed there to the guest. Ctrl-] leaves. Without a terminal
/// it copies the standard input as long as there is some, and the output until the guest ends.
///
/// # Errors
/// If no VM runs, or the terminal can't be used. Also if the guest ends before somebody at a terminal has left, so that whoever has started this
/// can join the next guest.
pub async fn join(socket: &Path) -> io::Result<()> {
    let console = UnixStream::connect(socket).await?;
    let mut terminal = match Terminal::take()? {
        Some(terminal) => Some(terminal),
        None => Terminal::pipe().ok(),
    };
    let is_terminal = terminal.as_ref().is_some_and(Terminal::is_raw);
    let (mut output, mut input) = console.into_split();
    let mut stdout = tokio::io::stdout();
    let mut buffer = vec![0; 4096];
    loop {
        tokio::select! {
            count = output.read(&mut buffer) => {
                let bytes = &buffer[..count?];
                if bytes.is_empty() {
                    return if is_terminal { Err(io::Error::other("the guest has ended")) } else { Ok(()) };
                }
                stdout.write_all(bytes).await?;
                stdout.flush().await?;
            }
            typed = typed(terminal.as_mut()) => match typed {
                Ok(bytes) if !bytes.is_empty() => {
                    let keys = bytes.split(|byte| *byte == LEAVE).next().unwrap_or_default();
                    input.write_all(keys).await?;
                    if keys.len() < bytes.len() {
                        return Ok(());
                    }
                }
                // There is nobody left who types.
                _ => terminal = None,
            },
        }
    }
}

/// What is typed. Never returns without a terminal.
async fn typed(terminal: Option<&mut Terminal>) -> io::Result<Vec<u8>> {
    match terminal {
        Some(terminal) => terminal.typed().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_output_begins_with_a_line_and_asks_the_terminal_nothing() {
        let mut replay = Replay::default();
        replay.add(b"one\r\n\x1b[6ntwo\x1b[1;31mred\x1b[0c\x1bZ\x1b[");
        assert_eq!(replay.text(), b"one\r\ntwo\x1b[1;31mred\x1b[");
        for line in 0..10_000 {
            replay.add(format!("line {line:05}\n").as_bytes());
        }
        let text = String::from_utf8(replay.text()).unwrap();
        assert!(text.starts_with("line ") && text.ends_with("line 09999\n"), "{text:?}");
        assert!((REPLAY - 11..=REPLAY).contains(&text.len()), "{}", text.len());
    }

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
        let mut late = connect().await;
        late.read_exact(&mut typed).await.unwrap();
        assert_eq!(&typed, b"out", "the last output");
        drop(qemu);
        server.await.unwrap().unwrap();
        assert_eq!(std::fs::read(log).unwrap(), b"out");
    }
}
