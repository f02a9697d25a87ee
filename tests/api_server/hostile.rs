//! A hostile author of VMs: she has rights on `vms` and `vmpools` of a namespace, and on nothing else. `hostile.yaml` has what she writes, a row for
//! each field of the spec, and what must become of it: refused by the definition, by the policy of `deploy/` and by the manager, or without effect
//! beyond her VM. A field that has no row fails the first test.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod, Secret};
use kube::{
    Api, Client, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams, PostParams},
};
use serde::Deserialize;
use serde_json::{Value, json};
use vm_operator::{
    api::{VirtualMachine, VmPool, crd},
    object::INSTANCE_LABEL,
};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, play_node, vm_manifest},
    manager::NOTHING_ELSE,
};

/// What an administrator has allowed in these tests: one bridge, one legacy image, and Services without anything of VMs.
const LISTS: &str = r#""/Manager/Controller/Reconciler":
  networks: {bridges: [lan]}
  legacyRunnerImages: [registry.example.org/legacy/org.jdrupes.vmoperator.runner.qemu-arch]
  loadBalancerService: {annotations: {internal: "true"}}
"#;
/// The same for the policy, as the page about security shows it.
const VARIABLES: [(&str, &str); 6] = [
    ("haveServices", "true"),
    ("allowedBridges", "[r'^lan$']"),
    (
        "allowedImages",
        r"[r'^localhost/vm-runner(:[^/]*)?(@.*)?$', r'^registry\.example\.org/legacy/org\.jdrupes\.vmoperator\.runner\.qemu-arch(:[^/]*)?(@.*)?$']",
    ),
    ("allowedServiceAnnotations", "[]"),
    ("allowedServiceLabels", "[]"),
    ("serviceDefaults", "{'annotations': {'internal': 'true'}, 'labels': {}}"),
];
const MALLORY: &str = "mallory";
const NODE: &str = "shorter";

#[derive(Deserialize)]
struct Row {
    what: String,
    fields: Vec<String>,
    #[serde(default)]
    spec: Value,
    #[serde(default)]
    metadata: Value,
    must: Must,
    /// What the policy says, where it has another rule.
    policy: Option<String>,
    /// The API server refuses the Pod.
    #[serde(default)]
    no_pod: bool,
    /// The Pod is in the node's network, because a bridge is listed.
    #[serde(default)]
    in_network_of_node: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum Must {
    List(String),
    Manager(String),
    Schema(String),
    Harmless(String),
    Other(String),
}

fn rows() -> Vec<Row> {
    // As JSON: in YAML an enum would be a tag.
    let rows: Value = serde_yaml::from_str(include_str!("hostile.yaml")).unwrap();
    serde_json::from_value(rows).unwrap()
}

fn merge(into: &mut Value, from: &Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            from.iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
        }
        (_, Value::Null) => {}
        (into, from) => *into = from.clone(),
    }
}

impl Row {
    fn vm(&self, name: &str) -> Value {
        let mut vm = vm_manifest(name);
        if self.spec.pointer("/vm/cpuTopology").is_some() {
            vm["spec"]["vm"].as_object_mut().unwrap().remove("maximumCpus");
        }
        merge(&mut vm["spec"], &self.spec);
        merge(&mut vm["metadata"], &self.metadata);
        vm
    }

    fn pool(&self, name: &str) -> Value {
        let mut template = self.vm(name);
        template["spec"]["vm"].as_object_mut().unwrap().remove("state");
        json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": name },
            "spec": { "replicas": 1, "permissions": [], "template": { "spec": template["spec"] } },
        })
    }
}

/// The fields below a schema that have no fields.
fn leaves(path: &str, schema: &Value, found: &mut BTreeSet<String>) {
    let joined = |name: &str| if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") };
    if let Some(fields) = schema["properties"].as_object() {
        fields.iter().for_each(|(name, field)| leaves(&joined(name), field, found));
        if schema["x-kubernetes-preserve-unknown-fields"] == true {
            found.insert(joined("*"));
        }
    } else if schema["items"].is_object() {
        leaves(&format!("{path}[]"), &schema["items"], found);
    } else {
        found.insert(path.to_owned());
    }
}

