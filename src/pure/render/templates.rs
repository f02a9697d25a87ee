//! A template set: the built-in templates, over them the operator's, over those a set that VMs choose by its name.
//!
//! | file | what it is |
//! |---|---|
//! | `NAME.yaml.j2` | a template that is rendered for each VM |
//! | `NAME.j2`, `lib/NAME.j2` | a template that others include or import |
//! | `NAME.patch.yaml`, `NAME.patch.yaml.j2` | changes to rendered objects: [`patches`](super::patches) |
//! | `values.yaml`, `values.schema.json` | what `values` is and may be: [`values`](super::values) |
//!
//! A file replaces the file of that name in the layers below, a file with a new name is added, and an empty file removes it. Templates of
//! the layers below stay available, as `builtin/NAME` and as [`base/NAME`](below). So `{% extends "base/pod.yaml.j2" %}` can change a block
//! and keep the rest.

mod below;

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    fmt::Write as _,
    io, iter,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use minijinja::{AutoEscape, Environment, ErrorKind, UndefinedBehavior, Value, syntax::SyntaxConfig};

use serde::{Deserialize, Serialize};

use self::below::{BUILTIN as OF_BUILTIN, Below, OF_BASE};
use super::{
    builtin::{BUILTIN, BUILTIN_OF_QEMU, RENAMED_BLOCKS, Renamed},
    error::{OutputError, TemplateError, nested},
    functions,
    outline::{Mention, Outline},
    output::digest,
    patches::{self, Patch},
    unclosed::Unclosed,
    values::{self, Values},
    write::write_value,
};
use crate::jinja;

/// The texts of files by their names, as in a folder or a ConfigMap.
pub type Files = BTreeMap<String, String>;

/// The files of one set, besides the built-in templates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    /// For all VMs.
    pub base: Files,
    /// The named set over that, with its name.
    pub named: Option<(String, Files)>,
}

/// The end of the name of a template that is rendered.
pub const SUFFIX: &str = ".yaml.j2";
/// The folder of QEMU templates in a set.
pub const QEMU_FOLDER: &str = "qemu/";
/// The end of the name of every template.
const TEMPLATE: &str = ".j2";
/// The steps that one template may take. The built-in templates need less than a hundredth of it.
const FUEL: u64 = 1_000_000;
/// How deep includes that end may nest in each other.
const DEEPEST_INCLUDES: usize = 20;
/// The most text that one template may render, in bytes. etcd stores objects up to 1.5 MiB.
const MAXIMUM_OUTPUT: usize = 2 << 20;
/// The memory that is reserved for the output of a template, in bytes. Most templates render less.
const USUAL_OUTPUT: usize = 4 << 10;

/// A file of which a template consists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ancestor {
    /// The file in the folder of the templates; `builtin/NAME` for a built-in one.
    pub file: String,
    /// The blocks that it sets and that are not inside others.
    pub blocks: Vec<Mention>,
}

/// Compiled templates.
#[derive(Clone, Debug)]
pub struct TemplateSet {
    environment: Environment<'static>,
    /// The file in the operator's folder of each template, by the template's name.
    files: BTreeMap<String, String>,
    below: Below,
    names: Vec<String>,
    patches: Vec<PatchFile>,
    values: Arc<Values>,
    version: String,
    layers: Arc<Layers>,
    qemu: Option<Arc<OfQemu>>,
}

/// A file with patches.
#[derive(Clone, Debug)]
enum PatchFile {
    Ready(Vec<Patch>),
    Template(String),
}

/// The QEMU templates of a set.
#[derive(Clone, Debug)]
pub struct OfQemu {
    /// The layers with nothing but them.
    pub layers: Layers,
    /// Compiled as the runner compiles them, which gets nothing else of the set.
    pub set: TemplateSet,
    /// The top keys of `values` that they use. `None`: all, because one uses the whole map.
    pub values: Option<BTreeSet<String>>,
}

