//! The real manager, as a child process of the test.
#![allow(dead_code, reason = "each test program uses its own part")]
#![allow(clippy::expect_used, clippy::print_stderr, reason = "this is test code")]

use std::{
    collections::BTreeSet,
    fs,
    io::{Read, Write},
    net::TcpStream,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api,
    runtime::{conditions::is_crd_established, wait::await_condition},
};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::sync::Mutex;
use vm_operator::config::Config;

use super::cluster::{Cluster, Requests, TestNamespace, eventually};
pub use super::requests::is_about_vms;

/// Applies the CustomResourceDefinitions.
pub async fn install_crds(cluster: &Cluster) {
    // Once for each cluster of the process; the other tests wait until the first one has done it.
    static INSTALLED: Mutex<BTreeSet<PathBuf>> = Mutex::const_new(BTreeSet::new());
    let mut installed = INSTALLED.lock().await;
    if installed.contains(cluster.kubeconfig()) {
        return;
    }
    let crds = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds");
    cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--filename", &crds.to_string_lossy()]);
    let api: Api<CustomResourceDefinition> = Api::all(cluster.client().await);
    for name in ["vms.vmoperator.jdrupes.org", "vmpools.vmoperator.jdrupes.org", "vmreports.vmoperator.jdrupes.org"] {
        let established = await_condition(api.clone(), name, is_crd_established());
        tokio::time::timeout(Duration::from_secs(30), established).await.expect("the CRDs in time").expect("the CRDs");
    }
    installed.insert(cluster.kubeconfig().to_owned());
}

/// Waits until no client sends requests about VMs any more: within two seconds the API server's counts do not change.
pub async fn wait_until_quiet(cluster: &Cluster) -> Requests {
    let mut before = cluster.requests().await;
    eventually("quiet", Duration::from_secs(60), async || {
        tokio::time::sleep(Duration::from_secs(2)).await;
        let last = std::mem::replace(&mut before, cluster.requests().await);
        (before.since(&last).only(is_about_vms).total() == 0).then_some(())
    })
    .await;
    before
}

/// In a configuration: VMs get what this text allows, and nothing else.
pub const NOTHING_ELSE: &str = "# nothing else is allowed\n";

/// A configuration that also allows VMs what its text says nothing of, for tests of other matters. A text that can't be read stays as it is.
pub fn allowing(text: &str) -> String {
    if text.starts_with(NOTHING_ELSE) || Config::parse(text).is_err() {
        return text.to_owned();
    }
    let lists = r#""/Manager/Controller/Reconciler": {
  networks: {bridges: ["*"], cdUrls: ["*"], displayPorts: ["0-65535"]}, nodeNames: ["*"], affinityNamespaces: ["*"], podLabels: ["*"],
  extendedResources: ["*"], claims: {dataSources: ["*"], volumeNames: ["*"], annotations: ["*"], labels: ["*"]},
  services: {annotations: ["*"], labels: ["*"]}, runnerImages: ["localhost/*", "example.org/*", "registry.example.org/*", "ghcr.io/*"],
  legacyRunnerImages: ["ghcr.io/mnlipp/*", "registry.mnl.de/*"]}
"#;
    format!("{lists}{text}")
}

/// A manager. It ends when this is dropped.
pub struct Manager {
    process: Child,
    folder: TempDir,
}

/// How a manager is started.
#[derive(Default)]
pub struct Setup<'a> {
    /// Templates, as name and text.
    pub templates: &'a [(&'a str, &'a str)],
    /// The configuration file's text; `None`: there is no file.
    pub config: Option<&'a str>,
    /// Further arguments.
    pub arguments: &'a [&'a str],
    /// Further variables of the environment, as name and value.
    pub environment: &'a [(&'a str, &'a str)],
}

impl Manager {
    /// Starts a manager for a namespace, with templates given as name and text.
    pub fn start(cluster: &Cluster, namespace: &TestNamespace, templates: &[(&str, &str)]) -> Self {
        Self::start_with(cluster.kubeconfig(), namespace.name(), templates, "")
    }

    /// The same for the API server of a kubeconfig, with the text of a configuration file.
    pub fn start_with(kubeconfig: &Path, namespace: &str, templates: &[(&str, &str)], configuration: &str) -> Self {
        // With the same identity a manager need not wait for the lease of one that was killed.
        let arguments = &["--identity=the-only-one"];
        Self::with(
            kubeconfig,
            Some(namespace),
            &Setup { templates, config: Some(configuration), arguments, ..Setup::default() },
        )
    }

