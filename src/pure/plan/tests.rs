mod agent;
mod claims;
mod helpers;
mod instances;
mod preconditions;
mod retry;

use super::*;
use crate::{
    api::VirtualMachineStatus,
    object::{FORCE_STOP_ANNOTATION, HASH_ANNOTATION, VERSION_ANNOTATION},
    render::TemplateSet,
    test_support::{applied, noon, nothing, rendered, set_by, stopped, vm},
};

/// The plan as short texts: one for each action and wait.
fn short(plan: &Plan) -> Vec<String> {
    let actions = plan.steps.iter().enumerate().flat_map(|(step, actions)| {
        actions.iter().map(move |action| match action {
            Action::Apply { object, uid } => {
                format!("{step} {} {}", if uid.is_some() { "change" } else { "make" }, object.key)
            }
            Action::Label { key, patch, .. } => format!("{step} label {key} {}", patch["metadata"]),
            Action::Image { key, container, image, .. } => format!("{step} image {key} {container} {image}"),
            Action::Delete { key, reason: DeleteReason::Stop | DeleteReason::NotRendered, .. } => {
                format!("{step} delete {key}")
            }
            Action::Delete { key, reason, grace, .. } => format!("{step} delete {key} {reason:?} {grace:?}"),
        })
    });
    actions.chain(plan.waits.iter().map(|wait| format!("{wait:?}"))).collect()
}

/// A cluster with all objects of the VM, each changed by `edit`.
fn cluster(vm: &VirtualMachine, edit: impl FnMut(&str, &mut Value)) -> Observed {
    applied(&rendered(vm, &nothing()), edit)
}

/// The plan of a VM of which a status was written before: it names the claims.
fn plan(vm: &VirtualMachine, observed: &Observed, rendered: Option<&[Rendered]>) -> Plan {
    let mut vm = vm.clone();
    let claims = crate::claims::named(&vm, observed, rendered, &[]);
    let new = || VirtualMachineStatus { observed_generation: Some(-1), ..VirtualMachineStatus::default() };
    let status = vm.status.get_or_insert_with(new);
    if status.claims.is_empty() {
        status.claims = claims;
    }
    super::plan(&vm, observed, rendered)
}

