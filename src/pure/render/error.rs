//! What is wrong with a template or with its output, and where.

use std::fmt::Write as _;

use minijinja::ErrorKind;
use serde::{Deserialize, Serialize};

/// The file of errors of the manager's configuration.
const CONFIGURATION: &str = "config.yaml";

/// An error in a file of a template set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{template}{}: {message}", position(*.line, *.column))]
pub struct TemplateError {
    /// The file in the operator's folder; `builtin/` stands before the name of a built-in template.
    pub template: String,
    /// The line in the template, from 1.
    pub line: Option<usize>,
    /// The column in that line, from 1.
    pub column: Option<usize>,
    /// What is wrong.
    pub message: String,
    /// Whether the values of the VM do not match the schema of the set. Then the VM may be wrong and not the set.
    #[serde(default)]
    pub of_values: bool,
    /// Whether the VM has parts that an administrator has not allowed ([`crate::allowed`]). No set and no template is wrong then.
    #[serde(default)]
    pub not_allowed: bool,
    /// Whether the VM would have a Pod without the container in which QEMU runs.
    #[serde(default)]
    pub loses_runner: bool,
    /// The field of the VM that has the wrong value, if it is one, as a JSON pointer such as `/spec/templates/set`.
    #[serde(default)]
    pub vm_field: Option<String>,
}

fn position(line: Option<usize>, column: Option<usize>) -> String {
    let mut text = String::new();
    for number in [line, column].into_iter().flatten() {
        let _ = write!(text, ":{number}");
    }
    text
}

impl TemplateError {
    /// An error of a whole file, or of what it renders.
    pub fn refused(template: &str, message: impl Into<String>) -> Self {
        Self {
            template: template.into(),
            line: None,
            column: None,
            message: message.into(),
            of_values: false,
            not_allowed: false,
            loses_runner: false,
            vm_field: None,
        }
    }

    /// The error with which a changed configuration is refused. `keys` are those that have changed.
    pub fn of_configuration(keys: &str, message: impl std::fmt::Display) -> Self {
        Self::refused(CONFIGURATION, format!("{keys}: {message}"))
    }

    /// Whether it is one of the configuration.
    pub fn is_of_configuration(&self) -> bool {
        self.template == CONFIGURATION
    }

    /// The VM has parts that are not allowed. `field` is the first of them.
    pub(super) fn not_allowed(field: &str, message: String) -> Self {
        let pointer = format!("/{}", field.replace(['.', '['], "/").replace(']', ""));
        Self { not_allowed: true, vm_field: Some(pointer), ..Self::refused("(spec)", message) }
    }

    /// The error of a field of a VM, given as a JSON pointer. `template` is the file whose rule the value breaks, or the field again.
    pub(super) fn of_vm(template: &str, field: &str, message: impl Into<String>) -> Self {
        Self { vm_field: Some(field.into()), ..Self::refused(template, message) }
    }

    /// An error in the YAML of a file, with its position. `prefix` stands before the parser's message.
    pub(super) fn yaml(template: &str, prefix: &str, error: &crate::yaml::Error) -> Self {
        let (line, column) = error.place().unzip();
        Self { line, column, ..Self::refused(template, format!("{prefix}{error}")) }
    }

    /// An error while the context of a VM is made.
    pub(super) fn context(error: serde_json::Error) -> Self {
        Self::refused("(context)", error.to_string())
    }

    /// The error of a template engine, at the place where it happened.
    pub(super) fn new(template: &str, error: &minijinja::Error) -> Self {
        Self::at(template, nested(error).last().copied().unwrap_or(error))
    }

    /// The error of a template engine, without those that it may have in it.
    pub(super) fn at(template: &str, error: &minijinja::Error) -> Self {
        let column = error.range().zip(error.template_source()).map(|(range, source)| {
            let start = source.get(..range.start).unwrap_or(source);
            start.rsplit('\n').next().unwrap_or(start).chars().count() + 1
        });
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
        Self { line: error.line(), column, ..Self::refused(error.name().unwrap_or(template), message(error) + &cause) }
    }
}

/// An error and those in it that have a place. The last one is where it happened; the others are of the `include` that lead there.
pub(super) fn nested(error: &minijinja::Error) -> Vec<&minijinja::Error> {
    let mut errors = vec![error];
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        errors.extend(cause.downcast_ref::<minijinja::Error>().filter(|cause| cause.line().is_some()));
        source = cause.source();
    }
    errors
}

fn message(error: &minijinja::Error) -> String {
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => "it takes too many steps: is there a loop that does not end?".into(),
        (kind, Some(detail)) => format!("{kind}: {detail}"),
        // In a macro an undefined value has no detail.
        (kind, None) => match error.range().zip(error.template_source()) {
            Some((range, source)) if kind == ErrorKind::UndefinedError => {
                format!("{kind}: `{}` is undefined", source.get(range).unwrap_or_default().trim())
            }
            _ => kind.to_string(),
        },
    }
}

/// An error in the output of a template. Its line is one of the output, which the template's author does not see, so
/// [`TemplateSet::output_error`](super::TemplateSet::output_error) looks for the line of the template that made it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct OutputError {
    /// What is wrong.
    pub message: String,
    /// Text at that place of the output, which probably stands in the template too.
    pub text: String,
    /// If several lines of the template have the text: whether the last one is meant. Otherwise none is named.
    pub in_last_line: bool,
}

impl OutputError {
    /// An error at a text of the output.
    pub(super) fn at(text: impl Into<String>, message: impl Into<String>) -> Self {
        Self { message: message.into(), text: text.into(), in_last_line: false }
    }
}
