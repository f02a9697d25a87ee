//! Templates that change while the manager runs: good ones are used at once, broken ones change nothing.

mod diff;
mod harm;
mod in_force;
mod limits;

use std::{fs, path::Path, process::Command};

use crate::documentation::{kubectl_vm, recipes};
use crate::support::{
    broken_sets::{BrokenSet, broken_sets},
    cluster::{OwnCluster, eventually},
    managed_namespace::{LIMIT, ManagedNamespace, SERVICES, condition, vm_manifest},
    manager::Manager,
};
use k8s_openapi::api::{
    apps::v1::StatefulSet,
    batch::v1::Job,
    core::v1::{ConfigMap, Event, Pod, Service},
    networking::v1::NetworkPolicy,
};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use vm_operator::{
    api::{
        VirtualMachine,
        conditions::{OBJECTS_READY, TEMPLATES_VALID},
    },
    object::SET_LABEL,
    ownership,
};

const POLICY: &str = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: {{ vm.metadata.name }}}\nspec:\n  \
                      podSelector: {matchLabels: {{ labels }}}\n  policyTypes: [Ingress]\n";

async fn policy(ns: &ManagedNamespace, name: &str) -> NetworkPolicy {
    let api: Api<NetworkPolicy> = ns.api();
    eventually(&format!("the policy of {name}"), LIMIT, async || api.get_opt(name).await.unwrap()).await
}

async fn pod(ns: &ManagedNamespace, name: &str) -> Pod {
    ns.pod_when(name, "there", |_| true).await
}

/// The version of the templates that a machine was rendered with.
fn version(vm: &VirtualMachine) -> Option<String> {
    vm.status.as_ref()?.templates.as_ref()?.version.clone()
}

/// Waits until the manager has refused templates with these words, and returns its line.
async fn refused(ns: &ManagedNamespace, words: &str) -> String {
    eventually(&format!("the log to say {words:?}"), LIMIT, async || {
        let log = ns.manager.log();
        log.lines()
            .rev()
            .find(|line| line.contains("new templates are not used") && line.contains(words))
            .map(str::to_owned)
    })
    .await
}

async fn events(ns: &ManagedNamespace, reason: &str) -> Vec<(String, String)> {
    let api: Api<Event> = ns.api();
    let events = api.list(&ListParams::default()).await.unwrap();
    let about = |event: Event| {
        let object = event.involved_object;
        (format!("{} {}", object.kind.unwrap(), object.name.unwrap()), event.message.unwrap_or_default())
    };
    events.items.into_iter().filter(|event| event.reason.as_deref() == Some(reason)).map(about).collect()
}

#[tokio::test]
async fn changed_templates_are_used_at_once_and_no_pod_is_changed() {
    let ns = ManagedNamespace::with_templates("hot", &[]).await;
    for name in ["apple", "pear"] {
        ns.create_vm(name, |_| {}).await;
        ns.vm_with_reason(name, "Starting").await;
    }
    let before = pod(&ns, "apple").await;
    let first = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await).unwrap();

    ns.manager.change_templates(&[("network-policy.yaml.j2", POLICY)]);
    for name in ["apple", "pear"] {
        policy(&ns, name).await;
    }
    let second = ns.vm_when("apple", "of another version", |vm| version(vm) != Some(first.clone())).await;
    assert_eq!(pod(&ns, "apple").await.metadata, before.metadata);
    let told = eventually("an event", LIMIT, async || events(&ns, "TemplatesChanged").await.into_iter().next()).await;
    assert!(told.1.contains(&version(&second).unwrap()) && told.1.contains(&first), "{told:?}");

    // Taken away again, what was rendered goes.
    ns.manager.change_templates(&[]);
    let policies: Api<NetworkPolicy> = ns.api();
    eventually("no policy", LIMIT, async || policies.get_opt("apple").await.unwrap().is_none().then_some(())).await;
    ns.vm_when("apple", "of the first version", |vm| version(vm) == Some(first.clone())).await;
    assert_eq!(pod(&ns, "apple").await.metadata, before.metadata);
}