fn spec_of(definition: &str) -> Value {
    let (_, crd) = crd::crds().into_iter().find(|(name, _)| name.contains(definition)).unwrap();
    crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"].clone()
}

#[test]
fn each_field_has_a_row() {
    let mut fields = BTreeSet::new();
    leaves("", &spec_of("vms"), &mut fields);
    let mut pool = spec_of("vmpools");
    pool["properties"]["template"]["properties"]["spec"] = json!({});
    let mut of_pool = BTreeSet::new();
    leaves("", &pool, &mut of_pool);
    fields.extend(of_pool.iter().map(|field| format!("pool:{field}")));
    let rows = rows();
    let named: BTreeSet<String> = rows.iter().flat_map(|row| row.fields.iter().cloned()).collect();
    let missing: Vec<&String> = fields.difference(&named).collect();
    assert!(missing.is_empty(), "no row of hostile.yaml says what may become of {missing:?}");
    let known = |field: &&String| !fields.contains(*field) && !field.starts_with("metadata.");
    assert_eq!(named.iter().find(known), None, "that is no field");
    println!("{} rows for {} fields", rows.len(), fields.len());
}

/// Requests of somebody who may write VMs and pools.
async fn mallory(ns: &ManagedNamespace) -> Client {
    let rules = json!([
        { "apiGroups": ["vmoperator.jdrupes.org"], "resources": ["vms", "vmpools"], "verbs": ["*"] },
    ]);
    let role = json!({ "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": { "name": MALLORY }, "rules": rules });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": MALLORY },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": MALLORY },
        "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": MALLORY }],
    });
    ns.namespace.create(&format!("{role}\n---\n{binding}")).await;
    let mut config = ns.cluster.config().await;
    config.auth_info.impersonate = Some(MALLORY.into());
    Client::try_from(config).unwrap()
}

/// The policy of `deploy/`, for one namespace and with [`LISTS`].
fn policy(ns: &ManagedNamespace) -> String {
    let mut documents: Vec<Value> = serde_yaml::Deserializer::from_str(include_str!("../../deploy/vm-policy.yaml"))
        .map(|document| Value::deserialize(document).unwrap())
        .collect();
    let name = format!("vms-{}.vmoperator.jdrupes.org", ns.namespace.name());
    for document in &mut documents {
        document["metadata"]["name"] = json!(name);
        if document["kind"] == "ValidatingAdmissionPolicyBinding" {
            document["spec"]["policyName"] = json!(name);
            document["spec"]["matchResources"] = json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": ns.namespace.name() } } });
            continue;
        }
        for variable in document["spec"]["variables"].as_array_mut().unwrap() {
            if let Some((_, expression)) = VARIABLES.iter().find(|(name, _)| variable["name"] == *name) {
                variable["expression"] = json!(expression);
            }
        }
    }
    // kubectl reads a file that begins as JSON as one document.
    json!({ "apiVersion": "v1", "kind": "List", "items": documents }).to_string()
}

async fn create(vms: &Api<DynamicObject>, object: Value) -> Result<(), String> {
    match vms.create(&PostParams::default(), &serde_json::from_value(object).unwrap()).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(answer)) => Err(answer.message.clone()),
        Err(error) => panic!("{error}"),
    }
}

