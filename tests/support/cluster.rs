//! A real Kubernetes for integration tests.
//!
//! The first test that asks for a cluster starts it, all tests of the process share it, and it ends with the process,
//! however that ends: its supervisor (`cargo xtask cluster run`) waits on a pipe that only this process holds.
//! With KUBECONFIG set no shared cluster is started: that cluster is used. A test that needs a whole cluster starts an
//! [`OwnCluster`], which ends with the test.

use std::fmt;

use std::io::{BufRead, BufReader, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Namespace, ServiceAccount};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ObjectMeta, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Client, Config};
use serde::Deserialize;
use tempfile::NamedTempFile;

pub use super::requests::Requests;

/// The program that builds and runs clusters.
pub const XTASK: &str = env!("CARGO_BIN_EXE_xtask");
/// A small image that every cluster with a node has: busybox. Without a command it waits until it is ended.
pub const TOOLS_IMAGE: &str = "localhost/vm-operator-tools:1";

/// A cluster that tests share; each uses a namespace of its own.
pub struct Cluster {
    kubeconfig: PathBuf,
    /// Its directory, if `cargo xtask cluster` started it.
    dir: Option<PathBuf>,
    /// Whether this process has started it.
    is_started_here: bool,
    /// The pipe to the supervisor of a cluster that this process has started. When it is closed, the cluster ends.
    orders: Mutex<Option<ChildStdin>>,
}

