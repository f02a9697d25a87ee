//! What commands read: settings of the renderer, template sets, and VMs.

use std::{
    fs,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
};

use clap::Args;
use kube::{Resource, ResourceExt};
use serde_json::{Map, Value};

use super::{
    manifest::{
        self, Violation,
        position::{self, Step},
    },
    output::{Exit, Failure},
};
use crate::{
    advice::{Advice, advice},
    api::{GROUP, VirtualMachine, VmPool},
    config::{Config, ReconcilerConfig},
    files::{self, FileError},
    lint::suggestion,
    render::{Library, Sources, TemplateError, TemplateSet, values::lay_over},
};

/// The namespace of VMs in a file that name none.
pub(super) const DEFAULT_NAMESPACE: &str = "default";

/// The templates, values and configuration by which VMs are rendered.
#[derive(Args, Default)]
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
                crate::yaml::unique_from_str(&text).map_err(|error| FileError::yaml(file, &error, 0))?;
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

/// The VMs of a file (`-`: standard input), each checked as the API server would check it. Other resources are skipped.
pub(super) fn read_vms(file: &Path, namespace: &str) -> Result<Vec<VirtualMachine>, Failure> {
    vms_in(&read_text(file)?, file, namespace)
}

/// As [`read_vms`], for the text of the file.
pub(super) fn vms_in(text: &str, file: &Path, namespace: &str) -> Result<Vec<VirtualMachine>, Failure> {
    let (mut vms, mut lines, mut has_list) = (Vec::new(), Vec::new(), false);
    for document in documents(text) {
        let error = |error: crate::yaml::Error| FileError::yaml(file, &error, document.lines_before);
        let value: serde_yaml::Value = crate::yaml::from_str(document.text).map_err(error)?;
        if !is_vm(&value, file, &document)? {
            has_list |= value.get("kind").is_some_and(|kind| kind == "List");
            continue;
        }
        match manifest::read(document.text, &value) {
            Ok(mut vm) => {
                vm.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
                vms.push(vm);
            }
            Err(violations) => {
                lines.extend(violations.into_iter().map(|Violation { at, message }| {
                    let (line, column) = at.unwrap_or((1, 1));
                    format!("{}:{}:{column}: {message}", file.display(), line + document.lines_before)
                }));
            }
        }
    }
    if !lines.is_empty() {
        return Err(Failure::Command { lines, exit: Exit::Negative });
    }
    if vms.is_empty() {
        let hint =
            if has_list { ": a List is not read, write its VMs one after the other with --- between them" } else { "" };
        return Err(Failure::new(format!("{}:1:1: there is no VirtualMachine in this file{hint}", file.display())));
    }
    Ok(vms)
}

/// The place of a value of a VM in the file that has it.
pub(super) fn place_of_vm(file: &Path, vm: &str, pointer: &str) -> Option<(usize, usize)> {
    let text = fs::read_to_string(file).ok()?;
    let mut documents = documents(&text).into_iter();
    let document = documents.find(|document| {
        let value: serde_yaml::Value = crate::yaml::from_str(document.text).unwrap_or_default();
        value["kind"] == "VirtualMachine" && value["metadata"]["name"] == vm
    })?;
    let step =
        |part: &str| part.parse().map_or_else(|_| Step::Key(part.replace("~1", "/").replace("~0", "~")), Step::Index);
    let path: Vec<Step> = pointer.split('/').skip(1).map(step).collect();
    let (line, column) = position::of_value(document.text, &path)?;
    Some((document.lines_before + line, column))
}

/// The place of a part of a value of a VM in the file that has it: `at` is its line and column in the text of the value.
pub(super) fn place_in_vm(file: &Path, vm: &str, pointer: &str, at: Option<(usize, usize)>) -> Option<(usize, usize)> {
    let (line, column) = place_of_vm(file, vm, pointer)?;
    let within = at.and_then(|(inner, inner_column)| {
        let text = fs::read_to_string(file).ok()?;
        let value = documents(&text).into_iter().find_map(|document| {
            let value: Value = crate::yaml::from_str(document.text).ok()?;
            let is_meant = value["kind"] == "VirtualMachine" && value["metadata"]["name"] == vm;
            is_meant.then(|| value.pointer(pointer)?.as_str().map(str::to_owned)).flatten()
        })?;
        let wanted = value.lines().nth(inner.checked_sub(1)?)?;
        let indent = |text: &str| text.chars().take_while(|letter| letter.is_whitespace()).count();
        // A block begins in the line of the key or in the next one.
        let mut lines = text.lines().enumerate().skip(line + inner - 2).take(2);
        let (found, written) = lines.find(|(_, written)| written.trim() == wanted.trim())?;
        Some((found + 1, (indent(written) + inner_column).saturating_sub(indent(wanted)).max(1)))
    });
    Some(within.unwrap_or((line, column)))
}

