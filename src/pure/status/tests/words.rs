//! What the condition Ready says to a person.

use super::*;
use crate::object::FORCE_STOP_ANNOTATION;

fn ready(status: &Value) -> (String, String) {
    let conditions = status["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|condition| condition["type"] == READY).unwrap();
    (ready["reason"].as_str().unwrap().to_owned(), ready["message"].as_str().unwrap().to_owned())
}

#[test]
fn a_change_that_qemu_refuses_makes_a_running_vm_not_ready_and_its_guest_keeps_the_former_generation() {
    let refused = |vm: &mut Value| {
        let condition = json!({
            "type": "ChangesApplied", "status": "False", "reason": "ChangeFailed", "message": "no.iso can't be inserted",
            "lastTransitionTime": "2027-01-15T07:00:00Z",
        });
        vm["status"]["conditions"].as_array_mut().unwrap().push(condition);
        vm["status"]["guestGeneration"] = json!(2);
    };
    let pod = pod(json!({ "phase": "Running" }));
    let status = derive(&reported(true, refused), &pod);
    assert_eq!(short(&status), "Running true Ready=False ChangeFailed");
    assert_eq!(ready(&status).1, "no.iso can't be inserted");
    assert_eq!(status["guestGeneration"], 2);
    assert_eq!(derive(&reported(true, |vm| vm["status"]["guestGeneration"] = json!(2)), &pod)["guestGeneration"], 3);
    // Nothing is left of it when no guest runs.
    let down = derive(&reported(true, refused), &nothing());
    let conditions = down["conditions"].as_array().unwrap();
    let left = conditions.iter().find(|condition| condition["type"] == "ChangesApplied").unwrap();
    assert_eq!((&left["reason"], &left["message"]), (&json!("Starting"), &json!("no guest is running")));
}

#[test]
fn a_device_that_does_not_work_makes_a_running_vm_not_ready() {
    let failed = |reason: &'static str| {
        move |vm: &mut Value| {
            let condition = json!({
                "type": "DevicesReady", "status": "False", "reason": reason, "message": "the disk is full",
                "lastTransitionTime": "2027-01-15T07:00:00Z",
            });
            vm["status"]["conditions"].as_array_mut().unwrap().push(condition);
        }
    };
    let pod = pod(json!({ "phase": "Running" }));
    let status = derive(&reported(true, failed("StorageFull")), &pod);
    assert_eq!(short(&status), "Running true Ready=False StorageFull");
    assert_eq!(ready(&status).1, "the disk is full");
    // Only reasons of that condition.
    assert_eq!(short(&derive(&reported(true, failed("Stopping")), &pod)), "Running true Ready=True Running");
}

#[test]
fn a_vm_that_stops_or_restarts_says_until_when_its_guest_has_time_and_how_to_end_it() {
    let going = |kind: &str, object: &mut Value| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
            object["metadata"]["deletionGracePeriodSeconds"] = json!(905);
        }
    };
    let limit = ", until 2027-01-15T08:10:00Z at most";
    let force =
        format!("; to end it now: kubectl -n orchard annotate --overwrite vm apple {FORCE_STOP_ANNOTATION}=Pod-apple");
    let stopping = derive(&stopped(), &cluster(going));
    let message = format!("waiting until the guest has powered down{limit}{force}");
    assert_eq!(ready(&stopping), ("Stopping".into(), message));
    let restarting = derive(&vm(|_| ()), &cluster(going));
    let message = format!("waiting until the old Pod is gone before a new one is created{limit}{force}");
    assert_eq!(ready(&restarting), ("Restarting".into(), message));
    // It is forced already.
    let forced = vm(|vm| vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: "Pod-apple" }));
    assert!(ready(&derive(&forced, &cluster(going))).1.ends_with(limit));
}

