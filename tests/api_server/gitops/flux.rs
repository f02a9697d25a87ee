//! The real kustomize-controller of Flux beside our manager and people who start, stop and edit VMs. It gets the VMs of
//! `example/gitops/flux` from an archive, as from Flux's source-controller. `make gitops-test` builds it once, which takes minutes, and runs
//! this; `make test` leaves it out.

use std::{
    io::{Read, Write},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering},
};

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use tempfile::TempDir;

use super::{
    rounds::{ROUNDS, boot, rounds},
    vms,
};
use crate::support::{
    cluster::{Cluster, XTASK, eventually},
    managed_namespace::{LIMIT, ManagedNamespace},
};

/// Flux's controllers, and what serves them what is in Git.
pub(super) struct Flux {
    cluster: &'static Cluster,
    client: Client,
    namespace: String,
    controllers: Vec<(&'static str, Child)>,
    folder: TempDir,
}

impl Drop for Flux {
    fn drop(&mut self) {
        for (_, process) in &mut self.controllers {
            let _ = process.kill();
            let _ = process.wait();
        }
        for (name, _) in &self.controllers {
            if std::thread::panicking() {
                let log = self.log(name);
                let lines: Vec<&str> = log.lines().collect();
                eprintln!("--- the end of the log of {name}\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
            }
        }
    }
}

impl Flux {
    fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.folder.path().join(name)).unwrap_or_default()
    }

    /// The objects of one of Flux's kinds in its namespace.
    pub(super) fn api(&self, kind: &str) -> Api<DynamicObject> {
        self.api_in(&self.namespace, kind)
    }

    /// The objects of one of Flux's kinds.
    pub(super) fn api_in(&self, namespace: &str, kind: &str) -> Api<DynamicObject> {
        let (group, version) = match kind {
            "Kustomization" => ("kustomize.toolkit.fluxcd.io", "v1"),
            "HelmRelease" => ("helm.toolkit.fluxcd.io", "v2"),
            _ => ("source.toolkit.fluxcd.io", "v1"),
        };
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        Api::namespaced_with(self.client.clone(), namespace, &resource)
    }

    /// Starts kustomize-controller for a namespace that exists, or for all of them, with that one as its own.
    pub(super) async fn start(cluster: &'static Cluster, namespace: &str, all_namespaces: bool) -> Self {
        let folder = TempDir::new().unwrap();
        let client = cluster.client().await;
        let mut flux = Self { cluster, client, namespace: namespace.to_owned(), controllers: Vec::new(), folder };
        for (group, kind) in [
            ("source.toolkit.fluxcd.io", "GitRepository"),
            ("source.toolkit.fluxcd.io", "OCIRepository"),
            ("source.toolkit.fluxcd.io", "Bucket"),
            ("source.toolkit.fluxcd.io", "ExternalArtifact"),
        ] {
            flux.apply(&definition(group, "v1", kind));
        }
        flux.run("kustomize-controller", "kustomize.toolkit.fluxcd.io_kustomizations.yaml", all_namespaces);
        flux
    }

    /// Starts one of the controllers that are built from their Go modules, with the definition of its kind.
    pub(super) fn run(&mut self, name: &'static str, definition: &str, all_namespaces: bool) {
        let found = Command::new(XTASK).arg(name).output().unwrap();
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        let built = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
        let definition = built.join(definition);
        let definition = definition.to_str().unwrap();
        self.cluster.kubectl(&["apply", "--server-side", "--filename", definition]);
        // helm-controller ends where it finds none.
        self.cluster.kubectl(&["wait", "--for=condition=Established", "--filename", definition]);
        let log = std::fs::File::create(self.folder.path().join(name)).unwrap();
        let process = Command::new(built.join(name))
            .arg(format!("--watch-all-namespaces={all_namespaces}"))
            .args(["--metrics-addr=0", "--health-addr=0", "--log-level=debug", "--requeue-dependency=1s"])
            .env("KUBECONFIG", self.cluster.kubeconfig())
            .env("RUNTIME_NAMESPACE", &self.namespace)
            .env("NO_PROXY", "*")
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        self.controllers.push((name, process));
    }

    /// Applies an object of which Flux's controllers need the definition.
    pub(super) fn apply(&self, object: &Value) {
        let file = self.folder.path().join("object.json");
        std::fs::write(&file, object.to_string()).unwrap();
        self.cluster.kubectl(&["--namespace", &self.namespace, "apply", "--filename", file.to_str().unwrap()]);
    }

    /// Makes a folder what is in Git: serves it, and tells a GitRepository where it is, as source-controller does.
    pub(super) async fn publish(&self, name: &str, tree: &Path, revision: u32) {
        let archive = self.folder.path().join("tree.tar.gz");
        let packed = Command::new("tar").arg("-czf").arg(&archive).arg("-C").arg(tree).arg(".").status().unwrap();
        assert!(packed.success());
        let source = json!({
            "apiVersion": "source.toolkit.fluxcd.io/v1", "kind": "GitRepository", "metadata": { "name": name },
            "spec": { "url": "https://git.example.org/tree", "interval": "1h" },
        });
        let api = self.api("GitRepository");
        let parameters = PatchParams::apply("test").force();
        eventually("the definition of GitRepository", LIMIT, async || {
            api.patch(name, &parameters, &Patch::Apply(&source)).await.ok()
        })
        .await;
        self.serve(&api, name, &archive, &format!("main@sha1:{revision:040}")).await;
    }

