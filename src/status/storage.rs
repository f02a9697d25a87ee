//! The condition StorageReady: what the machine's claims say.
//!
//! A difference between a claim and the spec that can't be brought about is no error: the machine runs with what there is,
//! and the condition says what is different and why.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::Value;

use crate::{
    api::{
        Quantity, VirtualMachine,
        conditions::{self, NewCondition, STORAGE_READY},
    },
    observed::{Object, Observed, Part},
    plan::claim_size,
    render::{ObjectKey, Rendered},
};

/// What the condition's message ends with, before names that commas divide.
pub const KEPT: &str = "kept, but not used by this machine any more: ";

/// What the condition's message divides findings with. None has it inside.
const DIVIDER: &str = "; ";

/// What may be said of a claim, the worst first; the condition has the reason of the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Finding {
    /// Its volume is gone.
    ClaimLost,
    /// Somebody deleted it.
    ClaimDeleting,
    /// The cluster does not let it grow.
    GrowthRefused,
    /// It is larger than the spec says.
    ShrinkRefused,
    /// It is otherwise than the spec says.
    ChangeRefused,
    /// It has no volume yet.
    ClaimPending,
    /// It is not asked to grow yet.
    GrowthPending,
    /// Its volume grows.
    Resizing,
}

impl Finding {
    /// Whether time mends it.
    pub fn passes(self) -> bool {
        matches!(self, Self::ClaimPending | Self::GrowthPending | Self::Resizing)
    }
}

/// Derives the condition; `None` for a machine without disks. `refusals` is what the API server said against changes of
/// claims just now.
pub fn storage(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    refusals: &[(ObjectKey, String)],
) -> Option<NewCondition> {
    let findings = findings(vm, observed, rendered, refusals);
    let kept: Vec<&str> = kept(observed, rendered).collect();
    if !rendered.iter().any(|object| object.key.is_claim()) && kept.is_empty() {
        return None;
    }
    let reason = findings.first().map_or("ClaimsBound".to_owned(), |(finding, _)| format!("{finding:?}"));
    let mut message: Vec<String> = findings.iter().map(|(_, text)| text.clone()).collect();
    if !kept.is_empty() {
        message.push(format!("{KEPT}{}", kept.join(", ")));
    }
    Some(NewCondition { type_: STORAGE_READY, status: findings.is_empty(), reason, message: message.join(DIVIDER) })
}

fn findings(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    refusals: &[(ObjectKey, String)],
) -> Vec<(Finding, String)> {
    let claims = rendered.iter().filter(|object| object.key.is_claim());
    let mut findings: Vec<(Finding, String)> = claims
        .filter_map(|claim| Some((claim, observed.get(&claim.key)?)))
        .flat_map(|(claim, found)| look(vm, claim, found, refusals))
        .collect();
    findings.sort_by_key(|(finding, _)| *finding);
    findings
}

/// What is said of the claims and was not said before.
pub fn news(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    refusals: &[(ObjectKey, String)],
) -> Vec<(Finding, String)> {
    let told: Vec<&str> = before(vm).into_iter().flat_map(|before| before.message.split(DIVIDER)).collect();
    let mut news = findings(vm, observed, rendered, refusals);
    news.retain(|(_, text)| !told.contains(&text.as_str()));
    news
}

/// The names of the machine's claims that it does not use any more.
pub fn kept<'a>(observed: &'a Observed, rendered: &[Rendered]) -> impl Iterator<Item = &'a str> {
    let mut names: Vec<&str> = observed
        .objects
        .iter()
        .filter(|object| object.key.is_claim() && object.is_ours() && object.deleting.is_none())
        .filter(|object| !rendered.iter().any(|rendered| rendered.key == object.key))
        .map(|object| object.key.name.as_str())
        .collect();
    names.sort_unstable();
    names.into_iter()
}

fn look(
    vm: &VirtualMachine,
    claim: &Rendered,
    found: &Object,
    refusals: &[(ObjectKey, String)],
) -> Vec<(Finding, String)> {
    let name = &claim.key.name;
    let mut findings = Vec::new();
    if found.deleting.is_some() {
        findings.push((
            Finding::ClaimDeleting,
            format!("claim {name} is being deleted: it goes, with its data, when no Pod uses it any more"),
        ));
    }
    match found.text(Part::Status, "/phase") {
        Some("Lost") => findings.push((Finding::ClaimLost, format!("claim {name} has lost its volume"))),
        Some("Bound") => {}
        _ => findings.push((Finding::ClaimPending, format!("claim {name} has no volume yet"))),
    }
    let (wanted, current) = (&claim.value["spec"], &found.spec);
    match (claim_size(wanted), claim_size(current)) {
        (Some(more), Some(less)) if more > less => {
            let said = refusals.iter().find(|(key, _)| *key == claim.key).map(|(_, message)| {
                let message = message.replace(DIVIDER, ", ");
                format!("{}{message} (asked for again when the machine's spec changes)", growth(claim, found))
            });
            findings.push(match said.or_else(|| refusal(vm, claim, found)) {
                Some(said) => (Finding::GrowthRefused, said),
                None => (
                    Finding::GrowthPending,
                    format!("claim {name} has {} and will have {}", size(current), size(wanted)),
                ),
            });
        }
        (Some(less), Some(more)) if less < more => findings.push((
            Finding::ShrinkRefused,
            format!("claim {name} keeps its {}: a volume can't shrink to {}", size(current), size(wanted)),
        )),
        _ => {}
    }
    let other: Vec<&str> = ["accessModes", "volumeMode", "storageClassName", "selector", "dataSource", "dataSourceRef"]
        .into_iter()
        .filter(|field| wanted.get(*field).is_some() && wanted.get(*field) != current.get(*field))
        .collect();
    if !other.is_empty() {
        findings.push((
            Finding::ChangeRefused,
            format!("claim {name} keeps its {}: that can't be changed in a claim that exists", other.join(", ")),
        ));
    }
    let capacity = found.status.pointer("/capacity/storage").and_then(Quantity::bytes_of);
    if let (Some(capacity), Some(requested)) = (capacity, claim_size(current))
        && capacity < requested
    {
        findings.push((Finding::Resizing, format!("claim {name} is growing to {}", size(current))));
    }
    findings
}

fn size(spec: &Value) -> String {
    let size = spec.pointer("/resources/requests/storage");
    size.map(|size| size.as_str().map_or(size.to_string(), str::to_owned)).unwrap_or_default()
}

/// What a refusal of growth begins with.
fn growth(claim: &Rendered, found: &Object) -> String {
    let (current, wanted) = (size(&found.spec), size(&claim.value["spec"]));
    format!("claim {} can't grow from {current} to {wanted}: ", claim.key.name)
}

/// What was said before of the claim's growth, if the cluster refused it for the same spec.
pub fn refusal(vm: &VirtualMachine, claim: &Rendered, found: &Object) -> Option<String> {
    let before = before(vm).filter(|before| before.observed_generation == vm.metadata.generation)?;
    let head = growth(claim, found);
    before.message.split(DIVIDER).find(|said| said.starts_with(&head)).map(str::to_owned)
}

/// The condition that says that something is wrong, as the status has it.
fn before(vm: &VirtualMachine) -> Option<&Condition> {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    conditions::find(current, STORAGE_READY).filter(|before| before.status == "False")
}
