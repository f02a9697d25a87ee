//! The device plugin with a real kubelet: it runs as a process beside the node, in the kubelet's folders.

use std::{
    fs,
    process::{Child, Stdio},
};

use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};

use super::*;
use support::cluster::TOOLS_IMAGE;
use vm_operator::api::Quantity;

/// The kubelet knows one plugin.
pub static PLUGIN: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// The plugin, which is killed at the end of the test.
pub struct Plugin {
    process: Child,
    folder: tempfile::TempDir,
}

impl Plugin {
    /// Starts it. It also installs the profile of pod networks.
    pub fn start(cluster: &Cluster) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubelet = cluster.dir().unwrap().join("kubelet");
        // The path of a socket must be short.
        std::os::unix::fs::symlink(kubelet.join("device-plugins"), folder.path().join("plugins")).unwrap();
        fs::create_dir(folder.path().join("reports")).unwrap();
        let process = Command::new(env!("CARGO_BIN_EXE_vm-operator"))
            .args(["node-devices", "--listen=off", "--plugins"])
            .arg(folder.path().join("plugins"))
            .arg("--reports")
            .arg(folder.path().join("reports"))
            .arg("--seccomp")
            .arg(kubelet.join("seccomp"))
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Self { process, folder }
    }

    /// The trial of KVM has this result.
    fn report(&self, text: &str) {
        let file = self.folder.path().join("reports/kvm.json");
        fs::write(file.with_extension("new"), text).unwrap();
        fs::rename(file.with_extension("new"), file).unwrap();
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The numbers of kvm, machine and kvm-trial that the node has for Pods.
async fn allocatable(nodes: &Api<Node>) -> [Option<u64>; 3] {
    let node = nodes.list(&ListParams::default()).await.unwrap().items.remove(0);
    let allocatable = node.status.unwrap().allocatable.unwrap();
    // The API server writes 1000 as `1k`.
    ["kvm", "machine", "kvm-trial"].map(|name| {
        let number = allocatable.get(&format!("vmoperator.jdrupes.org/{name}"))?;
        Some(Quantity::parse(&number.0).unwrap().bytes())
    })
}

async fn wait_for_numbers(nodes: &Api<Node>, expected: [u64; 3]) {
    let what = format!("the node to have {expected:?}");
    eventually(&what, LIMIT, async || (allocatable(nodes).await == expected.map(Some)).then_some(())).await;
    println!("kvm, machine, kvm-trial: {expected:?}");
}

/// Runs a shell command in a Pod that Pod security admits as `baseline`, and returns what it prints.
async fn output(namespace: &TestNamespace, name: &str, limits: Value, context: Value, command: &str) -> String {
    let mut restricted = json!({ "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
        "readOnlyRootFilesystem": true });
    json_patch::merge(&mut restricted, &context);
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name }, "spec": {
        "restartPolicy": "Never", "automountServiceAccountToken": false, "containers": [{
            "name": "shell", "image": TOOLS_IMAGE, "command": ["/bin/busybox", "sh", "-c", command],
            "resources": { "limits": limits }, "securityContext": restricted,
        }],
    } });
    namespace.apply(&pod.to_string());
    namespace.kubectl(&["wait", "--for=jsonpath={.status.phase}=Succeeded", &format!("pod/{name}"), "--timeout=600s"]);
    namespace.kubectl(&["logs", name])
}

