//! The web interface in a real browser: its pages, what happens on them without a reload, and the guest's screen and serial console.
//!
//! Each page is looked at by axe, and none may be complained about by the browser, which also says what the page's policy has refused.
//! With `VM_OPERATOR_TEST_UPDATE=1` the pictures in `docs/images` are written anew.

mod chromium;
mod real_provider;

use std::{
    fs,
    net::Ipv4Addr,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use futures::{StreamExt, stream};
use kube::api::{Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader},
    net::UnixStream,
    sync::watch,
};
use vm_operator::{
    api::VirtualMachine,
    runner::{
        console,
        control::{Asked, Control},
        ctl,
        monitor::Monitor,
        qmp::Qmp,
        relay::{self, RelayOptions, RelayState},
        runtime_dir::RuntimeDir,
    },
};

use self::chromium::{Chromium, Look, Page};
use super::{TOKEN, Web, configuration};
use crate::support::{cluster::eventually, managed_namespace::LIMIT};

const DARK: Look = Look { dark: true, phone: false, german: false };
const PHONE: Look = Look { dark: false, phone: true, german: false };
const GERMAN: Look = Look { dark: false, phone: false, german: true };

impl Page {
    /// Signs a user in.
    async fn sign_in(&self, web: &Web, user: &str) {
        self.open(&format!("http://{}/sign-in", web.address)).await;
        self.fill("#user", user).await;
        self.fill("#password", "secret").await;
        self.press("Enter").await;
        self.until("location.pathname !== '/sign-in' && document.readyState === 'complete'").await;
    }

    async fn go(&self, web: &Web, path: &str) {
        self.open(&format!("http://{}{path}", web.address)).await;
    }
}

fn condition(type_: &str, status: &str, message: &str) -> Value {
    json!({ "type": type_, "status": status, "reason": "R", "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" })
}

/// The status of a VM whose guest runs.
fn running(node: &str, address: &str) -> Value {
    json!({
        "phase": "Running", "cpus": 2, "ram": "4Gi", "nodeName": node, "relayPort": 10443,
        "addresses": [{ "type": "PodIP", "address": address }], "conditions": [condition("Running", "True", ""), condition("Ready", "True", "")],
    })
}

impl Web {
    /// Creates VMs as a user would have them.
    async fn create_some(&self) {
        let create = async |name: &str, state: &str, edit: Value| {
            let mut vm = json!({
                "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name },
                "spec": {
                    "permissions": [{ "user": "ann", "may": ["start", "stop", "reset", "accessConsole"] }],
                    "vm": { "state": state, "maximumCpus": 4, "maximumRam": "8Gi", "currentCpus": 2, "currentRam": "4Gi" },
                },
            });
            json_patch::merge(&mut vm, &edit);
            self.vms().create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
        };
        let nobodys = json!({ "spec": { "permissions": [] } });
        for (number, name) in ["db-1", "db-2", "mail", "web-1", "web-2", "web-3"].into_iter().enumerate() {
            create(name, "Running", if name.starts_with("web") { json!({}) } else { nobodys.clone() }).await;
            let node = ["n1", "n2", "n3"][number % 3];
            self.set_status(name, running(node, &format!("10.0.{number}.7"))).await;
        }
        create("build-1", "Stopped", json!({})).await;
        self.set_status("build-1", json!({ "phase": "Stopped", "conditions": [condition("Running", "False", "")] }))
            .await;
        create("build-2", "Running", nobodys.clone()).await;
        let waits = "0/3 nodes are available: 3 Insufficient memory.";
        self.set_status("build-2", json!({ "phase": "Starting", "conditions": [condition("Ready", "False", waits)] }))
            .await;
        create("old", "Running", nobodys).await;
        let fails = "The disk image https://images.example.com/old.qcow2 does not exist.";
        self.set_status("old", json!({ "phase": "Failed", "conditions": [condition("Ready", "False", fails)] })).await;
        let mut used = running("n2", "10.0.9.7");
        used["consoleClient"] = json!("bob");
        used["pendingChanges"] = json!([{ "path": "spec.vm.maximumRam", "reason": "r" }]);
        used["conditions"].as_array_mut().unwrap().push(condition("ConsoleConnected", "True", ""));
        self.set_status("web-2", used).await;
    }
}

