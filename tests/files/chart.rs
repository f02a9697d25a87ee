//! The Helm chart, as far as it can be checked without Helm; `make chart-test` does the rest.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::root;

const CHART: &str = "deploy/chart/vm-operator";

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn yaml(path: &str) -> Value {
    serde_yaml::from_str(&read(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files_below(&path, found);
        } else {
            found.push(path);
        }
    }
}

/// `deploy/` is written from the chart. Whoever changes one of the two must write it again.
#[test]
fn the_manifests_are_those_of_the_chart() {
    let mut listed = BTreeSet::new();
    for line in read("deploy/chart/written.sha256").lines() {
        let (sum, path) = line.split_once("  ").unwrap();
        let found: String = Sha256::digest(read(path)).iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(found, sum, "{path} has changed: change the chart, and run `make manifests`");
        listed.insert(root().join(path));
    }
    let mut files = vec![];
    files_below(&root().join(CHART), &mut files);
    let definitions = root().join(CHART).join("files/crds");
    let missing: Vec<_> =
        files.iter().filter(|file| !listed.contains(*file) && !file.starts_with(&definitions)).collect();
    let missing: Vec<_> = missing.into_iter().filter(|file| file.extension().is_none_or(|end| end != "md")).collect();
    assert!(files.len() > 25 && missing.is_empty(), "run `make manifests`, because of {missing:?}");
    // What people write by hand, and what is no manifest.
    let mut deployed = vec![];
    files_below(&root().join("deploy"), &mut deployed);
    for file in deployed.iter().filter(|file| file.extension().is_some_and(|end| end == "yaml")) {
        let by_hand = ["deploy/argocd", "deploy/kustomize", "deploy/chart/vm-operator/files/crds"]
            .iter()
            .any(|folder| file.starts_with(root().join(folder)));
        let is_written = listed.contains(file) || by_hand || file.ends_with("kustomization.yaml");
        assert!(is_written, "{} is not made from the chart", file.display());
    }
    for (name, text) in vm_operator::api::crd::files().unwrap() {
        assert_eq!(read(&format!("{CHART}/files/crds/{name}")), text, "run `make crds`");
    }
}

#[test]
fn the_chart_is_of_this_version() {
    let chart = yaml(&format!("{CHART}/Chart.yaml"));
    for key in ["version", "appVersion"] {
        assert_eq!(chart[key], env!("CARGO_PKG_VERSION"), "{key}");
    }
}

#[cfg(feature = "dev")]
#[test]
fn the_charts_page_has_the_table_of_its_values() {
    let page = read(&format!("{CHART}/README.md"));
    let wanted = crate::values_table::into_page(&page, &read(&format!("{CHART}/values.yaml"))).unwrap();
    assert!(page == wanted && page.lines().count() > 100, "run `make manifests`");
}

/// Each value, with its place, and where the schema describes it.
fn compare(path: &str, values: &Value, schema: &Value, wrong: &mut Vec<String>) {
    let Some(properties) = schema["properties"].as_object() else { return };
    if schema["additionalProperties"] != Value::Bool(false) {
        wrong.push(format!("{path}: the schema allows any key"));
    }
    for (key, value) in values.as_object().into_iter().flatten() {
        match properties.get(key) {
            Some(schema) => compare(&format!("{path}.{key}"), value, schema, wrong),
            None => wrong.push(format!("{path}.{key} is not in the schema")),
        }
    }
    // These are what a user may write, and not all that has a default.
    if [".config", ".resources", ".affinity", ""].contains(&path) {
        return;
    }
    let without_value = properties.keys().filter(|key| values.get(key.as_str()).is_none());
    wrong.extend(without_value.map(|key| format!("{path}.{key} has no default in values.yaml")));
}

#[test]
fn the_schema_has_each_value_and_no_other() {
    let values = yaml(&format!("{CHART}/values.yaml"));
    let schema: Value = serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).unwrap();
    let mut wrong = vec![];
    compare("", &values, &schema, &mut wrong);
    let top = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let mut in_schema = top(&schema["properties"]);
    // Helm adds it.
    assert!(in_schema.remove("global"));
    assert_eq!((wrong, top(&values)), (vec![], in_schema));
}

#[test]
fn the_configuration_in_the_schema_has_the_keys_that_the_manager_knows() {
    let schema: Value = serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).unwrap();
    let known = serde_json::to_value(vm_operator::config::ReconcilerConfig::default()).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    // The manager writes these keys, for itself, with the names of the fields.
    let in_file = |field: String| {
        let mut words = field.split('_').map(str::to_owned);
        let first = words.next().unwrap();
        words.fold(first, |key, word| key + &word[..1].to_uppercase() + &word[1..])
    };
    let in_schema = &schema["properties"]["config"]["properties"];
    let mut named = keys(in_schema);
    // A former name.
    assert!(named.remove("cloudInitSecretLabel"));
    assert_eq!(named, keys(&known).into_iter().map(in_file).collect());
    for (part, field) in [
        ("runnerDataPvc", "runner_data_pvc"),
        ("nodeDevices", "node_devices"),
        ("passt", "passt"),
        ("diskPvc", "disk_pvc"),
        ("networks", "networks"),
        ("claims", "claims"),
        ("services", "services"),
    ] {
        assert_eq!(keys(&in_schema[part]["properties"]), keys(&known[field]), "{part}");
    }
}

#[cfg(feature = "schema")]
#[test]
fn the_values_of_the_cases_match_the_schema_and_the_manager_reads_what_they_configure() {
    let schema: Value = serde_json::from_str(&read(&format!("{CHART}/values.schema.json"))).unwrap();
    let schema = jsonschema::validator_for(&schema).unwrap();
    schema.validate(&yaml(&format!("{CHART}/values.yaml"))).unwrap();
    let mut configured = 0;
    let cases: Vec<_> =
        fs::read_dir(root().join("tests/chart/cases")).unwrap().map(|case| case.unwrap().path()).collect();
    for case in &cases {
        let values: Value = serde_yaml::from_str(&fs::read_to_string(case.join("values.yaml")).unwrap()).unwrap();
        assert!(schema.validate(&values).is_ok(), "{}", case.display());
        let rendered = fs::read_to_string(case.join("expected.yaml")).unwrap();
        for document in rendered.split("---\n").filter(|text| text.starts_with("# Source: config.yaml")) {
            let object: Value = serde_yaml::from_str(document).unwrap();
            let config = vm_operator::config::Config::parse(object["data"]["config.yaml"].as_str().unwrap()).unwrap();
            assert_eq!(config.unknown, [""; 0], "{}", case.display());
            assert_ne!(config.reconciler, vm_operator::config::ReconcilerConfig::default());
            configured += 1;
        }
    }
    assert!(cases.len() >= 5 && configured >= 3, "{configured}");
}
