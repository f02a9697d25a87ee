//! VMs that are deleted, and made again, while their Pods exist.

use super::*;

#[tokio::test]
async fn a_vm_deleted_without_its_pod_adopts_it_when_recreated() {
    let ns = ns("orphan").await;
    let pod = up(&ns, "apple", |vm| {
        on_node(vm);
        vm["spec"]["cloudInit"] = json!({ "userData": { "a": 1 } });
    })
    .await;
    let told = ns.api::<ConfigMap>().get("apple-cloud-init").await.unwrap().data;
    ns.delete_and_orphan("apple").await;
    ns.pod_when("apple", "without an owner", |pod| pod.owner_references().is_empty() && !is_going(pod)).await;
    let again = ns
        .create_vm("apple", |vm| {
            on_node(vm);
            vm["spec"]["cloudInit"] = json!({ "userData": { "a": 1 } });
        })
        .await;
    let adopted = ns
        .pod_when("apple", "owned again", |pod| {
            pod.owner_references().iter().any(|owner| Some(&owner.uid) == again.uid().as_ref())
        })
        .await;
    assert_eq!((adopted.uid(), is_going(&adopted)), (pod.uid(), false));
    let is_owned = |owners: &[OwnerReference]| owners.iter().any(|owner| Some(&owner.uid) == again.uid().as_ref());
    let (map, secret) = (ns.api::<ConfigMap>(), ns.api::<Secret>());
    eventually("the ConfigMaps and the Secret to be owned", LIMIT, async || {
        let maps = [map.get("apple").await.unwrap(), map.get("apple-cloud-init").await.unwrap()];
        let secret = secret.get("apple-display-secret").await.unwrap();
        (maps.iter().all(|map| is_owned(map.owner_references())) && is_owned(secret.owner_references())).then_some(())
    })
    .await;
    // Its disk is the same, so cloud-init has nothing to do anew.
    assert_eq!(map.get("apple-cloud-init").await.unwrap().data, told);
    let vm = ns
        .vm_when("apple", "observed", |vm| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation)
        .await;
    assert_eq!(condition(&vm, "RestartRequired"), None, "{vm:?}");
}

#[tokio::test]
async fn a_vm_recreated_at_once_waits_for_the_old_pod() {
    let ns = ns("again").await;
    let pod = up(&ns, "apple", on_node).await;
    let vms: Api<VirtualMachine> = ns.api();
    vms.delete("apple", &DeleteParams::default()).await.unwrap();
    let again = ns.create_vm("apple", on_node).await;
    ns.vm_with_reason("apple", "WaitingForDeletion").await;
    ns.wait_for_description("apple", &["WaitingForDeletion", "waiting until Pod apple is gone"]).await;
    assert_eq!(ns.api::<Pod>().get("apple").await.unwrap().uid(), pod.uid());
    // The garbage collector of a new cluster looks every 30 s for kinds that it does not know yet.
    eventually("the Pod to go", 3 * LIMIT, async || {
        is_going(&ns.api::<Pod>().get("apple").await.unwrap()).then_some(())
    })
    .await;
    ns.remove_pod("apple").await;
    let new = ns.pod_when("apple", "a new one", |new| new.uid() != pod.uid()).await;
    assert_eq!(new.owner_references()[0].uid, again.uid().unwrap());
}

#[tokio::test]
async fn a_vm_that_a_finalizer_keeps_can_be_stopped_and_nothing_is_made_for_it() {
    let ns = ns("kept-by-finalizer").await;
    let kept = |vm: &mut Value| {
        on_node(vm);
        vm["metadata"]["finalizers"] = json!(["example.org/backup"]);
    };
    let vms: Api<VirtualMachine> = ns.api();
    let pod = up(&ns, "apple", kept).await;
    let background =
        DeleteParams { propagation_policy: Some(PropagationPolicy::Background), ..DeleteParams::default() };
    vms.delete("apple", &background).await.unwrap();
    annotate(&ns, "apple", RESTARTED_ANNOTATION, "2026-11-21T10:00:00Z").await;
    set_state(&ns, "apple", "Stopped").await;
    let going = ns.pod_when("apple", "going", is_going).await;
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(915));
    ns.vm_with_reason("apple", "Stopping").await;
    annotate(&ns, "apple", FORCE_STOP_ANNOTATION, &pod.uid().unwrap()).await;
    ns.pod_when("apple", "going soon", |pod| pod.metadata.deletion_grace_period_seconds < Some(30)).await;
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    set_state(&ns, "apple", "Running").await;
    ns.vm_with_reason("apple", "BeingDeleted").await;
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    ns.patch_vm("apple", json!({ "metadata": { "finalizers": null } })).await;
    eventually("the VM to be gone", LIMIT, async || vms.get_opt("apple").await.unwrap().is_none().then_some(())).await;
}

#[tokio::test]
async fn a_deletion_in_the_foreground_waits_for_the_guest() {
    let ns = ns("foreground").await;
    up(&ns, "apple", on_node).await;
    let vms: Api<VirtualMachine> = ns.api();
    vms.delete("apple", &DeleteParams::foreground()).await.unwrap();
    // The garbage collector of a new cluster looks every 30 s for kinds that it does not know yet.
    eventually("the Pod to go", 3 * LIMIT, async || {
        is_going(&ns.api::<Pod>().get("apple").await.unwrap()).then_some(())
    })
    .await;
    let is_kept = |vm: &VirtualMachine| vm.finalizers().iter().any(|finalizer| finalizer == "foregroundDeletion");
    // What does not run the guest does not hold it up.
    eventually("all else to go", LIMIT, async || {
        ns.api::<ConfigMap>().get_opt("apple").await.unwrap().is_none().then_some(())
    })
    .await;
    assert!(is_kept(&vms.get("apple").await.unwrap()));
    ns.remove_pod("apple").await;
    eventually("the VM to be gone", LIMIT, async || vms.get_opt("apple").await.unwrap().is_none().then_some(())).await;
}

#[tokio::test]
async fn a_namespace_with_vms_can_be_deleted() {
    let ns = ManagedNamespace::new("deleted").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let namespaces: Api<k8s_openapi::api::core::v1::Namespace> = Api::all(ns.client.clone());
    namespaces.delete(ns.namespace.name(), &DeleteParams::default()).await.unwrap();
    eventually("the namespace to be gone", std::time::Duration::from_secs(120), async || {
        namespaces.get_opt(ns.namespace.name()).await.unwrap().is_none().then_some(())
    })
    .await;
}
