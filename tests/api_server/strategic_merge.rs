//! Patches of the form `strategicMerge` do what `kubectl patch --type=strategic` does.
//!
//! Most fields of a Pod can't be changed, so the Pods of these cases are those of PodTemplates, whose `template` has the same type.

use std::collections::{BTreeMap, BTreeSet};

use kube::{
    Api, ResourceExt,
    api::{ApiResource, DynamicObject, PostParams, TypeMeta},
};
use serde_json::{Value, json};
use vm_operator::render::patches::{
    Patch,
    merge_keys::{Merge, TABLE},
};

use crate::support::cluster::Cluster;

/// The Pod that is patched.
const POD: &str = "
containers:
- name: main
  image: example.org/main:1
  args: [--a, --b, --c]
  env: [{name: A, value: '1'}, {name: B, value: '2'}, {name: C, valueFrom: {fieldRef: {fieldPath: metadata.name}}}]
  ports: [{name: http, containerPort: 80}, {name: dns, containerPort: 53, protocol: UDP}]
  volumeMounts: [{name: data, mountPath: /data}, {name: config, mountPath: /etc/config}]
  volumeDevices: [{name: disk, devicePath: /dev/disk}]
  resources: {limits: {cpu: '1', memory: 1Gi}}
- {name: side, image: 'example.org/side:1'}
initContainers: [{name: first, image: 'example.org/first:1'}, {name: second, image: 'example.org/second:1'}]
volumes:
- {name: data, emptyDir: {}}
- {name: config, configMap: {name: c}}
- {name: disk, persistentVolumeClaim: {claimName: d}}
tolerations: [{key: a, operator: Exists}]
nodeSelector: {disk: ssd, zone: a}
imagePullSecrets: [{name: one}]
hostAliases: [{ip: 10.0.0.1, hostnames: [a, b]}]
topologySpreadConstraints: [{topologyKey: zone, maxSkew: 1, whenUnsatisfiable: DoNotSchedule}]
affinity: {podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{topologyKey: host}]}}
securityContext: {runAsUser: 1, fsGroup: 2}
";

const DEPLOYMENT: &str = "
apiVersion: apps/v1
kind: Deployment
spec:
  selector: {matchLabels: {app: a}}
  strategy: {type: RollingUpdate, rollingUpdate: {maxSurge: 1}}
  template:
    metadata: {labels: {app: a}}
    spec: {containers: [{name: main, image: 'example.org/main:1', env: [{name: A, value: '1'}]}]}
";

const SERVICE: &str = "
apiVersion: v1
kind: Service
spec:
  selector: {app: a}
  ports: [{name: http, port: 80, targetPort: 8080}, {name: https, port: 443, targetPort: 8443}]
";

const BUDGET: &str = "
apiVersion: policy/v1
kind: PodDisruptionBudget
spec: {minAvailable: 1, selector: {matchLabels: {app: a, tier: b}}}
";

