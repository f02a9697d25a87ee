//! When a Pod that has ended is created again.

use super::*;

#[test]
fn pods_that_end_are_created_again_after_a_growing_pause() {
    let seconds = SignedDuration::from_secs;
    // A Pod that lived `lived` seconds. The cluster's clock is `behind` seconds behind the manager's.
    let ended = |lived: i64, behind: i64| {
        cluster(
            &vm(|_| ()),
            on_pod(move |pod| {
                let end = noon() - seconds(behind);
                let state = json!({ "terminated": { "exitCode": 1, "finishedAt": end.to_string() } });
                pod["status"] =
                    json!({ "phase": "Failed", "containerStatuses": [{ "name": "vm-runner", "state": state }] });
                pod["metadata"]["creationTimestamp"] = json!((end - seconds(lived)).to_string());
            }),
        )
    };
    let after = |count: u32, uid: &str, next: i64| {
        let retry = json!({ "count": count, "podUid": uid, "next": (noon() + seconds(next)).to_string() });
        vm(|vm| vm["status"] = json!({ "retry": retry }))
    };
    let (here, day) = ("Pod-apple", 86_400);
    for (before, lived, behind, count, pause) in [
        (None, 4, 0, 1, Some(6)),
        (Some((1, here, 6)), 4, 0, 1, Some(6)),
        (Some((1, "another", -20)), 4, 0, 2, Some(16)),
        (Some((3, "another", -20)), 4, 0, 4, Some(76)),
        (Some((60, "another", -20)), 4, 0, 61, Some(296)),
        (Some((2, here, 0)), 4, 0, 2, None),
        (Some((2, here, -1)), 4, 0, 2, None),
        (Some((5, "another", -20)), 601, 0, 1, None),
        // The node refused the Pod at once.
        (Some((1, "another", -20)), 0, 0, 2, Some(20)),
        // The manager's clock is ahead of the cluster's, or behind it.
        (Some((3, "another", -20)), 1, 700, 4, Some(79)),
        (None, 4, -day, 1, Some(6)),
        // The manager's clock was set back by a day after the retry was written.
        (Some((1, here, day)), 4, -day, 1, Some(10)),
    ] {
        let vm = before.map_or_else(|| vm(|_| ()), |(count, uid, next)| after(count, uid, next));
        let observed = ended(lived, behind);
        let plan = plan(&vm, &observed, Some(&rendered(&vm, &observed)));
        assert_eq!(plan.retry.map(|retry| retry.count), Some(count), "{before:?} {lived} {behind}");
        assert_eq!(plan.requeue_after, pause.map(Duration::from_secs), "{before:?} {lived} {behind}");
        assert_eq!(plan.steps.concat().is_empty(), pause.is_some(), "{before:?} {lived} {behind}");
    }
}

#[test]
fn a_pod_that_lives_long_enough_resets_the_pause() {
    for (age, count, pause) in [(4, Some(3), Some(300)), (400, Some(3), Some(200)), (600, None, None)] {
        let next = (noon() - SignedDuration::from_secs(age)).to_string();
        let retry = json!({ "count": 3, "podUid": "another", "next": next });
        let vm = vm(|vm| vm["status"] = json!({ "retry": retry }));
        let observed = cluster(&vm, |_, _| ());
        let plan = plan(&vm, &observed, Some(&rendered(&vm, &observed)));
        assert_eq!(plan.retry.map(|retry| retry.count), count, "{age}");
        assert_eq!(plan.requeue_after, pause.map(Duration::from_secs), "{age}");
    }
}

#[test]
fn a_retry_that_another_client_wrote_does_no_harm() {
    // Other clients can write the status too.
    for (next, pause, again) in
        [("9999-12-30T21:59:00Z", Some(300), [Some(300), Some(10)]), ("0001-01-01T00:00:00Z", None, [Some(300), None])]
    {
        for ((count, uid), again) in [(u32::MAX, "another"), (0, "Pod-apple")].into_iter().zip(again) {
            let vm = vm(|vm| vm["status"] = json!({ "retry": { "count": count, "podUid": uid, "next": next } }));
            let plan_of = |phase: &'static str| {
                let observed = cluster(&vm, on_pod(move |pod| pod["status"] = json!({ "phase": phase })));
                plan(&vm, &observed, Some(&rendered(&vm, &observed)))
            };
            assert_eq!(plan_of("Running").requeue_after, pause.map(Duration::from_secs), "{next} {count}");
            let ended = plan_of("Failed");
            assert_eq!(ended.requeue_after, again.map(Duration::from_secs), "{next} {count}");
            assert_eq!(ended.steps.concat().is_empty(), again.is_some(), "{next} {count}");
        }
    }
}

