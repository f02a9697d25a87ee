mod claims;
mod retry;

use super::*;
use crate::{
    object::VERSION_ANNOTATION,
    render::TemplateSet,
    test_support::{applied, noon, nothing, rendered, set_by, stopped, vm},
};

/// The plan in short: a word for each action and wait.
fn short(plan: &Plan) -> Vec<String> {
    let actions = plan.steps.iter().enumerate().flat_map(|(step, actions)| {
        actions.iter().map(move |action| match action {
            Action::Apply { object, uid } => {
                format!("{step} {} {}", if uid.is_some() { "change" } else { "make" }, object.key)
            }
            Action::Label { key, patch, .. } => format!("{step} label {key} {}", patch["metadata"]),
            Action::Delete { key, reason: DeleteReason::Stop | DeleteReason::NotRendered, .. } => {
                format!("{step} delete {key}")
            }
            Action::Delete { key, reason, grace, .. } => format!("{step} delete {key} {reason:?} {grace:?}"),
        })
    });
    actions.chain(plan.waits.iter().map(|wait| format!("{wait:?}"))).collect()
}

/// A cluster in which all of the machine's objects are there, each changed by `edit`.
fn cluster(vm: &VirtualMachine, edit: impl FnMut(&str, &mut Value)) -> Observed {
    applied(&rendered(vm, &nothing()), edit)
}

fn decide(vm: &VirtualMachine, observed: &Observed) -> Vec<String> {
    short(&plan(vm, observed, Some(&rendered(vm, observed))))
}

fn on_pod(mut edit: impl FnMut(&mut Value)) -> impl FnMut(&str, &mut Value) {
    move |kind, object| {
        if kind == "Pod" {
            edit(object);
        }
    }
}

fn on_node(pod: &mut Value) {
    pod["spec"]["nodeName"] = json!("node-1");
}

const GONE: &str = r#"Gone(ObjectKey { api_version: "v1", kind: "Pod", name: "apple" })"#;

#[test]
fn a_new_machine_gets_what_its_pod_mounts_and_then_its_pod() {
    assert_eq!(
        decide(&vm(|_| ()), &nothing()),
        [
            "0 make ConfigMap apple",
            "0 make PersistentVolumeClaim apple-core-disk",
            "0 make Secret apple-display-secret",
            "0 make PersistentVolumeClaim apple-runner-data",
            "1 make Pod apple",
        ]
    );
}

#[test]
fn a_stopped_machine_gets_everything_but_a_pod() {
    assert_eq!(
        decide(&stopped(), &nothing()),
        [
            "0 make ConfigMap apple",
            "0 make PersistentVolumeClaim apple-core-disk",
            "0 make Secret apple-display-secret",
            "0 make PersistentVolumeClaim apple-runner-data",
        ]
    );
}

#[test]
fn nothing_is_done_when_all_is_as_it_should_be() {
    let vm = vm(|_| ());
    assert_eq!(decide(&vm, &cluster(&vm, |_, _| ())), [""; 0]);
}

