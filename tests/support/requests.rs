//! The requests that an API server has counted.

use std::collections::BTreeMap;
use std::fmt;

use kube::Client;

/// How many requests of each kind the API server has received. Not counted are watches, requests that are not about resources,
/// and the API server's own: every three minutes it lists the Services of all namespaces to check their ports
/// (<https://github.com/kubernetes/kubernetes/blob/v1.36.0/pkg/registry/core/service/portallocator/controller/repair.go>).
#[derive(Clone, Debug, Default)]
pub struct Requests(BTreeMap<Request, u64>);

/// A kind of request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Request {
    /// GET, LIST, POST, PUT, PATCH, APPLY, DELETE, DELETECOLLECTION
    pub verb: String,
    /// The API group; empty for the core.
    pub group: String,
    /// In plural, with the subresource after a slash.
    pub resource: String,
}

impl Requests {
    /// All requests so far.
    pub async fn ask(client: &Client) -> kube::Result<Self> {
        let request = http::Request::get("/metrics").body(vec![]).map_err(kube::Error::HttpError)?;
        Ok(Self::parse(&client.request_text(request).await?))
    }

    fn parse(metrics: &str) -> Self {
        let mut counts = BTreeMap::new();
        for line in metrics.lines() {
            let Some((labels, value)) =
                line.strip_prefix("apiserver_request_total{").and_then(|rest| rest.rsplit_once("} "))
            else {
                continue;
            };
            let label = |name: &str| {
                labels
                    .split("\",")
                    .find_map(|label| label.strip_prefix(name)?.strip_prefix("=\""))
                    .map(|value| value.trim_end_matches('"').to_owned())
                    .unwrap_or_default()
            };
            let (verb, resource, subresource) = (label("verb"), label("resource"), label("subresource"));
            if resource.is_empty() || verb == "WATCH" || verb == "WATCHLIST" || verb == "CONNECT" {
                continue;
            }
            if verb == "LIST" && resource == "services" && label("scope") == "cluster" {
                continue;
            }
            let resource = if subresource.is_empty() { resource } else { format!("{resource}/{subresource}") };
            let Ok(count) = value.trim().parse::<f64>() else { continue };
            *counts.entry(Request { verb, group: label("group"), resource }).or_default() += count as u64;
        }
        Self(counts)
    }

    /// The requests since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self(
            self.0
                .iter()
                .map(|(request, count)| (request.clone(), count - before.0.get(request).copied().unwrap_or_default()))
                .filter(|(_, count)| *count > 0)
                .collect(),
        )
    }

    /// Only the requests for which `keep` returns true.
    pub fn only(&self, keep: impl Fn(&Request) -> bool) -> Self {
        Self(
            self.0
                .iter()
                .filter(|(request, _)| keep(request))
                .map(|(request, count)| (request.clone(), *count))
                .collect(),
        )
    }

    /// Only the requests that change something.
    pub fn writes(&self) -> Self {
        self.only(|request| !matches!(request.verb.as_str(), "GET" | "LIST"))
    }

    /// Each kind of request with its number.
    pub fn iter(&self) -> impl Iterator<Item = (&Request, u64)> {
        self.0.iter().map(|(request, count)| (request, *count))
    }

    /// The number of requests.
    pub fn total(&self) -> u64 {
        self.0.values().sum()
    }
}

impl fmt::Display for Requests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (Request { verb, group, resource }, count) in &self.0 {
            let dot = if group.is_empty() { "" } else { "." };
            writeln!(f, "{count:6} {verb} {resource}{dot}{group}")?;
        }
        Ok(())
    }
}

/// Whether a request is about VMs or their objects. The manager's events are of the group `events.k8s.io`; those of the core
/// group are written by other controllers.
pub fn is_about_vms(request: &Request) -> bool {
    let resources = [
        "vms",
        "vms/status",
        "vmreports",
        "vmreports/status",
        "configmaps",
        "secrets",
        "persistentvolumeclaims",
        "services",
        "pods",
    ];
    resources.contains(&request.resource.as_str()) || (request.resource == "events" && request.group == "events.k8s.io")
}
