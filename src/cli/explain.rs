//! `kubectl vm explain` and `kubectl vm status`: read the facts and print what [`crate::explain`] makes of them.
//!
//! Three rounds of requests, each in parallel: the VM and what can be asked without knowing more; then what depends on them; then what depends
//! on the claims. A request that is refused takes away only its facts. The time is that of the API server, because its objects are compared with it.

use std::fmt::Debug;

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use futures::{
    future::{join_all, try_join_all},
    join,
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::Deployment,
        coordination::v1::Lease,
        core::v1::{Event, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod},
        storage::v1::StorageClass,
    },
    jiff::{Timestamp, fmt::rfc2822},
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
    client::Body,
    core::TypeMeta,
};
use serde::de::DeserializeOwned;
use serde_json::json;

use super::{
    belongings,
    cluster::ClusterOptions,
    format::DataFormat,
    output::{Exit, Failure, Output},
    vms::{self, FoundVm, checked_name, refused, title},
};
use crate::{
    api::VirtualMachine,
    claims,
    explain::{
        Facts, explain, git, lacks_pods,
        page::Page,
        surroundings::{self, other_claims},
    },
    object::{self, COMPONENT_LABEL},
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
        gather(&cluster.client, &cluster.namespace, checked_name(&self.name)?).await
    }
}

/// Keeps what was read, and notes what was not.
fn known<T, R: Resource<DynamicType = ()>>(
    result: kube::Result<T>,
    verb: &str,
    place: Option<&str>,
    unread: &mut Vec<String>,
) -> Option<T> {
    known_of(&R::plural(&()), result, verb, place, unread)
}

