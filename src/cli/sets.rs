//! Commands for people who write templates: lint, list, show, new, test, pack, schema.

use std::{
    collections::BTreeMap,
    fs,
    io::IsTerminal,
    path::{Path, PathBuf},
    sync::Arc,
};

use annotate_snippets::{AnnotationKind, Level, Renderer, Snippet};
use anstyle::AnsiColor;
use clap::{Args, Subcommand};
use serde_json::{Value, json};
use similar::{ChangeTag, TextDiff};

use super::{Failure, Files, Format, Settings, first_start, machines, origin, print, yaml};
use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    files::{self, CASES, FileError, SETS},
    lint::{self, Finding, Severity},
    object::{HASH_ANNOTATION, SET_LABEL, VERSION_ANNOTATION},
    render::{
        Library, Sources,
        builtin::{BLOCKS, BUILTIN},
        check,
        context::VERSION,
        functions, schema,
        values::SCHEMA,
    },
};

#[derive(Args)]
pub struct LintOptions {
    /// The folder of templates.
    #[arg(value_name = "DIR")]
    folder: PathBuf,
    /// The folder of templates for all machines, where DIR is a named set over it.
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

#[derive(Subcommand)]
pub enum Templates {
    /// List the templates, where each comes from, and its blocks.
    List {
        /// A folder of templates that lies over the built-in ones.
        #[arg(long, value_name = "DIR")]
        templates: Option<PathBuf>,
        /// One of its named sets.
        #[arg(long, value_name = "NAME")]
        set: Option<String>,
    },
    /// Print a template.
    Show {
        /// Its name, such as pod.yaml.j2; `builtin/` before it stands for the built-in one.
        name: String,
        /// A folder of templates that lies over the built-in ones.
        #[arg(long, value_name = "DIR")]
        templates: Option<PathBuf>,
        /// One of its named sets.
        #[arg(long, value_name = "NAME")]
        set: Option<String>,
    },
    /// Begin a template of your own that changes a built-in one: a file with its blocks to choose from.
    New {
        /// The built-in template, such as pod.yaml.j2.
        name: String,
        /// The folder to write it to.
        #[arg(long, value_name = "DIR", default_value = ".")]
        templates: PathBuf,
    },
    /// Run the test cases of a folder of templates.
    ///
    /// Each folder tests/CASE has a vm.yaml and an expected.yaml with the objects that it becomes (or the error), and may have a
    /// config.yaml for the manager.
    Test {
        /// The folder of templates.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Write what comes out as what is expected.
        #[arg(long)]
        update: bool,
    },
    /// Print the ConfigMap for a folder of templates, to be applied where the manager is.
    ///
    /// Without --set it is the one that is mounted into the manager, for all machines. A ConfigMap's keys have no folders: `__`
    /// stands for `/`.
    Pack {
        /// The folder of templates.
        #[arg(value_name = "DIR")]
        folder: PathBuf,
        /// Make it the set of that name, for machines that choose it.
        #[arg(long, value_name = "NAME")]
        set: Option<String>,
        /// The ConfigMap's name. Default: vm-operator-templates, with the set's name after it.
        #[arg(long, value_name = "NAME")]
        name: Option<String>,
    },
    /// List the blocks of the built-in templates, and what each is for.
    Blocks,
    /// Print a JSON schema: of what templates can read or, with --machine, of machines, for an editor.
    ///
    /// With the YAML language server, the first line `# yaml-language-server: $schema=FILE` in a file uses it.
    Schema {
        /// Of the resource VirtualMachine.
        #[arg(long, conflicts_with = "templates")]
        machine: bool,
        /// A folder of templates, for the schema of its values.
        #[arg(long, value_name = "DIR")]
        templates: Option<PathBuf>,
    },
    /// List the filters and functions that templates have besides Jinja's own.
    Functions,
}

/// What a set is called that is looked at by its folder.
const NAMELESS: &str = "this";

pub fn lint(options: &LintOptions, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let settings = Settings {
        templates: Some(options.folder.clone()),
        values: options.values.clone(),
        config: options.config.clone(),
    };
    let config = settings.config()?;
    let mut sources = files::sources(&options.folder)?;
    if let Some(base) = &options.base {
        let set = std::mem::take(&mut sources.base);
        sources = Sources { base: files::sources(base)?.base, sets: BTreeMap::from([(NAMELESS.to_owned(), set)]) };
    }
    let examples = match &options.filename {
        Some(path) => given(path)?,
        None => check::examples(),
    };
    let mut findings = lint::lint(&sources, &examples, &config);
    if options.base.is_some() {
        let prefix = format!("{SETS}/{NAMELESS}/");
        findings.retain_mut(|finding| match finding.file.strip_prefix(&prefix).map(str::to_owned) {
            Some(file) => {
                finding.file = file;
                true
            }
            // The base is looked at by itself.
            None => false,
        });
    }
    for finding in &mut findings {
        if !finding.file.starts_with("builtin/") && options.folder.join(&finding.file).exists() {
            finding.file = options.folder.join(&finding.file).display().to_string();
        }
    }
    match options.format {
        Format::Json => print(output, &format!("{:#}\n", json!(findings))),
        Format::Sarif => print(output, &format!("{:#}\n", lint::sarif(&findings))),
        Format::Text => {
            for finding in &findings {
                print(output, &shown(finding));
            }
            let count = |severity| findings.iter().filter(|finding| finding.severity == severity).count();
            let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
            let base = if options.base.is_some() { 0 } else { sources.base.len() };
            let files = base + sources.sets.values().map(Files::len).sum::<usize>();
            print(
                output,
                &format!(
                    "{}, {}: {}, {}\n",
                    counted(files, "file"),
                    counted(examples.len(), "machine"),
                    counted(errors, "error"),
                    counted(warnings, "warning")
                ),
            );
        }
    }
    let bad = |finding: &Finding| options.strict || finding.severity == Severity::Error;
    Ok(u8::from(findings.iter().any(bad)))
}

fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// A finding with its source, as rustc prints it.
fn shown(finding: &Finding) -> String {
    let level = if finding.severity == Severity::Error { Level::ERROR } else { Level::WARNING };
    let title = level.primary_title(finding.message.as_str()).id(finding.rule.name());
    let source = fs::read_to_string(&finding.file).ok().or_else(|| {
        let name = finding.file.strip_prefix("builtin/")?;
        BUILTIN.iter().find(|(builtin, _)| *builtin == name).map(|(_, text)| (*text).to_owned())
    });
    let place = source.as_ref().zip(finding.line).and_then(|(source, line)| {
        // An end that comes too early is after the last line.
        let line = line.min(source.lines().count().max(1));
        let start: usize = source.split_inclusive('\n').take(line - 1).map(str::len).sum();
        let text = source.get(start..)?.lines().next()?;
        let column = text.char_indices().nth(finding.column.unwrap_or(1) - 1).map_or(text.len(), |(at, _)| at);
        let word =
            text[column..].find(|c: char| !(c.is_alphanumeric() || "_./-".contains(c))).unwrap_or(text.len() - column);
        Some((source, start + column..start + column + word.max(1)))
    });
    let renderer = if std::io::stdout().is_terminal() { Renderer::styled() } else { Renderer::plain() };
    let report = match place {
        Some((source, span)) => {
            let span = span.start.min(source.len())..span.end.min(source.len());
            let snippet = Snippet::source(source.as_str()).path(finding.file.as_str());
            renderer.render(&[title.element(snippet.annotation(AnnotationKind::Primary.span(span)))])
        }
        None => renderer.render(&[title.element(annotate_snippets::Origin::path(finding.file.as_str()))]),
    };
    format!("{report}\n\n")
}

/// The machines of a file, or of all files of a folder.
fn given(path: &Path) -> Result<Vec<VirtualMachine>, Failure> {
    if !path.is_dir() {
        return machines(path, "default");
    }
    let mut all = Vec::new();
    let mut paths: Vec<PathBuf> =
        fs::read_dir(path).map_err(FileError::io(path))?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    for file in paths.iter().filter(|file| file.extension().is_some_and(|end| end == "yaml" || end == "yml")) {
        // A folder of examples holds other resources, too.
        if fs::read_to_string(file).is_ok_and(|text| text.contains("kind: VirtualMachine")) {
            all.extend(machines(file, "default")?);
        }
    }
    if all.is_empty() {
        return Err(Failure::plain(format!("{}:1:1: there is no VirtualMachine in this folder", path.display())));
    }
    Ok(all)
}

pub fn run(command: Templates, output: &mut Vec<u8>) -> Result<u8, Failure> {
    match command {
        Templates::List { templates, set } => list(templates.as_deref(), set.as_deref(), output),
        Templates::Show { name, templates, set } => {
            let library = super::library(templates.as_deref())?;
            let set = library.get(set.as_deref()).map_err(|error| FileError::template(templates.as_deref(), &error))?;
            let text = set.source(&name).ok_or_else(|| {
                let names: Vec<&str> = set.all().map(|(name, _)| name).collect();
                Failure::plain(format!("there is no template {name:?}; there are {}", names.join(", ")))
            })?;
            print(output, &text);
            Ok(0)
        }
        Templates::New { name, templates } => new(&name, &templates, output),
        Templates::Test { folder, update } => test(&folder, update, output),
        Templates::Schema { machine: true, .. } => {
            print(output, &format!("{:#}\n", schema::machine()));
            Ok(0)
        }
        Templates::Schema { templates, .. } => {
            let sources = templates.as_deref().map_or_else(|| Ok(Sources::default()), files::sources)?;
            let values = sources.base.get(SCHEMA).map(|text| serde_json::from_str::<Value>(text));
            let values = values.transpose().map_err(|error| Failure::plain(format!("{SCHEMA}: {error}")))?;
            print(output, &format!("{:#}\n", schema::context(values)));
            Ok(0)
        }
        Templates::Pack { folder, set, name } => pack(&folder, set.as_deref(), name, output),
        Templates::Blocks => {
            for (template, block, about, since) in BLOCKS {
                print(output, &format!("{template:30} {block:21} {about} (since {since})\n"));
            }
            Ok(0)
        }
        Templates::Functions => {
            for functions::Function { usage, about, example, gives } in functions::TABLE {
                print(output, &format!("{usage}\n    {about}\n    {example} gives {gives}\n"));
            }
            Ok(0)
        }
    }
}

fn list(folder: Option<&Path>, set: Option<&str>, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let library = super::library(folder)?;
    let set = library.get(set).map_err(|error| FileError::template(folder, &error))?;
    let rows: Vec<[String; 3]> = set
        .all()
        .map(|(name, place)| {
            let blocks: Vec<String> = set.blocks(name).into_iter().collect();
            [name.to_owned(), place.to_owned(), blocks.join(" ")]
        })
        .collect();
    let width =
        |column: usize, title: &str| rows.iter().map(|row| row[column].len()).max().unwrap_or(0).max(title.len());
    let (first, second) = (width(0, "TEMPLATE"), width(1, "FROM"));
    print(output, &format!("{:first$}  {:second$}  BLOCKS\n", "TEMPLATE", "FROM"));
    for [name, place, blocks] in &rows {
        print(output, format!("{name:first$}  {place:second$}  {blocks}").trim_end());
        print(output, "\n");
    }
    print(output, &format!("\nversion {} of the set, version {VERSION} of the context\n", set.version()));
    let sets: Vec<&str> = library.all().filter_map(|(name, _)| name).collect();
    if !sets.is_empty() {
        print(output, &format!("named sets: {}\n", sets.join(", ")));
    }
    Ok(0)
}

fn new(name: &str, folder: &Path, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let Some((name, _)) =
        BUILTIN.iter().find(|(builtin, _)| *builtin == name || builtin.strip_suffix(".yaml.j2") == Some(name))
    else {
        let names: Vec<&str> = BUILTIN.iter().map(|(name, _)| *name).collect();
        return Err(Failure::plain(format!("there is no built-in template {name:?}; there are {}", names.join(", "))));
    };
    let file = folder.join(name);
    if file.exists() {
        return Err(Failure::plain(format!("{}:1:1: this file is there already", file.display())));
    }
    let mut new = format!(
        "{{# Changes {name}. Keep the blocks that you need, and take out the rest: what is not here stays as it is.\n   \
         {{{{ super() }}}} is what the block has; `kubectl vm templates show builtin/{name}` prints all of it. #}}\n\
         {{% extends \"builtin/{name}\" %}}\n"
    );
    for (_, block, about, _) in BLOCKS.iter().filter(|(template, ..)| template == name) {
        new += &format!("\n{{# {about} #}}\n{{% block {block} %}}\n{{{{ super() }}}}\n{{% endblock %}}\n");
    }
    fs::create_dir_all(folder).map_err(FileError::io(folder))?;
    fs::write(&file, new).map_err(FileError::io(&file))?;
    print(output, &format!("wrote {}\n", file.display()));
    Ok(0)
}

/// The most that a ConfigMap may hold, in bytes (<https://kubernetes.io/docs/concepts/configuration/configmap/#motivation>).
const CONFIG_MAP: usize = 1 << 20;

fn pack(folder: &Path, set: Option<&str>, name: Option<String>, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let wrong = |message: &str| Failure::plain(format!("{}: {message}", folder.display()));
    let is_name = |text: &str| {
        let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
        text.len() <= 63
            && text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            && ends(text.chars().next())
            && ends(text.chars().next_back())
    };
    if let Some(text) = set.into_iter().chain(name.as_deref()).find(|text| !is_name(text)) {
        return Err(Failure::plain(format!("{text:?} is no name: up to 63 small letters, digits and - are")));
    }
    let sources = files::sources(folder)?;
    if set.is_some() && !sources.sets.is_empty() {
        return Err(wrong("a named set can't have sets in it: pack the folder of each, or the whole without --set"));
    }
    // What lies below a named set is not known here.
    if set.is_none() {
        for (_, compiled) in Library::new(&sources).all() {
            compiled.as_ref().map_err(|error| FileError::template(Some(folder), error))?;
        }
    }
    let mut data = BTreeMap::new();
    for (path, text) in files::files(folder)?.into_iter().filter(|(path, _)| lint::is_part_of_a_set(path)) {
        let key =
            files::key(&path).map_err(|why| Failure::plain(format!("{}:1:1: {why}", folder.join(&path).display())))?;
        data.insert(key, text);
    }
    if data.is_empty() {
        return Err(wrong("there is no template here"));
    }
    let size: usize = data.iter().map(|(key, text)| key.len() + text.len()).sum();
    if size > CONFIG_MAP {
        let folder = folder.display();
        return Err(Failure::plain(format!("{folder}:1:1: a ConfigMap holds 1 MiB, and these are {size} bytes")));
    }
    let default = || set.map_or_else(|| "vm-operator-templates".into(), |set| format!("vm-operator-templates-{set}"));
    let mut map = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name.unwrap_or_else(default) }, "data": data,
    });
    if let Some(set) = set {
        map["metadata"]["labels"] = json!({ SET_LABEL: set });
    }
    print(output, &yaml(&map)?);
    Ok(0)
}

