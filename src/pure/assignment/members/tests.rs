//! The tables at the head of [`members`](super).

use k8s_openapi::jiff::SignedDuration;
use serde_json::{Value, json};

use super::*;
use crate::{
    api::VirtualMachine,
    assignment::{
        Assignee, NotAssigned, Pools, Start, Step, Write, assign,
        upkeep::{Why, upkeep},
    },
    ownership::MEMBER_MANAGER,
    people::Rights,
    test_support::{noon, vm},
};

/// The pool `desk`, which wants so many VMs.
fn pool(edit: impl FnOnce(&mut Value)) -> Pool {
    let mut pool = json!({
        "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool",
        "metadata": { "name": "desk", "uid": "u-desk", "generation": 4 },
        "spec": {
            "retention": "PT1H", "replicas": 2,
            "template": {
                "metadata": { "labels": { "team": "a" } },
                "spec": { "pools": ["night"], "vm": { "maximumCpus": 2, "state": "Running" } },
            },
        },
    });
    edit(&mut pool);
    Pool::read(&serde_json::from_value(pool).unwrap())
}

fn wants(replicas: Value) -> Pool {
    pool(|pool| pool["spec"]["replicas"] = replicas)
}

/// A VM as the API server has it after the template of the pool was applied.
fn stored(pool: &Pool, name: &str, edit: impl FnOnce(&mut Value)) -> VirtualMachine {
    let template = pool.template.as_ref().unwrap();
    vm(|vm| {
        let applied = template.vm(&pool.name, pool.uid.as_deref(), name, pool.reset.is_some());
        vm["metadata"] = applied["metadata"].clone();
        vm["metadata"]["namespace"] = json!("ns");
        vm["metadata"]["uid"] = json!(format!("u-{name}"));
        vm["metadata"]["resourceVersion"] = json!("7");
        vm["metadata"]["creationTimestamp"] = json!("2027-01-15T06:00:00Z");
        vm["metadata"]["managedFields"] = json!([{
            "manager": MEMBER_MANAGER, "operation": "Apply", "time": "2027-01-15T06:00:00Z",
            "fieldsV1": { "f:metadata": { "f:labels": { "f:vmoperator.jdrupes.org/pool": {} } } },
        }]);
        vm["spec"]["pools"] = applied["spec"]["pools"].clone();
        edit(vm);
    })
}

fn made(pool: &Pool, name: &str, edit: impl FnOnce(&mut Value)) -> Member {
    Member::new(&stored(pool, name, edit), Start::Needed)
}

fn is_held(vm: &mut Value) {
    vm["status"] = json!({ "assignment": { "pool": "desk", "user": "ann", "lastUsed": "2027-01-15T07:59:30Z" } });
}

fn is_watched(vm: &mut Value) {
    let condition = json!({
        "type": "ConsoleConnected", "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2027-01-15T07:30:00Z",
    });
    vm["status"] = json!({ "conditions": [condition] });
}

/// What is done, in short.
fn done(pool: &Pool, members: &[Member], others: &[&str]) -> Vec<String> {
    let others = others.iter().map(|name| (*name).to_owned()).collect();
    let mut names = (0..).map(|number| format!("{number:08x}"));
    let plan = plan(pool, members, &others, || names.next().unwrap()).unwrap();
    let writes = plan.writes.iter().map(|write| match write {
        MemberWrite::Create(vm) => format!("create {vm}"),
        MemberWrite::Update { vm, version } => format!("update {vm} {}", version.as_deref().unwrap_or("-")),
        MemberWrite::Delete { vm, uid, version } => {
            format!("delete {vm} {} {}", uid.as_deref().unwrap_or("-"), version.as_deref().unwrap_or("-"))
        }
    });
    let obstacles = plan.obstacles.iter().map(|obstacle| match obstacle {
        Obstacle::NameTaken { vm } => format!("taken {vm}"),
        Obstacle::Ending { vm } => format!("ends {vm}"),
        Obstacle::OutOfPool { vm } => format!("out {vm}"),
        Obstacle::Preparing { vm } => format!("prepares {vm}"),
        Obstacle::OldDisks { vm } => format!("old {vm}"),
        Obstacle::Stranger { vm } => format!("stranger {vm}"),
        Obstacle::InUse { vm, is_surplus } => format!("{} {vm}", if *is_surplus { "leaves" } else { "waits" }),
    });
    writes.chain(obstacles).collect()
}

