//! Finds what is wrong with a folder of templates, or may surprise, without a cluster.
//!
//! ```text
//!  Sources ─▶ text of each file ─▶ compile ─▶ names ─▶ render example VMs ─▶ objects
//! ```
//!
//! All of it is pure: files come in as text, findings go out.

mod names;
mod objects;
pub mod openapi;
mod sarif;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

pub use self::sarif::sarif;
use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::ObjectKey,
    render::{
        Files, Library, Sources, TemplateError, TemplateSet,
        outline::{Mention, Outline},
    },
};

/// How bad a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// The manager would not use the set, or the API server would refuse its objects.
    Error,
    /// It works, but probably not as meant.
    Warning,
}

/// Makes [`Rule`] from one table, so that none of its parts can lack a rule.
macro_rules! rules {
    ($($rule:ident, $name:literal, $severity:ident, $about:literal;)+) => {
        /// A kind of finding.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
        pub enum Rule {
            $(#[doc = $about] #[serde(rename = $name)] $rule,)+
        }

        impl Rule {
            /// All rules, in the order of the documentation.
            pub const ALL: &[Self] = &[$(Self::$rule),+];

            /// Its name in the output.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$rule => $name,)+
                }
            }

            /// How bad its findings are.
            pub fn severity(self) -> Severity {
                match self {
                    $(Self::$rule => Severity::$severity,)+
                }
            }

            /// What it is about.
            pub fn about(self) -> &'static str {
                match self {
                    $(Self::$rule => $about,)+
                }
            }
        }
    };
}

rules! {
    Compile, "compile", Error,
        "a file that can't be used: bad syntax, an unknown block, an invalid patch or schema";
    Render, "render", Error,
        "an example VM that can't be rendered, or an object that templates may not create";
    UnknownVariable, "unknown-variable", Error,
        "a name that the context does not have";
    Deprecated, "deprecated", Warning,
        "a part of the context that a later release removes";
    UnknownTemplate, "unknown-template", Error,
        "a template that is included, imported or extended, and does not exist";
    UnknownImport, "unknown-import", Error,
        "a macro or variable that the imported template does not have";
    LostText, "lost-text", Warning,
        "text outside of blocks in a template that extends another: it is never rendered";
    UnusedFile, "unused-file", Warning,
        "a file that the manager ignores";
    Schema, "schema", Error,
        "an object that does not fit Kubernetes' schema: an unknown field, a wrong type";
    YamlNumber, "yaml-number", Warning,
        "a word such as 1e3 or 0x10 that is a number, though it does not look like one";
    YamlBoolean, "yaml-boolean", Warning,
        "a word that other YAML parsers read as a boolean and this one reads as a text";
    Null, "null", Warning,
        "a field that is null and therefore left out";
    StringData, "string-data", Error,
        "a Secret's stringData, which the API server does not keep: use data and b64encode";
    JoinedValue, "joined-value", Warning,
        "an expression that touches other text: its value has quotes of its own";
    SharedName, "shared-name", Error,
        "an object of the same name for two VMs";
    NoRunner, "no-runner", Error,
        "a Pod without the container in which QEMU runs";
    ToolLabel, "tool-label", Warning,
        "a label or annotation of a tool, which would take the object for its own and delete it";
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
    /// The kind of finding.
    pub rule: Rule,
    /// What is wrong and what to do.
    pub message: String,
}

impl Finding {
    /// A finding in a file, whose place in the file is not known.
    fn new(file: &str, rule: Rule, message: String) -> Self {
        Self { file: file.into(), line: None, column: None, severity: rule.severity(), rule, message }
    }

    /// A finding where a name stands.
    fn at(file: &str, mention: &Mention, rule: Rule, message: String) -> Self {
        Self { line: Some(mention.line), column: Some(mention.column), ..Self::new(file, rule, message) }
    }