#[test]
fn the_power_table() {
    let going = |object: &mut Value| object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:50Z");
    let since = json!({ "type": "Ready", "status": "False", "lastTransitionTime": "2027-01-15T08:00:00Z" });
    let ended = |object: &mut Value| object["status"] = json!({ "phase": "Failed", "conditions": [since] });
    let theirs = |object: &mut Value| {
        object["metadata"]["ownerReferences"] = json!([{ "apiVersion": "v1", "kind": "X", "name": "x", "uid": "x" }])
    };
    let stranger = |object: &mut Value| {
        theirs(object);
        object["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!("someone");
    };
    let running = vm(|_| ());
    for (vm, edit, expected) in [
        (&running, &(|_: &mut Value| ()) as &dyn Fn(&mut Value), &[][..]),
        (&running, &ended, &["0 delete Pod apple Ended None", GONE]),
        (&running, &going, &[GONE]),
        (&running, &theirs, &[GONE]),
        (&running, &stranger, &[r#"NotOurs(ObjectKey { api_version: "v1", kind: "Pod", name: "apple" })"#]),
        (&stopped(), &|_| (), &["0 delete Pod apple", GONE]),
        (&stopped(), &ended, &["0 delete Pod apple", GONE]),
        (&stopped(), &going, &[GONE]),
        (&stopped(), &stranger, &[]),
    ] {
        assert_eq!(decide(vm, &cluster(&running, on_pod(edit))), expected);
    }
}

/// A machine whose guest has shut itself down, as the runner reports it.
fn shut_down(edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    vm(|vm| {
        vm["spec"]["guestShutdownStops"] = json!(true);
        vm["status"] = json!({ "podUid": "Pod-apple", "conditions": [{
            "type": "Running", "status": "False", "reason": "GuestShutdown", "message": "",
            "lastTransitionTime": "2027-01-15T07:30:00Z",
        }] });
        edit(vm);
    })
}

#[test]
fn a_guest_that_shut_itself_down_is_remembered_before_its_pod_goes() {
    let first = shut_down(|_| ());
    let observed = cluster(&first, |_, _| ());
    let plan = plan(&first, &observed, Some(&rendered(&first, &observed)));
    assert_eq!(short(&plan), [""; 0]);
    let halted = plan.power.halted.unwrap();
    let second = shut_down(|vm| vm["status"]["halted"] = json!(halted));
    assert_eq!(decide(&second, &observed), ["0 delete Pod apple", GONE]);
    assert!(!decide(&second, &nothing()).iter().any(|action| action.contains("Pod apple")), "it stays down");
    let restarted = shut_down(|vm| {
        vm["status"]["halted"] = json!(halted);
        vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "now" });
    });
    assert!(decide(&restarted, &nothing()).contains(&"1 make Pod apple".to_owned()));
}

#[test]
fn a_restart_replaces_the_pod_once() {
    let asked =
        |when: &'static str| vm(move |vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: when }));
    let before = cluster(&vm(|_| ()), |_, _| ());
    assert_eq!(decide(&asked("monday"), &before), ["0 delete Pod apple Restart None", GONE]);
    let plan = plan(&asked("monday"), &nothing(), Some(&rendered(&asked("monday"), &nothing())));
    let made = plan.steps.iter().flatten().find_map(|action| match action {
        Action::Apply { object, .. } if object.key.is_pod() => Some(object.value["metadata"]["annotations"].clone()),
        _ => None,
    });
    let made = made.unwrap();
    assert_eq!(made[RESTARTED_ANNOTATION], "monday");
    let after = cluster(&vm(|_| ()), on_pod(move |pod| pod["metadata"]["annotations"] = made.clone()));
    assert_eq!(decide(&asked("monday"), &after), [""; 0]);
    assert_eq!(decide(&vm(|_| ()), &after), [""; 0], "the annotation was taken away");
    assert_eq!(decide(&asked("tuesday"), &after), ["0 delete Pod apple Restart None", GONE]);
}

#[test]
fn a_forced_stop_shortens_the_grace_of_that_pod_only() {
    let forced = |vm: &mut Value, uid: &str| vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: uid });
    let down = |uid: &'static str| {
        vm(move |vm| {
            vm["spec"]["vm"]["state"] = json!("Stopped");
            set_by("Update", vm);
            forced(vm, uid);
        })
    };
    let going = |since: i64, grace: i64| {
        cluster(
            &vm(|_| ()),
            on_pod(move |pod| {
                let end = noon() + SignedDuration::from_secs(grace - since);
                pod["metadata"]["deletionTimestamp"] = json!(end.to_string());
                pod["metadata"]["deletionGracePeriodSeconds"] = json!(grace);
            }),
        )
    };
    let alive = cluster(&vm(|_| ()), |_, _| ());
    assert_eq!(decide(&down("Pod-apple"), &alive), ["0 delete Pod apple Force Some(1)", GONE]);
    assert_eq!(decide(&down("Pod-apple"), &going(0, 905)), ["0 delete Pod apple Force Some(1)", GONE]);
    assert_eq!(decide(&down("Pod-apple"), &going(300, 905)), ["0 delete Pod apple Force Some(301)", GONE]);
    assert_eq!(decide(&down("Pod-apple"), &going(300, 301)), [GONE], "counted from the first request");
    let anew = going(1, 302);
    assert_eq!(decide(&down("Pod-apple"), &anew), ["0 delete Pod apple Force Some(2)", GONE], "counted from the last");
    assert_eq!(decide(&down("Pod-apple"), &going(0, 2)), [GONE]);
    assert_eq!(decide(&down("another"), &going(0, 905)), [GONE]);
    assert_eq!(decide(&vm(|vm| forced(vm, "Pod-apple")), &alive), [""; 0], "it should run");
}

