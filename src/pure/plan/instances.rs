//! The Pods of a VM, what each is for, and what makes them.
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
//! | one of the VM's Pods | has the role |
//! |---|---|
//! | the manager has made it as one ([`Object::is_helper`]) | helper |
//! | has the runner's label, name or container, or can write to a claim of the VM: the first, by whether it runs, whether the status names it, and its name | active |
//! | the others of these | second |
//! | any other that templates render | none: it is an object like any other |
//!
//! So are the Pods of what the manager has made for longer than the VM runs, such as a Job that makes backups. What only says that it is such a Job
//! may be a person's, so its Pods are strangers.

use std::{mem, sync::Arc};

use kube::ResourceExt;

use crate::{
    api::VirtualMachine,
    object::{COMPONENT_LABEL, CONTAINER_NAME, HASH_ANNOTATION, ObjectKey, is_builtin_kind, is_workload},
    observed::{
        Object, Observed,
        whose::{Whose, is_named_by},
    },
    ownership::origin::Origin,
};

/// What a Pod of a VM is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The guest runs in it. A VM has one such Pod at most.
    Active,
    /// A guest may run in it, too, or it can write to the VM's disks: other templates or an earlier release made it.
    Second,
    /// It serves or copies a disk, or does something else for the VM. No guest runs in it.
    Helper,
}

/// A Pod of the VM, and what it is for.
#[derive(Clone, Copy, Debug)]
pub struct Instance<'a> {
    /// The Pod.
    pub pod: &'a Arc<Object>,
    /// What it is for.
    pub role: Role,
}

/// The Pods of a VM, and what makes them.
pub struct Instances<'v, 'a> {
    vm: &'v VirtualMachine,
    name: String,
    observed: &'a Observed,
    /// The VM's Pods.
    all: Vec<Instance<'a>>,
}

/// The VM's Pod in which its guest runs: the one that runs, if there are several.
pub fn active<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<&'a Arc<Object>> {
    Instances::new(vm, observed).active()
}

impl<'v, 'a> Instances<'v, 'a> {
    /// Finds the Pods.
    pub fn new(vm: &'v VirtualMachine, observed: &'a Observed) -> Self {
        let found = Self { vm, name: vm.name_any(), observed, all: Vec::new() };
        let pods = observed.objects.iter().chain(&observed.others).filter(|object| object.key.is_pod());
        let mut pods: Vec<_> = pods.filter(|pod| found.is_own(pod)).collect();
        pods.sort_by_key(|pod| {
            (pod.has_ended(), pod.deleting.is_some(), !is_named_by(vm, &pod.uid), pod.key.name != found.name)
        });
        let mut has_active = false;
        let instances = pods.into_iter().filter_map(|pod| {
            let role = match () {
                () if pod.is_helper() => Role::Helper,
                () if !found.is_guest(pod) => return None,
                () if mem::replace(&mut has_active, true) => Role::Second,
                () => Role::Active,
            };
            Some(Instance { pod, role })
        });
        let all = instances.collect();
        Self { all, ..found }
    }

