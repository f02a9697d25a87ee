//! From a YAML file to a booted guest, on a real node: the manager in its Pod as `deploy/` has it, a kubelet, QEMU, a guest.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, reason = "this is test code")]

#[path = "node/agent.rs"]
mod agent;
#[path = "node/commands.rs"]
mod commands;
#[path = "node/devices.rs"]
mod devices;
#[path = "node/explain.rs"]
mod explain;
#[path = "node/faults.rs"]
mod faults;
#[path = "node/helpers.rs"]
mod helpers;
#[path = "node/mended.rs"]
mod mended;
#[path = "node/page.rs"]
mod page;
#[path = "node/pages.rs"]
mod pages;
#[path = "node/reach.rs"]
mod reach;
#[path = "node/recipes.rs"]
mod recipes;
#[path = "support/spice.rs"]
mod spice;
mod support;
#[path = "node/vmctl.rs"]
mod vmctl;

use std::{path::PathBuf, process::Command, sync::OnceLock, time::Duration};

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::ListParams};
use support::{
    cluster::{Cluster, TestNamespace, XTASK, eventually},
    manager::{install_crds, is_about_vms, wait_until_quiet},
    requests::Request,
};
use vm_operator::{
    api::{PowerState, Subject, VirtualMachine, conditions},
    config::{Config, ReconcilerConfig},
    files,
    object::CONFIG_IN_FORCE_MAP,
};

const LIMIT: Duration = Duration::from_secs(600);
/// How long nothing may happen for a cluster to be at rest.
const REST: Duration = Duration::from_secs(60);

/// The images of the manager, the runner and the guest's disk, built if they are not.
fn images() -> Vec<PathBuf> {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let built = PathBuf::from(XTASK).with_file_name("").to_string_lossy().into_owned();
    // The programs that are tested, if they run wherever they are copied to.
    let images: &[&str] =
        if cfg!(target_feature = "crt-static") { &["images", "--programs", &built] } else { &["images"] };
    for task in [images, &["guest"]] {
        let output = Command::new(XTASK).args(task).current_dir(&root).output().unwrap();
        assert!(output.status.success(), "{task:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
    let archives = std::fs::read_dir(root.join(".dev/images")).unwrap().map(|entry| entry.unwrap().path());
    let mut archives: Vec<PathBuf> = archives.filter(|path| path.extension().is_some_and(|end| end == "tar")).collect();
    archives.push(root.join(".dev/guest/image.tar"));
    archives
}

/// Lines of a configuration: what an administrator has allowed for the VMs of these tests.
const ALLOWED: &str = r#""/Manager/Controller/Reconciler":
  networks: {bridges: [pods]}
  podLabels: [app, test, tier]
  nodeNames: [nowhere]
  runnerImages: ["registry.nowhere.invalid/*", "LOCALHOST/*", "localhost/*"]
  extendedResources: ["example.org/*"]
  claims: {dataSources: ["PersistentVolumeClaim/*"], volumeNames: ["*"]}
  templateValues: {import: {images: ["localhost/*"]}}
"#;

/// The manager's configuration with these lines, and [`ALLOWED`].
fn configuration(lines: &str) -> String {
    let config = serde_json::json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator" },
        "data": { "config.yaml": format!("{ALLOWED}{lines}") },
    });
    config.to_string()
}

/// The quickstart in a namespace of the test's own. The policy for VMs would hold for the namespaces of all tests.
fn deploy(cluster: &Cluster, namespace: &TestNamespace) {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("example/quickstart");
    let manifests = cluster.kubectl(&["kustomize", &folder.to_string_lossy()]);
    let manifests: Vec<&str> =
        manifests.split("\n---\n").filter(|text| !text.contains("name: vms.vmoperator.jdrupes.org")).collect();
    let quickstart: String = manifests.join("\n---\n").replace("vmop-demo", namespace.name());
    namespace.apply(&quickstart);
    if namespace.kubectl(&["get", "configmap", "vm-operator", "--ignore-not-found"]).is_empty() {
        namespace.apply(&configuration(""));
    }
    namespace.kubectl(&["rollout", "status", "deployment/vm-operator", "--timeout=600s"]);
    namespace.kubectl(&["wait", "--for=condition=Complete", "job/copy-guest-disk", "--timeout=600s"]);
}

/// Gives the manager these lines as its configuration, and [`ALLOWED`]. A manager that starts has them at once; the one before it may still work on a
/// VM that is made before it has ended.
async fn configure(namespace: &TestNamespace, pods: &Api<Pod>, lines: &str) {
    namespace.apply(&configuration(lines));
    let manager = ListParams::default().labels("app.kubernetes.io/component=manager");
    let former: Vec<String> = pods.list(&manager).await.unwrap().iter().map(ResourceExt::name_any).collect();
    namespace.kubectl(&["rollout", "restart", "deployment/vm-operator"]);
    namespace.kubectl(&["rollout", "status", "deployment/vm-operator", "--timeout=600s"]);
    for name in former {
        gone(pods, &name).await;
    }
    // The kubelet may have given the new Pod what the ConfigMap was a moment ago.
    let wanted = Config::parse(&format!("{ALLOWED}{lines}")).unwrap().reconciler;
    eventually("the manager to use the configuration", LIMIT, async || {
        let kept = ["get", "configmap", CONFIG_IN_FORCE_MAP, "--output=jsonpath={.data.reconciler\\.json}"];
        let kept = serde_json::from_str::<ReconcilerConfig>(&namespace.kubectl(&kept)).ok()?;
        (kept == wanted).then_some(())
    })
    .await;
}

