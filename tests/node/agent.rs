//! The agent in a container of its own.

use vm_operator::api::conditions;

use super::{LIMIT, ONE_AT_A_TIME, Stage, demo, gone, wait_for};
use crate::support::cluster::eventually;

/// Kills the agents below the container's first process. The script does not find itself.
const KILL: &str = "for process in /proc/[0-9]*; do
    if grep -q 'role=[a]gent' $process/cmdline 2>/dev/null; then kill -KILL ${process#/proc/}; fi
done";

#[tokio::test]
async fn a_killed_agent_is_back_under_the_same_guest_and_only_it_has_a_token() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let Stage { namespace, vms, pods, .. } = Stage::set("agent").await;
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
            (status.reset_count == Some(number)).then_some(())
        })
        .await;
        let starts = format!("guest: starts={}", number + 1);
        eventually(&starts, LIMIT, async || namespace.kubectl(&["logs", "demo"]).contains(&starts).then_some(())).await;
    }
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    assert_eq!(run("vm-runner", "cat /run/vm-runner/machine.json"), before, "the same QEMU");
    let status = pods.get("demo").await.unwrap().status.unwrap();
    for container in status.container_statuses.iter().chain(&status.init_container_statuses).flatten() {
        assert_eq!(container.restart_count, 0, "{}", container.name);
    }

    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Stopped"}}}"#]);
    gone(&pods, "demo").await;
    wait_for(&vms, "demo", conditions::READY, true).await;
    namespace.kubectl(&["delete", "vm", "demo"]);
}
