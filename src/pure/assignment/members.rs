//! The VMs that the manager makes for a pool from its `spec.template`: POOL-0, POOL-1 and so on. Pure.
//!
//! **The first line that fits a VM that the pool wants**
//!
//! | a VM of this name | what follows |
//! |---|---|
//! | does not exist | it is made |
//! | is another's | nothing: [`Obstacle::NameTaken`] |
//! | is being deleted | nothing until it is gone: [`Obstacle::Ending`] |
//! | does not name the pool in `spec.pools` any more, because somebody took it out of use | nothing: [`Obstacle::OutOfPool`] |
//! | is as the template is, and the pool owns it | nothing |
//! | is assigned, or somebody is at its console | nothing until it is free: [`Obstacle::InUse`] |
//! | all others | the template is applied |
//!
//! **The first line that fits a VM of the pool with a higher number**, the highest number first
//!
//! | the VM | what follows |
//! |---|---|
//! | is being deleted | nothing |
//! | does not name the pool in `spec.pools` any more | nothing: [`Obstacle::OutOfPool`] |
//! | is assigned, or somebody is at its console | nothing until it is free, and nobody else gets it: [`Obstacle::InUse`] |
//! | all others | it is deleted; its claims stay |
//!
//! **A pool with `spec.reset`** makes VMs with names that nobody has had before, POOL- and eight random characters, because a VM that has the name of
//! a former one has its claims too. It has as many as `spec.replicas`, and no VM is changed: **the first line that fits a VM of it**
//!
//! | the VM | what follows |
//! |---|---|
//! | is being deleted | nothing until it is gone: [`Obstacle::Ending`] |
//! | does not name the pool in `spec.pools` any more | nothing: [`Obstacle::OutOfPool`] |
//! | is assigned, or somebody is at its console | nothing; if there are too many, [`Obstacle::InUse`] |
//! | somebody has had it ([`Use::Used`]) | it is deleted; its claims stay, or go with it |
//! | waits for its disks, and is not as the template is | it is deleted |
//! | has a claim that was not made for it, or lost one | nothing, and nobody gets it: [`Obstacle::OldDisks`] |
//! | is one of too many: first those that are not as the template is, do not run, have a later name | it is deleted |
//! | is not as the template is, and no VM is ending or waits for its disks | the first such is deleted |
//! | waits for its disks | nothing: [`Obstacle::Preparing`] |
//!
//! A VM that names such a pool, and that the pool has not made, nobody gets: [`Obstacle::Stranger`].
//!
//! Without `spec.replicas` no VM is made or deleted; the template is applied to those that exist. A pool that is being deleted makes none.
//!
//! **Which VMs are the pool's**: those whose owner it is, and those without an owner that a pool of its name has made, such as after
//! `kubectl delete --cascade=orphan`. That a pool has made them is in `metadata.managedFields` ([`is_made_by_pool`](crate::ownership::is_made_by_pool)):
//! a copy that a person has made of such a VM, or a VM that came back from a backup, is not the pool's, whatever its labels, annotations and
//! owners say.
//!
//! The template is applied when its hash has changed, and not when somebody has changed a VM. So nothing is written at rest, and the
//! manager does not fight with whoever applies such a VM too.

use std::{cmp::Reverse, collections::BTreeSet, fmt};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::Timestamp,
};

use super::{Member, Pool, Start, Use};
use crate::api::{
    conditions,
    pool::{SCALED, reasons},
};

/// How many VMs a message names.
const NAMED: usize = 5;

/// A write of a VM of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberWrite {
    /// The VM is made. None of this name exists.
    Create(String),
    /// The template is applied to the VM.
    Update {
        /// The VM.
        vm: String,
        /// The resourceVersion that it must have.
        version: Option<String>,
    },
    /// The VM is deleted, and its claims with it if the pool says so ([`Pool::reset`]).
    Delete {
        /// The VM.
        vm: String,
        /// The UID that it must have.
        uid: Option<String>,
        /// The resourceVersion that it must have.
        version: Option<String>,
    },
}

