//! The events on the page of a VM, and who sees which.
//!
//! | event | who sees it |
//! |---|---|
//! | of the VM, by a program | whoever sees the VM |
//! | of the VM, by a person in the web interface | she herself, and administrators |
//! | of the VM's Pod: nodes, images, volumes | administrators |
//!
//! So nobody learns who had a VM of a pool before, or what others do with a VM that several people may use.

use k8s_openapi::api::core::v1::{Event, ObjectReference};
use serde::Serialize;

use super::audit::{REPORTER, is_of};
use crate::{api::status::whole_seconds, explain};

/// The most events that are shown.
const SHOWN: usize = 30;

/// An event on the page.
#[derive(Serialize)]
pub(super) struct Happening {
    time: String,
    reason: String,
    message: String,
    count: i32,
    is_warning: bool,
}

/// Who looks at the page, of which VM.
#[derive(Clone, Copy)]
pub(super) struct Reader<'a> {
    /// The user.
    pub user: &'a str,
    /// Whether she is an administrator.
    pub is_administrator: bool,
    /// The UID of the VM.
    pub vm: &'a str,
}

impl Reader<'_> {
    fn sees(&self, event: &Event) -> bool {
        let is_of_vm = event.involved_object.uid.as_deref() == Some(self.vm);
        let by = |program: Option<&str>| program == Some(REPORTER);
        let source = event.source.as_ref().and_then(|source| source.component.as_deref());
        let is_of_person = by(event.reporting_component.as_deref()) || by(source);
        let is_hers = || event.related.as_ref().is_some_and(|related: &ObjectReference| is_of(related, self.user));
        self.is_administrator || is_of_vm && (!is_of_person || is_hers())
    }
}

/// The last events that the reader sees, the newest first.
pub(super) fn happenings(events: &[Event], reader: Reader<'_>) -> Vec<Happening> {
    let mut events: Vec<&Event> = events.iter().filter(|event| reader.sees(event)).collect();
    events.sort_by_key(|event| std::cmp::Reverse(explain::time(event)));
    let happening = |event: &&Event| Happening {
        time: explain::time(event).map(whole_seconds).unwrap_or_default(),
        reason: event.reason.clone().unwrap_or_default(),
        message: event.message.clone().unwrap_or_default(),
        count: event.series.as_ref().and_then(|series| series.count).or(event.count).unwrap_or(1),
        is_warning: event.type_.as_deref() == Some("Warning"),
    };
    events.iter().take(SHOWN).map(happening).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn who_sees_which_event() {
        let event = |edit: fn(&mut Value)| {
            let mut event = json!({
                "metadata": {}, "involvedObject": { "kind": "VirtualMachine", "uid": "vm" }, "reportingComponent": "vm-operator", "reason": "R",
            });
            edit(&mut event);
            serde_json::from_value::<Event>(event).unwrap()
        };
        let by_web = |event: &mut Value| event["reportingComponent"] = json!("vm-operator-web");
        let events = [
            event(|_| {}),
            event(|event| {
                event["reportingComponent"] = json!("vm-operator-web");
                event["related"] = json!(crate::web::audit::person("ann"));
            }),
            event(|event| {
                event["reportingComponent"] = json!("vm-operator-web");
                event["related"] = json!(crate::web::audit::person("bob"));
            }),
            event(by_web),
            event(|event| event["source"] = json!({ "component": "vm-operator-web" })),
            event(|event| event["involvedObject"] = json!({ "kind": "Pod", "uid": "pod" })),
            event(|event| {
                event["involvedObject"] = json!({ "kind": "Pod", "uid": "pod" });
                event["related"] = json!(crate::web::audit::person("ann"));
            }),
        ];
        let seen = |user: &str, is_administrator| -> Vec<bool> {
            let reader = Reader { user, is_administrator, vm: "vm" };
            events.iter().map(|event| reader.sees(event)).collect()
        };
        assert_eq!(seen("ann", false), [true, true, false, false, false, false, false]);
        assert_eq!(seen("bob", false), [true, false, true, false, false, false, false]);
        assert_eq!(seen("", false), [true, false, false, false, false, false, false]);
        assert_eq!(seen("root", true), [true; 7]);
        assert_eq!(happenings(&events, Reader { user: "ann", is_administrator: false, vm: "vm" }).len(), 2);
    }
}