#[test]
fn a_vm_is_made_from_the_template_without_a_power_state() {
    let pool = pool(|_| ());
    let template = pool.template.as_ref().unwrap();
    assert_eq!(
        template.vm("desk", Some("u-desk"), "desk-0", false),
        json!({
            "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VirtualMachine",
            "metadata": {
                "name": "desk-0",
                "labels": { "team": "a", "vmoperator.jdrupes.org/pool": "desk" },
                "annotations": { "vmoperator.jdrupes.org/poolTemplate": template.hash },
                "ownerReferences": [{
                    "apiVersion": "vmoperator.jdrupes.org/v1", "kind": "VmPool", "name": "desk", "uid": "u-desk", "controller": true,
                }],
            },
            "spec": { "pools": ["desk", "night"], "vm": { "maximumCpus": 2 } },
        })
    );
    let other = |edit: fn(&mut Value)| super::tests::pool(edit).template.unwrap().hash;
    assert_eq!(other(|pool| pool["spec"]["replicas"] = json!(7)), template.hash);
    assert_ne!(other(|pool| pool["spec"]["template"]["spec"]["vm"]["maximumCpus"] = json!(4)), template.hash);
    assert_ne!(other(|pool| pool["spec"]["template"]["metadata"]["labels"]["team"] = json!("b")), template.hash);
}

