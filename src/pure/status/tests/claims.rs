//! What the status and the events say about claims.

use super::*;

#[test]
fn storage_is_not_ready_while_a_claim_is_missing() {
    let storage = |missing: &'static str| {
        let mut observed = cluster(|kind, object| {
            if kind == "PersistentVolumeClaim" {
                object["status"]["phase"] = json!("Bound");
            }
        });
        observed.objects.retain(|object| object.key.name != missing);
        let status = derive(&vm(|_| ()), &observed);
        let conditions = status["conditions"].as_array().unwrap();
        let storage = conditions.iter().find(|item| item["type"] == "StorageReady").unwrap();
        ["status", "reason", "message"].map(|field| string(&storage[field])).join(" ")
    };
    assert_eq!(storage("another"), "True ClaimsBound ");
    assert_eq!(
        storage("apple-core-disk"),
        "False ClaimPending claim apple-core-disk has no volume yet; kubectl describe pvc apple-core-disk says why"
    );
    assert_eq!(
        storage("apple-runner-data"),
        "False ClaimPending claim apple-runner-data has no volume yet; kubectl describe pvc apple-runner-data says why"
    );
}

#[test]
fn each_finding_about_a_claim_has_a_reason_and_a_message() {
    let apple = vm(|vm| {
        let template = &mut vm["spec"]["vm"]["disks"][0]["volumeClaimTemplate"];
        template["spec"]["accessModes"] = json!(["ReadWriteOncePod"]);
    });
    let with = |change: fn(&mut Value)| {
        let observed = cluster(|kind, object| {
            if kind == "PersistentVolumeClaim" {
                object["status"]["phase"] = json!("Bound");
                if object["metadata"]["name"] == "apple-core-disk" {
                    object["spec"]["accessModes"] = json!(["ReadWriteOncePod"]);
                    change(object);
                }
            }
        });
        let status = derive(&apple, &observed);
        let conditions = status["conditions"].as_array().unwrap();
        let storage = conditions.iter().find(|condition| condition["type"] == "StorageReady").unwrap();
        [&storage["reason"], &storage["message"]].map(|text| text.as_str().unwrap().to_owned())
    };
    assert_eq!(with(|_| ())[0], "ClaimsBound");
    // The spec does not set the field.
    assert_eq!(with(|claim| claim["spec"]["volumeMode"] = json!("Filesystem"))[0], "ClaimsBound");
    for (change, reason, message) in [
        (
            (|claim| claim["status"]["phase"] = json!("Lost")) as fn(&mut Value),
            "ClaimLost",
            "claim apple-core-disk has lost its volume",
        ),
        (
            |claim| claim["status"] = json!({}),
            "ClaimPending",
            "claim apple-core-disk has no volume yet; kubectl describe pvc apple-core-disk says why",
        ),
        (
            |claim| claim["spec"]["accessModes"] = json!(["ReadWriteMany"]),
            "ChangeRefused",
            "claim apple-core-disk keeps its accessModes: that can't be changed in a claim that exists",
        ),
        (
            |claim| claim["spec"]["resources"]["requests"]["storage"] = json!("2Gi"),
            "ShrinkRefused",
            "claim apple-core-disk keeps its 2Gi: a volume can't shrink to 1Gi",
        ),
        (
            |claim| claim["status"]["capacity"] = json!({ "storage": "512Mi" }),
            "Resizing",
            "claim apple-core-disk is growing to 1Gi",
        ),
    ] {
        assert_eq!(with(change), [reason, message]);
    }
}

#[test]
fn each_finding_about_a_claim_causes_one_event() {
    let apple = |status: Value| {
        vm(|vm| {
            let disk = vm["spec"]["vm"]["disks"][0].clone();
            vm["spec"]["vm"]["disks"] = json!([disk.clone(), disk]);
            vm["spec"]["vm"]["disks"][1]["volumeClaimTemplate"]["metadata"]["name"] = json!("data");
            vm["status"] = status;
        })
    };
    let smaller = |claims: &'static [&str]| {
        applied(&rendered(&apple(Value::Null), &nothing()), move |kind, object| {
            if kind == "PersistentVolumeClaim" {
                object["status"]["phase"] = json!("Bound");
                if claims.iter().any(|claim| object["metadata"]["name"] == *claim) {
                    object["spec"]["resources"]["requests"]["storage"] = json!("2Gi");
                }
            }
        })
    };
    let shrink_events = |vm: &VirtualMachine, observed: &Observed| {
        let (wanted, events) = reconcile(vm, observed, false);
        let events = events.into_iter().filter(|event| event.reason == Reason::ShrinkRefused);
        (events.map(|event| event.note).collect(), json!(wanted))
    };
    let note = |claim: &str| format!("claim apple-{claim}-disk keeps its 2Gi: a volume can't shrink to 1Gi");
    let mut before = Value::Null;
    for (claims, expected) in [
        (&["apple-core-disk"][..], vec![note("core")]),
        (&["apple-core-disk"], vec![]),
        (&["apple-core-disk", "apple-data-disk"], vec![note("data")]),
        (&["apple-data-disk"], vec![]),
    ] {
        let (notes, status): (Vec<String>, Value) = shrink_events(&apple(before), &smaller(claims));
        assert_eq!(notes, expected, "{claims:?}");
        before = status;
    }
}

#[test]
fn the_event_about_a_missing_claim_says_what_to_do_with_its_uid() {
    let known = vm(|vm| vm["status"] = json!({ "claims": [{ "name": "apple-core-disk", "uid": "lost-uid" }] }));
    let mut observed = cluster(|_, _| ());
    observed.objects.retain(|object| object.key.name != "apple-core-disk");
    let (status, events) = reconcile(&known, &observed, false);
    let storage = conditions::find(&status.conditions, "StorageReady").unwrap();
    let is_about_the_claim = |event: &&Event| event.note.starts_with("claim apple-core-disk ");
    let event = events.iter().find(is_about_the_claim).unwrap();
    assert_eq!(event.reason, Reason::ClaimMissing);
    assert!(event.note.contains("replaceClaim: lost-uid; "), "{}", event.note);
    assert!(storage.message.contains(&event.note), "{}", storage.message);
}
