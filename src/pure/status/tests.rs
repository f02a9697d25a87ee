mod claims;
mod generation;
mod pods;
mod reports;
#[cfg(feature = "schema")]
mod schema;
mod words;

use serde_json::json;

use super::{events::events, *};
use crate::{
    api::{
        conditions::READY,
        reasons::{Effect, Event},
    },
    config::ReconcilerConfig,
    object::ObjectKey,
    ownership::{STATUS_MANAGER, status_differs},
    plan::{Action, plan},
    render::{RandomInput, TemplateSet, render},
    test_support::{allowing, applied, nothing, rendered, set_by, stopped, stored, vm},
};

fn cluster(edit: impl FnMut(&str, &mut Value)) -> Observed {
    applied(&rendered(&vm(|_| ()), &nothing()), edit)
}

fn pod(pod_status: Value) -> Observed {
    cluster(move |kind, object| {
        if kind == "Pod" {
            object["status"] = pod_status.clone();
        }
    })
}

/// The status and the events of a reconcile whose actions all succeeded (`is_done`) or all failed.
fn reconcile(vm: &VirtualMachine, observed: &Observed, is_done: bool) -> (VirtualMachineStatus, Vec<Event>) {
    reconcile_with(vm, observed, is_done, ExecutionResult::default())
}

fn reconcile_with(
    vm: &VirtualMachine,
    observed: &Observed,
    is_done: bool,
    outcome: ExecutionResult,
) -> (VirtualMachineStatus, Vec<Event>) {
    let rendered = rendered(vm, observed);
    let plan = plan(vm, observed, Some(&rendered));
    let source = UsedTemplates::default();
    let reconciled = Reconciled { vm, observed, plan: &plan, rendered: Ok(&rendered), outcome: &outcome, source };
    let done: Vec<&Action> = plan.steps.iter().flatten().filter(|_| is_done).collect();
    let wanted = status(&reconciled);
    let events = events(&reconciled, &wanted, &done);
    (wanted, events)
}

fn derive(vm: &VirtualMachine, observed: &Observed) -> Value {
    json!(reconcile(vm, observed, false).0)
}

/// Phase, ready, and the condition Ready with its reason.
fn short(status: &Value) -> String {
    let conditions = status["conditions"].as_array().unwrap();
    let ready = conditions.iter().find(|condition| condition["type"] == READY).unwrap();
    format!("{} {} Ready={} {}", status["phase"], status["ready"], ready["status"], ready["reason"]).replace('"', "")
}

/// Stalled is there, with what Ready says, if Ready has a reason that time does not mend.
fn assert_stalled(status: &Value) {
    let conditions = status["conditions"].as_array().unwrap();
    let of = |type_: &str| conditions.iter().find(|condition| condition["type"] == type_);
    let ready = of(READY).unwrap();
    let reason = Reason::parse(ready["reason"].as_str().unwrap()).unwrap();
    let expected =
        (ready["status"] == "False" && reason.is_stalled()).then(|| json!(["True", ready["reason"], ready["message"]]));
    let found = of(STALLED).map(|stalled| json!([stalled["status"], stalled["reason"], stalled["message"]]));
    assert_eq!(found, expected, "{ready}");
}

fn reported(running: bool, edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    vm(|vm| {
        vm["status"] = json!({ "conditions": [{
            "type": RUNNING, "status": if running { "True" } else { "False" }, "reason": "Started", "message": "",
            "lastTransitionTime": "2027-01-15T07:00:00Z",
        }] });
        edit(vm);
    })
}

#[test]
fn the_table() {
    let down = |vm: &mut Value| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        set_by("Update", vm);
    };
    for (vm, observed, expected) in [
        (stopped(), applied(&[], |_, _| ()), "Stopped false Ready=True StoppedAsRequested"),
        (vm(|_| ()), nothing(), "Starting false Ready=False Starting"),
        (vm(|_| ()), cluster(|_, _| ()), "Starting false Ready=False Starting"),
        (reported(true, |_| ()), cluster(|_, _| ()), "Running true Ready=True Running"),
        (reported(true, down), cluster(|_, _| ()), "Stopping true Ready=False Stopping"),
        (reported(false, down), cluster(|_, _| ()), "Stopping false Ready=False Stopping"),
        (reported(true, |_| ()), nothing(), "Starting false Ready=False Starting"),
    ] {
        assert_eq!(short(&derive(&vm, &observed)), expected);
    }
}

