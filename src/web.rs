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
mod audit;
mod console;
mod detail;
mod language;
mod list;
mod live;
mod pages;
mod passwords;
mod pools;
mod resize;
mod retention;
mod rights;
mod rows;
mod server;
mod session;
mod settings;
mod sign_in;
mod signed_in;
mod store;

use std::{
    fs, io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::Context;
use axum_extra::extract::cookie::Key;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use sha2::{Digest, Sha512};
use tokio::sync::watch;
use tracing::{error, info, warn};

use self::{
    app::{App, Parts},
    audit::Audit,
    pages::Pages,
    passwords::Passwords,
    session::Sessions,
    settings::Settings,
    store::Store,
};
use crate::{
    config::{Config, Scope},
    process::{
        follow::{Changes, DirectoryWatch, Follower, is_exhausted},
        name_client, signals,
    },
};

/// The shortest content of a file with a key, in bytes.
const SHORTEST_KEY: usize = 32;
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
    /// A file with the secret from which the key of cookies is made; without one, a new key each time.
    pub session_key: Option<PathBuf>,
    /// The origins of the site, if a proxy changes the `Host` of requests.
    pub origins: Vec<String>,
}

/// Runs the web interface until it is told to end (SIGTERM, SIGINT).
///
/// # Errors
/// If the configuration or the key can't be used, no API server is configured, or the address can't be listened on.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let ending = signals::termination().context("wait for signals")?;
    let (settings, config) = load(options.config.as_deref())?;
    settings.warnings.iter().for_each(|warning| warn!("{warning}"));
    let key = key(options.session_key.as_deref())?;
    let mut kubeconfig = kube::Config::infer().await.context("no API server: set KUBECONFIG, or run in a cluster")?;
    name_client(&mut kubeconfig, "vm-operator-web");
    let home = || Scope::of(vec![kubeconfig.default_namespace.clone()]);
    let scope = options.scope.or(config.namespace).unwrap_or_else(home);
    let client = Client::try_from(kubeconfig).context("make a client for the API server")?;

    let (address, most) = (options.listen.unwrap_or_else(|| settings.address()), settings.most_connections());
    let store = Store::follow(&client, &scope.watched());
    let (changed, settings) = watch::channel(Arc::new(settings));
    if let Some(file) = options.config {
        tokio::spawn(follow(file, changed, store.clone()));
    }
    let mut epoch = [0; 4];
    getrandom::fill(&mut epoch).context("random numbers")?;
    let app = App::new(Parts {
        settings,
        audit: Audit::new(client.clone(), std::env::var("HOSTNAME").ok()),
        client,
        store,
        sessions: Sessions::default(),
        key,
        passwords: Passwords::new(),
        pages: Pages::new().context("the built-in templates")?,
        epoch: u32::from_be_bytes(epoch),
        origins: options.origins.clone(),
        ending: ending.clone(),
    });
    tokio::spawn(forget(app.clone()));
    let routes = server::routes(app, &options.origins)?;
    let listener = server::listen(address).await.with_context(|| format!("listen on {address}"))?;
    let address = listener.local_addr().context("the address that was taken")?;
    info!(%address, namespaces = %scope, "the web interface listens");
    server::serve(listener, routes, most, ending).await;
    Ok(())
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

/// The key of cookies.
fn key(file: Option<&Path>) -> anyhow::Result<Key> {
    let Some(file) = file else {
        warn!("no --session-key: the sessions of people end with this process, and other replicas don't know them");
        return Ok(Key::generate());
    };
    let secret = fs::read(file).with_context(|| file.display().to_string())?;
    let secret = secret.trim_ascii();
    anyhow::ensure!(
        secret.len() >= SHORTEST_KEY,
        "{}: a session key has at least {SHORTEST_KEY} bytes",
        file.display()
    );
    Ok(Key::from(&Sha512::digest(secret)[..]))
}

/// Reads the configuration again when it changes. Where the program listens and which namespaces it shows are as they were at its start.
async fn follow(file: PathBuf, changed: watch::Sender<Arc<Settings>>, store: Arc<Store>) {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")).to_owned();
    let mut follower = match follower(&folder) {
        Ok(follower) => follower,
        Err(error) => {
            warn!(%error, folder = %folder.display(), "changes of the configuration take effect only after a restart");
            return;
        }
    };
    let mut known = fs::read(&file).ok();
    while follower.changed().await.is_ok() {
        let text = fs::read(&file).ok();
        if text == known {
            continue;
        }
        known = text;
        match load(Some(&file)) {
            Ok((settings, _)) => {
                info!(file = %file.display(), "the configuration of the web interface has changed");
                changed.send_replace(Arc::new(settings));
                store.rights_have_changed();
            }
            Err(error) => error!(
                error = format!("{error:#}"),
                "the configuration can't be used by the web interface; the last good one stays in force"
            ),
        }
    }
}

fn follower(folder: &Path) -> io::Result<Follower> {
    let watch = || {
        let watch = DirectoryWatch::new()?;
        watch.add(folder, Changes::Files)?;
        watch.follow()
    };
    match watch() {
        Err(error) if is_exhausted(&error) => Ok(Follower::polling(&[folder])),
        result => result,
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
