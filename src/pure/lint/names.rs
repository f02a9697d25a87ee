//! Names in templates that lead nowhere.

use std::{
    cell::LazyCell,
    collections::{BTreeMap, BTreeSet},
};

use serde_json::Value;

use super::{
    Finding, Mention, Outline, Rule, TemplateSet,
    scopes::{Local, Scopes, Use},
};
use crate::render::{
    command_line::is_template,
    schema,
    templates::{QEMU_FOLDER as FOLDER, SUFFIX},
    values::{ADMINISTRATOR, OF_BUILTIN, SCHEMA},
};

/// What a block has besides the names of the context.
const OF_BLOCKS: [&str; 2] = ["self", "super"];

/// Checks the set's own templates: the built-in ones have tests.
pub(super) fn check(set: &TemplateSet) -> Vec<Finding> {
    let of_objects = schema::context(None);
    let of_qemu = LazyCell::new(schema::qemu);
    let used = used_templates(set);
    let mut findings = Vec::new();
    for (name, place) in set.all().filter(|(_, place)| !place.starts_with("builtin/")) {
        let Some(source) = set.source(name) else { continue };
        let template = Template { set, name, place, outline: Outline::of(&source) };
        let context = if name.starts_with(FOLDER) { &of_qemu } else { &of_objects };
        findings.extend(template.unknown_variables(context));
        findings.extend(template.unused(&used));
        findings.extend(template.unknown_templates());
        findings.extend(template.unknown_imports());
    }
    findings
}

/// The first use of `values` in a set of which no schema says what a VM may set.
pub(super) fn open_values(set: &TemplateSet) -> Option<Finding> {
    if set.values().is_closed() {
        return None;
    }
    set.all().filter(|(_, place)| !place.starts_with("builtin/")).find_map(|(name, place)| {
        let uses = Scopes::of(&set.source(name)?).uses;
        let mention = uses.into_iter().find(|used| used.local.is_none() && is_own_value(&used.mention.name))?.mention;
        let message = format!(
            "who may create a VM sets {} to anything: write a {SCHEMA} with `\"additionalProperties\": false`, the `properties` that a VM \
             may set, and `\"{ADMINISTRATOR}\": true` in those that only you set",
            mention.name
        );
        Some(Finding::at(place, &mention, Rule::OpenValues, message))
    })
}

/// Whether a name is one of `values` that is not for the built-in templates.
fn is_own_value(name: &str) -> bool {
    let mut parts = name.split('.');
    parts.next() == Some("values") && parts.next().is_none_or(|key| !OF_BUILTIN.contains(&key))
}

/// The templates that others of the set include, import or extend.
fn used_templates(set: &TemplateSet) -> BTreeSet<String> {
    let sources = set.all().filter_map(|(name, _)| Some((name, set.source(name)?)));
    let used = sources.flat_map(|(parent, source)| {
        let outline = Outline::of(&source);
        let used = outline.uses.into_iter().chain(outline.extends);
        used.filter_map(move |used| set.find(Some(parent), &used.name))
    });
    used.collect()
}

struct Template<'a> {
    set: &'a TemplateSet,
    name: &'a str,
    /// Its file.
    place: &'a str,
    outline: Outline,
}

