//! VMs that are never at rest: each write of the manager causes the next one.
//!
//! A template may render something else after each write, or another client may change what the manager applies. Neither can be known before. So
//! a VM that is written again and again although nobody changes it waits between two reconciles, and its condition ObjectsReady says so.
//!
//! ```text
//!  a reconcile has written ─▶ level + 1 ─▶ above BURST: the next reconcile waits, one for each EVERY
//!  time passes             ─▶ level - 1 for each EVERY ─▶ below CALM: the condition goes
//!  somebody changes the VM ─▶ level 0
//! ```

use std::{
    collections::{HashMap, hash_map::DefaultHasher},
    hash::{Hash, Hasher},
    sync::Mutex,
    time::Duration,
};

use kube::{ResourceExt, runtime::reflector::ObjectRef};
use tokio::time::Instant;

use crate::{
    api::{Problem, Reason, VirtualMachine},
    cluster::packed::PackedVm,
    process::lock,
};

/// How many writes in a row are usual: a start needs about six, and a guest that reboots all the time two each time.
const BURST: f64 = 40.0;
/// Below this a VM is at rest again.
const CALM: f64 = 20.0;
/// The pause between two writes of a VM that has used up its burst.
const EVERY: Duration = Duration::from_secs(5);

/// How often each VM was written lately.
#[derive(Default)]
pub struct Unrest(Mutex<HashMap<ObjectRef<PackedVm>, Level>>);

#[derive(Clone, Copy)]
struct Level {
    /// What people say of the VM: another value is a change.
    of: u64,
    writes: f64,
    at: Instant,
    is_restless: bool,
}

impl Level {
    fn at(self, now: Instant) -> Self {
        let leaked = now.saturating_duration_since(self.at).as_secs_f64() / EVERY.as_secs_f64();
        let writes = (self.writes - leaked).max(0.0);
        Self { writes, at: now, is_restless: self.is_restless && writes > CALM, ..self }
    }
}

/// A digest of what people and other clients write into a VM.
fn said(vm: &VirtualMachine) -> u64 {
    let mut hasher = DefaultHasher::new();
    vm.metadata.generation.hash(&mut hasher);
    vm.metadata.deletion_timestamp.is_some().hash(&mut hasher);
    vm.annotations().hash(&mut hasher);
    hasher.finish()
}

impl Unrest {
    /// How long the VM must wait before it is reconciled.
    pub fn pause(&self, name: &ObjectRef<PackedVm>, vm: &VirtualMachine, now: Instant) -> Option<Duration> {
        let level = lock(&self.0).get(name).copied().filter(|level| level.of == said(vm))?.at(now);
        (level.writes > BURST).then(|| EVERY.mul_f64(level.writes - BURST))
    }

    /// Notes that a reconcile has written something. Returns whether the VM has just become restless.
    pub fn wrote(&self, name: &ObjectRef<PackedVm>, vm: &VirtualMachine, now: Instant) -> bool {
        let mut levels = lock(&self.0);
        let of = said(vm);
        let before = levels.get(name).copied().filter(|level| level.of == of).map(|level| level.at(now));
        let before = before.unwrap_or(Level { of, writes: 0.0, at: now, is_restless: false });
        let writes = before.writes + 1.0;
        let is_restless = before.is_restless || writes > BURST;
        levels.insert(name.clone(), Level { writes, is_restless, ..before });
        is_restless && !before.is_restless
    }

    /// What the condition says of a restless VM, and when it is to be looked at again.
    pub fn problem(&self, name: &ObjectRef<PackedVm>, now: Instant) -> Option<(Problem, Duration)> {
        let level = lock(&self.0).get(name)?.at(now);
        let again = EVERY.mul_f64((level.writes - CALM).max(0.0) + 0.1);
        let message = format!(
            "the manager has written the VM's objects or its status again and again although nobody has changed the VM, so it waits {} s before \
             each time: a template renders something else after each write (does it read vm.status?), or another client changes the same \
             fields of an object",
            EVERY.as_secs()
        );
        level.is_restless.then(|| (Problem::new(Reason::Restless, message), again))
    }

    /// Forgets a VM that is gone.
    pub fn forget(&self, name: &ObjectRef<PackedVm>) {
        lock(&self.0).remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_support::vm;

    #[test]
    fn a_vm_that_is_written_without_end_is_slowed_and_named_until_it_is_at_rest_or_changed() {
        let (unrest, apple, name) = (Unrest::default(), vm(|_| ()), ObjectRef::new("apple"));
        let start = Instant::now();
        let mut now = start;
        let mut writes = 0;
        while now < start + Duration::from_secs(60) {
            match unrest.pause(&name, &apple, now) {
                Some(pause) => now += pause,
                None => {
                    unrest.wrote(&name, &apple, now);
                    writes += 1;
                    now += Duration::from_millis(50);
                }
            }
        }
        assert!((48..56).contains(&writes), "{writes}");
        let (problem, again) = unrest.problem(&name, now).unwrap();
        assert_eq!(problem.reason, Reason::Restless);
        assert!(unrest.problem(&name, now + again).is_none(), "it is at rest");
        // Who changes the VM does not wait.
        unrest.wrote(&name, &apple, now);
        let changed = vm(|vm| vm["metadata"]["generation"] = 4.into());
        assert!(unrest.pause(&name, &apple, now).is_some() && unrest.pause(&name, &changed, now).is_none());
        unrest.forget(&name);
        assert!(unrest.problem(&name, now).is_none());
    }
}
