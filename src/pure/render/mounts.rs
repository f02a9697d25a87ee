//! The claims that a set's Pods mount: a VM's guest gets the claims that the VM has, and those of no other VM.
//!
//! A set that mounts another VM's claim, or other claims than the VM has, takes a guest its disks away although nothing of its spec has
//! changed. [`check`] knows the VM alone, so it holds for each rendering; [`Owners`] knows all VMs of a check.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::Value;

use super::{
    TemplateError,
    pod::{is_guest, lasting_containers, pod_specs, runner_of, with_claims},
};
use crate::{
    api::VirtualMachine,
    object::Rendered,
    observed::{Object, Observed},
};

/// The claims that the Pods of an object mount, with whether they can write to them.
pub(crate) fn mounted(object: &Rendered) -> impl Iterator<Item = (&str, bool)> {
    let volumes = pod_specs(object).into_iter().filter_map(|spec| spec["volumes"].as_array()).flatten();
    volumes.filter_map(|volume| {
        let claim = volume.get("persistentVolumeClaim")?;
        Some((claim["claimName"].as_str()?, claim["readOnly"] != true))
    })
}

/// Whether the VM's status says that the VM uses the claim.
fn is_used(vm: &VirtualMachine, name: &str) -> bool {
    let mut known = vm.status.iter().flat_map(|status| &status.claims);
    known.any(|claim| claim.name == name && !claim.unused && claim.uid.is_some())
}

/// Whether a container of a Pod can write to a claim.
fn writes(spec: &Value, container: &Value, claim: &str) -> bool {
    let has = |list: &Value, is: &dyn Fn(&Value) -> bool| list.as_array().is_some_and(|list| list.iter().any(is));
    has(&spec["volumes"], &|volume| {
        let source = &volume["persistentVolumeClaim"];
        let mount = |mount: &Value| mount["name"] == volume["name"] && mount["readOnly"] != true;
        let device = |device: &Value| device["name"] == volume["name"];
        source["claimName"] == claim
            && source["readOnly"] != true
            && (has(&container["volumeMounts"], &mount) || has(&container["volumeDevices"], &device))
    })
}

/// Refuses a guest's Pod in which another container does what the runner does, or can write to a claim of the VM beside it. Containers that
/// end before the runner starts may.
fn check_containers(guest: &Rendered, wanted: &BTreeSet<&str>) -> Result<(), TemplateError> {
    for spec in pod_specs(guest) {
        let Some(runner) = runner_of(spec, &guest.runner) else { continue };
        for other in lasting_containers(spec).filter(|other| !std::ptr::eq(*other, runner)) {
            let is_copy = other["image"].is_string()
                && ["image", "command", "args"].into_iter().all(|field| other[field] == runner[field]);
            let written = wanted.iter().find(|claim| writes(spec, other, claim));
            let what = match written {
                Some(claim) => format!(
                    "can write to the claim {claim} beside the runner: mount it with readOnly: true, or not at all"
                ),
                None if is_copy => "runs the same as the runner's container: a VM has one guest".to_owned(),
                None => continue,
            };
            let message =
                format!("the container {} of {} {what}", other["name"].as_str().unwrap_or_default(), guest.key);
            return Err(TemplateError::refused(&guest.template, message));
        }
    }
    Ok(())
}

