//! The whole of `example/gitops/flux` with the real kustomize-controller and helm-controller: what `flux bootstrap` is given, the manager by its
//! chart, a template set, and VMs. The test plays source-controller, the kubelet of the manager, and the runners. Of the image updates only the
//! objects are there.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt,
    api::{DynamicObject, Patch, PatchParams},
};
use serde_json::{Value, json};
use tempfile::TempDir;
use vm_operator::api::VirtualMachine;

use super::{
    argo_cd::{helm, succeeds},
    configuration_of_the_chart,
    flux::{Flux, definition},
};
use crate::support::{
    cluster::{OwnCluster, eventually},
    managed_namespace::{LIMIT, condition, report},
    manager::{Manager, Setup},
};

/// What the HelmRelease has beside what is in the tree: a VM whose state the release sets, and whose guest may shut itself down.
const EXTRA: &str = r#"
    extraObjects:
      - apiVersion: vmoperator.jdrupes.org/v1
        kind: VirtualMachine
        metadata: {name: released, namespace: vms}
        spec:
          guestShutdownStops: true
          vm: {state: Running, maximumCpus: 1, maximumRam: 1Gi, networks: [], disks: []}
"#;

/// The chart as an archive in a folder.
fn chart(folder: &Path) -> PathBuf {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/chart/vm-operator");
    succeeds(Command::new(helm()).arg("package").arg(chart).arg("--destination").arg(folder));
    let mut archives = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    archives.find(|path| path.extension().is_some_and(|it| it == "tgz")).unwrap()
}

fn is_ready(object: &DynamicObject) -> bool {
    let conditions = object.data["status"]["conditions"].as_array().into_iter().flatten();
    let mut ready = conditions.filter(|it| it["type"] == "Ready" && it["status"] == "True");
    ready.any(|_| object.data["status"]["observedGeneration"].as_i64() == object.metadata.generation)
}

async fn until_ready(api: &Api<DynamicObject>, name: &str) -> DynamicObject {
    eventually(&format!("{name} to be ready"), 3 * LIMIT, async || api.get_opt(name).await.unwrap().filter(is_ready))
        .await
}

