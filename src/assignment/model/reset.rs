//! Pools that bring disks back between two users. Each VM has a disk; the manager reconciles it, in two steps between which anything happens, and so its
//! Pod writes to a claim. People have claims with such names too.

use super::*;
use crate::{
    api::status::{DiskReset, ResetState},
    assignment::reset::{Claim, Down, MemberDisk, Rule, Standing, Step, look, may_be_deleted, renewed},
    claims::number,
};

const VOLUME: &str = "d-disk";

#[derive(Clone, Debug)]
struct OneClaim {
    uid: String,
    created: i64,
    /// The VM for which the manager has made it; `None`: a person has.
    vm: Option<String>,
    /// Who has used it.
    users: BTreeSet<String>,
}

/// What a reconcile has read, or has written into the status.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    created: i64,
    generation: u64,
    number: u32,
    runs: bool,
    has_pod: bool,
}

#[derive(Default)]
pub(super) struct Disks {
    claims: BTreeMap<String, OneClaim>,
    /// To which claim the guest of each VM writes.
    pods: BTreeMap<String, String>,
    created: BTreeMap<String, i64>,
    generations: BTreeMap<String, (Start, u64)>,
    /// What the status of each VM says.
    observed: BTreeMap<String, Seen>,
    /// The VMs of which Git says that they run.
    git: BTreeSet<String>,
    ran: BTreeSet<String>,
    /// A reconcile that has read its VM.
    reading: Option<(String, Seen)>,
    /// A step of a reset, and the version of the VM from which it follows.
    pub(super) begun: Option<(String, Option<String>, Step, DiskReset)>,
    /// Who has got each VM of a pool that resets it.
    owners: BTreeMap<String, String>,
    uids: u64,
    /// How often disks were given new claims, were fresh, and claims were deleted.
    pub(super) done: [usize; 3],
}

impl Disks {
    /// What decides of the reset, after a change of the VM.
    pub(super) fn refresh(&mut self, member: &mut Member) {
        let seen = self.observed.get(&member.name).cloned().unwrap_or_default();
        let known = self.generations.entry(member.name.clone()).or_insert((member.start, 1));
        if known.0 != member.start {
            *known = (member.start, known.1 + 1);
        }
        let facts = &mut member.reset;
        facts.down = match member.start {
            _ if self.git.contains(&member.name) => Down::Refused,
            Start::Runs => Down::Needed,
            _ if seen.generation == known.1 && !seen.has_pod => Down::Yes,
            _ => Down::Stopping,
        };
        let number = facts.done.number(VOLUME);
        for disk in facts.disks.iter_mut().flatten() {
            disk.is_made = seen.generation > 0 && seen.number == number;
        }
        facts.has_run = self.ran.contains(&member.name);
    }
}

impl World {
    pub(super) fn any_rule(&mut self) -> Option<Rule> {
        let deletes = self.random.bool();
        match self.random.u8(..8) {
            0 => Some(Rule { disks: None, deletes }),
            1 => Some(Rule { disks: Some(BTreeSet::from(["d".to_owned()])), deletes }),
            _ => None,
        }
    }

    /// A VM is made. Claims of its name stay from before.
    pub(super) fn create_disks(&mut self, name: &str) {
        self.time += 1;
        let disks = &mut self.disks;
        for forgotten in [&mut disks.git, &mut disks.ran] {
            forgotten.remove(name);
        }
        disks.pods.remove(name);
        disks.observed.remove(name);
        disks.owners.remove(name);
        disks.created.insert(name.to_owned(), self.time);
        disks.generations.remove(name);
        if self.random.u8(..20) == 0 {
            disks.git.insert(name.to_owned());
        }
        if self.random.u8(..8) == 0 {
            let copy = number::name(name, VOLUME, self.random.u32(1..9));
            disks.uids += 1;
            let claim =
                OneClaim { uid: format!("{}", disks.uids), created: self.time, vm: None, users: BTreeSet::new() };
            disks.claims.entry(copy).or_insert(claim);
        }
        let disk = MemberDisk {
            name: "d".into(),
            volume: VOLUME.into(),
            has_source: self.random.u8(..10) > 0,
            is_pinned: false,
            is_made: false,
        };
        let member = self.stored.vms.get_mut(name).unwrap();
        member.reset.created = Some(at(self.time));
        member.reset.disks = Some(vec![disk]);
    }

    /// One half of a reconcile.
    pub(super) fn reconcile(&mut self, vm: &str) {
        let Some((name, mut seen)) = self.disks.reading.take() else {
            let Some(member) = self.stored.vms.get(vm) else { return };
            let seen = Seen {
                created: self.disks.created[vm],
                generation: self.disks.generations[vm].1,
                number: member.reset.done.number(VOLUME),
                runs: member.start == Start::Runs && !member.is_deleted,
                has_pod: false,
            };
            self.disks.reading = Some((vm.to_owned(), seen));
            return;
        };
        if !self.stored.vms.contains_key(&name) || self.disks.created[&name] != seen.created {
            return;
        }
        let disks = &mut self.disks;
        let claim = number::name(&name, VOLUME, seen.number);
        disks.uids += 1;
        let made = OneClaim {
            uid: format!("{}", disks.uids),
            created: self.time,
            vm: Some(name.clone()),
            users: BTreeSet::new(),
        };
        let used = disks.claims.entry(claim.clone()).or_insert(made);
        assert!(used.vm.is_some(), "nobody gets a claim that a person has made: {claim}");
        if seen.runs {
            disks.pods.entry(name.clone()).or_insert(claim);
            disks.ran.insert(name.clone());
        } else if self.random.bool() {
            disks.pods.remove(&name);
        }
        seen.has_pod = disks.pods.contains_key(&name);
        if disks.observed.get(&name) != Some(&seen) {
            disks.observed.insert(name.clone(), seen);
            self.change(&name, |_| ());
        }
    }

