//! Whose an object is. Labels, names and texts alone prove nothing: anybody may write them.
//!
//! The first row that fits decides. "Gave" means that a field set of the manager has the owner's UID; the API server takes it out when another
//! client changes the owner.
//!
//! | an object | that has as owner | is |
//! |---|---|---|
//! | a Pod that the status of the VM names ([`is_named_by`]) | anything but another VM that the manager gave it | the VM's |
//! | any | a VM of the same name with another UID | the former VM's; the garbage collector deletes it |
//! | from the manager | an owner that the manager gave it: this VM, or another | the VM's, or not |
//! | from the manager | none, or one that somebody else gave it | the VM's, if the manager gave it the label with the VM's name |
//! | a Pod, from whomever else | this VM | the VM's, if it has the name of the Pod that templates render |
//! | what makes Pods, from the predecessor | this VM; or none, and the label names the VM | the VM's, if it has the VM's name |
//! | what makes Pods, of which nobody can say ([`Origin::Unrecorded`]) | this VM | the VM's, if it has all labels and the hash of an object that was rendered for the VM |
//! | any other, from the predecessor | this VM; or none, and the label names the VM | the VM's |
//! | any other, from others or of which nobody can say | this VM | the VM's |
//! | any other, from others or of which nobody can say | none | the VM's, if it has all labels and the hash of an object that was rendered for the VM: a backup brings it back so |
//! | any | any other | not the VM's |
//!
//! A Pod that is not proven to be the VM's ([`Object::is_given_to`]) and that the status of another VM names is that one's
//! ([`crate::cluster`] leaves it out).
//!
//! A Pod that something else made (a StatefulSet) is the VM's if that is ([`crate::plan::instances`]).

use kube::ResourceExt;

use super::{Json, Object};
use crate::{
    api::VirtualMachine,
    object::{CONTAINER_NAME, HASH_ANNOTATION, HELPER, INSTANCE_LABEL, ROLE_ANNOTATION, is_workload},
    ownership::origin::{Origin, has_name, has_owner},
};

/// Whose an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// The VM's. It owns the object or may adopt it: `kubectl delete --cascade=orphan` leaves objects without an owner, and a new VM of the same
    /// name continues with them.
    Vm,
    /// That of a deleted VM with the same name.
    Former,
    /// Somebody else's.
    Other,
}

/// Whether the VM's status names the Pod: its runner has reported last, or may report although it has another name than the VM.
pub fn is_named_by(vm: &VirtualMachine, pod_uid: &str) -> bool {
    let uids = vm.status.iter().flat_map(|status| [&status.pod_uid, &status.reporter_uid]).flatten();
    !pod_uid.is_empty() && uids.into_iter().any(|uid| uid == pod_uid)
}

impl Object {
    /// Decides by the table above. Templates render a Pod with the VM's name.
    pub fn whose(&self, vm: &VirtualMachine) -> Whose {
        self.whose_with(vm, &[vm.name_any()])
    }

    /// Decides by the table above. `pods`: the names of the Pods that templates render.
    pub fn whose_with(&self, vm: &VirtualMachine, pods: &[String]) -> Whose {
        let (name, uid) = (vm.name_any(), vm.uid().unwrap_or_default());
        let vms = |is_vms: bool| if is_vms { Whose::Vm } else { Whose::Other };
        let is_owned = self.is_owned_by(&uid);
        let has_given_owner = self.origin == Origin::Manager && self.has_given_owner();
        if self.key.is_pod() && is_named_by(vm, &self.uid) && (is_owned || !has_given_owner) {
            return Whose::Vm;
        }
        if !is_owned && self.owner_vm.as_ref() == Some(&name) {
            return Whose::Former;
        }
        let is_left = self.owners.is_empty() && self.vm() == Some(&name);
        match self.origin {
            Origin::Manager if has_given_owner => vms(self.is_given_to(vm)),
            Origin::Manager => vms(self.given_name() == Some(&name)),
            Origin::Predecessor | Origin::Other | Origin::Unrecorded if self.key.is_pod() => {
                vms(is_owned && pods.contains(&self.key.name))
            }
            Origin::Predecessor if is_workload(&self.key) => vms(self.key.name == name && (is_owned || is_left)),
            Origin::Predecessor => vms(is_owned || is_left),
            Origin::Unrecorded if is_workload(&self.key) => vms(is_owned && self.is_brought_back(&name)),
            Origin::Other if is_workload(&self.key) => Whose::Other,
            Origin::Other | Origin::Unrecorded => vms(is_owned || is_left && self.is_brought_back(&name)),
        }
    }

    /// Whether it is the VM's.
    pub fn is_of(&self, vm: &VirtualMachine) -> bool {
        self.whose(vm) == Whose::Vm
    }

