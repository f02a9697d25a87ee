//! What a VM becomes: its objects, the plan and its status, or the error.
//!
//! Golden cases: each folder in `tests/golden` is one case. A new case is a new folder and needs no Rust.
//!
//! | file | what it is |
//! |---|---|
//! | `vm.yaml` | the VM; what the runner has reported is in its `status` |
//! | `config.yaml` | the manager's configuration (optional) |
//! | `templates/` | the operator's templates, with named sets in `sets/` (optional) |
//! | `applied.yaml` | the VM as it was when its objects were applied: they exist as the built-in templates render them (optional) |
//! | `observed.yaml` | objects that exist already, or what is different from those of `applied.yaml` (optional) |
//! | `expected.snap` | what is expected; `cargo insta test --accept --test golden` writes it |
//!
//! `expected.snap` has three parts. The first holds the rendered objects, or the error. `# plan` holds what is done, what is
//! waited for, what changes with the next start, and when the manager looks again. `# status` holds the manager's part of the
//! status. If the VM or the configuration can't be read, there is nothing but that error.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "this is test code")]

#[path = "support/broken_sets.rs"]
mod broken_sets;

#[path = "support/stored.rs"]
mod stored;

use std::{
    fs,
    path::{Path, PathBuf},
};

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use vm_operator::{
    api::{PowerState, VirtualMachine},
    config::{Config, ReconcilerConfig},
    files,
    object::{Lifetime, Rendered},
    observed::Observed,
    plan::{Action, Plan, plan},
    process::ErrorChain,
    render::{Library, RandomInput, Sources, TemplateError, TemplateSet, render},
    status::{ExecutionResult, Reconciled, UsedTemplates, status},
};

use stored::{applied, trimmed};

/// The time at which every VM is reconciled.
const NOW: &str = "2026-01-01T12:00:00Z";
/// The time at which the objects of `applied.yaml` were made.
const APPLIED: &str = "2026-01-01T11:00:00Z";

fn read(path: PathBuf) -> Option<String> {
    fs::read_to_string(path).ok()
}

/// A VM; what is wrong with the file is the error.
fn vm(file: &str, text: &str) -> Result<VirtualMachine, String> {
    let mut vm: VirtualMachine =
        serde_yaml::from_str(text).map_err(|error| format!("{file}: {}", ErrorChain(&error)))?;
    let uid = format!("uid-of-{}", vm.name_any());
    vm.metadata.uid.get_or_insert(uid);
    Ok(vm)
}

/// Adds the objects of `observed.yaml`; one that exists already is merged with what is said of it there.
fn add_observed(objects: &mut Vec<Value>, text: &str) {
    for document in serde_yaml::Deserializer::from_str(text) {
        let observed = Value::deserialize(document).unwrap();
        let name = |object: &Value| (object["kind"].clone(), object["metadata"]["name"].clone());
        match objects.iter_mut().find(|object| name(object) == name(&observed)) {
            Some(object) => json_patch::merge(object, &observed),
            None => objects.push(observed),
        }
    }
}

fn yaml(value: impl Serialize) -> String {
    serde_saphyr::to_string(&serde_json::to_value(value).unwrap()).unwrap()
}

/// The plan as YAML; an object that is applied is named only, because the first part of the snapshot holds it.
fn describe(plan: &Plan) -> String {
    let action = |action: &Action| match action {
        Action::Apply { object, uid: None } => json!({ "create": object.key.to_string() }),
        Action::Apply { object, uid: Some(uid) } => json!({ "apply": object.key.to_string(), "uid": uid }),
        Action::Label { key, uid, patch } => json!({ "label": key.to_string(), "uid": uid, "patch": patch }),
        Action::Image { key, uid, container, image } => {
            json!({ "image": key.to_string(), "uid": uid, "container": container, "to": image })
        }
        Action::Delete { key, uid, reason, grace, version: _, keeps_owned: _ } => {
            json!({ "delete": key.to_string(), "uid": uid, "reason": format!("{reason:?}"), "grace": grace })
        }
    };
    let Plan { power, force_stop: _, steps, waits, requeue_after, pending, retry, preconditions: _, taken_claims: _ } =
        plan;
    yaml(json!({
        "power": format!("{power:?}"),
        "steps": steps.iter().map(|step| step.iter().map(action).collect::<Vec<_>>()).collect::<Vec<_>>(),
        "waits": waits.iter().map(|wait| format!("{wait:?}")).collect::<Vec<_>>(),
        "pending": pending,
        "requeue_after": requeue_after.map(|pause| format!("{pause:?}")),
        "retry": retry,
    }))
}

