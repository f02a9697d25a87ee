//! Whether a guest can have started in a Pod, by what the scheduler and the kubelet report.
//!
//! In a Pod in which none has started, no guest can be lost. So if it is not as rendered any more, the manager creates it anew at once:
//! otherwise what kept it from starting would stay, although the spec or a template is mended.
//!
//! | the Pod | a guest in it |
//! |---|---|
//! | its runner has reported to the VM's status | may have started |
//! | has no node, because the scheduler could not place it | can't have started |
//! | a container that can run QEMU runs, has ended, or was restarted | may have started |
//! | the kubelet has not reported such a container | may have started: the report may be late, or the node does not answer |
//! | an ordinary init container runs | can't have started, but the Pod does its work: it is left alone |
//! | the kubelet can't start an init container, or each container that can run QEMU: it has a reason (the image, a Secret, a name) | can't have started |
//! | its containers have not been created for two minutes: a volume is missing, or an image takes long | can't have started |
//! | its containers are being created | may start at any moment |
//!
//! A container can run QEMU if it is the runner's, or can write to a claim; an init container only if it runs beside the others
//! (`restartPolicy: Always`).
//!
//! What if the kubelet's report is late? The Pod is deleted on the condition that nobody has changed it since, a new report included. So
//! only a guest that has started in the moment before the report could be hit. Its Pod is deleted as for a stop: it gets the time to power
//! down, and the new Pod waits until the old one is gone. A node that does not answer ends no Pod, so the new Pod waits then too.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use super::pending;
use crate::{api::VirtualMachine, object::Rendered, observed::Object};

/// The time after which a Pod that has a node should have created its containers.
const LATE: SignedDuration = SignedDuration::from_mins(2);
/// The time after which a kubelet should have reported a Pod that has its node.
const UNTAKEN: SignedDuration = SignedDuration::from_secs(30);
/// The reasons of a container that waits for nothing but its turn.
const CREATING: [&str; 2] = ["ContainerCreating", "PodInitializing"];

/// Whether an existing object is a Pod in which no guest has started and that is not as rendered any more: the table above.
pub(super) fn is_outdated(vm: &VirtualMachine, object: &Rendered, found: &Object, now: Timestamp) -> bool {
    let reporting = vm.status.as_ref().and_then(|status| status.pod_uid.as_ref());
    object.key.is_pod()
        && reporting != Some(&found.uid)
        && !found.is_as(object)
        && has_no_guest(found, now)
        && pending::differences(object, found).is_none_or(|differences| !differences.is_empty())
}

pub(super) fn has_no_guest(pod: &Object, now: Timestamp) -> bool {
    if pod.node_name().is_none() {
        return pod.condition("PodScheduled", "False").is_some();
    }
    let init: Vec<&Value> = statuses(pod, "initContainerStatuses").collect();
    let guests: Vec<&Value> = guest_containers(pod).collect();
    let reported: Vec<&Value> = guests
        .iter()
        .filter_map(|container| pod.container_statuses().find(|status| status["name"] == container["name"]))
        .collect();
    if guests.is_empty() || reported.len() < guests.len() || reported.iter().any(|status| has_started(status)) {
        return false;
    }
    let can_not_start =
        init.iter().any(|status| is_refused(status)) || reported.iter().all(|status| is_refused(status));
    let is_late = late_at(pod).is_some_and(|late| late <= now);
    working(pod).is_none() && (can_not_start || is_late)
}

/// The status of the ordinary init container that runs now, such as one that fills a disk: the guest starts after it.
pub fn working(pod: &Object) -> Option<&Value> {
    let is_beside = |status: &Value| containers_beside(pod).any(|container| container["name"] == status["name"]);
    statuses(pod, "initContainerStatuses").find(|status| status["state"]["running"].is_object() && !is_beside(status))
}

/// The containers of a Pod that can run QEMU.
fn guest_containers(pod: &Object) -> impl Iterator<Item = &Value> {
    let can_run_qemu =
        |container: &&Value| container["name"] == pod.runner_container_name() || can_write_to_claim(pod, container);
    containers(pod, "containers").chain(containers_beside(pod)).filter(can_run_qemu)
}

/// The init containers that run beside the others.
fn containers_beside(pod: &Object) -> impl Iterator<Item = &Value> {
    containers(pod, "initContainers").filter(|container| container["restartPolicy"] == "Always")
}

/// The init containers that end before the guest starts.
pub fn ended_before_guest(pod: &Object) -> impl Iterator<Item = &Value> {
    containers(pod, "initContainers").filter(|container| container["restartPolicy"] != "Always")
}

fn containers<'a>(pod: &'a Object, field: &str) -> impl Iterator<Item = &'a Value> {
    pod.spec[field].as_array().into_iter().flatten()
}

fn can_write_to_claim(pod: &Object, container: &Value) -> bool {
    let volumes = || pod.spec["volumes"].as_array().into_iter().flatten();
    let is_claim = |name: &Value| {
        volumes().any(|volume| {
            let claim = &volume["persistentVolumeClaim"];
            volume["name"] == *name && claim.is_object() && claim["readOnly"] != true
        })
    };
    let mounts = ["volumeMounts", "volumeDevices"].into_iter().filter_map(|field| container[field].as_array());
    mounts.flatten().any(|mount| mount["readOnly"] != true && is_claim(&mount["name"]))
}

