//! The display's secret: one that a person made takes precedence over a generated one.

use crate::support::{
    cluster::eventually,
    world::{LIMIT, World, condition},
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
    let world = World::new("secret-name").await;
    let mut theirs = own_display_secret("apple");
    theirs["metadata"]["name"] = json!("apple-display-secret");
    world.namespace.apply(&theirs.to_string());
    world.make("apple", |_| ()).await;
    world.ready("apple", "Starting").await;
    world.report("apple", true, "Started").await;
    let vm = world.ready("apple", "Running").await;
    assert_eq!(condition(&vm, "RestartRequired"), None);
    let secret = world.api::<Secret>().get("apple-display-secret").await.unwrap();
    assert_eq!(secret.data.unwrap()["display-password"].0, b"hello");
    assert!(secret.metadata.owner_references.is_none());
}

#[tokio::test]
async fn a_persons_display_secret_takes_the_place_of_the_generated_one() {
    let world = World::new("secret").await;
    world.make("apple", |_| ()).await;
    world.ready("apple", "Starting").await;
    let secrets: Api<Secret> = world.api();
    let generated = secrets.get("apple-display-secret").await.unwrap().data.unwrap();
    assert_eq!(generated["display-password"].0.len(), 32);
    assert_eq!(generated["password-expiry"].0, b"now");
    world.make("pear", |_| ()).await;
    world.ready("pear", "Starting").await;
    let pears = secrets.get("pear-display-secret").await.unwrap().data.unwrap();
    assert_ne!(pears["display-password"], generated["display-password"]);

    let theirs = own_display_secret("apple");
    world.namespace.apply(&theirs.to_string());
    // The Pod mounts it until it is made anew.
    let pod = world.api::<Pod>().get("apple").await.unwrap();
    let vm = world.machine_when("apple", "pending", |vm| condition(vm, "RestartRequired").is_some()).await;
    assert!(vm.status.unwrap().pending_changes.iter().any(|change| change.path.contains("volumes")));
    assert_eq!(secrets.get("apple-display-secret").await.unwrap().data.unwrap(), generated);
    world.namespace.kubectl(&["delete", "pod", "apple", "--wait=false"]);
    world.pod_when("apple", "a new one", |new| new.uid() != pod.uid()).await;
    eventually("the generated secret to go", LIMIT, async || {
        secrets.get_opt("apple-display-secret").await.unwrap().is_none().then_some(())
    })
    .await;
    assert_eq!(secrets.get("mine").await.unwrap().data.unwrap()["display-password"].0, b"hello");
}

#[tokio::test]
async fn to_add_or_remove_the_display_secret_takes_a_restart() {
    let world = World::new("secret-comes").await;
    world.make("apple", |vm| vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } })).await;
    world.ready("apple", "Starting").await;
    let pods: Api<Pod> = world.api();
    let first = pods.get("apple").await.unwrap().uid();
    let waits = async |expected: bool| {
        let what = if expected { "a change to wait" } else { "nothing to wait" };
        world
            .machine_when("apple", what, |vm| {
                let pending = &vm.status.as_ref().unwrap().pending_changes;
                condition(vm, "RestartRequired").is_some() == expected
                    && pending.iter().any(|change| change.path.contains("volumes")) == expected
            })
            .await
    };
    let secret = own_display_secret("apple");
    world.namespace.apply(&secret.to_string());
    waits(true).await;
    world.namespace.kubectl(&["delete", "secret", "mine"]);
    waits(false).await;
    assert_eq!(pods.get("apple").await.unwrap().uid(), first);
    // With it from the start on, the other way round.
    world.namespace.apply(&secret.to_string());
    waits(true).await;
    world.namespace.kubectl(&["delete", "pod", "apple", "--wait=false"]);
    waits(false).await;
    world.namespace.kubectl(&["delete", "secret", "mine"]);
    waits(true).await;
}
