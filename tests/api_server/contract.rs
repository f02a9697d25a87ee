//! What existing manifests, disks and scripts rely on: the rows of `docs/compatibility.md` that need an API server only.

use crate::support::{
    cluster::eventually,
    managed_namespace::{LIMIT, ManagedNamespace, condition, create_vm_and_pod, vm_manifest},
};
use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret, Service};
use kube::{
    Api, CustomResourceExt, ResourceExt,
    api::{DynamicObject, Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::{
    api::{VirtualMachine, VmPool},
    config::{Config, VolumeMode},
};

/// The section `/Runner` of the configuration that the runner gets.
async fn runner(ns: &ManagedNamespace, name: &str) -> Value {
    let data = ns.api::<ConfigMap>().get(name).await.unwrap().data.unwrap();
    let config: Value = serde_yaml::from_str(&data["config.yaml"]).unwrap();
    config["/Runner"].clone()
}

fn claim(claims: &[PersistentVolumeClaim], name: &str) -> Value {
    json!(claims.iter().find(|claim| claim.name_any() == name).unwrap_or_else(|| panic!("no claim {name}")))
}

#[tokio::test]
async fn the_pod_uses_the_image_that_the_spec_or_the_configuration_names() {
    let ns = ManagedNamespace::with_configuration(
        "image",
        r#""/Manager": {"/Controller": {"/Reconciler": {runnerImage: "example.org/default:1", runnerImages: ["example.org/a/*"]}}}"#,
    )
    .await;
    for (name, image, reference, policy) in [
        ("absent", Value::Null, "example.org/default:1", "IfNotPresent"),
        ("source", json!({ "source": "example.org/a/b:2" }), "example.org/a/b:2", "IfNotPresent"),
        (
            "path",
            json!({ "repository": "example.org/a", "path": "b", "pullPolicy": "Never" }),
            "example.org/a/b",
            "Never",
        ),
        (
            "version",
            json!({ "repository": "example.org/a", "path": "b", "version": "3", "pullPolicy": "Always" }),
            "example.org/a/b:3",
            "Always",
        ),
    ] {
        let pod = create_vm_and_pod(&ns, name, |vm| {
            if !image.is_null() {
                vm["spec"]["image"] = image;
            }
        })
        .await;
        let container = &pod["spec"]["containers"][0];
        // Where nothing says it, the API server chooses the policy by the tag.
        let expected = if name == "path" || name == "version" { policy } else { "IfNotPresent" };
        assert_eq!(
            (&container["image"], &container["imagePullPolicy"]),
            (&json!(reference), &json!(expected)),
            "{name}"
        );
    }
}

#[tokio::test]
async fn the_pod_requests_its_resources_divided_by_the_overcommit() {
    for (test, configuration, cpu, memory) in [
        ("overcommit-default", "", "1", "3435973836"),
        (
            "overcommit",
            r#""/Manager": {"/Controller": {"/Reconciler": {cpuOvercommit: 4, ramOvercommit: 1}}}"#,
            "500m",
            "4Gi",
        ),
    ] {
        let ns = ManagedNamespace::with_configuration(test, configuration).await;
        let pod = create_vm_and_pod(&ns, "apple", |vm| {
            vm["spec"]["vm"]["maximumCpus"] = json!(4);
            vm["spec"]["vm"]["currentCpus"] = json!(2);
            vm["spec"]["vm"]["maximumRam"] = json!("8 GiB");
            vm["spec"]["vm"]["currentRam"] = json!("4Gi");
        })
        .await;
        let requests = &pod["spec"]["containers"][0]["resources"]["requests"];
        let bytes = if memory == "4Gi" { json!("4294967296") } else { json!(memory) };
        assert_eq!(requests["cpu"], cpu);
        assert!(requests["memory"] == memory || requests["memory"] == bytes, "{requests}");
    }
    let ns = ManagedNamespace::new("resources").await;
    let own = json!({ "requests": { "cpu": "100m" }, "limits": { "memory": "1Gi" } });
    let pod = create_vm_and_pod(&ns, "apple", |vm| vm["spec"]["resources"] = own.clone()).await;
    let found = &pod["spec"]["containers"][0]["resources"];
    assert_eq!((&found["requests"]["cpu"], &found["limits"]["memory"]), (&json!("100m"), &json!("1Gi")));
}

#[tokio::test]
async fn node_selector_affinity_and_node_name_reach_the_pod() {
    let ns = ManagedNamespace::new("scheduling").await;
    let affinity = json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
        { "matchExpressions": [{ "key": "kvm", "operator": "Exists" }] },
    ] } } });
    let pod = create_vm_and_pod(&ns, "apple", |vm| {
        vm["spec"]["nodeSelector"] = json!({ "disk": "fast" });
        vm["spec"]["affinity"] = affinity.clone();
    })
    .await;
    assert_eq!(pod["spec"]["nodeSelector"], json!({ "disk": "fast" }));
    assert_eq!(pod["spec"]["affinity"], affinity);
    let named = create_vm_and_pod(&ns, "plum", |vm| vm["spec"]["nodeName"] = json!("node-7")).await;
    assert_eq!(named["spec"]["nodeName"], "node-7");
}

