//! What people may do with VMs by the roles and the policies of `deploy/users`, on a real API server: each role with each kind of change; and what is protected.

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde_json::{Value, json};
use vm_operator::{
    api::{VirtualMachine, VmPool},
    object::{FORCE_STOP_ANNOTATION, RESTARTED_ANNOTATION, STARTED_FOR_ANNOTATION, STATE_UNTIL_ANNOTATION},
};

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace},
};

/// A client of a person who has this role in the namespace.
async fn person(ns: &ManagedNamespace, role: &str) -> Client {
    let name = format!("person-{role}");
    let namespace = ns.namespace.name();
    ns.namespace
        .create(
            &json!({
                "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": name },
                "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role },
                "subjects": [{ "apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name }],
            })
            .to_string(),
        )
        .await;
    let kubeconfig = Kubeconfig::read_from(ns.cluster.kubeconfig()).unwrap();
    let mut config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    config.auth_info.impersonate = Some(name);
    config.default_namespace = namespace.to_owned();
    Client::try_from(config).unwrap()
}

/// The code of the answer to a request about a VM, and its message.
async fn send(client: &Client, verb: &str, path: &str, body: &Value) -> (u16, String) {
    let content = if verb == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let uri = format!("/apis/vmoperator.jdrupes.org/v1/namespaces/{}/{path}", client.default_namespace());
    let request = http::Request::builder().method(verb).uri(uri).header("content-type", content);
    let body = if verb == "GET" { Vec::new() } else { serde_json::to_vec(body).unwrap() };
    match client.request::<Value>(request.body(body).unwrap()).await {
        Ok(_) => (200, String::new()),
        Err(kube::Error::Api(answer)) => (answer.code, answer.message.clone()),
        Err(error) => panic!("{verb} {path}: {error}"),
    }
}

#[tokio::test]
async fn each_role_may_what_its_name_says() {
    let ns = ManagedNamespace::new("roles").await;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/users");
    ns.cluster.kubectl(&["apply", "--server-side", "--kustomize", folder]);
    ns.create_vm("apple", |vm| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        vm["metadata"]["labels"] = json!({ "tier": "web" });
        vm["metadata"]["annotations"] = json!({ "note": "kept" });
    })
    .await;
    let (view, edit, admin, power) = (
        person(&ns, "view").await,
        person(&ns, "edit").await,
        person(&ns, "admin").await,
        person(&ns, "vm-operator-power").await,
    );
    let vm = "vms/apple";
    let more_ram = json!({ "spec": { "vm": { "currentRam": "512Mi" } } });
    // Specs may have user data, so the role `view` reads them only where somebody says so. Both the roles' rules and the policy take a moment.
    eventually("the role admin to have the rules", LIMIT, async || {
        (send(&admin, "GET", vm, &json!({})).await.0 == 200).then_some(())
    })
    .await;
    assert_eq!(send(&view, "GET", vm, &json!({})).await.0, 403);
    let aggregated = "rbac.authorization.k8s.io/aggregate-to-view=true";
    ns.cluster.kubectl(&["label", "clusterrole", "vm-operator-view", aggregated]);
    eventually("the roles to have the rules", LIMIT, async || {
        let reads =
            send(&view, "GET", vm, &json!({})).await.0 == 200 && send(&admin, "GET", vm, &json!({})).await.0 == 200;
        (reads && send(&edit, "PATCH", vm, &json!({})).await.0 == 200).then_some(())
    })
    .await;
    eventually("the policy to be in force", LIMIT, async || {
        // Without a trace: a change that is made already is no change the next time.
        (send(&power, "PATCH", "vms/apple?dryRun=All", &more_ram).await.0 == 422).then_some(())
    })
    .await;

    let power_only = [
        json!({ "spec": { "vm": { "state": "Running" } } }),
        json!({ "spec": { "vm": { "state": "Stopped", "resetCount": 1, "rebootCount": 1, "paused": true } } }),
        json!({ "spec": { "vm": { "paused": false } } }),
        json!({ "metadata": { "annotations": { RESTARTED_ANNOTATION: "now", FORCE_STOP_ANNOTATION: "a-uid" } } }),
        json!({ "metadata": { "annotations": { FORCE_STOP_ANNOTATION: null } } }),
        json!({ "metadata": { "annotations": { STATE_UNTIL_ANNOTATION: "Stopped 2027-01-15T08:00:00Z" } } }),
        json!({ "metadata": { "annotations": { STATE_UNTIL_ANNOTATION: null } } }),
        json!({ "metadata": { "annotations": { STARTED_FOR_ANNOTATION: "2026-01-01T00:00:00Z ann" } } }),
    ];
    let more = [
        more_ram,
        json!({ "spec": { "vm": { "bootMenu": true } } }),
        json!({ "spec": { "nodeName": "other" } }),
        json!({ "spec": { "guestShutdownStops": true } }),
        json!({ "spec": { "vm": { "state": "Running", "display": { "outputs": 2 } } } }),
        json!({ "metadata": { "labels": { "tier": "db" } } }),
        json!({ "metadata": { "labels": { "more": "x" } } }),
        json!({ "metadata": { "annotations": { "note": null } } }),
        json!({ "metadata": { "annotations": { "other": "x" } } }),
        json!({ "metadata": { "finalizers": ["example.org/keep"] } }),
    ];
    for change in power_only.iter().chain(&more) {
        assert_eq!(send(&view, "PATCH", vm, change).await.0, 403, "view: {change}");
    }
    for change in &power_only {
        assert_eq!(send(&power, "PATCH", vm, change).await, (200, String::new()), "power: {change}");
    }
    for change in &more {
        let (code, message) = send(&power, "PATCH", vm, change).await;
        assert!(code == 422 && message.contains("you may change only these"), "power: {change}: {code} {message}");
    }
    for (who, client) in [("edit", &edit), ("admin", &admin)] {
        for change in power_only.iter().chain(&more[..9]) {
            assert_eq!(send(client, "PATCH", vm, change).await, (200, String::new()), "{who}: {change}");
        }
        assert_eq!(send(client, "PATCH", "vms/apple/status", &json!({})).await.0, 403, "{who}");
    }
    let other = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "banana" }, "spec": { "vm": { "maximumCpus": 1 } },
    });
    for (client, allowed) in [(&view, false), (&power, false), (&edit, true)] {
        let code = if allowed { 200 } else { 403 };
        assert_eq!(send(client, "POST", "vms", &other).await.0, code);
        assert_eq!(send(client, "DELETE", "vms/banana", &json!({})).await.0, code);
    }

    // The manager makes and changes the VMs of a pool, also under the policy.
    let template = |cpus: u32| json!({ "spec": { "vm": { "maximumCpus": cpus, "maximumRam": "1Gi" } } });
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "desk" },
        "spec": { "replicas": 0, "permissions": [{ "role": "staff" }], "template": template(1) },
    });
    assert_eq!(send(&edit, "POST", "vmpools", &pool).await, (200, String::new()));
    let wanted = json!({ "spec": { "replicas": 1 } });
    for (client, code) in [(&view, 403), (&power, 403), (&edit, 200)] {
        assert_eq!(send(client, "PATCH", "vmpools/desk/scale", &wanted).await.0, code);
    }
    let cpus = async |wanted: u32| {
        let vms = ns.api::<VirtualMachine>();
        let found = async || vms.get_opt("desk-0").await.unwrap()?.spec.vm.maximum_cpus.filter(|cpus| *cpus == wanted);
        eventually(&format!("desk-0 to have {wanted} CPUs"), LIMIT, found).await;
    };
    cpus(1).await;
    let change = json!({ "spec": { "template": template(2) } });
    assert_eq!(send(&edit, "PATCH", "vmpools/desk", &change).await, (200, String::new()));
    cpus(2).await;

    // A forced stop names the Pod.
    let who = "--as=person-vm-operator-power";
    for (what, allowed) in
        [(&["get", "pods"] as &[&str], true), (&["delete", "pods"], false), (&["get", "secrets"], false)]
    {
        let asked = [&["auth", "can-i", "--namespace", ns.namespace.name(), who], what].concat();
        assert_eq!(ns.cluster.try_kubectl(&asked).is_ok(), allowed, "power: {what:?}");
    }

    // What connections to guests and Services need, as the page about security says.
    for (role, allowed) in [("view", false), ("vm-operator-power", false), ("edit", true), ("admin", true)] {
        let who = format!("--as=person-{role}");
        let forward = "--subresource=portforward";
        for what in [&["get", "pods", forward] as &[&str], &["create", "pods", forward], &["create", "services"]] {
            let asked = [&["auth", "can-i", "--namespace", ns.namespace.name(), &who], what].concat();
            assert_eq!(ns.cluster.try_kubectl(&asked).is_ok(), allowed, "{role}: {what:?}");
        }
    }
}

