//! Which VM of a pool a person gets, and when she has had it long enough. Pure: [`assign`], [`release`] and [`upkeep::upkeep`] say what is
//! to be written, from what was read; whoever calls them writes it and, if somebody was faster, reads again.
//!
//! ```text
//!  pools, members, person, now ─▶ assign  ─▶ one step: a write, a start, or the VM that she has
//!  pools, members, now         ─▶ upkeep  ─▶ writes, starts, each pool's status, and when to look again
//!  pool, members               ─▶ members ─▶ the VMs of the pool that are made, changed and deleted
//! ```
//!
//! **[`assign`]: the first line that fits**
//!
//! | the person | in the pool | what follows |
//! |---|---|---|
//! | has no right in the pool | | an error |
//! | has several VMs of it | a later one, at whose console nobody is | it is released: she keeps the one with the least (assignedAt, name) |
//! | has one, also past its retention | it was used last more than [`USE`] ago | its `lastUsed` is now |
//! | has one | the assignment starts it, and nobody has yet | it is started |
//! | has one | | she has that one |
//! | has none | there are candidates | the first of them is assigned |
//! | has none | there is none | an error that says until when the next one is kept |
//!
//! **Candidates** belong to the pool, are not being deleted, can be started, have nobody at the console, and are assigned to nobody, or are
//! past the retention of the pool from which they are assigned. A VM that goes because the pool that made it wants fewer ([`members`]) is none. Their order: assigned to nobody; then the longest unused first. Among
//! equals one that runs is before one that does not, then the names decide.
//!
//! **A pool with `spec.reset`** gives nobody a disk that somebody else had. A candidate of it is assigned to nobody, and [new](Use::New): it has the
//! annotation [`UNUSED_ANNOTATION`] with which its pool made it, the manager has made each of its claims for it (`status.newDisks`, with the UID of
//! the VM), and it was never assigned: each write of an assignment also writes `status.usedUid`, which stays. The manager takes the annotation from a
//! VM that somebody has had, at whose console somebody was, or that was taken out of its pool, and replaces it when it is free ([`members`]). This holds
//! for each VM of the pool, also if it is assigned from another one.
//!
//! **Retention** counts from the last use: `lastUsed`, or the end of the last connection to the console, if that is later. Clocks differ,
//! so whoever wants the VM has to wait for [`CLOCK_SKEW`] more. If nobody takes it, the manager ends the assignment [`GRACE`] after that.
//! Nothing ends while somebody is at the console, nor because of a retention that can't be read, nor because of a pool that is not known.
//!
//! **Writes** name the resourceVersion of the VM that was read, so at most one of several succeeds: two people never get the same VM.
//! Two clicks of one person may get two VMs; each goes on until [`assign`] answers with a VM, so the later one finds both, and releases one.
//! A crash between two writes leaves a state from which the next call, or the manager, goes on.

pub mod members;
pub mod retention;
pub mod template;
pub mod upkeep;

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    apimachinery::pkg::apis::meta::v1::{Condition, Time},
    jiff::{SignedDuration, Timestamp},
};
use kube::{ResourceExt, core::DynamicObject};
use serde_json::{Value, json};

use self::{
    retention::{Retention, RetentionError, later},
    template::{Made, Template},
};
use crate::{
    api::{
        Assignment, VirtualMachine, VmPoolSpec,
        conditions::{self, CONSOLE_CONNECTED, RUNNING},
        pool::{DEFAULT_RETENTION, OldClaims},
        status::whole_seconds,
    },
    object::{POOL_LABEL, STARTED_FOR_ANNOTATION, UNUSED_ANNOTATION},
    people::Rights,
};

/// By how much the clocks of two programs may differ. Nobody gets a VM that is within retention by any of their clocks.
pub const CLOCK_SKEW: SignedDuration = SignedDuration::from_mins(5);
/// For how long a VM stays with its user after others could have taken it.
pub const GRACE: SignedDuration = SignedDuration::from_mins(10);
/// A click so soon after the last one changes nothing.
pub const USE: SignedDuration = SignedDuration::from_mins(1);

/// In how many hexadecimal digits the names of the VMs end that a pool with `spec.reset` makes.
pub const NAME_END: usize = 8;

