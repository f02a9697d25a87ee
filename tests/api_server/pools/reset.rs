//! Pools that give nobody a disk that somebody else had: `spec.reset`.

use k8s_openapi::api::core::v1::PersistentVolumeClaim;
use vm_operator::object::UNUSED_ANNOTATION;

use super::{members::manifest, *};
use crate::support::{managed_namespace::SERVICES, manager::Manager};

fn reset_pool(replicas: u32) -> Value {
    let mut pool = manifest("desk", replicas);
    pool["spec"]["reset"] = json!({});
    pool
}

/// Waits until all VMs of the pool that somebody can get are new, and that many of them are. Returns their names.
async fn new_ones(ns: &ManagedNamespace, number: u32) -> Vec<String> {
    let (pools, vms) = (ns.api::<VmPool>(), ns.api::<VirtualMachine>());
    eventually(&format!("{number} new VMs"), 2 * LIMIT, async || {
        let status = pools.get("desk").await.unwrap().status?;
        let is_so = status.free == Some(number) && status.renewing == Some(0);
        let all = vms.list(&Default::default()).await.unwrap();
        let free = all.iter().filter(|vm| vm.annotations().contains_key(UNUSED_ANNOTATION));
        let names: Vec<_> = free.map(ResourceExt::name_any).collect();
        (is_so && names.len() == number as usize).then_some(names)
    })
    .await
}

async fn scaled(ns: &ManagedNamespace, reason: &str) -> String {
    let pools = ns.api::<VmPool>();
    eventually(&format!("the pool to be {reason}"), 2 * LIMIT, async || {
        let pool = pools.get("desk").await.unwrap();
        let status = pool.status.filter(|status| status.observed_generation == pool.metadata.generation)?;
        let found = status.conditions.into_iter().find(|condition| condition.type_ == "Scaled")?;
        (found.reason == reason).then_some(found.message)
    })
    .await
}

async fn gone(ns: &ManagedNamespace, vm: &str) {
    let vms = ns.api::<VirtualMachine>();
    eventually(&format!("{vm} to be gone"), 2 * LIMIT, async || vms.get_opt(vm).await.unwrap().is_none().then_some(()))
        .await;
}

async fn assigned(ns: &ManagedNamespace, person: &str) -> String {
    handle(ns, Timestamp::now).assign("desk", &user(person)).await.unwrap().vm.name_any()
}

async fn release(ns: &ManagedNamespace, person: &str) {
    handle(ns, Timestamp::now).release("desk", person, None).await.unwrap();
}

fn claims(ns: &ManagedNamespace) -> kube::Api<PersistentVolumeClaim> {
    ns.api()
}

fn disk(vm: &str) -> String {
    format!("{vm}-system-disk")
}