#[tokio::test]
async fn every_object_has_the_labels_and_the_owner_of_its_vm() {
    let ns = ManagedNamespace::new("labels").await;
    ns.create_vm("apple", |vm| {
        vm["spec"]["cloudInit"] = json!({});
        vm["spec"]["loadBalancerService"] = Value::Null;
    })
    .await;
    let vm = ns.vm_with_reason("apple", "Starting").await;
    let selector =
        "app.kubernetes.io/name=vm-runner,app.kubernetes.io/instance=apple,app.kubernetes.io/managed-by=vm-operator";
    let found = ns.namespace.kubectl(&[
        "get",
        "pods,configmaps,secrets,services,persistentvolumeclaims",
        "--selector",
        selector,
        "--output=json",
    ]);
    let found: Value = serde_json::from_str(&found).unwrap();
    let mut names = Vec::new();
    for object in found["items"].as_array().unwrap() {
        names.push(format!("{} {}", object["kind"].as_str().unwrap(), object["metadata"]["name"].as_str().unwrap()));
        let metadata = &object["metadata"];
        if object["kind"] == "PersistentVolumeClaim" {
            assert_eq!(metadata["ownerReferences"], Value::Null, "a claim outlives its machine");
        } else {
            assert_eq!(metadata["ownerReferences"][0]["uid"], json!(vm.uid()));
            assert_eq!(metadata["annotations"]["vmoperator.jdrupes.org/version"], env!("CARGO_PKG_VERSION"));
        }
        if object["kind"] == "Pod" {
            assert_eq!(metadata["labels"]["app.kubernetes.io/component"], "vm-runner");
            assert!(metadata["annotations"]["vmrunner.jdrupes.org/cmVersion"].is_string());
        }
    }
    names.sort();
    assert_eq!(
        names,
        [
            "ConfigMap apple",
            "ConfigMap apple-cloud-init",
            "PersistentVolumeClaim apple-core-disk",
            "PersistentVolumeClaim apple-runner-data",
            "Pod apple",
            "Secret apple-cloud-init",
            "Secret apple-display-secret",
            "Secret apple-relay",
            "Service apple",
        ]
    );
}

#[tokio::test]
async fn each_vm_has_a_load_balancer_service_if_the_configuration_says_so_unless_the_vm_declines() {
    let ns = ManagedNamespace::with_configuration(
        "service",
        r#""/Manager": {"/Controller": {"/Reconciler": {loadBalancerService: {labels: {a: "1", b: "2", f: "7"}, annotations: {c: "3", e: "6"}}}}}"#,
    )
    .await;
    ns.create_vm("apple", |vm| {
        vm["spec"]["loadBalancerService"] =
            json!({ "labels": { "b": "", "d": "4", "f": null }, "annotations": { "c": "5", "e": "" } });
        vm["spec"]["vm"]["display"] = json!({ "spice": { "port": 5910 } });
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.create_vm("plum", |_| ()).await;
    ns.vm_with_reason("plum", "Starting").await;
    ns.create_vm("pear", |vm| vm["spec"]["loadBalancerService"] = Value::Null).await;
    ns.vm_with_reason("pear", "Starting").await;
    let service = json!(ns.api::<Service>().get("apple").await.unwrap());
    let labels = &service["metadata"]["labels"];
    assert_eq!((&labels["a"], &labels["b"], &labels["d"]), (&json!("1"), &Value::Null, &json!("4")));
    assert_eq!(labels["f"], Value::Null, "null removes a default, too");
    let annotations = &service["metadata"]["annotations"];
    assert_eq!((&annotations["c"], &annotations["e"]), (&json!("5"), &Value::Null));
    assert_eq!(service["spec"]["type"], "LoadBalancer");
    let port = &service["spec"]["ports"][0];
    assert_eq!((&port["name"], &port["port"]), (&json!("spice"), &json!(5910)));
    assert_eq!(service["spec"]["selector"]["app.kubernetes.io/instance"], "apple");
    assert!(ns.api::<Service>().get_opt("plum").await.unwrap().is_none(), "{{}} declines it");
    assert_eq!(ns.api::<Service>().get("pear").await.unwrap().labels()["f"], "7", "it need not be asked for");
    // A change of the labels is live, and so is the end.
    ns.patch_vm("apple", json!({ "spec": { "loadBalancerService": { "labels": { "d": "6" } } } })).await;
    eventually("the label", LIMIT, async || {
        (ns.api::<Service>().get("apple").await.unwrap().labels()["d"] == "6").then_some(())
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "loadBalancerService": null } })).await;
    eventually("the defaults", LIMIT, async || {
        (ns.api::<Service>().get("apple").await.unwrap().labels().get("b")? == "2").then_some(())
    })
    .await;
    ns.patch_vm("apple", json!({ "spec": { "loadBalancerService": {} } })).await;
    eventually("no Service", LIMIT, async || {
        ns.api::<Service>().get_opt("apple").await.unwrap().is_none().then_some(())
    })
    .await;

    let never = ManagedNamespace::with_configuration(
        "no-service",
        r#""/Manager": {"/Controller": {"/Reconciler": {loadBalancerService: false}}}"#,
    )
    .await;
    never.create_vm("apple", |vm| vm["spec"]["loadBalancerService"] = json!({ "labels": { "a": "b" } })).await;
    never.vm_with_reason("apple", "Starting").await;
    assert!(never.api::<Service>().get_opt("apple").await.unwrap().is_none());
}

