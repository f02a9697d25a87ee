//! Pools that make their VMs: `spec.replicas` and `spec.template`.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use kube::{
    Api,
    api::{ApiResource, DynamicObject, PropagationPolicy},
};
use vm_operator::{
    assignment::NotAssigned,
    object::{POOL_LABEL, POOL_TEMPLATE_ANNOTATION},
    ownership::MEMBER_MANAGER,
};

use super::*;
use crate::support::{
    managed_namespace::{SERVICES, vm_manifest},
    manager::{Manager, Setup},
};

/// A pool that wants so many VMs.
pub(super) fn manifest(name: &str, replicas: u32) -> Value {
    let disk = json!({ "volumeClaimTemplate": {
        "metadata": { "name": "system" }, "spec": { "resources": { "requests": { "storage": "1Gi" } } },
    } });
    json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": name },
        "spec": {
            "retention": "PT1H", "replicas": replicas, "permissions": [{ "role": "staff" }],
            "template": {
                "metadata": { "labels": { "team": "a" } },
                "spec": { "vm": { "maximumCpus": 2, "maximumRam": "1Gi", "networks": [{ "user": {} }], "disks": [disk] } },
            },
        },
    })
}

/// Waits until the names of the VMs are these.
async fn vms_are(ns: &ManagedNamespace, wanted: &[&str]) {
    let vms = ns.api::<VirtualMachine>();
    eventually(&format!("the VMs to be {wanted:?}"), 2 * LIMIT, async || {
        let mut names: Vec<_> =
            vms.list(&Default::default()).await.unwrap().iter().map(ResourceExt::name_any).collect();
        names.sort();
        (names == wanted).then_some(())
    })
    .await;
}

/// Waits until the pool has so many VMs, and the condition Scaled has the reason. Returns the message.
async fn scaled(ns: &ManagedNamespace, name: &str, replicas: u32, reason: &str) -> String {
    let pools = ns.api::<VmPool>();
    let mut last = None;
    eventually(&format!("pool {name} to have {replicas} VMs, {reason}"), LIMIT, async || {
        let pool = pools.get(name).await.unwrap();
        let status = pool.status.clone()?;
        let found = status.conditions.iter().find(|condition| condition.type_ == "Scaled")?;
        let is_so = found.reason == reason && status.replicas == Some(replicas);
        let is_current = status.observed_generation == pool.metadata.generation;
        let message = found.message.clone();
        last = Some(status);
        (is_so && is_current).then_some(message)
    })
    .await
}

fn scale(ns: &ManagedNamespace, name: &str, replicas: u32) {
    ns.namespace.kubectl(&["scale", "vmpool", name, &format!("--replicas={replicas}")]);
}

async fn claims(ns: &ManagedNamespace) -> Vec<String> {
    let list = ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap();
    let mut names: Vec<_> =
        list.iter().map(ResourceExt::name_any).filter(|name| name.ends_with("system-disk")).collect();
    names.sort();
    names
}

async fn cpus(ns: &ManagedNamespace, name: &str) -> Option<u32> {
    vm(ns, name).await.spec.vm.maximum_cpus
}

