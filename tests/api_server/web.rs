//! The web interface as a process, over HTTP, with the rights that it has when it is deployed.

mod attacks;
mod beside_manager;
mod connections;
mod create;
mod files;
mod objects;
mod oidc;
mod oidc_provider;
mod replica;
mod rights;
mod sessions;

use std::{collections::BTreeSet, fs, io::Write as _, net::SocketAddr, sync::OnceLock};

use futures::{SinkExt, StreamExt};
use k8s_openapi::api::core::v1::Event;
use kube::{
    Api, Client, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use tempfile::{NamedTempFile, TempDir};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    net::TcpStream,
    sync::mpsc,
    time::timeout,
};
use tokio_rustls::rustls;
use tokio_tungstenite::{
    WebSocketStream, accept_hdr_async, client_async,
    tungstenite::{
        self, Message,
        client::IntoClientRequest,
        handshake::server::{Request, Response},
    },
};
use vm_operator::{
    api::VirtualMachine,
    relay::{Hello, News, PICTURE, Wish},
};

use self::replica::Replica;
use crate::support::{
    cluster::{Cluster, TestNamespace, eventually},
    managed_namespace::LIMIT,
    manager::install_crds,
};

// In a real browser.
mod browser;
// What many people with live pages take.
mod load;
// Who gets a VM of a pool.
mod pools;

/// A bcrypt hash of `secret`.
fn hash() -> &'static str {
    static HASH: OnceLock<String> = OnceLock::new();
    HASH.get_or_init(|| bcrypt::hash("secret", 4).unwrap())
}

/// A configuration with these users; `admin` has the administrator's view, all others the users'.
fn configuration(users: &[&str]) -> String {
    let users: Vec<Value> = users.iter().map(|name| json!({ "name": name, "password": hash() })).collect();
    json!({ "/Manager": { "/GuiHttpServer": { "/ConsoleWeblet": { "/WebConsole": {
        "/LoginConlet": { "users": users },
        "/RoleConfigurator": { "rolesByUser": { "admin": ["admins"], "*": ["all"] } },
        "/RoleConletFilter": { "conletTypesByRole": { "admins": ["*"], "all": ["org.jdrupes.vmoperator.vmaccess.VmAccess"] } },
    } } } } })
    .to_string()
}

/// A namespace with a web interface.
struct Web {
    address: SocketAddr,
    first: Replica,
    folder: TempDir,
    kubeconfig: NamedTempFile,
    namespace: TestNamespace,
    client: Client,
}

impl Web {
    async fn new(test: &str, configuration: &str) -> Self {
        Self::with(test, configuration, &[]).await
    }

    /// With these options of the program.
    async fn with(test: &str, configuration: &str, options: &[&str]) -> Self {
        let cluster = Cluster::control_plane();
        install_crds(cluster).await;
        let namespace = cluster.namespace(test).await;
        let manifests = include_str!("../../deploy/web/role.yaml");
        namespace.create(manifests).await;
        // What it limits are people who may only patch VMs.
        let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/users/power-policy.yaml");
        cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", policy]);
        let text = fs::read_to_string(cluster.kubeconfig()).unwrap();
        let mut kubeconfig: Value = serde_yaml::from_str(&text).unwrap();
        let account = format!("system:serviceaccount:{}:vm-operator-web", namespace.name());
        kubeconfig["users"][0]["user"]["as"] = account.into();
        kubeconfig["contexts"][0]["context"]["namespace"] = namespace.name().into();
        let mut file = NamedTempFile::new().unwrap();
        file.write_all(kubeconfig.to_string().as_bytes()).unwrap();

        let folder = TempDir::new().unwrap();
        fs::write(folder.path().join("config.yaml"), configuration).unwrap();
        let first = Replica::start(folder.path(), "log", namespace.name(), file.path(), options).await;
        let client = cluster.client().await;
        let web = Self { address: first.address, first, folder, kubeconfig: file, namespace, client };
        eventually("the VMs to be listed", LIMIT, async || {
            (web.nobody().get("/readyz").await.status == 200).then_some(())
        })
        .await;
        web
    }

