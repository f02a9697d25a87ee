//! How commands connect to a cluster.

use std::{
    ffi::{OsStr, OsString},
    path::PathBuf,
    time::Duration,
};

use clap::{Args, Parser};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use k8s_openapi::api::core::v1::Namespace;
use kube::{
    Api, Client, Resource, ResourceExt,
    api::ListParams,
    config::{InferConfigError, KubeConfigOptions, Kubeconfig, KubeconfigError},
};

use crate::process::shell::shell_word;

/// Which cluster a command asks, and in which namespace.
#[derive(Args, Clone, Default)]
pub(super) struct ClusterOptions {
    /// The namespace. Default: that of the kubeconfig's context.
    #[arg(long, short, value_name = "NS", add = ArgValueCompleter::new(namespaces))]
    pub namespace: Option<String>,
    /// The context of the kubeconfig. Default: its current context.
    #[arg(long, value_name = "NAME", add = ArgValueCompleter::new(contexts))]
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

    /// The options by which a command that is printed asks the same cluster and namespace, for a shell.
    pub fn for_shell(&self) -> String {
        let mut kubectl = std::process::Command::new("kubectl");
        if let Some(namespace) = &self.namespace {
            kubectl.arg("-n").arg(namespace);
        }
        self.pass_on(&mut kubectl);
        kubectl.get_args().map(|word| format!(" {}", shell_word(&word.to_string_lossy()))).collect()
    }

    /// The same cluster for a command that runs later and in another folder: the current context gets its name, each file its folder.
    ///
    /// The second value is what `KUBECONFIG` must be, if `kubeconfigs` (its present value) names several files.
    pub fn pinned(&self, kubeconfigs: Option<&OsStr>) -> (Self, Option<OsString>) {
        let absolute = |file: PathBuf| std::path::absolute(&file).unwrap_or(file);
        let given = self.kubeconfig.clone().map(|file| vec![file]);
        let named = || std::env::split_paths(kubeconfigs.unwrap_or_default()).collect::<Vec<_>>();
        let mut files = given.unwrap_or_else(named);
        files.retain(|file| !file.as_os_str().is_empty());
        let files: Vec<_> = files.into_iter().map(absolute).collect();
        let (kubeconfig, several) = match &files[..] {
            [] => (None, None),
            [file] => (Some(file.clone()), None),
            several => (None, std::env::join_paths(several).ok()),
        };
        let read = || match &kubeconfig {
            Some(file) => Kubeconfig::read_from(file),
            None => Kubeconfig::read(),
        };
        let pinned = Self {
            namespace: self.namespace.clone(),
            context: self.context.clone().or_else(|| read().ok()?.current_context),
            kubeconfig,
            impersonate: self.impersonate.clone(),
            impersonate_groups: self.impersonate_groups.clone(),
        };
        (pinned, several)
    }

