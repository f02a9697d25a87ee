//! How commands connect to a cluster.

use std::path::PathBuf;

use clap::Args;
use kube::{
    Client,
    config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

/// Which cluster a command asks, and in which namespace.
#[derive(Args, Default)]
pub(super) struct ClusterOptions {
    /// The namespace. Default: that of the kubeconfig's context.
    #[arg(long, short, value_name = "NS")]
    pub namespace: Option<String>,
    /// The context of the kubeconfig. Default: its current context.
    #[arg(long, value_name = "NAME")]
    context: Option<String>,
    /// The kubeconfig. Default: $KUBECONFIG, or ~/.kube/config, or the service account of the Pod.
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Act as this user, which needs the right to impersonate.
    #[arg(long = "as", value_name = "USER")]
    impersonate: Option<String>,
    /// Act as a member of this group, together with --as. Can be given several times.
    #[arg(long = "as-group", value_name = "GROUP", requires = "impersonate")]
    impersonate_groups: Vec<String>,
}

/// A client, and the namespace in which a command works.
pub(super) struct Cluster {
    pub client: Client,
    pub namespace: String,
}

/// Why there is no cluster to ask.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectError {
    #[error("no cluster is configured")]
    NotConfigured(#[source] InferConfigError),
    #[error("the kubeconfig has no context {name:?}; it has {}", known.join(", "))]
    UnknownContext { name: String, known: Vec<String> },
    #[error("the kubeconfig{} can't be used", file.as_ref().map(|file| format!(" {}", file.display())).unwrap_or_default())]
    Kubeconfig { file: Option<PathBuf>, source: KubeconfigError },
    #[error("the settings for the API server can't be used")]
    Client(#[source] kube::Error),
}

impl ClusterOptions {
    /// Has kubectl ask the same cluster.
    pub fn pass_on(&self, kubectl: &mut std::process::Command) {
        if let Some(context) = &self.context {
            kubectl.arg("--context").arg(context);
        }
        if let Some(file) = &self.kubeconfig {
            kubectl.arg("--kubeconfig").arg(file);
        }
        if let Some(user) = &self.impersonate {
            kubectl.arg("--as").arg(user);
            kubectl.args(self.impersonate_groups.iter().flat_map(|group| ["--as-group", group]));
        }
    }

    /// Makes a client. Nothing is asked of the API server yet.
    pub async fn connect(&self) -> Result<Cluster, ConnectError> {
        let mut config = self.config().await?;
        if let Some(user) = &self.impersonate {
            config.auth_info.impersonate = Some(user.clone());
            config.auth_info.impersonate_groups =
                Some(self.impersonate_groups.clone()).filter(|groups| !groups.is_empty());
        }
        let namespace = self.namespace.as_ref().unwrap_or(&config.default_namespace).clone();
        let client = Client::try_from(config).map_err(ConnectError::Client)?;
        Ok(Cluster { client, namespace })
    }

    async fn config(&self) -> Result<kube::Config, ConnectError> {
        if self.kubeconfig.is_none() && self.context.is_none() {
            return kube::Config::infer().await.map_err(ConnectError::NotConfigured);
        }
        let unusable = |source| ConnectError::Kubeconfig { file: self.kubeconfig.clone(), source };
        let kubeconfig = match &self.kubeconfig {
            Some(file) => Kubeconfig::read_from(file),
            None => Kubeconfig::read(),
        }
        .map_err(unusable)?;
        if let Some(name) = &self.context {
            let known: Vec<String> = kubeconfig.contexts.iter().map(|context| context.name.clone()).collect();
            if !known.contains(name) {
                return Err(ConnectError::UnknownContext { name: name.clone(), known });
            }
        }
        let options = KubeConfigOptions { context: self.context.clone(), ..KubeConfigOptions::default() };
        kube::Config::from_custom_kubeconfig(kubeconfig, &options).await.map_err(unusable)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ErrorChain;

    fn options(kubeconfig: &str, context: Option<&str>) -> (tempfile::NamedTempFile, ClusterOptions) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), kubeconfig).unwrap();
        let context = context.map(str::to_owned);
        let options = ClusterOptions { context, kubeconfig: Some(file.path().to_owned()), ..ClusterOptions::default() };
        (file, options)
    }

    const KUBECONFIG: &str = "
clusters: [{name: here, cluster: {server: 'https://here.example.org'}}]
users: [{name: me, user: {}}]
contexts: [{name: a, context: {cluster: here, user: me, namespace: orchard}}, {name: b, context: {cluster: gone, user: me}}]
current-context: a
";

    #[tokio::test]
    async fn the_namespace_is_that_of_the_context() {
        let (_file, mut options) = options(KUBECONFIG, None);
        let config = options.config().await.unwrap();
        assert_eq!(
            (config.default_namespace.as_str(), config.cluster_url.host()),
            ("orchard", Some("here.example.org"))
        );
        assert_eq!(options.connect().await.unwrap().namespace, "orchard");
        options.namespace = Some("meadow".into());
        assert_eq!(options.connect().await.unwrap().namespace, "meadow");
    }

    #[tokio::test]
    async fn an_error_names_what_is_missing() {
        for (text, context, expected) in [
            (KUBECONFIG, Some("c"), "the kubeconfig has no context \"c\"; it has a, b"),
            (KUBECONFIG, Some("b"), "can't be used: failed to load the cluster of context: gone"),
            ("contexts: 1", None, "can't be used: failed to parse kubeconfig YAML: "),
        ] {
            let (_file, options) = options(text, context);
            let error = options.connect().await.err().unwrap();
            let error = ErrorChain(&error).to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
}
