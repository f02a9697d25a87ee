//! The tables at the heads of the modules.

use serde_json::json;

use super::{
    upkeep::{NOTED, UNFINISHED, Upkeep, Why, status, upkeep},
    *,
};
use crate::{
    api::pool::VmPoolStatus,
    test_support::{noon, vm},
};

fn minutes(number: i64) -> Timestamp {
    noon() + SignedDuration::from_mins(number)
}

fn pools(retentions: &[(&str, &str)]) -> Pools {
    let pool = |name: &str, retention: &str| {
        let pool = json!({ "metadata": { "name": name, "generation": 2 }, "spec": { "retention": retention } });
        Pool::read(&serde_json::from_value(pool).unwrap())
    };
    retentions.iter().map(|(name, retention)| ((*name).to_owned(), pool(name, retention))).collect()
}

fn hour() -> Pools {
    pools(&[("desktops", "PT1h")])
}

/// A stopped VM of the pool that is assigned to nobody.
fn member(name: &str, edit: impl FnOnce(&mut Member)) -> Member {
    let vm = vm(|vm| {
        vm["metadata"]["name"] = json!(name);
        vm["metadata"]["resourceVersion"] = json!("7");
        vm["spec"]["pools"] = json!(["desktops"]);
    });
    let mut member = Member::new(&vm, Start::Needed);
    edit(&mut member);
    member
}

fn held(user: &str, assigned: i64, used: i64) -> Held {
    Held {
        pool: Some("desktops".into()),
        pool_uid: None,
        user: user.into(),
        last_used: Some(minutes(used)),
        assigned_at: Some(minutes(assigned)),
        starts: false,
    }
}

/// A running VM that has been assigned since then and used then.
fn of(name: &str, user: &str, assigned: i64, used: i64) -> Member {
    member(name, |member| {
        member.held = Some(held(user, assigned, used));
        member.runs = true;
        member.start = Start::Runs;
    })
}

fn with(mut member: Member, edit: impl FnOnce(&mut Member)) -> Member {
    edit(&mut member);
    member
}

fn console(is_connected: bool, since: i64, user: &str) -> Console {
    Console { is_connected, since: Some(minutes(since)), users: vec![user.into()], was_used: true }
}

fn alice() -> Assignee {
    Assignee { user: "alice".into(), rights: Rights::all() }
}

fn step(pools: &Pools, members: &[Member]) -> Result<Step, NotAssigned> {
    assign("desktops", pools, members, &alice(), noon())
}

/// The screen's condition alone does not say whether somebody is there.
#[test]
fn who_is_at_the_serial_console_is_at_the_console_and_a_silent_node_takes_nothing() {
    let read = |running: &str, console: &str, serial: Value| {
        let stored = vm(|vm| {
            let condition = |type_: &str, status: &str| json!({ "type": type_, "status": status, "reason": "X", "message": "", "lastTransitionTime": "2027-01-15T07:30:00Z" });
            vm["metadata"]["annotations"] = json!({ UNUSED_ANNOTATION: "" });
            let conditions = [condition("Running", running), condition("ConsoleConnected", console)];
            vm["status"] = json!({ "serialUsers": serial, "conditions": conditions });
        });
        let Member { console, used, .. } = Member::new(&stored, Start::Runs);
        (console.is_connected, console.users, used)
    };
    let nobody: Vec<String> = Vec::new();
    assert_eq!(read("True", "False", json!(["ann"])), (true, vec!["ann".into()], Use::Used));
    assert_eq!(read("False", "False", json!(["ann"])), (false, nobody.clone(), Use::Unused), "of an earlier runner");
    assert_eq!(read("True", "False", json!([])), (false, nobody.clone(), Use::Unused));
    assert_eq!(read("Unknown", "Unknown", json!([])), (true, nobody, Use::Unused));
}