#[test]
fn a_spec_that_can_not_be_read_is_named_and_its_vm_is_not_ready() {
    let reason_of = |state: &str, observed: &Observed| {
        let vm = stored(|vm| {
            vm["spec"]["vm"]["state"] = json!(state);
            vm["spec"]["vm"]["maximumRam"] = json!("16Ei");
            vm["status"] = json!(reported(true, |_| ()).status);
            set_by("Update", vm);
        });
        let error = TemplateError::refused("(spec)", "");
        let plan = plan(&vm, observed, None);
        let outcome = ExecutionResult::default();
        let source = UsedTemplates::default();
        let reconciled =
            Reconciled { vm: &vm, observed, plan: &plan, rendered: Err(&error), outcome: &outcome, source };
        let status = json!(status(&reconciled));
        let valid = conditions::find(
            &serde_json::from_value::<Vec<Condition>>(status["conditions"].clone()).unwrap(),
            TEMPLATES_VALID,
        )
        .unwrap()
        .clone();
        assert!(valid.reason == "InvalidSpec" && valid.message.starts_with("spec.vm.maximumRam: "), "{valid:?}");
        short(&status)
    };
    let up = pod(json!({ "phase": "Running" }));
    assert_eq!(reason_of("Running", &up), "Running true Ready=False InvalidSpec");
    assert_eq!(reason_of("Stopped", &up), "Stopping true Ready=False Stopping");
    assert_eq!(reason_of("Stopped", &nothing()), "Stopped false Ready=False InvalidSpec");
    assert_eq!(reason_of("Running", &nothing()), "Failed false Ready=False InvalidSpec");
}

#[test]
fn the_pod_of_a_statefulset_is_the_vms_pod() {
    let renamed = |owner: Value| {
        cluster(move |kind, object| {
            if kind == "Pod" {
                object["metadata"]["name"] = json!("apple-0");
                object["metadata"]["ownerReferences"] = json!([owner]);
            }
        })
    };
    let set =
        json!({ "apiVersion": "apps/v1", "kind": "StatefulSet", "name": "apple", "uid": "a-set", "controller": true });
    let vm = json!({ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine", "name": "apple", "uid": "apple-uid" });
    // Templates may name the Pod otherwise.
    for owner in [set, vm] {
        assert_eq!(short(&derive(&reported(true, |_| ()), &renamed(owner))), "Running true Ready=True Running");
    }
}

#[test]
fn the_reason_comes_from_the_pod() {
    for (pod_status, expected) in [
        (
            json!({ "conditions": [{ "type": "PodScheduled", "status": "False", "message": "0/1 nodes are available" }] }),
            "Starting false Ready=False Unschedulable",
        ),
        (
            json!({ "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": "ImagePullBackOff" } } }] }),
            "Failed false Ready=False ImagePullFailed",
        ),
        (
            json!({ "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": "InvalidImageName" } } }] }),
            "Failed false Ready=False InvalidImageName",
        ),
        (
            json!({ "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": "CrashLoopBackOff" } },
                "lastState": { "terminated": { "exitCode": 1, "message": "qemu: no such machine" } } }] }),
            "Failed false Ready=False RunnerFailed",
        ),
        (
            json!({ "initContainerStatuses": [{ "name": "import", "state": { "waiting": { "reason": "CrashLoopBackOff" } },
                "lastState": { "terminated": { "exitCode": 22, "message": "curl: 404" } } }] }),
            "Failed false Ready=False ContainerFailed",
        ),
        (
            json!({ "initContainerStatuses": [{ "name": "agent", "state": { "terminated": { "exitCode": 1 } } }] }),
            "Failed false Ready=False RunnerFailed",
        ),
        (
            json!({ "containerStatuses": [{ "state": { "waiting": { "reason": "ContainerCreating" } } }] }),
            "Starting false Ready=False Starting",
        ),
        (
            json!({ "phase": "Failed", "reason": "Evicted", "message": "disk pressure" }),
            "Failed false Ready=False PodFailed",
        ),
        (json!({ "phase": "Failed" }), "Failed false Ready=False PodFailed"),
        (json!({ "phase": "Succeeded" }), "Starting false Ready=False PodSucceeded"),
        // The guest shuts itself down repeatedly.
        (
            json!({ "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": "CrashLoopBackOff" } },
                "lastState": { "terminated": { "exitCode": 0, "reason": "Completed" } } }] }),
            "Starting false Ready=False Starting",
        ),
        (
            json!({ "containerStatuses": [
                { "name": "vm-runner", "state": { "waiting": { "reason": "CrashLoopBackOff" } }, "lastState": { "terminated": { "exitCode": 0 } } },
                { "name": "exporter", "state": { "waiting": { "reason": "ImagePullBackOff" } } },
            ] }),
            "Failed false Ready=False ImagePullFailed",
        ),
        (
            json!({ "containerStatuses": [{ "name": "exporter", "state": { "waiting": { "reason": "CrashLoopBackOff" } },
                "lastState": { "terminated": { "exitCode": 0, "reason": "Completed" } } }] }),
            "Failed false Ready=False ContainerWaiting",
        ),
    ] {
        let observed = pod(pod_status.clone());
        let derived = derive(&vm(|_| ()), &observed);
        assert_eq!(short(&derived), expected, "{pod_status}");
        assert_stalled(&derived);
        if pod_status["phase"].is_null() {
            // The last report of a runner that was killed says that the guest runs.
            if pod_status["containerStatuses"][0]["name"] == "vm-runner" {
                assert_eq!(short(&derive(&reported(true, |_| ()), &observed)), expected, "{pod_status}");
            }
        }
    }
}

