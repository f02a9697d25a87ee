//! What breaks below a VM: the kubelet, containerd, the API server, the manager, the node, its memory. A guest that can be kept is kept, and
//! afterwards each VM is as it should be. `make e2e-faults` prints a row for each fault.

use std::time::Instant;

use vm_operator::api::VirtualMachine;

use super::*;

/// How long a component is away, if no condition says that this was noticed.
const AWAY: Duration = Duration::from_mins(1);

/// A node that the test has for itself, with a VM whose guest has booted.
struct Booted {
    stage: Stage,
    _alone: tokio::sync::RwLockWriteGuard<'static, ()>,
}

impl Booted {
    async fn on_own_node(test: &str) -> Self {
        let _alone = NODE.write().await;
        let stage = Stage::set(test).await;
        stage.namespace.apply(&demo(&stage.namespace).to_string());
        wait_for(&stage.vms, "demo", conditions::BOOTED, true).await;
        Self { stage, _alone }
    }
}

/// The guest that runs in the VM's Pod: another value is another guest.
fn machine(namespace: &TestNamespace) -> String {
    namespace.kubectl(&["exec", "demo", "--container", "vm-runner", "--", "cat", "/run/vm-runner/machine.json"])
}

/// Waits until the node is ready, or is not.
async fn node_is(cluster: &Cluster, ready: bool) {
    let jsonpath = "--output=jsonpath={.items[0].status.conditions[?(@.type==\"Ready\")].status}";
    eventually("the node's condition Ready", LIMIT, async || {
        let status = cluster.try_kubectl(&["get", "nodes", jsonpath]).ok()?;
        ((status == "True") == ready).then_some(())
    })
    .await;
}

/// Waits until the first line of `kubectl vm explain` has these words.
async fn explains(namespace: &TestNamespace, words: &str) -> String {
    eventually(&format!("explain to say {words:?}"), LIMIT, async || {
        let (_tools, mut command) = commands::kubectl_vm(namespace, &["explain", "demo"]);
        let output = command.output().await.unwrap();
        let line = String::from_utf8_lossy(&output.stdout).lines().next()?.to_owned();
        line.contains(words).then_some(line)
    })
    .await
}

/// Waits until the VM's condition Ready has this reason.
async fn ready_says(vms: &Api<VirtualMachine>, expected: &str) {
    eventually(&format!("Ready to say {expected}"), LIMIT, async || {
        let vm = vms.get("demo").await.ok()?;
        (reason(&vm, conditions::READY) == expected).then_some(())
    })
    .await;
}

/// Waits until the VM runs, and is ready.
async fn runs(vms: &Api<VirtualMachine>) {
    ready_says(vms, "Running").await;
}

/// How often the guest has started, as it counts on its disk.
async fn starts(namespace: &TestNamespace, number: u32) {
    let said = format!("guest: starts={number}");
    eventually(&said, LIMIT, async || namespace.log("demo").contains(&said).then_some(())).await;
}

/// A row of docs/faults.md.
fn row(fault: &str, guest: &str, meanwhile: &str, since: Instant) {
    println!("| {fault} | {guest} | {meanwhile} | {} s |", since.elapsed().as_secs());
}