#[tokio::test]
async fn objects_of_removed_templates_are_deleted_even_if_no_manager_ran_meanwhile() {
    let mut ns = ManagedNamespace::with_templates("leftover", &[("network-policy.yaml.j2", POLICY)]).await;
    for name in ["apple", "pear"] {
        ns.create_vm(name, |_| {}).await;
        policy(&ns, name).await;
    }
    let kinds =
        |vm: &VirtualMachine| vm.status.iter().flat_map(|status| status.object_kinds.clone()).collect::<Vec<_>>();
    for name in ["apple", "pear"] {
        ns.vm_when(name, "told of its policy", |vm| kinds(vm).len() == 1).await;
    }
    let none = tempfile::tempdir().unwrap();
    let (code, text) = ns.namespace.kubectl_vm(&["diff", "apple", "--templates", none.path().to_str().unwrap()]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("NetworkPolicy apple: deleted: no template renders it any more"), "{text}");

    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    // Neither is in the way: a kind that the cluster does not have, and one that would be another word for all Pods.
    let machines: Api<VirtualMachine> = ns.api();
    let gone = json!({ "apiVersion": "cilium.io/v2", "kind": "Gone" });
    let policy = json!({ "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy" });
    let pods = json!({ "apiVersion": "v1", "kind": "pod" });
    let patch = Patch::Apply(json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "status": { "objectKinds": [gone, pods, policy] },
    }));
    machines.patch_status("pear", &PatchParams::apply(ownership::STATUS_MANAGER), &patch).await.unwrap();
    ns.patch_vm("pear", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;

    let policies: Api<NetworkPolicy> = ns.api();
    let before = pod(&ns, "pear").await;
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &[]);
    for name in ["apple", "pear"] {
        eventually("no policy", LIMIT, async || policies.get_opt(name).await.unwrap().is_none().then_some(())).await;
        ns.vm_when(name, "told that there is none", |vm| kinds(vm).iter().all(|it| it.kind == "Gone")).await;
    }
    ns.vm_with_reason("pear", "Starting").await;
    // By the next look it is known that there is no such kind.
    eventually("the kind to be asked for", LIMIT, async || ns.manager.log().contains("kind=\"Gone\"").then_some(()))
        .await;
    ns.patch_vm("pear", json!({ "spec": { "vm": { "currentCpus": 2 } } })).await;
    ns.vm_when("pear", "told that it has nothing else", |vm| kinds(vm).is_empty()).await;
    assert_eq!(pod(&ns, "pear").await.uid(), before.uid());
}

/// A set that compiles, but not for the VM `apple`.
const NOT_FOR_APPLE: &str = r#"{% extends "builtin/config-map.yaml.j2" %}
{% block labels %}
    tier: {% if vm.metadata.name == "apple" %}{{ nothing.of.this }}{% else %}"2"{% endif %}

{% endblock %}
"#;

#[tokio::test]
async fn a_refused_set_is_not_in_force_after_a_restart_and_is_looked_at_again_when_its_cause_is_gone() {
    let mut ns = ManagedNamespace::with_templates(
        "in-force",
        &[("config-map.yaml.j2", &NOT_FOR_APPLE.replace("nothing.of.this", "vm.metadata.name"))],
    )
    .await;
    for name in ["apple", "pear"] {
        ns.create_vm(name, |_| {}).await;
        ns.vm_with_reason(name, "Starting").await;
    }
    let first = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await);
    let bad = [("config-map.yaml.j2", NOT_FOR_APPLE)];
    ns.manager.change_templates(&bad);
    let refused = |vm: &VirtualMachine| condition(vm, "TemplatesValid").is_some_and(|it| it.1 == "NewerRefused");
    ns.vm_when("pear", "told of the refusal", refused).await;

    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    ns.patch_vm("pear", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &bad);
    let pear = ns.vm_with_reason("pear", "Starting").await;
    assert_eq!(version(&pear), first);
    eventually("the set to be refused again", LIMIT, async || {
        ns.manager.log().contains("the last good ones stay in force").then_some(())
    })
    .await;
    let apple = ns.vm_when("apple", "told of the refusal", refused).await;
    assert_eq!(version(&apple), first);

    // The VM with which it failed is gone.
    ns.api::<VirtualMachine>().delete("apple", &Default::default()).await.unwrap();
    ns.vm_when("pear", "of the new version", |vm| version(vm) != first && !refused(vm)).await;
}