/// How long a runner may take from its first report of its guest to that of the console.
const AT_ONCE: SignedDuration = SignedDuration::from_secs(10);

/// The pools of a namespace by name. One that is not among them is not known: nothing is taken from its users.
pub type Pools = BTreeMap<String, Pool>;

/// What decides of a pool.
#[derive(Clone, Debug)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its generation.
    pub generation: Option<i64>,
    /// How long its VMs stay with their users.
    pub retention: Result<Retention, RetentionError>,
    /// How many of the VMs that are assigned to nobody are to run.
    pub warm: usize,
    /// Its UID.
    pub uid: Option<String>,
    /// Whether it is being deleted.
    pub is_deleted: bool,
    /// How many VMs the manager makes for it; `None`: it makes and deletes none.
    pub replicas: Option<u32>,
    /// From what it makes them.
    pub template: Option<Template>,
    /// Whether a VM that somebody had is replaced by a new one, and what becomes of its claims then.
    pub reset: Option<OldClaims>,
}

impl Pool {
    /// What decides of the assignments of a pool whose spec could be read. The manager makes no VMs for this one.
    pub fn of(name: &str, generation: Option<i64>, spec: &VmPoolSpec) -> Self {
        let warm = usize::try_from(spec.warm).unwrap_or(usize::MAX);
        Self {
            name: name.to_owned(),
            generation,
            retention: Retention::parse(&spec.retention),
            warm,
            uid: None,
            is_deleted: false,
            replicas: None,
            template: None,
            reset: spec.reset.map(|reset| reset.old_claims),
        }
    }

    /// A pool as the API server has it. Of its spec only these fields are read, so that no other one is in the way.
    pub fn read(pool: &DynamicObject) -> Self {
        let retention = match pool.data.pointer("/spec/retention") {
            None => Retention::parse(DEFAULT_RETENTION),
            Some(Value::String(text)) => Retention::parse(text),
            Some(_) => Err(RetentionError::NoText),
        };
        let warm = pool.data.pointer("/spec/warm").and_then(Value::as_u64).unwrap_or_default();
        let warm = usize::try_from(warm).unwrap_or(usize::MAX);
        let replicas = pool.data.pointer("/spec/replicas").and_then(Value::as_u64);
        let reset = pool.data.pointer("/spec/reset").filter(|reset| !reset.is_null());
        // What can't be read deletes nothing.
        let old_claims = |reset: &Value| match reset["oldClaims"] == "Delete" {
            true => OldClaims::Delete,
            false => OldClaims::Keep,
        };
        let name = pool.name_any();
        Self {
            generation: pool.metadata.generation,
            retention,
            warm,
            uid: pool.uid(),
            is_deleted: pool.metadata.deletion_timestamp.is_some(),
            replicas: replicas.map(|number| u32::try_from(number).unwrap_or(u32::MAX)),
            template: Template::read(&name, pool),
            reset: reset.map(old_claims),
            name,
        }
    }
}

/// A VM that belongs to a pool, or is assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub name: String,
    /// Its resourceVersion.
    pub version: Option<String>,
    /// Its UID.
    pub uid: Option<String>,
    /// Which pool made it.
    pub made: Made,
    /// The pools to which it belongs.
    pub pools: BTreeSet<String>,
    /// Whether it is being deleted. Then it is nobody's.
    pub is_deleted: bool,
    /// To whom it is assigned.
    pub held: Option<Held>,
    /// Its console.
    pub console: Console,
    /// Whether QEMU runs.
    pub runs: bool,
    /// What starting it takes.
    pub start: Start,
    /// The assignment for which it was started last: [`Held::id`].
    pub started_for: Option<String>,
    /// Whether somebody has had it.
    pub used: Use,
    /// Whether it has [`UNUSED_ANNOTATION`], true or not.
    pub is_marked: bool,
}

/// Whether somebody has had a VM since its pool has made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Somebody has, or nobody knows.
    Used,
    /// Nobody has. It is not known yet that its disks are new, too.
    Unused,
    /// Nobody has, but a disk of it was not made for it, or is gone.
    OldDisks,
    /// Nobody has had the VM, nor a disk of it.
    New,
}

