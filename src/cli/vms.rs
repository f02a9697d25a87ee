//! Which VMs a command is about: names, labels, all; in one namespace or in every one. How they are read, and what is said if that fails.

use std::ffi::OsStr;

use clap::Args;
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use kube::{
    Api, Client, ResourceExt,
    api::{ApiResource, DynamicObject, ListParams},
};

use super::{
    cluster::{self, Cluster, ClusterOptions},
    output::{Exit, Failure, note},
};
use crate::{actions::FoundVm, api::VirtualMachine, client::access::Access, process::ErrorChain};

/// How many VMs a list has in one answer of the API server.
pub(super) const CHUNK: u32 = 500;

/// Which VMs are meant.
#[derive(Args)]
pub(super) struct Selection {
    /// The VMs.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names), conflicts_with_all = ["selector", "all", "all_namespaces"])]
    pub names: Vec<String>,
    /// VMs with these labels, such as tier=web or 'tier in (web, db)'.
    #[arg(long, short = 'l', value_name = "LABELS", conflicts_with = "all")]
    pub selector: Option<String>,
    /// All VMs of the namespace.
    #[arg(long)]
    pub all: bool,
    /// Of all namespaces.
    #[arg(long, short = 'A')]
    pub all_namespaces: bool,
    #[command(flatten)]
    pub cluster: ClusterOptions,
}

/// A VM as the API server has it.
///
/// # Errors
/// If the object is no VM.
pub(super) fn understood(object: DynamicObject) -> Result<FoundVm, Failure> {
    let title = title(&object.name_any());
    FoundVm::new(object).map_err(|error| Failure::new(format!("{title}: {error}")))
}

/// The VMs that were found.
pub(super) struct FoundVms {
    pub cluster: Cluster,
    pub vms: Vec<FoundVm>,
    /// How many names have no VM, or one that may not be read.
    pub missing: usize,
    /// How many of these have no VM: the API server said so.
    pub absent: usize,
}

/// How a VM is called in messages, `vm/NAME`, and in an argument if the person likes.
pub(super) fn title(name: &str) -> String {
    format!("vm/{name}")
}

/// The name in an argument: `apple`, `vm/apple` or what `--output=name` prints.
pub(super) fn name_of(argument: &str) -> &str {
    match argument.split_once('/') {
        Some(("vm" | "vms" | "virtualmachine" | "virtualmachine.vmoperator.jdrupes.org", name)) => name,
        _ => argument,
    }
}

/// The name in an argument, if a VM can have it: another one would be another request.
///
/// # Errors
/// If no VM can have it.
pub(super) fn checked_name(argument: &str) -> Result<&str, Failure> {
    let name = name_of(argument);
    let is_odd = |letter: char| !letter.is_ascii_graphic() || "/?#%".contains(letter);
    if name.is_empty() || name.starts_with('.') || name.contains(is_odd) {
        return Err(Failure::usage(format!(
            "{argument:?} is no name of a VM: write NAME or vm/NAME, and its namespace by -n"
        )));
    }
    Ok(name)
}

/// The resource, for objects with all their fields.
pub(super) fn resource() -> ApiResource {
    ApiResource::erase::<VirtualMachine>(&())
}

/// The VMs of a namespace.
pub(super) fn api(client: &Client, namespace: &str) -> Api<DynamicObject> {
    Api::namespaced_with(client.clone(), namespace, &resource())
}

/// The names of VMs that begin with what is typed.
pub(super) fn vm_names(current: &OsStr) -> Vec<CompletionCandidate> {
    let options = cluster::typed();
    cluster::ask(current, || async move {
        let cluster = options.connect().await.ok()?;
        cluster::names(Api::<VirtualMachine>::namespaced(cluster.client, &cluster.namespace)).await
    })
}