/// A namespace with the manager, and a disk to boot from.
struct Stage {
    cluster: &'static Cluster,
    namespace: TestNamespace,
    vms: Api<VirtualMachine>,
    pods: Api<Pod>,
}

impl Stage {
    async fn set(test: &str) -> Self {
        Self::on(Cluster::with_node().namespace(test).await).await
    }

    /// In that namespace.
    async fn on(namespace: TestNamespace) -> Self {
        static IMAGES: OnceLock<()> = OnceLock::new();
        let cluster = Cluster::with_node();
        IMAGES.get_or_init(|| cluster.import(&images().iter().map(PathBuf::as_path).collect::<Vec<_>>()));
        install_crds(cluster).await;
        deploy(cluster, &namespace);
        let client = cluster.client().await;
        let vms = Api::namespaced(client.clone(), namespace.name());
        Self { cluster, vms, pods: Api::namespaced(client, namespace.name()), namespace }
    }
}

/// Lets the namespace have Pods in the network of the node, or with a profile of seccomp that is none: the quickstart's enforces Pod security.
fn allow_privilege(namespace: &TestNamespace) {
    namespace.kubectl(&["label", "namespace", namespace.name(), "pod-security.kubernetes.io/enforce-"]);
}

/// The quickstart's machine, as it is there.
fn quickstart(namespace: &TestNamespace) -> serde_json::Value {
    serde_yaml::from_str(&include_str!("../example/quickstart/vm.yaml").replace("vmop-demo", namespace.name())).unwrap()
}

/// The quickstart's machine with a BIOS: its emulated CPU boots in half the time.
fn demo(namespace: &TestNamespace) -> serde_json::Value {
    let mut manifest = quickstart(namespace);
    manifest["spec"]["vm"]["firmware"] = "bios".into();
    manifest
}

/// Waits until there is no Pod of that name.
async fn gone(pods: &Api<Pod>, name: &str) {
    eventually("the Pod to be gone", LIMIT, async || pods.get_opt(name).await.unwrap().is_none().then_some(())).await;
}

async fn wait_for(api: &Api<VirtualMachine>, name: &str, type_: &str, status: bool) -> VirtualMachine {
    eventually(&format!("{name} to have {type_}={status}"), LIMIT, async || {
        let vm = api.get(name).await.unwrap();
        let found =
            conditions::find(&vm.status.as_ref()?.conditions, type_)?.status == if status { "True" } else { "False" };
        (found && vm.status.as_ref()?.observed_generation == vm.metadata.generation).then_some(vm)
    })
    .await
}

/// The node. Tests share it, because a guest that boots keeps one core busy; who needs it alone gives up its share first.
static NODE: tokio::sync::RwLock<()> = tokio::sync::RwLock::const_new(());

