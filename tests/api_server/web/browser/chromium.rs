//! A real Chromium, driven with its DevTools protocol (<https://chromedevtools.github.io/devtools-protocol/>): clicks and keys as people make them,
//! and everything that the browser complains about, refused scripts and styles too. WebDriver would take one more program and thirty crates, and
//! has no such complaints.

use std::{
    collections::HashMap,
    path::Path,
    process::Stdio,
    sync::{Arc, Mutex},
};

use futures::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    net::TcpStream,
    process::{Child, Command},
    sync::{mpsc, oneshot},
    time::timeout,
};
use tokio_tungstenite::{
    WebSocketStream, client_async_with_config,
    tungstenite::{Message, protocol::WebSocketConfig},
};

use crate::support::{cluster::eventually, managed_namespace::LIMIT};

/// The accessibility checks of axe-core.
const AXE: &str = include_str!("axe.min.js");

/// A method of the browser, and where its answer goes.
struct Call {
    message: Value,
    answer: oneshot::Sender<Value>,
}

/// What the browser complains about, by session.
type Complaints = Arc<Mutex<HashMap<String, Vec<String>>>>;

/// A browser without a window. It ends with this value.
pub struct Chromium {
    _process: Child,
    _profile: TempDir,
    calls: mpsc::UnboundedSender<Call>,
    complaints: Complaints,
}

/// A page of the browser. People who share no page share no cookies either.
pub struct Page {
    session: String,
    /// Whose cookies and permissions it has.
    context: Value,
    calls: mpsc::UnboundedSender<Call>,
    complaints: Complaints,
    troubles: Mutex<Vec<String>>,
}

/// How a page is looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Look {
    pub dark: bool,
    pub phone: bool,
    pub german: bool,
}

impl Chromium {
    pub async fn start() -> Self {
        let profile = TempDir::new().unwrap();
        let mut process = Command::new("chromium")
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-port=0",
                "--hide-scrollbars",
            ])
            .args([
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--force-color-profile=srgb",
            ])
            .arg(format!("--user-data-dir={}", profile.path().display()))
            .arg("about:blank")
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("chromium: `cargo xtask setup --for tests` installs it");
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let address = async {
            while let Some(line) = lines.next_line().await.unwrap() {
                if let Some(url) = line.strip_prefix("DevTools listening on ") {
                    return url.to_owned();
                }
            }
            panic!("Chromium has ended");
        };
        let url = timeout(LIMIT, address).await.expect("Chromium in time");
        // Nobody reads the rest, and the pipe must not become full.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        let authority = url.strip_prefix("ws://").unwrap().split('/').next().unwrap();
        let stream = TcpStream::connect(authority).await.unwrap();
        let config = WebSocketConfig::default().max_message_size(None).max_frame_size(None);
        let (socket, _) = client_async_with_config(&url, stream, Some(config)).await.unwrap();
        let (calls, receiver) = mpsc::unbounded_channel();
        let complaints = Complaints::default();
        tokio::spawn(carry(socket, receiver, complaints.clone()));
        Self { _process: process, _profile: profile, calls, complaints }
    }

    /// A new page of somebody who is not signed in.
    pub async fn page(&self) -> Page {
        let browser = Page {
            session: String::new(),
            context: Value::Null,
            calls: self.calls.clone(),
            complaints: self.complaints.clone(),
            troubles: Mutex::default(),
        };
        let context = browser.call("Target.createBrowserContext", json!({})).await["browserContextId"].clone();
        Page { context, ..browser }.another().await
    }
}

/// Sends calls, gives their answers to whoever waits, and keeps complaints.
async fn carry(
    mut socket: WebSocketStream<TcpStream>,
    mut calls: mpsc::UnboundedReceiver<Call>,
    complaints: Complaints,
) {
    let mut waiting = HashMap::new();
    for id in 1.. {
        let call = loop {
            tokio::select! {
                call = calls.recv() => match call {
                    Some(call) => break call,
                    None => return,
                },
                message = socket.next() => {
                    let Some(Ok(message)) = message else { return };
                    let Message::Text(text) = message else { continue };
                    let message: Value = serde_json::from_str(&text).unwrap();
                    match message["id"].as_u64().and_then(|id| waiting.remove(&id)) {
                        Some(answer) => drop(oneshot::Sender::<Value>::send(answer, message)),
                        None => if let Some(complaint) = complaint(&message) {
                            let session = message["sessionId"].as_str().unwrap_or_default().to_owned();
                            complaints.lock().unwrap().entry(session).or_default().push(complaint);
                        },
                    }
                }
            }
        };
        let Call { mut message, answer } = call;
        message["id"] = json!(id);
        waiting.insert(id, answer);
        if socket.send(Message::text(message.to_string())).await.is_err() {
            return;
        }
    }
}

