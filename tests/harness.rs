//! The test clusters themselves: that they start, do what tests need of them, and leave nothing behind.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "this is test code")]

mod support;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod};
use kube::api::{Api, LogParams, Patch, PatchParams};
use rustix::fs::{major, minor};
use serde_json::{Value, json};

use support::cluster::{Cluster, TOOLS_IMAGE, eventually, start};

const LIMIT: Duration = Duration::from_secs(180);

#[tokio::test]
async fn the_control_plane_serves_and_counts() {
    let cluster = Cluster::control_plane();
    let namespace = cluster.namespace("counts").await;
    let maps = Api::<ConfigMap>::namespaced(cluster.client().await, namespace.name());
    let of_maps = |request: &support::requests::Request| request.resource == "configmaps" && request.verb == "APPLY";
    let before = cluster.requests().await;

    let map = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"key": "value"}});
    let applied = maps.patch("a", &PatchParams::apply("harness"), &Patch::Apply(&map)).await.unwrap();

    assert_eq!(applied.data.unwrap()["key"], "value");
    let requests = cluster.requests().await.since(&before);
    assert_eq!(requests.only(of_maps).writes().total(), 1, "{requests}");
    assert!(namespace.kubectl(&["get", "configmap", "a", "--output=jsonpath={.data.key}"]).ends_with("value"));
}

/// Pods reach the API server by the address of its Service, and verify that address.
#[tokio::test]
async fn the_certificate_is_good_for_the_service_address() {
    let cluster = Cluster::control_plane();
    let service = Api::<k8s_openapi::api::core::v1::Service>::namespaced(cluster.client().await, "default");
    let address =
        eventually("the kubernetes Service", LIMIT, async || service.get_opt("kubernetes").await.unwrap()).await;
    let mut config = cluster.config().await;
    config.tls_server_name = address.spec.unwrap().cluster_ip;
    let version = kube::Client::try_from(config).unwrap().apiserver_version().await.unwrap();
    assert!(!version.git_version.is_empty());
}

/// A Pod with both kinds of volumes; it writes to both and serves what it has read back.
fn volumes(namespace: &str) -> [Value; 3] {
    let claim = |name: &str, mode: &str, class: &str| {
        json!({
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": mode,
                "storageClassName": class,
                "resources": {"requests": {"storage": "8Mi"}},
            },
        })
    };
    let script = "echo from-block | dd of=/dev/volume conv=notrunc 2>/dev/null; echo from-files > /files/a; \
                  head -c 10 /dev/volume; echo; cat /files/a; exec sleep 3600";
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "user", "namespace": namespace},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "containers": [{
                "name": "shell",
                "image": TOOLS_IMAGE,
                "command": ["sh", "-c", script],
                "volumeDevices": [{"name": "block", "devicePath": "/dev/volume"}],
                "volumeMounts": [{"name": "files", "mountPath": "/files"}],
            }],
            "volumes": [
                {"name": "block", "persistentVolumeClaim": {"claimName": "block"}},
                {"name": "files", "persistentVolumeClaim": {"claimName": "files"}},
            ],
        },
    });
    [claim("block", "Block", "standard"), claim("files", "Filesystem", "local-path"), pod]
}

fn list(objects: &[Value]) -> String {
    json!({"apiVersion": "v1", "kind": "List", "items": objects}).to_string()
}

async fn log_of(pods: &Api<Pod>, last: &str) -> String {
    eventually(&format!("`{last}` in the Pod's log"), LIMIT, async || {
        let log = pods.logs("user", &LogParams::default()).await.ok()?;
        log.contains(last).then_some(log)
    })
    .await
}

#[tokio::test]
async fn the_node_runs_pods_with_volumes() {
    let cluster = Cluster::with_node();
    let namespace = cluster.namespace("volumes").await;
    let client = cluster.client().await;
    namespace.apply(&list(&volumes(namespace.name())));

    let pods = Api::<Pod>::namespaced(client.clone(), namespace.name());
    assert_eq!(log_of(&pods, "from-files").await, "from-block\nfrom-files\n");
    let said = namespace.kubectl(&[
        "exec",
        "user",
        "--",
        "sh",
        "-c",
        "nc -w 5 $KUBERNETES_SERVICE_HOST 443 </dev/null && echo reached",
    ]);
    assert_eq!(said.trim(), "reached", "the API server's Service");

    // Deleted claims take their data with them.
    namespace.kubectl(&["delete", "pod/user", "pvc/block", "pvc/files", "--wait"]);
    let claims = Api::<PersistentVolumeClaim>::namespaced(client, namespace.name());
    eventually("the claims to go", LIMIT, async || {
        claims.list(&Default::default()).await.unwrap().items.is_empty().then_some(())
    })
    .await;
}

