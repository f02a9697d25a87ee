//! The scheduler, and the kubelets of the nodes.

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use super::{Guest, NODES, Power, Step, World, has_ended, is_deleting, mounted, uid};
use crate::{
    api::{
        kinds::kind,
        request::{Request, Target, Verb},
        store::{Store, seconds},
    },
    people::{PROTOTYPE, is_persons},
};

/// The container in which QEMU runs.
const RUNNER: &str = "vm-runner";

/// How long a Pod stays on a node that is lost
/// (<https://kubernetes.io/docs/concepts/scheduling-eviction/taint-and-toleration/#taint-based-evictions>).
const TOLERATED: SignedDuration = SignedDuration::from_secs(300);

/// How long a slow guest needs to power down.
const SLOW: SignedDuration = SignedDuration::from_secs(5);

pub fn steps(world: &World, store: &Store, now: Timestamp) -> Vec<Step> {
    let mut steps = Vec::new();
    for (target, pod) in store.of("Pod").filter(|(_, pod)| !has_ended(pod)) {
        let node = pod["spec"]["nodeName"].as_str();
        let (has_node, lost) = (node.is_some(), node.and_then(|node| world.lost.get(node)));
        if let Some(since) = lost {
            if !is_deleting(pod) && *since + TOLERATED <= now {
                steps.push(Step::Evict(target.clone()));
            }
        } else if is_deleting(pod) {
            let runs = world.guests.contains_key(&uid(pod));
            // The guest has its whole grace period.
            if runs && has_powered_down(pod, now) {
                steps.push(Step::End(target.clone()));
            }
            let is_over = pod["metadata"]["deletionTimestamp"].as_str().and_then(|end| end.parse::<Timestamp>().ok());
            if !runs || is_over.is_some_and(|end| end + SignedDuration::from_secs(2) < now) {
                steps.push(Step::Remove(target.clone()));
            }
        } else if world.guests.get(&uid(pod)).is_some_and(|guest| guest.power.is_down() && !guest.stays_down()) {
            steps.push(Step::Again(target.clone()));
        } else if !has_node && world.node().is_some() && can_be_scheduled(target, pod, store) {
            steps.push(Step::Bind(target.clone()));
        } else if has_node && pod["status"]["phase"] == "Pending" && can_mount(target, pod, store) {
            steps.push(Step::Start(target.clone()));
        }
    }
    steps
}

/// Whether a guest that was asked to power down has had time for it: each other one needs some seconds, so that all else happens first.
fn has_powered_down(pod: &Value, now: Timestamp) -> bool {
    let metadata = &pod["metadata"];
    let is_slow = uid(pod).bytes().last().is_some_and(|digit| digit % 2 == 1);
    let Some(end) = metadata["deletionTimestamp"].as_str().and_then(|end| end.parse::<Timestamp>().ok()) else {
        return true;
    };
    // A vmctl waits for the guest of its VM.
    if metadata["labels"][PROTOTYPE].is_string() {
        return end <= now;
    }
    let given = SignedDuration::from_secs(metadata["deletionGracePeriodSeconds"].as_i64().unwrap_or_default());
    !is_slow || end - given + SLOW <= now || end <= now
}

fn claim_of<'a>(pod: &Target, name: &str, store: &'a Store) -> Option<&'a Value> {
    store.get(&Target::new(kind("PersistentVolumeClaim"), &pod.namespace, name))
}

fn can_be_scheduled(target: &Target, pod: &Value, store: &Store) -> bool {
    // One that is being deleted may be used by a Pod that exists, and by no new one.
    let is_usable = |claim: &Value| claim["status"]["phase"] == "Bound" && !is_deleting(claim);
    mounted(pod).iter().all(|(name, _)| claim_of(target, name, store).is_some_and(is_usable))
}

