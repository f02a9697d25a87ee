//! Two replicas assign the VMs of three pools to fifty users while everything else goes on: VMs start, stop, come and go, pools too,
//! people are at consoles, replicas are killed between any two writes, clocks differ by five minutes. Each property has a check of its name
//! in [`properties`].
//! [`made`]: a fourth pool whose VMs the manager makes, sometimes with `spec.reset`, and warm VMs.

mod made;
mod properties;

use std::collections::{BTreeMap, BTreeSet};

use self::properties::it_ends;
use super::{
    members::MemberWrite,
    upkeep::{Why, upkeep},
    *,
};

const USERS: usize = 50;
const VMS: usize = 20;
const STEPS: usize = 10_000;
/// The clocks of the two replicas, and the slowest and fastest of a runner, in seconds beside the true time.
const CLOCKS: [i64; 2] = [-150, 150];
const BEGIN: i64 = 1_800_000_000;

/// What the API server has.
#[derive(Clone, Default)]
struct Stored {
    vms: BTreeMap<String, Member>,
    pools: Pools,
}

/// A person's click, on its way in a replica.
struct Call {
    replica: usize,
    pool: String,
    who: Assignee,
    /// What was read and what follows from it, until that is written.
    read: Option<(Stored, Step, i64)>,
    reads: usize,
    writes: usize,
    conflicts: usize,
}

/// A round of the manager: what it read, and what it has not yet written of it.
struct Round {
    read: Stored,
    /// The VMs that are marked as used.
    marked: Vec<String>,
    writes: Vec<(Why, Write)>,
    starts: Vec<(String, String)>,
    /// The VMs to be warm, and the writes for each pool that makes VMs.
    warmed: Vec<String>,
    made: Vec<(String, MemberWrite)>,
}

struct World {
    random: fastrand::Rng,
    stored: Stored,
    /// The true time in seconds.
    time: i64,
    versions: u64,
    /// What the manager's watch shows, which may be behind.
    seen: Stored,
    calls: Vec<Call>,
    round: Option<Round>,
    /// When each VM was really used last.
    used: BTreeMap<String, i64>,
    /// Who had each VM after the last step, and who took one from somebody else in this step.
    history: BTreeMap<String, Option<String>>,
    taken: Option<(String, String)>,
    /// The starts that were done, by VM and assignment.
    started: BTreeSet<(String, String)>,
    taken_from_others: usize,
    conflicts: usize,
    duplicates: usize,
    ended: usize,
    /// How many VMs the manager has made, changed and deleted for pools, and started to be warm.
    made: [usize; 4],
    /// The VMs that somebody has had, or at whose console somebody was. A VM that is made again under the name has its claims.
    had: BTreeSet<String>,
    /// How many names of VMs were thought of.
    names: usize,
    /// How many VMs of a pool with `spec.reset` were given to somebody.
    new_ones: usize,
}

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(seconds).unwrap()
}

fn pool(name: &str, retention: &str) -> Pool {
    Pool {
        name: name.into(),
        generation: Some(1),
        retention: Retention::parse(retention),
        warm: 0,
        uid: None,
        is_deleted: false,
        replicas: None,
        template: None,
        reset: None,
    }
}

impl World {
    fn new(seed: u64) -> Self {
        let mut world = Self {
            random: fastrand::Rng::with_seed(seed),
            stored: Stored::default(),
            time: BEGIN,
            versions: 0,
            seen: Stored::default(),
            calls: Vec::new(),
            round: None,
            used: BTreeMap::new(),
            history: BTreeMap::new(),
            taken: None,
            started: BTreeSet::new(),
            taken_from_others: 0,
            conflicts: 0,
            duplicates: 0,
            ended: 0,
            made: [0; 4],
            had: BTreeSet::new(),
            names: 0,
            new_ones: 0,
        };
        for name in ["a", "b", "c"] {
            world.create_pool(name);
        }
        world.change_made_pool();
        for number in 0..VMS {
            world.create_vm(&format!("vm-{number:02}"));
        }
        world
    }