impl OfQemu {
    fn of(Layers { base, named }: &Layers) -> Result<Option<Self>, TemplateError> {
        let of_qemu = |files: &Files| -> Files {
            let ours = files.iter().filter(|(name, _)| name.starts_with(QEMU_FOLDER));
            ours.map(|(name, text)| (name.clone(), text.clone())).collect()
        };
        let named = named.as_ref().map(|(name, files)| (name.clone(), of_qemu(files)));
        let layers = Layers { base: of_qemu(base), named: named.filter(|(_, files)| !files.is_empty()) };
        if layers == Layers::default() {
            return Ok(None);
        }
        let set = TemplateSet::over(&BUILTIN_OF_QEMU, &[], layers.clone())?;
        Ok(Some(Self { values: set.used_values(), layers, set }))
    }
}

impl TemplateSet {
    /// The built-in templates alone.
    ///
    /// # Errors
    /// As [`TemplateSet::layered`].
    pub fn builtin() -> Result<Self, TemplateError> {
        Self::layered(&Files::new(), None)
    }

    /// The built-in templates under `base`, and over both a set with its name.
    ///
    /// # Errors
    /// A file that can't be used.
    pub fn layered(base: &Files, named: Option<(&str, &Files)>) -> Result<Self, TemplateError> {
        let named = named.map(|(name, files)| (name.to_owned(), files.clone()));
        Self::compile(Layers { base: base.clone(), named })
    }

    /// Compiles all layers, the built-in templates below.
    ///
    /// # Errors
    /// A file that can't be used.
    pub fn compile(layers: Layers) -> Result<Self, TemplateError> {
        let compile = || {
            let set = Self::over(&BUILTIN, RENAMED_BLOCKS, layers)?;
            let qemu = OfQemu::of(&set.layers)?.map(Arc::new);
            Ok(Self { qemu, ..set })
        };
        jinja::on_large_stack(compile)
            .unwrap_or_else(|error| Err(TemplateError::refused("(compile)", error.to_string())))
    }

    /// Compiles layers over these built-in templates.
    pub(crate) fn over(builtin: &[(&str, &str)], renamed: &[Renamed], layers: Layers) -> Result<Self, TemplateError> {
        let named = layers.named.as_ref().map(|(_, files)| files.keys().cloned().collect());
        let mut set =
            Self::empty(Below { builtin: builtin.iter().map(|(name, _)| (*name).to_owned()).collect(), named })?;
        let mut values = Values::default();
        // The files that no layer above replaces, by name: each with its place among all layers and its text.
        let mut files: BTreeMap<&str, (String, &str)> = BTreeMap::new();
        for &(name, text) in builtin {
            set.add(&format!("builtin/{name}"), format!("builtin/{name}"), text)?;
            files.insert(name, (format!("builtin/{name}"), text));
        }
        lay_over(&mut files, &mut values, "", &layers.base)?;
        if let Some((name, named)) = &layers.named {
            for (name, (file, text)) in files.iter().filter(|(name, _)| name.ends_with(TEMPLATE)) {
                set.add(&format!("{OF_BASE}{name}"), file.clone(), text)?;
            }
            lay_over(&mut files, &mut values, &format!("sets/{name}/"), named)?;
        }
        for (name, (file, text)) in &files {
            set.add_file(name, file, text)?;
        }
        for (name, (file, _)) in files.iter().filter(|(name, (file, _))| name.ends_with(TEMPLATE) && !is_builtin(file))
        {
            set.check_extends(name)?;
            set.check_blocks(name, file, renamed)?;
        }
        set.values = values.into();
        set.version = version(&layers, &files);
        set.layers = layers.into();
        Ok(set)
    }

