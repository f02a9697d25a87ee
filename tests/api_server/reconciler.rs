//! What the manager creates, changes, leaves alone and reports. Pods stay pending.

use std::{
    io::Write,
    process::{Command, Stdio},
    sync::Arc,
};

use crate::support::{
    cluster::{Cluster as TestCluster, XTASK, eventually},
    managed_namespace::{LIMIT, ManagedNamespace, condition, vm_manifest},
    manager::Manager,
};
use k8s_openapi::api::core::v1::{ConfigMap, Event, PersistentVolumeClaim, Pod, Secret, Service};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, ResourceExt,
    api::{DeleteParams, ObjectMeta, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::{
    api::{VirtualMachine, conditions},
    cluster::{Cluster, REQUESTS, watch::Children},
    config::{ReconcilerConfig, allowed::Allowed},
    object::{REPLACE_CLAIM_ANNOTATION, VM_ANNOTATION},
    observed::Observed,
    plan::{Action, DeleteReason, Plan, plan},
    process::{ErrorChain, slots::Slots},
    render::{RandomInput, TemplateSet, render},
    schedule::Persistence,
};

/// The status that the library kstatus computes for an object.
fn kstatus(object: &str) -> String {
    let mut child = Command::new(XTASK).arg("kstatus").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(object.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", output.status);
    String::from_utf8(output.stdout).unwrap().trim_end().to_owned()
}

#[tokio::test]
async fn kubectl_and_kstatus_know_when_to_wait() {
    let ns = ManagedNamespace::new("kstatus").await;
    let cluster = TestCluster::control_plane();
    let alone = cluster.namespace("kstatus-alone").await;
    alone.apply(&vm_manifest("apple").to_string());
    let unseen = alone.kubectl(&["get", "vm", "apple", "--output=json"]);
    assert_eq!(kstatus(&unseen), "InProgress", "no manager has looked at it");

    let get = || ns.namespace.kubectl(&["get", "vm", "apple", "--output=json"]);
    let wait = |limit: &str| {
        let namespace = ns.namespace.name();
        cluster.try_kubectl(&["wait", "vm/apple", "--for=condition=Ready", limit, "--namespace", namespace])
    };
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(kstatus(&get()), "InProgress");
    assert!(wait("--timeout=1s").unwrap_err().contains("timed out"));
    ns.report("apple", true, "Started").await;
    wait("--timeout=30s").unwrap();
    assert_eq!(kstatus(&get()), "Current");
    // What was said of the former spec is not taken for an answer.
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    wait("--timeout=30s").unwrap();
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    assert_eq!(kstatus(&get()), "Current");

    // What time does not mend ends the waiting, until somebody has mended it.
    let taken = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "pear" } });
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert_eq!((kstatus(&get()), condition(&vm, "Stalled")), ("InProgress".into(), None));
    ns.namespace.apply(&taken.to_string());
    ns.create_vm("pear", |_| ()).await;
    let vm = ns.vm_with_reason("pear", "NameTaken").await;
    let (ready, stalled) = (condition(&vm, "Ready").unwrap(), condition(&vm, "Stalled").unwrap());
    assert_eq!(stalled, ("True".into(), ready.1, ready.2));
    let pear = || ns.namespace.kubectl(&["get", "vm", "pear", "--output=json"]);
    assert_eq!(kstatus(&pear()), "Failed");
    ns.namespace.kubectl(&["delete", "configmap", "pear"]);
    let vm = ns.vm_with_reason("pear", "Starting").await;
    assert_eq!((kstatus(&pear()), condition(&vm, "Stalled")), ("InProgress".into(), None));
}

#[tokio::test]
async fn the_documented_example_yields_the_documented_objects() {
    let ns = ManagedNamespace::with_configuration("example", "").await;
    let example = include_str!("../../example/quickstart/vm.yaml").replace("namespace: vmop-demo", "");
    ns.namespace.apply(&example);
    ns.vm_with_reason("demo", "Starting").await;

    let names = ns.namespace.kubectl(&[
        "get", "pods,configmaps,secrets,persistentvolumeclaims,services",
        "--selector=app.kubernetes.io/name=vm-runner,app.kubernetes.io/instance=demo,app.kubernetes.io/managed-by=vm-operator",
        "--output=name",
    ]);
    let mut names: Vec<&str> = names.lines().collect();
    names.sort_unstable();
    assert_eq!(
        names,
        [
            "configmap/demo",
            "configmap/demo-cloud-init",
            "persistentvolumeclaim/demo-runner-data",
            "persistentvolumeclaim/demo-system-disk",
            "pod/demo",
            "secret/demo-cloud-init",
            "secret/demo-display-secret",
            "secret/demo-relay",
        ]
    );
    let pod = ns.api::<Pod>().get("demo").await.unwrap();
    assert_eq!(pod.owner_references()[0].controller, Some(true));
    let columns = ns.namespace.kubectl(&["get", "vms"]);
    assert!(columns.starts_with("NAME   STATE     PHASE      READY   CPUS   RAM"), "{columns}");
}

