//! `kubectl vm top` in a real terminal (a pseudo-terminal), on a real API server. A program named kubectl plays what runs in the Pods.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::{Read, Write},
    num::NonZero,
    os::unix::fs::PermissionsExt,
    path::Path,
    process::{Child, Stdio},
    sync::{Arc, Mutex},
    thread,
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use serde_json::Value;
use vm_operator::api::PowerState;

use crate::{
    commands::{command, ns, printed, up, vm},
    support::{cluster::eventually, managed_namespace::LIMIT},
};

/// Prints the figures of a guest that keeps one and a half CPUs busy, for the Pod apple; of another Pod nobody may know.
const KUBECTL: &str = r#"#!/bin/sh
if [ "$2" != apple ]; then
    echo 'Error from server (Forbidden): pods "pear" is forbidden' >&2
    exit 1
fi
at=1000
while sleep 1; do
    at=$((at + 1000))
    echo "{\"at\":$at,\"cpus\":2,\"cpuTime\":$((at * 3 / 2)),\"ram\":2147483648,\"ramUsed\":432013312,\"diskRead\":$((at * 3)),\"diskWritten\":0,\"networkReceived\":$((at * 2048)),\"networkSent\":$at}"
done
"#;

/// The `PATH` with that kubectl.
fn with_kubectl(folder: &Path) -> OsString {
    let file = folder.join("kubectl");
    fs::write(&file, KUBECTL).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::join_paths([folder.to_owned()].into_iter().chain(std::env::split_paths(&path))).unwrap()
}

/// The size of the terminal.
const ROWS: NonZero<u16> = NonZero::new(10).unwrap();
const COLUMNS: NonZero<u16> = NonZero::new(100).unwrap();

/// A terminal, and what is on its screen.
struct Screen {
    keyboard: File,
    parser: Arc<Mutex<vt100::Parser>>,
}

impl Screen {
    fn open(mut program: std::process::Command) -> (Self, Child) {
        let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&terminal).unwrap();
        unlockpt(&terminal).unwrap();
        tcsetwinsize(&terminal, Winsize { ws_row: ROWS.get(), ws_col: COLUMNS.get(), ws_xpixel: 0, ws_ypixel: 0 })
            .unwrap();
        let name = ptsname(&terminal, Vec::new()).unwrap().into_string().unwrap();
        let side = || File::options().read(true).write(true).open(&name).unwrap();
        program.stdin(Stdio::from(side())).stdout(Stdio::from(side())).stderr(Stdio::from(side()));
        let child = program.spawn().unwrap();
        let parser = Arc::new(Mutex::new(vt100::Parser::new(ROWS, COLUMNS, 0)));
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

    fn text(&self) -> String {
        self.parser.lock().unwrap().screen().contents()
    }

    async fn shows(&self, what: &str) {
        eventually(&format!("{what} on the screen"), LIMIT, async || self.text().contains(what).then_some(())).await;
    }

    fn press(&mut self, key: &str) {
        self.keyboard.write_all(key.as_bytes()).unwrap();
    }
}

#[tokio::test]
async fn top_shows_what_guests_use_and_keys_stop_them() {
    let ns = ns("top").await;
    for name in ["apple", "pear"] {
        up(&ns, name, |_| ()).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = with_kubectl(folder.path());
    let top = |arguments: &[&str]| {
        let mut top = command(&ns, &[&["top", "--interval", "1"], arguments].concat());
        top.env("PATH", &path);
        top
    };

    // Where there is no terminal, once.
    let once = printed(top(&[]).output().unwrap());
    assert_eq!(once.code, 5, "{once:?}");
    assert_eq!(once.talk, "vm/pear: Error from server (Forbidden): pods \"pear\" is forbidden\n");
    let lines: Vec<Vec<&str>> = once.data.lines().map(|line| line.split_whitespace().collect()).collect();
    let head = ["NAME", "PHASE", "CPU", "CPUS", "USED", "RAM", "READ/s", "WRITTEN/s", "IN/s", "OUT/s"];
    let apple = ["apple", "Running", "150%", "2", "412Mi", "2Gi", "2.9Ki", "0", "2Mi", "1Ki"];
    assert_eq!(lines, [&head[..], &apple[..], &["pear", "Running"]]);
    let json = printed(top(&["apple", "-o", "json"]).output().unwrap());
    let data: Value = serde_json::from_str(&json.data).unwrap();
    assert_eq!((json.code, &data["items"][0]["rates"]["cpus"]), (0, &serde_json::json!(1.5)), "{data}");
    let missing = printed(top(&["plum"]).output().unwrap());
    assert_eq!((missing.code, missing.data.as_str()), (1, ""), "{missing:?}");

    let (mut screen, mut child) = Screen::open(top(&[]));
    screen.shows("150%").await;
    screen.shows("2 VMs, 2 running, by cpu").await;
    screen.press("j");
    screen.shows("pods \"pear\" is forbidden").await;
    screen.press("k");
    screen.press("x");
    screen.shows("stop vm/apple? y: yes").await;
    screen.press("n");
    screen.press("x");
    screen.press("y");
    screen.shows("vm/apple stopped").await;
    assert_eq!(vm(&ns, "apple").await.spec.vm.state, PowerState::Stopped);
    screen.press("s");
    screen.shows("vm/apple started").await;
    screen.press("A");
    screen.shows("by name").await;
    println!("{}", screen.text());
    screen.press("q");
    let status = eventually("the end", LIMIT, async || child.try_wait().unwrap()).await;
    assert!(status.success(), "{status}");
    eventually("the screen as it was", LIMIT, async || {
        (!screen.parser.lock().unwrap().screen().alternate_screen()).then_some(())
    })
    .await;
}
