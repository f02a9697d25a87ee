//! `kubectl vm create` on a real API server with a manager. The tests play the runner. A guest that is created so boots in `tests/node.rs`.

use std::process::Stdio;

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
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

async fn ns(test: &str) -> ManagedNamespace {
    let pod = include_str!("../../example/templates/import-disk/pod.yaml.j2");
    let values = include_str!("../../example/templates/import-disk/values.yaml");
    let files = [("sets/import-disk/pod.yaml.j2", pod), ("sets/import-disk/values.yaml", values)];
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
    assert!(created.talk.contains("kubectl vm templates pack example/templates/import-disk --set fill"), "{created:?}");
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
