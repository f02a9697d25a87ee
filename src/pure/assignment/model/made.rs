//! A pool whose VMs the manager makes. Its number and template change, it is deleted and made again, a person takes VMs out of it or deletes them,
//! and others make VMs of such names.

use serde_json::json;

use super::*;
use crate::assignment::{
    members::{MemberWrite, plan, wanted_names},
    template::Made,
};

const MADE: &str = "d";

impl World {
    /// Another number of VMs, another template, or another pool of the name.
    pub(super) fn change_made_pool(&mut self) {
        self.versions += 1;
        let former = self.stored.pools.get(MADE).cloned();
        let uid = match former.and_then(|pool| pool.uid) {
            Some(uid) if self.random.u8(..4) > 0 => uid,
            former => {
                // The garbage collector deletes the VMs of the former one, some of them later.
                let own = |member: &Member| member.made.owner.is_some() && member.made.owner == former;
                let gone: Vec<_> =
                    self.stored.vms.values().filter(|vm| own(vm)).map(|member| member.name.clone()).collect();
                for name in gone {
                    if self.random.bool() {
                        self.stored.vms.remove(&name);
                    } else {
                        self.change(&name, |member| member.is_deleted = true);
                    }
                }
                format!("uid-{}", self.versions)
            }
        };
        let reset = self.random.bool().then(|| json!({}));
        let pool = json!({
            "metadata": { "name": MADE, "uid": uid, "generation": self.versions },
            "spec": {
                "retention": "PT20M", "replicas": self.random.u8(..6), "warm": self.random.u8(..2), "reset": reset,
                "template": { "spec": { "vm": { "maximumCpus": self.random.u8(1..3) } } },
            },
        });
        self.stored.pools.insert(MADE.into(), Pool::read(&serde_json::from_value(pool).unwrap()));
    }

    /// What people do to the VMs of the pool.
    pub(super) fn disturb_made(&mut self, any: &str) {
        let is_made = self.stored.vms[any].made.owner.is_some();
        match self.random.u8(..6) {
            0 | 1 => self.change_made_pool(),
            2 => {
                let name = format!("{MADE}-{}", self.random.u8(..6));
                if !self.stored.vms.contains_key(&name) && self.random.u8(..4) == 0 {
                    self.create_vm(&name);
                }
            }
            3 if is_made => drop(self.stored.vms.remove(any)),
            4 if is_made => self.change(any, |member| {
                if !member.pools.remove(MADE) {
                    member.pools.insert(MADE.into());
                }
            }),
            5 => {
                // The garbage collector comes to the others.
                self.stored.vms.retain(|_, member| !(member.is_deleted && member.made.owner.is_some()));
            }
            _ => {}
        }
    }

    /// What the manager wants to write for the pools that make VMs.
    pub(super) fn member_writes(&mut self, members: &[Member]) -> Vec<(String, MemberWrite)> {
        let names = &mut self.names;
        let mut unheard_of = || {
            *names += 1;
            format!("{names:08x}")
        };
        let mut plan = |pool: &Pool| plan(pool, members, &BTreeSet::new(), &mut unheard_of);
        let plans = self.seen.pools.values().filter_map(|pool| Some((pool, plan(pool)?)));
        plans.flat_map(|(pool, plan)| plan.writes.into_iter().map(move |write| (pool.name.clone(), write))).collect()
    }

    pub(super) fn write_member(&mut self, read: &Stored, pool: &str, write: MemberWrite) {
        let pool = &read.pools[pool];
        let now = self.stored.pools.get(&pool.name);
        if now.is_none_or(|now| (now.generation, &now.uid) != (pool.generation, &pool.uid)) {
            return;
        }
        let template = pool.template.clone().unwrap();
        let made = Made {
            pool: Some(pool.name.clone()),
            owner: pool.uid.clone(),
            template: Some(template.hash),
            is_proven: true,
        };
        let name = pool.name.clone();
        match write {
            MemberWrite::Create(vm) => {
                // 409, if there is one.
                if !self.stored.vms.contains_key(&vm) {
                    self.create_vm(&vm);
                    let used = if pool.reset.is_some() { Use::Unused } else { Use::Used };
                    self.change(&vm, |member| {
                        (member.made, member.pools) = (made, BTreeSet::from([name]));
                        (member.used, member.is_marked) = (used, used == Use::Unused);
                    });
                    self.made[0] += 1;
                }
            }
            MemberWrite::Update { vm, version } => {
                if self.is_still(&vm, &version) {
                    self.nobody_has_a_vm_that_is_changed_or_deleted(&vm);
                    // The mark is no part of what is applied.
                    self.change(&vm, |member| (member.made, member.used, member.is_marked) = (made, Use::Used, false));
                    self.made[1] += 1;
                }
            }
            MemberWrite::Delete { vm, version, .. } => {
                if self.is_still(&vm, &version) {
                    self.nobody_has_a_vm_that_is_changed_or_deleted(&vm);
                    self.stored.vms.remove(&vm);
                    self.made[2] += 1;
                }
            }
        }
    }

