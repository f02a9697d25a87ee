//! A template set: the built-in templates, over them the operator's, over those a set that machines choose by its name.
//!
//! | file | what it is |
//! |---|---|
//! | `NAME.yaml.j2` | a template that is rendered for each machine |
//! | `NAME.j2`, `lib/NAME.j2` | a template that others include or import |
//! | `NAME.patch.yaml`, `NAME.patch.yaml.j2` | changes to rendered objects: [`patches`](super::patches) |
//! | `values.yaml`, `values.schema.json` | what `values` is and may be: [`values`](super::values) |
//!
//! A file replaces the one of that name below it, a new name adds to the set, an empty file removes it. What lies below stays
//! reachable, as `builtin/NAME` and, from a named set, as `base/NAME`: `{% extends "builtin/pod.yaml.j2" %}` changes a block
//! and keeps the rest.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io, iter,
    sync::Arc,
};

use minijinja::{AutoEscape, Environment, UndefinedBehavior, Value, syntax::SyntaxConfig};

use serde::{Deserialize, Serialize};

use super::{
    TemplateError,
    builtin::{BUILTIN, RENAMED_BLOCKS, Renamed},
    functions,
    outline::Outline,
    output::{Wrong, digest},
    patches::{self, Patch},
    values::{self, Values},
    write::write_value,
};

/// Files by name, as a folder or a ConfigMap has them.
pub type Files = BTreeMap<String, String>;

/// What an operator gives: templates for all machines, and named sets over them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// For all machines.
    pub base: Files,
    /// For those that name one in `spec.templates.set`.
    pub sets: BTreeMap<String, Files>,
}

/// What one set is made of, besides the built-in templates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layers {
    /// For all machines.
    pub base: Files,
    /// Over that a set with its name.
    pub named: Option<(String, Files)>,
}

/// What a template is called that is rendered.
pub const SUFFIX: &str = ".yaml.j2";
/// What every template is called.
const TEMPLATE: &str = ".j2";
/// Steps that the rendering of one template may take: some hundred times what the built-in ones need.
const FUEL: u64 = 1_000_000;
/// The most text that one template may render, in bytes: the limit of an object in etcd is 1.5 MiB.
const MAXIMUM_OUTPUT: usize = 2 << 20;
/// Room for what most templates render, in bytes.
const USUAL_OUTPUT: usize = 4 << 10;

/// The template sets of all machines: those that can be used, and why the others can't.
#[derive(Debug)]
pub struct Library {
    base: Result<TemplateSet, TemplateError>,
    sets: BTreeMap<String, Result<TemplateSet, TemplateError>>,
}

impl Library {
    /// Compiles all sets; one that fails leaves the others as they are.
    pub fn new(sources: &Sources) -> Self {
        let named = sources.sets.iter();
        Self {
            base: TemplateSet::layered(&sources.base, None),
            sets: named
                .map(|(name, files)| (name.clone(), TemplateSet::layered(&sources.base, Some((name, files)))))
                .collect(),
        }
    }

    /// The built-in templates, for all machines.
    pub fn builtin() -> Self {
        Self::new(&Sources::default())
    }

    /// The set of that name; without a name, the one for all machines.
    ///
    /// # Errors
    /// Why it can't be used, or that there is none.
    pub fn get(&self, name: Option<&str>) -> Result<&TemplateSet, TemplateError> {
        let Some(name) = name else { return self.base.as_ref().map_err(Clone::clone) };
        let set = self.sets.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.sets.keys().map(String::as_str).collect();
            let there =
                if names.is_empty() { "there are none".into() } else { format!("there are {}", names.join(", ")) };
            TemplateError::refused("spec.templates.set", format!("no template set is named {name:?}: {there}"))
        })?;
        set.as_ref().map_err(Clone::clone)
    }

    /// Every set, the one for all machines first.
    pub fn all(&self) -> impl Iterator<Item = (Option<&str>, &Result<TemplateSet, TemplateError>)> {
        let named = self.sets.iter().map(|(name, set)| (Some(name.as_str()), set));
        std::iter::once((None, &self.base)).chain(named)
    }

    /// Puts another set in a set's place.
    pub fn put(&mut self, name: Option<&str>, set: Result<TemplateSet, TemplateError>) {
        match name {
            None => self.base = set,
            Some(name) => drop(self.sets.insert(name.to_owned(), set)),
        }
    }
}