#[tokio::test]
async fn a_vm_that_somebody_had_is_replaced_by_a_new_one() {
    let mut ns = ManagedNamespace::new("pool-reset").await;
    ns.namespace.apply(&reset_pool(2).to_string());
    let first = new_ones(&ns, 2).await;
    assert_eq!(scaled(&ns, reasons::AS_WANTED).await, "2 VMs are as the template is");
    for name in &first {
        let vm = vm(&ns, name).await;
        let disks = vm.status.as_ref().unwrap().new_disks.clone().unwrap();
        assert_eq!((Some(&disks.vm_uid), disks.others.len()), (vm.metadata.uid.as_ref(), 0), "{name}");
    }

    // Ann gets one, and keeps it as long as she wants.
    let anns = assigned(&ns, "ann").await;
    assert!(first.contains(&anns));
    let assigned_vm =
        ns.vm_when(&anns, "to have lost its mark", |vm| !vm.annotations().contains_key(UNUSED_ANNOTATION)).await;
    assert_eq!(assigned_vm.status.unwrap().pools.used_uid, assigned_vm.metadata.uid);
    assert_eq!(assigned(&ns, "ann").await, anns);
    let hers = claims(&ns).get(&disk(&anns)).await.unwrap();
    // The manager is killed, and comes again when she has given it back.
    ns.manager.signal(rustix::process::Signal::KILL);
    release(&ns, "ann").await;
    let shown = succeeds(&ns, &["pool", "status", "desk"]);
    assert!(shown.contains("2 VMs, 1 free, 1 renewing, 0 assigned") && shown.contains("Renewing"), "{shown}");
    assert_ne!(assigned(&ns, "bob").await, anns);
    let refused = handle(&ns, Timestamp::now).assign("desk", &user("carol")).await;
    assert!(
        matches!(refused, Err(PoolError::Refused(NotAssigned::NoneFree { members: 2, renewing: 1, next: None, .. }))),
        "{refused:?}"
    );
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], SERVICES);
    gone(&ns, &anns).await;
    let [carols] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    assert!(!first.contains(carols));
    assert_eq!(&assigned(&ns, "carol").await, carols);
    assert_eq!(claims(&ns).get(&disk(&anns)).await.unwrap().uid(), hers.uid(), "what Ann had is kept");

    // From now on claims go with their VM; what Ann had was kept before.
    let patch = Patch::Merge(json!({ "spec": { "reset": { "oldClaims": "Delete" } } }));
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &patch).await.unwrap();
    scaled(&ns, reasons::AS_WANTED).await;
    // The VM does not own them before it is deleted: what the pool says then counts.
    let of_carol = claims(&ns).get(&disk(carols)).await.unwrap();
    assert!(of_carol.owner_references().is_empty());
    // A copy that a person has made is none of those.
    let other = json!({
        "apiVersion": "v1", "kind": "PersistentVolumeClaim",
        "metadata": { "name": format!("{carols}-notes"), "labels": of_carol.labels(), "annotations": of_carol.annotations() },
        "spec": { "accessModes": ["ReadWriteOnce"], "resources": { "requests": { "storage": "1Gi" } } },
    });
    ns.namespace.apply(&other.to_string());
    release(&ns, "carol").await;
    gone(&ns, carols).await;
    eventually("the claim to be deleted with its VM", 2 * LIMIT, async || {
        let claim = claims(&ns).get_opt(&disk(carols)).await.unwrap();
        // Without a node its protection may keep the object.
        claim.is_none_or(|claim| claim.metadata.deletion_timestamp.is_some()).then_some(())
    })
    .await;
    for kept in [disk(&anns), format!("{carols}-notes")] {
        assert_eq!(claims(&ns).get(&kept).await.unwrap().metadata.deletion_timestamp, None, "{kept}");
    }
    // An assignment that is over by time ends without a time of grace, because nobody can take the VM.
    new_ones(&ns, 1).await;
    let bobs = ns.api::<VirtualMachine>().list(&Default::default()).await.unwrap();
    let bobs = bobs.iter().find(|vm| holder(vm).as_deref() == Some("bob")).unwrap().name_any();
    let hour_ago = (Timestamp::now() - SignedDuration::from_mins(66)).to_string();
    let patch = json!({ "assignment": { "lastUsed": hour_ago, "assignedAt": hour_ago } });
    patch_status(&ns, &bobs, patch).await;
    gone(&ns, &bobs).await;
    new_ones(&ns, 2).await;
}

fn is_missing<T>(result: &kube::Result<T>) -> bool {
    matches!(result, Err(kube::Error::Api(answer)) if answer.code == 404)
}

