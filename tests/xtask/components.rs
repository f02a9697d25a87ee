//! Starting the components, seeing to it that they live, and saying what their logs say when they do not.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};
use serde::{Deserialize, Serialize};
use tokio::process::{Child, Command};

use crate::binaries::Binaries;
use crate::pki::SERVICE_RANGE;
use crate::tools::{last_lines, make_dir, read};

/// All that the process inside the cluster's namespaces must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The directory of the cluster as its components see it.
    pub dir: PathBuf,
    /// Where the API server is reached.
    pub address: std::net::IpAddr,
    /// The ports of the API server, etcd, and etcd's peers.
    pub ports: [u16; 3],
    /// The programs.
    pub binaries: Binaries,
    /// Whether Kubernetes' own controllers run.
    pub controllers: bool,
    /// The node, if there is one.
    pub node: Option<NodePlan>,
}

/// What makes the node of one cluster different from that of another.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NodePlan {
    /// The cluster's network interface.
    pub link: String,
    /// The subnet of the Pods.
    pub pods: String,
    /// The control group above all containers.
    pub cgroup: String,
    /// How containerd stacks layers.
    pub snapshotter: String,
    /// The image that keeps a Pod's namespaces open.
    pub pause_image: PathBuf,
}

/// A component: how it is started, and its process while it runs.
struct Component {
    name: String,
    program: PathBuf,
    args: Vec<String>,
    process: Option<Child>,
}

/// The components of a cluster.
pub struct Components {
    plan: Plan,
    all: Vec<Component>,
}

impl Components {
    /// Nothing runs yet.
    pub fn new(plan: Plan) -> Result<Self> {
        make_dir(&plan.dir.join("logs"))?;
        Ok(Self { plan, all: vec![] })
    }

    /// Starts a program of Kubernetes, if the machine has it.
    pub fn start_kubernetes(&mut self, name: &str, args: &[String]) -> Result<()> {
        match self.plan.binaries.get(name).cloned() {
            Some(program) => self.start(name, program, args),
            None => Ok(()),
        }
    }

    /// Starts a program of the machine.
    pub fn start_program(&mut self, name: &str, args: &[String]) -> Result<()> {
        self.start(name, name.into(), args)
    }

    fn start(&mut self, name: &str, program: PathBuf, args: &[String]) -> Result<()> {
        let log = self.log(name);
        File::create(&log).with_context(|| format!("creating {}", log.display()))?;
        let process = Some(self.spawn(name, &program, args)?);
        self.all.push(Component { name: name.to_owned(), program, args: args.to_vec(), process });
        Ok(())
    }

    fn spawn(&self, name: &str, program: &Path, args: &[String]) -> Result<Child> {
        let log = self.log(name);
        let file = File::options().append(true).open(&log).with_context(|| format!("opening {}", log.display()))?;
        // Whichever way this process ends, the kernel ends the component too.
        Command::new("setpriv")
            .args(["--pdeathsig", "KILL"])
            .arg(program)
            .args(args)
            .current_dir(&self.plan.dir)
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            // A proxy is for the world outside, and nothing here is there.
            .env("NO_PROXY", "*")
            .env("no_proxy", "*")
            .spawn()
            .with_context(|| format!("starting {name}"))
    }

    /// Kills a component. It stays away until [`Self::start_again`].
    pub async fn kill(&mut self, name: &str) -> Result<()> {
        let component = self.all.iter_mut().find(|component| component.name == name);
        let component = component.with_context(|| format!("there is no component {name}"))?;
        if let Some(mut process) = component.process.take() {
            process.kill().await.with_context(|| format!("killing {name}"))?;
        }
        Ok(())
    }

    /// Starts a component that was killed as it was started first, with `more` arguments.
    pub fn start_again(&mut self, name: &str, more: &[String]) -> Result<()> {
        let index = self.all.iter().position(|component| component.name == name);
        let index = index.with_context(|| format!("there is no component {name}"))?;
        let Component { program, args, .. } = &self.all[index];
        let process = self.spawn(name, program, &[args, more].concat())?;
        self.all[index].process = Some(process);
        Ok(())
    }

    /// The processes of the components that run.
    pub fn processes(&self) -> impl Iterator<Item = u32> {
        self.all.iter().filter_map(|component| component.process.as_ref()?.id())
    }

    fn log(&self, name: &str) -> PathBuf {
        self.plan.dir.join("logs").join(format!("{name}.log"))
    }

    /// An error with the last words of a component that has ended.
    pub fn check(&mut self) -> Result<()> {
        for index in 0..self.all.len() {
            let Component { name, process, .. } = &mut self.all[index];
            let Some(process) = process else { continue };
            if let Some(status) = process.try_wait().with_context(|| format!("asking for the state of {name}"))? {
                let name = name.clone();
                bail!("{name} has ended ({status}); its log ends with:\n{}", self.last_words(&name));
            }
        }
        Ok(())
    }

    fn last_words(&self, name: &str) -> String {
        let log = read(&self.log(name)).unwrap_or_default();
        // The API server complains about much that does not matter: errors and fatal ones first.
        let errors: Vec<&str> =
            log.lines().filter(|line| line.starts_with(['E', 'F']) || line.contains("rror")).collect();
        if errors.is_empty() { last_lines(&log, 12) } else { last_lines(&errors.join("\n"), 12) }
    }

