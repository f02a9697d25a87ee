//! `kubectl vm diff`: what the manager would do to a VM's objects, found by its own plan and a dry run.

mod comparison;
pub(super) mod listing;
pub(super) mod rights;
mod summary;

use std::{collections::BTreeSet, path::PathBuf, sync::Arc};

use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use kube::{
    Api, Client, CustomResourceExt, ResourceExt,
    api::{DynamicObject, ListParams, Patch, PatchParams},
};
use serde_json::Value;

use self::{
    comparison::{Comparison, Renderer},
    listing::Lists,
    summary::{Line, table},
};
use super::{
    cluster::{Cluster, ClusterOptions},
    input::{Settings, read_vms},
    output::{Exit, Failure, Output, chain, difference, note, yaml},
    render::remove_release,
    vms::{name_of, vm_names},
};
use crate::{
    api::{StoredVm, VirtualMachine, VmPool, login_pools::LoginPools},
    client::discovery::Resources,
    object::{HASH_ANNOTATION, ObjectKey, Rendered, Update},
    ownership::OBJECT_MANAGER,
    plan::{Action, DeleteReason},
    process::ErrorChain,
    render::output::digest,
};

#[derive(Args)]
pub(super) struct Options {
    /// The VM in the cluster.
    #[arg(value_name = "VM", add = ArgValueCompleter::new(vm_names), required_unless_present_any = ["filename", "all"])]
    vm: Option<String>,
    /// A file with the VMs as they shall be.
    #[arg(long, short, value_name = "FILE", conflicts_with = "vm")]
    filename: Option<PathBuf>,
    /// All VMs of the namespace, with one line for each.
    #[arg(long, conflicts_with_all = ["vm", "filename"])]
    all: bool,
    #[command(flatten)]
    settings: Settings,
    #[command(flatten)]
    cluster: ClusterOptions,
    /// The manager's namespace, with its ConfigMaps. Default: the VM's namespace.
    #[arg(long, value_name = "NS")]
    manager_namespace: Option<String>,
}

pub(super) async fn run(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    // An error must not look like a difference.
    compare(options, output).await.map_err(Failure::undetermined)
}

async fn compare(options: &Options, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let connected = options.cluster.connect().await;
    let cluster = connected.map_err(|error| Failure::unknown(ErrorChain(&error).to_string()))?;
    if options.all {
        return run_for_all(options, &cluster, output).await;
    }
    let mut result = Exit::Success;
    let mut warned = BTreeSet::new();
    for vm in vms(options, &cluster).await? {
        result = result.max(match run_for_one(options, &cluster.client, vm, &mut warned, output).await {
            Ok(exit) => exit,
            // What is wrong with one VM is no reason to say nothing about the others.
            Err(Failure::Command { lines, exit: Exit::Negative }) => {
                lines.iter().for_each(|line| note(line));
                Exit::Unknown
            }
            Err(failure) => return Err(failure),
        });
    }
    Ok(result)
}

async fn run_for_one(
    options: &Options,
    client: &Client,
    vm: VirtualMachine,
    warned: &mut BTreeSet<String>,
    output: &mut Output<'_>,
) -> Result<Exit, Failure> {
    let namespace = vm.namespace().unwrap_or_default();
    let home = options.manager_namespace.as_ref().unwrap_or(&namespace);
    let renderer =
        Renderer::read(client, home, &options.settings, options.filename.as_deref(), Lists::of_one()).await?;
    for warning in renderer.warnings() {
        // The VMs of a file may be in several namespaces.
        if warned.insert(warning.clone()) {
            note(&format!("# warning: {warning}"));
        }
    }
    let mut vm = Arc::new(with_cluster_state(client, vm).await?);
    login_pools(client, &namespace).await?.log_in(&mut vm);
    let comparison = Comparison::of(client, &vm, &renderer).await?;
    let is_determined = print(client, &vm, &comparison, output).await?;
    Ok(if is_determined { Exit::negative_if(comparison.is_different()) } else { Exit::Unknown })
}

/// Prints a line for each VM of the namespace.
async fn run_for_all(options: &Options, cluster: &Cluster, output: &mut Output<'_>) -> Result<Exit, Failure> {
    let Cluster { client, namespace } = cluster;
    let home = options.manager_namespace.as_ref().unwrap_or(namespace);
    let renderer = Renderer::read(client, home, &options.settings, None, Lists::of_all()).await?;
    renderer.warnings().iter().for_each(|warning| note(&format!("# warning: {warning}")));
    let pools = login_pools(client, namespace).await?;
    let vms = Api::<StoredVm>::namespaced(client.clone(), namespace).list(&ListParams::default()).await;
    let vms = vms.map_err(|error| Failure::unknown(chain(format!("the VMs of {namespace}"), &error)))?;
    let (mut lines, mut result) = (Vec::new(), Exit::Success);
    for StoredVm(vm) in vms {
        let mut vm = Arc::new(vm);
        pools.log_in(&mut vm);
        match Comparison::of(client, &vm, &renderer).await {
            Ok(comparison) => {
                result = result.max(Exit::negative_if(comparison.is_different()));
                lines.push(Line::of(&vm, &comparison));
            }
            // What is wrong with one VM is no reason to say nothing about the others.
            Err(Failure::Command { lines: why, exit: Exit::Negative }) => {
                result = Exit::Unknown;
                lines.push(Line::refused(&vm, why.join("; ")));
            }
            Err(failure) => return Err(failure),
        }
    }
    write!(output, "{}", table(&lines))?;
    Ok(result)
}

