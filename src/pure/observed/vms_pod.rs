//! Which Pod is the VM's, for programs that see the VM as it is stored and Pods, but do not know all that the manager does.
//!
//! Labels, owners and names prove nothing by themselves: `kubectl debug --copy-to` copies the first two. The first row that fits decides:
//!
//! | a Pod | because |
//! |---|---|
//! | whose UID is `status.reporterUid` | the manager says so at once of a Pod of another name than the VM |
//! | whose UID is `status.podUid` | its runner has reported last |
//! | with the VM's name that `managedFields` prove the manager made for this VM | the manager names Pods so before any status |
//! | of another name, with the same proof | templates may name it |
//! | with the VM's name and the VM as its owner, made by another program | the VM's own, made again by a person or a backup: a copy has another name |
//! | of a StatefulSet with the VM's name, while no manager of ours has said anything of the VM | so the VM-Operator in Java and releases before 3.4 made it |
//!
//! A Pod that helps the guest ([`Object::is_helper`]) is none of these.
//!
//! A Pod that the manager gave to another VM is never this one's ([`Object::whose`]).

use kube::{
    ResourceExt,
    core::{DynamicObject, ObjectMeta},
};
use serde_json::Value;

use super::Object;
use crate::{
    api::VirtualMachine,
    object::{APP_NAME, pods},
};

/// How sure it is that a Pod is the VM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Sure {
    /// It has the owner of a Pod of an earlier release.
    OfSet,
    /// It has the VM's name and owner.
    Named,
    /// The manager made it, with another name than the VM's.
    Made,
    /// The manager made it with the VM's name.
    MadeNamed,
    /// Its runner reported last.
    Reported,
    /// The manager says so.
    Said,
}

/// The VM's Pod among these.
pub fn vms_pod<'a, P: ResourceExt>(vm: &VirtualMachine, pods: &'a [P]) -> Option<&'a P> {
    let sure = pods.iter().filter_map(|pod| Some((how_sure(vm, pod.meta())?, pod)));
    // Of the same the first.
    sure.reduce(|best, next| if next.0 > best.0 { next } else { best }).map(|(_, pod)| pod)
}

/// Whether the Pod alone may be taken for the VM's.
pub fn is_vms_pod(vm: &VirtualMachine, pod: &impl ResourceExt) -> bool {
    how_sure(vm, pod.meta()).is_some()
}