/// Patches of the Pod's spec: what each is about, and the patch.
const OF_PODS: &[(&str, &str)] = &[
    ("a field of a container", "containers: [{name: main, image: 'example.org/main:2'}]"),
    ("a new container", "containers: [{name: new, image: x}]"),
    (
        "new containers around one that is there",
        "containers: [{name: new, image: x}, {name: side, tty: true}, {name: last, image: x}]",
    ),
    ("containers in another order", "containers: [{name: side, tty: true}, {name: main, tty: true}]"),
    ("a container that goes", "containers: [{name: side, $patch: delete}]"),
    ("a container that goes and one that comes", "containers: [{name: side, $patch: delete}, {name: new, image: x}]"),
    ("a container that goes and is not there", "containers: [{name: other, $patch: delete}]"),
    ("other containers", "containers: [{$patch: replace}, {name: new, image: x}]"),
    ("a variable", "containers: [{name: main, env: [{name: B, value: '3'}]}]"),
    ("new variables", "containers: [{name: main, env: [{name: D, value: '4'}, {name: A, value: '0'}]}]"),
    ("a variable that goes", "containers: [{name: main, env: [{name: B, $patch: delete}]}]"),
    ("a variable with another source", "containers: [{name: main, env: [{name: C, value: c, valueFrom: null}]}]"),
    (
        "a variable, replaced by the fields that are kept",
        "containers: [{name: main, env: [{name: C, $retainKeys: [name, value], value: c}]}]",
    ),
    (
        "variables in a given order",
        "containers: [{name: main, $setElementOrder/env: [{name: C}, {name: D}, {name: A}], env: [{name: D, value: '4'}]}]",
    ),
    ("an order alone", "{$setElementOrder/containers: [{name: side}, {name: main}]}"),
    (
        "an order of which the object has more",
        "{$setElementOrder/initContainers: [{name: second}, {name: new}], initContainers: [{name: new, image: x}]}",
    ),
    ("a port", "containers: [{name: main, ports: [{containerPort: 53, name: domain}]}]"),
    ("a new port", "containers: [{name: main, ports: [{containerPort: 443, name: https}]}]"),
    ("a port that goes", "containers: [{name: main, ports: [{containerPort: 80, $patch: delete}]}]"),
    ("a mount", "containers: [{name: main, volumeMounts: [{mountPath: /data, readOnly: true}]}]"),
    (
        "a new volume and its mount",
        "{volumes: [{name: new, emptyDir: {}}], containers: [{name: main, volumeMounts: [{name: new, mountPath: /new}]}]}",
    ),
    (
        "a volume and its mount that go",
        "{volumes: [{name: config, $patch: delete}], containers: [{name: main, volumeMounts: [{mountPath: /etc/config, $patch: delete}]}]}",
    ),
    ("a volume of another kind", "volumes: [{name: data, $retainKeys: [name, hostPath], hostPath: {path: /x}}]"),
    ("a volume of another kind, by null", "volumes: [{name: data, emptyDir: null, hostPath: {path: /x}}]"),
    (
        "a device",
        "containers: [{name: main, volumeDevices: [{devicePath: /dev/disk, $patch: delete}, {devicePath: /dev/other, name: disk}]}]",
    ),
    ("a list without a key", "containers: [{name: main, args: [--d]}]"),
    ("values of a list without a key", "containers: [{name: main, $deleteFromPrimitiveList/args: [--b, --x]}]"),
    ("an init container", "initContainers: [{name: second, image: x}]"),
    ("tolerations, which have no key", "tolerations: [{key: b, operator: Exists}]"),
    ("tolerations that go", "tolerations: null"),
    ("entries of a map", "nodeSelector: {zone: null, pool: vms}"),
    ("another map", "nodeSelector: {$patch: replace, pool: vms}"),
    ("a map that is emptied", "affinity: {$patch: delete}"),
    ("the fields of a map that are kept", "securityContext: {$retainKeys: [runAsUser, runAsGroup], runAsGroup: 3}"),
    (
        "a map that is not there yet",
        "dnsConfig: {searches: [a], nameservers: null, options: [{name: ndots, value: null}]}",
    ),
    ("a directive of what is not there", "{dnsConfig: {$patch: delete}, schedulingGates: [{name: x, $patch: delete}]}"),
    ("a limit", "containers: [{name: main, resources: {limits: {cpu: '2'}, requests: {cpu: 1m}}}]"),
    ("null for what is not there", "{priorityClassName: null, containers: [{name: side, lifecycle: null}]}"),
    ("a secret for pulling", "imagePullSecrets: [{name: two}]"),
    ("names of a host", "hostAliases: [{ip: 10.0.0.1, hostnames: [c]}, {ip: 10.0.0.2, hostnames: [d]}]"),
    (
        "a spread",
        "topologySpreadConstraints: [{topologyKey: zone, maxSkew: 2}, {topologyKey: host, maxSkew: 1, whenUnsatisfiable: ScheduleAnyway}]",
    ),
];

