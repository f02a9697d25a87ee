//! The Pods that help the guest (`vmoperator.jdrupes.org/role: helper`): one serves a disk, copies one, or measures something. No guest runs in them.
//!
//! They are there before the guest and after it, so that a guest never runs without a disk that one of them serves. A guest is there as long as one
//! of its Pods exists, or something that makes it:
//!
//! | the VM | a guest | no helper exists | it is as rendered | it is not, or a restart is requested | it has failed | it is being deleted |
//! |---|---|---|---|---|---|---|
//! | should run | is not there | create it; the guest waits until it is ready | the guest waits until it is ready, or has succeeded | delete it, create it again | create it again, after a growing pause | wait |
//! | should run | is there | create it | leave it; Ready says if it is not ready | leave it, unless nobody has anything of it | create it again, after a growing pause | wait |
//! | should be down | is not there | nothing | delete it | delete it | delete it | wait |
//! | should be down | is there | nothing | leave it | leave it | leave it | nothing |
//! | is halting | | nothing | leave it | leave it | leave it | nothing |
//!
//! One that no template renders as a helper any more is as one that is not as rendered, and is not created again. A Pod that only has the name of a
//! rendered helper and in which a guest may run is a guest's Pod of other templates.
//!
//! A helper that can write to a disk is not created while another Pod can, and neither is the guest's ([`Planner::writer_beside`]). So one that serves a disk
//! is not created again beside what makes the guest's Pod, a StatefulSet, if that is not as rendered: its Pod may get any disk. One with a claim that is
//! being deleted is kept, unless the VM should be down: the claim's data goes with its last Pod.

use std::sync::Arc;

use super::{DeleteReason, Existing, Planner, Wait, pending};
use crate::{
    api, claims,
    object::{ObjectKey, Rendered},
    observed::Object,
    plan::{
        beside::is_beside,
        unstarted::{has_no_guest, has_started},
    },
    power::WantedPower,
    render::{
        mounts::mounted,
        pod::{is_guest, pod_specs, with_claims},
        references::of_volumes,
    },
};

impl<'a> Planner<'a> {
    /// The table at the head of this module.
    pub(super) fn helpers(&mut self) {
        if self.instances.helpers().next().is_none() && !self.runtime_rendered().any(|object| object.is_helper) {
            return;
        }
        let rendered = self.rendered.unwrap_or_default();
        // Before the waits for helpers themselves, which may need each other.
        let may_start = self.plan.waits.iter().all(|wait| is_beside(wait.key(), rendered));
        // It would serve the guest of a deleted VM.
        let may_start = may_start && self.instances.previous().is_none();
        let has_guest = self.has_guest();
        let is_left = |helper: &Arc<Object>| !self.runtime_rendered().any(|it| it.is_helper && it.key == helper.key);
        let left: Vec<_> = self.instances.helpers().filter(|helper| is_left(helper)).cloned().collect();
        for helper in left {
            self.left_helper(&helper, has_guest);
        }
        for object in self.runtime_rendered().filter(|object| object.is_helper) {
            let existing = self.existing(object);
            let is_guests = |found: &Object| self.instances.contains(found) && !found.is_helper();
            match (self.plan.power.wanted, existing) {
                (_, Existing::Present(found) | Existing::Ended(found) | Existing::Deleting(found))
                    if is_guests(found) => {}
                (WantedPower::Up, existing) => self.helper(object, existing, has_guest, may_start),
                (WantedPower::Down, existing) if !has_guest => self.end_helper(existing),
                (WantedPower::Down | WantedPower::Halting, _) => {}
            }
        }
    }