/// Why a VM is not as the pool wants it, and nothing is done about that now.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the head of the module says what they are")]
pub enum Obstacle {
    NameTaken { vm: String },
    Ending { vm: String },
    OutOfPool { vm: String },
    InUse { vm: String, is_surplus: bool },
    Preparing { vm: String },
    OldDisks { vm: String },
    Stranger { vm: String },
}

impl Obstacle {
    /// The VM.
    pub fn vm(&self) -> &String {
        match self {
            Self::NameTaken { vm }
            | Self::Ending { vm }
            | Self::OutOfPool { vm }
            | Self::InUse { vm, .. }
            | Self::Preparing { vm }
            | Self::OldDisks { vm }
            | Self::Stranger { vm } => vm,
        }
    }
}

/// What the manager does so that a pool has the VMs that it wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemberPlan {
    /// The writes, in this order.
    pub writes: Vec<MemberWrite>,
    /// What waits.
    pub obstacles: Vec<Obstacle>,
    /// How many VMs the manager has made for the pool.
    pub replicas: u32,
    /// How many of them are as the template is.
    pub updated: u32,
}

/// The names of the VMs that the pool wants. None if it has `spec.reset`: then no name is wanted.
pub fn wanted_names(pool: &Pool) -> impl Iterator<Item = String> {
    let has_names = pool.template.is_some() && pool.reset.is_none() && !pool.is_deleted;
    let wanted = pool.replicas.filter(|_| has_names).unwrap_or_default();
    (0..wanted).map(|number| format!("{}-{number}", pool.name))
}

/// What is to be done for the VMs of a pool, by the tables at the head of this module. `others` are the names of VMs of the namespace that are not
/// among the `members`; `unheard_of` gives the ends of names that no VM has had. `None`: the pool has no template.
pub fn plan(
    pool: &Pool,
    members: &[Member],
    others: &BTreeSet<String>,
    unheard_of: impl FnMut() -> String,
) -> Option<MemberPlan> {
    let template = pool.template.as_ref()?;
    let mut plan = MemberPlan::default();
    if pool.is_deleted {
        return Some(plan);
    }
    let own = members.iter().filter(|member| member.is_made_by(pool));
    // A name without a number is of a time when the pool had `spec.reset`: one too many.
    let mut own: Vec<_> = own.map(|member| (member.number_in(pool).unwrap_or(u32::MAX), member)).collect();
    own.sort_by_key(|(number, member)| (*number, &member.name));
    let is_current =
        |member: &Member| member.made.template.as_ref() == Some(&template.hash) && member.made.owner == pool.uid;
    plan.replicas = count(own.len());
    plan.updated = count(own.iter().filter(|(_, member)| is_current(member)).count());
    if pool.reset.is_some() {
        let own: Vec<_> = own.into_iter().map(|(_, member)| (member, is_current(member))).collect();
        replace(&mut plan, pool, &own, unheard_of);
        let is_stranger =
            |member: &&Member| member.pools.contains(&pool.name) && !member.is_deleted && !member.is_made_by(pool);
        let strangers = members.iter().filter(is_stranger);
        plan.obstacles.extend(strangers.map(|member| Obstacle::Stranger { vm: member.name.clone() }));
        return Some(plan);
    }

    let is_known = |name: &String| own.iter().any(|(_, member)| member.name == *name);
    for name in wanted_names(pool).filter(|name| !is_known(name)) {
        match others.contains(&name) || members.iter().any(|member| member.name == name) {
            true => plan.obstacles.push(Obstacle::NameTaken { vm: name }),
            false => plan.writes.push(MemberWrite::Create(name)),
        }
    }
    let is_surplus = |number: u32| pool.replicas.is_some_and(|wanted| number >= wanted);
    for (_, member) in own.iter().filter(|(number, _)| !is_surplus(*number)) {
        let (vm, version) = (member.name.clone(), member.version.clone());
        if member.is_deleted {
            plan.obstacles.push(Obstacle::Ending { vm });
        } else if !member.pools.contains(&pool.name) {
            plan.obstacles.push(Obstacle::OutOfPool { vm });
        } else if is_current(member) {
        } else if member.is_in_use() {
            plan.obstacles.push(Obstacle::InUse { vm, is_surplus: false });
        } else {
            plan.writes.push(MemberWrite::Update { vm, version });
        }
    }
    for (_, member) in own.iter().rev().filter(|(number, member)| is_surplus(*number) && !member.is_deleted) {
        let vm = member.name.clone();
        if !member.pools.contains(&pool.name) {
            plan.obstacles.push(Obstacle::OutOfPool { vm });
        } else if member.is_in_use() {
            plan.obstacles.push(Obstacle::InUse { vm, is_surplus: true });
        } else {
            plan.writes.push(deletion(member));
        }
    }
    Some(plan)
}