    fn vms(&self) -> Api<VirtualMachine> {
        Api::namespaced(self.client.clone(), self.namespace.name())
    }

    /// Creates a stopped VM, and waits until the web interface knows it. The administrator's name is `admin`.
    async fn create_vm(&self, name: &str, permissions: Value) {
        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name },
            "spec": { "permissions": permissions, "vm": { "state": "Stopped", "maximumCpus": 2, "maximumRam": "1Gi" } },
        });
        self.vms().create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
        let admin = self.sign_in("admin").await;
        let path = self.path(name, "");
        eventually("the VM on its page", LIMIT, async || (admin.get(&path).await.status == 200).then_some(())).await;
    }

    /// Patches the VM's status as the runner and the manager do.
    async fn set_status(&self, name: &str, status: Value) {
        let patch = Patch::Merge(json!({ "status": status }));
        self.vms().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
    }

    fn path(&self, vm: &str, rest: &str) -> String {
        format!("/vms/{}/{vm}{rest}", self.namespace.name())
    }

    fn nobody(&self) -> Browser {
        Browser { address: self.address, cookie: None }
    }

    async fn sign_in(&self, user: &str) -> Browser {
        let answer = self.nobody().sign_in(user, "secret").await;
        assert_eq!((answer.status, answer.header("location")), (303, Some("/")), "{user}: {}", answer.body);
        let cookie = answer.header("set-cookie").unwrap().split(';').next().unwrap().to_owned();
        Browser { cookie: Some(cookie), ..self.nobody() }
    }
}

/// Sends requests as a browser does.
#[derive(Clone)]
struct Browser {
    address: SocketAddr,
    cookie: Option<String>,
}

struct Answer {
    status: u16,
    headers: Vec<(String, String)>,
    body: String,
}

impl Answer {
    fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }
}

/// The rest of an answer that goes on.
type Stream = BufReader<TcpStream>;

