//! The Helm chart, of which `deploy/` is written: rendering, and the tests that need Helm.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use serde_json::Value;
use vm_operator::manager::check;

use crate::binaries::helm;
use crate::tools::{make_dir, read, remove, root, run, run_raw, sha256_file, write};
use crate::values_table;

/// The chart, from the top of the tree.
const CHART: &str = "deploy/chart/vm-operator";
/// Says of which files `deploy/` was written, so that a test sees without Helm that they have changed.
const SUMS: &str = "deploy/chart/written.sha256";
/// The CustomResourceDefinitions in the chart. They are made from the types, and so have no sum.
const DEFINITIONS: &str = "files/crds";
/// Stands for the release's namespace, which kustomize sets in what is written.
const NAMESPACE: &str = "set-by-kustomize";

/// What is written into a file of `deploy/` that is optional there: the values with which the chart has it.
const OPTIONS: &[(&str, &[&str])] = &[
    ("image-repository-claim.yaml", &["imageRepository.create=true"]),
    ("monitoring/pod-monitor.yaml", &["monitoring.podMonitor=true"]),
    ("monitoring/prometheus-rule.yaml", &["monitoring.rules=true"]),
    ("node-devices/namespace.yaml", &["nodeDevices.enabled=true"]),
    ("node-devices/plugin.yaml", &["nodeDevices.enabled=true"]),
    ("node-devices/service-account.yaml", &["nodeDevices.enabled=true"]),
    ("node-devices/trial.yaml", &["nodeDevices.enabled=true"]),
    ("priority/priority-class.yaml", &["priorityClass.create=true"]),
    ("web/deployment.yaml", &["web.enabled=true"]),
    ("web/role.yaml", &["web.enabled=true"]),
    ("web/service-account.yaml", &["web.enabled=true"]),
    ("web/service.yaml", &["web.enabled=true"]),
];
/// What the chart alone has: kustomize has its own ways.
const CHART_ONLY: &[&str] = &["crds.yaml", "monitoring/dashboard.yaml"];

/// What the chart renders with these arguments, by template: the documents as they are, with comments.
fn render(namespace: &str, args: &[&str]) -> Result<BTreeMap<String, Vec<String>>> {
    let mut command = Command::new(helm()?);
    // Objects of `helm test` are looked at in a test of their own.
    command
        .args(["template", "vm-operator", CHART, "--skip-tests", "--namespace", namespace])
        .args(args)
        .current_dir(root());
    let text = run(&mut command).context("rendering the chart")?;
    let mut documents: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for document in format!("\n{text}").split("\n---\n").filter(|text| !text.trim().is_empty()) {
        let (source, document) = document.split_once('\n').context("a document has a line with its template")?;
        let template = source.strip_prefix("# Source: vm-operator/templates/").context("a document has a template")?;
        documents.entry(template.to_owned()).or_default().push(format!("{}\n", document.trim()));
    }
    Ok(documents)
}

/// Writes the CustomResourceDefinitions, also into the chart.
pub fn write_definitions() -> Result<()> {
    for (name, text) in vm_operator::api::crd::files()? {
        write(&root().join(CHART).join(DEFINITIONS).join(&name), &text)?;
        write(&root().join("crds").join(name), text)?;
    }
    Ok(())
}

/// Writes `deploy/*.yaml`, the table of values, and the sums of all.
pub fn write_manifests() -> Result<()> {
    write(&root().join("deploy/monitoring/dashboard.json"), read(&root().join(CHART).join("files/dashboard.json"))?)?;
    let readme = root().join(CHART).join("README.md");
    write(&readme, values_table::into_page(&read(&readme)?, &read(&root().join(CHART).join("values.yaml"))?)?)?;

    let mut written = vec!["deploy/monitoring/dashboard.json".to_owned()];
    for (template, text) in kustomize_files()? {
        let path = format!("deploy/{template}");
        write(&root().join(&path), text)?;
        written.push(path);
    }
    written.extend(chart_files()?.into_iter().filter(|path| !path.contains(DEFINITIONS) && !path.ends_with(".md")));
    written.sort();
    let sums = written.iter().map(|path| Ok(format!("{}  {path}\n", sha256_file(&root().join(path))?)));
    write(&root().join(SUMS), sums.collect::<Result<String>>()?)?;
    println!("{} files of the chart and of deploy/ are up to date", written.len());
    Ok(())
}

