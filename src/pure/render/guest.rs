//! Whether exactly one guest can run in what a set renders: one object is or makes one Pod with the container of the runner, and only one
//! agent follows it.
//!
//! | an object with the runner's container | |
//! |---|---|
//! | a Pod | runs the guest |
//! | a StatefulSet whose `updateStrategy` is not `OnDelete` | refused: a change of it ends the guest |
//! | any other StatefulSet, or a kind that is not Kubernetes' own, with one replica | makes the Pod; it makes no second one before the first is gone |
//! | a Deployment, ReplicaSet or ReplicationController | refused: it makes the next Pod while the last one still ends |
//! | a DaemonSet, Job or CronJob | refused: it makes a Pod on each node, or one that is not to last |
//! | a second one of these | refused |

use serde_json::Value;

use super::{TemplateError, TemplateSet, pod::is_guest};
use crate::object::{AGENT_NAME, CONTAINER_NAME, Rendered, is_workload};

/// The blocks of the built-in Pod in which the runner's container is.
const BLOCKS: [&str; 2] = ["containers", "spec"];

/// Refuses objects in which more than one guest of the VM could run.
///
/// # Errors
/// With the first object that would be one too many.
pub(super) fn check_only_one(objects: &[Rendered]) -> Result<(), TemplateError> {
    let refused = |object: &Rendered, message: String| Err(TemplateError::refused(&object.template, message));
    let mut guests = objects.iter().filter(|object| is_guest(object));
    let Some(first) = guests.next() else { return Ok(()) };
    if let Some(second) = guests.next() {
        let message = format!(
            "{} has the container of the runner, as {} of {} has: two guests would run with the VM's disks; to change the Pod, override \
             pod.yaml.j2 or its blocks",
            second.key, first.key, first.template
        );
        return refused(second, message);
    }
    if first.key.is_pod() {
        return Ok(());
    }
    let is_stateful = first.key.kind == "StatefulSet" && first.key.group() == Some("apps");
    if is_workload(&first.key) && !is_stateful {
        let why = match first.key.kind.as_str() {
            "DaemonSet" => "makes a Pod on each node",
            "Job" | "CronJob" => "makes Pods that are to end",
            _ => "makes the next Pod while the last one still ends",
        };
        let message =
            format!("{} {why}, so two guests could run: take a Pod, or a StatefulSet with one replica", first.key);
        return refused(first, message);
    }
    let strategy = &first.value["spec"]["updateStrategy"];
    if is_stateful && strategy["type"] != "OnDelete" {
        let message = format!(
            "{} has spec.updateStrategy: {strategy}, with which a change of it ends the guest: it must be {{type: OnDelete}}, or not there",
            first.key
        );
        return refused(first, message);
    }
    let many = ["replicas", "parallelism", "completions"].into_iter().find(|field| {
        let number = first.value["spec"].get(field);
        number.is_some_and(|number| *number != 1)
    });
    if let Some(field) = many {
        let message = format!(
            "{} has spec.{field}: {}, and a VM has one guest: it must be 1",
            first.key, first.value["spec"][field]
        );
        return refused(first, message);
    }
    let scales = |object: &&Rendered| {
        let target = &object.value["spec"]["scaleTargetRef"];
        target["kind"] == first.key.kind && target["name"] == first.key.name
    };
    match objects.iter().find(scales) {
        Some(scaler) => {
            refused(scaler, format!("{} changes how many Pods {} makes, and a VM has one guest", scaler.key, first.key))
        }
        None => Ok(()),
    }
}

