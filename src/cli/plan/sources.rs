//! By what VMs are rendered: without the change, and with it.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt, api::ListParams};
use serde::Deserialize;

use super::super::{
    input::{Settings, documents, read_text},
    installed::{Installed, unknown},
    output::{Failure, note},
};
use crate::{
    api::VirtualMachine,
    config::ReconcilerConfig,
    files::{self, FileError},
    object::{Rendered, SET_LABEL, TEMPLATES_MAP},
    observed::Observed,
    render::{
        Files, Library, RandomInput, Sources, TemplateError, TemplateSet,
        kept::{FORMER, LABEL, VERSION},
        render,
        templates::Layers,
    },
};

/// What the command line says that changes.
pub(in crate::cli) struct Change {
    /// The templates for all VMs, if they change.
    base: Option<Files>,
    /// The named sets that change.
    sets: BTreeMap<String, Files>,
    config: Option<ReconcilerConfig>,
    /// Where errors are looked up.
    folders: Vec<PathBuf>,
}

impl Change {
    /// # Errors
    /// A file that can't be read.
    pub fn read(templates: &[PathBuf], config: Option<&Path>) -> Result<Self, Failure> {
        let config = config.map(files::configuration).transpose()?.map(|config| config.reconciler);
        let mut change = Self { base: None, sets: BTreeMap::new(), config, folders: Vec::new() };
        for path in templates {
            if path.is_dir() {
                let Sources { base, sets } = files::sources(path)?;
                change.base.get_or_insert_default().extend(base);
                change.sets.extend(sets);
                change.folders.push(path.clone());
            } else {
                change.add_maps(path)?;
            }
        }
        Ok(change)
    }

    /// Adds the sets of the ConfigMaps in a file.
    fn add_maps(&mut self, file: &Path) -> Result<(), Failure> {
        let (text, mut count) = (read_text(file)?, 0);
        for document in documents(&text) {
            let wrong = |error: crate::yaml::Error| FileError::yaml(file, &error, document.lines_before);
            let value: serde_yaml::Value = crate::yaml::from_str(document.text).map_err(wrong)?;
            if value.get("kind").and_then(serde_yaml::Value::as_str) != Some("ConfigMap") {
                continue;
            }
            let map = ConfigMap::deserialize(value).map_err(|error| wrong(error.into()))?;
            let set = map.labels().get(SET_LABEL).cloned();
            let is_base = map.name_any() == TEMPLATES_MAP;
            let data = files::unpacked(map.data.unwrap_or_default());
            match set {
                Some(set) => drop(self.sets.insert(set, data)),
                None if is_base => {
                    let Sources { base, sets } = files::split_sets(data);
                    self.base.get_or_insert_default().extend(base);
                    self.sets.extend(sets);
                }
                None => continue,
            }
            count += 1;
        }
        if count == 0 {
            return Err(Failure::new(format!(
                "{}:1:1: there is no ConfigMap with templates in this file: none has the label {SET_LABEL} or the name {TEMPLATES_MAP}",
                file.display()
            )));
        }
        Ok(())
    }

    /// Whether nothing changes but the program.
    pub fn is_program(&self) -> bool {
        self.base.is_none() && self.sets.is_empty() && self.config.is_none()
    }

    /// Whether templates change.
    pub fn has_templates(&self) -> bool {
        self.base.is_some() || !self.sets.is_empty()
    }

    /// An error with the place where it can be corrected.
    pub fn words(&self, error: &TemplateError) -> String {
        let folder = self.folders.iter().find(|folder| folder.join(&error.template).is_file());
        if error.line.is_none() && folder.is_none() {
            return error.to_string();
        }
        Failure::from(FileError::template(folder.map(PathBuf::as_path), error)).words()
    }
}

/// By what a manager renders VMs.
pub(in crate::cli) struct Side {
    sources: Sources,
    pub library: Library,
    pub config: ReconcilerConfig,
    /// The former versions that VMs keep, because their values do not match the newest one: set, version, templates.
    former: Vec<(Option<String>, String, TemplateSet)>,
    /// Whether a changed set is checked with all its VMs before it is used.
    pub is_checked: bool,
}

impl Side {
    /// What is in force: what the manager keeps, or if it keeps nothing, what the ConfigMaps say.
    ///
    /// # Errors
    /// If ConfigMaps can't be read.
    pub async fn installed(client: &Client, home: &str) -> Result<Self, Failure> {
        let installed = Installed::read(client, home, &Settings::default()).await?;
        installed.twice.iter().for_each(|warning| note(&format!("# warning: {warning}")));
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), home);
        let kept = maps.list(&ListParams::default().labels(LABEL)).await.map_err(unknown("ConfigMaps"))?;
        let (mut sources, mut former) = (Sources::default(), Vec::new());
        let mut is_kept = false;
        for map in kept {
            let Some(layers) = Layers::kept_in(&map) else { continue };
            if let Some(version) = map.labels().get(FORMER) {
                let set = layers.named.as_ref().map(|(name, _)| name.clone());
                former.extend(TemplateSet::compile(layers).ok().map(|templates| (set, version.clone(), templates)));
                continue;
            }
            is_kept |= map.annotations().contains_key(VERSION);
            match layers.named {
                Some((name, files)) => drop(sources.sets.insert(name, files)),
                None => sources.base = layers.base,
            }
        }
        let sources = if is_kept { sources } else { installed.sources };
        Ok(Self { library: Library::new(&sources), sources, config: installed.config, former, is_checked: false })
    }

    /// The same with a change.
    pub fn changed(&self, change: &Change) -> Self {
        let mut sources = self.sources.clone();
        sources.base = change.base.clone().unwrap_or(sources.base);
        sources.sets.extend(change.sets.clone());
        Self {
            library: Library::new(&sources),
            sources,
            config: change.config.clone().unwrap_or_else(|| self.config.clone()),
            former: self.former.clone(),
            is_checked: change.has_templates(),
        }
    }

    /// The VM's objects, as they depend on what there is already.
    ///
    /// # Errors
    /// Why it can't be rendered.
    pub fn render(&self, vm: &VirtualMachine, observed: &Observed) -> Result<Vec<Rendered>, TemplateError> {
        let random = RandomInput { display_password: "(random)".into(), ..RandomInput::default() };
        let rendered = render(vm, observed, &self.config, &random, self.library.get(vm.template_set())?);
        match rendered {
            Err(error) if error.of_values => match self.former(vm) {
                Some(former) => render(vm, observed, &self.config, &random, former).map_err(|_| error),
                None => Err(error),
            },
            rendered => rendered,
        }
    }

    fn former(&self, vm: &VirtualMachine) -> Option<&TemplateSet> {
        let from = vm.status.as_ref()?.templates.as_ref()?;
        let of_set = self.former.iter().filter(|(set, ..)| set.as_deref() == vm.template_set());
        let mut of_version = of_set.filter(|(_, version, _)| Some(version) == from.version.as_ref());
        of_version.next().map(|(_, _, templates)| templates)
    }

    /// Says of which changed sets no VM is.
    pub fn note_sets_that_nobody_uses<'a>(
        &self,
        change: &Change,
        vms: impl Iterator<Item = &'a VirtualMachine> + Clone,
    ) {
        for set in change.sets.keys() {
            if !vms.clone().any(|vm| vm.template_set() == Some(set)) {
                note(&format!("# no VM uses the set {set}"));
            }
        }
    }
}