#[test]
fn the_message_says_how_the_runner_ended() {
    let said = |pod_status: Value| {
        let status = derive(&vm(|_| ()), &pod(pod_status));
        let ready = status["conditions"].as_array().unwrap().iter().find(|item| item["type"] == READY).unwrap();
        ready["message"].as_str().unwrap().split("; try ").next().unwrap().to_owned()
    };
    let killed = json!({ "exitCode": 137, "reason": "OOMKilled", "message": "guest: up\n" });
    let failed = json!({ "exitCode": 1, "reason": "Error" });
    let runner = |state: &str, ended: &Value| json!([{ "name": "vm-runner", state: { "terminated": ended } }]);
    for (pod_status, expected) in [
        (
            json!({ "containerStatuses": runner("state", &killed) }),
            "vm-runner ended with exit code 137 (OOMKilled): guest: up",
        ),
        (json!({ "containerStatuses": runner("lastState", &failed) }), "vm-runner ended with exit code 1"),
        (
            json!({ "phase": "Failed", "containerStatuses": runner("state", &killed) }),
            "vm-runner ended with exit code 137 (OOMKilled): guest: up",
        ),
        (
            json!({ "containerStatuses": runner("state", &json!({ "exitCode": 22, "reason": "Error", "message": "404\n404\n404\ngave up\n" })) }),
            "vm-runner ended with exit code 22: 404\ngave up",
        ),
        (json!({ "phase": "Failed", "reason": "Evicted", "message": "disk pressure" }), "Evicted: disk pressure"),
        (json!({ "phase": "Failed", "message": "Pod was rejected" }), "Pod was rejected"),
        (json!({ "phase": "Failed" }), "its containers have ended"),
    ] {
        assert_eq!(said(pod_status), expected);
    }
}

#[test]
fn the_kubelets_message_about_an_image_is_kept() {
    let pull = |reason: &str, message: &str| {
        let state = json!({ "waiting": { "reason": reason, "message": message } });
        pod(json!({ "containerStatuses": [{ "name": "vm-runner", "state": state }] }))
    };
    let ready = |status: &Value| {
        status["conditions"].as_array().unwrap().iter().find(|item| item["type"] == READY).unwrap().clone()
    };
    let mut apple = vm(|_| ());
    let first = derive(&apple, &pull("ErrImagePull", "not found"));
    assert_eq!(ready(&first)["message"], "vm-runner: ErrImagePull: not found");
    apple.status = serde_json::from_value(first.clone()).unwrap();
    let then = derive(&apple, &pull("ImagePullBackOff", "Back-off pulling image"));
    assert_eq!(ready(&then), ready(&first));
    let other = derive(&apple, &pull("ErrImagePull", "denied"));
    assert_eq!(ready(&other)["message"], "vm-runner: ErrImagePull: denied");
}

#[test]
fn an_overdue_pod_is_reported_with_its_node_or_its_finalizers() {
    let deleting = cluster(|kind, object| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:00:00Z");
            object["spec"]["nodeName"] = json!("node-1");
        }
    });
    for vm in [vm(|_| ()), stopped()] {
        for (node, reason, message) in [
            (
                NodeState::NotAnswering,
                "NodeNotResponding",
                "node node-1 does not answer; the guest may still run there",
            ),
            (NodeState::Answering, "PodNotEnded", "node node-1 answers and has not ended it yet"),
            (NodeState::Removed, "PodNotEnded", "node node-1 does not exist any more"),
            (NodeState::NotKnown, "PodNotEnded", "see kubectl get node node-1"),
        ] {
            let outcome = ExecutionResult { node, ..ExecutionResult::default() };
            let status = json!(reconcile_with(&vm, &deleting, false, outcome).0);
            assert!(short(&status).ends_with(&format!("false Ready=False {reason}")), "{status}");
            let text = status.to_string();
            assert!(text.contains(message), "{text}");
            assert_eq!(text.contains("taint"), node == NodeState::NotAnswering, "{text}");
        }
    }
    let kept = cluster(|kind, object| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:00:00Z");
        }
    });
    for vm in [vm(|_| ()), stopped()] {
        let status = derive(&vm, &kept);
        assert!(short(&status).ends_with("false Ready=False PodNotRemoved"));
        assert!(status.to_string().contains("see its metadata.finalizers") && !status.to_string().contains("taint"));
    }
}

