//! The programs of Kubernetes: those that the machine has, or one built from the Go modules and kept.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::setup;
use crate::tools::{
    KUBERNETES_VERSION, cache_dir, find_program, fingerprint, make_dir, remove, root, run, run_counted, tied, write,
};

/// The programs that are enough for a control plane.
const CONTROL_PLANE: &[&str] = &["etcd", "kube-apiserver", "kubectl"];
/// All that our build is, by the name of its symbolic link.
const ALL: &[&str] = &[
    "etcd",
    "kube-apiserver",
    "kubectl",
    "kube-controller-manager",
    "kube-scheduler",
    "kube-proxy",
    "kubelet",
    "local-provisioner",
];

/// Where each program of Kubernetes is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Binaries(BTreeMap<String, PathBuf>);

impl Binaries {
    /// Finds the programs: KUBEBUILDER_ASSETS first (the convention of envtest), then our own build.
    pub fn find_or_build(with_node: bool) -> Result<Self> {
        if let Some(dir) = std::env::var_os("KUBEBUILDER_ASSETS").filter(|dir| !dir.is_empty()) {
            let dir = fs::canonicalize(&dir)
                .with_context(|| format!("KUBEBUILDER_ASSETS={}: no such directory", dir.to_string_lossy()))?;
            let found: BTreeMap<String, PathBuf> = ALL
                .iter()
                .filter(|name| dir.join(name).is_file())
                .map(|name| ((*name).to_owned(), dir.join(name)))
                .collect();
            let wanted = if with_node { ALL } else { CONTROL_PLANE };
            match wanted.iter().find(|name| !found.contains_key(**name)) {
                None => return Ok(Self(found)),
                Some(name) if !with_node => {
                    bail!("KUBEBUILDER_ASSETS={} has no {name}: unset it to have a control plane built", dir.display())
                }
                Some(name) => {
                    eprintln!("KUBEBUILDER_ASSETS has no {name}, which a node needs: using our own build");
                }
            }
        }
        build()
    }

    /// The path of a program, if there is one: KUBEBUILDER_ASSETS often has no controllers.
    pub fn get(&self, name: &str) -> Option<&PathBuf> {
        self.0.get(name)
    }
}

/// The machine's own kubectl, or the one of our build.
pub fn kubectl_command() -> Result<Command> {
    let program = match find_program("kubectl") {
        Some(path) => path,
        None => Binaries::find_or_build(false)?.get("kubectl").cloned().context("there is no kubectl in the build")?,
    };
    let mut command = Command::new(program);
    // Our clusters are on this machine, where a proxy for the world outside does not reach.
    let range = crate::network::RANGE;
    let proxied = std::env::var("NO_PROXY").unwrap_or_default();
    command.env("NO_PROXY", if proxied.is_empty() { range.to_owned() } else { format!("{proxied},{range}") });
    Ok(command)
}

/// The version of Helm that renders the chart.
pub const HELM_VERSION: &str = "4.3.1";

/// Helm, built from its Go modules and kept: the chart is rendered with one version of it, whatever the machine has.
pub fn helm() -> Result<PathBuf> {
    const PACKAGE: &str = "helm.sh/helm/v4/cmd/helm";
    let source = root().join("tests/helm");
    let built = build_once(&source, "helm", HELM_VERSION, &format!("Helm {HELM_VERSION}"), |unfinished| {
        let flags = format!("-s -w -X helm.sh/helm/v4/internal/version.version=v{HELM_VERSION}");
        compile(&source, PACKAGE, &flags, &unfinished.join("helm")).context("building Helm from its Go modules")
    })?;
    Ok(built.join("helm"))
}

/// The version of Flux's kustomize-controller beside which VMs are tested.
pub const FLUX_VERSION: &str = "1.9.6";

/// The folder with `kustomize-controller`, built from its Go modules and kept, and the definition of its resource.
pub fn kustomize_controller() -> Result<PathBuf> {
    const PACKAGE: &str = "github.com/fluxcd/kustomize-controller";
    let source = root().join("tests/flux");
    let what = format!("kustomize-controller {FLUX_VERSION}");
    build_once(&source, "kustomize-controller", FLUX_VERSION, &what, |unfinished| {
        let program = unfinished.join("kustomize-controller");
        compile(&source, PACKAGE, "-s -w", &program).context("building kustomize-controller from its Go modules")?;
        let definition = "kustomize.toolkit.fluxcd.io_kustomizations.yaml";
        copy_definitions(&source, PACKAGE, "config/crd/bases", &[definition], unfinished)
    })
}

/// The version of Flux's helm-controller that installs the manager in a test.
pub const HELM_CONTROLLER_VERSION: &str = "1.4.0";

/// The folder with `helm-controller`, built from its Go modules and kept, and the definition of its resource.
pub fn helm_controller() -> Result<PathBuf> {
    const PACKAGE: &str = "github.com/fluxcd/helm-controller";
    let source = root().join("tests/helmcontroller");
    let what = format!("helm-controller {HELM_CONTROLLER_VERSION}");
    build_once(&source, "helm-controller", HELM_CONTROLLER_VERSION, &what, |unfinished| {
        let program = unfinished.join("helm-controller");
        compile(&source, PACKAGE, "-s -w", &program).context("building helm-controller from its Go modules")?;
        let definition = "helm.toolkit.fluxcd.io_helmreleases.yaml";
        copy_definitions(&source, PACKAGE, "config/crd/bases", &[definition], unfinished)
    })
}

