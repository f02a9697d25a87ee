//! A VM's status as it can be stored, as it is at other times of the VM's life, and as templates see it.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{
    PendingChange, RunnerStatus, VirtualMachineStatus,
    report::REPORTED_CONDITIONS,
    stored::{DEEPEST, nests_deeper},
};

/// The most characters of a text: those of a condition's message in Kubernetes
/// (<https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/condition/>).
const LONGEST_TEXT: usize = 32_768;
/// The most characters of a name or a path.
const LONGEST_NAME: usize = 1024;
/// The most bytes of JSON of a value in a pending change. More of it is left out.
const LARGEST_VALUE: usize = 8192;
/// The most bytes of JSON of all pending changes together. etcd stores objects up to 1.5 MiB, and the field sets of managers are beside them.
const LARGEST_CHANGES: usize = 256 << 10;
/// How many pending changes are left if they are too large even without their values.
const FEW_CHANGES: usize = 50;
/// The most characters of a condition's message in a status that the API server found too large.
const SHORT_TEXT: usize = 256;
/// The most pending changes, claims, kinds and the like.
const MOST_ITEMS: usize = 500;

impl VirtualMachineStatus {
    /// The status without what the definition does not allow although the types here do: items of a list with the same key, conditions with
    /// another status than True, False or Unknown, an `osinfo` that is no object, and whatever is too large. Texts that come from outside
    /// (a kubelet, a webhook, QEMU, a guest) have no control characters then.
    pub fn valid(mut self) -> Self {
        self.runner.osinfo = self.runner.osinfo.filter(Value::is_object);
        self.conditions.retain(|condition| ["True", "False", "Unknown"].contains(&condition.status.as_str()));
        keep_first(&mut self.conditions, |condition| condition.type_.clone());
        keep_first(&mut self.object_kinds, Clone::clone);
        keep_first(&mut self.pending_changes, |change| change.path.clone());
        keep_first(&mut self.claims, |claim| claim.name.clone());
        keep_first(&mut self.runner.devices, |device| (device.kind, device.name.clone()));
        for claim in &mut self.claims {
            keep_first(&mut claim.findings, |finding| finding.reason);
        }
        if let Some(addresses) = &mut self.addresses {
            keep_first(addresses, |address| address.address.clone());
        }
        for change in &mut self.pending_changes {
            clean_text(&mut change.path, LONGEST_NAME);
            for value in [&mut change.current, &mut change.wanted].into_iter().flatten() {
                shorten(value);
            }
        }
        // Cutting can have made two paths the same.
        keep_first(&mut self.pending_changes, |change| change.path.clone());
        fit(&mut self.pending_changes);
        self.clean()
    }

    /// The status without what only informs, for an API server that refuses the whole one and names no part of it. The claims and the kinds
    /// of objects stay: the next reconcile needs them.
    pub fn shortened(mut self) -> Self {
        self.pending_changes.clear();
        for condition in &mut self.conditions {
            clean_text(&mut condition.message, SHORT_TEXT);
        }
        if let Some(problem) = &mut self.problem {
            clean_text(&mut problem.message, SHORT_TEXT);
            problem.what_to_do.iter_mut().for_each(|text| clean_text(text, SHORT_TEXT));
        }
        for claim in &mut self.claims {
            claim.findings.clear();
        }
        self.runner.osinfo = None;
        self
    }

    /// Without control characters and too long texts anywhere. Most statuses have none, and this is asked at each reconcile.
    fn clean(self) -> Self {
        let Ok(text) = serde_json::to_string(&self) else { return self };
        // JSON escapes the control characters of ASCII.
        if text.len() <= LONGEST_TEXT && !text.contains("\\u00") && !text.contains(is_unwanted) {
            return self;
        }
        let mut value = json!(self);
        clean_value(&mut value);
        serde_json::from_value(value).unwrap_or(self)
    }

    /// The status of a VM that somebody has just created: what the definition fills in.
    pub fn of_new() -> Self {
        Self {
            observed_generation: Some(-1),
            runner: RunnerStatus {
                cpus: Some(0),
                ram: Some("0".into()),
                display_password_serial: Some(0),
                ..RunnerStatus::default()
            },
            ..Self::default()
        }
    }

    /// The status of a running VM as it is when the VM is stopped: without what only its Pod and its guest give.
    pub fn as_stopped(self) -> Self {
        let emptied = |text: Option<String>| text.map(|_| String::new());
        Self {
            phase: Some("Stopped".into()),
            created: Some(false),
            ready: Some(false),
            node_name: None,
            addresses: None,
            end_guest: None,
            reporter_uid: None,
            retry: None,
            guest_generation: None,
            taken_generation: None,
            problem: None,
            pending_changes: Vec::new(),
            runner: RunnerStatus {
                serial_users: Vec::new(),
                devices: Vec::new(),
                cpus: Some(0),
                ram: Some("0".into()),
                relay_port: self.runner.relay_port.map(|_| 0),
                console_client: emptied(self.runner.console_client),
                logged_in_user: emptied(self.runner.logged_in_user),
                ..self.runner
            },
            ..self
        }
    }

