//! Sessions over several replicas, restarts and keys; HTTPS by the program itself.

use std::{fs, process::Command, sync::Arc};

use futures::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::Api;
use serde_json::json;
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use tokio_rustls::rustls::{
    self,
    pki_types::{CertificateDer, ServerName, pem::PemObject},
};

use super::{Browser, LIMIT, Relay, Replica, TOKEN, Web, closed, configuration, next, until};
use crate::support::cluster::eventually;

const SECRET: &str = "vm-operator-web-sessions";

/// A file of session keys.
fn key_file(keys: &[&str]) -> (TempDir, String) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("key");
    fs::write(&file, keys.join("\n")).unwrap();
    (folder, format!("--session-key={}", file.display()))
}

const OLD: &str = "an old key that is as long as it has to be";
const NEW: &str = "a new key that is as long as it has to be, too";

#[tokio::test]
async fn a_session_that_ends_at_one_replica_ends_at_all() {
    let (_keys, key) = key_file(&[OLD]);
    let web = Web::with("web-replicas", &configuration(&["admin", "ann", "bob"]), &[&key]).await;
    let other = web.replica(&[&key]).await;
    let there = |browser: &Browser| Browser { address: other.address, cookie: browser.cookie.clone() };
    let (first, second, bob) = (web.sign_in("ann").await, web.sign_in("ann").await, web.sign_in("bob").await);
    for browser in [&first, &second, &bob] {
        assert_eq!(there(browser).get("/home").await.status, 200);
    }
    // Signed out here: her pages there are loaded again, and get nothing any more.
    let (_, mut stream) = there(&first).open("GET", "/live/home", &[], "").await;
    until(&mut stream, "vms", "").await;
    first.post("/sign-out", "").await;
    until(&mut stream, "reload", "").await;
    assert_eq!(there(&first).get("/home").await.status, 303);
    assert_eq!(there(&second).get("/home").await.status, 200, "another session of hers");

    // An administrator ends all sessions of a user: open consoles, too.
    web.create_vm("apple", json!([{ "user": "ann", "may": ["accessConsole"] }])).await;
    let relay = Relay::start().await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "apple-relay" },
        "stringData": { "tls.crt": relay.certificate, "token": TOKEN },
    });
    web.namespace.create(&secret.to_string()).await;
    let running = json!({ "type": "Running", "status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let status = json!({
        "phase": "Running", "relayPort": relay.port, "addresses": [{ "type": "PodIP", "address": "127.0.0.1" }], "conditions": [running],
    });
    web.set_status("apple", status).await;
    let (path, own) = (web.path("apple", "/console/socket?wish=control"), format!("http://{}", other.address));
    let mut socket = eventually("the console", LIMIT, async || {
        let mut socket = there(&second).socket(&path, Some(&own)).await.ok()?;
        next(&mut socket).await.is_text().then_some(socket)
    })
    .await;
    let revoke = |user: &str| {
        let done = Command::new(env!("CARGO_BIN_EXE_vm-web"))
            .args(["revoke", user])
            .env("KUBECONFIG", web.kubeconfig())
            .output()
            .unwrap();
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    revoke("ann");
    assert_eq!(closed(&mut socket).await.0, 4100);
    eventually("the end of her sessions", LIMIT, async || (second.get("/home").await.status == 303).then_some(()))
        .await;
    assert_eq!(there(&second).get("/home").await.status, 303);
    assert_eq!(there(&bob).get("/home").await.status, 200);
    let again = web.sign_in("ann").await;
    assert_eq!(there(&again).get("/home").await.status, 200, "she may sign in again");

    // Many at once, at both: none is lost.
    let mut many = Vec::new();
    for number in 0..8 {
        let browser = web.sign_in(if number % 2 == 0 { "ann" } else { "bob" }).await;
        many.push(if number % 3 == 0 { there(&browser) } else { browser });
    }
    join_all(many.iter().map(|browser| browser.post("/sign-out", ""))).await;
    let secrets: Api<Secret> = Api::namespaced(web.client.clone(), web.namespace.name());
    let count = async || {
        let data = secrets.get(SECRET).await.unwrap().data.unwrap();
        let text = String::from_utf8(data["ended.json"].0.clone()).unwrap();
        assert!(!many.iter().any(|browser| text.contains(browser.cookie.as_ref().unwrap())), "{text}");
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["sessions"].as_object().unwrap().len()
    };
    eventually("all sessions in the Secret", LIMIT, async || (count().await == 9).then_some(())).await;
    // A replica that starts knows of all.
    let third = web.replica(&[&key]).await;
    let at_third = |browser: &Browser| Browser { address: third.address, cookie: browser.cookie.clone() };
    for browser in many.iter().chain([&first, &second]) {
        assert_eq!(at_third(browser).get("/home").await.status, 303);
    }
    assert_eq!(at_third(&again).get("/home").await.status, 200);
    // The Secret is deleted: what has ended does not begin anew.
    secrets.delete(SECRET, &Default::default()).await.unwrap();
    assert_eq!(at_third(&first).get("/home").await.status, 303);
    at_third(&again).post("/sign-out", "").await;
    eventually("all of them again", LIMIT, async || {
        (secrets.get_opt(SECRET).await.unwrap().is_some() && count().await == 10).then_some(())
    })
    .await;
}