impl Browser {
    /// Sends a request and reads the head of the answer.
    async fn open(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> (Answer, Stream) {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let mut text = format!("{method} {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address);
        let cookie = self.cookie.as_deref().map(|cookie| ("cookie", cookie));
        for (name, value) in headers.iter().copied().chain(cookie) {
            text += &format!("{name}: {value}\r\n");
        }
        if method == "POST" {
            text += &format!("content-type: application/x-www-form-urlencoded\r\ncontent-length: {}\r\n", body.len());
        }
        text += &format!("\r\n{body}");
        stream.write_all(text.as_bytes()).await.unwrap();
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("{method} {path}: {line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).await.unwrap();
            match line.trim_end().split_once(": ") {
                Some((name, value)) => headers.push((name.to_lowercase(), value.to_owned())),
                None => break,
            }
        }
        (Answer { status, headers, body: String::new() }, stream)
    }

    async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let (mut answer, mut stream) = self.open(method, path, headers, body).await;
        let mut body = Vec::new();
        stream.read_to_end(&mut body).await.unwrap();
        // Chunks are not told apart: what the tests look for is not cut.
        answer.body = String::from_utf8_lossy(&body).into_owned();
        answer
    }

    async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    /// As a form of the site itself.
    async fn post(&self, path: &str, body: &str) -> Answer {
        let origin = format!("http://{}", self.address);
        self.send("POST", path, &[("origin", &origin), ("sec-fetch-site", "same-origin")], body).await
    }

    async fn sign_in(&self, user: &str, password: &str) -> Answer {
        self.post("/sign-in", &format!("user={user}&password={password}")).await
    }
}

/// Reads a stream of events until one of that name whose data has the text; returns all that was read. Others of the name may come before: what
/// was written while the page was made is sent again.
async fn until(stream: &mut Stream, event: &str, content: &str) -> String {
    let mut text = String::new();
    let read = async {
        loop {
            let mut one = String::new();
            while !one.ends_with("\n\n") {
                if stream.read_line(&mut one).await.unwrap() == 0 {
                    panic!("the stream ended without {event} with {content}: {text}{one}");
                }
            }
            text += &one;
            if one.lines().any(|line| line == format!("event: {event}")) && one.contains(content) {
                return;
            }
        }
    };
    let ended = timeout(LIMIT, read).await;
    assert!(ended.is_ok(), "no {event} with {content}: {text}");
    text
}

#[tokio::test]
async fn a_session_begins_with_a_password_and_ends_with_all_its_pages() {
    let web = Web::new("web-session", &configuration(&["admin", "ann"])).await;
    let nobody = web.nobody();
    for (user, password) in [("ann", "wrong"), ("nobody", "secret"), ("ann", "")] {
        let answer = nobody.sign_in(user, password).await;
        assert_eq!((answer.status, answer.header("set-cookie")), (401, None), "{user}");
    }
    let answer = nobody.sign_in("ann", "secret").await;
    let cookie = answer.header("set-cookie").unwrap();
    assert!(cookie.starts_with("__Host-session=") && !cookie.contains("ann"), "{cookie}");
    for attribute in ["HttpOnly", "Secure", "SameSite=Lax", "Path=/"] {
        assert!(cookie.contains(attribute), "{cookie}");
    }
    let ann = web.sign_in("ann").await;
    assert_eq!(ann.get("/").await.header("location"), Some("/home"));
    let page = ann.get("/home").await;
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!((page.header("cache-control"), page.header("x-frame-options")), (Some("no-store"), Some("DENY")));
    // The page's language.
    assert!(page.body.contains("lang=\"en\"") && page.body.contains("Sign out"));
    let german = ann.send("GET", "/home", &[("accept-language", "de-AT,en;q=0.5")], "").await.body;
    assert!(german.contains("lang=\"de\"") && german.contains("Abmelden"));

    // Another site can't use it, whatever the browser tells of it.
    let own = format!("http://{}", web.address);
    let foreign: [&[(&str, &str)]; 4] = [
        &[("origin", "https://evil.example")],
        &[("origin", "null")],
        &[("sec-fetch-site", "cross-site"), ("origin", &own)],
        &[("sec-fetch-site", "same-site"), ("origin", "http://127.0.0.2")],
    ];
    for headers in foreign {
        for path in ["/sign-out", "/sign-in"] {
            let answer = ann.send("POST", path, headers, "user=ann&password=secret").await;
            assert_eq!((answer.status, answer.header("set-cookie")), (403, None), "{path} {headers:?}");
        }
    }
    assert_eq!(ann.get("/home").await.status, 200, "it goes on");
    let mut changed = ann.cookie.clone().unwrap().into_bytes();
    changed[40] = if changed[40] == b'A' { b'B' } else { b'A' };
    let forged = Browser { cookie: String::from_utf8(changed).ok(), ..nobody.clone() };
    assert_eq!(forged.get("/home").await.status, 303);
    assert_eq!(ann.post("/sign-in", &"x".repeat(20 << 10)).await.status, 413);

    let (answer, mut stream) = ann.open("GET", "/live/home", &[], "").await;
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")));
    until(&mut stream, "vms", "").await;
    let out = ann.post("/sign-out", "").await;
    assert!(out.header("set-cookie").unwrap().contains("Max-Age=0"));
    until(&mut stream, "reload", "").await;
    assert_eq!(ann.get("/home").await.status, 303, "the cookie is of no use any more");
    assert_eq!(ann.get("/live/home").await.status, 401);

    // A user who is removed from the configuration has no session any more.
    let ann = web.sign_in("ann").await;
    let (_, mut stream) = ann.open("GET", "/live/home", &[], "").await;
    until(&mut stream, "vms", "").await;
    fs::write(web.folder.path().join("config.yaml"), configuration(&["admin"])).unwrap();
    until(&mut stream, "reload", "").await;
    assert_eq!(ann.get("/home").await.status, 303);
    assert_eq!(nobody.sign_in("ann", "secret").await.status, 401);

    // Too many wrong ones.
    let mut last = 0;
    for _ in 0..12 {
        last = nobody.sign_in("guess", "wrong").await.status;
    }
    assert_eq!(last, 429);
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert!(log.contains("a person has signed in") && !log.contains("secret") && !log.contains("guess"), "{log}");
}

#[tokio::test]
async fn what_a_vm_brings_in_is_text() {
    let web = Web::new("web-text", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["*"] }])).await;
    let evil = "</td><script>alert(1)</script>\"'><img src=x onerror=alert(2)>";
    let condition = |type_: &str, status: &str| {
        json!({
            "type": type_, "status": status, "reason": "Evil", "message": evil, "lastTransitionTime": "2026-01-01T00:00:00Z",
        })
    };
    let status = json!({
        "phase": evil, "nodeName": evil, "consoleUser": evil, "ram": evil, "addresses": [{ "type": "PodIP", "address": evil }],
        "assignment": { "pool": evil, "user": "bob" }, "conditions": [condition("Ready", "False"), condition("ConsoleConnected", "True"), condition("Running", "True")],
        "pendingChanges": [{ "path": evil, "reason": "r" }],
    });
    web.set_status("apple", status).await;
    let vm = web.vms().get("apple").await.unwrap();
    let event = json!({
        "metadata": { "generateName": "apple-" }, "reason": evil, "message": evil, "type": "Warning", "count": 2, "lastTimestamp": "2026-01-01T00:00:00Z",
        "involvedObject": { "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "apple", "namespace": web.namespace.name(), "uid": vm.uid() },
    });
    let events: Api<Event> = Api::namespaced(web.client.clone(), web.namespace.name());
    events.create(&PostParams::default(), &serde_json::from_value(event).unwrap()).await.unwrap();
    let (admin, ann) = (web.sign_in("admin").await, web.sign_in("ann").await);
    let detail = web.path("apple", "");
    let escaped = "&lt;script&gt;alert(1)";
    for (browser, path) in [(&admin, "/vms"), (&ann, "/home"), (&admin, &detail), (&ann, &detail)] {
        let page = eventually("what is evil on the page", LIMIT, async || {
            let page = browser.get(path).await;
            assert_eq!(page.status, 200);
            page.body.contains(escaped).then_some(page.body)
        })
        .await;
        assert!(!page.contains("<script>") && !page.contains("<img"), "{path}: {page}");
    }
    assert!(ann.get(&detail).await.body.matches(escaped).count() > 4, "of the event, too");
    for (browser, path) in [(&admin, "/live/list"), (&ann, "/live/home")] {
        let (_, mut stream) = browser.open("GET", path, &[], "").await;
        let event = until(&mut stream, "vm", "").await;
        assert!(event.contains(escaped) && !event.contains("<script>"), "{event}");
    }
}

