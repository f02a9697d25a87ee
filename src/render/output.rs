//! From what was read to objects: whose they are, how they live, and what is refused.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource, ResourceExt};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};

use crate::{
    api::VirtualMachine,
    config::Kinds,
    object::{
        HASH_ANNOTATION, LIFETIME_ANNOTATION, Lifetime, ObjectKey, Rendered, UPDATE_ANNOTATION, Update,
        VERSION_ANNOTATION, labels,
    },
};

/// Whose objects they are, and which they may be.
pub(super) struct Scope<'a> {
    namespace: Option<String>,
    labels: BTreeMap<String, String>,
    owner: Option<OwnerReference>,
    kinds: &'a Kinds,
}

impl<'a> Scope<'a> {
    pub(super) fn of(vm: &VirtualMachine, kinds: &'a Kinds) -> Self {
        let owner = vm.controller_owner_ref(&()).map(|mut owner| {
            // A blocking reference would ask for a right on the machine's finalizers and gains nothing here.
            owner.block_owner_deletion = None;
            owner
        });
        Self { namespace: vm.namespace(), labels: labels(&vm.name_any()), owner, kinds }
    }
}

/// What is wrong with what a template rendered.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// What it is.
    pub message: String,
    /// Text that is near it in the output, and so probably in the template.
    pub near: String,
    /// Whether it is the last of several such places.
    pub last: bool,
}

