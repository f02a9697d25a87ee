//! Start, stop and restart, and that two Pods of a VM never run at once. The tests play the runner and the kubelet. A Pod that
//! is bound to a node is not gone until its kubelet removes it, so these Pods are bound to a node without a kubelet.

mod deletion;
mod identity;
mod unstarted;
mod whose;

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, SERVICES, condition, vm_manifest},
};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::core::v1::{ConfigMap, Event, Node, PersistentVolumeClaim, Pod, Secret},
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, Patch, PatchParams, PropagationPolicy},
};
use serde_json::{Value, json};
use vm_operator::{
    api::{PowerState, VirtualMachine, conditions},
    object::{FORCE_STOP_ANNOTATION, GUEST_SHUTDOWN_ANNOTATION, RESTARTED_ANNOTATION},
    power,
};

const NODE: &str = "played";

/// A namespace with a manager, and a node without a kubelet.
async fn ns(test: &str) -> ManagedNamespace {
    let ns = ManagedNamespace::new(test).await;
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": NODE } });
    Api::<Node>::all(ns.client.clone()).patch(NODE, &PatchParams::apply("test"), &Patch::Apply(&node)).await.unwrap();
    ns
}

fn on_node(vm: &mut Value) {
    vm["spec"]["nodeName"] = json!(NODE);
}

fn on_node_and_stays_down(vm: &mut Value) {
    on_node(vm);
    vm["spec"]["guestShutdownStops"] = json!(true);
}

async fn set_state(ns: &ManagedNamespace, name: &str, state: &str) {
    ns.patch_vm(name, json!({ "spec": { "vm": { "state": state } } })).await;
}

async fn annotate(ns: &ManagedNamespace, name: &str, annotation: &str, value: &str) {
    ns.patch_vm(name, json!({ "metadata": { "annotations": { annotation: value } } })).await;
}

/// Creates a VM, reports that its guest runs, and returns its Pod.
async fn up(ns: &ManagedNamespace, name: &str, edit: impl FnOnce(&mut Value)) -> Pod {
    ns.create_vm(name, edit).await;
    ns.vm_with_reason(name, "Starting").await;
    ns.report(name, true, "Started").await;
    ns.vm_with_reason(name, "Running").await;
    ns.api::<Pod>().get(name).await.unwrap()
}

fn is_going(pod: &Pod) -> bool {
    pod.metadata.deletion_timestamp.is_some()
}

#[tokio::test]
async fn a_guest_that_shuts_down_stays_down_and_the_manager_sets_the_state_to_stopped() {
    let ns = ns("guest-shutdown").await;
    up(&ns, "apple", on_node_and_stays_down).await;
    ns.report("apple", false, "GuestShutdown").await;
    ns.pod_when("apple", "going", is_going).await;
    let is_halted = |vm: &VirtualMachine| vm.status.as_ref().unwrap().halted.is_some();
    let halted = ns.vm_when("apple", "halted", is_halted).await.status.unwrap().halted.unwrap();
    ns.remove_pod("apple").await;
    let vm = ns.vm_when("apple", "stopped", |vm| vm.spec.vm.state == PowerState::Stopped).await;
    assert!(vm.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some("vm-operator")));
    assert_eq!(vm.annotations()[GUEST_SHUTDOWN_ANNOTATION], power::stamp(&halted), "written together with the state");
    ns.wait_for_event("apple", "GuestShutdown").await;
    assert!(ns.manager.log().contains("wrote the spec"));
    let vm = ns.vm_with_reason("apple", "StoppedAsRequested").await;
    assert!(vm.status.unwrap().halted.is_none_or(|halted| halted.released));
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());

    set_state(&ns, "apple", "Running").await;
    ns.vm_with_reason("apple", "Starting").await;
}

