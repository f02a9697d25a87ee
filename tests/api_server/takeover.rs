//! What the VM-Operator in Java left in a namespace, and what becomes of it. The objects are those that its own manager made on a real API
//! server (`tests/golden/legacy-*`).

use std::path::Path;

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition},
    manager::Manager,
};
use k8s_openapi::{
    api::{
        core::v1::{ConfigMap, Pod, Secret, Service},
        rbac::v1::Role,
    },
    apimachinery::pkg::apis::meta::v1::OwnerReference,
};
use kube::{
    Api, Resource, ResourceExt,
    api::{ApiResource, DynamicObject, Patch, PatchParams, PostParams},
    core::GroupVersionKind,
};
use rustix::process::Signal;
use serde::Deserialize;
use serde_json::{Value, json};
use vm_operator::api::{VirtualMachine, VmPool};

/// The name under which that manager applies its objects.
const ITS_MANAGER: &str = "kubernetes-java-kubectl-apply";

/// Creates a VM with its status and its objects, as that manager and its runner made them.
async fn leave(ns: &ManagedNamespace, case: &str) -> VirtualMachine {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(case);
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).unwrap();
    let mut vm: Value = serde_yaml::from_str(&read("vm.yaml")).unwrap();
    vm["metadata"] = json!({ "name": vm["metadata"]["name"] });
    let vms: Api<VirtualMachine> = ns.api();
    let status = vm["status"].take();
    let mut vm = vms.create(&PostParams::default(), &serde_json::from_value(vm).unwrap()).await.unwrap();
    let mut objects = Vec::new();
    for document in serde_yaml::Deserializer::from_str(&read("observed.yaml")) {
        let mut object = DynamicObject::deserialize(document).unwrap();
        let owner = OwnerReference { block_owner_deletion: None, ..vm.controller_owner_ref(&()).unwrap() };
        let owner = OwnerReference { controller: Some(false), ..owner };
        let metadata = &mut object.metadata;
        (metadata.namespace, metadata.uid, metadata.creation_timestamp) = (None, None, None);
        metadata.owner_references = metadata.owner_references.take().map(|_| vec![owner]);
        let status = object.data.as_object_mut().unwrap().remove("status").unwrap_or_default();
        let types = object.types.as_ref().unwrap();
        let api = Api::<DynamicObject>::namespaced_with(
            ns.client.clone(),
            ns.namespace.name(),
            &ApiResource::from_gvk(&GroupVersionKind::try_from(types).unwrap()),
        );
        if types.kind == "Service" {
            // The address of another cluster.
            for field in ["clusterIP", "clusterIPs"] {
                object.data["spec"].as_object_mut().unwrap().remove(field);
            }
            object.data["spec"]["ports"][0].as_object_mut().unwrap().remove("nodePort");
        }
        let apply = PatchParams::apply(ITS_MANAGER).force();
        api.patch(&object.name_any(), &apply, &Patch::Apply(&object)).await.unwrap();
        if types.kind == "Pod" {
            objects.push((object.name_any(), status));
        }
    }
    for (pod, status) in objects {
        ns.patch_pod_status(&pod, status).await;
    }
    report(ns, &vm.name_any(), &status).await;
    vm = vms.get(&vm.name_any()).await.unwrap();
    vm
}

/// Reports as its runner does: the whole status, whatever is there.
async fn report(ns: &ManagedNamespace, name: &str, status: &Value) {
    let patch: json_patch::Patch =
        serde_json::from_value(json!([{ "op": "add", "path": "/status", "value": status }])).unwrap();
    let parameters = PatchParams { field_manager: Some("Kubernetes Java Client".into()), ..PatchParams::default() };
    ns.api::<VirtualMachine>().patch_status(name, &parameters, &Patch::Json::<()>(patch)).await.unwrap();
}

async fn config_map(ns: &ManagedNamespace, name: &str) -> Value {
    let data = ns.api::<ConfigMap>().get(name).await.unwrap().data.unwrap();
    serde_yaml::from_str(&data["config.yaml"]).unwrap()
}

