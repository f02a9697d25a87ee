//! `kubectl vm create` on a real API server with a manager. The tests play the runner. A guest that is created so boots in `tests/node.rs`.

use std::process::Stdio;

use k8s_openapi::api::{
    core::v1::{PersistentVolumeClaim, Pod, Service},
    storage::v1::StorageClass,
};
use kube::{
    ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::{api::VirtualMachine, ownership::COMMAND_MANAGER};

use crate::{
    commands::{command, printed, run, succeeds, vm},
    support::{
        cluster::eventually,
        managed_namespace::{LIMIT, ManagedNamespace},
    },
};

const KEY: &str = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIabc ann@desk";

pub async fn ns(test: &str) -> ManagedNamespace {
    let pod = include_str!("../../example/sets/import-disk/pod.yaml.j2");
    let values = include_str!("../../example/sets/import-disk/values.yaml");
    let values = &values.replace("images: []", "images: [localhost/*, quay.io/containerdisks/*]");
    let schema = include_str!("../../example/sets/import-disk/values.schema.json");
    let files = [
        ("sets/import-disk/pod.yaml.j2", pod),
        ("sets/import-disk/values.yaml", values),
        ("sets/import-disk/values.schema.json", schema),
    ];
    ManagedNamespace::with_templates(test, &files).await
}

#[tokio::test]
async fn a_vm_is_created_and_followed_until_its_guest_is_up() {
    let ns = ns("create").await;
    let what = [
        "--image",
        "http://images.example/a.img",
        "--raw",
        "--user",
        "ann",
        "--ssh-key",
        KEY,
        "--cpus=1",
        "--ram=512Mi",
    ];
    let create = [&["create", "web"], what.as_slice()].concat();

    // What is for Git is what would be created.
    let file = succeeds(&ns, &[create.as_slice(), &["--dry-run=client", "-o", "yaml"]].concat());
    assert!(ns.api::<VirtualMachine>().get_opt("web").await.unwrap().is_none());
    let tried = succeeds(&ns, &[create.as_slice(), &["--dry-run=server"]].concat());
    assert_eq!(tried, "vm/web created (server dry run)\n");
    assert!(ns.api::<VirtualMachine>().get_opt("web").await.unwrap().is_none());

    let creating = command(&ns, &create).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the VM", LIMIT, async || ns.api::<VirtualMachine>().get_opt("web").await.unwrap()).await;
    ns.vm_with_reason("web", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("web").await.unwrap());
    let import = pod["spec"]["initContainers"].as_array().unwrap().iter().find(|it| it["name"] == "import").unwrap();
    let env =
        |name: &str| import["env"].as_array().unwrap().iter().find(|it| it["name"] == name).unwrap()["value"].clone();
    assert_eq!((env("URL"), env("FORMAT")), (json!("http://images.example/a.img"), json!("raw")));
    ns.report("web", true, "Started").await;
    let created = printed(creating.wait_with_output().unwrap());
    let place = ns.namespace.name();
    assert!(
        created.code == 0 && created.data.starts_with("vm/web created\nvm/web: is up: its agent answers ("),
        "{created:?}"
    );
    assert!(created.talk.contains("vm/web: Starting: waiting for "), "{created:?}");
    assert!(
        created.talk.ends_with(&format!(
            "next:\n  kubectl vm console web -n {place}\n  kubectl vm ssh web -n {place}\n  kubectl vm stop web -n {place}\n"
        )),
        "{created:?}"
    );
    let web = vm(&ns, "web").await;
    assert!(web.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(COMMAND_MANAGER)));
    let again = run(&ns, &create);
    assert!(again.code == 1 && again.talk.contains("already exists"), "{again:?}");

    // The file from above changes nothing.
    let file: Value = serde_yaml::from_str(&file).unwrap();
    let git = PatchParams::apply("kustomize-controller").force();
    let applied = ns.api::<VirtualMachine>().patch("web", &git, &Patch::Apply(&file)).await.unwrap();
    assert_eq!((&applied.spec, applied.metadata.generation), (&web.spec, Some(1)));
}

