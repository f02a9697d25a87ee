//! How `kubectl vm` leads to guests: one connection, ssh, Services. The tests play the guests; `tests/node/commands.rs` has a real one.

use serde_json::{Value, json};

use super::commands::{ns, run, up};
use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace},
};

fn with_pod_network(vm: &mut Value) {
    vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }]);
}

/// Lets alice do this with a resource of the namespace.
fn allow(ns: &ManagedNamespace, role: &str, verbs: &str, resource: &str) {
    ns.namespace.kubectl(&["create", "role", role, "--verb", verbs, "--resource", resource]);
    ns.namespace.kubectl(&["create", "rolebinding", role, &format!("--role={role}"), "--user=alice"]);
}

#[tokio::test]
async fn one_connection_says_what_it_lacks() {
    let ns = ns("stdio").await;
    let place = ns.namespace.name();
    ns.create_vm("stopped", |vm| {
        with_pod_network(vm);
        vm["spec"]["vm"]["state"] = json!("Stopped");
    })
    .await;
    ns.vm_with_reason("stopped", "StoppedAsRequested").await;
    up(&ns, "apple", with_pod_network).await;
    up(&ns, "pear", |vm| vm["spec"]["vm"]["networks"] = json!([{ "user": {} }])).await;
    for (arguments, code, talk) in [
        (
            ["stopped", "--stdio", "22"],
            1,
            format!(
                "vm {place}/stopped: it has no Pod, so no guest runs: kubectl vm explain stopped -n {place} says why"
            ),
        ),
        (
            ["--stdio", "pear", "22"],
            1,
            format!(
                "vm {place}/pear: its networks are of type user, through which nothing reaches the guest: give it one of type pod \
                 (spec.vm.networks)"
            ),
        ),
        (["apple", "--stdio", "ssh"], 2, "--stdio takes one port of the guest, from 1 to 65535, such as 22".to_owned()),
    ] {
        let printed = run(&ns, &[&["port-forward"] as &[&str], &arguments].concat());
        assert_eq!((printed.code, printed.data.as_str(), printed.talk), (code, "", talk + "\n"), "{arguments:?}");
    }

    // The page about security has these rights.
    allow(&ns, "vms", "get", "vms.vmoperator.jdrupes.org");
    allow(&ns, "pods", "list", "pods");
    let connect = || run(&ns, &["port-forward", "apple", "--stdio", "22", "--as", "alice"]);
    let lacks = async |verbs: &str| {
        let connected = eventually("alice to read the VM and its Pod", LIMIT, async || {
            Some(connect()).filter(|connected| connected.talk.contains(&format!("may not {verbs} pods/portforward")))
        });
        let connected = connected.await;
        let rule = format!("- {{apiGroups: [\"\"], resources: [pods/portforward], verbs: [{verbs}]}}");
        assert!(connected.code == 3 && connected.talk.contains(&rule), "{connected:?}");
    };
    lacks("get, create").await;
    allow(&ns, "getters", "get", "pods/portforward");
    // The node is played, so it has no address.
    const ASKED: &str = "no preferred addresses found";
    eventually("the API server to want create as well, as it does since Kubernetes 1.35", LIMIT, async || {
        let talk = connect().talk;
        (talk.contains("may not create pods/portforward") || talk.contains(ASKED)).then_some(())
    })
    .await;
    allow(&ns, "creators", "create", "pods/portforward");
    eventually("the node to be asked", LIMIT, async || connect().talk.contains(ASKED).then_some(())).await;
}