impl Use {
    fn of(vm: &VirtualMachine, held: Option<&Held>, console: &Console) -> Self {
        let status = vm.status.as_ref();
        let was_assigned =
            status.is_some_and(|status| status.pools.used_uid.is_some() && status.pools.used_uid == vm.metadata.uid);
        let is_out = vm.labels().get(POOL_LABEL).is_some_and(|pool| !vm.spec.pools.contains(pool));
        let is_marked = vm.annotations().contains_key(UNUSED_ANNOTATION);
        if !is_marked || was_assigned || held.is_some() || is_out || console.was_used {
            return Self::Used;
        }
        let disks = status.and_then(|status| status.new_disks.as_ref());
        match disks.filter(|disks| vm.metadata.uid.as_ref() == Some(&disks.vm_uid)) {
            None => Self::Unused,
            Some(disks) if disks.others.is_empty() => Self::New,
            Some(_) => Self::OldDisks,
        }
    }
}

/// To whom a VM is assigned, and since when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Held {
    /// From which pool; `None` if whoever wrote it did not say so.
    pub pool: Option<String>,
    /// The UID of that pool; `None` until the manager has noted it, if whoever wrote it did not.
    pub pool_uid: Option<String>,
    /// The user.
    pub user: String,
    /// When the user used the VM last.
    pub last_used: Option<Timestamp>,
    /// When it was assigned; `None`: by a program that does not write that.
    pub assigned_at: Option<Timestamp>,
    /// Whether the VM was to be started for this assignment.
    pub starts: bool,
}

/// Who is at a VM's console.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Console {
    /// Whether a viewer is at the display or the serial console, or may be.
    pub is_connected: bool,
    /// When the last viewer came, or the last one went.
    pub since: Option<Timestamp>,
    /// The users who are known to be, or to have been, that viewer: for whom the password was made, and whom the relay has let in.
    pub users: Vec<String>,
    /// Whether a viewer is or was connected since the VM was started last, as far as its status shows.
    pub was_used: bool,
}

/// What starting a VM takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Nothing: it should run already.
    Runs,
    /// A write.
    Needed,
    /// It can't be started, because Git says that it is stopped.
    Refused,
}

/// Who wants a VM.
#[derive(Clone, Debug)]
pub struct Assignee {
    /// The user's name.
    pub user: String,
    /// What she may do in the pool; for whoever gives a VM to somebody else: [`Rights::all`].
    pub rights: Rights,
}

/// A write of `status.assignment` of a VM that has not changed since it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The VM.
    pub vm: String,
    /// The resourceVersion that it must have.
    pub version: Option<String>,
    /// The new assignment; `None`: it is nobody's.
    pub held: Option<Held>,
    /// The VM's UID: that VM was assigned once.
    pub uid: Option<String>,
}

/// What [`assign`] wants next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Give the VM to the user.
    Take(Write),
    /// Take away the second VM of a user who has two.
    Release(Write),
    /// Note that the user uses it.
    Renew(Write),
    /// Start this VM, and note for which assignment ([`Held::id`]) that is.
    Start {
        /// The VM.
        vm: String,
        /// The assignment.
        id: String,
    },
    /// Nothing: she has this VM.
    Done(String),
}

/// Why a person gets no VM. The texts name no object; the caller does.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the texts say what they are")]
pub enum NotAssigned {
    #[error("{user} has no right in the pool: spec.permissions names neither that user nor one of the user's roles")]
    NoRight { user: String },
    #[error("the pool has no VMs: name it in spec.pools of a VM, or wait until the manager has made them")]
    NoMembers,
    #[error(
        "all {} VMs of the pool are in use{}{}{}", members,
        if *renewing > 0 { format!("; {renewing} are being replaced by new ones") } else { String::new() },
        next.map(|time| format!("; the next one is kept until {}", whole_seconds(time))).unwrap_or_default(),
        if *refused > 0 { format!("; {refused} can't be started, because Git says that they are stopped: remove spec.vm.state there") } else { String::new() }
    )]
    NoneFree {
        /// How many VMs belong to the pool.
        members: usize,
        /// How many of them can't be started.
        refused: usize,
        /// How many of them nobody gets, because somebody had them or their disks are not made yet.
        renewing: usize,
        /// When the first of the others can be taken, if that is known.
        next: Option<Timestamp>,
    },
}