    /// Serves a file, and tells a source where it is.
    pub(super) async fn serve(&self, sources: &Api<DynamicObject>, name: &str, file: &Path, revision: &str) {
        let bytes = std::fs::read(file).unwrap();
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
        let generation = sources.get(name).await.unwrap().metadata.generation;
        let status = json!({ "status": {
            "observedGeneration": generation,
            "artifact": {
                "url": format!("http://{address}/{name}.tar.gz"), "path": format!("{name}.tar.gz"), "digest": format!("sha256:{digest}"),
                "revision": revision, "lastUpdateTime": "2026-01-01T00:00:00Z",
            },
            "conditions": [{
                "type": "Ready", "status": "True", "reason": "Succeeded", "message": "", "observedGeneration": generation,
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }],
        } });
        sources.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    /// Applies a Kustomization like the one of the tree, for this namespace, and without what needs another cluster: what it waits for, and the key.
    pub(super) async fn apply_kustomization(&self, name: &str, wait: bool) {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/flux/cluster/vms.yaml");
        let mut kustomization: Value = serde_yaml::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        kustomization["metadata"] = json!({ "name": name });
        let spec = kustomization["spec"].as_object_mut().unwrap();
        spec.remove("dependsOn");
        spec.remove("decryption");
        spec.insert("path".into(), json!(format!("./{name}")));
        spec.insert("wait".into(), json!(wait));
        spec.insert("targetNamespace".into(), json!(self.namespace));
        spec["sourceRef"]["name"] = json!("tree");
        let api = self.api("Kustomization");
        let parameters = PatchParams::apply("test").force();
        eventually("the definition of Kustomization", LIMIT, async || {
            api.patch(name, &parameters, &Patch::Apply(&kustomization)).await.ok()
        })
        .await;
    }

    /// Asks for a sync, as `flux reconcile` does, and returns what identifies it.
    pub(super) async fn ask(&self, name: &str) -> String {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let asked = format!("sync-{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let patch = json!({ "metadata": { "annotations": { "reconcile.fluxcd.io/requestedAt": asked } } });
        self.api("Kustomization").patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        asked
    }

    /// Asks for a sync, and returns its condition Ready when it has ended.
    pub(super) async fn sync(&self, name: &str) -> Value {
        let asked = self.ask(name).await;
        let api = self.api("Kustomization");
        eventually(&format!("{asked} of {name}"), 2 * LIMIT, async || {
            let found = api.get(name).await.unwrap();
            let status = &found.data["status"];
            let ready = status["conditions"].as_array()?.iter().find(|condition| condition["type"] == "Ready")?.clone();
            (status["lastHandledReconcileAt"] == asked.as_str() && ready["status"] != "Unknown").then_some(ready)
        })
        .await
    }
}

/// A definition that takes everything, for kinds of which only a part matters here.
pub(super) fn definition(group: &str, version: &str, kind: &str) -> Value {
    let singular = kind.to_lowercase();
    let plural = singular.strip_suffix('y').map_or(format!("{singular}s"), |stem| format!("{stem}ies"));
    let schema = json!({ "type": "object", "x-kubernetes-preserve-unknown-fields": true });
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{plural}.{group}") },
        "spec": {
            "group": group, "scope": "Namespaced",
            "names": { "kind": kind, "plural": plural, "singular": singular, "listKind": format!("{kind}List") },
            "versions": [{
                "name": version, "served": true, "storage": true, "subresources": { "status": {} },
                "schema": { "openAPIV3Schema": schema },
            }],
        },
    })
}

#[tokio::test]
#[ignore = "builds kustomize-controller from its Go modules: make gitops-test"]
async fn the_real_flux_and_people_in_twenty_rounds() {
    let tree = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/flux");
    let set = tree.join("templates/import-disk");
    let read = |name: &str| std::fs::read_to_string(set.join(name)).unwrap();
    let (pod, values) = (read("pod.yaml.j2"), read("values.yaml"));
    let templates = [("sets/import-disk/pod.yaml.j2", pod.as_str()), ("sets/import-disk/values.yaml", values.as_str())];
    let ns = ManagedNamespace::with_templates("real-flux", &templates).await;
    let flux = Flux::start(ns.cluster, ns.namespace.name(), false).await;
    flux.publish("tree", &tree, 1).await;
    flux.apply_kustomization("vms", true).await;
    eventually("the VMs from the archive", LIMIT, async || vms(&ns).get_opt("web").await.unwrap()).await;
    boot(&ns, "web").await;
    let ready = flux.sync("vms").await;
    assert_eq!(ready["status"], "True", "with a VM that is stopped as wanted: {ready}");
    rounds(&ns, async |round| assert_eq!(flux.sync("vms").await["status"], "True", "round {round}")).await;
    let applied = flux.log("kustomize-controller").matches("server-side apply completed").count();
    eprintln!("{ROUNDS} rounds: 0 fields flap, 0 rules to ignore something, 0 writes at rest; {applied} syncs of Flux");
}
