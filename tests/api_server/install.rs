//! How the manager is installed: the manifest that `make manifest` prints and a release has as `install.yaml`, and what `deploy/` has
//! beside it.

use std::{collections::BTreeMap, process::Command};

use serde_json::{Value, json};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::PostParams};
use vm_operator::api::VirtualMachine;

use crate::support::{
    cluster::{Cluster, XTASK, eventually},
    managed_namespace::{LIMIT, condition, vm_manifest},
    manager::{Manager, Setup, install_crds},
};

#[tokio::test]
async fn one_manifest_installs_the_definitions_and_the_manager_with_the_images_of_a_registry() {
    let cluster = Cluster::control_plane();
    let namespace = cluster.namespace("install").await;
    let args = ["manifest", "--registry=registry.example.org/vms", "--namespace", namespace.name()];
    let output = Command::new(XTASK).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("install.yaml");
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("^registry[.]example[.]org/vms/vm-runner("), "the policy allows the release's image");
    // Two policies hold for all namespaces, and so for those of other tests.
    let (here, bindings) =
        (namespace.name(), ["vms.vmoperator.jdrupes.org", "vm-runner-legacy.vmoperator.jdrupes.org"]);
    let only_here = |document: &str| {
        let is_binding = document.contains("kind: ValidatingAdmissionPolicyBinding");
        let selector = format!(
            "\n  matchResources: {{namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {here}}}}}}}"
        );
        let is_for_all = is_binding && bindings.iter().any(|name| document.contains(&format!("policyName: {name}")));
        if is_for_all { document.trim_end().to_owned() + &selector } else { document.to_owned() }
    };
    let documents: Vec<String> = text.split("\n---\n").map(only_here).collect();
    assert_eq!(documents.iter().filter(|document| document.contains("matchResources: {")).count(), 2);
    std::fs::write(&file, documents.join("\n---\n")).unwrap();

    // Others install the definitions, too.
    cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", file.to_str().unwrap()]);

    cluster.kubectl(&[
        "get",
        "customresourcedefinition",
        "vms.vmoperator.jdrupes.org",
        "vmpools.vmoperator.jdrupes.org",
        "vmreports.vmoperator.jdrupes.org",
    ]);
    let image = "--output=jsonpath={.spec.template.spec.containers[*].image}";
    let image = namespace.kubectl(&["get", "deployment", "vm-operator", image]);
    assert_eq!(image, concat!("registry.example.org/vms/vm-operator:", env!("CARGO_PKG_VERSION")));
    for (account, resource) in [("vm-operator", "vms"), ("vm-runner", "vmreports")] {
        let account = format!("--as=system:serviceaccount:{}:{account}", namespace.name());
        namespace.kubectl(&["auth", "can-i", "patch", resource, "--subresource=status", &account]);
    }
}

/// The objects of a kustomization with these keys, in which `DEPLOY` is the path of `deploy`.
fn kustomize(text: &str) -> Vec<Value> {
    // Kustomize takes only relative paths.
    let folder = tempfile::tempdir().unwrap();
    let up = "/..".repeat(folder.path().canonicalize().unwrap().components().count() - 1);
    let deploy = format!(".{up}{}/deploy", env!("CARGO_MANIFEST_DIR"));
    std::fs::write(folder.path().join("kustomization.yaml"), text.replace("DEPLOY", &deploy)).unwrap();
    let manifests = Cluster::control_plane().kubectl(&["kustomize", &folder.path().to_string_lossy()]);
    let mut objects: Vec<Value> = manifests.split("\n---\n").map(|text| serde_yaml::from_str(text).unwrap()).collect();
    for object in &mut objects {
        // Kustomize does not know that these are cluster-wide; the API server ignores the namespace.
        if object["kind"].as_str().unwrap().starts_with("ValidatingAdmissionPolicy") {
            object["metadata"].as_object_mut().unwrap().remove("namespace");
        }
    }
    objects
}