    fn create_pool(&mut self, name: &str) {
        let retentions = ["PT1H", "PT20M", "P1D", "2027-01-15T12:00:00Z", "PT0S"];
        let retention = if name == "a" { "PT1H" } else { retentions[self.random.usize(..retentions.len())] };
        let warm = self.random.usize(..3);
        self.stored.pools.insert(name.into(), Pool { warm, ..pool(name, retention) });
    }

    fn create_vm(&mut self, name: &str) {
        let pools = match self.random.u8(..4) {
            0 => vec!["a", "b"],
            1 => vec!["a", "b", "c"],
            _ => vec!["a"],
        };
        let start = match self.random.u8(..10) {
            0 => Start::Refused,
            1..5 => Start::Runs,
            _ => Start::Needed,
        };
        let member = Member {
            name: name.into(),
            version: None,
            uid: None,
            made: Made::default(),
            pools: pools.into_iter().map(str::to_owned).collect(),
            is_deleted: false,
            held: None,
            console: Console::default(),
            runs: start == Start::Runs,
            start,
            started_for: None,
            used: Use::Used,
            is_marked: false,
        };
        self.stored.vms.insert(name.into(), member);
        self.used.remove(name);
        self.change(name, |_| ());
    }

    /// A write: it gives the VM another version.
    fn change(&mut self, name: &str, edit: impl FnOnce(&mut Member)) {
        self.versions += 1;
        let member = self.stored.vms.get_mut(name).unwrap();
        edit(member);
        member.version = Some(self.versions.to_string());
    }

    fn any_vm(&mut self) -> Option<String> {
        let names: Vec<_> = self.stored.vms.keys().cloned().collect();
        self.random.choice(names)
    }

    fn any_pool(&mut self) -> String {
        ["a", "a", "b", "c", "d"][self.random.usize(..5)].to_owned()
    }

    fn click(&mut self) {
        let number = self.random.usize(..USERS);
        // The last ones have no rights.
        let rights = if number < USERS - 5 { Rights::all() } else { Rights::default() };
        let (pool, who) = match self.calls.first() {
            Some(other) if self.random.bool() => (other.pool.clone(), other.who.clone()),
            _ => (self.any_pool(), Assignee { user: format!("user-{number}"), rights }),
        };
        let mut call = Call {
            replica: self.random.usize(..CLOCKS.len()),
            pool,
            who,
            read: None,
            reads: 0,
            writes: 0,
            conflicts: 0,
        };
        // Some click twice, and the clicks reach any replica. Meanwhile another VM may have become the first one.
        if self.random.bool() {
            let replica = self.random.usize(..CLOCKS.len());
            let (pool, who) = (call.pool.clone(), call.who.clone());
            self.calls.push(Call { replica, pool, who, read: None, reads: 0, writes: 0, conflicts: 0 });
            // Between the two an administrator takes a VM away from its user.
            if !self.advance(&mut call) {
                return;
            }
            let held: Vec<_> = self.stored.vms.values().filter_map(unassign).collect();
            if let Some(write) = self.random.choice(held) {
                self.write(write);
            }
        }
        self.calls.push(call);
    }

