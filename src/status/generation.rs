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

use super::{Reconciled, guest::Guest};
use crate::{
    api::conditions::{self, CHANGES_APPLIED},
    object::Rendered,
    observed::Object,
    plan::pending::PREFIX,
    power::{Wanted, is_restart_wanted},
    runner_config::ConfigFile,
};

/// Decides by the table above.
pub(super) fn guest_generation(reconciled: &Reconciled<'_>, guest: &Guest<'_>) -> Option<i64> {
    let (pod, generation) = (guest.pod?, reconciled.vm.metadata.generation?);
    let former = reconciled.vm.status.as_ref().and_then(|status| status.guest_generation);
    let has_everything = is_of_spec(reconciled, pod) && !guest.is_silent() && has_read_everything(reconciled, pod);
    Some(former.filter(|_| !has_everything).map_or(generation, |former| former.min(generation)))
}

/// Whether the spec wants this Pod as it is.
fn is_of_spec(reconciled: &Reconciled<'_>, pod: &Object) -> bool {
    let Reconciled { vm, observed: _, plan, rendered, outcome: _, source: _ } = *reconciled;
    let is_replaced = pod.deleting.is_some() || plan.power.replace_pod || is_restart_wanted(vm, pod);
    plan.power.wanted == Wanted::Up && !is_replaced && plan.pending.is_empty() && rendered.is_ok()
}

/// Whether the guest has what the newest configuration says. A runner of the VM-Operator does not say what it has read.
fn has_read_everything(reconciled: &Reconciled<'_>, pod: &Object) -> bool {
    let Some(status) = reconciled.vm.status.as_ref().filter(|_| !pod.has_legacy_runner()) else { return true };
    let waits = status.pending_changes.iter().any(|change| !change.path.starts_with(PREFIX))
        || conditions::find(&status.conditions, CHANGES_APPLIED).is_some_and(|applied| applied.status == "False");
    let has_read = |digest: &String| {
        let mut texts = reconciled.rendered.unwrap_or_default().iter().filter_map(configuration).peekable();
        texts.peek().is_none() || texts.any(|text| ConfigFile::digest(text) == *digest)
    };
    !waits && status.config_digest.as_ref().is_none_or(has_read)
}

/// The runner's configuration in an object.
fn configuration(object: &Rendered) -> Option<&str> {
    object.value["data"]["config.yaml"].as_str().filter(|_| object.key.kind == "ConfigMap")
}
