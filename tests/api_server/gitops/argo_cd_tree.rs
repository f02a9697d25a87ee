//! The whole of `example/gitops/argocd` with the real Argo CD: one Application that a person applies, the manager by the chart, a template set, and
//! VMs. The test plays what the cluster has no programs for: the kubelet of the manager, the External Secrets Operator and the runner.

use std::{collections::BTreeMap, fs, path::Path, process::Command};

use k8s_openapi::{
    api::core::v1::{Pod, Secret},
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::json;
use vm_operator::api::VirtualMachine;

use super::{
    argo_cd::{ArgoCd, succeeds, tree},
    configuration_of_the_chart,
    flux::definition,
    flux_tree::run_the_manager,
};
use crate::support::{
    cluster::{OwnCluster, eventually},
    managed_namespace::{LIMIT, condition, report},
    manager::{Manager, Setup},
};

/// Copies the tree and what it refers to into the repository, with its address in place of those of the tree.
fn fill(argo: &ArgoCd) {
    let repository = argo.repository();
    let example = repository.join("example/gitops");
    fs::create_dir_all(&example).unwrap();
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    succeeds(Command::new("cp").arg("-r").arg(deploy).arg(&repository));
    succeeds(Command::new("cp").arg("-r").arg(tree()).arg(&example));
    let applications = fs::read_dir(example.join("argocd/applications")).unwrap().map(|entry| entry.unwrap().path());
    for file in applications.chain([example.join("argocd/root.yaml")]) {
        let text = fs::read_to_string(&file).unwrap();
        let lines = text.lines().map(|line| match line.split_once("repoURL: ") {
            Some((indent, _)) => format!("{indent}repoURL: {}\n", argo.url()),
            None => format!("{line}\n"),
        });
        fs::write(&file, lines.collect::<String>()).unwrap();
    }
    argo.commit();
    // The release whose chart the tree asks for.
    argo.git(&["tag", "v0.1.0"]);
}

#[tokio::test]
#[ignore = "builds Argo CD and Helm from their Go modules: make gitops-test"]
async fn the_whole_tree_with_the_real_argo_cd() {
    let cluster = OwnCluster::control_plane();
    let client = cluster.client().await;
    cluster.kubectl(&["create", "namespace", "argocd"]);
    let definitions: Api<CustomResourceDefinition> = Api::all(client.clone());
    let parameters = PatchParams::apply("test").force();
    definitions
        .patch(
            "externalsecrets.external-secrets.io",
            &parameters,
            &Patch::Apply(definition("external-secrets.io", "v1", "ExternalSecret")),
        )
        .await
        .unwrap();
    let argo = ArgoCd::start(*cluster, "argocd", &[]).await;
    argo.install_helm();
    fill(&argo);
    let root = argo.repository().join("example/gitops/argocd/root.yaml");
    cluster.kubectl(&["apply", "--filename", root.to_str().unwrap()]);

    // The manager, with the rights that the chart gives it.
    run_the_manager(&Api::namespaced(client.clone(), "vm-operator")).await;
    let kubeconfig = cluster.kubeconfig_of_manager("vm-operator", Some("vm-operator"));
    let config = configuration_of_the_chart(&client).await;
    let arguments = &["--identity=the-only-one"];
    // In a Pod its Lease and its template sets are in its own namespace.
    let environment = &[("KUBERNETES_SERVICE_HOST", "in-a-pod")];
    let setup = Setup { arguments, environment, config: config.as_deref(), ..Setup::default() };
    let manager = Manager::with(kubeconfig.path(), Some("vms"), &setup);

    // The External Secrets Operator.
    let kind = GroupVersionKind::gvk("external-secrets.io", "v1", "ExternalSecret");
    let resource = ApiResource::from_gvk_with_plural(&kind, "externalsecrets");
    let external: Api<DynamicObject> = Api::namespaced_with(client.clone(), "vms", &resource);
    let wish =
        eventually("the ExternalSecret", 3 * LIMIT, async || external.get_opt("desktop-user-data").await.unwrap())
            .await;
    let target = &wish.data["spec"]["target"];
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": target["name"], "labels": target["template"]["metadata"]["labels"] },
        "stringData": { "user-data": "#cloud-config\n" },
    });
    let secrets: Api<Secret> = Api::namespaced(client.clone(), "vms");
    secrets.patch("desktop-user-data", &parameters, &Patch::Apply(secret)).await.unwrap();
    let ready = json!({ "type": "Ready", "status": "True", "reason": "SecretSynced", "message": "" });
    let ready = json!({ "status": { "conditions": [ready] } });
    external.patch_status("desktop-user-data", &PatchParams::default(), &Patch::Merge(ready)).await.unwrap();

    // The runner of the server; the desktop is down until its user starts it.
    let vms: Api<VirtualMachine> = Api::namespaced(client.clone(), "vms");
    let reason = |vm: &VirtualMachine| condition(vm, "Ready").map(|ready| ready.1);
    let vm_when = async |name: &str, wanted: &str| {
        eventually(&format!("{name} to be {wanted}"), 3 * LIMIT, async || {
            let vm = vms.get_opt(name).await.unwrap()?;
            (reason(&vm).as_deref() == Some(wanted)).then_some(())
        })
        .await;
    };
    vm_when("web", "Starting").await;
    let pod = Api::<Pod>::namespaced(client.clone(), "vms").get("web").await.unwrap();
    let import = pod.spec.unwrap().init_containers.unwrap_or_default();
    assert_eq!(import.first().map(|it| it.name.as_str()), Some("import"), "the template set of the tree");
    report(&client, "vms", "web", true, "Started").await;
    vm_when("web", "Running").await;
    vm_when("desktop", "StoppedAsRequested").await;

    let mut found = BTreeMap::new();
    for name in ["vms-root", "vm-operator", "vm-templates", "vms"] {
        let status = argo.sync(name, "Healthy").await;
        let resources = status["resources"].as_array().unwrap().iter();
        let pending = resources.filter(|it| it["status"] != "Synced").map(|it| it["name"].clone()).collect::<Vec<_>>();
        assert_eq!(pending, [""; 0], "{name}");
        found.insert(name, status["resources"].as_array().unwrap().len());
    }
    let log = manager.log();
    let refused: Vec<&str> = log.lines().filter(|line| line.contains("orbidden")).collect();
    assert_eq!(refused, [""; 0], "the rights of the chart are enough");
    eprintln!("objects of each Application: {found:?}");
}
