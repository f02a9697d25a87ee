//! The manager's configuration: the file `config.yaml` of the ConfigMap `vm-operator`.
//!
//! The keys that begin with `/` are the paths of components, as in the files that existing users have. What this program
//! does not know is warned about, not refused: such files hold the keys of components that it does not have.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::api::ServiceMetadata;

/// What the manager is told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    /// The namespace to manage; in a cluster, the manager's own.
    pub namespace: Option<String>,
    /// How objects are made.
    pub reconciler: ReconcilerConfig,
    /// Keys that are not known, as paths.
    pub unknown: Vec<String>,
}

/// How objects are made: `/Manager`, `/Controller`, `/Reconciler`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ReconcilerConfig {
    /// The claim for each machine's own data.
    pub runner_data_pvc: RunnerDataPvc,
    /// Labels and annotations for every Service, or `false`: no Services.
    pub load_balancer_service: LoadBalancerService,
    /// CPUs of machines per CPU that is requested.
    pub cpu_overcommit: f64,
    /// Memory of machines per byte that is requested.
    pub ram_overcommit: f64,
    /// The runner's image of machines that do not name one. New.
    pub runner_image: Option<String>,
    /// When to pull it. New.
    pub runner_image_pull_policy: Option<String>,
}

impl Default for ReconcilerConfig {
    fn default() -> Self {
        Self {
            runner_data_pvc: RunnerDataPvc::default(),
            load_balancer_service: LoadBalancerService::default(),
            cpu_overcommit: 2.0,
            ram_overcommit: 1.25,
            runner_image: None,
            runner_image_pull_policy: None,
        }
    }
}

/// The claim for each machine's own data.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RunnerDataPvc {
    /// Its storage class; absent: the cluster's default.
    pub storage_class_name: Option<String>,
}

/// Services for displays.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(untagged)]
pub enum LoadBalancerService {
    /// `false`: none, whatever a machine says; `true`: as without the key.
    Enabled(bool),
    /// Labels and annotations for all.
    Metadata(ServiceMetadata),
}

impl Default for LoadBalancerService {
    fn default() -> Self {
        Self::Metadata(ServiceMetadata::default())
    }
}

/// A file that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// Not YAML; the source has line and column.
    #[error("the configuration is not YAML")]
    Syntax(#[source] serde_yaml::Error),
    /// A value of the wrong kind.
    #[error("{path} can't be used")]
    Value {
        /// The path of the key.
        path: String,
        /// What is wrong with it.
        source: serde_json::Error,
    },
}

const RECONCILER_KEYS: [&str; 6] =
    ["runnerDataPvc", "loadBalancerService", "cpuOvercommit", "ramOvercommit", "runnerImage", "runnerImagePullPolicy"];

impl Config {
    /// Reads the file.
    ///
    /// # Errors
    /// If it is not YAML or a known key has a value of the wrong kind.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let file: Option<Map<String, Value>> = serde_yaml::from_str(text).map_err(ConfigError::Syntax)?;
        for (path, section) in sections("", file.unwrap_or_default()) {
            match path.as_str() {
                "/Manager/Controller/Reconciler" => {
                    config.unknown.extend(
                        section
                            .keys()
                            .filter(|key| !RECONCILER_KEYS.contains(&key.as_str()))
                            .map(|key| format!("{path}: {key}")),
                    );
                    config.reconciler = serde_json::from_value(Value::Object(section))
                        .map_err(|source| ConfigError::Value { path, source })?;
                }
                _ => {
                    for (key, value) in section {
                        match (path.as_str(), key.as_str(), value) {
                            ("/Manager/Controller", "namespace", Value::String(namespace)) => {
                                config.namespace = Some(namespace)
                            }
                            _ => config.unknown.push(format!("{path}: {key}")),
                        }
                    }
                }
            }
        }
        Ok(config)
    }
}

/// The file's sections by their full path, without the sections inside them.
fn sections(path: &str, map: Map<String, Value>) -> Vec<(String, Map<String, Value>)> {
    let mut own = Map::new();
    let mut below = Vec::new();
    for (key, value) in map {
        match value {
            Value::Object(map) if key.starts_with('/') => below.extend(sections(&format!("{path}{key}"), map)),
            value => drop(own.insert(key, value)),
        }
    }
    below.insert(0, (path.to_owned(), own));
    below
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documented_file() {
        let config = Config::parse(
            "\"/Manager\":\n  \"/Controller\":\n    namespace: vmop-dev\n    \"/Reconciler\":\n      runnerDataPvc: { storageClassName: local-path }\n      \
             loadBalancerService: { labels: {a: b}, annotations: {} }\n      cpuOvercommit: 3\n  \"/GuiHttpServer\": { port: 8080 }\n",
        )
        .unwrap();
        assert_eq!(config.namespace.as_deref(), Some("vmop-dev"));
        assert_eq!(config.reconciler.runner_data_pvc.storage_class_name.as_deref(), Some("local-path"));
        assert_eq!((config.reconciler.cpu_overcommit, config.reconciler.ram_overcommit), (3.0, 1.25));
        assert_eq!(config.unknown, ["/Manager/GuiHttpServer: port"]);
    }

    #[test]
    fn no_services_at_all() {
        let config =
            Config::parse("/Manager:\n  /Controller:\n    /Reconciler:\n      loadBalancerService: false\n").unwrap();
        assert_eq!(config.reconciler.load_balancer_service, LoadBalancerService::Enabled(false));
    }

    #[test]
    fn an_empty_file_is_the_default() {
        assert_eq!(Config::parse("").unwrap(), Config::default());
        assert_eq!(Config::parse("# nothing\n").unwrap(), Config::default());
    }

    #[test]
    fn errors_name_the_place() {
        let error = Config::parse("/Manager:\n  a: [\n").unwrap_err();
        assert!(matches!(&error, ConfigError::Syntax(source) if source.location().is_some()), "{error:?}");
        let error =
            Config::parse("/Manager:\n  /Controller:\n    /Reconciler:\n      cpuOvercommit: many\n").unwrap_err();
        assert!(
            matches!(&error, ConfigError::Value { path, .. } if path == "/Manager/Controller/Reconciler"),
            "{error:?}"
        );
    }
}
