//! How `kubectl vm` leads to guests: one connection, ssh, Services. The tests play the guests; `tests/node/commands.rs` has a real one.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Command};

use k8s_openapi::api::core::v1::Service;
use kube::api::DeleteParams;
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;

use super::commands::{Printed, ns, printed, run, succeeds, up};
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
        assert!(connected.code == 1 && connected.talk.contains(&rule), "{connected:?}");
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

/// A folder with programs that print their name and their arguments, a line each, and end with the code 77.
fn played_openssh() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["ssh", "scp"] {
        let program = folder.path().join(name);
        fs::write(&program, format!("#!/bin/sh\nprintf '%s\\n' {name} \"$@\"\nexit 77\n")).unwrap();
        fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
    }
    folder
}

/// A command, with these programs before others and this kubeconfig. The namespace is before what is for OpenSSH.
fn with_programs(ns: &ManagedNamespace, programs: &Path, kubeconfig: &Path, arguments: &[&str]) -> Printed {
    let end = arguments.iter().position(|word| *word == "--").unwrap_or(arguments.len());
    let (ours, theirs) = arguments.split_at(end);
    let path = format!("{}:{}", programs.display(), std::env::var("PATH").unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_kubectl-vm"));
    command.args(ours).args(["--namespace", ns.namespace.name()]).args(theirs);
    printed(command.env("KUBECONFIG", kubeconfig).env("PATH", path).output().unwrap())
}

#[tokio::test]
async fn openssh_gets_the_way_to_the_guest_and_its_exit_code_is_ours() {
    let ns = ns("ssh").await;
    up(&ns, "apple", |vm| {
        with_pod_network(vm);
        vm["spec"]["cloudInit"] = json!({ "userData": { "users": ["default", { "name": "ada" }] } });
    })
    .await;
    up(&ns, "pear", with_pod_network).await;
    ns.create_vm("fig", |vm| {
        with_pod_network(vm);
        vm["spec"]["vm"]["state"] = json!("Stopped");
    })
    .await;
    ns.vm_with_reason("fig", "StoppedAsRequested").await;
    up(&ns, "plum", |vm| vm["spec"]["vm"]["networks"] = json!([{ "user": {} }])).await;
    let (place, program, openssh) = (ns.namespace.name(), env!("CARGO_BIN_EXE_kubectl-vm"), played_openssh());
    let kubeconfig = openssh.path().join("my kubeconfig");
    fs::copy(ns.cluster.kubeconfig(), &kubeconfig).unwrap();
    let kubeconfig = kubeconfig.to_str().unwrap();
    let of = |name: &str, more: &str| {
        format!(
            "-oProxyCommand={program} port-forward {name} --namespace {place}{more} --stdio %p\n\
             -oHostKeyAlias=vm.{name}.{place}\n"
        )
    };
    let (apple, pear) = (of("apple", ""), of("pear", ""));
    for (line, expected) in [
        ("ssh apple", format!("ssh\n{apple}ada@vm.apple.{place}\n")),
        ("ssh vm/pear", format!("ssh\n{pear}vm.pear.{place}\n")),
        (
            "ssh bob@apple -i key -i other -p 2222 -- -N -L 80:localhost:80",
            format!("ssh\n{apple}-i\nkey\n-i\nother\n-p2222\nbob@vm.apple.{place}\n-N\n-L\n80:localhost:80\n"),
        ),
        ("ssh pear -- uptime -n", format!("ssh\n{pear}vm.pear.{place}\nuptime\n-n\n")),
        (
            "scp -r ./a:b apple:c bob@apple:/d:e -i key -P 2222 -- -C",
            format!(
                "scp\n{apple}-i\nkey\n-P2222\n-r\n-C\n--\n./a:b\nada@vm.apple.{place}:c\nbob@vm.apple.{place}:/d:e\n"
            ),
        ),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let printed = with_programs(&ns, openssh.path(), ns.cluster.kubeconfig(), &words);
        assert_eq!((printed.data.as_str(), printed.code), (expected.as_str(), 77), "{line}: {printed:?}");
    }
    let elsewhere = ["ssh", "pear", "--kubeconfig", kubeconfig, "--as", "admin", "--as-group", "system:masters"];
    let printed = with_programs(&ns, openssh.path(), Path::new("/nowhere"), &elsewhere);
    let more = format!(" --kubeconfig '{kubeconfig}' --as admin --as-group system:masters");
    assert_eq!(printed.data, format!("ssh\n{}vm.pear.{place}\n", of("pear", &more)), "{printed:?}");

    // What is wrong is said before ssh starts.
    let unreachable = "its networks are of type user, through which nothing reaches the guest";
    for (line, code, talk) in [
        ("ssh fig", 1, format!("vm {place}/fig: it has no Pod, so no guest runs")),
        ("ssh plum", 1, format!("vm {place}/plum: {unreachable}")),
        ("scp plum:a .", 1, format!("vm {place}/plum: {unreachable}")),
        ("ssh lychee", 1, format!("vm/lychee: there is none in the namespace {place}")),
        ("scp a b", 2, "no path is in a guest: write VM:PATH, such as web:/tmp".to_owned()),
        ("scp apple:a pear:b", 2, "the paths are in the guests of apple and pear".to_owned()),
        ("ssh -- -oProxyCommand=x@apple", 2, "error: ".to_owned()),
        ("scp -- -oProxyCommand=x@apple:a b", 2, "error: ".to_owned()),
        ("ssh @apple", 2, "\"\" is no user".to_owned()),
        ("ssh ada@apple/vms", 2, "\"apple/vms\" is no name of a VM".to_owned()),
    ] {
        let words: Vec<&str> = line.split(' ').collect();
        let printed = with_programs(&ns, openssh.path(), ns.cluster.kubeconfig(), &words);
        assert_eq!((printed.data.as_str(), printed.code), ("", code), "{line}: {printed:?}");
        assert!(printed.talk.starts_with(&talk), "{line}: {printed:?}");
    }
    let without = with_programs(&ns, Path::new("/nowhere"), ns.cluster.kubeconfig(), &["ssh", "--help"]);
    assert!(without.data.contains("[USER@]VM") && without.data.contains("vm.NAME.NAMESPACE"), "{without:?}");
}

#[tokio::test]
async fn a_configuration_for_openssh_leads_to_all_vms_that_can_be_reached() {
    let ns = ns("ssh-config").await;
    ns.create_vm("apple", |vm| {
        with_pod_network(vm);
        vm["spec"]["cloudInit"] = json!({ "userData": "#cloud-config\nusers: [{name: ada}]\n" });
    })
    .await;
    ns.create_vm("pear", |vm| vm["spec"]["vm"]["networks"] = json!([{ "user": {} }])).await;
    // Also one that does not run.
    ns.create_vm("fig", |vm| {
        with_pod_network(vm);
        vm["spec"]["vm"]["state"] = json!("Stopped");
    })
    .await;
    let place = ns.namespace.name();
    let (program, kubeconfig) = (env!("CARGO_BIN_EXE_kubectl-vm"), ns.cluster.kubeconfig().display());
    let context = ns.cluster.kubectl(&["config", "current-context"]);
    let block = |name: &str, more: &str| {
        format!(
            "Host vm.{name}.{place}\n    HostKeyAlias vm.{name}.{place}\n{more}    ProxyCommand {program} port-forward {name} \
             --namespace {place} --context {} --kubeconfig {kubeconfig} --stdio %p\n",
            context.trim()
        )
    };
    let all = run(&ns, &["ssh-config", "--all", "-p", "2222", "-i", "/k y"]);
    let more = "    IdentityFile \"/k y\"\n    Port 2222\n";
    let expected = format!("{}\n{}", block("apple", &format!("    User ada\n{more}")), block("fig", more));
    assert_eq!((all.data.as_str(), all.code), (expected.as_str(), 0), "{all:?}");
    assert!(all.talk.starts_with(&format!("vm {place}/pear: its networks are of type user")), "{all:?}");
    let one = run(&ns, &["ssh-config", "fig"]);
    assert_eq!((one.data, one.code, one.talk), (block("fig", ""), 0, String::new()));
    assert_eq!(run(&ns, &["ssh-config", "pear"]).code, 1);
    assert_eq!(run(&ns, &["ssh-config", "pear", "fig"]).code, 5);
    assert_eq!(run(&ns, &["ssh-config"]).code, 2);

    // ssh, which is called like that, comes to the VM: it says why there is no way.
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), &all.data).unwrap();
    let mut ssh = Command::new("ssh");
    ssh.arg("-F").arg(file.path()).args(["-oBatchMode=yes", &format!("vm.fig.{place}")]);
    if let Ok(output) = ssh.env_remove("KUBECONFIG").output() {
        let output = printed(output);
        let talk = format!("vm {place}/fig: it has no Pod, so no guest runs");
        assert!(output.code == 255 && output.talk.contains(&talk), "{output:?}");
    }
}

