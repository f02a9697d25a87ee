//! What is rendered, and what is said where nothing can be.
//!
//! Golden cases: each folder in `tests/golden` is a machine and what it becomes.
//!
//! | file | what it is |
//! |---|---|
//! | `vm.yaml` | the machine |
//! | `config.yaml` | the manager's configuration (optional) |
//! | `observed.yaml` | objects that exist already (optional) |
//! | `templates/` | the operator's templates, with named sets in `sets/` (optional) |
//! | `expected.snap` | all rendered objects and the plan, or the error; `cargo insta test --accept` writes it |

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "this is test code")]

#[path = "support/breakages.rs"]
mod breakages;

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use k8s_openapi::jiff::Timestamp;
use kube::{ResourceExt, core::DynamicObject};
use serde::Deserialize;
use vm_operator::{
    api::VirtualMachine,
    config::Config,
    files,
    observed::{Object, Observed},
    render::{Facts, Library, Sources, render},
};

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

fn observed(text: Option<String>) -> Vec<Arc<Object>> {
    text.iter()
        .flat_map(|text| serde_yaml::Deserializer::from_str(text))
        .map(|document| DynamicObject::deserialize(document).unwrap())
        .map(|object| {
            let types = object.types.clone().unwrap();
            Arc::new(Object::trim(&types, object))
        })
        .collect()
}

/// What a case becomes, as text.
fn outcome(case: &Path) -> String {
    let mut vm: VirtualMachine = serde_yaml::from_str(&read(case.join("vm.yaml")).unwrap()).unwrap();
    let uid = format!("uid-of-{}", vm.name_any());
    vm.metadata.uid.get_or_insert(uid);
    let config = Config::parse(&read(case.join("config.yaml")).unwrap_or_default()).unwrap();
    let observed = Observed { objects: observed(read(case.join("observed.yaml"))), now: Timestamp::UNIX_EPOCH };
    let facts = Facts { display_password: "(random)".into() };
    let folder = case.join("templates");
    let sources = if folder.exists() { files::sources(&folder).unwrap() } else { Sources::default() };
    let set = vm.spec.templates.as_ref().and_then(|templates| templates.set.as_deref());
    let objects = Library::new(&sources)
        .get(set)
        .and_then(|templates| render(&vm, &observed, &config.reconciler, &facts, templates));
    match objects {
        Err(error) => format!("error: {error}\n"),
        Ok(objects) => objects
            .iter()
            .map(|object| {
                let yaml = serde_saphyr::to_string(&object.value).unwrap();
                format!("---\n# {} ({:?}, {:?})\n{yaml}", object.template, object.lifetime, object.update)
            })
            .collect(),
    }
}

/// What is said of each broken set, without a cluster.
#[test]
fn every_breakage_is_named() {
    let vm = serde_yaml::from_str(include_str!("golden/tap/vm.yaml")).unwrap();
    let mut said = String::new();
    for breakage in breakages::breakages() {
        let what = breakage.what;
        let says = match (breakage.said(&vm), breakage.in_cluster) {
            (Some(error), None) => error,
            (None, Some(_)) => "(the manager says so)".to_owned(),
            (said, _) => panic!("{what}: {said:?}"),
        };
        said.push_str(&format!("{what}\n    {says}\n"));
    }
    insta::assert_snapshot!("breakages", said);
}

#[test]
fn every_case_becomes_what_it_did() {
    insta::with_settings!({
        prepend_module_to_snapshot => false,
        omit_expression => true,
        filters => vec![(env!("CARGO_PKG_VERSION").replace('.', r"\.").as_str(), "VERSION")],
    }, {
        insta::glob!("golden/*/vm.yaml", |vm| {
            let case = vm.parent().unwrap();
            insta::with_settings!({ snapshot_path => case, snapshot_suffix => "" }, {
                insta::assert_snapshot!("expected", outcome(case));
            });
        });
    });
}
