//! VMs in Git: the tests send the requests that Flux, Argo CD, kubectl and other appliers send.
//!
//! A tool must never see a difference that it did not cause, and it must not stop a VM by accident.

mod argo_cd;
mod argo_cd_tree;
mod flux;
mod flux_tree;
mod mishaps;
mod rounds;
mod tools;

use crate::commands::{run, succeeds};
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, vm_manifest},
};
use k8s_openapi::{
    api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod},
    apimachinery::pkg::apis::meta::v1::FieldsV1,
    jiff::Timestamp,
};
use kube::{
    Api, Client, ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use vm_operator::{
    api::{PowerState, VirtualMachine},
    object::STATE_UNTIL_ANNOTATION,
};

/// The name under which Flux applies.
const FLUX: &str = "kustomize-controller";

/// A VM with everything that could confuse a tool: texts that YAML 1.1 reads as another type, quantities in other units, lists
/// whose items have defaults.
fn everything(name: &str) -> Value {
    let mut vm = vm_manifest(name);
    vm["metadata"]["labels"] = json!({ "tier": "no", "app.kubernetes.io/part-of": "on" });
    vm["spec"]["nodeSelector"] = json!({ "y": "n" });
    vm["spec"]["cloudInit"] = json!({ "metaData": { "x": "1e3" }, "userData": { "runcmd": ["0x10", "yes"] } });
    vm["spec"]["loadBalancerService"] = json!({ "labels": { "tier": "yes" } });
    vm["spec"]["permissions"] = json!([{ "user": "jane", "may": ["*"] }]);
    vm["spec"]["vm"]["maximumRam"] = json!("1024Mi");
    vm["spec"]["vm"]["networks"] = json!([{ "tap": {} }, { "tap": {} }]);
    let disks = vm["spec"]["vm"]["disks"].as_array_mut().unwrap();
    disks.push(json!({ "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": "1024Mi" } } } } }));
    disks.push(json!({ "cdrom": { "image": "" } }));
    vm["spec"]["vm"].as_object_mut().unwrap().remove("state");
    vm
}

/// The configuration that the chart has written for the manager in the namespace `vm-operator`.
async fn configuration_of_the_chart(client: &Client) -> Option<String> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), "vm-operator");
    maps.get_opt("vm-operator").await.unwrap().and_then(|map| map.data?.remove("config.yaml"))
}

fn vms(ns: &ManagedNamespace) -> Api<VirtualMachine> {
    ns.api()
}

async fn set_state(ns: &ManagedNamespace, name: &str, manager: &str, state: &str) {
    let parameters = PatchParams { field_manager: Some(manager.into()), ..PatchParams::default() };
    let patch = json!({ "spec": { "vm": { "state": state } } });
    vms(ns).patch(name, &parameters, &Patch::Merge(patch)).await.unwrap();
}

/// What Flux's kustomize-controller does at each sync: it makes fields of managers whose name begins with `kubectl` its own
/// (github.com/fluxcd/pkg, ssa/patch.go), then applies with force.
async fn flux(ns: &ManagedNamespace, manifest: &Value) {
    let name = manifest["metadata"]["name"].as_str().unwrap();
    let mut vm = vms(ns).get(name).await.unwrap();
    let entries = vm.metadata.managed_fields.take().unwrap_or_default();
    let is_taken = |manager: Option<&str>, subresource: Option<&str>| {
        let manager = manager.unwrap_or_default();
        subresource.is_none_or(str::is_empty) && (manager.starts_with("kubectl") || manager == "before-first-apply")
    };
    let (taken, mut rest): (Vec<_>, Vec<_>) =
        entries.into_iter().partition(|entry| is_taken(entry.manager.as_deref(), entry.subresource.as_deref()));
    if let Some(first) = taken.first().cloned() {
        let at = rest
            .iter()
            .position(|entry| entry.manager.as_deref() == Some(FLUX) && entry.operation.as_deref() == Some("Apply"));
        let mut own = at.map_or(first, |at| rest.remove(at));
        own.manager = Some(FLUX.into());
        own.operation = Some("Apply".into());
        for entry in &taken {
            let mut fields = own.fields_v1.take().map(|fields| fields.0).unwrap_or_default();
            merge(&mut fields, &entry.fields_v1.as_ref().unwrap().0);
            own.fields_v1 = Some(FieldsV1(fields));
        }
        rest.push(own);
        let patch: json_patch::Patch =
            serde_json::from_value(json!([{ "op": "replace", "path": "/metadata/managedFields", "value": rest }]))
                .unwrap();
        vms(ns).patch(name, &PatchParams::default(), &Patch::<Value>::Json(patch)).await.unwrap();
    }
    vms(ns).patch(name, &PatchParams::apply(FLUX).force(), &Patch::Apply(manifest)).await.unwrap();
}

