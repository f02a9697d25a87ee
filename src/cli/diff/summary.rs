//! What would become of the VMs of a namespace, with one line for each.

use kube::{ResourceExt, api::DynamicObject};

use super::{comparison::Comparison, why};
use crate::{
    api::VirtualMachine,
    plan::{Action, Plan},
};

/// What would become of a VM.
pub(super) struct Line {
    vm: String,
    pod: String,
    at_once: String,
    at_next_start: String,
    refused: String,
}

/// The words of an empty cell.
const NOTHING: &str = "-";

impl Line {
    pub(super) fn of(vm: &VirtualMachine, comparison: &Comparison<'_>) -> Self {
        let Comparison { plan, current, refusals, .. } = comparison;
        Self {
            vm: vm.name_any(),
            pod: pod(plan, current),
            at_once: at_once(plan),
            at_next_start: match plan.pending.len() {
                0 => NOTHING.into(),
                1 => "1 change".into(),
                count => format!("{count} changes"),
            },
            refused: if refusals.is_empty() { NOTHING.into() } else { refusals.join("; ") },
        }
    }

    /// A VM whose objects can't be rendered: the manager would change nothing, but could stop it.
    pub(super) fn refused(vm: &VirtualMachine, why: String) -> Self {
        let nothing = || NOTHING.to_owned();
        Self { vm: vm.name_any(), pod: "kept".into(), at_once: nothing(), at_next_start: nothing(), refused: why }
    }
}

/// What becomes of the Pod.
fn pod(plan: &Plan, current: &[DynamicObject]) -> String {
    let actions = || plan.steps.iter().flatten();
    let deleted = actions().find_map(|action| match action {
        Action::Delete { key, reason, .. } if key.is_pod() => Some(reason),
        _ => None,
    });
    let is_created =
        actions().any(|action| matches!(action, Action::Apply { object, uid: None } if object.key.is_pod()));
    let is_pod = |object: &&DynamicObject| object.types.as_ref().is_some_and(|types| types.kind == "Pod");
    let found = current.iter().find(is_pod);
    match (deleted, found) {
        (Some(reason), _) => format!("deleted: {}", why(reason)),
        (None, Some(pod)) if pod.metadata.deletion_timestamp.is_some() => "is being deleted".into(),
        (None, Some(_)) => "kept".into(),
        (None, None) if is_created => "created".into(),
        (None, None) => "none".into(),
    }
}

/// How many objects other than the Pod are created, changed and deleted.
fn at_once(plan: &Plan) -> String {
    let (mut created, mut changed, mut deleted) = (0, 0, 0);
    for action in plan.steps.iter().flatten() {
        match action {
            Action::Apply { object, uid: None } if !object.key.is_pod() => created += 1,
            Action::Apply { object, uid: Some(_) } if !object.key.is_pod() => changed += 1,
            Action::Label { key, .. } if !key.is_pod() => changed += 1,
            Action::Delete { key, .. } if !key.is_pod() => deleted += 1,
            Action::Apply { .. } | Action::Label { .. } | Action::Image { .. } | Action::Delete { .. } => {}
        }
    }
    let counts = [(created, "created"), (changed, "changed"), (deleted, "deleted")];
    let texts = counts.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}"));
    let texts: Vec<String> = texts.collect();
    if texts.is_empty() { NOTHING.into() } else { texts.join(", ") }
}

/// The lines in columns under a heading.
pub(super) fn table(lines: &[Line]) -> String {
    let heading = ["VM", "POD", "OBJECTS", "AT THE NEXT START", "REFUSED"].map(String::from);
    let cells =
        |line: &Line| [&line.vm, &line.pod, &line.at_once, &line.at_next_start, &line.refused].map(String::clone);
    let rows: Vec<[String; 5]> = std::iter::once(heading).chain(lines.iter().map(cells)).collect();
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let width = rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default() + 3;
            line += &format!("{cell:width$}");
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::json;

    use super::*;
    use crate::{
        object::{Lifetime, ObjectKey, Rendered, Update},
        plan::DeleteReason,
    };

    fn key(kind: &str) -> ObjectKey {
        ObjectKey { api_version: "v1".into(), kind: kind.into(), name: "apple".into() }
    }

    fn apply(kind: &str, uid: Option<&str>) -> Action {
        let object = Rendered {
            key: key(kind),
            template: String::new(),
            name: String::new(),
            patches: Vec::new(),
            runner: String::new(),
            lifetime: Lifetime::Vm,
            is_helper: false,
            update: Update::Live,
            hash: String::new(),
            value: Arc::new(json!({})),
        };
        Action::Apply { object, uid: uid.map(str::to_owned) }
    }

    fn delete(kind: &str, reason: DeleteReason) -> Action {
        Action::Delete { key: key(kind), uid: "1".into(), reason, grace: None, version: None, keeps_owned: false }
    }

    #[test]
    fn the_pod_and_the_other_objects_are_told_apart() {
        let label = Action::Label { key: key("Pod"), uid: "1".into(), patch: json!({}) };
        let pod_with = |metadata: serde_json::Value| {
            let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": metadata });
            vec![serde_json::from_value::<DynamicObject>(pod).unwrap()]
        };
        let running = || pod_with(json!({ "name": "apple" }));
        let ending = || pod_with(json!({ "name": "apple", "deletionTimestamp": "2026-01-01T00:00:00Z" }));
        for (actions, current, expected_pod, expected_objects) in [
            (vec![], vec![], "none", "-"),
            (vec![], running(), "kept", "-"),
            (vec![label], running(), "kept", "-"),
            (vec![], ending(), "is being deleted", "-"),
            (vec![delete("Pod", DeleteReason::Stop)], running(), "deleted: the VM should be stopped", "-"),
            (vec![apply("Pod", None), apply("Secret", None)], vec![], "created", "1 created"),
            (
                vec![
                    apply("ConfigMap", Some("1")),
                    apply("Service", Some("2")),
                    delete("Secret", DeleteReason::NotRendered),
                ],
                running(),
                "kept",
                "2 changed, 1 deleted",
            ),
        ] {
            let plan = Plan { steps: [actions, vec![], vec![]], ..Plan::default() };
            assert_eq!((pod(&plan, &current).as_str(), at_once(&plan).as_str()), (expected_pod, expected_objects));
        }
    }

    #[test]
    fn columns_are_as_wide_as_their_longest_cell() {
        let line = |vm: &str, refused: &str| Line {
            vm: vm.into(),
            pod: "kept".into(),
            at_once: NOTHING.into(),
            at_next_start: "1 change".into(),
            refused: refused.into(),
        };
        let text = table(&[line("a", NOTHING), line("a-longer-name", "it is too small")]);
        assert_eq!(
            text,
            "VM              POD    OBJECTS   AT THE NEXT START   REFUSED\n\
             a               kept   -         1 change            -\n\
             a-longer-name   kept   -         1 change            it is too small\n"
        );
    }
}
