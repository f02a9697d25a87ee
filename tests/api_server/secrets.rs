//! The display's secret: one that a person made takes precedence over a generated one.

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
};
use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

/// A display secret that a person made.
fn own_display_secret(machine: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "mine", "labels": {
            "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": machine, "app.kubernetes.io/component": "display-secret",
        } },
        "stringData": { "display-password": "hello" },
    })
}

/// The documentation of earlier releases uses this name.
#[tokio::test]
async fn a_persons_display_secret_may_have_the_name_that_a_generated_one_has() {
    let ns = ManagedNamespace::new("secret-name").await;
    let mut theirs = own_display_secret("apple");
    theirs["metadata"]["name"] = json!("apple-display-secret");
    ns.namespace.apply(&theirs.to_string());
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    let vm = ns.vm_with_reason("apple", "Running").await;
    assert_eq!(condition(&vm, "RestartRequired"), None);
    let secret = ns.api::<Secret>().get("apple-display-secret").await.unwrap();
    assert_eq!(secret.data.unwrap()["display-password"].0, b"hello");
    assert!(secret.metadata.owner_references.is_none());
}

#[tokio::test]
async fn a_persons_display_secret_takes_the_place_of_the_generated_one() {
    let ns = ManagedNamespace::new("secret").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let secrets: Api<Secret> = ns.api();
    let generated = secrets.get("apple-display-secret").await.unwrap().data.unwrap();
    assert_eq!(generated["display-password"].0.len(), 32);
    assert_eq!(generated["password-expiry"].0, b"now");
    ns.create_vm("pear", |_| ()).await;
    ns.vm_with_reason("pear", "Starting").await;
    let pears = secrets.get("pear-display-secret").await.unwrap().data.unwrap();
    assert_ne!(pears["display-password"], generated["display-password"]);

    let theirs = own_display_secret("apple");
    ns.namespace.apply(&theirs.to_string());
    // The Pod mounts it until it is made anew.
    let pod = ns.api::<Pod>().get("apple").await.unwrap();
    let vm = ns.vm_when("apple", "pending", |vm| condition(vm, "RestartRequired").is_some()).await;
    assert!(vm.status.unwrap().pending_changes.iter().any(|change| change.path.contains("volumes")));
    assert_eq!(secrets.get("apple-display-secret").await.unwrap().data.unwrap(), generated);
    ns.namespace.kubectl(&["delete", "pod", "apple", "--wait=false"]);
    ns.pod_when("apple", "a new one", |new| new.uid() != pod.uid()).await;
    eventually("the generated secret to go", LIMIT, async || {
        secrets.get_opt("apple-display-secret").await.unwrap().is_none().then_some(())
    })
    .await;
    assert_eq!(secrets.get("mine").await.unwrap().data.unwrap()["display-password"].0, b"hello");
}

#[tokio::test]
async fn to_add_or_remove_the_display_secret_takes_a_restart() {
    let ns = ManagedNamespace::new("secret-comes").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } })).await;
    ns.vm_with_reason("apple", "Starting").await;
    let pods: Api<Pod> = ns.api();
    let first = pods.get("apple").await.unwrap().uid();
    let waits = async |expected: bool| {
        let what = if expected { "a change to wait" } else { "nothing to wait" };
        ns.vm_when("apple", what, |vm| {
            let pending = &vm.status.as_ref().unwrap().pending_changes;
            condition(vm, "RestartRequired").is_some() == expected
                && pending.iter().any(|change| change.path.contains("volumes")) == expected
        })
        .await
    };
    let secret = own_display_secret("apple");
    ns.namespace.apply(&secret.to_string());
    waits(true).await;
    ns.namespace.kubectl(&["delete", "secret", "mine"]);
    waits(false).await;
    assert_eq!(pods.get("apple").await.unwrap().uid(), first);
    // With it from the start on, the other way round.
    ns.namespace.apply(&secret.to_string());
    waits(true).await;
    ns.namespace.kubectl(&["delete", "pod", "apple", "--wait=false"]);
    waits(false).await;
    ns.namespace.kubectl(&["delete", "secret", "mine"]);
    waits(true).await;
}

#[tokio::test]
async fn the_relays_secret_is_made_once_for_each_vm_and_again_when_it_is_deleted() {
    let ns = ManagedNamespace::new("relay").await;
    for name in ["apple", "pear"] {
        ns.create_vm(name, |_| ()).await;
        ns.vm_with_reason(name, "Starting").await;
    }
    let secrets: Api<Secret> = ns.api();
    let of = async |vm: &str| secrets.get(&format!("{vm}-relay")).await.unwrap();
    let apple = of("apple").await;
    let data = apple.data.clone().unwrap();
    vm_operator::client::relay::Access::new(&data["tls.crt"].0, &data["token"].0).unwrap();
    assert_eq!(data["token"].0.len(), 64);
    let pears = of("pear").await.data.unwrap();
    for key in ["tls.crt", "tls.key", "token"] {
        assert_ne!(pears[key], data[key], "{key}");
    }
    let mounts: Vec<String> = ns.api::<Pod>().get("apple").await.unwrap().spec.unwrap().containers[0]
        .volume_mounts
        .iter()
        .flatten()
        .map(|mount| mount.name.clone())
        .collect();
    assert!(!mounts.contains(&"relay".to_owned()), "only the agent has it: {mounts:?}");

    // The next reconcile, also by another manager, keeps it.
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    assert_eq!(of("apple").await.metadata.resource_version, apple.metadata.resource_version);
    ns.namespace.kubectl(&["delete", "secret", "apple-relay"]);
    let new = eventually("another Secret", LIMIT, async || secrets.get_opt("apple-relay").await.unwrap()).await;
    assert_ne!(new.data.unwrap()["token"], data["token"]);
    let vm = ns.vm_with_reason("apple", "Running").await;
    assert_eq!(condition(&vm, "RestartRequired"), None, "the Pod mounts it by name");
}
