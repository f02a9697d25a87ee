//! `kubectl vm templates rollback`: a former version of a set, back in its ConfigMap.
//!
//! ```text
//!  history ─▶ version ─▶ ConfigMap that the set comes from ─▶ its keys replaced ─▶ the manager checks the set as after any change
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, ResourceExt,
    api::{ListParams, Patch, PatchParams},
};
use serde_json::{Value, json};

use super::{
    super::{
        cluster::Cluster,
        installed::unknown,
        output::{Exit, Failure, Output, chain, counted, note},
    },
    history::{History, KeptSet, Version, changes},
};
use crate::{
    files::{self, FileError, SETS},
    object::{SET_LABEL, TEMPLATES_MAP},
    ownership::{self, COMMAND_MANAGER},
    render::{Files, templates::Layers},
};

#[derive(Args)]
pub(in crate::cli) struct Options {
    #[command(flatten)]
    set: KeptSet,
    /// The version, as `kubectl vm templates history` lists it, or its first characters.
    #[arg(long, value_name = "VERSION")]
    to: Option<String>,
    /// Write the files into this folder, for Git, and leave the cluster alone.
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Options { set, to, output: folder } = options;
    let cluster = set.connect().await?;
    let history = set.history(&cluster).await?;
    if let Some(folder) = folder {
        let version = chosen(&history, to.as_deref(), None, set)?;
        write_files(folder, version.files())?;
        let files = counted(version.files().len(), "file");
        writeln!(output, "wrote version {} of {}: {files} in {}", version.version, set.described(), folder.display())?;
        return Ok(Exit::Success);
    }
    let source = SetSource::find(&cluster, set).await?;
    let version = chosen(&history, to.as_deref(), Some(&source), set)?;
    for applier in appliers(&source.map) {
        note(&format!(
            "{applier} applies the ConfigMap {}, and may put its own version back: revert the change there, too (--output DIR writes \
             the files), or suspend it until you have",
            source.map.name_any()
        ));
    }
    source.write(&cluster, version).await?;
    writeln!(output, "configmap/{}: version {} ({})", source.map.name_any(), version.version, source.changes(version))?;
    let has_other_base =
        |in_force: &Version| in_force.layers.named.is_some() && in_force.layers.base != version.layers.base;
    if history.in_force.as_ref().is_some_and(has_other_base) {
        note(
            "the templates for all VMs, over which this set lies, have changed since: the version will have another name",
        );
    }
    note("the manager checks it before it uses it; `kubectl vm templates history` shows when it is in force");
    Ok(Exit::Success)
}

/// The version to go back to.
fn chosen<'a>(
    history: &'a History,
    to: Option<&str>,
    source: Option<&SetSource>,
    set: &KeptSet,
) -> Result<&'a Version, Failure> {
    let versions = || history.versions.iter();
    if let Some(wanted) = to {
        let known = || versions().map(|version| version.version.as_str()).collect::<Vec<_>>().join(", ");
        let found: Vec<&Version> = versions().filter(|version| version.version.starts_with(wanted)).collect();
        return match found.as_slice() {
            [version] if !wanted.is_empty() => Ok(version),
            [] => Err(Failure::new(format!(
                "{} has no version {wanted:?} in its history: it has {}",
                set.described(),
                known()
            ))),
            several => {
                let names: Vec<&str> = several.iter().map(|version| version.version.as_str()).collect();
                Err(Failure::new(format!(
                    "several versions of {} begin with {wanted:?}: {}",
                    set.described(),
                    names.join(", ")
                )))
            }
        };
    }
    let Some(in_force) = &history.in_force else {
        return Err(Failure::new(format!(
            "nothing says which version of {} is in force: choose one with --to",
            set.described()
        )));
    };
    if source.is_some_and(|source| source.files != *in_force.files()) {
        return Ok(in_force);
    }
    let before = versions().skip_while(|version| version.version != in_force.version).nth(1);
    before.ok_or_else(|| {
        Failure::new(format!("the history of {} has no version before {}", set.described(), in_force.version))
    })
}

/// Where a set comes from.
struct SetSource {
    map: ConfigMap,
    /// What stands before the set's keys.
    prefix: String,
    /// The set's files in it.
    files: Files,
}

impl SetSource {
    /// The one ConfigMap from which the manager takes a set.
    async fn find(cluster: &Cluster, set: &KeptSet) -> Result<Self, Failure> {
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let mut sources = Vec::new();
        if let Some(name) = &set.name {
            let label = format!("{SET_LABEL}={name}");
            let labelled = maps.list(&ListParams::default().labels(&label)).await.map_err(unknown("template sets"))?;
            sources.extend(labelled.into_iter().map(|map| Self::of(map, "")));
        }
        let base = maps.get_opt(TEMPLATES_MAP).await.map_err(unknown(format_args!("ConfigMap {TEMPLATES_MAP}")))?;
        let prefix = set.name.as_ref().map(|name| format!("{SETS}/{name}/")).unwrap_or_default();
        let base = base.map(|map| Self::of(map, &prefix));
        sources.extend(base.filter(|source| set.name.is_none() || !source.files.is_empty()));
        match (sources.pop(), &sources[..]) {
            (Some(source), []) => Ok(source),
            (Some(source), others) => {
                let names: Vec<String> = others.iter().chain([&source]).map(|source| source.map.name_any()).collect();
                let message = format!("{} comes from several ConfigMaps: {}", set.described(), names.join(", "));
                Err(Failure::new(format!(
                    "{message}: write the files with --output DIR, and decide where each belongs"
                )))
            }
            (None, _) => Err(Failure::new(format!(
                "{} comes from no ConfigMap in the namespace {}, but from a folder that is mounted into the manager in another way: write \
                 the files with --output DIR, and put them there",
                set.described(),
                cluster.namespace
            ))),
        }
    }

