//! What commands read: settings of the renderer, template sets, and VMs.

use std::{
    fs,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
};

use clap::Args;
use kube::ResourceExt;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::output::{Exit, Failure};
use crate::{
    api::VirtualMachine,
    config::{Config, ReconcilerConfig},
    files::{self, FileError},
    render::{Library, Sources, TemplateSet, values::lay_over},
};

/// The namespace of VMs in a file that name none.
pub(super) const DEFAULT_NAMESPACE: &str = "default";

/// The templates, values and configuration by which VMs are rendered.
#[derive(Args)]
pub(super) struct Settings {
    /// A folder of templates over the built-in ones; its folder `sets` has the named sets.
    #[arg(long, value_name = "DIR")]
    pub templates: Option<PathBuf>,
    /// A YAML file with values for the templates, over the manager's `templateValues`.
    #[arg(long, value_name = "FILE")]
    pub values: Option<PathBuf>,
    /// The manager's configuration.
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
}

impl Settings {
    /// The configuration, with the values laid over its own.
    pub fn config(&self) -> Result<ReconcilerConfig, FileError> {
        let config = self.config.as_deref().map_or_else(|| Ok(Config::default()), files::configuration)?;
        let mut config = config.reconciler;
        if let Some(file) = &self.values {
            let text = fs::read_to_string(file).map_err(FileError::io(file))?;
            let values: Map<String, Value> =
                serde_yaml::from_str(&text).map_err(|error| FileError::yaml(file, &error, 0))?;
            lay_over(&mut config.template_values, values);
        }
        Ok(config)
    }
}

/// The template sets of a folder, over the built-in templates.
pub(super) fn library(folder: Option<&Path>) -> Result<Library, FileError> {
    folder.map_or_else(|| Ok(Sources::default()), files::sources).map(|sources| Library::new(&sources))
}

/// A set of the library by its name, or the one for all VMs. `folder` is where errors are looked up.
pub(super) fn template_set<'a>(
    library: &'a Library,
    name: Option<&str>,
    folder: Option<&Path>,
) -> Result<&'a TemplateSet, FileError> {
    library.get(name).map_err(|error| FileError::template(folder, &error))
}

/// The VMs of a file (`-`: standard input), each checked against the types and rules of its fields. Other resources are
/// skipped.
pub(super) fn read_vms(file: &Path, namespace: &str) -> Result<Vec<VirtualMachine>, Failure> {
    let text = read_text(file)?;
    let mut vms = Vec::new();
    for document in documents(&text) {
        let error = |error: serde_yaml::Error| FileError::yaml(file, &error, document.lines_before);
        let value: serde_yaml::Value = serde_yaml::from_str(document.text).map_err(error)?;
        if value.get("kind").and_then(serde_yaml::Value::as_str) != Some("VirtualMachine") {
            continue;
        }
        let mut vm = VirtualMachine::deserialize(serde_yaml::Deserializer::from_str(document.text)).map_err(error)?;
        // The rules that the API server would check.
        if let Err(violations) = kube::core::cel::validate_cel(&vm) {
            let place = format!("{}:{}:1: {}", file.display(), document.lines_before + 1, vm.name_any());
            let lines = violations.iter().map(|violation| format!("{place}: {violation}")).collect();
            return Err(Failure::Command { lines, exit: Exit::Negative });
        }
        vm.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
        vms.push(vm);
    }
    if vms.is_empty() {
        return Err(Failure::new(format!("{}:1:1: there is no VirtualMachine in this file", file.display())));
    }
    Ok(vms)
}

/// The VMs of a file, or of all YAML files of a folder.
pub(super) fn read_vms_in(path: &Path) -> Result<Vec<VirtualMachine>, Failure> {
    if !path.is_dir() {
        return read_vms(path, DEFAULT_NAMESPACE);
    }
    let mut vms = Vec::new();
    let entries = fs::read_dir(path).map_err(FileError::io(path))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.sort();
    for file in files.iter().filter(|file| file.extension().is_some_and(|end| end == "yaml" || end == "yml")) {
        // Folders of examples also have files without a VM.
        if fs::read_to_string(file).is_ok_and(|text| text.contains("kind: VirtualMachine")) {
            vms.extend(read_vms(file, DEFAULT_NAMESPACE)?);
        }
    }
    if vms.is_empty() {
        return Err(Failure::new(format!("{}:1:1: there is no VirtualMachine in this folder", path.display())));
    }
    Ok(vms)
}

fn read_text(file: &Path) -> Result<String, Failure> {
    if file != Path::new("-") {
        return Ok(fs::read_to_string(file).map_err(FileError::io(file))?);
    }
    if io::stdin().is_terminal() {
        return Err(Failure::new("-: standard input is a terminal; give a file or a pipe"));
    }
    let mut text = String::new();
    io::stdin().read_to_string(&mut text).map_err(FileError::io(file))?;
    Ok(text)
}

/// A document of a YAML stream.
#[derive(Debug, PartialEq)]
struct Document<'a> {
    /// The lines of the stream before it: a parser counts from the start of the document.
    lines_before: usize,
    text: &'a str,
}

fn documents(text: &str) -> Vec<Document<'_>> {
    let mut documents = Vec::new();
    let (mut start, mut lines_before, mut offset) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if line.trim_end() == "---" || line.starts_with("--- ") {
            documents.push(Document { lines_before, text: &text[start..offset] });
            (start, lines_before) = (offset, number);
        }
        offset += line.len();
    }
    documents.push(Document { lines_before, text: &text[start..] });
    documents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_know_how_many_lines_are_before_them() {
        let found = |text| -> Vec<(usize, &str)> {
            documents(text).into_iter().map(|document| (document.lines_before, document.text)).collect()
        };
        assert_eq!(found("a\n---\nb\n---\nc"), [(0, "a\n"), (1, "---\nb\n"), (3, "---\nc")]);
        assert_eq!(found(""), [(0, "")]);
    }

    #[test]
    fn an_error_has_its_line_in_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "kind: ConfigMap\n---\napiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\n\
                    metadata: {name: a}\nspec:\n  vm:\n    maximumCpus: many\n";
        fs::write(file.path(), text).unwrap();
        let Err(Failure::Command { lines, exit }) = read_vms(file.path(), DEFAULT_NAMESPACE) else { panic!() };
        assert_eq!(exit, Exit::Negative);
        let place = format!("{}:8:18: ", file.path().display());
        assert!(lines.len() == 1 && lines[0].starts_with(&place), "{lines:?}");
    }
}
