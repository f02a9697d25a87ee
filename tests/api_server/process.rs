//! The manager as a process: election, end, probes, metrics, log, and a configuration that changes. One file, because these tests start
//! and end managers with the same helper.

use std::{
    fs,
    pin::pin,
    time::{Duration, Instant},
};

use crate::support::{
    cluster::{Cluster, OwnCluster, TestNamespace, eventually},
    manager::{Manager, Setup, install_crds},
    proxy::{Faults, Proxy},
};
use futures::{
    StreamExt,
    future::{join_all, ready},
};
use k8s_openapi::api::{
    coordination::v1::Lease,
    core::v1::{ConfigMap, Event, Pod, Service},
};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
    runtime::{WatchStreamExt, watcher::watch_object},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tokio::time::timeout;
use vm_operator::api::VirtualMachine;

const LIMIT: Duration = Duration::from_secs(180);

/// A namespace for managers.
struct ManagersNamespace {
    cluster: &'static Cluster,
    namespace: TestNamespace,
    client: Client,
    /// What its managers may do.
    kubeconfig: NamedTempFile,
}

impl ManagersNamespace {
    async fn new(test: &str) -> Self {
        let cluster = Cluster::control_plane();
        install_crds(cluster).await;
        Self::of(cluster, test).await
    }

    async fn of(cluster: &'static Cluster, test: &str) -> Self {
        let namespace = cluster.namespace(test).await;
        namespace.create_runners_account().await;
        Self { cluster, client: cluster.client().await, kubeconfig: namespace.managers_kubeconfig().await, namespace }
    }

    fn manager(&self, setup: &Setup<'_>) -> Manager {
        Manager::with(self.kubeconfig.path(), Some(self.namespace.name()), setup)
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), self.namespace.name())
    }

    fn create_vm(&self, name: &str) {
        self.namespace.apply(&vm_manifest(name).to_string());
    }

    /// Waits for the Pod of a machine.
    async fn pod(&self, name: &str) -> Pod {
        let pods: Api<Pod> = self.api();
        eventually(&format!("the Pod of {name}"), LIMIT, async || pods.get_opt(name).await.unwrap()).await
    }

    /// Who holds the lease, and how often that has changed.
    async fn holder(&self) -> (Option<String>, Option<i32>) {
        let spec = self.api::<Lease>().get("vm-operator").await.unwrap().spec.unwrap();
        (spec.holder_identity, spec.lease_transitions)
    }

    /// A manager that leads and one that stands by.
    async fn leader_and_standby(&self) -> (Manager, Manager) {
        let leader = self.manager(&Setup::default());
        leader.wait_until_ready("[+] vms: 0 listed").await;
        let standby = self.manager(&Setup::default());
        standby.wait_until_ready("standing by for").await;
        let leads = |manager: &Manager| manager.metric("vm_operator_leader");
        assert_eq!((leads(&leader), leads(&standby)), (Some(1.0), Some(0.0)));
        // What an alert asks of each.
        for manager in [&leader, &standby] {
            for what in ["config", "templates"] {
                assert_eq!(manager.metric(&format!("vm_operator_{what}_last_load_successful")), Some(1.0), "{what}");
            }
        }
        (leader, standby)
    }
}

fn vm_manifest(name: &str) -> Value {
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": name },
        "spec": { "vm": { "state": "Running", "maximumCpus": 2 } },
    })
}

#[tokio::test]
async fn a_standby_takes_over_when_the_leader_is_killed() {
    let ns = ManagersNamespace::new("killed").await;
    let (mut leader, standby) = ns.leader_and_standby().await;
    ns.create_vm("before");
    ns.pod("before").await;
    leader.signal(Signal::KILL);
    let since = Instant::now();
    leader.wait_for_end().await;
    ns.create_vm("apple");
    standby.wait_until_ready("[+] lease: held").await;
    eprintln!("The next one leads {:.1} s after SIGKILL", since.elapsed().as_secs_f64());
    ns.pod("apple").await;
    eprintln!("A new VM has its Pod {:.1} s after the leader was killed", since.elapsed().as_secs_f64());
    assert_eq!(standby.metric("vm_operator_leader"), Some(1.0));
}

