//! lint: what is wrong with a folder of templates, or may surprise, found without a cluster.
//!
//! ```text
//!  Sources ─▶ compile ─▶ names, blocks, text ─▶ render example machines ─▶ objects: guard rails, Kubernetes' schema, traps
//! ```
//!
//! All of it is pure: files come in as text, findings go out.

pub mod openapi;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use serde_json::Value;

use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::{CONTAINER_NAME, ObjectKey, Rendered},
    render::{
        Files, Library, Sources, TemplateError, TemplateSet,
        context::TOOL_LABELS,
        first_start,
        outline::{Mention, Outline},
        schema,
    },
};

/// How bad it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The manager would not use the set, or the API server would refuse what it makes.
    Error,
    /// It works, but probably not as meant.
    Warning,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Finding {
    /// The file in the folder.
    pub file: String,
    /// The line in it, from 1, if it is known.
    pub line: Option<usize>,
    /// The column in that line, from 1.
    pub column: Option<usize>,
    /// How bad it is.
    pub severity: Severity,
    /// A name for this kind of finding.
    pub rule: &'static str,
    /// What is wrong and what to do.
    pub message: String,
}

/// The kinds of findings, each with what it is about.
pub const RULES: &[(&str, &str)] = &[
    ("compile", "a file that can't be used: syntax, an unknown block, a patch or a schema that is none"),
    ("render", "a machine of the examples that can't be rendered, or an object that templates may not make"),
    ("unknown-variable", "a name that the context does not have"),
    ("deprecated", "a part of the context that goes with a later release"),
    ("unknown-template", "a template that is included, imported or extended, and is not there"),
    ("unknown-import", "a macro or variable that the imported template does not have"),
    ("lost-text", "text outside of blocks in a template that extends another: it is never rendered"),
    ("unused-file", "a file that the manager does not look at"),
    ("schema", "an object that does not fit Kubernetes' schema: an unknown field, a wrong type"),
    ("yaml-boolean", "a word that other YAML parsers read as a boolean and this one reads as a text"),
    ("yaml-number", "a word such as 1e3 or 0x10 that is a number, though it does not look like one"),
    ("null", "a field that is null and therefore left out"),
    ("string-data", "a Secret's stringData, of which the API server keeps nothing: use data and b64encode"),
    ("joined-value", "an expression that touches other text: its value has quotes of its own"),
    ("shared-name", "an object of the same name for two machines"),
    ("no-runner", "a Pod without the container in which QEMU runs"),
    (
        "tool-label",
        "a label or annotation that belongs to a tool, which would take the object for its own and delete it",
    ),
];

/// Annotations by which tools know what is theirs.
const TOOL_ANNOTATIONS: [&str; 4] = [
    "argocd.argoproj.io/tracking-id",
    "kubectl.kubernetes.io/last-applied-configuration",
    "meta.helm.sh/release-name",
    "meta.helm.sh/release-namespace",
];

impl Finding {
    fn at(file: &str, mention: &Mention, severity: Severity, rule: &'static str, message: String) -> Self {
        Self { file: file.into(), line: Some(mention.line), column: Some(mention.column), severity, rule, message }
    }

    fn of(file: &str, severity: Severity, rule: &'static str, message: String) -> Self {
        Self { file: file.into(), line: None, column: None, severity, rule, message }
    }

    fn error(rule: &'static str, error: &TemplateError) -> Self {
        let TemplateError { template, line, column, message } = error.clone();
        Self { file: template, line, column, severity: Severity::Error, rule, message }
    }
}