/// The pools of a namespace that log users in. A person who may not list pools compares without them.
pub(super) async fn login_pools(client: &Client, namespace: &str) -> Result<LoginPools, Failure> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &VmPool::api_resource());
    let mut pools = LoginPools::default();
    match api.list(&ListParams::default()).await {
        Ok(found) => found.iter().for_each(|pool| pools.observe(pool)),
        Err(kube::Error::Api(answer)) if answer.is_not_found() => {}
        Err(kube::Error::Api(answer)) if answer.is_forbidden() => {
            note("# you may not list pools, so the users that they log in are not compared");
        }
        Err(error) => return Err(Failure::unknown(chain("the pools", &error))),
    }
    Ok(pools)
}

/// The VM of the cluster, or those of the file.
async fn vms(options: &Options, cluster: &Cluster) -> Result<Vec<VirtualMachine>, Failure> {
    let namespace = &cluster.namespace;
    if let Some(file) = &options.filename {
        return read_vms(file, namespace);
    }
    let Some(name) = options.vm.as_deref().map(name_of) else { return Ok(Vec::new()) };
    let vm = Api::namespaced(cluster.client.clone(), namespace).get(name).await;
    let StoredVm(vm) = vm.map_err(|error| Failure::unknown(chain(format!("vm {namespace}/{name}"), &error)))?;
    Ok(vec![vm])
}

/// A VM of a file with what only the cluster knows: its identity and its status.
async fn with_cluster_state(client: &Client, mut vm: VirtualMachine) -> Result<VirtualMachine, Failure> {
    if vm.metadata.uid.is_some() && vm.metadata.managed_fields.is_some() {
        return Ok(vm);
    }
    let (namespace, name) = (vm.namespace().unwrap_or_default(), vm.name_any());
    let found = Api::<StoredVm>::namespaced(client.clone(), &namespace).get_opt(&name).await;
    let found = found.map_err(|error| Failure::unknown(chain(format!("vm {namespace}/{name}"), &error)))?;
    let Some(StoredVm(found)) = found else { return Ok(vm) };
    if vm.metadata.uid.is_some() {
        // `kubectl get` leaves them out of what it prints.
        vm.metadata.managed_fields = found.metadata.managed_fields.filter(|_| vm.metadata.uid == found.metadata.uid);
        return Ok(vm);
    }
    let mut metadata = found.metadata;
    metadata.labels = vm.metadata.labels;
    metadata.annotations.get_or_insert_default().extend(vm.metadata.annotations.unwrap_or_default());
    Ok(VirtualMachine { metadata, spec: vm.spec, status: found.status })
}

/// Prints what the manager would do. Returns whether the API server accepts all of it.
async fn print(
    client: &Client,
    vm: &VirtualMachine,
    comparison: &Comparison<'_>,
    output: &mut Output<'_>,
) -> Result<bool, Failure> {
    let mut is_accepted = true;
    for action in comparison.plan.steps.iter().flatten() {
        match action {
            Action::Apply { object, uid } => {
                let meaning = if uid.is_some() { "changed at once" } else { "created" };
                writeln!(output, "{}: {meaning} ({})", object.key, object.template)?;
                is_accepted &= print_change(client, vm, comparison, object, output).await?;
            }
            Action::Label { key, patch, .. } => {
                write!(output, "{key}: labels and annotations changed at once\n{}", indent(&yaml(patch)?))?;
            }
            Action::Image { key, container, image, .. } => {
                writeln!(output, "{key}: the container {container} gets the image {image} at once; the guest goes on")?;
            }
            Action::Delete { key, reason, .. } => print_deletion(key, reason, output)?,
        }
    }
    print_pending(comparison, output)?;
    for kind in &comparison.unlisted {
        writeln!(
            output,
            "# not compared, because you may not list them: {kind} objects that no template renders any more"
        )?;
    }
    for message in &comparison.refusals {
        writeln!(output, "forbidden: {message}")?;
    }
    print_left_alone(comparison, output)?;
    Ok(is_accepted)
}

