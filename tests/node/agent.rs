//! The agent in a container of its own.

use k8s_openapi::api::core::v1::Pod;
use vm_operator::api::conditions;

use super::{LIMIT, NODE, Stage, demo, gone, restarts, stood_still, wait_for};
use crate::support::cluster::eventually;

/// Kills the agents below the container's first process. The script does not find itself.
const KILL: &str = "for process in /proc/[0-9]*; do
    if grep -q 'role=[a]gent' $process/cmdline 2>/dev/null; then kill -KILL ${process#/proc/}; fi
done";

#[tokio::test]
async fn a_killed_agent_is_back_under_the_same_guest_and_only_it_has_a_token() {
    let _shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("agent").await;
    namespace.apply(&demo(&namespace).to_string());
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    let run = |container: &str, script: &str| {
        namespace.kubectl(&["exec", "demo", "--container", container, "--", "sh", "-ec", script])
    };
    assert!(run("agent", "cat /run/secrets/kubernetes.io/serviceaccount/token").starts_with("ey"));
    assert_eq!(run("vm-runner", "ls -A /run/secrets 2>/dev/null || true"), "");
    assert_eq!(
        run("agent", "ls -d /var/local/vm-* /dev/*-disk /dev/kvm 2>/dev/null || true"),
        "",
        "neither disks nor devices"
    );

    let before = run("vm-runner", "cat /run/vm-runner/machine.json");
    for number in 1..=3 {
        run("agent", KILL);
        // Only an agent can carry out a reset and report it.
        let reset = format!(r#"{{"spec":{{"vm":{{"resetCount":{number}}}}}}}"#);
        namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", &reset]);
        eventually("the reset to be reported", LIMIT, async || {
            let status = vms.get("demo").await.unwrap().status?;
            (status.runner.reset_count == Some(number)).then_some(())
        })
        .await;
        let starts = format!("guest: starts={}", number + 1);
        eventually(&starts, LIMIT, async || namespace.log("demo").contains(&starts).then_some(())).await;
    }
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    let is_same_qemu =
        |pod: &Pod| stood_still(&namespace, pod) || run("vm-runner", "cat /run/vm-runner/machine.json") == before;
    let pod = pods.get("demo").await.unwrap();
    assert!(is_same_qemu(&pod));
    assert_eq!(restarts(&namespace, &pod), 0);

    // Another image, which is the same under another name.
    cluster.tag("localhost/vm-runner:0.1.0", "localhost/vm-runner:same");
    let agent = |pod: &Pod| {
        pod.status.as_ref()?.init_container_statuses.as_ref()?.iter().find(|it| it.name == "agent").cloned()
    };
    let old = agent(&pods.get("demo").await.unwrap()).unwrap();
    let image = r#"{"spec":{"image":{"source":"localhost/vm-runner:same"}}}"#;
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", image]);
    eventually("another agent", LIMIT, async || {
        let new = agent(&pods.get("demo").await.unwrap())?;
        (new.container_id != old.container_id && new.state?.running.is_some()).then_some(())
    })
    .await;
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"resetCount":4}}}"#]);
    let vm = eventually("the new agent to report a reset", LIMIT, async || {
        let vm = vms.get("demo").await.unwrap();
        (vm.status.as_ref()?.runner.reset_count == Some(4)).then_some(vm)
    })
    .await;
    let pending: Vec<String> = vm.status.unwrap().pending_changes.into_iter().map(|change| change.path).collect();
    assert_eq!(pending, ["objects/Pod/spec.containers[vm-runner].image"]);
    assert!(is_same_qemu(&pods.get("demo").await.unwrap()));

    // A guest that still boots does not see the power button.
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Stopped"}}}"#]);
    gone(&pods, "demo").await;
    wait_for(&vms, "demo", conditions::READY, true).await;
    namespace.kubectl(&["delete", "vm", "demo"]);
}