#[test]
fn a_pod_that_only_other_containers_keep_names_them_and_offers_no_forced_stop() {
    let cluster_with = |others: &[&str]| {
        cluster(|kind: &str, object: &mut Value| {
            if kind == "Pod" {
                object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
                let containers = object["spec"]["containers"].as_array_mut().unwrap();
                containers.extend(others.iter().map(|name| json!({ "name": name })));
            }
        })
    };
    let powered_down = |state: &str| {
        reported(false, |vm| {
            vm["spec"]["vm"]["state"] = json!(state);
            set_by("Update", vm);
            vm["status"]["podUid"] = json!("Pod-apple");
            vm["status"]["conditions"][0]["reason"] = json!("PoweredDown");
        })
    };
    for (state, others, waits) in [
        (
            "Stopped",
            &["web"][..],
            "for the container web of its Pod apple, until 2027-01-15T08:10:00Z at most; it should",
        ),
        (
            "Running",
            &["a", "b"],
            "for the containers a, b of its Pod apple, until 2027-01-15T08:10:00Z at most; each should",
        ),
        ("Stopped", &[], "until its Pod apple is gone, until 2027-01-15T08:10:00Z at most"),
    ] {
        let end = if others.is_empty() { "" } else { " end when it gets SIGTERM" };
        let message = ready(&derive(&powered_down(state), &cluster_with(others))).1;
        assert_eq!(message, format!("the guest does not run any more; waiting {waits}{end}"));
    }
}

#[test]
fn templates_that_do_not_render_and_a_refused_correction_are_both_named() {
    let vm = vm(|_| ());
    let (old, newer) = (TemplateError::refused("pod.yaml.j2", "old"), TemplateError::refused("pod.yaml.j2", "newer"));
    let (observed, outcome) = (nothing(), ExecutionResult::default());
    let plan = plan(&vm, &observed, None);
    let messages = |refused| {
        let source = UsedTemplates { set: None, refused };
        let rendered = Err(&old);
        let reconciled = Reconciled { vm: &vm, observed: &observed, plan: &plan, rendered, outcome: &outcome, source };
        let status = status(&reconciled);
        [TEMPLATES_VALID, READY].map(|it| conditions::find(&status.conditions, it).unwrap().message.clone())
    };
    assert_eq!(messages(None), [old.to_string(), old.to_string()]);
    assert_eq!(messages(Some(&old)), [old.to_string(), old.to_string()], "no correction has been tried");
    let both = format!("the newest templates are refused: {newer}; those in use do not render this VM either: {old}");
    assert_eq!(messages(Some(&newer)), [both.clone(), both]);
}

#[test]
fn a_node_that_does_not_take_the_pod_is_named() {
    let bound = |created: &str| {
        let created = created.to_owned();
        cluster(move |kind, object| {
            if kind == "Pod" {
                object["spec"]["nodeName"] = json!("nowhere");
                object["metadata"]["creationTimestamp"] = json!(created);
            }
        })
    };
    let vm = vm(|vm| vm["spec"]["nodeName"] = json!("nowhere"));
    let early = derive(&vm, &bound("2027-01-15T07:59:45Z"));
    assert_eq!(ready(&early).0, "Starting");
    let late = derive(&vm, &bound("2027-01-15T07:59:30Z"));
    let message =
        "node nowhere has not taken Pod apple yet: kubectl get node nowhere shows whether it exists and answers";
    assert_eq!(ready(&late), ("StartDelayed".into(), message.into()));
}

#[test]
fn a_change_that_waits_is_added_once_to_what_keeps_the_vm_from_starting() {
    let restarted = |reason: &str, message: &str| {
        let state = json!({ "waiting": { "reason": reason, "message": message } });
        cluster(move |kind, object| {
            if kind == "Pod" {
                object["spec"]["nodeName"] = json!("node-1");
                object["status"]["containerStatuses"] =
                    json!([{ "name": "vm-runner", "restartCount": 1, "state": state }]);
            }
        })
    };
    let with_status = |status: Value| {
        vm(move |vm| {
            vm["spec"]["image"] = json!({ "source": "other" });
            vm["status"] = status;
        })
    };
    let first = derive(&with_status(Value::Null), &restarted("ErrImagePull", "no such image"));
    let expected = "vm-runner: ErrImagePull: no such image; these changes need a restart: \
                    objects/Pod/spec.containers[vm-runner].image: kubectl -n orchard annotate --overwrite vm apple \
                    vmoperator.jdrupes.org/restartedAt=\"$(date -Is)\"";
    assert_eq!(ready(&first), ("ImagePullFailed".into(), expected.into()));
    let second = derive(&with_status(first), &restarted("ImagePullBackOff", "it waits"));
    assert_eq!(ready(&second).1, expected);
}

