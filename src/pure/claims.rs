//! The claims of a VM: their names, their growth, and the condition StorageReady.
//!
//! A claim stores a person's data, so the manager never deletes or replaces it. If a claim can't become as the spec wants it, that is no
//! error: the VM runs with the claim as it is, and the condition explains the difference.
//!
//! ```text
//!  spec, observed claims ─▶ name (render) ─▶ rendered claim ─▶ as_existing (plan) ─▶ findings ─▶ StorageReady, status.claims, events
//! ```
//!
//! Facts that later reconciles need, such as a growth that the API server refused, are in `status.claims`.

mod entries;
mod whose;

use std::{cmp::Ordering, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::ResourceExt;
use serde_json::Value;

use crate::{
    api::{
        Quantity, Reason, VirtualMachine,
        conditions::{self, NewCondition, RUNNING, STORAGE_READY},
        reasons::Effect,
        status::{ClaimFinding, ClaimStatus, ListEntry},
    },
    object::{
        BELONGS_TO_ANNOTATION, INSTANCE_LABEL, MADE_FOR_ANNOTATION, ObjectKey, REPLACE_CLAIM_ANNOTATION, Rendered,
        VM_ANNOTATION,
    },
    observed::{Object, Observed, owning_vm},
    ownership::is_said_by_runner,
};

pub use whose::{Foreign, Whose, goes_with, is_of, is_used, note_origin, uses, was_of, whose, whose_with};

/// A change of a claim that the API server refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedChange {
    /// The claim.
    pub claim: ObjectKey,
    /// The API server's answer.
    pub answer: String,
}

/// The name of the claim for a disk's `volume`: see [`existing_name`].
pub fn disk_name(vm: &VirtualMachine, volume: &str, observed: &Observed) -> String {
    existing_name(vm, observed, disk_names(&vm.name_any(), volume))
}

/// The name of the claim for the runner's data; like [`disk_name`].
pub fn runner_data_name(vm: &VirtualMachine, observed: &Observed) -> String {
    existing_name(vm, observed, runner_data_names(&vm.name_any()))
}

/// All names that the VM's claims may have. A claim with such a name may be the VM's, whatever labels it lost: a backup may bring it back
/// without.
pub fn possible_names(vm: &VirtualMachine) -> impl Iterator<Item = String> {
    names_of_disks(vm).into_iter().flatten()
}

/// For each disk, and for the runner's data, the names that its claim may have.
fn names_of_disks(vm: &VirtualMachine) -> Vec<Vec<String>> {
    let name = vm.name_any();
    let of_disks = volumes(vm).flatten().map(|volume| disk_names(&name, &volume));
    of_disks.chain([runner_data_names(&name)]).collect()
}

/// The names of the disks' volumes in the Pod; `None` for a disk without a claim.
pub fn volumes(vm: &VirtualMachine) -> impl Iterator<Item = Option<String>> {
    volumes_and_entries(vm).into_iter().map(|volume| volume.map(|(volume, _)| volume))
}

/// The names of the disks' volumes, each with the entry of a disk that has no name.
fn volumes_and_entries(vm: &VirtualMachine) -> Vec<Option<(String, Option<ListEntry>)>> {
    let mut claims = 0;
    // Only claims count, as in the oldest releases, although their documentation says that all disks do.
    let disks = vm.spec.vm.disks.iter().map(|disk| {
        let template = disk.volume_claim_template.as_ref()?;
        let name = template.metadata.as_ref().and_then(|metadata| metadata.name.as_ref());
        claims += 1;
        let entry = || entries::entry(claims - 1, template, disk.serial.as_deref());
        Some(name.map_or_else(|| Err(entry()), |name| Ok(format!("{name}-disk"))))
    });
    let disks: Vec<_> = disks.collect();
    let nameless: Vec<ListEntry> = disks.iter().flatten().filter_map(|disk| disk.clone().err()).collect();
    let mut numbers = Vec::new();
    if !nameless.is_empty() {
        let (recorded, taken) = entries::recorded(vm);
        numbers = crate::entries::numbers(&recorded, &nameless, &taken);
    }
    let mut numbers = numbers.into_iter();
    let mut volume = |disk: Result<String, ListEntry>| match disk {
        Ok(volume) => (volume, None),
        Err(entry) => (format!("disk-{}", numbers.next().unwrap_or(entry.position)), Some(entry)),
    };
    disks.into_iter().map(|disk| disk.map(&mut volume)).collect()
}

/// The entry of the disk without a name that has this claim.
fn entry_of(vm: &VirtualMachine, claim: &str) -> Option<ListEntry> {
    let name = vm.name_any();
    let mut nameless =
        volumes_and_entries(vm).into_iter().flatten().filter_map(|(volume, entry)| Some((volume, entry?)));
    nameless.find(|(volume, _)| disk_names(&name, volume).iter().any(|it| it == claim)).map(|(_, entry)| entry)
}

/// The name of a new claim for a disk's volume, and then those of former releases.
pub fn disk_names(vm: &str, volume: &str) -> Vec<String> {
    vec![format!("{vm}-{volume}"), format!("{volume}-{vm}-0")]
}

fn runner_data_names(vm: &str) -> Vec<String> {
    vec![format!("{vm}-runner-data"), format!("runner-data-{vm}-0"), format!("vmop-runner-data-{vm}-0")]
}

/// The name of a claim, of all that it may have. **The first that fits:**
///
/// 1. under which the VM's status has the claim with its data. What else exists does not matter: a disk keeps its claim;
/// 2. that the VM's Pod mounts: a Pod of an earlier release, of which the status says nothing yet;
/// 3. under which a claim exists that the VM may have;
/// 4. under which a claim exists that it may not have;
/// 5. under which a claim is known to have existed;
/// 6. the first.
fn existing_name(vm: &VirtualMachine, observed: &Observed, names: Vec<String>) -> String {
    let has_data = |unused: bool| {
        move |name: &&String| {
            missing(vm, name).is_some_and(|known| known.unused == unused && !(unused && known.findings.is_empty()))
        }
    };
    let is_mounted = |name: &&String| observed.objects.iter().any(|object| is_mounted_by(vm, object, name));
    let exists = |name: &&String| observed.claim(name).is_some();
    let is_usable = |name: &&String| {
        observed.claim(name).is_some_and(|claim| !matches!(whose(vm, observed, claim), Whose::Foreign(_)))
    };
    let known = |name: &&String| known(vm, name).is_some();
    let name = names
        .iter()
        .find(has_data(false))
        .or_else(|| names.iter().find(has_data(true)))
        .or_else(|| names.iter().find(|name| exists(name) && is_mounted(name)))
        .or_else(|| names.iter().find(is_usable))
        .or_else(|| names.iter().find(exists))
        .or_else(|| names.iter().find(known))
        .cloned();
    name.or_else(|| names.into_iter().next()).unwrap_or_default()
}