/// Checks all sets of a folder with example machines; those that choose a set are rendered with it, the others with each.
pub fn lint(sources: &Sources, machines: &[VirtualMachine], config: &ReconcilerConfig) -> Vec<Finding> {
    let mut findings = BTreeSet::new();
    for (prefix, files) in folders(sources) {
        findings.extend(files.iter().flat_map(|(name, text)| file(&format!("{prefix}{name}"), name, text)));
    }
    let library = Library::new(sources);
    for (name, set) in library.all() {
        let set = match set {
            Ok(set) => set,
            Err(error) => {
                findings.insert(Finding::error("compile", error));
                continue;
            }
        };
        findings.extend(names(set));
        // What several machines show is one finding.
        let mut shown: BTreeMap<Finding, (String, Vec<&str>)> = BTreeMap::new();
        let mut made: BTreeMap<(Option<String>, ObjectKey), &str> = BTreeMap::new();
        for vm in machines {
            let chosen = vm.template_set();
            if chosen.is_some() && chosen != name {
                continue;
            }
            let machine = vm.metadata.name.as_deref().unwrap_or_default();
            let (rendered, found) = objects(set, vm, config);
            for finding in found {
                let message = finding.message.clone();
                let general = Finding { message: message.replace(machine, "*"), ..finding };
                shown.entry(general).or_insert_with(|| (message, Vec::new())).1.push(machine);
            }
            for object in rendered {
                let key = (vm.metadata.namespace.clone(), object.key.clone());
                if let Some(other) = made.insert(key, machine).filter(|other| *other != machine) {
                    let message = format!(
                        "{} is made for {other} and for {machine}: its name must have the machine's name in it",
                        object.key
                    );
                    let finding = Finding::of(&object.template, Severity::Error, "shared-name", message);
                    findings.insert(locate(finding, &set.source(&object.name).unwrap_or_default(), &object.key.name));
                }
            }
        }
        findings.extend(shown.into_iter().map(|(finding, (mut message, machines))| {
            if finding.rule == "render" || machines.len() > 1 {
                let word = if machines.len() == 1 { "machine" } else { "machines" };
                message += &format!(" ({word} {})", machines.join(", "));
            }
            Finding { message, ..finding }
        }));
    }
    for vm in machines {
        let chosen = vm.template_set();
        if let Some(chosen) = chosen.filter(|chosen| !sources.sets.contains_key(*chosen))
            && let Err(error) = library.get(Some(chosen))
        {
            findings.insert(Finding::error("render", &error));
        }
    }
    // Where a name is wrong, rendering says so once more.
    let lines: BTreeSet<_> = findings.iter().filter(|it| it.rule.starts_with("unknown")).map(place).collect();
    findings.into_iter().filter(|it| it.rule != "render" || !lines.contains(&place(it))).collect()
}

fn place(finding: &Finding) -> (String, Option<usize>) {
    (finding.file.clone(), finding.line)
}

/// The files of each set with what stands before their names.
fn folders(sources: &Sources) -> impl Iterator<Item = (String, &Files)> {
    let sets = sources.sets.iter().map(|(name, files)| (format!("sets/{name}/"), files));
    std::iter::once((String::new(), &sources.base)).chain(sets)
}

/// Whether the manager looks at a file of that name.
pub fn is_part_of_a_set(name: &str) -> bool {
    [".j2", ".yaml", ".yml"].iter().any(|end| name.ends_with(end)) || name == "values.schema.json"
}

/// What a file's text shows.
fn file(place: &str, name: &str, text: &str) -> Vec<Finding> {
    let mut findings = Vec::new();
    if !is_part_of_a_set(name) {
        let message = format!("{name} is no template, patch or values: the manager does not look at it");
        findings.push(Finding::of(place, Severity::Warning, "unused-file", message));
        return findings;
    }
    if name.ends_with(".j2") {
        let outline = Outline::of(text);
        if let (Some(extends), Some(lost)) = (&outline.extends, &outline.text) {
            let message = format!(
                "{:?} stands outside of a block and is never rendered, because the template extends {}",
                lost.name, extends.name
            );
            findings.push(Finding::at(place, lost, Severity::Warning, "lost-text", message));
        }
    }
    findings.extend(lines(place, text, name.ends_with(".yaml.j2")));
    findings
}

