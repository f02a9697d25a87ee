//! Which VMs a namespace admits that enforces a Pod Security Standard, and what a VM says that waits for a device.
//! (<https://kubernetes.io/docs/concepts/security/pod-security-standards/>)

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use vm_operator::api::VirtualMachine;

use crate::support::managed_namespace::{ManagedNamespace, condition};

/// Name, whether `baseline` and `restricted` admit it, and what is merged over the spec.
fn vms() -> [(&'static str, bool, bool, Value); 9] {
    let user = json!([{ "user": {} }]);
    let as_user = json!({ "runAsUser": 1000 });
    let file = json!([{ "volumeClaimTemplate": {
        "metadata": { "name": "core" },
        "spec": { "volumeMode": "Filesystem", "resources": { "requests": { "storage": "1Gi" } } },
    } }]);
    let legacy = json!({ "source": "ghcr.io/mnlipp/org.jdrupes.vmoperator.runner.qemu-arch:latest" });
    [
        ("user-auto", true, false, json!({ "vm": { "networks": user } })),
        ("user-tcg", true, false, json!({ "vm": { "networks": user, "accelerator": "tcg" } })),
        ("user-kvm", true, false, json!({ "vm": { "networks": user, "accelerator": "kvm" } })),
        ("pod-auto", true, false, json!({ "vm": { "networks": [{ "pod": {} }] } })),
        ("user-as-user", true, true, json!({ "templateValues": as_user, "vm": { "networks": user, "disks": file } })),
        (
            "pod-as-user",
            true,
            true,
            json!({ "templateValues": as_user, "vm": { "networks": [{ "pod": {} }], "disks": file } }),
        ),
        ("tap-auto", false, false, json!({ "vm": { "networks": [{ "tap": {} }] } })),
        ("tap-tcg", false, false, json!({ "vm": { "networks": [{ "tap": {} }], "accelerator": "tcg" } })),
        ("legacy", false, false, json!({ "image": legacy, "vm": { "networks": user } })),
    ]
}

/// Whether the VM has a Pod. `None`: it is not decided yet.
fn is_admitted(vm: &VirtualMachine) -> Option<bool> {
    let (_, reason, message) = condition(vm, "Ready")?;
    if message.contains("violates PodSecurity") {
        return Some(false);
    }
    (reason == "Starting" && vm.status.as_ref()?.created == Some(true)).then_some(true)
}

#[tokio::test]
async fn a_namespace_that_enforces_a_standard_admits_vms_as_the_table_says() {
    for (level, column) in [("baseline", 0), ("restricted", 1)] {
        let ns = ManagedNamespace::new(level).await;
        let label = format!("pod-security.kubernetes.io/enforce={level}");
        ns.cluster.kubectl(&["label", "namespace", ns.namespace.name(), &label]);
        for (name, baseline, restricted, spec) in vms() {
            ns.create_vm(name, |vm| json_patch::merge(&mut vm["spec"], &spec)).await;
            let vm = ns.vm_when(name, "to be admitted or refused", |vm| is_admitted(vm).is_some()).await;
            println!("{level:<12} {name:<14} {}", if is_admitted(&vm) == Some(true) { "admitted" } else { "refused" });
            let expected = [baseline, restricted][column];
            assert_eq!(is_admitted(&vm), Some(expected), "{level}, {name}: {:?}", condition(&vm, "Ready"));
        }
    }
}

/// The test plays the scheduler.
#[tokio::test]
async fn a_vm_that_demands_kvm_waits_for_its_resource_and_says_who_gives_it() {
    let ns = ManagedNamespace::new("kvm").await;
    ns.create_vm("apple", |vm| vm["spec"]["vm"]["accelerator"] = json!("kvm")).await;
    ns.vm_with_reason("apple", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("apple").await.unwrap());
    assert_eq!(pod["spec"]["containers"][0]["resources"]["limits"], json!({ "vmoperator.jdrupes.org/kvm": "1" }));
    let said = "0/1 nodes are available: 1 Insufficient vmoperator.jdrupes.org/kvm.";
    let condition_of_pod =
        json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said });
    let patch = json!({ "status": { "conditions": [condition_of_pod] } }).to_string();
    ns.namespace.kubectl(&["patch", "pod", "apple", "--subresource=status", "--type=strategic", "--patch", &patch]);
    let vm = ns.vm_with_reason("apple", "Unschedulable").await;
    let (_, _, message) = condition(&vm, "Ready").unwrap();
    assert!(message.starts_with(said), "{message}");
    for part in ["needs vmoperator.jdrupes.org/kvm", "deploy/node-devices"] {
        assert!(message.contains(part), "{message}");
    }
}

#[tokio::test]
async fn a_user_that_is_not_root_needs_disks_that_it_can_open() {
    let ns = ManagedNamespace::new("as-user").await;
    ns.create_vm("apple", |vm| vm["spec"]["templateValues"] = json!({ "runAsUser": 1000 })).await;
    let vm = ns.vm_with_reason("apple", "TemplateError").await;
    let (_, _, message) = condition(&vm, "Ready").unwrap();
    assert!(message.contains("apple-core-disk: set its volumeMode to Filesystem"), "{message}");
    ns.patch_vm("apple", json!({ "spec": { "templateValues": { "deviceOwnership": true, "hostUsers": true } } })).await;
    ns.vm_with_reason("apple", "Starting").await;
    let pod = json!(ns.api::<Pod>().get("apple").await.unwrap());
    let context = &pod["spec"]["securityContext"];
    let expected = json!([true, 1000, 1000, 1000]);
    assert_eq!(
        json!([context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"], context["fsGroup"]]),
        expected
    );
    assert_eq!(pod["spec"]["hostUsers"], true);
}