/// The text of an event that no page may cause.
fn complaint(event: &Value) -> Option<String> {
    let parameters = &event["params"];
    // How noVNC reads its canvas.
    if event.to_string().contains("Canvas2D: Multiple readback operations") {
        return None;
    }
    match event["method"].as_str()? {
        "Log.entryAdded" if ["error", "warning"].contains(&parameters["entry"]["level"].as_str()?) => {
            Some(format!("{} {}", parameters["entry"]["text"], parameters["entry"]["url"]))
        }
        "Runtime.exceptionThrown" => Some(parameters["exceptionDetails"].to_string()),
        "Runtime.consoleAPICalled" if ["error", "warning", "assert"].contains(&parameters["type"].as_str()?) => {
            Some(parameters["args"].to_string())
        }
        _ => None,
    }
}

impl Page {
    async fn answer(&self, method: &str, parameters: Value) -> Value {
        let (sender, answer) = oneshot::channel();
        let mut message = json!({ "method": method, "params": parameters });
        if !self.session.is_empty() {
            message["sessionId"] = json!(self.session);
        }
        self.calls.send(Call { message, answer: sender }).unwrap();
        timeout(LIMIT, answer).await.unwrap_or_else(|_| panic!("no answer to {method}")).expect("Chromium goes on")
    }

    /// One more page of the same person.
    pub async fn another(&self) -> Self {
        let target = json!({ "url": "about:blank", "browserContextId": self.context });
        let browser = Self {
            session: String::new(),
            context: self.context.clone(),
            calls: self.calls.clone(),
            complaints: self.complaints.clone(),
            troubles: Mutex::default(),
        };
        let target = browser.call("Target.createTarget", target).await["targetId"].clone();
        let attached = browser.call("Target.attachToTarget", json!({ "targetId": target, "flatten": true })).await;
        let page = Self { session: attached["sessionId"].as_str().unwrap().to_owned(), ..browser };
        for domain in ["Page", "Runtime", "Log", "Network"] {
            page.call(&format!("{domain}.enable"), json!({})).await;
        }
        page.look(Look::default()).await;
        page
    }

    /// Calls a method of the protocol.
    pub async fn call(&self, method: &str, parameters: Value) -> Value {
        let answer = self.answer(method, parameters).await;
        assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
        answer["result"].clone()
    }

    /// The value of an expression. The error is that of a page that is just being left, or of the expression.
    pub async fn value(&self, expression: &str) -> Result<Value, String> {
        let parameters =
            json!({ "expression": expression, "awaitPromise": true, "returnByValue": true, "userGesture": true });
        let answer = self.answer("Runtime.evaluate", parameters).await;
        let (error, thrown) = (&answer["error"], &answer["result"]["exceptionDetails"]);
        match (error.is_null(), thrown.is_null()) {
            (true, true) => Ok(answer["result"]["result"]["value"].clone()),
            (false, _) => Err(error.to_string()),
            (_, false) => Err(thrown["exception"]["description"].to_string()),
        }
    }

    /// Loads a page.
    pub async fn open(&self, url: &str) {
        let answer = self.call("Page.navigate", json!({ "url": url })).await;
        assert!(answer["errorText"].is_null(), "{url}: {answer}");
        self.until("document.readyState === 'complete'").await;
    }

    /// Waits until an expression is true.
    pub async fn until(&self, expression: &str) {
        let is_true = async || (self.value(expression).await == Ok(json!(true))).then_some(());
        eventually(expression, LIMIT, is_true).await;
    }

    /// Waits until the page has this text, as people see it.
    pub async fn shows(&self, text: &str) {
        self.until(&format!("document.body?.innerText.includes({})", json!(text))).await;
    }

    /// Clicks into the middle of the first element, as soon as it is there and is seen.
    pub async fn click(&self, selector: &str) {
        let place = format!(
            "(() => {{ const it = document.querySelector({}); it?.scrollIntoView({{ block: 'nearest' }}); const box = it?.getBoundingClientRect(); \
             return box?.width ? [box.x + box.width / 2, box.y + box.height / 2] : null; }})()",
            json!(selector)
        );
        let place = eventually(&format!("{selector} to be seen"), LIMIT, async || {
            self.value(&place).await.ok().filter(|place| !place.is_null())
        })
        .await;
        for kind in ["mouseMoved", "mousePressed", "mouseReleased"] {
            let event = json!({ "type": kind, "x": place[0], "y": place[1], "button": if kind == "mouseMoved" { "none" } else { "left" }, "clickCount": 1 });
            self.call("Input.dispatchMouseEvent", event).await;
        }
    }

