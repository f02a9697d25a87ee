//! What GitOps tools make of VMs: the Lua of Argo CD and the expressions of Flux, run against a VM with each reason that there is.

use std::{collections::BTreeMap, fs, path::Path};

use mlua::{Lua, LuaOptions, LuaSerdeExt, StdLib, serde::ser};
use serde_json::{Value, json};
use vm_operator::api::Reason;

fn yaml(path: &str) -> Vec<Value> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap();
    serde_yaml::Deserializer::from_str(&text)
        .map(|document| serde::Deserialize::deserialize(document).unwrap())
        .collect()
}

/// Runs Lua as Argo CD does (its util/lua): with few libraries, and the object as `obj`.
fn lua(code: &str, object: &Value) -> Value {
    let lua = Lua::new_with(StdLib::TABLE | StdLib::OS | StdLib::PACKAGE, LuaOptions::new()).unwrap();
    lua.globals().set("os", mlua::Nil).unwrap(); // Argo CD has it for `require` only.
    let options = ser::Options::new().serialize_none_to_null(false).serialize_unit_to_null(false);
    lua.globals().set("obj", lua.to_value_with(object, options).unwrap()).unwrap();
    let result: mlua::Value = lua.load(code).eval().unwrap();
    lua.from_value(result).unwrap()
}

fn argo() -> Value {
    yaml("deploy/argocd/argocd-cm.yaml").remove(0)["data"].take()
}

fn argo_health(object: &Value) -> (String, String) {
    let kind = object["kind"].as_str().unwrap();
    let code = argo()[&format!("resource.customizations.health.vmoperator.jdrupes.org_{kind}")].take();
    let health = lua(code.as_str().unwrap(), object);
    let text = |key: &str| health[key].as_str().unwrap_or_else(|| panic!("{key} of {health}")).to_owned();
    (text("status"), text("message"))
}

/// What Flux computes (github.com/fluxcd/pkg, runtime/cel: the generation first, then each expression in this order), in Argo CD's words.
fn flux_health(object: &Value) -> &'static str {
    if object["status"]["observedGeneration"] != object["metadata"]["generation"] {
        return "Progressing";
    }
    let documents = yaml("example/gitops/flux/cluster/vms.yaml");
    let of_flux = documents.iter().find(|document| document["kind"] == "Kustomization").unwrap();
    let mut all = of_flux["spec"]["healthCheckExprs"].as_array().unwrap().iter();
    let expressions = all.find(|it| it["kind"] == object["kind"]).unwrap();
    assert_eq!(expressions.get("inProgress"), None);
    for (key, health) in [("failed", "Degraded"), ("current", "Healthy")] {
        let mut context = cel::Context::default();
        for (name, value) in object.as_object().unwrap() {
            context.add_variable(name.as_str(), value).unwrap();
        }
        let program = cel::Program::compile(expressions[key].as_str().unwrap()).unwrap();
        match program.execute(&context).unwrap_or_else(|error| panic!("{key}: {error}: {object}")) {
            cel::Value::Bool(true) => return health,
            cel::Value::Bool(false) => {}
            other => panic!("{key} is no boolean: {other:?}"),
        }
    }
    "Progressing"
}

/// A VM whose spec is observed, with these conditions: type, status, reason and message.
fn vm(conditions: &[(&str, &str, &str, &str)]) -> Value {
    let conditions: Vec<Value> = conditions
        .iter()
        .map(|(type_, status, reason, message)| {
            json!({ "type": type_, "status": status, "reason": reason, "message": message })
        })
        .collect();
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "generation": 3 },
        "spec": { "vm": { "state": "Running", "maximumCpus": 1 } },
        "status": { "observedGeneration": 3, "conditions": conditions },
    })
}

fn both(object: &Value) -> String {
    let (argo, message) = argo_health(object);
    assert_eq!(argo, flux_health(object), "{object}");
    assert!(!message.is_empty());
    argo
}

