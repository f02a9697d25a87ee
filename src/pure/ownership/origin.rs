//! Which program made an object, as far as `metadata.managedFields` prove that.
//!
//! | entries that are not older than the object and have fields beyond the metadata | the object is from |
//! |---|---|
//! | one of [`OBJECT_MANAGER`], by applies | [`Origin::Manager`] |
//! | one of the VM-Operator in Java, by applies ([`PREDECESSOR`]) | [`Origin::Predecessor`] |
//! | there are no entries at all, or one of [`BEFORE_FIRST_APPLY`] | [`Origin::Unrecorded`]: a tool has reset the entries, as the documentation of Kubernetes shows it |
//! | only others, or only older ones | [`Origin::Other`] |
//!
//! An object that the manager has rendered, and of which somebody has taken over all other fields, still has its hash
//! ([`HASH_FIELD`]).
//!
//! Who makes a copy of an object may copy its labels, annotations and owners, and even its managedFields: when an object is created, the API
//! server gives all its fields to the client that creates it, and takes them from the other entries. So a copy by `kubectl` or by `kubectl debug`
//! is from others. A later update may replace the entries: so Velero gives the object that it has created those of the backup
//! (<https://velero.io/docs/main/restore-reference/>). They are older than the object ([`is_of_object`]), and count for nothing. Only who calls
//! itself [`OBJECT_MANAGER`] (`--field-manager`), or writes entries with a later time, could say otherwise; who does that deceives on purpose.
//!
//! The VM-Operator in Java creates display secrets under the name that its library gives every program ("Kubernetes Java Client"). That says
//! nothing. Such a Secret is used by its label, like a person's ([`crate::observed::Observed::display_secrets`]).

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::{OBJECT_MANAGER, is_of_object};
use crate::api::stored::BEFORE_FIRST_APPLY;

/// The field manager under which the VM-Operator in Java applies all objects but display secrets. Its library gives it to all that applies with
/// it, so by itself it is no proof ([`crate::observed::whose`]).
pub const PREDECESSOR: &str = "kubernetes-java-kubectl-apply";

/// In a field set: the hash of the rendered object.
const HASH_FIELD: &str = "\"f:vmoperator.jdrupes.org/rendered\"";

/// Whether a field set, as JSON, has the owner with that UID.
pub fn has_owner(fields: &str, uid: &str) -> bool {
    // The key of a list item is JSON in a string.
    !uid.is_empty() && fields.contains(&format!("\\\"{uid}\\\""))
}

/// Whether a field set, as JSON, has the label or annotation.
pub fn has_name(fields: &str, name: &str) -> bool {
    fields.contains(&format!("\"f:{name}\""))
}

/// Which program made an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    /// The manager.
    Manager,
    /// The VM-Operator in Java.
    Predecessor,
    /// Nobody can say: there are no entries.
    #[default]
    Unrecorded,
    /// Another program, or a person.
    Other,
}

/// An entry of `managedFields`, with its field set as JSON.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    /// Its field manager.
    pub manager: &'a str,
    /// `Apply` or `Update`.
    pub operation: &'a str,
    /// Such as `status`; empty for the object itself.
    pub subresource: &'a str,
    /// When it was written last.
    pub written: Option<Timestamp>,
    /// Its field set.
    pub fields: &'a str,
}

impl Entry<'_> {
    /// Whether fields beyond the metadata are in the set. A set is one object whose keys begin with `f:`.
    fn has_content(&self) -> bool {
        #[derive(Deserialize)]
        struct Set<'a>(#[serde(borrow)] std::collections::BTreeMap<std::borrow::Cow<'a, str>, serde::de::IgnoredAny>);
        let set = serde_json::from_str::<Set<'_>>(self.fields);
        self.subresource.is_empty()
            && set.is_ok_and(|Set(fields)| fields.keys().any(|field| field != "f:metadata" && field.starts_with("f:")))
    }

    fn is_applied_by_manager(&self) -> bool {
        let is_ours = self.manager == OBJECT_MANAGER && self.operation == "Apply" && self.subresource.is_empty();
        is_ours && (self.has_content() || self.fields.contains(HASH_FIELD))
    }

    fn is_applied_by_predecessor(&self) -> bool {
        self.manager == PREDECESSOR && self.operation == "Apply" && self.has_content()
    }
}

