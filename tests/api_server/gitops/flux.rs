//! The real kustomize-controller of Flux beside our manager and people who start, stop and edit VMs. It gets the VMs of
//! `example/gitops/flux` from an archive, as from Flux's source-controller. `make gitops-test` builds it once, which takes minutes, and runs
//! this; `make test` leaves it out.

use std::{
    io::{Read, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret};
use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;
use vm_operator::api::{PowerState, VirtualMachine};

use super::{set_state, vms};
use crate::support::{
    cluster::{XTASK, eventually},
    managed_namespace::{LIMIT, ManagedNamespace, condition},
};

/// Between two rounds of Flux people do one of the things in [`act`] each.
const ROUNDS: usize = 20;
/// The labels and annotations by which people tell tools to ignore something.
const IGNORE: [&str; 4] = ["ssa", "reconcile", "force", "compare-options"];

/// kustomize-controller, and what serves it the tree.
struct Flux<'a> {
    ns: &'a ManagedNamespace,
    process: Child,
    folder: TempDir,
}

impl Drop for Flux<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        if std::thread::panicking() {
            eprintln!("--- the log of kustomize-controller\n{}", self.log());
        }
    }
}

impl<'a> Flux<'a> {
    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn resource(kind: &str) -> ApiResource {
        let (group, plural) = match kind {
            "Kustomization" => ("kustomize.toolkit.fluxcd.io", "kustomizations"),
            _ => ("source.toolkit.fluxcd.io", "gitrepositories"),
        };
        ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, "v1", kind), plural)
    }

    fn api(&self, kind: &str) -> Api<DynamicObject> {
        Api::namespaced_with(self.ns.client.clone(), self.ns.namespace.name(), &Self::resource(kind))
    }

    /// Starts it for the namespace, with the VMs of the tree.
    async fn start(ns: &'a ManagedNamespace) -> Self {
        let found = Command::new(XTASK).arg("kustomize-controller").output().unwrap();
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        let program = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
        let definition = std::fs::read_to_string(program.join("kustomizations.yaml")).unwrap();
        ns.namespace.apply(&definition);
        for (kind, plural) in [
            ("GitRepository", "gitrepositories"),
            ("OCIRepository", "ocirepositories"),
            ("Bucket", "buckets"),
            ("ExternalArtifact", "externalartifacts"),
        ] {
            ns.namespace.apply(&source_definition(kind, plural).to_string());
        }
        let folder = TempDir::new().unwrap();
        let log = std::fs::File::create(folder.path().join("log")).unwrap();
        let process = Command::new(program.join("kustomize-controller"))
            .args(["--watch-all-namespaces=false", "--metrics-addr=0", "--health-addr=0", "--log-level=debug"])
            .env("KUBECONFIG", ns.cluster.kubeconfig())
            .env("RUNTIME_NAMESPACE", ns.namespace.name())
            .env("NO_PROXY", "*")
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let flux = Self { ns, process, folder };
        flux.publish().await;
        flux.apply_kustomization().await;
        flux
    }

    /// Serves the tree, and tells where it is, as source-controller does.
    async fn publish(&self) {
        let archive = self.folder.path().join("tree.tar.gz");
        let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/flux");
        let packed = Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(tree).arg("vms").status().unwrap();
        assert!(packed.success());
        let bytes = std::fs::read(archive).unwrap();
        let digest = Sha256::digest(&bytes).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for mut socket in listener.incoming().flatten() {
                let _ = socket.read(&mut [0; 4096]);
                let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\nConnection: close\r\n\r\n", bytes.len());
                let _ = socket.write_all(head.as_bytes()).and_then(|()| socket.write_all(&bytes));
            }
        });
        let source = json!({
            "apiVersion": "source.toolkit.fluxcd.io/v1", "kind": "GitRepository", "metadata": { "name": "tree" },
            "spec": { "url": "https://git.example.org/tree", "interval": "1h" },
        });
        let api = self.api("GitRepository");
        let parameters = PatchParams::apply("test").force();
        eventually("the definition of GitRepository", LIMIT, async || {
            api.patch("tree", &parameters, &Patch::Apply(&source)).await.ok()
        })
        .await;
        let status = json!({ "status": {
            "artifact": {
                "url": format!("http://{address}/tree.tar.gz"), "path": "tree.tar.gz", "digest": format!("sha256:{digest}"),
                "revision": "main@sha1:0000000000000000000000000000000000000001", "lastUpdateTime": "2026-01-01T00:00:00Z",
            },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Succeeded", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        } });
        api.patch_status("tree", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    /// The Kustomization of the tree, for this namespace, and without what needs another cluster: what it waits for, and the key.
    async fn apply_kustomization(&self) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/flux/cluster/vms.yaml");
        let mut kustomization: Value = serde_yaml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        kustomization["metadata"]["namespace"] = json!(self.ns.namespace.name());
        let spec = kustomization["spec"].as_object_mut().unwrap();
        spec.remove("dependsOn");
        spec.remove("decryption");
        spec.insert("path".into(), json!("./vms"));
        spec.insert("targetNamespace".into(), json!(self.ns.namespace.name()));
        spec["sourceRef"]["name"] = json!("tree");
        let api = self.api("Kustomization");
        let parameters = PatchParams::apply("test").force();
        eventually("the definition of Kustomization", LIMIT, async || {
            api.patch("vms", &parameters, &Patch::Apply(&kustomization)).await.ok()
        })
        .await;
    }

    /// Asks for a sync, as `flux reconcile` does, and returns its condition Ready when it has ended.
    async fn sync(&self, round: usize) -> Value {
        let api = self.api("Kustomization");
        let asked = format!("round-{round}");
        let patch = json!({ "metadata": { "annotations": { "reconcile.fluxcd.io/requestedAt": asked } } });
        api.patch("vms", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        eventually(&format!("sync {round}"), 2 * LIMIT, async || {
            let found = api.get("vms").await.unwrap();
            let status = &found.data["status"];
            let ready = status["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Ready")?.clone();
            (status["lastHandledReconcileAt"] == asked.as_str() && ready["status"] != "Unknown").then_some(ready)
        })
        .await
    }
}

/// A definition of one of the sources, of which only the artifact matters here.
fn source_definition(kind: &str, plural: &str) -> Value {
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.source.toolkit.fluxcd.io") },
        "spec": {
            "group": "source.toolkit.fluxcd.io", "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural, "singular": kind.to_lowercase(), "listKind": format!("{kind}List") },
            "versions": [{
                "name": "v1", "served": true, "storage": true, "subresources": { "status": {} },
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

/// What a person does to the VM whose state is not in Git, and in which power state it should be then.
async fn act(ns: &ManagedNamespace, round: usize) -> PowerState {
    let by_kubectl = |state: &str| {
        let patch = json!({ "spec": { "vm": { "state": state } } });
        ns.namespace.kubectl(&["patch", "vm", "desktop", "--type=merge", &format!("--patch={patch}")]);
    };
    match round % 4 {
        0 => {
            set_state(ns, "desktop", "vm-operator-cli", "Running").await;
            PowerState::Running
        }
        1 => {
            by_kubectl("Stopped");
            PowerState::Stopped
        }
        2 => {
            by_kubectl("Running");
            PowerState::Running
        }
        _ => {
            set_state(ns, "desktop", "vm-operator-cli", "Stopped").await;
            PowerState::Stopped
        }
    }
}

/// Every object of the VMs, with its version.
async fn versions(ns: &ManagedNamespace) -> Vec<String> {
    let mut all = Vec::new();
    macro_rules! add {
        ($($kind:ty),*) => { $(for object in ns.api::<$kind>().list(&Default::default()).await.unwrap() {
            all.push(format!("{} {} {}", stringify!($kind), object.name_any(), object.resource_version().unwrap()));
        })* };
    }
    add!(VirtualMachine, Pod, ConfigMap, Secret, PersistentVolumeClaim);
    all
}

/// Plays the runner of a VM that should run.
async fn boot(ns: &ManagedNamespace, name: &str) {
    ns.vm_when(name, "starting", |vm| condition(vm, "Ready").is_some_and(|ready| ready.1 == "Starting")).await;
    ns.report(name, true, "Started").await;
    ns.vm_with_reason(name, "Running").await;
}

#[tokio::test]
#[ignore = "builds kustomize-controller from its Go modules: make gitops-test"]
async fn the_real_flux_and_people_in_twenty_rounds() {
    let set = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/flux/templates/import-disk");
    let read = |name: &str| std::fs::read_to_string(set.join(name)).unwrap();
    let (pod, values) = (read("pod.yaml.j2"), read("values.yaml"));
    let templates = [("sets/import-disk/pod.yaml.j2", pod.as_str()), ("sets/import-disk/values.yaml", values.as_str())];
    let ns = ManagedNamespace::with_templates("real-flux", &templates).await;
    let flux = Flux::start(&ns).await;
    eventually("the VMs from the archive", LIMIT, async || vms(&ns).get_opt("web").await.unwrap()).await;
    boot(&ns, "web").await;
    let ready = flux.sync(0).await;
    assert_eq!(ready["status"], "True", "with a VM that is stopped as wanted: {ready}");
    let spec = |vm: VirtualMachine| json!(vm.spec);
    let (web, desktop) = (spec(vms(&ns).get("web").await.unwrap()), spec(vms(&ns).get("desktop").await.unwrap()));
    let mut flapping = Vec::new();
    for round in 1..=ROUNDS {
        let wanted = act(&ns, round).await;
        let is_wanted = |vm: &VirtualMachine| vm.status.as_ref().is_some_and(|status| status.power == Some(wanted));
        ns.vm_when("desktop", "as somebody wants it", is_wanted).await;
        if wanted == PowerState::Running {
            boot(&ns, "desktop").await;
        } else {
            ns.vm_with_reason("desktop", "StoppedAsRequested").await;
        }
        // An edit that Git takes back, and one that is a person's.
        let edit = json!({ "spec": { "vm": { "currentCpus": 1 } } });
        ns.namespace.kubectl(&["patch", "vm", "web", "--type=merge", &format!("--patch={edit}")]);
        let power_before = vms(&ns).get("desktop").await.unwrap().status.unwrap().power;
        let ready = flux.sync(round).await;
        assert_eq!(ready["status"], "True", "round {round}: {ready}");
        let seen = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
        let after = ns.vm_when("desktop", "observed", seen).await;
        assert_eq!(after.status.as_ref().unwrap().power, power_before, "round {round}: the sync changed the power");
        let exists = ns.api::<Pod>().get_opt("desktop").await.unwrap();
        let exists = exists.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none());
        assert_eq!(exists, wanted == PowerState::Running, "round {round}");
        // What Git has is as Git has it, and of the rest only what the person changed differs.
        for (name, git, may_differ) in [("web", &web, &[][..]), ("desktop", &desktop, &["/vm/state"])] {
            let now = spec(ns.vm_when(name, "observed", seen).await);
            let changes = json!(json_patch::diff(git, &now));
            let changes = changes.as_array().unwrap().iter().map(|change| change["path"].as_str().unwrap().to_owned());
            flapping.extend(
                changes.filter(|path| !may_differ.contains(&path.as_str())).map(|path| format!("{name}{path}")),
            );
        }
    }
    assert_eq!(flapping, [""; 0]);
    for vm in vms(&ns).list(&Default::default()).await.unwrap() {
        let rules =
            vm.annotations().keys().filter(|name| IGNORE.iter().any(|rule| name.ends_with(&format!("/{rule}"))));
        assert_eq!(rules.collect::<Vec<_>>(), [""; 0], "no VM needs a rule that tells a tool to ignore something");
    }
    // At rest: three syncs more, in which nobody writes anything.
    ns.manager.wait_until_idle().await;
    let (before, writes) = (versions(&ns).await, ns.manager.logged_writes().len());
    for round in 1..=3 {
        assert_eq!(flux.sync(ROUNDS + round).await["status"], "True");
    }
    ns.manager.wait_until_idle().await;
    assert_eq!(versions(&ns).await, before, "writes at rest");
    assert_eq!(ns.manager.logged_writes().len(), writes, "writes of the manager at rest");
    let applied = flux.log().matches("server-side apply completed").count();
    eprintln!("{ROUNDS} rounds: 0 fields flap, 0 rules to ignore something, 0 writes at rest; {applied} syncs of Flux");
}
