//! `vm-operator check`: whether an installation works. The chart's test Pod runs it (`helm test`).
//!
//! ```text
//!  Deployment: its newest version is available ─▶ the API server takes a VM (a dry run): definitions, rights, webhooks, policies
//! ```

use std::fmt;

use anyhow::{Context, bail};
use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, PostParams},
};
use serde_json::json;

use crate::{
    api::{GROUP, VirtualMachine},
    process::name_client,
};

/// The Deployment of the manager.
const DEPLOYMENT: &str = "vm-operator";

/// What is checked.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The manager's namespace.
    #[arg(long, value_name = "NS")]
    pub namespace: String,
    /// A namespace of VMs. Default: the manager's.
    #[arg(long, value_name = "NS")]
    pub vms: Option<String>,
}

/// What was found in order.
#[derive(Clone, Debug)]
pub struct Checked {
    replicas: i32,
    vms: String,
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the manager is ready ({} available)", self.replicas)?;
        writeln!(f, "the API server takes a VM in the namespace {} (dry run)", self.vms)
    }
}

/// Checks the manager and the API server of this kubeconfig, or of the cluster in which this process runs.
///
/// # Errors
/// What does not work, and how to see more.
pub async fn check(options: &Options, mut kubeconfig: kube::Config) -> anyhow::Result<Checked> {
    let Options { namespace, vms } = options;
    name_client(&mut kubeconfig, "vm-operator");
    let client = Client::try_from(kubeconfig).context("make a client")?;
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let deployment = deployments
        .get(DEPLOYMENT)
        .await
        .with_context(|| format!("get Deployment {DEPLOYMENT} in the namespace {namespace}"))?;
    let replicas = ready(&deployment, namespace)?;
    let vms = vms.clone().unwrap_or_else(|| namespace.clone());
    let api: Api<DynamicObject> = Api::namespaced_with(client, &vms, &ApiResource::erase::<VirtualMachine>(&()));
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let vm = serde_json::from_value(json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "VirtualMachine", "metadata": { "generateName": "check-" },
        "spec": { "vm": { "state": "Stopped", "maximumCpus": 1, "maximumRam": "1Gi", "networks": [], "disks": [] } },
    }))?;
    api.create(&dry, &vm).await.with_context(|| format!("create a VM in the namespace {vms} (dry run)"))?;
    Ok(Checked { replicas, vms })
}

/// How many managers of the newest version are available.
fn ready(deployment: &Deployment, namespace: &str) -> anyhow::Result<i32> {
    let status = deployment.status.clone().unwrap_or_default();
    let is_new = status.observed_generation == deployment.metadata.generation;
    match status.available_replicas.unwrap_or_default().min(status.updated_replicas.unwrap_or_default()) {
        replicas if is_new && replicas > 0 => Ok(replicas),
        _ => {
            let bad =
                status.conditions.into_iter().flatten().find(|it| it.status == "False" || it.type_ == "ReplicaFailure");
            let why = bad.and_then(|it| it.message).map(|message| format!(": {message}")).unwrap_or_default();
            bail!(
                "the manager is not ready{why}; kubectl -n {namespace} describe pods -l app.kubernetes.io/component=manager says more"
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn a_manager_of_the_newest_version_must_be_available() {
        let said = |generation: i64, status: Value| {
            let deployment = json!({ "metadata": { "generation": generation }, "status": status });
            ready(&serde_json::from_value(deployment).unwrap(), "system").map_err(|error| error.to_string())
        };
        let status = |seen: i64, updated: i32, available: i32| json!({ "observedGeneration": seen, "updatedReplicas": updated, "availableReplicas": available });
        assert_eq!(said(2, status(2, 2, 2)), Ok(2));
        for (generation, status) in [(2, status(1, 1, 1)), (2, status(2, 0, 1)), (2, status(2, 1, 0)), (1, json!({}))] {
            assert!(
                said(generation, status.clone()).unwrap_err().contains("kubectl -n system describe pods"),
                "{status}"
            );
        }
        let failed =
            json!({ "conditions": [{ "type": "Available", "status": "False", "message": "no minimum availability" }] });
        assert!(said(1, failed).unwrap_err().starts_with("the manager is not ready: no minimum availability; "));
    }
}
