//! What is in the repository because something else says so.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "this is test code")]

#[path = "files/chart.rs"]
mod chart;
#[path = "files/gitops.rs"]
mod gitops;
#[path = "files/import_disk.rs"]
mod import_disk;
#[path = "files/named_tests.rs"]
mod named_tests;
#[path = "files/structure.rs"]
mod structure;
#[cfg(feature = "dev")]
#[path = "xtask/values_table.rs"]
mod values_table;
#[path = "files/web_assets.rs"]
mod web_assets;

use std::{fs, path::Path, process::Command};

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// `crds/` is made from the types.
#[test]
fn the_crds_are_those_of_the_types() {
    let files = vm_operator::api::crd::files().unwrap();
    assert_eq!(files.len(), 3, "VirtualMachine, VmPool and VmReport");
    for (name, text) in files {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("crds").join(&name);
        assert_eq!(fs::read_to_string(file).unwrap(), text, "crds/{name} is old: run `make crds`");
    }
}

/// The manifests name the images of this version.
#[test]
fn the_manifests_are_of_this_version() {
    for file in [
        "deploy/deployment.yaml",
        "deploy/node-devices/plugin.yaml",
        "deploy/node-devices/trial.yaml",
        "example/quickstart/guest-disk.yaml",
        "example/vmctl/deployment.yaml",
        "example/vmctl/stateful-set.yaml",
        "example/vmctl/daemon-set.yaml",
    ] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        let image = text.lines().find(|line| line.trim().starts_with("image: localhost/")).unwrap();
        assert!(image.ends_with(concat!(":", env!("CARGO_PKG_VERSION"))), "{file}: {image}");
    }
}

/// The runner and vmctl are in many Pods: they must not bring what only the manager needs.
#[test]
fn the_runner_and_vmctl_have_no_server_and_no_controller() {
    let lacks = |feature: &str, unwanted: &[&str]| {
        let feature = format!("--features={feature}");
        let output = Command::new(env!("CARGO"))
            .args(["tree", "--offline", "--prefix=none", "--edges=normal", "--no-default-features", &feature])
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .unwrap();
        let tree = String::from_utf8(output.stdout).unwrap();
        assert!(tree.contains("kube-client "), "{}", String::from_utf8_lossy(&output.stderr));
        for name in unwanted {
            assert!(!tree.lines().any(|line| line.starts_with(name)), "{feature} depends on {name}");
        }
    };
    lacks("runner", &["axum ", "kube-runtime ", "kube-cel ", "cel ", "rcgen ", "clap_complete "]);
    lacks("vmctl", &["axum ", "kube-cel ", "cel ", "rcgen ", "clap_complete ", "jsonschema "]);
}

/// What somebody sees of the manager's metrics: the table in the documentation, the dashboard, the alerts.
#[cfg(feature = "manager")]
mod monitoring {
    use std::{
        collections::{BTreeMap, BTreeSet},
        fs,
        path::Path,
    };

    use serde_json::{Value, json};
    use vm_operator::metrics::{Metrics, VmSummary};

    fn read(path: &str) -> String {
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap()
    }

    struct Described {
        kind: String,
        help: String,
        /// All names that a query can use for it.
        names: Vec<String>,
        /// Its labels, with those that Prometheus adds.
        labels: BTreeSet<String>,
    }