impl Member {
    /// What decides of a VM. `start`: what starting it takes.
    pub fn new(vm: &VirtualMachine, start: Start) -> Self {
        let status = vm.status.as_ref();
        let condition = |type_| status.and_then(|status| conditions::find(&status.conditions, type_));
        let held = status.and_then(|status| status.pools.assignment.as_ref()).and_then(Held::of);
        let console = Console::of(vm);
        Self {
            name: vm.name_any(),
            version: vm.resource_version(),
            uid: vm.uid(),
            made: Made::read(vm),
            pools: vm.spec.pools.iter().cloned().collect(),
            is_deleted: vm.metadata.deletion_timestamp.is_some(),
            used: Use::of(vm, held.as_ref(), &console),
            held,
            console,
            runs: condition(RUNNING).is_some_and(|condition| condition.status == "True"),
            start,
            started_for: vm.annotations().get(STARTED_FOR_ANNOTATION).cloned(),
            is_marked: vm.annotations().contains_key(UNUSED_ANNOTATION),
        }
    }

    /// To whom it is assigned, if it is from this pool, and if it stays there.
    fn held_from(&self, pool: &str) -> Option<&Held> {
        self.held.as_ref().filter(|held| held.pool.as_deref() == Some(pool) && !self.is_deleted)
    }

    /// When the VM was last used by whoever has it, as far as that is known.
    fn last_use(&self, held: &Held) -> Timestamp {
        let closed = self.console.since.filter(|_| !self.console.is_connected);
        [held.last_used, held.assigned_at, closed].into_iter().flatten().max().unwrap_or(Timestamp::UNIX_EPOCH)
    }

    /// From when on somebody else may take the VM from whoever has it. `None`: never, or it is not known.
    pub fn taken_from(&self, pools: &Pools) -> Option<Timestamp> {
        let held = self.held.as_ref()?;
        let retention = pools.get(held.pool.as_deref()?)?.retention.as_ref().ok()?;
        Some(later(retention.end(self.last_use(held))?, CLOCK_SKEW))
    }

    /// The start that an assignment wants and that nobody has done yet: the ID of the assignment.
    pub fn pending_start(&self) -> Option<String> {
        let id = self.held.as_ref().filter(|held| held.starts)?.id();
        (self.started_for.as_ref() != Some(&id)).then_some(id)
    }

    /// The number at the end of its name. Names of a pool with `spec.reset` have none.
    fn number_in(&self, pool: &Pool) -> Option<u32> {
        let text = self.name.strip_prefix(&pool.name)?.strip_prefix('-')?;
        text.parse().ok().filter(|number: &u32| number.to_string() == text)
    }

    /// Whether the manager made it for the pool.
    fn is_made_by(&self, pool: &Pool) -> bool {
        let end = self.name.strip_prefix(&pool.name).and_then(|rest| rest.strip_prefix('-')).unwrap_or_default();
        let is_random = end.len() == NAME_END && end.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        let is_own = match &self.made.owner {
            Some(owner) => Some(owner) == pool.uid.as_ref(),
            None => self.made.pool.as_ref() == Some(&pool.name) && self.made.template.is_some(),
        };
        self.made.is_proven && is_own && (is_random || self.number_in(pool).is_some())
    }

    /// Whether the pool that made the VM wants fewer: it is deleted when it is free, so nobody gets it.
    pub fn is_surplus(&self, pools: &Pools) -> bool {
        let made_by = self.made.pool.as_ref().and_then(|pool| pools.get(pool));
        // A pool with `spec.reset` has no numbers: which of its VMs go is decided when they are deleted.
        made_by.filter(|pool| pool.reset.is_none() && self.is_made_by(pool)).is_some_and(|pool| {
            let wanted = pool.replicas.filter(|_| pool.template.is_some());
            wanted.is_some_and(|wanted| self.number_in(pool).is_none_or(|number| number >= wanted))
        })
    }

    /// Whether somebody has it, or is at its console.
    fn is_in_use(&self) -> bool {
        self.held.is_some() || self.console.is_connected
    }

