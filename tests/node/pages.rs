//! Every command of `kubectl vm` on a node with guests, as the documentation shows it: a session of one person, from the first VM to the last.
//!
//! `VM_OPERATOR_TEST_UPDATE=1 cargo test --features dev --test node pages::` writes what is printed into the pages, where it differs.

use serde::Deserialize;
use serde_json::{Value, json};
use vm_operator::object::SET_LABEL;

use super::{
    page::{Desk, PLACE},
    *,
};

/// What makes a VM of the tiny guest. It boots with one CPU: under QEMU's own emulation one with two sometimes stands still while it boots.
const IMAGE: &str = "--image oci:localhost/vm-demo-guest:0.1.0 --cpus 1 --ram 1Gi --disk 256Mi";

/// A VM that boots nothing: its firmware waits.
fn blank(name: &str, set: Option<&str>, state: &str) -> Value {
    let claim = json!({ "resources": { "requests": { "storage": "16Mi" } } });
    let disk = json!({ "volumeClaimTemplate": { "metadata": { "name": "system" }, "spec": claim } });
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": name, "labels": { "tier": "web" } },
        "spec": {
            "templates": set.map(|set| json!({ "set": set })),
            "vm": {
                "state": state, "maximumCpus": 1, "maximumRam": "128Mi", "powerdownTimeout": 1, "networks": [{ "user": {} }],
                "disks": [disk],
            },
        },
    })
}

/// A template set as a ConfigMap.
fn set(name: &str, files: &Value) -> Value {
    let label = json!({ SET_LABEL: name });
    json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": format!("templates-{name}"), "labels": label }, "data": files })
}

fn list(objects: &[Value]) -> String {
    json!({ "apiVersion": "v1", "kind": "List", "items": objects }).to_string()
}

/// The claim for CDs.
fn repository() -> Value {
    json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "vmop-image-repository" },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "16Mi" } } },
    })
}

/// Waits until the VM's condition Ready has this reason.
async fn ready(stage: &Stage, name: &str, wanted: &str) {
    eventually(&format!("{name}: {wanted}"), LIMIT, async || {
        (reason(&stage.vms.get(name).await.unwrap(), conditions::READY) == wanted).then_some(())
    })
    .await;
}

/// A claim with CDs, and a class of volumes that grow.
fn prepare(stage: &Stage) {
    let namespace = &stage.namespace;
    let class = stage.cluster.kubectl(&["get", "storageclass", "standard", "--output=json"]);
    let mut class: Value = serde_json::from_str(&class).unwrap();
    class["metadata"] = json!({ "name": "grows" });
    class["allowVolumeExpansion"] = true.into();
    let write = "for name in tools drivers; do dd if=/dev/zero of=/cds/$name.iso bs=1M count=1; done";
    let writer = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "writer" },
        "spec": {
            "restartPolicy": "Never",
            "containers": [{
                "name": "writer", "image": support::cluster::TOOLS_IMAGE, "imagePullPolicy": "IfNotPresent",
                "command": ["/bin/busybox", "sh", "-c", write],
                "volumeMounts": [{ "name": "cds", "mountPath": "/cds" }],
            }],
            "volumes": [{ "name": "cds", "persistentVolumeClaim": { "claimName": "vmop-image-repository" } }],
        },
    });
    namespace.apply(&list(&[class, repository(), writer]));
    namespace.kubectl(&["wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/writer", "--timeout=600s"]);
    namespace.kubectl(&["delete", "pod", "writer"]);
    recipes::install_set(namespace, "import-disk", &["import-disk"]);
}

#[tokio::test]
async fn every_command_is_as_on_the_pages() {
    // Networks of type pod need a profile that the device plugin installs.
    let _one = devices::PLUGIN.lock().await;
    let _alone = NODE.write().await;
    let _plugin = devices::Plugin::start(Cluster::with_node());
    let namespace = Cluster::with_node().namespace_called(PLACE).await;
    // The node has two CPUs.
    let config = "/Manager:\n  /Controller:\n    /Reconciler: {cpuOvercommit: 10, ramOvercommit: 4, runnerImages: [localhost/vm-runer], templateValues: {import: {images: [localhost/vm-demo-guest]}}}\n";
    namespace.kubectl(&["create", "configmap", "vm-operator", &format!("--from-literal=config.yaml={config}")]);
    let stage = Stage::on(namespace).await;
    prepare(&stage);
    let desk = Desk::new(stage.cluster.kubeconfig());
    desk.write("desk/101.conf", include_str!("101.conf"));
    desk.types("import").await;
    desk.types("create").await;

    desk.types("new").await;
    desk.does(&format!("kubectl vm create apple {IMAGE} --cd tools.iso --stopped"));
    // It may have more CPUs.
    desk.does(
        "kubectl patch vm apple --type merge --patch '{\"spec\":{\"vm\":{\"maximumCpus\":3,\"currentCpus\":1}}}'",
    );
    desk.does("kubectl label vm apple tier=web");
    desk.does("kubectl vm start apple");
    desk.does(&format!("kubectl vm create pear {IMAGE} --network user"));
    desk.does("kubectl vm stop pear --wait");
    desk.does("kubectl vm wait apple --for booted");
    commands_that_change(&stage, &desk).await;
    commands_that_look(&stage, &desk).await;
    ways_to_the_guest(&stage, &desk).await;
    git_and_pools(&stage, &desk).await;
    plans_and_rollouts(&stage, &desk).await;
    migration(&stage, &desk).await;
    desk.has_typed_all();
}