#[tokio::test]
async fn a_pool_makes_its_vms_and_deletes_those_that_are_free() {
    let ns = ManagedNamespace::new("pool-replicas").await;
    ns.namespace.apply(&manifest("desk", 3).to_string());
    vms_are(&ns, &["desk-0", "desk-1", "desk-2"]).await;
    assert_eq!(scaled(&ns, "desk", 3, reasons::AS_WANTED).await, "3 VMs are as the template is");
    pool_when(&ns, "desk", [3, 3, 0, 0], reasons::USABLE).await;
    let first = ns.vm_with_reason("desk-0", "StoppedAsRequested").await;
    assert_eq!((first.labels()[POOL_LABEL].as_str(), first.labels()["team"].as_str()), ("desk", "a"));
    assert_eq!(
        (&first.spec.pools[..], first.owner_references()[0].kind.as_str()),
        (&["desk".to_owned()][..], "VmPool")
    );
    let writer = |entry: &&k8s_openapi::apimachinery::pkg::apis::meta::v1::ManagedFieldsEntry| {
        entry.manager.as_deref() == Some(MEMBER_MANAGER) && entry.operation.as_deref() == Some("Apply")
    };
    assert!(first.managed_fields().iter().any(|entry| writer(&entry)), "{:?}", first.managed_fields());

    // Ann gets the first and Bob the second, and the manager starts them: it applies no power state.
    for (person, name) in [("ann", "desk-0"), ("bob", "desk-1")] {
        let assigned = handle(&ns, Timestamp::now).assign("desk", &user(person)).await.unwrap();
        assert_eq!((assigned.vm.name_any().as_str(), assigned.is_started), (name, true));
    }
    // The other one is deleted at once, and Bob's when he gives it back; nobody else gets it.
    scale(&ns, "desk", 1);
    vms_are(&ns, &["desk-0", "desk-1"]).await;
    assert_eq!(scaled(&ns, "desk", 2, reasons::IN_USE).await, "deleted when they are released: desk-1");
    let shown = succeeds(&ns, &["pool", "status", "desk"]);
    assert!(
        shown.contains("retention PT1H, wants 1 VMs\nnot as wanted yet: deleted when they are released: desk-1\n"),
        "{shown}"
    );
    let full = handle(&ns, Timestamp::now).assign("desk", &user("carol")).await;
    assert!(matches!(full, Err(PoolError::Refused(NotAssigned::NoneFree { .. }))), "{full:?}");

    // A change of the template waits for Ann, too.
    let more = json!({ "spec": { "template": { "spec": { "vm": { "maximumCpus": 4 } } } } });
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &Patch::Merge(&more)).await.unwrap();
    assert_eq!(
        scaled(&ns, "desk", 2, reasons::IN_USE).await,
        "deleted when they are released: desk-1; changed to the new template when they are released: desk-0"
    );
    assert_eq!(cpus(&ns, "desk-0").await, Some(2));
    handle(&ns, Timestamp::now).release("desk", "ann", None).await.unwrap();
    ns.vm_when("desk-0", "to be as the new template", |vm| vm.spec.vm.maximum_cpus == Some(4)).await;
    handle(&ns, Timestamp::now).release("desk", "bob", None).await.unwrap();
    vms_are(&ns, &["desk-0"]).await;
    scaled(&ns, "desk", 1, reasons::AS_WANTED).await;
    assert_eq!(vm(&ns, "desk-0").await.spec.vm.state, PowerState::Running, "the template does not stop it");
    assert_eq!(claims(&ns).await, ["desk-0-system-disk", "desk-1-system-disk", "desk-2-system-disk"], "disks stay");

    // A VM that a person deletes is made again, with its disk.
    let before = ns.api::<PersistentVolumeClaim>().get("desk-0-system-disk").await.unwrap().uid();
    let former = vm(&ns, "desk-0").await.uid();
    let vms = ns.api::<VirtualMachine>();
    vms.delete("desk-0", &Default::default()).await.unwrap();
    eventually("desk-0 to be made again", LIMIT, async || {
        vms.get_opt("desk-0").await.unwrap().filter(|vm| vm.uid() != former).map(drop)
    })
    .await;
    ns.vm_with_reason("desk-0", "StoppedAsRequested").await;
    assert_eq!(ns.api::<PersistentVolumeClaim>().get("desk-0-system-disk").await.unwrap().uid(), before);

    // The pool is deleted with its VMs, and the disks stay.
    ns.namespace.kubectl(&["delete", "vmpool", "desk", "--cascade=foreground", "--wait=false"]);
    vms_are(&ns, &[]).await;
    assert_eq!(claims(&ns).await.len(), 3);
}

