//! A process of the web interface.

use std::{
    fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use serde_json::Value;

use super::{Browser, Web};
use crate::support::{cluster::eventually, managed_namespace::LIMIT};

/// It ends with this value.
pub struct Replica {
    process: Child,
    /// Where it listens.
    pub address: SocketAddr,
    log: PathBuf,
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
    }
}

impl Replica {
    /// Starts it with these options; its log is in the folder, under that name.
    pub async fn start(folder: &Path, name: &str, namespace: &str, kubeconfig: &Path, options: &[&str]) -> Self {
        let log = folder.join(name);
        let process = Command::new(env!("CARGO_BIN_EXE_vm-web"))
            .args(["--listen=127.0.0.1:0", "--log-format=json", "--namespace", namespace, "--config"])
            .arg(folder.join("config.yaml"))
            .args(options)
            .env("KUBECONFIG", kubeconfig)
            .stdin(Stdio::null())
            .stderr(fs::File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut replica = Self { process, address: ([0u8; 4], 0).into(), log };
        replica.address = eventually("the web interface to listen", LIMIT, async || {
            let text = replica.log();
            let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.filter_map(|line| line["address"].as_str()?.parse().ok()).next()
        })
        .await;
        replica
    }

    /// Where it answers the kubelet's probes alone.
    pub fn probes(&self) -> SocketAddr {
        let text = self.log();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut addresses = lines.filter_map(|line| line["probes"].as_str()?.parse().ok());
        addresses.next().expect("--probes")
    }

    /// All that it has logged.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The number of the process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }
}

impl Web {
    /// Another process of it.
    pub async fn start(&self, options: &[&str]) -> Replica {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("log-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        Replica::start(self.folder.path(), &name, self.namespace.name(), self.kubeconfig(), options).await
    }

    /// Another process of it, once it answers.
    pub async fn replica(&self, options: &[&str]) -> Replica {
        let replica = self.start(options).await;
        let browser = Browser { address: replica.address, cookie: None };
        eventually("the VMs to be listed", LIMIT, async || (browser.get("/readyz").await.status == 200).then_some(()))
            .await;
        replica
    }

    /// The file with the rights of the web interface.
    pub fn kubeconfig(&self) -> &Path {
        self.kubeconfig.path()
    }
}
