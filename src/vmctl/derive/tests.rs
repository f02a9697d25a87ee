use proptest::prelude::*;

use super::*;

fn pod() -> PodFacts {
    PodFacts { name: "web-0".into(), uid: "u-1".into(), namespace: "orchard".into(), node: "node-a".into() }
}

fn named(name: &str) -> PodFacts {
    PodFacts { name: name.into(), ..pod() }
}

fn keep() -> Order {
    Order { namespace: "orchard".into(), disks: Disks::Keep, force: false }
}

/// The prototype `apple`, changed by `edit`.
fn prototype(edit: impl FnOnce(&mut Value)) -> DynamicObject {
    let mut vm = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": { "name": "apple", "namespace": "orchard", "uid": "apple-uid", "resourceVersion": "7" },
        "spec": { "vm": {
            "state": "Stopped", "maximumCpus": 2, "powerdownTimeout": 20,
            "disks": [{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }],
        } },
        "status": { "phase": "Stopped" },
    });
    edit(&mut vm);
    serde_json::from_value(vm).unwrap()
}

fn derived(edit: impl FnOnce(&mut Value)) -> Derived {
    derive(&prototype(edit), &pod(), &PodObject::default(), &keep()).unwrap()
}

#[test]
fn the_vm_is_the_prototype_with_a_name_a_node_and_a_power_state() {
    let Derived { manifest, warnings } = derived(|vm| vm["spec"]["futureField"] = json!({ "kept": [1] }));
    let expected = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
        "metadata": {
            "name": "apple-web-0", "namespace": "orchard", "labels": { "vmoperator.jdrupes.org/prototype": "apple" },
            "annotations": {
                "vmoperator.jdrupes.org/prototype": "orchard/apple", "vmoperator.jdrupes.org/vmctl-pod": "orchard/web-0",
                "vmoperator.jdrupes.org/vmctl-pod-uid": "u-1",
            },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Pod", "name": "web-0", "uid": "u-1" }],
        },
        "spec": {
            "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
                { "matchFields": [{ "key": "metadata.name", "operator": "In", "values": ["node-a"] }] },
            ] } } },
            "futureField": { "kept": [1] },
            "vm": {
                "state": "Running", "maximumCpus": 2, "powerdownTimeout": 20,
                "disks": [{ "volumeClaimTemplate": { "metadata": { "name": "core" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } } } }],
            },
        },
    });
    assert_eq!((manifest, warnings), (expected, vec![]));
}

#[test]
fn what_two_vms_must_not_share_and_orders_to_one_guest_are_left_out() {
    let spec = derived(|vm| {
        let spec = &mut vm["spec"];
        spec["nodeName"] = json!("elsewhere");
        spec["cloudInit"] = json!({ "metaData": { "instance-id": "i", "local-hostname": "h", "region": "r" }, "userData": { "a": 1 } });
        for (field, value) in [
            ("machineUuid", json!("00000000-0000-4000-8000-000000000000")),
            ("resetCount", json!(3)),
            ("rebootCount", json!(4)),
            ("paused", json!(true)),
            ("networks", json!([{ "pod": { "mac": "02:00:00:00:00:01", "device": "e1000" } }, { "tap": { "mac": "02:00:00:00:00:02", "bridge": "br1" } }, { "user": {} }])),
        ] {
            spec["vm"][field] = value;
        }
    })
    .manifest["spec"]
        .clone();
    assert_eq!(spec["nodeName"], Value::Null);
    assert_eq!(spec["cloudInit"], json!({ "metaData": { "region": "r" }, "userData": { "a": 1 } }));
    for field in ["machineUuid", "resetCount", "rebootCount", "paused"] {
        assert_eq!(spec["vm"].get(field), None, "{field}");
    }
    assert_eq!(
        spec["vm"]["networks"],
        json!([{ "pod": { "device": "e1000" } }, { "tap": { "bridge": "br1" } }, { "user": {} }])
    );
}

