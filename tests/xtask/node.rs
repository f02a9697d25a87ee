//! The node: containerd, kubelet and kube-proxy in namespaces of their own.
//!
//! The kernel takes away all that lives in a namespace when its last process goes: the processes themselves, the
//! mounts of containers and volumes, the bridge, the rules of kube-proxy. So there is nearly nothing to clean up,
//! whichever way the cluster ends, and the machine's own network and mounts never change.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{Node, ServiceAccount};
use k8s_openapi::api::storage::v1::{CSIDriver, StorageClass};
use kube::api::{Api, PostParams};
use serde_json::json;

use crate::components::{Components, NodePlan, Plan};
use crate::pki::{NODE, SERVICE_RANGE};
use crate::tools::{make_dir, run, write};

/// Where the directory of the cluster is inside the namespaces: short, because a socket's path may have but 107
/// characters.
pub const INSIDE: &str = "/run/cluster";

/// Makes a place in the new mount namespace where components write to the usual directories without the machine
/// seeing it.
pub fn mount_all(dir: &Path) -> Result<()> {
    let stage = dir.join("run");
    make_dir(&stage)?;
    let mount = |args: &[&str]| run(Command::new("mount").arg("--no-mtab").args(args)).map(drop);
    let path = |path: &Path| path.to_string_lossy().into_owned();
    mount(&["-t", "tmpfs", "-o", "mode=755", "tmpfs", &path(&stage)])?;
    make_dir(&stage.join("cluster"))?;
    mount(&["--bind", &path(dir), &path(&stage.join("cluster"))])?;
    mount(&["--move", &path(&stage), "/run"])?;
    // The kubelet and the CNI plugins insist on these.
    for place in ["/var/log", "/var/lib/cni", "/var/lib/kubelet"] {
        make_dir(Path::new(place))?;
        mount(&["-t", "tmpfs", "tmpfs", place])?;
    }
    for place in ["kubelet", "logs/pods", "containerd", "volumes"] {
        make_dir(&dir.join(place))?;
    }
    mount(&["--bind", &format!("{INSIDE}/kubelet"), "/var/lib/kubelet"])?;
    // Pods may ask for mounts that follow the node's.
    mount(&["--make-rshared", "/"])
}

/// Starts the node and waits until Pods can run on it.
pub async fn start(components: &mut Components, plan: &Plan, node: &NodePlan) -> Result<()> {
    run(Command::new("ip").args(["link", "set", "lo", "up"]))?;
    run(Command::new("ip").args(["route", "add", SERVICE_RANGE, "dev", &node.link]))?;
    write(Path::new("/proc/sys/net/ipv4/ip_forward"), "1")?;
    make_cgroups(&node.cgroup)?;
    write_configuration(&plan.dir, &plan.address.to_string(), node)?;

    components.start_api_server()?;
    components.start_program("containerd", &[format!("--config={INSIDE}/containerd.toml")])?;
    let image = node.pause_image.clone();
    components.wait("containerd", "its socket to take the pause image", async || ctr_import(&image).ok()).await?;
    let client = components.finish_control_plane().await?;
    let pki = format!("{INSIDE}/pki");
    components.start_kubernetes(
        "kube-scheduler",
        &[
            format!("--kubeconfig={pki}/scheduler.kubeconfig"),
            "--leader-elect=false".to_owned(),
            "--secure-port=0".to_owned(),
        ],
    )?;
    components.start_kubernetes(
        "kubelet",
        &[
            format!("--kubeconfig={pki}/kubelet.kubeconfig"),
            format!("--config={INSIDE}/kubelet.yaml"),
            format!("--hostname-override={NODE}"),
            format!("--node-ip={}", plan.address),
            format!("--cert-dir={pki}"),
        ],
    )?;
    components.start_kubernetes(
        "kube-proxy",
        &[
            format!("--kubeconfig={pki}/proxy.kubeconfig"),
            format!("--hostname-override={NODE}"),
            "--proxy-mode=iptables".to_owned(),
            format!("--cluster-cidr={}", node.pods),
            // Nobody asks for these, and who may would not be checked. A file can't switch them off: there, no address means the default.
            "--healthz-bind-address=".to_owned(),
            "--metrics-bind-address=".to_owned(),
            // The answer of one Pod to another must come back through the node, or its address does not fit the question.
            "--masquerade-all".to_owned(),
            // The limits of connection tracking are the machine's.
            "--conntrack-max-per-core=0".to_owned(),
            "--conntrack-min=0".to_owned(),
            "--conntrack-tcp-timeout-established=0s".to_owned(),
            "--conntrack-tcp-timeout-close-wait=0s".to_owned(),
        ],
    )?;
    components.start_kubernetes(
        "local-provisioner",
        &[
            format!("--kubeconfig={pki}/provisioner.kubeconfig"),
            format!("--dir={INSIDE}/volumes"),
            format!("--node={NODE}"),
        ],
    )?;
    let classes = Api::<StorageClass>::all(client.clone());
    for class in storage_classes()? {
        classes.create(&PostParams::default(), &class).await.context("creating a StorageClass")?;
    }
    // By this, programs know that the provisioner clones claims.
    let driver = json!({ "metadata": { "name": PROVISIONER }, "spec": { "attachRequired": false } });
    let driver: CSIDriver = serde_json::from_value(driver).context("a CSIDriver of our own")?;
    Api::<CSIDriver>::all(client.clone())
        .create(&PostParams::default(), &driver)
        .await
        .context("creating a CSIDriver")?;
    let nodes = Api::<Node>::all(client.clone());
    components.wait("kubelet", "the node to be Ready", async || is_ready(&nodes.get(NODE).await.ok()?)).await?;
    let accounts = Api::<ServiceAccount>::namespaced(client, "default");
    components
        .wait("kube-controller-manager", "the first service account", async || accounts.get("default").await.ok())
        .await?;
    Ok(())
}

