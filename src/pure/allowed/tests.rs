use serde_json::json;

use super::*;
use crate::{
    config::Config,
    object::{ObjectKey, Rendered, Update},
    observed::Observed,
    plan::{Action, plan},
    render::{RandomInput, TemplateSet, render},
    test_support::{applied, nothing, vm},
};

fn config(lists: &str) -> ReconcilerConfig {
    Config::parse(&format!("/Manager:\n  /Controller:\n    /Reconciler: {lists}\n")).unwrap().reconciler
}

/// A VM whose spec is merged with that.
fn with(spec: &Value) -> VirtualMachine {
    fn merge(into: &mut Value, from: &Value) {
        match (into, from) {
            (Value::Object(into), Value::Object(from)) => {
                from.iter().for_each(|(key, value)| merge(into.entry(key).or_insert(Value::Null), value));
            }
            (into, from) => *into = from.clone(),
        }
    }
    vm(|vm| merge(&mut vm["spec"], spec))
}

fn found(spec: &Value, lists: &str) -> Vec<String> {
    let refusals = refusals(&with(spec), Reach::default(), &config(lists));
    let list = |rule: &Rule| match rule {
        Rule::List(list) => list.to_string(),
        Rule::Never(_) => "never".to_owned(),
    };
    refusals.iter().map(|NotAllowed { field, value, rule }| format!("{field}={value} {}", list(rule))).collect()
}

fn disk(template: Value) -> Value {
    json!({ "vm": { "disks": [{ "volumeClaimTemplate": template }] } })
}

fn claim(spec: Value) -> Value {
    disk(json!({ "spec": spec }))
}

const CLAIM: &str = "spec.vm.disks[0].volumeClaimTemplate";
const LEGACY: &str = "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch";