#[tokio::test]
async fn people_see_their_vms_and_act_on_them() {
    let web = Web::new("browser-pages", &configuration(&["admin", "ann"])).await;
    web.create_some().await;
    let browser = Chromium::start().await;
    let (admin, space) = (browser.page().await, web.namespace.name());
    admin.go(&web, "/").await;
    admin.shows("Password").await;
    admin.is_good().await;
    admin.sign_in(&web, "admin").await;
    let visible = "[...document.querySelectorAll('#rows [data-vm]:not([hidden])')].map((row) => row.dataset.vm.split('/')[1]).join()";
    let shows = async |names: &str| admin.until(&format!("{visible} === {}", json!(names))).await;
    shows("build-1,build-2,db-1,db-2,mail,old,web-1,web-2,web-3").await;
    admin.shows("3 Insufficient memory").await;
    admin.is_good().await;
    admin.picture("list", space).await;

    // The filter is in the address, and its words come with a click, too. Keys lead through the list.
    admin.press("/").await;
    admin.write("web node:n1").await;
    shows("web-1").await;
    admin.until("location.search === '?q=web+node%3An1'").await;
    admin.fill("#filter", "").await;
    admin.press("Backspace").await;
    admin.click("#states [data-state=Failed]").await;
    shows("old").await;
    admin.go(&web, "/vms?q=state:running,failed&group=node").await;
    shows("old,db-1,web-1,db-2,web-2,mail,web-3").await;
    admin
        .until(
            "[...document.querySelectorAll('.group')].map((it) => it.textContent).join() === '(none) 1,n1 2,n2 2,n3 2'",
        )
        .await;
    admin.is_good().await;
    admin.go(&web, "/vms").await;
    admin.press("j").await;
    admin.press("j").await;
    admin.until("document.activeElement.textContent === 'build-2'").await;

    // Several at once, with a question before; then one. The page stays, and shows what becomes of them.
    admin.value("globalThis.mark = 1").await.unwrap();
    admin.fill("#filter", "state:running web").await;
    admin.press("Enter").await;
    shows("web-1,web-2,web-3").await;
    admin.click("#all").await;
    admin.shows("3 selected").await;
    admin.is_good().await;
    admin.picture("selection", space).await;
    admin.click("#bulk [value=stop]").await;
    admin.shows("Shut down these 3 VMs?").await;
    admin.is_good().await;
    admin.click("#ask button:not([value])").await;
    admin.until("!document.querySelector('dialog[open]')").await;
    assert_eq!(json!(web.vms().get("web-1").await.unwrap().spec.vm.state), "Running", "she did not mean it");
    admin.click("#bulk [value=stop]").await;
    admin.click("#ask [value=yes]").await;
    for name in ["web-1", "web-2", "web-3"] {
        eventually("the VM to be stopped", LIMIT, async || {
            let vm = web.vms().get(name).await.unwrap();
            (json!(vm.spec.vm.state) == "Stopped").then_some(())
        })
        .await;
    }
    admin.until("!document.querySelector('#rows input:checked')").await;
    admin.fill("#filter", "mail").await;
    shows("mail").await;
    admin.click("[data-vm$='/mail'] .more").await;
    admin.is_good().await;
    admin.click("#menu [value=reset]").await;
    admin.shows("Reset mail?").await;
    admin.click("#ask [value=yes]").await;
    eventually("the guest to be reset", LIMIT, async || web.vms().get("mail").await.unwrap().spec.vm.reset_count).await;
    admin.fill("#filter", "build").await;
    web.set_status("build-2", running("n3", "10.0.10.7")).await;
    admin.shows("10.0.10.7").await;
    assert_eq!(admin.value("globalThis.mark").await, Ok(json!(1)), "nothing was loaded again");
    admin.is_content().await;

    // A tab that nobody sees keeps no connection, and goes on where it was.
    let hide = "Object.defineProperty(document, 'hidden', { get: () => globalThis.hides, configurable: true }); \
                globalThis.turn = (hides) => { globalThis.hides = hides; document.dispatchEvent(new Event('visibilitychange')); }; turn(true)";
    admin.value(hide).await.unwrap();
    let other = browser.page().await;
    other.sign_in(&web, "admin").await;
    web.set_status("build-2", running("n3", "10.0.11.7")).await;
    other.shows("10.0.11.7").await;
    other.end().await;
    admin.until("!document.body.innerText.includes('10.0.11.7')").await;
    admin.value("turn(false)").await.unwrap();
    admin.shows("10.0.11.7").await;
    assert_eq!(admin.value("globalThis.mark").await, Ok(json!(1)), "nothing was loaded again");

    // Ctrl-K finds VMs, what may be done with them, and pages.
    admin
        .value("document.dispatchEvent(new KeyboardEvent('keydown', { key: 'k', ctrlKey: true, cancelable: true }))")
        .await
        .unwrap();
    let entries =
        "[...document.querySelectorAll('#found li')].map((it) => it.innerText.replace(/\\s+/g, ' ').trim()).join()";
    admin.until(&format!("{entries}.includes('Templates')")).await;
    admin.write("build").await;
    admin.until(&format!("{entries}.startsWith('build-1') && {entries}.includes('Start: build-1')")).await;
    admin.is_good().await;
    admin.picture("palette", space).await;
    admin.write("-2 stop").await;
    admin.until(&format!("{entries} === 'Shut down: build-2 {space}'")).await;
    admin.press("Enter").await;
    admin.shows("Shut down build-2?").await;
    admin.click("#ask [value=yes]").await;
    admin.shows("Done: Shut down build-2").await;
    assert_eq!(json!(web.vms().get("build-2").await.unwrap().spec.vm.state), "Stopped");
    admin.click("#palette-open").await;
    admin.fill("#palette input", "pools").await;
    admin.until(&format!("{entries} === 'Pools'")).await;
    admin.press("ArrowDown").await;
    admin.press("Enter").await;
    admin.until("location.pathname === '/pools'").await;

    for (look, name) in [(DARK, "list-dark"), (PHONE, "list-phone"), (GERMAN, "list-german")] {
        admin.look(look).await;
        admin.go(&web, "/vms").await;
        admin.shows(if look.german { "Läuft" } else { "Running" }).await;
        admin.is_good().await;
        if !look.german {
            admin.picture(name, space).await;
        }
    }
    admin.look(Look::default()).await;
    admin.go(&web, &web.path("build-2", "")).await;
    admin.fill("#size-cpus", "3").await;
    admin.click(".fields button").await;
    eventually("three CPUs", LIMIT, async || {
        (web.vms().get("build-2").await.unwrap().spec.vm.current_cpus == Some(3)).then_some(())
    })
    .await;
    admin.is_good().await;
    admin.go(&web, &web.path("old", "")).await;
    admin.shows("does not exist").await;
    admin.is_good().await;
    admin.picture("detail", space).await;
    admin.click("#commands summary").await;
    admin.shows("kubectl vm explain old -n ").await;
    admin.is_good().await;

    let page = browser.page().await;
    page.sign_in(&web, "ann").await;
    page.shows("build-1").await;
    page.is_good().await;
    page.picture("home", space).await;
    page.click("#palette-open").await;
    page.until(&format!(
        "{entries}.includes('build-1') && {entries}.endsWith('My VMs') && !{entries}.includes('mail')"
    ))
    .await;
    page.is_good().await;
    page.press("Escape").await;
    page.click("[formaction$='/build-1/start']").await;
    eventually("the VM to be started", LIMIT, async || {
        (json!(web.vms().get("build-1").await.unwrap().spec.vm.state) == "Running").then_some(())
    })
    .await;
    web.set_status(
        "build-1",
        json!({ "phase": "Starting", "conditions": [condition("Ready", "False", "pulls the image")] }),
    )
    .await;
    page.shows("pulls the image").await;
    for look in [DARK, PHONE, GERMAN] {
        page.look(look).await;
        page.go(&web, "/home").await;
        page.shows("build-1").await;
        page.is_good().await;
    }
    page.end().await;
    admin.end().await;
}

