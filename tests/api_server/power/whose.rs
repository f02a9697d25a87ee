//! Whose a Pod is: copies, backups, impostors, and Pods whose owner and labels somebody has changed. The true one is known, nothing of others is
//! deleted, and Ready says it.

use super::*;
use kube::api::PostParams;

/// What a person does with the Pod of a VM.
struct Copy {
    name: &'static str,
    manager: &'static str,
    /// What it keeps of the metadata.
    keeps: &'static [&'static str],
}

/// `kubectl debug --copy-to`; a backup; `kubectl get -o yaml --show-managed-fields`, another name, `kubectl create`.
const COPIES: [Copy; 3] = [
    Copy { name: "debug", manager: "kubectl-debug", keeps: &[] },
    Copy { name: "restored", manager: "a-backup", keeps: &["labels", "annotations"] },
    Copy {
        name: "copied",
        manager: "kubectl-create",
        keeps: &["labels", "annotations", "ownerReferences", "managedFields"],
    },
];

/// Brings a Pod back as Velero does: it creates it without its owners, and then gives it the entries of the backup, which is a day old.
async fn restore(ns: &ManagedNamespace, pod: &Pod, name: &'static str) -> Pod {
    let copy = copy_of(pod, &Copy { name, manager: "velero-server", keeps: &["labels", "annotations"] });
    create_as(ns, "velero-server", copy).await;
    let mut entries = json!(pod.managed_fields());
    entries.as_array_mut().unwrap().iter_mut().for_each(|entry| entry["time"] = json!("2026-01-15T07:00:00Z"));
    let patch = Patch::Merge(json!({ "metadata": { "managedFields": entries } }));
    let parameters = PatchParams { field_manager: Some("velero-server".into()), ..PatchParams::default() };
    ns.api::<Pod>().patch(name, &parameters, &patch).await.unwrap()
}

async fn create_as(ns: &ManagedNamespace, manager: &str, pod: Value) -> Pod {
    let parameters = PostParams { field_manager: Some(manager.into()), ..PostParams::default() };
    ns.api::<Pod>().create(&parameters, &serde_json::from_value(pod).unwrap()).await.unwrap()
}

fn copy_of(pod: &Pod, Copy { name, manager: _, keeps }: &Copy) -> Value {
    let pod = json!(pod);
    let mut copy = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": pod["spec"] });
    for field in *keeps {
        copy["metadata"][field] = pod["metadata"][field].clone();
    }
    copy
}

fn message(vm: &VirtualMachine) -> String {
    condition(vm, "Ready").unwrap().2
}

#[tokio::test]
async fn a_copy_of_the_vms_pod_is_said_and_never_deleted() {
    let ns = ns("copies").await;
    for copy in &COPIES {
        let name = format!("vm-{}", copy.name);
        let pod = up(&ns, &name, on_node).await;
        let made = create_as(&ns, copy.manager, copy_of(&pod, copy)).await;
        // Both can write to its disks.
        let vm = ns.vm_with_reason(&name, "ClaimInUse").await;
        assert!(message(&vm).starts_with(&format!("Pod {} mounts a claim of this VM", copy.name)), "{}", message(&vm));
        assert_eq!(vm.status.as_ref().unwrap().phase.as_deref(), Some("Running"));
        ns.wait_for_event(&name, "ClaimInUse").await;
        // The VM's own Pod is stopped, and the copy is not.
        set_state(&ns, &name, "Stopped").await;
        ns.pod_when(&name, "going", |going| is_going(going) && going.uid() == pod.uid()).await;
        ns.remove_pod(&name).await;
        ns.vm_with_reason(&name, "StoppedAsRequested").await;
        // It does not start beside it.
        set_state(&ns, &name, "Running").await;
        let vm = ns.vm_with_reason(&name, "ClaimInUse").await;
        assert!(message(&vm).starts_with(&format!("Pod {} mounts a claim", copy.name)), "{}", message(&vm));
        let found = ns.api::<Pod>().get(copy.name).await.unwrap();
        assert_eq!((found.uid(), is_going(&found)), (made.uid(), false));
        assert!(ns.api::<Pod>().get_opt(&name).await.unwrap().is_none());
        ns.remove_pod(copy.name).await;
        ns.pod_when(&name, "made", |_| true).await;
    }
}

#[tokio::test]
async fn a_pod_that_velero_brings_back_is_never_deleted_and_said() {
    let ns = ns("velero").await;
    let pod = up(&ns, "apple", on_node).await;
    // Beside the running one.
    let beside = restore(&ns, &pod, "apple-x").await;
    ns.vm_with_reason("apple", "ClaimInUse").await;
    set_state(&ns, "apple", "Stopped").await;
    ns.pod_when("apple", "going", |going| is_going(going) && going.uid() == pod.uid()).await;
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    // For a VM that is stopped.
    let back = restore(&ns, &pod, "apple").await;
    ns.patch_vm("apple", json!({ "metadata": { "labels": { "tier": "web" } } })).await;
    set_state(&ns, "apple", "Running").await;
    ns.vm_when("apple", "refused", |vm| {
        condition(vm, "Ready").is_some_and(|ready| ["NameTaken", "ClaimInUse"].contains(&ready.1.as_str()))
    })
    .await;
    for made in [&beside, &back] {
        let found = ns.api::<Pod>().get(&made.name_any()).await.unwrap();
        assert_eq!((found.uid(), is_going(&found)), (made.uid(), false));
    }
    ns.remove_pod("apple").await;
    ns.remove_pod("apple-x").await;
    ns.pod_when("apple", "made", |made| made.uid() != back.uid()).await;
}