#[tokio::test]
async fn a_vm_is_exposed_before_it_runs_and_after_it_was_created_anew() {
    let ns = ns("expose").await;
    let create = async || {
        ns.create_vm("fig", |vm| {
            with_pod_network(vm);
            vm["spec"]["vm"]["state"] = json!("Stopped");
            vm["spec"]["nodeName"] = json!("played");
        })
        .await;
        ns.vm_with_reason("fig", "StoppedAsRequested").await;
    };
    create().await;
    ns.create_vm("plum", |vm| vm["spec"]["vm"]["networks"] = json!([{ "user": {} }])).await;
    let place = ns.namespace.name();
    let services = ns.api::<Service>();
    let expose = ["expose", "vm/fig", "--name", "vmiservice", "--port", "27017", "--target-port", "22"];
    let with = |more: &[&'static str]| [&expose as &[&str], more].concat();

    // For Git, and without a trace.
    let file = succeeds(&ns, &with(&["--dry-run=client", "-o", "yaml"]));
    let file: Value = serde_yaml::from_str(&file).unwrap();
    assert_eq!((&file["kind"], &file["spec"]["ports"][0]["targetPort"]), (&json!("Service"), &json!(22)));
    let dry = "service/vmiservice exposed (server dry run): it leads to port 22 of vm/fig\n";
    assert_eq!(succeeds(&ns, &with(&["--dry-run=server"])), dry);
    assert_eq!(succeeds(&ns, &with(&["--dry-run=client", "-o", "name"])), "service/vmiservice\n");
    assert!(services.get_opt("vmiservice").await.unwrap().is_none());

    let exposed = succeeds(&ns, &expose);
    let service = services.get("vmiservice").await.unwrap();
    let address = service.spec.clone().unwrap().cluster_ip.unwrap();
    let lines = |done: &str, endpoints: &str| {
        format!(
            "service/vmiservice {done}: it leads to port 22 of vm/fig\n  in the cluster: {address}:27017, \
             vmiservice.{place}.svc:27017 (TCP)\n  ready endpoints: {endpoints}\n"
        )
    };
    assert_eq!(exposed, lines("exposed", "none until vm/fig runs"));
    assert_eq!(succeeds(&ns, &expose), lines("unchanged", "none until vm/fig runs"));
    let other = run(&ns, &with(&["--type", "NodePort"]));
    let talk =
        "service/vmiservice: it exists already, and is another one than this; give this one another name by --name\n";
    assert_eq!((other.code, other.data.as_str(), other.talk.as_str()), (1, "", talk));
    let node_port = succeeds(&ns, &["expose", "fig", "--port=80", "--type=nodeport", "--labels=a=b", "-o", "json"]);
    let node_port: Value = serde_json::from_str(&node_port).unwrap();
    assert_eq!(
        (&node_port["metadata"]["name"], &node_port["metadata"]["labels"]["a"]),
        (&json!("fig-80"), &json!("b"))
    );
    assert!(node_port["spec"]["ports"][0]["nodePort"].is_number(), "{node_port}");
    let unreachable = run(&ns, &["expose", "plum", "--port", "22"]);
    assert!(
        unreachable.code == 1 && unreachable.talk.contains("through which nothing reaches the guest"),
        "{unreachable:?}"
    );

    // Two VMs of the same name after each other have the same Service, which the manager leaves alone.
    for ip in ["10.200.0.7", "10.200.0.8"] {
        succeeds(&ns, &["start", "fig"]);
        ns.vm_with_reason("fig", "Starting").await;
        ns.patch_pod_status(
            "fig",
            json!({
                "phase": "Running", "podIP": ip, "podIPs": [{ "ip": ip }], "conditions": [{ "type": "Ready", "status": "True" }],
            }),
        )
        .await;
        ns.report("fig", true, "Started").await;
        ns.vm_with_reason("fig", "Running").await;
        let endpoint = format!("{ip}:22");
        eventually("the Service to lead to the new Pod", LIMIT, async || {
            (succeeds(&ns, &expose) == lines("unchanged", &endpoint)).then_some(())
        })
        .await;
        ns.api::<VirtualMachine>().delete("fig", &DeleteParams::default()).await.unwrap();
        ns.remove_pod("fig").await;
        eventually("the VM to be gone", LIMIT, async || {
            ns.api::<VirtualMachine>().get_opt("fig").await.unwrap().is_none().then_some(())
        })
        .await;
        create().await;
    }
    let same = services.get("vmiservice").await.unwrap();
    assert_eq!((same.metadata.uid, same.spec), (service.metadata.uid, service.spec));

    // The page about security has these rights.
    let as_alice = || run(&ns, &["expose", "fig", "--port", "443", "--as", "alice"]);
    allow(&ns, "vms", "get", "vms.vmoperator.jdrupes.org");
    eventually("alice to read the VM", LIMIT, async || {
        as_alice().talk.starts_with("service/fig-443: alice may not create services in the namespace").then_some(())
    })
    .await;
    allow(&ns, "services", "create", "services");
    let exposed =
        eventually("alice to create it", LIMIT, async || Some(as_alice()).filter(|done| done.code == 0)).await;
    assert!(
        exposed.data.contains("ready endpoints: not known: alice may not list endpointslices.discovery.k8s.io"),
        "{exposed:?}"
    );
}

#[tokio::test]
async fn the_screen_is_not_shown_and_why() {
    let ns = ns("view").await;
    let place = ns.namespace.name();
    up(&ns, "apple", |_| ()).await;
    let view = |more: &[&str]| run(&ns, &[&["view", "apple", "--proxy-only", "--user=ann"] as &[&str], more].concat());
    let printed = view(&[]);
    assert!(printed.code == 1 && printed.talk.contains("nothing leads to its screen"), "{printed:?}");

    // Its agent says where the relay is. Nobody but those with the Secret gets there.
    let status = r#"--patch={"status":{"relayPort":10443}}"#;
    ns.namespace.kubectl(&["patch", "vm", "apple", "--subresource=status", "--type=merge", status]);
    allow(&ns, "vms", "get", "vms.vmoperator.jdrupes.org");
    allow(&ns, "pods", "list", "pods");
    let lacks = eventually("alice to read the VM and its Pod", LIMIT, async || {
        Some(view(&["--as", "alice"])).filter(|printed| printed.talk.contains("may not get secrets"))
    })
    .await;
    assert!(lacks.code == 1 && lacks.talk.contains(&format!("vm {place}/apple: Secret apple-relay")), "{lacks:?}");
    assert_eq!(view(&["--watch", "--ask"]).code, 2);
}