/// What single lines show, of a template that becomes YAML or of another file.
fn lines(place: &str, text: &str, becomes_yaml: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut warn = |line: usize, column: usize, rule, message: String| {
        let mention = Mention { name: String::new(), line, column };
        findings.push(Finding::at(place, &mention, Severity::Warning, rule, message));
    };
    // How far the line is indented that begins a block of text (`|` or `>`), while we are in it.
    let mut block: Option<usize> = None;
    for (line, number) in text.lines().zip(1..) {
        let trimmed = line.trim();
        let indent = line.len() - line.trim_start().len();
        if !trimmed.is_empty() && !trimmed.starts_with("{%") {
            block = block.filter(|begin| indent > *begin);
        }
        if becomes_yaml {
            let bare = block.and_then(|_| expressions(line).find(|(start, end)| !is_bare(&line[*start..*end])));
            if let Some((start, _)) = bare {
                let message = "a value is written as JSON, with quotes of its own, also inside a block of text: write \
                               {{ x | safe }} for the bare text";
                warn(number, column(line, start), "joined-value", message.into());
            } else if let Some(start) = joined(line).filter(|_| block.is_none()) {
                let message = "a value is written as JSON, with quotes of its own: to make one text of it and something else, join \
                               them inside, as in {{ \"a-\" ~ x }}";
                warn(number, column(line, start), "joined-value", message.into());
            }
        }
        if block.is_some() {
            continue;
        }
        if ["|", "|-", "|+", ">", ">-", ">+"].iter().any(|mark| trimmed.ends_with(&format!(": {mark}"))) {
            block = Some(indent);
        }
        let Some((key, value)) = trimmed.split_once(": ") else { continue };
        let word = value.split(" #").next().unwrap_or(value).trim();
        let at = column(line, line.trim_end().len() - value.len());
        if !key.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_./ ".contains(&byte)) {
            continue;
        }
        match word.to_ascii_lowercase().as_str() {
            "yes" | "no" | "on" | "off" | "y" | "n" => {
                let message =
                    format!("{word} is the text {word:?} here, not a boolean: write true or false, or quote it");
                warn(number, at, "yaml-boolean", message);
            }
            "null" | "~" if becomes_yaml => {
                warn(number, at, "null", format!("a field that is null is left out of the object: take {key} out"));
            }
            _ => {
                if let Some(value) = odd_number(word) {
                    let message = format!("{word} is the number {value} here: write that, or quote it");
                    warn(number, at, "yaml-number", message);
                }
            }
        }
    }
    findings
}

/// The number that a word is to YAML though it is not written in decimal digits.
fn odd_number(word: &str) -> Option<serde_json::Number> {
    let is_plain = word.bytes().all(|byte| byte.is_ascii_digit() || b"-+.".contains(&byte));
    match serde_yaml::from_str(word) {
        Ok(Value::Number(number)) if !is_plain => Some(number),
        _ => None,
    }
}

/// The column of a byte in a line, from 1.
fn column(line: &str, byte: usize) -> usize {
    line[..byte].chars().count() + 1
}

/// Where the expressions of a line are, with their braces.
fn expressions(line: &str) -> impl Iterator<Item = (usize, usize)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let start = from + line[from..].find("{{")?;
        let end = line[start..].find("}}").map_or(line.len(), |at| at + start + 2);
        from = end;
        Some((start, end))
    })
}

/// Whether an expression is written without quotes.
fn is_bare(expression: &str) -> bool {
    expression.trim_end_matches("}}").trim_end().ends_with("| safe") || expression.contains("super()")
}

/// Where an expression begins that other text touches, which is then no YAML value: `"{{ x }}"`, `{{ x }}-y`.
fn joined(line: &str) -> Option<usize> {
    let touched = |(start, end): &(usize, usize)| {
        let before = line[..*start].chars().next_back().unwrap_or(' ');
        let after = line[*end..].chars().next().unwrap_or(' ');
        !(before.is_whitespace() || "[{(,}".contains(before)) || !(after.is_whitespace() || ",]}){:".contains(after))
    };
    let mut candidates = expressions(line).filter(|(start, end)| {
        // Not in what is itself a statement or a comment.
        !is_bare(&line[*start..*end]) && !line[..*start].contains("{%") && !line[..*start].contains(['#'])
    });
    candidates.find(touched).map(|(start, _)| start)
}