/// What of a Pod reaches further than that of a plain VM.
fn beyond(pod: &Pod, row: &Row) -> Vec<String> {
    let (name, pod) = (pod.name_any(), json!(pod));
    let spec = &pod["spec"];
    let mut found = Vec::new();
    let mut add = |is_beyond: bool, what: &str| {
        if is_beyond {
            found.push(what.to_owned());
        }
    };
    add((spec["hostNetwork"] == true) != row.in_network_of_node, "the network of the node");
    add(spec["hostPID"] == true || spec["hostIPC"] == true, "the node's processes");
    add(!spec["nodeName"].is_null(), "a node");
    add(spec["serviceAccountName"] != "vm-runner", "an account");
    let tolerations = spec["tolerations"].as_array().into_iter().flatten();
    add(
        tolerations.filter(|it| !it["key"].as_str().unwrap_or_default().starts_with("node.kubernetes.io/")).count() > 0,
        "a toleration",
    );
    for container in
        ["initContainers", "containers"].iter().flat_map(|list| spec[*list].as_array().into_iter().flatten())
    {
        add(!container["image"].as_str().unwrap().starts_with("localhost/vm-runner:"), "an image");
        add(container["securityContext"]["privileged"] == true, "privilege");
        let adds = container["securityContext"]["capabilities"]["add"].as_array().is_some_and(|add| !add.is_empty());
        add(adds != (row.in_network_of_node && container["name"] == "vm-runner"), "a capability");
        let limits = container["resources"]["limits"].as_object().into_iter().flatten();
        add(
            limits.filter(|(name, _)| name.contains('/') && !name.starts_with("vmoperator.jdrupes.org/")).count() > 0,
            "a device",
        );
    }
    for volume in spec["volumes"].as_array().unwrap() {
        let path = &volume["hostPath"]["path"];
        let is_its_tap = row.in_network_of_node && path == "/dev/net/tun";
        add(!path.is_null() && !is_its_tap, "a path of the node");
        let claim = volume["persistentVolumeClaim"]["claimName"].as_str().unwrap_or(&name);
        add(!claim.starts_with(&name), "a claim of another");
        let sources = volume["projected"]["sources"].as_array().into_iter().flatten().chain([volume]);
        for source in sources {
            for object in [&source["secret"]["secretName"], &source["secret"]["name"], &source["configMap"]["name"]] {
                let object = object.as_str().unwrap_or(&name);
                add(!object.starts_with(&name) && object != "kube-root-ca.crt", "a Secret or ConfigMap of another");
            }
        }
    }
    let labels = pod["metadata"]["labels"].as_object().unwrap();
    add(
        labels.keys().any(|key| !key.starts_with("app.kubernetes.io/"))
            || labels["app.kubernetes.io/name"] != "vm-runner",
        "a label",
    );
    let annotations = pod["metadata"]["annotations"].as_object().unwrap();
    let is_ours = |key: &str| {
        let ours = ["vmoperator.jdrupes.org/", "vmrunner.jdrupes.org/", "image.vmoperator.jdrupes.org/"];
        ours.iter().any(|it| key.starts_with(it))
    };
    for key in annotations.keys().filter(|key| !is_ours(key)) {
        add(true, &format!("the annotation {key}"));
    }
    found
}

fn bad_claim(claim: &PersistentVolumeClaim) -> bool {
    let spec = json!(claim.spec);
    let has = |field: &str| !spec[field].is_null();
    let is_ours = |key: &String| {
        ["vmoperator.jdrupes.org/", "argocd.argoproj.io/", "kustomize.toolkit.fluxcd.io/"]
            .iter()
            .any(|it| key.starts_with(it))
    };
    has("dataSource")
        || has("dataSourceRef")
        || has("volumeName")
        || has("selector")
        || claim.annotations().keys().any(|key| !is_ours(key))
        || claim
            .labels()
            .keys()
            .any(|key| !key.starts_with("app.kubernetes.io/") && !key.starts_with("vmoperator.jdrupes.org/"))
}