#[tokio::test]
async fn a_page_follows_its_vms_and_knows_of_no_others() {
    let web = Web::new("web-live", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["start"] }])).await;
    web.create_vm("cherry", json!([{ "user": "bob", "may": ["*"] }])).await;
    let (admin, ann) = (web.sign_in("admin").await, web.sign_in("ann").await);
    let page = ann.get("/home").await.body;
    assert!(page.contains("apple") && !page.contains("cherry"), "{page}");
    let since = page.split("/live/home?since=").nth(1).unwrap().split('"').next().unwrap();
    let path = format!("/live/home?since={since}");
    let (_, mut stream) = ann.open("GET", &path, &[], "").await;
    let (_, mut list) = admin.open("GET", "/live/list", &[], "").await;
    let mut seen = until(&mut stream, "vms", "").await;
    for name in ["apple", "cherry"] {
        web.set_status(name, json!({ "phase": "Starting" })).await;
    }
    seen += &until(&mut stream, "vm", "Starting").await;
    assert!(seen.contains("apple"), "{seen}");
    // She gets a right on another VM, and loses the one on hers.
    let permit = async |name: &str, user: &str| {
        let patch = Patch::Merge(json!({ "spec": { "permissions": [{ "user": user, "may": ["stop"] }] } }));
        web.vms().patch(name, &PatchParams::default(), &patch).await.unwrap();
    };
    assert!(!seen.contains("cherry"), "{seen}");
    permit("cherry", "ann").await;
    until(&mut stream, "vm", "cherry").await;
    permit("apple", "bob").await;
    until(&mut stream, "gone", "apple").await;
    web.vms().delete("cherry", &Default::default()).await.unwrap();
    until(&mut stream, "gone", "cherry").await;
    // The administrator's page has had all of that.
    let list = until(&mut list, "gone", "cherry").await;
    assert!(list.contains("apple") && list.contains("cherry"), "{list}");
}