async fn commands_that_change(stage: &Stage, desk: &Desk) {
    desk.types("list").await;
    desk.types("start").await;
    desk.does("kubectl vm wait apple pear --for booted");
    desk.types("restart").await;
    desk.does("kubectl vm wait apple --for booted");
    desk.types("pause").await;
    eventually("the guest to be up after its reboot", LIMIT, async || {
        let log = stage.namespace.log("apple");
        log.rsplit_once("guest: asked to reboot").is_some_and(|(_, after)| after.contains("guest: up")).then_some(())
    })
    .await;
    desk.types("set").await;
    desk.does("kubectl vm set cpus apple 1 --wait");
    desk.does("kubectl vm restart apple --wait");
    desk.does("kubectl vm wait apple --for booted");
}

async fn commands_that_look(stage: &Stage, desk: &Desk) {
    let namespace = &stage.namespace;
    desk.does("kubectl wait vm/apple --for jsonpath={.status.ram}=768Mi --timeout 600s");
    desk.types("status").await;
    desk.types("events").await;
    desk.types("dump").await;
    let resource = "--resource=vms.vmoperator.jdrupes.org";
    namespace.kubectl(&["create", "role", "reader", "--verb=get", resource]);
    namespace.kubectl(&["create", "rolebinding", "reader", "--role=reader", "--user=alice"]);
    eventually("alice to read", LIMIT, async || {
        desk.run("kubectl vm explain apple --as alice").starts_with("apple runs").then_some(())
    })
    .await;
    desk.types("explain-alice").await;
    desk.types("alice").await;

    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": { "name": "few" },
        "spec": { "hard": { "pods": "3" } },
    });
    namespace.apply(&quota.to_string());
    let used = "--output=jsonpath={.status.used}";
    eventually("the quota to be counted", LIMIT, async || {
        (!namespace.kubectl(&["get", "quota", "few", used]).is_empty()).then_some(())
    })
    .await;
    namespace.apply(&blank("lime", None, "Running").to_string());
    ready(stage, "lime", "ApplyFailed").await;
    // A claim without a volume would be said, too.
    wait_for(&stage.vms, "lime", conditions::STORAGE_READY, true).await;
    desk.types("explain").await;
    namespace.kubectl(&["delete", "quota", "few"]);
    namespace.kubectl(&["delete", "vm", "lime"]);
}

async fn ways_to_the_guest(stage: &Stage, desk: &Desk) {
    desk.types("logs").await;
    desk.types("screenshot").await;
    desk.looks_at("console", async |screen| screen.shows("guest: address").await, "\x1d").await;
    desk.types("view").await;
    desk.types("password").await;
    desk.types("guest").await;
    desk.types("port-forward").await;
    desk.types("stdio").await;
    desk.write("desk/notes.txt", "to do: nothing\n");
    desk.types("ssh").await;
    desk.types("ssh-config").await;
    desk.does(&format!("kubectl vm create fig {IMAGE} --stopped"));
    desk.types_with("expose", async |number| {
        if number == 2 {
            desk.does("kubectl wait pod/fig --for condition=Ready --timeout 600s");
            eventually("the Service to lead to the Pod", LIMIT, async || {
                let slices = ["get", "endpointslices", "--selector=kubernetes.io/service-name=vmiservice"];
                let ready = "--output=jsonpath={.items[*].endpoints[*].conditions.ready}";
                (stage.namespace.kubectl(&[&slices[..], &[ready]].concat()).trim() == "true").then_some(())
            })
            .await;
        }
    })
    .await;
    desk.does("kubectl vm wait fig --for booted");
    desk.does("kubectl vm stop fig pear --wait");
    let look = async |screen: &mut support::terminal::Screen| {
        screen.shows("by cpu").await;
        screen.press("A");
        screen.shows("by name").await;
        // Both that run have figures.
        eventually("the figures", LIMIT, async || {
            (screen.text().lines().filter(|line| line.contains('%')).count() == 2).then_some(())
        })
        .await;
    };
    desk.looks_at("top", look, "q").await;
    std::fs::copy(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(".dev/guest/guest.img"), desk.file("desk/disk.img"))
        .unwrap();
    desk.types("upload").await;
    desk.does("kubectl vm wait sent --for booted");
    desk.types("export").await;
}