#[tokio::test]
async fn a_vm_that_no_manager_has_reconciled_is_not_healthy() {
    let ns = ManagedNamespace::new("unseen").await;
    ns.create_vm("seen", |_| ()).await;
    ns.vm_with_reason("seen", "Starting").await;
    drop(ns.manager);
    ns.namespace.apply(&vm_manifest("apple").to_string());
    let vms = Api::<VirtualMachine>::namespaced(ns.client.clone(), ns.namespace.name());
    let vm = vms.get("apple").await.unwrap();
    let status = vm.status.unwrap();
    assert_eq!(status.observed_generation, Some(-1));
    assert_eq!(
        (status.runner.cpus, status.runner.ram.as_deref(), status.runner.display_password_serial),
        (Some(0), Some("0"), Some(0))
    );
    assert_eq!(conditions::find(&status.conditions, "Ready").unwrap().status, "Unknown");
}

#[tokio::test]
async fn stopping_removes_the_pod_and_keeps_the_claims() {
    let ns = ManagedNamespace::new("stopping").await;
    ns.create_vm("apple", |_| ()).await;
    let running = ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(running.status.unwrap().created, Some(true));
    let claims = ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap().items.len();

    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    let stopped = ns.vm_with_reason("apple", "StoppedAsRequested").await;
    assert_eq!(stopped.status.unwrap().phase.as_deref(), Some("Stopped"));
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    assert_eq!(ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap().items.len(), claims);
    assert!(ns.api::<ConfigMap>().get_opt("apple").await.unwrap().is_some());
}

#[tokio::test]
async fn deleting_a_vm_deletes_all_but_its_claims_even_without_a_manager() {
    let ManagedNamespace { namespace, client, manager, .. } = {
        let ns = ManagedNamespace::new("deleting").await;
        ns.create_vm("apple", |vm| vm["spec"]["loadBalancerService"] = Value::Null).await;
        ns.vm_with_reason("apple", "Starting").await;
        ns
    };
    drop(manager);
    let selector = "--selector=app.kubernetes.io/instance=apple";
    let objects = || {
        namespace.kubectl(&["get", "pods,configmaps,secrets,services", selector, "--output=name", "--ignore-not-found"])
    };
    let before = objects();
    for object in ["pod/apple", "configmap/apple", "secret/apple-display-secret", "service/apple"] {
        assert!(before.lines().any(|line| line == object), "no {object} in {before}");
    }
    namespace.kubectl(&["delete", "vm", "apple"]);
    eventually("all but the claims to be gone", LIMIT, async || objects().is_empty().then_some(())).await;
    let claims: Api<PersistentVolumeClaim> = Api::namespaced(client, namespace.name());
    assert_eq!(claims.list(&Default::default()).await.unwrap().items.len(), 2);
}

#[tokio::test]
async fn a_live_change_reaches_the_config_map_and_annotates_the_pod() {
    let ns = ManagedNamespace::new("live").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let pods: Api<Pod> = ns.api();
    let made = pods.get("apple").await.unwrap();
    let version = |pod: &Pod| pod.annotations().get("vmrunner.jdrupes.org/cmVersion").cloned();
    let configured = async |cpus: u32| {
        ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": cpus } } })).await;
        ns.vm_with_reason("apple", "Starting").await;
        let config = ns.api::<ConfigMap>().get("apple").await.unwrap().data.unwrap();
        assert!(config["config.yaml"].contains(&format!("currentCpus: {cpus}")), "{config:?}");
    };

    configured(1).await;
    assert_eq!(
        pods.get("apple").await.unwrap().resource_version(),
        made.resource_version(),
        "no kubelet mounts it yet"
    );

    ns.bind_pod("apple", "node-1").await;
    let bound = ns.pod_when("apple", "told on its node", |pod| version(pod) != version(&made)).await;
    configured(2).await;
    let changed = ns.pod_when("apple", "told", |pod| version(pod) != version(&bound)).await;
    assert_eq!(version(&changed), version(&made), "the configuration is what it was");
    ns.patch_vm("apple", json!({ "spec": { "loggingProperties": ".level=FINE" } })).await;
    let changed = ns.pod_when("apple", "told of the log", |pod| version(pod) != version(&made)).await;
    assert_eq!(changed.uid(), made.uid(), "the Pod is the same");
}

