//! The kubectl plugin `kubectl vm`: the same rendering as the manager's, without a cluster.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | the input is wrong; what and where is on standard error |
//! | 2 | the command line is wrong |

use std::{
    fs,
    io::{self, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{CommandFactory, Parser, Subcommand};
use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use serde::Deserialize;

use crate::{
    api::{VirtualMachine, crd},
    config::Config,
    files::{self, FileError},
    observed::Observed,
    render::{Facts, Library, Sources, render},
};

/// Works with virtual machines.
#[derive(Parser)]
#[command(name = "kubectl-vm", bin_name = "kubectl vm", version, propagate_version = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the version.
    Version,
    /// Print the objects that the manager would make for the machines of a file, as YAML.
    ///
    /// Nothing is asked of a cluster: what depends on one (a UID, a random password, claims that exist) is as for a machine that
    /// is made for the first time. Errors are printed as FILE:LINE:COLUMN: what.
    Render {
        /// The file with the VirtualMachines; - for standard input. Other resources in it are passed over.
        #[arg(long, short, value_name = "FILE")]
        filename: PathBuf,
        /// A folder of templates that lies over the built-in ones.
        #[arg(long, value_name = "DIR")]
        templates: Option<PathBuf>,
        /// The manager's configuration.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// The namespace of machines that name none.
        #[arg(long, short, default_value = "default", value_name = "NS")]
        namespace: String,
    },
    /// Print the CustomResourceDefinitions, or write them into a folder.
    Crds {
        /// The folder; each definition is a file of it.
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Print a script that completes this command in a shell, for `source`.
    Completion {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// Runs the program.
pub fn main() -> ExitCode {
    let mut output = Vec::new();
    let result = run(Arguments::parse().command, &mut output);
    // A reader that has seen enough is no error.
    let printed = match io::stdout().write_all(&output) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    };
    match result.and_then(|()| printed.map_err(|error| Failure::plain(format!("standard output: {error}")))) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            for line in failure.0 {
                let _ = writeln!(io::stderr(), "{line}");
            }
            ExitCode::FAILURE
        }
    }
}

/// What is wrong, line by line, as `FILE:LINE:COLUMN: what`: compilers print it so and editors understand it.
struct Failure(Vec<String>);

impl Failure {
    fn plain(line: impl Into<String>) -> Self {
        Self(vec![line.into()])
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let (line, column) = error.at.unwrap_or((1, 1));
        Self::plain(format!("{}:{line}:{column}: {}", error.file.display(), error.message))
    }
}

fn run(command: Command, output: &mut Vec<u8>) -> Result<(), Failure> {
    let print = |output: &mut Vec<u8>, text: &str| output.extend_from_slice(text.as_bytes());
    match command {
        Command::Version => print(output, concat!("kubectl-vm ", env!("CARGO_PKG_VERSION"), "\n")),
        Command::Crds { out } => {
            for (name, text) in crd::files().map_err(|error| Failure::plain(error.to_string()))? {
                match &out {
                    Some(folder) => fs::write(folder.join(&name), text).map_err(FileError::io(&folder.join(&name)))?,
                    None => print(output, &format!("---\n{text}")),
                }
            }
        }
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Arguments::command(), "kubectl-vm", output)
        }
        Command::Render { filename, templates, config, namespace } => {
            let config = config.map_or_else(|| Ok(Config::default()), |file| files::configuration(&file))?;
            let library = library(templates.as_deref())?;
            for vm in machines(&filename, &namespace)? {
                let observed = Observed { objects: Vec::new(), now: Timestamp::UNIX_EPOCH };
                let facts = Facts { display_password: "random".into() };
                let name = vm.spec.templates.as_ref().and_then(|templates| templates.set.as_deref());
                let objects = library
                    .get(name)
                    .and_then(|set| render(&vm, &observed, &config.reconciler, &facts, set))
                    .map_err(|error| FileError::template(templates.as_deref(), &error))?;
                for object in objects {
                    let yaml =
                        serde_saphyr::to_string(&object.value).map_err(|error| Failure::plain(error.to_string()))?;
                    print(output, &format!("---\n# {}\n{yaml}", object.template));
                }
            }
        }
    }
    Ok(())
}

/// The template sets of a folder, over the built-in templates.
fn library(folder: Option<&Path>) -> Result<Library, FileError> {
    folder.map_or_else(|| Ok(Sources::default()), files::sources).map(|sources| Library::new(&sources))
}

/// The machines of a file, each checked against the types of its fields.
fn machines(file: &Path, namespace: &str) -> Result<Vec<VirtualMachine>, Failure> {
    let text = if file == Path::new("-") {
        if io::stdin().is_terminal() {
            return Err(Failure::plain("-: standard input is a terminal; give a file or a pipe"));
        }
        let mut text = String::new();
        io::stdin().read_to_string(&mut text).map(|_| text)
    } else {
        fs::read_to_string(file)
    }
    .map_err(FileError::io(file))?;
    let mut machines = Vec::new();
    for (first_line, document) in documents(&text) {
        let error = |error: serde_yaml::Error| FileError::yaml(file, &error, first_line);
        let value: serde_yaml::Value = serde_yaml::from_str(document).map_err(error)?;
        if value.get("kind").and_then(serde_yaml::Value::as_str) != Some("VirtualMachine") {
            continue;
        }
        let mut vm = VirtualMachine::deserialize(serde_yaml::Deserializer::from_str(document)).map_err(error)?;
        // The rules that the API server would check.
        if let Err(violations) = kube::core::cel::validate_cel(&vm) {
            let at = |violation| format!("{}:{}:1: {}: {violation}", file.display(), first_line + 1, vm.name_any());
            return Err(Failure(violations.iter().map(at).collect()));
        }
        vm.metadata.namespace.get_or_insert_with(|| namespace.to_owned());
        machines.push(vm);
    }
    if machines.is_empty() {
        return Err(Failure::plain(format!("{}:1:1: there is no VirtualMachine in this file", file.display())));
    }
    Ok(machines)
}

/// The documents of a YAML stream, each with the number of lines before it: the parser counts from each document's start.
fn documents(text: &str) -> Vec<(usize, &str)> {
    let mut documents = Vec::new();
    let (mut start, mut start_line, mut offset) = (0, 0, 0);
    for (number, line) in text.split_inclusive('\n').enumerate() {
        if line.trim_end() == "---" || line.starts_with("--- ") {
            documents.push((start_line, &text[start..offset]));
            (start, start_line) = (offset, number);
        }
        offset += line.len();
    }
    documents.push((start_line, &text[start..]));
    documents
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn documents_keep_their_lines() {
        assert_eq!(documents("a\n---\nb\n---\nc"), [(0, "a\n"), (1, "---\nb\n"), (3, "---\nc")]);
        assert_eq!(documents(""), [(0, "")]);
    }
}