/// What is to be done in a pool with `spec.reset`. `own`: its VMs, and whether each is as the template is.
fn replace(plan: &mut MemberPlan, pool: &Pool, own: &[(&Member, bool)], mut unheard_of: impl FnMut() -> String) {
    let Some(wanted) = pool.replicas else { return };
    let (mut busy, mut free) = (Vec::new(), Vec::new());
    // Those that go, or are going. They count until they are gone: a replacement makes no more VMs than wanted.
    let mut leaving = 0;
    for (member, is_current) in own {
        let vm = member.name.clone();
        if member.is_deleted {
            leaving += 1;
            plan.obstacles.push(Obstacle::Ending { vm });
        } else if !member.pools.contains(&pool.name) {
            plan.obstacles.push(Obstacle::OutOfPool { vm });
        } else if member.is_in_use() {
            busy.push(vm);
        } else if member.used == Use::OldDisks {
            plan.obstacles.push(Obstacle::OldDisks { vm });
        } else if member.used == Use::Used || member.used == Use::Unused && !is_current {
            // What keeps the disks of an unused one from being made may be what was changed.
            leaving += 1;
            plan.writes.push(deletion(member));
        } else {
            free.push((*member, *is_current));
        }
    }
    let wanted = usize::try_from(wanted).unwrap_or(usize::MAX);
    let surplus = (own.len() - leaving).saturating_sub(wanted);
    let missing = wanted.saturating_sub(own.len());
    // The first ones go first.
    free.sort_by_key(|(member, is_current)| (*is_current, member.start == Start::Runs, Reverse(&member.name)));
    let (too_many, rest) = free.split_at(surplus.min(free.len()));
    plan.writes.extend(too_many.iter().map(|(member, _)| deletion(member)));
    busy.sort();
    let busy = busy.into_iter().rev().take(surplus - too_many.len());
    plan.obstacles.extend(busy.map(|vm| Obstacle::InUse { vm, is_surplus: true }));
    let waits = |(member, _): &&(&Member, bool)| member.used == Use::Unused;
    let mut preparing: Vec<_> = rest.iter().filter(waits).map(|(member, _)| member.name.clone()).collect();
    preparing.sort();
    plan.obstacles.extend(preparing.into_iter().map(|vm| Obstacle::Preparing { vm }));
    plan.writes.extend((0..missing).map(|_| MemberWrite::Create(format!("{}-{}", pool.name, unheard_of()))));
    let is_changing = leaving > 0 || missing > 0 || free.iter().any(|member| waits(&member));
    if let Some((member, false)) = rest.first().filter(|_| !is_changing) {
        plan.writes.push(deletion(member));
    }
}

/// The VM is deleted as it is now.
fn deletion(member: &Member) -> MemberWrite {
    MemberWrite::Delete { vm: member.name.clone(), uid: member.uid.clone(), version: member.version.clone() }
}