#[tokio::test]
async fn a_vm_that_may_have_been_used_is_given_to_nobody() {
    let mut ns = ManagedNamespace::new("pool-reset-marks").await;
    ns.namespace.apply(&reset_pool(1).to_string());
    // At its console without an assignment.
    let [watched] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    patch_status(&ns, watched, json!({ "consoleUser": "eve" })).await;
    gone(&ns, watched).await;
    // For a moment, by a viewer without a name.
    let [visited] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    for status in ["True", "False"] {
        let condition = json!({
            "type": "ConsoleConnected", "status": status, "reason": "X", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        // The manager may have deleted it before the visitor has left.
        let patch = Patch::Merge(json!({ "status": { "conditions": [condition] } }));
        let patched = ns.api::<VirtualMachine>().patch_status(visited, &PatchParams::default(), &patch).await;
        assert!(patched.is_ok() || (status == "False" && is_missing(&patched)), "{patched:?}");
    }
    gone(&ns, visited).await;
    // Out of the pool, and back.
    let [moved] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    ns.patch_vm(moved, json!({ "spec": { "pools": [] } })).await;
    ns.vm_when(moved, "to have lost its mark", |vm| !vm.annotations().contains_key(UNUSED_ANNOTATION)).await;
    scaled(&ns, reasons::OUT_OF_POOL).await;
    ns.patch_vm(moved, json!({ "spec": { "pools": ["desk"] } })).await;
    gone(&ns, moved).await;
    // Assigned by a program that does not know the mark.
    let [taken] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    // With a time: one that was never used would have ended at once, and the VM with it.
    let assignment = json!({ "pool": "desk", "user": "ann", "lastUsed": Timestamp::now() });
    patch_status(&ns, taken, json!({ "assignment": assignment })).await;
    ns.vm_when(taken, "to have lost its mark", |vm| !vm.annotations().contains_key(UNUSED_ANNOTATION)).await;
    patch_status(&ns, taken, json!({ "assignment": null })).await;
    gone(&ns, taken).await;
    // Its mark comes back with a file that was saved when it was new.
    let [marked] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    assert_eq!(&assigned(&ns, "ann").await, marked);
    ns.vm_when(marked, "to have lost its mark", |vm| !vm.annotations().contains_key(UNUSED_ANNOTATION)).await;
    ns.manager.signal(rustix::process::Signal::KILL);
    release(&ns, "ann").await;
    ns.patch_vm(marked, json!({ "metadata": { "annotations": { UNUSED_ANNOTATION: "true" } } })).await;
    let refused = handle(&ns, Timestamp::now).assign("desk", &user("bob")).await;
    assert!(matches!(refused, Err(PoolError::Refused(NotAssigned::NoneFree { renewing: 1, .. }))), "{refused:?}");
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], SERVICES);
    gone(&ns, marked).await;

    // A VM that comes back from a backup, with the disk that its user had. The API server gives it another UID.
    let [other] = &new_ones(&ns, 1).await[..] else { unreachable!() };
    let backup = vm(&ns, other).await;
    let mut restored = json!(&backup);
    let former = taken.clone();
    restored["metadata"] = json!({
        "name": former, "labels": backup.metadata.labels, "annotations": backup.metadata.annotations,
        "ownerReferences": backup.metadata.owner_references,
    });
    restored["apiVersion"] = json!("vmoperator.jdrupes.org/v1");
    restored["kind"] = json!("VirtualMachine");
    // While no manager looks there is one VM more, and the pool wants two.
    ns.manager.signal(rustix::process::Signal::KILL);
    ns.namespace.apply(&restored.to_string());
    ns.api::<VmPool>()
        .patch("desk", &PatchParams::default(), &Patch::Merge(json!({ "spec": { "replicas": 2 } })))
        .await
        .unwrap();
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], SERVICES);
    let message = scaled(&ns, reasons::NOT_NEW).await;
    assert!(message.contains(&format!("so their disks may be somebody's: {former}")), "{message}");
    patch_status(&ns, &former, json!({ "newDisks": backup.status.as_ref().unwrap().new_disks })).await;
    // The restored one is none of the pool's two, so it has made another.
    let pools = ns.api::<VmPool>();
    eventually("two free VMs", 2 * LIMIT, async || {
        (pools.get("desk").await.unwrap().status?.free == Some(2)).then_some(())
    })
    .await;
    let (anns, bobs) = (assigned(&ns, "ann").await, assigned(&ns, "bob").await);
    assert!(anns != former && bobs != former && anns != bobs, "{anns} {bobs}");
    let refused = handle(&ns, Timestamp::now).assign("desk", &user("carol")).await;
    assert!(matches!(refused, Err(PoolError::Refused(NotAssigned::NoneFree { .. }))), "{refused:?}");

    // A VM that a person has made for the pool.
    ns.create_vm("pear", |vm| vm["spec"]["pools"] = json!(["desk"])).await;
    let refused = handle(&ns, Timestamp::now).assign("desk", &user("carol")).await;
    assert!(matches!(refused, Err(PoolError::Refused(NotAssigned::NoneFree { .. }))), "{refused:?}");
    assert!(vm(&ns, &former).await.metadata.deletion_timestamp.is_none(), "it may be somebody's");
}

#[tokio::test]
async fn another_template_replaces_the_free_vms_one_after_the_other() {
    let ns = ManagedNamespace::new("pool-reset-template").await;
    ns.namespace.apply(&reset_pool(3).to_string());
    let before = new_ones(&ns, 3).await;
    let anns = assigned(&ns, "ann").await;
    let more = json!({ "spec": { "template": { "spec": { "vm": { "maximumCpus": 4 } } } } });
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &Patch::Merge(&more)).await.unwrap();
    for name in before.iter().filter(|name| **name != anns) {
        gone(&ns, name).await;
    }
    let after = new_ones(&ns, 2).await;
    for name in &after {
        assert_eq!(vm(&ns, name).await.spec.vm.maximum_cpus, Some(4));
    }
    assert_eq!(vm(&ns, &anns).await.spec.vm.maximum_cpus, Some(2), "nobody's VM changes under her");
    // Fewer: free ones go, and Ann's stays.
    ns.namespace.kubectl(&["scale", "vmpool", "desk", "--replicas=1"]);
    for name in &after {
        gone(&ns, name).await;
    }
    assert_eq!(holder(&vm(&ns, &anns).await).as_deref(), Some("ann"));
}