/// The test cases of a folder of templates and of its named sets: their names, and where they are.
fn cases(folder: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let folders = |path: &Path| -> Vec<PathBuf> {
        let entries = fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut folders: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
        folders.sort();
        folders
    };
    let sets = folders(&folder.join(SETS));
    let homes = std::iter::once(folder.to_owned()).chain(sets);
    let found: Vec<PathBuf> = homes.flat_map(|home| folders(&home.join(CASES))).collect();
    if found.is_empty() {
        let cases = folder.join(CASES);
        let message = "there is no case here: a case is a folder with a vm.yaml";
        return Err(Failure::plain(format!("{}: {message}", cases.display())));
    }
    if let Some(empty) = found.iter().find(|case| !case.join("vm.yaml").exists()) {
        return Err(Failure::plain(format!("{}: this case has no vm.yaml", empty.display())));
    }
    let name = |case: &Path| {
        let parts = case.strip_prefix(folder).unwrap_or(case).components();
        let parts = parts.map(|part| part.as_os_str().to_string_lossy()).filter(|part| part != CASES && part != SETS);
        parts.collect::<Vec<_>>().join("/")
    };
    Ok(found.into_iter().map(|case| (name(&case), case)).collect())
}

fn test(folder: &Path, update: bool, output: &mut Vec<u8>) -> Result<u8, Failure> {
    let library = Library::new(&files::sources(folder)?);
    let cases = cases(folder)?;
    let mut failed = 0;
    for (name, case) in &cases {
        let config = Some(case.join("config.yaml")).filter(|file| file.exists());
        let mut config = Settings { templates: None, values: None, config }.config()?;
        // The default names the release; a case is to hold for the next one, too.
        config.runner_image.get_or_insert_with(|| "localhost/vm-runner".into());
        let mut found = String::new();
        for vm in machines(&case.join("vm.yaml"), "default")? {
            found += &outcome(&library, &vm, &config)?;
        }
        let file = case.join("expected.yaml");
        let expected = fs::read_to_string(&file).unwrap_or_default();
        if found == expected {
            print(output, &format!("ok      {name}\n"));
        } else if update {
            fs::write(&file, &found).map_err(FileError::io(&file))?;
            print(output, &format!("updated {name}\n"));
        } else {
            failed += 1;
            // Where nothing is rendered, all lines that are missing say nothing.
            let shown = if found.starts_with("# error") { found } else { difference(&expected, &found) };
            print(output, &format!("FAILED  {name}\n{shown}"));
        }
    }
    print(output, &format!("{}, {failed} failed\n", counted(cases.len(), "case")));
    if failed > 0 {
        print(output, "if that is right: --update\n");
    }
    Ok(u8::from(failed > 0))
}

