//! A document that a template rendered becomes an object: it is checked, and gets labels, an owner and a hash.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use super::{error::OutputError, pod::runs_guest};
use crate::{
    api::VirtualMachine,
    config::Kinds,
    object::{
        HASH_ANNOTATION, HELPER, INSTANCE_LABEL, LIFETIME_ANNOTATION, Lifetime, ObjectKey, ROLE_ANNOTATION, Rendered,
        UPDATE_ANNOTATION, Update, VERSION_ANNOTATION, labels,
    },
    ownership::is_operators_name,
};

/// The fields of `metadata` that no template may set.
const RESERVED_METADATA: [&str; 6] =
    ["uid", "resourceVersion", "managedFields", "generateName", "finalizers", "ownerReferences"];

/// What all objects of a VM have in common, and which kinds they may be.
pub(super) struct Scope<'a> {
    namespace: Option<String>,
    labels: BTreeMap<String, String>,
    owner: Option<OwnerReference>,
    /// The name of the container in which QEMU runs.
    runner: String,
    kinds: &'a Kinds,
}

impl<'a> Scope<'a> {
    pub(super) fn of(vm: &VirtualMachine, runner: String, kinds: &'a Kinds) -> Self {
        let owner = vm.controller_owner_ref(&());
        Self { namespace: vm.namespace(), labels: labels(&vm.name_any()), owner, runner, kinds }
    }

    /// Refuses what a template may not set.
    fn check(&self, key: &ObjectKey, value: &Value) -> Result<(), OutputError> {
        if !self.kinds.allow(&key.api_version, &key.kind) {
            let message = format!(
                "{key} is of a kind that templates may not make: {}; the manager's configuration has the list, as allowedKinds",
                Kinds::name(&key.api_version, &key.kind)
            );
            return Err(OutputError::at(format!("kind: {}", key.kind), message));
        }
        if let Some(namespace) =
            text(value, &["metadata", "namespace"]).filter(|it| Some(*it) != self.namespace.as_deref())
        {
            return Err(OutputError::at(namespace, format!("{key} is in another namespace ({namespace}) than the VM")));
        }
        // Who writes VMs must not write these: by default a VM's ConfigMap and Service have the VM's name.
        if is_operators_name(&key.name) {
            let message = format!("{key} has the name of an object of the operator: give the VM another name");
            return Err(OutputError::at(key.name.clone(), message));
        }
        if let Some(field) = RESERVED_METADATA.into_iter().find(|field| value["metadata"].get(field).is_some()) {
            return Err(OutputError::at(
                field,
                format!("{key} sets metadata.{field}, which only the operator may set"),
            ));
        }
        let labels = &value["metadata"]["labels"];
        let differs = |(name, label): &(&String, &String)| labels.get(*name).is_some_and(|set| set != label.as_str());
        match self.labels.iter().find(differs) {
            Some((name, label)) => Err(OutputError::at(
                name,
                format!("{key} sets the label {name}, which only the operator may set, to {label:?}"),
            )),
            None => Ok(()),
        }
    }

    /// Whether the object is a Pod that helps the guest.
    fn is_helper(&self, key: &ObjectKey, value: &Value) -> Result<bool, OutputError> {
        let Some(role) = value["metadata"]["annotations"].get(ROLE_ANNOTATION) else { return Ok(false) };
        let refused = |why: &str| Err(OutputError::at(ROLE_ANNOTATION, format!("{key}: {why}")));
        match role.as_str() {
            _ if !key.is_pod() => refused(&format!("{ROLE_ANNOTATION} is for Pods")),
            Some(HELPER) if runs_guest(key, value, &self.runner) => {
                refused(&format!("it has the container {}, so it runs the guest and is no helper", self.runner))
            }
            Some(HELPER) if self.labels.get(INSTANCE_LABEL) == Some(&key.name) => {
                refused("a helper must have another name than its VM")
            }
            Some(HELPER) => Ok(true),
            _ => refused(&format!("{ROLE_ANNOTATION} is {HELPER}, not {role}")),
        }
    }