fn merge(into: &mut Value, from: &Value) {
    for (name, value) in from.as_object().into_iter().flatten() {
        merge(&mut into[name], value);
    }
    if into.is_null() {
        *into = json!({});
    }
}

/// The spec of a VM and the UID of its Pod.
async fn life(ns: &ManagedNamespace, name: &str) -> (Value, Option<String>) {
    let pod = ns.api::<Pod>().get_opt(name).await.unwrap();
    (json!(vms(ns).get(name).await.unwrap().spec), pod.and_then(|pod| pod.uid()))
}

/// Starts a VM and reports that its guest runs.
async fn start(ns: &ManagedNamespace, name: &str) {
    set_state(ns, name, "vm-operator-cli", "Running").await;
    ns.vm_with_reason(name, "Starting").await;
    ns.report(name, true, "Started").await;
    ns.vm_with_reason(name, "Running").await;
}

/// No tool sees a difference: a server-side dry run changes nothing, and a comparison with the manifest finds nothing.
async fn no_difference(ns: &ManagedNamespace, manifest: &Value) {
    let name = manifest["metadata"]["name"].as_str().unwrap();
    let dry = PatchParams { dry_run: true, ..PatchParams::apply(FLUX).force() };
    // The manager may write the status meanwhile. Then the versions differ, and it is tried again.
    eventually("a dry run between two writes of others", LIMIT, async || {
        let live = vms(ns).get(name).await.unwrap();
        let after = vms(ns).patch(name, &dry, &Patch::Apply(manifest)).await.unwrap();
        assert_eq!(json!(after.spec), json!(live.spec), "server-side dry run");
        (after.metadata.resource_version == live.metadata.resource_version).then_some(())
    })
    .await;
    // As Argo CD compares without a dry run: what is in Git, path by path, with lists as a whole.
    let raw = ns.namespace.kubectl(&["get", "vm", name, "--output=json"]);
    let raw: Value = serde_json::from_str(&raw).unwrap();
    let mut different = Vec::new();
    compare("spec", &manifest["spec"], &raw["spec"], &mut different);
    assert_eq!(different, [""; 0]);
}

fn compare(path: &str, git: &Value, live: &Value, different: &mut Vec<String>) {
    match (git, live) {
        (Value::Object(git), Value::Object(_)) => {
            for (name, value) in git {
                compare(&format!("{path}.{name}"), value, &live[name], different);
            }
        }
        (git, live) if git == live => {}
        (git, live) => different.push(format!("{path}: {git} {live}")),
    }
}