    /// All metrics that the manager has, by name.
    fn described() -> BTreeMap<String, Described> {
        let metrics = Metrics::new();
        metrics.vms_from(|| {
            let condition = json!({ "type": "Ready", "status": "False", "reason": "Starting", "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z" });
            let vm = json!({ "metadata": { "name": "apple" }, "spec": { "vm": { "maximumCpus": 1 } },
                "status": { "conditions": [condition] } });
            vec![VmSummary::of(&serde_json::from_value(vm).unwrap())]
        });
        let text = metrics.text();
        let lines = |what: &str| {
            let lines =
                text.lines().filter_map(move |line| line.strip_prefix("# ")?.strip_prefix(what)?.split_once(' '));
            lines.map(|(name, rest)| (name.to_owned(), rest.to_owned())).collect::<BTreeMap<_, _>>()
        };
        let mut types = lines("TYPE ");
        let suffixes = |kind: &str| match kind {
            "counter" => vec!["_total"],
            "histogram" => vec!["_bucket", "_sum", "_count"],
            "info" => vec!["_info"],
            _ => vec![""],
        };
        let mut described = BTreeMap::new();
        for (name, help) in lines("HELP ") {
            let kind = types.remove(&name).unwrap();
            let names: Vec<String> = suffixes(&kind).into_iter().map(|suffix| format!("{name}{suffix}")).collect();
            let samples = text.lines().filter(|line| names.iter().any(|name| line.starts_with(&format!("{name}{{"))));
            let labels = samples.flat_map(labels_in).chain(["namespace", "pod"]).map(str::to_owned).collect();
            described.insert(name, Described { kind, help, names, labels });
        }
        assert!(types.is_empty() && described.len() > 20, "{types:?} without help, {} with", described.len());
        described
    }

    /// The names of metrics in a query.
    fn names(query: &str) -> BTreeSet<String> {
        let words = query.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
        words
            .filter(|word| word.starts_with("vm_operator_") || word.starts_with("process_"))
            .map(str::to_owned)
            .collect()
    }

    /// What stands between `open` and `close`, each time, divided by commas.
    fn lists<'a>(text: &'a str, open: &'a str, close: char) -> impl Iterator<Item = &'a str> {
        let lists = text.split(open).skip(1).filter_map(move |rest| rest.split_once(close));
        lists.flat_map(|(list, _)| list.split(',').map(str::trim))
    }

    /// The labels that a query uses.
    fn labels_in(query: &str) -> impl Iterator<Item = &str> {
        let matched = lists(query, "{", '}').filter_map(|matcher| Some(matcher.split_once('=')?.0));
        let clauses = ["by (", "without (", "on (", "ignoring (", "group_left (", "group_right ("];
        matched.chain(clauses.into_iter().flat_map(move |open| lists(query, open, ')')))
    }

    /// The labels of a result that a text shows.
    fn labels_shown(text: &str) -> impl Iterator<Item = &str> {
        let shown = lists(text, "{{", '}').map(|name| name.strip_prefix("$labels.").unwrap_or(name));
        shown.filter(|name| *name != "$value")
    }

    #[test]
    fn the_documentation_lists_every_metric() {
        let page = read("docs/monitoring.md");
        for (name, Described { kind, help, names, .. }) in described() {
            let shown = if kind == "histogram" { &name } else { &names[0] };
            let row = format!("| `{shown}` | {kind} | {help} |");
            assert!(page.contains(&row), "docs/monitoring.md lacks the row\n{row}");
        }
    }