/// Patches of other kinds: what each is about, the object, and the patch.
const OF_OTHERS: &[(&str, &str, &str)] = &[
    ("another strategy", DEPLOYMENT, "spec: {strategy: {$retainKeys: [type], type: Recreate}}"),
    (
        "a variable of a Deployment",
        DEPLOYMENT,
        "spec: {template: {spec: {containers: [{name: main, env: [{name: B, value: '2'}]}]}}}",
    ),
    ("a label of a Deployment's Pods", DEPLOYMENT, "spec: {template: {metadata: {labels: {tier: b}}}}"),
    ("a port of a Service", SERVICE, "spec: {ports: [{port: 443, targetPort: 9443}]}"),
    (
        "a port of a Service that goes, and a new one",
        SERVICE,
        "spec: {ports: [{port: 80, $patch: delete}, {port: 8080, name: other}]}",
    ),
    ("a Service's selector", SERVICE, "spec: {selector: {tier: b, app: null}}"),
    ("a budget's selector, which is replaced", BUDGET, "spec: {selector: {matchLabels: {app: c}}}"),
];

fn yaml(text: &str) -> Value {
    serde_yaml::from_str(text).unwrap()
}

/// An object without what the API server notes about each write, and what controllers write meanwhile.
fn content(mut object: DynamicObject) -> Value {
    object.annotations_mut().remove("deployment.kubernetes.io/revision");
    object.metadata.annotations = object.metadata.annotations.filter(|annotations| !annotations.is_empty());
    let mut object = serde_json::to_value(object).unwrap();
    object.as_object_mut().unwrap().remove("status");
    for field in ["managedFields", "resourceVersion", "generation"] {
        object["metadata"].as_object_mut().unwrap().remove(field);
    }
    object
}

#[tokio::test]
async fn a_strategic_merge_patch_has_the_outcome_of_kubectl_patch() {
    let namespace = Cluster::control_plane().namespace("strategic-merge").await;
    let client = Cluster::control_plane().client().await;
    let of_pods = OF_PODS.iter().map(|(what, patch)| {
        let object = json!({ "apiVersion": "v1", "kind": "PodTemplate", "template": { "spec": yaml(POD) } });
        (*what, object, json!({ "template": { "spec": yaml(patch) } }))
    });
    let of_others = OF_OTHERS.iter().map(|(what, object, patch)| (*what, yaml(object), yaml(patch)));
    let mut compared = 0;
    for (index, (what, mut object, patch)) in of_pods.chain(of_others).enumerate() {
        let name = format!("case-{index}");
        object["metadata"] = json!({ "name": name });
        let types: TypeMeta = serde_json::from_value(object.clone()).unwrap();
        let resource = ApiResource::from_gvk(&(&types).try_into().unwrap());
        let api = Api::<DynamicObject>::namespaced_with(client.clone(), namespace.name(), &resource);
        let object = serde_json::from_value(object).unwrap();
        let before =
            api.create(&PostParams::default(), &object).await.unwrap_or_else(|error| panic!("{what}: {error}"));

        // Ours, as the API server completes it.
        let text = format!("target: {{kind: {}}}\nstrategicMerge: {patch}\n", types.kind);
        let mut merged = serde_json::to_value(&before).unwrap();
        for patch in Patch::parse("case.patch.yaml", &text).unwrap() {
            patch.apply([(&mut merged, &mut Vec::new())]).unwrap_or_else(|error| panic!("{what}: {error}"));
        }
        let mut merged: DynamicObject = serde_json::from_value(merged).unwrap();
        let dry_run = PostParams { dry_run: true, ..PostParams::default() };
        let ours = loop {
            // Controllers write the status meanwhile.
            merged.metadata.resource_version = api.get(&name).await.unwrap().resource_version();
            match api.replace(&name, &dry_run, &merged).await {
                Err(kube::Error::Api(answer)) if answer.is_conflict() => {}
                answer => break answer.unwrap_or_else(|error| panic!("{what}: {error}\n{merged:#?}")),
            }
        };

        let patched = namespace.kubectl(&[
            "patch",
            &types.kind,
            &name,
            "--type=strategic",
            "--output=json",
            &format!("--patch={patch}"),
        ]);
        let theirs: DynamicObject = serde_json::from_str(&patched).unwrap();
        assert_eq!(ours.name_any(), theirs.name_any());
        let (ours, theirs) = (content(ours), content(theirs));
        assert_eq!(ours, theirs, "{what}: {patch}");
        compared += 1;
    }
    println!("{compared} patches have the same outcome, {} of them of Pods", OF_PODS.len());
    assert!(OF_PODS.len() >= 30);
}