    /// Sets namespace, labels and owner. An object that is kept has no owner, so that Kubernetes does not delete it with the VM.
    fn complete(&self, value: &mut Value, lifetime: Lifetime) {
        let metadata = map(value, "metadata");
        metadata.insert("namespace".into(), json!(self.namespace));
        let labels = map_of(metadata, "labels");
        labels.extend(self.labels.iter().map(|(name, label)| (name.clone(), json!(label))));
        let owner = self.owner.clone().filter(|_| lifetime != Lifetime::Keep).map(|owner| OwnerReference {
            // A deletion of the VM in the foreground waits for what runs its guest.
            block_owner_deletion: (lifetime == Lifetime::Running).then_some(true),
            ..owner
        });
        if let Some(owner) = owner {
            metadata.insert("ownerReferences".into(), json!([owner]));
        }
    }
}

/// Checks and completes a document that the file `template` rendered.
///
/// # Errors
/// If it has no name, or sets what a template may not set.
pub(super) fn object(template: &str, mut value: Value, scope: &Scope<'_>) -> Result<Rendered, OutputError> {
    let key = key(&value)?;
    scope.check(&key, &value)?;
    let (mut lifetime, mut update) = (lifetime(&key, &value)?, update(&key, &value)?);
    let is_helper = scope.is_helper(&key, &value)?;
    if !key.is_pod() && runs_guest(&key, &value, &scope.runner) {
        (lifetime, update) = (Lifetime::Running, Update::AtStart);
        follow_the_guest(&key, &mut value);
    }
    scope.complete(&mut value, lifetime);
    // A patch may have set one, and the namespace is null in a VM from a file.
    drop_nulls(&mut value);
    let hash = hash(&mut value, update);
    let annotations = map_of(map(&mut value, "metadata"), "annotations");
    annotations.insert(HASH_ANNOTATION.into(), json!(hash));
    // Not part of the hash, so that a new release of the manager that renders the same writes nothing.
    annotations.insert(VERSION_ANNOTATION.into(), json!(env!("CARGO_PKG_VERSION")));
    Ok(Rendered {
        key,
        template: template.to_owned(),
        name: String::new(),
        patches: Vec::new(),
        runner: scope.runner.clone(),
        lifetime,
        update,
        is_helper,
        hash,
        value: Arc::new(value),
    })
}

/// What makes the guest's Pod exists and changes as that Pod does, whatever its template says, and says so in the cluster. A StatefulSet
/// leaves its Pod alone when it changes, unless its template wants otherwise, which is refused later.
fn follow_the_guest(key: &ObjectKey, value: &mut Value) {
    let annotations = map_of(map(value, "metadata"), "annotations");
    annotations.insert(LIFETIME_ANNOTATION.into(), json!("running"));
    annotations.insert(UPDATE_ANNOTATION.into(), json!("at-start"));
    if key.kind == "StatefulSet" && key.group() == Some("apps") {
        let strategy = map_of(map(value, "spec"), "updateStrategy");
        if strategy.is_empty() {
            strategy.insert("type".into(), json!("OnDelete"));
        }
    }
}

fn text<'a>(value: &'a Value, path: &[&str]) -> Option<&'a str> {
    let value = path.iter().try_fold(value, |value, field| value.get(field));
    value.and_then(Value::as_str).filter(|text| !text.is_empty())
}

fn key(value: &Value) -> Result<ObjectKey, OutputError> {
    let field = |path: &[&str]| {
        text(value, path).map(str::to_owned).ok_or_else(|| {
            let kind = text(value, &["kind"]).map(|kind| format!("kind: {kind}")).unwrap_or_default();
            OutputError::at(kind, format!("a document has no {}", path.join(".")))
        })
    };
    Ok(ObjectKey { api_version: field(&["apiVersion"])?, kind: field(&["kind"])?, name: field(&["metadata", "name"])? })
}