/// Whether a Pod of the VM, which an owner or a manager has made, and no person, mounts the claim and can write to it.
fn is_mounted_by(vm: &VirtualMachine, pod: &Object, claim: &str) -> bool {
    let is_by_manager = || pod.is_owned_by(&vm.uid().unwrap_or_default()) || pod.maker.is_some() || pod.owned.is_some();
    pod.key.is_pod() && is_by_manager() && pod.mounted_claims().any(|(mounted, writes)| writes && mounted == claim)
}

/// What the status has about a claim of the VM.
fn known<'a>(vm: &'a VirtualMachine, name: &str) -> Option<&'a ClaimStatus> {
    vm.status.iter().flat_map(|status| &status.claims).find(|claim| claim.name == name)
}

/// Whether the VM's status names a claim, with its UID.
pub fn is_named(vm: &VirtualMachine, claim: &ClaimStatus) -> bool {
    known(vm, &claim.name).is_some_and(|known| known.uid == claim.uid)
}

/// The claim with the VM's data that existed under this name and does not exist any more. The manager creates no empty one in its place,
/// unless a person gave the VM the annotation [`REPLACE_CLAIM_ANNOTATION`] with the UID of the lost claim, or it was of no use.
pub fn missing<'a>(vm: &'a VirtualMachine, name: &str) -> Option<&'a ClaimStatus> {
    known(vm, name)
        .filter(|known| !was_of_no_use(vm, known))
        .filter(|known| known.uid.as_ref().is_some_and(|uid| !is_given_up(vm, uid)))
}

/// Whether a person has given up the data of the claim with this UID, by the annotation [`REPLACE_CLAIM_ANNOTATION`].
pub fn is_given_up(vm: &VirtualMachine, uid: &str) -> bool {
    let given_up = vm.annotations().get(REPLACE_CLAIM_ANNOTATION).map(String::as_str).unwrap_or_default();
    given_up.split(',').any(|given_up| given_up.trim() == uid)
}

/// A claim of the VM that is being deleted, and that nobody has given up. It exists only as long as a Pod mounts it, even a Pod that has ended or in
/// which nothing has started.
pub fn that_goes_with_pod<'a>(vm: &VirtualMachine, observed: &'a Observed, pod: &Object) -> Option<&'a Arc<Object>> {
    let mut claims = pod.mounted_claims().filter_map(|(claim, _)| observed.claim(&claim));
    claims.find(|claim| claim.deleting.is_some() && !is_given_up(vm, &claim.uid))
}

/// The names of the claims that this Pod of the VM mounts, and that are the VM's, but that its status does not name yet. When such a claim is gone, only
/// the status says that a guest has had it, so that no empty one takes its place. One that a person has given up may go.
pub fn unrecorded(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: Option<&[Rendered]>,
    pod: &Object,
) -> Vec<String> {
    let is_mounted = |claim: &ClaimStatus| pod.mounted_claims().any(|(mounted, _)| mounted == claim.name);
    let goes_with_pod = |claim: &ClaimStatus| pod.ephemeral_claims().any(|own| own == claim.name);
    let may_go = |claim: &ClaimStatus| claim.uid.as_ref().is_none_or(|uid| is_given_up(vm, uid));
    let claims = named(vm, observed, rendered, &[]).into_iter();
    let unrecorded =
        claims.filter(|claim| !may_go(claim) && is_mounted(claim) && !goes_with_pod(claim) && !is_named(vm, claim));
    unrecorded.map(|claim| claim.name).collect()
}

/// Whether the claim had no volume and could not become as the spec wants it when the manager saw it last, so that a person was told to delete
/// it ([`sentence`]), and no guest of the VM has ever run: a runner's first report takes the condition Running away from the manager, and
/// leaves the UID of its Pod.
fn was_of_no_use(vm: &VirtualMachine, known: &ClaimStatus) -> bool {
    // Runners of the VM-Operator report their version, and not their Pod.
    let has_run = vm.status.as_ref().is_some_and(|status| {
        status.pod_uid.is_some() || status.halted.is_some() || status.runner.runner_version.is_some()
    });
    let found = |reason| known.findings.iter().any(|finding| finding.reason == reason);
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let is_said_by_manager = conditions::find(current, RUNNING).is_some() && !is_said_by_runner(vm, RUNNING);
    !has_run && found(Reason::ClaimPending) && found(Reason::ChangeRefused) && is_said_by_manager
}

/// Whether a Pod that is not the VM's writes to the claim, as far as it was observed ([`Observed::others`]).
fn is_in_use(observed: &Observed, claim: &str) -> bool {
    let mut pods = observed.others.iter().filter(|pod| !pod.has_ended());
    pods.any(|pod| pod.mounted_claims().any(|(mounted, writes)| writes && mounted == claim))
}

/// The owners of a claim that the VM takes, without other VMs: it would be deleted with one of them. `None`: there are none such.
pub fn without_other_vms(vm: &VirtualMachine, owners: &[OwnerReference]) -> Option<Vec<OwnerReference>> {
    let is_other = |owner: &OwnerReference| {
        owning_vm(std::slice::from_ref(owner)).is_some() && Some(&owner.uid) != vm.metadata.uid.as_ref()
    };
    let kept: Vec<_> = owners.iter().filter(|owner| !is_other(owner)).cloned().collect();
    (kept.len() < owners.len()).then_some(kept)
}

/// Whether another VM owns the claim.
pub fn has_other_vm(vm: &VirtualMachine, claim: &Object) -> bool {
    claim.owner_vm.as_ref().is_some_and(|owner| *owner != vm.name_any())
}