#[test]
fn what_decides_is_read_from_a_vm_as_it_is_stored() {
    let stored = vm(|vm| {
        vm["metadata"]["annotations"] = json!({ STARTED_FOR_ANNOTATION: "2027-01-15T08:00:00Z alice" });
        vm["spec"]["pools"] = json!(["desktops", "night"]);
        let condition = |type_: &str, status: &str| json!({ "type": type_, "status": status, "reason": "X", "message": "", "lastTransitionTime": "2027-01-15T07:30:00Z" });
        vm["status"] = json!({
            "consoleUser": "alice", "consoleClient": "10.0.0.7",
            "conditions": [condition("Running", "True"), condition("ConsoleConnected", "True")],
            "assignment": {
                "pool": "desktops", "user": "alice", "lastUsed": "2027-01-15T07:30:00Z", "assignedAt": "2027-01-15T08:00:00Z",
                "starts": true,
            },
        });
    });
    let read = Member::new(&stored, Start::Runs);
    let half_past = noon() - SignedDuration::from_mins(30);
    assert_eq!(read.pools, ["desktops".to_owned(), "night".to_owned()].into());
    assert_eq!(
        read.console,
        Console {
            is_connected: true,
            since: Some(half_past),
            users: vec!["alice".into(), "10.0.0.7".into()],
            was_used: true
        }
    );
    let held = read.held.clone().unwrap();
    assert_eq!(
        (held.user.as_str(), held.last_used, held.assigned_at, held.starts),
        ("alice", Some(half_past), Some(noon()), true)
    );
    assert!(read.runs && read.pending_start().is_none(), "the annotation says that it was started");
    for nothing in
        [json!({}), json!({ "pool": "desktops" }), json!({ "user": "" }), json!({ "lastUsed": "2027-01-15T08:00:00Z" })]
    {
        let assignment: Assignment = serde_json::from_value(nothing.clone()).unwrap();
        assert_eq!(Held::of(&assignment), None, "{nothing}");
    }
}

#[test]
fn a_write_names_each_field_and_the_version_that_was_read() {
    let taken = of("apple", "bob", -200, -100);
    let Ok(Step::Take(write)) = step(&hour(), &[taken]) else { panic!("nothing is taken") };
    let expected = json!({
        "metadata": { "resourceVersion": "7" },
        "status": { "assignment": {
            "pool": "desktops", "poolUid": null, "user": "alice", "lastUsed": "2027-01-15T08:00:00Z",
            "assignedAt": "2027-01-15T08:00:00Z", "starts": null,
        }, "usedUid": write.uid },
    });
    assert!(write.uid.is_some());
    assert_eq!(write.patch(), expected);
    let released = release("desktops", &[of("apple", "bob", -200, -100)], "bob");
    assert_eq!(
        released[0].patch(),
        json!({ "metadata": { "resourceVersion": "7" }, "status": { "assignment": null, "usedUid": released[0].uid } })
    );
}

#[test]
fn the_order_of_candidates() {
    let members = [
        of("used-long-ago", "bob", -500, -300),
        with(of("closed-later", "bob", -500, -400), |member| member.console = console(false, -200, "carol")),
        of("used-longest-ago", "bob", -500, -350),
        of("within-retention", "bob", -500, -60),
        of("within-the-skew-of-clocks", "bob", -500, -64),
        of("just-over", "bob", -500, -65),
        member("zebra", |member| member.runs = true),
        member("apple", |_| ()),
        member("pear", |member| member.runs = true),
        member("in-use", |member| member.console = console(true, -10, "admin")),
        with(of("expired-in-use", "bob", -500, -400), |member| member.console = console(true, -10, "bob")),
        member("deleted", |member| member.is_deleted = true),
        member("elsewhere", |member| member.pools = ["night".to_owned()].into()),
        member("stopped-by-git", |member| member.start = Start::Refused),
        with(of("of-another-pool", "bob", -500, -400), |member| {
            member.held.as_mut().unwrap().pool = Some("night".into());
        }),
        with(of("of-no-pool", "bob", -500, -400), |member| member.held.as_mut().unwrap().pool = None),
    ];
    let order = |pools: &Pools| {
        let names = candidates("desktops", pools, &members, noon()).into_iter().map(|member| member.name.clone());
        names.collect::<Vec<_>>().join(" ")
    };
    let free = "pear zebra apple";
    assert_eq!(order(&hour()), format!("{free} used-longest-ago used-long-ago closed-later just-over"));
    // What another pool has given stays with its user as long as that pool says.
    let night = |retention| pools(&[("desktops", "PT1h"), ("night", retention)]);
    assert_eq!(
        order(&night("PT1h")),
        format!("{free} of-another-pool used-longest-ago used-long-ago closed-later just-over")
    );
    assert_eq!(order(&night("P1D")), order(&hour()));
    assert_eq!(order(&pools(&[("desktops", "an hour")])), free, "what can't be read takes nothing away");
    assert_eq!(order(&pools(&[("desktops", "2027-01-15T08:00:00Z")])), free);
    assert_eq!(order(&Pools::new()), free);
}

