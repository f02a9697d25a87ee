//! `kubectl vm explain` and `kubectl vm status`: read the facts and print what [`crate::explain`] makes of them.
//!
//! Three rounds of requests, each in parallel: the VM and what can be asked without knowing more; then what depends on them; then what depends
//! on the claims. What the VMs of a namespace have in common is read once. A request that is refused takes away only its facts. The time is that of the
//! API server, because its objects are compared with it.

use std::{collections::BTreeMap, fmt::Debug, pin::pin, sync::Arc};

use clap::Args;
use futures::{
    StreamExt,
    future::{join_all, try_join_all},
    join, stream,
};
use k8s_openapi::{
    NamespaceResourceScope,
    api::{
        apps::v1::Deployment,
        coordination::v1::Lease,
        core::v1::{Event, LimitRange, Namespace, Node, PersistentVolume, PersistentVolumeClaim, Pod, ResourceQuota},
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
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;
use tokio::sync::OnceCell;

use super::{
    belongings,
    cluster::Cluster,
    format::{self, DataFormat},
    in_pod::Target,
    output::{Exit, Failure, Output, note, plain},
    vms::{self, Selection, checked_name, refused, title, understood},
};
use crate::{
    actions::FoundVm,
    api::VirtualMachine,
    claims,
    explain::{
        Explanation, Facts, explain, git, lacks_pods,
        neighbours::{self, Neighbours},
        page::Page,
        surroundings::{self, other_claims},
    },
    object::{self, COMPONENT_LABEL},
    observed::Object,
    process::ErrorChain,
};

/// How many VMs are looked at at once.
const AT_ONCE: usize = 8;

#[derive(Args)]
pub(super) struct Options {
    #[command(flatten)]
    selection: Selection,
    /// Print it as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

#[derive(Args)]
pub(super) struct StatusOptions {
    #[command(flatten)]
    target: Target,
    /// Print it as data.
    #[arg(long, short, value_name = "FORMAT")]
    output: Option<DataFormat>,
}

/// What is said of one of several VMs.
#[derive(Serialize)]
struct Explained {
    namespace: String,
    name: String,
    #[serde(flatten)]
    explanation: Explanation,
}

impl Explained {
    /// All of it in one line, whatever others have written into it.
    fn line(&self, with_namespace: bool) -> String {
        let place = if with_namespace { format!("{}/", self.namespace) } else { String::new() };
        let line = self.explanation.line.lines().collect::<Vec<_>>().join(" ");
        plain(&format!("{place}{line}"))
    }
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Options { selection, output: format } = options;
    let [name] = selection.names.as_slice() else { return several(options, output).await };
    let Cluster { client, namespace } = selection.connect().await?;
    let explanation = explain(&gather(&client, &namespace, checked_name(name)?).await?);
    output.found(&explanation, format.as_ref())?;
    Ok(Exit::negative_if(explanation.cause.is_some()))
}

/// Several VMs, or those that a selector finds: a line for each, or a list with all that is known of them.
async fn several(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Options { selection, output: format } = options;
    let found = selection.find_or_all().await?;
    let client = &found.cluster.client;
    let (mut places, mut vms, everywhere) = (BTreeMap::new(), Vec::new(), Arc::default());
    for FoundVm { vm, .. } in found.vms {
        let namespace = vm.namespace().unwrap_or_default();
        let place = places
            .entry(namespace)
            .or_insert_with_key(|namespace| Arc::new(Place::new(client, namespace, &everywhere)));
        vms.push((Arc::clone(place), vm));
    }
    let explanations = stream::iter(vms).map(|(place, vm)| async move {
        let name = vm.name_any();
        let first = place.first(&name).await;
        let explanation = explain(&place.facts(vm, first).await);
        Explained { namespace: place.namespace.clone(), name, explanation }
    });
    let mut explanations = pin!(explanations.buffered(AT_ONCE));
    let (mut items, mut count, mut has_cause, mut is_incomplete) = (Vec::new(), 0, false, false);
    while let Some(explained) = explanations.next().await {
        count += 1;
        has_cause |= explained.explanation.cause.is_some();
        is_incomplete |= !explained.explanation.unread.is_empty();
        if format.is_some() {
            items.push(json!(explained));
        } else {
            writeln!(output, "{}", explained.line(selection.all_namespaces))?;
            output.flush()?;
        }
    }
    if let Some(format) = format {
        format.print(&format::list(&items), output)?;
    } else if is_incomplete {
        note("not everything could be read that may be a cause: `kubectl vm explain NAME` says what of a VM");
    }
    Ok(match vms::exit(count, found.missing) {
        Exit::Success => Exit::negative_if(has_cause),
        exit => exit,
    })
}

/// `kubectl vm status`: the same facts on a page.
///
/// # Errors
/// If the VM can't be read.
pub(super) async fn status(options: &StatusOptions, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let vm = options.target.handle().await?;
    let facts = gather(vm.client(), vm.namespace(), vm.name()).await?;
    output.found(&Page::of(&facts), options.output.as_ref())?;
    Ok(Exit::Success)
}

/// What was read, or a line that says why it was not.
type Read<T> = Result<T, String>;

/// Keeps what was read, and notes what was not.
fn kept<T>(read: Read<T>, unread: &mut Vec<String>) -> Option<T> {
    match read {
        Ok(found) => Some(found),
        Err(line) => {
            unread.push(line);
            None
        }
    }
}

/// The same of an answer of the API server.
fn known<T, R: Resource<DynamicType = ()>>(
    result: kube::Result<T>,
    verb: &str,
    place: Option<&str>,
    unread: &mut Vec<String>,
) -> Option<T> {
    kept(read::<T, R>(result, verb, place), unread)
}

fn read<T, R: Resource<DynamicType = ()>>(result: kube::Result<T>, verb: &str, place: Option<&str>) -> Read<T> {
    read_of(&R::plural(&()), result, verb, place)
}

/// The same of a kind whose plural is given.
fn read_of<T>(plural: &str, result: kube::Result<T>, verb: &str, place: Option<&str>) -> Read<T> {
    result.map_err(|error| {
        let place = place.map_or_else(|| "in the cluster".to_owned(), |place| format!("in the namespace {place}"));
        match &error {
            kube::Error::Api(answer) if answer.is_forbidden() => format!("{plural} {place}: you may not {verb} them"),
            kube::Error::Api(answer) => format!("{plural} {place}: {}", answer.message),
            error => format!("{plural} {place}: {}", ErrorChain(error)),
        }
    })
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
    let place = Place::new(client, namespace, &Arc::default());
    let vms = vms::api(client, namespace);
    let (vm, first) = join!(vms.get(name), place.first(name));
    match vm {
        Ok(object) => Ok(place.facts(understood(object)?.vm, first).await),
        Err(error) => {
            let line = refused(client, &title(name), &["get"], Some(namespace), &error).await;
            Err(vms::failure(line, &error))
        }
    }
}

/// A namespace with VMs. What they have in common is read once, when the first of them needs it.
struct Place {
    client: Client,
    namespace: String,
    common: OnceCell<Common>,
    neighbours: OnceCell<InTheWay>,
    everywhere: Arc<Everywhere>,
}

/// The Pods that have a node, and a line if not all of them may be read.
type InTheWay = (Option<Neighbours>, Option<String>);

/// What VMs of all namespaces have in common, and what is much.
#[derive(Default)]
struct Everywhere {
    nodes: OnceCell<Read<Arc<[Node]>>>,
    pods: OnceCell<Result<Neighbours, UnreadPods>>,
}

/// Why the Pods of all namespaces are not known.
struct UnreadPods {
    is_forbidden: bool,
    /// It, in words.
    line: Option<String>,
}

/// What is asked without knowing a VM.
struct Common {
    classes: Read<Vec<StorageClass>>,
    limits: Read<Vec<LimitRange>>,
    quotas: Read<Vec<ResourceQuota>>,
    namespace: Read<Namespace>,
    deployments: Read<Vec<Deployment>>,
    manager_pods: Vec<Pod>,
    leases: Read<Vec<Lease>>,
    now: Option<Timestamp>,
}

/// What is asked knowing only the name of a VM.
struct First {
    pod: kube::Result<Option<DynamicObject>>,
    pod_of_set: kube::Result<Option<DynamicObject>>,
    events: kube::Result<Vec<Event>>,
}

/// The events about the objects of that name.
fn about(name: &str) -> ListParams {
    ListParams::default().fields(&format!("involvedObject.name={name}")).limit(vms::CHUNK)
}

impl Place {
    fn new(client: &Client, namespace: &str, everywhere: &Arc<Everywhere>) -> Self {
        let namespace = namespace.to_owned();
        Self {
            client: client.clone(),
            namespace,
            common: OnceCell::new(),
            neighbours: OnceCell::new(),
            everywhere: Arc::clone(everywhere),
        }
    }

    fn pods(&self) -> Api<DynamicObject> {
        Api::namespaced_with(self.client.clone(), &self.namespace, &resource_of_pods())
    }

    fn events(&self) -> Api<Event> {
        Api::namespaced(self.client.clone(), &self.namespace)
    }

    async fn common(&self) -> &Common {
        self.common.get_or_init(|| self.read_common()).await
    }

    async fn read_common(&self) -> Common {
        let (client, namespace) = (&self.client, self.namespace.as_str());
        let here = Some(namespace);
        let (classes, namespaces) = (Api::<StorageClass>::all(client.clone()), Api::<Namespace>::all(client.clone()));
        let limits = Api::<LimitRange>::namespaced(client.clone(), namespace);
        let quotas = Api::<ResourceQuota>::namespaced(client.clone(), namespace);
        let (all, lease) = (ListParams::default(), ListParams::default().fields("metadata.name=vm-operator"));
        let (classes, limits, quotas, found, deployments, leases, now) = join!(
            list(&classes, &all),
            list(&limits, &all),
            list(&quotas, &all),
            namespaces.get(namespace),
            deployments(client, namespace),
            anywhere::<Lease>(client, namespace, &lease, |_| true),
            time_of(client),
        );
        let deployments = read::<_, Deployment>(deployments, "list", None);
        // They only say more of what the Deployment says.
        let manager_pods = pods_of(client, deployments.iter().flatten()).await.and_then(Result::ok);
        Common {
            classes: read::<_, StorageClass>(classes, "list", None),
            limits: read::<_, LimitRange>(limits, "list", here),
            quotas: read::<_, ResourceQuota>(quotas, "list", here),
            namespace: read::<_, Namespace>(found, "get", None),
            deployments,
            manager_pods: manager_pods.unwrap_or_default(),
            leases: read::<_, Lease>(leases, "list", None),
            now,
        }
    }

    /// The first round.
    async fn first(&self, name: &str) -> First {
        let (pods, events) = (self.pods(), self.events());
        // A StatefulSet of a release before 3.4 made the first one of its Pods.
        let (of_set, about_vm) = (format!("{name}-0"), about(name));
        let (pod, pod_of_set, events, _) =
            join!(pods.get_opt(name), pods.get_opt(&of_set), list(&events, &about_vm), self.common());
        First { pod, pod_of_set, events }
    }

    /// The rest, and all of it together.
    async fn facts(&self, vm: VirtualMachine, first: First) -> Facts {
        let (client, namespace) = (&self.client, self.namespace.as_str());
        let (here, mut unread) = (Some(namespace), Vec::new());
        let First { pod, pod_of_set, mut events } = first;
        let pod = known::<_, Pod>(pod, "get", here, &mut unread);
        let pod =
            pod.map(|pod| [pod, pod_of_set.ok().flatten()].into_iter().flatten().find_map(|pod| pod_of(&vm, pod)));
        let pod = match pod {
            Some(found) => other_pod(&self.pods(), &vm, found, &mut unread).await,
            None => None,
        };
        let common = self.common().await;

        // The second round.
        let (source, found_pod) = (git::GitApplier::of(&vm), pod.as_ref().and_then(Option::as_ref));
        let deployments = kept(common.deployments.clone(), &mut unread);
        let (claims, nodes, in_the_way, applied) = join!(
            own_claims(client, namespace, &vm),
            self.nodes(found_pod),
            self.in_the_way(found_pod),
            applied(client, source.as_ref())
        );
        let claims = known::<_, PersistentVolumeClaim>(claims, "list", here, &mut unread);
        let git = source.map(|source| {
            let plural = source.kind.resource().plural;
            let read = applied.map(|found| read_of(&plural, found, "get", Some(&source.namespace)));
            let object = read.and_then(|read| kept(read, &mut unread)).flatten();
            (source, object.and_then(|object| serde_json::to_value(object).ok()))
        });

        let (neighbours, line) = in_the_way.cloned().unwrap_or_default();
        unread.extend(line);

        // The third round.
        let unbound = claims
            .iter()
            .flatten()
            .filter(|claim| claim.phase() != Some("Bound"))
            .map(|claim| about(&claim.key.name))
            .collect::<Vec<_>>();
        let events_api = self.events();
        let of_claims = join_all(unbound.iter().map(|parameters| list(&events_api, parameters)));
        let (of_claims, volumes, absent_claims) = join!(
            of_claims,
            volumes(client, found_pod, claims.as_deref().unwrap_or_default()),
            absent_claims(client, namespace, found_pod, claims.as_deref())
        );
        if let Ok(events) = &mut events {
            events.extend(of_claims.into_iter().flatten().flatten());
        }
        Facts {
            events: known::<_, Event>(events, "list", here, &mut unread).unwrap_or_default(),
            volumes: volumes.and_then(|volumes| known::<_, PersistentVolume>(volumes, "get", None, &mut unread)),
            git,
            classes: kept(common.classes.clone(), &mut unread),
            nodes: nodes.and_then(|nodes| kept(nodes, &mut unread)),
            neighbours,
            limits: kept(common.limits.clone(), &mut unread),
            quotas: kept(common.quotas.clone(), &mut unread),
            namespace: kept(common.namespace.clone(), &mut unread),
            deployments,
            manager_pods: common.manager_pods.clone(),
            absent_claims,
            leases: kept(common.leases.clone(), &mut unread),
            vm,
            pod,
            claims,
            unread,
            now: common.now.unwrap_or_else(Timestamp::now),
        }
    }

    /// The node of a Pod, or all nodes if it has none yet. `None`: nothing was asked.
    async fn nodes(&self, pod: Option<&Object>) -> Option<Read<Arc<[Node]>>> {
        let api: Api<Node> = Api::all(self.client.clone());
        let told = |found: kube::Result<Vec<Node>>| read::<_, Node>(found.map(Arc::from), "get and list", None);
        Some(match pod?.node_name() {
            Some(node) => told(api.get_opt(node).await.map(|node| node.into_iter().collect())),
            None => {
                let all =
                    self.everywhere.nodes.get_or_init(|| async { told(list(&api, &ListParams::default()).await) });
                all.await.clone()
            }
        })
    }

    /// The Pods that have a node, if the scheduler's words about a Pod are about them. `None`: nothing was asked.
    async fn in_the_way(&self, pod: Option<&Object>) -> Option<&InTheWay> {
        pod.filter(|pod| neighbours::concern(pod))?;
        Some(self.neighbours.get_or_init(|| self.read_neighbours()).await)
    }

    /// Those of all namespaces, or if that is forbidden those of this one.
    async fn read_neighbours(&self) -> InTheWay {
        let UnreadPods { is_forbidden, line } = match self.everywhere.pods.get_or_init(|| self.read_pods()).await {
            Ok(all) => return (Some(all.clone()), None),
            Err(unread) => unread,
        };
        let api = Api::namespaced(self.client.clone(), &self.namespace);
        let own = if *is_forbidden { scheduled(&api).await.ok() } else { None };
        (own.map(|pods| Neighbours::new(pods, false)), line.clone())
    }

    async fn read_pods(&self) -> Result<Neighbours, UnreadPods> {
        let pods = scheduled(&Api::all(self.client.clone())).await.map_err(|error| UnreadPods {
            is_forbidden: matches!(&error, kube::Error::Api(answer) if answer.is_forbidden()),
            line: read::<(), Pod>(Err(error), "list", None).err(),
        })?;
        Ok(Neighbours::new(pods, true))
    }
}

/// The Pods that have a node, without what nobody looks at.
async fn scheduled(api: &Api<Pod>) -> kube::Result<Vec<Pod>> {
    let mut parameters = ListParams::default().fields(Neighbours::field_selector()).limit(vms::CHUNK);
    let mut pods = Vec::new();
    loop {
        let page = api.list(&parameters).await?;
        parameters.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        pods.extend(page.items.into_iter().map(Neighbours::reduced));
        if parameters.continue_token.is_none() {
            return Ok(pods);
        }
    }
}

/// The Pod, if it is the VM's: its own, or one that a workload has made and that its status names.
fn pod_of(vm: &VirtualMachine, pod: DynamicObject) -> Option<Object> {
    Some(Object::trim(&object::pods(), pod)).filter(|pod| pod.is_of(vm))
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
async fn applied(client: &Client, source: Option<&git::GitApplier>) -> Option<kube::Result<Option<DynamicObject>>> {
    let source = source?;
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &source.namespace, &source.kind.resource());
    Some(match api.get_opt(&source.name).await {
        // The cluster does not have that kind.
        Err(kube::Error::Api(answer)) if answer.code == 404 => Ok(None),
        result => result,
    })
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
    fn vms_are_named_or_selected() {
        let names = |line: &str| crate::cli::parsed::<Options>(line).map(|options| options.selection.names.len());
        for (line, expected) in
            [("", 0), ("apple", 1), ("apple vm/pear", 2), ("-A", 0), ("-l tier=web -A", 0), ("--all", 0)]
        {
            assert_eq!(names(line).ok(), Some(expected), "{line}");
        }
        for line in ["apple -A", "apple -l tier=web", "apple --all", "--all -l tier=web"] {
            assert!(names(line).is_err(), "{line}");
        }
    }

    #[test]
    fn one_of_several_vms_has_one_line() {
        let explained = |line: &str| Explained {
            namespace: "vms".into(),
            name: "apple".into(),
            explanation: Explanation {
                line: line.into(),
                cause: None,
                chain: Vec::new(),
                also: Vec::new(),
                unread: Vec::new(),
            },
        };
        let line = "apple does not run: two\nlines\u{1b}[2J";
        assert_eq!(explained(line).line(false), "apple does not run: two lines\u{fffd}[2J");
        assert_eq!(explained(line).line(true), "vms/apple does not run: two lines\u{fffd}[2J");
        let data = json!(explained("apple runs"));
        assert_eq!(
            data,
            json!({ "namespace": "vms", "name": "apple", "line": "apple runs", "chain": [], "also": [], "unread": [] })
        );
    }

    #[test]
    fn the_time_is_that_of_the_answer() {
        let time = |text: &str| time_in(text).map(|time| time.to_string());
        assert_eq!(time("Fri, 15 Jan 2027 08:00:00 GMT").as_deref(), Some("2027-01-15T08:00:00Z"));
        assert_eq!((time("now"), time("")), (None, None));
    }
}