#[test]
fn a_pool_has_a_health() {
    let ready =
        |status: &str, reason: &str| json!({ "type": "Ready", "status": status, "reason": reason, "message": "m" });
    let scaled =
        |status: &str, reason: &str| json!({ "type": "Scaled", "status": status, "reason": reason, "message": "m" });
    let usable = || ready("True", "Usable");
    for (conditions, expected) in [
        (json!([usable()]), "Healthy"),
        (json!([ready("False", "NoMembers")]), "Healthy"),
        (json!([usable(), scaled("True", "AsWanted")]), "Healthy"),
        (json!([usable(), scaled("False", "InUse")]), "Healthy"),
        (json!([usable(), scaled("False", "NotNew")]), "Healthy"),
        (json!([usable(), scaled("False", "OutOfPool")]), "Healthy"),
        (json!([ready("False", "NoMembers"), scaled("False", "Progressing")]), "Progressing"),
        (json!([scaled("False", "Progressing"), usable()]), "Progressing"),
        (json!([usable(), scaled("False", "Refused")]), "Degraded"),
        (json!([usable(), scaled("False", "NameTaken")]), "Degraded"),
        (json!([ready("False", "RetentionInvalid"), scaled("True", "AsWanted")]), "Degraded"),
    ] {
        let mut pool = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "desks", "generation": 2 },
            "spec": {}, "status": { "observedGeneration": 2, "conditions": conditions },
        });
        assert_eq!(both(&pool), expected, "{pool}");
        pool["status"]["observedGeneration"] = json!(1);
        assert_eq!(both(&pool), "Progressing", "{pool}");
        pool["status"]["observedGeneration"] = json!(2);
        pool["metadata"]["deletionTimestamp"] = json!("2026-11-27T06:00:00Z");
        assert_eq!(both(&pool), "Progressing", "{pool}");
        pool.as_object_mut().unwrap().remove("status");
        assert_eq!(argo_health(&pool).0, "Progressing");
    }
}

/// The reasons that Ready can have, with what the tools must make of each.
#[test]
fn each_reason_of_ready_has_a_health() {
    use Reason::*;
    let of_ready = |reason: &Reason, status: &str| reason.uses().split(", ").any(|is| is == format!("Ready={status}"));
    // What time does not mend.
    let degraded = [
        ApplyFailed,
        ChangeFailed,
        ClaimMissing,
        ClaimReplaced,
        ClaimTaken,
        ContainerFailed,
        ContainerWaiting,
        GuestPanicked,
        InvalidImageName,
        InvalidSpec,
        NameTaken,
        NetworkLost,
        NotAllowed,
        NodeNotResponding,
        PodNotRemoved,
        RunnerFailed,
        StorageFailed,
        StorageFull,
        TemplateError,
        TpmLost,
        WatchFailed,
    ];
    let stalled: Vec<&Reason> = Reason::ALL.iter().filter(|reason| reason.is_stalled()).collect();
    let mut expected = degraded.each_ref().to_vec();
    expected.sort_by_key(|reason| Reason::ALL.iter().position(|other| other == *reason));
    assert_eq!(stalled, expected, "the condition Stalled says the same");
    // What another object, a node, a registry or the next try mends.
    let progressing = [
        Starting,
        Stopping,
        Restarting,
        WaitingForDeletion,
        BeingDeleted,
        Unschedulable,
        ImagePullFailed,
        StartDelayed,
        HelperNotReady,
        PodFailed,
        PodSucceeded,
        ClaimDeleting,
        PodNotEnded,
        ClaimInUse,
        MountMissing,
        SecretRefused,
        Pausing,
        Resuming,
    ];
    let page = text("docs/gitops.md");
    let listed = page.split("are Degraded: ").nth(1).unwrap().split('.').next().unwrap();
    let listed: Vec<&str> = listed.split(',').map(str::trim).collect();
    assert_eq!(listed, degraded.map(Reason::as_str), "docs/gitops.md");
    let mut seen = 0;
    for reason in Reason::ALL {
        if of_ready(reason, "True") || *reason == Paused {
            let vm = vm(&[("Ready", "True", reason.as_str(), "as wanted")]);
            assert_eq!((both(&vm).as_str(), argo_health(&vm).1.as_str()), ("Healthy", "as wanted"), "{reason}");
            seen += 1;
        }
        if of_ready(reason, "False") {
            let vm = vm(&[("Ready", "False", reason.as_str(), "why")]);
            let expected = match (degraded.contains(reason), progressing.contains(reason)) {
                (true, false) => "Degraded",
                (false, true) => "Progressing",
                _ => panic!("{reason} has no health here, in deploy/argocd and in example/gitops/flux"),
            };
            assert_eq!(both(&vm), expected, "{reason}");
            assert_eq!(argo_health(&vm).1, format!("{reason}: why"));
            seen += 1;
        }
    }
    assert_eq!(seen, degraded.len() + progressing.len() + 5, "a reason of the lists does not exist any more");
}

