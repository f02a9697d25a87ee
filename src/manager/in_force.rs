//! Which template sets are in force, kept in the cluster.
//!
//! ```text
//!  checked with every VM ─▶ in force ─▶ ConfigMap of the set ─▶ the next manager starts with it, and checks what is newer
//! ```
//!
//! Without that, a restart or a change of leaders would put a set in force that was refused, because no VM is known yet with which it
//! could be checked. Each set has a ConfigMap in the manager's namespace with the label [`LABEL`]. Its content is the set's files, so the
//! set is the same if the folder or the ConfigMap from which it came has changed since. A former version of a set that a VM keeps has a
//! ConfigMap too. So has the configuration in force.

use std::{collections::BTreeMap, time::Duration};

use backon::{ExponentialBuilder, Retryable};
use k8s_openapi::{ByteString, api::core::v1::ConfigMap, jiff::Timestamp};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, PartialObjectMeta, Patch, PatchParams},
};
use serde_json::json;
use tracing::{info, warn};

use crate::{
    cluster::is_transient,
    config::ReconcilerConfig,
    object::{CONFIG_IN_FORCE_MAP, LARGEST_CONFIG_MAP, MANAGED_BY},
    ownership::OBJECT_MANAGER,
    process::{ErrorChain, clock},
    render::{
        TemplateError, TemplateSet,
        kept::{self, FORMER, HISTORY, HISTORY_LENGTH, KEY, LABEL, SINCE, VERSION},
        templates::Layers,
    },
};

/// The longest pause between two attempts to read what was in force.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

/// The name of a set, and its version if it is a former one.
pub type Name = (Option<String>, Option<String>);

/// The ConfigMaps.
pub struct Store {
    api: Api<ConfigMap>,
    kept: BTreeMap<Name, Layers>,
    /// What could not be kept, and must be tried again.
    failed: BTreeMap<Name, TemplateSet>,
    config: Option<ReconcilerConfig>,
    /// The configuration that could not be kept.
    failed_config: Option<ReconcilerConfig>,
}

/// The key with the configuration.
const CONFIG_KEY: &str = "reconciler.json";

impl Store {
    /// Reads the sets that were in force last. Without them a refused set would come in force, so this waits until they can be read. Only
    /// a manager that has no right to read them starts without.
    pub async fn read(client: &Client, namespace: &str) -> Self {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let labelled = ListParams::default().labels(LABEL);
        let list = || api.list(&labelled);
        let is_forbidden = |error: &kube::Error| matches!(error, kube::Error::Api(status) if status.code == 403);
        let read_all = list.retry(ExponentialBuilder::new().with_max_delay(LONGEST_PAUSE).without_max_times());
        let read_all = read_all.when(|error| !is_forbidden(error)).notify(|error, pause| {
            warn!(
                label = LABEL, error = %ErrorChain(error), again_in = ?pause,
                "the templates that were in force last can't be read"
            );
        });
        let maps = match read_all.await {
            Ok(maps) => maps.items,
            Err(error) => {
                warn!(label = LABEL, error = %ErrorChain(&error), "the manager may not read the templates that were in force last");
                Vec::new()
            }
        };
        let config = maps.iter().find(|map| map.name_any() == CONFIG_IN_FORCE_MAP);
        // That of another version of the manager may not be readable.
        let config = config.and_then(|map| serde_json::from_str(map.data.as_ref()?.get(CONFIG_KEY)?).ok());
        let kept = maps.into_iter().filter_map(self::read).collect();
        Self { api, kept, failed: BTreeMap::new(), config, failed_config: None }
    }

    /// The configuration that was in force last.
    pub fn config(&self) -> Option<&ReconcilerConfig> {
        self.config.as_ref()
    }

