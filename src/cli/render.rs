//! `kubectl vm render`: the objects that the manager would make.

use std::path::PathBuf;

use clap::Args;
use kube::ResourceExt;
use serde_json::Value;

use super::{
    input::{Settings, read_vms, rendering_error, warnings},
    installed::InstalledOptions,
    output::{Exit, Failure, Output, note, yaml},
};
use crate::{
    object::{HASH_ANNOTATION, Rendered, VERSION_ANNOTATION},
    render::{TemplateError, TemplateSet, first_start, qemu::CommandLine, templates::Ancestor},
};

/// What is rendered, and how.
#[derive(Args)]
pub(super) struct Options {
    /// The file with the VirtualMachines; - for standard input. Other resources in it are skipped.
    #[arg(long, short, value_name = "FILE")]
    filename: PathBuf,
    /// Print QEMU's command line instead, as it is on a node that has what the runner asks for.
    #[arg(long)]
    qemu: bool,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    installed: InstalledOptions,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Options { filename, qemu, settings, installed } = options;
    let asks_cluster = installed.installed;
    let (installed, namespace) = installed.read(settings).await?;
    let library = installed.library();
    for vm in read_vms(filename, &namespace)? {
        warnings(filename, &vm).iter().for_each(|line| note(line));
        let wrong = |error| rendering_error(Some(filename), &vm, settings, &error);
        let set = library.get(vm.template_set()).map_err(|error| match error.vm_field {
            Some(_) if !asks_cluster => wrong(TemplateError {
                message: format!("{}; with --installed the sets of the cluster are known", error.message),
                ..error
            }),
            _ => wrong(error),
        })?;
        let objects = first_start(&vm, &installed.config, set).map_err(wrong)?;
        if *qemu {
            let Some(line) = CommandLine::of(set, &objects).map_err(wrong)? else {
                return Err(Failure::new("the VM has a legacy runner, which makes QEMU's command line by itself"));
            };
            let options = line.options.iter().fold(String::new(), |text, option| text + option + "\n");
            write!(output, "# {}\n{}{options}", vm.name_any(), lineage(set, &line.template))?;
            continue;
        }
        for object in objects {
            write!(output, "---\n{}{}", origin(set, &object), yaml(&object.value)?)?;
        }
    }
    Ok(Exit::Success)
}

/// Comments that say which files and blocks an object comes from.
pub(super) fn origin(set: &TemplateSet, object: &Rendered) -> String {
    let mut text = lineage(set, &object.name);
    for file in &object.patches {
        text += &format!("# changed by {file}\n");
    }
    text
}

/// Comments that say of which files a template consists.
pub(super) fn lineage(set: &TemplateSet, template: &str) -> String {
    let mut text = String::new();
    for (index, Ancestor { file, blocks }) in set.lineage(template).iter().enumerate() {
        let word = if index == 0 { "from" } else { "over" };
        // The blocks of a built-in template are all that it has.
        let blocks = if blocks.is_empty() || file.starts_with("builtin/") {
            String::new()
        } else {
            let names: Vec<&str> = blocks.iter().map(|block| block.name.as_str()).collect();
            format!(" ({})", names.join(", "))
        };
        text += &format!("# {word} {file}{blocks}\n");
    }
    text
}

/// Removes the annotations that name the release or depend on it.
pub(super) fn remove_release(object: &mut Value) {
    let Some(metadata) = object["metadata"].as_object_mut() else { return };
    let Some(Value::Object(annotations)) = metadata.get_mut("annotations") else { return };
    annotations.remove(HASH_ANNOTATION);
    annotations.remove(VERSION_ANNOTATION);
    if annotations.is_empty() {
        metadata.remove("annotations");
    }
}
