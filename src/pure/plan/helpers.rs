//! The Pods that help the guest (`vmoperator.jdrupes.org/role: helper`): one serves a disk, copies one, or measures something. No guest runs in them.
//!
//! They are there before the guest and after it, so that a guest never runs without a disk that one of them serves:
//!
//! | the VM | a Pod of its guest | no helper exists | it is as rendered | it is not, or a restart is requested | it has failed | it is being deleted |
//! |---|---|---|---|---|---|---|
//! | should run | does not exist | create it; the guest waits until it is ready | the guest waits until it is ready, or has succeeded | delete it, create it again | create it again, after a growing pause | wait |
//! | should run | exists | create it | leave it | leave it | create it again, after a growing pause | wait |
//! | should be down | does not exist | nothing | delete it | delete it | delete it | wait |
//! | should be down | exists | nothing | leave it | leave it | leave it | wait |
//! | is halting | | nothing | leave it | leave it | leave it | wait |
//!
//! One that no template renders any more is as one that is not as rendered, and is not created again.
//!
//! A helper that can write to a claim is not created while another Pod can ([`super::instances::Instances::writer_beside`]), and neither is the guest's.

use std::sync::Arc;

use super::{DeleteReason, Existing, Planner, Wait};
use crate::{
    object::{HASH_ANNOTATION, Rendered},
    observed::Object,
    plan::beside::is_beside,
    power::WantedPower,
};

impl Planner<'_> {
    /// The table at the head of this module.
    pub(super) fn helpers(&mut self) {
        let has_guest = self.instances.guests().next().is_some();
        let is_left = |helper: &Arc<Object>| !self.is_runtime_key(&helper.key);
        let left: Vec<_> = self.instances.helpers().filter(|helper| is_left(helper)).cloned().collect();
        for helper in left {
            self.left_helper(&helper, has_guest);
        }
        for object in self.runtime_rendered().filter(|object| object.is_helper) {
            let existing = self.existing(object);
            match self.plan.power.wanted {
                WantedPower::Up => self.helper(object, existing, has_guest),
                WantedPower::Down if !has_guest => self.end_helper(existing),
                WantedPower::Down | WantedPower::Halting => {}
            }
        }
    }

    /// A helper that no template renders any more.
    fn left_helper(&mut self, helper: &Arc<Object>, has_guest: bool) {
        match self.plan.power.wanted {
            _ if has_guest => {}
            WantedPower::Halting => {}
            WantedPower::Up | WantedPower::Down if helper.deleting.is_some() => self.wait_until_gone(helper),
            WantedPower::Down => self.delete_and_wait(helper, DeleteReason::Stop),
            WantedPower::Up if self.rendered.is_some() => self.delete_and_wait(helper, DeleteReason::NotRendered),
            WantedPower::Up => {}
        }
    }

    /// A helper of a VM that should run.
    fn helper(&mut self, object: &Rendered, existing: Existing<'_>, has_guest: bool) {
        match existing {
            Existing::Absent => {
                let rendered = self.rendered.unwrap_or_default();
                if self.plan.waits.iter().all(|wait| is_beside(wait.key(), rendered)) {
                    self.create_runtime_object(object);
                }
                if !has_guest {
                    self.plan.waits.push(Wait::HelperNotReady(object.key.clone()));
                }
            }
            Existing::Present(found) | Existing::Ended(found) if !has_guest && self.is_replaced(found) => {
                self.delete_and_wait(found, DeleteReason::Restart);
            }
            Existing::Present(found) | Existing::Ended(found) if !has_guest && is_outdated(object, found) => {
                self.delete_and_wait(found, DeleteReason::Changed);
            }
            Existing::Present(found) => {
                self.keep_runtime_object(object, found);
                if !has_guest && found.condition("Ready", "True").is_none() {
                    self.plan.waits.push(Wait::HelperNotReady(object.key.clone()));
                }
            }
            Existing::Ended(found) if found.phase() == Some("Succeeded") => {}
            Existing::Ended(found) => self.retry_ended(found),
            Existing::Deleting(found) if !has_guest => self.wait_until_gone(found),
            Existing::Deleting(_) => {}
            Existing::NotOurs => self.plan.waits.push(Wait::NotOurs(object.key.clone())),
        }
    }

    /// A helper of a VM that should be down, and whose guest is gone.
    fn end_helper(&mut self, existing: Existing<'_>) {
        match existing {
            Existing::Present(found) | Existing::Ended(found) => self.delete_and_wait(found, DeleteReason::Stop),
            Existing::Deleting(found) => self.wait_until_gone(found),
            Existing::Absent | Existing::NotOurs => {}
        }
    }
}

fn is_outdated(object: &Rendered, found: &Object) -> bool {
    found.annotations.get(HASH_ANNOTATION) != Some(&object.hash)
}