/// What the chart renders for a case of `tests/chart`.
fn rendered(case: &str) -> Vec<Value> {
    let file = format!("{}/tests/chart/cases/{case}/expected.yaml", env!("CARGO_MANIFEST_DIR"));
    // Kustomize sets no namespace in names.
    let text = std::fs::read_to_string(file).unwrap().replace("node-reader-operator", "node-reader");
    text.split("---\n").skip(1).map(|text| serde_yaml::from_str(text).unwrap()).collect()
}

/// The chart's policy of VMs as the kustomization has it: the chart names it by its release, and restricts it to the release's namespaces.
fn of_every_namespace(mut objects: Vec<Value>) -> Vec<Value> {
    for object in &mut objects {
        let name = json!("vms.vmoperator.jdrupes.org");
        if object["metadata"]["name"] == "vms-operator.vmoperator.jdrupes.org" {
            object["metadata"]["name"] = name.clone();
            if object["kind"] == "ValidatingAdmissionPolicyBinding" {
                object["spec"]["policyName"] = name;
                object["spec"].as_object_mut().unwrap().remove("matchResources");
            }
        }
    }
    objects
}

/// Without the breaks of lines in texts: kustomize adds some to the expressions of policies.
fn in_one_line(value: &mut Value) {
    match value {
        Value::String(text) => *text = text.split_whitespace().collect::<Vec<_>>().join(" "),
        Value::Array(list) => list.iter_mut().for_each(in_one_line),
        Value::Object(map) => map.values_mut().for_each(in_one_line),
        _ => {}
    }
}

/// Objects by kind, namespace and name.
fn by_name(mut objects: Vec<Value>) -> BTreeMap<String, Value> {
    objects.iter_mut().for_each(in_one_line);
    let name = |it: &Value| format!("{} {} {}", it["kind"], it["metadata"]["namespace"], it["metadata"]["name"]);
    objects.into_iter().map(|object| (name(&object), object)).collect()
}

/// The policy of VMs without its lists, which are those of the case's configuration.
fn without_lists(mut object: Value) -> Value {
    for variable in object["spec"].get_mut("variables").and_then(Value::as_array_mut).into_iter().flatten() {
        if variable["name"].as_str().is_some_and(|name| name.starts_with("allowed")) {
            variable["expression"] = Value::Null;
        }
    }
    object
}