/// The version of Argo CD beside which VMs are tested.
pub const ARGO_CD_VERSION: &str = "3.2.0";

/// The folder with the program `argocd`, which is Argo CD's application controller, its repository server, or the Redis that they need, and
/// the definitions of its resources.
pub fn argo_cd() -> Result<PathBuf> {
    const MODULE: &str = "github.com/argoproj/argo-cd/v3";
    let source = root().join("tests/argocd");
    let what = format!("Argo CD {ARGO_CD_VERSION}");
    build_once(&source, "argocd", ARGO_CD_VERSION, &what, |unfinished| {
        compile(&source, ".", "-s -w", &unfinished.join("argocd")).context("building Argo CD from its Go modules")?;
        let definitions = ["application-crd.yaml", "appproject-crd.yaml"];
        copy_definitions(&source, MODULE, "manifests/crds", &definitions, unfinished)
    })
}

/// Copies files from a module that a Go module needs.
fn copy_definitions(source: &Path, module: &str, folder: &str, files: &[&str], target: &Path) -> Result<()> {
    let mut list = Command::new("go");
    let module = run(list.current_dir(source).args(["list", "-m", "-f", "{{.Dir}}", module]))?;
    let folder = Path::new(module.trim()).join(folder);
    for file in files {
        // What is in Go's cache can't be written, and a copy would be so, too.
        let content = fs::read(folder.join(file)).with_context(|| format!("reading {}/{file}", folder.display()))?;
        write(&target.join(file), content)?;
    }
    Ok(())
}

fn build() -> Result<Binaries> {
    let source = root().join("tests/controlplane");
    let what = format!("Kubernetes {KUBERNETES_VERSION}");
    let dir = build_once(&source, "controlplane", KUBERNETES_VERSION, &what, |unfinished| {
        let (major, minor) = KUBERNETES_VERSION
            .split_once('.')
            .and_then(|(major, rest)| Some((major, rest.split_once('.')?.0)))
            .context("a version of Kubernetes has three parts")?;
        // Without these the server says that it is v0.0.0, and clients believe it.
        let mut flags = "-s -w".to_owned();
        for package in ["k8s.io/component-base/version", "k8s.io/client-go/pkg/version"] {
            flags.push_str(&format!(
                " -X {package}.gitVersion=v{KUBERNETES_VERSION} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
            ));
        }
        compile(&source, ".", &flags, &unfinished.join("controlplane"))
            .context("building the control plane from its Go modules")?;
        for name in ALL {
            symlink("controlplane", unfinished.join(name)).with_context(|| format!("linking {name}"))?;
        }
        Ok(())
    })?;
    Ok(Binaries(ALL.iter().map(|name| ((*name).to_owned(), dir.join(name))).collect()))
}

/// The folder in the cache with what `build` made of a Go module. It is built again when the module's files change; `program` is the
/// file by which one sees that a build is whole, and the name of the folder above.
fn build_once(
    source: &Path,
    program: &str,
    version: &str,
    what: &str,
    build: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(source)
        .with_context(|| format!("listing {}", source.display()))?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<std::io::Result<_>>()?;
    files.retain(|path| path.extension().is_some_and(|ext| ext == "go" || ext == "mod" || ext == "sum"));
    files.sort();
    let contents: Vec<Vec<u8>> = files
        .iter()
        .map(|path| fs::read(path).with_context(|| format!("reading {}", path.display())))
        .collect::<Result<_>>()?;
    let key = fingerprint(contents.iter().map(Vec::as_slice));
    let base = cache_dir()?.join(program);
    let dir = base.join(format!("v{version}-{key}"));
    if dir.join(program).is_file() {
        return Ok(dir);
    }

    setup::ensure_go()?;
    make_dir(&base)?;
    // Several tests may start at once on a machine that has nothing yet: one builds, the others wait for it.
    let lock = fs::File::create(base.join("lock")).with_context(|| format!("creating {}/lock", base.display()))?;
    lock.lock().with_context(|| format!("waiting for another build of {what}"))?;
    if dir.join(program).is_file() {
        return Ok(dir);
    }
    eprintln!("Building {what} from its Go modules (once; takes some minutes) ...");
    let start = Instant::now();
    let unfinished = base.join(format!("unfinished-{key}"));
    remove(&unfinished)?;
    make_dir(&unfinished)?;
    build(&unfinished)?;
    fs::rename(&unfinished, &dir).with_context(|| format!("moving {what} to {}", dir.display()))?;
    eprintln!("Built in {} s, kept in {}", start.elapsed().as_secs(), dir.display());
    Ok(dir)
}

/// Compiles a package of a Go module into a static program.
fn compile(source: &Path, package: &str, flags: &str, program: &Path) -> Result<()> {
    // It downloads the modules, and says so on its own.
    let mut list = tied("go");
    list.current_dir(source).args(["list", "-deps", package]).env("CGO_ENABLED", "0").stderr(Stdio::inherit());
    let packages = run(&mut list).context("listing the packages")?.lines().count();
    let mut compile = tied("go");
    compile
        .current_dir(source)
        .args(["build", "-v", "-trimpath", "-buildvcs=false", "-ldflags", flags, "-o"])
        .arg(program)
        .arg(package)
        .env("CGO_ENABLED", "0");
    run_counted(&mut compile, &format!("of {packages} packages"))
}