    /// One request of a call: it reads, or writes what follows from that. Returns whether the call goes on.
    fn advance(&mut self, call: &mut Call) -> bool {
        let Some((read, step, read_at)) = call.read.take() else {
            call.reads += 1;
            let members: Vec<_> = self.stored.vms.values().cloned().collect();
            let now = at(self.time + CLOCKS[call.replica]);
            let step = match assign(&call.pool, &self.stored.pools, &members, &call.who, now) {
                Ok(step) => step,
                Err(refusal) => {
                    self.no_right_no_vm(call, &refusal);
                    return false;
                }
            };
            if let Step::Done(vm) = &step {
                self.repeating_changes_nothing(call, vm, &members, now);
                return false;
            }
            call.read = Some((self.stored.clone(), step, self.time));
            return true;
        };
        let (vm, version) = match &step {
            Step::Take(write) | Step::Release(write) | Step::Renew(write) => (&write.vm, &write.version),
            Step::Start { vm, .. } => (vm, &read.vms[vm].version),
            Step::Done(_) => unreachable!(),
        };
        // 404 or 409.
        if self.stored.vms.get(vm).is_none_or(|stored| stored.version != *version) {
            call.conflicts += 1;
            self.conflicts += 1;
            return true;
        }
        call.writes += 1;
        match step {
            Step::Take(write) => {
                assert!(!call.who.rights.is_empty(), "no right, no VM");
                self.nobody_is_taken_within_retention_or_at_the_console(&write.vm, &read.pools, &call.who.user);
                self.the_chosen_one_is_the_first(&call.pool, &read, &write.vm, at(read_at + CLOCKS[call.replica]));
                self.nobody_gets_a_disk_that_somebody_had(&write.vm, &read.pools);
                self.used.insert(write.vm.clone(), read_at);
                self.write(write);
            }
            Step::Release(write) => {
                self.duplicates += 1;
                self.the_user_keeps_another(&write.vm, &read);
                self.write(write);
            }
            Step::Renew(write) => {
                self.used.insert(write.vm.clone(), read_at);
                self.write(write);
            }
            Step::Start { vm, id } => self.start(&vm, id),
            Step::Done(_) => unreachable!(),
        }
        true
    }

    fn write(&mut self, write: Write) {
        let kept = write.held.map(|held| {
            // The API server keeps whole seconds.
            let seconds = |time: Option<Timestamp>| time.map(|time| at(time.as_second()));
            Held { last_used: seconds(held.last_used), assigned_at: seconds(held.assigned_at), ..held }
        });
        self.had.insert(write.vm.clone());
        self.change(&write.vm, |member| (member.held, member.used) = (kept, Use::Used));
    }

    fn start(&mut self, vm: &str, id: String) {
        assert!(
            self.started.insert((vm.to_owned(), id.clone())),
            "repeating changes nothing: {vm} was started for {id} before"
        );
        self.change(vm, |member| {
            member.started_for = Some(id);
            if member.start == Start::Needed {
                member.start = Start::Runs;
                member.runs = true;
            }
        });
    }

    /// One request of the manager.
    fn manage(&mut self, clock: i64) {
        self.make_disks(false);
        let Some(round) = &mut self.round else {
            let members: Vec<_> = self.seen.vms.values().cloned().collect();
            let upkeep = upkeep(&self.seen.pools, &members, at(self.time + clock));
            let (warmed, made) = (upkeep.warmed.into_iter().collect::<Vec<_>>(), self.member_writes(&members));
            let (marked, writes, starts) = (upkeep.used.into_iter().collect::<Vec<_>>(), upkeep.writes, upkeep.starts);
            if !(marked.is_empty() && writes.is_empty() && starts.is_empty() && warmed.is_empty() && made.is_empty()) {
                self.round = Some(Round { read: self.seen.clone(), marked, writes, starts, warmed, made });
            }
            return;
        };
        let read = round.read.clone();
        let is_same = |stored: &Stored, vm: &String| {
            stored.vms.get(vm).is_some_and(|stored| Some(&stored.version) == read.vms.get(vm).map(|vm| &vm.version))
        };
        if let Some(vm) = round.marked.pop() {
            if self.stored.vms.contains_key(&vm) {
                self.change(&vm, |member| (member.used, member.is_marked) = (Use::Used, false));
            }
        } else if let Some((why, write)) = round.writes.pop() {
            let held = self.stored.vms.get(&write.vm).and_then(|vm| vm.held.as_ref());
            let is_from = |pool: &Pool| held.is_none_or(|held| held.is_from(pool));
            let exists = matches!(&why, Why::PoolDeleted(pool) if self.stored.pools.get(pool).is_some_and(is_from));
            if exists || !is_same(&self.stored, &write.vm) {
                return;
            }
            match why {
                Why::Expired => {
                    self.nobody_is_taken_within_retention_or_at_the_console(&write.vm, &read.pools, "the manager");
                    self.ended += 1;
                }
                Why::Duplicate => {
                    self.the_user_keeps_another(&write.vm, &read);
                    self.duplicates += 1;
                }
                Why::Used | Why::Noted => assert_eq!(
                    write.held.as_ref().map(|held| &held.user),
                    self.stored.vms[&write.vm].held.as_ref().map(|held| &held.user)
                ),
                Why::PoolDeleted(_) => {}
            }
            self.write(write);
        } else if let Some((vm, id)) = round.starts.pop() {
            if is_same(&self.stored, &vm) {
                self.start(&vm, id);
            }
        } else if let Some(vm) = round.warmed.pop() {
            self.warm(&vm);
        } else if let Some((pool, write)) = round.made.pop() {
            self.write_member(&read, &pool, write);
        } else {
            self.round = None;
        }
    }