#[tokio::test]
async fn a_vm_in_git_shows_no_difference_after_every_feature_was_used() {
    let ns = ManagedNamespace::new("no-difference").await;
    let mut manifest = everything("no");
    manifest["spec"]["guestShutdownStops"] = json!(true);
    vms(&ns).patch("no", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("no", "StoppedAsRequested").await;
    no_difference(&ns, &manifest).await;
    start(&ns, "no").await;
    no_difference(&ns, &manifest).await;
    ns.patch_vm("no", json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/restartedAt": "now" } } })).await;
    ns.pod_when("no", "a new one", |pod| pod.annotations().contains_key("vmoperator.jdrupes.org/restartedAt")).await;
    set_state(&ns, "no", "vm-operator-cli", "Stopped").await;
    ns.vm_with_reason("no", "StoppedAsRequested").await;
    no_difference(&ns, &manifest).await;
    // A reset, a live change, a disk that is to grow.
    ns.patch_vm("no", json!({ "spec": { "vm": { "resetCount": 1, "currentCpus": 1 } } })).await;
    manifest["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["resources"]["requests"]["storage"] =
        json!("2Gi");
    vms(&ns).patch("no", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("no", "StoppedAsRequested").await;
    no_difference(&ns, &manifest).await;
    // The guest shuts itself down, and then we write the state, which nobody applies.
    start(&ns, "no").await;
    ns.report("no", false, "GuestShutdown").await;
    ns.vm_when("no", "stopped by us", |vm| vm.spec.vm.state == PowerState::Stopped).await;
    ns.vm_with_reason("no", "StoppedAsRequested").await;
    no_difference(&ns, &manifest).await;
    // Another CD, a user, a password; a stop that does not wait for the guest.
    start(&ns, "no").await;
    manifest["spec"]["vm"]["disks"][2]["cdrom"]["image"] = json!("on.iso");
    vms(&ns).patch("no", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.patch_vm("no", json!({ "spec": { "vm": { "display": { "loggedInUser": "jane" } } } })).await;
    let password = r#"--patch={"stringData":{"display-password":"yes","password-expiry":"never"}}"#;
    ns.namespace.kubectl(&["patch", "secret", "no-display-secret", password]);
    ns.vm_with_reason("no", "Running").await;
    no_difference(&ns, &manifest).await;
    let uid = ns.api::<Pod>().get("no").await.unwrap().uid();
    ns.patch_vm("no", json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/forceStop": uid } } })).await;
    set_state(&ns, "no", "vm-operator-cli", "Stopped").await;
    ns.vm_with_reason("no", "StoppedAsRequested").await;
    no_difference(&ns, &manifest).await;
    // Other templates.
    start(&ns, "no").await;
    let version = |vm: &VirtualMachine| vm.status.as_ref().unwrap().templates.as_ref().unwrap().version.clone();
    let before = version(&vms(&ns).get("no").await.unwrap());
    let more = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-more' }}}\n";
    ns.manager.change_templates(&[("more.yaml.j2", more)]);
    ns.vm_when("no", "rendered anew", |vm| version(vm) != before).await;
    no_difference(&ns, &manifest).await;
    // Left without its resource, and adopted when Git makes that again.
    let uid = ns.api::<Pod>().get("no").await.unwrap().uid();
    ns.delete_and_orphan("no").await;
    let made = vms(&ns).patch("no", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    let pod = ns
        .pod_when("no", "owned again", |pod| {
            pod.owner_references().iter().any(|it| Some(&it.uid) == made.uid().as_ref())
        })
        .await;
    assert_eq!(pod.uid(), uid);
    ns.vm_when("no", "up", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
    no_difference(&ns, &manifest).await;
}

#[tokio::test]
async fn a_client_side_apply_finds_nothing_to_do() {
    let ns = ManagedNamespace::new("client-side").await;
    let mut manifest = everything("yes");
    manifest["spec"]["vm"]["state"] = json!("Running");
    let text = manifest.to_string();
    ns.namespace.apply(&text);
    ns.vm_with_reason("yes", "Starting").await;
    for _ in 0..3 {
        let said = ns.namespace.apply(&text);
        assert!(said.contains("unchanged"), "{said}");
    }
    let vm = vms(&ns).get("yes").await.unwrap();
    assert_eq!(vm.metadata.generation, Some(1));
}

#[tokio::test]
async fn flux_stops_no_vm_whose_state_is_not_in_git() {
    let ns = ManagedNamespace::new("flux").await;
    let manifest = everything("apple");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    // Whoever starts it: our command, or a bare kubectl, whose fields Flux takes over and removes.
    for manager in ["vm-operator-cli", "kubectl-patch", "kubectl-edit"] {
        set_state(&ns, "apple", "vm-operator-cli", "Stopped").await;
        ns.vm_with_reason("apple", "StoppedAsRequested").await;
        set_state(&ns, "apple", manager, "Running").await;
        ns.vm_with_reason("apple", "Starting").await;
        let pod = ns.api::<Pod>().get("apple").await.unwrap().uid();
        for _ in 0..3 {
            flux(&ns, &manifest).await;
        }
        let vm = ns
            .vm_when("apple", "observed", |vm| {
                vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation
            })
            .await;
        assert_eq!(vm.status.unwrap().power, Some(PowerState::Running), "{manager}");
        assert_eq!(ns.api::<Pod>().get("apple").await.unwrap().uid(), pod, "{manager}");
        // The field may have lost its owner; Running, then Stopped, decides in any case.
        set_state(&ns, "apple", "vm-operator-cli", "Running").await;
    }
}

#[tokio::test]
async fn a_power_state_in_git_wins_over_a_persons() {
    let ns = ManagedNamespace::new("git-power").await;
    let mut manifest = everything("apple");
    manifest["spec"]["vm"]["state"] = json!("Running");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "Starting").await;
    set_state(&ns, "apple", "vm-operator-cli", "Stopped").await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    flux(&ns, &manifest).await;
    ns.vm_with_reason("apple", "Starting").await;
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    flux(&ns, &manifest).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
}

/// A person stops, and then starts, a VM for some time, while Flux syncs.
#[tokio::test]
async fn a_state_for_some_time_outlives_each_sync_and_then_the_spec_decides_again() {
    let ns = ManagedNamespace::new("for-some-time").await;
    let mut manifest = everything("apple");
    manifest["spec"]["vm"]["state"] = json!("Running");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;

    let told = succeeds(&ns, &["stop", "apple", "--for", "25s"]);
    assert!(told.starts_with("vm/apple stopped until 20") && told.ends_with("Z\n"), "{told}");
    let vm = ns.vm_with_reason("apple", "StoppedAsRequested").await;
    let annotation = vm.annotations()[STATE_UNTIL_ANNOTATION].clone();
    let end = annotation.strip_prefix("Stopped ").unwrap();
    let overriding = vm.status.as_ref().unwrap().state_override.clone().unwrap();
    assert_eq!((overriding.state, overriding.until.0.to_string().as_str()), (PowerState::Stopped, end));
    let (status, reason, message) = condition(&vm, "StateOverridden").unwrap();
    assert_eq!((status.as_str(), reason.as_str()), ("True", "Overridden"));
    assert!(message.contains("spec.vm.state (Running) is in force again"), "{message}");
    assert!(condition(&vm, "Ready").unwrap().2.contains(end));
    for _ in 0..3 {
        flux(&ns, &manifest).await;
        no_difference(&ns, &manifest).await;
        let (spec, pod) = life(&ns, "apple").await;
        assert_eq!((&spec["vm"]["state"], pod), (&json!("Running"), None));
    }
    assert!(succeeds(&ns, &["list"]).contains(&format!("Stopped until {end}")));
    assert!(succeeds(&ns, &["status", "apple"]).contains(&format!("Stopped until {end}")));
    let explained = succeeds(&ns, &["explain", "apple"]);
    assert!(explained.starts_with(&format!("apple is stopped for some time (until {end}")), "{explained}");

    // The time passes, and nobody does anything.
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert!(Timestamp::now() >= overriding.until.0, "the spec is in force again not before {end}");
    let status = vm.status.as_ref().unwrap();
    assert_eq!((status.state_until_ignored.as_ref(), &status.state_override), (Some(&annotation), &None));
    assert_eq!(condition(&vm, "StateOverridden"), None);
    let events = || ns.namespace.kubectl(&["get", "events", "-o", "jsonpath={.items[*].reason}"]);
    let has = |reason: &str| events().split(' ').any(|it| it == reason);
    eventually("the events", LIMIT, async || (has("Overridden") && has("OverrideEnded")).then_some(())).await;
    no_difference(&ns, &manifest).await;

    // The other way round. What stands in the way of a stop is removed, although Git applies the state.
    manifest["spec"]["vm"]["state"] = json!("Stopped");
    flux(&ns, &manifest).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    let refused = run(&ns, &["start", "apple"]);
    assert!(refused.code == 1 && refused.talk.contains("or give --for 2h"), "{refused:?}");
    assert!(succeeds(&ns, &["start", "apple", "--for", "2h"]).starts_with("vm/apple started until 20"));
    ns.vm_with_reason("apple", "Starting").await;
    flux(&ns, &manifest).await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    assert_eq!(succeeds(&ns, &["stop", "apple"]), "vm/apple stopped\n");
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    assert!(!vms(&ns).get("apple").await.unwrap().annotations().contains_key(STATE_UNTIL_ANNOTATION));

    // What is no state and time changes nothing.
    ns.patch_vm("apple", json!({ "metadata": { "annotations": { STATE_UNTIL_ANNOTATION: "Running for ever" } } }))
        .await;
    let vm = ns.vm_when("apple", "told", |vm| condition(vm, "StateOverridden").is_some()).await;
    let (status, reason, message) = condition(&vm, "StateOverridden").unwrap();
    assert_eq!((status.as_str(), reason.as_str()), ("False", "OverrideIgnored"));
    assert!(message.contains("\"Running for ever\" is not a state and a time"), "{message}");
    assert_eq!(condition(&vm, "Ready").unwrap().1, "StoppedAsRequested");
    assert_eq!(run(&ns, &["start", "apple", "--for", "721h"]).code, 2);
}

/// helm-controller with drift detection, and Argo CD with `Replace=true`, write by updates without the annotation of `kubectl apply`.
#[tokio::test]
async fn a_guests_shutdown_stays_where_a_tool_writes_the_state_by_updates() {
    let ns = ManagedNamespace::new("updaters").await;
    ns.create_vm("apple", |vm| {
        vm["spec"]["guestShutdownStops"] = json!(true);
        vm["spec"]["vm"]["state"] = json!("Stopped");
    })
    .await;
    for manager in ["helm-controller", "argocd-application-controller"] {
        set_state(&ns, "apple", manager, "Running").await;
        ns.vm_with_reason("apple", "Starting").await;
        ns.report("apple", true, "Started").await;
        ns.vm_with_reason("apple", "Running").await;
        ns.report("apple", false, "GuestShutdown").await;
        let vm = ns.vm_with_reason("apple", "GuestShutdown").await;
        assert_eq!(
            vm.spec.vm.state,
            PowerState::Running,
            "{manager}: what Git has is not changed, so nothing has to be put back"
        );
        // The tool's next look, and then the manager's.
        set_state(&ns, "apple", manager, "Running").await;
        settled(&ns, &manager[..4]).await;
        assert_eq!(ns.api::<Pod>().get_opt("apple").await.unwrap(), None, "{manager}");
        set_state(&ns, "apple", manager, "Stopped").await;
        ns.vm_with_reason("apple", "StoppedAsRequested").await;
    }
}

#[tokio::test]
async fn appliers_of_different_fields_do_not_fight_and_the_manager_writes_nothing_at_rest() {
    let ns = ManagedNamespace::new("appliers").await;
    let mut git = everything("apple");
    git["spec"]["vm"]["state"] = json!("Running");
    let scaler = |cpus: u32| json!({ "apiVersion": git["apiVersion"], "kind": git["kind"], "metadata": { "name": "apple" }, "spec": { "vm": { "currentCpus": cpus } } });
    let map: Api<ConfigMap> = ns.api();
    let injected = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "apple", "labels": { "injected": "yes" } },
        "data": { "injected": "yes" },
    });
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&git)).await.unwrap();
    ns.vm_with_reason("apple", "Starting").await;
    for round in 0..20 {
        vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&git)).await.unwrap();
        vms(&ns).patch("apple", &PatchParams::apply("scaler"), &Patch::Apply(scaler(1 + round % 2))).await.unwrap();
        map.patch("apple", &PatchParams::apply("injector"), &Patch::Apply(&injected)).await.unwrap();
        if round % 5 == 0 {
            ns.namespace.apply(&git.to_string());
        }
    }
    let vm = ns
        .vm_when("apple", "observed", |vm| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation)
        .await;
    assert_eq!(vm.spec.vm.current_cpus, Some(2));
    let found = eventually("the last change in the ConfigMap", LIMIT, async || {
        let found = map.get("apple").await.unwrap();
        found.data.as_ref()?["config.yaml"].contains("currentCpus: 2").then_some(found)
    })
    .await;
    assert_eq!(found.data.as_ref().unwrap()["injected"], "yes");
    assert_eq!(found.labels()["injected"], "yes");
    // Now all appliers repeat themselves, as they do at each sync.
    writes_nothing(&ns, "apple", async || {
        for _ in 0..20 {
            vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&git)).await.unwrap();
            vms(&ns).patch("apple", &PatchParams::apply("scaler"), &Patch::Apply(scaler(2))).await.unwrap();
            map.patch("apple", &PatchParams::apply("injector"), &Patch::Apply(&injected)).await.unwrap();
        }
    })
    .await;
}