#[tokio::test]
async fn a_manifest_becomes_a_guest_that_keeps_its_disk() {
    let shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("node").await;

    // It boots, and reads what cloud-init gives it.
    namespace.apply(&quickstart(&namespace).to_string());
    let vm = wait_for(&vms, "demo", conditions::BOOTED, true).await;
    let vm = eventually("the manager to say so", LIMIT, async || {
        let vm = vms.get(&vm.metadata.name.clone().unwrap()).await.unwrap();
        (vm.status.as_ref()?.ready == Some(true)).then_some(vm)
    })
    .await;
    let status = vm.status.unwrap();
    assert!(conditions::is_true(&status.conditions, conditions::READY), "{:?}", status.conditions);
    assert_eq!(
        (status.phase.as_deref(), status.runner.cpus, status.runner.ram.as_deref()),
        (Some("Running"), Some(1), Some("512Mi"))
    );
    assert!(
        status.runner.accelerator.is_some() && status.runner.runner_version.is_some() && status.node_name.is_some(),
        "{status:?}"
    );
    let osinfo = status.runner.osinfo.unwrap();
    assert!(osinfo["kernel-release"].is_string(), "what the guest's agent answers: {osinfo}");
    let console = namespace.log("demo");
    for line in ["guest: hostname=demo-guest", "guest: user-data Hello from cloud-init", "guest: starts=1"] {
        assert!(console.contains(line), "{line:?} in:\n{console}");
    }

    commands::the_console_is_in_a_terminal(&namespace).await;
    commands::the_guest_answers_commands(&namespace).await;
    commands::the_relay_leads_to_the_guests_consoles(&namespace, status.runner.relay_port).await;
    commands::the_screen_is_shown(&namespace).await;

    the_disk_grows(cluster, &namespace).await;

    // At rest nothing is written. The kubelet, the garbage collector and the API server itself look at objects now and then;
    // that we do not even do that is shown where we are alone, in tests/api_server/at_rest.rs.
    drop(shared);
    let alone = NODE.write().await;
    let before = wait_until_quiet(cluster).await;
    tokio::time::sleep(REST).await;
    let requests = cluster.requests().await.since(&before).only(is_about_vms).writes();
    assert_eq!(requests.total(), 0, "{requests}");

    // A manager that starts anew writes nothing about its VMs.
    let before = cluster.requests().await;
    namespace.kubectl(&["rollout", "restart", "deployment/vm-operator"]);
    namespace.kubectl(&["rollout", "status", "deployment/vm-operator", "--timeout=600s"]);
    let log = async || namespace.kubectl(&["logs", "deployment/vm-operator"]);
    eventually("the new manager to work", LIMIT, async || log().await.contains("managing").then_some(())).await;
    let ours = |request: &Request| ["APPLY", "PATCH"].contains(&request.verb.as_str()) && is_about_vms(request);
    let writes = cluster
        .requests()
        .await
        .since(&before)
        .only(|request| ours(request) && request.resource != "pods" && request.resource != "events");
    assert_eq!(writes.total(), 0, "{writes}");
    let _shared = alone.downgrade();

    // The power button.
    let uid = pods.get("demo").await.unwrap().metadata.uid;
    let follow = {
        let config = cluster.kubeconfig().to_owned();
        let name = namespace.name().to_owned();
        std::thread::spawn(move || {
            let output = Command::new(XTASK)
                .args(["kubectl", "--", "--namespace", &name, "logs", "--follow", "demo"])
                .env("KUBECONFIG", config)
                .output();
            String::from_utf8_lossy(&output.unwrap().stdout).into_owned()
        })
    };
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Stopped"}}}"#]);
    gone(&pods, "demo").await;
    let vm = wait_for(&vms, "demo", conditions::READY, true).await;
    assert_eq!(vm.status.unwrap().phase.as_deref(), Some("Stopped"));
    let console = follow.join().unwrap();
    assert!(console.contains("guest: power button"), "{console}");

    // The disk is as the guest left it.
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Running"}}}"#]);
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    assert_ne!(pods.get("demo").await.unwrap().metadata.uid, uid);
    let console = namespace.log("demo");
    assert!(console.contains("guest: starts=2"), "{console}");

    // A CD that does not exist: the machine says which, and the guest starts without it. Its repository does exist.
    let claim = r#"{"apiVersion":"v1","kind":"PersistentVolumeClaim","metadata":{"name":"vmop-image-repository"},
        "spec":{"accessModes":["ReadWriteOnce"],"resources":{"requests":{"storage":"1Gi"}}}}"#;
    namespace.apply(claim);
    let broken = r#"{"apiVersion":"vmoperator.jdrupes.org/v1","kind":"VirtualMachine","metadata":{"name":"broken"},
        "spec":{"vm":{"state":"Running","maximumCpus":1,"maximumRam":"128Mi","powerdownTimeout":1,"disks":[{"cdrom":{"image":"no-such.iso"}}]}}}"#;
    namespace.apply(broken);
    let message = eventually("the machine to say which CD it lacks", LIMIT, async || {
        let vm = vms.get("broken").await.unwrap();
        let conditions = &vm.status.as_ref()?.conditions;
        let ready = conditions::find(conditions, conditions::READY)?.clone();
        (ready.reason == "ChangeFailed" && conditions::is_true(conditions, conditions::RUNNING))
            .then_some(ready.message)
    })
    .await;
    assert!(message.contains("/var/local/vmop-image-repository/no-such.iso"), "{message}");

    // The node is a small one: what is left here would keep it from the other test.
    namespace.kubectl(&["delete", "vm", "--all"]);
    eventually("the Pods to be gone", LIMIT, async || {
        let selector = ListParams::default().labels("app.kubernetes.io/name=vm-runner");
        pods.list(&selector).await.unwrap().items.is_empty().then_some(())
    })
    .await;
}

/// The volume of the guest's disk grows, as a storage grows it, and the guest has a larger disk without a word from anybody.
async fn the_disk_grows(cluster: &Cluster, namespace: &TestNamespace) {
    let volume = namespace.kubectl(&["get", "pvc", "demo-system-disk", "--output=jsonpath={.spec.volumeName}"]);
    // The storage of another cluster is not ours.
    let Some(dir) = cluster.dir() else { return };
    let file = dir.join("volumes").join(volume).join("disk");
    let grown = file.metadata().unwrap().len() + (64 << 20);
    std::fs::File::options().write(true).open(&file).unwrap().set_len(grown).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let output = Command::new(program).args(arguments).output().unwrap();
        assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let devices = run("losetup", &["--noheadings", "--output=NAME", "--associated", file.to_str().unwrap()]);
    run("losetup", &["--set-capacity", devices.trim()]);
    let said = format!("guest: vda={}", grown / 512);
    eventually("the guest to see it", LIMIT, async || namespace.log("demo").contains(&said).then_some(())).await;
}

