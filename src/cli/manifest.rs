//! A VM in a file, checked as the API server checks it: the schema and the rules of its CustomResourceDefinition.
//!
//! ```text
//!  YAML ─▶ JSON ─▶ nulls, booleans ─▶ apiVersion ─▶ schema, metadata ─▶ rules (CEL) ─▶ VirtualMachine
//! ```
//!
//! The API server reports unknown fields first, and the rest only without them. Here both are reported at once. The rules are checked if
//! all else is right, as there. Messages are in the API server's words, each with the place of the value in the file.

pub(super) mod position;
mod words;

use std::sync::LazyLock;

use jsonschema::Validator;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::{Resource, core::cel};
use serde_json::Value;

pub(super) use self::words::steps;

use self::position::Step;
use crate::{
    api::{VirtualMachine, crd},
    lint::openapi,
    render::{schema, valid},
};

/// Something that the API server would refuse.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Violation {
    /// Line and column in the document, from 1.
    pub at: Option<(usize, usize)>,
    pub message: String,
}

/// The schema of the CustomResourceDefinition, with defaults and rules.
static DEFINITION: LazyLock<Value> = LazyLock::new(|| {
    let (_, mut definition) = crd::crds().swap_remove(0);
    definition.pointer_mut("/spec/versions/0/schema/openAPIV3Schema").map(Value::take).unwrap_or_default()
});

/// The schema without what only the API server applies. Unknown fields are errors.
static SCHEMA: LazyLock<Value> = LazyLock::new(|| {
    let mut metadata = openapi::schema::<ObjectMeta>();
    let mut schema = schema::virtual_machine();
    schema["$defs"] = metadata["$defs"].take();
    if let Some(map) = metadata.as_object_mut() {
        map.retain(|key, _| !key.starts_with('$'));
    }
    schema["properties"]["metadata"] = metadata;
    schema
});

/// A test checks that it compiles.
static VALIDATOR: LazyLock<Option<Validator>> = LazyLock::new(|| jsonschema::validator_for(&SCHEMA).ok());

/// Reads a VM from a YAML document, of which `parsed` is the value.
///
/// # Errors
/// What the API server would refuse.
pub(super) fn read(document: &str, parsed: &serde_yaml::Value) -> Result<VirtualMachine, Vec<Violation>> {
    let without_place = |message: String| vec![Violation { at: None, message }];
    let mut object = serde_json::to_value(parsed).map_err(|error| without_place(error.to_string()))?;
    let (version, known) = (object["apiVersion"].as_str().unwrap_or_default(), VirtualMachine::api_version(&()));
    if version != known {
        let message =
            format!("no matches for kind \"VirtualMachine\" in version {version:?}: write apiVersion: {known}");
        let at = position::of_value(document, &[Step::Key("apiVersion".into())]);
        return Err(vec![Violation { at: at.or_else(|| position::of_value(document, &[])), message }]);
    }
    booleans(document, &mut object, &mut Vec::new());
    tidy(&DEFINITION, &mut object);
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.retain(|_, value| !value.is_null());
    }
    // The API server ignores a status in a file. A VM that was read from a cluster is rendered with it.
    let status = object.as_object_mut().and_then(|map| map.remove("status"));
    let mut problems = of_schema(&object);
    problems.extend(of_metadata(&object["metadata"]));
    if problems.is_empty() {
        problems = of_rules(&object);
    }
    if !problems.is_empty() {
        let mut violations: Vec<Violation> = problems.into_iter().map(|problem| problem.located(document)).collect();
        violations.sort_by_key(|violation| violation.at);
        return Err(violations);
    }
    if let Some(status) = status {
        object["status"] = status;
    }
    serde_json::from_value(object).map_err(|error| without_place(error.to_string()))
}

/// Something that is wrong with a value or with a key.
struct Problem {
    path: Vec<Step>,
    is_key: bool,
    message: String,
}

impl Problem {
    fn located(self, document: &str) -> Violation {
        let find = if self.is_key { position::of_key } else { position::of_value };
        // The value may be one that the API server sets.
        let at = (0..=self.path.len()).rev().find_map(|length| find(document, &self.path[..length]));
        Violation { at, message: self.message }
    }
}