/// All that a Pod mounts and that is not optional.
pub fn needed(target: &Target, pod: &Value) -> Vec<Target> {
    let of = |kind_name: &str, name: &str| Target::new(kind(kind_name), &target.namespace, name);
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let sources = volumes.flat_map(|volume| {
        let projected = volume["projected"]["sources"].as_array().into_iter().flatten();
        projected.chain(std::iter::once(volume))
    });
    let sources = sources.into_iter().flat_map(|source| {
        let parts = [("ConfigMap", &source["configMap"], "name"), ("Secret", &source["secret"], "secretName")];
        parts.map(|(kind_name, part, field)| {
            let name = part[field].as_str().or_else(|| part["name"].as_str());
            name.filter(|_| part["optional"] != true).map(|name| of(kind_name, name))
        })
    });
    let claims = mounted(pod).into_iter().map(|(name, _)| of("PersistentVolumeClaim", &name));
    sources.flatten().chain(claims).collect()
}

/// Whether all that a Pod needs exists.
fn can_mount(target: &Target, pod: &Value, store: &Store) -> bool {
    needed(target, pod).iter().all(|needed| store.get(needed).is_some())
}

/// The name of the ConfigMap with the runner's configuration: the VM's.
fn configured(pod: &Value) -> Option<String> {
    let volumes = pod["spec"]["volumes"].as_array()?;
    let config = volumes.iter().find(|volume| volume["name"] == "config")?;
    let mut sources = config["projected"]["sources"].as_array()?.iter();
    sources.find_map(|source| source["configMap"]["name"].as_str()).map(str::to_owned)
}

impl World {
    /// A node that the API server hears of.
    fn node(&self) -> Option<&'static str> {
        NODES.into_iter().find(|node| !self.lost.contains_key(node))
    }
}

/// The kubelet, or the node controller in its place, says how a node is.
pub fn report_node(name: &str, is_ready: bool, store: &mut Store, now: Timestamp) {
    let (status, reason) = if is_ready { ("True", "KubeletReady") } else { ("Unknown", "NodeStatusUnknown") };
    let ready = json!({
        "type": "Ready", "status": status, "reason": reason, "message": "", "lastTransitionTime": seconds(now),
    });
    let node = Target::new(kind("Node"), "", name);
    store.write(now, &node, "kubelet", true, |node| node["status"]["conditions"] = json!([ready]));
    store.write(now, &node, "kube-controller-manager", false, |node| {
        let taint = json!({ "key": "node.kubernetes.io/unreachable", "effect": "NoExecute" });
        node["spec"]["taints"] = if is_ready { json!([]) } else { json!([taint]) };
    });
}

/// Deletes a Pod as the control plane does.
pub fn evict(target: &Target, store: &mut Store, now: Timestamp) {
    store.answer(now, &Request::of("kube-controller-manager", target.clone(), Verb::Delete(json!({}))));
}

/// The kubelet ends a Pod, because its node has too little memory. The Pod stays, and has failed.
pub fn fail(world: &mut World, pod: &str, store: &mut Store, now: Timestamp) {
    let Some(guest) = world.guests.remove(pod) else { return };
    let ended = json!({ "terminated": { "exitCode": 137, "reason": "Error", "finishedAt": seconds(now) } });
    store.write(now, &guest.pod, "kubelet", true, |pod| {
        pod["status"]["phase"] = json!("Failed");
        pod["status"]["reason"] = json!("Evicted");
        pod["status"]["message"] = json!("The node was low on resource: memory.");
        for list in ["containerStatuses", "initContainerStatuses"] {
            for status in pod["status"][list].as_array_mut().into_iter().flatten() {
                status["ready"] = json!(false);
                status["state"] = ended.clone();
            }
        }
    });
}

pub fn bind(world: &World, target: &Target, store: &mut Store, now: Timestamp) {
    let Some(node) = world.node() else { return };
    store.write(now, target, "kube-scheduler", false, |pod| pod["spec"]["nodeName"] = json!(node));
    let condition = json!({ "type": "PodScheduled", "status": "True", "lastTransitionTime": seconds(now) });
    store.write(now, target, "kube-scheduler", true, |pod| pod["status"]["conditions"] = json!([condition]));
}