#[tokio::test]
async fn a_leader_that_gets_sigterm_releases_its_lease_and_a_standby_takes_over() {
    let ns = ManagersNamespace::new("stopped").await;
    let (mut leader, mut standby) = ns.leader_and_standby().await;
    let first = ns.holder().await;
    let lease = watch_object(ns.api::<Lease>(), "vm-operator").default_backoff();
    let mut holders = pin!(lease.filter_map(async |lease| lease.ok()??.spec?.holder_identity));
    assert_eq!(holders.next().await, first.0);
    leader.signal(Signal::TERM);
    let since = Instant::now();
    assert!(leader.wait_for_end().await.success());
    eprintln!("SIGTERM to exit: {} ms", since.elapsed().as_millis());
    let mut holders = pin!(holders.skip_while(|holder| ready(first.0.as_ref() == Some(holder))));
    let next = timeout(LIMIT, holders.next()).await.unwrap();
    assert_eq!(next.as_deref(), Some(""), "it is given back, so that nobody waits for its end");
    standby.wait_until_ready("[+] vms: 0 listed").await;
    eprintln!("The next one leads and has listed the machines {} ms after SIGTERM", since.elapsed().as_millis());
    ns.create_vm("apple");
    ns.pod("apple").await;
    assert_ne!(ns.holder().await, first);

    standby.signal(Signal::INT);
    assert!(standby.wait_for_end().await.success());
    assert_eq!(ns.holder().await.0.as_deref(), Some(""), "nobody has to wait for one who is not there");
}

#[tokio::test]
async fn a_leader_that_ends_in_the_middle_of_work_leaves_it_to_the_next() {
    const MACHINES: usize = 200;
    let ns = ManagersNamespace::new("busy").await;
    let (mut leader, _standby) = ns.leader_and_standby().await;
    let machines: Api<VirtualMachine> = ns.api();
    let make = async |number| {
        let vm = serde_json::from_value(vm_manifest(&format!("apple-{number}"))).unwrap();
        machines.create(&PostParams::default(), &vm).await.unwrap()
    };
    join_all((0..MACHINES).map(make)).await;
    let pods: Api<Pod> = ns.api();
    let count = async || pods.list(&ListParams::default()).await.unwrap().items.len();
    eventually("some Pods", LIMIT, async || (count().await > 0).then_some(())).await;
    leader.signal(Signal::TERM);
    let since = Instant::now();
    assert!(leader.wait_for_end().await.success());
    eprintln!("SIGTERM to exit: {} ms, with {} of {MACHINES} Pods", since.elapsed().as_millis(), count().await);
    assert!(!leader.log().contains("not done yet"), "an end is no failure");
    eventually("all Pods", LIMIT, async || (count().await == MACHINES).then_some(())).await;
}

/// A manager that can't list the ConfigMaps with template sets waits for them, but ends when it gets SIGTERM.
#[tokio::test]
async fn a_manager_that_gets_sigterm_before_its_first_list_ends() {
    let ns = ManagersNamespace::new("not-begun").await;
    let proxy = Proxy::start(ns.client.clone(), 7, Faults { half_lists: u8::MAX, ..Faults::default() }).await;
    let mut manager = Manager::start_with(&proxy.kubeconfig(), ns.namespace.name(), &[], "");
    eventually("a list to be broken", LIMIT, async || {
        manager.log().contains("managing").then_some(())?;
        proxy.injected().contains_key("half a list").then_some(())
    })
    .await;
    manager.signal(Signal::TERM);
    assert!(manager.wait_for_end().await.success());
    let is_compiled = |manager: &Manager| manager.log().contains("compiled");
    assert!(!is_compiled(&manager), "{}", manager.log());
    // Once the list is whole, that is what comes next.
    proxy.calm();
    let manager = Manager::start_with(&proxy.kubeconfig(), ns.namespace.name(), &[], "");
    eventually("the templates to be compiled", LIMIT, async || is_compiled(&manager).then_some(())).await;
}

#[tokio::test]
async fn a_standby_that_gets_sigterm_ends_and_leaves_the_lease() {
    let ns = ManagersNamespace::new("standby").await;
    let (_leader, mut standby) = ns.leader_and_standby().await;
    let first = ns.holder().await;
    standby.signal(Signal::TERM);
    assert!(standby.wait_for_end().await.success());
    assert_eq!(ns.holder().await, first);
}

#[tokio::test]
async fn a_leader_that_was_suspended_past_its_lease_writes_nothing() {
    let ns = ManagersNamespace::new("slept").await;
    let (mut leader, standby) = ns.leader_and_standby().await;
    leader.signal(Signal::STOP);
    ns.create_vm("apple");
    standby.wait_until_ready("[+] lease: held").await;
    ns.pod("apple").await;
    let written = leader.log();
    leader.signal(Signal::CONT);
    assert_eq!(leader.wait_for_end().await.code(), Some(1));
    let after = leader.log().split_off(written.len());
    assert!(after.contains("this manager must not go on"), "{after}");
    assert!(standby.log().contains("applied"), "this is how a write is logged: {}", standby.log());
    assert!(!after.contains("applied"), "{after}");
}