/// Refuses objects whose guest would not get a claim that the VM has, or whose claim another Pod could write to at the same time. `wanted`
/// are the names of the claims of the VM's disks and of its runner.
///
/// # Errors
/// With the object and the claim.
pub(super) fn check<'a>(
    vm: &VirtualMachine,
    observed: &Observed,
    wanted: impl Iterator<Item = &'a str>,
    objects: &[Rendered],
) -> Result<(), TemplateError> {
    let (as_rendered, objects) = (objects, objects.iter().map(with_claims).collect::<Vec<_>>());
    let Some(guest) = objects.iter().find(|object| is_guest(object)) else { return Ok(()) };
    let wanted: BTreeSet<&str> = wanted.collect();
    let is_mounted = |object: &Rendered, name: &str| mounted(object).any(|(mounted, _)| mounted == name);
    let of_guest = as_rendered.iter().find(|object| object.key == guest.key);
    let is_replaced = |name: &&&str| of_guest.is_some_and(|it| is_mounted(it, name)) && !is_mounted(guest, name);
    if let Some(name) = wanted.iter().find(is_replaced) {
        let message = format!(
            "volumeClaimTemplates of {} have a claim for the volume with the VM's claim {name}, and the StatefulSet would put it in that one's place: \
             take the template out, or give it another name",
            guest.key
        );
        return Err(TemplateError::refused(&guest.template, message));
    }
    let exists = |name: &str| observed.claim(name).is_some();
    let is_written = |object: &Rendered, name: &str| mounted(object).any(|(mounted, writes)| writes && mounted == name);
    // One helper has the disk, and the guest gets it from there.
    let is_served = |name: &str| {
        let mut writers = objects.iter().filter(|object| is_written(object, name));
        !is_mounted(guest, name) && writers.next().is_some_and(|it| it.is_helper) && writers.next().is_none()
    };
    let reaches = |name: &str| {
        let mut runners = pod_specs(guest).into_iter().filter_map(|spec| Some((spec, runner_of(spec, &guest.runner)?)));
        runners.any(|(spec, runner)| writes(spec, runner, name))
    };
    let lost = wanted.iter().find(|name| is_used(vm, name) && exists(name) && !reaches(name) && !is_served(name));
    if let Some(name) = lost {
        let message = if is_mounted(guest, name) {
            format!(
                "{} mounts the claim {name}, which the VM has, but its runner can't write to it: the volume and its mount must be without \
                 readOnly, and in volumeMounts or volumeDevices of the runner's container",
                guest.key
            )
        } else {
            format!(
                "{} does not mount the claim {name}, which the VM has: the guest would start without that disk; mount it, as \
                 builtin/pod.yaml.j2 does with `disks` and `runnerData`, or have one helper serve it",
                guest.key
            )
        };
        return Err(TemplateError::refused(&guest.template, message));
    }
    check_containers(guest, &wanted)?;
    let writes_beside = |object: &&Cow<'_, Rendered>| {
        let is_beside = |name: &str| wanted.contains(name) && !is_served(name);
        object.key != guest.key && mounted(object).any(|(name, writes)| writes && is_beside(name))
    };
    match objects.iter().find(writes_beside) {
        Some(second) => {
            let message = format!(
                "{} can write to a claim of the VM's disks beside {}, in which the guest runs: mount it with readOnly: true, or not at all; what \
                 fills a disk is an init container of the guest's Pod, and what serves one is the only helper that can write to it, and the guest's Pod does not mount it",
                second.key, guest.key
            );
            Err(TemplateError::refused(&second.template, message))
        }
        None => Ok(()),
    }
}

/// The claims that a VM has in the cluster.
pub(super) fn claims_of<'a>(vm: &'a VirtualMachine, observed: &'a Observed) -> impl Iterator<Item = &'a str> {
    let is_its = |object: &&Arc<Object>| {
        object.key.is_claim() && (object.vm() == vm.metadata.name.as_deref() || is_used(vm, &object.key.name))
    };
    observed.objects.iter().filter(is_its).map(|object| object.key.name.as_str())
}

/// Which VM has which claim, and who mounts what.
#[derive(Debug, Default)]
pub(super) struct Owners {
    /// By namespace and name of the claim: the VMs that have it.
    owners: BTreeMap<(String, String), BTreeSet<String>>,
    mounts: Vec<Mount>,
}

#[derive(Debug)]
struct Mount {
    vm: Arc<VirtualMachine>,
    claim: String,
    object: String,
    template: String,
}

impl Owners {
    /// Notes the claims of a VM: those that it has in the cluster, and those that the set in use renders for it.
    pub(super) fn add_vm<'a>(&mut self, vm: &str, namespace: Option<&str>, claims: impl Iterator<Item = &'a str>) {
        for claim in claims {
            let place = (namespace.unwrap_or_default().to_owned(), claim.to_owned());
            self.owners.entry(place).or_default().insert(vm.to_owned());
        }
    }

    /// Notes what the Pods of a new set mount.
    pub(super) fn add_mounts(&mut self, vm: &Arc<VirtualMachine>, objects: &[Rendered]) {
        for object in objects {
            let object = with_claims(object);
            self.mounts.extend(mounted(&object).map(|(claim, _)| Mount {
                vm: vm.clone(),
                claim: claim.to_owned(),
                object: object.key.to_string(),
                template: object.template.clone(),
            }));
        }
    }

    /// The first claim that a VM would mount although only another VM has it.
    pub(super) fn foreign(self) -> Option<(Arc<VirtualMachine>, TemplateError)> {
        self.mounts.into_iter().find_map(|Mount { vm, claim, object, template }| {
            let place = (vm.metadata.namespace.clone().unwrap_or_default(), claim);
            let owners = self.owners.get(&place)?;
            let other = owners.iter().next().filter(|_| !owners.contains(&vm.full_name()))?;
            let message = format!("{object} mounts the claim {}, which is the VM {other}'s", place.1);
            Some((vm, TemplateError::refused(&template, message)))
        })
    }
}
