//! What the manager does when it wanted to create an object and the API server answered that an object with that name exists.
//!
//! The manager's cache does not have that object: either it lacks the labels that the watch selects, or it was created a moment ago.
//!
//! | rendered as | the existing object | decision |
//! |---|---|---|
//! | a claim | is not this VM's ([`claims::whose_with`]) | [`Conflict::Foreign`]: refuse |
//! | a claim | any other | [`Conflict::Apply`]: a claim with the disk's name is used as the disk, also if a person created it; its spec stays, and if the Pod was rendered for another volume, the VM is planned again |
//! | a Pod | is this VM's | [`Conflict::Label`]: restore the labels, so that the watch reports it; the next plan decides about other changes |
//! | `once` | is this VM's | [`Conflict::Keep`]: leave it alone |
//! | anything else | is this VM's | [`Conflict::Apply`]: apply what was rendered |
//! | anything | is not this VM's | [`Conflict::NotOurs`]: refuse |
//!
//! Whose an object is says [`crate::observed::whose`]: labels and names alone prove nothing.

use serde_json::{Value, json};

use super::metadata;
use crate::{
    api::VirtualMachine,
    claims::{self, Foreign, Whose},
    object::{Rendered, Update},
    observed::{Claimant, Object},
};

/// The decision about the existing object.
#[derive(Clone, Debug, PartialEq)]
pub enum Conflict {
    /// Apply this to the existing object.
    Apply(Rendered),
    /// Send this merge patch of the metadata. The creation has failed nevertheless.
    Label(Value),
    /// Leave the existing object alone.
    Keep,
    /// Refuse: it belongs to someone else.
    NotOurs,
    /// Refuse: it is a claim that is not the VM's.
    Foreign(Foreign),
}

/// Decides by the table above. `claimant`: another VM to which a claim belongs.
pub fn conflict(vm: &VirtualMachine, rendered: &Rendered, found: &Object, claimant: Option<&Claimant>) -> Conflict {
    if rendered.key.is_claim() {
        return match claims::whose_with(vm, found, claimant, false) {
            Whose::Own => Conflict::Apply(claims::as_existing(rendered, found, false)),
            Whose::Former | Whose::Free => {
                Conflict::Apply(claims::as_taken(claims::as_existing(rendered, found, false), found))
            }
            Whose::Foreign(why) => Conflict::Foreign(why),
        };
    }
    if !found.is_of(vm) {
        return Conflict::NotOurs;
    }
    if rendered.key.is_pod() {
        return Conflict::Label(json!({ "metadata": { "labels": rendered.value["metadata"]["labels"] } }));
    }
    match rendered.update {
        Update::Once => Conflict::Keep,
        Update::Live | Update::AtStart => Conflict::Apply(rendered.clone()),
    }
}

/// Whether an object without an owner would become the VM's.
pub fn adopts(rendered: &Rendered, found: &Object) -> bool {
    metadata::missing_owners(rendered, found).is_some()
}

