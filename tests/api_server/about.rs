//! `kubectl vm events`, `password` and `guest` on a real API server with a manager.

use std::process::Stdio;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;

use crate::{
    commands::{command, ns, printed, run, succeeds, up, vm},
    support::{
        cluster::eventually,
        managed_namespace::{LIMIT, ManagedNamespace},
    },
};

async fn event(ns: &ManagedNamespace, name: &str, about: Value, reason: &str, time: &str) {
    let event = json!({
        "apiVersion": "v1", "kind": "Event", "metadata": { "name": name, "namespace": ns.namespace.name() }, "involvedObject": about,
        "reason": reason, "message": "told by a test", "type": "Warning", "lastTimestamp": time,
    });
    ns.namespace.create(&event.to_string()).await;
}

#[tokio::test]
async fn events_are_those_of_the_vm_the_oldest_first() {
    let ns = ns("events").await;
    up(&ns, "apple", |_| ()).await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    let about =
        |kind: &str, name: &str| json!({ "kind": kind, "name": name, "namespace": ns.namespace.name(), "uid": "x" });
    event(&ns, "later", about("PersistentVolumeClaim", "apple-core-disk"), "TestOfClaim", "2099-01-01T00:00:01Z").await;
    event(&ns, "sooner", about("Pod", "apple"), "TestOfPod", "2099-01-01T00:00:00Z").await;
    event(&ns, "other", about("Pod", "pear"), "TestOfOther", "2099-01-01T00:00:00Z").await;
    let table = eventually("the manager's event", LIMIT, async || {
        Some(succeeds(&ns, &["events", "apple"])).filter(|table| table.contains("SuccessfulCreate"))
    })
    .await;
    let reasons: Vec<_> = table.lines().map(|line| line.split_whitespace().nth(2).unwrap()).collect();
    let place = |reason: &str| reasons.iter().position(|it| *it == reason);
    assert!(table.starts_with("LAST SEEN"), "{table}");
    assert!(place("SuccessfulCreate") < place("TestOfPod") && place("TestOfPod") < place("TestOfClaim"), "{table}");
    assert!(place("SuccessfulCreate").is_some() && place("TestOfOther").is_none(), "{table}");
    let data: Value = serde_json::from_str(&succeeds(&ns, &["events", "vm/apple", "-o", "json"])).unwrap();
    assert_eq!(data["items"].as_array().unwrap().last().unwrap()["reason"], "TestOfClaim");

    let mut watch = command(&ns, &["events", "apple", "--watch"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(watch.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().contains("TestOfClaim")));
    event(&ns, "news", about("Pod", "apple"), "TestOfNews", "2099-01-01T00:00:02Z").await;
    assert!(lines.next().unwrap().unwrap().contains("TestOfNews"), "each event is printed once");
    watch.kill().unwrap();
    watch.wait().unwrap();

    assert_eq!(run(&ns, &["events", "plum"]).code, 1);
    let refused = run(&ns, &["events", "apple", "--as", "alice"]);
    assert!(refused.code == 1 && refused.talk.contains("alice"), "{refused:?}");
}

#[tokio::test]
async fn the_password_is_that_of_the_display_secret() {
    let ns = ns("password").await;
    up(&ns, "apple", |_| ()).await;
    ns.create_vm("open", |vm| vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } })).await;
    ns.vm_with_reason("open", "Starting").await;
    let place = ns.namespace.name();
    let generated = run(&ns, &["password", "apple"]);
    assert!(generated.code == 0 && generated.data.trim().len() > 8, "{generated:?}");
    assert!(generated.talk.starts_with(&format!("vm {place}/apple: the password")), "{generated:?}");
    let secrets: Api<k8s_openapi::api::core::v1::Secret> = ns.api();
    let own = json!({ "stringData": { "display-password": "hello", "password-expiry": "never" } });
    secrets.patch("apple-display-secret", &PatchParams::default(), &Patch::Merge(own)).await.unwrap();
    let own = run(&ns, &["password", "apple"]);
    assert_eq!((own.code, own.data.as_str(), own.talk.as_str()), (0, "hello\n", ""));
    let open = run(&ns, &["password", "open"]);
    assert!(open.code == 1 && open.data.is_empty() && open.talk.contains("it has no display secret"), "{open:?}");
    let nobody = run(&ns, &["password", "nobody"]);
    assert!(nobody.code == 1 && nobody.talk.contains(r#""nobody" not found"#), "{nobody:?}");

    // The runner that a test plays sets the new one.
    let past = json!({ "stringData": { "display-password": "hello", "password-expiry": "1000" } });
    secrets.patch("apple-display-secret", &PatchParams::default(), &Patch::Merge(past)).await.unwrap();
    let ended = run(&ns, &["password", "apple"]);
    assert!(ended.talk.contains("the password has ended (1970-01-01T00:16:40Z)"), "{ended:?}");
    let renew = command(&ns, &["password", "apple", "--renew"]).stdout(Stdio::piped()).spawn().unwrap();
    let expiry = eventually("a new password", LIMIT, async || {
        let secret = secrets.get("apple-display-secret").await.unwrap().data.unwrap();
        let expiry = String::from_utf8(secret["password-expiry"].0.clone()).unwrap();
        (expiry != "1000").then_some(expiry)
    })
    .await;
    let status = json!({ "status": { "displayPasswordExpiry": expiry } });
    ns.api::<VirtualMachine>().patch_status("apple", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    let renewed = printed(renew.wait_with_output().unwrap());
    assert!(renewed.code == 0 && renewed.data.trim().len() == 22, "{renewed:?}");
}

/// The guest itself is asked in `tests/node.rs`.
#[tokio::test]
async fn without_a_guest_agent_the_page_has_what_the_status_has() {
    let ns = ns("guest").await;
    up(&ns, "apple", |_| ()).await;
    let osinfo = json!({ "status": { "osinfo": { "pretty-name": "Debian", "kernel-release": "6.1" } } });
    ns.api::<VirtualMachine>().patch_status("apple", &PatchParams::default(), &Patch::Merge(osinfo)).await.unwrap();
    assert!(vm(&ns, "apple").await.uid().is_some() && ns.api::<Pod>().get("apple").await.is_ok());
    let page = run(&ns, &["guest", "apple"]);
    assert!(page.code == 0 && page.data.starts_with("Guest        Debian, kernel 6.1\n"), "{page:?}");
    assert!(page.talk.contains("the guest's agent is not asked, so this is what the VM's status has: "), "{page:?}");
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    let stopped = run(&ns, &["guest", "pear"]);
    assert!(
        stopped.code == 1 && stopped.talk.contains("its guest does not run: kubectl vm explain pear -n"),
        "{stopped:?}"
    );
}

/// All files of an archive, by their names in it.
fn unpacked(archive: &std::path::Path) -> std::collections::BTreeMap<String, String> {
    let folder = tempfile::tempdir().unwrap();
    let tar = std::process::Command::new("tar").arg("xzf").arg(archive).arg("-C").arg(folder.path()).status().unwrap();
    assert!(tar.success());
    fn all(folder: &std::path::Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { all(&path, found) } else { found.push(path) }
        }
    }
    let mut files = Vec::new();
    all(folder.path(), &mut files);
    let name = |file: &std::path::Path| file.strip_prefix(folder.path()).unwrap().display().to_string();
    files.iter().map(|file| (name(file), std::fs::read_to_string(file).unwrap())).collect()
}

#[tokio::test]
async fn a_dump_has_what_a_bug_report_needs_and_no_secrets() {
    let ns = ns("dump").await;
    up(&ns, "apple", |vm| {
        vm["spec"]["cloudInit"] = json!({ "userData": { "chpasswd": { "expire": false, "list": "ann:sesame-open" } } });
    })
    .await;
    let password = succeeds(&ns, &["password", "apple"]).trim().to_owned();
    // Where nobody looks for it.
    ns.patch_vm("apple", json!({ "metadata": { "annotations": { "note": format!("the password is {password}") } } }))
        .await;
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("a.tar.gz");
    let dump =
        |arguments: &[&str]| run(&ns, &[&["dump", "apple", "-o", archive.to_str().unwrap()], arguments].concat());
    let dumped = dump(&[]);
    assert!(dumped.code == 0 && dumped.data.is_empty() && dumped.talk.contains("vm/apple is in "), "{dumped:?}");
    let files = unpacked(&archive);
    for file in [
        "README.txt",
        "explain.txt",
        "status.txt",
        "events.txt",
        "versions.txt",
        "vm/VirtualMachine-apple.yaml",
        "objects/Pod-apple.yaml",
        "objects/ConfigMap-apple.yaml",
        "objects/Secret-apple-display-secret.yaml",
        "objects/PersistentVolumeClaim-apple-core-disk.yaml",
        "rendered/Pod-apple.yaml",
    ] {
        assert!(files.contains_key(&format!("apple/{file}")), "{file}: {:?}", files.keys());
    }
    for (file, text) in &files {
        assert!(!text.contains("sesame-open") && !text.contains(&password), "{file}:\n{text}");
    }
    assert!(files["apple/vm/VirtualMachine-apple.yaml"].contains("the password is (masked)"));
    assert!(files["apple/explain.txt"].starts_with("apple runs, as its spec wants it"));

    // A tool that puts its own label on all that it applies hides nothing.
    let labels = json!({ "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "a-tool" });
    let metadata =
        json!({ "name": "of-git", "labels": labels, "annotations": { "vmoperator.jdrupes.org/vm": "apple" } });
    let secret =
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": { "key": "hidden-in-git" } });
    ns.namespace.create(&secret.to_string()).await;
    let other = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "of-other", "labels": { "app.kubernetes.io/instance": "apple" } } });
    ns.namespace.create(&other.to_string()).await;
    ns.namespace.kubectl(&["label", "--overwrite", "pvc", "apple-core-disk", "app.kubernetes.io/instance=a-tool"]);
    ns.namespace.kubectl(&["annotate", "pvc", "apple-core-disk", "vmoperator.jdrupes.org/vm=apple"]);
    assert_eq!(dump(&[]).code, 0);
    let files = unpacked(&archive);
    assert!(files["apple/objects/Secret-of-git.yaml"].contains("a-tool"));
    assert!(files["apple/objects/PersistentVolumeClaim-apple-core-disk.yaml"].contains("a-tool"));
    assert!(!files.contains_key("apple/objects/ConfigMap-of-other.yaml"), "it is of another program");
    assert!(files.values().all(|text| !text.contains("hidden-in-git")));
    let page = succeeds(&ns, &["status", "apple"]);
    assert!(page.contains("\nDisks       apple-core-disk "), "{page}");

    // With the least rights.
    ns.namespace.kubectl(&["create", "role", "reader", "--verb=get", "--resource=vms.vmoperator.jdrupes.org"]);
    ns.namespace.kubectl(&["create", "rolebinding", "reader", "--role=reader", "--user=alice"]);
    let poor =
        eventually("alice to read", LIMIT, async || Some(dump(&["--as", "alice"])).filter(|it| it.code == 0)).await;
    assert!(poor.talk.contains("things could not be read: unread.txt in it names them"), "{poor:?}");
    let files = unpacked(&archive);
    let unread = &files["apple/unread.txt"];
    assert!(unread.contains("events: ") && unread.contains("objects of the kind Secret: "), "{unread}");
    assert!(files.contains_key("apple/vm/VirtualMachine-apple.yaml") && files.contains_key("apple/explain.txt"));
    assert_eq!(run(&ns, &["dump", "plum", "-o", archive.to_str().unwrap()]).code, 1);
}
