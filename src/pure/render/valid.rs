//! What the API server refuses because of the value of a field that every object has: names, labels and annotations.
//!
//! The check of a new set sends one object of each shape to the API server. This finds the objects of other VMs whose values are not valid,
//! without a request.

use serde_json::{Map, Value};

use crate::{
    api::stored::{DEEPEST, nests_deeper},
    object::{Rendered, is_workload},
};

const NAME: &str =
    "a valid name has up to 253 small letters, digits, '-' and '.', and begins and ends with a letter or a digit";
const SERVICE_NAME: &str = "a valid name of a Service has up to 63 small letters, digits and '-', and begins and ends with a letter or a digit";
const LABEL: &str = "a valid label must be a text of up to 63 letters, digits, '-', '_' and '.', that begins and ends with a letter or a digit";
const KEY: &str = "a valid label must have a key of up to 63 letters, digits, '-', '_' and '.', after a domain and '/' if it is one of a domain";

/// The first field that is not valid, with its value and what would be.
pub(super) fn problem(object: &Rendered) -> Option<String> {
    let (value, key) = (&*object.value, &object.key);
    if nests_deeper(value, DEEPEST) {
        return Some(format!("it nests deeper than {DEEPEST} levels"));
    }
    // Names of rights have other rules.
    let is_right = key.group().is_some_and(|group| group.starts_with("rbac."));
    let is_service = key.group().is_none() && key.kind == "Service";
    if is_service && !(is_subdomain(&key.name) && key.name.len() <= 63 && !key.name.contains('.')) {
        return Some(format!("metadata.name: {:?}: {SERVICE_NAME}", key.name));
    }
    if !is_right && !is_subdomain(&key.name) {
        return Some(format!("metadata.name: {:?}: {NAME}", key.name));
    }
    let selector = value.pointer("/spec/selector").filter(|_| is_service);
    let labels = of_labels("metadata.labels", &value["metadata"]["labels"]);
    let annotations = || of_annotations("metadata.annotations", &value["metadata"]["annotations"]);
    let selected = || of_labels("spec.selector", selector.unwrap_or(&Value::Null));
    let below = || if key.is_pod() || is_workload(key) { below("spec", &value["spec"]) } else { None };
    labels.or_else(annotations).or_else(selected).or_else(below)
}

/// The labels in a Pod, or in a Pod template.
fn below(path: &str, value: &Value) -> Option<String> {
    let field = |(name, value): (&String, &Value)| {
        let path = format!("{path}.{name}");
        match name.as_str() {
            "metadata" => of_labels(&format!("{path}.labels"), &value["labels"])
                .or_else(|| of_annotations(&format!("{path}.annotations"), &value["annotations"])),
            "matchLabels" | "nodeSelector" => of_labels(&path, value),
            _ => below(&path, value),
        }
    };
    match value {
        Value::Object(map) => map.iter().find_map(field),
        Value::Array(list) => list.iter().enumerate().find_map(|(at, item)| below(&format!("{path}[{at}]"), item)),
        _ => None,
    }
}

fn of_labels(path: &str, labels: &Value) -> Option<String> {
    each(labels).find_map(|(key, value)| {
        if !is_key(key) {
            return Some(format!("{path}: {key:?}: {KEY}"));
        }
        let is_valid = value.as_str().is_some_and(|text| text.is_empty() || is_label(text));
        (!is_valid).then(|| format!("{path}.{key}: {value}: {LABEL}"))
    })
}

fn of_annotations(path: &str, annotations: &Value) -> Option<String> {
    each(annotations).find_map(|(key, value)| {
        if !is_key(&key.to_ascii_lowercase()) {
            return Some(format!("{path}: {key:?}: {KEY}"));
        }
        (!value.is_string()).then(|| format!("{path}.{key}: {value}: an annotation must be a text"))
    })
}

fn each(map: &Value) -> impl Iterator<Item = (&String, &Value)> {
    map.as_object().into_iter().flat_map(Map::iter)
}

/// Whether a text can be the name of most objects
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-subdomain-names>).
pub fn is_subdomain(text: &str) -> bool {
    let is_part = |part: &str| {
        let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        is_end(part.chars().next())
            && is_end(part.chars().next_back())
            && part.chars().all(|c| c == '-' || is_end(Some(c)))
    };
    text.len() <= 253 && text.split('.').all(is_part)
}

