//! `vm-operator check`: whether an installation works. The chart's test Pod runs it (`helm test`).
//!
//! ```text
//!  Deployment: its newest version is available ─▶ the API server takes a VM (a dry run): definitions, rights, webhooks, policies
//!    ─▶ if that is wanted, a VM without disks runs: images, quotas, Pod security, the class of its claim; it is deleted with its claim
//! ```

use std::{fmt, time::Duration};

use anyhow::{Context, bail};
use k8s_openapi::api::{apps::v1::Deployment, core::v1::PersistentVolumeClaim};
use kube::{
    Api, Client,
    api::{ApiResource, DeleteParams, DynamicObject, PostParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::{
    api::{GROUP, VirtualMachine},
    process::name_client,
};

/// The Deployment of the manager.
const DEPLOYMENT: &str = "vm-operator";
/// The VM that is booted. Its Pod has its name. It is none of the operator's own names, which no VM may have.
const VM: &str = "helm-test-vm";
/// The label by which it is known to be a test's, and its value.
const LABEL: &str = "app.kubernetes.io/component";
const OF_TEST: &str = "test";
/// The pause between two looks at it.
const PAUSE: Duration = Duration::from_secs(1);
/// How long its end may take.
const END: Duration = Duration::from_secs(120);

/// What is checked.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// The manager's namespace.
    #[arg(long, value_name = "NS")]
    pub namespace: String,
    /// A namespace of VMs. Default: the manager's.
    #[arg(long, value_name = "NS")]
    pub vms: Option<String>,
    /// Boot a VM there, without disks and with emulation, which has so many seconds until it runs. It is deleted then.
    #[arg(long, value_name = "SECONDS")]
    pub boot: Option<u64>,
}

/// What was found in order.
#[derive(Clone, Debug)]
pub struct Checked {
    replicas: i32,
    vms: String,
    booted: bool,
}

impl fmt::Display for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "the manager is ready ({} available)", self.replicas)?;
        writeln!(f, "the API server takes a VM in the namespace {} (dry run)", self.vms)?;
        if self.booted {
            writeln!(f, "a VM runs there")?;
        }
        Ok(())
    }
}

/// Checks the manager and the API server of this kubeconfig, or of the cluster in which this process runs.
///
/// # Errors
/// What does not work, and how to see more.
pub async fn check(options: &Options, mut kubeconfig: kube::Config) -> anyhow::Result<Checked> {
    let Options { namespace, vms, boot: limit } = options;
    name_client(&mut kubeconfig, "vm-operator");
    let client = Client::try_from(kubeconfig).context("make a client")?;
    let deployments: Api<Deployment> = Api::namespaced(client.clone(), namespace);
    let deployment = deployments
        .get(DEPLOYMENT)
        .await
        .with_context(|| format!("get Deployment {DEPLOYMENT} in the namespace {namespace}"))?;
    let replicas = ready(&deployment, namespace)?;
    let vms = vms.clone().unwrap_or_else(|| namespace.clone());
    let api: Api<DynamicObject> =
        Api::namespaced_with(client.clone(), &vms, &ApiResource::erase::<VirtualMachine>(&()));
    let dry = PostParams { dry_run: true, ..PostParams::default() };
    let vm = serde_json::from_value(json!({
        "apiVersion": format!("{GROUP}/v1"), "kind": "VirtualMachine", "metadata": { "generateName": "check-" },
        "spec": { "vm": { "state": "Stopped", "maximumCpus": 1, "maximumRam": "1Gi", "networks": [], "disks": [] } },
    }))?;
    api.create(&dry, &vm).await.with_context(|| format!("create a VM in the namespace {vms} (dry run)"))?;
    if let Some(seconds) = limit {
        let test = TestVm { vms: api, claims: Api::namespaced(client, &vms) };
        test.boot(Duration::from_secs(*seconds)).await.with_context(|| format!("boot a VM in the namespace {vms}"))?;
    }
    Ok(Checked { replicas, vms, booted: limit.is_some() })
}

/// A VM that is booted to see whether that works.
struct TestVm {
    vms: Api<DynamicObject>,
    claims: Api<PersistentVolumeClaim>,
}

impl TestVm {
    /// Makes the VM, waits until it runs, and removes it, also if it does not run in that time.
    async fn boot(&self, limit: Duration) -> anyhow::Result<()> {
        // One that an earlier test left, because it was ended.
        if let Some(vm) = self.vms.get_opt(VM).await.with_context(|| format!("get the VM {VM}"))? {
            let labels = vm.metadata.labels.unwrap_or_default();
            if labels.get(LABEL).map(String::as_str) != Some(OF_TEST) {
                bail!("there is a VM {VM} that is not a test's, without the label {LABEL}: {OF_TEST}");
            }
            self.remove().await?;
        }
        let vm = serde_json::from_value(json!({
            "apiVersion": format!("{GROUP}/v1"), "kind": "VirtualMachine",
            "metadata": { "name": VM, "labels": { LABEL: OF_TEST } },
            "spec": { "vm": {
                "state": "Running", "accelerator": "tcg", "firmware": "bios", "maximumCpus": 1, "maximumRam": "128Mi",
                "powerdownTimeout": 1, "networks": [], "disks": [],
            } },
        }))?;
        self.vms.create(&PostParams::default(), &vm).await.with_context(|| format!("create the VM {VM}"))?;
        let booted = self.runs(limit).await;
        let removed = self.remove().await;
        booted.and(removed)
    }

    /// Waits until the VM runs.
    async fn runs(&self, limit: Duration) -> anyhow::Result<()> {
        let end = Instant::now() + limit;
        loop {
            let vm = self.vms.get(VM).await.with_context(|| format!("get the VM {VM}"))?;
            if condition(&vm, "Running").is_some_and(|running| running["status"] == "True") {
                return Ok(());
            }
            if Instant::now() >= end {
                let ready = condition(&vm, "Ready").unwrap_or(&Value::Null);
                let text = |key: &str| ready[key].as_str().unwrap_or("?").to_owned();
                let (reason, message) = (text("reason"), text("message"));
                bail!("the VM {VM} does not run after {} s: {reason}: {message}", limit.as_secs());
            }
            sleep(PAUSE).await;
        }
    }

    /// Removes the VM, waits until its Pod is gone, too, and removes its claim, which has nobody's data.
    async fn remove(&self) -> anyhow::Result<()> {
        let end = Instant::now() + END;
        while exists(self.vms.delete(VM, &DeleteParams::foreground()).await)
            .with_context(|| format!("delete the VM {VM}"))?
        {
            if Instant::now() >= end {
                bail!("the VM {VM} is deleted, and is still there after {} s", END.as_secs());
            }
            sleep(PAUSE).await;
        }
        let claim = format!("{VM}-runner-data");
        exists(self.claims.delete(&claim, &DeleteParams::default()).await)
            .with_context(|| format!("delete the claim {claim}"))?;
        Ok(())
    }
}

/// Whether what was to be deleted was there.
fn exists<T>(deleted: kube::Result<T>) -> kube::Result<bool> {
    match deleted {
        Ok(_) => Ok(true),
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(false),
        Err(error) => Err(error),
    }
}

/// A condition of a VM.
fn condition<'a>(vm: &'a DynamicObject, type_: &str) -> Option<&'a Value> {
    vm.data["status"]["conditions"].as_array()?.iter().find(|condition| condition["type"] == type_)
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