#[tokio::test]
#[ignore = "it kills what all tests of the node need: CONTRIBUTING.md says when to run it"]
async fn a_guest_outlives_kubelet_containerd_api_server_and_etcd() {
    let Booted { stage: Stage { cluster, namespace, vms, .. }, _alone } = Booted::on_own_node("outlives").await;
    let before = machine(&namespace);

    // Until the node's Lease is over, and everybody has noticed.
    cluster.order("fault kill kubelet");
    node_is(cluster, false).await;
    let line = explains(&namespace, "does not answer").await;
    let begin = Instant::now();
    cluster.order("fault start kubelet");
    node_is(cluster, true).await;
    runs(&vms).await;
    row("The kubelet is away until the node is not ready.", "goes on", &line, begin);
    assert_eq!(machine(&namespace), before);

    cluster.order("fault kill containerd");
    tokio::time::sleep(AWAY).await;
    let line = explains(&namespace, "demo runs").await;
    let begin = Instant::now();
    cluster.order("fault start containerd");
    node_is(cluster, true).await;
    runs(&vms).await;
    row("containerd is away for a minute.", "goes on", &line, begin);
    assert_eq!(machine(&namespace), before);

    for component in ["kube-apiserver", "etcd"] {
        cluster.order(&format!("fault kill {component}"));
        tokio::time::sleep(AWAY).await;
        let begin = Instant::now();
        cluster.order(&format!("fault start {component}"));
        node_is(cluster, true).await;
        // Only a manager that works again has seen this change, and only an agent that works can carry it out.
        let count = if component == "etcd" { 2 } else { 1 };
        let reset = format!(r#"{{"spec":{{"vm":{{"resetCount":{count}}}}}}}"#);
        namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", &reset]);
        eventually("the reset to be reported", LIMIT, async || {
            (vms.get("demo").await.ok()?.status?.runner.reset_count == Some(count)).then_some(())
        })
        .await;
        runs(&vms).await;
        row(&format!("{component} is away for a minute."), "goes on", "(nobody can ask)", begin);
        assert_eq!(machine(&namespace), before);
    }
    namespace.kubectl(&["delete", "vm", "demo"]);
}

#[tokio::test]
#[ignore = "it takes minutes: CONTRIBUTING.md says when to run it"]
async fn what_guests_do_while_the_manager_is_away_is_told_when_it_is_back() {
    let _alone = NODE.write().await;
    let Stage { namespace, vms, pods, .. } = Stage::set("away").await;
    let scale = |replicas: &str| {
        namespace.kubectl(&["scale", "deployment", "vm-operator", &format!("--replicas={replicas}")]);
    };
    for (fault, key, value, expected) in [
        ("shuts down", "poweroff-after-boot", serde_json::json!(true), "GuestShutdown"),
        // The claim of the first VM stays: this guest counts its second start.
        ("panics", "panic", serde_json::json!("start 2"), "StoppedAfterPanic"),
    ] {
        let mut manifest = demo(&namespace);
        manifest["spec"]["guestShutdownStops"] = true.into();
        manifest["spec"]["vm"]["onPanic"] = "stop".into();
        manifest["spec"]["cloudInit"]["userData"][key] = value;
        namespace.apply(&manifest.to_string());
        eventually("the Pod to run", LIMIT, async || {
            let pod = pods.get_opt("demo").await.unwrap()?;
            (pod.status?.phase? == "Running").then_some(())
        })
        .await;
        scale("0");
        eventually("no manager", LIMIT, async || {
            let manager = ListParams::default().labels("app.kubernetes.io/component=manager");
            pods.list(&manager).await.unwrap().items.is_empty().then_some(())
        })
        .await;
        let vm = vms.get("demo").await.unwrap();
        assert_ne!(reason(&vm, conditions::READY), expected, "the guest {fault} before the manager was away");
        // What the runner logs then (docs/logging.md).
        let stays_down = "the guest is down and stays down";
        eventually(stays_down, LIMIT, async || namespace.log("demo").contains(stays_down).then_some(())).await;
        let line = explains(&namespace, "waiting for the runner to report").await;
        let begin = Instant::now();
        scale("1");
        ready_says(&vms, expected).await;
        gone(&pods, "demo").await;
        row(&format!("The manager is away, and the guest {fault}."), "stays down", &line, begin);
        namespace.kubectl(&["delete", "vm", "demo"]);
    }
}

#[tokio::test]
#[ignore = "it kills what all tests of the node need: CONTRIBUTING.md says when to run it"]
async fn a_guest_starts_again_after_the_node_has_lost_its_power() {
    let Booted { stage: Stage { cluster, namespace, vms, .. }, _alone } = Booted::on_own_node("power").await;
    let before = machine(&namespace);

    cluster.order("fault crash");
    node_is(cluster, false).await;
    let line = explains(&namespace, "does not answer").await;
    let begin = Instant::now();
    cluster.order("fault start containerd");
    cluster.order("fault start kubelet");
    node_is(cluster, true).await;
    starts(&namespace, 2).await;
    runs(&vms).await;
    row("The node loses its power.", "starts again", &line, begin);
    assert_ne!(machine(&namespace), before);
    namespace.kubectl(&["delete", "vm", "demo"]);
}

#[tokio::test]
#[ignore = "it takes the node's memory away: CONTRIBUTING.md says when to run it"]
async fn an_evicted_guest_starts_again_when_there_is_memory() {
    let Booted { stage: Stage { cluster, namespace, vms, pods }, _alone } = Booted::on_own_node("memory").await;
    let first = pods.get("demo").await.unwrap().metadata.uid;

    cluster.order("fault kill kubelet");
    cluster.order("fault start kubelet --eviction-hard=memory.available<99% --eviction-pressure-transition-period=5s");
    eventually("the Pod to be evicted", LIMIT, async || {
        let pod = pods.get_opt("demo").await.unwrap().filter(|pod| pod.metadata.uid == first);
        pod.is_none_or(|pod| pod.status.is_some_and(|status| status.phase.as_deref() == Some("Failed"))).then_some(())
    })
    .await;
    let line = explains(&namespace, "short of memory").await;
    let begin = Instant::now();
    cluster.order("fault kill kubelet");
    cluster.order("fault start kubelet --eviction-pressure-transition-period=5s");
    starts(&namespace, 2).await;
    runs(&vms).await;
    row("The node is short of memory, and the kubelet evicts the Pod.", "starts again", &line, begin);
    namespace.kubectl(&["delete", "vm", "demo"]);
}