impl Cluster {
    /// An API server with its controllers. Pods stay Pending.
    pub fn control_plane() -> &'static Self {
        static CLUSTER: OnceLock<Cluster> = OnceLock::new();
        CLUSTER.get_or_init(|| Self::find_or_start(&["--control-plane"]))
    }

    /// A cluster with a node, on which Pods run. Needs root.
    pub fn with_node() -> &'static Self {
        static CLUSTER: OnceLock<Cluster> = OnceLock::new();
        CLUSTER.get_or_init(|| Self::find_or_start(&[]))
    }

    fn find_or_start(args: &[&str]) -> Self {
        if let Some(path) = std::env::var_os("KUBECONFIG").filter(|path| !path.is_empty()) {
            eprintln!("Using the cluster of KUBECONFIG={}", path.to_string_lossy());
            let kubeconfig = PathBuf::from(path);
            // Images can be imported into a cluster that `cargo xtask cluster up` has started.
            let dir = kubeconfig.parent().filter(|dir| dir.join("state.json").exists()).map(Path::to_owned);
            return Self { kubeconfig, dir, is_started_here: false, orders: Mutex::new(None) };
        }
        Self::start(args)
    }

    fn start(args: &[&str]) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!(".dev/test-clusters/{}-{number}", std::process::id()));
        let (child, orders) = start(&dir, args).unwrap_or_else(|error| panic!("{error}"));
        // The supervisor ends when this process closes the pipe, so this process can't wait for it.
        drop(child);
        Self {
            kubeconfig: dir.join("kubeconfig"),
            dir: Some(dir),
            is_started_here: true,
            orders: Mutex::new(Some(orders)),
        }
    }

    /// The path of the kubeconfig.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// The directory of the cluster with its logs, if `cargo xtask cluster` started it.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }

    /// The client configuration for the cluster.
    pub async fn config(&self) -> Config {
        let kubeconfig = Kubeconfig::read_from(&self.kubeconfig).expect("the cluster's kubeconfig");
        Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .expect("the cluster's kubeconfig")
    }

    /// A client. It belongs to the runtime that it was made in, and so to one test.
    pub async fn client(&self) -> Client {
        Client::try_from(self.config().await).expect("a client for the cluster")
    }

    /// A new namespace for a test, ready for Pods.
    ///
    /// Hold it until the end of the test: if the test panics or does not end, the cluster's logs are kept. The namespace
    /// ends with the cluster; it is deleted if the test fails, and in a cluster that this process did not start.
    pub async fn namespace(&'static self, test: &str) -> TestNamespace {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        self.namespace_called(&format!("{}-{}-{number}", test.replace('_', "-"), std::process::id())).await
    }

    /// A new namespace of that name, which no other test may use.
    pub async fn namespace_called(&'static self, name: &str) -> TestNamespace {
        let name = name.to_owned();
        let client = self.client().await;
        let namespace =
            Namespace { metadata: ObjectMeta { name: Some(name.clone()), ..Default::default() }, ..Default::default() };
        Api::all(client.clone()).create(&PostParams::default(), &namespace).await.expect("creating a namespace");
        self.order(&format!("begin {name}"));
        // A control plane out of KUBEBUILDER_ASSETS may have no controllers, and so no service accounts.
        if self.dir().is_none_or(|dir| dir.join("logs/kube-controller-manager.log").exists()) {
            let accounts = Api::<ServiceAccount>::namespaced(client, &name);
            eventually("the namespace's service account", Duration::from_secs(30), async || {
                accounts.get_opt("default").await.expect("reading a service account")
            })
            .await;
        }
        TestNamespace { cluster: self, name }
    }

    /// Tells the cluster's supervisor something, a line: who begins and ends, or a fault (tests/xtask/faults.rs).
    pub fn order(&self, line: &str) {
        if let Some(orders) = &mut *self.orders.lock().expect("no panic while writing a line") {
            // A supervisor that has ended has printed its reason.
            let _ = writeln!(orders, "{line}");
        }
    }

    /// Runs kubectl; panics with its standard error if it fails.
    pub fn kubectl(&self, args: &[&str]) -> String {
        self.try_kubectl(args).unwrap_or_else(|error| panic!("kubectl {}: {error}", args.join(" ")))
    }

    /// Runs kubectl; its standard error is the error.
    pub fn try_kubectl(&self, args: &[&str]) -> Result<String, String> {
        let output = Command::new(XTASK)
            .args(["kubectl", "--"])
            .args(args)
            .env("KUBECONFIG", &self.kubeconfig)
            .stdin(Stdio::null())
            .output()
            .map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).into_owned())
        }
    }

    /// A kubeconfig of the service account of the manager that is deployed in a namespace.
    pub fn kubeconfig_of_manager(&self, namespace: &str, default_namespace: Option<&str>) -> NamedTempFile {
        let text = std::fs::read_to_string(self.kubeconfig()).expect("the cluster's kubeconfig");
        let mut kubeconfig: serde_json::Value = serde_yaml::from_str(&text).expect("the cluster's kubeconfig");
        if let Some(default) = default_namespace {
            kubeconfig["contexts"][0]["context"]["namespace"] = default.into();
        }
        kubeconfig["users"][0]["user"]["as"] = format!("system:serviceaccount:{namespace}:vm-operator").into();
        let file = NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), kubeconfig.to_string()).expect("writing a kubeconfig");
        file
    }

    /// Imports images into the node. A cluster that `cargo xtask cluster` did not start must be able to pull them.
    pub fn import(&self, archives: &[&Path]) {
        let Some(dir) = &self.dir else { return };
        let output = Command::new(XTASK)
            .args(["cluster", "import", "--dir"])
            .arg(dir)
            .args(archives)
            .output()
            .expect("starting xtask");
        assert!(output.status.success(), "importing images: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Gives an image that the node knows another name.
    pub fn tag(&self, image: &str, name: &str) {
        let Some(dir) = &self.dir else { return };
        let output = Command::new(XTASK)
            .args(["cluster", "tag", "--dir"])
            .arg(dir)
            .args([image, name])
            .output()
            .expect("starting xtask");
        assert!(output.status.success(), "naming an image: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// The requests that the API server has counted so far.
    pub async fn requests(&self) -> Requests {
        Requests::ask(&self.client().await).await.expect("the API server's metrics")
    }
}

/// A cluster that one test has for itself. It ends with the test: hold it for as long as its namespaces.
pub struct OwnCluster(&'static Cluster);

impl OwnCluster {
    /// An API server with its controllers. Pods stay Pending.
    pub fn control_plane() -> Self {
        Self(Box::leak(Box::new(Cluster::start(&["--control-plane"]))))
    }

    /// An API server without Kubernetes' controllers: there is no garbage collection, and a namespace has no default
    /// service account.
    pub fn api_server() -> Self {
        // A namespace refers to its cluster for as long as the process lives.
        Self(Box::leak(Box::new(Cluster::start(&["--api-server"]))))
    }
}

impl Deref for OwnCluster {
    type Target = &'static Cluster;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for OwnCluster {
    fn drop(&mut self) {
        let orders = self.0.orders.lock().map(|mut orders| orders.take());
        drop(orders);
    }
}

/// Starts a cluster's supervisor and waits until the cluster can be used.
pub fn start(dir: &Path, args: &[&str]) -> Result<(std::process::Child, ChildStdin), String> {
    let mut child = Command::new(XTASK)
        .args(["cluster", "run", "--dir"])
        .arg(dir)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("starting {XTASK}: {error}"))?;
    let orders = child.stdin.take().ok_or("no pipe to the supervisor")?;
    let mut line = String::new();
    let output = child.stdout.take().ok_or("no pipe from the supervisor")?;
    BufReader::new(output).read_line(&mut line).map_err(|error| format!("waiting for the cluster: {error}"))?;
    if line.is_empty() {
        return Err("the cluster did not start; its supervisor said why on standard error".to_owned());
    }
    Ok((child, orders))
}

/// A namespace for one test.
pub struct TestNamespace {
    cluster: &'static Cluster,
    name: String,
}

impl TestNamespace {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs kubectl in it.
    pub fn kubectl(&self, args: &[&str]) -> String {
        self.cluster.kubectl(&[&["--namespace", &self.name], args].concat())
    }

    /// What the runner in a Pod has said. Nothing as long as there is no such Pod, or it has not started: a Pod may be replaced at any moment.
    pub fn log(&self, pod: &str) -> String {
        let args = ["--namespace", &self.name, "logs", pod, "--container=vm-runner"];
        self.cluster.try_kubectl(&args).unwrap_or_default()
    }

    /// Runs `kubectl vm` for it: its exit code, and what it prints.
    pub fn kubectl_vm(&self, args: &[&str]) -> (i32, String) {
        self.kubectl_vm_as(self.cluster.kubeconfig(), args)
    }

    /// Runs `kubectl vm` for it with that kubeconfig.
    pub fn kubectl_vm_as(&self, kubeconfig: &Path, args: &[&str]) -> (i32, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm"))
            .args(args)
            .args(["--namespace", &self.name])
            .env("KUBECONFIG", kubeconfig)
            .output()
            .expect("kubectl-vm");
        let text = [output.stdout, output.stderr].concat();
        (output.status.code().expect("an exit code"), String::from_utf8(text).expect("text"))
    }

    /// Creates objects of built-in kinds in it, given as YAML or JSON. Unlike [`apply`](Self::apply) it needs no kubectl,
    /// which asks the API server for all kinds and their schemas first.
    pub async fn create(&self, manifests: &str) {
        let client = self.cluster.client().await;
        for document in serde_yaml::Deserializer::from_str(manifests) {
            let object = DynamicObject::deserialize(document).expect("an object");
            let types = object.types.as_ref().expect("apiVersion and kind");
            let kind = ApiResource::from_gvk(&types.try_into().expect("a group and a version"));
            let api = Api::<DynamicObject>::namespaced_with(client.clone(), &self.name, &kind);
            api.create(&PostParams::default(), &object).await.unwrap_or_else(|error| panic!("{types:?}: {error}"));
        }
    }

    /// Creates the service accounts of the runners, which their Pods name.
    pub async fn create_runners_account(&self) {
        for name in ["vm-runner", "vm-runner-legacy"] {
            let account =
                serde_json::json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name } });
            self.create(&account.to_string()).await;
        }
    }

    /// A kubeconfig of the manager that is deployed here, with the permissions that it has then.
    pub async fn managers_kubeconfig(&self) -> NamedTempFile {
        for manifests in
            [include_str!("../../deploy/manager-service-account.yaml"), include_str!("../../deploy/manager-role.yaml")]
        {
            self.create(manifests).await;
        }
        self.cluster.kubeconfig_of_manager(&self.name, None)
    }

    /// A kubeconfig of the manager's service account in its own namespace, with the permissions that the test gives it.
    pub fn managers_account_kubeconfig(&self) -> NamedTempFile {
        self.cluster.kubeconfig_of_manager(&self.name, Some(&self.name))
    }

    /// Applies manifests to it, given as YAML or JSON.
    pub fn apply(&self, manifests: &str) -> String {
        let file = NamedTempFile::with_suffix(".yaml").expect("a temporary file");
        std::fs::write(file.path(), manifests).expect("writing manifests");
        let path = file.path().to_string_lossy();
        let args = ["--namespace", &self.name, "apply", "--filename", &path];
        match self.cluster.try_kubectl(&args) {
            Ok(said) => said,
            // Another test has made the same object of the whole cluster at the same time.
            Err(error) if error.contains("(AlreadyExists)") => self.cluster.kubectl(&args),
            Err(error) => panic!("kubectl apply: {error}"),
        }
    }
}

