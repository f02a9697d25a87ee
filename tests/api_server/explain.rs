//! `kubectl vm explain` on a real API server: causes are planted, and the first line names them. The tests play the scheduler, the kubelet
//! and the runner.

use std::{process::Command, time::Instant};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, play_node},
};
use k8s_openapi::api::{
    core::v1::{ConfigMap, Event, LimitRange, Namespace, Node, PersistentVolume, ResourceQuota, Secret},
    storage::v1::StorageClass,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;

struct Printed {
    code: i32,
    data: String,
    talk: String,
}

fn explain(ns: &ManagedNamespace, arguments: &[&str]) -> Printed {
    run(ns, "explain", arguments)
}

fn run(ns: &ManagedNamespace, verb: &str, arguments: &[&str]) -> Printed {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-vm"));
    command.arg(verb).args(arguments).args(["--namespace", ns.namespace.name()]);
    let output = command.env("KUBECONFIG", ns.cluster.kubeconfig()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Printed { code: output.status.code().unwrap(), data: text(output.stdout), talk: text(output.stderr) }
}

/// Waits until the first line has these words, and returns all lines.
async fn says(ns: &ManagedNamespace, name: &str, words: &str) -> String {
    let mut last = String::new();
    let found = eventually(&format!("{name} to be explained by {words:?}"), LIMIT, async || {
        let begin = Instant::now();
        let printed = explain(ns, &[name]);
        last = format!("{}{}", printed.data, printed.talk);
        let line = printed.data.lines().next().unwrap_or_default();
        eprintln!("{} ms, exit {}: {line}", begin.elapsed().as_millis(), printed.code);
        (line.contains(words)).then_some(printed)
    })
    .await;
    assert_eq!(found.code, i32::from(found.data.lines().next().unwrap().contains(" -> ")), "{}", found.data);
    is_said_by_ready(ns, name).await;
    found.data
}

/// The manager finds the same cause, and says it in the condition Ready. What keeps it from its own work it can't say.
async fn is_said_by_ready(ns: &ManagedNamespace, name: &str) {
    let cause = || serde_json::from_str::<Value>(&explain(ns, &[name, "-o", "json"]).data).unwrap()["cause"].clone();
    let mut last = (cause(), String::new());
    if last.0.is_null() || last.0["stage"] == "manager" {
        return;
    }
    eventually(&format!("Ready of {name} to have the words of {last:?}"), LIMIT, async || {
        let vm = ns.api::<VirtualMachine>().get(name).await.unwrap();
        last = (cause(), condition(&vm, "Ready").unwrap().2);
        let text = last.0["text"].as_str().unwrap().lines().collect::<Vec<_>>().join(" ");
        eprintln!("Ready of {name}: {}", last.1);
        last.1.lines().collect::<Vec<_>>().join(" ").contains(&text).then_some(())
    })
    .await;
}

/// Lets the manager read what belongs to no namespace.
async fn let_read_the_cluster(ns: &ManagedNamespace) {
    let place = ns.namespace.name();
    let binding = include_str!("../../deploy/node-reader/role-binding.yaml")
        .replace("name: vm-operator\n", &format!("name: vm-operator\n    namespace: {place}\n"));
    ns.namespace.apply(include_str!("../../deploy/node-reader/role.yaml"));
    let mut binding: Value = serde_yaml::from_str(&binding).unwrap();
    binding["metadata"]["name"] = json!(place);
    ns.namespace.apply(&binding.to_string());
}

fn made<T: serde::de::DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

/// A namespace whose claims wait for their Pods, which is no cause.
async fn namespace(test: &str) -> ManagedNamespace {
    const CLASS: &str = "explain-late";
    let config = format!(
        "\"/Manager\": {{\"/Controller\": {{\"/Reconciler\": {{runnerDataPvc: {{storageClassName: {CLASS}}}}}}}}}"
    );
    let ns = ManagedNamespace::with_configuration(test, &config).await;
    let_read_the_cluster(&ns).await;
    let class = json!({ "apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": { "name": CLASS },
        "provisioner": "example.org/none", "volumeBindingMode": "WaitForFirstConsumer" });
    Api::<StorageClass>::all(ns.client.clone())
        .patch(CLASS, &PatchParams::apply("test"), &Patch::Apply(&class))
        .await
        .unwrap();
    ns
}

/// A node of this test alone.
async fn node(ns: &ManagedNamespace, name: &str, spec: Value) {
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": name, "labels": { "of": name } }, "spec": spec });
    Api::<Node>::all(ns.client.clone())
        .patch(name, &PatchParams::apply("an-admin"), &Patch::Apply(&node))
        .await
        .unwrap();
}

/// A VM whose Pod no node takes, as a scheduler would say.
async fn pending(ns: &ManagedNamespace, name: &str, edit: impl FnOnce(&mut Value)) {
    pending_as(ns, name, "had untolerated taint(s)", edit).await;
}

/// The same in these words.
async fn pending_as(ns: &ManagedNamespace, name: &str, words: &str, edit: impl FnOnce(&mut Value)) {
    ns.create_vm(name, |vm| {
        vm["spec"]["vm"]["disks"] = json!([]);
        edit(vm);
    })
    .await;
    ns.pod_when(name, "exists", |_| true).await;
    let condition = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable",
        "message": format!("0/1 nodes are available: 1 node(s) {words}."), "lastTransitionTime": "2026-01-01T00:00:00Z" });
    ns.patch_pod_status(name, json!({ "conditions": [condition] })).await;
}

