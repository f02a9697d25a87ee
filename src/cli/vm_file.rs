//! A VM from a file, for a program that runs it without a cluster: read, changed by assignments, checked, and rendered as by
//! `kubectl vm render`.

use std::path::{Path, PathBuf};

use kube::ResourceExt;
use serde_json::Value;

use super::{
    input::{self, DEFAULT_NAMESPACE, Settings},
    manifest::{self, Violation, position::Step},
    output::Failure,
};
use crate::{
    api::VirtualMachine,
    config::{Allowed, ReconcilerConfig},
    files::FileError,
    object::Rendered,
    render::{self, first_start},
};

/// What is wrong, line by line: with the place in the file if it is there.
#[derive(Debug, thiserror::Error)]
#[error("{}", .0.join("\n"))]
pub struct Errors(pub Vec<String>);

impl From<Failure> for Errors {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Command { lines, .. } => Self(lines),
            Failure::Output(error) => Self(vec![error.to_string()]),
        }
    }
}

impl From<FileError> for Errors {
    fn from(error: FileError) -> Self {
        Failure::from(error).into()
    }
}

/// A VM of a file, and the other objects of the file.
#[derive(Debug)]
pub struct VmFile {
    /// The file.
    pub file: PathBuf,
    /// The VM, with the assignments.
    pub vm: VirtualMachine,
    /// The other objects.
    pub others: Vec<Value>,
}

/// The templates, values and configuration by which a VM is rendered. `None`: the built-in ones.
#[derive(Debug, Default)]
pub struct RenderOptions {
    /// A folder of templates over the built-in ones.
    pub templates: Option<PathBuf>,
    /// A file with values for the templates.
    pub values: Option<PathBuf>,
    /// The manager's configuration.
    pub config: Option<PathBuf>,
}

/// Reads the VM of a file (`-`: standard input), checked as the API server checks it, before and after the assignments: `PATH=VALUE`, such
/// as `spec.vm.currentCpus=2`.
///
/// # Errors
/// All that is wrong with the file, else all that is wrong with the assignments.
pub fn read(file: &Path, assignments: &[String]) -> Result<VmFile, Errors> {
    let text = input::read_text(file)?;
    let mut vms = input::vms_in(&text, file, DEFAULT_NAMESPACE)?;
    let (Some(mut vm), true) = (vms.pop(), vms.is_empty()) else {
        let names: Vec<String> = vms.iter().map(ResourceExt::name_any).collect();
        let names = names.join(", ");
        let message =
            format!("{}:1:1: the file has several VMs ({names}, ...): put each into a file of its own", file.display());
        return Err(Errors(vec![message]));
    };
    let mut others = Vec::new();
    for document in input::documents(&text) {
        let mut value: serde_yaml::Value = crate::yaml::from_str(document.text)
            .map_err(|error| FileError::yaml(file, &error, document.lines_before))?;
        if value.get("kind").and_then(serde_yaml::Value::as_str) != Some("VirtualMachine") {
            others.push(serde_json::to_value(value).map_err(|error| Errors(vec![error.to_string()]))?);
            continue;
        }
        if assignments.is_empty() {
            continue;
        }
        for assignment in assignments {
            assign(&mut value, assignment).map_err(|what| Errors(vec![format!("--set {assignment}: {what}")]))?;
        }
        // The places of what was assigned are not in the file.
        let line = |Violation { message, .. }: Violation| format!("--set: {message}");
        let namespace = vm.metadata.namespace;
        vm = manifest::read(document.text, &value)
            .map_err(|violations| Errors(violations.into_iter().map(line).collect()))?;
        vm.metadata.namespace = vm.metadata.namespace.or(namespace);
    }
    Ok(VmFile { file: file.to_owned(), vm, others })
}

/// The objects of the VM at its first start.
///
/// # Errors
/// If templates, values or configuration are wrong, with their places.
pub fn rendered(vm: &VmFile, options: RenderOptions) -> Result<Vec<Rendered>, Errors> {
    let VmFile { file, vm, .. } = vm;
    let RenderOptions { templates, values, config } = options;
    let settings = Settings { templates, values, config };
    let wrong = |error: render::TemplateError| input::rendering_error(Some(file), vm, &settings, &error);
    let library = input::library(settings.templates.as_deref())?;
    let set = library.get(vm.template_set()).map_err(wrong)?;
    // The VM runs with the rights of whoever runs it, on that person's computer.
    let config = ReconcilerConfig { allowed: Allowed::everything(), ..settings.config()? };
    Ok(first_start(vm, &config, set).map_err(wrong)?)
}

