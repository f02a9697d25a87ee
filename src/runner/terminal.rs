//! The user's terminal as the guest's serial console: every key goes to the guest, but for Ctrl-]. Instead of a terminal there may be a pipe.

use std::{
    fs::File,
    io::{self, IsTerminal},
    os::unix::fs::OpenOptionsExt,
};

use rustix::{
    fs::OFlags,
    termios::{OptionalActions, Termios, tcgetattr, tcsetattr},
};
use tokio::{io::AsyncReadExt, net::unix::pipe::Receiver};

/// Ctrl-], as a terminal sends it.
pub const LEAVE: u8 = 0x1d;

/// The terminal in raw mode. It is as before when this is dropped.
#[derive(Debug)]
pub struct Terminal {
    device: File,
    /// The same open file. tokio's type for pipes only waits and reads, which a terminal does in the same way.
    input: Receiver,
    /// How the terminal was set. `None`: it is a pipe.
    before: Option<Termios>,
}

impl Terminal {
    /// Takes the terminal, if standard input and output are one.
    ///
    /// # Errors
    /// If it can't be opened or set.
    pub fn take() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
            return Ok(None);
        }
        let mut terminal = Self::pipe()?;
        let device = &terminal.device;
        let before = tcgetattr(device)?;
        let mut raw = before.clone();
        raw.make_raw();
        // The messages of this program end with a plain newline.
        raw.output_modes = before.output_modes;
        tcsetattr(device, OptionalActions::Now, &raw)?;
        terminal.before = Some(before);
        Ok(Some(terminal))
    }

    /// Whether it is a terminal, and no pipe.
    pub fn is_raw(&self) -> bool {
        self.before.is_some()
    }

    /// Takes the standard input as it is.
    ///
    /// # Errors
    /// If nobody can wait for it: it is a file, or there is none.
    pub fn pipe() -> io::Result<Self> {
        // Opened anew, because other processes share the open file of the standard input, and would get its flag.
        let flags = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let device = File::options().read(true).custom_flags(flags).open("/proc/self/fd/0")?;
        let input = Receiver::from_file_unchecked(device.try_clone()?)?;
        Ok(Self { device, input, before: None })
    }

    /// The next bytes that the user has typed. Empty: the terminal has gone.
    ///
    /// # Errors
    /// If it can't be read.
    pub async fn typed(&mut self) -> io::Result<Vec<u8>> {
        let mut buffer = [0; 256];
        let count = self.input.read(&mut buffer).await?;
        Ok(buffer[..count].to_vec())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            // There is nobody left who could do something about an error.
            let _ = tcsetattr(&self.device, OptionalActions::Now, before);
        }
    }
}