/// The texts of `deploy/*.yaml`, by path below it.
fn kustomize_files() -> Result<BTreeMap<String, String>> {
    let mut files = render(NAMESPACE, &[])?;
    files.retain(|template, _| !CHART_ONLY.contains(&template.as_str()));
    for (template, values) in OPTIONS {
        let args: Vec<&str> = values.iter().flat_map(|value| ["--set", value]).collect();
        let documents = render(NAMESPACE, &args)?.remove(*template);
        files.insert((*template).to_owned(), documents.with_context(|| format!("{template} renders nothing"))?);
    }
    let of_kustomize = |(template, documents): (String, Vec<String>)| {
        // A name that has the namespace in the chart is fixed here: kustomize sets no namespace in names.
        let text = documents.join("---\n").replace(&format!("-{NAMESPACE}"), "");
        let lines = text.lines().filter(|line| line.trim() != format!("namespace: {NAMESPACE}"));
        let head = format!("# Written by `make manifests`: change {CHART}/templates/{template}.\n");
        (template, lines.fold(head, |text, line| text + line + "\n"))
    };
    Ok(files.into_iter().map(of_kustomize).collect())
}

/// Writes the chart as an archive, as `helm package` would. Its images are in the registry.
pub fn pack(archive: &Path, registry: &str) -> Result<()> {
    let stage = crate::tools::dev_dir().join("chart-package");
    remove(&stage)?;
    for path in chart_files()? {
        let name = Path::new(&path).strip_prefix(CHART)?;
        let target = stage.join("vm-operator").join(name);
        make_dir(target.parent().context("a file is in a folder")?)?;
        let mut text = read(&root().join(&path))?;
        if name == Path::new("values.yaml") {
            text = with_registry(&text, registry)?;
        }
        write(&target, text)?;
    }
    let mut command = Command::new("tar");
    command.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner", "--mtime=@0", "--mode=a+rX"]);
    command.args(["--use-compress-program", "gzip -9 -n", "--file"]).arg(archive);
    run(command.arg("--directory").arg(&stage).arg("vm-operator")).context("packing the chart").map(drop)
}

/// The values with another default of `image.registry`.
fn with_registry(values: &str, registry: &str) -> Result<String> {
    let (before, after) =
        values.split_once("\n  registry: localhost\n").context("values.yaml has no line `registry: localhost`")?;
    Ok(format!("{before}\n  registry: {registry}\n{after}"))
}

/// All files of the chart, from the top of the tree.
fn chart_files() -> Result<Vec<String>> {
    let mut folders = vec![root().join(CHART)];
    let mut files = vec![];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).with_context(|| format!("listing {}", folder.display()))? {
            let path = entry?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                files.push(path.strip_prefix(root())?.display().to_string());
            }
        }
    }
    Ok(files)
}

/// The namespace of the cases' releases.
const OF_CASES: &str = "operator";

/// Tests the chart with the real Helm. What it renders for the cases in `tests/chart` is in `expected.yaml` beside their values; the tests
/// without Helm look at that. With `VM_OPERATOR_TEST_UPDATE` these files are written instead.
pub fn test() -> Result<()> {
    let started = std::time::Instant::now();
    let mut lint = Command::new(helm()?);
    run(lint.args(["lint", "--strict", CHART]).current_dir(root())).context("helm lint")?;
    let mut count = 1;
    for (template, text) in kustomize_files()? {
        let file = root().join("deploy").join(&template);
        ensure!(read(&file)? == text, "deploy/{template} is not what the chart renders: run `make manifests`");
        count += 1;
    }
    let cases = entries(&root().join("tests/chart/cases"))?;
    ensure!(cases.len() >= 5, "tests/chart/cases has {} cases", cases.len());
    for case in &cases {
        check_case(case)?;
    }
    definitions_are_installed_as_they_are()?;
    the_archive_names_the_registry()?;
    let refused = entries(&root().join("tests/chart/refused"))?;
    for file in &refused {
        check_refused(file)?;
    }
    count += cases.len() + 2 + refused.len();
    install()?;
    println!("The chart passes {} checks ({:.0} s)", count + 1, started.elapsed().as_secs_f32());
    Ok(())
}

fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("listing {}", folder.display()))?;
    let mut paths: Vec<PathBuf> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<std::io::Result<_>>()?;
    paths.sort();
    Ok(paths)
}

fn check_case(folder: &Path) -> Result<()> {
    let (values, expected) = (folder.join("values.yaml"), folder.join("expected.yaml"));
    let mut documents = render(OF_CASES, &["--values", &values.display().to_string()])?;
    // They are in crds/.
    documents.remove("crds.yaml");
    let texts = documents.iter().flat_map(|(template, texts)| texts.iter().map(move |text| (template, text)));
    let without_comments = |text: &str| {
        let lines = text.lines().filter(|line| !line.trim_start().starts_with("# "));
        lines.fold(String::new(), |text, line| text + line + "\n")
    };
    let text = texts.fold(String::new(), |all, (template, text)| {
        format!("{all}---\n# Source: {template}\n{}", without_comments(text))
    });
    if std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_some() {
        return write(&expected, text);
    }
    let found = read(&expected)?;
    let line = found.lines().zip(text.lines()).position(|(found, text)| found != text).map_or(0, |line| line + 1);
    ensure!(
        found == text,
        "{}: from line {line} on it is not what the chart renders: VM_OPERATOR_TEST_UPDATE=1 make chart-test",
        expected.display()
    );
    Ok(())
}

/// The CustomResourceDefinitions come with the release's annotations, and are else word for word those of `crds/`.
fn definitions_are_installed_as_they_are() -> Result<()> {
    let rendered = render(OF_CASES, &["--set", "crds.annotations.note=x"])?.remove("crds.yaml").unwrap_or_default();
    let added = "  annotations:\n    argocd.argoproj.io/sync-options: Prune=false,Delete=false\n    \
                 helm.sh/resource-policy: keep\n    kustomize.toolkit.fluxcd.io/prune: disabled\n    note: x\n";
    let rendered: BTreeSet<String> = rendered.iter().map(|text| text.replacen(added, "", 1)).collect();
    let files = vm_operator::api::crd::files()?;
    let own: BTreeSet<String> = files.into_iter().map(|(_, text)| format!("{}\n", text.trim())).collect();
    ensure!(rendered == own, "the chart does not render the CustomResourceDefinitions of crds/");
    for none in ["crds.install=false", "clusterWide=false"] {
        ensure!(!render(OF_CASES, &["--set", none])?.contains_key("crds.yaml"), "{none} installs definitions");
    }
    Ok(())
}

/// Helm takes the archive, whose manager is in the release's registry.
fn the_archive_names_the_registry() -> Result<()> {
    let archive = crate::tools::dev_dir().join("chart-test.tgz");
    pack(&archive, "registry.example.org/vms")?;
    let mut command = Command::new(helm()?);
    let text = run(command.arg("template").arg("vm-operator").arg(&archive)).context("rendering the archive")?;
    let image = concat!("image: registry.example.org/vms/vm-operator:", env!("CARGO_PKG_VERSION"), "\n");
    ensure!(text.contains(image), "the archive's manager has not the {image}");
    Ok(())
}