impl Template<'_> {
    /// Whether it is rendered only as part of others.
    fn is_included(&self) -> bool {
        !is_template(self.name) && (self.name.contains('/') || !self.name.ends_with(SUFFIX))
    }

    fn unknown_variables(&self, context: &Value) -> Vec<Finding> {
        let scopes = self.set.source(self.name).map(|source| Scopes::of(&source)).unwrap_or_default();
        let (functions, inherited) = (self.set.functions(), self.inherited());
        let mut seen = BTreeSet::new();
        let mut findings = Vec::new();
        for Use { mention, local, blocks } in scopes.uses {
            let (root, rest) = mention.name.split_once('.').unwrap_or((&mention.name, ""));
            let around: Vec<&Local> = blocks.iter().filter_map(|block| inherited.get(block)).flatten().collect();
            let local = local.as_ref().or_else(|| around.iter().rev().copied().find(|local| local.name == root));
            let (schema, before, path) = match local {
                Some(Local { item_of: Some(list), .. }) if !rest.is_empty() => match schema::items(context, list) {
                    Some(items) => (items, root, rest),
                    None => continue,
                },
                Some(_) => continue,
                None if functions.contains(root) || OF_BLOCKS.contains(&root) => continue,
                None => (context, "", mention.name.as_str()),
            };
            let (index, mut known) = match schema::resolve(schema, path) {
                Err(wrong) => wrong,
                Ok(None) => continue,
                Ok(Some(instead)) => {
                    let message = format!("{} is deprecated: {instead}", mention.name);
                    findings.push(Finding::at(self.place, &mention, Rule::Deprecated, message));
                    continue;
                }
            };
            let is_root = index == 0 && before.is_empty();
            // An included template may get a name from the template that includes it.
            if (self.is_included() && is_root) || !seen.insert((mention.name.clone(), blocks)) {
                continue;
            }
            let parts: Vec<&str> = path.split('.').collect();
            let above: Vec<&str> =
                [before].into_iter().chain(parts[..index].iter().copied()).filter(|it| !it.is_empty()).collect();
            let above = if is_root { "the context".to_owned() } else { above.join(".") };
            if is_root {
                known.extend(around.iter().map(|local| local.name.clone()));
            }
            let missing = parts[index];
            let message = format!("{above} has no {missing}: {}", suggestion(missing, &known));
            findings.push(Finding::at(self.place, &mention, Rule::UnknownVariable, message));
        }
        findings
    }

    /// The names that the templates above have in scope where their blocks stand, by block.
    fn inherited(&self) -> BTreeMap<String, Vec<Local>> {
        let mut inherited: BTreeMap<String, Vec<Local>> = BTreeMap::new();
        // The template itself has none beside its own.
        for (above, _) in self.set.chain(self.name).into_iter().skip(1) {
            let source = self.set.source(&above).unwrap_or_default();
            for (block, locals) in Scopes::of(&source).blocks {
                inherited.entry(block).or_default().extend(locals);
            }
        }
        inherited
    }

    fn unused(&self, used: &BTreeSet<String>) -> Option<Finding> {
        let name = self.name;
        if !self.is_included() || name.ends_with(".patch.yaml.j2") || used.contains(name) {
            return None;
        }
        let message = format!(
            "{name} is never rendered: only NAME.yaml.j2 at the top and {FOLDER}NAME.yaml.j2 are, and no other file includes or imports it"
        );
        Some(Finding::new(self.place, Rule::UnusedFile, message))
    }

    fn unknown_templates(&self) -> impl Iterator<Item = Finding> {
        let used = self.outline.uses.iter().chain(&self.outline.extends);
        used.filter(|used| self.set.find(Some(self.name), &used.name).is_none()).map(|used| {
            let message = format!("there is no template {:?} in this set", used.name);
            Finding::at(self.place, used, Rule::UnknownTemplate, message)
        })
    }

    fn unknown_imports(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for import in &self.outline.imports {
            let Some(file) = self.set.find(Some(self.name), &import.file) else { continue };
            let source = self.set.source(&file).unwrap_or_default();
            let mut exports = Outline::of(&source).exports;
            exports.sort();
            let module = import.module.as_ref().map(|module| format!("{module}."));
            let by_module = self.outline.paths.iter().filter_map(|path| {
                let name = path.name.strip_prefix(module.as_deref()?)?;
                Some(Mention { name: name.split('.').next().unwrap_or(name).to_owned(), ..path.clone() })
            });
            let names = import.names.iter().map(|(name, _)| name.clone());
            for name in names.chain(by_module).filter(|it| !exports.contains(&it.name)) {
                let message = format!("{} has no {}: {}", import.file, name.name, suggestion(&name.name, &exports));
                findings.push(Finding::at(self.place, &name, Rule::UnknownImport, message));
            }
        }
        findings
    }
}

/// What to write instead of a name that does not exist.
pub fn suggestion(missing: &str, known: &[impl AsRef<str>]) -> String {
    let known: Vec<&str> = known.iter().map(AsRef::as_ref).collect();
    match known.iter().min_by_key(|name| distance(name, missing)) {
        Some(near) if distance(near, missing) <= 2 => format!("did you mean {near}?"),
        Some(_) => format!("there are {}", known.join(", ")),
        None => "there is nothing in it".to_owned(),
    }
}

/// How many letters must change to turn one word into the other (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut last = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let here = last + usize::from(x != *y);
            last = row[j + 1];
            row[j + 1] = here.min(last + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_suggested_if_it_is_near() {
        assert_eq!(distance("kitten", "sitting"), 3);
        assert_eq!(suggestion("nam", &["uid", "name"]), "did you mean name?");
        assert_eq!(suggestion("size", &["uid", "name"]), "there are uid, name");
        assert_eq!(suggestion("size", &[""; 0]), "there is nothing in it");
    }
}
