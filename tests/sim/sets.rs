//! What people's template set has: the built-in templates with a change, some of which the manager must refuse.

use serde_json::{Value, json};

/// The content of the set.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Content {
    /// Names the Pod otherwise.
    Moved,
    /// Can't be rendered.
    Broken,
    /// Mounts a volume at the path with this number: a change of it is one of a list's key.
    Mount(u32),
    /// Has the same port for TCP and for UDP.
    TwoPorts,
    /// Makes a second Pod with the runner.
    TwoPods,
    /// Makes a StatefulSet with two replicas.
    TwoReplicas,
    /// Makes an object of this kind that does not let change what has this number.
    Fixed(&'static str, u32),
    /// Adds a variable to the Pod as long as the status has no pending changes.
    FeedsItself,
    /// Reads an address of the VM's status: only a guest that runs has one.
    Address,
}

/// All that a random scenario may use.
pub const CONTENTS: [Content; 18] = [
    Content::Moved,
    Content::Broken,
    Content::Mount(0),
    Content::Mount(1),
    Content::Mount(2),
    Content::TwoPorts,
    Content::TwoPods,
    Content::TwoReplicas,
    Content::Fixed("ConfigMap", 0),
    Content::Fixed("ConfigMap", 1),
    Content::Fixed("Secret", 0),
    Content::Fixed("Secret", 1),
    Content::Fixed("Service", 0),
    Content::Fixed("Service", 1),
    Content::Fixed("Job", 0),
    Content::Fixed("Job", 1),
    Content::FeedsItself,
    Content::Address,
];

const POD: &str = include_str!("../../templates/pod.yaml.j2");
const STATEFUL: &str = include_str!("../../example/templates/stateful-set/pod.yaml.j2");

/// A template with its text changed at one place.
fn changed(template: &str, from: &str, to: &str) -> String {
    assert!(template.contains(from), "{from}");
    template.replace(from, to)
}

fn named(name: &str) -> String {
    changed(
        POD,
        "name: {{ vm.metadata.name }}\n  labels",
        &format!("name: {{{{ vm.metadata.name ~ \"{name}\" }}}}\n  labels"),
    )
}

fn with_block(block: &str, text: &str) -> String {
    format!("{{% extends \"base/pod.yaml.j2\" %}}\n{{% block {block} %}}\n{text}\n{{% endblock %}}\n")
}

fn fixed(kind: &str, number: u32) -> String {
    let version = if kind == "Job" { "batch/v1" } else { "v1" };
    let rest = match (kind, number) {
        ("ConfigMap", number) => format!("immutable: true\ndata: {{a: '{number}'}}"),
        ("Secret", 0) => "type: Opaque".to_owned(),
        ("Secret", _) => "type: example.org/x".to_owned(),
        ("Service", 0) => "spec: {ports: [{port: 1}]}".to_owned(),
        ("Service", _) => "spec: {ports: [{port: 1}], clusterIP: None}".to_owned(),
        (_, number) => format!(
            "spec: {{template: {{spec: {{restartPolicy: Never, containers: [{{name: c, image: 'x:{number}'}}]}}}}}}"
        ),
    };
    format!("apiVersion: {version}\nkind: {kind}\nmetadata: {{name: {{{{ vm.metadata.name ~ '-fixed' }}}}}}\n{rest}\n")
}

impl Content {
    /// The data of the set's ConfigMap, as a merge patch of what it has.
    pub fn data(self) -> Value {
        let (pod, other) = match self {
            Self::Moved => (Some(named("-moved")), None),
            Self::Broken => (Some("{% if".to_owned()), None),
            Self::Mount(number) => {
                let mount = format!("        - {{name: extra, mountPath: /extra-{number}}}");
                let volumes = "{% block volumes %}\n    - {name: extra, emptyDir: {}}\n{% endblock %}\n";
                (Some(with_block("volume_mounts", &mount) + volumes), None)
            }
            Self::TwoPorts => {
                let ports = "      ports:\n        - {containerPort: 53, protocol: TCP}\n        - {containerPort: 53, protocol: UDP}";
                (Some(with_block("ports", ports)), None)
            }
            Self::TwoPods => (None, Some(named("-second"))),
            Self::TwoReplicas => {
                let replicas = "spec:\n  replicas: 2\n  podManagementPolicy: Parallel\n  serviceName";
                (Some(changed(STATEFUL, "spec:\n  serviceName", replicas)), None)
            }
            Self::Fixed(kind, number) => (None, Some(fixed(kind, number))),
            Self::FeedsItself => {
                let variable = "{{ super() }}\n{% if not (vm.status.pendingChanges is defined and vm.status.pendingChanges) %}\n        \
                                - {name: FRESH, value: \"yes\"}\n{% endif %}";
                (Some(with_block("environment", variable)), None)
            }
            Self::Address => {
                let map = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: {{ vm.metadata.name ~ '-address' }}}\ndata: {ip: {{ vm.status.addresses[0].address }}}\n";
                (None, Some(map.to_owned()))
            }
        };
        json!({ "pod.yaml.j2": pod, "other.yaml.j2": other })
    }
}