#[tokio::test]
async fn several_vms_are_created_as_far_as_that_is_possible() {
    let ns = ns("create-some").await;
    let lines = ["create", "a", "b", "--cd", "https://images.example/a.iso", "--network=user", "--stopped"];
    let created = run(&ns, &lines);
    assert_eq!((created.code, created.data.as_str()), (0, "vm/a created\nvm/b created\n"), "{created:?}");
    assert!(created.talk.starts_with("next:\n  kubectl vm start a -n "), "{created:?}");
    ns.vm_with_reason("a", "StoppedAsRequested").await;
    let some = run(&ns, &["create", "b", "c", "--cd=a.iso", "--stopped", "-o", "name"]);
    assert_eq!((some.code, some.data.as_str()), (5, "virtualmachine.vmoperator.jdrupes.org/c\n"), "{some:?}");
    let wrong = run(&ns, &["create", "Wrong", "--cd=a.iso"]);
    assert!(wrong.code == 2 && wrong.talk.starts_with("vm/Wrong: "), "{wrong:?}");
    let refused = run(&ns, &["create", "d", "--cd=a.iso", "--as", "alice"]);
    assert!(
        refused.code == 1 && refused.talk.contains("alice may not create vms.vmoperator.jdrupes.org"),
        "{refused:?}"
    );
}

#[tokio::test]
async fn a_set_that_is_not_installed_is_no_endless_wait() {
    let ns = ns("create-set").await;
    let image = ["--image", "http://images.example/a.img", "--user", "ann", "--ssh-key", KEY, "--set", "fill"];
    let created = run(&ns, &[["create", "web"].as_slice(), &image].concat());
    assert!(created.code == 1 && created.data == "vm/web created\n", "{created:?}");
    assert!(created.talk.contains("kubectl vm templates pack import-disk --set fill"), "{created:?}");
}

/// A `kubectl` whose `exec` shows a guest that asks for a login.
fn kubectl_with_a_console() -> (tempfile::TempDir, String) {
    let tools = tempfile::tempdir().unwrap();
    let kubectl = tools.path().join("kubectl");
    std::fs::write(
        &kubectl,
        "#!/bin/sh\nprintf 'Debian GNU/Linux 13 web ttyS0\\r\\n\\r\\nweb login: '\nexec sleep 60\n",
    )
    .unwrap();
    std::fs::set_permissions(&kubectl, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", tools.path().display(), std::env::var("PATH").unwrap());
    (tools, path)
}

#[tokio::test]
async fn a_guest_without_an_agent_is_up_when_its_console_asks_for_a_login() {
    let ns = ns("create-login").await;
    let (_tools, path) = kubectl_with_a_console();
    let image = ["--image", "http://images.example/a.img", "--user", "ann", "--ssh-key", KEY];
    let create = [["create", "web"].as_slice(), &image].concat();
    let creating =
        command(&ns, &create).env("PATH", path).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    eventually("the VM", LIMIT, async || ns.api::<VirtualMachine>().get_opt("web").await.unwrap()).await;
    ns.vm_with_reason("web", "Starting").await;
    let pod = ns.api::<Pod>().get("web").await.unwrap();
    let condition = |type_: &str, status: &str| json!({ "type": type_, "status": status, "reason": "Started", "message": "m", "lastTransitionTime": "2026-01-01T00:00:00Z" });
    let report = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "status": { "podUid": pod.uid(), "conditions": [condition("Running", "True"), condition("Booted", "False")] },
    });
    let runner = PatchParams::apply("vm-runner").force();
    ns.api::<VirtualMachine>().patch_status("web", &runner, &Patch::Apply(&report)).await.unwrap();
    let created = printed(creating.wait_with_output().unwrap());
    assert!(created.code == 0 && created.data.contains("vm/web: is up: its console asks for a login ("), "{created:?}");
}