/// Whether a text can be the name of a namespace or of a Service
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-label-names>).
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && !text.contains('.') && is_subdomain(text)
}

/// Whether a text that is not empty can be the value of a label
/// (<https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#syntax-and-character-set>).
pub fn is_label(text: &str) -> bool {
    let is_end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && is_end(text.chars().next())
        && is_end(text.chars().next_back())
        && text.chars().all(|c| "-_.".contains(c) || c.is_ascii_alphanumeric())
}

/// Whether a text can be the key of a label.
pub fn is_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((domain, name)) => is_subdomain(domain) && is_label(name),
        None => is_label(text),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::{nothing, rendered, vm};

    /// What is wrong with the VM's object of that kind, changed by `edit`.
    fn of(kind: &str, edit: impl FnOnce(&mut Rendered, &mut Value)) -> Option<String> {
        let mut object = rendered(&vm(|_| ()), &nothing()).into_iter().find(|it| it.key.kind == kind).unwrap();
        let mut value = Value::clone(&object.value);
        edit(&mut object, &mut value);
        object.value = value.into();
        problem(&object)
    }

    #[test]
    fn what_the_built_in_templates_render_is_valid() {
        for kind in ["ConfigMap", "PersistentVolumeClaim", "Pod", "Secret"] {
            assert_eq!(of(kind, |_, _| ()), None);
        }
    }

    #[test]
    fn each_value_that_is_not_valid_is_named() {
        let long = "a".repeat(64);
        for (value, is_valid) in [
            (json!("jane"), true),
            (json!("Jane_D.oe-1"), true),
            (json!(""), true),
            (json!(&long[1..]), true),
            (json!(long), false),
            (json!("Jane Doe"), false),
            (json!("-a"), false),
            (json!("a."), false),
            (json!("\u{fc}ber"), false),
            (json!(7), false),
            (json!(true), false),
        ] {
            let edited = |pointer: &str, field: &str| {
                of("Pod", |_, pod| pod.pointer_mut(pointer).unwrap()[field] = value.clone())
            };
            let found = edited("/metadata/labels", "owner");
            let expected = (!is_valid).then(|| format!("metadata.labels.owner: {value}: {LABEL}"));
            assert_eq!(found, expected);
            let below = json!({ "matchLabels": { "a": value } });
            let found = of("Pod", |_, pod| pod["spec"]["affinity"] = json!({ "x": [below] }));
            let expected = (!is_valid).then(|| format!("spec.affinity.x[0].matchLabels.a: {value}: {LABEL}"));
            assert_eq!(found, expected);
            let found = edited("/metadata/annotations", "x");
            assert_eq!(found.is_none(), value.is_string(), "{value}");
        }
        for (key, is_valid) in
            [("a", true), ("example.org/a", true), ("/a", false), ("Example/a", false), ("a/b/c", false), ("", false)]
        {
            let found = of("Pod", |_, pod| pod["metadata"]["labels"][key] = json!("x"));
            assert_eq!(found.is_none(), is_valid, "{key}: {found:?}");
        }
    }

    #[test]
    fn names_are_those_of_their_kind() {
        let long = "a".repeat(64);
        for (name, of_pod, of_service) in [
            ("apple", true, true),
            ("apple.x", true, false),
            (long.as_str(), true, false),
            ("Apple", false, false),
            ("a b", false, false),
            ("a..b", false, false),
            ("-a", false, false),
            ("", false, false),
        ] {
            let named = |kind: &str, group: &str| {
                of("ConfigMap", |object, _| {
                    (object.key.name, object.key.kind, object.key.api_version) =
                        (name.into(), kind.into(), group.into());
                })
                .is_none()
            };
            assert_eq!((named("Pod", "v1"), named("Service", "v1")), (of_pod, of_service), "{name}");
            assert!(named("Role", "rbac.authorization.k8s.io/v1"));
        }
    }

    #[test]
    fn an_object_that_nests_too_deep_is_named() {
        let deep = (0..120).fold(json!("x"), |value, _| json!([value]));
        let found = of("ConfigMap", |_, map| map["data"] = deep);
        assert_eq!(found.as_deref(), Some("it nests deeper than 100 levels"));
    }
}
