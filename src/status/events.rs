//! Events: for each thing that a person would ask about, told once.
//!
//! Derived from what was done and from what the status says anew, so that a restart of the manager tells nothing. What is told
//! again, because the status could not be written, is counted.

use kube::ResourceExt;
use serde_json::Value;

use super::{Outcome, storage};
use crate::{
    api::{
        RenderedFrom, VirtualMachine,
        conditions::{self, POWER_UNMANAGED, READY, RESTART_REQUIRED, STORAGE_READY},
    },
    observed::Observed,
    plan::{Action, Why},
    power::GUEST_SHUTDOWN,
    render::Rendered,
};

/// An event about a machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct News {
    /// Whether something is wrong.
    pub warning: bool,
    /// A CamelCase word for programs.
    pub reason: String,
    /// A sentence for people.
    pub note: String,
    /// What the manager did or tried, in a word.
    pub action: &'static str,
}

/// Reasons of the condition Ready that say that something is wrong.
const WARNINGS: [&str; 11] = [
    "ApplyFailed",
    "ContainerWaiting",
    "ImagePullFailed",
    "NameTaken",
    "NodeNotResponding",
    "PodFailed",
    "PodNotRemoved",
    "RunnerFailed",
    "TemplateError",
    "Unschedulable",
    "WatchFailed",
];

/// What is new. `wanted` is the status that was derived, also from `outcome`; `done` is what of the plan was done.
pub fn events(
    vm: &VirtualMachine,
    observed: &Observed,
    rendered: Option<&[Rendered]>,
    outcome: &Outcome,
    wanted: &Value,
    done: &[&Action],
) -> Vec<News> {
    let mut news: Vec<News> = done.iter().filter_map(|action| acted(&vm.name_any(), action)).collect();
    news.extend(conditions_changed(vm, wanted));
    news.extend(templates_changed(vm, wanted));
    if let Some(rendered) = rendered {
        let found = storage::news(vm, observed, rendered, &outcome.refusals).into_iter();
        news.extend(found.filter(|(finding, _)| !finding.passes()).map(|(finding, note)| News {
            warning: true,
            reason: format!("{finding:?}"),
            note,
            action: "Reconcile",
        }));
    }
    let before = conditions::find(current(vm), STORAGE_READY).map(|before| before.message.as_str()).unwrap_or_default();
    let told: Vec<&str> =
        before.rsplit_once(storage::KEPT).map(|(_, names)| names.split(", ").collect()).unwrap_or_default();
    for name in rendered.into_iter().flat_map(|rendered| storage::kept(observed, rendered)) {
        if !told.contains(&name) {
            let note = format!("claim {name} is not used any more; it and its data are kept");
            news.push(News { warning: false, reason: "DiskKept".into(), note, action: "Reconcile" });
        }
    }
    news
}

/// `spec.vm.state` was written: who looks at the machine later finds that it is Stopped.
pub fn stopped() -> News {
    News {
        warning: false,
        reason: GUEST_SHUTDOWN.into(),
        note: "the guest has shut down, and so spec.vm.state becomes Stopped".into(),
        action: "Stop",
    }
}

fn current(vm: &VirtualMachine) -> &[k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition] {
    vm.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

fn acted(name: &str, action: &Action) -> Option<News> {
    let (reason, note, action) = match action {
        Action::Apply { object, uid: None } if object.key.is_pod() && object.key.name == name => {
            ("SuccessfulCreate", format!("made Pod {name}"), "Start")
        }
        Action::Delete { key, why, .. } if key.is_pod() && key.name == name => match why {
            Why::Stop => ("SuccessfulDelete", format!("Pod {name} is asked to end"), "Stop"),
            Why::Restart => ("Restarting", format!("Pod {name} is asked to end, and is made again"), "Restart"),
            Why::Ended => ("Restarting", format!("Pod {name} has ended and is made again"), "Restart"),
            Why::Force => ("Forced", format!("Pod {name} ends without waiting for its guest"), "Stop"),
            Why::Superfluous => return None,
        },
        _ => return None,
    };
    Some(News { warning: false, reason: reason.into(), note, action })
}

/// The machine is rendered with another version of its templates than before; the first is not worth a word.
fn templates_changed(vm: &VirtualMachine, wanted: &Value) -> Option<News> {
    let version = |from: &RenderedFrom| {
        let set = from.set.as_deref().map(|set| format!(" of the set {set}")).unwrap_or_default();
        format!("version {}{set}", from.version.as_deref().unwrap_or("?"))
    };
    let before = vm.status.as_ref()?.templates.as_ref()?;
    let after: RenderedFrom = serde_json::from_value(wanted.get("templates")?.clone()).ok()?;
    (*before != after).then(|| News {
        warning: false,
        reason: "TemplatesChanged".into(),
        note: format!("rendered with templates {}; before with {}", version(&after), version(before)),
        action: "Reconcile",
    })
}

/// Conditions that have another reason, or say something else that is wrong.
fn conditions_changed(vm: &VirtualMachine, wanted: &Value) -> Vec<News> {
    let conditions = wanted["conditions"].as_array().into_iter().flatten();
    let changed = conditions.filter_map(|condition| {
        let text = |field: &str| condition[field].as_str().unwrap_or_default();
        let (type_, reason, message) = (text("type"), text("reason"), text("message"));
        let before = conditions::find(current(vm), type_);
        let (same_reason, same_message) =
            before.map_or((false, false), |before| (before.reason == reason, before.message == message));
        let (warning, tell, reason) = match type_ {
            READY if WARNINGS.contains(&reason) => (true, !same_reason || !same_message, reason),
            READY if reason == GUEST_SHUTDOWN => (false, !same_reason, reason),
            READY if reason == "PodSucceeded" => (false, !same_reason || !same_message, reason),
            POWER_UNMANAGED => (true, !same_reason, type_),
            RESTART_REQUIRED => (false, !same_message, type_),
            _ => (false, false, reason),
        };
        tell.then(|| News { warning, reason: reason.to_owned(), note: message.to_owned(), action: "Reconcile" })
    });
    changed.collect()
}