/// Makes booleans of words that YAML 1.1 reads so, unless they are quoted: kubectl reads YAML 1.1, and this program's parser YAML 1.2.
fn booleans(document: &str, value: &mut Value, path: &mut Vec<Step>) {
    let mut below = |step: Step, value: &mut Value| {
        path.push(step);
        booleans(document, value, path);
        path.pop();
    };
    match value {
        Value::Object(map) => map.iter_mut().for_each(|(name, value)| below(Step::Key(name.clone()), value)),
        Value::Array(list) => list.iter_mut().enumerate().for_each(|(at, value)| below(Step::Index(at), value)),
        Value::String(word) => {
            let boolean = match word.as_str() {
                "yes" | "Yes" | "YES" | "on" | "On" | "ON" => true,
                "no" | "No" | "NO" | "off" | "Off" | "OFF" => false,
                _ => return,
            };
            let Some((line, column)) = position::of_value(document, path) else { return };
            let rest = document.lines().nth(line - 1).unwrap_or_default().chars().skip(column - 1);
            if rest.collect::<String>().starts_with(word.as_str()) {
                *value = boolean.into();
            }
        }
        _ => {}
    }
}

/// Does to values what the API server does before it checks them: removes nulls, except where they are allowed, and makes integers of
/// numbers such as 2.0.
fn tidy(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => {
            let of = |name: &str| schema["properties"].get(name).unwrap_or(&schema["additionalProperties"]);
            map.retain(|name, value| !value.is_null() || !of(name).is_object() || of(name)["nullable"] == true);
            map.iter_mut().for_each(|(name, value)| tidy(of(name), value));
        }
        Value::Array(list) => list.iter_mut().for_each(|value| tidy(&schema["items"], value)),
        Value::Number(number) => {
            let whole = number.as_f64().filter(|it| number.is_f64() && it.fract() == 0.0 && it.abs() < 1e15);
            if let Some(integer) = whole.and_then(|whole| format!("{whole:.0}").parse::<i64>().ok()) {
                *value = integer.into();
            }
        }
        _ => {}
    }
}

fn of_schema(object: &Value) -> Vec<Problem> {
    let errors = VALIDATOR.iter().flat_map(|validator| validator.iter_errors(object));
    errors.flat_map(|error| words::problems(&error, object, &SCHEMA)).collect()
}

/// Name and labels, whose rules are not in a schema.
fn of_metadata(metadata: &Value) -> Vec<Problem> {
    let path = |names: &[&str]| names.iter().map(|name| Step::Key((*name).to_owned())).collect::<Vec<_>>();
    let invalid = |field: &str, value: &str, why: &str| format!("metadata.{field}: Invalid value: {value:?}: {why}");
    let mut problems = Vec::new();
    match metadata["name"].as_str() {
        None | Some("") if metadata["generateName"].is_null() => {
            let message = "resource name may not be empty: write metadata.name".to_owned();
            problems.push(Problem { path: path(&["metadata"]), is_key: false, message });
        }
        Some(name) if !valid::is_subdomain(name) => {
            let why = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and \
                       end with an alphanumeric character (e.g. 'example.com')";
            let path = path(&["metadata", "name"]);
            problems.push(Problem { path, is_key: false, message: invalid("name", name, why) });
        }
        _ => {}
    }
    for field in ["labels", "annotations"] {
        for (key, value) in metadata[field].as_object().into_iter().flatten() {
            let path = path(&["metadata", field, key]);
            let is_key = if field == "labels" { valid::is_key(key) } else { valid::is_key(&key.to_ascii_lowercase()) };
            if !is_key {
                let why = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
                           alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc')";
                problems.push(Problem { path: path.clone(), is_key: true, message: invalid(field, key, why) });
            }
            if field == "labels"
                && let Some(text) = value.as_str().filter(|text| !text.is_empty() && !valid::is_label(text))
            {
                let why = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start \
                           and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345'), and have at most 63";
                problems.push(Problem { path, is_key: false, message: invalid(field, text, why) });
            }
        }
    }
    problems
}

