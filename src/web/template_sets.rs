//! The page with the template sets that VMs use, for administrators: which versions are in force, and which newer ones are not used and why.
//!
//! What it shows is what the manager reports of each VM: `status.templates` and the condition TemplatesValid. So this program needs no right on the sets.

use std::collections::BTreeMap;

use axum::{extract::State, http::StatusCode, response::Response};
use minijinja::context;
use serde::Serialize;

use super::{app::App, pages::value, signed_in::Administrator};
use crate::api::{
    VirtualMachine,
    conditions::{TEMPLATES_VALID, find},
    reasons::Reason,
};

/// How many VMs of one complaint are named.
const NAMED: usize = 5;

/// How a set is. The worst of its VMs counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
enum Health {
    /// The newest version renders all its VMs.
    Good,
    /// No VM has been rendered with it yet.
    Unknown,
    /// A newer version is not used.
    Refused,
    /// A VM can't be rendered.
    Bad,
}

impl Health {
    /// The class of its colour.
    const fn tone(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Unknown => "off",
            Self::Refused => "odd",
            Self::Bad => "bad",
        }
    }
}

/// A version that VMs have.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Version {
    version: Option<String>,
    vms: usize,
}

/// What the manager says of VMs of a set, all of which it says it of.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Complaint {
    reason: String,
    message: String,
    /// `NAMESPACE/NAME` of the first of them.
    vms: Vec<String>,
    /// How many others there are.
    more: usize,
}

/// A set on the page.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Shown {
    /// `None`: that of the VMs that select none.
    name: Option<String>,
    health: Health,
    tone: &'static str,
    versions: Vec<Version>,
    /// How many VMs the manager has not rendered yet.
    waiting: usize,
    complaints: Vec<Complaint>,
}

/// `GET /templates`
pub(super) async fn page(State(app): State<App>, Administrator(signed_in): Administrator) -> Response {
    let known = app.store.subscribe();
    let sets = sets(known.vms.iter().map(|(_, vm, _)| &**vm));
    let context = context! { frame => value(signed_in.frame()), view => "templates", sets => value(sets) };
    app.pages.page(signed_in.language, StatusCode::OK, "templates.html", context)
}

/// The sets that these VMs select, the one of VMs that select none first.
fn sets<'a>(vms: impl Iterator<Item = &'a VirtualMachine>) -> Vec<Shown> {
    let mut by_set: BTreeMap<Option<&str>, Vec<&VirtualMachine>> = BTreeMap::new();
    for vm in vms {
        by_set.entry(vm.template_set()).or_default().push(vm);
    }
    by_set.into_iter().map(|(name, vms)| shown(name, &vms)).collect()
}

