//! The resource of a kind: where the API server serves its objects.
//!
//! The plural in a resource's path can't be derived from its kind: that of `NetworkAttachmentDefinition` is
//! `network-attachment-definitions`. So the API server is asked, once for each kind. The kinds that Kubernetes itself defines and that every
//! VM has are constants and cost no request.

use std::{collections::HashMap, sync::Mutex};

use kube::{
    Client, Error,
    api::TypeMeta,
    core::{ApiResource, GroupVersionKind, Status},
    discovery::{Scope, pinned_kind},
    error::DiscoveryError,
};

use crate::{object::constant_resource, process::lock};

/// The resources of the kinds that were asked for.
pub struct Resources {
    client: Client,
    known: Mutex<HashMap<TypeMeta, ApiResource>>,
}

impl Resources {
    /// Nothing is asked yet.
    pub fn new(client: Client) -> Self {
        Self { client, known: Mutex::default() }
    }

    /// The resource of a kind, as the API server had it when it was asked first.
    ///
    /// # Errors
    /// As [`Self::ask`].
    pub async fn of(&self, kind: &TypeMeta) -> Result<ApiResource, Error> {
        let known = lock(&self.known).get(kind).cloned();
        match known.or_else(|| constant_resource(kind)) {
            Some(resource) => Ok(resource),
            None => self.ask(kind).await,
        }
    }

    /// The resource of a kind, as the API server has it now. A definition that was deleted may come back with another plural.
    ///
    /// # Errors
    /// 404 if the API server does not serve the kind, or not in namespaces. Or the error of the request.
    pub async fn ask(&self, kind: &TypeMeta) -> Result<ApiResource, Error> {
        if let Some(resource) = constant_resource(kind) {
            return Ok(resource);
        }
        let (group, version) = kind.api_version.split_once('/').unwrap_or(("", &kind.api_version));
        let found = match pinned_kind(&self.client, &GroupVersionKind::gvk(group, version, &kind.kind)).await {
            Ok((resource, capabilities)) if capabilities.scope == Scope::Namespaced => Ok(resource),
            Ok(_) => Err(not_served(kind, " in namespaces")),
            Err(Error::Api(answer)) if answer.code == 404 => Err(not_served(kind, "")),
            Err(Error::Discovery(DiscoveryError::MissingKind(_))) => Err(not_served(kind, "")),
            Err(error) => Err(error),
        };
        let mut known = lock(&self.known);
        match &found {
            Ok(resource) => drop(known.insert(kind.clone(), resource.clone())),
            Err(_) => drop(known.remove(kind)),
        }
        found
    }
}

/// The same answer as that to a request for a resource that does not exist.
fn not_served(TypeMeta { api_version, kind }: &TypeMeta, detail: &str) -> Error {
    let message = format!("the API server does not serve the kind {kind} of {api_version}{detail}");
    Error::Api(Status::failure(&message, "NotFound").with_code(404).boxed())
}

#[cfg(all(test, feature = "manager"))]
mod tests {
    use std::{
        convert::Infallible,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use axum::http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;
    use tower::service_fn;

    use super::*;
    use crate::object::{builtin_kinds, stateful_sets};

    fn kind(api_version: &str, kind: &str) -> TypeMeta {
        TypeMeta { api_version: api_version.into(), kind: kind.into() }
    }

    /// An API server with one group, and how often it was asked.
    fn resources() -> (Resources, Arc<AtomicUsize>) {
        let requests = Arc::new(AtomicUsize::new(0));
        let counted = requests.clone();
        let server = service_fn(move |request: Request<Body>| {
            counted.fetch_add(1, Ordering::Relaxed);
            let resource = |kind: &str, name: &str, namespaced: bool| json!({ "kind": kind, "name": name, "singularName": "", "namespaced": namespaced, "verbs": [] });
            let resources = json!([
                resource("NetworkAttachmentDefinition", "network-attachment-definitions", true),
                resource("Plant", "plants", false),
            ]);
            let (code, answer) = match request.uri().path() {
                "/apis/example.org/v1" => (
                    200,
                    json!({ "kind": "APIResourceList", "groupVersion": "example.org/v1", "resources": resources }),
                ),
                "/apis/example.org/v2" => (503, json!({ "kind": "Status", "status": "Failure", "code": 503 })),
                _ => (404, json!("404 page not found")),
            };
            async move {
                Ok::<_, Infallible>(
                    Response::builder().status(code).body(Body::from(answer.to_string().into_bytes())).unwrap(),
                )
            }
        });
        (Resources::new(Client::new(server, "ns")), requests)
    }

    #[tokio::test]
    async fn the_api_server_is_asked_once_for_the_plural_of_each_foreign_kind() {
        let (resources, requests) = resources();
        for kind in builtin_kinds().chain([stateful_sets()]) {
            assert_eq!(resources.of(&kind).await.unwrap().kind, kind.kind);
        }
        assert_eq!(requests.load(Ordering::Relaxed), 0);
        let definitions = kind("example.org/v1", "NetworkAttachmentDefinition");
        for _ in 0..2 {
            assert_eq!(resources.of(&definitions).await.unwrap().plural, "network-attachment-definitions");
        }
        assert_eq!(requests.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn a_kind_that_is_not_served_in_namespaces_is_not_found() {
        let (resources, _) = resources();
        for (kind, expected) in [
            (
                kind("example.org/v1", "Plant"),
                "the API server does not serve the kind Plant of example.org/v1 in namespaces",
            ),
            (kind("example.org/v1", "Tree"), "the API server does not serve the kind Tree of example.org/v1"),
            (kind("example.com/v1", "Tree"), "the API server does not serve the kind Tree of example.com/v1"),
        ] {
            match resources.of(&kind).await {
                Err(Error::Api(answer)) => assert_eq!((answer.code, answer.message.as_str()), (404, expected)),
                other => panic!("{other:?}"),
            }
        }
        // What may be served, and was not found out, is another error.
        let busy = resources.of(&kind("example.org/v2", "Tree")).await;
        assert!(matches!(busy, Err(Error::Api(answer)) if answer.code == 503));
    }
}