#[test]
fn what_a_person_gets() {
    let started = |member: &mut Member| {
        member.start = Start::Needed;
        member.held.as_mut().unwrap().starts = true;
    };
    let vm_of = |step: &Step| match step {
        Step::Take(write) => format!("take {}", write.vm),
        Step::Release(write) => format!("release {}", write.vm),
        Step::Renew(write) => format!("renew {}", write.vm),
        Step::Start { vm, id } => format!("start {vm} for {id}"),
        Step::Done(vm) => format!("has {vm}"),
    };
    let id = "2027-01-15T08:00:00Z alice";
    let cases: [(&str, Vec<Member>, &str); 10] = [
        ("a free one", vec![of("apple", "bob", -10, -10), member("pear", |_| ())], "take pear"),
        ("the one that she has", vec![member("apple", |_| ()), of("pear", "alice", -10, 0)], "has pear"),
        ("also if it has expired", vec![member("apple", |_| ()), of("pear", "alice", -900, -800)], "renew pear"),
        (
            "not one of another pool",
            vec![
                member("apple", |_| ()),
                with(of("pear", "alice", -10, 0), |member| member.held.as_mut().unwrap().pool = Some("night".into())),
            ],
            "take apple",
        ),
        (
            "not one that is being deleted",
            vec![member("apple", |_| ()), with(of("pear", "alice", -10, 0), |member| member.is_deleted = true)],
            "take apple",
        ),
        ("that is started", vec![with(of("pear", "alice", 0, 0), started)], &format!("start pear for {id}")),
        (
            "once",
            vec![with(of("pear", "alice", 0, 0), |member| {
                started(member);
                member.started_for = Some(id.into());
            })],
            "has pear",
        ),
        (
            "a stopped one as it is",
            vec![with(of("pear", "alice", 0, 0), |member| member.start = Start::Needed)],
            "has pear",
        ),
        ("the first of two", vec![of("apple", "alice", -1, 0), of("pear", "alice", -2, 0)], "release apple"),
        (
            "two while she is at both",
            vec![
                with(of("apple", "alice", -1, 0), |member| member.console = console(true, 0, "alice")),
                of("pear", "alice", -2, 0),
            ],
            "has pear",
        ),
    ];
    for (what, members, expected) in cases {
        assert_eq!(step(&hour(), &members).map(|step| vm_of(&step)), Ok(expected.to_owned()), "{what}");
    }
    let Ok(Step::Take(write)) = step(&hour(), &[member("pear", |_| ())]) else { panic!("nothing is taken") };
    assert!(write.held.unwrap().starts, "it was stopped");
}

#[test]
fn why_a_person_gets_none() {
    let refused =
        |members: &[Member], who: &Assignee| assign("desktops", &hour(), members, who, noon()).unwrap_err().to_string();
    let nobody = Assignee { rights: Rights::default(), ..alice() };
    assert!(refused(&[of("pear", "alice", -10, 0)], &nobody).starts_with("alice has no right in the pool"));
    assert!(refused(&[], &alice()).starts_with("the pool has no VMs"));
    let git = member("plum", |member| member.start = Start::Refused);
    let in_use = [of("pear", "bob", -90, -20), of("apple", "carol", -90, -30), git];
    assert_eq!(
        refused(&in_use, &alice()),
        "all 3 VMs of the pool are in use; the next one is kept until 2027-01-15T08:35:00Z; 1 can't be started, because Git says that they are stopped: remove spec.vm.state there"
    );
}

