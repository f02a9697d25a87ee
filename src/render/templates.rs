//! A template set: the built-in templates under a user's overlay.
//!
//! A file of the overlay replaces the built-in one of that name, a new name adds to the set, an empty file removes it.
//! The built-in templates stay reachable as `builtin/NAME`, so that `{% extends "builtin/pod.yaml.j2" %}` changes a block
//! and keeps the rest. Names that end in `.yaml.j2` are rendered; others (macros) can be imported.

use std::{collections::BTreeMap, fmt::Write as _, io};

use minijinja::{
    AutoEscape, Environment, ErrorKind, Output, State, UndefinedBehavior, Value, syntax::SyntaxConfig, value::ValueKind,
};

/// The built-in templates, from `templates/`.
pub const BUILTIN: [(&str, &str); 8] = [
    ("cloud-init-config-map.yaml.j2", include_str!("../../templates/cloud-init-config-map.yaml.j2")),
    ("cloud-init-secret.yaml.j2", include_str!("../../templates/cloud-init-secret.yaml.j2")),
    ("config-map.yaml.j2", include_str!("../../templates/config-map.yaml.j2")),
    ("disk-pvcs.yaml.j2", include_str!("../../templates/disk-pvcs.yaml.j2")),
    ("display-secret.yaml.j2", include_str!("../../templates/display-secret.yaml.j2")),
    ("pod.yaml.j2", include_str!("../../templates/pod.yaml.j2")),
    ("runner-data-pvc.yaml.j2", include_str!("../../templates/runner-data-pvc.yaml.j2")),
    ("service.yaml.j2", include_str!("../../templates/service.yaml.j2")),
];

/// What a template is called that is rendered.
pub const SUFFIX: &str = ".yaml.j2";
/// Steps that the rendering of one template may take: some hundred times what the built-in ones need.
const FUEL: u64 = 1_000_000;
/// The most text that one template may render, in bytes: the limit of an object in etcd is 1.5 MiB.
const MAXIMUM_OUTPUT: usize = 2 << 20;

/// What is wrong in which template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{template}{}: {message}", position(*.line, *.column))]
pub struct TemplateError {
    /// The template's name, `builtin/` before it if it is only reached through `extends`.
    pub template: String,
    /// The line in the template, from 1.
    pub line: Option<usize>,
    /// The column in that line, from 1.
    pub column: Option<usize>,
    /// What is wrong.
    pub message: String,
}

fn position(line: Option<usize>, column: Option<usize>) -> String {
    let mut text = String::new();
    for number in [line, column].into_iter().flatten() {
        let _ = write!(text, ":{number}");
    }
    text
}

impl TemplateError {
    /// An object that the template may not make.
    pub(super) fn refused(template: &str, message: impl Into<String>) -> Self {
        Self { template: template.into(), line: None, column: None, message: message.into() }
    }

    /// A machine that can't be made into a context.
    pub(super) fn context(error: serde_json::Error) -> Self {
        Self::refused("(context)", error.to_string())
    }

    fn new(template: &str, error: &minijinja::Error) -> Self {
        // The innermost error is where it happened; those around it are the `extends` and `include` on the way.
        let mut innermost = error;
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            if let Some(cause) = cause.downcast_ref::<minijinja::Error>().filter(|cause| cause.line().is_some()) {
                innermost = cause;
            }
            source = cause.source();
        }
        let column = innermost.range().zip(innermost.template_source()).map(|(range, source)| {
            let start = source.get(..range.start).unwrap_or(source);
            start.rsplit('\n').next().unwrap_or(start).chars().count() + 1
        });
        let message = match (innermost.kind(), innermost.detail()) {
            (ErrorKind::OutOfFuel, _) => "it takes too many steps: is there a loop that does not end?".into(),
            (kind, Some(detail)) => format!("{kind}: {detail}"),
            (kind, None) => kind.to_string(),
        };
        let cause = std::error::Error::source(innermost).map(|cause| format!(": {cause}")).unwrap_or_default();
        Self {
            template: innermost.name().unwrap_or(template).into(),
            line: innermost.line(),
            column,
            message: message + &cause,
        }
    }
}

/// Compiled templates.
#[derive(Debug)]
pub struct TemplateSet {
    environment: Environment<'static>,
    names: Vec<String>,
}