    /// The manager's requests about a VM: it is read, and a step follows.
    pub(super) fn begin_reset(&mut self, vm: &str) {
        let Some(member) = self.stored.vms.get(vm) else { return };
        let Standing::Do(step) = look(member, &self.stored.pools) else { return };
        let claims = self.disks.claims.iter().map(|(name, claim)| claim_of(name, claim));
        let done = match step {
            Step::Renew => renewed(member, &self.stored.pools, &claims.collect::<Vec<_>>()),
            Step::Finish => DiskReset { state: Some(ResetState::Fresh), ..member.reset.done.clone() },
            Step::Mark => DiskReset { state: None, ..member.reset.done.clone() },
            Step::Delete => DiskReset { replaced: Vec::new(), ..member.reset.done.clone() },
            Step::Stop => member.reset.done.clone(),
        };
        if step == Step::Delete {
            let member = member.clone();
            for replaced in &member.reset.done.replaced {
                let Some(claim) = self.disks.claims.get(&replaced.name) else { continue };
                if may_be_deleted(&member, &claim_of(&replaced.name, claim)) {
                    self.only_what_the_pool_wants_is_deleted(&member, &replaced.name, &replaced.uid);
                    self.disks.claims.remove(&replaced.name);
                    self.disks.done[2] += 1;
                }
            }
        }
        self.disks.begun = Some((vm.to_owned(), self.stored.vms[vm].version.clone(), step, done));
    }

    /// … and is written, if the VM is still as it was. Returns whether there was one.
    pub(super) fn finish_reset(&mut self) -> bool {
        let Some((vm, version, step, done)) = self.disks.begun.take() else { return false };
        if self.stored.vms.get(&vm).is_none_or(|stored| stored.version != version) {
            return true;
        }
        match step {
            Step::Renew => self.disks.done[0] += 1,
            Step::Finish => self.disks.done[1] += 1,
            _ => {}
        }
        self.change(&vm, |member| {
            if step == Step::Stop {
                (member.start, member.runs) = (Start::Needed, false);
            }
            member.reset.done = done;
        });
        true
    }

    /// Somebody gets the VM, as she read the pools.
    pub(super) fn nobody_gets_a_disk_that_somebody_else_had(&mut self, vm: &str, user: &str, read: &Pools) {
        let member = &self.stored.vms[vm];
        self.disks.owners.remove(vm);
        if member.disks_to_reset(read) == Ok(None) {
            return;
        }
        let claim = number::name(vm, VOLUME, member.reset.done.number(VOLUME));
        // She may write to it at once.
        let used = &mut self.disks.claims.get_mut(&claim).unwrap().users;
        assert!(used.is_empty(), "nobody gets a disk that somebody else had: {user} gets {claim} of {used:?}");
        used.insert(user.to_owned());
        let pod = self.disks.pods.get(vm);
        assert!(pod.is_none_or(|pod| *pod == claim), "nobody gets a disk that somebody else had: {pod:?} in {vm}");
        self.disks.owners.insert(vm.to_owned(), user.to_owned());
    }

    /// The guests of those who have VMs write.
    pub(super) fn guests_write(&mut self) {
        let disks = &mut self.disks;
        for (name, claim) in &disks.pods {
            let held = self.stored.vms.get(name).and_then(|member| member.held.as_ref());
            let Some(held) = held else {
                disks.owners.remove(name);
                continue;
            };
            let claim = disks.claims.get_mut(claim).unwrap_or_else(|| panic!("{name} has lost its claim {claim}"));
            claim.users.insert(held.user.clone());
            let is_one = disks.owners.get(name) != Some(&held.user) || claim.users.len() == 1;
            assert!(is_one, "nobody gets a disk that somebody else had: {name} with {claim:?}");
        }
    }

    fn only_what_the_pool_wants_is_deleted(&self, member: &Member, name: &str, uid: &str) {
        let claim = &self.disks.claims[name];
        assert!(member.deletes_claims(&self.stored.pools), "with Keep nothing is deleted: {name}");
        assert!(claim.vm.as_ref() == Some(&member.name), "claims of others are never deleted: {name}");
        assert!(
            claim.uid == uid && self.disks.pods.get(&member.name).is_none_or(|pod| pod != name),
            "{name} is in use"
        );
    }

    /// Both halves of the reconciles of all VMs.
    pub(super) fn reconcile_all(&mut self) {
        self.disks.reading = None;
        for vm in self.stored.vms.keys().cloned().collect::<Vec<_>>() {
            // A guest has some time for its end.
            loop {
                let before = self.versions;
                self.reconcile(&vm);
                self.reconcile(&vm);
                let is_ending = self.stored.vms[&vm].start != Start::Runs && self.disks.pods.contains_key(&vm);
                if before == self.versions && !is_ending {
                    break;
                }
            }
        }
        self.guests_write();
    }

    pub(super) fn at_rest_all_are_reset_that_can_be(&self) {
        for member in self.stored.vms.values() {
            let standing = look(member, &self.stored.pools);
            assert!(
                matches!(standing, Standing::Rest | Standing::Cannot(_)),
                "at rest all are reset that can be: {standing:?} of {member:?}"
            );
        }
    }
}

fn claim_of(name: &str, claim: &OneClaim) -> Claim {
    Claim { name: name.into(), uid: claim.uid.clone(), created: Some(at(claim.created)), vm: claim.vm.clone() }
}
