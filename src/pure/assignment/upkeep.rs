//! What the manager does for the pools of a namespace: assignments end, uses are noted, starts that were not finished are done, and the
//! status of each pool says how its VMs are.
//!
//! **The first line that fits a VM**
//!
//! | the VM | what is written |
//! |---|---|
//! | is being deleted | nothing |
//! | has the mark that nobody has had it, and that is not true any more | the mark is taken away ([`Upkeep::used`]) |
//! | is assigned to nobody | nothing |
//! | is assigned from a pool that does not exist, or from another one of its name, by its UID | it is nobody's |
//! | its user has another VM of the pool that comes before, and nobody is at its console | it is nobody's |
//! | could have been taken for [`GRACE`](super::GRACE), or at all if it is to be replaced (`spec.reset`), and nobody is at its console | it is nobody's |
//! | its user is at the console, and that was last noted [`NOTED`] ago | `lastUsed` is now |
//! | its user has left the console after `lastUsed` | `lastUsed` is that time |
//! | is assigned without the UID of its pool: by another program, or an earlier release | that is added |
//! | is to be started for its assignment, and is not after [`UNFINISHED`] | it is started |
//! | all others | nothing |
//!
//! **Warm VMs.** If fewer VMs of a pool than its `warm` are assigned to nobody and should run, others that are assigned to nobody are started, by name.
//! None is stopped. A VM that can't be started, because Git says that it is stopped, does not count.
//!
//! [`Upkeep::next`] is the earliest time at which another line would fit although nothing else has changed.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::{SignedDuration, Timestamp},
};

use super::{
    GRACE, Held, Member, Pool, Pools, Start, Write, later,
    members::{MemberPlan, scaled},
};
use crate::{
    api::{
        conditions::{self, READY},
        pool::{VmPoolStatus, reasons},
    },
    object::POOL_LABEL,
};

/// How often it is noted that a user is at the console.
pub const NOTED: SignedDuration = SignedDuration::from_hours(1);
/// How long whoever assigns a VM has for starting it.
pub const UNFINISHED: SignedDuration = SignedDuration::from_secs(30);

/// What is to be done in a namespace now, and when the next time is.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Upkeep {
    /// The writes, at most one for each VM.
    pub writes: Vec<(Why, Write)>,
    /// The VMs to start, each with the ID of the assignment for which that is.
    pub starts: Vec<(String, String)>,
    /// The VMs that are assigned to nobody and are to be started, so that they are warm.
    pub warmed: BTreeSet<String>,
    /// The VMs of which the mark is to be taken away that nobody has had them.
    pub used: BTreeSet<String>,
    /// How the VMs of each pool are.
    pub counts: BTreeMap<String, Counts>,
    /// When something is due although nothing changes until then.
    pub next: Option<Timestamp>,
}

/// Why an assignment is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// Its pool does not exist. Before this is written the API server is asked whether that is so.
    PoolDeleted(String),
    /// Its user has another VM of the pool.
    Duplicate,
    /// Its retention and the grace time are over.
    Expired,
    /// Its user was at the console.
    Used,
    /// It did not have the UID of its pool.
    Noted,
}

/// How the VMs of a pool are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// How many VMs belong to it.
    pub members: u32,
    /// How many of these are assigned to nobody, and can be given to somebody.
    pub free: u32,
    /// How many are assigned to nobody, and nobody gets them: they are to be replaced by new ones, or have no disks yet.
    pub renewing: u32,
    /// How many VMs are assigned from it and kept for their users.
    pub assigned: u32,
    /// How many VMs are assigned from it and can be taken by others.
    pub expired: u32,
}

/// What is to be done for the pools of a namespace. `pools` are all of them: an assignment from another one ends.
pub fn upkeep(pools: &Pools, members: &[Member], now: Timestamp) -> Upkeep {
    let mut upkeep =
        Upkeep { counts: counts(pools, members, now), warmed: warmed(pools, members), ..Upkeep::default() };
    let kept = kept(members);
    for member in members.iter().filter(|member| !member.is_deleted) {
        if member.is_to_be_marked() {
            upkeep.used.insert(member.name.clone());
            continue;
        }
        let Some((held, pool)) = member.held.as_ref().and_then(|held| Some((held, held.pool.as_ref()?))) else {
            continue;
        };
        let known = pools.get(pool).filter(|pool| held.is_from(pool));
        let Some(known) = known else {
            upkeep.writes.push((Why::PoolDeleted(pool.clone()), member.write(None)));
            continue;
        };
        let is_kept = kept.get(&(pool, &held.user)).is_none_or(|(_, name)| **name == member.name);
        if !is_kept && !member.console.is_connected {
            upkeep.writes.push((Why::Duplicate, member.write(None)));
            continue;
        }
        if let Some(time) = member.taken_from(pools).filter(|_| !member.console.is_connected) {
            let end = if member.is_reset(pools) { time } else { later(time, GRACE) };
            if end <= now {
                upkeep.writes.push((Why::Expired, member.write(None)));
                continue;
            }
            upkeep.at(time, now);
            upkeep.at(end, now);
        }
        let (used, noted_next) = used(member, held, now);
        if let Some(time) = noted_next {
            upkeep.at(time, now);
        }
        if let Some(time) = used {
            let held = Held { last_used: Some(time), pool_uid: known.uid.clone(), ..held.clone() };
            upkeep.writes.push((Why::Used, member.write(Some(held))));
            continue;
        }
        if held.pool_uid.is_none() && known.uid.is_some() {
            let held = Held { pool_uid: known.uid.clone(), ..held.clone() };
            upkeep.writes.push((Why::Noted, member.write(Some(held))));
            continue;
        }
        if let Some(id) = member.pending_start() {
            let due = later(held.assigned_at.unwrap_or(now), UNFINISHED);
            if due <= now {
                upkeep.starts.push((member.name.clone(), id));
            } else {
                upkeep.at(due, now);
            }
        }
    }
    upkeep
}

