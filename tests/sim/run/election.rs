//! Managers that stand for election: one leads, and another one takes the lease over when it is not renewed. What goes wrong besides: a host is suspended
//! with its manager, the network of a manager is gone, the lease is deleted.

use std::time::Duration;

use serde_json::json;

use super::{Done, Run};
use crate::{
    api::{
        kinds::kind,
        request::{Request, Target, Verb},
    },
    manager::{NAMESPACE, Role},
    net::Net,
};

/// For how long a host is suspended: shorter than a manager leads without a renewal, between that and the duration of the lease, and longer.
const SUSPENDED: [Duration; 4] =
    [Duration::from_secs(3), Duration::from_secs(10), Duration::from_secs(14), Duration::from_secs(60)];

impl Run {
    /// Who does not hold the lease any more, because another manager does, writes nothing. (A lease that somebody has deleted nobody holds.)
    pub(super) fn may_write(&self, manager: usize, request: &Request) -> Done {
        let writes = matches!(request.verb, Verb::Create(_) | Verb::Replace(_) | Verb::Patch(_) | Verb::Delete(_));
        let manager = &self.managers[manager];
        if !self.faults.election || manager.role != Role::Manager || !writes || request.target.kind == kind("Lease") {
            return Ok(());
        }
        let lease = self.store.get(&lease()).map(|lease| &lease["spec"]["holderIdentity"]);
        match lease.and_then(|holder| holder.as_str()).filter(|holder| *holder != manager.identity) {
            Some(holder) => Err(format!("{} writes, and {holder} holds the lease", manager.identity)),
            None => Ok(()),
        }
    }

    pub(super) fn disturb_election(&mut self, manager: usize, any: usize) {
        match any % 4 {
            0 => {
                self.note("fault    the lease is deleted");
                let now = self.now();
                self.store.answer(now, &Request::of("kubectl-edit", lease(), Verb::Delete(json!({}))));
            }
            _ => {
                let time = SUSPENDED[any / 4 % SUSPENDED.len()];
                self.note(&format!(
                    "fault    the host of {} is suspended for {time:?}",
                    self.managers[manager].identity
                ));
                // What it sent is on its way for no longer than the lease lasts, and so it is lost.
                self.net(manager, |net, _| std::mem::take(&mut net.sent)).into_iter().for_each(Net::cut);
                self.managers[manager].suspended = self.elapsed + time;
            }
        }
    }

    pub(super) fn is_suspended(&self, manager: usize) -> bool {
        self.elapsed < self.managers[manager].suspended
    }

    /// All hosts go on.
    pub(super) fn resume(&mut self) {
        for manager in &mut self.managers {
            manager.suspended = manager.suspended.min(self.elapsed);
        }
    }

    /// A manager that has lost the lease ends, and so does a vmctl that is told to or can't go on.
    pub(super) fn remove_ended(&mut self) {
        let mut at = 0;
        while let Some(manager) = self.managers.get_mut(at) {
            let Some(why) = manager.ended() else {
                at += 1;
                continue;
            };
            let (role, identity) = (manager.role, manager.identity.clone());
            assert!(role == Role::Vmctl || self.faults.election, "the manager has ended: {why}");
            self.managers.remove(at);
            if role == Role::Vmctl {
                let (times, _) = self.ended.get(&identity).copied().unwrap_or_default();
                self.ended.insert(identity.clone(), (times + 1, self.elapsed));
            }
            self.note(&format!("{} has ended: {why}", if role == Role::Vmctl { "a vmctl" } else { identity.as_str() }));
        }
    }
}

fn lease() -> Target {
    Target::new(kind("Lease"), NAMESPACE, vm_operator::manager::leader::NAME)
}