/// The same of a kind whose plural is given.
fn known_of<T>(
    plural: &str,
    result: kube::Result<T>,
    verb: &str,
    place: Option<&str>,
    unread: &mut Vec<String>,
) -> Option<T> {
    match result {
        Ok(found) => Some(found),
        Err(error) => {
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

/// The objects of a list that are meant.
async fn list_of<R>(api: &Api<R>, parameters: &ListParams, is_meant: fn(&R) -> bool) -> kube::Result<Vec<R>>
where
    R: Clone + DeserializeOwned + Debug,
{
    Ok(list(api, parameters).await?.into_iter().filter(is_meant).collect())
}

/// Objects of all namespaces, or if that is forbidden of those in which a manager may be.
async fn anywhere<R>(
    client: &Client,
    namespace: &str,
    parameters: &ListParams,
    is_meant: fn(&R) -> bool,
) -> kube::Result<Vec<R>>
where
    R: Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug,
{
    match list_of(&Api::<R>::all(client.clone()), parameters, is_meant).await {
        Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
            let own = Api::<R>::namespaced(client.clone(), namespace);
            let home = Api::<R>::namespaced(client.clone(), HOME);
            let (own, home) = join!(list_of(&own, parameters, is_meant), list_of(&home, parameters, is_meant));
            match (own, home) {
                // One that shows nothing does not show that there is none.
                (Ok(found), _) | (_, Ok(found)) if !found.is_empty() => Ok(found),
                _ => Err(kube::Error::Api(answer)),
            }
        }
        result => result,
    }
}

/// The Deployments of managers.
pub(super) async fn deployments(client: &Client, namespace: &str) -> kube::Result<Vec<Deployment>> {
    let of_program = ListParams::default().labels(PROGRAM);
    anywhere(client, namespace, &of_program, is_of_manager).await
}

/// Whether a Deployment of the program runs the manager. The Deployment itself has no label that says so: the web interface has one of its own.
fn is_of_manager(deployment: &Deployment) -> bool {
    let labels = deployment.spec.as_ref().and_then(|spec| spec.selector.match_labels.as_ref());
    labels.and_then(|labels| labels.get(COMPONENT_LABEL)).is_some_and(|component| component == MANAGER)
}

/// The Pods of managers.
pub(super) fn pods_of_managers() -> ListParams {
    ListParams::default().labels(&format!("{PROGRAM},{COMPONENT_LABEL}={MANAGER}"))
}

/// The time by the API server's clock, which is that of its objects: the person's may be another one. It is in the head of each answer.
pub(super) async fn time_of(client: &Client) -> Option<Timestamp> {
    let request = http::Request::get("/version").body(Body::empty()).ok()?;
    let answer = client.send(request).await.ok()?;
    time_in(answer.headers().get(http::header::DATE)?.to_str().ok()?)
}

/// The time of an HTTP header (<https://www.rfc-editor.org/rfc/rfc9110#field.date>).
fn time_in(date: &str) -> Option<Timestamp> {
    rfc2822::DateTimeParser::new().parse_timestamp(date).ok()
}

/// The label of what belongs to this program.
const PROGRAM: &str = "app.kubernetes.io/name=vm-operator";
/// The value of the label [`COMPONENT_LABEL`] on the manager's Pods.
const MANAGER: &str = "manager";

/// The namespace of a default installation.
const HOME: &str = "vm-operator";

/// Reads the facts.
///
/// # Errors
/// If the VM can't be read.
pub(super) async fn gather(client: &Client, namespace: &str, name: &str) -> Result<Facts, Failure> {
    let mut unread = Vec::new();
    let pods: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &resource_of_pods());
    // A StatefulSet of a release before 3.4 made the first one of its Pods.
    let of_set = format!("{name}-0");
    let events_api = Api::<Event>::namespaced(client.clone(), namespace);
    let about = |name: &str| ListParams::default().fields(&format!("involvedObject.name={name}")).limit(vms::CHUNK);
    let about_vm = about(name);
    let lease = ListParams::default().fields("metadata.name=vm-operator");
    let (vms, namespaces) = (vms::api(client, namespace), Api::<Namespace>::all(client.clone()));
    let (classes, limits, quotas) = (
        Api::<StorageClass>::all(client.clone()),
        Api::namespaced(client.clone(), namespace),
        Api::namespaced(client.clone(), namespace),
    );
    let all = ListParams::default();
    let (vm, pod, pod_of_set, mut events, classes, limits, quotas, found_namespace, deployments, leases, now) = join!(
        vms.get(name),
        pods.get_opt(name),
        pods.get_opt(&of_set),
        list(&events_api, &about_vm),
        list(&classes, &all),
        list(&limits, &all),
        list(&quotas, &all),
        namespaces.get(namespace),
        deployments(client, namespace),
        anywhere::<Lease>(client, namespace, &lease, |_| true),
        time_of(client),
    );
    let vm = match vm {
        Ok(object) => FoundVm::new(object)?.vm,
        Err(error) => {
            let line = refused(client, &title(name), &["get"], Some(namespace), &error).await;
            return Err(vms::failure(line, &error));
        }
    };
    let here = Some(namespace);
    let pod = known::<_, Pod>(pod, "get", here, &mut unread);
    let pod = pod.map(|pod| [pod, pod_of_set.ok().flatten()].into_iter().flatten().find_map(|pod| pod_of(&vm, pod)));
    let pod = match pod {
        Some(found) => other_pod(&pods, &vm, found, &mut unread).await,
        None => None,
    };

    // The second round.
    let source = git::Source::of(&vm);
    let deployments = known::<_, Deployment>(deployments, "list", None, &mut unread);
    let (claims, nodes, applied, manager_pods) = join!(
        own_claims(client, namespace, &vm),
        nodes(client, pod.as_ref().and_then(Option::as_ref)),
        applied(client, source.as_ref()),
        pods_of(client, deployments.iter().flatten()),
    );
    // They only say more of what the Deployment says.
    let manager_pods = manager_pods.and_then(Result::ok);
    let claims = known::<_, PersistentVolumeClaim>(claims, "list", here, &mut unread);
    let git = source.map(|source| {
        let plural = source.kind.resource().plural;
        let object = applied.and_then(|found| known_of(&plural, found, "get", Some(&source.namespace), &mut unread));
        (source, object.flatten().and_then(|object| serde_json::to_value(object).ok()))
    });

    // The third round.
    let unbound = claims
        .iter()
        .flatten()
        .filter(|claim| claim.phase() != Some("Bound"))
        .map(|claim| about(&claim.key.name))
        .collect::<Vec<_>>();
    let of_claims = join_all(unbound.iter().map(|parameters| list(&events_api, parameters)));
    let (of_claims, volumes, absent_claims) = join!(
        of_claims,
        volumes(client, pod.as_ref().and_then(Option::as_ref), claims.as_deref().unwrap_or_default()),
        absent_claims(client, namespace, pod.as_ref().and_then(Option::as_ref), claims.as_deref())
    );
    if let Ok(events) = &mut events {
        events.extend(of_claims.into_iter().flatten().flatten());
    }
    Ok(Facts {
        events: known::<_, Event>(events, "list", here, &mut unread).unwrap_or_default(),
        volumes: volumes.and_then(|volumes| known::<_, PersistentVolume>(volumes, "get", None, &mut unread)),
        git,
        classes: known::<_, StorageClass>(classes, "list", None, &mut unread),
        nodes: nodes.and_then(|nodes| known::<_, Node>(nodes, "get and list", None, &mut unread)).map(Into::into),
        limits: known::<_, k8s_openapi::api::core::v1::LimitRange>(limits, "list", here, &mut unread),
        quotas: known::<_, k8s_openapi::api::core::v1::ResourceQuota>(quotas, "list", here, &mut unread),
        namespace: known::<_, Namespace>(found_namespace, "get", None, &mut unread),
        deployments,
        manager_pods: manager_pods.unwrap_or_default(),
        absent_claims,
        leases: known::<_, Lease>(leases, "list", None, &mut unread),
        vm,
        pod,
        claims,
        unread,
        now: now.unwrap_or_else(Timestamp::now),
    })
}

/// The Pod, if it is the VM's: its own, or one that a workload has made and that names it.
fn pod_of(vm: &VirtualMachine, pod: DynamicObject) -> Option<Object> {
    let pod = Object::trim(&object::pods(), pod);
    let is_of_maker = pod.maker.is_some() && pod.is_ours() && pod.vm() == Some(&vm.name_any());
    (is_of_maker || pod.is_owned_or_adoptable(&vm.uid().unwrap_or_default())).then_some(pod)
}

/// The Pod that was found by its name, or the one of another name that the status has. `None`: that could not be read.
async fn other_pod(
    pods: &Api<DynamicObject>,
    vm: &VirtualMachine,
    found: Option<Object>,
    unread: &mut Vec<String>,
) -> Option<Option<Object>> {
    let reporter = vm.status.as_ref().and_then(|status| status.reporter_uid.clone());
    let Some(uid) = reporter.filter(|uid| found.as_ref().is_none_or(|pod| pod.uid != *uid)) else { return Some(found) };
    let namespace = vm.namespace().unwrap_or_default();
    let mut note = |result| known::<_, Pod>(result, "list", Some(&namespace), unread);
    let all = note(pods.list_metadata(&ListParams::default()).await.map(|list| list.items))?;
    let Some(name) = all.iter().find(|pod| pod.uid().as_ref() == Some(&uid)).map(ResourceExt::name_any) else {
        return Some(found);
    };
    let other = known::<_, Pod>(pods.get_opt(&name).await, "get", Some(&namespace), unread)?;
    Some(other.map(|pod| Object::trim(&object::pods(), pod)).or(found))
}

/// The VM's claims, each by its name, because a tool may have overwritten its labels.
async fn own_claims(client: &Client, namespace: &str, vm: &VirtualMachine) -> kube::Result<Vec<Object>> {
    let api = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
    let names: Vec<String> = claims::possible_names(vm).collect();
    let found = try_join_all(names.iter().map(|name| belongings::named(&api, name))).await?;
    Ok(found.into_iter().flatten().filter(|claim| claims::is_of(vm, claim)).filter_map(trimmed_claim).collect())
}

/// Claims that a Pod without a node mounts beside the VM's own, and that do not exist.
async fn absent_claims(client: &Client, namespace: &str, pod: Option<&Object>, own: Option<&[Object]>) -> Vec<String> {
    let (Some(pod), Some(own)) = (pod.filter(|pod| pod.node_name().is_none()), own) else { return Vec::new() };
    let api = Api::<PersistentVolumeClaim>::namespaced(client.clone(), namespace);
    let others = other_claims(pod, own);
    let found = join_all(others.iter().map(|name| api.get_metadata_opt(name))).await;
    let absent = others.into_iter().zip(found).filter(|(_, found)| matches!(found, Ok(None)));
    absent.map(|(name, _)| name).collect()
}

/// The Pods of managers that do not work. `None`: nothing was asked.
async fn pods_of<'a>(
    client: &Client,
    deployments: impl Iterator<Item = &'a Deployment>,
) -> Option<kube::Result<Vec<Pod>>> {
    let namespaces: Vec<String> = deployments.filter(|it| lacks_pods(it)).filter_map(ResourceExt::namespace).collect();
    if namespaces.is_empty() {
        return None;
    }
    let of_managers = pods_of_managers();
    let pods = namespaces.iter().map(|namespace| {
        let (api, of_managers) = (Api::<Pod>::namespaced(client.clone(), namespace), &of_managers);
        async move { list(&api, of_managers).await }
    });
    Some(try_join_all(pods).await.map(|all| all.into_iter().flatten().collect()))
}

