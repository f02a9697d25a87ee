//! The web interface: people without kubectl see their VMs, and start and stop them, and sit in front of their screens.
//!
//! ```text
//!  VMs, pools ─▶ store ─┬─▶ pages (a VM as its viewer sees it)
//!                       └─▶ live (what changes, to the pages that are open)
//!  configuration ─▶ settings ─▶ rights ─▶ what a handler needs (signed_in) ─▶ act ─▶ a patch, an event
//! ```
//!
//! It is a process of its own, with its own account and its own watches: if it fails, VMs are reconciled as before. It keeps nothing: sessions are in
//! cookies, and everything else is in the cluster.
//!
//! # Guarantees
//! - Each path asks for what it needs in one place (`signed_in`). A VM on which a person has no right is answered as one that does not exist, and
//!   its name is sent to nobody else.
//! - Rights are computed anew for each request, and for each change that is sent to an open page.
//! - A page has no script and no style of its own, and the browser is told to accept none.

mod act;
mod app;
mod attempts;
mod audit;
mod client;
mod connection;
mod console;
mod create;
mod detail;
mod devices;
mod figures;
mod happenings;
mod held;
mod id_token;
mod keys;
mod language;
mod list;
mod live;
mod objects;
mod open_users;
mod openid;
mod pages;
mod palette;
mod passwords;
mod pictures;
mod pools;
mod provider;
mod relayed;
mod resize;
mod retention;
mod revocation;
mod revoked;
mod rights;
mod rows;
mod server;
mod session;
mod settings;
mod sign_in;
mod sign_in_oidc;
mod signed_in;
mod site;
mod store;
mod sums;
mod template_sets;
mod tls;
mod watched;
mod web_client;
mod why;

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use k8s_openapi::jiff::Timestamp;
use kube::{Api, Client};
use tokio::{sync::watch, time::timeout};
use tokio_rustls::rustls::ServerConfig;
use tracing::{error, info, warn};

/// What the subcommand `render-objects` of the program does, which the program starts itself.
pub use self::objects::serve as render_objects;
use self::{
    app::{App, Parts},
    audit::Audit,
    keys::Keys,
    openid::OpenId,
    pages::Pages,
    passwords::Passwords,
    pictures::Pictures,
    revocation::Revocations,
    session::Sessions,
    settings::Settings,
    store::Store,
    sums::{History, Sum},
    watched::Watched,
};
use crate::{
    config::{Config, Scope},
    process::{connections::Limits, name_client, network::Network, signals},
};

/// How long the events of what people did may take to be written, when the program ends.
const LAST_EVENTS: Duration = Duration::from_secs(2);
/// How often what is not needed any more is forgotten.
const FORGET: Duration = Duration::from_mins(1);

/// What the program is told on its command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// The manager's configuration file; without one, the defaults.
    pub config: Option<PathBuf>,
    /// The namespaces whose VMs are shown. They take precedence over those in the file, and these over the one of the service account.
    pub scope: Option<Scope>,
    /// Where it listens; without an address, where the configuration says.
    pub listen: Option<SocketAddr>,
    /// A file with the secrets from which the keys of cookies are made, a line each; without one, a new key each time.
    pub session_key: Option<PathBuf>,
    /// The Secret of the program's own namespace that has the sessions which have ended before their time.
    pub sessions_secret: String,
    /// The files with the certificate and its key, if the program itself speaks HTTPS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The origins of the site, if a proxy changes the `Host` of requests.
    pub origins: Vec<String>,
    /// The addresses of proxies that say from whom a request comes, beside those in the configuration.
    pub proxies: Vec<Network>,
    /// Where it answers the kubelet's probes alone. `None`: only where it listens for everybody.
    pub probes: Option<SocketAddr>,
}