#[test]
fn the_report_of_a_killed_runner_does_not_hold() {
    let mut vm = reported(true, |vm| {
        vm["status"]["cpus"] = json!(2);
        let said = &mut vm["status"]["conditions"];
        for type_ in [BOOTED, CONSOLE_CONNECTED] {
            let mut other = said[0].clone();
            other["type"] = json!(type_);
            said.as_array_mut().unwrap().push(other);
        }
    });
    let running = |vm: &VirtualMachine, pod_status: Value| {
        let status = derive(vm, &pod(pod_status));
        let conditions = status["conditions"].as_array().unwrap().clone();
        let taken: Vec<_> = conditions.iter().filter(|item| item["message"] == "no guest is running").collect();
        (taken.iter().map(|item| string(&item["type"])).collect::<Vec<_>>().join(" "), status["cpus"].clone())
    };
    let container = |state: Value, last: Value| json!({ "containerStatuses": [{ "name": "vm-runner", "state": state, "lastState": last }] });
    let ended = |at: &str| json!({ "terminated": { "exitCode": 137, "finishedAt": at } });
    let waiting = json!({ "waiting": { "reason": "CrashLoopBackOff" } });
    let (before, after) = ("2027-01-15T06:59:00Z", "2027-01-15T07:00:01Z");
    let all = ("Booted ConsoleConnected Running".to_owned(), json!(0));
    let none = (String::new(), Value::Null);
    assert_eq!(running(&vm, container(ended(after), Value::Null)), all);
    assert_eq!(running(&vm, container(waiting.clone(), ended(after))), all);
    assert_eq!(running(&vm, json!({ "phase": "Failed" })), all);
    // The runner has reported since, and the kubelet has not yet.
    assert_eq!(running(&vm, container(ended(before), Value::Null)), none);
    assert_eq!(running(&vm, container(waiting, ended(before))), none);
    assert_eq!(running(&vm, container(json!({ "waiting": { "reason": "ContainerCreating" } }), Value::Null)), none);
    assert_eq!(running(&vm, container(json!({ "running": {} }), ended(after))), none);
    // The report that the guest shut down still holds: the VM stays down.
    let said = &mut vm.status.as_mut().unwrap().conditions[0];
    (said.status, said.reason) = ("False".into(), "GuestShutdown".into());
    assert!(!running(&vm, json!({ "phase": "Failed" })).0.contains("Running"));
}

#[test]
fn the_pod_of_a_deleted_vm_is_reported() {
    let former = |deleting: Option<&'static str>| {
        cluster(move |kind, object| {
            if kind == "Pod" {
                object["metadata"]["ownerReferences"][0]["uid"] = json!("former-uid");
                object["metadata"]["deletionTimestamp"] = json!(deleting);
                object["spec"]["nodeName"] = json!("node-1");
            }
        })
    };
    for (vm, deleting, expected) in [
        (stopped(), None, "Stopping false Ready=False Stopping"),
        (stopped(), Some("2027-01-16T07:00:00Z"), "Stopping false Ready=False Stopping"),
        (stopped(), Some("2027-01-15T07:00:00Z"), "Stopping false Ready=False PodNotEnded"),
        (vm(|_| ()), Some("2027-01-16T07:00:00Z"), "Stopping false Ready=False WaitingForDeletion"),
        (vm(|_| ()), Some("2027-01-15T07:00:00Z"), "Stopping false Ready=False PodNotEnded"),
    ] {
        assert_eq!(short(&derive(&vm, &former(deleting))), expected, "{deleting:?}");
    }
}

