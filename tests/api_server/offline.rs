//! What `kubectl vm` says about a VM's file without a cluster, and what the API server says about the same file.

use std::{fs, process::Command};

use crate::support::{cluster::Cluster, manager::install_crds};

/// A VM with these lines in `spec.vm`, and these before it.
fn vm(spec: &str, machine: &str) -> String {
    format!(
        "apiVersion: vmoperator.jdrupes.org/v1\nkind: VirtualMachine\nmetadata: {{name: apple}}\nspec:\n{spec}  vm:\n    {}\n",
        machine.replace('\n', "\n    ")
    )
}

fn machine(machine: &str) -> String {
    vm("", &format!("maximumCpus: 2\n{machine}"))
}

/// Files with a mistake: the line that is wrong, and the words with which both refuse it.
fn bad_files() -> Vec<(String, usize, &'static str)> {
    let spec = |spec: &str| vm(&format!("  {spec}\n"), "maximumCpus: 2");
    let metadata = |metadata: &str| machine("").replace("{name: apple}", metadata);
    let range = "spec.vm.maximumCpus in body should be";
    vec![
        // Types and required fields.
        (
            vm("", "maximumCpus: two"),
            6,
            r#"spec.vm.maximumCpus: Invalid value: "string": spec.vm.maximumCpus in body must be of type integer: "string""#,
        ),
        (machine("useTpm: 1"), 7, r#"spec.vm.useTpm in body must be of type boolean: "integer""#),
        (machine("disks: {}"), 7, r#"spec.vm.disks in body must be of type array: "object""#),
        (machine("networks:\n  - user"), 8, r#"spec.vm.networks[0] in body must be of type object: "string""#),
        (machine("disks:\n  - cdrom: {}"), 8, "spec.vm.disks[0].cdrom.image: Required value"),
        (machine("").replace("spec:\n  vm:\n    maximumCpus: 2", "spec: {}"), 4, "spec.vm: Required value"),
        (machine("rtcBase: 2.5"), 7, "spec.vm.rtcBase in body must be of type string"),
        // Words that kubectl reads as booleans.
        (machine("state: On"), 7, r#"spec.vm.state in body must be of type string: "boolean""#),
        (metadata("{name: apple, labels: {a: yes}}"), 3, "metadata.labels"),
        // Values.
        (
            machine("state: Started"),
            7,
            r#"spec.vm.state: Unsupported value: "Started": supported values: "Stopped", "Running""#,
        ),
        (vm("", "maximumCpus: 0"), 6, range),
        (vm("", "maximumCpus: 1025"), 6, "should be less than or equal to 1024"),
        (machine("powerdownTimeout: -1"), 7, "should be greater than or equal to 0"),
        (machine("rtcBase: noon"), 7, "spec.vm.rtcBase in body should match"),
        (machine("maximumRam: 8 Gigs"), 7, "spec.vm.maximumRam"),
        (machine("maximumRam: true"), 7, "spec.vm.maximumRam in body must be of type"),
        (machine("cpuModel: ''"), 7, "spec.vm.cpuModel in body should be at least 1 chars long"),
        (
            machine(&format!("networks:{}", "\n  - user: {}".repeat(33))),
            8,
            "spec.vm.networks: Too many: 33: must have at most 32 items",
        ),
        (spec(&format!("nodeName: {}", "a".repeat(254))), 5, "spec.nodeName: Too long: may not be more than 253 bytes"),
        (spec("nodeSelector: {disk: 1}"), 5, r#"spec.nodeSelector.disk in body must be of type string: "integer""#),
        (spec("resources: {requests: {cpu: true}}"), 5, "spec.resources.requests.cpu"),
        (spec("cloudInit: {userData: a, userDataFrom: {secretKeyRef: {name: a, key: b}}}"), 5, "spec.cloudInit"),
        // Unknown fields.
        (vm("", "maximumCpu: 2"), 6, r#"unknown field "spec.vm.maximumCpu""#),
        (spec("maximumCpus: 2"), 5, r#"unknown field "spec.maximumCpus""#),
        (machine("disks:\n  - cdrom: {image: a, imag: b}"), 8, r#"unknown field "spec.vm.disks[0].cdrom.imag""#),
        (metadata("{name: apple, lables: {}}"), 3, r#"unknown field "metadata.lables""#),
        // Metadata.
        (
            metadata("{name: Apple_1}"),
            3,
            r#"metadata.name: Invalid value: "Apple_1": a lowercase RFC 1123 subdomain must consist of lower case"#,
        ),
        (
            metadata("{name: apple, labels: {a: b c}}"),
            3,
            r#"metadata.labels: Invalid value: "b c": a valid label must be an empty string or consist of"#,
        ),
        (
            metadata("{name: apple, labels: {a b: c}}"),
            3,
            r#"metadata.labels: Invalid value: "a b": name part must consist of"#,
        ),
        (metadata("{}"), 3, "resource name may not be empty"),
        // Rules.
        (vm("", "currentCpus: 1"), 6, "give exactly one of maximumCpus and cpuTopology"),
        (machine("currentCpus: 3"), 6, "currentCpus must not be more than maximumCpus"),
        (machine("currentRam: 2 GiB"), 6, "currentRam must not be more than maximumRam"),
        (machine("networks: [{pod: {}}, {pod: {}}]"), 7, "only one network can be of type pod"),
        (machine("networks:\n  - {}"), 8, "a network is exactly one of tap, user and pod"),
        (machine("disks:\n  - bootindex: 1"), 8, "a disk is either a volumeClaimTemplate or a cdrom"),
        (
            machine(
                "disks: [{volumeClaimTemplate: {metadata: {name: a}}}, {volumeClaimTemplate: {metadata: {name: a}}}]",
            ),
            7,
            "the names of the disks must be different",
        ),
        (spec("image: {repository: a}"), 5, "give either source, or repository and path"),
        (
            metadata(&format!("{{name: {}}}", "a".repeat(64))),
            1,
            "the name of a VM is used as a label and as a host name",
        ),
        // Kinds.
        (
            machine("").replace("org/v1", "org/v2"),
            1,
            r#"no matches for kind "VirtualMachine" in version "vmoperator.jdrupes.org/v2""#,
        ),
        (
            machine("").replace("VirtualMachine", "VirtualMachin"),
            2,
            r#"no matches for kind "VirtualMachin" in version "vmoperator.jdrupes.org/v1""#,
        ),
    ]
}

/// Files without a mistake, though some look as if they had one.
fn good_files() -> Vec<String> {
    vec![
        machine(""),
        machine("useTpm: yes\nbootMenu: off"),
        machine("networks: null\ndisks: []\ncurrentCpus: null"),
        machine("currentRam: 1 GB\nmaximumRam: 1Gi"),
        vm("", "maximumCpus: 2.0\nmaximumRam: 1073741824"),
        vm("  resources: {requests: {cpu: 1.5}}\n  templateValues: {a: {b: [null, 1]}}\n", "maximumCpus: 2"),
        vm("  loadBalancerService: {labels: {a: null}}\n", "cpuTopology: {sockets: 2}\ncurrentCpus: 2"),
        machine("disks:\n  - volumeClaimTemplate: {spec: {dataSource: {kind: PersistentVolumeClaim, name: a}}}"),
        machine("").replace("{name: apple}", "{name: apple, creationTimestamp: null, labels: null}") + "status: {}\n",
        machine("")
            .replace("{name: apple}", "{name: apple, annotations: {A: '', example.org/a: b c}, labels: {a: ''}}"),
    ]
}

#[tokio::test]
async fn a_file_is_refused_without_a_cluster_as_the_api_server_refuses_it() {
    let cluster = Cluster::control_plane();
    install_crds(cluster).await;
    let namespace = cluster.namespace("offline").await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.yaml");
    let path = file.to_str().unwrap();
    // What an administrator allows is not the matter here.
    let config = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    fs::write(config.path(), crate::support::manager::allowing("\"/Manager\": {}\n")).unwrap();
    let offline = || {
        let arguments = ["render", "-f", path, "--config", config.path().to_str().unwrap()];
        let output = Command::new(env!("CARGO_BIN_EXE_kubectl-vm")).args(arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        if output.status.success() { Ok(()) } else { Err(text.replace(path, "vm.yaml")) }
    };
    let server = || {
        let name = namespace.name();
        cluster.try_kubectl(&["apply", "--dry-run=server", "--validate=strict", "-n", name, "-f", path])
    };
    let mut wrong = Vec::new();
    let files = bad_files();
    assert!(files.len() >= 20);
    for (text, line, words) in files {
        fs::write(&file, &text).unwrap();
        let (offline, server) = (offline(), server().map(drop));
        let says = |said: &Result<(), String>| said.as_ref().is_err_and(|said| said.replace('\n', " ").contains(words));
        let is_placed =
            offline.as_ref().is_err_and(|said| said.lines().any(|it| it.starts_with(&format!("vm.yaml:{line}:"))));
        if !(says(&offline) && says(&server) && is_placed) {
            wrong.push(format!("{text}{line}: {words}\n  offline {offline:?}\n  server {server:?}"));
        }
    }
    for text in good_files() {
        fs::write(&file, &text).unwrap();
        let (offline, server) = (offline(), server().map(drop));
        if offline.is_err() || server.is_err() {
            wrong.push(format!("{text}  offline {offline:?}\n  server {server:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