/// The manager writes nothing about the VM while `done` runs, and the VM and its Pod stay the same.
async fn writes_nothing(ns: &ManagedNamespace, name: &str, done: impl AsyncFnOnce()) {
    settled(ns, "first").await;
    let (written, life_before) = (ns.manager.logged_writes(), life(ns, name).await);
    done().await;
    settled(ns, "second").await;
    assert_eq!(life(ns, name).await, life_before);
    let more: Vec<String> = ns.manager.logged_writes().into_iter().filter(|line| !written.contains(line)).collect();
    assert!(
        more.iter().any(|line| line.contains("second")) && more.iter().all(|line| !line.contains(name)),
        "{more:?}"
    );
}

/// Waits until the manager has handled everything before: a VM that is created now has its Pod.
async fn settled(ns: &ManagedNamespace, name: &str) {
    ns.create_vm(name, |_| ()).await;
    ns.vm_with_reason(name, "Starting").await;
}

#[tokio::test]
async fn twenty_rounds_of_flux_and_kubectl_while_people_start_and_stop() {
    let ns = ManagedNamespace::new("rounds").await;
    let manifest = everything("apple");
    let text = manifest.to_string();
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    let labels = json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "labels": { "second": "applier" } } });
    // Twenty of each.
    for round in 0..40 {
        let wanted = if round % 3 == 0 { PowerState::Stopped } else { PowerState::Running };
        // Through Running, so that the wish is a change even where the field has lost its owner.
        set_state(&ns, "apple", "vm-operator-cli", "Running").await;
        set_state(&ns, "apple", "vm-operator-cli", &format!("{wanted:?}")).await;
        let power = |vm: &VirtualMachine| {
            let status = vm.status.as_ref().unwrap();
            status.power == Some(wanted) && status.observed_generation == vm.metadata.generation
        };
        ns.vm_when("apple", "as somebody wants it", power).await;
        match round % 2 {
            0 => flux(&ns, &manifest).await,
            _ => drop(ns.namespace.apply(&text)),
        }
        vms(&ns).patch("apple", &PatchParams::apply("second"), &Patch::Apply(&labels)).await.unwrap();
        ns.vm_when("apple", "still as somebody wants it", power).await;
        let exists = ns
            .api::<Pod>()
            .get_opt("apple")
            .await
            .unwrap()
            .is_some_and(|pod| pod.metadata.deletion_timestamp.is_none());
        assert_eq!(exists, wanted == PowerState::Running, "round {round}");
        let changed = 1 + round % 2;
        ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": changed } } })).await;
    }
    let map: Api<ConfigMap> = ns.api();
    eventually("the last change in the ConfigMap", LIMIT, async || {
        map.get("apple").await.unwrap().data?["config.yaml"].contains("currentCpus: 2").then_some(())
    })
    .await;
    // After that the manager writes nothing.
    writes_nothing(&ns, "apple", async || {}).await;
}

