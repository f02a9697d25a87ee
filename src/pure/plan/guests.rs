//! The Pods in which a guest of a VM may run, and what makes them.
//!
//! Identity does not hang on labels, because anybody may change them ([`crate::observed::whose`]):
//!
//! | a Pod that names the VM or can write to a claim of it | is |
//! |---|---|
//! | is the VM's by its owner, by what the manager applied, or because the VM's status names it | the VM's |
//! | is made by something (a StatefulSet) that is proven to be the VM's ([`Object::is_maker_of`]) | the VM's |
//! | is a former VM's of the same name, or made by something that is | "previous": it must end first |
//! | any other, that can write to a claim | a stranger: nothing is started beside it, and it is never deleted |
//!
//! A guest runs in a Pod if its label, its name or its container says so, or if it can write to a claim of the VM. Other Pods that templates
//! render are objects like any other, and so are the Pods of what the manager has made for longer than the VM runs, such as a Job that makes
//! backups. What only says that it is such a Job may be a person's, so its Pods are strangers.

use std::sync::Arc;

use kube::ResourceExt;

use crate::{
    api::VirtualMachine,
    object::{COMPONENT_LABEL, CONTAINER_NAME, HASH_ANNOTATION, is_builtin_kind, is_workload},
    observed::{
        Object, Observed,
        whose::{Whose, is_named_by},
    },
    ownership::origin::Origin,
};

/// The Pods of a VM, and what makes them.
pub struct Guests<'v, 'a> {
    vm: &'v VirtualMachine,
    name: String,
    observed: &'a Observed,
    /// The VM's Pods; the one of which the status reports comes first.
    pub pods: Vec<&'a Arc<Object>>,
}

/// The VM's Pod: the one that runs, if there are several.
pub fn pod<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<&'a Arc<Object>> {
    Guests::new(vm, observed).pod()
}

impl<'v, 'a> Guests<'v, 'a> {
    /// Finds the Pods.
    pub fn new(vm: &'v VirtualMachine, observed: &'a Observed) -> Self {
        let mut guests = Self { vm, name: vm.name_any(), observed, pods: Vec::new() };
        let pods = observed.objects.iter().chain(&observed.others).filter(|object| object.key.is_pod());
        guests.pods = pods.filter(|pod| guests.is_own(pod) && guests.is_guest(pod)).collect();
        guests.pods.sort_by_key(|pod| {
            (pod.has_ended(), pod.deleting.is_some(), !is_named_by(vm, &pod.uid), pod.key.name != guests.name)
        });
        guests
    }

