//! Pools on a real API server with a manager: assigning, what the manager does by itself, the commands, and many people at once.
//! [`autoscaler`]: pools that are scaled by what their guests use; [`members`]: pools that make their VMs; [`model`]: many people at once; [`reset`]: new disks for the next user.

mod autoscaler;
mod members;
mod model;
mod reset;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::{
    ResourceExt,
    api::{Patch, PatchParams, PostParams},
};
use serde_json::{Value, json};
use vm_operator::{
    actions::pool::{PoolError, PoolHandle},
    api::{PowerState, VirtualMachine, VmPool, pool::reasons},
    assignment::{Assignee, NotAssigned},
    object::STARTED_FOR_ANNOTATION,
    ownership::COMMAND_MANAGER,
    people::Rights,
};

use crate::{
    commands::{run, succeeds, vm},
    support::{
        cluster::{delete, eventually},
        managed_namespace::{LIMIT, ManagedNamespace},
    },
};

const POOL: &str = "desktops";

async fn create_pool(ns: &ManagedNamespace, name: &str, retention: &str) {
    let pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "metadata": { "name": name },
        "spec": { "retention": retention, "permissions": [{ "role": "staff" }] },
    });
    ns.api::<VmPool>().create(&PostParams::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
}

async fn create_members(ns: &ManagedNamespace, names: &[&str]) {
    for name in names {
        ns.create_vm(name, |vm| {
            vm["spec"]["pools"] = json!([POOL]);
            vm["spec"]["vm"].as_object_mut().unwrap().remove("state");
        })
        .await;
        ns.vm_with_reason(name, "StoppedAsRequested").await;
    }
}

fn handle(ns: &ManagedNamespace, clock: fn() -> Timestamp) -> PoolHandle {
    PoolHandle {
        client: ns.client.clone(),
        namespace: ns.namespace.name().to_owned(),
        field_manager: COMMAND_MANAGER.into(),
        clock,
    }
}

fn user(name: &str) -> Assignee {
    Assignee { user: name.into(), rights: Rights::all() }
}

fn holder(vm: &VirtualMachine) -> Option<String> {
    vm.status.as_ref()?.pools.assignment.as_ref()?.user.clone()
}

async fn patch_status(ns: &ManagedNamespace, name: &str, status: Value) {
    let patch = Patch::Merge(json!({ "status": status }));
    ns.api::<VirtualMachine>().patch_status(name, &PatchParams::default(), &patch).await.unwrap();
}

/// Waits until the pool's status says so.
async fn pool_when(ns: &ManagedNamespace, name: &str, wanted: [u32; 4], reason: &str) {
    let pools = ns.api::<VmPool>();
    eventually(&format!("pool {name} to be {wanted:?}, {reason}"), LIMIT, async || {
        let pool = pools.get(name).await.unwrap();
        let status = pool.status.as_ref()?;
        let counts = [status.members?, status.free?, status.assigned?, status.expired?];
        let is_current = status.observed_generation == pool.metadata.generation;
        (is_current && counts == wanted && status.conditions.first()?.reason == reason).then_some(())
    })
    .await;
}

/// A pool with a warm VM: whoever gets that one finds it running, and the next one is started.
#[tokio::test]
async fn a_pool_keeps_a_free_vm_booted() {
    let ns = ManagedNamespace::new("pool-warm").await;
    create_pool(&ns, POOL, "PT1h").await;
    create_members(&ns, &["apple", "pear", "plum"]).await;
    // Git says that this one is stopped.
    let applied = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "metadata": { "name": "apple" },
        "spec": { "vm": { "state": "Stopped" } },
    });
    let git = PatchParams::apply("kustomize-controller").force();
    ns.api::<VirtualMachine>().patch("apple", &git, &Patch::Apply(&applied)).await.unwrap();
    let patch = Patch::Merge(json!({ "spec": { "warm": 1 } }));
    ns.api::<VmPool>().patch(POOL, &PatchParams::default(), &patch).await.unwrap();
    ns.vm_with_reason("pear", "Starting").await;
    let is_on = async |name: &str| vm(&ns, name).await.spec.vm.state == PowerState::Running;
    assert_eq!((is_on("apple").await, is_on("plum").await), (false, false));
    ns.report("pear", true, "Started").await;
    ns.vm_with_reason("pear", "Running").await;

    let assigned = handle(&ns, Timestamp::now).assign(POOL, &user("ann")).await.unwrap();
    assert_eq!((assigned.vm.name_any().as_str(), assigned.is_new, assigned.is_started), ("pear", true, false));
    ns.vm_with_reason("plum", "Starting").await;
    // Given back, it goes on running.
    handle(&ns, Timestamp::now).release(POOL, "ann", None).await.unwrap();
    pool_when(&ns, POOL, [3, 3, 0, 0], reasons::USABLE).await;
    assert!(is_on("pear").await && is_on("plum").await && !is_on("apple").await);
}