#[tokio::test]
async fn a_tap_device_is_a_port_of_the_nodes_bridge_and_a_guest_that_shuts_down_starts_again() {
    let _shared = NODE.read().await;
    let Stage { namespace, vms, pods, .. } = Stage::set("tap").await;
    allow_privilege(&namespace);
    let mut manifest = demo(&namespace);
    // The bridge that connects the Pods of this node.
    manifest["spec"]["vm"]["networks"] = serde_json::json!([{ "tap": { "bridge": "pods" } }]);
    // cloud-init's data from objects of the user's own, which the manager never reads.
    manifest["spec"]["cloudInit"] = serde_json::json!({
        "userDataFrom": { "secretKeyRef": { "name": "own", "key": "users" } },
        "networkConfigFrom": { "configMapKeyRef": { "name": "own", "key": "nets" } },
    });
    namespace.kubectl(&["create", "secret", "generic", "own", "--from-literal=users=message: from a secret"]);
    namespace.kubectl(&["label", "secret", "own", "vmoperator.jdrupes.org/cloud-init="]);
    namespace.kubectl(&["create", "configmap", "own", "--from-literal=nets=version: 2"]);
    namespace.kubectl(&["label", "configmap", "own", "vmoperator.jdrupes.org/cloud-init="]);
    namespace.apply(&manifest.to_string());
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    let console = namespace.log("demo");
    for line in ["guest: user-data from a secret", "guest: network-config", "guest: hostname=demo"] {
        assert!(console.contains(line), "{line:?} in:\n{console}");
    }
    let ports = namespace.kubectl(&["exec", "demo", "--", "ls", "/sys/class/net/pods/brif"]);
    assert!(ports.lines().any(|port| port.starts_with("tap")), "{ports}");
    let first = pods.get("demo").await.unwrap().metadata.uid;
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;

    // In the same Pod, because nobody said that it is to stay down.
    let mut manifest = demo(&namespace);
    manifest["spec"]["cloudInit"]["userData"]["poweroff-after-boot"] = true.into();
    namespace.apply(&manifest.to_string());
    let pod = eventually("the guest to be started again", LIMIT, async || {
        let pod = pods.get_opt("demo").await.unwrap()?;
        let restarts = pod.status.as_ref()?.container_statuses.as_ref()?[0].restart_count;
        (restarts > 0 && namespace.log("demo").contains("guest: starts=")).then_some(pod)
    })
    .await;
    assert!(pod.metadata.deletion_timestamp.is_none() && pod.metadata.uid != first);
    let halted = vms.get("demo").await.unwrap().status.unwrap().halted;
    assert_eq!(halted, None);
    // One that goes on like this would keep the cluster from resting.
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;
}

/// A machine's condition as its reason, once the manager has seen the machine as it is.
fn reason(vm: &VirtualMachine, type_: &str) -> String {
    let status = vm.status.as_ref().filter(|status| status.observed_generation == vm.metadata.generation);
    let condition = status.and_then(|status| conditions::find(&status.conditions, type_));
    condition.map(|condition| condition.reason.clone()).unwrap_or_default()
}

/// Whether QEMU has stood still in the Pod, and was ended: QEMU 10.0 has a deadlock when a driver resets the screen (`src/runner/stall.rs`), which each
/// boot with UEFI can meet.
fn stood_still(namespace: &TestNamespace, pod: &Pod) -> bool {
    let container = &pod.status.as_ref().unwrap().container_statuses.as_ref().unwrap()[0];
    let log = || namespace.kubectl(&["logs", &pod.name_any(), "--container", &container.name, "--previous"]);
    container.restart_count > 0 && log().contains("QEMU stands still")
}

/// How often the Pod's containers were started again, but for a QEMU that stood still.
fn restarts(namespace: &TestNamespace, pod: &Pod) -> i32 {
    let status = pod.status.as_ref().unwrap();
    let containers = status.container_statuses.iter().chain(&status.init_container_statuses).flatten();
    let count: i32 = containers.map(|container| container.restart_count).sum();
    count - i32::from(stood_still(namespace, pod))
}