#[test]
fn a_node_that_does_not_answer_is_reported_at_once() {
    let pod_with = |ready: &str, reason: &str, containers: &str, deleting: bool| {
        let conditions = json!([
            { "type": "Ready", "status": ready, "reason": reason },
            { "type": "ContainersReady", "status": containers },
        ]);
        cluster(move |kind, object| {
            if kind == "Pod" {
                object["spec"]["nodeName"] = json!("node-1");
                object["status"]["conditions"] = conditions.clone();
                if deleting {
                    object["metadata"]["deletionTimestamp"] = json!("2027-01-16T07:00:00Z");
                }
            }
        })
    };
    let up = reported(true, |_| ());
    let down = reported(true, |vm| {
        vm["spec"]["vm"]["state"] = json!("Stopped");
        set_by("Update", vm);
    });
    for (vm, observed, expected) in [
        (&up, pod_with("True", "", "True", false), "Running true Ready=True Running"),
        (&up, pod_with("False", "", "True", false), "Unknown false Ready=False NodeNotResponding"),
        // The cluster deletes the Pod, but its node does not answer.
        (&up, pod_with("False", "", "True", true), "Stopping false Ready=False NodeNotResponding"),
        (&down, pod_with("False", "", "True", true), "Stopping false Ready=False NodeNotResponding"),
        // With a readiness gate or a failed probe, the node answers.
        (&up, pod_with("False", "ReadinessGatesNotReady", "True", false), "Running true Ready=True Running"),
        (&up, pod_with("False", "ContainersNotReady", "False", false), "Running true Ready=True Running"),
    ] {
        let status = derive(vm, &observed);
        assert_eq!(short(&status), expected);
        let conditions = status["conditions"].as_array().unwrap();
        let message = conditions.iter().find(|item| item["type"] == READY).unwrap()["message"].as_str().unwrap();
        assert_eq!(
            message.starts_with("node node-1, on which Pod apple runs, does not answer; "),
            expected.contains("Node")
        );
    }
}

/// The VM after its status was written: the conditions of `status` are the manager's, and all others are as they were.
fn written(vm: &VirtualMachine, status: &VirtualMachineStatus) -> VirtualMachine {
    let mut vm = vm.clone();
    let before = vm.status.take().unwrap_or_default();
    let mut conditions = status.conditions.clone();
    let is_new = |type_: &str| status.conditions.iter().all(|condition| condition.type_ != type_);
    conditions.extend(before.conditions.iter().filter(|condition| is_new(&condition.type_)).cloned());
    let owned: serde_json::Map<String, Value> = status
        .conditions
        .iter()
        .map(|condition| {
            (format!("k:{}", json!({ "type": condition.type_ })), json!({ "f:status": {}, "f:message": {} }))
        })
        .collect();
    let fields = json!({ "f:status": { "f:conditions": owned } });
    let entry = json!([{ "manager": STATUS_MANAGER, "operation": "Apply", "fieldsV1": fields }]);
    vm.metadata.managed_fields = serde_json::from_value(entry).unwrap();
    let pod_uid = before.pod_uid.clone();
    let runner = RunnerStatus { cpus: before.runner.cpus, ..status.runner.clone() };
    vm.status = Some(VirtualMachineStatus { conditions, pod_uid, runner, ..status.clone() });
    vm
}

#[test]
fn the_guests_conditions_are_unknown_while_its_node_does_not_answer() {
    let node = |ready: &'static str| {
        let conditions = json!([{ "type": "Ready", "status": ready }, { "type": "ContainersReady", "status": "True" }]);
        pod(json!({ "conditions": conditions }))
    };
    let up = reported(true, |vm| {
        vm["status"]["podUid"] = json!("Pod-apple");
        vm["status"]["cpus"] = json!(2);
        let said = vm["status"]["conditions"].as_array_mut().unwrap();
        let other = |type_: &str, status: &str| {
            let mut other = said[0].clone();
            (other["type"], other["status"]) = (json!(type_), json!(status));
            other
        };
        let others = [other(BOOTED, "True"), other(CONSOLE_CONNECTED, "True"), other(USER_LOGGED_IN, "False")];
        said.extend(others);
    });
    let guests = |status: &VirtualMachineStatus| {
        let of_guest =
            status.conditions.iter().filter(|condition| condition.type_ != READY && condition.type_ != TEMPLATES_VALID);
        let texts = of_guest.map(|condition| format!("{}={} {}", condition.type_, condition.status, condition.reason));
        texts.filter(|text| !["StorageReady", "Stalled"].iter().any(|it| text.starts_with(it))).collect::<Vec<_>>()
    };
    let (answering, silent) = (node("True"), node("False"));
    assert_eq!(guests(&reconcile(&up, &answering, false).0), [""; 0], "the runner's own");

    let (first, _) = reconcile(&up, &silent, false);
    let unknown = ["Booted=Unknown Unknown", "ConsoleConnected=Unknown Unknown", "Running=Unknown Unknown"];
    assert_eq!(guests(&first), unknown);
    assert_eq!((first.runner.cpus, first.phase.as_deref(), first.ready), (None, Some("Unknown"), Some(false)));
    let lost = written(&up, &first);
    let (again, _) = reconcile(&lost, &silent, false);
    assert_eq!(guests(&again), unknown, "the manager's own by now");
    assert!(!status_differs(&lost, &again));

    // The node answers again, and the runner has nothing new to report.
    let (back, events) = reconcile(&lost, &answering, false);
    assert_eq!(
        guests(&back),
        ["Booted=True GuestAgentAnswered", "ConsoleConnected=True Connected", "Running=True Started"]
    );
    assert_eq!(short(&json!(back)), "Running true Ready=True Running");
    assert_eq!((back.runner.cpus, events), (None, vec![]));
    let returned = written(&lost, &back);
    assert_eq!(guests(&reconcile(&returned, &answering, false).0), guests(&back), "until the runner writes");
    // A node that is lost again.
    assert_eq!(guests(&reconcile(&returned, &silent, false).0), unknown);
    // The Pod is gone, or is another one.
    let mut returned = returned;
    returned.status.as_mut().unwrap().claims.clear();
    for observed in [
        nothing(),
        cluster(|kind, object| {
            if kind == "Pod" {
                object["metadata"]["uid"] = json!("another")
            }
        }),
    ] {
        let (gone, _) = reconcile(&returned, &observed, false);
        assert_eq!(
            guests(&gone),
            [
                "Booted=False Starting",
                "ConsoleConnected=False Starting",
                "Running=False Starting",
                "UserLoggedIn=False Starting"
            ]
        );
        assert_eq!(gone.runner.cpus, Some(0));
    }
}

