//! `kubectl vm migrate-check` on what two releases of the VM-Operator in Java left, compared with what the manager then does.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Secret, Service};
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use rustix::process::Signal;
use serde_json::{Value, json};
use vm_operator::{api::VirtualMachine, object::INSTANCE_LABEL};

use crate::{
    commands::{Printed, run},
    support::{
        managed_namespace::ManagedNamespace,
        manager::{Manager, NOTHING_ELSE},
    },
    takeover_all::{BREAKS_A_RULE, CONFIGURATION, documents, leave},
};

/// A namespace as that manager left it, before ours starts.
async fn left(test: &str, release: &[Value]) -> ManagedNamespace {
    let mut ns = ManagedNamespace::with_configuration(test, CONFIGURATION).await;
    ns.manager.signal(Signal::KILL);
    ns.manager.wait_for_end().await;
    ns.namespace.apply(include_str!("../../deploy/legacy-runner.yaml"));
    let configuration = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator" }, "data": { "config.yaml": CONFIGURATION },
    });
    ns.namespace.create(&configuration.to_string()).await;
    leave(&ns, release).await;
    ns
}

/// The versions of the objects of VMs, without Pods and their makers, which others change too.
async fn versions(ns: &ManagedNamespace) -> BTreeMap<(String, String), String> {
    let mut found = BTreeMap::new();
    macro_rules! add {
        ($($kind:ident),*) => {$(
            for object in ns.api::<$kind>().list(&ListParams::default().labels(INSTANCE_LABEL)).await.unwrap() {
                let key = (object.labels()[INSTANCE_LABEL].clone(), format!("{} {}", stringify!($kind), object.name_any()));
                found.insert(key, object.resource_version().unwrap());
            }
        )*};
    }
    add!(ConfigMap, PersistentVolumeClaim, Secret, Service);
    found
}

fn report(printed: &Printed) -> (Vec<String>, BTreeMap<String, Value>) {
    let report: Value = serde_json::from_str(&printed.data).unwrap_or_else(|_| panic!("{printed:?}"));
    let texts =
        report["findings"].as_array().unwrap().iter().map(|finding| finding["text"].as_str().unwrap().to_owned());
    let vms = report["vms"].as_array().unwrap().iter().map(|vm| (vm["name"].as_str().unwrap().to_owned(), vm.clone()));
    (texts.collect(), vms.collect())
}

fn texts(vm: &Value, needs_attention: bool) -> String {
    let findings = vm["findings"].as_array().unwrap().iter().filter(|it| it["needsAttention"] == needs_attention);
    findings.map(|finding| finding["text"].as_str().unwrap()).collect::<Vec<_>>().join("\n")
}

/// The lines that the command prints for the configuration, and the findings' other texts.
fn lines(texts: Vec<String>) -> (String, Vec<String>) {
    let (lines, others): (Vec<String>, Vec<String>) =
        texts.into_iter().partition(|text| text.contains("\"/Manager/Controller/Reconciler\":\n"));
    let (_, lines) =
        lines.first().and_then(|text| text.split_once(":\n\"/Manager")).expect("lines for the configuration");
    (format!("\"/Manager{lines}\n"), others)
}

/// Sets the configuration that the manager will have.
async fn configure(ns: &ManagedNamespace, text: &str) {
    let config = json!({ "data": { "config.yaml": text } });
    ns.api::<ConfigMap>().patch("vm-operator", &PatchParams::default(), &Patch::Merge(&config)).await.unwrap();
}

/// What is said is what happens when our manager takes over, with the lines that were printed and nothing else.
async fn compare_with_takeover(ns: &mut ManagedNamespace, said: &BTreeMap<String, Value>, lines: &str) {
    let before = versions(ns).await;
    let configuration = format!("{NOTHING_ELSE}{CONFIGURATION}{lines}");
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], &configuration);
    for name in said.keys() {
        ns.vm_when(name, "seen by the manager", |vm| {
            vm.status.as_ref().is_some_and(|status| status.observed_generation == vm.metadata.generation)
        })
        .await;
    }
    ns.manager.wait_until_idle().await;
    let after = versions(ns).await;
    for (name, said) in said {
        let keys = before.keys().chain(after.keys()).filter(|(vm, _)| vm == name);
        let changed: BTreeSet<&str> =
            keys.filter(|key| before.get(key) != after.get(key)).map(|(_, object)| object.as_str()).collect();
        let touched = said["atOnce"].as_array().unwrap().iter().map(|it| it["object"].as_str().unwrap());
        let is_pod = |object: &str| object.starts_with("Pod ") || object.starts_with("StatefulSet ");
        assert_eq!(changed, touched.filter(|object| !is_pod(object)).collect::<BTreeSet<_>>(), "{name}: {said}");
        let vm = ns.api::<VirtualMachine>().get(name).await.unwrap();
        let pending: BTreeSet<String> =
            vm.status.iter().flat_map(|status| &status.pending_changes).map(|change| change.path.clone()).collect();
        let next = said["atNextStart"].as_array().unwrap().iter().map(|it| it["path"].as_str().unwrap().to_owned());
        assert_eq!(pending, next.collect(), "{name}");
    }
}