/// Runs the web interface until it is told to end (SIGTERM, SIGINT).
///
/// # Errors
/// If the configuration or the key can't be used, no API server is configured, or the address can't be listened on.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let ending = signals::termination().context("wait for signals")?;
    let file = options.config.as_deref();
    let (loaded, config_file) = Watched::load(file.as_slice(), || load(file));
    let (settings, config) = loaded?;
    settings.warnings.iter().for_each(|warning| warn!("{warning}"));
    let file = options.session_key.as_deref();
    let (keys, key_file) = Watched::load(file.as_slice(), || keys(file));
    let keys = keys?;
    let tls = options.tls.as_ref().map(|(certificate, key)| {
        let (loaded, files) = Watched::load(&[certificate, key], || tls::load(certificate, key));
        loaded.map(|config| (config, files))
    });
    let tls = tls.transpose()?;
    let mut kubeconfig = kube::Config::infer().await.context("no API server: set KUBECONFIG, or run in a cluster")?;
    name_client(&mut kubeconfig, "vm-operator-web");
    let own_namespace = kubeconfig.default_namespace.clone();
    let scope = options.scope.or(config.namespace).unwrap_or_else(|| Scope::of(vec![own_namespace.clone()]));
    let client = Client::try_from(kubeconfig).context("make a client for the API server")?;

    let (address, most) = (options.listen.unwrap_or_else(|| settings.address()), settings.most_connections());
    let store = Store::follow(&client, &scope.watched());
    let (changed, settings) = watch::channel(Arc::new(settings));
    if let Some(file) = options.config {
        tokio::spawn(follow(file, config_file, changed, store.clone()));
    }
    let (changed, keys) = watch::channel(Arc::new(keys));
    if let Some(file) = options.session_key {
        tokio::spawn(follow_keys(file, key_file, changed));
    }
    let is_https = tls.is_some();
    let tls = options.tls.zip(tls).map(|((certificate, key), (config, files))| {
        let (changed, tls) = watch::channel(config);
        tokio::spawn(follow_certificate(certificate, key, files, changed));
        tls
    });
    tokio::spawn(open_users::check(client.clone(), own_namespace.clone()));
    let sessions = Sessions::default();
    let revocations = Revocations::new(Api::namespaced(client.clone(), &own_namespace), options.sessions_secret);
    let are_sessions_known = revocations.follow(sessions.clone());
    let mut epoch = [0; 4];
    getrandom::fill(&mut epoch).context("random numbers")?;
    let app = App::new(Parts {
        settings,
        audit: Audit::new(client.clone(), std::env::var("HOSTNAME").ok()),
        client,
        store,
        sessions,
        are_sessions_known,
        keys,
        passwords: Passwords::new(),
        openid: OpenId::default(),
        is_https,
        namespaces: scope.watched(),
        own_namespace,
        pages: Pages::new().context("the built-in templates")?,
        pictures: Pictures::default(),
        history: History::default(),
        epoch: u32::from_be_bytes(epoch),
        origins: options.origins.clone(),
        proxies: options.proxies,
        ending: ending.clone(),
    });
    tokio::spawn(forget(app.clone()));
    tokio::spawn(note(app.clone()));
    if let Some(address) = options.probes {
        let probes = server::probe(app.clone(), address).await.with_context(|| format!("listen on {address}"))?;
        info!(%probes, "the web interface answers probes");
    }
    let routes = server::routes(app.clone(), &options.origins)?;
    let listener = server::listen(address).await.with_context(|| format!("listen on {address}"))?;
    let address = listener.local_addr().context("the address that was taken")?;
    info!(%address, https = is_https, namespaces = %scope, "the web interface listens");
    server::serve(listener, tls, routes, Limits::of(most), &app, ending).await;
    if timeout(LAST_EVENTS, app.audit.flush()).await.is_err() {
        warn!("the last events of what people did were not written");
    }
    Ok(())
}