/// With what else than the VM, or what makes its Pods, the claim is deleted: its other owners, of which the kind and the name are known of the controller and
/// of a VM.
fn owner_finding(vm: &VirtualMachine, observed: &Observed, found: &Object) -> Option<ClaimFinding> {
    let vm_uid = vm.uid().unwrap_or_default();
    let is_vms = |uid: &str| uid == vm_uid || observed.objects.iter().chain(&observed.makers).any(|it| it.uid == uid);
    let mut others = found.owners.iter().filter(|uid| !is_vms(uid));
    let first = others.next()?;
    let maker = found.maker.as_ref().filter(|maker| !is_vms(&maker.uid)).map(|maker| maker.key.to_string());
    let other_vm = || found.owner_vm.as_ref().filter(|_| has_other_vm(vm, found)).map(|name| format!("the VM {name}"));
    let owner = maker.or_else(other_vm).unwrap_or_else(|| format!("the object with the UID {first}"));
    Some(ClaimFinding { answer: Some(owner), ..ClaimFinding::new(Reason::ClaimOwned) })
}

/// The object to apply to a claim that the VM takes, and to one that another VM owns: only to this version of it. Of two VMs that take it at
/// once, one is refused. Before it is applied, other VMs are removed from its owners ([`without_other_vms`]).
pub fn as_taken(mut object: Rendered, found: &Object) -> Rendered {
    Arc::make_mut(&mut object.value)["metadata"]["resourceVersion"] = found.version.to_string().into();
    object
}

/// The size in bytes that a claim's spec requests.
pub fn requested_size(spec: &Value) -> Option<u64> {
    Quantity::bytes_of(spec.pointer("/resources/requests/storage")?)
}

/// The size in bytes that the volume has.
pub fn size_now(claim: &Object) -> Option<u64> {
    Quantity::bytes_of(claim.status.pointer("/capacity/storage")?)
}

/// The size in bytes that the volume has when a Pod mounts the claim. Some volumes grow only then
/// (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#resizing-a-volume-containing-a-file-system>).
pub fn size_when_mounted(claim: &Object) -> Option<u64> {
    let grows = claim.condition("FileSystemResizePending", "True").is_some();
    if grows { requested_size(&claim.spec) } else { size_now(claim) }
}

/// The object to apply to a claim that exists: its own spec, with the wanted size if that is a growth and `may_grow`. The API server
/// allows only the size of a claim to change, and only if the claim is bound and grows
/// (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#expanding-persistent-volumes-claims>).
///
/// If the claim's label names another VM although the claim is this VM's, a tool writes that label, and it stays.
pub fn as_existing(wanted: &Rendered, found: &Object, may_grow: bool) -> Rendered {
    let mut object = wanted.clone();
    let note = found.annotations.get(BELONGS_TO_ANNOTATION).map(String::as_str);
    let is_noted = note.is_some() && note == wanted.value["metadata"]["annotations"][BELONGS_TO_ANNOTATION].as_str();
    let has_word = is_noted || found.annotations.contains_key(VM_ANNOTATION);
    if let (Some(label), true) = (found.labels.get(INSTANCE_LABEL), has_word) {
        Arc::make_mut(&mut object.value)["metadata"]["labels"][INSTANCE_LABEL] = label.clone().into();
    }
    // Whoever has made the claim: it was not made for this VM now.
    let made_for = found.annotations.get(MADE_FOR_ANNOTATION);
    if made_for.map(String::as_str) != wanted.value["metadata"]["annotations"][MADE_FOR_ANNOTATION].as_str()
        && let Some(annotations) = Arc::make_mut(&mut object.value)["metadata"]["annotations"].as_object_mut()
    {
        annotations.remove(MADE_FOR_ANNOTATION);
        annotations.extend(made_for.map(|made_for| (MADE_FOR_ANNOTATION.to_owned(), made_for.clone().into())));
    }
    let size = wanted.value["spec"].pointer("/resources/requests/storage").cloned();
    let grows = may_grow && found.is_bound() && requested_size(&wanted.value["spec"]) > requested_size(&found.spec);
    let mut spec = found.spec.clone();
    if let Value::Object(spec) = &mut spec {
        // The volume controller sets this field, so the manager must not own it.
        spec.remove("volumeName");
    }
    if let (true, Some(size), Some(storage)) = (grows, size, spec.pointer_mut("/resources/requests/storage")) {
        *storage = size;
    }
    Arc::make_mut(&mut object.value)["spec"] = spec;
    object
}

/// Whether the manager may ask for a growth of the claim: the API server has not refused it for this spec, and no tool syncs the claim's size
/// with Git. Such a tool would want to shrink the claim then, which the API server refuses together with everything else that it syncs.
pub fn may_grow(vm: &VirtualMachine, wanted: &Rendered, found: &Object) -> bool {
    found.size_applier.is_none() && refused_growth(vm, wanted, found).is_none()
}

/// The growth of a claim that the API server refused, if the VM's spec and the claim have not changed since. The manager does not request
/// it again.
fn refused_growth<'a>(vm: &'a VirtualMachine, wanted: &Rendered, found: &Object) -> Option<&'a ClaimFinding> {
    let claims = vm.status.iter().flat_map(|status| &status.claims);
    let mut findings = claims.filter(|claim| claim.name == found.key.name).flat_map(|claim| &claim.findings);
    let (current, wanted) = (size_text(&found.spec), size_text(&wanted.value["spec"]));
    findings.find(|finding| {
        finding.reason == Reason::GrowthRefused
            && finding.generation == vm.metadata.generation
            && finding.current == current
            && finding.wanted == wanted
    })
}

/// What the status says about the claims. `rendered` is `None` while the templates can't be rendered: then the claims that are known stay known, and
/// those of the VM's disks that its Pod mounts are known from now on.
pub fn named(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: Option<&[Rendered]>,
    refusals: &[RefusedChange],
) -> Vec<ClaimStatus> {
    if let Some(rendered) = rendered {
        return claims(vm, observed, rendered, refusals);
    }
    let mut claims: Vec<ClaimStatus> = vm.status.iter().flat_map(|status| status.claims.clone()).collect();
    let is_new = |claim: &&Arc<Object>| {
        let (name, pods) = (&claim.key.name, &observed.objects);
        known(vm, name).is_none()
            && matches!(whose(vm, observed, claim), Whose::Own | Whose::Former)
            && pods.iter().any(|pod| is_mounted_by(vm, pod, name))
    };
    let mounted: Vec<String> = possible_names(vm).collect();
    let mounted = mounted.iter().filter_map(|name| observed.claim(name)).filter(is_new);
    claims.extend(mounted.map(|claim| ClaimStatus {
        name: claim.key.name.clone(),
        uid: Some(claim.uid.clone()),
        unused: false,
        entry: entry_of(vm, &claim.key.name),
        findings: Vec::new(),
    }));
    claims.sort_by(|one, other| one.name.cmp(&other.name));
    claims
}