#[tokio::test]
async fn a_pool_leaves_alone_what_is_not_its_own() {
    let ns = ManagedNamespace::new("pool-foreign").await;
    ns.create_vm("desk-1", |_| ()).await;
    ns.namespace.apply(&manifest("desk", 2).to_string());
    vms_are(&ns, &["desk-0", "desk-1"]).await;
    let message = scaled(&ns, "desk", 1, reasons::NAME_TAKEN).await;
    assert!(message.contains("not of this pool") && message.ends_with(": desk-1"), "{message}");
    assert!(vm(&ns, "desk-1").await.spec.pools.is_empty());
    // Also when the pool wants fewer.
    scale(&ns, "desk", 0);
    vms_are(&ns, &["desk-1"]).await;
    scale(&ns, "desk", 2);
    scaled(&ns, "desk", 1, reasons::NAME_TAKEN).await;
    // When its place is free, the pool makes its own.
    ns.delete_and_orphan("desk-1").await;
    scaled(&ns, "desk", 2, reasons::AS_WANTED).await;

    // Somebody takes a VM out of use: it stays as it is, whatever happens to the pool.
    ns.patch_vm("desk-1", json!({ "spec": { "pools": [] } })).await;
    assert!(scaled(&ns, "desk", 2, reasons::OUT_OF_POOL).await.ends_with(": desk-1"));
    scale(&ns, "desk", 0);
    vms_are(&ns, &["desk-1"]).await;
    ns.patch_vm("desk-1", json!({ "spec": { "pools": ["desk"] } })).await;
    vms_are(&ns, &[]).await;

    // A copy that a person makes of a VM of the pool is the person's.
    scale(&ns, "desk", 1);
    scaled(&ns, "desk", 1, reasons::AS_WANTED).await;
    let original = vm(&ns, "desk-0").await;
    ns.create_vm("desk-7", |copy| {
        copy["metadata"]["labels"] = json!(original.labels());
        copy["metadata"]["annotations"] = json!(original.annotations());
        copy["metadata"]["ownerReferences"] = json!(original.owner_references());
        copy["spec"]["pools"] = json!(["desk"]);
    })
    .await;
    scale(&ns, "desk", 2);
    vms_are(&ns, &["desk-0", "desk-1", "desk-7"]).await;
    scale(&ns, "desk", 0);
    vms_are(&ns, &["desk-7"]).await;
    ns.delete_and_orphan("desk-7").await;

    // What a person changes of one VM stays, and nothing is written because other fields of the pool change.
    scale(&ns, "desk", 1);
    scaled(&ns, "desk", 1, reasons::AS_WANTED).await;
    ns.patch_vm("desk-0", json!({ "spec": { "vm": { "maximumCpus": 3 } } })).await;
    let changed = ns.vm_with_reason("desk-0", "StoppedAsRequested").await;
    let patch = Patch::Merge(json!({ "spec": { "retention": "PT2H" } }));
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &patch).await.unwrap();
    scaled(&ns, "desk", 1, reasons::AS_WANTED).await;
    assert_eq!(vm(&ns, "desk-0").await.resource_version(), changed.resource_version());

    // A pool that is made again, such as from a backup, takes back the VMs that one of its name had made.
    let pools = ns.api::<VmPool>();
    let orphan = kube::api::DeleteParams {
        propagation_policy: Some(PropagationPolicy::Orphan),
        ..kube::api::DeleteParams::default()
    };
    pools.delete("desk", &orphan).await.unwrap();
    eventually("the pool to be gone", 3 * LIMIT, async || pools.get_opt("desk").await.unwrap().is_none().then_some(()))
        .await;
    assert!(vm(&ns, "desk-0").await.owner_references().is_empty());
    ns.namespace.apply(&manifest("desk", 1).to_string());
    scaled(&ns, "desk", 1, reasons::AS_WANTED).await;
    let owners = vm(&ns, "desk-0").await.owner_references().to_vec();
    assert_eq!((owners.len(), Some(owners[0].uid.clone())), (1, pools.get("desk").await.unwrap().uid()));
}