/// Names in a set's own templates that lead nowhere.
fn names(set: &TemplateSet) -> Vec<Finding> {
    let context = schema::context(None);
    let mut findings = Vec::new();
    let mentioned: BTreeSet<String> = set
        .all()
        .filter_map(|(name, _)| set.source(name))
        .flat_map(|source| {
            let outline = Outline::of(&source);
            outline.uses.into_iter().chain(outline.extends).map(|used| used.name)
        })
        .collect();
    for (name, place) in set.all().filter(|(_, place)| !place.starts_with("builtin/")) {
        let Some(source) = set.source(name) else { continue };
        let outline = Outline::of(&source);
        let variables = set.variables(name);
        // What another template imports or includes may come from there, too.
        let included = name.contains('/') || !name.ends_with(".yaml.j2");
        let mut seen = BTreeSet::new();
        for path in outline.paths.iter().filter(|path| {
            let root = path.name.split('.').next().unwrap_or_default();
            variables.contains(root)
        }) {
            let (index, known) = match schema::resolve(&context, &path.name) {
                Err(wrong) => wrong,
                Ok(None) => continue,
                Ok(Some(instead)) => {
                    let message = format!("{} is deprecated: {instead}", path.name);
                    findings.push(Finding::at(place, path, Severity::Warning, "deprecated", message));
                    continue;
                }
            };
            if (included && index == 0) || !seen.insert(path.name.clone()) {
                continue;
            }
            let parts: Vec<&str> = path.name.split('.').collect();
            let (before, missing) = (parts[..index].join("."), parts[index]);
            let help = help(missing, &known);
            let message = match index {
                0 => format!("the context has no {missing}: {help}"),
                _ => format!("{before} has no {missing}: {help}"),
            };
            findings.push(Finding::at(place, path, Severity::Error, "unknown-variable", message));
        }
        if included && !name.ends_with(".patch.yaml.j2") && !mentioned.contains(name) {
            let message = format!(
                "{name} is never rendered: only NAME.yaml.j2 at the top is, and no other file includes or imports it"
            );
            findings.push(Finding::of(place, Severity::Warning, "unused-file", message));
        }
        for used in outline.uses.iter().chain(&outline.extends).filter(|used| !set.has(&used.name)) {
            let message = format!("there is no template {:?} in this set", used.name);
            findings.push(Finding::at(place, used, Severity::Error, "unknown-template", message));
        }
        for import in &outline.imports {
            let Some(source) = set.source(&import.file) else { continue };
            let mut exports = Outline::of(&source).exports;
            exports.sort();
            let module = import.module.as_ref().map(|module| format!("{module}."));
            let by_module = outline.paths.iter().filter_map(|path| {
                let name = path.name.strip_prefix(module.as_deref()?)?;
                Some(Mention { name: name.split('.').next().unwrap_or(name).to_owned(), ..path.clone() })
            });
            let names = import.names.iter().map(|(name, _)| name.clone());
            for name in names.chain(by_module).filter(|it| !exports.contains(&it.name)) {
                let message = format!("{} has no {}: {}", import.file, name.name, help(&name.name, &exports));
                findings.push(Finding::at(place, &name, Severity::Error, "unknown-import", message));
            }
        }
    }
    findings
}

/// What to write instead of a name that is not there.
fn help(missing: &str, known: &[impl AsRef<str>]) -> String {
    let known: Vec<&str> = known.iter().map(AsRef::as_ref).collect();
    match known.iter().min_by_key(|name| distance(name, missing)) {
        Some(near) if distance(near, missing) <= 2 => format!("did you mean {near}?"),
        Some(_) => format!("there are {}", known.join(", ")),
        None => "there is nothing in it".to_owned(),
    }
}

/// The objects of a machine that are not the built-in templates' alone, and what is wrong with them.
fn objects(set: &TemplateSet, vm: &VirtualMachine, config: &ReconcilerConfig) -> (Vec<Rendered>, Vec<Finding>) {
    let mut objects = match first_start(vm, config, set) {
        Ok(objects) => objects,
        Err(error) => return (Vec::new(), vec![Finding::error("render", &error)]),
    };
    // The built-in templates have tests of their own.
    objects.retain(|object| !object.template.starts_with("builtin/") || !object.patches.is_empty());
    let findings = objects
        .iter()
        .flat_map(|object| {
            let findings = outcome(object, &set.source(&object.name).unwrap_or_default());
            findings.into_iter().map(|finding| blamed(finding, object, set)).collect::<Vec<_>>()
        })
        .collect();
    (objects, findings)
}

/// What does not come from the template comes from the patch that changed the object last.
fn blamed(finding: Finding, object: &Rendered, set: &TemplateSet) -> Finding {
    let Some(patch) = object.patches.last().filter(|_| finding.line.is_none()) else { return finding };
    let (layers, name) = (set.layers(), patch.rsplit('/').next().unwrap_or(patch));
    let named = layers.named.as_ref().and_then(|(_, files)| files.get(name));
    let text = named.or_else(|| layers.base.get(patch)).cloned().unwrap_or_default();
    let word = finding.message.split('\'').nth(1).unwrap_or_default().to_owned();
    locate(Finding { file: patch.clone(), ..finding }, &text, &word)
}

