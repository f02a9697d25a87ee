//! Fuzzing: templates and VMs that nobody would write. Nothing may panic, hang, or come through the guard rails.
//!
//! `FUZZ_SECONDS` says for how long; without it this is a short test. `make fuzz` takes an hour.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "this is test code")]

#[path = "support/fuzzing.rs"]
mod fuzzing;

use std::fmt::Write as _;

use fastrand::Rng;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use vm_operator::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    lint::lint,
    object::Rendered,
    observed::Observed,
    render::{Files, RandomInput, Sources, TemplateSet, builtin::BUILTIN, check, render},
};

/// Words that are near something: the context, functions, syntax, YAML.
const WORDS: &[&str] = &[
    "vm",
    "spec",
    "vm.metadata.name",
    "vm.metadata.labels",
    "spec.vm",
    "spec.vm.maximumCpus",
    "spec.vm.disks",
    "disks",
    "disk",
    "disk.spec",
    "values",
    "values.size",
    "resources",
    "runner",
    "labels",
    "podLabels",
    "cloudInit",
    "service",
    "displaySecret",
    "image.reference",
    "loop.index",
    "loop.last",
    "caller()",
    "super()",
    "self",
    "none",
    "true",
    "1",
    "-1",
    "0",
    "9223372036854775807",
    "1e308",
    "0.1",
    "'a'",
    "\"\\u0000\"",
    "'\u{2028}'",
    "'4Gi'",
    "'yes'",
    "[]",
    "[1, [2]]",
    "{}",
    "{'a': none}",
    "range(9)",
    "range(100000)",
    "dict(a=1)",
    "fail('x')",
    "multipart([{'content': 'x'}])",
    "vm.metadata.creationTimestamp",
];
const FILTERS: &[&str] = &[
    "quantity",
    "as_quantity",
    "as_quantity('Mi')",
    "digest",
    "mac",
    "b64encode",
    "b64decode",
    "gzip",
    "merge({'a': {'b': 1}})",
    "flatten",
    "without([1])",
    "to_yaml",
    "from_yaml",
    "date('%Y')",
    "length",
    "items",
    "list",
    "join(',')",
    "upper",
    "replace('a', 'bb')",
    "default('x')",
    "first",
    "last",
    "sort",
    "unique",
    "map(attribute='name')",
    "selectattr('type')",
    "int",
    "float",
    "string",
    "tojson",
    "safe",
    "indent(4)",
    "batch(2)",
    "slice(3)",
    "groupby('type')",
    "reverse",
    "abs",
    "round",
    "dictsort",
    "bool",
    "trim",
    "title",
    "nothing",
];
const OPERATORS: &[&str] = &["+", "-", "*", "/", "//", "%", "**", "~", "and", "or", "in", "==", "<", "is defined and"];
const LINES: &[&str] = &[
    "apiVersion: v1",
    "kind: ConfigMap",
    "kind: Pod",
    "kind: Secret",
    "kind: ClusterRole",
    "apiVersion: rbac.authorization.k8s.io/v1",
    "metadata: {name: x}",
    "metadata: {name: x, namespace: kube-system}",
    "metadata:",
    "  name: x",
    "  ownerReferences: []",
    "  labels: {app.kubernetes.io/instance: other}",
    "data: {a: b}",
    "---",
    "...",
    "a: &a [*a]",
    "b: *a",
    "? x",
    "- y",
    "{",
    "}",
    "[",
    "\t",
    "!!binary x",
    "<<: {a: b}",
    "null",
    "~",
    "%YAML 1.1",
    "a: |",
    "  text",
    "\u{feff}",
    "\u{0}",
    "# comment",
];

struct Writer {
    random: Rng,
    text: String,
}