#[tokio::test]
async fn the_runners_configuration_holds_what_the_spec_says() {
    let ns = ManagedNamespace::new("runner").await;
    ns
        .create_vm("apple", |vm| {
            let spec = &mut vm["spec"];
            spec["guestShutdownStops"] = json!(true);
            spec["runnerTemplate"] = json!({ "source": "my-template", "update": false });
            spec["loggingProperties"] = json!("level=FINE");
            spec["cloudInit"] = json!({ "metaData": { "x": "y" }, "userData": { "a": [1] }, "networkConfig": { "version": 2 } });
            spec["permissions"] = json!([
                { "user": "jane", "may": ["start", "stop", "reset", "accessConsole", "takeConsole"] },
                { "role": "admin", "may": ["*"] },
            ]);
            spec["pools"] = json!(["lab"]);
            spec["vm"] = json!({
                "state": "Running", "resetCount": 7, "machineUuid": "11111111-2222-3333-4444-555555555555", "useTpm": true, "firmware": "secure-4m",
                "bootMenu": true, "powerdownTimeout": 60, "cpuModel": "qemu64",
                "cpuTopology": { "sockets": 2, "diesPerSocket": 1, "coresPerDie": 2, "threadsPerCore": 2 }, "currentCpus": 3,
                "maximumRam": "8Gi", "currentRam": "4 GiB", "rtcBase": "localtime", "rtcClock": "vm",
                "networks": [{ "tap": { "mac": "02:00:00:00:00:01" } }, { "tap": { "bridge": "br1", "device": "e1000" } }],
                "disks": [
                    { "volumeClaimTemplate": { "metadata": { "name": "system" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } }, "bootindex": 1 },
                    { "cdrom": { "image": "Fedora.iso" }, "bootindex": 0 },
                    { "cdrom": { "image": "https://example.org/x.iso" } },
                    { "cdrom": { "image": "" } },
                ],
                "display": { "outputs": 2, "loggedInUser": "jane", "spice": { "port": 5910, "streamingVideo": "all", "usbRedirects": 3 } },
            });
        })
        .await;
    ns.vm_with_reason("apple", "Starting").await;
    let mut runner = runner(&ns, "apple").await;
    assert!(runner["cloudInit"]["metaData"]["instance-id"].as_str().unwrap().starts_with("i-"));
    runner["cloudInit"]["metaData"]["instance-id"] = json!("ID");
    for (pointer, expected) in [
        ("/dataDir", json!("/var/local/vm-data")),
        ("/template", json!("my-template")),
        ("/updateTemplate", json!(false)),
        ("/namespace", json!(ns.namespace.name())),
        ("/guestShutdownStops", json!(true)),
        ("/resetCounter", json!(7)),
        (
            "/cloudInit",
            json!({
                "metaData": { "x": "y", "instance-id": "ID", "local-hostname": "apple" },
                "networkConfig": { "version": 2 },
            }),
        ),
        ("/vm/name", json!("apple")),
        ("/vm/uuid", json!("11111111-2222-3333-4444-555555555555")),
        ("/vm/useTpm", json!(true)),
        ("/vm/firmware", json!("secure-4m")),
        ("/vm/bootMenu", json!(true)),
        ("/vm/powerdownTimeout", json!(60)),
        ("/vm/cpuModel", json!("qemu64")),
        ("/vm/maximumCpus", json!(8)),
        ("/vm/sockets", json!(2)),
        ("/vm/diesPerSocket", json!(1)),
        ("/vm/coresPerDie", json!(2)),
        ("/vm/threadsPerCore", json!(2)),
        ("/vm/currentCpus", json!(3)),
        ("/vm/maximumRam", json!("8 GiB")),
        ("/vm/currentRam", json!("4 GiB")),
        ("/vm/rtcBase", json!("localtime")),
        ("/vm/rtcClock", json!("vm")),
        (
            "/vm/network/0",
            json!({ "type": "tap", "device": "virtio-net", "bridge": "br0", "mac": "02:00:00:00:00:01" }),
        ),
        ("/vm/network/1", json!({ "type": "tap", "device": "e1000", "bridge": "br1" })),
        ("/vm/drives/0", json!({ "type": "raw", "resource": "/dev/system-disk", "bootindex": 1 })),
        (
            "/vm/drives/1",
            json!({ "type": "ide-cd", "file": "/var/local/vmop-image-repository/Fedora.iso", "bootindex": 0 }),
        ),
        ("/vm/drives/2/file", json!("https://example.org/x.iso")),
        ("/vm/drives/3/file", json!("")),
        ("/vm/display/outputs", json!(2)),
        ("/vm/display/loggedInUser", json!("jane")),
        ("/vm/display/spice/port", json!(5910)),
        ("/vm/display/spice/streaming-video", json!("all")),
        ("/vm/display/spice/usbRedirects", json!(3)),
    ] {
        assert_eq!(runner.pointer(pointer), Some(&expected), "{pointer}");
    }
    let data = ns.api::<ConfigMap>().get("apple").await.unwrap().data.unwrap();
    assert_eq!(data["logging.properties"], "level=FINE");
    let pod = json!(ns.api::<Pod>().get("apple").await.unwrap());
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 75);
    assert_eq!(pod["spec"]["serviceAccountName"], "vm-runner");
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["volumeDevices"], json!([{ "name": "system-disk", "devicePath": "/dev/system-disk" }]));
    let mounts = container["volumeMounts"].as_array().unwrap();
    let mount = |path: &str| mounts.iter().find(|mount| mount["mountPath"] == path).cloned().unwrap_or_default();
    assert_eq!(mount("/var/local/vmop-image-repository")["readOnly"], true);
    assert!(mount("/etc/opt/vmrunner").is_object() && mount("/var/local/vm-data").is_object());
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    assert!(volumes.iter().any(|volume| volume["persistentVolumeClaim"]["claimName"] == "vmop-image-repository"));
}