#[tokio::test]
async fn a_guest_that_shuts_down_stays_down_though_git_applies_running() {
    let ns = ns("latch").await;
    let mut manifest = vm_manifest("apple");
    on_node_and_stays_down(&mut manifest);
    let git = PatchParams::apply("git").force();
    let vms: Api<VirtualMachine> = ns.api();
    vms.patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    ns.report("apple", false, "GuestShutdown").await;
    ns.pod_when("apple", "going", is_going).await;
    ns.remove_pod("apple").await;
    let vm = ns.vm_with_reason("apple", "GuestShutdown").await;
    let (status, _, message) = condition(&vm, "Ready").unwrap();
    assert_eq!(status, "True");
    assert!(message.contains(RESTARTED_ANNOTATION), "{message}");
    assert_eq!(vm.status.unwrap().halted.unwrap().by, "guest");
    ns.wait_for_event("apple", "GuestShutdown").await;

    // Git says Running again and again; a change of something else is no start either.
    manifest["spec"]["vm"]["currentCpus"] = json!(1);
    for _ in 0..3 {
        vms.patch("apple", &git, &Patch::Apply(&manifest)).await.unwrap();
    }
    let vm = ns.vm_with_reason("apple", "GuestShutdown").await;
    assert_eq!(vm.spec.vm.state, PowerState::Running);
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());

    annotate(&ns, "apple", RESTARTED_ANNOTATION, "2026-11-21T10:00:00Z").await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert!(vm.status.unwrap().halted.is_none_or(|halted| halted.released));
}

#[tokio::test]
async fn a_report_about_an_earlier_pod_is_ignored() {
    let ns = ns("stale").await;
    up(&ns, "apple", on_node_and_stays_down).await;
    let old = ns.api::<Pod>().get("apple").await.unwrap();
    ns.api::<Pod>().delete("apple", &DeleteParams::default()).await.unwrap();
    ns.vm_with_reason("apple", "Restarting").await;
    ns.remove_pod("apple").await;
    ns.pod_when("apple", "a new one", |pod| pod.uid() != old.uid()).await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(condition(&vm, "Running").unwrap().0, "False", "the old runner's word is gone");
    let status = vm.status.unwrap();
    assert_eq!((status.ready, status.runner.cpus), (Some(false), Some(0)));
}

#[tokio::test]
async fn the_restart_annotation_replaces_the_pod_once() {
    let ns = ns("restart").await;
    let first = up(&ns, "apple", on_node).await;
    annotate(&ns, "apple", RESTARTED_ANNOTATION, "2026-11-21T10:00:00Z").await;
    ns.pod_when("apple", "going", is_going).await;
    ns.vm_with_reason("apple", "Restarting").await;
    ns.wait_for_event("apple", "Restarting").await;
    ns.remove_pod("apple").await;
    let second = ns.pod_when("apple", "a new one", |pod| pod.uid() != first.uid()).await;
    assert_eq!(second.annotations()[RESTARTED_ANNOTATION], "2026-11-21T10:00:00Z");
    // A change that makes the manager look again.
    ns.patch_vm("apple", json!({ "metadata": { "labels": { "tier": "web" } } })).await;
    let pod = ns.pod_when("apple", "labelled", |pod| pod.labels().contains_key("tier")).await;
    assert_eq!((pod.uid(), is_going(&pod)), (second.uid(), false));
}