#[tokio::test]
async fn a_change_of_the_pod_waits_for_a_restart_and_sets_restart_required() {
    let ns = ManagedNamespace::new("pending").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let before = ns.api::<Pod>().get("apple").await.unwrap().uid();

    ns.patch_vm("apple", json!({ "spec": { "image": { "source": "example.org/other:1" } } })).await;
    let api: Api<VirtualMachine> = ns.api();
    eventually("RestartRequired", LIMIT, async || {
        conditions::is_true(&api.get("apple").await.unwrap().status?.conditions, conditions::RESTART_REQUIRED)
            .then_some(())
    })
    .await;
    assert_eq!(ns.api::<Pod>().get("apple").await.unwrap().uid(), before);
    // Events are written in the order in which they were told: whatever the looks since the first have told is there.
    ns.wait_for_event("apple", "RestartRequired").await;
    let events = ns.api::<Event>().list(&Default::default()).await.unwrap().items;
    let made: Vec<&Event> = events.iter().filter(|event| event.reason.as_deref() == Some("SuccessfulCreate")).collect();
    assert!(made.len() == 1 && made[0].series.is_none(), "{made:?}");
    assert_eq!((made[0].type_.as_deref(), made[0].message.as_deref()), (Some("Normal"), Some("created Pod apple")));

    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert!(conditions::find(&vm.status.unwrap().conditions, conditions::RESTART_REQUIRED).is_none());
    let pod = ns.api::<Pod>().get("apple").await.unwrap();
    assert_eq!(pod.spec.unwrap().containers[0].image.as_deref(), Some("example.org/other:1"));
}

#[tokio::test]
async fn a_manager_that_does_not_know_a_pod_does_not_change_it() {
    let ns = ManagedNamespace::new("unknown-pod").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    drop(ns.manager);
    let pods: Api<Pod> = Api::namespaced(ns.client.clone(), ns.namespace.name());
    // Why it may be that nobody knows of it.
    let label = "app.kubernetes.io/name";
    let patch = Patch::Merge(json!({ "metadata": { "labels": { label: null } } }));
    let before = pods.patch("apple", &PatchParams::default(), &patch).await.unwrap();

    // An image is what a running Pod would take.
    let vms: Api<VirtualMachine> = Api::namespaced(ns.client.clone(), ns.namespace.name());
    let mut vm = vms.get("apple").await.unwrap();
    vm.spec.image = serde_json::from_value(json!({ "source": "example.org/other:1" })).unwrap();
    // Nothing is known of its claims either.
    vm.status = None;
    let (nothing, random) = (
        Observed::nothing(Timestamp::now()),
        RandomInput { display_password: "secret".into(), ..RandomInput::default() },
    );
    let config = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
    let rendered = render(&vm, &nothing, &config, &random, &TemplateSet::builtin().unwrap()).unwrap();
    let (children, _triggered) = Children::new(ns.client.clone(), None, Arc::default());
    let cluster = Cluster::new(ns.client, children, Slots::new(REQUESTS));
    let refused = cluster.execute(&vm, &plan(&vm, &nothing, Some(&rendered))).await.result.unwrap_err();
    assert!(refused.persistence() == Persistence::Busy && refused.to_string() == "apply Pod apple", "{refused}");
    let after = pods.get("apple").await.unwrap();
    assert_eq!((after.uid(), &after.spec), (before.uid(), &before.spec));
    assert_eq!(after.labels()[label], "vm-runner");
}

#[tokio::test]
async fn an_action_is_refused_if_the_object_was_recreated_meanwhile() {
    let ns = ManagedNamespace::new("uid").await;
    let vm = ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    drop(ns.manager);
    let maps: Api<ConfigMap> = Api::namespaced(ns.client.clone(), ns.namespace.name());
    let mut map = maps.get("apple").await.unwrap();
    let former = map.uid().unwrap();
    maps.delete("apple", &DeleteParams::default()).await.unwrap();
    map.metadata = ObjectMeta { name: Some("apple".into()), labels: map.metadata.labels, ..ObjectMeta::default() };
    let new = maps.create(&PostParams::default(), &map).await.unwrap();

    let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
    let nothing = Observed::nothing(Timestamp::now());
    let rendered =
        render(&vm, &nothing, &ReconcilerConfig::default(), &random, &TemplateSet::builtin().unwrap()).unwrap();
    let object = rendered.into_iter().find(|object| object.key.kind == "ConfigMap").unwrap();
    let (key, patch) = (object.key.clone(), json!({ "metadata": { "labels": { "x": "y" } } }));
    let (children, _triggered) = Children::new(ns.client.clone(), None, Arc::default());
    let cluster = Cluster::new(ns.client, children, Slots::new(REQUESTS));
    for action in [
        Action::Apply { object, uid: Some(former.clone()) },
        Action::Label { key: key.clone(), uid: former.clone(), patch },
        Action::Delete {
            key,
            uid: former,
            reason: DeleteReason::NotRendered,
            grace: None,
            version: None,
            keeps_owned: false,
        },
    ] {
        let plan = Plan { steps: [vec![action.clone()], vec![], vec![]], ..Plan::default() };
        let refused = cluster.execute(&vm, &plan).await.result.unwrap_err();
        assert!(refused.persistence() == Persistence::Busy, "{}", ErrorChain(&refused));
    }
    assert_eq!(maps.get("apple").await.unwrap().resource_version(), new.resource_version());
}

