//! What the token of a VM's Pod is good for: the role and the policy in `deploy/`, call by call with a token that the API server has bound to
//! the Pod as it does for a kubelet. The tests play runner and kubelet.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api, Client, Config, ResourceExt,
    api::{DeleteParams, Patch, PatchParams},
    config::{AuthInfo, KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use tokio::sync::watch;
use vm_operator::{
    api::{VirtualMachine, VmReport},
    object::FORCE_STOP_ANNOTATION,
    runner::{
        report::{Observation, Report, Target},
        state::{EndReason, MachineState, Phase},
        status_writer::{StatusWriter, VmResource},
    },
};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
};

const NODE: &str = "played";

/// A namespace with a manager and what `deploy/` has for runners.
async fn ns(test: &str, templates: &[(&str, &str)]) -> ManagedNamespace {
    let ns = if templates.is_empty() {
        ManagedNamespace::new(test).await
    } else {
        ManagedNamespace::with_templates(test, templates).await
    };
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE } });
    Api::<Node>::all(ns.client.clone()).patch(NODE, &PatchParams::apply("test"), &Patch::Apply(&node)).await.unwrap();
    ns.namespace.create(include_str!("../../deploy/runner-role.yaml")).await;
    let policy = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/runner-policy.yaml");
    ns.cluster.kubectl(&["apply", "--server-side", "--filename", policy]);
    // The policy is in force when it refuses what the role allows.
    let unbound = runner(&ns, None).await;
    let probe = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmReport", "metadata": { "name": "probe" }, "spec": { "vm": "probe" },
    });
    ns.namespace.apply(&probe.to_string());
    eventually("the policy to be in force", LIMIT, async || {
        let (code, _) = send(&unbound, "PATCH", &path(&ns, "vmreports/probe/status"), json!({})).await;
        (code == 422).then_some(())
    })
    .await;
    ns
}

fn on_node(vm: &mut Value) {
    vm["spec"]["nodeName"] = json!(NODE);
}

fn path(ns: &ManagedNamespace, rest: &str) -> String {
    format!("/apis/vmoperator.jdrupes.org/v1/namespaces/{}/{rest}", ns.namespace.name())
}

/// A client with the token of a Pod, or with one of the service account that is bound to no Pod.
async fn runner(ns: &ManagedNamespace, pod: Option<&Pod>) -> Client {
    let bound = pod.map(|pod| json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid() }));
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": { "audiences": [], "boundObjectRef": bound },
    });
    let url = format!("/api/v1/namespaces/{}/serviceaccounts/vm-runner/token", ns.namespace.name());
    let request = http::Request::post(url).body(serde_json::to_vec(&request).unwrap()).unwrap();
    let token: Value = ns.client.request(request).await.unwrap();
    let kubeconfig = Kubeconfig::read_from(ns.cluster.kubeconfig()).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let token = token["status"]["token"].as_str().unwrap().to_owned();
    config.auth_info = AuthInfo { token: Some(token.into()), ..AuthInfo::default() };
    Client::try_from(config).unwrap()
}

/// Sends a request, and returns the code and the message of the answer. Patches are merge patches.
async fn send(client: &Client, verb: &str, path: &str, body: Value) -> (u16, String) {
    let content = if verb == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    send_as(client, verb, content, path, &body).await
}

/// The same with a content type. Of an answer that is no refusal, the whole body is returned.
async fn send_as(client: &Client, verb: &str, content: &str, path: &str, body: &Value) -> (u16, String) {
    let request = http::Request::builder().method(verb).uri(path);
    let body = if verb == "GET" { Vec::new() } else { serde_json::to_vec(body).unwrap() };
    let request = request.header("content-type", content).body(body).unwrap();
    match client.request_text(request).await {
        Ok(text) => (200, text),
        Err(kube::Error::Api(answer)) => (answer.code, format!("{answer:?}")),
        Err(error) => panic!("{verb} {path}: {error}"),
    }
}

/// A VM whose guest runs, as its runner and the manager say, and its Pod.
async fn up(ns: &ManagedNamespace, name: &str, pod: &str) -> Pod {
    up_with(ns, name, pod, on_node).await
}

async fn up_with(ns: &ManagedNamespace, name: &str, pod: &str, edit: impl FnOnce(&mut Value)) -> Pod {
    ns.create_vm(name, edit).await;
    let pod = ns.pod_when(pod, "created", |_| true).await;
    let resource = VmResource::new(Some(runner(ns, Some(&pod)).await), ns.namespace.name(), target(name, &pod));
    report(resource, Phase::Running).await;
    // QEMU refused a change, as the report says.
    ns.vm_with_reason(name, "ChangeFailed").await;
    pod
}