/// As `kubectl wait --for=condition=Booted` sees it: a condition of an older generation does not count.
#[tokio::test]
async fn a_wait_for_the_guest_after_a_change_and_a_restart_does_not_match_the_former_guest() {
    let ns = ns("guest-generation").await;
    let first = up(&ns, "apple", on_node).await;
    let of_guest = |vm: &VirtualMachine| {
        let of = |type_: &str| conditions::find(&vm.status.as_ref()?.conditions, type_)?.observed_generation;
        [of("Running"), of("Booted")]
    };
    let wait = |state: &str| {
        let condition = format!("--for=condition=Booted={state}");
        ns.namespace.kubectl(&["wait", "vm/apple", &condition, "--timeout=60s"])
    };
    let seen = async |generation| {
        ns.vm_when("apple", "seen", |vm| vm.status.as_ref().unwrap().observed_generation == Some(generation)).await
    };
    assert_eq!(of_guest(&ns.vm_when("apple", "up", |vm| of_guest(vm) == [Some(1); 2]).await), [Some(1); 2]);
    // A change that the guest has as soon as the manager has seen it.
    ns.patch_vm("apple", json!({ "spec": { "permissions": [] } })).await;
    ns.vm_when("apple", "the same guest", |vm| of_guest(vm) == [vm.metadata.generation; 2]).await;
    wait("true");
    // One that waits for the next start.
    ns.patch_vm("apple", json!({ "spec": { "nodeSelector": { "disk": "ssd" } } })).await;
    let changed = ns.api::<VirtualMachine>().get("apple").await.unwrap().metadata.generation.unwrap();
    assert_eq!(of_guest(&seen(changed).await), [Some(changed - 1); 2]);
    annotate(&ns, "apple", RESTARTED_ANNOTATION, "2026-11-21T10:00:00Z").await;
    let vm = ns.vm_with_reason("apple", "Restarting").await;
    assert_eq!((of_guest(&vm), condition(&vm, "Booted").unwrap().0.as_str()), ([Some(changed - 1); 2], "True"));
    ns.remove_pod("apple").await;
    ns.pod_when("apple", "a new one", |pod| pod.uid() != first.uid()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_when("apple", "the new guest", |vm| of_guest(vm) == [Some(changed); 2]).await;
    wait("true");
}

#[tokio::test]
async fn start_stop_start_ends_running_with_one_pod() {
    let ns = ns("quick").await;
    let first = up(&ns, "apple", on_node).await;
    for state in ["Stopped", "Running", "Stopped", "Running", "Running"] {
        set_state(&ns, "apple", state).await;
    }
    let pod = ns.api::<Pod>().get("apple").await.unwrap();
    assert_eq!(pod.uid(), first.uid());
    if is_going(&pod) {
        ns.remove_pod("apple").await;
    }
    let pod = ns.pod_when("apple", "there to stay", |pod| !is_going(pod)).await;
    // What was said while the first one was going is not the last word.
    let vm = ns
        .vm_when("apple", "wanted up", |vm| {
            vm.status.as_ref().unwrap().power == Some(PowerState::Running)
                && condition(vm, "Ready")
                    .is_some_and(|(_, reason, _)| ["Running", "Starting"].contains(&reason.as_str()))
        })
        .await;
    assert_eq!(pod.owner_references()[0].uid, vm.uid().unwrap());
}

#[tokio::test]
async fn the_manager_waits_for_a_pod_that_is_being_deleted_and_a_person_can_force_its_end() {
    let ns = ns("fencing").await;
    let pod = up(&ns, "apple", on_node).await;
    set_state(&ns, "apple", "Stopped").await;
    let going = ns.pod_when("apple", "going", is_going).await;
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(915));
    let vm = ns.vm_with_reason("apple", "Stopping").await;
    assert_eq!(condition(&vm, "Running").unwrap().0, "True");
    let status = vm.status.unwrap();
    assert_eq!((status.phase.as_deref(), status.ready), (Some("Stopping"), Some(true)));

    annotate(&ns, "apple", FORCE_STOP_ANNOTATION, "another Pod").await;
    annotate(&ns, "apple", FORCE_STOP_ANNOTATION, &pod.uid().unwrap()).await;
    let short = ns.pod_when("apple", "going soon", |pod| pod.metadata.deletion_grace_period_seconds < Some(30)).await;
    assert_eq!(short.uid(), pod.uid());
    ns.wait_for_event("apple", "Forced").await;
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    // The annotation speaks of one Pod, not of the next.
    set_state(&ns, "apple", "Running").await;
    ns.vm_with_reason("apple", "Starting").await;
    set_state(&ns, "apple", "Stopped").await;
    let going = ns.pod_when("apple", "going", is_going).await;
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(915));
}

