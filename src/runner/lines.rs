//! Lines over a Unix socket, plain or with a JSON message each: what QMP and the protocols of the guest's agents have in common.

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

/// The longest JSON message that is read. The peer is QEMU or even the guest: a bug or an attack there must not cost the node
/// its memory. The longest answers that are expected have some kilobytes.
const LONGEST_LINE: usize = 1 << 20;

/// A connection that carries lines.
#[derive(Debug)]
pub struct Lines {
    read: FramedRead<OwnedReadHalf, AnyDelimiterCodec>,
    write: OwnedWriteHalf,
}

impl Lines {
    /// Connects to a socket. No line may have more than `longest` bytes.
    ///
    /// # Errors
    /// If nobody listens there.
    pub async fn connect(socket: &Path, longest: usize) -> io::Result<Self> {
        let (read, write) = UnixStream::connect(socket).await?.into_split();
        let codec = AnyDelimiterCodec::new_with_max_length(b"\n".to_vec(), b"\n".to_vec(), longest);
        // The codec's own default is 8 KiB; an idle connection should not cost that.
        Ok(Self { read: FramedRead::with_capacity(read, codec, 1024), write })
    }

    /// Sends what ends with the end of a line.
    ///
    /// # Errors
    /// If the connection is broken.
    pub async fn send(&mut self, line: &[u8]) -> io::Result<()> {
        self.write.write_all(line).await
    }

    /// The next line; `None` at the end of the connection. No line is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken, or the line is longer than any that is expected.
    pub async fn receive(&mut self) -> io::Result<Option<Bytes>> {
        match self.read.next().await {
            None => Ok(None),
            Some(Ok(line)) => Ok(Some(line)),
            Some(Err(AnyDelimiterCodecError::Io(error))) => Err(error),
            Some(Err(AnyDelimiterCodecError::MaxChunkLengthExceeded)) => {
                Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent a line that is too long"))
            }
        }
    }
}

/// A connection that carries JSON messages, one per line.
#[derive(Debug)]
pub struct JsonLines(Lines);

impl JsonLines {
    /// Connects to a socket.
    ///
    /// # Errors
    /// If nobody listens there.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        Lines::connect(socket, LONGEST_LINE).await.map(Self)
    }

    /// Sends a message. `prefix` goes before it (the guest agent's protocol knows a marker byte there).
    ///
    /// # Errors
    /// If the connection is broken.
    pub async fn send(&mut self, prefix: &[u8], message: &impl Serialize) -> io::Result<()> {
        let mut line = prefix.to_vec();
        serde_json::to_writer(&mut line, message)?;
        line.push(b'\n');
        self.0.send(&line).await
    }

    /// The next message; `None` at the end of the connection. Empty lines and a leading marker byte (0xFF) are skipped.
    /// No message is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken or the peer does not send JSON.
    pub async fn receive(&mut self) -> io::Result<Option<Value>> {
        while let Some(line) = self.0.receive().await? {
            let text = line.trim_ascii();
            let text = text.iter().rposition(|byte| *byte == 0xff).map_or(text, |at| &text[at + 1..]);
            if !text.is_empty() {
                return Ok(Some(serde_json::from_slice(text)?));
            }
        }
        Ok(None)
    }
}