/// Compiled templates.
#[derive(Clone, Debug)]
pub struct TemplateSet {
    environment: Environment<'static>,
    /// The file in the operator's folder that a template comes from, by the template's name.
    places: BTreeMap<String, String>,
    names: Vec<String>,
    patches: Vec<PatchFile>,
    values: Arc<Values>,
    version: String,
    layers: Arc<Layers>,
}

/// A file with patches.
#[derive(Clone, Debug)]
enum PatchFile {
    Ready(Vec<Patch>),
    Template(String),
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

    /// All layers, the built-in one below.
    ///
    /// # Errors
    /// A file that can't be used.
    pub fn compile(layers: Layers) -> Result<Self, TemplateError> {
        Self::over(&BUILTIN, RENAMED_BLOCKS, layers)
    }

    fn over(builtin: &[(&str, &str)], renamed: &[Renamed], layers: Layers) -> Result<Self, TemplateError> {
        let mut set = Self::empty()?;
        let (base, named) = (&layers.base, layers.named.as_ref());
        let mut version = String::new();
        let mut files: BTreeMap<&str, (String, &str)> = BTreeMap::new();
        for &(name, text) in builtin {
            set.add(&format!("builtin/{name}"), format!("builtin/{name}"), text)?;
            files.insert(name, (format!("builtin/{name}"), text));
        }
        let mut values = Values::default();
        for (prefix, layer) in
            iter::once((String::new(), base)).chain(named.map(|(set, files)| (format!("sets/{set}/"), files)))
        {
            if !prefix.is_empty() {
                for (name, (place, text)) in &files {
                    if name.ends_with(TEMPLATE) {
                        set.add(&format!("base/{name}"), place.clone(), text)?;
                    }
                }
            }
            for (name, text) in layer {
                let place = format!("{prefix}{name}");
                match name.as_str() {
                    values::FILE => values.add_defaults(&place, text)?,
                    values::SCHEMA => values.add_schema(&place, text)?,
                    name if text.trim().is_empty() => drop(files.remove(name)),
                    name => drop(files.insert(name, (place, text))),
                }
                let _ = write!(version, "{prefix}{name}\0{text}\0");
            }
        }
        set.values = values.into();
        set.version = digest(&files.iter().fold(version, |mut all, (name, (_, text))| {
            let _ = write!(all, "{name}\0{text}\0");
            all
        }))[..8]
            .to_owned();
        for (name, (place, text)) in &files {
            set.take(name, place, text)?;
        }
        for (name, (place, text)) in &files {
            if name.ends_with(TEMPLATE) && !place.starts_with("builtin/") {
                set.check_blocks(place, text, renamed)?;
            }
        }
        set.layers = layers.into();
        Ok(set)
    }

