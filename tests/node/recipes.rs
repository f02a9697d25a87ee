//! The recipes of the cookbook on a real node.

use super::*;

/// Copies recipes of the cookbook, or the set of `kubectl vm`, into one set and brings it into the namespace.
pub fn install_set(namespace: &TestNamespace, set: &str, recipes: &[&str]) {
    install_set_with(namespace, set, recipes, &serde_json::json!({}));
}

/// With values that only an administrator sets.
fn install_set_with(namespace: &TestNamespace, set: &str, recipes: &[&str], own: &serde_json::Value) {
    let folder = tempfile::tempdir().unwrap();
    for recipe in recipes {
        let example = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("example");
        let from = ["templates", "sets"].map(|kind| example.join(kind).join(recipe));
        let from = from.into_iter().find(|folder| folder.is_dir()).expect("a recipe or a set");
        for (name, text) in files::files(&from).unwrap() {
            let file = folder.path().join(name);
            let before = std::fs::read_to_string(&file).unwrap_or_default();
            let text = if file.ends_with("values.schema.json") && !before.is_empty() {
                let mut schema: serde_json::Value = serde_json::from_str(&before).unwrap();
                json_patch::merge(&mut schema, &serde_json::from_str(&text).unwrap());
                schema.to_string()
            } else {
                before + &text
            };
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(&file, text).unwrap();
        }
    }
    let file = folder.path().join("values.yaml");
    if let Ok(text) = std::fs::read_to_string(&file) {
        let mut values: serde_json::Value = serde_yaml::from_str(&text).unwrap();
        json_patch::merge(&mut values, own);
        std::fs::write(&file, values.to_string()).unwrap();
    }
    let pack = ["templates", "pack", "--set", set, folder.path().to_str().unwrap()];
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(pack).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    namespace.apply(&String::from_utf8(output.stdout).unwrap());
}

/// Starts a web server with the guest's disk image, and returns its address.
pub async fn serve_images(namespace: &TestNamespace, pods: &Api<Pod>) -> String {
    namespace.kubectl(&[
        "run",
        "images",
        "--image=localhost/vm-demo-guest:0.1.0",
        "--image-pull-policy=IfNotPresent",
        "--command",
        "--",
        "/bin/busybox",
        "httpd",
        "-f",
        "-p",
        "8000",
        "-h",
        "/",
    ]);
    namespace.kubectl(&["wait", "--for=condition=Ready", "pod/images", "--timeout=600s"]);
    pods.get("images").await.unwrap().status.unwrap().pod_ip.unwrap()
}