#[tokio::test]
async fn power_changes_live_changes_resets_and_restarts_reach_the_guest() {
    let _shared = NODE.read().await;
    let Stage { namespace, vms, pods, .. } = Stage::set("life").await;
    let when = async |what: &str, check: &dyn Fn(&VirtualMachine) -> bool| {
        eventually(what, LIMIT, async || vms.get_opt("demo").await.unwrap().filter(check)).await
    };
    let console = || namespace.log("demo");
    let up = |vm: &VirtualMachine| reason(vm, conditions::READY) == "Running";

    // Its guest shuts down by itself and is to stay down, whatever is applied again.
    let mut manifest = demo(&namespace);
    manifest["spec"]["guestShutdownStops"] = true.into();
    manifest["spec"]["cloudInit"]["userData"]["poweroff-after-boot"] = true.into();
    namespace.apply(&manifest.to_string());
    when("the guest to be down", &|vm| reason(vm, conditions::READY) == "GuestShutdown").await;
    assert!(pods.get_opt("demo").await.unwrap().is_none());
    manifest["spec"]["cloudInit"]["userData"]["poweroff-after-boot"] = false.into();
    namespace.apply(&manifest.to_string());
    when("it to stay down", &|vm| reason(vm, conditions::READY) == "GuestShutdown").await;

    // A person starts it.
    namespace.kubectl(&["annotate", "vm", "demo", "vmoperator.jdrupes.org/restartedAt=monday"]);
    let vm = when("it to be up", &up).await;
    eventually("the guest's second start", LIMIT, async || console().contains("guest: up").then_some(())).await;
    assert!(console().contains("guest: starts=2"), "{}", console());
    let identity = vm.status.unwrap().runner.identity.unwrap();
    assert!(identity.uuid.is_some() && identity.macs.len() == 1 && identity.machine_type.is_some(), "{identity:?}");
    let first = pods.get("demo").await.unwrap().metadata.uid;

    // A CPU more is live, more memory is not.
    manifest["spec"]["vm"]["currentCpus"] = 2.into();
    manifest["spec"]["vm"]["maximumRam"] = "640Mi".into();
    manifest["spec"]["vm"]["currentRam"] = "512Mi".into();
    namespace.apply(&manifest.to_string());
    let vm = when("the second CPU", &|vm| vm.status.as_ref().unwrap().runner.cpus == Some(2)).await;
    assert_eq!(vm.status.unwrap().runner.identity.unwrap(), identity);
    eventually("the guest to see it", LIMIT, async || console().contains("guest: cpus=2").then_some(())).await;
    let vm = when("RestartRequired", &|vm| reason(vm, conditions::RESTART_REQUIRED) == "Changed").await;
    let pending: Vec<String> = vm.status.unwrap().pending_changes.into_iter().map(|change| change.path).collect();
    assert!(pending.contains(&"config.yaml/vm.maximumRam".to_owned()), "{pending:?}");

    // The state is taken out of what is applied: nobody says how it should be, and it stays as it is.
    let without = {
        let mut without = manifest.clone();
        without["spec"]["vm"].as_object_mut().unwrap().remove("state");
        without
    };
    namespace.apply(&without.to_string());
    let vm = when("PowerUnmanaged", &|vm| reason(vm, conditions::POWER_UNMANAGED) == "StateNotSet").await;
    assert!(up(&vm) && vm.spec.vm.state == PowerState::Stopped);
    namespace.apply(&manifest.to_string());
    when("it to be managed again", &|vm| up(vm) && reason(vm, conditions::POWER_UNMANAGED).is_empty()).await;

    // The resource goes and comes; the guest does not notice.
    namespace.kubectl(&["delete", "vm", "demo", "--cascade=orphan"]);
    namespace.apply(&manifest.to_string());
    let vm = when("the new resource to know its guest", &up).await;
    assert_eq!(vm.status.unwrap().runner.cpus, Some(2));
    let pod = pods.get("demo").await.unwrap();
    assert_eq!(pod.metadata.uid, first);
    assert_eq!(restarts(&namespace, &pod), 0);

    // A reset is the guest's, not the Pod's.
    manifest["spec"]["vm"]["resetCount"] = 1.into();
    namespace.apply(&manifest.to_string());
    when("the reset", &|vm| vm.status.as_ref().unwrap().runner.reset_count == Some(1)).await;
    eventually("the guest's third start", LIMIT, async || console().contains("guest: starts=3").then_some(())).await;
    let pod = pods.get("demo").await.unwrap();
    assert_eq!(pod.metadata.uid, first);
    assert_eq!(restarts(&namespace, &pod), 0);

    // A restart brings what waited.
    namespace.kubectl(&["delete", "pod", "demo", "--wait=false"]);
    eventually("another Pod", LIMIT, async || {
        pods.get_opt("demo").await.unwrap().filter(|pod| pod.metadata.uid != first).map(drop)
    })
    .await;
    let vm = when("it to be up again", &up).await;
    let status = vm.status.unwrap();
    assert_eq!((status.runner.identity.unwrap(), status.pending_changes), (identity, vec![]));
    eventually("the guest's fourth start", LIMIT, async || console().contains("guest: up").then_some(())).await;
    assert!(console().contains("guest: starts=4"), "{}", console());

    // Its disks outlive it.
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;

    // The state that nobody applies becomes Stopped when the guest shuts down.
    manifest["spec"]["cloudInit"]["userData"]["poweroff-after-boot"] = true.into();
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), manifest.to_string()).unwrap();
    namespace.kubectl(&["create", "--filename", file.path().to_str().unwrap()]);
    let vm = when("the state to say so", &|vm| reason(vm, conditions::READY) == "StoppedAsRequested").await;
    assert_eq!(vm.spec.vm.state, PowerState::Stopped);
    assert!(pods.get_opt("demo").await.unwrap().is_none());
    namespace.kubectl(&["delete", "vm", "demo"]);
    let claims = namespace.kubectl(&["get", "pvc", "--output=name", "--selector=app.kubernetes.io/instance=demo"]);
    assert_eq!(claims.lines().count(), 2, "{claims}");
}

/// Lets a node take Pods again, also after a test that failed: the next one needs it.
struct Uncordon<'a>(&'a Cluster, &'a str);

impl Drop for Uncordon<'_> {
    fn drop(&mut self) {
        let _ = self.0.try_kubectl(&["uncordon", self.1]);
    }
}