/// Makes an object complete: labels, owner, hash.
///
/// # Errors
/// If it has no name, or if it is one that templates may not make.
pub(super) fn object(template: &str, mut value: Value, scope: &Scope<'_>) -> Result<Rendered, Wrong> {
    let refused = |near: &str, message: String| Wrong { message, near: near.to_owned(), last: false };
    let text = |path: &[&str]| {
        let value = path.iter().try_fold(&value, |value, field| value.get(field));
        value.and_then(Value::as_str).filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let field = |path: &[&str]| {
        text(path).ok_or_else(|| {
            let near = text(&["kind"]).map(|kind| format!("kind: {kind}")).unwrap_or_default();
            refused(&near, format!("a document has no {}", path.join(".")))
        })
    };
    let key = ObjectKey {
        api_version: field(&["apiVersion"])?,
        kind: field(&["kind"])?,
        name: field(&["metadata", "name"])?,
    };
    if !scope.kinds.allow(&key.api_version, &key.kind) {
        let message = format!(
            "{key} is of a kind that templates may not make: {}; the manager's configuration has the list, as allowedKinds",
            Kinds::name(&key.api_version, &key.kind)
        );
        return Err(refused(&format!("kind: {}", key.kind), message));
    }
    if let Some(namespace) = text(&["metadata", "namespace"]).filter(|name| Some(name) != scope.namespace.as_ref()) {
        return Err(refused(&namespace, format!("{key} is in another namespace ({namespace}) than the machine")));
    }
    for forbidden in ["uid", "resourceVersion", "managedFields", "generateName", "finalizers", "ownerReferences"] {
        if value["metadata"].get(forbidden).is_some() {
            return Err(refused(forbidden, format!("{key} sets metadata.{forbidden}, which is the operator's to set")));
        }
    }
    let wrong = scope.labels.iter().find(|(name, label)| {
        value["metadata"]["labels"].get(*name).is_some_and(|found| found.as_str() != Some(label.as_str()))
    });
    if let Some((name, label)) = wrong {
        let message = format!("{key} sets the label {name}, which is the operator's and must stay {label:?}");
        return Err(refused(name, message));
    }
    let annotation = |name: &str| value["metadata"]["annotations"].get(name).and_then(Value::as_str);
    let lifetime = match annotation(LIFETIME_ANNOTATION) {
        None | Some("vm") => Lifetime::Vm,
        Some("running") => Lifetime::Running,
        Some("keep") => Lifetime::Keep,
        Some(other) => {
            return Err(refused(
                LIFETIME_ANNOTATION,
                format!("{key}: {LIFETIME_ANNOTATION} is vm, running or keep, not {other:?}"),
            ));
        }
    };
    let update = match annotation(UPDATE_ANNOTATION) {
        None | Some("live") => Update::Live,
        Some("at-start") => Update::AtStart,
        Some("once") => Update::Once,
        Some(other) => {
            return Err(refused(
                UPDATE_ANNOTATION,
                format!("{key}: {UPDATE_ANNOTATION} is live, at-start or once, not {other:?}"),
            ));
        }
    };
    // A template that forgets them must neither kill a guest nor lose data.
    let lifetime = if key.is_claim() {
        Lifetime::Keep
    } else if key.is_pod() {
        Lifetime::Running
    } else {
        lifetime
    };
    let update = if key.is_pod() { Update::AtStart } else { update };

    let metadata = map(&mut value, "metadata");
    metadata.insert("namespace".into(), json!(scope.namespace));
    let labels = map_of(metadata, "labels");
    for (name, label) in &scope.labels {
        labels.insert(name.clone(), json!(label));
    }
    if lifetime != Lifetime::Keep
        && let Some(owner) = &scope.owner
    {
        metadata.insert("ownerReferences".into(), json!([owner]));
    }
    // Of patches, or of a machine without a namespace; what was read has none.
    drop_nulls(&mut value);
    let hash = hash(&mut value, update);
    let annotations = map_of(map(&mut value, "metadata"), "annotations");
    annotations.insert(HASH_ANNOTATION.into(), json!(hash));
    // Not part of the hash: a new release of the manager that renders the same writes nothing.
    annotations.insert(VERSION_ANNOTATION.into(), json!(env!("CARGO_PKG_VERSION")));
    Ok(Rendered {
        key,
        template: template.to_owned(),
        name: String::new(),
        patches: Vec::new(),
        lifetime,
        update,
        hash,
        value: Arc::new(value),
    })
}

/// The hash of what makes an object new: all of it or, for an object that changes at start, all but labels and
/// annotations, which are compared one by one. The object is the same afterwards.
fn hash(value: &mut Value, update: Update) -> String {
    // A machine that was deleted without its Pod and made again owns it without a restart.
    const APART: [&str; 3] = ["labels", "annotations", "ownerReferences"];
    // Twice as fast as by `Display`, and nothing of a value can't be written.
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

/// Takes out map entries that are null: to apply null means to own an empty field. So a template can write
/// `nodeName: {{ spec.nodeName }}` whether or not there is one.
pub(super) fn drop_nulls(value: &mut Value) {
    match value {
        Value::Object(map) => {
            // `retain` is slow, and hardly ever is there something to take out.
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
        Scope::of(&vm, &KINDS)
    }

    fn one(text: &str) -> Result<Rendered, String> {
        let document = documents(text).map(|mut documents| documents.remove(0));
        document.and_then(|value| object("t.yaml.j2", value, &scope())).map_err(|wrong| wrong.message)
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
    fn a_pods_hash_is_not_about_labels_and_annotations() {
        let plain = one(POD).unwrap();
        let labelled =
            one("apiVersion: v1\nkind: Pod\nmetadata: {name: apple, labels: {a: b}, annotations: {c: d}}\n").unwrap();
        let other = one(&format!("{POD}spec: {{nodeName: n}}\n")).unwrap();
        assert_eq!(plain.hash, labelled.hash);
        assert_ne!(plain.hash, other.hash);
    }

    #[test]
    fn what_is_refused() {
        insta::assert_snapshot!(one("a: [1\nb: 2\n").unwrap_err(), @"the output is not YAML: did not find expected ',' or ']' at line 2 column 2, while parsing a flow sequence at line 1 column 4 (line 2 of the output: b: 2)");
        insta::assert_snapshot!(one("a: 1\na: 2\n").unwrap_err(), @r#"the output is not YAML: the key "a" is there twice"#);
        insta::assert_snapshot!(one("just text\n").unwrap_err(), @"a document has no apiVersion");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {}\n").unwrap_err(), @"a document has no metadata.name");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {name: a, namespace: other}\n").unwrap_err(), @"Pod a is in another namespace (other) than the machine");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {name: a, finalizers: [x]}\n").unwrap_err(), @"Pod a sets metadata.finalizers, which is the operator's to set");
        insta::assert_snapshot!(one("apiVersion: v1\nkind: Pod\nmetadata: {name: a, annotations: {vmoperator.jdrupes.org/lifetime: ever}}\n").unwrap_err(), @r#"Pod a: vmoperator.jdrupes.org/lifetime is vm, running or keep, not "ever""#);
    }
}