fn statuses<'a>(pod: &'a Object, list: &str) -> impl Iterator<Item = &'a Value> {
    pod.status[list].as_array().into_iter().flatten()
}

/// Whether a container has ever started, as the kubelet reports it.
pub(super) fn has_started(status: &Value) -> bool {
    let states = [&status["state"]["running"], &status["state"]["terminated"], &status["lastState"]["terminated"]];
    states.into_iter().any(Value::is_object) || status["started"] == true || status["restartCount"].as_u64() > Some(0)
}

/// Whether the kubelet has a reason why it can't start a container.
fn is_refused(status: &Value) -> bool {
    waiting_reason(status).is_some_and(|reason| !CREATING.contains(&reason))
}

fn is_being_created(status: &Value) -> bool {
    waiting_reason(status).is_some_and(|reason| CREATING.contains(&reason))
}

fn waiting_reason(status: &Value) -> Option<&str> {
    status["state"]["waiting"]["reason"].as_str()
}

/// When a Pod that has a node is late, because its containers are not created; `None` if they are.
pub fn late_at(pod: &Object) -> Option<Timestamp> {
    let is_waiting =
        pod.phase() == Some("Pending") && pod.container_statuses().any(is_being_created) && working(pod).is_none();
    scheduled_at(pod)?.checked_add(LATE).ok().filter(|_| is_waiting)
}

/// When the kubelet of a Pod's node should have reported the Pod; `None` if it has.
pub fn untaken_at(pod: &Object) -> Option<Timestamp> {
    let is_taken = pod.container_statuses().next().is_some() || pod.phase().is_some_and(|phase| phase != "Pending");
    let bound = scheduled_at(pod).or(pod.created).filter(|_| pod.node_name().is_some() && !is_taken);
    bound?.checked_add(UNTAKEN).ok()
}