#[test]
fn several_ended_pods_wait_for_the_same_time() {
    let mut objects = rendered(&vm(|_| ()), &nothing());
    let mut second = objects.iter().find(|object| object.key.is_pod()).unwrap().clone();
    second.key.name = "second".into();
    Arc::make_mut(&mut second.value)["metadata"]["name"] = json!("second");
    objects.push(second);
    let observed = applied(&objects, on_pod(|pod| pod["status"] = json!({ "phase": "Failed" })));
    let mut status = json!({});
    let mut retries = Vec::new();
    for _ in 0..3 {
        let vm = vm(|vm| vm["status"] = status.clone());
        let plan = plan(&vm, &observed, Some(&objects));
        status = json!({ "retry": plan.retry });
        retries.push(plan.retry);
    }
    assert_eq!(retries[0].as_ref().map(|retry| retry.count), Some(1));
    assert!(retries.windows(2).all(|pair| pair[0] == pair[1]), "{retries:?}");
}

#[test]
fn other_runtime_objects_do_not_change_the_retry_of_an_ended_pod() {
    let mut objects = rendered(&vm(|_| ()), &nothing());
    let mut helper = objects.iter().find(|object| object.key.kind == "ConfigMap").unwrap().clone();
    helper.lifetime = Lifetime::Running;
    helper.key.name = "helper".into();
    Arc::make_mut(&mut helper.value)["metadata"]["name"] = json!("helper");
    objects.push(helper.clone());
    objects.insert(0, Rendered { key: ObjectKey { name: "another".into(), ..helper.key.clone() }, ..helper });
    let observed = applied(&objects, |kind, object| {
        if kind == "Pod" {
            object["status"] = json!({ "phase": "Failed" });
        }
    });
    // With an earlier retry of a minute ago, and of an hour ago.
    for next in ["2027-01-15T07:59:00Z", "2027-01-15T07:00:00Z"] {
        let vm = vm(|vm| vm["status"] = json!({ "retry": { "count": 3, "podUid": "another", "next": next } }));
        let plan = plan(&vm, &observed, Some(&objects));
        assert_eq!(plan.retry.map(|retry| retry.count), Some(4), "{next}");
        assert_eq!(plan.requeue_after, Some(Duration::from_secs(80)), "{next}");
    }
}

#[test]
fn an_ended_pod_is_kept_while_a_claim_that_it_mounts_is_being_deleted() {
    let decide = |is_deleting: bool, name: &'static str, pod: &'static str| {
        let vm = vm(|vm| {
            vm["status"] = json!({ "retry": { "count": 1, "podUid": "Pod-apple", "next": "2000-01-01T00:00:00Z" } })
        });
        let ended = |object: &mut Value| {
            (object["status"], object["metadata"]["name"]) = (json!({ "phase": "Failed" }), json!(pod));
        };
        let mut observed = cluster(&vm, on_pod(ended));
        for claim in observed.objects.iter_mut().filter(|object| object.key.is_claim() && object.key.name == name) {
            Arc::make_mut(claim).deleting = is_deleting.then(noon);
        }
        let plan = plan(&vm, &observed, Some(&rendered(&vm, &observed)));
        short(&plan).iter().any(|action| action.contains("delete Pod"))
    };
    for claim in ["apple-core-disk", "apple-runner-data"] {
        // The second one is of templates that named it otherwise.
        for pod in ["apple", "apple-vm"] {
            assert!(decide(false, claim, pod), "{claim} {pod}");
            assert!(!decide(true, claim, pod), "{claim} {pod}: it would be gone with the Pod");
        }
    }
}
