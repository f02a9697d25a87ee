//! What the real Flux and Argo CD once did to VMs that people use, tried again with them. In `tools.rs` the tests send their writes; here the
//! programs do, and say whether they are content.

use std::{fs, path::Path, process::Command};

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};
use vm_operator::api::{PowerState, VirtualMachine};

use super::{
    argo_cd::ArgoCd,
    everything,
    flux::Flux,
    rounds::boot,
    settled,
    tools::{CLAIM, bind, claim_manifest, size, with_disk},
    vms,
};
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, play_node, vm_manifest},
};

/// Makes a folder of a repository: a kustomization with these objects.
fn write(folder: &Path, ns: &ManagedNamespace, objects: &[Value]) {
    fs::create_dir_all(folder).unwrap();
    let files = (0..objects.len()).map(|number| format!("{number}.yaml")).collect::<Vec<_>>();
    for (file, object) in files.iter().zip(objects) {
        fs::write(folder.join(file), object.to_string()).unwrap();
    }
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "namespace": ns.namespace.name(), "resources": files,
    });
    fs::write(folder.join("kustomization.yaml"), kustomization.to_string()).unwrap();
}

fn named(mut manifest: Value, name: &str) -> Value {
    manifest["metadata"]["name"] = json!(name);
    manifest
}

fn patch_by_kubectl(ns: &ManagedNamespace, name: &str, patch: &Value) {
    ns.namespace.kubectl(&["patch", "vm", name, "--type=merge", &format!("--patch={patch}")]);
}

fn set_state_by_kubectl(ns: &ManagedNamespace, name: &str, state: &str) {
    patch_by_kubectl(ns, name, &json!({ "spec": { "vm": { "state": state } } }));
}

async fn pod(ns: &ManagedNamespace, name: &str) -> Option<String> {
    let pod = ns.api::<Pod>().get_opt(name).await.unwrap()?;
    pod.metadata.deletion_timestamp.is_none().then(|| pod.uid().unwrap())
}

async fn runner_gets(ns: &ManagedNamespace, name: &str, line: &str) {
    eventually(&format!("{line:?} for the runner"), LIMIT, async || {
        ns.api::<ConfigMap>().get(name).await.unwrap().data?["config.yaml"].contains(line).then_some(())
    })
    .await;
}

