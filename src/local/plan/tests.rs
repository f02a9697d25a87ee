use serde_json::{Value, json};

use super::*;
use crate::{
    config::{Allowed, ReconcilerConfig},
    render::{TemplateSet, first_start},
    runner_config::Protocol,
    test_support::vm,
};

const FORWARD: Forward =
    Forward { protocol: Protocol::Tcp, address: std::net::Ipv4Addr::LOCALHOST, port: 2222, guest_port: 22 };

fn options() -> Options {
    Options {
        dir: "/home/alice/vms/apple".into(),
        runtime_dir: "/home/alice/vms/apple/run".into(),
        cd_folders: vec!["/home/alice/cds".into()],
        ..Options::default()
    }
}

/// The plan of a VM whose `spec` is changed so.
fn planned(spec: &Value, others: &[Value], options: &Options) -> Result<LocalPlan, Error> {
    let vm = vm(|vm| {
        for (name, value) in spec.as_object().unwrap() {
            match (name.as_str(), value) {
                ("vm", Value::Object(fields)) => vm["spec"]["vm"].as_object_mut().unwrap().extend(fields.clone()),
                _ => vm["spec"][name] = value.clone(),
            }
        }
    });
    let set = TemplateSet::builtin().unwrap();
    let config = ReconcilerConfig { allowed: Allowed::everything(), ..ReconcilerConfig::default() };
    let rendered = first_start(&vm, &config, &set).unwrap();
    let objects = Objects::new(rendered.iter().map(|object| &*object.value), others.iter())?;
    plan(&objects, options)
}

fn claim(name: &str, size: &str) -> Value {
    json!({ "volumeClaimTemplate": {
        "metadata": { "name": name },
        "spec": { "resources": { "requests": { "storage": size } } },
    } })
}

fn everything() -> Value {
    json!({
        "cloudInit": { "userData": { "message": "hi" }, "networkConfig": { "version": 2 } },
        "guestShutdownStops": true,
        "loggingProperties": ".level=WARNING",
        "vm": {
            "networks": [
                { "tap": { "bridge": "br7", "mac": "02:00:00:00:00:07" } },
            ],
            "disks": [
                claim("system", "4Gi"),
                { "cdrom": { "image": "fedora.iso" } },
                { "cdrom": { "image": "https://example.org/a.iso" } },
                { "cdrom": { "image": "" } },
                claim("data", "1Gi"),
            ],
        },
    })
}

fn shown(plan: &LocalPlan) -> Value {
    let LocalPlan { config, files, overlay, notes } = plan;
    let is_file = |cd: &&str| !cd.is_empty() && !cd.contains("://");
    let cds: Vec<&str> = config.vm.drives.iter().filter_map(Drive::cd).filter(is_file).collect();
    let texts: BTreeMap<&String, String> = files
        .iter()
        .filter(|(name, _)| *name != "config.yaml")
        .map(|(name, content)| (name, String::from_utf8_lossy(content).into_owned()))
        .collect();
    let overlay = overlay.as_ref().map(|overlay| json!([overlay.file, overlay.exists, overlay.size]));
    json!({
        "dataDir": config.data_dir,
        "runtimeDir": config.runtime_dir,
        "guestShutdownStops": config.guest_shutdown_stops,
        "networks": config.vm.network,
        "drives": config.vm.drives,
        "display": config.vm.display,
        "overlay": overlay, "cds": cds, "notes": notes, "files": texts,
    })
}

#[test]
fn a_vm_with_everything_runs_from_a_folder() {
    let options = Options { has_image: true, publish: vec![FORWARD], display: true, ..options() };
    insta::assert_yaml_snapshot!(shown(&planned(&everything(), &[], &options).unwrap()));
}

#[test]
fn the_file_of_the_configuration_is_what_the_plan_says() {
    let plan = planned(&everything(), &[], &options()).unwrap();
    let text = String::from_utf8(plan.files["config.yaml"].clone()).unwrap();
    assert_eq!(RunnerConfig::parse(&text).unwrap(), plan.config);
    assert_eq!(plan.config.vm.display.protocol(), None, "without --display nobody can connect to the guest");
    assert!(!plan.files.contains_key("display-password"));
}

#[test]
fn a_network_of_a_pod_is_a_user_network_that_forwards_ports() {
    let spec = json!({ "vm": { "networks": [{ "pod": { "mac": "02:00:00:00:00:08" } }] } });
    let plan = planned(&spec, &[], &Options { publish: vec![FORWARD], ..options() }).unwrap();
    let mac = Some("02:00:00:00:00:08".to_owned());
    let device = "virtio-net".to_owned();
    assert_eq!(
        plan.config.vm.network,
        [NetworkSection::User { device, net: None, mac, name: None, slot: None, forwards: vec![FORWARD] }]
    );
    assert!(plan.notes[0].contains("not that of a Pod"), "{:?}", plan.notes);
}