    /// The metrics that a query uses, all of which there must be, and all labels that it and what is said of its results name.
    fn used<'a>(described: &'a BTreeMap<String, Described>, query: &str, texts: &[&str]) -> Vec<&'a Described> {
        let find = |name: &String| {
            let found = described.values().find(|metric| metric.names.contains(name));
            found.unwrap_or_else(|| panic!("there is no {name}, as in {query}"))
        };
        let used: Vec<&Described> = names(query).iter().map(find).collect();
        for label in labels_in(query).chain(texts.iter().flat_map(|text| labels_shown(text))) {
            assert!(used.iter().any(|metric| metric.labels.contains(label)), "nothing in {query} has a label {label}");
        }
        used
    }

    #[test]
    fn the_dashboard_and_the_alerts_name_metrics_and_labels_that_exist() {
        let described = described();
        let dashboard: Value = serde_json::from_str(&read("deploy/monitoring/dashboard.json")).unwrap();
        let mut shown = BTreeSet::new();
        for panel in dashboard["panels"].as_array().unwrap() {
            let description = panel["description"].as_str().unwrap();
            for target in panel["targets"].as_array().unwrap() {
                let legend = target["legendFormat"].as_str().unwrap_or_default();
                for metric in used(&described, target["expr"].as_str().unwrap(), &[legend]) {
                    assert!(description.contains(&metric.help), "panel {}: {}", panel["title"], metric.help);
                    shown.insert(&metric.names);
                }
            }
        }
        assert!(shown.len() > 15, "{shown:?}");
        let rules: Value = serde_yaml::from_str(&read("deploy/monitoring/prometheus-rule.yaml")).unwrap();
        let rules = rules["spec"]["groups"][0]["rules"].as_array().unwrap();
        assert!(!rules.is_empty());
        for rule in rules {
            let annotation = |name: &str| rule["annotations"][name].as_str().unwrap_or_default();
            let texts = [annotation("summary"), annotation("description")];
            assert!(!used(&described, rule["expr"].as_str().unwrap(), &texts).is_empty(), "{rule}");
            assert!(!texts[1].is_empty(), "{}: what is to be done?", rule["alert"]);
        }
    }
}

mod documentation {
    use super::*;

    fn pages() -> Vec<std::path::PathBuf> {
        let docs = fs::read_dir(root().join("docs")).unwrap().map(|entry| entry.unwrap().path());
        let pages = docs
            .chain(["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name)));
        pages.filter(|path| path.extension().is_some_and(|end| end == "md")).collect()
    }

    /// What is between `start` and `end`, each time.
    fn between<'a>(text: &'a str, start: &str, end: char) -> Vec<&'a str> {
        text.split(start).skip(1).filter_map(|rest| rest.split(end).next()).collect()
    }

    /// The table of reasons is the one that the enum makes.
    #[test]
    fn the_page_about_vms_explains_every_reason() {
        let page = fs::read_to_string(root().join("docs/virtual-machines.md")).unwrap();
        let table = vm_operator::api::Reason::markdown();
        assert!(page.contains(&table), "docs/virtual-machines.md lacks this table:\n{table}");
    }

    /// What is a table in the code is the same table in the documentation.
    #[test]
    #[cfg(feature = "schema")]
    fn the_page_about_templates_lists_blocks_functions_and_rules() {
        use vm_operator::{lint::Rule, render::builtin::BLOCKS, render::functions::TABLE};

        let cell = |text: &str| text.replace('|', "\\|");
        let blocks = BLOCKS
            .iter()
            .map(|(template, block, about, since)| format!("| `{template}` | `{block}` | {about} | {since} |"));
        let functions = TABLE.iter().map(|it| {
            let [usage, about, example, gives] = [it.usage, it.about, it.example, it.gives].map(cell);
            format!("| `{usage}` | {about} | `{example}` | `{gives}` |")
        });
        let rules = Rule::ALL.iter().map(|rule| format!("| `{}` | {} |", rule.name(), rule.about()));
        let page = fs::read_to_string(root().join("docs/templates.md")).unwrap();
        let missing: Vec<String> =
            blocks.chain(functions).chain(rules).filter(|row| !page.contains(&format!("{row}\n"))).collect();
        assert!(missing.is_empty(), "docs/templates.md lacks the rows\n{}", missing.join("\n"));
    }