/// What the manager does with a VM that is stored.
async fn judge(ns: &ManagedNamespace, name: &str, row: &Row) {
    let what = &row.what;
    let of_vm = ListParams::default().labels(&format!("{INSTANCE_LABEL}={name}"));
    match &row.must {
        Must::List(words) | Must::Manager(words) => {
            let vm = ns
                .vm_when(name, "refused", |vm| {
                    condition(vm, "Ready").is_some_and(|(status, reason, _)| {
                        status == "False" && ["NotAllowed", "TemplateError", "SecretRefused"].contains(&reason.as_str())
                    })
                })
                .await;
            let (_, reason, message) = condition(&vm, "Ready").unwrap();
            assert!(message.contains(words.as_str()), "{what}: {reason}: {message}");
            if matches!(row.must, Must::List(_)) {
                assert_eq!(reason, "NotAllowed", "{what}: {message}");
                let claims = ns.api::<PersistentVolumeClaim>().list(&of_vm).await.unwrap().items;
                assert_eq!(
                    claims.iter().map(ResourceExt::name_any).collect::<Vec<_>>(),
                    Vec::<String>::new(),
                    "{what}"
                );
            }
            assert_eq!(ns.api::<Pod>().list(&of_vm).await.unwrap().items.len(), 0, "{what}");
        }
        Must::Harmless(_) if row.no_pod => drop(ns.vm_with_reason(name, "ApplyFailed").await),
        Must::Harmless(why) => {
            let pod = ns.pod_when(name, "created", |_| true).await;
            assert_eq!(beyond(&pod, row), Vec::<String>::new(), "{what}, of which is said: {why}");
            let claims = ns.api::<PersistentVolumeClaim>().list(&of_vm).await.unwrap().items;
            assert!(!claims.is_empty() && !claims.iter().any(bad_claim), "{what}: {claims:?}");
        }
        Must::Schema(_) => {}
        Must::Other(why) => assert!(!why.is_empty(), "{what}: where it is tested"),
    }
}

#[tokio::test]
async fn who_may_write_vms_gets_vms_and_nothing_else() {
    let ns = ManagedNamespace::with_configuration("hostile", &format!("{NOTHING_ELSE}{LISTS}")).await;
    let secret = json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "others" }, "stringData": { "password": "x" } });
    ns.namespace.create(&secret.to_string()).await;
    let client = mallory(&ns).await;
    let refused = Api::<Secret>::namespaced(client.clone(), ns.namespace.name()).get("others").await;
    assert!(matches!(refused, Err(kube::Error::Api(answer)) if answer.code == 403), "her rights are those on VMs");
    let api = |resource: kube::api::ApiResource| -> Api<DynamicObject> {
        Api::namespaced_with(client.clone(), ns.namespace.name(), &resource)
    };
    let vms = api(kube::api::ApiResource::erase::<VirtualMachine>(&()));
    let pools = api(kube::api::ApiResource::erase::<VmPool>(&()));
    let rows = rows();

    // Without the policy, or stored before it was there.
    for (number, row) in rows.iter().enumerate().filter(|(_, row)| !matches!(row.must, Must::Other(_))) {
        let created = create(&vms, row.vm(&format!("row-{number}"))).await;
        match (&row.must, created) {
            (Must::Schema(words), Err(answer)) => assert!(answer.contains(words.as_str()), "{}: {answer:?}", row.what),
            (Must::Schema(_), Ok(())) => panic!("{} is accepted", row.what),
            (_, created) => created.unwrap_or_else(|answer| panic!("{}: {answer:?}", row.what)),
        }
    }
    for (number, row) in rows.iter().enumerate() {
        judge(&ns, &format!("row-{number}"), row).await;
    }

    // With the policy.
    ns.cluster.kubectl(&["apply", "--server-side", "--filename", file(&policy(&ns)).path().to_str().unwrap()]);
    let first = rows.iter().find(|row| matches!(row.must, Must::List(_))).unwrap();
    eventually("the policy to be in force", LIMIT, async || {
        let probe = create(&vms, first.vm("probe")).await;
        let _ = ns.api::<VirtualMachine>().delete("probe", &Default::default()).await;
        probe.err().map(drop)
    })
    .await;
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for (number, row) in rows.iter().enumerate() {
        let words = match &row.must {
            Must::List(list) => Some(format!(" is not allowed here; an administrator can add it to {list}")),
            _ => row.policy.clone(),
        };
        let kind = match &row.must {
            Must::List(_) => "refused by the policy and by the manager",
            Must::Manager(_) if row.policy.is_some() => "refused by the policy and by the manager",
            Must::Manager(_) => "refused by the manager",
            Must::Schema(_) => "refused by the definition",
            Must::Harmless(_) => "harmless",
            Must::Other(_) => "tested elsewhere",
        };
        *counts.entry(kind).or_default() += 1;
        let name = format!("second-{number}");
        match words {
            Some(words) => {
                for (api, object) in [(&vms, row.vm(&name)), (&pools, row.pool(&name))] {
                    let kind = object["kind"].clone();
                    let answer =
                        create(api, object).await.err().unwrap_or_else(|| panic!("{kind}: {} is accepted", row.what));
                    assert!(answer.contains(&words), "{kind}: {}: {}", row.what, answer);
                }
                // What is stored can be changed otherwise, and not to more.
                let stored = format!("row-{number}");
                let label = json!({ "metadata": { "labels": { "a": "b" } }, "spec": { "vm": { "state": "Stopped" } } });
                let patched = vms.patch(&stored, &PatchParams::default(), &Patch::Merge(&label)).await;
                patched.unwrap_or_else(|error| panic!("{}: {error}", row.what));
                let more = json!({ "spec": { "nodeName": "another-node" } });
                let refused = vms.patch(&stored, &PatchParams::default(), &Patch::Merge(&more)).await;
                assert!(refused.unwrap_err().to_string().contains("nodeNames"), "{}", row.what);
            }
            None if matches!(row.must, Must::Harmless(_)) => {
                create(&vms, row.vm(&name)).await.unwrap_or_else(|answer| panic!("{}: {answer:?}", row.what));
            }
            None => {}
        }
    }
    println!("{} rows: {counts:?}", rows.len());
}