#[tokio::test]
async fn a_pod_of_others_with_the_name_and_the_labels_of_the_vms_is_not_taken_over() {
    let ns = ns("impostor").await;
    for copy in &COPIES[..2] {
        let name = format!("vm-{}", copy.name);
        let pod = up(&ns, &name, on_node).await;
        set_state(&ns, &name, "Stopped").await;
        ns.pod_when(&name, "going", is_going).await;
        ns.remove_pod(&name).await;
        ns.vm_with_reason(&name, "StoppedAsRequested").await;
        let mut impostor = copy_of(&pod, copy);
        impostor["metadata"]["name"] = json!(name);
        let made = create_as(&ns, copy.manager, impostor).await;
        set_state(&ns, &name, "Running").await;
        let vm = ns.vm_when(&name, "refused", |vm| {
            condition(vm, "Ready").is_some_and(|ready| ["NameTaken", "ClaimInUse"].contains(&ready.1.as_str()))
        });
        let vm = vm.await;
        assert!(message(&vm).starts_with(&format!("Pod {name} ")), "{}", message(&vm));
        assert_eq!(vm.status.unwrap().created, Some(false), "it is not the VM's");
        set_state(&ns, &name, "Stopped").await;
        ns.vm_with_reason(&name, "StoppedAsRequested").await;
        let found = ns.api::<Pod>().get(&name).await.unwrap();
        assert_eq!((found.uid(), is_going(&found)), (made.uid(), false));
        ns.remove_pod(&name).await;
        set_state(&ns, &name, "Running").await;
        ns.pod_when(&name, "made", |pod| pod.uid() != made.uid()).await;
    }
}

#[tokio::test]
async fn a_pod_that_is_given_to_another_vm_is_still_the_vms() {
    let ns = ns("given").await;
    let pear = ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.vm_with_reason("pear", "StoppedAsRequested").await;
    let owners = json!([{
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "pear", "uid": pear.uid(), "controller": true,
    }]);
    for (name, labels) in [("owner", json!({})), ("both", json!({ "app.kubernetes.io/instance": "pear" }))] {
        let pod = up(&ns, name, on_node).await;
        let patch = json!({ "metadata": { "ownerReferences": owners, "labels": labels } });
        ns.api::<Pod>().patch(name, &PatchParams::default(), &Patch::Merge(&patch)).await.unwrap();
        // It gets its owner back.
        let uid = ns.api::<VirtualMachine>().get(name).await.unwrap().uid();
        let found = ns
            .pod_when(name, "the VM's again, or going", |pod| {
                is_going(pod) || pod.owner_references().iter().all(|owner| Some(&owner.uid) == uid.as_ref())
            })
            .await;
        assert_eq!((found.uid(), is_going(&found)), (pod.uid(), false));
        ns.vm_with_reason(name, "Running").await;
        assert_eq!(ns.vm_with_reason("pear", "StoppedAsRequested").await.status.unwrap().created, Some(false));
        set_state(&ns, name, "Stopped").await;
        ns.pod_when(name, "going", |going| is_going(going) && going.uid() == pod.uid()).await;
        ns.remove_pod(name).await;
        ns.vm_with_reason(name, "StoppedAsRequested").await;
    }
}

#[tokio::test]
async fn a_pod_of_a_persons_job_with_the_vms_labels_is_not_the_vms() {
    let ns = ns("job").await;
    let job = json!({
        "apiVersion": "batch/v1", "kind": "Job", "metadata": { "name": "nightly" },
        "spec": { "template": { "metadata": { "labels": {} }, "spec": {
            "restartPolicy": "Never", "containers": [{ "name": "vm-runner", "image": "x" }],
        } } },
    });
    ns.namespace.apply(&job.to_string());
    let uid = ns.namespace.kubectl(&["get", "job", "nightly", "-o", "jsonpath={.metadata.uid}"]);
    let labels = json!({
        "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "apple",
        "app.kubernetes.io/component": "vm-runner", "app.kubernetes.io/managed-by": "vm-operator",
    });
    let owners =
        json!([{ "apiVersion": "batch/v1", "kind": "Job", "name": "nightly", "uid": uid, "controller": true }]);
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "nightly-x", "labels": labels, "ownerReferences": owners },
        "spec": { "nodeName": NODE, "containers": [{ "name": "vm-runner", "image": "x" }] },
    });
    let made = create_as(&ns, "kube-controller-manager", pod).await;
    let own = up(&ns, "apple", on_node).await;
    set_state(&ns, "apple", "Stopped").await;
    ns.pod_when("apple", "going", |going| is_going(going) && going.uid() == own.uid()).await;
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    let found = ns.api::<Pod>().get("nightly-x").await.unwrap();
    assert_eq!((found.uid(), is_going(&found)), (made.uid(), false));
}

