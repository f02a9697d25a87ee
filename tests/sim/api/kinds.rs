//! The kinds that the API server serves, and what of their schemas matters to writes: which lists are maps, and which values are defaults.

use std::{collections::BTreeMap, sync::OnceLock};

use serde_json::{Value, json};

/// How server-side apply sees a field
/// (<https://kubernetes.io/docs/reference/using-api/server-side-apply/#merge-strategy>).
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// One value, whatever is in it.
    Atomic,
    /// A list of objects that have these keys.
    Map(Vec<String>),
    /// A list of scalars without order.
    Set,
}

/// A kind of objects.
#[derive(Debug)]
pub struct Kind {
    pub group: &'static str,
    pub version: &'static str,
    pub name: &'static str,
    pub plural: &'static str,
    pub is_namespaced: bool,
    /// Whether its status is written by a subresource only.
    pub has_status: bool,
    /// Whether it counts the changes of its spec.
    pub has_generation: bool,
    /// The fields that are neither scalars nor maps of which each entry has its owner. A list's items have the path of the list and `[]`.
    pub shapes: BTreeMap<String, Shape>,
    /// The schema, of a kind that a CRD defines.
    schema: Option<Value>,
}

impl Kind {
    pub fn api_version(&self) -> String {
        if self.group.is_empty() { self.version.to_owned() } else { format!("{}/{}", self.group, self.version) }
    }

    /// How it is named in messages: `pods`, `vms.vmoperator.jdrupes.org`.
    pub fn resource(&self) -> String {
        if self.group.is_empty() { self.plural.to_owned() } else { format!("{}.{}", self.plural, self.group) }
    }

    /// The schema, of a kind that a CRD defines.
    pub fn schema(&self) -> Option<&Value> {
        self.schema.as_ref()
    }

    /// Whether no CRD defines it.
    pub fn is_builtin(&self) -> bool {
        self.schema.is_none()
    }

    /// Removes maps and lists that the API server leaves out if they are empty.
    pub fn leave_out_empty(&self, object: &mut Value) {
        let of_metadata: &[&str] = &["labels", "annotations", "finalizers", "ownerReferences"];
        let own: &[&str] = if self.is_builtin() { &["data", "binaryData"] } else { &[] };
        for (pointer, fields) in [("/metadata", of_metadata), ("", own)] {
            let Some(part) = object.pointer_mut(pointer).and_then(Value::as_object_mut) else { continue };
            part.retain(|name, value| {
                let is_empty = match value {
                    Value::Null => true,
                    Value::Object(map) => map.is_empty(),
                    Value::Array(items) => items.is_empty(),
                    _ => false,
                };
                !(is_empty && fields.contains(&name.as_str()))
            });
        }
    }

    /// Fills in what the API server fills in by itself.
    pub fn fill_in(&self, object: &mut Value) {
        if let Some(schema) = &self.schema {
            return fill_in_defaults(schema, object);
        }
        match self.name {
            "Pod" => fill_in_pod(&mut object["spec"]),
            "PersistentVolumeClaim" => {
                or_insert(&mut object["spec"], "volumeMode", json!("Filesystem"));
                or_insert(&mut object["spec"], "storageClassName", json!("standard"));
            }
            "Service" => {
                or_insert(&mut object["spec"], "type", json!("ClusterIP"));
                or_insert(&mut object["spec"], "sessionAffinity", json!("None"));
                or_insert(&mut object["spec"], "clusterIP", json!("10.96.0.8"));
            }
            "Secret" => or_insert(object, "type", json!("Opaque")),
            _ => {}
        }
    }
}

fn or_insert(object: &mut Value, field: &str, value: Value) {
    if object[field].is_null() {
        object[field] = value;
    }
}

fn fill_in_pod(spec: &mut Value) {
    for (field, value) in [
        ("restartPolicy", json!("Always")),
        ("terminationGracePeriodSeconds", json!(30)),
        ("dnsPolicy", json!("ClusterFirst")),
        ("schedulerName", json!("default-scheduler")),
    ] {
        or_insert(spec, field, value);
    }
    for list in ["containers", "initContainers"] {
        for container in spec.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            or_insert(container, "terminationMessagePath", json!("/dev/termination-log"));
            for port in container.get_mut("ports").and_then(Value::as_array_mut).into_iter().flatten() {
                or_insert(port, "protocol", json!("TCP"));
            }
        }
    }
}

/// Structural defaulting (<https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#defaulting>).
fn fill_in_defaults(schema: &Value, value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
                if let Some(default) = schema.get("default")
                    && map.get(name).is_none_or(|value| value.is_null() && schema["nullable"] != true)
                {
                    map.insert(name.clone(), default.clone());
                }
                if let Some(value) = map.get_mut(name) {
                    fill_in_defaults(schema, value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill_in_defaults(&schema["items"], item)),
        _ => {}
    }
}

/// The index of a kind in [`kinds`].
pub type KindId = usize;

/// All kinds.
pub fn kinds() -> &'static [Kind] {
    static KINDS: OnceLock<Vec<Kind>> = OnceLock::new();
    KINDS.get_or_init(|| {
        let builtin = BUILTIN.iter().map(|(group, version, name, plural, is_namespaced)| Kind {
            group,
            version,
            name,
            plural,
            is_namespaced: *is_namespaced,
            has_status: HAS_STATUS.contains(name),
            has_generation: ["Pod", "StatefulSet"].contains(name),
            shapes: builtin_shapes(name),
            schema: None,
        });
        builtin.chain(CRDS.iter().map(|text| defined(text))).collect()
    })
}

