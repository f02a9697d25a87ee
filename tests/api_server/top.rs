//! `kubectl vm top` in a real terminal (a pseudo-terminal), on a real API server. A program named kubectl plays what runs in the Pods.

use std::{ffi::OsString, fs, os::unix::fs::PermissionsExt, path::Path};

use serde_json::Value;
use vm_operator::api::PowerState;

use crate::{
    commands::{command, ns, printed, up, vm},
    support::{cluster::eventually, managed_namespace::LIMIT, terminal::Screen},
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

    let (mut screen, mut child) = Screen::open(top(&[]), 10, 100);
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
    eventually("the screen as it was", LIMIT, async || (!screen.is_alternate()).then_some(())).await;
}