#[test]
fn the_next_try_of_a_container_is_in_the_message() {
    let message = |restarts: u32, state: Value| {
        let ended = json!({ "terminated": { "exitCode": 1, "finishedAt": "2027-01-15T07:59:50Z" } });
        let container = json!({ "name": "vm-runner", "restartCount": restarts, "state": state, "lastState": ended });
        let status = derive(&vm(|_| ()), &pod(json!({ "containerStatuses": [container] })));
        assert_eq!(short(&status), "Failed false Ready=False RunnerFailed");
        let conditions = status["conditions"].as_array().unwrap();
        string(&conditions.iter().find(|item| item["type"] == READY).unwrap()["message"])
    };
    let paused = json!({ "waiting": { "reason": "CrashLoopBackOff" } });
    for (restarts, next) in [
        (1, "try 3 is at about 2027-01-15T08:00:00Z"),
        (3, "try 5 is at about 2027-01-15T08:00:30Z"),
        (u32::MAX, "try 4294967297 is at about 2027-01-15T08:04:50Z"),
    ] {
        let message = message(restarts, paused.clone());
        assert_eq!(message, format!("vm-runner ended with exit code 1; {next}"));
    }
    assert_eq!(message(1, json!({ "running": {} })), "vm-runner ended with exit code 1");
}

#[test]
fn what_happens_to_the_guest_is_an_event() {
    let recorded = |vm: &VirtualMachine, observed: &Observed| {
        let events = reconcile(vm, observed, false).1.into_iter();
        events.map(|event| format!("{}: {}", event.reason, event.note)).collect::<Vec<_>>()
    };
    let with_phase = |phase: &'static str, running: bool, edit: fn(&mut Value)| {
        reported(running, move |vm| {
            vm["status"]["phase"] = json!(phase);
            vm["status"]["observedGeneration"] = json!(3);
            edit(vm);
        })
    };
    let on_node = |kind: &str, object: &mut Value| {
        if kind == "Pod" {
            object["spec"]["nodeName"] = json!("node-1");
        }
    };
    let evicted = cluster(|kind, object| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:14:00Z");
            let target = json!({ "type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drain" });
            object["status"]["conditions"] = json!([target]);
        }
    });
    let there = cluster(on_node);
    let reset = |vm: &mut Value| {
        vm["spec"]["vm"]["resetCount"] = json!(2);
        vm["status"]["resetCount"] = json!(1);
        vm["status"]["observedGeneration"] = json!(2);
    };
    let reboot = |vm: &mut Value| {
        vm["spec"]["vm"]["rebootCount"] = json!(1);
        vm["status"]["observedGeneration"] = json!(2);
    };
    for (vm, observed, expected) in [
        (
            with_phase("Running", true, reboot),
            &there,
            "Reboot: rebootCount was increased to 1: the guest is asked to reboot",
        ),
        (with_phase("Starting", true, |_| ()), &there, "Started: the guest has started on node node-1"),
        (with_phase("Running", true, |_| ()), &there, ""),
        (with_phase("Paused", true, |_| ()), &there, ""),
        (with_phase("Unknown", true, |_| ()), &there, ""),
        (
            with_phase("Running", false, |vm| vm["status"]["conditions"][0]["reason"] = json!("GuestShutdown")),
            &there,
            "GuestRestarts: the guest has shut down; its node starts it again in the same Pod",
        ),
        (with_phase("Running", true, reset), &there, "Reset: resetCount was increased to 2: the guest is reset"),
        (
            with_phase("Running", true, |_| ()),
            &evicted,
            "Evicted: the cluster removes Pod apple: EvictionByEvictionAPI: drain",
        ),
        (with_phase("Stopping", true, |_| ()), &evicted, ""),
    ] {
        assert_eq!(recorded(&vm, observed).join("; "), expected);
    }
}