fn annotation<'a>(value: &'a Value, name: &str) -> Option<&'a str> {
    value["metadata"]["annotations"].get(name).and_then(Value::as_str)
}

/// The annotation, but for Pods and claims: a template that forgets it must not lose data or stop a guest. What makes the guest's Pod is treated
/// in [`follow_the_guest`].
fn lifetime(key: &ObjectKey, value: &Value) -> Result<Lifetime, OutputError> {
    let lifetime = match annotation(value, LIFETIME_ANNOTATION) {
        None | Some("vm") => Lifetime::Vm,
        Some("running") => Lifetime::Running,
        Some("keep") => Lifetime::Keep,
        Some(other) => {
            let message = format!("{key}: {LIFETIME_ANNOTATION} is vm, running or keep, not {other:?}");
            return Err(OutputError::at(LIFETIME_ANNOTATION, message));
        }
    };
    Ok(match key {
        key if key.is_claim() => Lifetime::Keep,
        key if key.is_pod() => Lifetime::Running,
        _ => lifetime,
    })
}

/// The annotation, but for Pods, as [`lifetime`].
fn update(key: &ObjectKey, value: &Value) -> Result<Update, OutputError> {
    let update = match annotation(value, UPDATE_ANNOTATION) {
        None | Some("live") => Update::Live,
        Some("at-start") => Update::AtStart,
        Some("once") => Update::Once,
        Some(other) => {
            let message = format!("{key}: {UPDATE_ANNOTATION} is live, at-start or once, not {other:?}");
            return Err(OutputError::at(UPDATE_ANNOTATION, message));
        }
    };
    Ok(if key.is_pod() { Update::AtStart } else { update })
}

/// The hash that decides whether an object must be applied again. It covers the whole object. For an object that changes at start it
/// leaves out labels and annotations, which are compared one by one. `value` is the same afterwards.
fn hash(value: &mut Value, update: Update) -> String {
    // A VM that is deleted without its Pod and made again owns that Pod without a restart, so the owner is left out too.
    const APART: [&str; 3] = ["labels", "annotations", "ownerReferences"];
    // `to_string` of serde_json is twice as fast as `Display`, and it can't fail for a `Value`.
    let digest = |value: &Value| digest(&serde_json::to_string(value).unwrap_or_else(|_| value.to_string()));
    if update != Update::AtStart {
        return digest(value);
    }
    let metadata = map(value, "metadata");
    let apart = APART.map(|field| metadata.remove(field).map(|value| (field.to_owned(), value)));
    let hash = digest(value);
    map(value, "metadata").extend(apart.into_iter().flatten());
    hash
}

/// The first 128 bits of SHA-256 as hexadecimal digits.
pub fn digest(text: &str) -> String {
    let bytes = Sha256::digest(text).into_iter().take(16);
    let mut digits = String::with_capacity(32);
    digits.extend(bytes.flat_map(|byte| [byte >> 4, byte & 15]).filter_map(|digit| char::from_digit(digit.into(), 16)));
    digits
}

fn map<'a>(value: &'a mut Value, field: &str) -> &'a mut Map<String, Value> {
    if !value.is_object() {
        *value = json!({});
    }
    let Value::Object(object) = value else { unreachable!("made an object above") };
    map_of(object, field)
}

fn map_of<'a>(object: &'a mut Map<String, Value>, field: &str) -> &'a mut Map<String, Value> {
    let value = object.entry(field).or_insert_with(|| json!({}));
    if !value.is_object() {
        *value = json!({});
    }
    let Value::Object(map) = value else { unreachable!("made an object above") };
    map
}

