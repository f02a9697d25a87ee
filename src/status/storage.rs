//! The condition StorageReady: what the machine's claims say.
//!
//! A difference between a claim and the spec that can't be brought about is no error: the machine runs with what there is,
//! and the condition says what is different and why.

use serde_json::Value;

use crate::{
    api::{
        VirtualMachine,
        conditions::{self, NewCondition, STORAGE_READY},
    },
    observed::{Object, Observed, Part},
    plan::claim_size,
    render::{ObjectKey, Rendered},
};

/// The cluster does not let a claim grow.
pub const GROWTH_REFUSED: &str = "GrowthRefused";

/// What the condition's message ends with, before names that commas divide.
pub const KEPT: &str = "kept, but not used by this machine any more: ";

/// Findings, the worst first; the condition has the reason of the worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Finding {
    ClaimLost,
    ClaimDeleting,
    GrowthRefused,
    ShrinkRefused,
    ChangeRefused,
    ClaimPending,
    GrowthPending,
    Resizing,
}

/// Derives the condition; `None` for a machine without disks. `refusals` is what the API server said against changes of
/// claims just now.
pub fn storage(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: &[Rendered],
    refusals: &[(ObjectKey, String)],
) -> Option<NewCondition> {
    let claims: Vec<&Rendered> = rendered.iter().filter(|object| object.key.is_claim()).collect();
    let mut findings: Vec<(Finding, String)> = claims
        .iter()
        .filter_map(|claim| Some((claim, observed.get(&claim.key)?)))
        .flat_map(|(claim, found)| look(vm, claim, found, refusals))
        .collect();
    findings.sort_by_key(|(finding, _)| *finding);
    let kept: Vec<&str> = kept(observed, rendered).collect();
    if claims.is_empty() && kept.is_empty() {
        return None;
    }
    let reason = findings.first().map_or("ClaimsBound".to_owned(), |(finding, _)| format!("{finding:?}"));
    let mut message: Vec<String> = findings.iter().map(|(_, text)| text.clone()).collect();
    if !kept.is_empty() {
        message.push(format!("{KEPT}{}", kept.join(", ")));
    }
    Some(NewCondition { type_: STORAGE_READY, status: findings.is_empty(), reason, message: message.join("; ") })
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
    let text = |spec: &Value| {
        spec.pointer("/resources/requests/storage")
            .map(|size| size.as_str().map_or(size.to_string(), str::to_owned))
            .unwrap_or_default()
    };
    match (claim_size(wanted), claim_size(current)) {
        (Some(more), Some(less)) if more > less => {
            let head = format!("claim {name} can't grow from {} to {}: ", text(current), text(wanted));
            let said = refusals.iter().find(|(key, _)| *key == claim.key);
            // Findings are joined with semicolons.
            let said = said.map(|(_, message)| format!("{head}{}", message.replace("; ", ", ")));
            findings.push(match said.or_else(|| earlier(vm, &head)) {
                Some(said) => (Finding::GrowthRefused, said),
                None => (
                    Finding::GrowthPending,
                    format!("claim {name} has {} and will have {}", text(current), text(wanted)),
                ),
            });
        }
        (Some(less), Some(more)) if less < more => findings.push((
            Finding::ShrinkRefused,
            format!("claim {name} keeps its {}: a volume can't shrink to {}", text(current), text(wanted)),
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
    let capacity = found.status.pointer("/capacity/storage").cloned();
    let capacity = capacity.and_then(|size| serde_json::from_value::<crate::api::Quantity>(size).ok());
    if let (Some(capacity), Some(requested)) = (capacity, claim_size(current))
        && capacity.bytes() < requested
    {
        findings.push((Finding::Resizing, format!("claim {name} is growing to {}", text(current))));
    }
    findings
}

/// What was said of a refusal before, for the same spec.
fn earlier(vm: &VirtualMachine, head: &str) -> Option<String> {
    let current = vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let before = conditions::find(current, STORAGE_READY)?;
    let same = before.reason == GROWTH_REFUSED && before.observed_generation == vm.metadata.generation;
    before.message.split("; ").find(|said| same && said.starts_with(head)).map(str::to_owned)
}
