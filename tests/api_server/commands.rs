//! `kubectl vm list`, `start`, `stop` and the other commands that people type every day, with a real API server and a played runner.

use std::process::{Command, Output};

use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::task::JoinHandle;
use vm_operator::{api::VirtualMachine, ownership::COMMAND_MANAGER};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace},
};

/// What a command printed.
#[derive(Debug)]
struct Printed {
    code: i32,
    out: String,
    err: String,
}

/// Runs `kubectl vm` in a namespace, beside the test.
fn beside(ns: &ManagedNamespace, arguments: &[&str]) -> JoinHandle<Printed> {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-vm"));
    command.args(arguments).args(["--namespace", ns.namespace.name()]).env("KUBECONFIG", ns.cluster.kubeconfig());
    tokio::task::spawn_blocking(move || {
        let Output { status, stdout, stderr } = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Printed { code: status.code().unwrap(), out: text(stdout), err: text(stderr) }
    })
}

async fn vm(ns: &ManagedNamespace, arguments: &[&str]) -> Printed {
    beside(ns, arguments).await.unwrap()
}

#[tokio::test]
async fn vms_are_started_and_stopped_and_what_is_so_already_is_no_error() {
    let ns = ManagedNamespace::new("commands").await;
    for name in ["apple", "pear"] {
        ns.create_vm(name, |vm| {
            vm["spec"]["vm"]["state"] = json!("Stopped");
            vm["metadata"]["labels"] = json!({ "team": "fruit" });
        })
        .await;
        ns.vm_with_reason(name, "StoppedAsRequested").await;
    }
    let stopped = vm(&ns, &["stop", "apple"]).await;
    assert_eq!((stopped.code, stopped.out.as_str()), (0, "vm/apple unchanged (already Stopped)\n"), "{stopped:?}");

    // A dry run changes nothing.
    for (dry_run, said) in [("--dry-run=client", "started (dry run)"), ("--dry-run=server", "started (server dry run)")]
    {
        let printed = vm(&ns, &["start", "-l", "team=fruit", dry_run]).await;
        assert_eq!(printed.out, format!("vm/apple {said}\nvm/pear {said}\n"), "{printed:?}");
    }
    assert!(ns.pods().await.is_empty());

    let starting = beside(&ns, &["start", "apple", "vm/pear"]);
    for name in ["apple", "pear"] {
        ns.pod_when(name, "made", |_| true).await;
        // Without a kubelet: a Pod that is deleted does not go at once.
        ns.bind_pod(name, "played").await;
        ns.report(name, true, "Started").await;
    }
    let started = starting.await.unwrap();
    assert_eq!(started.code, 0, "{started:?}");
    for name in ["apple", "pear"] {
        assert!(started.out.contains(&format!("vm/{name} started (now Running, ")), "{started:?}");
    }
    let apple = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert!(apple.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(COMMAND_MANAGER)));

    let list = vm(&ns, &["ls"]).await;
    let lines: Vec<Vec<&str>> = list.out.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..4], ["NAME", "STATE", "PHASE", "READY"], "{list:?}");
    assert_eq!(lines[1][..3], ["apple", "Running", "Running"], "{list:?}");
    assert_eq!(lines.len(), 3);
    assert!(vm(&ns, &["list", "-o", "wide"]).await.out.contains("REASON"));
    let names = vm(&ns, &["list", "-o", "name", "-l", "team=fruit"]).await;
    assert_eq!(names.out, "virtualmachine.vmoperator.jdrupes.org/apple\nvirtualmachine.vmoperator.jdrupes.org/pear\n");
    let object: serde_json::Value = serde_json::from_str(&vm(&ns, &["list", "pear", "-o", "json"]).await.out).unwrap();
    assert_eq!((&object["kind"], &object["metadata"]["name"]), (&json!("VirtualMachine"), &json!("pear")));
    let missing = vm(&ns, &["list", "apple", "plum"]).await;
    assert!(missing.code == 1 && missing.err.contains("vm/plum does not exist"), "{missing:?}");

    // Some of several.
    let partly = vm(&ns, &["reset", "apple", "plum", "--wait=false"]).await;
    assert_eq!((partly.code, partly.out.as_str()), (5, "vm/apple will be reset\n"), "{partly:?}");
    assert!(partly.err.contains("vm/plum: ") && partly.err.contains("not found"), "{partly:?}");
    let apple = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert_eq!(apple.spec.vm.reset_count, Some(1));

    // The guest does not react.
    let stopping = beside(&ns, &["stop", "apple", "--grace-period=1s"]);
    let forced = eventually("the stop to be forced", LIMIT, async || {
        let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
        vm.annotations().get("vmoperator.jdrupes.org/forceStop").cloned()
    });
    assert!(!forced.await.is_empty());
    ns.remove_pod("apple").await;
    let stopped = stopping.await.unwrap();
    assert!(stopped.code == 0 && stopped.out.contains("vm/apple stopped"), "{stopped:?}");
    let waited = vm(&ns, &["wait", "apple", "--for=stopped"]).await;
    assert!(waited.code == 0 && waited.out.starts_with("vm/apple stopped ("), "{waited:?}");
    let late = vm(&ns, &["wait", "apple", "--for=condition=Booted", "--timeout=1s"]).await;
    assert_eq!(late.code, 4, "{late:?}");
    let unknown = vm(&ns, &["wait", "plum", "--for=deleted"]).await;
    assert_eq!(unknown.code, 0, "{unknown:?}");
    let no_guest = vm(&ns, &["pause", "apple"]).await;
    assert!(no_guest.code == 1 && no_guest.err.contains("it does not run (Stopped)"), "{no_guest:?}");
}

#[tokio::test]
async fn a_vm_that_can_not_start_says_why_and_who_applies_the_state_is_named() {
    let ns = ManagedNamespace::new("command-errors").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    let applied = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "spec": { "vm": { "state": "Stopped" } },
    });
    let parameters = PatchParams::apply("kustomize-controller").force();
    ns.api::<VirtualMachine>().patch("apple", &parameters, &Patch::Apply(&applied)).await.unwrap();
    // A Pod of somebody else has the name.
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "apple" },
        "spec": { "containers": [{ "name": "c", "image": "i" }] },
    });
    ns.namespace.apply(&pod.to_string());
    let printed = vm(&ns, &["start", "apple"]).await;
    assert_eq!(printed.code, 1, "{printed:?}");
    assert!(printed.err.contains("kustomize-controller applies spec.vm.state"), "{printed:?}");
    assert!(printed.err.contains("vm/apple: NameTaken: "), "{printed:?}");
    let nobody = vm(&ns, &["start", "apple", "--context=none"]).await;
    assert!(nobody.code == 1 && nobody.err.contains("has no context"), "{nobody:?}");
    assert_eq!(vm(&ns, &["start"]).await.code, 2);
    assert_eq!(vm(&ns, &["start", "pod/apple"]).await.code, 2);
}