/// A namespace with that manager's configuration and a VM of it.
async fn taken_over(test: &str, case: &str) -> (ManagedNamespace, VirtualMachine) {
    let configuration = include_str!("../predecessor/config.yaml");
    let mut ns = ManagedNamespace::with_configuration(test, configuration).await;
    // Our manager starts when the namespace is as the other one left it.
    ns.manager.signal(Signal::KILL);
    ns.manager.wait_for_end().await;
    let vm = leave(&ns, case).await;
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], configuration);
    (ns, vm)
}

#[tokio::test]
async fn an_apply_of_the_deployment_leaves_configuration_templates_and_roles_as_they_are() {
    let ns = ManagedNamespace::new("deploy-over").await;
    let namespace = &ns.namespace;
    let with_data = |name: &str, key: &str, value: &str| {
        let labels = json!({ "app.kubernetes.io/name": "vm-operator" });
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": name, "labels": labels }, "data": { key: value } })
    };
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": { "name": "vm-runner" },
        "rules": [{ "apiGroups": ["vmoperator.jdrupes.org"], "resources": ["vms"], "verbs": ["get", "list", "patch"] }],
    });
    // As its installation: a client-side apply, which remembers what it applied.
    namespace.apply(&with_data("vm-operator", "config.yaml", "\"/Manager\": {}\n").to_string());
    namespace.apply(&role.to_string());
    let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
    std::fs::write(file.path(), with_data("vm-operator-templates", "a.yaml.j2", "{# own #}").to_string()).unwrap();
    namespace.kubectl(&["apply", "--server-side", "--filename", &file.path().to_string_lossy()]);

    // Kustomize takes only relative paths. Other tests have VMs that this installation does not allow.
    let folder = tempfile::tempdir().unwrap();
    let up = "/..".repeat(folder.path().canonicalize().unwrap().components().count() - 1);
    let only_here =
        json!({ "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": namespace.name() } } });
    let overlay = json!({
        "resources": [format!(".{up}{}/deploy", env!("CARGO_MANIFEST_DIR"))],
        "patches": [{
            "target": { "kind": "ValidatingAdmissionPolicyBinding", "name": "vms.*|vm-runner-legacy.*" },
            "patch": json!([{ "op": "add", "path": "/spec/matchResources", "value": only_here }]).to_string(),
        }],
    });
    std::fs::write(folder.path().join("kustomization.yaml"), overlay.to_string()).unwrap();
    let deploy = folder.path().to_string_lossy().into_owned();
    for arguments in [
        &["apply", "--kustomize", &deploy][..],
        &["apply", "--server-side", "--force-conflicts", "--kustomize", &deploy],
    ] {
        namespace.kubectl(arguments);
        for (name, key) in [("vm-operator", "config.yaml"), ("vm-operator-templates", "a.yaml.j2")] {
            let data = ns.api::<ConfigMap>().get(name).await.unwrap().data.unwrap_or_default();
            assert!(data.get(key).is_some_and(|text| !text.is_empty()), "{arguments:?}: {name}: {data:?}");
        }
        let rules = json!(ns.api::<Role>().get("vm-runner").await.unwrap().rules);
        assert_eq!(rules, role["rules"], "its running runners need these rights");
    }
}

