//! The Secret through which replicas tell each other which sessions have ended before their time, and through which they know after a restart.
//!
//! ```text
//!  sign-out, `revoke` ─▶ sessions ─▶ write ─▶ Secret ─▶ watch ─▶ sessions of all replicas
//! ```
//!
//! # Guarantees
//! - A session that has ended here does not go on, whatever becomes of the Secret.
//! - What is in the Secret is not lost by two writes at once: each has the version that was read, and a conflict begins anew.
//!
//! # Caveats
//! - Without the right to the Secret each process knows only of its own sessions, and says so once.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::{ByteString, api::core::v1::Secret, jiff::Timestamp};
use kube::{
    Api,
    api::{Patch, PatchParams},
    runtime::{
        WatchStreamExt,
        watcher::{self, watcher},
    },
};
use serde_json::json;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};

use super::{
    revoked::Revoked,
    session::{LONGEST, Sessions},
};
use crate::{
    ownership::WEB_MANAGER,
    process::{ErrorChain, RepeatFilter},
};

/// The key of the Secret.
const KEY: &str = "ended.json";
/// A resourceVersion that no object has: with it an apply creates the object, or fails because it exists.
const NO_VERSION: &str = "1";
/// How often a write begins anew after a conflict.
const TRIES: u32 = 20;
/// When a write that has failed is tried again.
const AGAIN: Duration = Duration::from_secs(5);

/// The Secret with the sessions that have ended before their time.
#[derive(Clone)]
pub(super) struct Revocations {
    secrets: Api<Secret>,
    name: String,
    /// Whether the log says already that the right is missing.
    is_told: Arc<AtomicBool>,
}

impl Revocations {
    /// The Secret of that name.
    pub fn new(secrets: Api<Secret>, name: String) -> Self {
        Self { secrets, name, is_told: Arc::default() }
    }

    /// Follows the Secret, and writes into it what ends here. Returns at once; the value becomes true when the Secret was read, or may not be.
    pub fn follow(self, sessions: Sessions) -> watch::Receiver<bool> {
        let (is_read, is_known) = watch::channel(false);
        tokio::spawn(self.clone().read(sessions.clone(), is_read));
        tokio::spawn(self.publish(sessions));
        is_known
    }

    async fn read(self, sessions: Sessions, is_read: watch::Sender<bool>) {
        let of_name = watcher::Config::default().fields(&format!("metadata.name={}", self.name));
        let mut events = watcher(self.secrets.clone(), of_name).default_backoff().boxed();
        let mut failures = RepeatFilter::default();
        while let Some(event) = events.next().await {
            match event {
                Ok(watcher::Event::InitApply(secret) | watcher::Event::Apply(secret)) => {
                    sessions.learn(&content(&secret))
                }
                Ok(watcher::Event::InitDone) => {
                    failures.clear();
                    is_read.send_replace(true);
                }
                // What was known still is.
                Ok(watcher::Event::Init | watcher::Event::Delete(_)) => {}
                Err(error) => {
                    let is_forbidden = matches!(&error, watcher::Error::InitialListFailed(kube::Error::Api(answer)) if answer.is_forbidden());
                    // Any other error passes, and till then a session that has ended would go on here.
                    if is_forbidden {
                        is_read.send_replace(true);
                    }
                    self.report(&mut failures, &error, is_forbidden);
                }
            }
        }
    }

    async fn publish(self, sessions: Sessions) {
        let (mut changes, mut failures) = (sessions.changes(), RepeatFilter::default());
        // What the Secret has is learned, too: then nothing is written.
        while changes.changed().await.is_ok() {
            loop {
                let known = changes.borrow_and_update().clone();
                match self.add(&known).await {
                    Ok(()) => {
                        failures.clear();
                        break;
                    }
                    Err(error) => {
                        let is_forbidden = matches!(&error, kube::Error::Api(answer) if answer.is_forbidden());
                        self.report(&mut failures, &error, is_forbidden);
                        if is_forbidden {
                            break;
                        }
                        sleep(AGAIN).await;
                    }
                }
            }
        }
    }

    fn report(&self, failures: &mut RepeatFilter, error: &(dyn std::error::Error + 'static), is_forbidden: bool) {
        let error = ErrorChain(error).to_string();
        let is_told = is_forbidden && self.is_told.swap(true, Ordering::Relaxed);
        if failures.is_new(&error) && !is_told {
            warn!(object = self.name, %error, "sessions that end are not known to other replicas, nor after a restart");
        }
    }

    /// Adds to what the Secret has. At rest nothing is written.
    ///
    /// # Errors
    /// The error of a request.
    pub async fn add(&self, more: &Revoked) -> kube::Result<()> {
        for attempt in 1.. {
            let secret = self.secrets.get_opt(&self.name).await?;
            let mut revoked = secret.as_ref().map(content).unwrap_or_default();
            let now = Timestamp::now().as_second();
            let (mut wanted, found) = (more.clone(), revoked.clone());
            wanted.forget(now, LONGEST.as_secs());
            if !revoked.add(&wanted) {
                return Ok(());
            }
            revoked.forget(now, LONGEST.as_secs());
            if revoked == found {
                return Ok(());
            }
            let version = secret.and_then(|secret| secret.metadata.resource_version);
            let text = ByteString(serde_json::to_vec(&revoked).map_err(kube::Error::SerdeError)?);
            let body = json!({
                "apiVersion": "v1", "kind": "Secret", "data": { KEY: text },
                "metadata": { "name": self.name, "resourceVersion": version.as_deref().unwrap_or(NO_VERSION) },
            });
            let parameters = PatchParams::apply(WEB_MANAGER).force();
            match self.secrets.patch(&self.name, &parameters, &Patch::Apply(&body)).await {
                Err(kube::Error::Api(answer)) if answer.is_conflict() && attempt < TRIES => {
                    sleep(Duration::from_millis(10 * u64::from(attempt))).await;
                }
                result => return result.map(drop),
            }
        }
        Ok(())
    }

    /// Ends all sessions that a user has begun until now.
    ///
    /// # Errors
    /// The error of a request.
    pub async fn end_user(&self, user: &str) -> kube::Result<()> {
        self.add(&Revoked::user(user.to_owned(), Timestamp::now().as_millisecond())).await?;
        info!(user, object = self.name, "all sessions of a user have ended");
        Ok(())
    }
}

/// What the Secret says; what can't be read says nothing.
fn content(secret: &Secret) -> Revoked {
    let data = secret.data.as_ref().and_then(|data| data.get(KEY));
    data.and_then(|value| serde_json::from_slice(&value.0).ok()).unwrap_or_default()
}
