use serde_json::{Value, json};

use super::*;
use crate::{
    assignment::{Start, Write},
    test_support::{noon, vm},
};

fn pools(rules: &[(&str, Value)]) -> Pools {
    let pool = |name: &str, reset: &Value| {
        let pool = json!({ "metadata": { "name": name }, "spec": { "retention": "PT1H", "reset": reset } });
        Pool::read(&serde_json::from_value(pool).unwrap())
    };
    rules.iter().map(|(name, reset)| ((*name).to_owned(), pool(name, reset))).collect()
}

fn desks(reset: Value) -> Pools {
    pools(&[("desks", reset)])
}

fn disk(name: &str, spec: Value) -> Value {
    json!({ "volumeClaimTemplate": { "metadata": { "name": name }, "spec": spec } })
}

fn snapshot() -> Value {
    json!({ "dataSource": { "apiGroup": "snapshot.storage.k8s.io", "kind": "VolumeSnapshot", "name": "golden" } })
}

/// The VM apple of the pool desks with the disk core, which comes from a snapshot.
fn member(down: Down, edit: impl FnOnce(&mut Value)) -> Member {
    let vm = vm(|vm| {
        vm["metadata"]["creationTimestamp"] = json!("2026-11-01T00:00:00Z");
        vm["spec"]["pools"] = json!(["desks"]);
        vm["spec"]["vm"]["disks"] = json!([disk("core", snapshot())]);
        edit(vm);
    });
    Member::new(&vm, Start::Needed, down)
}

fn with(down: Down, done: Value) -> Member {
    member(down, |vm| vm["status"] = json!({ "diskReset": done }))
}

fn fresh(volumes: &[&str]) -> Value {
    json!({ "state": "Fresh", "covers": volumes })
}

#[test]
fn the_first_line_that_fits_a_vm() {
    let wants = desks(json!({}));
    let follows = |member: &Member| look(member, &wants);
    let renewing =
        || json!({ "state": "Renewing", "covers": ["core-disk"], "disks": [{ "volume": "core-disk", "number": 2 }] });
    let made =
        |claim: Value| member(Down::Yes, |vm| vm["status"] = json!({ "diskReset": renewing(), "claims": [claim] }));
    let held = |done: Value| {
        member(Down::Needed, |vm| {
            vm["status"] = json!({ "diskReset": done, "assignment": { "pool": "desks", "user": "ann" } });
        })
    };
    let at_console = |done: Value| {
        member(Down::Needed, |vm| {
            let connected = json!({ "type": "ConsoleConnected", "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2026-11-26T07:30:00Z" });
            vm["status"] = json!({ "diskReset": done, "conditions": [connected] });
        })
    };
    let deleted = member(Down::Needed, |vm| vm["metadata"]["deletionTimestamp"] = json!("2026-11-26T07:30:00Z"));
    for (what, member, expected) in [
        ("deleted", deleted, Standing::Rest),
        ("assigned by a program that does not know resets", held(fresh(&["core-disk"])), Standing::Do(Step::Mark)),
        ("assigned", held(json!({})), Standing::Rest),
        ("fresh", with(Down::Needed, fresh(&["core-disk"])), Standing::Rest),
        ("fresh, but another disk", with(Down::Needed, fresh(&["data-disk"])), Standing::Do(Step::Stop)),
        ("at the console", at_console(json!({})), Standing::Waits(Wait::Console)),
        ("fresh, at the console", at_console(fresh(&["core-disk"])), Standing::Rest),
        ("runs", with(Down::Needed, json!({})), Standing::Do(Step::Stop)),
        ("Git runs it", with(Down::Refused, json!({})), Standing::Cannot(Obstacle::Git)),
        ("is being stopped", with(Down::Stopping, json!({})), Standing::Waits(Wait::Stop)),
        ("is down", with(Down::Yes, json!({})), Standing::Do(Step::Renew)),
        ("was started again meanwhile", with(Down::Needed, renewing()), Standing::Do(Step::Stop)),
        ("no claim yet", with(Down::Yes, renewing()), Standing::Waits(Wait::Claims)),
        ("the old claim", made(json!({ "name": "apple-core-disk", "uid": "u" })), Standing::Waits(Wait::Claims)),
        ("a claim to be made", made(json!({ "name": "apple-core-disk-2" })), Standing::Waits(Wait::Claims)),
        ("the new claim", made(json!({ "name": "apple-core-disk-2", "uid": "u" })), Standing::Do(Step::Finish)),
    ] {
        assert_eq!(follows(&member), expected, "{what}");
        assert_eq!(member.is_clean(&wants), what.starts_with("fresh") && !what.contains("another"), "{what}");
        assert!(member.is_clean(&desks(json!(null))) && member.is_clean(&Pools::new()), "no pool resets it");
    }
}

