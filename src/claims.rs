//! Claims of a VM: what they are called, how they grow, and what the condition StorageReady reports of them.
//!
//! A claim holds a person's data, so it is never deleted and never replaced. A difference between a claim and the spec that can't be
//! brought about is no error: the VM runs with the claim that exists, and the condition says what is different and why.
//!
//! ```text
//!  spec, observed claims ─▶ name (render) ─▶ rendered claim ─▶ as_existing (plan) ─▶ findings ─▶ StorageReady, status.claims, events
//! ```
//!
//! What must be known later, such as a growth that the API server refused, is in `status.claims`.

use std::sync::Arc;

use kube::ResourceExt;
use serde_json::Value;

use crate::{
    api::{
        Quantity, Reason, VirtualMachine,
        conditions::{NewCondition, STORAGE_READY},
        reasons::Effect,
        status::{ClaimFinding, ClaimStatus},
    },
    object::{ObjectKey, Rendered},
    observed::{Object, Observed, Part},
};

/// What the API server answered to a change of a claim that it refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The claim.
    pub claim: ObjectKey,
    /// The answer.
    pub answer: String,
}

/// The name of the claim for a disk's `volume`. A claim that an earlier release named otherwise is used where it exists.
pub fn disk_name(vm: &str, volume: &str, observed: &Observed) -> String {
    existing_name(observed, format!("{vm}-{volume}"), &[format!("{volume}-{vm}-0")])
}

/// The name of the claim for the runner's own data, as [`disk_name`].
pub fn runner_data_name(vm: &str, observed: &Observed) -> String {
    let former = [format!("runner-data-{vm}-0"), format!("vmop-runner-data-{vm}-0")];
    existing_name(observed, format!("{vm}-runner-data"), &former)
}

fn existing_name(observed: &Observed, name: String, former: &[String]) -> String {
    if observed.claim(&name).is_some() {
        return name;
    }
    former.iter().find(|former| observed.claim(former).is_some()).cloned().unwrap_or(name)
}

/// The size in bytes that a claim's spec asks for.
pub fn requested_size(spec: &Value) -> Option<u64> {
    Quantity::bytes_of(spec.pointer("/resources/requests/storage")?)
}

/// The size in bytes of the volume when a Pod mounts the claim. Some volumes grow only then
/// (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#resizing-a-volume-containing-a-file-system>).
pub fn size_when_mounted(claim: &Object) -> Option<u64> {
    if claim.condition("FileSystemResizePending", "True").is_some() {
        return requested_size(&claim.spec);
    }
    Quantity::bytes_of(claim.status.pointer("/capacity/storage")?)
}

/// The object to apply to a claim that exists. The API server lets only the size of a claim change, and only if the claim is bound and
/// grows (<https://kubernetes.io/docs/concepts/storage/persistent-volumes/#expanding-persistent-volumes-claims>).
pub fn as_existing(wanted: &Rendered, found: &Object, may_grow: bool) -> Rendered {
    let mut object = wanted.clone();
    let size = wanted.value["spec"].pointer("/resources/requests/storage").cloned();
    let grows = may_grow && found.is_bound() && requested_size(&wanted.value["spec"]) > requested_size(&found.spec);
    let mut spec = found.spec.clone();
    if let Value::Object(spec) = &mut spec {
        // The binder sets it; the manager must not own it.
        spec.remove("volumeName");
    }
    if let (true, Some(size), Some(storage)) = (grows, size, spec.pointer_mut("/resources/requests/storage")) {
        *storage = size;
    }
    Arc::make_mut(&mut object.value)["spec"] = spec;
    object
}

/// The growth of a claim that the API server refused, if the VM's spec and the claim are the same as then. It is not asked for again.
pub fn refused_growth<'a>(vm: &'a VirtualMachine, wanted: &Rendered, found: &Object) -> Option<&'a ClaimFinding> {
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