#[tokio::test]
async fn a_write_that_is_held_up_past_the_lease_does_not_arrive() {
    let ns = ManagersNamespace::new("held").await;
    let proxy = Proxy::start(ns.client.clone(), 1, Faults::default()).await;
    let mut leader = Manager::with(&proxy.kubeconfig(), Some(ns.namespace.name()), &Setup::default());
    leader.wait_until_ready("[+] vms: 0 listed").await;
    let standby = ns.manager(&Setup::default());
    standby.wait_until_ready("standing by for").await;
    proxy.hold_writes(true);
    let before = proxy.writes();
    ns.create_vm("apple");
    eventually("a write of the leader", LIMIT, async || proxy.injected().get("held write").copied()).await;
    standby.wait_until_ready("[+] lease: held").await;
    ns.pod("apple").await;
    ns.api::<VirtualMachine>()
        .patch("apple", &PatchParams::default(), &Patch::Merge(json!({ "spec": { "vm": { "state": "Stopped" } } })))
        .await
        .unwrap();
    let pods: Api<Pod> = ns.api();
    eventually("no Pod", LIMIT, async || pods.get_opt("apple").await.unwrap().is_none().then_some(())).await;
    assert_eq!(leader.wait_for_end().await.code(), Some(1));
    proxy.hold_writes(false);
    // A write of somebody else passes the proxy after those that it held.
    let config: kube::config::Kubeconfig =
        serde_yaml::from_str(&fs::read_to_string(proxy.kubeconfig()).unwrap()).unwrap();
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await.unwrap();
    let maps: Api<ConfigMap> = Api::namespaced(Client::try_from(config).unwrap(), ns.namespace.name());
    let map = json!({ "metadata": { "name": "after" } });
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    let mut after = proxy.writes();
    after.retain(|write, count| before.get(write) != Some(count));
    assert_eq!(
        after.keys().collect::<Vec<_>>(),
        [&format!("POST /api/v1/namespaces/{}/configmaps", ns.namespace.name())]
    );
    assert!(pods.get_opt("apple").await.unwrap().is_none());
}