#[tokio::test]
async fn without_the_right_to_the_secret_a_sign_out_counts_for_its_process() {
    let (_keys, key) = key_file(&[OLD]);
    let web = Web::with("web-no-secret", &configuration(&["admin", "ann"]), &[&key, "--sessions-secret=other"]).await;
    for _ in 0..2 {
        let ann = web.sign_in("ann").await;
        ann.post("/sign-out", "").await;
        assert_eq!(ann.get("/home").await.status, 303);
    }
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert_eq!(log.matches("are not known to other replicas").count(), 1, "{log}");
}

#[tokio::test]
async fn keys_of_sessions_are_replaced_without_a_sign_in() {
    let (folder, key) = key_file(&[OLD]);
    let web = Web::with("web-keys", &configuration(&["admin", "ann"]), &[&key]).await;
    let log = || fs::read_to_string(web.folder.path().join("log")).unwrap();
    let write = async |keys: &str, message: &str| {
        let before = log().len();
        fs::write(folder.path().join("key"), keys).unwrap();
        eventually(message, LIMIT, async || log()[before..].contains(message).then_some(())).await;
    };
    let before = web.sign_in("ann").await;
    write(&format!("{NEW}\n{OLD}\n"), "the session keys have changed").await;
    let after = web.sign_in("ann").await;
    assert_eq!((before.get("/home").await.status, after.get("/home").await.status), (200, 200));
    write("too short\n", "the session keys can't be used").await;
    assert_eq!((before.get("/home").await.status, after.get("/home").await.status), (200, 200));
    write(NEW, "the session keys have changed").await;
    assert_eq!((before.get("/home").await.status, after.get("/home").await.status), (303, 200));
    assert!(!log().contains("as long as it has to be"), "{}", log());
}

/// Asks for a path over TLS, trusting that certificate alone. `None`: there is another one.
async fn get(replica: &Replica, certificate: &str, path: &str) -> Option<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(certificate.as_bytes()).unwrap()).unwrap();
    let config = rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(replica.address).await.unwrap();
    let name = ServerName::try_from("vms.example").unwrap();
    let mut stream = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, stream).await.ok()?;
    stream
        .write_all(format!("GET {path} HTTP/1.1\r\nhost: vms.example\r\nconnection: close\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut answer = String::new();
    // It may be closed without a farewell of TLS.
    let _ = stream.read_to_string(&mut answer).await;
    Some(answer)
}

#[tokio::test]
async fn https_with_files_that_are_replaced() {
    let web = Web::new("web-https", &configuration(&["admin"])).await;
    let folder = TempDir::new().unwrap();
    let write = || {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["vms.example".to_owned()]).unwrap();
        fs::write(folder.path().join("tls.crt"), cert.pem()).unwrap();
        fs::write(folder.path().join("tls.key"), signing_key.serialize_pem()).unwrap();
        cert.pem()
    };
    let first = write();
    let option = |name: &str, file: &str| format!("--{name}={}", folder.path().join(file).display());
    let replica = web.start(&[&option("tls-cert", "tls.crt"), &option("tls-key", "tls.key")]).await;
    let answer = get(&replica, &first, "/livez").await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
    let answer = get(&replica, &first, "/home").await.unwrap();
    assert!(answer.contains("location: /sign-in"));
    assert!(answer.contains("strict-transport-security: max-age=31536000"), "{answer}");
    // Without TLS there is no answer, and one that says nothing holds up nobody.
    let mut plain = TcpStream::connect(replica.address).await.unwrap();
    plain.write_all(b"GET /livez HTTP/1.1\r\nhost: vms.example\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer).await;
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    let _silent = TcpStream::connect(replica.address).await.unwrap();
    let second = write();
    eventually("the new certificate", LIMIT, async || get(&replica, &second, "/livez").await).await;
    assert_eq!(get(&replica, &first, "/livez").await, None, "the former one is not used any more");
    fs::write(folder.path().join("tls.key"), "no key").unwrap();
    eventually("the message", LIMIT, async || replica.log().contains("can't be used").then_some(())).await;
    assert!(get(&replica, &second, "/livez").await.is_some(), "the last good one");
}
