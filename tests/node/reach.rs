//! Who has rights on VMs alone, and a manager whose administrator has allowed nothing. What would lead to the node makes no Pod, and says why.

use serde_json::{Value, json};

use super::*;

/// An installation in which no list has an entry.
const NOTHING_ALLOWED: &str =
    r#"{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "vm-operator"}, "data": {"config.yaml": "{}"}}"#;

#[tokio::test]
async fn who_may_write_vms_alone_does_not_reach_the_node() {
    let _shared = NODE.read().await;
    let namespace = Cluster::with_node().namespace("reach").await;
    namespace.apply(NOTHING_ALLOWED);
    let Stage { namespace, vms, pods, .. } = Stage::on(namespace).await;
    let all = "--verb=get,list,watch,create,patch,update,delete";
    namespace.kubectl(&["create", "role", "author", all, "--resource=vms.vmoperator.jdrupes.org"]);
    namespace.kubectl(&["create", "rolebinding", "author", "--role=author", "--user=mallory"]);
    let writes = |name: &str, spec: &Value| {
        let mut manifest = demo(&namespace);
        manifest["metadata"]["name"] = name.into();
        json_patch::merge(&mut manifest["spec"], spec);
        // A disk of its own.
        manifest["spec"]["vm"]["disks"] = json!([]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), manifest.to_string()).unwrap();
        let path = file.path().to_string_lossy().into_owned();
        let args = ["--namespace", namespace.name(), "--as=mallory", "create", "--validate=false", "-f", &path];
        Cluster::with_node().try_kubectl(&args)
    };

    // The guest would stand on the Pods' bridge, and reach the node's loopback.
    let both = json!({ "vm": { "networks": [{ "tap": { "bridge": "pods" } }, { "user": {} }] } });
    let refused = eventually("mallory to have her rights", LIMIT, async || {
        writes("both", &both).err().filter(|said| !said.contains("cannot create"))
    })
    .await;
    assert!(refused.contains("user can't be beside tap"), "{refused}");

    let cases = [
        ("bridge", json!({ "vm": { "networks": [{ "tap": { "bridge": "pods" } }] } }), "networks.bridges"),
        // It would run privileged, in the network of the node.
        (
            "legacy",
            json!({ "image": { "source": "evil.example.org/x/org.jdrupes.vmoperator.runner.qemu-arch:latest" } }),
            "legacyRunnerImages",
        ),
        // Whoever runs an image as the runner holds the token of its Pod.
        ("image", json!({ "image": { "source": "evil.example.org/vm-runner:1" } }), "runnerImages"),
        ("node", json!({ "nodeName": "node" }), "nodeNames"),
        ("device", json!({ "resources": { "limits": { "example.org/gpu": "1" } } }), "extendedResources"),
    ];
    for (name, spec, list) in &cases {
        writes(name, spec).unwrap();
        let vm = eventually("it to be refused", LIMIT, async || {
            vms.get_opt(name).await.unwrap().filter(|vm| reason(vm, conditions::READY) == "NotAllowed")
        })
        .await;
        let ready = conditions::find(&vm.status.as_ref().unwrap().conditions, conditions::READY).unwrap();
        assert!(ready.message.contains(list), "{name}: {}", ready.message);
        let (_, said) = namespace.kubectl_vm(&["explain", name]);
        assert!(said.contains(list), "{name}: {said}");
        assert!(pods.get_opt(name).await.unwrap().is_none(), "{name} has a Pod");
    }

    // A guest in the network that everybody may have is a Pod of Pod security "baseline", beside which nothing listens on its loopback.
    writes("plain", &json!({})).unwrap();
    let pod = eventually("the Pod of a plain VM", LIMIT, async || pods.get_opt("plain").await.unwrap()).await;
    assert_eq!(pod.spec.as_ref().unwrap().host_network, None, "{:?}", pod.spec);
    namespace.kubectl(&["delete", "vm", "--all"]);
    gone(&pods, "plain").await;
}