/// The rows of the table, by type and field.
type Rows = BTreeMap<(String, String), (String, Merge)>;

/// What the API server publishes about its types.
struct OpenApi(Value);

impl OpenApi {
    fn definition(&self, name: &str) -> &Value {
        &self.0["definitions"][name]
    }

    /// The definitions of the namespaced kinds of stable versions, each with its name in the table.
    fn kinds(&self) -> BTreeMap<String, String> {
        let named = |kind: &Value| {
            let part = |name: &str| kind[name].as_str().unwrap().to_owned();
            (part("group"), part("version"), part("kind"))
        };
        let paths = self.0["paths"].as_object().unwrap();
        let created =
            paths.iter().filter(|(path, _)| path.contains("/namespaces/{namespace}/") && !path.contains("{name}"));
        let namespaced: BTreeSet<_> =
            created.filter_map(|(_, path)| path["post"].get("x-kubernetes-group-version-kind")).map(named).collect();
        let mut kinds = BTreeMap::new();
        for (name, definition) in self.0["definitions"].as_object().unwrap() {
            let Some([kind]) = definition["x-kubernetes-group-version-kind"].as_array().map(Vec::as_slice) else {
                continue;
            };
            let (group, version, kind) = named(kind);
            let is_stable = version.strip_prefix('v').is_some_and(|number| number.parse::<u32>().is_ok());
            if is_stable && namespaced.contains(&(group.clone(), version.clone(), kind.clone())) {
                let group = if group.is_empty() { group } else { format!("{group}/") };
                kinds.insert(name.clone(), format!("{group}{version}/{kind}"));
            }
        }
        kinds
    }

    /// Adds the rows of a type and of those in it. Returns whether it has any.
    fn add_rows(&self, name: &str, label: &str, rows: &mut Rows, above: &mut Vec<String>) -> bool {
        above.push(name.to_owned());
        let mut has_rows = false;
        let fields = self.definition(name)["properties"].as_object();
        // Templates set no list of the metadata, and no status.
        for (field, schema) in
            fields.into_iter().flatten().filter(|(field, _)| !["metadata", "status"].contains(&field.as_str()))
        {
            let strategies: Vec<&str> =
                schema["x-kubernetes-patch-strategy"].as_str().into_iter().flat_map(|text| text.split(',')).collect();
            let is_list = schema["type"] == "array";
            let merge = match schema["x-kubernetes-patch-merge-key"].as_str() {
                Some(key) if strategies.contains(&"merge") => Merge::ByKey(key.to_owned().leak()),
                _ if strategies.contains(&"replace") => Merge::Replace,
                _ => Merge::Usual,
            };
            if is_list && merge == Merge::Usual {
                continue;
            }
            let schema = if is_list { &schema["items"] } else { schema };
            let of = schema["$ref"].as_str().or_else(|| schema["allOf"][0]["$ref"].as_str());
            let of = of.and_then(|of| of.strip_prefix("#/definitions/")).filter(|of| !above.iter().any(|it| it == of));
            let of_label = of.and_then(|of| of.rsplit('.').next()).unwrap_or_default();
            let is_in_table = of.is_some_and(|of| self.add_rows(of, of_label, rows, above));
            if is_in_table || merge != Merge::Usual {
                has_rows = true;
                let of_label = if is_in_table { of_label } else { "" };
                rows.insert((label.to_owned(), field.clone()), (of_label.to_owned(), merge));
            }
        }
        above.pop();
        has_rows
    }
}

#[tokio::test]
async fn the_table_of_merge_keys_is_that_of_the_api_server() {
    let openapi = OpenApi(yaml(&Cluster::control_plane().kubectl(&["get", "--raw", "/openapi/v2"])));
    let mut of_server = Rows::new();
    for (name, label) in openapi.kinds() {
        openapi.add_rows(&name, &label, &mut of_server, &mut Vec::new());
    }
    let ours: Rows = TABLE
        .iter()
        .map(|(of, field, value, merge)| (((*of).to_owned(), (*field).to_owned()), ((*value).to_owned(), *merge)))
        .collect();
    assert_eq!(ours, of_server);
}