/// Plays the kubelet of the manager's Pods until all are ready.
pub(super) async fn run_the_manager(pods: &Api<Pod>) {
    eventually("the manager's Pods", 3 * LIMIT, async || {
        let found = pods.list(&Default::default()).await.unwrap().items;
        for pod in &found {
            let ready = json!({ "type": "Ready", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z" });
            let status = json!({ "status": { "phase": "Running", "conditions": [ready] } });
            pods.patch_status(&pod.name_any(), &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        }
        (found.len() == 2).then_some(())
    })
    .await;
}

#[tokio::test]
#[ignore = "builds Flux's controllers and Helm from their Go modules: make gitops-test"]
async fn the_whole_tree_with_the_real_flux() {
    let cluster = OwnCluster::control_plane();
    let client = cluster.client().await;
    cluster.kubectl(&["create", "namespace", "flux-system"]);
    let mut flux = Flux::start(*cluster, "flux-system", true).await;
    flux.apply(&definition("source.toolkit.fluxcd.io", "v1", "HelmChart"));
    for kind in ["ImageRepository", "ImagePolicy", "ImageUpdateAutomation"] {
        flux.apply(&definition("image.toolkit.fluxcd.io", "v1", kind));
    }
    flux.run("helm-controller", "helm.toolkit.fluxcd.io_helmreleases.yaml", true);

    // What `flux bootstrap` makes, and the key; nothing is encrypted here.
    let repository = TempDir::new().unwrap();
    let example = repository.path().join("example/gitops");
    fs::create_dir_all(&example).unwrap();
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/flux");
    succeeds(Command::new("cp").arg("-r").arg(tree).arg(&example));
    flux.apply(&json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "sops-age" } }));
    flux.publish("flux-system", repository.path(), 1).await;
    let bootstrap = json!({
        "apiVersion": "kustomize.toolkit.fluxcd.io/v1", "kind": "Kustomization", "metadata": { "name": "flux-system" },
        "spec": {
            "interval": "10m", "path": "./example/gitops/flux/cluster", "prune": true,
            "sourceRef": { "kind": "GitRepository", "name": "flux-system" },
        },
    });
    flux.apply(&bootstrap);

    // The chart, as source-controller makes it from the GitRepository of the operator.
    let charts = flux.api("HelmChart");
    let name = "vm-operator-vm-operator";
    let wish = eventually("the HelmChart", 3 * LIMIT, async || charts.get_opt(name).await.unwrap()).await;
    assert_eq!(wish.data["spec"]["chart"], "./deploy/chart/vm-operator");
    let folder = TempDir::new().unwrap();
    flux.serve(&charts, name, &chart(folder.path()), "0.1.0").await;
    run_the_manager(&Api::namespaced(client.clone(), "vm-operator")).await;
    let releases = flux.api_in("vm-operator", "HelmRelease");
    until_ready(&releases, "vm-operator").await;
    let kubeconfig = cluster.kubeconfig_of_manager("vm-operator", Some("vm-operator"));
    let arguments = &["--identity=the-only-one"];
    let config = configuration_of_the_chart(&client).await;
    // In a Pod its Lease and its template sets are in its own namespace.
    let environment = &[("KUBERNETES_SERVICE_HOST", "in-a-pod")];
    let setup = Setup { arguments, environment, config: config.as_deref(), ..Setup::default() };
    let manager = Manager::with(kubeconfig.path(), Some("vms"), &setup);

    // The runner of the server; the desktop is down until its user starts it.
    let vms: Api<VirtualMachine> = Api::namespaced(client.clone(), "vms");
    let vm_when = async |name: &str, wanted: &str| {
        eventually(&format!("{name} to be {wanted}"), 3 * LIMIT, async || {
            let ready = condition(&vms.get_opt(name).await.unwrap()?, "Ready")?;
            (ready.1 == wanted).then_some(())
        })
        .await;
    };
    vm_when("web", "Starting").await;
    let pods: Api<Pod> = Api::namespaced(client.clone(), "vms");
    let import = pods.get("web").await.unwrap().spec.unwrap().init_containers.unwrap_or_default();
    assert_eq!(import.first().map(|it| it.name.as_str()), Some("import"), "the template set of the tree");
    report(&client, "vms", "web", true, "Started").await;
    vm_when("web", "Running").await;
    vm_when("desktop", "StoppedAsRequested").await;
    for name in ["flux-system", "vm-operator", "vm-templates", "vms"] {
        let found = until_ready(&flux.api("Kustomization"), name).await;
        assert!(found.data["status"]["inventory"]["entries"].as_array().is_some_and(|it| !it.is_empty()), "{name}");
    }

    // A VM of the release: with drift detection, helm-controller puts back what differs from its chart. Its guest shuts itself down.
    let release = example.join("flux/manager/release.yaml");
    fs::write(&release, fs::read_to_string(&release).unwrap() + EXTRA.trim_start_matches('\n')).unwrap();
    flux.publish("flux-system", repository.path(), 2).await;
    vm_when("released", "Starting").await;
    report(&client, "vms", "released", true, "Started").await;
    vm_when("released", "Running").await;
    report(&client, "vms", "released", false, "GuestShutdown").await;
    vm_when("released", "GuestShutdown").await;
    for round in 0..2 {
        let asked = format!("look-{round}");
        let patch = json!({ "metadata": { "annotations": { "reconcile.fluxcd.io/requestedAt": asked } } });
        releases.patch("vm-operator", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        eventually("another look of helm-controller", 3 * LIMIT, async || {
            let found = releases.get("vm-operator").await.unwrap();
            (found.data["status"]["lastHandledReconcileAt"] == asked.as_str() && is_ready(&found)).then_some(())
        })
        .await;
        manager.wait_until_idle().await;
        let state = |vm: VirtualMachine| json!(vm.spec.vm.state);
        assert_eq!(state(vms.get("released").await.unwrap()), "Running", "as Git has it");
        assert_eq!(pods.get_opt("released").await.unwrap().map(|pod| pod.name_any()), None::<String>, "it stays down");
    }
    let log = manager.log();
    let refused: Vec<&str> = log.lines().filter(|line| line.contains("orbidden")).collect();
    assert_eq!(refused, [""; 0], "the rights of the chart are enough");
    let entries: Vec<Value> =
        until_ready(&flux.api("Kustomization"), "vms").await.data["status"]["inventory"]["entries"]
            .as_array()
            .cloned()
            .unwrap_or_default();
    eprintln!("the whole tree of Flux is ready; {} objects in its Kustomization of VMs", entries.len());
}
