//! Many people with live pages of many VMs: what that takes. It is measured by hand; docs/performance.md has the figures.

use std::{fs, time::Instant};

use futures::{StreamExt, future::join_all, stream};
use kube::api::PostParams;
use serde_json::json;
use tokio::{io::AsyncBufReadExt, sync::mpsc};
use vm_operator::api::VirtualMachine;

use super::{Stream, Web, configuration, until};
use crate::support::{cluster::eventually, managed_namespace::LIMIT};

const VMS: usize = 1000;
const SESSIONS: usize = 200;

/// Says when a change of that address arrives on a stream, for ever.
async fn follow(mut stream: Stream, arrivals: mpsc::UnboundedSender<(String, Instant)>) {
    let mut line = String::new();
    while stream.read_line(&mut line).await.is_ok_and(|count| count > 0) {
        if let Some(at) = line.find("10.77.") {
            let address = line[at..].split(|letter: char| letter != '.' && !letter.is_ascii_digit()).next().unwrap();
            if arrivals.send((address.to_owned(), Instant::now())).is_err() {
                return;
            }
        }
        line.clear();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "it measures"]
async fn two_hundred_live_pages_of_a_thousand_vms() {
    let users: Vec<String> = (0..SESSIONS).map(|number| format!("user{number}")).chain(["admin".to_owned()]).collect();
    let users: Vec<&str> = users.iter().map(String::as_str).collect();
    let roles = configuration(&users).replace("\"*\":[\"all\"]", "\"*\":[\"admins\"]");
    let web = Web::new("web-load", &roles).await;
    let create = async |number: usize| {
        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": format!("vm-{number:04}") },
            "spec": { "vm": { "state": "Running", "maximumCpus": 2, "maximumRam": "1Gi" } },
        });
        let vm: VirtualMachine = serde_json::from_value(vm).unwrap();
        web.vms().create(&PostParams::default(), &vm).await.unwrap();
        web.set_status(&vm.metadata.name.unwrap(), json!({ "phase": "Running", "nodeName": "n1" })).await;
    };
    stream::iter(0..VMS).for_each_concurrent(16, create).await;
    let memory = || {
        let status = fs::read_to_string(format!("/proc/{}/status", web.first.id())).unwrap();
        let kib: u64 = status
            .lines()
            .find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok())
            .unwrap();
        kib >> 10
    };
    let before = memory();
    let (sender, mut arrivals) = mpsc::unbounded_channel();
    for user in users.iter().take(SESSIONS) {
        // There is a limit of attempts for an address.
        let browser = eventually("a session", LIMIT, async || {
            let answer = web.nobody().sign_in(user, "secret").await;
            let cookie = answer.header("set-cookie")?.split(';').next()?.to_owned();
            Some(super::Browser { cookie: Some(cookie), ..web.nobody() })
        })
        .await;
        let page = browser.get("/vms").await.body;
        let since = page.split("/live/list?since=").nth(1).unwrap().split('"').next().unwrap();
        let (_, mut stream) = browser.open("GET", &format!("/live/list?since={since}"), &[], "").await;
        until(&mut stream, "vms", "vm-0999").await;
        tokio::spawn(follow(stream, sender.clone()));
    }
    let open = memory();
    let (mut times, mut most) = (Vec::new(), 0);
    for round in 0..20 {
        let address = format!("10.77.{round}.1");
        let start = Instant::now();
        web.set_status("vm-0500", json!({ "addresses": [{ "type": "PodIP", "address": address }] })).await;
        let mut seen = 0;
        while seen < SESSIONS {
            let (arrived, at) = arrivals.recv().await.unwrap();
            if arrived == address {
                seen += 1;
                times.push(at.duration_since(start).as_millis());
            }
        }
        most = most.max(memory());
    }
    // All VMs at once.
    let start = Instant::now();
    let change = async |number: usize| {
        let address = format!("10.77.100.{number}");
        web.set_status(&format!("vm-{number:04}"), json!({ "addresses": [{ "type": "PodIP", "address": address }] }))
            .await;
    };
    let changed = async {
        join_all((0..10).map(async |part| {
            for number in 0..VMS / 10 {
                change(part * VMS / 10 + number).await;
            }
        }))
        .await;
        start.elapsed()
    };
    let arrive = async {
        let mut seen = 0;
        while seen < SESSIONS * VMS {
            let (arrived, _) = arrivals.recv().await.unwrap();
            seen += usize::from(arrived.starts_with("10.77.100."));
            most = most.max(if seen % 1000 == 0 { memory() } else { 0 });
        }
        start.elapsed()
    };
    let (written, all) = tokio::join!(changed, arrive);
    times.sort_unstable();
    println!("memory: {before} MiB without pages, {open} MiB with {SESSIONS}, at most {most} MiB");
    println!("one change on all pages: median {} ms, last {} ms", times[times.len() / 2], times[times.len() - 1]);
    println!("{VMS} changes written within {} ms, on all pages within {} ms", written.as_millis(), all.as_millis());
}
