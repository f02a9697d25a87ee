use kube::core::{DynamicObject, TypeMeta};
use serde_json::{Value, json};

use super::*;
use crate::test_support::{noon, nothing, rendered, vm};

/// Long before [`noon`], so that nothing has to be waited for.
pub(super) const EARLIER: &str = "2027-01-15T06:00:00Z";
/// Seconds before [`noon`].
pub(super) const JUST_NOW: &str = "2027-01-15T07:59:58Z";

/// The facts as JSON, which a test edits. They are those of a healthy VM.
pub(super) fn healthy() -> Value {
    let pod = rendered(&vm(|_| ()), &nothing()).into_iter().find(|object| object.key.is_pod()).unwrap();
    let mut pod = Value::clone(&pod.value);
    pod["metadata"]["uid"] = json!("pod-uid");
    pod["metadata"]["creationTimestamp"] = json!(EARLIER);
    pod["spec"]["nodeName"] = json!("node-1");
    pod["status"] = json!({
        "phase": "Running", "conditions": [{ "type": "PodScheduled", "status": "True", "lastTransitionTime": EARLIER }],
        "containerStatuses": [{ "name": "vm-runner", "image": "runner:1", "state": { "running": {} } }],
    });
    let claim = |name: &str| {
        json!({
            "metadata": { "name": name, "uid": format!("{name}-uid"), "creationTimestamp": EARLIER },
            "spec": { "storageClassName": "fast", "volumeName": "pv-1" }, "status": { "phase": "Bound" },
        })
    };
    json!({
        "vm": {
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
            "metadata": { "name": "apple", "namespace": "orchard", "uid": "apple-uid", "generation": 3, "creationTimestamp": EARLIER,
                "managedFields": [{ "manager": "kubectl-edit", "operation": "Update", "time": EARLIER, "fieldsV1": { "f:spec": {
                    "f:nodeSelector": {}, "f:nodeName": {}, "f:image": {}, "f:vm": { "f:state": {} } } } }] },
            "spec": { "vm": { "state": "Running", "maximumCpus": 2 } },
            "status": { "observedGeneration": 3, "phase": "Running", "ready": true, "conditions": [
                { "type": "Ready", "status": "True", "reason": "Running", "message": "it runs", "lastTransitionTime": EARLIER },
            ] },
        },
        "pod": pod,
        "claims": [claim("apple-core-disk")],
        "volumes": [], "git": null, "manager_pods": [], "absent_claims": [],
        "classes": [{ "metadata": { "name": "fast" }, "provisioner": "p", "volumeBindingMode": "Immediate" }],
        "events": [],
        "nodes": [{ "metadata": { "name": "node-1" }, "spec": {}, "status": {
            "allocatable": { "cpu": "8", "memory": "16Gi" },
            "conditions": [{ "type": "Ready", "status": "True", "lastTransitionTime": EARLIER, "message": "posting" }] } }],
        "limits": [], "quotas": [], "namespace": { "metadata": { "name": "orchard" } },
        "deployments": [{ "metadata": { "name": "vm-operator", "namespace": "system" }, "spec": { "replicas": 1 }, "status": { "availableReplicas": 1 } }],
        "leases": [{ "metadata": { "name": "vm-operator", "namespace": "system" }, "spec": { "holderIdentity": "m", "renewTime": "2027-01-15T07:59:57.000000Z" } }],
    })
}

pub(super) fn facts(value: &Value) -> Facts {
    fn part<T: serde::de::DeserializeOwned>(value: &Value, name: &str) -> Option<T> {
        serde_json::from_value(value[name].clone()).unwrap_or_else(|error| panic!("{name}: {error}"))
    }
    let trim = |kind: &str, value: &Value| {
        let types = TypeMeta { api_version: "v1".into(), kind: kind.into() };
        Object::trim(&types, serde_json::from_value::<DynamicObject>(value.clone()).unwrap())
    };
    Facts {
        vm: part(value, "vm").unwrap(),
        pod: match &value["pod"] {
            Value::String(_) => None,
            Value::Null => Some(None),
            pod => Some(Some(trim("Pod", pod))),
        },
        claims: value["claims"].as_array().map(|all| all.iter().map(|it| trim("PersistentVolumeClaim", it)).collect()),
        volumes: part(value, "volumes"),
        git: git::GitApplier::of(&part::<VirtualMachine>(value, "vm").unwrap())
            .map(|source| (source, part::<Value>(value, "git"))),
        classes: part(value, "classes"),
        events: part(value, "events").unwrap(),
        manager_pods: part(value, "manager_pods").unwrap(),
        absent_claims: part(value, "absent_claims").unwrap(),
        nodes: part::<Vec<_>>(value, "nodes").map(Into::into),
        neighbours: part::<Vec<Pod>>(value, "neighbours").map(|pods| Neighbours::new(pods, value["sees_all"] != false)),
        limits: part(value, "limits"),
        quotas: part(value, "quotas"),
        namespace: part(value, "namespace"),
        deployments: part(value, "deployments"),
        leases: part(value, "leases"),
        unread: Vec::new(),
        now: noon(),
    }
}

pub(super) fn explained(edit: impl FnOnce(&mut Value)) -> Explanation {
    let mut value = healthy();
    edit(&mut value);
    explain(&facts(&value))
}

/// The manager or the runner has found that.
fn ready(facts: &mut Value, status: &str, reason: &str, message: &str) {
    facts["vm"]["status"]["ready"] = json!(false);
    facts["vm"]["status"]["conditions"][0] = json!({ "type": "Ready", "status": status, "reason": reason, "message": message, "lastTransitionTime": EARLIER });
}