/// Only the manager's own clock jumps: the times in objects are the API server's.
#[tokio::test]
#[cfg_attr(
    target_feature = "crt-static",
    ignore = "a clock is only set for a program with shared libraries, as `cargo test` builds it"
)]
async fn a_clock_that_jumps_changes_nothing() {
    let ns = ManagersNamespace::new("clock").await;
    let folder = tempfile::tempdir().unwrap();
    let clock = folder.path().join("clock");
    let jump = |by: &str| {
        // In one step, as the manager reads it at any time.
        std::fs::write(folder.path().join("new"), by).unwrap();
        std::fs::rename(folder.path().join("new"), &clock).unwrap();
    };
    jump("+0");
    // Timers follow the clock that can't be set (https://github.com/wolfcw/libfaketime#readme).
    let environment = [
        ("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"),
        ("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap()),
        ("FAKETIME_NO_CACHE", "1"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    let manager = ns.manager(&Setup { environment: &environment, ..Setup::default() });
    let year = Timestamp::now().strftime("%Y-").to_string();
    ns.create_vm("apple");
    let pods: Api<Pod> = ns.api();
    let mut uid = ns.pod("apple").await.metadata.uid;
    let first = ns.holder().await;
    for (number, by) in ["+800d", "-800d", "+800d", "+0"].into_iter().enumerate() {
        jump(by);
        let begin = manager.log().len();
        // A new machine is made as ever, ...
        let other = format!("pear-{number}");
        ns.create_vm(&other);
        ns.pod(&other).await;
        assert_eq!(manager.log()[begin..].contains(&year), by == "+0", "the clock has jumped by {by}");
        // ... one that is there stays as it is, ...
        assert_eq!(pods.get("apple").await.unwrap().metadata.uid, uid, "{by}");
        // ... and a restart is one restart.
        let at = format!("2026-11-21T10:00:0{number}Z");
        let at = json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/restartedAt": at } } });
        let machines: Api<VirtualMachine> = ns.api();
        machines.patch("apple", &PatchParams::default(), &Patch::Merge(&at)).await.unwrap();
        uid = eventually(&format!("a new Pod after {by}"), LIMIT, async || {
            pods.get_opt("apple").await.unwrap().map(|pod| pod.metadata.uid).filter(|new| *new != uid)
        })
        .await;
    }
    manager.wait_until_idle().await;
    assert_eq!(pods.get("apple").await.unwrap().metadata.uid, uid);
    assert_eq!(ns.holder().await, first, "nobody else has taken over, and it has not given up");
    assert_eq!(manager.log().matches("deleted object=Pod apple").count(), 4);
}

#[tokio::test]
async fn without_an_election_there_is_no_lease() {
    let ns = ManagersNamespace::new("alone").await;
    let manager = ns.manager(&Setup { arguments: &["--leader-election=false"], ..Setup::default() });
    manager.wait_until_ready("[+] lease: not used").await;
    ns.create_vm("apple");
    ns.pod("apple").await;
    assert!(ns.api::<Lease>().get_opt("vm-operator").await.unwrap().is_none());
}

/// A configuration whose Services all have a label.
fn labelled(value: &str) -> String {
    format!(
        "/Manager:\n  /Controller:\n    /Reconciler:\n      loadBalancerService:\n        labels: {{team: {value}}}\n      old: 1\n"
    )
}

#[tokio::test]
async fn a_changed_configuration_is_used_and_a_broken_one_is_not() {
    let ns = ManagersNamespace::new("config").await;
    let manager = ns.manager(&Setup::default());
    manager.wait_until_ready("[+] config: defaults").await;
    let mut vm = vm_manifest("apple");
    vm["spec"]["loadBalancerService"] = json!({ "labels": { "a": "b" } });
    ns.namespace.apply(&vm.to_string());
    let services: Api<Service> = ns.api();
    let team = async |expected: &str| {
        eventually(&format!("a Service of team {expected}"), LIMIT, async || {
            let service = services.get_opt("apple").await.unwrap()?;
            (service.labels().get("team")? == expected).then_some(())
        })
        .await;
    };

    // It appears, changes, breaks, and is mended.
    manager.change_configuration(&labelled("red"));
    team("red").await;
    manager.change_configuration(&labelled("blue"));
    team("blue").await;
    let before = services.get("apple").await.unwrap().resource_version();
    manager.change_configuration(&labelled("[1"));
    let good = "vm_operator_config_last_load_successful";
    eventually("the broken file to be seen", LIMIT, async || (manager.metric(good) == Some(0.0)).then_some(())).await;
    assert!(manager.log().contains("config/config.yaml:5:26: "), "{}", manager.log());
    assert_eq!(manager.get("/readyz").unwrap().0, 200, "a manager with a good configuration works");
    manager.change_configuration(&labelled("green").replace("green}", "green}\n      cpuOvercommit: 0"));
    let place = "config/config.yaml:6:22: /Manager./Controller./Reconciler.cpuOvercommit: invalid value";
    eventually("the bad value to be seen", LIMIT, async || manager.log().contains(place).then_some(())).await;
    assert_eq!(services.get("apple").await.unwrap().resource_version(), before);
    manager.change_configuration(&labelled("green"));
    team("green").await;
    assert_eq!(manager.metric(good), Some(1.0));
    assert_eq!(manager.metric("vm_operator_config_loads_total{result=\"failure\"}"), Some(2.0));
    assert_eq!(manager.log().matches("/Manager/Controller/Reconciler: old is not known").count(), 1);
}

#[tokio::test]
async fn a_manager_that_ends_writes_its_events_and_then_releases_its_lease() {
    let ns = ManagersNamespace::new("last-words").await;
    let mut manager = ns.manager(&Setup::default());
    manager.wait_until_ready("[+] vms: 0 listed").await;
    ns.create_vm("apple");
    let vms: Api<VirtualMachine> = ns.api();
    // An event is recorded before the status is written.
    let has_status = async || vms.get("apple").await.unwrap().status?.created.filter(|created| *created);
    eventually("a status with a Pod", LIMIT, has_status).await;
    manager.signal(Signal::TERM);
    assert!(manager.wait_for_end().await.success());
    let events = ns.api::<Event>().list(&ListParams::default()).await.unwrap();
    let is_made = |event: &&Event| event.message.as_deref() == Some("created Pod apple");
    let event = events.iter().find(is_made).unwrap_or_else(|| panic!("{events:?}"));
    let lease = ns.api::<Lease>().get("vm-operator").await.unwrap();
    assert_eq!(lease.spec.as_ref().unwrap().holder_identity.as_deref(), Some(""));
    // All objects of an API server are written in one order (https://etcd.io/docs/v3.6/learning/data_model/).
    fn revision(object: &impl ResourceExt) -> u64 {
        object.resource_version().unwrap().parse().unwrap()
    }
    let (vm, pod) = (vms.get("apple").await.unwrap(), ns.pod("apple").await);
    let last = revision(&lease);
    let written = [revision(event), revision(&vm), revision(&pod)];
    assert!(written.iter().all(|revision| *revision < last), "{written:?} {last}");
}

#[tokio::test]
async fn a_display_secret_that_was_there_before_the_manager_is_mounted_by_the_first_pod() {
    let ns = ManagersNamespace::new("secret-first").await;
    let labels = json!({
        "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "apple",
        "app.kubernetes.io/component": "display-secret",
    });
    let metadata = json!({ "name": "mine", "labels": labels });
    let data = json!({ "display-password": "mine" });
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": data });
    ns.namespace.apply(&secret.to_string());
    // Nothing of the machine's own is a Secret.
    let mut vm = vm_manifest("apple");
    vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } });
    ns.namespace.apply(&vm.to_string());
    let _manager = ns.manager(&Setup::default());
    let volumes = json!(ns.pod("apple").await.spec.unwrap().volumes).to_string();
    assert!(volumes.contains(r#""name":"mine""#), "{volumes}");
}

#[tokio::test]
async fn a_configuration_that_is_broken_from_the_start_ends_the_manager() {
    let ns = ManagersNamespace::new("config-start").await;
    let mut manager = ns.manager(&Setup { config: Some("a: [\n"), ..Setup::default() });
    assert_eq!(manager.wait_for_end().await.code(), Some(1));
    assert!(manager.log().contains("config/config.yaml:2:1: "), "{}", manager.log());
}

#[tokio::test]
async fn metrics_and_log_report_what_happened() {
    let ns = ManagersNamespace::new("metrics").await;
    let undefined = "{% if vm.metadata.name == 'bad' %}{{ nothing.here }}{% endif %}\n";
    let mut manager = ns.manager(&Setup { templates: &[("a.yaml.j2", undefined)], ..Setup::default() });
    manager.wait_until_ready("[+] vms: 0 listed").await;
    ns.create_vm("apple");
    ns.create_vm("bad");
    ns.pod("apple").await;
    let metric = |name: &str| manager.metric(name);
    let count = |name: &str| metric(name).unwrap_or_default();
    eventually("both machines to be counted", LIMIT, async || {
        let counted = count("vm_operator_machines{phase=\"Starting\"}") == 1.0
            && count("vm_operator_machines{phase=\"Failed\"}") == 1.0
            && count("vm_operator_machines_not_ready{reason=\"TemplateError\"}") == 1.0
            && count("vm_operator_machines_waiting") == 0.0
            && count("vm_operator_machines_in_work") == 0.0;
        counted.then_some(())
    })
    .await;
    for (kind, number) in [("Pod", 1.0), ("Secret", 2.0), ("PersistentVolumeClaim", 1.0)] {
        let applies = metric(&format!("vm_operator_writes_total{{verb=\"apply\",kind=\"{kind}\"}}"));
        assert_eq!(applies, Some(number), "{kind}");
    }
    assert!(count("vm_operator_applies_skipped_total{kind=\"Pod\"}") >= 1.0);
    assert!(count("vm_operator_writes_total{verb=\"status\",kind=\"VirtualMachine\"}") >= 2.0);
    assert!(count("vm_operator_template_errors_total") >= 1.0);
    let looks = ["done", "again", "failed"]
        .map(|result| count(&format!("vm_operator_reconciles_total{{result=\"{result}\"}}")));
    assert_eq!(looks.iter().sum::<f64>(), count("vm_operator_reconcile_duration_seconds_count"));
    assert!(looks[0] + looks[1] >= 2.0, "{looks:?}");
    assert!(count("process_resident_memory_bytes") > 1e6);
    assert!(metric(concat!("vm_operator_build_info{version=\"", env!("CARGO_PKG_VERSION"), "\"}")).is_some());

    // Each line of a look at a machine names it.
    let log = manager.log();
    let lines: Vec<&str> = log.lines().filter(|line| line.contains("object=Pod apple")).collect();
    let name = format!("vm=\"{}/apple\"", ns.namespace);
    assert!(!lines.is_empty() && lines.iter().all(|line| line.contains(&name) && line.contains(" id=")), "{lines:?}");

    for (path, text) in [("/livez", "ok\n"), ("/healthz", "ok\n")] {
        assert_eq!(manager.get(path).unwrap(), (200, text.to_owned()));
    }

    // As JSON, too.
    manager.signal(Signal::TERM);
    assert!(manager.wait_for_end().await.success());
    let manager = ns.manager(&Setup { arguments: &["--log-format=json"], ..Setup::default() });
    ns.create_vm("pear");
    let line = eventually("a line about the Pod", LIMIT, async || {
        let log = manager.log();
        let (complete, _) = log.rsplit_once('\n')?;
        let mut lines = complete.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.find(|line| line["object"] == "Pod pear")
    })
    .await;
    assert_eq!(line["span"]["vm"], format!("{}/pear", ns.namespace), "{line}");
    assert!(line["span"]["id"].is_u64() && line["level"] == "INFO" && line["message"] == "applied", "{line}");
}

/// Needs the feature: `cargo test --features dev,otel --test api_server traces`.
#[cfg(feature = "otel")]
#[tokio::test]
async fn traces_are_sent_to_the_configured_endpoint() {
    let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
    let collect = async move |body: axum::body::Bytes| drop(sender.send(body));
    let collector = axum::Router::new().route("/v1/traces", axum::routing::post(collect));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, collector).await.unwrap() });

    let ns = ManagersNamespace::new("traces").await;
    let environment = &[("OTEL_EXPORTER_OTLP_ENDPOINT", &*endpoint)];
    let mut manager = ns.manager(&Setup { environment, ..Setup::default() });
    ns.create_vm("apple");
    ns.pod("apple").await;
    // What is still in the program is sent when it ends.
    manager.signal(Signal::TERM);
    assert!(manager.wait_for_end().await.success());
    let trace = tokio::time::timeout(LIMIT, received.recv()).await.unwrap().unwrap();
    // Texts stand in the protocol as they are.
    let text = String::from_utf8_lossy(&trace);
    for part in ["vm-operator", "reconcile", &format!("{}/apple", ns.namespace)] {
        assert!(text.contains(part), "no {part} in {text:?}");
    }
}