#[test]
fn a_vm_is_never_suspended_and_what_is_not_known_yet_is_in_progress() {
    let ready = ("Ready", "True", "Running", "the VM runs");
    let mut unseen = vm(&[("Ready", "Unknown", "Pending", "waiting")]);
    unseen["status"]["observedGeneration"] = json!(-1);
    let mut changed = vm(&[ready]);
    changed["metadata"]["generation"] = json!(4);
    let mut deleted = vm(&[("Ready", "False", "NameTaken", "taken")]);
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    let mut without_conditions = vm(&[]);
    without_conditions["status"].as_object_mut().unwrap().remove("conditions");
    let objects = |reason| vm(&[ready, ("ObjectsReady", "False", reason, "the Service")]);
    for (vm, expected) in [
        (unseen, "Progressing"),
        (vm(&[]), "Progressing"),
        (without_conditions, "Progressing"),
        (changed, "Progressing"),
        (deleted, "Progressing"),
        (vm(&[("Running", "False", "Stopped", "down"), ("Ready", "True", "StoppedAsRequested", "down")]), "Healthy"),
        (vm(&[("Ready", "True", "GuestShutdown", "down")]), "Healthy"),
        (vm(&[("Ready", "False", "Paused", "somebody paused the guest")]), "Healthy"),
        (objects("NameTaken"), "Degraded"),
        (objects("WaitingForDeletion"), "Healthy"),
    ] {
        assert_eq!(both(&vm), expected, "{vm}");
    }
    // The definition does not require a message.
    let mut silent = vm(&[("Ready", "False", "NameTaken", "taken")]);
    silent["status"]["conditions"][0].as_object_mut().unwrap().remove("message");
    assert_eq!(both(&silent), "Degraded");
    // A tool that looks before the CRD's default is there.
    let mut bare = vm(&[]);
    bare.as_object_mut().unwrap().remove("status");
    assert_eq!(argo_health(&bare).0, "Progressing");
}

