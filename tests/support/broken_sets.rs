//! Broken template sets: a table for the tests of the error messages and for the tests of what the manager does with them.

use k8s_openapi::jiff::Timestamp;
use vm_operator::{
    api::VirtualMachine,
    observed::Observed,
    render::{
        TemplateSet,
        check::{check, example_config},
    },
};

/// A broken template set.
pub struct BrokenSet {
    /// What is wrong.
    pub what: &'static str,
    /// The set's files.
    pub files: Vec<(&'static str, String)>,
    /// The error, if only the manager finds it: it has an API server, and renders in a process with bounded memory and time.
    pub manager_error: Option<&'static str>,
}

impl BrokenSet {
    /// The error that is found without a cluster by rendering the set for this VM, if there is one.
    pub fn error(&self, vm: &VirtualMachine) -> Option<String> {
        if self.manager_error.is_some_and(|says| says.contains("too much memory")) {
            return None; // and nothing else would be said any more
        }
        let files = self.files.iter().map(|(name, text)| ((*name).to_owned(), text.clone())).collect();
        let observed = Observed::nothing(Timestamp::UNIX_EPOCH);
        let checked = TemplateSet::layered(&files, None).and_then(|set| {
            let machines = [(vm.clone(), observed)];
            check(TemplateSet::builtin().as_ref().ok(), &set, machines, &example_config())
                .map_err(|refusal| refusal.error)
        });
        checked.err().map(|error| error.to_string())
    }
}

fn broken(what: &'static str, file: &'static str, text: impl Into<String>) -> BrokenSet {
    BrokenSet { what, files: vec![(file, text.into())], manager_error: None }
}

fn refused_by_manager(what: &'static str, text: impl Into<String>, says: &'static str) -> BrokenSet {
    BrokenSet { manager_error: Some(says), ..broken(what, FILE, text) }
}

/// The broken file, where its name does not matter.
const FILE: &str = "x.yaml.j2";

fn object(kind: &str, api_version: &str, rest: &str) -> String {
    format!("apiVersion: {api_version}\nkind: {kind}\nmetadata: {{name: {{{{ vm.metadata.name ~ '-x' }}}}}}\n{rest}")
}

fn config_map(metadata: &str) -> String {
    format!("apiVersion: v1\nkind: ConfigMap\nmetadata: {metadata}\n")
}

/// All of them.
pub fn broken_sets() -> Vec<BrokenSet> {
    let patch = |text: &str| format!("target: {{kind: Pod}}\n{text}");
    let many =
        "{% for i in range(100) %}\n---\napiVersion: v1\nkind: ConfigMap\nmetadata: {name: c{{ i }}}\n{% endfor %}";
    let doubled = "{% set a = 'x' * 1000 %}".to_owned()
        + &"{% set a = a ~ a %}\n".repeat(40)
        + &object("ConfigMap", "v1", "data: {a: {{ a }}}");
    let aliases = "a: &a [x, x, x, x, x, x, x, x, x]\n".to_owned()
        + &('b'..='j')
            .map(|to| (char::from(to as u8 - 1), to))
            .map(|(from, to)| format!("{to}: &{to} [{}]\n", vec![format!("*{from}"); 9].join(", ")))
            .collect::<String>();
    vec![
        // What the template language refuses.
        broken("an expression without its end", FILE, "a: {{ b }"),
        broken("a condition without its end", FILE, "a: 1\n{% if true %}\nb: 2\n"),
        broken(
            "a block without its end",
            "pod.yaml.j2",
            "{% extends 'base/pod.yaml.j2' %}\n{% block labels %}\n    a: b\n{% block scheduling %}\n{% endblock %}\n",
        ),
        broken(
            "a block that loses the runner",
            "pod.yaml.j2",
            "{% extends 'base/pod.yaml.j2' %}\n{% block containers %}\n    - {name: console, image: x}\n{% endblock %}\n",
        ),
        broken("a statement that there is not", FILE, "{% import_yaml 'x' %}"),
        broken("a filter that there is not", FILE, "a: 1\nb: {{ vm.metadata.name | sha1 }}"),
        broken("a function that there is not", FILE, "a: {{ lookup('v1', 'Secret') }}"),
        broken("a test that there is not", FILE, "{% if 1 is primes %}{% endif %}"),
        broken("an undefined variable", FILE, "a: 1\nb: {{ virtualMachine }}"),
        broken("an undefined field", FILE, "a: 1\nb: {{ vm.metadata.nam }}"),
        broken("an undefined value", FILE, object("ConfigMap", "v1", "data: {a: {{ values.size }}}")),
        broken("an unknown argument", FILE, "a: {{ 1 | as_quantity(unit='m') }}"),
        broken("text where a number is needed", FILE, "a: {{ vm.metadata.name + 1 }}"),
        broken("a quantity that is none", FILE, "a: {{ '4Gx' | quantity }}"),
        broken("a division by zero", FILE, "a: {{ 1 / 0 }}"),
        broken("a machine that the set itself refuses", FILE, "{{ fail('no machine is called ' ~ vm.metadata.name) }}"),
        // What does not exist.
        broken("a missing include", FILE, "{% include 'lib/nothing.j2' %}"),
        broken("a missing parent", "pod.yaml.j2", "{% extends 'builtin/pods.yaml.j2' %}"),
        broken("a missing import", FILE, "{% from 'lib/nothing.j2' import x %}{{ x() }}"),
        broken(
            "a block that the parent does not have",
            "pod.yaml.j2",
            "{% extends 'builtin/pod.yaml.j2' %}\n{% block labls %}{% endblock %}",
        ),
        broken("a template without its ending", "network-policy.yaml", "a: 1"),
        // What does not end, or is too much.
        broken("a file that includes itself", FILE, "{% include 'x.yaml.j2' %}"),
        BrokenSet {
            what: "files that include each other",
            files: vec![
                (FILE, "a: 1\n{% include 'lib/y.j2' %}".into()),
                ("lib/y.j2", "{% if true %}{% include 'x.yaml.j2' %}{% endif %}".into()),
            ],
            manager_error: None,
        },
        BrokenSet {
            what: "files that extend each other",
            files: vec![(FILE, "{% extends 'lib/y.j2' %}".into()), ("lib/y.j2", "{% extends 'x.yaml.j2' %}".into())],
            manager_error: None,
        },
        broken("a file that extends itself", FILE, "{% extends 'x.yaml.j2' %}"),
        broken("a macro that calls itself", FILE, "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(1) }}"),
        broken(
            "an endless loop",
            FILE,
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
        ),
        broken("a range that has no end", FILE, "{{ range(1000000000000) | list | length }}"),
        broken("100 MB of output", FILE, "{% for i in range(1000) %}{{ 'x' * 100000 }}{% endfor %}"),
        broken("aliases within aliases", FILE, aliases),
        broken("lists within lists", FILE, "a: ".to_owned() + &"[".repeat(5000) + &"]".repeat(5000)),
        broken("too many objects", FILE, many),
        // What is not an object, or not one that templates may make.
        broken("output that is not YAML", FILE, "a: 1\nb: [1, 2\nc: 3\n"),
        broken("a tab in the YAML", FILE, "a:\n\tb: 1\n"),
        broken("a key that is there twice", FILE, "a: 1\na: 2\n"),
        broken("a label that is there twice", FILE, config_map("{name: x, labels: {a: b, c: d, a: e}}")),
        broken("text instead of an object", FILE, "just text\n"),
        broken("an object without a kind", FILE, "apiVersion: v1\nmetadata: {name: x}\n"),
        broken("an object without a name", FILE, config_map("{labels: {}}")),
        broken("another namespace", FILE, config_map("{name: x, namespace: kube-system}")),
        broken("a kind of the whole cluster", FILE, object("ClusterRole", "rbac.authorization.k8s.io/v1", "")),
        broken("a kind that is not allowed", FILE, object("RoleBinding", "rbac.authorization.k8s.io/v1", "")),
        broken("an object that is there twice", FILE, config_map("{name: {{ vm.metadata.name }}}")),
        broken("an owner", FILE, config_map("{name: x, ownerReferences: []}")),
        broken("another machine's label", FILE, config_map("{name: x, labels: {app.kubernetes.io/instance: cherry}}")),
        broken(
            "an unknown lifetime",
            FILE,
            config_map("{name: x, annotations: {vmoperator.jdrupes.org/lifetime: ever}}"),
        ),
        broken("a label that is none", FILE, config_map("{name: x, labels: {a: 'b c'}}")),
        broken("a name that is none", FILE, config_map("{name: 'Jane Doe'}")),
        broken("a file of the Pod that was cut off", "pod.yaml.j2", ""),
        // Patches and values.
        broken("a patch without a target", "x.patch.yaml", "mergePatch: {}"),
        broken("a patch that finds nothing", "x.patch.yaml", "target: {kind: Nothing}\nmergePatch: {}"),
        broken("a patch that does nothing", "x.patch.yaml", patch("")),
        broken("a patch of an unknown form", "x.patch.yaml", patch("strategicMergePatch: {}")),
        broken(
            "a patch of an item without its key",
            "x.patch.yaml",
            patch("strategicMerge: {spec: {containers: [{image: x}]}}"),
        ),
        broken(
            "a patch that takes the runner away",
            "x.patch.yaml",
            patch("strategicMerge: {spec: {containers: [{name: vm-runner, $patch: delete}]}}"),
        ),
        broken(
            "a patch of a field that is not there",
            "x.patch.yaml",
            patch("jsonPatch:\n- {op: replace, path: /spec/hostIPC, value: true}"),
        ),
        broken(
            "a patch whose test fails",
            "x.patch.yaml",
            patch("jsonPatch:\n- {op: test, path: /spec/restartPolicy, value: Never}"),
        ),
        broken("a patch that takes the name", "x.patch.yaml", patch("mergePatch: {metadata: {name: null}}")),
        broken("values that are not YAML", "values.yaml", "size: [1\n"),
        broken("values that are no map", "values.yaml", "- size\n"),
        broken("a schema that is not JSON", "values.schema.json", "{\"required\": [}"),
        broken("a schema that is none", "values.schema.json", r#"{"type": "sting"}"#),
        broken("values that do not fit", "values.schema.json", r#"{"required": ["size"]}"#),
        // What only the manager finds.
        refused_by_manager(
            "a text that is doubled forty times",
            doubled,
            "x.yaml.j2: it can't be rendered: it takes too much memory or time",
        ),
        refused_by_manager(
            "an unknown field",
            object("Service", "v1", "spec: {ports: [{port: 1}], seletor: {}}"),
            ".spec.seletor: field not declared in schema",
        ),
        refused_by_manager("a wrong type", object("Service", "v1", "spec: {ports: [{port: many}]}"), ".spec.ports"),
        refused_by_manager(
            "a value that is not allowed",
            object("Service", "v1", "spec: {ports: [{port: 100000}]}"),
            "must be between 1 and 65535",
        ),
        refused_by_manager(
            "a kind that is not there",
            object("Thing", "x.cilium.io/v1", ""),
            "the API server refuses Thing",
        ),
    ]
}