/// Values that are wrong, with what Helm says about them in the first line.
fn check_refused(file: &Path) -> Result<()> {
    let text = read(file)?;
    let message =
        text.lines().next().and_then(|line| line.strip_prefix("# ")).context("the first line is the message")?;
    let mut command = Command::new(helm()?);
    command.args(["template", "vm-operator", CHART, "--values"]).arg(file).current_dir(root());
    let output = run_raw(&mut command)?;
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(
        !output.status.success() && said.contains(message),
        "{}: Helm does not say `{message}`, but: {said}",
        file.display()
    );
    Ok(())
}

/// Installs, upgrades and uninstalls a release on a real API server.
fn install() -> Result<()> {
    let dir = crate::tools::dev_dir().join("chart-cluster");
    let kubeconfig = crate::cluster::up(&dir, true)?;
    let result = install_on(&kubeconfig);
    crate::cluster::down(&dir)?;
    result
}

fn install_on(kubeconfig: &Path) -> Result<()> {
    let program = helm()?;
    let helm = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.args(args).args(["--namespace", OF_CASES]).env("KUBECONFIG", kubeconfig).env("NO_PROXY", "*");
        run(command.current_dir(root())).with_context(|| format!("helm {}", args.join(" ")))
    };
    let kubectl = |args: &[&str]| {
        run(crate::binaries::kubectl_command()?.args(args).env("KUBECONFIG", kubeconfig)).context("kubectl")
    };
    let names = |kind: &str| kubectl(&["get", kind, "--all-namespaces", "--output=jsonpath={.items[*].metadata.name}"]);
    // No kubelet would boot the test's VM; `tests/node/mended.rs` has one.
    helm(&["install", "vm-operator", CHART, "--create-namespace", "--set=test.bootVm=false"])?;
    test_release(&program, kubeconfig)?;
    let definitions = names("customresourcedefinitions")?;
    ensure!(
        definitions == "vmpools.vmoperator.jdrupes.org vmreports.vmoperator.jdrupes.org vms.vmoperator.jdrupes.org",
        "{definitions}"
    );
    // A second release beside the first, without what the cluster has once.
    kubectl(&["create", "namespace", "second"])?;
    let second = ["--namespace=second", "--set=clusterWide=false", "--set=imageRepository.create=true"];
    let mut command = Command::new(&program);
    command.args(["install", "vm-operator", CHART]).args(second).env("KUBECONFIG", kubeconfig).env("NO_PROXY", "*");
    run(command.current_dir(root())).context("installing a second release")?;
    let vm = kubectl(&["create", "--filename=example/quickstart/vm.yaml", "--dry-run=client", "--output=json"])?;
    let mut vm: Value = serde_json::from_str(&vm).context("reading the example's VM")?;
    vm["metadata"]["namespace"] = OF_CASES.into();
    let folder = crate::tools::dev_dir().join("chart-test");
    make_dir(&folder)?;
    write(&folder.join("vm.json"), vm.to_string())?;
    kubectl(&["create", "--filename", &folder.join("vm.json").display().to_string()])?;
    let everything = root().join("tests/chart/cases/cluster/values.yaml");
    helm(&["upgrade", "vm-operator", CHART, "--values", &everything.display().to_string()])?;
    let bindings = names("clusterrolebindings")?;
    ensure!(bindings.split(' ').any(|name| name == "vm-operator"), "after the upgrade there are {bindings}");
    let roles = names("rolebindings")?;
    ensure!(roles.contains("vm-runner-report"), "{roles}");
    // VMs and their definitions stay, and so does the claim of CD images.
    helm(&["uninstall", "vm-operator"])?;
    let mut command = Command::new(&program);
    command.args(["uninstall", "vm-operator", "--namespace=second"]).env("KUBECONFIG", kubeconfig).env("NO_PROXY", "*");
    run(&mut command).context("uninstalling the second release")?;
    for (kind, expected) in [("vms", "demo"), ("persistentvolumeclaims", "vmop-image-repository"), ("deployments", "")]
    {
        let found = names(kind)?;
        if found != expected {
            bail!("after the uninstallation there are the {kind} {found:?}, and not {expected:?}");
        }
    }
    Ok(())
}

/// The arguments of the test Pod.
#[derive(clap::Parser)]
struct TestArguments {
    #[command(subcommand)]
    command: TestCommand,
}

