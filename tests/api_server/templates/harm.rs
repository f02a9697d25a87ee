//! What a set, a configuration or a text can do to VMs that run: it is refused before it is used, or it is bounded.

use k8s_openapi::api::core::v1::Secret;
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::api::{VirtualMachine, VmReport};

use super::refused;
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, play_node},
    manager::Manager,
};

const POD: &str = "{% set pod %}{% include 'builtin/pod.yaml.j2' %}{% endset %}{% set pod = pod | from_yaml %}\n";

/// An object with a name of its own.
fn object(kind: &str, rest: &str) -> String {
    format!("apiVersion: v1\nkind: {kind}\nmetadata: {{name: {{{{ vm.metadata.name ~ '-x' }}}}}}\n{rest}\n")
}

/// A running VM whose guest runs.
async fn running(ns: &ManagedNamespace, name: &str) {
    ns.create_vm(name, |_| {}).await;
    ns.vm_with_reason(name, "Starting").await;
    // The garbage collector deletes Pods of nodes that do not exist.
    play_node(&ns.client, "played").await;
    ns.bind_pod(name, "played").await;
    ns.patch_pod_status(name, json!({ "phase": "Running", "podIP": "10.0.0.1", "podIPs": [{ "ip": "10.0.0.1" }] }))
        .await;
    ns.report(name, true, "Started").await;
    ns.vm_when(name, "up", |vm| condition(vm, "Ready").is_some_and(|it| it.0 == "True")).await;
}

