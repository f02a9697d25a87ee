//! A VM that can't start, and starts when its spec is mended.

use vm_operator::manager::check;

use super::*;

#[tokio::test]
async fn a_vm_whose_image_does_not_exist_starts_when_it_is_mended() {
    let _shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("mended").await;
    let mut manifest = demo(&namespace);
    manifest["spec"]["image"] = serde_json::json!({ "source": "localhost/vm-runer:1", "pullPolicy": "IfNotPresent" });
    namespace.apply(&manifest.to_string());
    let refused = |vm: &VirtualMachine| reason(vm, conditions::READY) == "ImagePullFailed";
    eventually("the image to be refused", LIMIT, async || vms.get_opt("demo").await.unwrap().filter(refused)).await;
    let first = pods.get("demo").await.unwrap();
    manifest["spec"].as_object_mut().unwrap().remove("image");
    namespace.apply(&manifest.to_string());
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    assert_ne!(pods.get("demo").await.unwrap().metadata.uid, first.metadata.uid);
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;

    // What `helm test` runs, in a Pod of this name: it boots a VM, of which nothing is left.
    namespace.kubectl(&[
        "run",
        "vm-operator-test",
        "--image=localhost/vm-demo-guest:0.1.0",
        "--image-pull-policy=IfNotPresent",
    ]);
    let options = check::Options { namespace: namespace.name().to_owned(), vms: None, boot: Some(LIMIT.as_secs()) };
    let checked = check::check(&options, cluster.config().await).await.unwrap().to_string();
    assert!(checked.contains("a VM runs there"), "{checked}");
    let left = || namespace.kubectl(&["get", "vms,pods,persistentvolumeclaims", "--output=name"]);
    let is_gone = async || (!left().contains("/helm-test-vm")).then_some(());
    eventually("the claim to be gone, too", LIMIT, is_gone).await;
}
