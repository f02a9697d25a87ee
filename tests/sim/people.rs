//! What people and their programs do to VMs and to what belongs to them.

use std::fmt;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::{
    api::{
        kinds::kind,
        request::{Body, Request, Target, Verb},
        store::{Store, seconds},
    },
    manager::NAMESPACE,
    sets::{CONTENTS, Content},
    world::World,
};

/// The field manager of people.
const PERSON: &str = "kubectl-edit";
/// The field manager of a backup program.
const BACKUP: &str = "velero-server";

/// Something that a person does.
#[derive(Clone, Debug, PartialEq)]
pub enum Act {
    /// Makes a VM, if there is none of that name.
    Make,
    Start,
    Stop,
    Restart(u32),
    /// Sets the number of CPUs.
    Cpus(u32),
    /// Lets the disk grow, to so many GiB.
    Grow(u32),
    /// Deletes the VM; with `true` its objects stay.
    Delete {
        orphan: bool,
    },
    /// Deletes the VM's Pod.
    DeletePod,
    /// Its node evicts the VM's Pod.
    Evict,
    /// Deletes the object of this kind that has the VM's name.
    DeleteObject(&'static str),
    /// Deletes the claim of the VM's disk.
    DeleteClaim,
    /// Overwrites the labels of an object of the VM.
    Relabel(&'static str),
    /// Takes all entries of managedFields away from an object of the VM.
    Strip(&'static str),
    /// Changes what the manager has applied to the ConfigMap.
    EditMap,
    /// Makes a Pod that writes to the VM's disk, or deletes it.
    Mount(bool),
    /// Makes an object of their own that has the name of one of the VM's, or deletes it.
    Squat(&'static str, bool),
    /// Lets the VM have the template set [`SET`], or none.
    UseSet(bool),
    /// Changes what that set has: at first [`Content::Moved`].
    Set(Content),
    /// Takes the first of the VM's disks out of its spec, or puts all back.
    DropDisk(bool),
    /// Makes a quota of so many Pods, or deletes it.
    Quota(Option<u32>),
    /// Makes a copy of the VM's Pod with the same labels, as `kubectl debug --copy-to` does, or deletes it.
    CopyPod(bool),
    /// Lets the VM stay down when its guest shuts itself down, or not.
    StopWithGuest(bool),
    /// Shuts the guest down, from inside.
    Shutdown,
    /// Makes the pool, or lets it have another number of VMs.
    Pool(u32),
    /// Sets the number of CPUs in the template of the pool.
    PoolCpus(u32),
    /// Deletes the pool; with `true` its VMs stay.
    DeletePool {
        orphan: bool,
    },
    /// Makes a copy of the pool's first VM, with a name that the pool could give.
    CopyMember,
    /// Gives the VM of a pool to a person, or takes it back.
    Assign(bool),
    /// Takes the VM out of its pool.
    OutOfPool,
    /// Makes a Pod with vmctl, for which the VM is the prototype.
    RunPod(&'static str),
    /// Deletes that Pod; with `true` at once, and its containers do not hear of it.
    EndPod(&'static str, bool),
    /// Makes what is gone again as a backup program does: with other UIDs, and without a status and owners.
    Restore,
}

/// Something that a person does to the VM of a name.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    pub vm: &'static str,
    pub act: Act,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {}", self.act, self.vm)
    }
}

/// The names of the VMs in random scenarios. The disks of the last two have claims of the same name ([`disk`]), and those of the third have no names.
pub const VMS: [&[&str]; 4] = [&["apple"], &["apple", "pear"], &["plum"], &["fig", "fig-tree"]];

/// What people do with these VMs in a random scenario.
pub fn script(random: &mut fastrand::Rng, vms: &[&'static str]) -> Vec<Op> {
    let of_all = |act: Act| vms.iter().map(move |vm| Op { vm, act: act.clone() });
    let count = random.usize(3..12);
    let more = (0..count).map(|number| Op { vm: vms[random.usize(0..vms.len())], act: act(random, number) });
    let mut ops: Vec<Op> = of_all(Act::Make).chain(more).collect();
    // At the end all VMs exist and should run, so that there is something to compare.
    let last = [
        Act::Quota(None),
        Act::Make,
        Act::Start,
        Act::Mount(false),
        Act::CopyPod(false),
        Act::Set(Content::Moved),
        Act::DropDisk(false),
    ];
    ops.extend(last.into_iter().flat_map(of_all));
    ops.extend(SQUATTED.into_iter().flat_map(|kind| of_all(Act::Squat(kind, false))));
    ops
}

/// What people do with a pool in a random scenario.
pub fn pool_script(random: &mut fastrand::Rng) -> Vec<Op> {
    const MEMBERS: [&str; 3] = ["desk-0", "desk-1", "desk-2"];
    let count = random.usize(3..12);
    let op = |random: &mut fastrand::Rng| {
        let member = MEMBERS[random.usize(0..MEMBERS.len())];
        let of_pool = |act| Op { vm: POOL, act };
        let of_member = |act| Op { vm: member, act };
        match random.u32(0..16) {
            0..3 => of_pool(Act::Pool(random.u32(0..4))),
            3..5 => of_pool(Act::PoolCpus(random.u32(1..3))),
            5 => of_pool(Act::DeletePool { orphan: false }),
            6 => of_pool(Act::DeletePool { orphan: true }),
            7 => of_pool(Act::CopyMember),
            8 => of_member(Act::Assign(random.bool())),
            9 => of_member(Act::OutOfPool),
            10..12 => of_member(Act::Delete { orphan: random.bool() }),
            12 => of_member(Act::Make),
            13 => of_member(Act::Start),
            14 => of_member(Act::Stop),
            _ => of_member(Act::Strip("VirtualMachine")),
        }
    };
    let first = [Op { vm: POOL, act: Act::Pool(2) }];
    let more: Vec<Op> = (0..count).map(|_| op(random)).collect();
    first.into_iter().chain(more).chain([Op { vm: POOL, act: Act::Pool(2) }]).collect()
}

/// What people do with Pods with vmctl in a random scenario. The names of the prototypes with those of the Pods give the same names of VMs.
pub fn vmctl_script(random: &mut fastrand::Rng) -> Vec<Op> {
    const PODS: [(&str, &str); 3] = [("web", "db-x-0"), ("web-db", "x-0"), ("web", "y-0")];
    let makes = PROTOTYPES.map(|vm| Op { vm, act: Act::Make });
    let count = random.usize(3..10);
    let more: Vec<Op> = (0..count)
        .map(|_| {
            let (vm, pod) = PODS[random.usize(0..PODS.len())];
            let act = match random.u32(0..6) {
                0..3 => Act::RunPod(pod),
                3..5 => Act::EndPod(pod, random.bool()),
                _ => Act::Cpus(random.u32(1..3)),
            };
            Op { vm, act }
        })
        .collect();
    makes.into_iter().chain([Op { vm: "web", act: Act::RunPod("db-x-0") }]).chain(more).collect()
}

fn act(random: &mut fastrand::Rng, number: usize) -> Act {
    let kinds = ["ConfigMap", "Secret", "Service", "Pod", "PersistentVolumeClaim"];
    let any = |random: &mut fastrand::Rng| kinds[random.usize(0..kinds.len())];
    match random.u32(0..41) {
        0..3 => Act::Stop,
        3..6 => Act::Start,
        6..8 => Act::Restart(u32::try_from(number).unwrap_or_default()),
        8 => Act::Cpus(random.u32(1..3)),
        // Each is larger than the one before.
        9 => Act::Grow(u32::try_from(number).unwrap_or_default() + 2),
        10..12 => Act::Delete { orphan: false },
        12 => Act::Delete { orphan: true },
        13..15 => Act::Make,
        15 => Act::DeletePod,
        16 => Act::DeleteObject(kinds[random.usize(0..3)]),
        17 => Act::Relabel(any(random)),
        18 => Act::Strip(any(random)),
        19 => Act::EditMap,
        20 => Act::Mount(random.bool()),
        21..23 => Act::Squat(SQUATTED[random.usize(0..SQUATTED.len())], true),
        23..25 => Act::UseSet(random.bool()),
        25 => Act::Set(if random.bool() { Content::Broken } else { Content::Moved }),
        26 => Act::CopyPod(true),
        27..29 => Act::Restore,
        29..31 => Act::StopWithGuest(random.u32(0..3) > 0),
        31..33 => Act::Shutdown,
        33..35 => Act::Evict,
        35 => Act::DeleteClaim,
        36 => Act::Strip("VirtualMachine"),
        37 => Act::DropDisk(random.bool()),
        38 => Act::Quota(random.bool().then(|| random.u32(0..3))),
        _ => Act::Set(CONTENTS[random.usize(0..CONTENTS.len())]),
    }
}

/// Whether the end depends on when people do these things.
pub fn depends_on_time(script: &[Op]) -> bool {
    let has = |is_it: fn(&Act) -> bool| script.iter().any(|op| is_it(&op.act));
    // One of two VMs gets the claim.
    if script.iter().any(|op| op.vm == "fig-tree") {
        return true;
    }
    // Who deletes a VM before its disk has grown gets the disk as it was.
    let may_be_too_late = has(|act| matches!(act, Act::Grow(_))) && has(|act| matches!(act, Act::Delete { .. }));
    may_be_too_late
        || has(|act| matches!(act, Act::Set(content) if *content != Content::Moved))
        || has(|act| {
            matches!(
                act,
                Act::DeleteClaim
                    | Act::Relabel(_)
                    | Act::Strip(_)
                    | Act::Mount(true)
                    | Act::Squat(_, true)
                    | Act::UseSet(_)
                    | Act::DropDisk(true)
                    | Act::Quota(Some(_))
                    | Act::Pool(_)
                    | Act::RunPod(_)
                    | Act::CopyPod(true)
                    | Act::StopWithGuest(true)
                    | Act::Restore
                    | Act::Delete { orphan: true }
            )
        })
}

/// Whether a VM is as its spec wants it in the end, although the end may depend on the time: nothing that people did is in its way.
pub fn ends_ready(script: &[Op]) -> bool {
    let is_harmless = |act: &Act| {
        matches!(
            act,
            Act::Make
                | Act::Start
                | Act::Restart(_)
                | Act::UseSet(_)
                | Act::Set(_)
                | Act::DropDisk(_)
                | Act::Stop
                | Act::Strip("VirtualMachine")
                | Act::Quota(_)
        )
    };
    script.iter().all(|op| is_harmless(&op.act))
}

/// The kinds of which people make objects with the names of a VM's.
const SQUATTED: [&str; 4] = ["ConfigMap", "Pod", "Secret", "PersistentVolumeClaim"];

/// The template set of people.
pub const SET: &str = "moved";

/// The quota that people make.
const QUOTA: &str = "few";

/// The ConfigMap with that set.
pub fn template_set() -> Value {
    json!({
        "metadata": { "name": "set", "labels": { "vmoperator.jdrupes.org/template-set": SET } },
        "data": { "pod.yaml.j2": Content::Moved.data()["pod.yaml.j2"] },
    })
}

/// The name of the claim of a VM's disk.
pub fn disk(vm: &str) -> String {
    if vm == UNNAMED { format!("{vm}-disk-0") } else { format!("{vm}-{}-disk", disk_name(vm)) }
}

/// The VM whose disks have no names.
pub const UNNAMED: &str = "plum";

/// The pool of people.
pub const POOL: &str = "desk";

/// The label of a Pod with vmctl: the prototype.
pub const PROTOTYPE: &str = "prototype";

/// The prototypes: VMs that do not run themselves.
pub const PROTOTYPES: [&str; 2] = ["web", "web-db"];

/// The disks of a VM. Those without names have serial numbers, so that it can be told which is which.
fn disks_of(vm: &str) -> Value {
    let template = |metadata: Value| json!({ "metadata": metadata, "spec": { "resources": { "requests": { "storage": "1Gi" } } } });
    if vm == UNNAMED {
        let disk = |serial: &str| json!({ "serial": serial, "volumeClaimTemplate": template(json!({})) });
        return json!([disk("one"), disk("two")]);
    }
    json!([{ "volumeClaimTemplate": template(json!({ "name": disk_name(vm) })) }])
}

/// The name of a VM's disk in its spec.
fn disk_name(vm: &str) -> &'static str {
    if vm == "fig" { "tree-core" } else { "core" }
}

/// A VM with one disk.
pub fn manifest(name: &str) -> Value {
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": name },
        "spec": { "loadBalancerService": {}, "vm": {
            "state": if PROTOTYPES.contains(&name) { "Stopped" } else { "Running" }, "maximumCpus": 2, "powerdownTimeout": 20,
            "disks": disks_of(name),
        } },
    })
}

impl Op {
    /// These things, done to one VM.
    pub fn all(vm: &'static str, acts: Vec<Act>) -> Vec<Self> {
        acts.into_iter().map(|act| Self { vm, act }).collect()
    }

    /// Does it. What does not exist can't be changed, and that is no matter here.
    pub fn carry_out(&self, store: &mut Store, world: &mut World, now: Timestamp) {
        let name = self.vm;
        let vm = Target::new(kind("VirtualMachine"), NAMESPACE, name);
        let merge = |patch: Value| Verb::Patch(Body::Merge(patch));
        let of = |kind_name: &str| {
            let own = if kind_name == "PersistentVolumeClaim" { disk(name) } else { name.to_owned() };
            let own = if kind_name == "Secret" { format!("{name}-display-secret") } else { own };
            Target::new(kind(kind_name), NAMESPACE, &own)
        };
        let (target, verb) = match &self.act {
            Act::Make => (vm, Verb::Create(manifest(name))),
            Act::Start => (vm, merge(json!({ "spec": { "vm": { "state": "Running" } } }))),
            Act::Stop => (vm, merge(json!({ "spec": { "vm": { "state": "Stopped" } } }))),
            Act::Restart(number) => {
                let at = format!("2027-01-15T08:00:{number:02}Z");
                (vm, merge(json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/restartedAt": at } } })))
            }
            Act::Cpus(cpus) => (vm, merge(json!({ "spec": { "vm": { "currentCpus": cpus } } }))),
            Act::Grow(size) => {
                let size = format!("{size}Gi");
                let path = "/spec/vm/disks/0/volumeClaimTemplate/spec/resources/requests/storage";
                (vm, Verb::Patch(Body::Json(json!([{ "op": "replace", "path": path, "value": size }]))))
            }
            Act::Delete { orphan } => {
                let policy = if *orphan { "Orphan" } else { "Background" };
                (vm, Verb::Delete(json!({ "propagationPolicy": policy })))
            }
            Act::DeletePod => (of("Pod"), Verb::Delete(json!({}))),
            Act::DeleteObject(kind_name) => (of(kind_name), Verb::Delete(json!({}))),
            Act::DeleteClaim => (of("PersistentVolumeClaim"), Verb::Delete(json!({}))),
            Act::Relabel(kind_name) => {
                let labels = json!({ "app.kubernetes.io/name": "other", "app.kubernetes.io/instance": "nobody" });
                (of(kind_name), merge(json!({ "metadata": { "labels": labels } })))
            }
            Act::Strip(kind_name) => (of(kind_name), merge(json!({ "metadata": { "managedFields": [{}] } }))),
            Act::EditMap => (of("ConfigMap"), merge(json!({ "data": { "config.yaml": "edited" } }))),
            Act::UseSet(is_used) => {
                let templates = if *is_used { json!({ "set": SET }) } else { Value::Null };
                (vm, merge(json!({ "spec": { "templates": templates } })))
            }
            Act::Set(content) => {
                let set = Target::new(kind("ConfigMap"), NAMESPACE, "set");
                (set, merge(json!({ "data": content.data() })))
            }
            Act::DropDisk(is_dropped) => {
                let disks = store.get(&vm).and_then(|vm| vm["spec"]["vm"]["disks"].as_array()).map_or(0, Vec::len);
                let step = match (is_dropped, disks) {
                    (true, 2) => json!({ "op": "remove", "path": "/spec/vm/disks/0" }),
                    (false, 1) if name == UNNAMED => {
                        json!({ "op": "add", "path": "/spec/vm/disks/0", "value": disks_of(name)[0] })
                    }
                    _ => return,
                };
                (vm, Verb::Patch(Body::Json(json!([step]))))
            }
            Act::Quota(Some(pods)) => {
                let hard = json!({ "pods": pods.to_string() });
                let quota = json!({ "metadata": { "name": QUOTA }, "spec": { "hard": hard } });
                (Target::new(kind("ResourceQuota"), NAMESPACE, QUOTA), Verb::Create(quota))
            }
            Act::Pool(replicas) if store.get(&of("VmPool")).is_some() => {
                (of("VmPool"), merge(json!({ "spec": { "replicas": replicas } })))
            }
            Act::Pool(replicas) => (of("VmPool"), Verb::Create(pool(name, *replicas))),
            Act::PoolCpus(cpus) => {
                let template = json!({ "spec": { "vm": { "currentCpus": cpus } } });
                (of("VmPool"), merge(json!({ "spec": { "template": template } })))
            }
            Act::DeletePool { orphan } => {
                let policy = if *orphan { "Orphan" } else { "Background" };
                (of("VmPool"), Verb::Delete(json!({ "propagationPolicy": policy })))
            }
            Act::CopyMember => {
                let Some(first) = store.get(&Target::new(kind("VirtualMachine"), NAMESPACE, &format!("{name}-0")))
                else {
                    return;
                };
                let (mut copy, of) = (without_identity(first), format!("{name}-7"));
                copy["metadata"]["name"] = json!(of);
                (Target::new(kind("VirtualMachine"), NAMESPACE, &of), Verb::Create(copy))
            }
            Act::Assign(is_assigned) => {
                let user = json!({ "pool": POOL, "user": "alice", "assignedAt": seconds(now) });
                let assignment = if *is_assigned { user } else { Value::Null };
                let patch = merge(json!({ "status": { "assignment": assignment } }));
                store.answer(now, &Request { subresource: "status", ..Request::of(PERSON, vm, patch) });
                return;
            }
            Act::OutOfPool => (vm, merge(json!({ "spec": { "pools": [] } }))),
            Act::RunPod(pod) => {
                let made = json!({
                    "metadata": { "name": pod, "labels": { PROTOTYPE: name } },
                    "spec": { "containers": [{ "name": "vmctl", "image": "vmctl" }] },
                });
                (Target::new(kind("Pod"), NAMESPACE, pod), Verb::Create(made))
            }
            Act::EndPod(pod, is_forced) => {
                let options = if *is_forced { json!({ "gracePeriodSeconds": 0 }) } else { json!({}) };
                (Target::new(kind("Pod"), NAMESPACE, pod), Verb::Delete(options))
            }
            Act::Quota(None) => (Target::new(kind("ResourceQuota"), NAMESPACE, QUOTA), Verb::Delete(json!({}))),
            Act::CopyPod(true) => {
                let Some(pod) = store.get(&of("Pod")) else { return };
                let mut copy = without_identity(pod);
                copy["metadata"]["name"] = json!(copy_of(name));
                drop(copy["spec"].as_object_mut().map(|spec| spec.remove("nodeName")));
                (Target::new(kind("Pod"), NAMESPACE, &copy_of(name)), Verb::Create(copy))
            }
            Act::CopyPod(false) => (Target::new(kind("Pod"), NAMESPACE, &copy_of(name)), Verb::Delete(json!({}))),
            Act::StopWithGuest(stops) => (vm, merge(json!({ "spec": { "guestShutdownStops": stops } }))),
            Act::Shutdown => return world.shut_down(name),
            Act::Evict => return world.evict(name, store, now),
            Act::Restore => return restore(name, store, now),
            Act::Squat(kind_name, true) => {
                let pod = json!({ "spec": { "containers": [{ "name": "main", "image": "tool" }] } });
                let claim = json!({ "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } } });
                let mut made = match *kind_name {
                    "Pod" => pod,
                    "PersistentVolumeClaim" => claim,
                    _ => json!({ "data": { "mine": "bWluZQ==" } }),
                };
                made["metadata"]["name"] = json!(of(kind_name).name);
                (of(kind_name), Verb::Create(made))
            }
            // Only their own: the object may be the VM's.
            Act::Squat(kind_name, false) if store.get(&of(kind_name)).is_some_and(is_persons) => {
                (of(kind_name), Verb::Delete(json!({})))
            }
            Act::Squat(_, false) => return,
            Act::Mount(true) => (Target::new(kind("Pod"), NAMESPACE, &writer(name)), Verb::Create(writing_pod(name))),
            Act::Mount(false) => (Target::new(kind("Pod"), NAMESPACE, &writer(name)), Verb::Delete(json!({}))),
        };
        let makes = matches!(verb, Verb::Create(_));
        let answer = store.answer(now, &Request::of(PERSON, target, verb));
        assert!(!makes || answer.code != 422, "{self}: {}", answer.body["message"]);
    }
}

/// A pool that makes VMs.
fn pool(name: &str, replicas: u32) -> Value {
    let template = json!({ "spec": {
        "loadBalancerService": {}, "vm": { "maximumCpus": 2, "powerdownTimeout": 20, "disks": disks_of(name) },
    } });
    json!({ "metadata": { "name": name }, "spec": { "permissions": [], "replicas": replicas, "template": template } })
}

/// An object without what the API server and its controllers have given it.
fn without_identity(object: &Value) -> Value {
    let mut object = object.clone();
    let fields = ["uid", "resourceVersion", "ownerReferences", "managedFields", "creationTimestamp", "finalizers"];
    for (pointer, fields) in [("/metadata", &fields[..]), ("/spec", &["volumeName"]), ("", &["status"])] {
        let part = object.pointer_mut(pointer).and_then(Value::as_object_mut);
        part.into_iter().for_each(|part| part.retain(|name, _| !fields.contains(&name.as_str())));
    }
    object
}

/// Makes the VM and its objects as they were last, where there are none now.
fn restore(name: &str, store: &mut Store, now: Timestamp) {
    let objects = [
        ("PersistentVolumeClaim", disk(name)),
        ("Secret", format!("{name}-display-secret")),
        ("ConfigMap", name.to_owned()),
        ("VirtualMachine", name.to_owned()),
    ];
    for (kind_name, name) in objects {
        let target = Target::new(kind(kind_name), NAMESPACE, &name);
        if store.get(&target).is_some() {
            continue;
        }
        let last = store.changes.iter().rev().find(|change| change.target == target && change.after.is_none());
        if let Some(last) = last.map(|change| without_identity(&change.last)) {
            store.answer(now, &Request::of(BACKUP, target, Verb::Create(last)));
        }
    }
}

/// Whether a backup program made the object.
pub fn is_restored(object: &Value) -> bool {
    object["metadata"]["managedFields"].as_array().into_iter().flatten().any(|entry| entry["manager"] == BACKUP)
}

/// Whether a person made the object and the manager has never applied anything to it.
pub fn is_persons(object: &Value) -> bool {
    let mut entries = object["metadata"]["managedFields"].as_array().into_iter().flatten();
    let is_ours = |entry: &Value| entry["manager"].as_str().is_some_and(|manager| manager.starts_with("vm-operator"));
    let has = |manager: &str, field: &str| {
        entries.clone().any(|entry| entry["manager"] == manager && !entry["fieldsV1"][field].is_null())
    };
    (has(PERSON, "f:spec") || has(PERSON, "f:data")) && !is_restored(object) && !entries.any(is_ours)
}

/// The name of a person's copy of the VM's Pod.
fn copy_of(vm: &str) -> String {
    format!("{vm}-copy")
}

/// The name of a person's Pod that writes to the VM's disk.
fn writer(vm: &str) -> String {
    format!("{vm}-writer")
}

fn writing_pod(vm: &str) -> Value {
    json!({
        "metadata": { "name": writer(vm) },
        "spec": {
            "containers": [{ "name": "main", "image": "tool", "volumeMounts": [{ "name": "disk", "mountPath": "/disk" }] }],
            "volumes": [{ "name": "disk", "persistentVolumeClaim": { "claimName": disk(vm) } }],
        },
    })
}