/// The definition of VirtualMachines as it might have been once: without rules.
fn old_definition() -> Value {
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "vms.vmoperator.jdrupes.org" },
        "spec": {
            "group": "vmoperator.jdrupes.org", "scope": "Namespaced",
            "names": { "kind": "VirtualMachine", "plural": "vms", "singular": "vm", "listKind": "VirtualMachineList" },
            "versions": [{ "name": "v1", "served": true, "storage": true, "subresources": { "status": {} },
                "schema": { "openAPIV3Schema": schema } }],
        },
    })
}

/// The reason and the message of the condition Ready of a VM, which need not be one that can be read.
async fn ready_of(ns: &ManagersNamespace, name: &str) -> Option<(String, String)> {
    let resource = kube::api::ApiResource::erase::<VirtualMachine>(&());
    let vms: Api<DynamicObject> = Api::namespaced_with(ns.client.clone(), ns.namespace.name(), &resource);
    let vm = vms.get(name).await.unwrap();
    let conditions = vm.data["status"]["conditions"].as_array()?;
    let ready = conditions.iter().find(|condition| condition["type"] == "Ready")?;
    Some((ready["reason"].as_str()?.to_owned(), ready["message"].as_str()?.to_owned()))
}

#[tokio::test]
async fn the_manager_waits_for_the_crd_and_bad_values_take_nothing_else_away() {
    // An API server of its own: the other tests need the definitions.
    let cluster = OwnCluster::api_server();
    let ns = ManagersNamespace::of(*cluster, "definition").await;
    let manager = ns.manager(&Setup::default());
    let missing = "[-] vms: the API server does not know vms: apply the CustomResourceDefinitions in crds/";
    eventually("readyz to say what is missing", LIMIT, async || {
        manager.get("/readyz").filter(|(status, text)| *status == 503 && text.contains(missing)).map(drop)
    })
    .await;
    assert_eq!(manager.get("/livez").unwrap().0, 200, "waiting is no reason to be restarted");

    ns.namespace.apply(&old_definition().to_string());
    manager.wait_until_ready("[+] vms: 0 listed").await;
    let mut strange = vm_manifest("strange");
    strange["spec"]["vm"]["maximumCpus"] = json!("many");
    ns.namespace.apply(&strange.to_string());
    ns.create_vm("apple");
    ns.pod("apple").await;
    let invalid = async |name: &str, field: &str| {
        eventually(&format!("{name} to have an invalid {field}"), LIMIT, async || {
            let (reason, message) = ready_of(&ns, name).await?;
            (reason == "InvalidSpec" && message.starts_with(field)).then_some(())
        })
        .await;
    };
    invalid("strange", "spec.vm.maximumCpus: ").await;
    eventually("an event", LIMIT, async || {
        let arguments =
            ["get", "events", "--field-selector=reason=InvalidSpec", "--output=jsonpath={.items[*].message}"];
        ns.namespace.kubectl(&arguments).contains("many").then_some(())
    })
    .await;
    assert!(ns.api::<Pod>().get_opt("strange").await.unwrap().is_none());
    assert_eq!(manager.metric("vm_operator_machines_unreadable"), Some(0.0));

    // One that worked keeps what it has; a manager that starts then changes nothing either.
    let maps: Api<ConfigMap> = ns.api();
    let versions =
        async || (ns.pod("apple").await.resource_version(), maps.get("apple").await.unwrap().resource_version());
    let patch = |patch: Value| {
        ns.namespace.kubectl(&["patch", "vm", "apple", "--type=merge", "--patch", &patch.to_string()]);
    };
    let before = versions().await;
    patch(json!({ "spec": { "vm": { "state": "Sideways", "maximumRam": "16Ei" } } }));
    invalid("apple", "spec.vm.maximumRam: \"16Ei\" is not a size").await;
    ns.create_vm("pear");
    ns.pod("pear").await;
    drop(manager);
    let manager = ns.manager(&Setup::default());
    manager.wait_until_ready("[+] vms: 3 listed").await;
    ns.create_vm("strange");
    ns.pod("strange").await;
    assert_eq!(versions().await, before);

    // It can be stopped.
    patch(json!({ "spec": { "vm": { "state": "Stopped" } } }));
    eventually("the Pod to be gone", LIMIT, async || {
        ns.api::<Pod>().get_opt("apple").await.unwrap().is_none().then_some(())
    })
    .await;
    invalid("apple", "spec.vm.maximumRam: ").await;
    assert_eq!(maps.get("apple").await.unwrap().resource_version(), before.1);
}

