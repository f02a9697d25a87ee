//! Whose a VM is that has the name of the derived one, which VMs have lost their Pod, and whether a guest is up. Pure.

use std::collections::BTreeSet;

use kube::{ResourceExt, core::ObjectMeta};

use super::{
    FIELD_MANAGER,
    derive::{self, POD_ANNOTATION, POD_UID_ANNOTATION, PodFacts},
};
use crate::{
    api::{VirtualMachine, conditions, full_name},
    claims,
    object::PROTOTYPE_ANNOTATION,
    ownership::has_applied,
};

/// The UIDs of the Pods in the namespace of vmctl's Pod that have not ended; `None` if they can't be listed.
pub type LivingPods = Option<BTreeSet<String>>;

/// For whom a vmctl works.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workplace {
    /// The Pod in which it runs.
    pub pod: PodFacts,
    /// The name of the prototype.
    pub prototype: String,
    /// The prototype's namespace.
    pub prototype_namespace: String,
}

impl Workplace {
    /// The prototype as `NAMESPACE/NAME`.
    pub fn full_prototype(&self) -> String {
        full_name(Some(&self.prototype_namespace), &self.prototype)
    }

    /// Whether the VM is what a vmctl of the prototype has made for a Pod: by its name, and by what the API server has noted about who applied it.
    /// Annotations are copied with a VM.
    fn is_derived(&self, vm: &ObjectMeta, pod: &str) -> bool {
        let (namespace, name) = pod.split_once('/').unwrap_or_default();
        let pod = PodFacts { name: name.into(), namespace: namespace.into(), ..self.pod.clone() };
        let derived = derive::name(&self.prototype_namespace, &self.prototype, &pod);
        has_applied(vm, FIELD_MANAGER) && vm.name.as_ref() == Some(&derived)
    }
}

/// What a VM with the name of the derived one is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// There is none, so it can be created.
    Absent,
    /// It is this Pod's: the container was started again.
    Ours,
    /// It is being deleted, so the next one has to wait.
    Going,
    /// It is of a Pod that does not exist any more, so it is to be deleted.
    Leftover {
        /// Its UID.
        uid: String,
    },
    /// It is somebody else's, so there is none for this Pod.
    Taken(Taken),
}

/// Whose VM has the name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Taken {
    /// No vmctl made it.
    #[error("no vmctl has made it, so it is left alone: delete or rename it, or rename the workload of this Pod")]
    Foreign,
    /// Names of prototypes and Pods together give the same for several.
    #[error(
        "it is of the prototype {prototype}: its name and that of its Pod together give the same as those of this one; rename one of the workloads"
    )]
    OtherPrototype {
        /// `NAMESPACE/NAME`.
        prototype: String,
    },
    /// Another Pod lives whose name together with that of its prototype gives the same name.
    #[error(
        "it is of the Pod {pod}, which exists: the names of prototype and Pod together give the same; rename one of the workloads"
    )]
    OtherPod {
        /// `NAMESPACE/NAME`.
        pod: String,
    },
    /// This Pod was deleted by force while its program ran, on a node that was lost for example, and there is a new one of its name.
    #[error("it is of a new Pod {pod}, which has taken the place of this one: this program makes no VM any more")]
    NextPod {
        /// `NAMESPACE/NAME`.
        pod: String,
    },
    /// Whether the other Pod lives can't be seen.
    #[error(
        "it is of the Pod {pod}, and this program can't see whether that exists: it may only list the Pods of its own namespace, with the rule \
         {{apiGroups: [\"\"], resources: [pods], verbs: [list]}}"
    )]
    UnknownPod {
        /// `NAMESPACE/NAME`.
        pod: String,
    },
}

/// What the VM is that has the name of the one to be derived for a Pod.
pub fn standing(found: Option<&ObjectMeta>, own: &Workplace, living: &LivingPods) -> Standing {
    let pod = &own.pod;
    let Some(found) = found else { return Standing::Absent };
    let Some((other, other_uid)) = pod_of(found).filter(|_| has_applied(found, FIELD_MANAGER)) else {
        return Standing::Taken(Taken::Foreign);
    };
    if found.deletion_timestamp.is_some() {
        return Standing::Going;
    }
    if let Some(prototype) = prototype_of(found).filter(|prototype| **prototype != own.full_prototype()) {
        return Standing::Taken(Taken::OtherPrototype { prototype: prototype.clone() });
    }
    if other_uid == pod.uid {
        return Standing::Ours;
    }
    let has_our_name = other == pod.full_name();
    let is_gone = match living {
        Some(living) if namespace_of(other) == pod.namespace => !living.contains(other_uid),
        // Pods of one name follow each other, so the other one is most likely gone if it had the name of this one.
        None if has_our_name => true,
        Some(_) | None => return Standing::Taken(Taken::UnknownPod { pod: other.to_owned() }),
    };
    match is_gone {
        true => Standing::Leftover { uid: found.uid.clone().unwrap_or_default() },
        false if has_our_name => Standing::Taken(Taken::NextPod { pod: other.to_owned() }),
        false => Standing::Taken(Taken::OtherPod { pod: other.to_owned() }),
    }
}