/// What is wrong with the values of a VM of a file although it is valid, each as `FILE:LINE:COLUMN: warning: what`.
pub(super) fn warnings(file: &Path, vm: &VirtualMachine) -> Vec<String> {
    let line = |advice: Advice| {
        let message = format!("warning: {}: {}", advice.place(), advice.message);
        let at = place_in_vm(file, &vm.name_any(), advice.pointer, advice.at);
        FileError { file: file.to_owned(), at, message }.to_string()
    };
    advice(vm).into_iter().map(line).collect()
}

/// An error in the rendering of a VM from a file: at the place of the wrong value if it is one of the VM, else in the template.
pub(super) fn rendering_error(
    file: Option<&Path>,
    vm: &VirtualMachine,
    settings: &Settings,
    error: &TemplateError,
) -> FileError {
    let in_template = FileError::template(settings.templates.as_deref(), error);
    let of_vm = file.zip(error.vm_field.as_deref());
    match of_vm.and_then(|(file, pointer)| Some((file, place_of_vm(file, &vm.name_any(), pointer)?))) {
        Some((file, at)) => {
            let message = format!("{} ({})", error.message, in_template.file.display());
            FileError { file: file.to_owned(), at: Some(at), message }
        }
        None => in_template,
    }
}

/// A file, or all YAML files of a folder that have a VM.
pub(super) fn vm_files(path: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let is_folder = path.is_dir();
    let mut files: Vec<PathBuf> = match fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => vec![path.to_owned()],
    };
    files.sort();
    // Folders of examples also have files without a VM.
    files.into_iter().filter(move |file| {
        let is_yaml = file.extension().is_some_and(|end| end == "yaml" || end == "yml");
        !is_folder || is_yaml && fs::read_to_string(file).is_ok_and(|text| text.contains("kind: VirtualMachine"))
    })
}

/// Whether a document is a VM. A kind of the VMs' API group that does not exist is a mistake.
fn is_vm(value: &serde_yaml::Value, file: &Path, document: &Document<'_>) -> Result<bool, Failure> {
    let text = |key: &str| value.get(key).and_then(serde_yaml::Value::as_str).unwrap_or_default();
    let (version, kind) = (text("apiVersion"), text("kind"));
    let known = [VirtualMachine::kind(&()), VmPool::kind(&())];
    if version.split('/').next() != Some(GROUP) || known.contains(&kind.into()) {
        return Ok(kind == known[0]);
    }
    let line = document.lines_before
        + position::of_value(document.text, &[Step::Key("kind".into())]).map_or(1, |(line, _)| line);
    let place = format!("{}:{line}:1", file.display());
    Err(Failure::new(format!(
        "{place}: no matches for kind {kind:?} in version {version:?}: {}",
        suggestion(kind, &known)
    )))
}

/// The VMs of a file, or of all YAML files of a folder.
pub(super) fn read_vms_in(path: &Path) -> Result<Vec<VirtualMachine>, Failure> {
    if !path.is_dir() {
        return read_vms(path, DEFAULT_NAMESPACE);
    }
    fs::read_dir(path).map_err(FileError::io(path))?;
    let mut vms = Vec::new();
    let mut wrong = Vec::new();
    for file in vm_files(path) {
        match read_vms(&file, DEFAULT_NAMESPACE) {
            Ok(found) => vms.extend(found),
            Err(Failure::Command { lines, .. }) => wrong.extend(lines),
            Err(failure) => return Err(failure),
        }
    }
    if !wrong.is_empty() {
        return Err(Failure::Command { lines: wrong, exit: Exit::Negative });
    }
    if vms.is_empty() {
        return Err(Failure::new(format!("{}:1:1: there is no VirtualMachine in this folder", path.display())));
    }
    Ok(vms)
}

