//! What runners report, as objects of their own ([`VmReport`]): which report counts, and which reports there must be.
//!
//! | the VM's Pod | its report | what counts |
//! |---|---|---|
//! | exists | says something | that |
//! | exists | is missing, or says nothing yet | what a runner of an earlier release has written into the status, if it is about this Pod; or else the last report of an earlier Pod, so that nothing of it is lost |
//! | is of a legacy runner | | the status |
//! | does not exist | the newest one says something | that |
//!
//! A report is about the Pod whose UID is its name, whatever owner and labels it has, and which Pods are the VM's decides [`Instances`]. When the Pod
//! does not exist any more, a report is about the VM only if
//!
//! - the status of the VM names the Pod, and no other program made the report; or
//! - the manager made it for the VM: `managedFields` prove that the manager made it and gave it the VM's name in its spec, and its owner is the VM,
//!   or nothing: the deletion of a VM with `--cascade=orphan` leaves reports without an owner.
//!
//! Only what the manager made is deleted.
//!
//! The report that counts is folded into the status from which everything is decided ([`fold`]), and [`super::status`] writes it. While the
//! API server has no definition of reports, there are none, and runners write the status as in earlier releases.

use kube::{Resource, ResourceExt};
use serde_json::{Value, json};

use crate::{
    api::{RunnerStatus, VirtualMachine, VirtualMachineStatus, VmReportStatus},
    object::{self, ObjectKey, reports},
    observed::{Object, Observed, whose::is_named_by},
    ownership::{self, origin::Origin},
    plan::{Plan, instances::Instances},
};

/// What the manager does about reports.
#[derive(Clone, Debug, PartialEq)]
pub enum ReportAction {
    /// Creates a report, in which nothing is said yet.
    Create {
        /// Its key.
        key: ObjectKey,
        /// The whole object.
        value: Value,
    },
    /// Changes what the manager tells the runner, or the owner.
    Change {
        /// Its key.
        key: ObjectKey,
        /// Its UID.
        uid: String,
        /// A merge patch.
        patch: Value,
    },
    /// Deletes a report of a Pod that is gone.
    Delete {
        /// Its key.
        key: ObjectKey,
        /// Its UID.
        uid: String,
    },
}

/// The VM with the report that counts in its status. `None`: the status says it all.
pub fn fold(vm: &VirtualMachine, observed: &Observed) -> Option<VirtualMachine> {
    let (report, said) = counting(vm, observed)?;
    let mut vm = vm.clone();
    said.fold_into(&report.key.name, observed.now, vm.status.get_or_insert_default());
    Some(vm)
}

fn counting<'a>(vm: &VirtualMachine, observed: &'a Observed) -> Option<(&'a Object, VmReportStatus)> {
    let instances = Instances::new(vm, observed);
    let with_words = |report: &'a Object| Some((report, said(report)?));
    let mut about: Vec<&Object> = observed.reports.iter().map(AsRef::as_ref).collect();
    about.retain(|report| {
        let is_left = is_without_pod(report, observed) && is_about(report, vm);
        is_left || instances.guests().any(|pod| pod.uid == report.key.name)
    });
    about.sort_by_key(|report| std::cmp::Reverse((report.created, report.version)));
    let Some(pod) = instances.active() else { return about.first().and_then(|report| with_words(report)) };
    if pod.has_legacy_runner() {
        return None;
    }
    let of_pod = about.iter().find(|report| report.key.name == pod.uid).and_then(|report| with_words(report));
    let reporting = vm.status.as_ref().and_then(|status| status.pod_uid.as_ref());
    of_pod.or_else(|| about.iter().filter(|_| reporting != Some(&pod.uid)).find_map(|report| with_words(report)))
}

/// Whether the Pod of a report does not exist any more. Reports of other VMs' Pods are not observed.
fn is_without_pod(report: &Object, observed: &Observed) -> bool {
    pods(observed).all(|pod| pod.uid != report.key.name)
}

/// Whether a report whose Pod does not exist any more is about the VM.
fn is_about(report: &Object, vm: &VirtualMachine) -> bool {
    is_named_by(vm, &report.key.name) && report.origin != Origin::Other || is_made_for(report, vm)
}

/// Whether the manager made the report for the VM.
fn is_made_for(report: &Object, vm: &VirtualMachine) -> bool {
    let gave_name = || report.owned.as_ref().is_some_and(|owned| owned.value()["f:spec"].get("f:vm").is_some());
    let is_vms = report.owners.is_empty() || report.is_owned_by(&vm.uid().unwrap_or_default());
    report.origin == Origin::Manager && is_vms && report.spec["vm"] == vm.name_any() && gave_name()
}

/// What a runner has said. A report without conditions says nothing.
fn said(report: &Object) -> Option<VmReportStatus> {
    let status: VmReportStatus = serde_json::from_value(report.status.clone()).ok()?;
    (!status.conditions.is_empty()).then_some(status)
}

