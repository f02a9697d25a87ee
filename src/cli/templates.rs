//! `kubectl vm templates`: for people who write templates.

mod cases;
mod history;
mod pack;
mod rollback;

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::{Args, Subcommand};
use serde_json::Value;

use super::{
    input::{library, template_set},
    output::{Exit, Failure, Output},
};
use crate::{
    files::{self, FileError},
    render::{
        Sources, TemplateSet,
        builtin::{BLOCKS, BUILTIN},
        context::VERSION,
        functions, schema,
        values::SCHEMA,
    },
};

#[derive(Subcommand)]
pub(super) enum Command {
    /// List the templates, where each comes from, and its blocks.
    List {
        #[command(flatten)]
        set: SetOptions,
    },
    /// Print a template.
    Show {
        /// Its name, such as pod.yaml.j2; `builtin/` before it stands for the built-in one.
        name: String,
        #[command(flatten)]
        set: SetOptions,
    },
    /// Create a template that overrides a built-in one: a file with its blocks to choose from.
    New {
        /// The built-in template, such as pod.yaml.j2.
        name: String,
        /// The folder to write it to.
        #[arg(long, value_name = "DIR", default_value = ".")]
        templates: PathBuf,
    },
    /// Run the test cases of a folder of templates.
    ///
    /// Each folder tests/CASE has a vm.yaml and an expected.yaml with the objects that it renders to (or the error), and may have
    /// a config.yaml for the manager.
    Test {
        /// The folder of templates.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Write the results as the expected ones.
        #[arg(long)]
        update: bool,
    },
    /// Print the ConfigMap for a folder of templates, to be applied in the manager's namespace.
    ///
    /// Without --set it is the one that is mounted into the manager, for all VMs. A ConfigMap's keys have no folders: `__` stands
    /// for `/`. What `kubectl vm lint` calls an error is not packed; the options of lint say with what the templates are checked.
    Pack(pack::Options),
    /// List the versions of a template set that came in force in a cluster, the newest first.
    ///
    /// The manager keeps the last five of each set. The namespace is the manager's.
    History(history::Options),
    /// Write a former version of a template set back into its ConfigMap, or into a folder.
    ///
    /// Without --to it is the version in force, if the manager refuses what the ConfigMap has now, and else the version before the one in
    /// force. The manager checks it as any other change before it uses it. The namespace is the manager's.
    Rollback(rollback::Options),
    /// List the blocks of the built-in templates, and what each is for.
    Blocks,
    /// Print a JSON schema: of what templates can read or, with --vm, of VirtualMachines, for an editor.
    ///
    /// With the YAML language server, the first line `# yaml-language-server: $schema=FILE` in a file uses it.
    Schema {
        /// Of the resource VirtualMachine.
        #[arg(long, conflicts_with = "templates", alias = "machine")]
        vm: bool,
        /// A folder of templates, for the schema of its values.
        #[arg(long, value_name = "DIR")]
        templates: Option<PathBuf>,
    },
    /// List the filters and functions that templates have besides Jinja's own.
    Functions,
}

/// A template set.
#[derive(Args)]
pub(super) struct SetOptions {
    /// A folder of templates over the built-in ones.
    #[arg(long, value_name = "DIR")]
    templates: Option<PathBuf>,
    /// One of its named sets.
    #[arg(long, value_name = "NAME")]
    set: Option<String>,
}

pub(super) async fn run(command: &Command, output: &mut Output<'_>) -> Result<Exit, Failure> {
    match command {
        Command::List { set } => list(set, output)?,
        Command::Show { name, set } => show(name, set, output)?,
        Command::New { name, templates } => new(name, templates, output)?,
        Command::Test { folder, update } => return cases::run(folder, *update, output),
        Command::Pack(options) => pack::run(options, output).await?,
        Command::History(options) => return history::run(options, output).await,
        Command::Rollback(options) => return rollback::run(options, output).await,
        Command::Blocks => {
            for (template, block, about, since) in BLOCKS {
                writeln!(output, "{template:30} {block:21} {about} (since {since})")?;
            }
        }
        Command::Schema { vm: true, .. } => writeln!(output, "{:#}", schema::virtual_machine())?,
        Command::Schema { templates, .. } => writeln!(output, "{:#}", context_schema(templates.as_deref())?)?,
        Command::Functions => {
            for functions::Function { usage, about, example, gives } in functions::TABLE {
                writeln!(output, "{usage}\n    {about}\n    {example} gives {gives}")?;
            }
        }
    }
    Ok(Exit::Success)
}

