//! The relay, with a real QEMU behind it: the screen by VNC and SPICE, and the serial console, for several people.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use futures::{SinkExt, StreamExt};
use serde_json::json;
use tokio::{net::TcpStream, time::timeout};
use tokio_tungstenite::tungstenite::{self, Message};
use vm_operator::{
    api::stats::GuestStats,
    client::relay::{Access, Error, Socket},
    relay::{Answer, Closed, Console, FIGURES, Hello, Mode, News, PICTURE, VIEWERS, Viewer, Wish},
    runner::stats::cpu_time,
};

use crate::runner::{Runner, Vm};

const PATIENCE: Duration = Duration::from_secs(60);

/// Writes what the agent's container gets from the Secret, and returns what a client gets from it.
fn secret(folder: &Path, token: &str) -> Access {
    let made = rcgen::generate_simple_self_signed(["relay".to_owned()]).unwrap();
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("tls.crt"), made.cert.pem()).unwrap();
    fs::write(folder.join("tls.key"), made.signing_key.serialize_pem()).unwrap();
    fs::write(folder.join("token"), token).unwrap();
    Access::new(made.cert.pem().as_bytes(), token.as_bytes()).unwrap()
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

/// A VM whose relay has a port that the system has chosen.
struct Relayed {
    access: Access,
    port: u16,
}

impl Relayed {
    fn of(runner: &Runner<'_>, access: Access) -> Self {
        let port = runner.logged("the relay listens port=");
        Self { access, port: port.parse().unwrap() }
    }

    async fn open(&self, path: &str) -> Result<Socket<TcpStream>, Error> {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).await.unwrap();
        timeout(PATIENCE, self.access.open(stream, path)).await.unwrap()
    }

    async fn enter(&self, console: Console, user: &str, wish: Wish) -> Socket<TcpStream> {
        let mut socket = self.open(console.path()).await.unwrap();
        say(&mut socket, &Hello { user: user.into(), session: format!("of {user}"), wish }).await;
        socket
    }
}

async fn say(socket: &mut Socket<TcpStream>, what: &impl serde::Serialize) {
    socket.send(Message::text(serde_json::to_string(what).unwrap())).await.unwrap();
}

async fn next(socket: &mut Socket<TcpStream>) -> Message {
    loop {
        match timeout(PATIENCE, socket.next()).await.expect("a message").unwrap().unwrap() {
            Message::Ping(_) | Message::Pong(_) => {}
            message => return message,
        }
    }
}

/// The next news; the screen's bytes before it do not matter.
async fn news(socket: &mut Socket<TcpStream>) -> News {
    loop {
        match next(socket).await {
            Message::Binary(_) => {}
            Message::Text(text) => return serde_json::from_str(&text).unwrap(),
            message => panic!("{message:?}"),
        }
    }
}

async fn closed(socket: &mut Socket<TcpStream>) -> (u16, String) {
    loop {
        match next(socket).await {
            Message::Close(Some(frame)) => return (frame.code.into(), frame.reason.to_string()),
            Message::Binary(_) | Message::Text(_) => {}
            message => panic!("{message:?}"),
        }
    }
}

fn because(closed: Closed, reason: &str) -> (u16, String) {
    (closed as u16, reason.to_owned())
}

/// What QEMU has sent, until it is as long as this.
async fn bytes(socket: &mut Socket<TcpStream>, number: usize) -> Vec<u8> {
    let mut all = Vec::new();
    while all.len() < number {
        match next(socket).await {
            Message::Binary(bytes) => all.extend_from_slice(&bytes),
            message => panic!("{message:?}"),
        }
    }
    all
}

/// Greets QEMU as a VNC viewer that wants the screen for itself (RFC 6143, 7.1 to 7.3). Returns the screen's name.
async fn greet(socket: &mut Socket<TcpStream>) -> String {
    assert_eq!(bytes(socket, 12).await, b"RFB 003.008\n");
    socket.send(Message::binary(b"RFB 003.008\n".to_vec())).await.unwrap();
    assert_eq!(bytes(socket, 2).await, [1, 1], "nobody is asked for a password");
    socket.send(Message::binary(vec![1])).await.unwrap();
    assert_eq!(bytes(socket, 4).await, [0; 4]);
    socket.send(Message::binary(vec![0])).await.unwrap();
    let screen = bytes(socket, 24).await;
    String::from_utf8_lossy(&screen[24..]).into_owned()
}

