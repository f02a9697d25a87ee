//! The real manager, as a process beside the test.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::expect_used, clippy::print_stderr, reason = "this is test code")]

use std::{
    fs,
    path::Path,
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api,
    runtime::{conditions::is_crd_established, wait::await_condition},
};
use tempfile::TempDir;

use super::cluster::{Cluster, Requests, TestNamespace, eventually};
pub use super::requests::is_of_machines;

/// Makes the resources known to the cluster.
pub async fn install_crds(cluster: &Cluster) {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds");
        cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", &crds.to_string_lossy()]);
    });
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client().await);
    for name in ["vms.vmoperator.jdrupes.org", "vmpools.vmoperator.jdrupes.org"] {
        let established = await_condition(api.clone(), name, is_crd_established());
        tokio::time::timeout(Duration::from_secs(30), established).await.expect("the CRDs in time").expect("the CRDs");
    }
}

/// Waits until what the last writes caused has been looked at: two counts in a row are the same.
pub async fn quiet(cluster: &Cluster) -> Requests {
    let mut before = cluster.requests().await;
    eventually("quiet", Duration::from_secs(60), async || {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let last = std::mem::replace(&mut before, cluster.requests().await);
        (before.since(&last).only(is_of_machines).total() == 0).then_some(())
    })
    .await;
    before
}

/// A manager that ends with the test.
pub struct Manager {
    process: Child,
    folder: TempDir,
}

impl Manager {
    /// Starts a manager for a namespace, with templates given as name and text.
    pub fn start(cluster: &Cluster, namespace: &TestNamespace, templates: &[(&str, &str)]) -> Self {
        Self::start_with(cluster.kubeconfig(), namespace.name(), templates, "")
    }

    /// The same for the API server that a kubeconfig names, with the text of a configuration file.
    pub fn start_with(kubeconfig: &Path, namespace: &str, templates: &[(&str, &str)], configuration: &str) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let overlay = folder.path().join("templates");
        fs::create_dir(&overlay).expect("a folder for templates");
        for (name, text) in templates {
            fs::write(overlay.join(name), text).expect("a template");
        }
        let config = folder.path().join("config.yaml");
        fs::write(&config, configuration).expect("a configuration");
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let process = Command::new(env!("CARGO_BIN_EXE_vm-operator"))
            .args(["run", "--namespace", namespace, "--templates"])
            .arg(&overlay)
            .arg("--config")
            .arg(&config)
            .env("KUBECONFIG", kubeconfig)
            .env("RUST_LOG", "info,vm_operator=debug,kube_runtime=warn")
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("starting the manager");
        Self { process, folder }
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// What it has written so far, from its log.
    pub fn writes(&self) -> Vec<String> {
        let words = [" applied ", " labelled ", " deleted ", " wrote the status "];
        self.log().lines().filter(|line| words.iter().any(|word| line.contains(word))).map(str::to_owned).collect()
    }
}

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("--- the manager's log\n{}", self.log());
        }
    }
}