    /// The Pod of which the status reports.
    pub fn pod(&self) -> Option<&'a Arc<Object>> {
        self.pods.first().copied()
    }

    /// Whether the object is one of the VM's Pods.
    pub fn contains(&self, object: &Object) -> bool {
        self.pods.iter().any(|pod| pod.uid == object.uid)
    }

    /// The Pod of a deleted VM with the same name. It is being deleted too, but its guest may still run.
    pub fn previous(&self) -> Option<&'a Arc<Object>> {
        let mut pods = self.observed.objects.iter().filter(|object| object.key.is_pod());
        pods.find(|pod| !self.is_own(pod) && self.is_former(pod) && self.is_guest(pod))
    }

    /// What makes Pods and is the VM's: workloads, and whatever exists only while the VM runs and is of no built-in kind. Of a chain
    /// (Deployment, ReplicaSet, Pod) it is the top.
    pub fn makers(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let objects = self.observed.objects.iter().chain(&self.observed.makers);
        objects.filter(|object| {
            let makes_pods = is_workload(&object.key)
                || super::is_runtime_object(object) && !is_builtin_kind(&object.key.types())
                || self.pods.iter().any(|pod| self.is_made_by(pod, object));
            makes_pods && !object.key.is_pod() && self.is_vms(object)
        })
    }

    /// The VM's Pods that `maker` makes.
    pub fn pods_of(&self, maker: &Object) -> impl Iterator<Item = &'a Arc<Object>> + Clone {
        let pods: Vec<_> = self.pods.iter().copied().filter(|pod| self.is_made_by(pod, maker)).collect();
        pods.into_iter()
    }

    /// Whether a maker of the Pod is the VM's and is not being deleted yet.
    pub fn is_taken_down(&self, pod: &Object) -> bool {
        self.observed.makers_of(pod).any(|maker| self.is_vms(maker) && maker.deleting.is_none())
    }

    /// What makes the Pods of a deleted VM with the same name. The garbage collector deletes it; until then it may make a Pod again.
    pub fn previous_makers(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let makers = self.observed.objects.iter().filter(|object| is_workload(&object.key));
        makers.filter(|maker| maker.maker.is_none() && maker.whose(self.vm) == Whose::Former)
    }

    /// Pods that are not the VM's and can write to its disks, whatever their labels say.
    pub fn strangers(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let labelled = self.observed.objects.iter().filter(|object| object.key.is_pod() && self.writes(object));
        let previous = self.previous().map(|pod| &pod.uid);
        let pods = self.observed.others.iter().chain(labelled.filter(|pod| !self.is_made_by_helper(pod)));
        pods.filter(move |pod| !pod.has_ended() && !self.contains(pod) && previous != Some(&pod.uid))
    }

    /// A Pod that can write to the disks of the VM beside its own one: another of its own, or a stranger.
    pub fn second(&self) -> Option<&'a Arc<Object>> {
        let own = self.pods.iter().copied().skip(1).find(|pod| !pod.has_ended());
        own.or_else(|| self.strangers().next())
    }

    fn is_made_by(&self, pod: &Object, maker: &Object) -> bool {
        self.observed.makers_of(pod).any(|known| known.uid == maker.uid)
    }

    /// Whether something that makes the guest's Pod is the VM's.
    fn is_vms(&self, object: &Object) -> bool {
        object.maker.is_none() && object.is_maker_of(self.vm) && !is_like_helper(object)
    }

    /// Whose an object is, with the names of the Pods that templates render.
    pub fn whose(&self, object: &Object) -> Whose {
        match &self.observed.pod_names {
            Some(names) => object.whose_with(self.vm, names),
            None => object.whose(self.vm),
        }
    }

    fn is_own(&self, pod: &Object) -> bool {
        self.whose(pod) == Whose::Vm || self.observed.makers_of(pod).last().is_some_and(|top| self.is_vms(top))
    }

    fn is_former(&self, pod: &Object) -> bool {
        let top = self.observed.makers_of(pod).last();
        pod.whose(self.vm) == Whose::Former || top.is_some_and(|top| top.whose(self.vm) == Whose::Former)
    }

    fn is_runner(&self, pod: &Object) -> bool {
        // In earlier releases the runner's container had the VM's name, and a StatefulSet gave the Pod a number.
        let is_named = || pod.key.name == self.name || pod.key.name == format!("{}-0", self.name);
        let has_runner = || {
            let containers = pod.spec["containers"].as_array().into_iter().flatten();
            containers.filter_map(|item| item["name"].as_str()).any(|name| name == CONTAINER_NAME || name == self.name)
        };
        is_named() || has_runner()
    }

    fn is_guest(&self, pod: &Object) -> bool {
        if self.is_made_by_helper(pod) {
            return false;
        }
        let is_labelled = || pod.labels.get(COMPONENT_LABEL).is_some_and(|component| component == CONTAINER_NAME);
        is_labelled() || self.is_runner(pod) || self.writes(pod)
    }

    fn writes(&self, pod: &Object) -> bool {
        pod.mounted_claims().any(|(claim, writes)| writes && self.observed.claim(&claim).is_some())
    }

    fn is_made_by_helper(&self, pod: &Object) -> bool {
        self.observed.makers_of(pod).any(|maker| self.is_helper(maker))
    }

    /// Whether the manager has made it for the VM, but not for as long as the VM runs: it does not make the guest's Pod.
    fn is_helper(&self, maker: &Object) -> bool {
        is_like_helper(maker) && maker.origin == Origin::Manager && maker.is_of(self.vm)
    }
}

/// Whether it looks like something that templates rendered, but not for as long as the VM runs. Anybody may make something that looks so.
fn is_like_helper(maker: &Object) -> bool {
    maker.annotations.contains_key(HASH_ANNOTATION) && !super::is_runtime_object(maker)
}