/// Refuses Pods none of which has the runner's container: the manager would create the Pod, and the VM would never start. And objects in
/// which more than one guest could run.
///
/// # Errors
/// With the object, and with the block that lost the container, if it is one.
pub(super) fn check(objects: &[Rendered], templates: &TemplateSet) -> Result<(), TemplateError> {
    check_only_one(objects)?;
    let Some(pod) = objects.iter().find(|object| object.key.is_pod()) else { return Ok(()) };
    if let Some(pod) = objects.iter().find(|object| has_two_agents(object)) {
        let what = format!(
            "the container {CONTAINER_NAME} of {} must have `args: [machine]`, because the Pod has the container {AGENT_NAME}, too",
            pod.key
        );
        return Err(refusal(pod, templates, &what, "replaces the container", "write the arguments into its template"));
    }
    if objects.iter().any(is_guest) {
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

#[cfg(test)]
mod tests {
    use crate::{
        config::ReconcilerConfig,
        render::{Files, RandomInput, TemplateSet, render},
        test_support::{applied, nothing, rendered, vm},
    };

    /// The built-in Pod as the template of another kind.
    fn maker(kind: &str, group: &str, spec: &str) -> String {
        format!(
            "{{% set pod %}}{{% include 'builtin/pod.yaml.j2' %}}{{% endset %}}{{% set pod = pod | from_yaml %}}\napiVersion: {group}\n\
             kind: {kind}\nmetadata: {{name: x}}\nspec:\n  {spec}\n  template: {{spec: {{{{ pod.spec }}}}}}\n"
        )
    }

    fn error(files: &[(&str, &str)]) -> Option<String> {
        let files: Files = files.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect();
        let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
        // The VM has its claims, and its status says so.
        let claims: Vec<_> =
            rendered(&vm(|_| ()), &nothing()).into_iter().filter(|object| object.key.is_claim()).collect();
        let names: Vec<_> =
            claims.iter().map(|claim| serde_json::json!({ "name": claim.key.name, "uid": "u" })).collect();
        let vm = vm(|vm| vm["status"] = serde_json::json!({ "claims": names }));
        let observed = applied(&claims, |_, _| ());
        let set = TemplateSet::layered(&files, None).unwrap();
        let config = ReconcilerConfig { allowed_kinds: vec!["*".to_owned()].into(), ..ReconcilerConfig::default() };
        render(&vm, &observed, &config, &random, &set).err().map(|error| error.to_string())
    }

    #[test]
    fn exactly_one_object_makes_exactly_one_pod_with_the_runner() {
        let second = "{% set pod %}{% include 'builtin/pod.yaml.j2' %}{% endset %}{% set pod = pod | from_yaml %}\n\
                      apiVersion: v1\nkind: Pod\nmetadata: {name: second}\nspec: {{ pod.spec }}\n";
        let looped = "{% for n in [1, 2] %}\n---\n{% set pod %}{% include 'builtin/pod.yaml.j2' %}{% endset %}{% set pod = pod | from_yaml %}\n\
                      apiVersion: v1\nkind: Pod\nmetadata: {name: x{{ n }}}\nspec: {{ pod.spec }}\n{% endfor %}\n";
        let makes = |kind, group, spec| maker(kind, group, spec);
        let scaler = "apiVersion: autoscaling/v2\nkind: HorizontalPodAutoscaler\nmetadata: {name: h}\nspec: {maxReplicas: 2, \
                      scaleTargetRef: {apiVersion: apps/v1, kind: StatefulSet, name: x}}\n";
        let (one, stateful) = ("replicas: 1", makes("StatefulSet", "apps/v1", "replicas: 1"));
        for (files, says) in [
            (vec![("y.yaml.j2", second.to_owned())], "Pod second has the container of the runner"),
            (vec![("pod.yaml.j2", looped.to_owned())], "Pod x2 has the container of the runner"),
            (vec![("pod.yaml.j2", makes("StatefulSet", "apps/v1", "replicas: 2"))], "spec.replicas: 2"),
            (vec![("pod.yaml.j2", makes("StatefulSet", "apps/v1", "replicas: 0"))], "spec.replicas: 0"),
            (
                vec![("pod.yaml.j2", makes("StatefulSet", "apps/v1", "updateStrategy: {type: RollingUpdate}"))],
                "a change of it ends the guest",
            ),
            (
                vec![(
                    "pod.yaml.j2",
                    makes("StatefulSet", "apps/v1", "updateStrategy: {rollingUpdate: {partition: 0}}"),
                )],
                "a change of it ends the guest",
            ),
            (vec![("pod.yaml.j2", makes("Deployment", "apps/v1", one))], "while the last one still ends"),
            (vec![("pod.yaml.j2", makes("ReplicaSet", "apps/v1", one))], "while the last one still ends"),
            (vec![("pod.yaml.j2", makes("ReplicationController", "v1", one))], "while the last one still ends"),
            (vec![("pod.yaml.j2", makes("DaemonSet", "apps/v1", ""))], "on each node"),
            (vec![("pod.yaml.j2", makes("Job", "batch/v1", ""))], "Pods that are to end"),
            (vec![("y.yaml.j2", makes("Job", "batch/v1", ""))], "has the container of the runner, as"),
            (vec![("y.yaml.j2", makes("StatefulSet", "apps/v1", one))], "has the container of the runner, as"),
            (vec![("pod.yaml.j2", makes("Thing", "example.org/v1", "replicas: 3"))], "spec.replicas: 3"),
            (vec![("pod.yaml.j2", stateful.clone()), ("y.yaml.j2", scaler.to_owned())], "changes how many Pods"),
        ] {
            let files: Vec<(&str, &str)> = files.iter().map(|(name, text)| (*name, text.as_str())).collect();
            let error = error(&files).unwrap_or_default();
            assert!(error.contains(says), "{says}: {error}");
        }
        for pod in [stateful, makes("StatefulSet", "apps/v1", ""), makes("Thing", "example.org/v1", "")] {
            assert_eq!(error(&[("pod.yaml.j2", &pod)]), None);
        }
    }

    #[test]
    fn a_guest_gets_the_claims_that_the_vm_has_and_nothing_else_writes_to_them() {
        let other = "{% set pod %}{% include 'builtin/pod.yaml.j2' %}{% endset %}{% set pod = pod | from_yaml %}\napiVersion: v1\nkind: Pod\n\
                     metadata: {name: apple}\nspec: {{ pod.spec | merge({'volumes': []}) }}\n";
        let lost = error(&[("pod.yaml.j2", other)]).unwrap_or_default();
        assert!(lost.contains("Pod apple does not mount the claim apple-core-disk, which the VM has"), "{lost}");
        let patch = |patch: &str| error(&[("x.patch.yaml", &format!("target: {{kind: Pod}}\n{patch}\n"))]);
        let merge = |spec: &str| patch(&format!("strategicMerge: {{spec: {spec}}}"));
        let disk = "{name: core-disk, persistentVolumeClaim: {claimName: apple-core-disk, readOnly: true}}";
        let other = |list: &str, more: &str| format!("{{{list}: [{{name: other, image: x, {more}}}]}}");
        let device = "volumeDevices: [{name: core-disk, devicePath: /dev/x}]";
        let data = |more: &str| format!("volumeMounts: [{{name: vm-data, mountPath: /data{more}}}]");
        let copy = "{% set pod %}{% include 'builtin/pod.yaml.j2' %}{% endset %}{% set pod = pod | from_yaml %}\napiVersion: v1\nkind: Pod\n\
                    metadata: {name: apple}\nspec: {{ pod.spec | merge({'containers': pod.spec.containers + [pod.spec.containers[0] | merge({'name': 'vm-runner-2'})]}) }}\n";
        let bare = copy.replace("'vm-runner-2'", "'vm-runner-2', 'volumeDevices': [], 'volumeMounts': []");
        for (found, says) in [
            (merge(&format!("{{volumes: [{disk}]}}")), "its runner can't write to it"),
            (merge("{containers: [{name: vm-runner, volumeDevices: null}]}"), "its runner can't write to it"),
            (
                patch("jsonPatch: [{op: remove, path: /spec/containers/0/volumeMounts/1}]"),
                "its runner can't write to it",
            ),
            (
                merge(&other("containers", device)),
                "the container other of Pod apple can write to the claim apple-core-disk",
            ),
            (merge(&other("containers", &data(""))), "can write to the claim apple-runner-data"),
            (merge(&other("initContainers", &format!("restartPolicy: Always, {device}"))), "can write to the claim"),
            (error(&[("pod.yaml.j2", copy)]), "the container vm-runner-2 of Pod apple can write to the claim"),
            (error(&[("pod.yaml.j2", &bare)]), "runs the same as the runner's container"),
        ] {
            let found = found.unwrap_or_default();
            assert!(found.contains(says), "{says}: {found}");
        }
        for good in [
            other("containers", &data(", readOnly: true")),
            other("initContainers", device),
            other("containers", "tty: true"),
        ] {
            assert_eq!(merge(&good), None, "{good}");
        }
        let by_set = |template: &str| {
            error(&[(
                "pod.yaml.j2",
                &format!(
                    "{{% set pod %}}{{% include 'builtin/pod.yaml.j2' %}}{{% endset %}}{{% set pod = pod | from_yaml %}}\napiVersion: apps/v1\nkind: StatefulSet\n\
                 metadata: {{name: apple, annotations: {{vmoperator.jdrupes.org/lifetime: running}}}}\nspec:\n  updateStrategy: {{type: OnDelete}}\n  \
                 template: {{spec: {{{{ pod.spec }}}}}}\n  volumeClaimTemplates: [{{metadata: {{name: {template}}}}}]\n"
                ),
            )])
        };
        let replaced = by_set("core-disk").unwrap_or_default();
        assert!(replaced.contains("a claim for the volume with the VM's claim apple-core-disk"), "{replaced}");
        assert_eq!(by_set("scratch"), None);
        let helper = |kind: &str, group: &str, more: &str| {
            format!(
                "apiVersion: {group}\nkind: {kind}\nmetadata: {{name: helper}}\nspec:\n  template:\n    spec:\n      containers: [{{name: a, image: b}}]\n      \
                 volumes: [{{name: d, persistentVolumeClaim: {{claimName: apple-core-disk{more}}}}}]\n"
            )
        };
        for (kind, group) in [("Deployment", "apps/v1"), ("Job", "batch/v1")] {
            let writes = error(&[("y.yaml.j2", &helper(kind, group, ""))]).unwrap_or_default();
            assert!(writes.contains(&format!("{kind} helper can write to a claim of the VM's disks")), "{writes}");
            let reads = helper(kind, group, ", readOnly: true");
            assert_eq!(error(&[("y.yaml.j2", &reads)]), None);
            // It is no guest because its container is called as the VM.
            assert_eq!(error(&[("y.yaml.j2", &reads.replace("{name: a,", "{name: apple,"))]), None);
        }
    }

    #[test]
    fn one_helper_serves_a_disk_that_the_guest_does_not_mount() {
        let without = "{% set pod %}{% include 'builtin/pod.yaml.j2' %}{% endset %}{% set pod = pod | from_yaml %}\napiVersion: v1\nkind: Pod\n\
                       metadata: {name: apple}\nspec: {{ pod.spec | merge({'volumes': pod.spec.volumes | rejectattr('name', 'equalto', 'core-disk') | list}) }}\n";
        let pod = |name: &str, role: &str| {
            format!(
                "apiVersion: v1\nkind: Pod\nmetadata: {{name: {name}, annotations: {{{role}}}}}\nspec:\n  containers: [{{name: server, image: b}}]\n  \
                 volumes: [{{name: d, persistentVolumeClaim: {{claimName: apple-core-disk}}}}]\n"
            )
        };
        let helper = |name: &str| pod(name, "vmoperator.jdrupes.org/role: helper");
        assert_eq!(error(&[("pod.yaml.j2", without), ("y.yaml.j2", &helper("server"))]), None);
        let second = helper("second");
        for (files, says) in [
            (
                vec![("pod.yaml.j2", without), ("y.yaml.j2", &pod("server", ""))],
                "does not mount the claim apple-core-disk",
            ),
            (
                vec![("y.yaml.j2", &helper("server"))],
                "Pod server can write to a claim of the VM's disks beside Pod apple",
            ),
            (
                vec![("pod.yaml.j2", without), ("y.yaml.j2", &helper("server")), ("z.yaml.j2", &second)],
                "does not mount the claim apple-core-disk",
            ),
            (vec![("y.yaml.j2", &helper("apple"))], "Pod apple: a helper must have another name than its VM"),
            (
                vec![("y.yaml.j2", &helper("server").replace("{name: server, image", "{name: vm-runner, image"))],
                "Pod server: it has the container vm-runner, so it runs the guest and is no helper",
            ),
            (
                vec![("y.yaml.j2", &pod("server", "vmoperator.jdrupes.org/role: active"))],
                "Pod server: vmoperator.jdrupes.org/role is helper, not \"active\"",
            ),
            (
                vec![("y.yaml.j2", &helper("server").replace("kind: Pod", "kind: ConfigMap"))],
                "ConfigMap server: vmoperator.jdrupes.org/role is for Pods",
            ),
        ] {
            let found = error(&files).unwrap_or_default();
            assert!(found.contains(says), "{says}: {found}");
        }
    }
}