/// What `status.claims` reports: the claims with findings, and those that the VM does not use any more. In the order of their names.
///
/// `refusals` are the answers of the API server during this reconcile.
pub fn claims(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    refusals: &[Refusal],
) -> Vec<ClaimStatus> {
    let wanted = rendered.iter().filter(|object| object.key.is_claim());
    let used = wanted.filter_map(|wanted| {
        let findings = findings(vm, wanted, observed.get(&wanted.key)?, refusals);
        (!findings.is_empty()).then(|| ClaimStatus { name: wanted.key.name.clone(), unused: false, findings })
    });
    let is_unused = |object: &&Arc<Object>| {
        object.key.is_claim()
            && object.is_ours()
            && object.deleting.is_none()
            && !rendered.iter().any(|rendered| rendered.key == object.key)
    };
    let unused = observed.objects.iter().filter(is_unused);
    let unused = unused.map(|object| ClaimStatus { name: object.key.name.clone(), unused: true, findings: Vec::new() });
    let mut claims: Vec<ClaimStatus> = used.chain(unused).collect();
    claims.sort_by(|one, other| one.name.cmp(&other.name));
    claims
}

/// Derives StorageReady from [`claims`]; `None` for a VM without disks. The reason is that of the worst finding.
pub fn storage_ready(claims: &[ClaimStatus], rendered: &[Rendered]) -> Option<NewCondition> {
    if claims.is_empty() && !rendered.iter().any(|object| object.key.is_claim()) {
        return None;
    }
    let mut findings: Vec<(&ClaimFinding, &str)> =
        claims.iter().flat_map(|claim| claim.findings.iter().map(|finding| (finding, claim.name.as_str()))).collect();
    findings.sort_by_key(|(finding, _)| finding.reason);
    let unused: Vec<&str> = claims.iter().filter(|claim| claim.unused).map(|claim| claim.name.as_str()).collect();
    let kept = (!unused.is_empty()).then(|| format!("kept, but not used by this VM any more: {}", unused.join(", ")));
    let sentences = findings.iter().map(|(finding, claim)| sentence(claim, finding)).chain(kept);
    Some(NewCondition {
        type_: STORAGE_READY,
        status: findings.is_empty(),
        reason: findings.first().map_or(Reason::ClaimsBound, |(finding, _)| finding.reason),
        message: sentences.collect::<Vec<_>>().join("; "),
    })
}

/// What is in `now` and was not in the status before: findings that need a person, and claims that are not used any more.
#[derive(Debug, Default, PartialEq)]
pub struct NewFindings<'a> {
    /// The claim and the finding.
    pub findings: Vec<(&'a str, &'a ClaimFinding)>,
    /// The names of the claims.
    pub unused: Vec<&'a str>,
}

/// Compares [`claims`] with the VM's status.
pub fn new_findings<'a>(vm: &VirtualMachine, now: &'a [ClaimStatus]) -> NewFindings<'a> {
    let before = |name: &str| {
        let mut before = vm.status.iter().flat_map(|status| &status.claims);
        before.find(|claim| claim.name == name)
    };
    let mut new = NewFindings::default();
    for claim in now {
        let before = before(&claim.name);
        // Another generation of the spec does not make a finding new.
        let is_known = |finding: &ClaimFinding| {
            let mut known = before.into_iter().flat_map(|before| &before.findings);
            known.any(|known| ClaimFinding { generation: finding.generation, ..known.clone() } == *finding)
        };
        let found = claim.findings.iter().filter(|found| found.reason.effect() == Effect::Warning && !is_known(found));
        new.findings.extend(found.map(|finding| (claim.name.as_str(), finding)));
        if claim.unused && !before.is_some_and(|before| before.unused) {
            new.unused.push(&claim.name);
        }
    }
    new
}