/// No process, mount, loop device, interface or control group stays when the supervisor is killed.
#[tokio::test]
async fn a_killed_supervisor_leaves_nothing() {
    if std::env::var_os("KUBECONFIG").is_some_and(|path| !path.is_empty()) {
        return; // we are to use that cluster, not to start others
    }
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let dir = place.path().join("cluster");
    let (mut supervisor, _orders) = start(&dir, &[]).unwrap();
    let kubectl = |args: &[&str]| {
        let output = Command::new(support::cluster::XTASK)
            .args(["kubectl", "--"])
            .args(args)
            .env("KUBECONFIG", dir.join("kubeconfig"))
            .output()
            .unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let manifest = place.path().join("objects.yaml");
    std::fs::write(&manifest, list(&volumes("default"))).unwrap();
    kubectl(&["apply", "--filename", &manifest.to_string_lossy()]);
    eventually("the Pod to write", LIMIT, async || kubectl(&["logs", "user"]).contains("from-files").then_some(()))
        .await;

    let state: Value = serde_json::from_str(&std::fs::read_to_string(dir.join("state.json")).unwrap()).unwrap();
    let network = format!("/proc/{}/ns/net", state["init"]["pid"]);
    let network = std::fs::read_link(network).unwrap();
    let cgroup = state["cgroup"].as_str().unwrap();
    let loops = loops_of(&dir);
    assert_eq!(loops.len(), 2, "the block volume's, and the kubelet's on top of it");
    assert!(traces(&dir, &network, cgroup, &loops).len() > 7, "the test sees what is there");

    supervisor.kill().unwrap();
    supervisor.wait().unwrap();
    let mut left = vec![];
    let start = std::time::Instant::now();
    while start.elapsed() < Duration::from_secs(20) {
        left = traces(&dir, &network, cgroup, &loops);
        if left.is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(left.is_empty(), "left behind: {left:#?}");
    assert!(dir.join("logs/kubelet.log").exists(), "the logs are kept");
}

/// All that a cluster has outside its directory.
fn traces(dir: &Path, network: &Path, cgroup: &str, loops: &[Loop]) -> Vec<String> {
    let mut found = vec![];
    for process in std::fs::read_dir("/proc").unwrap().flatten() {
        if std::fs::read_link(process.path().join("ns/net")).is_ok_and(|namespace| namespace == network) {
            found.push(format!("process {}", process.path().display()));
        }
        let arguments = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        if String::from_utf8_lossy(&arguments).contains(&*dir.to_string_lossy()) {
            found.push(format!("process {} {}", process.path().display(), String::from_utf8_lossy(&arguments)));
        }
    }
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    found.extend(
        mounts.lines().filter(|line| line.contains(&*dir.to_string_lossy())).map(|line| format!("mount {line}")),
    );
    found.extend(loops.iter().filter(|device| is_attached(device)).map(|(device, _)| format!("loop device {device}")));
    if Path::new("/sys/class/net").join(cgroup).exists() {
        found.push(format!("interface {cgroup}"));
    }
    for hierarchy in std::fs::read_dir("/sys/fs/cgroup").unwrap().flatten() {
        if hierarchy.path().join(cgroup).exists() || hierarchy.file_name() == *cgroup {
            found.push(format!("control group {}", hierarchy.path().join(cgroup).display()));
        }
    }
    found
}

/// A loop device, such as loop0, and the number that the kernel gave to what is attached to it: the next file on the
/// same device has another one.
type Loop = (String, String);

/// The loop devices of a cluster's volumes, and those that the kubelet has put on top of them. They are known by the
/// inodes of their files: the paths are those of other mount namespaces, and `/` for all of the kubelet's, whichever
/// cluster it belongs to.
fn loops_of(dir: &Path) -> Vec<Loop> {
    let volumes = std::fs::read_dir(dir.join("volumes")).unwrap().flatten();
    let mut files: Vec<PathBuf> = volumes.map(|volume| volume.path().join("disk")).collect();
    let mut found = vec![];
    while let Some(file) = files.pop() {
        let Ok(meta) = std::fs::metadata(&file) else { continue };
        let mut list = Command::new("losetup");
        let list = list
            .args(["--noheadings", "--raw", "--list"])
            .args(["--output", "NAME,BACK-INO,BACK-MAJ:MIN"])
            .output()
            .unwrap()
            .stdout;
        for line in String::from_utf8_lossy(&list).replace("\\x20", " ").lines() {
            let (device, inode) = line.split_once(' ').unwrap();
            let file = format!("{} {}:{}", meta.ino(), major(meta.dev()), minor(meta.dev()));
            if inode.split_whitespace().collect::<Vec<_>>().join(" ") == file {
                let name = device.trim_start_matches("/dev/").to_owned();
                let number = std::fs::read_to_string(format!("/sys/block/{name}/diskseq")).unwrap();
                found.push((name, number));
                files.push(device.into());
            }
        }
    }
    found
}

fn is_attached((name, number): &Loop) -> bool {
    let device = Path::new("/sys/block").join(name);
    device.join("loop/backing_file").exists()
        && std::fs::read_to_string(device.join("diskseq")).is_ok_and(|now| now == *number)
}