/// A row of the list of templates.
struct Row<'a> {
    name: &'a str,
    from: &'a str,
    blocks: String,
}

fn list(options: &SetOptions, output: &mut Output<'_>) -> Result<(), Failure> {
    let folder = options.templates.as_deref();
    let library = library(folder)?;
    let set = template_set(&library, options.set.as_deref(), folder)?;
    let title = Row { name: "TEMPLATE", from: "FROM", blocks: "BLOCKS".into() };
    let mut rows = vec![title];
    rows.extend(set.all().map(|(name, from)| {
        let blocks: Vec<String> = set.blocks(name).into_iter().collect();
        Row { name, from, blocks: blocks.join(" ") }
    }));
    let width = |text: fn(&Row<'_>) -> usize| rows.iter().map(text).max().unwrap_or(0);
    let (first, second) = (width(|row| row.name.len()), width(|row| row.from.len()));
    for Row { name, from, blocks } in &rows {
        writeln!(output, "{}", format!("{name:first$}  {from:second$}  {blocks}").trim_end())?;
    }
    writeln!(output, "\nversion {} of the set, version {VERSION} of the context", set.version())?;
    let sets: Vec<&str> = library.all().filter_map(|(name, _)| name).collect();
    if !sets.is_empty() {
        writeln!(output, "named sets: {}", sets.join(", "))?;
    }
    Ok(())
}

fn show(name: &str, options: &SetOptions, output: &mut Output<'_>) -> Result<(), Failure> {
    let folder = options.templates.as_deref();
    let library = library(folder)?;
    let set: &TemplateSet = template_set(&library, options.set.as_deref(), folder)?;
    let text = set.find(None, name).and_then(|name| set.source(&name)).ok_or_else(|| {
        let names: Vec<&str> = set.all().map(|(name, _)| name).collect();
        Failure::new(format!("there is no template {name:?}; there are {}", names.join(", ")))
    })?;
    write!(output, "{text}")
}

fn new(name: &str, folder: &Path, output: &mut Output<'_>) -> Result<(), Failure> {
    let is_named = |builtin: &str| builtin == name || builtin.strip_suffix(".yaml.j2") == Some(name);
    let Some((name, _)) = BUILTIN.iter().find(|(builtin, _)| is_named(builtin)) else {
        let names: Vec<&str> = BUILTIN.iter().map(|(name, _)| *name).collect();
        return Err(Failure::new(format!("there is no built-in template {name:?}; there are {}", names.join(", "))));
    };
    let file = folder.join(name);
    if file.exists() {
        return Err(Failure::new(format!("{}:1:1: this file exists already", file.display())));
    }
    let mut text = format!(
        "{{# Changes {name}. Keep the blocks that you need, and take out the rest: what is not here stays as it is.\n   \
         {{{{ super() }}}} is what the block has; `kubectl vm templates show builtin/{name}` prints all of it. #}}\n\
         {{% extends \"base/{name}\" %}}\n"
    );
    for (_, block, about, _) in BLOCKS.iter().filter(|(template, ..)| template == name) {
        text += &format!("\n{{# {about} #}}\n{{% block {block} %}}\n{{{{ super() }}}}\n{{% endblock %}}\n");
    }
    let parent = file.parent().unwrap_or(folder);
    fs::create_dir_all(parent).map_err(FileError::io(parent))?;
    fs::write(&file, text).map_err(FileError::io(&file))?;
    writeln!(output, "wrote {}", file.display())?;
    let schema = folder.join(SCHEMA);
    if schema.exists() {
        return Ok(());
    }
    // Who writes VMs sets what the templates read, so it is closed until somebody opens it.
    fs::write(&schema, "{\n  \"additionalProperties\": false,\n  \"properties\": {}\n}\n")
        .map_err(FileError::io(&schema))?;
    writeln!(output, "wrote {}: add the values that a VM may set", schema.display())
}

/// The schema of the template context, with that of the folder's values.
fn context_schema(folder: Option<&Path>) -> Result<Value, Failure> {
    let sources = folder.map_or_else(|| Ok(Sources::default()), files::sources)?;
    let values = sources.base.get(SCHEMA).map(|text| serde_json::from_str::<Value>(text)).transpose();
    let values = values.map_err(|error| Failure::new(format!("{SCHEMA}: {error}")))?;
    Ok(schema::context(values))
}
