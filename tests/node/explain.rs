//! `kubectl vm explain` on a node, with the causes of `causes.yaml`. It writes what it saw into docs/explain-tested.md:
//! `VM_OPERATOR_TEST_UPDATE=1 cargo test --features dev --test node explain:: -- --ignored --nocapture`

use std::{fmt::Write as _, time::Instant};

use regex::Regex;
use serde::Deserialize;
use serde_json::{Value, json};

use super::*;

const CASES: &str = include_str!("causes.yaml");
const PAGE: &str = "docs/explain-tested.md";
/// How long a plant may take to bear fruit: the kubelet and the scheduler have their pauses.
const PATIENCE: std::time::Duration = std::time::Duration::from_mins(3);

/// What a VM has beside the least that it needs.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Plant {
    spec: Value,
    vm: Value,
    claim: Value,
    pod: Value,
    cd: Option<String>,
    cause: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    how: String,
    words: String,
    #[serde(flatten)]
    plant: Plant,
    first: Option<Plant>,
    #[serde(default)]
    objects: Vec<Value>,
    #[serde(default)]
    alone: bool,
    #[serde(default)]
    until_refused: Vec<String>,
    finalizer: Option<String>,
    label: Option<String>,
    node: Option<[String; 2]>,
    scale: Option<u32>,
}

/// What `explain` says.
struct Said {
    line: String,
    cause: Option<String>,
    /// What is wrong, in one line, if the manager can find it too: what keeps it from its own work it can't say.
    text: Option<String>,
    milliseconds: u128,
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            for (key, value) in from {
                merge(into.entry(key).or_insert(Value::Null), value);
            }
        }
        (_, Value::Null) => {}
        (into, from) => *into = from.clone(),
    }
}

fn manifest(namespace: &TestNamespace, case: &Case, plant: &Plant) -> String {
    let mut claim = json!({ "resources": { "requests": { "storage": "16Mi" } } });
    merge(&mut claim, &plant.claim);
    let mut disks = vec![json!({ "volumeClaimTemplate": { "metadata": { "name": "system" }, "spec": claim } })];
    disks.extend(plant.cd.iter().map(|image| json!({ "cdrom": { "image": image } })));
    let mut spec = json!({
        "resources": { "requests": { "cpu": "20m", "memory": "64Mi" } },
        "vm": { "state": "Running", "maximumCpus": 1, "maximumRam": "128Mi", "powerdownTimeout": 1, "networks": [{ "user": {} }], "disks": disks },
    });
    merge(&mut spec, &plant.spec);
    merge(&mut spec["vm"], &plant.vm);
    if plant.pod.is_object() {
        (spec["templates"], spec["templateValues"]) = (json!({ "set": "raw" }), json!({ "pod": plant.pod }));
    }
    let finalizers: Vec<&String> = case.finalizer.iter().collect();
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": case.name, "namespace": namespace.name(), "finalizers": finalizers }, "spec": spec,
    })
    .to_string()
    .replace("NAMESPACE", namespace.name())
}

async fn explain(namespace: &TestNamespace, name: &str) -> Said {
    let (_tools, mut command) = commands::kubectl_vm(namespace, &["explain", name, "-o", "json"]);
    let begin = Instant::now();
    let output = command.output().await.unwrap();
    let milliseconds = begin.elapsed().as_millis();
    let explanation: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
    let cause = explanation["cause"]["cause"].as_str().map(str::to_owned);
    assert_eq!(output.status.code(), Some(i32::from(cause.is_some())), "{output:?}");
    let text = explanation["cause"]["text"].as_str().filter(|_| explanation["cause"]["stage"] != "manager");
    let text = text.map(|text| text.lines().collect::<Vec<_>>().join(" "));
    Said { line: explanation["line"].as_str().unwrap().to_owned(), cause, text, milliseconds }
}

/// The message of Ready, in one line.
fn ready(namespace: &TestNamespace, name: &str) -> String {
    let message = "--output=jsonpath={.status.conditions[?(@.type==\"Ready\")].message}";
    namespace.kubectl(&["get", "vm", name, message]).lines().collect::<Vec<_>>().join(" ")
}

