//! Finds the statement of a template that lacks its end, as `{% block labels %}` lacks `{% endblock %}`.
//!
//! The template engine reports such a mistake where it reads on in vain: at the end of the file, or at the end of another statement.

use minijinja::machinery::{Span, Token};

use super::error::TemplateError;
use crate::jinja;

/// The statements that have an end.
const STATEMENTS: [(&str, &str); 9] = [
    ("autoescape", "endautoescape"),
    ("block", "endblock"),
    ("call", "endcall"),
    ("filter", "endfilter"),
    ("for", "endfor"),
    ("if", "endif"),
    ("macro", "endmacro"),
    ("set", "endset"),
    ("with", "endwith"),
];

/// A statement without its end.
#[derive(Debug, PartialEq, Eq)]
pub struct Unclosed {
    /// The statement up to its first argument, such as `block labels`.
    what: String,
    line: usize,
    column: usize,
    /// Its end.
    end: &'static str,
    /// The end of another statement that comes instead, with its line. None: the file ends.
    instead: Option<(String, usize)>,
    /// The template with the end where it is missed.
    mended: String,
}

/// A statement that has begun.
struct Open {
    what: String,
    span: Span,
    end: &'static str,
}

impl Unclosed {
    /// The first statement whose end is missed.
    pub fn find(source: &str) -> Option<Self> {
        let tokens: Vec<(Token<'_>, Span)> = jinja::tokens(source).collect::<Result<_, _>>().ok()?;
        let mut open: Vec<Open> = Vec::new();
        for (index, (token, start)) in tokens.iter().enumerate() {
            let Some((Token::Ident(keyword), span)) =
                tokens.get(index + 1).filter(|_| matches!(token, Token::BlockStart))
            else {
                continue;
            };
            let statement: Vec<&Token<'_>> = tokens[index + 1..]
                .iter()
                .map(|(token, _)| token)
                .take_while(|token| !matches!(token, Token::BlockEnd))
                .collect();
            if let Some((_, end)) = STATEMENTS.iter().find(|(begin, _)| begin == keyword) {
                // `{% set x = 1 %}` has no end.
                if *keyword != "set" || !statement.iter().any(|token| matches!(token, Token::Assign)) {
                    let argument = statement.get(1).and_then(|token| match token {
                        Token::Ident(name) => Some(*name),
                        _ => None,
                    });
                    let what = [Some(*keyword), argument].into_iter().flatten().collect::<Vec<_>>().join(" ");
                    open.push(Open { what, span: *span, end });
                }
            } else if STATEMENTS.iter().any(|(_, end)| end == keyword) {
                let begun = open.pop()?;
                if begun.end != *keyword {
                    let instead = ((*keyword).to_owned(), span.start_line.into());
                    return Some(Self::new(source, begun, Some(instead), start.start_offset as usize));
                }
            }
        }
        Some(Self::new(source, open.pop()?, None, source.len()))
    }

    fn new(source: &str, open: Open, instead: Option<(String, usize)>, missed_at: usize) -> Self {
        let Open { what, span, end } = open;
        let (before, after) = source.split_at_checked(missed_at).unwrap_or((source, ""));
        let mended = format!("{before}{{% {end} %}}{after}");
        Self { what, line: span.start_line.into(), column: usize::from(span.start_col) + 1, end, instead, mended }
    }

    /// Whether it is the cause of a syntax error: with the end, that error is gone. `parses` compiles a template.
    pub fn explains(&self, error: &minijinja::Error, parses: impl Fn(&str) -> Result<(), minijinja::Error>) -> bool {
        let place = |error: &minijinja::Error| error.range().map(|range| range.start);
        match parses(&self.mended) {
            Ok(()) => true,
            Err(next) => place(&next) > place(error),
        }
    }

    /// The error of the template of that name.
    pub fn error(&self, template: &str) -> TemplateError {
        let Self { what, line, column, end, instead, .. } = self;
        let instead =
            instead.as_ref().map(|(end, line)| format!(" before the {{% {end} %}} in line {line}")).unwrap_or_default();
        let message = format!("syntax error: {{% {what} %}} has no {{% {end} %}}{instead}");
        TemplateError { line: Some(*line), column: Some(*column), ..TemplateError::refused(template, message) }
    }
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn error(source: &str) -> Option<String> {
        let environment = Environment::new();
        let parses = |text: &str| environment.template_from_str(text).map(drop);
        let error = parses(source).unwrap_err();
        Unclosed::find(source).filter(|it| it.explains(&error, parses)).map(|it| it.error("a").to_string())
    }

    #[test]
    fn a_statement_without_its_end_is_reported_where_it_begins() {
        for (source, expected) in [
            ("a\n{% block labels %}\nb\n", "a:2:4: syntax error: {% block labels %} has no {% endblock %}"),
            (
                "{% block a %}\n{% block b %}{% endblock %}\n",
                "a:1:4: syntax error: {% block a %} has no {% endblock %}",
            ),
            (
                "{% block a %}\n{% if x %}\n{% endblock %}\n",
                "a:2:4: syntax error: {% if x %} has no {% endif %} before the {% endblock %} in line 3",
            ),
            ("{% for x in y %}{% else %}", "a:1:4: syntax error: {% for x %} has no {% endfor %}"),
            ("{% set x %}text", "a:1:4: syntax error: {% set x %} has no {% endset %}"),
            // Both lack their ends. The inner one comes first.
            ("{% block a %}{% if x %}", "a:1:17: syntax error: {% if x %} has no {% endif %}"),
        ] {
            assert_eq!(error(source).as_deref(), Some(expected), "{source}");
        }
    }

    #[test]
    fn another_syntax_error_is_not_hidden() {
        for source in ["{% if %}", "{{ x }\n{% if y %}", "{% if x %}{{ y z }}", "{% endif %}", "{% block a %}{{ 1 + }}"]
        {
            assert_eq!(error(source), None, "{source}");
        }
    }
}
