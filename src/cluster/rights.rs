//! Whether the manager may do with a kind of objects what a new set of templates needs. It asks the API server, without doing it
//! (<https://kubernetes.io/docs/reference/access-authn-authz/authorization/#checking-api-access>).

use std::collections::{BTreeMap, BTreeSet};

use futures::future::try_join_all;
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec};
use kube::{
    Api,
    api::{ApiResource, PostParams, TypeMeta},
};

use super::Cluster;

/// What the manager must be allowed to do with a kind of objects.
pub struct Rights<'a> {
    /// The verbs that it needs where it watches: in its namespaces, or in all.
    pub watching: &'a [&'a str],
    /// The verbs that it needs in the namespaces of VMs.
    pub in_namespaces: &'a [&'a str],
    /// These namespaces.
    pub namespaces: &'a BTreeSet<String>,
}

impl Cluster {
    /// Why the manager can't use a kind: the API server does not serve it, or the manager lacks rights. `None` if it can.
    ///
    /// # Errors
    /// The error of a request.
    pub async fn unusable(&self, kind: &TypeMeta, rights: &Rights<'_>) -> kube::Result<Option<String>> {
        let resource = match self.children.resources.ask(kind).await {
            Ok(resource) => resource,
            Err(kube::Error::Api(answer)) if answer.is_not_found() => {
                return Ok(Some(format!("the API server refuses {}: {}", kind.kind, answer.message)));
            }
            Err(error) => return Err(error),
        };
        let everywhere = BTreeSet::from([String::new()]);
        let watches_all = self.children.namespace().is_none();
        let watching = if watches_all { &everywhere } else { rights.namespaces };
        let mut lacking = self.lacking(&resource, rights.watching, watching).await?;
        // A manager of all namespaces usually has its rights in all of them, which is one request for each verb.
        let mut verbs = rights.in_namespaces.to_vec();
        if watches_all {
            let lacks = self.lacking(&resource, &verbs, &everywhere).await?;
            verbs.retain(|verb| lacks.values().flatten().any(|lacking| lacking == verb));
        }
        for (namespace, verbs) in self.lacking(&resource, &verbs, rights.namespaces).await? {
            lacking.entry(namespace).or_default().extend(verbs);
        }
        Ok(lacking.first_key_value().map(|(namespace, verbs)| sentence(&resource, namespace, verbs)))
    }

    /// The verbs that the manager lacks, by namespace. The empty one stands for all namespaces.
    async fn lacking<'a>(
        &self,
        resource: &ApiResource,
        verbs: &[&'a str],
        namespaces: &BTreeSet<String>,
    ) -> kube::Result<BTreeMap<String, Vec<&'a str>>> {
        let questions = namespaces.iter().flat_map(|namespace| verbs.iter().map(move |verb| (namespace, *verb)));
        let answers = questions.map(|(namespace, verb)| async move {
            let is_allowed = self.is_allowed(resource, verb, namespace).await?;
            Ok::<_, kube::Error>((namespace, verb, is_allowed))
        });
        let mut lacking: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (namespace, verb, _) in try_join_all(answers).await?.into_iter().filter(|(_, _, is_allowed)| !is_allowed) {
            lacking.entry(namespace.clone()).or_default().push(verb);
        }
        Ok(lacking)
    }

    async fn is_allowed(&self, resource: &ApiResource, verb: &str, namespace: &str) -> kube::Result<bool> {
        let attributes = ResourceAttributes {
            group: Some(resource.group.clone()),
            version: Some(resource.version.clone()),
            resource: Some(resource.plural.clone()),
            verb: Some(verb.to_owned()),
            namespace: Some(namespace.to_owned()),
            ..ResourceAttributes::default()
        };
        let spec = SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        };
        let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
        let api: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let answer = self.limited(api.create(&PostParams::default(), &review)).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }
}

fn sentence(resource: &ApiResource, namespace: &str, verbs: &[&str]) -> String {
    let group = if resource.group.is_empty() { String::new() } else { format!(".{}", resource.group) };
    let place = if namespace.is_empty() { "all namespaces".to_owned() } else { format!("the namespace {namespace}") };
    format!(
        "the manager may not {} {}{group} in {place}: add the missing verbs for this kind to its Role",
        verbs.join(", "),
        resource.plural
    )
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use axum::http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::{Client, client::Body};
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::{
        cluster::{RequestLimit, watch::Children},
        metrics::Metrics,
        object::pods,
    };

    /// A cluster whose API server allows these verbs in these namespaces, and how many questions it was asked.
    fn cluster(watched: Option<&str>, allowed: &'static [(&str, &str)]) -> (Cluster, Arc<Mutex<usize>>) {
        let asked = Arc::new(Mutex::new(0));
        let counted = asked.clone();
        let server = service_fn(move |request: Request<Body>| {
            *counted.lock().unwrap() += 1;
            async move {
                let body = request.into_body().collect().await.unwrap().to_bytes();
                let review: Value = serde_json::from_slice(&body).unwrap();
                let attributes = &review["spec"]["resourceAttributes"];
                let is = |verb: &str, namespace: &str| {
                    attributes["verb"] == verb
                        && attributes["namespace"] == namespace
                        && attributes["resource"] == "pods"
                };
                let answer =
                    json!({ "spec": {}, "status": { "allowed": allowed.iter().any(|(verb, place)| is(verb, place)) } });
                Ok::<_, Infallible>(Response::builder().body(Body::from(answer.to_string().into_bytes())).unwrap())
            }
        });
        let client = Client::new(server, "ns");
        let (children, _) = Children::new(client.clone(), watched.map(str::to_owned), Arc::new(Metrics::new()));
        (Cluster::new(client, children, RequestLimit::default()), asked)
    }

    #[tokio::test]
    async fn the_verbs_that_are_lacking_are_named() {
        for (watched, allowed, expected, requests) in [
            (Some("a"), &[("list", "a"), ("list", "b"), ("get", "a"), ("get", "b")] as &[_], None, 4),
            (Some("a"), &[("get", "a"), ("get", "b")], Some("list pods in the namespace a"), 4),
            (Some("a"), &[("list", "a"), ("list", "b"), ("get", "a")], Some("get pods in the namespace b"), 4),
            // A manager of all namespaces.
            (None, &[("list", ""), ("get", "")], None, 2),
            (None, &[("list", ""), ("get", "a"), ("get", "b")], None, 4),
            (None, &[("list", "a"), ("get", "")], Some("list pods in all namespaces"), 2),
        ] {
            let (cluster, asked) = cluster(watched, allowed);
            let namespaces = ["a", "b"].map(str::to_owned).into();
            let rights = Rights { watching: &["list"], in_namespaces: &["get"], namespaces: &namespaces };
            let why = cluster.unusable(&pods(), &rights).await.unwrap();
            let expected = expected
                .map(|what| format!("the manager may not {what}: add the missing verbs for this kind to its Role"));
            assert_eq!((why, *asked.lock().unwrap()), (expected, requests), "{watched:?} {allowed:?}");
        }
    }
}
