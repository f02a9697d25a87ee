//! The templates and the configuration in a cluster, by which its manager renders.

use std::{collections::BTreeMap, fmt::Display};

use clap::Args;
use k8s_openapi::api::core::v1::ConfigMap;
use kube::{Api, Client, ResourceExt, api::ListParams};

use super::{
    cluster::ClusterOptions,
    input::{DEFAULT_NAMESPACE, Settings},
    output::{Failure, chain, note},
};
use crate::{
    config::{Config, ReconcilerConfig},
    files,
    object::{CONFIG_MAP, SET_LABEL, TEMPLATES_MAP},
    process::ErrorChain,
    render::{Library, Sources},
};

/// Whether a command that needs no cluster asks one nevertheless.
#[derive(Args)]
pub(super) struct InstalledOptions {
    /// Ask the cluster for the templates and the configuration of its manager, where the command line gives none. Template sets in
    /// ConfigMaps with a label are known, too.
    #[arg(long)]
    pub installed: bool,
    #[command(flatten)]
    pub cluster: ClusterOptions,
    /// The manager's namespace, with its ConfigMaps. Default: the namespace.
    #[arg(long, value_name = "NS")]
    pub manager_namespace: Option<String>,
}

/// The templates and the configuration by which the manager renders.
pub(super) struct Installed {
    pub sources: Sources,
    pub config: ReconcilerConfig,
    /// The sets that are in several ConfigMaps, in words.
    pub twice: Vec<String>,
}

impl InstalledOptions {
    /// What the cluster has, if it is to be asked, and else what the command line gives. Also the namespace of VMs that name none.
    pub async fn read(&self, settings: &Settings) -> Result<(Installed, String), Failure> {
        if self.installed {
            let cluster =
                self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
            let home = self.manager_namespace.as_ref().unwrap_or(&cluster.namespace);
            return Ok((Installed::read(&cluster.client, home, settings).await?, cluster.namespace));
        }
        let sources = settings.templates.as_deref().map_or_else(|| Ok(Sources::default()), files::sources)?;
        let namespace = self.cluster.namespace.as_deref().unwrap_or(DEFAULT_NAMESPACE).to_owned();
        Ok((Installed { sources, config: settings.config()?, twice: Vec::new() }, namespace))
    }
}

impl Installed {
    /// What the command line gives, and the rest from the ConfigMaps in the manager's namespace. A folder stands for the templates for
    /// all VMs and for the named sets that it has.
    pub async fn read(client: &Client, namespace: &str, settings: &Settings) -> Result<Self, Failure> {
        let maps: Api<ConfigMap> = Api::namespaced(client.clone(), namespace);
        let mut twice = Vec::new();
        let sources = match &settings.templates {
            Some(folder) => with_labelled_sets(files::sources(folder)?, &maps).await?,
            None => installed_templates(&maps, &mut twice).await?,
        };
        let mut config = settings.config()?;
        if settings.config.is_none()
            && let Some(installed) = installed_config(&maps).await?
        {
            config = ReconcilerConfig { template_values: config.template_values, ..installed };
        }
        Ok(Self { sources, config, twice })
    }

    /// The compiled sets.
    pub fn library(&self) -> Library {
        Library::new(&self.sources)
    }
}

/// The sets of a folder, and those of the cluster that the folder does not have. A person who may not read ConfigMaps sees only the folder's.
async fn with_labelled_sets(mut sources: Sources, maps: &Api<ConfigMap>) -> Result<Sources, Failure> {
    match maps.list(&ListParams::default().labels(SET_LABEL)).await {
        Ok(labelled) => {
            let mut of_cluster = Sources::default();
            labelled.into_iter().for_each(|map| add(&mut of_cluster, map));
            for (name, files) in of_cluster.sets {
                sources.sets.entry(name).or_insert(files);
            }
            Ok(sources)
        }
        Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
            note("# you may not list ConfigMaps, so template sets that only the cluster has are not known");
            Ok(sources)
        }
        Err(error) => Err(unknown("template sets")(error)),
    }
}

/// The templates in the cluster. Of a set that is in several ConfigMaps, the files of the last one replace those of the others.
async fn installed_templates(maps: &Api<ConfigMap>, twice: &mut Vec<String>) -> Result<Sources, Failure> {
    let base = maps.get_opt(TEMPLATES_MAP).await.map_err(unknown(format_args!("ConfigMap {TEMPLATES_MAP}")))?;
    let mut sources = files::split_sets(files::unpacked(base.and_then(|map| map.data).unwrap_or_default()));
    let sets = maps.list(&ListParams::default().labels(SET_LABEL)).await.map_err(unknown("template sets"))?;
    let mut homes: BTreeMap<String, Vec<String>> =
        sources.sets.keys().map(|set| (set.clone(), vec![TEMPLATES_MAP.to_owned()])).collect();
    for map in sets {
        homes.entry(map.labels().get(SET_LABEL).cloned().unwrap_or_default()).or_default().push(map.name_any());
        add(&mut sources, map);
    }
    twice.extend(homes.iter().filter(|(_, maps)| maps.len() > 1).map(|(set, maps)| {
        let maps = maps.join(" and ");
        format!("the set {set} is defined twice: in the ConfigMaps {maps}; files of the last one replace those of the others")
    }));
    Ok(sources)
}

/// Adds the set of a ConfigMap.
fn add(sources: &mut Sources, map: ConfigMap) {
    let name = map.labels().get(SET_LABEL).cloned().unwrap_or_default();
    sources.sets.entry(name).or_default().extend(files::unpacked(map.data.unwrap_or_default()));
}

async fn installed_config(maps: &Api<ConfigMap>) -> Result<Option<ReconcilerConfig>, Failure> {
    let map = maps.get_opt(CONFIG_MAP).await.map_err(unknown(format_args!("ConfigMap {CONFIG_MAP}")))?;
    let text = map.and_then(|map| map.data?.remove("config.yaml"));
    let config = text.map(|text| Config::parse(&text)).transpose();
    let config = config.map_err(|error| Failure::new(format!("ConfigMap vm-operator: {error}")))?;
    Ok(config.map(|config| config.reconciler))
}

/// The API server did not answer what was asked about an object. That it does not exist is an answer.
pub(super) fn unknown(object: impl Display) -> impl FnOnce(kube::Error) -> Failure {
    move |error| {
        let line = chain(object, &error);
        match error {
            kube::Error::Api(answer) if answer.is_not_found() => Failure::new(line),
            _ => Failure::unknown(line),
        }
    }
}
