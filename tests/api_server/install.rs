//! How the manager is installed: the manifest that `make manifest` prints and a release has as `install.yaml`, and what `deploy/` has
//! beside it.

use std::process::Command;

use serde_json::Value;

use crate::support::cluster::{Cluster, XTASK};

#[tokio::test]
async fn one_manifest_installs_the_definitions_and_the_manager_with_the_images_of_a_registry() {
    let cluster = Cluster::control_plane();
    let namespace = cluster.namespace("install").await;
    let args = ["manifest", "--registry=registry.example.org/vms", "--namespace", namespace.name()];
    let output = Command::new(XTASK).args(args).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("install.yaml");
    std::fs::write(&file, output.stdout).unwrap();

    // Others install the definitions, too.
    cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", file.to_str().unwrap()]);

    cluster.kubectl(&[
        "get",
        "customresourcedefinition",
        "vms.vmoperator.jdrupes.org",
        "vmpools.vmoperator.jdrupes.org",
    ]);
    let image = "--output=jsonpath={.spec.template.spec.containers[*].image}";
    let image = namespace.kubectl(&["get", "deployment", "vm-operator", image]);
    assert_eq!(image, concat!("registry.example.org/vms/vm-operator:", env!("CARGO_PKG_VERSION")));
    for account in ["vm-operator", "vm-runner"] {
        let account = format!("--as=system:serviceaccount:{}:{account}", namespace.name());
        namespace.kubectl(&["auth", "can-i", "patch", "vms", "--subresource=status", &account]);
    }
}

#[test]
fn the_manager_can_have_a_priority_class() {
    // Kustomize takes only relative paths.
    let folder = tempfile::tempdir().unwrap();
    let up = "/..".repeat(folder.path().canonicalize().unwrap().components().count() - 1);
    let deploy = format!(".{up}{}/deploy", env!("CARGO_MANIFEST_DIR"));
    let text = format!("namespace: vms\nresources: [{deploy}]\ncomponents: [{deploy}/priority]\n");
    std::fs::write(folder.path().join("kustomization.yaml"), text).unwrap();
    let manifests = Cluster::control_plane().kubectl(&["kustomize", &folder.path().to_string_lossy()]);
    let objects: Vec<Value> = manifests.split("\n---\n").map(|text| serde_yaml::from_str(text).unwrap()).collect();
    let of = |kind: &str| objects.iter().find(|object| object["kind"] == kind).unwrap();
    let class = of("PriorityClass");
    assert_eq!(class["metadata"].get("namespace"), None);
    assert_eq!(of("Deployment")["spec"]["template"]["spec"]["priorityClassName"], class["metadata"]["name"]);
    let class = class.to_string();
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), class).unwrap();
    Cluster::control_plane().kubectl(&["apply", "--dry-run=server", "--filename", &file.path().to_string_lossy()]);
}