#[test]
fn a_pod_that_should_be_gone_is_waited_for_and_said() {
    let going_with = |end: &'static str, edit: fn(&mut Value)| {
        let going = move |pod: &mut Value| {
            pod["metadata"]["deletionTimestamp"] = json!(end);
            edit(pod);
        };
        cluster(&vm(|_| ()), on_pod(going))
    };
    let going = |end| going_with(end, on_node);
    let plan_of = |observed: &Observed| plan(&stopped(), observed, Some(&rendered(&stopped(), observed)));
    let early = plan_of(&going("2027-01-15T07:59:40Z"));
    assert_eq!((short(&early), early.requeue_after), (vec![GONE.to_owned()], Some(Duration::from_secs(10))));
    let late = plan_of(&going("2027-01-15T07:59:30Z"));
    assert_eq!((short(&late), late.requeue_after), (vec![GONE.replace("Gone", "NodeNotResponding")], None));
    // Its kubelet may have started again what has ended, and not have said so.
    let ended = going_with("2027-01-15T07:59:30Z", |pod| {
        on_node(pod);
        pod["status"]["containerStatuses"] = json!([{ "state": { "terminated": { "exitCode": 0 } } }]);
    });
    assert_eq!(short(&plan_of(&ended)), [GONE.replace("Gone", "NodeNotResponding")]);
    // Nothing runs in it: it hangs on something else than its node.
    for edit in [
        |_: &mut Value| (),
        |pod: &mut Value| {
            on_node(pod);
            pod["status"]["phase"] = json!("Failed");
        },
    ] {
        assert_eq!(short(&plan_of(&going_with("2027-01-15T07:59:30Z", edit))), [GONE.replace("Gone", "NotRemoved")]);
    }
    let put_back = plan_of(&going("2027-01-16T07:59:40Z"));
    assert_eq!((short(&put_back), put_back.requeue_after), (vec![GONE.to_owned()], Some(Duration::from_secs(300))));
}

#[test]
fn a_pod_that_ends_in_an_absurd_time_can_be_forced() {
    let of = |end: &'static str| {
        cluster(
            &vm(|_| ()),
            on_pod(move |pod| {
                pod["metadata"]["deletionTimestamp"] = json!(end);
                pod["metadata"]["deletionGracePeriodSeconds"] = json!(i64::MAX);
            }),
        )
    };
    let forced = vm(|vm| vm["metadata"]["annotations"] = json!({ "vmoperator.jdrupes.org/forceStop": "Pod-apple" }));
    assert_eq!(decide(&forced, &of("2149-01-01T00:00:00Z")), ["0 delete Pod apple Force Some(1)", GONE]);
    assert_eq!(decide(&vm(|_| ()), &of("9999-12-30T22:00:00Z")), [GONE]);
}

#[test]
fn the_pod_of_an_earlier_machine_is_waited_for_whatever_the_new_one_calls_its_own() {
    let mut objects = rendered(&vm(|_| ()), &nothing());
    let observed = applied(&objects, |kind, object| {
        if kind == "Pod" {
            object["metadata"]["ownerReferences"][0]["uid"] = json!("earlier");
        }
    });
    let pod = objects.iter_mut().find(|object| object.key.is_pod()).unwrap();
    pod.key.name = "apple-vm".into();
    Arc::make_mut(&mut pod.value)["metadata"]["name"] = json!("apple-vm");
    assert_eq!(short(&plan(&vm(|_| ()), &observed, Some(&objects))), [GONE]);
}

#[test]
fn what_is_kept_but_no_claim_is_not_taken_from_others() {
    let mut objects = rendered(&vm(|_| ()), &nothing());
    let map = objects.iter_mut().find(|object| object.key.kind == "ConfigMap").unwrap();
    map.lifetime = Lifetime::Keep;
    let observed = applied(&objects, |kind, object| {
        if kind == "ConfigMap" {
            object["metadata"]["labels"]["app.kubernetes.io/managed-by"] = json!("somebody");
        }
    });
    let waits = plan(&vm(|_| ()), &observed, Some(&objects)).waits;
    assert!(matches!(&waits[..], [Wait::NotOurs(key)] if key.kind == "ConfigMap"), "{waits:?}");
}

