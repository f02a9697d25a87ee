//! `kubectl vm set`, `add` and `grow` on a real API server with a manager.

use std::process::Stdio;

use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::{api::VirtualMachine, ownership::COMMAND_MANAGER};

use crate::{
    commands::{command, ns, printed, run, succeeds, up, vm},
    support::managed_namespace::vm_manifest,
};

#[tokio::test]
async fn cpus_memory_and_cds_change_while_the_guest_runs() {
    let ns = ns("edit").await;
    let machine = |vm: &mut Value| {
        vm["metadata"]["labels"] = json!({ "tier": "web" });
        vm["spec"]["vm"]["maximumRam"] = json!("2Gi");
        vm["spec"]["vm"]["disks"].as_array_mut().unwrap().push(json!({ "cdrom": { "image": "" } }));
    };
    up(&ns, "apple", machine).await;
    ns.create_vm("pear", |vm| {
        machine(vm);
        vm["spec"]["vm"]["state"] = json!("Stopped");
    })
    .await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;

    for (arguments, code, complaint) in [
        (&["set", "cpus"] as &[&str], 2, "required"),
        (&["set", "cpus", "apple"], 2, "as a number"),
        (&["set", "cpus", "2"], 2, "name a VM"),
        (&["set", "cpus", "apple", "2", "--all"], 2, "not both"),
        (&["set", "ram", "apple", "much"], 2, "is not a size"),
        (&["grow", "disk", "2Gi"], 2, "the name of the disk and its new size"),
        (&["set", "cpus", "plum", "2"], 1, "vm/plum: there is none"),
        (
            &["set", "cpus", "apple", "3"],
            1,
            "vm/apple: its guest can have 2 CPUs at most (spec.vm.maximumCpus); --raise-maximum raises that too",
        ),
    ] {
        let refused = run(&ns, arguments);
        assert!(refused.code == code && refused.talk.contains(complaint), "{arguments:?}: {refused:?}");
    }
    for (how, what) in [("client", "dry run"), ("server", "server dry run")] {
        let tried = succeeds(&ns, &["set", "cpus", "--all", "1", &format!("--dry-run={how}")]);
        let lines = [("apple", "while it runs"), ("pear", "when it starts")];
        let lines = lines.map(|(name, when)| format!("vm/{name}: 1 CPU (before: 2), {when} ({what})\n"));
        assert_eq!(tried, lines.concat());
    }
    let tried = run(&ns, &["set", "cpus", "apple", "5000", "--raise-maximum", "--dry-run=server"]);
    assert!(tried.code == 1 && tried.talk.contains("vm/apple: "), "the server checks it: {tried:?}");
    let json: Value =
        serde_json::from_str(&succeeds(&ns, &["set", "cpus", "apple", "1", "--dry-run=client", "-o", "json"])).unwrap();
    assert_eq!(json["spec"]["vm"]["currentCpus"], 1);
    assert_eq!(vm(&ns, "apple").await.spec.vm.current_cpus, None, "nothing was written");

    assert_eq!(succeeds(&ns, &["set", "cpus", "vm/apple", "1"]), "vm/apple: 1 CPU (before: 2), while it runs\n");
    let apple = vm(&ns, "apple").await;
    assert_eq!(apple.spec.vm.current_cpus, Some(1));
    assert!(apple.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(COMMAND_MANAGER)));
    assert_eq!(succeeds(&ns, &["set", "cpus", "apple", "1"]), "vm/apple unchanged (has 1 CPU already)\n");
    let unchanged = succeeds(&ns, &["set", "cpus", "apple", "1", "-o", "name"]);
    assert_eq!(unchanged, "virtualmachine.vmoperator.jdrupes.org/apple\n", "data has it too");
    // The runner, which nobody plays from here on, has seen the guest give the memory back.
    let given = r#"{"status":{"ram":"1Gi"}}"#;
    let uid = ns.namespace.kubectl(&["get", "pod", "apple", "--output=jsonpath={.metadata.uid}"]);
    ns.namespace.kubectl(&["patch", "vmreport", &uid, "--subresource=status", "--type=merge", "--patch", given]);
    let waited = succeeds(&ns, &["set", "ram", "-l", "tier=web", "1Gi", "--wait"]);
    let expected = "vm/apple: 1Gi of memory (before: 2Gi); the running guest has it (";
    assert!(
        waited.contains(expected) && waited.contains("vm/pear: 1Gi of memory (before: 2Gi); the guest gets it when"),
        "{waited}"
    );

    let waited = succeeds(&ns, &["set", "cd", "apple", "https://example.org/a.iso", "--wait"]);
    assert!(
        waited.starts_with("vm/apple: CD drive has https://example.org/a.iso; the running guest has it ("),
        "{waited}"
    );
    let ejected = succeeds(&ns, &["set", "cd", "apple", "--eject"]);
    assert_eq!(ejected, "vm/apple: CD drive is empty (before: https://example.org/a.iso), while it runs\n");
}

