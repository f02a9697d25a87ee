//! Who gets to a machine's display, on a real API server: the display secret, and the file that a viewer connects with.

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, create_vm_and_pod},
};
use k8s_openapi::{
    ByteString,
    api::core::v1::{Pod, Secret, Service},
};
use kube::{
    ResourceExt,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::PermissionsExt};
use vm_operator::{api::VirtualMachine, ownership::COMMAND_MANAGER};

#[tokio::test]
async fn a_generated_display_secret_keeps_the_password_that_a_person_sets() {
    let ns = ManagedNamespace::new("display-secret").await;
    let without = create_vm_and_pod(&ns, "without", |vm| {
        vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } });
    })
    .await;
    assert!(!without["spec"]["volumes"].to_string().contains("display-password"));
    assert!(ns.api::<Secret>().get_opt("without-display-secret").await.unwrap().is_none());
    let with = create_vm_and_pod(&ns, "with", |vm| vm["spec"]["nodeName"] = json!("node-1")).await;
    assert!(with["spec"]["volumes"].to_string().contains("display-password"));
    let secret = ns.api::<Secret>().get("with-display-secret").await.unwrap();
    assert_eq!(secret.labels()["app.kubernetes.io/component"], "display-secret");
    assert_eq!(secret.data.as_ref().unwrap()["password-expiry"].0, b"now");
    // A person sets another password: it stays, and the Pod is told so that the kubelet looks at once.
    let version = |pod: &Pod| pod.annotations().get("vmrunner.jdrupes.org/dpVersion").cloned();
    assert_eq!(version(&ns.api::<Pod>().get("with").await.unwrap()), None);
    let set = |data: &str| {
        let patch = format!(r#"{{"stringData":{data}}}"#);
        ns.namespace.kubectl(&["patch", "secret", "with-display-secret", "--type=merge", "--patch", &patch]);
    };
    set(r#"{"display-password":"hello","password-expiry":"never"}"#);
    let told = ns.pod_when("with", "told of the password", |pod| version(pod).is_some()).await;
    set(r#"{"display-password":"ns"}"#);
    ns.pod_when("with", "told again", |pod| version(pod) != version(&told)).await;
    ns.patch_vm("with", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    ns.vm_with_reason("with", "Starting").await;
    let data = ns.api::<Secret>().get("with-display-secret").await.unwrap().data.unwrap();
    assert_eq!(
        (data["display-password"].0.as_slice(), data["password-expiry"].0.as_slice()),
        (&b"ns"[..], &b"never"[..])
    );
    // Nor is the password lost when none is to be generated any more.
    ns.patch_vm("with", json!({ "spec": { "vm": { "display": { "spice": { "generateSecret": false } } } } })).await;
    ns.vm_with_reason("with", "Starting").await;
    let kept = ns.api::<Secret>().get("with-display-secret").await.unwrap();
    assert_eq!(kept.data.unwrap()["display-password"].0, b"ns");
    let pod = ns.api::<Pod>().get("with").await.unwrap();
    assert!(json!(pod)["spec"]["volumes"].to_string().contains("with-display-secret"));
    let vm = ns.api::<VirtualMachine>().get("with").await.unwrap();
    assert!(vm.status.unwrap().pending_changes.is_empty(), "it is still used");
}

#[tokio::test]
async fn kubectl_vm_display_writes_a_connection_file() {
    let ns = ManagedNamespace::new("viewer").await;
    let display = |arguments: &[&str]| ns.namespace.kubectl_vm(&[&["display"], arguments].concat());
    assert_eq!(display(&["apple"]).0, 1);
    ns.create_vm("apple", |vm| {
        let spice = json!({ "port": 5910, "server": "vms.example.org", "proxyUrl": "http://proxy:3128" });
        vm["spec"]["vm"]["display"] = json!({ "spice": spice });
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    let (code, told) = display(&["apple"]);
    assert!(code == 1 && told.contains("apple: it does not run, and has no display: "), "{told}");

    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let password = r#"{"stringData":{"display-password":"open\\sesame","password-expiry":"never"}}"#;
    ns.namespace.kubectl(&["patch", "secret", "apple-display-secret", "--type=merge", "--patch", password]);
    let expected = format!(
        "[virt-viewer]\ntype=spice\nhost=vms.example.org\nport=5910\npassword=open\\\\sesame\nproxy=http://proxy:3128\n\
         title={}/apple\nenable-usbredir=1\n",
        ns.namespace
    );
    let in_force = |expiry: &str| {
        let report = json!({ "status": { "displayPasswordExpiry": expiry } }).to_string();
        ns.namespace.kubectl(&["patch", "vm", "apple", "--subresource=status", "--type=merge", "--patch", &report]);
    };
    in_force("never");
    assert_eq!(display(&["apple"]), (0, expected.clone()));
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("apple.vv");
    fs::write(&file, "everybody can read this").unwrap();
    let arguments =
        ["vm/apple", "--output", file.to_str().unwrap(), "--server", "localhost", "--port", "15910", "--user", "alice"];
    assert_eq!(display(&arguments), (0, String::new()));
    let expected = expected.replace("vms.example.org", "localhost").replace("5910", "15910");
    let expected = expected.replace("proxy=http://proxy:3128\n", "") + "delete-this-file=1\n";
    assert_eq!(fs::read_to_string(&file).unwrap(), expected);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let status = ns.api::<VirtualMachine>().get("apple").await.unwrap().status.unwrap();
    assert_eq!(status.display.console_user.as_deref(), Some("alice"));

    // With no more rights than the page about security says.
    let mut kubeconfig: Value = serde_yaml::from_str(&fs::read_to_string(ns.cluster.kubeconfig()).unwrap()).unwrap();
    kubeconfig["users"][0]["user"]["as"] = json!("alice");
    let as_alice = folder.path().join("kubeconfig");
    fs::write(&as_alice, kubeconfig.to_string()).unwrap();
    let display_as_alice = || ns.namespace.kubectl_vm_as(&as_alice, &["display", "apple"]);
    let (code, told) = display_as_alice();
    assert!(code == 1 && told.contains("/apple: ") && told.contains("forbidden"), "{told}");
    let resource = "--resource=vms.vmoperator.jdrupes.org";
    ns.namespace.kubectl(&["create", "role", "users", "--verb=get,list,watch", resource]);
    let name = "--resource-name=apple-display-secret";
    ns.namespace.kubectl(&["create", "role", "viewers", "--verb=get,patch", "--resource=secrets", name]);
    for role in ["users", "viewers"] {
        ns.namespace.kubectl(&["create", "rolebinding", role, &format!("--role={role}"), "--user=alice"]);
    }
    eventually("alice to be let in", LIMIT, async || (display_as_alice() == display(&["apple"])).then_some(())).await;
    // It has ended: two at once get the same new one, when the runner has it.
    let expired = r#"{"stringData":{"password-expiry":"1"}}"#;
    ns.namespace.kubectl(&["patch", "secret", "apple-display-secret", "--type=merge", "--patch", expired]);
    let expiry = || {
        let path = "--output=jsonpath={.data.password-expiry}";
        ns.namespace.kubectl(&["get", "secret", "apple-display-secret", path])
    };
    let expired = expiry();
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(display_as_alice);
        while expiry() == expired {
            assert!(!first.is_finished(), "it sets another");
        }
        let second = scope.spawn(|| display(&["apple"]));
        let end = serde_json::from_value::<ByteString>(json!(expiry())).unwrap();
        in_force(std::str::from_utf8(&end.0).unwrap());
        (first.join().unwrap(), second.join().unwrap())
    });
    assert_eq!((first.0, &first), (0, &second));
    // Flux makes its own what is written by any name that begins with kubectl, and takes back what is not in Git.
    let secret = ns.api::<Secret>().get("apple-display-secret").await.unwrap();
    let managers: Vec<&str> = secret.managed_fields().iter().filter_map(|entry| entry.manager.as_deref()).collect();
    assert!(managers.contains(&COMMAND_MANAGER) && !managers.contains(&"kubectl-vm"), "{managers:?}");
    assert!(!first.1.contains("sesame"), "{}", first.1);

    // The one of a load balancer, and the Pod's.
    ns.patch_vm("apple", json!({ "spec": { "loadBalancerService": { "labels": { "a": "b" } } } })).await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "display": { "spice": { "server": null } } } } })).await;
    let services = ns.api::<Service>();
    eventually("the Service", LIMIT, async || services.get_opt("apple").await.unwrap()).await;
    let host = |text: &str| text.lines().find_map(|line| line.strip_prefix("host=").map(str::to_owned));
    ns.patch_pod_status("apple", json!({ "phase": "Running", "podIP": "10.0.0.8", "podIPs": [{ "ip": "10.0.0.8" }] }))
        .await;
    ns.vm_when("apple", "addressed", |vm| vm.status.as_ref().unwrap().addresses.is_some()).await;
    assert_eq!(host(&display(&["apple"]).1).as_deref(), Some("10.0.0.8"));
    let balancer = json!({ "status": { "loadBalancer": { "ingress": [{ "ip": "192.0.2.7" }] } } });
    services.patch_status("apple", &PatchParams::default(), &Patch::Merge(&balancer)).await.unwrap();
    assert_eq!(host(&display(&["apple"]).1).as_deref(), Some("192.0.2.7"));
}
