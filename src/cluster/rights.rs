//! Whether the manager may do with a kind of objects what a new set of templates or an action needs.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::try_join_all;
use kube::api::{ApiResource, TypeMeta};

use super::{ActionError, Cluster};

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
        let Some((namespace, verbs)) = lacking.first_key_value() else { return Ok(None) };
        // A ClusterRole is needed anyway, so it may have everything that is lacking somewhere.
        let all = [rights.watching, rights.in_namespaces].concat();
        let is_lacking = |verb: &&str| {
            if namespace.is_empty() { lacking.values().flatten().any(|it| it == verb) } else { verbs.contains(verb) }
        };
        let verbs: Vec<&str> = all.into_iter().filter(is_lacking).collect();
        let namespace = Some(namespace.as_str()).filter(|namespace| !namespace.is_empty());
        Ok(Some(self.children.access.rule(&resource, &verbs, namespace).await.to_string()))
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
            let is_allowed = self.requests.run(self.children.access.is_allowed(resource, verb, namespace)).await?;
            Ok::<_, kube::Error>((namespace, verb, is_allowed))
        });
        let mut lacking: BTreeMap<String, Vec<&str>> = BTreeMap::new();
        for (namespace, verb, _) in try_join_all(answers).await?.into_iter().filter(|(_, _, is_allowed)| !is_allowed) {
            lacking.entry(namespace.clone()).or_default().push(verb);
        }
        Ok(lacking)
    }

    /// The error of an action, with the rule if the manager lacks a right for it.
    pub(super) async fn with_missing_rule(&self, namespace: &str, error: ActionError) -> ActionError {
        let (what, key, source) = match error {
            ActionError::Api { what, key, source } if matches!(&*source, kube::Error::Api(answer) if answer.is_forbidden()) => {
                (what, key, source)
            }
            error => return error,
        };
        let verbs: &[&str] = match what {
            // An apply to an object that does not exist creates it.
            "apply" => &["create", "patch"],
            "label" => &["patch"],
            "delete" => &["delete"],
            _ => &["get"],
        };
        let resource = self.children.resources.of(&key.types()).await;
        let rule = match &resource {
            Ok(resource) => self.children.access.missing_rule(resource, verbs, Some(namespace)).await,
            Err(_) => None,
        };
        match rule {
            Some(rule) => ActionError::Forbidden { what, key, rule },
            None => ActionError::Api { what, key, source },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{Arc, Mutex},
    };

    use axum::http::{Request, Response};
    use http_body_util::BodyExt;
    use kube::{Client, client::Body, core::Status};
    use serde_json::{Value, json};
    use tower::service_fn;

    use super::*;
    use crate::{
        cluster::{REQUESTS, watch::Children},
        metrics::Metrics,
        object::{ObjectKey, pods},
        process::{ErrorChain, slots::Slots},
        schedule::Persistence,
    };

    /// A cluster whose API server allows these verbs in these namespaces, and how many questions it was asked.
    fn cluster(watched: Option<&str>, allowed: &'static [(&str, &str)]) -> (Cluster, Arc<Mutex<usize>>) {
        let asked = Arc::new(Mutex::new(0));
        let counted = asked.clone();
        let server = service_fn(move |request: Request<Body>| {
            let is_account = request.uri().path().ends_with("selfsubjectreviews");
            *counted.lock().unwrap() += usize::from(!is_account);
            async move {
                if is_account {
                    let answer = json!({ "status": { "userInfo": { "username": "me" } } }).to_string();
                    return Ok::<_, Infallible>(Response::new(Body::from(answer.into_bytes())));
                }
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
                Ok(Response::new(Body::from(answer.to_string().into_bytes())))
            }
        });
        let client = Client::new(server, "ns");
        let (children, _) = Children::new(client.clone(), watched.map(str::to_owned), Arc::new(Metrics::new()));
        (Cluster::new(client, children, Slots::new(REQUESTS)), asked)
    }

    #[tokio::test]
    async fn the_rule_that_is_lacking_is_named() {
        let of_role = "give its account me a Role in that namespace with the rule - {apiGroups: [\"\"], resources: [pods], verbs: ";
        let of_cluster_role = of_role.replace("a Role in that namespace", "a ClusterRole");
        for (watched, allowed, expected, requests) in [
            (Some("a"), &[("list", "a"), ("list", "b"), ("get", "a"), ("get", "b")] as &[_], None, 4),
            (Some("a"), &[("get", "a"), ("get", "b")], Some(("list", "the namespace a")), 4),
            (Some("a"), &[("get", "b")], Some(("list, get", "the namespace a")), 4),
            (Some("a"), &[("list", "a"), ("list", "b"), ("get", "a")], Some(("get", "the namespace b")), 4),
            // A manager of all namespaces.
            (None, &[("list", ""), ("get", "")], None, 2),
            (None, &[("list", ""), ("get", "a"), ("get", "b")], None, 4),
            (None, &[("list", ""), ("get", "a")], Some(("get", "the namespace b")), 4),
            (None, &[("list", "a"), ("get", "")], Some(("list", "all namespaces")), 2),
            (None, &[("get", "a")], Some(("list, get", "all namespaces")), 4),
        ] {
            let (cluster, asked) = cluster(watched, allowed);
            let namespaces = ["a", "b"].map(str::to_owned).into();
            let rights = Rights { watching: &["list"], in_namespaces: &["get"], namespaces: &namespaces };
            let why = cluster.unusable(&pods(), &rights).await.unwrap();
            let expected = expected.map(|(verbs, place)| {
                let role = if place == "all namespaces" { &of_cluster_role } else { of_role };
                format!("the manager may not {verbs} pods in {place}; {role}[{verbs}]}}")
            });
            assert_eq!((why, *asked.lock().unwrap()), (expected, requests), "{watched:?} {allowed:?}");
        }
    }

    #[tokio::test]
    async fn a_refusal_names_a_rule_only_if_one_is_missing() {
        let forbidden = |what| {
            let answer = Status { code: 403, reason: "Forbidden".into(), message: "no".into(), ..Status::default() };
            let key = ObjectKey { api_version: "v1".into(), kind: "Pod".into(), name: "apple".into() };
            ActionError::Api { what, key, source: Box::new(kube::Error::Api(Box::new(answer))) }
        };
        let (cluster, _) = cluster(Some("a"), &[("create", "a"), ("patch", "a")]);
        for (what, verbs) in [("apply", None), ("label", None), ("delete", Some("delete")), ("read", Some("get"))] {
            let error = cluster.with_missing_rule("a", forbidden(what)).await;
            let expected = match verbs {
                Some(verbs) => format!("{what} Pod apple: the manager may not {verbs} pods in the namespace a; "),
                None => format!("{what} Pod apple: no"),
            };
            let text = ErrorChain(&error).to_string();
            assert!(text.starts_with(&expected), "{text}");
            assert_eq!((error.persistence(), error.label().as_ref()), (Persistence::Lasting, "Forbidden"));
        }
    }
}