#[tokio::test]
async fn a_button_changes_the_vm_and_leaves_a_trace() {
    let web = Web::new("web-acts", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["start", "stop"] }])).await;
    let ann = web.sign_in("ann").await;
    let answer = ann.post(&web.path("apple", "/start"), "from=detail").await;
    assert_eq!(
        (answer.status, answer.header("location")),
        (303, Some(web.path("apple", "").as_str())),
        "{}",
        answer.body
    );
    let vm = web.vms().get("apple").await.unwrap();
    assert_eq!(json!(vm.spec.vm.state), "Running");
    assert!(vm.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some("vm-operator-web")));
    let events: Api<Event> = Api::namespaced(web.client.clone(), web.namespace.name());
    let event = eventually("the event", LIMIT, async || {
        let about = ListParams::default().fields("involvedObject.name=apple,reason=WebStarted");
        events.list(&about).await.unwrap().items.pop()
    })
    .await;
    assert!(event.message.unwrap().starts_with("ann "));
    // Another person's action of the same kind is another event.
    web.sign_in("admin").await.post(&web.path("apple", "/stop"), "from=detail").await;
    web.sign_in("ann").await.post(&web.path("apple", "/start"), "from=detail").await;
    web.sign_in("ann").await.post(&web.path("apple", "/stop"), "from=detail").await;
    eventually("who has stopped it", LIMIT, async || {
        let about = ListParams::default().fields("involvedObject.name=apple,reason=WebStopped");
        let notes: BTreeSet<String> =
            events.list(&about).await.unwrap().items.into_iter().filter_map(|event| event.message).collect();
        (notes.len() == 2 && notes.first()?.starts_with("admin ") && notes.last()?.starts_with("ann ")).then_some(())
    })
    .await;
    ann.post(&web.path("apple", "/start"), "from=detail").await;
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert!(log.contains("\"user\":\"ann\"") && log.contains("a person has acted on a VM"), "{log}");

    // What Git applies is not changed; the page says why.
    let applied = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "spec": { "vm": { "state": "Running" } },
    });
    let flux = PatchParams::apply("kustomize-controller").force();
    web.vms().patch("apple", &flux, &Patch::Apply(&applied)).await.unwrap();
    let answer = ann.post(&web.path("apple", "/stop"), "from=home").await;
    assert_eq!(answer.status, 409);
    assert!(answer.body.contains("kustomize-controller"), "{}", answer.body);
    assert_eq!(json!(web.vms().get("apple").await.unwrap().spec.vm.state), "Running");
    let answer = ann.post(&web.path("apple", "/start"), "from=https://evil.example").await;
    assert_eq!((answer.status, answer.header("location")), (303, Some("/home")), "it runs already");
}

#[tokio::test]
async fn people_of_an_existing_configuration_file_see_what_they_saw() {
    let file = include_str!("../predecessor/config.yaml");
    let of_file = file.split("password: \"").nth(1).unwrap().split('"').next().unwrap();
    let web = Web::new("web-existing", &file.replace(of_file, hash())).await;
    web.create_vm("apple", json!([])).await;
    let admin = web.sign_in("admin").await;
    assert_eq!(admin.get("/").await.header("location"), Some("/vms"));
    let page = admin.get("/vms").await.body;
    assert!(
        page.contains("apple") && page.contains("Administrator") && page.contains("<title>All VMs · test"),
        "{page}"
    );
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert!(log.contains("ComponentCollector/VmAccess: syncPreviewsFor has no effect"), "{log}");
}

/// A relay in a Pod: whoever connects with the token is let in, and gets back what she sends.
struct Relay {
    port: u16,
    certificate: String,
    hellos: mpsc::UnboundedReceiver<Hello>,
}