/// Removes map entries that are null, because an apply with null owns an empty field. So a template can write
/// `nodeName: {{ spec.nodeName }}` whether or not the VM has one.
pub(super) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // `retain` is slow, and few maps have such an entry.
            if map.values().any(Value::is_null) {
                map.retain(|_, value| !value.is_null());
            }
            map.values_mut().for_each(drop_nulls);
        }
        Value::Array(list) => list.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::{super::read::documents, *};

    fn scope() -> Scope<'static> {
        let mut vm: VirtualMachine = serde_json::from_value(json!({
            "metadata": { "name": "apple", "namespace": "orchard", "uid": "u-1" },
            "spec": { "vm": { "maximumCpus": 1 } },
        }))
        .unwrap();
        vm.metadata.uid = Some("u-1".into());
        static KINDS: std::sync::LazyLock<Kinds> = std::sync::LazyLock::new(Kinds::default);
        Scope::of(&vm, "apple".to_owned(), &KINDS)
    }

    fn one(text: &str) -> Result<Rendered, String> {
        let document = documents(text).map(|mut documents| documents.remove(0));
        document.and_then(|value| object("t.yaml.j2", value, &scope())).map_err(|error| error.message)
    }

    const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata: {name: apple}\n";

    #[test]
    fn an_object_gets_labels_an_owner_and_a_hash() {
        let pod = one(&format!("{POD}spec: {{nodeName: null, a: [{{b: null}}]}}\n")).unwrap();
        insta::assert_json_snapshot!(pod.value, { ".metadata.annotations" => "(annotations)" }, @r#"
        {
          "apiVersion": "v1",
          "kind": "Pod",
          "metadata": {
            "annotations": "(annotations)",
            "labels": {
              "app.kubernetes.io/instance": "apple",
              "app.kubernetes.io/managed-by": "vm-operator",
              "app.kubernetes.io/name": "vm-runner"
            },
            "name": "apple",
            "namespace": "orchard",
            "ownerReferences": [
              {
                "apiVersion": "vmoperator.jdrupes.org/v1",
                "blockOwnerDeletion": true,
                "controller": true,
                "kind": "VirtualMachine",
                "name": "apple",
                "uid": "u-1"
              }
            ]
          },
          "spec": {
            "a": [
              {}
            ]
          }
        }
        "#);
        assert_eq!((pod.lifetime, pod.update), (Lifetime::Running, Update::AtStart));
        assert_eq!(pod.value["metadata"]["annotations"][HASH_ANNOTATION], json!(pod.hash));
    }

    #[test]
    fn what_a_patch_sets_to_null_is_left_out() {
        let patched = json!({
            "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "apple" },
            "spec": { "nodeName": null, "volumes": [{ "name": "a", "emptyDir": null }] },
        });
        let pod = object("t.yaml.j2", patched, &scope()).unwrap();
        assert_eq!(pod.value["spec"], json!({ "volumes": [{ "name": "a" }] }));
    }

    #[test]
    fn a_claim_is_kept_whatever_the_template_says() {
        let text = "apiVersion: v1\nkind: PersistentVolumeClaim\nmetadata:\n  name: a\n  annotations: {vmoperator.jdrupes.org/lifetime: running}\n";
        let claim = one(text).unwrap();
        assert_eq!(claim.lifetime, Lifetime::Keep);
        assert_eq!(claim.value["metadata"].get("ownerReferences"), None);
    }

    #[test]
    fn what_makes_the_guests_pod_follows_it_whatever_the_template_says() {
        let maker = |types: &str, annotations: &str, container: &str, more: &str| {
            let text = format!(
                "{types}\nmetadata: {{name: a, annotations: {{{annotations}}}}}\nspec:\n  {more}\n  template: {{spec: {{containers: [{{name: {container}}}]}}}}\n"
            );
            one(&text).unwrap()
        };
        let stateful = "apiVersion: apps/v1\nkind: StatefulSet";
        let (keep, once) = ("vmoperator.jdrupes.org/lifetime: keep", "vmoperator.jdrupes.org/update: once");
        for annotations in ["", keep, once, "vmoperator.jdrupes.org/lifetime: vm, vmoperator.jdrupes.org/update: live"]
        {
            for container in ["vm-runner", "apple"] {
                let made = maker(stateful, annotations, container, "");
                assert_eq!((made.lifetime, made.update), (Lifetime::Running, Update::AtStart), "{annotations}");
                assert_eq!(annotation(&made.value, LIFETIME_ANNOTATION), Some("running"));
                assert_eq!(annotation(&made.value, UPDATE_ANNOTATION), Some("at-start"));
                assert!(made.value["metadata"]["ownerReferences"].is_array(), "it goes with the VM");
                assert_eq!(made.value["spec"]["updateStrategy"], json!({ "type": "OnDelete" }));
                assert_eq!(made.hash, maker(stateful, "", container, "updateStrategy: {type: OnDelete}").hash);
            }
        }
        let deep = "apiVersion: cilium.io/v1\nkind: Set\nmetadata: {name: a}\nspec: {pods: [{podTemplate: {containers: [{name: vm-runner}]}}]}\n";
        assert_eq!(one(deep).unwrap().lifetime, Lifetime::Running);
        let rolling = maker(stateful, "", "vm-runner", "updateStrategy: {type: RollingUpdate}");
        assert_eq!(rolling.value["spec"]["updateStrategy"]["type"], "RollingUpdate", "for the refusal");
        let helper = maker(stateful, keep, "helper", "");
        assert_eq!((helper.lifetime, helper.update), (Lifetime::Keep, Update::Live));
        assert_eq!(helper.value["spec"].get("updateStrategy"), None);
    }

    #[test]
    fn a_pods_hash_is_not_about_labels_and_annotations() {
        let plain = one(POD).unwrap();
        let labelled =
            one("apiVersion: v1\nkind: Pod\nmetadata: {name: apple, labels: {a: b}, annotations: {c: d}}\n").unwrap();
        let other = one(&format!("{POD}spec: {{nodeName: n}}\n")).unwrap();
        assert_eq!(plain.hash, labelled.hash);
        assert_ne!(plain.hash, other.hash);
    }

    #[test]
    fn a_document_that_templates_may_not_make_is_refused_with_the_reason() {
        insta::assert_snapshot!(one("a: [1\nb: 2\n").unwrap_err(), @"the output is not YAML: did not find expected ',' or ']' at line 2 column 2, while parsing a flow sequence at line 1 column 4 (line 2 of the output: b: 2)");
        insta::assert_snapshot!(one("a: 1\na: 2\n").unwrap_err(), @r#"the output is not YAML: the key "a" occurs twice"#);
        insta::assert_snapshot!(one("just text\n").unwrap_err(), @"a document has no apiVersion");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {}\n").unwrap_err(), @"a document has no metadata.name");
        for (kind, name) in [
            ("ConfigMap", "vm-operator"),
            ("ConfigMap", "vm-operator-templates"),
            ("ConfigMap", "vm-operator-templates-gpu"),
            ("ConfigMap", "vm-operator-in-force-desktop"),
            ("ConfigMap", "vm-operator-history.1234"),
            ("Service", "vm-operator-web"),
            ("Secret", "vm-operator-web"),
        ] {
            let error = one(&format!("apiVersion: v1\nkind: {kind}\nmetadata: {{name: {name}}}\n")).unwrap_err();
            assert!(error.to_string().contains("has the name of an object of the operator"), "{error}");
        }
        assert!(one("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: vm-operators}\n").is_ok());
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: other}\n").unwrap_err(), @"Pod a is in another namespace (other) than the VM");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {name: a, finalizers: [x]}\n").unwrap_err(), @"Pod a sets metadata.finalizers, which only the operator may set");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {name: a, annotations: {vmoperator.jdrupes.org/lifetime: ever}}\n").unwrap_err(), @r#"Pod a: vmoperator.jdrupes.org/lifetime is vm, running or keep, not "ever""#);
    }
}