#[test]
fn a_machine_that_is_started_while_its_guest_stays_down_gets_another_pod() {
    let started = |pod_uid: &'static str| {
        vm(move |vm| {
            vm["spec"]["guestShutdownStops"] = json!(true);
            vm["status"] = json!({
                "podUid": pod_uid,
                "halted": { "by": "guest", "time": "2027-01-15T07:00:00Z", "generation": 3, "released": true },
                "conditions": [{
                    "type": "Running", "status": "False", "reason": "GuestShutdown", "message": "",
                    "lastTransitionTime": "2027-01-15T07:00:00Z",
                }],
            });
        })
    };
    let alive = cluster(&vm(|_| ()), |_, _| ());
    let deleted = |vm: &VirtualMachine, observed: &Observed| {
        decide(vm, observed).into_iter().filter(|action| action.contains("delete")).collect::<Vec<_>>()
    };
    assert_eq!(deleted(&started("Pod-apple"), &alive), ["0 delete Pod apple Restart None"]);
    assert_eq!(deleted(&started("another"), &alive), [""; 0]);

    // What lives beside the Pod goes with it once, and not again while the Pod is going.
    let mut objects = rendered(&vm(|_| ()), &nothing());
    objects.iter_mut().find(|object| object.key.kind == "ConfigMap").unwrap().lifetime = Lifetime::Running;
    let going = applied(&objects, |kind, object| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
        }
    });
    let vm = started("Pod-apple");
    assert_eq!(short(&plan(&vm, &going, Some(&objects))), [GONE]);
}

#[test]
fn another_version_of_the_manager_writes_nothing() {
    let vm = vm(|_| ());
    let of_another = cluster(&vm, |_, object| {
        if let Some(version) = object["metadata"]["annotations"].get_mut(VERSION_ANNOTATION) {
            *version = json!("0.0.1");
        }
    });
    assert!(of_another.objects.iter().any(|object| object.annotations[VERSION_ANNOTATION] == "0.0.1"));
    assert_eq!(decide(&vm, &of_another), [""; 0]);
}

#[test]
fn a_pod_that_is_not_rendered_any_more_is_ended_before_anything_can_be_refused() {
    let observed = cluster(&vm(|_| ()), |_, _| ());
    let mut objects = rendered(&stopped(), &observed);
    objects.retain(|object| !object.key.is_pod());
    let map = objects.iter_mut().find(|object| object.key.kind == "ConfigMap").unwrap();
    map.hash = "other".into();
    let steps = plan(&stopped(), &observed, Some(&objects)).steps;
    let has = |kind: &str, action: &Action| matches!(action, Action::Delete { key, .. } if key.kind == kind);
    assert!(steps[0].iter().any(|action| has("Pod", action)), "{steps:?}");
}

#[test]
fn a_pod_is_not_made_while_its_disk_is_going() {
    let running = vm(|_| ());
    let mut observed = cluster(&running, |kind, object| {
        if kind == "PersistentVolumeClaim" && object["metadata"]["name"] == "apple-core-disk" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:00Z");
        }
    });
    assert_eq!(decide(&running, &observed).len(), 1, "the guest goes on");
    observed.objects.retain(|object| !object.key.is_pod());
    assert_eq!(
        decide(&running, &observed),
        [GONE.replace("Pod", "PersistentVolumeClaim").replace("\"apple\"", "\"apple-core-disk\"")]
    );
}