    /// Whether the manager made the object and gave it the VM as its owner.
    pub fn is_given_to(&self, vm: &VirtualMachine) -> bool {
        let uid = vm.uid().unwrap_or_default();
        self.origin == Origin::Manager && self.is_owned_by(&uid) && self.has_given(&uid)
    }

    /// Whether the manager has made it as a Pod that helps the guest. What anybody else writes into the annotation says nothing.
    pub fn is_helper(&self) -> bool {
        let is_said = || self.annotations.get(ROLE_ANNOTATION).is_some_and(|role| role == HELPER);
        let field = format!("f:{ROLE_ANNOTATION}");
        let has_given = |fields: &Json| !fields.value()["f:metadata"]["f:annotations"][field.as_str()].is_null();
        let is_given = || self.origin == Origin::Manager && self.given().any(has_given);
        self.key.is_pod() && is_said() && is_given() && self.container(CONTAINER_NAME).is_none()
    }

    /// Whether the manager, or the predecessor, made the object for the VM: what is deleted when no template renders it any more. What only
    /// says so may be a copy that a person made.
    pub fn is_made_for(&self, vm: &VirtualMachine) -> bool {
        self.is_operators(vm) && self.is_of(vm) && self.is_owned_by(&vm.uid().unwrap_or_default())
    }

    /// Whether what may make Pods is the VM's, and not only owned by it: anybody may give an object an owner.
    pub fn is_maker_of(&self, vm: &VirtualMachine) -> bool {
        let is_restored = || {
            let is_owned = self.is_owned_by(&vm.uid().unwrap_or_default());
            self.origin == Origin::Unrecorded && is_owned && self.is_brought_back(&vm.name_any())
        };
        (self.is_operators(vm) || is_restored()) && self.is_of(vm)
    }

    /// Whether the manager made the object, or the predecessor: its field manager is any program's with its library, so its objects count only
    /// with the name that it gives them.
    fn is_operators(&self, vm: &VirtualMachine) -> bool {
        match self.origin {
            Origin::Manager => true,
            Origin::Predecessor => self.key.name == vm.name_any(),
            Origin::Unrecorded | Origin::Other => false,
        }
    }

    /// Whether the manager gave the object one of its owners.
    fn has_given_owner(&self) -> bool {
        self.owners.iter().any(|owner| self.has_given(owner))
    }

    /// Whether the manager gave the object the owner with that UID.
    fn has_given(&self, owner: &str) -> bool {
        self.given().any(|fields| has_owner(fields.text(), owner))
    }

    /// The VM's name in the label that the manager gave the object.
    fn given_name(&self) -> Option<&String> {
        self.labels.get(INSTANCE_LABEL).filter(|_| self.given().any(|fields| has_name(fields.text(), INSTANCE_LABEL)))
    }

    /// The field sets of the manager.
    fn given(&self) -> impl Iterator<Item = &Json> {
        [&self.owned, &self.patched].into_iter().flatten()
    }