    fn empty() -> Result<Self, TemplateError> {
        let mut environment = Environment::new();
        environment.set_undefined_behavior(UndefinedBehavior::Strict);
        environment.set_auto_escape_callback(|_| AutoEscape::Json);
        environment.set_formatter(write_value);
        environment.set_fuel(Some(FUEL));
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true).build();
        environment.set_syntax(syntax.map_err(|error| TemplateError::new("(syntax)", &error))?);
        functions::add(&mut environment);
        Ok(Self {
            environment,
            places: BTreeMap::new(),
            names: Vec::new(),
            patches: Vec::new(),
            values: Arc::default(),
            version: String::new(),
            layers: Arc::default(),
        })
    }

    /// Takes in a file that is in force.
    fn take(&mut self, name: &str, place: &str, text: &str) -> Result<(), TemplateError> {
        if name.ends_with(patches::SUFFIX) {
            self.patches.push(PatchFile::Ready(Patch::parse(place, text)?));
        } else if name.ends_with(TEMPLATE) {
            self.add(name, place.to_owned(), text)?;
            if name.ends_with(patches::TEMPLATE_SUFFIX) {
                self.patches.push(PatchFile::Template(name.to_owned()));
            } else if name.ends_with(SUFFIX) && !name.contains('/') {
                self.names.push(name.to_owned());
            }
        } else if [".yaml", ".yml"].iter().any(|suffix| name.ends_with(suffix)) {
            // Whoever forgets the end of a name must not wonder why nothing happens.
            let message =
                "not the name of a template: one that is rendered ends in .yaml.j2, one with patches in .patch.yaml";
            return Err(TemplateError::refused(place, message));
        }
        Ok(())
    }

    fn add(&mut self, name: &str, place: String, text: &str) -> Result<(), TemplateError> {
        self.places.insert(name.to_owned(), place);
        self.environment
            .add_template_owned(name.to_owned(), text.to_owned())
            .map_err(|error| self.placed(TemplateError::new(name, &error)))
    }

    /// A block that the extended template does not have is never rendered: then what it should change stays as it was.
    fn check_blocks(&self, place: &str, text: &str, renamed: &[Renamed]) -> Result<(), TemplateError> {
        let outline = Outline::of(text);
        // One that is not there is its own error.
        let Some(extends) = outline.extends.as_ref().filter(|extends| self.has(&extends.name)) else { return Ok(()) };
        let known = self.blocks(&extends.name);
        let Some((block, _)) = outline.blocks.iter().find(|(block, top)| *top && !known.contains(&block.name)) else {
            return Ok(());
        };
        let parent = self.place(&extends.name);
        Err(TemplateError {
            template: place.to_owned(),
            line: Some(block.line),
            column: Some(block.column),
            message: no_such_block(parent, &block.name, &known, renamed),
        })
    }

    /// A template and those that it extends, one after the other.
    fn chain(&self, name: &str) -> Vec<(String, Outline)> {
        let mut chain: Vec<(String, Outline)> = Vec::new();
        let mut next = Some(name.to_owned());
        while let Some(name) = next.filter(|name| chain.iter().all(|(known, _)| known != name)) {
            let Some(source) = self.source(&name) else { break };
            let outline = Outline::of(&source);
            next = outline.extends.as_ref().map(|extends| extends.name.clone());
            chain.push((name, outline));
        }
        chain
    }

    /// The blocks of a template and of those that it extends.
    pub fn blocks(&self, name: &str) -> BTreeSet<String> {
        self.chain(name).into_iter().flat_map(|(_, outline)| outline.blocks).map(|(block, _)| block.name).collect()
    }

    /// Where a template comes from, the last change first: each file with the blocks that it sets.
    pub fn lineage(&self, name: &str) -> Vec<(String, Vec<String>)> {
        let set = |outline: Outline| {
            outline.blocks.into_iter().filter(|(_, top)| *top).map(|(block, _)| block.name).collect()
        };
        self.chain(name).into_iter().map(|(name, outline)| (self.place(&name).to_owned(), set(outline))).collect()
    }

    /// The names of the templates that are rendered, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str)
    }

    /// The names of the patches that are rendered.
    pub(super) fn patch_names(&self) -> impl Iterator<Item = &str> {
        self.patches.iter().filter_map(|patch| match patch {
            PatchFile::Template(name) => Some(name.as_str()),
            PatchFile::Ready(_) => None,
        })
    }

    /// The file that a template comes from.
    pub fn place<'a>(&'a self, name: &'a str) -> &'a str {
        self.places.get(name).map_or(name, String::as_str)
    }

    /// Every template of the set that is in force, with the file that it comes from: rendered ones, those that are included,
    /// and patches that are rendered.
    pub fn all(&self) -> impl Iterator<Item = (&str, &str)> {
        let below = |name: &str| name.starts_with("builtin/") || name.starts_with("base/");
        self.places.iter().filter(move |(name, _)| !below(name)).map(|(name, place)| (name.as_str(), place.as_str()))
    }

    /// The variables that a template reads and does not set itself, and no function.
    pub fn variables(&self, name: &str) -> BTreeSet<String> {
        let Ok(template) = self.environment.get_template(name) else { return BTreeSet::new() };
        let functions: BTreeSet<&str> = self.environment.globals().map(|(name, _)| name).collect();
        let mut variables: BTreeSet<String> = template.undeclared_variables(false).into_iter().collect();
        variables.retain(|variable| {
            !functions.contains(variable.as_str()) && !["self", "super", "loop"].contains(&variable.as_str())
        });
        variables
    }

    /// Whether a template of that name can be included or extended.
    pub fn has(&self, name: &str) -> bool {
        self.places.contains_key(name)
    }

    /// A template's text.
    pub fn source(&self, name: &str) -> Option<String> {
        self.environment.get_template(name).ok().map(|template| template.source().to_owned())
    }

    /// Eight hexadecimal digits that are others for other templates.
    pub fn version(&self) -> &str {
        &self.version
    }

    /// What it was made of.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// What the set says of `values`.
    pub(super) fn values(&self) -> &Values {
        &self.values
    }

    /// The text that a template renders.
    ///
    /// # Errors
    /// With the template's file, line and column; also when it takes too many steps or renders too much.
    pub fn render(&self, name: &str, context: &Value) -> Result<String, TemplateError> {
        let error = |error: minijinja::Error| self.placed(TemplateError::new(name, &error));
        let place = self.place(name);
        let mut output = Bounded(Vec::with_capacity(USUAL_OUTPUT));
        match self.environment.get_template(name).map_err(error)?.render_captured_to(context, &mut output) {
            Ok(_) => String::from_utf8(output.0).map_err(|error| TemplateError::refused(place, error.to_string())),
            Err(failure) if output.0.len() >= MAXIMUM_OUTPUT => Err(TemplateError {
                message: format!("it renders more than {} MiB", MAXIMUM_OUTPUT >> 20),
                ..error(failure)
            }),
            Err(failure) => Err(error(failure)),
        }
    }

    /// The patches for a machine, in the order in which they are applied.
    ///
    /// # Errors
    /// Of those that are templates: as [`TemplateSet::render`], and if what comes out is no patch.
    pub(super) fn patches(&self, context: &Value) -> Result<Vec<Patch>, TemplateError> {
        let mut patches = Vec::new();
        for file in &self.patches {
            match file {
                PatchFile::Ready(ready) => patches.extend(ready.iter().cloned()),
                PatchFile::Template(name) => {
                    let text = self.render(name, context)?;
                    let of_output = |error: TemplateError| match error.line {
                        // A line of the output is none of the file.
                        Some(line) => TemplateError::refused(
                            &error.template,
                            format!("{} (line {line} of the output)", error.message),
                        ),
                        None => error,
                    };
                    let parsed = Patch::parse(self.place(name), &text).map_err(of_output)?;
                    patches.extend(parsed.into_iter().map(Patch::without_line));
                }
            }
        }
        Ok(patches)
    }

    /// The error of what a template rendered: at the line of the template that looks most like the output there.
    pub(super) fn wrong(&self, name: &str, Wrong { message, near, last }: Wrong) -> TemplateError {
        let line = |name: &str| line_like(&self.source(name)?, &near, last);
        // It may have come from a template that this one extends.
        let chain = self.chain(name);
        let holds = |name: &&str| !near.is_empty() && self.source(name).is_some_and(|source| source.contains(&near));
        let name = chain.iter().map(|(name, _)| name.as_str()).find(holds).unwrap_or(name);
        TemplateError { line: line(name), ..TemplateError::refused(self.place(name), message) }
    }

    /// The error with the file that its template comes from.
    fn placed(&self, mut error: TemplateError) -> TemplateError {
        if let Some(place) = self.places.get(&error.template) {
            error.template.clone_from(place);
        }
        error
    }
}