#[tokio::test]
async fn a_set_that_would_harm_vms_is_refused() {
    let before = object("Secret", "type: Opaque\nstringData: {a: b}");
    let ns = ManagedNamespace::with_templates("harm", &[("x.yaml.j2", &before)]).await;
    running(&ns, "apple").await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    eventually("the Secret", LIMIT, async || ns.api::<Secret>().get_opt("pear-x").await.unwrap()).await;
    let second = format!(
        "{POD}apiVersion: v1\nkind: Pod\nmetadata: {{name: {{{{ vm.metadata.name ~ '-2' }}}}}}\nspec: {{{{ pod.spec }}}}\n"
    );
    let maker = |kind: &str, more: &str| {
        format!(
            "{POD}apiVersion: apps/v1\nkind: {kind}\nmetadata:\n  name: {{{{ vm.metadata.name }}}}\n  annotations: {{vmoperator.jdrupes.org/lifetime: running}}\n\
             spec:\n  {more}\n  selector: {{matchLabels: {{{{ labels }}}}}}\n  template:\n    metadata: {{labels: {{{{ pod.metadata.labels }}}}}}\n    spec: {{{{ pod.spec }}}}\n"
        )
    };
    let foreign = "{% extends 'base/pod.yaml.j2' %}\n{% block volumes %}\n    - {name: x, persistentVolumeClaim: {claimName: pear-runner-data}}\n{% endblock %}\n";
    let lost = format!(
        "{POD}apiVersion: v1\nkind: Pod\nmetadata: {{name: {{{{ vm.metadata.name }}}}}}\nspec: {{{{ pod.spec | merge({{'volumes': []}}) }}}}\n"
    );
    for (file, text, says) in [
        ("y.yaml.j2", second, "two guests would run"),
        ("pod.yaml.j2", maker("StatefulSet", "replicas: 2"), "spec.replicas: 2"),
        ("pod.yaml.j2", maker("Deployment", "replicas: 1"), "while the last one still ends"),
        ("pod.yaml.j2", foreign.to_owned(), "which is the VM"),
        ("pod.yaml.j2", lost, "which the VM has"),
        (
            "y.yaml.j2",
            object(
                "ConfigMap",
                "data: {ip: {{ vm.status.addresses[0].address if vm.metadata.name == 'apple' else '' }}}",
            ),
            "of a VM that is stopped",
        ),
        ("x.yaml.j2", object("Secret", "type: example.org/x\nstringData: {a: b}"), "field is immutable"),
    ] {
        let files = [("x.yaml.j2", before.as_str()), (file, text.as_str())];
        let files: &[(&str, &str)] = if file == "x.yaml.j2" { &files[1..] } else { &files };
        ns.manager.change_templates(files);
        refused(&ns, says).await;
        ns.vm_when("pear", "told", |vm| {
            condition(vm, "TemplatesValid").is_some_and(|it| it.1 == "NewerRefused" && it.2.contains(says))
        })
        .await;
    }
    // The sets did nothing, and a VM starts.
    ns.patch_vm("pear", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.vm_with_reason("pear", "Starting").await;
    assert_eq!(ns.pods().await, ["apple", "pear"]);
}

#[tokio::test]
async fn the_status_is_written_whatever_waits_for_the_next_start() {
    let ns = ManagedNamespace::with_templates("pending", &[]).await;
    running(&ns, "apple").await;
    let ports = "{% extends 'base/pod.yaml.j2' %}\n{% block ports %}\n      ports:\n        - {containerPort: 53, protocol: TCP}\n        - {containerPort: 53, protocol: UDP}\n{% endblock %}\n\
                 {% block volume_mounts %}\n        - {name: extra, mountPath: /a}\n        - {name: extra, mountPath: /b}\n{% endblock %}\n{% block volumes %}\n    - {name: extra, emptyDir: {}}\n{% endblock %}\n";
    ns.manager.change_templates(&[("pod.yaml.j2", ports)]);
    let waits = |vm: &VirtualMachine| condition(vm, "RestartRequired").is_some_and(|it| it.2.contains("ports[53/UDP]"));
    ns.vm_when("apple", "told what waits", waits).await;
    ns.report("apple", false, "QemuFailed").await;
    ns.vm_when("apple", "told of the failure", |vm| condition(vm, "Ready").is_some_and(|it| it.0 == "False")).await;
}

#[tokio::test]
async fn a_set_that_looks_at_what_follows_from_it_comes_to_rest() {
    let fresh = "{% extends 'base/pod.yaml.j2' %}\n{% block environment %}\n{{ super() }}\n{% if not (vm.status.pendingChanges is defined and vm.status.pendingChanges) %}\n\
                 \x20       - {name: FRESH, value: \"yes\"}\n{% endif %}\n{% endblock %}\n";
    let ns = ManagedNamespace::with_templates("rest", &[]).await;
    running(&ns, "apple").await;
    ns.manager.change_templates(&[("pod.yaml.j2", fresh)]);
    let vm = ns.vm_when("apple", "told what waits", |vm| condition(vm, "RestartRequired").is_some()).await;
    let version = |vm: &VirtualMachine| vm.metadata.resource_version.clone();
    // Another VM takes many times as long as a write.
    ns.create_vm("pear", |_| {}).await;
    ns.vm_with_reason("pear", "Starting").await;
    let later = ns.vm_when("apple", "there", |_| true).await;
    assert_eq!(version(&later), version(&vm));
}

#[tokio::test]
async fn a_vm_that_never_comes_to_rest_is_slowed_and_named() {
    let ns = ManagedNamespace::with_templates("restless", &[]).await;
    running(&ns, "apple").await;
    // Each report changes what the manager writes.
    let (reports, uid) = (ns.api::<VmReport>(), ns.pod_when("apple", "made", |_| true).await.uid().unwrap());
    let is_named = |vm: &VirtualMachine| condition(vm, "ObjectsReady").is_some_and(|it| it.1 == "Restless");
    for round in 0..600 {
        let cpus = Patch::Merge(json!({ "status": { "cpus": round % 2 + 1 } }));
        reports.patch_status(&uid, &PatchParams::default(), &cpus).await.unwrap();
        if is_named(&ns.vm_when("apple", "there", |_| true).await) {
            break;
        }
    }
    ns.vm_when("apple", "named", is_named).await;
    // Who changes the VM does not wait.
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.vm_when("apple", "stopping", |vm| condition(vm, "Ready").is_some_and(|it| it.1 == "Stopping")).await;
}

#[tokio::test]
async fn characters_that_yaml_does_not_have_are_stored_and_the_status_is_written() {
    let text = "a\u{7f}\u{80}\u{85}\u{9b}\u{2028}\u{feff}\u{fffe}b";
    let map = object("ConfigMap", "data: {a: {{ values.text }}}");
    let ns = ManagedNamespace::with_templates("controls", &[("x.yaml.j2", &map)]).await;
    ns.create_vm("apple", |vm| {
        vm["metadata"]["annotations"] = json!({ "note": text });
        vm["spec"]["templateValues"] = json!({ "text": text });
        vm["spec"]["cloudInit"] =
            json!({ "userData": { "write_files": [{ "content": text }] }, "metaData": { "a": text } });
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    let stored = eventually("the ConfigMap", LIMIT, async || {
        ns.api::<k8s_openapi::api::core::v1::ConfigMap>().get_opt("apple-x").await.unwrap()
    })
    .await;
    assert_eq!(stored.data.unwrap()["a"], text);
    let annotation = json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/stateUntil": text } } });
    ns.patch_vm("apple", annotation).await;
    ns.vm_when("apple", "told", |vm| condition(vm, "StateOverridden").is_some()).await;
}

#[tokio::test]
async fn a_configuration_with_which_no_vm_renders_is_refused_and_stays_so_over_a_restart() {
    let map = object("ConfigMap", "data: {a: {{ values.tier.name }}}");
    let mut ns = ManagedNamespace::with_templates(
        "bad-config",
        &[("x.yaml.j2", map.as_str()), ("values.yaml", "tier: {name: first}\n")],
    )
    .await;
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    let config = |tier: &str| {
        format!("\"/Manager\":\n  \"/Controller\":\n    \"/Reconciler\":\n      templateValues: {{tier: {tier}}}\n")
    };
    let is_refused =
        |vm: &VirtualMachine| condition(vm, "TemplatesValid").is_some_and(|it| it.1 == "ConfigurationRefused");
    ns.manager.change_configuration(&config("nothing"));
    let vm = ns.vm_when("apple", "told", is_refused).await;
    let (_, _, message) = condition(&vm, "TemplatesValid").unwrap();
    assert!(message.contains("templateValues.tier") && message.contains("x.yaml.j2"), "{message}");
    ns.wait_for_event("apple", "ConfigurationRefused").await;
    let value = async |ns: &ManagedNamespace| -> Value {
        let map = ns.api::<k8s_openapi::api::core::v1::ConfigMap>().get("apple-x").await.unwrap();
        json!(map.data)["a"].clone()
    };
    assert_eq!(value(&ns).await, "first");
    ns.manager.change_configuration(&config("{name: second}"));
    ns.vm_when("apple", "told no more", |vm| !is_refused(vm)).await;
    eventually("the new value", LIMIT, async || (value(&ns).await == "second").then_some(())).await;
    ns.manager.change_configuration(&config("nothing"));
    ns.vm_when("apple", "told again", is_refused).await;
    ns.manager.signal(rustix::process::Signal::TERM);
    ns.manager.wait_for_end().await;
    let files = [("x.yaml.j2", map.as_str()), ("values.yaml", "tier: {name: first}\n")];
    ns.manager = Manager::start_with(ns.cluster.kubeconfig(), ns.namespace.name(), &files, &config("nothing"));
    eventually("the configuration to be refused again", LIMIT, async || {
        ns.manager.log().contains("the new configuration is not used").then_some(())
    })
    .await;
    assert_eq!(value(&ns).await, "second");
}