#[tokio::test]
async fn cloud_init_data_from_other_objects_is_mounted() {
    let ns = ManagedNamespace::new("data-from").await;
    let label = |name: &str| ns.namespace.kubectl(&["label", "secret", name, "vmoperator.jdrupes.org/cloud-init="]);
    ns.namespace.kubectl(&["create", "secret", "generic", "my-secret", "--from-literal=net.yaml=version: 2"]);
    label("my-secret");
    ns.create_vm("apple", |vm| {
        vm["spec"]["cloudInit"] = json!({
            "userDataFrom": { "configMapKeyRef": { "name": "my-map", "key": "user.yaml" } },
            "networkConfigFrom": { "secretKeyRef": { "name": "my-secret", "key": "net.yaml" } },
        });
    })
    .await;
    // A node would wait for it, and the Pod would not say for what.
    let missing = async |words: &str| {
        let message =
            |vm: &VirtualMachine| condition(vm, "Ready").filter(|ready| ready.1 == "MountMissing").map(|ready| ready.2);
        ns.vm_when("apple", words, |vm| message(vm).is_some_and(|message| message.contains(words))).await;
        assert!(ns.api::<Pod>().get_opt("apple").await.unwrap().is_none());
    };
    missing("ConfigMap my-map does not exist, and the Pod would mount it").await;
    ns.wait_for_event("apple", "MountMissing").await;
    ns.namespace.kubectl(&["create", "configmap", "my-map", "--from-literal=users.yaml=x"]);
    // What is not meant for VMs is not given to a guest, whatever the kind.
    let refused = async |words: &str| {
        let message = |vm: &VirtualMachine| {
            condition(vm, "Ready").filter(|ready| ready.1 == "SecretRefused").map(|ready| ready.2)
        };
        ns.vm_when("apple", words, |vm| message(vm).is_some_and(|message| message.contains(words))).await;
    };
    refused("kubectl label configmap my-map vmoperator.jdrupes.org/cloud-init=").await;
    let own =
        r#"{"metadata":{"labels":{"vmoperator.jdrupes.org/cloud-init":"","vmoperator.jdrupes.org/template-set":"x"}}}"#;
    ns.namespace.kubectl(&["patch", "configmap", "my-map", "--patch", own]);
    refused("it is a template set").await;
    ns.namespace.kubectl(&["label", "configmap", "my-map", "vmoperator.jdrupes.org/template-set-"]);
    missing("ConfigMap my-map has no key user.yaml").await;
    ns.namespace.kubectl(&["patch", "configmap", "my-map", "--patch", r#"{"data":{"user.yaml":"x"}}"#]);
    ns.vm_with_reason("apple", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("apple").await.unwrap());
    let mounted = pod["spec"]["volumes"][0]["projected"]["sources"].as_array().unwrap();
    for (kind, name, key, path) in [
        ("configMap", "my-map", "user.yaml", "cloud-init/user-data"),
        ("secret", "my-secret", "net.yaml", "cloud-init/network-config"),
    ] {
        let expected = json!({ kind: { "name": name, "items": [{ "key": key, "path": path }] } });
        assert!(mounted.contains(&expected), "no {expected} in {mounted:?}");
        assert_eq!(json!(mounted).to_string().matches(path).count(), 1, "{path}");
    }
    assert!(ns.api::<Secret>().get_opt("apple-cloud-init").await.unwrap().is_none());

    // A Secret that is not meant for VMs is not given to a guest, and nor is one that somebody may create later.
    let from = |secret: &str| json!({ "userDataFrom": { "secretKeyRef": { "name": secret, "key": "password" } } });
    ns.create_vm("plum", |vm| vm["spec"]["cloudInit"] = from("database")).await;
    let vm = ns.vm_with_reason("plum", "SecretRefused").await;
    let message = condition(&vm, "Ready").unwrap().2;
    assert!(message.contains("Secret database") && message.contains("it does not exist"), "{message}");
    ns.namespace.kubectl(&["create", "secret", "generic", "database", "--from-literal=password=secret"]);
    ns.vm_when("plum", "refused", |vm| condition(vm, "Ready").unwrap().2.contains("does not have the label")).await;
    assert!(ns.api::<Pod>().get_opt("plum").await.unwrap().is_none());
    label("database");
    ns.vm_with_reason("plum", "Starting").await;

    // What the manager has made is no VM's data, also where somebody gives it the label.
    label("plum-display-secret");
    for (name, kind, of) in [("fig", "secretKeyRef", "plum-display-secret"), ("kiwi", "configMapKeyRef", "plum")] {
        ns.create_vm(name, |vm| {
            vm["spec"]["cloudInit"] = json!({ "userDataFrom": { kind: { "name": of, "key": "display-password" } } });
        })
        .await;
        let vm = ns.vm_with_reason(name, "SecretRefused").await;
        let message = condition(&vm, "Ready").unwrap().2;
        assert!(message.contains("it belongs to a VM or a pool; put the data into another"), "{message}");
        assert!(ns.api::<Pod>().get_opt(name).await.unwrap().is_none());
    }
}

#[tokio::test]
async fn a_guest_that_could_not_start_again_is_not_restarted() {
    let ns = ManagedNamespace::new("no-way-back").await;
    let create = |kind: &[&str], name: &str| {
        ns.namespace.kubectl(&[&["create"], kind, &[name, "--from-literal=user.yaml=a: 1"]].concat());
        let kind = kind[0];
        ns.namespace.kubectl(&["label", kind, name, "vmoperator.jdrupes.org/cloud-init="]);
    };
    create(&["configmap"], "data");
    create(&["secret", "generic"], "keys");
    ns.create_vm("apple", |vm| {
        vm["spec"]["cloudInit"] = json!({
            "userDataFrom": { "configMapKeyRef": { "name": "data", "key": "user.yaml" } },
            "networkConfigFrom": { "secretKeyRef": { "name": "keys", "key": "user.yaml" } },
        });
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let uid = async || ns.api::<Pod>().get_opt("apple").await.unwrap().map(|pod| pod.metadata.uid);
    let first = uid().await;
    ns.namespace.kubectl(&["delete", "configmap/data", "secret/keys"]);
    let restart = json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/restartedAt": "monday" } } });
    ns.patch_vm("apple", restart).await;
    for (reason, words) in [("MountMissing", "ConfigMap data does not exist"), ("SecretRefused", "Secret keys")] {
        let says =
            |vm: &VirtualMachine| condition(vm, "Ready").is_some_and(|it| it.1 == reason && it.2.contains(words));
        ns.vm_when("apple", words, says).await;
        assert_eq!(uid().await, first, "the guest runs on");
        // What can be changed in a running guest is still changed.
        if reason == "MountMissing" {
            ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 2 } } })).await;
            eventually("the change to reach the runner", LIMIT, async || {
                (runner(&ns, "apple").await["vm"]["currentCpus"] == 2).then_some(())
            })
            .await;
            create(&["configmap"], "data");
        }
    }
    create(&["secret", "generic"], "keys");
    eventually("another Pod", LIMIT, async || (uid().await.is_some_and(|uid| Some(uid) != first)).then_some(())).await;
}