    fn error(rule: Rule, error: &TemplateError) -> Self {
        let TemplateError { template, line, column, message, of_values: _ } = error.clone();
        Self { line, column, ..Self::new(&template, rule, message) }
    }

    fn line(&self) -> (String, Option<usize>) {
        (self.file.clone(), self.line)
    }
}

/// Checks all sets of a folder with example VMs. A VM that chooses a set is rendered with that set, another VM with each set.
pub fn lint(sources: &Sources, vms: &[VirtualMachine], config: &ReconcilerConfig) -> Vec<Finding> {
    let mut findings = BTreeSet::new();
    for (prefix, files) in folders(sources) {
        findings.extend(files.iter().flat_map(|(name, text)| file(&format!("{prefix}{name}"), name, text)));
    }
    let library = Library::new(sources);
    for (name, set) in library.all() {
        match set {
            Ok(set) => {
                findings.extend(names::check(set));
                let vms = vms.iter().filter(|vm| vm.template_set().is_none_or(|chosen| Some(chosen) == name));
                findings.extend(check_rendered(set, vms, config));
            }
            Err(error) => drop(findings.insert(Finding::error(Rule::Compile, error))),
        }
    }
    findings.extend(missing_sets(sources, &library, vms));
    without_repetitions(findings)
}

/// The files of each set, with the prefix of their names.
fn folders(sources: &Sources) -> impl Iterator<Item = (String, &Files)> {
    let sets = sources.sets.iter().map(|(name, files)| (format!("sets/{name}/"), files));
    std::iter::once((String::new(), &sources.base)).chain(sets)
}

/// Whether the manager reads a file of that name.
pub fn is_part_of_a_set(name: &str) -> bool {
    [".j2", ".yaml", ".yml"].iter().any(|end| name.ends_with(end)) || name == "values.schema.json"
}

/// What the text of a file shows.
fn file(place: &str, name: &str, text: &str) -> Vec<Finding> {
    if !is_part_of_a_set(name) {
        let message = format!("{name} is no template, patch or values: the manager ignores it");
        return vec![Finding::new(place, Rule::UnusedFile, message)];
    }
    let mut findings = text::check(place, text, name.ends_with(".yaml.j2"));
    if name.ends_with(".j2")
        && let Outline { extends: Some(extends), text: Some(lost), .. } = Outline::of(text)
    {
        let message = format!(
            "{:?} stands outside of a block and is never rendered, because the template extends {}",
            lost.name, extends.name
        );
        findings.push(Finding::at(place, &lost, Rule::LostText, message));
    }
    findings
}

/// Where the same finding occurs.
struct Occurrences<'a> {
    /// The message of the first.
    message: String,
    vms: Vec<&'a str>,
}

/// Renders VMs with a set and checks the objects. What several VMs show is one finding.
fn check_rendered<'a>(
    set: &TemplateSet,
    vms: impl Iterator<Item = &'a VirtualMachine>,
    config: &ReconcilerConfig,
) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut repeated: BTreeMap<Finding, Occurrences<'_>> = BTreeMap::new();
    let mut owners: BTreeMap<(Option<String>, ObjectKey), &str> = BTreeMap::new();
    for vm in vms {
        let name = vm.metadata.name.as_deref().unwrap_or_default();
        let (rendered, found) = objects::check(set, vm, config);
        for finding in found {
            let message = finding.message.clone();
            let general = Finding { message: message.replace(name, "*"), ..finding };
            repeated.entry(general).or_insert_with(|| Occurrences { message, vms: Vec::new() }).vms.push(name);
        }
        for object in rendered {
            let key = (vm.metadata.namespace.clone(), object.key.clone());
            if let Some(other) = owners.insert(key, name).filter(|other| *other != name) {
                let message = format!(
                    "{} is rendered for the VMs {other} and {name}: its name must contain the VM's name",
                    object.key
                );
                let finding = Finding::new(&object.template, Rule::SharedName, message);
                let source = set.source(&object.name).unwrap_or_default();
                findings.push(objects::locate(finding, &source, &object.key.name));
            }
        }
    }
    findings.extend(repeated.into_iter().map(|(finding, Occurrences { mut message, vms })| {
        if finding.rule == Rule::Render || vms.len() > 1 {
            let word = if vms.len() == 1 { "VM" } else { "VMs" };
            message += &format!(" ({word} {})", vms.join(", "));
        }
        Finding { message, ..finding }
    }));
    findings
}