impl TemplateSet {
    /// The built-in templates alone.
    ///
    /// # Errors
    /// As [`TemplateSet::with_overlay`].
    pub fn builtin() -> Result<Self, TemplateError> {
        Self::with_overlay(BTreeMap::new())
    }

    /// The built-in templates under `overlay`, a map of names to texts.
    ///
    /// # Errors
    /// A template that does not compile.
    pub fn with_overlay(overlay: BTreeMap<String, String>) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_auto_escape_callback(|_| AutoEscape::Json);
        environment.set_formatter(write_value);
        environment.set_fuel(Some(FUEL));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::new("(syntax)", &error))?);
        environment.add_filter("to_yaml", to_yaml);
        environment.add_filter("b64encode", |text: String| base64::encode(text.as_bytes()));
        environment.add_filter("digest", |text: String| super::output::digest(&text));
        let mut set = Self { environment, names: Vec::new() };
        let mut all: BTreeMap<String, String> =
            BUILTIN.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        for (name, text) in &all {
            set.add(format!("builtin/{name}"), text.clone())?;
        }
        all.extend(overlay);
        for (name, text) in all {
            if text.trim().is_empty() {
                continue;
            }
            if name.ends_with(SUFFIX) {
                set.names.push(name.clone());
            }
            set.add(name, text)?;
        }
        Ok(set)
    }

    /// The names of the templates that are rendered, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The text that a template renders.
    ///
    /// # Errors
    /// With the template's name, line and column; also when it takes too many steps or renders too much.
    pub fn render(&self, name: &str, context: &Value) -> Result<String, TemplateError> {
        let error = |error: minijinja::Error| TemplateError::new(name, &error);
        let mut output = Bounded(Vec::new());
        match self.environment.get_template(name).map_err(error)?.render_captured_to(context, &mut output) {
            Ok(_) => String::from_utf8(output.0).map_err(|error| TemplateError::refused(name, error.to_string())),
            Err(_) if output.0.len() >= MAXIMUM_OUTPUT => {
                Err(TemplateError::refused(name, format!("it renders more than {} MiB", MAXIMUM_OUTPUT >> 20)))
            }
            Err(failure) => Err(error(failure)),
        }
    }

    fn add(&mut self, name: String, text: String) -> Result<(), TemplateError> {
        self.environment.add_template_owned(name.clone(), text).map_err(|error| TemplateError::new(&name, &error))
    }
}

/// Collects output up to [`MAXIMUM_OUTPUT`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() < MAXIMUM_OUTPUT { Ok(bytes.len()) } else { Err(io::ErrorKind::FileTooLarge.into()) }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A value as YAML text, for what is itself a YAML file inside an object.
fn to_yaml(value: &Value) -> Result<String, minijinja::Error> {
    serde_saphyr::to_string(value)
        .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))
}

/// Writes an interpolated value as JSON that every YAML parser reads back as that value, on one line.
///
/// JSON is YAML but for a few characters: YAML takes U+0085, U+2028 and U+2029 for line breaks and refuses other control
/// characters, the byte order mark and U+FFFE, U+FFFF (<https://yaml.org/spec/1.2.2/#51-character-set>). They are
/// escaped. Characters beyond U+FFFF stay, because YAML knows no surrogate pairs. A key of a map may be longer than the
/// 1024 characters that YAML allows only after an explicit `?`.
fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), minijinja::Error> {
    if value.is_undefined() {
        return minijinja::escape_formatter(out, state, value);
    }
    if value.is_safe() {
        return out.write_str(&value.to_string()).map_err(minijinja::Error::from);
    }
    let mut text = String::new();
    write_json(&mut text, value)?;
    out.write_str(&text).map_err(minijinja::Error::from)
}

fn write_json(text: &mut String, value: &Value) -> Result<(), minijinja::Error> {
    match value.kind() {
        ValueKind::String => write_string(text, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            text.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                write_json(text, &item)?;
            }
            text.push(']');
        }
        ValueKind::Map => {
            text.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    text.push_str(", ");
                }
                let name = key.as_str().map_or_else(|| key.to_string(), str::to_owned);
                if name.len() > 200 {
                    text.push_str("? ");
                }
                write_string(text, &name);
                text.push_str(": ");
                write_json(text, &value.get_item(&key)?)?;
            }
            text.push('}');
        }
        ValueKind::None | ValueKind::Bool | ValueKind::Number => {
            let json = serde_json::to_string(value)
                .map_err(|error| minijinja::Error::new(ErrorKind::BadSerialization, error.to_string()))?;
            text.push_str(&json);
        }
        kind => {
            return Err(minijinja::Error::new(
                ErrorKind::BadSerialization,
                format!("a value of type {kind} can't be written"),
            ));
        }
    }
    Ok(())
}