#[test]
fn a_disk_that_can_not_be_reset_has_a_name_and_its_vm_is_nobodys() {
    let cannot = |reset: Value, disks: Value| {
        let member = member(Down::Yes, |vm| {
            vm["spec"]["vm"]["disks"] = disks;
            vm["status"] = json!({ "diskReset": fresh(&["core-disk", "data-disk", "disk-0"]) });
        });
        let pools = desks(reset);
        match look(&member, &pools) {
            Standing::Cannot(obstacle) => {
                assert!(!member.is_clean(&pools));
                Some(obstacle)
            }
            _ => None,
        }
    };
    let two = || json!([disk("core", snapshot()), disk("data", json!({}))]);
    let no_source = |name: &str| Some(Obstacle::NoSource(name.into()));
    assert_eq!(cannot(json!({}), two()), no_source("data"));
    assert_eq!(cannot(json!({ "disks": ["core"] }), two()), None);
    assert_eq!(cannot(json!({ "disks": ["core", "data"] }), two()), None, "by its name it comes back empty");
    assert_eq!(cannot(json!({ "disks": ["cores"] }), two()), Some(Obstacle::NoDisk("cores".into())));
    let unnamed = json!([{ "volumeClaimTemplate": { "spec": {} } }]);
    assert_eq!(cannot(json!({}), unnamed.clone()), no_source("disk-0"));
    assert_eq!(cannot(json!({ "disks": ["disk-0"] }), unnamed), None);
    let pinned = json!([disk("core", json!({ "volumeName": "pv-1", "dataSourceRef": { "kind": "A", "name": "b" } }))]);
    assert_eq!(cannot(json!({}), pinned), Some(Obstacle::Pinned("core".into())));
    assert_eq!(cannot(json!({}), json!([{ "cdrom": { "image": "" } }])), None);
    let mut unreadable = member(Down::Yes, |_| ());
    unreadable.reset.disks = None;
    assert_eq!(look(&unreadable, &desks(json!({}))), Standing::Cannot(Obstacle::Unreadable));
}

#[test]
fn a_vm_of_several_pools_is_reset_as_all_of_them_want() {
    let two = member(Down::Yes, |vm| {
        vm["spec"]["pools"] = json!(["a", "b", "c"]);
        vm["spec"]["vm"]["disks"] = json!([disk("core", snapshot()), disk("data", json!({})), disk("x", json!({}))]);
    });
    let rules = |a: Value, b: Value| pools(&[("a", a), ("b", b), ("c", json!(null))]);
    let named = rules(json!({ "disks": ["core"], "oldClaims": "Delete" }), json!({ "disks": ["data"] }));
    assert_eq!(two.disks_to_reset(&named), Ok(Some(BTreeSet::from(["core-disk", "data-disk"]))));
    assert!(!two.deletes_claims(&named), "one of them keeps claims");
    assert!(two.deletes_claims(&rules(json!({ "oldClaims": "Delete" }), json!(null))));
    let all = rules(json!({}), json!({ "disks": ["data", "x"] }));
    assert_eq!(two.disks_to_reset(&all), Ok(Some(BTreeSet::from(["core-disk", "data-disk", "x-disk"]))));
    assert_eq!(two.disks_to_reset(&Pools::new()), Ok(None));
}

