//! What is wrong with a template, and where.

use std::fmt::Write as _;

use minijinja::ErrorKind;
use serde::{Deserialize, Serialize};

/// What is wrong in which template.
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
}

fn position(line: Option<usize>, column: Option<usize>) -> String {
    let mut text = String::new();
    for number in [line, column].into_iter().flatten() {
        let _ = write!(text, ":{number}");
    }
    text
}

impl TemplateError {
    /// What is wrong with a file as a whole, or with what it makes.
    pub fn refused(template: &str, message: impl Into<String>) -> Self {
        Self { template: template.into(), line: None, column: None, message: message.into() }
    }

    /// What is wrong with the YAML of a file, where it is; `what` comes before what the parser says.
    pub(super) fn yaml(template: &str, what: &str, error: &serde_yaml::Error) -> Self {
        let place = error.location();
        Self {
            template: template.into(),
            line: place.as_ref().map(|place| place.line()),
            column: place.as_ref().map(|place| place.column()),
            message: format!("{what}{error}"),
        }
    }

    /// A machine that can't be made into a context.
    pub(super) fn context(error: serde_json::Error) -> Self {
        Self::refused("(context)", error.to_string())
    }

    pub(super) fn new(template: &str, error: &minijinja::Error) -> Self {
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
            // What is not there has no detail in a macro.
            (kind, None) => match innermost.range().zip(innermost.template_source()) {
                Some((range, source)) if kind == ErrorKind::UndefinedError => {
                    format!("{kind}: `{}` is undefined", source.get(range).unwrap_or_default().trim())
                }
                _ => kind.to_string(),
            },
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
