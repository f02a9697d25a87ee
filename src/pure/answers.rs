//! What an answer of the API server means for the write that it is about. A field of the answer counts before its words. Where the API server has
//! no field, [`WORDS`] has the words; no other code reads them to decide.

use kube::core::Status;

/// What the API server has no field for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Said {
    /// The written object has a field that the kind does not have, or a value of a wrong type. The code is 500.
    WrittenUntyped,
    /// A value of the stored object has another type than the definition says.
    StoredUntyped,
    /// A quota has no room (<https://kubernetes.io/docs/concepts/policy/resource-quotas/>). The code is 403, as without a right.
    QuotaExceeded,
    /// The object was too large for the API server, a webhook or etcd. The code is that of whoever said it first.
    TooLarge,
}

const WORDS: [(&str, Said); 7] = [
    ("failed to create typed patch object", Said::WrittenUntyped),
    ("failed to create typed live object", Said::StoredUntyped),
    ("failed to create manager for existing fields", Said::StoredUntyped),
    ("exceeded quota", Said::QuotaExceeded),
    ("larger than max", Said::TooLarge),
    ("request is too large", Said::TooLarge),
    ("Request entity too large", Said::TooLarge),
];

fn says(answer: &Status, said: Said) -> bool {
    WORDS.iter().any(|(words, means)| *means == said && answer.message.contains(words))
}

/// Whether the same request may succeed later.
pub fn is_transient(answer: &Status) -> bool {
    !says(answer, Said::WrittenUntyped) && (is_busy(answer) || answer.code >= 500)
}

/// Whether the request met another one, or too many: it was sent in a bad moment.
pub fn is_busy(answer: &Status) -> bool {
    matches!(answer.code, 409 | 410 | 429) || is_another_object(answer)
}

/// Whether the API server would never accept the object: it is invalid, or is forbidden. What a quota has no room for may fit when the Pod that it
/// replaces is gone.
pub fn is_refusal(answer: &Status) -> bool {
    answer.code == 422 || answer.code == 403 && !says(answer, Said::QuotaExceeded)
}

/// Whether the API server refused a status as it is, and would do so again: not a right, a rate, a VM that has changed or is gone, or an error of a
/// webhook.
pub fn is_refusal_of_status(answer: &Status) -> bool {
    let is_too_large = answer.code == 413 || matches!(answer.code, 400 | 422 | 500) && says(answer, Said::TooLarge);
    is_too_large || matches!(answer.code, 400 | 406 | 415 | 422)
}

/// Whether an apply was refused because a value of the stored object has another type than the definition says.
pub fn is_stored_untyped(answer: &Status) -> bool {
    says(answer, Said::StoredUntyped)
}

/// Whether a patch was refused because the object with its UID was deleted and created again. For the API server this is a change of an immutable
/// field.
fn is_another_object(answer: &Status) -> bool {
    answer.code == 422 && fields(answer).any(|field| field == "metadata.uid")
}

/// The first of the status's `parts` that the answer refuses: its causes name the field, or else its words do (a webhook's, or those of an answer with
/// the code 500, which has no causes).
pub fn refused_part<'a>(answer: &Status, mut parts: impl Iterator<Item = &'a String> + Clone) -> Option<&'a String> {
    let is_cause = |part: &&String| fields(answer).any(|field| names(field, part));
    parts.clone().find(is_cause).or_else(|| parts.find(|part| names(&answer.message, part)))
}

/// Whether a path in the text is that of the status's part, or of something in it.
fn names(text: &str, part: &str) -> bool {
    let path = format!("status.{part}");
    text.match_indices(&path).any(|(at, _)| !text[at + path.len()..].chars().next().is_some_and(char::is_alphanumeric))
}

/// The fields that the answer blames.
fn fields(answer: &Status) -> impl Iterator<Item = &str> {
    answer.details.iter().flat_map(|details| &details.causes).map(|cause| cause.field.as_str())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn answer(code: u16, message: &str, fields: &[&str]) -> Status {
        let causes: Vec<Value> = fields.iter().map(|field| json!({ "field": field })).collect();
        serde_json::from_value(json!({ "code": code, "message": message, "details": { "causes": causes } })).unwrap()
    }

    #[test]
    fn a_status_that_is_refused_as_a_whole_is_told_from_one_that_may_be_written_later() {
        let too_large =
            "rpc error: code = ResourceExhausted desc = trying to send message larger than max (2097152 vs. 1048576)";
        for (code, message, expected) in [
            (500, too_large, true),
            (500, "etcdserver: request is too large", true),
            (413, "Request entity too large: limit is 3145728", true),
            (422, "VirtualMachine.vmoperator.jdrupes.org \"a\" is invalid", true),
            (400, "admission webhook \"w\" denied the request", true),
            (500, "failed calling webhook \"w\"", false),
            (403, "forbidden", false),
            (404, "not found", false),
            (409, "the object has been modified", false),
            (429, "too many requests", false),
        ] {
            assert_eq!(is_refusal_of_status(&answer(code, message, &[])), expected, "{code} {message}");
        }
    }

    #[test]
    fn what_may_succeed_later_is_told_from_what_never_will() {
        let untyped =
            "failed to create typed patch object (ns/a; v1, Kind=Pod): .spec.foo: field not declared in schema";
        for (answer, transient, refused) in [
            (answer(500, untyped, &[]), false, false),
            (answer(500, "failed calling webhook \"w\"", &[]), true, false),
            (answer(409, "the object has been modified", &[]), true, false),
            (answer(422, "Pod \"a\" is invalid", &["metadata.uid"]), true, true),
            (answer(422, "Pod \"a\" is invalid", &["spec.nodeName"]), false, true),
            (answer(403, "pods \"a\" is forbidden: exceeded quota: few", &[]), false, false),
            (answer(403, "pods \"a\" is forbidden", &[]), false, true),
        ] {
            assert_eq!((is_transient(&answer), is_refusal(&answer)), (transient, refused), "{answer:?}");
        }
    }

    #[test]
    fn the_refused_part_of_a_status_is_what_a_cause_names_before_what_the_words_name() {
        let parts = ["cpus", "nodeName", "conditions"].map(str::to_owned);
        let part = |code, message, fields: &[&str]| {
            refused_part(&answer(code, message, fields), parts.iter()).map(String::as_str)
        };
        assert_eq!(
            part(422, "status.cpus may not be more than status.nodeName", &["status.nodeName"]),
            Some("nodeName")
        );
        assert_eq!(part(422, "is invalid", &["status.conditions[0].reason"]), Some("conditions"));
        assert_eq!(part(422, "VirtualMachine \"a\" is invalid: status.cpus: Invalid value: 2", &[]), Some("cpus"));
        assert_eq!(part(500, "failed: .status.nodeName: field not declared in schema", &[]), Some("nodeName"));
        assert_eq!(part(400, "a webhook says no to status.cpusAndMore", &[]), None);
    }
}
