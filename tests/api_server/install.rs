//! The manifest that `make manifest` prints and a release has as `install.yaml`.

use std::process::Command;

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