fn kept_up(pools: &Pools, members: &[Member]) -> Upkeep {
    upkeep(pools, members, noon())
}

#[test]
fn what_the_manager_does_with_a_vm() {
    let starts = |assigned: i64| {
        let seconds = SignedDuration::from_secs(assigned);
        with(of("pear", "alice", 0, 0), |member| {
            member.start = Start::Needed;
            let held = member.held.as_mut().unwrap();
            (held.starts, held.assigned_at) = (true, Some(noon() + seconds));
        })
    };
    let unfinished = UNFINISHED.as_secs();
    let noted = NOTED.as_mins();
    let expired = |used: i64| of("pear", "alice", -900, used);
    let at_console = |user: &str, used: i64| with(expired(used), |member| member.console = console(true, -800, user));
    let left = |user: &str, since: i64| with(expired(-50), |member| member.console = console(false, since, user));
    let night = |edit: fn(&mut Member)| {
        with(with(expired(-1), |member| member.held.as_mut().unwrap().pool = Some("night".into())), edit)
    };
    let cases: Vec<(&str, Member, Option<Why>, Option<i64>)> = vec![
        ("nobody's", member("pear", |_| ()), None, None),
        ("within retention", expired(-30), None, Some(35)),
        ("could be taken", expired(-70), None, Some(5)),
        ("past the grace time", expired(-75), Some(Why::Expired), None),
        ("somebody is at the console", at_console("bob", -75), None, None),
        ("its user is", at_console("alice", -30), None, Some(noted - 30)),
        ("for long", at_console("alice", -noted), Some(Why::Used), Some(noted)),
        ("the user left after the last use", left("alice", -20), Some(Why::Used), Some(45)),
        ("that is noted", left("alice", -50), None, Some(15)),
        ("another left", left("bob", -20), None, Some(45)),
        ("of a pool that is gone", night(|_| ()), Some(Why::PoolDeleted("night".into())), None),
        (
            "also at the console",
            night(|member| member.console.is_connected = true),
            Some(Why::PoolDeleted("night".into())),
            None,
        ),
        ("of a deleted VM", night(|member| member.is_deleted = true), None, None),
        ("of no pool", night(|member| member.held.as_mut().unwrap().pool = None), None, None),
    ];
    for (what, member, why, next) in cases {
        let upkeep = kept_up(&hour(), &[member]);
        assert_eq!(upkeep.writes.first().map(|(why, _)| why.clone()), why, "{what}");
        assert_eq!(upkeep.next, next.map(minutes), "{what}");
        assert!(upkeep.starts.is_empty(), "{what}");
    }
    assert_eq!(kept_up(&hour(), &[starts(-unfinished)]).starts.len(), 1);
    let early = kept_up(&hour(), &[starts(0)]);
    assert!(early.starts.is_empty() && early.next == Some(noon() + UNFINISHED), "{early:?}");
    let unreadable = kept_up(&pools(&[("desktops", "an hour")]), &[expired(-10_000)]);
    assert!(unreadable.writes.is_empty() && unreadable.next.is_none(), "{unreadable:?}");
}

#[test]
fn a_user_keeps_one_vm_of_a_pool() {
    let pools = pools(&[("desktops", "PT1h"), ("night", "PT1h")]);
    let own = [
        of("pear", "alice", -10, 0),
        of("apple", "alice", -10, 0),
        of("zebra", "alice", -20, 0),
        with(of("plum", "alice", -5, 0), |member| member.console = console(true, 0, "alice")),
        with(of("quince", "alice", -30, 0), |member| member.held.as_mut().unwrap().pool = Some("night".into())),
        of("bobs", "bob", -30, 0),
    ];
    let released: Vec<_> =
        kept_up(&pools, &own).writes.into_iter().map(|(why, write)| (why, write.vm, write.held)).collect();
    assert_eq!(released, [(Why::Duplicate, "pear".to_owned(), None), (Why::Duplicate, "apple".to_owned(), None)]);
}