/// Decides by the table above. `created`: the object's creationTimestamp.
pub fn origin<'a>(created: Option<Timestamp>, entries: impl Iterator<Item = Entry<'a>> + Clone) -> Origin {
    let has = |is_it: fn(&Entry<'_>) -> bool| {
        entries.clone().filter(|entry| is_of_object(entry.written, created)).any(|entry| is_it(&entry))
    };
    if has(|entry| entry.is_applied_by_manager()) {
        Origin::Manager
    } else if has(|entry| entry.is_applied_by_predecessor()) {
        Origin::Predecessor
    } else if entries.clone().next().is_none() || has(|entry| entry.manager == BEFORE_FIRST_APPLY) {
        Origin::Unrecorded
    } else {
        Origin::Other
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table() {
        let entry = |manager, operation, fields| Entry { manager, operation, subresource: "", written: None, fields };
        let (content, labels) =
            (r#"{"f:metadata":{},"f:spec":{"f:x":{}}}"#, r#"{"f:metadata":{"f:labels":{"f:a":{}}}}"#);
        let hash = r#"{"f:metadata":{"f:annotations":{"f:vmoperator.jdrupes.org/rendered":{}}}}"#;
        let kubelet = Entry { subresource: "status", ..entry("kubelet", "Update", r#"{"f:status":{}}"#) };
        let status = Entry { subresource: "status", ..entry(OBJECT_MANAGER, "Apply", r#"{"f:status":{}}"#) };
        for (entries, expected) in [
            (vec![], Origin::Unrecorded),
            (vec![entry(OBJECT_MANAGER, "Apply", content), kubelet], Origin::Manager),
            (vec![entry("kubectl-edit", "Update", content), entry(OBJECT_MANAGER, "Apply", content)], Origin::Manager),
            (vec![entry("kubectl-edit", "Update", content), entry(OBJECT_MANAGER, "Apply", hash)], Origin::Manager),
            // What is left of the manager's entry when another client creates a copy, and what the manager has only labelled.
            (vec![entry("kubectl-create", "Update", content), entry(OBJECT_MANAGER, "Apply", "{}")], Origin::Other),
            (vec![entry("kubectl-create", "Update", content), entry(OBJECT_MANAGER, "Apply", labels)], Origin::Other),
            (vec![entry("kubectl-create", "Update", content), entry(OBJECT_MANAGER, "Update", content)], Origin::Other),
            // A tool that brings an object back and leaves the entries of the backup alone.
            (vec![entry("a-backup", "Update", content), kubelet], Origin::Other),
            (vec![entry("a-backup", "Update", content), status], Origin::Other),
            (vec![entry(PREDECESSOR, "Apply", content), kubelet], Origin::Predecessor),
            // Any program with that library.
            (vec![entry(PREDECESSOR, "Update", content)], Origin::Other),
            (vec![entry("Kubernetes Java Client", "Update", content)], Origin::Other),
            (vec![entry("Kubernetes Java Client", "Apply", content)], Origin::Other),
            // A Pod of a StatefulSet, of which the predecessor has changed an annotation.
            (
                vec![
                    entry("kube-controller-manager", "Update", content),
                    entry("kubernetes-java-kubectl-apply", "Apply", labels),
                ],
                Origin::Other,
            ),
            // After a reset, and what follows when somebody applies a label.
            (vec![entry(BEFORE_FIRST_APPLY, "Update", content), entry("kubectl", "Apply", labels)], Origin::Unrecorded),
            (
                vec![entry(BEFORE_FIRST_APPLY, "Update", content), entry(OBJECT_MANAGER, "Apply", content)],
                Origin::Manager,
            ),
        ] {
            let shown: Vec<_> = entries.iter().map(|entry| (entry.manager, entry.operation, entry.fields)).collect();
            assert_eq!(origin(None, entries.iter().copied()), expected, "{shown:?}");
        }
    }

    /// Velero creates the object as `velero-server`, and then replaces the entries by those of the backup.
    #[test]
    fn entries_that_are_older_than_the_object_prove_nothing() {
        let created: Timestamp = "2027-01-15T07:01:00Z".parse().unwrap();
        let content = r#"{"f:metadata":{},"f:spec":{"f:x":{}}}"#;
        for (written, is_of_object) in [
            (None, true),
            (Some("2027-01-15T07:01:00Z"), true),
            (Some("2027-01-16T07:01:00Z"), true),
            // The same request: the second may change within it, and admission webhooks take time.
            (Some("2027-01-15T07:00:59Z"), true),
            (Some("2027-01-15T07:00:26Z"), true),
            (Some("2027-01-15T07:00:25Z"), false),
            (Some("2026-01-15T07:01:00Z"), false),
        ] {
            let written = written.map(|time| time.parse().unwrap());
            for (manager, operation, expected) in [
                (OBJECT_MANAGER, "Apply", Origin::Manager),
                (PREDECESSOR, "Apply", Origin::Predecessor),
                (BEFORE_FIRST_APPLY, "Update", Origin::Unrecorded),
                ("kubectl", "Update", Origin::Other),
            ] {
                let old = Entry { manager, operation, subresource: "", written, fields: content };
                let expected = if is_of_object { expected } else { Origin::Other };
                assert_eq!(origin(Some(created), [old].into_iter()), expected, "{manager} {written:?}");
                // What the manager applies afterwards counts.
                let now = Entry { manager: OBJECT_MANAGER, operation: "Apply", written: Some(created), ..old };
                assert_eq!(origin(Some(created), [old, now].into_iter()), Origin::Manager);
            }
        }
    }
}
