//! What the quotas of a namespace allow (<https://kubernetes.io/docs/concepts/policy/resource-quotas/>): the number of Pods that have not ended, the
//! number of claims, and what they request together.

use serde_json::{Value, json};

use super::{
    kinds::{kind, kinds},
    request::{Answer, Target},
    store::{Store, bytes},
};

/// What a quota limits, in the order in which the API server names it.
const LIMITED: [&str; 3] = ["persistentvolumeclaims", "pods", "requests.storage"];

/// How much an object counts for what a quota limits.
fn counts(target: &Target, object: &Value, limited: &str) -> u64 {
    let has_ended = ["Succeeded", "Failed"].iter().any(|phase| object["status"]["phase"] == *phase);
    match (kinds()[target.kind].name, limited) {
        ("Pod", "pods") => u64::from(!has_ended),
        ("PersistentVolumeClaim", "persistentvolumeclaims") => 1,
        ("PersistentVolumeClaim", "requests.storage") => bytes(&object["spec"]["resources"]["requests"]["storage"]),
        _ => 0,
    }
}

/// A limit that is exceeded.
struct Exceeded<'a> {
    limited: &'static str,
    requested: u64,
    used: u64,
    hard: &'a Value,
}

/// Refuses an object for which a quota has no room. `live`: the object as it is stored.
pub fn check(store: &Store, target: &Target, live: Option<&Value>, new: &Value) -> Result<(), Answer> {
    if ![kind("Pod"), kind("PersistentVolumeClaim")].contains(&target.kind) {
        return Ok(());
    }
    for (quota, object) in store.of("ResourceQuota").filter(|(quota, _)| quota.namespace == target.namespace) {
        let limits = LIMITED.into_iter().filter_map(|limited| {
            let hard = object["spec"]["hard"].get(limited)?;
            let had = live.map_or(0, |live| counts(target, live, limited));
            let requested = counts(target, new, limited).saturating_sub(had);
            let objects = store.all(target.kind).filter(|(other, _)| other.namespace == target.namespace);
            let used = objects.map(|(other, object)| counts(other, object, limited)).sum();
            Some(Exceeded { limited, requested, used, hard })
        });
        let exceeded: Vec<Exceeded<'_>> =
            limits.filter(|it| it.requested > 0 && it.used + it.requested > bytes(it.hard)).collect();
        if !exceeded.is_empty() {
            return Err(refused(target, &quota.name, &exceeded));
        }
    }
    Ok(())
}

fn refused(target: &Target, quota: &str, exceeded: &[Exceeded<'_>]) -> Answer {
    let amount = |limited: &str, number: u64| match limited {
        "requests.storage" if number > 0 && number.is_multiple_of(1 << 30) => format!("{}Gi", number >> 30),
        _ => number.to_string(),
    };
    let list = |value: fn(&Exceeded<'_>) -> u64| {
        let all: Vec<String> =
            exceeded.iter().map(|it| format!("{}={}", it.limited, amount(it.limited, value(it)))).collect();
        all.join(",")
    };
    let plural = kinds()[target.kind].plural;
    let message = format!(
        "{plural} \"{}\" is forbidden: exceeded quota: {quota}, requested: {}, used: {}, limited: {}",
        target.name,
        list(|it| it.requested),
        list(|it| it.used),
        list(|it| bytes(it.hard)),
    );
    Answer::failure(403, "Forbidden", &message, json!({ "name": target.name, "kind": plural }))
}