fn write_string(text: &mut String, string: &str) {
    text.push('"');
    for character in string.chars() {
        match character {
            '"' => text.push_str("\\\""),
            '\\' => text.push_str("\\\\"),
            '\n' => text.push_str("\\n"),
            '\r' => text.push_str("\\r"),
            '\t' => text.push_str("\\t"),
            '\0'..'\u{20}' | '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}' => {
                let _ = write!(text, "\\u{:04x}", u32::from(character));
            }
            character => text.push(character),
        }
    }
    text.push('"');
}

/// Base64 as Kubernetes' Secrets have it (RFC 4648, with padding).
mod base64 {
    use k8s_openapi::ByteString;

    pub(super) fn encode(bytes: &[u8]) -> Result<String, minijinja::Error> {
        match serde_json::to_value(ByteString(bytes.to_vec())) {
            Ok(serde_json::Value::String(text)) => Ok(text),
            _ => Err(minijinja::Error::new(minijinja::ErrorKind::BadSerialization, "base64")),
        }
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{context, value::Serde};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn set(template: &str) -> Result<TemplateSet, TemplateError> {
        TemplateSet::with_overlay(BTreeMap::from([("pod.yaml.j2".to_owned(), template.to_owned())]))
    }

    fn error(template: &str) -> String {
        match set(template) {
            Err(error) => error.to_string(),
            Ok(set) => set.render("pod.yaml.j2", &context! { x => 1 }).unwrap_err().to_string(),
        }
    }

    #[test]
    fn errors_say_where() {
        insta::assert_snapshot!(error("a: 1\nb: {{ x }\n"), @"pod.yaml.j2:2:9: syntax error: unexpected `}`, expected end of variable block");
        insta::assert_snapshot!(error("a: 1\n\n  b: {{ y }}\n"), @"pod.yaml.j2:3:9: undefined value: `y` is undefined");
        insta::assert_snapshot!(error("{% if x.z %}{% endif %}"), @"pod.yaml.j2:1:7: undefined value: `x.z` is undefined");
        insta::assert_snapshot!(error("{% extends 'builtin/nothing.yaml.j2' %}"), @r#"pod.yaml.j2:1:4: template not found: template "builtin/nothing.yaml.j2" does not exist"#);
        insta::assert_snapshot!(error("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"), @"pod.yaml.j2:1:39: it takes too many steps: is there a loop that does not end?");
        insta::assert_snapshot!(error("{% extends 'builtin/pod.yaml.j2' %}"), @"builtin/pod.yaml.j2:5:21: undefined value: `spec` is undefined");
    }

    #[test]
    fn output_is_bounded() {
        let text = "x".repeat(10_000);
        let template = format!("{{% for i in range(1000) %}}{text}{{% endfor %}}");
        insta::assert_snapshot!(error(&template), @"pod.yaml.j2: it renders more than 2 MiB");
    }

    #[test]
    fn an_overlay_replaces_adds_removes_and_extends() {
        let set = TemplateSet::with_overlay(BTreeMap::from([
            ("service.yaml.j2".into(), " \n".into()),
            ("network-policy.yaml.j2".into(), "a: {{ x }}\n".into()),
            ("macros.j2".into(), "{% macro m() %}{% endmacro %}".into()),
        ]))
        .unwrap();
        let names: Vec<_> = set.names().collect();
        assert!(names.contains(&"network-policy.yaml.j2") && names.contains(&"pod.yaml.j2"));
        assert!(!names.contains(&"service.yaml.j2") && !names.contains(&"macros.j2"));
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
        for value in [
            json!({ "k".repeat(5000): 1 }),
            json!("\u{0}\u{2028}---\n...\n😀"),
            json!("no"),
            json!({ "<<": { "a": 1 } }),
        ] {
            let text =
                set("{{ x }}").unwrap().render("pod.yaml.j2", &context! { x => Value::from(Serde(&value)) }).unwrap();
            assert_eq!(serde_yaml::from_str::<serde_json::Value>(&text).unwrap(), value);
        }
    }
}
