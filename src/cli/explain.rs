//! `kubectl vm explain` and `kubectl vm status`: read the facts and print what [`crate::explain`] makes of them.
//!
//! Two rounds of requests, each in parallel: the VM and what can be asked without knowing more; then what depends on the answers. A request
//! that is refused takes away only its facts.

use std::fmt::Debug;

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use futures::{future::join_all, join};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::Deployment,
        coordination::v1::Lease,
        core::v1::{Event, Namespace, Node, PersistentVolumeClaim},
        storage::v1::StorageClass,
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
    core::TypeMeta,
};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{
    cluster::ClusterOptions,
    format::DataFormat,
    output::{Exit, Failure, Output},
    vms::{self, FoundVm, name_of, refused, title},
};
use crate::{
    claims,
    explain::{Facts, explain, page::Page},
    object::{self, INSTANCE_LABEL},
    observed::Object,
    process::ErrorChain,
};

#[derive(Args)]
pub(super) struct Options {
    /// The VM.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vms::vm_names))]
    name: String,
    /// Print it as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
    #[command(flatten)]
    cluster: ClusterOptions,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let explanation = explain(&options.facts().await?);
    output.found(&explanation, options.output.as_ref())?;
    Ok(Exit::negative_if(explanation.cause.is_some()))
}

/// `kubectl vm status`: the same facts on a page.
///
/// # Errors
/// If the VM can't be read.
pub(super) async fn status(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    output.found(&Page::of(&options.facts().await?), options.output.as_ref())?;
    Ok(Exit::Success)
}

impl Options {
    async fn facts(&self) -> Result<Facts, Failure> {
        let cluster = self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
        gather(&cluster.client, &cluster.namespace, name_of(&self.name)).await
    }
}

/// Keeps what was read, and notes what was not.
fn known<T, R: Resource<DynamicType = ()>>(
    result: kube::Result<T>,
    verb: &str,
    place: Option<&str>,
    unread: &mut Vec<String>,
) -> Option<T> {
    match result {
        Ok(found) => Some(found),
        Err(error) => {
            let plural = R::plural(&());
            let place = place.map_or_else(|| "in the cluster".to_owned(), |place| format!("in the namespace {place}"));
            unread.push(match &error {
                kube::Error::Api(answer) if answer.is_forbidden() => {
                    format!("{plural} {place}: you may not {verb} them")
                }
                kube::Error::Api(answer) => format!("{plural} {place}: {}", answer.message),
                error => format!("{plural} {place}: {}", ErrorChain(error)),
            });
            None
        }
    }
}

async fn list<R>(api: &Api<R>, parameters: &ListParams) -> kube::Result<Vec<R>>
where
    R: Clone + DeserializeOwned + Debug,
{
    Ok(api.list(parameters).await?.items)
}

/// Objects of all namespaces, or if that is forbidden of those in which a manager may be.
pub(super) async fn anywhere<R>(client: &Client, namespace: &str, parameters: &ListParams) -> kube::Result<Vec<R>>
where
    R: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    match list(&Api::<R>::all(client.clone()), parameters).await {
        Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
            let own = Api::<R>::namespaced(client.clone(), namespace);
            let home = Api::<R>::namespaced(client.clone(), HOME);
            let (own, home) = join!(list(&own, parameters), list(&home, parameters));
            match (own, home) {
                // One that shows nothing does not show that there is none.
                (Ok(found), _) | (_, Ok(found)) if !found.is_empty() => Ok(found),
                _ => Err(kube::Error::Api(answer)),
            }
        }
        result => result,
    }
}

/// The Deployments and Pods of managers.
pub(super) fn managers() -> ListParams {
    ListParams::default().labels("app.kubernetes.io/name=vm-operator,app.kubernetes.io/component=manager")
}

/// The namespace of a default installation.
const HOME: &str = "vm-operator";