async fn git_and_pools(stage: &Stage, desk: &Desk) {
    let git = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "spec": { "vm": { "state": "Running", "maximumCpus": 3, "maximumRam": "1Gi", "powerdownTimeout": 120 } },
    });
    desk.write("desk/apple.json", &git.to_string());
    desk.does("kubectl apply --server-side --force-conflicts --field-manager=kustomize-controller -f apple.json");
    desk.types("git").await;
    desk.types("for").await;
    desk.does("kubectl delete vm --all");
    desk.does("kubectl delete pvc -l app.kubernetes.io/name=vm-runner");

    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("example/pools");
    desk.does(&format!("kubectl apply -f {}", folder.display()));
    for name in ["desktop-1", "desktop-2", "desktop-3"] {
        ready(stage, name, "StoppedAsRequested").await;
    }
    desk.types_with("pool", async |number| {
        if number == 3 {
            desk.does("kubectl vm wait desktop-1 --for running");
        }
    })
    .await;
    // It has no guest that could power down.
    desk.does("kubectl vm stop desktop-1 --force --wait");
    desk.does("kubectl delete vm,vmpool --all");
    desk.does("kubectl delete pvc -l app.kubernetes.io/name=vm-runner");
}

/// A Pod that the scheduler of nobody serves, and a ConfigMap beside it.
const OTHER_SCHEDULER: &str = "{% extends 'builtin/pod.yaml.j2' %}\n{% block scheduling %}\n{{ super() }}\n  schedulerName: default-scheduler-2\n{% endblock %}\n";
const LABEL: &str = "{% extends 'builtin/pod.yaml.j2' %}\n{% block labels %}\n    rack: a\n{% endblock %}\n";
const NOTES: &str =
    "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-notes' }}}\ndata: {rack: one}\n";

async fn plans_and_rollouts(stage: &Stage, desk: &Desk) {
    let namespace = &stage.namespace;
    namespace.apply(&list(&["restart", "live", "broken"].map(|name| set(name, &json!({ "x.yaml.j2": NOTES })))));
    let vms = [
        ("apple", Some("restart"), "Running"),
        ("fig", Some("live"), "Running"),
        ("kiwi", None, "Running"),
        ("pear", Some("restart"), "Stopped"),
        ("plum", Some("broken"), "Running"),
    ];
    namespace.apply(&list(&vms.map(|(name, set, state)| blank(name, set, state))));
    for (name, _, state) in vms {
        let wanted = if state == "Running" { "Running" } else { "StoppedAsRequested" };
        ready(stage, name, wanted).await;
    }
    let next = [
        set("restart", &json!({ "x.yaml.j2": NOTES, "pod.yaml.j2": OTHER_SCHEDULER })),
        set("live", &json!({ "x.yaml.j2": NOTES.replace("one", "two"), "pod.yaml.j2": LABEL })),
        set("broken", &json!({ "x.yaml.j2": format!("{NOTES}# {{{{ nothing }}}}\n") })),
    ];
    desk.write("desk/sets.yaml", &next.map(|set| set.to_string()).join("\n---\n"));
    desk.types("plan").await;

    // Now something waits in all that run, and one of them can't start with it.
    for name in ["apple", "fig", "kiwi", "plum"] {
        let image = (name == "fig").then(|| json!({ "source": "localhost/vm-runer:1", "pullPolicy": "IfNotPresent" }));
        let change = json!({ "spec": { "image": image, "vm": { "maximumRam": "160Mi" } } }).to_string();
        namespace.kubectl(&["patch", "vm", name, "--type=merge", "--patch", &change]);
        wait_for(&stage.vms, name, conditions::RESTART_REQUIRED, true).await;
    }
    desk.types("rollout").await;
    desk.does("kubectl delete vm --all");
}

/// A namespace of VM-Operator with VMs that are stopped, so there are no Pods.
async fn migration(stage: &Stage, desk: &Desk) {
    let former = stage.cluster.namespace_called("office").await;
    let vms = serde_yaml::Deserializer::from_str(include_str!("../predecessor/release-4-vms.yaml"));
    let vms = vms.map(|vm| Value::deserialize(vm).unwrap()).filter_map(|vm| {
        let (name, mut spec) = (vm["metadata"]["name"].as_str()?, vm["spec"].clone());
        spec["vm"]["state"] = json!("Stopped");
        let of_page = ["a02-stopped", "a05-disks", "a09-pool", "a12-nostate"].contains(&name);
        let vm =
            json!({ "apiVersion": vm["apiVersion"], "kind": vm["kind"], "metadata": { "name": name }, "spec": spec });
        of_page.then_some(vm)
    });
    former.apply(&list(&vms.chain([repository()]).collect::<Vec<_>>()));
    desk.types("migrate-check").await;
}
