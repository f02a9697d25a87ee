//! What a release consists of beside its images: archives of the programs and their SBOMs, the Helm chart, packages, the manifest of the kubectl
//! plugin, and one manifest to install from.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;

use crate::binaries::kubectl_command;
use crate::chart;
use crate::programs::{self, ALL, MANAGER, NODE_DEVICES, PLUGIN, Profile, Program, RUNNER, VMCTL, WEB};
use crate::sbom;
use crate::tools::{dev_dir, make_dir, read, remove, root, run, sha256_file, write};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The archives, by their names without version: who uses VMs needs the first, who builds images of their own the second.
const ARCHIVES: &[(&str, &[Program])] =
    &[("kubectl-vm", &[PLUGIN]), ("vm-operator", &[MANAGER, NODE_DEVICES, WEB, RUNNER, VMCTL])];

/// Writes all files of a release and their sums into `dist`. `downloads` is the URL of the folder with the release's files; by default, for a
/// registry of GitHub, that of GitHub's release. Without it there is no manifest of the plugin, which has to name it.
pub fn dist(registry: &str, namespace: &str, downloads: Option<&str>) -> Result<()> {
    let dist = root().join("dist");
    remove(&dist)?;
    make_dir(&dist)?;
    let mut files = vec![];
    for (name, programs) in ARCHIVES {
        let built = programs::build(Profile::Release, registry, programs)?;
        let file = format!("{name}-{VERSION}-linux-amd64.tar.gz");
        pack(&dist.join(&file), &built)?;
        if let [program] = built.as_slice() {
            let package = format!("{name}_{VERSION}_amd64.deb");
            let script = root().join("deploy/kubectl-package/build.sh");
            run(Command::new(script).arg(VERSION).arg(program).arg(dist.join(&package)))
                .with_context(|| format!("building the package {package}"))?;
            files.push(package);
            match downloads.map(str::to_owned).or_else(|| downloads_at_github(registry)) {
                Some(downloads) => {
                    let sum = sha256_file(&dist.join(&file))?;
                    write(&dist.join("krew-vm.yaml"), krew_manifest(&format!("{downloads}/{file}"), &sum))?;
                    files.push("krew-vm.yaml".to_owned());
                }
                None => {
                    println!("krew-vm.yaml is left out: it needs --downloads, the URL of the folder with these files")
                }
            }
        }
        files.push(file);
    }
    let chart = format!("vm-operator-{VERSION}.tgz");
    chart::pack(&dist.join(&chart), registry)?;
    files.push(chart);
    write(&dist.join("install.yaml"), manifest(registry, namespace)?)?;
    files.push("install.yaml".to_owned());
    let package = format!("vmop-agent_{VERSION}_all.deb");
    run(Command::new(root().join("deploy/guest-package/build.sh")).arg(VERSION).arg(dist.join(&package)))
        .context("building the guests' package")?;
    files.push(package);
    files.extend(sbom::write_into(&dist, &ALL)?);
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

/// Where GitHub has the files of this release of a repository, whose images are in its registry.
fn downloads_at_github(registry: &str) -> Option<String> {
    let repository = registry.strip_prefix("ghcr.io/").filter(|rest| rest.split('/').count() == 2)?;
    Some(format!("https://github.com/{repository}/releases/download/v{VERSION}"))
}

/// The manifest with which krew, kubectl's manager of plugins, installs `kubectl vm`
/// (<https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/>). It is for an index of one's own, or for `kubectl krew install
/// --manifest`: krew's public index takes no names as general as `vm`.
fn krew_manifest(url: &str, sha256: &str) -> String {
    format!(
        "apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: vm
spec:
  version: v{VERSION}
  shortDescription: Work with the virtual machines of vm-operator
  description: |
    Lists, starts, stops and explains the virtual machines that vm-operator
    runs in Kubernetes, shows their consoles, and checks and tests the
    templates of their objects.
  caveats: |
    For completion of what stands behind `kubectl vm`, put a link with the name
    kubectl_complete-vm to kubectl-vm into your PATH.
  platforms:
    - selector:
        matchLabels:
          os: linux
          arch: amd64
      uri: {url}
      sha256: {sha256}
      bin: kubectl-vm
      files:
        - from: kubectl-vm
          to: .
        - from: LICENSE
          to: .
"
    )
}

/// The CustomResourceDefinitions and the manager in a namespace, in one file.
pub fn manifest(registry: &str, namespace: &str) -> Result<String> {
    // kustomize takes its resources by relative paths only.
    let stage = dev_dir().join("manifest");
    make_dir(&stage)?;
    // VMs with tap devices take `privileged`, which is for an administrator to write.
    let labels = json!({ "pod-security.kubernetes.io/enforce": "baseline" });
    let object =
        json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": namespace, "labels": labels } });
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
    // The policy for VMs allows the runner's image that is built into the manager. A text in YAML may double a backslash.
    let own = "^localhost/vm-runner(";
    ensure!(deployed.contains(own), "the policy for VMs does not allow {own}");
    let deployed = deployed.replace(own, &format!("^{}/vm-runner(", registry.replace('.', "[.]")));
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

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn krew_finds_what_it_needs() {
        let manifest: Value = serde_yaml::from_str(&krew_manifest("https://example.org/a.tar.gz", "0123")).unwrap();
        assert_eq!(manifest["spec"]["version"], format!("v{VERSION}"));
        let short = manifest["spec"]["shortDescription"].as_str().unwrap();
        assert!(short.len() <= 50 && !short.ends_with('.'), "as krew's guide wants it: {short}");
        let platform = &manifest["spec"]["platforms"][0];
        assert_eq!((&platform["uri"], &platform["sha256"]), (&json!("https://example.org/a.tar.gz"), &json!("0123")));
        // What pack() puts into the archive.
        for (file, name) in platform["files"].as_array().unwrap().iter().zip([PLUGIN.name, "LICENSE"]) {
            assert_eq!(file["from"], name);
        }
        assert_eq!(platform["bin"], PLUGIN.name);
    }

    #[test]
    fn the_downloads_of_a_repository_at_github_follow_from_its_registry() {
        let expected = format!("https://github.com/owner/repo/releases/download/v{VERSION}");
        assert_eq!(downloads_at_github("ghcr.io/owner/repo"), Some(expected));
        for other in ["ghcr.io/owner", "localhost", "registry.example.org/owner/repo"] {
            assert_eq!(downloads_at_github(other), None, "{other}");
        }
    }
}