/// Whether the status has the report of the VM's Pod, after [`fold`].
pub fn is_of_pod(vm: &VirtualMachine, observed: &Observed) -> bool {
    counting(vm, observed).is_some_and(|(report, _)| !is_without_pod(report, observed))
}

/// Creates the reports of the Pods that run the VM's guest, and tells their runners what the plan says. While a VM is being deleted no
/// report is created: the garbage collector would delete it.
pub fn upkeep(vm: &VirtualMachine, observed: &Observed, plan: &Plan) -> Vec<ReportAction> {
    let instances = Instances::new(vm, observed);
    let pods = instances.guests().filter(|pod| !pod.has_ended() && !pod.has_legacy_runner());
    pods.filter_map(|pod| {
        let ends = plan.force_stop.pod_uid.as_ref() == Some(&pod.uid);
        match observed.reports.iter().find(|report| report.key.name == pod.uid) {
            Some(report) => change(vm, report, ends),
            None if vm.metadata.deletion_timestamp.is_some() => None,
            None => Some(create(vm, &pod.uid, ends)),
        }
    })
    .collect()
}

/// The reports of the VM's Pods that do not exist any more. They may be deleted as soon as the status has what they say.
pub fn left(vm: &VirtualMachine, observed: &Observed) -> Vec<ReportAction> {
    let reports =
        observed.reports.iter().filter(|report| report.deleting.is_none() && report.origin == Origin::Manager);
    reports
        .filter(|report| is_without_pod(report, observed) && is_about(report, vm))
        .map(|report| ReportAction::Delete { key: report.key.clone(), uid: report.uid.clone() })
        .collect()
}

fn pods(observed: &Observed) -> impl Iterator<Item = &Object> {
    observed.objects.iter().chain(&observed.others).map(AsRef::as_ref).filter(|object| object.key.is_pod())
}

fn owner(vm: &VirtualMachine) -> Value {
    json!([{
        "apiVersion": VirtualMachine::api_version(&()), "kind": VirtualMachine::kind(&()),
        "name": vm.name_any(), "uid": vm.uid(), "controller": true,
    }])
}

fn create(vm: &VirtualMachine, pod_uid: &str, ends: bool) -> ReportAction {
    let types = reports();
    let mut spec = json!({ "vm": vm.name_any() });
    if ends {
        spec["endGuest"] = true.into();
    }
    if let Some(serial) = vm.status.as_ref().and_then(|status| status.runner.display_password_serial) {
        spec["displayPasswordSerial"] = serial.into();
    }
    let value = json!({
        "apiVersion": types.api_version, "kind": types.kind,
        "metadata": { "name": pod_uid, "labels": object::labels(&vm.name_any()), "ownerReferences": owner(vm) },
        "spec": spec,
    });
    ReportAction::Create {
        key: ObjectKey { api_version: types.api_version, kind: types.kind, name: pod_uid.into() },
        value,
    }
}

/// What is not right of the report of a Pod of the VM. Its owner is the VM, so that it goes with it.
fn change(vm: &VirtualMachine, report: &Object, ends: bool) -> Option<ReportAction> {
    let mut patch = json!({});
    if report.spec["endGuest"] != true && ends || report.spec["endGuest"] == true && !ends {
        patch["spec"]["endGuest"] = if ends { true.into() } else { Value::Null };
    }
    if !report.is_owned_by(&vm.uid().unwrap_or_default()) && vm.metadata.deletion_timestamp.is_none() {
        patch["metadata"]["ownerReferences"] = owner(vm);
    }
    let is_new = patch != json!({});
    is_new.then_some(ReportAction::Change { key: report.key.clone(), uid: report.uid.clone(), patch })
}

/// Whether the runner's part of the status is from a report: now, or when the manager wrote it.
pub(super) fn is_folded(vm: &VirtualMachine) -> bool {
    let is_reported = vm.status.as_ref().is_some_and(|status| status.reported.is_some());
    is_reported || ownership::owns_status_field(vm, "podUid")
}

/// The fields of [`RunnerStatus`] that the manager writes itself while nothing runs.
const OF_BOTH: [&str; 7] = ["cpus", "ram", "relayPort", "consoleClient", "serialUsers", "loggedInUser", "devices"];

/// The runner's part of the status that the manager has put there from a report, and that it keeps until there is another.
pub(super) fn carried(vm: &VirtualMachine) -> RunnerStatus {
    let Some(VirtualMachineStatus { runner, reported, .. }) = &vm.status else { return RunnerStatus::default() };
    if reported.is_some() {
        return runner.clone();
    }
    let is_folded = is_folded(vm);
    let mut part = json!(runner);
    if let Value::Object(fields) = &mut part {
        fields.retain(|field, _| {
            ownership::owns_status_field(vm, field) && (is_folded || !OF_BOTH.contains(&field.as_str()))
        });
    }
    serde_json::from_value(part).unwrap_or_default()
}

/// The Pod whose report the manager has put into the status.
pub(super) fn reporting_pod(vm: &VirtualMachine) -> Option<String> {
    vm.status.as_ref()?.pod_uid.clone().filter(|_| is_folded(vm))
}