/// Derives `status.claims`: the claims with findings, and those that the VM does not use any more, sorted by name.
///
/// `refusals` are those of this reconcile.
pub fn claims(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    refusals: &[RefusedChange],
) -> Vec<ClaimStatus> {
    let wanted = rendered.iter().filter(|object| object.key.is_claim());
    let used = wanted.map(|wanted| {
        let name = wanted.key.name.clone();
        let entry = entry_of(vm, &name);
        let without = |uid, finding| ClaimStatus {
            name: name.clone(),
            uid,
            unused: false,
            entry: entry.clone(),
            findings: vec![finding],
        };
        let found = observed.get(&wanted.key).map(|found| (found, whose(vm, observed, found)));
        match (found, missing(vm, &name)) {
            (Some((_, Whose::Free)), _) if is_in_use(observed, &name) => {
                without(None, ClaimFinding::new(Reason::ClaimInUse))
            }
            (Some((found, Whose::Own | Whose::Former)), _) => {
                let findings = findings(vm, observed, wanted, found, refusals);
                ClaimStatus { name, uid: Some(found.uid.clone()), unused: false, entry, findings }
            }
            (Some((_, Whose::Foreign(why))), known) => {
                let finding = ClaimFinding { answer: Some(why.to_string()), ..ClaimFinding::new(why.reason()) };
                without(known.and_then(|known| known.uid.clone()), finding)
            }
            (None, Some(known)) => ClaimStatus {
                unused: false,
                entry,
                findings: vec![ClaimFinding::new(Reason::ClaimMissing)],
                ..known.clone()
            },
            // The manager could not create or take it yet.
            (Some((_, Whose::Free)) | None, _) => without(None, ClaimFinding::new(Reason::ClaimPending)),
        }
    });
    let is_unused = |object: &&Arc<Object>| {
        object.key.is_claim()
            && object.deleting.is_none()
            && was_of(vm, object)
            && !rendered.iter().any(|rendered| rendered.key == object.key)
    };
    let unused = observed.objects.iter().filter(is_unused);
    let unused = unused.map(|object| ClaimStatus {
        name: object.key.name.clone(),
        uid: Some(object.uid.clone()),
        unused: true,
        entry: known(vm, &object.key.name).and_then(|known| known.entry.clone()),
        findings: Vec::new(),
    });
    let mut claims: Vec<ClaimStatus> = used.chain(unused).collect();
    let lost: Vec<ClaimStatus> = lost(vm, &claims).collect();
    claims.extend(lost);
    claims.sort_by(|one, other| one.name.cmp(&other.name));
    claims
}

/// The claims that were lost while the VM used them and whose disks are not in the spec any more: no empty claim takes their place if the
/// disks come back. A claim that a person deleted when the VM did not use it any more is forgotten.
fn lost<'a>(vm: &'a VirtualMachine, claims: &'a [ClaimStatus]) -> impl Iterator<Item = ClaimStatus> + 'a {
    let known = vm.status.iter().flat_map(|status| &status.claims);
    known.filter_map(|known| {
        let is_lost = !known.unused || known.findings.iter().any(|finding| finding.reason == Reason::ClaimMissing);
        let is_unknown = claims.iter().all(|claim| claim.name != known.name);
        let missing = missing(vm, &known.name).filter(|_| is_lost && is_unknown)?;
        Some(ClaimStatus { unused: true, findings: vec![ClaimFinding::new(Reason::ClaimMissing)], ..missing.clone() })
    })
}

/// Derives StorageReady from [`claims`]; `None` for a VM without claims. Its reason is the one of the worst finding: the first in the order
/// of [`Reason`]. A claim that is larger than the spec wants it lacks nothing: a person let it grow, or wanted it to shrink, which no volume
/// can.
pub fn storage_ready(claims: &[ClaimStatus], rendered: &[Rendered]) -> Option<NewCondition> {
    if claims.is_empty() && !rendered.iter().any(|object| object.key.is_claim()) {
        return None;
    }
    let (lost, claims): (Vec<&ClaimStatus>, Vec<&ClaimStatus>) =
        claims.iter().partition(|claim| claim.unused && !claim.findings.is_empty());
    let mut findings: Vec<(&ClaimFinding, &ClaimStatus)> =
        claims.iter().flat_map(|claim| claim.findings.iter().map(move |finding| (finding, *claim))).collect();
    findings.sort_by_key(|(finding, _)| finding.reason);
    let unused: Vec<&str> = claims.iter().filter(|claim| claim.unused).map(|claim| claim.name.as_str()).collect();
    let kept = (!unused.is_empty()).then(|| format!("kept, but not used by this VM any more: {}", unused.join(", ")));
    let lost: Vec<&str> = lost.iter().map(|claim| claim.name.as_str()).collect();
    let lost = (!lost.is_empty()).then(|| {
        format!(
            "lost while this VM used them, and not used any more: {} (if such a disk comes back, no empty claim takes its place)",
            lost.join(", ")
        )
    });
    let sentences = findings.iter().map(|(finding, claim)| sentence(claim, finding)).chain(kept).chain(lost);
    Some(NewCondition {
        type_: STORAGE_READY,
        status: findings
            .iter()
            .all(|(finding, _)| matches!(finding.reason, Reason::ClaimOwned | Reason::ShrinkRefused)),
        reason: findings.first().map_or(Reason::ClaimsBound, |(finding, _)| finding.reason),
        message: sentences.collect::<Vec<_>>().join("; "),
    })
}

/// What is new in `status.claims` and needs an event.
#[derive(Debug, Default, PartialEq)]
pub struct NewFindings<'a> {
    /// Findings that need a person, each with its claim.
    pub findings: Vec<(&'a ClaimStatus, &'a ClaimFinding)>,
    /// The names of claims that the VM does not use any more.
    pub unused: Vec<&'a str>,
}

