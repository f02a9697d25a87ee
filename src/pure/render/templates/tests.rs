use minijinja::{context, value::Serde};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::render::{Library, RandomInput, Sources, render};

fn set(template: &str) -> Result<TemplateSet, TemplateError> {
    TemplateSet::layered(&Files::from([("pod.yaml.j2".to_owned(), template.to_owned())]), None)
}

fn error(template: &str) -> String {
    match set(template) {
        Err(error) => error.to_string(),
        Ok(set) => set.render("pod.yaml.j2", &context! { x => 1 }).unwrap_err().to_string(),
    }
}

#[test]
fn errors_name_file_line_and_column() {
    insta::assert_snapshot!(error("a: 1\nb: {{ x }\n"), @"pod.yaml.j2:2:9: syntax error: unexpected `}`, expected end of variable block");
    insta::assert_snapshot!(error("a: 1\n\n  b: {{ y }}\n"), @"pod.yaml.j2:3:9: undefined value: `y` is undefined");
    insta::assert_snapshot!(error("{% if x.z %}{% endif %}"), @"pod.yaml.j2:1:7: undefined value: `x.z` is undefined");
    insta::assert_snapshot!(error("{% extends 'builtin/nothing.yaml.j2' %}"), @r#"pod.yaml.j2:1:4: template not found: template "builtin/nothing.yaml.j2" does not exist"#);
    insta::assert_snapshot!(error("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"), @"pod.yaml.j2:1:39: it takes too many steps: is there a loop that does not end?");
    insta::assert_snapshot!(error("{% extends 'builtin/pod.yaml.j2' %}"), @"builtin/pod.yaml.j2:8:17: undefined value: `spec` is undefined");
}

#[test]
fn a_template_that_would_fill_the_stack_or_is_not_countable_is_refused_at_its_line() {
    insta::assert_snapshot!(error(&format!("a: 1\nb: {{{{ x{} }}}}\n", "|lower".repeat(2000))), @"pod.yaml.j2:2:1544: this expression has more than 256 operators, filters and brackets inside each other; give its parts names before it, with {% set part = ... %}");
    insta::assert_snapshot!(error(&format!("{{% if x %}}\n{}{{% endif %}}", "{% elif x %}\n".repeat(800))), @r#"pod.yaml.j2:130:4: this {% if %} has more than 128 {% elif %}; look the value up in a map, with {% set map = {"key": "value"} %} and map[key], or write several {% if %}"#);
    insta::assert_snapshot!(error(&format!("a: 1\n{}{{{{ ! }}}}\n", "x".repeat(70_000))), @"pod.yaml.j2:2:1: this line has 70007 bytes; a line of a template has at most 65000");
}

#[test]
fn an_error_names_what_is_undefined_but_shows_no_value() {
    // This fails only if the program is built for release: without optimisation it is the default.
    assert!(set("").unwrap().environment.debug());
    let template =
        "{% set password = x.password %}{% set text %}{{ password }}{% endset %}{{ password ~ text ~ y.password }}";
    let error = set(template)
        .unwrap()
        .render("pod.yaml.j2", &context! { x => context! { password => "hunter2" }, y => context! {} });
    let error = error.unwrap_err();
    assert!(!format!("{error:#?}{error:#}").contains("hunter2"), "{error:#?}");
    insta::assert_snapshot!(error, @"pod.yaml.j2:1:75: undefined value: `y.password` is undefined");
}

#[test]
fn files_that_lead_back_to_each_other_are_shown_as_a_chain() {
    let error = |list: &[(&str, &str)]| {
        let compiled = TemplateSet::layered(
            &files(list),
            Some(("desktop", &files(&[("c.yaml.j2", "{% include 'base/a.yaml.j2' %}")]))),
        );
        let rendered = compiled
            .and_then(|set| set.render("a.yaml.j2", &context! {}).and_then(|_| set.render("c.yaml.j2", &context! {})));
        rendered.unwrap_err().to_string()
    };
    let (to_b, to_c) = ("a: 1\n{% include 'lib/b.j2' %}\n", "{% if true %}{% include 'lib/c.j2' %}{% endif %}");
    insta::assert_snapshot!(error(&[("a.yaml.j2", to_b), ("lib/b.j2", to_c), ("lib/c.j2", "{% include 'a.yaml.j2' %}")]), @"a.yaml.j2:2:4: it includes itself: a.yaml.j2 → lib/b.j2 → lib/c.j2 → a.yaml.j2");
    insta::assert_snapshot!(error(&[("a.yaml.j2", "{% extends 'lib/b.j2' %}"), ("lib/b.j2", "{% include 'a.yaml.j2' %}")]), @"lib/b.j2:1:4: it includes itself: lib/b.j2 → a.yaml.j2 → lib/b.j2");
    insta::assert_snapshot!(error(&[("a.yaml.j2", "{% extends 'b.j2' %}"), ("b.j2", "{% extends 'c.j2' %}"), ("c.j2", "{% extends 'b.j2' %}")]), @"c.j2:1:12: it extends itself: c.j2 → b.j2 → c.j2");
    insta::assert_snapshot!(error(&[("a.yaml.j2", "{% extends 'a.yaml.j2' %}")]), @r#"a.yaml.j2:1:12: it extends itself: a.yaml.j2 → a.yaml.j2; the template below this one is called "base/a.yaml.j2""#);
    // A template that the set puts over the base leads back to itself.
    insta::assert_snapshot!(error(&[("a.yaml.j2", "{% include 'c.yaml.j2' %}"), ("c.yaml.j2", "c")]), @"sets/desktop/c.yaml.j2:1:4: it includes itself: sets/desktop/c.yaml.j2 → a.yaml.j2 → sets/desktop/c.yaml.j2");
    // One that ends.
    let counts = "{{ n }}{% if n %}{% with n = n - 1 %}{% include 'a.yaml.j2' %}{% endwith %}{% endif %}";
    let text = format!("{{% set n = n if n is defined else 5 %}}{counts}");
    assert_eq!(set_of(&[("a.yaml.j2", &text)]).render("a.yaml.j2", &context! {}).unwrap(), "543210");
}

fn set_of(list: &[(&str, &str)]) -> TemplateSet {
    TemplateSet::layered(&files(list), None).unwrap()
}

#[test]
fn base_is_the_template_of_the_layer_below_in_each_layer() {
    let pod = |text: &str| {
        format!("{{% extends 'base/pod.yaml.j2' %}}{{% block volumes %}}{{{{ super() }}}}\n{text}\n{{% endblock %}}")
    };
    let (base, named) = (pod("    - {name: base}"), pod("    - {name: set}"));
    let sources = Sources {
        base: files(&[("pod.yaml.j2", &base)]),
        sets: BTreeMap::from([("desktop".into(), files(&[("pod.yaml.j2", &named)])), ("plain".into(), Files::new())]),
    };
    let library = Library::new(&sources);
    let volumes = |name: Option<&str>| {
        let vm = crate::test_support::vm(|_| ());
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        let observed = crate::test_support::nothing();
        let objects = render(&vm, &observed, &Default::default(), &random, library.get(name).unwrap()).unwrap();
        let pod = objects.into_iter().find(|object| object.key.is_pod()).unwrap();
        let names =
            pod.value["spec"]["volumes"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap().to_owned());
        names.filter(|name| ["base", "set"].contains(&name.as_str())).collect::<Vec<_>>()
    };
    assert_eq!(volumes(None), ["base"]);
    assert_eq!(volumes(Some("plain")), ["base"]);
    assert_eq!(volumes(Some("desktop")), ["base", "set"]);
    let lineage = library.get(Some("desktop")).unwrap().lineage("pod.yaml.j2");
    let lineage: Vec<&str> = lineage.iter().map(|from| from.file.as_str()).collect();
    assert_eq!(lineage, ["sets/desktop/pod.yaml.j2", "pod.yaml.j2", "builtin/pod.yaml.j2"]);
    let place = library.get(Some("desktop")).unwrap().place_of("pod.yaml.j2", "Pod").unwrap();
    let builtin = include_str!("../../../../templates/pod.yaml.j2");
    assert_eq!((place.0.as_str(), builtin.lines().nth(place.1 - 1)), ("builtin/pod.yaml.j2", Some("kind: Pod")));
    assert_eq!(library.get(None).unwrap().place_of("pod.yaml.j2", "Service"), None);
}

#[test]
fn output_is_bounded() {
    let text = "x".repeat(10_000);
    let template = format!("{{% for i in range(1000) %}}{text}{{% endfor %}}");
    insta::assert_snapshot!(error(&template), @"pod.yaml.j2: it renders more than 2 MiB");
}

#[test]
fn a_panic_is_an_error_of_the_vm() {
    let mut set =
        TemplateSet::layered(&Files::from([("x.yaml.j2".to_owned(), "{{ panics() }}".to_owned())]), None).unwrap();
    set.environment.add_function("panics", || -> String { panic!("on purpose") });
    let (vm, observed) = (crate::test_support::vm(|_| ()), crate::test_support::nothing());
    let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
    let error = render(&vm, &observed, &Default::default(), &random, &set).unwrap_err();
    insta::assert_snapshot!(error, @"(render): the rendering panicked; the log has the place");
}

#[test]
fn an_overlay_replaces_adds_removes_and_extends() {
    let files = Files::from([
        ("service.yaml.j2".into(), " \n".into()),
        ("network-policy.yaml.j2".into(), "a: {{ x }}\n".into()),
        ("macros.j2".into(), "{% macro m() %}{% endmacro %}".into()),
    ]);
    let set = TemplateSet::layered(&files, None).unwrap();
    let names: Vec<_> = set.names().collect();
    assert!(names.contains(&"network-policy.yaml.j2") && names.contains(&"pod.yaml.j2"));
    assert!(!names.contains(&"service.yaml.j2") && !names.contains(&"macros.j2"));
}

fn files(files: &[(&str, &str)]) -> Files {
    files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
}

fn refused(list: &[(&str, &str)]) -> String {
    TemplateSet::layered(&files(list), None).unwrap_err().to_string()
}

#[test]
fn a_block_that_nobody_renders_is_an_error() {
    let text = "{% extends 'builtin/service.yaml.j2' %}\n{% block label %}\n{% endblock %}\n";
    insta::assert_snapshot!(refused(&[("service.yaml.j2", text)]), @"service.yaml.j2:2:10: builtin/service.yaml.j2 has no block `label`: it has annotations, labels, ports, spec");
    let renamed = [("service.yaml.j2", "label", "labels", "0.2.0")];
    let message = no_such_block("builtin/service.yaml.j2", "label", &BTreeSet::new(), &renamed);
    assert_eq!(message, "builtin/service.yaml.j2 has no block `label`: it is named `labels` since version 0.2.0");
    // Inside a block that there is, a template may have its own.
    let text = "{% extends 'builtin/service.yaml.j2' %}{% block labels %}{% block mine %}{% endblock %}{% endblock %}";
    assert!(TemplateSet::layered(&files(&[("service.yaml.j2", text)]), None).is_ok());
}

#[test]
fn the_table_of_blocks_is_that_of_the_templates() {
    use crate::render::builtin::BLOCKS;

    let set = TemplateSet::builtin().unwrap();
    let there: BTreeSet<(String, String)> = BUILTIN
        .iter()
        .flat_map(|(name, _)| set.blocks(name).into_iter().map(|block| ((*name).to_owned(), block)))
        .collect();
    let table = BLOCKS.iter().map(|(template, block, ..)| ((*template).to_owned(), (*block).to_owned()));
    assert_eq!(there, table.collect());
}

/// An override that was written for this release, with the built-in template of the next one.
#[test]
fn an_override_works_after_a_change_of_another_block_and_the_error_names_a_renamed_one() {
    let written = "{% extends \"builtin/pod.yaml.j2\" %}\n{% block scheduling %}\n  nodeName: {{ vm.metadata.name }}\n{% endblock %}\n";
    let layers = || Layers { base: files(&[("pod.yaml.j2", written)]), named: None };
    let (_, pod) = BUILTIN.iter().find(|(name, _)| *name == "pod.yaml.j2").unwrap();
    let with = |text: &str, renamed: &[Renamed]| {
        let set = TemplateSet::over(&[("pod.yaml.j2", text)], renamed, layers())?;
        let vm = crate::test_support::vm(|_| ());
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        let objects = render(&vm, &crate::test_support::nothing(), &Default::default(), &random, &set)?;
        Ok::<_, TemplateError>(objects[0].value["spec"].clone())
    };
    let changed = pod.replace("{% block volumes %}", "    - {name: more, emptyDir: {}}\n{% block volumes %}");
    let spec = with(&changed, &[]).unwrap();
    assert_eq!(spec["nodeName"], "apple");
    assert!(spec["volumes"].as_array().unwrap().iter().any(|volume| volume["name"] == "more"));

    let renamed = pod.replace("block scheduling", "block placement");
    let error = with(&renamed, &[("pod.yaml.j2", "scheduling", "placement", "0.2")]).unwrap_err().to_string();
    assert_eq!(
        error,
        "pod.yaml.j2:2:10: builtin/pod.yaml.j2 has no block `scheduling`: it is named `placement` since version 0.2"
    );
}

#[test]
fn files_that_would_have_no_effect_are_errors() {
    insta::assert_snapshot!(refused(&[("pod.yaml", "a: b")]), @"pod.yaml: not the name of a template: one that is rendered ends in .yaml.j2, one with patches in .patch.yaml");
    insta::assert_snapshot!(refused(&[("values.yaml", "- a")]), @"values.yaml:1:1: invalid type: sequence, expected a map");
    insta::assert_snapshot!(refused(&[("values.schema.json", "{")]), @"values.schema.json:1:1: not JSON: EOF while parsing an object at line 1 column 1");
    assert!(TemplateSet::layered(&files(&[("README.md", "{{ anything }")]), None).is_ok());
}

#[test]
fn a_named_set_lies_over_the_base_and_its_error_does_not_affect_others() {
    let sources = Sources {
        base: files(&[("a.yaml.j2", "base"), ("b.yaml.j2", "base b")]),
        sets: BTreeMap::from([
            ("good".into(), files(&[("a.yaml.j2", "{% include 'base/a.yaml.j2' %} and more"), ("b.yaml.j2", "")])),
            ("bad".into(), files(&[("lib/x.j2", "{% if %}")])),
        ]),
    };
    let library = Library::new(&sources);
    let good = library.get(Some("good")).unwrap();
    assert_eq!(good.render("a.yaml.j2", &context! {}).unwrap(), "base and more");
    assert!(good.names().any(|name| name == "a.yaml.j2"));
    assert!(!good.names().any(|name| name == "b.yaml.j2"));
    assert_eq!(library.get(None).unwrap().render("b.yaml.j2", &context! {}).unwrap(), "base b");
    insta::assert_snapshot!(library.get(Some("bad")).unwrap_err(), @"sets/bad/lib/x.j2:1:7: syntax error: unexpected end of block");
    insta::assert_snapshot!(library.get(Some("ugly")).unwrap_err(), @r#"spec.templates.set: no template set is named "ugly": there are bad, good"#);
    assert_ne!(good.version(), library.get(None).unwrap().version());
    assert_eq!(good.version(), Library::new(&sources).get(Some("good")).unwrap().version());
}

fn any_json() -> impl Strategy<Value = serde_json::Value> {
    let text = prop_oneof![
        any::<String>(),
        "[\u{0}-\u{2f}\u{7f}-\u{a0}\u{2027}-\u{202a}\u{feff}\u{fff0}-\u{ffff}😀:#'\"{}\\[\\]\n-]{0,20}"
    ];
    let leaf = prop_oneof![
        Just(serde_json::Value::Null),
        any::<bool>().prop_map(|value| json!(value)),
        any::<i64>().prop_map(|value| json!(value)),
        any::<u64>().prop_map(|value| json!(value)),
        any::<f64>().prop_filter("JSON has no infinity", |value| value.is_finite()).prop_map(|value| json!(value)),
        text.clone().prop_map(|value| json!(value)),
    ];
    leaf.prop_recursive(4, 40, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(|list| json!(list)),
            prop::collection::btree_map(text.clone(), inner, 0..6).prop_map(|map| json!(map)),
        ]
    })
}

proptest! {
    #[test]
    fn any_value_comes_out_as_it_went_in(value in any_json()) {
        let set = set("a: {{ x }}\nb:\n  - {{ x }}\n  - c: {{ [x] }} # comment\nlast: {{ {'k': x} }}\n").unwrap();
        let text = set.render("pod.yaml.j2", &context! { x => Value::from(Serde(&value)) }).unwrap();
        let read: serde_json::Value = serde_yaml::from_str(&text).unwrap();
        prop_assert_eq!(read, json!({ "a": value, "b": [value, { "c": [value] }], "last": { "k": value } }));
    }
}

#[test]
fn long_keys_and_awkward_texts() {
    for value in
        [json!({ "k".repeat(5000): 1 }), json!("\u{0}\u{2028}---\n...\n😀"), json!("no"), json!({ "<<": { "a": 1 } })]
    {
        let text =
            set("{{ x }}").unwrap().render("pod.yaml.j2", &context! { x => Value::from(Serde(&value)) }).unwrap();
        assert_eq!(serde_yaml::from_str::<serde_json::Value>(&text).unwrap(), value);
    }
}

#[test]
fn a_key_that_occurs_twice_in_values_or_a_patch_is_refused_with_its_place() {
    let error = |name: &str, text: &str| {
        TemplateSet::layered(&Files::from([(name.to_owned(), text.to_owned())]), None).unwrap_err().to_string()
    };
    let values = error("values.yaml", "a: 1\nb: 1\na: 2\n");
    assert_eq!(values, "values.yaml:1:1: the key \"a\" occurs twice");
    let patch = error("x.patch.yaml", "target: {kind: Pod}\nmergePatch:\n  spec: 1\n  spec: 2\n");
    assert_eq!(patch, "x.patch.yaml:3:3: not a patch: mergePatch: the key \"spec\" occurs twice at line 3 column 3");
    let brackets = error("values.yaml", &format!("a: {}", "[".repeat(100_000)));
    assert!(brackets.starts_with("values.yaml:1:"), "{brackets}");
}
