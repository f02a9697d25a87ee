//! The real Argo CD, its application controller and repository server, beside our manager and people who start, stop and edit VMs. It gets the VMs
//! of `example/gitops/argocd` from a Git repository, as the Application of that tree says. `make gitops-test` builds it once, which takes
//! minutes, and runs this; `make test` leaves it out.

use std::{
    collections::BTreeMap,
    fs,
    net::{SocketAddr, TcpListener},
    os::unix::{fs::PermissionsExt, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{
    rounds::{ROUNDS, boot, rounds},
    vms,
};
use crate::support::{
    cluster::{Cluster, XTASK, eventually},
    managed_namespace::{LIMIT, ManagedNamespace},
};

/// Argo CD's programs, and the repository that they read.
pub(super) struct ArgoCd {
    cluster: &'static Cluster,
    client: Client,
    namespace: String,
    programs: Vec<Child>,
    folder: TempDir,
}

impl Drop for ArgoCd {
    fn drop(&mut self) {
        for program in &mut self.programs {
            let _ = program.kill();
            let _ = program.wait();
        }
        if std::thread::panicking() {
            let told =
                self.cluster.try_kubectl(&["--namespace", &self.namespace, "get", "applications", "--output=yaml"]);
            eprintln!("--- the Applications\n{}", told.unwrap_or_else(|error| error));
            for name in ["application-controller", "repo-server"] {
                let log = self.log(name);
                let lines: Vec<&str> = log.lines().collect();
                eprintln!("--- the end of the log of {name}\n{}", lines[lines.len().saturating_sub(60)..].join("\n"));
            }
        }
    }
}

pub(super) fn tree() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("example/gitops/argocd")
}

/// An address that nobody listens on now.
fn free_address() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
}