#[tokio::test]
async fn a_first_set_that_was_refused_is_not_in_force_after_a_restart() {
    let mut ns = ManagedNamespace::with_templates("first-set", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    let builtin = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await);
    let bad = [(
        "pod.yaml.j2",
        "{% extends \"builtin/pod.yaml.j2\" %}\n{% block scheduling %}\n  toleration: []\n{% endblock %}\n",
    )];
    ns.manager.change_templates(&bad);
    let refused = |vm: &VirtualMachine| condition(vm, "TemplatesValid").is_some_and(|it| it.1 == "NewerRefused");
    ns.vm_when("apple", "told of the refusal", refused).await;

    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &bad);
    eventually("the set to be refused again", LIMIT, async || {
        ns.manager.log().contains("the last good ones stay in force").then_some(())
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    let changed = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
    let apple = ns.vm_when("apple", "looked at", changed).await;
    assert_eq!((version(&apple), refused(&apple)), (builtin, true));
}

#[tokio::test]
async fn what_only_a_set_of_some_vms_has_is_changed_in_the_trial_after_a_restart_too() {
    let mut ns = ManagedNamespace::with_templates("trial-of-changes", &[]).await;
    // The API server does not let the template of a Job change.
    let job = |image: &str| {
        let pod = json!({ "spec": { "restartPolicy": "Never", "containers": [{ "name": "c", "image": image }] } });
        let spec = json!({ "suspend": true, "template": pod });
        let job = json!({ "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "NAME" }, "spec": spec });
        json!({ "job.yaml.j2": job.to_string().replace("\"NAME\"", "{{ vm.metadata.name }}") })
    };
    let maps: Api<ConfigMap> = ns.api();
    maps.create(&PostParams::default(), &set("templates-jobs", "jobs", job("one"))).await.unwrap();
    ns.create_vm("apple", |vm| vm["spec"]["templates"] = json!({ "set": "jobs" })).await;
    ns.vm_with_reason("apple", "Starting").await;
    let jobs: Api<Job> = ns.api();
    eventually("the job", LIMIT, async || jobs.get_opt("apple").await.unwrap()).await;
    let first = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await);

    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    let patch = Patch::Merge(json!({ "data": job("two") }));
    maps.patch("templates-jobs", &PatchParams::default(), &patch).await.unwrap();
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &[]);
    refused(&ns, "field is immutable").await;
    let refused = |vm: &VirtualMachine| condition(vm, "TemplatesValid").is_some_and(|it| it.1 == "NewerRefused");
    let apple = ns.vm_when("apple", "told of the refusal", refused).await;
    assert_eq!(version(&apple), first);
}

#[tokio::test]
async fn the_stateful_set_that_made_the_pod_is_deleted_before_a_new_pod_is_made() {
    let template = fs::read_to_string("example/templates/stateful-set/pod.yaml.j2").unwrap();
    let mut ns = ManagedNamespace::with_templates("maker", &[("pod.yaml.j2", &template)]).await;
    ns.create_vm("apple", |_| {}).await;
    ns.pod_when("apple-0", "there", |_| true).await;
    let sets: Api<StatefulSet> = ns.api();
    ns.manager.signal(Signal::TERM);
    ns.manager.wait_for_end().await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    // As if its Pod had just been lost.
    let none = Patch::Merge(json!({ "spec": { "replicas": 0 } }));
    sets.patch("apple", &PatchParams::default(), &none).await.unwrap();
    ns.wait_for_no_pod("apple-0").await;
    ns.manager = Manager::start(ns.cluster, &ns.namespace, &[]);
    pod(&ns, "apple").await;
    assert!(sets.get_opt("apple").await.unwrap().is_none());
    let log = ns.manager.log();
    let at = |what: &str| log.find(what).unwrap_or_else(|| panic!("{what} is not in\n{log}"));
    assert!(at("deleted object=StatefulSet apple") < at("applied object=Pod apple"), "{log}");
}

#[tokio::test]
async fn a_changed_block_of_the_pod_changes_its_labels_at_once_and_waits_with_the_rest() {
    let ns = ManagedNamespace::with_templates("block", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    let uid = ns.pod_when("apple", "there", |_| true).await.uid();
    let template = "{% extends \"builtin/pod.yaml.j2\" %}\n{% block labels %}\n    live: \"1\"\n{% endblock %}\n\
                    {% block scheduling %}\n{{ super() }}\n  priority: 0\n{% endblock %}\n";
    ns.manager.change_templates(&[("pod.yaml.j2", template)]);
    let pod = ns.pod_when("apple", "labelled", |pod| pod.labels().contains_key("live")).await;
    assert_eq!(pod.uid(), uid);
}

#[tokio::test]
async fn broken_templates_are_never_used() {
    let ns = ManagedNamespace::with_templates("broken", &[]).await;
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    let pod = pod(&ns, "apple").await;
    let good = version(&ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await);
    let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    for broken_set in broken_sets() {
        let said = broken_set.error(&vm);
        let BrokenSet { what, files, manager_error } = broken_set;
        let mut files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
        let words = manager_error.or(said.as_deref()).unwrap();
        // Whatever is good beside it is not used either.
        files.push(("network-policy.yaml.j2", POLICY));
        ns.manager.change_templates(&files);
        let line = refused(&ns, words).await;
        let vm = ns
            .vm_when("apple", &format!("told of {what}"), |vm| {
                condition(vm, TEMPLATES_VALID).is_some_and(|(_, _, message)| message.contains(words))
            })
            .await;
        let (status, reason, message) = condition(&vm, TEMPLATES_VALID).unwrap();
        assert_eq!((status.as_str(), reason.as_str()), ("True", "NewerRefused"), "{what}: {message}\n{line}");
        assert_eq!(version(&vm), good, "{what}");
        assert_eq!(ns.manager.metric("vm_operator_templates_last_load_successful"), Some(0.0), "{what}");
    }
    let policies: Api<NetworkPolicy> = ns.api();
    assert!(policies.list(&ListParams::default()).await.unwrap().items.is_empty());
    let told = eventually("an event", LIMIT, async || events(&ns, "TemplatesRefused").await.into_iter().next()).await;
    assert_eq!(told.0, "VirtualMachine apple");

    // A machine that changes meanwhile is served with the last good set.
    ns.patch_vm("apple", json!({ "spec": { "loadBalancerService": { "labels": { "a": "b" } } } })).await;
    let services: Api<Service> = ns.api();
    eventually("a Service", LIMIT, async || services.get_opt("apple").await.unwrap()).await;
    // And as soon as it is mended all is well.
    ns.manager.change_templates(&[("network-policy.yaml.j2", POLICY)]);
    policy(&ns, "apple").await;
    ns.vm_when("apple", "content", |vm| condition(vm, TEMPLATES_VALID).unwrap().1 == "Rendered").await;
    assert_eq!(pod.uid(), self::pod(&ns, "apple").await.uid());
    assert_eq!(ns.manager.metric("vm_operator_templates_last_load_successful"), Some(1.0));
}

/// What `kubectl vm` prints, with its exit code; the folder's own path is taken out.
fn said(folder: &Path, arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(arguments).current_dir(folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap();
    format!("{}{}", text, output.status.code().unwrap())
}

#[test]
fn commands_on_template_folders_print_what_is_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    };
    let vm = vm_manifest("apple");
    write("vm.yaml", &vm.to_string());
    let said = |arguments: &[&str]| said(folder.path(), arguments);

    // What lint refuses is not packed.
    write(
        "helm/pod.yaml.j2",
        "{% extends 'builtin/pod.yaml.j2' %}\n{% block labels %}\n    a: {{ .Values.a }}\n{% endblock %}\n",
    );
    let refused = said(&["templates", "pack", "helm"]);
    assert!(refused.contains("write {{ values.a }}") && refused.contains("nothing is packed: "), "{refused}");
    assert!(refused.ends_with('1') && !refused.contains("kind: ConfigMap"), "{refused}");
    let forced = said(&["templates", "pack", "helm", "--force"]);
    assert!(forced.ends_with('0') && forced.contains("kind: ConfigMap"), "{forced}");

    // Values: what takes a key out does so also on the command line.
    write("v/values.yaml", "size: 1\n");
    write(
        "v/a.yaml.j2",
        "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\ndata: {size: {{ values.size | default('none') }}}\n",
    );
    write("null.yaml", "size: null\n");
    assert!(said(&["render", "-f", "vm.yaml", "--templates", "v", "--values", "null.yaml"]).contains("size: none"));

    // A named set, by itself over a base, with its own cases.
    write("b/pod.yaml.j2", "{% extends 'builtin/pod.yaml.j2' %}\n{% block labels %}\n    a: b\n{% endblock %}\n");
    write(
        "b/sets/desktop/pod.yaml.j2",
        "{% extends 'base/pod.yaml.j2' %}\n{% block scheduling %}\n  nodeName: x\n{% endblock %}\n",
    );
    let mut chooses = vm.clone();
    chooses["spec"]["templates"] = json!({ "set": "desktop" });
    write("b/sets/desktop/tests/one/vm.yaml", &chooses.to_string());
    assert_eq!(said(&["lint", "b/sets/desktop", "--base", "b"]), "1 file, 2 VMs: 0 errors, 0 warnings\n0");
    assert_eq!(said(&["lint", "b/sets/desktop"]), "1 file, 2 VMs: 0 errors, 0 warnings\n0");
    assert_eq!(said(&["templates", "test", "b", "--update"]), "updated desktop/one\n1 case, 0 failed\n0");
    assert_eq!(said(&["templates", "test", "b"]), "ok      desktop/one\n1 case, 0 failed\n0");
    fs::create_dir_all(folder.path().join("b/tests/empty")).unwrap();
    assert_eq!(said(&["templates", "test", "b"]), "b/tests/empty: this case has no vm.yaml\n1");

    // A set that drops what the base changes.
    write(
        "b/sets/desktop/pod.yaml.j2",
        "{% extends 'builtin/pod.yaml.j2' %}\n{% block scheduling %}\n  nodeName: x\n{% endblock %}\n",
    );
    for arguments in [&["lint", "b/sets/desktop", "--base", "b"] as &[&str], &["lint", "b"]] {
        let hidden = said(arguments);
        assert!(hidden.contains("warning[hides-base]: this file replaces pod.yaml.j2 of the base"), "{hidden}");
        assert!(hidden.contains(" --> b/sets/desktop/pod.yaml.j2:1:12\n"), "{hidden}");
    }

    // A wrong value of a VM is reported in the VM's file.
    write("v/values.schema.json", r#"{"properties": {"size": {"type": "integer"}}}"#);
    write(
        "vms/pear.yaml",
        "kind: ConfigMap\n---\napiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\nmetadata: {name: pear}\nspec:\n  \
         vm: {maximumCpus: 1}\n  templateValues: {size: huge}\n  templates:\n    set: none\n",
    );
    let no_set = "vms/pear.yaml:10:10: no template set is named \"none\": there are none; with --installed the sets of the cluster are known (spec.templates.set)\n1";
    assert_eq!(said(&["render", "-f", "vms/pear.yaml", "--templates", "v"]), no_set);
    let linted = said(&["lint", "v", "-f", "vms"]);
    assert!(
        linted.contains("set is named \"none\": there are none (spec.templates.set)\n  --> vms/pear.yaml:10:10"),
        "{linted}"
    );
    write(
        "vms/pear.yaml",
        "apiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\nmetadata: {name: pear}\nspec:\n  vm: {maximumCpus: 1}\n  \
         templateValues: {size: huge}\n",
    );
    let wrong = "values.size: \"huge\" is not of type \"integer\" (v/values.schema.json)";
    assert_eq!(said(&["render", "-f", "vms/pear.yaml", "--templates", "v"]), format!("vms/pear.yaml:6:26: {wrong}\n1"));
    let linted = said(&["lint", "v", "-f", "vms"]);
    assert!(
        linted.contains("values.size: \"huge\" is not of type \"integer\"")
            && linted.contains(" --> vms/pear.yaml:6:26\n"),
        "{linted}"
    );

    // What can't be packed.
    for (arguments, expected) in [
        (
            &["b", "--set", "desktop"] as &[&str],
            "b: a named set can't have sets in it: pack the folder of each, or the whole without --set\n1",
        ),
        (
            &["b/sets/desktop", "--set", "Foo Bar"],
            "\"Foo Bar\" can't be used as a name: a name has up to 63 small letters, digits and -\n1",
        ),
        (&["b/tests"], "b/tests: there is no template here\n1"),
    ] {
        assert_eq!(said(&[&["templates", "pack"], arguments].concat()), expected);
    }
    let packed = said(&["templates", "pack", "b"]);
    assert!(packed.contains("  sets__desktop__pod.yaml.j2: |"), "{packed}");
    write("b/sets__desktop__pod.yaml.j2", "");
    let twice = said(&["templates", "pack", "b"]);
    assert!(
        twice.contains("two files are sets/desktop/pod.yaml.j2, because __ in a name stands for a folder"),
        "{twice}"
    );
}

#[tokio::test]
async fn every_recipe_is_accepted_by_an_api_server() {
    // What only an administrator sets.
    let configuration = r#""/Manager": {"/Controller": {"/Reconciler": {templateValues: {
  allowedNetworks: [blue], allowedDevices: [example.org/gpu], usb: true}}}}"#;
    let ns = ManagedNamespace::with_templates("recipes", &[]).await;
    ns.manager.change_configuration(configuration);
    // The files that virtiofs shares.
    let shared = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "shared-files" },
        "spec": { "accessModes": ["ReadWriteMany"], "resources": { "requests": { "storage": "1Gi" } } },
    });
    ns.namespace.apply(&shared.to_string());
    for (name, folder) in recipes() {
        ns.namespace.apply(&kubectl_vm(&["templates", "pack", "--set", &name], &folder));
        // What is nothing without a choice.
        let chosen = match name.as_str() {
            "second-network" => json!({ "networks": ["blue"] }),
            "gpu-and-usb" => json!({ "devices": { "example.org/gpu": "1" } }),
            "disk-from-url" => json!({ "import": { "disk": "core", "url": "http://example.org/x" } }),
            _ => json!({}),
        };
        ns.create_vm(&name, |vm| {
            vm["spec"]["templates"] = json!({ "set": name });
            vm["spec"]["templateValues"] = chosen.clone();
        })
        .await;
    }
    for (name, _) in recipes() {
        let vm = ns.vm_with_reason(&name, "Starting").await;
        let (status, reason, message) = condition(&vm, TEMPLATES_VALID).unwrap();
        assert_eq!((status.as_str(), reason.as_str()), ("True", "Rendered"), "{name}: {message}");
        assert_eq!(vm.status.unwrap().templates.unwrap().set, Some(name));
    }
    for (kind, name) in [
        ("cronjob", "backup-backup-core-disk"),
        ("ingress", "ingress"),
        ("service", "ingress-http"),
        ("networkpolicy", "network-policy"),
        ("statefulset", "stateful-set"),
    ] {
        let owner = "--output=jsonpath={.metadata.ownerReferences[0].kind}";
        assert_eq!(ns.namespace.kubectl(&["get", kind, name, owner]), "VirtualMachine");
    }
    let part =
        |name: &str, path: &str| ns.namespace.kubectl(&["get", "pod", name, &format!("--output=jsonpath={{{path}}}")]);
    assert_eq!(part("node-pool", ".spec.nodeSelector.example\\.org/pool"), "vms");
    assert_eq!(part("metrics-sidecar", ".spec.containers[*].name"), "vm-runner metrics");
    assert_eq!(part("second-network", ".metadata.annotations.k8s\\.v1\\.cni\\.cncf\\.io/networks"), "blue");
    assert_eq!(part("gpu-and-usb", ".spec.containers[0].resources.limits.example\\.org/gpu"), "1");
    assert_eq!(part("disk-from-url", ".spec.initContainers[0].env[0].value"), "http://example.org/x");
    assert_eq!(part("resource-classes", ".spec.containers[0].resources.requests.cpu"), "500m");
    let pods: Api<Pod> = ns.api();
    assert!(pods.get_opt("stateful-set").await.unwrap().is_none());
}

