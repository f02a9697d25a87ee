use std::collections::BTreeSet;

use super::*;
use crate::{exchange::Grade, test_support::vm};

/// The fields that an exported VM may have, as they are in KubeVirt's `types.go` and `schema.go` (commit 0154a7e). A list has `[]`; what is
/// below `*` is a Kubernetes type or a map.
const FIELDS: &[&str] = &[
    "apiVersion",
    "kind",
    "metadata.*",
    "spec.runStrategy",
    "spec.template.metadata.labels.*",
    "spec.template.spec.affinity.*",
    "spec.template.spec.hostname",
    "spec.template.spec.nodeSelector.*",
    "spec.template.spec.startStrategy",
    "spec.template.spec.terminationGracePeriodSeconds",
    "spec.template.spec.domain.clock.utc",
    "spec.template.spec.domain.cpu.cores",
    "spec.template.spec.domain.cpu.maxSockets",
    "spec.template.spec.domain.cpu.model",
    "spec.template.spec.domain.cpu.sockets",
    "spec.template.spec.domain.cpu.threads",
    "spec.template.spec.domain.devices.autoattachPodInterface",
    "spec.template.spec.domain.devices.disks[].bootOrder",
    "spec.template.spec.domain.devices.disks[].disk.bus",
    "spec.template.spec.domain.devices.disks[].name",
    "spec.template.spec.domain.devices.inputs[].bus",
    "spec.template.spec.domain.devices.inputs[].name",
    "spec.template.spec.domain.devices.inputs[].type",
    "spec.template.spec.domain.devices.interfaces[].bridge",
    "spec.template.spec.domain.devices.interfaces[].macAddress",
    "spec.template.spec.domain.devices.interfaces[].masquerade",
    "spec.template.spec.domain.devices.interfaces[].model",
    "spec.template.spec.domain.devices.interfaces[].name",
    "spec.template.spec.domain.devices.panicDevices[].model",
    "spec.template.spec.domain.devices.rng",
    "spec.template.spec.domain.devices.tpm.persistent",
    "spec.template.spec.domain.devices.watchdog.i6300esb.action",
    "spec.template.spec.domain.devices.watchdog.name",
    "spec.template.spec.domain.features.acpi.enabled",
    "spec.template.spec.domain.features.smm.enabled",
    "spec.template.spec.domain.firmware.bootloader.bios",
    "spec.template.spec.domain.firmware.bootloader.efi.persistent",
    "spec.template.spec.domain.firmware.bootloader.efi.secureBoot",
    "spec.template.spec.domain.firmware.uuid",
    "spec.template.spec.domain.machine.type",
    "spec.template.spec.domain.memory.guest",
    "spec.template.spec.domain.memory.maxGuest",
    "spec.template.spec.domain.resources.limits.*",
    "spec.template.spec.domain.resources.requests.*",
    "spec.template.spec.networks[].multus.networkName",
    "spec.template.spec.networks[].name",
    "spec.template.spec.networks[].pod",
    "spec.template.spec.networks[].pod.vmNetworkCIDR",
    "spec.template.spec.volumes[].cloudInitNoCloud.networkData",
    "spec.template.spec.volumes[].cloudInitNoCloud.networkDataSecretRef.name",
    "spec.template.spec.volumes[].cloudInitNoCloud.secretRef.name",
    "spec.template.spec.volumes[].cloudInitNoCloud.userData",
    "spec.template.spec.volumes[].name",
    "spec.template.spec.volumes[].persistentVolumeClaim.claimName",
];

/// The paths of all values; an empty map is a value.
fn paths(value: &Value, path: &str, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) if !map.is_empty() => map.iter().for_each(|(name, value)| {
            let dot = if path.is_empty() { "" } else { "." };
            paths(value, &format!("{path}{dot}{name}"), found);
        }),
        Value::Array(list) => list.iter().for_each(|value| paths(value, &format!("{path}[]"), found)),
        _ => drop(found.insert(path.to_owned())),
    }
}

fn check_fields(manifest: &Value) {
    let mut found = BTreeSet::new();
    paths(manifest, "", &mut found);
    for path in found {
        let is_known = |field: &&str| field.strip_suffix('*').map_or(path == **field, |begin| path.starts_with(begin));
        assert!(FIELDS.iter().any(is_known), "KubeVirt has no {path}");
    }
}

fn exported(edit: impl FnOnce(&mut Value)) -> (Value, Vec<String>) {
    let exported = export(&vm(edit));
    let manifest = exported.objects.last().unwrap().clone();
    check_fields(&manifest);
    let losses = exported.losses().map(|remark| format!("{}: {}", remark.field, remark.grade)).collect();
    (manifest, losses)
}