pub fn start(world: &mut World, target: &Target, store: &mut Store, now: Timestamp) {
    let Some(pod) = store.get(target).cloned() else { return };
    let claims = mounted(&pod).into_iter().filter_map(|(name, writes)| {
        let claim = claim_of(target, &name, store)?;
        Some((name, uid(claim), writes))
    });
    // Its owner may have been taken away. The configuration that it mounts has the VM's name.
    let vm = configured(&pod).unwrap_or_default();
    let known = store.get(&Target::new(kind("VirtualMachine"), &target.namespace, &vm));
    let owner = pod["metadata"]["ownerReferences"][0]["uid"].as_str().map(str::to_owned);
    let vm_uid = owner.or_else(|| known.map(uid)).unwrap_or_default();
    let has_runner = pod["spec"]["containers"].as_array().is_some_and(|all| all.iter().any(|it| it["name"] == RUNNER));
    let of_vm = has_runner && !is_persons(&pod);
    let guest = Guest {
        pod: target.clone(),
        node: pod["spec"]["nodeName"].as_str().unwrap_or_default().to_owned(),
        config: super::guest::config_of(&vm, store).unwrap_or_default().to_owned(),
        vm: (vm, vm_uid),
        claims: claims.collect(),
        power: Power::Starting,
        reported: None,
        since: now,
        is_of_vm: of_vm,
    };
    world.guests.insert(uid(&pod), guest);
    let started = json!({ "running": { "startedAt": seconds(now) } });
    let states = |list: &str| -> Vec<Value> {
        let containers = pod["spec"][list].as_array().into_iter().flatten();
        containers
            .map(|container| {
                json!({
                    "name": container["name"], "image": container["image"], "ready": true, "started": true, "restartCount": 0,
                    "state": started, "containerID": format!("sim://{}/{}", uid(&pod), container["name"]),
                })
            })
            .collect()
    };
    let (containers, init) = (states("containers"), states("initContainers"));
    let ready = json!({ "type": "Ready", "status": "True", "lastTransitionTime": seconds(now) });
    store.write(now, target, "kubelet", true, |pod| {
        pod["status"]["phase"] = json!("Running");
        pod["status"]["startTime"] = json!(seconds(now));
        pod["status"]["podIP"] = json!("10.0.0.8");
        pod["status"]["podIPs"] = json!([{ "ip": "10.0.0.8" }]);
        pod["status"]["containerStatuses"] = json!(containers);
        pod["status"]["initContainerStatuses"] = json!(init);
        if let Some(conditions) = pod["status"]["conditions"].as_array_mut() {
            conditions.push(ready);
        }
    });
}

/// The runner has ended with its guest, and the kubelet starts it again.
pub fn again(world: &mut World, target: &Target, store: &mut Store, now: Timestamp) {
    let Some(guest) = store.get(target).and_then(|pod| world.guests.get_mut(&uid(pod))) else { return };
    (guest.power, guest.since) = (Power::Starting, now);
    store.write(now, target, "kubelet", true, |pod| {
        for status in pod["status"]["containerStatuses"].as_array_mut().into_iter().flatten() {
            status["restartCount"] = json!(status["restartCount"].as_i64().unwrap_or_default() + 1);
            status["state"] = json!({ "running": { "startedAt": seconds(now) } });
        }
    });
}

/// The containers of a Pod that is being deleted end: the guest has shut down, or its time is over.
pub fn end(world: &mut World, target: &Target, store: &mut Store, now: Timestamp) {
    let Some(pod) = store.get(target).cloned() else { return };
    // The last report, if nothing is in its way, comes before the agent ends.
    if let Some(guest) = world.guests.get_mut(&uid(&pod))
        && !guest.power.is_down()
    {
        guest.power = Power::Down("PoweredDown");
    }
    super::guest::report(world, &uid(&pod), store, now);
    world.guests.remove(&uid(&pod));
    store.write(now, target, "kubelet", true, |pod| {
        for list in ["containerStatuses", "initContainerStatuses"] {
            for status in pod["status"][list].as_array_mut().into_iter().flatten() {
                status["ready"] = json!(false);
                let ended = json!({ "exitCode": 0, "reason": "Completed", "finishedAt": seconds(now) });
                status["state"] = json!({ "terminated": ended });
            }
        }
    });
}
