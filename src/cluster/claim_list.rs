//! Which claims a namespace has, asked before a claim is made.
//!
//! A restored disk may have the name of an earlier release, and lack all labels. If the watch of claims has not reported it yet, its VM would
//! get an empty disk. No request asks for several names, so the claims of the namespace are listed:
//!
//! ```text
//!  a VM that arrived at T ─▶ a list that began after T: another VM's, else a new one ─▶ names and UIDs ─▶ is one of them not in the cache?
//! ```
//!
//! Whoever restores a VM restores its claims before it, so such a list has them. When many VMs arrive at once, few lists serve all of them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Client, Resource, ResourceExt,
    api::ListParams,
    core::{ListMeta, Request},
};
use serde::Deserialize;
use tokio::time::Instant;
use tracing::debug;

use super::{ActionError, Cluster, namespace_of};
use crate::{
    api::VirtualMachine,
    object::ObjectKey,
    process::{clock, lock, slots::Slots},
};

/// How many claims the API server sends at once. This bounds what a list takes in memory: 2 kB for each. Most namespaces fit: the API server
/// reads the pages after the first one from etcd, which made 1,000 VMs a tenth slower (docs/performance.md).
const PAGE: u32 = 5000;

/// The UIDs of a namespace's claims, by name.
type Uids = HashMap<Box<str>, Box<str>>;

/// The last list of each namespace.
#[derive(Default)]
pub struct ClaimLists(Mutex<HashMap<String, Arc<tokio::sync::Mutex<Option<Listed>>>>>);

/// A list, and when it began.
struct Listed {
    begun: Instant,
    uids: Arc<Uids>,
}

impl ClaimLists {
    /// A list that began after `arrived`. Who comes while one is under way waits for it, and then may need the next one.
    async fn since<E>(
        &self,
        namespace: &str,
        arrived: Instant,
        list: impl AsyncFnOnce() -> Result<Uids, E>,
    ) -> Result<Arc<Uids>, E> {
        let place = lock(&self.0).entry(namespace.to_owned()).or_default().clone();
        let mut last = place.lock().await;
        if let Some(last) = last.as_ref().filter(|last| last.begun > arrived) {
            return Ok(last.uids.clone());
        }
        let begun = Instant::now();
        let uids = Arc::new(list().await?);
        *last = Some(Listed { begun, uids: uids.clone() });
        Ok(uids)
    }

    /// Lists anew next time.
    fn forget(&self, namespace: &str) {
        lock(&self.0).remove(namespace);
    }
}

impl Cluster {
    /// Whether the API server has a claim that may be a VM's, with one of these names that were not observed. `arrived` is when the VM was received.
    ///
    /// # Errors
    /// The error of the request.
    pub async fn has_unseen_claim(
        &self,
        vm: &VirtualMachine,
        names: &[String],
        arrived: Instant,
    ) -> Result<bool, ActionError> {
        let namespace = namespace_of(vm);
        let list = async || list(&self.client, &self.requests, &namespace).await;
        let listed = self.claim_lists.since(&namespace, arrived, list).await;
        let listed = listed.map_err(|source| {
            let key = ObjectKey {
                api_version: PersistentVolumeClaim::api_version(&()).into(),
                kind: PersistentVolumeClaim::kind(&()).into(),
                name: vm.name_any(),
            };
            ActionError::Api { what: "look for", key, source: Box::new(source) }
        })?;
        // What the cache has, and the VM does not see, is another VM's.
        let sees_now = |name: &str| self.children.observe(vm, clock::now()).claim(name).is_some();
        let is_unseen = |name: &String| {
            listed.get(name.as_str()).is_some_and(|uid| !self.children.has_object(uid) || sees_now(name))
        };
        let unseen = names.iter().find(|name| is_unseen(name));
        if let Some(claim) = unseen {
            debug!(claim, "the claim was not observed");
            // The claim may be deleted meanwhile, and then the watch has nothing to report.
            self.claim_lists.forget(&namespace);
        }
        Ok(unseen.is_some())
    }
}

/// Lists the claims of a namespace, as recent as etcd. Only their names and UIDs are read of the answer.
async fn list(client: &Client, requests: &Slots, namespace: &str) -> kube::Result<Uids> {
    #[derive(Deserialize)]
    struct Page {
        #[serde(default)]
        metadata: ListMeta,
        // The API server writes `null` for an empty list.
        items: Option<Vec<Item>>,
    }
    #[derive(Deserialize)]
    struct Item {
        metadata: Names,
    }
    #[derive(Deserialize)]
    struct Names {
        name: Box<str>,
        uid: Box<str>,
    }
    let path = Request::new(PersistentVolumeClaim::url_path(&(), Some(namespace)));
    let mut parameters = ListParams::default().limit(PAGE);
    let mut uids = Uids::new();
    loop {
        let request = path.list_metadata(&parameters).map_err(kube::Error::BuildRequest)?;
        let Page { metadata, items } = requests.run(client.request(request)).await?;
        uids.extend(items.into_iter().flatten().map(|item| (item.metadata.name, item.metadata.uid)));
        match metadata.continue_.filter(|next| !next.is_empty()) {
            Some(next) => parameters = parameters.continue_token(&next),
            None => return Ok(uids),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, time::Duration};

    use super::*;

    #[tokio::test]
    async fn a_list_serves_all_who_came_before_it_began() {
        let lists = ClaimLists::default();
        let count = Mutex::new(0);
        let list = async || {
            *lock(&count) += 1;
            tokio::task::yield_now().await;
            Ok::<_, Infallible>(Uids::new())
        };
        let early = Instant::now();
        let ask = async |namespace: &str, arrived| lists.since(namespace, arrived, list).await.map(drop);
        let all = (0..10).map(|_| ask("ns", early));
        futures::future::join_all(all).await;
        assert_eq!(*lock(&count), 1);
        ask("ns", Instant::now() + Duration::from_secs(1)).await.unwrap();
        assert_eq!(*lock(&count), 2, "who came later needs another list");
        ask("other", early).await.unwrap();
        assert_eq!(*lock(&count), 3, "each namespace has its own");
        lists.forget("ns");
        ask("ns", early).await.unwrap();
        assert_eq!(*lock(&count), 4);
    }
}
