//! Names in templates that lead nowhere.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Finding, Mention, Outline, Rule, TemplateSet};
use crate::render::schema;

/// Checks the set's own templates: the built-in ones have tests.
pub(super) fn check(set: &TemplateSet) -> Vec<Finding> {
    let context = schema::context(None);
    let used = used_templates(set);
    let mut findings = Vec::new();
    for (name, place) in set.all().filter(|(_, place)| !place.starts_with("builtin/")) {
        let Some(source) = set.source(name) else { continue };
        let template = Template { set, name, place, outline: Outline::of(&source) };
        findings.extend(template.unknown_variables(&context));
        findings.extend(template.unused(&used));
        findings.extend(template.unknown_templates());
        findings.extend(template.unknown_imports());
    }
    findings
}

/// The templates that others of the set include, import or extend.
fn used_templates(set: &TemplateSet) -> BTreeSet<String> {
    let sources = set.all().filter_map(|(name, _)| set.source(name));
    let used = sources.flat_map(|source| {
        let outline = Outline::of(&source);
        outline.uses.into_iter().chain(outline.extends)
    });
    used.map(|used| used.name).collect()
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
        self.name.contains('/') || !self.name.ends_with(".yaml.j2")
    }

    fn unknown_variables(&self, context: &Value) -> Vec<Finding> {
        let variables = self.set.variables(self.name);
        let root = |path: &Mention| path.name.split('.').next().unwrap_or_default().to_owned();
        let mut seen = BTreeSet::new();
        let mut findings = Vec::new();
        for path in self.outline.paths.iter().filter(|path| variables.contains(&root(path))) {
            let (index, known) = match schema::resolve(context, &path.name) {
                Err(wrong) => wrong,
                Ok(None) => continue,
                Ok(Some(instead)) => {
                    let message = format!("{} is deprecated: {instead}", path.name);
                    findings.push(Finding::at(self.place, path, Rule::Deprecated, message));
                    continue;
                }
            };
            // An included template may get a name from the template that includes it.
            if (self.is_included() && index == 0) || !seen.insert(path.name.clone()) {
                continue;
            }
            let parts: Vec<&str> = path.name.split('.').collect();
            let (before, missing) = (parts[..index].join("."), parts[index]);
            let before = if index == 0 { "the context" } else { &before };
            let message = format!("{before} has no {missing}: {}", suggestion(missing, &known));
            findings.push(Finding::at(self.place, path, Rule::UnknownVariable, message));
        }
        findings
    }

    fn unused(&self, used: &BTreeSet<String>) -> Option<Finding> {
        let name = self.name;
        if !self.is_included() || name.ends_with(".patch.yaml.j2") || used.contains(name) {
            return None;
        }
        let message = format!(
            "{name} is never rendered: only NAME.yaml.j2 at the top is, and no other file includes or imports it"
        );
        Some(Finding::new(self.place, Rule::UnusedFile, message))
    }

    fn unknown_templates(&self) -> impl Iterator<Item = Finding> {
        let used = self.outline.uses.iter().chain(&self.outline.extends);
        used.filter(|used| !self.set.has(&used.name)).map(|used| {
            let message = format!("there is no template {:?} in this set", used.name);
            Finding::at(self.place, used, Rule::UnknownTemplate, message)
        })
    }

    fn unknown_imports(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        for import in &self.outline.imports {
            let Some(source) = self.set.source(&import.file) else { continue };
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
fn suggestion(missing: &str, known: &[impl AsRef<str>]) -> String {
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