/// The one line of a text that holds what is looked for or, if there is none, that begins most like it; from 1.
fn line_like(source: &str, near: &str, last: bool) -> Option<usize> {
    let common = |line: &str| line.chars().zip(near.chars()).take_while(|(a, b)| a == b).count();
    let score = |line: &str| if !near.is_empty() && line.contains(near) { usize::MAX } else { common(line.trim()) };
    let scores: Vec<usize> = source.lines().map(score).collect();
    let best = scores.iter().copied().max().filter(|best| *best >= 3)?;
    let numbered = scores.iter().enumerate().map(|(index, score)| (index + 1, *score));
    let mut lines = numbered.filter(|(_, score)| *score == best).map(|(line, _)| line);
    if last { lines.next_back() } else { lines.next().filter(|_| lines.next().is_none()) }
}

/// What to do about a block that a template does not have.
fn no_such_block(parent: &str, block: &str, known: &BTreeSet<String>, renamed: &[Renamed]) -> String {
    let template = parent.rsplit('/').next().unwrap_or(parent);
    let why = match renamed.iter().find(|(file, old, ..)| *file == template && *old == block) {
        Some((_, _, new, since)) => format!("it is named `{new}` since version {since}"),
        None => format!("it has {}", known.iter().cloned().collect::<Vec<_>>().join(", ")),
    };
    format!("{parent} has no block `{block}`: {why}")
}

