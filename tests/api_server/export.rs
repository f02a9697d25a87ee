//! `kubectl vm export` of VMs of a cluster and of a file.

use std::fs;

use serde_json::{Value, json};

use crate::{
    commands::{ns, run, up},
    support::managed_namespace::vm_manifest,
};

#[tokio::test]
async fn a_vm_is_printed_for_kubevirt_with_what_is_lost() {
    let ns = ns("export").await;
    up(&ns, "apple", |vm| {
        vm["spec"]["vm"]["networks"] = json!([{ "pod": {} }]);
        vm["spec"]["vm"]["useTpm"] = json!(true);
    })
    .await;
    let printed = run(&ns, &["export", "apple", "--to", "kubevirt"]);
    assert_eq!(printed.code, 0, "{printed:?}");
    let vm: Value = serde_yaml::from_str(&printed.data).unwrap();
    assert_eq!((&vm["apiVersion"], &vm["kind"]), (&json!("kubevirt.io/v1"), &json!("VirtualMachine")));
    assert_eq!(vm["metadata"], json!({ "name": "apple", "namespace": ns.namespace.name() }));
    let spec = &vm["spec"]["template"]["spec"];
    assert_eq!(spec["domain"]["devices"]["tpm"], json!({ "persistent": true }));
    // The claims are there under these names.
    for volume in spec["volumes"].as_array().unwrap() {
        ns.namespace.kubectl(&["get", "pvc", volume["persistentVolumeClaim"]["claimName"].as_str().unwrap()]);
    }
    assert!(printed.talk.contains("vm/apple: spec.vm.useTpm: changed: "), "{printed:?}");
    for line in printed.talk.lines() {
        let remark = line.strip_prefix("vm/apple: ").unwrap().split(": ").next().unwrap();
        assert!(printed.data.contains(&format!("#   {remark}: ")), "{line} is no comment of\n{}", printed.data);
    }
    assert_eq!(run(&ns, &["export", "apple", "--to", "kubevirt", "--strict"]).code, 1);
    assert_eq!(run(&ns, &["export", "plum", "--to", "kubevirt"]).code, 1);
    assert_eq!(run(&ns, &["export", "apple"]).code, 2, "for which system?");

    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.yaml");
    let mut vm = vm_manifest("pear");
    vm["spec"] = json!({ "vm": { "maximumCpus": 1, "firmware": "bios", "display": { "vnc": {} } } });
    fs::write(&file, vm.to_string()).unwrap();
    let strict = run(&ns, &["export", "-f", file.to_str().unwrap(), "--to", "kubevirt", "--strict"]);
    assert_eq!((strict.code, strict.talk.as_str()), (0, ""), "{strict:?}");
}