    /// Whether a pool of it gives nobody a disk that somebody else had.
    fn is_reset(&self, pools: &Pools) -> bool {
        self.pools.iter().any(|pool| pools.get(pool).is_some_and(|pool| pool.reset.is_some()))
    }

    /// Whether somebody may get it who has not had it: if its pools ask for new disks, it must have such.
    pub fn is_clean(&self, pools: &Pools) -> bool {
        self.used == Use::New || !self.is_reset(pools)
    }

    /// Whether the annotation is to be taken away that says that nobody has had it.
    pub fn is_to_be_marked(&self) -> bool {
        self.is_marked && self.used == Use::Used
    }

    fn write(&self, held: Option<Held>) -> Write {
        Write { vm: self.name.clone(), version: self.version.clone(), held, uid: self.uid.clone() }
    }
}

impl Console {
    fn of(vm: &VirtualMachine) -> Self {
        let status = vm.status.as_ref();
        let condition = |type_| status.and_then(|status| conditions::find(&status.conditions, type_));
        let (console, running) = (condition(CONSOLE_CONNECTED), condition(RUNNING));
        let has = |condition: Option<&Condition>, status| condition.is_some_and(|condition| condition.status == status);
        // Without a guest that runs this is what an earlier runner wrote.
        let at_serial = status.filter(|_| has(running, "True")).map(|status| status.runner.serial_users.as_slice());
        let at_serial = at_serial.unwrap_or_default();
        let users =
            status.iter().flat_map(|status| [&status.display.console_user, &status.runner.console_client]).flatten();
        let users: Vec<String> = users.chain(at_serial).filter(|user| !user.is_empty()).cloned().collect();
        let is_viewed = has(console, "True") || !at_serial.is_empty();
        // Its node does not answer: somebody may be there.
        let is_connected = is_viewed || has(console, "Unknown");
        // A runner reports both when it starts, and this one again when a viewer has gone.
        let has_changed = console.zip(running).is_some_and(|(console, running)| {
            let [left, started] = [console, running].map(|condition| condition.last_transition_time.0);
            console.status == "False" && running.status == "True" && left > later(started, AT_ONCE)
        });
        Self {
            is_connected,
            since: console.map(|console| console.last_transition_time.0),
            was_used: is_viewed || has_changed || !users.is_empty(),
            users,
        }
    }
}

impl Held {
    /// An assignment as it is stored. One without a user is none.
    pub fn of(assignment: &Assignment) -> Option<Self> {
        let user = assignment.user.clone().filter(|user| !user.is_empty())?;
        let time = |time: &Option<Time>| time.as_ref().map(|time| time.0);
        Some(Self {
            pool: assignment.pool.clone(),
            pool_uid: assignment.pool_uid.clone(),
            user,
            last_used: time(&assignment.last_used),
            assigned_at: time(&assignment.assigned_at),
            starts: assignment.starts == Some(true),
        })
    }

    /// Whether it is from this pool, and not from a former one of its name.
    pub fn is_from(&self, pool: &Pool) -> bool {
        let is_other = self.pool_uid.as_ref().zip(pool.uid.as_ref()).is_some_and(|(held, uid)| held != uid);
        self.pool.as_ref() == Some(&pool.name) && !is_other
    }

    /// What tells this assignment of a VM from its others.
    pub fn id(&self) -> String {
        format!("{} {}", self.assigned_at.map(whole_seconds).unwrap_or_default(), self.user)
    }
}

impl Write {
    /// The merge patch of `vms/status`. It names each field, because a field that it does not name stays.
    pub fn patch(&self) -> Value {
        let assignment = self.held.as_ref().map(|held| {
            json!({
                "pool": held.pool, "poolUid": held.pool_uid, "user": held.user,
                "lastUsed": held.last_used.map(whole_seconds), "assignedAt": held.assigned_at.map(whole_seconds),
                "starts": held.starts.then_some(true),
            })
        });
        json!({ "metadata": { "resourceVersion": self.version }, "status": { "assignment": assignment, "usedUid": self.uid } })
    }
}