#[tokio::test]
async fn disks_are_added_and_grow() {
    let ns = ns("edit-disks").await;
    up(&ns, "apple", |_| ()).await;
    let waited = succeeds(&ns, &["add", "disk", "apple", "2Gi", "--storage-class=explain-late", "--wait"]);
    assert!(
        waited
            .starts_with("vm/apple: a new disk data of 2Gi (claim apple-data-disk); waits for a restart: objects/Pod/"),
        "{waited}"
    );
    let apple = json!(vm(&ns, "apple").await);
    assert_eq!(apple["spec"]["vm"]["disks"][1]["volumeClaimTemplate"]["spec"]["storageClassName"], "explain-late");
    assert_eq!(
        succeeds(&ns, &["grow", "disk", "apple", "core", "2Gi"]),
        "vm/apple: disk core of 2Gi (before: 1Gi), after a restart\n"
    );
    let smaller = run(&ns, &["grow", "disk", "apple", "core", "1Gi"]);
    assert_eq!(smaller.talk, "vm/apple: the disk core has 2Gi already, and a claim can't become smaller\n");
    let apple = vm(&ns, "apple").await;
    assert_eq!(
        json!(apple)["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"],
        "2Gi"
    );
}

/// Each command writes the whole list.
#[tokio::test]
async fn disks_that_are_added_at_the_same_time_are_all_there() {
    let ns = ns("edit-race").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    let names = ["a", "b", "c", "d"];
    let start = |name: &&str| {
        let mut command = command(&ns, &["add", "disk", "apple", "1Gi", "--name", name]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let commands: Vec<_> = names.iter().map(start).collect();
    for command in commands {
        let added = printed(command.wait_with_output().unwrap());
        assert_eq!(added.code, 0, "{added:?}");
    }
    let vm = json!(vm(&ns, "apple").await);
    let disks = vm["spec"]["vm"]["disks"].as_array().unwrap();
    let mut found: Vec<_> =
        disks.iter().map(|disk| disk["volumeClaimTemplate"]["metadata"]["name"].as_str().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, ["a", "b", "c", "core", "d"]);
}

#[tokio::test]
async fn hardware_in_git_is_left_to_git() {
    let ns = ns("edit-git").await;
    let mut manifest = vm_manifest("apple");
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    let git = PatchParams::apply("kustomize-controller").force();
    ns.api::<VirtualMachine>().patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    let refused = run(&ns, &["grow", "disk", "apple", "core", "2Gi"]);
    assert!(
        refused.code == 1
            && refused
                .talk
                .starts_with("vm/apple: kustomize-controller applies spec.vm.disks from Git (its last change: 20"),
        "{refused:?}"
    );
    // Git says nothing about the current CPUs.
    assert_eq!(run(&ns, &["set", "cpus", "apple", "1"]).code, 0);
    let insisted = run(&ns, &["grow", "disk", "apple", "core", "2Gi", "--yes"]);
    assert!(
        insisted.code == 0
            && insisted.talk.contains("kustomize-controller applies spec.vm.disks too, which takes this back"),
        "{insisted:?}"
    );
    // And the next sync does so, but leaves the CPUs.
    ns.api::<VirtualMachine>().patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    let apple = vm(&ns, "apple").await;
    assert_eq!(json!(apple)["spec"]["vm"]["disks"], manifest["spec"]["vm"]["disks"]);
    assert_eq!(apple.spec.vm.current_cpus, Some(1));
}
