//! Whose a claim is. A claim belongs to exactly one VM, by its UID, and both say so: the VM in `status.claims`, the claim in the annotation
//! [`BELONGS_TO_ANNOTATION`], which the manager applies before the VM's Pod exists. Names and labels prove nothing: two VMs may have disks whose
//! claims have the same name, and anybody may change labels.
//!
//! **The first line that fits a claim with the name of a VM's disk**
//!
//! | the claim | is |
//! |---|---|
//! | is used by another VM that exists, as that VM's status or the claim's note says, and no note names this VM | [`Foreign::Vm`] |
//! | has the note of this VM, or is the one in its status | [`Whose::Own`] |
//! | has the annotation `vmoperator.jdrupes.org/vm`, with which a person gives it to another VM | [`Foreign::Vm`] |
//! | has the note of another VM that exists, which does not use it any more, or of one that does not exist any more and had another name | [`Foreign::Vm`], [`Foreign::FormerVm`] |
//! | was a disk of VMs of another prototype | [`Foreign::Prototype`] |
//! | is labelled by a manager as another VM's | [`Foreign::Vm`] |
//! | is another one than that in the VM's status, and has no note of a VM of this name | [`Foreign::Replaces`] |
//! | has the note or the labels of a VM of this name: this VM was deleted and made again, or restored from a backup, or is of an earlier release | [`Whose::Former`] |
//! | is made by something that is the VM's | [`Whose::Free`] |
//! | any other: somebody has made it, and it is not said for whom | [`Foreign::Unnamed`] |
//!
//! Of two claims that the same disk may have, under its name of this release and of a former one, the VM gets none unless one is its own, is
//! mounted by its Pod, or is the one with the annotation `vmoperator.jdrupes.org/vm` ([`Foreign::OneOfTwo`]).
//!
//! Lines four to six and the last two do not count if a person has given the claim the annotation `vmoperator.jdrupes.org/vm` with the name of
//! this VM ([`Whose::Free`]): who may write the claim may say whose it is. Who may only write VMs could choose names that fit any claim.

use std::{collections::BTreeMap, fmt};

use kube::{ResourceExt, core::ObjectMeta};
use serde_json::Value;

use super::{is_mounted_by, known, missing, names_of_disks};
use crate::{
    api::{Reason, VirtualMachine},
    object::{
        BELONGS_TO_ANNOTATION, HASH_ANNOTATION, MADE_FOR_ANNOTATION, PROTOTYPE_ANNOTATION, REPLACE_CLAIM_ANNOTATION,
        UNUSED_ANNOTATION, VM_ANNOTATION, belongs_to, named_vm,
    },
    observed::{Claimant, Object, Observed},
    ownership::{OBJECT_MANAGER, has_applied},
};

/// Whose a claim is, seen from a VM whose disk has its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The VM's.
    Own,
    /// That of a former VM of the same name. The VM continues with it.
    Former,
    /// Nobody's. The VM may take it, if no Pod of others uses it.
    Free,
    /// Not the VM's.
    Foreign(Foreign),
}

/// Why a VM does not get a claim. The texts begin with a verb: what stands before is the claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Foreign {
    /// It belongs to this VM, which exists.
    Vm(String),
    /// It belongs to this VM, which does not exist any more.
    FormerVm(String),
    /// It is a disk of the VMs of this prototype (`NAMESPACE/NAME`).
    Prototype(String),
    /// Somebody has made it, and has not said for which VM. This object owns it.
    Unnamed(Option<String>),
    /// The VM's data are in another claim, with this UID, which had this name.
    Replaces(String),
    /// The claim with this name, which the same disk may have, may be the VM's, too.
    OneOfTwo(String),
}