impl Upkeep {
    /// Something is due then.
    fn at(&mut self, time: Timestamp, now: Timestamp) {
        if time > now {
            self.next = Some(self.next.map_or(time, |next| next.min(time)));
        }
    }
}

/// The VMs that are to be started so that each pool has as many warm ones as it wants.
fn warmed(pools: &Pools, members: &[Member]) -> BTreeSet<String> {
    let mut warmed = BTreeSet::<String>::new();
    for pool in pools.values().filter(|pool| pool.warm > 0) {
        let free = members.iter().filter(|member| {
            member.held.is_none()
                && !member.is_deleted
                && member.pools.contains(&pool.name)
                && member.start != Start::Refused
                && !member.is_surplus(pools)
                && member.is_clean(pools)
        });
        let (runs, mut others): (Vec<_>, Vec<_>) =
            free.partition(|member| member.start == Start::Runs || warmed.contains(&member.name));
        others.sort_by_key(|member| &member.name);
        let missing = pool.warm.saturating_sub(runs.len());
        warmed.extend(others.into_iter().take(missing).map(|member| member.name.clone()));
    }
    warmed
}

/// When the user used the VM, if that is to be noted, and when it is to be noted again.
fn used(member: &Member, held: &Held, now: Timestamp) -> (Option<Timestamp>, Option<Timestamp>) {
    if !member.console.users.contains(&held.user) {
        return (None, None);
    }
    let last = held.last_used.unwrap_or(Timestamp::UNIX_EPOCH);
    if member.console.is_connected {
        let due = later(last, NOTED);
        return if due <= now { (Some(now), Some(later(now, NOTED))) } else { (None, Some(due)) };
    }
    // The API server keeps whole seconds.
    (member.console.since.filter(|left| left.as_second() > last.as_second()), None)
}

/// Of each user with VMs of a pool, which one she keeps: by pool and user, when it was assigned and its name.
fn kept(members: &[Member]) -> BTreeMap<(&String, &String), (Option<Timestamp>, &String)> {
    let mut kept = BTreeMap::new();
    for member in members.iter().filter(|member| !member.is_deleted) {
        let Some((held, pool)) = member.held.as_ref().and_then(|held| Some((held, held.pool.as_ref()?))) else {
            continue;
        };
        let this = (held.assigned_at, &member.name);
        match kept.entry((pool, &held.user)) {
            Entry::Vacant(entry) => drop(entry.insert(this)),
            Entry::Occupied(mut entry) if this < *entry.get() => drop(entry.insert(this)),
            Entry::Occupied(_) => {}
        }
    }
    kept
}

/// How the VMs of each pool are.
pub fn counts(pools: &Pools, members: &[Member], now: Timestamp) -> BTreeMap<String, Counts> {
    let mut all: BTreeMap<_, _> = pools.keys().map(|pool| (pool.clone(), Counts::default())).collect();
    for member in members.iter().filter(|member| !member.is_deleted) {
        for pool in &member.pools {
            if let Some(counts) = all.get_mut(pool) {
                counts.members += 1;
                counts.free += u32::from(member.held.is_none() && member.is_clean(pools));
                counts.renewing += u32::from(member.held.is_none() && !member.is_clean(pools));
            }
        }
        let pool = member.held.as_ref().and_then(|held| held.pool.as_ref());
        if let Some(counts) = pool.and_then(|pool| all.get_mut(pool)) {
            let is_taken = member.taken_from(pools).is_some_and(|time| time <= now);
            match is_taken && !member.console.is_connected {
                true => counts.expired += 1,
                false => counts.assigned += 1,
            }
        }
    }
    all
}

/// The status of a pool. `plan`: what is to be done for the VMs that it makes, and why the API server refused that.
pub fn status(
    pool: &Pool,
    counts: Counts,
    plan: Option<(&MemberPlan, Option<&str>)>,
    current: &[Condition],
    now: Timestamp,
) -> VmPoolStatus {
    let Counts { members, free, renewing, assigned, expired } = counts;
    let (is_ready, reason, message) = match &pool.retention {
        Err(error) => (false, reasons::RETENTION_INVALID, format!("{error}. Until then no assignment ends by time")),
        Ok(_) if members == 0 => (false, reasons::NO_MEMBERS, "No VM names the pool in spec.pools".to_owned()),
        Ok(_) => (true, reasons::USABLE, format!("VMs of the pool can be assigned: it has {members}")),
    };
    let status = if is_ready { "True" } else { "False" };
    let former = conditions::find(current, READY).filter(|former| former.status == status);
    let since = former.map_or(now, |former| former.last_transition_time.0);
    VmPoolStatus {
        observed_generation: pool.generation,
        members: Some(members),
        free: Some(free),
        renewing: pool.reset.is_some().then_some(renewing),
        assigned: Some(assigned),
        expired: Some(expired),
        replicas: plan.map(|(plan, _)| plan.replicas),
        updated_replicas: plan.map(|(plan, _)| plan.updated),
        selector: plan.map(|_| format!("{POOL_LABEL}={}", pool.name)),
        conditions: [Condition {
            type_: READY.into(),
            status: status.into(),
            reason: reason.into(),
            message,
            last_transition_time: Time(since),
            observed_generation: pool.generation,
        }]
        .into_iter()
        .chain(plan.map(|(plan, refusal)| scaled(pool, plan, refusal, current, now)))
        .collect(),
    }
}