#[test]
fn a_small_vm_has_its_claim_its_memory_and_its_identity() {
    let (manifest, losses) = exported(|vm| {
        vm["metadata"]["labels"] = json!({ "tier": "web" });
        vm["spec"]["vm"]["maximumRam"] = json!("2 GiB");
        vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }]);
        vm["spec"]["vm"]["firmware"] = json!("bios");
        vm["spec"]["vm"]["display"] = json!({ "vnc": {} });
        vm["status"] =
            json!({ "identity": { "uuid": "AAAAAAAA-0000-0000-0000-000000000000", "macs": ["02:00:00:00:00:0A"] } });
    });
    let spec = &manifest["spec"]["template"]["spec"];
    assert_eq!(manifest["spec"]["runStrategy"], "Always");
    assert_eq!(manifest["spec"]["template"]["metadata"]["labels"], json!({ "tier": "web", "kubevirt.io/vm": "apple" }));
    assert_eq!(spec["domain"]["cpu"], json!({ "sockets": 1, "cores": 2, "threads": 1, "model": "host-passthrough" }));
    assert_eq!(spec["domain"]["memory"], json!({ "guest": "2Gi" }));
    assert_eq!(spec["domain"]["firmware"]["uuid"], "aaaaaaaa-0000-0000-0000-000000000000");
    assert_eq!(spec["domain"]["devices"]["interfaces"][0]["macAddress"], "02:00:00:00:00:0a");
    assert_eq!(
        spec["volumes"],
        json!([{ "name": "core-disk", "persistentVolumeClaim": { "claimName": "apple-core-disk" } }])
    );
    assert_eq!(spec["domain"]["devices"]["disks"], json!([{ "name": "core-disk", "disk": { "bus": "virtio" } }]));
    assert_eq!(losses, ["spec.vm.networks[0]: changed"]);
}

#[test]
fn the_claims_are_those_that_the_vm_has() {
    let (manifest, _) = exported(|vm| {
        vm["status"] = json!({ "claims": [{ "name": "core-disk-apple-0", "uid": "u" }] });
    });
    let volume = &manifest["spec"]["template"]["spec"]["volumes"][0];
    assert_eq!(volume["persistentVolumeClaim"]["claimName"], "core-disk-apple-0");
}

