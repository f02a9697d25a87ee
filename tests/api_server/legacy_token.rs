//! What the token of a legacy runner's Pod may change: the power state and the status of its own VM, by the role and the policy in `deploy/`.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Client, Config, ResourceExt,
    config::{AuthInfo, KubeConfigOptions, Kubeconfig},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace},
};

const IMAGE: &str = "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest";

/// The policy of `deploy/`, for this namespace alone: other tests play legacy runners without a Pod's token.
fn policy(ns: &ManagedNamespace) -> String {
    let documents = serde_yaml::Deserializer::from_str(include_str!("../../deploy/legacy-runner-policy.yaml"));
    let name = format!("legacy-{}.vmoperator.jdrupes.org", ns.namespace.name());
    let for_namespace = |mut document: Value| {
        document["metadata"]["name"] = json!(name);
        if document["kind"] == "ValidatingAdmissionPolicyBinding" {
            document["spec"]["policyName"] = json!(name);
            document["spec"]["matchResources"] = json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": ns.namespace.name() } } });
        }
        document
    };
    let documents: Vec<Value> =
        documents.map(|document| for_namespace(Value::deserialize(document).unwrap())).collect();
    // kubectl reads a file that begins as JSON as one document.
    json!({ "apiVersion": "v1", "kind": "List", "items": documents }).to_string()
}

/// A client with the token of a Pod.
async fn runner(ns: &ManagedNamespace, pod: &Pod) -> Client {
    let bound = json!({ "apiVersion": "v1", "kind": "Pod", "name": pod.name_any(), "uid": pod.uid() });
    let request = json!({
        "apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
        "spec": { "audiences": [], "boundObjectRef": bound },
    });
    let url = format!("/api/v1/namespaces/{}/serviceaccounts/vm-runner-legacy/token", ns.namespace.name());
    let request = http::Request::post(url).body(serde_json::to_vec(&request).unwrap()).unwrap();
    let token: Value = ns.client.request(request).await.unwrap();
    let kubeconfig = Kubeconfig::read_from(ns.cluster.kubeconfig()).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    let token = token["status"]["token"].as_str().unwrap().to_owned();
    config.auth_info = AuthInfo { token: Some(token.into()), ..AuthInfo::default() };
    Client::try_from(config).unwrap()
}

/// Sends a patch, and returns the code and the message of the answer.
async fn patch(client: &Client, ns: &ManagedNamespace, rest: &str, content: &str, body: Value) -> (u16, String) {
    let path = format!("/apis/vmoperator.jdrupes.org/v1/namespaces/{}/vms/{rest}", ns.namespace.name());
    let request = http::Request::patch(path).header("content-type", content);
    let request = request.body(serde_json::to_vec(&body).unwrap()).unwrap();
    match client.request::<Value>(request).await {
        Ok(_) => (200, String::new()),
        Err(kube::Error::Api(answer)) => (answer.code, answer.message.clone()),
        Err(error) => panic!("{rest}: {error}"),
    }
}

#[tokio::test]
async fn a_legacy_runner_changes_the_power_state_and_the_status_of_its_own_vm_alone() {
    let ns = ManagedNamespace::new("legacy-token").await;
    let role = include_str!("../../deploy/legacy-runner.yaml");
    let role =
        role.split("\n---\n").filter(|document| !document.contains("\nkind: ServiceAccount")).collect::<Vec<_>>();
    ns.namespace.create(&role.join("\n---\n")).await;
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    std::fs::write(file.path(), policy(&ns)).unwrap();
    ns.cluster.kubectl(&["apply", "--server-side", "--filename", file.path().to_str().unwrap()]);
    let legacy = |vm: &mut Value| {
        vm["spec"]["image"] = json!({ "source": IMAGE });
        vm["spec"]["cloudInit"] = json!({ "userData": { "password": "secret" } });
    };
    for name in ["apple", "pear", "apple-0"] {
        ns.create_vm(name, legacy).await;
    }
    let apple = ns.pod_when("apple", "created", |_| true).await;
    let apple_0 = ns.pod_when("apple-0", "created", |_| true).await;
    let (own, other) = (runner(&ns, &apple).await, runner(&ns, &apple_0).await);
    let merge = "application/merge-patch+json";
    let stopped = json!({ "spec": { "vm": { "state": "Stopped" } } });
    eventually("the policy to be in force", LIMIT, async || {
        (patch(&own, &ns, "pear", merge, json!({ "metadata": { "labels": { "a": "b" } } })).await.0 == 422)
            .then_some(())
    })
    .await;
    let json_patch = "application/json-patch+json";
    for (client, rest, content, body, expected) in [
        (&own, "pear", merge, stopped.clone(), "may change only its own VM"),
        (&own, "pear/status", merge, json!({ "status": { "cpus": 7 } }), "may change only its own VM"),
        (&own, "apple-0", merge, stopped.clone(), "may change only its own VM"),
        (&other, "apple", merge, stopped.clone(), "may change only its own VM"),
        (
            &own,
            "apple",
            merge,
            json!({ "spec": { "vm": { "maximumCpus": 8 } } }),
            "nothing of the spec but spec.vm.state",
        ),
        (&own, "apple", merge, json!({ "spec": { "vm": { "networks": [{ "tap": {} }] } } }), "nothing of the spec but"),
        (&own, "apple", merge, json!({ "spec": { "nodeName": "n1" } }), "nothing of the spec but"),
        (&own, "apple", merge, json!({ "spec": { "cloudInit": null } }), "nothing of the spec but"),
        (
            &own,
            "apple",
            merge,
            json!({ "spec": { "permissions": [{ "user": "eve", "may": ["*"] }] } }),
            "nothing of the spec but",
        ),
        (
            &own,
            "apple",
            json_patch,
            json!([{ "op": "replace", "path": "/spec/guestShutdownStops", "value": true }]),
            "nothing of the spec but",
        ),
        (&own, "apple", merge, json!({ "metadata": { "labels": { "a": "b" } } }), "metadata of its VM"),
        (&own, "apple", merge, json!({ "metadata": { "annotations": { "a": "b" } } }), "metadata of its VM"),
        (&own, "apple", merge, json!({ "metadata": { "finalizers": ["example.org/x"] } }), "metadata of its VM"),
        (&own, "apple/status", json_patch, json!([{ "op": "add", "path": "/status/cpus", "value": 7 }]), ""),
        (&own, "apple", merge, stopped.clone(), ""),
    ] {
        let (code, message) = patch(client, &ns, rest, content, body.clone()).await;
        let is_refused = code == 422 && message.contains(expected);
        assert!(if expected.is_empty() { code == 200 } else { is_refused }, "{rest} {body}: {code} {message}");
    }
}