/// Carries out an assignment. A missing mapping on the way is made; an item of a list must exist, or be the next one.
fn assign(document: &mut serde_yaml::Value, assignment: &str) -> Result<(), String> {
    const FORM: &str = "write PATH=VALUE, such as spec.vm.currentCpus=2 or spec.vm.disks[0].bootindex=1";
    let (path, text) = assignment.split_once('=').ok_or(FORM)?;
    let value: serde_yaml::Value = crate::yaml::from_str(text).map_err(|error| format!("{error}; {FORM}"))?;
    let steps = manifest::steps(path);
    if steps.is_empty() {
        return Err(FORM.into());
    }
    let mut place = document;
    let mut walked = String::new();
    for step in steps {
        place = match step {
            Step::Key(key) => {
                if place.is_null() {
                    *place = serde_yaml::Value::Mapping(serde_yaml::Mapping::new());
                }
                let mapping = place.as_mapping_mut().ok_or_else(|| format!("{walked} has no fields"))?;
                walked += &format!("{}{key}", if walked.is_empty() { "" } else { "." });
                mapping.entry(key.into()).or_insert(serde_yaml::Value::Null)
            }
            Step::Index(index) => {
                if place.is_null() {
                    *place = serde_yaml::Value::Sequence(Vec::new());
                }
                let list = place.as_sequence_mut().ok_or_else(|| format!("{walked} is no list"))?;
                let length = list.len();
                if index == length {
                    list.push(serde_yaml::Value::Null);
                }
                walked += &format!("[{index}]");
                list.get_mut(index).ok_or_else(|| format!("there is no {walked}: the list has {length} items"))?
            }
        };
    }
    *place = value;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use serde_json::json;

    use super::*;

    const VM: &str = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\napiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\n\
                      metadata: {name: apple}\nspec:\n  vm:\n    maximumCpus: 2\n    disks: [{cdrom: {image: a.iso}}]\n";

    fn read_with(assignments: &[&str]) -> Result<VmFile, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), VM).unwrap();
        let assignments: Vec<String> = assignments.iter().map(|it| (*it).to_owned()).collect();
        read(file.path(), &assignments).map_err(|errors| errors.to_string())
    }

    #[test]
    fn assignments_are_yaml_and_checked_like_the_file() {
        let file = read_with(&[
            "spec.vm.currentCpus=2",
            "spec.vm.disks[0].cdrom.image=b.iso",
            "spec.vm.disks[1]={cdrom: {image: ''}}",
            "spec.vm.networks.0.user={}",
            "metadata.labels.a=\"1\"",
        ])
        .unwrap();
        let vm = json!(file.vm);
        assert_eq!(vm["spec"]["vm"]["currentCpus"], 2);
        let images: Vec<&Value> = [0, 1].iter().map(|at| &vm["spec"]["vm"]["disks"][*at]["cdrom"]["image"]).collect();
        assert_eq!(images, ["b.iso", ""]);
        assert_eq!(
            (vm["spec"]["vm"]["networks"][0]["user"].is_object(), &vm["metadata"]["labels"]["a"]),
            (true, &json!("1"))
        );
        assert_eq!(file.others[0]["kind"], "Secret");
        assert_eq!(file.vm.metadata.namespace.as_deref(), Some("default"));
    }

    #[test]
    fn a_wrong_assignment_says_what_to_write() {
        let wrong = [
            "spec.vm.currentCpus",
            "=1",
            "spec.vm.maximumCpus.a=1",
            "spec.vm.disks[3]=1",
            "spec.vm.currentCpus=many",
            "spec.vm.currentCpu=1",
            "spec.vm.currentCpus=3",
            "spec.vm.maximumRam=[",
        ];
        insta::assert_snapshot!(wrong.map(|it| format!("{it}\n  {}", read_with(&[it]).unwrap_err())).join("\n"));
    }
}