fn target(name: &str, pod: &Pod) -> Target {
    Target { name: name.into(), pod_uid: pod.uid() }
}

/// Writes a report as the runner does, with all fields that it can have.
async fn report(resource: VmResource, phase: Phase) {
    let machine = MachineState { phase, ..MachineState::failed_before_start(String::new(), None) };
    let machine = MachineState { uuid: "u-1".into(), machine_type: "pc-q35-7.2".into(), pid: 1, ..machine };
    let pending = serde_json::from_value(
        json!({ "path": "config.yaml/vm.maximumCpus", "current": 1, "wanted": 2, "reason": "the next start" }),
    );
    let observation = Observation {
        machine: Some(machine),
        is_executing: Some(true),
        cpus: 1,
        ram: 1 << 30,
        os_info: Some(json!({ "id": "debian" })),
        password_changes: 1,
        password_expiry: Some("never".into()),
        reset_counter: Some(3),
        reboot_counter: Some(1),
        pending: vec![pending.unwrap()],
        refused: vec!["refused".into()],
        config_digest: Some("digest".into()),
        ..Observation::default()
    };
    let (reports, receiver) = watch::channel(Report::derive(&observation));
    let writing = tokio::spawn(StatusWriter::new(resource).follow(receiver));
    drop(reports);
    tokio::time::timeout(LIMIT, writing).await.expect("the report to be written").unwrap();
}

/// What others must not get to see, in specs, in statuses and in what other runners report.
const HIDDEN: &str = "hidden-text";

const MERGE: &str = "application/merge-patch+json";
const APPLY: &str = "application/apply-patch+yaml";
const JSON: &str = "application/json-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";

/// A call: its name, verb, content type, query and body.
type Call = (&'static str, &'static str, &'static str, &'static str, Value);

/// Every way in which a client can ask for an object or a list, or change it. A patch may fail because of the schema, and the API server says
/// why before it asks any policy.
fn calls(name: &str) -> Vec<Call> {
    let vm =
        |kind: &str| json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": kind, "metadata": { "name": name } });
    let copy = |from: &str| json!([{ "op": "copy", "from": from, "path": "/status/conditions/0/status" }]);
    let time = "2026-01-01T00:00:00Z";
    let condition =
        json!({ "type": "Running", "status": "True", "reason": "Started", "message": "", "lastTransitionTime": time });
    let mut applied = vm("VmReport");
    applied["status"] = json!({ "cpus": 3, "conditions": [condition] });
    vec![
        ("merge nothing", "PATCH", MERGE, "", json!({})),
        ("merge", "PATCH", MERGE, "", json!({ "status": { "cpus": 2 } })),
        ("merge, refused by the schema", "PATCH", MERGE, "", json!({ "status": { "cpus": "x" }, "spec": { "vm": 1 } })),
        ("apply", "PATCH", APPLY, "?fieldManager=x&force=true", applied),
        ("JSON Patch add", "PATCH", JSON, "", json!([{ "op": "add", "path": "/status/cpus", "value": 4 }])),
        ("JSON Patch replace", "PATCH", JSON, "", json!([{ "op": "replace", "path": "/status/cpus", "value": 5 }])),
        (
            "JSON Patch test, true",
            "PATCH",
            JSON,
            "",
            json!([{ "op": "test", "path": "/metadata/name", "value": name }]),
        ),
        ("JSON Patch test, false", "PATCH", JSON, "", json!([{ "op": "test", "path": "/spec/vm", "value": "no" }])),
        ("JSON Patch copy of the spec", "PATCH", JSON, "", copy("/spec/vm")),
        ("JSON Patch copy of user data", "PATCH", JSON, "", copy("/spec/cloudInit/userData")),
        ("JSON Patch copy of the status", "PATCH", JSON, "", copy("/status/loggedInUser")),
        ("JSON Patch copy of the status of a VM", "PATCH", JSON, "", copy("/status/consoleUser")),
        (
            "JSON Patch move",
            "PATCH",
            JSON,
            "",
            json!([{ "op": "move", "from": "/spec/cloudInit", "path": "/status/conditions" }]),
        ),
        ("JSON Patch remove", "PATCH", JSON, "", json!([{ "op": "remove", "path": "/status/cpus" }])),
        ("strategic merge", "PATCH", STRATEGIC, "", json!({})),
        ("dry run of a merge", "PATCH", MERGE, "?dryRun=All", json!({})),
        ("dry run of a copy", "PATCH", JSON, "?dryRun=All", copy("/spec/cloudInit/userData")),
        ("PUT", "PUT", "application/json", "", vm("VmReport")),
        ("PUT of a VM", "PUT", "application/json", "", vm("VirtualMachine")),
        ("GET", "GET", "", "", Value::Null),
        ("WATCH", "GET", "", "?watch=true&timeoutSeconds=1", Value::Null),
        ("DELETE", "DELETE", "application/json", "", json!({})),
        ("DELETE with a dry run", "DELETE", "application/json", "?dryRun=All", json!({})),
        ("POST", "POST", "application/json", "", vm("VmReport")),
    ]
}

