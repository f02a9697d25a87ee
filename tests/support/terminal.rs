//! A pseudo-terminal with a program in it, and what is on its screen.

use std::{
    fs::File,
    io::{Read, Write},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
    thread,
    time::Duration,
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};

use super::cluster::eventually;

/// How long a program may take to show something.
const LIMIT: Duration = Duration::from_secs(120);

/// A terminal, and what is on its screen.
pub struct Screen {
    keyboard: File,
    parser: Arc<Mutex<vt100::Parser>>,
}

impl Screen {
    /// Starts the program in a new terminal of that size.
    pub fn open(mut program: Command, rows: u16, columns: u16) -> (Self, Child) {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        tcsetwinsize(&terminal, Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 }).unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        let side = || File::options().read(true).write(true).open(&name).unwrap();
        program.stdin(Stdio::from(side())).stdout(Stdio::from(side())).stderr(Stdio::from(side()));
        let child = program.spawn().unwrap();
        let size = |size: u16| size.try_into().expect("a terminal has rows and columns");
        let parser = Arc::new(Mutex::new(vt100::Parser::new(size(rows), size(columns), 0)));
        let (mut output, seen) = (File::from(terminal.try_clone().unwrap()), parser.clone());
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            // Linux reports an error when nobody has the other side any more.
            while let Ok(count @ 1..) = output.read(&mut bytes) {
                seen.lock().unwrap().process(&bytes[..count]);
            }
        });
        (Self { keyboard: File::from(terminal), parser }, child)
    }

    /// What is on the screen: lines without the spaces at their ends.
    pub fn text(&self) -> String {
        self.parser.lock().unwrap().screen().contents()
    }

    /// Waits until it is on the screen.
    pub async fn shows(&self, what: &str) {
        eventually(&format!("{what} on the screen"), LIMIT, async || self.text().contains(what).then_some(())).await;
    }

    /// Whether a program has the whole screen for itself.
    pub fn is_alternate(&self) -> bool {
        self.parser.lock().unwrap().screen().alternate_screen()
    }

    /// Types this.
    pub fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
    }
}
