//! The versions of a template set that came in force, and the way back to one of them.

use std::fs;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams, PostParams},
};
use serde_json::json;
use vm_operator::{
    api::{VirtualMachine, conditions::TEMPLATES_VALID},
    object::SET_LABEL,
};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
};

const MAP: &str = "templates-guarded";

/// A set that renders a ConfigMap with a number.
fn data(number: u32) -> serde_json::Value {
    let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-x' }}}\ndata: {n: {{ values.n | string }}}\n";
    json!({ "notes.yaml.j2": text, "values.yaml": format!("n: {number}\n") })
}

fn version(vm: &VirtualMachine) -> Option<String> {
    vm.status.as_ref()?.templates.as_ref()?.version.clone()
}

/// Writes the set as `argocd-controller` does.
async fn write(ns: &ManagedNamespace, data: serde_json::Value) {
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": MAP, "labels": { SET_LABEL: "guarded" } }, "data": data });
    let parameters = PatchParams::apply("argocd-controller").force();
    ns.api::<ConfigMap>().patch(MAP, &parameters, &Patch::Apply(map)).await.unwrap();
}

/// Waits until the VM's object has the number, and returns the version.
async fn in_force(ns: &ManagedNamespace, number: u32) -> String {
    let maps: Api<ConfigMap> = ns.api();
    eventually(&format!("the number {number}"), LIMIT, async || {
        let map = maps.get_opt("apple-x").await.unwrap()?;
        (map.data?["n"] == number.to_string()).then_some(())
    })
    .await;
    let name = "vm-operator-in-force-guarded";
    let kept = eventually("the set in force to be kept", LIMIT, async || {
        let kept = maps.get(name).await.unwrap().annotations()["vmoperator.jdrupes.org/version"].clone();
        let vm = ns.api::<VirtualMachine>().get("apple").await.unwrap();
        (version(&vm).as_ref() == Some(&kept)).then_some(kept)
    });
    kept.await
}

#[tokio::test]
async fn a_set_goes_back_to_a_former_version() {
    let ns = ManagedNamespace::with_templates("history", &[]).await;
    let maps: Api<ConfigMap> = ns.api();
    write(&ns, data(1)).await;
    ns.create_vm("apple", |vm| vm["spec"]["templates"] = json!({ "set": "guarded" })).await;
    let first = in_force(&ns, 1).await;
    write(&ns, data(2)).await;
    let second = in_force(&ns, 2).await;
    let templates = |arguments: &[&str]| ns.namespace.kubectl_vm(&[&["templates"], arguments].concat());
    let (code, text) = eventually("both versions in the history", LIMIT, async || {
        let (code, text) = templates(&["history", "guarded"]);
        (text.lines().count() == 3).then_some((code, text))
    })
    .await;
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        (code, lines[1][0], &lines[1][2..]),
        (0, second.as_str(), &["in", "force", "~values.yaml"][..]),
        "{text}"
    );
    assert_eq!((lines[2][0], &lines[2][2..]), (first.as_str(), &["notes.yaml.j2,", "values.yaml"][..]), "{text}");

    // What is refused is replaced by what is in force.
    write(&ns, json!({ "notes.yaml.j2": "{% if %}" })).await;
    ns.vm_when("apple", "of a refused set", |vm| {
        condition(vm, TEMPLATES_VALID).is_some_and(|it| it.1 == "NewerRefused")
    })
    .await;
    let (code, text) = templates(&["rollback", "guarded"]);
    assert!(
        code == 0 && text.contains(&format!("configmap/{MAP}: version {second} (~notes.yaml.j2, +values.yaml)")),
        "{text}"
    );
    assert!(text.contains("Argo CD applies the ConfigMap templates-guarded"), "{text}");
    ns.vm_when("apple", "of a good set", |vm| condition(vm, TEMPLATES_VALID).is_none_or(|it| it.0 == "True")).await;
    // The next apply of who applies the set has no conflict, and takes away what its set does not have.
    let next = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": MAP, "labels": { SET_LABEL: "guarded" } },
        "data": { "notes.yaml.j2": "other" } });
    let dry_run = PatchParams { dry_run: true, ..PatchParams::apply("argocd-controller") };
    let next = maps.patch(MAP, &dry_run, &Patch::Apply(next)).await.unwrap();
    assert_eq!(next.data.unwrap().into_keys().collect::<Vec<_>>(), ["notes.yaml.j2"]);

    // Then it is the version before.
    let (code, text) = templates(&["rollback", "guarded"]);
    assert!(code == 0 && text.contains(&format!("version {first} (~values.yaml)")), "{text}");
    assert_eq!(in_force(&ns, 1).await, first);

    // Into a folder, and by name.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let (code, text) = templates(&["rollback", "guarded", "--to", &second[..8], "--output", path]);
    assert_eq!(
        (code, fs::read_to_string(folder.path().join("values.yaml")).unwrap().as_str()),
        (0, "n: 2\n"),
        "{text}"
    );
    for (arguments, words) in [
        (&["rollback", "guarded", "--to", ""] as &[&str], "several versions of"),
        (&["rollback", "guarded", "--to", "nothing"], "has no version \"nothing\" in its history"),
        (&["rollback"], "comes from no ConfigMap"),
        (&["history", "other"], "no manager keeps it"),
    ] {
        let (code, text) = templates(arguments);
        assert!(code == 1 && text.contains(words), "{arguments:?} {code}: {text}");
    }

    // The history does not grow without end, and goes with its set.
    for number in 3..9 {
        write(&ns, data(number)).await;
        in_force(&ns, number).await;
    }
    let history = ListParams::default().labels("vmoperator.jdrupes.org/templates-history=guarded");
    eventually("a history of five versions", LIMIT, async || {
        (maps.list(&history).await.unwrap().items.len() == 5).then_some(())
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "templates": null } })).await;
    maps.delete(MAP, &Default::default()).await.unwrap();
    eventually("no history", LIMIT, async || maps.list(&history).await.unwrap().items.is_empty().then_some(())).await;
}

#[tokio::test]
async fn the_templates_for_all_vms_go_back_and_leave_the_sets_alone() {
    let ns = ManagedNamespace::with_templates("history-base", &[("values.yaml", "n: 1\n")]).await;
    ns.create_vm("apple", |_| {}).await;
    let first = ns.vm_when("apple", "rendered", |vm| version(vm).is_some()).await;
    let maps: Api<ConfigMap> = ns.api();
    let data = json!({ "values.yaml": "n: 2\n", "lib__x.j2": "x", "sets__desktop__values.yaml": "m: 1\n" });
    ns.manager.change_templates(&[
        ("values.yaml", "n: 2\n"),
        ("lib/x.j2", "x"),
        ("sets/desktop/values.yaml", "m: 1\n"),
    ]);
    ns.vm_when("apple", "of another version", |vm| version(vm) != version(&first)).await;
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator-templates" }, "data": data });
    maps.create(&PostParams::default(), &serde_json::from_value(map).unwrap()).await.unwrap();
    let (code, text) = eventually("two versions", LIMIT, async || {
        let said = ns.namespace.kubectl_vm(&["templates", "history"]);
        (said.1.lines().count() == 3).then(|| ns.namespace.kubectl_vm(&["templates", "rollback"]))
    })
    .await;
    assert!(code == 0 && text.contains("(~values.yaml, -lib/x.j2)"), "{text}");
    let data = maps.get("vm-operator-templates").await.unwrap().data.unwrap();
    assert_eq!(json!(data), json!({ "values.yaml": "n: 1\n", "sets__desktop__values.yaml": "m: 1\n" }));
}