#[tokio::test]
async fn other_sources_fill_the_disk() {
    let ns = ns("create-sources").await;
    // A container of the image hands the disk over.
    let keys = ["--user", "ann", "--ssh-key", KEY, "--no-wait"];
    let ports = ["--port", "22", "--port", "8080:80"];
    let created = run(
        &ns,
        &[["create", "boxed", "--image", "oci:quay.io/containerdisks/debian:13"].as_slice(), &keys, &ports].concat(),
    );
    assert_eq!(created.code, 0, "{created:?}");
    for (service, target) in [("boxed-22", 22), ("boxed-8080", 80)] {
        let words = format!("service/{service} exposed: it leads to port {target} of vm/boxed\n");
        assert!(created.data.contains(&words), "{created:?}");
        let service = json!(ns.api::<Service>().get(service).await.unwrap());
        assert_eq!(service["spec"]["selector"]["app.kubernetes.io/instance"], "boxed");
        assert_eq!(service["spec"]["ports"][0]["targetPort"], target);
    }
    // Behind data the Services are talk.
    let named = run(
        &ns,
        &[
            ["create", "packed", "--image", "oci:quay.io/containerdisks/debian:13", "-o", "name"].as_slice(),
            &keys,
            &ports,
        ]
        .concat(),
    );
    assert_eq!((named.code, named.data.as_str()), (0, "virtualmachine.vmoperator.jdrupes.org/packed\n"), "{named:?}");
    assert!(named.talk.contains("service/packed-22 exposed: it leads to port 22 of vm/packed\n"), "{named:?}");
    let pod = json!(ns.pod_when("boxed", "there", |_| true).await);
    let before = pod["spec"]["initContainers"].as_array().unwrap();
    let content = before.iter().find(|it| it["name"] == "import-content").unwrap();
    assert_eq!(content["image"], "quay.io/containerdisks/debian:13", "{content}");

    // The clone of a claim has its size, class and volume mode.
    let golden = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "golden" },
        "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": "Filesystem", "storageClassName": "fast", "resources": { "requests": { "storage": "5Gi" } } },
    });
    ns.api::<PersistentVolumeClaim>()
        .create(&PostParams::default(), &serde_json::from_value(golden).unwrap())
        .await
        .unwrap();
    let clone = [["create", "clone", "--image", "claim:golden"].as_slice(), &keys].concat();
    assert_eq!(run(&ns, &clone).code, 0);
    let claim = eventually("the clone", LIMIT, async || {
        ns.api::<PersistentVolumeClaim>().get_opt("clone-system-disk").await.unwrap()
    })
    .await;
    let claim = json!(claim);
    assert_eq!(claim["spec"]["dataSource"]["name"], "golden", "{claim}");
    let found = ["/spec/volumeMode", "/spec/storageClassName", "/spec/resources/requests/storage"];
    let found: Vec<_> = found.iter().map(|path| claim.pointer(path).unwrap().as_str().unwrap()).collect();
    assert_eq!(found, ["Filesystem", "fast", "5Gi"]);
    let missing = run(&ns, &[["create", "none", "--image", "claim:nowhere"].as_slice(), &keys].concat());
    assert!(missing.code == 1 && missing.talk.contains("persistentvolumeclaim/nowhere"), "{missing:?}");
    let small = [["create", "none", "--image", "claim:golden", "--disk", "1Gi"].as_slice(), &keys].concat();
    let small = run(&ns, &small);
    assert!(small.code == 2 && small.talk.contains("--disk 1Gi is too small: the claim golden has 5Gi"), "{small:?}");
    // Its class is there by now, and its provisioner would make an empty disk.
    let class = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": "create-sources" }, "provisioner": "example.org/local" });
    let classes: kube::Api<StorageClass> = kube::Api::all(ns.client.clone());
    classes.create(&PostParams::default(), &serde_json::from_value(class).unwrap()).await.unwrap();
    let other = ["create", "none", "--image", "claim:golden", "--storage-class", "create-sources"];
    let other = run(&ns, &[other.as_slice(), &keys].concat());
    let words = "the storage class create-sources can't clone: its provisioner example.org/local is no CSI driver";
    assert!(other.code == 1 && other.talk.contains(words), "{other:?}");
    classes.delete("create-sources", &kube::api::DeleteParams::default()).await.unwrap();
}

/// A `kubectl` whose `exec` runs a command here, with a folder in place of the container's. Its first upload breaks off.
fn kubectl_with_a_folder(folder: &std::path::Path) -> String {
    let kubectl = folder.join("kubectl");
    let script = r#"#!/bin/sh
while test "$1" != --; do shift; done
command=$(printf %s "$4" | sed "s|/download/|FOLDER/|g")
case $command in dd*) if test ! -e FOLDER/broken; then touch FOLDER/broken; head -c 700000 | sh -c "$command"; exit 1; fi;; esac
exec sh -c "$command"
"#;
    std::fs::write(&kubectl, script.replace("FOLDER", folder.to_str().unwrap())).unwrap();
    std::fs::set_permissions(&kubectl, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    format!("{}:{}", folder.display(), std::env::var("PATH").unwrap())
}

