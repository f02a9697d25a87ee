//! A VM that can't start, says why, and starts when its spec is mended.

use super::*;

/// What the kubelet reports of a container that it can't start.
fn waits(reason: &str) -> Value {
    json!({ "phase": "Pending", "containerStatuses": [{
        "name": "vm-runner", "image": "x", "imageID": "", "ready": false, "started": false, "restartCount": 0,
        "state": { "waiting": { "reason": reason, "message": "no such image" } },
    }] })
}

#[tokio::test]
async fn a_pod_whose_runner_never_started_is_made_anew_when_its_spec_is_mended() {
    let ns = ns("unstarted").await;
    let image = |name: &str| json!({ "spec": { "image": { "source": format!("example.org/{name}:1") } } });
    ns.create_vm("apple", |vm| {
        on_node(vm);
        vm["spec"]["image"] = json!({ "source": "example.org/vm-runer:1" });
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    let first = ns.api::<Pod>().get("apple").await.unwrap();
    // Before the kubelet has reported anything, a guest may start.
    ns.patch_vm("apple", image("vm-runner")).await;
    let vm = ns.vm_when("apple", "RestartRequired", |vm| condition(vm, "RestartRequired").is_some()).await;
    let restart = format!(
        "kubectl -n {} annotate --overwrite vm apple vmoperator.jdrupes.org/restartedAt=\"$(date -Is)\"",
        ns.namespace.name()
    );
    let message = condition(&vm, "Ready").unwrap().2;
    let change = "these changes need a restart: objects/Pod/spec.containers[vm-runner].image";
    assert!(message.ends_with(&format!("; {change}: {restart}")), "{message}");
    ns.patch_pod_status("apple", waits("ErrImagePull")).await;
    ns.pod_when("apple", "going", is_going).await;
    ns.wait_for_event("apple", "Restarting").await;
    // Never two Pods.
    assert_eq!(ns.pods().await, ["apple"]);
    ns.remove_pod("apple").await;
    let second = ns.pod_when("apple", "a new one", |pod| pod.uid() != first.uid()).await;
    assert_eq!(second.spec.unwrap().containers[0].image.as_deref(), Some("example.org/vm-runner:1"));

    // One that has run is not replaced, whatever it waits for now.
    let mut status = waits("ImagePullBackOff");
    status["containerStatuses"][0]["restartCount"] = json!(1);
    ns.patch_pod_status("apple", status).await;
    ns.vm_with_reason("apple", "ImagePullFailed").await;
    ns.patch_vm("apple", image("another")).await;
    let vm = ns.vm_when("apple", "RestartRequired", |vm| condition(vm, "RestartRequired").is_some()).await;
    let message = condition(&vm, "Ready").unwrap().2;
    let cause = "can't get the image x: no such image -> correct the image";
    assert!(message.contains(cause) && message.ends_with(&format!("; {change}: {restart}")), "{message}");
    let same = ns.api::<Pod>().get("apple").await.unwrap();
    assert_eq!((same.uid(), is_going(&same)), (second.metadata.uid, false));
}

#[tokio::test]
async fn a_node_that_does_not_exist_is_named() {
    let ns = ManagedNamespace::new("nowhere").await;
    ns.create_vm("apple", |vm| vm["spec"]["nodeName"] = json!("nowhere")).await;
    let vm = ns.vm_with_reason("apple", "StartDelayed").await;
    assert_eq!(
        condition(&vm, "Ready").unwrap().2,
        "node nowhere has not taken Pod apple yet: kubectl get node nowhere shows whether it exists and answers"
    );
    ns.wait_for_event("apple", "StartDelayed").await;
}