async fn list(socket: &mut Socket<TcpStream>) -> Vec<(String, Console, Mode)> {
    let Message::Text(text) = next(socket).await else { panic!("no list") };
    let viewers: Vec<Viewer> = serde_json::from_str(&text).unwrap();
    viewers.into_iter().map(|viewer| (viewer.user, viewer.console, viewer.mode)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn people_watch_ask_and_take_over_the_screen_and_the_status_names_them() {
    let vm = Vm::new(json!({ "display": { "spice": { "port": 0 } } }), json!({}));
    let access = secret(&vm.path("relay"), TOKEN);
    let mut runner = vm.start_relayed();
    let relay = Relayed::of(&runner, access);
    runner.console("guest: up");
    let mut viewers = relay.open(VIEWERS).await.unwrap();
    assert_eq!(list(&mut viewers).await, []);

    let mut ann = relay.enter(Console::Vnc, "ann", Wish::Control).await;
    assert_eq!(news(&mut ann).await, News::Connected { controls: true });
    let screen = greet(&mut ann).await;
    assert!(screen.contains("vm1"), "{screen:?}");
    let controls = |user: &str| (user.to_owned(), Console::Vnc, Mode::Controls);
    assert_eq!(list(&mut viewers).await, [controls("ann")]);
    runner.says_last("ConsoleConnected", "ann uses the display.");

    // One who only watches disturbs nobody, and can't type.
    let mut eve = relay.enter(Console::Vnc, "eve", Wish::Watch).await;
    assert_eq!(news(&mut eve).await, News::Connected { controls: false });
    greet(&mut eve).await;
    assert_eq!(list(&mut viewers).await, [controls("ann"), ("eve".into(), Console::Vnc, Mode::Watches)]);
    let update = || Message::binary(b"\x03\x00\x00\x00\x00\x00\x00\x01\x00\x01".to_vec());
    for viewer in [&mut ann, &mut eve] {
        viewer.send(update()).await.unwrap();
        assert_eq!(bytes(viewer, 4).await[0], 0, "an update of the screen");
    }

    // Another user gets the screen only if ann has nothing against it.
    let mut bob = relay.enter(Console::Vnc, "bob", Wish::Control).await;
    assert_eq!(closed(&mut bob).await, because(Closed::InUse, "ann"));
    for agrees in [false, true] {
        bob = relay.enter(Console::Vnc, "bob", Wish::Ask).await;
        assert!(matches!(news(&mut bob).await, News::Asking { user, .. } if user == "ann"));
        let News::Question { id, user, seconds } = news(&mut ann).await else { panic!("no question") };
        assert_eq!((user.as_str(), seconds), ("bob", 10));
        say(&mut ann, &Answer { id, agrees }).await;
        if !agrees {
            assert_eq!(closed(&mut bob).await.0, Closed::Refused as u16);
        }
    }
    assert_eq!(news(&mut bob).await, News::Connected { controls: true });
    assert_eq!(closed(&mut ann).await, because(Closed::TakenOver, "bob"));
    greet(&mut bob).await;
    runner.says_last("ConsoleConnected", "bob uses the display.");

    // Bob does not answer.
    ann = relay.enter(Console::Vnc, "ann", Wish::Ask).await;
    assert!(matches!(news(&mut ann).await, News::Asking { .. }));
    assert_eq!(news(&mut ann).await, News::Connected { controls: true });
    assert_eq!(closed(&mut bob).await, because(Closed::TakenOver, "ann"));
    bob = relay.enter(Console::Vnc, "bob", Wish::TakeOver).await;
    assert_eq!(news(&mut bob).await, News::Connected { controls: true });
    assert_eq!(closed(&mut ann).await, because(Closed::TakenOver, "bob"));
    drop(bob);
    runner.says_last("ConsoleConnected", "eve watches the display.");

    // QEMU has a short queue for those who connect.
    let all = futures::future::join_all((0..20).map(|number| {
        let name = format!("watcher {number}");
        let relay = &relay;
        async move {
            let mut socket = relay.enter(Console::Vnc, &name, Wish::Watch).await;
            assert_eq!(news(&mut socket).await, News::Connected { controls: false }, "{name}");
            socket
        }
    }));
    drop(all.await);

    // SPICE is one of the ways to the same screen.
    let mut kim = relay.enter(Console::Spice, "kim", Wish::Control).await;
    assert_eq!(news(&mut kim).await, News::Connected { controls: true });
    bob = relay.enter(Console::Vnc, "bob", Wish::Control).await;
    assert_eq!(closed(&mut bob).await, because(Closed::InUse, "kim"));
    let mut watcher = relay.enter(Console::Spice, "lea", Wish::Watch).await;
    assert_eq!(closed(&mut watcher).await.0, Closed::NoConsole as u16);
    drop(kim);

    runner.signal("TERM");
    assert_eq!(closed(&mut eve).await.0, Closed::GuestEnded as u16);
    assert_eq!(closed(&mut viewers).await.0, Closed::RelayEnds as u16);
    runner.ends_well("PoweredDown");
}

#[tokio::test(flavor = "multi_thread")]
async fn several_people_type_into_the_serial_console_and_only_with_the_token() {
    let vm = Vm::new(json!({}), json!({ "answer-on-console": true }));
    let access = secret(&vm.path("relay"), TOKEN);
    let mut runner = vm.start_relayed();
    let relay = Relayed::of(&runner, access);
    runner.console("guest: up");
    let mut two = [
        relay.enter(Console::Serial, "ann", Wish::Control).await,
        relay.enter(Console::Serial, "bob", Wish::Control).await,
    ];
    for socket in &mut two {
        assert_eq!(news(socket).await, News::Connected { controls: true });
        let mut shown = String::new();
        while !shown.contains("guest: up") {
            shown += &String::from_utf8_lossy(&bytes(socket, 1).await);
        }
    }
    let mut watcher = relay.enter(Console::Serial, "eve", Wish::Watch).await;
    assert_eq!(news(&mut watcher).await, News::Connected { controls: false });
    watcher.send(Message::binary(b"by nobody\n".to_vec())).await.unwrap();
    two[0].send(Message::binary(b"by ann\n".to_vec())).await.unwrap();
    for socket in two.iter_mut().chain([&mut watcher]) {
        let mut shown = String::new();
        while !shown.contains("guest: typed by ann") {
            shown += &String::from_utf8_lossy(&bytes(socket, 1).await);
        }
        assert!(!shown.contains("by nobody"), "{shown}");
    }
    // This VM has no display.
    let mut none = relay.enter(Console::Vnc, "ann", Wish::Control).await;
    assert_eq!(closed(&mut none).await.0, Closed::NoConsole as u16);
    runner.says_last("ConsoleConnected", "No viewer");

    // Strangers who say nothing do not keep out those who have the token.
    let mut strangers = Vec::new();
    for _ in 0..200 {
        strangers.push(TcpStream::connect(("127.0.0.1", relay.port)).await.unwrap());
    }
    let mut late = relay.enter(Console::Serial, "late", Wish::Watch).await;
    assert_eq!(news(&mut late).await, News::Connected { controls: false });
    drop(strangers);

    // Who has no token, or another one, or is another relay.
    let certificate = fs::read(vm.path("relay/tls.crt")).unwrap();
    let stranger = Relayed { access: Access::new(&certificate, b"of somebody else").unwrap(), port: relay.port };
    assert!(matches!(stranger.open("/serial").await, Err(Error::Token)));
    assert!(matches!(relay.open("/etc/passwd").await, Err(Error::WebSocket(error)) if is_not_found(&error)));
    let other = Relayed { access: secret(&vm.path("other"), TOKEN), port: relay.port };
    assert!(matches!(other.open("/serial").await, Err(Error::Tls(_))));
    // Those who say nothing, or nonsense, are let go.
    let mut rude = relay.open("/serial").await.unwrap();
    say(&mut rude, &json!({ "user": "", "session": "s", "wish": "control" })).await;
    assert_eq!(closed(&mut rude).await.0, Closed::BadRequest as u16);

    // A new Secret counts from the next connection on, and those that are there stay.
    let changed = Relayed { access: secret(&vm.path("relay"), "another token, as long as one"), port: relay.port };
    assert!(matches!(relay.open("/serial").await, Err(Error::Tls(_))));
    let mut new = changed.enter(Console::Serial, "ann", Wish::Control).await;
    assert_eq!(news(&mut new).await, News::Connected { controls: true });
    new.send(Message::binary(b"by new\n".to_vec())).await.unwrap();
    let mut shown = String::new();
    while !shown.contains("guest: typed by new") {
        shown += &String::from_utf8_lossy(&bytes(&mut two[1], 1).await);
    }
    runner.signal("TERM");
    runner.ends_well("PoweredDown");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_looks_at_the_guest_without_being_a_viewer() {
    let vm = Vm::new(json!({ "display": { "spice": { "port": 0 } } }), json!({}));
    let access = secret(&vm.path("relay"), TOKEN);
    let mut runner = vm.start_relayed();
    let relay = Relayed::of(&runner, access);
    runner.console("guest: up");
    let mut viewers = relay.open(VIEWERS).await.unwrap();
    assert_eq!(list(&mut viewers).await, []);

    let mut figures = relay.open(FIGURES).await.unwrap();
    let mut samples = Vec::new();
    for _ in 0..2 {
        let Message::Text(text) = next(&mut figures).await else { panic!("no figures") };
        samples.push(serde_json::from_str::<GuestStats>(&text).unwrap());
    }
    let [first, second] = samples.as_slice() else { unreachable!() };
    assert!(second.since(first).is_some_and(|rates| rates.cpus >= 0.0), "{samples:?}");
    assert!(first.cpu_time > 0 && first.cpus > 0 && first.disk_read > 0, "{first:?}");

    for _ in 0..2 {
        let mut socket = relay.open(PICTURE).await.unwrap();
        let mut picture = Vec::new();
        let end = loop {
            match next(&mut socket).await {
                Message::Binary(piece) => picture.extend_from_slice(&piece),
                end => break end,
            }
        };
        assert_eq!(end, Message::Close(None));
        assert!(picture.starts_with(b"\x89PNG\r\n\x1a\n") && picture.ends_with(b"IEND\xaeB`\x82"), "a whole picture");
    }
    let left = fs::read_dir(vm.path("run")).unwrap().filter_map(|file| file.unwrap().file_name().into_string().ok());
    assert!(!left.into_iter().any(|name| name.starts_with("picture")), "nothing is left of them");
    assert_eq!(list_now(&relay).await, [], "nobody was a viewer");

    runner.signal("TERM");
    runner.ends_well("PoweredDown");
    assert!(matches!(figures_end(&mut figures).await, Message::Close(Some(_))));
}

async fn list_now(relay: &Relayed) -> Vec<(String, Console, Mode)> {
    list(&mut relay.open(VIEWERS).await.unwrap()).await
}

async fn figures_end(figures: &mut Socket<TcpStream>) -> Message {
    loop {
        match next(figures).await {
            Message::Text(_) => {}
            end => return end,
        }
    }
}

fn is_not_found(error: &tungstenite::Error) -> bool {
    matches!(error, tungstenite::Error::Http(response) if response.status() == 404)
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "it measures; docs/performance.md has the figures"]
async fn twenty_people_at_a_screen_that_changes_thirty_times_a_second() {
    const SECONDS: u64 = 20;
    let vm = Vm::new(json!({ "display": { "spice": { "port": 0 } } }), json!({}));
    let access = secret(&vm.path("relay"), TOKEN);
    let runner = vm.start_relayed();
    let relay = Relayed::of(&runner, access);
    runner.console("guest: up");
    let (bytes, updates) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let mut people = Vec::new();
    for number in 0..20 {
        let wish = if number == 0 { Wish::Control } else { Wish::Watch };
        let mut socket = relay.enter(Console::Vnc, &format!("viewer {number}"), wish).await;
        news(&mut socket).await;
        greet(&mut socket).await;
        let (bytes, updates) = (bytes.clone(), updates.clone());
        people.push(tokio::spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(33));
            loop {
                tokio::select! {
                    _ = ticks.tick() => {
                        // 160 by 120 points of four bytes, as they are: 77 kB, as much as an update of a film.
                        let part = b"\x03\x00\x00\x00\x00\x00\x00\xa0\x00\x78".to_vec();
                        socket.send(Message::binary(part)).await.unwrap();
                    }
                    message = socket.next() => {
                        if let Message::Binary(piece) = message.unwrap().unwrap() {
                            bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
                            updates.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            }
        }));
    }
    let now = || {
        (cpu_time(runner.child.id().into()).unwrap(), bytes.load(Ordering::Relaxed), updates.load(Ordering::Relaxed))
    };
    tokio::time::sleep(Duration::from_secs(2)).await;
    let before = now();
    tokio::time::sleep(Duration::from_secs(SECONDS)).await;
    let after = now();
    let each = |before: u64, after: u64| (after - before) as f64 / SECONDS as f64;
    println!(
        "the runner: {:.2} of a core; {:.1} MB/s and {:.0} messages/s to 20 people",
        each(before.0, after.0) / 1000.0,
        each(before.1, after.1) / 1e6,
        each(before.2, after.2)
    );
    people.iter().for_each(tokio::task::JoinHandle::abort);
}