#[tokio::test]
async fn a_pods_token_reads_nothing_and_writes_only_its_own_report() {
    let ns = ns("token", &[]).await;
    let hides = |vm: &mut Value| {
        on_node(vm);
        vm["spec"]["cloudInit"] = json!({ "userData": HIDDEN });
    };
    let pod = up_with(&ns, "apple", "apple", hides).await;
    let other = up_with(&ns, "pear", "pear", hides).await;
    let vms: Api<VirtualMachine> = ns.api();
    for name in ["apple", "pear"] {
        let hidden = json!({ "status": { "consoleUser": HIDDEN } });
        vms.patch_status(name, &PatchParams::default(), &Patch::Merge(&hidden)).await.unwrap();
    }
    let user = json!({ "status": { "loggedInUser": HIDDEN } });
    let reports: Api<VmReport> = ns.api();
    reports.patch_status(&other.uid().unwrap(), &PatchParams::default(), &Patch::Merge(&user)).await.unwrap();
    ns.vm_when("pear", "with the user", |vm| {
        vm.status.as_ref().unwrap().runner.logged_in_user.as_deref() == Some(HIDDEN)
    })
    .await;
    for kind in ["Secret", "ConfigMap"] {
        let data = if kind == "Secret" { "stringData" } else { "data" };
        let object =
            json!({ "apiVersion": "v1", "kind": kind, "metadata": { "name": "hidden" }, data: { "a": HIDDEN } });
        ns.namespace.apply(&object.to_string());
    }
    let client = runner(&ns, Some(&pod)).await;
    let (uid, other_uid) = (pod.uid().unwrap(), other.uid().unwrap());
    let namespace = ns.namespace.name();
    let core = |rest: &str| format!("/api/v1/namespaces/{namespace}/{rest}");
    let own = path(&ns, &format!("vmreports/{uid}/status"));
    let unknown = "11111111-2222-4333-8444-555555555555";
    let targets = [
        ("own report, status", own.clone(), "apple"),
        ("own report", path(&ns, &format!("vmreports/{uid}")), "apple"),
        ("another's report, status", path(&ns, &format!("vmreports/{other_uid}/status")), "pear"),
        ("another's report", path(&ns, &format!("vmreports/{other_uid}")), "pear"),
        ("a report of unknown name, status", path(&ns, &format!("vmreports/{unknown}/status")), unknown),
        ("all reports", path(&ns, "vmreports"), "x"),
        ("own VM", path(&ns, "vms/apple"), "apple"),
        ("own VM, status", path(&ns, "vms/apple/status"), "apple"),
        ("another VM", path(&ns, "vms/pear"), "pear"),
        ("another VM, status", path(&ns, "vms/pear/status"), "pear"),
        ("all VMs", path(&ns, "vms"), "x"),
        ("all pools", path(&ns, "vmpools"), "x"),
        ("own Pod", core("pods/apple"), "apple"),
        ("own Pod, status", core("pods/apple/status"), "apple"),
        ("a shell in another Pod", core("pods/pear/exec?command=sh&x="), "pear"),
        ("all Pods", core("pods"), "x"),
        ("a Secret", core("secrets/hidden"), "hidden"),
        ("all Secrets", core("secrets"), "x"),
        ("a ConfigMap", core("configmaps/hidden"), "hidden"),
        ("all ConfigMaps", core("configmaps"), "x"),
        ("all claims", core("persistentvolumeclaims"), "x"),
        ("all events", core("events"), "x"),
        ("a token", core("serviceaccounts/vm-runner/token"), "vm-runner"),
        ("all Leases", format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"), "x"),
        ("all nodes", "/api/v1/nodes".to_owned(), "x"),
        ("VMs of another namespace", path(&ns, "vms").replace(namespace, "default"), "x"),
    ];
    let mut allowed = Vec::new();
    for (target, url, name) in &targets {
        let mut codes = Vec::new();
        for (call, verb, content, query, mut body) in calls(name) {
            if target.contains("report") {
                let report = json!(url.trim_end_matches("/status").rsplit('/').next());
                match call {
                    "apply" => body["metadata"]["name"] = report,
                    "JSON Patch test, true" => body[0]["value"] = report,
                    _ => {}
                }
            }
            let (code, answer) = send_as(&client, verb, content, &format!("{url}{query}"), &body).await;
            codes.push(format!("{call} {code}"));
            if code < 300 {
                allowed.push((*target, call));
            }
            // Whoever knows the UID of another Pod can find out what its runner reports, and nothing else; the API tells a runner no UID.
            if *target != "another's report, status" {
                assert!(!answer.contains(HIDDEN), "{call} of {target}: {answer}");
            }
        }
        println!("{target}: {}", codes.join(", "));
    }
    let expected = [
        "merge nothing",
        "merge",
        "apply",
        "JSON Patch add",
        "JSON Patch replace",
        "JSON Patch test, true",
        "JSON Patch remove",
        "dry run of a merge",
    ];
    assert_eq!(allowed, expected.map(|call| ("own report, status", call)));

    // A token of the same account that is bound to no Pod is worth nothing.
    let (code, message) = send(&runner(&ns, None).await, "PATCH", &own, json!({})).await;
    assert_eq!(code, 422, "{message}");
    // Legacy runners have another account, to which the policy does not apply.
    assert!(!include_str!("../../deploy/legacy-runner.yaml").contains("name: vm-runner\n"));
}

#[tokio::test]
async fn a_report_has_bounds_and_only_the_runners_part_reaches_the_status() {
    let ns = ns("token-fields", &[]).await;
    let pod = up(&ns, "apple", "apple").await;
    let client = runner(&ns, Some(&pod)).await;
    let uid = pod.uid().unwrap();
    let url = path(&ns, &format!("vmreports/{uid}/status"));
    let time = "2026-01-01T00:00:00Z";
    let condition_of = |type_: &str, message: &str| json!({ "type": type_, "status": "True", "reason": "Lie", "message": message, "lastTransitionTime": time });
    let with = |type_: &str| json!({ "conditions": [condition_of(type_, "")] });
    let (long, very_long) = ("x".repeat(513), "x".repeat(8193));
    let many = |count: usize, item: &dyn Fn(usize) -> Value| (0..count).map(item).collect::<Vec<Value>>();
    let change = |path: &str, wanted: &str| json!({ "path": path, "wanted": wanted, "reason": "a lie" });
    let about = |subject: Value| json!({ "path": "config.yaml/vm.drives", "subject": subject, "reason": "a lie" });
    let mut refused = vec![
        json!({ "conditions": [condition_of("Running", &very_long)] }),
        json!({ "conditions": [{ "type": "Running", "status": "Maybe", "reason": "Lie", "message": "", "lastTransitionTime": time }] }),
        json!({ "conditions": [{ "type": "Running", "status": "True", "reason": "a lie", "message": "", "lastTransitionTime": time }] }),
        json!({ "conditions": [condition_of("Running", ""), condition_of("Running", "twice")] }),
        json!({ "pendingChanges": [change("objects/Pod/spec.nodeName", "1")] }),
        json!({ "pendingChanges": [about(json!({ "kind": "Object", "name": "Pod apple" }))] }),
        json!({ "pendingChanges": [about(json!({ "kind": "Volume", "name": "data-disk" }))] }),
        json!({ "pendingChanges": [about(json!({ "kind": "Disk", "name": long }))] }),
        json!({ "pendingChanges": [about(json!({ "name": "data-disk" }))] }),
        json!({ "pendingChanges": [change("config.yaml/a", &long)] }),
        json!({ "pendingChanges": many(33, &|n| change(&format!("config.yaml/{n}"), "1")) }),
        json!({ "serialUsers": many(65, &|n| json!(n.to_string())) }),
        json!({ "serialUsers": [long] }),
        json!({ "osinfo": { "id": long } }),
        json!({ "osinfo": "x" }),
        json!({ "cpus": -1 }),
        json!({ "cpus": 65_537 }),
        json!({ "relayPort": 65_536 }),
        json!({ "resetCount": -1 }),
        json!({ "displayPasswordSerial": -1 }),
        json!({ "identity": { "uuid": "a b" } }),
        json!({ "identity": { "macs": many(65, &|_| json!("52:54:00:00:00:01")) } }),
        json!({ "identity": { "machineType": "$(reboot)" } }),
    ];
    let texts = [
        "accelerator",
        "configDigest",
        "consoleClient",
        "displayPasswordExpiry",
        "loggedInUser",
        "ram",
        "runnerVersion",
    ];
    refused.extend(texts.map(|field| json!({ field: long })));
    let of_manager = ["Ready", "RestartRequired", "StorageReady", "TemplatesValid", "PowerUnmanaged", "Stalled"];
    refused.extend(of_manager.map(with));
    for status in refused {
        let (code, message) = send(&client, "PATCH", &url, json!({ "status": status })).await;
        let told: String = status.to_string().chars().take(70).collect();
        assert!(code == 422, "{code} {told}: {message}");
    }
    // What the definition does not know is left out, and so is everything but the status.
    let before = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    let report = ns.api::<VmReport>().get(&uid).await.unwrap();
    let all = json!({
        "metadata": { "annotations": { "a": "b" }, "labels": { "a": "b" }, "finalizers": ["a.b/c"], "ownerReferences": [] },
        "spec": { "vm": "pear", "endGuest": true },
        "status": {
            "phase": "Stopped", "podUid": "another", "assignment": { "user": "mallory" }, "claims": [], "halted": { "by": "guest" },
            "addresses": [{ "type": "PodIP", "address": "6.6.6.6" }], "osinfo": { "id": "alpine", "x": "y" }, "cpus": 7,
            "pendingChanges": [change("cloud-init", "{}")], "loggedInUser": "alice", "consoleClient": "10.0.0.1",
        },
    });
    let (code, message) = send(&client, "PATCH", &url, all).await;
    assert_eq!(code, 200, "{message}");
    let after = ns.api::<VmReport>().get(&uid).await.unwrap();
    assert_eq!((after.labels(), after.annotations()), (report.labels(), report.annotations()));
    assert_eq!((after.finalizers(), after.owner_references()), (report.finalizers(), report.owner_references()));
    assert_eq!(after.spec, report.spec);
    let vm = ns.vm_when("apple", "with the report", |vm| vm.status.as_ref().unwrap().runner.cpus == Some(7)).await;
    let (before, after) = (before.status.unwrap(), vm.status.unwrap());
    assert_eq!((after.runner.osinfo, after.pod_uid.as_deref()), (Some(json!({ "id": "alpine" })), Some(uid.as_str())));
    assert_eq!(
        (&after.runner.logged_in_user, &after.runner.console_client),
        (&Some("alice".into()), &Some("10.0.0.1".into()))
    );
    assert_eq!(after.pending_changes.len(), 1);
    assert_eq!(
        (before.phase, before.addresses, before.pools.assignment),
        (after.phase, after.addresses, after.pools.assignment)
    );
    assert_eq!((before.claims, before.halted), (after.claims, after.halted));
}

/// Templates may name a Pod otherwise, and a StatefulSet does.
#[tokio::test]
async fn a_pod_with_another_name_reports_and_only_on_its_own_vm() {
    let template = include_str!("../../templates/pod.yaml.j2")
        .replace("metadata:\n  name: {{ vm.metadata.name }}", "metadata:\n  name: {{ vm.metadata.name ~ \"-0\" }}");
    assert!(template.contains("\"-0\""), "the template names the Pod otherwise now");
    let ns = ns("token-names", &[("pod.yaml.j2", &template)]).await;
    let pod = up(&ns, "fig", "fig-0").await;
    // A VM that has the name of the other's Pod. Its own Pod has another one.
    let other = up(&ns, "fig-0", "fig-0-0").await;
    let client = runner(&ns, Some(&other)).await;
    let of = |pod: &Pod| path(&ns, &format!("vmreports/{}/status", pod.uid().unwrap()));
    let (code, message) = send(&client, "PATCH", &of(&pod), json!({})).await;
    assert!(code == 422 && message.contains("report of its own Pod"), "{code} {message}");
    assert_eq!(send(&client, "PATCH", &of(&other), json!({})).await.0, 200);
}

/// A runner of an earlier release, whose Role is still there, reports into the status of its VM, until one that makes a report takes its place.
#[tokio::test]
async fn a_runner_that_knows_no_reports_is_heard_until_one_reports_in_its_pod() {
    let ns = ns("token-earlier", &[]).await;
    let role = include_str!("../../deploy/runner-role.yaml");
    ns.namespace
        .create(&role.replace("vm-runner-report", "vm-runner-status").replace("vmreports/status", "vms/status"))
        .await;
    ns.create_vm("apple", on_node).await;
    let pod = ns.pod_when("apple", "created", |_| true).await;
    let client = runner(&ns, Some(&pod)).await;
    let time = "2026-01-01T00:00:00Z";
    let condition = |type_: &str| json!({ "type": type_, "status": "True", "reason": "Started", "message": "", "lastTransitionTime": time });
    let conditions = ["Running", "Booted", "VmopAgentConnected"].map(condition);
    let report = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "status": {
            "podUid": pod.uid(), "cpus": 1, "serialUsers": ["ann"], "identity": { "uuid": "u-1" },
            "conditions": conditions,
        },
    });
    let url = path(&ns, "vms/apple/status?fieldManager=vm-runner&force=true");
    eventually("the earlier Role to be in force", LIMIT, async || {
        (send_as(&client, "PATCH", APPLY, &url, &report).await.0 == 200).then_some(())
    })
    .await;
    ns.vm_with_reason("apple", "Running").await;
    let resource = VmResource::new(Some(client), ns.namespace.name(), target("apple", &pod));
    self::report(resource, Phase::Running).await;
    let vm = ns.vm_with_reason("apple", "ChangeFailed").await;
    assert_eq!(vm.status.unwrap().runner.identity.unwrap().uuid.as_deref(), Some("u-1"));
    // Nothing of the former report stays that the new one does not say.
    ns.vm_when("apple", "without what the earlier runner said", |vm| {
        let owners = vm.metadata.managed_fields.iter().flatten();
        let is_left = owners.filter(|entry| entry.manager.as_deref() == Some("vm-runner")).count() > 0;
        vm.status.as_ref().unwrap().runner.serial_users.is_empty() && !is_left
    })
    .await;
}