    fn empty(below: Below) -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_auto_escape_callback(|_| AutoEscape::Json);
        environment.set_formatter(write_value);
        environment.set_fuel(Some(FUEL));
        // Without it, errors have no column and do not name what is undefined. By default it depends on how the program is built.
        environment.set_debug(true);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::new("(syntax)", &error))?);
        functions::add(&mut environment);
        let resolving = below.clone();
        environment.set_path_join_callback(move |name, parent| resolving.resolve(name, Some(parent)));
        Ok(Self {
            environment,
            files: BTreeMap::new(),
            below,
            names: Vec::new(),
            patches: Vec::new(),
            values: Arc::default(),
            version: String::new(),
            layers: Arc::default(),
            qemu: None,
        })
    }

    /// Adds a file that no layer above replaces.
    fn add_file(&mut self, name: &str, file: &str, text: &str) -> Result<(), TemplateError> {
        if name.ends_with(patches::SUFFIX) {
            self.patches.push(PatchFile::Ready(Patch::parse(file, text)?));
        } else if name.ends_with(TEMPLATE) {
            self.add(name, file.to_owned(), text)?;
            if name.ends_with(patches::TEMPLATE_SUFFIX) {
                self.patches.push(PatchFile::Template(name.to_owned()));
            } else if name.ends_with(SUFFIX) && !name.contains('/') {
                self.names.push(name.to_owned());
            }
        } else if [".yaml", ".yml"].iter().any(|suffix| name.ends_with(suffix)) {
            // Without this error a template whose name has the wrong end would have no effect.
            let message =
                "not the name of a template: one that is rendered ends in .yaml.j2, one with patches in .patch.yaml";
            return Err(TemplateError::refused(file, message));
        }
        Ok(())
    }

    fn add(&mut self, name: &str, file: String, text: &str) -> Result<(), TemplateError> {
        self.files.insert(name.to_owned(), file);
        jinja::check(text).map_err(|jinja::Beyond { line, column, message }| {
            let refused = TemplateError::refused(name, message);
            self.with_file(TemplateError { line: Some(line), column: Some(column), ..refused })
        })?;
        // One template must not end the manager. Nothing that a panic may have left half done is used afterwards.
        catch_unwind(AssertUnwindSafe(|| self.add_text(name, text))).unwrap_or_else(|_| {
            let message = "minijinja panicked when it read the template; the log has the place";
            Err(self.with_file(TemplateError::refused(name, message)))
        })
    }

    fn add_text(&mut self, name: &str, text: &str) -> Result<(), TemplateError> {
        self.environment.add_template_owned(name.to_owned(), text.to_owned()).map_err(|error| {
            let parses = |text: &str| self.environment.template_from_str(text).map(drop);
            let unclosed = Unclosed::find(text).filter(|unclosed| unclosed.explains(&error, parses));
            self.with_file(match unclosed {
                Some(unclosed) => unclosed.error(name),
                None => TemplateError::new(name, &error),
            })
        })
    }

    /// Refuses a template that extends itself by way of others.
    fn check_extends(&self, name: &str) -> Result<(), TemplateError> {
        let chain = self.chain(name);
        let Some((last, outline)) = chain.last() else { return Ok(()) };
        let Some(extends) = &outline.extends else { return Ok(()) };
        let next = self.find(Some(last), &extends.name);
        let Some(start) = chain.iter().position(|(known, _)| Some(known.as_str()) == next.as_deref()) else {
            return Ok(());
        };
        let circle = [last.as_str()].into_iter().chain(chain[start..].iter().map(|(name, _)| name.as_str()));
        Err(TemplateError {
            line: Some(extends.line),
            column: Some(extends.column),
            ..TemplateError::refused(self.file_of(last), self.circle("extends", circle))
        })
    }

    /// The message about templates that lead back to the first one.
    fn circle<'a>(&self, verb: &str, names: impl Iterator<Item = &'a str>) -> String {
        let files: Vec<&str> = names.map(|name| self.file_of(name)).collect();
        let below = match files.as_slice() {
            [file, again] if file == again => {
                let name = file.rsplit_once('/').map_or(*file, |(_, name)| name);
                format!("; the template below this one is called \"base/{name}\"")
            }
            _ => String::new(),
        };
        format!("it {verb} itself: {}{below}", files.join(" → "))
    }

    /// Refuses a block that the extended template does not have: it would never be rendered.
    fn check_blocks(&self, name: &str, file: &str, renamed: &[Renamed]) -> Result<(), TemplateError> {
        let outline = self.outline(name);
        // minijinja reports a template that does not exist.
        let Some(parent) = outline.extends.as_ref().and_then(|extends| self.find(Some(name), &extends.name)) else {
            return Ok(());
        };
        let known = self.blocks(&parent);
        let Some((block, _)) = outline.blocks.iter().find(|(block, top)| *top && !known.contains(&block.name)) else {
            return Ok(());
        };
        let parent = self.file_of(&parent);
        Err(TemplateError {
            line: Some(block.line),
            column: Some(block.column),
            ..TemplateError::refused(file, no_such_block(parent, &block.name, &known, renamed))
        })
    }

    /// A template and those that it extends, in that order.
    pub(crate) fn chain(&self, name: &str) -> Vec<(String, Outline)> {
        let mut chain: Vec<(String, Outline)> = Vec::new();
        let mut next = Some(name.to_owned()).filter(|name| self.has(name));
        while let Some(name) = next.filter(|name| chain.iter().all(|(known, _)| known != name)) {
            let outline = self.outline(&name);
            next = outline.extends.as_ref().and_then(|extends| self.find(Some(&name), &extends.name));
            chain.push((name, outline));
        }
        chain
    }

    fn outline(&self, name: &str) -> Outline {
        self.source(name).map(|source| Outline::of(&source)).unwrap_or_default()
    }

    /// The shortest way by which a template includes, imports or extends itself: the names of the templates, itself first and last.
    fn way_back(&self, name: &str) -> Option<Vec<String>> {
        let mut ways = VecDeque::from([vec![name.to_owned()]]);
        let mut seen = BTreeSet::new();
        while let Some(way) = ways.pop_front() {
            let last = way.last()?;
            let Outline { extends, uses, .. } = self.outline(last);
            for next in extends.iter().chain(&uses).filter_map(|used| self.find(Some(last), &used.name)) {
                let longer = || way.iter().cloned().chain([next.clone()]).collect();
                if next == name {
                    return Some(longer());
                }
                if seen.insert(next.clone()) {
                    ways.push_back(longer());
                }
            }
        }
        None
    }

    /// The blocks of a template and of those that it extends.
    pub fn blocks(&self, name: &str) -> BTreeSet<String> {
        self.chain(name).into_iter().flat_map(|(_, outline)| outline.blocks).map(|(block, _)| block.name).collect()
    }

    /// The files that a template consists of, the template itself first: each with the blocks that it sets.
    pub fn lineage(&self, name: &str) -> Vec<Ancestor> {
        let set = |outline: Outline| outline.blocks.into_iter().filter(|(_, top)| *top).map(|(block, _)| block);
        let chain = self.chain(name).into_iter();
        chain
            .map(|(name, outline)| Ancestor { file: self.file_of(&name).to_owned(), blocks: set(outline).collect() })
            .collect()
    }

    /// The file and the line, from 1, in which a template says that it makes an object of this kind. `None`: no file says it, or one says it more than
    /// once.
    pub fn place_of(&self, name: &str, kind: &str) -> Option<(String, usize)> {
        self.chain(name).into_iter().find_map(|(name, _)| {
            let source = self.source(&name)?;
            let is_it = |line: &str| line.trim().strip_prefix("kind:").is_some_and(|named| named.trim() == kind);
            let mut lines = source.lines().enumerate().filter(|(_, line)| is_it(line));
            let (number, _) = lines.next().filter(|_| lines.next().is_none())?;
            Some((self.file_of(&name).to_owned(), number + 1))
        })
    }

    /// The names of the templates that are rendered, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The names of the templates of patches.
    pub(super) fn patch_names(&self) -> impl Iterator<Item = &str> {
        self.patches.iter().filter_map(|patch| match patch {
            PatchFile::Template(name) => Some(name.as_str()),
            PatchFile::Ready(_) => None,
        })
    }

    /// The file of a template; `builtin/NAME` for a built-in one.
    pub fn file_of<'a>(&'a self, name: &'a str) -> &'a str {
        self.files.get(name).map_or(name, String::as_str)
    }

    /// Every template of the set that no layer above replaces, with its file: templates of objects and of patches, and those that others
    /// include.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        let below = |name: &str| name.starts_with(OF_BUILTIN) || name.starts_with(OF_BASE);
        self.files.iter().filter(move |(name, _)| !below(name)).map(|(name, file)| (name.as_str(), file.as_str()))
    }

    /// The names of the functions that templates can call.
    pub fn functions(&self) -> BTreeSet<&str> {
        self.environment.globals().map(|(name, _)| name).collect()
    }

    fn has(&self, name: &str) -> bool {
        self.files.contains_key(name)
    }

    /// The template that is meant by a name in the template `parent`, where `base/` stands for the layers below. Without a parent: in a
    /// template of the topmost layer.
    pub fn find(&self, parent: Option<&str>, name: &str) -> Option<String> {
        Some(self.below.resolve(name, parent).into_owned()).filter(|name| self.has(name))
    }

    /// The text of a template.
    pub fn source(&self, name: &str) -> Option<String> {
        self.environment.get_template(name).ok().map(|template| template.source().to_owned())
    }

    /// Eight hexadecimal digits that depend on the content of all files.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// The files from which the set was compiled.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// The QEMU templates. `None`: there are none, so VMs get the built-in one.
    pub fn qemu(&self) -> Option<&OfQemu> {
        self.qemu.as_deref()
    }

    /// The top keys of `values` that the templates use. `None`: all, because one uses the whole map.
    fn used_values(&self) -> Option<BTreeSet<String>> {
        let templates = self.files.keys().filter_map(|name| self.environment.get_template(name).ok());
        let mut used = BTreeSet::new();
        for name in templates.flat_map(|template| template.undeclared_variables(true)) {
            let mut parts = name.split('.');
            if parts.next() == Some("values") {
                used.insert(parts.next()?.to_owned());
            }
        }
        Some(used)
    }

    /// The defaults and schemas of `values`.
    pub fn values(&self) -> &Values {
        &self.values
    }

    /// The text that a template renders.
    ///
    /// # Errors
    /// With file, line and column, if the template fails, takes too many steps or renders too much.
    pub fn render(&self, name: &str, context: &Value) -> Result<String, TemplateError> {
        let error = |error: minijinja::Error| {
            self.with_file(self.endless(&error).unwrap_or_else(|| TemplateError::new(name, &error)))
        };
        let mut output = LimitedOutput(Vec::with_capacity(USUAL_OUTPUT));
        match self.environment.get_template(name).map_err(error)?.render_captured_to(context, &mut output) {
            Ok(_) => String::from_utf8(output.0)
                .map_err(|error| TemplateError::refused(self.file_of(name), error.to_string())),
            Err(failure) if output.0.len() >= MAXIMUM_OUTPUT => Err(TemplateError {
                message: format!("it renders more than {} MiB", MAXIMUM_OUTPUT >> 20),
                ..error(failure)
            }),
            Err(failure) => Err(error(failure)),
        }
    }

    /// The error of a template that includes itself without end, with the way back to it. If it extends another one, the engine finds the
    /// circle where it reads the `extends` again, else only when the includes nest too deep.
    fn endless(&self, error: &minijinja::Error) -> Option<TemplateError> {
        let nested = nested(error);
        let is_at_extends = |error: &minijinja::Error| {
            let extends = self.outline(error.name().unwrap_or_default()).extends;
            error.kind() == ErrorKind::InvalidOperation && extends.is_some_and(|it| Some(it.line) == error.line())
        };
        if nested.len() <= DEEPEST_INCLUDES && !nested.last().is_some_and(|last| is_at_extends(last)) {
            return None;
        }
        let (error, way) = nested.iter().find_map(|error| Some((*error, self.way_back(error.name()?)?)))?;
        let message = self.circle("includes", way.iter().map(String::as_str));
        Some(TemplateError { message, ..TemplateError::at(error.name()?, error) })
    }

    /// The patches for a VM, in the order in which they are applied.
    ///
    /// # Errors
    /// Of templates of patches: as [`TemplateSet::render`], and if the output is not a patch.
    pub(super) fn patches(&self, context: &Value) -> Result<Vec<Patch>, TemplateError> {
        let mut patches = Vec::new();
        for file in &self.patches {
            match file {
                PatchFile::Ready(ready) => patches.extend(ready.iter().cloned()),
                PatchFile::Template(name) => {
                    let text = self.render(name, context)?;
                    let of_output = |error: TemplateError| match error.line {
                        // The line is one of the output, not of the file.
                        Some(line) => TemplateError::refused(
                            &error.template,
                            format!("{} (line {line} of the output)", error.message),
                        ),
                        None => error,
                    };
                    let parsed = Patch::parse(self.file_of(name), &text).map_err(of_output)?;
                    patches.extend(parsed.into_iter().map(Patch::without_line));
                }
            }
        }
        Ok(patches)
    }

    /// The error in the output of a template, with the line of the template that is most like the text there.
    pub(super) fn output_error(
        &self,
        name: &str,
        OutputError { message, text, in_last_line }: OutputError,
    ) -> TemplateError {
        let line = |name: &str| line_like(&self.source(name)?, &text, in_last_line);
        // The text may come from a template that this one extends.
        let chain = self.chain(name);
        let holds = |name: &&str| !text.is_empty() && self.source(name).is_some_and(|source| source.contains(&text));
        let name = chain.iter().map(|(name, _)| name.as_str()).find(holds).unwrap_or(name);
        TemplateError { line: line(name), ..TemplateError::refused(self.file_of(name), message) }
    }

    /// The error with the file of its template instead of the template's name.
    fn with_file(&self, mut error: TemplateError) -> TemplateError {
        if let Some(file) = self.files.get(&error.template) {
            error.template.clone_from(file);
        }
        error
    }
}