#[test]
fn labels_for_tools_and_all_annotations_are_left_out() {
    let metadata = derived(|vm| {
        vm["metadata"]["labels"] = json!({
            "app": "web", "team": "fruit", "app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/instance": "argo-app",
            "kustomize.toolkit.fluxcd.io/name": "apps", "helm.toolkit.fluxcd.io/name": "x", "argocd.argoproj.io/instance": "y", "helm.sh/chart": "z",
            "applyset.kubernetes.io/part-of": "q",
        });
        vm["metadata"]["annotations"] = json!({ "kubectl.kubernetes.io/last-applied-configuration": "{}", "vmoperator.jdrupes.org/forceStop": "x" });
        vm["metadata"]["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "Pod", "name": "other", "uid": "o" }]);
    })
    .manifest["metadata"]
        .clone();
    assert_eq!(metadata["labels"], json!({ "app": "web", "team": "fruit", PROTOTYPE_LABEL: "apple" }));
    assert_eq!(metadata["annotations"].as_object().unwrap().len(), 3, "{metadata}");
    assert_eq!(metadata["ownerReferences"][0]["name"], "web-0");
}

#[test]
fn the_node_is_required_in_each_alternative_of_the_prototype() {
    let is_node = json!({ "key": "metadata.name", "operator": "In", "values": ["node-a"] });
    let expression = json!({ "key": "disk", "operator": "Exists" });
    for (affinity, expected) in [
        (json!(null), json!([{ "matchFields": [is_node] }])),
        (json!({ "nodeAffinity": null }), json!([{ "matchFields": [is_node] }])),
        (
            json!({ "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": { "nodeSelectorTerms": [
                { "matchExpressions": [expression] }, {}, { "matchFields": [{ "key": "metadata.name", "operator": "NotIn", "values": ["x"] }] },
            ] } } }),
            json!([
                { "matchExpressions": [expression], "matchFields": [is_node] },
                {},
                { "matchFields": [{ "key": "metadata.name", "operator": "NotIn", "values": ["x"] }, is_node] },
            ]),
        ),
    ] {
        let manifest = derived(|vm| vm["spec"]["affinity"] = affinity.clone()).manifest;
        let terms = "/spec/affinity/nodeAffinity/requiredDuringSchedulingIgnoredDuringExecution/nodeSelectorTerms";
        assert_eq!(manifest.pointer(terms), Some(&expected), "{affinity}");
    }
    let others = json!({ "podAntiAffinity": { "x": 1 }, "nodeAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [] } });
    let manifest = derived(|vm| vm["spec"]["affinity"] = others).manifest;
    assert_eq!(manifest["spec"]["affinity"]["podAntiAffinity"], json!({ "x": 1 }));
    assert_eq!(manifest["spec"]["affinity"]["nodeAffinity"].as_object().unwrap().len(), 2);
}

#[test]
fn disks_that_would_be_shared_or_lost_are_refused() {
    fn claim(vm: &mut Value) -> &mut Value {
        &mut vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]
    }
    let object = |controller: &str| PodObject { controller: Some(controller.into()), ..PodObject::default() };
    let missing = || PodObject { is_missing: true, ..PodObject::default() };
    let order = |disks, force| Order { disks, force, ..keep() };
    let plain = |_: &mut Value| ();
    type Edit = fn(&mut Value);
    let cases: [(Edit, PodObject, Order, Option<&str>); 14] = [
        (plain, PodObject::default(), keep(), None),
        (plain, missing(), keep(), Some("there is no Pod orchard/web-0 with the UID u-1")),
        // Outside a cluster, for example.
        (plain, missing(), Order { namespace: "vms".into(), ..keep() }, None),
        (plain, object("StatefulSet"), keep(), None),
        (plain, object("ReplicaSet"), keep(), Some("a ReplicaSet gives each of its Pods a new name")),
        (plain, object("DaemonSet"), keep(), Some("a DaemonSet gives")),
        (plain, object("ReplicaSet"), order(Disks::Keep, true), None),
        (plain, object("ReplicaSet"), order(Disks::Ephemeral, false), None),
        (plain, object("StatefulSet"), order(Disks::Ephemeral, false), None),
        (|vm| claim(vm)["volumeName"] = json!("pv-1"), object("StatefulSet"), keep(), Some("volumeName: pv-1")),
        (|vm| claim(vm)["volumeName"] = json!(""), object("StatefulSet"), keep(), None),
        (|vm| claim(vm)["accessModes"] = json!(["ReadWriteOnce"]), object("StatefulSet"), keep(), None),
        (
            |vm| claim(vm)["accessModes"] = json!(["ReadWriteOnce", "ReadWriteMany"]),
            object("StatefulSet"),
            order(Disks::Ephemeral, true),
            Some("spec.vm.disks[0].volumeClaimTemplate.spec.accessModes"),
        ),
        (|vm| drop(vm["spec"].as_object_mut().unwrap().remove("vm")), PodObject::default(), keep(), Some("no spec.vm")),
    ];
    for (index, (edit, object, order, refusal)) in cases.into_iter().enumerate() {
        let result = derive(&prototype(edit), &pod(), &object, &order);
        match (result, refusal) {
            (Ok(_), None) => {}
            (Err(error), Some(words)) => assert!(error.to_string().contains(words), "{index}: {error}"),
            (result, refusal) => panic!("{index}: {result:?} instead of {refusal:?}"),
        }
    }
}

#[test]
fn a_vm_elsewhere_has_no_owner_and_what_may_surprise_is_said() {
    let elsewhere = Order { namespace: "vms".into(), ..keep() };
    let object = PodObject { grace: Some(30), ..PodObject::default() };
    let from = json!({ "userDataFrom": { "secretKeyRef": { "name": "s", "key": "k" } } });
    let odd = prototype(|vm| {
        vm["spec"]["cloudInit"] = from;
        vm["spec"]["pools"] = json!(["p"]);
    });
    let Derived { manifest, warnings } = derive(&odd, &pod(), &object, &elsewhere).unwrap();
    assert_eq!(manifest["metadata"].get("ownerReferences"), None, "the garbage collector would delete the VM at once");
    assert_eq!(manifest["metadata"]["namespace"], "vms");
    let begins = [
        "the VM is in the namespace vms",
        "this Pod has 30 s to end",
        "cloud-init's data",
        "the prototype is in a pool",
    ];
    assert_eq!(warnings.len(), begins.len(), "{warnings:?}");
    for (warning, begin) in warnings.iter().zip(begins) {
        assert!(warning.starts_with(begin), "{warning}");
    }
    assert!(warnings[1].ends_with("give the Pod 35 s or more"), "{}", warnings[1]);
    for (grace, is_enough) in [(Some(34), false), (Some(35), true), (None, true)] {
        let object = PodObject { grace, ..PodObject::default() };
        let warnings = derive(&prototype(|_| ()), &pod(), &object, &keep()).unwrap().warnings;
        assert_eq!(warnings.is_empty(), is_enough, "{grace:?}: {warnings:?}");
    }
}

#[test]
fn a_name_that_fits_is_the_two_names_and_another_one_ends_with_a_hash() {
    let (fits, long) = ("p".repeat(59), "p".repeat(60));
    for (prototype, pod, expected) in [
        ("apple", "web-0", "apple-web-0".to_owned()),
        ("a", "b-c", "a-b-c".to_owned()),
        ("a-b", "c", "a-b-c".to_owned()),
        ("abc", &*fits, format!("abc-{fits}")),
        ("abc", &*long, format!("abc-{}-", "p".repeat(50))),
        ("a.b", "web-0", "a-b-web-0-".to_owned()),
        (&"a".repeat(54), "b-long-name", format!("{}-", "a".repeat(54))),
    ] {
        let name = name("orchard", prototype, &named(pod));
        let digits = name.strip_prefix(&expected).unwrap_or_else(|| panic!("{name} does not begin with {expected}"));
        let expected_digits = if expected.ends_with('-') { DIGITS } else { 0 };
        assert_eq!(digits.len(), expected_digits, "{name}");
        assert!(digits.chars().all(|digit| digit.is_ascii_hexdigit()), "{name}");
    }
    let long = "p".repeat(60);
    let hashed = |namespace: &str, prototype: &str| name(namespace, prototype, &named(&long));
    assert_eq!(hashed("orchard", "abc"), hashed("orchard", "abc"), "a StatefulSet's Pods find their disks again");
    assert_ne!(hashed("orchard", "abc"), hashed("meadow", "abc"));
}

proptest! {
    /// Whatever the names are, the VM's is one that the API server, a label, a host name and a Service take, and a longer name never
    /// collides with that of other parts.
    #[test]
    fn a_name_is_always_valid(
        prototype in "[a-z0-9]([-a-z0-9.]{0,60}[a-z0-9])?", pod in "[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", cut in 1_usize..60,
    ) {
        let derived = name("orchard", &prototype, &named(&pod));
        prop_assert!(derived.len() <= LONGEST_NAME, "{derived}");
        let is_letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        prop_assert!(derived.bytes().all(|byte| is_letter(byte) || byte == b'-'), "{derived}");
        prop_assert!(is_letter(derived.as_bytes()[0]) && is_letter(*derived.as_bytes().last().unwrap()), "{derived}");
        // The same letters, divided elsewhere.
        let all = format!("{prototype}-{pod}");
        if let Some((first, second)) = all.get(..cut).zip(all.get(cut + 1..)).filter(|_| all.as_bytes()[cut] == b'-' && all.len() > LONGEST_NAME)
            && !second.is_empty() && first != prototype
        {
            prop_assert_ne!(derived, name("orchard", first, &named(second)));
        }
    }
}