#[test]
fn a_vm_whose_spec_can_not_be_rendered_is_not_ready() {
    let refused = vm(|vm| vm["spec"]["vm"]["networks"] = json!([{ "tap": {} }, { "pod": {} }]));
    let (config, random) = (allowing(), RandomInput::default());
    let error = render(&refused, &nothing(), &config, &random, &TemplateSet::builtin().unwrap()).unwrap_err();
    for (vm, observed, expected) in [
        (stopped(), nothing(), "Stopped false Ready=False TemplateError"),
        (reported(true, |_| ()), cluster(|_, _| ()), "Running true Ready=False TemplateError"),
        (vm(|_| ()), nothing(), "Failed false Ready=False TemplateError"),
    ] {
        let plan = plan(&vm, &observed, None);
        let (outcome, source) = (ExecutionResult::default(), UsedTemplates::default());
        let reconciled =
            Reconciled { vm: &vm, observed: &observed, plan: &plan, rendered: Err(&error), outcome: &outcome, source };
        let status = status(&reconciled);
        assert_eq!(short(&json!(status)), expected);
        let ready = conditions::find(&status.conditions, READY).unwrap();
        assert_eq!(ready.observed_generation, Some(3));
        assert!(ready.message.contains("take either tap or pod"), "{}", ready.message);
    }
}

/// What runs is not ended by a list that became shorter.
#[test]
fn a_vm_that_is_not_allowed_says_so_and_its_guest_goes_on() {
    let tapped = vm(|vm| vm["spec"]["vm"]["networks"] = json!([{ "tap": { "bridge": "br7" } }]));
    let (config, random) = (ReconcilerConfig::default(), RandomInput::default());
    let error = render(&tapped, &nothing(), &config, &random, &TemplateSet::builtin().unwrap()).unwrap_err();
    assert_eq!(error.vm_field.as_deref(), Some("/spec/vm/networks/0/tap/bridge"));
    for (vm, observed, expected, end) in [
        (
            reported(true, |_| ()),
            cluster(|_, _| ()),
            "Running true Ready=False NotAllowed",
            "it will not be started again",
        ),
        (
            vm(|_| ()),
            nothing(),
            "Failed false Ready=False NotAllowed",
            "networks.bridges in the manager's configuration",
        ),
    ] {
        let plan = plan(&vm, &observed, None);
        assert!(plan.steps.iter().all(Vec::is_empty), "{plan:?}");
        let (outcome, source) = (ExecutionResult::default(), UsedTemplates::default());
        let reconciled =
            Reconciled { vm: &vm, observed: &observed, plan: &plan, rendered: Err(&error), outcome: &outcome, source };
        let status = status(&reconciled);
        assert_eq!(short(&json!(status)), expected);
        let ready = conditions::find(&status.conditions, READY).unwrap();
        assert!(
            ready.message.starts_with("spec.vm.networks[0].tap.bridge: \"br7\" is not allowed here"),
            "{}",
            ready.message
        );
        assert!(ready.message.ends_with(end), "{}", ready.message);
    }
}

#[test]
fn the_same_status_is_not_written_again() {
    let observed = cluster(|_, _| ());
    let first = derive(&vm(|_| ()), &observed);
    let reset = vm(|vm| vm["status"] = first.clone());
    let mut written = reset.clone();
    written.metadata.managed_fields = serde_json::from_value(json!([{
        "manager": STATUS_MANAGER, "operation": "Apply", "fieldsV1": { "f:status": { "f:phase": {} } },
    }]))
    .unwrap();
    assert!(status_differs(&vm(|_| ()), &reconcile(&vm(|_| ()), &observed, false).0));
    assert!(!status_differs(&written, &reconcile(&written, &observed, false).0));
    // A tool has reset managedFields: the API server records nothing until something is applied.
    assert!(status_differs(&reset, &reconcile(&reset, &observed, false).0));
}