#[tokio::test]
async fn changes_of_managed_fields_are_reverted_and_other_fields_are_kept() {
    let ns = ManagedNamespace::new("drift").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let maps: Api<ConfigMap> = ns.api();
    let wanted = maps.get("apple").await.unwrap().data.unwrap()["config.yaml"].clone();

    let patch = json!({ "data": { "config.yaml": "mine now", "theirs": "kept" }, "metadata": { "annotations": { "theirs": "kept" } } });
    maps.patch("apple", &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    let map = eventually("the ConfigMap to be put back", LIMIT, async || {
        let map = maps.get("apple").await.unwrap();
        (map.data.as_ref()?["config.yaml"] == wanted).then_some(map)
    })
    .await;
    assert_eq!(map.data.as_ref().unwrap()["theirs"], "kept");
    assert_eq!(map.annotations()["theirs"], "kept");
}

#[tokio::test]
async fn labels_of_the_vm_are_added_to_its_pod_and_removed_again() {
    let ns = ManagedNamespace::new("labels").await;
    // A Service can be there before the machine is started.
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": { "name": "web" },
        "spec": { "selector": { "app": "shop" }, "ports": [{ "port": 80 }] },
    });
    ns.namespace.apply(&service.to_string());
    ns.create_vm("apple", |vm| {
        vm["metadata"]["labels"] = json!({ "app": "shop" });
        vm["spec"]["vm"]["state"] = "Stopped".into();
    })
    .await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Running" } } })).await;
    ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(ns.namespace.kubectl(&["get", "pod", "--selector=app=shop", "--output=name"]).trim(), "pod/apple");
    let pods: Api<Pod> = ns.api();
    for (value, expected) in [(json!("web"), Some("web")), (Value::Null, None)] {
        ns.patch_vm("apple", json!({ "metadata": { "labels": { "tier": value } } })).await;
        eventually("the label", LIMIT, async || {
            (pods.get("apple").await.unwrap().labels().get("tier").map(String::as_str) == expected).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn a_pod_that_loses_its_instance_label_gets_it_back() {
    let ns = ManagedNamespace::new("unlabelled").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let before = ns.api::<Pod>().get("apple").await.unwrap();
    ns.namespace.kubectl(&["label", "pod", "apple", "app.kubernetes.io/instance-"]);
    let label = |pod: &Pod| pod.labels().get("app.kubernetes.io/instance").cloned();
    let after = ns.pod_when("apple", "labelled again", |pod| label(pod).as_deref() == Some("apple")).await;
    assert_eq!(after.uid(), before.uid());
    // And is known.
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.vm_with_reason("apple", "StoppedAsRequested").await;
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
}

#[tokio::test]
async fn an_object_that_a_new_configuration_does_not_need_is_deleted_when_the_manager_starts() {
    let mut ns = ManagedNamespace::new("no-service").await;
    ns.create_vm("apple", |vm| vm["spec"]["loadBalancerService"] = Value::Null).await;
    ns.vm_with_reason("apple", "Starting").await;
    let services: Api<Service> = ns.api();
    assert!(services.get_opt("apple").await.unwrap().is_some());
    drop(ns.manager);
    let never = "/Manager:\n  /Controller:\n    /Reconciler: {loadBalancerService: false}\n";
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], never);
    eventually("the Service to be gone", LIMIT, async || {
        services.get_opt("apple").await.unwrap().is_none().then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_object_of_somebody_else_with_the_same_name_is_not_changed() {
    let ns = ManagedNamespace::new("taken").await;
    let theirs =
        json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "apple" }, "data": { "a": "b" } });
    ns.namespace.apply(&theirs.to_string());
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "NameTaken").await;
    let message = &conditions::find(&vm.status.as_ref().unwrap().conditions, "Ready").unwrap().message;
    assert_eq!(message, "ConfigMap apple exists and does not belong to this VM: delete or rename one of the two");
    assert_eq!(ns.api::<ConfigMap>().get("apple").await.unwrap().data.unwrap().len(), 1);
    assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none(), "no Pod without what it mounts");

    ns.namespace.kubectl(&["delete", "configmap", "apple"]);
    ns.vm_with_reason("apple", "Starting").await;

    // What an earlier machine of another name has left is not this one's either.
    let labels = json!({
        "app.kubernetes.io/managed-by": "vm-operator", "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "plum",
    });
    let left = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "pear", "labels": labels } });
    ns.namespace.apply(&left.to_string());
    ns.create_vm("pear", |_| ()).await;
    ns.vm_with_reason("pear", "NameTaken").await;
    assert!(ns.api::<ConfigMap>().get("pear").await.unwrap().data.is_none());
}