#[tokio::test]
async fn a_forced_stop_that_was_asked_for_before_the_stop_or_for_another_pod_is_ignored_and_that_is_said() {
    let ns = ns("forced-early").await;
    let is_ignored = |uid: &str| {
        let uid = uid.to_owned();
        move |vm: &VirtualMachine| vm.status.as_ref().unwrap().force_stop_ignored.as_ref() == Some(&uid)
    };
    let pod = up(&ns, "apple", on_node).await.uid().unwrap();
    annotate(&ns, "apple", FORCE_STOP_ANNOTATION, &pod).await;
    ns.vm_when("apple", "ignored", is_ignored(&pod)).await;
    let note = ns.wait_for_event("apple", "ForceStopIgnored").await.message.unwrap();
    assert!(note.contains("the VM should run"), "{note}");
    set_state(&ns, "apple", "Stopped").await;
    let going = ns.pod_when("apple", "going", is_going).await;
    assert_eq!(going.metadata.deletion_grace_period_seconds, Some(915));
    ns.vm_with_reason("apple", "Stopping").await;
    // Set again, as the event says.
    ns.patch_vm("apple", json!({ "metadata": { "annotations": { FORCE_STOP_ANNOTATION: null } } })).await;
    ns.vm_when("apple", "without it", |vm| vm.status.as_ref().unwrap().force_stop_ignored.is_none()).await;
    annotate(&ns, "apple", FORCE_STOP_ANNOTATION, &pod).await;
    ns.pod_when("apple", "going soon", |pod| pod.metadata.deletion_grace_period_seconds < Some(30)).await;

    up(&ns, "pear", on_node).await;
    set_state(&ns, "pear", "Stopped").await;
    ns.pod_when("pear", "going", is_going).await;
    annotate(&ns, "pear", FORCE_STOP_ANNOTATION, &pod).await;
    ns.vm_when("pear", "ignored", is_ignored(&pod)).await;
    let note = ns.wait_for_event("pear", "ForceStopIgnored").await.message.unwrap();
    assert!(note.contains("not the UID"), "{note}");
}

#[tokio::test]
async fn a_node_that_does_not_respond_is_named_and_no_second_pod_is_started() {
    let ns = ns("overdue").await;
    let pod = up(&ns, "apple", on_node).await;
    // What the node controller says of the Pods of a node that it does not hear any more, and the kubelet when it is back.
    let seen = |ready: &str| json!({ "conditions": [{ "type": "Ready", "status": ready }, { "type": "ContainersReady", "status": "True" }] });
    ns.patch_pod_status("apple", seen("False")).await;
    let vm = ns.vm_with_reason("apple", "NodeNotResponding").await;
    let status = vm.status.unwrap();
    assert_eq!((status.phase.as_deref(), status.ready), (Some("Unknown"), Some(false)));
    ns.patch_pod_status("apple", seen("True")).await;
    ns.vm_with_reason("apple", "Running").await;
    let soon = DeleteParams { grace_period_seconds: Some(1), ..DeleteParams::default() };
    ns.api::<Pod>().delete("apple", &soon).await.unwrap();
    ns.vm_with_reason("apple", "Restarting").await;
    // Only when a kubelet would long have ended it; the manager looks again by itself.
    let vms: Api<VirtualMachine> = ns.api();
    let nodes: Api<Node> = Api::all(ns.client.clone());
    let message_with = async |status: &str, expected: &str, words: &str| {
        eventually(words, 4 * LIMIT, async || {
            let heartbeat =
                json!({ "type": "Ready", "status": status, "lastHeartbeatTime": Timestamp::now().to_string() });
            let heartbeat = json!({ "status": { "conditions": [heartbeat] } });
            nodes.patch_status(NODE, &PatchParams::default(), &Patch::Strategic(&heartbeat)).await.unwrap();
            let (_, reason, message) = condition(&vms.get("apple").await.unwrap(), "Ready")?;
            (reason == expected && message.contains(words)).then_some(message)
        })
        .await
    };
    let unknown = "the manager can't find out whether the node answers";
    assert!(!message_with("True", "PodNotEnded", unknown).await.contains("taint"));
    // With the optional right.
    ns.namespace.apply(include_str!("../../deploy/node-reader/role.yaml"));
    let account = json!({ "kind": "ServiceAccount", "name": "vm-operator", "namespace": ns.namespace.name() });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
        "metadata": { "name": format!("vm-operator-node-reader-{}", ns.namespace.name()) },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "vm-operator-node-reader" },
        "subjects": [account],
    });
    ns.namespace.apply(&binding.to_string());
    assert!(!message_with("True", "PodNotEnded", "node played answers").await.contains("taint"));
    let message = message_with("Unknown", "NodeNotResponding", "does not answer").await;
    assert!(message.contains("Pod apple should have ended at ") && message.contains("taint node played "), "{message}");
    let events: Api<Event> = ns.api();
    let event = eventually("an event of that", LIMIT, async || {
        let events = events.list(&Default::default()).await.unwrap();
        events.into_iter().find(|event| event.message.as_deref() == Some(&message))
    })
    .await;
    assert_eq!((event.type_.as_deref(), event.reason.as_deref()), (Some("Warning"), Some("NodeNotResponding")));
    let pods = ns.api::<Pod>().list(&Default::default()).await.unwrap().items;
    assert_eq!(pods.iter().map(ResourceExt::uid).collect::<Vec<_>>(), [pod.uid()]);
    ns.remove_pod("apple").await;
    ns.vm_with_reason("apple", "Starting").await;
}

