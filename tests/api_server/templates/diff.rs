//! The exit codes of `kubectl vm diff`, and which template sets the commands know.

use std::{fs, path::Path};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, api::PostParams};
use serde_json::{Value, json};

use super::{POLICY, policy, set};
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, SERVICES, vm_manifest},
};

#[tokio::test]
async fn an_error_of_kubectl_vm_diff_is_never_a_difference() {
    let ns = ManagedNamespace::with_templates("diff-errors", &[]).await;
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator" }, "data": { "config.yaml": SERVICES } });
    ns.namespace.create(&map.to_string()).await;
    let maps: Api<ConfigMap> = ns.api();
    let data = json!({ "network-policy.yaml.j2": POLICY });
    maps.create(&PostParams::default(), &set("templates-guarded", "guarded", data)).await.unwrap();
    for (name, set) in [("apple", "guarded"), ("pear", "nothing")] {
        ns.create_vm(name, |vm| vm["spec"]["templates"] = json!({ "set": set })).await;
    }
    policy(&ns, "apple").await;
    ns.create_vm("quince", |_| {}).await;
    for name in ["apple", "quince"] {
        ns.vm_with_reason(name, "Starting").await;
    }
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| write(folder.path(), name, text);
    let file = |vms: &[Value]| vms.iter().map(Value::to_string).collect::<Vec<_>>().join("\n---\n");
    let of_set = |name: &str, set: &str| {
        let mut vm = vm_manifest(name);
        vm["spec"]["templates"] = json!({ "set": set });
        vm
    };
    let mut changed = vm_manifest("quince");
    changed["spec"]["vm"]["maximumCpus"] = json!(1);
    let both = write("both.yaml", &file(&[changed, of_set("pear", "nothing")]));
    let same = write("same.yaml", &file(&[of_set("apple", "guarded"), vm_manifest("quince")]));
    let mut bad = vm_manifest("quince");
    bad["spec"]["vm"]["state"] = json!("On");
    let bad = write("bad.yaml", &file(&[bad]));
    write("broken/pod.yaml.j2", "{% if %}");
    write(
        "refused/x.yaml.j2",
        "apiVersion: v1\nkind: Service\nmetadata: {name: {{ vm.metadata.name ~ '-x' }}}\nspec: {ports: [{port: 100000}]}\n",
    );
    write("good/x.yaml.j2", "");
    let folder = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (broken, refused, good) = (folder("broken"), folder("refused"), folder("good"));
    for (arguments, expected, words) in [
        // Sets of ConfigMaps are known, also beside a folder.
        (&["-f", &same][..], 0, ""),
        (&["-f", &same, "--templates", &good], 0, ""),
        (&["apple"], 0, ""),
        // A difference of one VM and an error of another, in either order.
        (&["-f", &both], 3, "no template set is named \"nothing\": there are guarded"),
        (&["--all"], 3, "no template set is named \"nothing\""),
        (&["pear"], 3, "no template set is named \"nothing\""),
        (&["-f", &bad], 3, "spec.vm.state: Unsupported value"),
        (&["quince", "--templates", &broken], 3, "pod.yaml.j2:1:7"),
        (&["--all", "--templates", &broken], 3, "syntax error"),
        (&["quince", "--templates", &refused], 3, "the API server refuses it"),
        (&["quince", "--templates", "nothing"], 3, "nothing"),
        (&["--all", "--context", "nothing"], 3, "nothing"),
        (&["nobody"], 3, "nobody"),
        (&["--nonsense"], 2, "nonsense"),
    ] {
        let (code, text) = ns.namespace.kubectl_vm(&[&["diff"], arguments].concat());
        assert!(code == expected && text.contains(words), "{arguments:?}: {code}\n{text}");
    }

    // Commands that need no cluster know the sets if they are told to ask.
    let vm = write("vm.yaml", &of_set("apple", "guarded").to_string());
    let (code, text) = ns.namespace.kubectl_vm(&["render", "-f", &vm]);
    assert!(code == 1 && text.contains("no template set is named \"guarded\""), "{text}");
    let (code, text) = ns.namespace.kubectl_vm(&["render", "-f", &vm, "--installed"]);
    assert!(code == 0 && text.contains("kind: NetworkPolicy"), "{text}");
    let (code, text) = ns.namespace.kubectl_vm(&["lint", &good, "-f", &vm]);
    assert!(code == 1 && text.contains("no template set is named \"guarded\""), "{text}");
    let (code, text) = ns.namespace.kubectl_vm(&["lint", &good, "-f", &vm, "--installed"]);
    assert_eq!(code, 0, "{text}");
}