/// When the scheduler gave the Pod its node. A Pod that was created with a node has never seen the scheduler.
fn scheduled_at(pod: &Object) -> Option<Timestamp> {
    pod.condition("PodScheduled", "True")?["lastTransitionTime"].as_str()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::{applied, noon, nothing, rendered, vm};

    /// The Pod of a VM with this status, whose rendering has changed since.
    fn is_replaced(edit: impl Fn(&mut Value)) -> bool {
        let observed = applied(&rendered(&vm(|_| ()), &nothing()), |kind, object| {
            if kind == "Pod" {
                object["spec"]["nodeName"] = json!("node-1");
                edit(object);
            }
        });
        let after = vm(|vm| vm["spec"]["image"] = json!({ "source": "mended" }));
        let mut objects = rendered(&after, &observed).into_iter();
        let object = objects.find(|object| object.key.is_pod()).unwrap();
        let pod = observed.get(&object.key).unwrap();
        is_outdated(&after, &object, pod, noon())
    }

    fn waits(name: &str, reason: &str) -> Value {
        json!({ "name": name, "started": false, "restartCount": 0, "state": { "waiting": { "reason": reason } } })
    }

    #[test]
    fn a_pod_is_replaced_only_if_no_guest_can_have_started_in_it() {
        let scheduled = |time: &str| json!([{ "type": "PodScheduled", "status": "True", "lastTransitionTime": format!("2027-01-15T{time}Z") }]);
        let early = json!({ "phase": "Pending", "conditions": scheduled("07:59:00"), "containerStatuses": [waits("vm-runner", "ContainerCreating")] });
        let mut late = early.clone();
        late["conditions"] = scheduled("07:57:00");
        let with = |field: &str, value: Value| {
            let mut status = waits("vm-runner", "ErrImagePull");
            status[field] = value;
            json!({ "containerStatuses": [status] })
        };
        let init = |status: Value, runner: &str| json!({ "initContainerStatuses": [status], "containerStatuses": [waits("vm-runner", runner)] });
        let runs = json!({ "name": "import", "state": { "running": {} } });
        let has_ended = json!({ "name": "import", "state": { "terminated": { "exitCode": 0 } } });
        let mut late_import = late.clone();
        late_import["initContainerStatuses"] = json!([runs]);
        let ended = json!({ "terminated": { "exitCode": 1 } });
        for (status, expected) in [
            (json!({ "containerStatuses": [waits("vm-runner", "ImagePullBackOff")] }), true),
            (json!({ "containerStatuses": [waits("vm-runner", "InvalidImageName")] }), true),
            (json!({ "containerStatuses": [waits("vm-runner", "CreateContainerConfigError")] }), true),
            // Nothing is known of the runner.
            (Value::Null, false),
            (json!({ "phase": "Pending", "conditions": scheduled("07:00:00") }), false),
            (json!({ "containerStatuses": [waits("other", "ErrImagePull")] }), false),
            // It may start now, or it should have started long ago.
            (early, false),
            (late, true),
            // It has run.
            (with("state", json!({ "running": {} })), false),
            (with("state", ended.clone()), false),
            (with("lastState", ended), false),
            (with("restartCount", json!(1)), false),
            (with("started", json!(true)), false),
            // What runs before it.
            (init(waits("import", "CrashLoopBackOff"), "PodInitializing"), true),
            (init(waits("import", "PodInitializing"), "PodInitializing"), false),
            (init(runs, "PodInitializing"), false),
            (late_import, false),
            (init(has_ended, "ErrImagePull"), true),
        ] {
            assert_eq!(is_replaced(|pod| pod["status"] = status.clone()), expected, "{status}");
        }
    }

    #[test]
    fn a_runner_that_has_reported_has_started_whatever_the_kubelet_says() {
        let status = json!({ "containerStatuses": [waits("vm-runner", "ErrImagePull")] });
        let observed = applied(&rendered(&vm(|_| ()), &nothing()), |kind, object| {
            if kind == "Pod" {
                object["spec"]["nodeName"] = json!("node-1");
                object["status"] = status.clone();
            }
        });
        for (uid, expected) in [("Pod-apple", false), ("another", true)] {
            let after = vm(|vm| {
                vm["spec"]["image"] = json!({ "source": "mended" });
                vm["status"] = json!({ "podUid": uid });
            });
            let object = rendered(&after, &observed).into_iter().find(|object| object.key.is_pod()).unwrap();
            assert_eq!(is_outdated(&after, &object, observed.get(&object.key).unwrap(), noon()), expected, "{uid}");
        }
    }

    #[test]
    fn every_container_that_can_run_qemu_counts() {
        let failed = waits("vm-runner", "ErrImagePull");
        let beside = |container: Value, status: Value| {
            let failed = failed.clone();
            is_replaced(move |pod| {
                let is_init = container["restartPolicy"].is_string();
                let (spec, list) = if is_init {
                    ("initContainers", "initContainerStatuses")
                } else {
                    ("containers", "containerStatuses")
                };
                let mut containers = pod["spec"][spec].as_array().cloned().unwrap_or_default();
                containers.push(container.clone());
                pod["spec"][spec] = containers.into();
                pod["status"]["containerStatuses"] = json!([failed]);
                let mut statuses = pod["status"][list].as_array().cloned().unwrap_or_default();
                statuses.push(status.clone());
                pod["status"][list] = statuses.into();
            })
        };
        let named = |name: &str| json!({ "name": name, "image": "i" });
        let running = |name: &str| json!({ "name": name, "state": { "running": {} } });
        let disk = json!([{ "name": "core-disk", "devicePath": "/dev/disk" }]);
        let qemu = |fields: Value| {
            let mut container = named("qemu");
            container.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
            container
        };
        assert!(beside(named("metrics"), running("metrics")), "it has no disk");
        assert!(!beside(qemu(json!({ "volumeDevices": disk })), running("qemu")));
        assert!(!beside(qemu(json!({ "volumeDevices": disk })), waits("qemu", "ContainerCreating")), "it may start");
        assert!(beside(qemu(json!({ "volumeDevices": disk })), waits("qemu", "ErrImagePull")));
        assert!(!beside(qemu(json!({ "volumeDevices": disk, "restartPolicy": "Always" })), running("qemu")));
        assert!(beside(qemu(json!({ "restartPolicy": "Always" })), running("qemu")), "it has no disk");
        assert!(!beside(qemu(json!({ "restartPolicy": "Never" })), running("qemu")));
        let reads = json!([{ "name": "vm-data", "mountPath": "/x", "readOnly": true }]);
        assert!(beside(qemu(json!({ "volumeMounts": reads })), running("qemu")));
    }

    #[test]
    fn a_node_has_half_a_minute_to_take_a_pod() {
        let untaken = |edit: &dyn Fn(&mut Value)| {
            let observed = applied(&rendered(&vm(|_| ()), &nothing()), |kind, object| {
                if kind == "Pod" {
                    object["spec"]["nodeName"] = json!("node-1");
                    edit(object);
                }
            });
            let pod = observed.objects.iter().find(|object| object.key.is_pod()).unwrap().clone();
            untaken_at(&pod).map(|time| time.to_string())
        };
        // By its creation, or by the time when it got its node.
        assert_eq!(untaken(&|_| ()).as_deref(), Some("2027-01-15T07:00:30Z"));
        let scheduled =
            json!([{ "type": "PodScheduled", "status": "True", "lastTransitionTime": "2027-01-15T07:30:00Z" }]);
        let bound = |pod: &mut Value| pod["status"] = json!({ "phase": "Pending", "conditions": scheduled });
        assert_eq!(untaken(&bound).as_deref(), Some("2027-01-15T07:30:30Z"));
        assert_eq!(untaken(&|pod| pod["spec"]["nodeName"] = Value::Null), None);
        assert_eq!(untaken(&|pod| pod["status"]["phase"] = json!("Running")), None);
        let statuses = json!([waits("vm-runner", "ContainerCreating")]);
        assert_eq!(untaken(&|pod| pod["status"]["containerStatuses"] = statuses.clone()), None);
    }
}
