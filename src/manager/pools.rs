//! Watches the pools that log users in.

use std::{pin::pin, sync::Arc};

use futures::StreamExt;
use kube::{
    Api, Client, CustomResourceExt,
    api::DynamicObject,
    runtime::watcher::{self, Event},
};
use tokio::sync::{oneshot, watch};
use tracing::warn;

use crate::{
    api::{VmPool, login_pools::LoginPools},
    cluster::list_watch::{code, list_watch},
    metrics::Metrics,
    process::{ErrorChain, RepeatFilter},
};

/// Watches the pools of a namespace (`None`: of all) until the receiver is dropped. The other receiver is told when they are listed, or
/// can't be: then nobody is logged in by a pool, and the VMs need not wait.
pub fn follow(
    client: Client,
    namespace: Option<&str>,
    metrics: Arc<Metrics>,
) -> (watch::Receiver<Arc<LoginPools>>, oneshot::Receiver<()>) {
    let (sender, receiver) = watch::channel(Arc::default());
    let (listed, is_listed) = oneshot::channel();
    let resource = VmPool::api_resource();
    let api = match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    };
    tokio::spawn(watch_pools(api, sender, listed, metrics));
    (receiver, is_listed)
}

async fn watch_pools(
    api: Api<DynamicObject>,
    sender: watch::Sender<Arc<LoginPools>>,
    listed: oneshot::Sender<()>,
    metrics: Arc<Metrics>,
) {
    let mut events = pin!(list_watch(api, watcher::Config::default()));
    let (mut pools, mut listed, mut repeats) = (LoginPools::default(), Some(listed), RepeatFilter::default());
    loop {
        let event = tokio::select! {
            () = sender.closed() => return,
            Some(event) = events.next() => event,
            else => return,
        };
        let is_complete = match event {
            Ok(Event::Init) => {
                pools = LoginPools::default();
                false
            }
            Ok(Event::InitApply(pool)) => {
                pools.observe(&pool);
                false
            }
            Ok(Event::InitDone) => true,
            Ok(Event::Apply(pool)) => {
                pools.observe(&pool);
                true
            }
            Ok(Event::Delete(pool)) => {
                pools.forget(&pool);
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
            sender.send_if_modified(|known| {
                let is_new = **known != pools;
                if is_new {
                    *known = Arc::new(pools.clone());
                }
                is_new
            });
        }
    }
}