#[test]
fn a_pool_keeps_as_many_free_vms_running_as_it_wants() {
    let warm = |wanted: serde_json::Value| {
        let pool = json!({ "metadata": { "name": "desktops" }, "spec": { "retention": "PT1h", "warm": wanted } });
        Pools::from([("desktops".to_owned(), Pool::read(&serde_json::from_value(pool).unwrap()))])
    };
    let warmed =
        |wanted: i64, members: &[Member]| kept_up(&warm(json!(wanted)), members).warmed.into_iter().collect::<Vec<_>>();
    let stopped = |name: &str| member(name, |_| ());
    let running = |name: &str| member(name, |member| member.start = Start::Runs);
    let refused = |name: &str| member(name, |member| member.start = Start::Refused);
    let all = [stopped("c"), refused("a"), stopped("b"), of("used", "ann", 0, 0)];
    assert!(warmed(0, &all).is_empty());
    assert_eq!(warmed(1, &all), ["b"], "by name; Git says that a is stopped");
    assert_eq!(warmed(5, &all), ["b", "c"], "as many as there are");
    assert_eq!(warmed(2, &[running("a"), stopped("b"), stopped("c")]), ["b"]);
    assert!(warmed(1, &[running("z"), stopped("a")]).is_empty());
    let deleted = member("a", |member| member.is_deleted = true);
    let other = member("b", |member| member.pools = ["others".to_owned()].into());
    assert!(warmed(3, &[deleted, other]).is_empty());
    assert!(kept_up(&warm(json!("many")), &all).warmed.is_empty(), "what can't be read starts nothing");
    // A VM of two pools is started once, and counts for both.
    let both = |name: &str| member(name, |member| member.pools = ["desktops".to_owned(), "labs".to_owned()].into());
    let mut pools = warm(json!(1));
    pools.insert("labs".into(), Pool { name: "labs".into(), ..pools["desktops"].clone() });
    assert_eq!(kept_up(&pools, &[both("a"), both("b")]).warmed, ["a".to_owned()].into());
}

#[test]
fn the_status_of_a_pool() {
    let members = [
        member("free", |_| ()),
        of("assigned", "alice", -10, -10),
        of("expired", "bob", -900, -70),
        with(of("expired-in-use", "carol", -900, -70), |member| member.console.is_connected = true),
        with(of("elsewhere", "dave", -10, -10), |member| member.pools = BTreeSet::new()),
        with(of("of-night", "erin", -10, -10), |member| member.held.as_mut().unwrap().pool = Some("night".into())),
        member("deleted", |member| member.is_deleted = true),
    ];
    let of_pool = |retention: &str, members: &[Member]| {
        let pools = pools(&[("desktops", retention), ("night", "PT1h")]);
        let upkeep = kept_up(&pools, members);
        json!(status(&pools["desktops"], upkeep.counts["desktops"], None, &[], noon()))
    };
    let found = of_pool("PT1h", &members);
    assert_eq!(
        [&found["members"], &found["free"], &found["assigned"], &found["expired"], &found["observedGeneration"]],
        [5, 1, 3, 1, 2]
    );
    for (found, status, reason) in [
        (found, "True", "Usable"),
        (of_pool("PT1h", &[]), "False", "NoMembers"),
        (of_pool("an hour", &members), "False", "RetentionInvalid"),
    ] {
        let condition = &found["conditions"][0];
        assert_eq!((&condition["status"], &condition["reason"]), (&json!(status), &json!(reason)));
        assert_eq!(
            (&condition["type"], &condition["lastTransitionTime"]),
            (&json!("Ready"), &json!("2027-01-15T08:00:00Z"))
        );
    }
    // The time is that of the last change of the status.
    let pools = hour();
    let former: VmPoolStatus = serde_json::from_value(of_pool("PT1h", &members)).unwrap();
    let later = status(&pools["desktops"], Default::default(), None, &former.conditions, minutes(5));
    assert_eq!(later.conditions[0].last_transition_time.0, minutes(5), "it was True and is False");
    let counts = upkeep::Counts { members: 1, ..Default::default() };
    let same = status(&pools["desktops"], counts, None, &former.conditions, minutes(5));
    assert_eq!(same.conditions[0].last_transition_time.0, noon());
}
