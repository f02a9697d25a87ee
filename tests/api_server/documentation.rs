//! What the documentation and the cookbook print is what the programs print.
//!
//! People have programs that are built for release, so it must not depend on the profile:
//! `cargo test --release --features dev --test api_server documentation::`

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::Command,
};

use vm_operator::files;

use crate::support::{cluster::XTASK, managed_namespace::ManagedNamespace};

/// The folders of the cookbook.
pub fn recipes() -> Vec<(String, PathBuf)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/templates");
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path)).collect()
}

/// What `kubectl vm` prints about a folder; it must succeed.
pub fn kubectl_vm(arguments: &[&str], folder: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(arguments).arg(folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success(),
        "{arguments:?} {}\n{text}{}",
        folder.display(),
        String::from_utf8_lossy(&output.stderr)
    );
    text
}

#[test]
fn every_recipe_of_the_cookbook_is_short_and_passes_lint_and_its_tests() {
    assert!(recipes().len() >= 11);
    for (name, folder) in recipes() {
        // What it does; the schema says besides who may set what.
        let all = files::files(&folder).unwrap();
        let read = all.iter().filter(|(name, _)| !name.ends_with("values.schema.json"));
        let lines: usize = read.map(|(_, text)| text.lines().count()).sum();
        // One that changes the Pod and QEMU's command line has two templates.
        let has_both = ["pod.yaml.j2", "qemu/standard.yaml.j2"].iter().all(|file| all.contains_key(*file));
        assert!(lines <= if has_both { 55 } else { 35 }, "{name} has {lines} lines");
        kubectl_vm(&["lint", "--strict"], &folder);
        kubectl_vm(&["templates", "test"], &folder);
    }
    let set = Path::new(env!("CARGO_MANIFEST_DIR")).join("example/sets/import-disk");
    kubectl_vm(&["lint", "--strict"], &set);
    kubectl_vm(&["templates", "test"], &set);
}

/// The first part of the page about templates, done word by word in an empty directory, with a cluster that has the demo's VM.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_five_minutes_of_the_documentation_work_as_written() {
    let ns = ManagedNamespace::with_templates("five-minutes", &[]).await;
    ns.create_vm("demo", |_| ()).await;
    ns.vm_with_reason("demo", "Starting").await;
    let page = page();
    let section = page.split("## Five minutes").nth(1).unwrap().split("\n## ").next().unwrap();
    let section = section.replace("vmop-demo", ns.namespace.name());
    let folder = tempfile::tempdir().unwrap();
    let bin = tempfile::tempdir().unwrap();
    let plugin = format!(
        "#!/bin/sh\nif [ \"$1\" = vm ]; then shift; exec {} \"$@\"; fi\nPATH={} exec {XTASK} kubectl -- \"$@\"\n",
        env!("CARGO_BIN_EXE_kubectl-vm"),
        std::env::var("PATH").unwrap()
    );
    let kubectl = bin.path().join("kubectl");
    fs::write(&kubectl, plugin).unwrap();
    fs::set_permissions(&kubectl, PermissionsExt::from_mode(0o755)).unwrap();
    let path = format!("{}:{}", bin.path().display(), std::env::var("PATH").unwrap());
    let mut commands = 0;
    for block in section.split("```").skip(1).step_by(2) {
        let (language, text) = block.split_once('\n').unwrap();
        match language {
            "yaml" => fs::write(folder.path().join("vm.yaml"), text).unwrap(),
            "jinja" => fs::write(folder.path().join("my/pod.yaml.j2"), text).unwrap(),
            _ => {
                for part in format!("\n{text}").split("\n$ ").skip(1) {
                    let (command, expected) = part.split_once('\n').unwrap_or((part, ""));
                    let output = Command::new("sh")
                        .args(["-c", &format!("{command} 2>&1")])
                        .env("PATH", &path)
                        .env("KUBECONFIG", ns.cluster.kubeconfig())
                        .current_dir(folder.path())
                        .output()
                        .unwrap();
                    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), expected.trim_end(), "{command}");
                    commands += 1;
                }
            }
        }
    }
    assert!(commands > 13, "{commands}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
}

/// The page about templates.
fn page() -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/templates.md")).unwrap()
}

/// The VM of the page, for which the value `size` is wrong.
const VM: &str = "apiVersion: vmoperator.jdrupes.org/v1
kind: VirtualMachine
metadata: {name: apple}
spec:
  vm:
    maximumCpus: 2
    maximumRam: 2Gi
    disks:
      - volumeClaimTemplate:
          metadata: {name: system}
          spec: {resources: {requests: {storage: 4Gi}}}
  templateValues:
    size: huge
";

#[test]
fn the_errors_of_the_documentation_are_those_of_the_program() {
    let include = "a: 1\n{% include 'lib/y.j2' %}";
    let again = "{% include 'x.yaml.j2' %}";
    let schema = r#"{"properties": {"size": {"enum": ["small", "large"]}}}"#;
    let extends = "{% extends 'base/pod.yaml.j2' %}\n";
    let cases: &[&[(&str, String)]] = &[
        &[("pod.yaml.j2", "kind: Pod\nmetadata:\n  name: {{ vm.metadata.nam }}\n".into())],
        &[("pod.yaml.j2", "kind: Pod\nmetadata:\n  name: {{ vm.metadata.name }\n".into())],
        &[("pod.yaml.j2", format!("{extends}{{% block labels %}}\n    a: b\n"))],
        &[(
            "pod.yaml.j2",
            format!("{extends}{{% block containers %}}\n    - {{name: a, image: b}}\n{{% endblock %}}\n"),
        )],
        &[("x.yaml.j2", include.into()), ("lib/y.j2", again.into())],
        &[("values.schema.json", schema.into())],
    ];
    let page = page();
    for files in cases {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("vm.yaml"), VM).unwrap();
        for (name, text) in *files {
            let file = folder.path().join("my").join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm"))
            .args(["render", "-f", "vm.yaml", "--templates", "my"])
            .current_dir(folder.path())
            .output()
            .unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        // The manager reports the file in its own folder.
        let line = error.trim_end().strip_prefix("my/").unwrap_or(error.trim_end());
        assert!(
            page.lines().any(|documented| documented == line),
            "{files:?} gives {line:?}, which the page does not have"
        );
    }
}