    /// The Pod in which the guest runs, of which the status reports.
    pub fn active(&self) -> Option<&'a Arc<Object>> {
        self.with_role(Role::Active).next()
    }

    /// The Pods in which a guest runs or may run, the active one first.
    pub fn guests(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        self.active().into_iter().chain(self.with_role(Role::Second))
    }

    /// The Pods that help the guest.
    pub fn helpers(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        self.with_role(Role::Helper)
    }

    fn with_role(&self, role: Role) -> impl Iterator<Item = &'a Arc<Object>> {
        self.all.iter().filter(move |instance| instance.role == role).map(|instance| instance.pod)
    }

    /// Whether the object is one of the VM's Pods.
    pub fn contains(&self, object: &Object) -> bool {
        self.all.iter().any(|instance| instance.pod.uid == object.uid)
    }

    /// A Pod that can write to one of these claims, but not the VM's own with the key `not`.
    pub fn writer_of(&self, claims: &[String], not: &ObjectKey) -> Option<&'a Arc<Object>> {
        let of_vm = self.all.iter().map(|instance| instance.pod).chain(self.former()).filter(|pod| !pod.has_ended());
        let mut others = of_vm.chain(self.strangers()).filter(|pod| pod.key != *not || !self.contains(pod));
        others.find(|pod| pod.mounted_claims().any(|(claim, writes)| writes && claims.iter().any(|it| *it == claim)))
    }

    /// The Pod of a deleted VM with the same name. It is being deleted too, but its guest may still run.
    pub fn previous(&self) -> Option<&'a Arc<Object>> {
        self.former().next()
    }

    fn former(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let pods = self.observed.objects.iter().filter(|object| object.key.is_pod());
        pods.filter(|pod| !self.is_own(pod) && self.is_former(pod) && self.is_guest(pod))
    }

    /// What makes Pods and is the VM's: workloads, and whatever exists only while the VM runs and is of no built-in kind. Of a chain
    /// (Deployment, ReplicaSet, Pod) it is the top.
    pub fn makers(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let objects = self.observed.objects.iter().chain(&self.observed.makers);
        objects.filter(|object| {
            let makes_pods = is_workload(&object.key)
                || super::is_runtime_object(object) && !is_builtin_kind(&object.key.types())
                || self.guests().any(|pod| self.is_made_by(pod, object));
            makes_pods && !object.key.is_pod() && self.is_vms(object)
        })
    }

    /// The VM's Pods that `maker` makes.
    pub fn pods_of(&self, maker: &Object) -> impl Iterator<Item = &'a Arc<Object>> + Clone {
        let pods: Vec<_> = self.guests().filter(|pod| self.is_made_by(pod, maker)).collect();
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
        let pods = self.observed.others.iter().chain(labelled.filter(|pod| !self.is_made_by_lasting_maker(pod)));
        pods.filter(move |pod| !pod.has_ended() && !self.contains(pod) && previous != Some(&pod.uid))
    }

    /// Whether the object is one of [`Self::strangers`].
    pub fn is_stranger(&self, object: &Object) -> bool {
        self.strangers().any(|stranger| stranger.uid == object.uid)
    }

    /// A Pod that can write to the disks of the VM beside its own one: another of its own, or a stranger.
    pub fn second(&self) -> Option<&'a Arc<Object>> {
        let own = self.with_role(Role::Second).find(|pod| !pod.has_ended());
        own.or_else(|| self.strangers().next())
    }

    fn is_made_by(&self, pod: &Object, maker: &Object) -> bool {
        self.observed.makers_of(pod).any(|known| known.uid == maker.uid)
    }

    /// Whether something that makes the guest's Pod is the VM's.
    fn is_vms(&self, object: &Object) -> bool {
        object.maker.is_none() && object.is_maker_of(self.vm) && !is_like_lasting_maker(object)
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
        if self.is_made_by_lasting_maker(pod) {
            return false;
        }
        let is_labelled = || pod.labels.get(COMPONENT_LABEL).is_some_and(|component| component == CONTAINER_NAME);
        is_labelled() || self.is_runner(pod) || self.writes(pod)
    }

    fn writes(&self, pod: &Object) -> bool {
        pod.mounted_claims().any(|(claim, writes)| writes && self.observed.claim(&claim).is_some())
    }

    fn is_made_by_lasting_maker(&self, pod: &Object) -> bool {
        self.observed.makers_of(pod).any(|maker| self.is_lasting_maker(maker))
    }

    /// Whether the manager has made it for the VM, but not for as long as the VM runs: it does not make the guest's Pod.
    fn is_lasting_maker(&self, maker: &Object) -> bool {
        is_like_lasting_maker(maker) && maker.origin == Origin::Manager && maker.is_of(self.vm)
    }
}

/// Whether it looks like something that templates rendered, but not for as long as the VM runs. Anybody may make something that looks so.
fn is_like_lasting_maker(maker: &Object) -> bool {
    maker.annotations.contains_key(HASH_ANNOTATION) && !super::is_runtime_object(maker)
}