/// Where a word stands in a template, if it stands there: a field that its output has may come from elsewhere.
fn locate(mut finding: Finding, source: &str, word: &str) -> Finding {
    let is_part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole = |line: &str| {
        line.match_indices(word)
            .map(|(at, _)| at)
            .find(|at| !is_part(line[..*at].chars().next_back()) && !is_part(line[at + word.len()..].chars().next()))
    };
    // A statement is not what came out of it.
    let lines = source.lines().enumerate().filter(|(_, line)| !word.is_empty() && !line.trim_start().starts_with("{%"));
    let found = lines.filter_map(|(index, line)| Some((index, line[..whole(line)?].chars().count()))).next();
    if let Some((line, column)) = found {
        (finding.line, finding.column) = (Some(line + 1), Some(column + 1));
    }
    finding
}

/// One for each field that is not known: a schema names all of a map together.
fn each(wrong: String) -> Vec<String> {
    let names: Vec<&str> = wrong.split('\'').skip(1).step_by(2).collect();
    match wrong.split_once("Additional properties") {
        Some((head, _)) if names.len() > 1 => names
            .iter()
            .map(|name| format!("{head}Additional properties are not allowed ('{name}' was unexpected)"))
            .collect(),
        _ => vec![wrong],
    }
}

fn outcome(object: &Rendered, source: &str) -> Vec<Finding> {
    let schema = |wrong: String| {
        // The field that is not known, or the last of the path.
        let named = wrong.split('\'').nth(1).filter(|_| wrong.contains("Additional properties"));
        let path = wrong.split(": ").next().unwrap_or_default();
        let last = path.split('.').rfind(|part| part.parse::<usize>().is_err()).unwrap_or_default();
        let word = named.unwrap_or(last).to_owned();
        let finding = Finding::of(&object.template, Severity::Error, "schema", format!("{}: {wrong}", object.key));
        locate(finding, source, &word)
    };
    let mut findings: Vec<Finding> = openapi::check(&object.value).into_iter().flat_map(each).map(schema).collect();
    if let Some(c) =
        object.key.name.chars().find(|c| !(c.is_ascii_lowercase() || c.is_ascii_digit() || "-.".contains(*c)))
    {
        let message = format!("{}: {c:?} can't be part of a name: small letters, digits, - and . can", object.key);
        let finding = Finding::of(&object.template, Severity::Error, "schema", message);
        findings.push(locate(finding, source, &object.key.name));
    }
    let containers = object.value.pointer("/spec/containers").and_then(Value::as_array);
    if object.key.is_pod() && !containers.into_iter().flatten().any(|container| container["name"] == CONTAINER_NAME) {
        let message = format!(
            "{}: there is no container vm-runner, so no guest: does the block say {{{{ super() }}}}?",
            object.key
        );
        let finding = Finding::of(&object.template, Severity::Error, "no-runner", message);
        findings.push(locate(finding, source, "containers"));
    }
    if object.value.get("stringData").is_some() {
        let message = format!(
            "{}: the API server turns stringData into data, so the object would look changed for ever; write data with b64encode",
            object.key
        );
        let finding = Finding::of(&object.template, Severity::Error, "string-data", message);
        findings.push(locate(finding, source, "stringData"));
    }
    let annotations = object.value["metadata"]["annotations"].as_object().into_iter().flatten();
    for (annotation, _) in annotations.filter(|(annotation, _)| TOOL_ANNOTATIONS.contains(&annotation.as_str())) {
        let message =
            format!("{}: the annotation {annotation} is a tool's own note of what it has applied", object.key);
        let finding = Finding::of(&object.template, Severity::Warning, "tool-label", message);
        findings.push(locate(finding, source, annotation));
    }
    let labels = object.value["metadata"]["labels"].as_object().into_iter().flatten();
    for (label, _) in labels.filter(|(label, _)| {
        let tools = TOOL_LABELS.iter().filter(|tool| **tool != "app.kubernetes.io/");
        tools.clone().any(|tool| label.starts_with(tool))
    }) {
        let message =
            format!("{}: the label {label} belongs to a tool, which would take the object for its own", object.key);
        findings.push(locate(Finding::of(&object.template, Severity::Warning, "tool-label", message), source, label));
    }
    findings
}