#[tokio::test]
async fn devices_and_disks_change_under_a_running_guest_and_evictions_and_drains_restart_it() {
    let shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("changes").await;
    let when = async |what: &str, check: &dyn Fn(&VirtualMachine) -> bool| {
        eventually(what, LIMIT, async || vms.get_opt("demo").await.unwrap().filter(check)).await
    };
    let is = |vm: &VirtualMachine, type_: &str| conditions::is_true(&vm.status.as_ref().unwrap().conditions, type_);
    let console = || namespace.log("demo");
    let starts = async |line: &str| eventually(line, LIMIT, async || console().contains(line).then_some(())).await;

    // A class of claims that grow, and a VM with such a disk, an empty CD drive and a display.
    let mut class: serde_json::Value =
        serde_json::from_str(&cluster.kubectl(&["get", "storageclass", "standard", "--output=json"])).unwrap();
    let grows = format!("grows-{}", namespace.name());
    class["metadata"] = serde_json::json!({ "name": grows });
    class["allowVolumeExpansion"] = true.into();
    namespace.apply(&class.to_string());
    let mut manifest = demo(&namespace);
    // By this its Pod is found among those of other tests.
    manifest["metadata"]["labels"] = serde_json::json!({ "test": namespace.name() });
    // Longer than this test waits for anything.
    manifest["spec"]["vm"]["powerdownTimeout"] = 900.into();
    let data = serde_json::json!({
        "metadata": { "name": "data" },
        "spec": { "storageClassName": grows, "resources": { "requests": { "storage": "16Mi" } } },
    });
    let disks = manifest["spec"]["vm"]["disks"].as_array_mut().unwrap();
    disks.extend([serde_json::json!({ "volumeClaimTemplate": data }), serde_json::json!({ "cdrom": { "image": "" } })]);
    namespace.apply(&manifest.to_string());
    when("it to be up", &|vm| is(vm, conditions::BOOTED)).await;
    starts("guest: starts=1").await;
    let first = pods.get("demo").await.unwrap();

    // Memory, a CD, a user, the disk's size, the display's password: all at once.
    manifest["spec"]["vm"]["currentRam"] = "384Mi".into();
    manifest["spec"]["vm"]["disks"][2]["cdrom"]["image"] = "fat:///run/secrets".into();
    manifest["spec"]["vm"]["display"] = serde_json::json!({ "loggedInUser": "alice" });
    manifest["spec"]["vm"]["disks"][1]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] =
        "32Mi".into();
    namespace.apply(&manifest.to_string());
    let password = r#"{"stringData":{"display-password":"open sesame","password-expiry":"never"}}"#;
    let serial = |vm: &VirtualMachine| vm.status.as_ref().unwrap().runner.display_password_serial.unwrap_or_default();
    let before = serial(&vms.get("demo").await.unwrap());
    namespace.kubectl(&["patch", "secret", "demo-display-secret", "--type=merge", "--patch", password]);
    when("less memory", &|vm| vm.status.as_ref().unwrap().runner.ram.as_deref() == Some("384Mi")).await;
    let vm = when("alice", &|vm| is(vm, conditions::USER_LOGGED_IN)).await;
    assert_eq!(vm.status.as_ref().unwrap().runner.logged_in_user.as_deref(), Some("alice"));
    assert!(is(&vm, conditions::VMOP_AGENT_CONNECTED) && console().contains("guest: login alice"), "{}", console());
    let refused = |vm: &VirtualMachine| {
        let status = vm.status.as_ref().unwrap();
        let applied = status.conditions.iter().find(|condition| condition.type_ == conditions::CHANGES_APPLIED);
        applied.is_some_and(|applied| applied.status == "False" && applied.message.contains("the protocol fat"))
    };
    when("the CD to be refused", &refused).await;
    // What the configuration of the manager allows is inserted.
    manifest["spec"]["vm"]["disks"][2]["cdrom"]["image"] = "/usr/bin/qemu-img".into();
    namespace.apply(&manifest.to_string());
    let config = "/Manager:\n  /Controller:\n    /Reconciler:\n      cdFolders: [/usr/bin]\n";
    namespace.apply(&configuration(config));
    eventually("the CD", LIMIT, async || {
        let open = namespace.kubectl(&["exec", "demo", "--", "sh", "-c", "ls -l /proc/[0-9]*/fd"]);
        open.contains("/usr/bin/qemu-img").then_some(())
    })
    .await;
    let claim =
        || namespace.kubectl(&["get", "pvc", "demo-data-disk", "--output=jsonpath={.spec.resources.requests.storage}"]);
    eventually("the claim to grow", LIMIT, async || (claim().trim() == "32Mi").then_some(())).await;
    let mut smaller = manifest.clone();
    smaller["spec"]["vm"]["disks"][1]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] = "8Mi".into();
    namespace.apply(&smaller.to_string());
    let shrinks = |vm: &VirtualMachine| {
        let storage = conditions::find(&vm.status.as_ref().unwrap().conditions, conditions::STORAGE_READY);
        storage.is_some_and(|storage| storage.message.contains("a volume can't shrink to 8Mi"))
    };
    when("the shrinking to be refused", &shrinks).await;
    assert_eq!(claim().trim(), "32Mi");
    namespace.apply(&manifest.to_string());
    when("the password", &|vm| serial(vm) > before).await;
    let address = first.status.as_ref().unwrap().pod_ip.clone().unwrap();
    assert_eq!(vm.status.unwrap().addresses.unwrap()[0].address, address);
    let display = (address.as_str(), 5900);
    assert!(spice::view(display, "sesame").is_err());
    let viewer = spice::view(display, "open sesame").unwrap();
    let vm = when("the viewer", &|vm| is(vm, conditions::CONSOLE_CONNECTED)).await;
    assert!(vm.status.unwrap().runner.console_client.is_some());
    let (code, told) = namespace.kubectl_vm(&["display", "demo"]);
    assert!(code == 1 && told.contains("somebody is connected to the display"), "{told}");
    drop(viewer);
    when("the viewer to be gone", &|vm| {
        !is(vm, conditions::CONSOLE_CONNECTED) && vm.status.as_ref().unwrap().runner.console_client.is_none()
    })
    .await;
    // The password lets nobody in any more: the next viewer gets another one.
    let expired = r#"{"stringData":{"password-expiry":"now"}}"#;
    namespace.kubectl(&["patch", "secret", "demo-display-secret", "--type=merge", "--patch", expired]);
    let (code, file) = namespace.kubectl_vm(&["display", "demo"]);
    assert_eq!(code, 0, "{file}");
    let value = |key: &str| file.lines().find_map(|line| line.strip_prefix(key)).unwrap();
    assert!(spice::view(display, "open sesame").is_err());
    drop(spice::view((value("host="), value("port=").parse().unwrap()), value("password=")).unwrap());
    let now = pods.get("demo").await.unwrap();
    assert_eq!(now.metadata.uid, first.metadata.uid);
    assert_eq!(restarts(&namespace, &now), 0);
    let columns = namespace.kubectl(&["get", "vm", "demo"]);
    let node = cluster.kubectl(&["get", "nodes", "--output=jsonpath={.items[*].metadata.name}"]);
    let words: Vec<&str> = columns.split_whitespace().collect();
    let (heads, row) = words.split_at(words.len() / 2);
    assert_eq!(heads, ["NAME", "STATE", "PHASE", "READY", "CPUS", "RAM", "NODE", "ADDRESS", "AGE"]);
    assert_eq!(row[..8], ["demo", "Running", "Running", "true", "1", "384Mi", node.trim(), &address]);

    // Its Pod is evicted: the guest is asked, and starts again.
    let eviction = serde_json::json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": "demo", "namespace": namespace.name() },
    });
    let body = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(body.path(), eviction.to_string()).unwrap();
    let path = format!("/api/v1/namespaces/{}/pods/demo/eviction", namespace.name());
    namespace.kubectl(&["create", "--raw", &path, "--filename", body.path().to_str().unwrap()]);
    let another = async |not: &Option<String>| {
        eventually("another Pod", LIMIT, async || {
            pods.get_opt("demo").await.unwrap().filter(|pod| pod.metadata.uid != *not)
        })
        .await
    };
    let second = another(&first.metadata.uid).await;
    when("it to be up again", &|vm| is(vm, conditions::BOOTED)).await;
    starts("guest: starts=2").await;

    // A claim is deleted under it: the guest runs on, also if a person asks for a restart, until that person gives up the data, too.
    let uid = || namespace.kubectl(&["get", "pvc", "demo-data-disk", "--output=jsonpath={.metadata.uid}"]);
    let deleted = uid();
    namespace.kubectl(&["delete", "pvc", "demo-data-disk", "--wait=false"]);
    let vm = when("it to be said", &|vm| reason(vm, conditions::STORAGE_READY) == "ClaimDeleting").await;
    assert!(is(&vm, conditions::RUNNING) && uid() == deleted);
    namespace.kubectl(&["annotate", "vm", "demo", "vmoperator.jdrupes.org/restartedAt=monday"]);
    let vm = when("it not to be restarted", &|vm| reason(vm, conditions::READY) == "ClaimDeleting").await;
    assert!(is(&vm, conditions::RUNNING) && uid() == deleted);
    namespace.kubectl(&["annotate", "vm", "demo", &format!("vmoperator.jdrupes.org/replaceClaim={deleted}")]);
    let second = another(&second.metadata.uid).await;
    when("it to be up with another disk", &|vm| is(vm, conditions::BOOTED)).await;
    assert_ne!(uid(), deleted);
    // It counts its starts there.
    starts("guest: starts=1").await;

    // Its node is drained: it waits, says for what, and starts with the node.
    manifest["spec"]["cloudInit"]["userData"]["ignore-power-button"] = true.into();
    namespace.apply(&manifest.to_string());
    let ours = format!("--pod-selector=test={}", namespace.name());
    drop(shared);
    let alone = NODE.write().await;
    let _uncordon = Uncordon(cluster, node.trim());
    cluster.kubectl(&["drain", node.trim(), &ours, "--delete-emptydir-data", "--timeout=600s"]);
    when("it to say that no node takes it", &|vm| reason(vm, conditions::READY) == "Unschedulable").await;
    cluster.kubectl(&["uncordon", node.trim()]);
    let _shared = alone.downgrade();
    let third = another(&second.metadata.uid).await;
    when("it to be up once more", &|vm| is(vm, conditions::BOOTED)).await;
    starts("guest: starts=2").await;

    // It does not listen any more, and a person does not want to wait for the time-out.
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", r#"{"spec":{"vm":{"state":"Stopped"}}}"#]);
    starts("guest: power button, not listening").await;
    let forced = format!("vmoperator.jdrupes.org/forceStop={}", third.metadata.uid.unwrap());
    namespace.kubectl(&["annotate", "vm", "demo", &forced]);
    gone(&pods, "demo").await;
    let vm = when("it to be down", &|vm| reason(vm, conditions::READY) == "StoppedAsRequested").await;
    assert!(!is(&vm, conditions::RUNNING) && !is(&vm, conditions::USER_LOGGED_IN));
    assert_eq!(vm.status.unwrap().runner.logged_in_user.unwrap_or_default(), "");

    namespace.kubectl(&["delete", "vm", "demo"]);
    cluster.kubectl(&["delete", "storageclass", &grows]);
}