/// Sets that VMs choose and that do not exist.
fn missing_sets(sources: &Sources, library: &Library, vms: &[VirtualMachine]) -> Vec<Finding> {
    let chosen = vms.iter().filter_map(VirtualMachine::template_set);
    let missing = chosen.filter(|name| !sources.sets.contains_key(*name));
    missing.filter_map(|name| library.get(Some(name)).err()).map(|error| Finding::error(Rule::Render, &error)).collect()
}

/// Without errors of rendering in lines where an unknown name is reported: that name is their cause.
fn without_repetitions(findings: BTreeSet<Finding>) -> Vec<Finding> {
    let is_unknown_name = |rule| matches!(rule, Rule::UnknownVariable | Rule::UnknownTemplate | Rule::UnknownImport);
    let lines: BTreeSet<_> = findings.iter().filter(|it| is_unknown_name(it.rule)).map(Finding::line).collect();
    findings.into_iter().filter(|it| it.rule != Rule::Render || !lines.contains(&it.line())).collect()
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
            format!("{}{at}: {:?} {}: {}", finding.file, finding.severity, finding.rule.name(), finding.message)
        };
        lint(&sources, &[vm(|_| {})], &ReconcilerConfig::default()).iter().map(show).collect()
    }

    #[test]
    fn the_built_in_templates_are_clean() {
        assert_eq!(found(&[]), Vec::<String>::new());
    }

    /// Files with which the rule finds something.
    fn example(rule: Rule) -> &'static [(&'static str, &'static str)] {
        match rule {
            Rule::Compile => &[("a.yaml.j2", "{% if %}")],
            Rule::Render => &[("a.yaml.j2", "{{ fail('no') }}")],
            Rule::UnknownVariable => &[("a.yaml.j2", "{% if vm.nam %}{% endif %}")],
            // The context has nothing that is deprecated; render::schema tests the rest.
            Rule::Deprecated => &[],
            Rule::UnknownTemplate => &[("a.yaml.j2", "{% include 'b.j2' %}")],
            Rule::UnknownImport => &[("a.yaml.j2", "{% from 'lib/b.j2' import c %}"), ("lib/b.j2", "{# nothing #}")],
            Rule::LostText => &[("pod.yaml.j2", "{% extends 'builtin/pod.yaml.j2' %}\nlost: 1\n")],
            Rule::UnusedFile => &[("notes.txt", "")],
            Rule::Schema => &[("a.yaml.j2", "{apiVersion: v1, kind: Secret, metadata: {name: a}, dta: {}}")],
            Rule::YamlNumber => &[("values.yaml", "a: 1e3\n")],
            Rule::YamlBoolean => &[("values.yaml", "a: yes\n")],
            Rule::Null => &[("a.yaml.j2", "{% if false %}\na: null\n{% endif %}\n")],
            Rule::StringData => &[("a.yaml.j2", "{apiVersion: v1, kind: Secret, metadata: {name: a}, stringData: {}}")],
            Rule::JoinedValue => &[("a.yaml.j2", "{% if false %}\na: x-{{ vm.metadata.name }}\n{% endif %}\n")],
            Rule::SharedName => &[("a.yaml.j2", "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}")],
            Rule::NoRunner => &[(
                "pod.yaml.j2",
                "{% extends 'builtin/pod.yaml.j2' %}\n{% block containers %}\n    - {name: a, image: b}\n{% endblock %}\n",
            )],
            Rule::ToolLabel => {
                &[("a.yaml.j2", "{apiVersion: v1, kind: Secret, metadata: {name: a, labels: {helm.sh/chart: b}}}")]
            }
        }
    }

    #[test]
    fn each_rule_finds_its_example() {
        let finds = |rule: Rule| {
            let base = example(rule).iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
            let sources = Sources { base, sets: BTreeMap::new() };
            let findings = lint(&sources, &crate::render::check::examples(), &crate::render::check::example_config());
            findings.iter().any(|finding| finding.rule == rule)
        };
        let silent: Vec<Rule> = Rule::ALL.iter().copied().filter(|rule| !finds(*rule)).collect();
        assert_eq!(silent, [Rule::Deprecated]);
    }

    #[test]
    fn text_and_names_are_checked() {
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
        notes.txt: Warning unused-file: notes.txt is no template, patch or values: the manager ignores it
        pod.yaml.j2:2:1: Warning lost-text: "lost: 1" stands outside of a block and is never rendered, because the template extends builtin/pod.yaml.j2
        pod.yaml.j2:4:9: Warning yaml-boolean: yes is the text "yes" here, not a boolean: write true or false, or quote it
        pod.yaml.j2:5:8: Warning yaml-number: 1e3 is the number 1000.0 here: write that, or quote it
        pod.yaml.j2:6:8: Warning yaml-number: 0x10 is the number 16 here: write that, or quote it
        pod.yaml.j2:9:8: Warning null: a field that is null is left out of the object: take e out
        "#);
    }

    #[test]
    fn objects_are_checked_against_the_schema_and_known_traps() {
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
    fn a_value_in_a_block_of_text_is_reported() {
        let text = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ 'x' }}}\ndata:\n  a: |\n    \
                    name={{ vm.metadata.name }}\n    {{ vm.metadata.name | safe }}\n  b: {{ vm.metadata.name }}\n";
        assert_eq!(found(&[("a.yaml.j2", text)]).len(), 1);
        insta::assert_snapshot!(found(&[("a.yaml.j2", text)]).join("\n"), @"a.yaml.j2:6:10: Warning joined-value: a value is written as JSON, with quotes of its own, also inside a block of text: write {{ x | safe }} for the bare text");
    }

    #[test]
    fn what_several_vms_show_is_one_finding() {
        let shared = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: shared\n";
        let pod = "{% extends 'builtin/pod.yaml.j2' %}\n{% block containers %}\n    - {name: other, image: x}\n{% endblock %}\n";
        let files = [("a.yaml.j2", shared), ("lib/b.yaml.j2", shared), ("pod.yaml.j2", pod)];
        let sources = Sources {
            base: files.map(|(name, text)| (name.to_owned(), text.to_owned())).into(),
            sets: BTreeMap::new(),
        };
        let findings = lint(&sources, &crate::render::check::examples(), &crate::render::check::example_config());
        let found: Vec<String> =
            findings.iter().map(|it| format!("{}:{:?} {} {}", it.file, it.line, it.rule.name(), it.message)).collect();
        insta::assert_snapshot!(found.join("\n"), @"
        a.yaml.j2:Some(4) shared-name ConfigMap shared is rendered for the VMs small and large: its name must contain the VM's name
        lib/b.yaml.j2:None unused-file lib/b.yaml.j2 is never rendered: only NAME.yaml.j2 at the top is, and no other file includes or imports it
        pod.yaml.j2:None no-runner Pod small: there is no container vm-runner, so no guest: does the block say {{ super() }}? (VMs small, large)
        ");
    }

    #[test]
    fn a_template_that_does_not_compile_is_one_finding() {
        insta::assert_snapshot!(found(&[("a.yaml.j2", "{% if %}")]).join("\n"), @"a.yaml.j2:1:7: Error compile: syntax error: unexpected end of block");
    }
}