fn set(name: &str, set: &str, data: Value) -> ConfigMap {
    let metadata = json!({ "name": name, "labels": { SET_LABEL: set } });
    serde_json::from_value(json!({ "metadata": metadata, "data": data })).unwrap()
}

#[tokio::test]
async fn a_vm_chooses_a_template_set_and_values() {
    let ns = ManagedNamespace::with_templates("sets", &[]).await;
    ns.create_vm("apple", |vm| {
        vm["spec"]["templates"] = json!({ "set": "guarded" });
        vm["spec"]["templateValues"] = json!({ "policyTypes": ["Egress"] });
    })
    .await;
    ns.create_vm("pear", |_| {}).await;
    let vm = ns.vm_when("apple", "without a set", |vm| condition(vm, TEMPLATES_VALID).is_some()).await;
    let (status, _, message) = condition(&vm, TEMPLATES_VALID).unwrap();
    assert_eq!(
        (status.as_str(), message.as_str()),
        ("False", "spec.templates.set: no template set is named \"guarded\": there are none")
    );

    let maps: Api<ConfigMap> = ns.api();
    let policy_of_values = POLICY.replace("[Ingress]", "{{ values.policyTypes }}");
    let data = json!({ "network-policy.yaml.j2": policy_of_values, "values.yaml": "policyTypes: [Ingress]" });
    maps.create(&PostParams::default(), &set("templates-guarded", "guarded", data)).await.unwrap();
    let found = policy(&ns, "apple").await;
    assert_eq!(found.spec.unwrap().policy_types.unwrap(), ["Egress"]);
    let vm = ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await;
    assert_eq!(vm.status.unwrap().templates.unwrap().set.as_deref(), Some("guarded"));
    ns.vm_with_reason("pear", "Starting").await;
    let policies: Api<NetworkPolicy> = ns.api();
    assert!(policies.get_opt("pear").await.unwrap().is_none());

    // One that is broken is said on the ConfigMap, too; one that goes while it is used stays.
    let mut map = maps.get("templates-guarded").await.unwrap();
    map.data.as_mut().unwrap().insert("x.yaml.j2".into(), "{% if %}".into());
    maps.replace("templates-guarded", &PostParams::default(), &map).await.unwrap();
    let told = eventually("an event", LIMIT, async || {
        events(&ns, "TemplatesRefused").await.into_iter().find(|(about, _)| about == "ConfigMap templates-guarded")
    })
    .await;
    assert!(told.1.contains("sets/guarded/x.yaml.j2:1:7"), "{told:?}");
    maps.delete("templates-guarded", &Default::default()).await.unwrap();
    refused(&ns, "the set is gone, but 1 VMs use it").await;
    assert!(policies.get_opt("apple").await.unwrap().is_some());
}