fn shown(name: Option<&str>, vms: &[&VirtualMachine]) -> Shown {
    let (mut versions, mut waiting) = (BTreeMap::<Option<String>, usize>::new(), 0);
    let mut complaints: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    let mut health = Health::Good;
    for vm in vms {
        let status = vm.status.as_ref();
        let condition = status.and_then(|status| find(&status.conditions, TEMPLATES_VALID));
        // A VM that selects another set now still has the version of the former one.
        let from = status.and_then(|status| status.templates.as_ref()).filter(|from| from.set.as_deref() == name);
        match from {
            Some(from) => *versions.entry(from.version.clone()).or_default() += 1,
            None => waiting += 1,
        }
        let is_fine = |reason: &str| Reason::parse(reason) == Some(Reason::Rendered);
        let of_vm = match condition {
            None => Health::Unknown,
            Some(condition) if condition.status == "False" => Health::Bad,
            Some(condition) if is_fine(&condition.reason) => Health::Good,
            Some(_) => Health::Refused,
        };
        health = health.max(of_vm);
        if let Some(condition) = condition.filter(|_| matches!(of_vm, Health::Bad | Health::Refused)) {
            complaints.entry((&condition.reason, &condition.message)).or_default().push(vm.full_name());
        }
    }
    // One VM that is new says nothing of a set that others have.
    if health == Health::Unknown && !versions.is_empty() {
        health = Health::Good;
    }
    let complaints = complaints.into_iter().map(|((reason, message), mut vms)| {
        vms.sort();
        let more = vms.len().saturating_sub(NAMED);
        vms.truncate(NAMED);
        Complaint { reason: reason.to_owned(), message: message.to_owned(), vms, more }
    });
    Shown {
        name: name.map(str::to_owned),
        health,
        tone: health.tone(),
        versions: versions.into_iter().map(|(version, vms)| Version { version, vms }).collect(),
        waiting,
        complaints: complaints.collect(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    /// A VM of a set with a version, and what its condition says: status, reason, message.
    fn of(name: &str, set: Option<&str>, version: Option<&str>, says: Option<[&str; 3]>) -> VirtualMachine {
        vm(|vm| {
            vm["metadata"]["name"] = json!(name);
            if let Some(set) = set {
                vm["spec"]["templates"] = json!({ "set": set });
            }
            vm["status"] = json!({});
            if let Some(version) = version {
                vm["status"]["templates"] = json!({ "set": set, "version": version });
            }
            if let Some([status, reason, message]) = says {
                vm["status"]["conditions"] = json!([{ "type": "TemplatesValid", "status": status, "reason": reason, "message": message, "lastTransitionTime": "2026-01-01T00:00:00Z" }]);
            }
        })
    }

    const FINE: Option<[&str; 3]> = Some(["True", "Rendered", "The templates render this VM."]);

    #[test]
    fn a_set_has_the_versions_of_its_vms() {
        let vms = [
            of("a", Some("desk"), Some("11111111"), FINE),
            of("b", Some("desk"), Some("22222222"), FINE),
            of("c", Some("desk"), Some("11111111"), FINE),
            of("d", Some("desk"), None, None),
            of("e", None, Some("33333333"), FINE),
            of("f", Some("new"), None, None),
        ];
        let sets = sets(vms.iter());
        let names: Vec<_> = sets.iter().map(|set| (set.name.as_deref(), set.health)).collect();
        assert_eq!(names, [(None, Health::Good), (Some("desk"), Health::Good), (Some("new"), Health::Unknown)]);
        let version = |version: &str, vms| Version { version: Some(version.into()), vms };
        assert_eq!(sets[1].versions, [version("11111111", 2), version("22222222", 1)]);
        assert_eq!((sets[1].waiting, sets[2].waiting, sets[1].complaints.len()), (1, 1, 0));
    }

    #[test]
    fn what_refuses_a_version_is_said_once_with_its_vms() {
        let refused = Some(["True", "NewerRefused", "pod.yaml.j2:3:1: no such variable"]);
        let mut vms: Vec<_> =
            (0..7).map(|number| of(&format!("vm-{number}"), Some("desk"), Some("11111111"), refused)).collect();
        let shown = sets(vms.iter());
        assert_eq!((shown[0].health, shown[0].tone), (Health::Refused, "odd"));
        let [complaint] = shown[0].complaints.as_slice() else { panic!("{shown:?}") };
        assert_eq!((complaint.reason.as_str(), complaint.vms.len(), complaint.more), ("NewerRefused", 5, 2));
        assert_eq!(complaint.vms[0], "orchard/vm-0");
        vms.push(of("vm-9", Some("desk"), None, Some(["False", "TemplateError", "wrong"])));
        let shown = sets(vms.iter());
        assert_eq!((shown[0].health, shown[0].complaints.len(), shown[0].waiting), (Health::Bad, 2, 1));
    }

    #[test]
    fn a_vm_that_has_chosen_another_set_does_not_have_it_yet() {
        let mut vm = of("a", Some("desk"), Some("11111111"), FINE);
        vm.spec.templates.as_mut().unwrap().set = Some("other".into());
        let shown = sets([&vm].into_iter());
        assert_eq!((shown[0].versions.len(), shown[0].waiting), (0, 1));
    }
}
