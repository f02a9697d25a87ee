//! The configuration file, which is read again when it changes.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    sync::Arc,
};

use tokio::sync::watch;
use tracing::{error, info, warn};

use super::{
    reload::{self, Followed},
    web::{self, Health, Readiness},
};
use crate::{
    config::{Config, ReconcilerConfig},
    files::{self, FileError},
    metrics::Metrics,
};

/// Reads a configuration file and reports whether it can be used: in the log, to the readiness probe and in the metrics.
pub struct Settings {
    file: Option<PathBuf>,
    metrics: Arc<Metrics>,
    health: Arc<Health>,
    /// Warnings that are in the log already.
    warned: HashSet<String>,
}

impl Settings {
    /// Reads the file (`None`: the defaults) and goes on following it. Returns the part that may change while the manager runs,
    /// and all of it as it is now. A file that cannot be used later is reported, and the last good one stays in force.
    ///
    /// # Errors
    /// If the file cannot be used now.
    pub fn follow(
        file: Option<PathBuf>,
        metrics: Arc<Metrics>,
        health: Arc<Health>,
    ) -> Result<(watch::Receiver<Arc<ReconcilerConfig>>, Config), FileError> {
        let config = load(file.as_deref())?;
        let mut settings = Self { file, metrics, health, warned: HashSet::new() };
        settings.accept(&config);
        let (sender, receiver) = watch::channel(Arc::new(config.reconciler.clone()));
        if let Some(file) = settings.file.clone() {
            let first = config.clone();
            tokio::spawn(async move {
                let namespace = first.namespace.clone();
                let changed = |result: &Result<Config, FileError>| match result {
                    Ok(config) => {
                        info!(file = %file.display(), "the configuration has changed");
                        if config.namespace != namespace {
                            warn!("another namespace is only managed after a restart");
                        }
                        settings.accept(config);
                        sender.send_replace(Arc::new(config.reconciler.clone()));
                    }
                    Err(error) => settings.refuse(error),
                };
                reload::follow(Followed::File(&file), Ok(first), || load(Some(&file)), changed).await
            });
        }
        Ok((receiver, config))
    }

    fn accept(&mut self, config: &Config) {
        let file = self.file.clone().filter(|file| file.exists());
        let name = file.as_ref().map_or_else(|| "defaults".to_owned(), |file| file.display().to_string());
        for key in &config.unknown {
            self.warn_once(format!("{name}: {key} is not known and has no effect"));
        }
        let logging = file.map(|file| file.with_file_name("logging.properties")).filter(|file| file.exists());
        if let Some(logging) = logging {
            let logging = logging.display();
            self.warn_once(format!("{logging} is not read: RUST_LOG says what is logged, --log-format how it looks"));
        }
        self.metrics.config_loaded(true);
        self.health.set(web::CONFIG, Readiness::Ready(name));
    }

    fn refuse(&self, error: &FileError) {
        error!(%error, "the configuration can't be used; the last good one stays in force");
        self.metrics.config_loaded(false);
        self.health.set(web::CONFIG, Readiness::Ready(format!("the last good one stays in force: {error}")));
    }

    fn warn_once(&mut self, message: String) {
        if !self.warned.contains(&message) {
            warn!("{message}");
            self.warned.insert(message);
        }
    }
}

/// A file that does not exist means the defaults: the ConfigMap that it comes from is optional.
fn load(file: Option<&Path>) -> Result<Config, FileError> {
    file.filter(|file| file.exists()).map_or_else(|| Ok(Config::default()), files::configuration)
}