/// What is in the way of a start is in the way of a restart, and the guest does not go before it is away.
#[tokio::test]
async fn a_guest_goes_down_for_a_restart_only_when_all_that_its_start_needs_is_there() {
    let ns = ManagedNamespace::new("in-the-way").await;
    let uid = async || ns.api::<Pod>().get_opt("apple").await.unwrap().map(|pod| pod.metadata.uid);
    let rescue = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "rescue" },
        "spec": {
            "containers": [{ "name": "a", "image": "nowhere.invalid/a", "volumeDevices": [{ "name": "d", "devicePath": "/dev/d" }] }],
            "volumes": [{ "name": "d", "persistentVolumeClaim": { "claimName": "apple-core-disk" } }],
        },
    });
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": { "name": "full" },
        "spec": { "hard": { "persistentvolumeclaims": "0" } },
    });
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "apple-cloud-init" } });
    let disks = |more: Value| {
        let core = json!({ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } });
        json!({ "spec": { "vm": { "disks": [core, more] } } })
    };
    let data = json!({ "volumeClaimTemplate": { "metadata": { "name": "data" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } });
    ns.create_vm("apple", |_| {}).await;
    ns.vm_with_reason("apple", "Starting").await;
    for (number, (what, obstacle, change, words)) in [
        ("a Pod of others on the disk", Some(&rescue), json!({}), "rescue"),
        ("a disk that a quota refuses", Some(&quota), disks(data), "exceeded quota"),
        (
            "a ConfigMap of others",
            Some(&map),
            json!({ "spec": { "cloudInit": { "userData": { "a": 1 } } } }),
            "apple-cloud-init",
        ),
        ("no claim with CDs", None, disks(json!({ "cdrom": { "image": "a.iso" } })), "vmop-image-repository"),
    ]
    .into_iter()
    .enumerate()
    {
        ns.report("apple", true, "Started").await;
        ns.vm_with_reason("apple", "Running").await;
        let first = uid().await;
        if let Some(obstacle) = obstacle {
            ns.namespace.apply(&obstacle.to_string());
        }
        if what.contains("quota") {
            let status = "--output=jsonpath={.status.used}";
            let counted = async || (!ns.namespace.kubectl(&["get", "quota", "full", status]).is_empty()).then_some(());
            eventually("the quota to be counted", LIMIT, counted).await;
        }
        ns.patch_vm("apple", change).await;
        let restart =
            json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/restartedAt": format!("{number}") } } });
        ns.patch_vm("apple", restart).await;
        let says = |vm: &VirtualMachine| condition(vm, "Ready").is_some_and(|it| it.2.contains(words));
        let vm = ns.vm_when("apple", what, says).await;
        assert_eq!(uid().await, first, "{what}: the guest runs on: {:?}", condition(&vm, "Ready"));
        match obstacle {
            Some(obstacle) => {
                let (kind, name) = (obstacle["kind"].as_str().unwrap(), obstacle["metadata"]["name"].as_str().unwrap());
                ns.namespace.kubectl(&["delete", kind, name, "--grace-period=0", "--force"]);
            }
            None => {
                let claim = json!({
                    "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "vmop-image-repository" },
                    "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
                });
                ns.namespace.apply(&claim.to_string());
            }
        }
        eventually(what, LIMIT, async || (uid().await.is_some_and(|uid| Some(uid) != first)).then_some(())).await;
    }
}

#[tokio::test]
async fn a_guest_goes_down_for_a_restart_only_when_the_api_server_would_take_its_new_pod() {
    let ns = ManagedNamespace::new("refused-again").await;
    let uid = async || ns.api::<Pod>().get_opt("apple").await.unwrap().map(|pod| pod.metadata.uid);
    let restart =
        |number: &str| json!({ "metadata": { "annotations": { "vmoperator.jdrupes.org/restartedAt": number } } });
    // The quota has room for one Pod, and the one that runs is counted.
    let quota = json!({
        "apiVersion": "v1", "kind": "ResourceQuota", "metadata": { "name": "full" }, "spec": { "hard": { "pods": "1" } },
    });
    ns.create_vm("apple", |_| {}).await;
    ns.namespace.apply(&quota.to_string());
    ns.vm_with_reason("apple", "Starting").await;
    for (number, (change, mended, words)) in [
        (
            json!({ "requests": { "memory": "2Gi" }, "limits": { "memory": "1Gi" } }),
            json!({ "limits": { "memory": "2Gi" } }),
            "must be less than or equal to memory limit",
        ),
        (
            json!({ "limits": { "hugepages-2Mi": "3Mi" } }),
            json!({ "limits": { "hugepages-2Mi": null } }),
            "hugepages-2Mi",
        ),
    ]
    .into_iter()
    .enumerate()
    {
        ns.report("apple", true, "Started").await;
        ns.vm_with_reason("apple", "Running").await;
        let first = uid().await;
        ns.patch_vm("apple", json!({ "spec": { "resources": change } })).await;
        ns.patch_vm("apple", restart(&number.to_string())).await;
        let says = |vm: &VirtualMachine| condition(vm, "Ready").is_some_and(|it| it.2.contains(words));
        let vm = ns.vm_when("apple", words, says).await;
        let (_, _, message) = condition(&vm, "Ready").unwrap();
        assert!(message.contains("the guest runs on and is not restarted"), "{message}");
        assert_eq!(uid().await, first, "{message}");
        ns.patch_vm("apple", json!({ "spec": { "resources": mended } })).await;
        eventually(words, LIMIT, async || (uid().await.is_some_and(|uid| Some(uid) != first)).then_some(())).await;
    }
}