/// Compares the result of [`claims`] with the VM's current status.
pub fn new_findings<'a>(vm: &VirtualMachine, claims: &'a [ClaimStatus]) -> NewFindings<'a> {
    let before = |name: &str| {
        let mut before = vm.status.iter().flat_map(|status| &status.claims);
        before.find(|claim| claim.name == name)
    };
    let mut new = NewFindings::default();
    for claim in claims {
        let before = before(&claim.name);
        // A finding is not new because the spec has another generation.
        let is_known = |finding: &ClaimFinding| {
            let mut known = before.into_iter().flat_map(|before| &before.findings);
            known.any(|known| ClaimFinding { generation: finding.generation, ..known.clone() } == *finding)
        };
        let found = claim.findings.iter().filter(|found| found.reason.effect() == Effect::Warning && !is_known(found));
        new.findings.extend(found.map(|finding| (claim, finding)));
        if claim.unused && !before.is_some_and(|before| before.unused) {
            new.unused.push(&claim.name);
        }
    }
    new
}

/// The sentence about a finding of a claim, for people.
pub fn sentence(claim: &ClaimStatus, finding: &ClaimFinding) -> String {
    let ClaimStatus { name: claim, uid, unused: _, entry: _, findings } = claim;
    let (current, wanted) = (
        finding.current.as_deref().unwrap_or("an unknown size"),
        finding.wanted.as_deref().unwrap_or("an unknown size"),
    );
    match finding.reason {
        Reason::ClaimDeleting => {
            format!("claim {claim} is being deleted: it is removed, with its data, when no Pod uses it any more")
        }
        Reason::ClaimMissing => format!(
            "claim {claim} does not exist any more, and an empty one would take the place of its data: restore it under this name, or, to \
             start with an empty one, give the VM the annotation {REPLACE_CLAIM_ANNOTATION}: {}; if the claim exists, its label \
             {INSTANCE_LABEL} names another VM: remove that label, or, if a tool writes it, add the annotation {VM_ANNOTATION}",
            uid.as_deref().unwrap_or_default()
        ),
        Reason::ClaimTaken | Reason::ClaimReplaced => {
            format!("claim {claim} {}", finding.answer.as_deref().unwrap_or("is not this VM's"))
        }
        Reason::ClaimInUse => {
            format!(
                "claim {claim} exists already, and a Pod that is not this VM's writes to it: the VM takes it when that Pod is gone"
            )
        }
        Reason::ClaimLost => format!("claim {claim} has lost its volume"),
        Reason::ClaimPending => {
            let class =
                finding.current.as_deref().map(|class| format!(" of the storage class {class}")).unwrap_or_default();
            format!("claim {claim}{class} has no volume yet; kubectl describe pvc {claim} says why")
        }
        Reason::GrowthRefused => format!(
            "claim {claim} can't grow from {current} to {wanted}: {}{}",
            finding.answer.as_deref().unwrap_or("the API server refuses it"),
            if finding.generation.is_some() { " (tried again when the VM's spec changes)" } else { "" }
        ),
        Reason::GrowthPending => format!("claim {claim} has {current} and will have {wanted}"),
        Reason::ClaimOwned => format!(
            "claim {claim} is deleted, with its data, together with {}, which owns it: remove that owner from the claim to keep it",
            finding.answer.as_deref().unwrap_or("something else")
        ),
        Reason::ShrinkRefused => format!("claim {claim} keeps its {current}: a volume can't shrink to {wanted}"),
        Reason::ChangeRefused => {
            let is_empty = findings.iter().any(|finding| finding.reason == Reason::ClaimPending);
            let remedy =
                if is_empty { "; it has no volume, so delete it to have it made as the spec wants it" } else { "" };
            format!("claim {claim} keeps its {current}: that can't be changed in a claim that exists{remedy}")
        }
        Reason::Resizing => format!("claim {claim} is growing to {wanted}"),
        other => format!("claim {claim}: {}", other.meaning()),
    }
}

/// The fields of a claim's spec that can't change in a claim that exists.
const UNCHANGEABLE: [&str; 6] =
    ["accessModes", "volumeMode", "storageClassName", "selector", "dataSource", "dataSourceRef"];

fn findings(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &Rendered,
    found: &Object,
    refusals: &[RefusedChange],
) -> Vec<ClaimFinding> {
    let deleting = found.deleting.map(|_| ClaimFinding::new(Reason::ClaimDeleting));
    let findings = [
        deleting,
        volume_finding(found),
        size_finding(vm, rendered, found, refusals),
        change_finding(rendered, found),
        resize_finding(found),
        owner_finding(vm, observed, found),
    ];
    findings.into_iter().flatten().collect()
}

/// The claim has no volume.
fn volume_finding(found: &Object) -> Option<ClaimFinding> {
    match found.phase() {
        Some("Bound") => None,
        Some("Lost") => Some(ClaimFinding::new(Reason::ClaimLost)),
        Some(_) | None => Some(ClaimFinding {
            current: found.spec_str("/storageClassName").map(str::to_owned),
            ..ClaimFinding::new(Reason::ClaimPending)
        }),
    }
}

/// The spec wants another size than the claim requests.
fn size_finding(
    vm: &VirtualMachine,
    rendered: &Rendered,
    found: &Object,
    refusals: &[RefusedChange],
) -> Option<ClaimFinding> {
    let wanted = &rendered.value["spec"];
    let with_sizes = |reason| ClaimFinding {
        current: size_text(&found.spec),
        wanted: size_text(wanted),
        ..ClaimFinding::new(reason)
    };
    match requested_size(wanted)?.cmp(&requested_size(&found.spec)?) {
        Ordering::Equal => None,
        Ordering::Less => Some(with_sizes(Reason::ShrinkRefused)),
        Ordering::Greater if let Some(tool) = &found.size_applier => Some(ClaimFinding {
            answer: Some(format!(
                "{tool} syncs this claim with Git; change its size there, or remove the claim from Git"
            )),
            ..with_sizes(Reason::GrowthRefused)
        }),
        Ordering::Greater => {
            let refused_now = refusals.iter().find(|refusal| refusal.claim == rendered.key);
            let refused_now = refused_now.map(|refusal| ClaimFinding {
                answer: Some(refusal.answer.clone()),
                generation: vm.metadata.generation,
                ..with_sizes(Reason::GrowthRefused)
            });
            let refused = refused_now.or_else(|| refused_growth(vm, rendered, found).cloned());
            Some(refused.unwrap_or_else(|| with_sizes(Reason::GrowthPending)))
        }
    }
}