/// Collects output up to [`MAXIMUM_OUTPUT`].
struct Bounded(Vec<u8>);

impl io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.extend_from_slice(bytes);
        if self.0.len() < MAXIMUM_OUTPUT { Ok(bytes.len()) } else { Err(io::ErrorKind::FileTooLarge.into()) }
    }
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{context, value::Serde};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn set(template: &str) -> Result<TemplateSet, TemplateError> {
        TemplateSet::layered(&Files::from([("pod.yaml.j2".to_owned(), template.to_owned())]), None)
    }

    fn error(template: &str) -> String {
        match set(template) {
            Err(error) => error.to_string(),
            Ok(set) => set.render("pod.yaml.j2", &context! { x => 1 }).unwrap_err().to_string(),
        }
    }

    #[test]
    fn errors_say_where() {
        insta::assert_snapshot!(error("a: 1\nb: {{ x }\n"), @"pod.yaml.j2:2:9: syntax error: unexpected `}`, expected end of variable block");
        insta::assert_snapshot!(error("a: 1\n\n  b: {{ y }}\n"), @"pod.yaml.j2:3:9: undefined value: `y` is undefined");
        insta::assert_snapshot!(error("{% if x.z %}{% endif %}"), @"pod.yaml.j2:1:7: undefined value: `x.z` is undefined");
        insta::assert_snapshot!(error("{% extends 'builtin/nothing.yaml.j2' %}"), @r#"pod.yaml.j2:1:4: template not found: template "builtin/nothing.yaml.j2" does not exist"#);
        insta::assert_snapshot!(error("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"), @"pod.yaml.j2:1:39: it takes too many steps: is there a loop that does not end?");
        insta::assert_snapshot!(error("{% extends 'builtin/pod.yaml.j2' %}"), @"builtin/pod.yaml.j2:5:17: undefined value: `spec` is undefined");
    }

    #[test]
    fn output_is_bounded() {
        let text = "x".repeat(10_000);
        let template = format!("{{% for i in range(1000) %}}{text}{{% endfor %}}");
        insta::assert_snapshot!(error(&template), @"pod.yaml.j2: it renders more than 2 MiB");
    }

    #[test]
    fn an_overlay_replaces_adds_removes_and_extends() {
        let files = Files::from([
            ("service.yaml.j2".into(), " \n".into()),
            ("network-policy.yaml.j2".into(), "a: {{ x }}\n".into()),
            ("macros.j2".into(), "{% macro m() %}{% endmacro %}".into()),
        ]);
        let set = TemplateSet::layered(&files, None).unwrap();
        let names: Vec<_> = set.names().collect();
        assert!(names.contains(&"network-policy.yaml.j2") && names.contains(&"pod.yaml.j2"));
        assert!(!names.contains(&"service.yaml.j2") && !names.contains(&"macros.j2"));
    }

    fn files(files: &[(&str, &str)]) -> Files {
        files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
    }

    fn refused(list: &[(&str, &str)]) -> String {
        TemplateSet::layered(&files(list), None).unwrap_err().to_string()
    }

    #[test]
    fn a_block_that_nobody_renders_is_an_error() {
        let text = "{% extends 'builtin/service.yaml.j2' %}\n{% block label %}\n{% endblock %}\n";
        insta::assert_snapshot!(refused(&[("service.yaml.j2", text)]), @"service.yaml.j2:2:10: builtin/service.yaml.j2 has no block `label`: it has annotations, labels, ports, spec");
        let renamed = [("service.yaml.j2", "label", "labels", "0.2.0")];
        let message = no_such_block("builtin/service.yaml.j2", "label", &BTreeSet::new(), &renamed);
        assert_eq!(message, "builtin/service.yaml.j2 has no block `label`: it is named `labels` since version 0.2.0");
        // Inside a block that there is, a template may have its own.
        let text =
            "{% extends 'builtin/service.yaml.j2' %}{% block labels %}{% block mine %}{% endblock %}{% endblock %}";
        assert!(TemplateSet::layered(&files(&[("service.yaml.j2", text)]), None).is_ok());
    }

    #[test]
    fn the_table_of_blocks_is_that_of_the_templates() {
        use crate::render::builtin::BLOCKS;

        let set = TemplateSet::builtin().unwrap();
        let there: BTreeSet<(String, String)> = BUILTIN
            .iter()
            .flat_map(|(name, _)| set.blocks(name).into_iter().map(|block| ((*name).to_owned(), block)))
            .collect();
        let table = BLOCKS.iter().map(|(template, block, ..)| ((*template).to_owned(), (*block).to_owned()));
        assert_eq!(there, table.collect());
    }

    /// An override that was written for this release, and the next one's template.
    #[test]
    fn an_override_outlives_a_change_of_another_block_and_is_told_of_a_new_name() {
        let written = "{% extends \"builtin/pod.yaml.j2\" %}\n{% block scheduling %}\n  nodeName: {{ vm.metadata.name }}\n{% endblock %}\n";
        let layers = || Layers { base: files(&[("pod.yaml.j2", written)]), named: None };
        let (_, pod) = BUILTIN.iter().find(|(name, _)| *name == "pod.yaml.j2").unwrap();
        let with = |text: &str, renamed: &[Renamed]| {
            let set = TemplateSet::over(&[("pod.yaml.j2", text)], renamed, layers())?;
            let vm = crate::test_support::vm(|_| ());
            let facts = super::super::Facts { display_password: "secret".into() };
            let objects =
                super::super::render(&vm, &crate::test_support::nothing(), &Default::default(), &facts, &set)?;
            Ok::<_, TemplateError>(objects[0].value["spec"].clone())
        };
        let changed = pod.replace("{% block volumes %}", "    - {name: more, emptyDir: {}}\n{% block volumes %}");
        let spec = with(&changed, &[]).unwrap();
        assert_eq!(spec["nodeName"], "apple");
        assert!(spec["volumes"].as_array().unwrap().iter().any(|volume| volume["name"] == "more"));

        let renamed = pod.replace("block scheduling", "block placement");
        let error = with(&renamed, &[("pod.yaml.j2", "scheduling", "placement", "0.2")]).unwrap_err().to_string();
        assert_eq!(
            error,
            "pod.yaml.j2:2:10: builtin/pod.yaml.j2 has no block `scheduling`: it is named `placement` since version 0.2"
        );
    }

    #[test]
    fn files_that_would_have_no_effect_are_errors() {
        insta::assert_snapshot!(refused(&[("pod.yaml", "a: b")]), @"pod.yaml: not the name of a template: one that is rendered ends in .yaml.j2, one with patches in .patch.yaml");
        insta::assert_snapshot!(refused(&[("values.yaml", "- a")]), @"values.yaml:1:1: invalid type: sequence, expected a map");
        insta::assert_snapshot!(refused(&[("values.schema.json", "{")]), @"values.schema.json:1:1: not JSON: EOF while parsing an object at line 1 column 1");
        assert!(TemplateSet::layered(&files(&[("README.md", "{{ anything }")]), None).is_ok());
    }

    #[test]
    fn a_named_set_lies_over_the_base_and_its_trouble_is_its_own() {
        let sources = Sources {
            base: files(&[("a.yaml.j2", "base"), ("b.yaml.j2", "base b")]),
            sets: BTreeMap::from([
                ("good".into(), files(&[("a.yaml.j2", "{% include 'base/a.yaml.j2' %} and more"), ("b.yaml.j2", "")])),
                ("bad".into(), files(&[("lib/x.j2", "{% if %}")])),
            ]),
        };
        let library = Library::new(&sources);
        let good = library.get(Some("good")).unwrap();
        assert_eq!(good.render("a.yaml.j2", &context! {}).unwrap(), "base and more");
        assert!(good.names().any(|name| name == "a.yaml.j2"));
        assert!(!good.names().any(|name| name == "b.yaml.j2"));
        assert_eq!(library.get(None).unwrap().render("b.yaml.j2", &context! {}).unwrap(), "base b");
        insta::assert_snapshot!(library.get(Some("bad")).unwrap_err(), @"sets/bad/lib/x.j2:1:7: syntax error: unexpected end of block");
        insta::assert_snapshot!(library.get(Some("ugly")).unwrap_err(), @r#"spec.templates.set: no template set is named "ugly": there are bad, good"#);
        assert_ne!(good.version(), library.get(None).unwrap().version());
        assert_eq!(good.version(), Library::new(&sources).get(Some("good")).unwrap().version());
    }

    fn any_json() -> impl Strategy<Value = serde_json::Value> {
        let text = prop_oneof![
            any::<String>(),
            "[\u{0}-\u{2f}\u{7f}-\u{a0}\u{2027}-\u{202a}\u{feff}\u{fff0}-\u{ffff}😀:#'\"{}\\[\\]\n-]{0,20}"
        ];
        let leaf = prop_oneof![
            Just(serde_json::Value::Null),
            any::<bool>().prop_map(|value| json!(value)),
            any::<i64>().prop_map(|value| json!(value)),
            any::<u64>().prop_map(|value| json!(value)),
            any::<f64>().prop_filter("JSON has no infinity", |value| value.is_finite()).prop_map(|value| json!(value)),
            text.clone().prop_map(|value| json!(value)),
        ];
        leaf.prop_recursive(4, 40, 6, move |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(|list| json!(list)),
                prop::collection::btree_map(text.clone(), inner, 0..6).prop_map(|map| json!(map)),
            ]
        })
    }

    proptest! {
        #[test]
        fn any_value_comes_out_as_it_went_in(value in any_json()) {
            let set = set("a: {{ x }}\nb:\n  - {{ x }}\n  - c: {{ [x] }} # comment\nlast: {{ {'k': x} }}\n").unwrap();
            let text = set.render("pod.yaml.j2", &context! { x => Value::from(Serde(&value)) }).unwrap();
            let read: serde_json::Value = serde_yaml::from_str(&text).unwrap();
            prop_assert_eq!(read, json!({ "a": value, "b": [value, { "c": [value] }], "last": { "k": value } }));
        }
    }

    #[test]
    fn long_keys_and_awkward_texts() {
        for value in [
            json!({ "k".repeat(5000): 1 }),
            json!("\u{0}\u{2028}---\n...\n😀"),
            json!("no"),
            json!({ "<<": { "a": 1 } }),
        ] {
            let text =
                set("{{ x }}").unwrap().render("pod.yaml.j2", &context! { x => Value::from(Serde(&value)) }).unwrap();
            assert_eq!(serde_yaml::from_str::<serde_json::Value>(&text).unwrap(), value);
        }
    }
}