#[tokio::test]
async fn a_file_is_uploaded_and_goes_on_where_it_broke_off() {
    let ns = ns("create-upload").await;
    let folder = tempfile::tempdir().unwrap();
    let path = kubectl_with_a_folder(folder.path());
    let file = folder.path().join("disk.raw");
    let content: Vec<u8> = (0..3_000_000_u32).map(|number| (number % 251) as u8).collect();
    std::fs::write(&file, &content).unwrap();
    let file = file.to_str().unwrap();
    let created = run(&ns, &["create", "web", "--image", file, "--user", "ann", "--ssh-key", KEY, "--no-wait"]);
    let later = format!("kubectl vm upload web {file} -n {}", ns.namespace.name());
    assert!(created.code == 0 && created.talk.contains(&later), "{created:?}");
    ns.pod_when("web", "there", |_| true).await;

    let upload = |file: &str| {
        let mut command = command(&ns, &["upload", "web", file]);
        command.env("PATH", &path).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    let state = |state: Value| {
        json!({ "initContainerStatuses": [
            { "name": "import", "state": state, "image": "i", "imageID": "", "ready": false, "restartCount": 0 },
        ] })
    };
    let other = folder.path().join("other");
    std::fs::write(&other, "x").unwrap();
    let refused = printed(upload(other.to_str().unwrap()).wait_with_output().unwrap());
    assert!(refused.code == 1 && refused.talk.contains("it waits for another file than"), "{refused:?}");

    let uploading = upload(file);
    ns.patch_pod_status("web", state(json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } }))).await;
    let image = folder.path().join("image");
    eventually("the whole file", LIMIT, async || {
        std::fs::metadata(&image).is_ok_and(|it| it.len() == content.len() as u64).then_some(())
    })
    .await;
    assert!(std::fs::read(&image).unwrap() == content);
    ns.patch_pod_status("web", state(json!({ "terminated": { "exitCode": 0 } }))).await;
    let uploaded = printed(uploading.wait_with_output().unwrap());
    assert!(uploaded.code == 0 && uploaded.data.contains(": its disk has "), "{uploaded:?}");
    assert!(uploaded.talk.contains(": goes on at 700000 of "), "{uploaded:?}");
    // Once more: nothing is sent over what the guest may have written since.
    let again = printed(upload(file).wait_with_output().unwrap());
    assert!(again.code == 0 && again.data.starts_with("vm/web: its disk was filled already"), "{again:?}");
}

/// The commands in the comments of an imported VM are for its claims.
#[tokio::test]
async fn an_imported_vm_stays_stopped_and_its_disks_can_be_filled() {
    let ns = ManagedNamespace::new("import").await;
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/src/pure/import/tests/libvirt.xml");
    let place = ns.namespace.name();
    let import = ["import", file, "--strict", "--name", "web"];
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(import).args(["-n", place]).output();
    let imported = printed(output.unwrap());
    assert!(imported.code == 1, "something is left out: {imported:?}");
    assert!(imported.talk.contains("libvirt.xml:83: <hostdev>: no equivalent: "), "{imported:?}");
    ns.namespace.apply(&imported.data);
    ns.vm_with_reason("web", "StoppedAsRequested").await;
    for claim in ["web-sda-disk", "web-vdb-disk", "web-runner-data"] {
        eventually(claim, LIMIT, async || ns.api::<PersistentVolumeClaim>().get_opt(claim).await.unwrap()).await;
    }
    let comments = imported.data.lines().filter_map(|line| line.strip_prefix('#')).collect::<Vec<_>>().join("\n");
    let (begin, end) = (comments.find("kubectl run").unwrap(), comments.find("Then, where").unwrap());
    let arguments = comments[begin..end].trim().replacen("kubectl run", "", 1);
    let (arguments, overrides) = arguments.split_once("--overrides=").unwrap();
    let overrides = format!("--overrides={}", overrides.trim_matches('\''));
    let arguments: Vec<&str> = arguments.split_whitespace().filter(|it| !["-n", place].contains(it)).collect();
    ns.namespace.kubectl(&[["run"].as_slice(), &arguments, &[&overrides]].concat());
    let pod = json!(ns.api::<Pod>().get("web-import").await.unwrap());
    let devices = pod["spec"]["containers"][0]["volumeDevices"].as_array().unwrap();
    assert_eq!(
        devices.iter().map(|it| it["devicePath"].as_str().unwrap()).collect::<Vec<_>>(),
        ["/dev/sda", "/dev/vdb"]
    );
}
