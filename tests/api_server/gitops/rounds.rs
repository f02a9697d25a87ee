//! A tool beside our manager and people who start, stop and edit VMs, whatever tool it is: it syncs, somebody does something, again and again.

use k8s_openapi::api::core::v1::{ConfigMap, PersistentVolumeClaim, Pod, Secret};
use kube::ResourceExt;
use serde_json::json;
use vm_operator::api::{PowerState, VirtualMachine};

use super::{set_state, vms};
use crate::support::managed_namespace::{ManagedNamespace, condition};

/// Between two syncs people do one of the things in [`act`] each.
pub(super) const ROUNDS: usize = 20;
/// The labels and annotations by which people tell tools to ignore something.
const IGNORE: [&str; 4] = ["ssa", "reconcile", "force", "compare-options"];

/// What a person does to the VM whose state is not in Git, and in which power state it should be then.
async fn act(ns: &ManagedNamespace, round: usize) -> PowerState {
    let by_kubectl = |state: &str| {
        let patch = json!({ "spec": { "vm": { "state": state } } });
        ns.namespace.kubectl(&["patch", "vm", "desktop", "--type=merge", &format!("--patch={patch}")]);
    };
    match round % 4 {
        0 => {
            set_state(ns, "desktop", "vm-operator-cli", "Running").await;
            PowerState::Running
        }
        1 => {
            by_kubectl("Stopped");
            PowerState::Stopped
        }
        2 => {
            by_kubectl("Running");
            PowerState::Running
        }
        _ => {
            set_state(ns, "desktop", "vm-operator-cli", "Stopped").await;
            PowerState::Stopped
        }
    }
}

/// Every object of the VMs, with its version.
async fn versions(ns: &ManagedNamespace) -> Vec<String> {
    let mut all = Vec::new();
    macro_rules! add {
        ($($kind:ty),*) => { $(for object in ns.api::<$kind>().list(&Default::default()).await.unwrap() {
            all.push(format!("{} {} {}", stringify!($kind), object.name_any(), object.resource_version().unwrap()));
        })* };
    }
    add!(VirtualMachine, Pod, ConfigMap, Secret, PersistentVolumeClaim);
    all
}

/// Plays the runner of a VM that should run.
pub(super) async fn boot(ns: &ManagedNamespace, name: &str) {
    ns.vm_when(name, "starting", |vm| condition(vm, "Ready").is_some_and(|ready| ready.1 == "Starting")).await;
    ns.report(name, true, "Started").await;
    ns.vm_with_reason(name, "Running").await;
}

/// The rounds, with the VMs `web` and `desktop` as they are in `example/gitops`. `sync` returns when the tool has synced, and has found nothing
/// to complain about.
pub(super) async fn rounds(ns: &ManagedNamespace, sync: impl AsyncFn(usize)) {
    let spec = |vm: VirtualMachine| json!(vm.spec);
    let (web, desktop) = (spec(vms(ns).get("web").await.unwrap()), spec(vms(ns).get("desktop").await.unwrap()));
    let mut flapping = Vec::new();
    for round in 1..=ROUNDS {
        let wanted = act(ns, round).await;
        let is_wanted = |vm: &VirtualMachine| vm.status.as_ref().is_some_and(|status| status.power == Some(wanted));
        ns.vm_when("desktop", "as somebody wants it", is_wanted).await;
        if wanted == PowerState::Running {
            boot(ns, "desktop").await;
        } else {
            ns.vm_with_reason("desktop", "StoppedAsRequested").await;
        }
        // An edit that Git takes back, and one that is a person's.
        let edit = json!({ "spec": { "vm": { "currentCpus": 1 } } });
        ns.namespace.kubectl(&["patch", "vm", "web", "--type=merge", &format!("--patch={edit}")]);
        let power_before = vms(ns).get("desktop").await.unwrap().status.unwrap().power;
        sync(round).await;
        let seen = |vm: &VirtualMachine| vm.status.as_ref().unwrap().observed_generation == vm.metadata.generation;
        let after = ns.vm_when("desktop", "observed", seen).await;
        assert_eq!(after.status.as_ref().unwrap().power, power_before, "round {round}: the sync changed the power");
        let exists = ns.api::<Pod>().get_opt("desktop").await.unwrap();
        let exists = exists.is_some_and(|pod| pod.metadata.deletion_timestamp.is_none());
        assert_eq!(exists, wanted == PowerState::Running, "round {round}");
        // What Git has is as Git has it, and of the rest only what the person changed differs.
        for (name, git, may_differ) in [("web", &web, &[][..]), ("desktop", &desktop, &["/vm/state"])] {
            let now = spec(ns.vm_when(name, "observed", seen).await);
            let changes = json!(json_patch::diff(git, &now));
            let changes = changes.as_array().unwrap().iter().map(|change| change["path"].as_str().unwrap().to_owned());
            flapping.extend(
                changes.filter(|path| !may_differ.contains(&path.as_str())).map(|path| format!("{name}{path}")),
            );
        }
    }
    assert_eq!(flapping, [""; 0]);
    for vm in vms(ns).list(&Default::default()).await.unwrap() {
        let rules =
            vm.annotations().keys().filter(|name| IGNORE.iter().any(|rule| name.ends_with(&format!("/{rule}"))));
        assert_eq!(rules.collect::<Vec<_>>(), [""; 0], "no VM needs a rule that tells a tool to ignore something");
    }
    // At rest: three syncs more, in which nobody writes anything.
    ns.manager.wait_until_idle().await;
    let (before, writes) = (versions(ns).await, ns.manager.logged_writes().len());
    for round in 1..=3 {
        sync(ROUNDS + round).await;
    }
    ns.manager.wait_until_idle().await;
    assert_eq!(versions(ns).await, before, "writes at rest");
    assert_eq!(ns.manager.logged_writes().len(), writes, "writes of the manager at rest");
}