#[tokio::test]
async fn the_instance_id_changes_with_the_content_and_with_nothing_else() {
    let ns = ManagedNamespace::new("instance-id").await;
    ns.create_vm("apple", |vm| vm["spec"]["cloudInit"] = json!({ "userData": { "a": 1 } })).await;
    ns.vm_with_reason("apple", "Starting").await;
    let id = async || runner(&ns, "apple").await["cloudInit"]["metaData"]["instance-id"].clone();
    let first = id().await;
    ns.report("apple", true, "Started").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "currentCpus": 1 } } })).await;
    ns.vm_with_reason("apple", "Running").await;
    assert_eq!(id().await, first);
    ns.patch_vm("apple", json!({ "spec": { "cloudInit": { "userData": { "a": 2 } } } })).await;
    eventually("another instance-id", LIMIT, async || (id().await != first).then_some(())).await;
}

#[tokio::test]
async fn fields_that_are_not_set_have_the_documented_defaults() {
    let ns = ManagedNamespace::new("defaults").await;
    let mut vm = vm_manifest("apple");
    vm["spec"] = json!({ "vm": { "maximumCpus": 1, "networks": [{ "tap": {} }] } });
    ns.namespace.apply(&vm.to_string());
    let stored = ns.vm_with_reason("apple", "StoppedAsRequested").await;
    let spec = json!(stored.spec);
    for (pointer, expected) in [
        ("/guestShutdownStops", json!(false)),
        ("/runnerTemplate", json!({ "update": true })),
        ("/pools", json!([])),
        ("/vm/state", json!("Stopped")),
        ("/vm/useTpm", json!(false)),
        ("/vm/firmware", json!("uefi")),
        ("/vm/bootMenu", json!(false)),
        ("/vm/powerdownTimeout", json!(900)),
        ("/vm/cpuModel", json!("host")),
        ("/vm/rtcBase", json!("utc")),
        ("/vm/rtcClock", json!("rt")),
        ("/vm/networks/0", json!({ "tap": {} })),
        ("/vm/display/outputs", json!(1)),
        ("/vm/display/spice/port", json!(5900)),
        ("/vm/display/spice/usbRedirects", json!(2)),
        ("/vm/display/spice/generateSecret", json!(true)),
    ] {
        assert_eq!(spec.pointer(pointer), Some(&expected), "{pointer}");
    }
    let runner = runner(&ns, "apple").await;
    assert_eq!(runner["vm"]["maximumRam"], "1000000000");
    assert_eq!(runner["vm"]["network"][0]["bridge"], "br0");
    let status = stored.status.unwrap();
    assert_eq!(
        (status.runner.cpus, status.runner.ram.as_deref(), status.created, status.ready),
        (Some(0), Some("0"), Some(false), Some(false))
    );

    let mut vm = vm_manifest("plum");
    vm["spec"] = json!({ "vm": { "cpuTopology": { "coresPerDie": 4 }, "currentCpus": 4, "firmware": "uefi-4m" } });
    ns.namespace.apply(&vm.to_string());
    let spec = ns.vm_with_reason("plum", "StoppedAsRequested").await.spec.vm;
    let expected = json!({ "sockets": 1, "diesPerSocket": 0, "coresPerDie": 4, "threadsPerCore": 0 });
    assert_eq!((json!(spec.cpu_topology), json!(spec.firmware)), (expected, json!("uefi-4m")));
}

