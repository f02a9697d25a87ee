//! The form for a new VM: what the API server says of it beside each field, and the VM that it creates.

use std::process::Command;

use k8s_openapi::api::core::v1::Event;
use kube::{Api, ResourceExt, api::ListParams};
use serde_json::json;

use super::{Answer, Browser, LIMIT, Web, configuration};
use crate::support::cluster::eventually;

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc ann@desk";

/// Fields as a browser sends them.
fn encoded(fields: &[(&str, &str)]) -> String {
    let text = |text: &str| -> String {
        let byte = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        };
        text.bytes().map(byte).collect()
    };
    fields.iter().map(|(name, value)| format!("{name}={}", text(value))).collect::<Vec<_>>().join("&")
}

impl Web {
    /// Sends the form for a small VM, with these fields in the place of its own.
    async fn form(&self, browser: &Browser, edit: &[(&str, &str)]) -> Answer {
        let mut fields = vec![
            ("namespace", self.namespace.name()),
            ("name", "web"),
            ("image", "oci:quay.io/example/disk:1"),
            ("cpus", "2"),
            ("ram", "1Gi"),
            ("disk", "5Gi"),
            ("network", "pod"),
            ("bridge", ""),
            ("user", "ann"),
            ("keys", KEY),
            ("pools", "desks"),
            ("do", "check"),
        ];
        for (name, value) in edit {
            fields.retain(|(known, _)| known != name);
            fields.push((name, value));
        }
        browser.post("/vms/new", &encoded(&fields)).await
    }
}

/// What the page says beside a field.
fn beside<'a>(answer: &'a Answer, field: &str) -> &'a str {
    let id = format!("id=\"{field}-problem\" data-answer>");
    let (_, rest) = answer.body.split_once(&id).unwrap_or_else(|| panic!("{field}: {}", answer.body));
    rest.split("</p>").next().unwrap()
}

/// The text of an element with that id, which has no elements in it.
fn text_of(answer: &Answer, id: &str) -> String {
    let (_, rest) = answer.body.split_once(&format!("<pre id=\"{id}\"")).unwrap();
    let text = rest.split_once('>').unwrap().1.split("</pre>").next().unwrap();
    [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#x27;", "'"), ("&#x2f;", "/"), ("&amp;", "&")]
        .iter()
        .fold(text.to_owned(), |text, (entity, letter)| text.replace(entity, letter))
}

#[tokio::test]
async fn an_administrator_creates_a_vm_with_the_api_servers_answer_beside_each_field() {
    let web = Web::new("web-create", &configuration(&["admin", "ann"])).await;
    let admin = web.sign_in("admin").await;
    let page = admin.get("/vms/new").await;
    assert_eq!((page.status, beside(&page, "name")), (200, ""));
    assert!(text_of(&page, "yaml").contains("kind: VirtualMachine"), "{}", page.body);

    // What the form itself refuses is not sent; who is still typing hears only of what is wrong.
    let empty = web.form(&admin, &[("name", ""), ("image", "./a.img")]).await;
    assert_eq!((empty.status, beside(&empty, "name")), (200, "This is needed."));
    assert!(beside(&empty, "image").contains("kubectl vm create"));
    let typing = web.form(&admin, &[("name", ""), ("image", "./a.img"), ("live", "1")]).await;
    assert_eq!(beside(&typing, "name"), "");
    assert!(!beside(&typing, "image").is_empty());

    // What the API server refuses: by the schema, by its own rules for names, by a rule of the CustomResourceDefinition.
    let long = web.form(&admin, &[("network", "bridge"), ("bridge", "a-bridge-with-a-long-name")]).await;
    assert!(beside(&long, "bridge").contains("15"), "{}", long.body);
    let name = web.form(&admin, &[("name", "Web_1")]).await;
    assert!(beside(&name, "name").contains("RFC 1123"), "{}", name.body);
    let small = web.form(&admin, &[("ram", "512")]).await;
    assert!(small.body.contains("maximumRam must be at least 1Mi"), "{}", small.body);
    assert!(!small.body.contains("would create"));
    let german = admin.send("GET", "/vms/new", &[("accept-language", "de")], "").await;
    assert!(german.body.contains("Neue VM"));

    // It would be taken, and does not exist yet.
    let checked = web.form(&admin, &[("start", "on")]).await;
    assert!(checked.body.contains("would create"), "{}", checked.body);
    assert!(web.vms().get_opt("web").await.unwrap().is_none());
    let (yaml, command) = (text_of(&checked, "yaml"), text_of(&checked, "command"));
    let line = command.replacen("kubectl vm", env!("CARGO_BIN_EXE_kubectl-vm"), 1) + " --dry-run=client -o yaml";
    let output = Command::new("sh").args(["-c", &line]).output().unwrap();
    let made = String::from_utf8(output.stdout).unwrap();
    assert_eq!(made, yaml, "{command}: {}", String::from_utf8_lossy(&output.stderr));

    // Nothing is created for a foreign namespace, for another person, or for another site.
    let foreign = web.form(&admin, &[("namespace", "kube-system"), ("do", "create")]).await;
    assert_eq!((foreign.status, beside(&foreign, "namespace").is_empty()), (422, false));
    let ann = web.sign_in("ann").await;
    assert_eq!(ann.get("/vms/new").await.status, 404);
    assert_eq!(web.form(&ann, &[("do", "create")]).await.status, 404);
    let evil = [("origin", "https://evil.example"), ("sec-fetch-site", "cross-site")];
    assert_eq!(admin.send("POST", "/vms/new", &evil, "do=create").await.status, 403);
    assert!(web.vms().get_opt("web").await.unwrap().is_none());

    let created = web.form(&admin, &[("start", "on"), ("do", "create")]).await;
    assert_eq!(
        (created.status, created.header("location")),
        (303, Some(web.path("web", "").as_str())),
        "{}",
        created.body
    );
    assert_eq!(admin.get(&web.path("web", "")).await.status, 200, "its page is there at once");
    let vm = web.vms().get("web").await.unwrap();
    assert!(vm.managed_fields().iter().all(|entry| entry.manager.as_deref() == Some("vm-operator-web")));
    assert_eq!((json!(vm.spec.vm.state), vm.spec.pools.as_slice()), (json!("Running"), &["desks".to_owned()][..]));
    let events: Api<Event> = Api::namespaced(web.client.clone(), web.namespace.name());
    let about = ListParams::default().fields("involvedObject.name=web,reason=WebCreated");
    let event = eventually("the event", LIMIT, async || events.list(&about).await.unwrap().items.pop()).await;
    assert!(event.message.unwrap().starts_with("admin "));
    assert!(web.first.log().contains("a person has created a VM"));
    let again = web.form(&admin, &[("do", "create")]).await;
    assert_eq!(again.status, 409);
    assert!(beside(&again, "name").contains("already exists"), "{}", again.body);
}