/// Puts the files of a layer over those of the layers below. `folder` is the layer's folder among the operator's files.
fn lay_over<'a>(
    files: &mut BTreeMap<&'a str, (String, &'a str)>,
    values: &mut Values,
    folder: &str,
    layer: &'a Files,
) -> Result<(), TemplateError> {
    for (name, text) in layer {
        let file = format!("{folder}{name}");
        match name.as_str() {
            values::FILE => values.add_defaults(&file, text)?,
            values::SCHEMA => values.add_schema(&file, text)?,
            name if text.trim().is_empty() => drop(files.remove(name)),
            name => drop(files.insert(name, (file, text))),
        }
    }
    Ok(())
}

fn is_builtin(file: &str) -> bool {
    file.starts_with("builtin/")
}

/// The version of a set: a hash of all files of its layers and of the built-in templates.
fn version(layers: &Layers, files: &BTreeMap<&str, (String, &str)>) -> String {
    let mut all = String::new();
    let named = layers.named.iter().map(|(set, files)| (format!("sets/{set}/"), files));
    for (folder, layer) in iter::once((String::new(), &layers.base)).chain(named) {
        for (name, text) in layer {
            let _ = write!(all, "{folder}{name}\0{text}\0");
        }
    }
    for (name, (_, text)) in files {
        let _ = write!(all, "{name}\0{text}\0");
    }
    digest(&all)[..8].to_owned()
}

