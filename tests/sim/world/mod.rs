//! The rest of the cluster, as state machines that take one step at a time: scheduler, kubelets with the guests in their Pods, the controllers
//! of claims, and the garbage collector. [`World::steps`] says which steps are possible; the scheduler of the simulation chooses one.

mod collector;
mod guest;
pub mod kubelet;
mod volumes;

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

pub use self::guest::{Guest, Power, SHUTDOWN};
use crate::{
    api::{
        kinds::kind,
        request::{Request, Target, Verb},
        store::Store,
    },
    manager::NAMESPACE,
};

/// Something that a part of the cluster can do now.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Step {
    /// The scheduler finds a node for a Pod, or the volume controller a volume for a claim.
    Bind(Target),
    /// A volume grows.
    Grow(Target),
    /// The kubelet starts the containers of a Pod.
    Start(Target),
    /// The kubelet starts the containers of a Pod again, because its guest has ended.
    Again(Target),
    /// The agent in a Pod reports what it knows.
    Report(String),
    /// The agent in a Pod gets a changed configuration.
    Refresh(String),
    /// A guest has booted.
    Boot(String),
    /// The node controller deletes a Pod whose node is lost.
    Evict(Target),
    /// The kubelet ends the containers of a Pod that is being deleted.
    End(Target),
    /// The kubelet has ended them, and removes the Pod.
    Remove(Target),
    /// The garbage collector deletes an object whose owners are gone.
    Collect(Target),
    /// The garbage collector orphans what a deleted object owns.
    Orphan(Target),
    /// Nobody uses a claim any more that is being deleted.
    Release(Target),
}

/// What is true of the cluster and not in the API server.
#[derive(Clone, Default)]
pub struct World {
    /// The guests that run, by the UID of their Pod.
    pub guests: BTreeMap<String, Guest>,
    /// The nodes that the API server does not hear of any more, and since when. What runs there goes on.
    pub lost: BTreeMap<&'static str, Timestamp>,
}

/// The nodes of the cluster.
pub const NODES: [&str; 2] = ["node-1", "node-2"];

/// The name and UID of each claim that a Pod mounts, and whether it can write to it.
pub fn mounted(pod: &Value) -> Vec<(String, bool)> {
    let volumes = pod["spec"]["volumes"].as_array().into_iter().flatten();
    let claims = volumes.map(|volume| &volume["persistentVolumeClaim"]).filter(|claim| claim.is_object());
    let name = |claim: &Value| claim["claimName"].as_str().unwrap_or_default().to_owned();
    claims.map(|claim| (name(claim), claim["readOnly"] != true)).collect()
}

pub fn uid(object: &Value) -> String {
    object["metadata"]["uid"].as_str().unwrap_or_default().to_owned()
}

pub fn is_deleting(object: &Value) -> bool {
    !object["metadata"]["deletionTimestamp"].is_null()
}

/// Whether the kubelet reports that no container of a Pod will run again.
pub fn has_ended(pod: &Value) -> bool {
    ["Succeeded", "Failed"].iter().any(|phase| pod["status"]["phase"] == *phase)
}

impl World {
    /// What a cluster has before anybody makes a VM.
    pub fn furnish(store: &mut Store, now: Timestamp) {
        let make = |store: &mut Store, kind_name: &str, namespace: &str, object: Value| {
            let target =
                Target::new(kind(kind_name), namespace, object["metadata"]["name"].as_str().unwrap_or_default());
            let request = Request::of("kube-controller-manager", target, Verb::Create(object));
            assert_eq!(store.answer(now, &request).code, 201);
        };
        for name in ["default", NAMESPACE] {
            make(store, "Namespace", "", json!({ "metadata": { "name": name }, "status": { "phase": "Active" } }));
        }
        make(
            store,
            "ConfigMap",
            NAMESPACE,
            json!({ "metadata": { "name": "kube-root-ca.crt" }, "data": { "ca.crt": "" } }),
        );
        make(store, "ConfigMap", NAMESPACE, crate::people::template_set());
        make(
            store,
            "StorageClass",
            "",
            json!({ "metadata": { "name": "standard" }, "provisioner": "sim", "allowVolumeExpansion": true }),
        );
        for name in NODES {
            make(store, "Node", "", json!({ "metadata": { "name": name }, "spec": {} }));
            kubelet::report_node(name, true, store, now);
        }
    }

    /// The guests of a VM shut themselves down.
    pub fn shut_down(&mut self, vm: &str) {
        for guest in self.guests.values_mut().filter(|guest| guest.is_of_vm && guest.vm.0 == vm) {
            guest.power = Power::Down(SHUTDOWN);
        }
    }

    /// The nodes of a VM's guests evict them.
    pub fn evict(&mut self, vm: &str, store: &mut Store, now: Timestamp) {
        let of_vm = |guest: &Guest| guest.is_of_vm && guest.vm.0 == vm && !self.lost.contains_key(&*guest.node);
        let pods: Vec<String> =
            self.guests.iter().filter(|(_, guest)| of_vm(guest)).map(|(pod, _)| pod.clone()).collect();
        pods.iter().for_each(|pod| kubelet::fail(self, pod, store, now));
    }

    /// A node is lost: it goes on, and the API server does not hear of it.
    pub fn lose(&mut self, node: &'static str, store: &mut Store, now: Timestamp) {
        self.lost.insert(node, now);
        kubelet::report_node(node, false, store, now);
    }

    /// A lost node is back. The guests of Pods that were removed meanwhile end.
    pub fn find(&mut self, node: &'static str, store: &mut Store, now: Timestamp) {
        self.lost.remove(node);
        kubelet::report_node(node, true, store, now);
        self.forget_removed(store);
    }

    /// A Pod that was removed by force ends soon, too, if its node hears of that.
    fn forget_removed(&mut self, store: &Store) {
        let exists = |uid: &str| store.of("Pod").any(|(_, pod)| pod["metadata"]["uid"] == uid);
        let lost = &self.lost;
        self.guests.retain(|pod, guest| lost.contains_key(&*guest.node) || exists(pod));
    }

    /// What can happen now, in an order that is always the same.
    pub fn steps(&self, store: &Store, now: Timestamp) -> Vec<Step> {
        let mut steps = volumes::steps(store);
        steps.extend(kubelet::steps(self, store, now));
        steps.extend(guest::steps(self, store));
        steps.extend(collector::steps(store));
        steps
    }

    /// Does one of [`Self::steps`].
    pub fn take(&mut self, step: &Step, store: &mut Store, now: Timestamp) {
        match step {
            Step::Bind(target) if target.kind == kind("Pod") => kubelet::bind(self, target, store, now),
            Step::Bind(target) => volumes::bind(target, store, now),
            Step::Grow(target) => volumes::grow(target, store, now),
            Step::Start(target) => kubelet::start(self, target, store, now),
            Step::Again(target) => kubelet::again(self, target, store, now),
            Step::Evict(target) => kubelet::evict(target, store, now),
            Step::End(target) => kubelet::end(self, target, store, now),
            Step::Remove(target) => {
                self.guests.retain(|_, guest| guest.pod != *target);
                store.remove(target);
            }
            Step::Report(pod) => guest::report(self, pod, store, now),
            Step::Refresh(pod) => guest::refresh(self, pod, store),
            Step::Boot(pod) => drop(self.guests.get_mut(pod).map(|guest| guest.power = Power::Booted)),
            Step::Collect(target) => collector::collect(target, store, now),
            Step::Orphan(target) => collector::orphan(target, store, now),
            Step::Release(target) => volumes::release(target, store, now),
        }
        self.forget_removed(store);
    }
}
