//! What a plan presumes, and what is left of it otherwise: a row of the table at the head of `plan::preconditions` each.

use super::*;

/// The fact and what happens without it, in words.
fn presumed(vm: &VirtualMachine, observed: &Observed) -> Vec<String> {
    let plan = plan(vm, observed, Some(&rendered(vm, observed)));
    let words = plan.preconditions.iter().map(|Precondition { fact, otherwise }| format!("{fact:?}: {otherwise:?}"));
    words.collect()
}

const SOURCES: &str = "SourcesAllowed { is_restart: false }: LeaveOut(Everything)";
const VM: &str = "VmCurrent: Wait(None)";
const REPORTS: &str = "ReportsCurrent: Wait(None)";

/// A VM about which the manager has written something.
fn known(edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    vm(|vm| {
        vm["status"] = json!({ "observedGeneration": 1 });
        edit(vm);
    })
}

#[test]
fn a_plan_presumes_what_it_depends_on_and_a_vm_at_rest_nothing() {
    let new = vm(|vm| vm["status"] = json!({ "observedGeneration": -1 }));
    let restarted = vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }));
    let retried = known(|vm| {
        vm["status"]["retry"] = json!({ "count": 1, "podUid": "Pod-apple", "next": "2000-01-01T00:00:00Z" });
    });
    let running = cluster(&new, |_, _| ());
    let only = |is_left: fn(&ObjectKey) -> bool| {
        let objects = running.objects.iter().filter(|object| is_left(&object.key)).cloned().collect();
        Observed { objects, ..running.clone() }
    };
    let without_pod = only(|key| !key.is_pod());
    let only_disk = only(|key| key.name == "apple-core-disk");
    let ended = cluster(&new, on_pod(|pod| pod["status"] = json!({ "phase": "Failed" })));
    let old_agent = cluster(
        &new,
        on_pod(|pod| {
            on_node(pod);
            pod["metadata"]["annotations"][HASH_ANNOTATION] = json!("another");
            pod["spec"]["initContainers"][0]["image"] = json!("old");
        }),
    );
    let absent = |vm: &VirtualMachine, but: &str| {
        let names: Vec<String> = crate::claims::possible_names(vm).filter(|name| name != but).collect();
        format!("ClaimsAbsent({names:?}): Wait(Some(1s))")
    };
    let stay = r#"ClaimsStay(["apple-runner-data", "apple-core-disk"]): Wait(None)"#;
    let may_be_used = "SourcesAllowed { is_restart: true }: LeaveOut(Restart)";
    let starts_again = "RestartPossible: LeaveOut(Restart)";
    let turn = "AgentsTurn: LeaveOut(AgentsImage)";
    for (what, vm, observed, expected) in [
        ("at rest", &known(|_| ()), &running, vec![]),
        ("to be down", &stopped(), &running, vec![]),
        ("new", &new, &nothing(), vec![absent(&new, ""), SOURCES.into()]),
        ("new, with a claim", &new, &only_disk, vec![absent(&new, "apple-core-disk"), SOURCES.into()]),
        ("starts again", &known(|_| ()), &without_pod, vec![VM.into(), REPORTS.into(), SOURCES.into()]),
        ("its Pod has ended", &retried, &ended, vec![VM.into(), REPORTS.into(), stay.into()]),
        ("restart", &restarted, &running, vec![may_be_used.into(), starts_again.into()]),
        ("its agent is old", &new, &old_agent, vec![turn.into()]),
    ] {
        assert_eq!(presumed(vm, observed), expected, "{what}");
    }
}

#[test]
fn what_is_left_out_is_gone_and_the_rest_stays() {
    let restarted = vm(|vm| {
        vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" });
        vm["spec"]["vm"]["currentCpus"] = json!(1);
    });
    let observed = cluster(&vm(|_| ()), |_, _| ());
    let all = plan(&restarted, &observed, Some(&rendered(&restarted, &observed)));
    let without = |part| {
        let mut plan = all.clone();
        plan.leave_out(part);
        short(&plan)
    };
    let (changed, deleted) = ("0 change ConfigMap apple".to_owned(), "1 delete Pod apple Restart None".to_owned());
    assert_eq!(short(&all), [changed.clone(), deleted, GONE.to_owned()]);
    assert_eq!(without(Part::AgentsImage), short(&all));
    assert_eq!(without(Part::Restart), [changed]);
    assert_eq!(without(Part::Everything), [GONE]);
}

#[test]
fn a_guest_that_would_wait_for_a_claim_is_not_taken_down() {
    let restarted = vm(|vm| {
        vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" });
        vm["status"] = json!({ "claims": [{ "name": "apple-core-disk", "uid": "gone" }] });
    });
    let mut observed = cluster(&vm(|_| ()), |_, _| ());
    observed.objects.retain(|object| object.key.name != "apple-core-disk");
    let plan = plan(&restarted, &observed, Some(&rendered(&restarted, &observed)));
    assert_eq!(short(&plan), [format!("ClaimMissing({:?})", ObjectKey::claim("apple-core-disk"))]);
    assert_eq!(facts(&plan), []);
}