#[tokio::test]
async fn a_person_gets_a_vm_of_a_pool_by_the_commands() {
    let ns = ManagedNamespace::new("pool-commands").await;
    create_pool(&ns, POOL, "PT1h").await;
    pool_when(&ns, POOL, [0; 4], reasons::NO_MEMBERS).await;
    create_members(&ns, &["apple", "pear"]).await;
    pool_when(&ns, POOL, [2, 2, 0, 0], reasons::USABLE).await;

    let assign = ["pool", "assign", POOL, "--user", "alice"];
    let tried = |how| succeeds(&ns, &[&assign[..], &[how]].concat());
    assert_eq!(tried("--dry-run=client"), "vm/apple assigned to alice from pool/desktops (dry run)\n");
    assert_eq!(tried("--dry-run=server"), "vm/apple assigned to alice from pool/desktops (server dry run)\n");
    assert_eq!(holder(&vm(&ns, "apple").await), None);

    assert_eq!(succeeds(&ns, &assign), "vm/apple assigned to alice from pool/desktops, started\n");
    let apple = ns.vm_with_reason("apple", "Starting").await;
    assert_eq!((holder(&apple).as_deref(), apple.spec.vm.state), (Some("alice"), PowerState::Running));
    let writer = apple.managed_fields().iter().any(|entry| entry.manager.as_deref() == Some(COMMAND_MANAGER));
    assert!(writer, "{:?}", apple.managed_fields());
    assert_eq!(succeeds(&ns, &assign), "vm/apple unchanged (alice has it from pool/desktops)\n");
    pool_when(&ns, POOL, [2, 1, 1, 0], reasons::USABLE).await;

    // A VM that its user has stopped stays stopped.
    ns.patch_vm("apple", json!({ "spec": { "vm": { "state": "Stopped" } } })).await;
    assert_eq!(succeeds(&ns, &assign), "vm/apple unchanged (alice has it from pool/desktops)\n");
    assert_eq!(vm(&ns, "apple").await.spec.vm.state, PowerState::Stopped);

    assert_eq!(
        succeeds(&ns, &["pool", "assign", POOL, "--user", "bob", "-o", "name"]),
        "virtualmachine.vmoperator.jdrupes.org/pear\n"
    );
    let full = run(&ns, &["pool", "assign", POOL, "--user", "carol"]);
    assert!(
        full.code == 1
            && full.talk.starts_with("pool/desktops: all 2 VMs of the pool are in use; the next one is kept until 20"),
        "{full:?}"
    );
    let none = run(&ns, &["pool", "assign", "nothing", POOL, "--user", "alice"]);
    assert!(
        none.code == 5 && none.talk.contains("pool/nothing: there is no pool nothing in the namespace"),
        "{none:?}"
    );

    let listed = succeeds(&ns, &["pool", "list"]);
    let words: Vec<_> =
        listed.lines().map(|line| line.split_whitespace().take(7).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(words, ["NAME READY MEMBERS FREE ASSIGNED EXPIRED RETENTION", "desktops True 2 0 2 0 PT1h"]);
    assert_eq!(succeeds(&ns, &["pool", "list", "-o", "name"]), "vmpool.vmoperator.jdrupes.org/desktops\n");
    let status = succeeds(&ns, &["pool", "status", POOL]);
    assert!(status.contains("2 VMs, 0 free, 2 assigned, 0 expired") && status.contains("Assigned   alice"), "{status}");
    let of_alice = "jsonpath={.vms[?(@.user==\"alice\")].vm}";
    assert_eq!(succeeds(&ns, &["pool", "status", POOL, "-o", of_alice]), "apple");

    let release = ["pool", "release", POOL, "--user", "alice"];
    assert_eq!(succeeds(&ns, &release), "vm/apple released (alice had it from pool/desktops)\n");
    assert_eq!(succeeds(&ns, &release), "pool/desktops unchanged (alice has no VM of it)\n");
    assert_eq!(succeeds(&ns, &["pool", "unassign", "pear"]), "vm/pear unassigned (bob had it)\n");
    assert_eq!(
        succeeds(&ns, &["pool", "unassign", "--all"]),
        "vm/apple unchanged (it is nobody's)\nvm/pear unchanged (it is nobody's)\n"
    );
    pool_when(&ns, POOL, [2, 2, 0, 0], reasons::USABLE).await;

    let nobody = Assignee { rights: Rights::default(), ..user("mallory") };
    let refused = handle(&ns, Timestamp::now).assign(POOL, &nobody).await;
    assert!(matches!(refused, Err(PoolError::Refused(NotAssigned::NoRight { .. }))), "{refused:?}");
}

#[tokio::test]
async fn the_manager_ends_assignments_and_finishes_starts() {
    let ns = ManagedNamespace::new("pool-upkeep").await;
    create_pool(&ns, POOL, "PT1h").await;
    create_pool(&ns, "unreadable", "an hour").await;
    create_pool(&ns, "gone", "P1D").await;
    create_members(&ns, &["apple", "pear", "plum", "quince", "zebra"]).await;
    let long_ago = "2026-01-01T00:00:00Z";
    let now = Timestamp::now().strftime("%FT%TZ").to_string();
    let assign = async |name: &str, pool: &str, last_used: &str| {
        let assignment =
            json!({ "pool": pool, "user": format!("of-{name}"), "assignedAt": long_ago, "lastUsed": last_used });
        patch_status(&ns, name, json!({ "assignment": assignment })).await;
    };
    assign("pear", "unreadable", long_ago).await;
    assign("plum", "gone", &now).await;
    assign("zebra", POOL, &now).await;
    assign("apple", POOL, long_ago).await;
    let is_free = |vm: &VirtualMachine| holder(vm).is_none();
    ns.vm_when("apple", "its retention is over", is_free).await;
    pool_when(&ns, POOL, [5, 2, 1, 0], reasons::USABLE).await;
    pool_when(&ns, "unreadable", [0, 0, 1, 0], reasons::RETENTION_INVALID).await;

    delete(&ns.api::<VmPool>(), "gone").await;
    ns.vm_when("plum", "its pool is gone", is_free).await;

    // A former pool of that name has assigned it.
    let assignment = json!({ "pool": POOL, "poolUid": "of-a-former-pool", "user": "of-plum", "assignedAt": long_ago, "lastUsed": now });
    patch_status(&ns, "plum", json!({ "assignment": assignment })).await;
    ns.vm_when("plum", "its pool was made again", is_free).await;
    let uid = ns.api::<VmPool>().get(POOL).await.unwrap().metadata.uid;
    let has_uid = |vm: &VirtualMachine| vm.status.as_ref().unwrap().pools.assignment.as_ref().unwrap().pool_uid == uid;
    ns.vm_when("zebra", "the UID of its pool is noted", has_uid).await;

    // Whoever assigned it has ended before the start.
    let assignment = json!({ "pool": POOL, "user": "erin", "assignedAt": long_ago, "lastUsed": now, "starts": true });
    patch_status(&ns, "quince", json!({ "assignment": assignment })).await;
    let quince = ns.vm_when("quince", "to be started", |vm| vm.spec.vm.state == PowerState::Running).await;
    assert_eq!(quince.annotations()[STARTED_FOR_ANNOTATION], format!("{long_ago} erin"));

    // Its user has left the console after it was used last.
    let left = json!({ "type": "ConsoleConnected", "status": "False", "reason": "NobodyConnected", "message": "-", "lastTransitionTime": "2050-01-01T00:00:00Z" });
    patch_status(&ns, "zebra", json!({ "consoleUser": "of-zebra", "conditions": [left] })).await;
    ns.vm_when("zebra", "its last use to be noted", |vm| {
        vm.status.as_ref().unwrap().pools.assignment.as_ref().unwrap().last_used.as_ref().unwrap().0.to_string()
            == "2050-01-01T00:00:00Z"
    })
    .await;
    assert_eq!(holder(&vm(&ns, "pear").await).as_deref(), Some("of-pear"), "what can't be read takes nothing away");
}