    /// Starts a manager for a namespace; `None`: its command line names no namespace.
    pub fn with(kubeconfig: &Path, namespace: Option<&str>, setup: &Setup<'_>) -> Self {
        let folder = TempDir::new().expect("a temporary folder");
        let overlay = folder.path().join("templates");
        fs::create_dir(&overlay).expect("a folder for templates");
        mount(&overlay, setup.templates);
        let config = folder.path().join("config");
        fs::create_dir(&config).expect("a folder for the configuration");
        if let Some(text) = setup.config {
            mount(&config, &[("config.yaml", &allowing(text))]);
        }
        let log = fs::File::create(folder.path().join("log")).expect("a log");
        let process = Command::new(env!("CARGO_BIN_EXE_vm-operator"))
            .args(["run", "--listen", "127.0.0.1:0", "--templates"])
            .arg(&overlay)
            .args(namespace.map(|namespace| format!("--namespace={namespace}")))
            .arg("-c")
            .arg(config.join("config.yaml"))
            .args(setup.arguments)
            .env("KUBECONFIG", kubeconfig)
            .env("RUST_LOG", "info,vm_operator=debug,kube_runtime=warn")
            .envs(setup.environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("starting the manager");
        Self { process, folder }
    }

    /// Changes the configuration as the kubelet does.
    pub fn change_configuration(&self, text: &str) {
        mount(&self.folder.path().join("config"), &[("config.yaml", &allowing(text))]);
    }

    /// Changes the templates as the kubelet does; a name may contain folders, as the `items` of a volume may.
    pub fn change_templates(&self, files: &[(&str, &str)]) {
        mount(&self.folder.path().join("templates"), files);
    }

    /// Its log so far.
    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// The lines of its log about writes to the API server.
    pub fn logged_writes(&self) -> Vec<String> {
        let words = [" applied ", " labelled ", " deleted ", " wrote the status", " wrote the spec "];
        self.log().lines().filter(|line| words.iter().any(|word| line.contains(word))).map(str::to_owned).collect()
    }

    /// Its answer to a GET request: status and text. `None` while it does not listen.
    pub fn get(&self, path: &str) -> Option<(u16, String)> {
        let log = self.log();
        let address = log.lines().find_map(|line| line.rsplit_once("probes and metrics address=")).map(|(_, it)| it)?;
        let mut socket = TcpStream::connect(address.trim()).ok()?;
        write!(socket, "GET {path} HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        socket.read_to_string(&mut answer).ok()?;
        let (head, text) = answer.split_once("\r\n\r\n")?;
        Some((head.split(' ').nth(1)?.parse().ok()?, text.to_owned()))
    }

    /// Waits until `/readyz` answers 200 with this text.
    pub async fn wait_until_ready(&self, text: &str) {
        eventually(&format!("readyz to say {text:?}"), Duration::from_secs(60), async || {
            self.get("/readyz").filter(|(status, answer)| *status == 200 && answer.contains(text)).map(drop)
        })
        .await;
    }

    /// The value of a metric; `name` includes the labels as `/metrics` prints them.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let (_, text) = self.get("/metrics")?;
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?.parse().ok()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).expect("a process to signal");
    }

    /// Waits until it is idle: within two seconds it neither reconciles nor writes anything.
    pub async fn wait_until_idle(&self) {
        let work = || {
            let (_, metrics) = self.get("/metrics")?;
            let is_work = |line: &&str| {
                line.starts_with("vm_operator_reconciles_total") || line.starts_with("vm_operator_writes_total")
            };
            let counts: Vec<String> = metrics.lines().filter(is_work).map(str::to_owned).collect();
            let is_waiting = ["waiting", "in_work"]
                .iter()
                .any(|what| self.metric(&format!("vm_operator_machines_{what}")) != Some(0.0));
            (!is_waiting && !counts.is_empty()).then_some(counts)
        };
        let mut before = None;
        eventually("the manager to have nothing to do", Duration::from_secs(60), async || {
            tokio::time::sleep(Duration::from_secs(2)).await;
            let now = work();
            let last = std::mem::replace(&mut before, now);
            (last.is_some() && last == before).then_some(())
        })
        .await;
    }

    /// Waits until its process has ended.
    pub async fn wait_for_end(&mut self) -> ExitStatus {
        eventually("the manager to end", Duration::from_secs(30), async || self.process.try_wait().expect("its status"))
            .await
    }
}

/// Writes files into a folder as the kubelet does for a ConfigMap: it replaces the symbolic link to the folder of all files.
fn mount(folder: &Path, files: &[(&str, &str)]) {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let version = format!("..{}", NUMBER.fetch_add(1, Ordering::Relaxed));
    let target = folder.join(&version);
    fs::create_dir(&target).expect("a folder");
    for (name, text) in files {
        let file = target.join(name);
        fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
        fs::write(file, text).expect("a file");
    }
    symlink(version, folder.join("..data_tmp")).expect("a link");
    fs::rename(folder.join("..data_tmp"), folder.join("..data")).expect("a new link");
    let tops: BTreeSet<&str> = files.iter().map(|(name, _)| name.split('/').next().unwrap_or(name)).collect();
    for top in &tops {
        if !folder.join(top).is_symlink() {
            symlink(Path::new("..data").join(top), folder.join(top)).expect("a link");
        }
    }
    for entry in fs::read_dir(folder).expect("the folder").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !name.starts_with("..") && !tops.contains(name.as_str()) {
            fs::remove_file(entry.path()).expect("a link that leads nowhere");
        }
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