/// The line of a template, from 1, that contains a text of its output or else begins most like it. If several lines are equally good:
/// none, or the last one.
fn line_like(source: &str, text: &str, or_last: bool) -> Option<usize> {
    let common = |line: &str| line.chars().zip(text.chars()).take_while(|(a, b)| a == b).count();
    let score = |line: &str| if !text.is_empty() && line.contains(text) { usize::MAX } else { common(line.trim()) };
    let scores: Vec<usize> = source.lines().map(score).collect();
    let best = scores.iter().copied().max().filter(|best| *best >= 3)?;
    let numbered = scores.iter().enumerate().map(|(index, score)| (index + 1, *score));
    let mut lines = numbered.filter(|(_, score)| *score == best).map(|(line, _)| line);
    if or_last { lines.next_back() } else { lines.next().filter(|_| lines.next().is_none()) }
}

/// The message about a block that a template does not have.
fn no_such_block(parent: &str, block: &str, known: &BTreeSet<String>, renamed: &[Renamed]) -> String {
    let template = parent.rsplit('/').next().unwrap_or(parent);
    let why = match renamed.iter().find(|(file, old, ..)| *file == template && *old == block) {
        Some((_, _, new, since)) => format!("it is named `{new}` since version {since}"),
        None => format!("it has {}", known.iter().cloned().collect::<Vec<_>>().join(", ")),
    };
    format!("{parent} has no block `{block}`: {why}")
}

/// Output of up to [`MAXIMUM_OUTPUT`] bytes.
struct LimitedOutput(Vec<u8>);

impl io::Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() < MAXIMUM_OUTPUT { Ok(bytes.len()) } else { Err(io::ErrorKind::FileTooLarge.into()) }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