/// A tool resets `managedFields`, and the API server records no update any more.
#[tokio::test]
async fn a_vm_whose_managed_fields_are_reset_obeys_its_state() {
    let ns = ns("reset").await;
    for name in ["waits", "at-once"] {
        let pod = up(&ns, name, on_node).await;
        let reset = || {
            Patch::Json::<()>(
                serde_json::from_value(json!([{ "op": "replace", "path": "/metadata/managedFields", "value": [{}] }]))
                    .unwrap(),
            )
        };
        let vms: Api<VirtualMachine> = ns.api();
        vms.patch(name, &PatchParams::default(), &reset()).await.unwrap();
        ns.api::<Pod>().patch(name, &PatchParams::default(), &reset()).await.unwrap();
        if name == "waits" {
            ns.vm_when(name, "recorded again", |vm| {
                vm.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some("vm-operator-status"))
            })
            .await;
        }
        set_state(&ns, name, "Stopped").await;
        ns.pod_when(name, "going", |going| is_going(going) && going.uid() == pod.uid()).await;
        ns.remove_pod(name).await;
        let vm = ns.vm_with_reason(name, "StoppedAsRequested").await;
        assert_eq!(condition(&vm, "PowerUnmanaged"), None);
        set_state(&ns, name, "Running").await;
        ns.pod_when(name, "a new one", |new| new.uid() != pod.uid()).await;
    }
}

/// A VM without `state` keeps its power.
#[tokio::test]
async fn a_vm_without_a_state_whose_managed_fields_are_reset_runs_on() {
    let ns = ns("reset-without").await;
    let pod = up(&ns, "apple", on_node).await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": null } } })).await;
    ns.vm_when("apple", "unmanaged", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
    let reset = json!([{ "op": "replace", "path": "/metadata/managedFields", "value": [{}] }]);
    let reset = Patch::Json::<()>(serde_json::from_value(reset).unwrap());
    ns.api::<VirtualMachine>().patch("apple", &PatchParams::default(), &reset).await.unwrap();
    ns.vm_when("apple", "recorded again", |vm| {
        vm.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some("vm-operator-status"))
    })
    .await;
    ns.patch_vm("apple", json!({ "metadata": { "labels": { "tier": "web" } } })).await;
    let found = ns.pod_when("apple", "labelled", |pod| pod.labels().contains_key("tier")).await;
    assert_eq!((found.uid(), is_going(&found)), (pod.uid(), false));
}

/// What people copy of a VM's objects, and what they make with its labels.
#[tokio::test]
async fn objects_of_people_with_the_vms_labels_stay_theirs() {
    let ns = ns("passive").await;
    let labels = json!({
        "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "apple", "app.kubernetes.io/managed-by": "vm-operator",
    });
    let theirs = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "apple", "labels": labels }, "data": { "a": "b" },
    });
    ns.namespace.apply(&theirs.to_string());
    let mut secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "mine", "labels": labels },
        "stringData": { "display-password": "hello" },
    });
    secret["metadata"]["labels"]["app.kubernetes.io/component"] = json!("display-secret");
    ns.namespace.apply(&secret.to_string());
    ns.create_vm("apple", on_node).await;
    let vm = ns.vm_with_reason("apple", "NameTaken").await;
    assert!(message(&vm).starts_with("ConfigMap apple exists"), "{}", message(&vm));
    let maps: Api<ConfigMap> = ns.api();
    assert_eq!(maps.get("apple").await.unwrap().data.unwrap().into_keys().collect::<Vec<_>>(), ["a"]);
    ns.namespace.kubectl(&["delete", "configmap", "apple"]);
    ns.vm_with_reason("apple", "Starting").await;
    assert!(ns.api::<Secret>().get_opt("apple-display-secret").await.unwrap().is_none(), "the person's is used");
    let volumes = json!(ns.api::<Pod>().get("apple").await.unwrap().spec.unwrap().volumes).to_string();
    assert!(volumes.contains(r#""name":"mine""#), "{volumes}");

    // A copy with everything, its owner included.
    let mut copy = maps.get("apple").await.unwrap();
    (copy.metadata.name, copy.metadata.uid, copy.metadata.resource_version) = (Some("copy".into()), None, None);
    let parameters = PostParams { field_manager: Some("kubectl-create".into()), ..PostParams::default() };
    let copy = maps.create(&parameters, &copy).await.unwrap();
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    ns.patch_vm("apple", json!({ "metadata": { "labels": { "tier": "web" } } })).await;
    ns.vm_when("apple", "reconciled", |_| true).await;
    ns.pod_when("apple", "labelled", |pod| pod.labels().contains_key("tier")).await;
    assert_eq!(maps.get("copy").await.unwrap().uid(), copy.uid());
}