#[test]
fn the_chart_and_the_kustomization_have_the_same_objects() {
    let components = "components: [DEPLOY/node-reader]\n";
    let base = by_name(kustomize(&format!("namespace: operator\nresources: [DEPLOY, DEPLOY/users]\n{components}")));
    let chart = by_name(of_every_namespace(rendered("default")));
    assert!(chart.len() > 14 && chart.keys().eq(base.keys()), "{:?}\n{:?}", chart.keys(), base.keys());
    for (name, object) in chart {
        assert_eq!(object, base[&name], "{name}");
    }
    let mut chart = by_name(of_every_namespace(rendered("optional")));
    let monitoring =
        "namespace: operator\nresources: [DEPLOY, DEPLOY/users]\ncomponents: [DEPLOY/monitoring, DEPLOY/node-reader]\n";
    for (name, object) in
        by_name(kustomize(monitoring)).into_iter().chain(by_name(kustomize("resources: [DEPLOY/node-devices]")))
    {
        assert_eq!(chart.remove(&name).map(without_lists), Some(without_lists(object)), "{name}");
    }
    assert_eq!(chart.into_keys().collect::<Vec<_>>(), [r#""ConfigMap" "operator" "vm-operator""#]);
}

/// The components of `deploy/kustomize` make what the chart makes of the same wish.
#[test]
fn the_components_of_kustomize_make_the_objects_of_the_chart() {
    let name = |kind: &str, namespace: &Value, name: &str| format!("{} {namespace} {}", json!(kind), json!(name));
    let (none, operator, red) = (Value::Null, json!("operator"), json!("red"));
    let components = "[DEPLOY/kustomize/cluster-wide, DEPLOY/kustomize/high-availability]";
    let overlay = by_name(kustomize(&format!("namespace: operator\nresources: [DEPLOY]\ncomponents: {components}\n")));
    let chart = by_name(rendered("cluster"));
    for (kind, namespace) in [("ClusterRole", &none), ("ClusterRoleBinding", &none), ("PodDisruptionBudget", &operator)]
    {
        let name = name(kind, namespace, "vm-operator");
        assert_eq!(overlay[&name], chart[&name], "{name}");
    }
    let lease =
        |objects: &BTreeMap<String, Value>, role: &str| objects[&name("Role", &operator, role)]["rules"].clone();
    assert_eq!(lease(&overlay, "vm-operator-lease"), lease(&chart, "vm-operator"));
    assert!(!overlay.contains_key(&name("Role", &operator, "vm-operator")));
    let deployment = name("Deployment", &operator, "vm-operator");
    for path in
        ["/spec/replicas", "/spec/template/spec/topologySpreadConstraints", "/spec/template/spec/containers/0/args"]
    {
        let found = overlay[&deployment].pointer(path);
        assert_eq!((found, found.is_some()), (chart[&deployment].pointer(path), true), "{path}");
    }

    // A further namespace of VMs. The case has labels and a rule of its own, and its manager is in another namespace.
    let overlay = "namespace: red\nresources: [DEPLOY]\ncomponents: [DEPLOY/kustomize/vm-namespace]\n";
    let overlay = by_name(kustomize(overlay));
    let chart = by_name(rendered("namespaces"));
    let of_red = |name: &&String| name.contains(r#" "red" "#);
    assert!(overlay.keys().eq(chart.keys().filter(of_red)), "{:?}", overlay.keys());
    let rules = |objects: &BTreeMap<String, Value>| {
        objects[&name("Role", &red, "vm-operator")]["rules"].as_array().cloned().unwrap_or_default()
    };
    let (rules, with_own) = (rules(&overlay), rules(&chart));
    assert_eq!(rules[..], with_own[..with_own.len() - 1]);
    let subject = &overlay[&name("RoleBinding", &red, "vm-operator")]["subjects"][0];
    assert_eq!(*subject, json!({ "kind": "ServiceAccount", "name": "vm-operator", "namespace": "vm-operator" }));
}

/// The chart's namespaces become one of the test's, and no two cases are in the same.
#[tokio::test]
async fn the_api_server_takes_what_the_chart_renders() {
    let cluster = Cluster::control_plane();
    for (case, least) in [("cluster", 14), ("namespaces", 20), ("optional", 22), ("content", 18)] {
        let namespace = cluster.namespace(&format!("chart-{case}")).await;
        let mut objects = rendered(case);
        // The test's API server has no such kinds.
        objects.retain(|object| !object["apiVersion"].as_str().unwrap().starts_with("monitoring.coreos.com/"));
        for object in &mut objects {
            if let Some(name) = object["metadata"].get_mut("namespace") {
                *name = namespace.name().into();
            }
        }
        assert!(objects.len() >= least, "{case}: {}", objects.len());
        let list = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
        std::fs::write(file.path(), list.to_string()).unwrap();
        let file = file.path().to_string_lossy();
        namespace.kubectl(&["apply", "--server-side", "--force-conflicts", "--dry-run=server", "--filename", &file]);
    }
}

#[test]
fn the_manager_can_have_a_priority_class() {
    let objects = kustomize("namespace: vms\nresources: [DEPLOY]\ncomponents: [DEPLOY/priority]\n");
    let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    let class = of("PriorityClass");
    assert_eq!(class["metadata"].get("namespace"), None);
    assert_eq!(of("Deployment")["spec"]["template"]["spec"]["priorityClassName"], class["metadata"]["name"]);
    let class = class.to_string();
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), class).unwrap();
    Cluster::control_plane().kubectl(&["apply", "--dry-run=server", "--filename", &file.path().to_string_lossy()]);
}

/// The VMs of the trees for Flux and Argo CD, as kustomize makes them: the API server takes them, and what they name exists under the name
/// that kustomize gave it.
#[tokio::test]
async fn the_vms_of_the_trees_for_gitops_are_taken() {
    let cluster = Cluster::control_plane();
    let namespace = cluster.namespace("trees").await;
    for tool in ["flux", "argocd"] {
        let vms =
            format!("resources: [DEPLOY/../example/gitops/{tool}/vms, DEPLOY/../example/gitops/{tool}/templates]\n");
        let mut objects = kustomize(&vms);
        let generated =
            objects.iter().find(|object| object["data"].get("user-data").is_some() && object["kind"] == "ConfigMap");
        let name = generated.unwrap()["metadata"]["name"].clone();
        assert_ne!(name, "web-user-data", "kustomize adds a suffix");
        let web = objects.iter().find(|object| object["metadata"]["name"] == "web").unwrap();
        assert_eq!(web["spec"]["cloudInit"]["userDataFrom"]["configMapKeyRef"]["name"], name, "{tool}");
        objects.retain(|object| object["kind"] != "ExternalSecret");
        for object in &mut objects {
            object["metadata"]["namespace"] = namespace.name().into();
        }
        assert_eq!(objects.iter().filter(|object| object["kind"] == "VirtualMachine").count(), 2, "{tool}");
        let list = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects });
        let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
        std::fs::write(file.path(), list.to_string()).unwrap();
        namespace.kubectl(&[
            "apply",
            "--server-side",
            "--dry-run=server",
            "--filename",
            &file.path().to_string_lossy(),
        ]);
    }
}

