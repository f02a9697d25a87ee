//! `kubectl vm lint`: prints what [`crate::lint`] finds in a folder of templates.

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use annotate_snippets::{AnnotationKind, Level, Origin, Renderer, Snippet};
use clap::{Args, ValueEnum};
use serde_json::json;

use super::{
    input::{Settings, place_in_vm, read_vms_in, vm_files},
    installed::{Installed, InstalledOptions},
    output::{Exit, Failure, Output, counted, note},
};
use crate::{
    files::{self, SETS},
    lint::{self, Finding, Rule, Severity, VmField},
    render::{Files, builtin::BUILTIN, check},
};

#[derive(Args)]
pub(super) struct Options {
    /// The folder of templates.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    #[command(flatten)]
    check: CheckOptions,
    /// How findings are printed.
    #[arg(long, default_value = "text")]
    format: Format,
    /// Warnings are errors.
    #[arg(long)]
    strict: bool,
}

/// With what templates are checked.
#[derive(Args)]
pub(super) struct CheckOptions {
    /// The folder of templates for all VMs, where DIR is a named set over it.
    #[arg(long, value_name = "DIR")]
    base: Option<PathBuf>,
    /// A file or folder with VirtualMachines to render. Default: a few that use everything.
    #[arg(long, short, value_name = "PATH")]
    filename: Option<PathBuf>,
    /// A YAML file with values for the templates.
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// The manager's configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    installed: InstalledOptions,
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

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let checked = check(&options.folder, &options.check, options.check.base.is_some()).await?;
    match options.format {
        Format::Json => writeln!(output, "{:#}", json!(checked.findings))?,
        Format::Sarif => writeln!(output, "{:#}", lint::sarif(&checked.findings))?,
        Format::Text => {
            for finding in &checked.findings {
                write!(output, "{}\n\n", report(finding))?;
            }
            writeln!(output, "{}", checked.summary())?;
        }
    }
    let is_error = |finding: &Finding| options.strict || finding.severity == Severity::Error;
    Ok(Exit::negative_if(checked.findings.iter().any(is_error)))
}

/// What was found in a folder.
pub(super) struct Checked {
    pub findings: Vec<Finding>,
    files: usize,
    vms: usize,
}

impl Checked {
    /// How much was checked, and how much was found.
    pub fn summary(&self) -> String {
        let count = |severity| self.findings.iter().filter(|finding| finding.severity == severity).count();
        format!(
            "{}, {}: {}, {}",
            counted(self.files, "file"),
            counted(self.vms, "VM"),
            counted(count(Severity::Error), "error"),
            counted(count(Severity::Warning), "warning")
        )
    }
}

/// Checks a folder of templates, or one of a named set over the base.
pub(super) async fn check(folder: &Path, options: &CheckOptions, is_named_set: bool) -> Result<Checked, Failure> {
    let CheckOptions { base, filename, values, config, installed } = options;
    let is_configured = config.is_some() || installed.installed;
    let over = if is_named_set { base.as_deref() } else { Some(folder) };
    let templates = over.map(Path::to_owned);
    let settings = Settings { templates, values: values.clone(), config: config.clone() };
    let (Installed { mut sources, mut config, twice }, _) = installed.read(&settings).await?;
    twice.iter().for_each(|warning| note(&format!("# warning: {warning}")));
    let mut files = sources.base.len() + sources.sets.values().map(Files::len).sum::<usize>();
    if is_named_set {
        let set = files::sources(folder)?.base;
        files = set.len();
        sources.sets.insert(CHECKED_SET.to_owned(), set);
    }
    let vms = match filename {
        Some(path) => read_vms_in(path)?,
        None => {
            if !is_configured {
                config.load_balancer_service = check::example_config().load_balancer_service;
            }
            // What VMs may have is no question of the templates.
            config.allowed = check::example_config().allowed;
            check::examples()
        }
    };
    let mut findings = lint::lint(&sources, &vms, &config);
    if is_named_set {
        keep_checked_set(&mut findings);
    }
    for finding in &mut findings {
        let file = folder.join(&finding.file);
        if !finding.file.starts_with("builtin/") && file.exists() {
            finding.file = file.display().to_string();
        }
        if let Some(path) = filename {
            move_to_vm(finding, path);
        }
    }
    Ok(Checked { findings, files, vms: vms.len() })
}

/// Reports a wrong value of a VM where it stands in the VM's file.
fn move_to_vm(finding: &mut Finding, vms: &Path) {
    let Some(VmField { vm, pointer, at }) = &finding.of_vm else { return };
    let found = vm_files(vms).find_map(|file| Some((place_in_vm(&file, vm, pointer, *at)?, file)));
    if let Some(((line, column), file)) = found {
        if finding.file != *vm {
            finding.message += &format!(" ({})", finding.file);
        }
        (finding.file, finding.line, finding.column) = (file.display().to_string(), Some(line), Some(column));
    }
}

/// Drops what is wrong with the base, which is checked by itself, and names files as they are in the folder.
fn keep_checked_set(findings: &mut Vec<Finding>) {
    let prefix = format!("{SETS}/{CHECKED_SET}/");
    findings.retain_mut(|finding| match finding.file.strip_prefix(&prefix).map(str::to_owned) {
        Some(file) => {
            finding.file = file;
            true
        }
        // A value of a VM is not one of the base.
        None => finding.rule == Rule::VmValue,
    });
}

/// A finding with its source, as rustc prints it.
pub(super) fn report(finding: &Finding) -> String {
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

    #[test]
    fn the_word_of_a_finding_is_marked() {
        let finding = |line, column| Finding {
            file: "a".into(),
            line: Some(line),
            column: Some(column),
            severity: Severity::Error,
            rule: Rule::Compile,
            message: String::new(),
            of_vm: None,
        };
        let source = "a: é b.c→\nlast";
        for (line, column, expected) in [(1, 6, "b.c"), (1, 9, "→"), (2, 1, "last"), (3, 1, "last"), (2, 9, "")] {
            let span = span(source, &finding(line, column)).unwrap();
            assert_eq!(&source[span], expected, "{line}:{column}");
        }
        assert_eq!(span("", &finding(1, 1)), None);
    }
}