pub(super) fn succeeds(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Helm, which is built when it is asked for.
pub(super) fn helm() -> PathBuf {
    let found = Command::new(XTASK).arg("helm").output().unwrap();
    assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
    PathBuf::from(String::from_utf8(found.stdout).unwrap().trim())
}

/// The Application of the tree, which is called `vms`.
fn application_of_the_tree() -> Value {
    let text = fs::read_to_string(tree().join("applications/vms.yaml")).unwrap();
    let mut documents =
        serde_yaml::Deserializer::from_str(&text).map(|it| serde::Deserialize::deserialize(it).unwrap());
    documents.find(|it: &Value| it["kind"] == "Application").unwrap()
}

impl ArgoCd {
    fn applications(&self) -> Api<DynamicObject> {
        let kind = GroupVersionKind::gvk("argoproj.io", "v1alpha1", "Application");
        let resource = ApiResource::from_gvk_with_plural(&kind, "applications");
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource)
    }

    fn log(&self, program: &str) -> String {
        fs::read_to_string(self.folder.path().join(program)).unwrap_or_default()
    }

    /// The folder of the repository.
    pub(super) fn repository(&self) -> PathBuf {
        self.folder.path().join("repository")
    }

    /// The address of the repository.
    pub(super) fn url(&self) -> String {
        format!("file://{}", self.repository().display())
    }

    /// Starts it in a namespace that exists, with an empty repository, with what `deploy/argocd` tells it of VMs, and with further settings of
    /// `argocd-cm`.
    pub(super) async fn start(cluster: &'static Cluster, namespace: &str, settings: &[(&str, &str)]) -> Self {
        let found = Command::new(XTASK).arg("argo-cd").output().unwrap();
        assert!(found.status.success(), "{}", String::from_utf8_lossy(&found.stderr));
        let built = PathBuf::from(String::from_utf8(found.stdout).unwrap().trim());
        for name in ["application-crd.yaml", "appproject-crd.yaml"] {
            let file = built.join(name);
            cluster.kubectl(&["apply", "--server-side", "--filename", file.to_str().unwrap()]);
        }
        let client = cluster.client().await;
        let folder = TempDir::new().unwrap();
        let mut argo = Self { cluster, client, namespace: namespace.to_owned(), programs: Vec::new(), folder };
        let project = json!({
            "apiVersion": "argoproj.io/v1alpha1", "kind": "AppProject", "metadata": { "name": "default" },
            "spec": {
                "sourceRepos": ["*"], "destinations": [{ "namespace": "*", "server": "*" }],
                "clusterResourceWhitelist": [{ "group": "*", "kind": "*" }],
            },
        });
        argo.apply("AppProject", "appprojects", &project).await;
        argo.configure(settings);
        fs::create_dir(argo.repository()).unwrap();
        argo.git(&["init", "--quiet", "--initial-branch=main"]);
        // Its kustomize is kubectl's here.
        argo.install(
            "kustomize",
            &format!(
                "if [ \"$1\" = version ]; then echo v5.7.1; exit; fi; shift; exec '{XTASK}' kubectl -- kustomize \"$@\""
            ),
        );
        let [redis, repositories, metrics, more_metrics] = [(); 4].map(|()| free_address());
        let port = |address: SocketAddr| address.port().to_string();
        argo.run(&built, "redis", &[&redis.to_string()]);
        argo.run(
            &built,
            "repo-server",
            &[
                "--redis",
                &redis.to_string(),
                "--address=127.0.0.1",
                "--port",
                &port(repositories),
                "--metrics-address=127.0.0.1",
                "--metrics-port",
                &port(metrics),
                "--disable-tls",
            ],
        );
        argo.run(
            &built,
            "application-controller",
            &[
                "--redis",
                &redis.to_string(),
                "--repo-server",
                &repositories.to_string(),
                "--repo-server-plaintext",
                "--metrics-port",
                &port(more_metrics),
                "--kubeconfig",
                cluster.kubeconfig().to_str().unwrap(),
                "--namespace",
                namespace,
                "--self-heal-timeout-seconds=1",
                "--self-heal-backoff-cap-seconds=1",
            ],
        );
        argo
    }

    /// What an installation of Argo CD has in its namespace, and our keys in it.
    fn configure(&self, settings: &[(&str, &str)]) {
        let part = json!({ "app.kubernetes.io/part-of": "argocd" });
        let named = |name: &str| json!({ "name": name, "labels": part });
        let settings = settings.iter().copied().collect::<BTreeMap<_, _>>();
        for object in [
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": named("argocd-cm"), "data": settings }),
            json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": named("argocd-cmd-params-cm"), "data": {} }),
            json!({ "apiVersion": "v1", "kind": "Secret", "metadata": named("argocd-secret"), "stringData": { "server.secretkey": "of a test" } }),
        ] {
            let file = self.folder.path().join("object.json");
            fs::write(&file, object.to_string()).unwrap();
            self.kubectl(&["apply", "--filename", file.to_str().unwrap()]);
        }
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/argocd/argocd-cm.yaml");
        self.kubectl(&["patch", "configmap", "argocd-cm", "--type", "merge", "--patch-file", ours.to_str().unwrap()]);
    }

    fn kubectl(&self, arguments: &[&str]) {
        self.cluster.kubectl(&[&["--namespace", &self.namespace], arguments].concat());
    }

    pub(super) fn git(&self, arguments: &[&str]) {
        succeeds(Command::new("git").arg("-C").arg(self.repository()).args(arguments));
    }

    /// Commits what the repository's folder contains now.
    pub(super) fn commit(&self) {
        self.git(&["add", "."]);
        self.git(&["-c", "user.name=Test", "-c", "user.email=test@example.org", "commit", "--quiet", "--message=VMs"]);
    }

    /// Gives the repository server a program that Argo CD's image has.
    fn install(&self, name: &str, script: &str) {
        let bin = self.folder.path().join("bin");
        fs::create_dir_all(&bin).unwrap();
        fs::write(bin.join(name), format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(bin.join(name), fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// For Applications with a chart.
    pub(super) fn install_helm(&self) {
        self.install("helm", &format!("exec '{}' \"$@\"", helm().display()));
    }

    fn run(&mut self, built: &Path, part: &str, arguments: &[&str]) {
        let log = fs::File::create(self.folder.path().join(part)).unwrap();
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(built.join("argocd"));
        command
            // As its image calls it: the API server takes the name of a field manager from the program's where a request has none.
            .arg0(format!("argocd-{part}"))
            .arg(part)
            .args(arguments)
            // The cluster that Applications call https://kubernetes.default.svc is the one of KUBECONFIG.
            .env("ARGOCD_FAKE_IN_CLUSTER", "true")
            .env("KUBECONFIG", self.cluster.kubeconfig())
            .env("ARGOCD_GPG_ENABLED", "false")
            .env("NO_PROXY", "*")
            .env("PATH", format!("{}:{path}", self.folder.path().join("bin").display()))
            .env("TMPDIR", self.folder.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        self.programs.push(command.spawn().unwrap());
    }

    async fn apply(&self, kind: &str, plural: &str, object: &Value) {
        let resource =
            ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("argoproj.io", "v1alpha1", kind), plural);
        let api = Api::<DynamicObject>::namespaced_with(self.client.clone(), &self.namespace, &resource);
        let (name, parameters) = (object["metadata"]["name"].as_str().unwrap(), PatchParams::apply("test").force());
        eventually(&format!("the definition of {kind}"), LIMIT, async || {
            api.patch(name, &parameters, &Patch::Apply(object)).await.ok()
        })
        .await;
    }

    /// Applies an Application like the one of the tree, for this namespace and a folder of this repository.
    pub(super) async fn apply_application(&self, name: &str, folder: &str, options: &[&str]) {
        let mut application = application_of_the_tree();
        application["metadata"] = json!({ "name": name });
        application["spec"]["source"]["repoURL"] = json!(self.url());
        application["spec"]["source"]["path"] = json!(folder);
        application["spec"]["destination"]["namespace"] = json!(self.namespace);
        let all = application["spec"]["syncPolicy"]["syncOptions"].as_array_mut().unwrap();
        all.extend(options.iter().map(|option| json!(option)));
        self.apply("Application", "applications", &application).await;
    }

    /// Asks for a comparison with Git, as `argocd app get --hard-refresh` does, and waits until nothing differs and the health is as given.
    pub(super) async fn sync(&self, name: &str, health: &str) -> Value {
        let api = self.applications();
        let patch = json!({ "metadata": { "annotations": { "argocd.argoproj.io/refresh": "hard" } } });
        api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
        let synced = eventually(&format!("Argo CD to have synced {name}"), 2 * LIMIT, async || {
            let found = api.get(name).await.unwrap();
            let status = &found.data["status"];
            let is_refreshed =
                found.metadata.annotations.unwrap_or_default().keys().all(|name| !name.ends_with("/refresh"));
            let is_over = status["operationState"]["phase"] != "Running" && found.data.get("operation").is_none();
            (is_refreshed && is_over && status["sync"]["status"] == "Synced" && status["health"]["status"] == health)
                .then(|| status.clone())
        })
        .await;
        assert_eq!(synced["conditions"], Value::Null, "{name}");
        synced
    }
}

#[tokio::test]
#[ignore = "builds Argo CD from its Go modules: make gitops-test"]
async fn the_real_argo_cd_and_people_in_twenty_rounds() {
    let set = tree().join("templates/import-disk");
    let read = |name: &str| fs::read_to_string(set.join(name)).unwrap();
    let (pod, values) = (read("pod.yaml.j2"), read("values.yaml"));
    let templates = [("sets/import-disk/pod.yaml.j2", pod.as_str()), ("sets/import-disk/values.yaml", values.as_str())];
    let ns = ManagedNamespace::with_templates("real-argo-cd", &templates).await;
    let argo = ArgoCd::start(ns.cluster, ns.namespace.name(), &[]).await;
    succeeds(Command::new("cp").arg("-r").arg(tree().join("vms")).arg(argo.repository()));
    let kustomization = argo.repository().join("vms/kustomization.yaml");
    let text = fs::read_to_string(&kustomization).unwrap();
    // The External Secrets Operator is not here: its Secret is one of the user's own.
    let text = text
        .replace("  - external-secret.yaml\n", "")
        .replace("namespace: vms", &format!("namespace: {}", ns.namespace.name()));
    fs::write(kustomization, text).unwrap();
    argo.commit();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "desktop-user-data", "labels": { "vmoperator.jdrupes.org/cloud-init": "" } },
        "stringData": { "user-data": "#cloud-config\n" },
    });
    ns.namespace.apply(&secret.to_string());
    argo.apply_application("vms", "vms", &[]).await;
    eventually("the VMs from the repository", 2 * LIMIT, async || vms(&ns).get_opt("web").await.unwrap()).await;
    boot(&ns, "web").await;
    // Git has no state for the desktop, so it is as wanted without ever having run.
    let status = argo.sync("vms", "Healthy").await;
    assert_eq!(status["operationState"]["phase"], "Succeeded", "{status}");
    rounds(&ns, async |_| {
        // A person has edited it, and Argo CD may not have seen that yet.
        ns.vm_when("web", "as Git has it", |vm| vm.spec.vm.current_cpus == Some(2)).await;
        argo.sync("vms", "Healthy").await;
    })
    .await;
    let syncs = argo.log("application-controller").matches("Initiated automated sync").count();
    eprintln!(
        "{ROUNDS} rounds: 0 fields flap, 0 rules to ignore something, 0 writes at rest; {syncs} syncs of Argo CD"
    );
}
