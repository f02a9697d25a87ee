//! Standard output and standard error, whose reader may stall: a node whose disk is full, or a container runtime that hangs. A program that
//! waited for such a reader would not hear SIGTERM.

use std::{
    io::{self, Write},
    sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    thread,
    time::Duration,
};

/// The pieces that wait for the reader. More are lost.
const MOST: usize = 1024;

/// What is written in a thread of its own. What the reader does not take in time is lost. Clones write to the same stream.
#[derive(Clone, Debug)]
pub struct Output(SyncSender<Piece>);

#[derive(Debug)]
enum Piece {
    Bytes(Vec<u8>),
    /// To be answered when all before is written.
    End(SyncSender<()>),
}

impl Output {
    /// Writes to the stream in a thread of its own. The thread does not hold up the end of the program.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn to(stream: impl Write + Send + 'static) -> io::Result<Self> {
        let (sender, pieces) = sync_channel(MOST);
        thread::Builder::new().name("output".into()).stack_size(64 << 10).spawn(move || copy(stream, &pieces))?;
        Ok(Self(sender))
    }

    /// Hands over bytes. Returns whether they will be written.
    pub fn send(&self, bytes: &[u8]) -> bool {
        self.0.try_send(Piece::Bytes(bytes.to_vec())).is_ok()
    }

    /// Waits until everything is written, but not longer than `limit`. Returns whether it is.
    pub fn finish(&self, limit: Duration) -> bool {
        let (sender, written) = sync_channel(1);
        self.0.try_send(Piece::End(sender)).is_ok()
            && !matches!(written.recv_timeout(limit), Err(RecvTimeoutError::Timeout))
    }
}

fn copy(mut stream: impl Write, pieces: &Receiver<Piece>) {
    for piece in pieces {
        match piece {
            // A closed stream is no reason to stop: nobody reads it any more.
            Piece::Bytes(bytes) => drop(stream.write_all(&bytes).and_then(|()| stream.flush())),
            Piece::End(written) => drop(written.send(())),
        }
    }
}

impl Write for Output {
    /// Never fails: what is lost is nobody's error.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.send(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read, os::unix::net::UnixStream};

    use super::*;

    #[test]
    fn what_is_written_arrives_and_a_reader_that_stalls_holds_up_nobody() {
        let (mut reader, writer) = UnixStream::pair().unwrap();
        let output = Output::to(writer).unwrap();
        assert!(output.send(b"one ") && output.send(b"two"));
        assert!(output.finish(Duration::from_secs(60)));
        let mut text = [0; 7];
        reader.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"one two");
        // Nobody reads any more.
        let piece = vec![b'x'; 64 << 10];
        assert!((0..=MOST + 100).any(|_| !output.send(&piece)), "the rest is lost");
        assert!(!output.finish(Duration::from_millis(1)));
        drop(reader);
    }
}