/// The kind of that name.
pub fn kind(name: &str) -> KindId {
    let found = kinds().iter().position(|kind| kind.name == name);
    found.unwrap_or_else(|| panic!("the simulation has no kind {name}"))
}

/// The kind with this group, version and plural.
pub fn served(group: &str, version: &str, plural: &str) -> Option<KindId> {
    kinds().iter().position(|kind| (kind.group, kind.version, kind.plural) == (group, version, plural))
}

const BUILTIN: [(&str, &str, &str, &str, bool); 16] = [
    ("", "v1", "Pod", "pods", true),
    ("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims", true),
    ("", "v1", "ConfigMap", "configmaps", true),
    ("", "v1", "Secret", "secrets", true),
    ("", "v1", "Service", "services", true),
    ("", "v1", "ResourceQuota", "resourcequotas", true),
    ("", "v1", "Namespace", "namespaces", false),
    ("", "v1", "Node", "nodes", false),
    ("", "v1", "PersistentVolume", "persistentvolumes", false),
    ("", "v1", "Event", "events", true),
    ("events.k8s.io", "v1", "NewEvent", "events", true),
    ("apps", "v1", "StatefulSet", "statefulsets", true),
    ("batch", "v1", "Job", "jobs", true),
    ("authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", false),
    ("coordination.k8s.io", "v1", "Lease", "leases", true),
    ("storage.k8s.io", "v1", "StorageClass", "storageclasses", false),
];

const HAS_STATUS: [&str; 7] =
    ["Pod", "PersistentVolumeClaim", "Service", "Node", "PersistentVolume", "StatefulSet", "Job"];

const CRDS: [&str; 3] = [
    include_str!("../../../crds/vms-crd.yaml"),
    include_str!("../../../crds/vmpools-crd.yaml"),
    include_str!("../../../crds/vmreports-crd.yaml"),
];

fn defined(text: &str) -> Kind {
    let definition: Value = serde_yaml::from_str(text).unwrap();
    let leak = |value: &Value| -> &'static str { Box::leak(value.as_str().unwrap().to_owned().into_boxed_str()) };
    let (spec, names) = (&definition["spec"], &definition["spec"]["names"]);
    let version = &spec["versions"][0];
    let schema = &version["schema"]["openAPIV3Schema"];
    let mut shapes = metadata_shapes();
    collect_shapes(schema, String::new(), &mut shapes);
    Kind {
        group: leak(&spec["group"]),
        version: leak(&version["name"]),
        name: leak(&names["kind"]),
        plural: leak(&names["plural"]),
        is_namespaced: true,
        has_status: !version["subresources"]["status"].is_null(),
        has_generation: true,
        shapes,
        schema: Some(schema.clone()),
    }
}

fn collect_shapes(schema: &Value, path: String, shapes: &mut BTreeMap<String, Shape>) {
    if schema["x-kubernetes-map-type"] == "atomic" {
        shapes.insert(path.clone(), Shape::Atomic);
    }
    let keys = schema["x-kubernetes-list-map-keys"].as_array().into_iter().flatten();
    match schema["x-kubernetes-list-type"].as_str() {
        Some("map") => {
            shapes.insert(path.clone(), Shape::Map(keys.map(|key| key.as_str().unwrap().to_owned()).collect()));
        }
        Some("set") => drop(shapes.insert(path.clone(), Shape::Set)),
        _ => {}
    }
    for (name, schema) in schema["properties"].as_object().into_iter().flatten() {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        collect_shapes(schema, path, shapes);
    }
    if schema["items"].is_object() {
        collect_shapes(&schema["items"], format!("{path}[]"), shapes);
    }
}

fn metadata_shapes() -> BTreeMap<String, Shape> {
    [
        ("metadata.ownerReferences".to_owned(), Shape::Map(vec!["uid".into()])),
        ("metadata.ownerReferences[]".to_owned(), Shape::Atomic),
        ("metadata.finalizers".to_owned(), Shape::Set),
    ]
    .into()
}

/// From the OpenAPI document of Kubernetes, as far as the templates use the fields.
fn builtin_shapes(kind: &str) -> BTreeMap<String, Shape> {
    let mut shapes = metadata_shapes();
    let mut map = |path: &str, keys: &[&str]| {
        shapes.insert(path.to_owned(), Shape::Map(keys.iter().map(|key| (*key).to_owned()).collect()))
    };
    match kind {
        "Pod" => {
            map("spec.volumes", &["name"]);
            map("spec.imagePullSecrets", &["name"]);
            map("status.conditions", &["type"]);
            map("status.podIPs", &["ip"]);
            for list in ["spec.containers", "spec.initContainers"] {
                map(list, &["name"]);
                map(&format!("{list}[].ports"), &["containerPort", "protocol"]);
                map(&format!("{list}[].env"), &["name"]);
                map(&format!("{list}[].volumeMounts"), &["mountPath"]);
                map(&format!("{list}[].volumeDevices"), &["devicePath"]);
            }
            let atomic = ["spec.nodeSelector", "spec.volumes[].configMap.items", "spec.volumes[].secret.items"];
            for path in atomic {
                shapes.insert(path.to_owned(), Shape::Atomic);
            }
        }
        "Service" => {
            map("spec.ports", &["port", "protocol"]);
            shapes.insert("spec.selector".to_owned(), Shape::Atomic);
        }
        "PersistentVolumeClaim" => {
            map("status.conditions", &["type"]);
            shapes.insert("spec.selector".to_owned(), Shape::Atomic);
        }
        _ => {}
    }
    shapes
}