#[tokio::test]
#[ignore = "builds kustomize-controller from its Go modules: make gitops-test"]
async fn what_people_do_beside_the_real_flux() {
    let ns = ManagedNamespace::new("beside-flux").await;
    play_node(&ns.client, "beside-flux").await;
    let class = "grows-beside-flux";
    let mut silent = everything("silent");
    silent["spec"]["nodeName"] = json!("beside-flux");
    silent["spec"].as_object_mut().unwrap().remove("nodeSelector");
    let grown = named(with_disk(class, "1Gi"), "grown");
    // Its claim is in Git, smaller than the VM wants it.
    let claim = claim_manifest(class, "1Gi");
    let apple = with_disk(class, "2Gi");

    let tree = tempfile::TempDir::new().unwrap();
    let mut objects = vec![silent, grown, claim, apple];
    write(&tree.path().join("vms"), &ns, &objects);
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    assert!(Command::new("cp").arg("-r").arg(deploy).arg(tree.path()).status().unwrap().success());
    let flux = Flux::start(ns.cluster, ns.namespace.name(), false).await;
    flux.publish("tree", tree.path(), 1).await;
    flux.apply_kustomization("vms", true).await;
    let content = async || {
        let ready = flux.sync("vms").await;
        assert_eq!(ready["status"], "True", "{ready}");
    };

    eprintln!("a claim in Git that is smaller than its VM wants it");
    eventually("the claim", LIMIT, async || ns.api::<PersistentVolumeClaim>().get_opt(CLAIM).await.unwrap()).await;
    bind(&ns, CLAIM, Some(class), "1Gi").await;
    let refused = |vm: &VirtualMachine| {
        condition(vm, "StorageReady").is_some_and(|it| it.1 == "GrowthRefused" && it.2.contains("kustomize-controller"))
    };
    ns.vm_when("apple", "told who has the size", refused).await;
    eventually("the first disk", LIMIT, async || {
        ns.api::<PersistentVolumeClaim>().get_opt("grown-core-disk").await.unwrap()
    })
    .await;
    bind(&ns, "grown-core-disk", Some(class), "4Gi").await;
    bind(&ns, "grown-runner-data", None, "8Mi").await;
    content().await;
    assert_eq!(size(&ns, CLAIM).await, "1Gi");

    eprintln!("a VM that plain kubectl patch starts, and a sync between that and the stop");
    for _ in 0..2 {
        set_state_by_kubectl(&ns, "silent", "Running");
        boot(&ns, "silent").await;
        let before = pod(&ns, "silent").await;
        content().await;
        ns.vm_when("silent", "unmanaged", |vm| condition(vm, "PowerUnmanaged").is_some()).await;
        assert_eq!(pod(&ns, "silent").await, before);

        patch_by_kubectl(&ns, "silent", &json!({ "spec": { "vm": { "resetCount": 1 } } }));
        runner_gets(&ns, "silent", "resetCounter: 1\n").await;
        content().await;
        runner_gets(&ns, "silent", "resetCounter: 0\n").await;

        set_state_by_kubectl(&ns, "silent", "Stopped");
        let going = ns.pod_when("silent", "going", |pod| pod.metadata.deletion_timestamp.is_some()).await.uid();
        assert!(going.is_some() && going == before);
        let annotation = "vmoperator.jdrupes.org/forceStop";
        let value = format!("{annotation}={}", before.unwrap());
        ns.namespace.kubectl(&["annotate", "vm", "silent", &value]);
        let ends = |uid: Option<String>| move |vm: &VirtualMachine| vm.status.as_ref().unwrap().end_guest == uid;
        ns.vm_when("silent", "forced", ends(going.clone())).await;
        // The sync is in progress until the guest is down.
        flux.ask("vms").await;
        ns.vm_when("silent", "without the annotation", |vm| !vm.annotations().contains_key(annotation)).await;
        settled(&ns, &format!("after-{}", going.clone().unwrap())).await;
        assert!(ends(going)(&vms(&ns).get("silent").await.unwrap()), "the stop stays a forced one");
        ns.remove_pod("silent").await;
        ns.vm_with_reason("silent", "StoppedAsRequested").await;
        content().await;
        assert_eq!(pod(&ns, "silent").await, None);
    }

    eprintln!("a disk that a person grows");
    let disks = with_disk(class, "2Gi")["spec"]["vm"]["disks"].take();
    patch_by_kubectl(&ns, "grown", &json!({ "spec": { "vm": { "disks": disks } } }));
    eventually("the larger disk", LIMIT, async || (size(&ns, "grown-core-disk").await == "2Gi").then_some(())).await;
    content().await;
    let kept =
        |vm: &VirtualMachine| condition(vm, "StorageReady").is_some_and(|it| it.0 == "True" && it.1 == "ShrinkRefused");
    ns.vm_when("grown", "ready with the larger disk", kept).await;
    content().await;
    assert_eq!(size(&ns, "grown-core-disk").await, "2Gi");

    eprintln!("templates that are installed beside deploy/");
    let templates = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "vm-operator-templates" }, "data": { "a.yaml.j2": "{# own #}" },
    });
    let file = tree.path().join("templates.json");
    fs::write(&file, templates.to_string()).unwrap();
    ns.namespace.kubectl(&["apply", "--server-side", "--filename", file.to_str().unwrap()]);
    // Its Deployment never is ready: this cluster has no node.
    flux.apply_kustomization("deploy", false).await;
    for _ in 0..2 {
        let ready = flux.sync("deploy").await;
        assert_eq!(ready["status"], "True", "{ready}");
    }
    let found = ns.api::<ConfigMap>().get("vm-operator-templates").await.unwrap();
    assert_eq!(found.data.unwrap()["a.yaml.j2"], "{# own #}");

    eprintln!("a VM that time does not mend ends the waiting, long before the time-out");
    let mut broken = vm_manifest("broken");
    broken["spec"]["templates"] = json!({ "set": "absent" });
    objects.push(broken);
    write(&tree.path().join("vms"), &ns, &objects);
    flux.publish("tree", tree.path(), 2).await;
    let ready = flux.sync("vms").await;
    let message = ready["message"].as_str().unwrap();
    assert!(ready["reason"] == "HealthCheckFailed" && message.contains("broken"), "{ready}");
}