/// The recipes of the cookbook that need nothing but a node: with each a guest boots.
#[tokio::test]
async fn recipes_run_on_a_node() {
    let _shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("recipes").await;
    let verbs = r#""verbs":["get","list","watch","create","patch","delete"]"#;
    namespace.apply(&format!(
        r#"{{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{{"name":"more"}},"rules":[
            {{"apiGroups":["networking.k8s.io"],"resources":["networkpolicies","ingresses"],{verbs}}},
            {{"apiGroups":["batch"],"resources":["cronjobs"],{verbs}}},
            {{"apiGroups":["apps"],"resources":["statefulsets"],{verbs}}}]}}"#
    ));
    let account = format!("--serviceaccount={}:vm-operator", namespace.name());
    namespace.kubectl(&["create", "rolebinding", "more", "--role=more", &account]);
    cluster.kubectl(&["label", "nodes", "--all", "example.org/pool=vms"]);
    let mut manifest = demo(&namespace);
    // An image that is there, with a web server.
    let exporter = serde_json::json!({
        "image": "localhost/vm-demo-guest:0.1.0", "args": ["/bin/busybox", "httpd", "-f", "-p", "9100"],
    });
    let several = ["node-pool", "network-policy", "ingress", "backup", "no-load-balancer", "smbios"];
    let all = ["networkpolicy/demo", "ingress/demo", "service/demo-http", "cronjob/backup-demo-system-disk"];
    // What an administrator sets.
    let none = serde_json::json!({});
    let exporter = serde_json::json!({ "exporter": exporter });
    for (set, recipes, pod, containers, makes, own) in [
        ("several", several.as_slice(), "demo", 1, all.as_slice(), &none),
        ("stateful-set", &["stateful-set"], "demo-0", 1, &["statefulset/demo"], &none),
        ("metrics-sidecar", &["metrics-sidecar"], "demo", 2, &[], &exporter),
        ("resource-classes", &["resource-classes"], "demo", 1, &[], &none),
    ] {
        install_set_with(&namespace, set, recipes, own);
        manifest["spec"]["templates"] = serde_json::json!({ "set": set });
        namespace.apply(&manifest.to_string());
        let vm = wait_for(&vms, "demo", conditions::BOOTED, true).await;
        assert_eq!(vm.status.unwrap().templates.unwrap().set.as_deref(), Some(set));
        eventually(&format!("all containers of {pod} to run"), LIMIT, async || {
            let found = pods.get(pod).await.unwrap().status?.container_statuses?;
            (found.len() == containers && found.iter().all(|container| container.ready)).then_some(())
        })
        .await;
        let console = namespace.log(pod);
        assert!(console.contains("guest: hostname=demo-guest"), "{set}:\n{console}");
        for object in makes {
            namespace.kubectl(&["get", object]);
        }
        if set == "several" {
            another_command_line_is_said(&namespace, &vms).await;
        }
        // It goes with all that it had, and its guest is asked.
        namespace.kubectl(&[
            "patch",
            "vm",
            "demo",
            "--type=merge",
            "--patch",
            r#"{"spec":{"vm":{"state":"Stopped"}}}"#,
        ]);
        gone(&pods, pod).await;
        namespace.kubectl(&["delete", "vm", "demo"]);
        for object in makes {
            namespace.kubectl(&["wait", "--for=delete", object, "--timeout=600s"]);
        }
    }
    a_device_that_no_plugin_hands_over_is_missed(cluster, &namespace, &vms, &pods, &manifest).await;

    // A new disk that is filled from a web server, once.
    let address = serve_images(&namespace, &pods).await;
    install_set(&namespace, "disk-from-url", &["disk-from-url"]);
    manifest["spec"]["templates"] = serde_json::json!({ "set": "disk-from-url" });
    let import =
        serde_json::json!({ "url": format!("http://{address}:8000/guest.img"), "format": "raw", "seconds": 60 });
    manifest["spec"]["templateValues"] = serde_json::json!({ "import": import });
    for (name, mode) in [("imported", "Block"), ("in-a-file", "Filesystem")] {
        manifest["metadata"]["name"] = name.into();
        manifest["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["volumeMode"] = mode.into();
        for start in ["starts=1", "starts=2"] {
            manifest["spec"]["vm"]["state"] = "Running".into();
            namespace.apply(&manifest.to_string());
            wait_for(&vms, name, conditions::BOOTED, true).await;
            let console = namespace.log(name);
            assert!(console.contains(&format!("guest: {start}")), "{name}, {start}:\n{console}");
            manifest["spec"]["vm"]["state"] = "Stopped".into();
            namespace.apply(&manifest.to_string());
            gone(&pods, name).await;
        }
        namespace.kubectl(&["delete", "vm", name]);
    }
}

/// The Pod gets a device that the node offers (<https://kubernetes.io/docs/tasks/administer-cluster/extended-resource-node/>). Here no plugin
/// says which one it is, so the guest could not have it: the VM says so, and does not run without.
async fn a_device_that_no_plugin_hands_over_is_missed(
    cluster: &Cluster,
    namespace: &TestNamespace,
    vms: &Api<VirtualMachine>,
    pods: &Api<Pod>,
    demo: &serde_json::Value,
) {
    let node = cluster.kubectl(&["get", "nodes", "--output=name"]);
    let offer = r#"[{"op":"add","path":"/status/capacity/example.org~1gpu","value":"1"}]"#;
    cluster.kubectl(&["patch", node.trim(), "--subresource=status", "--type=json", "--patch", offer]);
    install_set_with(
        namespace,
        "gpu-and-usb",
        &["gpu-and-usb"],
        &serde_json::json!({ "allowedDevices": ["example.org/gpu"] }),
    );
    let mut vm = demo.clone();
    vm["spec"]["templates"] = serde_json::json!({ "set": "gpu-and-usb" });
    vm["spec"]["templateValues"] = serde_json::json!({ "devices": { "example.org/gpu": "1" } });
    namespace.apply(&vm.to_string());
    let problem = eventually("the missing device to be said", LIMIT, async || {
        let status = vms.get("demo").await.unwrap().status?;
        status.problem.map(|problem| problem.message).filter(|message| message.contains("plugin"))
    })
    .await;
    assert!(problem.contains("no plugin has handed over example.org/gpu: PCI_RESOURCE_EXAMPLE_ORG_GPU"), "{problem}");
    let limits = r#"--output=jsonpath={.spec.containers[*].resources.limits.example\.org/gpu}"#;
    assert_eq!(namespace.kubectl(&["get", "pod", "demo", limits]), "1");
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(pods, "demo").await;
}

