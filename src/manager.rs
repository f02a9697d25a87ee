//! The controller: watches machines and reconciles them.
//!
//! ```text
//!  watch of machines ─┐
//!  watches of objects ┼─▶ queue (one entry per machine) ─▶ reconcile: observe, render, plan, execute, status
//!  back-off ──────────┘
//! ```

pub mod reconcile;

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use futures::StreamExt;
use kube::{
    Api, Client,
    runtime::{
        Controller, WatchStreamExt, controller, reflector,
        watcher::{self, watcher},
    },
};
use tracing::{error, info, warn};

use self::reconcile::Reconciler;
use crate::{
    api::VirtualMachine,
    cluster::{
        Cluster,
        watch::{Chain, Children, PAGE},
    },
    config::Config,
    files, power,
};

/// How many machines are worked on at once. More than the API server's own limits only bring refusals.
const CONCURRENCY: u16 = 32;

/// What the manager is told on its command line.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// The configuration file; without one, the defaults.
    pub config: Option<PathBuf>,
    /// The namespace to manage, over the one in the file and the one of the cluster's service account.
    pub namespace: Option<String>,
    /// A folder of templates that lies over the built-in ones.
    pub templates: Option<PathBuf>,
}

/// Runs the manager until it is told to end (SIGTERM, SIGINT).
///
/// # Errors
/// If the configuration can't be used or no API server is configured.
pub async fn run(options: Options) -> anyhow::Result<()> {
    let config = configuration(&options)?;
    let client = Client::try_default().await.context("no API server: set KUBECONFIG, or run in a cluster")?;
    let namespace = options.namespace.or(config.namespace).unwrap_or_else(|| client.default_namespace().to_owned());
    let templates = files::template_set(options.templates.as_deref());
    match &templates {
        Ok(templates) => info!(templates = templates.names().count(), "compiled"),
        Err(error) => error!(%error, "the templates can't be used; machines are left as they are until this is mended"),
    }
    let (children, triggered) = Children::new(client.clone(), &namespace);
    let cluster = Cluster::new(client.clone(), &namespace, children);
    let reconciler = Arc::new(Reconciler::new(cluster, config.reconciler, templates));
    info!(namespace, version = env!("CARGO_PKG_VERSION"), "managing");

    let (store, writer) = reflector::store();
    let api: Api<VirtualMachine> = Api::namespaced(client, &namespace);
    let machines = watcher(api, watcher::Config::default().page_size(PAGE))
        .modify(power::trim)
        .default_backoff()
        .reflect(writer)
        .touched_objects();
    Controller::for_stream(machines, store)
        .with_config(controller::Config::default().concurrency(CONCURRENCY))
        .reconcile_on(triggered)
        .shutdown_on_signal()
        .run(Reconciler::reconcile, Reconciler::retry, reconciler)
        .for_each(|result| async move {
            match result {
                // Said where it happened, with its machine.
                Ok(_) | Err(controller::Error::ReconcilerFailed(..)) => {}
                // A machine that was deleted while it was in the queue.
                Err(controller::Error::ObjectNotFound(_)) => {}
                Err(error) => warn!(error = %Chain(&error), "the watch of the machines was cut"),
            }
        })
        .await;
    info!("ended");
    Ok(())
}

fn configuration(options: &Options) -> anyhow::Result<Config> {
    // The ConfigMap is optional, and so is its file.
    let Some(file) = options.config.as_ref().filter(|file| file.exists()) else { return Ok(Config::default()) };
    let config = files::configuration(file)?;
    for key in &config.unknown {
        warn!(file = %file.display(), key, "this key is not known and has no effect");
    }
    Ok(config)
}