    /// What others do.
    fn disturb(&mut self) {
        let Some(vm) = self.any_vm() else { return };
        let runner = self.time + self.random.i64(CLOCKS[0]..=CLOCKS[1]);
        let member = self.stored.vms[&vm].clone();
        match self.random.u8(..26) {
            // Somebody comes to the console, or goes.
            0..=5 if member.console.is_connected => {
                self.used.insert(vm.clone(), self.time);
                self.change(&vm, |member| {
                    member.console = Console { is_connected: false, since: Some(at(runner)), ..member.console.clone() };
                });
            }
            0..=5 if member.runs => {
                let holder = member.held.map(|held| held.user);
                let user = if self.random.u8(..4) == 0 { "admin".to_owned() } else { holder.unwrap_or("admin".into()) };
                self.had.insert(vm.clone());
                self.change(&vm, |member| {
                    member.console =
                        Console { is_connected: true, since: Some(at(runner)), users: vec![user], was_used: true };
                    member.used = Use::Used;
                });
            }
            6..=8 if member.start != Start::Refused => {
                let runs = self.random.bool();
                self.change(&vm, |member| {
                    member.start = if runs { Start::Runs } else { Start::Needed };
                    member.runs = runs;
                });
            }
            9..=11 => self.change(&vm, |_| ()),
            13 => {
                self.stored.vms.remove(&vm);
            }
            14 | 15 => {
                let missing =
                    (0..VMS).map(|number| format!("vm-{number:02}")).find(|name| !self.stored.vms.contains_key(name));
                if let Some(name) = missing {
                    self.create_vm(&name);
                }
            }
            12 | 16 => {
                let name = self.any_pool();
                // Pool `a` stays, or there would be little to see.
                if name == "d" {
                    self.change_made_pool();
                } else if name != "a" && self.random.bool() {
                    self.stored.pools.remove(&name);
                } else if self.random.u8(..3) == 0 {
                    self.stored.pools.insert(name.clone(), pool(&name, "some time"));
                } else {
                    self.create_pool(&name);
                }
            }
            17 => {
                if let Some(write) = unassign(&member) {
                    self.write(write);
                }
            }
            18 => {
                let members: Vec<_> = self.stored.vms.values().cloned().collect();
                let user = format!("user-{}", self.random.usize(..USERS));
                for write in release("a", &members, &user) {
                    self.write(write);
                }
            }
            20..26 => self.disturb_made(&vm),
            _ => self.change(&vm, |member| member.is_deleted = true),
        }
    }