/// What a case becomes, as text.
fn outcome(case: &Path) -> String {
    outcome_or_error(case).unwrap_or_else(|error| format!("error: {error}\n"))
}

fn outcome_or_error(case: &Path) -> Result<String, String> {
    let config = Config::parse(&read(case.join("config.yaml")).unwrap_or_default())
        .map_err(|error| format!("config.yaml: {}", ErrorChain(&error)))?;
    let config: &ReconcilerConfig = &config.reconciler;
    let folder = case.join("templates");
    let sources = if folder.exists() { files::sources(&folder).unwrap() } else { Sources::default() };
    let library = Library::new(&sources);
    let set_of =
        |vm: &VirtualMachine| library.get(vm.spec.templates.as_ref().and_then(|templates| templates.set.as_deref()));
    let random = RandomInput { display_password: "(random)".into(), ..RandomInput::default() };
    let now: Timestamp = NOW.parse().unwrap();

    let mut objects: Vec<Value> = Vec::new();
    if let Some(text) = read(case.join("applied.yaml")) {
        let former = vm("applied.yaml", &text)?;
        let builtin = TemplateSet::builtin().map_err(|error| error.to_string())?;
        let rendered = render(&former, &Observed::nothing(now), config, &random, &builtin)
            .map_err(|error| format!("applied.yaml: {error}"))?;
        let exists =
            |object: &&Rendered| object.lifetime != Lifetime::Running || former.spec.vm.state == PowerState::Running;
        objects = rendered.iter().filter(exists).map(|object| applied(object, APPLIED)).collect();
    }
    if let Some(text) = read(case.join("observed.yaml")) {
        add_observed(&mut objects, &text);
    }
    let observed = Observed::of(objects.into_iter().map(trimmed).collect(), now);

    let vm = vm("vm.yaml", &read(case.join("vm.yaml")).unwrap())?;
    let rendered: Result<Vec<Rendered>, TemplateError> =
        set_of(&vm).and_then(|templates| render(&vm, &observed, config, &random, templates));
    let plan = plan(&vm, &observed, rendered.as_deref().ok());
    let source = UsedTemplates { set: set_of(&vm).ok(), refused: None };
    let outcome = ExecutionResult::default();
    let (vm, observed) = (&vm, &observed);
    let status =
        status(&Reconciled { vm, observed, plan: &plan, rendered: rendered.as_deref(), outcome: &outcome, source });
    let objects: String = match &rendered {
        Err(error) => format!("error: {error}\n"),
        Ok(objects) => objects
            .iter()
            .map(|object| {
                let yaml = yaml(&*object.value);
                format!("---\n# {} ({:?}, {:?})\n{yaml}", object.template, object.lifetime, object.update)
            })
            .collect(),
    };
    Ok(format!("{objects}---\n# plan\n{}---\n# status\n{}", describe(&plan), yaml(&status)))
}

/// What is said of each broken set, without a cluster.
#[test]
fn every_broken_template_set_has_its_error() {
    let vm = serde_yaml::from_str(include_str!("golden/tap/vm.yaml")).unwrap();
    let mut said = String::new();
    for broken_set in broken_sets::broken_sets() {
        let what = broken_set.what;
        let says = match (broken_set.error(&vm), broken_set.manager_error) {
            (Some(error), None) => error,
            (None, Some(_)) => "(the manager says so)".to_owned(),
            (said, _) => panic!("{what}: {said:?}"),
        };
        said.push_str(&format!("{what}\n    {says}\n"));
    }
    insta::assert_snapshot!("broken_sets", said);
}

#[test]
fn every_golden_case_matches_its_snapshot() {
    insta::with_settings!({
        prepend_module_to_snapshot => false,
        omit_expression => true,
        filters => vec![
            (env!("CARGO_PKG_VERSION").replace('.', r"\.").as_str(), "VERSION"),
            // The version of a template set changes with each change of a built-in template, if only of a comment.
            (r#"(?m)^  version: "?[0-9a-f]{8}"?$"#, "  version: (hash)"),
        ],
    }, {
        insta::glob!("golden/*/vm.yaml", |vm| {
            let case = vm.parent().unwrap();
            insta::with_settings!({ snapshot_path => case, snapshot_suffix => "" }, {
                insta::assert_snapshot!("expected", outcome(case));
            });
        });
    });
}