/// The status itself can't say that nobody may write it.
#[tokio::test]
async fn a_refused_status_is_named() {
    use k8s_openapi::api::admissionregistration::v1::{ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding};
    let ns = namespace("explain-status").await;
    let name = ns.namespace.name();
    let here = json!({ "matchLabels": { "kubernetes.io/metadata.name": name } });
    let policy = json!({ "metadata": { "name": name }, "spec": {
        "matchConstraints": { "namespaceSelector": here, "resourceRules": [{ "apiGroups": ["vmoperator.jdrupes.org"],
            "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["vms/status"] }] },
        "validations": [{ "expression": "false", "message": "no status here" }] } });
    let binding =
        json!({ "metadata": { "name": name }, "spec": { "policyName": name, "validationActions": ["Deny"] } });
    let policies: Api<ValidatingAdmissionPolicy> = Api::all(ns.client.clone());
    let bindings: Api<ValidatingAdmissionPolicyBinding> = Api::all(ns.client.clone());
    ns.create_vm("probe", |_| ()).await;
    policies.create(&PostParams::default(), &made(policy)).await.unwrap();
    bindings.create(&PostParams::default(), &made(binding)).await.unwrap();
    // The API server needs a moment until a policy is in force.
    eventually("the policy to be in force", LIMIT, async || {
        let status = json!({ "status": { "phase": "Pending" } });
        let vms = ns.api::<VirtualMachine>();
        vms.patch_status("probe", &PatchParams::default(), &Patch::Merge(status)).await.err().map(drop)
    })
    .await;
    ns.create_vm("apple", |_| ()).await;
    let said = says(&ns, "apple", "the API server refuses the VM's status from the manager").await;
    assert!(said.contains("no status here") && said.contains("\n  manager     failed "), "{said}");
    bindings.delete(name, &DeleteParams::default()).await.unwrap();
    policies.delete(name, &DeleteParams::default()).await.unwrap();
    eventually("the status to be written", LIMIT, async || {
        let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
        (vm.status.unwrap().observed_generation == vm.metadata.generation).then_some(())
    })
    .await;
    assert!(!explain(&ns, &["apple"]).data.contains("no status here"), "its event is of before");
}

#[tokio::test]
async fn what_the_api_server_refuses_is_named() {
    let ns = namespace("explain-refused").await;
    let quota = json!({ "metadata": { "name": "few" }, "spec": { "hard": { "pods": "0" } } });
    ns.api::<ResourceQuota>().create(&PostParams::default(), &made(quota)).await.unwrap();
    eventually("the quota to be counted", LIMIT, async || {
        ns.api::<ResourceQuota>().get("few").await.unwrap().status.and_then(|status| status.used).map(drop)
    })
    .await;
    ns.create_vm("quota", |_| ()).await;
    let said = says(&ns, "quota", "exceeded quota: few").await;
    assert!(said.contains("(ResourceQuota few, since ") && said.contains("(at most pods 0)"), "{said}");
    assert!(said.contains("\n  API server  failed "), "{said}");
    eprintln!("{said}");
    ns.api::<ResourceQuota>().delete("few", &DeleteParams::default()).await.unwrap();

    let limits = json!({ "metadata": { "name": "small" }, "spec": { "limits": [{ "type": "Container", "max": { "memory": "1Mi" } }] } });
    ns.api::<LimitRange>().create(&PostParams::default(), &made(limits)).await.unwrap();
    ns.create_vm("limit", |_| ()).await;
    says(&ns, "limit", "LimitRange small").await;
    ns.api::<LimitRange>().delete("small", &DeleteParams::default()).await.unwrap();

    let other = json!({ "metadata": { "name": "taken" }, "data": {} });
    ns.api::<ConfigMap>().create(&PostParams::default(), &made(other)).await.unwrap();
    ns.create_vm("taken", |_| ()).await;
    says(&ns, "taken", "ConfigMap taken exists and does not belong to this VM").await;

    let secret = json!({ "metadata": { "name": "private" }, "stringData": { "user": "x" } });
    ns.api::<Secret>().create(&PostParams::default(), &made(secret)).await.unwrap();
    ns.create_vm("secret", |vm| {
        vm["spec"]["cloudInit"] = json!({ "userDataFrom": { "secretKeyRef": { "name": "private", "key": "user" } } });
    })
    .await;
    says(&ns, "secret", "the Secret private can't be used as cloud-init data").await;
    ns.create_vm("mount", |vm| {
        vm["spec"]["cloudInit"] =
            json!({ "userDataFrom": { "configMapKeyRef": { "name": "nowhere", "key": "user" } } });
    })
    .await;
    says(&ns, "mount", "ConfigMap nowhere does not exist").await;
    ns.create_vm("template", |vm| vm["spec"]["templateValues"] = json!({ "runAsUser": 1000 })).await;
    says(&ns, "template", "pod.yaml.j2:").await;

    let label = json!({ "metadata": { "labels": { "pod-security.kubernetes.io/enforce": "restricted" } } });
    let namespaces = Api::<Namespace>::all(ns.client.clone());
    namespaces.patch(ns.namespace.name(), &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
    ns.create_vm("standard", |_| ()).await;
    says(&ns, "standard", "violates PodSecurity").await;

    ns.create_vm("kept", |vm| {
        vm["metadata"]["finalizers"] = json!(["example.org/keep"]);
        vm["spec"]["vm"]["state"] = json!("Stopped");
    })
    .await;
    says(&ns, "kept", "kept is stopped, as its spec wants it").await;
    ns.api::<VirtualMachine>().delete("kept", &DeleteParams::default()).await.unwrap();
    says(&ns, "kept", "kept is not deleted yet: the finalizers example.org/keep keep it").await;
    let none = json!({ "metadata": { "finalizers": null } });
    ns.api::<VirtualMachine>().patch("kept", &PatchParams::default(), &Patch::Merge(none)).await.unwrap();
}

#[tokio::test]
async fn what_keeps_a_pod_from_a_node_is_named() {
    let ns = namespace("explain-node").await;
    let taint = json!({ "taints": [{ "key": "team", "value": "red", "effect": "NoSchedule" }] });
    node(&ns, "explain-tainted", taint).await;
    node(&ns, "explain-cordoned", json!({ "unschedulable": true })).await;
    // It answers, whatever time the test takes.
    play_node(&ns.client, "explain-plain").await;
    let on = |name: &'static str| move |vm: &mut Value| vm["spec"]["nodeSelector"] = json!({ "of": name });
    pending(&ns, "tainted", on("explain-tainted")).await;
    let said = says(&ns, "tainted", "node explain-tainted has the taint team=red:NoSchedule").await;
    assert!(said.contains("(Node: spec.taints, since 2026-01-01T00:00:00Z)"), "{said}");
    eprintln!("{said}");
    pending(&ns, "cordoned", on("explain-cordoned")).await;
    says(&ns, "cordoned", "-> kubectl uncordon explain-cordoned").await;
    pending(&ns, "selector", on("explain-missing")).await;
    says(&ns, "selector", "no node has the labels of=explain-missing").await;
    ns.create_vm("class", |vm| {
        vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["storageClassName"] = json!("gold");
    })
    .await;
    says(&ns, "class", "claim class-core-disk wants the storage class gold, which does not exist").await;
    ns.create_vm("nobody", |vm| vm["spec"]["vm"]["disks"] = json!([])).await;

    let nowhere = |vm: &mut Value| vm["spec"]["nodeName"] = json!("explain-nowhere");
    ns.create_vm("nowhere", nowhere).await;
    says(&ns, "nowhere", "Pod nowhere is for node explain-nowhere, which does not exist").await;

    let plain = |vm: &mut Value| vm["spec"]["nodeName"] = json!("explain-plain");
    let waits = |reason: &str, last: Value| {
        json!({ "phase": "Pending", "containerStatuses": [{ "name": "vm-runner", "image": "runner:1", "imageID": "",
        "ready": false, "restartCount": 1, "state": { "waiting": { "reason": reason, "message": "of a test" } }, "lastState": last }] })
    };
    let killed = json!({ "terminated": { "exitCode": 137, "reason": "OOMKilled" } });
    for (name, status, words) in [
        ("image", waits("ErrImagePull", json!({})), "node explain-plain can't get the image runner:1: of a test"),
        ("name", waits("InvalidImageName", json!({})), "the image name runner:1 is invalid"),
        ("config", waits("CreateContainerConfigError", json!({})), "container vm-runner: of a test"),
        ("memory", waits("CrashLoopBackOff", killed), "killed because it used more memory than its limit"),
        ("mounted", waits("ContainerCreating", json!({})), "a volume can't be mounted: no such disk"),
    ] {
        ns.create_vm(name, plain).await;
        let pod = ns.pod_when(name, "exists", |_| true).await;
        let event = |uid: Option<String>, time: &str| {
            json!({ "metadata": { "generateName": "e-", "namespace": ns.namespace.name() }, "type": "Warning",
            "involvedObject": { "kind": "Pod", "name": name, "namespace": ns.namespace.name(), "uid": uid },
            "reason": "FailedMount", "message": "no such disk", "lastTimestamp": time })
        };
        // Of an earlier Pod of this name, and for the last one of this Pod.
        let uid = if name == "mounted" { pod.uid() } else { Some("earlier".into()) };
        ns.api::<Event>().create(&PostParams::default(), &made(event(uid, "2026-01-01T00:00:00Z"))).await.unwrap();
        ns.patch_pod_status(name, status).await;
        says(&ns, name, words).await;
    }
    says(&ns, "nobody", "nothing serves schedulerName default-scheduler").await;
}

#[tokio::test]
async fn a_healthy_vm_has_no_cause_and_a_missing_right_ends_nothing() {
    let ns = namespace("explain-healthy").await;
    node(&ns, "explain-healthy", json!({})).await;
    ns.create_vm("apple", |vm| vm["spec"]["nodeName"] = json!("explain-healthy")).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let said = says(&ns, "apple", "apple runs, as its spec wants it").await;
    assert!(!said.contains("not known"), "{said}");
    assert!(said.contains("\n  guest       ok      its agent answers\n") && !said.contains("\n  Git "), "{said}");
    eprintln!("{said}");
    let data: Value = serde_json::from_str(&explain(&ns, &["apple", "-o", "json"]).data).unwrap();
    assert_eq!((data["line"].as_str(), &data["cause"]), (Some("apple runs, as its spec wants it"), &Value::Null));
    let yaml: Value = serde_yaml::from_str(&explain(&ns, &["vm/apple", "-o", "yaml"]).data).unwrap();
    assert_eq!(yaml["chain"], data["chain"]);
    // Events are written beside everything else.
    let page = eventually("the page with its events", LIMIT, async || {
        Some(run(&ns, "status", &["apple"]))
            .filter(|page| page.data.contains("VirtualMachine/apple: created Pod apple"))
    })
    .await;
    eprintln!("{}", page.data);
    assert_eq!(page.code, 0, "{}", page.talk);
    let lines = [
        "apple runs, as its spec wants it",
        "Wanted      Running, 2 CPUs, 1G of memory",
        "Is          Running on node explain-healthy",
        "Disks       apple-core-disk",
        "Pod         apple",
    ];
    for line in lines {
        assert!(page.data.contains(line), "{line}: {}", page.data);
    }
    let none = explain(&ns, &["plum"]);
    assert_eq!(none.code, 1, "{}", none.talk);
    assert!(none.talk.starts_with("vm/plum: there is none in the namespace"), "{}", none.talk);

    let resource = "--resource=vms.vmoperator.jdrupes.org";
    ns.namespace.kubectl(&["create", "role", "reader", "--verb=get", resource]);
    ns.namespace.kubectl(&["create", "rolebinding", "reader", "--role=reader", "--user=alice"]);
    let printed = eventually("alice to read", LIMIT, async || {
        Some(explain(&ns, &["apple", "--as", "alice"])).filter(|printed| !printed.data.is_empty())
    })
    .await;
    assert!(printed.data.starts_with("apple runs, as its spec wants it\n") && printed.code == 0, "{}", printed.data);
    for plural in
        ["pods", "events", "nodes", "leases", "deployments", "storageclasses", "limitranges", "resourcequotas"]
    {
        let line = format!("not known: {plural} in the ");
        assert!(plural == "nodes" || printed.data.contains(&line), "{plural}: {}", printed.data);
    }
    eprintln!("{}", printed.data);
    let page = run(&ns, "status", &["apple", "--as", "alice"]);
    assert!(page.code == 0 && page.data.contains("\nIs          Running on node"), "{}{}", page.data, page.talk);
    assert!(
        page.data.contains("\nnot known: pods in the namespace") && !page.data.contains("\nDisks"),
        "{}",
        page.data
    );
}

#[tokio::test]
async fn a_disk_that_waits_for_an_upload_is_named() {
    let ns = crate::create::ns("explain-upload").await;
    let_read_the_cluster(&ns).await;
    node(&ns, "explain-upload", json!({})).await;
    ns.create_vm("web", |vm| {
        vm["spec"]["nodeName"] = json!("explain-upload");
        vm["spec"]["templates"] = json!({ "set": "import-disk" });
        vm["spec"]["templateValues"] =
            json!({ "import": { "disk": "core", "upload": { "size": 3_000_000, "sha256": "0123abcd0123abcd0123abcd0123abcd0123abcd0123abcd0123abcd0123abcd" } } });
    })
    .await;
    ns.pod_when("web", "exists", |_| true).await;
    let import = |state: Value, last: Value| {
        json!({ "phase": "Pending", "initContainerStatuses": [{ "name": "import", "state": state, "lastState": last, "image": "i", "imageID": "",
            "ready": false, "restartCount": 1 }] })
    };
    let running = json!({ "running": { "startedAt": "2026-01-01T00:00:00Z" } });
    let failed = json!({ "terminated": { "exitCode": 1, "message": "waiting for a file\nthe image is not used: its checksum is 4567" } });
    ns.patch_pod_status("web", import(running, failed)).await;
    let said =
        says(&ns, "web", "web does not run: its disk waits for a file of 3000000 bytes with the SHA-256 0123abcd0123abcd0123abcd0123abcd0123abcd0123abcd0123abcd0123abcd")
            .await;
    let words = "the last one was not used: the image is not used: its checksum is 4567 \
                 (spec.templateValues.import.upload, since 2026-01-01T00:00:00Z) -> kubectl vm upload web FILE -n ";
    assert!(said.contains(words) && said.contains("\n  kubelet     failed "), "{said}");
    assert!(run(&ns, "status", &["web"]).data.starts_with("web does not run: its disk waits for a file"));
    ns.patch_pod_status("web", import(json!({ "terminated": { "exitCode": 0 } }), json!(null))).await;
    says(&ns, "web", "web is starting").await;
}

#[tokio::test]
async fn several_vms_have_a_line_each() {
    let ns = namespace("explain-several").await;
    let place = ns.namespace.name();
    node(&ns, "explain-several", json!({})).await;
    let label = |vm: &mut Value, value: &str| vm["metadata"]["labels"] = json!({ "explain-several": value });
    for (name, value) in [("apple", place), ("plum", "other")] {
        ns.create_vm(name, |vm| {
            label(vm, value);
            vm["spec"]["vm"]["state"] = json!("Stopped");
        })
        .await;
        says(&ns, name, &format!("{name} is stopped, as its spec wants it")).await;
    }
    pending(&ns, "pear", |vm| {
        label(vm, place);
        vm["spec"]["nodeSelector"] = json!({ "of": "explain-nowhere" });
    })
    .await;
    says(&ns, "pear", "pear does not run: no node has the labels of=explain-nowhere").await;

    let stopped = |name: &str| format!("{name} is stopped, as its spec wants it");
    let lost = "pear does not run: no node has the labels of=explain-nowhere".to_owned();
    let of_place = |line: String| format!("{place}/{line}");
    let here = format!("explain-several={place}");
    let cases: [(&[&str], i32, Vec<String>); 9] = [
        (&["pear", "vm/apple"], 1, vec![lost.clone(), stopped("apple")]),
        (&["apple", "plum"], 0, vec![stopped("apple"), stopped("plum")]),
        (&["apple", "nothing", "pear"], 5, vec![stopped("apple"), lost.clone()]),
        (&["nothing", "none"], 1, vec![]),
        (&["-l", "explain-several=other"], 0, vec![stopped("plum")]),
        (&["-l", "explain-several=none"], 0, vec![]),
        (&["-A", "-l", here.as_str()], 1, vec![of_place(stopped("apple")), of_place(lost.clone())]),
        (&["--all"], 1, vec![stopped("apple"), lost.clone(), stopped("plum")]),
        (&[], 1, vec![stopped("apple"), lost.clone(), stopped("plum")]),
    ];
    for (arguments, code, lines) in cases {
        let printed = explain(&ns, arguments);
        let found: Vec<&str> = printed.data.lines().collect();
        assert_eq!((printed.code, found.len()), (code, lines.len()), "{arguments:?}: {}{}", printed.data, printed.talk);
        for (line, words) in found.iter().zip(&lines) {
            assert!(line.starts_with(words.as_str()), "{arguments:?}: {line}");
        }
        let is_told =
            arguments.contains(&"nothing") == printed.talk.contains("vm/nothing: there is none in the namespace");
        assert!(is_told && !printed.talk.contains("not everything"), "{arguments:?}: {}", printed.talk);
    }
    let printed = explain(&ns, &["apple", "nothing", "pear", "-o", "json"]);
    let list: Value = serde_json::from_str(&printed.data).unwrap();
    assert_eq!((printed.code, &list["kind"], &list["items"][2]), (5, &json!("List"), &Value::Null));
    assert_eq!((&list["items"][0]["name"], &list["items"][0]["cause"]), (&json!("apple"), &Value::Null));
    let pear = &list["items"][1];
    assert_eq!((&pear["namespace"], &pear["name"]), (&json!(place), &json!("pear")));
    assert!(pear["cause"]["cause"] == "SelectorUnmatched" && pear["chain"].is_array(), "{pear}");
}

#[tokio::test]
async fn who_stands_in_the_way_of_a_pod_is_named() {
    const NODE: &str = "explain-neighbours";
    let ns = namespace(NODE).await;
    let place = ns.namespace.name();
    play_node(&ns.client, NODE).await;
    node(&ns, NODE, json!({})).await;
    // It is in the network of its node, with the port of its display.
    let tapped = |vm: &mut Value| vm["spec"]["vm"]["networks"] = json!([{ "tap": {} }]);
    let here = |vm: &mut Value| vm["spec"]["nodeSelector"] = json!({ "of": NODE });
    let wants = |vm: &mut Value, kind: &str, required: Value| {
        vm["spec"]["affinity"] = json!({ kind: { "requiredDuringSchedulingIgnoredDuringExecution": required } });
    };
    let of = |label: &str, value: &str| json!([{ "labelSelector": { "matchLabels": { label: value } }, "topologyKey": "of" }]);
    ns.create_vm("other", |vm| {
        vm["spec"]["vm"]["disks"] = json!([]);
        vm["spec"]["nodeName"] = json!(NODE);
        tapped(vm);
    })
    .await;
    ns.pod_when("other", "on its node", |pod| pod.spec.as_ref().is_some_and(|spec| spec.node_name.is_some())).await;

    pending_as(&ns, "port", "didn't have free ports for the requested pod ports", |vm| {
        here(vm);
        tapped(vm);
    })
    .await;
    let taken = format!("Pod {place}/other on node {NODE} has the port 5900/TCP, which Pod port needs too");
    let said = says(&ns, "port", &format!("{taken} (Pod: spec.containers[vm-runner].ports, since ")).await;
    let todo = format!("-> kubectl vm stop other -n {place}, or take another port in the VM or its template");
    assert!(said.lines().next().unwrap().ends_with(&todo) && !said.contains("not known"), "{said}");

    pending_as(&ns, "apart", "didn't match pod anti-affinity rules", |vm| {
        here(vm);
        wants(vm, "podAntiAffinity", of("app.kubernetes.io/instance", "other"));
    })
    .await;
    let words = format!(
        "Pod {place}/other on node {NODE} has the labels app.kubernetes.io/instance=other, with which Pod apart wants to share no of"
    );
    says(&ns, "apart", &words).await;
    pending_as(&ns, "beside", "didn't match pod affinity rules", |vm| {
        here(vm);
        wants(vm, "podAffinity", of("app", "nothing"));
    })
    .await;
    let words = format!("no Pod with the labels app=nothing runs in the namespace {place}, and Pod beside wants");
    says(&ns, "beside", &words).await;
    pending_as(&ns, "lost", "didn't match Pod's node affinity/selector", |vm| {
        let term = json!({ "matchExpressions": [{ "key": "of", "operator": "In", "values": ["explain-nowhere"] }] });
        wants(vm, "nodeAffinity", json!({ "nodeSelectorTerms": [term] }));
    })
    .await;
    says(&ns, "lost", "no node has of in (explain-nowhere) (").await;

    let resource = "--resource=vms.vmoperator.jdrupes.org,pods";
    ns.namespace.kubectl(&["create", "role", "reader", "--verb=get,list", resource]);
    ns.namespace.kubectl(&["create", "rolebinding", "reader", "--role=reader", "--user=alice"]);
    let printed = eventually("alice to read", LIMIT, async || {
        Some(explain(&ns, &["port", "--as", "alice"])).filter(|printed| printed.data.contains(&taken))
    })
    .await;
    assert!(printed.data.contains("\nnot known: pods in the cluster: you may not list them\n"), "{}", printed.data);
}

#[tokio::test]
async fn a_volume_on_a_node_that_takes_no_pod_is_named() {
    let ns = namespace("explain-volume").await;
    node(&ns, "explain-home", json!({ "unschedulable": true })).await;
    node(&ns, "explain-room", json!({})).await;
    let term = json!({ "matchExpressions": [{ "key": "of", "operator": "In", "values": ["explain-home"] }] });
    let volume = json!({ "metadata": { "name": "explain-volume" }, "spec": {
        "capacity": { "storage": "1Gi" }, "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "storageClassName": "explain-late", "local": { "path": "/x" },
        "nodeAffinity": { "required": { "nodeSelectorTerms": [term] } },
    } });
    Api::<PersistentVolume>::all(ns.client.clone()).create(&PostParams::default(), &made(volume)).await.unwrap();
    let claim = json!({ "accessModes": ["ReadWriteOnce"], "storageClassName": "explain-late", "volumeName": "explain-volume",
        "resources": { "requests": { "storage": "1Gi" } } });
    pending(&ns, "home", |vm| {
        vm["spec"]["vm"]["disks"] =
            json!([{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": claim } }]);
    })
    .await;
    let words = "claim home-core-disk has the volume explain-volume, which can only be used on nodes with of in (explain-home), and node explain-home is cordoned";
    let said = says(&ns, "home", words).await;
    assert!(said.lines().next().unwrap().ends_with("-> kubectl uncordon explain-home"), "{said}");
    node(&ns, "explain-home", json!({ "unschedulable": false })).await;
    says(&ns, "home", "and node explain-home does not take the Pod: it has no room").await;
    Api::<Node>::all(ns.client.clone()).delete("explain-home", &DeleteParams::default()).await.unwrap();
    says(&ns, "home", "nodes with of in (explain-home), and the cluster has none of these").await;
}

#[tokio::test]
async fn a_suspended_application_is_said_where_it_may_be_read() {
    let ns = namespace("explain-git").await;
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    let version =
        json!({ "name": "v1alpha1", "served": true, "storage": true, "schema": { "openAPIV3Schema": schema } });
    let names = json!({ "kind": "Application", "plural": "applications", "singular": "application", "listKind": "ApplicationList" });
    let definition = json!({ "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": "applications.argoproj.io" },
        "spec": { "group": "argoproj.io", "names": names, "scope": "Namespaced", "versions": [version] } });
    let place = ns.namespace.name().to_owned();
    ns.create_vm("apple", |vm| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        let id = format!("{place}_web:vmoperator.jdrupes.org/VirtualMachine:{place}/apple");
        vm["metadata"]["annotations"] = json!({ "argocd.argoproj.io/tracking-id": id });
    })
    .await;
    // The cluster does not have that kind.
    let said = says(&ns, "apple", "apple is stopped, as its spec wants it").await;
    assert!(said.contains(&format!("\n  Git         ok      Application {place}/web applies it\n")), "{said}");
    assert!(!said.contains("not known"), "{said}");
    ns.namespace.apply(&definition.to_string());
    ns.namespace.kubectl(&["wait", "--for=condition=Established", "crd/applications.argoproj.io", "--timeout=60s"]);
    let application = json!({ "apiVersion": "argoproj.io/v1alpha1", "kind": "Application",
        "metadata": { "name": "web", "annotations": { "argocd.argoproj.io/skip-reconcile": "true" } }, "spec": {} });
    ns.namespace.apply(&application.to_string());
    let said = says(&ns, "apple", "apple is stopped, as its spec wants it").await;
    let words = format!(
        "also: Application {place}/web, which applies this VM, is suspended (argocd.argoproj.io/skip-reconcile): changes in Git have no effect \
         until it goes on: kubectl -n {place} annotate application web argocd.argoproj.io/skip-reconcile-\n"
    );
    assert!(said.contains(&words) && said.contains("\n  Git         waits   Application "), "{said}");
    assert!(run(&ns, "status", &["apple"]).data.contains("\nGit         Application "));

    ns.namespace.kubectl(&["create", "role", "reader", "--verb=get", "--resource=vms.vmoperator.jdrupes.org"]);
    ns.namespace.kubectl(&["create", "rolebinding", "reader", "--role=reader", "--user=alice"]);
    let printed = eventually("alice to read", LIMIT, async || {
        Some(explain(&ns, &["apple", "--as", "alice"])).filter(|printed| !printed.data.is_empty())
    })
    .await;
    let unread = format!("\nnot known: applications in the namespace {place}: you may not get them\n");
    assert!(printed.code == 0 && printed.data.contains(&unread), "{}", printed.data);
}