/// The Pod has no node.
pub(super) fn pending(facts: &mut Value, message: &str) {
    ready(facts, "False", "Unschedulable", message);
    facts["pod"]["spec"]["nodeName"] = Value::Null;
    facts["pod"]["status"] = json!({ "phase": "Pending", "conditions": [
        { "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message, "lastTransitionTime": EARLIER }] });
}

/// The Pod has a node, and its container waits.
fn waiting(facts: &mut Value, reason: &str, message: &str) {
    ready(facts, "False", "Starting", "waiting");
    facts["pod"]["status"]["phase"] = json!("Pending");
    facts["pod"]["status"]["containerStatuses"][0]["state"] =
        json!({ "waiting": { "reason": reason, "message": message } });
}

/// The claim has no volume.
fn unbound(facts: &mut Value) {
    pending(facts, "pod has unbound immediate PersistentVolumeClaims");
    facts["claims"][0]["spec"]["volumeName"] = Value::Null;
    facts["claims"][0]["status"]["phase"] = json!("Pending");
}

/// The Pod has no node, and the volume of its claim can only be used on that one. There are node-1, which has room, and node-2.
fn home(facts: &mut Value, node: &str) {
    pending(facts, "0/2 nodes are available: 1 node(s) had volume node affinity conflict");
    let claim = json!({ "name": "core-disk", "persistentVolumeClaim": { "claimName": "apple-core-disk" } });
    facts["pod"]["spec"]["volumes"] = json!([claim]);
    let mut other = facts["nodes"][0].clone();
    for (node, name) in [(&mut facts["nodes"][0], "node-1"), (&mut other, "node-2")] {
        node["metadata"] = json!({ "name": name, "labels": { "kubernetes.io/hostname": name } });
    }
    facts["nodes"].as_array_mut().unwrap().push(other);
    let term = json!({ "matchExpressions": [{ "key": "kubernetes.io/hostname", "operator": "In", "values": [node] }] });
    let affinity = json!({ "required": { "nodeSelectorTerms": [term] } });
    facts["volumes"] = json!([{ "metadata": { "name": "pv-1" }, "spec": { "nodeAffinity": affinity } }]);
}

/// A second node, which has more than the first.
fn larger(facts: &mut Value, spec: Value) {
    let mut node = facts["nodes"][0].clone();
    node["metadata"]["name"] = json!("node-2");
    node["spec"] = spec;
    node["status"]["allocatable"] = json!({ "cpu": "16", "memory": "16Gi", "vmoperator.jdrupes.org/kvm": "1000" });
    facts["nodes"].as_array_mut().unwrap().push(node);
}

/// The last state of a container that was killed for its memory.
fn killed() -> Value {
    json!({ "terminated": { "reason": "OOMKilled", "exitCode": 137, "finishedAt": EARLIER } })
}

/// The VM's disk waits for a file, and its container is in this state.
fn upload(facts: &mut Value, state: Value) {
    ready(facts, "False", "Starting", "waiting");
    let upload = json!({ "size": 3_000_000, "sha256": "0123abcd" });
    facts["vm"]["spec"]["templateValues"] = json!({ "import": { "upload": upload } });
    facts["pod"]["status"] =
        json!({ "phase": "Pending", "initContainerStatuses": [{ "name": "import", "state": state }] });
}

fn event(uid: &str, reason: &str, message: &str, time: &str) -> Value {
    json!({ "metadata": { "name": "e" }, "involvedObject": { "uid": uid }, "reason": reason, "message": message, "lastTimestamp": time })
}

/// The container was ended after it had run for two minutes, and the kubelet has said this of it.
fn probed(facts: &mut Value, reason: &str, message: &str, time: &str) {
    ready(facts, "False", "Starting", "the guest has shut down");
    facts["vm"]["status"]["ready"] = json!(false);
    let ended = json!({ "terminated": { "exitCode": 0, "startedAt": "2027-01-15T07:57:00Z", "finishedAt": "2027-01-15T07:59:00Z" } });
    facts["pod"]["status"]["containerStatuses"] =
        json!([{ "name": "vm-runner", "state": { "waiting": { "reason": "CrashLoopBackOff" } }, "lastState": ended }]);
    let mut event = event("pod-uid", reason, message, time);
    event["involvedObject"]["fieldPath"] = json!("spec.containers{vm-runner}");
    facts["events"] = json!([event]);
}

/// Not each word of the kubelet is about the end of this container.
#[test]
fn a_probe_of_an_earlier_run_or_of_another_kind_is_no_cause() {
    for (reason, message, time) in [
        ("Unhealthy", "Readiness probe failed: no answer", "2027-01-15T07:58:00Z"),
        // It need not fail as often as it may.
        ("Unhealthy", "Liveness probe failed: no answer", "2027-01-15T07:58:00Z"),
        ("Killing", "Container vm-runner failed liveness probe, will be restarted", EARLIER),
        ("Killing", "Stopping container vm-runner", "2027-01-15T07:58:00Z"),
    ] {
        assert_eq!(explained(|f| probed(f, reason, message, time)).cause, None, "{message}");
    }
}

#[test]
fn a_container_that_crashes_beside_a_guest_is_said_and_is_no_cause() {
    let found = explained(|f| {
        let ended = json!({ "terminated": { "exitCode": 7, "message": "first\nno configuration\n" } });
        f["pod"]["status"]["containerStatuses"].as_array_mut().unwrap().push(
            json!({ "name": "exporter", "state": { "waiting": { "reason": "CrashLoopBackOff" } }, "lastState": ended }),
        );
    });
    let words = "the container exporter of the Pod ends again and again, with exit code 7: no configuration: kubectl -n orchard logs apple -c exporter --previous";
    assert_eq!((found.cause, found.also), (None, vec![words.to_owned()]));
}

#[test]
fn a_vm_that_is_down_as_wanted_has_no_cause_whatever_its_templates_are() {
    let found = explained(|f| {
        f["vm"]["spec"]["vm"]["state"] = json!("Stopped");
        f["vm"]["status"]["ready"] = json!(false);
        f["pod"] = Value::Null;
        ready(f, "False", "TemplateError", "no template set is named \"desktop\"");
        f["vm"]["status"]["conditions"].as_array_mut().unwrap().push(json!({ "type": "TemplatesValid", "status": "False",
            "reason": "TemplateError", "message": "no template set is named \"desktop\"", "lastTransitionTime": EARLIER }));
    });
    assert_eq!(found.cause, None);
    assert!(found.line.starts_with("apple is stopped, as its spec wants it"), "{}", found.line);
    assert_eq!(found.also, ["it could not be started: no template set is named \"desktop\""]);
}

/// The newest spec is not taken.
fn untaken(facts: &mut Value) {
    facts["vm"]["metadata"]["generation"] = json!(4);
    facts["leases"][0]["spec"]["renewTime"] = json!("2027-01-15T06:30:00.000000Z");
}

/// The same, beside a manager that works: the namespace of the VM has one of its own.
fn own_manager(facts: &mut Value) {
    untaken(facts);
    for kind in ["deployments", "leases"] {
        let mut own = facts[kind][0].clone();
        own["metadata"]["namespace"] = json!("orchard");
        facts[kind].as_array_mut().unwrap().push(own);
    }
    facts["leases"][0]["spec"]["renewTime"] = json!("2027-01-15T07:59:57.000000Z");
}

type Plant = fn(&mut Value);

/// A cause, how it is planted, and what the first line has.
#[rustfmt::skip]
const PLANTS: &[(Cause, Plant, &str)] = &[
    (Cause::ManagerMissing, |f| { untaken(f); f["leases"] = json!([]); f["deployments"] = json!([]); }, "the cluster has no manager, so generation 4"),
    (Cause::ManagerStopped, |f| { untaken(f); f["deployments"][0]["spec"]["replicas"] = json!(0);
        f["deployments"][0]["metadata"]["managedFields"] = json!([{ "manager": "kubectl-scale", "fieldsV1": { "f:spec": { "f:replicas": {} } } }]); },
        "(set by kubectl-scale, spec.replicas) -> kubectl -n system scale deployment vm-operator --replicas=1"),
    (Cause::ManagerUnavailable, |f| { untaken(f); f["deployments"][0]["status"] = json!({ "conditions": [{ "type": "Available", "status": "False", "message": "no pod is ready" }] }); }, "(no pod is ready)"),
    (Cause::ManagerUnavailable, |f| { untaken(f); f["deployments"][0]["status"] = json!({});
        f["manager_pods"] = json!([{ "metadata": { "name": "m", "namespace": "other" }, "status": { "conditions": [{ "type": "PodScheduled", "status": "False", "message": "of another one" }] } },
            { "metadata": { "name": "m", "namespace": "system" }, "status": { "containerStatuses": [{ "name": "manager", "ready": false, "restartCount": 3, "image": "i", "imageID": "", "state": { "waiting": { "reason": "CrashLoopBackOff" } },
            "lastState": { "terminated": { "exitCode": 1, "reason": "Error", "message": "first\nconfig.yaml:3: unknown key\n" } } }] } }]); }, "(its container manager ended with exit code 1: config.yaml:3: unknown key)"),
    // Its Lease is not old yet.
    (Cause::ManagerUnavailable, |f| { f["vm"]["metadata"]["generation"] = json!(4); f["deployments"][0]["status"] = json!({});
        f["manager_pods"] = json!([{ "metadata": { "name": "m", "namespace": "system" }, "status": { "containerStatuses": [{ "name": "manager", "ready": false, "restartCount": 0, "image": "i", "imageID": "", "state": { "waiting": { "reason": "ImagePullBackOff", "message": "Back-off" } } }] } }]); }, "(its container manager: ImagePullBackOff: Back-off)"),
    (Cause::ManagerSilent, untaken, "m holds the Lease of Deployment system/vm-operator and does not renew it"),
    (Cause::ManagerSilent, |f| { untaken(f); f["leases"][0]["spec"]["holderIdentity"] = json!(""); }, "the manager of Deployment system/vm-operator does not renew its Lease"),
    // What the manager has said may be of the past.
    (Cause::ManagerStopped, |f| { ready(f, "False", "ApplyFailed", "exceeded quota: few"); f["pod"] = Value::Null;
        f["leases"][0]["spec"]["renewTime"] = json!("2027-01-15T06:30:00.000000Z"); f["deployments"][0]["spec"]["replicas"] = json!(0); }, "wants no Pod, so nobody makes its Pod"),
    (Cause::NotManaged, |f| { own_manager(f); f["leases"][1]["spec"]["renewTime"] = json!("2027-01-15T07:59:57.000000Z"); }, "the manager in this namespace works, and generation 4 of the spec is not taken: it lacks a right here"),
    (Cause::NotManaged, |f| { f["vm"]["metadata"]["generation"] = json!(4); }, "does not manage the namespace orchard"),
    (Cause::StatusRefused, |f| { f["vm"]["metadata"]["generation"] = json!(4);
        f["events"] = json!([event("apple-uid", "StatusRefused", "write the status: denied by policy", "2027-01-15T07:59:30Z")]); },
        "refuses the VM's status from the manager: denied by policy (status"),
    // It could be written since.
    (Cause::NotManaged, |f| { f["vm"]["metadata"]["generation"] = json!(4);
        f["events"] = json!([event("apple-uid", "StatusRefused", "write the status: denied by policy", EARLIER)]); }, "does not manage the namespace orchard"),
    // A manager of another namespace works, and that of this one does not.
    (Cause::ManagerStopped, |f| { own_manager(f); f["deployments"][1]["spec"]["replicas"] = json!(0); }, "Deployment orchard/vm-operator of the manager wants no Pod"),
    (Cause::ManagerSilent, |f| { own_manager(f); f["deployments"].as_array_mut().unwrap().pop(); }, "no manager renews its Lease, so generation 4 of the spec is not taken (since 2027-01-15T06:30:00Z)"),
    (Cause::InvalidSpec, |f| ready(f, "False", "InvalidSpec", "spec.vm.maximumCpus: no number"), "spec.vm.maximumCpus: no number"),
    (Cause::NotAllowed, |f| ready(f, "False", "NotAllowed", "spec.nodeName: \"n1\" is not allowed here"), "spec.nodeName: \"n1\" is not allowed here (since 2027-01-15T06:00:00Z) -> take that out of the VM"),
    (Cause::TemplateError, |f| ready(f, "False", "TemplateError", "pod.yaml.j2:3:14: undefined value"), "pod.yaml.j2:3:14: undefined value (since 2027-01-15T06:00:00Z) ->"),
    (Cause::NamespaceTerminating, |f| { f["namespace"]["metadata"]["deletionTimestamp"] = json!(EARLIER); }, "the namespace orchard is being deleted"),
    (Cause::NameTaken, |f| ready(f, "False", "NameTaken", "Pod apple exists"), "Pod apple exists"),
    (Cause::QuotaExceeded, |f| { ready(f, "False", "ApplyFailed", "Pod apple: pods \"apple\" is forbidden: exceeded quota: few, requested: pods=1, used: pods=0, limited: pods=0");
        f["quotas"] = json!([{ "metadata": { "name": "few" }, "spec": { "hard": { "pods": "0" } } }]); }, "(ResourceQuota few, since 2027-01-15T06:00:00Z) -> free some of it, or raise it (at most pods 0)"),
    (Cause::QuotaExceeded, |f| ready(f, "False", "ApplyFailed", "pods \"apple\" is forbidden: failed quota: few: must specify limits.cpu for: agent,vm-runner; limits.memory for: import,vm-runner"),
        "-> set limits.cpu, limits.memory in spec.resources of the VM, from which its other containers follow, or a LimitRange with defaults"),
    (Cause::QuotaExceeded, |f| ready(f, "False", "ApplyFailed", "pods \"apple\" is forbidden: failed quota: few: must specify limits.cpu for: istio-proxy"),
        "-> set limits.cpu of the container istio-proxy in the template, or where else it comes from, or a LimitRange"),
    (Cause::LimitExceeded, |f| { ready(f, "False", "ApplyFailed", "pods \"apple\" is forbidden: maximum cpu usage per Container is 500m, but request is 1");
        f["limits"] = json!([{ "metadata": { "name": "other" }, "spec": { "limits": [{ "type": "Pod", "max": { "cpu": "1" } }] } }, { "metadata": { "name": "small" }, "spec": { "limits": [{ "type": "Container", "max": { "cpu": "500m" } }] } }]); }, "LimitRange small"),
    (Cause::LimitExceeded, |f| { ready(f, "False", "ApplyFailed", "pods \"apple\" is forbidden: [minimum cpu usage per Pod is 2, but request is 1, memory max limit to request ratio per Pod is 2, but provided ratio is 8.000000]");
        f["limits"] = json!([{ "metadata": { "name": "ratio" }, "spec": { "limits": [{ "type": "Pod", "maxLimitRequestRatio": { "memory": "2" } }] } }]); }, "LimitRange ratio"),
    (Cause::LimitExceeded, |f| { ready(f, "False", "ApplyFailed", "spec.containers[0].resources.requests: Invalid value: \"800M\": must be less than or equal to memory limit of 1Mi");
        f["limits"] = json!([{ "metadata": { "name": "small" }, "spec": { "limits": [{ "type": "Container", "default": { "memory": "1Mi" } }] } }]); }, "LimitRange small"),
    (Cause::PodSecurity, |f| ready(f, "False", "ApplyFailed", "pods \"apple\" is forbidden: violates PodSecurity \"restricted:latest\": runAsNonRoot"), "pod-security.kubernetes.io/enforce"),
    (Cause::WebhookRefused, |f| ready(f, "False", "ApplyFailed", "admission webhook \"deny.example.org\" denied the request: no"), "webhook deny.example.org"),
    (Cause::WebhookUnavailable, |f| ready(f, "False", "ApplyFailed", "Internal error occurred: failed calling webhook \"gone.example.org\": no endpoints"), "webhook gone.example.org"),
    (Cause::PolicyRefused, |f| ready(f, "False", "ApplyFailed", "ValidatingAdmissionPolicy 'no-vms' with binding 'b' denied request: no"), "ValidatingAdmissionPolicy no-vms"),
    (Cause::ApplyFailed, |f| ready(f, "False", "ApplyFailed", "Pod apple: spec.x: invalid"), "spec.x: invalid"),
    (Cause::WatchFailed, |f| ready(f, "False", "WatchFailed", "the manager may not watch x"), "may not watch x"),
    (Cause::SecretRefused, |f| ready(f, "False", "SecretRefused", "the Secret s has no label"), "the Secret s"),
    (Cause::MountMissing, |f| ready(f, "False", "MountMissing", "ConfigMap c does not exist"), "ConfigMap c"),
    (Cause::DeletionBlocked, |f| { f["vm"]["metadata"]["deletionTimestamp"] = json!(EARLIER); f["vm"]["metadata"]["finalizers"] = json!(["foregroundDeletion", "x.org/keep"]);
        f["vm"]["metadata"]["generation"] = json!(4); }, "apple is not deleted yet: the finalizers x.org/keep keep it, and its guest runs on"),
    (Cause::QuotaExceeded, |f| { ready(f, "False", "Starting", "waiting for the Pod to start"); f["pod"] = Value::Null; f["vm"]["status"]["ready"] = json!(false);
        let mut of_set = event("set-uid", "FailedCreate", "create Pod apple-0 in StatefulSet apple failed error: pods \"apple-0\" is forbidden: exceeded quota: few, requested: pods=1", "2027-01-15T07:50:00Z");
        of_set["involvedObject"]["kind"] = json!("StatefulSet");
        f["events"] = json!([of_set]); }, "(ResourceQuota few, since 2027-01-15T07:50:00Z)"),
    (Cause::DeletionBlocked, |f| { f["vm"]["metadata"]["deletionTimestamp"] = json!(EARLIER); f["vm"]["metadata"]["finalizers"] = json!(["x.org/keep"]); f["pod"] = Value::Null; }, "apple is not deleted yet: the finalizers x.org/keep keep it"),
    (Cause::ClaimMissing, |f| ready(f, "False", "ClaimMissing", "claim c is gone"), "claim c is gone"),
    (Cause::ClaimInUse, |f| ready(f, "False", "ClaimInUse", "Pod p mounts a claim"), "Pod p mounts a claim"),
    (Cause::ClaimLost, |f| { pending(f, "x"); f["claims"][0]["status"]["phase"] = json!("Lost"); }, "claim apple-core-disk has lost its volume pv-1"),
    (Cause::ClaimDeleting, |f| { pending(f, "x"); f["claims"][0]["metadata"]["deletionTimestamp"] = json!(EARLIER); }, "claim apple-core-disk is being deleted"),
    (Cause::StorageClassMissing, |f| { unbound(f); f["claims"][0]["spec"]["storageClassName"] = json!("gold"); }, "wants the storage class gold, which does not exist (there are: fast)"),
    (Cause::NoDefaultClass, |f| { unbound(f); f["claims"][0]["spec"]["storageClassName"] = Value::Null; }, "names no storage class"),
    (Cause::ProvisioningFailed, |f| { unbound(f); f["events"] = json!([event("apple-core-disk-uid", "ProvisioningFailed", "no space", EARLIER)]); }, "gets no volume: no space (since 2027-01-15T06:00:00Z)"),
    (Cause::ClaimUnbound, unbound, "claim apple-core-disk of its size waits for a volume from the provisioner p of the storage class fast"),
    (Cause::ClaimUnbound, |f| { unbound(f); f["claims"][0]["spec"]["storageClassName"] = json!(""); }, "from an administrator, because it names no storage class"),
    (Cause::ClaimUnbound, |f| { unbound(f); f["claims"][0]["spec"]["volumeName"] = json!("pv-7");
        f["events"] = json!([event("apple-core-disk-uid", "FailedBinding", "volume \"pv-7\" already bound to a different claim.", EARLIER)]); },
        "claim apple-core-disk wants the volume pv-7, and does not get it: volume \"pv-7\" already bound to a different claim."),
    // The scheduler has chosen a node, and the provisioner does not answer. The Pod has no condition.
    (Cause::ClaimUnbound, |f| { unbound(f); f["pod"]["status"] = json!({ "phase": "Pending" }); f["classes"][0]["volumeBindingMode"] = json!("WaitForFirstConsumer");
        f["claims"][0]["metadata"]["annotations"] = json!({ "volume.kubernetes.io/selected-node": "node-1" }); },
        "claim apple-core-disk waits for a volume from the provisioner p of the storage class fast"),
    (Cause::ClaimUnbound, |f| { unbound(f); f["classes"][0]["volumeBindingMode"] = json!("WaitForFirstConsumer");
        f["claims"][0]["metadata"]["annotations"] = json!({ "volume.kubernetes.io/selected-node": "node-1" }); }, "apple-core-disk waits for a volume from the provisioner p"),
    (Cause::ClaimAbsent, |f| { pending(f, "x"); f["absent_claims"] = json!(["vmop-image-repository"]); }, "claim vmop-image-repository, which the Pod mounts, does not exist (Pod: spec.volumes) -> create it, for CD images"),
    (Cause::ClaimMissing, |f| { pending(f, "x"); f["vm"]["status"]["conditions"].as_array_mut().unwrap().push(
        json!({ "type": "StorageReady", "status": "False", "reason": "ClaimMissing", "message": "claim apple-core-disk does not exist any more", "lastTransitionTime": EARLIER })); }, "claim apple-core-disk does not exist any more"),
    (Cause::Unschedulable, |f| { pending(f, "x"); f["pod"]["status"] = json!({ "phase": "Pending" });
        let mut of_claim = event("pod-uid", "FailedResourceClaimCreation", "resource claim template \"gpu\" not found", EARLIER);
        of_claim["type"] = json!("Warning");
        f["events"] = json!([of_claim]); }, "Pod apple can't be scheduled: resource claim template \"gpu\" not found"),
    (Cause::SchedulerMissing, |f| { pending(f, "x"); f["pod"]["status"] = json!({ "phase": "Pending" }); f["pod"]["spec"]["schedulerName"] = json!("nobody"); }, "nothing serves schedulerName nobody"),
    (Cause::SchedulingGated, |f| { pending(f, "x"); f["pod"]["status"]["conditions"][0]["reason"] = json!("SchedulingGated"); f["pod"]["spec"]["schedulingGates"] = json!([{ "name": "x.org/wait" }]); }, "the scheduling gates x.org/wait hold Pod apple"),
    (Cause::NoNodes, |f| { pending(f, "x"); f["nodes"] = json!([]); }, "the cluster has no node"),
    (Cause::SelectorUnmatched, |f| { pending(f, "x"); f["pod"]["spec"]["nodeSelector"] = json!({ "disk": "ssd" }); }, "no node has the labels disk=ssd (Pod: spec.nodeSelector, of a template or a policy"),
    (Cause::SelectorUnmatched, |f| { pending(f, "x"); f["vm"]["spec"]["nodeSelector"] = json!({ "disk": "ssd" }); f["pod"]["spec"]["nodeSelector"] = json!({ "disk": "ssd" }); }, "no node has the labels disk=ssd (set by kubectl-edit, spec.nodeSelector"),
    (Cause::Cordoned, |f| { pending(f, "x"); f["nodes"][0]["spec"]["unschedulable"] = json!(true); }, "-> kubectl uncordon node-1"),
    (Cause::Tainted, |f| { pending(f, "0/1 nodes are available: 1 node(s) had untolerated taint(s)"); f["nodes"][0]["spec"]["taints"] = json!([{ "key": "team", "value": "red", "effect": "NoSchedule" }]); }, "node node-1 has the taint team=red:NoSchedule"),
    (Cause::DeviceMissing, |f| { pending(f, "x"); f["pod"]["spec"]["containers"][0]["resources"]["limits"] = json!({ "vmoperator.jdrupes.org/kvm": 1 }); }, "no node offers vmoperator.jdrupes.org/kvm"),
    (Cause::DeviceMissing, |f| { pending(f, "x"); f["pod"]["spec"]["containers"][0]["resources"]["limits"] = json!({ "example.org/gpu": 1 }); }, "no node offers example.org/gpu, which Pod apple needs (Pod: resources, since 2027-01-15T06:00:00Z) -> install the device plugin that offers it"),
    (Cause::DeviceMissing, |f| { pending(f, "x"); larger(f, json!({})); f["pod"]["spec"]["containers"][0]["resources"]["limits"] = json!({ "vmoperator.jdrupes.org/kvm": 1001 }); },
        "Pod apple needs 1001 of vmoperator.jdrupes.org/kvm, and no node offers more than 1000 (spec.vm.accelerator, "),
    (Cause::TooLarge, |f| { pending(f, "x"); f["pod"]["spec"]["containers"][0]["resources"]["requests"] = json!({ "cpu": "9" }); }, "requests 9.01 of cpu, and the largest node has 8"),
    (Cause::TooLarge, |f| { pending(f, "x"); larger(f, json!({ "unschedulable": true })); f["pod"]["spec"]["containers"][0]["resources"]["requests"] = json!({ "cpu": "17" }); }, "and the largest node has 16"),
    // A node would do that takes no Pods, or not this one.
    (Cause::Cordoned, |f| { pending(f, "x"); larger(f, json!({ "unschedulable": true })); f["pod"]["spec"]["containers"][0]["resources"]["requests"] = json!({ "cpu": "9" }); },
        "node node-2 is cordoned, and no open node has enough cpu for Pod apple (Node: spec.unschedulable, since 2027-01-15T06:00:00Z) -> kubectl uncordon node-2"),
    // Kubernetes takes this taint away by itself: whoever removes it has it again at once.
    (Cause::Tainted, |f| { pending(f, "x"); f["nodes"][0]["spec"]["taints"] = json!([{ "key": "node.kubernetes.io/memory-pressure", "effect": "NoSchedule" }]); }, "node node-1 is short of memory (MemoryPressure), so it takes no Pod"),
    (Cause::Tainted, |f| { pending(f, "x"); larger(f, json!({ "taints": [{ "key": "team", "effect": "NoSchedule" }] }));
        f["pod"]["spec"]["containers"][0]["resources"]["limits"] = json!({ "vmoperator.jdrupes.org/kvm": 1 }); },
        "node node-2 has the taint team:NoSchedule, which Pod apple does not tolerate, and no open node has enough vmoperator.jdrupes.org/kvm for Pod apple"),
    (Cause::VolumeElsewhere, |f| { home(f, "node-2"); f["nodes"][1]["spec"]["unschedulable"] = json!(true); },
        "claim apple-core-disk has the volume pv-1, which can only be used on nodes with kubernetes.io/hostname in (node-2), and node node-2 is cordoned (PersistentVolume pv-1: spec.nodeAffinity, since 2027-01-15T06:00:00Z) -> kubectl uncordon node-2"),
    (Cause::VolumeElsewhere, |f| home(f, "node-2"), "node node-2 does not take the Pod: it has no room"),
    (Cause::VolumeElsewhere, |f| home(f, "gone"), "kubernetes.io/hostname in (gone), and the cluster has none of these"),
    (Cause::Unschedulable, |f| pending(f, "didn't match pod affinity rules"), "no node takes Pod apple: didn't match pod affinity rules"),
    (Cause::NodeMissing, |f| { waiting(f, "ContainerCreating", ""); f["nodes"] = json!([]); f["vm"]["spec"]["nodeName"] = json!("node-1"); }, "node node-1, which does not exist (set by kubectl-edit, spec.nodeName"),
    (Cause::NodeNotResponding, |f| { waiting(f, "ContainerCreating", ""); f["nodes"][0]["status"]["conditions"][0]["status"] = json!("Unknown"); }, "node node-1 does not answer"),
    (Cause::NodeNotReady, |f| { waiting(f, "ContainerCreating", ""); f["nodes"][0]["status"]["conditions"][0]["status"] = json!("False"); }, "node node-1 is not ready"),
    (Cause::Evicted, |f| { ready(f, "False", "PodFailed", "x"); f["pod"]["status"] = json!({ "phase": "Failed", "reason": "Evicted", "message": "low on memory" }); }, "node node-1 has evicted Pod apple: low on memory"),
    (Cause::PodFailed, |f| { ready(f, "False", "PodFailed", "x"); f["pod"]["status"] = json!({ "phase": "Failed", "reason": "OutOfcpu", "message": "no cpu" }); }, "Pod apple failed: OutOfcpu: no cpu"),
    (Cause::PodSucceeded, |f| { ready(f, "False", "PodSucceeded", "x"); f["pod"]["status"] = json!({ "phase": "Succeeded" }); }, "the containers of Pod apple have ended"),
    (Cause::InvalidImageName, |f| waiting(f, "InvalidImageName", "x"), "the image name runner:1 is invalid"),
    (Cause::ImagePullFailed, |f| { waiting(f, "ImagePullBackOff", "Back-off"); f["events"] = json!([event("pod-uid", "Failed", "Failed to pull image \"runner:1\": not found", EARLIER)]); }, "Failed to pull image \"runner:1\": not found"),
    (Cause::ContainerConfig, |f| waiting(f, "CreateContainerConfigError", "secret \"s\" not found"), "secret \"s\" not found (container vm-runner, since 2027-01-15T06:00:00Z) -> create what is missing"),
    (Cause::ContainerConfig, |f| waiting(f, "CreateContainerConfigError", "container has runAsNonRoot and image will run as root"), "-> correct it in the template of the Pod"),
    (Cause::ContainerWaiting, |f| waiting(f, "CreateContainerError", "x"), "CreateContainerError: x"),
    (Cause::ContainerWaiting, |f| { waiting(f, "CreateContainerError", "cannot load seccomp profile \"/var/lib/kubelet/seccomp/a/b.json\"");
        f["pod"]["spec"]["containers"][0]["securityContext"] = json!({ "seccompProfile": { "type": "Localhost", "localhostProfile": "a/b.json" } }); },
        "-> bring the seccomp profile a/b.json to node node-1, or correct it in the template of the Pod"),
    (Cause::MountFailed, |f| { waiting(f, "ContainerCreating", "");
        f["pod"]["spec"]["volumes"] = json!([{ "name": "config", "projected": { "sources": [{ "configMap": { "name": "apple" } }, { "secret": { "name": "own", "items": [{ "key": "user-data", "path": "u" }] } }] } }]);
        f["events"] = json!([event("pod-uid", "FailedMount", "references non-existent secret key: user-data", EARLIER)]); }, "non-existent secret key: user-data (Secret own has no key user-data)"),
    (Cause::MountFailed, |f| { waiting(f, "ContainerCreating", ""); f["events"] = json!([event("pod-uid", "FailedMount", "MountVolume.SetUp failed", EARLIER)]); }, "MountVolume.SetUp failed"),
    (Cause::AttachFailed, |f| { waiting(f, "ContainerCreating", ""); f["events"] = json!([event("pod-uid", "FailedAttachVolume", "Multi-Attach error", EARLIER)]); }, "Multi-Attach error"),
    (Cause::SandboxFailed, |f| { waiting(f, "ContainerCreating", ""); f["events"] = json!([event("pod-uid", "FailedCreatePodSandBox", "no CNI", EARLIER)]); }, "no CNI"),
    (Cause::UploadMissing, |f| upload(f, json!({ "running": { "startedAt": EARLIER } })),
        "apple does not run: its disk waits for a file of 3000000 bytes with the SHA-256 0123abcd, and not all of it is there (spec.templateValues.import.upload, since 2027-01-15T06:00:00Z) -> kubectl vm upload apple FILE -n orchard"),
    (Cause::StartDelayed, |f| { waiting(f, "ContainerCreating", ""); ready(f, "False", "StartDelayed", "not created yet"); }, "not created yet"),
    (Cause::PodNotEnded, |f| { ready(f, "False", "PodNotEnded", "Pod apple should have ended"); f["vm"]["spec"]["vm"]["state"] = json!("Stopped"); }, "apple does not stop: Pod apple should have ended"),
    (Cause::PodNotRemoved, |f| ready(f, "False", "PodNotRemoved", "something keeps it"), "something keeps it"),
    (Cause::ProbeFailed, |f| { probed(f, "Killing", "Container vm-runner failed liveness probe, will be restarted", "2027-01-15T07:58:00Z");
        let mut probe = f["events"][0].clone();
        (probe["reason"], probe["message"]) = (json!("Unhealthy"), json!("Liveness probe failed: no answer"));
        f["events"].as_array_mut().unwrap().push(probe); }, "node node-1 ends the container vm-runner, because its liveness probe fails: no answer (Pod: spec.containers[vm-runner]"),
    (Cause::ProbeFailed, |f| probed(f, "FailedPostStartHook", "PostStartHook failed", "2027-01-15T07:58:00Z"), "because its hook postStart fails: PostStartHook failed"),
    (Cause::OutOfMemory, |f| { ready(f, "False", "RunnerFailed", "exit code 137"); f["pod"]["status"]["containerStatuses"][0] = json!({ "name": "vm-runner", "state": { "waiting": { "reason": "CrashLoopBackOff" } }, "lastState": killed() }); }, "more memory than its limit"),
    (Cause::OutOfMemory, |f| { ready(f, "False", "RunnerFailed", "exit code 137"); f["pod"]["status"]["containerStatuses"][0]["state"] = killed(); }, "container vm-runner was killed"),
    // It runs again, and fails again and again.
    (Cause::OutOfMemory, |f| { ready(f, "False", "RunnerFailed", "exit code 137"); f["pod"]["status"]["containerStatuses"][0]["lastState"] = killed();
        f["vm"]["spec"]["resources"] = json!({ "limits": { "memory": "1Gi" } }); }, "(spec.resources.limits.memory, since 2027-01-15T06:00:00Z)"),
    (Cause::OutOfMemory, |f| { ready(f, "False", "Starting", "waiting");
        f["pod"]["spec"]["initContainers"] = json!([{ "name": "agent", "resources": { "limits": { "memory": "64Mi" } } }]);
        f["pod"]["status"]["initContainerStatuses"] = json!([{ "name": "agent", "state": { "waiting": { "reason": "CrashLoopBackOff" } }, "lastState": killed() }]); },
        "container agent was killed because it used more memory than its limit of 64Mi, or than the node has (Pod: resources of the container agent, "),
    (Cause::RunnerFailed, |f| ready(f, "False", "RunnerFailed", "qemu: no such device"), "qemu: no such device"),
    (Cause::RunnerFailed, |f| ready(f, "False", "RunnerFailed", "unable to find CPU model 'x'"), "(spec.vm.cpuModel, since 2027-01-15T06:00:00Z) -> correct spec.vm.cpuModel"),
    (Cause::RunnerSilent, |f| { ready(f, "False", "Starting", "waiting for the runner"); f["vm"]["status"]["ready"] = json!(false);
        f["pod"]["status"]["containerStatuses"][0]["state"] = json!({ "running": { "startedAt": "2027-01-15T07:58:00Z" } }); }, "Pod apple runs, and its runner has reported nothing (since 2027-01-15T07:58:00Z) -> see its agent"),
    (Cause::ContainerFailed, |f| ready(f, "False", "ContainerFailed", "sidecar ended with exit code 1"), "sidecar ended"),
    (Cause::ContainerFailed, |f| { ready(f, "False", "ContainerFailed", "import ended with exit code 22");
        f["pod"]["status"]["initContainerStatuses"] = json!([{ "name": "first", "state": { "terminated": { "exitCode": 0 } } },
            { "name": "import", "state": { "waiting": { "reason": "CrashLoopBackOff" } }, "lastState": { "terminated": { "exitCode": 22 } } }]); },
        "(container import, since 2027-01-15T06:00:00Z) -> mend that in the template of the Pod, or in spec.templateValues; all that it says: kubectl -n orchard logs apple -c import"),
    (Cause::StorageFull, |f| { ready(f, "False", "StorageFull", "core is full"); f["vm"]["status"]["ready"] = json!(true); }, "apple runs, but not as its spec wants it: core is full"),
    (Cause::StorageFailed, |f| ready(f, "False", "StorageFailed", "core: I/O error"), "I/O error"),
    (Cause::TpmLost, |f| ready(f, "False", "TpmLost", "swtpm ended"), "kubectl vm restart apple -n orchard"),
    (Cause::NetworkLost, |f| ready(f, "False", "NetworkLost", "passt ended"), "kubectl vm restart apple -n orchard"),
    (Cause::ChangeFailed, |f| ready(f, "False", "ChangeFailed", "no such CD"), "no such CD"),
    (Cause::GuestPanicked, |f| { ready(f, "False", "GuestPanicked", "The guest's kernel has panicked; it stays paused"); f["vm"]["spec"]["vm"]["onPanic"] = json!("keep"); }, "kubectl vm reset apple -n orchard"),
    (Cause::PausedByHand, |f| ready(f, "False", "Paused", "paused"), "vm-runner ctl resume"),
];

#[test]
fn the_first_line_names_each_cause() {
    for (cause, plant, words) in PLANTS {
        let explanation = explained(plant);
        assert_eq!(explanation.cause.as_ref().map(|it| it.cause), Some(*cause), "{}", explanation.line);
        assert!(explanation.line.contains(words), "{cause}: {}", explanation.line);
        let (before, todo) = explanation.line.rsplit_once(" -> ").unwrap();
        assert!(before.starts_with("apple ") && !todo.is_empty(), "{before}");
        let failed: Vec<Stage> =
            explanation.chain.iter().filter(|it| it.state == "failed").map(|it| it.stage).collect();
        assert_eq!(failed, [cause.stage()], "{cause}");
    }
    let planted: std::collections::BTreeSet<Cause> = PLANTS.iter().map(|(cause, ..)| *cause).collect();
    let missing: Vec<&Cause> = Cause::ALL.iter().filter(|cause| !planted.contains(cause)).collect();
    assert!(missing.is_empty() && Cause::ALL.len() >= 60, "{} causes, not planted: {missing:?}", Cause::ALL.len());
}

#[test]
fn a_cause_that_follows_another_has_a_time_of_its_own() {
    let since = |at: &str| {
        let event = event("apple-uid", "TemplateError", "undefined value", at);
        let found = explained(|f| {
            ready(f, "False", "TemplateError", "undefined value");
            f["events"] = json!([event]);
        });
        found.cause.unwrap().since.unwrap()
    };
    assert_eq!(since(JUST_NOW), JUST_NOW, "Ready has been False before, for another reason");
    assert_eq!(since("2027-01-15T05:00:00Z"), EARLIER, "it has healed in between");
}

#[test]
#[rustfmt::skip]
fn a_vm_without_a_problem_has_no_cause() {
    let cases: [(Plant, &str); 10] = [
        (|_| (), "apple runs, as its spec wants it"),
        (|f| { ready(f, "True", "StoppedAsRequested", "down"); f["vm"]["spec"]["vm"]["state"] = json!("Stopped"); f["pod"] = Value::Null; }, "apple is stopped, as its spec wants it (spec.vm.state: Stopped, set by kubectl-edit)"),
        (|f| { ready(f, "True", "Paused", "paused"); f["vm"]["spec"]["vm"]["paused"] = json!(true); }, "apple is paused, as its spec wants it"),
        (|f| { ready(f, "True", "GuestShutdown", "x"); f["pod"] = Value::Null; f["vm"]["status"]["halted"] = json!({ "by": "guest", "time": EARLIER, "generation": 3 }); }, "apple is stopped, because its guest shut itself down"),
        (|f| { ready(f, "True", "StoppedAfterPanic", "x"); f["pod"] = Value::Null; f["vm"]["status"]["halted"] = json!({ "by": "panic", "time": EARLIER, "generation": 3 }); }, "apple is stopped, because its guest panicked"),
        (|f| waiting(f, "ContainerCreating", ""), "apple is starting: waiting"),
        (|f| { ready(f, "False", "Stopping", "waiting until the guest has powered down"); f["vm"]["spec"]["vm"]["state"] = json!("Stopped"); f["pod"]["metadata"]["deletionTimestamp"] = json!(EARLIER); }, "apple is stopping: waiting until the guest"),
        // The spec was changed a moment ago, or nothing but the VM may be read.
        (|f| { f["vm"]["metadata"]["generation"] = json!(4); f["vm"]["metadata"]["managedFields"][0]["time"] = json!(JUST_NOW); }, "apple waits: the manager has not taken generation 4 of the spec yet"),
        (|f| for part in ["claims", "classes", "nodes", "limits", "quotas", "namespace", "deployments", "leases"] { f[part] = Value::Null; f["pod"] = json!("not read"); }, "apple runs, as its spec wants it"),
        (|f| { f["leases"] = json!([]); f["deployments"] = json!([]); }, "apple runs, as its spec wants it"),
    ];
    for (edit, line) in cases {
        let explanation = explained(edit);
        assert!(explanation.cause.is_none() && explanation.line.starts_with(line), "{}", explanation.line);
    }
    // A client-side apply has set the state once, and a person has changed it since.
    let stopped = explained(|f| {
        ready(f, "True", "StoppedAsRequested", "down");
        f["vm"]["spec"]["vm"]["state"] = json!("Stopped");
        f["pod"] = Value::Null;
        let applied = json!({ "spec": { "vm": { "state": "Running" } } }).to_string();
        f["vm"]["metadata"]["annotations"] = json!({ "kubectl.kubernetes.io/last-applied-configuration": applied });
        f["vm"]["metadata"]["managedFields"].as_array_mut().unwrap().push(json!({
            "manager": "kubectl-client-side-apply", "operation": "Update", "time": EARLIER, "fieldsV1": { "f:spec": { "f:vm": { "f:maximumCpus": {} } } },
        }));
    });
    assert!(stopped.line.ends_with("(spec.vm.state: Stopped, set by kubectl-edit)"), "{}", stopped.line);
    // A Pod that somebody has deleted is made again, if a manager works.
    assert_eq!(explained(|f| f["pod"] = Value::Null).cause, None);
    let line = explained(|f| {
        f["pod"] = Value::Null;
        f["leases"] = json!([]);
        f["deployments"] = json!([]);
    });
    assert!(line.line.starts_with("apple does not run: the cluster has no manager, so nobody makes its Pod"), "{}", line.line);
    let idle = explained(|f| f["leases"] = json!([]));
    assert_eq!(idle.also, ["no manager renews its Lease: changes of the VM have no effect until one works"]);
}

/// What healed, what is about another object, and what does not matter.
#[test]
#[rustfmt::skip]
fn a_decoy_is_not_the_cause() {
    let decoys: [(Plant, Option<Cause>); 21] = [
        // A container that was killed once runs again, or has done its work since; what fails is another one.
        (|f| { ready(f, "False", "Paused", "paused"); f["pod"]["status"]["containerStatuses"][0]["lastState"] = killed(); }, Some(Cause::PausedByHand)),
        (|f| { ready(f, "False", "Starting", "waiting"); f["pod"]["status"]["containerStatuses"][0]["lastState"] = killed(); }, None),
        (|f| { ready(f, "False", "RunnerFailed", "no such device");
            f["pod"]["status"]["initContainerStatuses"] = json!([{ "name": "import", "state": { "terminated": { "reason": "Completed", "exitCode": 0 } }, "lastState": killed() }]); }, Some(Cause::RunnerFailed)),
        (|f| { ready(f, "False", "ContainerFailed", "sidecar ended"); f["pod"]["status"]["containerStatuses"][0]["lastState"] = killed(); }, Some(Cause::ContainerFailed)),
        // The file is there, or its container has not begun; a volume of a claim that the Pod does not mount; a node that has the volume.
        (|f| upload(f, json!({ "terminated": { "exitCode": 0 } })), None),
        (|f| upload(f, json!({ "waiting": { "reason": "PodInitializing" } })), None),
        (|f| { home(f, "node-2"); f["pod"]["spec"]["volumes"] = json!([]); }, Some(Cause::Unschedulable)),
        (|f| { home(f, "node-1"); f["nodes"][1]["spec"]["unschedulable"] = json!(true); }, Some(Cause::Unschedulable)),
        // Events of this Pod that have healed, and of an earlier one.
        (|f| f["events"] = json!([event("pod-uid", "FailedMount", "x", EARLIER)]), None),
        (|f| f["events"] = json!([event("pod-uid", "Failed", "Failed to pull image \"runner:1\"", EARLIER)]), None),
        (|f| { waiting(f, "ContainerCreating", ""); f["events"] = json!([event("earlier-uid", "FailedMount", "x", JUST_NOW)]); }, None),
        (|f| { waiting(f, "ErrImagePull", "now"); f["events"] = json!([event("pod-uid", "FailedMount", "x", EARLIER)]); }, Some(Cause::ImagePullFailed)),
        (|f| { waiting(f, "ContainerCreating", ""); f["events"] = json!([event("pod-uid", "FailedMount", "x", EARLIER), event("pod-uid", "Pulling", "x", JUST_NOW)]); }, None),
        // A claim that got its volume, or whose class has gone since.
        (|f| { pending(f, "x"); f["events"] = json!([event("apple-core-disk-uid", "ProvisioningFailed", "x", EARLIER)]); }, Some(Cause::Unschedulable)),
        (|f| f["classes"] = json!([]), None),
        (|f| { unbound(f); f["events"] = json!([event("apple-core-disk-uid", "ProvisioningFailed", "x", EARLIER), event("apple-core-disk-uid", "ProvisioningSucceeded", "x", JUST_NOW)]); }, Some(Cause::ClaimUnbound)),
        // Newer templates that are refused, and the VM has those that it has.
        (|f| { pending(f, "x"); f["vm"]["status"]["conditions"].as_array_mut().unwrap().push(json!({ "type": "TemplatesValid", "status": "True", "reason": "NewerRefused", "message": "newer ones are not used", "lastTransitionTime": EARLIER })); }, Some(Cause::Unschedulable)),
        // Another node's taint; a taint that is tolerated; a cordoned node on which the guest runs.
        (|f| f["nodes"][0]["spec"]["taints"] = json!([{ "key": "team", "effect": "NoSchedule" }]), None),
        (|f| { pending(f, "affinity"); f["nodes"][0]["spec"]["taints"] = json!([{ "key": "team", "effect": "NoSchedule" }]); f["pod"]["spec"]["tolerations"] = json!([{ "key": "team", "operator": "Exists" }]); }, Some(Cause::Unschedulable)),
        (|f| f["nodes"][0]["spec"]["unschedulable"] = json!(true), None),
        // A claim that waits for its Pod: the Pod's problem comes first.
        (|f| { unbound(f); f["classes"][0]["volumeBindingMode"] = json!("WaitForFirstConsumer"); f["nodes"][0]["spec"]["unschedulable"] = json!(true); }, Some(Cause::Cordoned)),
    ];
    for (number, (edit, cause)) in decoys.into_iter().enumerate() {
        let explanation = explained(edit);
        assert_eq!(explanation.cause.map(|it| it.cause), cause, "{number}: {}", explanation.line);
    }
}

fn link(explanation: &Explanation, stage: Stage) -> Option<(&'static str, String)> {
    explanation.chain.iter().find(|link| link.stage == stage).map(|link| (link.state, link.text.clone()))
}

/// What the chain says of the guest, by the condition Booted and the VM.
#[test]
fn the_last_stage_says_how_far_the_guest_is() {
    let guest = |edit: Plant| link(&explained(edit), Stage::Guest).unwrap();
    fn booted(facts: &mut Value, status: &str) {
        let booted =
            json!({ "type": "Booted", "status": status, "reason": "x", "message": "x", "lastTransitionTime": EARLIER });
        facts["vm"]["status"]["conditions"].as_array_mut().unwrap().push(booted);
    }
    let lines: [(Plant, &str, &str); 7] = [
        (|_| (), "-", "its runner does not say"),
        (|f| booted(f, "True"), "ok", "its agent answers"),
        (
            |f| {
                booted(f, "True");
                f["vm"]["status"]["osinfo"] = json!({ "pretty-name": "Debian 13" });
            },
            "ok",
            "its agent answers: Debian 13",
        ),
        (
            |f| {
                booted(f, "True");
                f["vm"]["spec"]["vm"]["networks"] = json!([{ "pod": {} }]);
            },
            "waits",
            "its agent answers, and it has no address yet",
        ),
        (
            |f| booted(f, "False"),
            "waits",
            "its agent (qemu-guest-agent) has not answered: the guest still boots, or has no agent",
        ),
        (
            |f| {
                booted(f, "False");
                f["vm"]["spec"]["cloudInit"] = json!({});
            },
            "waits",
            "its agent (qemu-guest-agent) has not answered: the guest still boots, or has no agent, or cloud-init has not installed it yet",
        ),
        (|f| waiting(f, "ContainerCreating", ""), "-", "not reached yet"),
    ];
    for (edit, state, text) in lines {
        let found = guest(edit);
        assert!(found.0 == state && found.1.starts_with(text), "{found:?}, not {state} {text}");
    }
    let mut value = healthy();
    booted(&mut value, "False");
    let page = page::Page::of(&facts(&value)).to_string();
    assert!(
        page.starts_with("apple runs, as its spec wants it\n") && page.contains("\nGuest       its agent (qemu-"),
        "{page}"
    );
}

/// What applies the VM is named, and is no cause.
#[test]
fn a_suspended_tool_is_said_and_is_no_cause() {
    fn applied(facts: &mut Value) {
        facts["vm"]["metadata"]["labels"] = json!({ "kustomize.toolkit.fluxcd.io/name": "vms", "kustomize.toolkit.fluxcd.io/namespace": "flux-system" });
    }
    assert_eq!(link(&explained(|_| ()), Stage::Git), None);
    let ok = Some(("ok", "Kustomization flux-system/vms applies it".to_owned()));
    assert_eq!(link(&explained(applied), Stage::Git), ok, "it could not be read");
    let runs = explained(|f| {
        applied(f);
        f["git"] = json!({ "spec": { "suspend": false } });
    });
    assert_eq!((link(&runs, Stage::Git), runs.also.len()), (ok, 0));
    let plant: Plant = |f| {
        applied(f);
        f["git"] = json!({ "spec": { "suspend": true } });
    };
    let suspended = explained(plant);
    let words = "Kustomization flux-system/vms applies it, and is suspended (spec.suspend)".to_owned();
    assert_eq!((link(&suspended, Stage::Git), &suspended.cause), (Some(("waits", words.clone())), &None));
    assert_eq!(
        suspended.also,
        [
            "Kustomization flux-system/vms, which applies this VM, is suspended (spec.suspend): changes in Git have no effect until it goes on: \
          flux resume kustomization vms -n flux-system"
        ]
    );
    let mut value = healthy();
    plant(&mut value);
    assert!(page::Page::of(&facts(&value)).to_string().contains(&format!("\nGit         {words}\n")));
}

/// A StatefulSet of a former release has made the Pod.
#[test]
fn the_pod_of_a_stateful_set_runs_the_vm() {
    let plant: Plant = |f| {
        f["pod"]["metadata"]["name"] = json!("apple-0");
        f["pod"]["metadata"]["ownerReferences"] = json!([{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "apple", "uid": "s", "controller": true }]);
    };
    let found = explained(plant);
    assert!(found.cause.is_none() && found.line == "apple runs, as its spec wants it", "{}", found.line);
    assert_eq!(link(&found, Stage::Server).unwrap().1, "Pod apple-0 exists, made by StatefulSet apple");
    assert_eq!(
        found.also,
        [
            "Pod apple-0, made by StatefulSet apple, still runs the VM: its next start is in a Pod of the manager: kubectl vm restart apple -n orchard"
        ]
    );
    let mut value = healthy();
    plant(&mut value);
    assert!(page::Page::of(&facts(&value)).to_string().contains("\nPod         apple-0, made by StatefulSet apple\n"));
}

#[test]
fn without_rights_the_managers_words_remain() {
    for (reason, cause) in [("Unschedulable", Cause::Unschedulable), ("ImagePullFailed", Cause::ImagePullFailed)] {
        let explanation = explained(|f| {
            ready(f, "False", reason, "the manager's words");
            for part in ["claims", "classes", "nodes", "deployments", "leases"] {
                f[part] = Value::Null;
            }
            f["pod"] = json!("not read");
        });
        assert_eq!(explanation.cause.unwrap().cause, cause);
        assert!(
            explanation.line.starts_with("apple does not run: the manager's words (since "),
            "{}",
            explanation.line
        );
    }
}