#[tokio::test]
async fn an_object_with_lifetime_keep_is_not_taken_from_others() {
    let template = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ vm.metadata.name ~ '-notes' }}\n  annotations: {vmoperator.jdrupes.org/lifetime: keep}\ndata: {ours: 'yes'}\n";
    let ns = ManagedNamespace::with_templates("kept", &[("notes.yaml.j2", template)]).await;
    let theirs = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "apple-notes" }, "data": { "theirs": "yes" },
    });
    ns.namespace.apply(&theirs.to_string());
    let data = async |name: &str| ns.api::<ConfigMap>().get(name).await.unwrap().data.unwrap();
    ns.create_vm("apple", |_| ()).await;
    let message = condition(&ns.vm_with_reason("apple", "NameTaken").await, "Ready").unwrap().2;
    assert!(message.starts_with("ConfigMap apple-notes exists and does not belong to this VM"), "{message}");
    assert_eq!(data("apple-notes").await.into_keys().collect::<Vec<_>>(), ["theirs"]);

    // What it kept itself is its own again.
    ns.create_vm("pear", |_| ()).await;
    ns.vm_with_reason("pear", "Starting").await;
    ns.api::<VirtualMachine>().delete("pear", &DeleteParams::default()).await.unwrap();
    // A new cluster's garbage collector learns of new kinds every half minute.
    eventually("the Pod to be gone", 3 * LIMIT, async || {
        ns.api::<Pod>().get_opt("pear").await.unwrap().is_none().then_some(())
    })
    .await;
    ns.namespace.kubectl(&["patch", "configmap", "pear-notes", "--type=merge", r#"--patch={"data":{"ours":"no"}}"#]);
    ns.create_vm("pear", |_| ()).await;
    ns.vm_with_reason("pear", "Starting").await;
    eventually("the ConfigMap to be as rendered", LIMIT, async || {
        (data("pear-notes").await["ours"] == "yes").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_claim_that_a_person_made_for_a_disk_is_used() {
    let ns = ManagedNamespace::new("own-claim").await;
    // Also where something else owns it that has filled it: who may write the claim says so.
    let owner = json!({ "apiVersion": "example.org/v1", "kind": "Importer", "name": "x", "uid": "1b2d6f4e-0000-4000-8000-000000000000" });
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": "apple-core-disk", "annotations": { "theirs": "kept", VM_ANNOTATION: "apple" }, "ownerReferences": [owner] },
        "spec": { "accessModes": ["ReadWriteMany"], "resources": { "requests": { "storage": "5Gi" } }, "storageClassName": "x", "volumeName": "pv" },
    });
    ns.namespace.apply(&claim.to_string());
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    let claim = ns.api::<PersistentVolumeClaim>().get("apple-core-disk").await.unwrap();
    assert_eq!(claim.labels()["app.kubernetes.io/instance"], "apple");
    assert_eq!(claim.annotations()["theirs"], "kept");
    assert_eq!(claim.spec.unwrap().resources.unwrap().requests.unwrap()["storage"].0, "5Gi");
}

/// Who may write VMs alone could choose names that fit any claim.
#[tokio::test]
async fn a_claim_of_which_nobody_has_said_for_which_vm_it_is_stays_as_it_is() {
    let ns = ManagedNamespace::new("claim-of-nobody").await;
    let claim = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "bank-data-disk", "labels": { "app": "bank" } },
        "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "resources": { "requests": { "storage": "1Gi" } } },
    });
    ns.namespace.apply(&claim.to_string());
    let claims: Api<PersistentVolumeClaim> = ns.api();
    let before = claims.get("bank-data-disk").await.unwrap();
    let named =
        |vm: &mut Value| vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["metadata"]["name"] = json!("data");
    ns.create_vm("bank", named).await;
    let vm = ns.vm_with_reason("bank", "ClaimTaken").await;
    let message = condition(&vm, "Ready").unwrap().2;
    assert!(message.contains("was made by somebody, who has not said for which VM"), "{message}");
    // What a VM says about it does not count.
    let says =
        json!({ "metadata": { "annotations": { VM_ANNOTATION: "bank", REPLACE_CLAIM_ANNOTATION: before.uid() } } });
    ns.patch_vm("bank", says).await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.vm_with_reason("bank", "ClaimTaken").await;
    let after = claims.get("bank-data-disk").await.unwrap();
    assert_eq!((after.labels(), after.annotations()), (before.labels(), before.annotations()));
    assert_eq!(ns.pods().await, ["apple"]);
}