    /// What makes a Pod of the guest, or may do so.
    fn makers(&self) -> impl Iterator<Item = &'a Arc<Object>> {
        let is_of_guest = |maker: &Object| {
            let rendered = self.rendered.unwrap_or_default().iter().find(|it| it.key.is_same_object(&maker.key));
            rendered.is_none_or(is_guest) || self.instances.pods_of(maker).next().is_some()
        };
        self.instances.makers().filter(move |maker| is_of_guest(maker))
    }

    fn has_guest(&self) -> bool {
        self.instances.guests().next().is_some() || self.makers().next().is_some()
    }

    /// What can write to a disk to which the Pod that `object` is, or makes, could write, too. Two never write to one disk, so the object is not made
    /// as long as there is one. What makes a guest's Pod and is not as rendered may give it any disk.
    pub(super) fn writer_beside(&self, object: &Rendered) -> Option<&'a Arc<Object>> {
        let written = self.written_disks(object);
        if written.is_empty() {
            return None;
        }
        let gives = |maker: &&Arc<Object>| {
            let mut rendered = self.runtime_rendered().filter(|it| it.key == maker.key && maker.is_as(it));
            rendered.next().is_none_or(|it| self.written_disks(it).iter().any(|disk| written.contains(disk)))
        };
        let maker = || self.makers().filter(|_| object.is_helper).find(gives);
        self.instances.writer_of(&written, &object.key).or_else(maker)
    }

    /// The disks to which the Pod that an object is, or makes, can write. A disk that was taken out of the spec may still be in a guest.
    fn written_disks(&self, object: &Rendered) -> Vec<String> {
        let object = with_claims(object);
        let is_rendered = |name: &String| self.is_rendered(&ObjectKey::claim(name));
        let known = self.vm.status.iter().flat_map(|status| &status.claims).map(|claim| claim.name.clone());
        let disks = claims::possible_names(self.vm).chain(known.filter(|name| !is_rendered(name)));
        disks.filter(|disk| mounted(&object).any(|(claim, writes)| writes && claim == disk)).collect()
    }

    /// A helper that no template renders any more.
    fn left_helper(&mut self, helper: &Arc<Object>, has_guest: bool) {
        match self.plan.power.wanted {
            WantedPower::Up | WantedPower::Down if has_guest => {}
            WantedPower::Up | WantedPower::Down if helper.deleting.is_some() => self.wait_until_gone(helper),
            WantedPower::Down => self.delete_and_wait(helper, DeleteReason::Stop),
            WantedPower::Up if self.rendered.is_some() => self.delete_unwanted(helper, DeleteReason::NotRendered),
            WantedPower::Up | WantedPower::Halting => {}
        }
    }

    /// A helper of a VM that should run. `may_start`: nothing holds up the VM's start.
    fn helper(&mut self, object: &Rendered, existing: Existing<'_>, has_guest: bool, may_start: bool) {
        match existing {
            Existing::Absent if has_guest => self.helper_beside_guest(object),
            Existing::Absent => {
                if may_start {
                    self.create_runtime_object(object);
                }
                self.plan.waits.push(Wait::HelperNotReady(object.key.clone()));
            }
            Existing::Present(found) | Existing::Ended(found)
                if self.is_outdated(object, found) && (!has_guest || self.is_unused(found)) =>
            {
                self.delete_unwanted(found, DeleteReason::Renewed);
            }
            Existing::Present(found) => {
                self.keep_runtime_object(object, found);
                if !is_ready(found) {
                    self.plan.waits.push(Wait::HelperNotReady(object.key.clone()));
                }
            }
            Existing::Ended(found) if found.phase() == Some("Succeeded") => {}
            // It could not be made again.
            Existing::Ended(found)
                if self.claim_that_goes_with(found).is_some() || self.writer_beside(object).is_some() =>
            {
                self.plan.waits.push(Wait::HelperNotReady(object.key.clone()));
            }
            Existing::Ended(found) => self.retry_ended(found),
            Existing::Deleting(found) => self.wait_until_gone(found),
            Existing::NotOurs => self.plan.waits.push(Wait::NotOurs(object.key.clone())),
        }
    }

    /// A helper that does not exist while the guest does: it was lost, or it is new.
    fn helper_beside_guest(&mut self, object: &Rendered) {
        match self.writer_beside(object) {
            // It gets the disk at the next start.
            Some(writer) if !self.instances.is_stranger(writer) => {
                api::pending::add(&mut self.plan.pending, [pending::created_after_pod(object, writer)]);
            }
            _ => {
                if self.has_what_it_mounts(object) {
                    self.create_runtime_object(object);
                }
                self.plan.waits.push(Wait::HelperNotReady(object.key.clone()));
            }
        }
    }

    /// Whether a helper is made anew before the next start.
    fn is_outdated(&self, object: &Rendered, found: &Object) -> bool {
        !found.is_as(object) || !found.is_helper() || self.is_replaced(found)
    }

    /// Whether the plan waits for nothing that the Pod mounts.
    fn has_what_it_mounts(&self, object: &Rendered) -> bool {
        let mounts: Vec<_> = pod_specs(object).into_iter().flat_map(of_volumes).collect();
        !self.plan.waits.iter().any(|wait| mounts.iter().any(|mount| mount.key == *wait.key()))
    }

    /// Whether nobody has anything of a helper: it is not ready, and none of its containers has started, or no guest has started with it.
    fn is_unused(&self, helper: &Object) -> bool {
        let is_waiting = |pod: &Arc<Object>| has_no_guest(pod, self.observed.now);
        let has_no_user = || self.makers().next().is_none() && self.instances.guests().all(is_waiting);
        let mut reported = helper.container_statuses().peekable();
        let has_begun = reported.peek().is_none() || reported.any(has_started);
        !is_ready(helper) && (!has_begun || has_no_user())
    }

    /// A helper of a VM that should be down, and whose guest is gone.
    fn end_helper(&mut self, existing: Existing<'_>) {
        match existing {
            Existing::Present(found) | Existing::Ended(found) => self.delete_and_wait(found, DeleteReason::Stop),
            Existing::Deleting(found) => self.wait_until_gone(found),
            Existing::Absent | Existing::NotOurs => {}
        }
    }

    /// Deletes a helper although no person wants that, unless a claim would go with it.
    fn delete_unwanted(&mut self, helper: &Object, reason: DeleteReason) {
        match self.claim_that_goes_with(helper) {
            Some(_) => self.plan.waits.push(Wait::HelperNotReady(helper.key.clone())),
            None => self.delete_and_wait(helper, reason),
        }
    }
}

fn is_ready(pod: &Object) -> bool {
    pod.condition("Ready", "True").is_some()
}