/// KVM does not work on every computer that runs the tests, so the test plays the trial; the devices are those of the computer.
#[tokio::test]
async fn a_pod_without_privilege_gets_devices_and_profiles_from_the_plugin() {
    let _one = PLUGIN.lock().await;
    let _shared = NODE.read().await;
    let cluster = Cluster::with_node();
    let namespace = cluster.namespace("devices").await;
    cluster.kubectl(&["label", "namespace", namespace.name(), "pod-security.kubernetes.io/enforce=baseline"]);
    let nodes = Api::all(cluster.client().await);
    let mut plugin = Plugin::start(cluster);
    let [kvm, tun] = ["/dev/kvm", "/dev/net/tun"].map(|file| std::path::Path::new(file).exists());
    let trials = u64::from(kvm);
    wait_for_numbers(&nodes, [0, 1000, trials]).await;

    let runtimes = json!({ "seccompProfile": { "type": "RuntimeDefault" } });
    let show = "for file in /dev/kvm /dev/net/tun; do test -c $file && : <> $file && echo $file; done; echo \"$VM_RUNNER_KVM_TRIAL\"";
    let expect = |kvm: bool, result: &str| {
        let files = [("/dev/kvm\n", kvm), ("/dev/net/tun\n", tun)];
        files.into_iter().filter(|(_, given)| *given).map(|(file, _)| file).collect::<String>() + result + "\n"
    };
    let one = |name: &str| json!({ format!("vmoperator.jdrupes.org/{name}"): "1" });
    plugin.report(r#"{"problem":"no VMX"}"#);
    let result = if kvm { r#"{"problem":"no VMX"}"# } else { r#"{"problem":"the node has no /dev/kvm"}"# };
    let failed = output(&namespace, "failed", one("machine"), runtimes.clone(), show).await;
    println!("with the resource machine after a failed trial:\n{failed}");
    assert_eq!(failed, expect(false, result));
    assert_eq!(output(&namespace, "without", json!({}), runtimes.clone(), show).await, "\n");

    if kvm {
        plugin.report(r#"{"problem":null}"#);
        wait_for_numbers(&nodes, [1000, 1000, 1]).await;
        let works = output(&namespace, "works", one("machine"), runtimes.clone(), show).await;
        println!("with the resource machine after a trial that succeeded:\n{works}");
        assert_eq!(works, expect(true, r#"{"problem":null}"#));
        let only = output(&namespace, "only-kvm", one("kvm"), runtimes, show).await;
        assert_eq!(only, "/dev/kvm\n{\"problem\":null}\n");
    }

    // What passt does, with our profile and with the runtime's. Only another user than root may map itself without capabilities.
    let isolate = "unshare -Urm mount -t tmpfs none /tmp 2>&1 && echo isolated || echo refused";
    let isolated = async |name: &str, profile: Value| {
        let context = json!({ "seccompProfile": profile, "runAsUser": 1000 });
        output(&namespace, name, json!({}), context, isolate).await
    };
    let refused = isolated("default", json!({ "type": "RuntimeDefault" })).await;
    assert!(refused.ends_with("refused\n"), "{refused}");
    let ours = isolated("passt", json!({ "type": "Localhost", "localhostProfile": "vm-operator/passt.json" })).await;
    assert_eq!(ours, "isolated\n", "with the runtime's profile: {refused}");

    // A plugin that ends takes its resources away; the next one brings them again.
    let _ = Command::new("kill").arg(plugin.process.id().to_string()).status();
    assert!(plugin.process.wait().unwrap().success());
    wait_for_numbers(&nodes, [0, 0, 0]).await;
    let _plugin = Plugin::start(cluster);
    wait_for_numbers(&nodes, [0, 1000, trials]).await;
}

/// All processes of a container of the VM `demo` have no capability, can get none, and have a seccomp profile; one has that name.
pub fn assert_confined(namespace: &TestNamespace, container: &str, program: &str) {
    // A process may end meanwhile.
    let script = "cat /proc/[0-9]*/status 2>/dev/null || true";
    let text = namespace.kubectl(&["exec", "demo", "--container", container, "--", "sh", "-c", script]);
    let mut names = Vec::new();
    for line in text.lines() {
        let Some((key, value)) = line.split_once(':').map(|(key, value)| (key, value.trim())) else { continue };
        let name = names.last().copied().unwrap_or_default();
        let expected = match key {
            "Name" => {
                names.push(value);
                continue;
            }
            // passt makes a user namespace of its own, in which all capabilities are possible and it has none.
            "CapBnd" if name.starts_with("passt") => continue,
            "CapEff" | "CapPrm" | "CapBnd" => "0000000000000000",
            "NoNewPrivs" => "1",
            "Seccomp" => "2",
            _ => continue,
        };
        assert_eq!(value, expected, "{container}, {name}: {key}\n{text}");
    }
    assert!(names.contains(&program), "{text}");
}

#[tokio::test]
async fn a_guest_boots_without_any_right_where_pod_security_is_enforced() {
    let _shared = NODE.read().await;
    let Stage { cluster, namespace, vms, pods } = Stage::set("confined").await;
    let enforce = |level: &str| {
        let label = format!("pod-security.kubernetes.io/enforce={level}");
        cluster.kubectl(&["label", "--overwrite", "namespace", namespace.name(), &label]);
    };
    enforce("baseline");
    let mut manifest = demo(&namespace);
    manifest["spec"]["vm"]["accelerator"] = "tcg".into();
    namespace.apply(&manifest.to_string());
    wait_for(&vms, "demo", conditions::BOOTED, true).await;
    for (container, program) in [("vm-runner", "qemu-system-x86"), ("agent", "vm-runner")] {
        assert_confined(&namespace, container, program);
        let run =
            |script: &str| namespace.kubectl(&["exec", "demo", "--container", container, "--", "sh", "-c", script]);
        assert_eq!(run("ls /dev/kvm /dev/net/tun 2>/dev/null || true"), "", "{container}");
        assert_eq!(run("touch /x 2>/dev/null || echo refused"), "refused\n", "{container}");
    }
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;

    // Not even as root. Its disk is empty, so there is no guest that could boot or power down; but all programs run, and the agent reports.
    enforce("restricted");
    manifest["spec"]["vm"]["powerdownTimeout"] = 1.into();
    manifest["spec"]["templateValues"] = json!({ "runAsUser": 1000 });
    let claim = json!({ "metadata": { "name": "own" }, "spec": {
        "volumeMode": "Filesystem", "resources": { "requests": { "storage": "64Mi" } },
    } });
    manifest["spec"]["vm"]["disks"] = json!([{ "volumeClaimTemplate": claim }]);
    namespace.apply(&manifest.to_string());
    wait_for(&vms, "demo", conditions::RUNNING, true).await;
    for (container, program) in [("vm-runner", "qemu-system-x86"), ("agent", "vm-runner")] {
        assert_confined(&namespace, container, program);
        let user = namespace.kubectl(&["exec", "demo", "--container", container, "--", "id", "-u"]);
        assert_eq!(user, "1000\n", "{container}");
    }
    namespace.kubectl(&["delete", "vm", "demo"]);
    gone(&pods, "demo").await;
}