#[tokio::test]
async fn what_is_said_of_release_4_is_what_happens_and_planted_problems_are_named() {
    let mut release = documents(include_str!("../predecessor/release-4-vms.yaml"));
    release.extend(documents(include_str!("../predecessor/release-4-objects.yaml")));
    let mut ns = left("check-4", &release).await;
    let before = versions(&ns).await;
    let check = run(&ns, &["migrate-check", "-o", "json"]);
    let (of_namespace, vms) = report(&check);
    let (lines, of_namespace) = lines(of_namespace);
    assert!(lines.contains("# networks.bridges br0: a10-tap"), "{lines}");
    assert!(
        lines.contains("  legacyRunnerImages: [\"") && lines.contains("org.jdrupes.vmoperator.runner.qemu-arch\""),
        "{lines}"
    );
    configure(&ns, &format!("{CONFIGURATION}{lines}")).await;
    let (after, _) = report(&run(&ns, &["migrate-check", "-o", "json"]));
    assert_eq!(after, of_namespace, "with the lines there is nothing to allow");
    configure(&ns, CONFIGURATION).await;
    assert_eq!(versions(&ns).await, before, "nothing is written");
    assert_eq!(vms.len(), 22);
    // Its web interface is no reason to wait.
    assert!(
        of_namespace[0].starts_with("keys of the configuration that have no effect here: /Manager: clusterName"),
        "{of_namespace:?}"
    );
    let attention: Vec<&str> =
        vms.iter().filter(|(_, vm)| vm["result"] == "attention").map(|(name, _)| name.as_str()).collect();
    assert_eq!((check.code, &*attention), (1, &["a15-topo"][..]), "it has a QEMU template of its own");
    assert!(
        texts(&vms["a01-running"], false).contains("it goes on with the runner of the VM-Operator"),
        "{}",
        vms["a01-running"]
    );

    // Problems that are planted.
    let patch = |name: &'static str, spec: Value| {
        let ns = &ns;
        async move { ns.patch_vm(name, json!({ "spec": spec })).await }
    };
    patch("a01-running", json!({ "runnerTemplate": { "source": "own.ftl.yaml" } })).await;
    patch("a02-stopped", json!({ "pools": ["gone"] })).await;
    patch(
        "a03-gss",
        json!({ "image": {
        "source": "registry.example.org/copy-of-a-runner:1", "repository": null, "path": null, "version": null,
    } }),
    )
    .await;
    let secrets: Api<Secret> = ns.api();
    let empty = json!({ "data": { "display-password": "" } });
    secrets.patch("a05-disks-display-secret", &PatchParams::default(), &Patch::Merge(&empty)).await.unwrap();
    let text = CONFIGURATION.replace("cpuOvercommit:", "cpuOverComit:");
    let config = json!({ "data": { "config.yaml": text, "logging.properties": "x" } });
    ns.api::<ConfigMap>().patch("vm-operator", &PatchParams::default(), &Patch::Merge(&config)).await.unwrap();
    let check = run(&ns, &["migrate-check", "-o", "json"]);
    assert_eq!(check.code, 1, "{check:?}");
    let (of_namespace, planted) = report(&check);
    assert!(
        of_namespace.iter().any(|text| text.contains("nothing knows") && text.contains("cpuOverComit")),
        "{of_namespace:?}"
    );
    assert!(of_namespace.iter().any(|text| text.starts_with("logging.properties")), "{of_namespace:?}");
    for (name, words) in [
        ("a01-running", "own.ftl.yaml is a FreeMarker template"),
        ("a02-stopped", "pools that do not exist: gone"),
        ("a03-gss", "is no runner of the VM-Operator that the configuration lists"),
        ("a05-disks", "a05-disks-display-secret has no password"),
    ] {
        assert_eq!(planted[name]["result"], "attention", "{name}");
        assert!(texts(&planted[name], true).contains(words), "{name}: {}", planted[name]);
    }
    let text = run(&ns, &["migrate-check", "-v"]);
    assert!(text.data.contains("  attention: spec.runnerTemplate.source own.ftl.yaml"), "{text:?}");
    configure(&ns, CONFIGURATION).await;
    let (of_namespace, said) = report(&run(&ns, &["migrate-check", "-o", "json"]));
    // The planted image is one more line.
    let (lines, _) = self::lines(of_namespace);
    compare_with_takeover(&mut ns, &said, &lines).await;
}

#[tokio::test]
async fn what_is_said_of_release_3_3_is_what_happens() {
    let is_stored =
        |object: &Value| object["metadata"]["name"].as_str().is_some_and(|name| !name.contains(BREAKS_A_RULE));
    let release = documents(include_str!("../predecessor/release-3.3.yaml"));
    let release: Vec<Value> = release.into_iter().filter(is_stored).collect();
    let mut ns = left("check-3", &release).await;
    let check = run(&ns, &["migrate-check", "-o", "json"]);
    let (of_namespace, _) = report(&check);
    assert_eq!(check.code, 1, "{check:?}");
    let (lines, _) = lines(of_namespace);
    configure(&ns, &format!("{CONFIGURATION}{lines}")).await;
    let check = run(&ns, &["migrate-check", "-o", "json"]);
    let (_, said) = report(&check);
    assert_eq!(check.code, 0, "{check:?}");
    let notes = texts(&said["c01-run"], false);
    assert!(notes.contains("StatefulSet c01-run makes its Pod"), "{notes}");
    assert!(notes.contains("claims keep their former names: ") && notes.contains("runner-data-c01-run-0"), "{notes}");
    assert!(texts(&said["c10-never"], false).contains("claims are created"), "{}", said["c10-never"]);
    compare_with_takeover(&mut ns, &said, &lines).await;
}
