//! Pictures of screens that were just taken: whoever looks gets the same ones.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use axum::body::Bytes;
use tokio::{sync::Semaphore, time::timeout};

use super::store::Key;
use crate::process::lock;

/// For how long a picture is shown to others who ask.
const FRESH: Duration = Duration::from_secs(5);
/// The most pictures that are taken at the same time, and how long one may take.
const AT_ONCE: usize = 8;
const PATIENCE: Duration = Duration::from_secs(10);

/// A picture, and when it was taken. `None`: there was none.
type Picture = tokio::sync::Mutex<Option<(Instant, Option<Bytes>)>>;

/// Pictures of screens. A picture that was just taken is shown to whoever asks next.
pub(super) struct Pictures {
    of: Mutex<HashMap<Key, Arc<Picture>>>,
    places: Semaphore,
}

impl Default for Pictures {
    fn default() -> Self {
        Self { of: Mutex::default(), places: Semaphore::new(AT_ONCE) }
    }
}

impl Pictures {
    /// A picture of the VM's screen: the last one, or what `take` gives. `None`: there is none now.
    pub async fn of(&self, key: &Key, take: impl Future<Output = Result<Bytes, String>>) -> Option<Bytes> {
        let picture = self.place(key);
        let mut picture = picture.lock().await;
        match &*picture {
            Some((taken, content)) if taken.elapsed() < FRESH => content.clone(),
            _ => {
                let _place = self.places.acquire().await.ok()?;
                let content = timeout(PATIENCE, take).await.unwrap_or_else(|_| Err("no answer".into()));
                let content = content
                    .map_err(|error| tracing::debug!(namespace = key.0, vm = key.1, error, "there is no picture"));
                picture.insert((Instant::now(), content.ok())).1.clone()
            }
        }
    }

    /// The place of the VM's picture. Those that nobody has asked for any more are dropped.
    fn place(&self, key: &Key) -> Arc<Picture> {
        let mut of = lock(&self.of);
        let is_kept = |picture: &Picture| {
            picture.try_lock().map_or(true, |it| it.as_ref().is_some_and(|(taken, _)| taken.elapsed() < FRESH))
        };
        of.retain(|_, picture| is_kept(picture));
        of.entry(key.clone()).or_default().clone()
    }
}