/// Writes a file in a folder and returns its path.
fn write(folder: &Path, name: &str, text: &str) -> String {
    let file = folder.join(name);
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, text).unwrap();
    file.to_str().unwrap().to_owned()
}

#[tokio::test]
async fn diff_warns_of_a_set_that_drops_what_the_base_changes_and_of_one_in_two_config_maps() {
    let ns = ManagedNamespace::with_templates("diff-sets", &[]).await;
    let maps: Api<ConfigMap> = ns.api();
    let create = async |map: ConfigMap| maps.create(&PostParams::default(), &map).await.unwrap();
    let pod = |layer: &str, block: &str| {
        format!("{{% extends '{layer}/pod.yaml.j2' %}}\n{{% block {block} %}}\n    a: b\n{{% endblock %}}\n")
    };
    let base =
        json!({ "metadata": { "name": "vm-operator-templates" }, "data": { "pod.yaml.j2": pod("base", "labels") } });
    create(serde_json::from_value(base).unwrap()).await;
    create(set("templates-a", "desktop", json!({ "pod.yaml.j2": pod("base", "annotations") }))).await;
    ns.create_vm("apple", |vm| vm["spec"]["templates"] = json!({ "set": "desktop" })).await;
    let diff = |vm: &str| ns.namespace.kubectl_vm(&["diff", vm]).1;
    assert!(!diff("apple").contains("warning"), "{}", diff("apple"));

    create(set("templates-b", "desktop", json!({ "pod.yaml.j2": pod("builtin", "annotations") }))).await;
    let text = diff("apple");
    let warnings: Vec<&str> = text.lines().filter(|line| line.contains("# warning")).collect();
    assert_eq!(
        warnings,
        [
            "# warning: the set desktop is defined twice: in the ConfigMaps templates-a and templates-b; files of the last one replace those of the others",
            "# warning: sets/desktop/pod.yaml.j2:1:12: this file replaces pod.yaml.j2 of the base, whose changes VMs of the set do not get: extend or include \"base/pod.yaml.j2\"",
        ]
    );
    let (_, text) = ns.namespace.kubectl_vm(&["diff", "--all"]);
    assert_eq!(text.matches("# warning").count(), 2, "{text}");
}

#[tokio::test]
async fn diff_names_the_right_that_the_manager_lacks() {
    let ns = ManagedNamespace::with_templates("diff-rights", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), "network-policy.yaml.j2", POLICY);
    let diff = || ns.namespace.kubectl_vm(&["diff", "apple", "--templates", folder.path().to_str().unwrap()]);
    let (code, text) = diff();
    assert!(code == 1 && !text.contains("forbidden"), "no Deployment names the manager's account\n{text}");

    let labels = json!({ "app": "vm-operator" });
    let container = json!({ "name": "manager", "image": "vm-operator" });
    let deployment = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": { "name": "vm-operator" },
        "spec": { "replicas": 0, "selector": { "matchLabels": labels }, "template": {
            "metadata": { "labels": labels }, "spec": { "serviceAccountName": "small", "containers": [container] },
        } },
    });
    ns.namespace.create(&deployment.to_string()).await;
    let name = ns.namespace.name();
    let rule = "{apiGroups: [networking.k8s.io], resources: [networkpolicies], verbs: [list, watch, get, create, patch, delete]}";
    let lacking = format!(
        "forbidden: the manager may not list, watch, get, create, patch, delete networkpolicies.networking.k8s.io in the namespace {name}; \
         give its account system:serviceaccount:{name}:small a Role in that namespace with the rule - {rule}"
    );
    let (code, text) = diff();
    assert!(code == 1 && text.contains(&lacking), "{text}");

    let role =
        format!("apiVersion: rbac.authorization.k8s.io/v1\nkind: Role\nmetadata: {{name: small}}\nrules:\n- {rule}\n");
    ns.namespace.create(&role).await;
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": "small" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "small" },
        "subjects": [{ "kind": "ServiceAccount", "name": "small" }],
    });
    ns.namespace.create(&binding.to_string()).await;
    eventually("the right to be known", LIMIT, async || {
        let (code, text) = diff();
        (code == 1 && !text.contains("forbidden")).then_some(())
    })
    .await;
}