    /// Polls until `check` gives something; a component that ends meanwhile, or the limit, is an error that names
    /// the component and shows its log.
    pub async fn wait<T>(&mut self, name: &str, what: &str, mut check: impl AsyncFnMut() -> Option<T>) -> Result<T> {
        let limit = Duration::from_secs(90);
        let start = Instant::now();
        loop {
            if let Some(value) = check().await {
                return Ok(value);
            }
            self.check()?;
            if start.elapsed() > limit {
                bail!(
                    "{name}: waited {} s in vain for {what}; its log ends with:\n{}",
                    limit.as_secs(),
                    self.last_words(name)
                );
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Starts etcd and the API server, which come up while other things are done.
    pub fn start_api_server(&mut self) -> Result<()> {
        let Plan { dir, address, ports: [port, client_port, peer_port], node, .. } = self.plan.clone();
        let etcd = format!("https://127.0.0.1:{client_port}");
        let peer = format!("https://127.0.0.1:{peer_port}");
        let pki = dir.join("pki");
        let pki = pki.display();
        self.start_kubernetes(
            "etcd",
            &[
                format!("--data-dir={}/etcd", dir.display()),
                format!("--listen-client-urls={etcd}"),
                format!("--advertise-client-urls={etcd}"),
                format!("--listen-peer-urls={peer}"),
                format!("--initial-advertise-peer-urls={peer}"),
                format!("--initial-cluster=default={peer}"),
                // Pods with the node's network reach its loopback. etcd asks nobody what they may do.
                "--client-cert-auth".to_owned(),
                format!("--trusted-ca-file={pki}/etcd-ca.crt"),
                format!("--cert-file={pki}/etcd.crt"),
                format!("--key-file={pki}/etcd.key"),
                "--peer-client-cert-auth".to_owned(),
                format!("--peer-trusted-ca-file={pki}/etcd-ca.crt"),
                format!("--peer-cert-file={pki}/etcd.crt"),
                format!("--peer-key-file={pki}/etcd.key"),
                // The data lives as long as the process: there is nothing to protect from a power failure.
                "--unsafe-no-fsync".to_owned(),
                "--log-level=error".to_owned(),
            ],
        )?;
        let bind = if node.is_some() { "0.0.0.0".to_owned() } else { address.to_string() };
        self.start_kubernetes(
            "kube-apiserver",
            &[
                format!("--etcd-servers={etcd}"),
                format!("--etcd-cafile={pki}/etcd-ca.crt"),
                format!("--etcd-certfile={pki}/etcd-client.crt"),
                format!("--etcd-keyfile={pki}/etcd-client.key"),
                format!("--secure-port={port}"),
                format!("--bind-address={bind}"),
                format!("--advertise-address={address}"),
                format!("--cert-dir={pki}"),
                format!("--tls-cert-file={pki}/apiserver.crt"),
                format!("--tls-private-key-file={pki}/apiserver.key"),
                format!("--client-ca-file={pki}/ca.crt"),
                format!("--token-auth-file={pki}/tokens.csv"),
                "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
                format!("--service-account-signing-key-file={pki}/service-accounts.key"),
                format!("--service-account-key-file={pki}/service-accounts.pub"),
                format!("--kubelet-client-certificate={pki}/kubelet-client.crt"),
                format!("--kubelet-client-key={pki}/kubelet-client.key"),
                format!("--kubelet-certificate-authority={pki}/ca.crt"),
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
                "--authorization-mode=Node,RBAC".to_owned(),
                "--enable-admission-plugins=NodeRestriction".to_owned(),
                format!("--service-cluster-ip-range={SERVICE_RANGE}"),
                "--allow-privileged".to_owned(),
            ],
        )
    }

    /// Waits for the API server and starts the controllers.
    pub async fn finish_control_plane(&mut self) -> Result<Client> {
        let client = client(&self.plan.dir.join("kubeconfig")).await?;
        let ask = client.clone();
        self.wait("kube-apiserver", "/readyz to answer", async || {
            let request = http_get("/readyz")?;
            ask.request_text(request).await.ok()
        })
        .await?;
        if !self.plan.controllers {
            return Ok(client);
        }
        let pki = self.plan.dir.join("pki");
        let pki = pki.display();
        self.start_kubernetes(
            "kube-controller-manager",
            &[
                format!("--kubeconfig={pki}/controller-manager.kubeconfig"),
                format!("--service-account-private-key-file={pki}/service-accounts.key"),
                format!("--root-ca-file={pki}/ca.crt"),
                "--use-service-account-credentials".to_owned(),
                "--leader-elect=false".to_owned(),
                "--secure-port=0".to_owned(),
                // The limits that it sets itself by default make its start take four seconds more.
                "--kube-api-qps=500".to_owned(),
                "--kube-api-burst=1000".to_owned(),
            ],
        )?;
        Ok(client)
    }
}

fn http_get(path: &str) -> Option<http::Request<Vec<u8>>> {
    http::Request::get(path).body(vec![]).ok()
}

/// A client for the cluster of a kubeconfig file.
pub async fn client(kubeconfig: &std::path::Path) -> Result<Client> {
    let config = Kubeconfig::read_from(kubeconfig)
        .with_context(|| format!("reading the kubeconfig {}", kubeconfig.display()))?;
    let config = kube::Config::from_custom_kubeconfig(config, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("using the kubeconfig {}", kubeconfig.display()))?;
    Client::try_from(config).context("making a client")
}
