//! What is wrong with a template or with its output, and where.

use std::fmt::Write as _;

use minijinja::ErrorKind;
use serde::{Deserialize, Serialize};

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
        Self { template: template.into(), line: None, column: None, message: message.into(), of_values: false }
    }

    /// An error in the YAML of a file, with its position. `prefix` stands before the parser's message.
    pub(super) fn yaml(template: &str, prefix: &str, error: &serde_yaml::Error) -> Self {
        let position = error.location();
        Self {
            template: template.into(),
            line: position.as_ref().map(|position| position.line()),
            column: position.as_ref().map(|position| position.column()),
            message: format!("{prefix}{error}"),
            of_values: false,
        }
    }

    /// An error while the context of a VM is made.
    pub(super) fn context(error: serde_json::Error) -> Self {
        Self::refused("(context)", error.to_string())
    }

    pub(super) fn new(template: &str, error: &minijinja::Error) -> Self {
        let error = innermost(error);
        let column = error.range().zip(error.template_source()).map(|(range, source)| {
            let start = source.get(..range.start).unwrap_or(source);
            start.rsplit('\n').next().unwrap_or(start).chars().count() + 1
        });
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
        Self {
            template: error.name().unwrap_or(template).into(),
            line: error.line(),
            column,
            message: message(error) + &cause,
            of_values: false,
        }
    }
}

/// The error at the place where it happened. The errors around it are of the `extends` and `include` that lead there.
fn innermost(error: &minijinja::Error) -> &minijinja::Error {
    let mut innermost = error;
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if let Some(cause) = cause.downcast_ref::<minijinja::Error>().filter(|cause| cause.line().is_some()) {
            innermost = cause;
        }
        source = cause.source();
    }
    innermost
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