/// Reads the facts.
///
/// # Errors
/// If the VM can't be read.
pub(super) async fn gather(client: &Client, namespace: &str, name: &str) -> Result<Facts, Failure> {
    let mut unread = Vec::new();
    let pods: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource_of_pods());
    let of_vm = ListParams::default().labels(&format!("{},{INSTANCE_LABEL}={name}", object::selector()));
    let (claims_api, events_api) = (
        Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace),
        Api::<Event>::namespaced(client.clone(), namespace),
    );
    let about = |name: &str| ListParams::default().fields(&format!("involvedObject.name={name}")).limit(vms::CHUNK);
    let about_vm = about(name);
    let managers = managers();
    let lease = ListParams::default().fields("metadata.name=vm-operator");
    let (vms, namespaces) = (vms::api(client, namespace), Api::<Namespace>::all(client.clone()));
    let (classes, limits, quotas) = (
        Api::<StorageClass>::all(client.clone()),
        Api::namespaced(client.clone(), namespace),
        Api::namespaced(client.clone(), namespace),
    );
    let all = ListParams::default();
    let (vm, pod, claims, mut events, classes, limits, quotas, found_namespace, deployments, leases) = join!(
        vms.get(name),
        pods.get_opt(name),
        list(&claims_api, &of_vm),
        list(&events_api, &about_vm),
        list(&classes, &all),
        list(&limits, &all),
        list(&quotas, &all),
        namespaces.get(namespace),
        anywhere::<Deployment>(client, namespace, &managers),
        anywhere::<Lease>(client, namespace, &lease),
    );
    let vm = match vm {
        Ok(object) => FoundVm::new(object)?.vm,
        Err(error) => return Err(Failure::new(refused(client, &title(name), &["get"], Some(namespace), &error).await)),
    };
    let here = Some(namespace);
    let pod = known::<_, k8s_openapi::api::core::v1::Pod>(pod, "get", here, &mut unread);
    let uid = vm.uid().unwrap_or_default();
    let pod =
        pod.map(|pod| pod.map(|pod| Object::trim(&object::pods(), pod)).filter(|pod| pod.is_owned_or_adoptable(&uid)));
    let claims = known::<_, PersistentVolumeClaim>(claims, "list", here, &mut unread).map(|mut claims| {
        let used: Vec<String> = claims::possible_names(&vm).collect();
        claims.retain(|claim| used.contains(&claim.name_any()));
        claims.into_iter().filter_map(trimmed_claim).collect::<Vec<Object>>()
    });

    // The second round.
    let unbound = claims
        .iter()
        .flatten()
        .filter(|claim| !claim.is_bound())
        .map(|claim| about(&claim.key.name))
        .collect::<Vec<_>>();
    let of_claims = join_all(unbound.iter().map(|parameters| list(&events_api, parameters)));
    let (of_claims, nodes) = join!(of_claims, nodes(client, pod.as_ref().and_then(Option::as_ref)));
    if let Ok(events) = &mut events {
        events.extend(of_claims.into_iter().flatten().flatten());
    }
    Ok(Facts {
        events: known::<_, Event>(events, "list", here, &mut unread).unwrap_or_default(),
        classes: known::<_, StorageClass>(classes, "list", None, &mut unread),
        nodes: nodes.and_then(|nodes| known::<_, Node>(nodes, "get and list", None, &mut unread)),
        limits: known::<_, k8s_openapi::api::core::v1::LimitRange>(limits, "list", here, &mut unread),
        quotas: known::<_, k8s_openapi::api::core::v1::ResourceQuota>(quotas, "list", here, &mut unread),
        namespace: known::<_, Namespace>(found_namespace, "get", None, &mut unread),
        deployments: known::<_, Deployment>(deployments, "list", None, &mut unread),
        leases: known::<_, Lease>(leases, "list", None, &mut unread),
        vm,
        pod,
        claims,
        unread,
        now: Timestamp::now(),
    })
}

/// The node of a Pod, or all nodes if it has none yet. `None`: nothing was asked.
async fn nodes(client: &Client, pod: Option<&Object>) -> Option<kube::Result<Vec<Node>>> {
    let api: Api<Node> = Api::all(client.clone());
    match pod?.node_name() {
        Some(node) => Some(api.get_opt(node).await.map(|node| node.into_iter().collect())),
        None => Some(list(&api, &ListParams::default()).await),
    }
}

fn resource_of_pods() -> ApiResource {
    ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&())
}

fn trimmed_claim(claim: PersistentVolumeClaim) -> Option<Object> {
    let types = TypeMeta { api_version: "v1".into(), kind: "PersistentVolumeClaim".into() };
    Some(Object::trim(&types, serde_json::from_value(json!(claim)).ok()?))
}