/// The text of a file, or of standard input (`-`).
pub(super) fn read_text(file: &Path) -> Result<String, Failure> {
    let mut text = String::new();
    if file != Path::new("-") {
        text = fs::read_to_string(file).map_err(FileError::io(file))?;
    } else if io::stdin().is_terminal() {
        return Err(Failure::new("-: standard input is a terminal; give a file or a pipe"));
    } else {
        io::stdin().read_to_string(&mut text).map_err(FileError::io(file))?;
    }
    // Editors of Windows write it, and the parser takes it for a document.
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// A document of a YAML stream.
#[derive(Debug, PartialEq)]
pub(super) struct Document<'a> {
    /// The lines of the stream before it: a parser counts from the start of the document.
    pub lines_before: usize,
    pub text: &'a str,
}

/// The documents of a YAML stream.
pub(super) fn documents(text: &str) -> Vec<Document<'_>> {
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
    fn what_is_wrong_in_the_text_of_a_value_is_told_at_its_line_in_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let begin = "kind: ConfigMap\n---\napiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\nmetadata: {name: a}\nspec:\n  cloudInit:\n";
        let end = "  vm: {maximumCpus: 1, disks: [], networks: []}\n";
        let block = "    userData: |\n      #cloud-config\n      users:\n        - name: a\n         shell: /bin/sh\n";
        let keys = "    userData: |\n      #cloud-config\n      package: [vim]\n";
        let quoted = "    userData: \"#cloud-config\\npackage: [vim]\\n\"\n";
        let mapping = "    userData: {package: [vim]}\n";
        for (data, line, words) in [
            (block, 12, "is no YAML"),
            (keys, 10, "no key \"package\""),
            (quoted, 8, "no key \"package\""),
            (mapping, 8, "no key \"package\""),
        ] {
            fs::write(file.path(), format!("{begin}{data}{end}")).unwrap();
            let vms = read_vms(file.path(), DEFAULT_NAMESPACE).unwrap_or_else(|failure| panic!("{}", failure.words()));
            let [warning] = warnings(file.path(), &vms[0]).try_into().unwrap();
            let place = format!("{}:{line}:", file.path().display());
            assert!(warning.starts_with(&place) && warning.contains(words), "{data}: {warning}");
        }
    }

    #[test]
    fn files_of_windows_are_read_and_lists_are_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let vm = "apiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\nmetadata: {name: a}\n\
                  spec:\n  vm: {maximumCpus: 1, disks: [], networks: []}\n";
        for text in [format!("\u{feff}{vm}"), vm.replace('\n', "\r\n"), format!("\u{feff}{}", vm.replace('\n', "\r\n"))]
        {
            fs::write(file.path(), &text).unwrap();
            let vms = read_vms(file.path(), DEFAULT_NAMESPACE).unwrap_or_else(|failure| panic!("{}", failure.words()));
            assert_eq!(vms.iter().map(ResourceExt::name_any).collect::<Vec<_>>(), ["a"], "{text:?}");
        }
        fs::write(file.path(), "apiVersion: v1\nkind: List\nitems: []\n").unwrap();
        let failure = read_vms(file.path(), DEFAULT_NAMESPACE).unwrap_err();
        assert!(failure.words().contains("in this file: a List is not read, write its VMs"), "{}", failure.words());
    }

    #[test]
    fn an_error_has_its_line_in_the_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let text = "kind: ConfigMap\n---\napiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\n\
                    metadata: {name: a}\nspec:\n  vm:\n    maximumCpus: many\n";
        fs::write(file.path(), text).unwrap();
        let Err(Failure::Command { lines, exit }) = read_vms(file.path(), DEFAULT_NAMESPACE) else { panic!() };
        assert_eq!(exit, Exit::Negative);
        let place = format!("{}:8:18: spec.vm.maximumCpus: Invalid value: \"string\"", file.path().display());
        assert!(lines.len() == 1 && lines[0].starts_with(&place), "{lines:?}");
    }
}
