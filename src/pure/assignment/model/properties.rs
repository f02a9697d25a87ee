//! What must be so, each a check of its name.

use std::collections::BTreeMap;

use super::*;

impl World {
    /// In the whole history of writes: a VM gets another user only when she takes it.
    pub(super) fn never_two_users_on_a_vm(&mut self) {
        let holders = self
            .stored
            .vms
            .iter()
            .map(|(name, member)| (name.clone(), member.held.as_ref().map(|held| held.user.clone())));
        let holders: BTreeMap<_, _> = holders.collect();
        let taken = self.taken.take();
        for (name, now) in &holders {
            if let (Some(Some(before)), Some(now)) = (self.history.get(name), now)
                && before != now
            {
                let by = taken.as_ref().filter(|(vm, _)| vm == name).map(|(_, by)| by);
                assert_eq!(by, Some(now), "never two users on a VM: {name} is {before}'s");
            }
        }
        self.history = holders;
    }

    pub(super) fn at_rest_at_most_one_vm_per_user_and_pool(&self) {
        let mut seen = BTreeMap::new();
        for (name, member) in self.stored.vms.iter().filter(|(_, member)| !member.is_deleted) {
            if let Some(held) = &member.held
                && let Some(other) = seen.insert((held.pool.clone(), held.user.clone()), name)
            {
                panic!(
                    "at rest at most one VM per user and pool: {} has {other} and {name} of {:?}",
                    held.user, held.pool
                );
            }
        }
    }

    pub(super) fn no_vm_is_lost(&self) {
        for (name, member) in self.stored.vms.iter().filter(|(_, member)| !member.is_deleted) {
            let Some(held) = &member.held else { continue };
            let pool = &self.stored.pools[held.pool.as_ref().unwrap()];
            assert!(pool.retention.is_err(), "no VM is lost: {name} is still {}'s, of pool {}", held.user, pool.name);
        }
    }

    pub(super) fn nobody_is_taken_within_retention_or_at_the_console(&mut self, vm: &str, pools: &Pools, by: &str) {
        let member = &self.stored.vms[vm];
        assert!(!member.console.is_connected, "nobody is taken at the console: {vm} by {by}");
        let Some(held) = &member.held else { return };
        let retention = pools.get(held.pool.as_ref().unwrap()).map(|pool| pool.retention.clone());
        let Some(Ok(retention)) = retention else {
            panic!("nobody is taken within retention: that of {vm}, which {by} takes, is not known")
        };
        // By the true time: a skew of five minutes takes nothing early.
        let used = at(self.used[vm]);
        let end = retention.end(used).unwrap();
        let now = at(self.time);
        assert!(
            end <= now,
            "a skew of five minutes takes nothing early: {vm} of {} is kept until {end}, and {by} takes it at {now}",
            held.user
        );
        if by != "the manager" {
            self.taken_from_others += 1;
            self.taken = Some((vm.to_owned(), by.to_owned()));
        }
    }

    /// In a pool with `spec.reset`, whatever happened to the VM before.
    pub(super) fn nobody_gets_a_disk_that_somebody_had(&mut self, vm: &str, pools: &Pools) {
        let is_reset = |name: &String| pools.get(name).is_some_and(|pool| pool.reset.is_some());
        if self.stored.vms[vm].pools.iter().any(is_reset) {
            assert!(!self.had.contains(vm), "nobody gets a disk that somebody had: {:?}", self.stored.vms[vm]);
            self.new_ones += 1;
        }
    }

    pub(super) fn repeating_changes_nothing(&self, call: &Call, vm: &String, members: &[Member], now: Timestamp) {
        let again = assign(&call.pool, &self.stored.pools, members, &call.who, now);
        assert_eq!(again, Ok(Step::Done(vm.clone())), "repeating changes nothing");
        let holder = self.stored.vms[vm].held.as_ref().map(|held| &held.user);
        assert_eq!(holder, Some(&call.who.user), "never two users on a VM: {vm}");
    }

    /// Nobody would have been before it: neither unassigned while this one is not, nor unused for longer, nor running while this one is not.
    pub(super) fn the_chosen_one_is_the_first(&self, pool: &str, read: &Stored, chosen: &str, now: Timestamp) {
        let unused_since = |member: &Member| {
            let held = member.held.as_ref()?;
            let last_used = held.last_used.unwrap().as_second();
            Some(member.console.since.map_or(last_used, |closed| closed.as_second().max(last_used)))
        };
        let is_free = |member: &Member| {
            let is_reset = |name: &String| read.pools.get(name).is_some_and(|pool| pool.reset.is_some());
            if member.pools.iter().any(is_reset) {
                return member.held.is_none() && member.is_clean(&read.pools);
            }
            let Some(held) = &member.held else { return true };
            let Some(Ok(retention)) = read.pools.get(held.pool.as_ref().unwrap()).map(|pool| &pool.retention) else {
                return false;
            };
            let since = at(unused_since(member).unwrap());
            retention.end(since).unwrap().as_second() + 300 <= now.as_second()
        };
        let chosen = &read.vms[chosen];
        assert!(
            chosen.pools.contains(pool) && is_free(chosen) && !chosen.is_surplus(&read.pools),
            "the chosen one is the first of the order: {} is not free",
            chosen.name
        );
        for other in read.vms.values().filter(|other| other.name != chosen.name && other.pools.contains(pool)) {
            if other.is_deleted
                || other.is_surplus(&read.pools)
                || other.start == Start::Refused
                || other.console.is_connected
                || !is_free(other)
            {
                continue;
            }
            let is_before = match (unused_since(other), unused_since(chosen)) {
                (None, Some(_)) => true,
                (Some(_), None) => false,
                (other_since, since) if other_since != since => other_since < since,
                _ if other.runs != chosen.runs => other.runs,
                _ => other.name < chosen.name,
            };
            assert!(!is_before, "the chosen one is the first of the order: {} and not {}", other.name, chosen.name);
        }
    }

    pub(super) fn no_right_no_vm(&self, call: &Call, refusal: &NotAssigned) {
        let is_refused = matches!(refusal, NotAssigned::NoRight { .. });
        assert_eq!(is_refused, call.who.rights.is_empty(), "no right, no VM: {refusal}");
    }

    pub(super) fn at_rest_no_assignment_of_a_pool_that_does_not_exist(&self) {
        for (name, member) in self.stored.vms.iter().filter(|(_, member)| !member.is_deleted) {
            let Some(held) = &member.held else { continue };
            let pool = held.pool.as_ref().unwrap();
            assert!(
                self.stored.pools.contains_key(pool),
                "deletions midway: {name} is {}'s of pool {pool}, which is gone",
                held.user
            );
        }
    }

    pub(super) fn the_user_keeps_another(&self, vm: &str, read: &Stored) {
        let held = read.vms[vm].held.as_ref().unwrap();
        let is_other = |other: &&Member| {
            other.name != vm
                && other.held.as_ref().is_some_and(|other| (&other.pool, &other.user) == (&held.pool, &held.user))
        };
        assert!(
            read.vms.values().any(|other| is_other(&other)),
            "no VM is lost: {vm} was the only one of {}",
            held.user
        );
    }
}

/// A call reads once more than it writes or is too late.
pub(super) fn it_ends(call: &Call) {
    assert!(
        call.reads <= call.writes + call.conflicts + 1,
        "it ends: {} reads, {} writes, {} conflicts",
        call.reads,
        call.writes,
        call.conflicts
    );
}