/// A value that only a QEMU template uses changes no object of the running guest but the file that its next start reads.
async fn another_command_line_is_said(namespace: &TestNamespace, vms: &Api<VirtualMachine>) {
    let patch = r#"{"spec":{"templateValues":{"system":{"manufacturer":"Orchard"}}}}"#;
    namespace.kubectl(&["patch", "vm", "demo", "--type=merge", "--patch", patch]);
    let generation = vms.get("demo").await.unwrap().metadata.generation;
    let status = eventually("the runner to have read the values", LIMIT, async || {
        let status = vms.get("demo").await.unwrap().status?;
        // From the beginning nothing says that the guest has them.
        assert_ne!(status.guest_generation, generation);
        (!status.pending_changes.is_empty()).then_some(status)
    })
    .await;
    let paths: Vec<_> = status.pending_changes.iter().map(|change| change.path.as_str()).collect();
    assert_eq!(paths, ["config.yaml/qemuTemplates"]);
    assert_eq!(status.pending_changes[0].subject, Some(Subject::QemuTemplate));
}

/// `kubectl vm create`, from an image to a guest that is up, and what changes and describes it.
#[tokio::test]
async fn one_command_makes_a_guest_of_an_image() {
    let _shared = NODE.read().await;
    let Stage { cluster: _, namespace, vms, pods } = Stage::set("create").await;
    let address = serve_images(&namespace, &pods).await;
    install_set(&namespace, "import-disk", &["import-disk"]);
    let url = format!("http://{address}:8000/guest.img");
    commands::a_vm_is_created_from_an_image(&namespace, "web", &[&url, "--raw"]).await;
    assert!(conditions::is_true(&vms.get("web").await.unwrap().status.unwrap().conditions, conditions::BOOTED));
    let console = namespace.log("web");
    assert!(console.contains("guest: user-data Hello from the command line"), "{console}");
    let page = commands::printed(&namespace, &["guest", "web"]).await;
    assert!(page.starts_with("Guest        Tiny guest") && page.contains("\nHost name    web\n"), "{page}");

    let ram = commands::printed(&namespace, &["set", "ram", "web", "400Mi", "--wait"]).await;
    assert!(ram.starts_with("vm/web: 400Mi of memory (before: 512Mi); the running guest has it ("), "{ram}");
    let added = commands::printed(&namespace, &["add", "disk", "web", "16Mi", "--wait"]).await;
    assert!(added.contains("(claim web-data-disk); waits for a restart: objects/Pod/"), "{added}");
    commands::printed(&namespace, &["restart", "web", "--wait"]).await;
    let vm = vms.get("web").await.unwrap();
    assert!(vm.status.unwrap().pending_changes.is_empty(), "the restart has brought the disk");
    let events = commands::printed(&namespace, &["events", "web"]).await;
    assert!(events.contains("Pod/web ") && events.contains("VirtualMachine/web "), "{events}");
    println!("{ram}{added}{events}");
    let log = commands::dumped(&namespace, "web", "logs/web-vm-runner.log").await;
    assert!(log.contains("QEMU started"), "{log}");
    let manager = commands::dumped(&namespace, "web", "status.txt").await;
    assert!(manager.contains("web-data-disk"), "{manager}");
    namespace.kubectl(&["delete", "vm", "web"]);

    // The other sources: a container image whose one file is the disk, the claim of that VM, and a file that is uploaded.
    commands::a_vm_is_created_from_an_image(&namespace, "boxed", &["oci:localhost/vm-demo-guest:0.1.0"]).await;
    commands::printed(&namespace, &["stop", "boxed", "--wait"]).await;
    commands::a_vm_is_created_from_an_image(&namespace, "clone", &["claim:boxed-system-disk"]).await;
    let vm = vms.get("clone").await.unwrap();
    assert!(conditions::is_true(&vm.status.unwrap().conditions, conditions::STORAGE_READY), "its claim is as wanted");
    let console = namespace.log("clone");
    assert!(console.contains("guest: starts=2"), "the disk has what the guest of boxed wrote: {console}");
    namespace.kubectl(&["delete", "vm", "boxed", "clone"]);
    let file = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".dev/guest/guest.img");
    commands::a_vm_is_created_from_an_image(&namespace, "sent", &[file.to_str().unwrap()]).await;
    namespace.kubectl(&["delete", "vm", "sent"]);
}
