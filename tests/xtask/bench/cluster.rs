//! The API server of a bench.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, PersistentVolumeClaim, Pod, Secret, ServiceAccount};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams, PostParams};
use kube::runtime::{conditions::is_crd_established, wait::await_condition};
use kube::{Client, Resource};
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;

use super::process::Manager;
use crate::binaries::Binaries;
use crate::components;
use crate::requests::Requests;
use crate::tools::{dev_dir, remove};

/// An API server of its own, without any controller.
pub struct Cluster {
    supervisor: Child,
    /// Its data, logs and kubeconfig.
    pub dir: PathBuf,
    /// May do everything.
    pub client: Client,
}

impl Cluster {
    /// Starts one, with the CRDs.
    pub async fn start() -> Result<Self> {
        let dir = dev_dir().join(format!("bench-{}", std::process::id()));
        let mut supervisor = Command::new(std::env::current_exe().context("finding this program")?)
            .args(["cluster", "run", "--api-server", "--dir"])
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("starting the cluster's supervisor")?;
        let mut line = String::new();
        let output = supervisor.stdout.take().context("no pipe from the supervisor")?;
        BufReader::new(output).read_line(&mut line).context("waiting for the cluster")?;
        if line.is_empty() {
            bail!("the cluster did not start; its supervisor said why");
        }
        let dir = dir.canonicalize().with_context(|| format!("finding {}", dir.display()))?;
        let client = components::client(&dir.join("kubeconfig")).await?;
        let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
        for (_, text) in vm_operator::api::crd::files()? {
            let crd: CustomResourceDefinition = serde_yaml::from_str(&text).context("reading a CRD")?;
            let name = crd.metadata.name.clone().unwrap_or_default();
            crds.create(&PostParams::default(), &crd).await.with_context(|| format!("creating {name}"))?;
            await_condition(crds.clone(), &name, is_crd_established()).await?;
        }
        Ok(Self { supervisor, dir, client })
    }

    /// With which programs reach it.
    pub fn kubeconfig(&self) -> PathBuf {
        self.dir.join("kubeconfig")
    }

    /// Creates a namespace, with what the Pods refer to.
    pub async fn namespace(&self, name: &str) -> Result<()> {
        let make = |value: Value| serde_json::from_value(value);
        let namespace: Namespace =
            serde_json::from_value(json!({ "metadata": { "name": name } })).context("a namespace")?;
        Api::all(self.client.clone())
            .create(&PostParams::default(), &namespace)
            .await
            .with_context(|| format!("creating the namespace {name}"))?;
        let account: ServiceAccount = make(json!({ "metadata": { "name": "vm-runner" } }))?;
        Api::namespaced(self.client.clone(), name)
            .create(&PostParams::default(), &account)
            .await
            .context("creating a service account")?;
        Ok(())
    }

    /// Takes away what a measurement left, so that it does not weigh on the next one.
    pub async fn empty(&self, namespace: &str) -> Result<()> {
        async fn all_of<K>(client: &Client, namespace: &str) -> Result<()>
        where
            K: Resource<Scope = k8s_openapi::NamespaceResourceScope> + Clone + std::fmt::Debug,
            K: serde::de::DeserializeOwned,
            K::DynamicType: Default,
        {
            let api: Api<K> = Api::namespaced(client.clone(), namespace);
            let what = K::kind(&Default::default()).into_owned();
            // A claim has a finalizer that nobody serves here.
            if what == "PersistentVolumeClaim" {
                for claim in api.list_metadata(&ListParams::default()).await?.items {
                    let patch = Patch::Merge(json!({ "metadata": { "finalizers": null } }));
                    api.patch_metadata(&claim.metadata.name.unwrap_or_default(), &PatchParams::default(), &patch)
                        .await?;
                }
            }
            api.delete_collection(&DeleteParams::background(), &ListParams::default())
                .await
                .with_context(|| format!("deleting every {what}"))?;
            Ok(())
        }
        let client = &self.client;
        all_of::<VirtualMachine>(client, namespace).await?;
        all_of::<Pod>(client, namespace).await?;
        all_of::<ConfigMap>(client, namespace).await?;
        all_of::<Secret>(client, namespace).await?;
        all_of::<PersistentVolumeClaim>(client, namespace).await
    }

    /// Ends a manager and takes away its VMs.
    pub async fn end(&self, manager: Manager, namespace: &str) -> Result<()> {
        manager.stop().await?;
        self.empty(namespace).await
    }

    /// The requests that it has counted.
    pub async fn requests(&self) -> Result<Requests> {
        Requests::ask(&self.client).await.context("asking the API server what it was asked for")
    }

    /// The garbage collector. It ends with the cluster, or when this is dropped.
    pub fn garbage_collector(&self) -> Result<Option<Running>> {
        let Some(program) = Binaries::find_or_build(false)?.get("kube-controller-manager").cloned() else {
            return Ok(None);
        };
        let child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            // Its own user may not delete; in clusters it acts under one service account per controller.
            .arg(format!("--kubeconfig={}", self.kubeconfig().display()))
            .args(["--controllers=garbage-collector-controller", "--leader-elect=false", "--secure-port=0"])
            .args(["--kube-api-qps=1000", "--kube-api-burst=2000"])
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting the garbage collector")?;
        Ok(Some(Running(child)))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // Its input is what it lives by.
        drop(self.supervisor.stdin.take());
        let _ = self.supervisor.wait();
        let _ = remove(&self.dir);
    }
}

/// A program that ends when this is dropped.
pub struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