fn is_ready(node: &Node) -> Option<()> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ready = conditions.iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let tainted = node.spec.as_ref()?.taints.as_ref().is_some_and(|taints| !taints.is_empty());
    (ready && !tainted).then_some(())
}

fn ctr_import(image: &Path) -> Result<()> {
    run(ctr().args(["-n", "k8s.io", "images", "import"]).arg(image)).map(drop)
}

fn ctr() -> Command {
    let mut ctr = Command::new("ctr");
    ctr.args(["-a", &format!("{INSIDE}/containerd.sock")]);
    ctr
}

/// Waits until containerd answers: without it the kubelet ends.
pub async fn wait_for_containerd(components: &mut Components) -> Result<()> {
    components.wait("containerd", "its socket", async || run(ctr().arg("version")).ok()).await.map(drop)
}

/// All hierarchies of control groups that this machine has; with version 2 there is one.
pub fn cgroup_hierarchies() -> Vec<std::path::PathBuf> {
    let top = Path::new("/sys/fs/cgroup");
    if top.join("cgroup.controllers").exists() {
        return vec![top.to_owned()];
    }
    let Ok(entries) = fs::read_dir(top) else { return vec![] };
    entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir() && !path.is_symlink()).collect()
}

fn make_cgroups(name: &str) -> Result<()> {
    for hierarchy in cgroup_hierarchies() {
        make_dir(&hierarchy.join(name))?;
        if hierarchy.join("cgroup.controllers").exists() {
            let controllers = fs::read_to_string(hierarchy.join("cgroup.controllers")).unwrap_or_default();
            let all: Vec<String> = controllers.split_whitespace().map(|name| format!("+{name}")).collect();
            // Which ones can be passed on depends on the machine, and the kubelet says what it misses.
            let _ = fs::write(hierarchy.join("cgroup.subtree_control"), all.join(" "));
            let _ = fs::write(hierarchy.join(name).join("cgroup.subtree_control"), all.join(" "));
        }
    }
    Ok(())
}

fn write_configuration(dir: &Path, address: &str, node: &NodePlan) -> Result<()> {
    let NodePlan { pods, cgroup, snapshotter, .. } = node;
    write(
        &dir.join("containerd.toml"),
        format!(
            r#"version = 2
root = "{INSIDE}/containerd"
state = "/run/containerd"
[grpc]
  address = "{INSIDE}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{image}"
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "{snapshotter}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{INSIDE}/cni"
"#,
            image = crate::tools_image::NAME,
        ),
    )?;
    make_dir(&dir.join("cni"))?;
    let network = json!({
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods",
                "isGateway": true,
                "hairpinMode": true,
                "ipam": {
                    "type": "host-local",
                    "dataDir": "/run/cni",
                    "ranges": [[{"subnet": pods}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    });
    write(&dir.join("cni/10-pods.conflist"), network.to_string())?;
    let kubelet = json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": address,
        "port": 10250,
        "readOnlyPort": 0,
        "healthzPort": 0,
        "tlsCertFile": format!("{INSIDE}/pki/kubelet.crt"),
        "tlsPrivateKeyFile": format!("{INSIDE}/pki/kubelet.key"),
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": false},
            "x509": {"clientCAFile": format!("{INSIDE}/pki/ca.crt")},
        },
        // Whoever holds a certificate of this cluster is the API server.
        "authorization": {"mode": "AlwaysAllow"},
        "containerRuntimeEndpoint": format!("unix://{INSIDE}/containerd.sock"),
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": true,
        "cgroupRoot": format!("/{cgroup}"),
        "enforceNodeAllocatable": [],
        // Machines with the old control groups are still about, and QEMU does not mind.
        "failCgroupV1": false,
        "failSwapOn": false,
        "podLogsDir": format!("{INSIDE}/logs/pods"),
        // There is no DNS. A query gets its refusal at once, and no Pod an event about it.
        "clusterDNS": ["127.0.0.1"],
        "resolvConf": "",
        // A developer's disk is nearly full more often than not, and what fills it is not the Pods. 0% asks for no threshold.
        "evictionHard": {
            "nodefs.available": "0%",
            "nodefs.inodesFree": "0%",
            "imagefs.available": "0%",
            "imagefs.inodesFree": "0%",
            "memory.available": "100Mi",
        },
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": false,
        // A changed ConfigMap is to reach its Pod in seconds.
        "syncFrequency": "5s",
        "maxPods": 250,
    });
    write(&dir.join("kubelet.yaml"), kubelet.to_string())
}

/// The provisioner of `tests/controlplane`.
const PROVISIONER: &str = "local.vm-operator.test";

/// `standard` binds a claim at once; `local-path` when its first Pod comes, like the provisioner of that name.
fn storage_classes() -> Result<Vec<StorageClass>> {
    [("standard", "Immediate", "true"), ("local-path", "WaitForFirstConsumer", "false")]
        .into_iter()
        .map(|(name, mode, default)| {
            serde_json::from_value(json!({
                "metadata": {
                    "name": name,
                    "annotations": {"storageclass.kubernetes.io/is-default-class": default},
                },
                "provisioner": PROVISIONER,
                "reclaimPolicy": "Delete",
                "volumeBindingMode": mode,
            }))
            .context("a StorageClass of our own")
        })
        .collect()
}
