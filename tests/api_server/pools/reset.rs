//! Pools that bring the disks of a VM back between two users: `spec.reset`.

use k8s_openapi::api::core::v1::{PersistentVolumeClaim, Pod};
use vm_operator::{api::status::ResetState, assignment::Refusal, object::DISK_NUMBER_ANNOTATION};

use super::{members::manifest, *};
use crate::support::{managed_namespace::SERVICES, manager::Manager};

/// Waits until the condition Reset of the pool has the reason. Returns the message.
async fn reset(ns: &ManagedNamespace, reason: &str) -> String {
    let pools = ns.api::<VmPool>();
    eventually(&format!("the pool to be {reason}"), 2 * LIMIT, async || {
        let pool = pools.get("desk").await.unwrap();
        let status = pool.status.filter(|status| status.observed_generation == pool.metadata.generation)?;
        let found = status.conditions.into_iter().find(|condition| condition.type_ == "Reset")?;
        (found.reason == reason).then_some(found.message)
    })
    .await
}

/// Waits until the disk of the VM is fresh with this number.
async fn fresh(ns: &ManagedNamespace, number: u32) {
    let vms = ns.api::<VirtualMachine>();
    let what = format!("desk-0 to have the disk {number}");
    eventually(&what, 2 * LIMIT, async || {
        let reset = vms.get_opt("desk-0").await.unwrap()?.status?.disk_reset?;
        let is_fresh = reset.state == Some(ResetState::Fresh) && reset.replaced.is_empty();
        (is_fresh && reset.number("system-disk") == number).then_some(())
    })
    .await;
}

/// The claims of the disk that are not being deleted.
async fn claims(ns: &ManagedNamespace) -> Vec<PersistentVolumeClaim> {
    let claims = ns.api::<PersistentVolumeClaim>().list(&Default::default()).await.unwrap();
    let of_disk = |claim: &PersistentVolumeClaim| {
        claim.name_any().starts_with("desk-0-system-disk") && claim.metadata.deletion_timestamp.is_none()
    };
    let mut claims: Vec<_> = claims.into_iter().filter(of_disk).collect();
    claims.sort_by_key(ResourceExt::name_any);
    claims
}

async fn names(ns: &ManagedNamespace) -> Vec<String> {
    claims(ns).await.iter().map(ResourceExt::name_any).collect()
}

async fn patch_pool(ns: &ManagedNamespace, spec: Value) {
    let patch = Patch::Merge(json!({ "spec": spec }));
    ns.api::<VmPool>().patch("desk", &PatchParams::default(), &patch).await.unwrap();
}

/// The user gets the VM, and the claim of its Pod's disk has this name.
async fn use_it(ns: &ManagedNamespace, person: &str, claim: &str) {
    let assigned = handle(ns, Timestamp::now).assign("desk", &user(person)).await.unwrap();
    assert_eq!((assigned.vm.name_any().as_str(), assigned.is_new), ("desk-0", true));
    let pod: Pod = ns.pod_when("desk-0", "to exist", |_| true).await;
    let volumes = pod.spec.as_ref().unwrap().volumes.as_ref().unwrap();
    let of_disk = volumes.iter().find(|volume| volume.name == "system-disk").unwrap();
    assert_eq!(of_disk.persistent_volume_claim.as_ref().unwrap().claim_name, claim);
    ns.report("desk-0", true, "Started").await;
    ns.vm_with_reason("desk-0", "Running").await;
}

async fn release(ns: &ManagedNamespace, person: &str) {
    handle(ns, Timestamp::now).release("desk", person, None).await.unwrap();
}