#[tokio::test]
async fn what_is_protected_is_deleted_by_nobody_and_the_rest_is() {
    const PROTECTION: &str = "vmoperator.jdrupes.org/deleteProtection";
    let ns = ManagedNamespace::new("protected").await;
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/deploy/users");
    ns.cluster.kubectl(&["apply", "--server-side", "--force-conflicts", "--kustomize", folder]);
    let kubectl = |args: &[&str]| ns.cluster.try_kubectl(&[&["--namespace", ns.namespace.name()], args].concat());
    let protected = json!({ PROTECTION: "true" });
    for (name, annotations) in [("apple", &protected), ("pear", &json!({})), ("plum", &json!({ PROTECTION: "false" }))]
    {
        ns.create_vm(name, |vm| {
            vm["spec"]["vm"]["state"] = json!("Stopped");
            vm["metadata"]["annotations"] = annotations.clone();
        })
        .await;
    }
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool",
        "metadata": { "name": "desk", "annotations": protected },
        "spec": { "replicas": 2, "permissions": [{ "role": "staff" }], "template": {
            "metadata": { "annotations": protected }, "spec": { "vm": { "maximumCpus": 1, "maximumRam": "1Gi" } },
        } },
    });
    ns.namespace.apply(&pool.to_string());
    let vms = ns.api::<VirtualMachine>();
    eventually("the pool to have its VMs", LIMIT, async || vms.get_opt("desk-1").await.unwrap()).await;
    let refused = |what: &str, args: &[&str]| {
        let error = kubectl(args).unwrap_err();
        let wanted = format!("{what} is protected: to delete it, take its annotation {PROTECTION} away");
        assert!(error.contains(&wanted), "{args:?}: {error}");
    };
    eventually("the policy to be in force", LIMIT, async || {
        kubectl(&["delete", "vm", "apple", "--dry-run=server"]).err()
    })
    .await;

    refused("VirtualMachine apple", &["delete", "vm", "apple"]);
    refused("VirtualMachine apple", &["delete", "vm", "apple", "--cascade=orphan"]);
    refused("VmPool desk", &["delete", "vmpool", "desk"]);
    // What a GitOps controller prunes is deleted one by one.
    refused("VirtualMachine apple", &["delete", "vm", "plum", "apple", "pear", "--wait=false"]);
    for name in ["pear", "plum"] {
        eventually(&format!("{name} to be gone"), LIMIT, async || {
            vms.get_opt(name).await.unwrap().is_none().then_some(())
        })
        .await;
    }

    // The pool wants fewer VMs, and says what keeps them.
    ns.namespace.kubectl(&["scale", "vmpool", "desk", "--replicas=0"]);
    eventually("the pool to say what keeps its VMs", LIMIT, async || {
        let pool = ns.api::<VmPool>().get("desk").await.unwrap().status?;
        pool.conditions.into_iter().find(|it| it.reason == "Refused" && it.message.contains("is protected"))
    })
    .await;
    let unprotect = |what: &[&str]| ns.namespace.kubectl(&[&["annotate"], what, &[&format!("{PROTECTION}-")]].concat());
    unprotect(&["vm", "desk-0", "desk-1"]);
    eventually("the pool's VMs to be gone", LIMIT, async || {
        let vms = vms.list(&Default::default()).await.unwrap();
        vms.iter().all(|vm| vm.metadata.name.as_deref() == Some("apple")).then_some(())
    })
    .await;
    unprotect(&["vmpool", "desk"]);
    unprotect(&["vm", "apple"]);
    ns.namespace.kubectl(&["delete", "vmpool", "desk"]);
    ns.namespace.kubectl(&["delete", "vm", "apple"]);
}