fn how_sure(vm: &VirtualMachine, pod: &ObjectMeta) -> Option<Sure> {
    vm.metadata.uid.as_ref().filter(|uid| !uid.is_empty())?;
    let (name, status) = (vm.name_any(), vm.status.as_ref());
    let is_set = |owner: &k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference| {
        owner.kind == "StatefulSet" && owner.name == name
    };
    let is_of_set = pod.owner_references.iter().flatten().any(is_set);
    let pod = Object::trim(&pods(), DynamicObject { types: None, metadata: pod.clone(), data: Value::Null });
    let is = |named: Option<&String>| !pod.uid.is_empty() && named == Some(&pod.uid);
    let is_of_vm = pod.is_of(vm);
    let is_named = pod.key.name == name;
    let is_ours = pod.labels.get("app.kubernetes.io/name").is_some_and(|program| program == APP_NAME);
    if pod.is_helper() {
        return None;
    }
    if is_of_vm && is(status.and_then(|status| status.reporter_uid.as_ref())) {
        return Some(Sure::Said);
    }
    if is_of_vm && is(status.and_then(|status| status.pod_uid.as_ref())) {
        return Some(Sure::Reported);
    }
    if pod.is_given_to(vm) {
        return Some(if is_named { Sure::MadeNamed } else { Sure::Made });
    }
    if is_of_vm && is_named {
        return Some(Sure::Named);
    }
    // The definition gives a new VM a status with -1.
    let generation = status.and_then(|status| status.observed_generation);
    let is_untouched = generation.is_none_or(|generation| generation < 0);
    (is_of_set && is_ours && is_untouched).then_some(Sure::OfSet)
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use serde_json::json;

    use super::*;
    use crate::{
        object::{INSTANCE_LABEL, ROLE_ANNOTATION},
        test_support::vm,
    };

    /// Who wrote a Pod.
    #[derive(Clone, Copy, PartialEq)]
    enum By {
        Manager,
        Person,
        Nobody,
    }

    /// A Pod with the label of the VM `apple`, of this program and with this owner.
    fn pod(name: &str, program: &str, owner: Option<(&str, &str, &str)>, by: By) -> Value {
        let api_version = |kind: &str| match kind {
            "VirtualMachine" => "vmoperator.jdrupes.org/v1",
            _ => "apps/v1",
        };
        let owner = owner.map(
            |(kind, name, uid)| json!({ "apiVersion": api_version(kind), "kind": kind, "name": name, "uid": uid }),
        );
        let mut fields =
            json!({ "f:metadata": { "f:labels": { format!("f:{INSTANCE_LABEL}"): {} } }, "f:spec": { "f:x": {} } });
        if let Some(owner) = &owner {
            let key = format!("k:{}", json!({ "uid": owner["uid"] }));
            fields["f:metadata"]["f:ownerReferences"] = json!({ key: {} });
        }
        let entry = |manager: &str, operation: &str| json!([{ "manager": manager, "operation": operation, "fieldsV1": fields }]);
        json!({ "metadata": {
            "name": name, "uid": format!("{name}-uid"), "ownerReferences": owner.into_iter().collect::<Vec<_>>(),
            "labels": { INSTANCE_LABEL: "apple", "app.kubernetes.io/name": program },
            "managedFields": match by {
                By::Manager => entry("vm-operator", "Apply"),
                By::Person => entry("kubectl-create", "Update"),
                By::Nobody => json!([]),
            },
        } })
    }

    #[test]
    fn the_table() {
        use By::{Manager, Nobody, Person};
        let apple = Some(("VirtualMachine", "apple", "apple-uid"));
        let own = || pod("apple", APP_NAME, apple, Manager);
        let again = |by| pod("apple", APP_NAME, apple, by);
        // What `kubectl debug --copy-to` and a person make.
        let copy = |by| pod("a-copy", APP_NAME, apple, by);
        let renamed = || pod("apple-vm", APP_NAME, apple, Manager);
        let helper = || {
            let mut helper = pod("apple-disks", APP_NAME, apple, Manager);
            helper["metadata"]["annotations"] = json!({ ROLE_ANNOTATION: "helper" });
            helper["metadata"]["managedFields"][0]["fieldsV1"]["f:metadata"]["f:annotations"] =
                json!({ format!("f:{ROLE_ANNOTATION}"): {} });
            helper
        };
        let of_set = || pod("apple-0", APP_NAME, Some(("StatefulSet", "apple", "set-uid")), Person);
        let of_helm = || pod("apple-web-1", "nginx", Some(("ReplicaSet", "apple-web", "rs-uid")), Person);
        let database = || pod("apple-0", "postgresql", Some(("StatefulSet", "apple", "set-uid")), Person);
        let lost = || pod("apple", APP_NAME, None, Nobody);
        let former = || pod("apple", APP_NAME, Some(("VirtualMachine", "apple", "former-uid")), Manager);
        let of_pear = || pod("pear", APP_NAME, Some(("VirtualMachine", "pear", "pear-uid")), Manager);
        let none = json!({});
        let reported = |uid: &str| json!({ "podUid": uid });
        let observed = json!({ "observedGeneration": 1 });
        for (pods, status, expected) in [
            (vec![], none.clone(), None),
            (vec![own()], none.clone(), Some("apple")),
            (vec![of_helm(), own()], none.clone(), Some("apple")),
            (vec![of_set(), own()], none.clone(), Some("apple")),
            // Copies come first in a list, before and after the first report.
            (vec![copy(Person), own()], none.clone(), Some("apple")),
            (vec![copy(Nobody), own()], none.clone(), Some("apple")),
            (vec![copy(Person), own()], reported("apple-uid"), Some("apple")),
            (vec![copy(Person), again(Nobody)], none.clone(), Some("apple")),
            (vec![copy(Person)], none.clone(), None),
            (vec![copy(Nobody)], none.clone(), None),
            (vec![copy(Nobody)], observed.clone(), None),
            // Made again by a person, or reset.
            (vec![again(Person)], none.clone(), Some("apple")),
            (vec![again(Nobody)], none.clone(), Some("apple")),
            // It helps the guest, which has not started yet.
            (vec![helper()], none.clone(), None),
            (vec![helper(), renamed()], none.clone(), Some("apple-vm")),
            // Templates name it.
            (vec![copy(Person), renamed()], none.clone(), Some("apple-vm")),
            (vec![again(Person), renamed()], none.clone(), Some("apple-vm")),
            (vec![own(), renamed()], json!({ "reporterUid": "apple-vm-uid" }), Some("apple-vm")),
            (vec![of_helm(), own()], json!({ "reporterUid": "apple-web-1-uid" }), Some("apple-web-1")),
            (vec![of_set(), own()], reported("apple-0-uid"), Some("apple-0")),
            // The one that was reported is gone.
            (vec![of_helm(), own()], reported("former-uid"), Some("apple")),
            (vec![of_helm(), of_set()], none.clone(), Some("apple-0")),
            (vec![of_set()], json!({ "observedGeneration": -1 }), Some("apple-0")),
            (vec![of_set()], observed, None),
            (vec![lost()], reported("apple-uid"), Some("apple")),
            // Of others.
            (vec![of_helm()], none.clone(), None),
            (vec![database()], none.clone(), None),
            (vec![lost()], none.clone(), None),
            (vec![former()], none.clone(), None),
            (vec![of_pear()], reported("pear-uid"), None),
            (vec![pod("apple-0", APP_NAME, Some(("StatefulSet", "plum", "set-uid")), Person)], none, None),
        ] {
            let vm = vm(|vm| vm["status"] = status.clone());
            let text = json!(pods).to_string();
            let pods: Vec<Pod> = serde_json::from_value(json!(pods)).unwrap();
            let found = vms_pod(&vm, &pods).map(ResourceExt::name_any);
            assert_eq!(found.as_deref(), expected, "{status} among {text}");
            assert_eq!(pods.iter().any(|pod| is_vms_pod(&vm, pod)), expected.is_some(), "{status} among {text}");
        }
    }
}