impl Foreign {
    /// The reason of Ready and StorageReady.
    pub fn reason(&self) -> Reason {
        match self {
            Self::Vm(_) | Self::FormerVm(_) | Self::Prototype(_) | Self::Unnamed(_) | Self::OneOfTwo(_) => {
                Reason::ClaimTaken
            }
            Self::Replaces(_) => Reason::ClaimReplaced,
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let give = format!("give the claim the annotation {VM_ANNOTATION} with the name of this VM");
        match self {
            Self::Vm(vm) => write!(
                f,
                "belongs to the VM {vm}: two VMs can't use the same claim; give the disk another name, or, if {vm} does not use it any more, {give}"
            ),
            Self::FormerVm(vm) => write!(
                f,
                "belongs to the VM {vm}, which does not exist any more: give the disk another name, or, to have the data of {vm}, {give}"
            ),
            Self::Prototype(prototype) => write!(
                f,
                "is the disk of a VM of the prototype {prototype}, and this VM is of another one: rename one of the workloads, or, to have those \
                 data, {give}"
            ),
            Self::Unnamed(None) => {
                write!(f, "was made by somebody, who has not said for which VM: {give}, or give the disk another name")
            }
            Self::Unnamed(Some(owner)) => write!(
                f,
                "was made for {owner}, with which it is deleted, and nobody has said for which VM: {give}, or give the disk another name"
            ),
            Self::Replaces(lost) => write!(
                f,
                "is not the one with the VM's data, which had the UID {lost}: restore that one from a backup with its annotations, or, to use the \
                 one that exists, {give}, and the VM the annotation {REPLACE_CLAIM_ANNOTATION}: {lost}"
            ),
            Self::OneOfTwo(other) => {
                write!(
                    f,
                    "may have the data of this VM's disk, and so may the claim {other}: to use one of them, {give}"
                )
            }
        }
    }
}

/// Whose a claim is that was observed.
pub fn whose(vm: &VirtualMachine, observed: &Observed, claim: &Object) -> Whose {
    match alone(vm, observed, claim) {
        found @ (Whose::Own | Whose::Foreign(_)) => found,
        found => rival(vm, observed, claim).map_or(found, |other| Whose::Foreign(Foreign::OneOfTwo(other))),
    }
}

/// The other claim of the same disk that may be the VM's as well as this one.
fn rival(vm: &VirtualMachine, observed: &Observed, claim: &Object) -> Option<String> {
    if observed.objects.iter().any(|pod| is_mounted_by(vm, pod, &claim.key.name)) {
        return None;
    }
    let is_given = |claim: &Object| claim.annotations.get(VM_ANNOTATION).is_some_and(|given| *given == vm.name_any());
    let names = names_of_disks(vm).into_iter().find(|names| names.contains(&claim.key.name))?;
    let others = names.iter().filter(|name| **name != claim.key.name).filter_map(|name| observed.claim(name));
    // A claim that the administrator gave to the VM comes before one that nobody gave it.
    let mut rivals = others.filter(|other| !is_given(claim) || is_given(other));
    let is_vms = |other: &Object| !matches!(alone(vm, observed, other), Whose::Foreign(_));
    rivals.find(|other| is_vms(other)).map(|other| other.key.name.clone())
}

/// Whose a claim is, whatever other claims there are.
fn alone(vm: &VirtualMachine, observed: &Observed, claim: &Object) -> Whose {
    let is_vms = |owner: &String| observed.objects.iter().any(|object| object.uid == *owner);
    whose_with(vm, claim, observed.claimants.get(&claim.uid), claim.owners.iter().any(is_vms))
}

/// The table at the head of this module. `claimant`: another VM to which it belongs; `is_made_by_vms`: an object of the VM owns it.
pub fn whose_with(vm: &VirtualMachine, claim: &Object, claimant: Option<&Claimant>, is_made_by_vms: bool) -> Whose {
    let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
    let note = belongs_to(&claim.annotations);
    let has_note = note.is_some_and(|(_, noted)| noted == uid);
    let is_named = claim.vm() == Some(name.as_str());
    let is_known = known(vm, &claim.key.name).is_some_and(|known| known.uid.as_ref() == Some(&claim.uid));
    let given_to = claim.annotations.get(VM_ANNOTATION);
    let is_given = given_to == Some(&name);

    if let Some(other) = claimant.filter(|other| other.uses)
        && !has_note
        && !(is_known && is_named && note.is_none())
    {
        return Whose::Foreign(Foreign::Vm(other.vm.clone()));
    }
    if has_note || is_known {
        return Whose::Own;
    }
    if let Some(other) = given_to.filter(|_| !is_given) {
        return Whose::Foreign(Foreign::Vm(other.clone()));
    }
    if !is_given {
        match (note, claimant) {
            (_, Some(other)) => return Whose::Foreign(Foreign::Vm(other.vm.clone())),
            (Some((other, _)), None) if other != name => {
                return Whose::Foreign(Foreign::FormerVm(other.to_owned()));
            }
            (Some(_) | None, None) => {}
        }
        if let Some(prototype) = claim.annotations.get(PROTOTYPE_ANNOTATION)
            && vm.annotations().get(PROTOTYPE_ANNOTATION) != Some(prototype)
        {
            return Whose::Foreign(Foreign::Prototype(prototype.clone()));
        }
        if let Some(other) = claim.vm().filter(|_| claim.is_ours() && !is_named && note.is_none()) {
            return Whose::Foreign(Foreign::Vm(other.to_owned()));
        }
    }
    // A manager that wrote no notes yet has made it for a VM of this name.
    let is_of_former_release = note.is_none() && is_named && claim.annotations.contains_key(HASH_ANNOTATION);
    let is_restored = note.is_some_and(|(noted, _)| noted == name) || is_of_former_release;
    if let Some(lost) = missing(vm, &claim.key.name).and_then(|known| known.uid.clone())
        && !is_restored
    {
        return Whose::Foreign(Foreign::Replaces(lost));
    }
    if is_restored || claim.is_ours() && is_named && !is_given {
        return Whose::Former;
    }
    if !is_given && !is_made_by_vms && !claim.is_owned_by(&uid) {
        let owner = claim.maker.as_ref().map(|maker| maker.key.to_string());
        return Whose::Foreign(Foreign::Unnamed(owner));
    }
    Whose::Free
}

/// Whether a claim with one of the VM's names ([`super::possible_names`]) is the VM's, as far as the claim and the VM say: it names no other VM,
/// or the VM uses it.
pub fn is_of(vm: &VirtualMachine, claim: &impl ResourceExt) -> bool {
    let name = vm.name_any();
    let is_given = claim.annotations().get(VM_ANNOTATION) == Some(&name);
    match belongs_to(claim.annotations()).filter(|_| !is_given) {
        Some((noted, uid)) => noted == name || Some(uid) == vm.metadata.uid.as_deref(),
        None => named_vm(claim.annotations(), claim.labels()).is_none_or(|named| *named == name) || is_used(vm, claim),
    }
}

/// Whether the VM uses the claim, as its status says.
pub fn is_used(vm: &VirtualMachine, claim: &impl ResourceExt) -> bool {
    claim.uid().is_some_and(|uid| uses(vm, &uid))
}

/// Whether the VM uses the claim with that UID, as its status says.
pub fn uses(vm: &VirtualMachine, uid: &str) -> bool {
    let mut known = vm.status.iter().flat_map(|status| &status.claims);
    known.any(|known| !known.unused && known.uid.as_deref() == Some(uid))
}

/// Whether a claim that the VM does not use was its disk once: the manager has made it for the VM, or for one of its name, or the VM knows it. That
/// somebody has given a claim the VM's labels is not enough.
pub fn was_of(vm: &VirtualMachine, claim: &Object) -> bool {
    let is_known = known(vm, &claim.key.name).is_some_and(|known| known.uid.as_ref() == Some(&claim.uid));
    let is_noted = match belongs_to(&claim.annotations) {
        Some((name, uid)) => Some(uid) == vm.uid().as_deref() || name == vm.name_any(),
        None => claim.is_ours() && claim.owned.is_some() && claim.vm() == Some(vm.name_any().as_str()),
    };
    is_known || is_noted
}

/// Whether the VM's claims may be deleted with it: a pool with `spec.reset` or vmctl has made the VM. Only what the manager makes for such a VM gets
/// the annotation [`MADE_FOR_ANNOTATION`].
fn may_lose_claims(vm: &VirtualMachine) -> bool {
    [UNUSED_ANNOTATION, PROTOTYPE_ANNOTATION].iter().any(|mark| vm.annotations().contains_key(*mark))
}

/// Whether a claim may be deleted with its VM, by the pool or the vmctl that has made the VM: the manager has made the claim for this very VM, which
/// uses it, as far as its status says, and nobody else has an interest in it. A claim that was there before the VM, that a person has made, copied
/// or given to a VM, or that has another owner is not deleted.
pub fn goes_with(vm: &VirtualMachine, claim: &ObjectMeta) -> bool {
    let (Some(uid), none) = (vm.metadata.uid.as_deref(), BTreeMap::new()) else { return false };
    let annotations = claim.annotations.as_ref().unwrap_or(&none);
    let mut known = vm.status.iter().flat_map(|status| &status.claims);
    let is_unused = known.any(|known| known.unused && known.uid == claim.uid);
    annotations.get(MADE_FOR_ANNOTATION).is_some_and(|made_for| made_for == uid)
        && belongs_to(annotations).is_none_or(|(_, noted)| noted == uid)
        && annotations.get(VM_ANNOTATION).is_none_or(|given_to| *given_to == vm.name_any())
        && has_applied(claim, OBJECT_MANAGER)
        && claim.owner_references.iter().flatten().all(|owner| owner.uid == uid)
        && !is_unused
}

/// Notes in a rendered claim to which VM it belongs, and of which prototype that is; and, of a VM with which its claims may be deleted, that the claim
/// was made for it: a claim that exists keeps what it has, because a person, a backup or another VM may have made it. What a VM's spec says about this in the
/// metadata of a disk does not count.
pub fn note_origin(vm: &VirtualMachine, observed: &Observed, object: &mut Value) {
    if object["kind"] != "PersistentVolumeClaim" {
        return;
    }
    let name = object["metadata"]["name"].as_str().unwrap_or_default();
    let found = observed.objects.iter().find(|found| found.key.is_claim() && found.key.name == name);
    let made_for = match found {
        Some(found) => found.annotations.get(MADE_FOR_ANNOTATION).cloned(),
        None => vm.uid().filter(|_| may_lose_claims(vm)),
    };
    let notes = [
        (BELONGS_TO_ANNOTATION, vm.uid().map(|uid| format!("{}/{uid}", vm.name_any()))),
        (PROTOTYPE_ANNOTATION, vm.annotations().get(PROTOTYPE_ANNOTATION).cloned()),
        (MADE_FOR_ANNOTATION, made_for),
    ];
    let annotations = &mut object["metadata"]["annotations"];
    if let Some(annotations) = annotations.as_object_mut() {
        annotations.retain(|name, value| name != VM_ANNOTATION || *value == vm.name_any());
        notes.iter().for_each(|(name, _)| drop(annotations.remove(*name)));
    }
    for (name, value) in notes {
        if let Some(value) = value {
            annotations[name] = value.into();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::claims::as_existing;
    use crate::test_support::{applied, nothing, rendered, vm};

    const CLAIM: &str = "apple-core-disk";

    /// The VM `apple` of which the status has a claim with this UID.
    fn knows(uid: &str) -> VirtualMachine {
        vm(|vm| vm["status"] = json!({ "claims": [{ "name": CLAIM, "uid": uid }] }))
    }

    fn new() -> VirtualMachine {
        vm(|_| ())
    }

    /// The claim of the disk as the manager makes it, changed by `edit`.
    fn claim(edit: &dyn Fn(&mut Value)) -> Object {
        let objects = rendered(&new(), &nothing());
        let objects: Vec<_> = objects.into_iter().filter(|object| object.key.name == CLAIM).collect();
        Object::clone(&applied(&objects, |_, object| edit(&mut object["metadata"])).objects[0])
    }

    /// A claim that a person has made, changed by `edit`.
    fn of_a_person(edit: &dyn Fn(&mut Value)) -> Object {
        claim(&|metadata| {
            *metadata = json!({ "name": CLAIM, "namespace": "orchard", "uid": "u-person" });
            edit(metadata);
        })
    }

    fn note(note: &'static str) -> impl Fn(&mut Value) {
        move |metadata| metadata["annotations"][BELONGS_TO_ANNOTATION] = json!(note)
    }

    fn given_to(vm: &'static str, edit: impl Fn(&mut Value)) -> impl Fn(&mut Value) {
        move |metadata| {
            edit(metadata);
            metadata["annotations"][VM_ANNOTATION] = json!(vm);
        }
    }

    fn labelled(vm: &'static str) -> impl Fn(&mut Value) {
        move |metadata| metadata["labels"] = json!(crate::object::labels(vm))
    }

    #[test]
    fn the_table() {
        let pear = |uses: bool| Some(Claimant { vm: "pear".into(), uses });
        let foreign = |why: Foreign| Whose::Foreign(why);
        let of_pear = || foreign(Foreign::Vm("pear".into()));
        let lost = || foreign(Foreign::Replaces("u-lost".into()));
        let owner = |metadata: &mut Value| {
            metadata["ownerReferences"] = json!([{ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db", "uid": "u-db", "controller": true }]);
        };
        let prototype = |metadata: &mut Value| {
            note("apple/u-former")(metadata);
            metadata["annotations"][PROTOTYPE_ANNOTATION] = json!("orchard/web");
        };
        let of_former_release = |metadata: &mut Value| {
            metadata["annotations"].as_object_mut().unwrap().remove(BELONGS_TO_ANNOTATION);
        };
        for (what, vm, claim, claimant, expected) in [
            ("made for the VM", new(), claim(&|_| ()), None, Whose::Own),
            ("noted, and in another VM's status too", new(), claim(&|_| ()), pear(true), Whose::Own),
            (
                "in the status, and a tool has taken note and labels away",
                knows("u-person"),
                of_a_person(&|_| ()),
                None,
                Whose::Own,
            ),
            (
                "in the status of both, and the label is this VM's",
                knows("u-person"),
                of_a_person(&labelled("apple")),
                pear(true),
                Whose::Own,
            ),
            (
                "in the status of both, and nothing tells",
                knows("u-person"),
                of_a_person(&|_| ()),
                pear(true),
                of_pear(),
            ),
            ("restored beside its VM: another UID, the same note", knows("u-lost"), claim(&|_| ()), None, Whose::Own),
            ("another one under the name", knows("u-lost"), of_a_person(&|_| ()), None, lost()),
            ("the same with the VM's labels", knows("u-lost"), of_a_person(&labelled("apple")), None, lost()),
            (
                "restored from a backup of an earlier release",
                knows("u-lost"),
                claim(&of_former_release),
                None,
                Whose::Former,
            ),
            (
                "of the VM before, which was deleted and made again",
                new(),
                claim(&note("apple/u-former")),
                None,
                Whose::Former,
            ),
            (
                "restored with a VM that had the same name",
                knows("u-lost"),
                claim(&note("apple/u-former")),
                None,
                Whose::Former,
            ),
            ("of an earlier release", new(), claim(&of_former_release), None, Whose::Former),
            ("of the predecessor", new(), of_a_person(&labelled("apple")), None, Whose::Former),
            ("somebody has made it", new(), of_a_person(&|_| ()), None, foreign(Foreign::Unnamed(None))),
            ("a person has made it for this VM", new(), of_a_person(&given_to("apple", |_| ())), None, Whose::Free),
            ("a person has made it for another VM", new(), of_a_person(&given_to("pear", |_| ())), None, of_pear()),
            ("another VM's", new(), claim(&note("pear/u-pear")), pear(true), of_pear()),
            ("another VM's, which has it no more", new(), claim(&note("pear/u-pear")), pear(false), of_pear()),
            ("given away by a person", new(), claim(&given_to("apple", note("pear/u-pear"))), pear(false), Whose::Free),
            (
                "given away, and still used",
                new(),
                claim(&given_to("apple", note("pear/u-pear"))),
                pear(true),
                of_pear(),
            ),
            (
                "of a deleted VM of another name",
                new(),
                claim(&note("pear/u-pear")),
                None,
                foreign(Foreign::FormerVm("pear".into())),
            ),
            ("the same, given by a person", new(), claim(&given_to("apple", note("pear/u-pear"))), None, Whose::Free),
            ("labelled as another VM's", new(), of_a_person(&labelled("pear")), None, of_pear()),
            ("of another prototype", new(), claim(&prototype), None, foreign(Foreign::Prototype("orchard/web".into()))),
            (
                "of another owner",
                new(),
                of_a_person(&owner),
                None,
                foreign(Foreign::Unnamed(Some("StatefulSet db".into()))),
            ),
            ("of another owner, given by a person", new(), of_a_person(&given_to("apple", owner)), None, Whose::Free),
        ] {
            assert_eq!(whose_with(&vm, &claim, claimant.as_ref(), false), expected, "{what}");
        }
        assert_eq!(whose_with(&new(), &of_a_person(&owner), None, true), Whose::Free, "the VM's own StatefulSet");
        let given_up = vm(|vm| {
            vm["status"] = json!({ "claims": [{ "name": CLAIM, "uid": "u-lost" }] });
            vm["metadata"]["annotations"] = json!({ REPLACE_CLAIM_ANNOTATION: "u-lost" });
        });
        assert_eq!(whose_with(&given_up, &of_a_person(&given_to("apple", |_| ())), None, false), Whose::Free);
    }

    #[test]
    fn what_a_vms_spec_says_about_owners_of_claims_does_not_count() {
        let hostile = vm(|vm| {
            vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["annotations"] = json!({
                VM_ANNOTATION: "pear", BELONGS_TO_ANNOTATION: "pear/u-pear", MADE_FOR_ANNOTATION: "u-pear",
                PROTOTYPE_ANNOTATION: "orchard/web", "own": "stays",
            });
        });
        let objects = rendered(&hostile, &nothing());
        let claim = objects.iter().find(|object| object.key.name == CLAIM).unwrap();
        let annotations = &claim.value["metadata"]["annotations"];
        for (name, expected) in [
            (VM_ANNOTATION, Value::Null),
            (BELONGS_TO_ANNOTATION, json!("apple/apple-uid")),
            (MADE_FOR_ANNOTATION, Value::Null),
            (PROTOTYPE_ANNOTATION, Value::Null),
            ("own", json!("stays")),
        ] {
            assert_eq!(annotations[name], expected, "{name}");
        }
    }

    #[test]
    fn a_claim_goes_with_the_vm_only_if_it_was_made_for_it_and_is_nobody_elses() {
        let vm = |unused: bool| {
            let claims = json!([{ "name": CLAIM, "uid": "u-1", "unused": unused }]);
            vm(|vm| vm["status"] = json!({ "claims": claims }))
        };
        let claim = |edit: &dyn Fn(&mut Value)| {
            let mut claim = json!({
                "name": CLAIM, "uid": "u-1", "creationTimestamp": "2027-01-15T06:00:00Z",
                "annotations": { BELONGS_TO_ANNOTATION: "apple/apple-uid", MADE_FOR_ANNOTATION: "apple-uid" },
                "managedFields": [{ "manager": OBJECT_MANAGER, "operation": "Apply", "time": "2027-01-15T06:00:00Z" }],
            });
            edit(&mut claim);
            serde_json::from_value::<ObjectMeta>(claim).unwrap()
        };
        let annotated = |name: &'static str, value: Value| {
            claim(&move |claim: &mut Value| claim["annotations"][name] = value.clone())
        };
        let owned = |kind: &'static str, uid: &'static str| {
            claim(&|claim| {
                claim["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": kind, "name": "o", "uid": uid }])
            })
        };
        let without =
            |name: &'static str| claim(&|claim| drop(claim["annotations"].as_object_mut().unwrap().remove(name)));
        for (what, expected, claim) in [
            ("made for the VM", true, claim(&|_| ())),
            ("not in the status yet", true, claim(&|claim| claim["uid"] = json!("u-2"))),
            ("owned by the VM already", true, owned("VirtualMachine", "apple-uid")),
            ("given to the VM that has it", true, annotated(VM_ANNOTATION, json!("apple"))),
            ("kept of the VM before", false, annotated(MADE_FOR_ANNOTATION, json!("u-before"))),
            ("made by a person", false, without(MADE_FOR_ANNOTATION)),
            ("taken by another VM", false, annotated(BELONGS_TO_ANNOTATION, json!("web-p/u-web-p"))),
            ("given to another VM", false, annotated(VM_ANNOTATION, json!("web-p"))),
            ("of another owner too", false, owned("Job", "u-job")),
            ("a person's copy", false, claim(&|claim| claim["managedFields"][0]["manager"] = json!("kubectl"))),
            (
                "restored from a backup",
                false,
                claim(&|claim| claim["creationTimestamp"] = json!("2027-01-15T07:00:00Z")),
            ),
        ] {
            assert_eq!(goes_with(&vm(false), &claim), expected, "{what}");
        }
        assert!(!goes_with(&vm(true), &claim(&|_| ())), "not used any more");
    }

    #[test]
    fn a_claim_of_a_vm_with_which_it_may_be_deleted_is_marked_when_it_is_made() {
        let made_for = |annotation: &str, exists: bool| {
            let marked = vm(|vm| vm["metadata"]["annotations"] = json!({ annotation: "x" }));
            let observed = if exists { applied(&rendered(&new(), &nothing()), |_, _| ()) } else { nothing() };
            let objects = rendered(&marked, &observed);
            let claim = objects.iter().find(|object| object.key.name == CLAIM).unwrap().clone();
            // That the claim exists may be known only when it is to be made.
            let found = as_existing(&claim, &of_a_person(&|_| ()), false);
            assert_eq!(found.value["metadata"]["annotations"][MADE_FOR_ANNOTATION], Value::Null);
            claim.value["metadata"]["annotations"][MADE_FOR_ANNOTATION].clone()
        };
        for annotation in [UNUSED_ANNOTATION, PROTOTYPE_ANNOTATION] {
            assert_eq!(made_for(annotation, false), json!("apple-uid"), "{annotation}");
            assert_eq!(made_for(annotation, true), Value::Null, "{annotation}, and the claim exists");
        }
        assert_eq!(made_for("other", false), Value::Null);
    }

    #[test]
    fn a_claim_is_listed_as_a_former_disk_only_if_it_was_one() {
        let labels_alone = of_a_person(&labelled("apple"));
        assert!(!was_of(&new(), &labels_alone));
        assert!(was_of(&knows("u-person"), &labels_alone));
        assert!(was_of(&new(), &claim(&|_| ())));
        assert!(!was_of(&new(), &claim(&note("pear/u-pear"))));
    }

    #[test]
    fn of_two_claims_for_one_disk_the_vm_gets_none_unless_something_tells() {
        const FORMER: &str = "core-disk-apple-0";
        let both = |new: &dyn Fn(&mut Value), former: &dyn Fn(&mut Value), pod: Option<&str>| {
            let vm = vm(|_| ());
            let mut objects: Vec<_> = rendered(&vm, &nothing()).into_iter().filter(|it| it.key.name == CLAIM).collect();
            let mut other = objects[0].clone();
            other.key.name = FORMER.into();
            std::sync::Arc::make_mut(&mut other.value)["metadata"]["name"] = json!(FORMER);
            objects.push(other);
            if let Some(claim) = pod {
                let mut pod = rendered(&vm, &nothing()).into_iter().find(|it| it.key.is_pod()).unwrap();
                let volume = json!([{ "name": "d", "persistentVolumeClaim": { "claimName": claim } }]);
                std::sync::Arc::make_mut(&mut pod.value)["spec"]["volumes"] = volume;
                objects.push(pod);
            }
            let observed = applied(&objects, |kind, object| {
                let edit = if object["metadata"]["name"] == FORMER { former } else { new };
                if kind == "PersistentVolumeClaim" {
                    edit(&mut object["metadata"]);
                }
            });
            [CLAIM, FORMER].map(|name| whose(&vm, &observed, observed.claim(name).unwrap()))
        };
        let of_former_vm = note("apple/u-former");
        let of = |other: &str| Whose::Foreign(Foreign::OneOfTwo(other.to_owned()));
        let free = |metadata: &mut Value| {
            metadata.as_object_mut().unwrap().retain(|key, _| ["name", "namespace", "uid"].contains(&key.as_str()));
            metadata["annotations"][VM_ANNOTATION] = json!("apple");
        };
        assert_eq!(both(&of_former_vm, &of_former_vm, None), [of(FORMER), of(CLAIM)], "from two backups");
        assert_eq!(both(&free, &free, None), [of(FORMER), of(CLAIM)], "both are given");
        assert_eq!(both(&of_former_vm, &given_to("apple", &of_former_vm), None), [of(FORMER), Whose::Former]);
        assert_eq!(both(&free, &of_former_vm, None), [Whose::Free, of(CLAIM)]);
        assert_eq!(both(&|_| (), &of_former_vm, None), [Whose::Own, of(CLAIM)], "one is the VM's own");
        assert_eq!(both(&of_former_vm, &of_former_vm, Some(FORMER)), [of(FORMER), Whose::Former], "its Pod has one");
    }
}