#[test]
fn argo_cd_offers_the_actions_that_change_something() {
    const RESTARTED: &str = "vmoperator.jdrupes.org/restartedAt";
    const UNTIL: &str = "vmoperator.jdrupes.org/stateUntil";
    let text = argo()["resource.customizations.actions.vmoperator.jdrupes.org_VirtualMachine"].take();
    let actions: Value = serde_yaml::from_str(text.as_str().unwrap()).unwrap();
    let definitions: BTreeMap<&str, &str> = actions["definitions"]
        .as_array()
        .unwrap()
        .iter()
        .map(|action| (action["name"].as_str().unwrap(), action["action.lua"].as_str().unwrap()))
        .collect();
    let with = |state: &str, status: Value| {
        let mut vm = vm(&[]);
        vm["spec"]["vm"]["state"] = json!(state);
        vm["status"].as_object_mut().unwrap().extend(status.as_object().unwrap().clone());
        vm
    };
    let without_state = |status: Value| {
        let mut vm = with("Stopped", status);
        vm["spec"]["vm"].as_object_mut().unwrap().remove("state");
        vm
    };
    let halted = json!({ "halted": { "by": "guest", "time": "2026-01-01T00:00:00Z", "generation": 1 } });
    let released =
        json!({ "halted": { "by": "guest", "time": "2026-01-01T00:00:00Z", "generation": 1, "released": true } });
    let unmanaged = json!({ "conditions": [{ "type": "PowerUnmanaged", "status": "True", "reason": "StateNotSet", "message": "" }] });
    let for_some_time = |state: &str| json!({ "stateOverride": { "state": state, "until": "2026-01-01T00:00:00Z" } });
    let mut deleted = with("Running", json!({}));
    deleted["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    for (vm, offered) in [
        (with("Running", json!({})), &["restart", "stop"][..]),
        (with("Stopped", json!({})), &["start"]),
        (with("Running", halted.clone()), &["start", "stop"]),
        (with("Running", released), &["restart", "stop"]),
        (with("Stopped", unmanaged.clone()), &["restart", "start"]),
        (without_state(unmanaged), &["restart", "start", "stop"]),
        (without_state(json!({})), &["start"]),
        // For some time, whatever the state is.
        (with("Running", for_some_time("Stopped")), &["start", "stop"]),
        (with("Running", for_some_time("Running")), &["restart", "stop"]),
        (with("Stopped", for_some_time("Running")), &["restart", "start", "stop"]),
        (without_state(for_some_time("Running")), &["restart", "start", "stop"]),
        (deleted, &[]),
    ] {
        let found = lua(actions["discovery.lua"].as_str().unwrap(), &vm);
        let found: BTreeMap<String, Value> = serde_json::from_value(found).unwrap();
        assert!(found.keys().all(|name| definitions.contains_key(name.as_str())) && found.len() == definitions.len());
        let enabled: Vec<&str> =
            found.iter().filter(|(_, action)| action["disabled"] == false).map(|(name, _)| name.as_str()).collect();
        assert_eq!(enabled, offered, "{vm}");
    }
    let run = |name: &str, vm: &Value| lua(definitions[name], vm);
    let changed = |before: &Value, after: &Value| json!(json_patch::diff(before, after));
    let stopped = with("Stopped", json!({}));
    assert_eq!(changed(&stopped, &run("start", &stopped))[0]["path"], "/spec/vm/state");
    assert_eq!(run("start", &without_state(json!({})))["spec"]["vm"]["state"], "Running");
    let running = with("Running", json!({}));
    assert_eq!(run("stop", &running)["spec"]["vm"]["state"], "Stopped");
    for (name, vm) in [("restart", running), ("start", with("Running", halted))] {
        let after = run(name, &vm);
        let restarted = after["metadata"]["annotations"][RESTARTED].as_str().unwrap();
        assert!(restarted.parse::<k8s_openapi::jiff::Timestamp>().is_ok(), "{name}: {restarted}");
        assert_eq!(after["spec"], vm["spec"], "{name}");
    }
    // A power state for some time ends with a start or a stop, and nothing is restarted by it.
    for (name, state, annotations, left) in [
        ("start", "Running", json!({ UNTIL: "Stopped 2026-01-01T00:00:00Z" }), Value::Null),
        (
            "start",
            "Stopped",
            json!({ UNTIL: "Running 2026-01-01T00:00:00Z", "note": "kept" }),
            json!({ "note": "kept" }),
        ),
        ("stop", "Stopped", json!({ UNTIL: "Running 2026-01-01T00:00:00Z" }), Value::Null),
        ("stop", "Running", json!({ "note": "kept" }), json!({ "note": "kept" })),
    ] {
        let mut vm = with(state, json!({}));
        vm["metadata"]["annotations"] = annotations;
        let after = run(name, &vm);
        let wanted = if name == "start" { "Running" } else { "Stopped" };
        assert_eq!(
            (&after["spec"]["vm"]["state"], &after["metadata"]["annotations"]),
            (&json!(wanted), &left),
            "{name}"
        );
    }
}

const TREES: &str = "example/gitops";

fn text(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path))
        .unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn the_copies_in_the_trees_are_those_of_the_originals() {
    for tool in ["flux", "argocd"] {
        let references = text(&format!("{TREES}/{tool}/vms/vm-references.yaml"));
        assert_eq!(references, text("deploy/kustomize/vm-references.yaml"), "{tool}");
        for file in ["pod.yaml.j2", "values.yaml", "values.schema.json"] {
            let copy = text(&format!("{TREES}/{tool}/templates/import-disk/{file}"));
            assert_eq!(copy, text(&format!("example/sets/import-disk/{file}")), "{tool}: {file}");
        }
    }
}