/// What a plan presumes.
fn facts(plan: &Plan) -> Vec<Fact> {
    plan.preconditions.iter().map(|precondition| precondition.fact.clone()).collect()
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
fn a_new_vm_gets_the_objects_that_its_pod_mounts_and_then_its_pod() {
    assert_eq!(
        decide(&vm(|_| ()), &nothing()),
        [
            "0 make ConfigMap apple",
            "0 make PersistentVolumeClaim apple-core-disk",
            "0 make Secret apple-display-secret",
            "0 make Secret apple-relay",
            "0 make PersistentVolumeClaim apple-runner-data",
            "1 make Pod apple",
        ]
    );
}

#[test]
fn what_changes_at_the_start_changes_while_the_vm_has_no_pod() {
    let changed = |vm: &VirtualMachine, observed: &Observed| {
        let mut objects = rendered(vm, observed);
        let map = objects.iter_mut().find(|object| object.key.kind == "ConfigMap").unwrap();
        map.update = Update::AtStart;
        map.hash = "of another content".into();
        short(&plan(vm, observed, Some(&objects)))
    };
    for (vm, has_pod, is_applied) in
        [(vm(|_| ()), true, false), (vm(|_| ()), false, true), (stopped(), true, false), (stopped(), false, true)]
    {
        let objects: Vec<_> =
            rendered(&vm, &nothing()).into_iter().filter(|object| has_pod || !object.key.is_pod()).collect();
        let steps = changed(&vm, &applied(&objects, |_, _| ()));
        // Before the Pod, so that its start has it.
        let is_first = steps.first().is_some_and(|step| step == "0 change ConfigMap apple");
        assert_eq!(is_first, is_applied, "{has_pod}: {steps:?}");
        assert_eq!(
            steps.iter().filter(|step| step.contains("ConfigMap")).count(),
            usize::from(is_applied),
            "{steps:?}"
        );
    }
}

#[test]
fn a_stopped_vm_gets_all_objects_except_a_pod() {
    assert_eq!(
        decide(&stopped(), &nothing()),
        [
            "0 make ConfigMap apple",
            "0 make PersistentVolumeClaim apple-core-disk",
            "0 make Secret apple-display-secret",
            "0 make Secret apple-relay",
            "0 make PersistentVolumeClaim apple-runner-data",
        ]
    );
}

#[test]
fn nothing_is_done_when_all_objects_are_as_rendered() {
    let vm = vm(|_| ());
    assert_eq!(decide(&vm, &cluster(&vm, |_, _| ())), [""; 0]);
}

#[test]
fn the_table_of_runtime_objects() {
    let deleting = |object: &mut Value| object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:50Z");
    let since = json!({ "type": "Ready", "status": "False", "lastTransitionTime": "2027-01-15T08:00:00Z" });
    let ended = |object: &mut Value| object["status"] = json!({ "phase": "Failed", "conditions": [since] });
    let owned_by = |object: &mut Value, kind: &str, uid: &str| {
        object["metadata"]["ownerReferences"] =
            json!([{ "apiVersion": "vmoperator.jdrupes.org/v1", "kind": kind, "name": "apple", "uid": uid }]);
    };
    let former = |object: &mut Value| owned_by(object, "VirtualMachine", "former");
    // Somebody has given the manager's own Pod another owner.
    let given_away = |object: &mut Value| owned_by(object, "X", "x");
    // All its labels and annotations are there, but another client has made it.
    let stranger = |object: &mut Value| {
        object["metadata"]["ownerReferences"] = json!([]);
        object["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
    };
    let running = vm(|_| ());
    for (vm, edit, expected) in [
        (&running, &(|_: &mut Value| ()) as &dyn Fn(&mut Value), &[][..]),
        (&running, &ended, &["0 delete Pod apple Ended None", GONE]),
        (&running, &deleting, &[GONE]),
        (&running, &former, &[GONE]),
        (&running, &given_away, &[]),
        (&running, &stranger, &[r#"NotOurs(ObjectKey { api_version: "v1", kind: "Pod", name: "apple" })"#]),
        (&stopped(), &|_| (), &["0 delete Pod apple", GONE]),
        (&stopped(), &ended, &["0 delete Pod apple", GONE]),
        (&stopped(), &deleting, &[GONE]),
        (&stopped(), &stranger, &[]),
    ] {
        assert_eq!(decide(vm, &cluster(&running, on_pod(edit))), expected);
    }
}

/// A VM whose guest has shut itself down, as the runner reports it.
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
fn a_shutdown_is_in_the_status_before_the_pod_is_deleted() {
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
fn a_guest_that_could_not_start_again_is_left_up_and_the_rest_is_done() {
    let before = vm(|_| ());
    let observed = applied(&rendered(&before, &nothing()), |_, _| ());
    let restarted = vm(|vm| {
        vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" });
        vm["spec"]["vm"]["currentCpus"] = json!(1);
    });
    let objects = rendered(&restarted, &observed);
    let mut plan = plan(&restarted, &observed, Some(&objects));
    let all = short(&plan);
    assert!(all.contains(&"1 delete Pod apple Restart None".to_owned()) && all.contains(&GONE.to_owned()), "{all:?}");
    plan.leave_out(Part::Restart);
    let left: Vec<String> = all.into_iter().filter(|it| !it.contains("Pod apple") && it != GONE).collect();
    assert!(!left.is_empty());
    assert_eq!(short(&plan), left);
}

#[test]
fn a_restart_replaces_the_pod_once() {
    let asked =
        |when: &'static str| vm(move |vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: when }));
    let before = cluster(&vm(|_| ()), |_, _| ());
    assert_eq!(decide(&asked("monday"), &before), ["1 delete Pod apple Restart None", GONE]);
    let plan = plan(&asked("monday"), &nothing(), Some(&rendered(&asked("monday"), &nothing())));
    let made = plan.steps.iter().flatten().find_map(|action| match action {
        Action::Apply { object, .. } if object.key.is_pod() => Some(object.value["metadata"]["annotations"].clone()),
        _ => None,
    });
    let made = made.unwrap();
    assert_eq!(made[RESTARTED_ANNOTATION], "monday");
    let after = cluster(&vm(|_| ()), on_pod(move |pod| pod["metadata"]["annotations"] = made.clone()));
    assert_eq!(decide(&asked("monday"), &after), [""; 0]);
    assert_eq!(decide(&vm(|_| ()), &after), [""; 0], "the annotation was removed");
    assert_eq!(decide(&asked("tuesday"), &after), ["1 delete Pod apple Restart None", GONE]);
}

#[test]
fn a_forced_stop_shortens_the_grace_period_of_that_pod_only() {
    let forced = |vm: &mut Value, uid: &str| vm["metadata"]["annotations"] = json!({ FORCE_STOP_ANNOTATION: uid });
    let down = |uid: &'static str| {
        vm(move |vm| {
            vm["spec"]["vm"]["state"] = json!("Stopped");
            set_by("Update", vm);
            forced(vm, uid);
        })
    };
    let deleting = |since: i64, grace: i64| {
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
    assert_eq!(decide(&down("Pod-apple"), &deleting(0, 905)), ["0 delete Pod apple Force Some(1)", GONE]);
    assert_eq!(decide(&down("Pod-apple"), &deleting(300, 905)), ["0 delete Pod apple Force Some(301)", GONE]);
    assert_eq!(decide(&down("Pod-apple"), &deleting(300, 301)), [GONE], "counted from the first request");
    let shortened = deleting(1, 302);
    assert_eq!(
        decide(&down("Pod-apple"), &shortened),
        ["0 delete Pod apple Force Some(2)", GONE],
        "counted from the last request"
    );
    assert_eq!(decide(&down("Pod-apple"), &deleting(0, 2)), [GONE]);
    assert_eq!(decide(&down("another"), &deleting(0, 905)), [GONE]);
    assert_eq!(decide(&vm(|vm| forced(vm, "Pod-apple")), &alive), [""; 0], "it should run");
}

#[test]
fn an_overdue_pod_is_waited_for_and_reported() {
    let deleting_with = |end: &'static str, edit: fn(&mut Value)| {
        let deleting = move |pod: &mut Value| {
            pod["metadata"]["deletionTimestamp"] = json!(end);
            edit(pod);
        };
        cluster(&vm(|_| ()), on_pod(deleting))
    };
    let deleting = |end| deleting_with(end, on_node);
    let plan_of = |observed: &Observed| plan(&stopped(), observed, Some(&rendered(&stopped(), observed)));
    let early = plan_of(&deleting("2027-01-15T07:59:40Z"));
    assert_eq!((short(&early), early.requeue_after), (vec![GONE.to_owned()], Some(Duration::from_secs(10))));
    let late = plan_of(&deleting("2027-01-15T07:59:30Z"));
    assert_eq!(
        (short(&late), late.requeue_after),
        (vec![GONE.replace("Gone", "Overdue")], Some(Duration::from_secs(30)))
    );
    // The kubelet may have restarted the container and not reported that yet.
    let ended = deleting_with("2027-01-15T07:59:30Z", |pod| {
        on_node(pod);
        pod["status"]["containerStatuses"] = json!([{ "state": { "terminated": { "exitCode": 0 } } }]);
    });
    assert_eq!(short(&plan_of(&ended)), [GONE.replace("Gone", "Overdue")]);
    // Nothing runs in the Pod, so its node is not the cause.
    for edit in [
        |_: &mut Value| (),
        |pod: &mut Value| {
            on_node(pod);
            pod["status"]["phase"] = json!("Failed");
        },
    ] {
        assert_eq!(short(&plan_of(&deleting_with("2027-01-15T07:59:30Z", edit))), [GONE.replace("Gone", "NotRemoved")]);
    }
    let put_back = plan_of(&deleting("2027-01-16T07:59:40Z"));
    assert_eq!((short(&put_back), put_back.requeue_after), (vec![GONE.to_owned()], Some(Duration::from_secs(300))));
}

#[test]
fn a_vm_that_can_not_be_rendered_can_be_stopped_by_force() {
    let alive = cluster(&vm(|_| ()), |_, _| ());
    let leaving = cluster(
        &vm(|_| ()),
        on_pod(|pod| {
            pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T09:00:00Z");
            pod["metadata"]["deletionGracePeriodSeconds"] = json!(3600);
        }),
    );
    let annotated = |uid: &str| {
        let mut vm = stopped();
        vm.annotations_mut().insert(FORCE_STOP_ANNOTATION.into(), uid.into());
        vm
    };
    let forced = "0 delete Pod apple Force Some(1)";
    for (vm, observed, expected) in [
        (stopped(), &alive, vec!["0 delete Pod apple", GONE]),
        (annotated("Pod-apple"), &alive, vec![forced, GONE]),
        (annotated("Pod-apple"), &leaving, vec![forced, GONE]),
        (annotated("another"), &alive, vec!["0 delete Pod apple", GONE]),
        (annotated("another"), &leaving, vec![GONE]),
        (vm(|_| ()), &alive, vec![]),
    ] {
        assert_eq!(short(&plan(&vm, observed, None)), expected);
    }
}

#[test]
fn a_pod_with_an_absurd_grace_period_can_be_forced() {
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
fn the_pod_of_a_deleted_vm_is_waited_for_even_if_the_new_pod_has_another_name() {
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
fn a_kept_object_of_someone_else_is_refused_unless_it_is_a_claim() {
    let mut objects = rendered(&vm(|_| ()), &nothing());
    let map = objects.iter_mut().find(|object| object.key.kind == "ConfigMap").unwrap();
    map.lifetime = Lifetime::Keep;
    let waits = |edit: fn(&mut Value)| {
        let observed = applied(&objects, |kind, object| {
            if kind == "ConfigMap" {
                object["metadata"]["managedFields"] = json!([{ "manager": "somebody", "operation": "Update" }]);
                object["metadata"]["ownerReferences"] = json!([]);
                edit(object);
            }
        });
        plan(&vm(|_| ()), &observed, Some(&objects)).waits
    };
    let without_hash = |map: &mut Value| map["metadata"]["annotations"] = json!({});
    let not_ours = waits(without_hash);
    assert!(matches!(&not_ours[..], [Wait::NotOurs(key)] if key.kind == "ConfigMap"), "{not_ours:?}");
    assert_eq!(waits(|_| ()), [], "a backup has brought it back");
}

#[test]
fn a_vm_that_is_started_while_its_guest_stays_down_gets_another_pod() {
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
    assert_eq!(deleted(&started("Pod-apple"), &alive), ["1 delete Pod apple Restart None"]);
    assert_eq!(deleted(&started("another"), &alive), [""; 0]);

    // Other runtime objects are deleted once with the Pod, and not again while the Pod is being deleted.
    let mut objects = rendered(&vm(|_| ()), &nothing());
    objects.iter_mut().find(|object| object.key.kind == "ConfigMap").unwrap().lifetime = Lifetime::Running;
    let deleting = applied(&objects, |kind, object| {
        if kind == "Pod" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:10:00Z");
        }
    });
    let vm = started("Pod-apple");
    assert_eq!(short(&plan(&vm, &deleting, Some(&objects))), [GONE]);
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
fn an_unrendered_pod_is_deleted_in_the_first_step() {
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
fn no_pod_is_created_while_its_claim_is_being_deleted() {
    let running = vm(|_| ());
    let mut observed = cluster(&running, |kind, object| {
        if kind == "PersistentVolumeClaim" && object["metadata"]["name"] == "apple-core-disk" {
            object["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:00Z");
        }
    });
    assert_eq!(decide(&running, &observed).len(), 1, "the guest keeps running");
    observed.objects.retain(|object| !object.key.is_pod());
    assert_eq!(
        decide(&running, &observed),
        [GONE.replace("Pod", "PersistentVolumeClaim").replace("\"apple\"", "\"apple-core-disk\"")]
    );
}

#[test]
fn a_changed_config_map_is_applied_and_the_pod_is_annotated() {
    let before = vm(|_| ());
    let after = vm(|vm| vm["spec"]["vm"]["currentCpus"] = json!(1));
    // A Pod without a node has no volumes yet.
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
fn a_pod_that_gets_a_node_is_annotated_with_earlier_changes() {
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
    let observed = cluster(&before, on_pod(on_node));
    let plan_of = |observed: &Observed| plan(&after, observed, Some(&rendered(&after, observed)));
    let paths = |plan: &Plan| plan.pending.iter().map(|change| change.path.clone()).collect::<Vec<_>>();
    let waiting = plan_of(&observed);
    assert_eq!(short(&waiting), ["1 image Pod apple agent other"]);
    assert_eq!(paths(&waiting), ["objects/Pod/spec.containers[vm-runner].image"]);
}

#[test]
fn a_pod_that_no_node_can_take_is_replaced_when_its_spec_changes() {
    let with = |selector: Value| vm(|vm| vm["spec"]["nodeSelector"] = selector);
    let (both, one) = (with(json!({ "disk": "fast", "zone": "nowhere" })), with(json!({ "disk": "fast" })));
    let unschedulable = |pod: &mut Value| {
        let scheduled = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable" });
        pod["status"]["conditions"] = json!([scheduled]);
        pod["metadata"]["resourceVersion"] = json!("7");
    };
    let plan_of = |vm: &VirtualMachine, observed: &Observed| plan(vm, observed, Some(&rendered(vm, observed)));
    let replaced = plan_of(&one, &cluster(&both, on_pod(unschedulable)));
    assert_eq!(short(&replaced), ["0 delete Pod apple Changed None", GONE]);
    // The API server refuses to delete a Pod that has got its node meanwhile.
    let deleted = &replaced.steps[0][0];
    assert!(matches!(deleted, Action::Delete { version: Some(7), .. }), "{deleted:?}");
    // Fewer CPUs may fit where more did not.
    let smaller = vm(|vm| vm["spec"]["vm"]["currentCpus"] = json!(1));
    let actions = decide(&smaller, &cluster(&vm(|_| ()), on_pod(unschedulable)));
    assert_eq!(actions, ["0 change ConfigMap apple", "0 delete Pod apple Changed None", GONE]);

    // With a node, or before the scheduler has looked at it, the change waits.
    for pod in [on_node as fn(&mut Value), |_| ()] {
        let plan = plan_of(&one, &cluster(&both, on_pod(pod)));
        assert_eq!(short(&plan), [""; 0]);
        let paths: Vec<_> = plan.pending.iter().map(|change| change.path.as_str()).collect();
        assert_eq!(paths, ["objects/Pod/spec.nodeSelector.zone"]);
    }
    assert_eq!(decide(&one, &cluster(&one, on_pod(unschedulable))), [""; 0], "as rendered");
}

#[test]
fn a_live_change_of_cpus_is_not_pending() {
    let with = |resources: Value, cpus: u32| {
        vm(move |vm| {
            vm["spec"]["resources"] = resources;
            vm["spec"]["vm"]["currentCpus"] = json!(cpus);
        })
    };
    let pending = |before: &VirtualMachine, after: &VirtualMachine| {
        let observed = cluster(before, on_pod(on_node));
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
        [
            "objects/Pod/spec.containers[vm-runner].resources.limits",
            "objects/Pod/spec.initContainers[agent].resources.limits"
        ],
        "limits that the VM no longer has"
    );
}

#[test]
fn what_an_init_container_requested_before_the_guest_started_is_not_pending() {
    let vm = vm(|_| ());
    let with = |beside: bool, cpu: &str, image: &str| {
        let mut import = json!({ "name": "import", "image": image, "resources": { "requests": { "cpu": cpu } } });
        if beside {
            import["restartPolicy"] = json!("Always");
        }
        let mut objects = rendered(&vm, &nothing());
        let pod = objects.iter_mut().find(|object| object.key.is_pod()).unwrap();
        let spec = &mut Arc::make_mut(&mut pod.value)["spec"];
        spec["initContainers"].as_array_mut().unwrap().push(import);
        objects
    };
    let pending = |beside: bool, image: &str| {
        let changed = on_pod(|pod| {
            on_node(pod);
            pod["metadata"]["annotations"][HASH_ANNOTATION] = json!("another");
        });
        let observed = applied(&with(beside, "1", "i"), changed);
        let plan = plan(&vm, &observed, Some(&with(beside, "2", image)));
        plan.pending.iter().map(|change| change.path.replace("objects/Pod/spec.", "")).collect::<Vec<_>>()
    };
    assert_eq!(pending(false, "i"), [""; 0]);
    assert_eq!(pending(false, "another"), ["initContainers[import].image"]);
    assert_eq!(pending(true, "i"), ["initContainers[import].resources.requests.cpu"]);
}

#[test]
fn a_label_of_the_vm_is_added_to_its_pod_and_removed_again() {
    let (without, with) =
        (vm(|_| ()), vm(|vm| vm["metadata"]["labels"] = json!({ "tier": "web", "helm.sh/chart": "x" })));
    assert_eq!(decide(&with, &cluster(&without, |_, _| ())), [r#"1 label Pod apple {"labels":{"tier":"web"}}"#]);
    assert_eq!(decide(&without, &cluster(&with, |_, _| ())), [r#"1 label Pod apple {"labels":{"tier":null}}"#]);
    // The API server keeps separate field sets for patched and applied fields.
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
fn a_field_that_another_client_changed_is_applied_again() {
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
fn a_changed_secret_is_left_alone_and_the_pod_is_annotated() {
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
fn a_persons_secret_with_the_generated_name_is_not_taken_over() {
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
fn the_next_pod_does_not_mount_a_secret_that_is_no_longer_generated() {
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
fn a_secret_whose_password_a_person_set_is_not_deleted() {
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

#[test]
fn an_object_in_two_api_versions_is_one_object() {
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
fn unrendered_objects_are_deleted_except_claims() {
    let with = vm(|vm| vm["spec"]["cloudInit"] = json!({}));
    let without = vm(|vm| vm["spec"]["vm"]["disks"] = json!([]));
    let mut actions = decide(&without, &cluster(&with, |_, _| ()));
    actions.retain(|action| action.contains("delete"));
    assert_eq!(actions, ["2 delete ConfigMap apple-cloud-init", "2 delete Secret apple-cloud-init"]);
}

#[test]
fn broken_templates_delete_nothing_and_end_no_guest_but_the_vm_can_be_stopped() {
    let running = vm(|_| ());
    let observed = cluster(&running, |_, _| ());
    assert_eq!(short(&plan(&running, &observed, None)), [""; 0]);
    assert_eq!(short(&plan(&stopped(), &observed, None)), ["0 delete Pod apple", GONE]);
    let restarted = vm(|vm| vm["metadata"]["annotations"] = json!({ RESTARTED_ANNOTATION: "monday" }));
    assert_eq!(short(&plan(&restarted, &observed, None)), [""; 0], "nothing can be created again");
}

#[test]
fn a_vm_that_is_being_deleted_or_can_not_be_rendered_follows_only_its_power() {
    let annotated = |state: &'static str, annotation: &'static str, value: &'static str| {
        vm(move |vm| {
            vm["spec"]["vm"]["state"] = json!(state);
            set_by("Update", vm);
            vm["metadata"]["annotations"] = json!({ annotation: value });
            // A finalizer keeps it.
            vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:59:00Z");
        })
    };
    let of = |edit: fn(&mut Value)| cluster(&vm(|_| ()), on_pod(edit));
    let alive = of(on_node);
    let going = of(|pod| {
        on_node(pod);
        pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:14:00Z");
        pod["metadata"]["deletionGracePeriodSeconds"] = json!(905);
    });
    let overdue = of(|pod| {
        on_node(pod);
        pod["metadata"]["deletionTimestamp"] = json!("2027-01-15T07:00:00Z");
    });
    let ended = of(|pod| pod["status"] = json!({ "phase": "Failed" }));
    let forced = ["0 delete Pod apple Force Some(1)", GONE];
    let late = GONE.replace("Gone", "Overdue");
    for (state, annotation, value, observed, expected) in [
        ("Running", "a", "b", &nothing(), &[][..]),
        ("Running", "a", "b", &alive, &[]),
        ("Running", "a", "b", &ended, &[]),
        ("Running", "a", "b", &going, &[GONE]),
        ("Running", "a", "b", &overdue, &[&late]),
        // The new Pod could not be created, so the guest keeps running.
        ("Running", RESTARTED_ANNOTATION, "monday", &alive, &[]),
        ("Running", FORCE_STOP_ANNOTATION, "Pod-apple", &alive, &[]),
        ("Stopped", "a", "b", &alive, &["0 delete Pod apple", GONE]),
        ("Stopped", "a", "b", &ended, &["0 delete Pod apple", GONE]),
        ("Stopped", "a", "b", &going, &[GONE]),
        ("Stopped", FORCE_STOP_ANNOTATION, "Pod-apple", &alive, &forced),
    ] {
        let deleted = annotated(state, annotation, value);
        assert_eq!(decide(&deleted, observed), expected, "{state} {annotation}");
        let mut unrendered = deleted;
        unrendered.metadata.deletion_timestamp = None;
        assert_eq!(short(&plan(&unrendered, observed, None)), expected, "{state} {annotation}, not rendered");
    }
    // The grace period counts from the first request, a minute ago.
    for state in ["Running", "Stopped"] {
        let actions = decide(&annotated(state, FORCE_STOP_ANNOTATION, "Pod-apple"), &going);
        assert_eq!(actions, ["0 delete Pod apple Force Some(66)", GONE], "{state}");
    }
}

#[test]
fn a_recreated_vm_adopts_orphaned_objects() {
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
    let presumed = |observed: &Observed| facts(&plan(&vm, observed, Some(&rendered(&vm, observed))));
    assert_eq!(presumed(&observed), [Fact::VmCurrent, Fact::ReportsCurrent]);
    assert_eq!(presumed(&cluster(&vm, |_, _| ())), []);
}