#[test]
fn the_first_disk_stays_what_it_was_at_the_first_start() {
    let spec = json!({ "vm": { "disks": [claim("system", "4Gi")] } });
    let disk = |existing: &[&str], has_image| {
        let existing = existing.iter().map(|name| (*name).to_owned()).collect();
        let plan = planned(&spec, &[], &Options { existing, has_image, ..options() })?;
        let file = plan.overlay.map(|overlay| (overlay.exists, overlay.file.file_name().unwrap().to_owned()));
        Ok::<_, Error>((file, plan.notes.len()))
    };
    let overlay = |exists| Some((exists, "system-disk.qcow2".into()));
    assert_eq!(disk(&[], false).unwrap(), (None, 1), "a note says that the disk is empty");
    assert_eq!(disk(&["system-disk.img"], false).unwrap(), (None, 0));
    assert_eq!(disk(&[], true).unwrap(), (overlay(false), 0));
    assert_eq!(disk(&["system-disk.qcow2"], false).unwrap(), (overlay(true), 0), "the second start needs no --image");
    assert!(matches!(disk(&["system-disk.img"], true), Err(Error::DiskWithoutImage(_))));
}

#[test]
fn what_only_a_cluster_has_is_an_error_that_says_what_to_do() {
    let from = json!({ "cloudInit": { "userDataFrom": { "secretKeyRef": { "name": "users", "key": "data" } } } });
    let error =
        |spec: Value, others: &[Value], options: &Options| planned(&spec, others, options).unwrap_err().to_string();
    let publish = Options { publish: vec![FORWARD], ..options() };
    let image = Options { has_image: true, ..options() };
    let secret = |key: &str| json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "users" }, "stringData": { key: "#cloud-config\n" } });
    let errors = [
        error(from.clone(), &[], &options()),
        error(from.clone(), &[secret("other")], &options()),
        error(json!({ "vm": { "networks": [] } }), &[], &publish),
        error(json!({ "vm": { "disks": [{ "cdrom": { "image": "a.iso" } }] } }), &[], &image),
    ];
    insta::assert_snapshot!(errors.join("\n"));
    let plan = planned(&from, &[secret("data")], &options()).unwrap();
    assert_eq!(plan.files["cloud-init/user-data"], b"#cloud-config\n", "a Secret in the same file is used");
}

/// A Pod as a hostile template or file could have it.
fn hostile(change: impl Fn(&mut Value)) -> String {
    let mut pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "apple" },
        "spec": {
            "containers": [{
                "name": "vm-runner",
                "volumeMounts": [{ "name": "config", "mountPath": "/etc/opt/vmrunner" }],
                "volumeDevices": [{ "name": "disk", "devicePath": "/dev/disk-0" }],
            }],
            "volumes": [
                { "name": "config", "configMap": { "name": "apple", "items": [{ "key": "config.yaml", "path": "config.yaml" }] } },
                { "name": "disk", "persistentVolumeClaim": { "claimName": "apple-disk-0" } },
            ],
        },
    });
    change(&mut pod);
    let config = "/Runner: {namespace: n, vm: {name: apple, drives: [{type: raw, resource: /dev/disk-0}]}}";
    let map = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "apple" }, "data": { "config.yaml": config } });
    let claim = json!({ "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": { "name": "apple-disk-0" }, "spec": {} });
    let objects = [pod, map, claim];
    let outcome = Objects::new(objects.iter(), [].iter()).map_err(Error::from).and_then(|it| plan(&it, &options()));
    outcome.map_or_else(|error| error.to_string(), |plan| serde_json::to_string(&plan.config.vm.drives).unwrap())
}

#[test]
fn a_pod_of_somebody_else_reaches_no_files_outside_of_the_folder() {
    let texts = [
        hostile(|_| {}),
        hostile(|pod| pod["spec"]["volumes"][0]["configMap"]["items"][0]["path"] = json!("../../.bashrc")),
        hostile(|pod| pod["spec"]["volumes"][0]["configMap"]["items"][0]["path"] = json!("/etc/passwd")),
        hostile(|pod| {
            pod["spec"]["volumes"][1]["name"] = json!("../../x");
            pod["spec"]["containers"][0]["volumeDevices"][0]["name"] = json!("../../x");
        }),
        hostile(|pod| pod["spec"]["volumes"][1]["persistentVolumeClaim"]["claimName"] = json!("shared")),
        hostile(|pod| pod["spec"]["volumes"][1] = json!({ "name": "disk", "hostPath": { "path": "/dev/sda" } })),
        hostile(|pod| pod["spec"]["volumes"][0] = json!({ "name": "config", "hostPath": { "path": "/etc" } })),
        hostile(|pod| pod["spec"]["containers"][0]["name"] = json!("apple")),
    ];
    insta::assert_snapshot!(texts.join("\n"));
}