#[tokio::test]
async fn objects_have_the_labels_and_annotations_that_gitops_tools_need() {
    let ns = ManagedNamespace::new("tool-labels").await;
    let mut manifest = everything("apple");
    manifest["metadata"]["labels"] = json!({
        "tier": "web", "argocd.argoproj.io/instance": "app", "kustomize.toolkit.fluxcd.io/name": "x",
        "helm.toolkit.fluxcd.io/name": "x", "helm.sh/chart": "x",
        "app.kubernetes.io/instance": "the-application",
    });
    manifest["spec"]["vm"]["state"] = json!("Running");
    vms(&ns).patch("apple", &PatchParams::apply(FLUX).force(), &Patch::Apply(&manifest)).await.unwrap();
    let vm = ns.vm_with_reason("apple", "Starting").await;
    let pod = ns.api::<Pod>().get("apple").await.unwrap();
    let labels: Vec<&str> = pod.labels().keys().map(String::as_str).collect();
    assert_eq!(
        labels,
        [
            "app.kubernetes.io/component",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/managed-by",
            "app.kubernetes.io/name",
            "tier",
        ]
    );
    assert_eq!(pod.labels()["app.kubernetes.io/instance"], "apple");
    assert_eq!(pod.owner_references()[0].controller, Some(true), "or kubectl drain refuses");
    // Claims have no owner and the instance label, so Argo CD and Flux could take them for something to prune.
    let claims = ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap().items;
    assert_eq!(claims.len(), 3, "two disks and the runner's data");
    for claim in claims {
        let annotations = claim.annotations();
        assert_eq!(annotations["argocd.argoproj.io/sync-options"], "Prune=false,Delete=false", "{annotations:?}");
        assert_eq!(annotations["argocd.argoproj.io/compare-options"], "IgnoreExtraneous");
        assert_eq!(annotations["kustomize.toolkit.fluxcd.io/prune"], "disabled");
    }
    assert_eq!(condition(&vm, "PowerUnmanaged"), None);
    assert!(vm.finalizers().is_empty(), "a machine can be deleted while no manager runs");
}
