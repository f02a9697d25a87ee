//! Generates the CustomResourceDefinitions in `crds/` from the Rust types.

use kube::CustomResourceExt;
use serde_json::{Value, json};

use super::{VirtualMachine, VmPool, VmReport};

/// The files in `crds/`: name and content.
///
/// # Errors
/// If a CRD can't be written as YAML.
pub fn files() -> Result<Vec<(String, String)>, serde_saphyr::ser::Error> {
    const HEAD: &str = "# Made from the types in src/pure/api.rs by `make crds`; change those.\n";
    crds().into_iter().map(|(file, crd)| Ok((file, format!("{HEAD}{}", serde_saphyr::to_string(&crd)?)))).collect()
}

/// The CRDs as JSON, with the name of their file.
pub fn crds() -> Vec<(String, Value)> {
    [
        (json!(VirtualMachine::crd()), Some(initial_status())),
        (json!(VmPool::crd()), None),
        (json!(VmReport::crd()), None),
    ]
    .into_iter()
    .map(|(mut crd, status)| {
        let name = crd["spec"]["names"]["plural"].as_str().unwrap_or_default().to_owned();
        if let Some(schema) = crd.pointer_mut("/spec/versions/0/schema/openAPIV3Schema") {
            tidy(schema, false);
            excuse_stored(schema);
            if let Some(spec) = schema.pointer_mut("/properties/spec") {
                refuse_controls(spec);
            }
            if let (Some(default), Some(Value::Object(property))) = (status, schema.pointer_mut("/properties/status")) {
                property.insert("default".into(), default);
            }
        }
        (format!("{name}-crd.yaml"), crd)
    })
    .collect()
}

/// The default status: no manager has reconciled the VM yet. It has a condition, because Flux and Argo CD treat a missing condition as
/// healthy.
fn initial_status() -> Value {
    json!({
        "observedGeneration": -1,
        "cpus": 0,
        "ram": "0",
        "displayPasswordSerial": 0,
        "conditions": [{
            "type": super::conditions::READY, "status": "Unknown", "reason": "Pending",
            "message": "Waiting for the manager", "lastTransitionTime": "1970-01-01T00:00:00Z",
        }],
    })
}

/// Lets a stored VM keep what breaks a rule of `spec.vm`, because an earlier definition did not have the rule. Otherwise no client could
/// change its state any more: the API server excuses a value that breaks a rule only if the whole value is unchanged, and `state` is in the
/// same value.
///
/// A rule is checked on creation, and on a change of a VM that does not break it yet. A rule with `oldSelf` is not checked on creation.
/// So each rule is there twice: with `oldSelf`, and for the whole VM until a manager has reconciled it.
fn excuse_stored(schema: &mut Value) {
    const RULES: &str = "x-kubernetes-validations";
    const IS_RECONCILED: &str =
        "has(self.status) && (!has(self.status.observedGeneration) || self.status.observedGeneration >= 0)";
    let Some(machine) = schema.pointer_mut("/properties/spec/properties/vm") else { return };
    let mut of_new = Vec::new();
    for rule in machine[RULES].as_array_mut().into_iter().flatten() {
        let text = rule["rule"].as_str().unwrap_or_default().to_owned();
        let mut new = rule.clone();
        new["rule"] = format!("{IS_RECONCILED} || ({})", text.replace("self.", "self.spec.vm.")).into();
        new["fieldPath"] = ".spec.vm".into();
        of_new.push(new);
        rule["rule"] = format!("({text}) || !({})", text.replace("self.", "oldSelf.")).into();
    }
    if let Some(rules) = schema[RULES].as_array_mut() {
        rules.extend(of_new);
    }
}