    /// The claims of VMs that are new come to exist, some of them later. A few were there before.
    pub(super) fn make_disks(&mut self, all: bool) {
        let unused = self.stored.vms.values().filter(|vm| vm.used == Use::Unused);
        for vm in unused.map(|member| member.name.clone()).collect::<Vec<_>>() {
            if all || self.random.u8(..8) == 0 {
                let disks = if self.random.u8(..10) == 0 { Use::OldDisks } else { Use::New };
                self.change(&vm, |member| member.used = disks);
            }
        }
    }

    /// As the manager does: it asks for the VM first.
    pub(super) fn warm(&mut self, vm: &str) {
        let Some(member) = self.stored.vms.get(vm) else { return };
        if member.held.is_none() && !member.is_deleted && member.start == Start::Needed {
            self.made[3] += 1;
            self.change(vm, |member| (member.start, member.runs) = (Start::Runs, true));
        }
    }

    fn is_still(&self, vm: &str, version: &Option<String>) -> bool {
        self.stored.vms.get(vm).is_some_and(|member| member.version == *version)
    }

    // The properties.

    fn nobody_has_a_vm_that_is_changed_or_deleted(&self, vm: &str) {
        let member = &self.stored.vms[vm];
        assert!(
            member.held.is_none() && !member.console.is_connected,
            "nobody has a VM that is changed or deleted: {member:?}"
        );
        assert!(member.made.owner.is_some() || member.made.pool.is_some(), "{vm} is somebody else's");
    }

    /// All VMs that the pool wants exist with its template, but for those that wait; and no others of the pool, but for those that wait.
    pub(super) fn at_rest_the_pools_have_the_vms_that_they_want(&self) {
        let members: Vec<_> = self.stored.vms.values().cloned().collect();
        for pool in self.stored.pools.values().filter(|pool| pool.template.is_some()) {
            let plan = plan(pool, &members, &BTreeSet::new(), String::new).unwrap();
            assert!(plan.writes.is_empty(), "at rest there is nothing to do: {:?}", plan.writes);
            if pool.reset.is_some() {
                let own: Vec<_> = members.iter().filter(|member| member.is_made_by(pool)).collect();
                assert!(own.len() >= pool.replicas.unwrap() as usize, "VMs are missing at rest");
                let is_left = |member: &&&Member| {
                    let is_free = !member.is_in_use() && !member.is_deleted && member.pools.contains(MADE);
                    is_free && member.used == Use::Used
                };
                assert_eq!(own.iter().find(is_left), None, "it is to be replaced");
                continue;
            }
            let waits: BTreeSet<_> = plan.obstacles.iter().map(|obstacle| obstacle.vm().clone()).collect();
            let wanted: BTreeSet<_> = wanted_names(pool).collect();
            let hash = &pool.template.as_ref().unwrap().hash;
            for name in wanted.difference(&waits) {
                let member = self.stored.vms.get(name).unwrap_or_else(|| panic!("{name} is missing at rest"));
                assert!(member.made.template.as_ref() == Some(hash) && member.made.owner == pool.uid, "{member:?}");
            }
            let own = members.iter().filter(|member| member.made.owner == pool.uid && !member.is_deleted);
            for member in own.filter(|member| !wanted.contains(&member.name)) {
                assert!(waits.contains(&member.name), "{} is too many at rest", member.name);
            }
        }
    }

    pub(super) fn at_rest_as_many_are_warm_as_can_be(&self) {
        for pool in self.stored.pools.values() {
            let free = self.stored.vms.values().filter(|vm| {
                vm.pools.contains(&pool.name)
                    && vm.held.is_none()
                    && !vm.is_deleted
                    && vm.start != Start::Refused
                    && !vm.is_surplus(&self.stored.pools)
                    && vm.is_clean(&self.stored.pools)
            });
            let (runs, stopped): (Vec<_>, Vec<_>) = free.partition(|member| member.start == Start::Runs);
            assert!(
                runs.len() >= pool.warm || stopped.is_empty(),
                "at rest as many are warm as can be: {} of {} in {}",
                runs.len(),
                pool.warm,
                pool.name
            );
        }
    }
}