#[tokio::test]
async fn every_disk_has_a_claim_with_the_documented_name() {
    let ns = ManagedNamespace::with_configuration(
        "claims",
        r#""/Manager": {"/Controller": {"/Reconciler": {runnerDataPvc: {storageClassName: local-path}}}}"#,
    )
    .await;
    let template = |name: Option<&str>| {
        let metadata = name.map_or_else(|| json!({}), |name| json!({ "name": name, "annotations": { "mine": name } }));
        json!({ "volumeClaimTemplate": { "metadata": metadata, "spec": {
            "storageClassName": "", "selector": { "matchLabels": { "a": "b" } }, "resources": { "requests": { "storage": "40Gi" } },
        } } })
    };
    ns.create_vm("apple", |vm| {
        vm["spec"]["vm"]["disks"] =
            json!([{ "cdrom": { "image": "" } }, template(None), template(Some("system")), template(None)]);
    })
    .await;
    ns.vm_with_reason("apple", "Starting").await;
    let claims = ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap().items;
    let mut names: Vec<String> = claims.iter().map(ResourceExt::name_any).collect();
    names.sort();
    assert_eq!(names, ["apple-disk-0", "apple-disk-2", "apple-runner-data", "apple-system-disk"]);
    let system = claim(&claims, "apple-system-disk");
    assert_eq!(system["spec"]["storageClassName"], "");
    assert_eq!(system["spec"]["selector"], json!({ "matchLabels": { "a": "b" } }));
    assert_eq!(system["spec"]["resources"]["requests"]["storage"], "40Gi");
    assert_eq!(system["metadata"]["annotations"]["mine"], "system");
    let data = claim(&claims, "apple-runner-data");
    assert_eq!(data["spec"]["storageClassName"], "local-path");
    assert_eq!(data["spec"]["accessModes"], json!(["ReadWriteOnce"]));
    assert_eq!(data["spec"]["resources"]["requests"]["storage"], "8Mi");
    let pod = json!(ns.api::<Pod>().get("apple").await.unwrap());
    let devices = json!(["/dev/disk-0", "/dev/system-disk", "/dev/disk-2"]);
    let found: Vec<&Value> = pod["spec"]["containers"][0]["volumeDevices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|device| &device["devicePath"])
        .collect();
    assert_eq!(json!(found), devices);
}

#[tokio::test]
async fn claims_of_the_oldest_releases_are_used() {
    let ns = ManagedNamespace::new("old-claims").await;
    let labels = json!({
        "app.kubernetes.io/name": "vm-runner", "app.kubernetes.io/instance": "apple", "app.kubernetes.io/managed-by": "vm-operator",
    });
    for name in ["core-disk-apple-0", "disk-1-apple-0", "vmop-runner-data-apple-0"] {
        let claim = json!({
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": name, "labels": labels },
            "spec": { "accessModes": ["ReadWriteOnce"], "volumeMode": if name.contains("data") { "Filesystem" } else { "Block" },
                "resources": { "requests": { "storage": "1Gi" } } },
        });
        ns.namespace.apply(&claim.to_string());
    }
    let pod = create_vm_and_pod(&ns, "apple", |vm| {
        let disks = vm["spec"]["vm"]["disks"].as_array_mut().unwrap();
        disks.push(json!({ "cdrom": { "image": "" } }));
        disks.push(json!({ "volumeClaimTemplate": { "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }));
    })
    .await;
    assert_eq!(claims_of(&pod), ["core-disk-apple-0", "disk-1-apple-0", "vmop-runner-data-apple-0"]);
    assert_eq!(ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap().items.len(), 3);
}

#[tokio::test]
async fn status_fields_of_other_components_are_kept() {
    let ns = ManagedNamespace::new("others").await;
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "desktops" },
        "spec": { "permissions": [] },
    });
    ns.api::<VmPool>().create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
    ns.create_vm("apple", |vm| vm["spec"]["pools"] = json!(["desktops"])).await;
    ns.vm_with_reason("apple", "Starting").await;
    let assignment = json!({ "pool": "desktops", "user": "alice", "lastUsed": "2126-01-01T00:00:00Z" });
    let theirs = json!({ "status": { "consoleUser": "alice", "assignment": assignment } });
    let as_console = PatchParams { field_manager: Some("console".into()), ..PatchParams::default() };
    let vms = ns.api::<VirtualMachine>();
    vms.patch_status("apple", &as_console, &Patch::Merge(theirs)).await.unwrap();
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    let vm = ns.vm_with_reason("apple", "StoppedAsRequested").await;
    assert_eq!(vm.spec.pools, ["desktops"]);
    let status = json!(vm.status.unwrap());
    let mut kept = status["assignment"].clone();
    let uid = kept.as_object_mut().unwrap().remove("poolUid");
    assert_eq!((&status["consoleUser"], &kept), (&json!("alice"), &assignment));
    assert!(uid.is_some(), "the manager adds which pool it is");
}

#[tokio::test]
async fn conditions_about_the_guest_become_false_when_its_pod_is_gone() {
    let ns = ManagedNamespace::new("gone").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let pod = json!({ "phase": "Running", "podIP": "10.0.0.8", "podIPs": [{ "ip": "10.0.0.8" }, { "ip": "fd00::8" }] });
    ns.patch_pod_status("apple", pod).await;
    let vm = ns.vm_when("apple", "addressed", |vm| vm.status.as_ref().unwrap().addresses.is_some()).await;
    let addresses = json!([{ "type": "PodIP", "address": "10.0.0.8" }, { "type": "PodIP", "address": "fd00::8" }]);
    assert_eq!(json!(vm.status.unwrap().addresses), addresses);
    // The runner was killed with its Pod: its last words are of a guest that somebody uses.
    let now = "2026-01-01T00:00:00Z";
    let said = ["VmopAgentConnected", "UserLoggedIn", "ConsoleConnected"];
    let said = said.map(
        |type_| json!({ "type": type_, "status": "True", "reason": "Said", "message": "", "lastTransitionTime": now }),
    );
    let report = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "status": { "conditions": said, "consoleClient": "10.0.0.7", "loggedInUser": "alice", "displayPasswordSerial": 3 },
    });
    let as_runner = PatchParams::apply("vm-runner-guest").force();
    let vms = ns.api::<VirtualMachine>();
    vms.patch_status("apple", &as_runner, &Patch::Apply(&report)).await.unwrap();
    ns.namespace.kubectl(&["delete", "pod", "apple", "--force", "--grace-period=0"]);
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    let vm = ns
        .vm_when("apple", "without a user", |vm| {
            ["VmopAgentConnected", "UserLoggedIn", "ConsoleConnected"]
                .iter()
                .all(|type_| condition(vm, type_).is_some_and(|(status, ..)| status == "False"))
        })
        .await;
    let status = vm.status.unwrap();
    assert_eq!(
        (status.runner.console_client.as_deref(), status.runner.logged_in_user.as_deref()),
        (Some(""), Some(""))
    );
    assert_eq!((status.runner.display_password_serial, status.addresses), (Some(3), None));
}