    /// What templates see of the status: not what the manager derives from their own output. Otherwise a template could ask for what it has
    /// changed itself, and the VM would never be at rest.
    pub fn for_templates(self) -> Self {
        let mut conditions = self.conditions;
        conditions.retain(|condition| REPORTED_CONDITIONS.contains(&condition.type_.as_str()));
        Self {
            conditions,
            observed_generation: None,
            guest_generation: None,
            taken_generation: None,
            problem: None,
            templates: None,
            object_kinds: Vec::new(),
            pending_changes: Vec::new(),
            claims: Vec::new(),
            new_disks: None,
            retry: None,
            runner: RunnerStatus { devices: Vec::new(), ..self.runner },
            ..self
        }
    }
}

/// Of the items with the same key, keeps the first, and not too many.
fn keep_first<T, K: Ord>(items: &mut Vec<T>, key: impl Fn(&T) -> K) {
    let mut known = BTreeSet::new();
    items.retain(|item| known.insert(key(item)));
    items.truncate(MOST_ITEMS);
}

/// Whether a character makes a text hard to read or to transport: control characters, also those of U+0080 to U+009F, and what is no
/// character. Texts of several lines are common.
fn is_unwanted(character: char) -> bool {
    character.is_control() && !matches!(character, '\n' | '\t')
        || matches!(character, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Replaces unwanted characters by U+FFFD, and cuts what is too long.
pub fn clean_text(text: &mut String, longest: usize) {
    if text.contains(is_unwanted) {
        *text = text.chars().map(|character| if is_unwanted(character) { '\u{fffd}' } else { character }).collect();
    }
    if let Some((at, _)) = text.char_indices().nth(longest) {
        text.truncate(text.char_indices().nth(longest - 1).map_or(at, |(at, _)| at));
        text.push('…');
    }
}

fn clean_value(value: &mut Value) {
    match value {
        Value::String(text) => clean_text(text, LONGEST_TEXT),
        Value::Array(list) => list.iter_mut().for_each(clean_value),
        Value::Object(map) => {
            if map.keys().any(|key| key.contains(is_unwanted)) {
                let cleaned = std::mem::take(map).into_iter().map(|(mut key, value)| {
                    clean_text(&mut key, LONGEST_TEXT);
                    (key, value)
                });
                *map = cleaned.collect();
            }
            map.values_mut().for_each(clean_value);
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Leaves out of changes what is too large for all of them together: their values, the largest first, and then all but the first ones.
fn fit(changes: &mut Vec<PendingChange>) {
    let size = |change: &PendingChange| serde_json::to_string(change).map_or(0, |text| text.len());
    let mut all: usize = changes.iter().map(size).sum();
    if all <= LARGEST_CHANGES {
        return;
    }
    let mut largest: Vec<(usize, usize)> = changes.iter().map(size).zip(0..).collect();
    largest.sort_by_key(|(size, _)| std::cmp::Reverse(*size));
    for (before, index) in largest {
        if all <= LARGEST_CHANGES {
            return;
        }
        let change = &mut changes[index];
        (change.current, change.wanted) = (None, None);
        all = all + size(change) - before;
    }
    if all <= LARGEST_CHANGES {
        return;
    }
    let more = changes.len().saturating_sub(FEW_CHANGES);
    changes.truncate(FEW_CHANGES);
    for change in changes.iter_mut() {
        clean_text(&mut change.reason, LONGEST_NAME / 2);
    }
    if let Some(last) = changes.last_mut().filter(|_| more > 0) {
        last.reason.push_str(&format!(" ({more} more changes are not listed)"));
    }
}

/// Replaces a value that is too large or nests too deep by the begin of its JSON.
fn shorten(value: &mut Value) {
    let text = || value.to_string();
    if nests_deeper(value, DEEPEST / 2) || text().len() > LARGEST_VALUE {
        let mut text = text();
        clean_text(&mut text, LONGEST_NAME);
        *value = text.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_can_not_be_stored_is_cut_or_replaced_in_one_place() {
        let change = |path: &str, value: Value| json!({ "path": path, "current": value, "reason": "\u{9b}31m" });
        let long = "x".repeat(100_000);
        let deep = (0..120).fold(json!("x"), |value, _| json!([value]));
        let status: VirtualMachineStatus = serde_json::from_value(json!({
            "pendingChanges": [change("a", json!({ "k\u{80}": "b\u{7f}" })), change("a", Value::Null), change(&long, json!(long)), change("deep", deep)],
            "conditions": [{ "type": "Ready", "status": "Perhaps", "reason": "X", "message": "", "lastTransitionTime": "2027-01-15T07:00:00Z" },
                { "type": "Running", "status": "True", "reason": "X", "message": "two\nlines\u{feff}", "lastTransitionTime": "2027-01-15T07:00:00Z" }],
            "nodeName": "n\u{0}1",
        }))
        .unwrap();
        let valid = json!(status.valid());
        let changes = &valid["pendingChanges"];
        assert_eq!(changes.as_array().unwrap().len(), 3);
        assert_eq!(
            changes[0],
            json!({ "path": "a", "current": { "k\u{fffd}": "b\u{fffd}" }, "reason": "\u{fffd}31m" })
        );
        assert_eq!(changes[1]["path"].as_str().unwrap().chars().count(), LONGEST_NAME);
        assert!(changes[1]["current"].as_str().unwrap().len() < LARGEST_VALUE);
        assert!(changes[2]["current"].is_string());
        assert_eq!(valid["conditions"].as_array().unwrap().len(), 1);
        assert_eq!(valid["conditions"][0]["message"], "two\nlines\u{fffd}");
        assert_eq!(valid["nodeName"], "n\u{fffd}1");
    }

    #[test]
    fn all_pending_changes_together_are_not_too_large() {
        let changes = |count: usize, value: &str, reason: &str| -> Value {
            let change = |at| json!({ "path": format!("{at:04}"), "current": value, "wanted": "x", "reason": reason });
            let status = json!({ "pendingChanges": (0..count).map(change).collect::<Vec<_>>() });
            let status: VirtualMachineStatus = serde_json::from_value(status).unwrap();
            let mut valid = json!(status.valid());
            assert!(valid.to_string().len() < LARGEST_CHANGES + LONGEST_TEXT, "{}", valid.to_string().len());
            valid["pendingChanges"].take()
        };
        let few = changes(20, &"v".repeat(7900), "r");
        assert!(few.as_array().unwrap().iter().all(|change| change.get("current").is_some()));
        let many = changes(150, &"v".repeat(7900), "r");
        assert_eq!(many.as_array().unwrap().len(), 150);
        let left = many.as_array().unwrap().iter().filter(|change| change.get("current").is_some()).count();
        assert!((20..40).contains(&left), "{left}");
        let long = changes(400, "v", &"ü".repeat(2000));
        assert_eq!(long.as_array().unwrap().len(), FEW_CHANGES);
        let last = long[FEW_CHANGES - 1]["reason"].as_str().unwrap();
        assert!(last.ends_with(" (350 more changes are not listed)"), "{last}");
    }

    #[test]
    fn a_status_that_is_too_large_keeps_what_the_next_reconcile_needs() {
        let status: VirtualMachineStatus = serde_json::from_value(json!({
            "phase": "Failed", "podUid": "u", "observedGeneration": 3,
            "pendingChanges": [{ "path": "a", "reason": "b" }],
            "claims": [{ "name": "c", "uid": "d" }],
            "conditions": [
                { "type": "Ready", "status": "False", "reason": "X", "message": "m".repeat(9000), "lastTransitionTime": "2027-01-15T07:00:00Z" },
            ],
        }))
        .unwrap();
        let short = json!(status.shortened());
        assert_eq!(
            (&short["phase"], &short["podUid"], &short["observedGeneration"]),
            (&json!("Failed"), &json!("u"), &json!(3))
        );
        assert_eq!((&short["claims"][0]["uid"], short.get("pendingChanges")), (&json!("d"), None));
        assert_eq!(short["conditions"][0]["message"].as_str().unwrap().chars().count(), SHORT_TEXT);
    }

    #[test]
    fn templates_do_not_see_what_follows_from_them() {
        let status: VirtualMachineStatus = serde_json::from_value(json!({
            "pendingChanges": [{ "path": "a", "reason": "b" }], "nodeName": "n", "observedGeneration": 3,
            "conditions": [
                { "type": "Ready", "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2027-01-15T07:00:00Z" },
                { "type": "Running", "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2027-01-15T07:00:00Z" },
            ],
        }))
        .unwrap();
        let seen = json!(status.clone().for_templates());
        assert_eq!((seen.get("pendingChanges"), seen.get("observedGeneration")), (None, None));
        assert_eq!((&seen["nodeName"], &seen["conditions"][0]["type"]), (&json!("n"), &json!("Running")));
        assert_eq!(seen["conditions"].as_array().unwrap().len(), 1);
        assert_eq!(json!(status.as_stopped()).get("nodeName"), None);
    }
}