impl fmt::Display for TestNamespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The taints and the true conditions of each node.
const NODES: &str = r#"jsonpath={range .items[*]}{.metadata.name}: {range .status.conditions[?(@.status=="True")]}{.type} {end}{.spec.taints[*].key}{"\n"}{end}"#;

impl TestNamespace {
    /// Prints the objects and events of the namespace, and the last lines of its VMs' containers. They often say why a test has waited in vain.
    fn describe(&self) {
        const VMS: &str = "--selector=app.kubernetes.io/name=vm-runner";
        for args in [
            &["get", "nodes", "--output", NODES][..],
            &["get", "vm,deployments,jobs,pods,pvc", "--output=wide"],
            &["logs", VMS, "--all-containers", "--prefix", "--tail=25"],
            &["logs", VMS, "--previous", "--prefix", "--tail=15"],
            &["get", "events", "--sort-by=.metadata.creationTimestamp"],
        ] {
            let told = self.cluster.try_kubectl(&[&["--namespace", &self.name], args].concat());
            eprintln!("$ kubectl {}\n{}", args.join(" "), told.unwrap_or_else(|error| error));
        }
    }
}

impl Drop for TestNamespace {
    fn drop(&mut self) {
        let failed = std::thread::panicking();
        if failed {
            self.describe();
        }
        self.cluster.order(&format!("{} {}", if failed { "failed" } else { "passed" }, self.name));
        // What a failed test leaves would keep the node from the next ones.
        if failed || !self.cluster.is_started_here {
            let _ = self.cluster.try_kubectl(&["delete", "namespace", &self.name, "--wait=false"]);
        }
    }
}

/// Calls `check` until it returns something; panics when the limit is reached.
///
/// A check that takes long, because it starts a program, is made less often: what is waited for needs the processors.
pub async fn eventually<T>(what: &str, limit: Duration, mut check: impl AsyncFnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        let begin = Instant::now();
        if let Some(value) = check().await {
            return value;
        }
        assert!(start.elapsed() < limit, "waited {} s in vain for {what}", limit.as_secs());
        let pause = (begin.elapsed() * 5).clamp(Duration::from_millis(50), Duration::from_secs(1));
        tokio::time::sleep(pause).await;
    }
}

/// Deletes an object, if it exists.
pub async fn delete<K>(api: &Api<K>, name: &str)
where
    K: Clone + fmt::Debug + serde::de::DeserializeOwned,
{
    match api.delete(name, &DeleteParams::default()).await {
        Ok(_) | Err(kube::Error::Api(_)) => {}
        Err(error) => panic!("deleting {name}: {error}"),
    }
}