#[tokio::test]
async fn a_pod_that_fails_is_recreated_with_back_off_and_the_status_names_the_next_try() {
    let ns = ns("failed").await;
    let first = up(&ns, "apple", on_node).await;
    ns.patch_pod_status(
        "apple",
        json!({ "phase": "Failed", "reason": "Evicted", "message": "the node was low on memory" }),
    )
    .await;
    let vm = ns.vm_when("apple", "failed", |vm| vm.status.as_ref().unwrap().retry.is_some()).await;
    let retry = vm.status.as_ref().unwrap().retry.clone().unwrap();
    assert_eq!((retry.count, Some(retry.pod_uid)), (1, first.uid()));
    assert_eq!(vm.status.as_ref().unwrap().phase.as_deref(), Some("Failed"));
    let (_, _, message) = condition(&vm, "Ready").unwrap();
    let evicted = "has evicted Pod apple: the node was low on memory -> ";
    assert!(message.contains(evicted) && message.contains("; try 2 is at "), "{message}");
    let note = ns.wait_for_event("apple", "PodFailed").await.message;
    assert!(note.as_deref().is_some_and(|note| note.contains("; try 2 is at 20")), "{note:?}");
    ns.wait_for_description("apple", &["PodFailed", evicted, "; try 2 is at 20"]).await;
    assert_eq!((condition(&vm, "Running").unwrap().0.as_str(), vm.status.unwrap().ready), ("False", Some(false)));
    // Where it had ended already, the API server does not wait for the kubelet.
    let second = ns.pod_when("apple", "a new one", |pod| pod.uid() != first.uid()).await;
    ns.vm_with_reason("apple", "Starting").await;

    // The pause doubles, until one lives for long enough.
    let failed = async |pod: &Pod, lived: i64| {
        let end = pod.metadata.creation_timestamp.as_ref().unwrap().0 + SignedDuration::from_secs(lived);
        let state = json!({ "terminated": { "exitCode": 1, "finishedAt": end.to_string() } });
        let container = json!({ "name": "vm-runner", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state });
        ns.patch_pod_status("apple", json!({ "phase": "Failed", "containerStatuses": [container] })).await;
        let vm = ns
            .vm_when("apple", "failed again", |vm| {
                vm.status
                    .as_ref()
                    .unwrap()
                    .retry
                    .as_ref()
                    .is_some_and(|retry| Some(&retry.pod_uid) == pod.metadata.uid.as_ref())
            })
            .await;
        let retry = vm.status.unwrap().retry.unwrap();
        (retry.count, retry.next.0.duration_since(end))
    };
    let (count, pause) = failed(&second, 1).await;
    assert_eq!(count, 2);
    assert!(pause > SignedDuration::from_secs(10), "{pause:?}");
    let third = ns.pod_when("apple", "a third one", |pod| pod.uid() != second.uid()).await;
    ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(failed(&third, 601).await.0, 1);
}

