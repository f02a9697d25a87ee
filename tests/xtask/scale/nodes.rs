//! Pretended nodes: objects without a machine.

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::bench::load;

/// The name of a node.
pub fn name(number: usize) -> String {
    format!("node-{number:03}")
}

/// Creates so many nodes. They are as large as those of real clusters, which list their images.
pub async fn create(client: &Client, count: usize) -> Result<()> {
    load::each(count, |number| {
        let api: Api<Node> = Api::all(client.clone());
        async move {
            let node = serde_json::from_value(node(number)).context("a node")?;
            api.create(&PostParams::default(), &node).await.with_context(|| format!("creating {}", name(number)))?;
            Ok(())
        }
    })
    .await
}

fn node(number: usize) -> Value {
    let resources = json!({ "cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "500Gi" });
    let images = (0..20).map(|image| {
        json!({ "names": [format!("registry.example.org/image-{image}@sha256:{image:064x}")], "sizeBytes": 123_456_789 })
    });
    json!({
        "metadata": { "name": name(number), "labels": { "kubernetes.io/hostname": name(number), "kubernetes.io/os": "linux" } },
        "status": {
            "allocatable": resources, "capacity": resources, "images": images.collect::<Vec<_>>(),
            "conditions": [ready("True", "KubeletReady")],
        },
    })
}

fn ready(status: &str, reason: &str) -> Value {
    let now = Timestamp::now().to_string();
    json!({ "type": "Ready", "status": status, "reason": reason, "message": "", "lastHeartbeatTime": now, "lastTransitionTime": now })
}

/// A node answers no more, as the node controller says it.
pub async fn lose(client: &Client, node: &str) -> Result<()> {
    let status = json!({ "status": { "conditions": [ready("Unknown", "NodeStatusUnknown")] } });
    let api: Api<Node> = Api::all(client.clone());
    let patched = api.patch_status(node, &PatchParams::default(), &Patch::Strategic(status)).await;
    patched.with_context(|| format!("reporting {node}")).map(drop)
}

/// A person says that a node is really down.
pub async fn taint(client: &Client, node: &str) -> Result<()> {
    let taint = json!({ "key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute" });
    let api: Api<Node> = Api::all(client.clone());
    let patch = Patch::Strategic(json!({ "spec": { "taints": [taint] } }));
    api.patch(node, &PatchParams::default(), &patch).await.with_context(|| format!("tainting {node}")).map(drop)
}