#[tokio::test]
async fn events_are_written_even_if_the_status_can_not_be_written() {
    let ns = ManagedNamespace::new("untold").await;
    let name = ns.namespace.name();
    let hook = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
        "metadata": { "name": name },
        "webhooks": [{
            "name": "nobody.example.org", "admissionReviewVersions": ["v1"], "sideEffects": "None",
            "clientConfig": { "url": "https://127.0.0.1:1/" },
            "namespaceSelector": { "matchLabels": { "kubernetes.io/metadata.name": name } },
            "rules": [{ "apiGroups": ["vmoperator.jdrupes.org"], "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["vms/status"] }],
        }],
    });
    ns.namespace.apply(&hook.to_string());
    // The API server takes a moment to know of it.
    let vm = ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    let vms: Api<VirtualMachine> = ns.api();
    let touch = Patch::Merge(json!({ "status": { "phase": "Touched" } }));
    eventually("the status to be out of reach", LIMIT, async || {
        vms.patch_status(&vm.name_any(), &PatchParams::default(), &touch).await.is_err().then_some(())
    })
    .await;
    ns.create_vm("apple", |_| ()).await;
    ns.wait_for_event("apple", "SuccessfulCreate").await;
    // Nor is it forgotten that a Pod is to be made again; what is told with each try is counted.
    let pod = ns.api::<Pod>().get("apple").await.unwrap();
    ns.patch_pod_status("apple", json!({ "phase": "Failed", "reason": "OutOfcpu" })).await;
    ns.pod_when("apple", "a new one", |new| new.uid() != pod.uid()).await;
    let events = ns.api::<Event>().list(&Default::default()).await.unwrap().items;
    let failed = || events.iter().filter(|event| event.reason.as_deref() == Some("PodFailed"));
    let counts: Vec<_> = failed().map(|event| event.series.as_ref().and_then(|series| series.count)).collect();
    assert!(counts.len() == 1 && counts[0] >= Some(2), "{counts:?}");
    let phase = vms.get("apple").await.unwrap().status.unwrap().phase;
    ns.namespace.kubectl(&["delete", "validatingwebhookconfiguration", name]);
    assert_eq!(phase, None, "the status was written");
}

/// Before a guest goes, the status names its claims. Where it may not, nobody waits for that.
#[tokio::test]
async fn a_vm_whose_status_may_not_name_its_claims_can_be_stopped() {
    let ns = ManagedNamespace::new("unnamed").await;
    let name = ns.namespace.name();
    let here = json!({ "matchLabels": { "kubernetes.io/metadata.name": name } });
    let policy = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicy", "metadata": { "name": name },
        "spec": {
            "matchConstraints": { "namespaceSelector": here, "resourceRules": [{ "apiGroups": ["vmoperator.jdrupes.org"],
                "apiVersions": ["*"], "operations": ["UPDATE"], "resources": ["vms/status"] }] },
            "validations": [{ "expression": "!has(object.status.claims) || object.status.claims.size() == 0", "reason": "Invalid",
                "message": "status.claims: not here" }],
        },
    });
    let binding = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding", "metadata": { "name": name },
        "spec": { "policyName": name, "validationActions": ["Deny"] },
    });
    let vm = ns.create_vm("pear", |vm| vm["spec"]["vm"]["state"] = json!("Stopped")).await;
    ns.namespace.apply(&json!({ "apiVersion": "v1", "kind": "List", "items": [policy, binding] }).to_string());
    let vms: Api<VirtualMachine> = ns.api();
    let touch = Patch::Merge(json!({ "status": { "claims": [{ "name": "x", "uid": "y" }] } }));
    eventually("the policy to be in force", LIMIT, async || {
        vms.patch_status(&vm.name_any(), &PatchParams::default(), &touch).await.is_err().then_some(())
    })
    .await;
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    assert!(vm.status.unwrap().claims.is_empty(), "the policy is in force");
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    ns.wait_for_no_pod("apple").await;
    ns.namespace.kubectl(&["delete", "validatingadmissionpolicybinding,validatingadmissionpolicy", name]);
}