#[tokio::test]
async fn a_status_that_the_definition_does_not_allow_is_corrected() {
    // An API server of its own: it first has another definition.
    let cluster = OwnCluster::api_server();
    let ns = ManagersNamespace::of(*cluster, "odd-status").await;
    ns.namespace.apply(&old_definition().to_string());
    eventually("the definition", LIMIT, async || {
        ns.api::<VirtualMachine>().list(&ListParams::default()).await.ok().map(drop)
    })
    .await;
    ns.create_vm("apple");
    let mut strange = vm_manifest("strange");
    strange["spec"]["guestShutdownStops"] = json!("often");
    ns.namespace.apply(&strange.to_string());
    let invalid = async |name: &str| {
        eventually(&format!("{name} to be invalid"), LIMIT, async || {
            ready_of(&ns, name).await.filter(|(reason, _)| reason == "InvalidSpec").map(drop)
        })
        .await;
    };
    let conditions = json!([
        { "type": "Running", "status": "True", "reason": "VmRunning", "message": "It runs." }, { "type": "Booted" }, "x",
        { "type": "Theirs", "status": "True" }, { "type": "Running", "status": "False" },
    ]);
    let status = json!({ "status": {
        "cpus": "two", "ram": 7, "conditions": conditions, "assignment": 7, "osinfo": "x", "pendingChanges": {}, "phase": [],
    } });
    ns.namespace.kubectl(&[
        "patch",
        "vm",
        "apple",
        "--subresource=status",
        "--type=merge",
        "--patch",
        &status.to_string(),
    ]);
    install_crds(*cluster).await;
    let _manager = ns.manager(&Setup::default());
    ns.pod("apple").await;
    eventually("the status", LIMIT, async || {
        ready_of(&ns, "apple").await.filter(|(reason, _)| reason == "Running").map(drop)
    })
    .await;
    let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert!(vm.status.unwrap().conditions.iter().any(|condition| condition.type_ == "Theirs"));
    // This one can't be applied either, because of its spec.
    invalid("strange").await;
    ns.namespace.kubectl(&[
        "patch",
        "vm",
        "apple",
        "--type=merge",
        "--patch",
        r#"{"spec":{"vm":{"state":"Stopped"}}}"#,
    ]);
    eventually("the VM to be down", LIMIT, async || {
        ready_of(&ns, "apple").await.filter(|(reason, _)| reason == "StoppedAsRequested").map(drop)
    })
    .await;
}