/// The volumes of the claims of a Pod without a node. `None`: nothing was asked.
async fn volumes(
    client: &Client,
    pod: Option<&Object>,
    claims: &[Object],
) -> Option<kube::Result<Vec<PersistentVolume>>> {
    pod.filter(|pod| pod.node_name().is_none())?;
    let names = surroundings::volumes(claims);
    if names.is_empty() {
        return None;
    }
    let api = Api::<PersistentVolume>::all(client.clone());
    let found = try_join_all(names.iter().map(|name| api.get_opt(name))).await;
    Some(found.map(|volumes| volumes.into_iter().flatten().collect()))
}

/// The GitOps object that applies the VM. `None`: there is nothing to ask for.
async fn applied(client: &Client, source: Option<&git::Source>) -> Option<kube::Result<Option<DynamicObject>>> {
    let source = source?;
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &source.namespace, &source.kind.resource());
    Some(match api.get_opt(&source.name).await {
        // The cluster does not have that kind.
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(None),
        result => result,
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
    ApiResource::erase::<Pod>(&())
}

fn trimmed_claim(claim: PersistentVolumeClaim) -> Option<Object> {
    let types = TypeMeta { api_version: "v1".into(), kind: "PersistentVolumeClaim".into() };
    Some(Object::trim(&types, serde_json::from_value(json!(claim)).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deployment_of_the_manager_is_told_from_that_of_the_web_interface() {
        let (name, value) = PROGRAM.split_once('=').unwrap();
        for (manifest, is_wanted) in [
            (include_str!("../../deploy/deployment.yaml"), true),
            (include_str!("../../deploy/web/deployment.yaml"), false),
        ] {
            let deployment: Deployment = serde_yaml::from_str(manifest).unwrap();
            assert_eq!(deployment.labels().get(name).map(String::as_str), Some(value), "it is in the list");
            assert_eq!(is_of_manager(&deployment), is_wanted, "{}", deployment.name_any());
            let template = deployment.spec.unwrap().template.metadata.unwrap().labels.unwrap();
            let is_listed = pods_of_managers().label_selector.unwrap().split(',').all(|pair| {
                pair.split_once('=').is_some_and(|(name, value)| template.get(name).is_some_and(|it| it == value))
            });
            assert_eq!(is_listed, is_wanted, "{template:?}");
        }
        assert!(!is_of_manager(&Deployment::default()));
    }

    #[test]
    fn the_time_is_that_of_the_answer() {
        let time = |text: &str| time_in(text).map(|time| time.to_string());
        assert_eq!(time("Fri, 15 Jan 2027 08:00:00 GMT").as_deref(), Some("2027-01-15T08:00:00Z"));
        assert_eq!((time("now"), time("")), (None, None));
    }
}