    fn step(&mut self) {
        match self.random.u8(..100) {
            0..8 if self.calls.len() < 12 => self.click(),
            8..60 if !self.calls.is_empty() => {
                let mut call = self.calls.swap_remove(self.random.usize(..self.calls.len()));
                if self.advance(&mut call) {
                    self.calls.push(call);
                } else {
                    it_ends(&call);
                }
            }
            60..62 => {
                // A replica is killed, and with it all that it had begun; the leader too.
                let replica = self.random.usize(..CLOCKS.len());
                self.calls.retain(|call| call.replica != replica);
                self.round = None;
            }
            62..70 => self.seen = self.stored.clone(),
            70..82 => {
                let clock = CLOCKS[self.random.usize(..CLOCKS.len())];
                self.manage(clock);
            }
            82..84 => self.time += self.random.i64(0..900),
            84..86 => self.pass_until_nearly_the_end_of_an_assignment(),
            86..90 => self.time += self.random.i64(0..20),
            _ => self.disturb(),
        }
        self.never_two_users_on_a_vm();
    }

    /// Where a program with a wrong clock would be too early.
    fn pass_until_nearly_the_end_of_an_assignment(&mut self) {
        let end = |member: &Member| {
            let held = member.held.as_ref()?;
            let retention = self.stored.pools.get(held.pool.as_ref()?)?.retention.as_ref().ok()?;
            Some(retention.end(at(self.used[&member.name]))?.as_second())
        };
        let ends: Vec<_> = self.stored.vms.values().filter_map(end).filter(|end| *end > self.time).collect();
        // The nearest end of all: the others are within retention, too.
        if let Some(end) = ends.into_iter().min().filter(|end| end - self.time < 2 * 3600) {
            self.time = self.time.max(end - self.random.i64(1..120));
        }
    }

    /// All calls end, all leave, and the manager does what is left.
    fn come_to_rest(&mut self) {
        for mut call in std::mem::take(&mut self.calls) {
            let before = call.reads;
            while self.advance(&mut call) {
                self.never_two_users_on_a_vm();
                assert!(call.reads - before < VMS + 5, "it ends");
            }
        }
        for vm in self.stored.vms.keys().cloned().collect::<Vec<_>>() {
            if self.stored.vms[&vm].console.is_connected {
                self.used.insert(vm.clone(), self.time);
                let time = at(self.time);
                self.change(&vm, |member| {
                    member.console = Console { is_connected: false, since: Some(time), ..member.console.clone() }
                });
            }
        }
        self.settle();
        self.at_rest_at_most_one_vm_per_user_and_pool();
        self.at_rest_no_assignment_of_a_pool_that_does_not_exist();
        self.at_rest_the_pools_have_the_vms_that_they_want();
        self.at_rest_as_many_are_warm_as_can_be();
        self.never_two_users_on_a_vm();
    }

    /// Later than all retentions.
    fn come_to_the_end(&mut self) {
        self.come_to_rest();
        self.time += 200 * 86_400;
        self.settle();
        self.no_vm_is_lost();
    }

    /// The manager works until it has nothing to do now.
    fn settle(&mut self) {
        self.round = None;
        for _ in 0..VMS {
            self.make_disks(true);
            self.seen = self.stored.clone();
            self.manage(0);
            if self.round.is_none() {
                return;
            }
            while self.round.is_some() {
                self.manage(0);
            }
            // Starts are left to whoever assigned the VM for some seconds.
            self.time += 60;
        }
        panic!("repeating changes nothing: the manager never comes to rest");
    }
}

#[test]
fn fifty_users_and_two_replicas_share_twenty_vms() {
    let mut happened = [0; 9];
    for seed in 0..2 {
        let mut world = World::new(seed);
        for step in 1..=STEPS {
            world.step();
            if step % 100 == 0 {
                world.come_to_rest();
            }
        }
        world.come_to_the_end();
        let World { taken_from_others, conflicts, duplicates, ended, made, new_ones, .. } = world;
        happened
            .iter_mut()
            .zip([taken_from_others, conflicts, duplicates, ended].into_iter().chain(made).chain([new_ones]))
            .for_each(|(sum, count)| *sum += count);
    }
    // What the properties are about has happened: VMs taken from others, conflicts, second VMs of users, ends by time, VMs made,
    // changed and deleted for a pool, started to be warm, and given away as new ones.
    assert!(happened.iter().all(|count| *count > 5), "{happened:?}");
}