const TOKEN: &str = "0123456789abcdef";

impl Relay {
    async fn start() -> Self {
        let rcgen::CertifiedKey { cert, signing_key } =
            rcgen::generate_simple_self_signed(["relay".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::try_from(signing_key.serialize_der()).unwrap();
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert.der().clone()], key)
            .unwrap();
        let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let (sender, hellos) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                let stream = acceptor.accept(listener.accept().await.unwrap().0).await.unwrap();
                tokio::spawn(Self::serve(stream, sender.clone()));
            }
        });
        Self { port, certificate: cert.pem(), hellos }
    }

    async fn serve(stream: tokio_rustls::server::TlsStream<TcpStream>, hellos: mpsc::UnboundedSender<Hello>) {
        let mut path = String::new();
        #[allow(clippy::result_large_err, reason = "the type is the library's")]
        let check = |request: &Request, response: Response| {
            path = request.uri().path().to_owned();
            assert_eq!(request.headers()["authorization"], format!("Bearer {TOKEN}"));
            Ok(response)
        };
        let mut socket = accept_hdr_async(stream, check).await.unwrap();
        if path == PICTURE {
            socket.send(Message::binary(&b"\x89PNG\r\n\x1a\nof a guest"[..])).await.unwrap();
            return socket.send(Message::Close(None)).await.unwrap();
        }
        assert_eq!(path, "/vnc");
        let hello = socket.next().await.unwrap().unwrap().into_text().unwrap();
        hellos.send(serde_json::from_str(&hello).unwrap()).unwrap();
        let news = serde_json::to_string(&News::Connected { controls: true }).unwrap();
        socket.send(Message::text(news)).await.unwrap();
        while let Some(Ok(message)) = socket.next().await {
            if message.is_binary() && socket.send(message).await.is_err() {
                return;
            }
        }
    }
}

type Socket = WebSocketStream<TcpStream>;

impl Browser {
    /// Opens a socket as a page of that origin does. The error is the status of the answer.
    async fn socket(&self, path: &str, origin: Option<&str>) -> Result<Socket, u16> {
        let mut request = format!("ws://{}{path}", self.address).into_client_request().unwrap();
        let cookie = self.cookie.as_deref().map(|cookie| ("cookie", cookie));
        for (name, value) in origin.map(|origin| ("origin", origin)).into_iter().chain(cookie) {
            request.headers_mut().insert(name, value.parse().unwrap());
        }
        let stream = TcpStream::connect(self.address).await.unwrap();
        match client_async(request, stream).await {
            Ok((socket, _)) => Ok(socket),
            Err(tungstenite::Error::Http(answer)) => Err(answer.status().as_u16()),
            Err(error) => panic!("{path}: {error}"),
        }
    }
}

/// The next message; a close frame as its code and reason.
async fn next(socket: &mut Socket) -> Message {
    timeout(LIMIT, socket.next()).await.expect("a message in time").expect("a message").unwrap()
}

async fn closed(socket: &mut Socket) -> (u16, String) {
    loop {
        if let Message::Close(frame) = next(socket).await {
            return frame.map(|frame| (frame.code.into(), frame.reason.to_string())).unwrap();
        }
    }
}

