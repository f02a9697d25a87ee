//! Pods beside the VM's own one, and an ended Pod that is kept.

use std::sync::Arc;

use super::*;
use crate::{object::ROLE_ANNOTATION, observed::Object};

/// The cluster, and a copy of the VM's Pod that a person made, changed by `edit`.
fn with_copy(edit: impl Fn(&mut Object)) -> Observed {
    let mut observed = cluster(|_, _| ());
    let copied = cluster(|kind, object| {
        if kind == "Pod" {
            (object["metadata"]["name"], object["metadata"]["uid"]) = (json!("copy"), json!("Pod-copy"));
            object["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
        }
    });
    let mut copy = Object::clone(copied.objects.iter().find(|object| object.key.is_pod()).unwrap());
    edit(&mut copy);
    observed.objects.push(Arc::new(copy));
    observed
}

#[test]
fn ready_says_that_a_second_pod_can_write_to_the_disks() {
    let running = reported(true, |_| ());
    let (status, events) = reconcile(&running, &with_copy(|_| ()), false);
    assert_eq!(short(&json!(status)), "Running true Ready=False ClaimInUse");
    let ready = conditions::find(&status.conditions, READY).unwrap();
    assert!(ready.message.starts_with("Pod copy mounts a claim of this VM beside the VM's own Pod apple"), "{ready:?}");
    assert!(events.iter().any(|event| event.reason == Reason::ClaimInUse), "{events:?}");
    // Also one that the VM owns, and that templates named otherwise.
    let own = with_copy(|pod| pod.origin = crate::ownership::origin::Origin::Manager);
    assert_eq!(short(&derive(&running, &own)), "Running true Ready=False ClaimInUse");
    let fine = "Running true Ready=True Running";
    assert_eq!(
        short(&derive(&running, &with_copy(|pod| pod.status = json!({ "phase": "Failed" })))),
        fine,
        "it has ended"
    );
    assert_eq!(short(&derive(&running, &with_copy(|pod| pod.spec["volumes"] = json!([])))), fine, "it has no disk");
    let down = reported(false, |vm| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        set_by("Update", vm);
    });
    assert_eq!(short(&derive(&down, &with_copy(|_| ()))), "Stopping false Ready=False Stopping");
}

#[test]
fn ready_says_that_an_ended_pod_is_kept_for_a_claim() {
    let evicted = |is_deleted: bool| {
        let observed = cluster(|kind, object| match kind {
            "Pod" => object["status"] = json!({ "phase": "Failed", "reason": "Evicted", "message": "no memory" }),
            "PersistentVolumeClaim" if is_deleted && object["metadata"]["name"] == "apple-core-disk" => {
                object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:00:00Z");
            }
            _ => {}
        });
        let (status, _) = reconcile(&vm(|_| ()), &observed, false);
        conditions::find(&status.conditions, READY).unwrap().message.clone()
    };
    let kept = "the Pod is kept, because claim apple-core-disk is being deleted";
    assert!(evicted(true).contains(kept) && !evicted(true).contains("; try "), "{}", evicted(true));
    assert!(!evicted(false).contains("is kept") && evicted(false).contains("no memory"), "{}", evicted(false));
}

#[test]
fn a_helper_that_is_not_ready_is_named() {
    let vm = vm(|_| ());
    let mut objects = rendered(&vm, &nothing());
    objects.retain(|object| !object.key.is_pod());
    let mut helper = rendered(&vm, &nothing()).into_iter().find(|object| object.key.is_pod()).unwrap();
    (helper.key.name, helper.is_helper) = ("apple-disks".into(), true);
    let value = Arc::make_mut(&mut helper.value);
    value["metadata"]["name"] = json!("apple-disks");
    value["metadata"]["annotations"][ROLE_ANNOTATION] = json!("helper");
    value["spec"] = json!({ "containers": [{ "name": "server", "image": "x" }] });
    objects.push(helper);
    let waiting = json!({ "containerStatuses": [{ "name": "server", "image": "x", "state": { "waiting": { "reason": "ImagePullBackOff", "message": "no such image" } } }] });
    for (pod_status, says) in [
        (json!({}), "Starting: waiting until Pod apple-disks is ready"),
        (waiting, "HelperNotReady: Pod apple-disks: server: the node can't get the image x"),
    ] {
        let observed = applied(&objects, |kind, object| {
            if kind == "Pod" {
                object["status"] = pod_status.clone();
            }
        });
        let plan = plan(&vm, &observed, Some(&objects));
        let (source, outcome) = (UsedTemplates::default(), ExecutionResult::default());
        let reconciled =
            Reconciled { vm: &vm, observed: &observed, plan: &plan, rendered: Ok(&objects), outcome: &outcome, source };
        let status = status(&reconciled);
        let ready = conditions::find(&status.conditions, READY).unwrap();
        let found = format!("{}: {}", ready.reason, ready.message);
        assert!(found.starts_with(says), "{says}: {found}");
    }
}
