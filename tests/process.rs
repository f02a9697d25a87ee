//! The manager as a process: who leads, how it ends, what it says of itself, and what it reads again.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stderr, reason = "this is test code")]

mod support;

use std::time::{Duration, Instant};

use k8s_openapi::api::{coordination::v1::Lease, core::v1::Pod};
use kube::{Api, Client};
use rustix::process::Signal;
use serde_json::{Value, json};
use support::{
    cluster::{Cluster, TestNamespace, eventually},
    manager::{Manager, Setup, install_crds},
};

const LIMIT: Duration = Duration::from_secs(60);

/// A namespace for managers.
struct World {
    cluster: &'static Cluster,
    namespace: TestNamespace,
    client: Client,
}

impl World {
    async fn new(test: &str) -> Self {
        let cluster = Cluster::control_plane();
        install_crds(cluster).await;
        Self::of(cluster, test).await
    }

    async fn of(cluster: &'static Cluster, test: &str) -> Self {
        let namespace = cluster.namespace(test).await;
        let account = json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": "vm-runner" } });
        namespace.apply(&account.to_string());
        Self { cluster, client: cluster.client().await, namespace }
    }

    fn manager(&self, setup: &Setup<'_>) -> Manager {
        Manager::with(self.cluster, self.namespace.name(), setup)
    }

    fn api<K>(&self) -> Api<K>
    where
        K: kube::Resource<Scope = k8s_openapi::NamespaceResourceScope>,
        K::DynamicType: Default,
    {
        Api::namespaced(self.client.clone(), self.namespace.name())
    }

    fn make(&self, name: &str) {
        self.namespace.apply(&machine(name).to_string());
    }

    /// Waits for the Pod of a machine.
    async fn pod(&self, name: &str) -> Pod {
        let pods: Api<Pod> = self.api();
        eventually(&format!("the Pod of {name}"), LIMIT, async || pods.get_opt(name).await.unwrap()).await
    }

    async fn holder(&self) -> Option<String> {
        self.api::<Lease>().get("vm-operator").await.unwrap().spec?.holder_identity
    }

    /// A manager that leads and one that stands by.
    async fn two(&self) -> (Manager, Manager) {
        let leader = self.manager(&Setup::default());
        leader.ready("[+] machines: 0 listed").await;
        let standby = self.manager(&Setup::default());
        standby.ready("standing by for").await;
        let leads = |manager: &Manager| manager.metric("vm_operator_leader");
        assert_eq!((leads(&leader), leads(&standby)), (Some(1.0), Some(0.0)));
        (leader, standby)
    }
}

fn machine(name: &str) -> Value {
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": name },
        "spec": { "vm": { "state": "Running", "maximumCpus": 2 } },
    })
}

#[tokio::test]
async fn a_leader_that_is_killed_is_followed() {
    let world = World::new("killed").await;
    let (mut leader, standby) = world.two().await;
    world.make("before");
    world.pod("before").await;
    leader.signal(Signal::KILL);
    let since = Instant::now();
    leader.ended().await;
    world.make("apple");
    standby.ready("[+] lease: held").await;
    eprintln!("The next one leads {:.1} s after SIGKILL", since.elapsed().as_secs_f64());
    world.pod("apple").await;
    eprintln!("A new VM has its Pod {:.1} s after the leader was killed", since.elapsed().as_secs_f64());
    assert_eq!(standby.metric("vm_operator_leader"), Some(1.0));
}

#[tokio::test]
async fn a_leader_that_is_told_to_end_gives_way() {
    let world = World::new("stopped").await;
    let (mut leader, mut standby) = world.two().await;
    let first = world.holder().await;
    leader.signal(Signal::TERM);
    let since = Instant::now();
    assert!(leader.ended().await.success());
    eprintln!("SIGTERM to exit: {} ms", since.elapsed().as_millis());
    standby.ready("[+] machines: 0 listed").await;
    eprintln!("The next one leads and has listed the machines {} ms after SIGTERM", since.elapsed().as_millis());
    world.make("apple");
    world.pod("apple").await;
    assert_ne!(world.holder().await, first);

    standby.signal(Signal::INT);
    assert!(standby.ended().await.success());
    assert_eq!(world.holder().await.as_deref(), Some(""), "nobody has to wait for one who is not there");
}

#[tokio::test]
async fn one_that_stands_by_ends_at_once_and_leaves_the_lease() {
    let world = World::new("standby").await;
    let (_leader, mut standby) = world.two().await;
    let first = world.holder().await;
    standby.signal(Signal::TERM);
    assert!(standby.ended().await.success());
    assert_eq!(world.holder().await, first);
}

#[tokio::test]
async fn a_leader_that_slept_too_long_writes_nothing_any_more() {
    let world = World::new("slept").await;
    let (mut leader, standby) = world.two().await;
    leader.signal(Signal::STOP);
    world.make("apple");
    standby.ready("[+] lease: held").await;
    world.pod("apple").await;
    let written = leader.log();
    leader.signal(Signal::CONT);
    assert_eq!(leader.ended().await.code(), Some(1));
    let after = leader.log().split_off(written.len());
    assert!(after.contains("this manager must not go on"), "{after}");
    assert!(!after.contains("applied"), "{after}");
}

#[tokio::test]
async fn without_an_election_there_is_no_lease() {
    let world = World::new("alone").await;
    let manager = world.manager(&Setup { arguments: &["--leader-election=false"], ..Setup::default() });
    manager.ready("[+] lease: not used").await;
    world.make("apple");
    world.pod("apple").await;
    assert!(world.api::<Lease>().get_opt("vm-operator").await.unwrap().is_none());
}
