//! Many who are connected, behind a proxy or not, and connections at rest.

use std::time::{Duration, Instant};

use futures::{FutureExt, StreamExt};
use serde_json::{Value, json};
use tokio::{io::AsyncReadExt, net::TcpStream, time::timeout};
use tokio_tungstenite::tungstenite::Message;

use super::{Browser, LIMIT, Relay, TOKEN, Web, configuration, next, until};
use crate::support::cluster::eventually;

/// A configuration with these keys of the server.
fn with_server(users: &[&str], server: Value) -> String {
    let mut file: Value = serde_json::from_str(&configuration(users)).unwrap();
    file["/Manager"]["/GuiSocketServer"] = server;
    file.to_string()
}

impl Browser {
    /// Sends a form as a proxy does that was asked by that address.
    async fn sign_in_from(&self, from: &str, user: &str, password: &str) -> super::Answer {
        let origin = format!("http://{}", self.address);
        let headers = [("origin", origin.as_str()), ("x-forwarded-for", from)];
        self.send("POST", "/sign-in", &headers, &format!("user={user}&password={password}")).await
    }
}

#[tokio::test]
async fn who_signs_in_behind_a_proxy_is_held_up_by_nobody_else_there() {
    let users = ["admin", "ann", "bob"];
    let web = Web::new("web-proxy", &with_server(&users, json!({ "trustedProxies": ["127.0.0.0/8"] }))).await;
    let proxy = web.nobody();
    // So many that an address has had enough.
    let (mut number, long) = (0, "x".repeat(1100));
    while proxy.sign_in_from("203.0.113.7", &format!("guess-{number}"), &long).await.status == 401 {
        number += 1;
        assert!(number < 1000, "nothing stops who guesses");
    }
    assert!(number >= 120, "{number}");
    for more in 0..50 {
        proxy.sign_in_from("203.0.113.7", &format!("more-{more}"), &long).await;
    }
    for from in ["203.0.113.8", "198.51.100.1, 203.0.113.8", "203.0.113.7, 2001:db8::1", "203.0.113.7, 203.0.113.8"] {
        assert_eq!(proxy.sign_in_from(from, "nobody", "wrong").await.status, 401, "{from}");
    }
    // What the client says itself does not count: the last address is the one that the proxy has seen.
    for from in ["203.0.113.7", "192.0.2.99, 203.0.113.7", "127.0.0.1, 203.0.113.7", "203.0.113.7, 127.0.0.2"] {
        assert_eq!(proxy.sign_in_from(from, "nobody", "wrong").await.status, 429, "{from}");
    }
    // The right password helps, also there.
    let begin = Instant::now();
    assert_eq!(proxy.sign_in_from("203.0.113.7", "ann", "secret").await.status, 303);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    let log = web.first.log();
    assert!(log.contains("\"from\":\"203.0.113.7\"") && !log.contains("\"from\":\"127.0.0.1\""), "{log}");
    // A browser is told to use HTTPS alone if it does.
    let page = async |headers: &[(&str, &str)]| {
        let answer = proxy.send("GET", "/sign-in", headers, "").await;
        answer.header("strict-transport-security").map(str::to_owned)
    };
    assert!(page(&[("x-forwarded-for", "203.0.113.7"), ("x-forwarded-proto", "https")]).await.is_some());
    assert_eq!(page(&[("x-forwarded-for", "203.0.113.7"), ("x-forwarded-proto", "http")]).await, None);
    assert_eq!(page(&[]).await, None);
}

