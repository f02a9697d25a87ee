//! Finds what is wrong with a folder of templates, or may surprise, without a cluster.
//!
//! ```text
//!  Sources ─▶ text of each file ─▶ compile ─▶ names ─▶ render example VMs ─▶ objects
//! ```
//!
//! All of it is pure: files come in as text, findings go out.

mod helm;
mod names;
mod objects;
pub mod openapi;
mod sarif;
mod scopes;
mod text;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

pub use self::{names::suggestion, sarif::sarif};
use crate::{
    advice::{Advice, advice},
    api::VirtualMachine,
    config::ReconcilerConfig,
    object::ObjectKey,
    render::{
        Files, Library, Sources, TemplateError, TemplateSet,
        hidden::{Hidden, hidden},
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
        "a name that neither the context has nor the template around it";
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
    Helm, "helm", Error,
        "something of Helm's template language, with what is written here instead";
    JoinedLine, "joined-line", Warning,
        "braces with a dash, which join a line of YAML to the next one";
    SharedName, "shared-name", Error,
        "an object of the same name for two VMs";
    NoRunner, "no-runner", Error,
        "a Pod without the container in which QEMU runs";
    HidesBase, "hides-base", Warning,
        "a file or block of a named set that drops what the base changes";
    ReplacedList, "replaced-list", Warning,
        "a mergePatch that replaces a list whose items have keys: strategicMerge merges it";
    OpenValues, "open-values", Warning,
        "a template that reads values, without a schema that says which of them a VM may set";
    VmValue, "vm-value", Warning,
        "a value of a VM that will probably not be as it is meant: data that cloud-init can't use, a limit of memory without room for QEMU";
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
    /// The value that is wrong, if it is one of a VM.
    #[serde(skip)]
    pub of_vm: Option<VmField>,
}

/// A field of a VM.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VmField {
    /// The VM's name.
    pub vm: String,
    /// The field as a JSON pointer.
    pub pointer: String,
    /// Line and column in the text of the field, from 1, if only a part of it is wrong.
    pub at: Option<(usize, usize)>,
}

impl Finding {
    /// A finding in a file, whose place in the file is not known.
    fn new(file: &str, rule: Rule, message: String) -> Self {
        Self { file: file.into(), line: None, column: None, severity: rule.severity(), rule, message, of_vm: None }
    }

    /// A finding where a name stands.
    fn at(file: &str, mention: &Mention, rule: Rule, message: String) -> Self {
        Self { line: Some(mention.line), column: Some(mention.column), ..Self::new(file, rule, message) }
    }

    fn error(rule: Rule, error: &TemplateError) -> Self {
        let TemplateError { template, line, column, message, .. } = error.clone();
        Self { line, column, ..Self::new(&template, rule, message) }
    }

    /// An error in the rendering of a VM.
    fn of_vm(vm: &VirtualMachine, error: &TemplateError) -> Self {
        let rule = if error.loses_runner { Rule::NoRunner } else { Rule::Render };
        let vm = vm.metadata.name.clone().unwrap_or_default();
        let of_vm = error.vm_field.clone().map(|pointer| VmField { vm, pointer, at: None });
        Self { of_vm, ..Self::error(rule, error) }
    }

    /// What is wrong with the values of a VM.
    fn of_values(vm: &VirtualMachine) -> impl Iterator<Item = Self> {
        let name = vm.metadata.name.clone().unwrap_or_default();
        advice(vm).into_iter().map(move |advice| {
            let Advice { pointer, at, message, .. } = &advice;
            let of_vm = Some(VmField { vm: name.clone(), pointer: (*pointer).to_owned(), at: *at });
            let message = format!("{}: {message}", advice.place());
            Self { of_vm, ..Self::new(&name, Rule::VmValue, message) }
        })
    }

    fn hidden(Hidden { file, at, message }: Hidden) -> Self {
        match at {
            Some(at) => Self::at(&file, &at, Rule::HidesBase, message),
            None => Self::new(&file, Rule::HidesBase, message),
        }
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
                findings.extend(names::open_values(set));
                findings.extend(hidden(set).into_iter().map(Finding::hidden));
                let vms = vms.iter().filter(|vm| vm.template_set().is_none_or(|chosen| Some(chosen) == name));
                findings.extend(check_rendered(set, vms, config));
            }
            Err(error) => drop(findings.insert(Finding::error(Rule::Compile, error))),
        }
    }
    findings.extend(missing_sets(sources, &library, vms));
    findings.extend(vms.iter().flat_map(Finding::of_values));
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
    let becomes_yaml = name.ends_with(".yaml.j2");
    let mut findings = text::check(place, text, becomes_yaml);
    if name.ends_with(".j2") {
        findings.extend(helm::check(place, text, becomes_yaml));
    }
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
            let general = Finding { message: general(&finding, name), ..finding };
            let occurrences = repeated.entry(general).or_insert_with(|| Occurrences { message, vms: Vec::new() });
            if !occurrences.vms.contains(&name) {
                occurrences.vms.push(name);
            }
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