#[tokio::test]
async fn a_guest_with_a_pod_network_answers_on_the_pods_address() {
    let _one = devices::PLUGIN.lock().await;
    let _shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("pod-network").await;
    let client = serde_json::json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "client" },
        "spec": { "containers": [{
            "name": "client", "image": "localhost/vm-demo-guest:0.1.0", "imagePullPolicy": "IfNotPresent",
            "command": ["/bin/busybox", "httpd", "-f", "-p", "8000"],
        }] },
    });
    let service = serde_json::json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web" },
        "spec": { "selector": { "tier": "web" }, "ports": [{ "port": 80, "targetPort": 8080 }] },
    });
    namespace.apply(&client.to_string());
    namespace.apply(&service.to_string());
    namespace.kubectl(&["wait", "--for=condition=Ready", "pod/client", "--timeout=600s"]);
    let address = namespace.kubectl(&["get", "service", "web", "--output=jsonpath={.spec.clusterIP}"]);
    // Not wget: the static one has no resolver without its libraries.
    let fetch = r"/bin/busybox printf 'GET / HTTP/1.0\r\n\r\n' | /bin/busybox nc -w 5";
    let fetch = format!("{fetch} {address} 80 || true");

    let mut manifest = demo(&namespace);
    manifest["metadata"]["labels"] = serde_json::json!({ "tier": "web" });
    manifest["spec"]["vm"]["networks"] = serde_json::json!([{ "pod": {} }]);
    // With the profile that the device plugin installs, where Pod security is enforced; and without a profile.
    let _plugin = devices::Plugin::start(cluster);
    for profile in ["Localhost", "Unconfined"] {
        if profile == "Unconfined" {
            allow_privilege(&namespace);
            let config = "'/Manager': {'/Controller': {'/Reconciler': {passt: {seccompProfile: Unconfined}}}}\n";
            configure(&namespace, &pods, config).await;
        }
        namespace.apply(&manifest.to_string());
        wait_for(&vms, "demo", conditions::BOOTED, true).await;
        let page = async || {
            let page = eventually("the guest's page", LIMIT, async || {
                let page = namespace.kubectl(&["exec", "client", "--", "/bin/busybox", "sh", "-c", &fetch]);
                Some(page).filter(|page| !page.is_empty())
            });
            page.await
        };
        let first = page().await;
        assert!(first.ends_with("\n\r\ndemo-guest Hello from cloud-init\n"), "{first}");
        assert!(
            commands::a_forwarded_port_leads_to_the_guest(&namespace)
                .await
                .ends_with("\r\ndemo-guest Hello from cloud-init\n")
        );
        let same = commands::one_connection_leads_to_the_guest(&namespace).await;
        assert!(same.ends_with("\r\ndemo-guest Hello from cloud-init\n"), "{same}");
        commands::a_connection_ends_with_its_reader(&namespace).await;
        let pod = pods.get("demo").await.unwrap();
        let spec = pod.spec.unwrap();
        // Only passt has the weaker profile, and it has neither a disk nor a token nor a device.
        assert!(spec.containers[0].security_context.as_ref().unwrap().seccomp_profile.is_none());
        let passt = spec.init_containers.unwrap().into_iter().find(|container| container.name == "passt").unwrap();
        assert_eq!(passt.security_context.unwrap().seccomp_profile.unwrap().type_, profile);
        let mounts: Vec<_> = passt.volume_mounts.unwrap().into_iter().map(|mount| mount.name).collect();
        assert_eq!((mounts, passt.volume_devices), (vec!["passt".to_owned()], None));
        devices::assert_confined(&namespace, "vm-runner", "qemu-system-x86");
        devices::assert_confined(&namespace, "agent", "vm-runner");
        let log = namespace.kubectl(&["logs", "demo", "--container=passt"]);
        assert!(log.contains("VhostUser"), "{log}");

        // The network comes back when passt does.
        let kill = r"for p in /proc/[0-9]*; do case $(cat $p/comm) in passt*) kill -9 ${p#/proc/};; esac; done";
        namespace.kubectl(&["exec", "demo", "--container=passt", "--", "sh", "-c", kill]);
        eventually("passt to be started again", LIMIT, async || {
            let log = namespace.kubectl(&["logs", "demo", "--container=passt"]);
            log.contains("passt has ended; it is started again").then_some(())
        })
        .await;
        let again = page().await;
        assert!(again.ends_with("\n\r\ndemo-guest Hello from cloud-init\n"), "{again}");
        eventually("QEMU to have noticed both", LIMIT, async || {
            let log = namespace.log("demo");
            (log.contains("passt has ended") && log.contains("passt runs again")).then_some(())
        })
        .await;
        eventually("all devices to work", LIMIT, async || {
            let vm = vms.get("demo").await.unwrap();
            (reason(&vm, conditions::DEVICES_READY) != "NetworkLost").then_some(())
        })
        .await;
        let console = namespace.log("demo");
        let own = format!("guest: address={}", pod.status.unwrap().pod_ip.unwrap());
        assert!(console.contains(&own), "{own}:\n{console}");
        namespace.kubectl(&["delete", "vm", "demo"]);
        gone(&pods, "demo").await;
    }
    // The namespace goes with a guest that runs in it.
    namespace.apply(&manifest.to_string());
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    cluster.kubectl(&["delete", "namespace", namespace.name(), "--timeout=600s"]);
}