impl Writer {
    fn pick<'a>(&mut self, list: &[&'a str]) -> &'a str {
        list[self.random.usize(..list.len())]
    }

    fn expression(&mut self, depth: u32) -> String {
        match self.random.u32(..if depth == 0 { 1 } else { 6 }) {
            1 => format!("{} | {}", self.expression(depth - 1), self.pick(FILTERS)),
            2 => {
                let (left, right) = (self.expression(depth - 1), self.expression(depth - 1));
                format!("({left}) {} ({right})", self.pick(OPERATORS))
            }
            3 => format!("{}[{}]", self.expression(depth - 1), self.expression(depth - 1)),
            4 => format!("[{}, {}]", self.expression(depth - 1), self.expression(depth - 1)),
            5 => format!(
                "{} if {} else {}",
                self.expression(depth - 1),
                self.expression(depth - 1),
                self.expression(depth - 1)
            ),
            _ => self.pick(WORDS).to_owned(),
        }
    }

    fn statement(&mut self, depth: u32) {
        let kind = self.random.u32(..if depth == 0 { 3 } else { 10 });
        let expression = self.expression(3);
        match kind {
            0 => drop(writeln!(self.text, "k{}: {{{{ {expression} }}}}", self.random.u32(..9))),
            1 => {
                let line = self.pick(LINES);
                self.text.push_str(line);
                self.text.push('\n');
            }
            2 => drop(write!(self.text, "{{% set v{} = {expression} %}}", self.random.u32(..3))),
            3 => self.around(&format!("{{% if {expression} %}}"), "{% endif %}", depth),
            4 => self.around(&format!("{{% for disk in {expression} %}}"), "{% else %}x{% endfor %}", depth),
            5 => self.around("{% block labels %}", "{% endblock %}", depth),
            6 => self.around("{% macro m(a) %}", "{% endmacro %}{{ m(1) }}", depth),
            7 => self.around("{% set v1 %}", "{% endset %}{{ v1 }}", depth),
            8 => self.around("{% filter upper %}", "{% endfilter %}", depth),
            _ => {
                let name = ["builtin/pod.yaml.j2", "a.yaml.j2", "lib/b.j2", "nothing"][self.random.usize(..4)];
                let word = ["include", "extends", "import"][self.random.usize(..3)];
                let _ = write!(self.text, "{{% {word} '{name}' {} %}}", if word == "import" { "as i" } else { "" });
            }
        }
    }

    fn around(&mut self, before: &str, after: &str, depth: u32) {
        self.text.push_str(before);
        for _ in 0..self.random.u32(1..4) {
            self.statement(depth - 1);
        }
        self.text.push_str(after);
    }

    /// A text with parts taken out, doubled, or replaced by something else.
    fn mutated(&mut self, text: &str) -> String {
        let mut chars: Vec<char> = text.chars().collect();
        for _ in 0..self.random.u32(1..4) {
            let start = self.random.usize(..=chars.len());
            let end = (start + self.random.usize(..40)).min(chars.len());
            let new: Vec<char> = match self.random.u32(..4) {
                0 => Vec::new(),
                1 => chars[start..end].iter().chain(&chars[start..end]).copied().collect(),
                2 => self.expression(2).chars().collect(),
                _ => {
                    let from = self.random.usize(..=chars.len());
                    chars[from..(from + 30).min(chars.len())].to_vec()
                }
            };
            chars.splice(start..end, new);
        }
        chars.into_iter().collect()
    }

    fn template(&mut self) -> String {
        if self.random.bool() {
            let (_, text) = BUILTIN[self.random.usize(..BUILTIN.len())];
            return self.mutated(text);
        }
        self.text.clear();
        for _ in 0..self.random.u32(1..12) {
            self.statement(3);
        }
        std::mem::take(&mut self.text)
    }

    fn files(&mut self) -> Files {
        let patch = "target: {kind: Pod}\njsonPatch:\n- {op: add, path: /metadata/labels/a, value: b}\n";
        let mut files = Files::new();
        for name in ["a.yaml.j2", "pod.yaml.j2", "config-map.yaml.j2", "lib/b.j2"] {
            if self.random.u32(..3) == 0 {
                let text = self.template();
                files.insert(name.into(), text);
            }
        }
        for (name, text) in [
            ("x.patch.yaml", patch),
            ("y.patch.yaml.j2", patch),
            ("values.yaml", "size: 1\n"),
            ("values.schema.json", r#"{"required": ["size"]}"#),
        ] {
            if self.random.u32(..6) == 0 {
                let text = if self.random.bool() { text.to_owned() } else { self.mutated(text) };
                files.insert(name.into(), text);
            }
        }
        files
    }

    /// A machine with other values in some places, if it is still one.
    fn machine(&mut self) -> VirtualMachine {
        let examples = check::examples();
        let example = &examples[self.random.usize(..examples.len())];
        let mut value = json!(example);
        for _ in 0..self.random.u32(..4) {
            self.change(&mut value["spec"]);
        }
        serde_json::from_value(value).unwrap_or_else(|_| example.clone())
    }

    fn change(&mut self, value: &mut Value) {
        let replace = self.random.u32(..4) == 0;
        match value {
            Value::Object(map) if !map.is_empty() && !replace => {
                let key = map.keys().nth(self.random.usize(..map.len())).unwrap().clone();
                if self.random.u32(..8) == 0 {
                    map.remove(&key);
                } else {
                    self.change(&mut map[&key]);
                }
            }
            Value::Array(list) if !list.is_empty() && !replace => {
                let index = self.random.usize(..list.len());
                self.change(&mut list[index]);
            }
            Value::String(_) => {
                let texts = ["", "no", "{{ vm }}", "a: b\n---\n", "\u{0}\u{2028}\u{feff}", "4Gi", "-1", "x", "'\"`"];
                *value = json!(self.pick(&texts).repeat(self.random.usize(1..40)));
            }
            Value::Number(_) => *value = json!(self.random.i64(..)),
            _ => {
                *value = [json!(null), json!([]), json!({}), json!("x"), json!(7), json!(true)][self.random.usize(..6)]
                    .clone()
            }
        }
    }
}