/// Whether a claim that exists is another volume than the rendered one would be: with another mode or another size, for which the Pod and the
/// runner's configuration are rendered differently.
pub fn is_another_volume(rendered: &Rendered, found: &Object) -> bool {
    let mode = |spec: &Value| spec["volumeMode"].as_str().unwrap_or("Filesystem").to_owned();
    let wanted = &rendered.value["spec"];
    let is_same =
        mode(wanted) == mode(&found.spec) && claims::requested_size(wanted) == claims::requested_size(&found.spec);
    rendered.key.is_claim() && !is_same
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::{applied, nothing, rendered, vm};

    /// The existing object of that kind as the templates make it, changed by `edit`, and the decision about it.
    fn decide(kind: &str, update: Option<Update>, edit: impl Fn(&mut Value)) -> (Conflict, Rendered) {
        let vm = vm(|_| ());
        let mut wanted = rendered(&vm, &nothing()).into_iter().find(|object| object.key.kind == kind).unwrap();
        wanted.update = update.unwrap_or(wanted.update);
        let found = applied(&[wanted.clone()], |_, object| edit(object));
        (conflict(&vm, &wanted, &found.objects[0], None), wanted)
    }

    fn without_labels(object: &mut Value) {
        object["metadata"]["labels"] = json!({});
    }

    fn of_another_uid(object: &mut Value) {
        object["metadata"]["ownerReferences"][0]["uid"] = json!("another");
    }

    fn of_pear(object: &mut Value) {
        object["metadata"]["labels"]["app.kubernetes.io/instance"] = json!("pear");
    }

    #[test]
    fn a_claim_is_used_unless_it_is_another_vms() {
        let (decision, wanted) = decide("PersistentVolumeClaim", None, |claim| {
            without_labels(claim);
            claim["spec"]["resources"]["requests"]["storage"] = json!("512Mi");
        });
        let Conflict::Apply(applied) = decision else { panic!("{decision:?}") };
        assert_eq!(applied.value["spec"]["resources"]["requests"]["storage"], "512Mi", "its size stays");
        assert_eq!(applied.value["metadata"], wanted.value["metadata"]);
        let given_to_pear = |claim: &mut Value| {
            of_pear(claim);
            claim["metadata"]["annotations"].as_object_mut().unwrap().remove("vmoperator.jdrupes.org/belongsTo");
        };
        let of_pear = Conflict::Foreign(Foreign::Vm("pear".into()));
        assert_eq!(decide("PersistentVolumeClaim", None, given_to_pear).0, of_pear);
    }

    #[test]
    fn a_claim_with_another_mode_or_size_is_another_volume() {
        let disk = |object: &Rendered| object.key.name == "apple-core-disk";
        let wanted = rendered(&vm(|_| ()), &nothing()).into_iter().find(disk).unwrap();
        let is_another = |edit: fn(&mut Value)| {
            let found = applied(std::slice::from_ref(&wanted), |_, object| edit(object));
            is_another_volume(&wanted, &found.objects[0])
        };
        assert!(!is_another(without_labels));
        assert!(is_another(|claim| claim["spec"]["volumeMode"] = json!("Filesystem")));
        assert!(is_another(|claim| claim["spec"]["volumeMode"] = Value::Null));
        assert!(is_another(|claim| claim["spec"]["resources"]["requests"]["storage"] = json!("2Gi")));
    }

    #[test]
    fn a_pod_gets_its_labels_back() {
        let (decision, wanted) = decide("Pod", None, without_labels);
        let labels = &wanted.value["metadata"]["labels"];
        assert!(labels.as_object().is_some_and(|labels| !labels.is_empty()));
        assert_eq!(decision, Conflict::Label(json!({ "metadata": { "labels": labels } })));
        assert_eq!(decide("Pod", None, of_another_uid).0, Conflict::NotOurs);
    }

    #[test]
    fn any_other_object_of_the_vm_is_applied_or_kept() {
        let (decision, wanted) = decide("ConfigMap", None, without_labels);
        assert_eq!(decision, Conflict::Apply(wanted));
        assert_eq!(decide("ConfigMap", Some(Update::Once), without_labels).0, Conflict::Keep);
        assert_eq!(decide("ConfigMap", None, of_another_uid).0, Conflict::NotOurs);
    }

    #[test]
    fn an_object_without_an_owner_must_name_the_vm() {
        let without_owner = |object: &mut Value| object["metadata"]["ownerReferences"] = json!([]);
        let (decision, wanted) = decide("ConfigMap", None, without_owner);
        assert_eq!(decision, Conflict::Apply(wanted));
        let both = |object: &mut Value| {
            without_owner(object);
            of_pear(object);
        };
        assert_eq!(decide("ConfigMap", None, both).0, Conflict::NotOurs);
        let foreign = |object: &mut Value| {
            without_owner(object);
            without_labels(object);
        };
        assert_eq!(decide("ConfigMap", None, foreign).0, Conflict::NotOurs);
    }
}
