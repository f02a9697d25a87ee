//! The page about typical mistakes: a case is a folder in `tests/mistakes`, and the page has what the programs say about it.
//!
//! To write the page anew: `VM_OPERATOR_TEST_UPDATE=1 cargo test --features dev --test api_server mistakes`.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use serde_json::Value;
use vm_operator::files;

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace},
};

/// What stands in the page before the table that this test makes.
const MARK: &str = "<!-- The rest of this page is made by tests/api_server/mistakes.rs. -->\n";

struct Case {
    folder: PathBuf,
    title: String,
}

impl Case {
    fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Its template files.
    fn templates(&self) -> Vec<(String, String)> {
        files::files(&self.file("templates")).unwrap().into_iter().collect()
    }
}

fn cases(root: &Path) -> Vec<Case> {
    let mut folders: Vec<PathBuf> =
        fs::read_dir(root).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_dir()).collect();
    folders.sort();
    let title = |folder: &Path| fs::read_to_string(folder.join("about.txt")).unwrap().trim().to_owned();
    folders.into_iter().map(|folder| Case { title: title(&folder), folder }).collect()
}

/// What `kubectl vm` prints in a folder: standard output, standard error.
fn kubectl_vm(folder: &Path, arguments: &[&str]) -> (String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(arguments).current_dir(folder).output().unwrap();
    (String::from_utf8(output.stdout).unwrap(), String::from_utf8(output.stderr).unwrap())
}

/// The findings of lint, each in a line.
fn lint(folder: &Path, arguments: &[&str]) -> String {
    let (output, error) = kubectl_vm(folder, &[&["lint", "--format=json"], arguments].concat());
    let Ok(Value::Array(findings)) = serde_json::from_str(&output) else { return error };
    let line = |finding: &Value| {
        let text = |name: &str| finding[name].as_str().unwrap().to_owned();
        let place = ["line", "column"].iter().filter_map(|name| finding[name].as_u64());
        let place: String = place.map(|number| format!(":{number}")).collect();
        format!("{}[{}] {}{place}: {}", text("severity"), text("rule"), text("file"), text("message"))
    };
    if findings.is_empty() { "no finding".into() } else { findings.iter().map(line).collect::<Vec<_>>().join("\n") }
}

/// What a manager says about templates: that they are in force, or why not.
async fn live(ns: &ManagedNamespace, templates: &[(String, String)]) -> String {
    let before = ns.manager.log().len();
    let templates: Vec<(&str, &str)> = templates.iter().map(|(name, text)| (name.as_str(), text.as_str())).collect();
    ns.manager.change_templates(&templates);
    let line = eventually("a verdict of the manager", LIMIT, async || {
        let log = ns.manager.log();
        let is_verdict = |line: &&str| {
            ["new templates are not used", "new templates are in force"].iter().any(|words| line.contains(words))
        };
        log[before..].lines().find(is_verdict).map(str::to_owned)
    })
    .await;
    let error = line.split_once(" error=").map(|(_, error)| error.replace(ns.namespace.name(), "default"));
    error.map_or_else(|| "in force".into(), |error| without_hash(&error))
}

/// The text without the hash in the names of objects that are only tried out.
fn without_hash(text: &str) -> String {
    let parts = text.split("dry-run-");
    let without = |(at, part): (usize, &str)| if at == 0 { part.to_owned() } else { format!("dry-run{}", &part[8..]) };
    parts.enumerate().map(without).collect()
}

/// A cell of a table in Markdown, with the lines as code.
fn cell(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    let code = |line: &str| format!("`{}`", line.trim().replace('`', "'").replace('|', "\\|"));
    lines.map(code).collect::<Vec<_>>().join("<br>")
}

#[tokio::test]
async fn the_page_about_mistakes_has_what_the_programs_say() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = root.join("docs/mistakes.md");
    let folder = root.join("tests/mistakes");
    let all_rights = ManagedNamespace::with_templates("mistakes", &[]).await;
    let no_rights = ManagedNamespace::new("no-rights").await;
    for ns in [&all_rights, &no_rights] {
        ns.namespace.apply(&fs::read_to_string(folder.join("vm.yaml")).unwrap());
        ns.vm_with_reason("apple", "StoppedAsRequested").await;
    }
    // VMs are tried where none has their name: else the answer quotes all of that VM.
    let typos = all_rights.cluster.namespace("typos").await;
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    let mut rows = String::new();
    for case in cases(&folder) {
        let (rendered, error, found, live) = if case.file("vm.yaml").exists() {
            let (rendered, error) = kubectl_vm(&case.folder, &["render", "-f", "vm.yaml"]);
            let namespace = typos.name();
            let file = case.file("vm.yaml");
            let apply =
                ["apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", file.to_str().unwrap()];
            let live =
                all_rights.cluster.try_kubectl(&apply).unwrap_err().replace(&format!("{}/", case.folder.display()), "");
            (rendered, error, lint(&case.folder, &[empty, "-f", "vm.yaml"]), live)
        } else {
            let (rendered, error) =
                kubectl_vm(&case.folder, &["render", "-f", "../vm.yaml", "--templates", "templates"]);
            let ns = if case.file("without-rights").exists() { &no_rights } else { &all_rights };
            (rendered, error, lint(&case.folder, &["templates", "-f", "../vm.yaml"]), live(ns, &case.templates()).await)
        };
        let objects = rendered.lines().filter(|line| line.starts_with("kind: ")).count();
        let rendered = if error.is_empty() { format!("{objects} objects") } else { error };
        let name = case.folder.file_name().unwrap().to_str().unwrap();
        let cells = [&found, &rendered, &live].map(|text| cell(text)).join(" | ");
        rows += &format!("| [{}](../tests/mistakes/{name}) | {cells} |\n", case.title);
    }
    let text = fs::read_to_string(&page).unwrap();
    let (head, made) = text.split_once(MARK).unwrap();
    let table = format!(
        "\n| | `kubectl vm lint` | `kubectl vm render` | the manager, or the API server |\n|---|---|---|---|\n{rows}"
    );
    if std::env::var_os("VM_OPERATOR_TEST_UPDATE").is_some() {
        fs::write(&page, format!("{head}{MARK}{table}")).unwrap();
        return;
    }
    for (new, old) in table.lines().zip(made.lines()) {
        assert_eq!(new, old, "the page is old: see the head of this test");
    }
    assert_eq!(table, made);
}
