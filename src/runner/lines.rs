//! JSON messages, one per line, over a Unix socket: what QMP and the guest agent's protocol have in common.

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
use tokio_util::codec::{AnyDelimiterCodec, AnyDelimiterCodecError, FramedRead};

/// The longest message that is read. The peer is QEMU or even the guest: a bug or an attack there must not cost the node
/// its memory. The longest answers that are expected have some kilobytes.
const LONGEST_LINE: usize = 1 << 20;

/// A connection.
#[derive(Debug)]
pub struct JsonLines {
    read: FramedRead<OwnedReadHalf, AnyDelimiterCodec>,
    write: OwnedWriteHalf,
}

impl JsonLines {
    /// Connects to a socket.
    ///
    /// # Errors
    /// If nobody listens there.
    pub async fn connect(socket: &Path) -> io::Result<Self> {
        let (read, write) = UnixStream::connect(socket).await?.into_split();
        let codec = AnyDelimiterCodec::new_with_max_length(b"\n".to_vec(), b"\n".to_vec(), LONGEST_LINE);
        // The codec's own default is 8 KiB; an idle connection should not cost that.
        Ok(Self { read: FramedRead::with_capacity(read, codec, 1024), write })
    }

    /// Sends a message. `prefix` goes before it (the guest agent's protocol knows a marker byte there).
    ///
    /// # Errors
    /// If the connection is broken.
    pub async fn send(&mut self, prefix: &[u8], message: &impl Serialize) -> io::Result<()> {
        let mut line = prefix.to_vec();
        serde_json::to_writer(&mut line, message)?;
        line.push(b'\n');
        self.write.write_all(&line).await
    }

    /// The next message; `None` at the end of the connection. Empty lines and a leading marker byte (0xFF) are skipped.
    /// No message is lost if the future is dropped.
    ///
    /// # Errors
    /// If the connection is broken or the peer does not send JSON.
    pub async fn receive(&mut self) -> io::Result<Option<Value>> {
        loop {
            let line = match self.read.next().await {
                None => return Ok(None),
                Some(Ok(line)) => line,
                Some(Err(AnyDelimiterCodecError::Io(error))) => return Err(error),
                Some(Err(AnyDelimiterCodecError::MaxChunkLengthExceeded)) => {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent a line beyond 1 MiB"));
                }
            };
            let text = line.trim_ascii();
            let text = text.iter().rposition(|byte| *byte == 0xff).map_or(text, |at| &text[at + 1..]);
            if !text.is_empty() {
                return Ok(Some(serde_json::from_slice(text)?));
            }
        }
    }
}