#[tokio::test]
async fn the_api_server_refuses_a_template_that_no_vm_can_have() {
    let ns = ManagedNamespace::new("pool-template").await;
    let pools = Api::<DynamicObject>::namespaced_with(
        ns.client.clone(),
        ns.namespace.name(),
        &ApiResource::erase::<VmPool>(&()),
    );
    let tried = async |edit: &dyn Fn(&mut Value)| {
        let mut pool = manifest("desk", 1);
        edit(&mut pool);
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        let made = pools.create(&parameters, &serde_json::from_value(pool).unwrap()).await;
        made.err().map(|error| error.to_string()).unwrap_or_default()
    };
    let of_vm = |field: &'static str, value: Value| {
        move |pool: &mut Value| pool["spec"]["template"]["spec"]["vm"][field] = value.clone()
    };
    assert_eq!(tried(&|_| ()).await, "");
    type Case<'a> = (&'a dyn Fn(&mut Value), &'a str);
    let cases: [Case<'_>; 12] = [
        (&of_vm("state", json!("Running")), "leave out spec.vm.state"),
        (&of_vm("machineUuid", json!("7f1e4b0c-3d61-4f0a-9a0e-0a4b6a9ad1b5")), "leave out spec.vm.machineUuid"),
        (&of_vm("networks", json!([{ "tap": { "mac": "02:00:00:00:00:01" } }])), "leave out the MAC addresses"),
        (&of_vm("cpuTopology", json!({ "sockets": 2 })), "give exactly one of maximumCpus and cpuTopology"),
        (&of_vm("disks", json!([{}])), "a disk is either a volumeClaimTemplate or a cdrom"),
        (&of_vm("maximumCpus", json!("many")), "maximumCpus"),
        (&|pool| pool["metadata"]["name"] = json!("d".repeat(60)), "has at most 59"),
        (&|pool| drop(pool["spec"].as_object_mut().unwrap().remove("template")), "replicas needs a template"),
        (&|pool| pool["spec"]["replicas"] = json!(1001), "less than or equal to 1000"),
        (
            &|pool| (pool["spec"]["replicas"], pool["spec"]["reset"]) = (json!(null), json!({})),
            "reset needs a template and replicas",
        ),
        (&|pool| (pool["metadata"]["name"], pool["spec"]["reset"]) = (json!("d".repeat(55)), json!({})), "at most 54"),
        (&|pool| pool["spec"]["reset"] = json!({ "oldClaims": "Shred" }), "oldClaims"),
    ];
    for (edit, wanted) in cases {
        let answer = tried(edit).await;
        assert!(answer.contains(wanted), "{wanted}: {answer}");
    }
}

#[tokio::test]
async fn a_pool_says_what_the_api_server_refuses_and_goes_on_when_that_has_ended() {
    let ns = ManagedNamespace::new("pool-refused").await;
    let name = ns.namespace.name();
    let policy = format!(
        r#"
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: {name}}}
spec:
  matchConstraints:
    resourceRules:
      - {{apiGroups: [vmoperator.jdrupes.org], apiVersions: ["*"], resources: [vms], operations: [CREATE, DELETE]}}
  validations:
    - expression: "request.name != 'desk-1'"
      message: no more than one desk here
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: {name}}}
spec:
  policyName: {name}
  validationActions: [Deny]
  matchResources:
    namespaceSelector: {{matchLabels: {{kubernetes.io/metadata.name: {name}}}}}
