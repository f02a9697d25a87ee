//! A manager sends no requests while nothing changes, and a manager that starts again writes nothing. The API server is used by
//! nobody else, because it counts the requests of all clients; the garbage collector, for example, reads owners at any time.

use std::time::Duration;

use crate::support::{
    cluster::{Cluster, OwnCluster, Requests, eventually},
    manager::{Manager, install_crds, is_about_vms, wait_until_quiet},
    requests::Request,
};
use k8s_openapi::api::core::v1::Pod;
use kube::{Api, ResourceExt, api::Patch};
use serde_json::json;
use vm_operator::api::VirtualMachine;

/// A template that renders no object but takes so long that the objects of a VM are listed meanwhile.
const SLOW: (&str, &str) =
    ("slow.yaml.j2", "{% for i in range(150) %}{% for j in range(1000) %}{% endfor %}{% endfor %}");
/// For how long no request may be sent.
const REST: Duration = Duration::from_secs(60);
const LIMIT: Duration = Duration::from_secs(180);

async fn requests_about_vms(cluster: &Cluster, before: &Requests) -> Requests {
    cluster.requests().await.since(before).only(is_about_vms)
}

#[tokio::test]
async fn a_manager_at_rest_sends_no_requests_and_a_restart_writes_nothing() {
    // An API server of its own: it counts the requests of all its clients.
    let own = OwnCluster::api_server();
    let cluster = *own;
    install_crds(cluster).await;
    let namespace = cluster.namespace("at-rest").await;
    namespace.create_runners_account().await;
    let manager = Manager::start(cluster, &namespace, &[SLOW]);
    let vms: Api<VirtualMachine> = Api::namespaced(cluster.client().await, namespace.name());
    for state in ["Running", "Stopped"] {
        let name = state.to_lowercase();
        let vm = json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": name },
            "spec": { "cloudInit": {}, "loadBalancerService": {}, "nodeName": "node-1", "vm": { "state": state, "maximumCpus": 1,
                "disks": [{ "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }] } },
        });
        namespace.apply(&vm.to_string());
        eventually(&format!("{name} to be seen"), LIMIT, async || {
            let vm = vms.get(&name).await.unwrap();
            (vm.status.as_ref()?.observed_generation == vm.metadata.generation).then_some(())
        })
        .await;
    }

    // Its kubelet has taken it. A Pod that nobody takes is reported after a while.
    let statuses = json!([{ "name": "vm-runner", "image": "x", "imageID": "", "ready": true, "restartCount": 0, "state": { "running": {} } }]);
    let taken = Patch::Merge(json!({ "status": { "phase": "Running", "containerStatuses": statuses } }));
    let pods: Api<Pod> = Api::namespaced(cluster.client().await, namespace.name());
    pods.patch_status("running", &Default::default(), &taken).await.unwrap();

    let before = wait_until_quiet(cluster).await;
    tokio::time::sleep(REST).await;
    let requests = requests_about_vms(cluster, &before).await;
    assert_eq!(requests.total(), 0, "{requests}\n{}", manager.log());

    let versions = async || {
        vms.list(&Default::default()).await.unwrap().into_iter().map(|vm| vm.resource_version()).collect::<Vec<_>>()
    };
    let (before_restart, before) = (versions().await, cluster.requests().await);
    drop(manager);
    let manager = Manager::start(cluster, &namespace, &[SLOW]);
    eventually("the new manager to have looked at both", LIMIT, async || {
        (manager.log().matches("reconciled").count() >= 2).then_some(())
    })
    .await;
    let requests = requests_about_vms(cluster, &before).await;
    assert_eq!(requests.writes().total(), 0, "{requests}\n{}", manager.log());
    assert_eq!(versions().await, before_restart);

    // What was changed or made while no manager ran is reconciled when all is listed: nothing is taken for missing.
    drop(manager);
    let before = cluster.requests().await;
    let patch = Patch::Merge(json!({ "spec": { "vm": { "maximumCpus": 2 } } }));
    vms.patch("running", &Default::default(), &patch).await.unwrap();
    let vm = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "made" },
        "spec": { "vm": { "state": "Running", "maximumCpus": 1 } },
    });
    vms.create(&Default::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    let manager = Manager::start(cluster, &namespace, &[SLOW]);
    eventually("the new manager to have looked at all", LIMIT, async || {
        let log = manager.log();
        let looked_at = |name: &str| log.lines().any(|line| line.contains(name) && line.contains("reconciled"));
        ["/made\"", "/running\"", "/stopped\""].into_iter().all(looked_at).then_some(())
    })
    .await;
    // An event is told when there is time.
    let counts = |request: &Request| request.verb != "LIST" && request.resource != "events";
    let requests = requests_about_vms(cluster, &before).await.only(counts);
    let sent: Vec<_> =
        requests.iter().map(|(request, count)| (request.verb.as_str(), request.resource.as_str(), count)).collect();
    let expected = [
        ("APPLY", "configmaps", 2),
        ("APPLY", "persistentvolumeclaims", 1),
        ("APPLY", "pods", 1),
        ("APPLY", "secrets", 2),
        ("APPLY", "vmreports", 1),
        ("APPLY", "vms/status", 2),
        ("PATCH", "pods", 1),
        ("PATCH", "vms", 1),
        ("POST", "vms", 1),
    ];
    assert_eq!(sent, expected, "{}", manager.log());
}