/// How many letters must change to make one word the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut last = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let here = last + usize::from(x != *y);
            last = row[j + 1];
            row[j + 1] = here.min(last + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The line of a finding as SARIF wants it.
pub fn sarif(findings: &[Finding]) -> Value {
    let rules: Vec<Value> = RULES
        .iter()
        .map(|(id, about)| serde_json::json!({ "id": id, "shortDescription": { "text": about } }))
        .collect();
    let results: Vec<Value> = findings
        .iter()
        .map(|finding| {
            serde_json::json!({
                "ruleId": finding.rule, "level": finding.severity, "message": { "text": finding.message },
                "locations": [{ "physicalLocation": {
                    "artifactLocation": { "uri": finding.file },
                    "region": { "startLine": finding.line.unwrap_or(1), "startColumn": finding.column.unwrap_or(1) },
                } }],
            })
        })
        .collect();
    serde_json::json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0",
        "runs": [{ "tool": { "driver": { "name": "kubectl-vm", "rules": rules } }, "results": results }],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::vm;

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let base: Files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let sources = Sources { base, sets: BTreeMap::new() };
        let show = |finding: &Finding| {
            let at =
                finding.line.zip(finding.column).map(|(line, column)| format!(":{line}:{column}")).unwrap_or_default();
            format!("{}{at}: {:?} {}: {}", finding.file, finding.severity, finding.rule, finding.message)
        };
        lint(&sources, &[vm(|_| {})], &ReconcilerConfig::default()).iter().map(show).collect()
    }

    #[test]
    fn the_built_in_templates_are_clean() {
        assert_eq!(found(&[]), Vec::<String>::new());
    }

    #[test]
    fn each_rule_finds_its_own() {
        insta::assert_snapshot!(found(&[
            ("c.yaml.j2", "{% if vm.metadata.nam %}{% endif %}{% if displaysecret %}{% endif %}{% set x = 1 %}{{ x }}\n"),
            ("pod.yaml.j2", "{% extends \"builtin/pod.yaml.j2\" %}\nlost: 1\n{% block labels %}\n    on: yes # really\n    a: 1e3\n    b: 0x10\n    c: 10.0.0.1\n    d: 1e3x\n    e: ~\n{% endblock %}\n"),
            ("notes.txt", "hello"),
            ("d.yaml.j2", "{% include 'lib/nothing.j2' %}"),
            ("e.yaml.j2", "{% from 'lib/e.j2' import sidecarr %}\n{% import 'lib/e.j2' as lib %}\n{{ lib.port }}{{ lib.sidecar() }}{{ sidecarr() }}\n"),
            ("lib/e.j2", "{% macro sidecar() %}{% endmacro %}{% set ports = [1] %}"),
            ("f.yaml.j2", "{% from 'lib/f.j2' import side, sidecar %}{{ side() }}{{ sidecar() }}\n"),
            ("lib/f.j2", "{% from 'lib/e.j2' import sidecar as side %}"),
        ]).join("\n"), @r#"
        c.yaml.j2:1:7: Error unknown-variable: vm.metadata has no nam: did you mean name?
        c.yaml.j2:1:42: Error unknown-variable: the context has no displaysecret: did you mean displaySecret?
        d.yaml.j2:1:12: Error unknown-template: there is no template "lib/nothing.j2" in this set
        e.yaml.j2:1:27: Error unknown-import: lib/e.j2 has no sidecarr: did you mean sidecar?
        e.yaml.j2:3:4: Error unknown-import: lib/e.j2 has no port: did you mean ports?
        f.yaml.j2:1:33: Error unknown-import: lib/f.j2 has no sidecar: there are side
        notes.txt: Warning unused-file: notes.txt is no template, patch or values: the manager does not look at it
        pod.yaml.j2:2:1: Warning lost-text: "lost: 1" stands outside of a block and is never rendered, because the template extends builtin/pod.yaml.j2
        pod.yaml.j2:4:9: Warning yaml-boolean: yes is the text "yes" here, not a boolean: write true or false, or quote it
        pod.yaml.j2:5:8: Warning yaml-number: 1e3 is the number 1000.0 here: write that, or quote it
        pod.yaml.j2:6:8: Warning yaml-number: 0x10 is the number 16 here: write that, or quote it
        pod.yaml.j2:9:8: Warning null: a field that is null is left out of the object: take e out
        "#);
    }

    #[test]
    fn objects_are_held_against_the_schema_and_the_traps() {
        let service = "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  labels: {helm.sh/chart: x}\nspec:\n  \
                       ports: [{port: '1'}]\n  seletor: {}\n";
        let secret = "apiVersion: v1\nkind: Secret\nmetadata: {name: b}\nstringData: {a: b}\n";
        let patch = "target: {kind: ConfigMap, name: apple}\nmergePatch: {dta: {}}\n";
        let files = [("a.yaml.j2", service), ("b.yaml.j2", secret), ("x.patch.yaml", patch)];
        insta::assert_snapshot!(found(&files).join("\n"), @r#"
        a.yaml.j2:5:12: Warning tool-label: Service a: the label helm.sh/chart belongs to a tool, which would take the object for its own
        a.yaml.j2:7:12: Error schema: Service a: spec.ports.0.port: "1" is not of type "integer"
        a.yaml.j2:8:3: Error schema: Service a: spec: Additional properties are not allowed ('seletor' was unexpected)
        b.yaml.j2:4:1: Error string-data: Secret b: the API server turns stringData into data, so the object would look changed for ever; write data with b64encode
        x.patch.yaml:2:14: Error schema: ConfigMap apple: Additional properties are not allowed ('dta' was unexpected)
        "#);
    }

    #[test]
    fn values_beside_text_are_named() {
        for (line, column) in [
            ("a: \"{{ x }}\"", Some(5)),
            ("a: {{ x }}-y", Some(4)),
            ("a: x{{ x }}", Some(5)),
            ("a: {{ x }}", None),
            ("{a: [{{ x }}, {{ y }}], {{ x }}: {{ y }}}", None),
            ("- {{ x }} # text", None),
            ("a: {% if x %}{{ x }}{% endif %}", None),
            ("a: x{{ x | safe }}", None),
        ] {
            assert_eq!(joined(line).map(|at| at + 1), column, "{line}");
        }
        let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ 'x' }}}\ndata:\n  a: |\n    \
                    name={{ vm.metadata.name }}\n    {{ vm.metadata.name | safe }}\n  b: {{ vm.metadata.name }}\n";
        assert_eq!(found(&[("a.yaml.j2", text)]).len(), 1);
        insta::assert_snapshot!(found(&[("a.yaml.j2", text)]).join("\n"), @"a.yaml.j2:6:10: Warning joined-value: a value is written as JSON, with quotes of its own, also inside a block of text: write {{ x | safe }} for the bare text");
    }

    #[test]
    fn what_harms_several_machines_or_all_is_named() {
        let shared = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: shared\n";
        let pod = "{% extends 'builtin/pod.yaml.j2' %}\n{% block containers %}\n    - {name: other, image: x}\n{% endblock %}\n";
        let files = [("a.yaml.j2", shared), ("lib/b.yaml.j2", shared), ("pod.yaml.j2", pod)];
        let sources = Sources {
            base: files.map(|(name, text)| (name.to_owned(), text.to_owned())).into(),
            sets: BTreeMap::new(),
        };
        let findings = lint(&sources, &crate::render::check::examples(), &ReconcilerConfig::default());
        let found: Vec<String> =
            findings.iter().map(|it| format!("{}:{:?} {} {}", it.file, it.line, it.rule, it.message)).collect();
        insta::assert_snapshot!(found.join("\n"), @"
        a.yaml.j2:Some(4) shared-name ConfigMap shared is made for small and for large: its name must have the machine's name in it
        lib/b.yaml.j2:None unused-file lib/b.yaml.j2 is never rendered: only NAME.yaml.j2 at the top is, and no other file includes or imports it
        pod.yaml.j2:None no-runner Pod small: there is no container vm-runner, so no guest: does the block say {{ super() }}? (machines small, large)
        ");
    }

    #[test]
    fn what_does_not_compile_is_one_finding() {
        insta::assert_snapshot!(found(&[("a.yaml.j2", "{% if %}")]).join("\n"), @"a.yaml.j2:1:7: Error compile: syntax error: unexpected end of block");
    }

    #[test]
    fn sarif_has_every_rule_that_is_used() {
        let finding = Finding::of("a", Severity::Error, "schema", "b".into());
        let sarif = sarif(&[finding]);
        assert_eq!(sarif["runs"][0]["results"][0]["level"], "error");
        assert_eq!(sarif["runs"][0]["tool"]["driver"]["rules"].as_array().unwrap().len(), RULES.len());
    }
}