fn claim(name: &str, created: &str, vm: Option<&str>) -> Claim {
    let created = Some(format!("2026-11-{created}T00:00:00Z").parse().unwrap());
    Claim { name: name.into(), uid: format!("uid-{name}"), created, vm: vm.map(str::to_owned) }
}

#[test]
fn a_disk_gets_the_number_after_all_that_exist() {
    let number = |edit: &dyn Fn(&mut Value), claims: &[Claim]| {
        let member = member(Down::Yes, |vm| edit(vm));
        let done = renewed(&member, &desks(json!({})), claims);
        assert_eq!((done.state, &done.covers[..]), (Some(ResetState::Renewing), &["core-disk".to_owned()][..]));
        assert_eq!(done.replaced, [], "claims are kept");
        done.number("core-disk")
    };
    let has_run = |vm: &mut Value| vm["status"] = json!({ "podUid": "p" });
    let recorded = |vm: &mut Value| {
        vm["status"] = json!({ "podUid": "p", "diskReset": { "disks": [{ "volume": "core-disk", "number": 4 }] } });
    };
    let own = |name: &str, created: &str| claim(name, created, Some("apple"));
    // Nobody has used the disks of a VM whose guest has never run, unless the claim is older than the VM.
    assert_eq!(number(&|_| (), &[]), 0);
    assert_eq!(number(&|_| (), &[own("apple-core-disk", "01")]), 0);
    assert_eq!(number(&|_| (), &[own("apple-core-disk", "01"), own("pear-core-disk", "01")]), 0);
    assert_eq!(number(&|_| (), &[claim("apple-core-disk", "02", None)]), 1, "a person has made it");
    assert_eq!(number(&|_| (), &[Claim { created: None, ..own("apple-core-disk", "01") }]), 1);
    let older = Claim { created: Some("2026-10-31T23:59:59Z".parse().unwrap()), ..own("apple-core-disk", "01") };
    assert_eq!(number(&|_| (), &[older]), 1, "an earlier VM of the name had it");
    assert_eq!(number(&has_run, &[own("apple-core-disk", "01")]), 1);
    assert_eq!(number(&has_run, &[]), 1, "a claim that was deleted is not made again under its name");
    assert_eq!(number(&has_run, &[own("core-disk-apple-0", "01")]), 1);
    assert_eq!(number(&has_run, &[own("apple-core-disk-7", "02"), own("apple-core-disk", "01")]), 8);
    assert_eq!(number(&has_run, &[claim("apple-core-disk-9", "02", None)]), 10, "not one of another's");
    assert_eq!(number(&recorded, &[own("apple-core-disk", "01")]), 5);
    assert_eq!(number(&recorded, &[]), 5, "never back to a number that was used");
}