    /// Whether it has everything that a backup keeps of an object that was rendered for the VM.
    fn is_brought_back(&self, vm: &str) -> bool {
        self.is_ours() && self.vm() == Some(vm) && self.annotations.contains_key(HASH_ANNOTATION)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::{
        object::VERSION_ANNOTATION,
        test_support::{applied, nothing, rendered, vm},
    };

    /// The VM's object of that kind as the manager applied it, changed by `edit`.
    fn object(kind: &str, edit: &dyn Fn(&mut Value)) -> Object {
        let objects: Vec<_> =
            rendered(&vm(|_| ()), &nothing()).into_iter().filter(|object| object.key.kind == kind).collect();
        let found = applied(&objects[..1], |_, object| edit(object));
        Object::clone(&found.objects[0])
    }

    fn owner(object: &mut Value, kind: &str, name: &str, uid: &str) {
        let api_version = if kind == "VirtualMachine" { "vmoperator.jdrupes.org/v1" } else { "apps/v1" };
        object["metadata"]["ownerReferences"] = json!([{
            "apiVersion": api_version, "kind": kind, "name": name, "uid": uid, "controller": kind != "VirtualMachine",
        }]);
    }

    fn free(object: &mut Value) {
        object["metadata"]["ownerReferences"] = json!([]);
    }

    fn written_by(object: &mut Value, manager: &str) {
        object["metadata"]["managedFields"][0]["manager"] = json!(manager);
    }

    /// As the VM-Operator in Java creates display secrets.
    fn java(object: &mut Value) {
        written_by(object, "Kubernetes Java Client");
        object["metadata"]["managedFields"][0]["operation"] = json!("Update");
    }

    /// With the entries of a backup.
    fn backed_up(object: &mut Value) {
        object["metadata"]["managedFields"][0]["time"] = json!("2027-01-14T07:00:00Z");
    }

    /// A second VM in front of its owners.
    fn owned_too(object: &mut Value, uid: &str) {
        let owners = object["metadata"]["ownerReferences"].as_array_mut().unwrap();
        let second = json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "second", "uid": uid });
        owners.insert(0, second);
    }

    fn reset(object: &mut Value) {
        object["metadata"]["managedFields"] = json!([]);
    }

    /// The label names another VM, and whoever wrote that owns the field.
    fn relabelled(object: &mut Value) {
        object["metadata"]["labels"][INSTANCE_LABEL] = json!("pear");
        let labels = object.pointer_mut("/metadata/managedFields/0/fieldsV1/f:metadata/f:labels");
        if let Some(Value::Object(labels)) = labels {
            labels.remove(&format!("f:{INSTANCE_LABEL}"));
        }
    }

    #[test]
    fn the_table() {
        use Whose::{Former, Other, Vm};
        type Edit = fn(&mut Value);
        let rows: [(&str, Edit, Whose, Whose); 29] = [
            ("as it was applied", |_| (), Vm, Vm),
            ("orphaned", free, Vm, Vm),
            ("relabelled", relabelled, Vm, Vm),
            (
                "orphaned and relabelled",
                |it| {
                    free(it);
                    relabelled(it)
                },
                Other,
                Other,
            ),
            ("given to another VM", |it| owner(it, "VirtualMachine", "pear", "pear-uid"), Vm, Vm),
            (
                "given to another VM and relabelled",
                |it| {
                    owner(it, "VirtualMachine", "pear", "pear-uid");
                    relabelled(it)
                },
                Other,
                Other,
            ),
            ("given to a second VM", |it| owned_too(it, "pear-uid"), Vm, Vm),
            (
                "of another VM, given to this one, too",
                |it| {
                    *it = serde_json::from_str(&it.to_string().replace("apple-uid", "pear-uid")).unwrap();
                    owned_too(it, "apple-uid");
                },
                Other,
                Other,
            ),
            (
                "of another VM, reset and given to this one",
                |it| {
                    reset(it);
                    it["metadata"]["name"] = json!("pear");
                },
                Other,
                Vm,
            ),
            (
                "of another VM, without owner and label, with this VM's name",
                |it| {
                    free(it);
                    relabelled(it);
                    it["metadata"]["labels"] = json!({});
                },
                Other,
                Other,
            ),
            (
                "brought back by Velero",
                |it| {
                    backed_up(it);
                    free(it)
                },
                Other,
                Vm,
            ),
            (
                "brought back by Velero beside it, with its owner",
                |it| {
                    backed_up(it);
                    it["metadata"]["name"] = json!("apple-x")
                },
                Other,
                Vm,
            ),
            ("adopted by a controller", |it| owner(it, "ReplicaSet", "x", "x"), Vm, Vm),
            ("of a former VM", |it| owner(it, "VirtualMachine", "apple", "former"), Former, Former),
            (
                "of a former VM, reset",
                |it| {
                    reset(it);
                    owner(it, "VirtualMachine", "apple", "former")
                },
                Former,
                Former,
            ),
            ("reset", reset, Vm, Vm),
            (
                "reset, orphaned",
                |it| {
                    reset(it);
                    free(it)
                },
                Other,
                Vm,
            ),
            (
                "reset, given to another VM",
                |it| {
                    reset(it);
                    owner(it, "VirtualMachine", "pear", "pear-uid")
                },
                Other,
                Other,
            ),
            ("the predecessor's", |it| written_by(it, "kubernetes-java-kubectl-apply"), Vm, Vm),
            (
                "the predecessor's, orphaned",
                |it| {
                    written_by(it, "kubernetes-java-kubectl-apply");
                    free(it)
                },
                Other,
                Vm,
            ),
            (
                "the predecessor's, of another VM",
                |it| {
                    written_by(it, "kubernetes-java-kubectl-apply");
                    free(it);
                    relabelled(it)
                },
                Other,
                Other,
            ),
            (
                "made by another program with the predecessor's library",
                |it| {
                    java(it);
                    free(it);
                    it["metadata"]["annotations"] = json!({});
                },
                Other,
                Other,
            ),
            (
                "copied with its owner, and reset",
                |it| {
                    reset(it);
                    it["metadata"]["name"] = json!("copy")
                },
                Other,
                Vm,
            ),
            (
                "copied with its owner",
                |it| {
                    written_by(it, "kubectl-create");
                    it["metadata"]["name"] = json!("copy")
                },
                Other,
                Vm,
            ),
            ("made again with its owner", |it| written_by(it, "kubectl-replace"), Vm, Vm),
            (
                "copied without its owner",
                |it| {
                    written_by(it, "kubectl-create");
                    free(it)
                },
                Other,
                Vm,
            ),
            (
                "with our labels only",
                |it| {
                    written_by(it, "kubectl-create");
                    free(it);
                    it["metadata"]["annotations"] = json!({ VERSION_ANNOTATION: "1" })
                },
                Other,
                Other,
            ),
            (
                "of a person's workload",
                |it| {
                    written_by(it, "kube-controller-manager");
                    owner(it, "Job", "x", "x")
                },
                Other,
                Other,
            ),
            (
                "somebody else's",
                |it| {
                    written_by(it, "kubectl");
                    free(it);
                    it["metadata"]["labels"] = json!({})
                },
                Other,
                Other,
            ),
        ];
        for (what, edit, pod, map) in rows {
            assert_eq!(object("Pod", &edit).whose(&vm(|_| ())), pod, "a Pod {what}");
            assert_eq!(object("ConfigMap", &edit).whose(&vm(|_| ())), map, "a ConfigMap {what}");
        }
    }

    #[test]
    fn a_pod_that_the_status_names_is_the_vms_unless_the_manager_gave_it_to_another() {
        for field in ["podUid", "reporterUid"] {
            let vm = vm(|vm| vm["status"] = json!({ field: "Pod-apple" }));
            let lost = |it: &mut Value| {
                reset(it);
                free(it);
                it["metadata"]["labels"] = json!({});
                it["metadata"]["name"] = json!("x");
            };
            assert!(object("Pod", &lost).is_of(&vm));
            assert!(object("Pod", &|it| owner(it, "VirtualMachine", "pear", "pear-uid")).is_of(&vm));
            let of_pear = |it: &mut Value| {
                *it = serde_json::from_str(&it.to_string().replace("apple-uid", "pear-uid")).unwrap();
            };
            assert!(!object("Pod", &of_pear).is_of(&vm), "its report is not true");
        }
    }

    #[test]
    fn only_what_is_proved_to_be_made_for_the_vm_is_deleted() {
        let is_made = |edit: &dyn Fn(&mut Value)| object("ConfigMap", edit).is_made_for(&vm(|_| ()));
        assert!(is_made(&|_| ()) && is_made(&|it| written_by(it, "kubernetes-java-kubectl-apply")));
        assert!(!is_made(&|it| written_by(it, "kubectl-create")), "a copy with labels and owner");
        assert!(!is_made(&reset) && !is_made(&free) && !is_made(&java) && !is_made(&backed_up));
        let otherwise = |it: &mut Value| {
            written_by(it, "kubernetes-java-kubectl-apply");
            it["metadata"]["name"] = json!("x");
        };
        assert!(!is_made(&otherwise), "the predecessor's objects have the VM's name");
    }

    #[test]
    fn a_pod_without_proof_is_the_vms_only_with_the_name_of_the_rendered_one() {
        for (names, expected) in [(&["apple"][..], Whose::Vm), (&["apple-x"], Whose::Other), (&[], Whose::Other)] {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            for edit in [reset, backed_up, java, |it: &mut Value| written_by(it, "kubectl-replace")] {
                assert_eq!(object("Pod", &edit).whose_with(&vm(|_| ()), &names), expected);
                let named = vm(|vm| vm["status"] = json!({ "reporterUid": "Pod-apple" }));
                assert_eq!(object("Pod", &edit).whose_with(&named, &names), Whose::Vm);
            }
            assert_eq!(object("Pod", &|_| ()).whose_with(&vm(|_| ()), &names), Whose::Vm);
        }
    }

    #[test]
    fn what_makes_pods_is_the_vms_only_if_it_is_proved() {
        let of_kind = |edit: &dyn Fn(&mut Value)| {
            let mut found = object("ConfigMap", edit);
            (found.key.api_version, found.key.kind) = ("apps/v1".into(), "StatefulSet".into());
            (found.is_maker_of(&vm(|_| ())), found.is_of(&vm(|_| ())))
        };
        let both = |is: bool| (is, is);
        assert_eq!(of_kind(&|_| ()), both(true));
        assert_eq!(of_kind(&free), both(true), "its label is the manager's");
        assert_eq!(of_kind(&|it| written_by(it, "kubernetes-java-kubectl-apply")), both(true));
        assert_eq!(of_kind(&reset), both(true), "it has everything");
        let reset_without_hash = |it: &mut Value| {
            reset(it);
            it["metadata"]["annotations"] = json!({});
        };
        assert_eq!(of_kind(&reset_without_hash), both(false));
        assert_eq!(of_kind(&|it| written_by(it, "kubectl-create")), both(false), "owner, labels and hash are copied");
        assert_eq!(of_kind(&java), both(false));
        assert_eq!(of_kind(&backed_up), both(false));
    }
}