#[test]
fn a_pod_that_the_manager_makes_again_by_itself_needs_no_restart() {
    let changed = vm(|vm| vm["spec"]["image"] = json!({ "source": "other" }));
    let creating = cluster(|kind, object| {
        if kind == "Pod" {
            object["spec"]["nodeName"] = json!("node-1");
            object["status"] = json!({
                "phase": "Pending",
                "conditions": [{ "type": "PodScheduled", "status": "True", "lastTransitionTime": "2027-01-15T07:59:00Z" }],
                "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": "ContainerCreating" } } }],
            });
        }
    });
    let message = ready(&derive(&changed, &creating)).1;
    let end = "objects/Pod/spec.containers[vm-runner].image: if no container starts, the manager does that at 2027-01-15T08:01:00Z";
    assert!(message.ends_with(&format!("; these changes need a restart: {end}")), "{message}");
}

#[test]
fn a_paused_guest_and_a_pod_that_is_not_created_have_reasons_of_their_own() {
    let paused = reported(false, |vm| vm["status"]["conditions"][0]["reason"] = json!("Paused"));
    assert_eq!(short(&derive(&paused, &cluster(|_, _| ()))), "Paused false Ready=False Paused");
    let wanted = reported(false, |vm| {
        vm["status"]["conditions"][0]["reason"] = json!("Paused");
        vm["spec"]["vm"]["paused"] = json!(true);
    });
    assert_eq!(short(&derive(&wanted, &cluster(|_, _| ()))), "Paused false Ready=True Paused");
    let not_yet = reported(true, |vm| vm["spec"]["vm"]["paused"] = json!(true));
    assert_eq!(short(&derive(&not_yet, &cluster(|_, _| ()))), "Running true Ready=False Pausing");

    // The runner has not read yet what the spec wants now, so nobody has acted by hand.
    let unread = |is_up: bool, wants_pause: bool| {
        reported(is_up, |vm| {
            if !is_up {
                vm["status"]["conditions"][0]["reason"] = json!("Paused");
            }
            let paused = json!({ "type": "Ready", "status": "True", "reason": "Paused", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z" });
            vm["status"]["conditions"].as_array_mut().unwrap().push(paused);
            vm["status"]["podUid"] = json!("Pod-apple");
            vm["status"]["configDigest"] = json!("old");
            vm["spec"]["vm"]["paused"] = json!(wants_pause);
        })
    };
    let goes_on = derive(&unread(false, false), &cluster(|_, _| ()));
    assert_eq!(short(&goes_on), "Paused false Ready=False Resuming");
    let pauses = derive(&unread(true, true), &cluster(|_, _| ()));
    assert_eq!(short(&pauses), "Running true Ready=False Pausing");
    assert!(pauses.to_string().contains("the runner pauses the guest next"), "{pauses}");

    let creating = |scheduled: &str, reason: &str| {
        pod(json!({
            "phase": "Pending",
            "conditions": [{ "type": "PodScheduled", "status": "True", "lastTransitionTime": scheduled }],
            "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": reason } } }],
        }))
    };
    let vm = vm(|_| ());
    let late = creating("2027-01-15T07:58:00Z", "ContainerCreating");
    assert_eq!(short(&derive(&vm, &late)), "Starting false Ready=False StartDelayed");
    let soon = creating("2027-01-15T07:58:10Z", "ContainerCreating");
    assert_eq!(short(&derive(&vm, &soon)), "Starting false Ready=False Starting");
    let again = plan(&vm, &soon, Some(&rendered(&vm, &soon))).requeue_after;
    assert_eq!(again, Some(std::time::Duration::from_secs(10)));
    assert_eq!(plan(&vm, &late, Some(&rendered(&vm, &late))).requeue_after, None);
}

