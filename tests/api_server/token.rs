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
    api::VirtualMachine,
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
    ns.create_vm("probe", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    eventually("the policy to be in force", LIMIT, async || {
        let (code, _) = send(&unbound, "PATCH", &path(&ns, "vms/probe/status"), json!({})).await;
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
    let request = http::Request::builder().method(verb).uri(path);
    let content = if verb == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let body = if verb == "GET" { Vec::new() } else { serde_json::to_vec(&body).unwrap() };
    let request = request.header("content-type", content).body(body).unwrap();
    match client.request::<Value>(request).await {
        Ok(_) => (200, String::new()),
        Err(kube::Error::Api(answer)) => (answer.code, answer.message.clone()),
        Err(error) => panic!("{verb} {path}: {error}"),
    }
}

/// A VM whose guest runs, as its runner and the manager say, and its Pod.
async fn up(ns: &ManagedNamespace, name: &str, pod: &str) -> Pod {
    ns.create_vm(name, on_node).await;
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

#[tokio::test]
async fn a_pods_token_may_patch_the_status_of_its_own_vm_and_nothing_else() {
    let ns = ns("token", &[]).await;
    let pod = up(&ns, "apple", "apple").await;
    up(&ns, "pear", "pear").await;
    let client = runner(&ns, Some(&pod)).await;
    let version = ns.api::<VirtualMachine>().get("apple").await.unwrap().resource_version();

    let namespace = ns.namespace.name();
    let core = |rest: &str| format!("/api/v1/namespaces/{namespace}/{rest}");
    let own = |verb, rest: &str| (verb, path(&ns, &format!("vms/apple{rest}")), path(&ns, &format!("vms/pear{rest}")));
    let all = |verb, path: String| (verb, path.clone(), path);
    let vm =
        json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" } });
    let mut table = Vec::new();
    for ((verb, own, others), body, expected) in [
        (own("PATCH", "/status"), json!({}), [200, 422]),
        (own("PATCH", "/status"), json!({ "status": { "cpus": 1 } }), [200, 422]),
        (own("PUT", "/status"), vm.clone(), [403; 2]),
        (own("GET", "/status"), json!({}), [403; 2]),
        (own("GET", ""), json!({}), [403; 2]),
        (own("PATCH", ""), json!({}), [403; 2]),
        (own("PUT", ""), vm.clone(), [403; 2]),
        (own("DELETE", ""), json!({}), [403; 2]),
        (all("GET", path(&ns, "vms")), json!({}), [403; 2]),
        (all("GET", path(&ns, "vms") + "?watch=true"), json!({}), [403; 2]),
        (all("POST", path(&ns, "vms")), vm.clone(), [403; 2]),
        (all("DELETE", path(&ns, "vms")), json!({}), [403; 2]),
        (all("GET", path(&ns, "vmpools")), json!({}), [403; 2]),
        (all("GET", core("pods")), json!({}), [403; 2]),
        (all("GET", core("pods/apple")), json!({}), [403; 2]),
        (all("PATCH", core("pods/apple")), json!({}), [403; 2]),
        (all("DELETE", core("pods/apple")), json!({}), [403; 2]),
        (all("POST", core("pods/apple/exec?command=sh")), json!({}), [403; 2]),
        (all("GET", core("secrets")), json!({}), [403; 2]),
        (all("GET", core("secrets/apple-display-secret")), json!({}), [403; 2]),
        (all("GET", core("configmaps/apple")), json!({}), [403; 2]),
        (all("GET", core("persistentvolumeclaims")), json!({}), [403; 2]),
        (all("POST", core("events")), json!({ "metadata": { "generateName": "e-" } }), [403; 2]),
        (all("POST", core("serviceaccounts/vm-runner/token")), json!({}), [403; 2]),
        (all("GET", format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases")), json!({}), [403; 2]),
        (all("GET", "/api/v1/nodes".into()), json!({}), [403; 2]),
        (all("GET", "/api/v1/namespaces".into()), json!({}), [403; 2]),
        (all("GET", path(&ns, "vms").replace(namespace, "default")), json!({}), [403; 2]),
    ] {
        let mut codes = [0; 2];
        for (at, path) in [&own, &others].into_iter().enumerate() {
            codes[at] = send(&client, verb, path, body.clone()).await.0;
        }
        println!("{verb:6} {:60} own {} other's {}", own.replace(namespace, "NS"), codes[0], codes[1]);
        table.push((verb, own, codes, expected));
    }
    for (verb, path, codes, expected) in table {
        assert_eq!(codes, expected, "{verb} {path}");
    }
    let after = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert_eq!(after.resource_version(), version, "what changes nothing writes nothing");

    // A token of the same account that is bound to no Pod is worth nothing.
    let (code, message) = send(&runner(&ns, None).await, "PATCH", &path(&ns, "vms/apple/status"), json!({})).await;
    assert_eq!(code, 422, "{message}");
    // Legacy runners have another account, to which the policy does not apply.
    assert!(!include_str!("../../deploy/legacy-runner.yaml").contains("name: vm-runner\n"));
}

#[tokio::test]
async fn a_runner_can_not_write_what_the_manager_and_others_write() {
    let ns = ns("token-fields", &[]).await;
    let pod = up(&ns, "apple", "apple").await;
    let client = runner(&ns, Some(&pod)).await;
    // What others have written, too.
    let assigned = json!({ "status": { "consoleUser": "alice", "assignment": { "user": "alice" } } });
    let vms: Api<VirtualMachine> = ns.api();
    vms.patch_status("apple", &PatchParams::default(), &Patch::Merge(&assigned)).await.unwrap();
    let url = path(&ns, "vms/apple/status");
    let time = "2026-01-01T00:00:00Z";
    let condition_of = |type_: &str| json!({ "type": type_, "status": "True", "reason": "Lie", "message": "", "lastTransitionTime": time });
    let conditions = ns.api::<VirtualMachine>().get("apple").await.unwrap().status.unwrap().conditions;
    let with = |type_: &str| {
        let mut all: Vec<Value> = conditions.iter().filter(|c| c.type_ != type_).map(|c| json!(c)).collect();
        all.push(condition_of(type_));
        json!({ "conditions": all })
    };
    let change = |path: &str| json!({ "pendingChanges": [{ "path": path, "reason": "a lie" }] });
    let long = "x".repeat(9000);
    let mut refused = vec![
        json!({ "observedGeneration": 99 }),
        json!({ "phase": "Stopped" }),
        json!({ "phase": null }),
        json!({ "created": false }),
        json!({ "ready": false }),
        json!({ "power": "Stopped" }),
        json!({ "templates": { "set": "other" } }),
        json!({ "objectKinds": [{ "apiVersion": "v1", "kind": "Secret" }] }),
        json!({ "halted": { "by": "guest", "time": time, "generation": 1 } }),
        json!({ "forceStopIgnored": "x" }),
        json!({ "endGuest": "x" }),
        json!({ "reporterUid": "x" }),
        json!({ "retry": { "count": 9, "podUid": "x", "next": time } }),
        json!({ "guestGeneration": 99 }),
        json!({ "nodeName": "other" }),
        json!({ "addresses": [{ "type": "PodIP", "address": "6.6.6.6" }] }),
        json!({ "claims": [] }),
        json!({ "claims": null }),
        json!({ "consoleUser": "mallory" }),
        json!({ "consoleUser": null }),
        json!({ "assignment": { "user": "mallory" } }),
        json!({ "assignment": null }),
        json!({ "podUid": "another Pod" }),
        change("objects/Pod/spec.nodeName"),
        json!({ "osinfo": (0..17).map(|n| (n.to_string(), "x")).collect::<std::collections::BTreeMap<_, _>>() }),
        json!({ "conditions": [] }),
        Value::Null,
    ];
    let mine = [
        "Running",
        "Booted",
        "VmopAgentConnected",
        "UserLoggedIn",
        "ConsoleConnected",
        "ChangesApplied",
        "DevicesReady",
    ];
    refused.extend(["Ready", "RestartRequired", "StorageReady", "TemplatesValid", "PowerUnmanaged"].map(with));
    let mut too_long = with("Running");
    too_long["conditions"].as_array_mut().unwrap().last_mut().unwrap()["message"] = json!(long);
    refused.push(too_long);
    for status in refused {
        let (code, message) = send(&client, "PATCH", &url, json!({ "status": status })).await;
        let told: String = status.to_string().chars().take(70).collect();
        println!("{code} {told}: {message}");
        assert!(code == 422 && message.contains("denied request"), "{code} {told}: {message}");
    }
    // The names of all other fields are among them.
    let accepted = vec![
        json!({ "cpus": 2 }),
        json!({ "ram": "2Gi" }),
        json!({ "runnerVersion": "9" }),
        json!({ "displayPasswordSerial": 7 }),
        json!({ "displayPasswordExpiry": "now" }),
        json!({ "loggedInUser": "alice" }),
        json!({ "consoleClient": "10.0.0.1" }),
        json!({ "accelerator": "kvm" }),
        json!({ "identity": { "uuid": "u-2" } }),
        json!({ "resetCount": 4 }),
        json!({ "configDigest": "d" }),
        json!({ "podUid": pod.uid() }),
        json!({ "osinfo": { "id": "alpine" } }),
        change("config.yaml/vm.maximumCpus"),
        change("cloud-init"),
    ];
    for status in accepted {
        let (code, message) = send(&client, "PATCH", &url, json!({ "status": status })).await;
        assert_eq!(code, 200, "{status}: {message}");
    }
    for type_ in mine {
        // The manager writes its conditions when it sees these.
        eventually(&format!("{type_} to be accepted"), LIMIT, async || {
            let present = ns.api::<VirtualMachine>().get("apple").await.unwrap().status.unwrap().conditions;
            let mut all: Vec<Value> = present.iter().filter(|c| c.type_ != type_).map(|c| json!(c)).collect();
            all.push(condition_of(type_));
            let status = json!({ "status": { "conditions": all } });
            let (code, message) = send(&client, "PATCH", &url, status).await;
            println!("{type_}: {code} {message}");
            (code == 200).then_some(())
        })
        .await;
    }

    // Who owns which field says who sets spec.vm.state.
    let owners = async || {
        let mut owners = ns.api::<VirtualMachine>().get("apple").await.unwrap().metadata.managed_fields.unwrap();
        owners.retain(|entry| entry.subresource.is_none());
        owners
    };
    let before = owners().await;
    let fake = json!([{
        "manager": "mallory", "operation": "Update", "apiVersion": "vmoperator.jdrupes.org/v1", "time": time,
        "fieldsType": "FieldsV1", "fieldsV1": { "f:spec": { "f:vm": { "f:state": {} } } },
    }]);
    for fields in [json!([{}]), json!([]), fake] {
        let (code, message) = send(&client, "PATCH", &url, json!({ "metadata": { "managedFields": fields } })).await;
        assert_eq!(owners().await, before, "{code} {message}");
    }
    // The API server itself takes nothing but the status from such a request.
    let before = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    let more = json!({
        "metadata": { "annotations": { FORCE_STOP_ANNOTATION: pod.uid() }, "labels": { "a": "b" }, "finalizers": ["a.b/c"] },
        "spec": { "vm": { "state": "Stopped" } },
    });
    assert_eq!(send(&client, "PATCH", &url, more).await.0, 200);
    let after = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert_eq!((after.labels(), after.annotations()), (before.labels(), before.annotations()));
    assert_eq!((after.finalizers(), &after.spec), (before.finalizers(), &before.spec));
}

/// Templates may name a Pod otherwise, and a StatefulSet does.
#[tokio::test]
async fn a_pod_with_another_name_reports_when_the_manager_has_seen_it_and_only_on_its_own_vm() {
    let template = include_str!("../../templates/pod.yaml.j2")
        .replace("metadata:\n  name: {{ vm.metadata.name }}", "metadata:\n  name: {{ vm.metadata.name ~ \"-0\" }}");
    assert!(template.contains("\"-0\""), "the template names the Pod otherwise now");
    let ns = ns("token-names", &[("pod.yaml.j2", &template)]).await;
    let pod = up(&ns, "fig", "fig-0").await;
    let vm = ns.vm_when("fig", "with the Pod's UID", |vm| vm.status.as_ref().unwrap().reporter_uid.is_some()).await;
    assert_eq!(vm.status.unwrap().reporter_uid, pod.uid());
    // A VM that has the name of the other's Pod. Its own Pod has another one.
    up(&ns, "fig-0", "fig-0-0").await;
    let other = ns.api::<Pod>().get("fig-0-0").await.unwrap();
    let client = runner(&ns, Some(&other)).await;
    let (code, message) = send(&client, "PATCH", &path(&ns, "vms/fig/status"), json!({})).await;
    assert!(code == 422 && message.contains("may report only on its own VM"), "{code} {message}");
    assert_eq!(send(&client, "PATCH", &path(&ns, "vms/fig-0/status"), json!({})).await.0, 200);
}

#[tokio::test]
async fn a_forced_stop_reaches_a_runner_that_may_only_patch_the_status() {
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
    let url = path(&ns, "vms/apple/status");
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
