//! Whether a guest can run in what a set renders: a Pod must have the container of the runner, and only one agent may follow it.

use serde_json::Value;

use super::{TemplateError, TemplateSet};
use crate::object::{AGENT_NAME, CONTAINER_NAME, INSTANCE_LABEL, Rendered};

/// The blocks of the built-in Pod in which the runner's container is.
const BLOCKS: [&str; 2] = ["containers", "spec"];

/// Whether a Pod has the container in which QEMU runs. The container of a legacy runner has the VM's name.
fn has_runner(object: &Rendered) -> bool {
    let containers = object.value.pointer("/spec/containers").and_then(Value::as_array);
    let vm = &object.value["metadata"]["labels"][INSTANCE_LABEL];
    let is_runner = |container: &Value| container["name"] == CONTAINER_NAME || container["name"] == *vm;
    object.key.is_pod() && containers.into_iter().flatten().any(is_runner)
}

/// Whether a guest can run in the object, or in Pods that the object makes. A Job ends, so it is none.
pub(super) fn runs_guest(object: &Rendered) -> bool {
    let makes_pods = object.value.pointer("/spec/template/spec/containers").is_some() && object.key.kind != "Job";
    makes_pods || has_runner(object)
}

/// Refuses Pods none of which has the runner's container. The manager would create the Pod, and the VM would never start.
///
/// # Errors
/// With the block that lost the container, if it is one.
pub(super) fn check(objects: &[Rendered], templates: &TemplateSet) -> Result<(), TemplateError> {
    let Some(pod) = objects.iter().find(|object| object.key.is_pod()) else { return Ok(()) };
    if let Some(pod) = objects.iter().find(|object| has_two_agents(object)) {
        let what = format!(
            "the container {CONTAINER_NAME} of {} must have `args: [machine]`, because the Pod has the container {AGENT_NAME}, too",
            pod.key
        );
        return Err(refusal(pod, templates, &what, "replaces the container", "write the arguments into its template"));
    }
    if objects.iter().any(runs_guest) {
        return Ok(());
    }
    let what = format!("{} has no container {CONTAINER_NAME}, so the VM would have no guest", pod.key);
    let otherwise = "its template must have that container, as builtin/pod.yaml.j2 has";
    let error = refusal(pod, templates, &what, "replaces it", otherwise);
    Err(TemplateError { loses_runner: true, ..error })
}

/// Whether a Pod has the agent in a container of its own, and a runner's container that does not leave that to it.
fn has_two_agents(object: &Rendered) -> bool {
    let containers = |list: &str| object.value["spec"][list].as_array().into_iter().flatten();
    let says = |container: &Value, word: &str| {
        let words = ["command", "args"].into_iter().filter_map(|field| container[field].as_array()).flatten();
        words.filter_map(Value::as_str).any(|text| text.contains(word))
    };
    object.key.is_pod()
        && containers("initContainers").any(|container| container["name"] == AGENT_NAME && says(container, "agent"))
        && containers("containers").any(|container| container["name"] == CONTAINER_NAME && !says(container, "machine"))
}

/// An error with the block or the patch that changed the runner's container, if there is one.
fn refusal(pod: &Rendered, templates: &TemplateSet, what: &str, how: &str, otherwise: &str) -> TemplateError {
    let refused = |advice: &str| TemplateError::refused(&pod.template, format!("{what}: {advice}"));
    for (name, outline) in templates.chain(&pod.name) {
        let lost = outline
            .blocks
            .iter()
            .find(|(block, _)| BLOCKS.contains(&block.name.as_str()) && !outline.supers.contains(&block.name));
        let file = templates.file_of(&name);
        if let Some((block, _)) = lost.filter(|_| !file.starts_with("builtin/")) {
            let advice = format!("the block `{}` {how}; write {{{{ super() }}}} in the block to keep it", block.name);
            let (line, column) = (Some(block.line), Some(block.column));
            return TemplateError { template: file.to_owned(), line, column, ..refused(&advice) };
        }
    }
    match pod.patches.last() {
        Some(patch) => TemplateError { template: patch.clone(), ..refused("a patch takes it away") },
        None => refused(otherwise),
    }
}