/// What a VM wants, what is refused without lists, and lists with which nothing is.
#[test]
fn what_reaches_further_than_a_vm_is_refused_until_it_is_listed() {
    let rows = [
        (
            json!({ "vm": { "networks": [{ "tap": {} }] } }),
            "spec.vm.networks[0].tap.bridge=br0 networks.bridges",
            "{networks: {bridges: [br0]}}",
        ),
        (
            json!({ "vm": { "networks": [{ "pod": {} }, { "tap": { "bridge": "vlan7" } }] } }),
            "spec.vm.networks[1].tap.bridge=vlan7 networks.bridges",
            "{networks: {bridges: ['vlan*']}}",
        ),
        (
            json!({ "image": { "source": "evil.example.org/x:1@sha256:00" } }),
            "spec.image=evil.example.org/x runnerImages",
            "{runnerImages: [evil.example.org/x]}",
        ),
        (
            json!({ "image": { "repository": "r.example.org:5000/a", "path": "b", "version": "2" } }),
            "spec.image=r.example.org:5000/a/b runnerImages",
            "{legacyRunnerImages: ['r.example.org:5000/a/*']}",
        ),
        (
            json!({ "image": { "source": format!("{LEGACY}:latest") } }),
            "spec.image=ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch legacyRunnerImages",
            "{legacyRunnerImages: ['ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-*']}",
        ),
        (json!({ "nodeName": "cp-1" }), "spec.nodeName=cp-1 nodeNames", "{nodeNames: ['cp-?']}"),
        (
            json!({ "affinity": { "podAntiAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": [
                { "topologyKey": "h", "namespaces": ["orchard", "bank"] } ] } } }),
            "spec.affinity.podAntiAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].namespaces=bank affinityNamespaces",
            "{affinityNamespaces: [bank]}",
        ),
        (
            json!({ "affinity": { "podAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": [
                { "weight": 1, "podAffinityTerm": { "topologyKey": "h", "namespaceSelector": {} } } ] } } }),
            "spec.affinity.podAffinity.preferredDuringSchedulingIgnoredDuringExecution[0].podAffinityTerm.namespaceSelector=* affinityNamespaces",
            "{affinityNamespaces: ['*']}",
        ),
        (
            json!({ "resources": { "limits": { "cpu": 1, "hugepages-2Mi": "4Mi", "vmoperator.jdrupes.org/kvm": 1, "nvidia.com/gpu": 1 } } }),
            "spec.resources.limits=nvidia.com/gpu extendedResources",
            "{extendedResources: [nvidia.com/*]}",
        ),
        (
            disk(json!({ "metadata": { "name": "a", "annotations": { "cdi.kubevirt.io/x": "y" } } })),
            "spec.vm.disks[0].volumeClaimTemplate.metadata.annotations=cdi.kubevirt.io/x claims.annotations",
            "{claims: {annotations: [cdi.kubevirt.io/x]}}",
        ),
        (
            disk(json!({ "metadata": { "name": "a", "labels": { "recurring-job.longhorn.io/source": "enabled" } } })),
            "spec.vm.disks[0].volumeClaimTemplate.metadata.labels=recurring-job.longhorn.io/source claims.labels",
            "{claims: {labels: ['*']}}",
        ),
        (
            claim(json!({ "dataSource": { "kind": "PersistentVolumeClaim", "name": "web-core-disk" } })),
            "spec.vm.disks[0].volumeClaimTemplate.spec.dataSource=PersistentVolumeClaim/web-core-disk claims.dataSources",
            "{claims: {dataSources: [PersistentVolumeClaim/*]}}",
        ),
        (
            claim(
                json!({ "dataSourceRef": { "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "s", "namespace": "bank" } }),
            ),
            "spec.vm.disks[0].volumeClaimTemplate.spec.dataSourceRef=bank:VolumeSnapshot.snapshot.storage.k8s.io/s claims.dataSources",
            "{claims: {dataSources: ['bank:VolumeSnapshot.*/*']}}",
        ),
        (
            claim(json!({ "dataSourceRef": "all" })),
            "spec.vm.disks[0].volumeClaimTemplate.spec.dataSourceRef=\"all\" claims.dataSources",
            "{claims: {dataSources: ['*']}}",
        ),
        (
            claim(json!({ "volumeName": "pv-7", "storageClassName": "" })),
            "spec.vm.disks[0].volumeClaimTemplate.spec.volumeName=pv-7 claims.volumeNames",
            "{claims: {volumeNames: [pv-7]}}",
        ),
        (
            claim(json!({ "selector": {} })),
            "spec.vm.disks[0].volumeClaimTemplate.spec.selector=* claims.volumeNames",
            "{claims: {volumeNames: ['*']}}",
        ),
        (
            claim(json!({ "storageClassName": "" })),
            "spec.vm.disks[0].volumeClaimTemplate.spec.storageClassName=* claims.volumeNames",
            "{claims: {volumeNames: ['*']}}",
        ),
    ];
    for (spec, refused, lists) in rows {
        assert_eq!(found(&spec, "{}"), [refused], "{spec}");
        assert_eq!(found(&spec, lists), [""; 0], "{spec} {lists}");
    }
}

#[test]
fn a_vm_like_any_other_needs_no_list() {
    let own = ReconcilerConfig::default().own_image();
    for spec in [
        json!({}),
        json!({ "image": { "source": format!("{}:other", repository(&own)) } }),
        json!({ "nodeSelector": { "a": "b" }, "affinity": { "nodeAffinity": {}, "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{ "topologyKey": "h", "namespaces": ["orchard"] }] } } }),
        json!({ "resources": { "requests": { "cpu": "1", "memory": "1Gi", "ephemeral-storage": "1Gi" } } }),
        json!({ "vm": { "networks": [{ "user": { "net": "10.1.0.0/24" } }, { "pod": {} }],
            "display": { "spice": { "port": 7000 } }, "disks": [{ "cdrom": { "image": "https://example.org/a.iso" } }] } }),
        claim(
            json!({ "storageClassName": "fast", "accessModes": ["ReadWriteOnce"], "volumeMode": "Block", "dataSource": null,
            "volumeName": "", "volumeAttributesClassName": "gold", "resources": { "requests": { "storage": "1Gi" } } }),
        ),
        json!({ "loadBalancerService": { "labels": { "a": "b" } }, "loggingProperties": "handlers=java.util.logging.FileHandler" }),
        json!({ "runnerTemplate": { "source": "../x" }, "vm": { "cpuModel": "host,\"x" } }),
    ] {
        assert_eq!(found(&spec, "{}"), [""; 0], "{spec}");
    }
    let configured = json!({ "image": { "source": "r.example.org/runner:2" } });
    assert_eq!(found(&configured, "{runnerImage: 'r.example.org/runner:1'}"), [""; 0]);
    assert_eq!(
        found(
            &json!({ "resources": { "limits": { "d.example.org/kvm": 1 } } }),
            "{nodeDevices: {machine: d.example.org/kvm}}"
        ),
        [""; 0]
    );
}

#[test]
fn a_tap_leads_into_the_network_of_the_node_and_to_nothing_more() {
    let lists = "{networks: {bridges: [br0]}}";
    let tapped = |mut spec: Value, more: Value| {
        let networks = spec["vm"]["networks"].as_array_mut();
        match networks {
            Some(networks) => networks.push(more),
            None => spec["vm"]["networks"] = json!([more]),
        }
        spec
    };
    let tap = || json!({ "tap": {} });
    for (spec, refused, more) in [
        (json!({ "vm": { "networks": [{ "user": {} }] } }), "spec.vm.networks[0].user=user never", ""),
        (
            json!({ "vm": { "disks": [{ "cdrom": { "image": "http://127.0.0.1:2379/x" } }] } }),
            "spec.vm.disks[0].cdrom.image=http://127.0.0.1:2379/x networks.cdUrls",
            "cdUrls: ['http://127.0.0.1:2379/*']",
        ),
        (
            json!({ "vm": { "display": { "spice": { "port": 10250 } } } }),
            "spec.vm.display.spice.port=10250 networks.displayPorts",
            "displayPorts: [10250]",
        ),
        (
            json!({ "vm": { "display": { "vnc": { "port": 6443 } } } }),
            "spec.vm.display.vnc.port=6443 networks.displayPorts",
            "displayPorts: ['6000-7000']",
        ),
        (json!({ "vm": { "display": { "spice": { "port": 5810 } } } }), "", ""),
        (
            json!({ "vm": { "display": { "spice": { "port": 0 } }, "disks": [{ "cdrom": { "image": "a.iso" } }] } }),
            "",
            "",
        ),
    ] {
        let spec = tapped(spec, tap());
        let expected: Vec<&str> = [refused].into_iter().filter(|it| !it.is_empty()).collect();
        assert_eq!(found(&spec, lists), expected, "{spec}");
        let allowed = if more.is_empty() { expected } else { vec![] };
        assert_eq!(found(&spec, &format!("{{networks: {{bridges: [br0], {more}}}}}")), allowed, "{spec}");
    }
}

#[test]
fn the_display_of_a_service_has_a_listed_port() {
    let spec =
        |service: Value| json!({ "loadBalancerService": service, "vm": { "display": { "spice": { "port": 6443 } } } });
    let on = "loadBalancerService: true";
    let refused = ["spec.vm.display.spice.port=6443 networks.displayPorts"];
    assert_eq!(found(&spec(Value::Null), &format!("{{{on}}}")), refused);
    assert_eq!(found(&spec(json!({ "labels": {} })), &format!("{{{on}}}")), refused);
    assert_eq!(found(&spec(Value::Null), &format!("{{{on}, networks: {{displayPorts: [6443]}}}}")), [""; 0]);
    // Without a Service it is a port of the Pod.
    assert_eq!(found(&spec(json!({})), &format!("{{{on}}}")), [""; 0]);
    assert_eq!(found(&spec(Value::Null), "{}"), [""; 0]);
}

#[test]
fn a_vm_changes_only_listed_keys_of_its_service() {
    let spec = json!({ "loadBalancerService": {
        "labels": { "kept": "1", "own": "2" }, "annotations": { "internal": null, "dns": "bank.example.org", "absent": "" } } });
    let defaults = "loadBalancerService: {labels: {kept: '1'}, annotations: {internal: 'true'}}";
    assert_eq!(
        found(&spec, &format!("{{{defaults}}}")),
        [
            "spec.loadBalancerService.labels=own services.labels",
            "spec.loadBalancerService.annotations=dns services.annotations",
            "spec.loadBalancerService.annotations=internal services.annotations",
        ]
    );
    assert_eq!(
        found(&spec, &format!("{{{defaults}, services: {{labels: [own], annotations: [dns, internal]}}}}")),
        [""; 0]
    );
    assert_eq!(found(&spec, "{loadBalancerService: false}"), [""; 0]);
}

#[test]
fn a_legacy_runner_gets_no_text_that_means_more_to_it() {
    let lists = format!("{{legacyRunnerImages: ['{LEGACY}'], networks: {{bridges: ['*']}}, cdFolders: [/srv/isos]}}");
    let usual = json!({
        "runnerTemplate": { "source": "Standard-VM-latest.ftl.yaml" },
        "loggingProperties": "handlers=java.util.logging.ConsoleHandler\n# x\norg.jdrupes.vmoperator.runner.qemu.level=FINEST\n\
            java.util.logging.ConsoleHandler.level=ALL\njava.util.logging.SimpleFormatter.format=%1$tF %2$s%n\n",
        "vm": { "cpuModel": "host,pmu=off", "networks": [{ "tap": { "device": "virtio-net", "bridge": "br-lan.7" } }],
            "disks": [{ "cdrom": { "image": "dir/a b.iso" } }, { "cdrom": { "image": "/srv/isos/a.iso" } },
                { "cdrom": { "image": "/var/local/vmop-image-repository/b.iso" } }, { "cdrom": { "image": "" } }] },
    });
    let legacy = |mut spec: Value| {
        spec["image"] = json!({ "source": format!("{LEGACY}:latest") });
        spec
    };
    assert_eq!(found(&legacy(usual), &lists), [""; 0]);
    for (spec, field) in [
        (json!({ "runnerTemplate": { "source": "../../etc/opt/vmrunner/x" } }), "spec.runnerTemplate.source"),
        (json!({ "runnerTemplate": { "source": ".x" } }), "spec.runnerTemplate.source"),
        (json!({ "loggingProperties": "handlers=java.util.logging.FileHandler" }), "spec.loggingProperties"),
        (json!({ "loggingProperties": "a.level=INFO\\\n\nconfig=x" }), "spec.loggingProperties"),
        (json!({ "loggingProperties": "handlers:java.util.logging.FileHandler" }), "spec.loggingProperties"),
        (json!({ "loggingProperties": "java.util.logging.FileHandler.pattern = /dev/sda" }), "spec.loggingProperties"),
        (json!({ "vm": { "cpuModel": "host\", \"-drive" } }), "spec.vm.cpuModel"),
        (
            json!({ "vm": { "networks": [{ "user": { "net": "10.0.2.0/24,guestfwd=tcp:10.0.2.9:1-cmd:id" } }] } }),
            "spec.vm.networks[0].user.net",
        ),
        (
            json!({ "vm": { "networks": [{ "user": { "device": "loader,file=/dev/sda" } }] } }),
            "spec.vm.networks[0].user.device",
        ),
        (json!({ "vm": { "networks": [{ "tap": { "bridge": "a\"b" } }] } }), "spec.vm.networks[0].tap.bridge"),
        (
            json!({ "vm": { "display": { "spice": { "streamingVideo": "off,disable-ticketing=on" } } } }),
            "spec.vm.display.spice.streamingVideo",
        ),
        (json!({ "vm": { "display": { "loggedInUser": "${x}" } } }), "spec.vm.display.loggedInUser"),
        (json!({ "vm": { "disks": [{ "cdrom": { "image": "/dev/sda" } }] } }), "spec.vm.disks[0].cdrom.image"),
        (json!({ "vm": { "disks": [{ "cdrom": { "image": "../../../dev/sda" } }] } }), "spec.vm.disks[0].cdrom.image"),
        (
            json!({ "vm": { "disks": [{ "cdrom": { "image": "/srv/isos/../../dev/sda" } }] } }),
            "spec.vm.disks[0].cdrom.image",
        ),
        (json!({ "vm": { "disks": [{ "cdrom": { "image": "/srv/isosx/a" } }] } }), "spec.vm.disks[0].cdrom.image"),
        (json!({ "vm": { "disks": [{ "cdrom": { "image": "fat://dev" } }] } }), "spec.vm.disks[0].cdrom.image"),
        (
            json!({ "vm": { "disks": [{ "cdrom": { "image": "a.iso,file.filename=/dev/sda" } }] } }),
            "spec.vm.disks[0].cdrom.image",
        ),
    ] {
        let refused = found(&legacy(spec.clone()), &lists);
        assert!(
            !refused.is_empty() && refused.iter().all(|it| it.starts_with(field) && it.ends_with(" never")),
            "{spec}: {refused:?}"
        );
        // Our runner takes it as what it is.
        assert_eq!(found(&spec, &lists), [""; 0], "{spec}");
    }
}

#[test]
fn an_unknown_field_of_a_claim_is_refused() {
    assert_eq!(found(&claim(json!({ "newSource": {} })), "{}"), [format!("{CLAIM}.spec=newSource never")]);
}

#[test]
fn a_message_names_field_value_and_list() {
    let spec = json!({ "nodeName": "n".repeat(200), "vm": { "networks": [{ "user": {} }, { "tap": {} }] } });
    let refusals = refusals(&with(&spec), Reach::default(), &config("{}"));
    let message = message(&refusals).unwrap();
    assert!(message.contains("spec.vm.networks[1].tap.bridge: \"br0\" is not allowed here; an administrator can add it to networks.bridges in the manager's configuration"), "{message}");
    assert!(
        message.contains("spec.vm.networks[0].user: ")
            && message.contains("network of its node")
            && message.len() < 800,
        "{message}"
    );
    assert_eq!(super::message(&[]), None);
}

#[test]
fn whoever_may_do_everything_is_refused_only_what_no_list_allows() {
    let everything = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
    let spec = json!({ "nodeName": "n", "image": { "source": "x/y" }, "vm": { "networks": [{ "tap": {} }], "display": { "spice": { "port": 1 } } } });
    assert_eq!(refusals(&with(&spec), Reach::default(), &everything), []);
}

/// What is printed can be pasted, and then nothing is refused.
#[test]
fn the_lines_for_some_vms_allow_what_they_have() {
    let before = "networks: {bridges: [br0]}, podLabels: [team]";
    let spec = json!({
        "image": { "source": format!("{LEGACY}:4") }, "nodeName": "n1",
        "resources": { "limits": { "nvidia.com/gpu": 1 } },
        "vm": {
            "networks": [{ "tap": { "bridge": "br9" } }], "display": { "spice": { "port": 7001 } },
            "disks": [
                { "volumeClaimTemplate": { "metadata": { "annotations": { "a/b": "c" } }, "spec": { "volumeName": "v", "dataSource": { "kind": "K", "name": "n" } } } },
                { "cdrom": { "image": "https://example.org/a.iso?x=1" } },
            ],
        },
    });
    let configured = config(&format!("{{{before}}}"));
    let refusals = refusals(&with(&spec), Reach::default(), &configured);
    assert_eq!(refusals.len(), 9, "{refusals:?}");
    let lines = lines(&configured.allowed, &extended(&configured.allowed, &refusals));
    assert!(
        lines.contains("  legacyRunnerImages: [\"ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch\"]\n"),
        "{lines}"
    );
    assert!(lines.contains("  networks:\n    bridges: [\"br0\", \"br9\"]\n"), "{lines}");
    assert!(!lines.contains("podLabels") && !lines.contains("services"), "{lines}");
    let text = format!("/Manager:\n  /Controller:\n    /Reconciler: {{{before}}}\n{lines}");
    let pasted = Config::parse(&text).unwrap();
    assert_eq!(
        (pasted.unknown.len(), super::refusals(&with(&spec), Reach::default(), &pasted.reconciler)),
        (0, vec![]),
        "{text}"
    );
}

/// A Pod keeps its network and its rights until it is replaced, whatever becomes of the spec.
#[test]
fn what_a_pod_that_exists_may_not_have_waits_for_the_next_start() {
    let config = allowing_only(&["networks: {bridges: [br0]}", &format!("legacyRunnerImages: [{LEGACY}]")]);
    let tap = json!({ "vm": { "networks": [{ "tap": {} }] } });
    let legacy = json!({ "image": { "source": format!("{LEGACY}:4") } });
    let cd = |image: &str| json!([{ "cdrom": { "image": image } }]);
    for (what, before, after, waits) in [
        ("user", &tap, json!({ "vm": { "networks": [{ "user": {} }] } }), true),
        ("a URL", &tap, json!({ "vm": { "disks": cd("http://127.0.0.1:2379/keys") } }), true),
        ("a port of the node", &tap, json!({ "vm": { "display": { "spice": { "port": 10250 } } } }), true),
        ("nothing that reaches further", &tap, json!({ "vm": { "currentCpus": 1 } }), false),
        ("a device of the node", &legacy, json!({ "vm": { "disks": cd("/dev/sda") } }), true),
        ("options in a text", &legacy, json!({ "vm": { "cpuModel": "host\", \"-drive" } }), true),
        ("another number", &legacy, json!({ "vm": { "currentCpus": 1 } }), false),
    ] {
        let render = |vm: &VirtualMachine, observed: &Observed| {
            let random = RandomInput { display_password: "secret".into(), ..RandomInput::default() };
            render(vm, observed, &config, &random, &TemplateSet::builtin().unwrap()).unwrap()
        };
        let on_node = |kind: &str, object: &mut Value| {
            if kind == "Pod" {
                object["spec"]["nodeName"] = json!("n1");
            }
        };
        let observed = applied(&render(&with(before), &nothing()), on_node);
        let vm = with(&after);
        let plan = plan(&vm, &observed, Some(&render(&vm, &observed)));
        let of_map = |key: &ObjectKey| ["ConfigMap", "Secret"].contains(&key.kind.as_str());
        let is_applied = plan
            .steps
            .iter()
            .flatten()
            .any(|action| matches!(action, Action::Apply { object, uid: Some(_) } if of_map(&object.key)));
        assert_eq!(is_applied, !waits, "{what}: {:?}", plan.steps);
        let is_pending = plan.pending.iter().any(|change| change.path.starts_with("objects/ConfigMap/"));
        assert_eq!(is_pending, waits, "{what}: {:?}", plan.pending);
        // As soon as that Pod is gone, it counts.
        let objects = observed.objects.iter().filter(|object| !object.key.is_pod()).cloned().collect();
        let gone = Observed::of(objects, observed.now);
        let is_live = |object: &&Rendered| of_map(&object.key) && object.update == Update::Live;
        assert!(render(&vm, &gone).iter().any(|object| is_live(&object)), "{what}");
    }
}

fn allowing_only(lists: &[&str]) -> ReconcilerConfig {
    config(&format!("{{{}}}", lists.join(", ")))
}