/// The chart's values in a tree match its schema and name the image of this version, where the tool that updates it finds it.
#[test]
fn the_trees_install_this_version_of_the_chart() {
    let release = yaml(&format!("{TREES}/flux/manager/release.yaml")).remove(0);
    let application = yaml(&format!("{TREES}/argocd/applications/manager.yaml")).remove(0);
    let values = [&release["spec"]["values"], &application["spec"]["source"]["helm"]["valuesObject"]];
    assert_eq!(values[0], values[1], "both trees install the same");
    assert_eq!(values[0]["image"]["tag"], env!("CARGO_PKG_VERSION"));
    let chart = application["spec"]["source"]["path"].as_str().unwrap();
    assert_eq!(release["spec"]["chart"]["spec"]["chart"].as_str(), Some(format!("./{chart}").as_str()));
    #[cfg(feature = "schema")]
    {
        let schema: Value = serde_json::from_str(&text(&format!("{chart}/values.schema.json"))).unwrap();
        jsonschema::validator_for(&schema).unwrap().validate(values[0]).unwrap();
    }
    let mark =
        concat!("      tag: ", env!("CARGO_PKG_VERSION"), r#" # {"$imagepolicy": "flux-system:vm-operator:tag"}"#);
    assert!(text(&format!("{TREES}/flux/manager/release.yaml")).lines().any(|line| line == mark));
    let renovate: Value = serde_json::from_str(&text(&format!("{TREES}/argocd/renovate.json"))).unwrap();
    let manager = &renovate["customManagers"][0];
    let files = regex::Regex::new(manager["managerFilePatterns"][0].as_str().unwrap().trim_matches('/')).unwrap();
    assert!(files.is_match("example/gitops/argocd/applications/manager.yaml"));
    let found = regex::Regex::new(manager["matchStrings"][0].as_str().unwrap()).unwrap();
    let manifest = text(&format!("{TREES}/argocd/applications/manager.yaml"));
    let found: Vec<_> = found.captures_iter(&manifest).collect();
    assert_eq!((found.len(), &found[0]["currentValue"]), (1, env!("CARGO_PKG_VERSION")));
    let image = format!("{}/vm-operator", values[0]["image"]["registry"].as_str().unwrap());
    assert_eq!(&found[0]["depName"], image);
    let repository = &yaml(&format!("{TREES}/flux/cluster/image-updates.yaml"))[0];
    assert_eq!(repository["spec"]["image"], image);
}

/// Each folder that Flux or Argo CD is told to apply is there, and each kustomization has all files of its folder.
#[test]
fn the_trees_are_whole() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = vec![];
    for file in ["manager", "templates", "vms"] {
        let of_flux = yaml(&format!("{TREES}/flux/cluster/{file}.yaml")).remove(0);
        paths.push(of_flux["spec"]["path"].as_str().unwrap().to_owned());
        let of_argo = yaml(&format!("{TREES}/argocd/applications/{file}.yaml")).remove(0);
        paths.push(of_argo["spec"]["source"]["path"].as_str().unwrap().to_owned());
    }
    paths.push(yaml(&format!("{TREES}/argocd/root.yaml"))[0]["spec"]["source"]["path"].as_str().unwrap().to_owned());
    paths.push(format!("{TREES}/flux/cluster"));
    let mut kustomizations = 0;
    for path in &paths {
        let folder = root.join(path);
        assert!(folder.is_dir(), "{path}");
        let Ok(kustomization) = fs::read_to_string(folder.join("kustomization.yaml")) else { continue };
        kustomizations += 1;
        for entry in fs::read_dir(&folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(name == "kustomization.yaml" || kustomization.contains(&name), "{path}/{name} is not applied");
        }
    }
    assert_eq!((paths.len(), kustomizations), (8, 6));
}