/// A cause that was looked up takes the place of the problem; how it goes on stays, and only messages change, unless the VM is being deleted.
#[test]
fn a_cause_takes_the_place_of_the_problem_in_the_messages() {
    let observed = cluster(|kind, object| {
        if kind == "Pod" {
            object["status"] = json!({ "phase": "Failed", "reason": "Evicted", "message": "no memory" });
        }
    });
    let draft_of = |vm: &VirtualMachine| {
        let rendered = rendered(vm, &observed);
        let (plan, outcome) = (plan(vm, &observed, Some(&rendered)), ExecutionResult::default());
        let (rendered, source) = (Ok(rendered.as_slice()), UsedTemplates::default());
        draft(&Reconciled { vm, observed: &observed, plan: &plan, rendered, outcome: &outcome, source })
    };
    let of = |status: &VirtualMachineStatus, type_: &str| {
        let condition = conditions::find(&status.conditions, type_).cloned();
        condition.map(|it| (it.status, it.reason, it.message))
    };
    let found = |message: &str| LookedUp { message: message.into(), what_to_do: "buy one".into() };
    let running = vm(|_| ());
    let known = draft_of(&running);
    let (before, after) = (known.status.clone(), known.explained(&running, found("the node is full"), observed.now));
    let (status, reason, message) = of(&before, READY).unwrap();
    let tail = message.strip_prefix("Evicted: no memory").unwrap();
    assert!(tail.starts_with("; try 2 is at "), "{message}");
    assert_eq!(of(&after, READY), Some((status, reason, format!("the node is full -> buy one{tail}"))));
    let without = |mut status: VirtualMachineStatus| {
        status.conditions.retain(|condition| condition.type_ != READY);
        status.problem = None;
        json!(status)
    };
    assert_eq!(without(before), without(after));

    let refused = ExecutionResult {
        failure: Some(Problem::new(Reason::ApplyFailed, "apply Pod apple: no")),
        ..ExecutionResult::default()
    };
    let plan = plan(&running, &nothing(), None);
    let (rendered, source, nothing) = (Ok(&[][..]), UsedTemplates::default(), nothing());
    let stalled =
        draft(&Reconciled { vm: &running, observed: &nothing, plan: &plan, rendered, outcome: &refused, source });
    let stalled = json!(stalled.explained(&running, found("the namespace is full"), nothing.now));
    assert_eq!(ready(&stalled), ("ApplyFailed".into(), "the namespace is full -> buy one".into()));
    assert_stalled(&stalled);

    let deleted = vm(|vm| vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:00:00Z"));
    let deleted_status = json!(draft_of(&deleted).explained(&deleted, found("a finalizer keeps it"), nothing.now));
    assert_eq!(ready(&deleted_status), ("BeingDeleted".into(), "a finalizer keeps it -> buy one".into()));
    let problem = json!({ "reason": "BeingDeleted", "message": "a finalizer keeps it", "whatToDo": "buy one" });
    assert_eq!(deleted_status["problem"], problem);
}

#[test]
fn messages_stay_as_they_were_while_the_reason_does() {
    let draft_of = |vm: &VirtualMachine| {
        let (plan, outcome, observed) = (plan(vm, &nothing(), Some(&[])), ExecutionResult::default(), nothing());
        let (rendered, source) = (Ok(&[][..]), UsedTemplates::default());
        let draft = draft(&Reconciled { vm, observed: &observed, plan: &plan, rendered, outcome: &outcome, source });
        ready(&json!(draft.as_it_was(vm)))
    };
    for (reason, message) in [("Starting", "no node can take it"), ("ImagePullFailed", "waiting for the Pod to start")]
    {
        let vm = vm(|vm| {
            vm["status"] = json!({ "conditions": [{ "type": READY, "status": "False", "reason": reason,
                "message": "no node can take it", "lastTransitionTime": "2027-01-15T07:00:00Z" }] });
        });
        assert_eq!(draft_of(&vm), ("Starting".into(), message.into()), "{reason}");
    }
}