/// With `rbac.scope: namespaces` the manager has no right on VMs, Pods or Secrets in its own namespace, where its Lease and the template sets
/// are. It needs none.
#[tokio::test]
async fn the_roles_of_the_chart_are_enough_for_a_manager_of_other_namespaces() {
    let cluster = Cluster::control_plane();
    install_crds(cluster).await;
    let (operator, red, blue) =
        (cluster.namespace("operator").await, cluster.namespace("red").await, cluster.namespace("blue").await);
    let of_chart = |name: &mut Value| {
        *name = match name.as_str().unwrap() {
            "operator" => operator.name(),
            "red" => red.name(),
            "blue" => blue.name(),
            other => panic!("{other}"),
        }
        .into();
    };
    let mut objects = rendered("namespaces");
    objects.retain(|object| ["ServiceAccount", "Role", "RoleBinding"].contains(&object["kind"].as_str().unwrap()));
    for object in &mut objects {
        of_chart(&mut object["metadata"]["namespace"]);
        for subject in object.get_mut("subjects").and_then(Value::as_array_mut).into_iter().flatten() {
            of_chart(&mut subject["namespace"]);
        }
    }
    let list = serde_json::json!({ "apiVersion": "v1", "kind": "List", "items": objects });
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), list.to_string()).unwrap();
    cluster.kubectl(&["create", "--filename", &file.path().to_string_lossy()]);
    let set = serde_json::json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": { "name": "a-set", "labels": { "vmoperator.jdrupes.org/template-set": "more" } },
        "data": { "more.yaml.j2": "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-more' }}}\n" },
    });
    operator.create(&set.to_string()).await;

    let kubeconfig = operator.managers_account_kubeconfig();
    let setup = Setup { arguments: &["--identity=the-only-one"], ..Setup::default() };
    let manager = Manager::with(kubeconfig.path(), Some(&format!("{},{}", red.name(), blue.name())), &setup);
    for (namespace, name) in [(&red, "apple"), (&blue, "pear")] {
        let mut vm = vm_manifest(name);
        vm["spec"]["templates"] = serde_json::json!({ "set": "more" });
        let vms: Api<VirtualMachine> = Api::namespaced(cluster.client().await, namespace.name());
        vms.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
        eventually(&format!("{name} to start"), LIMIT, async || {
            let ready = condition(&vms.get(name).await.unwrap(), "Ready")?;
            (ready.1 == "Starting").then_some(())
        })
        .await;
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client().await, namespace.name());
        assert!(maps.get_opt(&format!("{name}-more")).await.unwrap().is_some(), "the set's object of {name}");
    }
    // Which set is in force is kept for the next manager.
    let maps: Api<ConfigMap> = Api::namespaced(cluster.client().await, operator.name());
    eventually("the set in force", LIMIT, async || {
        (maps.list(&Default::default()).await.unwrap().items.len() > 2).then_some(())
    })
    .await;
    let log = manager.log();
    let refused: Vec<&str> = log.lines().filter(|line| line.contains("orbidden") || line.contains("may not")).collect();
    assert_eq!(refused, [""; 0]);
}
