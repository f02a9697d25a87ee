//! What an attacker may send.

use std::{fs, time::Duration};

use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

use super::{Browser, Web, configuration};

#[tokio::test]
async fn a_session_is_never_the_one_that_the_browser_brought() {
    let web = Web::new("web-fixation", &configuration(&["admin", "ann"])).await;
    // An attacker has put her own session into the browser of somebody who signs in then.
    let planted = web.sign_in("ann").await;
    let answer = planted.sign_in("admin", "secret").await;
    let own = answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
    assert_ne!(Some(&own), planted.cookie.as_ref());
    assert_eq!(planted.get("/home").await.status, 303, "the planted one has ended");
    assert_eq!(Browser { cookie: Some(own), ..web.nobody() }.get("/vms").await.status, 200);
    // What nobody has given out is no session.
    for cookie in ["__Host-session=", "__Host-session=x", "__Host-session=%00%0d%0a", "__Host-session=eyJpZCI6ImEifQ=="]
    {
        let answer = Browser { cookie: Some(cookie.into()), ..web.nobody() }.sign_in("ann", "secret").await;
        assert_eq!(answer.status, 303);
        assert_ne!(answer.header("set-cookie").unwrap().split(';').next(), Some(cookie));
    }
}

#[tokio::test]
async fn nothing_that_is_sent_becomes_a_header_or_leads_elsewhere() {
    let web = Web::new("web-headers", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["*"] }])).await;
    let (ann, nobody) = (web.sign_in("ann").await, web.nobody());
    let evil = "%0d%0aset-cookie:%20evil=1%0d%0a%0d%0a";
    let start = web.path("apple", "/start");
    let mut answers = Vec::new();
    for path in [
        format!("/vms/{evil}/{evil}"),
        format!("/{evil}"),
        format!("/assets/{evil}"),
        format!("/sign-in?next={evil}"),
        "/sign-in?next=https://evil.example".into(),
        "//evil.example/%2e%2e".into(),
        "//evil.example".into(),
        "/\\evil.example".into(),
        format!("/sign-in/oidc/{evil}"),
        format!("/oauth/callback?code={evil}&state={evil}"),
    ] {
        for browser in [&ann, &nobody] {
            answers.push((path.clone(), browser.get(&path).await));
        }
    }
    for body in [format!("from={evil}"), "from=https://evil.example".into(), "from=//evil.example".into()] {
        answers.push((body.clone(), ann.post(&start, &body).await));
    }
    for user in [evil, "https://evil.example"] {
        answers.push((user.to_owned(), nobody.sign_in(user, evil).await));
    }
    // A foreign host is no part of an answer.
    answers.push(("host".into(), nobody.send("GET", "/home", &[("x-forwarded-host", "evil.example")], "").await));
    for (sent, answer) in &answers {
        assert!(answer.headers.iter().all(|(_, value)| !value.contains("evil")), "{sent}: {:?}", answer.headers);
        if let Some(location) = answer.header("location") {
            assert!(location.starts_with('/') && !location.starts_with("//"), "{sent}: {location}");
        }
        assert!((200..500).contains(&answer.status), "{sent}: {}", answer.status);
    }
}

#[tokio::test]
async fn paths_lead_to_nothing_but_pages() {
    let web = Web::new("web-paths", &configuration(&["admin"])).await;
    let admin = web.sign_in("admin").await;
    let up = ["..", "%2e%2e", "..%2f..%2f..", "%2e%2e%2f", "..%5c..", "%252e%252e", ".%00."];
    for up in up {
        for path in [
            format!("/assets/{up}/etc/passwd"),
            format!("/assets/{up}"),
            format!("/{up}/config.yaml"),
            format!("/vms/{up}/secrets"),
            format!("/vms/{}/{up}%2fsecrets%2fapple-relay", web.namespace.name()),
            format!("/vms/{}%2f{up}/apple/console", web.namespace.name()),
            format!("/live/vm/{up}/apple"),
        ] {
            let answer = admin.get(&path).await;
            assert_eq!(answer.status, 404, "{path}");
            assert!(!answer.body.contains("root:") && !answer.body.contains("password:"), "{path}: {}", answer.body);
        }
    }
}

#[tokio::test]
async fn too_much_is_refused_and_too_slow_is_closed() {
    let web = Web::new("web-limits", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["*"] }])).await;
    let ann = web.sign_in("ann").await;
    let large = format!("from={}", "x".repeat(20 << 10));
    for path in ["/sign-in", &web.path("apple", "/start"), &web.path("apple", "/stop"), &web.path("apple", "/reset")] {
        assert_eq!(ann.post(path, &large).await.status, 413, "{path}");
    }
    // A head that is too large gets an answer or none, and takes nothing.
    let mut stream = TcpStream::connect(web.address).await.unwrap();
    let head = format!("GET / HTTP/1.1\r\nhost: a\r\nx-large: {}\r\n\r\n", "x".repeat(1 << 20));
    let _ = stream.write_all(head.as_bytes()).await;
    let mut answer = Vec::new();
    let _ = timeout(super::LIMIT, stream.read_to_end(&mut answer)).await.expect("it is closed");
    assert!(answer.is_empty() || answer.starts_with(b"HTTP/1.1 431"), "{}", String::from_utf8_lossy(&answer));

    // A byte a second, in the head and in the body. Others are served meanwhile.
    let slow = async |head: String, rest: &'static str| {
        let mut stream = TcpStream::connect(web.address).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let write = async {
            for byte in rest.bytes().cycle() {
                tokio::time::sleep(Duration::from_millis(200)).await;
                if writer.write_all(&[byte]).await.is_err() {
                    break;
                }
            }
        };
        let mut answer = Vec::new();
        tokio::select! {
            _ = reader.read_to_end(&mut answer) => {}
            () = write => {}
        }
        String::from_utf8_lossy(&answer).into_owned()
    };
    let form = format!(
        "POST /sign-in HTTP/1.1\r\nhost: {0}\r\norigin: http://{0}\r\ncontent-type: application/x-www-form-urlencoded\r\ncontent-length: 10000\r\n\r\n",
        web.address
    );
    let both = async { tokio::join!(slow("GET /livez HTTP/1.1\r\nx-slow: ".into(), "a"), slow(form, "a")) };
    let (_, answer) = timeout(super::LIMIT, both).await.expect("both are closed");
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 503") || answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert_eq!(ann.get("/home").await.status, 200);
}

#[tokio::test]
async fn a_password_is_not_guessed_and_not_logged() {
    let web = Web::new("web-guess", &configuration(&["admin", "ann"])).await;
    let nobody = web.nobody();
    let mut last = 0;
    for number in 0..11 {
        last = nobody.sign_in("ann", &format!("hunch-{number}")).await.status;
    }
    assert_eq!(last, 429);
    assert_eq!(nobody.sign_in("ann", "secret").await.status, 303, "the right one is never refused");
    assert_eq!(nobody.sign_in("admin", "secret").await.status, 303, "others are not held up");
    // A name that nobody has may be a password in the wrong field.
    nobody.sign_in("my-own-password", "x").await;
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    for secret in ["hunch-", "secret", "my-own-password", "$2b$", "__Host-session"] {
        assert!(!log.contains(secret), "{secret}: {log}");
    }
    assert!(log.contains("too many attempts to sign in"), "{log}");
}