/// Waits until `explain` says so, and Ready in the same words. The error is what they say at last.
async fn says(namespace: &TestNamespace, name: &str, plant: &Plant, words: &str) -> Result<Said, String> {
    let words = words.replace("NAMESPACE", namespace.name());
    let end = Instant::now() + PATIENCE;
    loop {
        let said = explain(namespace, name).await;
        let is_named = said.cause == plant.cause && said.line.contains(&words);
        let of_ready = ready(namespace, name);
        if is_named && said.text.as_ref().is_none_or(|text| of_ready.contains(text)) {
            return Ok(said);
        }
        if Instant::now() > end {
            let Said { line, cause, .. } = said;
            return Err(format!("{:?} {words:?}, but {cause:?}: {line}; Ready: {of_ready}", plant.cause));
        }
        tokio::time::sleep(std::time::Duration::from_secs(1)).await;
    }
}

async fn begin(namespace: &TestNamespace, cluster: &Cluster, case: &Case) {
    if let Some(first) = &case.first {
        namespace.apply(&manifest(namespace, case, first));
        says(namespace, &case.name, first, "").await.unwrap();
    }
    for object in &case.objects {
        namespace.apply(&object.to_string().replace("NAMESPACE", namespace.name()));
    }
    if !case.until_refused.is_empty() {
        let arguments: Vec<&str> = case.until_refused.iter().map(String::as_str).collect();
        eventually("the objects to be in force", LIMIT, async || {
            let (_tools, mut command) = commands::kubectl(namespace, &arguments);
            let output = command.output().await.unwrap();
            String::from_utf8_lossy(&output.stderr).contains("ValidatingAdmissionPolicy").then_some(())
        })
        .await;
    }
    if let Some(label) = &case.label {
        cluster.kubectl(&["label", "namespace", namespace.name(), label]);
    }
    if let Some([plant, _]) = &case.node {
        on_node(cluster, plant);
    }
    if let Some(replicas) = case.scale {
        scale(namespace, replicas);
    }
    namespace.apply(&manifest(namespace, case, &case.plant));
    if case.finalizer.is_some() {
        namespace.kubectl(&["delete", "vm", &case.name, "--wait=false"]);
    }
}

async fn end(namespace: &TestNamespace, cluster: &Cluster, case: &Case) {
    for object in &case.objects {
        let text = object.to_string().replace("NAMESPACE", namespace.name());
        let object: Value = serde_json::from_str(&text).unwrap();
        let text = |path: &str| object.pointer(path).unwrap().as_str().unwrap().to_owned();
        namespace.kubectl(&["delete", &text("/kind"), &text("/metadata/name")]);
    }
    if let Some(label) = &case.label {
        let key = label.split('=').next().unwrap();
        cluster.kubectl(&["label", "namespace", namespace.name(), &format!("{key}-")]);
    }
    if let Some([_, heal]) = &case.node {
        on_node(cluster, heal);
    }
    if case.scale.is_some() {
        scale(namespace, 1);
    }
    namespace.kubectl(&["delete", "vm", &case.name]);
}

/// `cordon`, or `taint TAINT`.
fn on_node(cluster: &Cluster, command: &str) {
    let node = cluster.kubectl(&["get", "nodes", "--output=jsonpath={.items[0].metadata.name}"]);
    let (verb, rest) = command.split_once(' ').unwrap_or((command, ""));
    let kind = if verb == "taint" { "nodes" } else { "" };
    let arguments: Vec<&str> = [verb, kind, &node, rest].into_iter().filter(|argument| !argument.is_empty()).collect();
    cluster.kubectl(&arguments);
}

fn scale(namespace: &TestNamespace, replicas: u32) {
    namespace.kubectl(&["scale", "deployment", "vm-operator", &format!("--replicas={replicas}")]);
    namespace.kubectl(&["rollout", "status", "deployment/vm-operator", "--timeout=600s"]);
}