#[tokio::test]
async fn an_administrator_creates_a_vm_and_sees_of_what_it_is_made() {
    let web = Web::new("browser-create", &configuration(&["admin"])).await;
    web.keep_templates(&[("pod.yaml.j2", "{% extends \"builtin/pod.yaml.j2\" %}")], false).await;
    let browser = Chromium::start().await;
    let (page, space) = (browser.page().await, web.namespace.name());
    page.sign_in(&web, "admin").await;
    let fill_user = async || {
        page.fill("#user", "ann").await;
        page.fill("#keys", "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIOMqqnkVzrm0SdG6UOoqKLsabgH5C9okWi0dh2l9GKJl ann@desk")
            .await;
    };
    page.click("a[href='/vms/new']").await;
    page.until("location.pathname === '/vms/new' && document.readyState === 'complete'").await;
    page.is_good().await;
    // The answer comes while she types, and what she has typed stays.
    page.fill("#name", "Web_1").await;
    fill_user().await;
    page.until("document.getElementById('name-problem').textContent.includes('RFC 1123')").await;
    page.until("document.getElementById('name').hasAttribute('aria-invalid') && document.activeElement.id === 'keys'")
        .await;
    page.is_good().await;
    page.picture("create", space).await;
    // The picture has another name in the place of the namespace's.
    page.go(&web, "/vms/new").await;
    page.fill("#name", "Web_1").await;
    fill_user().await;
    page.until("document.getElementById('name').hasAttribute('aria-invalid')").await;
    page.fill("#name", "web").await;
    page.shows("would create this VM").await;
    page.until("!document.getElementById('name').hasAttribute('aria-invalid')").await;
    page.until("document.getElementById('yaml').textContent.includes('name: web\\n')").await;
    page.value("navigator.clipboard.writeText = async (text) => { globalThis.copied = text; }").await.unwrap();
    page.click("[data-copy=command]").await;
    page.until("globalThis.copied?.startsWith('kubectl vm create web ')").await;
    for look in [DARK, PHONE, GERMAN] {
        page.look(look).await;
        page.go(&web, "/vms/new").await;
        page.shows("YAML").await;
        page.is_good().await;
    }
    page.look(Look::default()).await;
    page.go(&web, "/vms/new").await;
    page.fill("#name", "web").await;
    fill_user().await;
    page.click("#create .main").await;
    page.until("location.pathname.endsWith('/web')").await;

    let refused = json!([{ "type": "TemplatesValid", "status": "True", "reason": "NewerRefused", "message": "pod.yaml.j2:3:1: there is no block \"label\" in builtin/pod.yaml.j2", "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
    let mut status = running("n1", "10.0.0.7");
    status["conditions"].as_array_mut().unwrap().push(refused[0].clone());
    status["templates"] = json!({ "set": "import-disk", "version": "5d1f9c02" });
    status["pendingChanges"] = json!([
        { "path": "objects/Pod/spec.containers[vm-runner].image", "current": "ghcr.io/example/runner:1.0", "wanted": "ghcr.io/example/runner:1.1", "reason": "r" },
        { "path": "config.yaml/vm.maximumRam", "current": "4GiB", "wanted": "8GiB", "reason": "r" },
    ]);
    web.set_status("web", status).await;
    page.shows("runner:1.1").await;
    page.is_good().await;
    page.picture("changes", space).await;
    page.go(&web, "/templates").await;
    page.shows("there is no block").await;
    page.is_good().await;
    page.picture("templates", space).await;
    let plain = json!({ "metadata": { "name": "plain" }, "spec": { "vm": { "state": "Stopped", "maximumCpus": 2, "maximumRam": "1Gi" } } });
    web.vms().create(&PostParams::default(), &serde_json::from_value(plain).unwrap()).await.unwrap();
    // The page of a VM that the web interface does not know yet would be a complaint of the browser.
    page.go(&web, "/vms").await;
    page.shows("plain").await;
    let objects = web.path("plain", "/objects");
    eventually("its objects", LIMIT, async || {
        page.go(&web, &objects).await;
        (page.value("document.querySelectorAll('.object').length > 2").await == Ok(json!(true))).then_some(())
    })
    .await;
    page.shows("builtin/pod.yaml.j2").await;
    page.click("details summary").await;
    page.is_good().await;
    for look in [DARK, PHONE, GERMAN] {
        page.look(look).await;
        for path in ["/templates", &web.path("web", ""), &objects] {
            page.go(&web, path).await;
            page.is_good().await;
        }
    }
    page.end().await;
}

#[tokio::test]
async fn somebody_gets_a_vm_of_a_pool_and_waits_for_its_console() {
    let web = Web::new("browser-pools", &configuration(&["admin", "ann"])).await;
    let permissions = json!([{ "user": "ann", "may": ["accessConsole"] }]);
    web.create_pool("desktops", permissions).await;
    for number in 1..=8 {
        web.create_member(&format!("desktop-{number}"), "desktops").await;
    }
    let used = |user: &str, hours| {
        let at = k8s_openapi::jiff::Timestamp::now() - k8s_openapi::jiff::SignedDuration::from_hours(hours);
        json!({ "assignment": { "pool": "desktops", "user": user, "lastUsed": at.strftime("%FT%TZ").to_string() } })
    };
    web.set_status("desktop-2", running("n1", "10.0.1.2")).await;
    web.set_status("desktop-3", used("bob", 0)).await;
    web.set_status("desktop-4", used("carol", 3)).await;
    let browser = Chromium::start().await;
    let (page, space) = (browser.page().await, web.namespace.name());
    page.sign_in(&web, "ann").await;
    page.shows("desktops").await;
    page.is_good().await;
    page.click("form[action$='/start'] button").await;
    page.until("location.pathname.endsWith('/console')").await;
    // The one that runs is the first.
    page.shows("desktop-2").await;
    page.is_good().await;
    page.go(&web, "/home").await;
    page.shows("Give back").await;
    page.is_good().await;

    let admin = browser.page().await;
    admin.sign_in(&web, "admin").await;
    admin.go(&web, "/pools").await;
    admin.shows("ann").await;
    admin.is_good().await;
    admin.picture("pools", space).await;
    page.click("[formaction$='/release']").await;
    page.click("#ask [value=yes]").await;
    page.until("document.querySelector('form[action$=\"/start\"]') !== null").await;
    admin.until("![...document.querySelectorAll('tbody th')].some((it) => it.textContent === 'ann')").await;
    page.end().await;
    admin.end().await;
}

/// A guest with an empty disk, whose firmware has a menu on its screen and on its serial console, and the relay of its Pod.
struct Guest {
    qemu: Child,
    folder: TempDir,
    _ends: watch::Sender<bool>,
    port: u16,
    certificate: String,
    /// How much of its serial console is from before it was reset.
    said: AtomicUsize,
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

impl Guest {
    async fn start() -> Self {
        let folder = TempDir::new().unwrap();
        let (runtime, secret) = (RuntimeDir::open(&folder.path().join("run")).unwrap(), folder.path().join("relay"));
        let (serial, disk) = (folder.path().join("serial"), folder.path().join("disk"));
        fs::write(&disk, vec![0; 1 << 20]).unwrap();
        let qemu = Command::new("qemu-system-x86_64")
            .args([
                "-machine",
                "pc,accel=kvm:tcg,graphics=off",
                "-nodefaults",
                "-device",
                "virtio-vga",
                "-display",
                "none",
            ])
            .args(["-drive", &format!("file={},format=raw,if=ide", disk.display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", runtime.monitor().display())])
            .args(["-qmp", &format!("unix:{},server=on,wait=off", folder.path().join("qmp").display())])
            .args([
                "-trace",
                "vnc_msg_client_set_desktop_size",
                "-D",
                &folder.path().join("trace").display().to_string(),
            ])
            .args(["-boot", "menu=on,splash-time=65000", "-vnc", &format!("unix:{}", runtime.vnc().display())])
            .args([
                "-chardev",
                &format!("socket,id=serial,path={},server=on,wait=off", serial.display()),
                "-serial",
                "chardev:serial",
            ])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let serial =
            eventually("the guest's serial console", LIMIT, async || UnixStream::connect(&serial).await.ok()).await;
        let (socket, log) = (runtime.console(), folder.path().join("serial.log"));
        tokio::spawn(async move { console::serve(serial, &socket, &log).await });

        // What the machine role does in a Pod.
        let qmp = eventually("the guest's monitor", LIMIT, async || Qmp::connect(&runtime.monitor()).await.ok()).await;
        let mut monitor = Monitor::new(qmp, runtime.monitor());
        let mut control = Control::listen(&runtime, folder.path()).unwrap();
        tokio::spawn(async move {
            loop {
                if let Asked::Task(request) = control.asked().await {
                    let reply = ctl::carry_out(&request.task, request.picture.clone(), &mut monitor).await;
                    request.answer(reply);
                }
            }
        });

        let certified = rcgen::generate_simple_self_signed(["relay".to_owned()]).unwrap();
        let certificate = certified.cert.pem();
        fs::create_dir(&secret).unwrap();
        for (name, content) in [
            ("tls.crt", certificate.clone()),
            ("tls.key", certified.signing_key.serialize_pem()),
            ("token", TOKEN.to_owned()),
        ] {
            fs::write(secret.join(name), content).unwrap();
        }
        let (state, mut listens) = watch::channel(RelayState::default());
        let (ends, ended) = watch::channel(false);
        tokio::spawn(relay::serve(RelayOptions { folder: secret, port: 0, runtime }, state, ended));
        let port = listens.wait_for(|state| state.port.is_some()).await.unwrap().port.unwrap();
        Self { qemu, folder, _ends: ends, port, certificate, said: AtomicUsize::new(0) }
    }

    /// Resets it: its firmware waits for a key for a minute only. What it has said before does not count any more.
    async fn reset(&self) {
        self.said.store(self.log().len(), Ordering::Relaxed);
        let mut monitor = BufReader::new(UnixStream::connect(self.folder.path().join("qmp")).await.unwrap());
        for command in ["qmp_capabilities", "system_reset"] {
            monitor.get_mut().write_all(format!("{{ \"execute\": \"{command}\" }}\n").as_bytes()).await.unwrap();
            let mut line = String::new();
            while !line.starts_with("{\"return\"") {
                line.clear();
                assert_ne!(monitor.read_line(&mut line).await.unwrap(), 0, "{command}");
            }
        }
    }

    /// Waits until the firmware has said that. It says the same on the screen and on the serial console.
    async fn says(&self, text: &str) {
        eventually(text, LIMIT, async || self.log()[self.said.load(Ordering::Relaxed)..].contains(text).then_some(()))
            .await;
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("serial.log")).unwrap_or_default()
    }

    /// What the VM's status says of it.
    fn status(&self) -> Value {
        let mut status = running("n1", &Ipv4Addr::LOCALHOST.to_string());
        status["relayPort"] = json!(self.port);
        status
    }

    fn secret(&self, vm: &str) -> String {
        let content = json!({ "tls.crt": self.certificate, "token": TOKEN });
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": format!("{vm}-relay") }, "stringData": content })
            .to_string()
    }
}

/// How many points of the guest's screen are not dark.
const BRIGHT: &str = "(() => { const it = document.querySelector('#screen canvas'); if (!it?.width) return 0; \
                      const copy = new OffscreenCanvas(it.width, it.height).getContext('2d', { willReadFrequently: true }); copy.drawImage(it, 0, 0); \
                      const of = copy.getImageData(0, 0, it.width, it.height).data; \
                      let count = 0; for (let at = 0; at < of.length; at += 4) if (of[at] + of[at + 1] + of[at + 2] > 150) count++; return count; })()";

/// Fewer than the firmware's first two lines have, which are about 1,540: how many exactly depends on its cursor, and on how the picture was compressed.
/// Its menu has four lines more.
const SOME_TEXT: u32 = 1_000;

#[tokio::test]
async fn the_guests_screen_is_in_the_page_and_what_is_typed_reaches_the_guest() {
    let web = Web::new("browser-console", &configuration(&["admin", "ann"])).await;
    web.create_vm("apple", json!([{ "user": "ann", "may": ["accessConsole"] }])).await;
    let guest = Guest::start().await;
    web.namespace.create(&guest.secret("apple")).await;
    let shared = Patch::Merge(json!({ "spec": { "vm": { "display": { "clipboard": "vnc" } } } }));
    web.vms().patch("apple", &PatchParams::default(), &shared).await.unwrap();
    web.set_status("apple", guest.status()).await;
    let browser = Chromium::start().await;
    let (page, space) = (browser.page().await, web.namespace.name());
    page.sign_in(&web, "ann").await;
    // A small picture of the screen, and what the guest uses.
    let pictured = "document.querySelector('[data-vm] img')?.naturalWidth > 100";
    page.until(pictured).await;
    page.is_good().await;
    page.go(&web, &web.path("apple", "")).await;
    let figures = "[...document.querySelectorAll('#figures:not([hidden]) .value')].map((it) => it.textContent)";
    page.until(&format!("{figures}.length === 4 && {figures}[0].endsWith('%') && {figures}[3].includes('B/s')")).await;
    page.until("document.querySelector('#figures .first').getAttribute('points').split(' ').length > 1").await;
    page.is_good().await;
    page.picture("figures", space).await;
    let admin = browser.page().await;
    admin.sign_in(&web, "admin").await;
    assert_eq!(admin.value("document.querySelector('#rows img') === null").await, Ok(json!(true)), "the list is dense");
    admin.click("#screens").await;
    admin.until(&pictured.replace("[data-vm]", "#rows [data-vm]")).await;
    admin.is_good().await;
    admin.end().await;
    page.go(&web, "/home").await;
    guest.reset().await;
    page.click("[data-vm] a.main[href$='/console']").await;
    // The firmware says which key opens its menu.
    page.until(&format!("document.body.classList.contains('connected') && {BRIGHT} > {SOME_TEXT}")).await;
    page.is_good().await;
    page.click("#screen canvas").await;
    guest.says("Press ESC").await;
    page.press("Escape").await;
    guest.says("Select boot device").await;
    page.until(&format!("{BRIGHT} > 2 * {SOME_TEXT}")).await;
    page.picture("console", space).await;
    page.is_content().await;

    // The guest's screen as large as the window, if its driver follows.
    assert_eq!(fs::read_to_string(guest.folder.path().join("trace")).unwrap_or_default(), "");
    page.click("#console-resize").await;
    eventually("QEMU to be told the window's size", LIMIT, async || {
        fs::read_to_string(guest.folder.path().join("trace")).ok()?.contains("set_desktop_size").then_some(())
    })
    .await;
    page.click("#console-resize").await;

    // The clipboard, once the person wants that: QEMU gives it to the guest's agent, and to another window of the same person.
    let window = page.another().await;
    window.go(&web, &web.path("apple", "/console")).await;
    window.until("document.body.classList.contains('connected')").await;
    for one in [&window, &page] {
        one.may_use_clipboard().await;
    }
    // As if it were on another computer, whose clipboard is empty.
    let other = "navigator.clipboard.writeText = async (text) => { window.copied = text; }; navigator.clipboard.readText = async () => ''; true";
    window.value(other).await.unwrap();
    window.click("#console-clipboard").await;
    page.value("navigator.clipboard.writeText('of ann, also ü').then(() => true)").await.unwrap();
    page.click("#console-clipboard").await;
    window.until("window.copied === 'of ann, also ü'").await;
    window.is_good().await;
    window.end().await;

    // The serial console of the same guest: its menu again, from the relay's memory. A number chooses from it.
    page.go(&web, &web.path("apple", "/serial")).await;
    let text = "document.querySelector('.xterm-rows')?.textContent ?? ''";
    page.until(&format!("document.body.classList.contains('connected') && ({text}).includes('boot device')")).await;
    page.is_good().await;
    page.picture("serial", space).await;
    page.click("#screen").await;
    page.press("1").await;
    page.until(&format!("({text}).includes('Booting from')")).await;
    page.end().await;
}

#[tokio::test]
async fn the_list_of_a_thousand_vms() {
    let web = Web::new("browser-many", &configuration(&["admin"])).await;
    let vms = web.vms();
    let create = async |number: usize| {
        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": format!("vm-{number:04}") },
            "spec": { "vm": { "state": "Stopped", "maximumCpus": 2, "maximumRam": "1Gi" } },
        });
        let vm: VirtualMachine = serde_json::from_value(vm).unwrap();
        vms.create(&PostParams::default(), &vm).await.unwrap();
    };
    stream::iter(0..1000).for_each_concurrent(16, create).await;
    let browser = Chromium::start().await;
    let page = browser.page().await;
    page.sign_in(&web, "admin").await;
    page.until("document.querySelectorAll('[data-vm]').length === 1000").await;
    web.set_status("vm-0500", json!({ "phase": "Failed" })).await;
    page.until("document.querySelector('[data-vm$=\"vm-0500\"]').innerText.includes('Failed')").await;
    page.end().await;
}