/// The spec wants other values of fields that can't change.
fn change_finding(rendered: &Rendered, found: &Object) -> Option<ClaimFinding> {
    let wanted = &rendered.value["spec"];
    // The API server returns `apiGroup: null` for a source of the core group.
    let said = |value: &Value| match value.as_object() {
        Some(map) => {
            Value::Object(map.clone().into_iter().filter(|(_, value)| !value.is_null() && value != "").collect())
        }
        None => value.clone(),
    };
    let differs = |field: &&str| {
        let found = found.spec.get(field).map(said);
        wanted.get(field).is_some_and(|wanted| Some(said(wanted)) != found)
    };
    let fields: Vec<&str> = UNCHANGEABLE.into_iter().filter(differs).collect();
    (!fields.is_empty())
        .then(|| ClaimFinding { current: Some(fields.join(", ")), ..ClaimFinding::new(Reason::ChangeRefused) })
}

/// The volume is still smaller than the claim requests.
fn resize_finding(found: &Object) -> Option<ClaimFinding> {
    let capacity = found.status.pointer("/capacity/storage").and_then(Quantity::bytes_of)?;
    let is_smaller = capacity < requested_size(&found.spec)?;
    is_smaller.then(|| ClaimFinding { wanted: size_text(&found.spec), ..ClaimFinding::new(Reason::Resizing) })
}