#[tokio::test]
async fn the_ready_condition_names_why_a_vm_does_not_start() {
    let ns = ns("causes").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let container = |state: Value| {
        json!({ "containerStatuses": [{
        "name": "vm-runner", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state,
    }] })
    };
    for (status, reason, word) in [
        (
            json!({ "conditions": [{ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims" }] }),
            "Unschedulable",
            "unbound",
        ),
        (json!({ "conditions": null }), "Starting", "waiting"),
        (
            container(json!({ "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } })),
            "ImagePullFailed",
            "no such image",
        ),
        (
            container(json!({ "terminated": { "exitCode": 1, "message": "no such machine type" } })),
            "RunnerFailed",
            "no such machine type",
        ),
    ] {
        ns.patch_pod_status("apple", status).await;
        let vm = ns.vm_with_reason("apple", reason).await;
        let (_, _, message) = condition(&vm, "Ready").unwrap();
        assert!(message.contains(word), "{message}");
    }
    ns.wait_for_event("apple", "RunnerFailed").await;
}

#[tokio::test]
async fn a_pod_of_somebody_else_is_not_taken_over() {
    let ns = ns("stranger").await;
    let theirs = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "apple" },
        "spec": { "containers": [{ "name": "x", "image": "x" }] },
    });
    ns.namespace.apply(&theirs.to_string());
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "NameTaken").await;
    assert_eq!(
        condition(&vm, "Ready").unwrap().2,
        "Pod apple exists and does not belong to this VM: delete or rename one of the two"
    );
    assert_eq!(ns.api::<Pod>().get("apple").await.unwrap().spec.unwrap().containers[0].name, "x");
}

#[tokio::test]
async fn removing_the_state_from_git_stops_no_vm() {
    let ns = ns("unmanaged").await;
    let vms: Api<VirtualMachine> = ns.api();
    let git = PatchParams::apply("git").force();
    let server_side = async |manifest: &Value| drop(vms.patch("apple", &git, &Patch::Apply(manifest)).await.unwrap());
    stays_up_without_state(&ns, "apple", server_side).await;
}

#[tokio::test]
async fn removing_the_state_from_a_kubectl_manifest_stops_no_vm() {
    let ns = ns("unmanaged-kubectl").await;
    stays_up_without_state(&ns, "pear", async |manifest: &Value| drop(ns.namespace.apply(&manifest.to_string()))).await;
}

async fn stays_up_without_state(ns: &ManagedNamespace, name: &str, apply: impl AsyncFn(&Value)) {
    let mut manifest = vm_manifest(name);
    on_node(&mut manifest);
    apply(&manifest).await;
    ns.vm_with_reason(name, "Starting").await;
    ns.report(name, true, "Started").await;
    ns.vm_with_reason(name, "Running").await;
    let pod = ns.api::<Pod>().get(name).await.unwrap();
    manifest["spec"]["vm"].as_object_mut().unwrap().remove("state");
    apply(&manifest).await;
    let vm = ns.vm_when(name, "PowerUnmanaged", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
    assert_eq!((vm.spec.vm.state, condition(&vm, "Ready").unwrap().1.as_str()), (PowerState::Stopped, "Running"));
    ns.wait_for_event(name, "PowerUnmanaged").await;
    let same = ns.api::<Pod>().get(name).await.unwrap();
    assert_eq!((same.uid(), is_going(&same)), (pod.uid(), false));

    // Made again without it, it is adopted as it is.
    ns.delete_and_orphan(name).await;
    apply(&manifest).await;
    let vm = ns.vm_when(name, "PowerUnmanaged", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
    let adopted = ns
        .pod_when(name, "owned again", |pod| {
            pod.owner_references().iter().any(|owner| Some(&owner.uid) == vm.uid().as_ref())
        })
        .await;
    assert_eq!((adopted.uid(), is_going(&adopted)), (pod.uid(), false));

    // As the condition says.
    set_state(ns, name, "Running").await;
    ns.vm_when(name, "managed", |vm| condition(vm, "PowerUnmanaged").is_none()).await;
    set_state(ns, name, "Stopped").await;
    ns.pod_when(name, "going", is_going).await;
}

#[tokio::test]
async fn pending_changes_list_what_a_restart_would_change() {
    let ns = ns("pending").await;
    let image = up(&ns, "apple", on_node).await.spec.unwrap().containers.remove(0).image;
    ns.patch_vm(
        "apple",
        json!({ "spec": { "image": { "source": "example.org/other:1" }, "nodeSelector": { "disk": "fast" } } }),
    )
    .await;
    let vm = ns.vm_when("apple", "RestartRequired", |vm| condition(vm, "RestartRequired").is_some()).await;
    let pending = vm.status.unwrap().pending_changes;
    let paths: Vec<&str> = pending.iter().map(|change| change.path.as_str()).collect();
    assert_eq!(paths, ["objects/Pod/spec.containers[vm-runner].image", "objects/Pod/spec.nodeSelector"]);
    assert_eq!(pending[0].current, Some(json!(image)));
    assert_eq!(pending[0].wanted, Some(json!("example.org/other:1")));
    assert_eq!(pending[0].reason, "the manager does not change a Pod that exists");
    // No text in a column has a space here.
    let wide = ns.namespace.kubectl(&["get", "vm", "apple", "--output=wide"]);
    assert!(wide.contains("   SET") && wide.contains("   TEMPLATES   RESTART   REASON"), "{wide}");
    assert!(wide.trim_end().ends_with("   True      Running"), "{wide}");
    ns.patch_vm("apple", json!({ "spec": { "image": null, "nodeSelector": null } })).await;
    let vm = ns.vm_when("apple", "nothing pending", |vm| condition(vm, "RestartRequired").is_none()).await;
    assert_eq!(vm.status.unwrap().pending_changes, []);
}

#[tokio::test]
async fn a_vm_that_no_node_can_take_starts_when_what_was_in_the_way_is_removed() {
    let ns = ManagedNamespace::new("unschedulable").await;
    let selector = json!({ "disk": "fast", "zone": "nowhere" });
    ns.create_vm("apple", |vm| vm["spec"]["nodeSelector"] = selector.clone()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let scheduled =
        json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes" });
    ns.patch_pod_status("apple", json!({ "conditions": [scheduled] })).await;
    ns.vm_with_reason("apple", "Unschedulable").await;
    let first = ns.api::<Pod>().get("apple").await.unwrap();
    ns.patch_vm("apple", json!({ "spec": { "nodeSelector": { "zone": null } } })).await;
    let pod = ns.pod_when("apple", "a new one", |pod| pod.uid() != first.uid()).await;
    assert_eq!(json!(pod.spec.unwrap().node_selector), json!({ "disk": "fast" }));
    ns.wait_for_event("apple", "Restarting").await;
}

#[tokio::test]
async fn a_vm_that_stops_says_until_when_and_how_to_force_it() {
    let ns = ns("deadline").await;
    up(&ns, "apple", on_node).await;
    set_state(&ns, "apple", "Stopped").await;
    let pod = ns.pod_when("apple", "going", is_going).await;
    let vm = ns.vm_with_reason("apple", "Stopping").await;
    let end = json!(pod.metadata.deletion_timestamp);
    let (uid, namespace) = (pod.uid().unwrap(), ns.namespace.name());
    let force = format!("kubectl -n {namespace} annotate --overwrite vm apple vmoperator.jdrupes.org/forceStop={uid}");
    assert_eq!(
        condition(&vm, "Ready").unwrap().2,
        format!(
            "waiting until the guest has powered down, until {} at most; to end it now: {force}",
            end.as_str().unwrap()
        )
    );
    // As it says.
    ns.namespace.kubectl(&force.split(' ').skip(3).collect::<Vec<_>>());
    ns.wait_for_event("apple", "Forced").await;
    ns.vm_when("apple", "forced", |vm| !condition(vm, "Ready").unwrap().2.contains("forceStop")).await;
}

#[tokio::test]
async fn a_removed_key_of_the_node_selector_is_pending_in_a_running_vm() {
    let ns = ns("pending-atomic").await;
    ns.configure_commands(SERVICES).await;
    let atomic = |vm: &mut Value| {
        on_node(vm);
        vm["spec"]["nodeSelector"] = json!({ "a": "1", "b": "2" });
        let term = |key: &str| json!({ "matchExpressions": [{ "key": key, "operator": "Exists" }] });
        vm["spec"]["affinity"] = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [term("a"), term("b")],
        } } });
    };
    up(&ns, "apple", atomic).await;
    let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
    assert_eq!(condition(&vm, "RestartRequired"), None);
    let term = json!({ "matchExpressions": [{ "key": "a", "operator": "Exists" }] });
    let affinity = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [term] } } });
    ns.patch_vm("apple", json!({ "spec": { "nodeSelector": { "b": null }, "affinity": affinity } })).await;
    let vm = ns.vm_when("apple", "RestartRequired", |vm| condition(vm, "RestartRequired").is_some()).await;
    let paths: Vec<String> = vm.status.unwrap().pending_changes.into_iter().map(|change| change.path).collect();
    let affinity =
        "objects/Pod/spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms";
    assert_eq!(paths, [affinity, "objects/Pod/spec.nodeSelector.b"]);
    let (code, said) = ns.namespace.kubectl_vm(&["diff", "apple"]);
    assert!(code != 0 && said.contains("spec.nodeSelector.b: at the next start: nothing instead of"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_can_be_drained_and_the_vm_waits_for_another_node() {
    let ns = ManagedNamespace::new("drain").await;
    let node = json!({ "apiVersion": "v1", "kind": "Node", "metadata": { "name": "drained" } });
    ns.namespace.apply(&node.to_string());
    // The machine itself is free to go anywhere.
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.bind_pod("apple", "drained").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let first = ns.api::<Pod>().get("apple").await.unwrap();

    let (cluster, pods) = (ns.cluster, ns.api::<Pod>());
    let drain = tokio::task::spawn_blocking(|| {
        cluster.try_kubectl(&["drain", "drained", "--delete-emptydir-data", "--timeout=60s"])
    });
    ns.pod_when("apple", "evicted", is_going).await;
    let vm = ns.vm_with_reason("apple", "Restarting").await;
    let (_, _, message) = condition(&vm, "Ready").unwrap();
    assert!(message.contains("EvictionByEvictionAPI"), "{message}");
    ns.wait_for_description("apple", &["Restarting", "waiting until the old Pod is gone", "EvictionByEvictionAPI"])
        .await;
    ns.remove_pod("apple").await;
    let said = drain.await.unwrap().expect("kubectl drain");
    assert!(said.contains("evicted"), "{said}");
    let second = ns.pod_when("apple", "a new one", |pod| pod.uid() != first.uid()).await;
    assert_eq!(second.spec.unwrap().node_name, None, "the scheduler's to decide");
    assert_eq!(pods.list(&Default::default()).await.unwrap().items.len(), 1);
}