    /// Keeps the configuration that is in force now.
    pub async fn keep_config(&mut self, config: &ReconcilerConfig) {
        self.failed_config = None;
        if self.config.as_ref() == Some(config) {
            return;
        }
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                // The label by which all that is in force is read. No set has this name.
                "name": CONFIG_IN_FORCE_MAP, "labels": { LABEL: "", "app.kubernetes.io/managed-by": MANAGED_BY },
            },
            "data": { CONFIG_KEY: json!(config).to_string() },
        });
        let how = PatchParams::apply(OBJECT_MANAGER).force();
        match self.api.patch(CONFIG_IN_FORCE_MAP, &how, &Patch::Apply(&map)).await {
            Ok(_) => self.config = Some(config.clone()),
            Err(error) => {
                warn!(
                    error = %ErrorChain(&error),
                    "the configuration in force can't be kept; it is tried again, and a manager that starts before does not know it"
                );
                self.failed_config = Some(config.clone());
            }
        }
    }

    /// The sets that were in force last, and the former versions that VMs keep.
    pub fn kept(&self) -> &BTreeMap<Name, Layers> {
        &self.kept
    }

    /// Whether something could not be kept.
    pub fn has_failed(&self) -> bool {
        !self.failed.is_empty() || self.failed_config.is_some()
    }

    /// Tries again to keep what could not be kept.
    pub async fn keep_failed(&mut self) {
        if let Some(config) = self.failed_config.take() {
            self.keep_config(&config).await;
        }
        for ((set, former), templates) in std::mem::take(&mut self.failed) {
            self.keep(set.as_deref(), former.as_deref(), &templates).await;
        }
    }

    /// Keeps a set that is in force now, or a former version. Built-in templates without files over them are kept too: if nothing were, the
    /// next manager would take a set that was refused for the first one.
    pub async fn keep(&mut self, set: Option<&str>, former: Option<&str>, templates: &TemplateSet) {
        let (name, layers) = ((set.map(str::to_owned), former.map(str::to_owned)), templates.layers());
        self.failed.remove(&name);
        if self.kept.get(&name) == Some(layers) {
            return;
        }
        let mut labels =
            BTreeMap::from([(LABEL, set.unwrap_or_default()), ("app.kubernetes.io/managed-by", MANAGED_BY)]);
        labels.extend(former.map(|version| (FORMER, version)));
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": map_name(&name), "labels": labels, "annotations": { VERSION: templates.version() },
            },
            "binaryData": { KEY: ByteString(layers.packed()) },
        });
        let how = PatchParams::apply(OBJECT_MANAGER).force();
        // First the history: a set that is kept is not looked at again, so a manager that ends between the two would leave it out of its history.
        if former.is_none()
            && let Err(error) = self.remember(set, templates).await
        {
            let again = is_transient(&error);
            warn!(
                set = set.unwrap_or("(all)"), again, error = %ErrorChain(&error),
                "the history of the templates lacks a version, because it can't be written"
            );
            if again {
                self.failed.insert(name, templates.clone());
                return;
            }
        }
        match self.api.patch(&map_name(&name), &how, &Patch::Apply(&map)).await {
            Ok(_) => {
                info!(set = set.unwrap_or("(all)"), version = templates.version(), "kept the templates in force");
                self.kept.insert(name, layers.clone());
            }
            Err(error) => {
                warn!(
                    set = set.unwrap_or("(all)"), error = %ErrorChain(&error),
                    "the templates in force can't be kept; it is tried again, and a manager that starts before does not know them"
                );
                self.failed.insert(name, templates.clone());
            }
        }
    }

    /// Adds the version that is in force now to the set's history, and removes the oldest ones. The manager itself never reads them.
    async fn remember(&self, set: Option<&str>, templates: &TemplateSet) -> kube::Result<()> {
        let name = kept::history_name(set, templates.version());
        let label = set.unwrap_or_default();
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": name,
                "labels": { HISTORY: label, "app.kubernetes.io/managed-by": MANAGED_BY },
                "annotations": { VERSION: templates.version(), SINCE: clock::now().to_string() },
            },
            "binaryData": { KEY: ByteString(templates.layers().packed()) },
        });
        self.api.patch(&name, &PatchParams::apply(OBJECT_MANAGER).force(), &Patch::Apply(&map)).await?;
        let history = self.api.list_metadata(&ListParams::default().labels(&format!("{HISTORY}={label}"))).await?;
        let since = |map: &PartialObjectMeta<ConfigMap>| {
            map.annotations().get(SINCE).and_then(|time| time.parse::<Timestamp>().ok())
        };
        let mut maps = history.items;
        maps.sort_by_key(|map| std::cmp::Reverse(since(map)));
        for old in maps.iter().skip(HISTORY_LENGTH) {
            self.api.delete(&old.name_any(), &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// Removes the history of a set that does not exist any more.
    async fn forget(&self, set: Option<&str>) -> kube::Result<()> {
        let history = ListParams::default().labels(&format!("{HISTORY}={}", set.unwrap_or_default()));
        for map in self.api.list_metadata(&history).await? {
            self.api.delete(&map.name_any(), &DeleteParams::default()).await?;
        }
        Ok(())
    }

    /// Forgets the sets that do not exist any more, and the former versions that no VM keeps.
    pub async fn retain(&mut self, is_needed: impl Fn(&Name) -> bool) {
        let gone: Vec<Name> = self.kept.keys().filter(|name| !is_needed(name)).cloned().collect();
        for name in gone {
            match self.api.delete(&map_name(&name), &DeleteParams::default()).await {
                Ok(_) => {
                    self.kept.remove(&name);
                    let forgotten = if name.1.is_none() { self.forget(name.0.as_deref()).await } else { Ok(()) };
                    if let Err(error) = forgotten {
                        let set = name.0.as_deref().unwrap_or("(all)");
                        warn!(set, error = %ErrorChain(&error), "the history of a former template set can't be removed");
                    }
                }
                Err(error) => {
                    let set = name.0.as_deref().unwrap_or("(all)");
                    warn!(set, error = %ErrorChain(&error), "a former template set can't be removed");
                }
            }
        }
    }
}

/// Why a set can't be kept, and is therefore not used: the next manager would not know it.
pub fn too_large(templates: &TemplateSet) -> Option<TemplateError> {
    let layers = templates.layers();
    let files = layers.base.iter().chain(layers.named.iter().flat_map(|(_, files)| files));
    // What is so small needs no compression to fit.
    let size: usize = files.map(|(name, text)| name.len() + text.len()).sum();
    if size < LARGEST_CONFIG_MAP / 8 {
        return None;
    }
    let packed = layers.packed().len();
    let message = format!(
        "the files of the set have {size} bytes, {packed} when they are compressed; a ConfigMap, in which the manager keeps what is in \
         use, can have {LARGEST_CONFIG_MAP}: move large files, such as user data, to Secrets or ConfigMaps of their own"
    );
    (packed > LARGEST_CONFIG_MAP).then(|| TemplateError::refused("(set)", message))
}

fn map_name((set, former): &Name) -> String {
    kept::in_force_name(set.as_deref(), former.as_deref())
}

/// What another program wrote is ignored.
fn read(map: ConfigMap) -> Option<(Name, Layers)> {
    let label = |label: &str| map.labels().get(label).filter(|value| !value.is_empty()).cloned();
    let name = (label(LABEL), label(FORMER));
    if map.name_any() != map_name(&name) {
        return None;
    }
    let layers = Layers::kept_in(&map)?;
    let is_of_set = layers.named.as_ref().map(|(set, _)| set) == name.0.as_ref();
    is_of_set.then_some((name, layers))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str) -> TemplateSet {
        let files = [("lib/x.j2".to_owned(), text.to_owned())].into();
        TemplateSet::layered(&files, Some(("Desktop", &files))).unwrap()
    }

    #[test]
    fn what_is_kept_is_read_again() {
        let set = set("some text");
        for former in [None, Some("12345678".to_owned())] {
            let name = (Some("Desktop".to_owned()), former.clone());
            let mut labels = BTreeMap::from([(LABEL.to_owned(), "Desktop".to_owned())]);
            labels.extend(former.map(|version| (FORMER.to_owned(), version)));
            let mut map = ConfigMap::default();
            map.metadata.name = Some(map_name(&name));
            map.metadata.labels = Some(labels);
            map.binary_data = Some([(KEY.to_owned(), ByteString(set.layers().packed()))].into());
            assert_eq!(read(map.clone()), Some((name, set.layers().clone())));
            map.metadata.name = Some("another".into());
            assert_eq!(read(map), None);
        }
    }

    #[test]
    fn a_set_that_does_not_fit_a_config_map_is_refused_with_its_size() {
        assert_eq!(too_large(&set("x")), None);
        assert_eq!(too_large(&set(&"a line that is repeated\n".repeat(100_000))), None);
        let random: String =
            (0..60_000_u32).map(|number| crate::render::output::digest(&number.to_string()) + "\n").collect();
        let error = too_large(&set(&random)).unwrap().to_string();
        assert!(error.contains(&format!("the files of the set have {} bytes", 2 * (random.len() + 8))), "{error}");
    }
}