#[derive(clap::Subcommand)]
enum TestCommand {
    Check(check::Options),
}

/// `helm test`, of a manager that is not ready and of one that is. The cluster has no kubelet: this runs what the test Pod would run, with the
/// rights of its account, and says how that ended.
fn test_release(helm: &Path, kubeconfig: &Path) -> Result<()> {
    const POD: &str = "vm-operator-test";
    let kubectl = |args: &[&str]| {
        let mut command = crate::binaries::kubectl_command()?;
        run(command.args(["--namespace", OF_CASES]).args(args).env("KUBECONFIG", kubeconfig)).context("kubectl")
    };
    for is_ready in [false, true] {
        if is_ready {
            let managers = ["--selector=app.kubernetes.io/component=manager", "--output=name"];
            let manager = kubectl(&[&["get", "pods"] as &[&str], &managers].concat())?;
            let ready = r#"{"status": {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}}"#;
            kubectl(&["patch", manager.trim(), "--subresource=status", "--type=merge", "--patch", ready])?;
            kubectl(&["rollout", "status", "deployment/vm-operator", "--timeout=60s"])?;
            kubectl(&["delete", "pod", POD])?;
        }
        let mut test = Command::new(helm);
        test.args(["test", "vm-operator", "--namespace", OF_CASES, "--timeout=60s"]);
        test.env("KUBECONFIG", kubeconfig).env("NO_PROXY", "*").stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut test = test.spawn().context("starting helm test")?;
        let result = play_pod(kubeconfig, &kubectl, POD);
        if result.is_err() {
            test.kill().context("ending helm test")?;
        }
        let ended = test.wait_with_output().context("waiting for helm test")?;
        let said = result?;
        let words =
            if is_ready { "the API server takes a VM in the namespace operator" } else { "the manager is not ready" };
        ensure!(said.contains(words), "the test of the release does not say `{words}`, but: {said}");
        ensure!(
            ended.status.success() == is_ready,
            "helm test ends with {}: {}",
            ended.status,
            String::from_utf8_lossy(&ended.stderr)
        );
    }
    let left = kubectl(&["get", "pods,roles,serviceaccounts", "--output=name"])?;
    ensure!(!left.contains(POD), "after helm test there is still something of it:\n{left}");
    Ok(())
}

/// Runs the container of a Pod when that exists, and writes into its status how it ended. Returns what was said.
fn play_pod(kubeconfig: &Path, kubectl: &dyn Fn(&[&str]) -> Result<String>, name: &str) -> Result<String> {
    kubectl(&["wait", "--for=create", &format!("pod/{name}"), "--timeout=60s"])?;
    let pod: Value = serde_json::from_str(&kubectl(&["get", "pod", name, "--output=json"])?)?;
    let container = &pod["spec"]["containers"][0];
    let args = container["args"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let TestCommand::Check(options) = TestArguments::try_parse_from(["vm-operator"].into_iter().chain(args))?.command;
    let account = pod["spec"]["serviceAccountName"].as_str().context("the Pod has an account")?;
    let checked = tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
        let mut file = kube::config::Kubeconfig::read_from(kubeconfig)?;
        let user =
            file.auth_infos.first_mut().and_then(|user| user.auth_info.as_mut()).context("a kubeconfig has a user")?;
        user.impersonate = Some(format!("system:serviceaccount:{OF_CASES}:{account}"));
        let config = kube::Config::from_custom_kubeconfig(file, &kube::config::KubeConfigOptions::default()).await?;
        check::check(&options, config).await
    });
    let (phase, said) = match checked {
        Ok(checked) => ("Succeeded", checked.to_string()),
        Err(error) => ("Failed", format!("{error:#}")),
    };
    let status = format!(r#"{{"status": {{"phase": "{phase}"}}}}"#);
    kubectl(&["patch", "pod", name, "--subresource=status", "--type=merge", "--patch", &status])?;
    Ok(said)
}