    fn of(map: ConfigMap, prefix: &str) -> Self {
        let all = files::unpacked(map.data.clone().unwrap_or_default());
        let is_own = |name: &String| {
            !prefix.is_empty() || map.labels().contains_key(SET_LABEL) || !name.starts_with(&format!("{SETS}/"))
        };
        let own = all.into_iter().filter(|(name, _)| is_own(name));
        let files = own.filter_map(|(name, text)| Some((name.strip_prefix(prefix)?.to_owned(), text))).collect();
        Self { map, prefix: prefix.to_owned(), files }
    }

    /// What the write changes.
    fn changes(&self, version: &Version) -> String {
        let layers = |files: &Files| Layers { base: files.clone(), named: None };
        changes(&layers(&self.files), &layers(version.files()))
    }

    /// Replaces the set's keys. A merge patch, because an apply would leave keys that another client applies. Then it gives them to that
    /// client, which otherwise would have a conflict the next time, or leave keys that its set does not have.
    async fn write(&self, cluster: &Cluster, version: &Version) -> Result<(), Failure> {
        let name = self.map.name_any();
        let mut data: BTreeMap<String, Value> = BTreeMap::new();
        let names: BTreeSet<&String> = self.files.keys().chain(version.files().keys()).collect();
        for file in names {
            let key =
                files::key(&format!("{}{file}", self.prefix)).map_err(|why| Failure::new(format!("{file}: {why}")))?;
            data.insert(key, json!(version.files().get(file)));
        }
        // With the version that was read, so that a change that somebody makes meanwhile is not lost.
        let patch = json!({ "metadata": { "resourceVersion": self.map.resource_version() }, "data": data });
        let params = PatchParams { field_manager: Some(COMMAND_MANAGER.into()), ..PatchParams::default() };
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let failed = |error| Failure::new(chain(format_args!("ConfigMap {name}"), &error));
        let mut written = maps.patch(&name, &params, &Patch::Merge(&patch)).await.map_err(failed)?;
        if ownership::hand_over_data(written.managed_fields_mut()) {
            let metadata =
                json!({ "resourceVersion": written.resource_version(), "managedFields": written.managed_fields() });
            maps.patch(&name, &params, &Patch::Merge(json!({ "metadata": metadata }))).await.map_err(failed)?;
        }
        Ok(())
    }
}

/// Those who apply a ConfigMap again and again, as far as it shows.
fn appliers(map: &ConfigMap) -> Vec<String> {
    let managers = map.managed_fields().iter().filter_map(|entry| entry.manager.as_deref());
    let tools = managers.filter_map(|manager| match manager {
        name if name.contains("argocd") => Some("Argo CD".to_owned()),
        "kustomize-controller" => Some("Flux".to_owned()),
        "helm-controller" => Some("Flux (a HelmRelease)".to_owned()),
        "helm" => Some("Helm".to_owned()),
        _ => None,
    });
    let mut tools: BTreeSet<String> = tools.collect();
    if map.annotations().contains_key("argocd.argoproj.io/tracking-id") {
        tools.insert("Argo CD".into());
    }
    if let Some(name) = map.labels().get("kustomize.toolkit.fluxcd.io/name") {
        tools.remove("Flux");
        tools.insert(format!("Flux (Kustomization {name})"));
    }
    tools.into_iter().collect()
}

fn write_files(folder: &Path, files: &Files) -> Result<(), Failure> {
    for (name, text) in files {
        let file = folder.join(name);
        let above = file.parent().unwrap_or(folder);
        fs::create_dir_all(above).map_err(FileError::io(above))?;
        fs::write(&file, text).map_err(FileError::io(&file))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(value: Value) -> ConfigMap {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn tools_that_apply_the_config_map_are_named() {
        let managed = |manager: &str| {
            map(json!({ "metadata": { "managedFields": [{ "manager": manager, "operation": "Apply" }] } }))
        };
        for (manager, expected) in [
            ("argocd-controller", &["Argo CD"] as &[&str]),
            ("kustomize-controller", &["Flux"]),
            ("helm", &["Helm"]),
            ("kubectl", &[]),
            (COMMAND_MANAGER, &[]),
        ] {
            assert_eq!(appliers(&managed(manager)), expected, "{manager}");
        }
        let tracked = json!({ "metadata": { "annotations": { "argocd.argoproj.io/tracking-id": "x" }, "labels": { "kustomize.toolkit.fluxcd.io/name": "y" } } });
        assert_eq!(appliers(&map(tracked)), ["Argo CD", "Flux (Kustomization y)"]);
    }

    #[test]
    fn the_keys_of_a_set_are_told_from_the_others() {
        let data = json!({ "a.yaml.j2": "1", "lib__b.j2": "2", "sets__desktop__a.yaml.j2": "3" });
        let names = |prefix: &str, labels: Value| {
            let map = map(json!({ "metadata": { "labels": labels }, "data": data }));
            SetSource::of(map, prefix).files.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(names("", json!({})), ["a.yaml.j2", "lib/b.j2"]);
        assert_eq!(names("sets/desktop/", json!({})), ["a.yaml.j2"]);
        assert_eq!(names("", json!({ SET_LABEL: "x" })), ["a.yaml.j2", "lib/b.j2", "sets/desktop/a.yaml.j2"]);
    }
}