#[tokio::test]
async fn a_console_is_opened_by_its_right_and_ends_with_it() {
    let web = Web::new("web-console", &configuration(&["admin", "ann", "start", "take", "other"])).await;
    let may = |user: &str, right: &str| json!({ "user": user, "may": [right] });
    let permissions = json!([may("ann", "accessConsole"), may("start", "start"), may("take", "takeConsole")]);
    web.create_vm("apple", permissions.clone()).await;
    let mut relay = Relay::start().await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "apple-relay" },
        "stringData": { "tls.crt": relay.certificate, "token": TOKEN },
    });
    web.namespace.create(&secret.to_string()).await;
    let condition = |type_: &str, status: &str| json!({ "type": type_, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let status = |is_used: &str| {
        json!({
            "phase": "Running", "relayPort": relay.port, "addresses": [{ "type": "PodIP", "address": "127.0.0.1" }],
            "conditions": [condition("Running", "True"), condition("ConsoleConnected", is_used)],
        })
    };
    web.set_status("apple", status("False")).await;
    let (ann, take) = (web.sign_in("ann").await, web.sign_in("take").await);
    eventually("the button", LIMIT, async || ann.get("/home").await.body.contains("/console\"").then_some(())).await;
    assert_eq!(ann.get(&web.path("apple", "/console")).await.status, 200);

    let own = format!("http://{}", web.address);
    let path = web.path("apple", "/console/socket?wish=control");
    for origin in [None, Some("https://evil.example"), Some("null")] {
        assert_eq!(ann.socket(&path, origin).await.err(), Some(403), "{origin:?}");
    }
    for (user, status) in [("other", 404), ("start", 403)] {
        assert_eq!(web.sign_in(user).await.socket(&path, Some(&own)).await.err(), Some(status), "{user}");
        assert_eq!(web.sign_in(user).await.get(&web.path("apple", "/console")).await.status, status, "{user}");
    }
    assert_eq!(web.nobody().socket(&path, Some(&own)).await.err(), Some(303));
    let taken = web.path("apple", "/console/socket?wish=takeOver");
    assert_eq!(ann.socket(&taken, Some(&own)).await.err(), Some(403), "only who may take it");

    // A picture of the screen is for who can open the console now.
    let picture = format!("/live/vm/{}/apple/picture", web.namespace.name());
    let answer = ann.get(&picture).await;
    assert!(answer.status == 200 && answer.body.contains("PNG\r\n"), "{}: {:?}", answer.status, answer.body);
    for (user, status) in [("other", 404), ("start", 403), ("take", 200), ("admin", 200)] {
        assert_eq!(web.sign_in(user).await.get(&picture).await.status, status, "{user}");
    }
    assert_eq!(web.nobody().get(&picture).await.status, 401);

    // Bytes and what the relay says reach the page, and the other way round.
    let mut socket = ann.socket(&path, Some(&own)).await.unwrap();
    assert_eq!(next(&mut socket).await, Message::text(r#"{"connected":{"controls":true}}"#));
    let hello = relay.hellos.recv().await.unwrap();
    assert_eq!((hello.user.as_str(), hello.wish), ("ann", Wish::Control));
    socket.send(Message::binary(vec![4, 1, 0, 0])).await.unwrap();
    assert_eq!(next(&mut socket).await, Message::binary(vec![4, 1, 0, 0]));
    let mut second = take.socket(&taken, Some(&own)).await.unwrap();
    assert_eq!(next(&mut second).await, Message::text(r#"{"connected":{"controls":true}}"#));
    let other = relay.hellos.recv().await.unwrap();
    assert_eq!((other.user.as_str(), other.wish, other.session == hello.session), ("take", Wish::TakeOver, false));

    // Somebody else is at the console: who may not take it has to go.
    let mut used = status("True");
    used["consoleClient"] = json!("take");
    web.set_status("apple", used).await;
    assert_eq!(closed(&mut socket).await.0, 4101);
    assert_eq!((ann.get(&picture).await.status, take.get(&picture).await.status), (204, 200));
    let mut refused = ann.socket(&path, Some(&own)).await.unwrap();
    assert_eq!(closed(&mut refused).await, (4002, "take".into()));
    // The right is taken away.
    let patch = Patch::Merge(json!({ "spec": { "permissions": [may("ann", "accessConsole")] } }));
    web.vms().patch("apple", &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(closed(&mut second).await.0, 4101);
    // The session ends.
    web.set_status("apple", status("False")).await;
    let mut socket = eventually("the console to be free", LIMIT, async || {
        let mut socket = ann.socket(&path, Some(&own)).await.unwrap();
        next(&mut socket).await.is_text().then_some(socket)
    })
    .await;
    ann.post("/sign-out", "").await;
    assert_eq!(closed(&mut socket).await.0, 4100);
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert!(log.contains("a person has opened a console") && !log.contains(TOKEN), "{log}");
}