/// A VM to delete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Orphan {
    /// Its name.
    pub name: String,
    /// Its UID.
    pub uid: String,
    /// The Pod that it was derived for: `NAMESPACE/NAME`.
    pub pod: String,
}

/// The VMs of the prototype whose Pods were in this Pod's namespace and live no more: they were deleted by force, or evicted, after which the object of a Pod
/// stays. `living` must have been listed after the VMs, because a Pod is older than its VM.
pub fn orphans(vms: &[ObjectMeta], own: &Workplace, living: &BTreeSet<String>) -> Vec<Orphan> {
    let pod = &own.pod;
    let lost = vms.iter().filter(|vm| vm.deletion_timestamp.is_none()).filter_map(|vm| {
        let (other, uid) = pod_of(vm)?;
        let is_lost = uid != pod.uid
            && namespace_of(other) == pod.namespace
            && !living.contains(uid)
            && prototype_of(vm).is_none_or(|prototype| *prototype == own.full_prototype())
            && own.is_derived(vm, other);
        is_lost.then(|| Orphan {
            name: vm.name.clone().unwrap_or_default(),
            uid: vm.uid.clone().unwrap_or_default(),
            pod: other.to_owned(),
        })
    });
    lost.collect()
}

/// The Pod for which a VM was derived, as `NAMESPACE/NAME` and UID.
fn pod_of(vm: &ObjectMeta) -> Option<(&str, &str)> {
    let annotations = vm.annotations.as_ref()?;
    Some((annotations.get(POD_ANNOTATION)?, annotations.get(POD_UID_ANNOTATION)?))
}

/// The prototype of a derived VM: `NAMESPACE/NAME`.
fn prototype_of(vm: &ObjectMeta) -> Option<&String> {
    vm.annotations.as_ref()?.get(PROTOTYPE_ANNOTATION)
}

fn namespace_of(full_name: &str) -> &str {
    full_name.split_once('/').map_or("", |(namespace, _)| namespace)
}

/// A claim that a VM's Pod may write to and that is not the VM's: a template names it, for all VMs. `written` are the claims that the Pod may
/// write to.
pub fn fixed_claim<'a>(vm: &VirtualMachine, written: &'a BTreeSet<String>) -> Option<&'a str> {
    written.iter().map(String::as_str).find(|claim| !is_own_claim(vm, claim))
}

/// Whether a claim of that name is a VM's alone. A name that a template fixes for all VMs has not that of one of them in it. The VM's status does
/// not tell: it has each claim that the templates make, also one that another VM has.
pub fn is_own_claim(vm: &VirtualMachine, claim: &str) -> bool {
    claim.contains(&vm.name_any()) || vm.uid().is_some_and(|uid| claim.contains(&uid))
}

/// Whether a VM whose disks are deleted with it is to own a claim: the claim goes with it, and does not have it as its owner yet.
pub fn is_to_own(vm: &VirtualMachine, claim: &ObjectMeta) -> bool {
    let mut owners = claim.owner_references.iter().flatten();
    claim.name.as_ref().is_some_and(|name| is_own_claim(vm, name))
        && claims::goes_with(vm, claim)
        && claim.deletion_timestamp.is_none()
        && !owners.any(|owner| Some(&owner.uid) == vm.metadata.uid.as_ref())
}

/// When vmctl's Pod is ready.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum ReadyWhen {
    /// When QEMU's guest agent in the guest answers (the condition Booted).
    #[default]
    Booted,
    /// When the guest has started (the condition Running), for guests without the agent.
    Running,
}

/// Whether the guest is up, or why it is not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// It is.
    Ready,
    /// It is not, for this reason.
    NotReady(String),
}

/// Whether the guest of a VM is up.
pub fn readiness(vm: &VirtualMachine, when: ReadyWhen) -> Readiness {
    let Some(status) = vm.status.as_ref() else {
        return Readiness::NotReady("no manager has seen the VM yet".into());
    };
    let is = |type_: &str| conditions::is_true(&status.conditions, type_);
    let phase = status.phase.as_deref().unwrap_or("Pending");
    let runs = phase == "Running" && is(conditions::RUNNING);
    let is_ready = match when {
        ReadyWhen::Booted => runs && is(conditions::BOOTED),
        ReadyWhen::Running => runs,
    };
    let about = |type_: &str| {
        let condition = conditions::find(&status.conditions, type_)?;
        Some(format!("{}: {}", condition.reason, condition.message))
    };
    match is_ready {
        true => Readiness::Ready,
        false if runs => {
            let why = about(conditions::BOOTED);
            Readiness::NotReady(why.unwrap_or_else(|| "the guest agent has not answered yet".into()))
        }
        false => Readiness::NotReady(about(conditions::READY).unwrap_or_else(|| phase.to_owned())),
    }
}

#[cfg(test)]
mod tests;