/// The message of a finding without what differs between the objects of one template: the names of the VM and, where the place in the file is
/// known, of the object, and the places in lists and in the output.
fn general(finding: &Finding, vm: &str) -> String {
    let message = match finding.message.split_once(": ") {
        Some((_, rest)) if finding.line.is_some() && finding.rule != Rule::Render => rest,
        _ => &finding.message,
    };
    if finding.rule == Rule::Render {
        // The lines of the output.
        return message
            .split(|c: char| c.is_ascii_digit())
            .filter(|part| !part.is_empty())
            .collect::<Vec<_>>()
            .join("*");
    }
    let part = |part: &str| if part.parse::<usize>().is_ok() { "*".to_owned() } else { part.to_owned() };
    message.replace(vm, "*").split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Sets that VMs choose and that do not exist.
fn missing_sets(sources: &Sources, library: &Library, vms: &[VirtualMachine]) -> Vec<Finding> {
    let chosen = vms.iter().filter_map(|vm| Some((vm, vm.template_set()?)));
    let missing = chosen.filter(|(_, name)| !sources.sets.contains_key(*name));
    missing.filter_map(|(vm, name)| Some(Finding::of_vm(vm, &library.get(Some(name)).err()?))).collect()
}

/// Without what only repeats the cause: in a line with a habit of Helm's all else, and in a line with an unknown name the error of
/// rendering.
fn without_repetitions(findings: BTreeSet<Finding>) -> Vec<Finding> {
    let lines = |is_cause: fn(Rule) -> bool| -> BTreeSet<_> {
        findings.iter().filter(|it| is_cause(it.rule)).map(Finding::line).collect()
    };
    let of_helm = lines(|rule| rule == Rule::Helm);
    let of_names = lines(|rule| matches!(rule, Rule::UnknownVariable | Rule::UnknownTemplate | Rule::UnknownImport));
    let is_own = |finding: &Finding| match finding.rule {
        Rule::Helm => true,
        Rule::Render if of_names.contains(&finding.line()) => false,
        _ => !of_helm.contains(&finding.line()),
    };
    findings.into_iter().filter(is_own).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::test_support::vm;

    fn sources(files: &[(&str, &str)]) -> Sources {
        let mut sources = Sources::default();
        for (name, text) in files {
            let (files, name) = match name.strip_prefix("sets/desktop/") {
                Some(name) => (sources.sets.entry("desktop".into()).or_default(), name),
                None => (&mut sources.base, *name),
            };
            files.insert(name.to_owned(), (*text).to_owned());
        }
        sources
    }

    fn found(files: &[(&str, &str)]) -> Vec<String> {
        let sources = sources(files);
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
            Rule::Helm => &[("a.yaml.j2", "a: {{ .Values.x }}\n")],
            Rule::JoinedLine => &[("a.yaml.j2", "{%- if false %}\n{% endif %}\n")],
            Rule::SharedName => &[("a.yaml.j2", "{apiVersion: v1, kind: ConfigMap, metadata: {name: a}}")],
            Rule::NoRunner => &[(
                "pod.yaml.j2",
                "{% extends 'builtin/pod.yaml.j2' %}\n{% block containers %}\n    - {name: a, image: b}\n{% endblock %}\n",
            )],
            // It looks at VMs and not at files; a test of its own has one.
            Rule::VmValue => &[],
            Rule::HidesBase => &[("lib/b.j2", "x"), ("sets/desktop/lib/b.j2", "y")],
            Rule::ReplacedList => {
                &[("a.patch.yaml", "target: {kind: Pod}\nmergePatch: {spec: {volumes: [{name: a, emptyDir: {}}]}}\n")]
            }
            Rule::OpenValues => &[("a.yaml.j2", "{% if values.x is defined %}{% endif %}")],
            Rule::ToolLabel => {
                &[("a.yaml.j2", "{apiVersion: v1, kind: Secret, metadata: {name: a, labels: {helm.sh/chart: b}}}")]
            }
        }
    }

    #[test]
    fn what_is_wrong_with_the_values_of_a_vm_is_found_at_its_field() {
        let apple = vm(|vm| {
            vm["spec"]["cloudInit"] = json!({ "userData": "#cloud-config\nusers:\n  - name: a\n   shell: b\n" });
            vm["spec"]["resources"] = json!({ "limits": { "memory": "64Mi" } });
        });
        let findings = lint(&Sources::default(), &[apple], &ReconcilerConfig::default());
        let found: Vec<_> = findings
            .iter()
            .map(|finding| {
                let field = finding.of_vm.clone().unwrap();
                (finding.rule, finding.severity, field.pointer, field.at.map(|(line, _)| line))
            })
            .collect();
        let warning = |pointer: &str, line| (Rule::VmValue, Severity::Warning, pointer.to_owned(), line);
        assert_eq!(
            found,
            [warning("/spec/cloudInit/userData", Some(4)), warning("/spec/resources/limits/memory", None)]
        );
    }

    #[test]
    fn each_rule_finds_its_example() {
        let finds = |rule: Rule| {
            let findings = lint(
                &sources(example(rule)),
                &crate::render::check::examples(),
                &crate::render::check::example_config(),
            );
            findings.iter().any(|finding| finding.rule == rule)
        };
        let silent: Vec<Rule> = Rule::ALL.iter().copied().filter(|rule| !finds(*rule)).collect();
        assert_eq!(silent, [Rule::Deprecated, Rule::VmValue]);
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
        let found = |files: &[(&str, &str)]| {
            let findings =
                lint(&sources(files), &crate::render::check::examples(), &crate::render::check::example_config());
            let show = |it: &Finding| format!("{}:{:?} {} {}", it.file, it.line, it.rule.name(), it.message);
            findings.iter().map(show).collect::<Vec<_>>().join("\n")
        };
        insta::assert_snapshot!(found(&[("a.yaml.j2", shared), ("lib/b.yaml.j2", shared)]), @"
        a.yaml.j2:Some(4) shared-name ConfigMap shared is rendered for the VMs small and large: its name must contain the VM's name
        lib/b.yaml.j2:None unused-file lib/b.yaml.j2 is never rendered: only NAME.yaml.j2 at the top and qemu/NAME.yaml.j2 are, and no other file includes or imports it
        ");
        insta::assert_snapshot!(found(&[("pod.yaml.j2", pod)]), @"pod.yaml.j2:Some(2) no-runner Pod small has no container vm-runner, so the VM would have no guest: the block `containers` replaces it; write {{ super() }} in the block to keep it (VMs small, large)");
        // It is in another line of the output of each VM.
        let volumes =
            "{% extends 'builtin/pod.yaml.j2' %}\n{% block volumes %}\n{{ super() }}\n  - {name: a}\n{% endblock %}\n";
        insta::assert_snapshot!(found(&[("pod.yaml.j2", volumes)]), @"pod.yaml.j2:Some(4) render the output is not YAML: did not find expected key at line 115 column 3, while parsing a block mapping at line 14 column 3 (line 115 of the output: - {name: a}); an item of volumes begins with 4 spaces (VMs small, large)");
    }

    #[test]
    fn names_in_scope_of_the_overridden_block_are_known() {
        for layer in ["builtin", "base"] {
            let extends = |name: &str| format!("{{% extends '{layer}/{name}' %}}\n");
            let pvcs = extends("disk-pvcs.yaml.j2")
                + "{% block labels %}\n    a: {{ disk.volume }}\n    b: {{ disk.volum }}\n    c: {{ protection | length | string }}\n{% endblock %}\n";
            let pod = extends("pod.yaml.j2")
                + "{% block labels %}\n    a: {{ disk.volume }}\n    b: {{ tapped | string }}\n{% endblock %}\n";
            let qemu = extends("qemu/standard.yaml.j2")
                + "{% block network_card %}\n  mtu: {{ network.id | length }}\n  b: {{ network.ide }}\n{% endblock %}\n{% block boot %}\n- {{ machin.type }}\n{% endblock %}\n";
            let files = [("disk-pvcs.yaml.j2", pvcs.as_str()), ("pod.yaml.j2", &pod), ("qemu/standard.yaml.j2", &qemu)];
            insta::allow_duplicates! {
                insta::assert_snapshot!(found(&files).join("\n"), @r"
                disk-pvcs.yaml.j2:4:11: Error unknown-variable: disk has no volum: did you mean volume?
                pod.yaml.j2:3:11: Error unknown-variable: the context has no disk: did you mean disks?
                qemu/standard.yaml.j2:4:9: Error unknown-variable: network has no ide: did you mean id?
                qemu/standard.yaml.j2:7:6: Error unknown-variable: the context has no machin: did you mean machine?
                ");
            }
        }
    }

    #[test]
    fn what_each_disk_of_each_vm_shows_is_one_finding() {
        let text = "{% extends 'builtin/disk-pvcs.yaml.j2' %}\n{% block labels %}\n    number: 1\n{% endblock %}\n";
        let sources =
            Sources { base: [("disk-pvcs.yaml.j2".to_owned(), text.to_owned())].into(), sets: BTreeMap::new() };
        let vms = ["apple", "pear"].map(|name| {
            vm(|vm| {
                vm["metadata"]["name"] = name.into();
                vm["spec"]["vm"]["disks"] =
                    serde_json::json!([{ "volumeClaimTemplate": {} }, { "volumeClaimTemplate": {} }]);
            })
        });
        let findings = lint(&sources, &vms, &ReconcilerConfig::default());
        let messages: Vec<&str> = findings.iter().map(|finding| finding.message.as_str()).collect();
        insta::assert_snapshot!(messages.join("\n"), @r#"PersistentVolumeClaim apple-disk-0: metadata.labels.number: 1 is not of type "string" (VMs apple, pear)"#);
    }

    #[test]
    fn a_template_that_does_not_compile_is_one_finding() {
        insta::assert_snapshot!(found(&[("a.yaml.j2", "{% if %}")]).join("\n"), @"a.yaml.j2:1:7: Error compile: syntax error: unexpected end of block");
    }
}
