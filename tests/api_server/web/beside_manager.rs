//! `vm-operator run --web`: the web interface as a process of the manager.

use std::{
    fs,
    process::{Child, Command, Stdio},
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::{Browser, LIMIT, configuration};
use crate::support::{
    cluster::{Cluster, eventually},
    manager::install_crds,
};

/// The manager's process. It ends with this value.
struct Manager(Child);

impl Drop for Manager {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn tell(pid: u32, signal: Signal) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

#[tokio::test]
async fn the_web_interface_runs_beside_the_manager_and_is_started_again() {
    let cluster = Cluster::control_plane();
    install_crds(cluster).await;
    let namespace = cluster.namespace("web-beside").await;
    let folder = TempDir::new().unwrap();
    let (config, log) = (folder.path().join("web.yaml"), folder.path().join("log"));
    fs::write(&config, configuration(&["admin"])).unwrap();
    let process = Command::new(env!("CARGO_BIN_EXE_vm-operator"))
        .args(["run", "--web", "--listen=off", "--log-format=json", "--leader-election=false"])
        .args(["--namespace", namespace.name(), "--web-config"])
        .arg(&config)
        .env("KUBECONFIG", cluster.kubeconfig())
        .env("VM_WEB_LISTEN", "127.0.0.1:0")
        .stdin(Stdio::null())
        .stderr(fs::File::create(&log).unwrap())
        .spawn()
        .unwrap();
    let mut manager = Manager(process);
    // Of each start of the web interface: its number, and where it listens.
    let lines = || {
        let text = fs::read_to_string(&log).unwrap();
        text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()).collect::<Vec<_>>()
    };
    let said = |message: &str, key: &str| -> Vec<Value> {
        lines().iter().filter(|line| line["message"] == message).map(|line| line[key].clone()).collect()
    };
    let address = async |number: usize| {
        let address = eventually("the web interface to listen", LIMIT, async || {
            said("the web interface listens", "address").get(number).cloned()
        })
        .await;
        Browser { address: address.as_str().unwrap().parse().unwrap(), cookie: None }
    };
    let ready = async |browser: &Browser| {
        eventually("the VMs to be listed", LIMIT, async || (browser.get("/readyz").await.status == 200).then_some(()))
            .await;
    };
    let first = address(0).await;
    ready(&first).await;
    assert_eq!(first.sign_in("admin", "secret").await.status, 303, "it has its own configuration");
    // It fails: the manager goes on, and starts it again.
    let pid = said("the web interface was started", "pid")[0].as_u64().unwrap();
    tell(u32::try_from(pid).unwrap(), Signal::KILL);
    let second = address(1).await;
    ready(&second).await;
    assert_eq!(said("the web interface has ended", "status").len(), 1);
    assert!(manager.0.try_wait().unwrap().is_none());
    // Both end together, and by themselves.
    tell(manager.0.id(), Signal::TERM);
    let status = eventually("the manager to end", LIMIT, async || manager.0.try_wait().unwrap()).await;
    assert!(status.success(), "{status}");
    assert!(tokio::net::TcpStream::connect(second.address).await.is_err());
    assert_eq!(said("the web interface has ended", "status").len(), 1, "it was told to end");
}