#[tokio::test]
async fn one_manager_manages_several_namespaces_or_all() {
    // An API server of its own: a manager of all namespaces would manage those of the other tests.
    let cluster = OwnCluster::api_server();
    install_crds(*cluster).await;
    let (one, two, three) = (
        ManagersNamespace::of(*cluster, "one").await,
        ManagersNamespace::of(*cluster, "two").await,
        ManagersNamespace::of(*cluster, "three").await,
    );
    for ns in [&one, &two, &three] {
        ns.create_vm("apple");
    }
    let namespaces = format!("{},{}", one.namespace.name(), two.namespace.name());
    let election = Setup { arguments: &["--leader-election=false"], ..Setup::default() };
    let manager = Manager::with(cluster.kubeconfig(), Some(&namespaces), &election);
    for ns in [&one, &two] {
        let pod = ns.pod("apple").await;
        assert_eq!(pod.metadata.namespace.as_deref(), Some(ns.namespace.name()));
    }
    // A change in one is not one in the other, though the machines have the same name.
    let patch = json!({ "spec": { "vm": { "state": "Stopped" } } });
    one.api::<VirtualMachine>().patch("apple", &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
    eventually("the Pod to be gone", LIMIT, async || {
        one.api::<Pod>().get_opt("apple").await.unwrap().is_none().then_some(())
    })
    .await;
    assert!(two.api::<Pod>().get_opt("apple").await.unwrap().is_some());
    assert!(three.api::<Pod>().get_opt("apple").await.unwrap().is_none(), "not asked for");
    drop(manager);

    let _manager = Manager::with(cluster.kubeconfig(), Some("*"), &election);
    three.pod("apple").await;
    two.create_vm("pear");
    two.pod("pear").await;
}

#[tokio::test]
async fn the_namespace_comes_from_flag_variable_file_or_kubeconfig_in_that_order() {
    let namespaces_of_managers = join_all(["flag", "variable", "file", "kubeconfig"].map(ManagersNamespace::new)).await;
    let name = |number: usize| namespaces_of_managers[number].namespace.name();
    let mut context: Value =
        serde_yaml::from_str(&fs::read_to_string(namespaces_of_managers[0].cluster.kubeconfig()).unwrap()).unwrap();
    context["contexts"][0]["context"]["namespace"] = json!(name(3));
    let kubeconfig = tempfile::NamedTempFile::new().unwrap();
    fs::write(kubeconfig.path(), context.to_string()).unwrap();
    let file = format!("/Manager: {{/Controller: {{namespace: {}}}}}\n", name(2));
    let variable = [("VM_OPERATOR_NAMESPACE", name(1))];
    for (number, ns) in namespaces_of_managers.iter().enumerate() {
        let setup = Setup {
            config: (number <= 2).then_some(&*file),
            environment: if number <= 1 { &variable } else { &[] },
            arguments: &["--leader-election=false"],
            ..Setup::default()
        };
        let manager = Manager::with(kubeconfig.path(), (number == 0).then_some(name(0)), &setup);
        ns.create_vm("apple");
        ns.pod("apple").await;
        let managing = format!(" managing namespaces={} ", ns.namespace);
        assert!(manager.log().contains(&managing), "no {managing:?} in {}", manager.log());
    }
}

#[tokio::test]
async fn every_line_of_the_log_is_json_if_asked_for() {
    let ns = ManagersNamespace::new("json").await;
    let mut manager = ns.manager(&Setup { arguments: &["--log-format=json"], ..Setup::default() });
    ns.create_vm("apple");
    ns.pod("apple").await;
    manager.signal(Signal::TERM);
    assert!(manager.wait_for_end().await.success());
    let log = manager.log();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    for line in &lines {
        let [time, level, message] = ["timestamp", "level", "message"].map(|field| line[field].as_str().expect(field));
        assert!(time.parse::<Timestamp>().is_ok() && !message.is_empty(), "{line}");
        assert!(["ERROR", "WARN", "INFO", "DEBUG"].contains(&level), "{line}");
    }
    let is_made = |line: &&Value| (&line["message"], &line["object"]) == (&json!("applied"), &json!("Pod apple"));
    let made = lines.iter().find(is_made).expect(&log);
    assert_eq!(made["span"]["vm"], format!("{}/apple", ns.namespace));
}