    /// Presses a key: a letter, a digit, or one with a name.
    pub async fn press(&self, key: &str) {
        let (code, number, text) = match key {
            "Enter" => ("Enter".to_owned(), 13, "\r"),
            "Escape" => ("Escape".to_owned(), 27, ""),
            "Tab" => ("Tab".to_owned(), 9, ""),
            "Backspace" => ("Backspace".to_owned(), 8, ""),
            "ArrowDown" => ("ArrowDown".to_owned(), 40, ""),
            "/" => ("Slash".to_owned(), 191, "/"),
            letter => {
                let upper = letter.to_uppercase();
                let number = upper.bytes().next().unwrap();
                let row = if number.is_ascii_digit() { "Digit" } else { "Key" };
                (format!("{row}{upper}"), i32::from(number), letter)
            }
        };
        for kind in [if text.is_empty() { "rawKeyDown" } else { "keyDown" }, "keyUp"] {
            let mut event = json!({ "type": kind, "key": key, "code": code, "windowsVirtualKeyCode": number });
            if kind == "keyDown" {
                event["text"] = json!(text);
            }
            self.call("Input.dispatchKeyEvent", event).await;
        }
    }

    /// Types into the field that has the focus.
    pub async fn write(&self, text: &str) {
        self.call("Input.insertText", json!({ "text": text })).await;
    }

    /// Clicks into a field, and types into it in the place of what it has.
    pub async fn fill(&self, selector: &str, text: &str) {
        self.click(selector).await;
        self.value(&format!("document.querySelector({}).select?.()", json!(selector))).await.unwrap();
        self.write(text).await;
    }

    /// Changes how the page is looked at. The language counts for the next page.
    pub async fn look(&self, look: Look) {
        let scheme = json!([{ "name": "prefers-color-scheme", "value": if look.dark { "dark" } else { "light" } }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": scheme })).await;
        let (width, height) = if look.phone { (390, 844) } else { (1280, 800) };
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": look.phone });
        self.call("Emulation.setDeviceMetricsOverride", size).await;
        let language = json!({ "headers": { "accept-language": if look.german { "de" } else { "en" } } });
        self.call("Network.setExtraHTTPHeaders", language).await;
    }

    /// Lets the page use the clipboard, as a person does whom the browser asks.
    pub async fn may_use_clipboard(&self) {
        let permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"];
        self.call("Browser.grantPermissions", json!({ "permissions": permissions, "browserContextId": self.context }))
            .await;
        self.call("Emulation.setFocusEmulationEnabled", json!({ "enabled": true })).await;
    }

    /// Notes what axe finds on the page as it is now, whether it is wider than the window, and what the browser has complained about. All of that is told at
    /// the end ([`Self::end`]), so that one run of a test finds everything.
    pub async fn is_good(&self) {
        let is_there = self.value("typeof axe === 'object'").await == Ok(json!(true));
        if !is_there {
            self.value(&format!("{AXE};true")).await.unwrap();
        }
        // Colours are compared when nothing moves any more.
        let found = self
            .value(
                "Promise.allSettled(document.getAnimations().filter((it) => it.effect.getTiming().iterations !== Infinity).map((it) => it.finished)).then(() => \
                 axe.run(document, { runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'] })).then((it) => \
                 it.violations.flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.failureSummary} ${node.html}`)) \
                 .concat(document.documentElement.scrollWidth > innerWidth ? ['it is wider than the window'] : []))",
            )
            .await
            .unwrap();
        self.note(found.as_array().unwrap().iter().map(Value::to_string)).await;
        self.is_content().await;
    }

    /// Notes what the browser has complained about since the last time.
    pub async fn is_content(&self) {
        // What it has complained about is sent before this answer.
        self.value("1").await.unwrap();
        let complaints = self.complaints.lock().unwrap().remove(&self.session).unwrap_or_default();
        self.note(complaints.into_iter()).await;
    }

    async fn note(&self, troubles: impl Iterator<Item = String>) {
        let url = self.value("location.pathname + location.search").await.unwrap();
        let mut noted = self.troubles.lock().unwrap();
        noted.extend(troubles.map(|trouble| format!("{url}: {trouble}")));
    }

    /// Asserts that nothing was wrong on any page.
    pub async fn end(self) {
        self.is_content().await;
        let troubles = self.troubles.lock().unwrap();
        assert!(troubles.is_empty(), "{}", troubles.join("\n"));
    }

    /// Writes a picture of the page for the documentation, if that is asked for. `namespace`: the name of the test's, which nobody needs to see.
    pub async fn picture(&self, name: &str, namespace: &str) {
        if std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_none_or(|value| value != "1") {
            return;
        }
        let rename = format!(
            "(() => {{ const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); \
             while (texts.nextNode()) texts.currentNode.data = texts.currentNode.data.replaceAll({}, 'lab'); document.activeElement?.blur(); }})()",
            json!(namespace)
        );
        self.value(&rename).await.unwrap();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        for (format, folder) in [("webp", "docs/images"), ("png", ".dev/pictures")] {
            let options =
                if format == "webp" { json!({ "format": format, "quality": 80 }) } else { json!({ "format": format }) };
            let data = self.call("Page.captureScreenshot", options).await["data"].clone();
            let k8s_openapi::ByteString(bytes) = serde_json::from_value(data).unwrap();
            std::fs::create_dir_all(root.join(folder)).unwrap();
            std::fs::write(root.join(folder).join(format!("{name}.{format}")), bytes).unwrap();
        }
    }
}
