//! What a release consists of beside its images: archives of the programs, and one manifest to install from.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::json;

use crate::binaries::kubectl_command;
use crate::programs::{self, MANAGER, NODE_DEVICES, PLUGIN, Profile, Program, RUNNER};
use crate::tools::{dev_dir, make_dir, read, remove, root, run, sha256_file, write};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The archives, by their names without version: who uses VMs needs the first, who builds images of their own the second.
const ARCHIVES: &[(&str, &[Program])] = &[("kubectl-vm", &[PLUGIN]), ("vm-operator", &[MANAGER, NODE_DEVICES, RUNNER])];

/// Writes the archives, the manifest and the sums of both into `dist`.
pub fn dist(registry: &str, namespace: &str) -> Result<()> {
    let dist = root().join("dist");
    remove(&dist)?;
    make_dir(&dist)?;
    let mut files = vec![];
    for (name, programs) in ARCHIVES {
        let built = programs::build(Profile::Release, registry, programs)?;
        let file = format!("{name}-{VERSION}-linux-amd64.tar.gz");
        pack(&dist.join(&file), &built)?;
        files.push(file);
    }
    write(&dist.join("install.yaml"), manifest(registry, namespace)?)?;
    files.push("install.yaml".to_owned());
    let package = format!("vmop-agent_{VERSION}_all.deb");
    run(Command::new(root().join("deploy/guest-package/build.sh")).arg(VERSION).arg(dist.join(&package)))
        .context("building the guests' package")?;
    files.push(package);
    let sums = files.iter().map(|file| Ok(format!("{}  {file}\n", sha256_file(&dist.join(file))?)));
    write(&dist.join("SHA256SUMS"), sums.collect::<Result<String>>()?)?;
    for file in files.iter().map(String::as_str).chain(["SHA256SUMS"]) {
        println!("{:>9}  dist/{file}", fs::metadata(dist.join(file)).map_or(0, |meta| meta.len()));
    }
    Ok(())
}

/// An archive of programs and the licence. The same programs always give the same archive.
fn pack(archive: &Path, programs: &[std::path::PathBuf]) -> Result<()> {
    let mut command = Command::new("tar");
    command.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--mode=a+rX"]);
    command.args(["--use-compress-program", "gzip -9 -n", "--file"]).arg(archive);
    for file in programs.iter().map(std::path::PathBuf::as_path).chain([root().join("LICENSE").as_path()]) {
        let folder = file.parent().context("a file is in a folder")?;
        let name = file.file_name().context("a file has a name")?;
        command.arg("--directory").arg(folder).arg(name);
    }
    run(&mut command).with_context(|| format!("packing {}", archive.display())).map(drop)
}

/// The CustomResourceDefinitions and the manager in a namespace, in one file.
pub fn manifest(registry: &str, namespace: &str) -> Result<String> {
    // kustomize takes its resources by relative paths only.
    let stage = dev_dir().join("manifest");
    make_dir(&stage)?;
    let object = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace } });
    write(&stage.join("namespace.yaml"), object.to_string())?;
    let kustomization = json!({
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": ["namespace.yaml", "../../deploy"],
        "images": [{ "name": "localhost/vm-operator", "newName": format!("{registry}/vm-operator"), "newTag": VERSION }],
    });
    write(&stage.join("kustomization.yaml"), kustomization.to_string())?;
    let deployed = run(kubectl_command()?.arg("kustomize").arg(&stage)).context("rendering deploy/")?;
    let mut text = format!(
        "# vm-operator {VERSION}: its CustomResourceDefinitions, and the manager in the namespace {namespace}, whose VMs it manages.\n\
         #   kubectl apply --server-side -f install.yaml\n"
    );
    let mut crds: Vec<_> = fs::read_dir(root().join("crds")).context("listing crds")?.flatten().collect();
    crds.sort_by_key(fs::DirEntry::path);
    for crd in crds {
        text += &format!("---\n{}", read(&crd.path())?);
    }
    Ok(text + "---\n" + &deployed)
}