#[tokio::test]
async fn the_manager_corrects_the_conditions_of_a_runner_that_was_killed() {
    let ns = ManagedNamespace::new("killed-runner").await;
    ns.create_vm("apple", |_| ()).await;
    ns.vm_with_reason("apple", "Starting").await;
    ns.report("apple", true, "Started").await;
    ns.vm_with_reason("apple", "Running").await;
    let container = |state: &str, detail: Value| {
        json!({ "phase": "Running", "containerStatuses": [{
            "name": "vm-runner", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": { state: detail },
        }] })
    };
    let killed = json!({ "exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:10:00Z" });
    ns.patch_pod_status("apple", container("terminated", killed.clone())).await;
    let vm = ns.vm_with_reason("apple", "RunnerFailed").await;
    let message = condition(&vm, "Ready").unwrap().2;
    assert!(
        message.starts_with("container vm-runner was killed because it used more memory than its limit"),
        "{message}"
    );
    let is_false =
        |vm: &VirtualMachine, type_: &str| condition(vm, type_).is_some_and(|(status, ..)| status == "False");
    assert!(is_false(&vm, "Running") && is_false(&vm, "Booted"), "{vm:?}");
    assert_eq!(json!(vm.status.unwrap().runner.cpus), json!(0));

    // The node starts it again, and it speaks for itself.
    let mut again = container("running", json!({}));
    again["containerStatuses"][0]["lastState"] = json!({ "terminated": killed });
    ns.patch_pod_status("apple", again).await;
    // What was reported before does not count again. A VM that is new takes many times as long as a reconcile.
    ns.create_vm("pear", |_| ()).await;
    ns.vm_with_reason("pear", "Starting").await;
    let vm = ns.vm_with_reason("apple", "RunnerFailed").await;
    assert!(is_false(&vm, "Running") && is_false(&vm, "Booted"), "{vm:?}");
    let condition_of = |type_: &str| {
        json!({
            "type": type_, "status": "True", "reason": "Started", "message": "",
            "lastTransitionTime": "2026-01-01T00:20:00Z",
        })
    };
    let report = json!({ "status": { "conditions": [condition_of("Running"), condition_of("Booted")] } }).to_string();
    let uid = ns.namespace.kubectl(&["get", "pod", "apple", "--output=jsonpath={.metadata.uid}"]);
    ns.namespace.kubectl(&["patch", "vmreport", &uid, "--subresource=status", "--type=merge", "--patch", &report]);
    let vm = ns.vm_with_reason("apple", "Running").await;
    assert_eq!(condition(&vm, "Running").unwrap().1, "Started");
    assert_eq!(json!(vm.status.unwrap().runner.cpus), json!(1));
}

#[tokio::test]
async fn a_pool_has_defaults_and_its_permissions_are_validated() {
    let ns = ManagedNamespace::new("pools").await;
    let pool = |spec: Value| json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": "desktops" }, "spec": spec });
    ns.namespace.apply(&pool(json!({ "permissions": [{ "role": "users" }] })).to_string());
    let pools = ns.api::<VmPool>();
    let found = pools.get("desktops").await.unwrap().spec;
    assert_eq!((found.retention.as_str(), found.login_on_assignment), ("PT1h", false));
    // Defaults in lists are for the reader, or they would be changes of what Git applied.
    assert_eq!(found.permissions[0].may, None);
    let permissions = json!([{ "user": "alice", "may": ["accessConsole", "start"] }]);
    ns.namespace.apply(
        &pool(json!({ "retention": "2026-12-24T18:00:00Z", "loginOnAssignment": true, "permissions": permissions }))
            .to_string(),
    );
    let found = pools.get("desktops").await.unwrap().spec;
    assert_eq!((json!(found.permissions), found.login_on_assignment), (permissions, true));
    for wrong in
        [json!([{ "user": "alice", "role": "users" }]), json!([{}]), json!([{ "user": "alice", "may": ["fly"] }])]
    {
        let pool = serde_json::from_value::<DynamicObject>(pool(json!({ "permissions": wrong }))).unwrap();
        let refused =
            Api::<DynamicObject>::namespaced_with(ns.client.clone(), ns.namespace.name(), &VmPool::api_resource())
                .patch("desktops", &PatchParams::apply("test").force(), &Patch::Apply(&pool))
                .await;
        assert!(refused.is_err_and(|error| error.to_string().contains("spec.permissions[0]")), "{wrong}");
    }
}

/// The names of the claims that a Pod mounts, in order.
fn claims_of(pod: &Value) -> Vec<&str> {
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let mut claims: Vec<&str> =
        volumes.iter().filter_map(|volume| volume["persistentVolumeClaim"]["claimName"].as_str()).collect();
    claims.sort_unstable();
    claims
}

#[tokio::test]
async fn the_deployment_stays_in_one_namespace_and_the_example_works() {
    let ns = ManagedNamespace::new("deploy").await;
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("example/local-path");
    let manifests = ns.cluster.kubectl(&["kustomize", &folder.to_string_lossy()]);
    for text in manifests.split("\n---\n") {
        let object: Value = serde_yaml::from_str(text).unwrap();
        let is_policy = object["kind"].as_str().unwrap().starts_with("ValidatingAdmissionPolicy");
        let may_only_read = object["metadata"]["name"] == "vm-operator-node-reader";
        assert!(is_policy || may_only_read || object["metadata"]["namespace"] == "vmop-demo", "{text}");
    }
    // The binding would be that of another test's manager.
    let own = manifests.replace("name: vm-operator-node-reader", &format!("name: {}", ns.namespace.name()));
    // Other tests have VMs that this installation does not allow.
    let selector = format!(
        "  matchResources: {{namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {}}}}}}}\n",
        ns.namespace.name()
    );
    let binding = "  policyName: vms.vmoperator.jdrupes.org\n";
    assert!(own.contains(binding), "{own}");
    let own = own.replace(binding, &format!("{binding}{selector}"));
    ns.namespace.apply(&own.replace("vmop-demo", ns.namespace.name()));
    let configuration = ns.api::<ConfigMap>().get("vm-operator").await.unwrap().data.unwrap();
    let configuration = Config::parse(&configuration["config.yaml"]).unwrap();
    assert_eq!(
        (configuration.reconciler.disk_pvc.volume_mode, configuration.unknown),
        (VolumeMode::Filesystem, vec![])
    );
    let machine = std::fs::read_to_string(folder.join("test-vm.yaml")).unwrap();
    let pack = ["templates", "pack", "--set", "import-disk", "example/sets/import-disk"];
    let root = env!("CARGO_MANIFEST_DIR");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(pack).current_dir(root).output();
    ns.namespace.apply(&String::from_utf8(output.unwrap().stdout).unwrap());
    ns.namespace.apply(&machine.replace("vmop-demo", ns.namespace.name()));
    ns.vm_with_reason("test-vm", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("test-vm").await.unwrap());
    assert_eq!(pod["spec"]["initContainers"][0]["name"], "import", "{pod}");
    // No claim that the cluster may not have.
    assert_eq!(claims_of(&pod), ["test-vm-runner-data", "test-vm-system-disk"]);
}