#[test]
fn what_is_done_for_a_vm_that_the_pool_wants() {
    let desk = pool(|_| ());
    let changed = |edit: fn(&mut Value)| {
        move |vm: &mut Value| {
            vm["metadata"]["annotations"]["vmoperator.jdrupes.org/poolTemplate"] = json!("former");
            edit(vm);
        }
    };
    let orphan = |vm: &mut Value| drop(vm["metadata"].as_object_mut().unwrap().remove("ownerReferences"));
    let of = |uid: &'static str| move |vm: &mut Value| vm["metadata"]["ownerReferences"][0]["uid"] = json!(uid);
    let first =
        |edit: &dyn Fn(&mut Value)| done(&desk, &[made(&desk, "desk-0", edit), made(&desk, "desk-1", |_| ())], &[]);
    let cases: [(&str, Vec<String>, &[&str]); 13] = [
        ("there is none", done(&desk, &[], &[]), &["create desk-0", "create desk-1"]),
        ("a VM without a pool", done(&desk, &[], &["desk-1"]), &["create desk-0", "taken desk-1"]),
        ("all is well", first(&|_| ()), &[]),
        ("all is well, and it is used", first(&is_held), &[]),
        ("of another owner", first(&of("u-other")), &["taken desk-0"]),
        ("of nobody", first(&|vm| vm["metadata"] = json!({ "name": "desk-0" })), &["taken desk-0"]),
        ("it lost its owner", first(&orphan), &["update desk-0 7"]),
        ("of a former template", first(&changed(|_| ())), &["update desk-0 7"]),
        ("of a former template, held", first(&changed(is_held)), &["waits desk-0"]),
        ("of a former template, at the console", first(&changed(is_watched)), &["waits desk-0"]),
        (
            "being deleted",
            first(&changed(|vm| vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z"))),
            &["ends desk-0"],
        ),
        ("taken out of the pool", first(&changed(|vm| vm["spec"]["pools"] = json!(["night"]))), &["out desk-0"]),
        ("hand-edited", first(&|vm| vm["spec"]["vm"]["maximumCpus"] = json!(9)), &[]),
    ];
    for (what, found, wanted) in cases {
        assert_eq!(found, wanted, "{what}");
    }
}

#[test]
fn what_is_done_with_more_vms_than_the_pool_wants() {
    let desk = |number: u32, edit: fn(&mut Value)| made(&pool(|_| ()), &format!("desk-{number}"), edit);
    let members = [
        desk(0, |_| ()),
        desk(1, is_held),
        desk(2, is_watched),
        desk(3, |_| ()),
        desk(4, |vm| vm["spec"]["pools"] = json!([])),
        desk(5, |vm| vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z")),
        desk(10, |_| ()),
        // These are not the pool's.
        made(&pool(|_| ()), "desk-07", |_| ()),
        made(&pool(|_| ()), "desk-x", |_| ()),
        made(&pool(|_| ()), "desktop-8", |_| ()),
        desk(9, |vm| vm["metadata"]["ownerReferences"][0]["uid"] = json!("u-other")),
    ];
    let all =
        ["delete desk-10 u-desk-10 7", "delete desk-3 u-desk-3 7", "out desk-4", "leaves desk-2", "leaves desk-1"];
    assert_eq!(done(&wants(json!(1)), &members, &[]), all);
    assert_eq!(done(&wants(json!(0)), &members[..1], &[]), ["delete desk-0 u-desk-0 7"]);
    // Without a number none is made or deleted.
    assert_eq!(done(&wants(Value::Null), &members, &[]), ["out desk-4", "ends desk-5"]);
    let deleted = pool(|pool| {
        pool["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
        pool["spec"]["replicas"] = json!(1);
    });
    assert!(done(&deleted, &members, &[]).is_empty() && done(&deleted, &[], &[]).is_empty());
    let without = pool(|pool| drop(pool["spec"].as_object_mut().unwrap().remove("template")));
    assert_eq!(plan(&without, &members, &BTreeSet::new(), String::new), None);
}

/// The pool with `spec.reset`.
fn fresh(edit: impl FnOnce(&mut Value)) -> Pool {
    pool(|pool| {
        pool["spec"]["reset"] = json!({});
        edit(pool);
    })
}

/// All its claims exist, and none is older than the VM.
fn is_new(vm: &mut Value) {
    vm["status"]["newDisks"] = json!({ "vmUid": vm["metadata"]["uid"] });
}

fn is_used(vm: &mut Value) {
    vm["metadata"]["annotations"].as_object_mut().unwrap().remove("vmoperator.jdrupes.org/unused");
}

fn was_assigned(vm: &mut Value) {
    is_new(vm);
    vm["status"]["usedUid"] = vm["metadata"]["uid"].clone();
}

fn has_old_disks(vm: &mut Value) {
    vm["status"]["newDisks"] = json!({ "vmUid": vm["metadata"]["uid"], "others": ["a"] });
}

fn is_of_a_former_template(vm: &mut Value) {
    vm["metadata"]["annotations"]["vmoperator.jdrupes.org/poolTemplate"] = json!("former");
}

fn is_ending(vm: &mut Value) {
    vm["metadata"]["deletionTimestamp"] = json!("2027-01-15T08:00:00Z");
}

type Edit = fn(&mut Value);

#[test]
fn a_vm_that_somebody_had_is_replaced_by_one_of_a_name_that_none_had() {
    let desk = fresh(|_| ());
    let of = |edits: &[Edit]| {
        let members: Vec<_> = "abcdef"
            .chars()
            .zip(edits)
            .map(|(digit, edit)| made(&desk, &format!("desk-{}", String::from(digit).repeat(8)), *edit))
            .collect();
        done(&desk, &members, &[]).join(", ")
    };
    let held: Edit = |vm| (is_used(vm), is_held(vm)).1;
    let watched: Edit = |vm| (is_used(vm), is_watched(vm)).1;
    let former: Edit = |vm| (is_new(vm), is_of_a_former_template(vm)).1;
    let out: Edit = |vm| (is_used(vm), vm["spec"]["pools"] = json!(["night"])).1;
    let cases: [(&str, &[Edit], &str); 16] = [
        ("there is none", &[], "create desk-00000000, create desk-00000001"),
        ("all is well", &[is_new, is_new], ""),
        ("somebody has one", &[held, is_new], ""),
        ("somebody is at the console of one", &[watched, is_new], ""),
        ("somebody had one", &[is_used, is_new], "delete desk-aaaaaaaa u-desk-aaaaaaaa 7"),
        ("it ends", &[is_ending, is_new], "ends desk-aaaaaaaa"),
        ("it is gone", &[is_new], "create desk-00000000"),
        ("its claims are not there", &[|_| (), is_new], "prepares desk-aaaaaaaa"),
        ("it is of a backup", &[has_old_disks, is_new], "old desk-aaaaaaaa"),
        ("it is out of the pool", &[out, is_new], "out desk-aaaaaaaa"),
        ("another template", &[former, former], "delete desk-bbbbbbbb u-desk-bbbbbbbb 7"),
        ("another template, one is replaced already", &[former, |_| ()], "prepares desk-bbbbbbbb"),
        (
            "another template, and no disk could be made",
            &[is_of_a_former_template, is_of_a_former_template],
            "delete desk-aaaaaaaa u-desk-aaaaaaaa 7, delete desk-bbbbbbbb u-desk-bbbbbbbb 7",
        ),
        ("another template, one ends", &[former, is_ending], "ends desk-bbbbbbbb"),
        ("one is too many", &[is_new, former, is_new], "delete desk-bbbbbbbb u-desk-bbbbbbbb 7"),
        ("one is too many, and all are in use", &[held, watched, held], "leaves desk-cccccccc"),
    ];
    for (what, edits, wanted) in cases {
        assert_eq!(of(edits), wanted, "{what}");
    }
    let stranger = vm(|vm| {
        vm["metadata"]["name"] = json!("pear");
        vm["spec"]["pools"] = json!(["desk"]);
        vm["metadata"]["annotations"] = json!({ "vmoperator.jdrupes.org/unused": "true" });
    });
    assert_eq!(
        done(&fresh(|pool| pool["spec"]["replicas"] = json!(0)), &[Member::new(&stranger, Start::Needed)], &[]),
        ["stranger pear"]
    );
    // With numbers again those with other names are too many, and the other way round they have no mark.
    let numbered = made(&pool(|_| ()), "desk-0", |_| ());
    let random = made(&desk, "desk-aaaaaaaa", is_new);
    assert_eq!(
        done(&pool(|_| ()), &[numbered.clone(), random], &[]),
        ["create desk-1", "delete desk-aaaaaaaa u-desk-aaaaaaaa 7"]
    );
    assert_eq!(done(&desk, &[numbered], &[]), ["delete desk-0 u-desk-0 7", "create desk-00000000"]);
}

#[test]
fn nobody_gets_a_vm_of_a_pool_with_reset_that_somebody_had() {
    let desk = fresh(|pool| pool["spec"]["warm"] = json!(5));
    let pools = Pools::from([("desk".to_owned(), desk.clone())]);
    let bob = Assignee { user: "bob".into(), rights: Rights::all() };
    let later = noon() + SignedDuration::from_hours(9);
    let anothers: Edit = |vm| {
        is_new(vm);
        vm["metadata"]["annotations"]["vmoperator.jdrupes.org/poolTemplate"] = json!("x");
        vm["status"]["newDisks"]["vmUid"] = json!("u-of-a-former-one");
    };
    let not_given: [Edit; 7] = [
        |_| (),
        was_assigned,
        is_used,
        has_old_disks,
        anothers,
        |vm| (is_used(vm), is_held(vm)).1,
        |vm| (is_new(vm), vm["metadata"]["annotations"] = json!({})).1,
    ];
    for edit in not_given {
        let member = made(&desk, "desk-aaaaaaaa", edit);
        let found = assign("desk", &pools, std::slice::from_ref(&member), &bob, later);
        assert!(matches!(found, Err(NotAssigned::NoneFree { .. })), "{found:?} {member:?}");
        assert!(upkeep(&pools, &[member], noon()).warmed.is_empty());
    }
    let member = made(&desk, "desk-aaaaaaaa", is_new);
    let Ok(Step::Take(write)) = assign("desk", &pools, std::slice::from_ref(&member), &bob, later) else {
        panic!("bob gets none")
    };
    assert_eq!(write.patch()["status"]["usedUid"], "u-desk-aaaaaaaa", "in the same write");
    assert_eq!(upkeep(&pools, &[member], noon()).warmed, BTreeSet::from(["desk-aaaaaaaa".to_owned()]));
}

#[test]
fn the_mark_is_taken_from_a_vm_that_is_or_was_used() {
    let desk = fresh(|_| ());
    let pools = Pools::from([("desk".to_owned(), desk.clone())]);
    let expired = noon() + SignedDuration::from_hours(9);
    let marked = |edit: Edit| {
        let found = upkeep(&pools, &[made(&desk, "desk-aaaaaaaa", edit)], expired);
        (!found.used.is_empty(), found.writes.len())
    };
    assert_eq!(marked(is_new), (false, 0));
    assert_eq!(
        marked(|vm| (is_held(vm), is_new(vm)).1),
        (true, 0),
        "assigned by a program that does not know the mark"
    );
    assert_eq!(marked(|vm| (is_watched(vm), is_new(vm)).1), (true, 0));
    assert_eq!(marked(|vm| (is_new(vm), vm["status"]["consoleUser"] = json!("eve")).1), (true, 0));
    assert_eq!(marked(was_assigned), (true, 0));
    let console = |left: &str| {
        let condition = |type_: &str, status: &str, time: &str| json!({ "type": type_, "status": status, "reason": "X", "message": "", "lastTransitionTime": time });
        let conditions =
            [condition("Running", "True", "2027-01-15T07:00:00Z"), condition("ConsoleConnected", "False", left)];
        let member = made(&desk, "desk-aaaaaaaa", |vm| {
            is_new(vm);
            vm["status"]["conditions"] = json!(conditions);
        });
        member.is_to_be_marked()
    };
    assert!(!console("2027-01-15T07:00:05Z"), "the first report of the runner");
    assert!(console("2027-01-15T07:03:00Z"), "a viewer has come and gone, whoever it was");
    assert_eq!(marked(|vm| (is_new(vm), vm["spec"]["pools"] = json!([])).1), (true, 0), "out of the pool");
    assert_eq!(marked(|vm| (is_used(vm), is_held(vm)).1), (false, 1), "then it ends, without a time of grace");
}

#[test]
fn nobody_gets_a_vm_that_goes_and_none_is_started_for_it() {
    let desk = pool(|pool| {
        pool["spec"]["replicas"] = json!(1);
        pool["spec"]["warm"] = json!(5);
    });
    let members = [made(&desk, "desk-0", |_| ()), made(&desk, "desk-1", |_| ()), made(&desk, "desk-2", is_held)];
    let pools = Pools::from([("desk".to_owned(), desk.clone())]);
    let ann = |name: &str| Assignee { user: name.into(), rights: Rights::all() };
    let Ok(Step::Take(write)) = assign("desk", &pools, &members, &ann("bob"), noon()) else { panic!("bob gets none") };
    assert_eq!(write.vm, "desk-0");
    let full = assign("desk", &pools, &members[1..], &ann("bob"), noon() + SignedDuration::from_hours(9));
    assert!(matches!(full, Err(NotAssigned::NoneFree { .. })), "also when its retention is over: {full:?}");
    assert_eq!(
        assign("desk", &pools, &members, &ann("ann"), noon())
            .map(|step| matches!(step, Step::Done(vm) | Step::Start { vm, .. } if vm == "desk-2")),
        Ok(true),
        "who has one keeps it"
    );
    assert_eq!(upkeep(&pools, &members, noon()).warmed, BTreeSet::from(["desk-0".to_owned()]));
}

#[test]
fn the_condition_has_the_first_reason_and_all_sentences() {
    let desk = pool(|_| ());
    let condition = |plan: &MemberPlan, refusal: Option<&str>| {
        let Condition { type_, status, reason, message, .. } = scaled(&desk, plan, refusal, &[], noon());
        assert_eq!(type_, "Scaled");
        format!("{status} {reason}: {message}")
    };
    let name = |number: u32| format!("desk-{number}");
    let good = MemberPlan { replicas: 2, updated: 2, ..MemberPlan::default() };
    assert_eq!(condition(&good, None), "True AsWanted: 2 VMs are as the template is");
    let progress = MemberPlan { writes: vec![MemberWrite::Create(name(0))], ..MemberPlan::default() };
    assert_eq!(condition(&progress, None), "False Progressing: VMs are being made, changed or deleted");
    assert_eq!(condition(&progress, Some("create VM desk-0: no")), "False Refused: create VM desk-0: no");
    let waits = |is_surplus| move |number| Obstacle::InUse { vm: name(number), is_surplus };
    let waiting = MemberPlan { obstacles: (0..7).map(waits(true)).chain([waits(false)(9)]).collect(), ..good };
    assert_eq!(
        condition(&waiting, None),
        "False InUse: deleted when they are released: desk-0, desk-1, desk-2, desk-3, desk-4 and 2 more; \
         changed to the new template when they are released: desk-9"
    );
    let taken = MemberPlan {
        obstacles: vec![Obstacle::NameTaken { vm: name(1) }, Obstacle::OutOfPool { vm: name(2) }],
        ..MemberPlan::default()
    };
    assert_eq!(
        condition(&taken, None),
        "False NameTaken: VMs of these names exist, and are not of this pool: delete them, or give the pool another name: desk-1; \
         left as they are, because their spec.pools does not name the pool: desk-2"
    );
    let former = scaled(&desk, &progress, None, &[], noon());
    let later = noon() + SignedDuration::from_hours(1);
    assert_eq!(scaled(&desk, &taken, None, std::slice::from_ref(&former), later).last_transition_time.0, noon());
    assert_eq!(scaled(&desk, &MemberPlan::default(), None, &[former], later).last_transition_time.0, later);
}

#[test]
fn a_vm_that_the_pool_has_not_made_is_never_changed_or_deleted_whatever_it_says() {
    let desk = pool(|_| ());
    let by_a_person = |vm: &mut Value| vm["metadata"]["managedFields"][0]["manager"] = json!("kubectl-create");
    let without_owner = |vm: &mut Value| drop(vm["metadata"].as_object_mut().unwrap().remove("ownerReferences"));
    let both = |vm: &mut Value| (by_a_person(vm), without_owner(vm)).1;
    // A backup tool has brought it back with what the API server had noted.
    let restored = |vm: &mut Value| {
        without_owner(vm);
        vm["metadata"]["creationTimestamp"] = json!("2027-01-15T07:00:00Z");
    };
    let own = || [made(&desk, "desk-0", |_| ()), made(&desk, "desk-1", |_| ())];
    for copy in [&by_a_person as &dyn Fn(&mut Value), &both, &restored] {
        let members: Vec<_> = own().into_iter().chain([made(&desk, "desk-7", copy)]).collect();
        assert_eq!(done(&desk, &members, &[]), [""; 0]);
        let members = [made(&desk, "desk-0", |_| ()), made(&desk, "desk-1", copy)];
        assert_eq!(done(&desk, &members, &[]), ["taken desk-1"]);
        let reset = pool(|pool| pool["spec"]["reset"] = json!({}));
        let member = made(&reset, "desk-aaaaaaaa", copy);
        let found = done(&wants(json!(0)), &[made(&desk, "desk-0", copy)], &[]);
        assert_eq!(found, [""; 0]);
        let found = done(
            &pool(|pool| (pool["spec"]["reset"], pool["spec"]["replicas"]) = (json!({}), json!(0))),
            &[member],
            &[],
        );
        assert_eq!(found, ["stranger desk-aaaaaaaa"]);
    }
    // What `kubectl delete --cascade=orphan` leaves is the next pool's.
    let members: Vec<_> = own().into_iter().chain([made(&desk, "desk-7", without_owner)]).collect();
    assert_eq!(done(&desk, &members, &[]), ["delete desk-7 u-desk-7 7"]);
}

#[test]
fn an_assignment_from_a_former_pool_of_the_name_ends_and_one_without_a_uid_gets_it() {
    let desk = pool(|_| ());
    let pools = Pools::from([("desk".to_owned(), desk.clone())]);
    let held = |uid: Value| {
        move |vm: &mut Value| {
            let assignment = json!({ "pool": "desk", "poolUid": uid, "user": "ann", "lastUsed": "2027-01-15T07:59:30Z", "assignedAt": "2027-01-15T07:00:00Z" });
            vm["status"] = json!({ "assignment": assignment });
        }
    };
    let writes = |uid: Value| upkeep(&pools, &[made(&desk, "desk-0", held(uid))], noon()).writes;
    assert_eq!(writes(json!("u-desk")), []);
    let former = writes(json!("u-former"));
    assert!(matches!(former.as_slice(), [(Why::PoolDeleted(_), write)] if write.held.is_none()), "{former:?}");
    let unknown = writes(Value::Null);
    let noted = |write: &Write| write.held.as_ref().and_then(|held| held.pool_uid.clone());
    assert!(
        matches!(unknown.as_slice(), [(Why::Noted, write)] if noted(write).as_deref() == Some("u-desk")),
        "{unknown:?}"
    );
    // Who had a VM from the former pool has none from this one.
    let ann = Assignee { user: "ann".into(), rights: Rights::all() };
    let members = [made(&desk, "desk-0", held(json!("u-former"))), made(&desk, "desk-1", |_| ())];
    let step = assign("desk", &pools, &members, &ann, noon()).unwrap();
    assert!(
        matches!(&step, Step::Take(write) if write.vm == "desk-1" && noted(write).as_deref() == Some("u-desk")),
        "{step:?}"
    );
}