impl Selection {
    /// Makes a client. Nothing is asked of the API server yet.
    pub async fn connect(&self) -> Result<Cluster, Failure> {
        self.cluster.connect().await.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))
    }

    /// Reads the VMs. Those that are missing are reported at once, so that the others get what they should.
    ///
    /// # Errors
    /// If no VM is named in any way, or the API server refuses.
    pub async fn find(&self) -> Result<FoundVms, Failure> {
        if self.names.is_empty() && self.selector.is_none() && !self.all {
            return Err(Failure::usage("name a VM, or say which by --selector or --all"));
        }
        self.find_or_all().await
    }

    /// As [`Self::find`], but without a name it is all VMs of the namespace, or of all namespaces.
    pub async fn find_or_all(&self) -> Result<FoundVms, Failure> {
        let cluster = self.connect().await?;
        let mut found = FoundVms { cluster, vms: Vec::new(), missing: 0, absent: 0 };
        let Cluster { client, namespace } = &found.cluster;
        if self.names.is_empty() {
            let (api, place) = if self.all_namespaces {
                (Api::all_with(client.clone(), &resource()), None)
            } else {
                (api(client, namespace), Some(namespace.as_str()))
            };
            let mut parameters = ListParams { label_selector: self.selector.clone(), ..ListParams::default() };
            parameters.limit = Some(CHUNK);
            loop {
                let page = match api.list(&parameters).await {
                    Ok(page) => page,
                    Err(error) => {
                        return Err(failure(refused(client, "VMs", &["list"], place, &error).await, &error));
                    }
                };
                parameters.continue_token = page.metadata.continue_.clone().filter(|token| !token.is_empty());
                for object in page.items {
                    found.vms.push(understood(object)?);
                }
                if parameters.continue_token.is_none() {
                    break;
                }
            }
            if found.vms.is_empty() {
                note(&nothing("VMs", place, self.selector.as_deref()));
            }
            return Ok(found);
        }
        for argument in &self.names {
            let name = checked_name(argument)?;
            match api(client, namespace).get(name).await {
                Ok(object) => found.vms.push(understood(object)?),
                Err(error) => {
                    let line = refused(client, &title(name), &["get"], Some(namespace), &error).await;
                    if !matches!(error, kube::Error::Api(_)) {
                        return Err(failure(line, &error));
                    }
                    note(&line);
                    found.missing += 1;
                    found.absent += usize::from(is_absent(&error));
                }
            }
        }
        Ok(found)
    }
}

/// That there are none of these.
pub(super) fn nothing(what: &str, namespace: Option<&str>, selector: Option<&str>) -> String {
    let place = namespace.map(|namespace| format!(" in the namespace {namespace}")).unwrap_or_default();
    match selector {
        Some(selector) => format!("no {}{place} has the labels {selector}", what.trim_end_matches('s')),
        None => format!("no {what}{place}"),
    }
}

/// What the API server said about VMs, in a line. If a right is missing, the line has the rule that a role needs.
pub(super) async fn refused(
    client: &Client,
    what: &str,
    verbs: &[&str],
    namespace: Option<&str>,
    error: &kube::Error,
) -> String {
    refused_about(client, &resource(), what, verbs, namespace, error).await
}

/// The same about objects of another kind.
pub(super) async fn refused_about(
    client: &Client,
    resource: &ApiResource,
    what: &str,
    verbs: &[&str],
    namespace: Option<&str>,
    error: &kube::Error,
) -> String {
    match error {
        kube::Error::Api(answer) if answer.is_forbidden() => {
            let access = Access::of_person(client.clone());
            match access.missing_rule(resource, verbs, namespace).await {
                Some(rule) => format!("{what}: {rule}"),
                None => format!("{what}: {}", answer.message),
            }
        }
        kube::Error::Api(answer) if answer.is_not_found() && answer.details.is_none() => {
            format!("{what}: the cluster has no {}.{}: vm-operator is not installed", resource.plural, resource.group)
        }
        kube::Error::Api(answer) if answer.is_not_found() => {
            let place = namespace.map(|namespace| format!(" in the namespace {namespace}")).unwrap_or_default();
            format!("{what}: there is none{place}")
        }
        kube::Error::Api(answer) => format!("{what}: {}", answer.message),
        error => format!("{what}: {}", ErrorChain(error)),
    }
}

/// The end of a command with that line about an error: without an answer of the API server nothing is known.
pub(super) fn failure(line: String, error: &kube::Error) -> Failure {
    if matches!(error, kube::Error::Api(_)) { Failure::new(line) } else { Failure::unknown(line) }
}

/// Whether the API server said that there is no such object: it knows the kind.
fn is_absent(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(answer) if answer.is_not_found() && answer.details.is_some())
}

/// The exit code of a command for several VMs.
pub(super) fn exit(succeeded: usize, failed: usize) -> Exit {
    match (succeeded, failed) {
        (_, 0) => Exit::Success,
        (0, _) => Exit::Negative,
        _ => Exit::Partly,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_be_what_the_commands_print() {
        for argument in ["apple", "vm/apple", "vms/apple", "virtualmachine.vmoperator.jdrupes.org/apple"] {
            assert_eq!(name_of(argument), "apple");
        }
        assert_eq!(checked_name("vm/apple").unwrap(), "apple");
        for argument in ["", "vm/", "pod/apple", "apple/vms", "apple?dryRun=All", "a b", "a%2f", "..", "\u{e4}pple"] {
            let failure = checked_name(argument).unwrap_err();
            assert!(failure.words().ends_with("and its namespace by -n"), "{argument}");
            assert_eq!(failure.report(), Exit::Usage);
        }
    }

    #[test]
    fn the_exit_code_tells_apart_some_and_none() {
        assert_eq!(
            [exit(0, 0), exit(2, 0), exit(0, 1), exit(2, 1)],
            [Exit::Success, Exit::Success, Exit::Negative, Exit::Partly]
        );
    }
}