#[tokio::test]
async fn what_is_said_by_who_is_no_proxy_is_not_believed() {
    let web = Web::with("web-no-proxy", &configuration(&["admin", "ann"]), &["--trusted-proxy=10.0.0.0/8"]).await;
    let nobody = web.nobody();
    for number in 0..200 {
        nobody.sign_in_from(&format!("203.0.113.{number}"), &format!("guess-{number}"), &"x".repeat(1100)).await;
    }
    assert_eq!(nobody.sign_in_from("198.51.100.9", "nobody", "wrong").await.status, 429);
    assert!(!web.first.log().contains("203.0.113."));
    let answer = nobody.send("GET", "/sign-in", &[("x-forwarded-proto", "https")], "").await;
    assert_eq!(answer.header("strict-transport-security"), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_password_is_right_while_strangers_try_that_name() {
    let web = Web::new("web-flood", &with_server(&["admin", "ann"], json!({ "trustedProxies": ["127.0.0.1"] }))).await;
    let proxy = web.nobody();
    // Ann was here before.
    let answer = proxy.sign_in_from("192.0.2.1", "ann", "secret").await;
    let cookies = answer.headers.iter().filter(|(name, _)| name == "set-cookie");
    let device =
        cookies.map(|(_, value)| value.split(';').next().unwrap()).find(|it| it.starts_with("__Host-devices="));
    let known = Browser { cookie: Some(device.unwrap().to_owned()), ..proxy.clone() };
    assert_eq!(known.get("/home").await.status, 303, "it is no session");
    let flood: Vec<_> = (0..60)
        .map(|number| {
            let proxy = proxy.clone();
            tokio::spawn(async move {
                let mut refused = 0;
                loop {
                    let from = format!("203.0.113.{}", number % 30);
                    refused += usize::from(proxy.sign_in_from(&from, "ann", "wrong").await.status == 429);
                    if refused % 10 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            })
        })
        .collect();
    eventually("the flood", LIMIT, async || {
        (web.first.log().matches("too many attempts to sign in").count() > 20).then_some(())
    })
    .await;
    let begin = Instant::now();
    assert_eq!(known.sign_in_from("203.0.113.1", "ann", "secret").await.status, 303, "at a device that is known");
    assert!(begin.elapsed() < Duration::from_secs(2), "{:?}", begin.elapsed());
    let begin = Instant::now();
    assert_eq!(proxy.sign_in_from("198.51.100.1", "ann", "secret").await.status, 303, "at a new one, elsewhere");
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    assert_eq!(proxy.sign_in_from("198.51.100.1", "admin", "secret").await.status, 303);
    for task in flood {
        task.abort();
    }
}

#[tokio::test]
async fn who_sends_nothing_keeps_out_nobody() {
    let web = Web::new("web-silent", &with_server(&["admin", "ann"], json!({ "maxConnections": 40 }))).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["*"] }])).await;
    let ann = web.sign_in("ann").await;
    let (_, mut stream) = ann.open("GET", "/live/home", &[], "").await;
    until(&mut stream, "vms", "apple").await;
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(TcpStream::connect(web.address).await.unwrap());
    }
    let begin = Instant::now();
    assert_eq!(web.nobody().get("/sign-in").await.status, 200);
    assert_eq!(ann.get("/home").await.status, 200);
    assert_eq!(web.sign_in("admin").await.get("/vms").await.status, 200);
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // The first of them were closed, and a person's stream was not.
    let mut nothing = Vec::new();
    let end = timeout(Duration::from_secs(5), silent[0].read_to_end(&mut nothing)).await;
    assert_eq!(end.expect("it was closed").unwrap_or_default(), 0);
    web.set_status("apple", json!({ "phase": "Starting" })).await;
    until(&mut stream, "vm", "Starting").await;
}

#[tokio::test]
async fn one_person_does_not_take_all_places() {
    let web = Web::new("web-person", &with_server(&["admin", "ann"], json!({ "maxConnections": 40 }))).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["*"] }])).await;
    // In many sessions.
    let (first, second) = (web.sign_in("ann").await, web.sign_in("ann").await);
    let mut streams = Vec::new();
    let refused = loop {
        let ann = if streams.len() % 2 == 0 { &first } else { &second };
        let (answer, stream) = ann.open("GET", "/live/home", &[], "").await;
        if answer.status != 200 {
            break answer;
        }
        streams.push(stream);
        assert!(streams.len() < 40);
    };
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("5")));
    assert_eq!(web.sign_in("admin").await.get("/vms").await.status, 200);
    streams.pop();
    eventually("a place of hers", LIMIT, async || (first.get("/home").await.status == 200).then_some(())).await;
}

#[tokio::test]
async fn a_console_at_rest_is_asked_before_a_proxy_ends_it() {
    let web = Web::new("web-rest", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["accessConsole"] }])).await;
    let relay = Relay::start().await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "apple-relay" },
        "stringData": { "tls.crt": relay.certificate, "token": TOKEN },
    });
    web.namespace.create(&secret.to_string()).await;
    let running = json!({ "type": "Running", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    web.set_status("apple", json!({ "phase": "Running", "relayPort": relay.port, "addresses": [{ "type": "PodIP", "address": "127.0.0.1" }], "conditions": [running] })).await;
    let ann = web.sign_in("ann").await;
    eventually("the button", LIMIT, async || ann.get("/home").await.body.contains("/console\"").then_some(())).await;
    let own = format!("http://{}", web.address);
    let mut socket = ann.socket(&web.path("apple", "/console/socket?wish=control"), Some(&own)).await.unwrap();
    assert!(next(&mut socket).await.is_text());
    let begin = Instant::now();
    let message = timeout(Duration::from_secs(30), socket.next()).await.expect("a ping in time").unwrap().unwrap();
    assert!(matches!(message, Message::Ping(_)), "{message}");
    assert!(begin.elapsed() > Duration::from_secs(15), "{:?}", begin.elapsed());
    assert!(socket.next().now_or_never().is_none(), "it goes on");
}