#[test]
fn a_change_of_the_configuration_is_live_and_the_pod_hears_of_it() {
    let before = vm(|_| ());
    let after = vm(|vm| vm["spec"]["vm"]["currentCpus"] = json!(1));
    // A Pod without a node mounts nothing yet.
    assert_eq!(decide(&after, &cluster(&before, |_, _| ())), ["0 change ConfigMap apple"]);
    let actions = decide(&after, &cluster(&before, on_pod(on_node)));
    assert_eq!(actions.len(), 2, "{actions:?}");
    assert_eq!(actions[0], "0 change ConfigMap apple");
    assert!(
        actions[1].starts_with(r#"1 label Pod apple {"annotations":{"vmrunner.jdrupes.org/cmVersion":"#),
        "{actions:?}"
    );
}

#[test]
fn a_pod_that_gets_a_node_hears_of_what_changed_before() {
    let before = vm(|_| ());
    let after = vm(|vm| vm["spec"]["vm"]["currentCpus"] = json!(1));
    let bound = |configured: &VirtualMachine| {
        let mut observed = cluster(&before, on_pod(on_node));
        observed.objects.retain(|object| object.key.kind != "ConfigMap");
        let configured = cluster(configured, |_, _| ()).objects.into_iter();
        observed.objects.extend(configured.filter(|object| object.key.kind == "ConfigMap"));
        observed
    };
    let actions = decide(&after, &bound(&after));
    assert_eq!(actions.len(), 1, "{actions:?}");
    assert!(actions[0].starts_with("1 label Pod apple"), "{actions:?}");
    assert_eq!(decide(&before, &bound(&before)), [""; 0]);
}

#[test]
fn a_change_of_the_pod_waits_for_the_next_start() {
    let before = vm(|_| ());
    let after = vm(|vm| vm["spec"]["image"] = json!({ "source": "other" }));
    let observed = cluster(&before, |_, _| ());
    let plan = plan(&after, &observed, Some(&rendered(&after, &observed)));
    assert_eq!(short(&plan), [""; 0]);
    let paths: Vec<&str> = plan.pending.iter().map(|change| change.path.as_str()).collect();
    assert_eq!(paths, ["objects/Pod/spec.containers[vm-runner].image"]);
}

#[test]
fn live_cpus_leave_nothing_to_wait_for() {
    let with = |resources: Value, cpus: u32| {
        vm(move |vm| {
            vm["spec"]["resources"] = resources;
            vm["spec"]["vm"]["currentCpus"] = json!(cpus);
        })
    };
    let pending = |before: &VirtualMachine, after: &VirtualMachine| {
        let observed = cluster(before, |_, _| ());
        let pending = plan(after, &observed, Some(&rendered(after, &observed))).pending;
        pending.into_iter().map(|change| change.path).collect::<Vec<_>>()
    };
    assert_eq!(pending(&with(Value::Null, 2), &with(Value::Null, 1)), [""; 0]);
    let requests = |cpu: &str| json!({ "requests": { "cpu": cpu } });
    assert_eq!(
        pending(&with(requests("1"), 2), &with(requests("2"), 1)),
        ["objects/Pod/spec.containers[vm-runner].resources.requests.cpu"]
    );
    let limited = json!({ "requests": { "cpu": "1", "memory": "1Gi" }, "limits": { "memory": "2Gi" } });
    assert_eq!(
        pending(&with(limited, 2), &with(Value::Null, 2)),
        ["objects/Pod/spec.containers[vm-runner].resources.limits"],
        "what the machine does not ask for any more"
    );
}

#[test]
fn a_label_of_the_machine_reaches_its_pod_and_leaves_it() {
    let (without, with) =
        (vm(|_| ()), vm(|vm| vm["metadata"]["labels"] = json!({ "tier": "web", "helm.sh/chart": "x" })));
    assert_eq!(decide(&with, &cluster(&without, |_, _| ())), [r#"1 label Pod apple {"labels":{"tier":"web"}}"#]);
    assert_eq!(decide(&without, &cluster(&with, |_, _| ())), [r#"1 label Pod apple {"labels":{"tier":null}}"#]);
    // The API server notes what was patched apart from what was applied.
    let patched = cluster(
        &with,
        on_pod(|pod| {
            let labels = pod
                .pointer_mut("/metadata/managedFields/0/fieldsV1/f:metadata/f:labels")
                .unwrap()
                .as_object_mut()
                .unwrap();
            let tier = labels.remove("f:tier").unwrap();
            let fields = json!({ "f:metadata": { "f:labels": { "f:tier": tier } } });
            let entry =
                json!({ "manager": crate::ownership::OBJECT_MANAGER, "operation": "Update", "fieldsV1": fields });
            pod["metadata"]["managedFields"].as_array_mut().unwrap().push(entry);
        }),
    );
    assert_eq!(decide(&without, &patched), [r#"1 label Pod apple {"labels":{"tier":null}}"#]);
}

#[test]
fn a_field_that_somebody_changed_is_put_back() {
    let vm = vm(|_| ());
    let observed = cluster(&vm, |kind, object| {
        if kind == "ConfigMap" {
            let fields = object.pointer_mut("/metadata/managedFields/0/fieldsV1").unwrap();
            assert!(fields.as_object_mut().unwrap().remove("f:data").is_some());
        }
    });
    assert_eq!(decide(&vm, &observed), ["0 change ConfigMap apple"]);
}

#[test]
fn a_secret_that_somebody_changed_is_left_alone_and_the_pod_hears_of_it() {
    let vm = vm(|_| ());
    let observed = cluster(&vm, |kind, object| match kind {
        "Secret" => {
            object["metadata"]["annotations"] = json!({});
            object["metadata"]["managedFields"] = json!([]);
        }
        "Pod" => on_node(object),
        _ => (),
    });
    // The Pod's annotation makes the kubelet refresh what it mounts.
    assert_eq!(decide(&vm, &observed), [r#"1 label Pod apple {"annotations":{"vmrunner.jdrupes.org/dpVersion":"0"}}"#]);
}

#[test]
fn a_persons_secret_of_the_generated_ones_name_is_theirs_also_while_a_pod_mounts_it() {
    let vm = vm(|_| ());
    let theirs = |observed: Observed| {
        let mut objects = observed.objects;
        let secret = objects.iter_mut().find(|object| object.key.kind == "Secret").unwrap();
        let secret = Arc::make_mut(secret);
        secret.labels.remove("app.kubernetes.io/managed-by");
        (secret.owners, secret.owned) = (vec![], None);
        Observed { objects, ..observed }
    };
    let running = theirs(cluster(&vm, |_, _| ()));
    let plan = plan(&vm, &running, Some(&rendered(&vm, &running)));
    assert_eq!((short(&plan), plan.waits, plan.pending), (vec![], vec![], vec![]));
}

#[test]
fn a_secret_that_is_not_to_be_generated_any_more_is_not_mounted_by_the_next_pod() {
    let generating = stopped();
    let open = vm(|vm| vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } }));
    let observed = cluster(&generating, |_, _| ());
    let without_pod =
        Observed { objects: observed.objects.into_iter().filter(|object| !object.key.is_pod()).collect(), ..observed };
    let plan = plan(&open, &without_pod, Some(&rendered(&open, &without_pod)));
    let pod = plan.steps[1].iter().find_map(|action| match action {
        Action::Apply { object, .. } if object.key.is_pod() => Some(object.value.to_string()),
        _ => None,
    });
    let pod = pod.unwrap();
    assert!(!pod.contains("display-secret") && !pod.contains("VM_RUNNER_REQUIRE_PASSWORD"), "{pod}");
    assert!(short(&plan).contains(&"2 delete Secret apple-display-secret".to_owned()), "{:?}", short(&plan));
    let mounting = rendered(&vm(|_| ()), &nothing());
    let pod = mounting.iter().find(|object| object.key.is_pod()).unwrap().value.to_string();
    assert!(pod.contains("VM_RUNNER_REQUIRE_PASSWORD"), "{pod}");
}

#[test]
fn a_password_that_somebody_set_outlives_the_wish_to_generate_one() {
    let generated = vm(|_| ());
    let without = vm(|vm| vm["spec"]["vm"]["display"] = json!({ "spice": { "generateSecret": false } }));
    let deleted = "2 delete Secret apple-display-secret".to_owned();
    let mut made = cluster(&generated, |_, _| ());
    assert!(!decide(&without, &made).contains(&deleted), "the Pod mounts it");
    made.objects.retain(|object| !object.key.is_pod());
    assert!(decide(&without, &made).contains(&deleted));
    let set = cluster(&generated, |kind, object| {
        if kind == "Secret" {
            object["metadata"]["managedFields"] = json!([]);
        }
    });
    assert_eq!(decide(&without, &set), [""; 0]);
}

/// The machine's Pod as a StatefulSet that replaces its template.
fn by_stateful_set(vm: &VirtualMachine, observed: &Observed) -> Vec<Rendered> {
    let mut rendered = rendered(vm, observed);
    let pod = rendered.iter_mut().find(|object| object.key.is_pod()).unwrap();
    (pod.key.api_version, pod.key.kind) = ("apps/v1".into(), "StatefulSet".into());
    let value = Arc::make_mut(&mut pod.value);
    (value["apiVersion"], value["kind"]) = (json!("apps/v1"), json!("StatefulSet"));
    value["metadata"]["annotations"][LIFETIME_ANNOTATION] = json!("running");
    rendered
}

#[test]
fn templates_that_make_the_pod_otherwise_wait_until_it_has_ended() {
    let (running, restarted) = (
        vm(|_| ()),
        vm(|vm| {
            vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" });
        }),
    );
    let gone = |name: &str| GONE.replace("apple", name);

    // From a Pod to a StatefulSet.
    let observed = cluster(&running, |_, _| ());
    let plan_of = |vm: &VirtualMachine, observed: &Observed| plan(vm, observed, Some(&by_stateful_set(vm, observed)));
    let waiting = plan_of(&running, &observed);
    assert_eq!(short(&waiting), [GONE]);
    assert_eq!(waiting.pending[0].path, "objects/StatefulSet/apple");
    assert_eq!(short(&plan_of(&restarted, &observed)), ["0 delete Pod apple Restart None", GONE]);
    let mut observed = observed;
    // Whatever else lives while the machine runs.
    let map = observed.objects.iter().find(|object| object.key.kind == "ConfigMap").unwrap();
    let key = ObjectKey { name: "helper".into(), ..map.key.clone() };
    let mut with_helper = by_stateful_set(&running, &observed);
    let helper = with_helper.iter().find(|object| object.lifetime == Lifetime::Running).unwrap().clone();
    with_helper.push(Rendered { key: key.clone(), update: Update::Once, ..helper });
    observed.objects.push(Arc::new(Object { key, ..Object::clone(map) }));
    assert_eq!(short(&plan(&running, &observed, Some(&with_helper))), [GONE]);
    for object in observed.objects.iter_mut().filter(|object| object.key.is_pod()) {
        Arc::make_mut(object).deleting = Some(noon());
    }
    assert_eq!(short(&plan(&running, &observed, Some(&with_helper))), [GONE], "while it is going, too");
    observed.objects.pop();
    observed.objects.retain(|object| !object.key.is_pod());
    assert_eq!(short(&plan_of(&running, &observed)), ["1 make StatefulSet apple"]);

    // And back.
    let mut observed = applied(&by_stateful_set(&running, &nothing()), |_, _| ());
    let made = cluster(&running, |kind, object| {
        if kind == "Pod" {
            object["metadata"]["name"] = json!("apple-0");
            object["metadata"]["ownerReferences"][0]["uid"] = json!("StatefulSet-apple");
        }
    });
    observed.objects.extend(made.objects.into_iter().filter(|object| object.key.is_pod()));
    assert_eq!(short(&plan_of(&running, &observed)), [""; 0], "as it should be");
    assert_eq!(decide(&running, &observed), [gone("apple-0")]);
    assert_eq!(decide(&restarted, &observed), ["0 delete StatefulSet apple".to_owned(), gone("apple-0")]);
    assert_eq!(decide(&stopped(), &observed), ["0 delete StatefulSet apple"]);
    // Its Pod is lost: it may make it anew any moment, so it must be gone before there is another.
    observed.objects.retain(|object| !object.key.is_pod());
    let gone = GONE.replace("v1", "apps/v1").replace("Pod", "StatefulSet");
    assert_eq!(decide(&running, &observed), ["0 delete StatefulSet apple", &gone]);
    assert_eq!(short(&plan(&running, &observed, None)), [""; 0], "what can't be rendered can't be made anew");
    for object in observed.objects.iter_mut().filter(|object| object.key.kind == "StatefulSet") {
        Arc::make_mut(object).deleting = Some(noon());
    }
    assert_eq!(decide(&running, &observed), [gone]);
    observed.objects.retain(|object| object.key.kind != "StatefulSet");
    assert_eq!(decide(&running, &observed), ["1 make Pod apple"]);
}

#[test]
fn what_the_oldest_releases_started_runs_on_until_it_is_stopped_or_restarted() {
    let running = vm(|_| ());
    let restarted = vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }));
    let oldest = |owner: Option<&'static str>, going: bool| {
        cluster(
            &running,
            on_pod(move |pod| {
                let metadata = pod["metadata"].as_object_mut().unwrap();
                metadata["name"] = json!("apple-0");
                metadata["labels"].as_object_mut().unwrap().remove("app.kubernetes.io/component");
                match owner {
                    Some(owner) => metadata["ownerReferences"][0]["uid"] = json!(owner),
                    None => drop(metadata.remove("ownerReferences")),
                }
                if going {
                    metadata.insert("deletionTimestamp".into(), json!("2027-01-15T07:59:59Z"));
                }
            }),
        )
    };
    let gone = GONE.replace("\"apple\"", "\"apple-0\"");
    let gone = gone.as_str();
    for owner in [Some("a-statefulset"), None] {
        let what = if owner.is_some() { "StatefulSet apple" } else { "Pod apple-0" };
        assert_eq!(decide(&running, &oldest(owner, false)), [gone]);
        assert_eq!(decide(&stopped(), &oldest(owner, false)), [format!("0 delete {what}").as_str(), gone]);
        let restart = format!("0 delete {what} Restart None");
        assert_eq!(decide(&restarted, &oldest(owner, false)), [restart.as_str(), gone]);
        assert_eq!(decide(&restarted, &oldest(owner, true)), [gone]);
    }
}

#[test]
fn an_object_that_is_known_in_two_versions_is_one() {
    let vm = vm(|_| ());
    let mut observed = cluster(&vm, |_, _| ());
    let with = |version: &str, key: &ObjectKey| ObjectKey { api_version: version.into(), ..key.clone() };
    let map = observed.objects.iter().find(|object| object.key.kind == "ConfigMap").unwrap().clone();
    let older = Object { key: with("v1beta1", &map.key), ..Object::clone(&map) };
    observed.objects.push(Arc::new(older));
    assert_eq!(decide(&vm, &observed), [""; 0]);
    let of_a_group = Object { key: with("example.org/v1", &map.key), ..Object::clone(&map) };
    observed.objects.push(Arc::new(of_a_group));
    assert_eq!(decide(&vm, &observed), ["2 delete ConfigMap apple"]);
}

#[test]
fn what_is_not_rendered_any_more_goes_but_never_a_claim() {
    let with = vm(|vm| vm["spec"]["cloudInit"] = json!({}));
    let without = vm(|vm| vm["spec"]["vm"]["disks"] = json!([]));
    let mut actions = decide(&without, &cluster(&with, |_, _| ()));
    actions.retain(|action| action.contains("delete"));
    assert_eq!(actions, ["2 delete ConfigMap apple-cloud-init", "2 delete Secret apple-cloud-init"]);
}

#[test]
fn broken_templates_prune_nothing_and_kill_no_guest_but_the_power_button_works() {
    let running = vm(|_| ());
    let observed = cluster(&running, |_, _| ());
    assert_eq!(short(&plan(&running, &observed, None)), [""; 0]);
    assert_eq!(short(&plan(&stopped(), &observed, None)), ["0 delete Pod apple"]);
    let restarted = vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }));
    assert_eq!(short(&plan(&restarted, &observed, None)), [""; 0], "nothing can be made anew");
}

#[test]
fn a_machine_that_is_being_deleted_is_left_to_the_garbage_collector() {
    let going = vm(|vm| vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:00Z"));
    assert_eq!(decide(&going, &cluster(&vm(|_| ()), |_, _| ())), [""; 0]);
}

#[test]
fn a_machine_made_again_adopts_what_its_predecessor_left() {
    let vm = vm(|_| ());
    let observed = cluster(
        &vm,
        on_pod(|pod| {
            pod["metadata"].as_object_mut().unwrap().remove("ownerReferences");
        }),
    );
    let actions = decide(&vm, &observed);
    assert_eq!(actions.len(), 1, "{actions:?}");
    assert!(actions[0].starts_with(r#"1 label Pod apple {"ownerReferences":"#));
}