fn count(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The condition [`SCALED`] of a pool: the first line that fits.
///
/// | | reason |
/// |---|---|
/// | the API server refused a write (`refusal`) | `Refused` |
/// | another VM has the name of one | `NameTaken` |
/// | writes are left, a VM ends, or one waits for its disks | `Progressing` |
/// | a VM waits until it is free | `InUse` |
/// | nobody gets a VM | `NotNew` |
/// | a VM is out of the pool | `OutOfPool` |
/// | | `AsWanted` |
pub fn scaled(
    pool: &Pool,
    plan: &MemberPlan,
    refusal: Option<&str>,
    current: &[Condition],
    now: Timestamp,
) -> Condition {
    let named = |is_it: fn(&Obstacle) -> bool| {
        let names: Vec<_> = plan.obstacles.iter().filter(|obstacle| is_it(obstacle)).map(Obstacle::vm).collect();
        (!names.is_empty()).then(|| Names(names).to_string())
    };
    let taken = named(|obstacle| matches!(obstacle, Obstacle::NameTaken { .. }));
    let changing = named(|obstacle| matches!(obstacle, Obstacle::InUse { is_surplus: false, .. }));
    let leaving = named(|obstacle| matches!(obstacle, Obstacle::InUse { is_surplus: true, .. }));
    let out = named(|obstacle| matches!(obstacle, Obstacle::OutOfPool { .. }));
    let preparing = named(|obstacle| matches!(obstacle, Obstacle::Preparing { .. }));
    let old = named(|obstacle| matches!(obstacle, Obstacle::OldDisks { .. }));
    let strangers = named(|obstacle| matches!(obstacle, Obstacle::Stranger { .. }));
    let ending = plan.obstacles.iter().any(|obstacle| matches!(obstacle, Obstacle::Ending { .. }));
    let sentences = [
        refusal.map(|answer| (reasons::REFUSED, answer.to_owned())),
        taken.map(|vms| {
            let what = "exist, and are not of this pool: delete them, or give the pool another name";
            (reasons::NAME_TAKEN, format!("VMs of these names {what}: {vms}"))
        }),
        (refusal.is_none() && (!plan.writes.is_empty() || ending))
            .then(|| (reasons::PROGRESSING, "VMs are being made, changed or deleted".to_owned())),
        preparing.map(|vms| (reasons::PROGRESSING, format!("waiting until all claims of these VMs exist: {vms}"))),
        leaving.map(|vms| (reasons::IN_USE, format!("deleted when they are released: {vms}"))),
        changing.map(|vms| (reasons::IN_USE, format!("changed to the new template when they are released: {vms}"))),
        old.map(|vms| {
            let what = "nobody gets these VMs, because a claim of each was not made for it, or is gone (its status.newDisks has the names); delete \
                        a VM to have another one made";
            (reasons::NOT_NEW, format!("{what}: {vms}"))
        }),
        strangers.map(|vms| {
            let what = "nobody gets these VMs, because the pool has not made them, so their disks may be somebody's";
            (reasons::NOT_NEW, format!("{what}: {vms}"))
        }),
        out.map(|vms| {
            (reasons::OUT_OF_POOL, format!("left as they are, because their spec.pools does not name the pool: {vms}"))
        }),
    ];
    let sentences: Vec<_> = sentences.into_iter().flatten().collect();
    let (status, reason, message) = match sentences.first() {
        None => ("True", reasons::AS_WANTED, format!("{} VMs are as the template is", plan.updated)),
        Some((reason, _)) => {
            let texts: Vec<_> = sentences.iter().map(|(_, text)| text.as_str()).collect();
            ("False", *reason, texts.join("; "))
        }
    };
    let former = conditions::find(current, SCALED).filter(|former| former.status == status);
    Condition {
        type_: SCALED.into(),
        status: status.into(),
        reason: reason.into(),
        message,
        last_transition_time: Time(former.map_or(now, |former| former.last_transition_time.0)),
        observed_generation: pool.generation,
    }
}

/// Some names, and how many more there are.
struct Names<'a>(Vec<&'a String>);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown: Vec<_> = self.0.iter().take(NAMED).map(|name| name.as_str()).collect();
        f.write_str(&shown.join(", "))?;
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests;