#[tokio::test]
#[ignore = "it has the node for itself for four minutes, and may write a page: CONTRIBUTING.md says when to run it"]
async fn causes_that_are_planted_are_named() {
    let _alone = NODE.write().await;
    let Stage { cluster, namespace, vms: _, pods: _ } = Stage::set("explained").await;
    recipes::install_set(&namespace, "import-disk", &["import-disk"]);
    namespace.apply(
        &json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator-templates-raw",
            "labels": { "vmoperator.jdrupes.org/template-set": "raw" } },
            "data": { "raw.patch.yaml.j2": "target: {kind: Pod}\nstrategicMerge: {{ values.pod }}\n" } })
        .to_string(),
    );
    let cases: Vec<Case> = serde_yaml::from_str(CASES).unwrap();
    let (mut seen, mut wrong) = (Vec::new(), Vec::new());
    let mut note = |case, said: Result<Said, String>| match said {
        Ok(said) => {
            println!("{} ms: {}", said.milliseconds, said.line);
            seen.push((case, said));
        }
        Err(error) => {
            println!("WRONG: {error}");
            wrong.push(error);
        }
    };
    for case in cases.iter().filter(|case| !case.alone) {
        begin(&namespace, cluster, case).await;
    }
    for case in cases.iter().filter(|case| !case.alone) {
        note(case, says(&namespace, &case.name, &case.plant, &case.words).await);
    }
    for case in cases.iter().filter(|case| case.alone) {
        begin(&namespace, cluster, case).await;
        note(case, says(&namespace, &case.name, &case.plant, &case.words).await);
        end(&namespace, cluster, case).await;
    }
    for case in cases.iter().filter(|case| case.finalizer.is_some()) {
        let none = r#"{"metadata":{"finalizers":null}}"#;
        namespace.kubectl(&["patch", "vm", &case.name, "--type=merge", "--patch", none]);
    }
    for case in cases.iter().filter(|case| !case.alone) {
        for object in case
            .objects
            .iter()
            .filter(|object| ["StorageClass", "PersistentVolume"].map(Value::from).contains(&object["kind"]))
        {
            let name = object["metadata"]["name"].as_str().unwrap().replace("NAMESPACE", namespace.name());
            namespace.kubectl(&["delete", object["kind"].as_str().unwrap(), &name, "--wait=false"]);
        }
    }
    assert!(wrong.is_empty(), "{} of {}: {wrong:#?}", wrong.len(), cases.len());
    if std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_some() {
        std::fs::write(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(PAGE), page(&namespace, &seen)).unwrap();
    }
}

fn page(namespace: &TestNamespace, seen: &[(&Case, Said)]) -> String {
    let (mut causes, mut others) = (String::new(), String::new());
    let time = Regex::new(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z").unwrap();
    let uid = Regex::new("[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}").unwrap();
    for (case, said) in seen {
        let line = said.line.replace(namespace.name(), "vms").replace('|', r"\|");
        let line = uid.replace_all(&time.replace_all(&line, "TIME"), "UID").into_owned();
        match &said.cause {
            Some(cause) => writeln!(causes, "| {cause} | {} | {line} |", case.how).unwrap(),
            None => writeln!(others, "| {} | {line} |", case.how).unwrap(),
        }
    }
    let (with_cause, all) = (seen.iter().filter(|(_, said)| said.cause.is_some()).count(), seen.len());
    let same = seen.iter().filter(|(_, said)| said.text.is_some()).count();
    let decoys = seen.iter().filter(|(case, _)| case.first.is_some()).count();
    let mut times: Vec<u128> = seen.iter().map(|(_, said)| said.milliseconds).collect();
    times.sort_unstable();
    format!(
        "# Causes that were planted on a node\n\n\
         `tests/node/explain.rs` plants each of these causes (`tests/node/causes.yaml` has the manifests) on a real node without KVM, and reads the first line of\n\
         [`kubectl vm explain`](commands.md#why-does-it-not-run). Each line names the cause: {with_cause} of {with_cause}. In {decoys} of the {all} rows something else was\n\
         wrong before and has healed. The message of the VM's condition Ready had the same words in {same} of {same} (all but those of the\n\
         stage manager). The command, built without optimization, took {} to {} ms, with half of the runs under {} ms, on two cores.\n\n\
         | cause | how it is planted | first line |\n|---|---|---|\n{causes}\n\
         ## No cause\n\n| VM | first line |\n|---|---|\n{others}",
        times.first().unwrap(),
        times.last().unwrap(),
        times[times.len() / 2],
    )
}