#[tokio::test]
async fn a_running_vm_keeps_its_pod_its_service_and_a_configuration_that_its_runner_understands() {
    let (ns, before) = taken_over("takeover", "legacy-running").await;
    let pod = ns.api::<Pod>().get("a04-cloud").await.unwrap();
    let service = ns.api::<Service>().get("a04-cloud").await.unwrap();
    let vm = ns.vm_with_reason("a04-cloud", "Running").await;
    assert_eq!(vm.uid(), before.uid());
    assert_eq!(ns.api::<Pod>().get("a04-cloud").await.unwrap().uid(), pod.uid());
    let taken = ns.api::<Service>().get("a04-cloud").await.unwrap();
    assert_eq!(taken.uid(), service.uid());
    assert_eq!(taken.labels()["label1"], "label1");

    // Its runner reads this file again when it changes, and when the kubelet starts its container again.
    let config = config_map(&ns, "a04-cloud").await;
    let runner = &config["/Runner"];
    assert_eq!(runner["cloudInit"]["userData"]["packages"], json!(["qemu-guest-agent"]));
    assert_eq!(runner["cloudInit"]["metaData"]["instance-id"], "v1");
    for (section, absent) in [
        (runner, "runtimeDir"),
        (runner, "resourceUid"),
        (&runner["vm"], "accelerator"),
        (&runner["vm"], "machineType"),
    ] {
        assert!(section.get(absent).is_none(), "{absent} in {config}");
    }

    // The next Pod has the same image. Its configuration is in a Secret, because of the user data.
    ns.patch_vm("a04-cloud", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.pod_when("a04-cloud", "deleted", |pod| pod.metadata.deletion_timestamp.is_some()).await;
    ns.remove_pod("a04-cloud").await;
    ns.vm_with_reason("a04-cloud", "StoppedAsRequested").await;
    eventually("no user data", LIMIT, async || {
        let config = config_map(&ns, "a04-cloud").await;
        config["/Runner"]["cloudInit"].get("userData").is_none().then_some(())
    })
    .await;
    ns.patch_vm("a04-cloud", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.vm_with_reason("a04-cloud", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("a04-cloud").await.unwrap());
    let spec = &pod["spec"];
    assert_eq!(spec["containers"][0]["name"], "a04-cloud");
    assert_eq!((&spec["hostNetwork"], &spec["serviceAccountName"]), (&Value::Null, &json!("vm-runner-legacy")));
    let secret = ns.api::<Secret>().get("a04-cloud-cloud-init").await.unwrap().data.unwrap();
    let config: Value = serde_yaml::from_slice(&secret["config.yaml"].0).unwrap();
    assert_eq!(config["/Runner"]["cloudInit"]["userData"]["packages"], json!(["qemu-guest-agent"]));
    assert!(config["/Runner"].get("runtimeDir").is_none(), "{config}");

    // Its runner's report, without the Pod's UID.
    let condition = |type_: &str| json!({ "type": type_, "status": "True", "reason": "VmRunning", "message": "The VM is running", "lastTransitionTime": "2026-11-24T10:50:21.266448Z" });
    let mut status = json!(ns.api::<VirtualMachine>().get("a04-cloud").await.unwrap().status);
    status["podUid"] = json!("of-an-earlier-runner-of-ours");
    status["conditions"] = json!([condition("Running"), condition("Booted")]);
    report(&ns, "a04-cloud", &status).await;
    ns.vm_with_reason("a04-cloud", "Running").await;
}

#[tokio::test]
async fn a_crash_loop_of_its_runner_is_reported() {
    let (ns, _) = taken_over("crash-loop", "legacy-crash-loop").await;
    let vm = ns.vm_with_reason("a18-crashed", "RunnerFailed").await;
    let message = condition(&vm, "Ready").unwrap().2;
    assert!(message.contains("a18-crashed ended with exit code 1"), "{message}");
}

#[tokio::test]
async fn the_user_of_a_pool_is_logged_in_while_the_vm_is_assigned() {
    let ns = ManagedNamespace::new("login").await;
    let pools: Api<VmPool> = ns.api();
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "desktops" },
        "spec": { "retention": "PT1h", "loginOnAssignment": true, "permissions": [] },
    });
    pools.create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["display"] = json!({ "loggedInUser": "bob" })).await;
    let logged_in = async |expected: &str| {
        eventually(&format!("{expected} to be logged in"), LIMIT, async || {
            let maps: Api<ConfigMap> = ns.api();
            let text = maps.get_opt("apple").await.unwrap()?.data?.remove("config.yaml")?;
            let config: Value = serde_yaml::from_str(&text).unwrap();
            (config["/Runner"]["vm"]["display"]["loggedInUser"] == expected).then_some(())
        })
        .await;
    };
    logged_in("bob").await;
    let vms: Api<VirtualMachine> = ns.api();
    let assign = async |assignment: Value| {
        let patch = json!({ "status": { "assignment": assignment } });
        vms.patch_status("apple", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    };
    assign(json!({ "pool": "desktops", "user": "alice", "lastUsed": "2126-01-01T00:00:00Z" })).await;
    logged_in("alice").await;
    let patch = json!({ "spec": { "loginOnAssignment": false } });
    pools.patch("desktops", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    logged_in("bob").await;
    let patch = json!({ "spec": { "loginOnAssignment": true } });
    pools.patch("desktops", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    logged_in("alice").await;
    assign(Value::Null).await;
    logged_in("bob").await;
}