#[test]
fn everything_that_has_no_equivalent_is_said() {
    let disk = |name: &str, index: u32| json!({ "volumeClaimTemplate": { "metadata": { "name": name }, "spec": {} }, "bootindex": index });
    let (manifest, losses) = exported(|vm| {
        vm["spec"] = json!({
            "image": { "source": "x" }, "resources": { "limits": { "cpu": "2", "nvidia.com/gpu": "1" } }, "nodeName": "n1",
            "nodeSelector": { "disk": "fast" }, "affinity": { "nodeAffinity": {} }, "runnerTemplate": { "update": false },
            "templates": { "set": "s" }, "templateValues": { "a": 1 }, "guestShutdownStops": true,
            "loadBalancerService": {}, "permissions": [{ "user": "ada", "may": ["*"] }], "pools": ["p"],
            "loggingProperties": "x",
            "cloudInit": {
                "metaData": { "instance-id": "i", "local-hostname": "h" }, "userData": { "packages": ["a".repeat(3000)] },
                "networkConfigFrom": { "secretKeyRef": { "name": "net", "key": "config" } },
            },
            "vm": {
                "state": "Running", "useTpm": true, "firmware": "secure", "bootMenu": true, "cpuModel": "Skylake-Server,+vmx",
                "accelerator": "tcg", "cpuTopology": { "sockets": 2, "diesPerSocket": 2, "coresPerDie": 2, "threadsPerCore": 1 },
                "currentCpus": 3, "maximumRam": "4Gi", "currentRam": "1Gi", "rtcBase": "localtime", "rtcClock": "host",
                "networks": [
                    { "tap": { "bridge": "br1", "device": "vmxnet3" } }, { "user": { "net": "10.1.0.0/24" } }, { "pod": {} },
                ],
                "disks": [disk("a", 1), disk("b", 0), disk("c", 1), { "cdrom": { "image": "x.iso" } }, { "cdrom": { "image": "" } }],
                "display": { "outputs": 2, "loggedInUser": "ada", "clipboard": "spice" }, "paused": true, "onPanic": "stop", "watchdog": { "action": "poweroff" },
            },
        });
    });
    let spec = &manifest["spec"]["template"]["spec"];
    assert_eq!(
        spec["domain"]["cpu"],
        json!({ "sockets": 1, "cores": 4, "threads": 1, "maxSockets": 2, "model": "Skylake-Server" })
    );
    assert_eq!(spec["domain"]["memory"], json!({ "guest": "1Gi", "maxGuest": "4Gi" }));
    assert_eq!(spec["domain"]["features"]["smm"]["enabled"], true, "Secure Boot needs it");
    assert_eq!(
        spec["networks"],
        json!([
            { "name": "net0", "multus": { "networkName": "br1" } }, { "name": "net1", "pod": { "vmNetworkCIDR": "10.1.0.0/24" } },
        ])
    );
    let order: Vec<&Value> =
        spec["domain"]["devices"]["disks"].as_array().unwrap().iter().map(|disk| &disk["bootOrder"]).collect();
    assert_eq!(order, [&json!(2), &json!(1), &Value::Null, &Value::Null]);
    assert_eq!(spec["nodeSelector"], json!({ "disk": "fast", "kubernetes.io/hostname": "n1" }));
    assert_eq!(manifest["spec"]["runStrategy"], "RerunOnFailure");
    for expected in [
        "spec.image: left out",
        "spec.resources.limits.nvidia.com/gpu: left out",
        "spec.nodeName: changed",
        "spec.runnerTemplate: left out",
        "spec.templates: left out",
        "spec.templateValues: left out",
        "spec.loadBalancerService: left out",
        "spec.permissions: left out",
        "spec.pools: left out",
        "spec.loggingProperties: left out",
        "spec.cloudInit: changed",
        "spec.cloudInit.metaData: left out",
        "spec.cloudInit.networkConfigFrom: changed",
        "spec.vm.useTpm: changed",
        "spec.vm.firmware: changed",
        "spec.vm.bootMenu: left out",
        "spec.vm.cpuModel: left out",
        "spec.vm.accelerator: left out",
        "spec.vm.cpuTopology.diesPerSocket: changed",
        "spec.vm.currentCpus: changed",
        "spec.vm.currentRam: changed",
        "spec.vm.rtcBase: left out",
        "spec.vm.rtcClock: left out",
        "spec.vm.networks[0]: changed",
        "spec.vm.networks[0].device: changed",
        "spec.vm.networks[1]: changed",
        "spec.vm.networks[2]: left out",
        "spec.vm.disks[2].bootindex: left out",
        "spec.vm.disks[3].cdrom: left out",
        "spec.vm.disks[4].cdrom: left out",
        "spec.vm.display: changed",
        "spec.vm.display.outputs: left out",
        "spec.vm.display.loggedInUser: left out",
        "spec.vm.display.clipboard: left out",
        "spec.vm.paused: changed",
        "spec.vm.onPanic: changed",
        "spec.vm.watchdog: changed",
    ] {
        assert!(losses.iter().any(|loss| loss == expected), "{expected} in {losses:#?}");
    }
}

#[test]
fn long_data_for_cloud_init_is_in_a_secret() {
    let apple =
        |length: usize| vm(|vm| vm["spec"]["cloudInit"] = json!({ "userData": format!("#!{}", "a".repeat(length)) }));
    let short = export(&apple(100));
    assert_eq!(short.objects.len(), 1);
    let long = export(&apple(LONGEST_INLINE));
    assert_eq!(
        (&long.objects[0]["kind"], &long.objects[0]["metadata"]["namespace"]),
        (&json!("Secret"), &json!("orchard"))
    );
    let volumes = &long.objects[1]["spec"]["template"]["spec"]["volumes"];
    assert_eq!(volumes[1]["cloudInitNoCloud"], json!({ "secretRef": { "name": long.objects[0]["metadata"]["name"] } }));
    // A VM whose cloud-init data is empty has it nevertheless.
    let empty = export(&vm(|vm| vm["spec"]["cloudInit"] = json!({})));
    assert!(empty.objects[0]["spec"]["template"]["spec"]["volumes"][1]["cloudInitNoCloud"]["userData"].is_string());
}

#[test]
fn sizes_are_as_kubernetes_writes_them() {
    for (bytes, text) in [(1 << 30, "1Gi"), (1536 << 20, "1536Mi"), (1_000_000_000, "1000000000"), (3 << 10, "3Ki")] {
        assert_eq!(size(bytes), text);
    }
    assert!(export(&vm(|_| ())).remarks.iter().any(|remark| remark.grade == Grade::Same));
}