/// The rules of the definition, in CEL.
fn of_rules(object: &Value) -> Vec<Problem> {
    let errors = cel::Validator::new().validate(&DEFINITION, object, None).err();
    let errors = errors.into_iter().flat_map(cel::ValidationErrors::into_vec);
    let problem = |error: cel::ValidationError| {
        let field = error.field_path.trim_start_matches('.');
        let message = format!("{field}: Invalid value: {}", error.message);
        Problem { path: words::steps(field), is_key: false, message }
    };
    errors.map(problem).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read_text(text: &str) -> Result<VirtualMachine, Vec<String>> {
        let show = |violation: Violation| match violation.at {
            Some((line, column)) => format!("{line}:{column}: {}", violation.message),
            None => violation.message,
        };
        read(text, &serde_yaml::from_str(text).unwrap()).map_err(|found| found.into_iter().map(show).collect())
    }

    const HEAD: &str = "apiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\n";

    #[test]
    fn the_schema_compiles() {
        assert!(VALIDATOR.is_some());
    }

    #[test]
    fn each_problem_is_reported_with_its_place() {
        let text = format!(
            "{HEAD}metadata:\n  name: Apple\n  labels: {{a: b c}}\n  lables: {{}}\nspec:\n  vm:\n    maximumCpu: 2\n    maximumRam: much\n    \
             state: On\n    disks:\n      - cdrom: {{}}\n      - volumeClaimTemplate: {{spec: {{resources: {{requests: {{storage: 1GB}}}}}}}}\n    powerdownTimeout: -1\n  cloudInit: {{userData: a, userDataFrom: {{}}}}\n"
        );
        insta::assert_snapshot!(read_text(&text).unwrap_err().join("\n"));
    }

    #[test]
    fn rules_are_checked_if_all_else_is_right() {
        let text = format!(
            "{HEAD}metadata: {{name: apple}}\nspec:\n  vm:\n    maximumCpus: 2\n    currentCpus: 3\n    networks:\n      - {{}}\n"
        );
        insta::assert_snapshot!(read_text(&text).unwrap_err().join("\n"));
    }

    #[test]
    fn words_are_booleans_as_in_kubectl() {
        let vm = |word: &str| {
            read_text(&format!("{HEAD}metadata: {{name: apple}}\nspec: {{vm: {{maximumCpus: 1, useTpm: {word}}}}}\n"))
        };
        for (word, expected) in [("yes", true), ("Off", false), ("true", true)] {
            assert_eq!(vm(word).unwrap().spec.vm.use_tpm, expected, "{word}");
        }
        for word in ["'yes'", "\"on\"", "yess"] {
            assert!(vm(word).unwrap_err()[0].contains("must be of type boolean"), "{word}");
        }
        let label = format!("{HEAD}metadata: {{name: apple, labels: {{a: yes}}}}\nspec: {{vm: {{maximumCpus: 1}}}}\n");
        let found = read_text(&label).unwrap_err();
        assert!(found[0].starts_with("3:37: metadata.labels.a: Invalid value: \"boolean\""), "{found:?}");
    }

    #[test]
    fn values_are_as_the_api_server_would_have_them() {
        let text = format!(
            "{HEAD}metadata: {{name: apple}}\nspec:\n  nodeName: null\n  vm: {{maximumCpus: 2.0, networks: null, disks: []}}\n  \
             loadBalancerService: {{labels: {{a: null}}}}\n  cloudInit: {{userData: {{a: null}}}}\n"
        );
        let vm = read_text(&text).unwrap();
        let object = json!(vm);
        assert_eq!((&object["spec"]["vm"]["maximumCpus"], &object["spec"]["vm"]["networks"]), (&json!(2), &json!([])));
        assert_eq!(object["spec"]["loadBalancerService"]["labels"], json!({ "a": null }));
        assert_eq!(object["spec"]["cloudInit"]["userData"], json!({ "a": null }));
        // The defaults that are filled in are those of the definition.
        let mut written: Value = serde_yaml::from_str(&text).unwrap();
        tidy(&DEFINITION, &mut written);
        let mut with_defaults = cel::apply_defaults(&DEFINITION, &written);
        with_defaults.as_object_mut().unwrap().remove("status");
        assert_eq!(serde_json::from_value::<VirtualMachine>(with_defaults).unwrap(), vm);
    }
}
