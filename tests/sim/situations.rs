//! Situations in which a promise broke once, as scenarios: each must hold, whatever happens to each request.

use crate::{
    people::{Act, Op, POOL, UNNAMED},
    sets::Content,
};

/// A name, and what people do.
pub fn all() -> Vec<(&'static str, Vec<Op>)> {
    let apple = |acts: Vec<Act>| Op::all("apple", acts);
    // A VM has the set, which had the first content when the VM was started, and has the second one now.
    let changed = |from: Content, to: Content| {
        let acts = vec![Act::Set(from), Act::Make, Act::UseSet(true), Act::Restart(1), Act::Set(to)];
        apple([acts, vec![Act::Stop, Act::Start]].concat())
    };
    let of = |vm: &'static str, act: Act| Op { vm, act };
    let pool = |acts: Vec<Act>| Op::all(POOL, acts);
    let fixed = |kind| changed(Content::Fixed(kind, 0), Content::Fixed(kind, 1));
    vec![
        ("a set moves a mount", changed(Content::Mount(0), Content::Mount(1))),
        ("a set adds a port twice", changed(Content::Mount(0), Content::TwoPorts)),
        ("a set makes two Pods", changed(Content::Mount(0), Content::TwoPods)),
        ("a set makes two replicas", changed(Content::Mount(0), Content::TwoReplicas)),
        ("a set changes a fixed ConfigMap", fixed("ConfigMap")),
        ("a set changes a fixed Secret", fixed("Secret")),
        ("a set changes a fixed Service", fixed("Service")),
        ("a set changes a fixed Job", fixed("Job")),
        ("a set reads pending changes", changed(Content::Mount(0), Content::FeedsItself)),
        ("a set reads an address", changed(Content::Mount(0), Content::Address)),
        ("the VM is stripped and stopped", apple(vec![Act::Make, Act::Strip("VirtualMachine"), Act::Stop])),
        ("the VM is stripped and started", apple(vec![Act::Make, Act::Stop, Act::Strip("VirtualMachine"), Act::Start])),
        (
            "a disk without a name moves up",
            Op::all(
                UNNAMED,
                vec![Act::Make, Act::DropDisk(true), Act::Restart(1), Act::DropDisk(false), Act::Restart(2)],
            ),
        ),
        (
            "a pool",
            pool(vec![Act::Pool(2), Act::PoolCpus(1), Act::Pool(3), Act::Pool(1), Act::DeletePool { orphan: false }]),
        ),
        ("a pool is made again", pool(vec![Act::Pool(2), Act::DeletePool { orphan: true }, Act::Pool(3)])),
        ("a copy of a pool's VM", pool(vec![Act::Pool(2), Act::CopyMember, Act::PoolCpus(1), Act::Pool(1)])),
        (
            "VMs of a pool are deleted and assigned",
            vec![
                of("desk", Act::Pool(2)),
                of("desk-1", Act::Assign(true)),
                of("desk-0", Act::Delete { orphan: false }),
                of("desk", Act::Pool(1)),
                of("desk-1", Act::Assign(false)),
                of("desk-2", Act::Make),
                of("desk", Act::Pool(3)),
            ],
        ),
        (
            "Pods with vmctl",
            vec![
                of("web", Act::Make),
                of("web", Act::RunPod("y-0")),
                of("web", Act::EndPod("y-0", false)),
                of("web", Act::RunPod("y-0")),
                of("web", Act::EndPod("y-0", true)),
            ],
        ),
        (
            "two prototypes and one name",
            vec![
                of("web", Act::Make),
                of("web-db", Act::Make),
                of("web", Act::RunPod("db-x-0")),
                of("web", Act::EndPod("db-x-0", true)),
                of("web-db", Act::RunPod("x-0")),
            ],
        ),
        ("a quota with room for one", apple(vec![Act::Quota(Some(1)), Act::Make, Act::Restart(1), Act::Quota(None)])),
        ("a quota without room", apple(vec![Act::Quota(Some(0)), Act::Make, Act::Quota(None)])),
    ]
}
