//! The generation of the spec that the guest has.
//!
//! | the VM's Pod | what is known | the generation |
//! |---|---|---|
//! | does not exist | | none |
//! | exists, and the runner has not reported yet | nothing | the former one |
//! | is being replaced or stopped | the spec wants another guest than this one | the former one |
//! | runs | changes wait for the next start, QEMU refused one, or the runner has not read the newest `config.yaml` | the former one |
//! | runs | the guest has everything | the VM's |
//!
//! The *former one* is that in the status; if there is none, the Pod was created just now, for the VM's generation. So a wait for Running or
//! Booted after a change with a restart does not match the former guest.

use super::{Reconciled, guest::ReportedGuest};
use crate::{
    api::conditions::{self, CHANGES_APPLIED},
    object::Rendered,
    observed::Object,
    power::{WantedPower, is_restart_wanted},
    runner_config::{ConfigFile, paths::CONFIG_FILE},
};

/// The generation that the guest has, by the table above; and the one that manager and runner have taken, if that is another one: nothing is left
/// unread, but changes may wait for the next start, or be refused.
pub(super) fn generations(reconciled: &Reconciled<'_>, guest: &ReportedGuest<'_>) -> (Option<i64>, Option<i64>) {
    let (Some(pod), Some(generation)) = (guest.pod, reconciled.vm.metadata.generation) else { return (None, None) };
    let former = reconciled.vm.status.as_ref().and_then(|status| status.guest_generation);
    let is_taken = is_of_spec(reconciled, pod) && !guest.is_silent() && has_read(reconciled, pod);
    let has_everything = is_taken && reconciled.plan.pending.is_empty() && !is_missing_something(reconciled, pod);
    let of_guest = former.filter(|_| !has_everything).map_or(generation, |former| former.min(generation));
    (Some(of_guest), Some(generation).filter(|_| is_taken && of_guest != generation))
}

/// Whether the spec wants this Pod, although perhaps with changes at its next start.
fn is_of_spec(reconciled: &Reconciled<'_>, pod: &Object) -> bool {
    let Reconciled { vm, observed: _, plan, rendered, outcome: _, source: _ } = *reconciled;
    let is_replaced = pod.deleting.is_some() || plan.power.replace_pod || is_restart_wanted(vm, pod);
    plan.power.wanted == WantedPower::Up && !is_replaced && rendered.is_ok()
}

/// Whether the runner has read the newest configuration. A runner of the VM-Operator does not say what it has read.
pub(super) fn has_read(reconciled: &Reconciled<'_>, pod: &Object) -> bool {
    let status = reconciled.vm.status.as_ref().filter(|_| !pod.has_legacy_runner());
    let Some(digest) = status.and_then(|status| status.runner.config_digest.as_ref()) else { return true };
    let Ok(objects) = reconciled.rendered else { return false };
    let mut texts = objects.iter().filter_map(configuration).peekable();
    texts.peek().is_none() || texts.any(|text| ConfigFile::digest(text) == *digest)
}

/// Whether the runner says that the guest does not have all of its configuration.
fn is_missing_something(reconciled: &Reconciled<'_>, pod: &Object) -> bool {
    let Some(status) = reconciled.vm.status.as_ref().filter(|_| !pod.has_legacy_runner()) else { return false };
    status.pending_changes.iter().any(|change| !change.is_of_manager())
        || conditions::find(&status.conditions, CHANGES_APPLIED).is_some_and(|applied| applied.status == "False")
}

/// The runner's configuration in an object.
fn configuration(object: &Rendered) -> Option<&str> {
    object.value["data"][CONFIG_FILE].as_str().filter(|_| object.key.kind == "ConfigMap")
}
