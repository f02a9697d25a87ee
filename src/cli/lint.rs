//! `kubectl vm lint`: prints what [`crate::lint`] finds in a folder of templates.

use std::{
    collections::BTreeMap,
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::{
    input::{Settings, read_vms_in},
    output::{Exit, Failure, Output, counted},
};
use crate::{
    files::{self, SETS},
    lint::{self, Finding, Severity},
    render::{Files, Sources, builtin::BUILTIN, check},
};

#[derive(Args)]
pub(super) struct Options {
    /// The folder of templates.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The folder of templates for all VMs, where DIR is a named set over it.
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// A file or folder with VirtualMachines to render. Default: a few that use everything.
    #[arg(long, short, value_name = "PATH")]
    filename: Option<PathBuf>,
    /// How findings are printed.
    #[arg(long, default_value = "text")]
    format: Format,
    /// A YAML file with values for the templates.
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// The manager's configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Warnings are errors.
    #[arg(long)]
    strict: bool,
}

/// How findings are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people, with the source.
    Text,
    /// A list of objects.
    Json,
    /// For code scanning (SARIF 2.1.0).
    Sarif,
}

/// The name that a set gets whose folder is checked by itself, over a base.
const CHECKED_SET: &str = "this";

pub(super) fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let settings = Settings { templates: None, values: options.values.clone(), config: options.config.clone() };
    let mut config = settings.config()?;
    let sources = sources(options)?;
    let vms = match &options.filename {
        Some(path) => read_vms_in(path)?,
        None => {
            if options.config.is_none() {
                config.load_balancer_service = check::example_config().load_balancer_service;
            }
            check::examples()
        }
    };
    let mut findings = lint::lint(&sources, &vms, &config);
    if options.base.is_some() {
        keep_checked_set(&mut findings);
    }
    for finding in &mut findings {
        let file = options.folder.join(&finding.file);
        if !finding.file.starts_with("builtin/") && file.exists() {
            finding.file = file.display().to_string();
        }
    }
    match options.format {
        Format::Json => writeln!(output, "{:#}", json!(findings))?,
        Format::Sarif => writeln!(output, "{:#}", lint::sarif(&findings))?,
        Format::Text => {
            for finding in &findings {
                write!(output, "{}\n\n", report(finding))?;
            }
            let base = if options.base.is_some() { 0 } else { sources.base.len() };
            let files = base + sources.sets.values().map(Files::len).sum::<usize>();
            writeln!(output, "{}", summary(files, vms.len(), &findings))?;
        }
    }
    let is_error = |finding: &Finding| options.strict || finding.severity == Severity::Error;
    Ok(Exit::negative_if(findings.iter().any(is_error)))
}

/// The templates of the folder, as a set over the base if there is one.
fn sources(options: &Options) -> Result<Sources, Failure> {
    let sources = files::sources(&options.folder)?;
    let Some(base) = &options.base else { return Ok(sources) };
    let sets = BTreeMap::from([(CHECKED_SET.to_owned(), sources.base)]);
    Ok(Sources { base: files::sources(base)?.base, sets })
}

/// Drops what is wrong with the base, which is checked by itself, and names files as they are in the folder.
fn keep_checked_set(findings: &mut Vec<Finding>) {
    let prefix = format!("{SETS}/{CHECKED_SET}/");
    findings.retain_mut(|finding| match finding.file.strip_prefix(&prefix).map(str::to_owned) {
        Some(file) => {
            finding.file = file;
            true
        }
        None => false,
    });
}

fn summary(files: usize, vms: usize, findings: &[Finding]) -> String {
    let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
    format!(
        "{}, {}: {}, {}",
        counted(files, "file"),
        counted(vms, "VM"),
        counted(count(Severity::Error), "error"),
        counted(count(Severity::Warning), "warning")
    )
}

/// A finding with its source, as rustc prints it.
fn report(finding: &Finding) -> String {
    let level = if finding.severity == Severity::Error { Level::ERROR } else { Level::WARNING };
    let title = level.primary_title(finding.message.as_str()).id(finding.rule.name());
    let source = source(finding);
    let span = source.as_ref().and_then(|source| span(source, finding));
    let file = finding.file.as_str();
    let group = match source.as_ref().zip(span) {
        Some((source, span)) => {
            let snippet = Snippet::source(source.as_str()).path(file);
            title.element(snippet.annotation(AnnotationKind::Primary.span(span)))
        }
        None => title.element(Origin::path(file)),
    };
    Renderer::styled().render(&[group])
}

/// The text of the file of a finding.
fn source(finding: &Finding) -> Option<String> {
    fs::read_to_string(Path::new(&finding.file)).ok().or_else(|| {
        let name = finding.file.strip_prefix("builtin/")?;
        BUILTIN.iter().find(|(builtin, _)| *builtin == name).map(|(_, text)| (*text).to_owned())
    })
}

/// The bytes of the word at the place of a finding.
fn span(source: &str, finding: &Finding) -> Option<Range<usize>> {
    // An unexpected end of the file is reported after the last line.
    let line = finding.line?.min(source.lines().count().max(1));
    let start: usize = source.split_inclusive('\n').take(line - 1).map(str::len).sum();
    let text = source.get(start..)?.lines().next()?;
    let column = text.char_indices().nth(finding.column.unwrap_or(1) - 1).map_or(text.len(), |(at, _)| at);
    let rest = &text[column..];
    let is_part = |c: char| c.is_alphanumeric() || "_./-".contains(c);
    let word = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
    let length = word.max(rest.chars().next().map_or(0, char::len_utf8));
    Some(start + column..start + column + length)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lint::Rule;

    #[test]
    fn the_word_of_a_finding_is_marked() {
        let finding = |line, column| Finding {
            file: "a".into(),
            line: Some(line),
            column: Some(column),
            severity: Severity::Error,
            rule: Rule::Compile,
            message: String::new(),
        };
        let source = "a: é b.c→\nlast";
        for (line, column, expected) in [(1, 6, "b.c"), (1, 9, "→"), (2, 1, "last"), (3, 1, "last"), (2, 9, "")] {
            let span = span(source, &finding(line, column)).unwrap();
            assert_eq!(&source[span], expected, "{line}:{column}");
        }
        assert_eq!(span("", &finding(1, 1)), None);
    }
}
