//! `kubectl vm templates history`: the versions of a set that came in force.

use std::cmp::Reverse;

use clap::Args;
use k8s_openapi::{api::core::v1::ConfigMap, jiff::Timestamp};
use kube::{Api, ResourceExt, api::ListParams};

use super::super::{
    cluster::{Cluster, ClusterOptions},
    installed::unknown,
    output::{Exit, Failure, Output},
};
use crate::{
    process::ErrorChain,
    render::{
        Files,
        kept::{self, HISTORY, SINCE, VERSION},
        templates::Layers,
    },
};

#[derive(Args)]
pub(in crate::cli) struct Options {
    #[command(flatten)]
    set: KeptSet,
}

/// A set that a manager keeps.
#[derive(Args)]
pub(super) struct KeptSet {
    /// The named set. Default: the templates of the VMs that name none.
    #[arg(value_name = "SET")]
    pub name: Option<String>,
    /// The namespace is the manager's.
    #[command(flatten)]
    pub cluster: ClusterOptions,
}

/// A version that came in force.
pub(super) struct Version {
    pub version: String,
    pub since: Option<Timestamp>,
    pub layers: Layers,
}

/// The versions of a set.
pub(super) struct History {
    /// The newest first.
    pub versions: Vec<Version>,
    pub in_force: Option<Version>,
}

impl KeptSet {
    pub async fn connect(&self) -> Result<Cluster, Failure> {
        self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))
    }

    /// Reads the set's history.
    pub async fn history(&self, cluster: &Cluster) -> Result<History, Failure> {
        let maps: Api<ConfigMap> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
        let label = format!("{HISTORY}={}", self.name.as_deref().unwrap_or_default());
        let listed = maps.list(&ListParams::default().labels(&label)).await.map_err(unknown("ConfigMaps"))?;
        let mut versions: Vec<Version> = listed.into_iter().filter_map(Version::read).collect();
        versions.sort_by_key(|version| Reverse(version.since));
        let name = kept::in_force_name(self.name.as_deref(), None);
        let in_force = maps.get_opt(&name).await.map_err(unknown(format_args!("ConfigMap {name}")))?;
        let in_force = in_force.and_then(Version::read);
        if versions.is_empty() && in_force.is_none() {
            let (set, namespace) = (self.described(), &cluster.namespace);
            let message = format!(
                "{set}: no manager keeps it in the namespace {namespace}: give the manager's namespace with -n"
            );
            return Err(Failure::new(message));
        }
        Ok(History { versions, in_force })
    }

    /// The set in a message.
    pub fn described(&self) -> String {
        self.name.as_ref().map_or_else(|| "the templates for all VMs".into(), |name| format!("the template set {name}"))
    }
}

impl Version {
    fn read(map: ConfigMap) -> Option<Self> {
        let annotation = |name: &str| map.annotations().get(name);
        let (version, since) = (annotation(VERSION)?.clone(), annotation(SINCE).and_then(|time| time.parse().ok()));
        Some(Self { version, since, layers: Layers::kept_in(&map)? })
    }

    /// The files of the set itself: those of its folder or ConfigMap.
    pub fn files(&self) -> &Files {
        self.layers.named.as_ref().map_or(&self.layers.base, |(_, files)| files)
    }
}

impl History {
    fn is_in_force(&self, version: &Version) -> bool {
        self.in_force.as_ref().is_some_and(|in_force| in_force.version == version.version)
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let cluster = options.set.connect().await?;
    let history = options.set.history(&cluster).await?;
    writeln!(output, "{:<10}  {:<20}  {:<8}  FILES", "VERSION", "IN FORCE SINCE", "")?;
    for (at, version) in history.versions.iter().enumerate() {
        let mark = if history.is_in_force(version) { "in force" } else { "" };
        let since = version.since.map(|since| since.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()).unwrap_or_default();
        let before = history.versions.get(at + 1);
        let files = before.map_or_else(
            || version.files().keys().cloned().collect::<Vec<_>>().join(", "),
            |before| changes(&before.layers, &version.layers),
        );
        let files = if files.is_empty() { "none: the built-in templates".into() } else { files };
        writeln!(output, "{:<10}  {since:<20}  {mark:<8}  {files}", version.version)?;
    }
    Ok(Exit::Success)
}

/// The files that differ: `+` for new ones, `-` for those that are gone, `~` for changed ones. Those of the base have a folder before them.
pub(super) fn changes(old: &Layers, new: &Layers) -> String {
    let named = |layers: &Layers| layers.named.as_ref().map(|(_, files)| files.clone());
    let base = if new.named.is_some() { "base/" } else { "" };
    let mut changes = of_files(base, &old.base, &new.base);
    if let Some(new) = named(new) {
        changes.extend(of_files("", &named(old).unwrap_or_default(), &new));
    }
    if changes.is_empty() { "the same files".into() } else { changes.join(", ") }
}

fn of_files(folder: &str, old: &Files, new: &Files) -> Vec<String> {
    let removed = old.keys().filter(|name| !new.contains_key(*name)).map(|name| format!("-{folder}{name}"));
    let of_new = new.iter().filter_map(|(name, text)| match old.get(name) {
        None => Some(format!("+{folder}{name}")),
        Some(before) => (before != text).then(|| format!("~{folder}{name}")),
    });
    of_new.chain(removed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_that_differ_are_named() {
        let files = |files: &[(&str, &str)]| -> Files {
            files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect()
        };
        let base = |of: &[(&str, &str)]| Layers { base: files(of), named: None };
        let (old, new) = (base(&[("a", "1"), ("b", "1"), ("c", "1")]), base(&[("a", "1"), ("b", "2"), ("d", "1")]));
        assert_eq!(changes(&old, &new), "~b, +d, -c");
        assert_eq!(changes(&old, &old), "the same files");
        let named =
            |layers: &Layers, of: &[(&str, &str)]| Layers { named: Some(("s".into(), files(of))), ..layers.clone() };
        assert_eq!(changes(&named(&old, &[]), &named(&new, &[("a", "")])), "~base/b, +base/d, -base/c, +a");
    }
}