/// The lines of an object that an apply would change, by a dry run. Returns whether the API server accepts it.
async fn print_change(
    client: &Client,
    vm: &VirtualMachine,
    comparison: &Comparison<'_>,
    object: &Rendered,
    output: &mut Output<'_>,
) -> Result<bool, Failure> {
    let text = |object: &DynamicObject| yaml(&shown(serde_json::to_value(object).unwrap_or_default()));
    match dry_run(client, vm, comparison.resources, object).await {
        Ok(new) => {
            let old = comparison.current(&object.key).map(text).transpose()?.unwrap_or_default();
            write!(output, "{}", difference(&old, &text(&new)?))?;
            Ok(true)
        }
        Err(error) => {
            writeln!(output, "  the API server refuses it: {}", ErrorChain(&error))?;
            Ok(false)
        }
    }
}

fn print_deletion(key: &ObjectKey, reason: &DeleteReason, output: &mut Output<'_>) -> Result<(), Failure> {
    writeln!(output, "{key}: deleted: {}", why(reason))
}

fn why(reason: &DeleteReason) -> &'static str {
    match reason {
        DeleteReason::Stop => "the VM should be stopped",
        DeleteReason::Restart => "a restart is requested",
        DeleteReason::Ended => "it has ended, and is created again",
        DeleteReason::Changed => "no node can take it, and it is created again with its new spec",
        DeleteReason::Renewed => "it is created again before the guest starts",
        DeleteReason::Force => "without waiting for the guest",
        DeleteReason::NotRendered => "no template renders it any more",
    }
}

/// What a running VM takes over only when it starts again.
fn print_pending(comparison: &Comparison<'_>, output: &mut Output<'_>) -> Result<(), Failure> {
    let value = |value: &Option<Value>| value.as_ref().map_or_else(|| "nothing".into(), ToString::to_string);
    for change in &comparison.plan.pending {
        let (wanted, current) = (value(&change.wanted), value(&change.current));
        writeln!(output, "{}: at the next start: {wanted} instead of {current} ({})", change.path, change.reason)?;
    }
    Ok(())
}

/// Objects that differ and stay so, because they are only created.
fn print_left_alone(comparison: &Comparison<'_>, output: &mut Output<'_>) -> Result<(), Failure> {
    for object in comparison.rendered.iter().filter(|object| object.update == Update::Once) {
        let current = comparison.current(&object.key);
        let hash = current.and_then(|found| found.annotations().get(HASH_ANNOTATION));
        // A generated password differs with each rendering.
        if hash.is_some_and(|hash| *hash != object.hash) && object.key.kind != "Secret" {
            writeln!(output, "{}: never: it is created once and then left alone", object.key)?;
        }
    }
    Ok(())
}

/// The object as the API server would have it after an apply.
pub(super) async fn dry_run(
    client: &Client,
    vm: &VirtualMachine,
    resources: &Resources,
    object: &Rendered,
) -> kube::Result<DynamicObject> {
    let namespace = vm.namespace().unwrap_or_default();
    let resource = resources.of(&object.key.types()).await?;
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), &namespace, &resource);
    let params = PatchParams { dry_run: true, ..PatchParams::apply(OBJECT_MANAGER).force() };
    api.patch(&object.key.name, &params, &Patch::Apply(&object.value)).await
}

/// An object without its status and what the API server and the manager note in its metadata. Content of Secrets is hidden.
fn shown(mut object: Value) -> Value {
    if let Some(map) = object.as_object_mut() {
        map.remove("status");
        if map.get("kind").is_some_and(|kind| kind == "Secret")
            && let Some(Value::Object(data)) = map.get_mut("data")
        {
            // Two values can still be told apart.
            let hidden = |value: &Value| format!("(hidden, {})", digest(&value.to_string()));
            data.values_mut().for_each(|value| *value = hidden(value).into());
        }
    }
    if let Some(metadata) = object["metadata"].as_object_mut() {
        for field in ["managedFields", "resourceVersion", "uid", "creationTimestamp", "generation", "selfLink"] {
            metadata.remove(field);
        }
    }
    remove_release(&mut object);
    object
}

fn indent(text: &str) -> String {
    text.lines().map(|line| format!("  {line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn secrets_and_notes_are_not_shown() {
        let secret = |password: &str| {
            shown(json!({
                "kind": "Secret",
                "metadata": {
                    "name": "a", "uid": "b", "managedFields": [], "annotations": { HASH_ANNOTATION: "c" },
                },
                "data": { "password": password },
                "status": {},
            }))
        };
        let first = secret("c2VzYW1l");
        assert_eq!(first["metadata"], json!({ "name": "a" }));
        assert!(first.get("status").is_none() && !first.to_string().contains("c2VzYW1l"), "{first}");
        assert_eq!(first, secret("c2VzYW1l"));
        assert_ne!(first, secret("b3Blbg=="));
        let map = json!({ "kind": "ConfigMap", "metadata": {}, "data": { "a": "b" } });
        assert_eq!(shown(map.clone()), map);
    }
}
