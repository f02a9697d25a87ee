//! The template sets that VMs can use: one for all VMs, and named ones that a VM chooses in `spec.templates.set`.

use std::collections::BTreeMap;

use super::{
    error::TemplateError,
    templates::{Files, TemplateSet},
};

/// The files that an operator provides: templates for all VMs, and named sets over them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sources {
    /// For all VMs.
    pub base: Files,
    /// For VMs that name a set in `spec.templates.set`.
    pub sets: BTreeMap<String, Files>,
}

/// All template sets: the compiled ones, and the errors of the others.
#[derive(Debug)]
pub struct Library {
    base: Result<TemplateSet, TemplateError>,
    sets: BTreeMap<String, Result<TemplateSet, TemplateError>>,
}

impl Library {
    /// Compiles all sets. An error in one does not affect the others.
    pub fn new(sources: &Sources) -> Self {
        let named = sources.sets.iter();
        Self {
            base: TemplateSet::layered(&sources.base, None),
            sets: named
                .map(|(name, files)| (name.clone(), TemplateSet::layered(&sources.base, Some((name, files)))))
                .collect(),
        }
    }

    /// The built-in templates alone.
    pub fn builtin() -> Self {
        Self::new(&Sources::default())
    }

    /// The set of that name. Without a name: the set for VMs that name none.
    ///
    /// # Errors
    /// The error of the set, or that there is no such set.
    pub fn get(&self, name: Option<&str>) -> Result<&TemplateSet, TemplateError> {
        let Some(name) = name else { return self.base.as_ref().map_err(Clone::clone) };
        let set = self.sets.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.sets.keys().map(String::as_str).collect();
            let there =
                if names.is_empty() { "there are none".into() } else { format!("there are {}", names.join(", ")) };
            let message = format!("no template set is named {name:?}: {there}");
            TemplateError::of_vm("spec.templates.set", "/spec/templates/set", message)
        })?;
        set.as_ref().map_err(Clone::clone)
    }

    /// Every set with its name. The set for VMs that name none comes first.
    pub fn all(&self) -> impl Iterator<Item = (Option<&str>, &Result<TemplateSet, TemplateError>)> {
        let named = self.sets.iter().map(|(name, set)| (Some(name.as_str()), set));
        std::iter::once((None, &self.base)).chain(named)
    }

    /// The same without those that can't be used.
    pub fn usable(&self) -> impl Iterator<Item = (Option<&str>, &TemplateSet)> {
        self.all().filter_map(|(name, set)| Some((name, set.as_ref().ok()?)))
    }

    /// Replaces the set of that name, or adds one.
    pub fn put(&mut self, name: Option<&str>, set: Result<TemplateSet, TemplateError>) {
        match name {
            None => self.base = set,
            Some(name) => drop(self.sets.insert(name.to_owned(), set)),
        }
    }
}