#[tokio::test]
async fn a_vm_has_a_new_disk_from_its_snapshot_before_somebody_else_gets_it() {
    let mut ns = ManagedNamespace::new("pool-reset").await;
    let source = json!({ "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "golden" });
    let mut pool = manifest("desk", 1);
    pool["spec"]["reset"] = json!({});
    pool["spec"]["template"]["spec"]["vm"]["disks"][0]["volumeClaimTemplate"]["spec"]["dataSource"] = source.clone();
    ns.namespace.apply(&pool.to_string());
    // Nobody has used the disks of a new VM.
    fresh(&ns, 0).await;
    reset(&ns, reasons::FRESH).await;
    assert_eq!(names(&ns).await, ["desk-0-system-disk"]);

    use_it(&ns, "ann", "desk-0-system-disk").await;
    // A Pod on a node ends when its kubelet says so.
    ns.bind_pod("desk-0", "node").await;
    release(&ns, "ann").await;
    ns.vm_when("desk-0", "to be stopped", |vm| vm.spec.vm.state == PowerState::Stopped).await;
    assert_eq!(reset(&ns, reasons::PROGRESSING).await, "being reset: desk-0");
    let refused = handle(&ns, Timestamp::now).assign("desk", &user("bob")).await;
    assert!(
        matches!(refused, Err(PoolError::Refused(Refusal::NoneFree { members: 1, resetting: 1, .. }))),
        "{refused:?}"
    );
    let shown = succeeds(&ns, &["pool", "status", "desk"]);
    assert!(
        shown.contains("1 VMs, 1 free (1 to be reset), 0 assigned")
            && shown.contains("not all are reset: being reset: desk-0")
            && shown.contains("desk-0   Resetting"),
        "{shown}"
    );
    assert_eq!(names(&ns).await, ["desk-0-system-disk"], "no new claim while a guest may run");
    ns.manager.signal(rustix::process::Signal::KILL);
    ns.manager = Manager::start_with(ns.kubeconfig.path(), ns.namespace.name(), &[], SERVICES);
    ns.remove_pod("desk-0").await;
    fresh(&ns, 1).await;
    let [old, new] = &claims(&ns).await[..] else { panic!("{:?}", names(&ns).await) };
    assert_eq!((old.name_any().as_str(), new.name_any().as_str()), ("desk-0-system-disk", "desk-0-system-disk-1"));
    assert_eq!(json!(new.spec.as_ref().unwrap().data_source), source);
    assert_eq!(new.annotations()[DISK_NUMBER_ANNOTATION], "1");

    // From now on old claims are deleted: that of Bob, and not that of Ann, which was kept before.
    patch_pool(&ns, json!({ "reset": { "oldClaims": "Delete" } })).await;
    use_it(&ns, "bob", "desk-0-system-disk-1").await;
    release(&ns, "bob").await;
    let message = reset(&ns, reasons::REFUSED).await;
    assert!(message.contains("delete persistentvolumeclaims"), "{message}");
    assert_eq!(names(&ns).await.len(), 3);
    let namespace = ns.namespace.name();
    let role = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": { "name": "old-claims" },
        "rules": [{ "apiGroups": [""], "resources": ["persistentvolumeclaims"], "verbs": ["delete"] }],
    });
    let binding = json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": { "name": "old-claims" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "old-claims" },
        "subjects": [{ "kind": "ServiceAccount", "name": "vm-operator", "namespace": namespace }],
    });
    ns.namespace.apply(&role.to_string());
    ns.namespace.apply(&binding.to_string());
    fresh(&ns, 2).await;
    reset(&ns, reasons::FRESH).await;
    assert_eq!(names(&ns).await, ["desk-0-system-disk", "desk-0-system-disk-2"]);

    // A VM that is made again does not know who had its disk.
    ns.api::<VirtualMachine>().delete("desk-0", &Default::default()).await.unwrap();
    fresh(&ns, 3).await;
    assert_eq!(names(&ns).await, ["desk-0-system-disk", "desk-0-system-disk-3"]);
    use_it(&ns, "carol", "desk-0-system-disk-3").await;
}

#[tokio::test]
async fn a_vm_with_a_disk_that_can_not_be_reset_is_given_to_nobody() {
    let ns = ManagedNamespace::new("pool-no-reset").await;
    ns.namespace.apply(&manifest("desk", 1).to_string());
    pool_when(&ns, "desk", [1, 1, 0, 0], reasons::USABLE).await;
    ns.vm_with_reason("desk-0", "StoppedAsRequested").await;
    use_it(&ns, "ann", "desk-0-system-disk").await;
    patch_pool(&ns, json!({ "reset": {} })).await;
    // Ann goes on, and has the VM.
    let message = reset(&ns, reasons::FRESH).await;
    assert_eq!(message, "the VMs that are assigned to nobody have fresh disks");
    release(&ns, "ann").await;
    let message = reset(&ns, reasons::CANNOT_RESET).await;
    assert!(message.contains("desk-0: its disk system has no dataSource: give it one, or name"), "{message}");
    let refused = handle(&ns, Timestamp::now).assign("desk", &user("ann")).await;
    assert!(matches!(refused, Err(PoolError::Refused(Refusal::NoneFree { resetting: 1, .. }))), "{refused:?}");

    // By its name it comes back empty.
    patch_pool(&ns, json!({ "reset": { "disks": ["system"] } })).await;
    fresh(&ns, 1).await;
    use_it(&ns, "bob", "desk-0-system-disk-1").await;
    assert_eq!(names(&ns).await, ["desk-0-system-disk", "desk-0-system-disk-1"]);
}
