//! The kubectl plugin `kubectl vm`: the same rendering and planning as the manager's.
//!
//! | exit code | meaning |
//! |---|---|
//! | 0 | done; of `diff`: no difference; of `lint` and `templates test`: all is well |
//! | 1 | the input is wrong, and what and where is on standard error; of `diff`: there are differences |
//! | 2 | the command line is wrong |
//! | 3 | of `diff`: it could not be found out |

mod diff;
mod display;
mod sets;

use std::{
    fs,
    io::{self, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use kube::{Client, ResourceExt};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{
    api::{VirtualMachine, crd},
    config::{Config, ReconcilerConfig},
    files::{self, FileError},
    object::Rendered,
    render::{Files, Library, Sources, TemplateError, TemplateSet, first_start, values::lay_over},
};

/// Works with virtual machines and with the templates that they are rendered from.
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
    /// is made for the first time. A comment before each object says which files and blocks it comes from. Errors are printed as
    /// FILE:LINE:COLUMN: what.
    Render {
        #[command(flatten)]
        input: Input,
    },
    /// Show what would change in the cluster, object by object, and when: at once, at the next start, or never.
    ///
    /// The machine is one of the cluster, or comes from a file. Without --templates it is rendered with the templates of the
    /// cluster. Nothing is changed: the API server is asked for what it would do (a dry run). Exit code 1 says that there are
    /// differences, 3 that it could not be found out.
    Diff(diff::Options),
    /// Print the connection file with which a viewer gets to the display of a machine, for remote-viewer.
    ///
    ///   kubectl vm display NAME | remote-viewer -
    ///
    /// If the password of the display secret lets nobody in any more, a new one is set, for the time of --valid-for, and is
    /// waited for.
    #[command(verbatim_doc_comment)]
    Display(display::Options),
    /// Find what is wrong with a folder of templates, or may surprise.
    ///
    /// Syntax, names that the context does not have, blocks and files that have no effect, guard rails, and the schema of the
    /// objects that come out, with the machines of --filename or a few built-in ones. Nothing is asked of a cluster.
    Lint(sets::LintOptions),
    /// Look at template sets, begin one, test one.
    #[command(subcommand)]
    Templates(sets::Templates),
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

/// What is rendered, and how.
#[derive(Args)]
struct Input {
    /// The file with the VirtualMachines; - for standard input. Other resources in it are passed over.
    #[arg(long, short, value_name = "FILE")]
    filename: PathBuf,
    #[command(flatten)]
    settings: Settings,
    /// The namespace of machines that name none.
    #[arg(long, short, default_value = "default", value_name = "NS")]
    namespace: String,
}

/// By what machines are rendered.
#[derive(Args)]
struct Settings {
    /// A folder of templates that lies over the built-in ones; its named sets are in its folder `sets`.
    #[arg(long, value_name = "DIR")]
    templates: Option<PathBuf>,
    /// A YAML file with values for the templates, over the manager's `templateValues`.
    #[arg(long, value_name = "FILE")]
    values: Option<PathBuf>,
    /// The manager's configuration.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
}

impl Settings {
    fn config(&self) -> Result<ReconcilerConfig, FileError> {
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

    fn library(&self) -> Result<Library, FileError> {
        library(self.templates.as_deref())
    }
}

/// How findings are printed.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// For people: with the source.
    Text,
    /// A list of objects.
    Json,
    /// For code scanning (SARIF 2.1.0).
    Sarif,
}

/// Runs the program.
pub fn main() -> ExitCode {
    let mut output = Vec::new();
    let result = run(Arguments::parse().command, &mut output);
    // Colours only where somebody sees them. A reader that has seen enough is no error.
    let printed = match anstream::stdout().write_all(&output) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other.map_err(|error| Failure::plain(format!("standard output: {error}"))),
    };
    match result.and_then(|code| printed.map(|()| code)) {
        Ok(code) => code.into(),
        Err(failure) => {
            for line in failure.lines {
                let _ = writeln!(io::stderr(), "{line}");
            }
            failure.code.into()
        }
    }
}

/// What is wrong, line by line, as `FILE:LINE:COLUMN: what`: compilers print it so and editors understand it.
struct Failure {
    lines: Vec<String>,
    code: u8,
}

impl Failure {
    fn plain(line: impl Into<String>) -> Self {
        Self { lines: vec![line.into()], code: 1 }
    }
}

impl From<FileError> for Failure {
    fn from(error: FileError) -> Self {
        let (line, column) = error.at.unwrap_or((1, 1));
        Self::plain(format!("{}:{line}:{column}: {}", error.file.display(), error.message))
    }
}

fn print(output: &mut Vec<u8>, text: &str) {
    output.extend_from_slice(text.as_bytes());
}

fn yaml(value: &Value) -> Result<String, Failure> {
    serde_saphyr::to_string(value).map_err(|error| Failure::plain(error.to_string()))
}

/// Does what takes a cluster.
fn wait_for<T>(task: impl Future<Output = T>) -> anyhow::Result<T> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(task))
}

/// The cluster of the kubeconfig, and the namespace: that of its context, unless one is given.
async fn connect(namespace: Option<&str>) -> anyhow::Result<(Client, String)> {
    let config = kube::Config::infer().await.context("there is no API server to ask")?;
    let namespace = namespace.unwrap_or(&config.default_namespace).to_owned();
    Ok((Client::try_from(config)?, namespace))
}

/// Returns the exit code of a command that has done what it should.
fn run(command: Command, output: &mut Vec<u8>) -> Result<u8, Failure> {
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
        Command::Render { input: Input { filename, settings, namespace } } => {
            let (config, library) = (settings.config()?, settings.library()?);
            for vm in machines(&filename, &namespace)? {
                let failed = |error: TemplateError| FileError::template(settings.templates.as_deref(), &error);
                let set = library.get(vm.template_set()).map_err(failed)?;
                for object in first_start(&vm, &config, set).map_err(failed)? {
                    print(output, &format!("---\n{}{}", origin(set, &object), yaml(&object.value)?));
                }
            }
        }
        Command::Diff(options) => return diff::run(&options, output),
        Command::Display(options) => return display::run(&options, output),
        Command::Lint(options) => return sets::lint(&options, output),
        Command::Templates(command) => return sets::run(command, output),
    }
    Ok(0)
}

/// Comments that say where an object comes from.
fn origin(set: &TemplateSet, object: &Rendered) -> String {
    let mut text = String::new();
    for (index, (file, blocks)) in set.lineage(&object.name).iter().enumerate() {
        let blocks = if blocks.is_empty() { String::new() } else { format!(" ({})", blocks.join(", ")) };
        let word = if index == 0 { "from" } else { "over" };
        text += &format!("# {word} {file}{}\n", if file.starts_with("builtin/") { String::new() } else { blocks });
    }
    for file in &object.patches {
        text += &format!("# changed by {file}\n");
    }
    text
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
            return Err(Failure { lines: violations.iter().map(at).collect(), code: 1 });
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