/// The list becomes shorter while a guest runs: the guest goes on, and is not started again. When the list has the value again, it is.
#[tokio::test]
async fn a_guest_that_runs_goes_on_when_a_list_becomes_shorter() {
    let with = format!("{NOTHING_ELSE}\"/Manager/Controller/Reconciler\": {{nodeNames: [shorter]}}\n");
    let ns = ManagedNamespace::with_configuration("shorter", &with).await;
    play_node(&ns.client, NODE).await;
    ns.create_vm("apple", |vm| vm["spec"]["nodeName"] = json!(NODE)).await;
    let uid = ns.pod_when("apple", "created", |_| true).await.uid();
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    ns.manager.change_configuration(NOTHING_ELSE);
    let vm = ns.vm_with_reason("apple", "NotAllowed").await;
    let (_, _, message) = condition(&vm, "Ready").unwrap();
    assert!(
        message.contains("\"shorter\"") && message.contains("nodeNames") && message.contains("goes on"),
        "{message}"
    );
    assert_eq!(ns.api::<Pod>().get("apple").await.unwrap().uid(), uid);
    let event = ns.wait_for_event("apple", "NotAllowed").await;
    assert_eq!(event.type_.as_deref(), Some("Warning"));
    // It can be stopped, and then it stays down.
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.pod_when("apple", "being deleted", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    ns.remove_pod("apple").await;
    ns.wait_for_no_pod("apple").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.vm_when("apple", "refused", |vm| {
        vm.status.as_ref().is_some_and(|status| status.observed_generation == vm.metadata.generation)
            && condition(vm, "Ready")
                .is_some_and(|(_, reason, message)| reason == "NotAllowed" && !message.contains("goes on"))
    })
    .await;
    assert_eq!(ns.pods().await, Vec::<String>::new());
    ns.manager.change_configuration(&with);
    ns.pod_when("apple", "created", |_| true).await;
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    std::fs::write(file.path(), text).unwrap();
    file
}