/// Ends all sessions that a user has begun until now, at all replicas: by the Secret of that name, in the namespace of the web interface (by default the one
/// of the service account or kubeconfig).
///
/// # Errors
/// If no API server is configured, or it refuses the change.
pub async fn revoke(user: &str, namespace: Option<&str>, secret: String) -> anyhow::Result<()> {
    let mut kubeconfig = kube::Config::infer().await.context("no API server: set KUBECONFIG, or run in a cluster")?;
    name_client(&mut kubeconfig, "vm-operator-web");
    let namespace = namespace.unwrap_or(&kubeconfig.default_namespace).to_owned();
    let client = Client::try_from(kubeconfig).context("make a client for the API server")?;
    let revocations = Revocations::new(Api::namespaced(client, &namespace), secret.clone());
    revocations.end_user(user).await.with_context(|| format!("Secret {namespace}/{secret}"))
}

/// Reads the configuration. A file that does not exist means the defaults: the ConfigMap that it comes from is optional.
fn load(file: Option<&Path>) -> anyhow::Result<(Settings, Config)> {
    let Some(file) = file else { return Ok((Settings::default(), Config::default())) };
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(error).with_context(|| file.display().to_string()),
    };
    let settings = Settings::parse(&text).with_context(|| file.display().to_string())?;
    let config = Config::parse(&text).with_context(|| file.display().to_string())?;
    Ok((settings, config))
}

/// The keys of cookies.
fn keys(file: Option<&Path>) -> anyhow::Result<Keys> {
    let Some(file) = file else {
        warn!("no --session-key: the sessions of people end with this process, and other replicas don't know them");
        return Ok(Keys::generate());
    };
    let content = fs::read(file).with_context(|| file.display().to_string())?;
    Keys::parse(&content).with_context(|| file.display().to_string())
}

/// Reads the configuration again when it changes. Where the program listens and which namespaces it shows are as they were at its start.
async fn follow(file: PathBuf, watched: Watched, changed: watch::Sender<Arc<Settings>>, store: Arc<Store>) {
    let read = || match load(Some(&file)) {
        Ok((settings, _)) => {
            info!(file = %file.display(), "the configuration of the web interface has changed");
            changed.send_replace(Arc::new(settings));
            store.rights_have_changed();
        }
        Err(error) => error!(
            error = format!("{error:#}"),
            "the configuration can't be used by the web interface; the last good one stays in force"
        ),
    };
    watched.on_change(read).await;
}

/// Reads the keys of cookies again when their file changes.
async fn follow_keys(file: PathBuf, watched: Watched, changed: watch::Sender<Arc<Keys>>) {
    let read = || match keys(Some(&file)) {
        Ok(keys) => {
            info!(file = %file.display(), "the session keys have changed");
            changed.send_replace(Arc::new(keys));
        }
        Err(error) => {
            error!(error = format!("{error:#}"), "the session keys can't be used; the last good ones stay in force")
        }
    };
    watched.on_change(read).await;
}

/// Reads the certificate and its key again when their files change.
async fn follow_certificate(
    certificate: PathBuf,
    key: PathBuf,
    watched: Watched,
    changed: watch::Sender<Arc<ServerConfig>>,
) {
    let read = || match tls::load(&certificate, &key) {
        Ok(config) => {
            info!(file = %certificate.display(), "the certificate has changed");
            changed.send_replace(config);
        }
        Err(error) => {
            error!(error = format!("{error:#}"), "the certificate can't be used; the last good one stays in force")
        }
    };
    watched.on_change(read).await;
}

/// Notes from time to time what all VMs have.
async fn note(app: App) {
    loop {
        tokio::time::sleep(sums::NOTED_EVERY).await;
        app.history.note(Timestamp::now(), Sum::of(app.store.vms().iter().map(|vm| &**vm)));
    }
}

/// Forgets what is not needed any more.
async fn forget(app: App) {
    loop {
        tokio::time::sleep(FORGET).await;
        app.sessions.forget(Timestamp::now());
        app.passwords.forget();
    }
}
