//! What a client of the relay sees of a guest without being a viewer: who the viewers are, the guest's figures, and a picture of its screen. The
//! machine role has the last two ([`control`](super::super::control)), and is read as foreign.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use tokio::time::{Instant, sleep_until};
use tokio_tungstenite::tungstenite::{self, Message};

use super::{Alive, PIECE, Room, Socket, close, finish, send, tell};
use crate::{
    relay::{Closed, FIGURES_EVERY, LONGEST_PICTURE},
    runner::{
        control,
        ctl::{Reply, Task},
        files::read_untrusted,
        runtime_dir::RuntimeDir,
    },
};

/// Sends the list of viewers whenever it changes, until the client goes.
pub(super) async fn list(socket: &mut Socket, room: &Room) -> Result<(), tungstenite::Error> {
    let mut state = room.state.subscribe();
    let mut alive = Alive::new();
    loop {
        let list = room.list();
        state.mark_unchanged();
        tell(socket, &list).await?;
        loop {
            tokio::select! {
                Ok(()) = state.changed() => break,
                received = alive.next(socket) => if received?.is_none() { return Ok(()) },
            }
        }
    }
}

/// Sends figures until the client goes or there are none. QEMU asks the guest for its memory only while somebody looks.
pub(super) async fn figures(socket: &mut Socket, runtime: &RuntimeDir) -> Result<(), tungstenite::Error> {
    let shown = show_figures(socket, runtime).await;
    // Another client who looks lets QEMU ask again.
    let _ = control::carry_out(runtime, Task::EndOfStats).await;
    shown
}

async fn show_figures(socket: &mut Socket, runtime: &RuntimeDir) -> Result<(), tungstenite::Error> {
    let mut alive = Alive::new();
    let mut next = Instant::now();
    loop {
        match control::carry_out(runtime, Task::Stats { follow: None }).await {
            Ok(Reply::Stats(stats)) => tell(socket, &stats).await?,
            Ok(Reply::Refused(refusal)) => return close(socket, Closed::NoConsole, &refusal).await,
            Ok(_) => return close(socket, Closed::NoConsole, "the machine role has no figures").await,
            Err(error) => return close(socket, Closed::NoConsole, &format!("no guest runs: {error}")).await,
        }
        next += FIGURES_EVERY;
        loop {
            tokio::select! {
                () = sleep_until(next) => break,
                received = alive.next(socket) => if received?.is_none() { return Ok(()) },
            }
        }
    }
}

/// Sends a picture of the screen, and ends the connection.
pub(super) async fn picture(socket: &mut Socket, runtime: &RuntimeDir) -> Result<(), tungstenite::Error> {
    match take_picture(runtime).await {
        Ok(picture) => {
            for piece in picture.chunks(PIECE) {
                send(socket, Message::binary(piece.to_vec())).await?;
            }
            finish(socket, None).await
        }
        Err(error) => close(socket, Closed::NoConsole, &format!("there is no picture: {error}")).await,
    }
}

async fn take_picture(runtime: &RuntimeDir) -> io::Result<Vec<u8>> {
    match control::carry_out(runtime, Task::Screenshot { file: PathBuf::new() }).await? {
        Reply::Picture(file) => {
            let file = own(runtime, &file).ok_or_else(|| io::Error::other("it is another file"))?;
            let content = read_untrusted(&file, LONGEST_PICTURE);
            let _ = fs::remove_file(&file);
            content.and_then(|content| {
                let is_png = content.starts_with(b"\x89PNG\r\n\x1a\n");
                is_png.then_some(content).ok_or_else(|| io::Error::other("it is no PNG"))
            })
        }
        Reply::Refused(refusal) => Err(io::Error::other(refusal)),
        _ => Err(io::Error::other("the machine role has none")),
    }
}

/// The file of a picture in the runtime directory. The machine role says which one; `None`: it is none of a picture.
fn own(runtime: &RuntimeDir, named: &Path) -> Option<PathBuf> {
    let number = named.file_name()?.to_str()?.strip_prefix("picture-")?.strip_suffix(".png")?;
    number.parse().ok().map(|number| runtime.picture(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_pictures_of_the_runtime_directory_are_read() {
        let directory = tempfile::tempdir().unwrap();
        let runtime = RuntimeDir::open(directory.path()).unwrap();
        assert_eq!(own(&runtime, Path::new("/elsewhere/picture-3.png")), Some(runtime.picture(3)));
        for foreign in ["/etc/shadow", "picture-.png", "picture-../x.png", "token", "", "picture-1.png/.."] {
            assert_eq!(own(&runtime, Path::new(foreign)), None, "{foreign}");
        }
    }
}