#[tokio::test]
async fn kubectl_vm_diff_shows_each_change_and_when_it_takes_effect() {
    let ns = ManagedNamespace::with_templates("diff", &[]).await;
    ns.configure_commands(SERVICES).await;
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    let diff = |arguments: &[&str]| ns.namespace.kubectl_vm(&[&["diff"], arguments].concat());
    assert_eq!(diff(&["apple"]), (0, String::new()));
    let heading = "VM      POD    OBJECTS   AT THE NEXT START   REFUSED\n";
    assert_eq!(diff(&["--all"]), (0, format!("{heading}apple   kept   -         -                   -\n")));

    let folder = tempfile::tempdir().unwrap();
    let template = "{% extends \"builtin/pod.yaml.j2\" %}\n{% block labels %}\n    live: yes\n{% endblock %}\n\
                    {% block scheduling %}\n{{ super() }}\n  priorityClassName: high\n{% endblock %}\n";
    fs::write(folder.path().join("pod.yaml.j2"), template).unwrap();
    fs::write(folder.path().join("network-policy.yaml.j2"), POLICY).unwrap();
    let (code, text) = diff(&["apple", "--templates", folder.path().to_str().unwrap()]);
    assert_eq!(code, 1, "{text}");
    for part in [
        "NetworkPolicy apple: created (network-policy.yaml.j2)",
        "+  - Ingress",
        "Pod apple: labels and annotations changed at once",
        "live: \"yes\"",
        "spec.priorityClassName: at the next start: \"high\" instead of nothing",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    let (code, text) = diff(&["--all", "--templates", folder.path().to_str().unwrap()]);
    assert_eq!((code, text.lines().nth(1)), (1, Some("apple   kept   1 created   1 change            -")), "{text}");

    // From a file, and with what the cluster can't do.
    ns.patch_vm("apple", json!({ "spec": { "loadBalancerService": { "labels": { "a": "b" } } } })).await;
    let services: Api<Service> = ns.api();
    eventually("a Service", LIMIT, async || services.get_opt("apple").await.unwrap()).await;
    let mut vm = vm_manifest("apple");
    vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] = json!("1Mi");
    vm["spec"]["vm"]["maximumCpus"] = json!(1);
    let file = folder.path().join("vm.yaml");
    fs::write(&file, vm.to_string()).unwrap();
    let (code, text) = diff(&["--filename", file.to_str().unwrap()]);
    assert_eq!(code, 1, "{text}");
    for part in [
        "Service apple: deleted: no template renders it any more",
        "ConfigMap apple: changed at once",
        "-        maximumCpus: 2\n+        maximumCpus: 1",
        "forbidden: ",
        "can't shrink",
    ] {
        assert!(text.contains(part), "{part:?} in\n{text}");
    }
    // Nothing of it was done.
    let policies: Api<NetworkPolicy> = ns.api();
    assert!(policies.get_opt("apple").await.unwrap().is_none());
    let diff = |arguments: &[&str]| ns.namespace.kubectl_vm(&[&["diff"], arguments].concat());
    assert_eq!(diff(&["apple"]), (0, String::new()));
    let (code, text) = diff(&["pear"]);
    assert!(code == 3 && text.contains("pear"), "{code} {text}");
}