"#
    );
    ns.namespace.apply(&policy);
    let vms = ns.api::<VirtualMachine>();
    eventually("the policy to be in force", LIMIT, async || {
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        let probe = vm_manifest("desk-1");
        vms.create(&parameters, &serde_json::from_value(probe).unwrap()).await.err().map(drop)
    })
    .await;
    ns.namespace.apply(&manifest("desk", 3).to_string());
    let message = scaled(&ns, "desk", 1, reasons::REFUSED).await;
    assert!(message.contains("create VM desk-1: ") && message.contains("no more than one desk here"), "{message}");
    // The first one is used meanwhile.
    assert_eq!(handle(&ns, Timestamp::now).assign("desk", &user("ann")).await.unwrap().vm.name_any(), "desk-0");
    ns.cluster.kubectl(&["delete", "validatingadmissionpolicy,validatingadmissionpolicybinding", name]);
    eventually("the policy to be gone", LIMIT, async || {
        let parameters = PostParams { dry_run: true, ..PostParams::default() };
        vms.create(&parameters, &serde_json::from_value(vm_manifest("desk-1")).unwrap()).await.ok().map(drop)
    })
    .await;
    // It would try again within a minute. A change of the pool is a reason to try at once.
    let patch = Patch::Merge(json!({ "spec": { "warm": 1 } }));
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &patch).await.unwrap();
    scaled(&ns, "desk", 3, reasons::AS_WANTED).await;

    // A VM with a finalizer of somebody goes when that is removed, and is made again then if it is wanted again.
    ns.patch_vm("desk-2", json!({ "metadata": { "finalizers": ["example.org/backup"] } })).await;
    scale(&ns, "desk", 2);
    ns.vm_when("desk-2", "to be deleted", |vm| vm.metadata.deletion_timestamp.is_some()).await;
    let former = vm(&ns, "desk-2").await.uid();
    scale(&ns, "desk", 3);
    scaled(&ns, "desk", 3, reasons::PROGRESSING).await;
    ns.patch_vm("desk-2", json!({ "metadata": { "finalizers": null } })).await;
    eventually("desk-2 to be made again", LIMIT, async || {
        vms.get_opt("desk-2").await.unwrap().filter(|vm| vm.uid() != former).map(drop)
    })
    .await;
    scaled(&ns, "desk", 3, reasons::AS_WANTED).await;
    assert!(vm(&ns, "desk-2").await.annotations().contains_key(POOL_TEMPLATE_ANNOTATION));
}

/// The leader is killed while it makes the VMs, and the pool is deleted while another one deletes them.
#[tokio::test]
async fn a_pool_that_is_deleted_while_it_shrinks_leaves_no_vm_and_all_disks() {
    let mut ns = ManagedNamespace::new("pool-deleted").await;
    let setup = Setup { config: Some(SERVICES), arguments: &["--identity=another"], ..Setup::default() };
    let standby = Manager::with(ns.kubeconfig.path(), Some(ns.namespace.name()), &setup);
    ns.namespace.apply(&manifest("desk", 5).to_string());
    let vms = ns.api::<VirtualMachine>();
    eventually("the first VM", LIMIT, async || vms.get_opt("desk-0").await.unwrap()).await;
    ns.manager.signal(rustix::process::Signal::KILL);
    standby.wait_until_ready("[+] lease: held").await;
    scaled(&ns, "desk", 5, reasons::AS_WANTED).await;
    ns.vm_with_reason("desk-4", "StoppedAsRequested").await;
    let former = std::mem::replace(&mut ns.manager, standby);
    drop(former);

    scale(&ns, "desk", 0);
    ns.namespace.kubectl(&["delete", "vmpool", "desk", "--wait=false"]);
    vms_are(&ns, &[]).await;
    // When the manager has made the VMs of another pool it has seen all that.
    ns.namespace.apply(&manifest("other", 1).to_string());
    scaled(&ns, "other", 1, reasons::AS_WANTED).await;
    vms_are(&ns, &["other-0"]).await;
    let disks: Vec<_> = claims(&ns).await.into_iter().filter(|name| name.starts_with("desk-")).collect();
    assert_eq!(disks.len(), 5, "{disks:?}");
}