#[test]
fn a_field_that_the_manager_no_longer_writes_is_given_up() {
    let observed = cluster(|_, _| ());
    let (wanted, _) = reconcile(&reported(true, |_| ()), &observed, false);
    let mut vm = vm(|vm| vm["status"] = json!(wanted));
    let owned = json!({ "f:status": { "f:phase": {}, "f:cpus": {} } });
    vm.metadata.managed_fields =
        serde_json::from_value(json!([{ "manager": STATUS_MANAGER, "operation": "Apply", "fieldsV1": owned }]))
            .unwrap();
    assert!(status_differs(&vm, &wanted));
}

#[test]
fn object_kinds_are_those_of_rendered_existing_and_unknown_objects() {
    let apple = vm(|_| ());
    let kind = |kind: &str| TypeMeta { api_version: "example.org/v1".into(), kind: kind.into() };
    let object_of = |api_version: &str, kind: &str| {
        let mut object = rendered(&apple, &nothing()).remove(0);
        object.key = ObjectKey { api_version: api_version.into(), kind: kind.into(), ..object.key };
        let value = std::sync::Arc::make_mut(&mut object.value);
        value["apiVersion"] = json!(api_version);
        value["kind"] = json!(kind);
        object
    };
    let object = |kind: &str| object_of("example.org/v1", kind);
    let names = |observed: &Observed, rendered: &[Rendered], unknown: &[TypeMeta]| {
        let kinds = object_kinds(&apple, observed, rendered, unknown);
        kinds.into_iter().map(|kind| kind.kind).collect::<Vec<_>>()
    };
    let orphaned = applied(&[object("Existing")], |_, object| object["metadata"]["ownerReferences"] = json!([]));
    let there = applied(&[object("Existing")], |_, _| ());
    assert_eq!(names(&cluster(|_, _| ()), &rendered(&apple, &nothing()), &[]), [""; 0]);
    assert_eq!(names(&there, &[object("Rendered")], &[kind("Unknown")]), ["Existing", "Rendered", "Unknown"]);
    assert_eq!(names(&orphaned, &[], &[]), [""; 0]);
    let older = applied(&[object_of("example.org/v1beta1", "Rendered")], |_, _| ());
    assert_eq!(object_kinds(&apple, &older, &[object("Rendered")], &[]).len(), 1, "two versions are one");
    let status = json!(object_kinds(&apple, &nothing(), &[object("Rendered")], &[]));
    assert_eq!(status, json!([{ "apiVersion": "example.org/v1", "kind": "Rendered" }]));
}

#[test]
fn the_manager_writes_running_if_no_runner_reports() {
    let has_running =
        |status: &Value| status["conditions"].as_array().unwrap().iter().any(|item| item["type"] == RUNNING);
    assert!(has_running(&derive(&vm(|_| ()), &nothing())), "no Pod exists");
    assert!(has_running(&derive(&vm(|_| ()), &cluster(|_, _| ()))), "the runner has not reported yet");
    assert!(!has_running(&derive(&reported(true, |_| ()), &cluster(|_, _| ()))), "the runner reports");
    assert!(has_running(&derive(&reported(true, |_| ()), &nothing())), "the runner is gone");
}

#[test]
fn events_are_recorded_once() {
    let recorded = |vm: &VirtualMachine, observed: &Observed| {
        let (_, events) = reconcile(vm, observed, true);
        let is_warning = |event: &Event| event.reason.effect() == Effect::Warning;
        let events = events.into_iter().map(|event| format!("{} {}: {}", is_warning(&event), event.reason, event.note));
        events.collect::<Vec<_>>()
    };
    assert_eq!(recorded(&vm(|_| ()), &nothing()), ["false SuccessfulCreate: created Pod apple"]);
    let known = VirtualMachine {
        status: Some(serde_json::from_value(derive(&vm(|_| ()), &cluster(|_, _| ()))).unwrap()),
        ..stopped()
    };
    assert_eq!(recorded(&known, &cluster(|_, _| ())), ["false SuccessfulDelete: deleted Pod apple to stop the VM"]);
    let failing = pod(
        json!({ "containerStatuses": [{ "name": "vm-runner", "state": { "waiting": { "reason": "ImagePullBackOff", "message": "no" } } }] }),
    );
    let message = "true ImagePullFailed: vm-runner: ImagePullBackOff: no";
    assert_eq!(recorded(&vm(|_| ()), &failing), [message]);
    // What is in the status already causes no event.
    let known = derive(&vm(|_| ()), &failing);
    assert_eq!(recorded(&vm(|vm| vm["status"] = known.clone()), &failing), [""; 0]);
}