#[tokio::test]
async fn any_text_in_cloud_init_data_reaches_the_guest_unchanged() {
    let ns = ManagedNamespace::new("texts").await;
    let text = "quotes \" ' \\ colon: # dash\n---\n...\ttab \u{2028} \u{85} 😀 {{ 7 * 7 }} {% raw %}";
    ns.create_vm("apple", |vm| {
        vm["spec"]["cloudInit"] = json!({ "userData": { "message": text }, "metaData": { "x": text } })
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    let data = ns.api::<Secret>().get("apple-cloud-init").await.unwrap().data.unwrap();
    let user_data = String::from_utf8(data["user-data"].0.clone()).unwrap();
    assert!(user_data.starts_with("#cloud-config\n"));
    assert_eq!(serde_yaml::from_str::<Value>(&user_data).unwrap()["message"], text);
    let data = ns.api::<ConfigMap>().get("apple-cloud-init").await.unwrap().data.unwrap();
    assert_eq!(serde_yaml::from_str::<Value>(&data["meta-data"]).unwrap()["x"], text);
    assert_eq!(serde_yaml::from_str::<Value>(&data["meta-data"]).unwrap()["local-hostname"], "apple");
}

#[tokio::test]
async fn the_api_server_refuses_invalid_vms_and_names_the_field() {
    let ns = ManagedNamespace::new("bad-input").await;
    let refused = |edit: &dyn Fn(&mut Value)| {
        let mut vm = vm_manifest("apple");
        edit(&mut vm);
        let file = tempfile::NamedTempFile::with_suffix(".json").unwrap();
        std::fs::write(file.path(), vm.to_string()).unwrap();
        let arguments = ["--namespace", ns.namespace.name(), "create", "--validate=strict", "--filename"];
        ns.cluster
            .try_kubectl(&[&arguments[..], &[&*file.path().to_string_lossy()]].concat())
            .expect_err("the API server took it")
    };
    let disk = |name: &str| json!({ "volumeClaimTemplate": { "metadata": { "name": name } } });
    type Case<'a> = (&'a dyn Fn(&mut Value), &'a str);
    let cases: &[Case<'_>] = &[
        (
            &|vm| vm["spec"]["vm"]["cpuTopology"] = json!({ "sockets": 1 }),
            "give exactly one of maximumCpus and cpuTopology",
        ),
        (
            &|vm| drop(vm["spec"]["vm"].as_object_mut().unwrap().remove("maximumCpus")),
            "give exactly one of maximumCpus and cpuTopology",
        ),
        (&|vm| vm["spec"]["vm"]["colour"] = json!("red"), "unknown field \"spec.vm.colour\""),
        (&|vm| vm["spec"]["vm"]["maximumRam"] = json!("4Gx"), "spec.vm.maximumRam in body should match"),
        (&|vm| vm["metadata"]["name"] = json!("a".repeat(64)), "at most 63 characters"),
        (&|vm| vm["spec"]["vm"]["currentCpus"] = json!(3), "currentCpus must not be more than maximumCpus"),
        (
            &|vm| {
                let machine = vm["spec"]["vm"].as_object_mut().unwrap();
                machine.remove("maximumCpus");
                machine.insert("cpuTopology".into(), json!({ "sockets": 2, "coresPerDie": 2 }));
                machine.insert("currentCpus".into(), json!(5));
            },
            "currentCpus must not be more than the CPUs of cpuTopology",
        ),
        (&|vm| vm["spec"]["vm"]["currentRam"] = json!("2 GiB"), "currentRam must not be more than maximumRam"),
        (
            &|vm| vm["spec"]["vm"]["maximumRam"] = json!(512),
            "maximumRam must be at least 1Mi: a number without a unit is in bytes",
        ),
        (&|vm| vm["spec"]["vm"]["currentRam"] = json!("1023 kiB"), "currentRam must be at least 1Mi"),
        (&|vm| vm["spec"]["vm"]["firmware"] = json!("uefi-8m"), "Unsupported value: \"uefi-8m\""),
        (
            &|vm| vm["spec"]["permissions"] = json!([{ "user": "jane", "may": ["takeDisplay"] }]),
            "Unsupported value: \"takeDisplay\"",
        ),
        (
            &|vm| vm["spec"]["vm"]["disks"] = json!([disk("a"), disk("b"), disk("a")]),
            "the names of the disks must be different",
        ),
        (
            &|vm| vm["spec"]["vm"]["disks"] = json!([{ "bootindex": 1 }]),
            "a disk is either a volumeClaimTemplate or a cdrom",
        ),
        (
            &|vm| vm["spec"]["vm"]["networks"] = json!([{ "user": {}, "tap": {} }]),
            "a network is exactly one of tap, user and pod",
        ),
        (
            &|vm| vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }, { "user": {} }, { "pod": {} }]),
            "only one network can be of type pod",
        ),
        (&|vm| vm["spec"]["vm"]["display"] = json!({ "spice": { "port": 70000 } }), "spec.vm.display.spice.port"),
        (
            &|vm| vm["spec"]["image"] = json!({ "source": "a", "repository": "b", "path": "c" }),
            "give either source, or repository and path",
        ),
        (
            &|vm| {
                vm["spec"]["cloudInit"] =
                    json!({ "userData": {}, "userDataFrom": { "secretKeyRef": { "name": "a", "key": "b" } } })
            },
            "spec.cloudInit",
        ),
        (&|vm| vm["spec"]["permissions"] = json!([{ "may": ["start"] }]), "give either user or role"),
    ];
    for (edit, expected) in cases {
        let message = refused(edit);
        assert!(message.contains(expected), "expected {expected:?} in:\n{message}");
    }
}