/// A finding as a sentence for people.
pub fn sentence(claim: &str, finding: &ClaimFinding) -> String {
    let (current, wanted) = (
        finding.current.as_deref().unwrap_or("an unknown size"),
        finding.wanted.as_deref().unwrap_or("an unknown size"),
    );
    match finding.reason {
        Reason::ClaimDeleting => {
            format!("claim {claim} is being deleted: it goes, with its data, when no Pod uses it any more")
        }
        Reason::ClaimLost => format!("claim {claim} has lost its volume"),
        Reason::ClaimPending => format!("claim {claim} has no volume yet"),
        Reason::GrowthRefused => format!(
            "claim {claim} can't grow from {current} to {wanted}: {} (asked for again when the VM's spec changes)",
            finding.answer.as_deref().unwrap_or("the API server refuses it")
        ),
        Reason::GrowthPending => format!("claim {claim} has {current} and will have {wanted}"),
        Reason::ShrinkRefused => format!("claim {claim} keeps its {current}: a volume can't shrink to {wanted}"),
        Reason::ChangeRefused => {
            format!("claim {claim} keeps its {current}: that can't be changed in a claim that exists")
        }
        Reason::Resizing => format!("claim {claim} is growing to {wanted}"),
        other => format!("claim {claim}: {}", other.meaning()),
    }
}

/// Fields of a claim's spec besides its size.
const UNCHANGEABLE: [&str; 6] =
    ["accessModes", "volumeMode", "storageClassName", "selector", "dataSource", "dataSourceRef"];

fn findings(vm: &VirtualMachine, rendered: &Rendered, found: &Object, refusals: &[Refusal]) -> Vec<ClaimFinding> {
    let plain = ClaimFinding::of;
    let mut findings = Vec::new();
    if found.deleting.is_some() {
        findings.push(plain(Reason::ClaimDeleting));
    }
    match found.text(Part::Status, "/phase") {
        Some("Lost") => findings.push(plain(Reason::ClaimLost)),
        Some("Bound") => {}
        _ => findings.push(plain(Reason::ClaimPending)),
    }
    let wanted = &rendered.value["spec"];
    let sizes = |reason| ClaimFinding {
        current: size_text(&found.spec),
        wanted: size_text(wanted),
        ..ClaimFinding::of(reason)
    };
    match (requested_size(wanted), requested_size(&found.spec)) {
        (Some(more), Some(less)) if more > less => {
            let refused_now = refusals.iter().find(|refusal| refusal.claim == rendered.key);
            let refused_now = refused_now.map(|refusal| ClaimFinding {
                answer: Some(refusal.answer.clone()),
                generation: vm.metadata.generation,
                ..sizes(Reason::GrowthRefused)
            });
            let refused = refused_now.or_else(|| refused_growth(vm, rendered, found).cloned());
            findings.push(refused.unwrap_or_else(|| sizes(Reason::GrowthPending)));
        }
        (Some(less), Some(more)) if less < more => findings.push(sizes(Reason::ShrinkRefused)),
        _ => {}
    }
    let differs = |field: &&str| wanted.get(field).is_some() && wanted.get(field) != found.spec.get(field);
    let other: Vec<&str> = UNCHANGEABLE.into_iter().filter(differs).collect();
    if !other.is_empty() {
        findings.push(ClaimFinding { current: Some(other.join(", ")), ..plain(Reason::ChangeRefused) });
    }
    let capacity = found.status.pointer("/capacity/storage").and_then(Quantity::bytes_of);
    if let (Some(capacity), Some(requested)) = (capacity, requested_size(&found.spec))
        && capacity < requested
    {
        findings.push(ClaimFinding { wanted: size_text(&found.spec), ..plain(Reason::Resizing) });
    }
    findings
}

fn size_text(spec: &Value) -> Option<String> {
    let size = spec.pointer("/resources/requests/storage")?;
    Some(size.as_str().map_or_else(|| size.to_string(), str::to_owned))
}

/// The VM that another VM's claim belongs to, by its label. Two VMs can't use one claim.
pub fn other_user<'a>(vm: &VirtualMachine, claim: &'a Object) -> Option<&'a str> {
    claim.vm().filter(|other| claim.is_ours() && *other != vm.name_any())
}