#[tokio::test]
#[ignore = "builds Argo CD from its Go modules: make gitops-test"]
async fn what_people_do_beside_the_real_argo_cd() {
    let ns = ManagedNamespace::new("beside-argo-cd").await;
    let argo = ArgoCd::start(ns.cluster, ns.namespace.name(), &[("application.resourceTrackingMethod", "label")]).await;

    // VMs that are replaced at each sync: one whose state is not in Git, and one whose guest may shut itself down.
    let mut silent = everything("silent");
    silent["spec"]["vm"]["disks"] = json!([]);
    let mut halting = named(vm_manifest("halting"), "halting");
    halting["spec"]["guestShutdownStops"] = json!(true);
    let replaced = argo.repository().join("replaced");
    let with_note = |note: &str| {
        [&silent, &halting].map(|vm| {
            let mut vm = vm.clone();
            vm["spec"]["vm"]["bootMenu"] = json!(note == "second");
            vm
        })
    };
    write(&replaced, &ns, &with_note("first"));

    // A Secret and a claim of a VM, in an Application whose name Argo CD writes into their labels, and which is another VM's.
    let tracked = |name: &str, component: Option<&str>| {
        let mut labels = json!({ "app.kubernetes.io/name": "vm-runner" });
        if let Some(component) = component {
            labels["app.kubernetes.io/component"] = json!(component);
        }
        json!({ "name": name, "labels": labels, "annotations": { "vmoperator.jdrupes.org/vm": "apple" } })
    };
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": tracked("in-git", Some("display-secret")),
        "data": { "display-password": "c2VjcmV0", "password-expiry": "bmV2ZXI=" },
    });
    let mut claim = claim_manifest("in-git", "1Gi");
    claim["metadata"] = tracked(CLAIM, None);
    let mut apple = with_disk("in-git", "1Gi");
    apple["spec"]["vm"]["state"] = json!("Running");
    write(&argo.repository().join("tracked"), &ns, &[secret, claim, apple]);
    argo.commit();
    argo.apply_application("replaced", "replaced", &["Replace=true"]).await;
    // Claims and Pods of the VM `silent` have its name in the label by which Argo CD finds what it may prune.
    argo.apply_application("silent", "tracked", &[]).await;

    eprintln!("label tracking");
    boot_when_there(&ns, "apple").await;
    // A claim that nobody binds keeps an Application in progress: the one in Git, and the one that has the Application's name in its label.
    bind(&ns, CLAIM, Some("in-git"), "1Gi").await;
    bind(&ns, "silent-runner-data", None, "8Mi").await;
    argo.sync("silent", "Healthy").await;
    let text = json!(ns.api::<Pod>().get("apple").await.unwrap()).to_string();
    assert!(text.contains(r#""name":"in-git""#), "{text}");
    let secrets: Api<Secret> = ns.api();
    assert!(secrets.get_opt("apple-display-secret").await.unwrap().is_none(), "no second one");
    let of_claim = async || {
        let claim = ns.api::<PersistentVolumeClaim>().get(CLAIM).await.unwrap();
        (claim.uid(), claim.labels()["app.kubernetes.io/instance"].clone())
    };
    let before = of_claim().await;
    assert_eq!(before.1, "silent");

    eprintln!("Replace=true");
    boot_when_there(&ns, "halting").await;
    ns.report("halting", false, "GuestShutdown").await;
    ns.vm_with_reason("halting", "GuestShutdown").await;
    set_state_by_kubectl(&ns, "silent", "Running");
    boot(&ns, "silent").await;
    let running = pod(&ns, "silent").await;
    assert!(running.is_some());
    for note in ["second", "first", "second"] {
        write(&replaced, &ns, &with_note(note));
        argo.commit();
        let status = argo.sync("replaced", "Healthy").await;
        assert_eq!(status["operationState"]["phase"], "Succeeded", "{status}");
        for name in ["silent", "halting"] {
            let replaced = |vm: &VirtualMachine| {
                vm.spec.vm.boot_menu == (note == "second")
                    && vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation
            };
            ns.vm_when(name, "replaced", replaced).await;
        }
        assert_eq!(pod(&ns, "silent").await, running, "it runs on");
        assert_eq!(pod(&ns, "halting").await, None, "it stays down");
    }
    let vm = vms(&ns).get("silent").await.unwrap();
    assert!(condition(&vm, "PowerUnmanaged").is_some() && vm.status.unwrap().power == Some(PowerState::Running));

    eprintln!("objects that carry the name of an Application");
    for _ in 0..2 {
        argo.sync("silent", "Healthy").await;
        assert_eq!((of_claim().await, pod(&ns, "silent").await), (before.clone(), running.clone()));
    }
    let claims = ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap();
    assert!(claims.iter().all(|claim| claim.metadata.deletion_timestamp.is_none()));

    eprintln!("a VM that time does not mend");
    let mut broken = vm_manifest("broken");
    broken["spec"]["templates"] = json!({ "set": "absent" });
    write(&argo.repository().join("broken"), &ns, &[broken]);
    argo.commit();
    argo.apply_application("broken", "broken", &[]).await;
    argo.sync("broken", "Degraded").await;
}

/// Boots a VM that the tool has yet to make.
async fn boot_when_there(ns: &ManagedNamespace, name: &str) {
    eventually(&format!("{name} from the repository"), 2 * LIMIT, async || vms(ns).get_opt(name).await.unwrap()).await;
    boot(ns, name).await;
}