/// Removes from a schema what Kubernetes must not have: `nullable` of fields (an absent field is left out, not null), formats that the API
/// server does not know, and defaults inside lists. The values of a map may be null, where the schema says so.
fn tidy(schema: &mut Value, in_list: bool) {
    match schema {
        Value::Object(map) => {
            map.remove("nullable");
            if in_list {
                map.remove("default");
            }
            if let Some(Value::String(format)) = map.get("format")
                && format.starts_with("uint")
            {
                map.remove("format");
            }
            for (key, value) in map {
                match (key.as_str(), value) {
                    // Below `properties` the keys are names of fields, which may be equal to a keyword.
                    ("properties", Value::Object(fields)) => fields.values_mut().for_each(|field| tidy(field, in_list)),
                    ("additionalProperties", value) => {
                        let is_nullable = value["nullable"] == true;
                        tidy(value, true);
                        if is_nullable {
                            value["nullable"] = true.into();
                        }
                    }
                    ("items", value) => tidy(value, true),
                    (_, Value::Object(_)) | (_, Value::Array(_))
                        if matches!(key.as_str(), "default" | "enum" | "required") => {}
                    (_, value) => tidy(value, in_list),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|value| tidy(value, in_list)),
        _ => {}
    }
}

/// What a text may be that nothing else bounds: no control characters but line breaks and tabs.
const TEXT: &str = r"^[^\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]*$";

/// Has the API server refuse control characters in all texts. YAML and terminals don't take them as characters.
fn refuse_controls(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            let is_bound = ["pattern", "enum", "format"].iter().any(|key| map.contains_key(*key));
            if map.get("type").is_some_and(|type_| type_ == "string") && !is_bound {
                map.insert("pattern".into(), TEXT.into());
            }
            for (key, value) in map {
                match (key.as_str(), value) {
                    ("properties", Value::Object(fields)) => fields.values_mut().for_each(refuse_controls),
                    ("default" | "enum" | "required" | "x-kubernetes-validations", _) => {}
                    (_, value) => refuse_controls(value),
                }
            }
        }
        Value::Array(list) => list.iter_mut().for_each(refuse_controls),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Map;

    use super::*;

    fn each(schema: &Value, in_list: bool, check: &mut dyn FnMut(&Map<String, Value>, bool)) {
        if let Value::Object(map) = schema {
            check(map, in_list);
            for (key, value) in map {
                match (key.as_str(), value) {
                    ("properties", Value::Object(fields)) => {
                        fields.values().for_each(|field| each(field, in_list, check))
                    }
                    ("items", value) => each(value, true, check),
                    (_, value) => each(value, in_list, check),
                }
            }
        }
    }

    #[test]
    fn no_default_inside_a_list_and_only_values_of_maps_are_nullable() {
        let text = json!({ "type": "string", "nullable": true, "pattern": TEXT });
        for (name, crd) in crds() {
            let mut checked = 0;
            each(&crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"], false, &mut |schema, in_list| {
                assert!(!(in_list && schema.contains_key("default")), "{name}: {schema:?}");
                assert!(!schema.contains_key("nullable") || Some(schema) == text.as_object(), "{name}: {schema:?}");
                checked += usize::from(in_list);
            });
            assert!(checked > 2, "{name}: {checked} schemas in lists");
        }
    }

    /// Fields of a claim's spec, which Kubernetes explains.
    const OF_A_CLAIM: [&str; 13] = [
        "accessModes",
        "volumeMode",
        "storageClassName",
        "resources",
        "requests",
        "limits",
        "volumeName",
        "dataSource",
        "dataSourceRef",
        "apiGroup",
        "kind",
        "name",
        "namespace",
    ];

    #[test]
    fn every_field_is_explained() {
        let (_, crd) = &crds()[0];
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let mut checked = 0;
        each(&schema["properties"]["spec"], false, &mut |schema, _| {
            if let Some(Value::Object(fields)) = schema.get("properties") {
                for (name, field) in fields.iter().filter(|(name, _)| !OF_A_CLAIM.contains(&name.as_str())) {
                    assert!(field.get("description").is_some(), "{name}");
                    checked += 1;
                }
            }
        });
        assert!(checked > 50, "{checked}");
    }

    #[test]
    fn no_text_of_a_spec_has_control_characters() {
        for (name, crd) in crds() {
            let mut checked = 0;
            each(
                &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"],
                false,
                &mut |schema, _| {
                    if schema.get("type").is_some_and(|type_| type_ == "string") {
                        let pattern = schema.get("pattern").and_then(Value::as_str);
                        assert!(
                            pattern.is_some() || ["enum", "format"].iter().any(|key| schema.contains_key(*key)),
                            "{schema:?}"
                        );
                        for text in ["\u{7}", "a\u{1b}[2J", "a\u{7f}", "a\u{80}b", "\u{85}", "\u{9b}", "a\u{9f}"] {
                            let is_refused = |pattern| !regex::Regex::new(pattern).unwrap().is_match(text);
                            assert!(pattern.is_none_or(is_refused), "{name}: {text:?} in {schema:?}");
                        }
                        checked += 1;
                    }
                },
            );
            assert!(checked > 0 || name.starts_with("vmreports"), "{name}");
        }
        let plain = regex::Regex::new(TEXT).unwrap();
        for text in ["", "a b", "level=INFO\n\tx", "größe", "日本", "a\u{a0}b"] {
            assert!(plain.is_match(text), "{text:?}");
        }
    }

    #[test]
    fn the_files_are_small() {
        for (name, text) in files().unwrap() {
            assert!(text.len() < 100_000, "{name}: {} bytes", text.len());
        }
    }
}