#[tokio::test]
async fn a_template_that_can_not_be_compiled_is_reported_and_changes_nothing() {
    let ns = ManagedNamespace::with_templates(
        "broken-set",
        &[("pod.yaml.j2", "kind: Pod\nmetadata: {name: {{ vm.metadata.name }\n")],
    )
    .await;
    ns.create_vm("apple", |_| ()).await;
    let vm = ns.vm_with_reason("apple", "TemplateError").await;
    let valid = conditions::find(&vm.status.as_ref().unwrap().conditions, conditions::TEMPLATES_VALID).unwrap();
    assert_eq!(valid.status, "False");
    assert!(
        valid.message.ends_with("pod.yaml.j2:2:38: syntax error: unexpected `}`, expected end of variable block"),
        "{}",
        valid.message
    );
    assert!(ns.api::<ConfigMap>().get_opt("apple").await.unwrap().is_none());
    eventually("the event", LIMIT, async || {
        let events = ns.namespace.kubectl(&["get", "events", "--output=jsonpath={.items[*].reason}"]);
        events.contains("TemplateError").then_some(())
    })
    .await;
}

#[tokio::test]
async fn a_template_that_fails_for_one_vm_does_not_block_another() {
    let undefined = "{% if vm.metadata.name == 'bad' %}\n{{ nothing.here }}\n{% endif %}\n";
    let not_yaml = "{% if vm.metadata.name == 'worse' %}\na: [1\n{% endif %}\n";
    let ns = ManagedNamespace::with_templates("broken-one", &[("a.yaml.j2", undefined), ("b.yaml.j2", not_yaml)]).await;
    for name in ["bad", "worse", "good"] {
        ns.create_vm(name, |_| ()).await;
    }
    ns.vm_with_reason("good", "Starting").await;
    for (name, message) in [
        ("bad", "a.yaml.j2:2:4: undefined value: `nothing` is undefined"),
        ("worse", "b.yaml.j2:2: the output is not YAML: did not find expected ',' or ']'"),
    ] {
        let vm = ns.vm_with_reason(name, "TemplateError").await;
        let ready = conditions::find(&vm.status.as_ref().unwrap().conditions, "Ready").unwrap();
        assert!(ready.message.starts_with(message), "{}", ready.message);
        assert!(ns.api::<Pod>().get_opt(name).await.unwrap().is_none());
    }
}

#[tokio::test]
async fn an_added_template_makes_an_object_of_any_kind() {
    let policy = "apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata:\n  name: {{ vm.metadata.name }}\nspec:\n  podSelector: {matchLabels: {{ labels }}}\n";
    let ns = ManagedNamespace::with_templates("added", &[("network-policy.yaml.j2", policy)]).await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    assert_eq!(
        ns.namespace.kubectl(&["get", "networkpolicies", "--output=name"]).trim(),
        "networkpolicy.networking.k8s.io/apple"
    );
}

#[tokio::test]
async fn a_template_sees_the_status_that_follows_from_it() {
    let seen = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: {{ vm.metadata.name ~ '-seen' }}\ndata:\n  phase: {{ \
                vm.status.phase if vm.status else 'none' }}\n";
    let ns = ManagedNamespace::with_templates("sees-status", &[("seen.yaml.j2", seen)]).await;
    ns.create_vm("apple", |_| ()).await;
    let maps: Api<ConfigMap> = ns.api();
    eventually("the status that was written to be rendered", LIMIT, async || {
        let map = maps.get_opt("apple-seen").await.unwrap()?;
        (map.data?.get("phase")? == "Starting").then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_object_that_the_api_server_refuses_is_reported() {
    let ns = ManagedNamespace::new("refused").await;
    ns.create_vm("apple", |vm| vm["spec"]["nodeSelector"] = json!({ "not a label": "x" })).await;
    let vm = ns.vm_with_reason("apple", "ApplyFailed").await;
    let ready = conditions::find(&vm.status.as_ref().unwrap().conditions, "Ready").unwrap();
    assert!(
        ready.message.contains("apply Pod apple") && ready.message.contains("spec.nodeSelector"),
        "{}",
        ready.message
    );
}
