//! Watches the pools: which of them log users in, and what decides of their assignments.

use std::{collections::BTreeMap, pin::pin, sync::Arc};

use futures::StreamExt;
use kube::{
    Api, Client, CustomResourceExt, ResourceExt,
    api::DynamicObject,
    runtime::watcher::{self, Event},
};
use tokio::sync::{oneshot, watch};
use tracing::warn;

use crate::{
    api::{VmPool, login_pools::LoginPools, pool::VmPoolStatus},
    assignment::Pool,
    cluster::list_watch::{code, list_watch},
    metrics::Metrics,
    process::{ErrorChain, RepeatFilter},
};

/// The pools by namespace and name. `None` until they are listed: nobody knows then which ones exist.
pub type AllPools = Option<Arc<BTreeMap<(String, String), KnownPool>>>;

/// A pool as the watch has it.
#[derive(Clone, Debug)]
pub struct KnownPool {
    /// What decides of it.
    pub pool: Pool,
    /// Its resourceVersion.
    pub version: Option<String>,
    /// Its status, as far as it can be read.
    pub status: VmPoolStatus,
}

impl KnownPool {
    /// A pool as the API server has it.
    pub fn read(object: &DynamicObject) -> Self {
        let status = object.data.get("status").cloned().unwrap_or_default();
        Self {
            pool: Pool::read(object),
            version: object.resource_version(),
            status: serde_json::from_value(status).unwrap_or_default(),
        }
    }
}

/// What is known of the pools of a namespace, or of all namespaces.
pub struct Followed {
    /// Those that log users in.
    pub login: watch::Receiver<Arc<LoginPools>>,
    /// All of them.
    pub all: watch::Receiver<AllPools>,
    /// Is told when they are listed, or can't be: then nobody is logged in by a pool, and the VMs need not wait.
    pub listed: oneshot::Receiver<()>,
}

/// Watches the pools of a namespace (`None`: of all) until the receivers of [`Followed::login`] are dropped.
pub fn follow(client: Client, namespace: Option<&str>, metrics: Arc<Metrics>) -> Followed {
    let (login_sender, login) = watch::channel(Arc::default());
    let (all_sender, all) = watch::channel(None);
    let (listed_sender, listed) = oneshot::channel();
    let resource = VmPool::api_resource();
    let api = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    };
    tokio::spawn(watch_pools(api, login_sender, all_sender, listed_sender, metrics));
    Followed { login, all, listed }
}

async fn watch_pools(
    api: Api<DynamicObject>,
    login: watch::Sender<Arc<LoginPools>>,
    all: watch::Sender<AllPools>,
    listed: oneshot::Sender<()>,
    metrics: Arc<Metrics>,
) {
    let mut events = pin!(list_watch(api, watcher::Config::default()));
    let (mut pools, mut listed, mut repeats) = (LoginPools::default(), Some(listed), RepeatFilter::default());
    let mut known = BTreeMap::new();
    let key = |pool: &DynamicObject| (pool.namespace().unwrap_or_default(), pool.name_any());
    loop {
        let event = tokio::select! {
            () = login.closed() => return,
            Some(event) = events.next() => event,
            else => return,
        };
        let is_complete = match event {
            Ok(Event::Init) => {
                (pools, known) = (LoginPools::default(), BTreeMap::new());
                false
            }
            Ok(Event::InitApply(pool)) => {
                pools.observe(&pool);
                known.insert(key(&pool), KnownPool::read(&pool));
                false
            }
            Ok(Event::InitDone) => true,
            Ok(Event::Apply(pool)) => {
                pools.observe(&pool);
                known.insert(key(&pool), KnownPool::read(&pool));
                true
            }
            Ok(Event::Delete(pool)) => {
                pools.forget(&pool);
                known.remove(&key(&pool));
                true
            }
            Err(error) => {
                metrics.watch_restarted("VmPool");
                let message = ErrorChain(&error).to_string();
                // Without the definition there are no pools.
                if code(&error) != Some(404) && repeats.is_new(&message) {
                    warn!("the pools can't be watched: {message}");
                }
                drop(listed.take());
                false
            }
        };
        if is_complete {
            repeats.clear();
            drop(listed.take());
            all.send_replace(Some(Arc::new(known.clone())));
            login.send_if_modified(|known| {
                let is_new = **known != pools;
                if is_new {
                    *known = Arc::new(pools.clone());
                }
                is_new
            });
        }
    }
}
