//! Connection files for remote-viewer. The test plays the runner, which sets the password of the display secret.

use std::fs;

use k8s_openapi::{
    ByteString,
    api::core::v1::{Event, Secret},
    jiff::Timestamp,
};
use kube::{
    Api,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{Answer, Browser, LIMIT, Web, configuration};
use crate::support::cluster::eventually;

/// The configuration with keys of `/VmAccess` and of the display secret.
fn with(users: &[&str], access: Value, validity: Value) -> String {
    let mut file: Value = serde_json::from_str(&configuration(users)).unwrap();
    let console = &mut file["/Manager"]["/GuiHttpServer"]["/ConsoleWeblet"]["/WebConsole"];
    console["/ComponentCollector"] = json!({ "/VmAccess": access });
    file["/Manager"]["/Controller"] =
        json!({ "/Reconciler": { "/DisplaySecretReconciler": { "passwordValidity": validity } } });
    file.to_string()
}

fn condition(type_: &str, status: &str) -> Value {
    json!({ "type": type_, "status": status, "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" })
}

fn running(is_used: &str) -> Value {
    json!({
        "phase": "Running", "conditions": [condition("Running", "True"), condition("ConsoleConnected", is_used)],
        "addresses": [{ "type": "PodIP", "address": "10.0.0.1" }, { "type": "PodIP", "address": "fd00::1" }],
    })
}

impl Web {
    fn secrets(&self) -> Api<Secret> {
        Api::namespaced(self.client.clone(), self.namespace.name())
    }

    /// The password of `apple` and its end.
    async fn password(&self) -> (String, String) {
        let data = self.secrets().get("apple-display-secret").await.unwrap().data.unwrap();
        let text = |key: &str| String::from_utf8(data[key].0.clone()).unwrap();
        (text("display-password"), text("password-expiry"))
    }

    /// Asks for the file, and plays the runner: it reports the password that is in the Secret then.
    async fn file(&self, browser: &Browser) -> Answer {
        let (path, former) = (self.path("apple", "/connection"), self.password().await);
        let runner = async {
            let (_, end) =
                eventually("a new password", LIMIT, async || Some(self.password().await).filter(|now| *now != former))
                    .await;
            self.set_status("apple", json!({ "displayPasswordExpiry": end })).await;
        };
        tokio::join!(browser.post(&path, ""), runner).0
    }
}

fn lines(answer: &Answer) -> Vec<&str> {
    // Chunks begin with their length.
    answer.body.lines().filter(|line| line.contains('=') || line.starts_with('[')).collect()
}

#[tokio::test]
async fn a_connection_file_has_a_password_for_its_person() {
    let users = ["admin", "ann", "start", "take", "other"];
    let access = json!({ "displayResource": { "preferredIpVersion": "ipv6" }, "syncPreviewsFor": [] });
    let web = Web::new("web-files", &with(&users, access, json!(3600))).await;
    let may = |user: &str, right: &str| json!({ "user": user, "may": [right] });
    web.create_vm("apple", json!([may("ann", "accessConsole"), may("start", "start"), may("take", "takeConsole")]))
        .await;
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "apple-display-secret" },
        "stringData": { "display-password": "former", "password-expiry": "now" },
    });
    web.namespace.create(&secret.to_string()).await;
    let path = web.path("apple", "/connection");
    let (ann, take) = (web.sign_in("ann").await, web.sign_in("take").await);
    // Who may not, and a VM that does not run.
    assert_eq!(web.nobody().post(&path, "").await.status, 401);
    for (user, status) in [("other", 404), ("start", 403), ("ann", 409), ("admin", 409)] {
        assert_eq!(web.sign_in(user).await.post(&path, "").await.status, status, "{user}");
    }
    assert_eq!(ann.send("POST", &path, &[("origin", "https://evil.example")], "").await.status, 403);
    assert_eq!(web.password().await.0, "former", "nothing was written");

    web.set_status("apple", running("False")).await;
    let button = format!("action=\"/vms/{}&#x2f;apple/connection\"", web.namespace.name());
    for page in ["/home", &web.path("apple", "")] {
        eventually("the button", LIMIT, async || ann.get(page).await.body.contains(&button).then_some(())).await;
        assert!(!web.sign_in("start").await.get(page).await.body.contains(&button), "{page}");
    }
    let before = Timestamp::now().as_second();
    let answer = web.file(&ann).await;
    let (password, end) = web.password().await;
    let id = format!("title={}/apple", web.namespace.name());
    let expected = [
        "[virt-viewer]",
        "type=spice",
        "host=fd00::1",
        "port=5900",
        &format!("password={password}"),
        &id,
        "enable-usbredir=1",
        "delete-this-file=1",
    ];
    assert_eq!((answer.status, lines(&answer)), (200, expected.to_vec()), "{}", answer.body);
    assert_eq!(answer.header("content-type"), Some("application/x-virt-viewer"));
    assert_eq!(answer.header("content-disposition"), Some("attachment; filename=\"apple.vv\""));
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    let end: i64 = end.parse().unwrap();
    assert!(password.len() == 22 && (before + 3600..=Timestamp::now().as_second() + 3600).contains(&end), "{end}");
    let vm = web.vms().get("apple").await.unwrap();
    assert_eq!(vm.status.unwrap().display.console_user.as_deref(), Some("ann"));
    let secret = web.secrets().get("apple-display-secret").await.unwrap();
    let managers: Vec<_> =
        secret.metadata.managed_fields.unwrap().into_iter().filter_map(|entry| entry.manager).collect();
    assert!(managers.contains(&"vm-operator-web".to_owned()), "{managers:?}");
    // It is still good for her; another person gets another one.
    let again = ann.post(&path, "").await;
    assert!(lines(&again).contains(&format!("password={password}").as_str()), "{}", again.body);
    let other = web.file(&take).await;
    assert!(other.status == 200 && !other.body.contains(&password), "{}", other.body);
    let events: Api<Event> = Api::namespaced(web.client.clone(), web.namespace.name());
    eventually("the events", LIMIT, async || {
        let about = ListParams::default().fields("involvedObject.name=apple,reason=WebConnection");
        (!events.list(&about).await.unwrap().items.is_empty()).then_some(())
    })
    .await;

    // Somebody is at the console: only she herself and who may take it.
    let mut used = running("True");
    used["consoleClient"] = json!("192.0.2.1");
    web.set_status("apple", used).await;
    assert_eq!(ann.post(&path, "").await.status, 409, "take has it");
    assert_eq!(take.post(&path, "").await.status, 200);
    web.set_status("apple", running("False")).await;

    // Other keys.
    let change = async |access: Value| {
        let file = web.folder.path().join("config.yaml");
        let log = || fs::read_to_string(web.folder.path().join("log")).unwrap();
        let before = log().len();
        fs::write(file, with(&users, access, json!(60))).unwrap();
        eventually("the configuration", LIMIT, async || log()[before..].contains("has changed").then_some(())).await;
    };
    change(json!({ "preferredIpVersion": "ipv4", "deleteConnectionFile": false })).await;
    let never = json!({ "data": { "password-expiry": ByteString(b"never".to_vec()) } });
    web.secrets().patch("apple-display-secret", &PatchParams::default(), &Patch::Merge(never)).await.unwrap();
    web.set_status("apple", json!({ "displayPasswordExpiry": "never" })).await;
    let answer = take.post(&path, "").await;
    let (password, _) = web.password().await;
    let expected = [
        "[virt-viewer]",
        "type=spice",
        "host=10.0.0.1",
        "port=5900",
        &format!("password={password}"),
        &id,
        "enable-usbredir=1",
    ];
    assert_eq!(lines(&answer), expected, "a password that does not end stays");
    let log = fs::read_to_string(web.folder.path().join("log")).unwrap();
    assert!(!log.contains(&password) && log.contains("a person has got a connection file"), "{log}");
}