/// What gives the person a VM of the pool: see the table at the head of this module. `members` are VMs as they are now, not as a watch has
/// them. The caller does the step, reads again, and asks again, until she has a VM.
///
/// # Errors
/// Why she gets none.
pub fn assign(
    pool: &str,
    pools: &Pools,
    members: &[Member],
    who: &Assignee,
    now: Timestamp,
) -> Result<Step, NotAssigned> {
    if who.rights.is_empty() {
        return Err(NotAssigned::NoRight { user: who.user.clone() });
    }
    let mut own = held_by(members, pool, &who.user);
    own.retain(|(_, held)| pools.get(pool).is_none_or(|pool| held.is_from(pool)));
    if let Some(((kept, held), others)) = own.split_first() {
        if let Some((other, _)) = others.iter().find(|(other, _)| !other.console.is_connected) {
            return Ok(Step::Release(other.write(None)));
        }
        if later(held.last_used.unwrap_or(Timestamp::UNIX_EPOCH), USE) <= now {
            return Ok(Step::Renew(kept.write(Some(Held { last_used: Some(now), ..(*held).clone() }))));
        }
        return Ok(match kept.pending_start() {
            Some(id) => Step::Start { vm: kept.name.clone(), id },
            None => Step::Done(kept.name.clone()),
        });
    }
    match candidates(pool, pools, members, now).first() {
        Some(first) => Ok(Step::Take(first.write(Some(Held {
            pool: Some(pool.to_owned()),
            pool_uid: pools.get(pool).and_then(|pool| pool.uid.clone()),
            user: who.user.clone(),
            last_used: Some(now),
            assigned_at: Some(now),
            starts: first.start == Start::Needed,
        })))),
        None => Err(none_free(pool, pools, members)),
    }
}

/// The VMs of the pool that somebody may get now, in the order in which they are given.
pub fn candidates<'a>(pool: &str, pools: &Pools, members: &'a [Member], now: Timestamp) -> Vec<&'a Member> {
    let is_free = |member: &Member| match &member.held {
        None => true,
        Some(_) => !member.is_reset(pools) && member.taken_from(pools).is_some_and(|time| time <= now),
    };
    let of_pool = members.iter().filter(|member| member.pools.contains(pool) && !member.is_deleted);
    let mut candidates: Vec<_> = of_pool
        .filter(|member| !member.console.is_connected && member.start != Start::Refused && is_free(member))
        .filter(|member| !member.is_surplus(pools) && member.is_clean(pools))
        .collect();
    candidates.sort_by_key(|member| {
        let last_use = member.held.as_ref().map(|held| member.last_use(held));
        (last_use, !member.runs, member.name.clone())
    });
    candidates
}

fn none_free(pool: &str, pools: &Pools, members: &[Member]) -> NotAssigned {
    let of_pool = || members.iter().filter(|member| member.pools.contains(pool) && !member.is_deleted);
    let (refused, others): (Vec<_>, Vec<_>) = of_pool().partition(|member| member.start == Start::Refused);
    match of_pool().count() {
        0 => NotAssigned::NoMembers,
        members => NotAssigned::NoneFree {
            members,
            refused: refused.len(),
            renewing: others.iter().filter(|member| member.held.is_none() && !member.is_clean(pools)).count(),
            next: others
                .iter()
                .filter(|member| !member.console.is_connected && !member.is_reset(pools))
                .filter_map(|member| member.taken_from(pools))
                .min(),
        },
    }
}

/// The VMs that a user has from a pool. The first one is the one that she keeps.
fn held_by<'a>(members: &'a [Member], pool: &str, user: &str) -> Vec<(&'a Member, &'a Held)> {
    let held = members.iter().filter_map(|member| Some((member, member.held_from(pool)?)));
    let mut own: Vec<_> = held.filter(|(_, held)| held.user == user).collect();
    own.sort_by_key(|(member, held)| (held.assigned_at, member.name.clone()));
    own
}

/// What takes all VMs of the pool from the user: nothing, if she has none.
pub fn release(pool: &str, members: &[Member], user: &str) -> Vec<Write> {
    let own = members.iter().filter(|member| member.held_from(pool).is_some_and(|held| held.user == user));
    own.map(|member| member.write(None)).collect()
}

/// What makes a VM nobody's; `None`: it is.
pub fn unassign(member: &Member) -> Option<Write> {
    member.held.as_ref().map(|_| member.write(None))
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