#[tokio::test]
async fn a_forced_stop_reaches_a_runner_that_may_only_patch_its_report() {
    let ns = ns("token-forced", &[]).await;
    let pod = up(&ns, "apple", "apple").await;
    let client = runner(&ns, Some(&pod)).await;
    let resource = VmResource::new(Some(client), ns.namespace.name(), target("apple", &pod));
    let forced = tokio::spawn(async move { resource.stop_forced().await });
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.pod_when("apple", "going", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    assert!(!forced.is_finished());
    let annotation = json!({ "metadata": { "annotations": { FORCE_STOP_ANNOTATION: pod.uid() } } });
    ns.patch_vm("apple", annotation).await;
    tokio::time::timeout(LIMIT, forced).await.expect("the runner to see it").unwrap();
    ns.vm_when("apple", "forced", |vm| vm.status.as_ref().unwrap().end_guest == pod.uid()).await;
}

/// The API server refuses a Pod's token a minute after the end of its grace period, which anybody can shorten. The kubelet goes on waiting.
#[tokio::test]
async fn a_grace_period_that_somebody_shortens_ends_the_guest_before_the_token_is_refused() {
    let ns = ns("token-shortened", &[]).await;
    let pod = up(&ns, "apple", "apple").await;
    let client = runner(&ns, Some(&pod)).await;
    let resource = VmResource::new(Some(client.clone()), ns.namespace.name(), target("apple", &pod));
    let forced = tokio::spawn(async move { resource.stop_forced().await });
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.pod_when("apple", "going", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    let soon = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
    ns.api::<Pod>().delete("apple", &soon).await.unwrap();
    tokio::time::timeout(LIMIT, forced).await.expect("the runner to hear it").unwrap();
    let url = path(&ns, &format!("vmreports/{}/status", pod.uid().unwrap()));
    assert_eq!(send(&client, "PATCH", &url, json!({})).await.0, 200, "the token is still valid");
    // The last report.
    let resource = VmResource::new(Some(client.clone()), ns.namespace.name(), target("apple", &pod));
    let reason = EndReason::PoweredOff;
    report(resource, Phase::Ended { reason, code: Some(0), last_words: String::new(), held: false }).await;
    ns.vm_when("apple", "ended", |vm| condition(vm, "Running").is_some_and(|running| running.1 == "PoweredOff")).await;
    eventually("the token to be refused", 3 * LIMIT, async || {
        (send(&client, "PATCH", &url, json!({})).await.0 == 401).then_some(())
    })
    .await;
}