    /// The sources whose messages the page about the log explains, without their unit tests.
    fn sources_that_log() -> Vec<(String, String)> {
        fn files(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    files(&path, found);
                } else {
                    found.push(path);
                }
            }
        }
        let mut found = vec![];
        files(&root().join("src"), &mut found);
        let names = found.iter().map(|path| path.strip_prefix(root().join("src")).unwrap().display().to_string());
        let logging = names.filter(|name| {
            ["client", "cluster", "manager", "node_devices", "process", "runner", "web"]
                .iter()
                .any(|module| name.starts_with(module))
                && Path::new(name).extension().is_some_and(|end| end == "rs")
                && !name.ends_with("tests.rs")
                && !name.contains("tests/")
        });
        let code = |name: &str| fs::read_to_string(root().join("src").join(name)).unwrap();
        logging.map(|name| (code(&name).split("#[cfg(test)]\nmod ").next().unwrap().to_owned(), name)).collect()
    }

    /// The message in the arguments of a macro such as `info!`: the first text that is an argument by itself, not the value of a
    /// key. Placeholders become `...`.
    fn message(arguments: &str) -> Option<String> {
        let (mut depth, mut before) = (0, ',');
        let mut characters = arguments.chars();
        while let Some(character) = characters.next() {
            match character {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' if depth == 0 => return None,
                ')' | ']' | '}' => depth -= 1,
                '"' => {
                    let mut text = String::new();
                    while let Some(character) = characters.next().filter(|character| *character != '"') {
                        text.push(character);
                        if character == '\\' {
                            text.extend(characters.next());
                        }
                    }
                    if depth == 0 && before == ',' {
                        let mut parts = text.split('{');
                        let first = parts.next().unwrap().to_owned();
                        let rest = parts.map(|part| format!("...{}", part.split_once('}').unwrap().1));
                        return Some(rest.fold(first, |text, part| text + &part));
                    }
                }
                _ => {}
            }
            if !character.is_whitespace() {
                before = character;
            }
        }
        None
    }

    #[test]
    fn the_message_of_a_log_line_is_found_in_its_source() {
        let found = |arguments| message(arguments).unwrap_or_default();
        assert_eq!(found(r#"vm, error = %Chain(&error), "can't \"go\"")"#), r#"can't \"go\""#);
        assert_eq!(found(r#"set = name.unwrap_or("all"), to = "x", "{kind}s go: {}", 1)"#), "...s go: ...");
        assert_eq!(message(r#"%error); info!("later")"#), None);
    }

    /// Each message that the manager and the runner log for operators is explained, and no message that is not logged any more.
    #[test]
    fn the_page_about_the_log_explains_every_message() {
        let mut logged = std::collections::BTreeSet::new();
        for (code, name) in sources_that_log() {
            for level in ["info", "warn", "error"] {
                let start = format!("{level}!(");
                for (at, _) in code.match_indices(&start) {
                    if code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_') {
                        continue;
                    }
                    let message = message(&code[at + start.len()..]);
                    let message = message.unwrap_or_else(|| panic!("src/{name}: {start} has no message"));
                    // One that is only a placeholder is described in words.
                    if message.replace("...", "").chars().any(char::is_alphabetic) {
                        logged.insert(format!("| {} | `{message}` |", level.to_uppercase()));
                    }
                }
            }
        }
        let page = fs::read_to_string(root().join("docs/logging.md")).unwrap();
        let rows = page
            .lines()
            .filter(|line| ["| INFO | `", "| WARN | `", "| ERROR | `"].iter().any(|row| line.starts_with(row)));
        let explained = rows.map(|row| row.split_inclusive('|').take(3).collect()).collect();
        let missing: Vec<&String> = logged.difference(&explained).collect();
        let old: Vec<&String> = explained.difference(&logged).collect();
        assert!(
            logged.len() > 40 && missing.is_empty() && old.is_empty(),
            "docs/logging.md lacks {missing:#?}, and has {old:#?}"
        );
    }

    #[test]
    fn links_lead_to_files_that_exist() {
        let mut checked = 0;
        for page in pages() {
            let text = fs::read_to_string(&page).unwrap();
            for link in between(&text, "](", ')') {
                let file = link.split('#').next().unwrap();
                if !file.is_empty() && !link.contains("://") {
                    assert!(page.with_file_name(file).exists(), "{}: {link}", page.display());
                    checked += 1;
                }
            }
        }
        assert!(checked > 20, "{checked}");
    }
}