    /// Makes a client. Nothing is asked of the API server yet.
    pub async fn connect(&self) -> Result<Cluster, ConnectError> {
        let mut config = self.config().await?;
        crate::process::name_client(&mut config, "kubectl-vm");
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

/// How long somebody waits who has pressed TAB, and the most names.
const PATIENCE: Duration = Duration::from_secs(1);
const MOST: u32 = 500;

/// What a command line says of the cluster, however incomplete it is.
#[derive(Parser)]
struct Typed {
    #[command(flatten)]
    cluster: ClusterOptions,
}

/// The options for the cluster among the words of this program's command line.
pub(super) fn typed() -> ClusterOptions {
    options_among(std::env::args_os().skip(1).filter_map(|word| word.into_string().ok()))
}

fn options_among(mut words: impl Iterator<Item = String>) -> ClusterOptions {
    const WITH_VALUE: [&str; 6] = ["-n", "--namespace", "--context", "--kubeconfig", "--as", "--as-group"];
    let mut found = vec!["kubectl-vm".to_owned()];
    while let Some(word) = words.next() {
        let (name, value) = word.split_once('=').map_or((word.as_str(), None), |(name, value)| (name, Some(value)));
        if !WITH_VALUE.contains(&name) {
            continue;
        }
        let value = value.map(str::to_owned).or_else(|| words.next());
        if let Some(value) = value.filter(|value| !value.is_empty()) {
            found.push(format!("{}={value}", if name == "-n" { "--namespace" } else { name }));
        }
    }
    Typed::try_parse_from(found).map(|typed| typed.cluster).unwrap_or_default()
}

/// The names of namespaces.
fn namespaces(current: &OsStr) -> Vec<CompletionCandidate> {
    let options = ClusterOptions { namespace: None, ..typed() };
    ask(current, || async move { names(Api::<Namespace>::all(options.connect().await.ok()?.client)).await })
}

/// The contexts of the kubeconfig.
fn contexts(current: &OsStr) -> Vec<CompletionCandidate> {
    let kubeconfig = match typed().kubeconfig {
        Some(file) => Kubeconfig::read_from(file),
        None => Kubeconfig::read(),
    };
    let contexts = kubeconfig.map(|kubeconfig| kubeconfig.contexts).unwrap_or_default();
    matching(current, contexts.into_iter().map(|context| context.name))
}

pub(super) async fn names<K>(api: Api<K>) -> Option<Vec<String>>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned + Resource,
{
    let list = api.list_metadata(&ListParams::default().limit(MOST)).await.ok()?;
    Some(list.items.iter().map(ResourceExt::name_any).collect())
}

/// The names that a question of the API server brings in time.
pub(super) fn ask<F>(current: &OsStr, question: impl FnOnce() -> F + Send + 'static) -> Vec<CompletionCandidate>
where
    F: Future<Output = Option<Vec<String>>>,
{
    let (sender, receiver) = std::sync::mpsc::channel();
    // A thread of its own: a program of the kubeconfig that brings credentials holds up whoever asks, whatever the clock says.
    std::thread::spawn(move || {
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        // Nobody waits any more if it is late.
        let _ = sender.send(runtime.block_on(question()));
    });
    let names = receiver.recv_timeout(PATIENCE).ok().flatten().unwrap_or_default();
    matching(current, names.into_iter())
}

fn matching(current: &OsStr, names: impl Iterator<Item = String>) -> Vec<CompletionCandidate> {
    let current = current.to_string_lossy();
    names.filter(|name| name.starts_with(&*current)).map(CompletionCandidate::new).collect()
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

    #[test]
    fn a_command_for_later_has_the_context_and_whole_paths() {
        let words = |options: &ClusterOptions| {
            let mut kubectl = std::process::Command::new("kubectl");
            options.pass_on(&mut kubectl);
            kubectl.get_args().map(|word| word.to_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        let (file, mut options) = options(KUBECONFIG, None);
        let path = file.path().to_str().unwrap();
        let (pinned, several) = options.pinned(Some(OsStr::new("/other:/more")));
        assert_eq!(
            (words(&pinned), several),
            (vec!["--context".into(), "a".into(), "--kubeconfig".into(), path.into()], None)
        );
        options.context = Some("b".into());
        assert_eq!(words(&options.pinned(None).0)[..2], ["--context", "b"]);

        let (options, here) = (ClusterOptions::default(), std::env::current_dir().unwrap());
        let (pinned, several) = options.pinned(Some(OsStr::new(path)));
        assert_eq!(
            (words(&pinned), several),
            (vec!["--context".into(), "a".into(), "--kubeconfig".into(), path.into()], None)
        );
        let (pinned, several) = options.pinned(Some(OsStr::new("/a::b")));
        assert_eq!((pinned.kubeconfig, several), (None, Some(format!("/a:{}/b", here.display()).into())));
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

    #[test]
    fn whoever_presses_tab_waits_a_second_at_most() {
        let begin = std::time::Instant::now();
        let names = |blocks: bool| {
            ask(OsStr::new("ap"), move || async move {
                if blocks {
                    std::thread::sleep(60 * PATIENCE);
                }
                Some(vec!["apple".to_owned(), "pear".to_owned()])
            })
        };
        let found: Vec<_> = names(false).iter().map(|name| name.get_value().to_owned()).collect();
        assert_eq!(found, ["apple"]);
        assert!(names(true).is_empty() && begin.elapsed() < 50 * PATIENCE);
    }

    #[test]
    fn the_cluster_is_the_one_that_was_typed() {
        let options = |line: &str| options_among(line.split(' ').map(str::to_owned)).namespace;
        assert_eq!(options("stop -n web app").as_deref(), Some("web"));
        assert_eq!(options("stop --namespace=web --force app").as_deref(), Some("web"));
        assert_eq!(options("stop app -n"), None);
        assert_eq!(options("stop -n  --all"), None, "nothing is typed yet");
    }
}
