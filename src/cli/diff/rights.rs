//! Whether the manager may make what a set renders. A set for which it lacks a right is refused as a whole.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::Deployment;
use kube::{
    Api, Client,
    api::{ApiResource, TypeMeta},
};
use tokio::sync::Mutex;

use super::super::output::note;
use crate::{client::access::Access, process::ErrorChain};

/// The name of the manager's Deployment.
const DEPLOYMENT: &str = "vm-operator";

/// What the manager does with objects that a template renders.
const VERBS: [&str; 6] = ["list", "watch", "get", "create", "patch", "delete"];

/// Asks what the manager may do.
pub(in crate::cli) struct Rights {
    /// `None`: it can't be asked.
    access: Option<Access>,
    /// What it may not do with a kind in a namespace, in words, where that was asked.
    known: Mutex<BTreeMap<(String, String), Option<String>>>,
}

impl Rights {
    /// Of the manager in a namespace.
    pub async fn of_manager(client: &Client, namespace: &str) -> Self {
        // Its Deployment names its account.
        let deployment = Api::<Deployment>::namespaced(client.clone(), namespace).get_opt(DEPLOYMENT).await;
        let spec = deployment.ok().flatten().and_then(|deployment| deployment.spec?.template.spec);
        let access = spec.and_then(|spec| spec.service_account_name);
        let access = access.map(|account| Access::of_account(client.clone(), namespace, &account));
        Self { access, known: Mutex::default() }
    }

    /// What the manager may not do with objects of a kind in a namespace, in words.
    pub async fn lacking(&self, kind: &TypeMeta, resource: &ApiResource, namespace: &str) -> Option<String> {
        let access = self.access.as_ref()?;
        let mut known = self.known.lock().await;
        let name = (format!("{}/{}", kind.api_version, kind.kind), namespace.to_owned());
        if !known.contains_key(&name) {
            let mut lacking = Vec::new();
            for verb in VERBS {
                match access.is_allowed(resource, verb, namespace).await {
                    Ok(true) => {}
                    Ok(false) => lacking.push(verb),
                    Err(error) => {
                        note(&format!(
                            "# whether the manager may make {} is not known: {}",
                            kind.kind,
                            ErrorChain(&error)
                        ));
                        lacking.clear();
                        break;
                    }
                }
            }
            let rule = match lacking.as_slice() {
                [] => None,
                verbs => Some(access.rule(resource, verbs, Some(namespace)).await.to_string()),
            };
            known.insert(name.clone(), rule);
        }
        known.get(&name).cloned().flatten()
    }
}