fn size_text(spec: &Value) -> Option<String> {
    let size = spec.pointer("/resources/requests/storage")?;
    Some(size.as_str().map_or_else(|| size.to_string(), str::to_owned))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        ownership::{RUNNER_MANAGER, STATUS_MANAGER},
        test_support::{applied, nothing, rendered, vm},
    };

    const CLAIM: &str = "apple-core-disk";

    /// The VM `apple`, whose disk should have 2Gi.
    fn growing(status: Value) -> VirtualMachine {
        vm(|vm| {
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] =
                json!("2Gi");
            vm["status"] = status;
        })
    }

    /// The claims of the VM, bound to volumes of 1Gi.
    fn bound() -> Observed {
        applied(&rendered(&vm(|_| ()), &nothing()), |kind, object| {
            if kind == "PersistentVolumeClaim" {
                object["spec"]["volumeName"] = json!("pv");
                object["status"]["phase"] = json!("Bound");
            }
        })
    }

    fn status_of(claims: Value) -> Vec<ClaimStatus> {
        serde_json::from_value(claims).unwrap()
    }

    #[test]
    fn a_refused_growth_is_kept_for_its_generation() {
        let (first, observed) = (growing(Value::Null), bound());
        let objects = rendered(&first, &observed);
        let reported = |vm: &VirtualMachine, refusals: &[RefusedChange]| claims(vm, &observed, &objects, refusals);
        let refusal = |name: &str| {
            let claim = objects.iter().find(|object| object.key.name == name).unwrap().key.clone();
            [RefusedChange { claim, answer: "no quota".into() }]
        };
        let refused = reported(&first, &refusal(CLAIM));
        let finding = json!({
            "reason": "GrowthRefused", "current": "1Gi", "wanted": "2Gi", "answer": "no quota", "generation": 3,
        });
        let uid = |name: &str| format!("PersistentVolumeClaim-{name}");
        let other = json!({ "name": "apple-runner-data", "uid": uid("apple-runner-data") });
        assert_eq!(json!(refused), json!([{ "name": CLAIM, "uid": uid(CLAIM), "findings": [finding] }, other]));
        let condition = storage_ready(&refused, &objects).unwrap();
        assert_eq!((condition.status, condition.reason), (false, Reason::GrowthRefused));
        assert_eq!(
            condition.message,
            "claim apple-core-disk can't grow from 1Gi to 2Gi: no quota (tried again when the VM's spec changes)"
        );

        // The next reconcile does not request the growth, so there is no refusal.
        let mut later = growing(json!({ "claims": refused }));
        assert_eq!(reported(&later, &[]), refused);
        let reasons = |claims: &[ClaimStatus]| -> Vec<Reason> {
            claims.iter().flat_map(|claim| &claim.findings).map(|finding| finding.reason).collect()
        };
        later.metadata.generation = Some(4);
        assert_eq!(reasons(&reported(&later, &[])), [Reason::GrowthPending]);
        assert_eq!(reasons(&reported(&first, &refusal("apple-runner-data"))), [Reason::GrowthPending]);
    }

    #[test]
    fn a_claim_that_is_taken_keeps_no_other_vm_as_its_owner() {
        let apple = vm(|_| ());
        let owner = |kind: &str, uid: &str| OwnerReference {
            api_version: if kind == "VirtualMachine" { "vmoperator.jdrupes.org/v1" } else { "batch/v1" }.into(),
            kind: kind.into(),
            name: uid.into(),
            uid: uid.into(),
            ..OwnerReference::default()
        };
        let (own, web, job) =
            (owner("VirtualMachine", "apple-uid"), owner("VirtualMachine", "web"), owner("Job", "copy"));
        for (owners, kept) in [
            (vec![], None),
            (vec![own.clone(), job.clone()], None),
            (vec![web.clone()], Some(vec![])),
            (vec![web, own.clone(), job.clone()], Some(vec![own, job])),
        ] {
            assert_eq!(without_other_vms(&apple, &owners), kept, "{owners:?}");
        }
    }

    #[test]
    fn storage_ready_names_what_else_a_claim_is_deleted_with() {
        let apple = vm(|_| ());
        let with = |owner: Value| {
            let observed = applied(&rendered(&apple, &nothing()), |kind, object| {
                if kind == "PersistentVolumeClaim" {
                    object["status"]["phase"] = json!("Bound");
                    if object["metadata"]["name"] == CLAIM {
                        object["metadata"]["ownerReferences"] = json!([owner]);
                    }
                }
            });
            let objects = rendered(&apple, &observed);
            storage_ready(&claims(&apple, &observed, &objects, &[]), &objects).unwrap()
        };
        let vms = |name: &str, uid: &str| json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": name, "uid": uid });
        let job = |controller: bool| json!({ "apiVersion": "batch/v1", "kind": "Job", "name": "copy", "uid": "u-job", "controller": controller });
        assert_eq!(with(vms("apple", "apple-uid")).reason, Reason::ClaimsBound);
        for (owner, named) in [
            (vms("web", "u-web"), "the VM web"),
            (job(true), "Job copy"),
            (job(false), "the object with the UID u-job"),
        ] {
            let condition = with(owner);
            assert_eq!((condition.status, condition.reason), (true, Reason::ClaimOwned));
            let expected =
                format!("claim apple-core-disk is deleted, with its data, together with {named}, which owns it: ");
            assert!(condition.message.starts_with(&expected), "{}", condition.message);
        }
    }

    #[test]
    fn claims_that_a_pod_mounts_become_known_also_while_nothing_can_be_rendered() {
        let vm = vm(|_| ());
        let objects = rendered(&vm, &nothing());
        let named = |objects: &[Rendered]| {
            let observed = applied(objects, |_, _| ());
            named(&vm, &observed, None, &[]).into_iter().map(|claim| (claim.name, claim.uid)).collect::<Vec<_>>()
        };
        let known = ["apple-core-disk", "apple-runner-data"]
            .map(|name| (name.to_owned(), Some(format!("PersistentVolumeClaim-{name}"))));
        assert_eq!(named(&objects), known);
        let without_pod: Vec<_> = objects.into_iter().filter(|object| !object.key.is_pod()).collect();
        assert_eq!(named(&without_pod), []);
    }

    #[test]
    fn a_disk_keeps_the_claim_that_the_status_has() {
        let named = |known: Value, existing: &[&str]| {
            let vm = vm(|vm| vm["status"] = json!({ "claims": known }));
            let mut objects = rendered(&vm, &nothing());
            objects.retain(|object| object.key.name.ends_with("-disk") || object.key.name.starts_with("core-disk"));
            let template = objects.remove(0);
            let existing = existing.iter().map(|name| {
                let mut object = template.clone();
                object.key.name = (*name).into();
                Arc::make_mut(&mut object.value)["metadata"]["name"] = json!(name);
                object
            });
            let observed = applied(&existing.collect::<Vec<_>>(), |_, _| ());
            disk_name(&vm, "core-disk", &observed)
        };
        let (new, former) = ("apple-core-disk", "core-disk-apple-0");
        let known = |name: &str| json!([{ "name": name, "uid": "u-1" }]);
        assert_eq!(named(known(new), &[former]), new, "a lost claim is not replaced by an ancient one");
        assert_eq!(named(known(former), &[new]), former, "nor by a new one");
        assert_eq!(named(known(former), &[new, former]), former);
        assert_eq!(named(json!([]), &[former]), former);
        assert_eq!(named(json!([]), &[new, former]), new);
        assert_eq!(named(json!([]), &[]), new);
        assert_eq!(
            named(json!([{ "name": former, "uid": "u-1", "unused": true }]), &[new]),
            new,
            "a disk that was taken out"
        );
    }

    #[test]
    fn a_disk_without_a_name_keeps_its_claim_when_the_list_is_edited() {
        let disks = |sizes: &[&str]| {
            let disk = |size: &&str| json!({ "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": size } } } } });
            json!(sizes.iter().map(disk).collect::<Vec<_>>())
        };
        let before = vm(|vm| vm["spec"]["vm"]["disks"] = disks(&["1Gi", "2Gi"]));
        let objects = rendered(&before, &nothing());
        let observed = applied(&objects, |_, _| ());
        let recorded = claims(&before, &observed, &objects, &[]);
        let after = vm(|vm| {
            vm["spec"]["vm"]["disks"] = disks(&["2Gi"]);
            vm["status"] = json!({ "claims": recorded });
        });
        assert_eq!(volumes(&after).collect::<Vec<_>>(), [Some("disk-1".to_owned())]);
        let objects = rendered(&after, &observed);
        assert!(objects.iter().any(|object| object.key.name == "apple-disk-1"));
        let recorded = claims(&after, &observed, &objects, &[]);
        let unused: Vec<_> = recorded.iter().filter(|claim| claim.unused).map(|claim| claim.name.as_str()).collect();
        assert_eq!(unused, ["apple-disk-0"]);
        // It comes back, with its data.
        let again = vm(|vm| {
            vm["spec"]["vm"]["disks"] = disks(&["1Gi", "2Gi"]);
            vm["status"] = json!({ "claims": recorded });
        });
        let both = ["disk-0", "disk-1"].map(|volume| Some(volume.to_owned()));
        assert_eq!(volumes(&again).collect::<Vec<_>>(), both);
    }

    #[test]
    fn a_disk_without_a_name_is_known_by_its_serial_number() {
        let disks = |serials: &[&str]| {
            let disk = |serial: &&str| json!({ "serial": serial, "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": "1Gi" } } } } });
            json!(serials.iter().map(disk).collect::<Vec<_>>())
        };
        let before = vm(|vm| vm["spec"]["vm"]["disks"] = disks(&["one", "two"]));
        let objects = rendered(&before, &nothing());
        let recorded = claims(&before, &applied(&objects, |_, _| ()), &objects, &[]);
        let after = vm(|vm| {
            vm["spec"]["vm"]["disks"] = disks(&["two"]);
            vm["status"] = json!({ "claims": recorded });
        });
        assert_eq!(volumes(&after).collect::<Vec<_>>(), [Some("disk-1".to_owned())]);
    }

    #[test]
    fn a_claim_that_was_lost_in_use_is_remembered_when_its_disk_is_not_in_the_spec_any_more() {
        let lost_after = |known: Value, annotation: &str| {
            let vm = vm(|vm| {
                vm["status"] = json!({ "claims": [known] });
                vm["metadata"]["annotations"] = json!({ REPLACE_CLAIM_ANNOTATION: annotation });
            });
            let observed = bound();
            let claims = claims(&vm, &observed, &rendered(&vm, &observed), &[]);
            let condition = storage_ready(&claims, &rendered(&vm, &observed)).unwrap();
            assert!(condition.status, "the VM does not use it");
            claims.into_iter().find(|claim| claim.name == "apple-data-disk").map(|claim| json!(claim))
        };
        let data = |more: Value| {
            let mut claim = json!({ "name": "apple-data-disk", "uid": "u-1" });
            claim.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            claim
        };
        let lost = data(json!({ "unused": true, "findings": [{ "reason": "ClaimMissing" }] }));
        for known in [data(json!({})), data(json!({ "findings": [{ "reason": "ClaimMissing" }] })), lost.clone()] {
            assert_eq!(lost_after(known, ""), Some(lost.clone()));
        }
        assert_eq!(lost_after(lost.clone(), "u-1"), None, "a person gave it up");
        assert_eq!(lost_after(data(json!({ "unused": true })), ""), None, "it was deleted when the VM did not use it");
    }

    #[test]
    fn a_claim_without_a_volume_that_could_not_change_is_made_again_unless_a_guest_may_have_run_with_it() {
        let pending = |pod: Option<&str>, running_by: &str, more: Value| {
            let mut claim = json!({ "name": CLAIM, "uid": "u-1" });
            claim.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            vm(|vm| {
                let running = json!({ "type": "Running", "status": "False", "reason": "Stopped", "message": "", "lastTransitionTime": "2027-01-15T06:00:00Z" });
                vm["status"] = json!({ "claims": [claim], "podUid": pod, "conditions": [running] });
                let condition = json!({ "f:status": {}, "f:message": {} });
                vm["metadata"]["managedFields"] = json!([{
                    "manager": running_by, "operation": "Apply", "subresource": "status",
                    "fieldsV1": { "f:status": { "f:conditions": { r#"k:{"type":"Running"}"#: condition } } },
                }]);
            })
        };
        let waits = json!({ "findings": [{ "reason": "ChangeRefused" }, { "reason": "ClaimPending" }] });
        assert_eq!(missing(&pending(None, STATUS_MANAGER, waits.clone()), CLAIM), None);
        assert!(missing(&pending(None, RUNNER_MANAGER, waits.clone()), CLAIM).is_some(), "a runner has reported since");
        assert!(missing(&pending(Some("u-2"), STATUS_MANAGER, waits), CLAIM).is_some(), "a guest ran before");
        for one in ["ChangeRefused", "ClaimPending"] {
            let finding = json!({ "findings": [{ "reason": one }] });
            assert!(missing(&pending(None, STATUS_MANAGER, finding), CLAIM).is_some(), "{one}");
        }
    }

    #[test]
    fn a_claim_without_a_volume_that_can_not_change_may_be_deleted() {
        let sentence_of = |findings: Value| {
            let claim = status_of(json!([{ "name": "a", "findings": findings }])).remove(0);
            claim.findings.iter().map(|finding| sentence(&claim, finding)).collect::<Vec<_>>().join("; ")
        };
        let refused = json!({ "reason": "ChangeRefused", "current": "storageClassName" });
        assert_eq!(
            sentence_of(json!([refused])),
            "claim a keeps its storageClassName: that can't be changed in a claim that exists"
        );
        assert_eq!(
            sentence_of(json!([{ "reason": "ClaimPending", "current": "fast" }, refused])),
            "claim a of the storage class fast has no volume yet; kubectl describe pvc a says why; claim a keeps its storageClassName: \
             that can't be changed in a claim that exists; it has no volume, so delete it to have it made as the spec wants it"
        );
    }

    #[test]
    fn the_source_of_a_clone_is_as_wanted_with_the_defaults_of_the_api_server() {
        let vm = vm(|vm| {
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["dataSource"] =
                json!({ "kind": "PersistentVolumeClaim", "name": "golden" });
        });
        let objects = rendered(&vm, &nothing());
        let wanted = objects.iter().find(|object| object.key.name == CLAIM).unwrap();
        for (name, is_same) in [("golden", true), ("silver", false)] {
            let observed = applied(&objects, |kind, object| {
                if kind == "PersistentVolumeClaim" && object["metadata"]["name"] == CLAIM {
                    object["spec"]["dataSource"] =
                        json!({ "apiGroup": null, "kind": "PersistentVolumeClaim", "name": name });
                }
            });
            let found = observed.objects.iter().find(|object| object.key.name == CLAIM).unwrap();
            assert_eq!(change_finding(wanted, found).is_none(), is_same, "{name}");
        }
    }

    #[test]
    fn storage_ready_has_the_reason_of_the_worst_finding_and_all_sentences() {
        let objects = rendered(&vm(|_| ()), &nothing());
        let claims = status_of(json!([
            { "name": "a", "findings": [{ "reason": "Resizing", "wanted": "3Gi" }] },
            { "name": "b", "findings": [{ "reason": "ClaimPending" }, { "reason": "ClaimLost" }] },
            { "name": "c", "unused": true },
        ]));
        let condition = storage_ready(&claims, &objects).unwrap();
        assert_eq!((condition.status, condition.reason), (false, Reason::ClaimLost));
        assert_eq!(
            condition.message,
            "claim b has lost its volume; claim b has no volume yet; kubectl describe pvc b says why; claim a is growing to 3Gi; \
             kept, but not used by this VM any more: c"
        );
        let unused = storage_ready(&claims[2..], &[]).unwrap();
        assert_eq!((unused.status, unused.reason), (true, Reason::ClaimsBound));
        assert_eq!(unused.message, "kept, but not used by this VM any more: c");
        let bound = storage_ready(&[], &objects).unwrap();
        assert_eq!((bound.status, bound.reason, bound.message.as_str()), (true, Reason::ClaimsBound, ""));
        assert_eq!(storage_ready(&[], &[]), None);
    }

    #[test]
    fn new_findings_are_warnings_and_unused_claims_that_the_status_does_not_have() {
        let growth = |answer: &str, generation: i64| json!({ "reason": "GrowthRefused", "current": "1Gi", "wanted": "2Gi", "answer": answer, "generation": generation });
        let before = growing(json!({ "claims": [
            { "name": "same", "findings": [growth("no", 2)] },
            { "name": "other-answer", "findings": [growth("no", 2)] },
            { "name": "known-unused", "unused": true },
            { "name": "unused-now", "findings": [{ "reason": "ClaimPending" }] },
        ] }));
        let now = status_of(json!([
            { "name": "same", "findings": [growth("no", 3)] },
            { "name": "other-answer", "findings": [growth("still no", 3)] },
            { "name": "lost", "findings": [{ "reason": "ClaimPending" }, { "reason": "ClaimLost" }] },
            { "name": "known-unused", "unused": true },
            { "name": "unused-now", "unused": true },
        ]));
        let new = new_findings(&before, &now);
        let findings: Vec<_> =
            new.findings.iter().map(|(claim, finding)| (claim.name.as_str(), finding.reason)).collect();
        assert_eq!(findings, [("other-answer", Reason::GrowthRefused), ("lost", Reason::ClaimLost)]);
        assert_eq!(new.unused, ["unused-now"]);
        let after = growing(json!({ "claims": now }));
        assert_eq!(new_findings(&after, &now), NewFindings::default());
    }
}
