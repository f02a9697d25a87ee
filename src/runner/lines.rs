//! Connections that carry lines of text, or one JSON message per line. QMP, the protocols of the guest's agents, and the
//! roles of the runner use them.

use std::{io, path::Path};

use futures::StreamExt;
use serde::Serialize;
use serde_json::Value;
use tokio::{
    io::AsyncWriteExt,
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};
use tokio_util::{
    bytes::Bytes,
    codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead},
};

/// The longest JSON message in bytes. The peer is QEMU or the guest; this limit keeps a bug or an attack there from using up the
/// node's memory. Real answers have at most some kilobytes.
const LONGEST_LINE: usize = 1 << 20;

/// A connection that carries lines of text.
#[derive(Debug)]
pub struct Lines {
    read: FramedRead<OwnedReadHalf, AnyDelimiterCodec>,
    write: OwnedWriteHalf,
}

impl Lines {
    /// Connects to a Unix socket. A line of the peer may have at most `longest` bytes.
    ///
    /// # Errors
    /// If no program listens on the socket.
    pub async fn connect(socket: &Path, longest: usize) -> io::Result<Self> {
        Ok(Self::over(UnixStream::connect(socket).await?, longest))
    }

    /// As [`Lines::connect`], with a connection that exists.
    fn over(stream: UnixStream, longest: usize) -> Self {
        let (read, write) = stream.into_split();
        let codec = AnyDelimiterCodec::new_with_max_length(b"\n".to_vec(), b"\n".to_vec(), longest);
        // The codec's default is 8 KiB, which is too much for a connection that is idle most of the time.
        Self { read: FramedRead::with_capacity(read, codec, 1024), write }
    }

    /// Sends bytes, which must end with a newline.
    ///
    /// # Errors
    /// If the connection is broken.
    pub async fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.write.write_all(line).await
    }

    /// Returns the next line, or `None` at the end of the connection. Cancel safe: no line is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken, or the line is too long.
    pub async fn receive(&mut self) -> io::Result<Option<Bytes>> {
        match self.read.next().await {
            None => Ok(None),
            Some(Ok(line)) => Ok(Some(line)),
            Some(Err(AnyDelimiterCodecError::Io(error))) => Err(error),
            Some(Err(AnyDelimiterCodecError::MaxChunkLengthExceeded)) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the peer has sent a line that is too long"))
            }
        }
    }
}

/// A connection that carries JSON messages, one per line.
#[derive(Debug)]
pub struct JsonLines {
    lines: Lines,
    /// How many bytes are still read.
    left: usize,
}

impl JsonLines {
    /// Connects to a Unix socket.
    ///
    /// # Errors
    /// If no program listens on the socket.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        Self::connect_limited(socket, LONGEST_LINE, usize::MAX).await
    }

    /// As [`JsonLines::connect`]. A message of the peer may have at most `longest` bytes, and all together `total`: to read them takes a CPU, and a guest
    /// sends as fast as it can.
    ///
    /// # Errors
    /// If no program listens on the socket.
    pub async fn connect_limited(socket: &Path, longest: usize, total: usize) -> io::Result<Self> {
        Ok(Self { lines: Lines::connect(socket, longest).await?, left: total })
    }

    /// Uses a connection that was accepted.
    pub fn over(stream: UnixStream) -> Self {
        Self { lines: Lines::over(stream, LONGEST_LINE), left: usize::MAX }
    }

    /// Sends a message. `prefix` is sent before it: the guest agent's protocol has a marker byte there.
    ///
    /// # Errors
    /// If the connection is broken.
    pub async fn send(&mut self, prefix: &[u8], message: &impl Serialize) -> io::Result<()> {
        let mut line = prefix.to_vec();
        serde_json::to_writer(&mut line, message)?;
        line.push(b'\n');
        self.lines.send(&line).await
    }

    /// Returns the next message, or `None` at the end of the connection. Skips empty lines and everything up to a marker byte
    /// (0xFF). Cancel safe: no message is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken, or the peer does not send JSON, or more than it may.
    pub async fn receive(&mut self) -> io::Result<Option<Value>> {
        while let Some(line) = self.lines.receive().await? {
            self.left = self.left.checked_sub(line.len() + 1).ok_or_else(|| {
                io::Error::new(io::ErrorKind::InvalidData, "the peer has sent much more than it was asked for")
            })?;
            let text = line.trim_ascii();
            let text = text.iter().rposition(|byte| *byte == 0xff).map_or(text, |at| &text[at + 1..]);
            if !text.is_empty() {
                return Ok(Some(serde_json::from_slice(text)?));
            }
        }
        Ok(None)
    }
}
