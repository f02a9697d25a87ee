//! Which template sets are in force, kept in the cluster.
//!
//! ```text
//!  checked with every VM ─▶ in force ─▶ ConfigMap of the set ─▶ the next manager starts with it, and checks what is newer
//! ```
//!
//! Without that, a restart or a change of leaders would put a set in force that was refused, because no VM is known yet with which it
//! could be checked. Each set has a ConfigMap in the manager's namespace with the label [`LABEL`]. Its content is the set's files, so the
//! set is the same if the folder or the ConfigMap from which it came has changed since.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ListParams, Patch, PatchParams},
};
use serde_json::json;
use tracing::{info, warn};

use crate::{
    object::MANAGED_BY,
    ownership::OBJECT_MANAGER,
    process::ErrorChain,
    render::{TemplateSet, templates::Layers},
};

/// The label of the ConfigMaps. Its value is the set's name, and empty for the set of the VMs that name none.
const LABEL: &str = "vmoperator.jdrupes.org/templates-in-force";
/// The annotation with the version of the set.
const VERSION: &str = "vmoperator.jdrupes.org/version";
/// The key with [`Layers`] as JSON.
const KEY: &str = "layers.json";

/// The files of the sets in force, by the set's name.
pub type Kept = BTreeMap<Option<String>, Layers>;

/// The ConfigMaps.
pub struct Store {
    api: Api<ConfigMap>,
    kept: Kept,
}

impl Store {
    /// Reads the sets that were in force last. If they can't be read, none were.
    pub async fn read(client: &Client, namespace: &str) -> Self {
        let api: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let kept = match api.list(&ListParams::default().labels(LABEL)).await {
            Ok(maps) => maps.into_iter().filter_map(read).collect(),
            Err(error) => {
                warn!(label = LABEL, error = %ErrorChain(&error), "the templates that were in force last can't be read");
                Kept::new()
            }
        };
        Self { api, kept }
    }

    /// The sets that were in force last.
    pub fn kept(&self) -> &Kept {
        &self.kept
    }

    /// Keeps a set that is in force now. Built-in templates without files over them need no ConfigMap.
    pub async fn keep(&mut self, set: Option<&str>, templates: &TemplateSet) {
        let (name, layers) = (set.map(str::to_owned), templates.layers());
        if self.kept.get(&name) == Some(layers) || (*layers == Layers::default() && !self.kept.contains_key(&name)) {
            return;
        }
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {
                "name": map_name(set),
                "labels": { LABEL: set.unwrap_or_default(), "app.kubernetes.io/managed-by": MANAGED_BY },
                "annotations": { VERSION: templates.version() },
            },
            // A map of strings is written as JSON without an error.
            "data": { KEY: serde_json::to_string(layers).unwrap_or_default() },
        });
        let how = PatchParams::apply(OBJECT_MANAGER).force();
        match self.api.patch(&map_name(set), &how, &Patch::Apply(&map)).await {
            Ok(_) => {
                info!(set = set.unwrap_or("(all)"), version = templates.version(), "kept the templates in force");
                self.kept.insert(name, layers.clone());
            }
            Err(error) => warn!(
                set = set.unwrap_or("(all)"), error = %ErrorChain(&error),
                "the templates in force can't be kept; the next manager does not know them"
            ),
        }
    }

    /// Forgets a set that does not exist any more.
    pub async fn forget(&mut self, set: &str) {
        let name = Some(set.to_owned());
        if !self.kept.contains_key(&name) {
            return;
        }
        match self.api.delete(&map_name(Some(set)), &DeleteParams::default()).await {
            Ok(_) => drop(self.kept.remove(&name)),
            Err(error) => warn!(set, error = %ErrorChain(&error), "a former template set can't be removed"),
        }
    }
}

fn map_name(set: Option<&str>) -> String {
    set.map_or_else(|| "vm-operator-in-force".to_owned(), |set| format!("vm-operator-in-force-{}", set.to_lowercase()))
}

/// What another program wrote is ignored.
fn read(map: ConfigMap) -> Option<(Option<String>, Layers)> {
    let set = map.labels().get(LABEL).filter(|set| !set.is_empty()).cloned();
    if map.name_any() != map_name(set.as_deref()) {
        return None;
    }
    let layers: Layers = serde_json::from_str(map.data.as_ref()?.get(KEY)?).ok()?;
    let is_of_set = layers.named.as_ref().map(|(name, _)| name) == set.as_ref();
    is_of_set.then_some((set, layers))
}