/// What no object may be that was rendered, whatever renders it.
fn holds_the_rails(vm: &VirtualMachine, objects: &[Rendered]) {
    assert!(objects.len() <= 64);
    for object in objects {
        let metadata = &object.value["metadata"];
        assert_eq!(metadata["namespace"].as_str(), vm.metadata.namespace.as_deref());
        assert_eq!(metadata["labels"]["app.kubernetes.io/instance"].as_str(), vm.metadata.name.as_deref());
        assert_eq!(metadata["labels"]["app.kubernetes.io/managed-by"], "vm-operator");
        assert!(
            ReconcilerConfig::default().allowed_kinds.allow(&object.key.api_version, &object.key.kind),
            "{}",
            object.key
        );
        assert!(!metadata["name"].as_str().unwrap().is_empty());
    }
}

/// What became of a round.
enum Became {
    Objects,
    Refused,
    NotCompiled,
}

fn round(seed: u64) -> Became {
    let mut writer = Writer { random: Rng::with_seed(seed), text: String::new() };
    let files = writer.files();
    let vm = writer.machine();
    if seed.is_multiple_of(16) {
        let sources = Sources { base: files.clone(), ..Sources::default() };
        lint(&sources, std::slice::from_ref(&vm), &check::example_config());
    }
    let Ok(set) = TemplateSet::layered(&files, None) else { return Became::NotCompiled };
    let observed = Observed::nothing(Timestamp::UNIX_EPOCH);
    let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
    match render(&vm, &observed, &check::example_config(), &random, &set) {
        Ok(objects) => {
            holds_the_rails(&vm, &objects);
            Became::Objects
        }
        Err(error) => {
            assert!(!error.message.is_empty() && !error.template.is_empty());
            Became::Refused
        }
    }
}

#[test]
fn fuzzed_templates_and_vms_never_panic_hang_or_break_the_rules() {
    let (mut objects, mut refused, mut not_compiled) = (0_u64, 0_u64, 0_u64);
    let first = fuzzing::fuzz(
        400,
        |seed| format!("`round({seed})`"),
        |seed| {
            match round(seed) {
                Became::Objects => objects += 1,
                Became::Refused => refused += 1,
                Became::NotCompiled => not_compiled += 1,
            }
            objects > 0 && refused > 0 && not_compiled > 0
        },
    );
    eprintln!("{objects} rendered, {refused} refused, {not_compiled} not compiled; seeds from {first}");
    // Otherwise it would show nothing.
    assert!(objects > 0 && refused > 0 && not_compiled > 0, "{objects} {refused} {not_compiled}");
}