#[test]
fn only_the_claim_that_was_replaced_is_deleted_if_it_is_the_vms_own() {
    let wants = desks(json!({ "oldClaims": "Delete" }));
    let used = member(Down::Yes, |vm| {
        vm["status"] = json!({ "podUid": "p", "diskReset": { "disks": [{ "volume": "core-disk", "number": 2 }] } })
    });
    let claims = [
        claim("apple-core-disk", "01", Some("apple")),
        claim("apple-core-disk-2", "02", Some("apple")),
        claim("apple-data-disk-2", "02", Some("apple")),
    ];
    let done = renewed(&used, &wants, &claims);
    assert_eq!(json!(done.replaced), json!([{ "name": "apple-core-disk-2", "uid": "uid-apple-core-disk-2" }]));
    assert_eq!(done.number("core-disk"), 3);
    let others = renewed(
        &used,
        &wants,
        &[claim("apple-core-disk-2", "02", Some("pear")), claim("apple-core-disk-1", "02", None)],
    );
    assert_eq!((others.replaced, others.disks[0].number), (vec![], 3));

    let after = |done: &DiskReset| with(Down::Yes, json!(done));
    let deletable = |done: &DiskReset, claim: &Claim| may_be_deleted(&after(done), claim);
    assert_eq!(claims.iter().filter(|claim| deletable(&done, claim)).count(), 1);
    assert!(deletable(&done, &claims[1]));
    assert!(!deletable(&done, &Claim { uid: "another".into(), ..claims[1].clone() }), "a later one of the name");
    assert!(!deletable(&done, &Claim { vm: Some("pear".into()), ..claims[1].clone() }));
    assert!(!deletable(&done, &Claim { vm: None, ..claims[1].clone() }));
    let back = DiskReset { disks: vec![DiskNumber { volume: "core-disk".into(), number: 2 }], ..done.clone() };
    assert!(!deletable(&back, &claims[1]), "it is in use");

    let finished = DiskReset { state: Some(ResetState::Fresh), ..done };
    assert_eq!(look(&after(&finished), &wants), Standing::Do(Step::Delete));
    assert_eq!(look(&after(&finished), &desks(json!({}))), Standing::Rest, "now the pool keeps claims");
}

#[test]
fn an_assignment_ends_freshness_in_the_same_write() {
    let patch = |write: &Write| write.patch()["status"]["diskReset"].clone();
    let member = with(Down::Yes, fresh(&["core-disk"]));
    let wants = desks(json!({}));
    let who = crate::assignment::Assignee { user: "ann".into(), rights: crate::people::Rights::all() };
    let taken = crate::assignment::assign("desks", &wants, std::slice::from_ref(&member), &who, noon()).unwrap();
    let crate::assignment::Step::Take(write) = taken else { panic!("{taken:?}") };
    assert_eq!(patch(&write), json!({ "state": null }));
    assert_eq!(patch(&Write { ends_fresh: false, ..write }), Value::Null);
    let dirty = with(Down::Yes, json!({}));
    let refused = crate::assignment::assign("desks", &wants, &[dirty], &who, noon()).unwrap_err();
    assert_eq!(refused.to_string(), "all 1 VMs of the pool are in use; 1 are being reset");
}

#[test]
fn the_condition_says_what_is_in_the_way() {
    let wants = desks(json!({}));
    let said = |members: &[Member], refusal: Option<&str>| {
        let condition = condition(&wants["desks"], &wants, members, refusal, &[], noon()).unwrap();
        format!("{} {}: {}", condition.status, condition.reason, condition.message)
    };
    let runs = || with(Down::Needed, json!({}));
    assert_eq!(
        said(&[with(Down::Needed, fresh(&["core-disk"]))], None),
        "True Fresh: the VMs that are assigned to nobody have fresh disks"
    );
    assert_eq!(said(&[runs()], None), "False Progressing: being reset: apple");
    assert_eq!(said(&[runs()], Some("forbidden")), "False Refused: forbidden; being reset: apple");
    let blank = member(Down::Yes, |vm| vm["spec"]["vm"]["disks"] = json!([disk("data", json!({}))]));
    let many: Vec<_> = (0..7).map(|_| runs()).chain([blank, with(Down::Refused, json!({}))]).collect();
    assert_eq!(
        said(&many, None),
        "False CannotReset: nobody gets these VMs, because their disks can't be reset: apple: its disk data has no dataSource: give it one, or \
         name in spec.reset.disks the disks to reset, of which one without a dataSource comes back empty; nobody gets these VMs: apple: Git says \
         that it runs, so it can't be stopped: remove spec.vm.state there; being reset: apple, apple, apple, apple, apple and 2 more"
    );
    let keeps = desks(json!(null));
    assert_eq!(condition(&keeps["desks"], &keeps, &many, None, &[], noon()), None);
}