/// What a case becomes. What a release of the manager changes by itself is left out.
fn outcome(library: &Library, vm: &VirtualMachine, config: &ReconcilerConfig) -> Result<String, Failure> {
    let rendered = library.get(vm.template_set()).and_then(|set| Ok((set, first_start(vm, config, set)?)));
    let (set, objects) = match rendered {
        Ok(rendered) => rendered,
        Err(error) => return Ok(format!("# error: {error}\n")),
    };
    let mut text = String::new();
    for mut object in objects {
        if let Some(metadata) = Arc::make_mut(&mut object.value)["metadata"].as_object_mut()
            && let Some(Value::Object(annotations)) = metadata.get_mut("annotations")
        {
            annotations.retain(|name, _| ![HASH_ANNOTATION, VERSION_ANNOTATION].contains(&name.as_str()));
            if annotations.is_empty() {
                metadata.remove("annotations");
            }
        }
        text += &format!("---\n{}{}", origin(set, &object), yaml(&object.value)?);
    }
    Ok(text)
}

/// The lines that differ, with three around them.
pub fn difference(old: &str, new: &str) -> String {
    let colour =
        |colour: AnsiColor, line: String| format!("{}{line}{}", colour.on_default().render(), anstyle::Reset.render());
    let diff = TextDiff::from_lines(old, new);
    let mut text = String::new();
    for hunk in diff.unified_diff().context_radius(3).iter_hunks() {
        text += &colour(AnsiColor::Cyan, hunk.header().to_string());
        text.push('\n');
        for change in hunk.iter_changes() {
            let line = change.value().trim_end_matches('\n');
            text += &match change.tag() {
                ChangeTag::Delete => colour(AnsiColor::Red, format!("-{line}")),
                ChangeTag::Insert => colour(AnsiColor::Green, format!("+{line}")),
                ChangeTag::Equal => format!(" {line}"),
            };
            text.push('\n');
        }
    }
    text
}
